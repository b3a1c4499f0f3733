"""The first run on a device that nobody has tried: who it is, whether the promise holds, what tuning gives; one file.

``python benchmarks/first_run.py`` runs every step in a process of its own, so that one that crashes costs its step
alone, and writes ``first-run-<device>.json``: what each step printed, and what was expected against what was found.
docs/mi300x.md says what each outcome means. Nothing is kept in your own cache, and names that identify your machine
are replaced by digests. The exit code is 1 if an expectation was not met.

``python benchmarks/first_run.py swiglu --small`` is a rehearsal of a minute or two on any platform, the CPU's as well.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KALIGN = (sys.executable, "-m", "kalign_core")
PROTOCOL = "first_run/1"
LAST_LINES = 15
ANSWERS = {True: "yes", False: "NO", None: "not asked here"}
Found = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """One command that prints JSON, and what is expected of it: a sentence and a test for each expectation.

    A test gives None where the platform at hand cannot be asked.
    """

    name: str
    command: tuple[str, ...]
    expected: dict[str, Callable[[Found], bool | None]]


def steps(operators: list[str], shapes: Path | None, control: str, budget_s: float) -> list[Step]:
    """What is run, in order; each step may rest on what those before it left in the cache."""
    chosen = ("--shapes", str(shapes)) if shapes else tuple(operators)
    verify = (*KALIGN, "verify", *chosen, "--strict", "--json")
    tune = (*KALIGN, "tune", *chosen, "--budget", f"{budget_s:g}", "--json")
    bad = (sys.executable, "benchmarks/bad_kernels.py", *(("--only", control) if control else ()))
    here = (sys.executable, "benchmarks/first_run.py", "--step")
    return [
        Step("doctor", (*KALIGN, "doctor", "--json"), {
            "a platform is chosen": lambda found: bool(found["platform"]),
            "the device is known, so that decisions can be stored": lambda found: found["devices"][0]["storable"],
        }),
        Step("device", (*here, "device"), {
            "registers of loaded kernels are those that were read from the code without a device":
                lambda found: None if found["platform"] == "cpu"
                else bool(found["kernels"]) and all(row["loaded"] == row["predicted"] for row in found["kernels"]),
        }),
        Step("references", verify, {"no reference is refuted by the strict suite": lambda found: not found["refuted"]}),
        Step("control", bad, {
            "the strict suite refutes every bad kernel":
                lambda found: bool(found["kernels"]) and not found["counts"]["strict"]["missed"],
        }),
        Step("tune", tune, {
            "something was tuned": lambda found: bool(found["problems"]),
            "no candidate is refuted": lambda found: not sum(row.get("refuted", 0) for row in found["problems"]),
            "no candidate fails to compile or launch":
                lambda found: not sum(row.get("failed", 0) for row in found["problems"]),
        }),
        Step("again", tune, {
            "a second run times nothing": lambda found: {row["how"] for row in found["problems"]} <= {"hit"},
        }),
        Step("winners", verify, {"no winner is refuted by the strict suite": lambda found: not found["refuted"]}),
    ]  # fmt: skip


# --- running ------------------------------------------------------------------------------------------------------


def run(step: Step, environment: dict[str, str], limit_s: float) -> Found:
    """What came of ``step``: its JSON and its expectations, or how it ended. A step that gives none meets none."""
    say(f"--- {step.name}: {' '.join(step.command[1:])}")
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        try:
            done = subprocess.run(
                step.command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT, env=environment,
                timeout=limit_s, check=False,
            )  # fmt: skip
            code, printed = done.returncode, done.stdout
        except subprocess.TimeoutExpired:
            code, printed = -1, ""
        errors.seek(0)
        told = errors.read().splitlines()[-LAST_LINES:]
    made = {"command": " ".join(step.command[1:]), "seconds": round(time.monotonic() - started, 1), "exit_code": code}
    try:
        found = json.loads(printed)
    except ValueError:
        found = None
    expected = {sentence: _holds(test, found) for sentence, test in step.expected.items()}
    for sentence, holds in expected.items():
        say(f"    {ANSWERS[holds]}: {sentence}")
    return {**made, "expected": expected, "last_lines": told, "found": found}


def _holds(test: Callable[[Found], bool | None], found: Any) -> bool | None:
    """Whether an expectation is met; what cannot be told from an incomplete answer is not."""
    try:
        return test(found) if found is not None else False
    except (KeyError, IndexError, TypeError):
        return False


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def kalign_version() -> str:
    from kalign_core import __version__

    return __version__


def small_shapes(operators: list[str], folder: Path) -> Path:
    """A shapes file of each operator's first small problem."""
    from kalign_core import ops

    wanted = [ops.named(name) for name in operators] or list(ops.operators())
    tables = [
        f'[[problem]]\nop = "{op.name}"\n' + "".join(f"{dim} = {size}\n" for dim, size in op.small_shapes[0].items())
        for op in wanted
    ]
    path = folder / "shapes.toml"
    path.write_text("\n".join(tables), encoding="utf-8")
    return path


