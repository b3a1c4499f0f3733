"""Which platform the shipped plugins choose between them, on machines as users have them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kalign_core import embedded
from kalign_core.environment import Environment, TorchBuild
from kalign_core.hal.select import Selection, select
from kalign_core.plugins import Plugins
from kalign_cuda import plugin as cuda
from kalign_rocm import plugin as rocm

CUDA, ROCM, HOST = TorchBuild("2.11.0", cuda="13.0"), TorchBuild("2.11.0", hip="7.0"), TorchBuild("2.11.0")
NVIDIA, CONTAINER = ("/dev/nvidiactl", "/dev/dri"), ("/proc/driver/nvidia/version",)
AMD, WSL = ("/dev/kfd", "/dev/dri"), ("/dev/dxg",)


@dataclass(frozen=True)
class Machine:
    """Device files, torch's build, and variables; ``chosen`` is what should be used."""

    chosen: str | None
    files: Sequence[str] = ()
    torch: TorchBuild | None = HOST
    variables: dict[str, str] = field(default_factory=dict)
    triton: bool = True


MACHINES = {
    "NVIDIA": Machine("cuda", NVIDIA, CUDA),
    "NVIDIA in a container": Machine("cuda", CONTAINER, CUDA),
    "NVIDIA under WSL": Machine("cuda", WSL, CUDA),
    "NVIDIA on Tegra": Machine("cuda", ("/dev/nvmap",), CUDA),
    "NVIDIA, torch for the CPU": Machine("cpu", NVIDIA),
    "NVIDIA, torch for AMD": Machine("cpu", NVIDIA, ROCM),
    "NVIDIA, no torch": Machine(None, NVIDIA, None),
    "NVIDIA, no triton": Machine(None, NVIDIA, CUDA, triton=False),
    "NVIDIA, one device": Machine("cuda", NVIDIA, CUDA, {"CUDA_VISIBLE_DEVICES": "3"}),
    "NVIDIA, a slice": Machine("cuda", NVIDIA, CUDA, {"CUDA_VISIBLE_DEVICES": "MIG-1111"}),
    "NVIDIA, hidden": Machine("cpu", NVIDIA, CUDA, {"CUDA_VISIBLE_DEVICES": ""}),
    "NVIDIA, hidden by number": Machine("cpu", NVIDIA, CUDA, {"CUDA_VISIBLE_DEVICES": "-1"}),
    "NVIDIA, AMD's mask": Machine("cuda", NVIDIA, CUDA, {"HIP_VISIBLE_DEVICES": "-1", "ROCR_VISIBLE_DEVICES": ""}),
    "NVIDIA, interpreting": Machine("cpu", NVIDIA, CUDA, {"TRITON_INTERPRET": "1"}),
    "no driver, torch for NVIDIA": Machine("cpu", (), CUDA),
    "AMD": Machine("rocm", AMD, ROCM),
    "AMD under WSL": Machine("rocm", WSL, ROCM),
    "AMD, torch for the CPU": Machine("cpu", AMD),
    "AMD, torch for NVIDIA": Machine("cpu", AMD, CUDA),
    "AMD, no render nodes": Machine("cpu", ("/dev/kfd",), ROCM),
    "AMD, render nodes alone": Machine("cpu", ("/dev/dri",), ROCM),
    "AMD, one device": Machine("rocm", AMD, ROCM, {"HIP_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": "1,0"}),
    "AMD, hidden from HIP": Machine("cpu", AMD, ROCM, {"HIP_VISIBLE_DEVICES": "-1"}),
    "AMD, hidden from ROCr": Machine("cpu", AMD, ROCM, {"ROCR_VISIBLE_DEVICES": ""}),
    "AMD, hidden under CUDA's name": Machine("cpu", AMD, ROCM, {"CUDA_VISIBLE_DEVICES": "-1"}),
    "AMD, interpreting": Machine("cpu", AMD, ROCM, {"TRITON_INTERPRET": "true"}),
    "no driver, torch for AMD": Machine("cpu", (), ROCM),
    "both, torch for NVIDIA": Machine("cuda", NVIDIA + AMD, CUDA),
    "both, torch for AMD": Machine("rocm", NVIDIA + AMD, ROCM),
    "both, torch for the CPU": Machine("cpu", NVIDIA + AMD),
    "both, NVIDIA hidden": Machine("cpu", NVIDIA + AMD, CUDA, {"CUDA_VISIBLE_DEVICES": "-1"}),
    "neither": Machine("cpu"),
    "neither, no triton": Machine(None, triton=False),
    "neither, no torch": Machine(None, torch=None),
}


def selected(machine: Machine, root: Path, wanted: str | None = None) -> Selection:
    for file in machine.files:
        path = root / file.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    plugins = Plugins().with_module("core-platforms", embedded).with_module("cuda", cuda).with_module("rocm", rocm)
    return select(Environment(machine.variables, root, machine.torch, machine.triton), plugins, wanted)


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_the_right_platform_is_chosen(machine: Machine, tmp_path: Path) -> None:
    """The vendor that torch was built for is used where its device is there and visible; else the interpreter is."""
    assert selected(machine, tmp_path).chosen == machine.chosen


@pytest.mark.parametrize("machine", MACHINES.values(), ids=MACHINES)
def test_every_platform_has_a_reason(machine: Machine, tmp_path: Path) -> None:
    """Each platform of the table says in one line why it can be used or why it cannot."""
    rows = selected(machine, tmp_path).rows
    assert [row.name for row in rows] == ["cpu", "cuda", "rocm"]
    assert [row.reason for row in rows if not row.reason or "\n" in row.reason] == []


@pytest.fixture
def every_machine(tmp_path: Path) -> Callable[[], list[str | None]]:
    """``every_machine()`` gives what is chosen on each of the machines, in their order."""
    roots = [tmp_path / str(number) for number in range(len(MACHINES))]

    def choose() -> list[str | None]:
        return [selected(machine, root).chosen for machine, root in zip(MACHINES.values(), roots, strict=True)]

    return choose


def test_threads_choose_alike(every_machine: Callable[[], list[str | None]]) -> None:
    """Threads that select at once all choose what one alone does."""
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: every_machine(), range(8)))
    assert found == [[machine.chosen for machine in MACHINES.values()]] * 8


@pytest.mark.skipif(sys.platform == "win32", reason="fork exists on POSIX only")
def test_a_child_of_fork_chooses_alike(child: Callable[..., Any]) -> None:
    """A process forked after selection has the same choice, and selecting once more in it changes nothing."""
    done = child(FORKED)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


FORKED = """
import os
from kalign_core import hal
from kalign_core.environment import Environment
before = hal.selection
child = os.fork()
if not child:
    again = hal.select.select(Environment.current(), hal.plugins, None)
    os._exit(0 if hal.selection is before and again.chosen == before.chosen else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("wanted", ["cuda", "rocm"])
def test_what_is_asked_for_works_or_says_why(wanted: str, tmp_path: Path) -> None:
    """A platform that is asked for by name and cannot be used leaves none, with the probe's reason."""
    selection = selected(MACHINES["neither"], tmp_path, wanted)
    assert selection.chosen is None
    assert "torch 2.11.0 is built for the CPU" in selection.why
