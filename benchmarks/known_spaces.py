"""The spaces that ``bit_classes.py`` examines: those known to be equal, those known to differ, every operator's own.

A space is one problem of one kernel with configurations to hold to its reference. The lists are functions of the
platform's limits alone, so that two runs, and two compilers, look at the same ones. Whatever operators are known here
are taken up: nothing but the known spaces names a kernel.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from naive_rms_norm import naive_rms_norm_kernel
from naive_row_sum import naive_row_sum_kernel

from kalign_core import ops
from kalign_core.api import recorded_forms
from kalign_core.declare import Kernel, lower
from kalign_core.errors import BadArgument
from kalign_core.records import Config, Problem
from kalign_core.verifier.variants import dense_problem, variant

EQUAL, DIFFERENT, OPERATOR, REFERENCE = "known equal", "known to differ", "operator", "reference only"
# The gate looks at a few hundred rows of most cases, whatever the problem has.
MOST_ROWS = 512
FEW_ROWS = 16
MOST_OF_ONE_PROBLEM = 32
LEAST_OF_ONE_KERNEL = 60
# Rows that are tuned when they are called, and not by an operator's name alone: they have kernels of their own.
MORE_SIZES = {"rms_norm": ({"T": MOST_ROWS, "H": 151936},)}
# A table as long as a vocabulary has the gate write a gigabyte for every case, and long sequences have digests taken of
# a quarter of one. No code depends on either length.
OTHER_SIZES = {"embedding": {"V": 8192}, "pack": {"S": 64}, "unpack": {"S": 64}}
LAYOUTS = (("unaligned",), ("uneven",), ("unaligned", "uneven"))


@dataclass(frozen=True)
class Space:
    """Configurations of ``kernel`` to hold to its reference on ``problem``; the limits refused ``refused`` others."""

    kind: str
    kernel: Kernel
    problem: Problem
    configs: tuple[Config, ...] = ()
    refused: int = 0


@dataclass(frozen=True)
class Place:
    """Where spaces are laid out: a session, one of its devices, and whether an interpreter has to bear them."""

    session: Any
    device: int
    small: bool

    def calls(self, op: Any, sizes: dict[str, int], dtype: str) -> list[Any]:
        """The kernel calls of every form of ``op`` at ``sizes`` and of its backward."""
        return recorded_forms(op, sizes, dtype, torch.device(self.session.platform.device_type))

    def fitting(self, kind: str, kernel: Kernel, problem: Problem, configs: Iterable[Config]) -> Space:
        """The space of those ``configs`` that no plugin refuses here, without the reference."""
        reference = kernel.reference_config(problem)
        wanted = [config for config in dict.fromkeys(configs) if config != reference]
        fit = [config for config in wanted if not self._refused(kernel, problem, config)]
        return Space(kind, kernel, problem, tuple(fit), len(wanted) - len(fit))

    def _refused(self, kernel: Kernel, problem: Problem, config: Config) -> bool:
        here = self.session
        asked = {"kernel": kernel, "problem": problem, "model": here.platform.model(self.device), "config": config}
        answers = here.plugins.ask("kalign_veto", platform=here.platform.name, **asked)
        return any(answer.error is not None or answer.value for answer in answers)


def plan(place: Place, most_pairs: int) -> list[Space]:
    """Every space to examine: the known ones, then each operator kernel's problems up to ``most_pairs`` candidates."""
    known = [*matmul_tiles(place), *rms_norm_programs(place)]
    return [*known, *naive(place), *fused(place), *operators(place, most_pairs, known)]


# --- spaces known to be equal -------------------------------------------------------------------------------------


