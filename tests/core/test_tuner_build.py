"""The loop with compile processes that misbehave: the trainer it runs in never notices more than a reference launch."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kalign_core.declare import data, written
from kalign_core.errors import NotTunable
from kalign_core.hal.replay import Clock, Script
from kalign_core.records import Config
from kalign_core.tuner import space as spaces
from kalign_core.tuner.compile import CompilePool
from kalign_core.tuner.loop import Report
from tests.core.tuner_samples import (
    BEST,
    EFFORT,
    FAKE_WORKER,
    REFERENCE,
    SECOND,
    Bed,
    declared,
    double,
    key,
    problem,
    timed,
    winner_of,
)

TARGET = ("fake", 1, 32)


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> Iterator[CompilePool]:
    """Two processes; one where time stands still for it, because whoever hangs makes time pass for all."""
    made = CompilePool(1 if "standstill" in request.fixturenames else 2, FAKE_WORKER)
    yield made
    made.close()


@pytest.fixture
def here(pool: CompilePool) -> Bed:
    """A scripted device for which something is compiled."""
    return Bed(Script(time_us=Clock({BEST: 80.0, SECOND: 85.0}), target=TARGET), pool=pool)


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, pool: CompilePool) -> Callable[[dict[str, str]], None]:
    """``plan({"num_warps=2": "abort"})`` says what compiling candidates with that option, or constant, does.

    A constant is written by its place in the signature: ``4=128`` is a BLOCK of 128.
    """

    def set_plan(said: dict[str, str]) -> None:
        pool.close()  # processes that run have their plan already
        monkeypatch.setenv("FAKE_WORKER_PLAN", json.dumps(said))

    return set_plan


def reasons(report: Report) -> set[str]:
    return {reason for _, reason in report.failed}


def test_candidates_are_compiled_in_processes(here: Bed) -> None:
    """Where there is a compile target the candidates are compiled elsewhere first, and the fastest wins as ever."""
    report = here.tune()
    assert (winner_of(report), report.failed, report.duplicates) == (BEST, [], 0)


@pytest.mark.usefixtures("standstill")
@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("abort", "the compiler died of SIGABRT: LLVM ERROR: no layout for this tile"),
        ("segfault", "the compiler died of SIGSEGV"),
        ("exit", "the compiler ended with status 3"),
        ("sleep", "timeout at 60 s"),
        ("fails", "PTXASError: register allocation failed"),
        ("garbage", "the compiler's answer could not be read (Expecting value: line 1 column 1 (char 0))"),
    ],
)
def test_a_compiler_that_misbehaves_costs_its_candidates(here: Bed, plan: Any, what: str, reason: str) -> None:
    """Candidates whose compiler aborts, hangs or lies fail with a short reason; the others are tuned."""
    plan({"num_warps=2": what})
    report = here.tune()
    assert reasons(report) == {reason}
    assert {config.num_warps for config, _ in report.failed} == {2}
    assert (len(report.failed), winner_of(report), report.storable) == (4, SECOND, True)
    assert not any(config.num_warps == 2 for config in timed(here.script))


def test_where_every_compile_aborts_the_reference_serves(here: Bed, plan: Any) -> None:
    """All candidates bad is no error: the reference is decided on with the evidence of their failures."""
    plan(dict.fromkeys(["num_warps=1", "num_warps=2", "num_warps=4", "num_warps=8"], "abort"))
    report = here.tune()
    assert (winner_of(report), len(report.failed), report.storable) == (REFERENCE, 15, True)


@pytest.mark.usefixtures("standstill")
def test_where_every_compile_hangs_nothing_is_stored(here: Bed, plan: Any) -> None:
    """Deadlines may be the machine's load: the reference serves and the next process tries again."""
    plan({"4=16": "sleep", "4=32": "sleep", "4=128": "sleep", "num_warps=4": "sleep"})
    report = here.tune(effort=replace(EFFORT, candidates=4))
    assert winner_of(report) == REFERENCE
    assert report.reason == "no candidate could be timed; 4 failed for want of time or memory"


@pytest.mark.usefixtures("standstill")
def test_a_crash_is_remembered_and_a_deadline_is_not(here: Bed, plan: Any) -> None:
    """For the rest of the process a candidate that crashed the compiler is out, one that was late is tried again."""
    plan({"4=128": "abort", "num_warps=8": "sleep"})
    first = here.tune()
    plan({})
    again = here.tune(problem=problem(8), key=key("T<=8 H=8"))
    crashed = [(config, reason) for config, reason in first.failed if "SIGABRT" in reason]
    assert (len(first.failed), len(crashed), again.failed) == (7, 3, crashed)
    assert winner_of(again) == SECOND


