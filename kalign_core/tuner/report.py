"""How much a tuning tries, and how it went."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kalign_core.errors import UnknownName
from kalign_core.records import Config, Entry, Problem, Refutation, Tally

if TYPE_CHECKING:
    from kalign_core.declare import Kernel
    from kalign_core.tuner.measure import Noise


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to try for one problem.

    At most ``candidates`` are compiled and timed roughly, ``finalists`` of them checked in full and raced for up to
    ``rounds`` readings each. ``compile_deadline_s`` is what one candidate's compile may take, ``launch_deadline_s``
    what one launch may where the process is watched. Past ``budget_s`` seconds no candidate is added and what has been
    timed is decided on. ``strategy`` names the search strategy.
    """

    name: str
    candidates: int
    finalists: int
    rounds: int
    compile_deadline_s: float = 60.0
    launch_deadline_s: float = 30.0
    budget_s: float = math.inf
    strategy: str = "racing"


EFFORTS = {
    "quick": Effort("quick", 16, 4, 9),
    "normal": Effort("normal", 96, 8, 15),
    "full": Effort("full", 4096, 16, 31, 300.0, 120.0),
}


def effort_named(name: str) -> Effort:
    """The effort called ``name``; raises ``UnknownName``."""
    if name not in EFFORTS:
        raise UnknownName("effort", name, EFFORTS)
    return EFFORTS[name]


@dataclass
class Report:
    """How one tuning went. ``entry`` is None where nothing was decided, and ``reason`` says why it was not stored.

    ``seconds`` are wall time by step: ``gate``, ``compile`` (waiting for it), ``check`` (binding and the first case),
    ``search``, ``race``. ``candidates`` counts what was to be tried, ``duplicates`` those that compiled to the code of
    another, ``untried`` those the budget left no time for, ``transient`` those that failed by no fault of their own (a
    deadline, no memory), ``hung`` those that failed because they did not come to an end. ``inert`` are the knobs that
    never changed the code. ``noise`` is the reference measured against itself.
    """

    kernel: Kernel
    problem: Problem
    reference: Config
    entry: Entry | None = None
    reason: str = ""
    tally: Tally = field(default_factory=Tally)
    refused: list[tuple[Config, str]] = field(default_factory=list)
    failed: list[tuple[Config, str]] = field(default_factory=list)
    refuted: list[tuple[Config, Refutation]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    candidates: int = 0
    duplicates: int = 0
    inert: tuple[str, ...] = ()
    untried: int = 0
    transient: int = 0
    hung: int = 0
    noise: Noise | None = None

    @property
    def storable(self) -> bool:
        """Whether the entry may be kept on disk rather than for this process only."""
        return self.entry is not None and not self.reason

    @contextlib.contextmanager
    def timed(self, step: str) -> Iterator[None]:
        """Add the seconds spent inside the block to ``step``."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[step] = self.seconds.get(step, 0.0) + time.monotonic() - started


# The last quarter of a budget is for racing and checking what has been found by then.
DECIDING_SHARE = 0.25


class Budget:
    """The seconds a tuning may take, by a clock that gives seconds; what is left of them for adding candidates."""

    def __init__(self, budget_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.budget_s, self._clock = budget_s, clock
        self._started = clock()

    def left_s(self) -> float:
        """Seconds left in which candidates may be added; not positive once there are none."""
        if math.isinf(self.budget_s):
            return math.inf
        return (1 - DECIDING_SHARE) * self.budget_s - (self._clock() - self._started)

    def spent(self) -> bool:
        """Whether it is time to decide on what there is."""
        return self.left_s() <= 0
