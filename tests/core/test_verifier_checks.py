"""Which cases the core suite asks for."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kalign_core.hal.cpu import CpuPlatform
from kalign_core.kernels.matmul import matmul_kernel
from kalign_core.records import Case, DeviceModel, Problem
from kalign_core.verifier import checks
from kalign_core.verifier.bench import Bench
from kalign_core.verifier.inputs import ROW_KINDS
from kalign_core.verifier.variants import dense_problem
from tests.core.verifier_samples import FAMILIES, adds, sums_bench, sums_problem


class Gpu(CpuPlatform):
    """The host, calling itself a device with ``free`` bytes."""

    free: int | None = 1 << 40

    def model(self, device: int) -> DeviceModel:
        return DeviceModel("cuda", "sm_90", 32, 32, 232448)

    def free_bytes(self, device: int) -> int | None:
        return self.free


def gpu_bench(problem: Problem | None = None, *, strict: bool = False) -> Bench:
    bench = Bench(Gpu(), sums_bench().kernel, problem or sums_problem(), -1, strict=strict)
    bench.families.update(FAMILIES)
    return bench


def every(bench: Bench) -> list[Case]:
    return [case for check in checks.CORE_CHECKS for case in check.cases(bench)]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 17, 300])
def test_cases_are_named_after_their_check(rows: int, strict: bool) -> None:
    """A refutation names the check that asked for the case."""
    bench = gpu_bench(sums_problem(rows), strict=strict)
    for check in checks.CORE_CHECKS:
        assert {case.check for case in check.cases(bench)} <= {check.name}


def test_the_stages_are_named_and_come_in_order() -> None:
    """The first is the reference's own; the other six are checks."""
    assert [(check.stage, check.name) for check in checks.CORE_CHECKS] == [
        (2, "written bytes"), (3, "input families"), (4, "order probes"), (5, "batch axis"), (6, "layout"),
        (7, "repeats"),
    ]  # fmt: skip


def test_the_written_bytes_are_asked_under_both_fills() -> None:
    """A byte that follows the fill shows under one of them."""
    assert [case.fill for case in checks.fills(sums_bench())] == [0x00, 0xFF]


@pytest.mark.parametrize("strict", [False, True])
def test_every_family_is_asked_for(strict: bool) -> None:
    """Those that see order on the wide output too; order probes have a stage of their own."""
    cases = list(checks.families(sums_bench(strict=strict)))
    assert {case.family for case in cases} == set(FAMILIES) - {"order_probe"}
    assert {"spread", "cancelling", "swallowing"} <= {case.family for case in cases if case.variant == "wide"}


@pytest.mark.parametrize(("rows", "strict"), [(1, False), (1, True), (768, False), (5000, True)])
def test_order_probes_are_read_on_the_widest_output(rows: int, strict: bool) -> None:
    """All kinds of probe come up, however few rows there are."""
    cases = list(checks.probes(gpu_bench(sums_problem(rows), strict=strict)))
    assert {case.variant for case in cases} == {"wide"}
    assert rows * len(cases) >= 6
    assert len({case.seed for case in cases}) == len(cases)


@given(st.integers(1, 3000), st.booleans())
def test_sizes_of_the_bucket_are_asked_for_on_both_sides_of_its_tiles(whole: int, strict: bool) -> None:
    """One row, all but one, 17 and the middle; under strict both sides of 16, 32, 64, 128 and 256 and of the edge."""
    counts = checks._counts(whole, strict)
    assert counts == sorted(set(counts))
    assert {n for n in (1, 17, whole - 1, whole // 2 + 1) if 0 < n < whole} <= set(counts)
    if strict:
        edges = {n + d for n in (16, 32, 64, 128, 256) for d in (-1, 0, 1)}
        assert {n for n in edges if n < whole} | {whole + 1} <= set(counts)
    else:
        assert all(n < whole for n in counts)


@pytest.mark.parametrize(("strict", "divisor"), [(False, 4), (True, 16)])
def test_a_last_block_is_left_with_every_number_of_rows(strict: bool, divisor: int) -> None:
    """Every remainder by four while tuning and by sixteen under strict, whichever block a kernel takes its rows in."""
    sizes = [64, *checks._counts(64, strict)]
    assert {size % divisor for size in sizes} == set(range(divisor))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 5, 7, 40])
def test_few_rows_see_every_kind_of_row(rows: int, strict: bool) -> None:
    """Seeds make up for rows, as far as the quick suite may go: a decode step has one row."""
    cases = [case for case in checks.families(gpu_bench(sums_problem(rows), strict=strict)) if not case.variant]
    for family, kinds in ROW_KINDS.items():
        seen = {(row + case.seed - 1) % kinds for case in cases if case.family == family for row in range(rows)}
        assert len(seen) >= min(kinds, kinds if strict else 4 * rows)


def batch_sizes(whole: int, *, free: int = 1 << 40) -> set[int]:
    """Row counts that the strict suite asks for on a device with ``free`` bytes."""
    bench = gpu_bench(sums_problem(whole), strict=True)
    bench.platform.free = free  # type: ignore[attr-defined]
    return {dict(case.dims)["T"] for case in checks.batch(bench) if case.dims}


@pytest.mark.parametrize("whole", [33, 48, 63, 64])
def test_both_edges_of_the_bucket_are_asked_for_on_both_sides(whole: int) -> None:
    """Wherever in its bucket the problem stands: 33 to 64 rows are one bucket."""
    assert {32, 33, 63, 64, 65} - {whole} <= batch_sizes(whole)


def test_edges_beyond_the_problem_are_asked_for_where_memory_allows() -> None:
    """A problem at the lower end of its bucket may fit a device that twice of it does not."""
    assert 128 in batch_sizes(65)
    assert 128 not in batch_sizes(65, free=1 << 12)


