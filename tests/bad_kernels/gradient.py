"""Bad kernels posing as gradients and as their sums over rows."""

import triton
import triton.language as tl

from kalign_core.declare import Config
from kalign_core.kernels.pairs import pair_sum
from kalign_core.kernels.rms_norm import (
    rms_norm_backward_kernel,
    rms_norm_dweight_fold_kernel,
    rms_norm_dweight_kernel,
)
from kalign_core.kernels.swiglu import _sigmoid, _tile, swiglu_backward_kernel
from tests.bad_kernels.references import add_rows_kernel
from tests.bad_kernels.store import Bad, posing_as

CONFIG = Config(BLOCK=64, num_warps=4, num_stages=1, enable_fp_fusion=False)
FOLDING = Config(BLOCK=64, FOLD=64, num_warps=4, num_stages=1, enable_fp_fusion=False)
ROWS = Config(ROWS=8, num_warps=4, num_stages=1, enable_fp_fusion=False)


@triton.jit
def _term(x, rstd, d_out, row, columns, inside, x_stride, d_out_stride):
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(d_out + row * d_out_stride + columns, mask=inside, other=0.0).to(tl.float32)
    return d * (values * tl.load(rstd + row))


@posing_as(rms_norm_dweight_kernel)
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


@posing_as(rms_norm_dweight_kernel)
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
def folds_backwards(partial, d_weight, B, H, BLOCK: tl.constexpr):
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
    x, weight, rstd, d_out, d_x, T, H, x_stride, d_out_stride, d_x_stride,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LOG2: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < T)[:, None] & (columns < H)[None, :]
    values = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    d = tl.load(d_out + rows[:, None] * d_out_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + columns, mask=columns < H, other=0.0).to(tl.float32)
    scale = tl.load(rstd + rows, mask=rows < T, other=0.0)
    m = d * w[None, :]
    c = pair_sum(m * values, ROWS, LOG2) * tl.div_rn(1.0, H.to(tl.float32))
    result = scale[:, None] * (m - (values * scale[:, None]) * (scale * c)[:, None])
    tl.store(d_x + rows[:, None] * d_x_stride + columns[None, :], result.to(d_x.dtype.element_ty), mask=inside)


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
        "sizes_its_tree_by_the_batch", "gradient tree sized by the batch", rms_norm_dweight_kernel,
        {"T": 70, "H": 24}, FOLD, "batch axis", sizes_its_tree_by_the_batch, FOLDING, home=FOLDING,
    ),
    Bad(
        "weighs_absent_rows_by_zero", "masking by multiplication", rms_norm_dweight_kernel, {"T": 70, "H": 24}, FOLD,
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
        {"x": "fp32", "weight": "fp32", "rstd": "fp32", "d_out": "fp32", "d_x": "fp32"}, "input families",
        multiplies_by_a_reciprocal, ROWS, home=ROWS,
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
