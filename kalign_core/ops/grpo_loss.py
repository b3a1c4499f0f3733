"""``grpo_loss(logp, old_logp, ref_logp, advantages, mask, ...)``; contract in ``kernels/grpo_loss.py``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling, is_exporting

from kalign_core import context
from kalign_core.declare import cdiv
from kalign_core.errors import BadArgument, UnknownName
from kalign_core.kernels.grpo_loss import (
    TOKENS,
    grpo_loss_backward_kernel,
    grpo_loss_blocks_kernel,
    grpo_loss_fold_kernel,
)
from kalign_core.ops.autograd import first_order
from kalign_core.ops.base import LARGEST, Operator, Sizes, check_dtype, check_number, random_tensor
from kalign_core.ops.noting import allocate, exact, launch
from kalign_core.ops.opaque import opaque
from kalign_core.ops.recall import Form
from kalign_core.ops.tokens import DTYPES, as_bytes, check_constants, check_tokens, sequences, stride_of
from kalign_core.problems import one_device

REDUCTIONS = ("token", "sequence", "fixed")


class Tokens(NamedTuple):
    """The tensors of one call, as they were given."""

    logp: torch.Tensor
    old_logp: torch.Tensor
    ref_logp: torch.Tensor | None
    advantages: torch.Tensor
    mask: torch.Tensor | None


class Numbers(NamedTuple):
    """The numbers of one call: the ratio's bounds, the penalty's weight, how tokens are averaged."""

    low: float
    high: float
    beta: float
    reduction: str
    length: int | None


class GRPOLoss(Operator):
    """``grpo_loss(logp, old_logp, ref_logp, advantages, mask, ...)``: a scalar in float32, to be minimised.

    logp, old_logp, ref_logp: ``(B S)`` or ``(T)``, log-probabilities of sampled tokens under the policy, the policy
    that sampled and a reference (None where ``beta`` is 0); advantages: ``(B)``, one for each sequence, or one for each
    token; mask: boolean, which tokens count, all where None. Per token, with ``r = exp(logp - old_logp)`` and
    ``x = ref_logp - logp``::

        beta * (exp(x) - 1 - x) - min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

    ``reduction``: ``token``, the mean over all tokens (DAPO, arXiv 2503.14476, which also parts ``clip_low`` from
    ``clip_high``); ``sequence``, the mean over sequences of each one's mean (GRPO, arXiv 2402.03300); ``fixed``, the
    sum over tokens by ``length`` times the number of sequences (Dr. GRPO, arXiv 2503.20783). Sequences without a token
    do not count, and without any token the loss is 0.

    float32, bfloat16, float16, computed in float32. The sum's tree depends on where tokens stand in their sequence and
    sequences in the batch, on nothing else: masked tokens and sequences at the end change no bit. A masked token has
    gradient +0, whatever its inputs are. Gradients of logp alone. Any row stride. Raises ``BadArgument`` for shapes,
    dtypes and numbers that make no sense and for other inputs that ask for a gradient, ``UnknownName`` for another
    reduction, ``MixedDevices``.
    """

    name: ClassVar[str] = "grpo_loss"
    kernels = (grpo_loss_blocks_kernel, grpo_loss_fold_kernel, grpo_loss_backward_kernel)
    dims = ("B", "S")
    dtypes = DTYPES
    shapes = ({"B": 64, "S": 8192},)
    small_shapes = ({"B": 2, "S": 256},)

    def __call__(
        self,
        logp: torch.Tensor,
        old_logp: torch.Tensor,
        ref_logp: torch.Tensor | None,
        advantages: torch.Tensor,
        mask: torch.Tensor | None = None,
        clip_low: float = 0.2,
        clip_high: float = 0.2,
        beta: float = 0.04,
        reduction: str = "token",
        length: int | None = None,
    ) -> torch.Tensor:
        tokens = Tokens(logp, old_logp, ref_logp, advantages, mask)
        numbers = _numbers(clip_low, clip_high, beta, reduction, length)
        if ref_logp is None and beta:
            raise BadArgument(f"grpo_loss: beta={beta} without ref_logp", fix="beta=0.0, or pass ref_logp")
        try:
            check_constants("grpo_loss", old_logp=old_logp, ref_logp=ref_logp, advantages=advantages)
            if is_dynamo_compiling() or is_exporting():
                return _opaque(*tokens, *numbers)[0]  # type: ignore[no-any-return]  # what this returns
            if logp.requires_grad and torch.is_grad_enabled():
                return _GRPOLoss.apply(*tokens, numbers)  # type: ignore[no-untyped-call,no-any-return]  # torch's
            return forward(tokens, numbers)[0]
        except AttributeError:
            _check(tokens)
            raise

    def inputs(self, sizes: Sizes, dtype: str, seed: int, device: torch.device) -> tuple[Any, ...]:
        shape = (sizes["B"], sizes["S"])
        logp, old, ref = (random_tensor(shape, dtype, seed + i, device) for i in range(3))
        advantages = random_tensor(shape[:1], dtype, seed + 3, device)
        return logp.requires_grad_(), old, ref, advantages, random_tensor(shape, "fp32", seed + 4, device) < 1

    def forms(self, sizes: Sizes, dtype: str, seed: int, device: torch.device) -> Iterator[tuple[Any, ...]]:
        """Every reduction: each is folded by other code, and sequences are gone back through by other code."""
        tokens = self.inputs(sizes, dtype, seed, device)
        for reduction in REDUCTIONS:
            yield *tokens, 0.2, 0.2, 0.04, reduction, sizes["S"] if reduction == "fixed" else None

    def oracle(self, *args: Any) -> torch.Tensor:
        given = (*args, *(None, 0.2, 0.2, 0.04, "token", None)[len(args) - 4 :])
        logp, old, ref, advantages, mask, clip_low, clip_high, beta, reduction, length = given
        kept = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask
        kept, p = kept.view(-1, kept.shape[-1]), logp.double().view(-1, logp.shape[-1])
        a = (advantages if advantages.shape == logp.shape else advantages.unsqueeze(-1)).double()
        ratio = torch.exp(p - old.double())
        losses = -torch.minimum(ratio * a, ratio.clamp(1 - clip_low, 1 + clip_high) * a)
        if ref is not None:
            x = ref.double() - p
            losses = losses + beta * (torch.expm1(x) - x)
        losses, counts = torch.where(kept, losses, 0.0), kept.sum(1)
        if reduction == "sequence":
            return (losses.sum(1) / counts.clamp(min=1)).sum() / (counts > 0).sum().clamp(min=1)
        whole = counts.sum() if reduction == "token" else (counts > 0).sum() * length
        return losses.sum() / whole.clamp(min=1)


def forward(tokens: Tokens, numbers: Numbers) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The operator without gradients: the loss, and in float32 what each token's gradient is weighed with.

    That is one over what the sum was divided by, ``share: ()``, and where sequences are averaged one over the tokens of
    each, ``shares: (B)``, else None.
    """
    rest = (*_shapes(tokens[2:]), *map(exact, numbers))
    results = _FORWARD(_tensors(tokens), rest, (*tokens, *numbers))
    loss, share, shares = (*results, None)[:3]
    return loss, share, shares  # type: ignore[return-value]  # the first two are never None


