"""Time what is deployed: many launches in one graph, interleaved in random order, median and spread.

Warm runs over and over a set of arguments, or a few where those stay in the last-level cache; cold goes round enough
sets to leave that cache between two uses of one. Everything that is compared is interleaved, so that what disturbs a
device disturbs all alike. Readings that are zero, negative or not a number are a clock's failure and are thrown away.
What the timed launches left behind is compared with what the reference's left: they are runs like any other, and many.

A large matrix product drives a device to its power limit, which lowers the clock; between kernels that wait for memory
the clock is high again. Which launch is best may differ between the two: on an H200, by 5 % among the leaders. Where
the clock follows the load, contenders are therefore measured at both paces: back to back, and with rests between.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kalign_core.errors import CandidateFailed
from kalign_core.hal.base import Platform, Sampler
from kalign_core.isolate import reason_of
from kalign_core.records import Refutation
from kalign_core.tuner.failures import short_of_memory
from kalign_core.tuner.readings import RESTED, in_contention, levelled, precise, settled, usable
from kalign_core.tuner.readings import Contender as Contender
from kalign_core.tuner.readings import Noise as Noise
from kalign_core.tuner.readings import timing as timing
from kalign_core.verifier.compare import as_integers

if TYPE_CHECKING:
    from kalign_core.verifier.bench import Bench

MAX_COLD_SETS = 512
WARM_SETS = 4
TARGET_GRAPH_US = 600.0
MAX_LAUNCHES = 256
CHUNK = 128
HOPELESS = 4.0  # times the fastest: more than a burst makes of a good one
BLOCK_ROUNDS = 5
# Blocks in which a device may settle; an H200 takes a tenth of a second from one clock to another.
SETTLING_BLOCKS = 8
# At a quarter of the time at work even the largest matrix product leaves the clock of an H200 where it is.
REST_SHARE = 3.0
PROBES = 5
PROBE_REST_S = 0.02
FOLLOWS_SHARE = 0.02
_CHECKED_SETS = 8


@dataclass(frozen=True, slots=True)
class Ready:
    """A contender's sampler and how many launches one reading of it takes."""

    sampler: Sampler
    launches: int


