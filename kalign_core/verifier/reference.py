"""What a kernel promises of its own reference launch, checked before any candidate is held to it.

It agrees with itself, writes all of its outputs and nothing else, draws no random numbers, and a row's bytes depend on
that row alone. A reference that breaks one of these defines no bits, so its kernel is not tuned.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace

import torch

from kalign_core.errors import CandidateFailed, NotTunable
from kalign_core.records import Case
from kalign_core.verifier.bench import Bench
from kalign_core.verifier.bound import Bound
from kalign_core.verifier.checks import DIGEST_ELEMENTS, DIGEST_FAMILIES, FILLS, batch, batch_base, layouts
from kalign_core.verifier.compare import as_integers, digest, first_difference, follows, untouched
from kalign_core.verifier.flight import random_states
from kalign_core.verifier.repeat import content_text
from kalign_core.verifier.run import Run

_BLOCKS, _LEAST_BLOCK_ELEMENTS = 64, 1 << 16
_AGREEMENT = Case("reference agrees with itself", family="spread", seed=1)


class Reference:
    """The reference launch of one bench and its promises."""

    def __init__(self, bench: Bench, bound: Bound) -> None:
        self.bench, self.bound = bench, bound
        self._last: tuple[Case, Run] | None = None

    def run(self, case: Case) -> Run:
        """Run the reference on ``case``; raises ``CandidateFailed`` where it cannot be launched."""
        run = self.bench.run(self.bound.launch_for(self.bench, case), case)
        run.retire()
        return run

    def _base(self, case: Case) -> Run:
        """The run of ``case`` that others are compared with; the last one is kept."""
        if self._last is None or self._last[0] != case:
            self._last = None  # frees its memory before the next run takes its own
            self._last = (case, self.run(case))
        return self._last[1]

    def check(self) -> None:
        """Hold it to its promises; raises ``NotTunable`` with the reason."""
        self._check_agreement()
        self._try_wide()
        self._check_rows()
        if self.bench.strict:
            self._check_layouts()
        self._last = None

    def digests(self) -> tuple[str, ...]:
        """``name=hex`` of the core cases, on the widest output; ``inputs`` tells which problem they were taken on."""
        content = content_text(self.bench.kernel, self.bench.problem).encode()
        found = [f"inputs={hashlib.sha256(content).hexdigest()[:16]}"]
        for case in digest_cases(self.bench):
            run = self.run(case)
            found.append(f"{case.family}={digest([buffer.view for buffer in run.outputs.values()])}")
        return tuple(found)

    def cases(self) -> Iterator[Case]:
        """The cases of its own promises and digests that no check asks for."""
        yield _AGREEMENT
        for variant in ("wide", "") if self.bench.has_variant("wide") else ("",):
            yield batch_base(self.bench, variant)
        yield from digest_cases(self.bench)

    def _check_agreement(self) -> None:
        """Stage 1, under several fills at once: bytes that follow the fill are unwritten, all others must agree."""
        case = _AGREEMENT
        self.bench.inputs(case)
        states = random_states(self.bench.torch_device)
        self._check_inputs(case, self.run(case))
        if not all(map(torch.equal, states, random_states(self.bench.torch_device))):
            raise self._broken("draws from torch's random numbers")
        first = self.run(case)
        for fill in FILLS[1:]:
            self._check_filled(case, first, replace(case, fill=fill))
        for how in () if self.bench.interpreted else ("graph", "stream"):
            self._check_same(case, first, self.run(replace(case, how=how)), f"a run on a {how} disagrees")

    def _check_inputs(self, case: Case, run: Run) -> None:
        """Nothing was written beside the outputs, and nothing to an input; costs ``run`` its elements."""
        self._check_surroundings(case, run)
        changed = self.bench.changed_input(case, run)
        if changed:
            raise self._broken(f"writes to {changed}, declared as an input", f"declare {changed} as written(...)")

    def _check_filled(self, case: Case, first: Run, filled: Case) -> None:
        other = self.run(filled)
        self._check_written(case, first, filled, other)
        self._check_surroundings(filled, other)

    def _try_wide(self) -> None:
        """Do without the wide output where the device has not the resources for it."""
        if self.bench.has_variant("wide"):
            try:
                self.bound.launch_for(self.bench, Case("", variant="wide"))
            except CandidateFailed:
                self.bench.drop_variant("wide")

    def _check_surroundings(self, case: Case, run: Run) -> None:
        """Nothing was written beside the outputs; costs ``run`` its elements."""
        for name, buffer in run.outputs.items():
            if not untouched(buffer, self.bench.outside(name, case)):
                raise self._broken(f"writes outside {name}")

    def _check_written(self, case: Case, run: Run, filled: Case, other: Run) -> None:
        """Two runs into memory filled otherwise agree on every element, so that every element was written."""
        for name, buffer in run.outputs.items():
            ours, theirs = buffer.view, other.outputs[name].view
            if _equal(ours, theirs):
                continue
            if bool((follows(ours, case.fill) & follows(theirs, filled.fill)).any()):
                raise self._broken(f"leaves elements of {name} unwritten")
            found = first_difference(case.check, name, buffer, other.outputs[name])
            raise NotTunable(f"{self.bench.kernel} cannot be tuned: two runs of it disagree", why=str(found))

    def _check_same(self, case: Case, one: Run, other: Run, what: str) -> None:
        name = one.differing(other)
        if name:
            found = first_difference(case.check, name, one.outputs[name], other.outputs[name])
            raise NotTunable(f"{self.bench.kernel} cannot be tuned: {what}", why=str(found))

    def _check_rows(self) -> None:
        """Its own rows on the batch axis, against the rows of the whole problem."""
        if self.bench.kernel.rows is None:
            return
        for case in sorted(batch(self.bench), key=lambda case: case.variant):
            if all(dim == self.bench.kernel.rows for dim, _ in case.dims):
                self._check_rows_of(case, self.run(case), self._base(batch_base(self.bench, case.variant)))

    def _check_rows_of(self, case: Case, run: Run, base: Run) -> None:
        numbers = self.bench.row_numbers(case)
        assert numbers is not None  # the kernel has rows
        places = torch.arange(len(numbers), device=numbers.device)
        if case.neighbours:
            places = torch.tensor(case.kept, device=numbers.device)
        for name, axis in self._row_outputs():
            here, there = run.outputs[name].view.movedim(axis, 0), base.outputs[name].view.movedim(axis, 0)
            known = places[numbers[places] < there.shape[0]]
            if not _equal(here, there, known, numbers[known].long()):
                raise NotTunable(
                    f"{self.bench.kernel}: rows of {name} depend on their batch ({describe(case)})",
                    why="a row's bits must not depend on how many rows there are, where it stands or beside what",
                )

    def _row_outputs(self) -> Iterator[tuple[str, int]]:
        """Outputs that hold one row's results in each row and nothing from before, with their axis of rows."""
        for name in self.bench.kernel.outputs():
            role = self.bench.kernel.args[name]
            present = self.bench.problem.argument(name).is_tensor
            if present and self.bench.kernel.rows in role.shape and role.kind != "accumulated":
                yield name, role.shape.index(str(self.bench.kernel.rows))

    def _check_layouts(self) -> None:
        """The same numbers laid out otherwise give the same bytes; layouts it cannot be launched on say nothing."""
        for case in layouts(self.bench):
            plain = replace(case, variant="")
            if plain == case or case.dims or case.variant == "far":
                continue
            try:
                self._check_layout(case, self.run(case), plain)
            except CandidateFailed:
                continue

    def _check_layout(self, case: Case, run: Run, plain: Case) -> None:
        base = self._base(plain)
        for name, buffer in run.outputs.items():
            if not _equal(buffer.view, base.outputs[name].view):
                raise NotTunable(
                    f"{self.bench.kernel}: {name} depends on the layout ({describe(case)})",
                    why="the same numbers must give the same bits wherever they lie in memory",
                )

    def _broken(self, what: str, fix: str = "") -> NotTunable:
        return NotTunable(f"{self.bench.kernel} {what}", fix=fix)


