"""kalign tune in real processes: what a candidate does to its process costs that candidate and no decision."""

from __future__ import annotations

import json
import os
import pty
import signal
import tomllib
from collections.abc import Callable
from typing import Any

import pytest

from kalign_core.records import Config
from tests.core.tune_process import (
    FEW,
    HURRIED,
    LIMIT_S,
    OPERATOR,
    Place,
    children_of,
    gone,
    misdeeds,
    until,
    until_it_hangs,
)
from tests.core.tuner_samples import BEST, REFERENCE, SECOND

Make = Callable[[], Place]
OTHER = ("--shape", "T=9,H=8")
# Much more than a launch takes on a machine with much else to do.
DEADLINE_S = 8
QUICKLY = ("--launch-deadline", str(DEADLINE_S))
DEEDS: dict[str, Config] = {
    "abort": REFERENCE.replace(BLOCK=16),
    "exit": REFERENCE.replace(BLOCK=32),
    "hang": REFERENCE.replace(num_warps=1),
    "lose": REFERENCE.replace(num_warps=2),
    "memory": REFERENCE.replace(num_warps=8),
    "killed": SECOND,
}
PASSING = ("memory", "killed")
REASONS = {
    "abort": "the worker died of SIGABRT",
    "exit": "the worker ended with status 3",
    "hang": f"timeout at {DEADLINE_S} s on the device",
    "lose": "device -1 reports an illegal memory access while double was tuned",
    "memory": "MemoryError: CUDA out of memory (scripted)",
    "killed": "the worker died of SIGKILL",
}


class Runs:
    """One place where every misdeed is done by a candidate: a first run, one at another size, and the first again."""

    def __init__(self, place: Place) -> None:
        place.script["misdeeds"] = misdeeds(*((config, what, 1) for what, config in DEEDS.items()))
        self.place = place
        place.module = HURRIED
        self.first = place.run(OPERATOR, "--json", *QUICKLY)
        self.again = place.run(OPERATOR, "--json", *QUICKLY)
        self.other = place.run(OPERATOR, "--json", *OTHER, *QUICKLY)


@pytest.fixture(scope="module")
def runs(place: Make) -> Runs:
    return Runs(place())


def row(done: Any) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["problems"]
    return dict(found)


def lost(done: Any) -> int:
    """How many workers a run has lost."""
    return str(done.stderr).count("the worker is started anew")


# --- misdeeds -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", DEEDS)
def test_a_misdeed_costs_one_candidate(runs: Runs, what: str) -> None:
    """A candidate that ends its process, hangs, loses the device or exhausts memory is a failed one with a reason."""
    assert f"{DEEDS[what]}: {REASONS[what]}" in row(runs.first)["failures"]


def test_the_others_are_decided_on(runs: Runs) -> None:
    """The best of the remaining candidates wins and is stored."""
    found = row(runs.first)
    assert (found["how"], found["config"], found["hung"]) == ("tuned", str(BEST), 1)
    assert (found["failed"], found["timed"]) == (len(DEEDS), 16 - len(DEEDS))


def test_each_death_is_one_worker(runs: Runs) -> None:
    """Every candidate that takes its process along costs one worker; one that runs out of memory costs none."""
    assert lost(runs.first) == len(DEEDS) - 1


def test_what_was_decided_is_a_hit(runs: Runs) -> None:
    """A run after one that lost workers finds its decision and starts nothing."""
    assert row(runs.again)["how"] == "hit"
    assert lost(runs.again) == 0


def test_no_process_meets_the_same_crash_again(runs: Runs) -> None:
    """What failed by its own fault is known to the next process; what the moment may have done is tried again."""
    failures = row(runs.other)["failures"]
    assert {what for what in DEEDS if f"{DEEDS[what]}: {REASONS[what]}" in failures} == set(DEEDS)
    assert lost(runs.other) == 1  # killed, which may be a system without memory


def test_the_file_of_failures_says_why(runs: Runs) -> None:
    """What is remembered can be read: kernel and reason, without what was passing."""
    (file,) = runs.place.cache.glob("*.failures.toml")
    found = tomllib.loads(file.read_text())
    assert {table["kernel"] for table in found.values()} == {"double"}
    assert {table["reason"] for table in found.values()} == {REASONS[what] for what in DEEDS if what not in PASSING}


def test_standard_output_is_data(runs: Runs) -> None:
    """Lost workers are told on standard error, in plain lines where that is no terminal."""
    json.loads(runs.first.stdout)
    assert "\x1b" not in runs.first.stderr
    assert runs.first.stderr.startswith("[1/1] doubling T=4 H=8 fp32 train\n")


