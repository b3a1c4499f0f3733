"""Decisions through a real operator: few of them however sizes vary, flat memory, and hits that touch nothing.

Kernels are left out where they do not matter: what is under test is everything of kalign's around a launch.
"""

from __future__ import annotations

import gc
import json
import logging
import random
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import kalign_core as kalign
from kalign_core.cache.toml_store import TomlStore
from kalign_core.declare import Kernel, powers_of_two
from kalign_core.hal.base import Launch
from kalign_core.hal.replay import IDENTITY, ReplayPlatform
from kalign_core.kernels.rms_norm import rms_norm_kernel
from kalign_core.ops import noting
from kalign_core.records import Config, Entry, Problem
from kalign_core.session import Session
from kalign_core.settings import Settings
from tests.core.scripted import normals, ops

ROWS, WIDTH = 4096, 16
BUCKETS = {powers_of_two(rows) for rows in range(1, ROWS + 1)}


class EmptyLaunches(ReplayPlatform):
    """The scripted platform with launches that do nothing."""

    def launcher(self, kernel: Kernel, problem: Problem, config: Config, args: Sequence[Any]) -> Launch:
        return lambda *_: None


class Deciding(Session):
    """A session whose tunings decide for the reference at once, and are counted."""

    tunings = 0

    def tune(self, kernel: Kernel, problem: Problem, device: int, **_: Any) -> Any:
        self.tunings += 1
        entry = Entry(self.key(kernel, problem, device), kernel.reference_config(problem), decided="2026-11-30")
        stored = self.store.put(self.facts(device).identity, entry)
        self.forget(kernel)
        return Decision(entry), stored


class Decision:
    """What a session reads of a tuning's report."""

    def __init__(self, entry: Entry) -> None:
        self.entry, self.reason, self.storable = entry, "", True


def deciding(folder: Path, platform: ReplayPlatform | None = None) -> Deciding:
    return Deciding(platform=platform or EmptyLaunches(), store=TomlStore(Settings(cache_dir=folder)))


def run(here: Session, mode: str, counts: Sequence[int]) -> None:
    """Call the operator once for each row count, on memory that nobody fills."""
    memory, weight = torch.empty(ROWS, WIDTH), torch.ones(WIDTH)
    with here.active(), kalign.using(mode=mode):
        for rows in counts:
            ops.rms_norm(memory[:rows], weight)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of the devices' files, not made yet."""
    return tmp_path / "cache"


@pytest.fixture
def counts() -> list[int]:
    """Ten thousand row counts."""
    numbers = random.Random(2026)
    return [numbers.randint(1, ROWS) for _ in range(10_000)]


def test_varying_rows_make_a_decision_a_bucket(folder: Path, counts: list[int]) -> None:
    """Ten thousand row counts are as many tunings, entries and launches kept as there are buckets."""
    here = deciding(folder)
    run(here, "tune", counts)
    assert here.tunings == len(BUCKETS)
    assert here.close()
    entries = TomlStore(Settings(cache_dir=folder)).entries(IDENTITY)
    assert {entry.key.problem for entry in entries} == {f"T<={edge} H={WIDTH}" for edge in BUCKETS}
    assert len(entries) == len(here.site(rms_norm_kernel).memo) == len(BUCKETS)


@pytest.mark.parametrize("mode", ["tune", "read", "frozen"])
def test_varying_rows_hit_what_was_decided(folder: Path, counts: list[int], mode: str) -> None:
    """Another process answers the same row counts from the file and tunes nothing."""
    first = deciding(folder)
    run(first, "tune", sorted(BUCKETS))
    assert first.close()
    here = deciding(folder)
    run(here, mode, counts)
    assert here.tunings == 0
    assert len(here.site(rms_norm_kernel).memo) == len(BUCKETS)
    assert here.store.flush()
    assert len(TomlStore(Settings(cache_dir=folder)).entries(IDENTITY)) == len(BUCKETS)


