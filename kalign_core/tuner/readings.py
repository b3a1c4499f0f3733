"""Readings and what they say: medians, spreads, what a round had in common, and when enough have been taken.

A device's clock follows its load and its heat, so that readings of one launch may move by a fifth from one moment to
the next while all launches move alike. What is compared is therefore taken in rounds, and a reading counts after
division by the level of its round, as the other contenders of that round show it. On a device at its power limit this
leaves a third of the spread. Functions of numbers alone: imports no torch.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from kalign_core.records import Config, Refutation, Timing
from kalign_core.tuner.failures import Guarded

if TYPE_CHECKING:
    from kalign_core.tuner.space import Order
    from kalign_core.verifier.bound import Bound

T = TypeVar("T")
RESTED = "rested"
# A median known to a quarter of a percent decides everything the promotion margin of two percent asks.
PRECISE_SHARE = 0.0025
OUT_OF_CONTENTION_SHARE = 0.05
SETTLED_SHARE = 0.02
# Standard error of a median of normal noise, in median absolute deviations: sqrt(pi / 2) * 1.4826.
_ERROR_PER_MAD = 1.858


@dataclass(eq=False)
class Contender:
    """One candidate in a race: its configuration, its launch and its readings in microseconds.

    ``bound`` is the launch as the gate takes it. ``order`` sorts contenders of equal time. ``raw`` holds readings by
    kind as the clock gave them, one for each round, NaN where it failed; ``warm``, ``cold`` and ``rested`` those that
    count, after what their rounds had in common is taken out. ``rested`` is the decisive kind once more on a device
    that rests between readings; it is empty where the device's clock does not follow its load. ``waits`` is how much
    longer than its launches each reading took the host, as shares. ``failure`` or ``refutation`` says why it is out.
    """

    config: Config
    launch: Guarded
    bound: Bound
    order: Order
    rough_us: float = math.inf
    warm: list[float] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)
    rested: list[float] = field(default_factory=list)
    raw: dict[str, list[float]] = field(default_factory=dict)
    waits: list[float] = field(default_factory=list)
    failure: str = ""
    refutation: Refutation | None = None

    @property
    def out(self) -> bool:
        """Whether it has failed or was refuted."""
        return bool(self.failure) or self.refutation is not None

    def readings(self, kind: str) -> list[float]:
        """Its readings of ``kind``: warm, cold or rested."""
        return {"warm": self.warm, "cold": self.cold, RESTED: self.rested}[kind]


@dataclass(frozen=True, slots=True)
class Noise:
    """The reference measured against itself, as shares of its time.

    ``difference`` is how far two medians of the same launch lay apart, ``spread`` the deviation of single readings.
    """

    difference: float = 0.0
    spread: float = 0.0


def timing(readings: Sequence[float]) -> Timing | None:
    """Median and median absolute deviation of ``readings``; None where there are none."""
    if not readings:
        return None
    median = statistics.median(readings)
    return Timing(median, statistics.median(abs(r - median) for r in readings), len(readings))


def usable(reading: float) -> bool:
    """Whether a clock's reading can be a time."""
    return math.isfinite(reading) and reading > 0


def uncertainty_us(measured: Timing) -> float:
    """Standard error of a median, microseconds."""
    return _ERROR_PER_MAD * measured.mad_us / math.sqrt(measured.samples)


# --- rounds -------------------------------------------------------------------------------------------------------


def levelled(raw: Mapping[T, Sequence[float]]) -> dict[T, list[float]]:
    """``raw`` readings by round, NaN for one that failed, divided by the level of their round where that steadies them.

    The level is the median, over the others that ran in every round, of a reading over its own median. Nobody's own
    reading enters, so that spreads stay honest among few. Where rounds have little in common the level is the others'
    noise: readings that would spread more after the division are left as they are, those of all or of nobody. A
    contender alone keeps its readings.
    """
    rounds = max(map(len, raw.values()), default=0)
    stayed = {who: taken for who, taken in raw.items() if len(taken) == rounds and _known(taken)}
    # Medians over the same rounds for all, so that a failed reading tilts nothing.
    whole = [number for number in range(rounds) if all(math.isfinite(taken[number]) for taken in stayed.values())]
    medians = {
        who: statistics.median([taken[number] for number in whole] or filter(math.isfinite, taken))
        for who, taken in stayed.items()
    }
    shares = {who: [reading / medians[who] for reading in taken] for who, taken in stayed.items()}

    def level(who: T, number: int) -> float:
        others = [share[number] for other, share in shares.items() if other is not who]
        return statistics.median(filter(math.isfinite, others)) if _known(others) else 1.0

    plain = {who: [r for r in taken if math.isfinite(r)] for who, taken in raw.items()}
    divided = {
        who: [r / level(who, number) for number, r in enumerate(taken) if math.isfinite(r)]
        for who, taken in raw.items()
    }
    return divided if _spread(divided, stayed) <= _spread(plain, stayed) else plain


def _spread(readings: Mapping[T, Sequence[float]], of: Iterable[T]) -> float:
    """The deviation of readings as a share, on the average over the contenders in ``of``."""
    known = [timing(readings[who]) for who in of]
    return statistics.fmean([one.mad_us / one.median_us for one in known if one is not None] or [0.0])


def _known(readings: Sequence[float]) -> bool:
    return any(map(math.isfinite, readings))


def settled(raw: Sequence[float], block: int) -> bool:
    """Whether the last ``block`` readings go on where the ``block`` before them left off.

    A device that has just begun to work hard, or to rest, is on its way to another clock.
    """
    before, last = (timing([r for r in part if math.isfinite(r)]) for part in (raw[-2 * block : -block], raw[-block:]))
    if before is None or last is None:
        return False
    return abs(last.median_us - before.median_us) <= SETTLED_SHARE * before.median_us


# --- when to stop -------------------------------------------------------------------------------------------------


def precise(contender: Contender, kind: str) -> bool:
    """Whether the median of its readings is known to ``PRECISE_SHARE``."""
    measured = timing(contender.readings(kind))
    return measured is not None and uncertainty_us(measured) <= PRECISE_SHARE * measured.median_us


def in_contention(contender: Contender, racing: Iterable[Contender], kind: str) -> bool:
    """Whether ``contender`` may still turn out the fastest of ``racing``, with a margin of 5 %."""
    measured = timing(contender.readings(kind))
    if contender.out or measured is None:
        return False
    known = [timing(other.readings(kind)) for other in racing if not other.out]
    least = min(other.median_us + 2 * uncertainty_us(other) for other in known if other is not None)
    return measured.median_us - 2 * uncertainty_us(measured) <= (1 + OUT_OF_CONTENTION_SHARE) * least
