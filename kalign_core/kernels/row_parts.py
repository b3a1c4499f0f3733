"""What a softmax knows of a row: its maximum and its sum of exponentials, by chunks of the vocabulary.

Contract ``softmax/2``, in float32; products and sums are fused only where ``fma`` says so. ``k`` is ``log2(e) /
temperature`` rounded once. The row is cut into chunks of 8,192 elements (one of the next power of two where it is
shorter), the last one padded with -inf. ``P`` adds a chunk: it lies in lines of 4,096 (or fewer), which are added by
adjacent pairs, lane by lane; then adjacent lanes are, as ``kernels.pairs`` says. Of each chunk:
``t_c = max(x) * k``; ``b = fma(x, k, -t_c)``; ``e = exp2(b)``; ``s_c = P(e)``; ``u_c = P(e * b)``.
Of the row, over its chunks padded to a power of two with ``t = -inf`` and sums of +0, by adjacent pairs:
``t = max(t_c)``; ``w_c = exp2(t_c - t)``; ``s = sum(s_c * w_c)``; ``u = sum((u_c + s_c * (t_c - t)) * w_c)``.
Where a t is -inf, 0 is subtracted in its place, so that masked elements weigh nothing, and a term whose factor is 0 is
0, whether the other is infinite or not. ``exp2`` is the target's own. A row with NaN or +inf has a NaN sum; one of
nothing but -inf, or of what -inf comes of when it is multiplied by k, the sum 0.

t is the rounded product, and everything is measured from it: its rounding cancels as long as ``abs(t) < 2**30``, where
it is 64 at most. The chunks of a row may lie far below that (masked with -1e10, say): whatever their sums, they weigh
nothing. Cutting by chunks lets a few rows fill the device, lines first keeps most of a sum inside a thread, and no
choice of rows, warps or chunks per program moves a bit.
"""

import triton
import triton.language as tl

from kalign_core.declare import Config, cdiv, data, index, kernel, next_power_of_2, powers_of_two, side_output
from kalign_core.kernels.overlap import after_predecessor
from kalign_core.kernels.pairs import largest, pair_sum, pair_sum_down

CHUNK = 8192
LANES = 4096
LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)


def chunk_of(p):
    """Elements of one chunk of a row of ``p.V``."""
    return min(CHUNK, next_power_of_2(p.V))


def slots_of(p):
    """Chunks of a row, padded to a power of two."""
    return next_power_of_2(cdiv(p.V, CHUNK))


def log2_of(n):
    """Logarithm of a power of two."""
    return n.bit_length() - 1


CHUNK_DERIVED = {
    "LINES_LOG2": lambda p: log2_of(cdiv(chunk_of(p), LANES)),
    "LANES_LOG2": lambda p: log2_of(min(chunk_of(p), LANES)),
}
SLOTS_DERIVED = {"SLOTS_LOG2": lambda p: log2_of(slots_of(p))}


@triton.jit
def each_times(values, ROWS: tl.constexpr, TIMES: tl.constexpr):
    """``values: (ROWS)`` as ``(ROWS * TIMES)``, each element TIMES times."""
    if TIMES == 1:
        return values
    return tl.reshape(tl.broadcast_to(values[:, None], (ROWS, TIMES)), (ROWS * TIMES,))


@triton.jit
def anchored(top):
    """What to measure from: ``top``, or 0 where that is -inf."""
    return tl.where(top == -float("inf"), 0.0, top)


@triton.jit
def distances(values, top, k):
    """``b = fma(x, k, -t)`` for ``values: (r c)`` and ``top: (r)``."""
    return tl.fma(values, k, -anchored(top)[:, None])


@triton.jit
def chunk_sum(values, CHUNKS: tl.constexpr, LINES_LOG2: tl.constexpr, LANES_LOG2: tl.constexpr):
    """``P`` of every chunk of ``values: (CHUNKS * lines, lanes)``."""
    return pair_sum(pair_sum_down(values, CHUNKS, LINES_LOG2, 1 << LANES_LOG2), CHUNKS, LANES_LOG2)


@triton.jit
def chunk_distances(values, k, CHUNKS: tl.constexpr, LINES_LOG2: tl.constexpr, LANES_LOG2: tl.constexpr):
    """``t_c`` and ``b`` of every chunk of ``values: (CHUNKS * lines, lanes)``."""
    top = largest(values, CHUNKS, 1 << (LINES_LOG2 + LANES_LOG2)) * k
    return top, distances(values, each_times(top, CHUNKS, 1 << LINES_LOG2), k)


