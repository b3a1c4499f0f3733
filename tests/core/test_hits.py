"""From what a call allocated and launched to what repeats it: extents, slots, and calls that cannot be repeated."""

from __future__ import annotations

import itertools
from collections import namedtuple
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from kalign_core.errors import CandidateFailed
from kalign_core.hal import torch_compat
from kalign_core.kernels.swiglu import swiglu_kernel
from kalign_core.ops.hits import Hit, Noted, Trace, extent, hit_of, knows, overlap, within_each_other
from tests.core.scripted import normals, scale_kernel


class Recorded:
    """A launch that writes down what it was called with, and can be pinned."""

    def __init__(self, pinnable: bool = True) -> None:
        self.called: list[tuple[Any, ...]] = []
        self.fired: list[list[Any]] = []
        self.refuses, self.raises = False, False
        if pinnable:
            self.pin = self._pin

    def __call__(self, *args: Any) -> None:
        if self.raises:
            raise CandidateFailed("out of resources")
        self.called.append(args)

    def _pin(self, args: Sequence[Any], numbers: tuple[Any, ...]) -> Callable[[Sequence[Any]], bool]:
        def fire(addresses: Sequence[Any]) -> bool:
            if not self.refuses:
                self.fired.append([*addresses])
            return not self.refuses

        return fire


def noted(launch: Recorded, *tensors: torch.Tensor) -> Noted:
    """A launch of ``scale`` as if it had been made."""
    return Noted(launch, scale_kernel, (*tensors, 3, 40, 40, 40, 2.0))


def rows(count: int = 3) -> torch.Tensor:
    return normals(count, 40)


def remembered(launch: Recorded, outs: int = 0) -> tuple[Hit | None, tuple[torch.Tensor, ...]]:
    """What repeats one launch from the first tensor to the last, and the tensors."""
    x, out = rows(), rows()
    given = (x, out) if outs else (x,)
    trace = Trace(made=[] if outs else [out], launched=[noted(launch, x, out)])
    return hit_of(trace, given, out, like=given, outs=outs, in_place=(0,)), given


# --- what is repeated ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outs", [0, 1])
def test_a_pinned_launch_takes_the_addresses_of_its_call(outs: int) -> None:
    """The tensors of a later call stand where those of the first one stood, made ones behind them."""
    launch = Recorded()
    hit, _ = remembered(launch, outs)
    assert hit is not None
    given = (rows(), rows())[: 1 + outs]
    result = hit(given)
    assert launch.fired == [[given[0].data_ptr(), result.data_ptr()]]
    assert (result is given[-1]) is bool(outs)
    assert launch.called == []


@pytest.mark.parametrize("outs", [0, 1])
def test_an_unpinned_launch_takes_the_tensors(outs: int) -> None:
    """A launch that needs more than its driver call is called as it was, with the first call's numbers."""
    launch = Recorded(pinnable=False)
    hit, _ = remembered(launch, outs)
    assert hit is not None
    given = (rows(), rows())[: 1 + outs]
    result = hit(given)
    ((x, out, *numbers),) = launch.called
    assert (x is given[0], out is result, numbers) == (True, True, [3, 40, 40, 40, 2.0])


def test_several_launches_share_what_is_made_between_them() -> None:
    """A workspace that one launch writes and the next one reads is one tensor in every call."""
    first, second = Recorded(), Recorded(pinnable=False)
    x, space, out = rows(), rows(), rows()
    trace = Trace(made=[space, out], launched=[noted(first, x, space), noted(second, space, out)])
    hit = hit_of(trace, (x,), (out, x), like=(x,))
    assert hit is not None
    given = rows()
    made, same = hit((given,))
    ((space, out, *_),) = second.called
    assert (first.fired, out is made, same is given) == ([[given.data_ptr(), space.data_ptr()]], True, True)


