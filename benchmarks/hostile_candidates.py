"""What candidates cost that crash, hang, fault the device or exhaust memory: one candidate each, and some seconds.

Prints one JSON object, and a short table on standard error. ``python benchmarks/hostile_candidates.py`` runs
``kalign tune`` on the operator of ``hostile_operator.py`` in an empty cache folder three times: tuning, tuning another
size, and both at once, which have to be hits. Of the first run it gives each hostile candidate's fate, the processes
it took and the wall time; of the second that no process was lost again to what the first one learned.

``--deadline S`` is what one launch may take, ``--seconds N`` all of it; a command that is not done by then is ended.
``--small`` asks for sizes that an interpreter can do.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OPERATOR = "benchmarks.hostile_operator:hostile"
DEEDS = {4: "stores out of bounds", 5: "never ends", 6: "exhausts memory", 7: "aborts its compiler"}


def tuned(folder: Path, shapes: Sequence[str], deadline_s: float, end: float) -> dict[str, Any]:
    """One run of the command, ended at ``end`` by the monotonic clock: its rows, what it said of lost workers, and its
    wall time."""
    path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "PYTHONPATH": path, "KALIGN_CACHE_DIR": str(folder / "decisions"),
                   "TRITON_CACHE_DIR": str(folder / "triton")}  # fmt: skip
    command = [sys.executable, "-m", "kalign_core", "tune", OPERATOR, "--effort", "quick",
               "--launch-deadline", f"{deadline_s:g}", "--json"]  # fmt: skip
    command += [word for shape in shapes for word in ("--shape", shape)]
    started = time.monotonic()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    limit = threading.Timer(end - started, process.kill)  # its workers end with it
    limit.start()
    said = []
    try:
        for line in process.stderr or ():  # told as it happens: what is known by then survives a limit from outside
            said.append(line.strip())
            print(f"{time.monotonic() - started:6.1f} s  {said[-1]}", file=sys.stderr, flush=True)
        out, _ = process.communicate()
    finally:
        limit.cancel()
        process.kill()
    if process.returncode:
        raise SystemExit(f"kalign tune ended with {process.returncode}")
    return {"rows": json.loads(out)["problems"], "wall_s": round(time.monotonic() - started, 2),
            "workers_lost": [line for line in said if line.startswith("the worker is started anew")]}  # fmt: skip


def machine() -> dict[str, str]:
    """Where this was run."""
    import platform

    versions = {name: metadata.version(name) for name in ("torch", "triton")}
    return {**versions, "python": platform.python_version(), "cpu": f"{os.cpu_count()} x {platform.machine()}",
            "platform": os.environ.get("KALIGN_PLATFORM", "chosen")}  # fmt: skip


def fates(row: dict[str, Any]) -> dict[str, str]:
    """What became of each hostile candidate, by what it does."""
    found = {}
    for way, deed in DEEDS.items():
        said = [text for text in (*row["failures"], *row["refutations"]) if f"WAY={way} " in text]
        found[deed] = said[0].partition(": ")[2] if said else "it took part"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--deadline", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    shapes = ("T=2,H=256", "T=5,H=256") if options.small else ("T=4096,H=4096", "T=1024,H=4096")
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as name:
        runs = [tuned(Path(name), asked, options.deadline, end) for asked in (shapes[:1], shapes[1:], shapes)]
        remembered = [p.read_text() for p in (Path(name) / "decisions").glob("*.failures.toml")]
    first, other = ({"row": run.pop("rows")[0], **run} for run in runs[:2])
    result = {
        "machine": machine(),
        "benchmark": "hostile_candidates", "command": " ".join(["python", *sys.argv]), "deadline_s": options.deadline,
        "fates": fates(first["row"]), "fates_at_another_size": fates(other["row"]),
        "first": first, "other_size": other,
        "again": [row["how"] for row in runs[2]["rows"]], "again_wall_s": runs[2]["wall_s"],
        "remembered": remembered,
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    for deed, fate in result["fates"].items():
        print(f"{deed:22} {fate}", file=sys.stderr)
    for label, run in (("first size", first), ("another size", other)):
        row = run["row"]
        print(f"{label:22} {row['how']}, {row.get('config')}, gain {row.get('gain')}x, host {row.get('host_us')} us; "
              f"{len(run['workers_lost'])} workers lost, {run['wall_s']} s", file=sys.stderr)  # fmt: skip
    print(f"{'again':22} {', '.join(result['again'])}", file=sys.stderr)


if __name__ == "__main__":
    main()
