"""ops.selected_logprob: accuracy, the bits its contract promises, rows that are ignored, what it takes and refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kalign_core.errors import BadArgument, KalignError, MixedDevices
from kalign_core.kernels.row_parts import CHUNK
from kalign_core.ops.selected_logprob import IGNORE_INDEX, Options, backward, forward
from tests.core.scripted import assert_near, assert_rows_keep_their_bits, bits, company, leaf, normals, ops, scripted
from tests.core.test_ops_softmax import chunk_sum, chunks_of, fma, known_of, over_chunks, pair_sum

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LONG = 2 * CHUNK + 8
T = 0.7
cases = pytest.mark.parametrize(
    ("dtype", "width"), [*((d, 24) for d in DTYPES), (torch.float32, 1), (torch.float32, 5000), (torch.bfloat16, LONG)]
)


def ids_for(rows: int, width: int, seed: int = 7) -> torch.Tensor:
    return torch.randint(width, (rows,), generator=torch.Generator().manual_seed(seed))


def all_of(logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Every result as ``(rows 1)`` and every gradient of the logits, for the same upstream gradients in every row."""
    logits = logits.detach().requires_grad_()
    results = ops.selected_logprob(logits, ids, T, entropy=True, lse=True)
    upstream = [normals(1, seed=seed).expand(len(ids)) for seed in range(3)]
    gradients = [
        torch.autograd.grad(r, logits, d, retain_graph=True)[0] for r, d in zip(results, upstream, strict=True)
    ]
    return (*(r.detach()[:, None] for r in results), *gradients, *torch.autograd.grad(results, logits, upstream))


