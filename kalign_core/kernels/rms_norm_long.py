"""RMSNorm along rows that are too long to be held: forward, with a residual, and the gradients.

Contract ``rms_norm/2``, the formulas of ``kernels.rms_norm``, with the same bits: a row's sum by adjacent pairs is a
tree, chunks of ``2**CHUNK_LOG2`` elements are subtrees of it, and their sums are added by adjacent pairs in turn,
padded with +0. So the size of a chunk is a knob like any other.

A program reads its row twice, the second time backwards: what was read last, as much of it as the knob KEEP
(sixteenths) asks the last-level cache to keep, need not come from memory again. With a residual it is h that is read
back: one tensor instead of two, and the last that was touched. Where h's rows are aligned a thread reads what it
stored itself; where they are not (H = 65,537) the load has another layout than the store, and threads read what others
stored: the barrier between makes that right, for it orders a program's accesses to memory (PTX ISA, ``bar``). Going
back, one kernel leaves each row's ``c`` and another works on blocks of 16 rows by pieces of a row, from the last block
to the first, so that the weight's gradient is added up in registers, in the one lane that rows of more than 1,024
elements have.
"""

import triton
import triton.language as tl

from kalign_core.declare import Config, cdiv, data, kernel, next_power_of_2, side_output, written
from kalign_core.kernels.pairs import pair_sum
from kalign_core.kernels.rms_norm import ALONG_ROWS, ARGS, FOLD_ROWS, RESIDUAL_ARGS

WHOLE_ROW = {
    **ALONG_ROWS,
    "derived": {"LOG2": lambda p: next_power_of_2(p.H).bit_length() - 1},
    "grid": lambda p, c: (p.T,),
}
IN_CHUNKS = {"CHUNK_LOG2": (12, 13), "STAGES": (1, 2, 3), "num_warps": (4, 8, 16)}


@triton.jit
def _squares_of(
    x, residual, h, row, first, last, H, x_stride, residual_stride, h_stride, sums, slots,
    POLICY: tl.constexpr, STAGES: tl.constexpr, CHUNK_LOG2: tl.constexpr,
):  # fmt: skip
    """``sums: (1 slots)`` with those of the chunks from ``first`` to ``last``, exclusive, put in; writes h."""
    columns = tl.arange(0, 1 << CHUNK_LOG2)[None, :]
    for chunk in tl.range(first, last, num_stages=STAGES):
        place = chunk * (1 << CHUNK_LOG2) + columns
        inside = place < H
        values = tl.load(x + row * x_stride + place, mask=inside, other=0.0, eviction_policy=POLICY)
        if residual is not None:
            more = tl.load(residual + row * residual_stride + place, mask=inside, other=0.0, eviction_policy=POLICY)
            values = (values.to(tl.float32) + more.to(tl.float32)).to(h.dtype.element_ty)
            tl.store(h + row * h_stride + place, values, mask=inside)
        wide = values.to(tl.float32)
        sums = tl.where(slots == chunk, pair_sum(wide * wide, 1, CHUNK_LOG2)[:, None], sums)
    return sums


