"""A configuration before the gate: its launch for the problem, and how to bind it again where other code is needed.

Another layout, width or output dtype is other compiled code, and launching code that was compiled for aligned tensors
on unaligned ones would be the gate's mistake. What needs other code is decided by ``lower``, which decides it for the
compiler too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kalign_core.declare import Kernel, Lowered, lower
from kalign_core.records import Case, Config, Problem

if TYPE_CHECKING:
    from kalign_core.hal.base import Launch
    from kalign_core.verifier.bench import Bench

Code = tuple[Lowered, tuple[tuple[str, int], ...]]


class Bound:
    """``config`` of ``kernel`` as a launch on one bench; ``kernel`` is the bench's own unless said."""

    def __init__(self, bench: Bench, config: Config, launch: Launch | None = None, kernel: Kernel | None = None) -> None:
        self.config, self.kernel = config, kernel or bench.kernel
        self._launch = launch
        self._code: Code | None = None
        self._others: dict[Code, Launch] = {}

    def launch_for(self, bench: Bench, case: Case) -> Launch:
        """The launch that serves ``case``; raises ``CandidateFailed`` where there is none."""
        if self._launch is None:
            self._launch = self._bind(bench, bench.problem, Case("binding"))
        problem = bench.problem_for(case)
        if not case.variant and all(dim in self.kernel.bucket for dim, _ in case.dims):
            return self._launch
        if self._code is None:
            self._code = self._code_for(bench.problem)
        code = self._code_for(problem)
        if code == self._code:
            return self._launch
        if code not in self._others:
            self._others[code] = self._bind(bench, problem, case)
        return self._others[code]

    def _code_for(self, problem: Problem) -> Code:
        """What decides compiled code and grid, bucketed sizes apart."""
        fixed = tuple((dim, size) for dim, size in problem.dims if dim not in self.kernel.bucket)
        return lower(self.kernel, problem, self.config), fixed

    def _bind(self, bench: Bench, problem: Problem, case: Case) -> Launch:
        return bench.platform.launcher(self.kernel, problem, self.config, bench.sample_arguments(case))


class Fixed(Bound):
    """A launch that is no compiled kernel and serves every case itself: a library's routine, a model in a test."""

    def __init__(self, launch: Launch) -> None:
        self.config, self._fixed = Config(), launch

    def launch_for(self, bench: Bench, case: Case) -> Launch:
        return self._fixed
