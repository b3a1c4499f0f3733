"""``matmul(a, b, bias=None)`` with one accumulator chain over K; contract in ``kernels/matmul.py``."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch.compiler import is_dynamo_compiling, is_exporting

from kalign_core import context
from kalign_core.errors import BadArgument
from kalign_core.kernels.matmul import matmul_kernel
from kalign_core.ops.autograd import first_order
from kalign_core.ops.base import (
    Operator,
    Sizes,
    check_dtype,
    check_out,
    no_gradients,
    output_like,
    random_tensor,
    tensors_only,
)
from kalign_core.ops.noting import launch
from kalign_core.ops.opaque import opaque
from kalign_core.ops.recall import Form
from kalign_core.problems import one_device


class Matmul(Operator):
    """``matmul(a, b, bias=None, out=None)``: a: ``(... K)``, b: ``(K N)``, bias: ``(N)`` -> ``(... N)``.

    Float32 accumulation in ascending K, the bias added in float32, one rounding to a's dtype. bfloat16 or float16,
    a and b alike; any strides, so a weight kept as ``(N K)`` is passed as ``weight.t()``. A row's bits depend on that
    row, b and bias only. Gradients run through the same kernel: that of a as a product over N; that of b as one over
    the rows, with the reference launch unless that problem was tuned by itself.
    ``out`` takes the result where no gradient is needed. Raises ``BadArgument`` for shapes, dtypes and an ``out`` that
    does not fit or shares memory with an input, ``MixedDevices``.
    """

    name: ClassVar[str] = "matmul"
    kernels = (matmul_kernel,)
    dims = ("M", "N", "K")
    dtypes = ("bf16", "fp16")
    shapes = tuple({"M": m, "N": 4096, "K": 4096} for m in (16, 1024, 4096))
    small_shapes = ({"M": 16, "N": 64, "K": 64},)

    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        if not is_dynamo_compiling():
            result = _FORMS[bias is not None, out is not None].again(_tensors(a, b, bias, out))
            if result is not None:
                return result
        if is_dynamo_compiling() or is_exporting():
            return _traced(a, b, bias, out)
        try:
            if out is None and torch.is_grad_enabled() and _requires_gradient(a, b, bias):
                return _Matmul.apply(a, b, bias)  # type: ignore[no-untyped-call,no-any-return]  # torch's apply
            return forward(a, b, bias, out)
        except (AttributeError, RuntimeError):
            tensors_only("matmul", a=a, b=b, bias=bias, out=out)
            raise

    def inputs(self, sizes: Sizes, dtype: str, seed: int, device: torch.device) -> tuple[Any, ...]:
        a = random_tensor((sizes["M"], sizes["K"]), dtype, seed, device)
        weight = random_tensor((sizes["N"], sizes["K"]), dtype, seed + 1, device)
        return a, weight.t()

    def oracle(self, *args: Any) -> torch.Tensor:
        a, b, bias = (*args, None)[:3]
        product: torch.Tensor = a.double() @ b.double()
        return product if bias is None else product + bias.double()


def forward(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The operator without gradients."""
    return _FORMS[bias is not None, out is not None](_tensors(a, b, bias, out), (), (a, b, bias, out))


