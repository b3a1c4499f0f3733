"""The values that cross borders: they compare by content, read back what they print, refuse what they cannot hold."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kalign_core import decisions, records
from kalign_core.errors import BadArgument, UnknownName
from kalign_core.records import (
    Argument,
    Config,
    DeviceModel,
    Entry,
    EntryKey,
    Identity,
    Problem,
    Refutation,
    Tally,
    Toolchain,
    join_facts,
)

NAMES = st.text(string.ascii_letters + "_", min_size=1, max_size=8).filter(str.isidentifier)
WORDS = st.text(string.ascii_letters + string.digits + "_-.+", min_size=1, max_size=12).filter(
    lambda text: not text.removeprefix("-").isdecimal()
)
VALUES = st.one_of(st.integers(-(2**63), 2**63), st.booleans(), WORDS)
CONFIGS = st.dictionaries(NAMES, VALUES, max_size=5)


# --- configurations -----------------------------------------------------------------------------------------------


@given(CONFIGS)
def test_a_configuration_reads_back(knobs: dict[str, Any]) -> None:
    """``Config.parse`` of what a configuration prints is that configuration, and hashes alike."""
    config = Config(**knobs)
    again = Config.parse(str(config))
    assert (again, hash(again)) == (config, hash(config))


@given(CONFIGS)
def test_a_configuration_crosses_processes(knobs: dict[str, Any]) -> None:
    """A pickled or copied configuration equals the original."""
    config = Config(**knobs)
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == copy.copy(config) == config


def test_the_order_of_knobs_does_not_matter() -> None:
    """Configurations are equal when every knob is equal, in whatever order they were given."""
    one, other = Config(ROWS=2, num_warps=8), Config(num_warps=8, ROWS=2)
    assert (one, hash(one), str(one)) == (other, hash(other), "ROWS=2 num_warps=8")


def test_booleans_are_written_as_numbers() -> None:
    """A file holds 0 and 1 for switches, and a configuration with them equals the one with booleans."""
    config = Config(enable_fp_fusion=False, fast=True)
    assert str(config) == "enable_fp_fusion=0 fast=1"
    assert Config.parse(str(config)) == config


def test_a_configuration_is_a_mapping() -> None:
    """Knobs are read by name, as items or as attributes."""
    config = Config(ROWS=2, precision="ieee")
    assert dict(config) == {"ROWS": 2, "precision": "ieee"}
    assert (config.ROWS, config["precision"], len(config), "ROWS" in config) == (2, "ieee", 2, True)


def test_replacing_gives_a_new_one() -> None:
    """``replace`` leaves the configuration it was called on as it was."""
    config = Config(ROWS=2)
    assert (config.replace(ROWS=4, num_warps=1), config) == (Config(ROWS=4, num_warps=1), Config(ROWS=2))


def test_a_configuration_cannot_be_changed() -> None:
    """Setting an attribute is refused and says what to use."""
    with pytest.raises(AttributeError, match=r"config\.replace\(ROWS=4\)"):
        Config(ROWS=2).ROWS = 4


def test_a_missing_knob_is_an_attribute_error() -> None:
    """Asking for a knob that is not there names the knob, and ``hasattr`` works."""
    with pytest.raises(AttributeError, match="no knob 'ROWZ'"):
        Config(ROWS=2).ROWZ  # noqa: B018
    assert not hasattr(Config(ROWS=2), "ROWZ")


@pytest.mark.parametrize("value", [1.5, None, "two words", "", "a" * 65, "x=1", "naïve", [1], "4", "-4", 10**70])
def test_values_that_no_file_holds_are_refused(value: Any) -> None:
    """A value is an integer, a boolean or a short word that cannot be taken for either."""
    with pytest.raises(BadArgument, match="num_warps=") as caught:
        Config(num_warps=value)
    assert "Config(num_warps=4)" in caught.value.fix


@pytest.mark.parametrize("name", ["a b", "a=b", "", "1st"])
def test_names_that_no_file_holds_are_refused(name: str) -> None:
    """A knob's name is an identifier."""
    with pytest.raises(BadArgument, match="is no identifier"):
        Config(**{name: 1})


@pytest.mark.parametrize("text", ["ROWS", "ROWS=", "=1", "ROWS=1 ROWS=2", "a-b=1", "ROWS=eval()", "ROWS=a;b"])
def test_damaged_text_is_refused(text: str) -> None:
    """Text that no configuration prints raises, and nothing else than ``BadArgument``."""
    with pytest.raises(BadArgument, match="is not NAME=VALUE"):
        Config.parse(text)


@given(st.text(max_size=30))
def test_parsing_raises_one_class(text: str) -> None:
    """Whatever a file holds, parsing gives a configuration or ``BadArgument``."""
    try:
        parsed = Config.parse(text)
    except BadArgument:
        return
    assert Config.parse(str(parsed)) == parsed


def test_nothing_is_evaluated() -> None:
    """A word that names code stays a word or is refused."""
    assert Config.parse("winner=os.system").winner == "os.system"


# --- problems -----------------------------------------------------------------------------------------------------


PROBLEM = Problem(
    "rms_norm",
    (("T", 4), ("H", 8)),
    (Argument("x", "bf16", (8, 1)), Argument("bias", "none"), Argument("eps", "float", value=1e-6)),
)


