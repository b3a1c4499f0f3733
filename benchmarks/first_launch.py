"""How long a fresh process takes to its first launch: tuned, with the file there, beside the mode ``off``.

Prints one JSON object. ``python benchmarks/first_launch.py [--repeats N]`` tunes one problem, then starts processes in
turn in modes ``off`` and ``tune``; tuning has left the compiler's cache warm for both. Each says how long its first
call took until the device was done, how long after the process began that was, and how many kernels the call launched:
one, where no candidate is.
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
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OPERATOR, SIZES, DTYPE = "rms_norm", {"T": 4096, "H": 4096}, "bf16"
MODES = ("off", "tune")


def first_call(mode: str, began: float) -> dict[str, Any]:
    """One process: its first call in ``mode``; ``began`` is the wall clock's time when it was started."""
    import torch
    from main_job import launches

    import kalign_core as kalign

    op = kalign.ops.named(OPERATOR)
    given = tuple(tensor.detach() for tensor in op.inputs(SIZES, DTYPE, 0, torch.device("cuda")))
    torch.cuda.synchronize()

    def call() -> None:
        op(*given)
        torch.cuda.synchronize()

    with kalign.using(mode=mode):
        started = time.perf_counter()
        launched = launches(call)
        first_s = time.perf_counter() - started
        config = str(kalign.explain(op, *given)[0].config)
    return {"first_call_s": first_s, "process_s": time.time() - began, "launches": len(launched), "config": config}


def process(*arguments: str) -> dict[str, Any]:
    """Run this file once more with ``arguments``; gives what it printed."""
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def tune() -> dict[str, Any]:
    """Tune the operator's forward kernel so that a decision is on disk."""
    from regret import calls_of

    from kalign_core import session

    here = session.current()
    call = calls_of(OPERATOR, SIZES, DTYPE, "train")[0]
    report, stored = here.tune(call.kernel, call.problem, call.device)
    written = here.close()
    return {"config": str(report.entry.config) if report.entry else None, "stored": stored and written}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--step", choices=("tune", *MODES), help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, default=0.0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    if given.step:
        print(json.dumps(tune() if given.step == "tune" else first_call(given.step, given.began)))
        return
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"KALIGN_CACHE_DIR": f"{folder}/decisions", "TRITON_CACHE_DIR": f"{folder}/compiled"}
        result: dict[str, Any] = {
            "benchmark": "first_launch",
            "operator": OPERATOR,
            "sizes": SIZES,
            "tuned": process("--step", "tune"),
        }
        taken: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
        for _ in range(given.repeats):
            for mode in MODES:
                taken[mode].append(process("--step", mode, "--began", str(time.time())))
    result["processes"] = taken
    for figure in ("first_call_s", "process_s"):
        medians = {mode: statistics.median(row[figure] for row in taken[mode]) for mode in MODES}
        result[figure] = {**medians, "tuned_minus_off": medians["tune"] - medians["off"]}
    result["launches"] = {mode: sorted({row["launches"] for row in taken[mode]}) for mode in MODES}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
