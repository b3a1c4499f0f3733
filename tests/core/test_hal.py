"""kalign_core.hal in a fresh process: importing selects and never raises, reading the platform makes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PLATFORM_CLASS = """
import time
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

class Slow(Npu):
    def __init__(self):
        time.sleep(0.05)
        super().__init__()
"""

PLUGIN = """
from kalign_core.hookspecs import hookimpl
from kalign_core.records import Evidence, PlatformRecord

KALIGN_API = 1

@hookimpl
def kalign_platforms():
    return [PlatformRecord("npu", lambda environment: Evidence({usable}, "/dev/npu0"), "plugin_platform:{kind}")]
"""
HEAD = """
import json, logging, os, sys
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
from kalign_core import plugins
plugins.BUILTIN = {"core-platforms": "kalign_core.embedded"}
plugins.IN_CHECKOUT = {}
every = plugins._distributions  # kalign itself may be installed here or not: its vendors are not the point
plugins._distributions = lambda path: [found for found in every(path) if found.metadata["Name"] != "kalign"]
"""


@pytest.fixture
def hal(tmp_path: Path, child: Callable[..., Any], distribution: Callable[..., str]) -> Callable[..., Any]:
    """``hal(code)`` imports ``kalign_core.hal`` on a machine with a triton and an npu and runs ``code``.

    Gives the process and what ``code`` left in ``out``. ``before`` runs first of all; ``usable`` and ``kind`` are
    the npu's.
    """
    for package in ("torch", "triton"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
        (tmp_path / package / "version.py").write_text("__version__ = '2.11.0'\n")
    (tmp_path / "plugin_platform.py").write_text(PLATFORM_CLASS)

    def run(code: str, before: str = "", usable: bool = True, kind: str = "Npu", **variables: str) -> tuple[Any, Any]:
        distribution(tmp_path, "npu", PLUGIN.format(usable=usable, kind=kind))
        text = f"{HEAD}{before}\nimport kalign_core.hal as hal\n{code}\nprint(json.dumps(out))"
        done = child(text, tmp_path, **variables)
        assert done.returncode == 0, done.stderr
        return done, json.loads(done.stdout)

    return run


RAISED = """
try:
    out = str(hal.platform)
except Exception as error:
    out = [type(error).__name__, str(error), hal.selection.chosen, [row.name for row in hal.plugins.rows]]
"""


def test_the_only_usable_platform_is_made_on_access(hal: Callable[..., Any]) -> None:
    """Importing selects; the platform's module is imported when the platform is first read."""
    code = "out = ['plugin_platform' in sys.modules, hal.selection.chosen, hal.platform.name]"
    assert hal(code)[1] == [False, "npu", "npu"]


def test_there_is_one_platform(hal: Callable[..., Any]) -> None:
    """However many threads read the platform first, it is made once."""
    code = """
import threading
seen, start = [], threading.Barrier(8)
def read():
    start.wait()
    seen.append(hal.platform)
threads = [threading.Thread(target=read) for _ in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
out = [len(seen), len(set(map(id, seen))), sys.modules['plugin_platform'].Slow.made]
"""
    assert hal(code, kind="Slow")[1] == [8, 1, 1]


def test_choosing_cpu_asks_for_the_interpreter(hal: Callable[..., Any]) -> None:
    """Where the embedded platform is chosen before triton is imported, one INFO line says what that sets."""
    code = "out = [hal.selection.chosen, os.environ['TRITON_INTERPRET'], 'triton' in sys.modules]"
    done, out = hal(code, usable=False)
    assert out == ["cpu", "1", False]
    (line,) = done.stderr.splitlines()
    assert line.startswith("INFO platform cpu: nothing else can be used here (npu: /dev/npu0)")
    assert line.endswith("TRITON_INTERPRET=1 is set for this process, before triton is imported")


@pytest.mark.parametrize("value", ["1", "true"])
def test_an_interpreter_that_was_asked_for_is_let_be(hal: Callable[..., Any], value: str) -> None:
    """Where triton was imported with the interpreter asked for, nothing is set and the line does not claim so."""
    code = "out = [hal.selection.chosen, os.environ['TRITON_INTERPRET']]"
    done, out = hal(code, before="import triton", usable=False, TRITON_INTERPRET=value)
    assert out == ["cpu", value]
    assert "is set for this process" not in done.stderr


