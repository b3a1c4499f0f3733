"""docs/hooks.md is true: its signatures are the hooks', its plugins run, and what it says of faults is what is said."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import logging
import os
import re
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kalign_core import isolate
from kalign_core import plugins as loader
from kalign_core.environment import Environment, TorchBuild
from kalign_core.errors import NoPlatform
from kalign_core.hal.select import load_platform, select
from kalign_core.plugin_check import HOOKS
from kalign_core.plugins import Plugins
from kalign_core.records import Evidence, PlatformRecord
from kalign_core.session import Session
from kalign_core.testing import CheckConformance, StrategyConformance
from tests.core import tuner_samples
from tests.core.tuner_samples import EFFORT, Bed, builtin
from tests.meta.test_repository import arguments_for
from tests.search_path import search_path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/hooks.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## `(kalign_\w+)`\n(.*?)(?=^## )", TEXT, re.DOTALL | re.MULTILINE))


def block(hook: str, language: str) -> str:
    """The one block of a language in the section of ``hook``."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", SECTIONS[hook], re.DOTALL | re.MULTILINE)
    return str(found)


def plugin_of(hook: str) -> types.ModuleType:
    """The plugin in the section of ``hook``, as a module."""
    module = types.ModuleType(f"documented_{hook}")
    exec(compile(block(hook, "python"), f"docs/hooks.md, {hook}", "exec"), vars(module))
    return module


# --- signatures and plugins ---------------------------------------------------------------------------------------


def test_every_hook_has_a_section() -> None:
    """The page has a section for each hook, in the order of the specifications, and for nothing else."""
    assert list(SECTIONS) == list(HOOKS)


@pytest.mark.parametrize("hook", HOOKS)
def test_signatures_are_exact(hook: str) -> None:
    """The signature on the page is the specification's, argument for argument and type for type."""
    signature = inspect.signature(HOOKS[hook])
    shown = str(signature.replace(parameters=list(signature.parameters.values())[1:])).replace("'", "")
    assert block(hook, "") == f"{hook}{shown}\n"


@pytest.mark.parametrize("hook", HOOKS)
def test_plugins_run(hook: str) -> None:
    """The plugin on the page loads as it stands, and answers its hook."""
    plugins = Plugins(strict=True).with_module("documented", plugin_of(hook))
    assert [(row.name, row.state, row.reason) for row in plugins.rows] == [("documented", "active", "")]
    (answer,) = plugins.ask(hook, **arguments_for(hook))
    assert answer.error is None
    assert answer.value is not None or hook == "kalign_veto"


@pytest.mark.parametrize(
    ("environment", "usable"),
    [(Environment(), False), (Environment(torch=TorchBuild("2.11.0"), root=Path("/nonexistent")), False)],
)
def test_the_documented_probe_says_no(environment: Environment, usable: bool) -> None:
    """The probe on the page gives evidence with something to do about it."""
    evidence: Evidence = plugin_of("kalign_platforms").probe(environment)
    assert evidence.usable is usable
    assert re.search("type:|is the driver loaded", evidence.reason)


