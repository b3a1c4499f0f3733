"""The tuning loop on a scripted device: who wins, who is never timed, and what is not kept."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from kalign_core.errors import DeviceLost, NotTunable
from kalign_core.hal.base import Sampler
from kalign_core.hal.replay import Burst, Clock, Script
from kalign_core.records import Config
from tests.core.tuner_samples import (
    BEST,
    EFFORT,
    REFERENCE,
    SECOND,
    Bed,
    builtin,
    declared,
    double,
    key,
    timed,
    winner_of,
    write_both_kernel,
)

TIMES = {BEST: 80.0, SECOND: 85.0}
CANDIDATES = 15  # beside the reference


def bed(times: dict[Config, Any] | None = None, *plugins: str, other_us: float = 100.0, **script: Any) -> Bed:
    clock = Clock(TIMES if times is None else times, other_us)
    return Bed(Script(**{"time_us": clock, **script}), builtin(*plugins))


# --- who wins -----------------------------------------------------------------------------------------------------


def test_the_fastest_is_promoted_with_its_evidence() -> None:
    """The entry names the winner and holds its time, the reference's, the spread and what became of the others."""
    here = bed()
    report = here.tune()
    made = report.entry
    assert made is not None
    assert (made.key, made.config) == (key(), BEST)
    assert (made.warm_us, made.reference_warm_us, made.mad_us, made.cold_us) == (80.0, 100.0, 0.0, None)
    assert (made.tuned_at, made.tried) == ("T=4", "refused=0 failed=0 refuted=0 timed=16")
    assert {digest.partition("=")[0] for digest in made.digests} >= {"normals", "spread"}
    assert report.storable


@pytest.mark.parametrize("seed", range(6))
def test_the_right_one_wins_under_noise_and_bursts(seed: int) -> None:
    """Noise of 3 % and readings of the best that come out threefold do not change who wins."""
    bursts = (Burst(1, 2, 3.0, BEST), Burst(9, 12, 3.0, BEST), Burst(60, 64, 3.0))
    clock = Clock({BEST: 80.0, SECOND: 88.0}, noise=0.03, bursts=bursts, seed=seed)
    assert winner_of(Bed(Script(time_us=clock)).tune()) == BEST


def test_a_burst_over_every_reading_of_the_best_keeps_the_reference() -> None:
    """A candidate of which nothing but threefold readings were taken is not promoted, nor one within the noise."""
    clock = Clock({BEST: 90.0, SECOND: 99.0}, noise=0.03, bursts=[Burst(0, 10**6, 3.0, BEST)])
    assert winner_of(Bed(Script(time_us=clock)).tune()) == REFERENCE


def test_the_reference_is_a_decision() -> None:
    """Where nothing beats the reference by 2 %, that it is the best is decided and may be stored."""
    report = bed({BEST: 98.5}).tune()
    assert winner_of(report) == REFERENCE
    assert report.storable


@pytest.mark.parametrize("plugin", ["", "[::-1]", "[7::-1]"])
def test_ties_do_not_go_by_the_order_of_candidates(plugin: str) -> None:
    """Of candidates of one time the same one wins, whatever a plugin proposed first."""
    source = f"""
    import itertools
    @hookimpl(any_platform=True)
    def kalign_candidates(kernel, problem, model):
        rows = list(itertools.product(*kernel.knobs.values())){plugin}
        return [kernel.reference.replace(BLOCK=block, num_warps=warps) for block, warps in rows]
    """
    assert winner_of(bed({}, source, other_us=80.0).tune(effort=replace(EFFORT, finalists=16))) == REFERENCE
    times = {REFERENCE: 100.0}
    assert winner_of(bed(times, source, other_us=80.0).tune(effort=replace(EFFORT, finalists=16))) == REFERENCE.replace(
        BLOCK=16, num_warps=1
    )


def test_candidates_are_raced_against_the_reference_interleaved() -> None:
    """A device that gets slower while it is measured does not favour who came first."""
    clock = Clock({BEST: 95.0}, drift=0.0002)
    assert winner_of(Bed(Script(time_us=clock)).tune()) == BEST


def test_recorded_readings_are_decided_on_as_they_are() -> None:
    """Readings as a device gave them, outliers and all, lead to the winner that their medians show."""
    recorded = {
        REFERENCE: [20.4, 20.5, 20.4, 24.9, 20.3, 20.4],
        BEST: [18.5, 18.6, 31.0, 18.5, 18.4],
        SECOND: [18.9, 18.9, 19.0],
    }
    report = bed(recorded, other_us=25.0).tune()
    assert winner_of(report) == BEST
    assert report.storable


# --- who is never timed -------------------------------------------------------------------------------------------


