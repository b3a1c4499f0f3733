"""From configurations to launches that may be timed: compiled side by side, bound, and checked on one case.

What fails costs that candidate and nothing else; who is to blame decides whether it is remembered. Two configurations
that compile to the same code for the same grid are one candidate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kalign_core.declare import lower
from kalign_core.errors import CandidateFailed, DeviceLost, NotTunable
from kalign_core.isolate import attempt, reason_of
from kalign_core.records import Config, EntryKey, Refutation
from kalign_core.tuner.compile import Compiled, CompilePool, Compiling
from kalign_core.tuner.failures import Fault, Guarded, Watched, of_the_moment, short_of_memory, timeout_s
from kalign_core.tuner.inert import inert_knobs
from kalign_core.tuner.measure import Contender
from kalign_core.tuner.report import Budget, Report
from kalign_core.tuner.space import declaration_order, warn_once
from kalign_core.tuner.targets import does_not_fit
from kalign_core.verifier.ahead import UNIMPORTABLE, compiled_here, problems_apart
from kalign_core.verifier.bench import Bench
from kalign_core.verifier.gate import Gate

Progress = Callable[[str, int, int], None]
"""Told (what, done, total): how many candidates of how many were taken through ``compile``, ``check``, ``time``,
``gate`` and ``race``; how many of them are ``refused``, ``failed``, ``hung``, ``refuted``; and the ``best`` time beside
the reference's, in nanoseconds."""