def exact_of(logits: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """logp, entropy and log-sum-exp in float64."""
    z = torch.log_softmax(logits.double() / T, -1)
    terms = torch.where(z == -torch.inf, 0.0, z.exp() * z)
    return ops.selected_logprob.oracle(logits, ids, T), -terms.sum(-1), torch.logsumexp(logits.double() / T, -1)


# --- accuracy -----------------------------------------------------------------------------------------------------


@cases
def test_it_is_accurate(dtype: torch.dtype, width: int) -> None:
    """logp, entropy and log-sum-exp are those of float64, from any dtype to float32."""
    logits, ids = normals(3, width, dtype=dtype) * 4, ids_for(3, width)
    results = ops.selected_logprob(logits, ids, T, entropy=True, lse=True)
    for got, exact in zip(results, exact_of(logits, ids), strict=True):
        assert got.dtype == torch.float32
        assert_near(got, exact, magnitude=exact.abs() + 30)


@cases
def test_its_gradients_are_accurate(dtype: torch.dtype, width: int) -> None:
    """The gradients of all three results together are those of float64, rounded once to the logits' dtype."""
    logits, ids = (normals(3, width, dtype=dtype) * 4).requires_grad_(), ids_for(3, width)
    upstream = [normals(3, seed=seed) for seed in range(3)]
    (got,) = torch.autograd.grad(ops.selected_logprob(logits, ids, T, entropy=True, lse=True), logits, upstream)
    wide = logits.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(exact_of(wide, ids), wide, [d.double() for d in upstream])
    p = torch.softmax(wide.detach() / T, -1)
    size = p * (sum(d.double().abs() for d in upstream)[:, None] * (30 - p.log().clamp(min=-30)))  # type: ignore[index]
    size.scatter_add_(1, ids[:, None], upstream[0].double().abs()[:, None])
    assert_near(got, exact, magnitude=size / T)


@pytest.mark.parametrize("which", range(3))
def test_each_result_has_its_own_gradient(which: int) -> None:
    """Where one result alone is used, the gradient is that result's."""
    logits, ids, d = leaf(3, 24), ids_for(3, 24), normals(3, seed=5)
    (got,) = torch.autograd.grad(ops.selected_logprob(logits, ids, T, entropy=True, lse=True)[which], logits, d)
    wide = logits.detach().double().requires_grad_()
    (exact,) = torch.autograd.grad(exact_of(wide, ids)[which], wide, d.double())
    assert_near(got, exact, magnitude=20 * d.double().abs()[:, None].expand(3, 24))


def test_what_is_not_asked_for_is_not_given() -> None:
    """One tensor without options, a tuple in the order logp, entropy, log-sum-exp with them; the bits are the same."""
    logits, ids = normals(3, 24), ids_for(3, 24)
    logp, entropy, lse = ops.selected_logprob(logits, ids, T, entropy=True, lse=True)
    assert bits(ops.selected_logprob(logits, ids, T)) == bits(logp)
    assert [bits(t) for t in ops.selected_logprob(logits, ids, T, entropy=True)] == [bits(logp), bits(entropy)]
    assert [bits(t) for t in ops.selected_logprob(logits, ids, T, lse=True)] == [bits(logp), bits(lse)]


# --- rows that are ignored, and ids that are no columns ---------------------------------------------------------------


@pytest.mark.parametrize("ignore_index", [IGNORE_INDEX, 5])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_ignored_rows_are_zero_whatever_they_hold(value: float, ignore_index: int) -> None:
    """Exactly +0 in every result and gradient, and the other rows have the bits they have without them."""
    logits, ids = normals(3, 24), torch.tensor([1, ignore_index, 2])
    logits[1] = value
    leaf_ = logits.clone().requires_grad_()
    results = ops.selected_logprob(leaf_, ids, T, ignore_index, entropy=True, lse=True)
    (gradient,) = torch.autograd.grad(results, leaf_, [normals(3, seed=seed) for seed in range(3)])
    assert bits(gradient[1]) == bytes(4 * 24)
    assert [bits(r[1:2]) for r in results] == [bytes(4)] * 3
    others = ops.selected_logprob(logits[0::2], ids[0::2], T, ignore_index, entropy=True, lse=True)
    assert [bits(r.detach()[0::2]) for r in results] == [bits(r) for r in others]


@pytest.mark.parametrize("bad", [24, -1, 2**31, -(2**40)])
def test_an_id_that_is_no_column_gives_nan(bad: int) -> None:
    """Its logp and its row's gradient are NaN; entropy, log-sum-exp and all other rows are what they were."""
    logits, ids = leaf(3, 24), torch.tensor([1, bad, 2])
    logp, entropy, lse = ops.selected_logprob(logits, ids, T, entropy=True, lse=True)
    (gradient,) = torch.autograd.grad(logp, logits, torch.ones(3))
    good = torch.tensor([1, 0, 2])
    expected = ops.selected_logprob(logits, good, T, entropy=True, lse=True)
    (exact,) = torch.autograd.grad(expected[0], logits, torch.ones(3))
    assert logp.isnan().tolist() == [False, True, False]
    assert gradient.isnan().all(1).tolist() == [False, True, False]
    assert [bits(entropy), bits(lse)] == [bits(t) for t in expected[1:]]
    assert bits(gradient[0::2]) == bits(exact[0::2])


def test_ids_can_be_watched() -> None:
    """Under the debugging setting an id that is neither a column nor ignored stops the device, and no other does."""
    logits, fine = normals(3, 24), torch.tensor([1, IGNORE_INDEX, 23])
    with scripted(debug_ids=True).active():
        ops.selected_logprob(logits, fine)
        with pytest.raises(RuntimeError, match=r"selected_logprob: an id lies outside \[0, 24\)"):
            ops.selected_logprob(logits, fine + 1)


def test_masked_elements_weigh_nothing() -> None:
    """-inf logits have no part in entropy and sum, and finite gradients."""
    logits, ids = normals(2, LONG), torch.tensor([1, 2])
    logits[:, 5] = -torch.inf
    logits[:, 100:] = -torch.inf
    logits.requires_grad_()
    results = ops.selected_logprob(logits, ids, T, entropy=True, lse=True)
    for got, exact in zip(results, exact_of(logits.detach(), ids), strict=True):
        assert_near(got, exact, magnitude=exact.abs() + 30)
    (gradient,) = torch.autograd.grad(results, logits, [torch.ones(2)] * 3)
    assert gradient.isfinite().all()
    assert not gradient[:, 100:].any()


@pytest.mark.parametrize("value", [-1e10, -1e20, -1e30])
def test_whole_chunks_that_are_far_below_weigh_nothing(value: float) -> None:
    """Masking with a large number instead of -inf gives the bits of -inf, in every result and gradient."""
    logits, ids = normals(2, LONG), torch.tensor([1, 2])
    logits[:, CHUNK:] = -torch.inf
    expected, far = (all_of(x, ids) for x in (logits, torch.where(logits.isinf(), value, logits)))
    assert [bits(t) for t in far] == [bits(t) for t in expected]
    assert all(bool(t.isfinite().all()) for t in far)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [9, LONG - 2])