def test_what_is_remembered_of_calls_is_bounded(folder: Path, counts: list[int], monkeypatch: Any) -> None:
    """However many shapes are called, what a session keeps to launch at once has a bound."""
    monkeypatch.setattr(noting, "MEMO_LIMIT", 100)
    here = deciding(folder)
    largest = 0
    for start in range(0, len(counts), 500):
        run(here, "tune", counts[start : start + 500])
        largest = max(largest, len(here.calls))
    assert 1 < largest <= 100


@pytest.mark.parametrize("mode", ["tune", "read"])
def test_memory_stays_flat(folder: Path, counts: list[int], mode: str) -> None:
    """Once every row count was met, ten thousand further calls leave nothing behind."""
    here = deciding(folder)
    run(here, "tune", sorted(BUCKETS))
    assert here.close()
    run(here, mode, range(1, ROWS + 1))
    tracemalloc.start()
    try:
        run(here, mode, counts[:1000])
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        run(here, mode, counts)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 4096


HITS = """
import gc, json, sys, threading
from pathlib import Path
import torch
import kalign_core as kalign
from tests.core.test_cache_operator import deciding, ops

here = deciding(Path({folder!r}))
memory, weight = torch.empty(128, 16), torch.ones(16)
x = memory[:100]
events, watching, mine = [], False, threading.get_ident()

def watch(event, arguments):
    if watching and threading.get_ident() == mine:
        events.append(event)

def hit(times):
    for _ in range(times):
        ops.rms_norm(x, weight)

sys.addaudithook(watch)
with here.active(), kalign.using(mode={mode!r}):
    hit(100)
    assert here.close() and not here.tunings
    gc.collect(), gc.disable()
    watching = True
    hit(1000)
    for rows in range(65, 129):
        ops.rms_norm(memory[:rows], weight)
    watching = False
    hits, events = events, []
    here.forget()
    watching = True
    hit(1)
    watching = False
    before = sys.getallocatedblocks()
    hit(1000)
    grown = sys.getallocatedblocks() - before
print(json.dumps({{"hits": hits, "look-up": sorted(set(events)), "grown": grown}}))
"""


@pytest.mark.parametrize("mode", ["read", "tune", "frozen"])
def test_a_hit_calls_no_system_and_leaves_nothing(folder: Path, child: Any, mode: str) -> None:
    """Hits and other sizes of their bucket reach nothing outside and leave no memory; a look-up reaches no file."""
    first = deciding(folder)
    run(first, "tune", [100])
    assert first.close()
    done = child(HITS.format(folder=str(folder), mode=mode), TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found["hits"]) <= {"builtins.id"}  # which the first call of another size asks, of tensors
    assert set(found["look-up"]) <= {"builtins.id", "object.__getattr__", "sys._getframe"}
    assert found["grown"] < 10  # of a thousand hits; the interpreter's own free lists move by a few


# --- whatever the file does ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", ["damaged", "open to all", "a file for a folder", "a folder for a file", "newer"])
@pytest.mark.parametrize("mode", ["read", "tune"])
def test_no_file_reaches_a_result(folder: Path, mode: str, trouble: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever is wrong with the file, the operator's result is right and one warning says what it is."""
    first = deciding(folder)
    run(first, "tune", [2])
    assert first.close()
    path = first.store.path(IDENTITY)
    assert path is not None
    content = path.read_bytes()
    if trouble == "damaged":
        path.write_bytes(content[: len(content) // 2])
    elif trouble == "open to all":
        folder.chmod(0o777)
    elif trouble == "newer":
        path.write_bytes(content.replace(b"schema = 1", b"schema = 2"))
    elif trouble == "a folder for a file":
        path.unlink()
        path.mkdir()
    else:
        folder = path
    caplog.set_level(logging.WARNING, "kalign")
    here = deciding(folder, ReplayPlatform())
    x, weight = normals(2, WIDTH), normals(WIDTH, seed=1)
    with here.active(), kalign.using(mode=mode):
        got = [ops.rms_norm(x, weight) for _ in range(3)]
    here.close()
    assert all(torch.allclose(one, ops.rms_norm.oracle(x, weight).float()) for one in got)
    assert len(caplog.messages) == 1
    assert str(path) in caplog.messages[0] or str(folder) in caplog.messages[0]
