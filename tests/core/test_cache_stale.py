"""Entries that can never match here: which are listed and why, which are removed, and what is asked before."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from kalign_core.cli import cache_stale
from kalign_core.records import Entry
from kalign_core.session import Session
from tests.core.cache_commands import ELSEWHERE, Start, data, decisions, kalign, keep, processes, stored


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of the devices' files, not made yet."""
    return tmp_path / "cache"


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """``start(script)`` makes a session as a new process would have it, and the commands use it."""
    with processes(folder) as make:
        yield make


# --- check --------------------------------------------------------------------------------------------------------


def stale_of_every_kind(here: Session) -> list[Entry]:
    """Entries that can never match here, one for each reason."""
    first = decisions(here)[0]
    changes: dict[str, dict[str, Any]] = {
        "toolchain": {"toolchain": ELSEWHERE}, "source": {"source": "00"}, "suite": {"suite": "old"},
        "contract": {"contract": "swiglu/0"}, "kernel": {"kernel": "somebody_s"},
    }  # fmt: skip
    found = [dataclasses.replace(first, key=dataclasses.replace(first.key, **change)) for change in changes.values()]
    return [*found, dataclasses.replace(first, config=first.config.replace(BLOCK=3))]


def test_check_lists_what_can_never_match(start: Start) -> None:
    """Each stale entry is listed with the field that rules it out, and the exit code is 4."""
    here = start()
    fresh = decisions(here)[1]
    keep(here, fresh, *stale_of_every_kind(here))
    found = data(kalign("check", "--json"), code=4)
    assert found["entries"] == 7
    assert {row["reasons"][0]["field"].partition(".")[0] for row in found["stale"]} == {
        "toolchain", "source", "suite", "contract", "kernel", "config",
    }  # fmt: skip
    result = kalign("check")
    assert "6 of 7 entries can never match here" in result.stdout
    assert "toolchain.driver is 0.9, here it is 1.0" in result.stdout


def test_check_of_good_entries(start: Start) -> None:
    """Where every entry can match the exit code is 0, and so it is where there is none."""
    here = start()
    assert data(kalign("check", "--json")) == {"entries": 0, "stale": []}
    keep(here, *decisions(here))
    assert data(kalign("check", "--json")) == {"entries": 2, "stale": []}
    assert kalign("check").stdout == "0 of 2 entries can never match here\n"


# --- prune --------------------------------------------------------------------------------------------------------


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], list[str]]:
    """``answering(True)`` has somebody sit at the terminal who says yes; gives the questions that were asked."""

    def install(answer: bool) -> list[str]:
        asked: list[str] = []

        def confirm(text: str, **options: Any) -> bool:
            assert options == {"err": True}
            asked.append(text)
            return answer

        monkeypatch.setattr(cache_stale, "at_terminal", lambda: True)
        monkeypatch.setattr(click, "confirm", confirm)
        return asked

    return install


def test_prune_removes_what_nobody_needs(start: Start, folder: Path) -> None:
    """prune --yes removes entries that neither this nor another environment can match, and says why each."""
    here = start()
    keep(here, decisions(here)[1], *stale_of_every_kind(here))
    found = data(kalign("prune", "--yes", "--json"))
    assert (found["removed"], found["left"]) == (4, 2)
    assert {row["reasons"][0]["field"] for row in found["entries"]} == {"source", "suite", "contract", "config"}
    left = data(kalign("check", "--json"), code=4)["stale"]
    assert {row["reasons"][0]["field"] for row in left} == {"toolchain.driver", "kernel"}
    assert len(stored(folder)) == 3


def test_prune_all_removes_what_others_might_need(start: Start, folder: Path) -> None:
    """With --all entries of other toolchains and unknown kernels go too; what can match stays."""
    here = start()
    fresh = decisions(here)[1]
    keep(here, fresh, *stale_of_every_kind(here))
    assert data(kalign("prune", "--all", "--yes", "--json"))["removed"] == 6
    assert stored(folder) == [fresh]
    assert kalign("check").exit_code == 0


@pytest.mark.parametrize(("answer", "left"), [(True, 1), (False, 2)])
def test_prune_asks_first(start: Start, folder: Path, answering: Any, answer: bool, left: int) -> None:
    """At a terminal the list comes first, then the question, and only a yes removes."""
    here = start()
    first, second = decisions(here)
    keep(here, first, dataclasses.replace(second, key=dataclasses.replace(second.key, source="00")))
    asked = answering(answer)
    result = kalign("prune")
    assert asked == ["Remove these 1 entries?"]
    assert "swiglu_backward" in result.stdout
    assert ("removed 1 of 1" if answer else "nothing was removed") in result.stdout
    assert (result.exit_code, len(stored(folder))) == (0, left)


def test_prune_shows_on_standard_error_what_json_would_hide(start: Start, answering: Any) -> None:
    """With --json the list to be agreed to stands on standard error, and standard output is one object."""
    here = start()
    keep(here, *decisions(here, source="00"))
    answering(False)
    result = kalign("prune", "--json")
    assert data(result) == {"removed": 0, "left": 0, "entries": []}
    assert "source is 00" in result.stderr


def test_prune_without_a_terminal_refuses(start: Start, folder: Path) -> None:
    """Without a terminal and without --yes nothing is removed, and the error says what to type."""
    here = start()
    keep(here, *decisions(here, source="00"))
    result = kalign("prune", input="y\n")
    assert (result.exit_code, len(stored(folder))) == (2, 2)
    assert "there is no terminal to ask on" in result.stderr
    assert "kalign cache prune --yes" in result.stderr


def test_prune_with_nothing_to_remove(start: Start, folder: Path) -> None:
    """Where every entry can match nothing is asked and nothing goes."""
    here = start()
    keep(here, *decisions(here))
    result = kalign("prune")
    assert (result.exit_code, result.stdout, len(stored(folder))) == (0, "nothing to remove\n", 2)


def test_prune_says_what_it_left(start: Start, folder: Path) -> None:
    """Entries that another environment may use are counted on standard error, with the option that removes them."""
    here = start()
    keep(here, *decisions(here, toolchain=ELSEWHERE))
    result = kalign("prune")
    assert (result.exit_code, result.stdout, len(stored(folder))) == (0, "nothing to remove\n", 2)
    assert "2 entries of other toolchains or of kernels unknown here" in result.stderr
    assert "--all" in result.stderr


def test_prune_fails_where_the_file_cannot_be_written(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing could be removed the exit code is 1 and the entries are still there."""
    here = start()
    keep(here, *decisions(here, source="00"))
    monkeypatch.setattr(here.store, "remove", lambda identity, keys: 0)
    result = kalign("prune", "--yes")
    assert (result.exit_code, len(stored(folder))) == (1, 2)
    assert "nothing was removed" in result.stdout
