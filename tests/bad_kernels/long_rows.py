"""Bad kernels posing as RMSNorm of rows that are read twice; they stand beside the store that every device runs."""

import triton
import triton.language as tl

from kalign_core.declare import Config
from kalign_core.kernels.pairs import pair_sum
from kalign_core.kernels.rms_norm import FOLD_ROWS
from kalign_core.kernels.rms_norm_long import (
    rms_norm_long_backward_kernel,
    rms_norm_long_dot_kernel,
    rms_norm_long_kernel,
    rms_norm_long_residual_kernel,
)
from tests.bad_kernels.store import Bad, posing_as

CHUNKS = Config(CHUNK_LOG2=3, KEEP=16, STAGES=1, num_warps=4, num_stages=1, enable_fp_fusion=False)
UNKEPT = Config(CHUNK_LOG2=3, STAGES=1, num_warps=4, num_stages=1, enable_fp_fusion=False)
PIECES = Config(FOLD=FOLD_ROWS, BLOCK=32, STAGES=1, num_warps=4, num_stages=1, enable_fp_fusion=False)


@triton.jit
def _chunk(x, row, first, H, x_stride, CHUNK: tl.constexpr):
    place = first + tl.arange(0, CHUNK)[None, :]
    return place, tl.load(x + row * x_stride + place, mask=place < H, other=0.0).to(tl.float32)


@triton.jit
def _scale(total, H, eps):
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(total, H.to(tl.float32)) + eps))


@posing_as(rms_norm_long_kernel)
@triton.jit(do_not_specialize=["T"])
def adds_chunks_one_by_one(
    x, weight, out, rstd, T, H, x_stride, out_stride, eps,
    CHUNK_LOG2: tl.constexpr, KEEP: tl.constexpr, STAGES: tl.constexpr, LOG2: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((1,), tl.float32)
    for first in range(0, H, 1 << CHUNK_LOG2):
        _, values = _chunk(x, row, first, H, x_stride, 1 << CHUNK_LOG2)
        total += pair_sum(values * values, 1, CHUNK_LOG2)
    scale = _scale(total, H, eps)
    tl.store(rstd + row + tl.arange(0, 1), scale)
    for first in range(0, H, 1 << CHUNK_LOG2):
        place, values = _chunk(x, row, first, H, x_stride, 1 << CHUNK_LOG2)
        w = tl.load(weight + place, mask=place < H, other=0.0).to(tl.float32)
        result = ((values * scale[:, None]) * w).to(out.dtype.element_ty)
        tl.store(out + row * out_stride + place, result, mask=place < H)


@posing_as(rms_norm_long_residual_kernel)
@triton.jit(do_not_specialize=["T"])
def squares_before_it_rounds(
    x, residual, weight, out, h, rstd, T, H, x_stride, residual_stride, out_stride, h_stride, eps,
    CHUNK_LOG2: tl.constexpr, STAGES: tl.constexpr, LOG2: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place, values = _chunk(x, row, 0, H, x_stride, 1 << LOG2)
    _, more = _chunk(residual, row, 0, H, residual_stride, 1 << LOG2)
    added = values + more
    rounded = added.to(h.dtype.element_ty)
    tl.store(h + row * h_stride + place, rounded, mask=place < H)
    scale = _scale(pair_sum(added * added, 1, LOG2), H, eps)
    tl.store(rstd + row + tl.arange(0, 1), scale)
    w = tl.load(weight + place, mask=place < H, other=0.0).to(tl.float32)
    result = ((rounded.to(tl.float32) * scale[:, None]) * w).to(out.dtype.element_ty)
    tl.store(out + row * out_stride + place, result, mask=place < H)


@posing_as(rms_norm_long_dot_kernel)
@triton.jit(do_not_specialize=["T"])
def adds_products_one_by_one(
    x, weight, d_out, row_dot, T, H, x_stride, d_out_stride,
    CHUNK_LOG2: tl.constexpr, STAGES: tl.constexpr, LOG2: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros((1,), tl.float32)
    for first in range(0, H, 1 << CHUNK_LOG2):
        place, values = _chunk(x, row, first, H, x_stride, 1 << CHUNK_LOG2)
        _, d = _chunk(d_out, row, first, H, d_out_stride, 1 << CHUNK_LOG2)
        w = tl.load(weight + place, mask=place < H, other=0.0).to(tl.float32)
        total += pair_sum((d * w) * values, 1, CHUNK_LOG2)
    tl.store(row_dot + row + tl.arange(0, 1), tl.div_rn(total, H.to(tl.float32)))


@posing_as(rms_norm_long_backward_kernel)
@triton.jit(do_not_specialize=["T"])
def adds_rows_from_the_last(
    x, weight, rstd, row_dot, d_out, d_h, d_x, partial, T, H, x_stride, d_out_stride, d_h_stride, d_x_stride,
    FOLD: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    pieces = tl.cdiv(H, BLOCK)
    block = (tl.program_id(0) // pieces).to(tl.int64)
    columns = (tl.program_id(0) % pieces) * BLOCK + tl.arange(0, BLOCK)[None, :]
    w = tl.load(weight + columns, mask=columns < H, other=0.0).to(tl.float32)
    totals = tl.zeros((1, BLOCK), tl.float32)
    for step in range(FOLD):
        row = (block * FOLD + FOLD - 1 - step + tl.arange(0, 1))[:, None]
        inside = (row < T) & (columns < H)
        values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(d_out + row * d_out_stride + columns, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row, mask=row < T, other=0.0)
        c = tl.load(row_dot + row, mask=row < T, other=0.0)
        result = scale * (d * w - (values * scale) * (scale * c))
        result += tl.load(d_h + row * d_h_stride + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(d_x + row * d_x_stride + columns, result.to(d_x.dtype.element_ty), mask=inside)
        totals += d * (values * scale)
    tl.store(partial + block * H + columns, totals, mask=columns < H)


EPS = {"eps": 1e-6}
DTYPES = {"x": "bf16", "weight": "bf16", "out": "bf16", "rstd": "fp32"}
SUMS = {"x": "bf16", "weight": "bf16", "d_out": "bf16", "row_dot": "fp32"}
BACK = {**dict.fromkeys(("x", "weight", "d_out", "d_h", "d_x"), "bf16"),
        **dict.fromkeys(("rstd", "row_dot", "partial"), "fp32")}  # fmt: skip


def _bad(kernel, kind, reference, dtypes, home, check="input families", **more):
    return Bad(kernel.name, kind, reference, {"T": 3, "H": 40}, dtypes, check, kernel, home, home=home, **more)


LONG_ROWS = (
    _bad(adds_chunks_one_by_one, "another order of a sum", rms_norm_long_kernel, DTYPES, CHUNKS, numbers=EPS),
    _bad(
        squares_before_it_rounds, "another rounding", rms_norm_long_residual_kernel,
        {**DTYPES, "residual": "bf16", "h": "bf16"}, UNKEPT, numbers=EPS,
    ),
    _bad(adds_products_one_by_one, "another order of a sum", rms_norm_long_dot_kernel, SUMS, UNKEPT),
    _bad(adds_rows_from_the_last, "another order of a sum", rms_norm_long_backward_kernel, BACK, PIECES),
)  # fmt: skip
