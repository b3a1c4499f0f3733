"""ops.rms_norm: accuracy, the bits its contract promises, the shapes it takes and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kalign_core.errors import BadArgument, KalignError, MixedDevices
from kalign_core.ops.rms_norm_plain import MAX_ROW, backward
from tests.core.scripted import assert_near, assert_rows_keep_their_bits, bits, company, leaf, normals, ops

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
EPS = 1e-6


def both_ways(x: torch.Tensor, d_out: torch.Tensor, weight: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """Result, gradient of x and gradient of the weight for an upstream gradient."""
    weight = normals(x.shape[-1], dtype=x.dtype, seed=9) if weight is None else weight
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    out = ops.rms_norm(x, weight, EPS)
    return (out.detach(), *torch.autograd.grad(out, (x, weight), d_out))


def rows_both_ways(x: torch.Tensor, d_out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What belongs to single rows: the result and the gradient of x."""
    return both_ways(x, d_out)[:2]


def weight_gradient(terms: Any) -> Any:
    """The contract's sum over rows: blocks of 16, lanes of as many rows as 2,048 elements hold, 256 lanes of blocks."""
    lanes = max(1, min(16, 2048 >> (terms.shape[1] - 1).bit_length()))
    parts = [lanes_sum(terms[start : start + 16], lanes) for start in range(0, len(terms), 16)]
    return lanes_sum(np.stack(parts), 256)


def lanes_sum(rows: Any, lanes: int) -> Any:
    """Row i goes to lane i modulo ``lanes``, added in ascending order from +0; then adjacent lanes are added."""
    total = np.zeros((lanes, rows.shape[1]), np.float32)
    for i, row in enumerate(rows):
        total[i % lanes] = total[i % lanes] + row
    return pair_sum(total.T)


def pair_sum(values: Any) -> Any:
    """The contract's sum over the last axis: padded with +0 to a power of two, adjacent pairs added."""
    width = 1 << (values.shape[-1] - 1).bit_length()
    total = np.zeros((*values.shape[:-1], width), np.float32)
    total[..., : values.shape[-1]] = values
    while total.shape[-1] > 1:
        total = total[..., 0::2] + total[..., 1::2]
    return total[..., 0]


# --- accuracy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 24, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_accurate(dtype: torch.dtype, width: int) -> None:
    """The result is that of float64, rounded once."""
    x, weight = normals(3, width, dtype=dtype), normals(width, dtype=dtype, seed=1)
    assert_near(ops.rms_norm(x, weight, EPS), ops.rms_norm.oracle(x, weight, EPS))


@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_its_gradients_are_accurate(dtype: torch.dtype, rows: int) -> None:
    """Both gradients are those of float64, rounded once, for any upstream gradient and past one block of rows."""
    x, d_out = (normals(rows, 24, dtype=dtype, seed=i) for i in range(2))
    weight = normals(24, dtype=dtype, seed=9)
    wide = [x.double().requires_grad_(), weight.double().requires_grad_()]
    exact = torch.autograd.grad(ops.rms_norm.oracle(*wide, EPS), wide, d_out.double())
    _, d_x, d_weight = both_ways(x, d_out, weight)
    rstd = torch.rsqrt(x.double().square().mean(1, keepdim=True) + EPS)
    m = (d_out.double() * weight.double()).abs()
    share = (m * x.double().abs()).mean(1, keepdim=True) * rstd.square() * x.double().abs()
    assert_near(d_x, exact[0], magnitude=rstd * (m + share))
    assert_near(d_weight, exact[1], magnitude=(d_out.double() * x.double() * rstd).abs().sum(0), steps=rows)


def test_x_and_weight_may_have_their_own_dtypes() -> None:
    """The result and x's gradient have x's dtype, the weight's gradient the weight's."""
    x, weight = leaf(3, 24, dtype=torch.bfloat16), leaf(24, seed=1)
    out = ops.rms_norm(x, weight)
    out.backward(normals(3, 24, dtype=torch.bfloat16, seed=2))
    assert_near(out, ops.rms_norm.oracle(x, weight).detach())
    assert x.grad is not None
    assert weight.grad is not None
    assert (out.dtype, x.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)


