"""One run of a case: memory for its outputs and the arguments that lead there, to be launched into again and again.

All outputs lie in one piece of memory, and behind them an imprint of the inputs, so that clearing it and comparing it
with another run's take one step each, whatever the kernel writes: on a device the steps are what a case costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kalign_core.verifier.compare import Buffer, Seal, divided, repeated, same, seal_words


class Run:
    """What one launch of a case leaves behind.

    ``outputs`` are the buffers of the outputs by name, ``arguments`` the run-time arguments of the kernel in parameter
    order; ``words`` is the memory: all outputs' bytes and then the inputs' imprint, as int32. ``inputs`` are watched;
    outputs named in ``starts`` hold those bytes beforehand, all others ``fill``.
    """

    def __init__(
        self,
        words: torch.Tensor,
        outputs: Mapping[str, Buffer],
        arguments: tuple[Any, ...],
        inputs: Sequence[Buffer],
        starts: Mapping[str, Buffer],
        fill: int,
    ) -> None:
        self.outputs, self.arguments = outputs, arguments
        size = sum(buffer.flat.numel() for buffer in outputs.values())
        self._all = words.view(torch.int64)
        self._written, self._seal = self._all[: size // 8], words[size // 4 :]
        self._fill = repeated(fill, 8)
        self._starts = [(outputs[name].flat, start.flat) for name, start in starts.items()]
        parts = divided(self._seal, [seal_words(buffer) for buffer in inputs])
        self._seals = [Seal.of(buffer, part) for buffer, part in zip(inputs, parts, strict=True)]

    def retire(self) -> None:
        """Let go of the inputs: this run is not launched into again."""
        self.arguments, self._seals = (), []

    def clear(self) -> None:
        """Make the outputs' memory what it has to be before a launch."""
        self._written.fill_(self._fill)
        for flat, start in self._starts:
            flat.copy_(start)

    def seal(self) -> None:
        """Take the imprint of the inputs as they are now."""
        for seal in self._seals:
            seal.take()

    def seal_with(self, imprints: Sequence[torch.Tensor]) -> None:
        """Take ``imprints`` for the inputs', one for each."""
        if imprints:
            torch.cat(list(imprints), out=self._seal)

    def agrees(self, other: Run, *, sealed: bool) -> bool:
        """Whether all bytes written agree, guard bands and gaps included, and if ``sealed`` the imprints as well."""
        return same(self._all, other._all) if sealed else same(self._written, other._written)

    def unlike(self, other: Run) -> str:
        """Name of the first output whose bytes differ anywhere, or an empty string."""
        pairs = ((name, buffer, other.outputs[name]) for name, buffer in self.outputs.items())
        return next((name for name, ours, theirs in pairs if not same(ours.pairs, theirs.pairs)), "")
