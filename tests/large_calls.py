"""Every operator on tensors past a number of elements, beside the same rows in a small call; ``2**31`` on a device.

Each case gives pairs that must be the same bytes: the last rows of large results, and those rows computed alone. All
rows before them are zeros, so that a row which was read or written elsewhere shows. Inputs of a call are one tensor,
each with a stride of its own, which leaves room for the results.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kalign_core import ops
from kalign_core.ops.embedding import backward as embedding_backward
from kalign_core.ops.grpo_loss import Numbers, Tokens
from kalign_core.ops.grpo_loss import backward as grpo_loss_backward
from kalign_core.ops.grpo_loss import forward as grpo_loss_forward
from kalign_core.ops.ratio_kl import backward as ratio_kl_backward
from kalign_core.ops.rms_norm import backward as rms_norm_backward
from kalign_core.ops.rope import backward as rope_backward
from kalign_core.ops.selected_logprob import Options
from kalign_core.ops.selected_logprob import backward as selected_backward
from kalign_core.ops.selected_logprob import forward as selected_forward
from kalign_core.ops.softmax import LOG_SOFTMAX, SOFTMAX
from kalign_core.ops.softmax import backward as softmax_backward
from kalign_core.ops.softmax import forward as softmax_forward
from kalign_core.ops.swiglu import backward as swiglu_backward

LAST = 16
softmax_module = importlib.import_module("kalign_core.ops.softmax")  # kalign_core.ops.softmax is the operator
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Large:
    """A call and how many bfloat16 tensors of so many elements it needs at the most at a time.

    ``run(elements, device)`` makes the call on tensors of more than ``elements`` elements.
    """

    name: str
    tensors: float
    run: Callable[[int, torch.device], Iterator[Pair]]

    def needs_bytes(self, elements: int) -> int:
        """Device memory for one run, with a tenth beside it."""
        return int(2.2 * self.tensors * elements)


def rows_past(elements: int, width: int, least: int = LAST, step: int = LAST) -> int:
    """How many rows of ``width`` are past ``elements``, the last ``step`` of them all: a multiple of ``step``."""
    return max(least, (elements // width // step + 2) * step)


def wide(elements: int, width: int) -> int:
    """Rows of ``width``, shorter where there are few elements in all."""
    return min(width, max(64, elements >> 6))


def late(rows: int, width: int, device: torch.device, last: int = LAST) -> torch.Tensor:
    """``(rows width)`` in bfloat16: normals in the ``last`` rows, zeros before them."""
    made = torch.zeros(rows, width, dtype=torch.bfloat16, device=device)
    generator = torch.Generator(device).manual_seed(0)
    made[-last:] = torch.randn(last, width, generator=generator, device=device).to(made.dtype)
    return made


def ends(results: Any, alone: Any, last: int = LAST) -> Iterator[Pair]:
    """The last rows of each result beside the rows alone."""
    for whole, part in zip(_each(results), _each(alone), strict=True):
        yield whole[-last:].clone(), part  # a view would keep the whole result


def _each(results: Any) -> tuple[torch.Tensor, ...]:
    return tuple(results) if isinstance(results, tuple) else (results,)


# --- rows -----------------------------------------------------------------------------------------------------------


def swiglu(elements: int, device: torch.device) -> Iterator[Pair]:
    width = wide(elements, 4096)
    x = late(rows_past(elements, width), width, device)
    end = x[-LAST:].clone()
    yield from ends(ops.swiglu(x, x), ops.swiglu(end, end))
    yield from ends(swiglu_backward(x, x, x), swiglu_backward(end, end, end))


def rope(interleaved: bool) -> Callable[[int, torch.device], Iterator[Pair]]:
    def run(elements: int, device: torch.device) -> Iterator[Pair]:
        x = late(rows_past(elements, 128), 128, device)
        end = x[-LAST:].clone()
        (heads, cos, sin), (head, c, s) = ((t.unsqueeze(1), t[:, :64], t[:, 64:]) for t in (x, end))
        yield from ends(ops.rope(heads, cos, sin, interleaved), ops.rope(head, c, s, interleaved))
        yield from ends(rope_backward(cos, sin, heads, interleaved), rope_backward(c, s, head, interleaved))

    return run


def rms_norm(elements: int, device: torch.device) -> Iterator[Pair]:
    width = wide(elements, 4096)
    x = late(rows_past(elements, width), width, device)
    end, weight = x[-LAST:].clone(), x[-1].clone()
    yield from ends(ops.rms_norm(x, weight), ops.rms_norm(end, weight))
    yield from ends(ops.rms_norm(x, weight, 1e-6, x), ops.rms_norm(end, weight, 1e-6, end))


def rms_norm_gradients(elements: int, device: torch.device) -> Iterator[Pair]:
    """The weight's gradient too: rows without one change nothing in it, since the last block of rows is a whole one."""
    width = wide(elements, 4096)
    x = late(rows_past(elements, width), width, device)
    end, weight, rstd = x[-LAST:].clone(), x[-1].clone(), torch.ones(len(x), device=device)
    for has_sum in (False, True):
        d_x, d_weight = rms_norm_backward(x, weight, rstd, x, x if has_sum else None)
        d_end, d_alone = rms_norm_backward(end, weight, rstd[-LAST:].clone(), end, end if has_sum else None)
        yield from ends(d_x, d_end)
        del d_x  # before the next one is made
        yield d_weight, d_alone  # type: ignore[misc]  # both were asked for


