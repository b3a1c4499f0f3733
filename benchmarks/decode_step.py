"""One decode step of a Qwen3-8B-shaped stack without its attention, eager and captured, launched in five ways.

Prints one JSON object. ``python benchmarks/decode_step.py``: 36 layers of rms_norm, the QKV product, QK-norm, rope, the
output product, rms_norm, the gate and up product, swiglu and the down product, for 1 and 16 tokens in bfloat16, on
weights of their own. The ways are kalign with tuned launches, kalign with tuning off, the same kernels through Triton's
``kernel[grid](...)`` at the reference launch and through warm ``@triton.autotune``, and torch's own operators, which
are cuBLAS's products. Eager is host and device together, from one idle device to the next; captured is one replay of
the step's graph. Rounds go through all ways in turn.

What to compare with what: a matmul's reference launch has tiles for many rows, and one launch defines the bits for all,
so at a few tokens it is a slow one, and a gain over it (``kalign off``, ``triton``) is what tuning is worth to this
kernel, not to a decode step. That is in the figures over torch, and in those over autotune, which chooses from the
candidates that kalign tunes from; how many of them it timed, and what it chose, is in ``autotune``. torch's bytes are
others, which ``apart`` tells as a share of the result's length, and they may change with the number of tokens, which
kalign's do not. ``weights_floor_us`` is how long the weights take to be read at the rate of a copy.

Tuning stops after KALIGN_TUNE_BUDGET_S, 240 s where that is not set; what was not tuned by then launches its reference.
autotune stops after 1.2 s for each problem, of which there are ten for a number of tokens. Without a GPU it is a
rehearsal of small layers: nothing is captured.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import decode_ways
import torch

REHEARSAL = not torch.cuda.is_available()
QWEN, SMALL = (36, 4096, 12288, 32, 8, 128), (1, 32, 32, 2, 1, 16)
LAYERS, HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, HEAD = SMALL if REHEARSAL else QWEN
ROUNDS = 1 if REHEARSAL else 11
DEVICE = "cpu" if REHEARSAL else "cuda"
TOKENS = (1, 16)
AUTOTUNE_S = 1.2
PEERS = ("triton", "triton.autotune, warm", "torch")


class Layer(NamedTuple):
    before: Any
    qkv: Any
    q_norm: Any
    k_norm: Any
    out: Any
    behind: Any
    gate_up: Any
    down: Any


def layers() -> list[Layer]:
    """Weights ``(out in)`` of every layer, scaled so that a step neither grows nor vanishes."""

    def weight(rows: int, columns: int) -> Any:
        return (torch.randn(rows, columns, dtype=torch.bfloat16, device=DEVICE) * columns**-0.5).t()

    def scale(size: int) -> Any:
        return torch.ones(size, dtype=torch.bfloat16, device=DEVICE)

    qkv = (HEADS + 2 * KV_HEADS) * HEAD
    return [
        Layer(scale(HIDDEN), weight(qkv, HIDDEN), scale(HEAD), scale(HEAD), weight(HIDDEN, HEADS * HEAD),
              scale(HIDDEN), weight(2 * FEED_FORWARD, HIDDEN), weight(HIDDEN, FEED_FORWARD))
        for _ in range(LAYERS)
    ]  # fmt: skip


def step(ways: decode_ways.Ways, stack: list[Layer], x: Any, cos: Any, sin: Any) -> Any:
    """The hidden states behind the last layer; the query stands for the attention's result."""
    tokens, queries = x.shape[0], HEADS * HEAD
    for layer in stack:
        qkv = ways.product(ways.norm(x, layer.before), layer.qkv)
        q = ways.norm(qkv[:, :queries].reshape(tokens * HEADS, HEAD), layer.q_norm).view(tokens, HEADS, HEAD)
        k = qkv[:, queries : queries + KV_HEADS * HEAD].reshape(tokens * KV_HEADS, HEAD)
        ways.turn(ways.norm(k, layer.k_norm).view(tokens, KV_HEADS, HEAD), cos, sin)
        x = x + ways.product(ways.turn(q, cos, sin).view(tokens, queries), layer.out)
        gate_up = ways.product(ways.norm(x, layer.behind), layer.gate_up)
        x = x + ways.product(ways.gated(gate_up[:, :FEED_FORWARD], gate_up[:, FEED_FORWARD:]), layer.down)
    return x


