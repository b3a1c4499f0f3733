"""What the gate holds a reference to: its promises, its digests, and kernels as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kalign_core.errors import CandidateFailed, NotTunable
from kalign_core.hal.cpu import CpuPlatform
from kalign_core.kernels.rms_norm import rms_norm_kernel
from kalign_core.records import Case
from kalign_core.verifier.bench import Bench
from kalign_core.verifier.bound import Fixed
from kalign_core.verifier.checks import CORE_CHECKS, DIGEST_FAMILIES
from kalign_core.verifier.gate import Gate
from kalign_core.verifier.variants import dense_problem
from tests.core.verifier_samples import (
    FAMILIES,
    adds,
    ascending,
    backwards,
    bound,
    changed,
    gate,
    good,
    refutation_of,
    sums_bench,
    sums_problem,
)

Tensor = torch.Tensor


# --- the reference ------------------------------------------------------------------------------------------------


def test_a_good_reference_gives_digests_of_the_core_cases() -> None:
    """Names and sixteen digits, the same every time; the inputs they were taken on come first."""
    first, second = gate(sums_bench()), gate(sums_bench())
    first.check_reference()
    second.check_reference()
    assert [text.partition("=")[0] for text in first.digests] == ["inputs", *DIGEST_FAMILIES]
    assert all(len(text.partition("=")[2]) == 16 for text in first.digests)
    assert first.digests == second.digests


def test_digests_do_not_depend_on_the_layout() -> None:
    """Two machines may compare calls whose tensors were padded otherwise."""
    plain, padded = sums_bench(), sums_bench()
    padded = sums_bench(padded.problem_for(Case("", variant="padded")))
    digests = []
    for bench in (plain, padded):
        here = gate(bench)
        here.check_reference()
        digests.append(here.digests)
    assert digests[0] == digests[1]


def test_digests_tell_other_sizes_apart() -> None:
    """They are comparable where sizes, dtypes and numbers are the same, and say so."""
    digests = []
    for rows in (20, 21):
        here = gate(sums_bench(sums_problem(rows)))
        here.check_reference()
        digests.append(here.digests[0])
    assert digests[0] != digests[1]


def stateful(change: Callable[[int, Tensor], None]) -> Callable[..., None]:
    """``good``, then ``change(run, total)``."""
    runs = 0

    def launch(*args: Any) -> None:
        nonlocal runs
        runs += 1
        good(*args)
        change(runs, args[3])

    return launch


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        (stateful(lambda run, total: total[0].mul_(run)), "two runs of it disagree"),
        (stateful(lambda run, total: torch.rand(1)), "random numbers"),
        (changed(lambda x, w, out, total, T: x.zero_()), "writes to x"),
        (changed(lambda x, w, out, total, T: w.add_(1)), "writes to weight"),
        (
            lambda x, w, out, total, *rest: total.copy_(ascending(x.float() * w.float())),
            "leaves elements of out unwritten",
        ),
        (
            changed(lambda x, w, out, total, T: total.as_strided((1,), (1,), total.storage_offset() + T).zero_()),
            "writes outside total",
        ),
        (changed(lambda x, w, out, total, T: total.mul_(T)), "depend on their batch"),
        (changed(lambda x, w, out, total, T: total.add_(x.float().sum())), "depend on their batch"),
        (changed(lambda x, w, out, total, T: total.mul_(torch.arange(T))), "depend on their batch"),
        (changed(lambda x, w, out, total, T: total.add_(0 * x.float().roll(1, 0).sum(-1))), "depend on their batch"),
    ],
)
def test_a_reference_that_breaks_a_promise_is_not_tunable(reference: Callable[..., None], reason: str) -> None:
    """The error says which promise."""
    with pytest.raises(NotTunable, match=reason):
        gate(sums_bench(), reference).check_reference()


def test_strict_holds_the_reference_to_itself_under_other_layouts() -> None:
    """The same numbers give the same bits wherever they lie; only the strict suite asks."""
    reference = changed(lambda x, w, out, total, T: total.neg_() if x.data_ptr() % 16 else None)
    gate(sums_bench(), reference).check_reference()
    with pytest.raises(NotTunable, match="depends on the layout"):
        gate(sums_bench(strict=True), reference).check_reference()


def test_a_reference_that_cannot_be_launched_is_not_tunable() -> None:
    """The reason is passed on."""

    def fails(*args: Any) -> None:
        raise CandidateFailed("no such instruction")

    with pytest.raises(NotTunable, match="no such instruction"):
        gate(sums_bench(), fails).check_reference()


def test_a_reference_may_add_to_what_is_there() -> None:
    """Accumulated outputs start from the same numbers in every run, so that they agree."""
    bench = Bench(CpuPlatform(), adds, dense_problem(adds, {"T": 20, "H": 8}, {"x": "fp32", "out": "fp32"}), -1)
    bench.families.update(FAMILIES)
    here = Gate(bench, Fixed(lambda x, out, T, H: out.add_(ascending(x.t()))), CORE_CHECKS)
    here.check_reference()
    [same, other] = here.examine(
        [
            Fixed(lambda x, out, T, H: out.add_(ascending(x.t()))),
            Fixed(lambda x, out, T, H: out.copy_(ascending(x.t()))),
        ]
    )
    assert (same.state, other.state) == ("not refuted", "refuted")


def test_a_kernel_without_rows_is_checked_at_other_sizes_of_its_bucket() -> None:
    """A gradient sized by the batch is right at the edge and wrong inside."""
    bench = Bench(CpuPlatform(), adds, dense_problem(adds, {"T": 64, "H": 8}, {"x": "fp32", "out": "fp32"}), -1)
    bench.families.update(FAMILIES)

    def by_the_batch(x: Tensor, out: Tensor, T: int, H: int) -> None:
        rows = x.t()
        out.add_(
            ascending(rows)
            if T == 64
            else ascending(rows[:, : T // 2]) + ascending(rows[:, T // 2 :])
            if T > 1
            else rows[:, 0]
        )

    here = Gate(bench, Fixed(lambda x, out, T, H: out.add_(ascending(x.t()))), CORE_CHECKS)
    [verdict] = here.examine([Fixed(by_the_batch)])
    assert verdict.refutation is not None
    assert verdict.refutation.check == "batch axis"


# --- real kernels -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
def test_equal_configurations_of_a_real_kernel_are_not_refuted(strict: bool) -> None:
    """Rows per program do not change the bits of an order-canonical reduction."""
    dtypes = {"x": "bf16", "weight": "bf16", "out": "bf16", "rstd": "fp32"}
    problem = dense_problem(rms_norm_kernel, {"T": 5, "H": 24}, dtypes, {"eps": 1e-6})
    bench = Bench(CpuPlatform(), rms_norm_kernel, problem, -1, strict=strict)
    bench.families.update(FAMILIES)
    reference = rms_norm_kernel.reference_config(problem)
    here = Gate(bench, bench.bound(reference), CORE_CHECKS)
    here.check_reference()
    verdicts = here.examine([bench.bound(reference.replace(ROWS=rows)) for rows in (1, 2, 32)])
    assert [verdict.refutation for verdict in verdicts] == [None, None, None]


def test_a_plain_function_has_no_command_to_repeat_it() -> None:
    """What no other process can import cannot be run again by a command."""
    assert refutation_of(changed(backwards)).repeat == ""
    bench = sums_bench()
    [verdict] = gate(bench).examine([bound(bench, changed(backwards))])
    assert verdict.refutation is not None
    assert verdict.refutation.repeat == ""
