"""How long a fresh process takes to its first launch with a stored winner, beside the same with tuning off.

Prints one JSON object. ``python benchmarks/first_launch.py [--repeats N]`` starts one process that tunes a problem,
which leaves its decision on disk and the compiler's cache warm for winner and reference, then processes in turn in
modes ``off`` and ``read``. Each says how long its first call took until the device was done, where that time went, and
how long after the process began it was done. Those in mode ``read`` then call once more in mode ``tune``, where a call
that finds its decision begins no tuning and launches one kernel, and no candidate.

A process that fails or takes too long costs its own row, which has its last words; the exit code is 1 then. Where
kernels are interpreted it is a rehearsal of a small problem, whose launches no hook sees.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# One whose winner is not its reference, by far: both are loaded from the compiler's cache, and they are not one file.
OPERATOR, DTYPE = "swiglu", "bf16"
SIZES, SMALL = {"T": 8192, "F": 1024}, {"T": 4, "F": 64}
MODES = ("off", "read")
FIGURES = ("first_call_s", "process_s")
LIMIT_S = 60.0
LAST_LINES = 8


# --- in the processes that are started ----------------------------------------------------------------------------


def problem() -> tuple[dict[str, int], str]:
    """Its sizes, small ones where kernels are interpreted, and what torch calls the device it is on."""
    from kalign_core import hal

    device_type = str(hal.platform.device_type)
    return (SMALL if device_type == "cpu" else SIZES), device_type


def decide() -> dict[str, Any]:
    """Tune the operator's forward kernel, and see to it that the decision is on disk."""
    import replay_timing
    from regret import calls_of

    from kalign_core import session
    from kalign_core.tuner.report import effort_named

    here = session.current()
    here.observer.effort = effort_named("quick")
    call = calls_of(OPERATOR, problem()[0], DTYPE, "train")[0]
    started = time.monotonic()
    report, stored = here.tune(call.kernel, call.problem, call.device)
    tuned_s = time.monotonic() - started
    return {
        "machine": replay_timing.machine(), "sizes": problem()[0],
        "config": str(report.entry.config) if report.entry else "",
        "is_reference": bool(report.entry) and report.entry.config == report.reference,
        "on_disk": here.close() and stored, "reason": report.reason, "tuned_s": tuned_s,
    }  # fmt: skip


def first_call(mode: str, began: float) -> dict[str, Any]:
    """The first call of this process, in ``mode``; ``began`` is the wall clock's time when it was started."""
    import torch
    from main_job import launches

    import kalign_core as kalign
    from kalign_core import session

    op, here, (sizes, device_type) = kalign.ops.named(OPERATOR), session.current(), problem()
    wait = torch.cuda.synchronize if device_type == "cuda" else lambda: None
    given = tuple(t.detach() for t in op.inputs(sizes, DTYPE, 0, torch.device(device_type)))
    wait()

    def call() -> None:
        op(*given)
        wait()

    with kalign.using(mode=mode):
        spent = watched(here)
        started = time.perf_counter()
        call()
        found: dict[str, Any] = {"first_call_s": time.perf_counter() - started, "process_s": time.time() - began}
        found["spent_ms"] = dict(spent)
        found["config"] = str(kalign.explain(op, *given)[0].config)
    if mode == "read":
        here.observer = told = Told()
        with kalign.using(mode="tune"):
            found |= {"launched": len(launches(call)), "tunings": told.tunings, "hits": told.hits}
    return found


def watched(here: Any) -> dict[str, float]:
    """Milliseconds that each part of resolving a call takes from here on, parts within parts counted in both."""
    spent: dict[str, float] = {}
    for owner, names in (
        (here, ("facts", "key", "lookup", "space", "_open_store")),
        (here.platform, ("identity", "toolchain", "model", "launcher")),
    ):
        for name in names:
            setattr(owner, name, timed(getattr(owner, name), name.strip("_"), spent))
    return spent