@triton.jit
def _long_row(
    x, residual, weight, out, h, rstd, H, x_stride, residual_stride, out_stride, h_stride, eps,
    KEEP: tl.constexpr, STAGES: tl.constexpr, CHUNK_LOG2: tl.constexpr, SLOTS_LOG2: tl.constexpr,
):  # fmt: skip
    CHUNK: tl.constexpr = 1 << CHUNK_LOG2
    row = tl.program_id(0).to(tl.int64)
    count = tl.cdiv(H, CHUNK)
    passing = count * (16 - KEEP) // 16
    slots = tl.arange(0, 1 << SLOTS_LOG2)[None, :]
    sums = tl.zeros((1, 1 << SLOTS_LOG2), tl.float32)
    sums = _squares_of(x, residual, h, row, 0, passing, H, x_stride, residual_stride, h_stride, sums, slots,
                       "evict_first", STAGES, CHUNK_LOG2)  # fmt: skip
    if KEEP > 0:
        sums = _squares_of(x, residual, h, row, passing, count, H, x_stride, residual_stride, h_stride, sums, slots,
                           "evict_last", STAGES, CHUNK_LOG2)  # fmt: skip
    mean = tl.div_rn(pair_sum(sums, 1, SLOTS_LOG2), tl.cast(H, tl.float32))
    scale = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    tl.store(rstd + row + tl.arange(0, 1), scale)
    if residual is None:
        source = x + row * x_stride
    else:
        tl.debug_barrier()
        source = h + row * h_stride
    columns = tl.arange(0, CHUNK)[None, :]
    for step in tl.range(0, count, num_stages=STAGES if residual is None else 1):
        place = (count - 1 - step) * CHUNK + columns
        inside = place < H
        values = tl.load(source + place, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        w = tl.load(weight + place, mask=inside, other=0.0).to(tl.float32)
        result = ((values * scale[:, None]) * w).to(out.dtype.element_ty)
        tl.store(out + row * out_stride + place, result, mask=inside, cache_modifier=".cs")


@kernel(
    name="rms_norm_long",
    args=ARGS,
    reference=Config(CHUNK_LOG2=13, KEEP=16, STAGES=1, num_warps=8, num_stages=1, enable_fp_fusion=False),
    knobs={**IN_CHUNKS, "KEEP": (8, 16)},
    **WHOLE_ROW,
)
@triton.jit(do_not_specialize=["T"])
def rms_norm_long_kernel(
    x, weight, out, rstd, T, H, x_stride, out_stride, eps,
    CHUNK_LOG2: tl.constexpr, KEEP: tl.constexpr, STAGES: tl.constexpr, LOG2: tl.constexpr,
):  # fmt: skip
    LANES_LOG2: tl.constexpr = CHUNK_LOG2 if CHUNK_LOG2 < LOG2 else LOG2
    _long_row(x, None, weight, out, None, rstd, H, x_stride, 0, out_stride, 0, eps,
              KEEP, STAGES, LANES_LOG2, LOG2 - LANES_LOG2)  # fmt: skip


@kernel(
    name="rms_norm_long_residual",
    args=RESIDUAL_ARGS,
    reference=Config(CHUNK_LOG2=13, STAGES=1, num_warps=16, num_stages=1, enable_fp_fusion=False),
    knobs=IN_CHUNKS,
    **WHOLE_ROW,
)
@triton.jit(do_not_specialize=["T"])
def rms_norm_long_residual_kernel(
    x, residual, weight, out, h, rstd, T, H, x_stride, residual_stride, out_stride, h_stride, eps,
    CHUNK_LOG2: tl.constexpr, STAGES: tl.constexpr, LOG2: tl.constexpr,
):  # fmt: skip
    LANES_LOG2: tl.constexpr = CHUNK_LOG2 if CHUNK_LOG2 < LOG2 else LOG2
    _long_row(x, residual, weight, out, h, rstd, H, x_stride, residual_stride, out_stride, h_stride, eps,
              0, STAGES, LANES_LOG2, LOG2 - LANES_LOG2)  # fmt: skip


@kernel(
    name="rms_norm_long_dot",
    args={
        "x": data("T", "H", strides=("x_stride", 1)),
        "weight": data("H"),
        "d_out": data("T", "H", strides=("d_out_stride", 1)),
        "row_dot": side_output("T"),
    },
    reference=Config(CHUNK_LOG2=13, STAGES=1, num_warps=8, num_stages=1, enable_fp_fusion=False),
    knobs=IN_CHUNKS,
    **WHOLE_ROW,
)
@triton.jit(do_not_specialize=["T"])
def rms_norm_long_dot_kernel(
    x, weight, d_out, row_dot, T, H, x_stride, d_out_stride,
    CHUNK_LOG2: tl.constexpr, STAGES: tl.constexpr, LOG2: tl.constexpr,
):  # fmt: skip
    LANES_LOG2: tl.constexpr = CHUNK_LOG2 if CHUNK_LOG2 < LOG2 else LOG2
    CHUNK: tl.constexpr = 1 << LANES_LOG2
    SLOTS_LOG2: tl.constexpr = LOG2 - LANES_LOG2
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, CHUNK)[None, :]
    slots = tl.arange(0, 1 << SLOTS_LOG2)[None, :]
    sums = tl.zeros((1, 1 << SLOTS_LOG2), tl.float32)
    for chunk in tl.range(0, tl.cdiv(H, CHUNK), num_stages=STAGES):
        place = chunk * CHUNK + columns
        values = tl.load(x + row * x_stride + place, mask=place < H, other=0.0).to(tl.float32)
        d = tl.load(d_out + row * d_out_stride + place, mask=place < H, other=0.0).to(tl.float32)
        w = tl.load(weight + place, mask=place < H, other=0.0).to(tl.float32)
        sums = tl.where(slots == chunk, pair_sum((d * w) * values, 1, LANES_LOG2)[:, None], sums)
    c = tl.div_rn(pair_sum(sums, 1, SLOTS_LOG2), tl.cast(H, tl.float32))
    tl.store(row_dot + row + tl.arange(0, 1), c)


