"""Kernels that need what a launch may not leave out: a global's value, scratch memory for a bulk-copy descriptor."""

import triton
import triton.language as tl

from kalign_core.declare import Config, cdiv, data, kernel, written

SHIFT = tl.constexpr(3)


@kernel(
    name="guard_shifted",
    family="pointwise",
    contract="guard_shifted/1",
    dims=("N",),
    args={"x": data("N"), "out": written("N")},
    reference=Config(BLOCK=64, num_warps=1, num_stages=1, enable_fp_fusion=False),
    knobs={},
    grid=lambda p, c: (cdiv(p.N, c.BLOCK),),
)
@triton.jit
def shifted_kernel(x, out, N, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < N) + SHIFT, mask=at < N)


@kernel(
    name="guard_described",
    family="pointwise",
    contract="guard_described/1",
    dims=("M", "N"),
    args={"x": data("M", "N", strides=("N", 1)), "out": written("M", "N", strides=("N", 1))},
    reference=Config(BLOCK=64, num_warps=4, num_stages=1, enable_fp_fusion=False),
    knobs={},
    grid=lambda p, c: (1,),
)
@triton.jit
def described_kernel(x, out, M, N, BLOCK: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [M, N], [N, 1], [BLOCK, BLOCK])
    target = tl.make_tensor_descriptor(out, [M, N], [N, 1], [BLOCK, BLOCK])
    target.store([0, 0], source.load([0, 0]))
