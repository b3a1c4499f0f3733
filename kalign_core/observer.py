"""What a session knows, records and tells: device facts, recorded calls, unstored outcomes, and who is told of them.

Plain values apart from the session that fills them, so that the command line and tests can name them. Imports neither
torch nor triton.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kalign_core.cache.fingerprint import counted
from kalign_core.declare import Kernel
from kalign_core.records import Config, DeviceModel, Entry, Identity, Problem, Toolchain

if TYPE_CHECKING:
    from kalign_core.hal.base import Platform
    from kalign_core.tuner.failures import Watched
    from kalign_core.tuner.loop import Effort, Progress, Report

MOST_PAUSES = 4
FIRST_PAUSE_S = 30.0


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a session knows of one device; read once per process."""

    identity: Identity
    toolchain: Toolchain
    model: DeviceModel


class KnownDevices:
    """What is known of each device of ``platform()``, read when first asked for.

    Read again once a variable that may change compiled code is another: compilers look at it anew each time, and what
    they make from then on must not pass for what they made before. ``variables`` are the process's.
    """

    def __init__(self, platform: Callable[[], Platform], variables: Mapping[str, str] = os.environ) -> None:
        self._platform, self._variables = platform, variables
        self._counted = counted(variables)
        self._facts: dict[int, DeviceFacts] = {}

    def __getitem__(self, device: int) -> DeviceFacts:
        now = counted(self._variables)
        if now != self._counted:
            self._counted, self._facts = now, {}
        facts = self._facts  # of these variables, though another thread may see others meanwhile
        found = facts.get(device)
        if found is None:
            platform = self._platform()
            found = DeviceFacts(platform.identity(device), platform.toolchain(device), platform.model(device))
            facts[device] = found
        return found


@dataclass(frozen=True, slots=True)
class Recorded:
    """One kernel call that an operator made while it was recorded."""

    kernel: Kernel
    problem: Problem
    device: int


@dataclass(frozen=True, slots=True)
class Settled:
    """What a tuning left for this process alone: a winner that must not be stored, or none, and the reason."""

    config: Config | None
    reason: str


class Pauses:
    """When to tune again what was met at a wrong moment: after pauses that double, and a few times only.

    ``clock`` gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._met: dict[Hashable, tuple[int, float]] = {}

    def is_over(self, what: Hashable) -> bool:
        """Whether ``what`` may be tried now."""
        return what not in self._met or self._clock() >= self._met[what][1]

    def met(self, what: Hashable) -> bool:
        """The moment was wrong for ``what``; gives whether it is to be tried again later."""
        count = self._met.get(what, (0, 0.0))[0] + 1
        self._met[what] = (count, self._clock() + FIRST_PAUSE_S * 2 ** (count - 1))
        return count < MOST_PAUSES


class Observer:
    """Told what a session does while it tunes; the command line shows it. Does nothing by itself.

    What it says counts for the tunings of its session: their ``effort``, whether to ``retune`` what is known, and how
    the process is ``watched``.
    """

    effort: Effort | None = None
    retune = False
    watched: Watched | None = None

    def started(self, kernel: Kernel, problem: Problem) -> Progress:
        """A tuning begins; gives where its progress goes."""
        return lambda stage, done, total: None

    def finished(self, report: Report, stored: bool) -> None:
        """A tuning ended with a decision, or with a reason why there is none."""

    def hit(self, kernel: Kernel, problem: Problem, entry: Entry) -> None:
        """A stored decision answered a problem."""

    def gave_up(self, kernel: Kernel, problem: Problem, reason: str) -> None:
        """A problem stays with the reference."""
