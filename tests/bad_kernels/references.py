"""Good kernels for the bad ones to be held to, where kalign has none of the kind."""

import triton
import triton.language as tl

from kalign_core.declare import (
    Config,
    accumulated,
    cdiv,
    data,
    index,
    kernel,
    mask,
    next_power_of_2,
    powers_of_two,
    side_output,
    written,
)
from kalign_core.kernels.pairs import pair_sum


@kernel(
    name="select", family="pointwise", contract="select/1", dims=("T", "F"), bucket={"T": powers_of_two}, rows="T",
    args={
        "x": data("T", "F", strides=("x_stride", 1)), "keep": mask("T", "F", strides=("keep_stride", 1)),
        "out": written("T", "F", strides=("out_stride", 1)),
    },
    reference=Config(BLOCK=64, num_warps=4, num_stages=1, enable_fp_fusion=False),
    knobs={"BLOCK": (32, 64, 128)}, grid=lambda p, c: (p.T * cdiv(p.F, c.BLOCK),),
)  # fmt: skip
@triton.jit(do_not_specialize=["T"])
def select_kernel(x, keep, out, T, F, x_stride, keep_stride, out_stride, BLOCK: tl.constexpr):
    """``out = x where keep else 0``: a copy, so that NaN payloads and signs of zero have to arrive."""
    tiles = tl.cdiv(F, BLOCK)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    columns = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < F
    kept = tl.load(keep + row * keep_stride + columns, mask=inside, other=0)
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
    tl.store(out + row * out_stride + columns, tl.where(kept != 0, values, 0.0), mask=inside)


@kernel(
    name="plain_sum", family="rowwise", contract="plain_sum/1", dims=("T", "H"), bucket={"T": powers_of_two}, rows="T",
    args={"x": data("T", "H", strides=("x_stride", 1)), "out": written("T")},
    reference=Config(num_warps=8, num_stages=1, enable_fp_fusion=False), knobs={"num_warps": (1, 2, 4, 8)},
    derived={"BLOCK": lambda p: next_power_of_2(p.H)}, grid=lambda p, c: (p.T,),
)  # fmt: skip
@triton.jit(do_not_specialize=["T"])
def plain_sum_kernel(x, out, T, H, x_stride, BLOCK: tl.constexpr):
    """The compiler's own reduction: good under one number of warps, another kernel under each other."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    values = tl.load(x + row * x_stride + columns, mask=columns < H, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(values, axis=0))


@kernel(
    name="group_sum", family="rowwise", contract="group_sum/1", dims=("T", "S"), bucket={"T": powers_of_two}, rows="T",
    args={"x": data("T", "S", strides=("x_stride", 1)), "sizes": index("T", bound="S"), "out": written("T")},
    reference=Config(num_warps=4, num_stages=1, enable_fp_fusion=False), knobs={"num_warps": (1, 2, 4, 8)},
    derived={"BLOCK": lambda p: next_power_of_2(p.S), "LOG2": lambda p: next_power_of_2(p.S).bit_length() - 1},
    grid=lambda p, c: (p.T,),
)  # fmt: skip
@triton.jit(do_not_specialize=["T"])
def group_sum_kernel(x, sizes, out, T, S, x_stride, BLOCK: tl.constexpr, LOG2: tl.constexpr):
    """The sum of each group's first ``sizes`` members by adjacent pairs."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    member = columns < tl.load(sizes + row)
    values = tl.load(x + row * x_stride + columns, mask=member, other=0.0).to(tl.float32)
    tl.store(out + row + tl.arange(0, 1), pair_sum(tl.reshape(values, (1, BLOCK)), 1, LOG2))


