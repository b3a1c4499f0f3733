"""Time callables the way they are deployed: unrolled in one graph, replayed in random order, medians of many rounds."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

ROUNDS = 15
TARGET_US = 800.0
MAX_LAUNCHES = 200


def machine() -> dict[str, Any]:
    """What was measured on: device, driver and versions."""
    import triton

    from kalign_core import session

    facts = session.current().facts(torch.cuda.current_device())
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


def compare_us(
    calls: dict[str, Callable[..., Any]], make: Callable[[int], tuple[Any, ...]], cold: bool
) -> dict[str, dict[str, float]]:
    """Median and spread in microseconds of each call on the same argument sets, interleaved in random order."""
    sets = sets_for(make, cold)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def replay(graph: torch.cuda.CUDAGraph, launches: int) -> float:
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1000.0 / launches

    ready = []
    for name, call in calls.items():
        trial = graph_of(call, sets, 5)
        replay(trial, 5)
        each = max(replay(trial, 5), 0.5)
        launches = int(min(MAX_LAUNCHES, max(5, TARGET_US / each)))
        launches = -(-max(launches, len(sets)) // len(sets)) * len(sets)
        graph = graph_of(call, sets, launches)
        replay(graph, launches)
        ready.append((name, graph, launches))
    readings: dict[str, list[float]] = {name: [] for name in calls}
    order = random.Random(0)
    for _ in range(ROUNDS):
        order.shuffle(ready)
        for name, graph, launches in ready:
            readings[name].append(replay(graph, launches))
    return {name: _summary(values) for name, values in readings.items()}


def _summary(values: list[float]) -> dict[str, float]:
    median = statistics.median(values)
    mad = statistics.median(abs(v - median) for v in values)
    return {"us": round(median, 3), "mad_us": round(mad, 3), "rounds": len(values)}


def copy_bandwidth() -> float:
    """Bytes read and written per second by a device-to-device copy of 2 GiB, median of 15."""
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
