"""The bench a kernel is run on: makes the arguments of a case, runs a launch into fresh memory, gives back the memory.

Inputs are the case's own, in memory of their own between bands of NaN bytes, never the caller's tensors. They are made
once per case and shared by every candidate run on it, or copied for it where there is memory to spare.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from kalign_core.declare import OUTPUTS, Kernel, Lowered, axis_size
from kalign_core.errors import BadArgument, NotTunable
from kalign_core.records import ITEM_BYTES, Argument, Case, Config, InputFamily, Problem
from kalign_core.verifier.bound import Bound
from kalign_core.verifier.compare import Buffer, Seal, copy_of, divided, extent_of, same, seal_words
from kalign_core.verifier.flight import ready
from kalign_core.verifier.making import POISON, Maker, bytes_taken, laid, row_numbers, stand_in
from kalign_core.verifier.run import Run
from kalign_core.verifier.usual import overlay, usual_inputs
from kalign_core.verifier.variants import VARIANTS, resized, variant

if TYPE_CHECKING:
    from kalign_core.hal.base import Launch, Platform

# How much of the problem's own memory a case may take; comparing takes an eighth of what it compares on top.
MEMORY_SHARE, LEAST_MEMORY_BYTES = 1.75, 1 << 24


@dataclass(slots=True)
class _Kept:
    """One tensor of a case's numbers: what makes it that one, and its buffer."""

    identity: object
    buffer: Buffer
    _imprint: torch.Tensor | None = None

    def imprint(self) -> torch.Tensor:
        """The imprint of the buffer when this was first called: before anything is launched on it."""
        if self._imprint is None:
            self._imprint = _imprint_of(self.buffer)
        return self._imprint


def _imprint_of(buffer: Buffer) -> torch.Tensor:
    imprint = torch.empty(seal_words(buffer), dtype=torch.int32, device=buffer.flat.device)
    Seal.of(buffer, imprint).take()
    return imprint


