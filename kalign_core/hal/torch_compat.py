"""The only file that touches torch's internals: one check of many tensors, an allocation, a version counter.

torch promises none of this between minor versions. Each piece is tried once on tensors of the host when it is first
asked for; where it is absent or answers otherwise, the same question is asked in a way that is correct and slower by
some microseconds. It must not import triton or anything of kalign.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils import _python_dispatch

Check = Callable[..., bool]
_PROXY: Any = torch._C._TorchDispatchModeKey.PROXY


def same_kind(tensors: Sequence[torch.Tensor]) -> Check:
    """A check that other tensors are just like ``tensors`` in everything but their address and contents.

    ``check(*others)`` holds where class, dtype, device, sizes, strides, ``requires_grad`` and what torch dispatches on
    (inference, autocast, dispatch modes, functional transforms, conjugate and negative views) are the same for each.
    Arguments of another kind give False. ``others`` have to be as many; whether some of them are one tensor passed
    several times is settled only where ``tensors`` were so.
    """
    if not _guards_work():
        return _described(tensors)
    identities = [*map(id, tensors)]
    if len(set(identities)) == len(tensors):
        return _guards(tensors)
    alike = [*map(identities.index, identities)]
    unique = sorted(set(alike))
    return _repeated(_guards([tensors[i] for i in unique]), alike, unique)


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
        with nothing_in_force():
            base, other = (torch.zeros(4, 8, device="cpu") for _ in range(2))
            check = _guards([base, other])
            alike = check(other, base)
            seen = [check(base, stranger) for stranger in (*_strangers(base), None, 1)]
            with torch.autocast("cpu", torch.bfloat16):
                seen.append(check(base, other))
            with torch.inference_mode():
                seen.append(check(base, torch.zeros(4, 8, device="cpu")))
        return alike and not any(seen)
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return False


def _strangers(base: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tensors that each differ from ``base: (4 8)`` in one thing that a launch may depend on."""
    return (
        base[:2],
        base.new_zeros(4, 16)[:, :8],
        base.new_empty(8, 4).t(),
        base.double(),
        base.to("meta"),
        base.detach().requires_grad_(),
        base.as_subclass(torch.nn.Buffer),
        torch._neg_view(base),
    )


@contextlib.contextmanager
def nothing_in_force() -> Iterator[None]:
    """Whatever this thread is under, torch works in the block as in a new one; no mode learns of what is done there.

    That is: no dispatch or function mode (a default device is one), no autocast, no inference mode.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(_python_dispatch._disable_current_modes())
        for device_type in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


_guards_work()  # asked now, while no functional transform is likely to be in force


def _described(tensors: Sequence[torch.Tensor]) -> Check:
    expected = [_description(tensor) for tensor in tensors]

    def check(*others: Any) -> bool:
        return all(
            isinstance(other, torch.Tensor) and _description(other) == like
            for other, like in zip(others, expected, strict=True)
        )

    return check


def _description(tensor: torch.Tensor) -> tuple[Any, ...]:
    c: Any = torch._C
    sets = c._dispatch_keys(tensor), c._dispatch_tls_local_include_set(), c._dispatch_tls_local_exclude_set()
    dispatched_on = tuple(keys.raw_repr() for keys in sets)
    return (tensor.__class__, tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad,
            dispatched_on)  # fmt: skip


def allocator(like: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A function that gives a new tensor of the shape, strides and dtype of the dense tensor ``like`` on its device.

    Where ``like`` is on a GPU, that device has to be the current one whenever the function is called; see
    ``is_current``.
    """
    shape, stride = tuple(like.shape), like.stride()
    quick = getattr(sys.modules.get("torch._C._dynamo.guards"), f"_empty_strided_{like.device.type}", None)
    if quick is None:
        return functools.partial(torch.empty, shape, dtype=like.dtype, device=like.device)
    return functools.partial(quick, shape, stride, like.dtype)


def is_current(device: torch.device) -> Callable[[], bool]:
    """A function that says whether ``device`` is the one that memory is allocated on; the host always is."""
    if device.type != "cuda":
        return lambda: True
    current, index = torch._C._cuda_getDevice, device.index
    return lambda: current() == index


def _find_increment() -> Callable[[Sequence[torch.Tensor]], None]:
    quick: Any = getattr(torch._C, "_increment_version", None)
    try:
        with nothing_in_force():
            tensor = torch.zeros(1, device="cpu")
            quick((tensor,))
            works = tensor._version == 1
    except (AttributeError, TypeError, RuntimeError):
        works = False
    return quick if works else torch.autograd.graph.increment_version


mark_written = _find_increment()
"""Tell autograd that tensors, none of them made in inference mode, were written: it cannot see a kernel do so."""


def torch_writes(tensor: torch.Tensor) -> int:
    """How often torch knows ``tensor`` to have been written; always 0 for one made in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


# --- what a kernel cannot be called on ----------------------------------------------------------------------------


tangents: Any = forward_ad
"""Whose ``_current_level`` is 0 or more in forward mode: for where a call of ``forward_mode`` costs too much."""


def forward_mode() -> bool:
    """Whether derivatives are taken in forward mode here, so that tensors may carry a tangent."""
    return bool(tangents._current_level >= 0)


def unreadable(tensor: torch.Tensor) -> tuple[str, str] | None:
    """What ``tensor`` is and what to call instead, where a kernel could not read it at its address; None if it could.

    Such a tensor is one inside a functional transform or a trace, without strided memory, or changed lazily.
    """
    c: Any = torch._C
    if c._functorch.is_functorch_wrapped_tensor(tensor):
        return "inside torch.func", "torch.autograd.grad for gradients; leading dimensions in place of torch.func.vmap"
    if c._get_dispatch_mode(_PROXY) is not None or c._get_tracing_state() is not None:
        return "being traced", "torch.compile or torch.export, for which operators are opaque"
    if getattr(tensor, "fake_mode", None) is not None:
        return "a fake tensor", "the operator on real tensors; torch.compile does so by itself"
    if tensor.layout != torch.strided:
        return f"of layout {tensor.layout}", "it on tensor.to_dense()"
    if tensor.is_neg() or tensor.is_conj():
        return "a negative or conjugate view", "it on tensor.resolve_neg().resolve_conj()"
    if forward_mode() and forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]  # torch's
        return "a dual tensor of forward-mode differentiation", "torch.autograd.grad, in reverse mode"
    return _without_memory(tensor)


def _without_memory(tensor: torch.Tensor) -> tuple[str, str] | None:
    if tensor.device.type == "meta" or not tensor.numel():
        return None  # refused for its device, or never read
    try:
        if tensor.data_ptr():
            return None
    except RuntimeError:
        pass  # torch's way to say so of some kinds
    return f"a {tensor.__class__.__name__} without memory of its own", "the operator on the tensors it stands for"
