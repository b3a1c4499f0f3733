"""Launches worth trying on NVIDIA devices: a first space per kernel family, best known first.

A candidate is the reference with some of the kernel's knobs changed; contract knobs stay. Tiles come from the winners
that public tuned files record for each architecture, with their neighbours; sizes prune what cannot pay. At most
``MOST`` candidates are given, so the order matters where a space is cut.

Imports nothing but the standard library, ``kalign_core``'s records and declarations, and ``limits``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kalign_core.declare import next_power_of_2
from kalign_core.held import held_elements
from kalign_core.records import Config, DeviceModel, Problem
from kalign_cuda import limits

if TYPE_CHECKING:
    from kalign_core.declare import Kernel

MOST = 60
WARPS = (4, 8, 2, 1, 16)
LONG_ROW_WARPS = (*WARPS, 32)
BLOCKS = (2048, 1024, 4096, 8192, 512, 256)
ROWS = (1, 2, 4, 8, 16, 32)
POINTWISE_ELEMENTS = (4, 64)
ROW_ELEMENTS = (2, 64)
# Two 16-byte loads of a 2-byte type a thread: enough in flight, few enough registers.
PREFERRED_ELEMENTS = 16
# Several rows to a program pay while rows are short; beyond this they only lengthen the last wave.
MOST_ELEMENTS = 16384

# Rows x columns x depth of a tile for 2-byte operands, the warps and the stages to try it with, best known first.
Tile = tuple[int, int, int, tuple[int, ...], tuple[int, ...]]
AMPERE_FEW: tuple[Tile, ...] = (
    (16, 64, 128, (4,), (4, 3, 5)),
    (16, 128, 128, (4, 8), (3,)),
    (16, 32, 128, (4, 2), (4, 5)),
    (16, 64, 64, (4,), (5, 4)),
    (32, 64, 128, (4,), (3,)),
    (32, 128, 64, (4,), (3, 4)),
    (64, 64, 32, (4,), (4, 5)),
    (64, 64, 64, (4,), (3, 4)),
    (64, 128, 32, (4,), (4, 3)),
    (64, 128, 64, (4, 8), (3,)),
    (128, 64, 32, (4,), (4, 3)),
    (128, 128, 32, (4, 8), (4, 3)),
    (128, 128, 64, (4, 8), (3,)),
)
AMPERE_MANY: tuple[Tile, ...] = (
    (128, 256, 32, (8,), (3, 4)),
    (256, 128, 32, (8,), (3, 4)),
    (128, 128, 32, (4, 8), (4, 3, 5)),
    (128, 128, 64, (4, 8), (3, 2)),
    (128, 64, 32, (4,), (4, 3, 5)),
    (64, 128, 32, (4,), (4, 3, 5)),
    (64, 256, 32, (4, 8), (4, 3)),
    (256, 64, 32, (4, 8), (4, 3)),
    (128, 64, 64, (4,), (3, 4)),
    (64, 64, 32, (4,), (4, 5)),
    (64, 64, 64, (4,), (3, 4)),
)
# In the order of an exhaustive timing on an H200: M = 16 to 4096, N = K = 4096, bfloat16, inputs in the cache.
HOPPER_FEW: tuple[Tile, ...] = (
    (16, 32, 256, (4,), (4, 3, 5)),
    (16, 32, 64, (4,), (5, 4)),
    (16, 32, 128, (4,), (3, 4, 5)),
    (16, 64, 256, (4,), (3, 4)),
    (16, 64, 128, (4,), (4, 5)),
    (16, 128, 128, (4, 8), (3, 4)),
    (16, 128, 64, (4,), (5, 4)),
    (32, 32, 128, (4,), (5, 4)),
    (32, 64, 128, (4,), (4, 3)),
    (32, 128, 128, (4,), (3,)),
    (64, 32, 128, (4,), (4, 5, 3)),
    (64, 128, 128, (4, 8), (3, 4)),
    (64, 32, 256, (4,), (3,)),
    (64, 64, 128, (4,), (4, 5, 3)),
    (64, 128, 64, (4,), (4, 3, 5)),
    (64, 64, 64, (4,), (5, 4)),
    (64, 256, 64, (4, 8), (4, 3)),
    (128, 64, 128, (8, 4), (4, 3)),
    (128, 64, 64, (4,), (5, 4, 3)),
    (128, 128, 64, (4, 8), (3, 4)),
    (128, 256, 64, (8,), (3,)),
)
HOPPER_MANY: tuple[Tile, ...] = (
    (128, 128, 64, (4, 8), (3, 5, 4)),
    (256, 128, 64, (8,), (4, 3)),
    (128, 256, 64, (8,), (4, 3)),
    (128, 128, 128, (8, 4), (3, 2)),
    (256, 128, 32, (8,), (5, 4)),
    (64, 128, 128, (4,), (3, 4)),
    (128, 64, 128, (8, 4), (3, 4)),
    (64, 256, 64, (4, 8), (4, 3)),
    (256, 64, 64, (4, 8), (4, 3)),
    (64, 128, 64, (4,), (4, 5, 3)),
    (128, 64, 64, (4,), (5, 4, 3)),
    (128, 256, 128, (8,), (2,)),
    (128, 256, 32, (8,), (5, 4)),
    (64, 64, 128, (4,), (4, 3)),
    (64, 64, 64, (4,), (5, 4)),
)
BLACKWELL_MANY: tuple[Tile, ...] = (
    (256, 256, 64, (8,), (3, 2)),
    (128, 256, 64, (8,), (4, 3)),
    (128, 256, 128, (8, 4), (2,)),
    *HOPPER_MANY,
)
# From this many rows on the large tiles fill a device; below it those between an eighth of the rows and all of them do.
MANY_ROWS = 512
GROUPS = (8, 16, 4, 1)


def candidates(kernel: Kernel, problem: Problem, model: DeviceModel) -> tuple[Config, ...]:
    """At most ``MOST`` configurations worth trying for ``problem`` on ``model``, none beyond its limits."""
    reference, overlapping = kernel.reference_config(problem), limits.overlaps(kernel, model)
    make = FAMILIES.get(kernel.family, _declared if overlapping else _nothing)
    found: dict[Config, None] = {}
    for knobs in make(kernel, problem, model):
        config = reference.replace(**{name: value for name, value in knobs.items() if name in kernel.knobs})
        if config not in found and limits.veto(kernel, problem, model, config) is None:
            found[config] = None
    if overlapping:  # each beside its like, so that a short search has both
        found = {each: None for config in found for each in (config, config.replace(launch_pdl=True))}
        found = {reference.replace(launch_pdl=True): None, **found}
    return tuple(found)[:MOST]


def _nothing(kernel: Kernel, problem: Problem, model: DeviceModel) -> Iterator[dict[str, Any]]:
    """Families whose own knobs are all there is to try."""
    yield from ()


def _declared(kernel: Kernel, problem: Problem, model: DeviceModel) -> Iterator[dict[str, Any]]:
    """Every combination of the kernel's own knobs, to be tried overlapping as well."""
    for values in itertools.product(*kernel.knobs.values()):
        yield dict(zip(kernel.knobs, values, strict=True))


