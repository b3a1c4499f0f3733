"""What a tuning keeps, and for how long: disturbed devices, incumbents, remembered failures, efforts and sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kalign_core.errors import UnknownName
from kalign_core.hal.replay import Clock, Script
from kalign_core.records import Condition, Config, DeviceModel
from kalign_core.tuner.loop import EFFORTS, INTERPRETED, effort_named
from tests.core.tuner_samples import (
    BEST,
    EFFORT,
    REFERENCE,
    SECOND,
    Bed,
    builtin,
    double_kernel,
    entry,
    key,
    problem,
    readings,
    timed,
    winner_of,
)

TIMES = {BEST: 80.0, SECOND: 85.0}
CANDIDATES = 15  # beside the reference


def bed(times: dict[Config, Any] | None = None, *plugins: str, other_us: float = 100.0, **script: Any) -> Bed:
    clock = Clock(TIMES if times is None else times, other_us)
    return Bed(Script(**{"time_us": clock, **script}), builtin(*plugins))


# --- decided, but not kept ----------------------------------------------------------------------------------------


def test_a_drifting_device_stores_nothing() -> None:
    """A reference that drifts while it is measured leaves a decision for this process, and the reason."""
    report = Bed(Script(time_us=Clock(TIMES, noise=0.01, drift=0.004))).tune()
    assert winner_of(report) == BEST
    assert "the reference drifted by" in report.reason
    assert not report.storable


@pytest.mark.parametrize(
    ("condition", "reason"),
    [
        (Condition(throttle=("hw_thermal",)), "the device was slowed down (hw_thermal)"),
        (Condition(foreign_processes=2), "another process was on the device"),
    ],
    ids=["throttle", "company"],
)
def test_a_disturbed_device_stores_nothing(condition: Condition, reason: str) -> None:
    """Under a hardware slowdown or beside another process a winner serves, and is not stored."""
    report = bed(condition=condition).tune()
    assert (winner_of(report), report.reason, report.storable) == (BEST, reason, False)


def test_a_disturbance_that_passes_costs_a_second_race() -> None:
    """A race that was spoiled is run once more, and what counts is the second."""
    report = bed(condition=[Condition(throttle=("hw_thermal",)), Condition()]).tune()
    assert (winner_of(report), report.storable) == (BEST, True)


def test_an_entry_says_under_what_it_was_decided() -> None:
    """The spread of what decided, the noise that was measured first and the device's state stand in the entry."""
    condition = Condition(sm_clock_mhz=1980, temperature_c=41, power_capped=True)
    report = Bed(Script(time_us=Clock(TIMES, noise=0.01), condition=condition)).tune()
    assert report.entry is not None
    assert report.noise is not None
    facts = dict(report.entry.extra)
    assert 0 < facts.pop("noise") < 0.02
    assert 0 < (report.entry.mad_us or 0.0) < 0.02 * TIMES[BEST]
    assert facts == {"sm_clock_mhz": 1980, "temperature_c": 41, "power_capped": True}


# --- incumbents ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("best_us", "expected"), [(83.0, SECOND), (82.0, BEST)])
def test_a_stored_winner_is_replaced_by_three_percent(best_us: float, expected: Config) -> None:
    """Tuned again, a stored winner stays unless another is faster by more than 3 %."""
    report = bed({BEST: best_us, SECOND: 85.0}).tune(incumbent=entry(SECOND))
    assert winner_of(report) == expected


def test_a_stored_winner_is_measured_though_it_is_no_leader() -> None:
    """What is stored is compared with what would replace it, even where the search would have dropped it."""
    times = {BEST: 83.0, SECOND: 85.0, REFERENCE.replace(BLOCK=16): 84.0}
    report = bed(times).tune(incumbent=entry(SECOND), effort=replace(EFFORT, finalists=1))
    assert winner_of(report) == SECOND


def test_a_stored_winner_is_tried_first() -> None:
    """Where fewer candidates are tried than there are, what won before is among them."""
    report = bed().tune(incumbent=entry(SECOND), effort=replace(EFFORT, candidates=1))
    assert (winner_of(report), report.tally.timed) == (SECOND, 2)


