"""A first execution beside a disk that takes nothing: the call has its result, the process its winner, one warning."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kalign_core as kalign
from kalign_core.cache.files import locked
from kalign_core.cache.toml_store import TomlStore
from kalign_core.hal.replay import IDENTITY, ReplayPlatform, Script
from kalign_core.ops.noting import launch
from kalign_core.records import Config
from kalign_core.session import Session
from kalign_core.settings import Settings
from kalign_core.tuner.report import Effort
from tests.core.scripted import FASTER, SCALE_REFERENCE, X, launched, prefers, scale_kernel, warnings

CRASHES = SCALE_REFERENCE.replace(ROWS=16)
# The same kernel with a third candidate, which fails: what is remembered of it lies beside the decisions.
KERNEL = dataclasses.replace(scale_kernel, knobs={"ROWS": (4, 8, 16)})


def script(best: Config = FASTER) -> Script:
    """``best`` is fastest, and one candidate cannot be launched."""
    made = prefers(best)
    made.raises = lambda kernel, config, run: RuntimeError("it crashes") if config == CRASHES else None
    return made


def session(folder: Path | None, best: Config = FASTER, lock_wait_s: float = 30.0) -> Session:
    """A session of its own, as another process would have it, whose decisions are written by who makes them."""
    store = TomlStore(Settings(cache_dir=folder), lock_wait_s)
    store._writer.wake = lambda work: False  # type: ignore[method-assign]  # as where no thread can be had
    made = Session(platform=ReplayPlatform(script(best)), store=store)
    made.observer.effort = Effort("little", candidates=3, finalists=2, rounds=5)
    return made


def answered(here: Session, mode: str = "tune", x: torch.Tensor = X) -> Config:
    """What answers a call on ``x`` here; the result is right."""
    out = torch.empty_like(x)
    with here.active(), kalign.using(mode=mode):
        launch(KERNEL, x, out, *x.shape, x.stride(0), out.stride(0), 2.0)
    assert torch.equal(out, x * 2)
    return launched(here)[-1][1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of the devices' files, not made yet."""
    return tmp_path / "cache"


# --- what may be wrong --------------------------------------------------------------------------------------------

Break = Callable[[Path, pytest.MonkeyPatch], None]
NO_LOCKS = NotImplementedError("flock is not supported here")


def refusing(*places: str, error: Exception) -> Break:
    """Functions that raise ``error`` instead of what they do."""

    def refuse(*_: Any, **__: Any) -> None:
        raise error

    def apply(folder: Path, patch: pytest.MonkeyPatch) -> None:
        for place in places:
            patch.setattr(place, refuse)

    return apply


def system(code: int) -> Break:
    """A file system that refuses to name a new file."""
    return refusing("os.replace", "os.link", error=OSError(code, os.strerror(code)))


def of_another_kind(folder: Path, patch: pytest.MonkeyPatch) -> None:
    folder.write_bytes(b"")


def open_to_all(folder: Path, patch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    folder.chmod(0o777)


LOCKS = ("kalign_core.cache.device_file.locked", "kalign_core.tuner.failure_file.locked")
BROKEN: dict[str, tuple[Break, str]] = {
    "read-only": (system(errno.EROFS), "EROFS"),
    "over quota": (system(errno.EDQUOT), "EDQUOT"),
    "open elsewhere": (system(errno.EACCES), "EACCES"),
    "busy": (system(errno.EBUSY), "EBUSY"),
    "stale": (system(errno.ESTALE), "ESTALE"),
    "full": (refusing("os.fsync", error=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))), "ENOSPC"),
    "without locks": (refusing(*LOCKS, error=NO_LOCKS), "flock is not supported here"),
    "locked by others": (refusing(*LOCKS, error=TimeoutError("the lock is held")), "TimeoutError"),
    "a file for a folder": (of_another_kind, "ENOTDIR"),
    "open to all": (open_to_all, "chmod go-w"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_one_cause_is_one_warning(
    folder: Path, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever the disk refuses, the winner serves from memory, and one warning names the path and the reason."""
    apply, reason = BROKEN[what]
    apply(folder, monkeypatch)
    here = session(folder)
    assert [answered(here), answered(here, "read")] == [FASTER, FASTER]
    assert here.pool.failures._failed
    here.close()
    mine = [text for text in warnings(caplog) if str(folder) in text]
    assert [reason in text for text in mine] == [True]


@pytest.mark.parametrize("home", ["", "/", "/nonexistent/home"])
def test_without_a_home_the_winner_serves(
    home: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where there is no home to keep files in, the winner serves from memory, and one warning says so."""
    monkeypatch.setenv("HOME", home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    here = session(None)
    assert [answered(here), answered(here, "read")] == [FASTER, FASTER]
    here.close()
    assert [f"HOME={home!r}" in text for text in warnings(caplog)] == [True]


def test_a_folder_behind_a_link_is_a_folder(folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A home or a folder that is reached through a link is as good as any other."""
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    here = session(folder)
    assert (answered(here), here.close()) == (FASTER, True)
    assert answered(session(folder), "read") == FASTER
    assert warnings(caplog) == []


# --- what other processes write -----------------------------------------------------------------------------------


@pytest.fixture
def two(folder: Path) -> Iterator[tuple[Session, Session]]:
    """Two processes' sessions that looked for the same decision before either had made it."""
    both = session(folder, FASTER), session(folder, SCALE_REFERENCE)
    for here in both:
        assert answered(here, "read") == SCALE_REFERENCE
        here.forget()
    yield both
    for here in both:
        here.close()


def test_each_process_launches_what_it_verified_itself(two: tuple[Session, Session], folder: Path) -> None:
    """Two processes that decide otherwise for one problem each keep to their own, however often they look again."""
    one, other = two
    assert (answered(one), one.close()) == (FASTER, True)
    assert (answered(other), other.close()) == (SCALE_REFERENCE, True)
    for here, own in ((one, FASTER), (other, SCALE_REFERENCE)):
        answered(here, "tune", X[:, :8])  # another decision, with which the file is read again
        here.forget()
        assert [answered(here, "read"), answered(here, "frozen")] == [own, own]
    assert answered(session(folder), "frozen") in (FASTER, SCALE_REFERENCE)


ENDS = """
import logging
from pathlib import Path
logging.basicConfig(format="%(name)s: %(message)s")
from tests.core.test_session_disk import answered, session
print(answered(session(Path({folder!r}), lock_wait_s=0.05)))
"""


def test_a_process_that_never_gets_the_lock_ends_well(folder: Path, child: Any) -> None:
    """While another process sits on the lock, a call is tuned and answered, and the process ends with one warning."""
    first = session(folder)
    path = first.store.path(IDENTITY)
    assert path is not None
    assert (answered(first), first.close()) == (FASTER, True)
    path.unlink()
    with locked(path, 1.0):
        done = child(ENDS.format(folder=str(folder)), TRITON_INTERPRET="1", KALIGN_PLATFORM="cpu")
    assert (done.stdout, done.returncode) == (f"{FASTER}\n", 0), done.stderr
    assert [line.count("decisions stay in memory") for line in done.stderr.splitlines() if "kalign:" in line] == [1]
