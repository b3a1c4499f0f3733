"""Inputs whose rows are one row in memory: made, moved and compared like any others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kalign_core.kernels.matmul import matmul_kernel
from kalign_core.records import Case, Problem
from kalign_core.verifier.bound import Fixed
from kalign_core.verifier.variants import dense_problem, variant
from tests.core.verifier_samples import gate, good, sums_bench, sums_problem, tensor_of


def one_row_for_all(problem: Problem) -> Problem:
    """``problem`` with an x whose rows are one row in memory."""
    changes: dict[str, dict[str, Any]] = {"x": {"strides": (0, 1)}, "x_stride": {"value": 0}}
    return replace(problem, args=tuple(replace(arg, **changes.get(arg.name, {})) for arg in problem.args))


def test_rows_that_are_one_row_in_memory_are_the_same_in_every_case() -> None:
    """An input without a stride from row to row holds the first row of all, wherever and however few rows are."""
    bench = sums_bench(one_row_for_all(sums_problem()))
    whole = tensor_of(bench, Case(""), "x").clone()
    assert (tensor_of(bench, Case(""), "x").stride(), len(whole.unique(dim=0))) == ((0, 1), 1)
    assert torch.equal(whole[0], tensor_of(sums_bench(), Case(""), "x")[0])
    for case in (Case("", shift=3), Case("", dims=(("T", 1),)), Case("", neighbours="nan", kept=(0,))):
        assert torch.equal(tensor_of(bench, case, "x")[0], whole[0])


@pytest.mark.parametrize("strict", [False, True])
def test_such_a_layout_is_held_to_the_whole_suite(strict: bool) -> None:
    """A reference keeps its promises on it, and a candidate that breaks its own is seen."""
    here = gate(sums_bench(one_row_for_all(sums_problem()), strict=strict))

    def off_by_one(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, *rest: Any) -> None:
        good(x, weight, out, *rest)
        out[-1, -1] += 1

    here.check_reference()
    assert [verdict.state for verdict in here.examine([Fixed(good), Fixed(off_by_one)])] == ["not refuted", "refuted"]


def test_what_has_no_stride_is_not_transposed() -> None:
    """An axis without a stride would be given one, and the tensor other numbers."""
    dtypes = {"a": "bf16", "b": "bf16", "bias": "none", "c": "bf16"}
    problem = dense_problem(matmul_kernel, {"M": 8, "N": 6, "K": 10}, dtypes)
    flat = tuple(replace(arg, strides=(0, 1)) if arg.name == "a" else arg for arg in problem.args)
    made = variant(matmul_kernel, replace(problem, args=flat), "transposed")
    assert made is not None
    assert (made.argument("a").strides, made.argument("b").strides) == ((0, 1), (1, 10))
