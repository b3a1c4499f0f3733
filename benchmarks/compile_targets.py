"""What every shipped candidate takes on a device that is not here: compiled, counted, and what was refused and why.

Prints one JSON object for one target: ``python benchmarks/compile_targets.py --target hip:gfx942``. All operators that
are registered are compiled at the first and the last of their default shapes (``--all-shapes`` for every one) in their
first dtype, every candidate of every kernel they run, in compile processes with a deadline. ``--table FILE.md`` also
writes the compact table. The exit code is 1 if a candidate neither compiles nor is refused with a reason.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
HEADINGS = ("kernel", "problem", "candidates", "codes", "refused", "failed", "spilling", "most spills", "registers",
            "shared KiB", "occupancy", "reference's", "compile s, median", "longest")  # fmt: skip


def compile_all(name: str, wanted: Sequence[str], all_shapes: bool, jobs: int) -> tuple[dict[str, int], list[Row]]:
    """Counts over everything, and one row for each kernel and problem."""
    from kalign_core import hal, ops
    from kalign_core.cli import compile as compile_command
    from kalign_core.cli.problems import Work
    from kalign_core.tuner import targets
    from kalign_core.tuner.compile import CompilePool

    target = targets.target_named(hal.plugins, name)
    here = targets.session_for(target, hal.plugins)
    pool, blocks = CompilePool(jobs), []
    try:
        for op in [ops.named(each) for each in wanted] or ops.operators():
            for sizes in op.shapes if all_shapes or len(op.shapes) < 2 else (op.shapes[0], op.shapes[-1]):
                work = Work(op, dict(sizes), op.dtypes[0], "train")
                blocks += compile_command.compiled(here, target, work, pool, targets.DEADLINE_S)
    finally:
        pool.close()
    return compile_command.summarised(blocks), [condensed(block) for block in blocks]


def condensed(block: Row) -> Row:
    """One kernel's rows in figures: ranges over its codes, and every candidate that was refused, failed or spills."""
    by_state = {state: [row for row in block["rows"] if row["state"] == state]
                for state in ("compiled", "refused", "failed")}  # fmt: skip
    codes = by_state["compiled"]
    seconds = [row["compile_s"] / len(row["configs"]) for row in block["rows"] if row["compile_s"]]
    reference = next((row for row in codes if block["reference"] in row["configs"]), {})
    return {
        "operator": block["operator"], "kernel": block["kernel"], "problem": block["problem"], "args": block["args"],
        "candidates": sum(len(row["configs"]) for row in block["rows"]),
        "compiled": sum(len(row["configs"]) for row in codes), "codes": len(codes),
        "refused": dict(Counter(row["reason"] for row in by_state["refused"] for _ in row["configs"])),
        "failed": {config: row["reason"] for row in by_state["failed"] for config in row["configs"]},
        "spilling": {row["configs"][0]: row["spills"] for row in codes if row["spills"]},
        "registers": _range(codes, "registers"), "shared_bytes": _range(codes, "shared_bytes"),
        "tmem_columns": _range(codes, "tmem_columns"), "occupancy": _range(codes, "occupancy"),
        "reference": {name: reference.get(name)
                      for name in ("registers", "spills", "shared_bytes", "threads", "occupancy", "limited_by")},
        "compile_s": {"median": round(statistics.median(seconds), 3), "longest": round(max(seconds), 3)},
    }  # fmt: skip


def _range(rows: Sequence[Row], name: str) -> list[Any]:
    values = [row[name] for row in rows if row.get(name) is not None]
    return [min(values), max(values)] if values else []


def table(result: Row) -> str:
    """The compact table, in Markdown; every figure is the JSON's."""
    count, versions = result["counts"], result["versions"]
    came_of_it = (
        f"{count['candidates']} candidates: {count['compiled']} compiled to {count['codes']} codes, "
        f"{count['spilling']} of which spill; {count['refused']} refused with a reason, {count['failed']} failed."
    )
    lines = [
        f"# Candidates compiled for {result['target']}",
        "",
        f"{came_of_it} Compiled without a device by Triton {versions['triton']}: `{result['command']}`.",
        "",
        "Registers, shared memory and occupancy are ranges over the codes of a kernel; occupancy is an estimate "
        "(`kalign_core/occupancy.py`).",
        "",
        f"| {' | '.join(HEADINGS)} |",
        "|" + "---|" * len(HEADINGS),
    ]
    lines += [f"| {' | '.join(_cells(row))} |" for row in result["kernels"]]
    reasons = Counter()  # type: Counter[str]
    for row in result["kernels"]:
        reasons.update(row["refused"])
    if reasons:
        lines += ["", "Refused:", "", *(f"- {count} times: {reason}" for reason, count in reasons.most_common())]
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> list[str]:
    reference, seconds = row["reference"], row["compile_s"]
    return [
        row["kernel"], row["problem"], str(row["candidates"]), str(row["codes"]), str(sum(row["refused"].values())),
        str(len(row["failed"])), str(len(row["spilling"])), str(max(row["spilling"].values(), default=0)),
        _span(row["registers"]), _span([round(size / 1024, 1) for size in row["shared_bytes"]]),
        _span(row["occupancy"]), f"{reference['registers']} registers, {reference['occupancy']}",
        str(seconds["median"]), str(seconds["longest"]),
    ]  # fmt: skip


def _span(values: Sequence[Any]) -> str:
    return "" if not values else str(values[0]) if values[0] == values[-1] else f"{values[0]} to {values[-1]}"


def command(options: argparse.Namespace) -> str:
    """What to type to get the same."""
    words = ["python benchmarks/compile_targets.py", *options.operators, f"--target {options.target}"]
    return " ".join([*words, *(["--all-shapes"] if options.all_shapes else []), f"--jobs {options.jobs}"])


def versions() -> dict[str, str]:
    import torch
    import triton

    return {"triton": triton.__version__, "torch": torch.__version__, "python": platform.python_version()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operators", nargs="*", metavar="OP")
    parser.add_argument("--target", required=True, help="such as hip:gfx942 or cuda:sm_90")
    parser.add_argument("--all-shapes", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    started = time.monotonic()
    counts, kernels = compile_all(options.target, options.operators, options.all_shapes, options.jobs)
    result = {
        "benchmark": "compile_targets", "target": options.target, "counts": counts,
        "seconds": round(time.monotonic() - started, 1),
        "machine": {"system": f"{platform.system()} {platform.machine()}", "cpus": os.cpu_count()},
        "versions": versions(), "command": command(options), "kernels": kernels,
    }  # fmt: skip
    if options.table is not None:
        options.table.write_text(table(result), encoding="utf-8")
    print(json.dumps(result, indent=1))
    return 1 if counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
