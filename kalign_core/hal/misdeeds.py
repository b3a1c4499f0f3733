"""What a scripted launch can do to its own process: the real thing, for tests that have a process to lose.

A ``Script`` (``hal/replay.py``) decides by calling functions; these are the ones that a file can name, so that a worker
in another process can be told what to do. Nothing else uses them.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kalign_core.errors import BadArgument
from kalign_core.records import Config

FOREVER_S = 3600.0


@dataclass(frozen=True, slots=True)
class Misdeed:
    """Launch number ``at`` of a configuration in its process does ``what``; ``at`` counts from 1.

    ``what`` is ``abort``, ``segfault``, ``killed`` (by SIGKILL, as by a system short of memory), ``exit``, ``hang``,
    ``memory`` (an error that says so), ``raise`` or ``lose`` (the device).
    """

    what: str
    at: int = 1

    def __post_init__(self) -> None:
        if self.what not in _DONE and self.what != "lose":
            raise BadArgument(f"misdeed {self.what!r}", why=f"known are lose, {', '.join(_DONE)}")


class Misdeeds:
    """Misdeeds by configuration, in the form that a ``Script`` asks for."""

    def __init__(self, planned: Mapping[Config, Misdeed]) -> None:
        self._planned = planned

    def raises(self, kernel: str, config: Config, run: int) -> BaseException | None:
        """Do what is planned for this launch, if it is; gives what it raises, where it comes back."""
        planned = self._planned.get(config)
        if planned is None or run != planned.at or planned.what == "lose":
            return None
        return _DONE[planned.what]()

    def loses(self, kernel: str, config: Config, run: int) -> bool:
        """Whether this launch takes the device along."""
        planned = self._planned.get(config)
        return planned is not None and planned.what == "lose" and run == planned.at


def _abort() -> None:
    os.abort()


def _segfault() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _exit() -> None:
    os._exit(3)


def _hang() -> None:
    time.sleep(FOREVER_S)


def _memory() -> BaseException:
    return MemoryError("CUDA out of memory (scripted)")


def _raise() -> BaseException:
    return RuntimeError("invalid argument (scripted)")


_DONE: Mapping[str, Callable[[], BaseException | None]] = {
    "abort": _abort, "segfault": _segfault, "killed": _killed, "exit": _exit, "hang": _hang,
    "memory": _memory, "raise": _raise,
}  # fmt: skip
