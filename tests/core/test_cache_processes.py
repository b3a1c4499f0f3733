"""Many processes on one file: nothing lost, nobody waiting for ever."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import tomllib

import pytest

from tests.core.cache_samples import DEVICE, entry, key, store_in, write_many


def test_processes_lose_nothing(tmp_path):
    """Eight processes that write forty decisions each at once keep all 320."""
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=write_many, args=(tmp_path / "cache", 40 * n, 40)) for n in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * 8
    store = store_in(tmp_path / "cache")
    assert {found.key for found in store.entries(DEVICE)} == {key(n) for n in range(320)}
    assert tomllib.loads(store.path(DEVICE).read_text())["entries"] == 320


def in_child(work):
    """Run ``work`` in a forked child that is killed after ten seconds; gives its exit code."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)
        code = 1
        try:
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_while_a_lock_is_held_does_not_hang_the_child(tmp_path):
    """A child forked while another thread of its parent writes can look up and write."""
    store = store_in(tmp_path / "cache")
    store.put(DEVICE, entry(1))
    held, done = threading.Event(), threading.Event()

    def hold():
        with store._lock:
            held.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(20)
    try:
        code = in_child(lambda: 0 if store.lookup(DEVICE, key(1)) and store.put(DEVICE, entry(2)) else 3)
    finally:
        done.set()
        thread.join()
    assert code == 0
    assert store_in(tmp_path / "cache").lookup(DEVICE, key(2)) == entry(2)


def test_a_process_killed_after_its_decision_has_kept_it(tmp_path):
    """A decision survives a process that is killed right after making it."""

    def decide_and_die():
        store_in(tmp_path / "cache").put(DEVICE, entry(1))
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    assert in_child(decide_and_die) == -signal.SIGKILL
    assert store_in(tmp_path / "cache").lookup(DEVICE, key(1)) == entry(1)
