"""From what one call allocated and launched to the function that repeats it on other tensors.

The function compares numbers only: torch's own check that the tensors are like the first ones, the alignment of their
addresses, and for tensors that are written over, that their memory lies apart from what is read. Whatever it cannot
settle so it leaves to the operator's plain path, by answering None.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from kalign_core.declare import Kernel
from kalign_core.errors import CandidateFailed
from kalign_core.hal import torch_compat
from kalign_core.hal.base import Launch, Pinned

Hit = Callable[[tuple[torch.Tensor, ...]], Any]
"""Called with the tensors of a call; gives its result, or None where the plain path has to answer."""
Addresses = list[int]
Admission = Callable[[Addresses], bool]
_address = torch.Tensor.data_ptr


class Noted(NamedTuple):
    """One launch as it was made, with its arguments in parameter order."""

    launch: Launch
    kernel: Kernel
    args: tuple[Any, ...]


@dataclass
class Trace:
    """What a plain path allocated and launched.

    ``whole`` is false where something in it does not stand for other calls; ``dry`` says that nothing is launched.
    """

    dry: bool = False
    whole: bool = True
    made: list[torch.Tensor] = field(default_factory=list)
    launched: list[Noted] = field(default_factory=list)


class Stage(NamedTuple):
    """One launch of a call. ``slots`` says which of the call's tensors it takes, -1 for none."""

    launch: Launch
    slots: tuple[int, ...]
    numbers: tuple[Any, ...]
    pinned: Pinned | None


def hit_of(
    trace: Trace,
    given: tuple[torch.Tensor, ...],
    result: Any,
    *,
    like: tuple[torch.Tensor, ...],
    outs: int = 0,
    in_place: Sequence[int] = (),
) -> Hit | None:
    """What repeats ``trace``, a call on ``given``, on tensors like ``like``, the last ``outs`` of which are written.

    Those may lie exactly on the ones with the indices ``in_place``. None where the call cannot be repeated: a launch
    that does not stand for good, a tensor of unknown origin, addresses that leave open which tensor is which.
    """
    tensors = (*given, *trace.made)
    addresses = {tensor.data_ptr(): place for place, tensor in enumerate(tensors)}
    stages = [stage for stage in (_stage(noted, addresses) for noted in trace.launched) if stage is not None]
    places = _places(result, tensors)
    if not trace.whole or not stages or len(stages) < len(trace.launched):
        return None
    if len(addresses) < len(tensors) or places is None:
        return None
    check, admit = torch_compat.same_kind(like), _admission(like, outs, in_place)
    make = [torch_compat.allocator(tensor) for tensor in trace.made]
    finish = _finish(like, outs, operator.itemgetter(*places))
    grads = any(tensor.requires_grad for tensor in like)
    fire = _fire_in_order(stages[0], len(tensors)) if len(stages) == 1 else None
    hit: Any
    if fire is None:
        hit = _general(check, admit, make, stages, finish, torch_compat.is_current(like[0].device))
    elif outs == 1 and not make and not grads and places == (len(given) - 1,):
        into = _into_third if len(given) == 3 else _into_one
        hit = into(check, admit, fire, like[-1].is_inference())
    elif not outs and len(make) == 1 and places == (len(given),):
        hit = _one_made(check, admit, make[0], fire)
    else:
        hit = _afresh(check, admit, make, fire, finish)
    hit.kin, hit.gradients = (check, admit), grads
    return hit  # type: ignore[no-any-return]  # a function with attributes


def knows(hit: Hit, given: tuple[torch.Tensor, ...]) -> bool:
    """Whether ``hit`` would answer a call on ``given``, were nobody listening and their device current."""
    check, admit = hit.kin  # type: ignore[attr-defined]  # functions take attributes
    return bool(check(*given) and admit([*map(_address, given)]))


def _into_one(check: torch_compat.Check, admit: Admission, fire: Pinned, inference: bool) -> Hit:
    """One driver call that writes the last of the call's tensors, which is the result."""
    mark, seen = torch_compat.mark_written, None

    def hit(given: tuple[torch.Tensor, ...]) -> Any:
        nonlocal seen
        if not check(*given):
            return None
        at, known = [*map(_address, given)], seen
        if at != known:  # buffers that are used again are compared once, and their launch is put together once
            if not admit(at):
                return None
            seen = known = at
        if not fire(known):
            return None
        out = given[-1]
        if not inference:
            mark((out,))
        return out

    return hit