def test_a_launch_that_cannot_be_fired_among_several_is_called() -> None:
    """Where somebody starts to listen between two launches, the second one is made the long way."""
    first, second = Recorded(), Recorded()
    x, space, out = rows(), rows(), rows()
    trace = Trace(made=[space, out], launched=[noted(first, x, space), noted(second, space, out)])
    hit = hit_of(trace, (x,), out, like=(x,))
    assert hit is not None
    second.refuses = True
    result = hit((x,))
    assert (len(first.fired), second.fired, second.called[0][1] is result) == (1, [], True)


def test_slots_follow_the_launch_s_order() -> None:
    """A launch that takes its tensors in another order than the call is given them in that order."""
    launch = Recorded()
    x, out = rows(), rows()
    hit = hit_of(Trace(launched=[noted(launch, x, out)]), (out, x), out, like=(out, x))
    assert hit is not None
    a, b = rows(), rows()
    assert hit((a, b)) is a
    assert launch.fired == [[b.data_ptr(), a.data_ptr()]]


@pytest.mark.parametrize("pinnable", [True, False])
def test_what_has_no_version_counter_is_not_marked(monkeypatch: pytest.MonkeyPatch, pinnable: bool) -> None:
    """An output made in inference mode is written without telling autograd, which knows nothing of it."""
    marked: list[Any] = []
    monkeypatch.setattr(torch_compat, "mark_written", marked.append)
    launch = Recorded(pinnable)
    with torch.inference_mode():
        hit, given = remembered(launch, outs=1)
        assert hit is not None
        assert hit(given) is given[1]
    assert marked == []


def two_into_one(launch: Recorded) -> Hit:
    """What repeats one launch that reads two tensors and writes a third one."""
    given = (rows(), rows(), rows())
    trace = Trace(launched=[Noted(launch, swiglu_kernel, (*given, 3, 40, 40, 40, 40))])
    hit = hit_of(trace, given, given[2], like=given, outs=1, in_place=(0, 1))
    assert hit is not None
    return hit


def test_an_output_behind_two_inputs_is_written_and_given_back() -> None:
    """A call with three tensors fires their addresses, in whatever buffers they lie, and autograd learns of each."""
    launch = Recorded()
    hit = two_into_one(launch)
    sets = [(rows(), rows(), rows()) for _ in range(2)]
    for given in (*sets, sets[0], sets[0]):
        assert hit(given) is given[2]
    fired = [[tensor.data_ptr() for tensor in given] for given in (*sets, sets[0], sets[0])]
    assert (launch.fired, [out._version - rows()._version for *_, out in sets]) == (fired, [3, 1])


def test_an_output_over_two_inputs_is_sent_back() -> None:
    """An output may lie on one of two inputs, not shifted against either; what is sent back is not marked."""
    launch = Recorded()
    hit = two_into_one(launch)
    x, room = rows(), normals(4, 40)
    out, before = room[1:], room._version
    assert [hit(given) for given in ((x, room[:3], out), (room[:3], x, out))] == [None, None]
    launch.refuses = True
    assert hit((x, out, out.detach())) is None
    assert (launch.fired, room._version) == ([], before)
    launch.refuses = False
    same = out.detach()
    assert hit((x, out, same)) is same


# --- what sends a call back ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("outs", [0, 1])
def test_a_pinned_launch_that_does_not_fire_answers_nothing(outs: int) -> None:
    """The plain path answers while the device is another or somebody listens; the call stays known."""
    launch = Recorded()
    hit, given = remembered(launch, outs)
    assert hit is not None
    launch.refuses, version = True, given[-1]._version
    assert hit(given) is None
    assert knows(hit, given)
    assert given[-1]._version == version


def test_nothing_is_made_on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """While another device is current, several launches are left to the plain path before anything is allocated."""
    current = [True]
    monkeypatch.setattr(torch_compat, "is_current", lambda device: lambda: current[0])
    launch = Recorded(pinnable=False)
    hit, given = remembered(launch)
    assert hit is not None
    current[0] = False
    monkeypatch.setattr(torch, "empty", None)
    assert hit(given) is None
    assert launch.called == []


