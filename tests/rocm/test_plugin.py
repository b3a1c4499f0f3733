"""Whether ROCm can be used, as far as the machine's description tells, and what the plugin provides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kalign_core.environment import Environment, TorchBuild
from kalign_core.plugin_check import check_module
from kalign_rocm import limits, plugin
from tests.cuda import samples

TORCH = TorchBuild("2.9.0+rocm6.4", hip="6.4.1")


@pytest.fixture
def machine(tmp_path: Path) -> Callable[..., Environment]:
    """``machine("/dev/kfd", HIP_VISIBLE_DEVICES="0")``: a machine with these files and variables."""

    def make(*files: str, **variables: str) -> Environment:
        for file in files or ("/dev/kfd", "/dev/dri"):
            path = tmp_path / file.lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        return Environment(variables=variables, root=tmp_path, torch=TORCH, triton=True)

    return make


# --- the probe ----------------------------------------------------------------------------------------------------


def test_a_machine_with_a_driver(machine: Callable[..., Environment]) -> None:
    """A ROCm build of torch, triton and a driver make ROCm usable; the reason names all that was found."""
    evidence = plugin.probe(machine())
    assert (evidence.usable, evidence.reason) == (True, "torch 2.9.0+rocm6.4 for ROCm 6.4.1, /dev/kfd")


def test_wsl_has_its_own_device(machine: Callable[..., Environment]) -> None:
    """Under WSL there is neither a compute device nor a render node."""
    assert plugin.probe(machine("/dev/dxg")).usable


@pytest.mark.parametrize("files", [("/dev/kfd",), ("/dev/dri",), ("/dev/nvidiactl",)], ids=str)
def test_half_a_driver(machine: Callable[..., Environment], files: tuple[str, ...]) -> None:
    """The compute device and the render nodes are both needed; the reason says how a container gets them."""
    evidence = plugin.probe(machine(*files))
    assert not evidence.usable
    assert "docker run --device=/dev/kfd --device=/dev/dri" in evidence.reason


BUILDS = {
    "none": (None, "torch is not installed"),
    "for the CPU": (TorchBuild("2.13.0+cpu"), "torch 2.13.0+cpu is built for the CPU"),
    "for NVIDIA": (TorchBuild("2.11.0+cu130", cuda="13.0"), "built for CUDA 13.0"),
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
    "all": ({}, True),
    "some": ({"HIP_VISIBLE_DEVICES": "1,0"}, True),
    "by UUID": ({"ROCR_VISIBLE_DEVICES": "GPU-1d37e1c4ab1a2d0e"}, True),
    "both": ({"HIP_VISIBLE_DEVICES": "1", "ROCR_VISIBLE_DEVICES": "1,0"}, True),
    "none for HIP": ({"HIP_VISIBLE_DEVICES": "-1"}, False),
    "an empty list for HIP": ({"HIP_VISIBLE_DEVICES": ""}, False),
    "none for ROCr": ({"ROCR_VISIBLE_DEVICES": "-1"}, False),
    "an empty list for ROCr": ({"ROCR_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "0"}, False),
    "none under CUDA's name": ({"CUDA_VISIBLE_DEVICES": "-1"}, False),
    "HIP's name before CUDA's": ({"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "0"}, True),
}


@pytest.mark.parametrize(("masks", "usable"), MASKS.values(), ids=MASKS)
def test_masks(machine: Callable[..., Environment], masks: dict[str, str], usable: bool) -> None:
    """A mask makes ROCm unusable only where it hides every device; nothing else is read from it."""
    assert plugin.probe(machine(**masks)).usable is usable


def test_no_mask(machine: Callable[..., Environment], monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe looks at the machine it is given, not at the process it runs in."""
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert plugin.probe(machine()).usable


@pytest.mark.parametrize(
    "variables", [{"HIP_VISIBLE_DEVICES": "-1"}, {"ROCR_VISIBLE_DEVICES": ""}, {"TRITON_INTERPRET": "1"}], ids=str
)
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
        "rocm",
        "kalign_rocm.platform:RocmPlatform",
        limits.MODELS,
    )


def test_the_hooks_answer() -> None:
    """The hooks give this vendor's space and its vetoes."""
    kernel, problem = samples.matmul(4096)
    model = limits.model_for("gfx942")
    found = tuple(plugin.kalign_candidates(kernel, problem, model))
    assert found
    assert plugin.kalign_veto(kernel, problem, model, found[0].replace(num_warps=64)) is not None


@pytest.mark.parametrize("module", ["plugin", "identity", "limits", "spaces"])
def test_modules_are_light(child: Callable[..., Any], module: str) -> None:
    """Importing any module but the platform brings in no torch, no triton, no driver library, and selects nothing."""
    heavy = ("torch", "triton", "pynvml", "amdsmi", "kalign_core.hal")
    done = child(f"import kalign_rocm.{module}, sys; print([name for name in {heavy} if name in sys.modules])")
    assert done.stdout == "[]\n", done.stderr