def long_rms_norm(elements: int, device: torch.device) -> Iterator[Pair]:
    """Rows that are read twice; the weight's gradient is left out, whose partial sums stay far below the limit."""
    width, last = 65544, 2
    x = late(rows_past(elements, width, last, last), width, device, last)
    end, weight, rstd = x[-last:].clone(), x[-1].clone(), torch.ones(len(x), device=device)
    yield from ends(ops.rms_norm(x, weight), ops.rms_norm(end, weight), last)
    yield from ends(ops.rms_norm(x, weight, 1e-6, x), ops.rms_norm(end, weight, 1e-6, end), last)
    for has_sum in (False, True):
        d_x, _ = rms_norm_backward(x, weight, rstd, x, x if has_sum else None, (True, False))
        d_end, _ = rms_norm_backward(end, weight, rstd[-last:].clone(), end, end if has_sum else None, (True, False))
        yield from ends(d_x, d_end, last)


def along_rows(width: int, *, few: bool = False, last: int = LAST) -> Callable[[int, torch.device], Iterator[Pair]]:
    """softmax and log_softmax of rows of ``width``; of about a hundred rows where they are ``few``."""

    def run(elements: int, device: torch.device) -> Iterator[Pair]:
        size = max(width, elements // 100 + 8) if few else width
        rows = rows_past(elements, size, last if few else softmax_module.FEW_ROWS + 1, last)
        x = late(rows, size, device, last)
        end = x[-last:].clone()
        for kernels in (SOFTMAX, LOG_SOFTMAX):
            whole, alone = softmax_forward(kernels, x, 0.7), softmax_forward(kernels, end, 0.7)
            yield from ends(whole, alone, last)
            known = whole[1:]
            del whole
            yield from ends(
                softmax_backward(kernels, x, *known, x, 0.7), softmax_backward(kernels, end, *alone[1:], end, 0.7), last
            )

    return run


def selected_logprob(elements: int, device: torch.device) -> Iterator[Pair]:
    width = wide(elements, 16408)
    x = late(rows_past(elements, width), width, device)
    end, options = x[-LAST:].clone(), Options(0.7, -100, True, True)
    ids = torch.arange(len(x), device=device) % width
    whole, alone = selected_forward(x, ids, options), selected_forward(end, ids[-LAST:], options)
    yield from ends(tuple(whole), tuple(alone))
    up = [torch.full((len(x),), size, device=device) for size in (1.0, 0.5, 0.25)]
    known, known_alone = (known[1:2] + known[3:] for known in (whole, alone))
    yield from ends(
        selected_backward(x, ids, known, up, options),  # type: ignore[arg-type]  # the entropy was asked for
        selected_backward(end, ids[-LAST:], known_alone, [d[-LAST:] for d in up], options),  # type: ignore[arg-type]
    )


def matmul(elements: int, device: torch.device) -> Iterator[Pair]:
    width = wide(elements, 4096)
    x = late(rows_past(elements, width), width, device)
    narrow, weight = x[-LAST:].clone().t(), x[-LAST:].clone()
    yield from ends(ops.matmul(x, narrow), ops.matmul(x[-LAST:].clone(), narrow))
    yield from ends(ops.matmul(x[:, :LAST], weight), ops.matmul(x[-LAST:, :LAST].clone(), weight))


# --- sequences ------------------------------------------------------------------------------------------------------


def ratio_kl(elements: int, device: torch.device) -> Iterator[Pair]:
    """Inputs past so many elements: two policies' rows in turn."""
    width = wide(elements, 2048)
    both = late(rows_past(elements, width), width, device)
    p, ref = both.chunk(2, 1)
    mask = torch.zeros(both.shape, dtype=torch.bool, device=device)[:, : width // 2]
    mask[-LAST:] = p[-LAST:] > 0
    end = [t[-LAST:].clone() for t in (p, ref, mask)]
    yield from ends(tuple(ops.ratio_kl(p, ref, ref, mask)), tuple(ops.ratio_kl(end[0], end[1], *end[1:])))
    yield from ends(
        ratio_kl_backward(p, ref, ref, mask, p, p, p, p),
        ratio_kl_backward(end[0], end[1], *end[1:], *[end[0]] * 4),
    )


def ratio_kl_results(elements: int, device: torch.device) -> Iterator[Pair]:
    """Results past so many elements, all rows the same ones."""
    width = wide(elements, 1024)
    one = late(1, width, device, 1)
    whole, alone = ([t.expand(n, width) for t in (one, 2 * one, -one)] for n in (rows_past(elements, width), LAST))
    yield from ends(tuple(ops.ratio_kl(*whole)), tuple(ops.ratio_kl(*alone)))


def grpo_loss(elements: int, device: torch.device) -> Iterator[Pair]:
    """Sequences without a token before the last 64, which are a whole block of the sum."""
    width = wide(elements, 1024)
    p, ref = late(rows_past(elements, width, 64, 64), 2 * width, device, 64).chunk(2, 1)
    whole = Tokens(p, ref, ref, p, p > 0)
    alone = Tokens(*(t[-64:].clone() for t in whole if t is not None))
    numbers, d = Numbers(0.8, 1.2, 0.04, "sequence", None), torch.ones((), device=device)
    loss, part = grpo_loss_forward(whole, numbers), grpo_loss_forward(alone, numbers)
    yield loss[0].view(1), part[0].view(1)
    yield from ends(
        grpo_loss_backward(whole, numbers, *loss[1:], d), grpo_loss_backward(alone, numbers, *part[1:], d), 64
    )


def group_advantage(elements: int, device: torch.device) -> Iterator[Pair]:
    size = wide(elements, 1024)
    rewards = late(rows_past(elements, size), size, device)
    yield from ends(ops.group_advantage(rewards, size), ops.group_advantage(rewards[-LAST:].clone(), size))


# --- copies ---------------------------------------------------------------------------------------------------------


def embedding(elements: int, device: torch.device) -> Iterator[Pair]:
    width = wide(elements, 4096)
    table = late(rows_past(elements, width), width, device)
    end, ids = table[-LAST:].clone(), torch.arange(len(table), device=device)
    yield from ends(ops.embedding(ids, table), end)
    yield from ends(embedding_backward(ids, table, table), embedding_backward(ids[:LAST], end, end))


def packing(side: str) -> Callable[[int, torch.device], Iterator[Pair]]:
    def run(elements: int, device: torch.device) -> Iterator[Pair]:
        width = wide(elements, 1024)
        rows = late(rows_past(elements, width), width, device)
        starts = torch.arange(0, len(rows) + 1, LAST, device=device)
        padded = rows.view(-1, LAST, width)
        yield from ends(ops.pack(padded, starts, len(rows), side), rows[-LAST:])
        yield from ends(ops.unpack(rows, starts, LAST, side), padded[-1:], 1)

    return run


LARGE = (
    Large("swiglu", 3, swiglu),
    Large("rope, halves", 2, rope(False)),
    Large("rope, pairs", 2, rope(True)),
    Large("rms_norm", 3, rms_norm),
    Large("rms_norm, gradients", 2.5, rms_norm_gradients),
    Large("rms_norm of long rows", 3, long_rms_norm),
    Large("softmax of rows that are held", 2, along_rows(4096, last=2)),
    Large("softmax of many long rows", 2, along_rows(40008, last=2)),
    Large("softmax of few long rows", 2, along_rows(40008, few=True, last=1)),
    Large("selected_logprob", 2, selected_logprob),
    Large("matmul", 2, matmul),
    Large("ratio_kl", 3.6, ratio_kl),
    Large("ratio_kl, results", 4, ratio_kl_results),
    Large("grpo_loss", 3.6, grpo_loss),
    Large("group_advantage", 2, group_advantage),
    Large("embedding", 2.5, embedding),
    Large("pack and unpack, right", 2, packing("right")),
    Large("pack and unpack, left", 2, packing("left")),
)