def matmul_tiles(place: Place) -> Iterator[Space]:
    """One accumulator chain over K = 14,336 read in float32, under every tile and number of warps that fits.

    All with three stages; tiles of 64 steps of K on 4 and 8 warps also with two and four.
    """
    sizes = {"M": 16, "N": 32, "K": 72} if place.small else {"M": 256, "N": 256, "K": 14336}
    edges, steps = ((16, 32), (16, 32)) if place.small else ((16, 32, 64, 128), (16, 32, 64, 128, 256))
    stages_of = (4,) if place.small else (2, 3, 4)
    for dtype in ops.matmul.dtypes:
        (call,) = place.calls(ops.matmul, sizes, dtype)
        problem = variant(call.kernel, call.problem, "wide")
        assert problem is not None  # these dtypes are narrower than what is observed
        reference = call.kernel.reference_config(problem)
        rows = itertools.product(edges, edges, steps, (1, 2, 4, 8), stages_of)
        configs = [
            reference.replace(BM=bm, BN=bn, BK=bk, num_warps=warps, num_stages=stages)
            for bm, bn, bk, warps, stages in rows
            if stages == 3 or place.small or (bk == 64 and warps >= 4)
        ]
        yield place.fitting(EQUAL, call.kernel, problem, configs)


def rms_norm_programs(place: Place) -> Iterator[Space]:
    """The pair tree under every number of warps and rows per program."""
    for width, dtype in itertools.product((48,) if place.small else (128, 1024, 4096, 16384), ("bf16", "fp32")):
        sizes = {"T": 4 if place.small else MOST_ROWS, "H": width}
        call = next(c for c in place.calls(ops.rms_norm, sizes, dtype) if c.kernel.name == "rms_norm")
        yield place.fitting(EQUAL, call.kernel, call.problem, declared(call.kernel, call.problem))


def declared(kernel: Kernel, problem: Problem) -> Iterator[Config]:
    """Every combination of the kernel's own knobs."""
    reference = kernel.reference_config(problem)
    for row in itertools.product(*kernel.knobs.values()):
        yield reference.replace(**dict(zip(kernel.knobs, row, strict=True)))


# --- spaces known to differ ---------------------------------------------------------------------------------------


def naive(place: Place) -> Iterator[Space]:
    """Sums left to the compiler: each number of warps, and each tile, is another order."""
    rows = {"T": 4 if place.small else MOST_ROWS}
    for width in (600,) if place.small else (1000, 4096, 16384):
        tensors = {"x": "bf16", "weight": "bf16", "out": "bf16", "rstd": "fp32"}
        problem = dense_problem(naive_rms_norm_kernel, {**rows, "H": width}, tensors, {"eps": 1e-6})
        yield place.fitting(DIFFERENT, naive_rms_norm_kernel, problem, declared(naive_rms_norm_kernel, problem))
        problem = dense_problem(naive_row_sum_kernel, {**rows, "H": width}, {"x": "bf16", "out": "fp32"})
        yield place.fitting(DIFFERENT, naive_row_sum_kernel, problem, declared(naive_row_sum_kernel, problem))


def fused(place: Place) -> Iterator[Space]:
    """Products fused into sums, which the contracts forbid; an interpreter has no such thing."""
    if place.small:
        return
    for op, sizes, name in (
        (ops.rms_norm, {"T": MOST_ROWS, "H": 4096}, "rms_norm_backward"),
        (ops.swiglu, {"T": MOST_ROWS, "F": 12288}, "swiglu_backward"),
    ):
        call = next(c for c in place.calls(op, sizes, "fp32") if c.kernel.name == name)
        configs = (config.replace(enable_fp_fusion=True) for config in declared(call.kernel, call.problem))
        yield place.fitting(DIFFERENT, call.kernel, call.problem, configs)


# --- every operator's own space -----------------------------------------------------------------------------------


def operators(place: Place, most_pairs: int, known: Sequence[Space]) -> Iterator[Space]:
    """Problems of every operator kernel, as the operators are called: candidates until there are ``most_pairs``.

    Kernels with few knobs are also examined on the layouts of their problems that are other code. Problems beyond that
    are there for the digests of their references. One whose reference is the same code as an earlier one's is left out.
    """
    seen = {_code(space.kernel, space.problem) for space in known}
    counts: Counter[Kernel] = Counter()
    asked: list[tuple[Kernel, Problem]] = []
    for op in ops.operators():
        for sizes, dtype in problems(op, place.small):
            asked += [(call.kernel, call.problem) for call in posed(place, op, sizes, dtype)]
    for kernel, problem in itertools.chain(asked, laid_out_otherwise(asked, counts, most_pairs)):
        if _code(kernel, problem) in seen:
            continue
        seen.add(_code(kernel, problem))
        if counts[kernel] >= most_pairs:
            yield Space(REFERENCE, kernel, problem)
            continue
        found = place.session.space(kernel, problem, place.device)
        configs = spread([c for c in found.candidates if c != kernel.reference_config(problem)])
        counts[kernel] += len(configs)
        yield Space(OPERATOR, kernel, problem, configs, len(found.refused))


