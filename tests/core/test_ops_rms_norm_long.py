"""Rows of ops.rms_norm that are read twice: the bits of those that are held, which kernels run, what the gate says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from kalign_core.api import recorded
from kalign_core.declare import Config, Kernel, lower
from kalign_core.hal.cpu import CpuPlatform
from kalign_core.kernels.rms_norm import FOLD_ROWS, LONGEST_HELD, rms_norm_dweight_fold_kernel
from kalign_core.kernels.rms_norm_long import (
    rms_norm_long_backward_kernel,
    rms_norm_long_dot_kernel,
    rms_norm_long_kernel,
    rms_norm_long_residual_kernel,
)
from kalign_core.ops import rms_norm_plain
from kalign_core.ops.rms_norm_plain import MAX_ROW, backward, forward, forward_with_residual
from kalign_core.session import Session
from kalign_core.settings import Settings
from kalign_core.verifier.checks import CORE_CHECKS
from kalign_core.verifier.gate import Gate
from tests.bad_kernels import Bad, open_bench
from tests.bad_kernels.long_rows import LONG_ROWS
from tests.core.scripted import assert_rows_keep_their_bits, bits, company, leaf, normals, ops, scripted
from tests.core.test_ops_launches import under
from tests.core.test_ops_rms_norm import EPS, both_ways, residual_both_ways

LONG = LONGEST_HELD + 8
CHUNKED = (rms_norm_long_kernel, rms_norm_long_residual_kernel, rms_norm_long_dot_kernel)


@contextmanager
def read_twice(chunk_log2: int, longest_held: int = 0) -> Iterator[None]:
    """Rows of more than ``longest_held`` elements are long, and read by chunks of ``2**chunk_log2``."""
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(rms_norm_plain, "LONGEST_HELD", longest_held)
        for kernel in CHUNKED:
            stack.enter_context(under(kernel, CHUNK_LOG2=chunk_log2))
        stack.enter_context(Session(configuration=Settings()).active())
        yield


def everything(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, *upstream: torch.Tensor) -> list[bytes]:
    """All that forward and backward compute of rows, with a residual and without, and the weight's gradient."""
    d_y, d_h = upstream
    y, rstd = forward(x, weight, EPS)
    z, h, h_rstd = forward_with_residual(x, residual, weight, EPS)
    with under(rms_norm_dweight_fold_kernel, BLOCK=512):  # few programs
        gradients = (*backward(x, weight, rstd, d_y), *backward(h, weight, h_rstd, d_y, d_h))
    return [bits(t) for t in (y, rstd, z, h, h_rstd, *gradients) if t is not None]


def tensors(rows: int, width: int, dtype: torch.dtype, weight: torch.dtype) -> tuple[torch.Tensor, ...]:
    x, residual, d_y, d_h = (normals(rows, width, dtype=dtype, seed=i) for i in range(4))
    return x, residual, normals(width, dtype=weight, seed=9), d_y, d_h


# --- bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "weight"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)],
    ids=str,
)
@pytest.mark.parametrize(("rows", "width", "chunk_log2"), [(19, 1100, 8), (2, 1500, 5), (3, 2048, 13)])
def test_a_long_row_has_the_bits_of_a_held_one(
    rows: int, width: int, chunk_log2: int, dtype: torch.dtype, weight: torch.dtype
) -> None:
    """Results, what is kept for going back and gradients are the same bytes however a row is cut, or not at all."""
    given = tensors(rows, width, dtype, weight)
    with Session(configuration=Settings()).active():
        held = everything(*given)
    with read_twice(chunk_log2):
        assert everything(*given) == held


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -0.0, 1e-40, 3e19])
def test_so_it_has_where_values_are_special(value: float) -> None:
    """NaN, infinities, zeros of either sign, subnormals and squares that overflow give the same bytes too."""
    given = tensors(3, 1100, torch.float32, torch.float32)
    for tensor in given:
        tensor[..., 5] = value
        tensor[..., 700:] = value
    with Session(configuration=Settings()).active():
        held = everything(*given)
    with read_twice(8):
        assert everything(*given) == held


def test_so_it_has_where_the_longest_is_held() -> None:
    """A row of 65,536 elements has the same bytes held whole and by the chunks that longer ones are read in."""
    x, residual, weight, d_y, _ = tensors(1, LONGEST_HELD, torch.bfloat16, torch.bfloat16)

    def rows_of() -> list[bytes]:
        y, rstd = forward(x, weight, EPS)
        z, h, h_rstd = forward_with_residual(x, residual, weight, EPS)
        d_x, d_sum = (backward(*t, needs=(True, False))[0] for t in ((x, weight, rstd, d_y), (h, weight, h_rstd, d_y)))
        return [bits(t) for t in (y, rstd, z, h, h_rstd, d_x, d_sum) if t is not None]

    with Session(configuration=Settings()).active():
        held = rows_of()
    with read_twice(13):
        assert rows_of() == held


