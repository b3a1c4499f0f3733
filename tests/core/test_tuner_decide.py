"""The decision rule on readings alone."""

from __future__ import annotations

import math
import random

import pytest

from kalign_core.records import Condition, Config, Refutation
from kalign_core.tuner import decide
from kalign_core.tuner.failures import Guarded
from kalign_core.tuner.readings import Contender, Noise

QUIET = Noise(0.0, 0.001)
NOTHING = Condition()


def contender(name: str, *readings: float, order: int = 0, cold: tuple[float, ...] = ()) -> Contender:
    made = Contender(Config(NAME=name), Guarded(lambda *args: None), None, ((order,), name))  # type: ignore[arg-type]
    made.warm, made.cold = list(readings) * 5, list(cold) * 5
    return made


def chosen(home: Contender, *rivals: Contender, stored: Contender | None = None, noise: Noise = QUIET) -> str:
    return str(decide.winner(home, stored, rivals, "warm", noise).config["NAME"])


HOME = contender("home", 100.0)


@pytest.mark.parametrize(("time_us", "expected"), [(98.1, "home"), (97.9, "b"), (100.0, "home"), (120.0, "home")])
def test_the_reference_stands_below_two_percent(time_us: float, expected: str) -> None:
    """A candidate has to be faster than the reference by more than 2 %."""
    assert chosen(HOME, contender("b", time_us)) == expected


@pytest.mark.parametrize("who", ["home", "rival"])
def test_the_reference_stands_within_three_spreads(who: str) -> None:
    """A gain below three times the spread of either is noise."""
    spread = (-3.0, 0.0, 3.0)
    home = contender("home", *(100 + s * (who == "home") for s in spread))
    rival = contender("rival", *(92 + s * (who == "rival") for s in spread))
    assert chosen(home, rival) == "home"
    assert chosen(HOME, contender("rival", 92.0)) == "rival"


def test_the_reference_stands_within_the_noise_measured_first() -> None:
    """A gain below twice the difference that two measurements of the same launch showed is noise."""
    rival = contender("rival", 93.0)
    assert chosen(HOME, rival, noise=Noise(difference=0.04)) == "home"
    assert chosen(HOME, rival, noise=Noise(difference=0.03)) == "rival"


def test_the_fastest_wins() -> None:
    """Of those that beat the reference the fastest is promoted, wherever it stands."""
    rivals = [contender("a", 90.0, order=1), contender("b", 80.0, order=2), contender("c", 85.0, order=0)]
    assert {chosen(HOME, *rivals), chosen(HOME, *reversed(rivals))} == {"b"}


def test_ties_go_by_declaration() -> None:
    """Among those that cannot be told apart the first by declaration wins, in whatever order they come."""
    rivals = [contender("a", 80.3, order=1), contender("b", 80.0, order=2), contender("c", 81.0, order=0)]
    for _ in range(6):
        random.Random(1).shuffle(rivals)
        assert chosen(HOME, *rivals) == "a"


def test_a_noisier_machine_ties_more() -> None:
    """What counts as a tie grows with the noise, up to one percent."""
    rivals = [contender("a", 80.7, order=1), contender("b", 80.0, order=2), contender("c", 80.79, order=0)]
    assert chosen(HOME, *rivals) == "b"
    assert chosen(HOME, *rivals, noise=Noise(difference=0.0095)) == "a"
    assert chosen(HOME, *rivals, noise=Noise(difference=0.05)) == "c"


@pytest.mark.parametrize(("time_us", "expected"), [(87.5, "stored"), (87.0, "better"), (95.0, "stored")])
def test_a_stored_winner_gives_way_to_three_percent(time_us: float, expected: str) -> None:
    """A stored winner is replaced only by who is faster by more than 3 %."""
    stored, better = contender("stored", 90.0), contender("better", time_us)
    assert chosen(HOME, stored, better, stored=stored) == expected


def test_a_stored_reference_gives_way_to_three_percent() -> None:
    """Where the reference was found best before, 2.5 % are not enough."""
    assert chosen(HOME, contender("b", 97.5), stored=HOME) == "home"
    assert chosen(HOME, contender("b", 96.5), stored=HOME) == "b"