def timed(function: Callable[..., Any], name: str, spent: dict[str, float]) -> Callable[..., Any]:
    """``function``, whose milliseconds are added to ``spent[name]``."""

    def call(*args: Any, **named: Any) -> Any:
        started = time.perf_counter()
        try:
            return function(*args, **named)
        finally:
            spent[name] = spent.get(name, 0.0) + (time.perf_counter() - started) * 1e3

    return call


class Told:
    """A session's observer that counts what it is told."""

    effort, retune, watched = None, False, None

    def __init__(self) -> None:
        self.tunings = self.hits = 0

    def started(self, *about: Any) -> Callable[..., None]:
        self.tunings += 1
        return lambda *how_far: None

    def hit(self, *about: Any) -> None:
        self.hits += 1

    def finished(self, *about: Any) -> None:
        """Counted when it began."""

    gave_up = finished


# --- starting them ------------------------------------------------------------------------------------------------


def process(*arguments: str) -> dict[str, Any]:
    """Run this file once more with ``arguments``; gives the row it printed, or what it said at its end."""
    command = [sys.executable, __file__, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired as fault:
        said = fault.stderr.decode(errors="replace") if isinstance(fault.stderr, bytes) else fault.stderr or ""
        return failed(f"ended after {LIMIT_S:g} s", said)
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (ValueError, IndexError, TypeError):
        return failed(f"exit {done.returncode}, no row printed", done.stdout + done.stderr)


def failed(error: str, said: str) -> dict[str, Any]:
    """The row of a process that gave none; what it said goes on to standard error too."""
    last = said.splitlines()[-LAST_LINES:]
    print("\n".join([error, *last]), file=sys.stderr, flush=True)
    return {"error": error, "said_last": last}


def rows(repeats: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """One row after the other with the step that it is of: the decision, then the modes in turn."""
    yield "decide", process("--step", "decide")
    for _ in range(repeats):
        for mode in MODES:
            yield mode, process("--step", mode, "--began", str(time.time()))


def compiled_files(folder: Path) -> int:
    """How many files the compiler's cache holds."""
    return sum(path.is_file() for path in folder.rglob("*"))


def summary(taken: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Medians over the processes that gave a figure, and what every one in mode ``read`` has to show."""
    found: dict[str, Any] = {}
    for figure in FIGURES:
        medians = {mode: median(row[figure] for row in taken[mode] if figure in row) for mode in MODES}
        off, read = (medians[mode] for mode in MODES)
        found[figure] = {**medians, "read_minus_off": None if off is None or read is None else read - off}
    parts = sorted({name for mode in MODES for row in taken[mode] for name in row.get("spent_ms", ())})
    found["spent_ms"] = {
        mode: {name: median(r["spent_ms"].get(name, 0.0) for r in taken[mode] if "spent_ms" in r) for name in parts}
        for mode in MODES
    }
    for count in ("launched", "tunings", "hits"):
        found[count] = sorted({row[count] for row in taken["read"] if count in row})
    return found


def median(values: Any) -> float | None:
    """The median, None where there is no value."""
    known: Sequence[float] = list(values)
    return statistics.median(known) if known else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--step", choices=("decide", *MODES), help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, default=0.0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    if given.step:
        print(json.dumps(decide() if given.step == "decide" else first_call(given.step, given.began)))
        return
    taken: dict[str, list[dict[str, Any]]] = {step: [] for step in ("decide", *MODES)}
    result: dict[str, Any] = {"benchmark": "first_launch", "operator": OPERATOR, "processes": taken}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ |= {"KALIGN_CACHE_DIR": str(folder / "decisions"), "TRITON_CACHE_DIR": str(folder / "compiled")}
        counts = []
        for step, row in rows(given.repeats):
            taken[step].append(row)
            counts.append(compiled_files(folder / "compiled"))
    result |= {**summary(taken), "compiled_after_deciding": counts[-1] - counts[0]}
    print(json.dumps(result, indent=1))
    sys.exit(int(any("error" in row for of_step in taken.values() for row in of_step)))


if __name__ == "__main__":
    main()
