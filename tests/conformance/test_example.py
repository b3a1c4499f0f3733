"""The example backend as its users have it: built, installed beside kalign, found by its entry point, and working."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.search_path import search_path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/kalign-host"
Command = Callable[..., subprocess.CompletedProcess[str]]


def pip(*arguments: str) -> None:
    """Run pip of this interpreter, from no index."""
    options = ("--isolated", "--disable-pip-version-check")
    done = subprocess.run(
        [sys.executable, "-m", "pip", *options, *arguments, "--no-deps", "--no-index", "-q"],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the example's wheel is installed, with its metadata."""
    for needed in ("pip", "hatchling"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"needs {needed} to build the example: pip install {needed}, or nox -s tests_thirdparty")
    wheels, folder = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("site")
    pip("wheel", "--no-build-isolation", "-w", str(wheels), str(EXAMPLE))
    (wheel,) = wheels.glob("kalign_host-*.whl")
    pip("install", "--target", str(folder), str(wheel))
    return folder


@pytest.fixture
def kalign(child: Command, site: Path, tmp_path: Path) -> Command:
    """``kalign("plugins", KALIGN_PLATFORM="host")`` runs that command in a fresh process that has the example."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        code = f"import sys; sys.argv = ['kalign', *{arguments!r}]; from kalign_core.cli.main import main; main()"
        return child(code, site, KALIGN_CACHE_DIR=str(tmp_path / "cache"), **variables)

    return run


def answer(done: subprocess.CompletedProcess[str]) -> Any:
    """The data that a command with ``--json`` wrote."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_entry_point_is_found(kalign: Command) -> None:
    """``kalign plugins`` lists the installed backend with its distribution, version and API."""
    rows = {row["name"]: row for row in answer(kalign("plugins", "--json"))["plugins"]}
    assert rows["host"] == {
        "name": "host", "distribution": "kalign-host", "version": "0.1.0", "api": "1", "state": "active", "reason": "",
    }  # fmt: skip


def test_installing_it_changes_no_choice(kalign: Command) -> None:
    """A backend that is a fallback is there, usable, and used by nobody who did not ask for it."""
    found = answer(kalign("doctor", "--json", KALIGN_PLUGINS="host"))
    usable = {row["name"]: row["usable"] for row in found["platforms"]}
    assert (found["platform"], usable) == ("cpu", {"cpu": True, "host": True})


def test_it_can_be_asked_for(kalign: Command) -> None:
    """With KALIGN_PLATFORM=host doctor says that it is used, whose file decisions go to, and that they may."""
    found = answer(kalign("doctor", "--json", KALIGN_PLATFORM="host"))
    (device,) = found["devices"]
    assert (found["platform"], device["device"], device["storable"]) == ("host", -1, True)
    assert Path(device["file"]).name.startswith("host-")


@pytest.mark.parametrize(
    ("variables", "ending"), [({}, ".toml"), ({"KALIGN_DISABLE_PLUGINS": "core-cache"}, ".sqlite")]
)
def test_what_it_tunes_is_remembered(kalign: Command, tmp_path: Path, variables: dict[str, str], ending: str) -> None:
    """Tuning on the backend, by its strategy, leaves decisions in its device's file, which the next process finds."""
    work = ("tune", "swiglu", "--shape", "T=2,F=16", "--json")
    variables = {"KALIGN_PLATFORM": "host", **variables}
    tuned = answer(kalign(*work, "--strategy", "halving", **variables))
    assert {row["how"] for row in tuned["problems"]} == {"tuned"}
    assert [path.suffix for path in (tmp_path / "cache").glob("host-*[!k]")] == [ending]
    again = answer(kalign(*work, **variables))
    assert {row["how"] for row in again["problems"]} == {"hit"}
    assert [row["config"] for row in again["problems"]] == [row["config"] for row in tuned["problems"]]


def test_its_own_tests_pass(site: Path, tmp_path: Path) -> None:
    """The tests that come with the backend, which inherit kalign's suites, pass on what was installed."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(EXAMPLE / "pyproject.toml"),
         str(EXAMPLE / "tests")],
        cwd=tmp_path, capture_output=True, text=True, timeout=1800, check=False,
        env={**os.environ, "PYTHONPATH": search_path(site, ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
