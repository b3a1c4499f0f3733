"""Measuring on a device whose clock moves, and past its last-level cache."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from kalign_core.hal.replay import Clock, Script
from kalign_core.records import Condition, Config
from kalign_core.tuner import measure
from tests.core.measuring import OTHERS, on_device, stand
from tests.core.tuner_samples import BEST, REFERENCE, SECOND

# --- a clock that follows the load ---------------------------------------------------------------------------------


def test_readings_before_the_device_settled_are_dropped() -> None:
    """What was read on the way to another clock counts for nobody."""
    ramp = [80.0] * 6 + [100.0] * 60
    here = on_device(Script(time_us=Clock({REFERENCE: ramp, BEST: [0.9 * r for r in ramp]})))
    home, best = here.all(REFERENCE, BEST)
    here.meter.race(home, [best], 15, "warm")
    assert (set(home.raw["warm"]), set(best.warm)) == ({100.0}, {90.0})


def test_a_quiet_device_costs_two_blocks() -> None:
    """Where nothing moves, two blocks of rounds are enough to say so."""
    here = on_device(Script(time_us=Clock()))
    home, best = here.all(REFERENCE, BEST)
    here.meter.race(home, [best], 15, "warm")
    assert len(home.raw["warm"]) == 2 * measure.BLOCK_ROUNDS


def test_a_device_that_never_settles_is_read_all_the_same() -> None:
    """After so many blocks the readings are taken as they come, for the decision rule to refuse."""
    ever = [100.0 * 1.01**i for i in range(200)]
    here = on_device(Script(time_us=Clock({REFERENCE: ever, BEST: ever})))
    home, best = here.all(REFERENCE, BEST)
    here.meter.race(home, [best], 15, "warm")
    assert measure.BLOCK_ROUNDS <= len(home.raw["warm"]) <= 15


class Tired:
    """A clock that follows the load: after a rest readings are ``rested_us``, else ``worked_us``."""

    def __init__(self, worked_us: dict[Config, float], rested_us: dict[Config, float]) -> None:
        self.worked_us, self.rested_us, self.rests_s = worked_us, rested_us, list[float]()
        self.fresh = False

    def rest(self, seconds: float) -> None:
        self.rests_s.append(seconds)
        self.fresh = True

    def __call__(self, kernel: str, config: Config) -> float:
        known = self.rested_us if self.fresh else self.worked_us
        self.fresh = False
        return known.get(config, 100.0)


def test_where_the_clock_follows_the_load_both_paces_are_read() -> None:
    """A reference that is faster after a rest has everybody in contention read once more, with rests between."""
    clock = Tired({BEST: 80.0, SECOND: 82.0}, {REFERENCE: 90.0, BEST: 78.0, SECOND: 70.0})
    here = on_device(Script(time_us=clock), rest=clock.rest)
    home, best, second, slow = here.all(REFERENCE, BEST, SECOND, OTHERS[0])
    here.meter.race(home, [best, second, slow], 15, "warm")
    assert (set(home.warm), set(best.warm), set(second.warm)) == ({100.0}, {80.0}, {82.0})
    assert (set(home.rested), set(best.rested), set(second.rested)) == ({90.0}, {78.0}, {70.0})
    assert slow.rested == []


def test_where_the_clock_stays_one_pace_is_enough() -> None:
    """A reference that gains no more than 2 % by a rest is read at one pace, after a few probes."""
    clock = Tired({}, {REFERENCE: 98.5})
    here = on_device(Script(time_us=clock), rest=clock.rest)
    home, best = here.all(REFERENCE, BEST)
    here.meter.race(home, [best], 15, "warm")
    assert (home.rested, len(clock.rests_s)) == ([], measure.PROBES)


def test_a_device_at_its_power_limit_is_read_at_both_paces() -> None:
    """What the driver says of the power limit is believed, though a few rests change nothing yet."""
    here = on_device(Script(time_us=Clock(), condition=Condition(power_capped=True)))
    home, best = here.all(REFERENCE, BEST)
    here.meter.race(home, [best], 15, "warm")
    assert (set(home.rested), set(best.rested)) == ({100.0}, {100.0})


def test_a_rest_is_as_long_as_the_work_asks() -> None:
    """Between two rested readings the device idles for three times as long as a reading keeps it busy."""
    clock = Tired({}, {REFERENCE: 80.0})
    here = on_device(Script(time_us=clock), rest=clock.rest)
    home = here.contender(REFERENCE)
    home.rough_us = 100.0
    here.meter.race(home, [], 5, "warm")
    assert clock.rests_s[-1] == pytest.approx(3 * 6 * 100e-6)


def test_an_earlier_race_leaves_nothing_at_rest() -> None:
    """A second race on a device whose clock stays now has no rested readings of the first."""
    clock = Tired({}, {REFERENCE: 80.0})
    here = on_device(Script(time_us=clock), rest=clock.rest)
    home, best = here.all(REFERENCE, BEST)
    here.meter.race(home, [best], 15, "warm")
    clock.rested_us = {}
    here.meter.race(home, [best], 15, "warm")
    assert home.rested == []


def test_what_a_reading_waits_is_kept() -> None:
    """How much longer than its launches ran a reading took the host is kept, as a share."""
    seconds = iter(range(1000))
    here = on_device(Script(time_us=Clock(other_us=100_000.0)), now=lambda: next(seconds))
    home, best = here.all(REFERENCE, BEST)
    home.rough_us = best.rough_us = 100_000.0
    here.meter.race(home, [best], 5, "warm")
    assert set(home.waits) == {1.0}  # a second for five launches of a tenth of one


# --- the last-level cache -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("last_level_bytes", [1 << 10, 60 << 10, 256 << 10])
def test_cold_readings_pass_the_last_level_twice(last_level_bytes: int) -> None:
    """Between two uses of one set of arguments at least twice the last-level cache goes by, whatever its size."""
    here = stand(Clock(), model=replace(Script().model, last_level_bytes=last_level_bytes))
    one = here.bench.bytes_per_set()
    passed = (here.meter.cold_sets - 1) * one
    assert 2 * last_level_bytes <= passed or here.meter.cold_sets == measure.MAX_COLD_SETS
    assert passed < 2 * last_level_bytes + one


def filled(last_level_bytes: int) -> int:
    """Bytes of other memory that were read between cold readings with at most two sets of arguments."""
    here = stand(Clock(), model=replace(Script().model, last_level_bytes=last_level_bytes))
    meter = here.meter
    home, best = here.all(REFERENCE, BEST)
    meter.race(home, [best], 5, "cold")
    return 0 if meter._filler is None else meter._filler.numel() * meter._filler.element_size()


def test_sets_too_small_to_leave_the_cache_have_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the most sets of arguments do not fill twice the last-level cache, other memory is read between them."""
    monkeypatch.setattr(measure, "MAX_COLD_SETS", 2)
    one = stand(Clock()).bench.bytes_per_set()
    assert (filled(one), filled(4 * one)) == (0, 8 * one)


def test_the_cache_is_emptied_before_each_cold_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other memory is read once before every cold reading, never within one and never for a warm one."""
    log: list[str] = []
    monkeypatch.setattr(measure.Meter, "evict", lambda self: log.append("emptied"))
    here = stand(Clock(), model=replace(Script().model, last_level_bytes=1 << 10))
    here.script.time_us = lambda kernel, config: log.append("read") or 100.0
    home, best = here.all(REFERENCE, BEST)
    here.meter.race(home, [best], 5, "cold")
    assert re.fullmatch(r"(read )+(emptied read ){10,}(read ?)+", " ".join(log))


def test_warm_readings_go_round_what_stays_in_the_cache() -> None:
    """Warm readings use a few sets of arguments where an eighth of the cache holds each, else one."""
    one = stand(Clock()).bench.bytes_per_set()
    for last_level_bytes, expected in ((0, 1), (15 * one, 1), (24 * one, 3), (1000 * one, 4)):
        here = stand(Clock(), model=replace(Script().model, last_level_bytes=last_level_bytes))
        here.meter.race(here.contender(REFERENCE), [], 5, "warm")
        assert here.script.timed[0][2] == expected
