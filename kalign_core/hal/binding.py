"""Ties a compiled kernel to its grid and constants: what every platform's prebound launch has in common.

A bound launch is called with the run-time arguments alone. The grid depends on the bucketed dimensions only, all other
sizes being fixed by the problem, so that it is computed once per size and kept in a bounded table.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kalign_core.errors import CandidateFailed
from kalign_core.isolate import reason_of
from kalign_core.records import Problem, join_facts

if TYPE_CHECKING:
    from kalign_core.declare import Kernel
    from kalign_core.records import Config

Grid = tuple[int, int, int]
GRID_LIMITS: Grid = (2**31 - 1, 65535, 65535)
MOST_PROGRAMS = 2**31 - 1
_KEPT_GRIDS = 4096


def grid_of(kernel: Kernel, problem: Problem, config: Config) -> Grid:
    """The launch grid, checked against what devices accept.

    Raises ``CandidateFailed`` where it cannot be computed or is out of range. An empty grid is in range: a call on
    empty tensors launches nothing.
    """
    try:
        shape = tuple(map(operator.index, kernel.grid(problem, config)))
    except Exception as error:
        raise CandidateFailed(
            f"the grid of {kernel.name} cannot be computed for {join_facts(problem.dims)}: {reason_of(error)}",
            why="a grid is one to three whole numbers, given by the kernel's own function",
        ) from error
    if not 1 <= len(shape) <= 3:
        raise CandidateFailed(f"grid {shape} of {kernel.name} has {len(shape)} axes", why="a grid has 1 to 3 axes")
    x, y, z = (*shape, 1, 1)[:3]
    grid = (x, y, z)
    for axis, (size, limit) in enumerate(zip(grid, GRID_LIMITS, strict=True)):
        if not 0 <= size <= limit:
            raise CandidateFailed(
                f"grid {shape} of {kernel.name} is out of range on axis {axis}",
                why=f"a device launches at most {limit} programs along that axis",
            )
    if grid[0] * grid[1] * grid[2] > MOST_PROGRAMS:
        raise CandidateFailed(
            f"grid {shape} of {kernel.name} has more than {MOST_PROGRAMS} programs",
            why="the launcher counts programs in 32 bits, and launches nothing where the product wraps to zero",
        )
    return grid


def grid_lookup(kernel: Kernel, problem: Problem, config: Config) -> Callable[[Sequence[Any]], Grid]:
    """A function of the run-time arguments that gives the grid for them."""
    bucketed = [(dim, kernel.parameters.index(dim)) for dim in kernel.dims if dim in kernel.bucket]
    if not bucketed:
        fixed = grid_of(kernel, problem, config)
        return lambda args: fixed
    kept: dict[Any, Grid] = {}

    def compute(sizes: dict[str, int]) -> Grid:
        dims = tuple((dim, sizes.get(dim, size)) for dim, size in problem.dims)
        return grid_of(kernel, replace(problem, dims=dims), config)

    if len(bucketed) == 1:
        dim, position = bucketed[0]

        def grid(args: Sequence[Any]) -> Grid:
            size = args[position]
            found = kept.get(size)
            if found is None:
                if len(kept) >= _KEPT_GRIDS:
                    kept.clear()
                found = kept[size] = compute({dim: size})
            return found

        return grid

    def grid_of_many(args: Sequence[Any]) -> Grid:
        sizes = tuple(args[position] for _, position in bucketed)
        found = kept.get(sizes)
        if found is None:
            if len(kept) >= _KEPT_GRIDS:
                kept.clear()
            found = kept[sizes] = compute({dim: args[position] for dim, position in bucketed})
        return found

    return grid_of_many
