"""Softmax and its logarithm along rows that are too long to be held, and their gradients.

Contract ``softmax/2``, the formulas of ``kernels.softmax``, with the same bits. A program reads its row twice, the
second time backwards: what was read last, as much of it as the knob KEEP (sixteenths) asks the last-level cache to
keep, need not come from memory again. Few such rows would leave most of a device idle; they are cut among programs,
which read the chunks' parts that ``row_parts`` left.
"""

import triton
import triton.language as tl

from kalign_core.declare import Config, cdiv, data, kernel, scale, side_output, written
from kalign_core.kernels.pairs import pair_sum
from kalign_core.kernels.row_parts import CHUNK, chunk_part, chunk_sum, load_parts, merged
from kalign_core.kernels.softmax import ALONG_ROWS, ARGS, GRADIENT_ARGS, gradient_of, probability, result_of, terms_of

PIECES_ARGS = {
    "x": data("T", "V", strides=("x_stride", 1)),
    "part_top": data("T", f"V/{CHUNK}", strides=("part_stride", 1)),
    "part_sum": scale("T", f"V/{CHUNK}", strides=("part_stride", 1)),
    "out": written("T", "V", strides=("out_stride", 1), observe="fp32"),
    "row_top": side_output("T"),
    "row_sum": side_output("T"),
}


def a_row_each(p, c):
    """A program for each row."""
    return (p.T,)


def a_piece_each(p, c):
    """A program for each ``BLOCK`` elements of a row, rows outermost."""
    return (p.T * cdiv(p.V, c.BLOCK),)


LONG = {
    **ALONG_ROWS,
    "reference": Config(KEEP=16, STAGES=1, num_warps=8, num_stages=1, enable_fp_fusion=False),
    "knobs": {"KEEP": (8, 12, 16), "STAGES": (1, 2, 3), "num_warps": (4, 8, 16)},
    "grid": a_row_each,
}
GRADIENT = {
    **ALONG_ROWS,
    "reference": Config(STAGES=1, num_warps=8, num_stages=1, enable_fp_fusion=False),
    "knobs": {"STAGES": (1, 2, 3), "num_warps": (4, 8, 16)},
    "grid": a_row_each,
}
PIECES = {
    **ALONG_ROWS,
    "reference": Config(BLOCK=8192, num_warps=4, num_stages=1, enable_fp_fusion=False),
    "knobs": {"BLOCK": (1024, 2048, 4096, 8192), "num_warps": (2, 4, 8)},
    "grid": a_piece_each,
}


@triton.jit
def _known_of(
    x, row, first, last, V, x_stride, k, tops, sums, slots, POLICY: tl.constexpr, STAGES: tl.constexpr,
    LINES_LOG2: tl.constexpr, LANES_LOG2: tl.constexpr,
):  # fmt: skip
    """``tops, sums: (1 slots)`` with those of the chunks from ``first`` to ``last``, exclusive, put in."""
    columns = tl.arange(0, 1 << LINES_LOG2)[:, None] * (1 << LANES_LOG2) + tl.arange(0, 1 << LANES_LOG2)[None, :]
    for chunk in tl.range(first, last, num_stages=STAGES):
        place = chunk * (1 << (LINES_LOG2 + LANES_LOG2)) + columns
        values = tl.load(x + row * x_stride + place, mask=place < V, other=-float("inf"), eviction_policy=POLICY)
        top, _, total = chunk_part(values.to(tl.float32), k, 1, LINES_LOG2, LANES_LOG2)
        tops = tl.where(slots == chunk, top[:, None], tops)
        sums = tl.where(slots == chunk, total[:, None], sums)
    return tops, sums


