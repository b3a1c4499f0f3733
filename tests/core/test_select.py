"""Which platform is used and why, on machines that are described here and on the one at hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kalign_core import embedded, isolate
from kalign_core import plugins as loader
from kalign_core.environment import Environment, TorchBuild
from kalign_core.errors import NoPlatform
from kalign_core.hal.select import Selection, load_platform, select
from kalign_core.hookspecs import hookimpl
from kalign_core.plugins import Plugins
from kalign_core.records import Evidence, PlatformRecord

# --- simulated machines -------------------------------------------------------------------------------------------

GREEN, RED = "/dev/green0", "/dev/red0"
FOR_GREEN = TorchBuild("2.11.0", cuda="13.0")
FOR_RED = TorchBuild("2.11.0", hip="7.0")
FOR_HOST = TorchBuild("2.11.0")


def vendor(device: str, build: str) -> Callable[[Environment], Evidence]:
    """A probe as vendors write them: a device file, and a torch that was built for it."""

    def probe(environment: Environment) -> Evidence:
        if not environment.has(device):
            return Evidence(False, f"there is no {device}")
        if environment.torch is None:
            return Evidence(False, "torch is not installed")
        if getattr(environment.torch, build) is None:
            return Evidence(False, f"torch was not built for {build}")
        return Evidence(True, device)

    return probe


def raising(error: BaseException) -> Callable[[Environment], Evidence]:
    def probe(environment: Environment) -> Evidence:
        raise error

    return probe


def providing(record: PlatformRecord) -> Callable[[], list[PlatformRecord]]:
    @hookimpl
    def kalign_platforms() -> list[PlatformRecord]:
        return [record]

    return kalign_platforms


def plugins_of(*records: PlatformRecord) -> Plugins:
    """The embedded platform, then one plugin for each of ``records``."""
    plugins = Plugins().with_module("core-platforms", embedded)
    for record in records:
        plugin = ModuleType(f"plugin_{record.name}")
        vars(plugin).update(KALIGN_API=1, kalign_platforms=providing(record))
        plugins = plugins.with_module(f"{record.name}-plugin", plugin)
    assert [row.reason for row in plugins.rows] == [""] * (len(records) + 1)
    return plugins


GREEN_RECORD = PlatformRecord("green", vendor(GREEN, "cuda"), "nowhere:Green")
RED_RECORD = PlatformRecord("red", vendor(RED, "hip"), "nowhere:Red")
NPU_RECORD = PlatformRecord("npu", lambda environment: Evidence(True, "/dev/npu0"), "nowhere:Npu")
BOTH = (GREEN_RECORD, RED_RECORD)


@dataclass(frozen=True)
class Machine:
    """One machine, what is asked of it, and what has to come of it."""

    rule: str
    chosen: str | None
    why: str
    files: tuple[str, ...] = ()
    torch: TorchBuild | None = FOR_HOST
    triton: bool = True
    loaded: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    records: tuple[PlatformRecord, ...] = BOTH
    wanted: str | None = None

    def select(self, root: Path) -> Selection:
        (root / "dev").mkdir()
        for file in self.files:
            (root / file.lstrip("/")).touch()
        environment = Environment(self.variables, root, self.torch, self.triton, frozenset(self.loaded))
        return select(environment, plugins_of(*self.records), self.wanted)


FIRST = "triton was imported first; import kalign first or export TRITON_INTERPRET=1"
ON = {"TRITON_INTERPRET": "1"}
MACHINES = [
    Machine("a green card and its torch", "green", "the only usable platform: /dev/green0", (GREEN,), FOR_GREEN),
    Machine("a red card and its torch", "red", "the only usable platform: /dev/red0", (RED,), FOR_RED),
    Machine("both cards, green torch", "green", "the only usable platform", (GREEN, RED), FOR_GREEN),
    Machine("both cards, red torch", "red", "the only usable platform", (GREEN, RED), FOR_RED),
    Machine("no card", "cpu", "nothing else can be used here (green: there is no /dev/green0; red:"),
    Machine("no card, green torch", "cpu", "there is no /dev/green0", (), FOR_GREEN),
    Machine("a green card, torch for the host", "cpu", "torch was not built for cuda", (GREEN,)),
    Machine("a red card, torch for the host", "cpu", "torch was not built for hip", (RED,)),
    Machine("a green card, red torch", "cpu", "torch was not built for cuda", (GREEN,), FOR_RED),
    Machine("a red card, green torch", "cpu", "torch was not built for hip", (RED,), FOR_GREEN),
    Machine("no torch", None, "pip install torch triton", torch=None),
    Machine("a green card, no torch", None, "green: torch is not installed", (GREEN,), torch=None),
    Machine("no triton", None, "cpu: triton is not installed", triton=False),
    Machine("triton first, no card", None, FIRST, loaded=("triton",)),
    Machine("triton first, in time for the interpreter", "cpu", "", loaded=("torch", "triton"), variables=ON),
    Machine("triton first, interpreter off", None, FIRST, loaded=("triton",), variables={"TRITON_INTERPRET": "0"}),
    Machine("torch first", "cpu", "nothing else", loaded=("torch",)),
    Machine("triton first, a green card", "green", "", (GREEN,), FOR_GREEN, loaded=("torch", "triton")),
    Machine("no vendor's plugin", "cpu", "there is nothing else", (GREEN,), FOR_GREEN, records=()),
    Machine("forced to the host", "cpu", "KALIGN_PLATFORM=cpu: ", (GREEN,), FOR_GREEN, wanted="cpu"),
    Machine("forced to what would be chosen", "green", "KALIGN_PLATFORM=green", (GREEN,), FOR_GREEN, wanted="green"),
    Machine("forced to a card that is not there", None, "KALIGN_PLATFORM=red cannot be used: there is no /dev/red0",
            (GREEN,), FOR_GREEN, wanted="red"),
    Machine("forced, saying what else can be used", None, "unset KALIGN_PLATFORM, or export KALIGN_PLATFORM=green",
            (GREEN,), FOR_GREEN, loaded=("triton",), wanted="red"),
    Machine("forced to the host too late", None, FIRST, (GREEN,), FOR_GREEN, loaded=("triton",), wanted="cpu"),
    Machine("forced to an unknown name", None, "names no platform; did you mean green? known: cpu, green, red",
            (GREEN,), FOR_GREEN, wanted="gren"),
    Machine("two that can be used", None, "several platforms can be used: green (/dev/green0), npu (/dev/npu0); "
            "export KALIGN_PLATFORM=green or export KALIGN_PLATFORM=npu", (GREEN,), FOR_GREEN,
            records=(*BOTH, NPU_RECORD)),
    Machine("two that can be used, one forced", "npu", "KALIGN_PLATFORM=npu", (GREEN,), FOR_GREEN,
            records=(*BOTH, NPU_RECORD), wanted="npu"),
    Machine("a probe that raises beside a card", "green", "", (GREEN,), FOR_GREEN,
            records=(*BOTH, PlatformRecord("npu", raising(OSError("no bus")), "a:b"))),
    Machine("a probe that exits", "cpu", "npu: its probe raised SystemExit: 3",
            records=(PlatformRecord("npu", raising(SystemExit(3)), "a:b"),)),
    Machine("a probe that raises, forced", None, "KALIGN_PLATFORM=npu cannot be used: its probe raised KeyError: 'x'",
            records=(PlatformRecord("npu", raising(KeyError("x")), "a:b"),), wanted="npu"),
    Machine("a probe that gives no evidence", "cpu", "npu: its probe gave True, not Evidence",
            records=(PlatformRecord("npu", lambda environment: True, "a:b"),)),  # type: ignore[arg-type, return-value]
]  # fmt: skip


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.rule)
def test_machine(machine: Machine, tmp_path: Path) -> None:
    """On each machine the platform that its rule calls for is chosen, and the reason is in words."""
    selection = machine.select(tmp_path)
    assert selection.chosen == machine.chosen
    assert machine.why in selection.why
    assert "\n" not in selection.why
    assert (selection.record and selection.record.name) == machine.chosen


def test_every_platform_has_a_row(tmp_path: Path) -> None:
    """The table lists every platform with its plugin, also those that were not chosen."""
    machine = Machine("", "green", "", (GREEN,), FOR_GREEN, wanted="green")
    rows = [(row.name, row.plugin, row.usable) for row in machine.select(tmp_path).rows]
    assert rows == [("cpu", "core-platforms", True), ("green", "green-plugin", True), ("red", "red-plugin", False)]


def test_broken_plugins_are_part_of_the_reason(tmp_path: Path) -> None:
    """Where nothing better can be used the reason names the plugins that did not load."""
    broken = plugins_of().with_module("npu", ModuleType("plugin_npu"))
    selection = select(Environment(root=tmp_path, torch=FOR_HOST, triton=True), broken)
    assert "broken plugin npu: KALIGN_API is None" in selection.why


def test_probes_print_nothing_to_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a probe prints does not reach the data that commands write."""

    def probe(environment: Environment) -> Evidence:
        print("looking for a device")
        return Evidence(True, "found")

    assert select(Environment(root=tmp_path), plugins_of(PlatformRecord("npu", probe, "a:b"))).chosen == "npu"
    assert capsys.readouterr().out == ""


