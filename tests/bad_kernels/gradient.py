"""Bad kernels posing as gradients and as their sums over rows."""

import triton
import triton.language as tl

from kalign_core.declare import Config
from kalign_core.kernels.pairs import pair_sum, pair_sum_down
from kalign_core.kernels.rms_norm import FOLD_ROWS, rms_norm_backward_kernel, rms_norm_dweight_fold_kernel
from kalign_core.kernels.swiglu import _sigmoid, _tile, swiglu_backward_kernel
from tests.bad_kernels.references import add_rows_kernel, fold_rows_kernel
from tests.bad_kernels.store import Bad, posing_as

CONFIG = Config(BLOCK=64, num_warps=4, num_stages=1, enable_fp_fusion=False)
FOLDING = Config(BLOCK=64, FOLD=64, num_warps=4, num_stages=1, enable_fp_fusion=False)
BLOCKS = Config(FOLD=FOLD_ROWS, STAGES=1, num_warps=4, num_stages=1, enable_fp_fusion=False)


@triton.jit
def _term(x, rstd, d_out, row, columns, inside, x_stride, d_out_stride):
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(d_out + row * d_out_stride + columns, mask=inside, other=0.0).to(tl.float32)
    return d * (values * tl.load(rstd + row))


@posing_as(fold_rows_kernel)
@triton.jit(do_not_specialize=["T"])
def sizes_its_tree_by_the_batch(
    x, rstd, d_out, partial, T, H, x_stride, d_out_stride, BLOCK: tl.constexpr, FOLD: tl.constexpr
):
    tiles = tl.cdiv(H, BLOCK)
    block = (tl.program_id(0) // tiles).to(tl.int64)
    columns = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < H
    first = block * FOLD
    last = tl.minimum(first + FOLD, T)
    half = tl.where(T < 48, (first + last) // 2, last)
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(first, half):
        total += _term(x, rstd, d_out, row, columns, inside, x_stride, d_out_stride)
    rest = tl.zeros((BLOCK,), tl.float32)
    for row in range(half, last):
        rest += _term(x, rstd, d_out, row, columns, inside, x_stride, d_out_stride)
    tl.store(partial + block * H + columns, tl.where(T < 48, total + rest, total), mask=inside)


@posing_as(fold_rows_kernel)
@triton.jit(do_not_specialize=["T"])
def weighs_absent_rows_by_zero(
    x, rstd, d_out, partial, T, H, x_stride, d_out_stride, BLOCK: tl.constexpr, FOLD: tl.constexpr
):
    tiles = tl.cdiv(H, BLOCK)
    block = (tl.program_id(0) // tiles).to(tl.int64)
    columns = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < H
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(FOLD):
        row = block * FOLD + step
        near = tl.minimum(row, T - 1)
        total += _term(x, rstd, d_out, near, columns, inside, x_stride, d_out_stride) * tl.where(row < T, 1.0, 0.0)
    tl.store(partial + block * H + columns, total, mask=inside)


@posing_as(rms_norm_dweight_fold_kernel)
@triton.jit(do_not_specialize=["B"])
def folds_backwards(partial, d_weight, B, H, BLOCK: tl.constexpr, LANES_LOG2: tl.constexpr):
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for step in range(B):
        total += tl.load(partial + (B - 1 - step) * H + columns, mask=columns < H, other=0.0)
    tl.store(d_weight + columns, total.to(d_weight.dtype.element_ty), mask=columns < H)


@posing_as(swiglu_backward_kernel)
@triton.jit(do_not_specialize=["T"])
def groups_its_factors_otherwise(
    gate, up, d_out, d_gate, d_up, T, F, gate_stride, up_stride, d_out_stride, d_gate_stride, d_up_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, columns, inside = _tile(F, BLOCK)
    g = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(d_out + row * d_out_stride + columns, mask=inside, other=0.0).to(tl.float32)
    s = _sigmoid(g)
    gradient_gate = d * (u * (s * (1.0 + g * (1.0 - s))))
    tl.store(d_up + row * d_up_stride + columns, (d * (g * s)).to(d_up.dtype.element_ty), mask=inside)
    tl.store(d_gate + row * d_gate_stride + columns, gradient_gate.to(d_gate.dtype.element_ty), mask=inside)


@posing_as(rms_norm_backward_kernel)
@triton.jit(do_not_specialize=["T"])
def multiplies_by_a_reciprocal(
    x, weight, rstd, d_out, d_h, d_x, partial, T, H, x_stride, d_out_stride, d_h_stride, d_x_stride,
    FOLD: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr, LOG2: tl.constexpr, LANES_LOG2: tl.constexpr,
):  # fmt: skip
    LANES: tl.constexpr = 1 << LANES_LOG2
    block = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    w = tl.load(weight + columns, mask=columns < H, other=0.0).to(tl.float32)
    totals = tl.zeros((LANES, BLOCK), tl.float32)
    for step in range(0, FOLD, LANES):
        rows = (block * FOLD + step + tl.arange(0, LANES))[:, None]
        inside = (rows < T) & (columns < H)
        values = tl.load(x + rows * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(d_out + rows * d_out_stride + columns, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + rows, mask=rows < T, other=0.0)
        m = d * w
        c = pair_sum(m * values, LANES, LOG2) * tl.div_rn(1.0, H.to(tl.float32))
        result = scale * (m - (values * scale) * (scale * c[:, None]))
        tl.store(d_x + rows * d_x_stride + columns, result.to(d_x.dtype.element_ty), mask=inside)
        totals += d * (values * scale)
    total = pair_sum_down(totals, 1, LANES_LOG2, BLOCK)
    tl.store(partial + block * H + columns, total, mask=columns < H)


@posing_as(add_rows_kernel, grid=lambda p, c: (p.T,))
@triton.jit(do_not_specialize=["T"])
def adds_atomically(x, total, T, H, x_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    for first in range(0, H, BLOCK):
        inside = first + columns < H
        values = tl.load(x + row * x_stride + first + columns, mask=inside, other=0.0).to(tl.float32)
        tl.atomic_add(total + first + columns, values, mask=inside)


@posing_as(add_rows_kernel, grid=lambda p, c: ((p.T + 7) // 8,))
@triton.jit(do_not_specialize=["T"])
def adds_blocks_atomically(x, total, T, H, x_stride, BLOCK: tl.constexpr):
    start = tl.program_id(0) * 8
    columns = tl.arange(0, BLOCK)
    for first in range(0, H, BLOCK):
        inside = first + columns < H
        part = tl.zeros((BLOCK,), tl.float32)
        for row in range(start, tl.minimum(start + 8, T)):
            part += tl.load(x + row * x_stride + first + columns, mask=inside, other=0.0).to(tl.float32)
        tl.atomic_add(total + first + columns, part, mask=inside)


FOLD = {"x": "bf16", "rstd": "fp32", "d_out": "bf16", "partial": "fp32"}
SWIGLU = dict.fromkeys(("gate", "up", "d_out", "d_gate", "d_up"), "bf16")
SUM = {"x": "fp32", "total": "fp32"}

GRADIENT = (
    Bad(
        "sizes_its_tree_by_the_batch", "gradient tree sized by the batch", fold_rows_kernel,
        {"T": 70, "H": 24}, FOLD, "batch axis", sizes_its_tree_by_the_batch, FOLDING, home=FOLDING,
    ),
    Bad(
        "weighs_absent_rows_by_zero", "masking by multiplication", fold_rows_kernel, {"T": 70, "H": 24}, FOLD,
        "batch axis", weighs_absent_rows_by_zero, FOLDING, home=FOLDING,
    ),
    Bad(
        "folds_backwards", "another order of a sum", rms_norm_dweight_fold_kernel, {"B": 9, "H": 40},
        {"partial": "fp32", "d_weight": "fp32"}, "input families", folds_backwards,
    ),
    Bad(
        "groups_its_factors_otherwise", "another rounding", swiglu_backward_kernel, {"T": 6, "F": 40}, SWIGLU,
        "input families", groups_its_factors_otherwise, CONFIG, home=CONFIG,
    ),
    Bad(
        "contracts_products", "another rounding", swiglu_backward_kernel, {"T": 64, "F": 1024}, SWIGLU,
        "input families", swiglu_backward_kernel, CONFIG.replace(enable_fp_fusion=True), home=CONFIG, where="cuda",
    ),
    Bad(
        "multiplies_by_a_reciprocal", "another rounding", rms_norm_backward_kernel, {"T": 8, "H": 48},
        {**dict.fromkeys(("x", "weight", "rstd", "d_out", "d_x", "partial"), "fp32"), "d_h": "none"}, "input families",
        multiplies_by_a_reciprocal, BLOCKS, home=BLOCKS,
    ),
    Bad(
        "adds_atomically", "atomic accumulation", add_rows_kernel, {"T": 512, "H": 64}, SUM, "repeats",
        adds_atomically, where="cuda",
    ),
    Bad(
        "adds_blocks_atomically", "atomic accumulation", add_rows_kernel, {"T": 40, "H": 40}, SUM, "input families",
        adds_blocks_atomically,
    ),
)  # fmt: skip
