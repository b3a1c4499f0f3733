"""Recalled calls and memory: outputs on inputs, one memory under several names, what autograd learns of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kalign_core.errors import BadArgument
from kalign_core.ops.noting import allocate, launch
from kalign_core.ops.recall import Form
from kalign_core.session import Session
from tests.core.pinned import Scaled, fired
from tests.core.scripted import bits, launched, leaf, normals, ops, scale_kernel

X = normals(3, 40)


pytestmark = pytest.mark.usefixtures("either_check")


# --- tensors that are written -------------------------------------------------------------------------------------


def slices(*starts: int) -> list[torch.Tensor]:
    """Column slices of one buffer, 40 wide."""
    buffer = normals(3, 200)
    return [buffer[:, start : start + 40] for start in starts]


def test_an_output_over_an_input_is_refused_though_calls_like_it_are_known(scaled: Scaled) -> None:
    """Memory that is shared in part, in either direction, is seen by its addresses."""
    room = normals(5, 40)
    scaled(normals(3, 40), out=torch.empty(3, 40))
    for x, out in ((room[:3], room[1:4]), (room[1:4], room[:3])):
        with pytest.raises(BadArgument, match="out shares memory with x"):
            scaled(x, out=out)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_an_output_may_be_the_input(session: Session, scaled: Scaled, order: tuple[int, ...]) -> None:
    """A call in place is recalled as any other, whichever was the first."""
    pairs = [(X, torch.empty(3, 40)), (y := normals(3, 40), y), (z := normals(3, 40), z.view(3, 40))]
    for _ in range(2):
        before = fired(session)
        for i in order:
            x, out = pairs[i]
            expected = bits(x * 2)
            assert bits(scaled(x, out=out)) == expected
    assert fired(session) == before + 3


def test_an_output_may_not_be_an_input_that_it_may_not_be(session: Session) -> None:
    """The weight of a norm is no place for its result, though its bytes are those of a row."""
    rows = normals(1, 40)
    ops.rms_norm(normals(1, 40), normals(40), out=torch.empty(1, 40))
    with pytest.raises(BadArgument, match="out shares memory with weight"):
        ops.rms_norm(normals(1, 40), rows[0], out=rows)


def test_slices_of_one_buffer_are_recalled(session: Session, scaled: Scaled) -> None:
    """Columns beside each other share no byte: such a call is remembered like one on buffers of their own."""
    for start in (40, 48, 160):
        x, out = slices(0, start)
        assert bits(scaled(x, out=out)) == bits(x * 2)
    assert fired(session) == 2
    x, out = slices(0, 39)
    with pytest.raises(BadArgument, match="out shares memory"):
        scaled(x, out=out)


def test_gradients_and_out_exclude_each_other_on_a_known_call(scaled: Scaled) -> None:
    """A call that was remembered without gradients is refused where they are wanted."""
    x, out = leaf(3, 40), torch.empty(3, 40)
    with torch.no_grad():
        for _ in range(2):
            scaled(x, out=out)
    with pytest.raises(BadArgument, match="out= with tensors that require gradients"):
        scaled(x, out=out)


@pytest.mark.parametrize("call", [lambda out: Scaled()(X, out=out), lambda out: ops.rms_norm(X, X[0], out=out)])
def test_autograd_learns_of_every_write(session: Session, call: Callable[[torch.Tensor], Any]) -> None:
    """Each call, recalled or not, counts as a write of its output, by one launch or several."""
    versions = []
    out = torch.empty(3, 40)
    for _ in range(3):
        before = out._version
        call(out)
        versions.append(out._version > before)
    assert versions == [True] * 3


def test_an_output_made_in_inference_mode_is_written(scaled: Scaled) -> None:
    """A tensor without a version counter is written all the same."""
    with torch.inference_mode():
        for seed in range(3):
            x, out = normals(3, 40, seed=seed), torch.empty(3, 40)
            assert bits(scaled(x, out=out)) == bits(x * 2)
    assert scaled.ran == 1


# --- one memory under several names -------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [True, False])
def test_one_tensor_passed_twice(session: Session, first: bool) -> None:
    """Whichever came first, calls with one tensor twice and with two tensors each read what they were given."""
    x, y = normals(2, 8), normals(2, 8, seed=1)
    expected = {2: bits(ops.swiglu(x, y)), 1: bits(ops.swiglu(x, x.clone()))}
    session.forget()
    for _ in range(3):
        for count in (1, 2) if first else (2, 1):
            assert bits(ops.swiglu(x, (x, y)[count - 1])) == expected[count]
            assert bits(ops.swiglu(x, (x.view(2, 8), y)[count - 1])) == expected[count]
    assert fired(session) > 0


def test_a_first_call_launches_once(session: Session) -> None:
    """Telling tensors that share an address apart needs no second launch."""
    x = normals(2, 8)
    ops.swiglu(x, x)
    Scaled()(x, out=x)
    assert len(launched(session)) == 2


def test_a_call_within_a_call_on_one_memory_launches_once(session: Session) -> None:
    """A call that is not remembered is not gone through again to tell its tensors apart."""
    inner = Scaled()

    def plain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        made = allocate(x.shape, x.dtype, x.device)
        launch(scale_kernel, x, made, *x.shape, x.stride(0), made.stride(0), 2.0)
        return inner(y, 3.0)

    x = normals(3, 40)
    given = (x, x.view(3, 40))
    form = Form("outer", plain)
    for count in (2, 4):
        form(given)
        assert len(launched(session)) == count


def test_an_input_inside_another_says_nothing_of_the_next(session: Session) -> None:
    """What a path reads behind the start of one tensor is not taken for another that happens to lie there."""

    def plain(joined: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        half, made = joined[:, 40:], allocate(other.shape, other.dtype, other.device)
        launch(scale_kernel, half, made, *half.shape, half.stride(0), made.stride(0), 2.0)
        return made

    form = Form("halves", plain)
    joined, apart = normals(3, 80), normals(3, 80, seed=1)
    assert bits(form((joined, joined[:, 40:]))) == bits(joined[:, 40:] * 2)
    assert bits(form((joined, apart[:, 40:]))) == bits(joined[:, 40:] * 2)
