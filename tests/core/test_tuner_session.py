"""Tuning at first execution: whatever happens while it tunes, the caller's result is right and the process goes on."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kalign_core import context
from kalign_core.cache.base import MemoryStore
from kalign_core.declare import Kernel
from kalign_core.errors import DeviceLost
from kalign_core.hal.replay import IDENTITY, Clock, ReplayPlatform, Script
from kalign_core.observer import Observer
from kalign_core.records import Condition, Config, Identity, Problem
from kalign_core.session import Session
from kalign_core.settings import Settings
from tests.core.tuner_samples import BEST, REFERENCE, SECOND, builtin, double_kernel, timed

THREADS = 8


class Counting(Observer):
    """Notes which problems were tuned."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: list[bool] = []

    def started(self, kernel: Kernel, problem: Problem) -> Any:
        self.begun.append(f"T={problem.T} {problem.phase}")
        return super().started(kernel, problem)

    def finished(self, report: Any, stored: bool) -> None:
        self.ended.append(stored)


def session(script: Script, **settings: Any) -> Session:
    made = Session(
        platform=ReplayPlatform(script), plugins=builtin(), store=MemoryStore(),
        configuration=Settings(mode="tune", **settings),
    )  # fmt: skip
    made.observer = Counting()
    return made


def fast(**script: Any) -> Script:
    return Script(**{"time_us": Clock({BEST: 80.0, SECOND: 85.0}), **script})


def begun(here: Session) -> list[str]:
    assert isinstance(here.observer, Counting)
    return here.observer.begun


def call(here: Session, rows: int = 4, seed: int = 0, phase: str = "train") -> bool:
    """Call the kernel as an operator would, in mode ``tune``; whether the result is right."""
    x = torch.randn(rows, 8, generator=torch.Generator().manual_seed(seed))
    out = torch.empty_like(x)
    with context.using(mode="tune", phase=phase):
        here.site(double_kernel)(x, out, rows, 8)
    return torch.equal(out, x * 2)


def in_threads(work: Callable[[int], Any], count: int = THREADS) -> list[Any]:
    """Run ``work(0)``, ``work(1)``, ... at once; gives what they gave, or what they raised."""
    barrier = threading.Barrier(count)
    found: list[Any] = [None] * count

    def run(number: int) -> None:
        barrier.wait()
        try:
            found[number] = work(number)
        except BaseException as error:  # a thread's error is the test's to see
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert not any(thread.is_alive() for thread in threads)
    return found


def serves(here: Session, rows: int = 4) -> Config:
    """The configuration that serves a call now."""
    script = here.platform.script  # type: ignore[attr-defined]
    script.launched.clear()
    assert call(here, rows)
    assert len(script.launched) == 1
    found: Config = script.launched[0][1]
    return found


# --- one thread ---------------------------------------------------------------------------------------------------


def test_the_call_that_tunes_is_right() -> None:
    """The first call tunes and gives the right result, the second launches the winner and nothing else."""
    here = session(fast())
    assert call(here)
    assert serves(here) == BEST
    assert begun(here) == ["T=4 train"]


def memory_error(script: Script, times: int) -> Callable[[str, Config, int], BaseException | None]:
    """Memory that runs out for the first so many launches of the reference."""
    left = [times]

    def raises(kernel: str, config: Config, run: int) -> BaseException | None:
        left[0] -= config == REFERENCE
        return torch.OutOfMemoryError("CUDA out of memory") if config == REFERENCE and left[0] >= 0 else None

    return raises


def test_no_memory_while_tuning_leaves_the_call_right() -> None:
    """Where tuning runs out of memory the reference serves the call that began it."""
    script = fast()
    script.raises = memory_error(script, 1)
    here = session(script)
    assert call(here)
    assert serves(here) == REFERENCE


def second_launch_of_the_reference() -> Callable[[str, Config, int], bool]:
    """The second launch of the reference, whoever makes it."""
    launches: list[Config] = []

    def corrupts(kernel: str, config: Config, run: int) -> bool:
        launches.append(config)
        return config == REFERENCE and launches.count(REFERENCE) == 2

    return corrupts


@pytest.mark.parametrize(
    "script",
    [
        {"corrupts": second_launch_of_the_reference()},
        {"fails": lambda kernel, config: "no" if config != REFERENCE else None},
        {"raises": lambda kernel, config, run: SystemExit(1) if config != REFERENCE else None},
    ],
    ids=["unstable reference", "nothing compiles", "everything exits"],
)
def test_whatever_goes_wrong_the_reference_serves(script: dict[str, Any]) -> None:
    """A tuning that finds nothing, or must not be, is no error of the call."""
    here = session(fast(**script))
    assert call(here)
    assert serves(here) == REFERENCE


def test_nothing_is_tuned_in_capture() -> None:
    """A call inside a capture launches the reference, once; the next one outside tunes."""
    here = session(fast(capturing=True))
    assert serves(here) == REFERENCE
    here.platform.script.capturing = False  # type: ignore[attr-defined]
    assert call(here)
    assert serves(here) == BEST


