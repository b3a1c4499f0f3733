"""Calls while a graph is captured: what is known is launched, nothing is tuned, waited for, allocated or read."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kalign_core.cache.toml_store import TomlStore
from kalign_core.hal.replay import ReplayPlatform, Script
from kalign_core.records import Config
from kalign_core.session import Session
from kalign_core.settings import Settings
from tests.core.scripted import (
    FASTER,
    SCALE_REFERENCE,
    X,
    counts,
    launched,
    prefers,
    scale_kernel,
    scale_problem,
    scripted,
    served,
    store_winner,
)


def test_nothing_is_tuned_while_a_graph_is_captured() -> None:
    """A miss under capture launches the reference alone and is not remembered: the next call tunes."""
    made = scripted(prefers(FASTER))
    made.platform.script.capturing = True  # type: ignore[attr-defined]
    assert served(made, "tune") == SCALE_REFERENCE
    assert (len(launched(made)), counts(made)[1]) == (1, 0)
    made.platform.script.capturing = False  # type: ignore[attr-defined]
    assert served(made, "tune") == FASTER


def test_a_hit_is_a_hit_while_a_graph_is_captured() -> None:
    """Under capture a stored winner serves the call."""
    made = scripted(Script(capturing=True))
    store_winner(made, X)
    assert served(made, "tune") == FASTER


class Held:
    """Stands for a lock that another thread holds for good."""

    def __enter__(self) -> None:
        raise AssertionError("a lock was waited for")

    def __exit__(self, *raised: object) -> None:
        """Never reached."""


class Listening(ReplayPlatform):
    """A scripted platform that says what it was asked which a capture does not survive."""

    asked: ClassVar[frozenset[str]] = frozenset({"synchronize", "timer", "free_bytes", "condition", "on"})

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.heard: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name in Listening.asked:
            self.heard.append(name)
        return super().__getattribute__(name)


@pytest.mark.parametrize("known", [FASTER, None], ids=["a hit", "a miss"])
def test_a_call_under_capture_waits_for_nothing(tmp_path: Path, known: Config | None) -> None:
    """Under capture neither device nor lock nor file is touched, be the decision there or not; the next call tunes."""
    platform = Listening(prefers(FASTER))
    made = Session(platform=platform, store=TomlStore(Settings(cache_dir=tmp_path, sources={})))
    if known:
        store_winner(made, X)
    assert made.lookup(scale_kernel, scale_problem(t=8), -1) is None  # the file was read before the capture
    assert made.store.flush()
    platform.script.capturing = True
    lock, made._lock = made._lock, Held()  # type: ignore[assignment]
    with watched("open", "os.", "fcntl.") as events:
        assert served(made, "tune") == (known or SCALE_REFERENCE)
    assert (platform.heard, events) == ([], [])
    platform.script.capturing, made._lock = False, lock
    assert served(made, "tune") == FASTER
    assert ("timer" in platform.heard) == (known is None)


@contextlib.contextmanager
def watched(*kinds: str) -> Iterator[list[str]]:
    """What this thread asks of the system inside the block, of those kinds."""
    events: list[str] = []
    thread, watching = threading.get_ident(), True

    def watch(event: str, arguments: object) -> None:
        if watching and event.startswith(kinds) and threading.get_ident() == thread:
            events.append(event)

    sys.addaudithook(watch)  # hooks cannot be removed, so this one is put to sleep below
    try:
        yield events
    finally:
        watching = False