class Bench:
    """Runs launches of one kernel on cases of one problem on one device."""

    def __init__(
        self, platform: Platform, kernel: Kernel, problem: Problem, device: int, *, strict: bool = False
    ) -> None:
        self.platform, self.kernel, self.problem, self.device = platform, kernel, problem, device
        self.strict = strict
        self.interpreted = platform.model(device).interpreted
        self.families: dict[str, InputFamily] = {}
        # Why code is not to be bound in this process: it cost a compile process its life.
        self.deadly: dict[Lowered, str] = {}
        self.torch_device = torch.device(platform.device_type, *((device,) if device >= 0 else ()))
        self._maker = Maker(kernel, self.families, self.torch_device, self.bytes_per_set())
        self._kept: dict[str, _Kept] = {}
        self._variants: dict[str, Problem | None] = {"": problem}
        self._problems: dict[object, Problem] = {}
        self._usual: dict[str, torch.Tensor] | None = None

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

        Most of what the gate looks for shows in any hundred rows, and making inputs is most of what it costs. In a
        variant whose tensors are larger than the problem's, so many that they take little more memory, 16 at least.
        """
        whole = dict(self.problem.dims).get(self.growing, 0)
        rows = min(whole, max(64, elements // max(1, self._widest_row())))
        if case.variant:
            rows = min(rows, max(16, self._affordable(case.variant, whole)))
        return case if rows == whole else replace(case, dims=((self.growing, rows), *case.dims))

    def _affordable(self, variant: str, whole: int) -> int:
        """How many of ``whole`` rows may be run in ``variant`` in the memory that a case may take."""
        problem = self.problem_for(Case("", variant=variant))
        fixed = growing = 0
        for arg in (arg for arg in problem.args if arg.is_tensor):
            role = self.kernel.args[arg.name]
            size = self.bytes_of(problem, arg) * (2 if role.kind in OUTPUTS else 1)
            if self.growing in role.shape:
                growing += size
            else:
                fixed += size
        return int(whole * max(0.0, self._most_bytes() - fixed) / max(1, growing))

    def _most_bytes(self) -> float:
        """How much memory a case may take."""
        return max(MEMORY_SHARE * self.bytes_per_set(), LEAST_MEMORY_BYTES)

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
        run = self.room(case)
        with self.ready(launch, case, run) as fire:
            run.clear()
            fire()
        return run

    def ready(self, launch: Launch, case: Case, run: Run) -> AbstractContextManager[Callable[[], object]]:
        """A function that launches into ``run`` once, the way the case says, as often as it is called."""
        return ready(self.platform, self.device, launch, run.arguments, case.how)

    def room(self, case: Case, *, alone: bool = True) -> Run:
        """Memory for a run of ``case`` and the arguments that lead there; its outputs are arbitrary until cleared.

        It has as many inputs to itself as the case's memory allows, none unless ``alone``.
        """
        problem = self.problem_for(case)
        inputs = self.inputs(case)
        starts = {name: each.buffer for name, each in self._kept.items() if name not in inputs}
        written = [name for name in self.kernel.outputs() if problem.argument(name).is_tensor]
        own = self._affordable_inputs(problem, inputs) if alone else []
        shared = [buffer for name, buffer in inputs.items() if name not in own]
        args = [problem.argument(name) for name in (*written, *own)]
        sizes = [bytes_taken(self.kernel, problem, arg) for arg in args]
        words = torch.empty(sum(sizes) // 4 + sum(map(seal_words, shared)), dtype=torch.int32, device=self.torch_device)
        flats = divided(words.view(torch.uint8), sizes)
        made = {arg.name: laid(self.kernel, problem, arg, flat) for arg, flat in zip(args, flats, strict=True)}
        arguments = self._assembled(problem, {name: buffer.view for name, buffer in {**inputs, **made}.items()})
        outputs, copies = ({name: made[name] for name in names} for names in (written, own))
        run = Run(words, outputs, copies, arguments, shared, starts, case.fill)
        run.seal_with(self._as_made(own))
        return run

    def _affordable_inputs(self, problem: Problem, inputs: Collection[str]) -> list[str]:
        """Inputs that every run of a case can have to itself, as far as the case's memory goes, the smallest first.

        What a run has to itself is compared with the outputs in one step; an imprint takes two steps for each input.
        """
        sizes = {arg.name: bytes_taken(self.kernel, problem, arg) for arg in problem.args if arg.is_tensor}
        sets = {name: 1 if name in inputs else 2 + self._holds_numbers(name) for name in sizes}
        left = self._most_bytes() - sum(sizes[name] * sets[name] for name in sizes)
        chosen = []
        for name in sorted(inputs, key=lambda name: sizes[name]):
            left -= 2 * sizes[name]
            if left < 0:
                break
            chosen.append(name)
        return chosen

    def inputs(self, case: Case) -> dict[str, Buffer]:
        """The input tensors of ``case``; the last case's are kept."""
        kept = self._made(case, self.problem_for(case))
        return {name: each.buffer for name, each in kept.items() if self.kernel.args[name].kind not in OUTPUTS}

    def as_made(self, case: Case) -> list[torch.Tensor]:
        """What a run of ``case`` sees of its inputs where nothing wrote to them: words and imprints, int32."""
        return self._as_made(self._affordable_inputs(self.problem_for(case), self.inputs(case)))

    def _as_made(self, own: Sequence[str]) -> list[torch.Tensor]:
        """The words of the inputs that a run has to itself, and the imprints of the others that are kept."""
        inputs = [name for name in self._kept if self.kernel.args[name].kind not in OUTPUTS]
        imprints = [self._kept[name].imprint() for name in inputs if name not in own]
        return [*(self._kept[name].buffer.words for name in own), *imprints]

    def _made(self, case: Case, problem: Problem) -> dict[str, _Kept]:
        """Every tensor that holds the case's numbers before a launch, in the order of the problem's arguments."""
        args = [arg for arg in problem.args if arg.is_tensor and self._holds_numbers(arg.name)]
        wanted = {arg.name: self._identity(case, problem, arg) for arg in args}
        # Frees the old ones before making new ones.
        self._kept = {a.name: self._kept[a.name] for a in args if self._is_kept(a.name, wanted[a.name])}
        if len(self._kept) < len(args):
            host = torch.device("cpu")
            rows = self._maker.rows(row_numbers(self.kernel, self.problem, problem, case, host))
            for arg in (arg for arg in args if arg.name not in self._kept):
                buffer = self._maker.input(case, problem, arg, rows)
                self._kept[arg.name] = _Kept(wanted[arg.name], buffer)
        self._kept = {arg.name: self._kept[arg.name] for arg in args}
        return self._kept

    def _holds_numbers(self, name: str) -> bool:
        kind = self.kernel.args[name].kind
        return kind not in OUTPUTS or kind == "accumulated"

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

    def changed_input(self, case: Case, run: Run) -> str:
        """Name of an input of ``case`` that ``run`` wrote to since it was made, or an empty string.

        Shared ones are all forgotten then, to be made anew.
        """
        for name, buffer in self.inputs(case).items():
            if name in run.own:
                changed = not same(run.own[name].pairs, buffer.pairs)
            else:
                changed = not torch.equal(_imprint_of(buffer), self._kept[name].imprint())
            if changed:
                self.renew_inputs()
                return name
        return ""

    def outside(self, name: str, case: Case) -> int:
        """The byte around the elements of output ``name``."""
        return POISON if self.kernel.args[name].kind == "accumulated" else case.fill

    def sample_arguments(self, case: Case | None = None) -> tuple[Any, ...]:
        """Arguments of the right kind on the right device, for binding a launch; not to be launched with.

        They have dtype, shape and alignment of the case's and no memory but for one element.
        """
        problem = self.problem if case is None else self.problem_for(case)
        tensors = [arg for arg in problem.args if arg.is_tensor]
        return self._assembled(
            problem, {arg.name: stand_in(self.kernel, problem, arg, self.torch_device) for arg in tensors}
        )

    def usual_inputs(self) -> dict[str, torch.Tensor]:
        """What the kernel says that calls usually pass, on the host; raises ``NotTunable`` where it does not fit."""
        if self._usual is None:
            self._usual = usual_inputs(self.kernel, self.problem)
        return self._usual

    def argument_sets(self, count: int) -> list[tuple[Any, ...]]:
        """``count`` sets of arguments for timing, equal in content, each with tensors of its own.

        They hold what calls usually pass, where the kernel says that, else what the gate's first case holds.
        """
        usual, case = self.usual_inputs(), Case("timing")
        run = self.room(case, alone=False)
        run.clear()
        tensors = {**self.inputs(case), **run.outputs}
        self.renew_inputs()  # no case may meet what is written to them now
        for name, numbers in usual.items():
            overlay(tensors[name].view, numbers)
        copies = [{name: copy_of(buffer) for name, buffer in tensors.items()} for _ in range(1, count)]
        sets = ({name: buffer.view for name, buffer in each.items()} for each in (tensors, *copies))
        return [self._assembled(self.problem, each) for each in sets]

    def _assembled(self, problem: Problem, tensors: dict[str, torch.Tensor]) -> tuple[Any, ...]:
        values: dict[str, Any] = {arg.name: arg.value for arg in problem.args}
        values |= {**tensors, **dict(problem.dims)}
        return tuple(values[name] for name in self.kernel.parameters)
