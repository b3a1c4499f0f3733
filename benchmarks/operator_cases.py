"""What one line of the operator table is: a call, its arguments, what it must move, and the peers it stands beside.

A case only says how to make and call things; ``operators.py`` times them. Peers that may be missing are made late, so
that a library that is not installed costs its own column and nothing else. Where there is no GPU all sizes are small,
so that the table can be rehearsed: everything runs but the clock of a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Call = Callable[..., Any]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
_REHEARSED = {151936: 72, 65536: 6, 12288: 40, 8192: 24, 4096: 16, 1024: 4, 128: 8, 64: 3, 40: 10}


def sized(*sizes: int) -> tuple[int, ...]:
    """``sizes`` as they are on a GPU, small ones elsewhere."""
    return sizes if DEVICE.type == "cuda" else tuple(_REHEARSED.get(size, size) for size in sizes)


@dataclass(frozen=True, slots=True)
class Aim:
    """What a case is to reach, one of: ``share`` of copy bandwidth, ``us`` at most, ``ratio`` times the speed of
    the peer ``over``; ``kind`` is ``cold`` or ``warm``.
    """

    share: float | None = None
    us: float | None = None
    over: str = ""
    ratio: float = 1.0
    kind: str = "cold"

    @property
    def ask(self) -> str:
        """``at least 0.9 of copy bandwidth, cold``."""
        if self.over:
            return f"at least {self.ratio} x {self.over}'s speed, {self.kind}"
        return (
            f"at least {self.share} of copy bandwidth, {self.kind}"
            if self.share
            else f"at most {self.us} us, {self.kind}"
        )


@dataclass(frozen=True, slots=True)
class Case:
    """One operator, direction and shape.

    ``make(seed)`` gives the arguments of ``ours`` and of every peer, on the GPU. ``moved`` is the bytes of every input
    and output, each once. ``tuned()`` gives the operator and the arguments to tune it for, ``torch`` is the eager
    peer, ``compiled`` what ``torch.compile`` is given (``torch`` where None). ``others`` makes further peers by name;
    each may raise ImportError.
    """

    group: str
    op: str
    what: str
    sizes: Mapping[str, int]
    make: Callable[[int], tuple[Any, ...]]
    ours: Call
    moved: int
    tuned: Callable[[], tuple[Any, tuple[Any, ...]]]
    torch: Call | None = None
    compiled: Call | None = None
    others: Mapping[str, Callable[[], Call]] = field(default_factory=dict)
    aims: tuple[Aim, ...] = ()

    @property
    def name(self) -> str:
        """``rms_norm forward 8192x4096``."""
        return f"{self.op} {self.what} {'x'.join(str(size) for size in self.sizes.values())}"
