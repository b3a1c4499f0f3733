"""The last kind of call of a form, which is answered before a key is made: when it is, and when it never may be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import kalign_core as kalign
from kalign_core.ops.noting import allocate, launch
from kalign_core.ops.recall import Form
from kalign_core.session import Session
from tests.core.pinned import Scaled, fired
from tests.core.scripted import bits, normals, ops, scale_kernel

X = normals(3, 40)
TWO = (2.0,)

pytestmark = pytest.mark.usefixtures("either_check")


@pytest.fixture
def known(session: Session, scaled: Scaled) -> Scaled:
    """An operator whose form has answered one kind of call three times."""
    for _ in range(3):
        scaled(X)
    assert scaled.form.again((X,), TWO) is not None
    return scaled


def test_it_answers_what_was_recalled_twice_in_a_row(session: Session, scaled: Scaled) -> None:
    """A form knows a kind after its first call and two recalled ones, not before."""
    answered = []
    for _ in range(4):
        answered.append(scaled.form.again((X,), TWO) is not None)
        scaled(X)
    assert answered == [False, False, False, True]
    assert scaled.ran == 1


def test_it_launches_on_the_tensors_it_is_given(session: Session, known: Scaled) -> None:
    """The answer is the form's own: one launch, on this call's tensors, into new memory."""
    x, before = normals(3, 40, seed=5), fired(session)
    one, two = known.form.again((x,), TWO), known.form.again((x,), TWO)
    assert one is not None
    assert two is not None
    assert bits(one) == bits(two) == bits(x * 2)
    assert one.data_ptr() != two.data_ptr()
    assert (fired(session), known.ran) == (before + 2, 1)


@pytest.mark.parametrize(
    "x",
    [normals(4, 40), normals(3, 40).half(), torch.zeros(3, 48)[:, :40], normals(3, 40).requires_grad_(), None, 1],
    ids=["rows", "dtype", "stride", "requires_grad", "None", "number"],
)
def test_another_kind_has_no_answer(known: Scaled, x: Any) -> None:
    """Tensors that are not like the last ones, and what is no tensor, are left to the operator."""
    assert known.form.again((x,), TWO) is None


@pytest.mark.parametrize("rest", [(3.0,), (0.0,), (-2.0,), ("2.0",), (torch.ones(2),), (None,), (2.0, 2.0), ()])
def test_other_arguments_have_no_answer(known: Scaled, rest: tuple[Any, ...]) -> None:
    """What is no tensor has to be equal to what it was; what cannot be compared is not."""
    assert known.form.again((X,), rest) is None


def test_the_sign_of_zero_is_told(session: Session, scaled: Scaled) -> None:
    """A factor of -0.0 is not answered with what is known of 0.0."""
    for _ in range(4):
        assert bits(scaled(X, 0.0)) == bits(X * 0.0)
    assert bits(scaled(X, -0.0)) == bits(X * -0.0)


def in_another_mode() -> Any:
    return kalign.using(mode="off" if kalign.context.current().mode != "off" else "read")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "block",
    [
        in_another_mode,
        lambda: kalign.using(phase="decode"),
        forward_ad.dual_level,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
    ],
    ids=["mode", "phase", "forward mode", "inference", "autocast"],
)
def test_what_is_in_force_has_to_be_the_same(known: Scaled, block: Callable[[], Any]) -> None:
    """Mode, phase, differentiation in forward mode and what torch dispatches on make another kind; for their time."""
    with block():
        made = known.form.again((normals(3, 40),), TWO)
    assert made is None
    assert known.form.again((X,), TWO) is not None


def test_equal_modes_are_the_same(known: Scaled) -> None:
    """Entering a block that changes nothing costs no answer."""
    call = kalign.context.current()  # type: ignore[attr-defined]
    with kalign.using(mode=call.mode, phase=call.phase):
        assert known.form.again((X,), TWO) is not None


def test_another_session_has_its_own(session: Session, known: Scaled) -> None:
    """What is known in one session is not answered in another, and is again in the first."""
    with Session(platform=session.platform, store=session.store, configuration=session.settings).active():
        assert known.form.again((X,), TWO) is None
        assert bits(known(X)) == bits(X * 2)
    assert known.ran == 2
    for _ in range(2):
        known(X)
    assert known.ran == 2


def test_what_is_forgotten_is_asked_for_again(session: Session, known: Scaled) -> None:
    """New decisions are seen by the next call of a kind that was the last one."""
    session.forget()
    assert known.form.again((X,), TWO) is None
    known(X)
    assert known.ran == 2


def test_kinds_that_take_turns_are_looked_up(session: Session, scaled: Scaled) -> None:
    """A form whose kind changes with every call tries none of them in vain."""
    y = normals(5, 40)
    for _ in range(4):
        scaled(X), scaled(y)
        assert scaled.form.again((X,), TWO) is None
        assert scaled.form.again((y,), TWO) is None
    assert scaled.ran == 2


def test_within_a_noted_call_there_is_no_answer(known: Scaled) -> None:
    """A path that calls another operator launches what that one launches each time it is called."""
    out = torch.empty(3, 40)

    def plain(x: torch.Tensor) -> torch.Tensor:
        assert known.form.again((x,), TWO) is None
        out.copy_(known(x))
        made = allocate(x.shape, x.dtype, x.device)
        launch(scale_kernel, x, made, *x.shape, x.stride(0), made.stride(0), 3.0)
        return made

    form = Form("outer", plain)
    for seed in range(4):
        x = normals(3, 40, seed=seed)
        assert bits(form((x,))) == bits(x * 3)
        assert bits(out) == bits(x * 2)


CALLS: list[Callable[[torch.Tensor, torch.Tensor], Any]] = [
    ops.swiglu,
    lambda x, y: ops.rms_norm(x, y[0]),
    lambda x, y: ops.rms_norm(x, y[0], residual=y),
    lambda x, y: ops.matmul(x.half(), y.half().t()),
    lambda x, y: ops.rope(x.view(3, 2, 20), y[:, :10].detach(), y[:, 10:20].detach()),
]


def parts(result: Any) -> Iterator[torch.Tensor]:
    yield from result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("call", CALLS, ids=["swiglu", "rms_norm", "rms_norm residual", "matmul", "rope"])
def test_a_gradient_is_not_lost(session: Session, call: Callable[..., Any]) -> None:
    """However often a call was answered without gradients, the next one that needs them has them."""
    for tracked in (False, True):
        with torch.no_grad():
            for seed in range(4):
                call(normals(3, 40, seed=seed).requires_grad_(tracked), normals(3, 40))
    x = normals(3, 40).requires_grad_()
    result = next(parts(call(x, normals(3, 40))))
    assert result.requires_grad
    (gradient,) = torch.autograd.grad(result.float().sum(), x)
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize("call", CALLS, ids=["swiglu", "rms_norm", "rms_norm residual", "matmul", "rope"])
def test_operators_answer_so(session: Session, call: Callable[..., Any]) -> None:
    """The operators of a layer give the bits of their plain path when they are called again and again."""
    given = [(normals(3, 40, seed=seed), normals(3, 40, seed=seed + 9)) for seed in range(4)]
    with kalign.using(phase="decode"):
        plain = []
        for x, y in given:
            session.forget()
            plain.append([bits(part) for part in parts(call(x, y))])
    answered = [[bits(part) for part in parts(call(x, y))] for x, y in given]
    assert answered == plain