def test_the_next_process_does_not_meet_the_same_crash(here: Bed, plan: Any, pool: CompilePool, tmp_path: Path) -> None:
    """A candidate that crashed its compiler in one process is out in the next one too, which compiles the others."""
    plan({"4=128": "abort"})
    pool.failures.keep_in(tmp_path / "scripted.toml")
    first = here.tune()
    plan({"4=128": "exit"})  # were one of them compiled again, its reason would be another
    other = CompilePool(2, FAKE_WORKER)
    other.failures.keep_in(tmp_path / "scripted.toml")
    again = Bed(here.script, pool=other).tune()
    other.close()
    assert reasons(first) == {"the compiler died of SIGABRT: LLVM ERROR: no layout for this tile"}
    assert (len(first.failed), again.failed, winner_of(again)) == (4, first.failed, SECOND)


def test_what_does_not_fit_the_device_is_refused(here: Bed, plan: Any) -> None:
    """Shared memory is known from the compiled code, before any launch."""
    plan({"num_warps=2": "large"})
    report = here.tune()
    assert {reason for _, reason in report.refused} == {"needs 1048576 bytes of shared memory, 232448 fit"}
    assert not any(config.num_warps == 2 for _, config in here.script.launched)


def test_code_that_spills_is_a_candidate_like_any_other(here: Bed, plan: Any) -> None:
    """Registers that do not suffice cost time and no correctness: who spills is timed, and may win."""
    plan({"num_warps=2": "spills"})
    report = here.tune()
    assert (winner_of(report), report.failed, report.refused) == (BEST, [], [])


@pytest.mark.parametrize("reverse", [False, True])
def test_candidates_of_the_same_code_are_one(here: Bed, plan: Any, reverse: bool) -> None:
    """Of configurations that compile to the same code the first by declaration stands for all."""
    plan({"num_warps=2": "code of two", "num_warps=1": "code of one"})
    made = declared(double, "double", knobs={"BLOCK": (16, 32, 64, 128)[:: -1 if reverse else 1], "num_warps": (1, 2)})
    report = here.tune(made)
    assert report.duplicates == 6
    assert report.inert == ("BLOCK",)
    first = 128 if reverse else 16
    assert timed(here.script) == {REFERENCE, *(REFERENCE.replace(BLOCK=first, num_warps=warps) for warps in (1, 2))}


def test_candidates_of_the_references_code_are_the_reference(here: Bed, plan: Any) -> None:
    """A configuration that compiles to what the reference compiles to is not timed against it."""
    plan({"num_warps=4": "code of the reference"})
    report = here.tune()
    assert report.duplicates == 3
    assert {config for config in timed(here.script) if config.num_warps == 4} == {REFERENCE}


def test_the_same_code_on_another_grid_is_another_candidate(here: Bed, plan: Any) -> None:
    """Code that is launched with other programs is timed by itself."""
    plan({"num_warps=1": "code of one"})
    made = declared(double, "double", grid=lambda p, c: (1 if c.BLOCK < 64 else 2,))
    report = here.tune(made)
    assert (report.duplicates, report.inert) == (2, ())


