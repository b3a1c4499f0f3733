"""The kernels that a platform is tried with: one whose bytes and duration are known, and one that cannot be compiled.

Integers only, so that the right bytes are the same on every device. How long ``stir`` takes is an argument, not a
constant: a compiler cannot shorten what it does not know. Import this after a platform was chosen, because importing it
imports triton.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from kalign_core.declare import Config, cdiv, data, kernel, next_power_of_2, powers_of_two, written

_REFERENCE = Config(ROWS=1, num_warps=1, num_stages=1, enable_fp_fusion=False)
_DECLARED: dict[str, Any] = {
    "family": "pointwise",
    "dims": ("T", "H"),
    "bucket": {"T": powers_of_two},
    "rows": "T",
    "args": {
        "x": data("T", "H", strides=("x_stride", 1)),
        "out": written("T", "H", strides=("out_stride", 1)),
    },
    "reference": _REFERENCE,
    "knobs": {"ROWS": (1, 2)},
    "derived": {"BLOCK": lambda p: next_power_of_2(p.H)},
    "grid": lambda p, c: (cdiv(p.T, c.ROWS),),
}


@kernel(name="conformance_stir", contract="conformance_stir/1", **_DECLARED)
@triton.jit(do_not_specialize=["T"])
def stir_kernel(x, out, T, H, x_stride, out_stride, steps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """``out = f(f(...f(x)))``, ``steps`` times ``f(v) = (5 v + 3) mod 2**16``; x, out: ``(T H)`` int32."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (rows < T)[:, None] & (columns < H)[None, :]
    values = tl.load(x + rows[:, None] * x_stride + columns[None, :], mask=inside, other=0)
    for _ in range(steps):
        values = (values * 5 + 3) & 65535
    tl.store(out + rows[:, None] * out_stride + columns[None, :], values, mask=inside)


@kernel(name="conformance_broken", contract="conformance_broken/1", **_DECLARED)
@triton.jit(do_not_specialize=["T"])
def broken_kernel(x, out, T, H, x_stride, out_stride, steps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Names a function that does not exist."""
    tl.store(out, no_such_function(x))  # type: ignore[name-defined]  # noqa: F821  # this is the point


def stirred(x: Any, steps: int) -> Any:
    """What ``stir_kernel`` has to give for ``x``, computed by torch on the host."""
    values = x.cpu()
    for _ in range(steps):
        values = (values * 5 + 3) & 65535
    return values


def arguments(x: Any, out: Any, steps: int) -> tuple[Any, ...]:
    """Run-time arguments of either kernel for ``x`` and ``out``: ``(T H)`` int32."""
    return (x, out, *x.shape, x.stride(0), out.stride(0), steps)