@kernel(
    name="kept_mean", family="rowwise", contract="kept_mean/1", dims=("T", "S"), bucket={"T": powers_of_two}, rows="T",
    args={
        "x": data("T", "S", strides=("x_stride", 1)), "keep": mask("T", "S", strides=("keep_stride", 1)),
        "out": written("T"),
    },
    reference=Config(num_warps=4, num_stages=1, enable_fp_fusion=False), knobs={"num_warps": (1, 2, 4, 8)},
    derived={"BLOCK": lambda p: next_power_of_2(p.S), "LOG2": lambda p: next_power_of_2(p.S).bit_length() - 1},
    grid=lambda p, c: (p.T,),
)  # fmt: skip
@triton.jit(do_not_specialize=["T"])
def kept_mean_kernel(x, keep, out, T, S, x_stride, keep_stride, BLOCK: tl.constexpr, LOG2: tl.constexpr):
    """The mean of each row's kept members by adjacent pairs: NaN where none is kept."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    kept = tl.load(keep + row * keep_stride + columns, mask=columns < S, other=0) != 0
    values = tl.where(kept, tl.load(x + row * x_stride + columns, mask=columns < S, other=0.0).to(tl.float32), 0.0)
    total = pair_sum(tl.reshape(values, (1, BLOCK)), 1, LOG2)
    count = tl.sum(tl.reshape(kept.to(tl.int32), (1, BLOCK)), axis=1).to(tl.float32)
    tl.store(out + row + tl.arange(0, 1), tl.div_rn(total, count))


@kernel(
    name="log_sum_exp", family="softmax", contract="log_sum_exp/1", dims=("T", "V"), bucket={"T": powers_of_two},
    rows="T", args={"x": data("T", "V", strides=("x_stride", 1)), "out": written("T"), "largest": side_output("T")},
    reference=Config(TILE=32, LOG2=5, num_warps=4, num_stages=1, enable_fp_fusion=False),
    knobs={"num_warps": (1, 2, 4, 8)}, grid=lambda p, c: (p.T,),
)  # fmt: skip
@triton.jit(do_not_specialize=["T"])
def log_sum_exp_kernel(x, out, largest, T, V, x_stride, TILE: tl.constexpr, LOG2: tl.constexpr):
    """Online: per tile of the vocabulary in ascending order, rescale, then add the tile's pair sum."""
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    columns = tl.arange(0, TILE)
    best = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    for first in range(0, V, TILE):
        inside = (first + columns)[None, :] < V
        place = x + row[:, None] * x_stride + first + columns[None, :]
        values = tl.load(place, mask=inside, other=float("-inf")).to(tl.float32)
        above = tl.maximum(best, tl.max(values, axis=1))
        total = total * tl.exp(best - above) + pair_sum(tl.exp(values - above[:, None]), 1, LOG2)
        best = above
    tl.store(out + row, best + tl.log(total))
    tl.store(largest + row, best)


@kernel(
    name="add_rows", family="fold", contract="add_rows/1", dims=("T", "H"), bucket={"T": powers_of_two},
    args={"x": data("T", "H", strides=("x_stride", 1)), "total": accumulated("H")},
    reference=Config(BLOCK=32, num_warps=1, num_stages=1, enable_fp_fusion=False),
    knobs={"num_warps": (1, 2, 4)}, grid=lambda p, c: (cdiv(p.H, c.BLOCK),),
)  # fmt: skip
@triton.jit(do_not_specialize=["T"])
def add_rows_kernel(x, total, T, H, x_stride, BLOCK: tl.constexpr):
    """``total += x`` over all rows, in ascending order."""
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < H
    running = tl.load(total + columns, mask=inside, other=0.0)
    for row in range(T):
        running += tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(total + columns, running, mask=inside)


@kernel(
    name="fold_rows", family="fold", contract="fold_rows/1", dims=("T", "H"), bucket={"T": powers_of_two},
    args={
        "x": data("T", "H", strides=("x_stride", 1)), "rstd": data("T"),
        "d_out": data("T", "H", strides=("d_out_stride", 1)), "partial": written("T/64", "H", strides=("H", 1)),
    },
    reference=Config(BLOCK=64, FOLD=64, num_warps=4, num_stages=1, enable_fp_fusion=False),
    knobs={"BLOCK": (32, 64, 128), "num_warps": (1, 2, 4, 8)},
    grid=lambda p, c: (cdiv(p.T, c.FOLD) * cdiv(p.H, c.BLOCK),),
)  # fmt: skip
@triton.jit(do_not_specialize=["T"])
def fold_rows_kernel(x, rstd, d_out, partial, T, H, x_stride, d_out_stride, BLOCK: tl.constexpr, FOLD: tl.constexpr):
    """``d_out * (x * rstd)`` added over blocks of 64 rows in ascending order: trailing zeros change nothing."""
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