def test_a_problem_reads_by_name() -> None:
    """Dimensions are attributes; dtypes and numbers are asked for by argument."""
    assert (PROBLEM.T, PROBLEM.H, PROBLEM.dtype("x"), PROBLEM.dtype("bias")) == (4, 8, "bf16", "none")
    assert (PROBLEM.value("eps"), PROBLEM.argument("x").strides) == (1e-6, (8, 1))


def test_a_missing_dimension_is_named() -> None:
    """A dimension that the kernel has not is an attribute error that names both."""
    with pytest.raises(AttributeError, match="rms_norm has no dimension 'M'"):
        PROBLEM.M  # noqa: B018


def test_a_missing_argument_is_named() -> None:
    """An argument that the kernel has not is an error that lists those it has."""
    with pytest.raises(UnknownName, match="x, bias, eps"):
        PROBLEM.argument("y")


def test_problems_cross_processes() -> None:
    """A pickled problem equals the original and serves as a key."""
    assert {PROBLEM: 1}[pickle.loads(pickle.dumps(PROBLEM))] == 1


@pytest.mark.parametrize(("dtype", "expected"), [("bf16", True), ("int", False), ("float", False), ("none", False)])
def test_tensors_are_told_from_numbers(dtype: str, expected: bool) -> None:
    """An argument is a tensor unless it is an integer, a float or absent."""
    assert Argument("a", dtype).is_tensor is expected


def test_every_dtype_has_a_size() -> None:
    """The table of sizes covers the table of names."""
    assert set(records.ITEM_BYTES) == set(records.DTYPES.values())


# --- devices ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("identity", "known"),
    [
        (Identity("v", "n", "GPU-1"), True),
        (Identity("v", "unknown", "GPU-1"), True),
        (Identity("v", "n", ""), False),
        (Identity("v", "n", "unknown"), False),
        (Identity("v", "n", "GPU-1", pci_device_id="unknown"), False),
        (Identity("v", "n", "GPU-1", must_match=(("vbios", "unknown"),)), False),
        (Identity("v", "n", "GPU-1", provenance=(("power_w", "unknown"),)), True),
    ],
)
def test_a_device_is_known_by_what_names_it(identity: Identity, known: bool) -> None:
    """An absent field does not make a device unknown, a field that could not be read does."""
    assert identity.known is known


def test_the_file_name_is_short_and_plain() -> None:
    """A file is named by vendor, PCI id and eight digits of the key, whatever the key holds."""
    identity = Identity("nvidia", "H200", "GPU-3f9a/:*", pci_device_id="10DE:2335")
    stem = identity.file_stem
    assert stem.startswith("nvidia-10de2335-")
    assert set(stem) <= set(string.ascii_lowercase + string.digits + "-")
    assert Identity("cpu", "x", "m" * 500).file_stem.count("-") == 1


def test_absent_facts_are_left_out() -> None:
    """A toolchain without a driver has no driver field, and facts come in one order."""
    assert Toolchain.of(triton="3.9.0", driver="", cuda="13.0").facts == (("cuda", "13.0"), ("triton", "3.9.0"))


def test_toolchains_have_ids() -> None:
    """An id is the same for the same facts and another for others."""
    one, same, other = Toolchain.of(a="1", b="2"), Toolchain.of(b="2", a="1"), Toolchain.of(a="1", b="3")
    assert (one.id == same.id, one.id == other.id, one.id[0], len(one.id)) == (True, False, "t", 9)


def test_a_target_is_written_as_users_type_it() -> None:
    """Backend and architecture, with a colon."""
    assert DeviceModel("cuda", "sm_90", 32, 32, 232448).target == "cuda:sm_90"


# --- decisions ----------------------------------------------------------------------------------------------------


def test_a_refutation_tells_where_and_how_to_see_it() -> None:
    """The text of a refutation holds the element, both values as numbers and as bytes, and the inputs."""
    text = str(Refutation("batch axis", "bytes differ", "spread", 3, "out", (1, 2), "8000", "0000", -0.0, 0.0, 2, 9))
    for part in ("batch axis", "out[1, 2]", "0.0 (0x0000)", "-0.0 (0x8000)", "2 of 9", "spread", "seed 3"):
        assert part in text


def test_a_refutation_without_an_element_gives_its_reason() -> None:
    """Where nothing was compared the reason stands alone."""
    assert str(Refutation("suite", "the check raised")) == "suite: the check raised"


def test_a_tally_is_one_line() -> None:
    """Four counts, in the order in which candidates fall."""
    assert str(Tally(4, 1, 2, 20)) == "refused=4 failed=1 refuted=2 timed=20"


def test_an_entry_without_measurements_says_nothing() -> None:
    """What was not measured is None, not zero."""
    key = EntryKey("k", "k/1", "T<=4", "x:bf16", "train", Toolchain.of(triton="3.9.0"), "9c1e", "2026.1")
    entry = Entry(key, Config(ROWS=1))
    assert (entry.cold_us, entry.warm_us, entry.mad_us, entry.digests) == (None, None, None, ())


def test_facts_are_joined_in_one_line() -> None:
    """Small tables stand in files as NAME=VALUE words."""
    assert join_facts([("T", 4096), ("M", 1)]) == "T=4096 M=1"


RECORDS = [
    value
    for module in (records, decisions)
    for value in vars(module).values()
    if dataclasses.is_dataclass(value) and isinstance(value, type)
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_records_are_frozen(record: Any) -> None:
    """What crosses a border cannot be changed behind the other side's back."""
    assert record.__dataclass_params__.frozen
    assert record.__doc__
    assert not record.__doc__.startswith(record.__name__ + "(")
