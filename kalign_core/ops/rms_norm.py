"""``rms_norm(x, weight, eps)``; contract and rounding in ``kernels/rms_norm.py``."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from kalign_core import context
from kalign_core.declare import cdiv
from kalign_core.errors import BadArgument
from kalign_core.kernels.rms_norm import (
    FOLD_ROWS,
    rms_norm_backward_kernel,
    rms_norm_dweight_fold_kernel,
    rms_norm_dweight_kernel,
    rms_norm_kernel,
)
from kalign_core.ops.autograd import first_order
from kalign_core.ops.base import (
    Operator,
    Sizes,
    check_dtype,
    check_out,
    no_gradients,
    output_like,
    random_tensor,
    rows_of,
    tensors_only,
)
from kalign_core.ops.opaque import opaque
from kalign_core.ops.recall import allocate, answer, launch
from kalign_core.problems import one_device

MAX_ROW = 65536


class RMSNorm(Operator):
    """``rms_norm(x, weight, eps=1e-6, out=None)``: x: ``(... H)``, weight: ``(H)`` -> ``(... H)`` in x's dtype.

    ``x / sqrt(mean(x**2) + eps) * weight`` in float32, rounded once (Zhang and Sennrich 2019, arXiv 1910.07467).
    bfloat16, float16, float32, also mixed between x and weight; H up to 65,536. Gradients of x and weight; the
    weight's is folded over fixed blocks of 64 rows, so trailing rows with a zero gradient change nothing in it.
    ``out`` takes the result where no gradient is needed; it may be x. Raises ``BadArgument`` for shapes, dtypes, rows
    that are too long and an ``out`` that does not fit, ``MixedDevices``.
    """

    name: ClassVar[str] = "rms_norm"
    kernels = (
        rms_norm_kernel,
        rms_norm_backward_kernel,
        rms_norm_dweight_kernel,
        rms_norm_dweight_fold_kernel,
    )
    dims = ("T", "H")
    shapes = ({"T": 4096, "H": 4096}, {"T": 65536, "H": 128}, {"T": 1024, "H": 16384})
    small_shapes = ({"T": 4, "H": 256},)

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if torch.compiler.is_dynamo_compiling():
            return _traced(x, weight, eps, out)
        try:
            if out is None and (x.requires_grad | weight.requires_grad) and torch.is_grad_enabled():
                return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call,no-any-return]  # torch's apply
            return forward(x, weight, eps, out)[0]
        except AttributeError:
            tensors_only("rms_norm", x=x, weight=weight, out=out)
            raise

    def inputs(self, sizes: Sizes, dtype: str, seed: int, device: torch.device) -> tuple[Any, ...]:
        x = random_tensor((sizes["T"], sizes["H"]), dtype, seed, device).requires_grad_()
        return x, random_tensor((sizes["H"],), dtype, seed + 1, device).requires_grad_()

    def oracle(self, *args: Any) -> torch.Tensor:
        x, weight, eps = (*args, 1e-6)[:3]
        wide = x.double()
        scaled: torch.Tensor = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
        result: torch.Tensor = scaled * weight.double()
        return result


def forward(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator without gradients: the result and ``rstd: (rows)`` in float32."""
    if out is None:
        key, given = ("rms_norm", x.shape, eps), (x, weight)
        return answer(key, given, _forward, (x, weight, eps))  # type: ignore[no-any-return]  # as _forward
    key, all_ = ("rms_norm(out=)", x.shape, eps), (x, weight, out)
    return answer(key, all_, _forward, (x, weight, eps, out), 1, (0,))  # type: ignore[no-any-return]  # as _forward


def gradient(x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, d_out: torch.Tensor) -> torch.Tensor:
    """Gradient of x for an upstream gradient ``d_out: (... H)``."""
    given = (x, weight, rstd, d_out)
    return answer(("rms_norm dx", x.shape), given, _gradient, given)  # type: ignore[no-any-return]  # as _gradient


def weight_gradient(x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, d_out: torch.Tensor) -> torch.Tensor:
    """Gradient of weight for an upstream gradient ``d_out: (... H)``."""
    given = (x, weight, rstd, d_out)
    return answer(("rms_norm dweight", x.shape), given, _weight_gradient, given)  # type: ignore[no-any-return]  # as it


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
        launch(rms_norm_kernel, rows, weight, o, rstd, *rows.shape, rows.stride(0), o.stride(0), float(eps))
    return result, rstd


