"""The protocol of a first run on a new device, rehearsed on the interpreter; and that it reports what goes wrong."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "first_run.py"


@pytest.fixture(scope="module")
def protocol() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("first_run", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["first_run"] = module
    spec.loader.exec_module(module)
    return module


def printing(text: str, code: int = 0) -> tuple[str, ...]:
    return (sys.executable, "-c", f"import sys; print({text!r}); print('a word', file=sys.stderr); sys.exit({code})")


def run(protocol: ModuleType, command: tuple[str, ...], test: Any, limit_s: float = 600.0) -> Any:
    step = protocol.Step("step", command, {"it holds": test})
    return protocol.run(step, dict(os.environ), limit_s)


def test_a_rehearsal(tmp_path: Path) -> None:
    """On the interpreter every step runs, every expectation that can be asked is met, and one file holds it all."""
    output = tmp_path / "result.json"
    command = [sys.executable, str(SCRIPT), "swiglu", "--small", "--control", "flips_zero", "--output", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(output.read_text())
    assert list(result["steps"]) == ["doctor", "device", "references", "control", "tune", "again", "winners"]
    assert result["met"]
    answers = [holds for step in result["steps"].values() for holds in step["expected"].values()]
    assert answers.count(None) == 1  # loaded registers: an interpreter has none
    assert [text.count("[[entry]]") for text in result["decisions"].values()] == [2]


def test_names_of_the_machine_stay_there(protocol: ModuleType) -> None:
    """What names the device or its machine is a digest in the file, in every step's text."""
    doctor = {"devices": [{"identity": {"key": "4c1f8a/0000:60:00/1002:74a1"}}]}
    result = {"steps": {"doctor": {"found": doctor}}, "decisions": {"a.toml": 'key = "4c1f8a/0000:60:00/1002:74a1"'}}
    text = json.dumps(protocol.anonymous(result))
    assert "4c1f8a" not in text
    assert text.count("digest-") == 2


@pytest.mark.parametrize(
    ("command", "holds", "code"),
    [
        (printing('{"n": 1}'), True, 0),
        (printing('{"n": 2}', 1), False, 1),
        (printing('{"m": 1}'), False, 0),
        (printing("no JSON", 3), False, 3),
        ((sys.executable, "-c", "import os; os.abort()"), False, -6),
    ],
    ids=["met", "not met", "a field is missing", "no answer", "a crash"],
)
def test_an_expectation(protocol: ModuleType, command: tuple[str, ...], holds: bool, code: int) -> None:
    """An expectation is met by the answer that it asks for and by nothing else; the step's end is kept."""
    made = run(protocol, command, lambda found: found["n"] == 1)
    assert (made["expected"], made["exit_code"]) == ({"it holds": holds}, code)


def test_a_step_that_hangs(protocol: ModuleType) -> None:
    """A step that takes too long is ended, and meets nothing."""
    made = run(protocol, (sys.executable, "-c", "import time; time.sleep(3600)"), lambda found: True, limit_s=0.5)
    assert (made["expected"], made["found"]) == ({"it holds": False}, None)


def test_the_last_words_are_kept(protocol: ModuleType) -> None:
    """What a step wrote to standard error last stands in the file, for who has to find out what went wrong."""
    assert run(protocol, printing("{}"), lambda found: True)["last_lines"] == ["a word"]


def test_what_cannot_be_asked(protocol: ModuleType) -> None:
    """An expectation that this platform cannot be asked is neither met nor missed."""
    assert run(protocol, printing("{}"), lambda found: None)["expected"] == {"it holds": None}
