"""Softmax and its logarithm along rows that a program holds whole, and their gradients.

``y = exp(z) / sum(exp(z))`` with ``z = x / temperature``, and ``log(y)``. Contract ``softmax/2``: the row's t and s, an
element's b and the sum ``P`` as in ``kernels.row_parts``, then in float32
``y = round(exp2(b) * div_rn(1, s))`` or ``y = round(fma(b, ln(2), -log(s)))``.
Backward, with ``p = exp2(b) * div_rn(1, s)``, ``inverse = 1 / temperature`` rounded once and g the upstream gradient:
softmax: ``c = P(g * p)``, ``dx = round((p * (g - c)) * inverse)``; its logarithm: ``c = P(g)``,
``dx = round((g - p * c) * inverse)``; the chunks' sums are added by adjacent pairs, padded with +0. p is computed anew
from x rather than read back from the result, whose 16 bits would cost it half its digits. Going back, a program may
read its rows a second time instead of holding them (REREAD); the bits are the same.

Rows of more than 32,768 elements are those of ``kernels.softmax_long``.
"""

import triton
import triton.language as tl

from kalign_core.declare import Config, cdiv, data, kernel, next_power_of_2, powers_of_two, scale, side_output, written
from kalign_core.kernels.pairs import pair_sum
from kalign_core.kernels.row_parts import (
    CHUNK,
    CHUNK_DERIVED,
    LN_2,
    SLOTS_DERIVED,
    chunk_part,
    chunk_sum,
    distances,
    each_times,
    merged,
)

LONGEST_HELD = 4 * CHUNK
KNOBS = {"ROWS": (1, 2, 4, 8, 16), "num_warps": (1, 2, 4, 8, 16)}
ALONG_ROWS = {
    "family": "rowwise",
    "contract": "softmax/2",
    "dims": ("T", "V"),
    "bucket": {"T": powers_of_two},
    "rows": "T",
    "derived": {**CHUNK_DERIVED, **SLOTS_DERIVED},
}
ARGS = {
    "x": data("T", "V", strides=("x_stride", 1)),
    "out": written("T", "V", strides=("out_stride", 1), observe="fp32"),
    "row_top": side_output("T"),
    "row_sum": side_output("T"),
}
GRADIENT_ARGS = {
    "x": data("T", "V", strides=("x_stride", 1)),
    "row_top": data("T"),
    "row_sum": scale("T"),
    "d_out": data("T", "V", strides=("d_out_stride", 1)),
    "d_x": written("T", "V", strides=("d_x_stride", 1), observe="fp32"),
}


