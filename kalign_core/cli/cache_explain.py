"""``kalign cache explain``: for each kernel of a call the entry that answers it, or the nearest and how it differs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kalign_core import context
from kalign_core.cache.inspect import Near, nearest, outside
from kalign_core.cli import problems
from kalign_core.cli.output import emit, json_option, reporting_errors, say, table
from kalign_core.records import EntryKey

if TYPE_CHECKING:
    from kalign_core.observer import Recorded
    from kalign_core.session import Session


@click.command()
@problems.options
@json_option
@reporting_errors
def explain(
    operators: tuple[str, ...],
    shapes: tuple[str, ...],
    shapes_file: Path | None,
    dtype: str | None,
    phase: str,
    as_json: bool,
) -> None:
    """Say which stored decision answers each kernel call of OP, or how the nearest one differs.

    Field by field: what the call asks for, and what the entry was stored for. Nothing is launched or tuned; an entry
    that is used here is used in the modes read, tune and frozen.
    """
    from kalign_core import session

    here = session.current()
    work = problems.chosen(here, operators, shapes, shapes_file, dtype, phase)
    rows = [row for item in work for row in _explained(here, item)]
    columns = ("kernel", "problem", "phase", "state", "field", "wanted", "found")
    lines = [line for row in rows for line in _lines(row)]
    used = sum(row["state"] == "used" for row in rows)
    summary = f"{used} of {len(rows)} kernel calls have an entry that is used here"
    emit(as_json, {"calls": rows}, table("", columns, lines), summary)


def _explained(here: Session, item: problems.Work) -> Iterator[dict[str, Any]]:
    import torch

    from kalign_core.api import recorded_forms

    say(str(item))
    device = torch.device(here.platform.device_type)
    with context.using(phase=item.phase):
        for call in recorded_forms(item.operator, item.sizes, item.dtype, device):
            key = here.key(call.kernel, call.problem, call.device)
            identity = here.facts(call.device).identity
            near = nearest(here.store.entries(identity), key)
            yield {
                "kernel": key.kernel, "problem": key.problem, "args": key.args, "phase": key.phase,
                "device": call.device, "file": here.store.path(identity), **_state(here, call, key, near),
            }  # fmt: skip


def _state(here: Session, call: Recorded, key: EntryKey, near: Near | None) -> dict[str, Any]:
    if near is None:
        reason = f"no entry for {key.kernel} is stored for this device"
        return {"state": "no entry", "reason": reason, "config": None, "differences": []}
    config = near.entry.config
    found = [difference._asdict() for difference in near.differences]
    if found:
        reason = "; ".join(map(str, near.differences))
        return {"state": "not used", "reason": reason, "config": str(config), "differences": found}
    reference = call.kernel.reference_config(call.problem)
    reason = outside(config, reference, here.space(call.kernel, call.problem, call.device))
    if reason:
        found = [{"field": "config", "wanted": reason, "found": str(config)}]
    return {"state": "not used" if reason else "used", "reason": reason, "config": str(config), "differences": found}


def _lines(row: dict[str, Any]) -> list[tuple[Any, ...]]:
    """A line for each field that differs, or one that says what is used."""
    first = (row["kernel"], row["problem"], row["phase"], row["state"])
    if row["state"] == "used":
        return [(*first, "config", "", row["config"])]
    fields = [(d["field"], d["wanted"], d["found"]) for d in row["differences"]] or [("", "", row["reason"])]
    return [(*(first if number == 0 else ("",) * 4), *field) for number, field in enumerate(fields)]
