"""A deliberately naive RMSNorm: ``tl.sum`` over the row, whose order follows num_warps. The gate has to refute it."""

import triton
import triton.language as tl

from kalign_core.declare import Config, data, kernel, next_power_of_2, powers_of_two, side_output, written


@kernel(
    name="naive_rms_norm",
    family="naive",
    contract="naive_rms_norm/1",
    dims=("T", "H"),
    bucket={"T": powers_of_two},
    rows="T",
    args={
        "x": data("T", "H", strides=("x_stride", 1)),
        "weight": data("H"),
        "out": written("T", "H", strides=("out_stride", 1)),
        "rstd": side_output("T"),
    },
    reference=Config(num_warps=8, num_stages=1, enable_fp_fusion=False),
    knobs={"num_warps": (1, 2, 4, 8, 16)},
    derived={"BLOCK": lambda p: next_power_of_2(p.H)},
    grid=lambda p, c: (p.T,),
)
@triton.jit(do_not_specialize=["T"])
def naive_rms_norm_kernel(x, weight, out, rstd, T, H, x_stride, out_stride, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < H
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tl.sum(values * values, axis=0), H.to(tl.float32)) + eps))
    tl.store(rstd + row, scale)
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, ((values * scale) * w).to(out.dtype.element_ty), mask=inside)