def _into_third(check: torch_compat.Check, admit: Admission, fire: Pinned, inference: bool) -> Hit:
    """``_into_one`` for the three tensors that most operators take with ``out=``, in half the bytecode."""
    mark, seen, address = torch_compat.mark_written, None, _address

    def hit(given: tuple[torch.Tensor, ...]) -> Any:
        nonlocal seen
        if not check(*given):
            return None
        first, second, out = given
        at, known = [address(first), address(second), address(out)], seen
        if at != known:
            if not admit(at):
                return None
            seen = known = at
        if not fire(known):
            return None
        if not inference:
            mark((out,))
        return out

    return hit


def _one_made(check: torch_compat.Check, admit: Admission, new: Callable[[], torch.Tensor], fire: Pinned) -> Hit:
    """One driver call that writes one new tensor, which is the result."""

    def hit(given: tuple[torch.Tensor, ...]) -> Any:
        if not check(*given):
            return None
        at = [*map(_address, given)]
        if not admit(at):
            return None
        made = new()
        at.append(made.data_ptr())
        return made if fire(at) else None

    return hit


def _afresh(
    check: torch_compat.Check,
    admit: Admission,
    make: Sequence[Callable[[], torch.Tensor]],
    fire: Pinned,
    finish: Callable[[tuple[torch.Tensor, ...]], Any],
) -> Hit:
    """One driver call; results and workspaces are made anew behind the call's tensors."""

    def hit(given: tuple[torch.Tensor, ...]) -> Any:
        if not check(*given):
            return None
        at = [*map(_address, given)]
        if not admit(at):
            return None
        made = [new() for new in make]
        return finish((*given, *made)) if fire([*at, *map(_address, made)]) else None

    return hit


def _fire_in_order(stage: Stage, count: int) -> Pinned | None:
    """The pinned launch of ``stage``, called with the addresses of the ``count`` tensors of a call in their order."""
    fire, slots = stage.pinned, stage.slots
    if fire is None or slots == tuple(range(count)):
        return fire
    take = _taker(slots)
    latest: tuple[Any, tuple[int | None, ...]] = (None, ())  # so that the same addresses stay the same, in order too

    def fire_in_order(addresses: Sequence[int | None]) -> bool:
        nonlocal latest
        known, ordered = latest
        if addresses is not known:
            ordered = take((*addresses, None))[:-1]
            latest = (addresses, ordered)
        return fire(ordered)

    return fire_in_order


def _general(
    check: torch_compat.Check,
    admit: Admission,
    make: Sequence[Callable[[], torch.Tensor]],
    stages: Sequence[Stage],
    finish: Callable[[tuple[torch.Tensor, ...]], Any],
    here: Callable[[], bool],
) -> Hit:
    """Launches one after the other, each of them pinned or not."""
    steps, usable = [_step(stage) for stage in stages], True

    def hit(given: tuple[torch.Tensor, ...]) -> Any:
        nonlocal usable
        if not usable or not check(*given):
            return None
        at = [*map(_address, given)]
        if not admit(at) or not here():
            return None
        made = [new() for new in make]
        tensors: tuple[Any, ...] = (*given, *made, None)
        addresses = (*at, *map(_address, made), None)
        try:
            for step in steps:
                step(tensors, addresses)
        except CandidateFailed:
            usable = False  # the plain path launches the reference instead, now and from now on
            return None
        return finish(tensors)

    return hit


def _step(stage: Stage) -> Callable[[tuple[Any, ...], tuple[int | None, ...]], None]:
    launch, slots, numbers, fire = stage
    take = _taker(slots)

    def step(tensors: tuple[Any, ...], addresses: tuple[int | None, ...]) -> None:
        if fire is None or not fire(take(addresses)[:-1]):
            launch(*take(tensors)[:-1], *numbers)

    return step


