"""``embedding(ids, weight)``; contract in ``kernels/embedding.py``."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.compiler import is_dynamo_compiling, is_exporting

from kalign_core import context
from kalign_core.errors import BadArgument
from kalign_core.kernels.embedding import embedding_backward_kernel, embedding_kernel
from kalign_core.ops.autograd import first_order
from kalign_core.ops.base import Operator, Sizes, check_dtype, random_tensor, rows_of
from kalign_core.ops.ids import check_ids, watch_range
from kalign_core.ops.noting import allocate, launch
from kalign_core.ops.opaque import opaque
from kalign_core.ops.recall import Form
from kalign_core.problems import one_device

# Rows of a table whose numbers fit 32 bits with one beside them on either side.
MOST_NUMBERS = 2**31 - 1


class Embedding(Operator):
    """``embedding(ids, weight)``: ids: ``(...)``, weight: ``(V H)`` -> ``(... H)`` in weight's dtype.

    Row ``ids[t]`` of weight, copied. ids: int64 or int32; weight: bfloat16, float16, float32, any row stride. An id
    outside ``[0, V)`` gives a row of +0 and adds nothing to the gradient; with ``KALIGN_DEBUG_IDS=1`` the device
    asserts that there is none. The gradient of weight adds, in float32, the rows of the tokens with the same id in
    ascending order of the tokens, rounded once: no atomics, no synchronisation, the same bits every time. Raises
    ``BadArgument`` for shapes and dtypes, ``MixedDevices``.
    """

    name: ClassVar[str] = "embedding"
    kernels = (embedding_kernel, embedding_backward_kernel)
    dims = ("T", "V", "H")
    shapes = ({"T": 8192, "V": 151936, "H": 4096},)
    small_shapes = ({"T": 8, "V": 8, "H": 256},)

    def __call__(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if is_dynamo_compiling() or is_exporting():
            return _opaque(ids, weight)  # type: ignore[no-any-return]  # what this returns
        try:
            if weight.requires_grad and torch.is_grad_enabled():
                return _Embedding.apply(ids, weight)  # type: ignore[no-untyped-call,no-any-return]  # torch's apply
            return forward(ids, weight)
        except AttributeError:
            one_device("embedding", {"ids": ids, "weight": weight})
            raise

    def inputs(self, sizes: Sizes, dtype: str, seed: int, device: torch.device) -> tuple[Any, ...]:
        weight = random_tensor((sizes["V"], sizes["H"]), dtype, seed, device)
        generator = torch.Generator(device).manual_seed(seed + 1)
        ids = torch.randint(sizes["V"], (sizes["T"],), generator=generator, device=device)
        return ids, weight.requires_grad_()

    def oracle(self, *args: Any) -> torch.Tensor:
        ids, weight = args
        known = (ids >= 0) & (ids < weight.shape[0])
        rows = torch.nn.functional.embedding(torch.where(known, ids, 0), weight.double())
        return torch.where(known.unsqueeze(-1), rows, 0.0)


def forward(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The operator without gradients."""
    result = _FORWARD((ids, weight))
    watch_range("embedding", ids, weight.shape[0])
    return result


def _forward(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    _check(ids, weight)
    out = allocate((*ids.shape, weight.shape[1]), weight.dtype, weight.device)
    if out.numel() == 0:
        return out
    if weight.shape[0] == 0:
        return out.zero_()
    rows, result = rows_of("embedding", "weight", weight), out.view(-1, out.shape[-1])
    flat = ids.reshape(-1).contiguous()
    launch(embedding_kernel, flat, rows, result, len(flat), *rows.shape, rows.stride(0), result.stride(0))
    return out


_FORWARD = Form("embedding", _forward, shapes=2)


def backward(ids: torch.Tensor, weight: torch.Tensor, d_out: torch.Tensor) -> torch.Tensor:
    """The gradient of weight for an upstream gradient ``d_out: (... H)``; of weight, shape and dtype are looked at."""
    d_weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    if d_weight.numel() == 0:
        return d_weight
    if ids.numel() == 0:
        return d_weight.zero_()
    rows = rows_of("embedding", "gradient", d_out)
    runs = _runs(ids.reshape(-1), weight.shape[0])
    launch(embedding_backward_kernel, *runs, rows, d_weight, len(rows), *weight.shape, rows.stride(0))
    return d_weight


def _runs(ids: torch.Tensor, vocabulary: int) -> tuple[torch.Tensor, ...]:
    """Where the tokens of each number are, all on the device: what ``embedding_backward_kernel`` calls by name.

    A radix sort takes a pass for every few bits, so that 64 of them are cut to 32 first; ids outside the table stay
    outside it.
    """
    short = ids.dtype == torch.int64 and vocabulary <= MOST_NUMBERS
    keys = ids.clamp(-1, vocabulary).to(torch.int32) if short else ids
    ordered, order = torch.sort(keys, stable=True)
    numbers = torch.arange(vocabulary, dtype=ordered.dtype, device=ids.device)
    place = torch.searchsorted(ordered, numbers).clamp_(max=len(ids) - 1)
    joined = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    torch.eq(ordered[1:], ordered[:-1], out=joined[1:])
    named = ordered[place] == numbers
    return order, joined.view(torch.uint8), place, named.view(torch.uint8)


def _check(ids: torch.Tensor, weight: torch.Tensor) -> None:
    one_device("embedding", {"ids": ids, "weight": weight})
    check_dtype("embedding", "weight", weight, Embedding.dtypes)
    check_ids("embedding", "ids", ids)
    if weight.dim() != 2:
        raise BadArgument(f"embedding: weight is {tuple(weight.shape)}", why="it has a row for each id: (V H)")


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        # Of the table only its shape is needed to go back: saving it would forbid to change it in place.
        ctx.save_for_backward(ids)
        ctx.like, ctx.call = weight.new_empty(()).expand(weight.shape), context.current()
        return forward(ids, weight)

    @staticmethod
    @first_order("embedding")
    def backward(ctx: Any, d_out: torch.Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        with context.restored(ctx.call):
            return None, backward(ids, ctx.like, d_out)


def _save(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


_opaque_backward = opaque(
    "embedding_backward(Tensor ids, Tensor weight, Tensor d_out) -> Tensor",
    backward,
    lambda ids, weight, d_out: weight.new_empty(weight.shape),
)
_opaque = opaque(
    "embedding(Tensor ids, Tensor weight) -> Tensor",
    forward,
    lambda ids, weight: weight.new_empty((*ids.shape, weight.shape[1])),
    save=_save,
    backward=lambda ctx, d_out: (None, _opaque_backward(*ctx.saved_tensors, d_out)),
)