def test_the_documented_probe_says_yes(tmp_path: Path) -> None:
    """With the device's file and a torch there, the probe on the page says that the platform can be used."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/npu0").touch()
    environment = Environment(root=tmp_path, torch=TorchBuild("2.11.0"))
    assert plugin_of("kalign_platforms").probe(environment) == Evidence(True, "torch 2.11.0, /dev/npu0")


def test_the_documented_veto_refuses() -> None:
    """The veto on the page refuses what it is written for and nothing else."""
    asked, config = arguments_for("kalign_veto"), arguments_for("kalign_veto")["config"]
    answers = {
        warps: plugin_of("kalign_veto").kalign_veto(asked["model"], config.replace(num_warps=warps))
        for warps in (16, 32)
    }
    assert answers[16] is None
    assert answers[32].startswith("num_warps=32 is 1024 threads")


class DocumentedPlugin:
    """Finds a plugin of the page where a suite looks for a module."""

    @pytest.fixture
    def module(self) -> types.ModuleType:
        """The plugin on the page."""
        return plugin_of(type(self).plugin.removeprefix("documented_"))  # type: ignore[attr-defined]

    def test_importing_the_plugin_touches_no_device(self) -> None:
        """The plugin on the page is no file; that its text imports only records is all there is to see."""
        text = block(type(self).plugin.removeprefix("documented_"), "python")  # type: ignore[attr-defined]
        assert set(re.findall(r"^from (\S+)", text, re.MULTILINE)) <= {"kalign_core", "kalign_core.records"}


class TestStrategy(DocumentedPlugin, StrategyConformance):
    """The strategy on the page."""

    plugin = "documented_kalign_strategies"
    strategy = "twice"


class TestInputs(DocumentedPlugin, CheckConformance):
    """The input family on the page."""

    plugin = "documented_kalign_inputs"


class TestChecks(DocumentedPlugin, CheckConformance):
    """The check on the page."""

    plugin = "documented_kalign_checks"


# --- faults -------------------------------------------------------------------------------------------------------

FAULT = 'raise OSError("libnpu.so: not found")'
RAISING = "@hookimpl\ndef {hook}({arguments}):\n    " + FAULT


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What kalign warned of, a kernel's name as it stands on the page."""
    return [
        r.getMessage().replace("for double:", "for rms_norm:") for r in caplog.records if r.levelno >= logging.WARNING
    ]


def documented(message: str) -> bool:
    """Whether ``message`` stands on the page as it is."""
    return f"`{message}`" in TEXT


@pytest.fixture(autouse=True)
def warned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings are given once per process; every test sees its own."""
    from kalign_core.tuner import space

    monkeypatch.setattr(loader, "_warned", set())
    monkeypatch.setattr(space, "_warned", set())


def in_memory(source: str) -> Plugins:
    """The built-in plugins and one called npu."""
    return builtin().with_module("npu", tuner_samples.module(source))


def test_a_plugin_that_cannot_be_loaded(
    tmp_path: Path, child: Callable[..., Any], distribution: Callable[..., str]
) -> None:
    """A plugin whose import raises is not used, with the words of the page."""
    distribution(tmp_path, "npu", f"KALIGN_API = 1\n{FAULT}")
    done = child("import kalign_core.hal", tmp_path)
    (line,) = (line for line in done.stderr.splitlines() if "'npu'" in line)
    assert documented(line)


def test_a_probe_that_raises() -> None:
    """A probe that raises is a platform that cannot be used, with the words of the page."""

    def probe(environment: Environment) -> Evidence:
        raise OSError("libnpu.so: not found")

    plugins = Plugins()
    plugins._platforms = {"npu": ("npu", PlatformRecord("npu", probe, "a:b"))}
    (row,) = select(Environment(), plugins).rows
    assert not row.usable
    assert documented(row.reason)


def test_a_platform_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A platform whose class raises is an error for who chose it, with the words of the page."""
    module = types.ModuleType("my_package.platform")
    exec(f"class NpuPlatform:\n    def __init__(self):\n        {FAULT}", vars(module))
    monkeypatch.setitem(sys.modules, "my_package", types.ModuleType("my_package"))
    monkeypatch.setitem(sys.modules, "my_package.platform", module)
    record = PlatformRecord("npu", lambda environment: Evidence(True, "here"), "my_package.platform:NpuPlatform")
    with pytest.raises(NoPlatform) as raised:
        load_platform(record)
    assert documented(raised.value.what)


def test_candidates_that_raise(caplog: pytest.LogCaptureFixture) -> None:
    """A plugin without candidates is warned of with the words of the page, and the kernel is tuned."""
    report = Bed(plugins=in_memory(RAISING.format(hook="kalign_candidates", arguments="kernel"))).tune()
    assert report.entry is not None
    assert [documented(message) for message in said(caplog)] == [True]


def test_a_veto_that_raises() -> None:
    """A veto that raises refuses, with the reason of the page."""
    report = Bed(plugins=in_memory(RAISING.format(hook="kalign_veto", arguments="config"))).tune()
    assert report.refused
    assert all(documented(reason) for _, reason in report.refused)


