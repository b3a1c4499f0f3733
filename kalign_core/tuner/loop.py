"""The tuning of one kernel for one problem, top to bottom.

space and veto -> compile -> one-case byte check -> five launches each, in one graph -> full quick gate on the
leaders -> race against the reference -> gate again -> promote or keep the reference -> an entry with its evidence.

Nothing is timed whose bytes were not checked, and nothing is promoted that the gate refuted. Inputs are made from the
problem; the caller's tensors are never touched. Whatever goes wrong is ``NotTunable`` with the reason, so that the
reference can serve the call, unless the device itself is lost.
"""

from __future__ import annotations

import datetime
import math
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from kalign_core.cache.key import at_edge
from kalign_core.declare import Kernel
from kalign_core.errors import CandidateFailed, DeviceLost, NoMemory, NotNow, NotTunable
from kalign_core.hal.base import Platform, met_a_capture
from kalign_core.hal.torch_compat import nothing_in_force
from kalign_core.isolate import attempt, reason_of
from kalign_core.records import Condition, Config, Entry, EntryKey, Problem, StrategyRecord, Tally, join_facts
from kalign_core.tuner import search
from kalign_core.tuner.build import Builder, Progress
from kalign_core.tuner.compile import CompilePool
from kalign_core.tuner.decide import spoiled, winner
from kalign_core.tuner.failures import Watched, short_of_memory
from kalign_core.tuner.host import host_us
from kalign_core.tuner.measure import Contender, Meter, Noise, alone_on, timing
from kalign_core.tuner.report import EFFORTS, Budget, Effort, Report, effort_named
from kalign_core.tuner.space import Space, space, warn_once
from kalign_core.verifier.bench import Bench
from kalign_core.verifier.gate import open_gate

if TYPE_CHECKING:
    from kalign_core.plugins import Plugins

__all__ = ["EFFORTS", "Effort", "Progress", "Report", "Tuning", "effort_named"]

MEMORY_SHARE = 0.4
RACES = 2  # a spoiled race is run once more
FINALISTS_IN_HASTE = 2
# An interpreter's programs cost milliseconds and its clock ranks nothing: fewer of everything, the same steps.
INTERPRETED = Effort("interpreted", 8, 2, 3)


