"""How many blocks of a compiled kernel one unit of a device holds at once, estimated without the device.

The vendors' own formulas: CUDA's occupancy calculator (a warp gets registers from one of four partitions in steps of
256, a block shared memory in steps of 128 bytes and 1 KiB more than it asked for) and LLVM's for AMD
(``AMDGPUBaseInfo.cpp``: a wave gets vector registers from one of four SIMDs in steps of 8 a lane, a group LDS in steps
of 512 bytes). They are one formula with a ``Unit``'s numbers. It is an upper bound: how the warps of a block spread
over partitions, and what else runs, is left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from kalign_core.devices import DeviceModel


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Blocks and warps that a unit holds, as a share of the warps it could hold, and what there is no more of."""

    blocks: int
    warps: int
    share: float
    limited_by: str


def occupancy(model: DeviceModel, *, warps: int, registers: int, shared_bytes: int) -> Occupancy | None:
    """Estimate for blocks of ``warps`` warps with ``registers`` a thread and ``shared_bytes`` of shared memory.

    None where ``model`` does not say what a unit holds.
    """
    unit = model.unit
    if unit is None or warps < 1:
        return None
    shared = _rounded(shared_bytes + unit.reserved_bytes, unit.shared_step_bytes)
    a_warp = _rounded(max(registers, 1) * model.warp_size, unit.register_step)
    warps_with_registers = unit.partitions * (unit.registers // unit.partitions // a_warp)
    limits = {
        "warps": unit.warps // warps,
        "registers": warps_with_registers // warps,
        "shared memory": unit.shared_bytes // shared if shared else unit.blocks,
        "blocks": unit.blocks,
    }
    name = min(limits, key=lambda limit: limits[limit])
    blocks = limits[name]
    return Occupancy(blocks, blocks * warps, blocks * warps / unit.warps, name)


def _rounded(amount: int, step: int) -> int:
    return -(-amount // step) * step
