"""The logarithm of one softmax element per row: ``logp = z[id] - log(sum(exp(z)))``, ``z = logits / temperature``.

Contract ``softmax/2``: t, s and, for the entropy, u of a row and b of an element as in ``kernels.row_parts``; then in
float32: ``logp = fma(b[id], ln(2), -log(s))``; ``lse = fma(t, ln(2), log(s))``;
``entropy = log(s) - ln(2) * div_rn(u, s)``.
Backward, for upstream gradients g of logp, h of the entropy and l of lse (+0 where absent), with ``inverse = 1 /
temperature`` rounded once, per element: ``p = exp2(b) * div_rn(1, s)``; ``a = p * ((l - g) * inverse)``; where there is
an h, ``a = a - (p * (fma(b, ln(2), -log(s)) + entropy)) * (h * inverse)``, a product with a factor p of 0 being 0; then
``round(a)``, or ``round(a + g * inverse)`` at the id.

Rows whose id is ``ignore_index`` are not read: they give +0 and gradients of +0. An id that is no column gives a NaN
logp and a row of NaN gradients; nothing is read or written elsewhere for it.
"""

import triton
import triton.language as tl

from kalign_core.declare import Config, cdiv, data, index, kernel, powers_of_two, scale, side_output, written
from kalign_core.kernels.overlap import after_predecessor
from kalign_core.kernels.pairs import pair_sum
from kalign_core.kernels.row_parts import (
    CHUNK,
    CHUNK_DERIVED,
    LN_2,
    SLOTS_DERIVED,
    anchored,
    load_parts,
    merged,
    weighted,
)


@kernel(
    name="selected_logprob",
    family="rowwise",
    contract="softmax/2",
    dims=("T", "V"),
    bucket={"T": powers_of_two},
    rows="T",
    args={
        "logits": data("T", "V", strides=("logits_stride", 1)),
        "ids": index("T", bound="V"),
        "part_top": data("T", f"V/{CHUNK}", strides=("part_stride", 1)),
        "part_sum": scale("T", f"V/{CHUNK}", strides=("part_stride", 1)),
        "part_dot": data("T", f"V/{CHUNK}", strides=("part_stride", 1)),
        "logp": written("T"),
        "entropy": written("T"),
        "lse": written("T"),
        "row_top": side_output("T"),
        "row_sum": side_output("T"),
    },
    reference=Config(ROWS=4, num_warps=1, num_stages=1, enable_fp_fusion=False),
    knobs={"ROWS": (1, 2, 4, 8, 16, 32), "num_warps": (1, 2, 4, 8)},
    derived={**CHUNK_DERIVED, **SLOTS_DERIVED},
    grid=lambda p, c: (cdiv(p.T, c.ROWS),),
)
@triton.jit(do_not_specialize=["T"])
def selected_logprob_kernel(
    logits, ids, part_top, part_sum, part_dot, logp, entropy, lse, row_top, row_sum,
    T, V, logits_stride, part_stride, k, ignore_index,
    ROWS: tl.constexpr, LINES_LOG2: tl.constexpr, LANES_LOG2: tl.constexpr, SLOTS_LOG2: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = rows < T
    after_predecessor(OVERLAP)
    token = tl.load(ids + rows, mask=inside, other=0).to(tl.int64)
    real = token != ignore_index
    known = (token >= 0) & (token < V)
    count = tl.cdiv(V, 1 << (LINES_LOG2 + LANES_LOG2))
    tops = load_parts(part_top, rows, inside, count, part_stride, -float("inf"), 1 << SLOTS_LOG2)
    sums = load_parts(part_sum, rows, inside, count, part_stride, 0.0, 1 << SLOTS_LOG2)
    top, total = merged(tops, sums, ROWS, SLOTS_LOG2)
    chosen = tl.load(logits + rows * logits_stride + token, mask=inside & real & known, other=0.0).to(tl.float32)
    log_sum = tl.log(total)
    result = tl.where(known, tl.fma(tl.fma(chosen, k, -anchored(top)), LN_2, -log_sum), float("nan"))
    tl.store(logp + rows, tl.where(real, result, 0.0), mask=inside)
    tl.store(row_top + rows, top, mask=inside)
    tl.store(row_sum + rows, total, mask=inside)
    if lse is not None:
        tl.store(lse + rows, tl.where(real, tl.fma(top, LN_2, log_sum), 0.0), mask=inside)
    if entropy is not None:
        dots = load_parts(part_dot, rows, inside, count, part_stride, 0.0, 1 << SLOTS_LOG2)
        below = tops - anchored(top)[:, None]
        weight = tl.exp2(below)
        # What is NaN here is so in the sum as well, and then in its logarithm.
        moved = tl.where((sums == 0.0) | (weight == 0.0), 0.0, (dots + weighted(sums, below)) * weight)
        spread = log_sum - LN_2 * tl.div_rn(pair_sum(moved, ROWS, SLOTS_LOG2), total)
        tl.store(entropy + rows, tl.where(real, spread, 0.0), mask=inside)


@kernel(
    name="selected_logprob_backward",
    family="pointwise",
    contract="softmax/2",
    dims=("T", "V"),
    bucket={"T": powers_of_two},
    rows="T",
    args={
        "logits": data("T", "V", strides=("logits_stride", 1)),
        "ids": index("T", bound="V"),
        "row_top": data("T"),
        "row_sum": scale("T"),
        "entropy": data("T"),
        "d_logp": data("T"),
        "d_entropy": data("T"),
        "d_lse": data("T"),
        "d_logits": written("T", "V", strides=("d_logits_stride", 1), observe="fp32"),
    },
    reference=Config(BLOCK=2048, num_warps=4, num_stages=1, enable_fp_fusion=False),
    knobs={"BLOCK": (1024, 2048, 4096, 8192), "num_warps": (2, 4, 8)},
    grid=lambda p, c: (p.T * cdiv(p.V, c.BLOCK),),
)
@triton.jit(do_not_specialize=["T"])
def selected_logprob_backward_kernel(
    logits, ids, row_top, row_sum, entropy, d_logp, d_entropy, d_lse, d_logits,
    T, V, logits_stride, d_logits_stride, k, inverse, ignore_index, BLOCK: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(V, BLOCK)
    row = (tl.program_id(0) // tiles).to(tl.int64) + tl.arange(0, 1)
    columns = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids + row).to(tl.int64)
    real = token != ignore_index
    known = (token >= 0) & (token < V)
    upstream = tl.zeros((1,), tl.float32)
    if d_logp is not None:
        upstream = tl.load(d_logp + row)
    upstream = tl.where(known, upstream, float("nan"))
    pull = 0.0 - upstream
    if d_lse is not None:
        pull = tl.load(d_lse + row) - upstream
    total = tl.load(row_sum + row)
    inverse_total = tl.div_rn(1.0, total)
    inside = columns < V
    values = tl.load(logits + row * logits_stride + columns, mask=inside & real, other=0.0).to(tl.float32)
    distance = tl.fma(values, k, -anchored(tl.load(row_top + row)))
    p = tl.exp2(distance) * inverse_total
    result = p * (pull * inverse)
    if d_entropy is not None:
        surprise = tl.fma(distance, LN_2, -tl.log(total)) + tl.load(entropy + row)
        result = result - weighted(p, surprise) * (tl.load(d_entropy + row) * inverse)
    place = tl.where(known, token, -1).to(tl.int32)
    result = tl.where(columns == place, result + upstream * inverse, result)
    result = tl.where(real, result, 0.0)
    tl.store(d_logits + row * d_logits_stride + columns, result.to(d_logits.dtype.element_ty), mask=inside)
