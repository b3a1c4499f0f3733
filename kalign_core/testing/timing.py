"""The timer: what it gives is time of the device, per launch, of the launches it was asked for.

How long anything takes is nobody's promise. Where readings are compared they should differ many times over; both sides
are read in turn, and the least of each counts, because whatever else a machine does makes readings longer, not shorter.
Readings go on until they tell what they should, or there are very many: a right timer passes on a busy machine.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator

import pytest

from kalign_core.hal.base import Platform, Sampler
from kalign_core.testing.launching import STEPS, Ground, LaunchRules

# Readings of either side that a comparison takes before it looks at them, where they are short and long, and at most.
FEWEST_SHORT, FEWEST_LONG, MOST = 10, 3, 200
LAUNCHES = 8
# Steps of the two kernels that are compared: an interpreter takes microseconds for each, a device nanoseconds.
INTERPRETED, COMPILED = (1, 100), (1, 20_000)


class TimerRules(LaunchRules):
    """Rules for the platform's timer."""

    @pytest.fixture
    def work(self, platform: Platform, device: int) -> tuple[int, int]:
        """Steps of a short and of a long kernel."""
        return INTERPRETED if platform.model(device).interpreted else COMPILED

    @contextlib.contextmanager
    def timed(self, ground: Ground, steps: int, launches: int = 1) -> Iterator[Sampler]:
        """What times ``launches`` launches of that many steps, closed after the block."""
        x, out = ground.numbers(1), ground.blank(1)
        launch = ground.bound(x, out, steps)
        arguments = ground.kernels.arguments(x, out, steps)
        with contextlib.closing(ground.platform.timer(ground.device).sampler(launch, [arguments], launches)) as sampler:
            yield sampler

    def least_us(
        self, one: Callable[[], float], other: Callable[[], float], fewest: int, tells: Callable[[float, float], bool]
    ) -> tuple[float, float]:
        """The least reading of either, from ``fewest`` or as many more as it takes until they tell."""
        least = math.inf, math.inf
        for taken in range(1, MOST + 1):
            least = min(least[0], one()), min(least[1], other())
            if taken >= fewest and tells(*least):
                break
        return least

    def test_readings_are_times(self, ground: Ground, work: tuple[int, int]) -> None:
        """A reading is a positive, finite number of microseconds."""
        with self.timed(ground, work[1]) as sampler:
            reading = sampler.sample_us()
        assert isinstance(reading, float)
        assert math.isfinite(reading)
        assert reading > 0

    def test_more_work_takes_longer(self, ground: Ground, work: tuple[int, int]) -> None:
        """A kernel that does a hundred times the work reads longer: the kernel is timed, not its launch."""

        def tells(short_us: float, long_us: float) -> bool:
            return long_us > 2 * short_us

        with self.timed(ground, work[0]) as short, self.timed(ground, work[1]) as long:
            assert tells(*self.least_us(short.sample_us, long.sample_us, FEWEST_SHORT, tells))

    def test_readings_are_per_launch(self, ground: Ground, work: tuple[int, int]) -> None:
        """Eight launches in one reading read like eight readings of one on the average, not like their sum."""

        def tells(one_us: float, eight_us: float) -> bool:
            return eight_us < LAUNCHES / 2 * one_us

        with self.timed(ground, work[1]) as one, self.timed(ground, work[1], LAUNCHES) as eight:
            # As much work on either side, so that a busy machine stretches both alike.
            average = lambda: statistics.fmean(one.sample_us() for _ in range(LAUNCHES))  # noqa: E731
            assert tells(*self.least_us(average, eight.sample_us, FEWEST_LONG, tells))

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
        with self.timed(ground, STEPS) as sampler:
            sampler.sample_us()
        x, out = ground.numbers(), ground.blank()
        ground.run(ground.bound(x, out), x, out)
        ground.assert_stirred(out, x)
