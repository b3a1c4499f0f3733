"""The timer: what it gives is time of the device, per launch, of the launches it was asked for.

How long anything takes is nobody's promise. Where two readings are compared the work differs a hundredfold, and the
least of several readings is taken, so that a busy machine changes nothing.
"""

from __future__ import annotations

import math

import pytest

from kalign_core.hal.base import Platform
from kalign_core.testing.launching import STEPS, Ground, LaunchRules

READINGS = 3
# Steps of the two kernels that are compared: an interpreter takes microseconds for each, a device nanoseconds.
INTERPRETED, COMPILED = (1, 100), (1, 20_000)


class TimerRules(LaunchRules):
    """Rules for the platform's timer."""

    @pytest.fixture
    def work(self, platform: Platform, device: int) -> tuple[int, int]:
        """Steps of a short and of a long kernel."""
        return INTERPRETED if platform.model(device).interpreted else COMPILED

    def least_us(self, ground: Ground, steps: int, launches: int = 1) -> float:
        """The least of several readings of ``launches`` launches of that many steps."""
        x, out = ground.numbers(1), ground.blank(1)
        launch = ground.bound(x, out, steps)
        arguments = ground.kernels.arguments(x, out, steps)
        sampler = ground.platform.timer(ground.device).sampler(launch, [arguments], launches)
        try:
            return min(sampler.sample_us() for _ in range(READINGS))
        finally:
            sampler.close()

    def test_readings_are_times(self, ground: Ground, work: tuple[int, int]) -> None:
        """A reading is a positive, finite number of microseconds."""
        reading = self.least_us(ground, work[1])
        assert isinstance(reading, float)
        assert math.isfinite(reading)
        assert reading > 0

    def test_more_work_takes_longer(self, ground: Ground, work: tuple[int, int]) -> None:
        """A kernel that does a hundred times the work reads longer: the kernel is timed, not its launch."""
        short, long = work
        assert self.least_us(ground, long) > 2 * self.least_us(ground, short)

    def test_readings_are_per_launch(self, ground: Ground, work: tuple[int, int]) -> None:
        """Eight launches read like one, not like eight."""
        assert self.least_us(ground, work[1], launches=8) < 4 * self.least_us(ground, work[1])

    def test_a_reading_runs_what_it_times(self, ground: Ground) -> None:
        """Each reading launches on every set of arguments, so that a cold timing goes round all of them."""
        sets = [(ground.numbers(start=100 * n), ground.blank()) for n in range(3)]
        launch = ground.bound(*sets[0])
        arguments = [ground.kernels.arguments(x, out, STEPS) for x, out in sets]
        sampler = ground.platform.timer(ground.device).sampler(launch, arguments, 6)
        try:
            for _ in range(2):
                for _, out in sets:
                    out.fill_(-1)
                sampler.sample_us()
                ground.platform.synchronize(ground.device)
                for x, out in sets:
                    ground.assert_stirred(out, x)
        finally:
            sampler.close()

    def test_a_timer_leaves_nothing_behind(self, ground: Ground) -> None:
        """After a timing the platform launches as before."""
        self.least_us(ground, STEPS)
        x, out = ground.numbers(), ground.blank()
        ground.run(ground.bound(x, out), x, out)
        ground.assert_stirred(out, x)