def test_a_stored_winner_that_is_refuted_now_is_replaced() -> None:
    """A decision of before does not outlive its refutation."""
    report = bed(corrupts=lambda k, config, run: config == SECOND).tune(incumbent=entry(SECOND))
    assert winner_of(report) == BEST


# --- what is remembered -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fails", "raises", "corrupts"])
def test_what_failed_by_its_own_fault_is_not_tried_again(how: str) -> None:
    """A candidate that failed or was refuted is out for the process, in the bucket's other phases and sizes too."""
    bad: dict[str, Callable[..., Any]] = {
        "fails": lambda kernel, config: "no registers" if config == BEST else None,
        "raises": lambda kernel, config, run: ValueError("bad") if config == BEST else None,
        "corrupts": lambda kernel, config, run: config == BEST,
    }
    here = bed(**{how: bad[how]})
    first = here.tune()
    setattr(here.script, how, getattr(Script(), how))
    here.script.launched.clear()
    again = here.tune(problem=problem(8, "decode"), key=key("T<=8 H=8", phase="decode"))
    assert BEST not in {config for _, config in here.script.launched}
    assert [first.failed, first.refuted] == [again.failed, again.refuted]
    assert winner_of(again) == SECOND


@pytest.mark.parametrize("changed", ["source", "suite"])
def test_what_is_remembered_ends_with_what_it_was_built_from(changed: str) -> None:
    """After the kernel's source or the suite changed, what failed is tried again."""
    here = bed(fails=lambda kernel, config: "no registers" if config == BEST else None)
    here.tune()
    here.script.fails = lambda kernel, config: None
    assert winner_of(here.tune(key=replace(key(), **{changed: "new"}))) == BEST


# --- effort and budget --------------------------------------------------------------------------------------------


def test_an_effort_limits_what_is_tried() -> None:
    """At most so many candidates are timed, and at most so many of them raced."""
    here = bed()
    report = here.tune(effort=replace(EFFORT, candidates=5, finalists=2))
    assert report.tally.timed == 6
    raced = {config for config in timed(here.script) if readings(here.script, config) > 4}
    assert len(raced) == 3


def test_an_interpreter_is_asked_for_less() -> None:
    """Where kernels are interpreted, whatever the device is called, every effort is a small one."""
    model = DeviceModel("interpreter", "theirs", warp_size=1, max_warps=64, shared_bytes=0)
    here = Bed(Script(time_us=Clock(TIMES, noise=0.03), model=model))
    here.tune(effort=EFFORTS["full"])
    assert readings(here.script, REFERENCE) == 3 + 3 * (INTERPRETED.rounds + 1)


def test_efforts_are_known_by_name() -> None:
    """Efforts have names, and a misspelt one says what is known."""
    assert [effort_named(name).candidates for name in EFFORTS] == [16, 96, 4096]
    with pytest.raises(UnknownName, match="did you mean 'quick'"):
        effort_named("quik")


def test_what_a_plugin_knows_comes_before_all_the_rest() -> None:
    """Where fewer candidates are tried than there are, those that a plugin proposes for the device are."""
    source = f"""
    @hookimpl(any_platform=True)
    def kalign_candidates(kernel, problem, model):
        return [Config.parse({str(SECOND)!r}).replace(enable_fp_fusion=False)]
    """
    here = bed(None, source)
    here.tune(effort=replace(EFFORT, candidates=1))
    assert timed(here.script) == {REFERENCE, SECOND}


@pytest.mark.parametrize(("budget_s", "tried"), [(40.0, range(1, 14)), (4000.0, range(15, 16))])
def test_a_budget_ends_the_adding_of_candidates(budget_s: float, tried: range) -> None:
    """Past the budget no candidate is added, and those that were are decided on."""
    here = bed({}, other_us=80.0, seconds=lambda kernel, config: 1.0)
    here.script.time_us = Clock({REFERENCE: 100.0}, 80.0)
    report = here.tune(effort=replace(EFFORT, budget_s=budget_s))
    assert report.tally.timed - 1 in tried
    assert report.untried == CANDIDATES - (report.tally.timed - 1)
    assert winner_of(report) != REFERENCE
    assert report.storable


