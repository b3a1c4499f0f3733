"""How far the tuner's choices lie from the best, and whether any is slower than the reference.

Prints one JSON object. ``python benchmarks/regret.py [--only OP] [--limit S] [--out FILE]`` tunes every problem below
from nothing at effort ``normal``, every third one twice, and then measures all candidates that were not refuted with
code of its own: every one interleaved, then those within a tenth of the fastest, the choices and the reference, at the
kind of timing that decides, back to back and, where the clock follows the load, with rests. ``regret`` is how much
longer the choice takes than the fastest of those, at the pace that suits it worse. A problem that cannot be measured is
listed with the reason. ``--out`` keeps what there is after every problem.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# Operator, sizes, dtype, phase.
PROBLEMS = [
    ("matmul", {"M": 4096, "N": 4096, "K": 4096}, "bf16", "train"),
    ("rms_norm", {"T": 4096, "H": 4096}, "bf16", "train"),
    ("swiglu", {"T": 16, "F": 12288}, "bf16", "decode"),
    ("matmul", {"M": 16, "N": 4096, "K": 4096}, "bf16", "decode"),
    ("rms_norm", {"T": 65536, "H": 128}, "bf16", "train"),
    ("swiglu", {"T": 2048, "F": 8192}, "bf16", "train"),
    ("matmul", {"M": 1024, "N": 4096, "K": 4096}, "bf16", "train"),
    ("rms_norm", {"T": 1024, "H": 16384}, "bf16", "prefill"),
    ("swiglu", {"T": 4096, "F": 2048}, "fp32", "train"),
    ("matmul", {"M": 64, "N": 4096, "K": 4096}, "bf16", "decode"),
    ("rms_norm", {"T": 2048, "H": 2048}, "fp32", "train"),
    ("matmul", {"M": 256, "N": 4096, "K": 4096}, "bf16", "prefill"),
    ("rms_norm", {"T": 16, "H": 4096}, "bf16", "decode"),
    ("swiglu", {"T": 512, "F": 11008}, "fp16", "prefill"),
    ("matmul", {"M": 2048, "N": 2048, "K": 2048}, "fp16", "train"),
    ("rms_norm", {"T": 512, "H": 8192}, "fp16", "train"),
    ("swiglu", {"T": 8192, "F": 1024}, "bf16", "train"),
    ("matmul", {"M": 512, "N": 8192, "K": 2048}, "bf16", "train"),
    ("rms_norm", {"T": 8192, "H": 1024}, "bf16", "train"),
    ("matmul", {"M": 128, "N": 14336, "K": 4096}, "bf16", "decode"),
    ("rms_norm", {"T": 32768, "H": 256}, "fp32", "train"),
]
LIMIT_S = 600.0
TWICE_EVERY = 3
ALL_ROUNDS, FRONT_ROUNDS, RESTED_ROUNDS = 4, 25, 15
FRONT_SHARE, MOST_IN_FRONT = 0.10, 16
REST_SHARE = 3.0
PROBES, PROBE_REST_S = 5, 0.03
SAME_CLOCK = 0.02
WITHIN, AT_MOST, TWINS_WITHIN, SLOWER = 0.02, 0.05, 0.02, 0.01


def calls_of(name: str, sizes: dict[str, int], dtype: str, phase: str) -> list[Any]:
    """The kernel calls of an operator at ``sizes``; in decode those of its forward alone."""
    import torch

    import kalign_core as kalign
    from kalign_core import session
    from kalign_core.api import recorded

    op, device = kalign.ops.named(name), torch.device(session.current().platform.device_type)
    with kalign.using(phase=phase):
        calls = recorded(op, *op.inputs(sizes, dtype, 0, device))
    return calls[:1] if phase == "decode" else calls


def problems(only: str) -> list[tuple[Any, ...]]:
    """The problems above, and the default shapes of every other operator known here."""
    import kalign_core as kalign

    listed = {name for name, *_ in PROBLEMS}
    others = [(op.name, dict(op.shapes[-1]), op.dtypes[0], "train") for op in kalign.ops.operators()]
    return [p for p in (*PROBLEMS, *(o for o in others if o[0] not in listed)) if only in ("", p[0])]


def tuned(here: Any, call: Any) -> Any:
    """The report of one tuning from nothing; nothing is stored."""
    import torch

    from kalign_core.errors import NotTunable
    from kalign_core.tuner.loop import EFFORTS, Tuning

    key = here.key(call.kernel, call.problem, call.device)
    parts = (here.plugins, here.platform, here.pool, call.device, call.kernel, call.problem, key)
    with torch.no_grad():
        report = Tuning(*parts, effort=EFFORTS["normal"]).run()
    if report.entry is None:
        raise NotTunable(report.reason)
    return report


def judge(here: Any, call: Any, reports: list[Any]) -> dict[str, Any]:
    """Measure everything not refuted that the reports' tunings could have chosen, and their choices with it."""
    import replay_timing

    from kalign_core.hal import triton_compat
    from kalign_core.tuner.measure import Meter
    from kalign_core.verifier.bench import Bench
    from kalign_core.verifier.inputs import CORE_FAMILIES

    platform, at = here.platform, reports[0].problem
    bench = Bench(platform, call.kernel, at, call.device)
    bench.families.update({family.name: family for family in CORE_FAMILIES})
    meter = Meter(platform, bench)
    sets = meter.sets(meter.cold_sets if meter.decisive == "cold" else meter.warm_sets)
    out = {config for report in reports for config, _ in (*report.failed, *report.refuted)}
    launches, codes = {}, set()
    reference, chosen = reports[0].reference, [report.entry.config for report in reports]
    for config in (reference, *chosen, *here.space(call.kernel, at, call.device).candidates):
        if config not in launches and config not in out:
            launch = platform.launcher(call.kernel, at, config, sets[0])
            code = (triton_compat.code_digest(launch.compiled), call.kernel.grid(at, config))
            if code not in codes or config in chosen:
                launches[config] = launch
            codes.add(code)
    platform.synchronize(call.device)
    # Sets that fit the last-level cache are cold only where it is emptied before each reading, as the tuner does.
    empty = meter.evict if meter.decisive == "cold" else None
    taken = replay_timing.interleave(replay_timing.replays(launches, sets), ALL_ROUNDS, before=empty)
    every = replay_timing.shares(taken)
    ranked = sorted(launches, key=lambda config: every[config][0])
    close = [c for c in ranked if every[c][0] <= (1 + FRONT_SHARE) * every[ranked[0]][0]][:MOST_IN_FRONT]
    front = replay_timing.replays({c: launches[c] for c in dict.fromkeys((reference, *chosen, *close))}, sets)
    replay_timing.interleave(front, 3, before=empty)
    worked = replay_timing.interleave(front, FRONT_ROUNDS, before=empty)
    probed = [_rested(front[reference]) for _ in range(PROBES)]
    paces = {"back to back": worked}
    if statistics.median(worked[reference]) > (1 + SAME_CLOCK) * min(probed):
        replay_timing.interleave(front, 4, REST_SHARE, before=empty)
        paces["rested"] = replay_timing.interleave(front, RESTED_ROUNDS, REST_SHARE, before=empty)
    return {
        "candidates": len(launches),
        "kind": meter.decisive,
        "paces": {pace: _figures(readings, reference, chosen) for pace, readings in paces.items()},
        "among_all": {"best": str(ranked[0]), "regret": every[chosen[0]][0] / every[ranked[0]][0] - 1},
    }