def test_a_launch_that_fails_is_given_up() -> None:
    """After a failure the plain path answers, also once the launch would work again."""
    launch = Recorded(pinnable=False)
    hit, given = remembered(launch)
    assert hit is not None
    launch.raises = True
    assert hit(given) is None
    launch.raises = False
    assert hit(given) is None


@pytest.mark.parametrize("outs", [0, 1])
@pytest.mark.parametrize("pinnable", [True, False])
def test_other_tensors_are_not_taken(outs: int, pinnable: bool) -> None:
    """Every form of a remembered call looks at kind and alignment of each of its tensors before it launches."""
    launch = Recorded(pinnable)
    hit, given = remembered(launch, outs)
    assert hit is not None
    unaligned = torch.zeros(121)[1:].view(3, 40)
    for place, wrong in itertools.product(range(len(given)), (rows(4), unaligned, rows().half())):
        other = tuple(wrong if i == place else tensor for i, tensor in enumerate(given))
        assert hit(other) is None
        assert not knows(hit, other)
    assert (launch.called, launch.fired) == ([], [])


@pytest.mark.parametrize("outs", [0, 1])
def test_code_for_unaligned_tensors_is_for_those(outs: int) -> None:
    """What was remembered of a tensor at an odd address does not answer for one at an even address, nor the reverse."""
    x, out, launch = torch.zeros(121)[1:].view(3, 40), rows(), Recorded()
    given = (x, out) if outs else (x,)
    trace = Trace(made=[] if outs else [out], launched=[noted(launch, x, out)])
    hit = hit_of(trace, given, out, like=given, outs=outs)
    assert hit is not None
    assert hit((rows(), *given[1:])) is None
    assert hit(given) is not None


def test_every_tensor_that_is_written_is_marked() -> None:
    """Of a call that writes several tensors and gives the last one, autograd learns of all."""
    launch, given = Recorded(), (rows(), rows(), rows())
    hit = hit_of(Trace(launched=[noted(launch, *given)]), given, given[-1], like=given, outs=2)
    assert hit is not None
    before = [tensor._version for tensor in given]
    assert hit(given) is given[-1]
    assert [tensor._version for tensor in given] == [before[0], before[1] + 1, before[2] + 1]


def test_a_buffer_that_was_taken_once_is_still_compared() -> None:
    """Addresses that passed before say nothing of others: an output moved onto the input's rows is seen."""
    launch = Recorded()
    hit, _ = remembered(launch, outs=1)
    assert hit is not None
    room = rows(5)
    assert hit((room[:3], rows())) is not None
    assert hit((room[:3], room[1:4])) is None
    assert hit((room[:3], room[:3])) is not None


def test_an_output_may_lie_on_an_input_of_its_own_strides_only() -> None:
    """In place is in place: the same start with other strides would be read after it was written."""
    x, out = torch.zeros(4, 4), torch.zeros(4, 4)
    given = (x.t(), out)
    trace = Trace(launched=[noted(Recorded(), x, out)])
    hit = hit_of(trace, given, out, like=given, outs=1, in_place=(0,))
    assert hit is not None
    assert hit((out.t(), out)) is None


def test_an_output_may_lie_on_the_inputs_it_may_lie_on() -> None:
    """In place is allowed input by input, however alike they are."""
    x, y, out = rows(), rows(), rows()
    given = (x, y, out)
    trace = Trace(launched=[Noted(Recorded(), swiglu_kernel, (*given, 3, 40, 40, 40, 40))])
    hit = hit_of(trace, given, out, like=given, outs=1, in_place=(1,))
    assert hit is not None
    assert hit((x, y, y.view(3, 40))) is not None
    assert hit((x, y, x.view(3, 40))) is None


# --- what cannot be repeated --------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["first", "second"])  # what is tested is its class


