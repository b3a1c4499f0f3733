"""What may go wrong with a candidate, told apart: its own fault, the moment's, the device's.

A candidate's own fault (it does not compile, cannot be launched, writes other bytes) is remembered for as long as the
process lives, under the code that failed, so that no other problem pays for it again. A fault of the moment (a
deadline, no memory) says nothing of the candidate and is not remembered. What the device does not survive is neither:
it ends the tuning. Imports neither torch nor triton.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from kalign_core.declare import Lowered
from kalign_core.errors import CandidateFailed, DeviceLost
from kalign_core.isolate import reason_of
from kalign_core.records import EntryKey, Refutation

if TYPE_CHECKING:
    from kalign_core.hal.base import Launch

Fault = str | Refutation
# How torch, the drivers and Python word it; there is no one class for it.
_NO_MEMORY = ("out of memory", "outofmemory", "memoryerror", "can't allocate memory", "not enough memory")


def short_of_memory(text: str) -> bool:
    """Whether an error of this text was memory that ran out, on the device or on the host."""
    return any(words in text.lower() for words in _NO_MEMORY)


class Guarded:
    """A launch that fails in one way only: whatever it raises becomes ``CandidateFailed``, kept in ``failure``.

    A lost device and Ctrl-C pass as they are. Attributes are those of the launch within.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self.failure = ""

    def __call__(self, *args: Any) -> None:
        try:
            self._launch(*args)
        except (KeyboardInterrupt, DeviceLost):
            raise
        except BaseException as error:
            self.failure = error.what if isinstance(error, CandidateFailed) else reason_of(error)
            raise CandidateFailed(self.failure) from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._launch, name)


class Failures:
    """Candidates known to fail by their own fault, by the code they are lowered to and what it was built with."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Fault] = {}
        self._lock = threading.Lock()

    def recall(self, key: EntryKey, target: str, lowered: Lowered) -> Fault | None:
        """Why ``lowered`` failed on ``target`` before, or None."""
        return self._known.get((key.source, key.toolchain, key.suite, target, lowered))

    def remember(self, key: EntryKey, target: str, lowered: Lowered, fault: Fault) -> None:
        """Keep ``fault``, unless the moment was to blame."""
        if isinstance(fault, str) and short_of_memory(fault):
            return
        with self._lock:
            self._known[(key.source, key.toolchain, key.suite, target, lowered)] = fault
