"""RMSNorm: ``y = x * rstd * weight`` with ``rstd = 1 / sqrt(mean(x**2) + eps)``, forward and backward.

Contract ``rms_norm/1``, in float32, no fused multiply-add. ``P`` is the adjacent-pair sum of ``kernels.pairs`` over the
row padded with +0 to a power of two:
``rstd = div_rn(1, sqrt_rn(div_rn(P(x * x), H) + eps))``; ``y = round((x * rstd) * w)``.
Backward: ``m = dy * w``; ``c = div_rn(P(m * x), H)``; ``dx = round(rstd * (m - (x * rstd) * (rstd * c)))``.
``dweight`` adds ``dy * (x * rstd)`` over fixed blocks of 64 rows in ascending order from +0, then the blocks' sums in
ascending order from +0: trailing rows whose ``dy`` is zero change nothing, and neither does the number of programs.
"""

import triton
import triton.language as tl

from kalign_core.declare import (
    Config,
    cdiv,
    data,
    kernel,
    next_power_of_2,
    powers_of_two,
    side_output,
    written,
)
from kalign_core.kernels.pairs import pair_sum

FOLD_ROWS = 64
KNOBS = {"ROWS": (1, 2, 4, 8, 16, 32), "num_warps": (1, 2, 4, 8, 16)}
FOLD_KNOBS = {"BLOCK": (32, 64, 128, 256, 512), "num_warps": (1, 2, 4, 8)}
DERIVED = {
    "BLOCK": lambda p: next_power_of_2(p.H),
    "LOG2": lambda p: next_power_of_2(p.H).bit_length() - 1,
}


def whole_rows(p):
    """Reference: about 2048 elements a program for short rows, a warp per 512 elements, at most 16 of either."""
    block = next_power_of_2(p.H)
    rows = max(1, min(16, 2048 // block))
    warps = max(1, min(16, block * rows // 512))
    return Config(ROWS=rows, num_warps=warps, num_stages=1, enable_fp_fusion=False)


@kernel(
    name="rms_norm",
    family="rowwise",
    contract="rms_norm/1",
    dims=("T", "H"),
    bucket={"T": powers_of_two},
    rows="T",
    args={
        "x": data("T", "H", strides=("x_stride", 1)),
        "weight": data("H"),
        "out": written("T", "H", strides=("out_stride", 1), observe="fp32"),
        "rstd": side_output("T"),
    },
    reference=whole_rows,
    knobs=KNOBS,
    derived=DERIVED,
    grid=lambda p, c: (cdiv(p.T, c.ROWS),),
)
@triton.jit(do_not_specialize=["T"])
def rms_norm_kernel(
    x, weight, out, rstd, T, H, x_stride, out_stride, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LOG2: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < T)[:, None] & (columns < H)[None, :]
    values = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    mean = tl.div_rn(pair_sum(values * values, ROWS, LOG2), tl.cast(H, tl.float32))
    scale = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    tl.store(rstd + rows, scale, mask=rows < T)
    w = tl.load(weight + columns, mask=columns < H, other=0.0).to(tl.float32)
    result = (values * scale[:, None]) * w[None, :]
    tl.store(out + rows[:, None] * out_stride + columns[None, :], result.to(out.dtype.element_ty), mask=inside)


@kernel(
    name="rms_norm_backward",
    family="rowwise",
    contract="rms_norm/1",
    dims=("T", "H"),
    bucket={"T": powers_of_two},
    rows="T",
    args={
        "x": data("T", "H", strides=("x_stride", 1)),
        "weight": data("H"),
        "rstd": data("T"),
        "d_out": data("T", "H", strides=("d_out_stride", 1)),
        "d_x": written("T", "H", strides=("d_x_stride", 1), observe="fp32"),
    },
    reference=whole_rows,
    knobs=KNOBS,
    derived=DERIVED,
    grid=lambda p, c: (cdiv(p.T, c.ROWS),),
)
@triton.jit(do_not_specialize=["T"])
def rms_norm_backward_kernel(
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
    c = tl.div_rn(pair_sum(m * values, ROWS, LOG2), tl.cast(H, tl.float32))
    result = scale[:, None] * (m - (values * scale[:, None]) * (scale * c)[:, None])
    tl.store(d_x + rows[:, None] * d_x_stride + columns[None, :], result.to(d_x.dtype.element_ty), mask=inside)


@kernel(
    name="rms_norm_dweight",
    family="fold",
    contract="rms_norm/1",
    dims=("T", "H"),
    bucket={"T": powers_of_two},
    args={
        "x": data("T", "H", strides=("x_stride", 1)),
        "rstd": data("T"),
        "d_out": data("T", "H", strides=("d_out_stride", 1)),
        "partial": written("T/64", "H", strides=("H", 1)),
    },
    reference=Config(BLOCK=128, FOLD=FOLD_ROWS, num_warps=4, num_stages=1, enable_fp_fusion=False),
    knobs=FOLD_KNOBS,
    grid=lambda p, c: (cdiv(p.T, FOLD_ROWS) * cdiv(p.H, c.BLOCK),),
)
@triton.jit(do_not_specialize=["T"])
def rms_norm_dweight_kernel(
    x, rstd, d_out, partial, T, H, x_stride, d_out_stride, BLOCK: tl.constexpr, FOLD: tl.constexpr
):
    tiles = tl.cdiv(H, BLOCK)
    block = (tl.program_id(0) // tiles).to(tl.int64)
    columns = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    first = block * FOLD + tl.zeros((BLOCK,), tl.int64)
    for step in range(FOLD):
        row = first + step
        inside = (columns < H) & (row < T)
        values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(d_out + row * d_out_stride + columns, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row, mask=row < T, other=0.0)
        total += d * (values * scale)
    tl.store(partial + block * H + columns, total, mask=columns < H)


@kernel(
    name="rms_norm_dweight_fold",
    family="fold",
    contract="rms_norm/1",
    dims=("B", "H"),
    bucket={"B": powers_of_two},
    args={"partial": data("B", "H", strides=("H", 1)), "d_weight": written("H", observe="fp32")},
    reference=Config(BLOCK=128, num_warps=4, num_stages=1, enable_fp_fusion=False),
    knobs=FOLD_KNOBS,
    grid=lambda p, c: (cdiv(p.H, c.BLOCK),),
)
@triton.jit(do_not_specialize=["B"])
def rms_norm_dweight_fold_kernel(partial, d_weight, B, H, BLOCK: tl.constexpr):
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    sums = partial + columns
    for _ in range(B):
        total += tl.load(sums, mask=columns < H, other=0.0)
        sums += H
    tl.store(d_weight + columns, total.to(d_weight.dtype.element_ty), mask=columns < H)
