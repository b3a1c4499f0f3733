"""``swiglu(gate, up) = silu(gate) * up``; contract and rounding in ``kernels/swiglu.py``."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from kalign_core import context, session
from kalign_core.kernels.swiglu import swiglu_backward_kernel, swiglu_kernel
from kalign_core.ops.autograd import first_order
from kalign_core.ops.base import (
    Operator,
    Sizes,
    check_dtype,
    check_out,
    check_same,
    eager,
    fresh,
    launch,
    output_like,
    random_tensor,
    remember,
    rows_of,
    tensors_only,
)


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
        if torch.compiler.is_compiling():
            return eager(self, gate, up, out=out)  # type: ignore[no-any-return]  # what this returns
        try:
            if out is not None:
                check_out("swiglu", out, in_place=True, gate=gate, up=up)
            elif (gate.requires_grad | up.requires_grad) and torch.is_grad_enabled():
                return _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call,no-any-return]  # torch's apply
            return forward(gate, up, out)
        except AttributeError:
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
    """The operator without gradients: one look-up and one launch for a call like one before."""
    key = (
        "swiglu", context.current(),
        gate.__class__, gate.shape, gate.stride(), gate.dtype, gate.device, gate.data_ptr() & 15,
        up.__class__, up.shape, up.stride(), up.dtype, up.device, up.data_ptr() & 15,
        out is not None and (out.shape, out.stride(), out.dtype, out.device, out.data_ptr() & 15),
    )  # fmt: skip
    known = session.current().calls.get(key)
    if known is None:
        return _first(key, gate, up, out)
    launch_known, template = known
    if out is None:
        out = fresh(template)
    launch_known(gate, up, out)
    return out


def _first(key: Any, gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    check_same("swiglu", ("gate", gate), ("up", up))
    check_dtype("swiglu", "gate", gate, SwiGLU.dtypes)
    result = output_like("swiglu", out, gate.shape, gate)
    if result.numel() == 0:
        return result
    g, u, o = rows_of("swiglu", "gate", gate), rows_of("swiglu", "up", up), rows_of("swiglu", "out", result)
    numbers = (*g.shape, g.stride(0), u.stride(0), o.stride(0))
    remember(key, launch(swiglu_kernel, g, u, o, *numbers), (g, u, o), numbers, (gate, up), result)
    return result


def backward(gate: torch.Tensor, up: torch.Tensor, d_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of gate and up for an upstream gradient ``d_out: (... F)``."""
    d_gate = torch.empty_like(gate, memory_format=torch.contiguous_format)
    d_up = torch.empty_like(gate, memory_format=torch.contiguous_format)
    if gate.numel() == 0:
        return d_gate, d_up
    tensors = [rows_of("swiglu", "gradient", t) for t in (gate, up, d_out, d_gate, d_up)]
    launch(swiglu_backward_kernel, *tensors, *tensors[0].shape, *(t.stride(0) for t in tensors))
    return d_gate, d_up


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