def _rested(replay: Any) -> float:
    time.sleep(PROBE_REST_S)
    return float(replay.us())


def _figures(readings: dict[Any, list[float]], reference: Any, chosen: list[Any]) -> dict[str, Any]:
    """What one pace says of the choices."""
    import replay_timing

    found = replay_timing.shares(readings)
    best = min(found, key=lambda config: found[config][0])
    ours, mad = found[chosen[0]]
    theirs, their_mad = found[reference]
    return {
        "best": str(best),
        "best_us": statistics.median(readings[best]),
        "chosen_us": statistics.median(readings[chosen[0]]),
        "reference_us": statistics.median(readings[reference]),
        "regret": ours / found[best][0] - 1,
        "mad": mad / ours,
        "gain": theirs / ours,
        "slower": ours / theirs - 1 > max(SLOWER, 3 * max(mad, their_mad) / theirs),
        "twins": [found[other][0] / ours for other in chosen[1:]],
    }


def row(here: Any, call: Any, twice: bool) -> dict[str, Any]:
    """One problem's figures."""
    started = time.monotonic()
    reports = [tuned(here, call) for _ in range(2 if twice else 1)]
    tuning_s = time.monotonic() - started
    judged = judge(here, call, reports)
    first, paces = reports[0], judged["paces"].values()
    decided_us = first.entry.cold_us if judged["kind"] == "cold" else first.entry.warm_us
    margin = max(WITHIN, 3 * first.entry.mad_us / decided_us, 2 * first.noise.difference)
    return {
        "reference": str(first.reference), "chosen": str(first.entry.config), "reason": first.reason,
        "again": [str(report.entry.config) for report in reports[1:]], "extra": dict(first.entry.extra),
        "decided_us": decided_us,
        "regret": max(pace["regret"] for pace in paces), "gain": min(pace["gain"] for pace in paces),
        "margin": margin if first.entry.config == first.reference else WITHIN,
        "slower": any(pace["slower"] for pace in paces),
        "twins": max((abs(twin - 1) for pace in paces for twin in pace["twins"]), default=None),
        **judged, "tried": str(first.tally), "duplicates": first.duplicates, "seconds": first.seconds,
        "tuning_s": tuning_s, "judging_s": time.monotonic() - started - tuning_s,
    }  # fmt: skip


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures asked for."""
    done = [row for row in rows if "regret" in row]
    if not done:
        return {"problems": 0, "not_measured": len(rows)}
    twins = [row["twins"] for row in done if row["twins"] is not None]
    return {
        "problems": len(done),
        "not_measured": len(rows) - len(done),
        "regret_within_2_percent": sum(row["regret"] <= row["margin"] for row in done) / len(done),
        "regret_at_most": max(row["regret"] for row in done),
        "regret_median": statistics.median(row["regret"] for row in done),
        "within_5_percent": sum(row["regret"] <= AT_MOST for row in done),
        "tuned_twice": len(twins),
        "twins_within_2_percent": sum(twin <= TWINS_WITHIN for twin in twins),
        "twins_at_most": max(twins, default=None),
        "slower_than_the_reference": [row["label"] for row in done if row["slower"]],
        "not_storable": [f"{row['label']}: {row['reason']}" for row in done if row["reason"]],
        "gain_geometric_mean": statistics.geometric_mean(row["gain"] for row in done),
    }


def compile_all(here: Any, calls: list[Any]) -> float:
    """Compile every candidate of every call side by side, for the tunings to find; gives seconds."""
    from kalign_core.declare import lower

    started = time.monotonic()
    target = here.platform.compile_target(calls[0].device)
    wanted = [(c, config) for c in calls for config in here.space(c.kernel, c.problem, c.device).candidates]
    jobs = list(dict.fromkeys(lower(c.kernel, c.problem, config) for c, config in wanted))
    for _ in here.pool.compile(jobs, target, 60.0):
        pass
    return time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="start no problem after this many seconds")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    started = time.monotonic()
    import replay_timing

    from kalign_core import session
    from kalign_core.errors import KalignError

    here = session.current()
    calls = [call for problem in problems(given.only) for call in calls_of(*problem)]
    compiled_s = compile_all(here, calls)
    result = {"benchmark": "regret", "machine": replay_timing.machine(), "compiled_ahead_s": compiled_s}
    rows: list[dict[str, Any]] = []
    for number, call in enumerate(calls):
        if time.monotonic() - started > given.limit:
            break
        label = f"{call.kernel} {here.key(call.kernel, call.problem, call.device).problem} {call.problem.phase}"
        print(f"[{number + 1}/{len(calls)}] {label}", file=sys.stderr)
        try:
            rows.append({"label": label, **row(here, call, number % TWICE_EVERY == 0)})
        except KalignError as error:
            rows.append({"label": label, "error": str(error)})
        result |= {"summary": {**summary(rows), "left_out": len(calls) - number - 1}, "problems": rows}
        if given.out:
            given.out.write_text(json.dumps(result, indent=1))
    here.close()
    print(json.dumps({**result, "wall_s": time.monotonic() - started}, indent=1))


if __name__ == "__main__":
    main()
