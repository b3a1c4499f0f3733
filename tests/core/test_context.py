"""Mode and phase: process defaults, blocks that override them, threads that do not inherit them."""

from __future__ import annotations

import threading

import pytest

from kalign_core import context
from kalign_core.context import Call, current, declare_phase, restored, set_mode, using
from kalign_core.errors import BadArgument, UnknownName


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose defaults nobody has touched."""
    monkeypatch.setattr(context, "_default", None)
    monkeypatch.setattr(context, "_phases", ["train", "prefill", "decode"])


def test_off_is_the_default() -> None:
    """Without a word from anybody calls run the reference, as training."""
    assert current() == Call("off", "train")


def test_the_variable_sets_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """KALIGN_MODE is the process's mode when nothing set another."""
    monkeypatch.setenv("KALIGN_MODE", "read")
    assert current().mode == "read"


def test_a_bad_variable_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """KALIGN_MODE with a mode that does not exist is an error at the first call."""
    monkeypatch.setenv("KALIGN_MODE", "fast")
    with pytest.raises(UnknownName, match="export KALIGN_MODE=tune"):
        current()


def test_setting_the_mode_is_for_good() -> None:
    """``set_mode`` holds until it is called again, and leaves the phase alone."""
    set_mode("tune")
    assert current() == Call("tune", "train")
    set_mode("frozen")
    assert current() == Call("frozen", "train")


def test_using_ends_with_its_block() -> None:
    """Inside the block both are as asked, behind it as before."""
    with using(mode="tune", phase="decode"):
        assert current() == Call("tune", "decode")
    assert current() == Call("off", "train")


def test_using_nests() -> None:
    """An inner block overrides what it names and inherits the rest."""
    with using(mode="tune"), using(phase="decode"):
        assert current() == Call("tune", "decode")
        with using(mode="off"):
            assert current() == Call("off", "decode")
        assert current() == Call("tune", "decode")


def test_using_overrides_what_is_set_inside() -> None:
    """A process's mode that is set inside a block counts when the block ends."""
    with using(mode="read"):
        set_mode("tune")
        assert current().mode == "read"
    assert current().mode == "tune"


def test_an_exception_ends_the_block() -> None:
    """What raises inside a block leaves nothing behind."""
    with pytest.raises(ZeroDivisionError), using(mode="tune"):
        1 / 0  # noqa: B018
    assert current().mode == "off"


def test_a_thread_starts_with_the_defaults() -> None:
    """A block is its thread's own; what a thread needs of it is handed over by ``restored``."""
    seen: list[Call] = []

    def look(call: Call) -> None:
        seen.append(current())
        with restored(call):
            seen.append(current())
        seen.append(current())

    with using(mode="tune", phase="prefill"):
        thread = threading.Thread(target=look, args=(current(),))
        thread.start()
        thread.join()
    assert seen == [Call("off", "train"), Call("tune", "prefill"), Call("off", "train")]


@pytest.mark.parametrize("mode", ["on", "", "Tune", "record"])
def test_an_unknown_mode_lists_the_modes(mode: str) -> None:
    """A mode that does not exist is refused with those that do and what to type, in both places that take one."""
    for attempt in (lambda: set_mode(mode), lambda: using(mode=mode).__enter__()):
        with pytest.raises(UnknownName, match="off, read, tune, frozen") as caught:
            attempt()
        assert caught.value.fix.endswith("kalign.set_mode('tune')")


def test_an_unknown_phase_says_how_to_declare_it() -> None:
    """A phase that was not declared is refused with the line that declares it."""
    with pytest.raises(UnknownName, match="train, prefill, decode") as caught, using(phase="draft"):
        pass
    assert "kalign.declare_phase('draft')" in caught.value.fix


def test_a_declared_phase_is_known() -> None:
    """Declaring a phase, once or twice, makes it one."""
    declare_phase("draft")
    declare_phase("draft")
    with using(phase="draft"):
        assert current().phase == "draft"


@pytest.mark.parametrize("name", ["Draft", "", "two words", "a-b", "9th", "d" * 33])
def test_a_phase_is_a_short_word(name: str) -> None:
    """A name that a key or a file could not hold is refused with one that it could."""
    with pytest.raises(BadArgument, match="is no lower-case word") as caught:
        declare_phase(name)
    assert caught.value.fix == "kalign.declare_phase('draft')"
