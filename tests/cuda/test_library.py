"""How NVML is asked: opened and closed again, by threads and after a fork, by whatever package is installed."""

from __future__ import annotations

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

from kalign_cuda import identity
from tests.cuda.fakes import FUNCTIONS, Board, FakeNvml, Unreachable, properties, uuid_of
from tests.hanging import Hanging

# --- how NVML is asked --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [{}, {"nvmlDeviceGetPciInfo": ValueError("x")}], ids=["answers", "raises"])
def test_nvml_is_closed_again(failing: dict[str, BaseException]) -> None:
    """Every query shuts down what it initialised."""
    nvml = FakeNvml(Board(), failing=failing)
    identity.identity(properties(), nvml)
    assert (nvml.open, nvml.calls.count("nvmlInit"), nvml.calls[-1]) == (0, 1, "nvmlShutdown")


def test_threads_take_turns() -> None:
    """Threads that ask at once are served one after the other, each with its own device."""
    nvml = FakeNvml(*(Board(n) for n in range(8)))
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: identity.identity(properties(n), nvml).pci_device_id, range(8)))
    assert found == ["10de:2335"] * 8


def test_a_driver_that_hangs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A call that does not return costs the deadline once, and one warning; later queries go on without NVML."""
    hanging = Hanging()
    monkeypatch.setattr(threading, "Thread", hanging.threads())
    nvml = FakeNvml(Board(), nvmlInit=hanging)
    try:
        found = [identity.identity(properties(), nvml).key for _ in range(3)]
        assert (found, nvml.calls) == ([f"GPU-{uuid_of(0)}"] * 3, ["nvmlInit"])
        assert (len(hanging.started), [record.levelno for record in caplog.records]) == (1, [logging.WARNING])
    finally:
        hanging.release()


FORKS = """
import os
from kalign_cuda import identity
from tests.cuda.fakes import Board, FakeNvml
identity.NVML._lock.acquire()
child = os.fork()
if not child:
    os._exit(0 if identity.driver_version(FakeNvml(Board())) == "580.159.04" else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="fork exists on POSIX only")
def test_a_fork_while_another_thread_asks(child: Callable[..., Any]) -> None:
    """A child that was forked while NVML was in use asks for itself and waits for nobody."""
    done = child(FORKS)
    assert done.stdout == "0\n", done.stderr


# --- the real package ---------------------------------------------------------------------------------------------


def test_the_real_package_is_recognised() -> None:
    """nvidia-ml-py is told from the package that hides it."""
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    assert identity.library() == (pynvml, "")


def test_every_function_exists_in_the_real_package() -> None:
    """Each NVML function that is asked for, here and in the fake, is one of nvidia-ml-py's."""
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    asked = set(re.findall(r"\bnvml[A-Z]\w+", Path(identity.__file__).read_text(encoding="utf-8"))) | set(FUNCTIONS)
    assert [name for name in sorted(asked) if not hasattr(pynvml, name)] == []


def test_the_real_package_does_not_know_a_made_up_device(tmp_path: Path) -> None:
    """Asked of the real NVML, with a driver or without, a device it does not know is what torch says of it."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    assert identity.identity(properties(), root=tmp_path).key == f"GPU-{uuid_of(0)}"


def test_an_old_package_that_hides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The old pynvml is recognised, not used, and the reason says what to type."""
    monkeypatch.setitem(sys.modules, "pynvml", ModuleType("pynvml"))
    module, reason = identity.library()
    assert module is None
    assert "pip uninstall -y pynvml" in reason


def test_no_package_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """A missing package is said once, however often it is missed."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    found = [identity.driver_version(root=tmp_path) for _ in range(3)]
    assert (found, len(caplog.records)) == (["unknown"] * 3, 1)


# --- the driver ---------------------------------------------------------------------------------------------------

CLOSED = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version:  12.2.0\n"
)
OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (builder@)\nGCC: 15.3.0\n"


def test_the_driver_is_nvml_s() -> None:
    """NVML's driver version is the driver's."""
    assert identity.driver_version(FakeNvml(Board())) == "580.159.04"


@pytest.mark.parametrize(("text", "expected"), [(CLOSED, "535.104.05"), (OPEN, "580.159.04"), ("", "unknown")])
def test_the_driver_without_nvml(sys_tree: Path, text: str, expected: str) -> None:
    """Without NVML the kernel module's own file tells the driver's version, else it is unknown."""
    (sys_tree / "proc/driver/nvidia/version").write_text(text, encoding="ascii")
    assert identity.driver_version(Unreachable(), sys_tree) == expected


@pytest.mark.parametrize("answer", ["N/A", "", b"\xff", None, "error 12"])
def test_a_driver_version_that_is_none(sys_tree: Path, answer: object) -> None:
    """What is no version is not taken for one."""
    nvml = FakeNvml(Board(), nvmlSystemGetDriverVersion=lambda: answer)
    assert identity.driver_version(nvml, sys_tree) == "unknown"
