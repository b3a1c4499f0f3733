"""What goes wrong with tuning, stores and stored winners stays kalign's own: the caller has its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kalign_core as kalign
from kalign_core.cache.base import MemoryStore
from kalign_core.errors import CandidateFailed, DeviceLost, MissingEntry, NotTunable
from kalign_core.hal.replay import Script
from kalign_core.records import Condition, Config, Entry, EntryKey, Identity
from kalign_core.session import Session
from tests.core.scripted import (
    FASTER,
    SCALE_REFERENCE,
    X,
    counts,
    launched,
    normals,
    prefers,
    scale,
    scripted,
    served,
    store_winner,
    warnings,
)

# --- faults that must stay kalign's own ---------------------------------------------------------------------------


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], tuple[Session, list[int]]]:
    """A session whose tunings raise, and how many there were."""

    def make(error: Exception) -> tuple[Session, list[int]]:
        made, tried = scripted(), []

        def tune(*args: Any, **options: Any) -> Any:
            tried.append(1)
            raise error

        monkeypatch.setattr(made, "tune", tune)
        return made, tried

    return make


@pytest.mark.parametrize(
    "error",
    [
        NotTunable("two runs of the reference disagree"),
        CandidateFailed("the reference does not compile"),
        RuntimeError("out of memory"),
        KeyError("a plugin's own"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_tuning_that_fails_costs_one_warning(
    failing: Callable[..., Any], error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever tuning raises, the caller has the right result, one warning says why, and it is not tried again."""
    made, tried = failing(error)
    assert [served(made, "tune") for _ in range(2)] == [SCALE_REFERENCE] * 2
    made.forget()
    assert served(made, "tune", X[:, ::1]) == SCALE_REFERENCE
    assert len(tried) == 1
    (text,) = warnings(caplog)
    assert text.startswith("scale stays with its reference: ")
    assert str(error.args[0]).splitlines()[0] in text


def test_a_kernel_that_breaks_its_promise_stays_with_its_reference(caplog: pytest.LogCaptureFixture) -> None:
    """A reference whose second run has other bytes is found out by tuning, and the caller still has its result."""
    made = scripted(Script(corrupts=lambda kernel, config, run: run == 2))
    assert served(made, "tune") == SCALE_REFERENCE
    assert len(warnings(caplog)) == 1
    assert counts(made)[1] == 0


def test_candidates_that_lie_are_not_used() -> None:
    """A candidate that writes one wrong bit is never a winner, however fast it is."""
    script = prefers(FASTER, 1.0)
    script.corrupts = lambda kernel, config, run: config == FASTER
    assert served(scripted(script), "tune") == SCALE_REFERENCE


def test_a_lost_device_is_the_caller_s_business(failing: Callable[..., Any]) -> None:
    """A device that no further launch survives is told to the caller, and nothing more is tuned on it."""
    made, tried = failing(DeviceLost("device 0 reports an illegal access", fix="restart the process"))
    with pytest.raises(DeviceLost, match="restart the process"):
        served(made, "tune")
    assert served(made, "tune") == SCALE_REFERENCE
    assert served(made, "tune", normals(3, 8)) == SCALE_REFERENCE
    assert len(tried) == 1


class BrokenStore(MemoryStore):
    """A store that breaks its promise never to raise."""

    def lookup(self, identity: Identity, key: EntryKey) -> Entry | None:
        raise OSError("the disk is gone")


@pytest.mark.parametrize("mode", ["read", "tune"])
def test_a_store_that_raises_costs_one_warning(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """A fault of the store is not the caller's."""
    made = Session(platform=scripted().platform, store=BrokenStore())
    assert [served(made, mode) for _ in range(2)] == [SCALE_REFERENCE] * 2
    (text,) = warnings(caplog)
    assert "the disk is gone" in text


def test_frozen_does_not_hide_a_store_that_raises() -> None:
    """In mode frozen nothing falls back in silence, faults of the store included."""
    with pytest.raises(OSError, match="the disk is gone"):
        served(Session(platform=scripted().platform, store=BrokenStore()), "frozen")


def test_what_must_not_be_stored_serves_this_process(caplog: pytest.LogCaptureFixture) -> None:
    """A winner measured on a throttled device is used here, not stored, and not measured again for every layout."""
    script = prefers(FASTER)
    script.condition = Condition(throttle=("thermal",))
    made = scripted(script)
    assert (served(made, "tune"), counts(made)[1]) == (FASTER, 0)
    timed = len(launched(made))
    made.forget()
    padded = torch.zeros(3, 64)[:, :40].copy_(X)
    assert served(made, "tune") == FASTER
    assert len(launched(made)) == timed + 1
    assert served(made, "tune", padded) == FASTER
    with made.active(), kalign.using(mode="tune"):
        (explained,) = kalign.explain(scale, X)
    assert (explained.config, "not stored" in explained.why) == (FASTER, True)
    assert served(scripted(script), "read") == SCALE_REFERENCE


# --- stored winners are hints -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        SCALE_REFERENCE.replace(ROWS=0),
        SCALE_REFERENCE.replace(ROWS=2),
        SCALE_REFERENCE.replace(enable_fp_fusion=True),
        SCALE_REFERENCE.replace(BLOK=4),
        Config(),
    ],
    ids=str,
)
def test_a_winner_outside_the_space_is_a_miss(config: Config) -> None:
    """A stored configuration that is no candidate today is not launched: read misses, frozen raises, tune tunes."""
    made = scripted(prefers(FASTER))
    store_winner(made, X, config=config)
    assert served(made, "read") == SCALE_REFERENCE
    with pytest.raises(MissingEntry):
        served(made, "frozen")
    assert (served(made, "tune"), counts(made)[1]) == (FASTER, 2)


def test_a_winner_that_cannot_be_bound_gives_way(caplog: pytest.LogCaptureFixture) -> None:
    """Where the stored winner no longer compiles the reference serves the call, after one warning."""
    made = scripted(Script(fails=lambda kernel, config: "does not compile" if config == FASTER else None))
    store_winner(made, X)
    assert [served(made, "read") for _ in range(2)] == [SCALE_REFERENCE] * 2
    (text,) = warnings(caplog)
    assert text.startswith("scale: the stored launch ROWS=8")
    assert "does not compile" in text
