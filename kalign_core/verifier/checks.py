"""The core suite's checks: which cases each stage asks for. All are generators; the gate runs and compares.

Candidate and reference must show the same bytes in every case; the gate also holds the reference to its own rows and to
itself under other layouts. Quick suites run while tuning and ask only for what the code under test will serve; strict
ones run from the command line, bind that code again for other layouts and widths, and take their time.

``SUITE`` names the cases. It changes whenever a case, a family or what a digest covers changes, in whatever way:
digests of two suites are never compared, and decisions taken under another suite are taken anew. A timer or a rule of
decision that was found to rank wrongly is a reason as well: what it decided is to be measured again.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kalign_core.declare import OUTPUTS, cdiv
from kalign_core.records import Case, Check
from kalign_core.verifier.inputs import ROW_KINDS
from kalign_core.verifier.probes import ORDER_PROBE, PROBES, ROWS_PER_TREE

if TYPE_CHECKING:
    from kalign_core.declare import Kernel
    from kalign_core.verifier.bench import Bench

SUITE = "2026.4"
DIGEST_FAMILIES = ("normals", "spread", "cancelling", "order_probe")
DIGEST_ELEMENTS = 1 << 20
FILLS = (0xA5, 0x00, 0xFF)
# The first byte check of a candidate: before anything is timed.
ONE_CASE = Case("one case", family="spread", seed=1)
EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
# With the edges every remainder by 16: how many rows a last block may be left with.
REMAINDERS = (3, 6, 10, 11, 14, 20, 23, 37, 40, 44, 57, 61)
QUICK_SIZES = (1, 6, 11, 17)
SHIFTS = (1, 2, 3, 4, 5, 7, 8, 11, 13, 16, 32, 64, 128, 256)
MEMORY_SHARE = 0.8


def fills(bench: Bench) -> Iterable[Case]:
    """Stage 2: the same inputs into memory filled one way and the other: a byte that follows the fill is unwritten."""
    for fill in (0x00, 0xFF):
        yield Case("written bytes", fill=fill)


def families(bench: Bench) -> Iterable[Case]:
    """Stage 3: every input family; those that see order also on the wide output, where rounding hides nothing."""
    wide = bench.has_variant("wide")
    for name, family in bench.families.items():
        if name == ORDER_PROBE.name:
            continue
        rounds = family.sees_order or name == "normals"
        for seed in _seeds(bench, name, rounds):
            case = Case("input families", family=name, seed=seed, variant="wide" if wide else "")
            case = bench.reduced(case, _elements(bench))
            yield replace(case, variant="")
            if wide and rounds:
                yield case


def _seeds(bench: Bench, name: str, rounds: bool) -> Sequence[int]:
    """With which seeds a family is asked for: few rows are few chances to see a rounding, and few kinds of row."""
    wanted, most = (64, 8) if bench.strict else (16, 4)
    rows = dict(bench.problem.dims).get(bench.kernel.rows or "", wanted)
    if rounds:
        most = cdiv(most, 4) if bench.interpreted else most
        return range(1, 1 + min(cdiv(wanted, rows), most))
    return range(1, 1 + ROW_KINDS.get(name, 1), rows)[:most]


def probes(bench: Bench) -> Iterable[Case]:
    """Stage 4: order probes, read on the widest output; as many seeds as it takes to have all kinds of row."""
    case = Case("order probes", family=ORDER_PROBE.name, variant="wide" if bench.has_variant("wide") else "")
    case = bench.reduced(case, _elements(bench))
    rows = dict(bench.problem_for(case).dims).get(bench.kernel.rows or "", len(PROBES))
    most = 2 * len(PROBES)
    if bench.strict:
        count = min(max(cdiv(ROWS_PER_TREE * len(PROBES), rows), 2), most)
    else:
        count = min(cdiv(18, rows), 3) if bench.interpreted else min(cdiv(6 * most, rows), most)
    for seed in range(count):
        yield replace(case, seed=seed)


def _elements(bench: Bench) -> int:
    """How large a tensor of a case may be that need not have the problem's size."""
    return 1 << 23 if bench.strict else 1 << 21


def batch(bench: Bench) -> Iterator[Case]:
    """Stage 5: other sizes of the bucket, rows elsewhere and in other company; on the wide output and on the real one.

    The wide output is looked at on fewer rows. Under an interpreter both are the same code, so that the quick suite has
    the wide one do.
    """
    wide = bench.has_variant("wide")
    real = not wide or bench.strict or not bench.interpreted
    near = _size(bench, bench.reduced(Case("batch axis", variant="wide" if wide else ""), _elements(bench)))
    asked: dict[Case, list[str]] = {}
    for variant in ("wide",) * wide + ("",) * real:
        span = _size(bench, batch_base(bench, variant))
        for case in (*_sizes(bench, span, near), *_places(bench, span if bench.strict else near)):
            asked.setdefault(case, []).append(variant)
    # What both are asked for comes together, so that inputs are made once.
    for case, variants in asked.items():
        yield from (replace(case, family="spread", variant=variant) for variant in variants)


def batch_base(bench: Bench, variant: str) -> Case:
    """The case whose rows those of the batch axis have to equal: the whole problem, or the first rows of it."""
    case = Case("batch axis", family="spread", variant=variant)
    return bench.reduced(case, _elements(bench)) if variant == "wide" else case


def _size(bench: Bench, case: Case) -> int:
    return dict(case.dims).get(bench.growing, dict(bench.problem.dims).get(bench.growing, 0))