@kernel(
    name="rms_norm_long_backward",
    args={
        "x": data("T", "H", strides=("x_stride", 1)),
        "weight": data("H"),
        "rstd": data("T"),
        "row_dot": data("T"),
        "d_out": data("T", "H", strides=("d_out_stride", 1)),
        "d_h": data("T", "H", strides=("d_h_stride", 1)),
        "d_x": written("T", "H", strides=("d_x_stride", 1), observe="fp32"),
        "partial": written(f"T/{FOLD_ROWS}", "H", strides=("H", 1)),
    },
    reference=Config(FOLD=FOLD_ROWS, BLOCK=2048, STAGES=1, num_warps=4, num_stages=1, enable_fp_fusion=False),
    knobs={"BLOCK": (1024, 2048, 4096), "STAGES": (1, 2, 3), "num_warps": (2, 4, 8)},
    grid=lambda p, c: (cdiv(p.T, FOLD_ROWS) * cdiv(p.H, c.BLOCK),),
    **ALONG_ROWS,
)
@triton.jit(do_not_specialize=["T"])
def rms_norm_long_backward_kernel(
    x, weight, rstd, row_dot, d_out, d_h, d_x, partial, T, H, x_stride, d_out_stride, d_h_stride, d_x_stride,
    FOLD: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    pieces = tl.cdiv(H, BLOCK)
    block = (tl.cdiv(T, FOLD) - 1 - tl.program_id(0) // pieces).to(tl.int64)
    columns = (tl.program_id(0) % pieces) * BLOCK + tl.arange(0, BLOCK)[None, :]
    w = tl.load(weight + columns, mask=columns < H, other=0.0).to(tl.float32)
    totals = tl.zeros((1, BLOCK), tl.float32)
    for step in tl.range(0, FOLD, num_stages=STAGES):
        row = (block * FOLD + step + tl.arange(0, 1))[:, None]
        inside = (row < T) & (columns < H)
        values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(d_out + row * d_out_stride + columns, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(rstd + row, mask=row < T, other=0.0)
        normal = values * scale
        if d_x is not None:
            c = tl.load(row_dot + row, mask=row < T, other=0.0)
            result = scale * (d * w - normal * (scale * c))
            if d_h is not None:
                result += tl.load(d_h + row * d_h_stride + columns, mask=inside, other=0.0).to(tl.float32)
            tl.store(d_x + row * d_x_stride + columns, result.to(d_x.dtype.element_ty), mask=inside)
        if partial is not None:
            totals += d * normal
    if partial is not None:
        tl.store(partial + block * H + columns, totals, mask=columns < H)
