"""The core suite's checks: which cases each stage asks for. All are generators; the gate runs and compares.

A case of a stage below 6 must show the same bytes under reference and candidate; on the batch axis the gate also holds
the reference to its own rows. Quick suites run while tuning, strict ones from the command line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from kalign_core.records import Case, Check

if TYPE_CHECKING:
    from kalign_core.verifier.bench import Bench

SUITE = "2026.1"
DIGEST_FAMILIES = ("normals", "spread")
# Stage 1 and the first byte check of a candidate: before anything is timed.
AGREEMENT = Case("reference agrees with itself", family="spread", seed=1, repeats=3)
ONE_CASE = Case("one case", family="spread", seed=1)
EDGES = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)


def fills(bench: Bench) -> Iterable[Case]:
    """Stage 2: the same inputs into memory filled one way and the other: a byte that follows the fill is unwritten."""
    for fill in (0x00, 0xFF):
        yield Case("written bytes", family="normals", fill=fill)


def families(bench: Bench) -> Iterable[Case]:
    """Stage 3: every input family."""
    for name in bench.families:
        yield Case("input families", family=name, seed=1)


def batch(bench: Bench) -> Iterator[Case]:
    """Stage 5: other row counts, rows elsewhere, rows in other company."""
    dim = bench.kernel.rows
    if dim is None:
        return
    whole = dict(bench.problem.dims)[dim]
    name = "batch axis"
    for count in _row_counts(whole, bench.strict):
        yield Case(name, dims=((dim, count),), shift=whole // 3)
    yield Case(name, reverse=True)
    yield Case(name, shift=1)
    kept = tuple(sorted({0, whole // 2, whole - 1}))
    for company in ("nan", "inf", "huge", "reseeded") if bench.strict else ("nan", "reseeded"):
        if whole > 1:
            yield Case(name, neighbours=company, kept=kept)


def _row_counts(whole: int, strict: bool) -> list[int]:
    """Row counts up to ``whole``, the bucket's edge: both sides of every tile edge, or the few that find most."""
    counts = {1, 17, whole // 2 + 1, whole - 1}
    if strict:
        counts |= {*EDGES, whole // 2, whole // 2 - 1}
    return sorted(n for n in counts if 0 < n < whole)


def repeats(bench: Bench) -> Iterable[Case]:
    """Stage 7: the same case again and again, for races; an interpreter has none."""
    if not bench.interpreted:
        yield Case("repeats", family="spread", seed=2, repeats=64 if bench.strict else 16)


CORE_CHECKS: tuple[Check, ...] = (
    Check("written bytes", 2, fills),
    Check("input families", 3, families),
    Check("batch axis", 5, batch),
    Check("repeats", 7, repeats),
)
