"""What tuning costs beside ``@triton.autotune`` over the same list, and how good both choices are.

Prints one JSON object. ``python benchmarks/tuning_cost.py`` tunes a bf16 matrix product of 4096^3 over 78
configurations of one kernel: BM, BN in 64, 128, 256 without 256 x 256; BK in 32, 64, 128; 4 or 8 warps; 3 or 4 stages;
those that fit 232,448 bytes of shared memory. Three processes run in turn:

1. kalign's tuning, with a cold compiler cache: wall time, and by step;
2. ``@triton.autotune`` over the same list and the same kernel, with a cold compiler cache of its own;
3. all 78 once more, interleaved; then the fastest and both choices, back to back and with rests between, since the
   clock of a device at its power limit follows the load: how far each choice lies from the best of each.

``--dry-run`` compiles two of them for sm_90, which needs no device.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SIZE = 4096
SHARED_BYTES = 232448
LIMIT_S = 140.0
STEPS = ("kalign", "autotune", "exhaustive")
ALL_ROUNDS, FRONT_ROUNDS, WARM_UP_ROUNDS = 20, 30, 5
IN_FRONT = 12
REST_SHARE = 3.0


def kernel() -> Any:
    from kalign_core.kernels.matmul import matmul_kernel

    return matmul_kernel


def problem() -> Any:
    """The product as a problem, its weight kept as (N, K)."""
    from kalign_core.records import Argument, Problem

    tensors = {"a": (SIZE, 1), "b": (1, SIZE), "bias": (), "c": (SIZE, 1)}
    args = [Argument(name, "bf16" if strides else "none", strides) for name, strides in tensors.items()]
    for name in ("a", "b", "c"):
        axes = {"a": "mk", "b": "kn", "c": "mn"}[name]
        args += [
            Argument(f"{name}_stride_{axis}", "int", value=stride)
            for axis, stride in zip(axes, tensors[name], strict=True)
        ]
    return Problem("matmul", (("M", SIZE), ("N", SIZE), ("K", SIZE)), tuple(args))


def configurations() -> list[Any]:
    """The list, by declaration."""
    reference = kernel().reference_config(problem())
    tiles = itertools.product((64, 128, 256), (64, 128, 256), (32, 64, 128), (4, 8), (3, 4))
    return [
        reference.replace(BM=bm, BN=bn, BK=bk, num_warps=warps, num_stages=stages)
        for bm, bn, bk, warps, stages in tiles
        if bm + bn < 512 and (bm + bn) * bk * 2 * stages <= SHARED_BYTES
    ]


def arguments(seed: int) -> tuple[Any, ...]:
    """Run-time arguments of the kernel: a, b, no bias, c, sizes, strides."""
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    a, weight = (torch.randn(SIZE, SIZE, generator=generator, device="cuda").to(torch.bfloat16) for _ in range(2))
    b, c = weight.t(), torch.empty_like(a)
    return (a, b, None, c, SIZE, SIZE, SIZE, *a.stride(), *b.stride(), *c.stride())


# --- the steps ----------------------------------------------------------------------------------------------------


def only_listed() -> types.ModuleType:
    """A plugin that proposes the list and vetoes everything else."""
    from kalign_core import hookimpl

    listed = configurations()
    known = frozenset(listed)
    made = types.ModuleType("only_listed")

    @hookimpl(any_platform=True)
    def kalign_candidates() -> list[Any]:
        return listed

    @hookimpl(any_platform=True)
    def kalign_veto(config: Any) -> str | None:
        return None if config in known else "not on the list"

    made.KALIGN_API = 1  # type: ignore[attr-defined]
    made.kalign_candidates, made.kalign_veto = kalign_candidates, kalign_veto  # type: ignore[attr-defined]
    return made


def tune_with_kalign() -> dict[str, Any]:
    """Step 1."""
    import torch

    from kalign_core import hal
    from kalign_core.session import Session

    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    here = Session(plugins=hal.plugins.with_module("only-listed", only_listed()))
    started = time.monotonic()
    report, stored = here.tune(kernel(), problem(), 0)
    wall_s = time.monotonic() - started
    here.close()
    listed = set(configurations())
    return {
        "wall_s": wall_s,
        "seconds": report.seconds,
        "config": str(report.entry.config) if report.entry else None,
        "stored": stored, "reason": report.reason, "tried": str(report.tally), "duplicates": report.duplicates,
        "refused_of_the_list": [f"{config}: {why}" for config, why in report.refused if config in listed],
        "failed": [f"{config}: {why}" for config, why in report.failed],
        "refuted": [f"{config}: {why}" for config, why in report.refuted],
        "cold_us": report.entry.cold_us if report.entry else None,
        "reference_cold_us": report.entry.reference_cold_us if report.entry else None,
    }  # fmt: skip


def tune_with_autotune() -> dict[str, Any]:
    """Step 2."""
    import torch
    import triton

    compiled_s: list[float] = []

    def listen(*, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            compiled_s.append(times.total / 1e6)

    triton.knobs.compilation.listener = listen
    fixed = ("BM", "BN", "BK", "GROUP_M")
    configs = [
        triton.Config({name: c[name] for name in fixed}, num_warps=c["num_warps"], num_stages=c["num_stages"])
        for c in configurations()
    ]
    tuned = triton.autotune(configs, key=["M", "N", "K"])(kernel().fn)
    given = arguments(0)
    torch.cuda.synchronize()

    def grid(meta: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(SIZE, meta["BM"]) * triton.cdiv(SIZE, meta["BN"]),)

    started = time.monotonic()
    tuned[grid](*given, WIDE=False, enable_fp_fusion=False)
    torch.cuda.synchronize()
    wall_s = time.monotonic() - started
    best = tuned.best_config
    reference = kernel().reference_config(problem())
    config = reference.replace(**best.kwargs, num_warps=best.num_warps, num_stages=best.num_stages)
    return {
        "wall_s": wall_s,
        "seconds": {"compile": sum(compiled_s), "timing and the rest": wall_s - sum(compiled_s)},
        "compiled": len(compiled_s),
        "config": str(config),
    }


def measure_all(chosen: list[str]) -> dict[str, Any]:
    """Step 3: all of the list, interleaved; then the fastest of them and ``chosen``, back to back and with rests."""
    import replay_timing
    import torch

    from kalign_core import session
    from kalign_core.errors import CandidateFailed

    platform = session.current().platform
    given = arguments(0)
    calls, failed = {}, {}
    for config in configurations():
        try:
            launch = platform.launcher(kernel(), problem(), config, given)
            launch(*given)
            torch.cuda.synchronize()
            calls[str(config)] = launch
        except CandidateFailed as error:
            failed[str(config)] = error.what
    sets = replay_timing.sets_for(arguments, cold=True)
    every = replay_timing.interleave(replay_timing.replays(calls, sets), ALL_ROUNDS)
    ranked = sorted(every, key=lambda name: statistics.median(every[name]))
    close = dict.fromkeys((*(name for name in chosen if name in calls), *ranked[:IN_FRONT]))
    front = replay_timing.replays({name: calls[name] for name in close}, sets)
    replay_timing.interleave(front, WARM_UP_ROUNDS)
    worked = replay_timing.interleave(front, FRONT_ROUNDS)
    replay_timing.interleave(front, WARM_UP_ROUNDS, REST_SHARE)
    rested = replay_timing.interleave(front, FRONT_ROUNDS, REST_SHARE)
    return {
        "machine": replay_timing.machine(),
        "all": _table(every), "back_to_back": _table(worked), "rested": _table(rested),
        "failed": failed,
    }  # fmt: skip


def _table(readings: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Medians in microseconds, and as a multiple of the least, after what rounds have in common; fastest first."""
    import replay_timing

    found = replay_timing.shares(readings)
    least = min(share for share, _ in found.values())
    ranked = sorted(found, key=lambda name: found[name][0])
    return {
        name: {
            "us": statistics.median(readings[name]),
            "over_best": found[name][0] / least,
            "mad": found[name][1] / found[name][0],
            "rounds": len(readings[name]),
        }
        for name in ranked
    }


