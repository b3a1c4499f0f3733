"""``swiglu(gate, up) = silu(gate) * up``; contract and rounding in ``kernels/swiglu.py``."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.compiler import is_dynamo_compiling, is_exporting

from kalign_core import context
from kalign_core.kernels.swiglu import swiglu_backward_kernel, swiglu_kernel
from kalign_core.ops.autograd import first_order
from kalign_core.ops.base import (
    Operator,
    Sizes,
    check_dtype,
    check_out,
    check_same,
    no_gradients,
    output_like,
    random_tensor,
    rows_of,
    tensors_only,
)
from kalign_core.ops.noting import allocate, launch
from kalign_core.ops.opaque import opaque
from kalign_core.ops.recall import Form


class SwiGLU(Operator):
    """``swiglu(gate, up, out=None)``: gate, up: ``(... F)`` of one dtype -> ``(... F)``.

    ``silu(g) * u`` with ``silu(g) = g / (1 + exp(-g))`` in float32, rounded once (Shazeer 2020, arXiv 2002.05202).
    bfloat16, float16, float32. Any row stride; a last axis that is not dense is copied. ``out`` takes the result
    where no gradient is needed; it may be one of the inputs. Raises ``BadArgument`` for shapes and dtypes that differ
    and an ``out`` that does not fit, ``MixedDevices``.
    """

    name: ClassVar[str] = "swiglu"
    kernels = (swiglu_kernel, swiglu_backward_kernel)
    dims = ("T", "F")
    shapes = ({"T": 4096, "F": 12288}, {"T": 16, "F": 12288})
    small_shapes = ({"T": 4, "F": 1024},)

    def __call__(self, gate: torch.Tensor, up: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        if not is_dynamo_compiling():
            result = _FORWARD.again((gate, up)) if out is None else _FORWARD_INTO.again((gate, up, out))
            if result is not None:
                return result
        if is_dynamo_compiling() or is_exporting():
            return _traced(gate, up, out)
        try:
            if out is None and (gate.requires_grad | up.requires_grad) and torch.is_grad_enabled():
                return _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call,no-any-return]  # torch's apply
            return forward(gate, up, out)
        except (AttributeError, RuntimeError):
            tensors_only("swiglu", gate=gate, up=up, out=out)
            raise

    def inputs(self, sizes: Sizes, dtype: str, seed: int, device: torch.device) -> tuple[Any, ...]:
        shape = (sizes["T"], sizes["F"])
        return tuple(random_tensor(shape, dtype, seed + i, device).requires_grad_() for i in range(2))

    def oracle(self, *args: Any) -> torch.Tensor:
        gate, up = args
        product: torch.Tensor = torch.nn.functional.silu(gate.double()) * up.double()
        return product


def forward(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The operator without gradients."""
    return _FORWARD((gate, up)) if out is None else _FORWARD_INTO((gate, up, out))


def backward(gate: torch.Tensor, up: torch.Tensor, d_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of gate and up for an upstream gradient ``d_out: (... F)``."""
    return _BACKWARD((gate, up, d_out))


def _forward(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    check_same("swiglu", ("gate", gate), ("up", up))
    check_dtype("swiglu", "gate", gate, SwiGLU.dtypes)
    if out is not None:
        check_out("swiglu", out, in_place=True, gate=gate, up=up)
    result = output_like("swiglu", out, gate.shape, gate)
    if result.numel():
        g, u, o = rows_of("swiglu", "gate", gate), rows_of("swiglu", "up", up), rows_of("swiglu", "out", result)
        launch(swiglu_kernel, g, u, o, *g.shape, g.stride(0), u.stride(0), o.stride(0))
    return result


def _backward(gate: torch.Tensor, up: torch.Tensor, d_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    d_gate, d_up = (allocate(gate.shape, gate.dtype, gate.device) for _ in range(2))
    if gate.numel():
        tensors = [rows_of("swiglu", "gradient", t) for t in (gate, up, d_out, d_gate, d_up)]
        launch(swiglu_backward_kernel, *tensors, *tensors[0].shape, *(t.stride(0) for t in tensors))
    return d_gate, d_up


_FORWARD = Form("swiglu", _forward)
_FORWARD_INTO = Form("swiglu(out=)", _forward, outs=1, in_place=(0, 1))
_BACKWARD = Form("swiglu backward", _backward)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.call = context.current()
        return forward(gate, up)

    @staticmethod
    @first_order("swiglu")
    def backward(ctx: Any, d_out: torch.Tensor) -> Any:
        gate, up = ctx.saved_tensors
        with context.restored(ctx.call):
            return backward(gate, up, d_out)


def _traced(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    if out is None:
        return _opaque(gate, up)  # type: ignore[no-any-return]  # what this returns
    _opaque_into(gate, up, out)
    return out


def _into(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor) -> None:
    forward(gate, up, out)


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


_opaque_backward = opaque(
    "swiglu_backward(Tensor gate, Tensor up, Tensor d_out) -> (Tensor, Tensor)",
    backward,
    lambda gate, up, d_out: (gate.new_empty(gate.shape), gate.new_empty(gate.shape)),
)
_opaque = opaque(
    "swiglu(Tensor gate, Tensor up) -> Tensor",
    forward,
    lambda gate, up: gate.new_empty(gate.shape),
    save=_save,
    backward=lambda ctx, d_out: _opaque_backward(*ctx.saved_tensors, d_out),
)
_opaque_into = opaque(
    "swiglu_out(Tensor gate, Tensor up, Tensor(a!) out) -> ()",
    _into,
    lambda gate, up, out: no_gradients("swiglu", gate, up, out),
)
