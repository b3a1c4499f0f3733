"""What a launch costs the host is measured through what is deployed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kalign_core.hal.replay import ReplayPlatform
from kalign_core.tuner.failures import Guarded
from kalign_core.tuner.host import LEAST_LAUNCHES, MOST_LAUNCHES, ROUNDS, deployed, host_us

X = torch.ones(2)


class Pinned:
    """A launch that can be pinned, and counts its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.pinned: tuple[Any, ...] = ()

    def __call__(self, *args: Any) -> None:
        raise AssertionError("it is pinned")

    def pin(self, tensors: Sequence[Any], numbers: tuple[Any, ...]) -> Callable[..., None]:
        self.pinned = (tuple(tensors), numbers)
        return lambda *given: self.calls.append(given)


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
    """A launch that operators pin is pinned, under its guard too, and called with the tensors alone."""
    launch = Pinned()
    assert host_us(ReplayPlatform(), -1, Guarded(launch), (X, None, X, 4, 1.0), 10.0, Clock(launch.calls)) == 2.0
    assert launch.pinned == ((X, None, X), (4, 1.0))
    assert set(map(len, launch.calls)) == {3}


def test_bursts_fit_the_queue() -> None:
    """Short kernels are launched in bursts that no queue is too short for, long ones a few times."""
    for device_us, expected in ((0.0, MOST_LAUNCHES), (1.0, MOST_LAUNCHES), (1e6, LEAST_LAUNCHES)):
        launch = Pinned()
        host_us(ReplayPlatform(), -1, launch, (X,), device_us)
        assert len(launch.calls) == (1 + ROUNDS) * expected


def test_what_cannot_be_pinned_is_called_in_full() -> None:
    """A launch without a pin, or with tensors behind numbers, gets all its arguments."""

    def plain(*args: Any) -> None:
        raise AssertionError("it is not called here")

    assert deployed(plain, (X, 4)) == (plain, (X, 4))
    launch = Pinned()
    assert deployed(launch, (X, 4, X)) == (launch, (X, 4, X))