def dry_run() -> dict[str, Any]:
    """Compile two of the list in processes, then find them here, for a device that need not be there."""
    from kalign_core.declare import lower
    from kalign_core.hal import triton_compat
    from kalign_core.tuner.compile import CompilePool

    target = ("cuda", 90, 32)
    jobs = [lower(kernel(), problem(), config) for config in configurations()[:2]]
    pool = CompilePool()
    started = time.monotonic()
    results = dict(pool.compile(jobs, target, 120.0))
    compile_s = time.monotonic() - started
    pool.close()
    started = time.monotonic()
    hashes = [triton_compat.compile_lowered(kernel().fn, job, target).hash for job in jobs]
    return {
        "listed": len(configurations()),
        "failures": [results[position].failure for position in range(2)],
        "compile_s": compile_s,
        "found_again_s": time.monotonic() - started,
        "same_hashes": hashes == [results[position].hash for position in range(2)],
    }


# --- running them -------------------------------------------------------------------------------------------------


def run_step(name: str, folder: Path, limit_s: float, *more: str) -> dict[str, Any]:
    """Run one step in a process of its own; what goes wrong with it is its result."""
    compiler_cache = folder / ("kalign" if name == "exhaustive" else name)
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(compiler_cache),
        "KALIGN_CACHE_DIR": str(folder / "decisions"),
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
    }
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(HERE / "tuning_cost.py"), "--step", name, *more]
    started = time.monotonic()
    try:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, text=True, check=False, timeout=max(limit_s, 1.0)
        )
        result = {"error": f"exit {done.returncode}"}
        if done.returncode == 0:
            result = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        result = {"error": f"not done after {limit_s:.0f} s"}
    except (ValueError, IndexError) as error:
        result = {"error": f"its answer could not be read: {error}"}
    return {**result, "process_s": time.monotonic() - started}


