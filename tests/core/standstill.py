"""A clock for tests of deadlines: time stands still, and passes only while a process says that it hangs.

However slow or busy a machine is, a deadline is then missed by who hangs and by nobody else.
"""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

LEAP_S = 100_000.0


class Standstill:
    """Seconds that pass, very many with every look, while a process hangs that has said so in the file ``path``."""

    def __init__(self, path: Path) -> None:
        self._path, self._now = path, 0.0

    def __call__(self) -> float:
        with open(self._path, "a", encoding="ascii") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                self._now += LEAP_S
        return self._now


def say_that_it_hangs(path: Path) -> IO[str]:
    """Say in the file ``path`` that this process hangs, for as long as it lives and keeps what this gives."""
    file = open(path, "a", encoding="ascii")  # noqa: SIM115  # for as long as the caller wants
    fcntl.flock(file, fcntl.LOCK_EX)
    return file
