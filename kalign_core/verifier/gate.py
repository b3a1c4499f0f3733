"""The gate: candidates and reference on the same cases, byte for byte, until a case refutes or none is left.

Cases are the outer loop and candidates the inner one, so that inputs and the reference's output are made once per case
and memory holds one case at a time. Testing refutes, it does not prove: what survives is ``not refuted``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from kalign_core.errors import CandidateFailed, NotTunable
from kalign_core.records import ITEM_BYTES, Case, Check, Refutation, Verdict
from kalign_core.verifier.bench import Bench, Run
from kalign_core.verifier.checks import AGREEMENT, CORE_CHECKS, DIGEST_FAMILIES, ONE_CASE, SUITE, batch
from kalign_core.verifier.compare import digest, first_difference, guards_hold, same_bytes

if TYPE_CHECKING:
    from kalign_core.hal.base import Launch
    from kalign_core.plugins import Plugins


@dataclass
class Suspect:
    """One candidate before the gate: its launch, and the refutation once there is one."""

    launch: Launch
    refutation: Refutation | None = None
    cases: int = 0


@dataclass
class Gate:
    """The suite that candidates of one kernel and problem have to survive on one device."""

    bench: Bench
    reference: Launch
    checks: Sequence[Check]
    broken: str = ""
    digests: tuple[str, ...] = field(default=())

    @property
    def observable(self) -> str:
        """The widest dtype among the outputs compared."""
        dtypes = [self.bench.problem.dtype(name) for name in self.bench.kernel.outputs()]
        return max((d for d in dtypes if d != "none"), key=lambda d: ITEM_BYTES[d], default="none")

    # --- the reference --------------------------------------------------------------------------------------------

    def check_reference(self) -> None:
        """Stage 1, and what the kernel promises of itself; raises ``NotTunable`` with the reason.

        Repeated runs agree, inputs and guard bands are left alone, and a row's bytes are the same alone, elsewhere
        and in other company. Records the digests of the core cases.
        """
        case = AGREEMENT
        before = {name: buffer.flat.clone() for name, buffer in self.bench.inputs(case).items()}
        first = self.bench.run(self.reference, case)
        for _ in range(case.repeats):
            self._require(_differs(case, first, self.bench.run(self.reference, case)), "two runs of it disagree")
        for name, flat in before.items():
            if not torch.equal(flat, self.bench.inputs(case)[name].flat):
                raise NotTunable(
                    f"{self.bench.kernel} writes to {name}, which is declared as an input",
                    fix=f"declare {name} as written(...) or accumulated(...)",
                )
        for name, buffer in first.outputs.items():
            if not guards_hold(buffer, case.fill) and self.bench.kernel.args[name].kind != "accumulated":
                raise NotTunable(f"{self.bench.kernel} writes outside {name}")
        self._check_rows()
        self.digests = tuple(self._digests())

    def _check_rows(self) -> None:
        """The reference's own rows on the batch axis, against the rows of the whole problem."""
        dim = self.bench.kernel.rows
        if dim is None:
            return
        whole = Case("batch axis")
        base = self.bench.run(self.reference, whole)
        for case in batch(self.bench):
            run = self.bench.run(self.reference, case)
            for name, buffer in run.outputs.items():
                axis = _row_axis(self.bench, name)
                if axis is None or self.bench.kernel.args[name].kind == "accumulated":
                    continue
                numbers = self.bench.row_numbers(case)
                assert numbers is not None  # the kernel has rows
                here, there = buffer.view.movedim(axis, 0), base.outputs[name].view.movedim(axis, 0)
                kept = torch.arange(len(numbers), device=numbers.device)
                if case.neighbours:
                    kept = torch.tensor(case.kept, device=numbers.device)
                ours = here[kept].contiguous().view(torch.uint8)
                if not torch.equal(ours, there[numbers[kept].long()].contiguous().view(torch.uint8)):
                    raise NotTunable(
                        f"{self.bench.kernel}: rows of {name} depend on their batch ({_describe(case)})",
                        why="a row's bits must not depend on how many rows there are, where it stands or beside what",
                    )

    def _digests(self) -> Iterator[str]:
        for family in DIGEST_FAMILIES:
            if family in self.bench.families:  # a kernel may have no floating-point input
                run = self.bench.run(self.reference, Case("digest", family=family, seed=1))
                yield f"{family}={digest([buffer.view for buffer in run.outputs.values()])}"

    def _require(self, difference: Refutation | None, why: str) -> None:
        if difference is not None:
            raise NotTunable(f"{self.bench.kernel} cannot be tuned: {why}", why=str(difference))

    # --- candidates -----------------------------------------------------------------------------------------------

    def one_case(self, launch: Launch) -> Refutation | None:
        """A first byte check of a few milliseconds; nothing is timed that has not passed it."""
        suspect = Suspect(launch)
        self._try([suspect], ONE_CASE)
        return suspect.refutation

    def examine(self, launches: Sequence[Launch]) -> list[Verdict]:
        """Run the whole suite on ``launches`` side by side; one verdict each, in order."""
        suspects = [Suspect(launch) for launch in launches]
        if self.broken:
            for suspect in suspects:
                suspect.refutation = Refutation("suite", self.broken)
        for check in self.checks:
            self._run_check(check, suspects)
        return [self._verdict(suspect) for suspect in suspects]

    def _run_check(self, check: Check, suspects: Sequence[Suspect]) -> None:
        try:
            for case in check.cases(self.bench):
                alive = [s for s in suspects if s.refutation is None]
                if not alive:
                    return
                self._try(alive, case)
        except (NotTunable, TypeError, ValueError, LookupError, AttributeError) as error:
            for suspect in suspects:
                suspect.refutation = suspect.refutation or Refutation(check.name, f"the check raised {error!r}")

    def _try(self, suspects: Sequence[Suspect], case: Case) -> None:
        expected = self.bench.run(self.reference, case)
        for suspect in suspects:
            suspect.cases += 1
            for _ in range(case.repeats):
                suspect.refutation = self._once(suspect.launch, case, expected)
                if suspect.refutation is not None:
                    break

    def _once(self, launch: Launch, case: Case, expected: Run) -> Refutation | None:
        try:
            return _differs(case, expected, self.bench.run(launch, case))
        except CandidateFailed as error:
            return Refutation(case.check, f"failed to launch: {error.what}", family=case.family, seed=case.seed)

    def _verdict(self, suspect: Suspect) -> Verdict:
        state = "not refuted" if suspect.refutation is None else "refuted"
        return Verdict(
            state,  # type: ignore[arg-type]  # mypy widens the conditional to str
            suite=SUITE,
            cases=suspect.cases,
            observable=self.observable,
            digests=self.digests,
            refutation=suspect.refutation,
        )


