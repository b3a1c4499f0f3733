"""Rotary position embedding: every pair of a head's elements turned by its token's angle.

Contract ``rope/1``, per pair, in float32, no fused multiply-add; ``sign`` is +1 forward and -1 backward, which turns
back: ``s' = sign * s``; ``first = round((a * c) - (b * s'))``; ``second = round((b * c) + (a * s'))``; one rounding to
the output's dtype, to nearest even. A pair is element ``i`` with ``i + D/2``, or ``2 i`` with ``2 i + 1`` where pairs
are interleaved; that choice moves elements and changes no arithmetic.
"""

import triton
import triton.language as tl

from kalign_core.declare import Config, cdiv, data, kernel, next_power_of_2, powers_of_two, written
from kalign_core.kernels.overlap import after_predecessor

# A program holds PAIRS pairs of GROUP heads, of as many tokens as it takes; more where one token's are more already.
KNOBS = {"PAIRS": (1024, 2048, 4096), "GROUP": (8, 16, 32, 64), "num_warps": (4, 8)}


def half_of(p):
    return next_power_of_2(p.D // 2)


def rows_of(p, c):
    """Tokens of one program."""
    return max(1, c.PAIRS // (half_of(p) * c.GROUP))


def whole_tokens(p):
    """Reference: about 2,048 pairs, 16 a thread, of as many heads of a token as there are."""
    group = max(1, min(64, next_power_of_2(p.HEADS), 2048 // half_of(p)))
    return Config(PAIRS=2048, GROUP=group, num_warps=4, num_stages=1, enable_fp_fusion=False)


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
        "HALF": half_of,
        "INTERLEAVED": lambda p: bool(p.value("interleaved")),
    },
    grid=lambda p, c: (cdiv(p.T, rows_of(p, c)) * cdiv(p.HEADS, c.GROUP),),
)
@triton.jit(do_not_specialize=["T"])
def rope_kernel(
    x, cos, sin, out, T, HEADS, D, x_stride, x_head_stride, cos_stride, sin_stride, out_stride, out_head_stride,
    sign, interleaved,
    PAIRS: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    ROWS: tl.constexpr = PAIRS // (HALF * GROUP) if PAIRS > HALF * GROUP else 1
    groups = tl.cdiv(HEADS, GROUP)
    rows = (tl.program_id(0) // groups).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    heads = (tl.program_id(0) % groups) * GROUP + tl.arange(0, GROUP)
    pairs = tl.arange(0, HALF)
    angles = (rows < T)[:, None] & (pairs < D // 2)[None, :]
    after_predecessor(OVERLAP)
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