def test_the_weight_s_gradient_of_long_rows_is_folded_in_blocks() -> None:
    """Blocks of 16 rows are added in ascending order from +0, then the blocks."""
    rows = FOLD_ROWS + 1
    x, d_y, rstd = normals(rows, LONG), normals(rows, LONG, seed=1), normals(rows, seed=2)
    with under(rms_norm_dweight_fold_kernel, BLOCK=512), Session(configuration=Settings()).active():
        _, got = backward(x, torch.ones(LONG), rstd, d_y, needs=(False, True))
    terms = d_y * (x * rstd[:, None])
    first = torch.zeros(LONG)
    for row in terms[:FOLD_ROWS]:
        first = first + row
    assert bits(got) == bits(first + terms[FOLD_ROWS])  # type: ignore[arg-type]


@company
def test_a_long_row_keeps_its_bits(company: str) -> None:
    """A row's bits depend on nothing but the row, its residual and the weight, forward and backward."""
    with read_twice(3):
        batches = [normals(5, 24, seed=i) for i in range(4)]
        assert_rows_keep_their_bits(residual_both_ways, company, *batches)
        assert_rows_keep_their_bits(lambda x, d: both_ways(x, d)[:2], company, *batches[:2])


@pytest.mark.parametrize("padding", [1, 70])
def test_trailing_rows_without_a_gradient_change_nothing(padding: int) -> None:
    """The weight's gradient is the same however many padding rows stand behind the real ones."""
    x, d_y = normals(20, 24), normals(20, 24, seed=1)
    padded = torch.cat([x, normals(padding, 24, seed=2)]), torch.cat([d_y, torch.zeros(padding, 24)])
    with read_twice(3):
        assert bits(both_ways(*padded)[2]) == bits(both_ways(x, d_y)[2])


# --- which kernels run ----------------------------------------------------------------------------------------------


def kernels_of(*args: Any) -> list[str]:
    with scripted().active():
        return [call.kernel.name for call in recorded(ops.rms_norm, *args)]


def test_rows_are_long_past_a_number_in_the_code() -> None:
    """Rows of up to 65,536 elements are held, longer ones read twice, whatever the device; 262,144 is the most."""
    assert (LONGEST_HELD, MAX_ROW) == (65536, 262144)
    for width, name in ((65536, "rms_norm"), (65537, "rms_norm_long"), (MAX_ROW, "rms_norm_long")):
        assert kernels_of(torch.zeros(1, width), torch.zeros(width)) == [name]


@pytest.mark.parametrize(
    ("needs_x", "needs_weight", "names"),
    [
        (True, True, ["rms_norm_long_dot", "rms_norm_long_backward", "rms_norm_dweight_fold"]),
        (True, False, ["rms_norm_long_dot", "rms_norm_long_backward"]),
        (False, True, ["rms_norm_long_backward", "rms_norm_dweight_fold"]),
    ],
)
def test_only_what_is_needed_is_computed(needs_x: bool, needs_weight: bool, names: list[str]) -> None:
    """A frozen weight spares its sum over rows, a frozen input the sum along them."""
    x, weight = torch.zeros(2, LONG).requires_grad_(needs_x), torch.zeros(LONG).requires_grad_(needs_weight)
    assert kernels_of(x, weight) == ["rms_norm_long", *names]
    assert kernels_of(x, weight, EPS, torch.zeros(2, LONG)) == ["rms_norm_long_residual", *names]


def test_every_kernel_is_reached() -> None:
    """Short rows and long ones, with a residual and without, run all kernels that the operator declares."""
    reached = []
    for width in (8, LONG):
        x, weight = torch.zeros(1, width, requires_grad=True), torch.zeros(width, requires_grad=True)
        reached += kernels_of(x, weight) + kernels_of(x, weight, EPS, torch.zeros(1, width))
    assert set(reached) == {kernel.name for kernel in ops.rms_norm.kernels}


def test_the_number_of_rows_is_no_part_of_the_code() -> None:
    """Calls of long rows that differ in how many there are alone are one compile."""
    lowered = []
    for rows in (1, 3, 16):
        x, weight = torch.zeros(1, LONG).expand(rows, LONG).clone(), torch.zeros(LONG)
        with scripted().active():
            calls = recorded(ops.rms_norm, x.requires_grad_(), weight.requires_grad_(), EPS, torch.zeros_like(x))
        lowered.append([lower(c.kernel, c.problem, c.kernel.reference_config(c.problem)) for c in calls])
    assert lowered[0] == lowered[1] == lowered[2]


# --- shapes, out=, torch.compile --------------------------------------------------------------------------------------


def test_leading_dimensions_are_rows() -> None:
    """Any number of leading dimensions is taken, and no rows at all."""
    x, weight = normals(2, 1, LONG), normals(LONG, seed=1)
    assert bits(ops.rms_norm(x, weight)) == bits(ops.rms_norm(x.view(2, LONG), weight))
    assert ops.rms_norm(x[:0], weight).shape == (0, 1, LONG)