def test_a_lost_device_stops_tuning(caplog: pytest.LogCaptureFixture) -> None:
    """After an error that sticks to the device the process says so and tunes no further problem."""
    here = session(fast(loses=lambda kernel, config, run: config == BEST))
    with pytest.raises(DeviceLost):
        call(here)
    assert "illegal memory access" in caplog.text
    here.platform.script.loses = Script().loses  # type: ignore[attr-defined]
    assert call(here, 8)
    assert begun(here) == ["T=4 train"]


def test_a_budget_is_for_the_process() -> None:
    """What the first problem spent is gone for the second, which keeps its reference."""
    here = session(fast(), tune_budget_s=1e-9)
    assert call(here)
    assert call(here, 8)
    assert serves(here, 8) == REFERENCE
    assert len(begun(here)) <= 1


def test_a_disturbed_decision_serves_this_process() -> None:
    """A winner measured on a disturbed device serves here and is not stored."""
    here = session(fast(condition=Condition(foreign_processes=1)))
    assert call(here)
    assert serves(here) == BEST
    assert here.store.entries(IDENTITY) == ()


def test_a_device_without_a_name_is_tuned_for_the_process() -> None:
    """Where the device cannot be identified the winner serves from memory."""
    unknown = Identity(vendor="scripted", name="Scripted One", key="unknown")
    here = session(fast(identity=unknown))
    assert call(here)
    assert serves(here) == BEST
    assert begun(here) == ["T=4 train"]


def test_an_interrupt_while_tuning_leaves_the_session_usable() -> None:
    """Ctrl-C in a tuning passes to the caller, and the next call may tune the same problem."""
    script = fast(raises=lambda kernel, config, run: KeyboardInterrupt() if config == BEST else None)
    here = session(script)
    with pytest.raises(KeyboardInterrupt):
        call(here)
    script.raises = Script().raises
    assert call(here)
    assert serves(here) == BEST


# --- many threads -------------------------------------------------------------------------------------------------


def test_one_thread_tunes_a_key() -> None:
    """Of eight threads that meet a cold key one tunes it; the others are served meanwhile, and all are right."""
    here = session(fast())
    assert in_threads(lambda number: call(here, seed=number)) == [True] * THREADS
    assert begun(here) == ["T=4 train"]
    assert serves(here) == BEST


def test_threads_tune_their_own_keys() -> None:
    """Eight threads with eight keys tune each of them once, and every result is right."""
    here = session(fast())
    keys = [(size, phase) for size in (1, 2, 4, 8) for phase in ("train", "decode")]
    found = in_threads(lambda number: call(here, keys[number][0], phase=keys[number][1]))
    assert found == [True] * THREADS
    assert sorted(begun(here)) == sorted(f"T={size} {phase}" for size, phase in keys)
    assert {serves(here, size) for size, _ in keys} == {BEST}


def test_a_thread_that_fails_frees_its_key() -> None:
    """A thread that is interrupted while it tunes holds nobody up: the next one tunes the key."""
    script = fast(raises=lambda kernel, config, run: KeyboardInterrupt() if config == BEST else None)
    here = session(script)
    found = in_threads(lambda number: call(here))
    assert any(isinstance(result, KeyboardInterrupt) for result in found)
    assert all(result is True for result in found if not isinstance(result, KeyboardInterrupt))
    script.raises = Script().raises
    assert call(here)
    assert serves(here) == BEST


def test_tuning_inside_a_tuning_does_not_wait_for_itself() -> None:
    """A kernel whose tuning calls another operator, which tunes in turn, comes to an end."""
    here = session(fast())
    inner: list[bool] = []

    def raises(kernel: str, config: Config, run: int) -> None:
        if config == BEST and not inner:
            inner.append(False)
            inner[0] = call(here, 8)

    here.platform.script.raises = raises  # type: ignore[attr-defined]
    assert call(here)
    assert inner == [True]
    assert sorted(begun(here)) == ["T=4 train", "T=8 train"]


def test_a_fork_while_a_thread_tunes_leaves_the_child_free() -> None:
    """A child of fork launches, and tunes, though a thread of its parent was in the middle of a tuning."""
    inside, go_on = threading.Event(), threading.Event()

    def raises(kernel: str, config: Config, run: int) -> None:
        if config == BEST and not inside.is_set():
            inside.set()
            go_on.wait(600)

    script = fast(raises=raises)
    here = session(script)
    with here.active():
        tuner = threading.Thread(target=call, args=(here,), daemon=True)
        tuner.start()
        assert inside.wait(600)
        child = os.fork()
        if child == 0:
            script.raises = Script().raises
            found = in_threads(lambda number: call(here, 8), 1)
            os._exit(0 if found == [True] else 1)
        _, status = os.waitpid(child, 0)
        go_on.set()
        tuner.join(600)
    assert os.waitstatus_to_exitcode(status) == 0
    assert timed(script)
