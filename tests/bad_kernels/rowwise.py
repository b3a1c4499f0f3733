"""Bad kernels posing as RMSNorm, as a sum over groups and as a plain row sum."""

import triton
import triton.language as tl

from kalign_core.declare import Config
from kalign_core.kernels.pairs import pair_sum
from kalign_core.kernels.rms_norm import rms_norm_kernel
from tests.bad_kernels.references import group_sum_kernel, kept_mean_kernel, plain_sum_kernel
from tests.bad_kernels.store import Bad, posing_as

CONFIG = Config(ROWS=8, num_warps=4, num_stages=1, enable_fp_fusion=False)


@triton.jit
def _tile(x, T, H, x_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < T)[:, None] & (columns < H)[None, :]
    values = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    return rows, columns, inside, values


@triton.jit
def _scale(total, H, eps):
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(total, H.to(tl.float32)) + eps))


@triton.jit
def _store(out, rstd, weight, rows, columns, inside, values, scale, T, H, out_stride):
    tl.store(rstd + rows, scale, mask=rows < T)
    w = tl.load(weight + columns, mask=columns < H, other=0.0).to(tl.float32)
    result = (values * scale[:, None]) * w[None, :]
    tl.store(out + rows[:, None] * out_stride + columns[None, :], result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def fold_halves(values, ROWS: tl.constexpr, LOG2: tl.constexpr):
    """The top half onto the bottom half, again and again."""
    for step in tl.static_range(LOG2):
        values = tl.sum(tl.reshape(values, (ROWS, 2, 1 << (LOG2 - 1 - step))), axis=1)
    return tl.reshape(values, (ROWS,))


@posing_as(rms_norm_kernel)
@triton.jit(do_not_specialize=["T"])
def folds_halves(
    x, weight, out, rstd, T, H, x_stride, out_stride, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr, LOG2: tl.constexpr
):
    rows, columns, inside, values = _tile(x, T, H, x_stride, ROWS, BLOCK)
    scale = _scale(fold_halves(values * values, ROWS, LOG2), H, eps)
    _store(out, rstd, weight, rows, columns, inside, values, scale, T, H, out_stride)


@posing_as(rms_norm_kernel)
@triton.jit(do_not_specialize=["T"])
def uses_the_compilers_sum(
    x, weight, out, rstd, T, H, x_stride, out_stride, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr, LOG2: tl.constexpr
):
    rows, columns, inside, values = _tile(x, T, H, x_stride, ROWS, BLOCK)
    scale = _scale(tl.sum(values * values, axis=1), H, eps)
    _store(out, rstd, weight, rows, columns, inside, values, scale, T, H, out_stride)


@posing_as(rms_norm_kernel)
@triton.jit(do_not_specialize=["T"])
def masks_by_multiplying(
    x, weight, out, rstd, T, H, x_stride, out_stride, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr, LOG2: tl.constexpr
):
    rows, columns, inside, _ = _tile(x, T, H, x_stride, ROWS, BLOCK)
    near = tl.minimum(rows, T - 1)
    # Reads up to the end of the block, into the next row or past the last one.
    read = tl.load(x + near[:, None] * x_stride + columns[None, :]).to(tl.float32)
    values = read * tl.where(inside, 1.0, 0.0)
    scale = _scale(pair_sum(values * values, ROWS, LOG2), H, eps)
    _store(out, rstd, weight, rows, columns, inside, values, scale, T, H, out_stride)


@posing_as(rms_norm_kernel)
@triton.jit(do_not_specialize=["T"])
def adds_nothing_of_the_next_row(
    x, weight, out, rstd, T, H, x_stride, out_stride, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr, LOG2: tl.constexpr
):
    rows, columns, inside, values = _tile(x, T, H, x_stride, ROWS, BLOCK)
    below = tl.minimum(rows + 1, T - 1)
    other = tl.load(x + below[:, None] * x_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    values += 0.0 * other
    scale = _scale(pair_sum(values * values, ROWS, LOG2), H, eps)
    _store(out, rstd, weight, rows, columns, inside, values, scale, T, H, out_stride)


@posing_as(rms_norm_kernel)
@triton.jit(do_not_specialize=["T"])
def sums_few_rows_otherwise(
    x, weight, out, rstd, T, H, x_stride, out_stride, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr, LOG2: tl.constexpr
):
    rows, columns, inside, values = _tile(x, T, H, x_stride, ROWS, BLOCK)
    squares = values * values
    total = pair_sum(squares, ROWS, LOG2)
    if T < 16:
        total = fold_halves(squares, ROWS, LOG2)
    _store(out, rstd, weight, rows, columns, inside, values, _scale(total, H, eps), T, H, out_stride)


@posing_as(rms_norm_kernel)
@triton.jit(do_not_specialize=["T"])
def scales_by_its_tile(
    x, weight, out, rstd, T, H, x_stride, out_stride, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr, LOG2: tl.constexpr
):
    rows, columns, inside, values = _tile(x, T, H, x_stride, ROWS, BLOCK)
    peak = tl.max(tl.max(tl.abs(values), axis=1), axis=0)
    factor = tl.where(peak > 2.0e4, 3.0, 1.0)
    small = tl.div_rn(values, factor)
    total = pair_sum(small * small, ROWS, LOG2) * (factor * factor)
    _store(out, rstd, weight, rows, columns, inside, values, _scale(total, H, eps), T, H, out_stride)


@posing_as(rms_norm_kernel)
@triton.jit(do_not_specialize=["T"])
def rounds_its_side_output(
    x, weight, out, rstd, T, H, x_stride, out_stride, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr, LOG2: tl.constexpr
):
    rows, columns, inside, values = _tile(x, T, H, x_stride, ROWS, BLOCK)
    scale = _scale(pair_sum(values * values, ROWS, LOG2), H, eps)
    _store(out, rstd, weight, rows, columns, inside, values, scale, T, H, out_stride)
    tl.store(rstd + rows, scale.to(tl.bfloat16).to(tl.float32), mask=rows < T)


@posing_as(rms_norm_kernel)
@triton.jit(do_not_specialize=["T"])
def takes_widths_in_sixteens(
    x, weight, out, rstd, T, H, x_stride, out_stride, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr, LOG2: tl.constexpr
):
    rows, columns, inside, values = _tile(x, T, H, x_stride, ROWS, BLOCK)
    counted = tl.where((columns < (H // 16) * 16)[None, :], values, 0.0)
    scale = _scale(pair_sum(counted * counted, ROWS, LOG2), H, eps)
    _store(out, rstd, weight, rows, columns, inside, values, scale, T, H, out_stride)


@posing_as(rms_norm_kernel)
@triton.jit(do_not_specialize=["T"])
def approximates_the_root(
    x, weight, out, rstd, T, H, x_stride, out_stride, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr, LOG2: tl.constexpr
):
    rows, columns, inside, values = _tile(x, T, H, x_stride, ROWS, BLOCK)
    scale = tl.rsqrt(tl.div_rn(pair_sum(values * values, ROWS, LOG2), H.to(tl.float32)) + eps)
    _store(out, rstd, weight, rows, columns, inside, values, scale, T, H, out_stride)


@posing_as(group_sum_kernel)
@triton.jit(do_not_specialize=["T"])
def sizes_blocks_by_the_largest_group(x, sizes, out, T, S, x_stride, BLOCK: tl.constexpr, LOG2: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    largest = 0
    for other in range(T):
        largest = tl.maximum(largest, tl.load(sizes + other))
    member = columns < tl.load(sizes + row)
    values = tl.load(x + row * x_stride + columns, mask=member, other=0.0).to(tl.float32)
    half = largest // 2
    low = pair_sum(tl.reshape(tl.where(columns < half, values, 0.0), (1, BLOCK)), 1, LOG2)
    high = pair_sum(tl.reshape(tl.where(columns >= half, values, 0.0), (1, BLOCK)), 1, LOG2)
    tl.store(out + row + tl.arange(0, 1), low + high)


@posing_as(group_sum_kernel)
@triton.jit(do_not_specialize=["T"])
def loses_the_largest_size(x, sizes, out, T, S, x_stride, BLOCK: tl.constexpr, LOG2: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    member = columns < tl.minimum(tl.load(sizes + row), S - 2)
    values = tl.load(x + row * x_stride + columns, mask=member, other=0.0).to(tl.float32)
    tl.store(out + row + tl.arange(0, 1), pair_sum(tl.reshape(values, (1, BLOCK)), 1, LOG2))


@posing_as(kept_mean_kernel)
@triton.jit(do_not_specialize=["T"])
def counts_one_where_none_is_kept(x, keep, out, T, S, x_stride, keep_stride, BLOCK: tl.constexpr, LOG2: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    kept = tl.load(keep + row * keep_stride + columns, mask=columns < S, other=0) != 0
    values = tl.where(kept, tl.load(x + row * x_stride + columns, mask=columns < S, other=0.0).to(tl.float32), 0.0)
    total = pair_sum(tl.reshape(values, (1, BLOCK)), 1, LOG2)
    count = tl.sum(tl.reshape(kept.to(tl.int32), (1, BLOCK)), axis=1)
    tl.store(out + row + tl.arange(0, 1), tl.div_rn(total, tl.maximum(count, 1).to(tl.float32)))


@posing_as(rms_norm_kernel)
@triton.jit(do_not_specialize=["T"])
def flushes_its_weight(
    x, weight, out, rstd, T, H, x_stride, out_stride, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr, LOG2: tl.constexpr
):
    rows, columns, inside, values = _tile(x, T, H, x_stride, ROWS, BLOCK)
    scale = _scale(pair_sum(values * values, ROWS, LOG2), H, eps)
    tl.store(rstd + rows, scale, mask=rows < T)
    w = tl.load(weight + columns, mask=columns < H, other=0.0).to(tl.float32)
    w = tl.where(tl.abs(w) < 1.1754943508222875e-38, 0.0 * w, w)
    result = (values * scale[:, None]) * w[None, :]
    tl.store(out + rows[:, None] * out_stride + columns[None, :], result.to(out.dtype.element_ty), mask=inside)


SIZES = {"T": 18, "H": 48}
DTYPES = {"x": "bf16", "weight": "bf16", "out": "bf16", "rstd": "fp32"}
GROUPS = {"x": "fp32", "sizes": "i32", "out": "fp32"}
SUMS = {"x": "fp32", "out": "fp32"}


def _rms_norm(kernel, kind, check, dims=SIZES, **more):
    numbers = {"eps": 1e-6}
    return Bad(
        kernel.name, kind, rms_norm_kernel, dims, DTYPES, check, kernel, CONFIG, numbers=numbers, home=CONFIG, **more
    )


ROWWISE = (
    _rms_norm(folds_halves, "another order of a sum", "input families"),
    _rms_norm(uses_the_compilers_sum, "a compiler's own reduction under other warps", "input families"),
    _rms_norm(masks_by_multiplying, "masking by multiplication", "input families"),
    _rms_norm(adds_nothing_of_the_next_row, "a read of the neighbour's row", "batch axis"),
    _rms_norm(sums_few_rows_otherwise, "split of a sum chosen from the number of rows", "batch axis"),
    _rms_norm(scales_by_its_tile, "a read of the neighbour's row", "batch axis"),
    _rms_norm(rounds_its_side_output, "another rounding", "input families"),
    _rms_norm(takes_widths_in_sixteens, "a layout mishandled", "layout", {"T": 3, "H": 48}, quick=False),
    _rms_norm(flushes_its_weight, "a special value mishandled", "input families"),
    _rms_norm(approximates_the_root, "another rounding", "input families", where="cuda"),
    Bad(
        "sizes_blocks_by_the_largest_group", "block sized by the largest group", group_sum_kernel,
        {"T": 20, "S": 48}, GROUPS, "batch axis", sizes_blocks_by_the_largest_group,
    ),
    Bad(
        "loses_the_largest_size", "a special value mishandled", group_sum_kernel, {"T": 64, "S": 48}, GROUPS,
        "input families", loses_the_largest_size,
    ),
    Bad(
        "counts_one_where_none_is_kept", "a special value mishandled", kept_mean_kernel, {"T": 6, "S": 48},
        {"x": "fp32", "keep": "i32", "out": "fp32"}, "written bytes", counts_one_where_none_is_kept,
    ),
    Bad(
        "sums_under_four_warps", "a compiler's own reduction under other warps", plain_sum_kernel,
        {"T": 64, "H": 1024}, SUMS, "order probes", plain_sum_kernel,
        Config(num_warps=4, num_stages=1, enable_fp_fusion=False), where="cuda",
    ),
)  # fmt: skip
