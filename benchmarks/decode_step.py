"""One decode step of a Qwen3-8B-shaped stack without its attention, eager and captured, launched four ways.

Prints one JSON object. ``python benchmarks/decode_step.py``: 36 layers of rms_norm, the QKV product, QK-norm, rope, the
output product, rms_norm, the gate and up product, swiglu and the down product, for 1 and 16 tokens in bfloat16, on
weights of their own. The ways are kalign with tuned launches, kalign with tuning off, the same kernels through Triton's
``kernel[grid](...)`` at the reference launch, and through warm ``@triton.autotune``. Eager is host and device together,
from one idle device to the next; captured is one replay of the step's graph. Rounds go through all ways in turn.

Tuning stops after KALIGN_TUNE_BUDGET_S, 240 s where that is not set; what was not tuned by then launches its reference.
Without a GPU it is a rehearsal of small layers: nothing is captured, and autotune, which needs a device, is left out.
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
from pathlib import Path
from typing import Any, NamedTuple

import torch

REHEARSAL = not torch.cuda.is_available()
QWEN, SMALL = (36, 4096, 12288, 32, 8, 128), (1, 32, 32, 2, 1, 16)
LAYERS, HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, HEAD = SMALL if REHEARSAL else QWEN
ROUNDS = 1 if REHEARSAL else 11
DEVICE = "cpu" if REHEARSAL else "cuda"
TOKENS = (1, 16)
Fire = Callable[..., None]


class Ways(NamedTuple):
    """The operators a step is made of, launched one way."""

    norm: Callable[..., Any]
    turn: Callable[..., Any]
    gated: Callable[..., Any]
    product: Callable[..., Any]


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


def step(ways: Ways, stack: list[Layer], x: Any, cos: Any, sin: Any) -> Any:
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


# --- the four ways ------------------------------------------------------------------------------------------------


def through_kalign() -> Ways:
    from kalign_core import ops

    return Ways(ops.rms_norm, ops.rope, ops.swiglu, ops.matmul)


def through(fire: Fire) -> Ways:
    """The operators' kernels on outputs from ``torch.empty``, launched by ``fire(kernel, *arguments)``."""
    from kalign_core import ops

    norm_kernel, rope_kernel = ops.rms_norm.kernels[0], ops.rope.kernels[0]
    swiglu_kernel, matmul_kernel = ops.swiglu.kernels[0], ops.matmul.kernels[0]

    def norm(x: Any, weight: Any) -> Any:
        out, rstd = torch.empty_like(x), torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
        fire(norm_kernel, x, weight, out, rstd, *x.shape, x.stride(0), out.stride(0), 1e-6)
        return out

    def turn(x: Any, cos: Any, sin: Any) -> Any:
        out = torch.empty_like(x)
        strides = (x.stride(0), x.stride(1), cos.stride(0), sin.stride(0), out.stride(0), out.stride(1))
        fire(rope_kernel, x, cos, sin, out, *x.shape, *strides, 1.0, 0)
        return out

    def gated(gate: Any, up: Any) -> Any:
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        fire(swiglu_kernel, gate, up, out, *gate.shape, gate.stride(0), up.stride(0), out.stride(0))
        return out

    def product(a: Any, b: Any) -> Any:
        out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
        sizes = (a.shape[0], b.shape[1], a.shape[1], *a.stride(), *b.stride(), *out.stride())
        fire(matmul_kernel, a, b, None, out, *sizes)
        return out

    return Ways(norm, turn, gated, product)


def by_triton(tuned: bool) -> Fire:
    """``kernel[grid](...)`` at the reference launch, or through autotune over it and one other number of warps.

    What a caller would write down beside the launch (constants, options, grid) is looked up by the sizes.
    """
    import triton

    from kalign_core.problems import problem_of

    known: dict[Any, Any] = {}

    def prepared(kernel: Any, args: tuple[Any, ...]) -> Any:
        problem = problem_of(kernel, args, "decode")
        config = kernel.reference_config(problem)
        constants, options = kernel.constants_for(problem, config), kernel.options_for(config)
        grid = tuple(kernel.grid(problem, config))
        if not tuned:
            return kernel.fn[grid], {**constants, **options}
        warps = {"num_warps": int(options.pop("num_warps")), "num_stages": int(options.pop("num_stages"))}
        others = [triton.Config({}, **{**warps, "num_warps": w}) for w in (warps["num_warps"], 8)]
        return triton.autotune(configs=others, key=list(kernel.dims))(kernel.fn)[grid], {**constants, **options}

    def fire(kernel: Any, *args: Any) -> None:
        key = (kernel.name, *[arg for arg in args if isinstance(arg, int)])
        found = known.get(key)
        if found is None:
            found = known[key] = prepared(kernel, args)
        launch, words = found
        launch(*args, **words)

    return fire


# --- measuring ----------------------------------------------------------------------------------------------------


def tune(stack: list[Layer], x: Any, cos: Any, sin: Any) -> None:
    """Decide every launch of a step, on the first layer, in the phase decode."""
    import kalign_core as kalign

    with kalign.using(mode="tune", phase="decode"):
        step(through_kalign(), stack[:1], x, cos, sin)


def measured(stack: list[Layer], tokens: int) -> dict[str, Any]:
    import kalign_core as kalign

    x = torch.randn(tokens, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
    angles = torch.randn(tokens, HEAD // 2, device=DEVICE)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    tune(stack, x, cos, sin)
    ways = {
        "kalign tuned": ("read", through_kalign()),
        "kalign off": ("off", through_kalign()),
        "triton": ("off", through(by_triton(tuned=False))),
    }
    if not REHEARSAL:
        ways["triton.autotune, warm"] = ("off", through(by_triton(tuned=True)))
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
    peer = times["triton"]
    same = {
        name: torch.equal(r.view(torch.int16), results["kalign off"].view(torch.int16)) for name, r in results.items()
    }
    return {
        name: {
            **{f"{kind}_us": round(statistics.median(rounds), 1) for kind, rounds in kinds.items()},
            **{f"{kind} over triton": round(statistics.median(map(_over, rounds, peer[kind])), 3)
               for kind, rounds in kinds.items()},
            "bytes equal kalign off": same[name],
        }
        for name, kinds in times.items()
    }  # fmt: skip


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
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import replay_timing

    made = {
        "benchmark": "decode_step", "rehearsal": REHEARSAL, "machine": replay_timing.machine(), "layers": LAYERS,
    }  # fmt: skip
    try:
        with torch.no_grad():
            stack = layers()
            for tokens in TOKENS:
                made[f"M={tokens}"] = measured(stack, tokens)
    finally:
        print(json.dumps(made, indent=1))


if __name__ == "__main__":
    main()
