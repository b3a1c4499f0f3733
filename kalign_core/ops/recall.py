"""A call like one before, answered at once: what an operator allocated and launched, done again on other tensors.

The first call of a kind runs the operator's plain path, whose allocations and launches are noted. Later calls of that
kind find in one look-up a function that checks the tensors, allocates and launches, and nothing else. A call is of the
same kind where its form, mode, phase and numbers are equal and each tensor is like the first one's in class, dtype,
device, sizes, strides, alignment and what torch dispatches on. Whatever is not so, or cannot be settled by comparing
numbers, goes down the plain path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

from kalign_core import context, session
from kalign_core.hal.torch_compat import tangents
from kalign_core.ops.hits import Hit
from kalign_core.ops.noting import first_call, trace_in_force

R = TypeVar("R")
Given = tuple[torch.Tensor, ...]
_Latest = tuple[session.Session, dict[Any, Hit], context.Call, tuple[Any, ...], Hit]


class Form(Generic[R]):
    """One way to call an operator: what answers it plainly, and which of its tensors are written.

    ``plain`` may check, take views, ``allocate`` and ``launch``, and nothing besides. Of the tensors of a call, in
    order, the last ``outs`` are written; those may lie exactly on the inputs with the indices ``in_place``, and on no
    other memory of an input. The shapes of the first ``shapes`` tensors are looked up before tensors are compared: as
    many as tell the calls of a program apart. ``name`` is the form's alone.
    """

    __slots__ = ("_before", "_in_place", "_latest", "_outs", "_plain", "_shapes", "name")

    def __init__(
        self, name: str, plain: Callable[..., R], *, outs: int = 0, in_place: Sequence[int] = (), shapes: int = 1
    ) -> None:
        self.name = name
        self._plain, self._outs, self._in_place, self._shapes = plain, outs, in_place, shapes
        self._before: Any = None
        self._latest: _Latest | None = None

    def again(self, given: Given, rest: tuple[Any, ...] = ()) -> R | None:
        """The answer where the call is of the same kind as the last two of this form; else None, having done nothing.

        For the top of an operator, before anything is asked of its arguments: kinds that need a gradient are not
        among them, and within a call that is noted there is no answer.
        """
        latest = self._latest
        if latest is None:
            return None
        here, calls, call, known, hit = latest
        if (
            session._current is not here
            or here.calls is not calls
            or (context.overriding() or context._default) is not call
            or (rest is not known and not _equal(rest, known))
            or tangents._current_level >= 0
        ):
            return None
        return hit(given)  # type: ignore[no-any-return]  # what ``plain`` gives

    def __call__(self, given: Given, rest: tuple[Any, ...] = (), args: tuple[Any, ...] | None = None) -> R:
        """``plain(*args)``: recalled where a call of the same kind is known, else run and noted for the next one.

        ``given`` are the tensors among ``args``, which are those and then ``rest`` unless said. ``rest`` holds every
        other argument and which of the tensors there are, what a caller may give otherwise as ``exact`` makes it.
        Raises ``DeclarationError`` where an argument is missing, ``BadArgument`` for tensors whose bytes a kernel
        cannot read.
        """
        here = session._current or session.current()  # the latter alone would cost as much as the look-up
        calls, call = here.calls, context.current()
        if self._shapes == 1:
            key = (self.name, given[0].shape, *rest)
        else:
            key = (self.name, *[tensor.shape for tensor in given[: self._shapes]], *rest)
        try:
            hit: Any = calls.get((call, key))
        except TypeError:  # an argument that cannot be hashed is none an operator takes; its checks say so
            return self._plain(*((*given, *rest) if args is None else args))
        if hit is not None and tangents._current_level < 0:
            result: R | None = hit(given)
            if result is not None:
                trace = trace_in_force()
                if trace is not None:
                    trace.whole = False
                if self._before is not hit:  # kinds that take turns are not tried in vain each time
                    self._before, self._latest = hit, None
                elif not hit.gradients:
                    self._latest = (here, calls, call, rest, hit)
                return result
        args = (*given, *rest) if args is None else args
        return first_call(key, given, self._plain, args, self._outs, self._in_place)  # type: ignore[no-any-return]


def _equal(rest: tuple[Any, ...], known: tuple[Any, ...]) -> bool:
    try:
        return rest == known
    except (RuntimeError, ValueError):  # a tensor or an array is no number; the operator's checks say so
        return False
