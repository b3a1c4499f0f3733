"""``kalign.warmup``: what it calls ahead, what calls find afterwards, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kalign_core as kalign
from kalign_core.api import recorded
from kalign_core.errors import BadArgument, UnknownName
from kalign_core.hal.replay import Script
from kalign_core.records import Config
from kalign_core.session import Session
from tests.core.pinned import PinnedPlatform
from tests.core.scripted import (
    FASTER,
    SCALE_REFERENCE,
    CountingPlatform,
    CountingStore,
    launched,
    leaf,
    normals,
    ops,
    prefers,
    scale,
    scripted,
)  # fmt: skip


@pytest.fixture
def session() -> Iterator[Session]:
    """A session whose platform counts what it is asked."""
    made = Session(platform=CountingPlatform(prefers(FASTER)), store=CountingStore(), configuration=scripted().settings)
    made.observer.effort = scripted().observer.effort
    with made.active():
        yield made


def script(session: Session) -> Script:
    """What the session's platform is told."""
    return session.platform.script  # type: ignore[attr-defined,no-any-return]  # a scripted platform


@pytest.mark.parametrize("problem", [{"T": 3, "F": 40}, {"T": 3, "F": 40, "dtype": "fp32"}, (normals(3, 40),)])
def test_what_was_warmed_up_is_not_asked_for(session: Session, problem: Any) -> None:
    """A problem given by sizes or by arguments is resolved ahead: a call of it asks nobody."""
    (explained,) = kalign.warmup(scale, [problem])
    assert (explained.kernel, explained.problem, explained.config) == ("scale", "T<=4 F=40", SCALE_REFERENCE)
    before = session.platform.asked, session.store.lookups  # type: ignore[attr-defined]  # both count
    x = normals(3, 40, seed=7)
    assert torch.equal(scale(x), x * 2)
    assert (session.platform.asked, session.store.lookups) == before  # type: ignore[attr-defined]


def test_backward_is_warmed_up_too() -> None:
    """Every kernel that going back runs is resolved: a call with gradients resolves no more."""
    made = scripted()
    x, weight = leaf(2, 8), leaf(8)
    with made.active():
        explained = kalign.warmup(ops.rms_norm, [(x, weight)])
        kernels = [call.kernel for call in recorded(ops.rms_norm, x, weight)]
        known = {kernel: dict(made.site(kernel).memo) for kernel in kernels}
        ops.rms_norm(x, weight).sum().backward()
    assert [e.kernel for e in explained] == [kernel.name for kernel in kernels]
    assert len(kernels) > 1
    assert all(known.values())
    assert {kernel: dict(made.site(kernel).memo) for kernel in kernels} == known


def test_gradients_of_the_caller_are_left_alone(session: Session) -> None:
    """Warming up on one's own parameters adds nothing to their gradients."""
    x, weight = leaf(2, 8), leaf(8)
    kalign.warmup(ops.rms_norm, [(x, weight)])
    assert (x.grad, weight.grad) == (None, None)


def test_equal_problems_are_explained_once(session: Session) -> None:
    """Sizes of one bucket are one launch, named once."""
    assert len(kalign.warmup(scale, [{"T": 3, "F": 40}, {"T": 4, "F": 40}, {"T": 3, "F": 48}])) == 2


@pytest.mark.parametrize(("mode", "config"), [("tune", FASTER), ("read", SCALE_REFERENCE), ("off", SCALE_REFERENCE)])
def test_the_mode_in_force_counts(session: Session, mode: str, config: Config) -> None:
    """Mode ``tune`` tunes what is not known yet, the others do not; calls launch what was found."""
    with kalign.using(mode=mode):
        kalign.warmup(scale, [{"T": 3, "F": 40}])
        launched(session).clear()
        scale(normals(3, 40))
    assert launched(session) == [("scale", config)]


def test_a_capture_after_warming_up_launches_what_is_known(session: Session) -> None:
    """In a capture the winner that was found ahead is launched, and neither store nor platform is asked."""
    with kalign.using(mode="tune"):
        kalign.warmup(scale, [{"T": 3, "F": 40}])
        script(session).capturing = True
        before = session.platform.asked, session.store.lookups  # type: ignore[attr-defined]  # both count
        launched(session).clear()
        scale(normals(3, 40))
        assert launched(session) == [("scale", FASTER)]
        assert (session.platform.asked, session.store.lookups) == before  # type: ignore[attr-defined]


def test_a_capture_without_warming_up_launches_the_reference(session: Session) -> None:
    """Nothing is tuned or kept in a capture; the same call is tuned after it."""
    x = normals(3, 40)
    with kalign.using(mode="tune"):
        script(session).capturing = True
        for _ in range(2):
            scale(x)
            ops.swiglu(x, x)
        assert {config for name, config in launched(session) if name == "scale"} == {SCALE_REFERENCE}
        assert (session.store.puts, session.calls) == (0, {})  # type: ignore[attr-defined]  # it counts
        script(session).capturing = False
        launched(session).clear()
        scale(x)
    assert launched(session)[-1] == ("scale", FASTER)


def test_whole_calls_are_remembered() -> None:
    """After warming up with one's own tensors the first call is one launch by address."""
    made = Session(platform=PinnedPlatform(), store=CountingStore(), configuration=scripted().settings)
    x = normals(3, 40)
    with made.active():
        kalign.warmup(ops.swiglu, [(x, x.clone())])
        made.platform.fired = 0  # type: ignore[attr-defined]  # it counts
        ops.swiglu(normals(3, 40), normals(3, 40))
    assert made.platform.fired == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("op", "problem", "error", "says"),
    [
        (scale, {"T": 3, "M": 40}, UnknownName, "unknown dimension of scale 'M'"),
        (scale, {"T": 3, "F": 40, "dtype": "int8"}, UnknownName, "unknown dtype of scale 'int8'"),
        (scale, {"T": 3}, BadArgument, r"(?s)scale needs F as well.*kalign.warmup\(kalign.ops.scale, \[{'T': 4"),
        (scale, {"T": "3", "F": 40}, BadArgument, "scale: T='3' is no size"),
        (scale, 3, BadArgument, r"(?s)3 is no problem.*kalign.warmup\(kalign.ops.scale, \[{'T': 4, 'F': 40}\]\)"),
        (scale, "T=3", BadArgument, "'T=3' is no problem"),
        ("scale", (normals(3, 40),), BadArgument, "'scale' is no operator"),
    ],
)
def test_what_is_no_problem_is_refused(session: Session, op: Any, problem: Any, error: Any, says: str) -> None:
    """Wrong sizes, dtypes, problems and operators say what to type."""
    with pytest.raises(error, match=says):
        kalign.warmup(op, [problem])


def test_warming_up_in_a_capture_is_refused(session: Session) -> None:
    """It would synchronise, compile and allocate, which a capture does not survive."""
    script(session).capturing = True
    with pytest.raises(BadArgument, match=r"(?s)kalign.warmup during graph capture.*before the capture"):
        kalign.warmup(scale, [{"T": 3, "F": 40}])
    assert launched(session) == []