@given(st.integers(1, 5000))
def test_scattered_rows_are_a_permutation(whole: int) -> None:
    """Every row comes once."""
    assert math.gcd(checks._scattering(whole), whole) == 1


def test_the_batch_axis_is_walked_on_the_wide_output_and_on_the_real_one() -> None:
    """What a device compiles twice is checked twice; an interpreter runs the same code for both."""
    assert {case.variant for case in checks.batch(gpu_bench())} == {"wide", ""}
    assert {case.variant for case in checks.batch(sums_bench())} == {"wide"}
    assert {case.variant for case in checks.batch(sums_bench(strict=True))} == {"wide", ""}


def test_what_is_asked_for_in_both_widths_comes_together() -> None:
    """So that its inputs are made once."""
    cases = list(checks.batch(gpu_bench(sums_problem(300, 1 << 14))))
    places = [(case.shift, case.step, case.neighbours, case.dims) for case in cases]
    assert len(places) > len(set(places))
    assert sum(one == other for one, other in itertools.pairwise(places)) == len(places) - len(set(places))


@pytest.mark.parametrize("strict", [False, True])
def test_a_row_is_looked_at_in_every_place(strict: bool) -> None:
    """A case of one row alone, again and again: its bytes must not depend on where it stands."""
    assert [case.shift for case in checks.batch(sums_bench(strict=strict)) if not case.step and case.variant]


@pytest.mark.parametrize("strict", [False, True])
def test_neighbours_of_a_single_row_are_not_asked_for(strict: bool) -> None:
    """There are none."""
    assert not [case for case in checks.batch(sums_bench(sums_problem(1), strict=strict)) if case.neighbours]


def test_strict_company_is_huge_infinite_nan_zero_and_other() -> None:
    """Every kind of neighbour the bench can make."""
    company = {case.neighbours for case in checks.batch(sums_bench(strict=True))}
    assert company == {"", "nan", "inf", "huge", "zero", "reseeded"}


def test_kernels_without_rows_are_asked_for_other_sizes() -> None:
    """A sum over the batch has no rows to move, but a bucket to be right in."""
    problem = dense_problem(adds, {"T": 64, "H": 8}, {"x": "fp32", "out": "fp32"})
    cases = list(checks.batch(Bench(CpuPlatform(), adds, problem, -1)))
    assert [dict(case.dims)["T"] for case in cases] == [1, 6, 11, 17, 33, 63]


def test_quick_layouts_need_no_other_code() -> None:
    """Rows 16 elements further apart are served by the code under test; the rest is the strict suite's."""
    assert [case.variant for case in checks.layouts(sums_bench())] == ["padded"]


def test_strict_layouts_are_every_class_that_code_is_specialised_on() -> None:
    """Alignment, strides of either class, order of axes, sizes of one, odd and no power of two."""
    dtypes = {"a": "bf16", "b": "bf16", "bias": "none", "c": "bf16"}
    problem = dense_problem(matmul_kernel, {"M": 8, "N": 16, "K": 64}, dtypes)
    cases = list(checks.layouts(Bench(Gpu(), matmul_kernel, problem, -1, strict=True)))
    assert {case.variant for case in cases} == {"padded", "uneven", "unaligned", "transposed", "far", ""}
    widths = {dict(case.dims)["K"] for case in cases if case.dims and case.dims[0][0] == "K"}
    assert widths == {1, 48, 63}
    assert not any(dim == "M" for case in cases for dim, _ in case.dims)  # bucketed: the batch axis walks it


@pytest.mark.parametrize(("free", "asked"), [(1 << 40, True), (1 << 33, False), (None, False)])
def test_offsets_past_31_bits_are_asked_for_where_memory_allows(free: int | None, asked: bool) -> None:
    """Four gigabytes a tensor are not everywhere, and an interpreter has no use for them."""
    bench = gpu_bench(strict=True)
    bench.platform.free = free  # type: ignore[attr-defined]
    assert ("far" in {case.variant for case in checks.layouts(bench)}) is asked
    assert "far" not in {case.variant for case in checks.layouts(sums_bench(strict=True))}


@pytest.mark.parametrize(("strict", "runs"), [(False, 16), (True, 64)])
def test_races_are_hunted_by_repeating(strict: bool, runs: int) -> None:
    """Plainly, from a graph and beside other work, under a fill each, and more often on fewer rows.

    An interpreter has no races.
    """
    cases = list(checks.repeats(gpu_bench(sums_problem(100, 1 << 17), strict=strict)))
    whole = [case for case in cases if not case.dims]
    assert sum(case.repeats for case in whole) == runs
    assert [case.how for case in whole] == ["", "graph", "stream"]
    assert len({case.fill for case in whole}) == 3
    assert sum(case.repeats for case in cases) == runs + 32
    assert not list(checks.repeats(sums_bench()))


def test_a_device_is_asked_for_eighty_launches_at_least() -> None:
    """What goes wrong late is met while tuning too; a graph's replays are one launch."""
    cases = every(gpu_bench(sums_problem(18, 40)))
    assert sum(1 if case.how == "graph" else case.repeats for case in cases) >= 80


@pytest.mark.parametrize(("rows", "seeds"), [(1, 12), (6, 12), (16, 5), (72, 1), (4096, 1)])
def test_few_rows_are_probed_with_more_seeds(rows: int, seeds: int) -> None:
    """So that a device sees every kind of probe a dozen times while tuning."""
    assert len(list(checks.probes(gpu_bench(sums_problem(rows))))) == seeds


def test_an_interpreters_quick_suite_is_small() -> None:
    """Programs cost it milliseconds."""
    assert len(every(sums_bench(sums_problem(4)))) <= 28
