"""Gradients that cannot be differentiated again, and that say so.

torch's own marker for such a backward pass looks at the upstream gradient alone: where that is a constant, as in the
gradient penalty of a sum, the second derivative is left out in silence. Here every gradient that is asked for with
``create_graph=True`` raises when somebody goes back through it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from kalign_core.errors import NoSecondDerivative

Backward = Callable[..., tuple[Any, ...]]


def first_order(owner: str) -> Callable[[Backward], Backward]:
    """Mark ``backward(ctx, *gradients)`` of the operator ``owner`` as one that has no derivative itself."""

    def mark(backward: Backward) -> Backward:
        @functools.wraps(backward)
        def once(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
            with torch.no_grad():
                results = backward(ctx, *gradients)
            if not torch.is_grad_enabled():
                return results
            leaves = [result.detach().requires_grad_() for result in results if result is not None]
            ends = iter(_End.apply(owner, *leaves))  # type: ignore[no-untyped-call]  # torch's apply is untyped
            return tuple(None if result is None else next(ends) for result in results)

        return once

    return mark


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, owner: str, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.owner = owner
        return gradients

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NoSecondDerivative(
            f"{ctx.owner} cannot be differentiated twice",
            why="its backward pass is a kernel of its own, which has none",
            fix="use the torch operator where a second derivative is needed",
        )
