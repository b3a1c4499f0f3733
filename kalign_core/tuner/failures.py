"""What may go wrong with a candidate, told apart: its own fault, the moment's, the device's.

A candidate's own fault (it does not compile, cannot be launched, takes its process or the device along, writes other
bytes) is remembered under the code that failed, so that no other problem pays for it again; what is no matter of bytes
is kept in a file too, so that no other process does. A fault of the moment (a compile's deadline, no memory, a graph
that another thread captures) says nothing of the candidate and is not remembered. Imports neither torch nor triton.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kalign_core.declare import Lowered
from kalign_core.errors import CandidateFailed, DeviceLost, NotNow
from kalign_core.hal.base import met_a_capture
from kalign_core.isolate import reason_of
from kalign_core.records import Config, EntryKey, Refutation, join_facts
from kalign_core.tuner.failure_file import Failure, FailureFile

if TYPE_CHECKING:
    from kalign_core.hal.base import Launch

Fault = str | Refutation
# How torch, the drivers and Python word it; there is no one class for it.
_NO_MEMORY = ("out of memory", "outofmemory", "memoryerror", "can't allocate memory", "not enough memory")
_TIMEOUT = re.compile(r"timeout at ([0-9.e+]+) s")
_DIGITS = 16


def short_of_memory(text: str) -> bool:
    """Whether an error of this text was memory that ran out, on the device or on the host."""
    return any(words in text.lower() for words in _NO_MEMORY)


def of_the_moment(text: str) -> bool:
    """Whether an error of this text says nothing of whoever met it: memory ran out, or a graph was being captured."""
    return short_of_memory(text) or met_a_capture(text)


def timeout_s(text: str) -> float | None:
    """The deadline that a failure of this text ran into, seconds; None for any other failure."""
    found = _TIMEOUT.match(text)
    return float(found.group(1)) if found else None


@dataclass(frozen=True, slots=True)
class Fallen:
    """What a candidate did to an earlier process; ``transient`` where the moment may be to blame."""

    reason: str
    transient: bool = False


@dataclass(frozen=True, slots=True)
class Watched:
    """How the process that tunes is watched from outside; the default is that nobody does.

    It is killed when one launch takes longer than ``deadline_s`` seconds. ``fallen`` are the candidates that cost
    earlier processes of this command their lives, by kernel and configuration.
    """

    deadline_s: float = 0.0
    fallen: Mapping[tuple[str, Config], Fallen] = field(default_factory=dict)


class Guarded:
    """A launch that fails in one way only: whatever it raises becomes ``CandidateFailed``, kept in ``failure``.

    A lost device, a wrong moment and Ctrl-C pass as they are. Attributes are those of the launch within.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self.failure = ""

    def __call__(self, *args: Any) -> None:
        try:
            self._launch(*args)
        except (KeyboardInterrupt, DeviceLost, NotNow):
            raise
        except BaseException as error:
            self.failure = error.what if isinstance(error, CandidateFailed) else reason_of(error)
            raise CandidateFailed(self.failure) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._launch, name)


class Failures:
    """Candidates known to fail by their own fault, by the code they are lowered to and what it was built with."""

    def __init__(self) -> None:
        self._refuted: dict[str, Refutation] = {}
        self._failed: dict[str, Failure] = {}
        self._new: dict[str, Failure] = {}
        self._file: FailureFile | None = None
        self._lock = threading.Lock()

    def keep_in(self, path: Path | None) -> None:
        """Read what earlier processes kept in ``path``, and have ``flush`` keep there what this one learns."""
        if path is None or (self._file is not None and self._file.path == path):
            return
        self._file = FailureFile(path)
        with self._lock:
            self._failed = {**self._file.read(), **self._failed}

    def flush(self) -> None:
        """Write what was remembered since; a disk that does not take it costs one warning."""
        with self._lock:
            new, self._new = self._new, {}
        if new and self._file is not None:
            self._file.add(new)

    def recall(self, key: EntryKey, target: str, lowered: Lowered, deadline_s: float = 0.0) -> Fault | None:
        """Why ``lowered`` failed on ``target`` before, or None; what hung is tried again with a longer deadline."""
        digest = _digest(key, target, lowered)
        if digest in self._refuted:
            return self._refuted[digest]
        failure = self._failed.get(digest)
        if failure is None or deadline_s > (timeout_s(failure.reason) or float("inf")):
            return None
        return failure.reason

    def remember(self, key: EntryKey, target: str, lowered: Lowered, fault: Fault) -> None:
        """Keep ``fault``, unless the moment was to blame."""
        digest = _digest(key, target, lowered)
        if isinstance(fault, Refutation):
            with self._lock:
                self._refuted[digest] = fault
        elif not of_the_moment(fault):
            code = join_facts((*lowered.options, *((f"argument{at}", value) for at, value in lowered.constants)))
            with self._lock:
                self._failed[digest] = self._new[digest] = Failure(key.kernel, code, fault)


def _digest(key: EntryKey, target: str, lowered: Lowered) -> str:
    made = repr((key.source, key.toolchain.facts, key.suite, target, lowered))
    return hashlib.sha256(made.encode("utf-8", "backslashreplace")).hexdigest()[:_DIGITS]
