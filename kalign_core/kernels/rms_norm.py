"""RMSNorm: ``y = x * rstd * weight`` with ``rstd = 1 / sqrt(mean(x**2) + eps)``, forward and backward.

Contract ``rms_norm/2``, in float32, no fused multiply-add. ``P`` is the adjacent-pair sum of ``kernels.pairs`` over the
row padded with +0 to a power of two:
``rstd = div_rn(1, sqrt_rn(div_rn(P(x * x), H) + eps))``; ``y = round((x * rstd) * w)``. With a residual,
``h = round(x + residual)`` in x's dtype first, and h stands for x.
Backward: ``m = dy * w``; ``c = div_rn(P(m * x), H)``; ``dx = round(rstd * (m - (x * rstd) * (rstd * c)))``, with a
gradient of h ``dx = round(rstd * (...) + dh)``.
``dweight`` adds ``dy * (x * rstd)``: in blocks of 16 rows, each over lanes of ``R`` rows (2,048 over the padded row, 1
to 16), every lane in ascending order from +0, then the lanes by adjacent pairs; the blocks' sums over 256 lanes in the
same way. So trailing rows whose ``dy`` is zero change nothing, and neither does the number of programs.

Rows of more than 65,536 elements are those of ``kernels.rms_norm_long``.
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
from kalign_core.kernels.overlap import after_predecessor
from kalign_core.kernels.pairs import pair_sum, pair_sum_down

LONGEST_HELD = 65536
FOLD_ROWS = 16
FOLD_LANES = 256
KNOBS = {"ROWS": (1, 2, 4, 8, 16, 32), "num_warps": (1, 2, 4, 8, 16)}
ALONG_ROWS = {
    "family": "rowwise",
    "contract": "rms_norm/2",
    "dims": ("T", "H"),
    "bucket": {"T": powers_of_two},
    "rows": "T",
}
ARGS = {
    "x": data("T", "H", strides=("x_stride", 1)),
    "weight": data("H"),
    "out": written("T", "H", strides=("out_stride", 1), observe="fp32"),
    "rstd": side_output("T"),
}
RESIDUAL_ARGS = {
    "x": ARGS["x"],
    "residual": data("T", "H", strides=("residual_stride", 1)),
    "weight": ARGS["weight"],
    "out": ARGS["out"],
    "h": written("T", "H", strides=("h_stride", 1)),
    "rstd": ARGS["rstd"],
}
DERIVED = {
    "BLOCK": lambda p: next_power_of_2(p.H),
    "LOG2": lambda p: next_power_of_2(p.H).bit_length() - 1,
}


def lanes_of(p):
    """Rows that are added up beside each other in a block of the weight's gradient."""
    return max(1, min(FOLD_ROWS, 2048 // next_power_of_2(p.H)))


def whole_rows(p):
    """Reference: about 2,048 elements a program for short rows; a warp per 512 elements, per 1,024 from 8,192 on."""
    block = next_power_of_2(p.H)
    rows = max(1, min(16, 2048 // block))
    tile = block * rows
    warps = max(1, min(16, tile // (512 if tile < 8192 else 1024)))
    return Config(ROWS=rows, num_warps=warps, num_stages=1, enable_fp_fusion=False)


def block_of_rows(p):
    """Reference of the backward pass: a warp up to 2,048 elements a step, then one for every 1,024.

    Steps overlap where two of them fit the shared memory of the smallest device, whatever the dtype.
    """
    tile = next_power_of_2(p.H) * lanes_of(p)
    warps = 1 if tile <= 2048 else min(16, tile // 1024)
    stages = 3 if tile <= 4096 and p.dtype("x") != "fp32" else 1
    return Config(FOLD=FOLD_ROWS, STAGES=stages, num_warps=warps, num_stages=1, enable_fp_fusion=False)


def fold_of_blocks(p):
    """Reference of the fold: narrow columns, and many threads on each where there are few."""
    block, warps = (8, 16) if p.H <= 1024 else (16, 4)
    return Config(BLOCK=block, num_warps=warps, num_stages=1, enable_fp_fusion=False)


@triton.jit
def _reciprocal(values, H, eps, ROWS: tl.constexpr, LOG2: tl.constexpr):
    """``rstd: (ROWS)`` of ``values: (ROWS, 2**LOG2)``."""
    mean = tl.div_rn(pair_sum(values * values, ROWS, LOG2), tl.cast(H, tl.float32))
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))


@triton.jit
def _weight(weight, columns, H):
    """The weight as ``(1 columns)`` in float32, loaded as the rows lie, so that no conversion follows."""
    return tl.load(weight + columns[None, :], mask=(columns < H)[None, :], other=0.0).to(tl.float32)


@kernel(
    name="rms_norm",
    args=ARGS,
    reference=whole_rows,
    knobs=KNOBS,
    derived=DERIVED,
    grid=lambda p, c: (cdiv(p.T, c.ROWS),),
    **ALONG_ROWS,
)
@triton.jit(do_not_specialize=["T"])
def rms_norm_kernel(
    x, weight, out, rstd, T, H, x_stride, out_stride, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LOG2: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < T)[:, None] & (columns < H)[None, :]
    place = x + rows[:, None] * x_stride + columns[None, :]
    after_predecessor(OVERLAP)
    # Tiles of one row carry hints to the cache, tiles of several none. The weight of the latter is on its way while
    # they are added up; the former need the registers.
    POLICY: tl.constexpr = "evict_first" if ROWS == 1 else ""
    MODIFIER: tl.constexpr = ".cs" if ROWS == 1 else ""
    values = tl.load(place, mask=inside, other=0.0, eviction_policy=POLICY).to(tl.float32)
    if ROWS > 1:
        w = _weight(weight, columns, H)
    scale = _reciprocal(values, H, eps, ROWS, LOG2)
    tl.store(rstd + rows, scale, mask=rows < T)
    if ROWS == 1:
        w = _weight(weight, columns, H)
    result = (values * scale[:, None]) * w
    target = out + rows[:, None] * out_stride + columns[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=inside, cache_modifier=MODIFIER)


@kernel(
    name="rms_norm_residual",
    args=RESIDUAL_ARGS,
    reference=whole_rows,
    knobs=KNOBS,
    derived=DERIVED,
    grid=lambda p, c: (cdiv(p.T, c.ROWS),),
    **ALONG_ROWS,
)
@triton.jit(do_not_specialize=["T"])
def rms_norm_residual_kernel(
    x, residual, weight, out, h, rstd, T, H, x_stride, residual_stride, out_stride, h_stride, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LOG2: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < T)[:, None] & (columns < H)[None, :]
    after_predecessor(OVERLAP)
    added = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    place = residual + rows[:, None] * residual_stride + columns[None, :]
    rounded = (added + tl.load(place, mask=inside, other=0.0).to(tl.float32)).to(h.dtype.element_ty)
    tl.store(h + rows[:, None] * h_stride + columns[None, :], rounded, mask=inside)
    values = rounded.to(tl.float32)
    scale = _reciprocal(values, H, eps, ROWS, LOG2)
    tl.store(rstd + rows, scale, mask=rows < T)
    result = (values * scale[:, None]) * _weight(weight, columns, H)
    tl.store(out + rows[:, None] * out_stride + columns[None, :], result.to(out.dtype.element_ty), mask=inside)


@kernel(
    name="rms_norm_backward",
    args={
        "x": data("T", "H", strides=("x_stride", 1)),
        "weight": data("H"),
        "rstd": data("T"),
        "d_out": data("T", "H", strides=("d_out_stride", 1)),
        "d_h": data("T", "H", strides=("d_h_stride", 1)),
        "d_x": written("T", "H", strides=("d_x_stride", 1), observe="fp32"),
        "partial": written(f"T/{FOLD_ROWS}", "H", strides=("H", 1)),
    },
    reference=block_of_rows,
    knobs={"STAGES": (1, 2, 3, 4), "num_warps": (1, 2, 4, 8, 16)},
    derived={**DERIVED, "LANES_LOG2": lambda p: lanes_of(p).bit_length() - 1},
    grid=lambda p, c: (cdiv(p.T, FOLD_ROWS),),
    **ALONG_ROWS,
)
@triton.jit(do_not_specialize=["T"])
def rms_norm_backward_kernel(
    x, weight, rstd, d_out, d_h, d_x, partial, T, H, x_stride, d_out_stride, d_h_stride, d_x_stride,
    FOLD: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr, LOG2: tl.constexpr, LANES_LOG2: tl.constexpr,
):  # fmt: skip
    LANES: tl.constexpr = 1 << LANES_LOG2
    block = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    w = tl.load(weight + columns, mask=columns < H, other=0.0).to(tl.float32)
    totals = tl.zeros((LANES, BLOCK), tl.float32)
    for step in tl.range(0, FOLD, LANES, num_stages=STAGES):
        rows = (block * FOLD + step + tl.arange(0, LANES))[:, None]
        inside = (rows < T) & (columns < H)
        values = tl.load(x + rows * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(d_out + rows * d_out_stride + columns, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + rows, mask=rows < T, other=0.0)
        normal = values * scale
        if d_x is not None:
            m = d * w
            c = tl.div_rn(pair_sum(m * values, LANES, LOG2), tl.cast(H, tl.float32))
            result = scale * (m - normal * (scale * c[:, None]))
            if d_h is not None:
                result += tl.load(d_h + rows * d_h_stride + columns, mask=inside, other=0.0).to(tl.float32)
            tl.store(d_x + rows * d_x_stride + columns, result.to(d_x.dtype.element_ty), mask=inside)
        if partial is not None:
            totals += d * normal
    if partial is not None:
        total = pair_sum_down(totals, 1, LANES_LOG2, BLOCK)
        tl.store(partial + block * H + columns, total, mask=columns < H)


@kernel(
    name="rms_norm_dweight_fold",
    family="fold",
    contract="rms_norm/2",
    dims=("B", "H"),
    bucket={"B": powers_of_two},
    args={"partial": data("B", "H", strides=("H", 1)), "d_weight": written("H", observe="fp32")},
    reference=fold_of_blocks,
    knobs={"BLOCK": (8, 16, 32, 64), "num_warps": (2, 4, 8, 16)},
    derived={"LANES_LOG2": lambda p: FOLD_LANES.bit_length() - 1},
    grid=lambda p, c: (cdiv(p.H, c.BLOCK),),
)
@triton.jit(do_not_specialize=["B"])
def rms_norm_dweight_fold_kernel(
    partial, d_weight, B, H,
    BLOCK: tl.constexpr, LANES_LOG2: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    totals = tl.zeros((1 << LANES_LOG2, BLOCK), tl.float32)
    after_predecessor(OVERLAP)
    for start in range(0, B, 1 << LANES_LOG2):
        blocks = (start + tl.arange(0, 1 << LANES_LOG2)).to(tl.int64)[:, None]
        totals += tl.load(partial + blocks * H + columns, mask=(blocks < B) & (columns < H), other=0.0)
    total = pair_sum_down(totals, 1, LANES_LOG2, BLOCK)
    tl.store(d_weight + columns, total.to(d_weight.dtype.element_ty), mask=columns < H)