@triton.jit
def _long_row(
    x, out, row_top, row_sum, V, x_stride, out_stride, k, LOG: tl.constexpr,
    KEEP: tl.constexpr, STAGES: tl.constexpr,
    LINES_LOG2: tl.constexpr, LANES_LOG2: tl.constexpr, SLOTS_LOG2: tl.constexpr,
):  # fmt: skip
    CHUNK: tl.constexpr = 1 << (LINES_LOG2 + LANES_LOG2)
    row = tl.program_id(0).to(tl.int64)
    count = tl.cdiv(V, CHUNK)
    passing = count * (16 - KEEP) // 16
    slots = tl.arange(0, 1 << SLOTS_LOG2)[None, :]
    tops = tl.full((1, 1 << SLOTS_LOG2), -float("inf"), tl.float32)
    sums = tl.zeros((1, 1 << SLOTS_LOG2), tl.float32)
    tops, sums = _known_of(x, row, 0, passing, V, x_stride, k, tops, sums, slots, "evict_first", STAGES,
                             LINES_LOG2, LANES_LOG2)  # fmt: skip
    tops, sums = _known_of(x, row, passing, count, V, x_stride, k, tops, sums, slots, "evict_last", STAGES,
                             LINES_LOG2, LANES_LOG2)  # fmt: skip
    top, total = merged(tops, sums, 1, SLOTS_LOG2)
    columns = tl.arange(0, 1 << LINES_LOG2)[:, None] * (1 << LANES_LOG2) + tl.arange(0, 1 << LANES_LOG2)[None, :]
    for step in tl.range(0, count, num_stages=STAGES):
        place = (count - 1 - step) * CHUNK + columns
        inside = place < V
        values = tl.load(x + row * x_stride + place, mask=inside, other=0.0, eviction_policy="evict_first")
        result = result_of(values.to(tl.float32), top, total, k, LOG).to(out.dtype.element_ty)
        tl.store(out + row * out_stride + place, result, mask=inside, cache_modifier=".cs")
    here = row + tl.arange(0, 1)
    tl.store(row_top + here, top)
    tl.store(row_sum + here, total)


