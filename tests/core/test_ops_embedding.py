"""ops.embedding: copies, gradients in the tokens' order, ids outside the table, what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kalign_core.errors import BadArgument, KalignError, MixedDevices
from kalign_core.kernels.embedding import embedding_backward_kernel
from kalign_core.ops.embedding import _runs
from kalign_core.session import Session
from kalign_core.settings import Settings
from tests.core.scripted import bits, leaf, normals, ops

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def both_ways(ids: torch.Tensor, weight: torch.Tensor, d_out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Result and gradient of the table for an upstream gradient."""
    weight = weight.detach().requires_grad_()
    out = ops.embedding(ids, weight)
    return out.detach(), *torch.autograd.grad(out, weight, d_out)


# --- forward ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [torch.int64, torch.int32], ids=str)
def test_rows_are_copied(dtype: torch.dtype, kind: torch.dtype) -> None:
    """The result is the named rows, bit by bit, NaN and all."""
    weight, ids = normals(7, 20, dtype=dtype), torch.tensor([[3, 0, 6], [3, 3, 1]], dtype=kind)
    weight[3, 2], weight[0, 1] = torch.nan, -0.0
    assert bits(ops.embedding(ids, weight)) == bits(weight[ids.long()])


def test_a_table_may_have_gaps() -> None:
    """A table cut out of a wider buffer is taken as it is, aligned or not."""
    buffer, ids = normals(7, 40), torch.tensor([6, 2, 2])
    for start in (8, 9):
        assert bits(ops.embedding(ids, buffer[:, start : start + 20])) == bits(buffer[ids, start : start + 20])


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (0,)])
def test_ids_may_have_any_shape(shape: tuple[int, ...]) -> None:
    """The result has the ids' shape with the table's width behind it; its gradient is that of torch."""
    ids, weight = torch.ones(shape, dtype=torch.int64), normals(3, 8)
    out, d_weight = both_ways(ids, weight, torch.ones(*shape, 8))
    assert (out.shape, d_weight.shape) == ((*shape, 8), (3, 8))
    assert torch.equal(d_weight, torch.tensor([[0.0], [float(ids.numel())], [0.0]]).expand(3, 8))


# --- backward -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocabulary", [1, 3, 40])
def test_gradients_add_in_the_tokens_order(vocabulary: int, dtype: torch.dtype) -> None:
    """A row's gradient is the float32 sum over its tokens in ascending order from +0, rounded once."""
    ids = torch.randint(vocabulary, (37,), generator=torch.Generator().manual_seed(1))
    weight, d_out = (
        normals(vocabulary, 12, dtype=dtype),
        normals(37, 12, dtype=dtype) * 10.0 ** normals(37, 1).to(dtype),
    )
    expected = np.zeros((vocabulary, 12), np.float32)
    for token, row in zip(ids.tolist(), d_out.float().numpy(), strict=True):
        expected[token] = expected[token] + row
    _, d_weight = both_ways(ids, weight, d_out)
    assert bits(d_weight) == bits(torch.from_numpy(expected).to(dtype))


@pytest.mark.parametrize("unroll", embedding_backward_kernel.knobs["UNROLL"])
@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 16, 33])
def test_runs_of_any_length_are_added_in_order(tokens: int, unroll: int) -> None:
    """However many rows are on their way at a time, a run ends where it ends: at the last token, or at another id."""
    ids = torch.tensor([1] * tokens + [3] * tokens)
    d_out = normals(2 * tokens, 300) * 10.0 ** normals(2 * tokens, 1)
    d_out[0], d_out[-1] = -0.0, torch.inf
    expected = np.zeros((5, 300), np.float32)
    for token, row in zip(ids.tolist(), d_out.numpy(), strict=True):
        expected[token] = expected[token] + row
    d_weight = torch.full((5, 300), torch.nan)
    launch = embedding_backward_kernel.fn[(5 * 2,)]
    launch(*_runs(ids, 5), d_out, d_weight, 2 * tokens, 5, 300, 300, UNROLL=unroll, BLOCK=256)
    assert bits(d_weight) == expected.tobytes()


@pytest.mark.parametrize("wrong", [2**32 + 1, -(2**32) + 1, 2**63 - 1, -(2**63), 3, -1])
def test_ids_far_outside_add_nothing(wrong: int) -> None:
    """Ids that 32 bits would take for others are outside the table all the same."""
    ids, weight = torch.tensor([1, wrong, 1]), normals(3, 8)
    _, d_weight = both_ways(ids, weight, torch.ones(3, 8))
    assert d_weight.tolist() == [[0.0] * 8, [2.0] * 8, [0.0] * 8]


def test_a_row_s_gradient_depends_on_its_own_tokens() -> None:
    """Tokens of other ids before, between and behind change no bit of a row."""
    own, d_own, weight = torch.full((9,), 2), normals(9, 12), normals(5, 12)
    _, alone = both_ways(own, weight, d_own)
    others, d_others = torch.tensor([4, 0, 3, 4, 1, 0, 0, 3, 1]), torch.full((9, 12), torch.nan)
    ids, d_out = torch.stack((others, own), 1).view(-1), torch.stack((d_others, d_own), 1).view(-1, 12)
    assert bits(both_ways(ids, weight, d_out)[1][2]) == bits(alone[2])