def whole_rows(p):
    """About 2,048 elements a program for short rows; a warp for 512 elements, for 1,024 from 8,192 on."""
    row = next_power_of_2(p.V)
    rows = max(1, min(16, 2048 // row))
    tile = row * rows
    warps = max(1, min(16, tile // (512 if tile < 8192 else 1024)))
    return Config(ROWS=rows, num_warps=warps, num_stages=1, enable_fp_fusion=False)


def whole_rows_back(p):
    """As forward. Tiles of 8,192 elements and more are read anew: faster at 8,192; longer ones are not timed."""
    config = whole_rows(p)
    return config.replace(REREAD=int(next_power_of_2(p.V) * config.ROWS >= CHUNK))


def held_rows_back(p):
    """As forward. The logarithm's sum is of the upstream gradient alone: reading anew is 2 % slower at 8,192."""
    return whole_rows(p).replace(REREAD=0)


HELD = {**ALONG_ROWS, "reference": whole_rows, "knobs": KNOBS, "grid": lambda p, c: (cdiv(p.T, c.ROWS),)}
HELD_BACK = {**HELD, "reference": whole_rows_back, "knobs": {**KNOBS, "REREAD": (0, 1)}}
HELD_BACK_OF_LOG = {**HELD_BACK, "reference": held_rows_back}


@triton.jit
def result_of(values, top, total, k, LOG: tl.constexpr):
    """``y`` in float32 for ``values: (r c)``, ``top, total: (r)``."""
    distance = distances(values, top, k)
    if LOG:
        return tl.fma(distance, LN_2, -tl.log(total)[:, None])
    return tl.exp2(distance) * tl.div_rn(1.0, total)[:, None]


@triton.jit
def probability(values, top, total, k):
    """``p`` of ``values: (r c)`` for ``top, total: (r)``."""
    return tl.exp2(distances(values, top, k)) * tl.div_rn(1.0, total)[:, None]


@triton.jit
def terms_of(p, d, LOG: tl.constexpr):
    """What is added up along a row."""
    if LOG:
        return d
    return d * p


@triton.jit
def gradient_of(p, d, c, inverse, LOG: tl.constexpr):
    """``dx`` in float32 for ``p, d: (r c)`` and the row's sum ``c: (r)``."""
    if LOG:
        return (d - p * c[:, None]) * inverse
    return (p * (d - c[:, None])) * inverse


@triton.jit
def _held_rows(
    x, out, row_top, row_sum, T, V, x_stride, out_stride, k, LOG: tl.constexpr,
    ROWS: tl.constexpr, LINES_LOG2: tl.constexpr, LANES_LOG2: tl.constexpr, SLOTS_LOG2: tl.constexpr,
):  # fmt: skip
    SLOTS: tl.constexpr = 1 << SLOTS_LOG2
    LINES: tl.constexpr = 1 << (LINES_LOG2 + SLOTS_LOG2)
    LANES: tl.constexpr = 1 << LANES_LOG2
    first = tl.program_id(0).to(tl.int64) * ROWS
    lines = tl.arange(0, ROWS * LINES)
    rows = (first + lines // LINES)[:, None]
    columns = (lines % LINES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    inside = (rows < T) & (columns < V)
    values = tl.load(x + rows * x_stride + columns, mask=inside, other=-float("inf")).to(tl.float32)
    tops, _, sums = chunk_part(values, k, ROWS * SLOTS, LINES_LOG2, LANES_LOG2)
    tops, sums = tl.reshape(tops, (ROWS, SLOTS)), tl.reshape(sums, (ROWS, SLOTS))
    top, total = merged(tops, sums, ROWS, SLOTS_LOG2)
    result = result_of(values, each_times(top, ROWS, LINES), each_times(total, ROWS, LINES), k, LOG)
    tl.store(out + rows * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)
    each = first + tl.arange(0, ROWS)
    tl.store(row_top + each, top, mask=each < T)
    tl.store(row_sum + each, total, mask=each < T)


@triton.jit
def _held_gradient(
    x, row_top, row_sum, d_out, d_x, T, V, x_stride, d_out_stride, d_x_stride, k, inverse, LOG: tl.constexpr,
    ROWS: tl.constexpr, REREAD: tl.constexpr,
    LINES_LOG2: tl.constexpr, LANES_LOG2: tl.constexpr, SLOTS_LOG2: tl.constexpr,
):  # fmt: skip
    LINES: tl.constexpr = 1 << (LINES_LOG2 + SLOTS_LOG2)
    LANES: tl.constexpr = 1 << LANES_LOG2
    lines = tl.arange(0, ROWS * LINES)
    line_rows = tl.program_id(0).to(tl.int64) * ROWS + lines // LINES
    rows = line_rows[:, None]
    columns = (lines % LINES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    inside = (rows < T) & (columns < V)
    source, upstream = x + rows * x_stride + columns, d_out + rows * d_out_stride + columns
    values = tl.load(source, mask=inside, other=-float("inf"))
    d = tl.load(upstream, mask=inside, other=0.0)
    # What is read anew is converted where it is used: in float32 it takes registers that another program could have.
    if not REREAD:
        values, d = values.to(tl.float32), d.to(tl.float32)
    top = tl.load(row_top + line_rows, mask=line_rows < T, other=0.0)
    total = tl.load(row_sum + line_rows, mask=line_rows < T, other=1.0)
    p = probability(values.to(tl.float32), top, total, k)
    sums = chunk_sum(terms_of(p, d.to(tl.float32), LOG), ROWS << SLOTS_LOG2, LINES_LOG2, LANES_LOG2)
    c = pair_sum(tl.reshape(sums, (ROWS, 1 << SLOTS_LOG2)), ROWS, SLOTS_LOG2)
    if REREAD:
        values = tl.load(source, mask=inside, other=-float("inf"), eviction_policy="evict_first")
        d = tl.load(upstream, mask=inside, other=0.0, eviction_policy="evict_first")
        p = probability(values.to(tl.float32), top, total, k)
    result = gradient_of(p, d.to(tl.float32), each_times(c, ROWS, LINES), inverse, LOG)
    tl.store(d_x + rows * d_x_stride + columns, result.to(d_x.dtype.element_ty), mask=inside)


@kernel(name="softmax", args=ARGS, **HELD)
@triton.jit(do_not_specialize=["T"])
def softmax_kernel(
    x, out, row_top, row_sum, T, V, x_stride, out_stride, k,
    ROWS: tl.constexpr, LINES_LOG2: tl.constexpr, LANES_LOG2: tl.constexpr, SLOTS_LOG2: tl.constexpr,
):  # fmt: skip
    _held_rows(x, out, row_top, row_sum, T, V, x_stride, out_stride, k, False, ROWS,
               LINES_LOG2, LANES_LOG2, SLOTS_LOG2)  # fmt: skip


@kernel(name="softmax_backward", args=GRADIENT_ARGS, **HELD_BACK)
@triton.jit(do_not_specialize=["T"])
def softmax_backward_kernel(
    x, row_top, row_sum, d_out, d_x, T, V, x_stride, d_out_stride, d_x_stride, k, inverse,
    ROWS: tl.constexpr, REREAD: tl.constexpr,
    LINES_LOG2: tl.constexpr, LANES_LOG2: tl.constexpr, SLOTS_LOG2: tl.constexpr,
):  # fmt: skip
    _held_gradient(x, row_top, row_sum, d_out, d_x, T, V, x_stride, d_out_stride, d_x_stride, k, inverse, False,
                   ROWS, REREAD, LINES_LOG2, LANES_LOG2, SLOTS_LOG2)  # fmt: skip


@kernel(name="log_softmax", args=ARGS, **HELD)
@triton.jit(do_not_specialize=["T"])
def log_softmax_kernel(
    x, out, row_top, row_sum, T, V, x_stride, out_stride, k,
    ROWS: tl.constexpr, LINES_LOG2: tl.constexpr, LANES_LOG2: tl.constexpr, SLOTS_LOG2: tl.constexpr,
):  # fmt: skip
    _held_rows(x, out, row_top, row_sum, T, V, x_stride, out_stride, k, True, ROWS,
               LINES_LOG2, LANES_LOG2, SLOTS_LOG2)  # fmt: skip


@kernel(name="log_softmax_backward", args=GRADIENT_ARGS, **HELD_BACK_OF_LOG)
@triton.jit(do_not_specialize=["T"])
def log_softmax_backward_kernel(
    x, row_top, row_sum, d_out, d_x, T, V, x_stride, d_out_stride, d_x_stride, k, inverse,
    ROWS: tl.constexpr, REREAD: tl.constexpr,
    LINES_LOG2: tl.constexpr, LANES_LOG2: tl.constexpr, SLOTS_LOG2: tl.constexpr,
):  # fmt: skip
    _held_gradient(x, row_top, row_sum, d_out, d_x, T, V, x_stride, d_out_stride, d_x_stride, k, inverse, True,
                   ROWS, REREAD, LINES_LOG2, LANES_LOG2, SLOTS_LOG2)  # fmt: skip
