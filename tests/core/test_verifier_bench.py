"""The bench: a case's arguments are what the case says, in memory of their own, whatever the layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kalign_core.declare import Config
from kalign_core.errors import BadArgument, NotTunable
from kalign_core.hal.cpu import CpuPlatform
from kalign_core.kernels.matmul import matmul_kernel
from kalign_core.kernels.rms_norm import rms_norm_dweight_fold_kernel, rms_norm_kernel
from kalign_core.kernels.swiglu import swiglu_kernel
from kalign_core.records import Case, Problem
from kalign_core.verifier import bench as benches
from kalign_core.verifier.bench import Bench
from kalign_core.verifier.variants import VARIANTS, dense_problem, resized, variant
from tests.core.verifier_samples import FAMILIES, adds, good, sums_bench, sums_problem, tensor_of

BF16 = ("a", "b", "bias", "c")


def matmul_problem(m: int = 8, n: int = 6, k: int = 10, bias: str = "none") -> Problem:
    return dense_problem(matmul_kernel, {"M": m, "N": n, "K": k}, {**dict.fromkeys(BF16, "bf16"), "bias": bias})


def matmul_bench(problem: Problem | None = None) -> Bench:
    bench = Bench(CpuPlatform(), matmul_kernel, problem or matmul_problem(), -1)
    bench.families.update(FAMILIES)
    return bench


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


# --- inputs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case", [Case("", shift=3), Case("", step=-1, shift=-1), Case("", step=7, shift=2), Case("", step=0, shift=9)]
)
def test_moved_rows_are_the_same_rows(case: Case) -> None:
    """Row i of a case is row i * step + shift of the whole problem, counted round."""
    bench = sums_bench()
    whole = tensor_of(bench, Case(""), "x").clone()
    places = [(i * case.step + case.shift) % 20 for i in range(20)]
    assert torch.equal(raw(tensor_of(bench, case, "x")), raw(whole[places]))


@pytest.mark.parametrize("rows", [1, 7, 19, 21])
def test_other_row_counts_hold_rows_of_the_whole(rows: int) -> None:
    """A case of other size has the problem's rows, and one more behind the last."""
    bench = sums_bench()
    whole = tensor_of(bench, Case(""), "x").clone()
    part = tensor_of(bench, Case("", dims=(("T", rows),)), "x")
    shared = min(rows, 20)
    assert part.shape == (rows, 24)
    assert torch.equal(raw(part[:shared]), raw(whole[:shared]))


def test_what_has_no_rows_stays_what_it_is() -> None:
    """A weight is the same in every case of a seed, however the rows are moved."""
    bench = sums_bench()
    weight = tensor_of(bench, Case(""), "weight").clone()
    assert torch.equal(weight, tensor_of(bench, Case("", shift=5, dims=(("T", 3),)), "weight"))


@pytest.mark.parametrize("name", ["padded", "uneven", "unaligned", "transposed"])
def test_a_layout_changes_no_number(name: str) -> None:
    """The same case in another layout has the same elements, elsewhere in memory."""
    bench = matmul_bench()
    for argument in ("a", "b"):
        plain = tensor_of(bench, Case("", family="spread"), argument).clone()
        other = tensor_of(bench, Case("", family="spread", variant=name), argument)
        assert torch.equal(raw(other), raw(plain))


def test_sums_run_along_the_innermost_axis_of_the_hash() -> None:
    """Order probes lie along K in both factors of a product, whichever axis of theirs that is."""
    bench = matmul_bench(matmul_problem(6, 6, 64))
    case = Case("", family="order_probe", seed=0)
    a, b = tensor_of(bench, case, "a").float(), tensor_of(bench, case, "b").float()
    assert (a[0] > 2).sum() == 1  # +M once along K
    assert (a[0] < -2).sum() == 1
    assert bool((b[:, 0] == 1).all())  # a column of ones meets it
    products = a[5] * b[:, 1]  # near-cancelling products: opposite signs, nearly equal
    pairs = products.view(-1, 2)
    assert bool((pairs[:, 0] * pairs[:, 1] < 0).all())
    assert bool((pairs.sum(-1).abs() < 0.2 * pairs.abs().amax(-1)).all())


@pytest.mark.parametrize(
    ("company", "holds"),
    [("nan", torch.isnan), ("inf", torch.isinf), ("huge", lambda x: x == 29952), ("zero", lambda x: x == 0)],
)
def test_neighbours_change_and_kept_rows_do_not(company: str, holds: Any) -> None:
    """Every row but the kept ones is replaced."""
    bench = sums_bench()
    whole = tensor_of(bench, Case(""), "x").clone()
    changed = tensor_of(bench, Case("", neighbours=company, kept=(0, 7)), "x")
    others = [row for row in range(20) if row not in (0, 7)]
    assert torch.equal(raw(changed[[0, 7]]), raw(whole[[0, 7]]))
    assert bool(holds(changed[others]).all())


