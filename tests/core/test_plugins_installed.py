"""Plugins as users have them: distributions with metadata, found by a fresh process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PLATFORM = """
from kalign_core.hookspecs import hookimpl
from kalign_core.records import Evidence, PlatformRecord

KALIGN_API = 1

@hookimpl
def kalign_platforms():
    return [PlatformRecord("{name}", lambda environment: Evidence(True, "it is here"), "nowhere:Platform")]
"""
SOURCES = {
    "a-missing": "import a_module_that_nobody_has",
    "b-key": "raise KeyError('AMDSMI_LIB')",
    "c-exit": "raise SystemExit(3)",
    "d-prints": "print('loading the driver')\n" + PLATFORM.format(name="loud"),
    "e-misspelt": PLATFORM.format(name="x").replace("kalign_platforms", "kalign_platform"),
    "f-other-api": PLATFORM.format(name="y").replace("KALIGN_API = 1", "KALIGN_API = 99"),
    "g-good": PLATFORM.format(name="good"),
    "h-prints-and-fails": "print('half way')\nraise OSError('libnpu.so')",
}
LIST_THEM = """
import dataclasses, json
from kalign_core import plugins
from kalign_core.settings import read
plugins.BUILTIN = {"core-platforms": "kalign_core.embedded"}
plugins.IN_CHECKOUT = {}
every = plugins._distributions  # kalign itself may be installed here or not: its vendors are not the point
plugins._distributions = lambda path: [found for found in every(path) if found.metadata["Name"] != "kalign"]
found = plugins.load(read())
print(json.dumps({"rows": [dataclasses.asdict(row) for row in found.rows],
                  "platforms": [record.name for record in found.platforms()]}))
"""


@pytest.fixture(scope="module")
def installed(
    tmp_path_factory: pytest.TempPathFactory, child: Callable[..., Any], distribution: Callable[..., str]
) -> tuple[dict[str, Any], str]:
    """What a process that finds all of ``SOURCES`` lists, and what it writes to stderr."""
    folder = tmp_path_factory.mktemp("site")
    for name, source in SOURCES.items():
        distribution(folder, name, source)
    done = child(LIST_THEM, folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize(
    ("name", "state", "reason"),
    [
        ("a-missing", "broken", "ModuleNotFoundError: No module named 'a_module_that_nobody_has'"),
        ("b-key", "broken", "KeyError: 'AMDSMI_LIB'"),
        ("c-exit", "broken", "SystemExit: 3"),
        ("d-prints", "active", "printed while loading: loading the driver"),
        ("e-misspelt", "broken", "kalign_platform is no hook of kalign; did you mean kalign_platforms?"),
        ("f-other-api", "broken", "KALIGN_API is 99, this kalign speaks 1"),
        ("g-good", "active", ""),
        ("h-prints-and-fails", "broken", "OSError: libnpu.so"),
    ],
)
def test_each_distribution_is_a_row(installed: tuple[dict[str, Any], str], name: str, state: str, reason: str) -> None:
    """A plugin that fails is a row with its distribution, version and reason, and those after it load."""
    (found,) = (row for row in installed[0]["rows"] if row["name"] == name)
    expected = {"distribution": f"kalign-{name}", "version": "1.2", "state": state, "reason": reason}
    assert expected == {key: found[key] for key in expected}


def test_plugins_print_nothing_to_stdout(installed: tuple[dict[str, Any], str]) -> None:
    """stdout carries data only, so what a plugin prints while loading goes to its row."""
    rows = {row["name"]: row for row in installed[0]["rows"]}
    assert "half way" in rows["h-prints-and-fails"]["traceback"]


def test_good_plugins_work_beside_broken_ones(installed: tuple[dict[str, Any], str]) -> None:
    """The platforms of every plugin that loads are there, in the order of loading."""
    assert installed[0]["platforms"] == ["cpu", "loud", "good"]


def test_rows_say_which_api_was_found(installed: tuple[dict[str, Any], str]) -> None:
    """A row says which API the plugin was written for where the module got far enough to say so."""
    apis = {row["name"]: row["api"] for row in installed[0]["rows"]}
    assert (apis["f-other-api"], apis["g-good"], apis["c-exit"]) == ("99", "1", "")


@pytest.mark.parametrize("name", ["a-missing", "b-key", "c-exit", "e-misspelt", "f-other-api"])
def test_a_warning_names_the_culprit(installed: tuple[dict[str, Any], str], name: str) -> None:
    """The warning of a broken plugin names entry point, distribution, version and the command for the traceback."""
    (line,) = (line for line in installed[1].splitlines() if f"'{name}'" in line)
    assert f"kalign-{name} 1.2" in line
    assert f"kalign plugins --traceback {name}" in line


def test_strict_stops_a_process_at_the_first(
    tmp_path: Path, child: Callable[..., Any], distribution: Callable[..., str]
) -> None:
    """KALIGN_STRICT=1 makes a broken plugin an error that names it and keeps the cause."""
    distribution(tmp_path, "b-key", SOURCES["b-key"])
    done = child(LIST_THEM, tmp_path, KALIGN_STRICT="1")
    assert done.returncode == 1
    assert "PluginFault: plugin 'b-key' of kalign-b-key 1.2 cannot be used: KeyError: 'AMDSMI_LIB'" in done.stderr
    assert "export KALIGN_DISABLE_PLUGINS=b-key" in done.stderr
