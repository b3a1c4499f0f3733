"""``kalign verify``: hold the launches that serve operators here to the gate again, or to another device's digests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kalign_core import context
from kalign_core.cli import problems
from kalign_core.cli.output import emit, json_option, reporting_errors, say, table
from kalign_core.errors import BadArgument, CandidateFailed, NotTunable

if TYPE_CHECKING:
    from kalign_core.observer import Recorded
    from kalign_core.records import Entry, Refutation
    from kalign_core.session import Session
    from kalign_core.verifier.against import Comparison, Theirs


@click.command()
@problems.options
@click.option("--strict", is_flag=True, help="Every case: other layouts and widths, all row counts, 64 runs.")
@click.option("--against", type=click.Path(path_type=Path), help="Compare digests with another device's file instead.")
@click.option("--case", "case_text", hidden=True, help="Run one case, as a refutation prints it.")
@click.option("--kernel", "kernel_text", hidden=True, help="With --case: the kernel and its problem.")
@click.option("--candidate", hidden=True, help="With --case: another kernel to be held to it.")
@click.option("--config", "config_text", hidden=True, help="With --case: the configuration.")
@click.option("--device", type=int, default=None, hidden=True, help="With --case: the device's index.")
@json_option
@reporting_errors
def verify(
    operators: tuple[str, ...],
    shapes: tuple[str, ...],
    shapes_file: Path | None,
    dtype: str | None,
    phase: str,
    strict: bool,
    against: Path | None,
    case_text: str | None,
    kernel_text: str | None,
    candidate: str | None,
    config_text: str | None,
    device: int | None,
    as_json: bool,
) -> None:
    """Compare the launches in use here with their references, byte for byte.

    Stored winners are compared with the reference launch, references with themselves and their own rows. With
    --against FILE.toml, the file of another device or toolchain, the digests of core cases are compared with those in
    it, operator by operator, for references that keep their promises; --strict asks for those under other layouts too.
    Exit code 1 if anything is refuted or differs. Testing refutes, it does not prove.
    """
    from kalign_core import session

    one_case = (case_text, kernel_text, config_text)
    others = (candidate, device, *one_case)
    if any(part is not None for part in others) and any(part is None for part in one_case):
        raise BadArgument("--case goes with --kernel and --config", fix="copy the whole command of a refutation")
    here = session.current()
    if case_text is not None and kernel_text is not None and config_text is not None:
        sys.exit(_repeat(here, case_text, kernel_text, candidate, config_text, device, as_json))
    work = problems.chosen(here, operators, shapes, shapes_file, dtype, phase)
    run = _verify(here, work, strict, as_json) if against is None else _against(here, work, against, strict, as_json)
    sys.exit(run)


def _calls(here: Session, work: list[problems.Work]) -> Iterator[tuple[problems.Work, Recorded]]:
    """Every kernel call of ``work``, with the phase in force while it is looked at."""
    import torch

    from kalign_core.api import recorded_forms

    device = torch.device(here.platform.device_type)
    for item in work:
        say(str(item))
        with context.using(phase=item.phase):
            for call in recorded_forms(item.operator, item.sizes, item.dtype, device):
                yield item, call


# --- the suite ----------------------------------------------------------------------------------------------------


def _verify(here: Session, work: list[problems.Work], strict: bool, as_json: bool) -> int:
    """Hold every launch of ``work`` to the suite; gives the exit code."""
    from kalign_core.verifier.checks import SUITE

    rows = [_verify_one(here, call, strict) for _, call in _calls(here, work)]
    wrong = [row for row in rows if row["state"] != "not refuted"]
    columns = ("kernel", "problem", "state", "cases", "observable", "configuration", "reason")
    fields = ("kernel", "problem", "state", "cases", "observable", "config", "reason")
    removed = [f"removed: the decision for {row['kernel']} {row['problem']}, whose reference serves from now on; "
               f"{row['retune']} finds another" for row in rows if row["retune"]]  # fmt: skip
    again = [row["refutation"]["repeat"] for row in rows if row["refutation"] and row["refutation"]["repeat"]]
    emit(
        as_json,
        {"suite": SUITE, "strict": strict, "refuted": len(wrong), "verdicts": rows},
        table(f"suite {SUITE}, {'strict' if strict else 'quick'}", columns, [[row[f] for f in fields] for row in rows]),
        *(f"to see it again: {command}" for command in again),
        *removed,
    )
    return 1 if wrong else 0


def _verify_one(here: Session, call: Recorded, strict: bool) -> dict[str, Any]:
    from kalign_core import ops
    from kalign_core.api import verified

    key = here.key(call.kernel, call.problem, call.device)
    row = {"kernel": call.kernel.name, "problem": key.problem, "args": key.args, "phase": key.phase}
    try:
        found = verified(here, call, strict=strict)
    except (NotTunable, CandidateFailed) as error:
        return {**row, "state": "not tunable", "reason": str(error), "cases": 0, "observable": "", "config": "",
                "suite": "", "digests": [], "skipped": [], "refutation": None, "retune": ""}  # fmt: skip
    verdict = found.verdict
    return {
        **row, "state": verdict.state, "reason": str(verdict.refutation or ""), "cases": verdict.cases,
        "observable": verdict.observable, "config": str(found.config), "suite": verdict.suite,
        "digests": list(verdict.digests), "skipped": list(verdict.skipped),
        "refutation": asdict(verdict.refutation) if verdict.refutation else None,
        "retune": ops.tune_command(call.kernel, call.problem) if found.removed else "",
    }  # fmt: skip


# --- one case -----------------------------------------------------------------------------------------------------


def _repeat(
    here: Session,
    case_text: str,
    kernel_text: str,
    candidate: str | None,
    config_text: str,
    device: int | None,
    as_json: bool,
) -> int:
    """Run one case and say how it ended; gives the exit code."""
    from kalign_core.verifier.repeat import run_again

    found: Refutation | None = run_again(here, kernel_text, candidate, config_text, case_text, device)
    text = "not refuted by this case" if found is None else f"refuted: {found}"
    emit(as_json, {"refuted": found is not None, "refutation": asdict(found) if found else None}, text)
    return 0 if found is None else 1


# --- another device -----------------------------------------------------------------------------------------------


def _against(here: Session, work: list[problems.Work], file: Path, strict: bool, as_json: bool) -> int:
    """Compare digests with those in ``file``; gives the exit code."""
    from kalign_core.verifier.against import load, overall

    theirs = load(file)
    rows = [
        {"operator": item.operator.name, "kernel": call.kernel.name, "problem": str(entry.tuned_at if entry else ""),
         "state": found.state, "detail": found.detail, "toolchain": entry.key.toolchain.id if entry else ""}
        for item, call in _calls(here, work)
        for entry, found in _comparisons(here, call, theirs, strict)
    ]  # fmt: skip
    names = dict.fromkeys(str(row["operator"]) for row in rows)
    summary = {name: overall(str(row["state"]) for row in rows if row["operator"] == name) for name in names}
    columns = ("operator", "kernel", "problem", "state", "detail", "toolchain")
    emit(
        as_json,
        {"file": str(file), "device": theirs.device, "operators": summary, "comparisons": rows},
        table(f"this device against {theirs.device}", columns, [[row[c] for c in columns] for row in rows]),
        table("", ("operator", "state"), list(summary.items())),
    )
    return 1 if "differs" in summary.values() else 0


def _comparisons(
    here: Session, call: Recorded, theirs: Theirs, strict: bool
) -> Iterator[tuple[Entry | None, Comparison]]:
    """Each entry of theirs for ``call``'s problem, and how our digests compare with its."""
    from kalign_core.verifier.against import Comparison, compare, matching

    key = here.key(call.kernel, call.problem, call.device)
    entries = matching(theirs, key)
    if not entries:
        yield None, Comparison("not comparable", f"no entry for {key.problem} there")
    for entry in entries:
        try:
            yield entry, compare(key, _digests_at(here, call, entry.tuned_at, strict), entry)
        except (NotTunable, CandidateFailed) as error:
            yield entry, Comparison("not comparable", str(error))


def _digests_at(here: Session, call: Recorded, tuned_at: str, strict: bool) -> tuple[str, ...]:
    """Digests of the reference here, at the size that an entry was tuned at where ``call`` can be scaled to it.

    Raises ``NotTunable`` where the reference breaks its promises, of which ``strict`` knows more.
    """
    from kalign_core.cache.key import at_edge
    from kalign_core.records import join_facts
    from kalign_core.verifier.ahead import compile_ahead
    from kalign_core.verifier.bench import Bench
    from kalign_core.verifier.gate import open_gate

    problem = at_edge(call.kernel, call.problem) or call.problem
    if join_facts((d, n) for d, n in problem.dims if d in call.kernel.bucket) != tuned_at:
        problem = call.problem
    with here.platform.on(call.device):
        bench = Bench(here.platform, call.kernel, problem, call.device, strict=strict)
        gate = open_gate(here.plugins, bench, bench.bound(call.kernel.reference_config(problem)))
        compile_ahead(here, gate, (), gate.all_cases())
        gate.check_reference()
    return gate.digests
