"""Sessions with threads, in children of fork, and the parts that a session is made of."""

from __future__ import annotations

import os
import signal
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

import kalign_core as kalign
from kalign_core import hal, session
from kalign_core.cache.base import MemoryStore
from kalign_core.cache.fingerprint import bit_flags
from kalign_core.hal.cpu import CpuPlatform
from kalign_core.hal.replay import ReplayPlatform
from kalign_core.hookspecs import hookimpl
from kalign_core.observer import KnownDevices
from kalign_core.plugins import Plugins
from kalign_core.records import Entry, StoreRecord, Toolchain
from kalign_core.session import Session
from tests.core.scripted import (
    FASTER,
    SCALE_REFERENCE,
    X,
    bits,
    counts,
    in_threads,
    normals,
    prefers,
    scale,
    scale_kernel,
    scale_problem,
    scripted,
    served,
    store_winner,
    warnings,
)

# --- threads and processes ----------------------------------------------------------------------------------------


def test_one_thread_tunes_a_problem() -> None:
    """Eight threads that meet one new problem at once: one tunes it, all have the right result, none waits for ever."""
    made = scripted(prefers(FASTER))

    def work(i: int) -> bytes:
        with kalign.using(mode="tune"):
            return bits(scale(X))

    with made.active():
        results = in_threads(8, work)
    assert results == [bits(X * 2)] * 8
    assert counts(made)[1] == 1
    assert served(made, "tune") == FASTER


def test_threads_that_come_late_find_the_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that looked before another decided, and tunes after, looks again first."""
    made = scripted(prefers(FASTER))
    lookup = made.lookup
    looked: list[int] = []

    def slow(kernel: Any, problem: Any, device: int) -> Any:
        found = lookup(kernel, problem, device)
        looked.append(1)
        if len(looked) == 1:
            with kalign.using(mode="tune"):
                scale(X)  # what another thread does in the meantime
        return found

    monkeypatch.setattr(made, "lookup", slow)
    assert served(made, "tune") == FASTER
    assert counts(made)[1] == 1


def test_threads_tune_different_problems() -> None:
    """Threads with problems of their own do not disturb each other."""
    made = scripted(prefers(FASTER))

    def work(i: int) -> bool:
        x = normals(3, 8 * (i + 1), seed=i)
        with kalign.using(mode="tune"):
            return torch.equal(scale(x), x * 2)

    with made.active():
        assert in_threads(3, work) == [True] * 3
    assert counts(made)[1] == 3


def in_child(work: Callable[[], bool]) -> bool:
    """Whether ``work`` gives true in a child of fork, within seconds."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    end = time.monotonic() + 300
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_of_fork_can_launch_and_tune() -> None:
    """A child does not wait for locks that a thread of its parent held when it was forked."""
    made = scripted(prefers(FASTER))
    with made.active():
        scale(X)
        held = threading.Event()
        free = threading.Event()

        def hold() -> None:
            from kalign_core.hal import cpu

            with made._lock, made.recording, session._making, cpu._interpreter:
                held.set()
                free.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()

        def work() -> bool:
            with kalign.using(mode="tune"):
                fine = torch.equal(scale(X), X * 2)
            made.say("a warning")
            return fine and len(kalign.explain(scale, X)) == 1 and session._making.acquire(timeout=60)

        try:
            assert in_child(work)
        finally:
            free.set()
            thread.join()


# --- parts --------------------------------------------------------------------------------------------------------