@dataclass
class Builder:
    """Builds the candidates of one tuning and keeps the books on those that fall by the wayside."""

    bench: Bench
    pool: CompilePool
    key: EntryKey
    report: Report
    budget: Budget
    progress: Progress
    watched: Watched = field(default_factory=Watched)

    def __post_init__(self) -> None:
        bench = self.bench
        self.platform, self.device = bench.platform, bench.device
        self.kernel, self.problem = bench.kernel, bench.problem
        self.model = self.platform.model(self.device)
        self._sample: tuple[Any, ...] = ()

    # --- the books ------------------------------------------------------------------------------------------------

    def untried(self, configs: Sequence[Config]) -> list[Config]:
        """Those of ``configs`` that are not known to fail here; the others are reported as before."""
        fresh = []
        for config in configs:
            lowered = lower(self.kernel, self.problem, config)
            fallen = self.watched.fallen.get((self.kernel.name, config))
            fault = self.pool.failures.recall(self.key, self.model.target, lowered, self.watched.deadline_s)
            if fallen is not None:
                self.note(config, fallen.reason, fallen.transient or self._is_shared(fallen.reason))
            elif fault is not None:
                self._report(config, fault)
            else:
                fresh.append(config)
        self.pool.failures.flush()  # what cost a process its life must be known before the next one dies
        return fresh

    def _is_shared(self, reason: str) -> bool:
        """Whether what ran out of time may have waited for somebody else's work on the device."""
        return timeout_s(reason) is not None and bool(self.platform.condition(self.device).foreign_processes)

    def note(self, config: Config, fault: Fault, transient: bool = False) -> None:
        """Report a candidate that is out; its own fault is remembered, a fault of the moment is counted."""
        self._report(config, fault)
        if transient or (isinstance(fault, str) and of_the_moment(fault)):
            self.report.transient += 1
        elif isinstance(fault, str) or fault.argument:  # a check that raised tells of the check
            lowered = lower(self.kernel, self.problem, config)
            self.pool.failures.remember(self.key, self.model.target, lowered, fault)

    def _report(self, config: Config, fault: Fault) -> None:
        report = self.report
        if isinstance(fault, Refutation):
            report.refuted.append((config, fault))
        else:
            report.failed.append((config, fault))
            report.hung += timeout_s(fault) is not None
        for name, count in self.out().items():
            self.progress(name, count, report.candidates)

    def out(self) -> dict[str, int]:
        """How many candidates are out, by why."""
        report = self.report
        failed = len(report.failed) - report.hung
        return {"refused": len(report.refused), "failed": failed, "hung": report.hung, "refuted": len(report.refuted)}

    def sift(self, contenders: Sequence[Contender]) -> list[Contender]:
        """The contenders that are still in; the others are noted."""
        for contender in contenders:
            if contender.out:
                self.note(contender.config, contender.refutation or contender.failure)
        return [contender for contender in contenders if not contender.out]

    # --- compiling ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def compiling(self, configs: Sequence[Config], deadline_s: float) -> Iterator[Compiling | None]:
        """Compile ``configs`` while the block runs; None where that is left to the binding."""
        target = self.platform.compile_target(self.device)
        if target is None or not configs:
            yield None
        elif self.kernel.import_path is None:
            self._compiles_here(UNIMPORTABLE)
            yield None
        else:
            jobs = [lower(self.kernel, self.problem, config) for config in configs]
            with self.pool.start(jobs, target, deadline_s) as compiling:
                yield compiling

    def collect(self, compiling: Compiling | None, configs: Sequence[Config], reference: Config) -> list[Config]:
        """Wait for what compiles; gives the configurations that did, fit the device and are no duplicates."""
        if compiling is None:
            return [config for config in configs if config != reference]
        results: dict[Config, Compiled] = {}
        for position, result in compiling.results(self.budget.left_s):
            results[configs[position]] = result
            self.progress("compile", len(results), len(configs))
        unimportable = next((result.failure for result in results.values() if result.unimportable), "")
        if unimportable:
            self._compiles_here(unimportable)
            return [config for config in configs if config != reference]
        self.report.untried += sum(config not in results for config in configs if config != reference)
        return self._distinct(results, configs, reference)

    def _distinct(self, results: dict[Config, Compiled], configs: Sequence[Config], reference: Config) -> list[Config]:
        """Of configurations with the same code and grid the first by declaration stands for all, or the reference."""
        kept: set[Config] = set()
        seen, codes = set(), {}
        for config in sorted(results, key=lambda c: (c != reference, declaration_order(self.kernel, c))):
            result = results[config]
            same = (result.code, self.kernel.grid(self.problem, config))
            reason = does_not_fit(result, self.model)
            if not result.failure:
                codes[config] = same
            if config == reference:
                seen.add(same)
            elif result.failure:
                self.note(config, result.failure, result.transient)
            elif reason is not None:
                self.report.refused.append((config, reason))
            elif same in seen:
                self.report.duplicates += 1
            else:
                seen.add(same)
                kept.add(config)
        self.report.inert = inert_knobs(codes)
        return [config for config in configs if config in kept]

    def precompile(self, gate: Gate, contenders: Sequence[Contender], deadline_s: float) -> list[Contender]:
        """Compile the code that the gate runs beside the code under test; gives those whose compilers live through it.

        The gate binds such code in this process: it finds it in the compiler's cache, and no candidate may bring its
        compiler down here that it has not survived elsewhere.
        """
        target = self.platform.compile_target(self.device)
        alive = {contender.config: contender for contender in contenders}
        if target is None or self.kernel.import_path is None:
            return list(alive.values())
        others = problems_apart(self.bench, self.kernel, self.report.reference, gate.cases())[1:]
        jobs = [(config, lower(self.kernel, problem, config)) for problem in others for config in alive]
        with self.pool.start([lowered for _, lowered in jobs], target, deadline_s) as compiling:
            for position, result in compiling.results():
                config = jobs[position][0]
                if result.deadly and alive.pop(config, None) is not None:
                    self.note(config, f"{result.failure}, in a form that only the gate runs", result.transient)
        return list(alive.values())

    def _compiles_here(self, reason: str) -> None:
        warn_once(compiled_here(self.kernel, reason))

    # --- binding --------------------------------------------------------------------------------------------------

    def bind(self, config: Config) -> Contender:
        """A contender with ``config``'s launch; raises what the platform raises."""
        self._sample = self._sample or self.bench.sample_arguments()
        launch = Guarded(self.platform.launcher(self.kernel, self.problem, config, self._sample))
        return Contender(config, launch, self.bench.bound(config, launch), declaration_order(self.kernel, config))

    def first_check(self, gate: Gate, configs: Sequence[Config]) -> list[Contender]:
        """The contenders whose bytes are the reference's on a first case: nothing else is ever timed."""
        field = []
        for number, config in enumerate(configs):
            if self.budget.spent():
                self.report.untried += len(configs) - number
                break
            self.progress("check", number + 1, len(configs))
            outcome = attempt(self._checked, gate, config)
            if outcome.error is None:
                field.append(outcome.value)
            else:
                self._blame(config, outcome.error)
        self._sample = ()
        return self.sift(field)

    def _checked(self, gate: Gate, config: Config) -> Contender:
        contender = self.bind(config)
        refutation = gate.one_case(contender.bound)
        self.platform.synchronize(self.device)
        contender.failure = contender.launch.failure
        contender.refutation = None if contender.failure else refutation
        return contender

    def _blame(self, config: Config, error: BaseException) -> None:
        """Hold ``config`` to account for ``error``, unless that is the device's, or memory of ours."""
        if isinstance(error, (DeviceLost, NotTunable)):
            raise error
        self.platform.synchronize(self.device)  # raises where the device is lost, which need not be this one's doing
        if isinstance(error, CandidateFailed):
            self.note(config, error.what)
            return
        if short_of_memory(reason_of(error)):
            raise error
        self.note(config, reason_of(error))
