"""SwiGLU: ``out = silu(gate) * up``, forward and backward, one tile of one row per program.

Contract ``swiglu/1``, per element, in float32, no fused multiply-add:
``e = exp(-g)``; ``s = div_rn(1, 1 + e)``; ``out = round((g * s) * u)``; one rounding to the output's dtype, to nearest
even.
Backward: ``d_up = round(d * (g * s))``; ``d_gate = round((d * u) * (s * (1 + g * (1 - s))))``.
"""

import triton
import triton.language as tl

from kalign_core.declare import Config, cdiv, data, kernel, powers_of_two, written
from kalign_core.kernels.overlap import after_predecessor

KNOBS = {"BLOCK": (256, 512, 1024, 2048, 4096, 8192), "num_warps": (1, 2, 4, 8, 16)}
# 16 elements a thread, two 16-byte loads of each input in flight; going back, with three inputs, 8 of them.
REFERENCE = Config(BLOCK=4096, num_warps=8, num_stages=1, enable_fp_fusion=False)
BACKWARD_REFERENCE = REFERENCE.replace(BLOCK=2048)


def tiles_of_rows(p, c):
    """One program per tile of a row, rows outermost; a single axis, since the others stop at 65,535 programs."""
    return (p.T * cdiv(p.F, c.BLOCK),)


@triton.jit
def _sigmoid(gate):
    return tl.div_rn(1.0, 1.0 + tl.exp(-gate))


@triton.jit
def _tile(F, BLOCK: tl.constexpr):
    """Row, columns and column mask of this program's tile."""
    tiles = tl.cdiv(F, BLOCK)
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64)
    columns = (program % tiles) * BLOCK + tl.arange(0, BLOCK)
    return row, columns, columns < F


@kernel(
    name="swiglu",
    family="pointwise",
    contract="swiglu/1",
    dims=("T", "F"),
    bucket={"T": powers_of_two},
    rows="T",
    args={
        "gate": data("T", "F", strides=("gate_stride", 1)),
        "up": data("T", "F", strides=("up_stride", 1)),
        "out": written("T", "F", strides=("out_stride", 1), observe="fp32"),
    },
    reference=REFERENCE,
    knobs=KNOBS,
    grid=tiles_of_rows,
)
@triton.jit(do_not_specialize=["T"])
def swiglu_kernel(
    gate, up, out, T, F, gate_stride, up_stride, out_stride,
    BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    row, columns, inside = _tile(F, BLOCK)
    after_predecessor(OVERLAP)
    g = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    result = (g * _sigmoid(g)) * u
    tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=inside)


@kernel(
    name="swiglu_backward",
    family="pointwise",
    contract="swiglu/1",
    dims=("T", "F"),
    bucket={"T": powers_of_two},
    rows="T",
    args={
        "gate": data("T", "F", strides=("gate_stride", 1)),
        "up": data("T", "F", strides=("up_stride", 1)),
        "d_out": data("T", "F", strides=("d_out_stride", 1)),
        "d_gate": written("T", "F", strides=("d_gate_stride", 1), observe="fp32"),
        "d_up": written("T", "F", strides=("d_up_stride", 1), observe="fp32"),
    },
    reference=BACKWARD_REFERENCE,
    knobs=KNOBS,
    grid=tiles_of_rows,
)
@triton.jit(do_not_specialize=["T"])
def swiglu_backward_kernel(
    gate, up, d_out, d_gate, d_up, T, F, gate_stride, up_stride, d_out_stride, d_gate_stride, d_up_stride,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, columns, inside = _tile(F, BLOCK)
    g = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(d_out + row * d_out_stride + columns, mask=inside, other=0.0).to(tl.float32)
    s = _sigmoid(g)
    gradient_up = d * (g * s)
    gradient_gate = (d * u) * (s * (1.0 + g * (1.0 - s)))
    tl.store(d_up + row * d_up_stride + columns, gradient_up.to(d_up.dtype.element_ty), mask=inside)
    tl.store(d_gate + row * d_gate_stride + columns, gradient_gate.to(d_gate.dtype.element_ty), mask=inside)