def test_a_slow_candidate_does_not_spend_the_rest_of_the_budget() -> None:
    """A launch that hangs for as long as the budget lasts is the last one that is added."""
    slow = REFERENCE.replace(BLOCK=16, num_warps=8)
    here = bed({REFERENCE: 100.0}, other_us=80.0, seconds=lambda kernel, config: 1000.0 if config == slow else 0.0)
    report = here.tune(effort=replace(EFFORT, budget_s=600.0))
    assert (report.tally.timed, report.untried) == (5, 11)


def test_a_budget_spent_without_a_winner_stores_nothing() -> None:
    """That nothing beat the reference is no finding where most was left untried."""
    here = bed({}, seconds=lambda kernel, config: 1.0)
    report = here.tune(effort=replace(EFFORT, budget_s=40.0))
    assert winner_of(report) == REFERENCE
    assert report.reason == f"the budget of 40 s left {report.untried} candidates untried"


def test_a_budget_hurries_the_race() -> None:
    """A race that noise would draw out to all its rounds ends with the least of them when time is up."""
    counts = []
    for budget_s in (math.inf, 1.0):
        here = Bed(Script(time_us=Clock(TIMES, noise=0.03), seconds=lambda kernel, config: 0.1))
        here.tune(effort=replace(EFFORT, budget_s=budget_s))
        counts.append(readings(here.script, REFERENCE))
    assert counts[1] < counts[0]


def test_a_steady_race_stops_early() -> None:
    """Readings that do not spread need no more rounds than the least; noisy ones are given all, the reference beside
    itself too: what two medians of one launch differ by is a margin, and of few readings it is a fluke."""
    counts = []
    for noise in (0.0, 0.03):
        here = Bed(Script(time_us=Clock(TIMES, noise=noise)))
        here.tune()
        counts.append(readings(here.script, REFERENCE))
    # Rough, twice against itself, in the race, and one more in each for what it leaves behind.
    assert counts == [3 + 2 * (5 + 1) + (5 + 1), 3 + 2 * (EFFORT.rounds + 1) + (EFFORT.rounds + 1)]


def test_the_report_says_where_the_time_went() -> None:
    """Seconds are given by step."""
    assert set(bed().tune().seconds) == {"gate", "compile", "check", "search", "race"}


# --- sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("free", "tuned_at"), [(None, "T=8"), (10**9, "T=8"), (1000, "T=5")])
def test_a_bucket_is_tuned_at_its_edge_where_that_fits(free: int | None, tuned_at: str) -> None:
    """The size that is measured is the bucket's upper edge, or the caller's own where memory is short."""
    report = bed(free_bytes=free).tune(problem=problem(5))
    assert report.entry is not None
    assert report.entry.tuned_at == tuned_at


@pytest.mark.parametrize(("phase", "cold", "warm"), [("train", 3 + 3 * 16, 6), ("decode", 6, 3 + 3 * 16)])
def test_phases_decide_on_their_kind_of_reading(phase: str, cold: int, warm: int) -> None:
    """Training decides on cold readings, decoding on warm ones; the other kind is taken briefly, for the entry."""
    model = replace(Script().model, last_level_bytes=64)
    here = Bed(Script(time_us=Clock(TIMES, noise=0.03), model=model))
    made = here.tune(problem=problem(phase=phase)).entry
    assert made is not None
    assert None not in (made.cold_us, made.warm_us, made.reference_cold_us, made.reference_warm_us)
    assert (readings(here.script, REFERENCE, 2), readings(here.script, REFERENCE, 1)) == (cold, warm)


def test_the_kernel_is_the_sample() -> None:
    """The sample kernel has the sixteen candidates that these tests count on."""
    assert len(double_kernel.knobs["BLOCK"]) * len(double_kernel.knobs["num_warps"]) == CANDIDATES + 1
