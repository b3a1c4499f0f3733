"""ops.rope: accuracy, the bits its contract promises, both kinds of pairs, the shapes it takes and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kalign_core.errors import BadArgument, KalignError, MixedDevices
from tests.core.scripted import assert_near, bits, leaf, normals, ops

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
both_kinds = pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "pairs"])


def angles(tokens: int, pairs: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of random angles."""
    angle = normals(tokens, pairs, seed=9) * 3
    return angle.cos().to(dtype), angle.sin().to(dtype)


def both_ways(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, d_out: torch.Tensor, interleaved: bool) -> Any:
    """Result and gradient for an upstream gradient."""
    x = x.detach().requires_grad_()
    out = ops.rope(x, cos, sin, interleaved)
    return out.detach(), *torch.autograd.grad(out, x, d_out)


# --- accuracy -----------------------------------------------------------------------------------------------------


@both_kinds
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_accurate(dtype: torch.dtype, interleaved: bool) -> None:
    """Result and gradient are those of float64, rounded once, for any upstream gradient."""
    x, d_out = normals(3, 5, 12, dtype=dtype), normals(3, 5, 12, dtype=dtype, seed=1)
    cos, sin = angles(3, 6, dtype)
    wide = x.double().requires_grad_()
    exact = ops.rope.oracle(wide, cos, sin, interleaved)
    out, d_x = both_ways(x, cos, sin, d_out, interleaved)
    assert_near(out, exact, magnitude=2 * torch.ones_like(exact) * x.double().abs().max())
    (d_exact,) = torch.autograd.grad(exact, wide, d_out.double())
    assert_near(d_x, d_exact, magnitude=2 * torch.ones_like(exact) * d_out.double().abs().max())


@both_kinds
def test_angles_may_be_of_another_dtype(interleaved: bool) -> None:
    """Angles in float32 serve heads in bfloat16."""
    x, (cos, sin) = normals(2, 3, 8, dtype=torch.bfloat16), angles(2, 4)
    exact = ops.rope.oracle(x, cos, sin, interleaved)
    assert_near(ops.rope(x, cos, sin, interleaved), exact, magnitude=8 * torch.ones_like(exact))


# --- bits ---------------------------------------------------------------------------------------------------------


def test_its_bits_are_the_contract_s() -> None:
    """Forward and backward compute, step by step in float32, the formula that stands in the kernel's file."""
    x, d, (cos, sin) = normals(2, 3, 12), normals(2, 3, 12, seed=1), angles(2, 6)
    c, s = cos.numpy()[:, None], sin.numpy()[:, None]

    def turned(values: Any, s: Any) -> bytes:
        a, b = values[..., :6], values[..., 6:]
        return bytes(np.concatenate((a * c - b * s, b * c + a * s), -1).tobytes())

    assert [bits(t) for t in both_ways(x, cos, sin, d, False)] == [turned(x.numpy(), s), turned(d.numpy(), -s)]


def test_both_kinds_of_pairs_have_the_same_bits() -> None:
    """Where a pair stands changes no arithmetic: interleaving the halves and turning pairs gives the same bytes."""
    x, (cos, sin) = normals(2, 3, 12), angles(2, 6)
    mixed = torch.stack(x.chunk(2, -1), -1).flatten(-2)
    halves, pairs = ops.rope(x, cos, sin), ops.rope(mixed, cos, sin, interleaved=True)
    assert bits(pairs) == bits(torch.stack(halves.chunk(2, -1), -1).flatten(-2))


@both_kinds
def test_turning_back_gives_the_gradient_s_bits(interleaved: bool) -> None:
    """The gradient is the operator itself with the sines' signs changed."""
    d, (cos, sin) = normals(2, 3, 12, seed=1), angles(2, 6)
    _, d_x = both_ways(normals(2, 3, 12), cos, sin, d, interleaved)
    assert bits(d_x) == bits(ops.rope(d, cos, -sin, interleaved))


@both_kinds
def test_a_head_keeps_its_bits(interleaved: bool) -> None:
    """A head's bits depend on it and its token's angles, not on tokens, heads and garbage beside it."""
    x, d_out, (cos, sin) = normals(5, 6, 12), normals(5, 6, 12, seed=1), angles(5, 6)
    whole = both_ways(x, cos, sin, d_out, interleaved)
    spoilt = torch.full_like(x, torch.nan)
    spoilt[2, 3] = x[2, 3]
    alone = both_ways(x[2:3, 3:4], cos[2:3], sin[2:3], d_out[2:3, 3:4], interleaved)
    beside = both_ways(spoilt, cos, sin, d_out, interleaved)
    last = both_ways(x.flip(0), cos.flip(0), sin.flip(0), d_out.flip(0), interleaved)
    assert [bits(t[0, 0]) for t in alone] == [bits(t[2, 3]) for t in whole]
    assert bits(beside[0][2, 3]) == bits(whole[0][2, 3])
    assert [bits(t.flip(0)) for t in last] == [bits(t) for t in whole]


