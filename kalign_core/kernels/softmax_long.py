"""Softmax and its logarithm along rows that are too long to be held, and their gradients.

Contract ``softmax/2``, the formulas of ``kernels.softmax``, with the same bits. A program reads its row twice, the
second time backwards: what was read last, as much of it as the knob KEEP (sixteenths) asks the last-level cache to
keep, need not come from memory again. The first time it reads SPAN chunks a step, the second BLOCK elements: many at a
time, because few programs are to be under way, or their rows would not fit the cache. Of each chunk's sum the steps
that stay within a warp are done at once, those across warps for all chunks together at the end.
Few such rows would leave most of a device idle; they are cut among programs, which read the chunks' parts that
``row_parts`` left.
"""

import triton
import triton.language as tl

from kalign_core.declare import Config, cdiv, data, kernel, scale, side_output, written
from kalign_core.kernels.overlap import after_predecessor
from kalign_core.kernels.pairs import pair_sum, pair_sum_down, pair_sums
from kalign_core.kernels.row_parts import CHUNK, chunk_distances, chunk_sum, load_parts, merged
from kalign_core.kernels.softmax import ALONG_ROWS, ARGS, GRADIENT_ARGS, gradient_of, probability, result_of, terms_of

# Adjacent lanes that a warp of 32 threads loads together, eight 2-byte elements each.
WARP_LANES_LOG2 = 8
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
    "reference": Config(SPAN=2, BLOCK=16384, KEEP=16, num_warps=16, num_stages=1, enable_fp_fusion=False),
    "knobs": {"SPAN": (1, 2), "BLOCK": (8192, 16384, 32768), "KEEP": (8, 12, 16), "num_warps": (4, 8, 16)},
    "derived": {**ALONG_ROWS["derived"], "BEGUN_LOG2": lambda p: WARP_LANES_LOG2},
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
    x, row, first, last, V, x_stride, k, tops, sums, POLICY: tl.constexpr,
    SPAN: tl.constexpr, LINES_LOG2: tl.constexpr, LANES_LOG2: tl.constexpr, BEGUN_LOG2: tl.constexpr,
):  # fmt: skip
    """``tops: (steps SPAN)`` and begun ``sums: (steps SPAN lanes)`` with steps ``first`` to ``last`` put in."""
    LANES: tl.constexpr = 1 << LANES_LOG2
    LINES: tl.constexpr = SPAN << LINES_LOG2
    columns = tl.arange(0, LINES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    steps = tl.arange(0, tops.shape[0])
    for step in range(first, last):
        place = step * (LINES * LANES) + columns
        values = tl.load(x + row * x_stride + place, mask=place < V, other=-float("inf"), eviction_policy=POLICY)
        top, distance = chunk_distances(values.to(tl.float32), k, SPAN, LINES_LOG2, LANES_LOG2)
        begun = pair_sums(pair_sum_down(tl.exp2(distance), SPAN, LINES_LOG2, LANES), SPAN, LANES_LOG2, BEGUN_LOG2)
        tops = tl.where(steps[:, None] == step, top[None, :], tops)
        sums = tl.where(steps[:, None, None] == step, begun[None, :, :], sums)
    return tops, sums


@triton.jit
def _long_row(
    x, out, row_top, row_sum, V, x_stride, out_stride, k, LOG: tl.constexpr,
    SPAN: tl.constexpr, BLOCK: tl.constexpr, KEEP: tl.constexpr,
    LINES_LOG2: tl.constexpr, LANES_LOG2: tl.constexpr, SLOTS_LOG2: tl.constexpr, BEGUN_LOG2: tl.constexpr,
):  # fmt: skip
    REST_LOG2: tl.constexpr = LANES_LOG2 - BEGUN_LOG2
    STEPS: tl.constexpr = (1 << SLOTS_LOG2) // SPAN
    row = tl.program_id(0).to(tl.int64)
    count = tl.cdiv(V, SPAN << (LINES_LOG2 + LANES_LOG2))
    passing = count * (16 - KEEP) // 16
    tops = tl.full((STEPS, SPAN), -float("inf"), tl.float32)
    sums = tl.zeros((STEPS, SPAN, 1 << REST_LOG2), tl.float32)
    if KEEP < 16:
        tops, sums = _known_of(x, row, 0, passing, V, x_stride, k, tops, sums, "evict_first", SPAN,
                               LINES_LOG2, LANES_LOG2, BEGUN_LOG2)  # fmt: skip
    tops, sums = _known_of(x, row, passing, count, V, x_stride, k, tops, sums, "evict_last", SPAN,
                           LINES_LOG2, LANES_LOG2, BEGUN_LOG2)  # fmt: skip
    whole = pair_sum(tl.reshape(sums, (STEPS * SPAN, 1 << REST_LOG2)), STEPS * SPAN, REST_LOG2)
    top, total = merged(tl.reshape(tops, (1, STEPS * SPAN)), tl.reshape(whole, (1, STEPS * SPAN)), 1, SLOTS_LOG2)
    blocks = tl.cdiv(V, BLOCK)
    for step in range(blocks):
        place = (blocks - 1 - step) * BLOCK + tl.arange(0, BLOCK)[None, :]
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
    OVERLAP: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(V, BLOCK)
    tile = tl.program_id(0) % tiles
    here = (tl.program_id(0) // tiles).to(tl.int64) + tl.arange(0, 1)
    count = tl.cdiv(V, 1 << (LINES_LOG2 + LANES_LOG2))
    after_predecessor(OVERLAP)
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
    SPAN: tl.constexpr, BLOCK: tl.constexpr, KEEP: tl.constexpr,
    LINES_LOG2: tl.constexpr, LANES_LOG2: tl.constexpr, SLOTS_LOG2: tl.constexpr, BEGUN_LOG2: tl.constexpr,
):  # fmt: skip
    _long_row(x, out, row_top, row_sum, V, x_stride, out_stride, k, False, SPAN, BLOCK, KEEP,
              LINES_LOG2, LANES_LOG2, SLOTS_LOG2, BEGUN_LOG2)  # fmt: skip


@kernel(name="softmax_pieces", args=PIECES_ARGS, **PIECES)
@triton.jit(do_not_specialize=["T"])
def softmax_pieces_kernel(
    x, part_top, part_sum, out, row_top, row_sum, T, V, x_stride, part_stride, out_stride, k,
    BLOCK: tl.constexpr, LINES_LOG2: tl.constexpr, LANES_LOG2: tl.constexpr, SLOTS_LOG2: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    _piece_of_row(x, part_top, part_sum, out, row_top, row_sum, V, x_stride, part_stride, out_stride, k, False, BLOCK,
                  LINES_LOG2, LANES_LOG2, SLOTS_LOG2, OVERLAP)  # fmt: skip


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
    SPAN: tl.constexpr, BLOCK: tl.constexpr, KEEP: tl.constexpr,
    LINES_LOG2: tl.constexpr, LANES_LOG2: tl.constexpr, SLOTS_LOG2: tl.constexpr, BEGUN_LOG2: tl.constexpr,
):  # fmt: skip
    _long_row(x, out, row_top, row_sum, V, x_stride, out_stride, k, True, SPAN, BLOCK, KEEP,
              LINES_LOG2, LANES_LOG2, SLOTS_LOG2, BEGUN_LOG2)  # fmt: skip


@kernel(name="log_softmax_pieces", args=PIECES_ARGS, **PIECES)
@triton.jit(do_not_specialize=["T"])
def log_softmax_pieces_kernel(
    x, part_top, part_sum, out, row_top, row_sum, T, V, x_stride, part_stride, out_stride, k,
    BLOCK: tl.constexpr, LINES_LOG2: tl.constexpr, LANES_LOG2: tl.constexpr, SLOTS_LOG2: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    _piece_of_row(x, part_top, part_sum, out, row_top, row_sum, V, x_stride, part_stride, out_stride, k, True, BLOCK,
                  LINES_LOG2, LANES_LOG2, SLOTS_LOG2, OVERLAP)  # fmt: skip


@kernel(name="log_softmax_long_backward", args=GRADIENT_ARGS, **GRADIENT)
@triton.jit(do_not_specialize=["T"])
def log_softmax_long_backward_kernel(
    x, row_top, row_sum, d_out, d_x, T, V, x_stride, d_out_stride, d_x_stride, k, inverse,
    STAGES: tl.constexpr, LINES_LOG2: tl.constexpr, LANES_LOG2: tl.constexpr, SLOTS_LOG2: tl.constexpr,
):  # fmt: skip
    _long_gradient(x, row_top, row_sum, d_out, d_x, V, x_stride, d_out_stride, d_x_stride, k, inverse, True, STAGES,
                   LINES_LOG2, LANES_LOG2, SLOTS_LOG2)  # fmt: skip