@triton.jit
def chunk_part(values, k, CHUNKS: tl.constexpr, LINES_LOG2: tl.constexpr, LANES_LOG2: tl.constexpr):
    """``t_c``, ``b`` and ``s_c`` of every chunk of ``values: (CHUNKS * lines, lanes)``."""
    top, distance = chunk_distances(values, k, CHUNKS, LINES_LOG2, LANES_LOG2)
    return top, distance, chunk_sum(tl.exp2(distance), CHUNKS, LINES_LOG2, LANES_LOG2)


@triton.jit
def weighted(e, distance):
    """``e * distance``, 0 where ``e`` is."""
    return tl.where(e == 0.0, 0.0, e * distance)


@triton.jit
def merged(tops, sums, ROWS: tl.constexpr, SLOTS_LOG2: tl.constexpr):
    """``t`` and ``s`` of each row from its chunks' ``tops, sums: (ROWS, 2**SLOTS_LOG2)``."""
    if SLOTS_LOG2 == 0:
        top, total = tl.reshape(tops, (ROWS,)), tl.reshape(sums, (ROWS,))
    else:
        top = largest(tops, ROWS, 1 << SLOTS_LOG2)
        weight = tl.exp2(tops - anchored(top)[:, None])
        # NaN times 0 stays NaN: it is a row's, not a sum that is too large.
        terms = tl.where((sums == float("inf")) & (weight == 0.0), 0.0, sums * weight)
        total = pair_sum(terms, ROWS, SLOTS_LOG2)
    return top, total


@triton.jit
def load_parts(part, rows, inside, count, stride, padding, SLOTS: tl.constexpr):
    """What is known of the chunks of ``rows: (r)``, ``(r SLOTS)``, with ``padding`` behind the last of ``count``."""
    slots = tl.arange(0, SLOTS)
    there = inside[:, None] & (slots < count)[None, :]
    return tl.load(part + rows[:, None] * stride + slots[None, :], mask=there, other=padding)


@kernel(
    name="row_parts",
    family="rowwise",
    contract="softmax/2",
    dims=("T", "V"),
    bucket={"T": powers_of_two},
    rows="T",
    args={
        "x": data("T", "V", strides=("x_stride", 1)),
        "ids": index("T", bound="V"),
        "part_top": side_output("T", f"V/{CHUNK}", strides=("part_stride", 1)),
        "part_sum": side_output("T", f"V/{CHUNK}", strides=("part_stride", 1)),
        "part_dot": side_output("T", f"V/{CHUNK}", strides=("part_stride", 1)),
    },
    reference=Config(SPAN=1, STAGES=1, num_warps=4, num_stages=1, enable_fp_fusion=False),
    knobs={"SPAN": (1, 2, 4, 8), "STAGES": (1, 2), "num_warps": (2, 4, 8)},
    derived=CHUNK_DERIVED,
    grid=lambda p, c: (p.T * cdiv(cdiv(p.V, CHUNK), c.SPAN),),
)
@triton.jit(do_not_specialize=["T"])
def row_parts_kernel(
    x, ids, part_top, part_sum, part_dot, T, V, x_stride, part_stride, k, ignore_index,
    SPAN: tl.constexpr, STAGES: tl.constexpr, LINES_LOG2: tl.constexpr, LANES_LOG2: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    CHUNK: tl.constexpr = 1 << (LINES_LOG2 + LANES_LOG2)
    count = tl.cdiv(V, CHUNK)
    spans = tl.cdiv(count, SPAN)
    row = (tl.program_id(0) // spans).to(tl.int64)
    first = (tl.program_id(0) % spans) * SPAN
    one = tl.arange(0, 1)
    columns = tl.arange(0, 1 << LINES_LOG2)[:, None] * (1 << LANES_LOG2) + tl.arange(0, 1 << LANES_LOG2)[None, :]
    after_predecessor(OVERLAP)
    read = one == 0
    if ids is not None:
        read = tl.load(ids + row + one) != ignore_index
    for chunk in tl.range(first, first + SPAN, num_stages=STAGES):
        inside = read[:, None] & (chunk * CHUNK + columns < V)
        place = x + row * x_stride + chunk * CHUNK + columns
        values = tl.load(place, mask=inside, other=-float("inf")).to(tl.float32)
        top, distance, total = chunk_part(values, k, 1, LINES_LOG2, LANES_LOG2)
        target = row * part_stride + chunk + one
        there = (chunk + one) < count
        tl.store(part_top + target, top, mask=there)
        tl.store(part_sum + target, total, mask=there)
        if part_dot is not None:
            terms = weighted(tl.exp2(distance), distance)
            tl.store(part_dot + target, chunk_sum(terms, 1, LINES_LOG2, LANES_LOG2), mask=there)