@both_kinds
def test_layouts_do_not_change_bits(interleaved: bool) -> None:
    """Heads cut out of a joined projection, unaligned, transposed or with gaps give the bits of dense ones."""
    x, (cos, sin) = normals(3, 4, 8), angles(3, 4)
    expected = bits(ops.rope(x, cos, sin, interleaved))
    joined = torch.full((3, 4 * 8 + 5), torch.nan)
    joined[:, 3 : 3 + 32] = x.view(3, 32)
    views = [
        joined[:, 3 : 3 + 32].unflatten(1, (4, 8)),
        x.transpose(0, 1).contiguous().transpose(0, 1),
        x.transpose(1, 2).contiguous().transpose(1, 2),
        x.repeat_interleave(2, 2)[..., ::2],
    ]
    assert [bits(ops.rope(view, cos, sin, interleaved)) for view in views] == [expected] * len(views)


# --- shapes -------------------------------------------------------------------------------------------------------


@both_kinds
@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 7, 6), (1, 40, 128), (9, 1, 64)])
def test_sizes_are_free(shape: tuple[int, int, int], interleaved: bool) -> None:
    """No size has to be a power of two or fill a tile."""
    x, (cos, sin) = normals(*shape), angles(shape[0], shape[2] // 2)
    exact = ops.rope.oracle(x, cos, sin, interleaved)
    assert_near(ops.rope(x, cos, sin, interleaved), exact, magnitude=8 * torch.ones_like(exact))


def test_leading_dimensions_are_tokens() -> None:
    """A batch of sequences is as many tokens, with angles of its own for each."""
    x, (cos, sin) = normals(2, 3, 4, 8), angles(6, 4)
    out = ops.rope(x, cos.view(2, 3, 4), sin.view(2, 3, 4))
    assert out.shape == x.shape
    assert bits(out) == bits(ops.rope(x.view(6, 4, 8), cos, sin))


@pytest.mark.parametrize("shape", [(0, 4, 8), (3, 0, 8), (3, 4, 0)])
def test_empty_tensors_give_empty_ones(shape: tuple[int, int, int]) -> None:
    """No tokens, heads or elements give an empty result and an empty gradient."""
    x, (cos, sin) = torch.empty(shape, requires_grad=True), angles(shape[0], shape[2] // 2)
    out = ops.rope(x, cos, sin)
    out.sum().backward()
    assert out.shape == x.shape
    assert x.grad is not None
    assert x.grad.shape == x.shape


def test_a_second_derivative_is_an_error() -> None:
    """Going back through a gradient raises."""
    x, (cos, sin) = leaf(2, 3, 8), angles(2, 4)
    (d_x,) = torch.autograd.grad(ops.rope(x, cos, sin).square().sum(), x, create_graph=True)
    with pytest.raises(KalignError, match="rope cannot be differentiated twice"):
        d_x.sum().backward()


def test_a_compiled_model_gives_the_same_bits() -> None:
    """Inside ``torch.compile`` the operator runs as it is, with its gradient."""
    x, (cos, sin) = leaf(2, 3, 8), angles(2, 4)
    out = torch.compile(lambda t: ops.rope(t, cos, sin), backend="eager")(x)
    (d_x,) = torch.autograd.grad(out, x, normals(2, 3, 8, seed=1))
    assert [bits(out), bits(d_x)] == [bits(t) for t in both_ways(x, cos, sin, normals(2, 3, 8, seed=1), False)]
    torch.compiler.reset()


# --- what it refuses ----------------------------------------------------------------------------------------------

X = normals(3, 4, 8)
C, S = angles(3, 4)


@pytest.mark.parametrize(
    ("x", "cos", "sin", "says"),
    [
        (X[0, 0], C, S, r"x is \(8,\)"),
        (X[..., :7], C, S, "D is even"),
        (X, torch.cat((C, C), 1), S, r"cos is \(3, 8\).*\n.*\n.*cos\[\.\.\., :4\]"),
        (X, C[:1], S, r"cos is \(1, 4\).*\n.*\n.*cos.expand\(3, 4\)"),
        (X, C, S[:, :3], r"sin is \(3, 3\)"),
        (X, C.bfloat16(), S, r"cos is torch.bfloat16, sin torch.float32\n.*sin.to\(cos.dtype\)"),
        (X.double(), C, S, "x is torch.float64"),
        (X, C.int(), S.int(), "cos is torch.int32"),
        (X, None, S, "cos is NoneType, not a tensor"),
        (X, C.clone().requires_grad_(), S, r"cos requires a gradient\n.*\n.*cos.detach\(\)"),
    ],
)
def test_what_it_cannot_take_is_refused(x: Any, cos: Any, sin: Any, says: str) -> None:
    """Wrong kinds, shapes and dtypes name the argument and, where there is one, the remedy."""
    with pytest.raises(BadArgument, match=f"(?s)rope: .*{says}"):
        ops.rope(x, cos, sin)


@pytest.mark.parametrize("interleaved", [None, "yes", torch.tensor(True)])
def test_the_kind_of_pairs_is_said_by_the_host(interleaved: Any) -> None:
    """What is neither True nor False is refused, a tensor most of all: the host would wait for it."""
    with pytest.raises(BadArgument, match=r"rope: interleaved is .*\n.*True or False"):
        ops.rope(X, C, S, interleaved)


def test_mixed_devices_are_named() -> None:
    """Tensors on two devices name both and how to bring them together."""
    with pytest.raises(MixedDevices, match=r"(?s)x on cpu, cos on meta.*\.to\("):
        ops.rope(X, C.to("meta"), S)
