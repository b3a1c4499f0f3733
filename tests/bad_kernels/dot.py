"""Bad kernels posing as the matrix product."""

import triton
import triton.language as tl

from kalign_core.declare import Config
from kalign_core.kernels.matmul import matmul_kernel
from tests.bad_kernels.store import Bad, posing_as
from tests.bad_kernels.tampered import LibraryMatmul

CONFIG = Config(BM=32, BN=32, BK=16, GROUP_M=1, num_warps=4, num_stages=2, enable_fp_fusion=False)
HOME = Config(BM=16, BN=32, BK=32, GROUP_M=1, num_warps=4, num_stages=2, enable_fp_fusion=False)


@triton.jit
def _places(M, N, BM: tl.constexpr, BN: tl.constexpr):
    tiles_n = tl.cdiv(N, BN)
    rows = (tl.program_id(0) // tiles_n) * BM + tl.arange(0, BM)
    columns = (tl.program_id(0) % tiles_n) * BN + tl.arange(0, BN)
    return rows, columns


@triton.jit
def _blocks(a, b, rows, columns, k, M, N, K, a_stride_m, a_stride_k, b_stride_k, b_stride_n, BK: tl.constexpr):
    """The blocks of a and b at step ``k``, zero past the edges."""
    steps = k * BK + tl.arange(0, BK)
    a_place = a + rows[:, None] * a_stride_m + steps[None, :] * a_stride_k
    b_place = b + steps[:, None] * b_stride_k + columns[None, :] * b_stride_n
    left = tl.load(a_place, mask=(rows < M)[:, None] & (steps < K)[None, :], other=0.0)
    right = tl.load(b_place, mask=(steps < K)[:, None] & (columns < N)[None, :], other=0.0)
    return left, right


@triton.jit
def _store(c, total, rows, columns, M, N, c_stride_m, c_stride_n):
    place = c + rows[:, None] * c_stride_m + columns[None, :] * c_stride_n
    tl.store(place, total.to(c.dtype.element_ty), mask=(rows < M)[:, None] & (columns < N)[None, :])


@posing_as(matmul_kernel)
@triton.jit(do_not_specialize=["M"])
def splits_k_for_few_rows(
    a, b, bias, c, M, N, K, a_stride_m, a_stride_k, b_stride_k, b_stride_n, c_stride_m, c_stride_n,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    rows, columns = _places(M, N, BM, BN)
    total = tl.zeros((BM, BN), tl.float32)
    second = tl.zeros((BM, BN), tl.float32)
    blocks = tl.cdiv(K, BK)
    first = tl.where(M < 32, blocks // 2, blocks)
    for k in range(first):
        left, right = _blocks(a, b, rows, columns, k, M, N, K, a_stride_m, a_stride_k, b_stride_k, b_stride_n, BK)
        total = tl.dot(left, right, total)
    for k in range(first, blocks):
        left, right = _blocks(a, b, rows, columns, k, M, N, K, a_stride_m, a_stride_k, b_stride_k, b_stride_n, BK)
        second = tl.dot(left, right, second)
    total = tl.where(M < 32, total + second, total)
    _store(c, total, rows, columns, M, N, c_stride_m, c_stride_n)


@posing_as(matmul_kernel)
@triton.jit(do_not_specialize=["M"])
def descends_k(
    a, b, bias, c, M, N, K, a_stride_m, a_stride_k, b_stride_k, b_stride_n, c_stride_m, c_stride_n,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    rows, columns = _places(M, N, BM, BN)
    total = tl.zeros((BM, BN), tl.float32)
    last = tl.cdiv(K, BK) - 1
    for k in range(last + 1):
        left, right = _blocks(
            a, b, rows, columns, last - k, M, N, K, a_stride_m, a_stride_k, b_stride_k, b_stride_n, BK
        )
        total = tl.dot(left, right, total)
    _store(c, total, rows, columns, M, N, c_stride_m, c_stride_n)


@posing_as(matmul_kernel)
@triton.jit(do_not_specialize=["M"])
def rounds_between_blocks(
    a, b, bias, c, M, N, K, a_stride_m, a_stride_k, b_stride_k, b_stride_n, c_stride_m, c_stride_n,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    rows, columns = _places(M, N, BM, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(tl.cdiv(K, BK)):
        left, right = _blocks(a, b, rows, columns, k, M, N, K, a_stride_m, a_stride_k, b_stride_k, b_stride_n, BK)
        total = tl.dot(left, right, total).to(tl.bfloat16).to(tl.float32)
    _store(c, total, rows, columns, M, N, c_stride_m, c_stride_n)


@posing_as(matmul_kernel)
@triton.jit(do_not_specialize=["M"])
def adds_whole_blocks(
    a, b, bias, c, M, N, K, a_stride_m, a_stride_k, b_stride_k, b_stride_n, c_stride_m, c_stride_n,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    rows, columns = _places(M, N, BM, BN)
    total = tl.zeros((BM, BN), tl.float32)
    one = tl.where(M > 0, 1.0, 0.0)  # keeps the compiler from folding the sum into the instruction
    for k in range(tl.cdiv(K, BK)):
        left, right = _blocks(a, b, rows, columns, k, M, N, K, a_stride_m, a_stride_k, b_stride_k, b_stride_n, BK)
        total += tl.dot(left, right) * one
    _store(c, total, rows, columns, M, N, c_stride_m, c_stride_n)


@posing_as(matmul_kernel)
@triton.jit(do_not_specialize=["M"])
def starts_from_the_bias(
    a, b, bias, c, M, N, K, a_stride_m, a_stride_k, b_stride_k, b_stride_n, c_stride_m, c_stride_n,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    rows, columns = _places(M, N, BM, BN)
    start = tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)
    total = tl.zeros((BM, BN), tl.float32) + start[None, :]
    for k in range(tl.cdiv(K, BK)):
        left, right = _blocks(a, b, rows, columns, k, M, N, K, a_stride_m, a_stride_k, b_stride_k, b_stride_n, BK)
        total = tl.dot(left, right, total)
    _store(c, total, rows, columns, M, N, c_stride_m, c_stride_n)


@posing_as(matmul_kernel)
@triton.jit(do_not_specialize=["M"])
def masks_one_factor_only(
    a, b, bias, c, M, N, K, a_stride_m, a_stride_k, b_stride_k, b_stride_n, c_stride_m, c_stride_n,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    rows, columns = _places(M, N, BM, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(tl.cdiv(K, BK)):
        left, _ = _blocks(a, b, rows, columns, k, M, N, K, a_stride_m, a_stride_k, b_stride_k, b_stride_n, BK)
        steps = k * BK + tl.arange(0, BK)
        place = b + steps[:, None] * b_stride_k + columns[None, :] * b_stride_n
        total = tl.dot(left, tl.load(place, mask=(columns < N)[None, :], other=0.0), total)
    _store(c, total, rows, columns, M, N, c_stride_m, c_stride_n)


@posing_as(matmul_kernel)
@triton.jit(do_not_specialize=["M"])
def skips_rows_of_zeros(
    a, b, bias, c, M, N, K, a_stride_m, a_stride_k, b_stride_k, b_stride_n, c_stride_m, c_stride_n,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP_M: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    rows, columns = _places(M, N, BM, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(tl.cdiv(K, BK)):
        left, right = _blocks(a, b, rows, columns, k, M, N, K, a_stride_m, a_stride_k, b_stride_k, b_stride_n, BK)
        some = tl.max((left != 0.0).to(tl.int32), axis=1) > 0
        total = tl.where(some[:, None], tl.dot(left, right, total), total)
    _store(c, total, rows, columns, M, N, c_stride_m, c_stride_n)


SIZES = {"M": 40, "N": 24, "K": 56}
DTYPES = {"a": "bf16", "b": "bf16", "bias": "none", "c": "bf16"}


def _matmul(kernel, kind, check, dtypes=DTYPES, **more):
    return Bad(kernel.name, kind, matmul_kernel, SIZES, dtypes, check, kernel, CONFIG, home=HOME, **more)


DOT = (
    _matmul(splits_k_for_few_rows, "split of a sum chosen from the number of rows", "batch axis"),
    _matmul(descends_k, "another order of a sum", "order probes"),
    _matmul(rounds_between_blocks, "another rounding", "input families"),
    _matmul(adds_whole_blocks, "another order of a sum", "order probes"),
    _matmul(starts_from_the_bias, "another order of a sum", "order probes", {**DTYPES, "bias": "bf16"}),
    _matmul(masks_one_factor_only, "masking by multiplication", "input families"),
    _matmul(skips_rows_of_zeros, "a special value mishandled", "input families"),
    Bad(
        "calls_a_library", "a library's routine", matmul_kernel, SIZES, DTYPES, "batch axis", config=CONFIG, home=HOME,
        bind=LibraryMatmul,
    ),
)  # fmt: skip
