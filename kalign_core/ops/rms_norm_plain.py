"""``rms_norm`` without autograd: its plain paths, forward and backward, and the forms that recall them."""

from __future__ import annotations

import torch

from kalign_core.declare import cdiv
from kalign_core.errors import BadArgument
from kalign_core.kernels.rms_norm import (
    FOLD_ROWS,
    LONGEST_HELD,
    rms_norm_backward_kernel,
    rms_norm_dweight_fold_kernel,
    rms_norm_kernel,
    rms_norm_residual_kernel,
)
from kalign_core.kernels.rms_norm_long import (
    rms_norm_long_backward_kernel,
    rms_norm_long_dot_kernel,
    rms_norm_long_kernel,
    rms_norm_long_residual_kernel,
)
from kalign_core.ops.base import LARGEST, check_dtype, check_number, check_out, check_same, output_like, rows_of
from kalign_core.ops.noting import allocate, exact, launch
from kalign_core.ops.recall import Form
from kalign_core.problems import one_device

DTYPES = ("bf16", "fp16", "fp32")
MAX_ROW = 262144


def again(
    x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None, out: torch.Tensor | None
) -> tuple[torch.Tensor, ...] | None:
    """What ``forward`` or ``forward_with_residual`` gave, where the call is like the last ones; else None."""
    rest = (exact(eps),)
    if residual is None:
        return _FORWARD.again((x, weight), rest) if out is None else _FORWARD_INTO.again((x, weight, out), rest)
    return _RESIDUAL.again((x, residual, weight), rest) if out is None else None


