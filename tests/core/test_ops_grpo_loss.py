"""ops.grpo_loss: accuracy of all three means, its tree, masks that hide anything, padding that changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kalign_core.api import recorded_forms
from kalign_core.errors import BadArgument, KalignError, MixedDevices, UnknownName
from kalign_core.kernels.grpo_loss import FOLD_BLOCKS, FOLD_ROWS, TOKENS, grpo_loss_blocks_kernel, grpo_loss_fold_kernel
from kalign_core.ops.noting import launch
from kalign_core.records import Config, Problem
from tests.core.scripted import assert_near, bits, leaf, normals, ops, scripted

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
MEANS: dict[str, dict[str, Any]] = {
    "token": {"reduction": "token"},
    "sequence": {"reduction": "sequence"},
    "fixed": {"reduction": "fixed", "length": 50},
}
every_mean = pytest.mark.parametrize("mean", MEANS)
Given = tuple[Any, ...]


def batch(b: int, s: int, dtype: torch.dtype = torch.float32, each: bool = False) -> Given:
    """logp, old_logp, ref_logp, advantages (one for each token where ``each``) and a mask."""
    logp = normals(b, s).abs().neg()
    old, ref = (logp + normals(b, s, seed=i) / 3 for i in (1, 2))
    advantages = normals(b, s, seed=3) if each else normals(b, seed=3)
    return *(t.to(dtype) for t in (logp, old, ref, advantages)), normals(b, s, seed=4) < 0.5


def both_ways(given: Given, d: float = 1.0, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss and the gradient of logp for an upstream gradient ``d``."""
    logp = given[0].detach().requires_grad_()
    loss = ops.grpo_loss(logp, *given[1:], **options)
    return loss.detach(), *torch.autograd.grad(loss, logp, torch.tensor(d))


def exact_of(given: Given, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in float64."""
    names = ("clip_low", "clip_high", "beta", "reduction", "length")
    rest = [
        {"clip_low": 0.2, "clip_high": 0.2, "beta": 0.04, "reduction": "token", "length": None, **options}[n]
        for n in names
    ]
    logp = given[0].double().requires_grad_()
    loss = ops.grpo_loss.oracle(logp, *given[1:], *rest)
    return loss.detach(), *torch.autograd.grad(loss, logp)


# --- accuracy -----------------------------------------------------------------------------------------------------


@every_mean
@pytest.mark.parametrize("each", [False, True], ids=["advantages of sequences", "advantages of tokens"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_is_accurate(dtype: torch.dtype, each: bool, mean: str) -> None:
    """The loss and its gradient are those of float64, the gradient rounded once to logp's dtype."""
    given = batch(5, 70, dtype, each)
    (loss, d_logp), (exact, d_exact) = both_ways(given, **MEANS[mean]), exact_of(given, **MEANS[mean])
    assert loss.dtype == torch.float32
    assert_near(loss, exact, magnitude=torch.ones_like(exact))
    assert_near(d_logp, d_exact, magnitude=torch.ones_like(d_exact) * 4 * d_exact.abs().max())


def test_the_upstream_gradient_scales_it() -> None:
    """A loss that is a part of another has its share of the gradient."""
    given = batch(2, 20)
    assert torch.equal(both_ways(given, -2.0)[1], both_ways(given)[1] * -2.0)


def test_bounds_and_penalty_are_taken() -> None:
    """Bounds on either side and the penalty's weight are the caller's."""
    given = batch(3, 40)
    options = {"clip_low": 0.1, "clip_high": 0.4, "beta": 0.7}
    for got, exact in zip(both_ways(given, **options), exact_of(given, **options), strict=True):
        assert_near(got, exact, magnitude=torch.ones_like(exact))


def test_clipped_tokens_have_the_penalty_s_gradient_alone() -> None:
    """Beyond the bound that its advantage meets, a token's ratio has no gradient; on the other side it has."""
    ratio = torch.tensor([[2.0, 2.0, 0.5, 0.5]])
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0]])
    given = (ratio.log(), torch.zeros(1, 4), None, advantages)
    _, d_logp = both_ways(given, beta=0.0)
    torch.testing.assert_close(d_logp, torch.tensor([[0.0, 0.5, -0.125, 0.0]]))


def test_without_a_reference_there_is_no_penalty() -> None:
    """``ref_logp=None`` gives what a weight of 0 gives."""
    logp, old, ref, advantages, mask = batch(3, 40)
    with_it = both_ways((logp, old, ref, advantages, mask), beta=0.0)
    without = both_ways((logp, old, None, advantages, mask), beta=0.0)
    assert [torch.equal(a, b) for a, b in zip(with_it, without, strict=True)] == [True, True]