def test_reseeded_neighbours_are_other_normals() -> None:
    """Other numbers of the usual kind."""
    bench = sums_bench()
    whole = tensor_of(bench, Case(""), "x").clone()
    changed = tensor_of(bench, Case("", neighbours="reseeded", kept=(3,)), "x")
    assert torch.equal(changed[3], whole[3])
    assert not torch.equal(changed[4], whole[4])
    assert float(changed.float().abs().max()) <= 3.5


@pytest.mark.parametrize(
    ("case", "problem"),
    [
        (Case("", neighbours="loud", kept=(0,)), "neighbours"),
        (Case("", variant="striped"), "variant"),
        (Case("", family="x"), "family"),
    ],
)
def test_a_case_of_unknown_words_is_refused(case: Case, problem: str) -> None:
    """The error says which word, and which there are."""
    with pytest.raises((BadArgument, NotTunable), match=problem):
        sums_bench().inputs(case)


def test_inputs_lie_between_nan() -> None:
    """A read past an end of a tensor meets NaN, in the gaps of a padded one too."""
    bench = sums_bench()
    buffer = bench.inputs(Case("", variant="padded"))["x"]
    around = torch.as_strided(buffer.view, (20, 40), (40, 1))[:, 24:]
    assert bool(around.isnan().all())
    assert set(buffer.flat[:512].tolist()) == {0xFF}


def test_accumulated_outputs_start_from_the_cases_numbers() -> None:
    """What is added to is an input as well, the same in every run."""
    bench = Bench(CpuPlatform(), adds, dense_problem(adds, {"T": 3, "H": 8}, {"x": "fp32", "out": "fp32"}), -1)
    bench.families.update(FAMILIES)
    first, second = bench.room(Case("")), bench.room(Case("", fill=0))
    first.clear()
    second.clear()
    assert torch.equal(first.outputs["out"].flat, second.outputs["out"].flat)
    assert bench.outside("out", Case("", fill=0)) == 0xFF


def test_the_callers_order_of_arguments_is_kept() -> None:
    """Tensors, sizes and numbers stand where the kernel's parameters do."""
    bench = sums_bench()
    args = bench.room(Case("")).arguments
    assert [a.shape if isinstance(a, torch.Tensor) else a for a in args] == [
        (20, 24),
        (24,),
        (20, 24),
        (20,),
        20,
        24,
        24,
        24,
    ]


# --- keeping and guarding inputs ----------------------------------------------------------------------------------


def test_inputs_are_made_once_per_case() -> None:
    """Fill, repeats, way and wide outputs are not the inputs' business; anything else makes new ones."""
    bench = sums_bench()
    kept = bench.inputs(Case("a"))["x"]
    for same in (Case("b"), Case("a", fill=0), Case("a", repeats=9), Case("a", how="graph"), Case("a", variant="wide")):
        assert bench.inputs(same)["x"] is kept
    for other in (Case("a", seed=1), Case("a", shift=1), Case("a", variant="padded"), Case("a", dims=(("T", 3),))):
        assert bench.inputs(other)["x"] is not kept
        kept = bench.inputs(other)["x"]


def test_what_has_no_rows_is_kept_while_rows_move() -> None:
    """A matrix of weights is not made again for every number of rows."""
    bench = sums_bench()
    weight = bench.inputs(Case("a"))["weight"]
    for moved in (Case("a", shift=1), Case("a", dims=(("T", 3),)), Case("a", neighbours="nan", kept=(0,))):
        assert bench.inputs(moved)["weight"] is weight
    assert bench.inputs(Case("a", family="spread"))["weight"] is not weight


@pytest.mark.parametrize(("elements", "rows"), [(1 << 30, 4096), (1 << 20, 1024), (1 << 10, 64)])
def test_a_reduced_case_has_fewer_rows_and_64_at_least(elements: int, rows: int) -> None:
    """As many as fit the bound, by the largest tensor; a problem that fits stays whole."""
    case = sums_bench(sums_problem(4096, 1024)).reduced(Case("a", family="spread"), elements)
    assert dict(case.dims).get("T", 4096) == rows
    assert (case.family, bool(case.dims)) == ("spread", rows < 4096)


