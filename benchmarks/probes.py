"""What finding out about a machine costs: the probes, the imports, the scan of entry points, each by itself.

Prints one JSON object. ``python benchmarks/probes.py`` starts fresh Python processes, in turn, because imports are paid
once in each; every figure is a median over them in milliseconds. ``probes_ms`` is all probes together after everything
is imported and the environment is read; ``environment_ms`` reading variables and torch's version file. A process also
says which device libraries it had loaded in the end, which device files it had open, and whether CUDA had a context:
all three are to be empty.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
AIM_MS = 5.0
CHILD = """
import json, os, sys, time
start = time.perf_counter()

def since():
    global start
    now = time.perf_counter()
    taken, start = (now - start) * 1000, now
    return round(taken, 4)

took = {}
import kalign_core
took["import_core_ms"] = since()
from importlib.metadata import entry_points
took["import_metadata_ms"] = since()
entry_points(group="kalign.plugins")
took["entry_point_scan_ms"] = since()
import kalign_core.hal as hal
took["import_hal_and_select_ms"] = since()
from kalign_core.environment import Environment
environment = Environment.current()
took["environment_ms"] = since()
each = {}
for record in hal.plugins.platforms():
    since()
    record.probe(environment)
    each[record.name] = since()
took["probes_ms"] = round(sum(each.values()), 4)
from kalign_core.hal.select import select
since()
select(environment, hal.plugins, None)
took["select_ms"] = since()
maps = open("/proc/self/maps").read() if os.path.exists("/proc/self/maps") else ""
drivers = ("libcuda", "libnvidia-ml", "libcudart", "libamdhip64", "libamd_smi", "libhsa-runtime")
libraries = sorted({name for name in drivers if name in maps})
links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
handles = [os.readlink(link) for link in links if os.path.exists(link)]
devices = sorted({h for h in handles if h.startswith(("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/dxg"))})
torch = sys.modules.get("torch")
print(json.dumps({"took": took, "each": each, "chosen": hal.selection.chosen, "libraries": libraries,
                  "devices": devices, "context": bool(torch and torch.cuda.is_initialized()),
                  "imported": sorted({"torch", "triton", "numpy", "pynvml", "amdsmi"} & set(sys.modules))}))
"""


def once() -> dict[str, Any]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True, env=environment)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=15)
    options = parser.parse_args()
    once()  # the first one fills the file system's cache and writes byte code
    runs = [once() for _ in range(options.processes)]

    def medians(part: str) -> dict[str, float]:
        return {name: round(statistics.median(run[part][name] for run in runs), 3) for name in runs[0][part]}

    took = medians("took")
    result = {
        "benchmark": "probes", "processes": len(runs),
        "machine": {"system": f"{platform.system()} {platform.machine()}", "cpus": os.cpu_count()},
        "python": platform.python_version(), "chosen": sorted({str(run["chosen"]) for run in runs}),
        "aim": {"probes_ms": AIM_MS}, "aim_met": took["probes_ms"] <= AIM_MS, **took, "each_probe_ms": medians("each"),
        "probes_slowest_ms": max(run["took"]["probes_ms"] for run in runs),
        **{name: sorted({word for run in runs for word in run[name]}) for name in ("libraries", "devices", "imported")},
        "context": any(run["context"] for run in runs),
    }  # fmt: skip
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
