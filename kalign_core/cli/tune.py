"""``kalign tune``: tune, verify, remember; one line per problem on standard error, the decisions on standard output."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from kalign_core import context
from kalign_core.cli import problems
from kalign_core.cli.output import emit, json_option, reporting_errors, say, table
from kalign_core.errors import BadArgument, CandidateFailed, NotTunable
from kalign_core.records import Entry


@click.command()
@problems.options
@click.option("--effort", default="normal", show_default=True, help="quick, normal or full.")
@click.option("--strategy", default="racing", show_default=True, help="Search strategy, built in or a plugin's.")
@click.option("--budget", type=float, default=None, help="Try nothing further after this many seconds.")
@click.option("--jobs", type=click.IntRange(1), default=None, help="Compile processes; 16 or the cores at most.")
@click.option("--retune", is_flag=True, help="Measure what is known already once more.")
@json_option
@reporting_errors
def tune(
    operators: tuple[str, ...],
    shapes: tuple[str, ...],
    shapes_file: Path | None,
    dtype: str | None,
    phase: str,
    effort: str,
    strategy: str,
    budget: float | None,
    jobs: int | None,
    retune: bool,
    as_json: bool,
) -> None:
    """Tune operators on this device, check every byte, and remember the winners.

    Without OP all operators are tuned at their default shapes. Known problems are hits and cost nothing.
    """
    from kalign_core import session
    from kalign_core.tuner.compile import CompilePool
    from kalign_core.tuner.loop import effort_named

    here = session.current()
    here.observer.effort = replace(effort_named(effort), strategy=strategy)
    if budget is not None and budget <= 0:
        raise BadArgument(f"--budget {budget:g} is no time", fix="--budget 600")
    if jobs:
        here._pool = CompilePool(jobs)
    work = problems.chosen(here, operators, shapes, shapes_file, dtype, phase)
    started = time.monotonic()
    rows: list[dict[str, Any]] = []
    try:
        for number, item in enumerate(work, start=1):
            if budget is not None and time.monotonic() - started > budget:
                say(f"budget of {budget:g} s spent: {len(work) - number + 1} problems left; run the command again")
                break
            say(f"[{number}/{len(work)}] {item}")
            left = math.inf if budget is None else budget - (time.monotonic() - started)
            rows += tune_one(here, item, retune, left)
    finally:
        is_written = here.close()
    _show(here, rows if is_written else [_unwritten(row) for row in rows], as_json)


def tune_one(here: Any, item: problems.Work, retune: bool, budget_s: float = math.inf) -> list[dict[str, Any]]:
    """Tune the kernels of one piece of work within ``budget_s`` seconds; gives a row for each."""
    import torch

    from kalign_core.api import recorded_forms

    platform = here.platform
    device = torch.device(platform.device_type)
    rows = []
    end = time.monotonic() + budget_s
    with context.using(phase=item.phase):
        calls = recorded_forms(item.operator, item.sizes, item.dtype, device)
        for call in calls:
            key = here.key(call.kernel, call.problem, call.device)
            label = f"{call.kernel.name} {key.problem}"
            row: dict[str, Any] = {"kernel": call.kernel.name, "problem": key.problem, "args": key.args,
                                   "phase": key.phase, "device": call.device}  # fmt: skip
            entry = None if retune else here.lookup(call.kernel, call.problem, call.device)
            if entry is not None:
                rows.append({**row, "how": "hit", **_numbers(entry)})
                say(f"  {label}: hit, nothing timed; {entry.config}")
                continue
            rows.append({**row, **_tuned(here, call, label, end - time.monotonic())})
    return rows


def _tuned(here: Any, call: Any, label: str, budget_s: float) -> dict[str, Any]:
    try:
        report, stored = here.tune(call.kernel, call.problem, call.device, budget_s=budget_s)
    except (NotTunable, CandidateFailed) as error:
        say(f"  {label}: stays with its reference: {error}")
        return {"how": "not tunable", "reason": str(error)}
    tally, seconds = report.tally, sum(report.seconds.values())
    counts = f"refused {tally.refused}, failed {tally.failed}, refuted {tally.refuted}, timed {tally.timed}"
    numbers = _numbers(report.entry) if report.entry else {}
    times = ""
    if report.entry:
        times = f"; reference {numbers['reference_us']} us, winner {numbers['winner_us']} us, gain {numbers['gain']}x"
        times += f"; {report.entry.config}"
    say(f"  {label}: {counts}{times} ({seconds:.1f} s)" + (f"; not stored: {report.reason}" if report.reason else ""))
    return {
        "how": "tuned" if stored else "kept in memory",
        "reason": report.reason,
        "refused": tally.refused, "failed": tally.failed, "refuted": tally.refuted, "timed": tally.timed,
        "duplicates": report.duplicates,
        "failures": [f"{config}: {why}" for config, why in report.failed],
        "refutations": [f"{config}: {refutation}" for config, refutation in report.refuted],
        "seconds": {step: round(value, 3) for step, value in report.seconds.items()},
        **numbers,
    }  # fmt: skip


def _unwritten(row: dict[str, Any]) -> dict[str, Any]:
    """``row`` where the disk did not take what this command decided; the store has warned of the reason."""
    return {**row, "how": "kept in memory", "reason": "it could not be written"} if row["how"] == "tuned" else row


def _numbers(entry: Entry) -> dict[str, Any]:
    cold = entry.key.phase != "decode" and entry.cold_us is not None and entry.reference_cold_us is not None
    winner, reference = (entry.cold_us, entry.reference_cold_us) if cold else (entry.warm_us, entry.reference_warm_us)
    return {
        "config": str(entry.config),
        "decided_on": "cold" if cold else "warm",
        "reference_us": reference,
        "winner_us": winner,
        "gain": round(reference / winner, 3) if winner and reference else None,
        "cold_us": entry.cold_us, "warm_us": entry.warm_us,
        "reference_cold_us": entry.reference_cold_us, "reference_warm_us": entry.reference_warm_us,
        "mad_us": entry.mad_us, "tried": entry.tried, "decided": entry.decided,
    }  # fmt: skip


def _show(here: Any, rows: Sequence[dict[str, Any]], as_json: bool) -> None:
    device = here.platform.devices()[0]
    path = here.store.path(here.facts(device).identity)
    hits = sum(row["how"] == "hit" for row in rows)
    summary = (
        f"every problem was a hit ({hits} of {len(rows)}); nothing was timed"
        if rows and hits == len(rows)
        else f"{len(rows) - hits} of {len(rows)} problems tuned, {hits} hits"
    )
    columns = ("kernel", "problem", "phase", "how", "reference us", "winner us", "gain", "configuration")
    fields = ("kernel", "problem", "phase", "how", "reference_us", "winner_us", "gain", "config")
    lines = [[row.get(name) for name in fields] for row in rows]
    emit(
        as_json,
        {"platform": here.platform.name, "file": path, "summary": summary, "problems": list(rows)},
        table("", columns, lines),
        summary,
        f"decisions: {path or 'in memory only'}",
    )