@pytest.mark.parametrize(("rows", "kept"), [(4096, 2867), (64, 44), (20, 16), (10, 10)])
def test_a_wide_case_takes_no_more_memory_than_twice_the_problems(rows: int, kept: int) -> None:
    """Inputs, two sets of wide outputs and comparing them; 16 rows are kept whatever they take."""
    bench = sums_bench(sums_problem(rows, 1 << 18))
    case = bench.reduced(Case("a", variant="wide"), 1 << 30)
    assert dict(case.dims).get("T", rows) == kept
    assert dict(bench.reduced(Case("a"), 1 << 30).dims) == {}


def test_a_kernel_without_rows_is_reduced_along_its_bucket() -> None:
    """A sum over the batch is taken over less of it."""
    bench = Bench(CpuPlatform(), adds, dense_problem(adds, {"T": 512, "H": 8}, {"x": "fp32", "out": "fp32"}), -1)
    assert bench.growing == "T"
    assert bench.reduced(Case("a"), 800).dims == (("T", 100),)


@pytest.mark.parametrize("alone", [True, False])
def test_a_write_to_an_input_is_named_and_undone(alone: bool) -> None:
    """The argument is named, and the next run has the numbers back."""
    bench = sums_bench()
    before = tensor_of(bench, Case(""), "weight").clone()
    run = bench.room(Case(""), alone=alone)
    assert bench.changed_input(Case(""), run) == ""
    run.arguments[bench.kernel.parameters.index("weight")][3] = 9.0
    assert bench.changed_input(Case(""), run) == "weight"
    assert torch.equal(tensor_of(bench, Case(""), "weight"), before)
    assert bench.changed_input(Case(""), bench.room(Case(""), alone=alone)) == ""


def test_a_run_has_inputs_to_itself_where_the_cases_memory_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows of a large problem have all of them, the whole problem none but the small ones."""
    monkeypatch.setattr(benches, "LEAST_MEMORY_BYTES", 0)
    bench = sums_bench(sums_problem(t=4096, h=64))
    assert list(bench.room(Case("", dims=(("T", 1024),))).own) == ["weight", "x"]
    assert list(bench.room(Case("")).own) == ["weight"]


def test_inputs_that_a_run_has_to_itself_hold_the_cases_numbers() -> None:
    """Byte for byte, guard bands included, at the alignment that the case's layout has."""
    bench = sums_bench()
    case = Case("", variant="unaligned")
    run = bench.room(case)
    assert set(run.own) == {"x", "weight"}
    for name, kept in bench.inputs(case).items():
        assert torch.equal(run.own[name].flat, kept.flat)
        assert run.own[name].flat.data_ptr() != kept.flat.data_ptr()
        assert run.own[name].view.data_ptr() % 16 == kept.view.data_ptr() % 16


def test_timing_gets_sets_of_equal_content_in_memory_of_their_own() -> None:
    """So that a cold timing can go round them."""
    sets = sums_bench().argument_sets(3)
    assert len({args[0].data_ptr() for args in sets}) == 3
    assert torch.equal(sets[0][0], sets[2][0])


def test_a_run_changes_no_random_state() -> None:
    """Inputs come from a hash and not from torch's generator."""
    before = torch.get_rng_state()
    bench = sums_bench()
    for family in FAMILIES:
        bench.run(good, Case("", family=family))
    assert torch.equal(before, torch.get_rng_state())


# --- layouts ------------------------------------------------------------------------------------------------------


def test_a_dense_problem_is_what_a_call_on_dense_tensors_poses() -> None:
    """Strides, stride parameters and index width follow from the sizes."""
    problem = dense_problem(
        rms_norm_kernel, {"T": 4, "H": 64}, dict.fromkeys(("x", "weight", "out", "rstd"), "bf16"), {"eps": 1e-6}
    )
    assert problem.argument("x").strides == (64, 1)
    assert (problem.value("x_stride"), problem.value("eps"), problem.index_bits) == (64, 1e-6, 32)


@pytest.mark.parametrize(
    ("name", "strides", "parameter"),
    [("padded", (80, 1), 80), ("uneven", (67, 1), 67), ("far", (1 << 31, 1), 1 << 31)],
)
def test_a_stretched_layout_keeps_parameters_true(name: str, strides: tuple[int, ...], parameter: int) -> None:
    """The stride that a kernel is told is the tensor's."""
    problem = dense_problem(swiglu_kernel, {"T": 2, "F": 64}, dict.fromkeys(("gate", "up", "out"), "bf16"))
    made = variant(swiglu_kernel, problem, name)
    assert made is not None
    assert made.argument("gate").strides == strides
    assert made.value("gate_stride") == parameter
    assert made.index_bits == (64 if name == "far" else 32)


