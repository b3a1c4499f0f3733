"""Operators as torch's dispatcher knows them: what ``torch.compile`` puts into its graphs in place of a launch.

Only traced calls go this way; an eager call would pay for the dispatcher and gain nothing. A graph holds the operator
as one opaque node with a fake implementation for shapes, so that sizes stay symbolic and the launch that fits the real
ones is resolved when the graph runs, in the mode and phase then in force. Registered with ``torch.library`` directly:
``custom_op`` costs three times as much per call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kalign_core.errors import NoSecondDerivative

_LIBRARY: Any = torch.library.Library("kalign", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's


def opaque(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    save: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Register ``kalign::schema`` with ``run`` on every device and ``fake`` for shapes; gives the operator.

    ``save(ctx, inputs, output)`` and ``backward(ctx, *gradients)`` are its derivative, as ``register_autograd`` takes
    them; without one, going back through a result raises ``NoSecondDerivative``.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.needs_fixed_stride_order, torch.Tag.pt2_compliant_tag))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"kalign::{name}", fake, lib=_LIBRARY)
    if not schema.endswith("-> ()"):
        torch.library.register_autograd(f"kalign::{name}", backward or _end(name), setup_context=save, lib=_LIBRARY)
    return getattr(torch.ops.kalign, name).default  # type: ignore[no-any-return]  # torch's namespace is untyped


def _end(name: str) -> Callable[..., Any]:
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NoSecondDerivative(
            f"kalign::{name} has no derivative",
            why="it is the backward pass of an operator, a kernel of its own",
            fix="use the torch operator where a second derivative is needed",
        )

    return backward