@pytest.mark.parametrize("at", [3, 30], ids=["in the first check or rough timing", "in the gate or the race"])
def test_whoever_dies_late_is_found(place: Make, at: int) -> None:
    """Where many had been launched when the worker died, the next one waits for each launch and names the culprit."""
    here = place()
    here.script["misdeeds"] = misdeeds((BEST, "abort", at))
    here.script["times_us"] = {str(BEST): 50.0, str(SECOND): 60.0}
    found = row(here.run(OPERATOR, "--json"))
    assert found["failures"] == [f"{BEST}: the worker died of SIGABRT"]
    assert found["config"] == str(SECOND)


def test_a_reference_that_dies_is_not_tuned(place: Make) -> None:
    """Where the reference itself ends its process the kernel stays as it is, and the command goes on."""
    here = place()
    here.script["misdeeds"] = misdeeds((REFERENCE, "abort", 5))
    here.script["times_us"] = {}
    done = here.run(OPERATOR, "--json")
    found = row(done)
    assert found["how"] == "not tunable"
    assert found["reason"] == "its reference launch: the worker died of SIGABRT"


def test_a_longer_deadline_tries_again(place: Make) -> None:
    """What hung is tried again by who gives it more time."""
    here = place()
    here.module = HURRIED
    here.script["misdeeds"] = misdeeds((SECOND, "hang", 1))
    assert lost(here.run(OPERATOR, *QUICKLY)) == 1
    assert lost(here.run(OPERATOR, *OTHER, *QUICKLY)) == 0
    assert lost(here.run(OPERATOR, "--shape", "T=40,H=8", "--launch-deadline", str(DEADLINE_S + 1))) == 1


def test_a_hang_beside_others_is_passing(place: Make) -> None:
    """What does not end while another process is on the device may be waiting for it, and is not remembered."""
    here = place()
    here.module = HURRIED
    here.script["misdeeds"] = misdeeds((SECOND, "hang", 1))
    here.script["condition"] = {"foreign_processes": 1}
    assert lost(here.run(OPERATOR, *QUICKLY)) == 1
    assert not list(here.cache.glob("*.failures.toml"))


# --- being stopped ------------------------------------------------------------------------------------------------

SHAPES = ("--shape", "T=1,H=8", "--shape", "T=2,H=8", "--shape", "T=4,H=8")
HANGS = misdeeds((BEST, "hang", 1))


def shapes_file(here: Place, *sizes: int) -> tuple[str, str]:
    """Options for some sizes of the operator with a few candidates."""
    path = here.folder / "shapes.toml"
    path.write_text("".join(f'[[problem]]\nop = "{FEW}"\nT = {size}\nH = 8\n' for size in sizes))
    return ("--shapes", str(path))


def test_ctrl_c_keeps_what_was_decided(place: Make) -> None:
    """Ctrl-C ends the command and its worker, says what is kept and how to go on, and prints no data."""
    here = place()
    process = here.start(OPERATOR, *SHAPES, "--json", stops_after=1)
    until(process, lambda line: "gain" in line)
    workers = children_of(process.pid)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out) == (130, "")
    assert "stopped: 1 decisions are kept in" in err
    assert "run the same command again" in err
    assert "Traceback" not in err
    assert gone(workers)
    assert here.rows(*SHAPES)[0]["how"] == "hit"


def test_ctrl_c_while_a_candidate_hangs(place: Make) -> None:
    """A worker that hangs does not keep Ctrl-C from ending the command."""
    here = place()
    here.script["misdeeds"] = HANGS
    process = here.start(OPERATOR)
    until_it_hangs(here)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130


def test_a_worker_does_not_outlive_its_command(place: Make) -> None:
    """When the command is killed, a worker ends too, even one that hangs."""
    here = place()
    here.script["misdeeds"] = HANGS
    process = here.start(OPERATOR)
    until_it_hangs(here)
    workers = children_of(process.pid)
    process.kill()
    process.communicate(timeout=LIMIT_S)
    assert workers
    assert gone(workers)


def test_a_killed_command_goes_on(place: Make) -> None:
    """Killed in the middle of its work again and again, the same command makes every decision once and damages none."""
    here = place()
    here.script["times_us"] = {}
    arguments = shapes_file(here, 1, 2, 4, 8, 16, 32)
    for made in (0, 1, 3):
        process = here.start(*arguments, stops_after=made)
        until_it_hangs(here)
        process.kill()
        process.communicate(timeout=LIMIT_S)
    done = here.run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    assert [found["how"] for found in json.loads(done.stdout)["problems"]] == ["hit"] * 3 + ["tuned"] * 3
    assert [found["how"] for found in json.loads(here.run(*arguments, "--json").stdout)["problems"]] == ["hit"] * 6
    assert not list(here.cache.glob("*.bad"))


