"""Bad kernels posing as an online log-sum-exp."""

import triton
import triton.language as tl

from kalign_core.declare import Config
from kalign_core.kernels.pairs import pair_sum
from tests.bad_kernels.references import log_sum_exp_kernel
from tests.bad_kernels.store import Bad, posing_as


@triton.jit
def _tile(x, row, first, V, x_stride, TILE: tl.constexpr):
    columns = first + tl.arange(0, TILE)
    place = x + row[:, None] * x_stride + columns[None, :]
    return tl.load(place, mask=(columns < V)[None, :], other=float("-inf")).to(tl.float32)


@triton.jit
def _step(best, total, values, LOG2: tl.constexpr):
    above = tl.maximum(best, tl.max(values, axis=1))
    return above, total * tl.exp(best - above) + pair_sum(tl.exp(values - above[:, None]), 1, LOG2)


@posing_as(log_sum_exp_kernel)
@triton.jit(do_not_specialize=["T"])
def takes_the_maximum_first(x, out, largest, T, V, x_stride, TILE: tl.constexpr, LOG2: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    best = tl.full((1,), float("-inf"), tl.float32)
    for first in range(0, V, TILE):
        best = tl.maximum(best, tl.max(_tile(x, row, first, V, x_stride, TILE), axis=1))
    total = tl.zeros((1,), tl.float32)
    for first in range(0, V, TILE):
        total += pair_sum(tl.exp(_tile(x, row, first, V, x_stride, TILE) - best[:, None]), 1, LOG2)
    tl.store(out + row, best + tl.log(total))
    tl.store(largest + row, best)


@posing_as(log_sum_exp_kernel)
@triton.jit(do_not_specialize=["T"])
def starts_from_a_finite_maximum(x, out, largest, T, V, x_stride, TILE: tl.constexpr, LOG2: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    best = tl.full((1,), -3.0e38, tl.float32)
    total = tl.zeros((1,), tl.float32)
    for first in range(0, V, TILE):
        best, total = _step(best, total, _tile(x, row, first, V, x_stride, TILE), LOG2)
    tl.store(out + row, best + tl.log(total))
    tl.store(largest + row, best)


@posing_as(log_sum_exp_kernel)
@triton.jit(do_not_specialize=["T"])
def goes_backwards(x, out, largest, T, V, x_stride, TILE: tl.constexpr, LOG2: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    best = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    last = (tl.cdiv(V, TILE) - 1) * TILE
    for back in range(0, V, TILE):
        best, total = _step(best, total, _tile(x, row, last - back, V, x_stride, TILE), LOG2)
    tl.store(out + row, best + tl.log(total))
    tl.store(largest + row, best)


@posing_as(log_sum_exp_kernel)
@triton.jit(do_not_specialize=["T"])
def merges_two_halves(x, out, largest, T, V, x_stride, TILE: tl.constexpr, LOG2: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    best = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    half = (tl.cdiv(V, TILE) // 2) * TILE
    for first in range(0, half, TILE):
        best, total = _step(best, total, _tile(x, row, first, V, x_stride, TILE), LOG2)
    other = tl.full((1,), float("-inf"), tl.float32)
    second = tl.zeros((1,), tl.float32)
    for first in range(half, V, TILE):
        other, second = _step(other, second, _tile(x, row, first, V, x_stride, TILE), LOG2)
    above = tl.maximum(best, other)
    total = total * tl.exp(best - above) + second * tl.exp(other - above)
    tl.store(out + row, above + tl.log(total))
    tl.store(largest + row, above)


@posing_as(log_sum_exp_kernel)
@triton.jit(do_not_specialize=["T"])
def uses_powers_of_two(x, out, largest, T, V, x_stride, TILE: tl.constexpr, LOG2: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) + tl.arange(0, 1)
    best = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    for first in range(0, V, TILE):
        values = _tile(x, row, first, V, x_stride, TILE) * 1.4426950408889634
        above = tl.maximum(best, tl.max(values, axis=1))
        total = total * tl.exp2(best - above) + pair_sum(tl.exp2(values - above[:, None]), 1, LOG2)
        best = above
    tl.store(out + row, (best + tl.log2(total)) * 0.6931471805599453)
    tl.store(largest + row, best * 0.6931471805599453)


SIZES = {"T": 6, "V": 100}
DTYPES = {"x": "bf16", "out": "fp32", "largest": "fp32"}
OTHER_TILE = Config(TILE=16, LOG2=4, num_warps=4, num_stages=1, enable_fp_fusion=False)


def _softmax(kernel, kind, check, **more):
    return Bad(kernel.name, kind, log_sum_exp_kernel, SIZES, DTYPES, check, kernel, **more)


SOFTMAX = (
    Bad(
        "halves_its_tile", "another tile in an online softmax", log_sum_exp_kernel, SIZES, DTYPES, "order probes",
        log_sum_exp_kernel, OTHER_TILE,
    ),
    _softmax(takes_the_maximum_first, "another order of a sum", "order probes"),
    _softmax(starts_from_a_finite_maximum, "a special value mishandled", "input families"),
    Bad(
        "starts_one_row_from_a_finite_maximum", "a special value mishandled", log_sum_exp_kernel, {"T": 1, "V": 100},
        DTYPES, "input families", starts_from_a_finite_maximum,
    ),
    _softmax(goes_backwards, "another order of a sum", "order probes"),
    _softmax(merges_two_halves, "another order of a sum", "order probes"),
    _softmax(uses_powers_of_two, "another rounding", "input families"),
)  # fmt: skip
