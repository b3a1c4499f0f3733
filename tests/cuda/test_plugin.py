"""Whether CUDA can be used, as far as the machine's description tells, and what the plugin provides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kalign_core.environment import Environment, TorchBuild
from kalign_core.plugin_check import check_module
from kalign_cuda import limits, plugin
from tests.cuda import samples

TORCH = TorchBuild("2.11.0+cu130", cuda="13.0")


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Environment]:
    """``machine("/dev/nvidiactl", CUDA_VISIBLE_DEVICES="0")``: a machine with these files and variables."""

    def make(*files: str, **variables: str) -> Environment:
        for file in files or ("/dev/nvidiactl",):
            path = tmp_path / file.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        return Environment(variables=variables, root=tmp_path, torch=TORCH, triton=True)

    return make


# --- the probe ----------------------------------------------------------------------------------------------------


def test_a_machine_with_a_driver(machine: Callable[..., Environment]) -> None:
    """A CUDA build of torch, triton and a driver make CUDA usable; the reason names all that was found."""
    evidence = plugin.probe(machine())
    assert (evidence.usable, evidence.reason) == (True, "torch 2.11.0+cu130 for CUDA 13.0, /dev/nvidiactl")


@pytest.mark.parametrize("file", plugin.DEVICE_FILES)
def test_every_trace_of_a_driver_counts(machine: Callable[..., Environment], file: str) -> None:
    """Bare metal, a container without device control, WSL and Tegra each have their own trace."""
    assert plugin.probe(machine(file)).usable


def test_no_driver(machine: Callable[..., Environment]) -> None:
    """Without a trace of a driver the reason says so, and what a container needs."""
    evidence = plugin.probe(machine("/dev/kfd"))
    assert not evidence.usable
    assert "docker run --gpus all" in evidence.reason


BUILDS = {
    "none": (None, "torch is not installed"),
    "for the CPU": (TorchBuild("2.13.0+cpu"), "torch 2.13.0+cpu is built for the CPU"),
    "for AMD": (TorchBuild("2.9.0+rocm6.4", hip="6.4.1"), "built for ROCm 6.4.1"),
}


@pytest.mark.parametrize(("torch", "reason"), BUILDS.values(), ids=BUILDS)
def test_other_builds_of_torch(machine: Callable[..., Environment], torch: TorchBuild | None, reason: str) -> None:
    """Another build of torch cannot drive the device, whatever devices there are."""
    evidence = plugin.probe(replace(machine(), torch=torch))
    assert not evidence.usable
    assert reason in evidence.reason


def test_no_triton(machine: Callable[..., Environment]) -> None:
    """Without triton there is nothing to compile with."""
    assert not plugin.probe(replace(machine(), triton=False)).usable


INTERPRET = {"1": False, "true": False, "ON": False, "yes": False, "y": False, "0": True, "false": True, "": True}


@pytest.mark.parametrize(("value", "usable"), INTERPRET.items())
def test_an_interpreting_process(machine: Callable[..., Environment], value: str, usable: bool) -> None:
    """A process that interprets kernels cannot use the device; the words for it are Triton's own."""
    assert plugin.probe(machine(TRITON_INTERPRET=value)).usable is usable


MASKS = {
    "": False,
    "-1": False,
    " -1": False,
    "NoDevFiles": False,
    "none": False,
    ",0": False,
    "0,0": False,
    "GPU-3f59,GPU-3f59": False,
    "0": True,
    "3,1": True,
    "0,,1": True,
    "0,-1,0": True,
    "1gpu2": True,
    "GPU-3f597b0b-769d-499a-f2cb-d47b93f3ba1d": True,
    "GPU-3f597b0b": True,
    "MIG-11111111-2222-3333-4444-555555555555": True,
    "MIG-GPU-3f597b0b-769d-499a-f2cb-d47b93f3ba1d/1/0": True,
}


@pytest.mark.parametrize(("mask", "usable"), MASKS.items())
def test_masks(machine: Callable[..., Environment], mask: str, usable: bool) -> None:
    """A mask makes CUDA unusable only where it hides every device; nothing else is read from it."""
    assert plugin.probe(machine(CUDA_VISIBLE_DEVICES=mask)).usable is usable


def test_no_mask(machine: Callable[..., Environment], monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe looks at the machine it is given, not at the process it runs in."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert plugin.probe(machine()).usable


@pytest.mark.parametrize("variables", [{"CUDA_VISIBLE_DEVICES": "-1"}, {"TRITON_INTERPRET": "1"}], ids=str)
def test_a_reason_says_what_to_type(machine: Callable[..., Environment], variables: dict[str, str]) -> None:
    """A reason that the user can remove says how, in one line."""
    reason = plugin.probe(machine(**variables)).reason
    assert "\n" not in reason
    assert f"unset {next(iter(variables))}" in reason


# --- the module ---------------------------------------------------------------------------------------------------


def test_the_module_keeps_the_contract() -> None:
    """The plugin's hooks have known names and the exact arguments."""
    check_module(plugin)


def test_what_it_provides() -> None:
    """One platform with the models it can compile for, and a factory that names its class."""
    (record,) = plugin.kalign_platforms()
    assert (record.name, record.factory, record.models) == (
        "cuda",
        "kalign_cuda.platform:CudaPlatform",
        limits.MODELS,
    )


def test_the_hooks_answer() -> None:
    """The hooks give this vendor's space and its vetoes."""
    kernel, problem = samples.matmul(4096)
    model = limits.model_for("sm_90")
    found = tuple(plugin.kalign_candidates(kernel, problem, model))
    assert found
    assert plugin.kalign_veto(kernel, problem, model, found[0].replace(num_warps=64)) is not None


@pytest.mark.parametrize("module", ["plugin", "identity", "limits", "spaces"])
def test_modules_are_light(child: Callable[..., Any], module: str) -> None:
    """Importing any module but the platform brings in no torch, no triton, no driver library, and selects nothing."""
    heavy = ("torch", "triton", "pynvml", "amdsmi", "kalign_core.hal")
    done = child(f"import kalign_cuda.{module}, sys; print([name for name in {heavy} if name in sys.modules])")
    assert done.stdout == "[]\n", done.stderr
