"""The operator table on a GPU: every case's reference and tuned launch beside its peers, in one run.

Prints one JSON object. ``python benchmarks/operators.py [--group G] [--only TEXT] [--kinds cold,warm] [--peers A,B]
[--cache DIR] [--untuned] [--seconds N]``. Each case is tuned into a cache folder of its own run, its outputs under mode
``off`` and ``read`` are compared byte for byte, and all calls of a case are timed together: unrolled in graphs,
replayed in random order, medians. ``share`` is the case's bytes (inputs and outputs, each once) over its time and the
bandwidth of a copy measured in the same run; cold rotates argument sets past the last-level cache. What each case was
to reach, what it reached and where a peer is faster stand beside the times and, together, at the end.

A case that would not end within ``--seconds``, by the longest one so far, is not begun; one that runs past them is
ended, and the run prints what it has, as it does when it is terminated. Without a GPU it is a rehearsal, on small
tensors and by the host's clock.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PEERS = ("torch", "torch.compile", "liger")


def cases() -> list[Any]:
    """The cases of every ``cases_*.py`` beside this file, those with something to reach first."""
    modules = sorted(path.stem for path in HERE.glob("cases_*.py"))
    every = [case for module in modules for case in importlib.import_module(module).CASES]
    return sorted(every, key=lambda case: not case.aims)


def measure(case: Any, given: argparse.Namespace, bandwidth: float) -> dict[str, Any]:
    """Tune, compare and time one case."""
    import operator_report
    import replay_timing

    row: dict[str, Any] = {"name": case.name, "group": case.group, "moved_bytes": case.moved}
    calls = {"reference": in_mode("off", case.ours)}
    if not given.untuned:
        row["tuning"] = tune(case)
        row["bits_equal"] = bits_equal(case)
        row["bit_classes"] = operator_report.bit_classes(row["tuning"])
        calls["tuned"] = in_mode("read", case.ours)
    found, row["left_out"] = peers(case, given.peers)
    row["times"] = {}
    for kind in given.kinds:
        timed = replay_timing.compare_us(calls | found, case.make, kind == "cold", given.rounds)
        for times in timed.values():
            times["share"] = round(case.moved / (times["us"] * 1e-6) / bandwidth, 3)
        row["times"][kind] = timed
    return row | operator_report.figures(case, row["times"], list(found))


def tune(case: Any) -> list[dict[str, str]]:
    """Tune what the case runs; the problem, the configuration and how it came about, per kernel."""
    import kalign_core as kalign

    started = time.monotonic()
    op, arguments = case.tuned()
    decided = kalign.tune(op, *arguments)
    print(f"{case.name}: tuned in {time.monotonic() - started:.1f} s", file=sys.stderr)
    return [
        {"kernel": d.kernel, "problem": d.problem, "how": d.how, "tried": d.entry.tried if d.entry else "",
         "config": str(d.entry.config if d.entry else d.reason)}
        for d in decided
    ]  # fmt: skip


def bits_equal(case: Any) -> bool:
    """Whether the reference and what was tuned give the same bytes for the same arguments."""
    from kalign_core.verifier.compare import digest

    arguments = case.make(1)
    digests = {digest(outputs(in_mode(mode, case.ours)(*arguments))) for mode in ("off", "read")}
    return len(digests) == 1


def outputs(result: Any) -> list[Any]:
    """The tensors of a result."""
    return [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None]


def in_mode(mode: str, call: Callable[..., Any]) -> Callable[..., Any]:
    import kalign_core as kalign

    def run(*arguments: Any) -> Any:
        with kalign.using(mode=mode):
            return call(*arguments)

    return run


def peers(case: Any, wanted: list[str]) -> tuple[dict[str, Callable[..., Any]], dict[str, str]]:
    """The case's peers that run here, and why the others do not."""
    import torch

    made: dict[str, Callable[[], Callable[..., Any]]] = dict(case.others)
    if case.torch is not None:
        made["torch"] = lambda: case.torch
    if (case.compiled or case.torch) is not None:
        made["torch.compile"] = lambda: torch.compile(case.compiled or case.torch, dynamic=False)
    found, left_out = {}, {}
    arguments = case.make(0)
    for name, make in made.items():
        if name not in wanted:
            continue
        try:
            call = make()
            call(*arguments)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            found[name] = call
        except Exception as error:
            left_out[name] = f"{type(error).__name__}: {str(error)[:200]}"
    return found, left_out


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--group", default="", help="cases of this group")
    parser.add_argument("--only", default="", help="cases whose name holds one of these texts, separated by commas")
    parser.add_argument("--kinds", default="cold,warm", type=lambda text: text.split(","))
    parser.add_argument("--peers", default=",".join(PEERS), type=lambda text: text.split(","))
    parser.add_argument("--cache", help="folder to tune into; a fresh one by default")
    parser.add_argument("--untuned", action="store_true", help="the reference alone beside the peers")
    parser.add_argument("--rounds", type=int, default=15, help="readings of each call")
    parser.add_argument("--seconds", type=float, default=540, help="the time there is")
    return parser.parse_args()