def test_eps_is_the_call_s() -> None:
    """Every call is computed with its own eps, also right after one that differs in nothing else."""
    x, weight = normals(2, 24) * 0.01, torch.ones(24)
    for eps in (1e-6, 1e-2, 1.0, 1):
        assert_near(ops.rms_norm(x, weight, eps), ops.rms_norm.oracle(x, weight, eps))


def test_rows_of_zeros_are_zeros() -> None:
    """A row without anything in it stays so, with finite gradients."""
    out, d_x, d_weight = both_ways(torch.zeros(2, 8), torch.ones(2, 8))
    assert not out.any()
    assert d_x.isfinite().all()
    assert not d_weight.any()


# --- bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 24, 64])
def test_its_bits_are_the_contract_s(width: int) -> None:
    """Forward and backward compute, step by step in float32, the formulas that stand in the kernel's file."""
    tensors = normals(5, width), normals(5, width, seed=1), normals(width, seed=9)
    x, d_out, w = (tensor.numpy() for tensor in tensors)
    h, one, eps = np.float32(width), np.float32(1), np.float32(EPS)
    rstd = (one / np.sqrt(pair_sum(x * x) / h + eps))[:, None]
    m = d_out * w
    c = (pair_sum(m * x) / h)[:, None]
    expected = (x * rstd) * w, rstd * (m - (x * rstd) * (rstd * c)), weight_gradient(d_out * (x * rstd))
    assert [bits(t) for t in both_ways(*tensors)] == [e.astype(np.float32).tobytes() for e in expected]


@pytest.mark.parametrize(("rows", "width"), [(40, 8), (40, 300), (20, 2000), (4100, 1)])
def test_the_weight_s_gradient_is_folded_in_blocks(rows: int, width: int) -> None:
    """Rows are added in blocks of 16 over lanes, the blocks over 256 lanes, lanes by adjacent pairs."""
    x, d_out = normals(rows, width), normals(rows, width, seed=1)
    rstd = np.float32(1) / np.sqrt(pair_sum(x.numpy() ** 2) / np.float32(width) + np.float32(EPS))
    terms = d_out.numpy() * (x.numpy() * rstd[:, None])
    given = (x, torch.ones(width), torch.from_numpy(rstd), d_out)
    assert bits(backward(*given, needs=(False, True))[1]) == weight_gradient(terms).tobytes()  # type: ignore[arg-type]


@company
def test_a_row_keeps_its_bits(company: str) -> None:
    """A row's bits depend on nothing but the row and the weight, forward and backward."""
    assert_rows_keep_their_bits(rows_both_ways, company, normals(5, 24), normals(5, 24, seed=1))


@pytest.mark.parametrize("padding", [1, 64, 70])
def test_trailing_rows_without_a_gradient_change_nothing(padding: int) -> None:
    """The weight's gradient is the same however many padding rows stand behind the real ones."""
    x, d_out = normals(70, 8), normals(70, 8, seed=1)
    padded = torch.cat([x, normals(padding, 8, seed=2)]), torch.cat([d_out, torch.zeros(padding, 8)])
    assert bits(both_ways(*padded)[2]) == bits(both_ways(x, d_out)[2])


# --- shapes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(24,), (1, 24), (2, 3, 24), (2, 1, 3, 8)])
def test_leading_dimensions_are_rows(shape: tuple[int, ...]) -> None:
    """Any number of leading dimensions is taken, and result and gradient have the same."""
    x, d_out = normals(*shape), normals(*shape, seed=1)
    got = both_ways(x, d_out)
    flat = both_ways(x.reshape(-1, shape[-1]), d_out.reshape(-1, shape[-1]))
    assert [t.shape for t in got] == [x.shape, x.shape, (shape[-1],)]
    assert [bits(t) for t in got] == [bits(t) for t in flat]


