"""How amdsmi is asked: opened and closed again, by threads and after a fork, by whatever package is installed."""

from __future__ import annotations

import importlib.util
import logging
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kalign_rocm import identity
from tests.hanging import Hanging
from tests.rocm.fakes import FUNCTIONS, FakeSmi, Processor, Unreachable, properties

# --- how amdsmi is asked ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [{}, {"amdsmi_get_gpu_asic_info": ValueError("x")}], ids=["answers", "raises"])
def test_amdsmi_is_closed_again(failing: dict[str, BaseException]) -> None:
    """Every query shuts down what it initialised."""
    smi = FakeSmi(Processor(), failing=failing)
    identity.identity(properties(), smi)
    assert (smi.open, smi.calls.count("amdsmi_init"), smi.calls[-1]) == (0, 1, "amdsmi_shut_down")


def test_amdsmi_may_print(capsys: pytest.CaptureFixture[str]) -> None:
    """What the library prints never reaches stdout, which carries data."""
    identity.identity(properties(), FakeSmi(Processor()))
    assert capsys.readouterr().out == ""


def test_threads_take_turns(machine: Path) -> None:
    """Threads that ask at once are served one after the other, each with its own device."""
    smi = FakeSmi(*(Processor(n) for n in range(8)))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: identity.identity(properties(n), smi, machine).pci_device_id, range(8)))
    assert found == ["1002:74a1"] * 8


def test_a_driver_that_hangs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A call that does not return costs the deadline once, and one warning; later queries go on without amdsmi."""
    hanging = Hanging()
    monkeypatch.setattr(threading, "Thread", hanging.threads())
    smi = FakeSmi(Processor(), amdsmi_init=hanging)
    try:
        found = [identity.identity(properties(), smi).name for _ in range(3)]
        assert (found, smi.calls) == (["AMD Instinct MI300X"] * 3, ["amdsmi_init"])
        assert (len(hanging.started), [record.levelno for record in caplog.records]) == (1, [logging.WARNING])
    finally:
        hanging.release()


FORKS = """
import os
from kalign_rocm import identity
from tests.rocm.fakes import FakeSmi, Processor
identity.AMDSMI._lock.acquire()
child = os.fork()
if not child:
    os._exit(0 if identity.driver_version(FakeSmi(Processor())) == "6.10.5" else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="fork exists on POSIX only")
def test_a_fork_while_another_thread_asks(child: Callable[..., Any]) -> None:
    """A child that was forked while amdsmi was in use asks for itself and waits for nobody."""
    done = child(FORKS)
    assert done.stdout == "0\n", done.stderr


# --- the package --------------------------------------------------------------------------------------------------

BROKEN = {
    "missing": "raise ModuleNotFoundError('amdsmi')",
    "no library": "print('libamd_smi.so: cannot open')\nraise KeyError('libamd_smi.so')",
    "older library": "raise AttributeError('undefined symbol: amdsmi_get_gpu_xcd_counter')",
    "broken library": "raise OSError('wrong ELF class')",
    "leaves": "raise SystemExit(1)",
    "another's": "VERSION = 1",
}


@pytest.mark.parametrize("source", BROKEN.values(), ids=BROKEN)
def test_a_package_that_cannot_be_used(
    source: str, sys_tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """However importing amdsmi fails, and whatever it prints, torch and the kernel name the device."""
    (sys_tree / "amdsmi.py").write_text(source, encoding="ascii")
    monkeypatch.syspath_prepend(str(sys_tree))
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    found = identity.identity(properties(), root=sys_tree)
    sys.modules.pop("amdsmi", None)
    assert (found.known, capsys.readouterr().out) == (True, "")


def test_another_s_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of that name that is not AMD's is not used, and the reason says what to type."""
    monkeypatch.setitem(sys.modules, "amdsmi", ModuleType("amdsmi"))
    module, reason = identity.library()
    assert module is None
    assert "pip uninstall -y amdsmi" in reason


def test_every_function_exists_in_the_real_package() -> None:
    """Each amdsmi function that is asked for, here and in the fake, is one of the real package's."""
    spec = importlib.util.find_spec("amdsmi")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("amdsmi is not installed")
    source = Path(spec.submodule_search_locations[0], "amdsmi_interface.py").read_text(encoding="utf-8")
    asked = set(re.findall(r"\bamdsmi_(?:get|init|shut)\w*", Path(identity.__file__).read_text(encoding="utf-8")))
    assert [name for name in sorted(asked | set(FUNCTIONS)) if f"def {name}(" not in source] == []


def test_the_real_package_without_its_library(child: Callable[..., Any]) -> None:
    """The real package, whose import fails where ROCm is not installed, costs nothing and prints nothing."""
    spec = importlib.util.find_spec("amdsmi")
    if spec is None or spec.origin is None:
        pytest.skip("amdsmi is not installed")
    code = "from kalign_rocm import identity; from tests.rocm.fakes import properties; identity.identity(properties())"
    done = child(code, Path(spec.origin).parents[1])
    assert (done.returncode, done.stdout) == (0, "")


# --- the driver ---------------------------------------------------------------------------------------------------


def test_the_driver_is_amdsmi_s(machine: Path) -> None:
    """amdsmi's driver version is the driver's."""
    assert identity.driver_version(FakeSmi(Processor()), machine) == "6.10.5"


def test_the_driver_without_amdsmi(machine: Path) -> None:
    """Without amdsmi the driver's own file tells its version."""
    (machine / "sys/module/amdgpu").mkdir(parents=True)
    (machine / "sys/module/amdgpu/version").write_text("6.8.5\n", encoding="ascii")
    assert identity.driver_version(Unreachable(), machine) == "6.8.5"


def test_the_driver_inside_the_kernel(machine: Path) -> None:
    """A driver without a version of its own is named by the kernel's release."""
    (machine / "sys/module/amdgpu").mkdir(parents=True)
    (machine / "proc/sys/kernel").mkdir(parents=True)
    (machine / "proc/sys/kernel/osrelease").write_text("6.14.0-29-generic\n", encoding="ascii")
    assert identity.driver_version(Unreachable(), machine) == "kernel 6.14.0-29-generic"


def test_no_driver(machine: Path) -> None:
    """Where nothing tells a driver's version it is unknown."""
    assert identity.driver_version(Unreachable(), machine) == "unknown"