# --- bits ---------------------------------------------------------------------------------------------------------


def tree(values: Any) -> Any:
    """Adjacent pairs, again and again, along the last axis."""
    while values.shape[-1] > 1:
        values = values[..., 0::2] + values[..., 1::2]
    return values[..., 0]


def folded(values: Any, block: int) -> Any:
    """Trees over each ``block`` along the last axis, added in ascending order from +0."""
    short = -values.shape[-1] % block
    padded = np.concatenate((values, np.zeros((*values.shape[:-1], short), np.float32)), -1)
    total = np.zeros(values.shape[:-1], np.float32)
    for part in np.moveaxis(tree(padded.reshape(*values.shape[:-1], -1, block)), -1, 0):
        total = total + part
    return total


@every_mean
def test_its_bits_are_the_contract_s(mean: str) -> None:
    """The loss is, addition by addition, what the contract in the kernel's file says; so is the gradient."""
    b, s = FOLD_ROWS + 3, TOKENS + 60
    given = batch(b, s)
    p, old, ref, a, mask = (t.numpy() for t in given)
    f, a = np.float32, a[:, None]
    r, x = np.exp(p - old), ref - p
    plain, clipped = r * a, np.clip(r, f(0.8), f(1.2)) * a
    penalty = f(0.04) * ops.ratio_kl(*given[:3]).k3.numpy()
    losses = np.where(mask, penalty - np.minimum(clipped, plain), f(0))
    blocks = tree(np.concatenate((losses, np.zeros((b, 2 * TOKENS - s), f)), 1).reshape(b, 2, TOKENS))
    sums, counts = folded(blocks, FOLD_BLOCKS), mask.sum(1).astype(f)
    divisor = {"token": counts.sum(), "sequence": f(b), "fixed": f(b) * f(50)}[mean]
    weight = np.full((b, 1), f(1) / divisor)
    if mean == "sequence":
        sums, weight = sums / counts, weight * (f(1) / counts)[:, None]
    slope = f(0.04) * (f(1) - np.exp(x)) - np.where(clipped < plain, f(0), plain)
    loss, d_logp = both_ways(given, **MEANS[mean])
    assert bits(loss) == (folded(sums, FOLD_ROWS) / divisor).tobytes()
    assert bits(d_logp) == np.where(mask, weight * slope, f(0)).tobytes()


@pytest.mark.parametrize("unroll", grpo_loss_fold_kernel.knobs["UNROLL"])
@pytest.mark.parametrize("batch", [1, FOLD_ROWS, 3 * FOLD_ROWS + 1, 5 * FOLD_ROWS])
@every_mean
def test_the_fold_s_bits_do_not_follow_its_launch(batch: int, unroll: int, mean: str) -> None:
    """Groups of sequences are added in ascending order, however many are read at a time."""
    sums, counts = normals(batch, 20) * 10.0 ** normals(batch, 1), torch.ones(batch, 20, dtype=torch.int32)
    sums[0], counts[-1] = -0.0, 0
    loss, share = torch.empty(()), torch.empty(())
    shares = torch.full((batch + 8,), torch.nan) if mean == "sequence" else None
    reference = grpo_loss_fold_kernel.reference
    assert isinstance(reference, Config)
    given = {name: value for name, value in reference.replace(UNROLL=unroll).items() if name.isupper()}
    length = MEANS[mean].get("length")
    grpo_loss_fold_kernel.fn[(1,)](sums, counts, loss, shares, share, batch, 20, length, OVERLAP=False, **given)
    f = np.float32
    per_sequence, tokens = folded(sums.numpy(), FOLD_BLOCKS), counts.sum(1).numpy().astype(f)
    with np.errstate(invalid="ignore", divide="ignore"):
        of_sequence = np.where(tokens > 0, f(1) / tokens, f(0))
        if mean == "sequence":
            per_sequence = np.where(tokens > 0, per_sequence / tokens, f(0))
    divisor = {"token": f(tokens.sum()), "sequence": f(batch - 1), "fixed": f(batch - 1) * f(50)}[mean]
    expected = folded(per_sequence, FOLD_ROWS) / divisor if divisor else f(0)
    assert bits(loss) == f(expected).tobytes()
    assert bits(share) == f(f(1) / divisor if divisor else 0).tobytes()
    if shares is not None:
        assert bits(shares[:batch]) == of_sequence.tobytes()
        assert shares[batch:].isnan().all()


def length_of(problem: Problem) -> float | None:
    """What the problem's kernel is given as length, if anything."""
    return next((arg.value for arg in problem.args if arg.name == "length"), None)