def main() -> None:
    started = time.monotonic()
    given = options()
    os.environ["KALIGN_CACHE_DIR"] = given.cache or tempfile.mkdtemp()
    end_after(given.seconds)
    import operator_report
    import replay_timing
    import torch

    bandwidth = replay_timing.copy_bandwidth()
    made: dict[str, Any] = {
        "benchmark": "operators", "rehearsal": not torch.cuda.is_available(), "command": " ".join(sys.argv),
        "machine": replay_timing.machine(), "copy_tb_per_s": round(bandwidth / 1e12, 3), "cases": [],
    }  # fmt: skip
    wanted = [
        case for case in cases()
        if given.group in ("", case.group) and any(text in case.name for text in given.only.split(","))
    ]  # fmt: skip
    try:
        run_all(wanted, given, bandwidth, started, made["cases"])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        done = {row["name"] for row in made["cases"]}
        made["cases"] += [{"name": case.name, "not_run": "ended"} for case in wanted if case.name not in done]
        made["seconds"] = round(time.monotonic() - started, 1)
        made["summary"] = operator_report.summary(made["cases"])
        print(json.dumps(made, indent=1))


def end_after(seconds: float) -> None:
    """Leave within a case, asked to or after ``seconds``, by way of printing; asked again where somebody caught it."""

    def leave(*_: Any) -> None:
        raise SystemExit(f"ended after {seconds:.0f} s or from outside")

    for number in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, leave)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1.0), 5.0)


def run_all(
    wanted: list[Any], given: argparse.Namespace, bandwidth: float, started: float, rows: list[dict[str, Any]]
) -> None:
    """``attempt`` each case into ``rows`` while there is time for one more as long as the longest."""
    longest = 0.0
    for case in wanted:
        begun = time.monotonic()
        if begun - started + longest > given.seconds:
            rows.append({"name": case.name, "group": case.group, "not_run": "no time"})
            continue
        rows.append(attempt(case, given, bandwidth))
        rows[-1]["seconds"] = round(time.monotonic() - begun, 1)
        longest = max(longest, time.monotonic() - begun)


def attempt(case: Any, given: argparse.Namespace, bandwidth: float) -> dict[str, Any]:
    """``measure``, with a failure as the case's result, so that one case costs no other; a line of it on stderr."""
    import torch

    try:
        row = measure(case, given, bandwidth)
    except Exception as error:
        row = {"name": case.name, "group": case.group, "error": f"{type(error).__name__}: {str(error)[:500]}"}
    torch.cuda.empty_cache()
    torch.compiler.reset()  # compiled peers of one formula share a limit, past which they would be eager in silence
    print(line(row), file=sys.stderr, flush=True)
    return row


def line(row: dict[str, Any]) -> str:
    """One line of the table: every call's microseconds and share, by kind."""
    if "error" in row:
        return f"{row['name']}: {row['error']}"
    kinds = [
        f"{kind} " + " ".join(f"{name}={t['us']:.1f}({t['share']:.2f})" for name, t in timed.items())
        for kind, timed in row["times"].items()
    ]
    return f"{row['name']}: " + "; ".join(kinds) + f" equal={row.get('bits_equal')}"


if __name__ == "__main__":
    main()