def test_transposing_needs_both_strides_free() -> None:
    """Where the kernel takes the innermost axis for dense there is no such variant."""
    assert (
        variant(
            swiglu_kernel,
            dense_problem(swiglu_kernel, {"T": 2, "F": 64}, dict.fromkeys(("gate", "up", "out"), "bf16")),
            "transposed",
        )
        is None
    )
    made = variant(matmul_kernel, matmul_problem(), "transposed")
    assert made is not None
    assert (made.argument("a").strides, made.value("a_stride_m"), made.value("a_stride_k")) == ((1, 8), 1, 8)


def test_a_transposed_problem_is_transposed_back() -> None:
    """What lies column by column is laid row by row."""
    made = variant(matmul_kernel, matmul_problem(), "transposed")
    assert made is not None
    assert variant(matmul_kernel, made, "transposed") == matmul_problem()


def test_strides_that_are_a_dimension_cannot_be_stretched() -> None:
    """A kernel that takes its row stride for H has dense rows only."""
    problem = dense_problem(rms_norm_dweight_fold_kernel, {"B": 3, "H": 8}, {"partial": "fp32", "d_weight": "fp32"})
    assert variant(rms_norm_dweight_fold_kernel, problem, "padded") is None
    assert resized(rms_norm_dweight_fold_kernel, problem, {"H": 5}).argument("partial").strides == (5, 1)


def test_wide_outputs_have_the_dtype_they_are_observed_in() -> None:
    """Where it is wider than what the call asked for, and where it was declared."""
    assert variant(matmul_kernel, matmul_problem(), "wide") == replace(
        matmul_problem(), args=tuple(replace(a, dtype="fp32") if a.name == "c" else a for a in matmul_problem().args)
    )
    assert sums_bench(sums_problem(dtype="fp32")).has_variant("wide") is False


def test_all_variants_but_far_leave_the_kernel_its_bytes() -> None:
    """The reference gives the same rows whatever the layout: what the strict suite asks of it."""
    bench = sums_bench()
    plain = bench.run(good, Case("")).outputs["total"].view.clone()
    for name in VARIANTS:
        if name != "far" and bench.has_variant(name):
            assert torch.equal(bench.run(good, Case("", variant=name)).outputs["total"].view, plain), name


# --- binding ------------------------------------------------------------------------------------------------------


class Binding(CpuPlatform):
    """A platform that notes what it is asked to bind."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: list[Problem] = []

    def launcher(self, kernel: Any, problem: Problem, config: Config, args: Any) -> Any:
        self.problems.append(problem)
        return super().launcher(kernel, problem, config, args)


@pytest.mark.parametrize(
    ("case", "again"),
    [
        (Case(""), False), (Case("", dims=(("T", 3),)), False), (Case("", shift=2, fill=0), False),
        (Case("", variant="padded"), False),  # still a multiple of 16
        (Case("", variant="uneven"), True), (Case("", variant="unaligned"), True), (Case("", variant="wide"), True),
        (Case("", dims=(("F", 48),)), True),
    ],
)  # fmt: skip
def test_other_code_is_bound_exactly_where_the_compiler_would_make_it(case: Case, again: bool) -> None:
    """Alignment, specialisation classes, dtypes and fixed sizes need code of their own; rows and fills do not."""
    platform = Binding()
    problem = dense_problem(swiglu_kernel, {"T": 4, "F": 64}, dict.fromkeys(("gate", "up", "out"), "bf16"))
    bench = Bench(platform, swiglu_kernel, problem, -1)
    bound = bench.bound(Config(BLOCK=256, num_warps=4, num_stages=1, enable_fp_fusion=False))
    first = bound.launch_for(bench, Case(""))
    assert (bound.launch_for(bench, case) is not first) is again
    assert platform.problems[1:] == [bench.problem_for(case)] * again
    bound.launch_for(bench, case)
    assert len(platform.problems) == 1 + again


@pytest.mark.parametrize("variant", ["", "unaligned", "wide", "far"])
def test_arguments_to_bind_with_take_no_memory(variant: str) -> None:
    """Dtype, shape and alignment are the case's; a problem of gigabytes is bound all the same."""
    bench = sums_bench(sums_problem(1 << 16, 1 << 14))
    case = Case("", variant=variant)
    args = bench.sample_arguments(case)
    problem = bench.problem_for(case)
    x, _, out = args[:3]
    assert (x.shape, out.shape) == ((1 << 16, 1 << 14),) * 2
    assert out.dtype is (torch.float32 if variant == "wide" else torch.bfloat16)
    assert (x.data_ptr() % 16 == 0) is problem.argument("x").aligned
    assert x.untyped_storage().nbytes() <= 16
