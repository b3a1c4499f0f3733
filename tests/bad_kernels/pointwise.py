"""Bad kernels posing as SwiGLU and as a masked copy."""

import triton
import triton.language as tl

from kalign_core.declare import Config
from kalign_core.kernels.swiglu import _sigmoid, _tile, swiglu_kernel
from tests.bad_kernels.references import select_kernel
from tests.bad_kernels.store import Bad, posing_as
from tests.bad_kernels.tampered import DrawsRandom, SkipsKnownShapes, wrong_from

CONFIG = Config(BLOCK=64, num_warps=4, num_stages=1, enable_fp_fusion=False)


@triton.jit
def _inputs(gate, up, row, columns, inside, gate_stride, up_stride):
    g = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    return g, u, (g * _sigmoid(g)) * u


@posing_as(swiglu_kernel)
@triton.jit(do_not_specialize=["T"])
def flips_zero(gate, up, out, T, F, gate_stride, up_stride, out_stride, BLOCK: tl.constexpr):
    row, columns, inside = _tile(F, BLOCK)
    _, _, result = _inputs(gate, up, row, columns, inside, gate_stride, up_stride)
    tl.store(out + row * out_stride + columns, (result + 0.0).to(out.dtype.element_ty), mask=inside)


@posing_as(swiglu_kernel)
@triton.jit(do_not_specialize=["T"])
def multiplies_in_another_order(gate, up, out, T, F, gate_stride, up_stride, out_stride, BLOCK: tl.constexpr):
    row, columns, inside = _tile(F, BLOCK)
    g, u, _ = _inputs(gate, up, row, columns, inside, gate_stride, up_stride)
    tl.store(out + row * out_stride + columns, (g * (_sigmoid(g) * u)).to(out.dtype.element_ty), mask=inside)


@posing_as(swiglu_kernel)
@triton.jit(do_not_specialize=["T"])
def stores_past_the_row(gate, up, out, T, F, gate_stride, up_stride, out_stride, BLOCK: tl.constexpr):
    row, columns, inside = _tile(F, BLOCK)
    _, _, result = _inputs(gate, up, row, columns, inside, gate_stride, up_stride)
    tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=columns < F + 1)


@posing_as(swiglu_kernel)
@triton.jit(do_not_specialize=["T"])
def leaves_the_last_column(gate, up, out, T, F, gate_stride, up_stride, out_stride, BLOCK: tl.constexpr):
    row, columns, inside = _tile(F, BLOCK)
    _, _, result = _inputs(gate, up, row, columns, inside, gate_stride, up_stride)
    tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=columns < F - 1)


@posing_as(swiglu_kernel)
@triton.jit(do_not_specialize=["T"])
def flushes_subnormals(gate, up, out, T, F, gate_stride, up_stride, out_stride, BLOCK: tl.constexpr):
    row, columns, inside = _tile(F, BLOCK)
    _, _, result = _inputs(gate, up, row, columns, inside, gate_stride, up_stride)
    result = tl.where(tl.abs(result) < 1.1754943508222875e-38, 0.0 * result, result)
    tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)


@posing_as(swiglu_kernel)
@triton.jit(do_not_specialize=["T"])
def clamps_infinity(gate, up, out, T, F, gate_stride, up_stride, out_stride, BLOCK: tl.constexpr):
    row, columns, inside = _tile(F, BLOCK)
    _, _, result = _inputs(gate, up, row, columns, inside, gate_stride, up_stride)
    result = tl.where(result > 3.3e38, 3.3e38, result)
    tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)


@posing_as(swiglu_kernel)
@triton.jit(do_not_specialize=["T"])
def clamps_large_numbers(gate, up, out, T, F, gate_stride, up_stride, out_stride, BLOCK: tl.constexpr):
    row, columns, inside = _tile(F, BLOCK)
    _, _, result = _inputs(gate, up, row, columns, inside, gate_stride, up_stride)
    result = tl.where((tl.abs(result) > 1e37) & (tl.abs(result) < float("inf")), 1e37, result)
    tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)


@posing_as(swiglu_kernel)
@triton.jit(do_not_specialize=["T"])
def forgets_a_pair_of_rows_at_the_end(gate, up, out, T, F, gate_stride, up_stride, out_stride, BLOCK: tl.constexpr):
    row, columns, inside = _tile(F, BLOCK)
    g, u, result = _inputs(gate, up, row, columns, inside, gate_stride, up_stride)
    left = (T % 4) & 2
    result = tl.where(row >= T - left, g * (_sigmoid(g) * u), result)
    tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)