@pytest.mark.parametrize("before", ["", "import triton"])
def test_another_platform_leaves_the_interpreter_alone(hal: Callable[..., Any], before: str) -> None:
    """A vendor's platform sets no variable and says nothing."""
    done, out = hal("out = os.environ.get('TRITON_INTERPRET')", before=before)
    assert (out, done.stderr) == (None, "")


def test_nothing_usable_raises_on_access(hal: Callable[..., Any]) -> None:
    """Where nothing can be used importing works, and reading the platform says why."""
    _, (kind, text, chosen, _) = hal(RAISED, before="import triton", usable=False)
    assert (kind, chosen) == ("NoPlatform", None)
    assert "triton was imported first" in text


def test_a_platform_that_was_asked_for_has_to_work(hal: Callable[..., Any]) -> None:
    """KALIGN_PLATFORM works or reading the platform raises; no other is taken instead."""
    _, (kind, text, chosen, _) = hal(RAISED, usable=False, KALIGN_PLATFORM="npu")
    assert (kind, chosen) == ("NoPlatform", None)
    assert "KALIGN_PLATFORM=npu cannot be used: /dev/npu0" in text


def test_a_bad_variable_raises_on_access(hal: Callable[..., Any]) -> None:
    """A bad value of any variable lets the import and the table stand and is raised when the platform is read."""
    _, out = hal(RAISED, KALIGN_MODE="fast", KALIGN_DISABLE_PLUGINS="npu")
    assert out[0] == "UnknownName"
    assert "unknown mode 'fast'" in out[1]
    assert out[2:] == [None, ["core-platforms", "npu"]]


def test_a_bad_variable_does_not_lift_the_deny_list(hal: Callable[..., Any]) -> None:
    """A plugin that is denied is not imported because another variable has a bad value."""
    code = "out = {row.name: row.state for row in hal.plugins.rows}"
    assert hal(code, KALIGN_MODE="fast", KALIGN_DISABLE_PLUGINS="npu")[1]["npu"] == "disabled"


def test_a_strict_fault_raises_on_access(
    hal: Callable[..., Any], tmp_path: Path, distribution: Callable[..., str]
) -> None:
    """Under KALIGN_STRICT=1 a broken plugin does not stop the import, and is raised when the platform is read."""
    distribution(tmp_path, "bad", "raise OSError('no bus')")
    _, out = hal(RAISED, KALIGN_STRICT="1")
    assert out[0] == "PluginFault"
    assert out[2:] == [None, ["core-platforms", "bad", "npu"]]


def test_a_broken_builtin_raises_on_access(hal: Callable[..., Any]) -> None:
    """Even where kalign itself is broken importing works, and reading the platform raises the fault."""
    _, out = hal(RAISED, before="plugins.BUILTIN['core-tuner'] = 'kalign_core.no_such_module'")
    assert out[0] == "ModuleNotFoundError"
    assert out[2:] == [None, []]


def test_a_factory_that_failed_is_tried_again(hal: Callable[..., Any]) -> None:
    """A platform that could not be made raises on every access and is not remembered as failed."""
    repaired = "import plugin_platform; plugin_platform.Exits.__init__ = object.__init__"
    code = f"{RAISED}\n{repaired}\nout = [out[0], hal.platform.name]"
    assert hal(code, kind="Exits")[1] == ["NoPlatform", "npu"]


def test_other_names_are_no_attributes(hal: Callable[..., Any]) -> None:
    """Reading a name that the package does not have is an AttributeError, as of any module."""
    assert hal("out = hasattr(hal, 'platfrom')")[1] is False


HELD_OVER_A_FORK = """
import os, signal, threading, time
from kalign_core import hal

def hold():
    with hal._making:
        held.set()
        time.sleep(3600)

held = threading.Event()
threading.Thread(target=hold, daemon=True).start()
held.wait()
pid = os.fork()
if pid == 0:
    signal.alarm(300)
    os._exit(0 if hal.platform.name == "cpu" else 1)
print("status", os.waitpid(pid, 0)[1])
"""


def test_a_child_of_fork_does_not_wait_for_the_parents_lock(child) -> None:
    """A child forked while another thread makes the platform makes its own."""
    ran = child(HELD_OVER_A_FORK)
    assert ran.stdout.splitlines()[-1:] == ["status 0"], ran.stderr
