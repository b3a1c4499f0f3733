"""Every benchmark of a GPU one after the other, each in a process of its own, within a time that is given.

Prints one JSON object. ``python benchmarks/run_all.py FOLDER [--only NAME,..] [--seconds N] [--list]`` writes two
files: ``FOLDER/results.json``, the same object, anew after every benchmark, and ``FOLDER/said.txt``, what they all said
on the way. ``runs`` has for each its state, its seconds and what it ``printed``, as far as that is JSON; of one that
printed none, what it had kept by then, and the last lines of what it said. One that would not end in the time left, by
what it took on an H200 or is expected to, is left out and named; one that runs over its threefold, or over the time
there is, is ended with all that it started.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
LAST_LINES = 12
DYING_S = 30.0


class Benchmark(NamedTuple):
    """``expected_s`` is what a run took, or for those that have not run there yet what it should take.

    One that ``keeps`` takes ``--out FILE`` and has there what it has found so far.
    """

    name: str
    command: str
    expected_s: int
    keeps: bool = False


BENCHMARKS = (
    Benchmark("dispatch", "dispatch.py", 20),
    Benchmark("decode-step", "decode_step.py", 65),
    Benchmark("gate-costs", "gate_costs.py", 35),
    Benchmark("bad-kernels", "bad_kernels.py", 50),
    Benchmark("first-launch", "first_launch.py", 40),
    Benchmark("shared-device", "shared_device.py", 30, keeps=True),
    Benchmark("hostile-candidates", "hostile_candidates.py --deadline 4", 60),
    Benchmark("launch-sweep", "launch_sweep.py", 60),
    Benchmark("operators-rowwise", "operators.py --group rowwise --seconds 540", 200),
    Benchmark("operators-pointwise", "operators.py --group pointwise --seconds 540", 200),
    Benchmark("tuning-cost", "tuning_cost.py", 100),
    Benchmark("regret", "regret.py --limit 150", 150, keeps=True),
    Benchmark("bit-classes", "bit_classes.py --seconds 400", 420, keeps=True),
    Benchmark("main-job", "main_job.py", 110),
)


def run(benchmark: Benchmark, scratch: Path, said: Path, limit_s: float) -> dict[str, Any]:
    """Run one for ``limit_s`` seconds at most, its files in ``scratch``; gives its row."""
    started = time.monotonic()
    printed, kept = scratch / f"{benchmark.name}.out", scratch / f"{benchmark.name}.kept"
    command = [sys.executable, str(HERE / benchmark.command.split()[0]), *benchmark.command.split()[1:]]
    command += ["--out", str(kept)] if benchmark.keeps else []
    environment = {**os.environ, "KALIGN_CACHE_DIR": str(scratch / f"{benchmark.name}-cache")}
    with printed.open("w") as out, said.open("a+") as words:
        words.write(f"--- {benchmark.name}\n")
        words.flush()
        before = words.tell()
        state = _ended(command, environment, out, words, limit_s)
        words.seek(before)
        last = words.read().splitlines()[-LAST_LINES:]
    found = _parsed(printed)
    row = {"state": state, "seconds": round(time.monotonic() - started, 1), "expected_s": benchmark.expected_s,
           "printed": _parsed(kept) if found is None else found}  # fmt: skip
    return row if state == "done" and found is not None else {**row, "said_last": last}


def _ended(command: list[str], environment: dict[str, str], out: Any, words: Any, limit_s: float) -> str:
    """Run ``command`` to its end or its limit; gives how it ended. Nothing that it started is left."""
    try:
        process = subprocess.Popen(command, stdout=out, stderr=words, env=environment, start_new_session=True)
    except OSError as error:
        return f"did not start: {error}"
    try:
        code = process.wait(limit_s)
        return "done" if code == 0 else f"exit {code}"
    except subprocess.TimeoutExpired:
        return f"ended after {limit_s:.0f} s"
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # nobody of its group is left
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold a killed process back
            process.wait(DYING_S)


def _parsed(path: Path) -> Any:
    """The JSON in ``path``, or None where there is none."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def run_those(chosen: list[Benchmark], folder: Path, seconds: float, result: dict[str, Any]) -> None:
    """Run ``chosen`` within ``seconds``, keeping ``result`` with their rows in ``folder`` from the first on."""
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        for benchmark in chosen:
            left_s = end - time.monotonic()
            if benchmark.expected_s > left_s:
                row: dict[str, Any] = {"state": "left out: no time", "expected_s": benchmark.expected_s}
            else:
                limit_s = min(3.0 * benchmark.expected_s, left_s)
                row = run(benchmark, Path(scratch), folder / "said.txt", limit_s)
                print(f"{benchmark.name}: {row['state']}, {row['seconds']} s", file=sys.stderr, flush=True)
            result["runs"][benchmark.name] = row
            whole = folder / "results.json.new"
            whole.write_text(json.dumps(result, indent=1))
            whole.replace(folder / "results.json")


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
    rows: dict[str, Any] = {b.name: {"state": "not run", "expected_s": b.expected_s} for b in chosen}
    result = {"benchmark": "run_all", "command": " ".join(["python", *sys.argv]), "runs": rows}
    if not options.list:
        run_those(chosen, options.folder, options.seconds, result)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