@pytest.mark.parametrize("more", [1, 9])
@pytest.mark.parametrize("number", [2, -1, 5])
def test_trailing_tokens_without_a_gradient_change_nothing(number: int, more: int) -> None:
    """Tokens at the end whose gradient is zero, or which name no row whatever theirs is, leave every bit; up to as many
    again as there are.
    """
    ids, d_out, weight = torch.tensor([2, 0, 2, 1, 4, 2, 2, 0, 1]), normals(9, 12), normals(5, 12)
    d_more = torch.zeros(more, 12) if number == 2 else torch.full((more, 12), torch.nan)
    padded = torch.cat((ids, torch.full((more,), number))), torch.cat((d_out, d_more))
    assert bits(both_ways(padded[0], weight, padded[1])[1]) == bits(both_ways(ids, weight, d_out)[1])


def test_a_row_nobody_named_has_no_gradient() -> None:
    """Rows without a token are +0."""
    _, d_weight = both_ways(torch.tensor([1, 1]), normals(4, 8), torch.full((2, 8), -0.0))
    assert bits(d_weight) == bytes(4 * 4 * 8)


def test_the_table_may_change_before_the_gradient() -> None:
    """The gradient needs the table's shape alone, so an optimizer may have changed it."""
    weight, ids = leaf(4, 8), torch.tensor([1, 3])
    out = ops.embedding(ids, weight)
    with torch.no_grad():
        weight.mul_(2)
    (d_weight,) = torch.autograd.grad(out, weight, torch.ones(2, 8))
    assert d_weight.sum(1).tolist() == [0.0, 8.0, 0.0, 8.0]


def test_a_second_derivative_is_an_error() -> None:
    """Going back through a gradient raises."""
    weight = leaf(4, 8)
    (d,) = torch.autograd.grad(ops.embedding(torch.tensor([1]), weight).square().sum(), weight, create_graph=True)
    with pytest.raises(KalignError, match="embedding cannot be differentiated twice"):
        d.sum().backward()


# --- ids outside the table ----------------------------------------------------------------------------------------


def test_ids_outside_the_table_have_a_defined_result() -> None:
    """An id that names no row gives +0, and its gradient goes nowhere."""
    ids, weight = torch.tensor([-1, 2, 4, 2**40, -(2**40)]), normals(4, 8)
    out, d_weight = both_ways(ids, weight, torch.ones(5, 8))
    assert bits(out[1]) == bits(weight[2])
    assert bits(out[[0, 2, 3, 4]]) == bytes(4 * 4 * 8)
    assert d_weight.sum(1).tolist() == [0.0, 0.0, 8.0, 0.0]


def test_an_empty_table_gives_zeros() -> None:
    """No id is in an empty table."""
    out, d_weight = both_ways(torch.tensor([0, 1]), torch.empty(0, 8), torch.ones(2, 8))
    assert (bits(out), d_weight.shape) == (bytes(4 * 2 * 8), (0, 8))


@pytest.mark.parametrize("ids", [[0, 4], [-1, 2]])
def test_debugging_finds_ids_outside_the_table(ids: list[int]) -> None:
    """``KALIGN_DEBUG_IDS=1`` has the device assert it; on the host that is an error at once."""
    with Session(configuration=Settings(debug_ids=True)).active():
        ops.embedding(torch.tensor([0, 3]), normals(4, 8))
        with pytest.raises(RuntimeError, match=r"embedding: an id lies outside \[0, 4\)"):
            ops.embedding(torch.tensor(ids), normals(4, 8))


# --- what it refuses ----------------------------------------------------------------------------------------------

IDS, W = torch.tensor([1, 2]), normals(4, 8)


@pytest.mark.parametrize(
    ("ids", "weight", "says"),
    [
        (IDS.float(), W, r"ids is torch.float32\n.*int64, int32\n.*ids.long\(\)"),
        (IDS, W.double(), "weight is torch.float64"),
        (IDS, W[0], r"weight is \(8,\)"),
        ([1], W, "ids is list, not a tensor"),
        (IDS, None, "weight is NoneType, not a tensor"),
    ],
)
def test_what_it_cannot_take_is_refused(ids: Any, weight: Any, says: str) -> None:
    """Wrong kinds, shapes and dtypes name the argument and, where there is one, the remedy."""
    with pytest.raises(BadArgument, match=f"(?s)embedding: .*{says}"):
        ops.embedding(ids, weight)


def test_mixed_devices_are_named() -> None:
    """Tensors on two devices name both and how to bring them together."""
    with pytest.raises(MixedDevices, match=r"(?s)ids on cpu, weight on meta.*\.to\("):
        ops.embedding(IDS, W.to("meta"))
