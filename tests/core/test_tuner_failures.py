"""Which failures are remembered, for how long, and where."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kalign_core.declare import Lowered, lower
from kalign_core.errors import DeviceLost, NotNow
from kalign_core.records import Refutation, Toolchain
from kalign_core.tuner.failure_file import MOST, Failure, FailureFile
from kalign_core.tuner.failures import Failures, Fallen, Guarded, Watched, timeout_s
from tests.core.tuner_samples import BEST, REFERENCE, SECOND, Bed, double_kernel, key, problem, winner_of

TARGET = "scripted:scripted"


@pytest.fixture
def decisions(tmp_path: Path) -> Path:
    """Where the decisions are; the failures lie beside them."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    return folder / "scripted-1.toml"


def lowered(config: Any = BEST) -> Lowered:
    return lower(double_kernel, problem(), config)


def kept_in(path: Path) -> Failures:
    made = Failures()
    made.keep_in(path)
    return made


def learned(path: Path, *reasons: str) -> None:
    """What a process learns that sees the configurations fail for these reasons, one after the other."""
    failures = kept_in(path)
    for config, reason in zip((BEST, SECOND, REFERENCE), reasons, strict=False):
        failures.remember(key(), TARGET, lowered(config), reason)
    failures.flush()


def recalled(path: Path, config: Any = BEST, made: Any = None, deadline_s: float = 0.0) -> Any:
    return kept_in(path).recall(made or key(), TARGET, lowered(config), deadline_s)


# --- across processes ---------------------------------------------------------------------------------------------


def test_another_process_knows(decisions: Path) -> None:
    """What failed by its own fault is known to whoever opens the same file."""
    learned(decisions, "PTXASError: register allocation failed")
    assert recalled(decisions) == "PTXASError: register allocation failed"
    assert recalled(decisions, SECOND) is None


@pytest.mark.parametrize("changed", ["source", "suite", "toolchain"])
def test_other_code_is_another_candidate(decisions: Path, changed: str) -> None:
    """A failure counts for the source, suite and toolchain that it was met with."""
    learned(decisions, "no")
    value: Any = Toolchain.of(triton="newer") if changed == "toolchain" else "other"
    assert recalled(decisions, made=dataclasses.replace(key(), **{changed: value})) is None


@pytest.mark.parametrize("what", ["out of memory", "operation not permitted when stream is capturing"])
def test_what_is_passing_is_not_written(decisions: Path, what: str) -> None:
    """Memory that ran out, or a graph that some thread captured, is no fault of the candidate."""
    learned(decisions, f"RuntimeError: Triton Error [CUDA]: {what}")
    assert recalled(decisions) is None
    assert list(decisions.parent.iterdir()) == []


def test_a_refutation_is_for_the_process(decisions: Path) -> None:
    """Other bytes are found out in milliseconds, by today's suite: they are remembered, and not written."""
    failures = kept_in(decisions)
    refutation = Refutation("rows", "differs")
    failures.remember(key(), TARGET, lowered(), refutation)
    failures.flush()
    assert failures.recall(key(), TARGET, lowered()) == refutation
    assert recalled(decisions) is None


def test_a_timeout_counts_up_to_its_deadline(decisions: Path) -> None:
    """What did not end in five seconds is not tried with five, nor where nobody watches, but with six."""
    learned(decisions, "timeout at 5 s on the device")
    assert recalled(decisions, deadline_s=5.0) == recalled(decisions) == "timeout at 5 s on the device"
    assert recalled(decisions, deadline_s=6.0) is None


def test_two_processes_add_up(decisions: Path) -> None:
    """What two processes learn at the same time is the union."""
    one, two = kept_in(decisions), kept_in(decisions)
    one.remember(key(), TARGET, lowered(BEST), "one")
    two.remember(key(), TARGET, lowered(SECOND), "two")
    one.flush()
    two.flush()
    assert (recalled(decisions, BEST), recalled(decisions, SECOND)) == ("one", "two")


# --- the file -----------------------------------------------------------------------------------------------------