def test_what_is_no_number_is_not_hidden_by_its_chunk(value: float, place: int) -> None:
    """NaN or +inf makes its row NaN also where the rest of its chunk weighs nothing."""
    logits = torch.full((1, LONG), -1e30)
    logits[0, LONG // 2 : LONG // 2 + 9] = normals(9)
    logits[0, place] = value
    for result in ops.selected_logprob(logits, torch.tensor([1]), T, entropy=True, lse=True):
        assert result.isnan().all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_with_nan_or_infinity_is_nan(value: float) -> None:
    """One NaN or +inf makes the results of its row NaN, and no other's."""
    logits, ids = normals(3, 24), torch.tensor([1, 2, 3])
    logits[1, 9] = value
    for result in ops.selected_logprob(logits, ids, T, entropy=True, lse=True):
        assert result.isnan().tolist() == [False, True, False]


# --- bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 24, 5000, CHUNK, LONG])
def test_its_bits_are_the_contract_s(width: int) -> None:
    """Forward and backward compute, step by step in float32, the formulas that stand in the kernels' files."""
    logits, ids = normals(2, width) * 4, ids_for(2, width)
    x, one, ln_2, inverse = logits.numpy(), np.float32(1), np.float32(np.log(2)), np.float32(1 / T)
    top, total, b = known_of(x, T)
    k = np.float32(1.4426950408889634 / T)
    chunks = chunks_of(x, -np.inf)
    tops = chunks.max(-1) * k
    below = fma(chunks, k, -tops[..., None])
    e = np.exp2(below)
    dots = chunk_sum(np.where(e == 0, np.float32(0), e * np.where(e == 0, np.float32(0), below)))
    down = tops - top[:, None]
    moved = (dots + chunk_sum(e) * down) * np.exp2(down)
    logs = np.log(total)
    entropy = logs - ln_2 * (over_chunks(moved, 0.0, pair_sum) / total)
    chosen = b[np.arange(2), ids.numpy()]
    expected = fma(chosen, ln_2, -logs), entropy, fma(top, ln_2, logs)
    results = forward(logits, ids, Options(T, IGNORE_INDEX, True, True))
    assert [bits(t) for t in results] == [t.tobytes() for t in (*expected, top, total)]  # type: ignore[arg-type]

    upstream = [normals(2, seed=seed) for seed in range(3)]
    g, h, l_ = (d.numpy()[:, None] for d in upstream)
    p = np.exp2(b) * (one / total)[:, None]
    a = p * ((l_ - g) * inverse)
    surprise = fma(b, ln_2, np.broadcast_to(-logs[:, None], b.shape)) + entropy[:, None]
    a = a - p * surprise * (h * inverse)
    a[np.arange(2), ids.numpy()] += (g * inverse)[:, 0]
    got = backward(logits, ids, results[1:2] + results[3:], upstream, Options(T, IGNORE_INDEX, True, True))  # type: ignore[arg-type]
    assert bits(got) == a.tobytes()


@company
def test_a_row_keeps_its_bits(company: str) -> None:
    """A row's bits depend on nothing but the row and its id, forward and backward."""
    ids = torch.full((64,), 3)
    assert_rows_keep_their_bits(lambda x: all_of(x, ids[: len(x)]), company, normals(5, 24))


@pytest.mark.parametrize("company", ["alone", "beside NaN", "unaligned"])
def test_a_long_row_keeps_its_bits(company: str) -> None:
    """The same holds for rows that are cut into chunks."""
    ids = torch.full((64,), 3)
    assert_rows_keep_their_bits(lambda x: all_of(x, ids[: len(x)]), company, normals(5, LONG))


def test_the_kinds_of_id_do_not_matter() -> None:
    """int32 and int64 ids, with gaps between them too, give the same bits."""
    logits, ids = normals(5, 24), ids_for(5, 24)
    expected = bits(ops.selected_logprob(logits, ids))
    assert bits(ops.selected_logprob(logits, ids.int())) == expected
    assert bits(ops.selected_logprob(logits, torch.stack([ids, ids], 1)[:, 0])) == expected


def test_the_longest_rows_are_no_power_of_two() -> None:
    """262,143 logits, 32 chunks, give what float64 gives."""
    logits, ids = normals(1, 262143, dtype=torch.bfloat16), torch.tensor([262142])
    for got, exact in zip(
        ops.selected_logprob(logits, ids, T, entropy=True, lse=True), exact_of(logits, ids), strict=True
    ):
        assert_near(got, exact, magnitude=exact.abs() + 30)


# --- shapes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (2, 3), (2, 1, 3)])
def test_leading_dimensions_are_rows(shape: tuple[int, ...]) -> None:
    """Any number of leading dimensions is taken; results have the shape of ids, the gradient that of the logits."""
    logits, ids = leaf(*shape, 24), torch.full(shape, 3)
    logp, entropy = ops.selected_logprob(logits, ids, T, entropy=True)
    (logp.sum() + entropy.sum()).backward()
    flat = ops.selected_logprob(logits.detach().reshape(-1, 24), ids.reshape(-1), T)
    assert (logp.shape, entropy.shape) == (ids.shape, ids.shape)
    assert bits(logp.reshape(-1)) == bits(flat)
    assert logits.grad is not None
    assert logits.grad.shape == logits.shape


@pytest.mark.parametrize("shape", [(0, 24), (2, 0, 24)])
def test_no_rows_give_no_results(shape: tuple[int, ...]) -> None:
    """No rows give empty results and an empty gradient."""
    logits = torch.empty(shape, requires_grad=True)
    logp = ops.selected_logprob(logits, torch.empty(shape[:-1], dtype=torch.int64))
    logp.sum().backward()
    assert logp.shape == shape[:-1]
    assert logits.grad is not None
    assert logits.grad.shape == logits.shape


def test_a_second_derivative_is_an_error() -> None:
    """Going back through a gradient raises."""
    logits = leaf(2, 8)
    (d,) = torch.autograd.grad(ops.selected_logprob(logits, ids_for(2, 8)).sum(), logits, create_graph=True)
    with pytest.raises(KalignError, match="selected_logprob cannot be differentiated twice"):
        d.square().sum().backward()


# --- what it refuses ----------------------------------------------------------------------------------------------

X, IDS = normals(3, 24), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("logits", "ids", "options", "says"),
    [
        (X.double(), IDS, {}, r"logits is torch.float64\n.*logits.to\(torch.bfloat16\)"),
        (X, IDS.float(), {}, r"ids is torch.float32\n.*ids.long\(\)"),
        (X, IDS[:2], {}, r"logits is \(3, 24\), ids \(2,\)"),
        (X, IDS.view(3, 1), {}, r"ids \(3, 1\)"),
        (X[:, :0], IDS, {}, "V at least 1"),
        (X[0, 0], IDS[0], {}, r"logits is \(\), ids \(\)"),
        (X, IDS, {"temperature": 0.0}, "temperature is 0.0"),
        (X, IDS, {"ignore_index": 1.5}, "ignore_index is 1.5, not an integer"),
        (X, IDS, {"ignore_index": 2**63}, "not an integer of 64 bits"),
        (X, IDS, {"entropy": torch.tensor(True)}, r"entropy is a Tensor\n.*True or False"),
        (X, IDS, {"lse": None}, "lse is None"),
        (X, [0, 0, 0], {}, "ids is list, not a tensor"),
        (None, IDS, {}, "logits is NoneType, not a tensor"),
    ],
)
def test_what_it_cannot_take_is_refused(logits: Any, ids: Any, options: dict[str, Any], says: str) -> None:
    """Wrong kinds, shapes, dtypes and options name the argument and, where there is one, the remedy."""
    with pytest.raises(BadArgument, match=f"(?s)selected_logprob: .*{says}"):
        ops.selected_logprob(logits, ids, **options)


def test_mixed_devices_are_named() -> None:
    """Tensors on two devices name both."""
    with pytest.raises(MixedDevices, match=r"(?s)logits on cpu, ids on meta"):
        ops.selected_logprob(X, IDS.to("meta"))
