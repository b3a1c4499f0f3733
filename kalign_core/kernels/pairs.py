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
    return tl.reshape(pair_sums(values, ROWS, LOG2, LOG2), (ROWS,))


@triton.jit
def pair_sums(values, ROWS: tl.constexpr, LOG2: tl.constexpr, STEPS: tl.constexpr):
    """The first STEPS steps of ``pair_sum``: ``s_STEPS: (ROWS, 2**(LOG2 - STEPS))``."""
    for step in tl.static_range(STEPS):
        values = tl.sum(tl.reshape(values, (ROWS, 1 << (LOG2 - 1 - step), 2)), axis=2)
    return values


@triton.jit
def largest(values, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The largest of each row of ``values``, of ``ROWS * COLUMNS`` elements in all; gives ``(ROWS,)``.

    The compiler's own order will do: only zeros of both signs and NaN make it matter, and a zero comes out as +0.
    """
    return tl.max(tl.reshape(values, (ROWS, COLUMNS)), axis=1) + 0.0


@triton.jit
def pair_sum_down(values, ROWS: tl.constexpr, LOG2: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum ``values: (ROWS * 2**LOG2, COLUMNS)`` over the lines of each row by adjacent pairs; ``(ROWS, COLUMNS)``."""
    for step in tl.static_range(LOG2):
        values = tl.sum(tl.reshape(values, (ROWS << (LOG2 - 1 - step), 2, COLUMNS)), axis=1)
    return values


@triton.jit
def line_of(values, line, LINES: tl.constexpr, COLUMNS: tl.constexpr):
    """Line ``line`` of at most 256 in ``values: (LINES, COLUMNS)``, float32; ``(COLUMNS,)``.

    It is the line's sum with -0, which is neutral, by pairs: in any order its bits are the line's.
    """
    values = tl.where(tl.arange(0, LINES)[:, None] == line, values, -0.0)
    for step in tl.static_range(8):
        if (LINES >> step) > 1:
            values = tl.sum(tl.reshape(values, (LINES >> (step + 1), 2, COLUMNS)), axis=1)
    return tl.reshape(values, (COLUMNS,))
