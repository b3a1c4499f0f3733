"""Winners of the past are tried first."""

from __future__ import annotations

import dataclasses
from typing import Any

from kalign_core.hal.replay import Clock, Script
from kalign_core.records import Entry, Toolchain
from kalign_core.tuner.loop import Effort
from kalign_core.tuner.seeds import seeds
from tests.core.test_tuner_session import call, serves, session
from tests.core.tuner_samples import BEST, REFERENCE, SECOND, Bed, key, timed, winner_of

FEW = Effort("few", candidates=1, finalists=1, rounds=5)


def won(config: Any, decided: str = "2026-01-01T00:00:00Z", **changed: Any) -> Entry:
    return Entry(dataclasses.replace(key(), **changed), config, decided=decided)


def test_a_seed_is_tried_first() -> None:
    """Where only one candidate may be tried, it is the one that won elsewhere."""
    here = Bed(Script(time_us=Clock({SECOND: 50.0})))
    report = here.tune(effort=FEW, seeds=(SECOND,))
    assert winner_of(report) == SECOND
    assert timed(here.script) == {REFERENCE, SECOND}


def test_a_seed_that_is_no_candidate_is_not_tried() -> None:
    """A winner that is not in today's space is no candidate, however often it won."""
    here = Bed()
    here.tune(effort=FEW, seeds=(BEST.replace(BLOCK=1024),))
    assert all(config.BLOCK != 1024 for config in timed(here.script))


def test_the_incumbent_comes_before_seeds() -> None:
    """The decision for the very problem is tried before those for others."""
    here = Bed()
    here.tune(effort=FEW, seeds=(SECOND,), incumbent=won(BEST))
    assert timed(here.script) == {REFERENCE, BEST}


def test_the_likeliest_come_first() -> None:
    """What shares phase, arguments, size and toolchain comes first, then the most recent; each once."""
    other = {"problem": "T<=8 H=8"}
    old, new = won(BEST, "2026-01-01T00:00:00Z", **other), won(SECOND, "2026-02-01T00:00:00Z", **other)
    decode = won(REFERENCE, "2026-03-01T00:00:00Z", phase="decode")
    newer_triton = won(SECOND, "2025-01-01T00:00:00Z", toolchain=Toolchain.of(triton="other"))
    assert seeds([decode, old, new], key()) == (SECOND, BEST, REFERENCE)
    assert seeds([old, newer_triton], key()) == (SECOND, BEST)
    assert seeds([old, old], key()) == (BEST,)


def test_other_kernels_are_no_seeds() -> None:
    """A winner of another kernel or another contract says nothing; nor does the problem's own, which is incumbent."""
    assert seeds([won(BEST, kernel="triple"), won(SECOND, contract="double/2"), won(BEST)], key()) == ()


def test_a_session_hands_them_over() -> None:
    """What won for one size is the first candidate at the next."""
    here = session(Script(time_us=Clock({BEST: 80.0})))
    assert call(here, 4)
    here.observer.effort = FEW
    here.platform.script.timed.clear()  # type: ignore[attr-defined]
    assert call(here, 8)
    assert serves(here, 8) == BEST
