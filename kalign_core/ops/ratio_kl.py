"""``ratio_kl(logp, old_logp, ref_logp, mask)``; contract and rounding in ``kernels/ratio_kl.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling, is_exporting

from kalign_core import context
from kalign_core.declare import Kernel
from kalign_core.kernels.ratio_kl import ratio_kl_backward_kernel, ratio_kl_kernel
from kalign_core.ops.autograd import first_order
from kalign_core.ops.base import Operator, Sizes, random_tensor
from kalign_core.ops.noting import allocate, launch
from kalign_core.ops.opaque import opaque
from kalign_core.ops.recall import Form
from kalign_core.ops.tokens import (
    DTYPES,
    as_bytes,
    check_constants,
    check_tokens,
    one_row,
    sequences,
    stride_of,
)


class RatioKL(NamedTuple):
    """Per token: the probability ratio of the policy to the old one, and three estimates of its KL to the reference."""

    ratio: torch.Tensor
    k1: torch.Tensor
    k2: torch.Tensor
    k3: torch.Tensor


class RatioKLOperator(Operator):
    """``ratio_kl(logp, old_logp, ref_logp, mask=None)``: each ``(B S)`` or ``(T)`` -> ``RatioKL`` of the same.

    Log-probabilities (natural logarithms) of sampled tokens under the policy, the policy that sampled and a reference.
    ``ratio = exp(logp - old_logp)``; with ``x = ref_logp - logp``: ``k1 = -x``, ``k2 = x**2 / 2``,
    ``k3 = exp(x) - 1 - x`` (Schulman, "Approximating KL Divergence", 2020), accurate also where x is near 0. In
    float32, rounded once to logp's dtype: float32, bfloat16, float16. Where ``mask: (B S)`` (boolean) is False every
    result is +0 and so is the gradient, also where the inputs are NaN or infinite. Gradients of logp alone. Any row
    stride. Raises ``BadArgument`` for shapes and dtypes that differ and for other inputs that ask for a gradient,
    ``MixedDevices``.
    """

    name: ClassVar[str] = "ratio_kl"
    kernels = (ratio_kl_kernel, ratio_kl_backward_kernel)
    dims = ("B", "S")
    dtypes = DTYPES
    shapes = ({"B": 64, "S": 8192},)
    small_shapes = ({"B": 2, "S": 256},)

    def __call__(
        self,
        logp: torch.Tensor,
        old_logp: torch.Tensor,
        ref_logp: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> RatioKL:
        try:
            check_constants("ratio_kl", old_logp=old_logp, ref_logp=ref_logp)
            if is_dynamo_compiling() or is_exporting():
                return RatioKL(*_opaque(logp, old_logp, ref_logp, mask))
            if logp.requires_grad and torch.is_grad_enabled():
                return RatioKL(*_RatioKL.apply(logp, old_logp, ref_logp, mask))  # type: ignore[no-untyped-call]
            return forward(logp, old_logp, ref_logp, mask)
        except AttributeError:
            check_tokens("ratio_kl", mask, logp=logp, old_logp=old_logp, ref_logp=ref_logp)
            raise

    def inputs(self, sizes: Sizes, dtype: str, seed: int, device: torch.device) -> tuple[Any, ...]:
        shape = (sizes["B"], sizes["S"])
        logp, old, ref = (random_tensor(shape, dtype, seed + i, device) for i in range(3))
        return logp.requires_grad_(), old, ref, random_tensor(shape, "fp32", seed + 3, device) < 1

    def oracle(self, *args: Any) -> torch.Tensor:
        """All four results, stacked along a new first axis."""
        logp, old, ref, mask = (*args, None)[:4]
        x = ref.double() - logp.double()
        results = torch.stack((torch.exp(logp.double() - old.double()), -x, x * x / 2, torch.expm1(x) - x))
        return results if mask is None else torch.where(mask, results, 0.0)

    def exercise(self, *args: Any) -> None:
        results = self(*args)
        if results.ratio.requires_grad:
            torch.autograd.backward(results, [torch.ones_like(result) for result in results])


def forward(logp: torch.Tensor, old_logp: torch.Tensor, ref_logp: torch.Tensor, mask: torch.Tensor | None) -> RatioKL:
    """The operator without gradients."""
    args = (logp, old_logp, ref_logp, mask)
    return RatioKL(*_FORWARD(_tensors(args), (mask is None,), args))


def backward(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    ref_logp: torch.Tensor,
    mask: torch.Tensor | None,
    *gradients: torch.Tensor | None,
) -> torch.Tensor:
    """The gradient of logp for those of ratio, k1, k2 and k3, any of which may be None."""
    args = (logp, old_logp, ref_logp, mask, *gradients)
    return _BACKWARD(_tensors(args), tuple([arg is None for arg in args]), args)


def _tensors(args: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
    return tuple(arg for arg in args if arg is not None)


def _forward(
    logp: torch.Tensor, old_logp: torch.Tensor, ref_logp: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    check_tokens("ratio_kl", mask, logp=logp, old_logp=old_logp, ref_logp=ref_logp)
    results = tuple(allocate(logp.shape, logp.dtype, logp.device) for _ in RatioKL._fields)
    _launch(ratio_kl_kernel, (logp, old_logp, ref_logp, as_bytes(mask)), results, strides=5)
    return results


def _backward(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    ref_logp: torch.Tensor,
    mask: torch.Tensor | None,
    *gradients: torch.Tensor | None,
) -> torch.Tensor:
    d_logp = allocate(logp.shape, logp.dtype, logp.device)
    inputs = (logp, old_logp, ref_logp, as_bytes(mask), *gradients)
    _launch(ratio_kl_backward_kernel, inputs, (d_logp,), strides=9)
    return d_logp


_FORWARD = Form("ratio_kl", _forward)
_BACKWARD = Form("ratio_kl backward", _backward)


def _launch(
    kernel: Kernel, inputs: Sequence[torch.Tensor | None], outputs: Sequence[torch.Tensor], *, strides: int
) -> None:
    """Launch on rows of sequences, or on one long row where all is dense; the first tensors have ``strides``."""
    if not outputs[0].numel():
        return
    tensors = [None if t is None else sequences("ratio_kl", "gradient", t) for t in (*inputs, *outputs)]
    if one_row(*tensors):
        tensors = [None if t is None else t.view(1, -1) for t in tensors]
    rows = tensors[len(inputs)]
    assert rows is not None  # an output
    launch(kernel, *tensors, *rows.shape, *(stride_of(t) for t in tensors[:strides]))


class _RatioKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logp: torch.Tensor, old_logp: torch.Tensor, ref_logp: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(logp, old_logp, ref_logp, mask)
        ctx.set_materialize_grads(False)
        ctx.call = context.current()
        return tuple(forward(logp, old_logp, ref_logp, mask))

    @staticmethod
    @first_order("ratio_kl")
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        with context.restored(ctx.call):
            return backward(*ctx.saved_tensors, *gradients), None, None, None


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


_opaque_backward = opaque(
    "ratio_kl_backward(Tensor logp, Tensor old, Tensor ref, Tensor? mask, Tensor? d_ratio, Tensor? d_k1, Tensor? d_k2, "
    "Tensor? d_k3) -> Tensor",
    backward,
    lambda logp, *others: logp.new_empty(logp.shape),
)
_opaque = opaque(
    "ratio_kl(Tensor logp, Tensor old, Tensor ref, Tensor? mask) -> (Tensor, Tensor, Tensor, Tensor)",
    lambda *args: tuple(forward(*args)),
    lambda logp, *others: tuple(logp.new_empty(logp.shape) for _ in RatioKL._fields),
    save=_save,
    backward=lambda ctx, *gradients: (_opaque_backward(*ctx.saved_tensors, *gradients), None, None, None),
)
