"""How much of a tensor one program holds at once, by a kernel's declaration: what vendors' limits and spaces ask.

A border: it imports neither torch nor triton nor a vendor.
"""

from __future__ import annotations

from kalign_core.declare import Kernel, axis_size, next_power_of_2
from kalign_core.records import Config, Problem


def held_elements(kernel: Kernel, problem: Problem, config: Config) -> int:
    """Elements of each tensor that one program holds: ROWS rows of BLOCK, a knob or derived, or of a row it writes."""
    if "BLOCK" in kernel.derived:
        width = kernel.derived["BLOCK"](problem)
    elif "BLOCK" in config or "ROWS" not in kernel.constants:
        width = config.get("BLOCK", 1)
    else:
        width = _written_row(kernel, problem)
    return int(width or 1) * _rows(config)


def _written_row(kernel: Kernel, problem: Problem) -> int:
    """The widest row that the kernel writes, padded to a power of two; 1 where it writes single numbers."""
    rows = [role.shape[-1] for role in kernel.args.values() if role.kind == "written" and len(role.shape) > 1]
    return next_power_of_2(max((axis_size(axis, dict(problem.dims)) for axis in rows), default=1))


def _rows(config: Config) -> int:
    rows = config.get("ROWS", 1)
    return rows if isinstance(rows, int) else 1
