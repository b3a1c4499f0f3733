"""``rms_norm(x, weight, eps, residual)``; contract and rounding in ``kernels/rms_norm.py``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch.compiler import is_dynamo_compiling, is_exporting

from kalign_core import context
from kalign_core.errors import BadArgument
from kalign_core.kernels.rms_norm import (
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
from kalign_core.ops.autograd import first_order
from kalign_core.ops.base import Operator, Sizes, no_gradients, random_tensor, tensors_only
from kalign_core.ops.opaque import opaque
from kalign_core.ops.rms_norm_plain import (
    DTYPES,
    again,
    backward,
    forward,
    forward_with_residual,
    gradient,
    gradients,
    weight_gradient,
)


class RMSNorm(Operator):
    """``rms_norm(x, weight, eps=1e-6, residual=None, out=None)``: x: ``(... H)``, weight: ``(H)`` -> ``(... H)``.

    ``x / sqrt(mean(x**2) + eps) * weight`` in float32, rounded once to x's dtype (Zhang and Sennrich 2019, arXiv
    1910.07467). With a residual, of x's shape and dtype, ``(y, h)``: h is ``x + residual`` rounded to their dtype and y
    the norm of that h, bit for bit ``rms_norm(h, weight, eps)``; both are differentiable.
    bfloat16, float16, float32, also mixed between x and weight; H up to 262,144. Gradients of x, residual and weight;
    the weight's is folded over fixed blocks of 16 rows, so trailing rows of numbers with a zero gradient change nothing
    in it; padding between rows moves those behind it, so take it out with ``pack`` first. Rows that hold NaN or
    infinities give a NaN gradient whatever reaches them, since 0 times either is NaN.
    ``out`` takes the result where no gradient is needed and no residual given; it may be x. Raises ``BadArgument`` for
    shapes, dtypes, rows that are too long and an ``out`` that does not fit, ``MixedDevices``.
    """

    name: ClassVar[str] = "rms_norm"
    kernels = (
        rms_norm_kernel,
        rms_norm_backward_kernel,
        rms_norm_dweight_fold_kernel,
        rms_norm_residual_kernel,
        rms_norm_long_kernel,
        rms_norm_long_dot_kernel,
        rms_norm_long_backward_kernel,
        rms_norm_long_residual_kernel,
    )
    dims = ("T", "H")
    dtypes = DTYPES
    shapes = ({"T": 4096, "H": 4096}, {"T": 65536, "H": 128}, {"T": 1024, "H": 16384})
    small_shapes = ({"T": 4, "H": 256},)

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float = 1e-6,
        residual: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        if not is_dynamo_compiling():
            known = again(x, weight, eps, residual, out)
            if known is not None:
                return known[0] if residual is None else known[:2]
        if residual is not None:
            return _with_residual(x, residual, weight, eps, out)
        if is_dynamo_compiling() or is_exporting():
            return _traced(x, weight, eps, out)
        try:
            if out is None and (x.requires_grad | weight.requires_grad) and torch.is_grad_enabled():
                return _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]  # torch's apply
            return forward(x, weight, eps, out)[0]
        except (AttributeError, RuntimeError):
            tensors_only("rms_norm", x=x, weight=weight, out=out)
            raise

    def inputs(self, sizes: Sizes, dtype: str, seed: int, device: torch.device) -> tuple[Any, ...]:
        x = random_tensor((sizes["T"], sizes["H"]), dtype, seed, device).requires_grad_()
        return x, random_tensor((sizes["H"],), dtype, seed + 1, device).requires_grad_()

    def forms(self, sizes: Sizes, dtype: str, seed: int, device: torch.device) -> Iterator[tuple[Any, ...]]:
        """Without a residual, as where a model begins, and with one, as behind every layer."""
        x, weight = self.inputs(sizes, dtype, seed, device)
        yield x, weight
        yield x, weight, 1e-6, x.detach().requires_grad_()

    def oracle(self, *args: Any) -> torch.Tensor:
        x, weight, eps = (*args, 1e-6)[:3]
        wide = x.double()
        scaled: torch.Tensor = wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps)
        result: torch.Tensor = scaled * weight.double()
        return result


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
            return *backward(x, weight, rstd, d_out, None, ctx.needs_input_grad[:2]), None


class _RMSNormResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Any:
        y, h, rstd = forward_with_residual(x, residual, weight, eps)
        ctx.save_for_backward(h, weight, rstd)
        ctx.call = context.current()
        ctx.set_materialize_grads(False)
        return y, h

    @staticmethod
    @first_order("rms_norm")
    def backward(ctx: Any, d_y: torch.Tensor | None, d_h: torch.Tensor | None) -> Any:
        h, weight, rstd = ctx.saved_tensors
        if d_y is None:
            return d_h, d_h, None, None
        needs = (ctx.needs_input_grad[0] or ctx.needs_input_grad[1], ctx.needs_input_grad[2])
        with context.restored(ctx.call):
            d_sum, d_weight = backward(h, weight, rstd, d_y, d_h, needs)
        return d_sum, d_sum, d_weight, None


def _with_residual(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if out is not None:
        raise BadArgument("rms_norm: out= with a residual", why="there are two results", fix="leave out= away")
    if is_dynamo_compiling() or is_exporting():
        return _opaque_residual(x, residual, weight, eps)[:2]  # type: ignore[no-any-return]  # what this returns
    tensors_only("rms_norm", x=x, residual=residual, weight=weight)
    if (x.requires_grad | residual.requires_grad | weight.requires_grad) and torch.is_grad_enabled():
        return _RMSNormResidual.apply(x, residual, weight, eps)  # type: ignore[no-untyped-call,no-any-return]
    return forward_with_residual(x, residual, weight, eps)[:2]


def _traced(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        return _opaque(x, weight, eps)[0]  # type: ignore[no-any-return]  # what this returns
    _opaque_into(x, weight, eps, out)
    return out


def _into(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
    forward(x, weight, eps, out)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])


def _opaque_backward(ctx: Any, d_out: torch.Tensor, _: Any) -> Any:
    return *_traced_backward(ctx.saved_tensors, d_out, None, ctx.needs_input_grad[:2]), None


def _traced_backward(
    saved: tuple[torch.Tensor, ...], d_out: torch.Tensor, d_h: torch.Tensor | None, needs: tuple[bool, bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """``backward`` by the operators that a graph may hold."""
    if all(needs):
        return _opaque_gradients(*saved, d_out, d_h)  # type: ignore[no-any-return]  # two tensors
    d_x = _opaque_gradient(*saved, d_out, d_h) if needs[0] else None
    return d_x, _opaque_weight_gradient(*saved, d_out) if needs[1] else None


def _save_residual(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(output[1], inputs[2], output[2])
    ctx.mark_non_differentiable(output[2])


def _opaque_residual_backward(ctx: Any, d_y: torch.Tensor, d_h: torch.Tensor, _: Any) -> Any:
    needs = (ctx.needs_input_grad[0] or ctx.needs_input_grad[1], ctx.needs_input_grad[2])
    d_sum, d_weight = _traced_backward(ctx.saved_tensors, d_y, d_h, needs)
    return d_sum, d_sum, d_weight, None


def _without_none(run: Any) -> Any:
    """``run`` for a schema whose last tensor may be absent."""
    return lambda *given: run(*given) if given[-1] is not None else run(*given[:-1])


_opaque_gradients = opaque(
    "rms_norm_gradients(Tensor x, Tensor weight, Tensor rstd, Tensor d_out, Tensor? d_h) -> (Tensor, Tensor)",
    _without_none(gradients),
    lambda x, weight, rstd, d_out, d_h: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
)
_opaque_gradient = opaque(
    "rms_norm_gradient(Tensor x, Tensor weight, Tensor rstd, Tensor d_out, Tensor? d_h) -> Tensor",
    _without_none(gradient),
    lambda x, weight, rstd, d_out, d_h: x.new_empty(x.shape),
)
_opaque_weight_gradient = opaque(
    "rms_norm_weight_gradient(Tensor x, Tensor weight, Tensor rstd, Tensor d_out) -> Tensor",
    weight_gradient,
    lambda x, weight, rstd, d_out: weight.new_empty(weight.shape),
)
_opaque_residual = opaque(
    "rms_norm_residual(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
    forward_with_residual,
    lambda x, residual, weight, eps: (
        x.new_empty(x.shape),
        x.new_empty(x.shape),
        x.new_empty(math.prod(x.shape[:-1]), dtype=torch.float32),
    ),
    save=_save_residual,
    backward=_opaque_residual_backward,
)
_opaque = opaque(
    "rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    forward,
    lambda x, weight, eps: (x.new_empty(x.shape), x.new_empty(math.prod(x.shape[:-1]), dtype=torch.float32)),
    save=_save,
    backward=_opaque_backward,
)
_opaque_into = opaque(
    "rms_norm_out(Tensor x, Tensor weight, float eps, Tensor(a!) out) -> ()",
    _into,
    lambda x, weight, eps, out: no_gradients("rms_norm", x, weight, out),
)
