"""Whether a decision is stored while another process keeps the device busy: it must not be.

Prints one JSON object. ``python benchmarks/shared_device.py [--out FILE]`` tunes the problems below on a device of its
own, then beside a process that multiplies matrices without end, then beside it once more without what the driver says
of other processes, as in a container that hides them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROBLEMS = [("rms_norm", {"T": 2048, "H": 4096})]
BUSY = """
import torch
a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
b = a @ a
torch.cuda.synchronize()
print("busy", flush=True)
while True:
    for _ in range(20):
        b = a @ a
    torch.cuda.synchronize()
"""


@contextlib.contextmanager
def company() -> Iterator[None]:
    """A process that keeps the device busy inside the block."""
    busy = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True)
    try:
        if busy.stdout is None or busy.stdout.readline().strip() != "busy":
            raise RuntimeError(f"the busy process ended with {busy.wait()}")
        yield
    finally:
        busy.kill()
        busy.wait()


def blind(platform: Any) -> Any:
    """``platform`` without what the driver says of the device's condition."""
    from kalign_core.records import Condition

    class Blind(type(platform)):  # type: ignore[misc]  # whichever platform is in use
        def condition(self, device: int) -> Condition:
            return Condition()

    return Blind()


def tune(platform: Any) -> list[dict[str, Any]]:
    """Tune every problem from nothing on ``platform``; says whether it was stored and why not."""
    from regret import calls_of

    from kalign_core import hal
    from kalign_core.cache.base import MemoryStore
    from kalign_core.session import Session

    rows = []
    here = Session(platform=platform, plugins=hal.plugins, store=MemoryStore())
    for name, sizes in PROBLEMS:
        call = calls_of(name, sizes, "bf16", "train")[0]
        started = time.monotonic()
        report, stored = here.tune(call.kernel, call.problem, call.device)
        platform.synchronize(call.device)
        rows.append({
            "kernel": call.kernel.name, "stored": stored, "storable": report.storable, "reason": report.reason,
            "noise": [report.noise.difference, report.noise.spread] if report.noise else None,
            "wall_s": time.monotonic() - started,
        })  # fmt: skip
    here.close()
    return rows


def waits() -> float:
    """How much longer than it runs a replay takes the host, as a share: the mean of a hundred."""
    import replay_timing
    import torch

    x = torch.randn(4096, 4096, device="cuda")
    [ready] = replay_timing.replays({"add": lambda out: torch.add(x, x, out=out)}, [(torch.empty_like(x),)]).values()
    shares = []
    for _ in range(100):
        started = time.perf_counter()
        us = ready.us() * ready.launches
        shares.append((time.perf_counter() - started) * 1e6 / us - 1)
    return statistics.fmean(shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="keep what there is here after every step")
    given = parser.parse_args()
    sys.path[:0] = [str(HERE), str(HERE.parent)]
    import replay_timing

    from kalign_core import session

    platform = session.current().platform
    result: dict[str, Any] = {"benchmark": "shared_device", "machine": replay_timing.machine()}

    def add(**found: Any) -> None:
        result.update(found)
        if given.out:
            given.out.write_text(json.dumps(result, indent=1))

    add(alone_waits=waits(), alone=tune(platform))
    with company():
        add(condition=str(platform.condition(0)), beside_waits=waits())
        add(beside=tune(platform))
        add(beside_blind=tune(blind(platform)))
    for name in ("beside", "beside_blind"):
        add(**{f"stored_{name}": sum(row["stored"] or row["storable"] for row in result[name])})
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
