"""ops.ratio_kl: accuracy also near 0, the bits its contract promises, masks that hide anything, what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kalign_core.errors import BadArgument, KalignError, MixedDevices
from tests.core.scripted import assert_near, assert_rows_keep_their_bits, bits, company, leaf, normals, ops

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def policies(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Log-probabilities of tokens under three policies that are near each other."""
    logp = normals(*shape).abs().neg()
    return [logp.to(dtype), *((logp + normals(*shape, seed=i) / 3).to(dtype) for i in (1, 2))]


def both_ways(
    logp: torch.Tensor, old: torch.Tensor, ref: torch.Tensor, *gradients: torch.Tensor, mask: Any = None
) -> tuple[torch.Tensor, ...]:
    """The four results and the gradient of logp for their upstream gradients."""
    logp = logp.detach().requires_grad_()
    results = ops.ratio_kl(logp, old, ref, mask)
    (d_logp,) = torch.autograd.grad(results, logp, gradients)
    return (*(result.detach() for result in results), d_logp)


# --- accuracy -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_accurate(dtype: torch.dtype) -> None:
    """All four results are those of float64, rounded once."""
    given = policies(3, 40, dtype=dtype)
    exact = ops.ratio_kl.oracle(*given)
    p, old, ref = (t.double().abs() for t in given)
    sizes = (exact[0] * (1 + p + old), p + ref, (p + ref) * exact[1].abs() + exact[2], (p + ref) * exact[1].abs() + 1)
    for got, want, size in zip(ops.ratio_kl(*given), exact, sizes, strict=True):
        assert_near(got, want, magnitude=size)


@pytest.mark.parametrize("exponent", range(-30, -1))
def test_k3_keeps_its_digits_near_zero(exponent: int) -> None:
    """Where the policies agree but for a little, ``exp(x) - 1 - x`` has no digits left in float32; k3 has."""
    x = torch.tensor([[1.0, -1.0, 1.7, -1.7, 1.99, -1.99]]) * 2.0**exponent
    got = ops.ratio_kl(torch.zeros_like(x), torch.zeros_like(x), x).k3.double()
    wide = x.double()
    series = wide**2 * sum((wide**k / float(np.prod(np.arange(1, k + 3))) for k in range(16)), torch.zeros_like(wide))
    assert float((got / series - 1).abs().max()) < 4 * 2.0**-23


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_its_gradient_is_accurate(dtype: torch.dtype) -> None:
    """The gradient is that of float64, rounded once, for any upstream gradients."""
    given, gradients = policies(3, 40, dtype=dtype), [normals(3, 40, dtype=dtype, seed=i) for i in range(3, 7)]
    logp, old, ref = (t.double() for t in given)
    logp.requires_grad_()
    (exact,) = torch.autograd.grad(ops.ratio_kl.oracle(logp, old, ref), logp, torch.stack(gradients).double())
    sizes = torch.stack([g.double().abs() for g in gradients]).sum(0) * (1 + torch.exp((logp - old).abs())) * 8
    assert_near(both_ways(*given, *gradients)[-1], exact, magnitude=sizes)


# --- bits ---------------------------------------------------------------------------------------------------------


def test_its_bits_are_the_contract_s() -> None:
    """Forward and backward compute, step by step in float32, the formula that stands in the kernel's file."""
    given, gradients = policies(2, 40), [normals(2, 40, seed=i) for i in range(3, 7)]
    p, old, ref, d_ratio, d_k1, d_k2, d_k3 = (t.numpy() for t in (*given, *gradients))
    y, one = p - ref, np.float32(1)
    x, q = -y, np.float32(0.000198756293)
    for c in (0.00139819974, 0.00833345217, 0.0416657959, 0.166666655, 0.5):
        q = np.float32(c) + x * q
    k3 = np.where(np.abs(x) < 0.5, (x * x) * q, (np.exp(x) - one) - x)
    d = ((d_ratio * np.exp(p - old) + d_k1) + d_k2 * y) + d_k3 * (one - np.exp(x))
    expected = (np.exp(p - old), y, np.float32(0.5) * (y * y), k3, d)
    assert [bits(t) for t in both_ways(*given, *gradients)] == [e.tobytes() for e in expected]


@company
def test_a_row_keeps_its_bits(company: str) -> None:
    """A row's bits depend on nothing but the row, forward and backward."""
    rows = [*policies(5, 24), *(normals(5, 24, seed=i) for i in range(3, 7))]
    assert_rows_keep_their_bits(both_ways, company, *rows)


