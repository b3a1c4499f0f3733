"""Time callables the way they are deployed: unrolled in one graph, replayed in random order, medians of many rounds."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

T = TypeVar("T")

ROUNDS = 15
TARGET_US = 800.0
MAX_LAUNCHES = 200


def machine() -> dict[str, Any]:
    """What was measured on: device, driver and versions."""
    from kalign_core import session

    facts = session.current().facts(torch.cuda.current_device() if torch.cuda.is_available() else 0)
    import triton  # behind the choice of a platform, which may have it interpret

    return {
        "device": facts.identity.name,
        "toolchain": dict(facts.toolchain.facts),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def sets_for(make: Callable[[int], tuple[Any, ...]], cold: bool) -> list[tuple[Any, ...]]:
    """One set of arguments, or enough to pass twice the last-level cache between two uses of one."""
    first = make(0)
    if not cold:
        return [first]
    if not torch.cuda.is_available():
        return [first, make(1)]
    moved = sum(t.numel() * t.element_size() for t in first if isinstance(t, torch.Tensor))
    level = torch.cuda.get_device_properties(0).L2_cache_size
    return [first, *(make(seed) for seed in range(1, min(256, max(2, 1 + -(-2 * level // moved)))))]


def graph_of(call: Callable[..., Any], sets: Sequence[tuple[Any, ...]], launches: int) -> torch.cuda.CUDAGraph:
    """``launches`` calls in one graph, going round ``sets``."""
    for arguments in sets[:2]:
        call(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            call(*sets[i % len(sets)])
    return graph


@dataclass(frozen=True, slots=True)
class Replay:
    """A graph of ``launches`` launches; replaying it takes no Python for each of them."""

    graph: torch.cuda.CUDAGraph
    launches: int

    def us(self) -> float:
        """Device microseconds for each launch of one replay."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1000.0 / self.launches


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """In a replay's place where there is no GPU: the call itself, by the host's clock."""

    call: Callable[..., Any]
    sets: Sequence[tuple[Any, ...]]
    launches: int = 1

    def us(self) -> float:
        """Host microseconds of one call."""
        start = time.perf_counter()
        self.call(*self.sets[0])
        return (time.perf_counter() - start) * 1e6


Reading = Replay | Rehearsal


def replays(calls: Mapping[T, Callable[..., Any]], sets: Sequence[tuple[Any, ...]]) -> Mapping[T, Reading]:
    """Each call in a graph of its own, long enough to be timed, going a whole number of times round ``sets``."""
    if not torch.cuda.is_available():
        return {name: Rehearsal(call, sets) for name, call in calls.items()}
    ready = {}
    for name, call in calls.items():
        trial = Replay(graph_of(call, sets, 5), 5)
        trial.us()
        launches = int(min(MAX_LAUNCHES, max(5, TARGET_US / max(trial.us(), 0.5))))
        launches = -(-max(launches, len(sets)) // len(sets)) * len(sets)
        ready[name] = Replay(graph_of(call, sets, launches), launches)
        ready[name].us()
    return ready


def interleave(
    ready: Mapping[T, Reading], rounds: int, rest_share: float = 0.0, before: Callable[[], None] | None = None
) -> dict[T, list[float]]:
    """Readings by round, in random order within each, ``before`` called ahead of each of them.

    After each reading ``rest_share`` times its length of idling.
    """
    readings: dict[T, list[float]] = {name: [] for name in ready}
    order = list(ready)
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for name in order:
            if before is not None:
                before()
            us = ready[name].us()
            readings[name].append(us)
            if rest_share:
                time.sleep(rest_share * us * ready[name].launches * 1e-6)
    return readings


def compare_us(
    calls: dict[str, Callable[..., Any]], make: Callable[[int], tuple[Any, ...]], cold: bool, rounds: int = ROUNDS
) -> dict[str, dict[str, float]]:
    """Median and spread in microseconds of each call on the same argument sets, interleaved in random order."""
    readings = interleave(replays(calls, sets_for(make, cold)), rounds)
    return {name: _summary(values) for name, values in readings.items()}


def shares(readings: Mapping[T, Sequence[float]]) -> dict[T, tuple[float, float]]:
    """Median and deviation of each one's readings over the geometric mean of their round: what a clock that moves
    under all alike leaves."""
    means = [statistics.geometric_mean(taken) for taken in zip(*readings.values(), strict=True)]
    found = {}
    for name, taken in readings.items():
        over = [reading / mean for reading, mean in zip(taken, means, strict=True)]
        median = statistics.median(over)
        found[name] = (median, statistics.median(abs(share - median) for share in over))
    return found


def _summary(values: list[float]) -> dict[str, float]:
    median = statistics.median(values)
    mad = statistics.median(abs(v - median) for v in values)
    return {"us": round(median, 3), "mad_us": round(mad, 3), "rounds": len(values)}


def copy_bandwidth() -> float:
    """Bytes read and written per second by a device-to-device copy of 2 GiB, median of 15; of 1 MiB on a host."""
    if not torch.cuda.is_available():
        source = torch.ones(1 << 20, dtype=torch.uint8)
        return 2 * source.numel() / (Rehearsal(torch.empty_like(source).copy_, [(source,)]).us() * 1e-6)
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda").fill_(1)
    target = torch.empty_like(source)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(ROUNDS + 2):
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000.0)
    return 2 * source.numel() / statistics.median(times[2:])
