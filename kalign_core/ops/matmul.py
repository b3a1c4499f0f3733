"""``matmul(a, b, bias=None)`` with one accumulator chain over K; contract in ``kernels/matmul.py``."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch

from kalign_core import context, session
from kalign_core.errors import BadArgument
from kalign_core.kernels.matmul import matmul_kernel
from kalign_core.ops.autograd import first_order
from kalign_core.ops.base import (
    Operator,
    Sizes,
    check_dtype,
    check_out,
    eager,
    fresh,
    launch,
    output_like,
    random_tensor,
    remember,
    tensors_only,
)
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
        if torch.compiler.is_compiling():
            return eager(self, a, b, bias, out=out)  # type: ignore[no-any-return]  # what this returns
        try:
            if out is not None:
                check_out("matmul", out, in_place=False, **_given(a, b, bias))
            elif _requires_gradient(a, b, bias) and torch.is_grad_enabled():
                return _Matmul.apply(a, b, bias)  # type: ignore[no-untyped-call,no-any-return]  # torch's apply
            return forward(a, b, bias, out)
        except AttributeError:
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
    """The operator without gradients: one look-up and one launch for a call like one before."""
    key = (
        "matmul", context.current(),
        a.__class__, a.shape, a.stride(), a.dtype, a.device, a.data_ptr() & 15,
        b.__class__, b.shape, b.stride(), b.dtype, b.device, b.data_ptr() & 15,
        bias is not None and (bias.shape, bias.stride(), bias.dtype, bias.device, bias.data_ptr() & 15),
        out is not None and (out.shape, out.stride(), out.dtype, out.device, out.data_ptr() & 15),
    )  # fmt: skip
    known = session.current().calls.get(key)
    if known is None:
        return _first(key, a, b, bias, out)
    launch_known, template = known
    if out is None:
        out = fresh(template)
    launch_known(a, b, bias, out)
    return out


def _first(
    key: Any, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    _check(a, b, bias)
    result = output_like("matmul", out, (*a.shape[:-1], b.shape[1]), a)
    if result.numel() == 0:
        return result
    if a.shape[-1] == 0:
        return result.zero_() if bias is None else result.copy_(bias.expand(result.shape))
    rows, c = _as_rows(a), _as_rows(result)
    numbers = (rows.shape[0], b.shape[1], rows.shape[1], *rows.stride(), *b.stride(), *c.stride())
    remember(key, launch(matmul_kernel, rows, b, bias, c, *numbers), (rows, b, bias, c), numbers, (a, b), result)
    return result


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
        rows, d_rows = _as_rows(a), _as_rows(d_out)
        need_a, need_b, need_bias = ctx.needs_input_grad
        with context.restored(ctx.call):
            d_a = forward(d_rows, b.t()).view(a.shape) if need_a else None
        # The number of rows is this product's K: tuning for each would never end, so it is looked up, not tuned.
        quiet = ctx.call._replace(mode="read") if ctx.call.mode == "tune" else ctx.call
        with context.restored(quiet):
            d_b = forward(rows.t(), d_rows) if need_b else None
        d_bias = d_rows.sum(0, dtype=torch.float32).to(ctx.bias_dtype) if need_bias else None
        return d_a, d_b, d_bias
