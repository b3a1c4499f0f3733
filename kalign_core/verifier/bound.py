"""A configuration before the gate: its launch for the problem, and how to bind it again where other code is needed.

Another layout, width or output dtype is other compiled code, and launching code that was compiled for aligned tensors
on unaligned ones would be the gate's mistake. What needs other code is decided by ``lower``, which decides it for the
compiler too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kalign_core.declare import Kernel, Lowered, lower
from kalign_core.errors import CandidateFailed
from kalign_core.records import Case, Config, Problem

if TYPE_CHECKING:
    from kalign_core.hal.base import Launch
    from kalign_core.verifier.bench import Bench

Code = tuple[Lowered, tuple[tuple[str, int], ...]]


class Bound:
    """``config`` of ``kernel`` as a launch on one bench; ``kernel`` is the bench's own unless said."""

    def __init__(
        self, bench: Bench, config: Config, launch: Launch | None = None, kernel: Kernel | None = None
    ) -> None:
        self.config = config
        self.kernel: Kernel | None = kernel or bench.kernel
        self._launch = launch
        self._others: dict[Code, Launch] = {}
        self._known: dict[object, Launch] = {}

    def launch_for(self, bench: Bench, case: Case) -> Launch:
        """The launch that serves ``case``; raises ``CandidateFailed`` where there is none."""
        found = self._known.get((case.variant, case.dims))
        if found is None:
            found = self._known[case.variant, case.dims] = self._found(bench, case)
        return found

    def _found(self, bench: Bench, case: Case) -> Launch:
        kernel = self.kernel or bench.kernel
        if self._launch is None:
            self._launch = self._bind(bench, kernel, Case("binding"))
        if not case.variant and all(dim in kernel.bucket for dim, _ in case.dims):
            return self._launch
        code = _code_for(kernel, bench.problem_for(case), self.config)
        if code == _code_for(kernel, bench.problem, self.config):
            return self._launch
        if code not in self._others:
            self._others[code] = self._bind(bench, kernel, case)
        return self._others[code]

    def _bind(self, bench: Bench, kernel: Kernel, case: Case) -> Launch:
        problem = bench.problem_for(case)
        deadly = bench.deadly.get(lower(kernel, problem, self.config)) if bench.deadly else None
        if deadly is not None:
            raise CandidateFailed(deadly)
        return bench.platform.launcher(kernel, problem, self.config, bench.sample_arguments(case))


def _code_for(kernel: Kernel, problem: Problem, config: Config) -> Code:
    """What decides compiled code and grid, bucketed sizes apart."""
    fixed = tuple((dim, size) for dim, size in problem.dims if dim not in kernel.bucket)
    return lower(kernel, problem, config), fixed


class Fixed(Bound):
    """A launch that is no compiled kernel and serves every case itself: a library's routine, a model in a test."""

    def __init__(self, launch: Launch) -> None:
        self.config, self.kernel, self._fixed = Config(), None, launch

    def launch_for(self, bench: Bench, case: Case) -> Launch:
        return self._fixed
