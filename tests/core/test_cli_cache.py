"""The cache's commands: what they list and explain, on which stream, and that they survive damage."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kalign_core.cli.main import main
from kalign_core.hal.replay import Script
from tests.core.cache_commands import (
    ELSEWHERE,
    SHAPE,
    Start,
    data,
    decisions,
    file_of,
    kalign,
    keep,
    processes,
    stored,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of the devices' files, not made yet."""
    return tmp_path / "cache"


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """``start(script)`` makes a session as a new process would have it, and the commands use it."""
    with processes(folder) as make:
        yield make


# --- path, ls, show -----------------------------------------------------------------------------------------------


def test_path_names_a_file_before_there_is_one(start: Start, folder: Path) -> None:
    """path prints where decisions will be, and says whether the file exists."""
    here = start()
    (found,) = data(kalign("path", "--json"))["files"]
    assert (Path(found["file"]).parent, found["exists"]) == (folder, False)
    keep(here, *decisions(here))
    assert data(kalign("path", "--json"))["files"][0]["exists"] is True


def test_ls_says_which_entries_can_be_used(start: Start) -> None:
    """ls lists every entry and whether it can match here, or in which fields it is another."""
    here = start()
    (first, second) = decisions(here)
    gone = dataclasses.replace(second, key=dataclasses.replace(second.key, toolchain=ELSEWHERE, suite="old"))
    keep(here, first, gone)
    rows = {row["kernel"]: row["used here"] for row in data(kalign("ls", "--json"))["entries"]}
    assert rows == {"swiglu": "yes", "swiglu_backward": "no: another suite, toolchain"}


def test_show_gives_every_field(start: Start) -> None:
    """show prints the key, the configuration and the evidence of each entry of a kernel."""
    here = start()
    keep(here, *decisions(here))
    (row,) = data(kalign("show", "swiglu", "--json"))["entries"]
    assert (row["kernel"], row["cold_us"], row["toolchain"]["driver"]) == ("swiglu", 20.0, "1.0")


def test_show_of_a_name_that_is_not_there(start: Start) -> None:
    """A kernel without entries is a usage error with the names there are."""
    here = start()
    keep(here, *decisions(here))
    result = kalign("show", "swigloo")
    assert (result.exit_code, "did you mean" in result.stderr or "kalign cache ls" in result.stderr) == (2, True)


# --- explain ------------------------------------------------------------------------------------------------------


def test_explain_says_what_is_used(start: Start) -> None:
    """For a call whose kernels are all tuned, each is used, with its configuration."""
    here = start()
    keep(here, *decisions(here))
    calls = data(kalign("explain", *SHAPE, "--json"))["calls"]
    assert [(call["kernel"], call["state"], call["differences"]) for call in calls] == [
        ("swiglu", "used", []), ("swiglu_backward", "used", []),
    ]  # fmt: skip
    assert all("BLOCK=" in call["config"] for call in calls)


@pytest.mark.parametrize(
    ("arguments", "field", "wanted", "found"),
    [
        (("--shape", "T=4,F=128", "--dtype", "fp32"), "problem.F", "128", "64"),
        (("--shape", "T=5,F=64", "--dtype", "fp32"), "problem.T", "<=8", "<=4"),
        (("--shape", "T=4,F=64", "--dtype", "fp16"), "args.gate", "fp16:row:a16", "fp32:row:a16"),
        (("--shape", "T=4,F=64", "--dtype", "fp32", "--phase", "decode"), "phase", "decode", "train"),
    ],
)
def test_explain_names_each_field(start: Start, arguments: Any, field: str, wanted: str, found: str) -> None:
    """Of a call without an entry, the nearest entry's fields that differ are named, wanted and found."""
    here = start()
    keep(here, *decisions(here))
    call = data(kalign("explain", "swiglu", *arguments, "--json"))["calls"][0]
    assert call["state"] == "not used"
    assert {"field": field, "wanted": wanted, "found": found} in call["differences"]


def test_explain_names_the_fact_that_changed(start: Start) -> None:
    """After an update of the driver the driver is the one field that differs."""
    first = start()
    keep(first, *decisions(first))
    start(Script(toolchain={"driver": "2.0", "triton": "scripted"}))
    calls = data(kalign("explain", *SHAPE, "--json"))["calls"]
    assert [call["differences"] for call in calls] == [
        [{"field": "toolchain.driver", "wanted": "2.0", "found": "1.0"}]
    ] * 2


