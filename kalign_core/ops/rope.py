"""``rope(x, cos, sin, interleaved=False)``; contract and rounding in ``kernels/rope.py``."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.compiler import is_dynamo_compiling, is_exporting

from kalign_core import context
from kalign_core.errors import BadArgument
from kalign_core.kernels.rope import rope_kernel
from kalign_core.ops.autograd import first_order
from kalign_core.ops.base import Operator, Sizes, check_dtype, check_flag, random_tensor, rows_of
from kalign_core.ops.noting import allocate, exact, launch
from kalign_core.ops.opaque import opaque
from kalign_core.ops.recall import Form
from kalign_core.ops.tokens import check_constants
from kalign_core.problems import one_device


class Rope(Operator):
    """``rope(x, cos, sin, interleaved=False)``: x: ``(... heads D)``, cos, sin: ``(... D/2)`` -> ``(... heads D)``.

    Turns pair ``i`` of every head of token ``t`` by the angle whose cosine and sine are ``cos[t, i]`` and ``sin[t, i]``
    (Su et al. 2021, arXiv 2104.09864): elements ``i`` and ``i + D/2``, or ``2 i`` and ``2 i + 1`` where interleaved. In
    float32, each product and each sum rounded, rounded once more to x's dtype. bfloat16, float16, float32, also mixed
    between x and the angles; D even. Any strides of tokens and heads; a last axis that is not dense is copied. The
    gradient of x is turned back by the same kernel; cos and sin have none. Raises ``BadArgument`` for shapes and dtypes
    and for angles that ask for a gradient, ``MixedDevices``.
    """

    name: ClassVar[str] = "rope"
    kernels = (rope_kernel,)
    dims = ("T", "HEADS", "D")
    shapes = (
        {"T": 8192, "HEADS": 40, "D": 128},
        {"T": 8192, "HEADS": 8, "D": 128},
        {"T": 64, "HEADS": 40, "D": 128},
    )
    small_shapes = ({"T": 4, "HEADS": 4, "D": 64},)

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False
    ) -> torch.Tensor:
        if not is_dynamo_compiling():
            result = _TURNED.again((x, cos, sin), (exact(interleaved), 1.0))
            if result is not None:
                return result
        try:
            check_constants("rope", cos=cos, sin=sin)
            if is_dynamo_compiling() or is_exporting():
                return _opaque(x, cos, sin, interleaved)  # type: ignore[no-any-return]  # what this returns
            if x.requires_grad and torch.is_grad_enabled():
                return _Rope.apply(x, cos, sin, interleaved)  # type: ignore[no-untyped-call,no-any-return]  # torch's
            return forward(x, cos, sin, interleaved)
        except AttributeError:
            one_device("rope", {"x": x, "cos": cos, "sin": sin})
            raise

    def inputs(self, sizes: Sizes, dtype: str, seed: int, device: torch.device) -> tuple[Any, ...]:
        x = random_tensor((sizes["T"], sizes["HEADS"], sizes["D"]), dtype, seed, device)
        angles = random_tensor((sizes["T"], max(1, sizes["D"] // 2)), "fp32", seed + 1, device)
        return x, angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    def oracle(self, *args: Any) -> torch.Tensor:
        x, cos, sin, interleaved = (*args, False)[:4]
        c, s = cos.double().unsqueeze(-2), sin.double().unsqueeze(-2)
        wide = x.double()
        if interleaved:
            a, b = wide[..., 0::2], wide[..., 1::2]
            return torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)
        a, b = wide.chunk(2, -1)
        return torch.cat((a * c - b * s, b * c + a * s), -1)


def forward(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The operator without gradients."""
    return _TURNED((x, cos, sin), (exact(interleaved), 1.0), (x, cos, sin, interleaved, 1.0))


def backward(cos: torch.Tensor, sin: torch.Tensor, d_out: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """The gradient of x for an upstream gradient ``d_out: (... heads D)``: turned the other way."""
    return _TURNED((d_out, cos, sin), (exact(interleaved), -1.0), (d_out, cos, sin, interleaved, -1.0))


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, sign: float) -> torch.Tensor:
    _check(x, cos, sin)
    check_flag("rope", "interleaved", interleaved)
    out = allocate(x.shape, x.dtype, x.device)
    if out.numel() == 0:
        return out
    heads, result = _heads(x), out.view(-1, *out.shape[-2:])
    c, s = rows_of("rope", "cos", cos), rows_of("rope", "sin", sin)
    strides = (*heads.stride()[:2], c.stride(0), s.stride(0), *result.stride()[:2])
    launch(rope_kernel, heads, c, s, result, *heads.shape, *strides, sign, int(interleaved))
    return out


_TURNED = Form("rope", _turned)


def _heads(x: torch.Tensor) -> torch.Tensor:
    """``x: (... heads D)`` as ``(T heads D)`` with a dense last axis; a view wherever strides allow."""
    flat = x if x.dim() == 3 else x.reshape(-1, *x.shape[-2:])
    return flat if flat.stride(2) == 1 else flat.contiguous()


def _check(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    one_device("rope", {"x": x, "cos": cos, "sin": sin})
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
        check_dtype("rope", name, tensor, Rope.dtypes)
    if x.dim() < 2 or x.shape[-1] % 2:
        raise BadArgument(f"rope: x is {tuple(x.shape)}", why="x: (... heads D), and D is even")
    angles = (*x.shape[:-2], x.shape[-1] // 2)
    for name, tensor in (("cos", cos), ("sin", sin)):
        if tensor.shape != angles:
            whole = tensor.shape == (*angles[:-1], x.shape[-1])
            raise BadArgument(
                f"rope: {name} is {tuple(tensor.shape)}, x {tuple(x.shape)}",
                why=f"one angle for each pair of each token: {angles}",
                fix=f"{name}[..., :{angles[-1]}]" if whole else f"{name}.expand{angles}",
            )
    if cos.dtype != sin.dtype:
        raise BadArgument(f"rope: cos is {cos.dtype}, sin {sin.dtype}", fix="sin.to(cos.dtype)")


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.call, ctx.interleaved = context.current(), interleaved
        return forward(x, cos, sin, interleaved)

    @staticmethod
    @first_order("rope")
    def backward(ctx: Any, d_out: torch.Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        with context.restored(ctx.call):
            return backward(cos, sin, d_out, ctx.interleaved), None, None, None


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, cos, sin, ctx.interleaved = inputs
    ctx.save_for_backward(cos, sin)


_opaque_backward = opaque(
    "rope_backward(Tensor cos, Tensor sin, Tensor d_out, bool interleaved) -> Tensor",
    backward,
    lambda cos, sin, d_out, interleaved: d_out.new_empty(d_out.shape),
)
_opaque = opaque(
    "rope(Tensor x, Tensor cos, Tensor sin, bool interleaved) -> Tensor",
    forward,
    lambda x, cos, sin, interleaved: x.new_empty(x.shape),
    save=_save,
    backward=lambda ctx, d_out: (_opaque_backward(*ctx.saved_tensors, d_out, ctx.interleaved), None, None, None),
)