def digest_cases(bench: Bench) -> Iterator[Case]:
    """The core cases, which digests are taken of: on the widest output, and on the first rows of a large problem."""
    variant = "wide" if bench.has_variant("wide") else ""
    for family in DIGEST_FAMILIES:
        if family in bench.families:  # a kernel may have no floating-point input
            yield bench.reduced(Case("digest", family=family, seed=1, variant=variant), DIGEST_ELEMENTS)


def _equal(
    a: torch.Tensor, b: torch.Tensor, rows: torch.Tensor | None = None, others: torch.Tensor | None = None
) -> bool:
    """Whether two tensors, or ``rows`` of one and ``others`` of the other, agree in every byte.

    A block of rows at a time: picking rows copies them.
    """
    ours, theirs = as_integers(a), as_integers(b)
    if not ours.dim():
        ours, theirs = ours.view(1), theirs.view(1)
    step = max(1, max(_LEAST_BLOCK_ELEMENTS, ours.numel() // _BLOCKS) // max(1, ours[:1].numel()))
    count = ours.shape[0] if rows is None else len(rows)
    unlike = []
    for start in range(0, count, step):
        part = slice(start, start + step)
        one, other = (part, part) if rows is None or others is None else (rows[part], others[part])
        unlike.append((ours[one] != theirs[other]).any())
    return not unlike or not bool(torch.stack(unlike).any())


def describe(case: Case) -> str:
    """What is particular about ``case``, in words."""
    parts = [f"{dim}={size}" for dim, size in case.dims]
    if case.shift or case.step != 1:
        other = f"row i*{case.step}{case.shift:+d} in place i" if case.step else f"row {case.shift} in every place"
        parts.append(f"rows shifted by {case.shift}" if case.step == 1 else other)
    if case.neighbours:
        parts.append(f"{case.neighbours} neighbours")
    if case.variant:
        parts.append(case.variant)
    if case.repeats > 1:
        parts.append(f"{case.repeats} runs")
    if case.how:
        parts.append(f"on a {case.how}")
    return ", ".join(parts) or f"{case.family} inputs"