def test_every_reduction_is_tuned_by_name() -> None:
    """Its name and a size stand for what each reduction runs: three folds, and two ways back."""
    made = {
        (call.kernel.name, call.problem.dtype("shares"), length_of(call.problem) is not None)
        for call in recorded_forms(ops.grpo_loss, {"B": 2, "S": 256}, "fp32", torch.device("cpu"))
        if call.kernel is not grpo_loss_blocks_kernel
    }
    fold, back = "grpo_loss_fold", "grpo_loss_backward"
    assert made == {
        (fold, "none", False), (fold, "fp32", False), (fold, "none", True), (back, "none", False), (back, "fp32", False)
    }  # fmt: skip


@every_mean
def test_masked_tokens_at_the_end_change_nothing(mean: str) -> None:
    """More padding, of sequences and of the batch, leaves every bit of the loss and of the gradient."""
    logp, old, ref, advantages, mask = batch(3, 700)
    loss, d_logp = both_ways((logp, old, ref, advantages, mask), **MEANS[mean])

    def padded(t: torch.Tensor, value: float) -> torch.Tensor:
        return torch.nn.functional.pad(t, (0, 900, 0, 2), value=value)

    more = (*(padded(t, torch.nan) for t in (logp, old, ref)), torch.cat((advantages, torch.full((2,), torch.inf))))
    loss_more, d_more = both_ways((*more, padded(mask, False)), **MEANS[mean])
    assert bits(loss_more) == bits(loss)
    assert bits(d_more[:3, :700]) == bits(d_logp)
    assert not padded(torch.zeros(3, 700), 1.0).mul(d_more).any()


@every_mean
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf])
def test_masked_tokens_hide_anything(garbage: float, mean: str) -> None:
    """NaN and infinities of masked tokens reach neither the loss nor a gradient, and theirs is +0."""
    *tensors, mask = batch(3, 70, each=True)
    spoilt = [torch.where(mask, t, garbage) for t in tensors]
    plain, hidden = (both_ways((*t, mask), **MEANS[mean]) for t in (tensors, spoilt))
    assert [bits(t) for t in hidden] == [bits(t) for t in plain]
    assert bits(hidden[1][~mask]) == bytes(4 * int((~mask).sum()))


def test_a_nan_that_counts_is_seen() -> None:
    """What is not masked is not hidden."""
    given = batch(2, 20)
    given[0][1, 3], given[4][1, 3] = torch.nan, True
    loss, d_logp = both_ways(given)
    assert loss.isnan()
    assert d_logp.isnan().nonzero().tolist() == [[1, 3]]


@every_mean
def test_layouts_do_not_change_bits(mean: str) -> None:
    """Rows cut out of longer ones, unaligned and transposed give the bits of dense ones."""
    given = batch(3, 70, each=True)
    expected = [bits(t) for t in both_ways(given, **MEANS[mean])]
    cut = tuple(torch.nn.functional.pad(t, (3, 5))[:, 3:73] for t in given)
    turned = tuple(t.t().contiguous().t() for t in given)
    assert [[bits(t) for t in both_ways(other, **MEANS[mean])] for other in (cut, turned)] == [expected] * 2


def test_advantages_of_sequences_and_of_tokens_are_alike() -> None:
    """One advantage for a whole sequence gives the bits of the same one for each of its tokens."""
    logp, old, ref, advantages, mask = batch(3, 70)
    wide = advantages[:, None].expand(3, 70)
    one, each = both_ways((logp, old, ref, advantages, mask)), both_ways((logp, old, ref, wide, mask))
    assert [bits(t) for t in one] == [bits(t) for t in each]


@every_mean
def test_more_tokens_than_32_bits_count(mean: str) -> None:
    """The number of tokens is that of them all, also past 2**31."""
    batch, tokens = 3 * FOLD_ROWS, 2**26
    sums, counts = torch.ones(batch, 1), torch.full((batch, 1), tokens, dtype=torch.int32)
    loss, share, shares = torch.empty(()), torch.empty(()), torch.empty(batch) if mean == "sequence" else None
    launch(grpo_loss_fold_kernel, sums, counts, loss, shares, share, batch, 1, MEANS[mean].get("length"))
    exact = {"token": 1 / tokens, "sequence": 1 / tokens, "fixed": 1 / 50}[mean]
    assert (loss.item(), share.item()) == pytest.approx((exact, exact / batch if mean != "sequence" else 1 / batch))


# --- shapes -------------------------------------------------------------------------------------------------------


@every_mean
def test_packed_tokens_are_one_sequence(mean: str) -> None:
    """``(T)`` with an advantage for each token is a batch of one sequence."""
    given = batch(1, 70, each=True)
    flat, rows = (both_ways(t, **MEANS[mean]) for t in (tuple(t[0] for t in given), given))
    assert [bits(t) for t in flat] == [bits(t) for t in rows]