def test_a_refuted_candidate_is_never_timed() -> None:
    """Who writes one wrong byte is reported and not timed, and cannot win though it be the fastest."""
    here = bed(corrupts=lambda kernel, config, run: config == BEST)
    report = here.tune()
    assert BEST not in timed(here.script)
    assert [config for config, _ in report.refuted] == [BEST]
    assert winner_of(report) == SECOND


@pytest.mark.parametrize("first", [2, 5, 12, 22, 28, 32, 37])
def test_a_candidate_that_turns_wrong_never_wins(first: int) -> None:
    """Bytes that change on a later launch are seen by the gate, by what timing leaves behind or by the last gate."""
    here = bed(corrupts=lambda kernel, config, run: config == BEST and run >= first)
    report = here.tune()
    launches = sum(config == BEST for _, config in here.script.launched)
    assert launches >= first
    assert [config for config, _ in report.refuted] == [BEST]
    assert winner_of(report) == SECOND


def test_a_candidate_that_fails_is_reported() -> None:
    """A candidate that does not compile is reported with its reason and the next best wins."""
    report = bed(fails=lambda kernel, config: "PTXASError: no registers" if config == BEST else None).tune()
    assert report.failed == [(BEST, "PTXASError: no registers")]
    assert winner_of(report) == SECOND


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("bad tile"), "ValueError: bad tile"),
        (SystemExit(2), "SystemExit: 2"),
        (RuntimeError("Triton Error: invalid argument\nmore"), "RuntimeError: Triton Error: invalid argument"),
        (KeyError("x"), "KeyError: 'x'"),
    ],
)
@pytest.mark.parametrize("run", [1, 3, 20, 30])
def test_whatever_a_candidates_launch_raises_costs_the_candidate(error: BaseException, reason: str, run: int) -> None:
    """An exception from launching a candidate, at whatever step, is its failure and nobody else's."""
    report = bed(raises=lambda kernel, config, now: error if config == BEST and now == run else None).tune()
    assert report.failed == [(BEST, reason)]
    assert winner_of(report) == SECOND


class PTXASError(Exception):
    """What a compiler raises of its own, as nobody could have listed it."""


class Unprintable(Exception):
    """One whose message cannot be made."""

    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PTXASError("no registers left\nptxas -v ..."), "PTXASError: no registers left"),
        (AssertionError(), "AssertionError"),
        (SystemExit(3), "SystemExit: 3"),
        (GeneratorExit(), "GeneratorExit"),
        (Unprintable(), "Unprintable: (its message cannot be printed)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_whatever_making_a_candidates_launch_raises_costs_the_candidate(
    error: BaseException, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling and loading may raise anything: class and first line are kept with the configuration."""
    here = bed()
    launcher = here.platform.launcher

    def failing(kernel: Any, problem: Any, config: Config, args: Any) -> Any:
        if config == BEST:
            raise error
        return launcher(kernel, problem, config, args)

    monkeypatch.setattr(here.platform, "launcher", failing)
    report = here.tune()
    assert report.failed == [(BEST, reason)]
    assert (winner_of(report), report.storable) == (SECOND, True)


def test_an_interrupt_while_a_launch_is_made_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a compiler is the user's, not the candidate's."""
    here = bed()
    launcher = here.platform.launcher

    def interrupted(kernel: Any, problem: Any, config: Config, args: Any) -> Any:
        if config == BEST:
            raise KeyboardInterrupt
        return launcher(kernel, problem, config, args)

    monkeypatch.setattr(here.platform, "launcher", interrupted)
    with pytest.raises(KeyboardInterrupt):
        here.tune()


def test_where_all_candidates_fail_the_reference_serves() -> None:
    """No candidate left is no error: the reference is decided on, and stored, since they failed by their own fault."""
    report = bed(fails=lambda kernel, config: "no" if config != REFERENCE else None).tune()
    assert (winner_of(report), len(report.failed), report.tally.timed) == (REFERENCE, CANDIDATES, 1)
    assert report.storable


def test_where_all_candidates_lacked_memory_nothing_is_stored() -> None:
    """That no candidate could be tried for want of memory says nothing about the reference."""
    report = bed(fails=lambda kernel, config: "CUDA out of memory" if config != REFERENCE else None).tune()
    assert winner_of(report) == REFERENCE
    assert report.reason == "no candidate could be timed; 15 failed for want of time or memory"


# --- what ends a tuning -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [2, 3])
def test_a_reference_that_disagrees_with_itself_is_not_tunable(run: int) -> None:
    """A reference whose bytes change from run to run defines nothing to hold candidates to."""
    here = bed(corrupts=lambda kernel, config, now: config == REFERENCE and now == run)
    with pytest.raises(NotTunable):
        here.tune()
    assert timed(here.script) == set()


def test_a_reference_that_turns_wrong_while_it_is_timed_is_not_tunable() -> None:
    """What the reference leaves behind when it is measured against itself has to agree too."""
    launches = [0]

    def corrupts(kernel: str, config: Config, run: int) -> bool:
        launches[0] += bool(here.script.timed)
        return launches[0] > 12 and config == REFERENCE and launches[0] % 2 == 0

    here = bed(corrupts=corrupts)
    with pytest.raises(NotTunable, match="timed launches"):
        here.tune()


def test_a_kernel_that_writes_what_it_did_not_declare_is_not_tunable() -> None:
    """An undeclared write is found on the reference, and no candidate is launched."""
    here = bed({})
    with pytest.raises(NotTunable, match="writes to x"):
        here.tune(write_both_kernel)
    assert {config for _, config in here.script.launched} == {REFERENCE}


def test_a_collective_kernel_is_not_tunable() -> None:
    """Ranks would have to time it together, so it is not launched at all."""
    here = bed()
    with pytest.raises(NotTunable, match="collective"):
        here.tune(declared(double, "collective", collective=True))
    assert here.script.launched == []


def test_nothing_is_tuned_while_a_graph_is_captured() -> None:
    """Inside a capture nothing is launched, waited for or allocated."""
    here = bed(capturing=True)
    with pytest.raises(NotTunable, match="captured"):
        here.tune()
    assert here.script.launched == []


@pytest.mark.parametrize("run", [1, 4, 15, 30, 65])
def test_a_reference_that_cannot_be_launched_is_not_tunable(run: int) -> None:
    """Whatever the reference's launch raises ends the tuning with its reason."""
    here = bed(raises=lambda kernel, config, now: OSError("gone") if config == REFERENCE and now == run else None)
    with pytest.raises(NotTunable, match="OSError: gone"):
        here.tune()


def test_a_reference_without_a_usable_reading_is_not_tunable() -> None:
    """Where the clock gives nothing for the reference there is nothing to compare with."""
    with pytest.raises(NotTunable, match="no usable reading"):
        bed({REFERENCE: math.nan}).tune()


NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("HIP error: out of memory"),
    MemoryError(),
]


