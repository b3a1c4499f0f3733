"""The gate: candidates and reference on the same cases, byte for byte, until a case refutes or none is left.

Cases are the outer loop and candidates the inner one, so that inputs and the reference's output are made once per case
and memory holds one case at a time. Testing refutes, it does not prove: what survives is ``not refuted``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from kalign_core.errors import CandidateFailed, DeviceLost, NoMemory, NotTunable
from kalign_core.isolate import Outcome, attempt
from kalign_core.records import ITEM_BYTES, Case, Check, InputFamily, Refutation, Verdict
from kalign_core.verifier.bench import Bench
from kalign_core.verifier.bound import Bound
from kalign_core.verifier.checks import CORE_CHECKS, ONE_CASE, SUITE
from kalign_core.verifier.compare import first_difference
from kalign_core.verifier.flight import random_states
from kalign_core.verifier.inputs import CORE_FAMILIES
from kalign_core.verifier.probes import ORDER_PROBE
from kalign_core.verifier.reference import Reference, describe
from kalign_core.verifier.repeat import command
from kalign_core.verifier.run import Run

if TYPE_CHECKING:
    from kalign_core.plugins import Plugins

_CASES_PER_CHECK = 10_000
_WATCHED = (ONE_CASE.check, "written bytes")
_WROTE = "writes to an input"


@dataclass
class Suspect:
    """One candidate before the gate, and the refutation once there is one.

    ``skipped`` names cases whose code could not be launched: no evidence for it and none against.
    """

    bound: Bound
    refutation: Refutation | None = None
    cases: int = 0
    skipped: list[str] = field(default_factory=list)


class Gate:
    """The suite that candidates of one kernel and problem have to survive on one device.

    ``broken`` says why the suite is none, empty where it is one; a broken suite refutes everything.
    """

    def __init__(self, bench: Bench, reference: Bound, checks: Iterable[Check], broken: str = "") -> None:
        self.bench, self.broken = bench, broken
        self.reference = Reference(bench, reference)
        self.checks = sorted(checks, key=lambda check: check.stage)
        self.digests: tuple[str, ...] = ()

    @property
    def observable(self) -> str:
        """The widest dtype among the outputs compared."""
        problem = self.bench.problem_for(Case("", variant="wide" if self.bench.has_variant("wide") else ""))
        dtypes = [problem.dtype(name) for name in self.bench.kernel.outputs()]
        return max((d for d in dtypes if d != "none"), key=lambda d: ITEM_BYTES[d], default="none")

    def check_reference(self) -> None:
        """Stage 1, and what the kernel promises of itself; raises ``NotTunable`` with the reason.

        Records the digests of the core cases.
        """
        try:
            self.reference.check()
            self.digests = self.reference.digests()
        except CandidateFailed as error:
            raise NotTunable(f"the reference of {self.bench.kernel} cannot be launched: {error.what}") from error
        except torch.OutOfMemoryError as error:
            raise self._no_memory() from error

    def one_case(self, bound: Bound) -> Refutation | None:
        """A first byte check of a few milliseconds; nothing is timed that has not passed it."""
        return self.run_case(bound, ONE_CASE)

    def run_case(self, bound: Bound, case: Case) -> Refutation | None:
        """Hold one candidate to one case."""
        suspect = self._suspect(bound)
        if suspect.refutation is None:
            self._try([suspect], case)
        return suspect.refutation

    def examine(self, bounds: Sequence[Bound]) -> list[Verdict]:
        """Run the whole suite on candidates side by side; one verdict each, in order."""
        suspects = [self._suspect(bound) for bound in bounds]
        for check in self.checks:
            self._run_check(check, suspects)
        return [self._verdict(suspect) for suspect in suspects]

    def _suspect(self, bound: Bound) -> Suspect:
        return Suspect(bound, Refutation("suite", self.broken) if self.broken else None)

    def _verdict(self, suspect: Suspect) -> Verdict:
        return Verdict(
            "refuted" if suspect.refutation else "not refuted",
            suite=SUITE,
            cases=suspect.cases,
            observable=self.observable,
            digests=self.digests,
            refutation=suspect.refutation,
            skipped=tuple(dict.fromkeys(suspect.skipped)),
        )

    def cases(self) -> Iterator[Case]:
        """Every case that candidates may be held to; a check that raises adds none."""
        yield ONE_CASE
        for check in self.checks:
            yield from (case for case in attempt(self._asked, check).value or () if isinstance(case, Case))

    def all_cases(self) -> Iterator[Case]:
        """Those, and the cases that the reference alone is run on."""
        yield from self.reference.cases()
        yield from self.cases()

    # --- one check, one case, one run -----------------------------------------------------------------------------

    def _run_check(self, check: Check, suspects: Sequence[Suspect]) -> None:
        """Run a check's cases; one that raises, or gives something else than cases, refutes."""
        if not _alive(suspects):
            return
        asked = attempt(self._asked, check)
        cases = asked.value or []
        wrong = next((case for case in cases if not isinstance(case, Case)), None)
        if asked.error is not None or wrong is not None:
            reason = f"the check raised {asked.reason}" if asked.error else f"the check gave {wrong!r}, no case"
            _refute(suspects, Refutation(check.name, reason))
        for case in cases:
            if _alive(suspects):
                self._try(_alive(suspects), case)

    def _asked(self, check: Check) -> list[Case]:
        return list(itertools.islice(check.cases(self.bench), _CASES_PER_CHECK))

    def _try(self, suspects: Sequence[Suspect], case: Case) -> None:
        """Run the reference and every suspect on ``case``."""
        made = attempt(self.bench.inputs, case)
        if made.error is not None:
            _refute(suspects, self._unmade(case, made))
            return
        try:
            expected = self.reference.run(case)
            expected.seal_with(self.bench.as_made(case))
        except CandidateFailed as error:
            if not self._needs_other_code(case):
                what = f"the reference of {self.bench.kernel} fails on {describe(case)}: {error.what}"
                raise NotTunable(what) from error
            for suspect in suspects:
                suspect.skipped.append(describe(case))
            return
        except torch.OutOfMemoryError as error:
            raise self._no_memory() from error
        self._compare(suspects, case, expected)

    def _compare(self, suspects: Sequence[Suspect], case: Case, expected: Run) -> None:
        """Hold every suspect to what the reference left behind; they take turns in one piece of memory."""
        room = None
        for suspect in suspects:
            suspect.cases += 1
            try:
                room = room or self.bench.room(case)
                suspect.refutation = self._run(suspect, case, expected, room)
            except torch.OutOfMemoryError as error:
                raise self._no_memory() from error
            if suspect.refutation is not None:
                room = None  # who knows where else it wrote

    def _run(self, suspect: Suspect, case: Case, expected: Run, room: Run) -> Refutation | None:
        """Run one suspect as often as ``case`` says and give what refutes it."""
        # A launch that draws random numbers draws them always: its first cases tell.
        watched = case.check in _WATCHED
        states = random_states(self.bench.torch_device) if watched else ()
        found = self._differing(suspect, case, expected, room)
        if found is not None:
            # The next suspect's inputs are made anew where this one wrote to them.
            changed = self.bench.changed_input(case, room)
            found = replace(found, argument=changed) if found.reason == _WROTE else found
        if found is None and watched and not all(map(torch.equal, states, random_states(self.bench.torch_device))):
            found = Refutation(case.check, "draws from torch's random numbers")
        return None if found is None else self._signed(found, suspect.bound, case)

    def _differing(self, suspect: Suspect, case: Case, expected: Run, room: Run) -> Refutation | None:
        """Launch as often as the case says and compare; the inputs are looked at after the last launch."""
        unlike: list[torch.Tensor] = []
        try:
            launch = suspect.bound.launch_for(self.bench, case)
            with self.bench.ready(launch, case, room) as fire:
                for left in reversed(range(case.repeats)):
                    answer = _launched(fire, expected, room, sealed=not left)
                    unlike.append(answer)  # one by one: a launch that raises leaves those before it
                # Waited for once: a device that the host waits for after every run stands still in between.
                if unlike and bool(unlike[0] if len(unlike) == 1 else torch.stack(unlike).any()):
                    return _shown(fire, case, expected, room, unlike)
        except CandidateFailed as error:
            if self._needs_other_code(case) and not unlike:
                suspect.skipped.append(describe(case))
                return None
            return Refutation(case.check, f"failed to launch: {error.what}")
        except (NotTunable, DeviceLost, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            self.bench.platform.synchronize(self.bench.device)  # raises DeviceLost where the error stays
            return Refutation(case.check, f"failed to launch: {str(error).splitlines()[0] if str(error) else error!r}")
        return None

    def _signed(self, found: Refutation, bound: Bound, case: Case) -> Refutation:
        """``found`` with what it takes to see it again."""
        bench = self.bench
        again = command(bench.kernel, bench.problem, bound.kernel, bound.config, case, bench.device)
        reason = f"{found.reason} ({describe(case)})"
        return replace(found, family=case.family, seed=case.seed, reason=reason, repeat=again)

    def _needs_other_code(self, case: Case) -> bool:
        return bool(case.variant) or any(dim not in self.bench.kernel.bucket for dim, _ in case.dims)

    def _unmade(self, case: Case, made: Outcome) -> Refutation:
        """What it means that a case's inputs could not be made; raises where that is no fault of the case."""
        if isinstance(made.error, torch.OutOfMemoryError):
            raise self._no_memory() from made.error
        self.bench.platform.synchronize(self.bench.device)
        return Refutation(case.check, f"making its inputs raised {made.reason}", family=case.family, seed=case.seed)

    def _no_memory(self) -> NoMemory:
        self.bench.renew_inputs()
        return NoMemory(
            f"{self.bench.kernel}: the device has not the memory to check candidates",
            why=f"inputs and two sets of outputs take up to {2 * self.bench.bytes_per_set()} bytes",
        )


def _launched(fire: Callable[[], object], expected: Run, room: Run, *, sealed: bool) -> torch.Tensor:
    """Launch into ``room`` and say on the device whether it differs from ``expected``, the inputs if ``sealed`` too."""
    room.clear()
    fire()
    if sealed:
        room.seal()
    return expected.unlike(room, sealed=sealed)


def _shown(
    fire: Callable[[], object], case: Case, expected: Run, room: Run, unlike: Sequence[torch.Tensor]
) -> Refutation:
    """What differed where ``unlike`` says that some runs did; all but the last one are overwritten and run again."""
    again = iter(unlike[:-1])
    differs = bool(unlike[-1])
    while not differs and next(again, None) is not None:
        differs = bool(_launched(fire, expected, room, sealed=False))
    if differs:
        return _difference(case, expected, room)
    often = sum(map(bool, unlike))
    return Refutation(case.check, f"bytes differ in {often} of {len(unlike)} runs, and in none of as many more")


def _difference(case: Case, expected: Run, room: Run) -> Refutation:
    """What tells two runs apart that do not agree: an output, or else an input that was written to."""
    name = expected.differing(room)
    if not name:
        return Refutation(case.check, _WROTE)
    return first_difference(case.check, name, expected.outputs[name], room.outputs[name])


def _alive(suspects: Sequence[Suspect]) -> list[Suspect]:
    return [suspect for suspect in suspects if suspect.refutation is None]


def _refute(suspects: Sequence[Suspect], refutation: Refutation) -> None:
    for suspect in _alive(suspects):
        suspect.refutation = refutation


def open_gate(plugins: Plugins, bench: Bench, reference: Bound) -> Gate:
    """The gate for one bench: the core suite and whatever plugins add.

    A plugin that raises, gives something else or takes a name of the core's, and a suite without the core's or that
    lets a known bad kernel pass, refutes every candidate: silence must not pass for evidence.
    """
    from kalign_core.verifier.selftest import blind_spot  # which opens gates itself

    model = bench.platform.model(bench.device)
    kernel, problem = bench.kernel, bench.problem
    faults: list[str] = []
    families = _gathered(plugins, "kalign_inputs", InputFamily, faults, kernel=kernel, problem=problem, model=model)
    checks = _gathered(plugins, "kalign_checks", Check, faults, kernel=kernel, problem=problem)
    bench.families.clear()
    for plugin, family in families:
        if family.name in bench.families:
            faults.append(f"plugin {plugin} redefines the input family {family.name!r}")
        bench.families.setdefault(family.name, family)
    missing = {c.name for c in CORE_CHECKS} - {c.name for _, c in checks}
    missing |= {f.name for f in (*CORE_FAMILIES, ORDER_PROBE)} - set(bench.families)
    if missing:
        faults.append(f"the core suite is missing: {', '.join(sorted(missing))}")
    suite = [check for _, check in checks]
    dtypes = sorted({arg.dtype for arg in problem.args if arg.is_tensor and kernel.args[arg.name].kind == "data"})
    if not faults:
        faults += filter(None, [blind_spot(suite, bench.families, dtypes)])
    return Gate(bench, reference, suite, faults[0] if faults else "")


def _gathered(plugins: Plugins, hook: str, kind: type, faults: list[str], **asked: Any) -> list[tuple[str, Any]]:
    """What plugins give for ``hook``, each with its plugin; what is wrong with an answer goes to ``faults``."""
    found: list[tuple[str, Any]] = []
    for answer in plugins.ask(hook, **asked):
        if answer.error is not None:
            faults.append(f"plugin {answer.plugin} raised {answer.error!r} in {hook}")
            continue
        values = answer.value if isinstance(answer.value, (list, tuple)) else [answer.value]
        for value in values:
            if isinstance(value, kind):
                found.append((answer.plugin, value))
            elif answer.value is not None:
                faults.append(f"plugin {answer.plugin} gave {value!r} in {hook}, not {kind.__name__}")
    return found
