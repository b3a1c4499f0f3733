"""Calling somebody else's function: only its value gets out."""

from __future__ import annotations

import sys
import threading

import pytest

from kalign_core.errors import PluginFault
from kalign_core.isolate import REASON_LENGTH, attempt, reason_of


def test_a_value_comes_through() -> None:
    """A function that works gives its value, called with the arguments it was given."""
    assert attempt(int, "ff", base=16).value == 255


@pytest.mark.parametrize("error", [ValueError, SystemExit, GeneratorExit, MemoryError])
def test_everything_is_caught(error: type[BaseException]) -> None:
    """Whatever a function raises is an outcome."""

    def fail() -> None:
        raise error

    outcome = attempt(fail)
    assert (type(outcome.error), outcome.reason) == (error, error.__name__)


def test_keyboard_interrupt_is_not_caught() -> None:
    """KeyboardInterrupt is the user's and passes, with stdout put back."""

    def stop() -> None:
        raise KeyboardInterrupt

    before = sys.stdout
    with pytest.raises(KeyboardInterrupt):
        attempt(stop)
    assert sys.stdout is before


def test_stdout_is_held_back(capsys: pytest.CaptureFixture[str]) -> None:
    """What a function prints is in the outcome and not on stdout, whether it fails or not."""

    def fail() -> None:
        print("half way")
        raise OSError

    assert attempt(fail).printed == "half way\n"
    assert attempt(print, "all the way").printed == "all the way\n"
    assert capsys.readouterr().out == ""


def test_other_threads_go_on_printing(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines of other threads are not held back."""

    def wait_for_another() -> None:
        other = threading.Thread(target=print, args=("from another thread",))
        other.start()
        other.join()

    assert attempt(wait_for_another).printed == ""
    assert capsys.readouterr().out == "from another thread\n"


def test_leaving_out_of_order_loses_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Two threads that hold stdout at once may leave in either order, and both print afterwards."""
    second_in, first_out = threading.Event(), threading.Event()

    held = []

    def second() -> None:
        second_in.set()
        first_out.wait(10)
        print("the second, held back")

    def run_second() -> None:
        held.append(attempt(second).printed)
        print("the second, afterwards")

    other = threading.Thread(target=run_second)

    def first() -> None:
        other.start()
        second_in.wait(10)

    attempt(first)
    print("the first, afterwards")
    first_out.set()
    other.join()
    print("the first, at last")
    expected = ["the first, afterwards", "the second, afterwards", "the first, at last"]
    assert (capsys.readouterr().out.splitlines(), held) == (expected, ["the second, held back\n"])


def test_the_reason_of_our_own_errors_is_their_message() -> None:
    """Errors of kalign say what happened in their first line, so their type adds nothing."""
    assert reason_of(PluginFault("no such hook", why="because", fix="do")) == "no such hook"


def test_reasons_are_cut() -> None:
    """A reason is never longer than a line of a table can be."""
    assert len(reason_of(ValueError("x" * 1000))) == REASON_LENGTH