# --- measuring ----------------------------------------------------------------------------------------------------


def tune(stack: list[Layer], x: Any, cos: Any, sin: Any) -> None:
    """Decide every launch of a step, on the first layer, in the phase decode."""
    import kalign_core as kalign

    with kalign.using(mode="tune", phase="decode"):
        step(decode_ways.through_kalign(), stack[:1], x, cos, sin)


def measured(stack: list[Layer], tokens: int) -> dict[str, Any]:
    """Every way's times for ``tokens`` tokens, and whether its result has the bytes of kalign's reference launches."""
    import kalign_core as kalign

    x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
    angles = torch.randn(tokens, HEAD // 2, device=DEVICE)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    tune(stack, x, cos, sin)
    autotune = decode_ways.Autotune(AUTOTUNE_S)
    ways = {
        "kalign tuned": ("read", decode_ways.through_kalign()),
        "kalign off": ("off", decode_ways.through_kalign()),
        "triton": ("off", decode_ways.through(decode_ways.by_triton())),
        "triton.autotune, warm": ("off", decode_ways.through(autotune.fire())),
        "torch": ("off", decode_ways.through_torch()),
    }
    replays, results = {}, {}
    for name, (mode, way) in ways.items():
        with kalign.using(mode=mode, phase="decode"):
            results[name] = step(way, stack, x, cos, sin).clone()
            replays[name] = captured(lambda way=way: step(way, stack, x, cos, sin))
    times: dict[str, dict[str, list[float]]] = {name: {"eager": [], "captured": []} for name in ways}
    for _ in range(ROUNDS):
        for name, (mode, way) in ways.items():
            with kalign.using(mode=mode, phase="decode"):
                times[name]["eager"].append(_us(lambda way=way: step(way, stack, x, cos, sin)))
            times[name]["captured"].append(_us(replays[name]))
    return {name: row(name, times, results) for name in ways} | {"autotune": autotune.summary()}


def row(name: str, times: dict[str, dict[str, list[float]]], results: dict[str, Any]) -> dict[str, Any]:
    """One way's medians, their ratios to its peers' in the same rounds, and how its result lies to kalign's."""
    found: dict[str, Any] = {}
    for kind, rounds in times[name].items():
        found[f"{kind}_us"] = round(statistics.median(rounds), 1)
        for peer in PEERS:
            found[f"{kind} over {peer}"] = round(statistics.median(map(_over, rounds, times[peer][kind])), 3)
    result, home = results[name], results["kalign off"]
    found["bytes equal kalign off"] = torch.equal(result.view(torch.int16), home.view(torch.int16))
    found["apart"] = ((result.double() - home.double()).norm() / home.double().norm()).item()
    return found


def floor_us(stack: list[Layer]) -> float:
    """Microseconds for reading every weight once at the rate of a copy."""
    import replay_timing

    weights = sum(t.numel() * t.element_size() for layer in stack for t in layer)
    return round(weights / replay_timing.copy_bandwidth() * 1e6, 1)


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """One replay of a graph of ``call``; ``call`` itself where there is no GPU."""
    if REHEARSAL:
        return call
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _over(a: float, b: float) -> float:
    return a / b


def _us(call: Callable[[], Any]) -> float:
    _wait()
    start = time.perf_counter()
    call()
    _wait()
    return (time.perf_counter() - start) * 1e6


def _wait() -> None:
    if not REHEARSAL:
        torch.cuda.synchronize()


def main() -> None:
    os.environ.setdefault("KALIGN_CACHE_DIR", tempfile.mkdtemp())
    os.environ.setdefault("KALIGN_TUNE_BUDGET_S", "240")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # what is known by then is still printed
    import replay_timing

    made: dict[str, Any] = {
        "benchmark": "decode_step", "rehearsal": REHEARSAL, "machine": replay_timing.machine(), "layers": LAYERS,
    }  # fmt: skip
    try:
        with torch.no_grad():
            stack = layers()
            made["weights_floor_us"] = floor_us(stack)
            for tokens in TOKENS:
                made[f"M={tokens}"] = measured(stack, tokens)
    finally:
        print(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
