"""Many processes on one file: nothing lost, nobody waiting for ever."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import tomllib

import pytest

from kalign_core.cache.files import locked
from tests.core.cache_samples import DEVICE, entry, kept, key, store_in, write_many


def test_processes_lose_nothing(tmp_path):
    """Eight processes that write forty decisions each at once keep all 320."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=write_many, args=(tmp_path / "cache", 40 * n, 40)) for n in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE_S)
    assert [process.exitcode for process in processes] == [0] * 8
    store = store_in(tmp_path / "cache")
    assert {found.key for found in store.entries(DEVICE)} == {key(n) for n in range(320)}
    assert tomllib.loads(store.path(DEVICE).read_text())["entries"] == 320


PATIENCE_S = 300.0
DECIDE = """
from pathlib import Path
from tests.core.cache_samples import DEVICE, entry, store_in
store = store_in(Path({folder!r}), {wait_s})
"""


def appears(folder, number):
    """Whether the decision ``number`` comes to be on disk by itself."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if store_in(folder).lookup(DEVICE, key(number)) is not None:
            return True
        time.sleep(0.01)
    return False


def in_child(work):
    """Run ``work`` in a forked child that is killed after some minutes; gives its exit code."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(int(PATIENCE_S))
        code = 1
        try:
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("lock", ["_lock", "_saving"])
def test_a_fork_while_a_lock_is_held_does_not_hang_the_child(tmp_path, lock):
    """A child forked while another thread of its parent looks something up or writes can do both."""
    store = store_in(tmp_path / "cache")
    kept(store, DEVICE, entry(1))
    held, done = threading.Event(), threading.Event()

    def hold():
        with getattr(store, lock):
            held.set()
            done.wait(PATIENCE_S)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(PATIENCE_S)
    try:
        code = in_child(lambda: 0 if store.lookup(DEVICE, key(1)) and kept(store, DEVICE, entry(2)) else 3)
    finally:
        done.set()
        thread.join()
    assert code == 0
    assert store_in(tmp_path / "cache").lookup(DEVICE, key(2)) == entry(2)


def test_a_process_killed_after_its_decision_has_kept_it(tmp_path):
    """A decision survives a process that is killed right after making it."""

    def decide_and_die():
        kept(store_in(tmp_path / "cache"), DEVICE, entry(1))
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    assert in_child(decide_and_die) == -signal.SIGKILL
    assert store_in(tmp_path / "cache").lookup(DEVICE, key(1)) == entry(1)


def test_a_decision_is_written_by_itself(tmp_path):
    """What was put comes to be on disk though nobody asks for it."""
    store = store_in(tmp_path / "cache")
    assert store.put(DEVICE, entry(1))
    assert appears(tmp_path / "cache", 1)


def test_a_process_killed_while_it_runs_on_has_kept_its_decision(tmp_path):
    """A process that decides, goes on and is killed any time after the file is there leaves its decision."""
    folder = tmp_path / "cache"
    pid = os.fork()
    if pid == 0:
        store_in(folder).put(DEVICE, entry(1))
        signal.pause()
    try:
        assert appears(folder, 1)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert store_in(folder).lookup(DEVICE, key(1)) == entry(1)


def test_a_decision_waits_for_no_other_process(tmp_path):
    """Where another process sits on the lock, put returns at once and the decision is written once the lock is free."""
    store = store_in(tmp_path / "cache", lock_wait_s=30.0)
    assert kept(store, DEVICE, entry(1))
    with locked(store.path(DEVICE), 1.0):
        assert all(store.put(DEVICE, entry(number)) for number in range(2, 20))
        assert store.lookup(DEVICE, key(19)) == entry(19)
        assert len(store_in(tmp_path / "cache").entries(DEVICE)) == 1
    assert store.flush()
    assert len(store_in(tmp_path / "cache").entries(DEVICE)) == 19


def test_waiting_for_the_disk_has_an_end(tmp_path, caplog):
    """Where the disk takes nothing, flush gives up in time with a warning, and says so."""
    store = store_in(tmp_path / "cache", lock_wait_s=0.05)
    with store._saving:
        store.put(DEVICE, entry(1))
        assert not store.flush()
    assert ["the disk has not taken" in record.getMessage() for record in caplog.records] == [True]
    store._lock_wait_s = PATIENCE_S
    assert store.flush()


def test_a_process_that_ends_has_written(tmp_path, child):
    """A decision made just before the end of the interpreter is on disk after it."""
    folder = tmp_path / "cache"
    done = child(DECIDE.format(folder=str(folder), wait_s=60.0) + "print(store.put(DEVICE, entry(1)))")
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr
    assert store_in(folder).lookup(DEVICE, key(1)) == entry(1)


def test_a_decision_after_the_end_is_written(tmp_path, child):
    """What a handler decides that runs after everything was written is written all the same."""
    folder = tmp_path / "cache"
    late = "import atexit\natexit.register(lambda: print(store.put(DEVICE, entry(1))))\n"
    done = child(late + DECIDE.format(folder=str(folder), wait_s=60.0))
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr
    assert store_in(folder).lookup(DEVICE, key(1)) == entry(1)


def test_a_process_whose_disk_hangs_ends(tmp_path, child):
    """A file system that never answers does not keep the interpreter from ending."""
    hang = "import threading\nfrom kalign_core.cache import device_file\n"
    hang += "device_file.publish = lambda *_, **__: threading.Event().wait()\nstore.put(DEVICE, entry(1))\n"
    hang += "while not store._saving.locked(): pass\nprint('end')"
    done = child(DECIDE.format(folder=str(tmp_path / "cache"), wait_s=0.05) + hang)
    assert (done.stdout, done.returncode) == ("end\n", 0), done.stderr
    assert "the disk has not taken" in done.stderr


def decide(folder, number):
    """What a worker does that decides and returns."""
    if not store_in(folder).put(DEVICE, entry(number)):
        raise SystemExit("the decision does not go to disk")


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_a_worker_that_returns_has_written(tmp_path, method):
    """A worker process that decides and returns leaves its decision, however it was started."""
    process = multiprocessing.get_context(method).Process(target=decide, args=(tmp_path / "cache", 1))
    process.start()
    process.join(PATIENCE_S)
    assert process.exitcode == 0
    assert store_in(tmp_path / "cache").lookup(DEVICE, key(1)) == entry(1)


def test_a_child_of_fork_writes_its_own_decisions_only(tmp_path):
    """What the parent had not written at the fork is the parent's to write; the child knows it all the same."""
    store = store_in(tmp_path / "cache", lock_wait_s=5.0)
    assert kept(store, DEVICE, entry(1))

    def work():
        known = store.lookup(DEVICE, key(2)) == entry(2)
        return 0 if known and not store._devices[next(iter(store._devices))].unsaved else 3

    with locked(store.path(DEVICE), 1.0):
        store.put(DEVICE, entry(2))
        assert in_child(work) == 0
    assert store.flush()
    assert store_in(tmp_path / "cache").lookup(DEVICE, key(2)) == entry(2)