def laid_out_otherwise(
    asked: Sequence[tuple[Kernel, Problem]], counts: Mapping[Kernel, int], most_pairs: int
) -> Iterator[tuple[Kernel, Problem]]:
    """The problems of those kernels that still have too few candidates, unaligned and with rows apart unevenly."""
    for names, (kernel, problem) in itertools.product(LAYOUTS, asked):
        if counts[kernel] < most_pairs:
            other: Problem | None = problem
            for name in names:
                other = variant(kernel, other, name) if other is not None else None
            if other is not None:
                yield kernel, other


def shortfalls(spaces: Sequence[Space]) -> list[dict[str, Any]]:
    """The kernels of operators that have fewer candidates in ``spaces`` than are asked for, and why."""
    found = []
    for kernel in dict.fromkeys(kernel for op in ops.operators() for kernel in op.kernels):
        own = [space for space in spaces if space.kernel is kernel and space.kind in (EQUAL, OPERATOR)]
        count = sum(len(space.configs) for space in own)
        if count < LEAST_OF_ONE_KERNEL:
            most, refused = (max((n for n in each), default=0) for each in (
                [len(space.configs) for space in own], [space.refused for space in own]
            ))  # fmt: skip
            why = (
                f"at most {most} configurations a problem beside the reference, {refused} refused by limits; "
                f"{len(own)} problems of different code over every size, dtype, form and layout"
            )
            found.append({"kernel": kernel.name, "configurations": count, "why": why if own else "no call poses it"})
    return found


def posed(place: Place, op: Any, sizes: dict[str, int], dtype: str) -> list[Any]:
    """The kernel calls of ``op`` at ``sizes``; none where it takes no such sizes, an odd width for example."""
    try:
        return place.calls(op, sizes, dtype)
    except BadArgument:
        return []


def problems(op: Any, small: bool) -> list[tuple[dict[str, int], str]]:
    """Every size of ``op`` with every dtype, neighbours differing in both, then widths that no vector divides.

    Rows are capped, since no code depends on them; but operators may have other kernels for few rows, which come last.
    """
    growing = {dim for kernel in op.kernels for dim in kernel.bucket}
    other = {} if small else OTHER_SIZES.get(op.name, {})
    sizes = [
        {dim: min(size, MOST_ROWS) if dim in growing else size for dim, size in {**each, **other}.items()}
        for each in (op.small_shapes if small else (*op.shapes, *MORE_SIZES.get(op.name, ())))
    ]
    diagonals = itertools.product(range(len(sizes)), range(len(op.dtypes)))
    pairs = [(sizes[(turn + place) % len(sizes)], op.dtypes[place]) for turn, place in diagonals]
    odd = {dim: size if dim in growing else max(1, size - 1) for dim, size in sizes[0].items()}
    pairs += [(odd, dtype) for dtype in op.dtypes]
    few = [{dim: min(size, FEW_ROWS) if dim in growing else size for dim, size in each.items()} for each in sizes]
    pairs += itertools.product(few, op.dtypes)
    return [pair for number, pair in enumerate(pairs) if pair not in pairs[:number]]


def spread(configs: Sequence[Config]) -> tuple[Config, ...]:
    """At most ``MOST_OF_ONE_PROBLEM`` of ``configs``, evenly from all of them."""
    count = min(len(configs), MOST_OF_ONE_PROBLEM)
    return tuple(configs[number * len(configs) // count] for number in range(count))


def _code(kernel: Kernel, problem: Problem) -> Any:
    return kernel, lower(kernel, problem, kernel.reference_config(problem))