def _gradient(x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, d_out: torch.Tensor) -> torch.Tensor:
    rows, d = rows_of("rms_norm", "x", x), rows_of("rms_norm", "gradient", d_out)
    d_x = allocate(x.shape, x.dtype, x.device)
    if d_x.numel():
        o = rows_of("rms_norm", "gradient", d_x)
        launch(
            rms_norm_backward_kernel, rows, weight, rstd, d, o, *rows.shape, rows.stride(0), d.stride(0), o.stride(0)
        )
    return d_x


def _weight_gradient(x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor, d_out: torch.Tensor) -> torch.Tensor:
    rows, d = rows_of("rms_norm", "x", x), rows_of("rms_norm", "gradient", d_out)
    tokens, width = rows.shape
    if rows.numel() == 0:
        return torch.zeros_like(weight)
    blocks = cdiv(tokens, FOLD_ROWS)
    partial = allocate((blocks, width), torch.float32, rows.device)
    launch(rms_norm_dweight_kernel, rows, rstd, d, partial, tokens, width, rows.stride(0), d.stride(0))
    d_weight = allocate(weight.shape, weight.dtype, weight.device)
    launch(rms_norm_dweight_fold_kernel, partial, d_weight, blocks, width)
    return d_weight


def _check(x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
    one_device("rms_norm", {"x": x, "weight": weight})
    check_dtype("rms_norm", "x", x, RMSNorm.dtypes)
    check_dtype("rms_norm", "weight", weight, RMSNorm.dtypes)
    if x.dim() < 1 or weight.dim() != 1 or weight.shape[0] != x.shape[-1]:
        raise BadArgument(
            f"rms_norm: x is {tuple(x.shape)}, weight {tuple(weight.shape)}",
            why="x: (... H), weight: (H)",
            fix="normalise over the last axis",
        )
    if x.shape[-1] > MAX_ROW:
        raise BadArgument(f"rms_norm: rows of {x.shape[-1]} elements", why=f"a row is held whole, up to {MAX_ROW}")
    if not isinstance(eps, (int, float)):
        raise BadArgument(f"rms_norm: eps is {eps!r}, not a number", fix="eps=1e-6")
    if not weight.is_contiguous():
        raise BadArgument("rms_norm: weight is not contiguous", fix="weight.contiguous()")


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        result, rstd = forward(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.call = context.current()
        return result

    @staticmethod
    @first_order("rms_norm")
    def backward(ctx: Any, d_out: torch.Tensor) -> Any:
        x, weight, rstd = ctx.saved_tensors
        with context.restored(ctx.call):
            d_x = gradient(x, weight, rstd, d_out) if ctx.needs_input_grad[0] else None
            d_weight = weight_gradient(x, weight, rstd, d_out) if ctx.needs_input_grad[1] else None
        return d_x, d_weight, None


def _traced(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        return _opaque(x, weight, eps)[0]  # type: ignore[no-any-return]  # what this returns
    no_gradients("rms_norm", x, weight, out)
    _opaque_into(x, weight, eps, out)
    return out


def _into(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    forward(x, weight, eps, out)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])


def _opaque_backward(ctx: Any, d_out: torch.Tensor, _: Any) -> Any:
    d_x = _opaque_gradient(*ctx.saved_tensors, d_out) if ctx.needs_input_grad[0] else None
    d_weight = _opaque_weight_gradient(*ctx.saved_tensors, d_out) if ctx.needs_input_grad[1] else None
    return d_x, d_weight, None


_opaque_gradient = opaque(
    "rms_norm_gradient(Tensor x, Tensor weight, Tensor rstd, Tensor d_out) -> Tensor",
    gradient,
    lambda x, weight, rstd, d_out: x.new_empty(x.shape),
)
_opaque_weight_gradient = opaque(
    "rms_norm_weight_gradient(Tensor x, Tensor weight, Tensor rstd, Tensor d_out) -> Tensor",
    weight_gradient,
    lambda x, weight, rstd, d_out: weight.new_empty(weight.shape),
)
_opaque = opaque(
    "rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    forward,
    lambda x, weight, eps: (x.new_empty(x.shape), x.new_empty(x.numel() // x.shape[-1], dtype=torch.float32)),
    save=_save,
    backward=_opaque_backward,
)
_opaque_into = opaque(
    "rms_norm_out(Tensor x, Tensor weight, float eps, Tensor(a!) out) -> ()",
    _into,
    lambda x, weight, eps, out: None,
)
