"""ops.matmul: accuracy, the bits its contract promises, the layouts it takes and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kalign_core.errors import BadArgument, KalignError, MixedDevices
from tests.core.scripted import assert_near, assert_rows_keep_their_bits, bits, company, leaf, normals, ops

DTYPES = [torch.bfloat16, torch.float16]
BF16 = torch.bfloat16


def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The contract step by step: float32, K in ascending order from +0, the bias last, one rounding."""
    left, right = a.float().numpy(), b.float().numpy()
    total = np.zeros((left.shape[0], right.shape[1]), np.float32)
    for k in range(left.shape[1]):
        total = total + left[:, k : k + 1] * right[k : k + 1, :]
    if bias is not None:
        total = total + bias.float().numpy()
    return torch.from_numpy(total).to(a.dtype)


def sizes(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What is added up in each element of the product, without signs."""
    return a.double().abs() @ b.double().abs()


# --- accuracy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_accurate(dtype: torch.dtype, with_bias: bool) -> None:
    """The result is that of float64, rounded once after a float32 sum over K."""
    a, b = normals(5, 40, dtype=dtype), normals(40, 7, dtype=dtype, seed=1)
    bias = normals(7, dtype=dtype, seed=2) if with_bias else None
    exact = ops.matmul.oracle(a, b, bias)
    assert_near(ops.matmul(a, b, bias), exact, magnitude=sizes(a, b) + exact.abs(), steps=40)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_its_gradients_are_accurate(dtype: torch.dtype) -> None:
    """Gradients of a, b and bias are those of float64, rounded once, for any upstream gradient."""
    a, b, bias = normals(5, 40, dtype=dtype), normals(40, 7, dtype=dtype, seed=1), normals(7, dtype=dtype, seed=2)
    d_out = normals(5, 7, dtype=dtype, seed=3)
    narrow = [t.requires_grad_() for t in (a, b, bias)]
    got = torch.autograd.grad(ops.matmul(*narrow), narrow, d_out)
    wide = [t.detach().double().requires_grad_() for t in narrow]
    exact = torch.autograd.grad(ops.matmul.oracle(*wide), wide, d_out.double())
    magnitudes = [sizes(d_out, b.t()), sizes(a.t(), d_out), d_out.double().abs().sum(0)]
    for mine, truth, magnitude in zip(got, exact, magnitudes, strict=True):
        assert_near(mine, truth, magnitude=magnitude, steps=40)


def test_large_sums_are_kept_in_float32() -> None:
    """Integers far past a 16-bit mantissa are summed exactly before the one rounding."""
    out = ops.matmul(torch.ones(1, 512, dtype=BF16), torch.full((512, 1), 3.0, dtype=BF16))
    assert out.item() == torch.tensor(1536.0).to(BF16).item()


# --- bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 31, 32, 70])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_its_bits_are_the_contract_s(dtype: torch.dtype, k: int) -> None:
    """One accumulator takes K in ascending order, with numbers that lose bits in any other order."""
    a = normals(3, k, dtype=dtype) * torch.logspace(-3, 3, k, base=2).to(dtype)
    b, bias = normals(k, 5, dtype=dtype, seed=1), normals(5, dtype=dtype, seed=2)
    assert bits(ops.matmul(a, b, bias)) == bits(product(a, b, bias))


def test_the_gradient_s_bits_are_the_contract_s() -> None:
    """The gradient of a is a product over N, that of b one over the rows, that of the bias a float32 sum."""
    a, b, bias = (leaf(5, 40, dtype=BF16), leaf(40, 7, dtype=BF16, seed=1), leaf(7, dtype=BF16, seed=2))
    d_out = normals(5, 7, dtype=BF16, seed=3)
    d_a, d_b, d_bias = torch.autograd.grad(ops.matmul(a, b, bias), (a, b, bias), d_out)
    assert bits(d_a) == bits(product(d_out, b.detach().t()))
    assert bits(d_b) == bits(product(a.detach().t(), d_out))
    assert bits(d_bias) == bits(d_out.float().sum(0).to(BF16))


@company
def test_a_row_keeps_its_bits(company: str) -> None:
    """A row's bits depend on that row, b and bias only, and so do those of its gradient."""
    b, bias = normals(24, 7, dtype=BF16, seed=1), normals(7, dtype=BF16, seed=2)
    wide = normals(40, 24, dtype=BF16, seed=3)

    def run(rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = normals(rows.shape[0], 40, dtype=BF16, seed=4).requires_grad_()
        (d_a,) = torch.autograd.grad(ops.matmul(a, wide), a, rows)
        return ops.matmul(rows, b, bias), d_a

    assert_rows_keep_their_bits(run, company, normals(5, 24, dtype=BF16))


@pytest.mark.parametrize("m", [1, 2, 16, 17, 33, 129])
def test_a_row_s_bits_do_not_depend_on_how_many_there_are(m: int) -> None:
    """First, middle and last row of every batch have the bits of the row alone."""
    a, b = normals(m, 24, dtype=BF16), normals(24, 5, dtype=BF16, seed=1)
    out = ops.matmul(a, b)
    for row in {0, m // 2, m - 1}:
        assert bits(out[row]) == bits(ops.matmul(a[row : row + 1], b)[0])


# --- layouts ------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "row major": lambda t: t.clone(),
    "column major": lambda t: t.t().contiguous().t(),
    "row stride": lambda t: torch.cat([t, t], 1)[:, : t.shape[1]],
    "both strides": lambda t: t.repeat_interleave(2, 0).repeat_interleave(3, 1)[::2, ::3],
    "unaligned": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
}


@pytest.mark.parametrize("of_a", LAYOUTS)
@pytest.mark.parametrize("of_b", LAYOUTS)
def test_any_strides_give_the_same_bits(of_a: str, of_b: str) -> None:
    """How a and b lie in memory changes nothing."""
    a, b = normals(3, 24, dtype=BF16), normals(24, 5, dtype=BF16, seed=1)
    assert bits(ops.matmul(LAYOUTS[of_a](a), LAYOUTS[of_b](b))) == bits(product(a, b))


def test_a_weight_is_passed_transposed() -> None:
    """A weight kept as ``(N K)`` is taken as ``weight.t()`` and gets its gradient in its own shape."""
    x, weight = normals(3, 24, dtype=BF16), leaf(5, 24, dtype=BF16, seed=1)
    ops.matmul(x, weight.t()).backward(normals(3, 5, dtype=BF16, seed=2))
    assert weight.grad is not None
    assert bits(weight.grad) == bits(product(x.t(), normals(3, 5, dtype=BF16, seed=2)).t())


@pytest.mark.parametrize("shape", [(24,), (1, 24), (2, 3, 24), (2, 1, 3, 24)])
def test_leading_dimensions_are_rows(shape: tuple[int, ...]) -> None:
    """Any number of leading dimensions of a is taken, and result and gradient have the same."""
    a, b = leaf(*shape, dtype=BF16), leaf(24, 5, dtype=BF16, seed=1)
    out = ops.matmul(a, b)
    out.backward(normals(*shape[:-1], 5, dtype=BF16, seed=2))
    assert (out.shape, a.grad.shape, b.grad.shape) == ((*shape[:-1], 5), shape, (24, 5))  # type: ignore[union-attr]
    assert bits(out) == bits(product(a.detach().reshape(-1, 24), b.detach()))


def test_an_expanded_batch_is_taken() -> None:
    """Rows that are one row in memory are read as such."""
    a, b = normals(1, 24, dtype=BF16), normals(24, 5, dtype=BF16, seed=1)
    assert bits(ops.matmul(a.expand(4, 24), b)) == bits(product(a, b)) * 4


def test_the_bias_may_have_its_own_dtype() -> None:
    """A bias of another 16-bit type is added in float32, and its gradient has its type."""
    a, b = normals(3, 24, dtype=BF16), normals(24, 5, dtype=BF16, seed=1)
    bias = leaf(5, dtype=torch.float16, seed=2)
    out = ops.matmul(a, b, bias)
    out.sum().backward()
    assert bits(out) == bits(product(a, b, bias.detach()))
    assert bias.grad is not None
    assert (bias.grad.dtype, bias.grad.tolist()) == (torch.float16, [3.0] * 5)


@pytest.mark.parametrize(("m", "n", "k"), [(0, 4, 3), (4, 0, 3), (4, 3, 0), (0, 0, 0), (4, 0, 0), (0, 4, 0)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_empty_products(m: int, n: int, k: int, with_bias: bool) -> None:
    """No rows or columns give an empty result, nothing to sum gives zero or the bias; gradients have their shapes."""
    a, b = leaf(m, k, dtype=BF16), leaf(k, n, dtype=BF16)
    bias = leaf(n, dtype=BF16, seed=2) if with_bias else None
    out = ops.matmul(a, b, bias)
    out.sum().backward()
    assert (out.shape, out.dtype) == ((m, n), BF16)
    assert torch.equal(out, torch.zeros(m, n, dtype=BF16) if bias is None else bias.detach().expand(m, n))
    assert (a.grad.shape, b.grad.shape) == (a.shape, b.shape)  # type: ignore[union-attr]
    assert not a.grad.any()  # type: ignore[union-attr]
    assert bias is None or torch.equal(bias.grad, torch.full_like(bias, m))  # type: ignore[arg-type]


# --- gradients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1, 2])
def test_only_what_is_needed_is_computed(which: int) -> None:
    """Tensors that need no gradient get none."""
    tensors = [normals(3, 24, dtype=BF16), normals(24, 5, dtype=BF16), normals(5, dtype=BF16)]
    tensors[which].requires_grad_()
    ops.matmul(*tensors).sum().backward()
    assert [t.grad is not None for t in tensors] == [i == which for i in range(3)]


def test_a_second_derivative_is_an_error() -> None:
    """Going back through a gradient raises, also where only a part of the sum needs it."""
    a, b = leaf(2, 8, dtype=BF16), leaf(8, 2, dtype=BF16, seed=1)
    (d_a,) = torch.autograd.grad(ops.matmul(a, b).sum(), a, create_graph=True)
    with pytest.raises(KalignError, match="matmul cannot be differentiated twice"):
        (d_a.square().sum() + a.sum()).backward()


# --- out= ---------------------------------------------------------------------------------------------------------


def test_out_takes_the_result() -> None:
    """``out=`` is written and given back, dense or with a row stride."""
    a, b = normals(3, 24, dtype=BF16), normals(24, 5, dtype=BF16, seed=1)
    for out in (torch.empty(3, 5, dtype=BF16), torch.empty(3, 9, dtype=BF16)[:, 2:7]):
        for _ in range(2):  # a first call and one like it
            assert ops.matmul(a, b, out=out.fill_(9)) is out
            assert bits(out) == bits(product(a, b))


@pytest.mark.parametrize("name", ["a", "b", "bias"])
def test_out_may_not_be_an_input(name: str) -> None:
    """Every input is read for many elements, so writing over one is refused."""
    given = {"a": normals(4, 4, dtype=BF16), "b": normals(4, 4, dtype=BF16), "bias": normals(16, dtype=BF16)}
    out = given[name].view(4, 4)
    given["bias"] = given["bias"][:4]
    with pytest.raises(BadArgument, match=f"out shares memory with {name}"):
        ops.matmul(**given, out=out)


def test_out_and_gradients_exclude_each_other() -> None:
    """A gradient that would be lost in silence is an error that says what to leave away."""
    with pytest.raises(BadArgument, match=r"torch.no_grad\(\)"):
        ops.matmul(leaf(2, 8, dtype=BF16), normals(8, 2, dtype=BF16), out=torch.empty(2, 2, dtype=BF16))


# --- what it refuses ----------------------------------------------------------------------------------------------

A, B = normals(3, 24, dtype=BF16), normals(24, 5, dtype=BF16)


@pytest.mark.parametrize(
    ("a", "b", "options", "says"),
    [
        (A, B.t(), {}, r"a is \(3, 24\), b \(5, 24\)\n.*\n.*weight.t\(\)"),
        (A, B[:, 0], {}, r"b \(24,\)"),
        (A, B.view(1, 24, 5), {}, r"b \(1, 24, 5\)"),
        (A[0, 0], B, {}, r"a is \(\)"),
        (A, B.half(), {}, r"a is torch.bfloat16, b torch.float16\n.*\n.*b.to\(a.dtype\)"),
        (A.float(), B.float(), {}, r"a is torch.float32\n.*bfloat16, float16\n.*a.to\(torch.bfloat16\)"),
        (A, B, {"bias": torch.empty(4, dtype=BF16)}, r"bias \(4,\)"),
        (A, B, {"bias": torch.empty(5)}, "bias is torch.float32"),
        (A, B, {"bias": torch.empty(10, dtype=BF16)[::2]}, r"bias is not contiguous\n.*bias.contiguous\(\)"),
        (A, B, {"out": torch.empty(3, 4, dtype=BF16)}, r"out is \(3, 4\)"),
        (A, B, {"out": torch.empty(3, 5)}, "out is .* torch.float32"),
        (A, None, {}, "b is NoneType, not a tensor"),
        ([1.0], B, {}, "a is list, not a tensor"),
        (A, B, {"bias": 1.0}, "bias is float, not a tensor"),
    ],
)
def test_what_it_cannot_take_is_refused(a: Any, b: Any, options: dict[str, Any], says: str) -> None:
    """Wrong kinds, shapes, dtypes, layouts and outputs name the argument and, where there is one, the remedy."""
    with pytest.raises(BadArgument, match=f"(?s)matmul: .*{says}"):
        ops.matmul(a, b, **options)


def test_mixed_devices_are_named() -> None:
    """Tensors on two devices name both and how to bring them together."""
    with pytest.raises(MixedDevices, match=r"(?s)a on cpu, b on meta.*\.to\("):
        ops.matmul(A, B.to("meta"))
