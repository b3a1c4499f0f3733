"""Order-canonical reductions: sums whose bits do not depend on the layout the compiler picks.

``tl.sum`` reduces in an order that follows num_warps and the tile's shape, so that every launch gives other bits. Here
adjacent elements are added, then adjacent sums, log2(n) times; every reduction the compiler sees is over an axis of
length two, where there is only one order. Adjacent pairs stay in registers and shuffles; folding halves would cross
warps at every step.
"""

import triton
import triton.language as tl


@triton.jit
def pair_sum(values, ROWS: tl.constexpr, LOG2: tl.constexpr):
    """Sum each row of ``values: (ROWS, 2**LOG2)`` in float32 by adjacent pairs; gives ``(ROWS,)``.

    ``s_0 = x``; ``s_{k+1}[i] = s_k[2 i] + s_k[2 i + 1]``; the result is ``s_LOG2[0]``.
    """
    for step in tl.static_range(LOG2):
        values = tl.sum(tl.reshape(values, (ROWS, 1 << (LOG2 - 1 - step), 2)), axis=2)
    return tl.reshape(values, (ROWS,))


@triton.jit
def pair_max(values, ROWS: tl.constexpr, LOG2: tl.constexpr):
    """The largest of each row of ``values: (ROWS, 2**LOG2)``, by adjacent pairs; gives ``(ROWS,)``.

    Only zeros of both signs and NaN make the order of a maximum matter; a zero comes out as +0.
    """
    for step in tl.static_range(LOG2):
        values = tl.max(tl.reshape(values, (ROWS, 1 << (LOG2 - 1 - step), 2)), axis=2)
    return tl.reshape(values, (ROWS,)) + 0.0


@triton.jit
def pair_sum_down(values, ROWS: tl.constexpr, LOG2: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum ``values: (ROWS * 2**LOG2, COLUMNS)`` over the lines of each row by adjacent pairs; ``(ROWS, COLUMNS)``."""
    for step in tl.static_range(LOG2):
        values = tl.sum(tl.reshape(values, (ROWS << (LOG2 - 1 - step), 2, COLUMNS)), axis=1)
    return values


@triton.jit
def pair_max_down(values, ROWS: tl.constexpr, LOG2: tl.constexpr, COLUMNS: tl.constexpr):
    """The largest of ``values: (ROWS * 2**LOG2, COLUMNS)`` over the lines of each row; ``(ROWS, COLUMNS)``."""
    for step in tl.static_range(LOG2):
        values = tl.max(tl.reshape(values, (ROWS << (LOG2 - 1 - step), 2, COLUMNS)), axis=1)
    return values
