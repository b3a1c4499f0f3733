"""Host time per call: kalign's operators beside torch's and beside the same kernels launched by Triton.

Prints one JSON object. ``python benchmarks/dispatch.py``: 15 rounds; in each, every call in turn runs a block of 300
calls with the device idle at its start. Times are medians over the rounds; a ratio is the median of the rounds' own
ratios, because the host's clock moves by a third within a run. Shapes are tiny, so that the host is what is measured.

Operators launch what was tuned for them; modes are compared in a session that tunes nothing, so that all of them launch
the reference: one launch may cost the host more than another.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROUNDS, CALLS, KEYS = 15, 300, 10_000
MODES = ("off", "tune", "read")
Calls = dict[str, Callable[[], Any]]
RATIOS = {
    "swiglu(out=) over torch.add(out=)": ("kalign swiglu(out=)", "torch.add(out=)", 1.1),
    "swiglu(out=), its reference, over torch.add(out=)": (
        "kalign swiglu(out=), read", "torch.add(out=), beside the modes", 1.1),
    "swiglu(out=) over triton's launch": ("kalign swiglu(out=)", "triton swiglu[grid]", 0.5),
    "swiglu(out=) over autotune, warm": ("kalign swiglu(out=)", "triton.autotune swiglu, warm", 0.3),
    "swiglu(out=), other buffers each time, over torch.add(out=) so": (
        "kalign swiglu(out=), 64 sets", "torch.add(out=), 64 sets", None),
    "matmul(out=) over triton's launch": ("kalign matmul(out=)", "triton matmul[grid]", 0.5),
    "swiglu over x + y": ("kalign swiglu", "x + y", 1.25),
    "rms_norm with gradients over torch": ("kalign rms_norm, gradients", "torch rms_norm, gradients", 1.8),
    "rms_norm over torch": ("kalign rms_norm", "torch rms_norm", None),
    "off over read": ("kalign swiglu(out=), off", "kalign swiglu(out=), read", 1.05),
    "tune over read": ("kalign swiglu(out=), tune", "kalign swiglu(out=), read", 1.05),
    "read with 10,000 keys known over read with few": ("kalign swiglu, 10,000 keys", "kalign swiglu, few keys", None),
}  # fmt: skip


def block_us(call: Callable[[], Any]) -> float:
    """Host microseconds of one call, over a block of them."""
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def measured(calls: Calls) -> dict[str, list[float]]:
    """Every round's time of every call; a name that ends in ``, off`` or another mode is called in that mode."""
    import kalign_core as kalign

    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(ROUNDS + 1):
        for name, call in calls.items():
            mode = name.rpartition(", ")[2]
            with kalign.using(mode=mode if mode in MODES else "read"):
                us = block_us(call)
            if number:  # the first round warms up
                times[name].append(us)
    return times


