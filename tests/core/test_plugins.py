"""The plugin loader: each plugin alone, every fault a row, the good ones asked one by one."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kalign_core import __version__
from kalign_core import plugins as loader
from kalign_core.errors import PluginFault
from kalign_core.plugins import Plugins, load
from kalign_core.records import PluginRow
from kalign_core.settings import Settings

PLATFORM = """
from kalign_core.hookspecs import hookimpl
from kalign_core.records import Evidence, PlatformRecord

KALIGN_API = 1

@hookimpl
def kalign_platforms():
    return [PlatformRecord("{name}", lambda environment: Evidence(True, "it is here"), "nowhere:Platform")]
"""
VETO = """
from kalign_core.hookspecs import hookimpl

KALIGN_API = 1

@hookimpl
def kalign_veto(config):
    return f"{config} is banned"
"""


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """One built-in plugin and no vendor, so that these tests are about the loader alone."""
    monkeypatch.setattr(loader, "BUILTIN", {"core-platforms": "kalign_core.embedded"})
    monkeypatch.setattr(loader, "IN_CHECKOUT", {})
    monkeypatch.setattr(loader, "_warned", set())


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that plugins are installed in and imported from."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("plugin_"):
            del sys.modules[name]


def module(source: str, name: str = "in_memory") -> ModuleType:
    made = ModuleType(name)
    exec(textwrap.dedent(source), vars(made))
    return made


def row(plugins: Plugins, name: str) -> PluginRow:
    (found,) = (row for row in plugins.rows if row.name == name)
    return found


# --- which plugins are loaded -------------------------------------------------------------------------------------


def test_builtin_plugins_come_first(site: Path, distribution: Callable[..., str]) -> None:
    """Built-in plugins load before entry points, and entry points in the order of their names."""
    for name in ("zeta", "alpha"):
        distribution(site, name, PLATFORM.format(name=name))
    assert [r.name for r in load(Settings(), [str(site)]).rows] == ["core-platforms", "alpha", "zeta"]


def test_a_broken_builtin_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A built-in plugin that cannot be imported raises its own error: it is kalign that is broken."""
    monkeypatch.setattr(loader, "BUILTIN", {"core-tuner": "kalign_core.no_such_module"})
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        load(Settings(), [])


def test_allowed_names_load_and_no_others(site: Path, distribution: Callable[..., str]) -> None:
    """KALIGN_PLUGINS names the entry points that load; the others are disabled and not imported."""
    distribution(site, "npu", PLATFORM.format(name="npu"))
    distribution(site, "bad", "raise RuntimeError")
    plugins = load(Settings(plugins=("npu",)), [str(site)])
    assert (row(plugins, "npu").state, row(plugins, "bad").state) == ("active", "disabled")
    assert row(plugins, "bad").reason == "not named in KALIGN_PLUGINS"


def test_denied_names_do_not_load(site: Path, distribution: Callable[..., str]) -> None:
    """KALIGN_DISABLE_PLUGINS wins over KALIGN_PLUGINS and says so in the row."""
    distribution(site, "bad", "raise RuntimeError")
    found = row(load(Settings(plugins=("bad",), disabled_plugins=("bad",)), [str(site)]), "bad")
    assert (found.state, found.reason) == ("disabled", "named in KALIGN_DISABLE_PLUGINS")


def test_a_builtin_can_be_denied() -> None:
    """A built-in plugin other than the verifier can be disabled like any other."""
    plugins = load(Settings(disabled_plugins=("core-platforms",)), [])
    assert (row(plugins, "core-platforms").state, plugins.platforms()) == ("disabled", ())