@dataclass
class Tuning:
    """One tuning: what it works on and what it works with.

    ``incumbent`` is the decision stored so far, ``seeds`` are winners of other problems, which are tried first;
    ``watched`` says what keeps an eye on this process.
    """

    plugins: Plugins
    platform: Platform
    pool: CompilePool
    device: int
    kernel: Kernel
    problem: Problem
    key: EntryKey
    effort: Effort = EFFORTS["normal"]
    incumbent: Entry | None = None
    seeds: Sequence[Config] = ()
    watched: Watched = field(default_factory=Watched)
    progress: Progress = lambda stage, done, total: None
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)

    def run(self) -> Report:
        """Tune.

        Raises ``NotTunable`` with a reason, ``DeviceLost`` where the device is beyond use, ``UnknownName`` for a
        strategy that no plugin provides.
        """
        strategy = search.strategy_named(self.plugins, self.effort.strategy)
        if self.kernel.collective:
            raise NotTunable(f"{self.kernel} is collective", why="ranks would have to time it together")
        if self.platform.capturing():
            raise NotTunable(f"{self.kernel} is being captured", why="tuning would invalidate the graph")
        try:
            with nothing_in_force(), torch.no_grad(), self.platform.on(self.device):
                report = self._run(strategy)
                self.platform.synchronize(self.device)
            return report
        except NotTunable as error:
            raise _of_its_moment(error) from error.__cause__
        except DeviceLost as error:
            raise DeviceLost(f"{error.what} while {self.kernel} was tuned", why=error.why, fix=error.fix) from error
        except Exception as error:
            raise _of_its_moment(self._given_up(error)) from error
        finally:
            self.pool.failures.flush()

    def _run(self, strategy: StrategyRecord) -> Report:
        self._budget = Budget(self.effort.budget_s, self.clock)
        at = self._size()
        model = self.platform.model(self.device)
        self._effort = self.effort if model.measurable else self._reduced()
        self._report = Report(self.kernel, at, self.kernel.reference_config(at))
        found = space(self.plugins, self.platform.name, self.platform.launch_options, self.kernel, at, model)
        self._report.refused += found.refused
        self._bench = Bench(self.platform, self.kernel, at, self.device)
        self._bench.usual_inputs()  # what is wrong with them is told before minutes of compiling
        self._builder = Builder(
            self._bench, self.pool, self.key, self._report, self._budget, self.progress, self.watched
        )
        contenders = self._build(found)
        finalists = self._narrow(strategy, contenders)
        finalists, condition = self._race(finalists)
        best = self._decide(finalists)
        self._report.entry = self._entry(best, condition)
        return self._report

    def _build(self, found: Space) -> list[Contender]:
        """Compile the candidates while the reference is held to its promises, then check each on one case."""
        report, builder = self._report, self._builder
        with report.timed("gate"):
            self._home = builder.bind(report.reference)
        report.candidates = min(len(found.candidates) - 1, self._effort.candidates)
        configs = [report.reference, *builder.untried(self._wanted(found))[: self._effort.candidates]]
        with builder.compiling(configs, self._effort.compile_deadline_s) as compiling:
            with report.timed("gate"):
                self._gate = open_gate(self.plugins, self._bench, self._home.bound)
                self._gate.check_reference()
            with report.timed("compile"):
                configs = builder.collect(compiling, configs, report.reference)
        with report.timed("check"):
            return builder.first_check(self._gate, configs)

    def _narrow(self, strategy: StrategyRecord, contenders: Sequence[Contender]) -> list[Contender]:
        """Time everything roughly, and hold the leaders to the whole gate."""
        report = self._report
        self._meter = Meter(self.platform, self._bench, pressed=self._budget.spent)
        self._kind = self._meter.decisive
        with report.timed("search"), alone_on(self.device):
            self._time_reference()
            finalists = self._search(strategy, contenders)
        self.platform.synchronize(self.device)  # a device that is lost is nobody's failed launch
        report.tally = Tally(timed=len(contenders) + 1)
        self._builder.sift([contender for contender in contenders if contender.out])
        self._tell_best("time", len(contenders), [contender.rough_us for contender in finalists])
        with report.timed("compile"):
            finalists = self._builder.precompile(self._gate, finalists, self._effort.compile_deadline_s)
        with report.timed("gate"):
            return self._builder.sift(self._examined(finalists))

    def _race(self, finalists: Sequence[Contender]) -> tuple[list[Contender], Condition]:
        """Measure reference and finalists interleaved, once more where that was spoiled; gives the last condition."""
        report, condition = self._report, Condition()
        with report.timed("race"), alone_on(self.device):
            for _ in range(RACES):
                for contender in (self._home, *finalists):
                    contender.warm, contender.cold = [], []
                before = self.platform.condition(self.device)
                racing = [contender for contender in finalists if not contender.out]
                self._meter.race(self._home, racing, self._effort.rounds, self._kind)
                self.platform.synchronize(self.device)
                self._require_reference()
                condition = self.platform.condition(self.device)
                report.reason = spoiled(before, condition, self._home, self._kind, report.noise or Noise())
                if not report.reason:
                    break
        alive = self._builder.sift(finalists)
        medians = [_median(contender.readings(self._kind)) for contender in (*alive, self._home)]
        self._tell_best("race", len(finalists), [median for median in medians if median])
        return alive, condition

    def _tell_best(self, stage: str, count: int, times_us: Sequence[float]) -> None:
        """Tell that ``count`` candidates were measured, and the best of ``times_us`` beside the reference's."""
        self.progress(stage, count, count)
        finite = [time_us for time_us in (*times_us, self._home.rough_us) if math.isfinite(time_us)]
        if finite:
            reference_us = _median(self._home.readings(self._kind)) or self._home.rough_us
            self.progress("best", round(1000 * min(finite)), round(1000 * reference_us))

    # --- what to try ----------------------------------------------------------------------------------------------

    def _reduced(self) -> Effort:
        """The effort on an interpreter."""
        return replace(INTERPRETED, compile_deadline_s=self.effort.compile_deadline_s)

    def _size(self) -> Problem:
        """The size to tune at: the bucket's upper edge where that fits in memory, else the caller's own."""
        edge = at_edge(self.kernel, self.problem)
        if edge is None or edge == self.problem:
            return self.problem
        free = self.platform.free_bytes(self.device)
        needed = 3 * Bench(self.platform, self.kernel, edge, self.device).bytes_per_set()
        return edge if free is None or needed < MEMORY_SHARE * free else self.problem

    def _wanted(self, found: Space) -> list[Config]:
        """The candidates in the order to try them: a stored winner, those of other problems, what plugins know."""
        stored = (self.incumbent.config,) if self.incumbent is not None else ()
        place = {config: number for number, config in enumerate(dict.fromkeys((*stored, *self.seeds)))}
        return sorted(found.candidates[1:], key=lambda config: place.get(config, len(place)))

    # --- timing ---------------------------------------------------------------------------------------------------

    def _time_reference(self) -> None:
        """How long the reference takes, roughly, and how noisy the machine is: the reference against itself."""
        home = self._home
        self._meter.rough([home], 5, 3)
        if not home.out:
            self._report.noise = self._meter.noise(home, self._effort.rounds, self._kind)
        self._require_reference()

    def _require_reference(self) -> None:
        """Raise ``NotTunable`` where the reference failed, or left other bytes, while it was timed."""
        if self._home.out:
            raise NotTunable(
                f"{self.kernel} cannot be tuned: its reference cannot be timed",
                why=str(self._home.refutation or self._home.failure),
            )

    def _search(self, strategy: StrategyRecord, contenders: Sequence[Contender]) -> list[Contender]:
        """The finalists, best first; a stored winner is always among them."""
        most = FINALISTS_IN_HASTE if self._budget.spent() else self._effort.finalists
        race = search.Race(tuple(contenders), most, self._meter)
        outcome = attempt(_leaders, strategy.search, race)
        if outcome.error is not None:
            if isinstance(outcome.error, (DeviceLost, NotNow)) or strategy.search is search.racing:
                raise outcome.error
            self.platform.synchronize(self.device)
            warn_once(f"search strategy {strategy.name} failed ({outcome.reason}); using racing")
        chosen = outcome.value if outcome.error is None else _leaders(search.racing, race)
        stored = [c for c in contenders if self._is_incumbent(c) and not c.out and c not in chosen]
        return [*chosen, *stored]

    def _examined(self, contenders: Sequence[Contender]) -> Sequence[Contender]:
        """``contenders`` after the full quick gate, which says of those that did not pass why they are out."""
        self.progress("gate", 0, len(contenders))
        verdicts = self._gate.examine([contender.bound for contender in contenders])
        self.platform.synchronize(self.device)
        for contender, verdict in zip(contenders, verdicts, strict=True):
            contender.failure = contender.launch.failure
            contender.refutation = None if contender.failure else verdict.refutation
        return contenders

    # --- deciding -------------------------------------------------------------------------------------------------

    def _decide(self, finalists: Sequence[Contender]) -> Contender:
        """The winner, gated once more: a race in compiled code shows late."""
        report, alive = self._report, list(finalists)
        with report.timed("gate"):
            while True:
                stored = next((c for c in (self._home, *alive) if self._is_incumbent(c)), None)
                best = winner(self._home, stored, alive, self._kind, report.noise or Noise())
                if best is self._home or self._builder.sift(self._examined([best])):
                    break
                alive.remove(best)
        if best is self._home and not report.reason:
            report.reason = self._inconclusive()
        report.tally = replace(
            report.tally, refused=len(report.refused), failed=len(report.failed), refuted=len(report.refuted)
        )
        return best

    def _inconclusive(self) -> str:
        """Why the reference, though it serves, was not found to be the best, or an empty string."""
        report = self._report
        if report.untried:
            return f"the budget of {self.effort.budget_s:g} s left {report.untried} candidates untried"
        if report.transient and report.tally.timed <= 1:
            return f"no candidate could be timed; {report.transient} failed for want of time or memory"
        return ""

    def _is_incumbent(self, contender: Contender) -> bool:
        return self.incumbent is not None and self.incumbent.config == contender.config

    def _entry(self, best: Contender, condition: Condition) -> Entry | None:
        report, home = self._report, self._home
        decided = timing(best.readings(self._kind))
        if decided is None:
            report.reason = "the clock gave no usable reading of the reference"
            return None
        return Entry(
            key=self.key,
            config=best.config,
            tuned_at=join_facts((dim, size) for dim, size in report.problem.dims if dim in self.kernel.bucket),
            cold_us=_median(best.cold),
            warm_us=_median(best.warm),
            reference_cold_us=_median(home.cold),
            reference_warm_us=_median(home.warm),
            mad_us=round(decided.mad_us, 3),
            host_us=self._host_us(best),
            reference_host_us=self._host_us(home),
            tried=str(report.tally),
            digests=self._gate.digests,
            decided=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z"),
            extra=_circumstances(report.noise or Noise(), condition, best, home),
        )

    def _host_us(self, contender: Contender) -> float | None:
        """What a call of ``contender`` costs the host, microseconds; None where it cannot be told."""
        if self._bench.interpreted:
            return None
        measured = contender.readings(self._kind)
        return host_us(self.platform, self.device, contender.launch, self._meter.sets(1)[0], min(measured))

    def _given_up(self, error: Exception) -> NotTunable:
        """What to say of an error that ended the tuning; raises ``DeviceLost`` where it ended the device."""
        self.platform.synchronize(self.device)
        reason = reason_of(error)
        if short_of_memory(reason):
            traceback.clear_frames(error.__traceback__)  # what they hold is what the call needs
            return NoMemory(f"memory ran out while {self.kernel} was tuned", why=reason, fix="kalign tune, offline")
        if isinstance(error, CandidateFailed):
            return NotTunable(f"the reference launch of {self.kernel} failed: {error.what}")
        return NotTunable(
            f"tuning {self.kernel} ended with {reason}", why="a fault of tuning must not become one of the call"
        )