def backward(
    tokens: Tokens, numbers: Numbers, share: torch.Tensor, shares: torch.Tensor | None, d_loss: torch.Tensor
) -> torch.Tensor:
    """The gradient of logp for an upstream gradient ``d_loss: ()``; the rest is what ``forward`` gave."""
    args, bounds = (*tokens, share, shares, d_loss), numbers[:3]
    return _BACKWARD(_tensors(args), (*_shapes(args[2:]), *map(exact, bounds)), (*args, *bounds))


def _tensors(args: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
    return tuple(arg for arg in args if arg is not None)


def _shapes(args: Sequence[torch.Tensor | None]) -> Iterator[Any]:
    """What tells apart which tensors there are, and how large."""
    return (tensor is None or tensor.shape for tensor in args)


def _forward(*args: Any) -> tuple[torch.Tensor, ...]:
    tokens, numbers = Tokens(*args[:5]), Numbers(*args[5:])
    _check(tokens)
    device = tokens.logp.device
    rows, strides = _rows(tokens)
    batch, width = rows[0].shape
    blocks = cdiv(width, TOKENS)
    results = [allocate((), torch.float32, device) for _ in range(2)]
    if numbers.reduction == "sequence":
        results.append(allocate((batch,), torch.float32, device))
    if tokens.logp.numel() == 0:
        return tuple(result.zero_() for result in results)
    loss, share, shares = (*results, None)[:3]
    sums = allocate((batch, blocks), torch.float32, device)
    counts = allocate((batch, blocks), torch.int32, device)
    launch(grpo_loss_blocks_kernel, *rows, sums, counts, batch, width, *strides, blocks, *numbers[:3])
    launch(grpo_loss_fold_kernel, sums, counts, loss, shares, share, batch, blocks, numbers.length)
    return tuple(results)


def _backward(*args: Any) -> torch.Tensor:
    tokens, (share, shares, d_loss), bounds = Tokens(*args[:5]), args[5:8], args[8:]
    d_logp = allocate(tokens.logp.shape, tokens.logp.dtype, tokens.logp.device)
    if d_logp.numel():
        rows, strides = _rows(tokens)
        out = sequences("grpo_loss", "gradient", d_logp)
        scalars = (*out.shape, *strides, out.stride(0), *bounds)
        launch(grpo_loss_backward_kernel, *rows, shares, share, d_loss, out, *scalars)
    return d_logp


_FORWARD = Form("grpo_loss", _forward)
_BACKWARD = Form("grpo_loss backward", _backward)


def _rows(tokens: Tokens) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """The kernels' inputs in their order, and the row strides of those that have rows."""
    p, old, ref, mask = (
        None if t is None else sequences("grpo_loss", "logp", t)
        for t in (tokens.logp, tokens.old_logp, tokens.ref_logp, as_bytes(tokens.mask))
    )
    each = one = None
    if tokens.advantages.shape == tokens.logp.shape:
        each = sequences("grpo_loss", "advantages", tokens.advantages)
    else:
        one = tokens.advantages.contiguous()
    return (p, old, ref, one, each, mask), tuple(stride_of(t) for t in (p, old, ref, each, mask))


def _check(tokens: Tokens) -> None:
    logp, old_logp, ref_logp, advantages, mask = tokens
    reference = {} if ref_logp is None else {"ref_logp": ref_logp}
    check_tokens("grpo_loss", mask, logp=logp, old_logp=old_logp, **reference)
    one_device("grpo_loss", {"logp": logp, "advantages": advantages})
    check_dtype("grpo_loss", "advantages", advantages, DTYPES)
    if advantages.shape not in (logp.shape, logp.shape[:-1]) or not advantages.dim():
        raise BadArgument(
            f"grpo_loss: advantages are {tuple(advantages.shape)}, logp is {tuple(logp.shape)}",
            why="one for each sequence (B), or one for each token",
        )


def _numbers(clip_low: float, clip_high: float, beta: float, reduction: str, length: int | None) -> Numbers:
    if reduction not in REDUCTIONS:
        raise UnknownName("reduction", reduction, REDUCTIONS)
    for name, value in (("clip_low", clip_low), ("clip_high", clip_high), ("beta", beta)):
        if value.__class__ is not float or not 0.0 <= value <= LARGEST:  # every call comes by here
            check_number("grpo_loss", name, value, 0.0, LARGEST if name == "beta" else math.inf, example=0.2)
    if (length is not None) != (reduction == "fixed"):
        raise BadArgument(
            f"grpo_loss: length={length} with reduction={reduction!r}",
            why="length is what the fixed mean divides by, and that alone",
            fix="reduction='fixed', length=8192" if length is None else f"reduction='fixed', length={length}",
        )
    if length is not None and (isinstance(length, bool) or not isinstance(length, int) or not 1 <= length < 2**63):
        raise BadArgument(f"grpo_loss: length={length!r} is no number of tokens", fix="length=8192")
    return Numbers(1.0 - clip_low, 1.0 + clip_high, float(beta), reduction, length)


class _GRPOLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logp: torch.Tensor,
        old_logp: torch.Tensor,
        ref_logp: torch.Tensor | None,
        advantages: torch.Tensor,
        mask: torch.Tensor | None,
        numbers: Numbers,
    ) -> torch.Tensor:
        tokens = Tokens(logp, old_logp, ref_logp, advantages, mask)
        loss, share, shares = forward(tokens, numbers)
        ctx.save_for_backward(*tokens, share, shares)
        ctx.call, ctx.numbers = context.current(), numbers
        return loss

    @staticmethod
    @first_order("grpo_loss")
    def backward(ctx: Any, d_loss: torch.Tensor) -> Any:
        *tokens, share, shares = ctx.saved_tensors
        with context.restored(ctx.call):
            d_logp = backward(Tokens(*tokens), ctx.numbers, share, shares, d_loss)
        return d_logp, None, None, None, None, None