def run_steps(folder: Path, ends: float) -> dict[str, dict[str, Any]]:
    """The three steps in turn."""
    steps = {name: run_step(name, folder, ends - time.monotonic()) for name in STEPS[:2]}
    chosen = [word for step in steps.values() if step.get("config") for word in ("--chosen", step["config"])]
    return {**steps, "exhaustive": run_step("exhaustive", folder, ends - time.monotonic(), *chosen)}


def summary(kalign: dict[str, Any], autotune: dict[str, Any], exhaustive: dict[str, Any]) -> dict[str, Any]:
    """The figures asked for; those that a failed step leaves out are missing."""
    found: dict[str, Any] = {}
    if "wall_s" in kalign and "wall_s" in autotune:
        found["autotune_over_kalign"] = autotune["wall_s"] / kalign["wall_s"]
    for way in ("all", "back_to_back", "rested"):
        times = exhaustive.get(way, {})
        for name, step in (("kalign", kalign), ("autotune", autotune)):
            if step.get("config") in times:
                found[f"{name}_over_best_{way}"] = times[step["config"]]["over_best"]
    return found


def rounded(value: Any) -> Any:
    """``value`` with numbers to four digits after the point."""
    if isinstance(value, dict):
        return {name: rounded(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return round(value, 4) if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--chosen", action="append", default=[], help=argparse.SUPPRESS)
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args()
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    if given.step:
        if given.step == "exhaustive":
            print(json.dumps(measure_all(given.chosen)))
        else:
            print(json.dumps({"kalign": tune_with_kalign, "autotune": tune_with_autotune}[given.step]()))
        return
    head = {"benchmark": "tuning_cost", "problem": f"matmul {SIZE}^3 bf16", "configurations": len(configurations())}
    if given.dry_run:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TRITON_CACHE_DIR"] = folder
            print(json.dumps(rounded({**head, "dry_run": dry_run()}), indent=1))
        return
    ends = time.monotonic() + LIMIT_S
    with tempfile.TemporaryDirectory() as folder:
        steps = run_steps(Path(folder), ends)
    print(json.dumps(rounded({**head, **summary(**steps), **steps}), indent=1))


if __name__ == "__main__":
    main()