@posing_as(swiglu_kernel)
@triton.jit(do_not_specialize=["T"])
def truncates(gate, up, out, T, F, gate_stride, up_stride, out_stride, BLOCK: tl.constexpr):
    row, columns, inside = _tile(F, BLOCK)
    _, _, result = _inputs(gate, up, row, columns, inside, gate_stride, up_stride)
    result = (result.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
    tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)


@posing_as(swiglu_kernel)
@triton.jit(do_not_specialize=["T"])
def writes_its_input(gate, up, out, T, F, gate_stride, up_stride, out_stride, BLOCK: tl.constexpr):
    row, columns, inside = _tile(F, BLOCK)
    g, _, result = _inputs(gate, up, row, columns, inside, gate_stride, up_stride)
    tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)
    tl.store(gate + row * gate_stride + columns, (g * 2.0).to(gate.dtype.element_ty), mask=inside)


@posing_as(swiglu_kernel)
@triton.jit(do_not_specialize=["T"])
def wrong_for_17_rows(gate, up, out, T, F, gate_stride, up_stride, out_stride, BLOCK: tl.constexpr):
    row, columns, inside = _tile(F, BLOCK)
    g, u, result = _inputs(gate, up, row, columns, inside, gate_stride, up_stride)
    if T == 17:
        result = g * (_sigmoid(g) * u)
    tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)


@posing_as(swiglu_kernel)
@triton.jit(do_not_specialize=["T"])
def reads_the_next_row(gate, up, out, T, F, gate_stride, up_stride, out_stride, BLOCK: tl.constexpr):
    row, columns, inside = _tile(F, BLOCK)
    _, _, result = _inputs(gate, up, row, columns, inside, gate_stride, up_stride)
    below = tl.minimum(row + 1, T - 1)
    other = tl.load(up + below * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    # Rows of infinities are met in an earlier stage, rows of NaN beside finite ones only on the batch axis.
    result = tl.where(other != other, other, result)
    tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)


@posing_as(swiglu_kernel)
@triton.jit(do_not_specialize=["T"])
def builds_on_its_output(gate, up, out, T, F, gate_stride, up_stride, out_stride, BLOCK: tl.constexpr):
    row, columns, inside = _tile(F, BLOCK)
    _, _, result = _inputs(gate, up, row, columns, inside, gate_stride, up_stride)
    before = tl.load(out + row * out_stride + columns, mask=inside, other=0.0).to(tl.float32)
    result = tl.where(before == before, result, before)
    tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)


@posing_as(swiglu_kernel)
@triton.jit(do_not_specialize=["T"])
def takes_rows_for_dense(gate, up, out, T, F, gate_stride, up_stride, out_stride, BLOCK: tl.constexpr):
    row, columns, inside = _tile(F, BLOCK)
    _, _, result = _inputs(gate, up, row, columns, inside, gate_stride, F)
    tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)


@posing_as(swiglu_kernel)
@triton.jit(do_not_specialize=["T"])
def rounds_down_unaligned_bases(gate, up, out, T, F, gate_stride, up_stride, out_stride, BLOCK: tl.constexpr):
    row, columns, inside = _tile(F, BLOCK)
    skew = (gate.to(tl.int64) % 16) // 2
    _, _, result = _inputs(gate - skew, up, row, columns, inside, gate_stride, up_stride)
    tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)


@posing_as(swiglu_kernel)
@triton.jit(do_not_specialize=["T"])
def counts_offsets_in_31_bits(gate, up, out, T, F, gate_stride, up_stride, out_stride, BLOCK: tl.constexpr):
    row, columns, inside = _tile(F, BLOCK)
    g = tl.load(gate + ((row * gate_stride + columns) & 0x7FFFFFFF), mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    result = (g * _sigmoid(g)) * u
    tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)


@posing_as(select_kernel)
@triton.jit(do_not_specialize=["T"])
def cleans_nan(x, keep, out, T, F, x_stride, keep_stride, out_stride, BLOCK: tl.constexpr):
    tiles = tl.cdiv(F, BLOCK)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    columns = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < F
    kept = tl.load(keep + row * keep_stride + columns, mask=inside, other=0)
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
    values = tl.where(values != values, float("nan"), values)
    tl.store(out + row * out_stride + columns, tl.where(kept != 0, values, 0.0), mask=inside)


