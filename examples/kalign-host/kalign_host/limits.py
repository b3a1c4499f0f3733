"""What the device can take: its model, and the launches that need not be tried.

A limit of 0 is no limit. Imported by the plugin, so it imports nothing of a device.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kalign_core.records import Config, DeviceModel

if TYPE_CHECKING:
    from kalign_core.declare import Kernel
    from kalign_core.records import Problem

# kalign takes ``backend="interpreter"`` for a platform on which kernels are interpreted; others name Triton's backend.
MODEL = DeviceModel(
    backend="interpreter", arch="host", warp_size=1, max_warps=64,
    shared_bytes=0, registers_per_block=0, registers_per_thread=0,
)  # fmt: skip
LAUNCH_OPTIONS = frozenset({"num_warps", "num_stages"})
LARGEST_TILE = 1 << 22
_TILES = ("ROWS", "BLOCK", "BM", "BN")


def veto(kernel: Kernel, problem: Problem, config: Config) -> str | None:
    """Why ``config`` need not be tried: it is another launch in name only, or a tile that memory should not hold."""
    reference = kernel.reference_config(problem)
    for name in sorted(LAUNCH_OPTIONS):
        if config.get(name) != reference.get(name):
            return f"this processor has nothing that {name} could change"
    tile = math.prod(int(config[name]) for name in _TILES if name in config)
    return f"a tile of {tile} elements, at most {LARGEST_TILE} are kept at once" if tile > LARGEST_TILE else None
