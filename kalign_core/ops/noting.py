"""The first call of a kind: what an operator's plain path allocates and launches, written down while it runs.

A plain path that is noted may check, take views, ``allocate`` and ``launch``, and nothing besides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from kalign_core import context, session
from kalign_core.declare import Kernel
from kalign_core.errors import BadArgument, DeclarationError
from kalign_core.hal import torch_compat
from kalign_core.launch import MEMO_LIMIT
from kalign_core.ops.hits import Hit, Noted, Trace, hit_of, knows, span, within_each_other

MOST_VARIANTS = 8

_trace: ContextVar[Trace | None] = ContextVar("kalign_trace", default=None)
trace_in_force: Callable[[], Trace | None] = _trace.get
"""The trace of the call that is being noted here; what is recalled within that call would be missing in it."""


def exact(number: Any) -> Any:
    """``number`` as a part of a key: what compares as equal and is another is told apart.

    Such are 0.0 and -0.0, and True, 1, 1.0 and a tensor of one, of which operators take some and refuse the others.
    Asks nothing of a tensor, whose device the host would wait for.
    """
    kind = number.__class__
    return (number or repr(number)) if kind is float else (kind, number)


def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A new dense tensor of ``shape`` for a result or a workspace."""
    made = torch.empty(tuple(shape), dtype=dtype, device=device)
    trace = _trace.get()
    if trace is not None:
        trace.made.append(made)
    return made


def launch(kernel: Kernel, *args: Any) -> None:
    """Launch ``kernel`` on its run-time arguments, in parameter order, through its site in the current session."""
    if is_dynamo_compiling():  # an operator that is not opaque: its launch breaks the graph
        torch.compiler.disable(launch)(kernel, *args)  # type: ignore[no-untyped-call]  # torch's decorator
        return
    site, trace = session.current().site(kernel), _trace.get()
    dry = trace is not None and trace.dry
    launched = site.memo.get(site.key(context.current(), args)) if dry else site(*args)
    if trace is None:
        return
    if launched is None:
        trace.whole = False
    else:
        trace.launched.append(Noted(launched, kernel, args))


# --- the first call of a kind -------------------------------------------------------------------------------------


def first_call(
    key: tuple[Any, ...],
    given: tuple[torch.Tensor, ...],
    plain: Callable[..., Any],
    args: tuple[Any, ...],
    outs: int,
    in_place: Sequence[int],
) -> Any:
    """``plain(*args)``, noted so that ``session.calls`` repeats the next call with ``key``; as ``recall.Form`` says."""
    calls, kind = session.current().calls, (context.current(), key)
    known = getattr(calls.get(kind), "variants", ())
    if any(knows(variant, given) for variant in known) and not torch_compat.forward_mode():
        return plain(*args)  # recalled as soon as nobody listens and the tensors' device is current
    for i, tensor in enumerate(given):
        check_readable(key[0], i, tensor)
    with _noted() as trace:
        result = plain(*args)
    if not trace.whole or not trace.launched:
        return result
    _check_key(key, args)
    _check_writes(key, trace.made)
    noted = _apart(plain, args) if within_each_other(given) else (trace, given, result)
    hit = hit_of(*noted, like=given, outs=outs, in_place=in_place) if _can_be_found(key, args) else None
    if hit is not None and knows(hit, given):
        if len(calls) >= MEMO_LIMIT:
            calls.clear()
        calls[kind] = _any_of((hit, *known)[:MOST_VARIANTS])
    return result


def check_readable(owner: str, name: str | int, tensor: Any) -> None:
    """Raise ``BadArgument`` for a tensor whose bytes a kernel cannot read; what is no tensor is left to others.

    ``name`` is the argument's name, or its place among the tensors of the call.
    """
    found = torch_compat.unreadable(tensor) if isinstance(tensor, torch.Tensor) else None
    if found is not None:
        what, instead = found
        raise BadArgument(
            f"{owner}: {name if isinstance(name, str) else f'tensor {name + 1}'} is {what}",
            why="a kernel reads and writes bytes at an address, past everything that torch keeps beside them",
            fix=f"call {instead}",
        )


@contextlib.contextmanager
def _noted(*, dry: bool = False) -> Iterator[Trace]:
    outer = _trace.get()
    if outer is not None:
        outer.whole = False  # what a call within this one did is not this one's to repeat
    trace = Trace(dry=dry)
    token = _trace.set(trace)
    try:
        with context.restored(context.Call(*context.current())):  # equal to the one outside, and not that one
            yield trace
    finally:
        _trace.reset(token)


def _apart(plain: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Trace, tuple[torch.Tensor, ...], Any]:
    """A trace of ``plain`` on stand-ins for tensors of ``args`` that share an address; launches nothing."""
    swapped = tuple(_stand_in(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)
    with _noted(dry=True) as trace:
        result = plain(*swapped)
    return trace, tuple(arg for arg in swapped if isinstance(arg, torch.Tensor)), result


def _stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of memory of its own with the shape, strides, dtype and alignment of ``tensor``."""
    item = tensor.element_size()
    offset = (tensor.data_ptr() & 15) // item
    room = torch.empty(span(tensor) // item + offset, dtype=tensor.dtype, device=tensor.device)
    return room.as_strided(tensor.shape, tensor.stride(), offset)


def _check_key(key: tuple[Any, ...], args: tuple[Any, ...]) -> None:
    for arg in args:
        if arg is None or isinstance(arg, torch.Tensor) or any(arg is part or arg == part for part in key):
            continue
        if exact(arg) not in key:
            raise DeclarationError(
                f"the key {key[0]!r} of a call does not hold its argument {arg!r}",
                why="calls that differ in it would share a launch",
            )


def _can_be_found(key: tuple[Any, ...], args: Iterable[Any]) -> bool:
    """Whether a call with ``key`` is found again, and no other in its place.

    It is told from those that have a zero of another sign among ``args``. One with NaN, which equals nothing, is never
    found: each such call would leave an entry.
    """
    numbers = [part for arg in args for part in (arg if isinstance(arg, tuple) else (arg,)) if part.__class__ is float]
    return all(number == number and (number or repr(number) in key) for number in numbers)


def _check_writes(key: tuple[Any, ...], made: Sequence[torch.Tensor]) -> None:
    """Raise ``DeclarationError`` where torch wrote a tensor of a noted call: calls like it would leave that out."""
    if any(map(torch_compat.torch_writes, made)):
        raise DeclarationError(
            f"the plain path of {key[0]!r} writes a new tensor by other means than a launch",
            why="a call that is recalled repeats allocations and launches, and nothing besides",
            fix="write it in a kernel, or before the form is called",
        )


def _any_of(variants: tuple[Hit, ...]) -> Hit:
    """The answer of the first of ``variants`` that has one."""
    first, others = variants[0], variants[1:]
    if not others:
        first.variants = variants  # type: ignore[attr-defined]  # functions take attributes
        return first

    def hit(given: tuple[torch.Tensor, ...]) -> Any:
        result = first(given)
        if result is None:
            for other in others:
                result = other(given)
                if result is not None:
                    break
        return result

    hit.variants = variants  # type: ignore[attr-defined]  # functions take attributes
    hit.gradients = any(variant.gradients for variant in variants)  # type: ignore[attr-defined]
    return hit
