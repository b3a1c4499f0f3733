"""docs/writing-a-backend.md is true: what it quotes stands in the example, and what it names is there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kalign_core import testing
from tests.search_path import search_path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/kalign-host"
TEXT = (ROOT / "docs/writing-a-backend.md").read_text(encoding="utf-8")
README = (EXAMPLE / "README.md").read_text(encoding="utf-8")
QUOTES = re.findall(r"^```(?:python|toml)\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
SOURCES = {
    path.relative_to(EXAMPLE).as_posix(): path.read_text(encoding="utf-8")
    for path in EXAMPLE.rglob("*")
    if path.suffix in (".py", ".toml")
}


def test_the_example_can_be_copied(tmp_path: Path) -> None:
    """The commands of the page make a backend of another name from the example, whose tests find it."""
    shutil.copytree(EXAMPLE, tmp_path / "kalign/examples/kalign-host", ignore=shutil.ignore_patterns("__pycache__"))
    (commands,) = re.findall(r"^```sh\n(.*?)^pip ", TEXT, re.DOTALL | re.MULTILINE)
    subprocess.run(["sh", "-ec", commands], cwd=tmp_path / "kalign", check=True)
    copy = tmp_path / "kalign-npu"
    assert 'npu = "kalign_npu.plugin"' in (copy / "pyproject.toml").read_text(encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "contract or names_a_file"],
        cwd=copy, capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, "PYTHONPATH": search_path(copy, ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_something_is_quoted() -> None:
    """The page shows code of every step."""
    assert len(QUOTES) >= 5


@pytest.mark.parametrize("quote", QUOTES, ids=[quote.strip().splitlines()[0] for quote in QUOTES])
def test_quotes_are_the_example_s(quote: str) -> None:
    """Code on the page stands in a file of the example, line for line."""
    assert [name for name, text in SOURCES.items() if quote in text] != []


@pytest.mark.parametrize("text", [TEXT, README], ids=["page", "readme"])
def test_files_that_are_named_exist(text: str) -> None:
    """Every file of the example that is named is there."""
    named = set(re.findall(r"`((?:kalign_host|tests)/[\w./]+\.py)`", text))
    assert named
    assert named <= set(SOURCES)


def test_every_file_is_explained() -> None:
    """The example's README has a line for each of its modules."""
    modules = {name for name in SOURCES if name.startswith("kalign_host/") and not name.endswith("__init__.py")}
    named = set(re.findall(r"`(kalign_host/\w+\.py)`", README)) | {
        f"kalign_host/{name}" for name in re.findall(r"`(\w+\.py)`", README)
    }
    assert named == modules


def test_every_suite_is_listed() -> None:
    """The table of suites has each class of kalign_core.testing, and its attributes exist."""
    listed = dict(re.findall(r"^\| `(\w+Conformance)` \| ([^|]*) \|", TEXT, re.MULTILINE))
    assert set(listed) == set(testing.__all__)
    for name, attributes in listed.items():
        known: set[str] = set()
        for base in getattr(testing, name).__mro__:
            known |= set(getattr(base, "__annotations__", {}))
        assert set(re.findall(r"`(\w+)`", attributes)) <= known


def test_the_example_names_this_kalign() -> None:
    """The example depends on the version of kalign that it lies beside."""
    from kalign_core import __version__

    low, high = re.findall(r"kalign>=([\d.]+),<([\d.]+)", SOURCES["pyproject.toml"])[0]
    version, lowest, beyond = ([int(part) for part in text.split(".")[:2]] for text in (__version__, low, high))
    assert lowest <= version < beyond