class Meter:
    """Times contenders on one bench. ``pressed`` says when there is no time for more readings than the least.

    ``decisive`` is the kind of reading that decides: warm in decode, where operands stay in the cache from step to
    step, else cold. ``rest`` waits for some seconds, ``now`` gives seconds.
    """

    def __init__(
        self,
        platform: Platform,
        bench: Bench,
        seed: int = 0,
        pressed: Callable[[], bool] = lambda: False,
        rest: Callable[[float], None] = time.sleep,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._platform, self._bench, self._pressed, self._rest, self._now = platform, bench, pressed, rest, now
        self._timer = platform.timer(bench.device)
        self._random = random.Random(seed)  # noqa: S311  # an order of measurement, not a secret
        self._sets: list[tuple[Any, ...]] = []
        self._last_level = platform.model(bench.device).last_level_bytes
        self._filler: torch.Tensor | None = None
        self.cold_sets = self._cold_sets()
        # Where its operands lie moves a kernel of a microsecond by up to 1 %: several places, all of them warm.
        self.warm_sets = max(1, min(WARM_SETS, self._last_level // (8 * max(bench.bytes_per_set(), 1))))
        self.decisive = "warm" if bench.problem.phase == "decode" or not self.cold_sets else "cold"

    def _cold_sets(self) -> int:
        """How many sets of arguments a cold timing goes round, or 0 where there is no cache to leave or no memory."""
        if not self._last_level:
            return 0
        one = max(self._bench.bytes_per_set(), 1)
        wanted = max(2, min(MAX_COLD_SETS, 1 + -(-2 * self._last_level // one)))
        free = self._platform.free_bytes(self._bench.device)
        return wanted if free is None or wanted * one < free // 2 else 0

    def _is_cold(self, kind: str) -> bool:
        return "cold" in (kind, self.decisive if kind == RESTED else "")

    def _sets_of(self, kind: str) -> int:
        return self.cold_sets if self._is_cold(kind) else self.warm_sets

    def sets(self, count: int) -> list[tuple[Any, ...]]:
        """At least ``count`` sets of arguments, made once and shared by all contenders."""
        if len(self._sets) < count:
            self._sets = []  # free the old ones first
            self._sets = self._bench.argument_sets(count)
        return self._sets[:count]

    def rough(self, contenders: Sequence[Contender], launches: int, rounds: int) -> None:
        """Set ``rough_us`` of each contender: the least of ``rounds`` interleaved readings of the decisive kind.

        A reading takes ``launches`` launches, or once round the sets of arguments where those are more. Who is many
        times slower than the fastest is read once.
        """
        sets = self._sets_of(self.decisive)
        launches = 1 if self._bench.interpreted else _whole_times(sets, launches)
        for start in range(0, len(contenders), CHUNK):
            least: dict[Contender, float] = {}
            with self._ready(contenders[start : start + CHUNK], sets, launches) as samplers:
                racing = dict(samplers)
                for taken in range(rounds):
                    if taken and self._pressed():
                        break
                    for contender, reading in self._round(racing, self.decisive).items():
                        least[contender] = min(reading, least.get(contender, math.inf))
                    limit = HOPELESS * min(least.values(), default=math.inf)
                    racing = {c: s for c, s in racing.items() if least.get(c, 0.0) <= limit}
            for contender in samplers:
                if contender in least:
                    contender.rough_us = least[contender]
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
        other kind is only recorded and gets the least number of rounds. Where the device's clock follows its load, who
        is in contention is read once more with rests between.
        """
        field = [home, *rivals]
        for contender in field:
            contender.rested, contender.waits = [], []
        for kind in ("warm", "cold") if self.cold_sets else ("warm",):
            self._interleave(field, kind, rounds if kind == decisive else min(rounds, BLOCK_ROUNDS))
        if self._follows_load(home, decisive):
            close = [rival for rival in rivals if in_contention(rival, field, decisive)]
            self._interleave([home, *close], RESTED, rounds)

    # --- rounds ---------------------------------------------------------------------------------------------------

    def _interleave(self, contenders: Sequence[Contender], kind: str, rounds: int) -> None:
        """Readings of ``kind``, a block of rounds at a time, from when the device has settled until enough is known."""
        home, sets = contenders[0], self._sets_of(kind)
        settling = 0 if self._bench.interpreted or kind not in (self.decisive, RESTED) else SETTLING_BLOCKS
        for contender in contenders:
            contender.raw[kind] = []
        with self._ready(contenders, sets) as samplers:
            if not self._bench.interpreted:
                self._round(samplers, kind)  # the first replay pays for uploading the graph
            racing = dict(samplers)
            taken = 0
            while taken < rounds and racing:
                count = min(BLOCK_ROUNDS, rounds - taken)
                self._block(racing, kind, count)
                taken += count
                if settling and not settled(home.raw[kind], BLOCK_ROUNDS):
                    settling -= 1
                    taken = count
                    for contender in racing:
                        contender.raw[kind] = contender.raw[kind][-count:]
                    if not self._pressed():
                        continue
                settling = 0
                self._level(samplers, kind)
                racing = {c: s for c, s in racing.items() if c is home or in_contention(c, racing, kind)}
                if self._pressed() or all(precise(contender, kind) for contender in racing):
                    break
            self._level(samplers, kind)
            self._compare_leftovers(home, samplers, self.sets(sets))

    def _block(self, racing: Mapping[Contender, Ready], kind: str, rounds: int) -> None:
        for _ in range(rounds):
            found = self._round(racing, kind)
            for contender in racing:
                contender.raw[kind].append(found.get(contender, math.nan))

    def _level(self, contenders: Mapping[Contender, Ready], kind: str) -> None:
        """Set the readings that count, from those that the clock gave."""
        counting = levelled({contender: contender.raw[kind] for contender in contenders if not contender.out})
        for contender, readings in counting.items():
            contender.readings(kind)[:] = readings

    def _round(self, samplers: Mapping[Contender, Ready], kind: str) -> dict[Contender, float]:
        """One reading of each sampler in random order, where it is usable."""
        order = [contender for contender in samplers if not contender.out]
        self._random.shuffle(order)
        found = {}
        for contender in order:
            reading = self._sample(contender, samplers[contender], kind)
            if usable(reading):
                found[contender] = reading
        return found

    def _sample(self, contender: Contender, ready: Ready, kind: str) -> float:
        if kind == RESTED:
            self._rest(REST_SHARE * ready.launches * _each_us(contender) * 1e-6)
        if self._is_cold(kind):
            self.evict()
        started = self._now()
        try:
            reading = ready.sampler.sample_us()
        except CandidateFailed as error:
            contender.failure = error.what
            return math.nan
        if usable(reading) and not self._bench.interpreted:
            contender.waits.append((self._now() - started) * 1e6 / (reading * ready.launches) - 1)
        return reading

    def evict(self) -> None:
        """Read enough other memory to empty the last-level cache, where not even the most sets of arguments fill it.

        Outside of what is timed, and by reading: what had been written would have to be written back meanwhile.
        """
        if self.cold_sets * self._bench.bytes_per_set() >= 2 * self._last_level:
            return
        if self._filler is None:
            words = 2 * self._last_level // 4
            self._filler = torch.zeros(words, dtype=torch.int32, device=self._bench.torch_device)
        self._filler.sum()

    def _follows_load(self, home: Contender, kind: str) -> bool:
        """Whether the device is at its power limit, or else the reference faster once the device has rested."""
        worked = timing(home.readings(kind))
        if self._bench.interpreted or self._pressed() or worked is None:
            return False
        if self._platform.condition(self._bench.device).power_capped:
            return True
        readings: list[float] = []
        with self._ready([home], self._sets_of(kind)) as samplers:
            for _ in range(PROBES):
                self._rest(PROBE_REST_S)
                readings += self._round(samplers, kind).values()
        return worked.median_us > (1 + FOLLOWS_SHARE) * min(readings, default=math.inf)

    @contextlib.contextmanager
    def _ready(self, contenders: Sequence[Contender], sets: int, launches: int = 0) -> Iterator[dict[Contender, Ready]]:
        """Samplers of the contenders that could be made ready, closed after the block."""
        arguments = self.sets(sets)
        samplers: dict[Contender, Ready] = {}
        try:
            for contender in contenders:
                count = launches or self._launches(contender, sets)
                sampler = self._sampler(contender, arguments, count)
                if sampler is not None:
                    samplers[contender] = Ready(sampler, count)
            yield samplers
        finally:
            for ready in samplers.values():
                ready.sampler.close()

    def _launches(self, contender: Contender, sets: int) -> int:
        if self._bench.interpreted:
            return 1
        return _whole_times(sets, int(min(MAX_LAUNCHES, max(5, TARGET_GRAPH_US / _each_us(contender)))))

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
        self, home: Contender, samplers: Mapping[Contender, Ready], sets: Sequence[tuple[Any, ...]]
    ) -> None:
        """Run each sampler once more and hold its outputs to the reference's.

        Where a kernel adds to what is there, each of its outputs may depend on how often it was launched.
        """
        kernel = self._bench.kernel
        if home not in samplers or any(kernel.args[name].kind == "accumulated" for name in kernel.outputs()):
            return
        positions = {name: kernel.parameters.index(name) for name in kernel.outputs()}
        self._sample(home, samplers[home], "")
        expected = {name: as_integers(sets[0][at]).clone() for name, at in positions.items() if sets[0][at] is not None}
        for contender, ready in samplers.items():
            if contender is home or contender.out:
                continue
            self._sample(contender, ready, "")
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


def _each_us(contender: Contender) -> float:
    """About how long one of its launches takes."""
    return contender.rough_us if math.isfinite(contender.rough_us) else 10.0


def _whole_times(sets: int, launches: int) -> int:
    """At least ``launches`` launches that go a whole number of times round ``sets`` sets of arguments."""
    return -(-max(launches, sets) // sets) * sets


# --- one at a time ------------------------------------------------------------------------------------------------

_measuring: dict[int, threading.RLock] = {}


@contextlib.contextmanager
def alone_on(device: int) -> Iterator[None]:
    """Keep other tunings of this process from timing on ``device``, which they would disturb."""
    with _measuring.setdefault(device, threading.RLock()):
        yield


os.register_at_fork(after_in_child=_measuring.clear)  # a child must not wait for a lock that its parent holds
