"""The plugin of AMD devices: its platform, its candidates, its vetoes.

The probe looks at the environment it is given and at nothing else: no context, no driver library, no torch. Imports
the standard library and ``kalign_core`` at its top, and nothing of ``kalign_core.hal``: importing that selects a
platform.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kalign_core.hookspecs import hookimpl
from kalign_core.records import Config, DeviceModel, Evidence, PlatformRecord, Problem
from kalign_rocm import limits, spaces

if TYPE_CHECKING:
    from kalign_core.declare import Kernel
    from kalign_core.environment import Environment

KALIGN_API = 1
# The compute driver on bare metal or in a container; WSL.
DEVICE_FILES = ("/dev/kfd", "/dev/dxg")
RENDER_NODES = "/dev/dri"
MASKS = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
OUTER_MASK = "ROCR_VISIBLE_DEVICES"


@hookimpl
def kalign_platforms() -> Iterable[PlatformRecord]:
    """The platform ``rocm``."""
    return [PlatformRecord("rocm", probe, "kalign_rocm.platform:RocmPlatform", limits.MODELS)]


@hookimpl
def kalign_candidates(kernel: Kernel, problem: Problem, model: DeviceModel) -> Iterable[Config]:
    """Launches worth trying, best known first."""
    return spaces.candidates(kernel, problem, model)


@hookimpl
def kalign_veto(kernel: Kernel, problem: Problem, model: DeviceModel, config: Config) -> str | None:
    """A reason why ``config`` cannot work on ``model``."""
    return limits.veto(kernel, problem, model, config)


def probe(environment: Environment) -> Evidence:
    """Whether ROCm can be used in ``environment``, and why not, with what to type."""
    for reason in (_build(environment), _compiler(environment), _device(environment), _hidden(environment)):
        if reason:
            return Evidence(False, reason)
    torch = environment.torch
    found = next(path for path in DEVICE_FILES if environment.has(path))
    return Evidence(True, f"torch {torch.version if torch else ''} for ROCm {torch.hip if torch else ''}, {found}")


def _build(environment: Environment) -> str:
    torch = environment.torch
    if torch is None:
        return "torch is not installed; type: pip install 'kalign[rocm]' with a ROCm index of pytorch.org"
    if torch.hip is None:
        made_for = f"CUDA {torch.cuda}" if torch.cuda else "the CPU"
        return f"torch {torch.version} is built for {made_for}; install torch from a ROCm index of pytorch.org"
    return ""


def _compiler(environment: Environment) -> str:
    if not environment.triton:
        return "triton is not installed; reinstall torch from its ROCm index, which brings triton along"
    if environment.variables.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y"):
        return "TRITON_INTERPRET is set, so kernels would be interpreted; type: unset TRITON_INTERPRET"
    return ""


def _device(environment: Environment) -> str:
    if environment.has("/dev/kfd") and not environment.has(RENDER_NODES):
        return f"/dev/kfd without {RENDER_NODES}; in a container type: docker run --device=/dev/kfd --device=/dev/dri"
    if any(environment.has(path) for path in DEVICE_FILES):
        return ""
    return "no AMD compute driver (no /dev/kfd); in a container type: docker run --device=/dev/kfd --device=/dev/dri"


def _hidden(environment: Environment) -> str:
    variables = environment.variables
    inner = next((name for name in MASKS if name in variables), "")
    for mask in (OUTER_MASK, inner):
        if mask in variables and hides_everything(variables[mask]):
            return f"{mask}={variables[mask]!r} hides every device; type: unset {mask}"
    return ""


def hides_everything(mask: str) -> bool:
    """Whether no device is left: the list ends at its first word that names none.

    Which devices a mask leaves is never worked out here; the run time knows.
    """
    word = mask.split(",", 1)[0].strip()
    return not (word[:1].isdecimal() or word.upper().startswith("GPU-"))