def anonymous(result: Found) -> Found:
    """The result with the device's key, which may hold a machine's name, replaced by a digest of it."""
    found = result["steps"]["doctor"]["found"] or {}
    text = json.dumps(result)
    for device in found.get("devices", ()):
        key = device["identity"]["key"]
        for name in {key, key.partition("/")[0]} - {""}:
            text = text.replace(json.dumps(name)[1:-1], f"digest-{hashlib.sha256(name.encode()).hexdigest()[:12]}")
    changed: Found = json.loads(text)
    return changed


# --- what only a process on the device can say ----------------------------------------------------------------------


def device_step() -> Found:
    """Copy bandwidth, and what the driver says of each operator's reference beside what was read from its code."""
    import torch

    from kalign_core import ops, session
    from kalign_core.api import recorded

    here = session.current()
    device = torch.device(here.platform.device_type)
    rows = []
    for op in ops.operators():
        for call in recorded(op, *op.inputs(op.small_shapes[0], op.dtypes[0], 0, device)):
            rows += _loaded(here, call)
    return {"platform": here.platform.name, "copy_gb_per_s": _copy_gb_per_s(device), "kernels": rows}


def _loaded(here: Any, call: Any) -> list[Found]:
    from kalign_core.hal.machine_code import registers_and_spills

    if here.platform.compile_target(call.device) is None:
        return []  # interpreted: there is no code
    with here.platform.on(call.device):
        config = call.kernel.reference_config(call.problem)
        compiled = here.platform.compile(call.kernel, call.problem, config, call.device)
        compiled.run  # noqa: B018  # loads it, upon which the driver's figures are there
    predicted = registers_and_spills(compiled.asm)
    return [{"kernel": call.kernel.name, "predicted": list(predicted or ()),
             "loaded": [compiled.n_regs, compiled.n_spills], "shared_bytes": compiled.metadata.shared}]  # fmt: skip


def _copy_gb_per_s(device: Any) -> float:
    """Bytes read and written each second by the best of ten device-to-device copies, large enough to leave caches."""
    import torch

    size = 2**30 if device.type != "cpu" else 2**26
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(10):
        if device.type != "cpu":
            torch.cuda.synchronize()
        started = time.perf_counter()
        target.copy_(source)
        if device.type != "cpu":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return round(2 * size / best / 1e9, 1)


# --- all of it ----------------------------------------------------------------------------------------------------


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*", metavar="OP")
    parser.add_argument("--small", action="store_true", help="each operator's smallest problem: a rehearsal")
    parser.add_argument("--control", default="", help="one bad kernel instead of all of them")
    parser.add_argument("--budget", type=float, default=1800.0, help="seconds for tuning")
    parser.add_argument("--limit", type=float, default=7200.0, help="seconds for any one step")
    parser.add_argument("--output", type=Path, help="where the result goes; first-run-<device>.json by default")
    parser.add_argument("--step", choices=["device"], help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    given = options()
    sys.path.insert(0, str(ROOT))
    if given.step == "device":
        print(json.dumps(device_step()))
        return 0
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "KALIGN_CACHE_DIR": str(folder / "cache")}
        shapes = small_shapes(given.operators, folder) if given.small else None
        wanted = steps(given.operators, shapes, given.control, given.budget)
        done = {step.name: run(step, environment, given.limit) for step in wanted}
        files = {file.name: file.read_text(encoding="utf-8") for file in (folder / "cache").glob("*.toml")}
    result = {"protocol": PROTOCOL, "kalign": kalign_version(), "small": given.small, "steps": done, "decisions": files}
    result["met"] = all(holds is not False for step in done.values() for holds in step["expected"].values())
    target = given.output or Path(f"first-run-{Path(next(iter(files), 'nothing')).stem}.json")
    target.write_text(json.dumps(anonymous(result), indent=1), encoding="utf-8")
    say(f"{'every expectation was met' if result['met'] else 'NOT every expectation was met'}; send back {target}")
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
