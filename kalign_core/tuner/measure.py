"""Time what is deployed: many launches in one graph, interleaved in random order, median and spread.

Warm runs one set of arguments over and over, cold goes round enough sets to leave the last-level cache between two
uses of one. Everything that is compared is interleaved, so that what disturbs a device disturbs all alike. Readings
that are zero, negative or not a number are a clock's failure and are thrown away. What the timed launches left behind
is compared with what the reference's left: they are runs like any other, and many.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import statistics
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kalign_core.errors import CandidateFailed
from kalign_core.hal.base import Platform, Sampler
from kalign_core.isolate import reason_of
from kalign_core.records import Config, Refutation, Timing
from kalign_core.tuner.failures import Guarded, short_of_memory
from kalign_core.verifier.compare import as_integers

if TYPE_CHECKING:
    from kalign_core.tuner.space import Order
    from kalign_core.verifier.bench import Bench
    from kalign_core.verifier.bound import Bound

MAX_COLD_SETS = 512
TARGET_GRAPH_US = 600.0
MAX_LAUNCHES = 256
CHUNK = 64
HOPELESS = 4.0  # times the fastest: more than a burst makes of a good one
BLOCK_ROUNDS = 5
# A median known to a quarter of a percent decides everything the promotion margin of two percent asks.
PRECISE_SHARE = 0.0025
OUT_OF_CONTENTION_SHARE = 0.05
_CHECKED_SETS = 8
# Standard error of a median of normal noise, in median absolute deviations: sqrt(pi / 2) * 1.4826.
_ERROR_PER_MAD = 1.858


@dataclass(eq=False)
class Contender:
    """One candidate in a race: its configuration, its launch and its readings in microseconds.

    ``bound`` is the launch as the gate takes it. ``order`` sorts contenders of equal time. ``failure`` or
    ``refutation`` says why it is out.
    """

    config: Config
    launch: Guarded
    bound: Bound
    order: Order
    rough_us: float = math.inf
    warm: list[float] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)
    failure: str = ""
    refutation: Refutation | None = None

    @property
    def out(self) -> bool:
        """Whether it has failed or was refuted."""
        return bool(self.failure) or self.refutation is not None

    def readings(self, kind: str) -> list[float]:
        """Its readings of ``kind``, warm or cold."""
        return self.warm if kind == "warm" else self.cold


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


class Meter:
    """Times contenders on one bench. ``pressed`` says when there is no time for more readings than the least."""

    def __init__(
        self, platform: Platform, bench: Bench, seed: int = 0, pressed: Callable[[], bool] = lambda: False
    ) -> None:
        self._platform, self._bench, self._pressed = platform, bench, pressed
        self._timer = platform.timer(bench.device)
        self._random = random.Random(seed)  # noqa: S311  # an order of measurement, not a secret
        self._sets: list[tuple[Any, ...]] = []
        self.cold_sets = self._cold_sets()

    def _cold_sets(self) -> int:
        """How many sets of arguments a cold timing goes round, or 0 where there is no cache to leave or no memory."""
        last_level = self._platform.model(self._bench.device).last_level_bytes
        if not last_level:
            return 0
        one = max(self._bench.bytes_per_set(), 1)
        wanted = max(2, min(MAX_COLD_SETS, 1 + -(-2 * last_level // one)))
        free = self._platform.free_bytes(self._bench.device)
        return wanted if free is None or wanted * one < free // 2 else 0

    def sets(self, count: int) -> list[tuple[Any, ...]]:
        """At least ``count`` sets of arguments, made once and shared by all contenders."""
        if len(self._sets) < count:
            self._sets = []  # free the old ones first
            self._sets = self._bench.argument_sets(count)
        return self._sets[:count]

    def rough(self, contenders: Sequence[Contender], launches: int, rounds: int) -> None:
        """Set ``rough_us`` of each contender: the least of ``rounds`` interleaved readings of ``launches`` launches.

        Who is many times slower than the fastest is read once.
        """
        launches = 1 if self._bench.interpreted else launches
        for start in range(0, len(contenders), CHUNK):
            readings: dict[Contender, list[float]] = {}
            with self._ready(contenders[start : start + CHUNK], 1, launches) as samplers:
                racing = dict(samplers)
                for taken in range(rounds):
                    if taken and self._pressed():
                        break
                    self._round(racing, readings)
                    limit = HOPELESS * min(map(min, readings.values()), default=math.inf)
                    racing = {c: s for c, s in racing.items() if min(readings.get(c, [0.0])) <= limit}
            for contender in samplers:
                if contender in readings:
                    contender.rough_us = min(readings[contender])
                elif not contender.failure:
                    contender.failure = "no usable reading of the clock"

    def noise(self, home: Contender, rounds: int, kind: str) -> Noise:
        """Measure the reference against itself."""
        twins = [Contender(home.config, home.launch, home.bound, home.order, home.rough_us) for _ in range(2)]
        self._interleave(twins, kind, rounds)
        for twin in twins:
            home.failure = home.failure or twin.failure
            home.refutation = home.refutation or twin.refutation
        first, second = (timing(twin.readings(kind)) for twin in twins)
        both = timing([*twins[0].readings(kind), *twins[1].readings(kind)])
        if first is None or second is None or both is None:
            return Noise()
        return Noise(abs(first.median_us - second.median_us) / both.median_us, both.mad_us / both.median_us)

    def race(self, home: Contender, rivals: Sequence[Contender], rounds: int, decisive: str) -> None:
        """Take up to ``rounds`` readings of the ``decisive`` kind of the reference and its rivals, interleaved.

        Stops where every median in contention is known well enough; who is out of contention is not timed further. The
        other kind is only recorded and gets the least number of rounds.
        """
        for kind in ("warm", "cold") if self.cold_sets else ("warm",):
            self._interleave([home, *rivals], kind, rounds if kind == decisive else min(rounds, BLOCK_ROUNDS))

    # --- rounds ---------------------------------------------------------------------------------------------------

    def _interleave(self, contenders: Sequence[Contender], kind: str, rounds: int) -> None:
        sets = self.cold_sets if kind == "cold" else 1
        with self._ready(contenders, sets) as samplers:
            if not self._bench.interpreted:
                self._round(samplers, {})  # the first replay pays for uploading the graph
            racing = dict(samplers)
            for taken in range(0, rounds, BLOCK_ROUNDS):
                for _ in range(min(BLOCK_ROUNDS, rounds - taken)):
                    self._round(racing, {contender: contender.readings(kind) for contender in racing})
                home = contenders[0]
                racing = {c: s for c, s in racing.items() if c is home or in_contention(c, racing, kind)}
                if self._pressed() or all(precise(contender, kind) for contender in racing):
                    break
            self._compare_leftovers(contenders[0], samplers, self.sets(sets))

    def _round(self, samplers: dict[Contender, Sampler], readings: dict[Contender, list[float]]) -> None:
        """One reading of each sampler in random order, added to ``readings`` where usable."""
        order = [contender for contender in samplers if not contender.out]
        self._random.shuffle(order)
        for contender in order:
            reading = self._sample(contender, samplers[contender])
            if usable(reading):
                readings.setdefault(contender, []).append(reading)

    def _sample(self, contender: Contender, sampler: Sampler) -> float:
        try:
            return sampler.sample_us()
        except CandidateFailed as error:
            contender.failure = error.what
            return math.nan

    @contextlib.contextmanager
    def _ready(
        self, contenders: Sequence[Contender], sets: int, launches: int = 0
    ) -> Iterator[dict[Contender, Sampler]]:
        """Samplers of the contenders that could be made ready, closed after the block."""
        arguments = self.sets(sets)
        samplers: dict[Contender, Sampler] = {}
        try:
            for contender in contenders:
                sampler = self._sampler(contender, arguments, launches or self._launches(contender, sets))
                if sampler is not None:
                    samplers[contender] = sampler
            yield samplers
        finally:
            for sampler in samplers.values():
                sampler.close()

    def _launches(self, contender: Contender, sets: int) -> int:
        if self._bench.interpreted:
            return 1
        each = contender.rough_us if math.isfinite(contender.rough_us) else 10.0
        wanted = int(min(MAX_LAUNCHES, max(5, TARGET_GRAPH_US / each)))
        return -(-max(wanted, sets) // sets) * sets

    def _sampler(self, contender: Contender, sets: list[tuple[Any, ...]], launches: int) -> Sampler | None:
        try:
            return self._timer.sampler(contender.launch, sets, launches)
        except CandidateFailed as error:
            contender.failure = error.what
        except RuntimeError as error:
            self._platform.synchronize(self._bench.device)  # raises where the device is lost
            if short_of_memory(reason_of(error)):
                raise
            contender.failure = contender.launch.failure or reason_of(error)
        return None

    # --- what the launches left behind ----------------------------------------------------------------------------

    def _compare_leftovers(
        self, home: Contender, samplers: dict[Contender, Sampler], sets: Sequence[tuple[Any, ...]]
    ) -> None:
        """Run each sampler once more and hold its outputs to the reference's; what accumulates cannot be compared."""
        kernel = self._bench.kernel
        positions = {
            name: kernel.parameters.index(name) for name in kernel.outputs() if kernel.args[name].kind != "accumulated"
        }
        if home not in samplers:
            return
        self._sample(home, samplers[home])
        expected = {name: as_integers(sets[0][at]).clone() for name, at in positions.items() if sets[0][at] is not None}
        for contender, sampler in samplers.items():
            if contender is home or contender.out:
                continue
            self._sample(contender, sampler)
            for arguments in sets[:_CHECKED_SETS]:
                for name, bytes_ in expected.items():
                    left = as_integers(arguments[positions[name]])
                    if contender.refutation is None and not torch.equal(left, bytes_):
                        contender.refutation = _refutation(name, left, bytes_)


def _refutation(argument: str, left: torch.Tensor, expected: torch.Tensor) -> Refutation:
    differing = left != expected
    where = tuple(int(i) for i in differing.nonzero()[0])
    digits = 2 * left.element_size()
    mask = (1 << (4 * digits)) - 1
    return Refutation(
        "timed launches",
        "the bytes left behind by timed launches differ",
        argument=argument,
        coordinate=where,
        reference=f"{int(expected[where]) & mask:0{digits}x}",
        candidate=f"{int(left[where]) & mask:0{digits}x}",
        differing=int(differing.sum()),
        compared=left.numel(),
    )


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


# --- one at a time ------------------------------------------------------------------------------------------------

_measuring: dict[int, threading.RLock] = {}


@contextlib.contextmanager
def alone_on(device: int) -> Iterator[None]:
    """Keep other tunings of this process from timing on ``device``, which they would disturb."""
    with _measuring.setdefault(device, threading.RLock()):
        yield


os.register_at_fork(after_in_child=_measuring.clear)  # a child must not wait for a lock that its parent holds
