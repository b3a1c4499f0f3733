"""Ranks that share a device's file: who launches what, and that nobody waits for another."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kalign_core.records import Config
from tests.core.rank_process import ROOT, Rank
from tests.core.scripted import FASTER, SCALE_REFERENCE, X, bits

RIGHT = bits(X * 2).hex()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[Config], Rank]]:
    """``start(FASTER)`` begins a rank on whose device that configuration is the fastest."""
    ranks: list[Rank] = []

    def make(fastest: Config) -> Rank:
        ranks.append(Rank(tmp_path / "cache", fastest))
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.process.kill()
        rank.process.communicate()


def test_ranks_that_tune_at_once_agree_from_the_next_start_on(start: Callable[[Config], Rank]) -> None:
    """Each launches what it found itself, with the same bytes; whoever starts later launches what the file holds."""
    ranks = [start(FASTER), start(SCALE_REFERENCE)]
    before = [rank.tell("read") for rank in ranks]  # both have read the file, in which nothing is
    tuned = [rank.tell("tune") for rank in ranks]
    again = [rank.tell("tune") for rank in ranks]
    assert [answer["config"] for answer in before] == [str(SCALE_REFERENCE)] * 2
    assert [answer["config"] for answer in tuned] == [str(FASTER), str(SCALE_REFERENCE)]
    assert again == tuned
    later = [start(FASTER), start(SCALE_REFERENCE)]
    answers = [rank.tell(mode) for rank in later for mode in ("frozen", "read", "tune")]
    assert len({answer["config"] for answer in answers}) == 1
    assert {answer["timed"] for answer in answers} == {0}
    assert {answer["bits"] for answer in (*before, *tuned, *answers)} == {RIGHT}


def test_a_rank_that_starts_late_finds_what_was_decided(start: Callable[[Config], Rank]) -> None:
    """A rank whose file has the decision tunes nothing, whatever is faster on it, and waits for nobody."""
    early = start(FASTER)
    assert early.tell("tune")["config"] == str(FASTER)
    late = start(SCALE_REFERENCE)
    assert late.tell("tune") == {"config": str(FASTER), "timed": 0, "bits": RIGHT}


def test_a_rank_keeps_what_it_began_with(start: Callable[[Config], Rank]) -> None:
    """A rank that reads goes on launching what it found first, though another one decides meanwhile."""
    reading, tuning = start(FASTER), start(FASTER)
    assert reading.tell("read")["config"] == str(SCALE_REFERENCE)
    assert tuning.tell("tune")["config"] == str(FASTER)
    assert reading.tell("read") == {"config": str(SCALE_REFERENCE), "timed": 0, "bits": RIGHT}


def test_a_rank_that_dies_holds_up_nobody(start: Callable[[Config], Rank]) -> None:
    """After a rank was killed in the middle of a tuning the others read, and tune the same problem."""
    dying, other = start(FASTER), start(FASTER)
    assert other.tell("read")["config"] == str(SCALE_REFERENCE)
    assert dying.tell("die in tuning") == {}
    assert dying.end() == -signal.SIGKILL
    assert other.tell("tune")["config"] == str(FASTER)
    assert start(FASTER).tell("frozen") == {"config": str(FASTER), "timed": 0, "bits": RIGHT}


def test_reading_ranks_leave_the_folder_as_it_is(start: Callable[[Config], Rank], tmp_path: Path) -> None:
    """A rank in mode read or frozen writes no file and takes no lock, so that the folder may be a read-only one."""
    first = start(FASTER)
    first.tell("tune")
    assert first.end() == 0
    (decisions,) = (tmp_path / "cache").glob("*.toml")
    for file in (tmp_path / "cache").iterdir():
        if file != decisions:
            file.unlink()
    kept = (decisions.read_bytes(), decisions.stat().st_mtime_ns)
    rank = start(SCALE_REFERENCE)
    assert [rank.tell(mode)["config"] for mode in ("read", "frozen")] == [str(FASTER)] * 2
    assert rank.end() == 0
    assert [*(tmp_path / "cache").iterdir()] == [decisions]
    assert (decisions.read_bytes(), decisions.stat().st_mtime_ns) == kept


def test_no_call_asks_another_rank() -> None:
    """No module of kalign knows torch's means to speak with other processes, so no call of an operator can wait."""
    modules = [
        file for package in ("kalign_core", "kalign_cuda", "kalign_rocm") for file in (ROOT / package).rglob("*.py")
    ]
    assert len(modules) > 100
    assert [file for file in modules if "torch.distributed" in file.read_text(encoding="utf-8")] == []
