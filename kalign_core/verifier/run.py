"""One run of a case: memory for its outputs and the arguments that lead there, to be launched into again and again.

All outputs lie in one piece of memory, behind them the inputs that the run has to itself and an imprint of all others,
so that clearing it and comparing it with another run's take one step each, whatever the kernel takes and writes: on a
device the steps are what a case costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kalign_core.verifier.compare import Buffer, Seal, divided, repeated, same, seal_words, unlike


class Run:
    """What one launch of a case leaves behind.

    ``outputs`` are the buffers of the outputs by name, ``own`` those of the inputs that this run alone is launched on,
    ``arguments`` the run-time arguments of the kernel in parameter order; ``words`` is the memory: all outputs' bytes,
    the own inputs' and then the imprint of the ``shared`` ones, as int32. Outputs named in ``starts`` hold those bytes
    beforehand, all others ``fill``.
    """

    def __init__(
        self,
        words: torch.Tensor,
        outputs: Mapping[str, Buffer],
        own: Mapping[str, Buffer],
        arguments: tuple[Any, ...],
        shared: Sequence[Buffer],
        starts: Mapping[str, Buffer],
        fill: int,
    ) -> None:
        self.outputs, self.own, self.arguments = outputs, own, arguments
        size = sum(buffer.flat.numel() for buffer in outputs.values())
        ahead = size + sum(buffer.flat.numel() for buffer in own.values())
        self._all = words.view(torch.int64)
        self._written, self._watched, seal = self._all[: size // 8], words[size // 4 :], words[ahead // 4 :]
        self._fill = repeated(fill, 8)
        self._starts = [(outputs[name].flat, start.flat) for name, start in starts.items()]
        parts = divided(seal, [seal_words(buffer) for buffer in shared])
        self._seals = [Seal.of(buffer, part) for buffer, part in zip(shared, parts, strict=True)]

    def retire(self) -> None:
        """Let go of the inputs: this run is not launched into again."""
        self.arguments, self._seals = (), []

    def clear(self) -> None:
        """Make the outputs' memory what it has to be before a launch."""
        self._written.fill_(self._fill)
        for flat, start in self._starts:
            flat.copy_(start)

    def seal(self) -> None:
        """Take the imprint of the shared inputs as they are now."""
        for seal in self._seals:
            seal.take()

    def seal_with(self, made: Sequence[torch.Tensor]) -> None:
        """Take ``made`` for what was seen of the inputs: the own ones' words, then the others' imprints."""
        if made:
            torch.cat(list(made), out=self._watched)

    def unlike(self, other: Run, *, sealed: bool) -> torch.Tensor:
        """Whether any byte written differs, guard bands and gaps included, and if ``sealed`` any seen of the inputs.

        On their device, bool ``()``; nothing is waited for.
        """
        return unlike(self._all, other._all) if sealed else unlike(self._written, other._written)

    def differing(self, other: Run) -> str:
        """Name of the first output whose bytes differ anywhere, or an empty string."""
        pairs = ((name, buffer, other.outputs[name]) for name, buffer in self.outputs.items())
        return next((name for name, ours, theirs in pairs if not same(ours.pairs, theirs.pairs)), "")
