"""What holds for every shared operator: recalled calls, calls inside ``torch.compile``, gradients in both."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kalign_core as kalign
from kalign_core.session import Session
from kalign_core.settings import Settings
from tests.core.scripted import bits, ops

OPERATORS = ops.operators()
by_name = pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.name)
HOST = torch.device("cpu")
REFERENCES = ["rope", "ratio_kl", "grpo_loss", "group_advantage", "embedding", "pack", "selected_logprob"]


def given(op: Any, seed: int = 0) -> tuple[Any, ...]:
    return tuple(op.inputs(op.small_shapes[0], op.dtypes[0], seed, HOST))


def tensors(result: Any) -> list[torch.Tensor]:
    return list(result) if isinstance(result, tuple) else [result]


def both_ways(call: Any, args: tuple[Any, ...]) -> list[bytes]:
    """The bytes of every result of a call and of every gradient, for upstream gradients of ones and more."""
    args = tuple(a.detach().requires_grad_(a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args)
    results = tensors(call(*args))
    wanted = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    upstream = [torch.linspace(1, 2, r.numel()).view(r.shape).to(r.dtype) for r in results]
    gradients = torch.autograd.grad(results, wanted, upstream) if wanted else ()
    return [bits(t) for t in (*results, *gradients)]


@by_name
def test_a_recalled_call_has_the_bits_of_a_first_one(op: Any) -> None:
    """A call like one before gives what it would have given as the first of its session, into memory of its own."""
    first, second = given(op), given(op, seed=10)
    with Session(configuration=Settings()).active():
        expected = both_ways(op, second)
    with Session(configuration=Settings()).active() as session:
        both_ways(op, first)
        both_ways(op, first)
        assert both_ways(op, second) == expected
        known = len(session.calls)
        both_ways(op, second)
        assert len(session.calls) == known
        one, two = (tensors(op(*second)) for _ in range(2))
        assert len({t.data_ptr() for t in (*one, *two)}) == 2 * len(one)


@by_name
def test_arguments_are_never_written(op: Any) -> None:
    """A call and its gradient leave every argument as it was."""
    args = given(op)
    before = [bits(a) for a in args if isinstance(a, torch.Tensor)]
    both_ways(op, args)
    assert [bits(a) for a in args if isinstance(a, torch.Tensor)] == before


@pytest.mark.filterwarnings("ignore::UserWarning")  # the compiler's own, about the tensors it looks at
@by_name
def test_a_compiled_call_is_one_node_with_the_same_bits(op: Any) -> None:
    """Inside ``torch.compile`` an operator breaks no graph, and gives the bits it gives outside, gradients included."""
    args = given(op)
    try:
        compiled = torch.compile(lambda *a: op(*a), backend="aot_eager", fullgraph=True)
        assert both_ways(compiled, args) == both_ways(op, args)
    finally:
        torch.compiler.reset()


@pytest.mark.parametrize(
    "name", ["rope", "ratio_kl", "grpo_loss", "group_advantage", "embedding", "pack", "selected_logprob"]
)
def test_the_gate_passes_every_reference(name: str) -> None:
    """Each kernel's reference keeps what it promises: outputs written, rows for themselves, the same bytes again."""
    op = ops.named(name)
    with Session(configuration=Settings()).active():
        verdicts = kalign.verify(op, *given(op))
    assert {v.kernel for v in verdicts} == {kernel.name for kernel in op.kernels}
    assert {v.kernel: str(v.verdict.refutation) for v in verdicts if v.verdict.state != "not refuted"} == {}