def _sizes(bench: Bench, span: int, near: int) -> Iterator[Case]:
    """Every bucketed size at others of its bucket, the growing one up to ``span``; few rows are of the first ``near``.

    Strict suites go to both sides of the bucket's own edges too, which the problem need not stand at.
    """
    kernel, sizes = bench.kernel, dict(bench.problem.dims)
    for dim in dict.fromkeys((*filter(None, (bench.growing,)), *kernel.bucket)):
        top = span if dim == bench.growing else sizes[dim]
        counts = set(_counts(top, bench.strict))
        if bench.strict and top == sizes[dim]:
            counts |= _edges(kernel, dim, top)
        for count in sorted(counts):
            shift = (near if count <= near // 2 else top) // 3 if dim == kernel.rows else 0
            case = Case("batch axis", dims=((dim, count),), shift=shift)
            if count <= top + 1 or _fits(bench, case):
                yield case


def _edges(kernel: Kernel, dim: str, size: int) -> set[int]:
    """Both sides of both edges of the bucket that ``size`` falls in; none for a dimension without buckets."""
    if dim not in kernel.bucket:
        return set()
    upper = kernel.bucket_edge(dim, size)
    lower = bisect.bisect_left(range(1, size), upper, key=lambda count: kernel.bucket_edge(dim, count))
    return {count for count in (lower, lower + 1, upper - 1, upper, upper + 1) if count > 0 and count != size}


def _places(bench: Bench, span: int) -> Iterator[Case]:
    """The first ``span`` rows moved, one in every place, and rows that keep their bytes while all others change.

    Neighbours of zero are padding on both sides.
    """
    rows = bench.kernel.rows
    if rows is None or span < 2:
        return
    here = () if span == dict(bench.problem.dims)[rows] else ((rows, span),)
    plain, ends = Case("batch axis", dims=here), tuple(sorted({0, span // 2, span - 1}))
    yield replace(plain, shift=span - 1, step=-1)
    yield replace(plain, shift=span // 2, step=0)
    for shift in SHIFTS if bench.strict else SHIFTS[:1]:
        if shift < span:
            yield replace(plain, shift=shift)
    for company in ("nan", "inf", "huge", "reseeded") if bench.strict else ("nan", "reseeded"):
        yield replace(plain, neighbours=company, kept=ends)
    if bench.strict:
        yield replace(plain, shift=1, step=_scattering(dict(bench.problem.dims)[rows]))
        yield replace(plain, neighbours="zero", kept=(span // 2,))
        tile = tuple(row for row in (1, 15, 16, 17, 31, 32, 63, 64) if row < span)
        for company in ("nan", "huge"):
            yield replace(plain, neighbours=company, kept=tile)


def _counts(whole: int, strict: bool) -> list[int]:
    """Sizes beside ``whole``, the bucket's edge: both sides of every tile edge, or the few that find most."""
    counts = {*QUICK_SIZES, whole // 2 + 1, whole - 1}
    if strict:
        counts |= {*EDGES, *REMAINDERS, whole // 2, whole // 2 - 1}
    found = sorted(n for n in counts if 0 < n < whole)
    # One size behind the edge belongs to another bucket, whose rows have the same bits all the same.
    return [*found, whole + 1] if strict else found


def _scattering(whole: int) -> int:
    """A step coprime to ``whole``, which visits every row once and puts neighbours far apart."""
    return next(step for step in range(int(whole * 0.618) + 1, 2 * whole + 2) if math.gcd(step, whole) == 1)


def layouts(bench: Bench) -> Iterator[Case]:
    """Stage 6: rows further apart, and under strict alignment, order of axes, widths and offsets past 2**31."""
    wanted = ("padded", "uneven", "unaligned", "transposed") if bench.strict else ("padded",)
    for variant in wanted:
        if bench.has_variant(variant):
            case = Case("layout", family="spread", seed=3, variant=variant)
            yield case if bench.strict else bench.reduced(case, _elements(bench))
    if not bench.strict:
        return
    for dim, size in bench.problem.dims:
        if dim in bench.kernel.bucket:
            continue
        for width in sorted({1, size - 1, size * 3 // 4}):
            if 0 < width < size:
                yield Case("layout", family="spread", seed=4, dims=((dim, width),))
        if size > 2:
            yield Case("layout", family="spread", seed=4, dims=((dim, size - 1),), variant="unaligned")
    far = Case("layout", family="spread", seed=3, variant="far")
    if not bench.interpreted and bench.has_variant("far") and _fits(bench, far):
        yield far


def _fits(bench: Bench, case: Case) -> bool:
    """Whether inputs, two sets of outputs and what comparing takes fit beside what is on the device already."""
    if bench.interpreted:
        return True
    free = bench.platform.free_bytes(bench.device)
    problem = bench.problem_for(case)
    sizes = {arg.name: bench.bytes_of(problem, arg) for arg in problem.args if arg.is_tensor}
    outputs = [size for name, size in sizes.items() if bench.kernel.args[name].kind in OUTPUTS]
    return free is not None and sum(sizes.values()) + sum(outputs) + max(outputs, default=0) < MEMORY_SHARE * free


def repeats(bench: Bench) -> Iterable[Case]:
    """Stage 7: one case again and again, for races, which an interpreter has not.

    Plainly, from a graph and in company, into memory filled otherwise each time.

    Further runs take fewer rows and so little time.
    """
    if bench.interpreted:
        return
    case = Case("repeats", family="spread", seed=2)
    for (how, count), fill in zip((("", 12), ("graph", 2), ("stream", 2)), FILLS, strict=True):
        yield replace(case, repeats=(4 if bench.strict else 1) * count, how=how, fill=fill)
    yield replace(bench.reduced(case, _elements(bench)), repeats=32)


CORE_CHECKS: tuple[Check, ...] = (
    Check("written bytes", 2, fills),
    Check("input families", 3, families),
    Check("order probes", 4, probes),
    Check("batch axis", 5, batch),
    Check("layout", 6, layouts),
    Check("repeats", 7, repeats),
)