def _differs(case: Case, expected: Run, got: Run) -> Refutation | None:
    for name, buffer in expected.outputs.items():
        if not same_bytes(buffer, got.outputs[name]):
            found = first_difference(case.check, name, buffer, got.outputs[name])
            return replace(found, family=case.family, seed=case.seed, reason=f"{found.reason} ({_describe(case)})")
    return None


def _row_axis(bench: Bench, name: str) -> int | None:
    shape = bench.kernel.args[name].shape
    return shape.index(bench.kernel.rows) if bench.kernel.rows in shape else None


def _describe(case: Case) -> str:
    parts = [f"{dim}={size}" for dim, size in case.dims]
    if case.shift:
        parts.append(f"rows shifted by {case.shift}")
    if case.reverse:
        parts.append("rows reversed")
    if case.neighbours:
        parts.append(f"{case.neighbours} neighbours")
    if case.repeats > 1:
        parts.append(f"{case.repeats} runs")
    return ", ".join(parts) or f"{case.family} inputs"


def open_gate(plugins: Plugins, bench: Bench, reference: Launch) -> Gate:
    """The gate for one bench: the core suite and whatever plugins add.

    A plugin that raises, or a core suite that is missing, refutes every candidate: silence must not pass for evidence.
    """
    model = bench.platform.model(bench.device)
    checks: list[Check] = []
    broken = ""
    asked = {
        "kalign_inputs": {"kernel": bench.kernel, "problem": bench.problem, "model": model},
        "kalign_checks": {"kernel": bench.kernel, "problem": bench.problem},
    }
    for hook, arguments in asked.items():
        for answer in plugins.ask(hook, **arguments):
            if answer.error is not None:
                broken = f"plugin {answer.plugin} raised {answer.error!r} in {hook}"
            elif hook == "kalign_inputs":
                for family in _records(answer.value):
                    bench.families.setdefault(family.name, family)
            else:
                checks += _records(answer.value)
    if not {check.name for check in CORE_CHECKS} <= {check.name for check in checks}:
        broken = "the core suite is missing"
    return Gate(bench, reference, sorted(checks, key=lambda check: check.stage), broken)


def _records(value: object) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []
