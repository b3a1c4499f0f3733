"""Measuring: what is interleaved with what, what is thrown away, and when to stop."""

from __future__ import annotations

import math
import os
import threading
from dataclasses import replace
from typing import Any

import pytest

from kalign_core.errors import CandidateFailed, DeviceLost
from kalign_core.hal.base import Sampler, Timer
from kalign_core.hal.replay import Burst, Clock, ReplayPlatform, Script
from kalign_core.records import Config
from kalign_core.tuner import measure
from tests.core.measuring import OTHERS, Stand, stand
from tests.core.tuner_samples import BEST, REFERENCE, SECOND

# --- rough times --------------------------------------------------------------------------------------------------


def test_a_rough_time_is_the_least_reading() -> None:
    """Rough times are the least of a few readings, so that one disturbance does not rank a candidate last."""
    here = stand(Clock({BEST: [200.0, 80.0, 90.0]}))
    (best,) = contenders = here.all(BEST)
    here.meter.rough(contenders, 5, 3)
    assert best.rough_us == 80.0


def test_rough_readings_are_interleaved() -> None:
    """A disturbance that lasts hits all alike and not every reading of one candidate."""
    here = stand(Clock({BEST: 80.0}, bursts=[Burst(0, 3, 3.0)]))
    contenders = here.all(BEST, *OTHERS)
    here.meter.rough(contenders, 5, 3)
    assert [contender.rough_us for contender in contenders] == [80.0, 100.0, 100.0, 100.0]


def test_rough_readings_are_of_the_kind_that_decides() -> None:
    """Candidates are ranked cold where cold readings decide, going round all sets of arguments, and warm in decode."""
    for phase, expected in (("train", 2), ("decode", 1)):
        here = Stand(Script(time_us=Clock(), model=replace(Script().model, last_level_bytes=64)))
        here.bench.problem = replace(here.bench.problem, phase=phase)
        here.meter.rough(here.all(BEST), 5, 3)
        assert {sets for _, _, sets in here.script.timed} == {expected}


def test_who_is_hopeless_is_read_once() -> None:
    """A candidate many times slower than the fastest costs one reading."""
    slow = OTHERS[0]
    here = stand(Clock({slow: 1000.0}))
    contenders = here.all(BEST, slow)
    here.meter.rough(contenders, 5, 3)
    taken = [config for _, config, _ in here.script.timed]
    assert (taken.count(slow), taken.count(BEST), contenders[1].rough_us) == (1, 3, 1000.0)


def test_more_contenders_than_fit_are_timed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many there are, only so many are kept ready at once, and each is timed."""
    monkeypatch.setattr(measure, "CHUNK", 2)
    here = stand(Clock({BEST: 80.0}))
    contenders = here.all(*OTHERS, BEST, SECOND)
    here.meter.rough(contenders, 5, 2)
    assert [contender.rough_us for contender in contenders] == [100.0, 100.0, 100.0, 80.0, 100.0]


# --- races --------------------------------------------------------------------------------------------------------


def test_a_race_is_in_random_order() -> None:
    """The order within a round changes from round to round, and is the same in every run."""
    orders = []
    for _ in range(2):
        here = stand(Clock(noise=0.03))
        home, *rivals = here.all(REFERENCE, *OTHERS)
        here.meter.race(home, rivals, 10, "warm")
        orders.append([config for _, config, _ in here.script.timed])
    rounds = {tuple(orders[0][start : start + 4]) for start in range(0, 20, 4)}
    assert orders[0] == orders[1]
    assert len(rounds) > 1
    assert all(set(order) == {REFERENCE, *OTHERS} for order in rounds)


def test_who_is_out_of_contention_is_timed_no_further() -> None:
    """After the first block of rounds those that are clearly slower drop out; the reference never does."""
    here = stand(Clock({REFERENCE: 200.0, BEST: 80.0, SECOND: 82.0}, noise=0.02))
    home, best, second, slow = here.all(REFERENCE, BEST, SECOND, OTHERS[0])
    here.meter.race(home, [best, second, slow], 15, "warm")
    assert [len(contender.warm) for contender in (home, best, second, slow)] == [15, 15, 15, 5]


def test_the_other_kind_is_taken_briefly() -> None:
    """The kind of reading that does not decide gets the least number of rounds."""
    here = stand(Clock(noise=0.03), model=replace(Script().model, last_level_bytes=64))
    home, rival = here.all(REFERENCE, BEST)
    here.meter.race(home, [rival], 15, "cold")
    assert (len(home.cold), len(home.warm)) == (15, 5)


def test_what_moves_all_alike_does_not_count() -> None:
    """Readings that count are those after what a round had in common is taken out."""
    waves = [100.0, 120.0, 90.0, 150.0, 110.0]
    here = stand(Clock({REFERENCE: waves, BEST: [0.8 * w for w in waves], SECOND: [0.9 * w for w in waves]}))
    home, best, second = here.all(REFERENCE, BEST, SECOND)
    here.meter.race(home, [best, second], 5, "warm")
    assert best.raw["warm"] == [0.8 * w for w in waves]
    assert best.warm == pytest.approx([88.0] * 5)


def test_a_broken_reading_is_left_out() -> None:
    """Zero, negative and NaN readings count for nothing, and the rounds of the others keep their places."""
    here = stand(Clock(broken={1: 0.0, 4: -5.0, 6: math.nan}))
    home, best = here.all(REFERENCE, BEST)
    here.meter.race(home, [best], 5, "warm")
    assert len(home.raw["warm"]) == len(best.raw["warm"]) == 5
    assert sum(map(math.isnan, home.raw["warm"] + best.raw["warm"])) == 3
    assert home.warm + best.warm == [100.0] * 7


def test_noise_is_the_reference_against_itself() -> None:
    """Noise is how far two medians of one launch lie apart and how its readings spread, as shares."""
    steady = stand(Clock())
    assert steady.meter.noise(steady.contender(REFERENCE), 7, "warm") == measure.Noise(0.0, 0.0)
    noisy = stand(Clock(noise=0.03))
    found = noisy.meter.noise(noisy.contender(REFERENCE), 31, "warm")
    assert 0.0 < found.difference < 0.03
    assert 0.005 < found.spread < 0.03


def test_noise_leaves_no_readings() -> None:
    """What was read to know the noise does not count as readings of the reference."""
    here = stand(Clock())
    home = here.contender(REFERENCE)
    here.meter.noise(home, 5, "warm")
    assert home.warm == []


# --- what the launches left behind --------------------------------------------------------------------------------


def test_what_timed_launches_leave_is_compared() -> None:
    """A contender whose timed launches left other bytes than the reference's is refuted, with the place."""
    here = stand(Clock({BEST: 80.0}), corrupts=lambda kernel, config, run: config == BEST)
    home, best, second = here.all(REFERENCE, BEST, SECOND)
    here.meter.race(home, [best, second], 5, "warm")
    assert (second.out, home.out) == (False, False)
    assert best.refutation is not None
    assert (best.refutation.argument, best.refutation.coordinate, best.refutation.differing) == ("out", (0, 0), 1)
    assert int(best.refutation.reference, 16) ^ int(best.refutation.candidate, 16) == 1