def test_device_facts_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Identity, toolchain and limits are asked for when first needed, and then remembered."""
    made = scripted()
    asked: list[int] = []
    identity = made.platform.identity
    monkeypatch.setattr(made.platform, "identity", lambda device: asked.append(device) or identity(device))
    served(made, "off")
    assert asked == []
    for width in (8, 16):
        served(made, "read", normals(3, width))
    assert asked == [-1]


class FromEnvironment(ReplayPlatform):
    """A scripted platform whose toolchain follows the process's variables, as a compiler's does."""

    def toolchain(self, device: int) -> Toolchain:
        return Toolchain.of(triton="scripted", **bit_flags(os.environ))


def test_a_variable_that_changes_code_is_seen_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decision is no answer while a variable that the compiler reads is another than when it was taken."""
    made = Session(platform=FromEnvironment(), store=MemoryStore())
    store_winner(made, X)
    found = [served(made, "read")]
    for change in (lambda: monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0"), monkeypatch.undo):
        change()
        made.forget()
        found.append(served(made, "read"))
    assert found == [FASTER, SCALE_REFERENCE, FASTER]


def test_facts_are_kept_for_the_variables_they_were_read_under() -> None:
    """What one thread reads while another sees a variable change is not kept as what holds afterwards."""
    variables: dict[str, str] = {}

    class Changing(ReplayPlatform):
        def toolchain(self, device: int) -> Toolchain:
            found = Toolchain.of(triton="scripted", **bit_flags(variables))
            if not variables:
                variables["TRITON_DEFAULT_FP_FUSION"] = "0"
                known[1]  # as another thread would ask
            return found

    known = KnownDevices(Changing, variables)
    assert [dict(known[0].toolchain.facts).get("TRITON_DEFAULT_FP_FUSION") for _ in range(2)] == [None, "0"]


def test_switches_that_reach_no_kernel_are_in_no_key() -> None:
    """torch's own choice of a product's precision makes no other key: kernels say theirs themselves."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision()
    keys = [Session(platform=CpuPlatform()).key(scale_kernel, scale_problem(), -1)]
    try:
        torch.backends.cuda.matmul.allow_tf32 = not before[0]
        keys.append(Session(platform=CpuPlatform()).key(scale_kernel, scale_problem(), -1))
        torch.set_float32_matmul_precision("medium")
        keys.append(Session(platform=CpuPlatform()).key(scale_kernel, scale_problem(), -1))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before[0]
        torch.set_float32_matmul_precision(before[1])
    assert keys == keys[:1] * 3


def test_sessions_nest() -> None:
    """A block's session is the process's, and the one before is back when the block ends, however it ends."""
    outer, inner = scripted(), scripted()
    with outer.active():
        with pytest.raises(ZeroDivisionError), inner.active():
            assert session.current() is inner
            1 / 0  # noqa: B018
        assert session.current() is outer


def test_the_process_has_one_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many threads ask first, the process's session is made once and runs on the platform that was chosen."""
    monkeypatch.setattr(session, "_current", None)
    found = in_threads(8, lambda i: session.current())
    assert len(set(map(id, found))) == 1
    assert (found[0].platform, found[0].plugins) == (hal.platform, hal.plugins)


def store_plugin(*records: StoreRecord) -> Plugins:
    """Plugins that give these stores, and no others."""
    module = types.ModuleType("stores")
    module.KALIGN_API = 1  # type: ignore[attr-defined]

    @hookimpl
    def kalign_stores() -> list[StoreRecord]:
        return list(records)

    module.kalign_stores = kalign_stores  # type: ignore[attr-defined]
    return Plugins().with_module("stores", module)


class ReadOnly(MemoryStore):
    """A store that takes nothing."""

    writable = False


def test_the_first_writable_store_takes_decisions(caplog: pytest.LogCaptureFixture) -> None:
    """Stores that cannot be opened or written are passed over, the former with a warning."""

    def broken(settings: Any) -> MemoryStore:
        raise OSError("no such server")

    wanted, later = MemoryStore(), MemoryStore()
    plugins = store_plugin(
        StoreRecord("server", broken), StoreRecord("shipped", lambda settings: ReadOnly()),
        StoreRecord("mine", lambda settings: wanted), StoreRecord("later", lambda settings: later),
    )  # fmt: skip
    assert Session(platform=scripted().platform, plugins=plugins).store is wanted
    (text,) = warnings(caplog)
    assert "store 'server' of plugin 'stores' is not used" in text


def test_without_a_store_decisions_stay_in_memory() -> None:
    """A process whose plugins give no store keeps its decisions for itself."""
    assert isinstance(Session(platform=scripted().platform, plugins=Plugins()).store, MemoryStore)


def test_a_warning_comes_once(caplog: pytest.LogCaptureFixture) -> None:
    """The same words are said once in a session, from whichever thread."""
    made = scripted()
    in_threads(8, lambda i: made.say("careful"))
    made.say("and now")
    assert warnings(caplog) == ["careful", "and now"]


class Listener(session.Observer):
    """Notes what a session tells."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def started(self, kernel: Any, problem: Any) -> Any:
        self.told.append(f"started {kernel}")
        return super().started(kernel, problem)

    def finished(self, report: Any, stored: bool) -> None:
        self.told.append(f"finished {stored}")

    def hit(self, kernel: Any, problem: Any, entry: Entry) -> None:
        self.told.append(f"hit {entry.config.ROWS}")

    def gave_up(self, kernel: Any, problem: Any, reason: str) -> None:
        self.told.append("gave up")


def test_an_observer_is_told() -> None:
    """What begins, ends, is found and is given up reaches the observer."""
    made = scripted(prefers(FASTER))
    made.observer = Listener()
    served(made, "tune")
    made.forget()
    served(made, "tune")
    assert made.observer.told == ["started scale", "finished False", "hit 8"]


def test_retuning_measures_again() -> None:
    """An observer that asks for it has known problems measured once more, against the incumbent."""
    made = scripted(prefers(SCALE_REFERENCE))
    store_winner(made, X)
    made.observer.retune = True
    assert served(made, "tune") == SCALE_REFERENCE
    assert counts(made)[1] == 2


def test_the_kernel_under_test_is_its_own() -> None:
    """The kernel that these tests tune has two candidates, of which the reference is the first."""
    made = scripted()
    problem_key = store_winner(made, X).key
    assert problem_key.kernel == scale_kernel.name
    with made.active():
        calls = kalign.explain(scale, X)
    assert [call.config for call in calls] == [SCALE_REFERENCE]
