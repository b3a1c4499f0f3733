"""Grids: computed from the call, checked before a launch, kept in a bounded table."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from kalign_core.declare import Config, Kernel, powers_of_two
from kalign_core.errors import CandidateFailed
from kalign_core.hal import binding
from kalign_core.hal.binding import grid_lookup, grid_of
from kalign_core.kernels.matmul import matmul_kernel
from tests.core.scripted import FASTER, SCALE_REFERENCE, problem, scale_kernel, scale_problem

Grid = Callable[..., tuple[int, ...]]


def with_grid(grid: Grid, **changes: Any) -> Kernel:
    """``scale_kernel`` with another grid."""
    return dataclasses.replace(scale_kernel, grid=grid, **changes)


def of(*shape: int) -> tuple[int, int, int]:
    """The checked grid of a kernel that asks for ``shape``."""
    return grid_of(with_grid(lambda p, c: shape), scale_problem(), SCALE_REFERENCE)


def test_a_grid_has_three_axes() -> None:
    """What a declaration leaves out is one program."""
    assert [of(5), of(5, 6), of(5, 6, 7)] == [(5, 1, 1), (5, 6, 1), (5, 6, 7)]


def test_a_grid_follows_the_configuration() -> None:
    """More rows in a program are fewer programs."""
    grids = [grid_of(scale_kernel, scale_problem(17), config)[0] for config in (SCALE_REFERENCE, FASTER)]
    assert grids == [5, 3]


def test_empty_grids_are_legal() -> None:
    """A call on empty tensors launches nothing and is no fault."""
    assert grid_of(scale_kernel, scale_problem(0), SCALE_REFERENCE) == (0, 1, 1)


@pytest.mark.parametrize("shape", [(2**31 - 1,), (1, 65535), (1, 1, 65535), (32768, 65535)])
def test_the_largest_grids_are_legal(shape: tuple[int, ...]) -> None:
    """Devices take 2**31 - 1 programs along the first axis and 65,535 along the others."""
    assert of(*shape)[: len(shape)] == shape


@pytest.mark.parametrize(
    "shape", [(2**31,), (1, 65536), (1, 1, 65536), (-1,), (65536, 32768, 1), (65536, 65535, 1), (), (1, 1, 1, 1)]
)
def test_grids_that_no_device_takes_are_refused(shape: tuple[int, ...]) -> None:
    """A grid out of range, or one whose number of programs wraps round 32 bits, never reaches a launcher."""
    with pytest.raises(CandidateFailed, match=r"grid \(.*\) of scale"):
        of(*shape)


@pytest.mark.parametrize(
    "grid",
    [lambda p, c: (1 // (p.T - 4),), lambda p, c: (p.T / 4,), lambda p, c: 1, lambda p, c: None, lambda p, c: ("1",)],
    ids=["divides by zero", "a fraction", "no tuple", "nothing", "text"],
)
def test_a_grid_that_cannot_be_computed_is_a_failed_launch(grid: Grid) -> None:
    """Whatever a kernel's own function raises, or gives in place of whole numbers, is told with kernel and sizes."""
    with pytest.raises(CandidateFailed, match=r"the grid of scale cannot be computed for T=4 F=40: \w+Error: "):
        grid_of(with_grid(grid), scale_problem(), SCALE_REFERENCE)


def test_the_lookup_follows_bucketed_sizes() -> None:
    """One launch serves every size of its bucket, each with its own grid."""
    find = grid_lookup(scale_kernel, scale_problem(8), SCALE_REFERENCE)
    assert [find((None, None, t, 40)) for t in (3, 5, 0)] == [(1, 1, 1), (2, 1, 1), (0, 1, 1)]


def test_a_size_that_makes_the_grid_too_large_is_refused() -> None:
    """A configuration whose grid is legal at one size of its bucket fails at another where it is not."""
    find = grid_lookup(with_grid(lambda p, c: (1, p.T)), scale_problem(4), SCALE_REFERENCE)
    assert find((None, None, 65535, 40)) == (1, 65535, 1)
    with pytest.raises(CandidateFailed, match="out of range on axis 1"):
        find((None, None, 65536, 40))


def test_each_size_is_computed_once() -> None:
    """A size that was met before is a look-up."""
    asked: list[int] = []
    find = grid_lookup(with_grid(lambda p, c: (asked.append(p.T) or p.T,)), scale_problem(4), SCALE_REFERENCE)
    for t in (3, 4, 3, 4):
        find((None, None, t, 40))
    assert asked == [3, 4]


def test_a_fixed_grid_is_computed_when_binding() -> None:
    """A kernel without bucketed dimensions has one grid, which is checked when it is bound."""
    asked: list[int] = []
    made = with_grid(lambda p, c: (asked.append(1) or 2,), bucket={})
    find = grid_lookup(made, scale_problem(4), SCALE_REFERENCE)
    assert ([find(()), find(())], asked) == ([(2, 1, 1)] * 2, [1])


def test_several_bucketed_sizes_count_together() -> None:
    """With more than one bucketed dimension the grid follows all of them."""
    made = with_grid(lambda p, c: (p.T, p.F), bucket={"T": powers_of_two, "F": powers_of_two})
    find = grid_lookup(made, scale_problem(4, 8), SCALE_REFERENCE)
    assert [find((None, None, t, f)) for t, f in ((3, 8), (3, 7), (3, 8))] == [(3, 8, 1), (3, 7, 1), (3, 8, 1)]


@pytest.mark.parametrize("bucket", [{"T": powers_of_two}, {"T": powers_of_two, "F": powers_of_two}])
def test_the_table_is_bounded(bucket: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many sizes a process meets, the table stays small and the answers stay right."""
    monkeypatch.setattr(binding, "_KEPT_GRIDS", 8)
    find = grid_lookup(with_grid(lambda p, c: (p.T,), bucket=bucket), scale_problem(4), SCALE_REFERENCE)
    assert [find((None, None, t, 40))[0] for t in range(100)] == list(range(100))
    (kept,) = (cell.cell_contents for cell in find.__closure__ or () if isinstance(cell.cell_contents, dict))
    assert len(kept) <= 8


def test_a_product_s_grid_covers_every_tile() -> None:
    """Tiles are rounded up along both axes, on one axis of the grid."""
    config = Config(BM=64, BN=32, BK=32, GROUP_M=8, num_warps=4, num_stages=3, enable_fp_fusion=False)
    made = problem(
        matmul_kernel, {"M": 65, "N": 33, "K": 64}, a="bf16", b="bf16", bias=None, c="bf16", a_stride_m=64,
        a_stride_k=1, b_stride_k=33, b_stride_n=1, c_stride_m=33, c_stride_n=1,
    )  # fmt: skip
    assert grid_of(matmul_kernel, made, config) == (4, 1, 1)