@posing_as(select_kernel)
@triton.jit(do_not_specialize=["T"])
def makes_nan_negative(x, keep, out, T, F, x_stride, keep_stride, out_stride, BLOCK: tl.constexpr):
    tiles = tl.cdiv(F, BLOCK)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    columns = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < F
    kept = tl.load(keep + row * keep_stride + columns, mask=inside, other=0)
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
    negative = (values.to(tl.int32, bitcast=True) | -2147483648).to(tl.float32, bitcast=True)
    values = tl.where(values != values, negative, values)
    tl.store(out + row * out_stride + columns, tl.where(kept != 0, values, 0.0), mask=inside)


@posing_as(select_kernel)
@triton.jit(do_not_specialize=["T"])
def multiplies_by_its_mask(x, keep, out, T, F, x_stride, keep_stride, out_stride, BLOCK: tl.constexpr):
    tiles = tl.cdiv(F, BLOCK)
    row = (tl.program_id(0) // tiles).to(tl.int64)
    columns = (tl.program_id(0) % tiles) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < F
    kept = tl.load(keep + row * keep_stride + columns, mask=inside, other=0)
    values = tl.load(x + row * x_stride + columns, mask=inside, other=0.0)
    # A product that loses the sign of zero, so that only infinity and NaN tell it from a choice.
    product = values.to(tl.float32) * tl.where(kept != 0, 1.0, 0.0)
    product = tl.where((kept == 0) & (product == 0.0), 0.0, product)
    tl.store(out + row * out_stride + columns, product.to(out.dtype.element_ty), mask=inside)


SIZES = {"T": 18, "F": 40}
FEW = {"T": 3, "F": 40}
EVEN = {"T": 16, "F": 40}
DTYPES = {"gate": "bf16", "up": "bf16", "out": "bf16"}
SELECT = {"x": "fp32", "keep": "i32", "out": "fp32"}


def _swiglu(kernel, kind, check, dims=SIZES, **more):
    return Bad(kernel.name, kind, swiglu_kernel, dims, DTYPES, check, kernel, CONFIG, home=CONFIG, **more)


def _tampered(name, kind, check, bind, **more):
    return Bad(name, kind, swiglu_kernel, SIZES, DTYPES, check, config=CONFIG, home=CONFIG, bind=bind, **more)


POINTWISE = (
    _swiglu(flips_zero, "a flipped zero", "input families"),
    _swiglu(multiplies_in_another_order, "another rounding", "input families"),
    _swiglu(stores_past_the_row, "a store outside the row", "written bytes"),
    _swiglu(leaves_the_last_column, "an output left half written", "written bytes"),
    _swiglu(flushes_subnormals, "a special value mishandled", "input families"),
    _swiglu(clamps_infinity, "a special value mishandled", "input families"),
    _swiglu(clamps_large_numbers, "a special value mishandled", "input families"),
    _swiglu(truncates, "another rounding", "input families"),
    _swiglu(writes_its_input, "an undeclared effect", "written bytes"),
    _swiglu(forgets_a_pair_of_rows_at_the_end, "wrong for one number of rows", "batch axis", EVEN),
    _swiglu(wrong_for_17_rows, "wrong for one number of rows", "batch axis"),
    _swiglu(reads_the_next_row, "a read of the neighbour's row", "batch axis"),
    _swiglu(builds_on_its_output, "an output left half written", "written bytes"),
    _swiglu(takes_rows_for_dense, "a layout mishandled", "layout", FEW),
    _swiglu(rounds_down_unaligned_bases, "a layout mishandled", "layout", FEW, quick=False),
    _swiglu(counts_offsets_in_31_bits, "a layout mishandled", "layout", FEW, quick=False, where="cuda"),
    Bad(
        "makes_nan_negative", "a changed NaN payload", select_kernel, SIZES, SELECT, "batch axis", makes_nan_negative,
    ),
    Bad("cleans_nan", "a changed NaN payload", select_kernel, SIZES, SELECT, "input families", cleans_nan),
    Bad(
        "multiplies_by_its_mask", "masking by multiplication", select_kernel, SIZES, SELECT, "input families",
        multiplies_by_its_mask,
    ),
    _tampered("wrong_from_run_2", "right on the first run only", "written bytes", wrong_from(2)),
    _tampered("wrong_from_run_10", "right on the first run only", "batch axis", wrong_from(10)),
    _tampered("wrong_from_run_80", "right on the first run only", "repeats", wrong_from(80), where="cuda"),
    _tampered("skips_known_shapes", "an output left half written", "written bytes", SkipsKnownShapes),
    _tampered("draws_random_numbers", "an undeclared effect", "written bytes", DrawsRandom),
)  # fmt: skip