def _of_its_moment(error: NotTunable) -> NotTunable:
    """``error``, as one that may be gone another time where its words say so."""
    text = str(error)
    kind = NoMemory if short_of_memory(text) else NotNow if met_a_capture(text) else NotTunable
    return error if isinstance(error, kind) else kind(error.what, why=error.why, fix=error.fix)


def _leaders(find: Callable[[search.Race], Iterable[Contender]], race: search.Race) -> list[Contender]:
    """What a strategy found, as far as it is of this race and still in it."""
    return [c for c in dict.fromkeys(find(race)) if c in race.contenders and not c.out][: race.finalists]


def _median(readings: Sequence[float]) -> float | None:
    measured = timing(readings)
    return round(measured.median_us, 3) if measured else None


def _circumstances(noise: Noise, condition: Condition, best: Contender, home: Contender) -> tuple[tuple[str, Any], ...]:
    """The noise, the device's state and the times on a rested device, as far as they are known and differ."""
    facts = {
        "rested_us": _median(best.rested),
        "reference_rested_us": _median(home.rested),
        "noise": round(max(noise.difference, noise.spread), 5),
        "sm_clock_mhz": condition.sm_clock_mhz,
        "temperature_c": condition.temperature_c,
        "power_capped": condition.power_capped or None,
    }
    return tuple((name, value) for name, value in facts.items() if value is not None)
