"""What readings say: medians, what a round had in common, when a device has settled."""

from __future__ import annotations

import math

import pytest

from kalign_core.records import Timing
from kalign_core.tuner import readings


def test_a_timing_is_median_and_deviation() -> None:
    """A timing is the median, the median distance from it, and how many there were."""
    assert readings.timing([5.0, 1.0, 2.0, 100.0, 3.0]) == Timing(3.0, 2.0, 5)
    assert readings.timing([]) is None


@pytest.mark.parametrize("reading", [0.0, -0.0, -1.0, math.nan, math.inf, -math.inf])
def test_what_is_no_time(reading: float) -> None:
    """Zero, negative numbers, NaN and infinity are readings of a clock that failed."""
    assert not readings.usable(reading)


def test_uncertainty_shrinks_with_readings() -> None:
    """A median is known twice as well from four times the readings, and exactly where they agree."""
    assert readings.uncertainty_us(Timing(100.0, 1.0, 4)) == 2 * readings.uncertainty_us(Timing(100.0, 1.0, 16))
    assert readings.uncertainty_us(Timing(100.0, 0.0, 5)) == 0.0


# --- what rounds have in common -----------------------------------------------------------------------------------


def test_what_a_round_has_in_common_is_taken_out() -> None:
    """A clock that moves under all alike leaves no spread."""
    raw = {"a": [100.0, 120.0, 150.0], "b": [50.0, 60.0, 75.0], "c": [200.0, 240.0, 300.0]}
    expected = {"a": [120.0] * 3, "b": [60.0] * 3, "c": [240.0] * 3}
    assert readings.levelled(raw) == {name: pytest.approx(taken) for name, taken in expected.items()}


def test_what_one_has_alone_stays() -> None:
    """A reading off by itself stays as far off, because nobody's own reading makes the level it is divided by."""
    raw = {"a": [100.0, 110.0, 100.0], "b": [50.0] * 3, "c": [70.0] * 3, "d": [80.0] * 3}
    assert readings.levelled(raw)["a"] == pytest.approx([100.0, 110.0, 100.0])
    assert readings.levelled(raw)["b"] == pytest.approx([50.0] * 3)


def test_a_contender_alone_keeps_its_readings() -> None:
    """Where there is nobody to compare with there is no level, and the spread is not made to vanish."""
    assert readings.levelled({"a": [100.0, 120.0, 90.0]}) == {"a": [100.0, 120.0, 90.0]}


def test_a_failed_reading_costs_itself() -> None:
    """A round without a reading of one contender still levels the others, and nothing shifts to another round."""
    raw = {"a": [100.0, math.nan, 150.0, 100.0], "b": [50.0, 60.0, 75.0, 50.0], "c": [10.0, 12.0, 15.0, 10.0]}
    found = readings.levelled(raw)
    assert found["a"] == pytest.approx([100.0] * 3)
    assert found["b"] == pytest.approx([50.0] * 4)


def test_rounds_with_nothing_in_common_level_nothing() -> None:
    """Where division by the level of a round would spread readings further, all are left as they are."""
    apart = {"a": [100.0, 102.0, 98.0, 101.0, 99.0], "b": [49.0, 50.0, 50.5, 51.0, 49.5]}
    assert readings.levelled(apart) == apart


def test_who_left_early_is_levelled_by_who_stayed() -> None:
    """A contender that dropped out is compared at the level of its own rounds, and makes nobody's level."""
    raw = {"a": [100.0, 100.0, 200.0, 200.0, 200.0], "b": [50.0, 50.0, 100.0, 100.0, 100.0], "gone": [150.0, 150.0]}
    found = readings.levelled(raw)
    assert found["a"] == pytest.approx([200.0] * 5)
    assert found["gone"] == pytest.approx([300.0] * 2)


def test_no_readings_level_to_none() -> None:
    """Where nothing was read, nothing counts."""
    assert readings.levelled({"a": [], "b": []}) == {"a": [], "b": []}
    assert readings.levelled({"a": [math.nan]}) == {"a": []}


# --- settling -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ([100.0] * 3 + [101.0] * 3, True),
        ([100.0] * 3 + [103.0] * 3, False),
        ([100.0] * 3 + [97.0] * 3, False),
        ([80.0] * 3 + [100.0] * 6, True),
        ([100.0] * 3, False),
        ([], False),
        ([100.0, math.nan, 100.0, 100.0, math.nan, 100.0], True),
        ([math.nan] * 6, False),
    ],
)
def test_a_device_has_settled_where_two_blocks_agree(raw: list[float], expected: bool) -> None:
    """The last two blocks of readings have medians within 2 %; a single block tells nothing."""
    assert readings.settled(raw, 3) is expected