def _tensors(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """Those that there are."""
    given = (a, b) if bias is None else (a, b, bias)
    return given if out is None else (*given, out)


def gradient_a(b: torch.Tensor, d_out: torch.Tensor) -> torch.Tensor:
    """Gradient of a: ``(... K)``, for an upstream gradient ``d_out: (... N)``."""
    return forward(_as_rows(d_out), b.t()).view(*d_out.shape[:-1], b.shape[0])


def gradient_b(a: torch.Tensor, d_out: torch.Tensor) -> torch.Tensor:
    """Gradient of b: ``(K N)``, for an upstream gradient ``d_out: (... N)``.

    The number of rows is this product's K: tuning for each would never end, so it is looked up, not tuned.
    """
    call = context.current()
    with context.restored(context.the("read", call.phase) if call.mode == "tune" else call):
        return forward(_as_rows(a).t(), _as_rows(d_out))


def _forward(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
    _check(a, b, bias)
    if out is not None:
        check_out("matmul", out, in_place=False, **_given(a, b, bias))
    result = output_like("matmul", out, (*a.shape[:-1], b.shape[1]), a)
    if result.numel() == 0:
        return result
    if a.shape[-1] == 0:
        return result.zero_() if bias is None else result.copy_(bias.expand(result.shape))
    rows, c = _as_rows(a), _as_rows(result)
    sizes = (rows.shape[0], b.shape[1], rows.shape[1], *rows.stride(), *b.stride(), *c.stride())
    launch(matmul_kernel, rows, b, bias, c, *sizes)
    return result


# By whether there are a bias and an out.
_FORMS = {
    (False, False): Form("matmul", _forward, shapes=2),
    (True, False): Form("matmul(bias)", _forward, shapes=2),
    (False, True): Form("matmul(out=)", _forward, outs=1, shapes=2),
    (True, True): Form("matmul(bias, out=)", _forward, outs=1, shapes=2),
}


def _given(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {"a": a, "b": b} if bias is None else {"a": a, "b": b, "bias": bias}


def _requires_gradient(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> bool:
    return a.requires_grad | b.requires_grad | (bias is not None and bias.requires_grad)


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """``(... n)`` as ``(rows n)``, also where there are no elements to infer the number of rows from."""
    return tensor if tensor.dim() == 2 else tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def _check(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
    given = _given(a, b, bias)
    one_device("matmul", given)
    for name, tensor in given.items():
        check_dtype("matmul", name, tensor, Matmul.dtypes)
    if a.dim() < 1 or b.dim() != 2 or a.shape[-1] != b.shape[0] or (bias is not None and bias.shape != b.shape[1:]):
        raise BadArgument(
            f"matmul: a is {tuple(a.shape)}, b {tuple(b.shape)}"
            + ("" if bias is None else f", bias {tuple(bias.shape)}"),
            why="a: (... K), b: (K N), bias: (N)",
            fix="a weight kept as (N K) is passed as weight.t()",
        )
    if a.dtype != b.dtype:
        raise BadArgument(f"matmul: a is {a.dtype}, b {b.dtype}", why="both share one dtype", fix="b.to(a.dtype)")
    if bias is not None and not bias.is_contiguous():
        raise BadArgument("matmul: bias is not contiguous", fix="bias.contiguous()")


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.call, ctx.bias_dtype = context.current(), bias is not None and bias.dtype
        return forward(a, b, bias)

    @staticmethod
    @first_order("matmul")
    def backward(ctx: Any, d_out: torch.Tensor) -> Any:
        a, b = ctx.saved_tensors
        need_a, need_b, need_bias = ctx.needs_input_grad
        with context.restored(ctx.call):
            d_a = gradient_a(b, d_out) if need_a else None
            d_b = gradient_b(a, d_out) if need_b else None
        return d_a, d_b, _bias_gradient(d_out, ctx.bias_dtype) if need_bias else None


def _bias_gradient(d_out: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return _as_rows(d_out).sum(0, dtype=torch.float32).to(dtype)


def _traced(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        return _opaque(a, b, bias)  # type: ignore[no-any-return]  # what this returns
    _opaque_into(a, b, bias, out)
    return out


def _into(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    forward(a, b, bias, out)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    a, b, bias = inputs
    ctx.save_for_backward(a, b)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _opaque_backward(ctx: Any, d_out: torch.Tensor) -> Any:
    a, b = ctx.saved_tensors
    need_a, need_b, need_bias = ctx.needs_input_grad
    d_a = _opaque_gradient_a(b, d_out) if need_a else None
    d_b = _opaque_gradient_b(a, d_out) if need_b else None
    return d_a, d_b, _bias_gradient(d_out, ctx.bias_dtype) if need_bias else None


_opaque_gradient_a = opaque(
    "matmul_gradient_a(Tensor b, Tensor d_out) -> Tensor",
    gradient_a,
    lambda b, d_out: d_out.new_empty((*d_out.shape[:-1], b.shape[0])),
)
_opaque_gradient_b = opaque(
    "matmul_gradient_b(Tensor a, Tensor d_out) -> Tensor",
    gradient_b,
    lambda a, d_out: a.new_empty((a.shape[-1], d_out.shape[-1])),
)
_opaque = opaque(
    "matmul(Tensor a, Tensor b, Tensor? bias) -> Tensor",
    forward,
    lambda a, b, bias: a.new_empty((*a.shape[:-1], b.shape[-1])),
    save=_save,
    backward=_opaque_backward,
)
_opaque_into = opaque(
    "matmul_out(Tensor a, Tensor b, Tensor? bias, Tensor(a!) out) -> ()",
    _into,
    lambda a, b, bias, out: no_gradients("matmul", out, *_given(a, b, bias).values()),
)
