"""Tuning at first execution when the moment is wrong: memory that is short passes, a device that is lost does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kalign_core import context
from kalign_core.errors import DeviceLost, NoMemory, NotNow, NotTunable
from kalign_core.hal.replay import Script
from kalign_core.observer import FIRST_PAUSE_S, MOST_PAUSES, Pauses
from kalign_core.problems import problem_of
from kalign_core.records import Config
from kalign_core.session import Session
from tests.core.scripted import warnings
from tests.core.test_tuner_session import begun, call, fast, serves, session
from tests.core.tuner_samples import BEST, REFERENCE, Bed, double_kernel


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def short(clock: Clock, until_s: float) -> Session:
    """A session on a device whose memory runs out when anything but the caller's one launch is made, until then."""

    def raises(kernel: str, config: Config, run: int) -> BaseException | None:
        return torch.OutOfMemoryError("CUDA out of memory") if clock.now < until_s and run > 1 else None

    here = session(fast(raises=raises))
    here._pauses = Pauses(clock)
    return here


# --- memory -------------------------------------------------------------------------------------------------------


def test_pauses_double_and_end(clock: Clock) -> None:
    """After a shortage comes a pause, twice as long after each, and after some the reference is settled for."""
    pauses = Pauses(clock)
    assert pauses.is_over("x")
    for count in range(MOST_PAUSES):
        assert pauses.met("x") == (count < MOST_PAUSES - 1)
        clock.now += FIRST_PAUSE_S * 2**count - 0.1
        assert not pauses.is_over("x")
        clock.now += 0.1
        assert pauses.is_over("x")
    assert pauses.is_over("another")


def test_a_problem_is_tuned_when_memory_is_back(clock: Clock) -> None:
    """Where memory ran out the reference serves for now, and after a pause the problem is tuned."""
    here = short(clock, until_s=20.0)
    assert call(here)
    assert serves(here) == REFERENCE
    assert len(begun(here)) == 1
    clock.now = FIRST_PAUSE_S
    assert call(here)
    assert serves(here) == BEST