@every_mean
@pytest.mark.parametrize("shape", [(1, 1), (0, 8), (3, 0), (2, 5)])
def test_batches_without_a_token_lose_nothing(shape: tuple[int, int], mean: str) -> None:
    """Where no token counts, or none is there, the loss is +0 and so is every gradient."""
    *tensors, mask = batch(*shape)
    loss, d_logp = both_ways((*tensors, torch.zeros_like(mask)), **MEANS[mean])
    assert (bits(loss), bits(d_logp), d_logp.shape) == (bytes(4), bytes(4 * d_logp.numel()), torch.Size(shape))


def test_without_a_mask_all_tokens_count() -> None:
    """No mask is a mask of ones."""
    *tensors, mask = batch(3, 70)
    with_it, without = both_ways((*tensors, torch.ones_like(mask))), both_ways((*tensors, None))
    assert [bits(t) for t in with_it] == [bits(t) for t in without]


def test_a_second_derivative_is_an_error() -> None:
    """Going back through a gradient raises."""
    given = batch(2, 8)
    logp = given[0].clone().requires_grad_()
    (d,) = torch.autograd.grad(ops.grpo_loss(logp, *given[1:]), logp, create_graph=True)
    with pytest.raises(KalignError, match="grpo_loss cannot be differentiated twice"):
        d.sum().backward()


# --- what it refuses ----------------------------------------------------------------------------------------------

P, A = normals(3, 8), normals(3)


@pytest.mark.parametrize(
    ("given", "options", "says"),
    [
        ((P, P[:2], P, A), {}, r"old_logp is \(2, 8\)"),
        ((P, P, P, A[:2]), {}, r"advantages are \(2,\), logp is \(3, 8\)"),
        ((P, P, P, A.view(3, 1)), {}, r"advantages are \(3, 1\)"),
        ((P[0], P[0], P[0], A[0]), {}, r"advantages are \(\), logp is \(8,\)"),
        ((P, P, P, A.double()), {}, "advantages is torch.float64"),
        ((P, P, None, A), {"beta": 0.1}, r"beta=0.1 without ref_logp\n.*beta=0.0"),
        ((P, P, P, leaf(3)), {}, r"advantages requires a gradient\n.*\n.*advantages.detach\(\)"),
        ((P, leaf(3, 8), P, A), {}, "old_logp requires a gradient"),
        ((P, P, P, A, P), {}, r"mask is torch.float32\n.*\n.*mask.bool\(\)"),
        ((P, P, P, None), {}, "advantages is NoneType, not a tensor"),
        ((P, P, P, A), {"clip_low": -0.1}, r"clip_low is -0.1\n.*from 0 to inf\n.*clip_low=0.2"),
        ((P, P, P, A), {"beta": float("nan")}, "beta is nan"),
        ((P, P, P, A), {"beta": float("inf")}, "beta is inf"),
        ((P, P, P, A), {"clip_high": torch.tensor(0.2)}, "clip_high is a Tensor"),
        ((P, P, P, A), {"reduction": "fixed", "length": True}, "length=True is no number of tokens"),
        ((P, P, P, A), {"reduction": "fixed", "length": 2**63}, "is no number of tokens"),
        ((P, P, P, A), {"reduction": "fixed"}, "length=None with reduction='fixed'"),
        ((P, P, P, A), {"length": 8}, "length=8 with reduction='token'"),
        ((P, P, P, A), {"reduction": "fixed", "length": 0}, "length=0 is no number of tokens"),
    ],
)
def test_what_it_cannot_take_is_refused(given: Given, options: dict[str, Any], says: str) -> None:
    """Wrong kinds, shapes, numbers and gradients that would be lost name the argument and the remedy."""
    with pytest.raises(BadArgument, match=f"(?s)grpo_loss: .*{says}"):
        ops.grpo_loss(*given, **options)


def test_another_mean_is_unknown() -> None:
    """A reduction that is none lists those that are."""
    with pytest.raises(UnknownName, match=r"(?s)unknown reduction 'tokens'.*token, sequence, fixed"):
        ops.grpo_loss(P, P, P, A, reduction="tokens")


def test_mixed_devices_are_named() -> None:
    """Tensors on two devices name both."""
    with pytest.raises(MixedDevices, match="advantages on meta"):
        ops.grpo_loss(P, P, P, A.to("meta"))


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_calls_with_any_weight_of_the_divergence_are_recalled(beta: float) -> None:
    """A loss without its KL term, whose weight is zero, is remembered like any other."""
    with scripted().active() as here:
        ops.grpo_loss(*batch(2, 8), beta=beta)
        kinds = [key[1][0] for key in here.calls]
    assert kinds == ["grpo_loss"]
