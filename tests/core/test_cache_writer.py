"""Writing behind the caller's back: at once, together, again where it failed, and never for ever."""

from __future__ import annotations

import threading

import pytest

from kalign_core.cache import writer
from kalign_core.cache.writer import Writer

PATIENCE_S = 600.0


class Work:
    """Work that waits to be let go on, counts its turns and succeeds or not as told."""

    def __init__(self, *answers: bool) -> None:
        self.turns, self.answers = 0, list(answers)
        self.begun, self.go_on = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self) -> bool:
        self.turns += 1
        self.begun.release()
        assert self.go_on.acquire(timeout=PATIENCE_S)
        return self.answers.pop(0) if self.answers else True

    def wait_for_turn(self) -> None:
        assert self.begun.acquire(timeout=PATIENCE_S)


@pytest.fixture
def ended():
    """``ended()`` waits until no thread of this test is left, and says whether there is none."""
    others = set(threading.enumerate())

    def wait():
        mine = set(threading.enumerate()) - others
        for thread in mine:
            thread.join(PATIENCE_S)
        return not any(thread.is_alive() for thread in mine)

    return wait


def test_work_begins_without_its_caller(ended):
    """Whoever asks goes on while the work runs, and a thread is there only until it is done."""
    work = Work()
    assert Writer(gather_s=0).wake(work)
    work.wait_for_turn()
    work.go_on.release()
    assert ended()
    assert work.turns == 1


def test_what_is_asked_meanwhile_is_done_together(ended):
    """However often work is asked for while it runs, it runs once more."""
    work, made = Work(), Writer(gather_s=0)
    made.wake(work)
    work.wait_for_turn()
    for _ in range(50):
        assert made.wake(work)
    for _ in range(2):
        work.go_on.release()
    assert ended()
    assert work.turns == 2


def test_work_that_fails_is_tried_again(ended):
    """Failed work runs again by itself until it succeeds."""
    work, made = Work(False, False, True), Writer(gather_s=0, retry_s=0)
    made.wake(work)
    for _ in range(3):
        work.go_on.release()
    assert ended()
    assert work.turns == 3


def test_work_that_always_fails_is_given_up(ended):
    """Failed work is tried a bounded number of times, and begun anew when it is asked for again."""
    work, made = Work(*[False] * 99), Writer(gather_s=0, retry_s=0, retries=3)
    for turns in (4, 8):
        made.wake(work)
        for _ in range(4):
            work.go_on.release()
        assert ended()
        assert work.turns == turns


def test_a_thread_that_dies_is_replaced(ended, monkeypatch):
    """Work that raises ends its thread, not the writer."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    done, made = threading.Event(), Writer(gather_s=0)

    def breaks():
        raise ValueError("no")

    made.wake(breaks)
    assert ended()
    made.wake(lambda: done.set() or True)
    assert done.wait(PATIENCE_S)


def test_without_threads_the_caller_is_told(monkeypatch):
    """Where no thread can be started the work is left to whoever asked."""

    class NoThread(threading.Thread):
        def start(self):
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(writer.threading, "Thread", NoThread)
    assert not Writer().wake(lambda: True)


def test_the_thread_keeps_no_process_alive(child):
    """An interpreter that ends while work is stuck ends."""
    done = child("import threading\nfrom kalign_core.cache.writer import Writer\n"
                 "Writer().wake(lambda: threading.Event().wait())\nprint('end')")  # fmt: skip
    assert (done.stdout, done.returncode) == ("end\n", 0), done.stderr
