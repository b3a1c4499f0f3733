"""The built-in plugin that provides the ``cpu`` platform: Triton's interpreter, on any machine.

A plugin like any vendor's, so that the core has one way to get a platform. The interpreter has no warps, no shared
memory and no registers, so its device model has no limits to refuse a candidate by. Imports neither torch nor triton.
"""

from __future__ import annotations

from kalign_core.environment import Environment
from kalign_core.hookspecs import hookimpl
from kalign_core.records import DeviceModel, Evidence, PlatformRecord

KALIGN_API = 1

MODEL = DeviceModel(
    backend="interpreter",
    arch="cpu",
    warp_size=1,
    max_warps=64,
    shared_bytes=0,
    registers_per_block=0,
    registers_per_thread=0,
)
# The words that Triton itself takes for true.
_TRUE = ("1", "true", "yes", "on", "y")


def probe(environment: Environment) -> Evidence:
    """Whether Triton's interpreter can run here: torch and triton installed, and the interpreter can be asked for."""
    if environment.torch is None:
        return Evidence(False, "torch is not installed; install the extra [cpu], or: pip install torch triton")
    if not environment.triton:
        return Evidence(False, "triton is not installed; install the extra [cpu], or: pip install triton")
    if environment.variables.get("TRITON_INTERPRET", "").lower() in _TRUE:
        return Evidence(True, "Triton's interpreter, by TRITON_INTERPRET")
    if "triton" in environment.loaded:
        reason = "triton was imported first; import kalign first or export TRITON_INTERPRET=1"
        return Evidence(False, reason)
    return Evidence(True, "Triton's interpreter")


@hookimpl
def kalign_platforms() -> list[PlatformRecord]:
    """The embedded default platform."""
    return [PlatformRecord("cpu", probe, "kalign_core.hal.cpu:CpuPlatform", models=(MODEL,), fallback=True)]
