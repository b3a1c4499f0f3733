"""``kalign cache``: where decisions are kept and what is in there."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

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
    rows = [_line(entry, fits) for entry, fits in _entries()]
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


def _here() -> Any:
    from kalign_core import session

    return session.current()


def _files() -> list[tuple[int, Any]]:
    here = _here()
    return [(index, here.store.path(here.platform.identity(index))) for index in here.platform.devices()]


def _entries() -> list[tuple[Entry, bool]]:
    here = _here()
    found = []
    for index in here.platform.devices():
        facts = here.facts(index)
        found += [(entry, entry.key.toolchain == facts.toolchain) for entry in here.store.entries(facts.identity)]
    return found


def _line(entry: Entry, fits: bool) -> dict[str, Any]:
    cold = entry.cold_us is not None
    return {
        "kernel": entry.key.kernel, "problem": entry.key.problem, "args": entry.key.args, "phase": entry.key.phase,
        "toolchain": entry.key.toolchain.id, "config": str(entry.config),
        "reference_us": entry.reference_cold_us if cold else entry.reference_warm_us,
        "us": entry.cold_us if cold else entry.warm_us, "decided": entry.decided,
        "used here": "yes" if fits else "no: another toolchain",
    }  # fmt: skip


def _whole(entry: Entry) -> dict[str, Any]:
    key = asdict(entry.key)
    key["toolchain"] = dict(entry.key.toolchain.facts)
    rest = {name: getattr(entry, name) for name in entry.__dataclass_fields__ if name not in ("key", "config", "extra")}
    return {**key, "config": str(entry.config), **rest, **dict(entry.extra)}