def test_memory_that_stays_short_is_settled(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Where memory runs out every time, tuning is tried a few times only, and the warnings say so."""
    here = short(clock, until_s=float("inf"))
    for _ in range(MOST_PAUSES):
        assert call(here)
        clock.now += 1000.0
    here.platform.script.raises = Script().raises  # type: ignore[attr-defined]
    assert serves(here) == REFERENCE
    assert len(begun(here)) == MOST_PAUSES
    assert [("for now" in text, "out of memory" in text) for text in warnings(caplog)] == [(True, True), (False, True)]


@pytest.mark.parametrize(
    "raises",
    [
        lambda kernel, config, run: torch.OutOfMemoryError("CUDA out of memory") if run == 2 else None,
        lambda kernel, config, run: RuntimeError("Triton Error [CUDA]: out of memory") if run == 2 else None,
    ],
    ids=["torch", "the driver"],
)
def test_the_reference_without_memory_is_no_verdict(raises: Callable[..., Any]) -> None:
    """A reference that cannot be checked for want of memory is not said to be untunable for good."""
    with pytest.raises(NoMemory, match="out of memory"):
        Bed(Script(raises=raises)).tune()


def test_other_reasons_are_verdicts() -> None:
    """A reference that disagrees with itself is not a matter of memory."""
    script = Script(corrupts=lambda kernel, config, run: config == REFERENCE and run == 2)
    with pytest.raises(NotTunable) as raised:
        Bed(script).tune()
    assert not isinstance(raised.value, NoMemory)


# --- graphs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("met", [1, 5, 10])
def test_a_problem_met_beside_a_capture_is_tuned_later(
    clock: Clock, met: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where another thread captures a graph the reference serves for now, nobody is to blame, and it is tuned later."""
    here, waits = short(clock, until_s=0.0), [0]

    def synchronize(device: int) -> None:
        waits[0] += 1
        if waits[0] >= met and clock.now == 0.0:
            raise NotNow("device -1 cannot be waited for: another thread captures a graph")

    monkeypatch.setattr(here.platform, "synchronize", synchronize)
    assert call(here)
    assert serves(here) == REFERENCE
    assert here.pool.failures._failed == {}
    assert ["for now" in text for text in warnings(caplog)] == [True]
    clock.now = FIRST_PAUSE_S
    assert call(here)
    assert serves(here) == BEST


@pytest.mark.parametrize("run", [2, 3, 40])
def test_a_reference_that_meets_a_capture_is_no_verdict(run: int) -> None:
    """A launch or an allocation that a capture forbids says nothing of the kernel, whoever meets it."""
    words = "CUDA error: operation not permitted when stream is capturing"
    with pytest.raises(NotNow, match="capturing"):
        Bed(Script(raises=lambda kernel, config, n: RuntimeError(words) if n == run else None)).tune()


# --- the device ---------------------------------------------------------------------------------------------------


def losing() -> Session:
    return session(fast(loses=lambda kernel, config, run: config == BEST))


def test_a_lost_device_is_one_clear_warning(caplog: pytest.LogCaptureFixture) -> None:
    """What happened, to which kernel, why nothing more is tuned and what to type are said, once."""
    here = losing()
    with pytest.raises(DeviceLost):
        call(here)
    for size in (8, 16):
        here.platform.script.lost = False  # type: ignore[attr-defined]
        assert call(here, size)
    (text,) = warnings(caplog)
    assert "illegal memory access while double was tuned" in text
    assert "why: " in text
    assert "try: restart the process" in text


def test_nobody_tunes_on_a_lost_device() -> None:
    """After a loss an explicit tuning raises the same error and launches nothing, on whatever thread."""
    here = losing()
    with pytest.raises(DeviceLost):
        call(here)
    here.platform.script.lost = False  # type: ignore[attr-defined]
    here.platform.script.launched.clear()  # type: ignore[attr-defined]
    x, out = torch.ones(8, 8), torch.empty(8, 8)
    with pytest.raises(DeviceLost, match="while double was tuned"):
        here.tune(double_kernel, problem_of(double_kernel, (x, out, 8, 8), "train"), -1)
    assert here.platform.script.launched == []  # type: ignore[attr-defined]


def test_decisions_serve_on(caplog: pytest.LogCaptureFixture) -> None:
    """What was decided before a loss goes on serving calls that the device still answers."""
    here = session(fast())
    assert call(here)
    here.platform.script.loses = lambda kernel, config, run: config == BEST  # type: ignore[attr-defined]
    with pytest.raises(DeviceLost):
        call(here, 8)
    here.platform.script.lost = False  # type: ignore[attr-defined]
    here.platform.script.loses = Script().loses  # type: ignore[attr-defined]
    assert serves(here) == BEST
    assert serves(here, 8) == REFERENCE


def test_blame_waits_for_the_device() -> None:
    """A launch that fails because another has lost the device is not what failed."""

    def raises(kernel: str, config: Config, run: int) -> BaseException | None:
        if config == BEST:
            script.lost = True  # the fault of an earlier launch shows in this one
            return RuntimeError("CUDA error: an illegal memory access was encountered")
        return None

    script = Script(raises=raises)
    here = Bed(script)
    with pytest.raises(DeviceLost):
        here.tune()
    script.raises, script.lost = Script().raises, False
    assert here.tune().failed == []


def test_modes_that_never_tune_are_not_stopped() -> None:
    """A lost device ends tuning; mode read goes on answering from what is stored."""
    here = losing()
    with pytest.raises(DeviceLost):
        call(here)
    here.platform.script.lost = False  # type: ignore[attr-defined]
    x, out = torch.ones(8, 8), torch.empty(8, 8)
    with context.using(mode="read"):
        here.site(double_kernel)(x, out, 8, 8)
    assert torch.equal(out, x * 2)
