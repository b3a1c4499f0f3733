"""Launches that do something beside a good kernel: what no single kernel's text shows."""

from __future__ import annotations

from typing import Any

import torch

from kalign_core.declare import Config
from kalign_core.records import Case
from kalign_core.verifier.bench import Bench
from kalign_core.verifier.bound import Bound


class Tampered(Bound):
    """A good candidate whose every launch passes through ``launch(inner, args)``."""

    def __init__(self, bench: Bench, config: Config) -> None:
        super().__init__(bench, config)
        self.written = bench.kernel.parameters.index(bench.kernel.outputs()[0])
        self.runs = 0

    def launch_for(self, bench: Bench, case: Case) -> Any:
        inner = super().launch_for(bench, case)

        def launched(*args: Any) -> None:
            self.runs += 1
            self.launch(inner, args)

        return launched

    def launch(self, inner: Any, args: tuple[Any, ...]) -> None:
        raise NotImplementedError


def wrong_from(run: int) -> type[Tampered]:
    """Right until run number ``run``, one bit off from then on."""

    class WrongFrom(Tampered):
        def launch(self, inner: Any, args: tuple[Any, ...]) -> None:
            inner(*args)
            if self.runs >= run:
                out = args[self.written]
                first = out[(slice(0, 1),) * out.dim()]
                first.view({2: torch.int16, 4: torch.int32}[out.element_size()]).bitwise_xor_(1)

    return WrongFrom


class SkipsKnownShapes(Tampered):
    """Takes an output of a shape it has seen before for one that a previous run completed."""

    def __init__(self, bench: Bench, config: Config) -> None:
        super().__init__(bench, config)
        self.seen: set[torch.Size] = set()

    def launch(self, inner: Any, args: tuple[Any, ...]) -> None:
        shape = args[self.written].shape
        if shape not in self.seen:
            inner(*args)
        self.seen.add(shape)


class DrawsRandom(Tampered):
    """Advances torch's random numbers, as a kernel with a seed of torch's would."""

    def launch(self, inner: Any, args: tuple[Any, ...]) -> None:
        inner(*args)
        torch.rand(1, device=args[self.written].device)


class LibraryMatmul(Tampered):
    """A vendor's matrix product posing as one whose order never changes."""

    def launch(self, inner: Any, args: tuple[Any, ...]) -> None:
        a, b, _, c = args[:4]
        c.copy_(torch.mm(a, b) if c.dtype == a.dtype else torch.mm(a.float(), b.float()))