# --- as torch.compile sees it -------------------------------------------------------------------------------------

_INPUTS = "Tensor logp, Tensor old, Tensor? ref, Tensor advantages, Tensor? mask"
_NUMBERS = "float low, float high, float beta, str reduction, int? length"


def _whole(*args: Any) -> tuple[torch.Tensor, ...]:
    """``forward`` with a tensor in every place, as the dispatcher wants it."""
    loss, share, shares = forward(Tokens(*args[:5]), Numbers(*args[5:]))
    return loss, share, share.new_empty(0) if shares is None else shares


def _fake(*args: Any) -> tuple[torch.Tensor, ...]:
    logp, by_sequence = args[0], args[8] == "sequence"
    sequences_there = (logp.shape[0] if logp.dim() == 2 else 1) if by_sequence else 0
    return tuple(logp.new_empty(size, dtype=torch.float32) for size in ((), (), (sequences_there,)))


def _whole_backward(*args: Any) -> torch.Tensor:
    share, shares, d_loss, *numbers = args[5:]
    known = Numbers(*numbers)
    return backward(Tokens(*args[:5]), known, share, shares if known.reduction == "sequence" else None, d_loss)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:5], *output[1:])
    ctx.numbers = inputs[5:]


def _opaque_gradient(ctx: Any, d_loss: torch.Tensor, *others: torch.Tensor) -> tuple[Any, ...]:
    return _opaque_backward(*ctx.saved_tensors, d_loss, *ctx.numbers), *(None,) * 9


_opaque_backward = opaque(
    f"grpo_loss_backward({_INPUTS}, Tensor share, Tensor shares, Tensor d_loss, {_NUMBERS}) -> Tensor",
    _whole_backward,
    lambda logp, *others: logp.new_empty(logp.shape),
)
_opaque = opaque(
    f"grpo_loss({_INPUTS}, {_NUMBERS}) -> (Tensor, Tensor, Tensor)",
    _whole,
    _fake,
    save=_save,
    backward=_opaque_gradient,
)
