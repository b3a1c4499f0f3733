"""``kalign cache``: where decisions are kept and what is in there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import click

from kalign_core.cache.device_table import Difference
from kalign_core.cli.cache_explain import explain
from kalign_core.cli.cache_stale import check, checked_devices, prune
from kalign_core.cli.output import emit, json_option, reporting_errors, table
from kalign_core.errors import UnknownName
from kalign_core.records import Entry


@click.group()
def cache() -> None:
    """Look at the store of decisions."""


@cache.command()
@json_option
@reporting_errors
def path(as_json: bool) -> None:
    """Print the file of each device's decisions, whether or not it exists."""
    files = _files()
    found = [{"device": index, "file": file, "exists": bool(file and file.exists())} for index, file in files]
    emit(as_json, {"files": found}, "\n".join(str(file or "(memory only)") for _, file in files))


@cache.command()
@json_option
@reporting_errors
def ls(as_json: bool) -> None:
    """List the decisions for the devices here."""
    columns = ("kernel", "problem", "phase", "toolchain", "config", "reference_us", "us", "decided", "used here")
    rows = [_line(entry, reasons) for entry, reasons in _entries()]
    emit(as_json, {"entries": rows}, table("", columns, [[row[c] for c in columns] for row in rows]))


@cache.command()
@click.argument("kernel", required=False)
@json_option
@reporting_errors
def show(kernel: str | None, as_json: bool) -> None:
    """Show every field of the decisions for KERNEL, or for all."""
    entries = [entry for entry, _ in _entries()]
    names = sorted({entry.key.kernel for entry in entries})
    if kernel is not None and kernel not in names:
        raise UnknownName("kernel", kernel, names, fix="kalign cache ls")
    chosen = [_whole(entry) for entry in entries if kernel in (None, entry.key.kernel)]
    text = "\n\n".join("\n".join(f"{name} = {value}" for name, value in row.items()) for row in chosen)
    emit(as_json, {"entries": chosen}, text or "no decisions yet: kalign tune")


for command in (explain, check, prune):
    cache.add_command(command)


def _files() -> list[tuple[int, Any]]:
    from kalign_core import session

    here = session.current()
    return [(index, here.store.path(here.platform.identity(index))) for index in here.platform.devices()]


def _entries() -> Iterator[tuple[Entry, tuple[Difference, ...]]]:
    """Every entry for the devices here, and why it can never match, as far as that takes no time to know."""
    for found in checked_devices(with_candidates=False):
        reasons = {id(one.entry): one.reasons for one in found.stale}
        yield from ((entry, reasons.get(id(entry), ())) for entry in found.entries)


def _line(entry: Entry, reasons: Sequence[Difference]) -> dict[str, Any]:
    cold = entry.cold_us is not None
    fields = dict.fromkeys(reason.field.partition(".")[0] for reason in reasons)
    return {
        "kernel": entry.key.kernel, "problem": entry.key.problem, "args": entry.key.args, "phase": entry.key.phase,
        "toolchain": entry.key.toolchain.id, "config": str(entry.config),
        "reference_us": entry.reference_cold_us if cold else entry.reference_warm_us,
        "us": entry.cold_us if cold else entry.warm_us, "decided": entry.decided,
        "used here": f"no: another {', '.join(fields)}" if fields else "yes",
    }  # fmt: skip


def _whole(entry: Entry) -> dict[str, Any]:
    key = asdict(entry.key)
    key["toolchain"] = dict(entry.key.toolchain.facts)
    rest = {name: getattr(entry, name) for name in entry.__dataclass_fields__ if name not in ("key", "config", "extra")}
    return {**key, "config": str(entry.config), **rest, **dict(entry.extra)}