def forward(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator without gradients: the result and ``rstd: (rows)`` in float32."""
    if out is None:
        return _FORWARD((x, weight), (exact(eps),), (x, weight, eps))
    return _FORWARD_INTO((x, weight, out), (exact(eps),), (x, weight, eps, out))


def forward_with_residual(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(y, h, rstd)`` without gradients: h: ``(... H)`` is ``x + residual`` rounded, rstd: ``(rows)`` float32."""
    return _RESIDUAL((x, residual, weight), (exact(eps),), (x, residual, weight, eps))


def backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    d_out: torch.Tensor,
    d_h: torch.Tensor | None = None,
    needs: tuple[bool, bool] = (True, True),
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of x and weight (those that ``needs`` asks for) for an upstream gradient ``d_out: (... H)``.

    ``d_h: (... H)`` is what reaches x (then a sum with a residual) by another way; it is added before rounding.
    """
    given = (x, weight, rstd, d_out) if d_h is None else (x, weight, rstd, d_out, d_h)
    if all(needs):
        return gradients(*given)
    return (gradient(*given), None) if needs[0] else (None, weight_gradient(*given[:4]) if needs[1] else None)


def gradients(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both of ``backward``'s gradients."""
    return _GRADIENTS(given, (len(given),), given)


def gradient(*given: torch.Tensor) -> torch.Tensor:
    """The gradient of x alone."""
    return _GRADIENT(given, (len(given),), given)


def weight_gradient(*given: torch.Tensor) -> torch.Tensor:
    """The gradient of weight alone; nothing that reaches h otherwise touches it."""
    return _WEIGHT_GRADIENT(given)


def _forward(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    _check(x, weight, eps)
    if out is not None:
        check_out("rms_norm", out, in_place=False, weight=weight)
        check_out("rms_norm", out, in_place=True, x=x)
    result = output_like("rms_norm", out, x.shape, x)
    rows, o = rows_of("rms_norm", "x", x), rows_of("rms_norm", "out", result)
    rstd = allocate((rows.shape[0],), torch.float32, x.device)
    if result.numel():
        chosen = rms_norm_kernel if rows.shape[1] <= LONGEST_HELD else rms_norm_long_kernel
        launch(chosen, rows, weight, o, rstd, *rows.shape, rows.stride(0), o.stride(0), float(eps))
    return result, rstd


def _forward_with_residual(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check(x, weight, eps)
    check_same("rms_norm", ("x", x), ("residual", residual))
    y, h = (allocate(x.shape, x.dtype, x.device) for _ in range(2))
    rows, r, o, s = (rows_of("rms_norm", "x", tensor) for tensor in (x, residual, y, h))
    rstd = allocate((rows.shape[0],), torch.float32, x.device)
    if y.numel():
        strides = (rows.stride(0), r.stride(0), o.stride(0), s.stride(0))
        chosen = rms_norm_residual_kernel if rows.shape[1] <= LONGEST_HELD else rms_norm_long_residual_kernel
        launch(chosen, rows, r, weight, o, s, rstd, *rows.shape, *strides, float(eps))
    return y, h, rstd


def _gradients(
    x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, d_out: torch.Tensor, d_h: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    d_x, partial = allocate(x.shape, x.dtype, x.device), _partial(x)
    _launch_backward(x, weight, rstd, d_out, d_h, d_x, partial)
    return d_x, _folded(partial, weight)


def _gradient(
    x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, d_out: torch.Tensor, d_h: torch.Tensor | None = None
) -> torch.Tensor:
    d_x = allocate(x.shape, x.dtype, x.device)
    _launch_backward(x, weight, rstd, d_out, d_h, d_x, None)
    return d_x


def _weight_gradient(x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, d_out: torch.Tensor) -> torch.Tensor:
    partial = _partial(x)
    _launch_backward(x, weight, rstd, d_out, None, None, partial)
    return _folded(partial, weight)


_FORWARD = Form("rms_norm", _forward)
_FORWARD_INTO = Form("rms_norm(out=)", _forward, outs=1, in_place=(0,))
_RESIDUAL = Form("rms_norm residual", _forward_with_residual)
_GRADIENTS = Form("rms_norm gradients", _gradients)
_GRADIENT = Form("rms_norm dx", _gradient)
_WEIGHT_GRADIENT = Form("rms_norm dweight", _weight_gradient)


def _launch_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    rstd: torch.Tensor,
    d_out: torch.Tensor,
    d_h: torch.Tensor | None,
    d_x: torch.Tensor | None,
    partial: torch.Tensor | None,
) -> None:
    """Into those of ``d_x`` and ``partial`` that are given: one pass over x and d_out, two for dx of long rows."""
    if not x.numel():
        return
    rows, d = rows_of("rms_norm", "x", x), rows_of("rms_norm", "gradient", d_out)
    also = None if d_h is None else rows_of("rms_norm", "gradient", d_h)
    o = None if d_x is None else rows_of("rms_norm", "gradient", d_x)
    strides = (rows.stride(0), d.stride(0), *(0 if t is None else t.stride(0) for t in (also, o)))
    if rows.shape[1] <= LONGEST_HELD:
        launch(rms_norm_backward_kernel, rows, weight, rstd, d, also, o, partial, *rows.shape, *strides)
        return
    row_dot = None if o is None else allocate((rows.shape[0],), torch.float32, x.device)
    if row_dot is not None:
        launch(rms_norm_long_dot_kernel, rows, weight, d, row_dot, *rows.shape, *strides[:2])
    launch(rms_norm_long_backward_kernel, rows, weight, rstd, row_dot, d, also, o, partial, *rows.shape, *strides)


def _partial(x: torch.Tensor) -> torch.Tensor:
    """Room for the weight's gradient by blocks of rows: float32 ``(blocks H)``."""
    tokens = x.numel() // x.shape[-1] if x.numel() else 0
    return allocate((cdiv(tokens, FOLD_ROWS), x.shape[-1]), torch.float32, x.device)


def _folded(partial: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if not partial.numel():
        return torch.zeros_like(weight)
    d_weight = allocate(weight.shape, weight.dtype, weight.device)
    launch(rms_norm_dweight_fold_kernel, partial, d_weight, *partial.shape)
    return d_weight


def _check(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    one_device("rms_norm", {"x": x, "weight": weight})
    check_dtype("rms_norm", "x", x, DTYPES)
    check_dtype("rms_norm", "weight", weight, DTYPES)
    if x.dim() < 1 or weight.dim() != 1 or weight.shape[0] != x.shape[-1]:
        raise BadArgument(
            f"rms_norm: x is {tuple(x.shape)}, weight {tuple(weight.shape)}",
            why="x: (... H), weight: (H)",
            fix="normalise over the last axis",
        )
    if x.shape[-1] > MAX_ROW:
        raise BadArgument(f"rms_norm: rows of {x.shape[-1]} elements", why=f"a row may have {MAX_ROW} at most")
    check_number("rms_norm", "eps", eps, 0.0, LARGEST, example=1e-6)
    if not weight.is_contiguous():
        raise BadArgument("rms_norm: weight is not contiguous", fix="weight.contiguous()")