def test_explain_says_when_a_configuration_is_no_candidate(start: Start) -> None:
    """An entry whose key matches and whose configuration today's space lacks is not used, for that reason."""
    here = start()
    first, second = decisions(here)
    keep(here, dataclasses.replace(first, config=first.config.replace(BLOCK=3)), second)
    calls = data(kalign("explain", *SHAPE, "--json"))["calls"]
    assert [call["state"] for call in calls] == ["not used", "used"]
    (found,) = calls[0]["differences"]
    assert (found["field"], "BLOCK=3" in found["found"]) == ("config", True)
    assert "today" in found["wanted"]


def test_explain_without_any_entry(start: Start) -> None:
    """A kernel that nothing is stored for says so, in tables too."""
    start()
    assert [call["state"] for call in data(kalign("explain", *SHAPE, "--json"))["calls"]] == ["no entry"] * 2
    result = kalign("explain", *SHAPE)
    assert "no entry for swiglu is stored" in result.stdout
    assert "0 of 2 kernel calls" in result.stdout


def test_explaining_is_no_miss(start: Start, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Asking why an entry is not used does not count as not having used it, nor write anything."""
    first = start()
    keep(first, *decisions(first))
    here = start(Script(toolchain={"driver": "2.0", "triton": "scripted"}))
    before = file_of(folder).read_bytes()
    for command in (("explain", *SHAPE), ("check",), ("ls",)):
        kalign(*command)
    here.store._end()
    assert caplog.messages == []
    assert file_of(folder).read_bytes() == before


def test_tables_of_explain_show_a_line_a_field(start: Start) -> None:
    """For readers each differing field has a line of its own, and progress goes to standard error."""
    here = start()
    keep(here, *decisions(here))
    result = kalign("explain", "swiglu", "--shape", "T=5,F=128", "--dtype", "fp32")
    lines = result.stdout.splitlines()
    assert [line.split()[-3:] for line in lines if "problem." in line][:2] == [
        ["problem.F", "128", "64"], ["problem.T", "<=8", "<=4"],
    ]  # fmt: skip
    assert "swiglu T=5 F=128 fp32 train" in result.stderr


# --- damage -------------------------------------------------------------------------------------------------------


COMMANDS = [("path",), ("ls",), ("show",), ("explain", *SHAPE), ("check",), ("prune", "--yes")]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("damage", [b"", b"\xff\xfe\0", b"[" * 3000, b"schema = 99\n", b"half"])
def test_commands_survive_a_damaged_file(start: Start, folder: Path, command: Any, damage: bytes) -> None:
    """With a file that cannot be read, or only in part, every command does what it can with the rest."""
    here = start()
    keep(here, *decisions(here))
    path = file_of(folder)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 2 // 3] if damage == b"half" else damage)
    start()
    assert kalign(*command, "--json").exit_code == 0
    json.loads(kalign(*command, "--json").stdout)


@pytest.mark.parametrize("command", [("ls",), ("explain", *SHAPE), ("check",)])
def test_a_file_that_is_not_trusted_is_told_of(
    start: Start, folder: Path, caplog: pytest.LogCaptureFixture, command: Any
) -> None:
    """A file that others may write counts as none, and the warning says what to type."""
    here = start()
    keep(here, *decisions(here))
    file_of(folder).chmod(0o666)
    start()
    caplog.set_level(logging.WARNING, "kalign")
    assert kalign(*command, "--json").exit_code == 0
    assert ["chmod go-w" in text for text in caplog.messages] == [True]


# --- tune ---------------------------------------------------------------------------------------------------------

TUNE = ("tune", "swiglu", "--shape", "T=1,F=16", "--effort", "quick", "--json")


def test_tune_says_what_could_not_be_written(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A decision that the disk does not take is told as not stored, with one warning of the reason."""
    here = start()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kalign_core.cache.device_file.publish", full)
    result = CliRunner().invoke(main, TUNE)
    rows = data(result)["problems"]
    assert {(row["how"], row["reason"]) for row in rows} == {("not stored", "it could not be written")}
    assert CliRunner().invoke(main, (*TUNE[:-1], "--retune")).stdout.endswith("decisions: none was stored\n")
    assert ["ENOSPC" in text for text in caplog.messages] == [True]
    here.close()


def test_tune_has_written_when_it_speaks(start: Start, folder: Path) -> None:
    """What tune reports as tuned is in the file when it says so."""
    start()
    rows = data(CliRunner().invoke(main, TUNE))["problems"]
    assert {row["how"] for row in rows} == {"tuned"}
    assert len(stored(folder)) == len(rows)