@pytest.mark.parametrize(("time_us", "expected"), [(102.0, "stored"), (104.0, "home")])
def test_a_stored_winner_that_lost_its_lead_stays_until_the_reference_is_faster(time_us: float, expected: str) -> None:
    """A stored winner no longer faster than the reference stays in a tie and goes where it loses by 3 %."""
    stored = contender("stored", time_us)
    assert chosen(HOME, stored, stored=stored) == expected


def test_who_is_out_cannot_win() -> None:
    """Neither a refuted nor a failed contender wins, though it be the fastest or stored."""
    refuted, failed = contender("refuted", 10.0), contender("failed", 20.0)
    refuted.refutation, failed.failure = Refutation("fills", "bytes differ"), "it crashed"
    assert chosen(HOME, refuted, failed, contender("b", 90.0), stored=refuted) == "b"


def test_who_has_no_reading_cannot_win() -> None:
    """A contender of which the clock gave nothing is not the fastest."""
    assert chosen(HOME, contender("mute"), contender("b", 90.0), stored=contender("gone")) == "b"


def test_cold_readings_decide_where_they_are_asked() -> None:
    """The kind of reading that decides is the one that is asked for, whatever the other says."""
    home, rival = contender("home", 100.0, cold=(100.0,)), contender("b", 50.0, cold=(110.0,))
    assert decide.winner(home, None, [rival], "cold", QUIET) is home
    assert decide.winner(home, None, [rival], "warm", QUIET) is rival


# --- two paces ----------------------------------------------------------------------------------------------------


def paced(name: str, worked: float, rested: float | None, order: int = 0) -> Contender:
    """A contender with readings of both paces, or of the first alone."""
    made = contender(name, worked, order=order)
    made.rested = [] if rested is None else [rested] * 5
    return made


def test_who_loses_least_at_the_worse_pace_wins() -> None:
    """Where the clock follows the load, being second at both paces beats being first at one and last at the other."""
    rivals = [paced("hot", 80.0, 90.0), paced("both", 82.0, 81.0), paced("cool", 90.0, 80.0)]
    assert chosen(paced("home", 100.0, 100.0), *rivals) == "both"
    assert chosen(paced("home", 100.0, None), *rivals) == "hot"


def test_a_gain_at_one_pace_does_not_pay_for_a_loss_at_the_other() -> None:
    """Whoever is slower than the reference at one pace, by more than a tie, is not promoted."""
    home = paced("home", 100.0, 100.0)
    assert chosen(home, paced("b", 101.0, 90.0)) == "home"
    assert chosen(home, paced("b", 100.4, 90.0)) == "b"


def test_the_average_gain_has_to_pass_the_margin() -> None:
    """What is gained over both paces together has to exceed 2 %."""
    home = paced("home", 100.0, 100.0)
    assert chosen(home, paced("b", 97.0, 99.2)) == "home"
    assert chosen(home, paced("b", 97.0, 98.9)) == "b"


def test_who_was_read_at_one_pace_only_cannot_win() -> None:
    """A contender without readings of a pace that decides is neither promoted nor kept."""
    home, gone = paced("home", 100.0, 100.0), paced("gone", 50.0, None)
    assert chosen(home, gone, paced("b", 90.0, 90.0), stored=gone) == "b"


# --- when not to keep it ------------------------------------------------------------------------------------------

STEADY = [100.0, 100.2, 99.9, 100.1, 100.0, 99.8]


def read(readings: list[float]) -> Contender:
    """A reference of which the clock gave these readings."""
    made = contender("home")
    made.warm, made.raw = list(readings), {"warm": list(readings)}
    return made


def reason(readings: list[float], before: Condition = NOTHING, after: Condition = NOTHING, noise: Noise = QUIET) -> str:
    return decide.spoiled(before, after, read(readings), "warm", noise)


def test_a_quiet_race_is_kept() -> None:
    """Steady readings of an undisturbed device spoil nothing; the software power cap is no reason either."""
    assert reason(STEADY, after=Condition(power_capped=True, foreign_processes=0)) == ""


@pytest.mark.parametrize("when", ["before", "after"])
def test_throttling_spoils(when: str) -> None:
    """A hardware or thermal slowdown at either end is the reason, by name."""
    assert reason(STEADY, **{when: Condition(throttle=("thermal",))}) == "the device was slowed down (thermal)"