# --- failures -----------------------------------------------------------------------------------------------------


class Refusing(ReplayPlatform):
    """A scripted device whose timer raises what it is told for one configuration, and counts what is not closed."""

    def __init__(self, script: Script, error: Exception, bad: Config) -> None:
        super().__init__(script)
        self.error, self.bad, self.open = error, bad, 0

    def timer(self, device: int) -> Timer:
        platform, inner = self, super().timer(device)

        class Counted(Sampler):
            def __init__(self, made: Sampler) -> None:
                self.made = made
                platform.open += 1

            def sample_us(self) -> float:
                return self.made.sample_us()

            def close(self) -> None:
                platform.open -= 1

        class Raising(Timer):
            def sampler(self, launch: Any, argument_sets: Any, launches: int) -> Sampler:
                if launch.scripted[1] == platform.bad:
                    raise platform.error
                return Counted(inner.sampler(launch, argument_sets, launches))

        return Raising()


def refusing(error: Exception) -> Stand:
    here = Stand(Script(time_us=Clock()))
    here.use(Refusing(here.script, error, BEST))
    return here


@pytest.mark.parametrize("error", [CandidateFailed("no graph"), RuntimeError("no graph")])
def test_who_cannot_be_captured_fails(error: Exception) -> None:
    """A contender that cannot be made ready to be timed is out, and the others are timed and freed."""
    here = refusing(error)
    home, best, second = here.all(REFERENCE, BEST, SECOND)
    here.meter.race(home, [best, second], 5, "warm")
    assert "no graph" in best.failure
    assert len(second.warm) == 5
    assert isinstance(here.platform, Refusing)
    assert here.platform.open == 0


def test_no_memory_for_a_capture_ends_the_race() -> None:
    """Memory that runs out is nobody's failure, and what was ready is freed."""
    here = refusing(RuntimeError("CUDA out of memory"))
    home, best = here.all(REFERENCE, BEST)
    with pytest.raises(RuntimeError, match="out of memory"):
        here.meter.race(home, [best], 5, "warm")
    assert isinstance(here.platform, Refusing)
    assert here.platform.open == 0


def test_a_lost_device_ends_the_race() -> None:
    """A capture that fails because the device is lost says that."""
    here = refusing(RuntimeError("unspecified launch failure"))
    home, best = here.all(REFERENCE, BEST)
    here.script.lost = True
    with pytest.raises(DeviceLost):
        here.meter.race(home, [best], 5, "warm")


# --- one at a time ------------------------------------------------------------------------------------------------


def entering(device: int) -> tuple[threading.Thread, threading.Event]:
    """A thread that takes ``device`` for itself, and whether it has."""
    entered = threading.Event()

    def enter() -> None:
        with measure.alone_on(device):
            entered.set()

    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    return thread, entered


def test_devices_are_timed_on_by_one_tuning_each() -> None:
    """A second tuning waits for the device, the same thread's inner one does not, and another device is free."""
    with measure.alone_on(7), measure.alone_on(7):
        free, free_entered = entering(8)
        free.join(60)
        waiting, entered = entering(7)
        waiting.join(0.05)
        assert (free_entered.is_set(), entered.is_set()) == (True, False)
    waiting.join(60)
    assert entered.is_set()


def test_a_fork_frees_the_device() -> None:
    """A child of fork does not wait for a device that a thread of its parent holds."""
    with measure.alone_on(7):
        child = os.fork()
        if child == 0:
            thread, entered = entering(7)
            thread.join(60)
            os._exit(0 if entered.is_set() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