@given(
    st.lists(st.tuples(st.booleans(), st.booleans()), max_size=4),
    st.sampled_from([None, "p0", "p1", "p2", "p3", "cpu", "nobody"]),
    st.booleans(),
)
def test_selection_holds_its_promises(kinds: list[tuple[bool, bool]], wanted: str | None, torch: bool) -> None:
    """Whatever there is, what is chosen is usable, is what was asked for, and is a fallback only for want of others."""
    records = [
        PlatformRecord(f"p{n}", lambda _, usable=usable: Evidence(usable, "so"), "a:b", fallback=fallback)  # type: ignore[misc]
        for n, (usable, fallback) in enumerate(kinds)
    ]
    environment = Environment(root=Path("/nowhere"), torch=FOR_HOST if torch else None, triton=True)
    selection = select(environment, plugins_of(*records), wanted)
    usable = {row.name for row in selection.rows if row.usable}
    others = {record.name for record in records if not record.fallback} & usable
    if wanted is not None:
        assert selection.chosen == (wanted if wanted in usable else None)
    elif len(others) == 1:
        assert {selection.chosen} == others
    elif others:
        assert selection.chosen is None
    else:
        assert (selection.chosen in usable) if usable else (selection.chosen is None)
    assert selection.why


# --- making the platform ------------------------------------------------------------------------------------------

