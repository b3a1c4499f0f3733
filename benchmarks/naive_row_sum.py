"""A deliberately naive row sum: tiles added lane by lane, the lanes by ``tl.sum``. Every tile and num_warps is another
order, so that nearly every launch gives bits of its own. The gate has to tell them apart."""

import triton
import triton.language as tl

from kalign_core.declare import Config, data, kernel, powers_of_two, written


@kernel(
    name="naive_row_sum",
    family="naive",
    contract="naive_row_sum/1",
    dims=("T", "H"),
    bucket={"T": powers_of_two},
    rows="T",
    args={"x": data("T", "H", strides=("x_stride", 1)), "out": written("T")},
    reference=Config(BLOCK=1024, num_warps=4, num_stages=1, enable_fp_fusion=False),
    knobs={"BLOCK": (256, 512, 1024, 2048, 4096), "num_warps": (1, 2, 4, 8)},
    grid=lambda p, c: (p.T,),
)
@triton.jit(do_not_specialize=["T"])
def naive_row_sum_kernel(x, out, T, H, x_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, H, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        lanes += tl.load(x + row * x_stride + columns, mask=columns < H, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(lanes, axis=0))
