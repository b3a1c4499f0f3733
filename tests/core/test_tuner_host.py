"""What a launch costs the host is measured through what is deployed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kalign_core.cache.document import read, render
from kalign_core.hal.replay import ReplayPlatform
from kalign_core.tuner.failures import Guarded
from kalign_core.tuner.host import LEAST_LAUNCHES, MOST_LAUNCHES, ROUNDS, deployed, host_us
from tests.core.cache_samples import entry
from tests.core.test_cache_document import document_of

X = torch.ones(2)


class Pinning:
    """A launch that can be pinned, and counts the calls of either; ``fires`` says whether the pinned one launches."""

    def __init__(self, fires: bool = True) -> None:
        self.fires = fires
        self.calls: list[tuple[Any, ...]] = []
        self.whole: list[tuple[Any, ...]] = []
        self.pinned: tuple[Any, ...] = ()

    def __call__(self, *args: Any) -> None:
        self.whole.append(args)

    def pin(self, args: Sequence[Any], numbers: tuple[Any, ...]) -> Callable[..., bool]:
        self.pinned = (tuple(args), numbers)

        def fire(addresses: Sequence[int | None]) -> bool:
            self.calls.append(tuple(addresses))
            return self.fires

        return fire


class Clock:
    """A clock on which each launch takes two microseconds, and the first round ten times as long."""

    def __init__(self, launches: list[Any]) -> None:
        self._launches, self._asked, self._slow = launches, 0, 0.0

    def __call__(self) -> float:
        self._asked += 1
        if self._asked == 2:
            self._slow = 18e-6 * len(self._launches)
        return 2e-6 * len(self._launches) + self._slow


def test_an_operator_s_launch_is_what_is_timed() -> None:
    """A launch that operators pin is pinned, under its guard too, and called with the tensors' addresses alone."""
    launch = Pinning()
    assert host_us(ReplayPlatform(), -1, Guarded(launch), (X, None, X, 4, 1.0), 10.0, Clock(launch.calls)) == 2.0
    assert launch.pinned == ((X, None, X, 4, 1.0), (4, 1.0))
    assert set(launch.calls) == {(X.data_ptr(), None, X.data_ptr())}
    assert launch.whole == []


def test_bursts_fit_the_queue() -> None:
    """Short kernels are launched in bursts that no queue is too short for, long ones a few times."""
    for device_us, expected in ((0.0, MOST_LAUNCHES), (1.0, MOST_LAUNCHES), (1e6, LEAST_LAUNCHES)):
        launch = Pinning()
        host_us(ReplayPlatform(), -1, launch, (X,), device_us)
        assert len(launch.calls) == (1 + ROUNDS) * expected


def test_what_is_not_fired_is_launched() -> None:
    """Where the pinned launch gives way, to a profiler say, the whole one is called, as it is for an operator."""
    launch = Pinning(fires=False)
    deployed(launch, (X, 4))()
    assert launch.whole == [(X, 4)]


def test_what_cannot_be_pinned_is_called_in_full() -> None:
    """A launch without a pin, or with tensors behind numbers, gets all its arguments."""
    called: list[tuple[Any, ...]] = []
    deployed(lambda *args: called.append(args), (X, 4))()
    launch = Pinning()
    deployed(launch, (X, 4, X))()
    assert (called, launch.whole, launch.calls) == ([(X, 4)], [(X, 4, X)], [])


def test_host_times_are_kept() -> None:
    """An entry with host times is written and read back; one without them, as older files have, has none."""
    timed, old = entry(1, host_us=3.25, reference_host_us=3.5), entry(2)
    found = {made.key: made for made in read(render(document_of(timed, old))).document.entries()}
    assert (found[timed.key].host_us, found[timed.key].reference_host_us) == (3.25, 3.5)
    assert (found[old.key].host_us, found[old.key].reference_host_us) == (None, None)
    assert b"host_us" not in render(document_of(old))