@pytest.mark.parametrize("error", NO_MEMORY, ids=["torch", "driver", "host"])
def test_no_memory_for_the_arguments_is_not_tunable(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that runs out when sets of arguments are made ends the tuning, and says so."""

    def refuse(*args: Any) -> Sampler:
        raise error

    here = bed()
    monkeypatch.setattr("kalign_core.verifier.bench.Bench.argument_sets", refuse)
    with pytest.raises(NotTunable, match="memory ran out while double was tuned"):
        here.tune()


def test_no_memory_for_a_candidate_costs_the_candidate() -> None:
    """A candidate whose launch finds no memory fails, for the moment only."""
    here = bed(raises=lambda kernel, config, run: NO_MEMORY[0] if config == BEST else None)
    report = here.tune()
    assert ([config for config, _ in report.failed], report.transient, winner_of(report)) == ([BEST], 1, SECOND)
    here.script.raises = lambda kernel, config, run: None
    assert winner_of(here.tune()) == BEST


def test_a_lost_device_ends_the_tuning_at_once() -> None:
    """An error that sticks to the device is not taken for one candidate's failure, and nothing is launched after it."""
    here = bed(loses=lambda kernel, config, run: config == BEST)
    with pytest.raises(DeviceLost, match="illegal memory access"):
        here.tune()
    assert here.script.launched[-1] == ("double", BEST)


def test_an_interrupt_passes() -> None:
    """Ctrl-C is never taken for a candidate's failure, whenever it comes."""
    for run in (1, 3, 20, 30):
        here = bed(raises=lambda k, config, now, run=run: KeyboardInterrupt() if (config, now) == (BEST, run) else None)
        with pytest.raises(KeyboardInterrupt):
            here.tune()


def test_a_fault_of_tuning_itself_is_not_tunable(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of ours is the reason for staying with the reference, with the error behind it."""
    monkeypatch.setattr("kalign_core.tuner.loop.winner", lambda *args: 1 / 0)
    with pytest.raises(NotTunable, match="ended with ZeroDivisionError") as caught:
        bed().tune()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


# --- readings that are none ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("reading", [0.0, -3.0, math.nan, math.inf])
def test_readings_that_are_no_times_are_thrown_away(reading: float) -> None:
    """Zero, negative and infinite readings neither win a race nor lose it."""
    clock = Clock(TIMES, broken=dict.fromkeys(range(0, 400, 3), reading))
    report = Bed(Script(time_us=clock)).tune()
    assert report.entry is not None
    assert (report.entry.config, report.entry.warm_us) == (BEST, 80.0)


def test_a_candidate_without_a_usable_reading_fails() -> None:
    """A clock that gives nothing for one candidate costs that candidate."""
    report = bed({BEST: 0.0, SECOND: 85.0}).tune()
    assert report.failed == [(BEST, "no usable reading of the clock")]
    assert winner_of(report) == SECOND
