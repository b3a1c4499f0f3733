"""What a session knows, records and tells: device facts, recorded calls, unstored outcomes, and who is told of them.

Plain values apart from the session that fills them, so that the command line and tests can name them. Imports neither
torch nor triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kalign_core.declare import Kernel
from kalign_core.records import Config, DeviceModel, Entry, Identity, Problem, Toolchain

if TYPE_CHECKING:
    from kalign_core.tuner.loop import Effort, Progress, Report


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a session knows of one device; read once per process."""

    identity: Identity
    toolchain: Toolchain
    model: DeviceModel


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


class Observer:
    """Told what a session does while it tunes; the command line shows it. Does nothing by itself."""

    effort: Effort | None = None
    retune = False

    def started(self, kernel: Kernel, problem: Problem) -> Progress:
        """A tuning begins; gives where its progress goes."""
        return lambda stage, done, total: None

    def finished(self, report: Report, stored: bool) -> None:
        """A tuning ended with a decision, or with a reason why there is none."""

    def hit(self, kernel: Kernel, problem: Problem, entry: Entry) -> None:
        """A stored decision answered a problem."""

    def gave_up(self, kernel: Kernel, problem: Problem, reason: str) -> None:
        """A problem stays with the reference."""
