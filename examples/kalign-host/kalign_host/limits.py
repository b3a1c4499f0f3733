"""What the device can take: its model, and the launches that must not be tried.

A limit of 0 is no limit. Imported by the plugin, so it imports nothing of a device.
"""

from __future__ import annotations

import math

from kalign_core.records import Config, DeviceModel

# Kernels are interpreted here; a device names Triton's backend and its own architecture. An interpreter has no warps:
# any number of them is accepted, and kalign sees to it that none is tried but the reference's.
MODEL = DeviceModel(
    backend="interpreter", arch="host", warp_size=1, max_warps=64,
    shared_bytes=0, registers_per_block=0, registers_per_thread=0,
)  # fmt: skip
LAUNCH_OPTIONS = frozenset({"num_warps", "num_stages"})
LARGEST_TILE = 1 << 22
_TILES = ("ROWS", "BLOCK", "BM", "BN")


def veto(config: Config) -> str | None:
    """Why ``config`` must not be tried: a tile that memory should not hold."""
    tile = math.prod(int(config[name]) for name in _TILES if name in config)
    return f"a tile of {tile} elements, at most {LARGEST_TILE} are kept at once" if tile > LARGEST_TILE else None
