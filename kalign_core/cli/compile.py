"""``kalign compile``: compile an operator's candidates for a device that need not be there, and show what they take."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kalign_core import context
from kalign_core.cli import problems
from kalign_core.cli.output import emit, json_option, reporting_errors, say, table
from kalign_core.errors import BadArgument

if TYPE_CHECKING:
    from kalign_core.observer import Recorded
    from kalign_core.session import Session
    from kalign_core.tuner.compile import CompilePool
    from kalign_core.tuner.targets import Row, Target

FIELDS = ("registers", "spills", "shared_bytes", "threads", "occupancy", "limited_by", "compile_s", "state", "reason")
COLUMNS = ("configurations", *(field.replace("_", " ") for field in FIELDS))
SHOWN_CONFIGS = 2
LOOK = 16


@click.command("compile")
@problems.options
@click.option("--target", "target_name", default=None, help="The device, such as hip:gfx942 or cuda:sm_90.")
@click.option("--jobs", type=click.IntRange(1), default=None, help="Compile processes; 16 or the cores at most.")
@click.option("--timeout", type=float, default=None, help="Seconds that one candidate may take to compile; 120.")
@json_option
@reporting_errors
def compile_(
    operators: tuple[str, ...],
    shapes: tuple[str, ...],
    shapes_file: Path | None,
    dtype: str | None,
    phase: str,
    target_name: str | None,
    jobs: int | None,
    timeout: float | None,
    as_json: bool,
) -> None:
    """Compile the candidates of operators for a device without having one.

    Shows registers, spills, shared memory and threads of each code that comes out, an estimate of the occupancy, and
    what is refused and why. Exit code 1 if a candidate does not compile. Without OP all operators are compiled at
    their default shapes.
    """
    from kalign_core import hal
    from kalign_core.tuner import targets
    from kalign_core.tuner.compile import CompilePool

    if target_name is None:
        raise BadArgument(
            "kalign compile needs a target",
            why=f"known targets are: {', '.join(targets.targets(hal.plugins))}",
            fix="kalign compile rms_norm --target hip:gfx942",
        )
    if timeout is not None and timeout <= 0:
        raise BadArgument(f"--timeout {timeout:g} is no time", fix="--timeout 120")
    target = targets.target_named(hal.plugins, target_name)
    here = targets.session_for(target, hal.plugins)
    work = problems.chosen(here, operators, shapes, shapes_file, dtype, phase)
    pool = CompilePool(jobs)
    try:
        found = [block for item in work for block in compiled(here, target, item, pool, timeout or targets.DEADLINE_S)]
    finally:
        pool.close()
    summary = summarised(found)
    emit(as_json, {"target": str(target), **summary, "kernels": found}, *_tables(found), _sentence(summary))
    sys.exit(1 if summary["failed"] else 0)


def compiled(
    here: Session, target: Target, item: problems.Work, pool: CompilePool, deadline_s: float
) -> list[dict[str, Any]]:
    """What came of the candidates of each kernel that ``item`` runs, as plain data."""
    from kalign_core.tuner import targets

    blocks = []
    with context.using(phase=item.phase):
        calls = targets.calls_of(here, item.operator, item.sizes, item.dtype)
    for call in calls:
        label = f"{target} {item}: {call.kernel}"
        found = targets.space_on(target, here.plugins, call.kernel, call.problem)
        say(f"{label}, {len(found.candidates)} candidates, {len(found.refused)} refused")
        rows = targets.compile_space(found, call, target, pool, deadline_s, _counting(label))
        blocks.append(_block(here, call, item, rows))
    return blocks


def summarised(blocks: Sequence[dict[str, Any]]) -> dict[str, int]:
    """How many candidates there were and what came of them; ``codes`` counts the different ones."""
    rows = [row for block in blocks for row in block["rows"]]
    counts = {state: sum(len(r["configs"]) for r in rows if r["state"] == state)
              for state in ("compiled", "refused", "failed")}  # fmt: skip
    codes = sum(row["state"] == "compiled" for row in rows)
    return {"candidates": sum(counts.values()), **counts, "codes": codes,
            "spilling": sum(row["state"] == "compiled" and row["spills"] > 0 for row in rows)}  # fmt: skip


def _counting(label: str) -> Any:
    def progress(done: int, total: int) -> None:
        if done % LOOK == 0 or done == total:
            say(f"{label}: {done} of {total}")

    return progress


def _block(here: Session, call: Recorded, item: problems.Work, rows: Sequence[Row]) -> dict[str, Any]:
    key = here.key(call.kernel, call.problem, call.device)
    return {
        "operator": item.operator.name, "kernel": call.kernel.name, "contract": call.kernel.contract,
        "problem": key.problem, "args": key.args, "phase": key.phase,
        "reference": str(call.kernel.reference_config(call.problem)),
        "rows": [_plain(row, here.platform.model(call.device).warp_size) for row in rows],
    }  # fmt: skip


def _plain(row: Row, warp_size: int) -> dict[str, Any]:
    made: dict[str, Any] = {
        "configs": [str(config) for config in row.configs], "state": row.state, "reason": row.reason,
        "compile_s": round(row.compile_s, 3),
    }  # fmt: skip
    if row.code is not None:
        code = row.code
        made |= {
            "registers": code.registers, "spills": code.spills, "shared_bytes": code.shared_bytes,
            "threads": code.num_warps * warp_size, "tmem_columns": code.tmem_columns, "code": code.code,
        }  # fmt: skip
    if row.occupancy is not None:
        share = row.occupancy
        made |= {"blocks_per_unit": share.blocks, "occupancy": round(share.share, 3), "limited_by": share.limited_by}
    return made


def _tables(blocks: Sequence[dict[str, Any]]) -> list[Any]:
    fields = (
        "registers",
        "spills",
        "shared_bytes",
        "threads",
        "occupancy",
        "limited_by",
        "compile_s",
        "state",
        "reason",
    )
    made = []
    for block in blocks:
        lines = [[_configs(row["configs"]), *(row.get(name) for name in fields)] for row in block["rows"]]
        title = f"{block['kernel']} {block['problem']} {block['args']}"
        made.append(table(title, COLUMNS, lines))
    return made


def _configs(configs: Sequence[str]) -> str:
    more = len(configs) - SHOWN_CONFIGS
    return "; ".join(configs[:SHOWN_CONFIGS]) + (f"; and {more} more" if more > 0 else "")


def _sentence(summary: dict[str, int]) -> str:
    return (
        f"{summary['candidates']} candidates: {summary['compiled']} compiled to {summary['codes']} codes "
        f"({summary['spilling']} spill), {summary['refused']} refused, {summary['failed']} failed"
    )
