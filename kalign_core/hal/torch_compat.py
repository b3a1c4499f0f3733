"""The only file that touches torch's internals: one check of many tensors, an allocation, a version counter.

torch promises none of this between minor versions. Each piece is tried once on tensors of the host when it is first
asked for; where it is absent or answers otherwise, the same question is asked through torch's public functions, which
is correct and slower by about a microsecond. It must not import triton or anything of kalign.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

Check = Callable[..., bool]


def same_kind(tensors: Sequence[torch.Tensor]) -> Check:
    """A check that other tensors are just like ``tensors`` in everything but their address and contents.

    ``check(*others)`` holds where class, dtype, device, sizes, strides, ``requires_grad`` and what torch dispatches on
    (inference, autocast, functional transforms, conjugate and negative views) are the same for each. Any number or
    kind of other arguments gives False, and so does one tensor passed twice where ``tensors`` were several.
    """
    if not _guards_work():
        return _described(tensors)
    alike = [next(i for i, first in enumerate(tensors) if first is tensor) for tensor in tensors]
    unique = sorted(set(alike))
    check = _guards([tensors[i] for i in unique])
    return check if len(unique) == len(tensors) else _repeated(check, alike, unique)


def _repeated(check: Check, alike: Sequence[int], unique: Sequence[int]) -> Check:
    """``check`` for calls that pass one tensor several times, which torch's own never lets pass.

    ``alike`` says for each tensor the place where it is passed first, ``unique`` which places that are.
    """

    def check_repeated(*others: Any) -> bool:
        return (
            len(others) == len(alike)
            and all(others[i] is others[j] for i, j in enumerate(alike))
            and check(*[others[i] for i in unique])
        )

    return check_repeated


def _guards(tensors: Sequence[torch.Tensor]) -> Check:
    from torch._C._dynamo.guards import TensorGuards

    sizes: Any = [list(tensor.shape) for tensor in tensors]
    strides: Any = [list(tensor.stride()) for tensor in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


@functools.cache
def _guards_work() -> bool:
    """Whether torch's own check of tensors is there and tells apart what has to be told apart."""
    try:
        base = torch.zeros(4, 8)
        check = _guards([base, torch.ones(4, 8)])
        others = (base[:2], base.t(), base[:, :4], base.double(), torch.nn.Parameter(base), base.new_empty(8, 4).t())
        alike = (torch.ones(4, 8), torch.zeros(4, 8))
        if not check(*alike) or any(check(alike[0], other) for other in (*others, None, 1)):
            return False
        with torch.inference_mode():
            return not check(alike[0], torch.zeros(4, 8))
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return False


def _described(tensors: Sequence[torch.Tensor]) -> Check:
    count, expected = len(tensors), [_description(tensor) for tensor in tensors]

    def check(*others: Any) -> bool:
        return len(others) == count and all(
            isinstance(other, torch.Tensor) and _description(other) == like
            for other, like in zip(others, expected, strict=True)
        )

    return check


def _description(tensor: torch.Tensor) -> tuple[Any, ...]:
    c: Any = torch._C
    dispatched_on = f"{c._dispatch_keys(tensor)} {c._dispatch_tls_local_include_set()}"
    return (tensor.__class__, tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad,
            dispatched_on)  # fmt: skip


def allocator(like: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that gives a new tensor of the shape, strides and dtype of the dense tensor ``like`` on its device.

    Where ``like`` is on a GPU, that device has to be the current one whenever the function is called.
    """
    shape, stride = tuple(like.shape), like.stride()
    quick = getattr(sys.modules.get("torch._C._dynamo.guards"), f"_empty_strided_{like.device.type}", None)
    if quick is None:
        return functools.partial(torch.empty, shape, dtype=like.dtype, device=like.device)
    return functools.partial(quick, shape, stride, like.dtype)


def _find_increment() -> Callable[[Sequence[torch.Tensor]], None]:
    tensor = torch.zeros(1)
    quick: Any = getattr(torch._C, "_increment_version", None)
    try:
        quick((tensor,))
    except (TypeError, RuntimeError):
        return torch.autograd.graph.increment_version
    return quick if tensor._version == 1 else torch.autograd.graph.increment_version


mark_written = _find_increment()
"""Tell autograd that tensors, none of them made in inference mode, were written: it cannot see a kernel do so."""
