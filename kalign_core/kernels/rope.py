"""Rotary position embedding: every pair of a head's elements turned by its token's angle.

Contract ``rope/1``, per pair, in float32, no fused multiply-add; ``sign`` is +1 forward and -1 backward, which turns
back: ``s' = sign * s``; ``first = round((a * c) - (b * s'))``; ``second = round((b * c) + (a * s'))``; one rounding to
the output's dtype, to nearest even. A pair is element ``i`` with ``i + D/2``, or ``2 i`` with ``2 i + 1`` where pairs
are interleaved; that choice moves elements and changes no arithmetic.
"""

import triton
import triton.language as tl

from kalign_core.declare import Config, cdiv, data, kernel, next_power_of_2, powers_of_two, written

KNOBS = {"ROWS": (1, 2, 4, 8), "GROUP": (4, 8, 16, 32, 64), "num_warps": (2, 4, 8)}
# Pairs a program holds under the reference: 16 a thread of 4 warps.
PAIRS = 2048


def whole_tokens(p):
    """Reference: about 2,048 pairs, of as many heads of a token as there are and of up to 8 tokens."""
    half = next_power_of_2(p.D // 2)
    group = max(4, min(64, next_power_of_2(p.HEADS), PAIRS // half))
    rows = max(1, min(8, PAIRS // (half * group)))
    warps = max(1, min(8, rows * group * half // 512))
    return Config(ROWS=rows, GROUP=group, num_warps=warps, num_stages=1, enable_fp_fusion=False)


@triton.jit
def _turn(a, b, c, s):
    return a * c - b * s, b * c + a * s


@kernel(
    name="rope",
    family="rope",
    contract="rope/1",
    dims=("T", "HEADS", "D"),
    bucket={"T": powers_of_two},
    rows="T",
    args={
        "x": data("T", "HEADS", "D", strides=("x_stride", "x_head_stride", 1)),
        "cos": data("T", "D/2", strides=("cos_stride", 1)),
        "sin": data("T", "D/2", strides=("sin_stride", 1)),
        "out": written("T", "HEADS", "D", strides=("out_stride", "out_head_stride", 1), observe="fp32"),
    },
    reference=whole_tokens,
    knobs=KNOBS,
    derived={
        "HALF": lambda p: next_power_of_2(p.D // 2),
        "INTERLEAVED": lambda p: bool(p.value("interleaved")),
    },
    grid=lambda p, c: (cdiv(p.T, c.ROWS) * cdiv(p.HEADS, c.GROUP),),
)
@triton.jit(do_not_specialize=["T"])
def rope_kernel(
    x, cos, sin, out, T, HEADS, D, x_stride, x_head_stride, cos_stride, sin_stride, out_stride, out_head_stride,
    sign, interleaved,
    ROWS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    groups = tl.cdiv(HEADS, GROUP)
    rows = (tl.program_id(0) // groups).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    heads = (tl.program_id(0) % groups) * GROUP + tl.arange(0, GROUP)
    pairs = tl.arange(0, HALF)
    angles = (rows < T)[:, None] & (pairs < D // 2)[None, :]
    c = tl.load(cos + rows[:, None] * cos_stride + pairs[None, :], mask=angles, other=0.0).to(tl.float32)
    s = tl.load(sin + rows[:, None] * sin_stride + pairs[None, :], mask=angles, other=0.0).to(tl.float32) * sign
    c, s = c[:, None, :], s[:, None, :]
    there = (rows < T)[:, None, None] & (heads < HEADS)[None, :, None]
    x_heads = x + rows[:, None, None] * x_stride + heads.to(tl.int64)[None, :, None] * x_head_stride
    out_heads = out + rows[:, None, None] * out_stride + heads.to(tl.int64)[None, :, None] * out_head_stride
    if INTERLEAVED:
        columns = tl.arange(0, 2 * HALF)
        inside = there & (columns < D)[None, None, :]
        values = tl.load(x_heads + columns[None, None, :], mask=inside, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(values, (ROWS, GROUP, HALF, 2)))
        first, second = _turn(a, b, c, s)
        both = tl.reshape(tl.join(first, second), (ROWS, GROUP, 2 * HALF))
        tl.store(out_heads + columns[None, None, :], both.to(out.dtype.element_ty), mask=inside)
    else:
        inside = there & (pairs < D // 2)[None, None, :]
        a = tl.load(x_heads + pairs[None, None, :], mask=inside, other=0.0).to(tl.float32)
        b = tl.load(x_heads + (pairs + D // 2)[None, None, :], mask=inside, other=0.0).to(tl.float32)
        first, second = _turn(a, b, c, s)
        tl.store(out_heads + pairs[None, None, :], first.to(out.dtype.element_ty), mask=inside)
        tl.store(out_heads + (pairs + D // 2)[None, None, :], second.to(out.dtype.element_ty), mask=inside)