@triton.jit
def _piece_of_row(
    x, part_top, part_sum, out, row_top, row_sum, V, x_stride, part_stride, out_stride, k, LOG: tl.constexpr,
    BLOCK: tl.constexpr, LINES_LOG2: tl.constexpr, LANES_LOG2: tl.constexpr, SLOTS_LOG2: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(V, BLOCK)
    tile = tl.program_id(0) % tiles
    here = (tl.program_id(0) // tiles).to(tl.int64) + tl.arange(0, 1)
    count = tl.cdiv(V, 1 << (LINES_LOG2 + LANES_LOG2))
    tops = load_parts(part_top, here, here >= 0, count, part_stride, -float("inf"), 1 << SLOTS_LOG2)
    sums = load_parts(part_sum, here, here >= 0, count, part_stride, 0.0, 1 << SLOTS_LOG2)
    top, total = merged(tops, sums, 1, SLOTS_LOG2)
    columns = tile * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = columns < V
    values = tl.load(x + here[:, None] * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    result = result_of(values, top, total, k, LOG)
    tl.store(out + here[:, None] * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)
    once = (here * 0 + tile) == 0
    tl.store(row_top + here, top, mask=once)
    tl.store(row_sum + here, total, mask=once)


@triton.jit
def _long_gradient(
    x, row_top, row_sum, d_out, d_x, V, x_stride, d_out_stride, d_x_stride, k, inverse, LOG: tl.constexpr,
    STAGES: tl.constexpr, LINES_LOG2: tl.constexpr, LANES_LOG2: tl.constexpr, SLOTS_LOG2: tl.constexpr,
):  # fmt: skip
    CHUNK: tl.constexpr = 1 << (LINES_LOG2 + LANES_LOG2)
    row = tl.program_id(0).to(tl.int64)
    here = row + tl.arange(0, 1)
    top, total = tl.load(row_top + here), tl.load(row_sum + here)
    count = tl.cdiv(V, CHUNK)
    columns = tl.arange(0, 1 << LINES_LOG2)[:, None] * (1 << LANES_LOG2) + tl.arange(0, 1 << LANES_LOG2)[None, :]
    slots = tl.arange(0, 1 << SLOTS_LOG2)[None, :]
    sums = tl.zeros((1, 1 << SLOTS_LOG2), tl.float32)
    for chunk in tl.range(0, count, num_stages=STAGES):
        inside = chunk * CHUNK + columns < V
        place = chunk * CHUNK + columns
        d = tl.load(d_out + row * d_out_stride + place, mask=inside, other=0.0).to(tl.float32)
        if LOG:
            terms = d
        else:
            values = tl.load(x + row * x_stride + place, mask=inside, other=-float("inf")).to(tl.float32)
            terms = terms_of(probability(values, top, total, k), d, LOG)
        part = chunk_sum(terms, 1, LINES_LOG2, LANES_LOG2)
        sums = tl.where(slots == chunk, part[:, None], sums)
    c = pair_sum(sums, 1, SLOTS_LOG2)
    for step in tl.range(0, count, num_stages=STAGES):
        place = (count - 1 - step) * CHUNK + columns
        inside = place < V
        d = tl.load(d_out + row * d_out_stride + place, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(x + row * x_stride + place, mask=inside, other=-float("inf")).to(tl.float32)
        result = gradient_of(probability(values, top, total, k), d, c, inverse, LOG)
        tl.store(d_x + row * d_x_stride + place, result.to(d_x.dtype.element_ty), mask=inside, cache_modifier=".cs")


@kernel(name="softmax_long", args=ARGS, **LONG)
@triton.jit(do_not_specialize=["T"])
def softmax_long_kernel(
    x, out, row_top, row_sum, T, V, x_stride, out_stride, k,
    KEEP: tl.constexpr, STAGES: tl.constexpr,
    LINES_LOG2: tl.constexpr, LANES_LOG2: tl.constexpr, SLOTS_LOG2: tl.constexpr,
):  # fmt: skip
    _long_row(x, out, row_top, row_sum, V, x_stride, out_stride, k, False, KEEP, STAGES,
              LINES_LOG2, LANES_LOG2, SLOTS_LOG2)  # fmt: skip


@kernel(name="softmax_pieces", args=PIECES_ARGS, **PIECES)
@triton.jit(do_not_specialize=["T"])
def softmax_pieces_kernel(
    x, part_top, part_sum, out, row_top, row_sum, T, V, x_stride, part_stride, out_stride, k,
    BLOCK: tl.constexpr, LINES_LOG2: tl.constexpr, LANES_LOG2: tl.constexpr, SLOTS_LOG2: tl.constexpr,
):  # fmt: skip
    _piece_of_row(x, part_top, part_sum, out, row_top, row_sum, V, x_stride, part_stride, out_stride, k, False, BLOCK,
                  LINES_LOG2, LANES_LOG2, SLOTS_LOG2)  # fmt: skip


@kernel(name="softmax_long_backward", args=GRADIENT_ARGS, **GRADIENT)
@triton.jit(do_not_specialize=["T"])
def softmax_long_backward_kernel(
    x, row_top, row_sum, d_out, d_x, T, V, x_stride, d_out_stride, d_x_stride, k, inverse,
    STAGES: tl.constexpr, LINES_LOG2: tl.constexpr, LANES_LOG2: tl.constexpr, SLOTS_LOG2: tl.constexpr,
):  # fmt: skip
    _long_gradient(x, row_top, row_sum, d_out, d_x, V, x_stride, d_out_stride, d_x_stride, k, inverse, False, STAGES,
                   LINES_LOG2, LANES_LOG2, SLOTS_LOG2)  # fmt: skip


@kernel(name="log_softmax_long", args=ARGS, **LONG)
@triton.jit(do_not_specialize=["T"])
def log_softmax_long_kernel(
    x, out, row_top, row_sum, T, V, x_stride, out_stride, k,
    KEEP: tl.constexpr, STAGES: tl.constexpr,
    LINES_LOG2: tl.constexpr, LANES_LOG2: tl.constexpr, SLOTS_LOG2: tl.constexpr,
):  # fmt: skip
    _long_row(x, out, row_top, row_sum, V, x_stride, out_stride, k, True, KEEP, STAGES,
              LINES_LOG2, LANES_LOG2, SLOTS_LOG2)  # fmt: skip


@kernel(name="log_softmax_pieces", args=PIECES_ARGS, **PIECES)
@triton.jit(do_not_specialize=["T"])
def log_softmax_pieces_kernel(
    x, part_top, part_sum, out, row_top, row_sum, T, V, x_stride, part_stride, out_stride, k,
    BLOCK: tl.constexpr, LINES_LOG2: tl.constexpr, LANES_LOG2: tl.constexpr, SLOTS_LOG2: tl.constexpr,
):  # fmt: skip
    _piece_of_row(x, part_top, part_sum, out, row_top, row_sum, V, x_stride, part_stride, out_stride, k, True, BLOCK,
                  LINES_LOG2, LANES_LOG2, SLOTS_LOG2)  # fmt: skip


@kernel(name="log_softmax_long_backward", args=GRADIENT_ARGS, **GRADIENT)
@triton.jit(do_not_specialize=["T"])
def log_softmax_long_backward_kernel(
    x, row_top, row_sum, d_out, d_x, T, V, x_stride, d_out_stride, d_x_stride, k, inverse,
    STAGES: tl.constexpr, LINES_LOG2: tl.constexpr, LANES_LOG2: tl.constexpr, SLOTS_LOG2: tl.constexpr,
):  # fmt: skip
    _long_gradient(x, row_top, row_sum, d_out, d_x, V, x_stride, d_out_stride, d_x_stride, k, inverse, True, STAGES,
                   LINES_LOG2, LANES_LOG2, SLOTS_LOG2)  # fmt: skip
