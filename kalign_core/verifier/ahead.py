"""What the gate will bind in this process, compiled by the session's processes first.

Binding compiles whatever the compiler's cache does not hold: one layout after the other, in the caller's process,
which a compiler that aborts or hangs takes along. Compiled ahead, all is done side by side, the binding finds it in the
cache, and code that cost a compile process its life is never compiled here. How processes compile is the pool's affair.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kalign_core.declare import Kernel, Lowered, lower
from kalign_core.isolate import attempt
from kalign_core.records import Case, Config, Problem

if TYPE_CHECKING:
    from kalign_core.session import Session
    from kalign_core.verifier.bench import Bench
    from kalign_core.verifier.bound import Bound
    from kalign_core.verifier.gate import Gate

UNIMPORTABLE = "it is defined in __main__, a notebook or a function"


def problems_apart(bench: Bench, kernel: Kernel, config: Config, cases: Iterable[Case]) -> list[Problem]:
    """The bench's problem, then those of ``cases`` for which ``kernel`` under ``config`` is other code, each once.

    A case that the bench has no problem for is left out: running it says why.
    """
    found: dict[Lowered, Problem] = {lower(kernel, bench.problem, config): bench.problem}
    for case in cases:
        problem = attempt(bench.problem_for, case).value
        if problem is not None:
            found.setdefault(lower(kernel, problem, config), problem)
    return list(found.values())


def compile_ahead(here: Session, gate: Gate, bounds: Iterable[Bound], cases: Iterable[Case]) -> None:
    """Compile what the reference of ``gate`` and ``bounds`` run on ``cases``, in the compile processes of ``here``.

    What ends its process there becomes a launch that fails here. Kernels that no process can import are compiled by
    the binding, which is said once.
    """
    bench, asked = gate.bench, list(cases)
    target = here.platform.compile_target(bench.device)
    jobs: dict[Lowered, None] = {}
    for bound in (gate.reference.bound, *bounds):
        kernel = bound.kernel
        if target is not None and kernel is not None and kernel.import_path is None:
            here.say(compiled_here(kernel, UNIMPORTABLE))
        elif target is not None and kernel is not None:
            problems = problems_apart(bench, kernel, bound.config, asked)
            jobs |= dict.fromkeys(lower(kernel, problem, bound.config) for problem in problems)
    if target is not None and jobs:
        _compile(here, bench, list(jobs), target)


def _compile(here: Session, bench: Bench, jobs: list[Lowered], target: tuple[str, int | str, int]) -> None:
    from kalign_core.tuner.report import EFFORTS

    effort = here.observer.effort or EFFORTS["normal"]
    for position, result in here.pool.compile(jobs, target, effort.compile_deadline_s):
        if result.deadly:
            bench.deadly[jobs[position]] = result.failure
        elif result.unimportable or result.transient:
            here.say(compiled_here(jobs[position].kernel, result.failure))


def compiled_here(kernel: Kernel | str, reason: str) -> str:
    """What to say of a kernel that no compile process takes."""
    return f"{kernel} is compiled in this process, where a compiler that dies takes it along: {reason}"