def test_the_file_can_be_read(decisions: Path) -> None:
    """The file is TOML beside the decisions, for this user alone, and says kernel, code and reason in one line each."""
    learned(decisions, "it\nbreaks 'a' \"line\"")
    (file,) = decisions.parent.glob("*.failures.toml")
    assert file.name == "scripted-1.failures.toml"
    assert file.stat().st_mode & 0o777 == 0o600
    (table,) = tomllib.loads(file.read_text()).values()
    code = "enable_fp_fusion=False num_warps=2 argument4=128"
    assert table == {"kernel": "double", "code": code, "reason": "it breaks 'a' \"line\""}


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[half", b"a = 1\n", b"", b"[d]\nreason = 3\n"])
def test_a_damaged_file_costs_what_it_held(decisions: Path, content: bytes) -> None:
    """A file that cannot be read counts as empty, and is written anew with what is learned next."""
    file = decisions.with_name("scripted-1.failures.toml")
    file.write_bytes(content)
    file.chmod(0o600)
    learned(decisions, "no")
    assert recalled(decisions) == "no"


def test_a_file_that_is_not_trusted_is_not_read(decisions: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Others must not be able to keep candidates from being tried: one warning says why the file is not used."""
    learned(decisions, "no")
    decisions.with_name("scripted-1.failures.toml").chmod(0o666)
    with caplog.at_level(logging.WARNING, "kalign"):
        assert recalled(decisions) is None
    assert ["chmod go-w" in text for text in caplog.messages] == [True]


def test_a_file_that_is_cut_gives_no_candidate_another_reason(decisions: Path) -> None:
    """Cut anywhere, the file gives failures as they were written or not at all."""
    learned(decisions, "PTXASError: register allocation failed", "timeout at 5 s on the device")
    file = decisions.with_name("scripted-1.failures.toml")
    content, whole = file.read_bytes(), FailureFile(decisions).read()
    for length in range(len(content)):
        file.write_bytes(content[:length])
        assert FailureFile(decisions).read().items() <= whole.items()


NOT_WRITTEN = {
    "os.replace": OSError(errno.EROFS, os.strerror(errno.EROFS)),
    "kalign_core.cache.files._write_new": OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "kalign_core.tuner.failure_file.locked": NotImplementedError("flock is not supported here"),
    "kalign_core.tuner.failure_file.make_folder": NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)),
}


@pytest.mark.parametrize("where", NOT_WRITTEN)
def test_a_disk_that_does_not_take_it_is_no_matter(
    decisions: Path, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where failures cannot be written they are known to this process, and the store of decisions is who warns."""

    def refuse(*_: object, **__: object) -> None:
        raise NOT_WRITTEN[where]

    monkeypatch.setattr(where, refuse)
    failures = kept_in(decisions)
    with caplog.at_level(logging.INFO, "kalign"):
        failures.remember(key(), TARGET, lowered(), "no")
        failures.flush()
    assert failures.recall(key(), TARGET, lowered()) == "no"
    assert [(r.levelno, str(NOT_WRITTEN[where]) in r.getMessage()) for r in caplog.records] == [(logging.INFO, True)]


@pytest.mark.parametrize("plant", ["", ".lock"])
def test_planted_links_are_not_followed(decisions: Path, tmp_path: Path, plant: str) -> None:
    """A link under the file's or its lock's name is neither read nor written through, and costs the memory alone."""
    victim = tmp_path / "victim"
    victim.write_text('[x]\nkernel = "k"\ncode = "c"\nreason = "r"\n')
    before = victim.read_bytes()
    decisions.with_name(f"scripted-1.failures.toml{plant}").symlink_to(victim)
    assert FailureFile(decisions).read() == {}
    learned(decisions, "no")
    assert victim.read_bytes() == before
    assert recalled(decisions) is None


def test_the_file_does_not_grow_without_end(decisions: Path) -> None:
    """Past so many failures the oldest are forgotten."""
    file = FailureFile(decisions)
    file.add({f"{n:016x}": Failure("kernel", "code", "no") for n in range(MOST)})
    file.add({"new": Failure("kernel", "code", "no")})
    found = file.read()
    assert (len(found), "new" in found, f"{0:016x}" in found) == (MOST, True, False)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("timeout at 5 s", 5.0), ("timeout at 0.3 s on the device", 0.3), ("RuntimeError: timeout at 5 s", None)],
)
def test_timeouts_are_told_by_their_words(text: str, seconds: float | None) -> None:
    """A failure that is a deadline says so first, with its seconds."""
    assert timeout_s(text) == seconds


@pytest.mark.parametrize("error", [DeviceLost("gone"), NotNow("another thread captures"), KeyboardInterrupt()])
def test_what_is_no_matter_of_the_launch_passes_it(error: BaseException) -> None:
    """A launch that was interrupted, met a lost device or could not be waited for has not failed."""

    def launch() -> None:
        raise error

    guarded = Guarded(launch)
    with pytest.raises(type(error)):
        guarded()
    assert guarded.failure == ""


# --- what cost an earlier process its life ------------------------------------------------------------------------


def test_the_fallen_are_not_tried() -> None:
    """A candidate that ended an earlier process is a failed one, and is launched no more."""
    here = Bed()
    report = here.tune(watched=Watched(5.0, {("double", BEST): Fallen("the worker died of SIGABRT")}))
    assert (BEST, "the worker died of SIGABRT") in report.failed
    assert BEST not in {config for _, config in here.script.launched}
    assert here.pool.failures.recall(key(), here.platform.model(-1).target, lowered()) is not None


def test_the_fallen_of_a_moment_are_not_remembered() -> None:
    """One that may have been the moment's victim is left out of this tuning alone."""
    here = Bed()
    report = here.tune(watched=Watched(5.0, {("double", BEST): Fallen("the worker died of SIGKILL", transient=True)}))
    assert report.transient == 1
    assert here.pool.failures.recall(key(), here.platform.model(-1).target, lowered()) is None


def test_what_hangs_is_counted() -> None:
    """A failure that is a deadline is counted as hung, and told."""
    told: list[tuple[str, int, int]] = []
    watched = Watched(5.0, {("double", BEST): Fallen("timeout at 5 s on the device")})
    report = Bed().tune(watched=watched, progress=lambda *step: told.append(step))
    assert (report.hung, len(report.failed)) == (1, 1)
    assert ("hung", 1, 15) in told
    assert winner_of(report) == REFERENCE
