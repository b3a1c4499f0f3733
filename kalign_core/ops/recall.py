"""A call like one before, answered at once: what an operator allocated and launched, done again on other tensors.

The first call of a kind runs the operator's plain path, whose allocations and launches are noted. Later calls of that
kind find in one look-up a function that checks the tensors, allocates and launches, and nothing else. A call is of the
same kind where its key is equal (what the operator was asked, mode, phase) and each tensor is like the first one's in
class, dtype, device, sizes, strides, alignment and what torch dispatches on. Whatever is not so, or cannot be settled
by comparing numbers, goes down the plain path.

A plain path that is noted may check, take views, ``allocate`` and ``launch``, and nothing besides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch

from kalign_core import context, session
from kalign_core.declare import Kernel
from kalign_core.errors import BadArgument, DeclarationError
from kalign_core.launch import MEMO_LIMIT
from kalign_core.ops.hits import Hit, Noted, Trace, hit_of, span

MOST_VARIANTS = 8

_trace: ContextVar[Trace | None] = ContextVar("kalign_trace", default=None)


def answer(
    key: tuple[Any, ...],
    given: tuple[torch.Tensor, ...],
    plain: Callable[..., Any],
    args: tuple[Any, ...],
    outs: int = 0,
    in_place: Sequence[int] = (),
) -> Any:
    """``plain(*args)``: recalled where a call of the same kind is known, else run and noted for the next one.

    ``given`` are the tensors among ``args`` in order, the last ``outs`` of them written; those may lie exactly on the
    inputs with the indices ``in_place``, and on no other memory of an input. ``key`` says which operator in which form
    and holds every other argument; raises ``DeclarationError`` where one is missing.
    """
    try:
        hit = session.current().calls.get((context.current(), key))
    except TypeError:  # an argument that cannot be hashed is none an operator takes; its checks say so
        return plain(*args)
    if hit is not None:
        result = hit(given)
        if result is not None:
            return result
    return _plain(key, given, plain, args, outs, in_place)


def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A new dense tensor of ``shape`` for a result or a workspace."""
    made = torch.empty(tuple(shape), dtype=dtype, device=device)
    trace = _trace.get()
    if trace is not None:
        trace.made.append(made)
    return made


def launch(kernel: Kernel, *args: Any) -> None:
    """Launch ``kernel`` on its run-time arguments, in parameter order, through its site in the current session."""
    if torch.compiler.is_compiling():  # an operator that is not opaque: its launch breaks the graph
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


def _plain(
    key: tuple[Any, ...],
    given: tuple[torch.Tensor, ...],
    plain: Callable[..., Any],
    args: tuple[Any, ...],
    outs: int,
    in_place: Sequence[int],
) -> Any:
    calls, kind = session.current().calls, (context.current(), key)
    known = getattr(calls.get(kind), "variants", ())
    if any(variant.knows(given) for variant in known):
        return plain(*args)  # recalled as soon as nobody listens and the tensors' device is current
    for tensor in given:
        if tensor.is_neg() or tensor.is_conj():
            raise BadArgument(f"{key[0]}: a negative or conjugate view", fix="tensor.resolve_neg().resolve_conj()")
    with _noted() as trace:
        result = plain(*args)
    _check_key(key, args)
    noted = (trace, given, result)
    if trace.launched and trace.whole and len({tensor.data_ptr() for tensor in given}) < len(given):
        noted = _apart(plain, args)
    hit = hit_of(*noted, like=given, outs=outs, in_place=in_place)
    if hit is not None:
        if len(calls) >= MEMO_LIMIT:
            calls.clear()
        calls[kind] = _any_of((hit, *known)[:MOST_VARIANTS])
    return result


@contextlib.contextmanager
def _noted(*, dry: bool = False) -> Iterator[Trace]:
    outer = _trace.get()
    if outer is not None:
        outer.whole = False  # what a call within this one did is not this one's to repeat
    trace = Trace(dry=dry)
    token = _trace.set(trace)
    try:
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
        raise DeclarationError(
            f"the key {key[0]!r} of a call does not hold its argument {arg!r}",
            why="calls that differ in it would share a launch",
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
    return hit
