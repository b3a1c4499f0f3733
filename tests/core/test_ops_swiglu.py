"""ops.swiglu: accuracy, the bits its contract promises, the shapes it takes and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kalign_core.errors import BadArgument, KalignError, MixedDevices
from tests.core.scripted import assert_near, assert_rows_keep_their_bits, bits, company, leaf, normals, ops

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def both_ways(gate: torch.Tensor, up: torch.Tensor, d_out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Result and both gradients for an upstream gradient."""
    gate, up = gate.detach().requires_grad_(), up.detach().requires_grad_()
    out = ops.swiglu(gate, up)
    return (out.detach(), *torch.autograd.grad(out, (gate, up), d_out))


# --- accuracy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_accurate(dtype: torch.dtype) -> None:
    """The result is that of float64, rounded once."""
    gate, up = normals(3, 40, dtype=dtype), normals(3, 40, dtype=dtype, seed=1)
    assert_near(ops.swiglu(gate, up), ops.swiglu.oracle(gate, up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_its_gradients_are_accurate(dtype: torch.dtype) -> None:
    """Both gradients are those of float64, rounded once, for any upstream gradient."""
    gate, up, d_out = (normals(3, 40, dtype=dtype, seed=i) for i in range(3))
    wide = [gate.double().requires_grad_(), up.double().requires_grad_()]
    exact = torch.autograd.grad(ops.swiglu.oracle(*wide), wide, d_out.double())
    _, d_gate, d_up = both_ways(gate, up, d_out)
    assert_near(d_up, exact[1])
    # s * (1 + g * (1 - s)) cancels where g is near -1.28; what is added there is about s in size.
    sigmoid = torch.sigmoid(gate.double())
    assert_near(d_gate, exact[0], magnitude=(d_out.double() * up.double()).abs() * sigmoid * (1 + gate.double().abs()))


def test_large_gates_saturate() -> None:
    """Where the exponential overflows or vanishes the result is the limit, and no NaN."""
    gate = torch.tensor([[-200.0, -100.0, 100.0, 200.0]])
    out, d_gate, d_up = both_ways(gate, torch.ones(1, 4), torch.ones(1, 4))
    assert out.tolist() == [[-0.0, -0.0, 100.0, 200.0]]
    assert (d_gate.tolist(), d_up.tolist()) == ([[-0.0, -0.0, 1.0, 1.0]], [[-0.0, -0.0, 100.0, 200.0]])


# --- bits ---------------------------------------------------------------------------------------------------------


def test_its_bits_are_the_contract_s() -> None:
    """Forward and backward compute, step by step in float32, the formula that stands in the kernel's file."""
    gate, up, d = (normals(2, 40, seed=i) * 3 for i in range(3))
    g, u, d_out = gate.numpy(), up.numpy(), d.numpy()
    one = np.float32(1)
    s = one / (one + np.exp(-g))
    expected = ((g * s) * u, (d_out * u) * (s * (one + g * (one - s))), d_out * (g * s))
    assert [bits(t) for t in both_ways(gate, up, d)] == [e.tobytes() for e in expected]


@company
def test_a_row_keeps_its_bits(company: str) -> None:
    """A row's bits depend on nothing but the row, forward and backward."""
    assert_rows_keep_their_bits(both_ways, company, *(normals(5, 24, seed=i) for i in range(3)))


def test_an_element_keeps_its_bits() -> None:
    """An element's bits do not depend on where in its row it stands, nor on the length of the row."""
    gate, up = normals(1, 40), normals(1, 40, seed=1)
    whole = ops.swiglu(gate, up)
    for start, end in ((0, 1), (7, 24), (39, 40)):
        part = ops.swiglu(gate[:, start:end].clone(), up[:, start:end].clone())
        assert bits(part) == bits(whole[:, start:end])


# --- shapes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(40,), (1, 40), (2, 3, 40), (2, 1, 3, 8), (4, 1), (1, 1)])
def test_leading_dimensions_are_rows(shape: tuple[int, ...]) -> None:
    """Any number of leading dimensions is taken, and the result has the same."""
    gate, up = normals(*shape), normals(*shape, seed=1)
    out = ops.swiglu(gate, up)
    assert (out.shape, out.is_contiguous()) == (gate.shape, True)
    assert bits(out) == bits(ops.swiglu(gate.reshape(-1, shape[-1]), up.reshape(-1, shape[-1])))


def test_halves_of_one_projection_are_taken_as_they_are() -> None:
    """Gate and up may be the two halves of one ``(T, 2 F)`` buffer; gradients flow back into it."""
    joined = leaf(3, 48)
    gate, up = joined.chunk(2, dim=1)
    out = ops.swiglu(gate, up)
    out.backward(normals(3, 24, seed=2))
    _, d_gate, d_up = both_ways(gate.contiguous(), up.contiguous(), normals(3, 24, seed=2))
    assert bits(out) == bits(ops.swiglu(gate.contiguous(), up.contiguous()))
    assert bits(joined.grad) == bits(torch.cat([d_gate, d_up], dim=1))  # type: ignore[arg-type]


@pytest.mark.parametrize("view", [lambda t: t.t().contiguous().t(), lambda t: t.repeat_interleave(2, 1)[:, ::2]])
def test_rows_that_are_not_dense_are_copied(view: Any) -> None:
    """A last axis with gaps gives the bits of the dense one."""
    tensors = [normals(3, 24, seed=i) for i in range(3)]
    assert [bits(t) for t in both_ways(*map(view, tensors))] == [bits(t) for t in both_ways(*tensors)]


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0), (2, 0, 8), (0,)])
def test_empty_tensors_give_empty_ones(shape: tuple[int, ...]) -> None:
    """No rows or no columns give an empty result and empty gradients of the right shape and dtype."""
    gate, up = (torch.empty(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    out = ops.swiglu(gate, up)
    out.sum().backward()
    assert (out.shape, out.dtype) == (gate.shape, gate.dtype)
    assert gate.grad is not None and gate.grad.shape == gate.shape  # noqa: PT018


# --- gradients ----------------------------------------------------------------------------------------------------


def test_an_expanded_upstream_gradient_is_taken() -> None:
    """The gradient of a sum comes with strides of zero, and counts as the ones it stands for."""
    gate, up = leaf(3, 24), leaf(3, 24, seed=1)
    ops.swiglu(gate, up).sum().backward()
    assert bits(gate.grad) == bits(both_ways(gate, up, torch.ones(3, 24))[1])  # type: ignore[arg-type]


def test_one_tensor_may_be_both() -> None:
    """Passing one tensor twice adds up both gradients."""
    x = leaf(2, 8)
    ops.swiglu(x, x).backward(torch.ones(2, 8))
    _, d_gate, d_up = both_ways(x, x, torch.ones(2, 8))
    assert x.grad is not None
    assert torch.equal(x.grad, d_gate + d_up)


def test_a_second_derivative_is_an_error() -> None:
    """Going back through a gradient raises, also where only a part of the sum needs it."""
    gate, up = leaf(2, 8), leaf(2, 8, seed=1)
    (d_gate,) = torch.autograd.grad(ops.swiglu(gate, up).sum(), gate, create_graph=True)
    with pytest.raises(KalignError, match="swiglu cannot be differentiated twice"):
        (d_gate.square().sum() + gate.sum()).backward()


def test_backward_runs_twice_over_one_graph() -> None:
    """A kept graph gives the same gradients again."""
    gate, up = leaf(2, 8), leaf(2, 8, seed=1)
    out = ops.swiglu(gate, up)
    first, second = (torch.autograd.grad(out.sum(), (gate, up), retain_graph=True) for _ in range(2))
    assert [bits(t) for t in first] == [bits(t) for t in second]


# --- out= ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", [torch.empty(3, 24), torch.empty(3, 40)[:, 8:32], torch.empty(80)[1:73].view(3, 24)])
def test_out_takes_the_result(out: torch.Tensor) -> None:
    """``out=`` is written and given back, dense or with a row stride, aligned or not."""
    gate, up = normals(3, 24), normals(3, 24, seed=1)
    for _ in range(2):  # a first call and one like it
        assert ops.swiglu(gate, up, out=out.fill_(9)) is out
        assert bits(out) == bits(ops.swiglu(gate, up))


def test_the_gaps_of_out_are_left_alone() -> None:
    """Nothing outside the result's elements is written."""
    buffer = torch.full((3, 40), 9.0)
    ops.swiglu(normals(3, 24), normals(3, 24, seed=1), out=buffer[:, 8:32])
    assert (buffer[:, :8] == 9).all()
    assert (buffer[:, 32:] == 9).all()


def test_out_may_be_an_input() -> None:
    """Computing in place gives the same bits."""
    gate, up = normals(3, 24), normals(3, 24, seed=1)
    expected = ops.swiglu(gate, up)
    assert bits(ops.swiglu(gate, up, out=gate)) == bits(expected)


def test_out_may_lie_beside_an_input() -> None:
    """A slice of the buffer that holds the inputs is a place like any other."""
    buffer = normals(3, 72)
    gate, up, out = buffer.chunk(3, dim=1)
    expected = ops.swiglu(gate, up)
    assert bits(ops.swiglu(gate, up, out=out)) == bits(expected)


def test_out_may_not_overlap_an_input() -> None:
    """A result that would be written over elements not read yet is refused."""
    buffer = normals(4, 24)
    with pytest.raises(BadArgument, match="out shares memory with gate"):
        ops.swiglu(buffer[:3], normals(3, 24), out=buffer[1:])


def test_writing_is_seen_by_autograd() -> None:
    """A tensor that was saved for a gradient and then written over is noticed."""
    saved = normals(2, 8)
    product = leaf(2, 8) * saved
    ops.swiglu(normals(2, 8), normals(2, 8), out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_out_and_gradients_exclude_each_other() -> None:
    """A gradient that would be lost in silence is an error that says what to leave away."""
    gate, up = leaf(2, 8), normals(2, 8)
    with pytest.raises(BadArgument, match=r"torch.no_grad\(\)"):
        ops.swiglu(gate, up, out=torch.empty(2, 8))
    with torch.no_grad():
        assert not ops.swiglu(gate, up, out=torch.empty(2, 8)).requires_grad


# --- what it refuses ----------------------------------------------------------------------------------------------

X = normals(3, 24)


@pytest.mark.parametrize(
    ("gate", "up", "options", "says"),
    [
        (X, X[:2], {}, r"up is \(2, 24\)"),
        (X, X[:, :8], {}, r"up is \(3, 8\)"),
        (X, X.bfloat16(), {}, "up is .* torch.bfloat16, gate is .* torch.float32"),
        (X.double(), X.double(), {}, r"torch.float64\n.*bfloat16, float16, float32\n.*gate.to\(torch.bfloat16\)"),
        (X.int(), X.int(), {}, "gate is torch.int32"),
        (X[0, 0], X[0, 0], {}, r"gate is a scalar\n.*\n.*gate.reshape\(1, 1\)"),
        ([1.0], X, {}, "gate is list, not a tensor"),
        (X, None, {}, "up is NoneType, not a tensor"),
        (X, X.numpy(), {}, r"up is ndarray, not a tensor\n.*torch.as_tensor\(up\)"),
        (X, X, {"out": torch.empty(3, 8)}, r"out is \(3, 8\)"),
        (X, X, {"out": torch.empty(3, 24, dtype=torch.float16)}, "out is .* torch.float16"),
        (X, X, {"out": torch.empty(24, 3).t()}, "out has strides"),
        (X, X, {"out": torch.empty(3, 24, device="meta")}, "out is .* on meta"),
        (X, X, {"out": 3}, "out is int, not a tensor"),
    ],
)
def test_what_it_cannot_take_is_refused(gate: Any, up: Any, options: dict[str, Any], says: str) -> None:
    """Wrong kinds, shapes, dtypes and outputs name the argument and, where there is one, the remedy."""
    with pytest.raises(BadArgument, match=f"(?s)swiglu: .*{says}"):
        ops.swiglu(gate, up, **options)


@pytest.mark.parametrize("grad", [True, False])
def test_strangers_are_named_whether_or_not_gradients_are_wanted(grad: bool) -> None:
    """The same error comes with a first argument that needs a gradient."""
    with torch.set_grad_enabled(grad), pytest.raises(BadArgument, match="up is list"):
        ops.swiglu(leaf(2, 8), [1.0])


def test_mixed_devices_are_named() -> None:
    """Tensors on two devices name both and how to bring them together."""
    with pytest.raises(MixedDevices, match=r"(?s)gate on cpu, up on meta.*\.to\("):
        ops.swiglu(X, X.to("meta"))


def test_a_device_of_another_platform_is_refused() -> None:
    """Tensors that the platform in use does not serve say which it serves."""
    with pytest.raises(MixedDevices, match="tensors are on meta, the platform in use is cpu"):
        ops.swiglu(X.to("meta"), X.to("meta"))


# --- with the rest of torch ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::UserWarning")  # the compiler's own, about the tensors it looks at
def test_a_compiled_model_gives_the_same_bits() -> None:
    """Inside ``torch.compile`` the operator runs as it is, with gradients."""
    gate, up = leaf(2, 8), normals(2, 8, seed=1)
    model = torch.compile(lambda g, u: ops.swiglu(g * 2, u), backend="eager")
    out = model(gate, up)
    assert bits(out) == bits(ops.swiglu(gate.detach() * 2, up))
    (d_gate,) = torch.autograd.grad(out.sum(), gate)
    assert bits(d_gate) == bits(2 * both_ways(gate.detach() * 2, up, torch.ones(2, 8))[1])
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, about asking such a tensor for its address
def test_a_fake_tensor_is_refused() -> None:
    """A tensor without memory is refused, also where one like it with memory was computed before."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    ops.swiglu(normals(2, 8), normals(2, 8))
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(normals(2, 8))
        with pytest.raises(BadArgument, match="is a fake tensor"):
            ops.swiglu(fake, fake)


def test_recomputing_gives_the_same_gradients() -> None:
    """Under activation checkpointing gradients are those of the plain call."""
    gate, up = leaf(2, 8), leaf(2, 8, seed=1)
    out = torch.utils.checkpoint.checkpoint(ops.swiglu, gate, up, use_reentrant=False)
    got = torch.autograd.grad(out.sum(), (gate, up))
    assert [bits(t) for t in got] == [bits(t) for t in both_ways(gate, up, torch.ones(2, 8))[1:]]