def test_strategies_that_raise(caplog: pytest.LogCaptureFixture) -> None:
    """A plugin that cannot give its strategies is broken, with the words of the page, and the kernel is tuned."""
    plugins = in_memory(RAISING.format(hook="kalign_strategies", arguments=""))
    assert Bed(plugins=plugins).tune().entry is not None
    assert [row.state for row in plugins.rows if row.name == "npu"] == ["broken"]
    assert [documented(message) for message in said(caplog)] == [True]


SEARCH = """
def search(race):
    {fault}

@hookimpl
def kalign_strategies():
    return [StrategyRecord("npu-search", search)]
"""


def test_a_strategy_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    """Where a strategy raises the built-in one is used, with the words of the page."""
    effort = dataclasses.replace(EFFORT, strategy="npu-search")
    assert Bed(plugins=in_memory(SEARCH.format(fault=FAULT))).tune(effort=effort).entry is not None
    assert [documented(message) for message in said(caplog)] == [True]


STORE = """
def factory(settings):
    {fault}

@hookimpl
def kalign_stores():
    return [StoreRecord("npu-store", factory)]
"""


def test_a_store_that_cannot_be_opened(caplog: pytest.LogCaptureFixture) -> None:
    """A store that cannot be opened is passed over, with the words of the page."""
    plugins = Plugins().with_module("npu", tuner_samples.module(STORE.format(fault=FAULT)))
    assert Session(platform=Bed().platform, plugins=plugins).store.name == "memory"
    assert [documented(message) for message in said(caplog)] == [True]


def test_checks_that_raise() -> None:
    """A plugin that raises where the gate asks refutes everything, with the words of the page."""
    report = Bed(plugins=in_memory(RAISING.format(hook="kalign_checks", arguments="kernel"))).tune()
    assert report.entry is not None
    assert report.entry.config == report.reference
    assert {documented(refutation.reason) for _, refutation in report.refuted} == {True}


CASES = """
def cases(bench):
    {fault}

@hookimpl
def kalign_checks():
    return [Check("npu check", 8, cases)]
"""


def test_cases_that_raise() -> None:
    """A check whose cases raise refutes everything, with the words of the page."""
    report = Bed(plugins=in_memory(CASES.format(fault=FAULT))).tune()
    assert {documented(refutation.reason) for _, refutation in report.refuted} == {True}


# --- hanging ------------------------------------------------------------------------------------------------------

HANGS = "import time\nKALIGN_API = 1\nopen({flag!r}, 'w').close()\ntime.sleep(3600)\n"


def test_a_slow_plugin_is_named(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that takes long to load is warned of with the words of the page, and is used."""
    module = plugin_of("kalign_checks")
    monkeypatch.setattr(isolate, "time", types.SimpleNamespace(monotonic=itertools.count(0, 6).__next__))
    plugins = Plugins().with_module("npu", module)
    assert [row.state for row in plugins.rows] == ["active"]
    assert [documented(message) for message in said(caplog)] == [True]


def test_ctrl_c_names_a_plugin_that_hangs(tmp_path: Path, distribution: Callable[..., str]) -> None:
    """A process that waits for a plugin ends on Ctrl-C, and the traceback's last lines are the plugin's."""
    flag = tmp_path / "flag"
    module = distribution(tmp_path, "npu", HANGS.format(flag=str(flag)))
    waiting = subprocess.Popen(
        [sys.executable, "-c", "import kalign_core.hal"], stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": search_path(tmp_path, ROOT)},
    )  # fmt: skip
    while not flag.exists() and waiting.poll() is None:
        time.sleep(0.01)
    waiting.send_signal(signal.SIGINT)
    _, err = waiting.communicate(timeout=600)
    assert waiting.returncode != 0
    assert f"{module}.py" in err.splitlines()[-3]
    assert err.splitlines()[-1] == "KeyboardInterrupt"


def test_a_plugin_that_hangs_can_be_left_out(
    tmp_path: Path, child: Callable[..., Any], distribution: Callable[..., str]
) -> None:
    """A plugin that is denied is not imported, so that it cannot hang."""
    flag = tmp_path / "flag"
    distribution(tmp_path, "npu", HANGS.format(flag=str(flag)))
    done = child("import kalign_core.hal; print('on')", tmp_path, KALIGN_DISABLE_PLUGINS="npu")
    assert (done.stdout, flag.exists()) == ("on\n", False)