@pytest.mark.parametrize("view", [lambda t: t.t().contiguous().t(), lambda t: t.repeat_interleave(2, 1)[:, ::2]])
def test_rows_that_are_not_dense_are_copied(view: Any) -> None:
    """A last axis with gaps gives the bits of the dense one."""
    x, d_out = normals(3, 24), normals(3, 24, seed=1)
    assert [bits(t) for t in both_ways(view(x), view(d_out))] == [bits(t) for t in both_ways(x, d_out)]


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0), (2, 0, 8), (0,)])
def test_empty_tensors_give_empty_ones(shape: tuple[int, ...]) -> None:
    """No rows or no columns give an empty result, an empty gradient of x and a zero one of the weight."""
    x = torch.empty(shape, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.ones(shape[-1], dtype=torch.bfloat16, requires_grad=True)
    out = ops.rms_norm(x, weight)
    out.sum().backward()
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert torch.equal(weight.grad, torch.zeros_like(weight))  # type: ignore[arg-type]


# --- gradients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("needs_x", "needs_weight"), [(True, False), (False, True)])
def test_only_what_is_needed_is_computed(needs_x: bool, needs_weight: bool) -> None:
    """A frozen weight or a frozen input gets no gradient, the other its own."""
    x, weight = normals(3, 8).requires_grad_(needs_x), normals(8, seed=9).requires_grad_(needs_weight)
    ops.rms_norm(x, weight, EPS).backward(normals(3, 8, seed=1))
    _, d_x, d_weight = both_ways(x, normals(3, 8, seed=1))
    assert (x.grad is None, weight.grad is None) == (not needs_x, not needs_weight)
    (got,) = (grad for grad in (x.grad, weight.grad) if grad is not None)
    assert bits(got) == bits(d_x if needs_x else d_weight)


def test_an_expanded_upstream_gradient_is_taken() -> None:
    """The gradient of a sum comes with strides of zero, and counts as the ones it stands for."""
    x, weight = leaf(3, 24), normals(24, seed=9)
    ops.rms_norm(x, weight, EPS).sum().backward()
    assert bits(x.grad) == bits(both_ways(x, torch.ones(3, 24))[1])  # type: ignore[arg-type]


def test_a_second_derivative_is_an_error() -> None:
    """Going back through a gradient raises, also where only a part of the sum needs it."""
    x, weight = leaf(2, 8), leaf(8, seed=1)
    (d_x,) = torch.autograd.grad(ops.rms_norm(x, weight).sum(), x, create_graph=True)
    with pytest.raises(KalignError, match="rms_norm cannot be differentiated twice"):
        (d_x.square().sum() + x.sum()).backward()


# --- with a residual ----------------------------------------------------------------------------------------------


def residual_both_ways(
    x: torch.Tensor, residual: torch.Tensor, d_y: torch.Tensor, d_h: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """y, h and the gradient that reaches x and residual alike."""
    weight, x, residual = (
        normals(x.shape[-1], dtype=x.dtype, seed=9),
        *(t.detach().requires_grad_() for t in (x, residual)),
    )
    y, h = ops.rms_norm(x, weight, EPS, residual)
    d_x, d_residual = torch.autograd.grad((y, h), (x, residual), (d_y, d_h))
    assert bits(d_x) == bits(d_residual)
    return y.detach(), h.detach(), d_x


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_residual_is_added_and_rounded_first(dtype: torch.dtype) -> None:
    """h is the rounded sum, and y has the bits of the norm of h."""
    x, residual, weight = normals(5, 24, dtype=dtype), normals(5, 24, dtype=dtype, seed=1), normals(24, dtype=dtype)
    y, h = ops.rms_norm(x, weight, EPS, residual)
    assert bits(h) == bits(x + residual)
    assert bits(y) == bits(ops.rms_norm(h, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_residual_s_gradients_are_accurate(dtype: torch.dtype) -> None:
    """What reaches y and what reaches h are added before the one rounding."""
    x, residual, d_y, d_h = (normals(18, 24, dtype=dtype, seed=i) for i in range(4))
    weight = normals(24, dtype=dtype, seed=9).requires_grad_()
    leaves = x.requires_grad_(), residual.requires_grad_()
    y, h = ops.rms_norm(x, weight, EPS, residual)
    d_x, d_residual, d_weight = torch.autograd.grad((y, h), (*leaves, weight), (d_y, d_h))
    wide, wide_weight = h.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    out = ops.rms_norm.oracle(wide, wide_weight, EPS)
    exact, exact_weight = torch.autograd.grad((out, wide), (wide, wide_weight), (d_y.double(), d_h.double()))
    rstd = torch.rsqrt(wide.detach().square().mean(1, keepdim=True) + EPS)
    m = (d_y.double() * wide_weight.detach()).abs()
    share = (m * wide.detach().abs()).mean(1, keepdim=True) * rstd.square() * wide.detach().abs()
    assert_near(d_x, exact, magnitude=rstd * (m + share) + d_h.double().abs())
    assert bits(d_residual) == bits(d_x)
    assert_near(d_weight, exact_weight, magnitude=(d_y.double() * wide.detach() * rstd).abs().sum(0), steps=18)


@company
def test_a_row_with_a_residual_keeps_its_bits(company: str) -> None:
    """A row's bits depend on nothing but the row, its residual and the weight, forward and backward."""
    assert_rows_keep_their_bits(residual_both_ways, company, *(normals(5, 24, seed=i) for i in range(4)))


def test_a_gradient_of_h_alone_passes_through() -> None:
    """Where y is not used, h's gradient reaches x and residual as it is, and the weight gets none."""
    x, residual, weight, d_h = leaf(3, 24), leaf(3, 24, seed=1), leaf(24, seed=2), normals(3, 24, seed=3)
    ops.rms_norm(x, weight, EPS, residual)[1].backward(d_h)
    assert [bits(t.grad) for t in (x, residual)] == [bits(d_h)] * 2  # type: ignore[arg-type]
    assert weight.grad is None


def test_a_gradient_of_y_alone_is_that_of_the_norm() -> None:
    """Where h is not used, the gradients are those of the norm of h."""
    x, residual, weight, d_y = leaf(3, 24), leaf(3, 24, seed=1), leaf(24, seed=9), normals(3, 24, seed=3)
    y, h = ops.rms_norm(x, weight, EPS, residual)
    y.backward(d_y)
    _, d_x, d_weight = both_ways(h.detach(), d_y)
    assert [bits(t.grad) for t in (x, residual, weight)] == [bits(t) for t in (d_x, d_x, d_weight)]  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_nothing_plus_nothing_is_nothing(shape: tuple[int, ...]) -> None:
    """Empty tensors give empty ones, with empty gradients."""
    x, residual = torch.empty(shape, requires_grad=True), torch.empty(shape, requires_grad=True)
    y, h = ops.rms_norm(x, torch.ones(shape[-1]), EPS, residual)
    (y.sum() + h.sum()).backward()
    assert [t.shape for t in (y, h, x.grad, residual.grad)] == [torch.Size(shape)] * 4  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("residual", "options", "says"),
    [
        (normals(3, 8), {}, r"residual is \(3, 8\)"),
        (normals(3, 24).half(), {}, "residual is .* torch.float16"),
        (normals(3, 24), {"out": torch.empty(3, 24)}, "out= with a residual"),
        ([1.0], {}, "residual is list, not a tensor"),
    ],
)
def test_a_residual_that_does_not_fit_is_refused(residual: Any, options: dict[str, Any], says: str) -> None:
    """A residual has x's shape and dtype, and leaves no single result to put into ``out``."""
    with pytest.raises(BadArgument, match=f"(?s)rms_norm: .*{says}"):
        ops.rms_norm(normals(3, 24), normals(24), EPS, residual, **options)


# --- out= ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", [torch.empty(3, 24), torch.empty(3, 40)[:, 8:32], torch.empty(80)[1:73].view(3, 24)])
def test_out_takes_the_result(out: torch.Tensor) -> None:
    """``out=`` is written and given back, dense or with a row stride, aligned or not."""
    x, weight = normals(3, 24), normals(24, seed=1)
    for _ in range(2):  # a first call and one like it
        assert ops.rms_norm(x, weight, out=out.fill_(9)) is out
        assert bits(out) == bits(ops.rms_norm(x, weight))


def test_out_may_be_x() -> None:
    """Computing in place gives the same bits."""
    x, weight = normals(3, 24), normals(24, seed=1)
    expected = ops.rms_norm(x, weight)
    assert bits(ops.rms_norm(x, weight, out=x)) == bits(expected)


def test_out_may_not_be_the_weight() -> None:
    """The weight is read for every row, so writing over it is refused."""
    weight = normals(24)
    with pytest.raises(BadArgument, match="out shares memory with weight"):
        ops.rms_norm(normals(1, 24), weight, out=weight.view(1, 24))


def test_out_and_gradients_exclude_each_other() -> None:
    """A gradient that would be lost in silence is an error that says what to leave away."""
    with pytest.raises(BadArgument, match=r"torch.no_grad\(\)"):
        ops.rms_norm(normals(2, 8), leaf(8), out=torch.empty(2, 8))


# --- what it refuses ----------------------------------------------------------------------------------------------

X, W = normals(3, 24), normals(24)


@pytest.mark.parametrize(
    ("x", "weight", "options", "says"),
    [
        (X, W[:8], {}, r"x is \(3, 24\), weight \(8,\)"),
        (X, W.view(1, 24), {}, r"weight \(1, 24\)\n.*weight: \(H\)"),
        (X[0, 0], W, {}, r"x is \(\)"),
        (X.double(), W, {}, r"x is torch.float64\n.*x.to\(torch.bfloat16\)"),
        (X, W.int(), {}, "weight is torch.int32"),
        (X, torch.ones(48)[::2], {}, r"weight is not contiguous\n.*weight.contiguous\(\)"),
        (X, W[:1].expand(24), {}, "weight is not contiguous"),
        (torch.empty(1, MAX_ROW + 1), torch.empty(MAX_ROW + 1), {}, "rows of 262145 elements"),
        (X, W, {"eps": "small"}, r"eps is 'small'\n.*a number from 0 to .*\n.*eps=1e-06"),
        (X, W, {"eps": X}, "eps is a Tensor"),
        (X, W, {"eps": X.numpy()}, "eps is array"),
        (X, W, {"eps": -1e-6}, "eps is -1e-06"),
        (X, W, {"eps": torch.nan}, "eps is nan"),
        (X, W, {"eps": True}, "eps is True"),
        (X, W, {"out": torch.empty(3, 8)}, r"out is \(3, 8\)"),
        (X, W, {"out": torch.empty(3, 24, dtype=torch.float16)}, "out is .* torch.float16"),
        (X, [1.0], {}, "weight is list, not a tensor"),
        (None, W, {}, "x is NoneType, not a tensor"),
    ],
)
def test_what_it_cannot_take_is_refused(x: Any, weight: Any, options: dict[str, Any], says: str) -> None:
    """Wrong kinds, shapes, dtypes, layouts and outputs name the argument and, where there is one, the remedy."""
    with pytest.raises(BadArgument, match=f"(?s)rms_norm: .*{says}"):
        ops.rms_norm(x, weight, **options)


def test_mixed_devices_are_named() -> None:
    """Tensors on two devices name both and how to bring them together."""
    with pytest.raises(MixedDevices, match=r"(?s)x on cpu, weight on meta.*\.to\("):
        ops.rms_norm(X, W.to("meta"))
