"""The bench a kernel is run on: makes the arguments of a case, runs a launch into fresh memory, gives back the memory.

Inputs are the case's own, in memory of their own between bands of NaN bytes, never the caller's tensors. They are made
once per case and shared by every candidate run on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from kalign_core.declare import OUTPUTS, Kernel, axis_size
from kalign_core.errors import BadArgument, NotTunable
from kalign_core.records import ITEM_BYTES, Argument, Case, Config, InputFamily, Problem
from kalign_core.verifier.bound import Bound
from kalign_core.verifier.compare import Buffer, copy_of, extent_of, imprint
from kalign_core.verifier.flight import fly
from kalign_core.verifier.making import POISON, Maker, empty, row_numbers
from kalign_core.verifier.variants import VARIANTS, resized, variant

if TYPE_CHECKING:
    from kalign_core.hal.base import Launch, Platform


@dataclass(frozen=True, slots=True)
class Run:
    """What one launch left behind: every output's buffer by name."""

    outputs: dict[str, Buffer]


@dataclass(frozen=True, slots=True)
class _Kept:
    """One input: what makes it that one, its buffer, and its imprint before anything ran."""

    identity: object
    buffer: Buffer
    imprint: torch.Tensor


class Bench:
    """Runs launches of one kernel on cases of one problem on one device."""

    def __init__(
        self, platform: Platform, kernel: Kernel, problem: Problem, device: int, *, strict: bool = False
    ) -> None:
        self.platform, self.kernel, self.problem, self.device = platform, kernel, problem, device
        self.strict = strict
        self.interpreted = platform.model(device).backend == "interpreter"
        self.families: dict[str, InputFamily] = {}
        self.torch_device = torch.device(platform.device_type, *((device,) if device >= 0 else ()))
        self._maker = Maker(kernel, self.families, self.torch_device, self.bytes_per_set())
        self._kept: dict[str, _Kept] = {}
        self._variants: dict[str, Problem | None] = {"": problem}
        self._problems: dict[object, Problem] = {}

    def bound(self, config: Config, launch: Launch | None = None, kernel: Kernel | None = None) -> Bound:
        """``config`` as what stands before the gate; ``launch`` is the one for the bench's problem where there is one.

        ``kernel`` is another declaration with the same run-time parameters, to be held to this bench's kernel.
        """
        return Bound(self, config, launch, kernel)

    # --- what a case looks like -----------------------------------------------------------------------------------

    def has_variant(self, name: str) -> bool:
        """Whether the problem laid out as ``name`` says is another one; raises ``BadArgument`` for an unknown name."""
        return self._variant(name) is not None

    def drop_variant(self, name: str) -> None:
        """Do without the variant ``name``: the reference cannot be launched on it."""
        self._variants[name] = None

    def problem_for(self, case: Case) -> Problem:
        """The bench's problem at the case's sizes and in its layout."""
        known = self._problems.get((case.variant, case.dims))
        if known is None:
            base = self._variant(case.variant)
            if base is None:
                raise NotTunable(f"{self.kernel} has no variant {case.variant!r} of this problem")
            known = resized(self.kernel, base, dict(case.dims)) if case.dims else base
            self._problems[case.variant, case.dims] = known
        return known

    def _variant(self, name: str) -> Problem | None:
        if name not in self._variants:
            if name not in VARIANTS:
                raise BadArgument(f"no variant {name!r} of a problem", why=f"known are {', '.join(VARIANTS)}")
            self._variants[name] = variant(self.kernel, self.problem, name)
        return self._variants[name]

    def row_numbers(self, case: Case) -> torch.Tensor | None:
        """Which row of the whole problem stands where: int32 ``(rows,)``, or None for a kernel without rows."""
        return row_numbers(self.kernel, self.problem, self.problem_for(case), case, self.torch_device)

    @property
    def growing(self) -> str:
        """The dimension that a case may have less of: that of rows, else the first bucketed one, else none."""
        return self.kernel.rows or next(iter(self.kernel.bucket), "")

    def reduced(self, case: Case, elements: int) -> Case:
        """``case`` on the first rows of the problem, so many that no tensor has more than ``elements``, 64 at least.

        Most of what the gate looks for shows in any hundred rows, and making inputs is most of what it costs.
        """
        whole = dict(self.problem.dims).get(self.growing, 0)
        rows = min(whole, max(64, elements // max(1, self._widest_row())))
        return case if rows == whole else replace(case, dims=((self.growing, rows), *case.dims))

    def _widest_row(self) -> int:
        """Elements per row of the tensor that has most of them."""
        sizes = {**dict(self.problem.dims), self.growing: 1}
        shapes = [self.kernel.args[arg.name].shape for arg in self.problem.args if arg.is_tensor]
        return max((math.prod(axis_size(a, sizes) for a in s) for s in shapes if self.growing in s), default=1)

    def bytes_per_set(self) -> int:
        """Bytes of one set of arguments, inputs and outputs."""
        return sum(self.bytes_of(self.problem, arg) for arg in self.problem.args if arg.is_tensor)

    def bytes_of(self, problem: Problem, arg: Argument) -> int:
        """Bytes that one tensor takes, gaps between its rows included."""
        shape = [axis_size(axis, dict(problem.dims)) for axis in self.kernel.args[arg.name].shape]
        return extent_of(shape, arg.strides) * ITEM_BYTES[arg.dtype]

    # --- running --------------------------------------------------------------------------------------------------

    def run(self, launch: Launch, case: Case) -> Run:
        """Launch once on ``case`` and give what it wrote; waits for nothing unless the case asks for a graph."""
        outputs = self.outputs(case)
        fly(self.platform, self.device, launch, self.arguments(case, outputs), case.how)
        return Run(outputs)

    def arguments(self, case: Case, outputs: dict[str, Buffer]) -> tuple[Any, ...]:
        """Run-time arguments of the kernel in parameter order: the case's inputs and ``outputs``."""
        return self._assembled(self.problem_for(case), {**self.inputs(case), **outputs})

    def inputs(self, case: Case) -> dict[str, Buffer]:
        """The input tensors of ``case``; the last case's are kept."""
        problem = self.problem_for(case)
        args = [arg for arg in problem.args if arg.is_tensor and self.kernel.args[arg.name].kind not in OUTPUTS]
        wanted = {arg: self._identity(case, problem, arg) for arg in args}
        # Frees the old ones before making new ones.
        self._kept = {a.name: self._kept[a.name] for a in args if self._is_kept(a.name, wanted[a])}
        numbers = self.row_numbers(case) if len(self._kept) < len(args) else None
        for arg, identity in wanted.items():
            if arg.name not in self._kept:
                made = self._maker.input(case, problem, arg, numbers)
                self._kept[arg.name] = _Kept(identity, made, imprint([made]))
        return {arg.name: self._kept[arg.name].buffer for arg in args}

    def _is_kept(self, name: str, identity: object) -> bool:
        return name in self._kept and self._kept[name].identity == identity

    def _identity(self, case: Case, problem: Problem, arg: Argument) -> object:
        """What an input's bytes depend on; moving rows leaves what has none alone."""
        role = self.kernel.args[arg.name]
        sizes = tuple(dict(problem.dims)[axis.partition("/")[0]] for axis in (*role.shape, *filter(None, [role.bound])))
        moved = (case.shift, case.step, case.neighbours, case.kept) if self.kernel.rows in role.shape else ()
        return (case.family, case.seed, arg, sizes, moved)

    def renew_inputs(self) -> None:
        """Forget the inputs that are kept."""
        self._kept = {}

    def changed_input(self, case: Case) -> str:
        """Name of an input of ``case`` that something wrote to since it was made, or an empty string."""
        buffers = self.inputs(case)
        if not buffers:
            return ""
        now = [imprint([buffer]) for buffer in buffers.values()]
        if torch.equal(torch.cat([self._kept[name].imprint for name in buffers]), torch.cat(now)):
            return ""
        self.renew_inputs()
        fresh = self.inputs(case)
        return next((name for name in fresh if not torch.equal(fresh[name].flat, buffers[name].flat)), "")

    def outputs(self, case: Case) -> dict[str, Buffer]:
        """Fresh memory for every output, filled as the case says; accumulated ones hold the case's numbers."""
        made, problem = {}, self.problem_for(case)
        for name in self.kernel.outputs():
            arg = problem.argument(name)
            if not arg.is_tensor:
                continue
            if self.kernel.args[name].kind == "accumulated":
                made[name] = self._maker.input(case, problem, arg, self.row_numbers(case))
            else:
                made[name] = empty(self.kernel, problem, arg, self.torch_device, case.fill)
        return made

    def outside(self, name: str, case: Case) -> int:
        """The byte around the elements of output ``name``."""
        return POISON if self.kernel.args[name].kind == "accumulated" else case.fill

    def sample_arguments(self, case: Case | None = None) -> tuple[Any, ...]:
        """Arguments of the right kind on the right device, for binding a launch; their contents are arbitrary."""
        problem = self.problem if case is None else self.problem_for(case)
        tensors = [arg for arg in problem.args if arg.is_tensor]
        made = {arg.name: empty(self.kernel, problem, arg, self.torch_device, POISON) for arg in tensors}
        return self._assembled(problem, made)

    def argument_sets(self, count: int) -> list[tuple[Any, ...]]:
        """``count`` sets of arguments for timing, equal in content, each with tensors of its own."""
        case = Case("timing")
        tensors = {**self.inputs(case), **self.outputs(case)}
        self.renew_inputs()
        copies = [{name: copy_of(buffer) for name, buffer in tensors.items()} for _ in range(1, count)]
        return [self._assembled(self.problem, each) for each in (tensors, *copies)]

    def _assembled(self, problem: Problem, tensors: dict[str, Buffer]) -> tuple[Any, ...]:
        values: dict[str, Any] = {arg.name: arg.value for arg in problem.args}
        values |= {name: buffer.view for name, buffer in tensors.items()}
        values |= dict(problem.dims)
        return tuple(values[name] for name in self.kernel.parameters)