def test_the_verifier_cannot_be_denied(
    monkeypatch: pytest.MonkeyPatch, site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The core's probe suite loads even where it is denied, with a warning."""
    (site / "plugin_suite.py").write_text("KALIGN_API = 1\n")
    monkeypatch.setattr(loader, "BUILTIN", {"core-verifier": "plugin_suite"})
    plugins = load(Settings(disabled_plugins=("core-verifier",)), [])
    assert row(plugins, "core-verifier").state == "active"
    assert "core-verifier" in caplog.text
    assert "cannot be disabled" in caplog.text


@pytest.mark.parametrize("settings", [Settings(plugins=("nqu",)), Settings(disabled_plugins=("nqu",))])
def test_names_that_match_nothing_are_warned_of(
    site: Path, distribution: Callable[..., str], caplog: pytest.LogCaptureFixture, settings: Settings
) -> None:
    """A name in either list that is no plugin is warned of with the names that are known."""
    distribution(site, "npu", VETO)
    load(settings, [str(site)])
    assert "'nqu'" in caplog.text
    assert "known: core-platforms, npu" in caplog.text


def test_names_that_match_are_not_warned_of(
    site: Path, distribution: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    """Names of built-in plugins and of entry points are known in both lists."""
    distribution(site, "npu", VETO)
    load(Settings(plugins=("npu", "core-platforms"), disabled_plugins=("npu",)), [str(site)])
    assert caplog.text == ""


def test_a_checkout_loads_its_vendors_without_metadata(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without metadata the vendor packages of the checkout load all the same, as rows ``source``."""
    (site / "plugin_vendor.py").write_text(PLATFORM.format(name="npu"))
    monkeypatch.setattr(loader, "IN_CHECKOUT", {"npu": "plugin_vendor"})
    plugins = load(Settings(), [str(site)])
    assert row(plugins, "npu") == PluginRow("npu", "kalign", __version__, "1", "source")
    assert [record.name for record in plugins.platforms()] == ["cpu", "npu"]


def test_a_vendor_with_metadata_loads_once(
    site: Path, monkeypatch: pytest.MonkeyPatch, distribution: Callable[..., str]
) -> None:
    """A vendor package that metadata registers is not loaded a second time from the checkout."""
    target = distribution(site, "npu", PLATFORM.format(name="npu"), project="kalign")
    monkeypatch.setattr(loader, "IN_CHECKOUT", {"npu": target})
    assert row(load(Settings(), [str(site)]), "npu").state == "active"


def test_a_vendor_of_the_checkout_keeps_its_name(
    site: Path, monkeypatch: pytest.MonkeyPatch, distribution: Callable[..., str]
) -> None:
    """A third party that takes the name of a vendor of kalign is the one that is broken."""
    (site / "plugin_vendor.py").write_text(PLATFORM.format(name="npu"))
    monkeypatch.setattr(loader, "IN_CHECKOUT", {"npu": "plugin_vendor"})
    distribution(site, "npu", VETO, project="acme")
    states = [(r.distribution, r.state) for r in load(Settings(), [str(site)]).rows if r.name == "npu"]
    assert states == [("kalign", "source"), ("acme", "broken")]


def test_the_second_of_two_equal_names_is_broken(site: Path, distribution: Callable[..., str]) -> None:
    """Where two distributions register one name the second is broken, and the reason names both with versions."""
    distribution(site, "npu", VETO, project="acme", version="3.1")
    distribution(site, "npu", VETO, project="bolt", version="0.2")
    first, second = (r for r in load(Settings(), [str(site)]).rows if r.name == "npu")
    assert (first.state, second.state) == ("active", "broken")
    assert second.reason == "the name 'npu' is taken: acme 3.1 registers it, and so does bolt 0.2"


def test_a_distribution_found_twice_counts_once(tmp_path: Path, site: Path, distribution: Callable[..., str]) -> None:
    """A distribution that lies on the path twice, as editable installs do, is one plugin: the first."""
    other = tmp_path / "other"
    other.mkdir()
    distribution(site, "npu", VETO, version="2.0")
    distribution(other, "npu", VETO, version="1.0")
    assert row(load(Settings(), [str(site), str(other)]), "npu").version == "2.0"


def test_one_module_is_one_plugin() -> None:
    """A module that is a plugin already is refused under another name."""
    same = module(VETO)
    plugins = Plugins().with_module("one", same).with_module("two", same)
    assert row(plugins, "two").reason == "the module in_memory is the plugin 'one' already"


def test_an_entry_point_has_to_name_a_module(site: Path, distribution: Callable[..., str]) -> None:
    """An entry point that names something in a module is broken."""
    target = distribution(site, "npu", VETO)
    points = site / "kalign_npu-1.2.dist-info" / "entry_points.txt"
    points.write_text(f"[kalign.plugins]\nnpu = {target}:KALIGN_API\n")
    assert row(load(Settings(), [str(site)]), "npu").reason == "the entry point names int 1, not a module"


def test_the_core_keeps_its_platform(site: Path, distribution: Callable[..., str]) -> None:
    """A third party cannot replace the embedded platform."""
    distribution(site, "npu", PLATFORM.format(name="cpu"))
    plugins = load(Settings(), [str(site)])
    assert (plugins.provider("cpu"), row(plugins, "npu").state) == ("core-platforms", "broken")


# --- faults are neither fatal nor remembered ----------------------------------------------------------------------


def test_keyboard_interrupt_passes(site: Path, distribution: Callable[..., str]) -> None:
    """The one exception of a plugin that is not caught is KeyboardInterrupt."""
    distribution(site, "npu", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load(Settings(), [str(site)])


def test_a_failed_import_is_tried_again(site: Path, distribution: Callable[..., str]) -> None:
    """Loading again tries a plugin that failed again."""
    distribution(site, "npu", "import os\nif 'NPU_READY' not in os.environ: raise OSError('busy')\n" + VETO)
    assert row(load(Settings(), [str(site)]), "npu").state == "broken"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPU_READY", "1")
        assert row(load(Settings(), [str(site)]), "npu").state == "active"


def test_unreadable_metadata_is_read_again(site: Path, distribution: Callable[..., str]) -> None:
    """Metadata that cannot be read is a broken row named after its folder, and is read anew the next time."""
    distribution(site, "npu", VETO)
    points = site / "kalign_npu-1.2.dist-info" / "entry_points.txt"
    text = points.read_text()
    points.write_bytes(b"[kalign.plugins]\nnpu = \xff\xfe")
    broken = row(load(Settings(), [str(site)]), "kalign_npu-1.2.dist-info")
    assert (broken.state, broken.reason.split(":")[0]) == ("broken", "UnicodeDecodeError")
    points.write_text(text)
    assert row(load(Settings(), [str(site)]), "npu").state == "active"


def test_a_folder_that_could_not_be_listed_is_listed_again(
    site: Path, distribution: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure to list a folder of the path is not remembered as an empty folder."""
    distribution(site, "npu", VETO)

    def fail(folder: str) -> list[str]:
        raise OSError("stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr("os.listdir", fail)
        assert [r.name for r in load(Settings(), [str(site)]).rows] == ["core-platforms"]
    assert row(load(Settings(), [str(site)]), "npu").state == "active"


def test_a_search_that_fails_costs_only_the_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where somebody's import hook makes the search for distributions raise, the built-in plugins work."""

    class Finder:
        def find_distributions(self, context: object) -> list[Any]:
            raise RuntimeError("no metadata today")

        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            return None

    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Finder()])
    plugins = load(Settings(), [])
    assert row(plugins, "metadata").reason == "RuntimeError: no metadata today"
    assert [record.name for record in plugins.platforms()] == ["cpu"]


def test_a_warning_is_given_once(
    site: Path, distribution: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    """A plugin that stays broken is warned of once in a process, however often plugins are loaded."""
    distribution(site, "npu", "raise OSError('busy')")
    load(Settings(), [str(site)])
    load(Settings(), [str(site)])
    assert [r.levelname for r in caplog.records] == ["WARNING"]


def test_reasons_are_one_short_line(site: Path, distribution: Callable[..., str]) -> None:
    """A reason is the first line of the error, cut; the row keeps the whole traceback."""
    distribution(site, "npu", "raise ValueError('x' * 1000 + '\\nsecond line')")
    found = row(load(Settings(), [str(site)]), "npu")
    assert len(found.reason) <= 300
    assert "\n" not in found.reason
    assert "second line" in found.traceback
    assert "plugin_kalign_npu_npu.py" in found.traceback


def test_an_error_without_a_message_is_reported(site: Path, distribution: Callable[..., str]) -> None:
    """An error whose own message raises is still a row."""
    distribution(site, "npu", "class E(Exception):\n    def __str__(self): raise OSError\nraise E")
    assert row(load(Settings(), [str(site)]), "npu").reason == "E: (its message cannot be printed)"


# --- plugins in memory --------------------------------------------------------------------------------------------


def test_adding_a_module_leaves_the_original_alone() -> None:
    """``with_module`` gives new plugins and does not change those it was called on."""
    before = load(Settings(), [])
    after = before.with_module("npu", module(PLATFORM.format(name="npu")))
    assert [r.name for r in before.rows] == ["core-platforms"]
    assert [r.name for r in before.platforms()] == ["cpu"]
    assert [r.name for r in after.platforms()] == ["cpu", "npu"]


def test_adding_a_broken_module_under_strict_raises() -> None:
    """Plugins that were loaded under strict are strict about what is added."""
    plugins = load(dataclasses.replace(Settings(), strict=True), [])
    with pytest.raises(PluginFault, match="plugin 'npu' of \\(memory\\) cannot be used"):
        plugins.with_module("npu", module("KALIGN_API = 7"))
