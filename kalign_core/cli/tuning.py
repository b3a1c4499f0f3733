"""The work of ``kalign tune``, done in this process: what to tune, and the rows that say how it went.

Used by the worker process that the command starts, and by the command itself where it is asked to stay in one process.
Prints nothing: who watches is told.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from kalign_core import context
from kalign_core.cli import problems
from kalign_core.errors import CandidateFailed, NotTunable
from kalign_core.observer import Observer
from kalign_core.records import Entry

if TYPE_CHECKING:
    from kalign_core.declare import Kernel
    from kalign_core.observer import Recorded
    from kalign_core.records import Problem
    from kalign_core.session import Session
    from kalign_core.tuner.report import Report

Row = dict[str, Any]
TUNED, HIT, UNSTORED, NOT_TUNABLE, UNTRIED = "tuned", "hit", "not stored", "not tunable", "not tried"
INTERPRETED_LAUNCH_DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class Request:
    """What the command line asked for; plain values that cross processes as JSON."""

    operators: Sequence[str] = ()
    shapes: Sequence[str] = ()
    shapes_file: str | None = None
    dtype: str | None = None
    phase: str = "train"
    effort: str = "normal"
    strategy: str = "racing"
    jobs: int | None = None
    retune: bool = False
    launch_deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What there is to do: a label for each piece of work, and where its decisions go."""

    labels: Sequence[str]
    platform: str
    file: str | None


class Watcher(Protocol):
    """Who is told how the work goes."""

    def kernel(self, begun: Row, reference: str) -> None:
        """The tuning of one kernel begins; ``begun`` are the fields that its row will have."""

    def progress(self, what: str, done: int, total: int) -> None:
        """As ``tuner.build.Progress``."""


class InProcess:
    """Tunes in this process, in ``here``."""

    def __init__(self, here: Session, request: Request, watcher: Watcher) -> None:
        self._here, self._request = here, request
        here.observer = Telling(watcher)
        self._work: list[problems.Work] = []

    def plan(self) -> Plan:
        """What to do; raises ``KalignError`` for a request that cannot be met."""
        from kalign_core.tuner.compile import CompilePool
        from kalign_core.tuner.report import effort_named
        from kalign_core.tuner.search import strategy_named

        here, asked = self._here, self._request
        strategy = strategy_named(here.plugins, asked.strategy)  # a wrong name is told also where all are hits
        effort = replace(effort_named(asked.effort), strategy=strategy.name)
        file = Path(asked.shapes_file) if asked.shapes_file else None
        self._work = problems.chosen(here, asked.operators, asked.shapes, file, asked.dtype, asked.phase)
        if asked.jobs:
            here._pool = CompilePool(asked.jobs)
        device = here.platform.devices()[0]
        here.observer.effort = replace(effort, launch_deadline_s=self._launch_deadline_s(effort.launch_deadline_s))
        path = here.store.path(here.facts(device).identity)
        return Plan([str(item) for item in self._work], here.platform.name, str(path) if path else None)

    def _launch_deadline_s(self, usual_s: float) -> float:
        """Seconds one launch may take: as asked for, else as usual, else very many where launches are interpreted."""
        if self._request.launch_deadline_s:
            return self._request.launch_deadline_s
        model = self._here.platform.model(self._here.platform.devices()[0])
        return INTERPRETED_LAUNCH_DEADLINE_S if model.interpreted else usual_s

    def tune(self, number: int, budget_s: float = math.inf, skip: int = 0) -> Iterator[Row]:
        """Tune the kernels of one piece of work but the first ``skip``, within ``budget_s`` seconds; a row for each."""
        import torch

        from kalign_core.api import recorded_forms

        here, item = self._here, self._work[number]
        device = torch.device(here.platform.device_type)
        end = time.monotonic() + budget_s
        with context.using(phase=item.phase):
            calls = recorded_forms(item.operator, item.sizes, item.dtype, device)
            for call in calls[skip:]:
                yield self._row(call, lambda: end - time.monotonic())

    def close(self) -> bool:
        """End what was started; whether all that was decided is on disk."""
        return self._here.close()

    def _row(self, call: Recorded, left_s: Callable[[], float]) -> Row:
        here = self._here
        key = here.key(call.kernel, call.problem, call.device)
        begun: Row = {"kernel": call.kernel.name, "problem": key.problem, "args": key.args,
                      "phase": key.phase, "device": call.device}  # fmt: skip
        entry = None if self._request.retune else here.lookup(call.kernel, call.problem, call.device)
        if entry is not None:
            return {**begun, "how": HIT, **numbers(entry)}
        if left_s() <= 0:
            return {**begun, "how": UNTRIED, "reason": "the budget is spent"}
        assert isinstance(here.observer, Telling)
        here.observer.watcher.kernel(begun, str(call.kernel.reference_config(call.problem)))
        row = {**begun, **self._tuned(call, left_s())}
        if row["how"] == TUNED and not here.store.flush():  # what is told as kept survives whatever happens next
            row |= {"how": UNSTORED, "reason": "it could not be written"}
        return row

    def _tuned(self, call: Recorded, budget_s: float) -> Row:
        try:
            report, stored = self._here.tune(call.kernel, call.problem, call.device, budget_s=budget_s)
        except (NotTunable, CandidateFailed) as error:
            return {"how": NOT_TUNABLE, "reason": str(error)}
        reason = report.reason if stored else report.reason or "it could not be written"
        return {"how": TUNED if stored else UNSTORED, "reason": reason, **_fate(report)} | (
            numbers(report.entry) if report.entry else {}
        )


class Telling(Observer):
    """Passes on what a session tells of its tunings."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher = watcher

    def started(self, kernel: Kernel, problem: Problem) -> Any:
        return self.watcher.progress


def _fate(report: Report) -> Row:
    tally = report.tally
    return {
        "refused": tally.refused, "failed": tally.failed, "refuted": tally.refuted, "timed": tally.timed,
        "hung": report.hung, "untried": report.untried,
        "duplicates": report.duplicates, "inert_knobs": list(report.inert),
        "failures": [f"{config}: {why}" for config, why in report.failed],
        "refutations": [f"{config}: {refutation}" for config, refutation in report.refuted],
        "repeats": [refutation.repeat for _, refutation in report.refuted if refutation.repeat],
        "seconds": {step: round(value, 3) for step, value in report.seconds.items()},
    }  # fmt: skip


def numbers(entry: Entry) -> Row:
    """The fields of a row that say what was decided and measured."""
    cold = entry.key.phase != "decode" and entry.cold_us is not None and entry.reference_cold_us is not None
    winner, reference = (entry.cold_us, entry.reference_cold_us) if cold else (entry.warm_us, entry.reference_warm_us)
    return {
        "config": str(entry.config),
        "decided_on": "cold" if cold else "warm",
        "reference_us": reference,
        "winner_us": winner,
        "gain": round(reference / winner, 3) if winner and reference else None,
        "cold_us": entry.cold_us, "warm_us": entry.warm_us,
        "reference_cold_us": entry.reference_cold_us, "reference_warm_us": entry.reference_warm_us,
        "host_us": entry.host_us, "reference_host_us": entry.reference_host_us,
        "mad_us": entry.mad_us, "tried": entry.tried, "decided": entry.decided,
    }  # fmt: skip