def pointwise() -> Calls:
    import torch
    import triton

    import kalign_core as kalign
    from kalign_core.kernels.swiglu import swiglu_kernel

    x, y = (torch.randn(1, 1024, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(x)
    config = {"BLOCK": 1024, "OVERLAP": False, "num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}
    fn, sizes = swiglu_kernel.fn, (1, 1024, 1024, 1024, 1024)
    configs = [triton.Config({"BLOCK": 1024, "OVERLAP": False}, num_warps=w) for w in (2, 4)]
    tuned = triton.autotune(configs=configs, key=["F"])(fn)
    swiglu, add = kalign.ops.swiglu, torch.add
    sets = [(torch.randn_like(x), torch.randn_like(x), torch.empty_like(x)) for _ in range(64)]
    turn, other_turn = itertools.cycle(sets), itertools.cycle(sets)

    def add_in_turn() -> None:
        a, b, c = next(turn)
        add(a, b, out=c)

    def swiglu_in_turn() -> None:
        a, b, c = next(other_turn)
        swiglu(a, b, out=c)

    kalign.tune(swiglu, x, y)
    return {
        "torch.add(out=)": lambda: add(x, y, out=out),
        "kalign swiglu(out=)": lambda: swiglu(x, y, out=out),
        "torch.add(out=), 64 sets": add_in_turn,
        "kalign swiglu(out=), 64 sets": swiglu_in_turn,
        "x + y": lambda: x + y,
        "kalign swiglu": lambda: swiglu(x, y),
        "triton swiglu[grid]": lambda: fn[(1,)](x, y, out, *sizes, **config),
        "triton.autotune swiglu, warm": lambda: tuned[(1,)](x, y, out, *sizes),
    }


def in_each_mode() -> dict[str, list[float]]:
    """The same launch in every mode: the reference's, where nothing is stored and no time is left for tuning."""
    import torch

    import kalign_core as kalign
    from kalign_core import settings
    from kalign_core.cache.base import MemoryStore
    from kalign_core.session import Session

    x, y = (torch.randn(1, 1024, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(x)
    swiglu, add = kalign.ops.swiglu, torch.add
    unsettled = dataclasses.replace(settings.read(), tune_budget_s=0.0)
    with Session(store=MemoryStore(), configuration=unsettled).active():
        return measured({
            "torch.add(out=), beside the modes": lambda: add(x, y, out=out),
            **{f"kalign swiglu(out=), {mode}": lambda: swiglu(x, y, out=out) for mode in MODES},
        })  # fmt: skip


def product() -> Calls:
    import torch

    import kalign_core as kalign
    from kalign_core.kernels.matmul import matmul_kernel

    a, b = (torch.randn(16, 16, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    config = {**matmul_kernel.reference_config(None), "WIDE": False}
    sizes = (16, 16, 16, 16, 1, 16, 1, 16, 1)
    return {
        "torch.mm(out=)": lambda: torch.mm(a, b, out=out),
        "triton matmul[grid]": lambda: matmul_kernel.fn[(1,)](a, b, None, out, *sizes, **config),
        "kalign matmul(out=)": lambda: kalign.ops.matmul(a, b, out=out),
    }


def normalised() -> Calls:
    import torch

    import kalign_core as kalign

    x, w = torch.randn(1, 1024, device="cuda"), torch.randn(1024, device="cuda")
    grown, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
    out, theirs, ours = torch.empty_like(x), torch.nn.functional.rms_norm, kalign.ops.rms_norm
    return {
        "torch rms_norm": lambda: theirs(x, (1024,), w, 1e-6),
        "kalign rms_norm(out=)": lambda: ours(x, w, out=out),
        "kalign rms_norm": lambda: ours(x, w),
        "torch rms_norm, gradients": lambda: theirs(grown, (1024,), weight, 1e-6),
        "kalign rms_norm, gradients": lambda: ours(grown, weight),
    }


def keys() -> tuple[dict[str, list[float]], dict[str, float]]:
    """Hits with few and with ten thousand calls known, and what the first call of a new row count costs."""
    import torch

    import kalign_core as kalign
    from kalign_core import session

    x, y = (torch.randn(KEYS, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    few = [(x[:n], y[:n]) for n in range(1, KEYS, KEYS // 16)]
    many = [(x[:n], y[:n]) for n in range(1, KEYS + 1)]

    def through(sets: list[Any]) -> Callable[[], Any]:
        turn = itertools.cycle(sets)
        return lambda: kalign.ops.swiglu(*next(turn))

    session.current().forget()
    times = measured({"kalign swiglu, few keys": through(few)})
    start = time.perf_counter()
    for gate, up in many:
        kalign.ops.swiglu(gate, up)
    first_us = (time.perf_counter() - start) / len(many) * 1e6
    times.update(measured({"kalign swiglu, 10,000 keys": through(many[:: KEYS // 16 + 1])}))
    return times, {"known": len(session.current().calls), "first call of a new row count, us": round(first_us, 2)}


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import replay_timing

    times = measured({**pointwise(), **product(), **normalised()}) | in_each_mode()
    more, table = keys()
    times.update(more)
    ratios = {}
    for name, (ours, theirs, asked) in RATIOS.items():
        rounds = [a / b for a, b in zip(times[ours], times[theirs], strict=True)]
        ratios[name] = {"median": round(statistics.median(rounds), 3), "asked": asked}
    result = {"benchmark": "dispatch", "machine": replay_timing.machine(), "rounds": ROUNDS, "calls_per_block": CALLS,
              "host_us": {name: round(statistics.median(rounds), 3) for name, rounds in times.items()},
              "ratios": ratios, "keys": table}  # fmt: skip
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
