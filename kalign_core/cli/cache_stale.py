"""``kalign cache check`` and ``prune``: entries that can never match here, and throwing those away that nobody needs.

What another environment on this machine may still use, entries of another toolchain and those of kernels that this
one does not know, is listed but not thrown away unless that is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from kalign_core.cache.inspect import Stale, outside, stale
from kalign_core.cli.output import emit, json_option, reporting_errors, say, table
from kalign_core.errors import BadArgument
from kalign_core.records import Entry

if TYPE_CHECKING:
    from kalign_core.declare import Kernel
    from kalign_core.session import Session

COLUMNS = ("kernel", "problem", "phase", "toolchain", "decided", "why")
ELSEWHERE = ("toolchain", "kernel")
MISSING = 4


@dataclass(frozen=True, slots=True)
class Checked:
    """One device's entries, and those of them that can never match."""

    device: int
    file: Path | None
    entries: tuple[Entry, ...]
    stale: tuple[Stale, ...]

    def without_what_may_be_used_elsewhere(self) -> Checked:
        """This without entries of other toolchains and of kernels that are not known here."""
        kept = [one for one in self.stale if not any(r.field.partition(".")[0] in ELSEWHERE for r in one.reasons)]
        return replace(self, stale=tuple(kept))


@click.command()
@json_option
@reporting_errors
def check(as_json: bool) -> None:
    """List entries that can never match here, with each reason.

    Another toolchain, source, contract or suite; a kernel that no operator has; a configuration that is no candidate
    today. Exit code 4 if there is any.
    """
    checked = checked_devices()
    rows = [_row(found, one) for found in checked for one in found.stale]
    entries = sum(len(found.entries) for found in checked)
    data = {"entries": entries, "stale": rows}
    emit(as_json, data, *_tables(rows), f"{len(rows)} of {entries} entries can never match here")
    sys.exit(MISSING if rows else 0)


@click.command()
@click.option("--all", "everything", is_flag=True, help="Also what another environment on this machine may still use.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
@reporting_errors
def prune(everything: bool, yes: bool, as_json: bool) -> None:
    """Remove entries that can never match here; says which and why, and asks first.

    Entries of other toolchains and of kernels that are not known here stay, because another environment may use them;
    --all removes those too.
    """
    checked = checked_devices()
    chosen = [found.without_what_may_be_used_elsewhere() for found in checked] if not everything else checked
    rows = [_row(found, one) for found in chosen for one in found.stale]
    left = sum(len(found.stale) for found in checked) - len(rows)
    if left:
        say(f"{left} entries of other toolchains or of kernels unknown here are left alone; --all removes them too")
    if rows and not as_json:
        emit(False, {}, *_tables(rows))
    is_agreed = bool(rows) and _is_agreed(rows, yes, as_json)
    removed = sum(_remove(found) for found in chosen) if is_agreed else 0
    emit(as_json, {"removed": removed, "left": left, "entries": rows if is_agreed else []}, _outcome(rows, removed))
    sys.exit(1 if is_agreed and removed < len(rows) else 0)


def _is_agreed(rows: Sequence[dict[str, Any]], yes: bool, as_json: bool) -> bool:
    if yes:
        return True
    if not at_terminal():
        raise BadArgument(
            f"prune would remove {len(rows)} entries and there is no terminal to ask on",
            why="what is removed has to be tuned again if it was needed after all",
            fix="kalign cache prune --yes, after a look at kalign cache check",
        )
    if as_json:
        for row in rows:
            say(f"{row['kernel']} {row['problem']} {row['phase']}: {row['why']}")
    return click.confirm(f"Remove these {len(rows)} entries?", err=True)


def at_terminal() -> bool:
    """Whether somebody is there to answer."""
    return sys.stdin.isatty()


def _remove(found: Checked) -> int:
    here = _here()
    return here.store.remove(here.facts(found.device).identity, [one.entry.key for one in found.stale])


def _outcome(rows: Sequence[dict[str, Any]], removed: int) -> str:
    if not rows:
        return "nothing to remove"
    return f"removed {removed} of {len(rows)} entries" if removed else "nothing was removed"


# --- what is stale ------------------------------------------------------------------------------------------------


def _here() -> Session:
    from kalign_core import session

    return session.current()


def checked_devices(*, with_candidates: bool = True) -> list[Checked]:
    """Every device's entries, held against the toolchain and the kernels that are here.

    ``with_candidates`` asks today's space for every entry that would match, which takes milliseconds each.
    """
    here = _here()
    return [_checked_one(here, index, with_candidates) for index in here.platform.devices()]


def _checked_one(here: Session, device: int, with_candidates: bool) -> Checked:
    from kalign_core.cache.source import source_digest
    from kalign_core.verifier.checks import SUITE

    facts, kernels = here.facts(device), {kernel.name: kernel for kernel in _kernels()}
    entries = here.store.entries(facts.identity)
    sources = {name: (kernel.contract, source_digest(kernel)) for name, kernel in kernels.items()}
    outside_today = _outside(here, device, kernels) if with_candidates else lambda entry: ""
    found = stale(entries, facts.toolchain, sources, SUITE, outside_today)
    return Checked(device, here.store.path(facts.identity), entries, found)


def _kernels() -> Iterator[Kernel]:
    from kalign_core import ops

    for operator in ops.operators():
        yield from operator.kernels


def _outside(here: Session, device: int, kernels: dict[str, Kernel]) -> Callable[[Entry], str]:
    """Why an entry's configuration is no candidate today; empty where it is, or where no call can be made up."""
    from kalign_core.cache.example import example

    def why(entry: Entry) -> str:
        kernel = kernels[entry.key.kernel]
        problem = example(kernel, entry.key)
        if problem is None:
            return ""
        return outside(entry.config, kernel.reference_config(problem), here.space(kernel, problem, device))

    return why


def _row(found: Checked, one: Stale) -> dict[str, Any]:
    key = one.entry.key
    return {
        "kernel": key.kernel, "problem": key.problem, "args": key.args, "phase": key.phase,
        "toolchain": key.toolchain.id, "config": str(one.entry.config), "decided": one.entry.decided,
        "device": found.device, "file": found.file, "why": "; ".join(map(str, one.reasons)),
        "reasons": [reason._asdict() for reason in one.reasons],
    }  # fmt: skip


def _tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    """What there is to list; nothing is no table."""
    return [table("", COLUMNS, [[row[column] for column in COLUMNS] for row in rows])] if rows else []
