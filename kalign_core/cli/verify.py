"""``kalign verify``: hold the launches that serve operators here to the gate again."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from kalign_core import context
from kalign_core.cli import problems
from kalign_core.cli.output import emit, json_option, reporting_errors, say, table
from kalign_core.errors import CandidateFailed, NotTunable


@click.command()
@problems.options
@click.option("--strict", is_flag=True, help="Every row count, company and 64 repeats instead of the quick suite.")
@json_option
@reporting_errors
def verify(
    operators: tuple[str, ...],
    shapes: tuple[str, ...],
    shapes_file: Path | None,
    dtype: str | None,
    phase: str,
    strict: bool,
    as_json: bool,
) -> None:
    """Compare the launches in use here with their references, byte for byte.

    Stored winners are compared with the reference launch, references with themselves and their own rows. Exit code 1
    if anything is refuted. Testing refutes, it does not prove.
    """
    from kalign_core import session

    here = session.current()
    rows: list[dict[str, Any]] = []
    for item in problems.chosen(here, operators, shapes, shapes_file, dtype, phase):
        say(str(item))
        rows += _verify_one(here, item, strict)
    wrong = [row for row in rows if row["state"] != "not refuted"]
    columns = ("kernel", "problem", "state", "cases", "observable", "configuration", "reason")
    fields = ("kernel", "problem", "state", "cases", "observable", "config", "reason")
    emit(
        as_json,
        {"strict": strict, "refuted": len(wrong), "verdicts": rows},
        table("", columns, [[row[name] for name in fields] for row in rows]),
    )
    sys.exit(1 if wrong else 0)


def _verify_one(here: Any, item: problems.Work, strict: bool) -> list[dict[str, Any]]:
    import torch

    from kalign_core.api import recorded, verified

    rows = []
    device = torch.device(here.platform.device_type)
    with context.using(phase=item.phase):
        for call in recorded(item.operator, *item.operator.inputs(item.sizes, item.dtype, 0, device)):
            key = here.key(call.kernel, call.problem, call.device)
            row = {"kernel": call.kernel.name, "problem": key.problem, "args": key.args, "phase": key.phase}
            try:
                found = verified(here, call, strict=strict)
            except (NotTunable, CandidateFailed) as error:
                rows.append({**row, "state": "not tunable", "reason": str(error), "cases": 0, "observable": "",
                             "config": "", "suite": "", "digests": []})  # fmt: skip
                continue
            verdict = found.verdict
            rows.append({
                **row, "state": verdict.state, "reason": str(verdict.refutation or ""), "cases": verdict.cases,
                "observable": verdict.observable, "config": str(found.config), "suite": verdict.suite,
                "digests": list(verdict.digests),
            })  # fmt: skip
    return rows