def compiled(here: Place) -> dict[str, float]:
    """The code in the compiler's cache, with the time it was written."""
    return {str(path): path.stat().st_mtime for path in (here.folder / "triton").rglob("*.cubin")}


def test_compiles_are_not_paid_twice(place: Make) -> None:
    """After a kill the compiler's own cache has what was compiled, and the next run compiles nothing of it again."""
    here = place()
    here.script |= {"target": ["cuda", 90, 32], "misdeeds": misdeeds((REFERENCE.replace(BLOCK=128), "hang", 1))}
    process = here.start(FEW)
    until_it_hangs(here)  # which it does when everything is compiled
    process.kill()
    process.communicate(timeout=LIMIT_S)
    before = compiled(here)
    del here.script["misdeeds"]
    (found,) = json.loads(here.run(FEW, "--json").stdout)["problems"]
    assert found["how"] == "tuned"
    assert len(before) == 3
    assert {path: at for path, at in compiled(here).items() if path in before} == before
    assert len([path for path in compiled(here) if path not in before]) <= len(before)  # what only the gate runs


def test_a_budget_ends_a_hang(place: Make) -> None:
    """A budget holds for the command as a whole, whatever a candidate does with its deadline."""
    here = place()
    here.module = HURRIED
    here.script["misdeeds"] = misdeeds((REFERENCE, "hang", 1))
    done = here.run(OPERATOR, "--budget", "600", "--launch-deadline", "1e9")
    assert done.returncode == 0, done.stderr
    assert "the budget is spent" in done.stderr  # in the middle of the kernel, or before a slow machine came to it


def test_a_budget_that_is_spent_leaves_rows(place: Make) -> None:
    """Problems that a budget leaves no time for are said to be left, and what was tried is kept."""
    here = place()
    done = here.run(OPERATOR, *SHAPES, "--budget", "1e-9", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["problems"] == []
    assert "the budget is spent: 3 problems left; run the command again" in done.stderr


# --- plugins ------------------------------------------------------------------------------------------------------

ENDS = """
import os
from kalign_core.hookspecs import hookimpl

KALIGN_API = 1

@hookimpl
def kalign_veto(kernel, problem, model, config):
    os.abort()
"""


def test_a_hook_that_ends_the_worker_is_named(place: Make, distribution: Callable[..., str]) -> None:
    """A plugin whose hook takes the worker along costs the kernel its tuning, at once, and is named with the remedy."""
    here = place()
    distribution(here.folder, "npu", ENDS)
    done = here.run(OPERATOR, "--json")
    assert row(done)["how"] == "not tunable"
    assert row(done)["reason"].startswith("plugin 'npu' in kalign_veto: the worker died of SIGABRT")
    assert row(done)["reason"].endswith("export KALIGN_DISABLE_PLUGINS=npu")
    assert lost(done) == 1


# --- what is said -------------------------------------------------------------------------------------------------


def test_a_wrong_request_exits_as_ever(place: Make) -> None:
    """What the worker finds wrong with a request is the command's own error: exit code 2 and no data."""
    done = place().run("doubling", "--json")
    assert (done.returncode, done.stdout) == (2, "")
    assert "unknown operator 'doubling'" in done.stderr


def test_an_operator_that_cannot_be_made_is_a_row(place: Make) -> None:
    """A module that ends the process when it is imported costs the command, with what to type to see it."""
    here = place()
    (here.folder / "ends.py").write_text("import os\nos.abort()\n")
    done = here.run("ends:operator")
    assert done.returncode == 1
    assert "died of SIGABRT" in done.stderr
    assert "--in-process" in done.stderr


def test_a_terminal_sees_a_table(place: Make) -> None:
    """On a terminal standard error shows how far the kernel is, and standard output is as ever."""
    here = place()
    master, slave = pty.openpty()
    process = here.start(OPERATOR, "--json", stderr=slave)
    os.close(slave)
    seen = b""
    while True:
        try:
            read = os.read(master, 65536)
        except OSError:  # the terminal is closed with the process
            break
        seen += read
    out, _ = process.communicate(timeout=LIMIT_S)
    os.close(master)
    assert json.loads(out)["problems"][0]["how"] == "tuned"
    assert b"\x1b[" in seen
    assert b"doubling T=4 H=8 fp32 train" in seen


def test_in_process_is_what_it_says(place: Make) -> None:
    """--in-process starts no worker: a candidate that aborts ends the command."""
    here = place()
    here.script["misdeeds"] = misdeeds((SECOND, "abort", 1))
    assert here.run(OPERATOR, "--in-process").returncode == -signal.SIGABRT
