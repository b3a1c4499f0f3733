"""Matrix product with one accumulator chain over K: ``c = round(a @ b + bias)``.

Contract ``matmul/1``: a float32 accumulator per element, starting at +0, takes K in ascending order through
``acc = dot(a, b, acc)``; the order inside one matrix instruction is the hardware's. The bias is added in float32, then
one rounding to the output's dtype. No part of it depends on M, and neither does any choice of tile.
"""

import triton
import triton.language as tl

from kalign_core.declare import Config, cdiv, data, kernel, powers_of_two, written

KNOBS = {
    "BM": (16, 32, 64, 128, 256),
    "BN": (16, 32, 64, 128, 256),
    "BK": (16, 32, 64, 128, 256),
    "GROUP_M": (1, 4, 8, 16),
    "num_warps": (1, 2, 4, 8),
    "num_stages": (2, 3, 4, 5),
}


@kernel(
    name="matmul",
    family="matmul",
    contract="matmul/1",
    dims=("M", "N", "K"),
    bucket={"M": powers_of_two},
    rows="M",
    args={
        "a": data("M", "K", strides=("a_stride_m", "a_stride_k")),
        "b": data("K", "N", strides=("b_stride_k", "b_stride_n")),
        "bias": data("N"),
        "c": written("M", "N", strides=("c_stride_m", "c_stride_n"), observe="fp32"),
    },
    # 64 KiB of shared memory and 16 warps are what the smallest supported device has.
    reference=Config(BM=128, BN=128, BK=32, GROUP_M=8, num_warps=4, num_stages=4, enable_fp_fusion=False),
    knobs=KNOBS,
    derived={"WIDE": lambda p: p.index_bits == 64},
    grid=lambda p, c: (cdiv(p.M, c.BM) * cdiv(p.N, c.BN),),
)
@triton.jit(do_not_specialize=["M"])
def matmul_kernel(
    a, b, bias, c, M, N, K, a_stride_m, a_stride_k, b_stride_k, b_stride_n, c_stride_m, c_stride_n,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tiles_m = tl.cdiv(M, BM)
    tiles_n = tl.cdiv(N, BN)
    group = program // (GROUP_M * tiles_n)
    first = group * GROUP_M
    height = min(tiles_m - first, GROUP_M)
    tile_m = first + (program % (GROUP_M * tiles_n)) % height
    tile_n = (program % (GROUP_M * tiles_n)) // height

    rows = tile_m * BM + tl.arange(0, BM)
    columns = tile_n * BN + tl.arange(0, BN)
    steps = tl.arange(0, BK)
    if WIDE:
        rows, columns, steps = rows.to(tl.int64), columns.to(tl.int64), steps.to(tl.int64)
    # Rows past the edge wrap round instead of being masked: they are never stored, and unmasked loads are faster.
    a_rows = rows % M
    b_columns = columns % N
    a_tile = a + a_rows[:, None] * a_stride_m + steps[None, :] * a_stride_k
    b_tile = b + steps[:, None] * b_stride_k + b_columns[None, :] * b_stride_n
    total = tl.zeros((BM, BN), tl.float32)
    # Whole steps need no mask; the rest of K, if there is one, is a step of its own at the end of the same chain.
    whole = K // BK
    for _ in range(whole):
        total = tl.dot(tl.load(a_tile), tl.load(b_tile), total)
        a_tile += BK * a_stride_k
        b_tile += BK * b_stride_k
    left = K - whole * BK
    if left > 0:
        a_values = tl.load(a_tile, mask=steps[None, :] < left, other=0.0)
        b_values = tl.load(b_tile, mask=steps[:, None] < left, other=0.0)
        total = tl.dot(a_values, b_values, total)
    if bias is not None:
        total += tl.load(bias + b_columns).to(tl.float32)[None, :]
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    c_tile = c + rows[:, None] * c_stride_m + columns[None, :] * c_stride_n
    tl.store(c_tile, total.to(c.dtype.element_ty), mask=inside)
