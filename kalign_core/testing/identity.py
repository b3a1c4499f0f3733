"""Who a device is: the one thing that decides whether another device's decisions are launched on this one.

An identity has to be the same in every process and different for every device. A key made of the model's name, the
architecture or the number of the device is neither: two boards of one model share it, and a mask renumbers them.
"""

from __future__ import annotations

import pickle
import re

import pytest

from kalign_core.hal.base import Platform
from kalign_core.hal.select import load_platform
from kalign_core.records import DeviceModel, Identity, PlatformRecord, Toolchain
from kalign_core.testing import elsewhere
from kalign_core.testing.records import RecordRules, assert_sane

Facts = tuple[tuple[str, str | int], ...]


class IdentityRules(RecordRules):
    """Rules for identities, toolchains and limits of the devices at hand.

    ``twins`` are identities of two devices of one model; ``unreadable`` is what the platform gives where nothing can
    be read. Both need more than one machine has, so that tests give them by faking what the platform reads.
    """

    @pytest.fixture
    def platform(self, record: PlatformRecord) -> Platform:
        """The platform on this machine, made as kalign makes it."""
        return load_platform(record)

    @pytest.fixture
    def device(self, platform: Platform) -> int:
        """The device that is looked at."""
        return platform.devices()[0]

    @pytest.fixture
    def twins(self, platform: Platform) -> tuple[Identity, ...]:
        """Two devices of one model: those of this machine, where it has them."""
        if len(platform.devices()) < 2:
            pytest.skip("one device here: override the fixture `twins` with two identities of one model")
        return tuple(platform.identity(device) for device in platform.devices())

    @pytest.fixture
    def unreadable(self) -> Identity:
        """The identity of a device of which nothing could be read."""
        pytest.skip("override the fixture `unreadable` with the identity of a device whose driver answers nothing")

    @pytest.fixture
    def identities_elsewhere(self) -> list[list[str]]:
        """Identity and toolchain of every device as text, from another process."""
        found: list[list[str]] = elsewhere.ask("identities", self._said("plugin"), self._said("name"))
        return found

    # --- identities -----------------------------------------------------------------------------------------------

    def test_an_identity_is_of_the_right_types(self, platform: Platform) -> None:
        """Every field is text, or pairs of a name and text or a whole number; what is absent is empty."""
        for device in platform.devices():
            identity = platform.identity(device)
            assert isinstance(identity, Identity)
            for name in ("vendor", "name", "key", "pci_device_id"):
                assert isinstance(getattr(identity, name), str), f"{name} is {getattr(identity, name)!r}"
            for facts in (identity.must_match, identity.provenance):
                assert_facts(facts)

    def test_an_identity_names_a_file(self, platform: Platform, device: int) -> None:
        """Vendor and key make a file name of plain lower-case words."""
        assert re.fullmatch(r"[a-z0-9_]+(-[0-9a-f]+){1,2}", platform.identity(device).file_stem)

    def test_an_identity_is_a_value(self, platform: Platform, device: int) -> None:
        """It hashes, survives pickling and is the same when asked for again."""
        identity = platform.identity(device)
        again = platform.identity(device)
        assert (again, hash(again)) == (identity, hash(identity))
        assert pickle.loads(pickle.dumps(identity)) == identity  # noqa: S301  # our own bytes

    def test_an_identity_is_the_same_in_every_process(
        self, platform: Platform, identities_elsewhere: list[list[str]]
    ) -> None:
        """Another process finds the same devices under the same identities, or nothing stored would be found."""
        assert [who for who, _ in identities_elsewhere] == [repr(platform.identity(d)) for d in platform.devices()]

    def test_the_key_says_more_than_the_model(self, platform: Platform) -> None:
        """What names a device is neither its model's name nor its number, which other boards have as well."""
        for device in platform.devices():
            identity, model = platform.identity(device), platform.model(device)
            assert own_words(identity, model), f"{identity.key!r} is the name of a model or a number, not of a device"

    def test_two_boards_do_not_share_a_file(self, twins: tuple[Identity, ...]) -> None:
        """Devices of one model have keys and files of their own."""
        assert len({identity.key for identity in twins}) == len(twins)
        assert len({identity.file_stem for identity in twins}) == len(twins)

    def test_what_cannot_be_read_is_unknown(self, unreadable: Identity) -> None:
        """Where nothing can be read nothing is raised, and the device is one for which nothing may be stored."""
        assert isinstance(unreadable, Identity)
        assert not unreadable.known

    # --- toolchain and limits -------------------------------------------------------------------------------------

    def test_a_toolchain_is_facts(self, platform: Platform, device: int) -> None:
        """Sorted names, each once, with text; those that decide the compiled code are among them."""
        toolchain = platform.toolchain(device)
        assert isinstance(toolchain, Toolchain)
        assert_facts(toolchain.facts)
        assert list(toolchain.facts) == sorted(toolchain.facts)
        assert [name for name, value in toolchain.facts if not isinstance(value, str) or not value] == []
        assert {"torch", "triton"} <= {name for name, _ in toolchain.facts}

    def test_a_toolchain_is_the_same_in_every_process(
        self, platform: Platform, identities_elsewhere: list[list[str]]
    ) -> None:
        """Another process of the same environment finds the same facts, or every process would tune anew."""
        assert [facts for _, facts in identities_elsewhere] == [
            repr(platform.toolchain(device)) for device in platform.devices()
        ]

    def test_the_device_has_limits(self, platform: Platform) -> None:
        """Each device's model is sane and stays what it is."""
        for device in platform.devices():
            model = platform.model(device)
            assert isinstance(model, DeviceModel)
            assert_sane(model)
            assert platform.model(device) == model

    def test_the_compile_target_is_the_model_s(self, platform: Platform, device: int) -> None:
        """Code is compiled for the backend and warp size that candidates are chosen for."""
        target, model = platform.compile_target(device), platform.model(device)
        assert target is None or (target[0], target[2]) == (model.backend, model.warp_size)


def assert_facts(facts: Facts) -> None:
    """Assert that ``facts`` are pairs of a name, each once, and text or a whole number."""
    assert isinstance(facts, tuple)
    names = [name for name, _ in facts]
    assert [name for name in names if not isinstance(name, str) or not name] == []
    assert len(set(names)) == len(names)
    assert [(name, value) for name, value in facts if type(value) not in (str, int)] == []


def own_words(identity: Identity, model: DeviceModel) -> list[str]:
    """Words of an identity's key that are neither words of the model's name nor small numbers."""
    common = set(_words(f"{identity.vendor} {identity.name} {identity.pci_device_id} {model.backend} {model.arch}"))
    return [
        word for word in _words(identity.key)
        if word not in common and word != "device" and not (word.isdecimal() and int(word) < 1024)
    ]  # fmt: skip


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())