@pytest.mark.parametrize(
    "result",
    [lambda x, out: out.view(-1), lambda x, out: (out,), lambda x, out: Pair(x, out), lambda x, out: [x, out],
     lambda x, out: (), lambda x, out: None, lambda x, out: 3],
)  # fmt: skip
def test_results_that_would_come_back_otherwise(result: Callable[..., Any]) -> None:
    """A view, a list, a tuple of one or of another class is no result that a repeated call could give."""
    x, out = rows(), rows()
    trace = Trace(made=[out], launched=[noted(Recorded(), x, out)])
    assert hit_of(trace, (x,), result(x, out), like=(x,)) is None


def test_traces_that_do_not_stand_for_other_calls() -> None:
    """Nothing launched, a launch for the moment, an unknown tensor or two at one address: none is repeated."""
    x, out, launch = rows(), rows(), Recorded()
    one = noted(launch, x, out)
    assert hit_of(Trace(made=[out]), (x,), out, like=(x,)) is None
    assert hit_of(Trace(whole=False, made=[out], launched=[one]), (x,), out, like=(x,)) is None
    assert hit_of(Trace(made=[out], launched=[one, noted(launch, rows(), out)]), (x,), out, like=(x,)) is None
    assert hit_of(Trace(made=[out], launched=[one]), (x, x.view(-1)), out, like=(x, x)) is None


# --- how tensors lie ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.zeros(3, 8), (96, 32, 32)),
        (torch.zeros(3, 16)[:, :8], (160, 32, 64)),
        (torch.zeros(8, 3).t(), (96, 0, 0)),
        (torch.zeros(2, 3, 8), (192, 0, 0)),
        (torch.zeros(8), (32, 0, 0)),
        (torch.zeros(1, 8).expand(3, 8), (32, 32, 0)),
        (torch.zeros(()), (4, 0, 0)),
        (torch.zeros(0, 8), (0, 0, 0)),
    ],
)
def test_extents(tensor: torch.Tensor, expected: tuple[int, int, int]) -> None:
    """An extent is the bytes from first to behind the last, and where there are dense rows their bytes and pitch."""
    assert extent(tensor) == expected


def layouts() -> dict[str, torch.Tensor]:
    """Every place of some small layouts in one buffer of 24 elements."""
    room = torch.zeros(24)
    shapes = {"2x2 of 4": ((2, 2), (4, 1)), "3x1 of 4": ((3, 1), (4, 1)), "1x3": ((1, 3), (3, 1)), "5": ((5,), (1,)),
              "2x2 of 1": ((2, 2), (1, 1)), "2x2 of 3": ((2, 2), (3, 1)), "t": ((2, 2), (1, 3))}  # fmt: skip
    return {
        f"{name} at {start}": room.as_strided(shape, stride, start)
        for name, (shape, stride) in shapes.items()
        for start in range(10)
    }


def test_overlap_never_misses_a_shared_element() -> None:
    """Against the elements themselves: what shares one overlaps, and rows of one pitch do so only then."""
    known = layouts()
    elements = {name: {*torch.arange(24).as_strided(t.shape, t.stride(), t.storage_offset()).flatten().tolist()}
                for name, t in known.items()}  # fmt: skip
    for (name, a), (other, b) in itertools.product(known.items(), repeat=2):
        shared = bool(elements[name] & elements[other])
        found = overlap(b.data_ptr() - a.data_ptr(), extent(a), extent(b))
        assert found or not shared, (name, other)
        if "of 4" in name and "of 4" in other:
            assert found == shared, (name, other)


def test_tensors_within_each_other() -> None:
    """One start inside another's bytes is seen in any order; neighbours and slices that only touch are not."""
    buffer = torch.zeros(6, 8)
    for pair in ((buffer, buffer[1:]), (buffer[1:], buffer), (buffer, buffer.view(-1)), (buffer[:, 4:], buffer)):
        assert within_each_other(pair)
    assert not within_each_other((buffer[:2], buffer[2:], torch.zeros(3)))
