"""``ratio_kl(logp, old_logp, ref_logp, mask)``; contract and rounding in ``kernels/ratio_kl.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from kalign_core import context
from kalign_core.kernels.ratio_kl import ratio_kl_backward_kernel, ratio_kl_kernel
from kalign_core.ops.autograd import first_order
from kalign_core.ops.base import Operator, Sizes, eager, launch, random_tensor
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
        if torch.compiler.is_compiling():
            return eager(self, logp, old_logp, ref_logp, mask)  # type: ignore[no-any-return]  # what this returns
        check_tokens("ratio_kl", mask, logp=logp, old_logp=old_logp, ref_logp=ref_logp)
        check_constants("ratio_kl", old_logp=old_logp, ref_logp=ref_logp)
        if logp.requires_grad and torch.is_grad_enabled():
            return RatioKL(*_RatioKL.apply(logp, old_logp, ref_logp, mask))  # type: ignore[no-untyped-call]  # torch's
        return forward(logp, old_logp, ref_logp, mask)

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
    results = RatioKL(*(torch.empty(logp.shape, dtype=logp.dtype, device=logp.device) for _ in range(4)))
    if logp.numel():
        inputs = (logp, old_logp, ref_logp, as_bytes(mask))
        _launch(ratio_kl_kernel, inputs, results, shared=True)
    return results


def backward(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    ref_logp: torch.Tensor,
    mask: torch.Tensor | None,
    gradients: Sequence[torch.Tensor | None],
) -> torch.Tensor:
    """The gradient of logp for those of ratio, k1, k2 and k3, any of which may be None."""
    d_logp = torch.empty(logp.shape, dtype=logp.dtype, device=logp.device)
    if logp.numel():
        inputs = (logp, old_logp, ref_logp, as_bytes(mask), *gradients)
        _launch(ratio_kl_backward_kernel, inputs, (d_logp,), shared=False)
    return d_logp


def _launch(
    kernel: Any, inputs: Sequence[torch.Tensor | None], outputs: Sequence[torch.Tensor], *, shared: bool
) -> None:
    """Launch on rows of sequences, or on one long row where all is dense; ``shared``: outputs share their stride."""
    tensors = [None if t is None else sequences("ratio_kl", "gradient", t) for t in (*inputs, *outputs)]
    if one_row(*tensors):
        tensors = [None if t is None else t.view(1, -1) for t in tensors]
    of_rows = tensors[: len(inputs) + 1] if shared else tensors
    last = tensors[-1]
    assert last is not None  # an output
    launch(kernel, *tensors, *last.shape, *(stride_of(t) for t in of_rows))


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
            return backward(*ctx.saved_tensors, gradients), None, None, None
