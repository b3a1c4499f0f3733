"""Launches worth trying on this device: what an author knows that the kernel's own declaration does not.

The interpreter's time goes into steps, not into elements, so that large tiles win. Only knobs that the kernel declares
are set, and kalign checks the bytes of every one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kalign_core.declare import Kernel
    from kalign_core.records import Config, Problem

GROWING = ("ROWS", "BLOCK", "BM", "BN")


def candidates(kernel: Kernel, problem: Problem) -> list[Config]:
    """The reference with each of its tile sizes doubled and quadrupled."""
    reference = kernel.reference_config(problem)
    knobs = [name for name in GROWING if name in kernel.knobs and name in reference]
    return [reference.replace(**{name: factor * int(reference[name])}) for name in knobs for factor in (2, 4)]
