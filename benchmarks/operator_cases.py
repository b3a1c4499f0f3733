"""What one line of the operator table is: a call, its arguments, what it must move, and the peers it stands beside.

A case only says how to make and call things; ``operators.py`` times them. Peers that may be missing are made late, so
that a library that is not installed costs its own column and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Call = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Aim:
    """What a case is to reach: ``share`` of copy bandwidth, or ``us`` at most; ``kind`` is ``cold`` or ``warm``."""

    share: float | None = None
    us: float | None = None
    kind: str = "cold"


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
    aim: Aim | None = None

    @property
    def name(self) -> str:
        """``rms_norm forward 8192x4096``."""
        return f"{self.op} {self.what} {'x'.join(str(size) for size in self.sizes.values())}"