def test_out_takes_the_result_and_may_be_x() -> None:
    """``out=`` is written and given back, between other columns too; computing in place gives the same bits."""
    x, weight = normals(2, LONG), normals(LONG, seed=1)
    expected = bits(ops.rms_norm(x, weight))
    for out in (torch.empty(2, LONG), torch.empty(2, LONG + 24)[:, 8 : LONG + 8]):
        assert ops.rms_norm(x, weight, out=out) is out
        assert bits(out) == expected
    assert bits(ops.rms_norm(x, weight, out=x)) == expected


@pytest.mark.filterwarnings("ignore::UserWarning")  # the compiler's own, about the tensors it looks at
@pytest.mark.parametrize("has_residual", [False, True])
def test_a_compiled_call_is_one_node_with_the_same_bits(has_residual: bool) -> None:
    """Inside ``torch.compile`` long rows break no graph, and have the bits they have outside, gradients included."""

    def run(call: Callable[..., Any]) -> list[bytes]:
        x, weight, residual = leaf(3, 24), leaf(24, seed=1), leaf(3, 24, seed=2)
        results = call(x, weight, EPS, residual) if has_residual else (call(x, weight, EPS),)
        wanted = (x, weight, residual) if has_residual else (x, weight)
        gradients = torch.autograd.grad(results, wanted, [torch.ones_like(r) for r in results])
        return [bits(t) for t in (*results, *gradients)]

    with read_twice(3):
        try:
            compiled = torch.compile(lambda *a: ops.rms_norm(*a), backend="aot_eager", fullgraph=True)
            assert run(compiled) == run(ops.rms_norm)
        finally:
            torch.compiler.reset()


# --- the gate -------------------------------------------------------------------------------------------------------

WHOLE = {"x": "bf16", "weight": "bf16", "out": "bf16", "rstd": "fp32"}
BACK = {**dict.fromkeys(("x", "weight", "d_out", "d_h", "d_x"), "bf16"), "rstd": "fp32", "partial": "fp32"}
SMALL: tuple[tuple[Kernel, dict[str, str], dict[str, Any], dict[str, tuple[int, ...]]], ...] = (
    (rms_norm_long_kernel, WHOLE, {"eps": EPS}, {"CHUNK_LOG2": (4, 13), "KEEP": (8,)}),
    (
        rms_norm_long_residual_kernel,
        {**WHOLE, "residual": "bf16", "h": "bf16"},
        {"eps": EPS},
        {"CHUNK_LOG2": (4, 13)},
    ),
    (
        rms_norm_long_dot_kernel,
        {"x": "bf16", "weight": "bf16", "d_out": "bf16", "row_dot": "fp32"},
        {},
        {"CHUNK_LOG2": (4, 13)},
    ),
    (rms_norm_long_backward_kernel, {**BACK, "row_dot": "fp32"}, {}, {"BLOCK": (64,)}),
)


@pytest.mark.parametrize(("kernel", "dtypes", "numbers", "knobs"), SMALL, ids=[str(row[0]) for row in SMALL])
def test_the_gate_refutes_no_way_of_cutting_a_row(
    kernel: Kernel, dtypes: dict[str, str], numbers: dict[str, Any], knobs: dict[str, tuple[int, ...]]
) -> None:
    """The references keep their promises, and what cuts rows otherwise is not refuted beside them."""
    home = _small(kernel)
    posed = Bad(kernel.name, "", kernel, {"T": 3, "H": 40}, dtypes, "", home=home, numbers=numbers)
    bench = open_bench(posed, CpuPlatform(), -1, strict=False)
    here = Gate(bench, bench.bound(home), CORE_CHECKS)
    here.check_reference()
    tried = [home.replace(**{knob: value}) for knob, values in knobs.items() for value in values]
    verdicts = here.examine([bench.bound(config) for config in tried])
    assert [str(v.refutation) for v in verdicts if v.refutation is not None] == []


@pytest.mark.parametrize("bad", LONG_ROWS, ids=lambda bad: bad.name)
def test_the_gate_refutes_another_order(bad: Bad) -> None:
    """Chunks that are added one after the other, sums that are not rounded first and rows from the last are refuted."""
    bench = open_bench(bad, CpuPlatform(), -1, strict=False)
    here = Gate(bench, bench.bound(bad.reference_config(bench)), CORE_CHECKS)
    assert here.examine([bad.candidate(bench)])[0].refutation is not None


def _small(kernel: Kernel) -> Config:
    """The reference with chunks and pieces of 8 and 32 elements."""
    assert isinstance(kernel.reference, Config)
    return kernel.reference.replace(**({"CHUNK_LOG2": 3} if "CHUNK_LOG2" in kernel.knobs else {"BLOCK": 32}))
