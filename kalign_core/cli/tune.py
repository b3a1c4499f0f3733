"""``kalign tune``: tune, verify, remember; how it goes on standard error, the decisions on standard output."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from kalign_core.cli import problems
from kalign_core.cli.isolated import Isolated
from kalign_core.cli.output import emit, json_option, reporting_errors, say, table
from kalign_core.cli.tuning import HIT, TUNED, UNTRIED, InProcess, Plan, Request, Row
from kalign_core.cli.view import View, shown, view
from kalign_core.errors import BadArgument


@click.command()
@problems.options
@click.option("--effort", default="normal", show_default=True, help="quick, normal or full.")
@click.option("--strategy", default="racing", show_default=True, help="Search strategy, built in or a plugin's.")
@click.option("--budget", type=float, default=None, help="Seconds this command may take.")
@click.option("--jobs", type=click.IntRange(1), default=None, help="Compile processes; 16 or the cores at most.")
@click.option("--retune", is_flag=True, help="Measure what is known already once more.")
@click.option("--launch-deadline", type=float, default=None, help="Seconds one launch of a candidate may take.")
@click.option("--in-process", is_flag=True, help="Try candidates in this process: one that crashes ends it.")
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
    launch_deadline: float | None,
    in_process: bool,
    as_json: bool,
) -> None:
    """Tune operators on this device, check every byte, and remember the winners.

    Without OP all operators are tuned at their default shapes; an OP may be MODULE:NAME. Known problems are hits and
    cost nothing, so a command that was stopped goes on where it was. Candidates are tried in a process of their own:
    one that crashes, hangs or faults the device costs that candidate.
    """
    for name, seconds in (("--budget", budget), ("--launch-deadline", launch_deadline)):
        if seconds is not None and not seconds > 0:
            raise BadArgument(f"{name} {seconds:g} is no time", fix=f"{name} 600")
    file = str(shapes_file) if shapes_file is not None else None
    request = Request(operators, shapes, file, dtype, phase, effort, strategy, jobs, retune, launch_deadline)
    plan, rows = Plan((), "", None), []
    end = math.inf if budget is None else time.monotonic() + budget
    with shown(view()) as told:
        runner = _runner(request, told, in_process)
        is_written = False
        try:
            plan = runner.plan()
            for row in _rows(runner, plan, told, end):
                rows.append(row)
                told.row(row)
        except KeyboardInterrupt:
            told.close()
            _stopped(plan, rows)
            sys.exit(130)
        finally:
            is_written = runner.close()
    _show(plan, rows if is_written else [_unwritten(row) for row in rows], as_json)


def _runner(request: Request, told: View, in_process: bool) -> InProcess | Isolated:
    """Who does the work: another process, unless this one has a session of its own that no other could have."""
    from kalign_core import session

    if in_process or session.is_made():
        return InProcess(session.current(), request, told)
    return Isolated(request, told)


def _rows(runner: InProcess | Isolated, plan: Plan, told: View, end: float) -> Iterator[Row]:
    """Do the work until ``end`` on the monotonic clock; a row for each kernel."""
    told.begin(len(plan.labels))
    for number, label in enumerate(plan.labels):
        left_s = end - time.monotonic()
        if left_s <= 0:
            left = len(plan.labels) - number
            told.note(f"the budget is spent: {left} problems left; run the command again to go on with them")
            return
        told.work(number, label)
        yield from runner.tune(number, left_s)


def _stopped(plan: Plan, rows: Sequence[Row]) -> None:
    kept = sum(row["how"] in (TUNED, HIT) for row in rows)
    where = f" in {plan.file}" if plan.file else ""
    say(f"stopped: {kept} decisions are kept{where}; run the same command again to go on")


def _unwritten(row: Row) -> Row:
    """``row`` where the disk did not take what this command decided; the store has warned of the reason."""
    return {**row, "how": "not stored", "reason": "it could not be written"} if row["how"] == TUNED else row


def _show(plan: Plan, rows: Sequence[Row], as_json: bool) -> None:
    hits = sum(row["how"] == HIT for row in rows)
    tuned = sum("decided" in row for row in rows) - hits
    untried = sum(row["how"] == UNTRIED for row in rows)
    summary = (
        f"every problem was a hit ({hits} of {len(rows)}); nothing was timed"
        if rows and hits == len(rows)
        else f"{tuned} of {len(rows)} problems tuned, {hits} hits" + (f", {untried} not tried" if untried else "")
    )
    columns = ("kernel", "problem", "phase", "how", "reference us", "winner us", "gain", "host us", "configuration")
    fields = ("kernel", "problem", "phase", "how", "reference_us", "winner_us", "gain", "host_us", "config")
    lines = [[row.get(name) for name in fields] for row in rows]
    is_kept = any(row["how"] in (TUNED, HIT) for row in rows)
    emit(
        as_json,
        {"platform": plan.platform, "file": plan.file, "summary": summary, "problems": list(rows)},
        table("", columns, lines),
        summary,
        f"decisions: {plan.file}" if is_kept and plan.file else "decisions: none was stored",
    )