@pytest.mark.parametrize("when", ["before", "after"])
def test_company_spoils(when: str) -> None:
    """Another process on the device at either end is the reason."""
    assert reason(STEADY, **{when: Condition(foreign_processes=1)}) == "another process was on the device"


def test_drift_spoils() -> None:
    """A reference that gets slower by more than 3 % was not measured under one condition."""
    drifting = [100.0 + i for i in range(10)]
    assert reason(drifting).startswith("the reference drifted by 4.9%")
    assert reason([100.0 + 0.2 * i for i in range(10)]) == ""


def test_a_clock_that_follows_the_load_may_move_as_far_itself() -> None:
    """Where rest makes the reference 10 % faster, a drift of 5 % under load is the device's own; one of 15 % is not."""
    for step, expected in ((1.0, ""), (3.5, "the reference drifted by")):
        home = read([100.0 + step * i for i in range(10)])
        home.warm, home.rested = [105.0] * 10, [95.0] * 10
        assert decide.spoiled(NOTHING, NOTHING, home, "warm", QUIET).startswith(expected)
        assert bool(decide.spoiled(NOTHING, NOTHING, home, "warm", QUIET)) == bool(expected)


def test_what_all_rounds_share_is_no_spread() -> None:
    """A device that moves under all alike is not restless; one that moves under the reference alone is."""
    home = read([100.0, 110.0, 90.0, 100.0, 110.0, 90.0])
    assert "spread" in decide.spoiled(NOTHING, NOTHING, home, "warm", QUIET)
    home.warm = list(STEADY)
    assert decide.spoiled(NOTHING, NOTHING, home, "warm", QUIET) == ""


def test_a_broken_reading_is_no_drift() -> None:
    """Readings of a clock that failed say nothing of the device."""
    home = read([*STEADY, math.nan])
    home.warm = list(STEADY)
    assert decide.spoiled(NOTHING, NOTHING, home, "warm", QUIET) == ""


def test_launches_that_wait_spoil_where_nobody_says_who_is_there() -> None:
    """Replays that take twice as long to come back as they run share the device, unless the driver says they do not."""
    home, alone = read(STEADY), Condition(foreign_processes=0)
    home.waits = [1.5] * 10
    found = decide.spoiled(NOTHING, NOTHING, home, "warm", QUIET)
    assert found == "launches took 2.5 times as long to come back as they ran"
    assert decide.spoiled(alone, alone, home, "warm", QUIET) == ""
    home.waits = [0.3] * 10
    assert decide.spoiled(NOTHING, NOTHING, home, "warm", QUIET) == ""


def test_what_looks_like_drift_by_chance_is_none() -> None:
    """On a machine of 3 % noise, half the readings may lie 3 % from the other half for no reason."""
    readings = [98.0, 98.5, 99.0, 103.0, 97.5, 101.9, 102.5, 98.0, 101.8, 102.0]
    assert decide.drift(readings) > decide.DRIFT_LIMIT
    assert reason(readings, noise=Noise(0.0, 0.015)) == ""


def test_a_spread_above_the_idle_noise_spoils() -> None:
    """Readings that spread far more than when the device was measured against itself had company."""
    restless = [100.0, 103.0, 97.0, 100.0, 103.0, 97.0, 100.0, 97.0, 103.0]
    assert reason(restless) == "the reference's readings spread by 3.0%, by 0.1% before"
    assert reason(restless, noise=Noise(0.0, 0.015)) == ""


def test_a_wide_spread_spoils_in_any_case() -> None:
    """A device that never was quiet decides nothing for good."""
    restless = [100.0, 110.0, 90.0, 100.0, 110.0, 90.0, 100.0, 90.0, 110.0]
    assert reason(restless, noise=Noise(0.0, 0.1)) == "the reference's readings spread by 10.0%"


def test_bursts_spoil() -> None:
    """A third of the readings far above the rest moves neither median nor spread, and somebody else was there."""
    assert reason([100.0, 100.0, 300.0] * 4) == "4 of 12 readings of the reference were far above the others"
    assert reason([100.0] * 11 + [300.0]) == ""


def test_few_readings_say_nothing() -> None:
    """Three readings are no ground for a verdict on the device."""
    assert reason([100.0, 300.0, 110.0]) == ""
