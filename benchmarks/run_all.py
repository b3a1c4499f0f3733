"""Every benchmark of a GPU one after the other, each in a process of its own, within a time that is given.

Prints one JSON object. ``python benchmarks/run_all.py FOLDER [--only NAME,..] [--seconds N] [--list]`` writes what each
prints to ``FOLDER/NAME.json`` and what it says on the way to ``FOLDER/NAME.txt``. One that would not end in the time
left, by what it took on an H200 or is expected to, is left out and named; one that runs over its threefold is ended.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent


class Benchmark(NamedTuple):
    """``expected_s`` is what a run took, or for those that have not run there yet what it should take."""

    name: str
    command: str
    expected_s: int


BENCHMARKS = (
    Benchmark("dispatch", "dispatch.py", 25),
    Benchmark("decode-step", "decode_step.py", 90),
    Benchmark("gate-costs", "gate_costs.py", 70),
    Benchmark("bad-kernels", "bad_kernels.py", 55),
    Benchmark("first-launch", "first_launch.py", 40),
    Benchmark("shared-device", "shared_device.py", 60),
    Benchmark("hostile-candidates", "hostile_candidates.py --deadline 4", 90),
    Benchmark("launch-sweep", "launch_sweep.py", 60),
    Benchmark("operators-rowwise", "operators.py --group rowwise --seconds 540", 200),
    Benchmark("operators-pointwise", "operators.py --group pointwise --seconds 540", 200),
    Benchmark("tuning-cost", "tuning_cost.py", 100),
    Benchmark("regret", "regret.py --limit 150", 150),
    Benchmark("bit-classes", "bit_classes.py --seconds 330", 340),
    Benchmark("main-job", "main_job.py", 110),
)


def run(benchmark: Benchmark, folder: Path) -> dict[str, Any]:
    """Run one; gives its state and seconds."""
    started = time.monotonic()
    command = [sys.executable, str(HERE / benchmark.command.split()[0]), *benchmark.command.split()[1:]]
    environment = {**os.environ, "KALIGN_CACHE_DIR": str(folder / f"{benchmark.name}-cache")}
    state = "done"
    with (folder / f"{benchmark.name}.json").open("w") as out, (folder / f"{benchmark.name}.txt").open("w") as said:
        try:
            code = subprocess.run(command, stdout=out, stderr=said, env=environment, check=False,
                                  timeout=3 * benchmark.expected_s).returncode  # fmt: skip
            state = "done" if code == 0 else f"exit {code}"
        except subprocess.TimeoutExpired:
            state = f"ended after {3 * benchmark.expected_s} s"
    return {"state": state, "seconds": round(time.monotonic() - started, 1), "expected_s": benchmark.expected_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="the time there is")
    parser.add_argument("--list", action="store_true", help="say what there is and what it takes")
    options = parser.parse_args()
    names = [name for name in options.only.split(",") if name]
    unknown = set(names) - {benchmark.name for benchmark in BENCHMARKS}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(b.name for b in BENCHMARKS)}")
    chosen = [benchmark for benchmark in BENCHMARKS if not names or benchmark.name in names]
    rows: dict[str, Any] = {benchmark.name: {"expected_s": benchmark.expected_s} for benchmark in chosen}
    end = time.monotonic() + options.seconds
    if not options.list:
        options.folder.mkdir(parents=True, exist_ok=True)
        for benchmark in chosen:
            if time.monotonic() + benchmark.expected_s > end:
                rows[benchmark.name]["state"] = "left out: no time"
                continue
            rows[benchmark.name] = run(benchmark, options.folder)
            print(f"{benchmark.name}: {rows[benchmark.name]}", file=sys.stderr, flush=True)
    print(json.dumps({"benchmark": "run_all", "command": " ".join(sys.argv), "runs": rows}, indent=1))


if __name__ == "__main__":
    main()