def _pointwise(kernel: Kernel, problem: Problem, model: DeviceModel) -> Iterator[dict[str, Any]]:
    """Block sizes up to the innermost dimension, with every warp count that gives a thread a sensible share."""
    widest = max(BLOCKS[-1], next_power_of_2(_row_length(kernel, problem)))
    for block, warps in _fitting(BLOCKS, WARPS, 1, POINTWISE_ELEMENTS, model):
        if block <= widest:
            yield {"BLOCK": block, "num_warps": warps}


def _rowwise(kernel: Kernel, problem: Problem, model: DeviceModel) -> Iterator[dict[str, Any]]:
    """Rows per program and warps for rows that are held whole; no more rows than there are."""
    width = held_elements(kernel, problem, Config(ROWS=1))
    there = next_power_of_2(dict(problem.dims).get(kernel.rows or "", ROWS[-1]))
    for rows, warps in _fitting(ROWS, WARPS if width <= MOST_ELEMENTS else LONG_ROW_WARPS, width, ROW_ELEMENTS, model):
        if rows == 1 or (rows <= there and rows * width <= MOST_ELEMENTS):
            yield {"ROWS": rows, "num_warps": warps}


def _matmul(kernel: Kernel, problem: Problem, model: DeviceModel) -> Iterator[dict[str, Any]]:
    """The architecture's tiles that the sizes fill, at the reference's grouping first, then the leaders at others."""
    sizes = dict(problem.dims)
    m, n, k = (next_power_of_2(sizes.get(name, 1)) for name in ("M", "N", "K"))
    bytes_each = limits.operand_bytes(kernel, problem)
    few, fitting = m < MANY_ROWS, []
    for rows, columns, depth, warps, stages in _tiles(model, m, few):
        depth = max(limits.SMALLEST_DOT, depth * 2 // bytes_each)
        if columns <= max(64, n) and depth <= max(64, k):
            pairs = [(w, s) for s in stages for w in warps]
            fitting += [{"BM": rows, "BN": columns, "BK": depth, "num_warps": w, "num_stages": s} for w, s in pairs]
    yield from fitting
    if not few:
        leaders = _spread(fitting)
        yield from ({**knobs, "GROUP_M": group} for group in GROUPS for knobs in leaders)


def _tiles(model: DeviceModel, m: int, few: bool) -> Sequence[Tile]:
    if not few:
        return HOPPER_MANY if model.arch == "sm_90" else BLACKWELL_MANY if model.tmem_columns else AMPERE_MANY
    tiles = HOPPER_FEW if model.arch == "sm_90" or model.tmem_columns else AMPERE_FEW
    return _near(tiles, m)


def _near(tiles: Sequence[Tile], m: int) -> list[Tile]:
    """The tiles whose rows suit ``m`` rows, nearest first: an eighth of them to all of them, and always 64."""
    wanted = min(max(16, m), 64)
    suiting = [tile for tile in tiles if min(m // 8, 64) <= tile[0] <= max(64, m)]
    return sorted(suiting, key=lambda tile: abs(math.log2(tile[0] / wanted)))


FAMILIES = {"pointwise": _pointwise, "rowwise": _rowwise, "matmul": _matmul}


def _row_length(kernel: Kernel, problem: Problem) -> int:
    """Product of the dimensions that are not rows."""
    return math.prod(size for dim, size in problem.dims if dim != kernel.rows)


def _fitting(
    sizes: Iterable[int], warps: Sequence[int], width: int, share: tuple[int, int], model: DeviceModel
) -> list[tuple[int, int]]:
    """Pairs of a size and a warp count that give a thread ``share`` elements, nearest to the preferred first."""
    pairs = []
    for size in sizes:
        for count in warps:
            each = size * width / (count * model.warp_size)
            if share[0] <= each <= share[1]:
                pairs.append((abs(math.log2(each / PREFERRED_ELEMENTS)), size, count))
    return [(size, count) for _, size, count in sorted(pairs, key=lambda pair: pair[0])]


def _spread(knobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first four with different tiles."""
    seen: dict[tuple[int, int, int], dict[str, Any]] = {}
    for each in knobs:
        seen.setdefault((each["BM"], each["BN"], each["BK"]), each)
    return list(seen.values())[:4]
