"""What makes the gate stricter: one more input family, one more check.

A check names cases; kalign makes the inputs, runs reference and candidate and compares every byte. The core's own suite
runs in any case, and a plugin that takes one of its names away refutes every candidate.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kalign_core.records import Case

if TYPE_CHECKING:
    import torch

    from kalign_core.verifier.bench import Bench
    from kalign_core.verifier.inputs import Request

REPEATS = 3


def powers(request: Request) -> torch.Tensor:
    """Powers of two from 1/8 to 16 of either sign: ``(r c)``. Products of them round nothing.

    Numbers come from the request's hash, and so depend on the row's number and on nothing around it.
    """
    import torch

    noise = request.hash(31)
    exponent = ((noise >> 8) & 7) - 3
    sign = 1 - 2 * (noise & 1)
    return torch.ldexp(sign.float(), exponent).to(request.torch_dtype)


def once_more(bench: Bench) -> Iterable[Case]:
    """Run the same case several times, since threads of a host may race where an interpreter's programs do not."""
    for family in ("spread", "powers"):
        yield bench.reduced(Case("once more", family=family, seed=11, repeats=REPEATS), 1 << 16)