PLATFORM_CLASS = """
from kalign_core.hal.base import Platform
print("loading the driver")

class Npu(Platform):
    name = "npu"
    device_type = "npu"
    launch_options = frozenset()
    made = 0

    def __init__(self):
        type(self).made += 1

Npu.__abstractmethods__ = frozenset()

class Exits(Npu):
    def __init__(self):
        raise SystemExit("no license")

class Misnamed(Npu):
    name = "tpu"
"""


@pytest.fixture
def npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], PlatformRecord]:
    """``npu("module:Class")``: the record of a platform of that factory; ``plugin_platform`` has some."""
    (tmp_path / "plugin_platform.py").write_text(PLATFORM_CLASS)
    monkeypatch.syspath_prepend(tmp_path)
    return lambda factory: PlatformRecord("npu", NPU_RECORD.probe, factory)


def test_the_factory_is_imported_and_called(
    npu: Callable[[str], PlatformRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    """A platform is made from the class its record names, and what a driver prints stays off stdout."""
    assert load_platform(npu("plugin_platform:Npu")).name == "npu"
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        ("no_such_module:Npu", "no_such_module:Npu failed: ModuleNotFoundError"),
        ("plugin_platform:Gone", "plugin_platform:Gone failed: AttributeError"),
        ("plugin_platform:Exits", "plugin_platform:Exits failed: SystemExit: no license"),
        ("builtins:dict", "builtins:dict gave {}"),
        ("plugin_platform:Misnamed", "with name = 'npu'"),
    ],
)
def test_a_factory_that_fails_is_no_platform(npu: Callable[[str], PlatformRecord], factory: str, reason: str) -> None:
    """Whatever goes wrong in making a platform is NoPlatform with the reason."""
    with pytest.raises(NoPlatform, match=reason):
        load_platform(npu(factory))


def test_a_slow_probe_is_warned_of(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that takes more than five seconds, in every process, is named with the plugin that it is of."""
    monkeypatch.setattr(loader, "_warned", set())
    plugins = plugins_of(PlatformRecord("npu", lambda environment: Evidence(True, "found"), "a:b"))
    monkeypatch.setattr(isolate, "time", SimpleNamespace(monotonic=itertools.count(0, 6).__next__))
    assert select(Environment(), plugins).chosen == "npu"
    expected = "plugin 'npu-plugin' takes more than 5 s to look for npu; without it: "
    assert any(record.getMessage().startswith(expected) for record in caplog.records)