def test_a_token_keeps_its_bits() -> None:
    """A token's bits do not depend on where it stands, on the row's length or on how the batch is laid out."""
    given = policies(3, 40)
    whole = ops.ratio_kl(*given)
    packed = ops.ratio_kl(*(t.reshape(-1) for t in given))
    part = ops.ratio_kl(*(t[:, 7:31] for t in given))
    for all_of, flat, some in zip(whole, packed, part, strict=True):
        assert bits(flat) == bits(all_of.reshape(-1))
        assert bits(some) == bits(all_of[:, 7:31])


# --- masks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf])
def test_masked_tokens_are_zero_whatever_they_hold(garbage: float) -> None:
    """A masked token gives +0 in every result and gradient, and others keep their bits."""
    given, gradients = policies(3, 40), [normals(3, 40, seed=i) for i in range(3, 7)]
    mask = normals(3, 40, seed=8) < 0.5
    spoilt = [torch.where(mask, t, garbage) for t in (*given, *gradients)]
    for got, plain in zip(both_ways(*spoilt, mask=mask), both_ways(*given, *gradients), strict=True):
        assert bits(got) == bits(torch.where(mask, plain, 0.0))


def test_a_mask_may_have_strides_of_its_own() -> None:
    """A mask cut out of a longer one is taken as it is."""
    given, long = policies(3, 24), normals(3, 40) < 0
    assert bits(ops.ratio_kl(*given, long[:, 5:29]).k3) == bits(ops.ratio_kl(*given, long[:, 5:29].clone()).k3)


# --- gradients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ratio", "k1", "k2", "k3"])
def test_one_result_alone_may_be_gone_back_from(name: str) -> None:
    """Results that nothing was computed from count as gradients of zero."""
    given = policies(2, 24)
    logp = given[0].clone().requires_grad_()
    (got,) = torch.autograd.grad(getattr(ops.ratio_kl(logp, *given[1:]), name), logp, torch.ones(2, 24))
    gradients = [torch.full((2, 24), float(name == other)) for other in ("ratio", "k1", "k2", "k3")]
    assert torch.equal(got, both_ways(*given, *gradients)[-1])


def test_a_second_derivative_is_an_error() -> None:
    """Going back through a gradient raises."""
    given = policies(2, 8)
    logp = given[0].clone().requires_grad_()
    (d,) = torch.autograd.grad(ops.ratio_kl(logp, *given[1:]).ratio.sum(), logp, create_graph=True)
    with pytest.raises(KalignError, match="ratio_kl cannot be differentiated twice"):
        d.sum().backward()


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0,), (1,), (1, 1)])
def test_the_smallest_batches(shape: tuple[int, ...]) -> None:
    """No token and a single one are batches like any other."""
    given = policies(*shape)
    logp = given[0].clone().requires_grad_()
    results = ops.ratio_kl(logp, *given[1:])
    (d,) = torch.autograd.grad(results, logp, [torch.ones(shape)] * 4)
    assert {t.shape for t in (*results, d)} == {torch.Size(shape)}


# --- what it refuses ----------------------------------------------------------------------------------------------

P = normals(3, 8)


@pytest.mark.parametrize(
    ("logp", "old", "ref", "mask", "says"),
    [
        (P, P[:2], P, None, r"old_logp is \(2, 8\)"),
        (P, P, P.bfloat16(), None, "ref_logp is .* torch.bfloat16"),
        (P.double(), P.double(), P.double(), None, "logp is torch.float64"),
        (P.view(1, 3, 8), P, P, None, r"logp is \(1, 3, 8\).*\n.*\n.*flatten"),
        (P, P, P, P, r"mask is torch.float32\n.*\n.*mask.bool\(\)"),
        (P, P, P, P[:1] < 0, r"mask is \(1, 8\), logp \(3, 8\)"),
        (P, P, None, None, r"ref_logp"),
        (P, leaf(3, 8), P, None, r"old_logp requires a gradient\n.*\n.*old_logp.detach\(\)"),
        (P, P, leaf(3, 8), None, "ref_logp requires a gradient"),
        (3, P, P, None, "logp is int, not a tensor"),
    ],
)
def test_what_it_cannot_take_is_refused(logp: Any, old: Any, ref: Any, mask: Any, says: str) -> None:
    """Wrong kinds, shapes, dtypes and gradients that would be lost name the argument and the remedy."""
    with pytest.raises(BadArgument, match=f"(?s)ratio_kl: .*{says}"):
        ops.ratio_kl(logp, old, ref, mask)


def test_mixed_devices_are_named() -> None:
    """Tensors on two devices name both."""
    with pytest.raises(MixedDevices, match="mask on meta"):
        ops.ratio_kl(P, P, P, (P < 0).to("meta"))
