"""Order probes: rows whose sum says in which order it was taken.

Ones everywhere, +M at i and -M at j, with M so large that it swallows whatever is added to it before the two meet: the
result counts the terms outside the lowest common ancestor of i and j in the tree of additions (the method of FPRev,
arXiv 2411.00442). The gate need not rebuild the tree: it sends the same rows through reference and candidate and
compares bytes. What cannot cancel (squares, exponentials) is probed by numbers just at the edge of being swallowed, the
inside of a matrix instruction by ladders of magnitudes, contraction by near-cancelling products of full mantissas.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kalign_core.records import InputFamily
from kalign_core.verifier.inputs import Request, Tensor, bits, cancelling

ROWS_PER_TREE = 768  # 64 anchors with 12 partners each told 41 modelled trees of 4,096 terms apart
_VISIBLE_ONES = 254  # a bfloat16 result counts no further
_SIGN = -(1 << 31)
_BELOW = -16.625  # exp(-16.625) is just above 2**-24: two of them move a 1, one may not


def order_probe(request: Request) -> Tensor:
    """All kinds of probe, by row number and seed; further operands are ones or full mantissas."""
    makers = (ones, mantissas) if request.operand else tuple(PROBES.values())
    chosen = (request.rows + request.seed) % len(makers)
    result = request.block()
    for number, make in enumerate(makers):
        here = (chosen == number).nonzero().view(-1)
        result.index_copy_(0, here, make(request.only(here)).to(result.dtype))
    return result


def anchors(request: Request) -> tuple[Tensor, Tensor]:
    """Where +M and -M stand in each row: i from the hash, j = i xor 2**b with b going round; int32 ``(r 1)``."""
    length = request.length or request.columns
    levels = max(1, (length - 1).bit_length())
    first = (request.row_hash(11) & 0x7FFFFFFF) % length
    step = torch.ones_like(first) << ((request.rows // len(PROBES) + request.seed) % levels)
    second = first ^ step
    return first[:, None], torch.where(second < length, second, (first + step) % length)[:, None]


def cancel(request: Request, units: Tensor | None = None) -> Tensor:
    """``units`` (ones), +M at i, -M at j; float32, as all probes."""
    # fp16 reaches 2**15 only, so its units are the smallest it has.
    unit, large = (2.0**-24, 2.0**15) if request.narrow else (1.0, 2.0**60)
    first, second = anchors(request)
    values = (ones(request) if units is None else units.float()) * unit
    along = request.along()[None, :]
    return torch.where(along == first, large, torch.where(along == second, -large, values))


def sparse(request: Request) -> Tensor:
    """The same on a field with at most about 254 ones, which a 16-bit output still counts."""
    share = min(65536, _VISIBLE_ONES * 65536 // max(request.length or request.columns, 1))
    return cancel(request, (request.hash(12) & 0xFFFF) < share)


def square(request: Request) -> Tensor:
    """Ones and two 4096: in float32, 2**24 swallows a single 1 and keeps a sum of two."""
    first, second = anchors(request)
    along = request.along()[None, :]
    return ones(request).masked_fill_((along == first) | (along == second), 4096.0)


def exponential(request: Request) -> Tensor:
    """For sums of exponentials: one 0, about eight logarithms near it, all others of half a unit in its last place.

    The sum stays so small that its logarithm still shows every bit, and its running maximum rises several times.
    """
    noise = request.hash(14)
    first, second = anchors(request)
    along = request.along()[None, :]
    low = _BELOW + 0.125 * ((noise & 15) - 8).float()
    high = ((noise >> 4) & 0xFF).float() / -128
    share = min(65536, 8 * 65536 // max(request.length or request.columns, 1))
    values = torch.where(((noise >> 12) & 0xFFFF) < share, high, low)
    return values.masked_fill_(along == second, _BELOW / 2).masked_fill_(along == first, 0.0)


def ladder(request: Request) -> Tensor:
    """Magnitudes 1 and 2**-13 to 2**-26 (2**-23 in fp16) of both signs, as they meet in one matrix instruction."""
    noise = request.hash(13)
    step = (noise & 0xFFFF) % (12 if request.narrow else 15)
    exponent = torch.where(step == 0, 127, 115 - step) << 23
    return bits((noise & _SIGN) | exponent)


def product(request: Request) -> Tensor:
    """Near-cancelling pairs of full mantissas, exponents spread."""
    return cancelling(request).float()


def ones(request: Request) -> Tensor:
    """Ones everywhere: the field that the order probes stand on, and an input family by itself."""
    return torch.ones((len(request.rows), request.columns), dtype=torch.float32, device=request.rows.device)


def mantissas(request: Request) -> Tensor:
    """Full mantissas in [1, 2), neighbours nearly equal."""
    return torch.frexp(product(request)).mantissa * 2


PROBES: dict[str, Callable[[Request], Tensor]] = {
    "cancel": cancel,
    "sparse": sparse,
    "square": square,
    "exp": exponential,
    "ladder": ladder,
    "product": product,
}
ORDER_PROBE = InputFamily("order_probe", order_probe, sees_order=True)
