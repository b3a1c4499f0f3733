"""How many blocks of a kernel one unit holds, against figures worked by hand from the vendors' tables."""

from __future__ import annotations

import dataclasses

import pytest

from kalign_core import hal
from kalign_core.occupancy import Occupancy, occupancy
from kalign_core.records import DeviceModel
from kalign_core.tuner.targets import targets

MODELS: dict[str, DeviceModel] = {target.model.arch: target.model for target in targets(hal.plugins).values()}
# Warps, registers a thread and shared bytes of a block; blocks a multiprocessor.
CUDA = {
    ("sm_80", 8, 32, 0): (8, "warps"),
    ("sm_80", 8, 64, 0): (4, "registers"),
    ("sm_80", 8, 65, 0): (3, "registers"),  # 65 registers are 2304 a warp: 28 warps, 3 blocks
    ("sm_80", 4, 255, 0): (2, "registers"),
    ("sm_80", 1, 16, 0): (32, "blocks"),
    ("sm_80", 4, 32, 49152): (3, "shared memory"),
    ("sm_86", 8, 32, 0): (6, "warps"),
    ("sm_86", 1, 16, 0): (16, "blocks"),
    ("sm_89", 4, 32, 101376): (1, "shared memory"),
    ("sm_90", 4, 168, 0): (3, "registers"),
    ("sm_90", 8, 128, 114688): (2, "registers"),
    ("sm_90", 4, 32, 232448): (1, "shared memory"),
    ("sm_120", 8, 40, 0): (6, "warps"),
}
# Waves a group, registers a lane and LDS bytes; groups a compute unit.
AMD = {
    ("gfx942", 4, 64, 0): (8, "warps"),
    ("gfx942", 4, 68, 0): (7, "registers"),
    ("gfx942", 4, 128, 0): (4, "registers"),
    ("gfx942", 4, 169, 0): (2, "registers"),
    ("gfx942", 4, 512, 0): (1, "registers"),
    ("gfx942", 8, 128, 65536): (1, "shared memory"),
    ("gfx942", 8, 64, 20000): (3, "shared memory"),
    ("gfx950", 8, 64, 81920): (2, "shared memory"),
    ("gfx950", 16, 32, 0): (2, "warps"),
    ("gfx90a", 1, 32, 0): (32, "warps"),
}


@pytest.mark.parametrize(("block", "expected"), [*CUDA.items(), *AMD.items()], ids=str)
def test_blocks_that_a_unit_holds(block: tuple[str, int, int, int], expected: tuple[int, str]) -> None:
    """The scarcest of warps, registers, shared memory and blocks says how many blocks fit."""
    arch, warps, registers, shared_bytes = block
    found = occupancy(MODELS[arch], warps=warps, registers=registers, shared_bytes=shared_bytes)
    assert found is not None
    assert (found.blocks, found.limited_by) == expected


def test_the_share_is_of_warps() -> None:
    """Occupancy is the share of a unit's warps that are there."""
    found = occupancy(MODELS["sm_90"], warps=4, registers=168, shared_bytes=0)
    assert found == Occupancy(blocks=3, warps=12, share=12 / 64, limited_by="registers")


def test_a_block_that_does_not_fit() -> None:
    """A block that needs more than a unit has is held not once."""
    found = occupancy(MODELS["gfx942"], warps=4, registers=32, shared_bytes=65537)
    assert (found and found.blocks, found and found.share) == (0, 0.0)


def test_a_unit_that_is_not_described() -> None:
    """Where a model does not say what its units hold there is no estimate."""
    unknown = dataclasses.replace(MODELS["sm_90"], unit=None)
    assert occupancy(unknown, warps=4, registers=32, shared_bytes=0) is None


@pytest.mark.parametrize("model", MODELS.values(), ids=str)
def test_every_device_describes_its_units(model: DeviceModel) -> None:
    """Each device that can be compiled for says what a unit holds, at least one block as large as the device takes."""
    assert model.unit is not None
    found = occupancy(model, warps=model.max_warps, registers=32, shared_bytes=model.shared_bytes)
    assert found is not None
    assert found.blocks >= 1