def _taker(slots: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Picks those ``slots``, of which -1 is the last place, and the first once more: one alone is no tuple."""
    return operator.itemgetter(*slots, *slots[:1])


def _stage(noted: Noted, addresses: dict[int, int]) -> Stage | None:
    """A noted launch in terms of the call's tensors; None where it took another one, such as a copy."""
    launch, kernel, args = noted
    count = sum(name in kernel.args for name in kernel.parameters)
    if any(name in kernel.args for name in kernel.parameters[count:]):
        return None
    slots = [-1 if tensor is None else addresses.get(tensor.data_ptr()) for tensor in args[:count]]
    pin = getattr(launch, "pin", None)
    known = tuple(slot for slot in slots if slot is not None)
    if len(known) < count:
        return None
    return Stage(launch, known, args[count:], pin(args, args[count:]) if pin else None)


def _places(result: Any, tensors: Sequence[torch.Tensor]) -> tuple[int, ...] | None:
    """Where each part of a result stands among ``tensors``; None where one is not there."""
    several = isinstance(result, tuple)
    if several and (result.__class__ is not tuple or len(result) < 2):
        return None  # would come back as another kind of tuple, or as none
    by_identity = {id(tensor): place for place, tensor in enumerate(tensors)}
    places = tuple(by_identity.get(id(part)) for part in (result if several else (result,)))
    return None if None in places else places  # type: ignore[return-value]  # none of them is None


def _finish(
    given: Sequence[torch.Tensor], outs: int, pick: Callable[[tuple[torch.Tensor, ...]], Any]
) -> Callable[[tuple[torch.Tensor, ...]], Any]:
    """From all tensors of a call to its result; marks as written what was given to be."""
    if not outs:
        return pick
    mark, first, behind = torch_compat.mark_written, len(given) - outs, len(given)

    def finish(tensors: tuple[torch.Tensor, ...]) -> Any:
        mark(tensors[first:behind])
        return pick(tensors)

    return pick if given[-1].is_inference() else finish


def _admission(given: Sequence[torch.Tensor], outs: int, in_place: Sequence[int]) -> Admission:
    """Whether a launch for ``given`` may take tensors like them at other addresses."""
    aligned = [tensor.data_ptr() & 15 == 0 for tensor in given]
    alike = _all_aligned if all(aligned) else lambda at: [address & 15 == 0 for address in at] == aligned
    if not outs:
        return alike
    first, extents = len(given) - outs, [extent(tensor) for tensor in given]
    pairs = [
        (out, i, extents[out], extents[i], i in in_place and given[i].stride() == given[out].stride())
        for out in range(first, len(given))
        for i in range(out)
    ]
    near = [(out, i, -other.span, written.span) for out, i, written, other, _ in pairs]
    gradients, grad_enabled = any(tensor.requires_grad for tensor in given), torch.is_grad_enabled

    def admit(at: Addresses) -> bool:
        if not alike(at) or (gradients and grad_enabled()):
            return False
        for out, i, below, behind in near:  # most buffers lie far from each other
            if below < at[i] - at[out] < behind:
                return not any(
                    overlap(at[i] - at[out], written, other) and not (may_coincide and at[i] == at[out])
                    for out, i, written, other, may_coincide in pairs
                )
        return True

    return admit


def _all_aligned(at: Addresses) -> bool:
    for address in at:  # noqa: SIM110  # a generator would double what this costs
        if address & 15:
            return False
    return True


class Extent(NamedTuple):
    """Bytes of memory that a tensor takes: from its first to behind its last, of one row, from row to row.

    ``pitch`` is 0 where it is not made of dense rows at equal distances.
    """

    span: int
    row: int
    pitch: int


def extent(tensor: torch.Tensor) -> Extent:
    """How ``tensor`` lies in memory."""
    taken, item, shape, stride = span(tensor), tensor.element_size(), tensor.shape, tensor.stride()
    if taken and len(shape) == 2 and stride[1] == 1:
        return Extent(taken, shape[1] * item, stride[0] * item)
    return Extent(taken, 0, 0)


def span(tensor: torch.Tensor) -> int:
    """Bytes from the first element of ``tensor`` to behind the last."""
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.numel() * tensor.element_size()
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def overlap(distance: int, a: Extent, b: Extent) -> bool:
    """Whether tensors that lie so, ``b`` starting ``distance`` bytes behind ``a``, may share a byte.

    Column slices of one row-major buffer beside each other do not.
    """
    if not -b.span < distance < a.span or not a.span or not b.span:
        return False
    if a.pitch != b.pitch or not a.pitch:
        return True
    return not a.row <= distance % a.pitch <= a.pitch - b.row


def within_each_other(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one of ``tensors`` starts inside another, so that an address does not say which of them is meant."""
    behind = -1
    for start, taken in sorted([(tensor.data_ptr(), span(tensor)) for tensor in tensors]):
        if start < behind:
            return True
        behind = max(behind, start + max(taken, 1))
    return False
