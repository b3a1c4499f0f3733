"""Calls like one before: which are answered from memory, which are not, and that both give the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import kalign_core as kalign
from kalign_core.errors import BadArgument, CandidateFailed
from kalign_core.hal.replay import Script
from kalign_core.session import Session
from tests.core.pinned import PinnedPlatform, Scaled, fired
from tests.core.scripted import bits, leaf, normals, ops, scripted

X = normals(3, 40)


pytestmark = pytest.mark.usefixtures("either_check")


# --- what is answered from memory ---------------------------------------------------------------------------------


def test_a_call_like_one_before_skips_the_plain_path(session: Session, scaled: Scaled) -> None:
    """The second call of its kind is one launch by address, on its own tensors."""
    scaled(X)
    x = normals(3, 40, seed=1)
    assert bits(scaled(x)) == bits(x * 2)
    assert (scaled.ran, fired(session)) == (1, 1)


def test_an_output_is_written_and_given_back(session: Session, scaled: Scaled) -> None:
    """A recalled call with ``out=`` gives the very tensor, with the result in it."""
    scaled(X, out=torch.empty(3, 40))
    for seed in (1, 2):
        x, out = normals(3, 40, seed=seed), torch.empty(3, 40)
        assert scaled(x, out=out) is out
        assert bits(out) == bits(x * 2)
    assert (scaled.ran, fired(session)) == (1, 2)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: ops.rms_norm(x, w),
        lambda x, w: ops.rms_norm(x, w, out=torch.empty_like(x)),
        lambda x, w: ops.swiglu(x, x),
        lambda x, w: ops.matmul(x.half(), x.half().t()),
        lambda x, w: ops.matmul(x.half(), x.half().t(), x.half()[0, :3]),
        lambda x, w: torch.autograd.grad(ops.rms_norm(x.requires_grad_(), w.requires_grad_()).sum(), (x, w))[1],
        lambda x, w: torch.autograd.grad(ops.swiglu(x.requires_grad_(), x).sum(), (x,))[0],
    ],
)
def test_what_is_recalled_has_the_plain_path_s_bits(session: Session, call: Callable[..., torch.Tensor]) -> None:
    """Operators with one launch and several, with workspaces and without, repeat their first answer."""
    expected = [bits(call(normals(3, 40, seed=seed), normals(40))) for seed in (0, 1)]
    session.forget()
    call(normals(3, 40, seed=2), normals(40))
    before = fired(session)
    assert [bits(call(normals(3, 40, seed=seed), normals(40))) for seed in (0, 1)] == expected
    assert fired(session) > before


# --- what is another kind of call ---------------------------------------------------------------------------------


class Subclass(torch.Tensor):
    """A class of its own."""


def strided(stride: int) -> torch.Tensor:
    """``(3 40)`` with rows ``stride`` apart."""
    return torch.zeros(3, stride)[:, :40]


@pytest.mark.parametrize(
    "x",
    [
        normals(4, 40),
        normals(3, 41),
        normals(3, 40).half(),
        strided(48),
        torch.zeros(121)[1:].view(3, 40),  # not aligned
        torch.nn.Parameter(normals(3, 40), requires_grad=False),
        normals(3, 40).as_subclass(Subclass),
        leaf(3, 40),
    ],
    ids=["rows", "width", "dtype", "stride", "alignment", "parameter", "class", "requires_grad"],
)
def test_a_tensor_of_another_kind_is_not_recalled(scaled: Scaled, x: torch.Tensor) -> None:
    """Class, dtype, shape, strides, alignment and ``requires_grad`` each make another kind, in either direction."""
    for tensor, times in ((X, 1), (x, 2), (X, 2), (x, 2)):
        assert torch.equal(scaled(tensor), tensor * 2)
        assert scaled.ran == times


@pytest.mark.parametrize(
    "mode",
    [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16), lambda: FlopCounterMode(display=False)],
    ids=["inference", "autocast", "dispatch mode"],
)
def test_what_torch_dispatches_on_is_part_of_the_kind(scaled: Scaled, mode: Callable[[], Any]) -> None:
    """Tensors made under a mode that changes what torch does are not those made outside of it."""
    scaled(X)
    with mode():
        x = normals(3, 40)
        assert torch.equal(scaled(x), x * 2)
        assert scaled(x).is_inference() == x.is_inference()
    assert scaled.ran == 2


def test_a_negative_view_is_refused_though_calls_like_it_are_known(scaled: Scaled) -> None:
    """A view that is to be negated when it is read is not read as it lies in memory."""
    scaled(X)
    with pytest.raises(BadArgument, match=r"(?s)scaled: tensor 1 is a negative or conjugate view.*resolve_neg\(\)"):
        scaled(torch._neg_view(X))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: X.to_sparse(), "of layout torch.sparse_coo"),
        (lambda: torch._efficientzerotensor(3, 40), "a Tensor without memory of its own"),
        (lambda: wrapping(X), "a TwoTensor without memory of its own"),
    ],
)
def test_a_tensor_without_bytes_is_refused(scaled: Scaled, make: Callable[[], torch.Tensor], says: str) -> None:
    """What has no strided memory at an address is refused before anything is launched."""
    scaled(X)
    with pytest.raises(BadArgument, match=says):
        scaled(make())
    assert scaled.ran == 1


def wrapping(x: torch.Tensor) -> torch.Tensor:
    """A tensor that stands for two others."""
    from torch.testing._internal.two_tensor import TwoTensor

    return TwoTensor(x, x)  # type: ignore[no-any-return]  # torch's, untyped


ignoring_torch = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # its own use of what it warns of


@ignoring_torch
@pytest.mark.parametrize(
    "transform",
    [lambda call: torch.func.vmap(call)(normals(2, 3, 40)), lambda call: torch.func.jvp(call, (X,), (X,))],
    ids=["vmap", "jvp"],
)
def test_functional_transforms_are_refused(scaled: Scaled, transform: Callable[..., Any]) -> None:
    """Inside ``torch.func`` a call says that it cannot be transformed, also where calls like it are known."""
    scaled(X)
    with pytest.raises(BadArgument, match=r"scaled: tensor 1 is inside torch\.func"):
        transform(scaled)


@ignoring_torch
def test_a_tangent_is_not_dropped(scaled: Scaled) -> None:
    """A tensor that carries a tangent is refused though calls like it are known; one without is computed."""
    scaled(X)
    with torch.autograd.forward_ad.dual_level():
        assert torch.equal(scaled(X), X * 2)
        with pytest.raises(BadArgument, match=r"dual tensor(?s:.)*reverse mode"):
            scaled(torch.autograd.forward_ad.make_dual(X, X))


@pytest.mark.parametrize("one", [0.0, 2.0, -3])
def test_numbers_are_part_of_the_kind(scaled: Scaled, one: float) -> None:
    """Another number is another call, a zero of another sign too."""
    for factor in (one, -one, one, -one):
        assert bits(scaled(X, factor)) == bits(X * factor)
    assert scaled.ran == 2


@pytest.mark.parametrize("change", [{"mode": "read"}, {"phase": "decode"}])
def test_mode_and_phase_are_part_of_the_kind(scaled: Scaled, change: dict[str, str]) -> None:
    """A call in another mode or phase is not answered by what was remembered in this one."""
    scaled(X)
    with kalign.using(**change):
        scaled(X)
    assert scaled.ran == 2


def test_sessions_and_forgetting(session: Session, scaled: Scaled) -> None:
    """Another session knows nothing of this one's calls, and a session that forgot knows none."""
    scaled(X)
    with scripted().active():
        scaled(X)
    scaled(X)
    assert scaled.ran == 2
    session.forget()
    scaled(X)
    assert scaled.ran == 3


# --- while somebody listens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [lambda: ops.swiglu(X, X), lambda: ops.swiglu(X, X, out=torch.empty(3, 40)), lambda: ops.rms_norm(X, X[0])],
)
def test_what_cannot_be_fired_now_is_launched(session: Session, call: Callable[[], torch.Tensor]) -> None:
    """A call that is known and cannot go to the driver right now gives its result, and is recalled again later."""
    expected = bits(call())
    platform = session.platform
    assert isinstance(platform, PinnedPlatform)
    platform.refuses, known = True, dict(session.calls)
    assert bits(call()) == expected
    assert (platform.fired, session.calls) == (0, known)
    platform.refuses = False
    assert bits(call()) == expected
    assert platform.fired == 1


def test_a_launch_that_fails_later_is_not_tried_again() -> None:
    """A remembered launch that fails gives way to the reference for good."""
    fails = {"now": False}
    made = scripted(Script(raises=lambda *_: CandidateFailed("out of resources") if fails["now"] else None))
    with made.active():
        scaled = Scaled()
        scaled(X)
        (hit,) = made.calls.values()
        fails["now"] = True
        assert hit((X,)) is None
        fails["now"] = False
        assert hit((X,)) is None
        assert torch.equal(scaled(X), X * 2)
