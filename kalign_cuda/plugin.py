"""The plugin of NVIDIA devices: its platform, its candidates, its vetoes.

The probe looks at the environment it is given and at nothing else: no context, no driver library, no torch. Imports
the standard library and ``kalign_core`` at its top, and nothing of ``kalign_core.hal``: importing that selects a
platform.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kalign_core.hookspecs import hookimpl
from kalign_core.records import Config, DeviceModel, Evidence, PlatformRecord, Problem
from kalign_cuda import limits, spaces

if TYPE_CHECKING:
    from kalign_core.declare import Kernel
    from kalign_core.environment import Environment

KALIGN_API = 1
# A driver on bare metal or in a container; the same without device nodes; WSL; Tegra.
DEVICE_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg", "/dev/nvmap")
MASK = "CUDA_VISIBLE_DEVICES"


@hookimpl
def kalign_platforms() -> Iterable[PlatformRecord]:
    """The platform ``cuda``."""
    return [PlatformRecord("cuda", probe, "kalign_cuda.platform:CudaPlatform", limits.MODELS)]


@hookimpl
def kalign_candidates(kernel: Kernel, problem: Problem, model: DeviceModel) -> Iterable[Config]:
    """Launches worth trying, best known first."""
    return spaces.candidates(kernel, problem, model)


@hookimpl
def kalign_veto(kernel: Kernel, problem: Problem, model: DeviceModel, config: Config) -> str | None:
    """A reason why ``config`` cannot work on ``model``."""
    return limits.veto(kernel, problem, model, config)


def probe(environment: Environment) -> Evidence:
    """Whether CUDA can be used in ``environment``, and why not, with what to type."""
    for reason in (_build(environment), _compiler(environment), _device(environment), _hidden(environment)):
        if reason:
            return Evidence(False, reason)
    torch = environment.torch
    found = next(path for path in DEVICE_FILES if environment.has(path))
    return Evidence(True, f"torch {torch.version if torch else ''} for CUDA {torch.cuda if torch else ''}, {found}")


def _build(environment: Environment) -> str:
    torch = environment.torch
    if torch is None:
        return "torch is not installed; type: pip install 'kalign[cuda]'"
    if torch.cuda is None:
        made_for = f"ROCm {torch.hip}" if torch.hip else "the CPU"
        return f"torch {torch.version} is built for {made_for}; install torch from a CUDA index of pytorch.org"
    return ""


def _compiler(environment: Environment) -> str:
    if not environment.triton:
        return "triton is not installed; type: pip install 'kalign[cuda]'"
    if environment.variables.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y"):
        return "TRITON_INTERPRET is set, so kernels would be interpreted; type: unset TRITON_INTERPRET"
    return ""


def _device(environment: Environment) -> str:
    if any(environment.has(path) for path in DEVICE_FILES):
        return ""
    return "no NVIDIA driver (no /dev/nvidiactl, no /proc/driver/nvidia); in a container type: docker run --gpus all"


def _hidden(environment: Environment) -> str:
    mask = environment.variables.get(MASK)
    if mask is None or not hides_everything(mask):
        return ""
    return f"{MASK}={mask!r} hides every device; type: unset {MASK}"


def hides_everything(mask: str) -> bool:
    """Whether no device is left: the list ends at its first word that names none, and a word twice empties it.

    Which devices a mask leaves is never worked out here; the run time knows.
    """
    named: list[str] = []
    for word in (part.strip() for part in mask.split(",")):
        if not (word[:1].isdecimal() or word.startswith(("GPU-", "MIG-"))):
            break
        named.append(word)
    return not named or len(set(named)) < len(named)