@pytest.mark.parametrize("what", ["unimportable", "closure"])
def test_a_kernel_no_process_can_import_is_compiled_here(
    here: Bed, plan: Any, what: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel of a notebook is tuned all the same, and it is said once that its compiles are not isolated."""
    monkeypatch.setattr(spaces, "_warned", set())
    plan({"num_warps=2": "unimportable"} if what == "unimportable" else {})
    made = declared(double, "double")
    if what == "closure":
        monkeypatch.setattr(type(made), "import_path", None)
    reports = [here.tune(made), here.tune(made)]
    assert [winner_of(report) for report in reports] == [BEST, BEST]
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].startswith("double is compiled in this process, where a compiler that dies takes it along: ")


@pytest.mark.usefixtures("standstill")
@pytest.mark.parametrize(("what", "expected"), [("abort", REFERENCE), ("sleep", REFERENCE), ("fails", BEST)])
def test_what_only_the_gate_runs_is_compiled_elsewhere_first(here: Bed, plan: Any, what: str, expected: Config) -> None:
    """Code that the gate needs beside the candidate's own cannot bring a compiler down in this process."""
    plan({"out=*fp64": what})
    x, out = data("T", "H", strides=("H", 1)), written("T", "H", strides=("H", 1), observe="fp64")
    report = here.tune(declared(double, "double", args={"x": x, "out": out}))
    assert winner_of(report) == expected
    assert all(reason.endswith(", in a form that only the gate runs") for reason in reasons(report))
    assert len(report.failed) == (0 if expected == BEST else EFFORT.finalists)
    assert report.transient == (EFFORT.finalists if what == "sleep" else 0)


def test_without_compile_processes_the_reference_serves(here: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no process can be started no candidate is compiled in ours, and nothing is stored."""
    monkeypatch.setenv("FAKE_WORKER_START", "dies")
    report = here.tune()
    assert winner_of(report) == REFERENCE
    assert all(reason.startswith("no compile process: ") for reason in reasons(report))
    assert not report.storable
    assert timed(here.script) == {REFERENCE}


def test_a_budget_ends_compiling(here: Bed, plan: Any) -> None:
    """Candidates that are not compiled when three quarters of the budget are gone are left untried."""
    plan({"num_warps=8": "sleep"})
    report = here.tune(effort=replace(EFFORT, budget_s=1.5), clock=time.monotonic)
    assert report.untried >= 4
    assert not any(config.num_warps == 8 for config in timed(here.script))


def test_a_reference_that_is_not_tunable_ends_what_compiles(
    here: Bed, plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Candidates compile while the reference is checked; where it fails the check they are killed."""
    monkeypatch.setenv("FAKE_WORKER_PIDS", str(tmp_path / "pids"))
    plan(dict.fromkeys(["num_warps=1", "num_warps=2", "num_warps=4", "num_warps=8"], "sleep"))
    here.script.corrupts = lambda kernel, config, run: config == REFERENCE and run == 2
    with pytest.raises(NotTunable):
        here.tune()
    started = [int(line) for line in (tmp_path / "pids").read_text().split()] if (tmp_path / "pids").exists() else []
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)


def test_an_interrupt_kills_what_compiles(
    here: Bed, plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while candidates compile passes, and leaves no process."""
    monkeypatch.setenv("FAKE_WORKER_PIDS", str(tmp_path / "pids"))
    plan({"num_warps=8": "sleep"})

    def progress(stage: str, done: int, total: int) -> None:
        if stage == "compile" and done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        here.tune(progress=progress)
    started = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert started
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)


def test_progress_is_told(here: Bed) -> None:
    """Every compiled and every checked candidate is told, with how many there are."""
    seen: list[tuple[str, int, int]] = []
    here.tune(progress=lambda *told: seen.append(told))
    assert [told for told in seen if told[0] == "compile"] == [("compile", n, 16) for n in range(1, 17)]
    assert [told for told in seen if told[0] == "check"] == [("check", n, 15) for n in range(1, 16)]


def test_how_it_goes_is_told(here: Bed) -> None:
    """What is timed, gated and raced is told, who is out and why, and the best time beside the reference's."""
    here.script.time_us = Clock({BEST: 80.0})
    here.script.corrupts = lambda kernel, config, run: config == SECOND
    seen: list[tuple[str, int, int]] = []
    here.tune(progress=lambda *told: seen.append(told))
    stages = [what for what, _, _ in seen if what in ("time", "gate", "race")]
    assert stages == ["time", "gate", "race", "gate"]
    assert ("refuted", 1, 15) in seen
    assert [told for told in seen if told[0] == "best"] == [("best", 80_000, 100_000)] * 2


def test_the_process_that_tunes_survives(child: Callable[..., Any]) -> None:
    """A trainer with a compiler that aborts on every candidate goes on, and no compile process outlives it."""
    code = f"""
import json, os
os.environ["FAKE_WORKER_PLAN"] = json.dumps({{"num_warps=2": "abort", "num_warps=8": "segfault"}})
from tests.core.tuner_samples import *
from kalign_core.hal.replay import Clock
bed = Bed(Script(time_us=Clock({{BEST: 80.0}}), target={TARGET!r}))
report = bed.tune()
bed.pool.close()
print(len(report.failed), report.entry.config == REFERENCE)
"""
    done = child(code, Path(__file__).parents[2], TRITON_INTERPRET="1")
    assert (done.returncode, done.stdout.split()) == (0, ["8", "True"]), done.stderr
