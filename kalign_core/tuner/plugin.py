"""The built-in tuner as a plugin: a kernel's own knobs as candidates, limits every device has, the racing search."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kalign_core.hookspecs import hookimpl
from kalign_core.records import Config, DeviceModel, Problem, StrategyRecord

if TYPE_CHECKING:
    from kalign_core.declare import Kernel

KALIGN_API = 1
PRODUCT_LIMIT = 64
_IGNORED_BY_INTERPRETERS = ("num_warps", "num_stages")


@hookimpl(any_platform=True)
def kalign_candidates(kernel: Kernel, problem: Problem, model: DeviceModel) -> Iterable[Config]:
    """Every combination of the kernel's own knobs where they are few, else the reference with one knob changed."""
    reference = kernel.reference_config(problem)
    knobs = {name: values for name, values in kernel.knobs.items() if name in reference}
    if math.prod(len(values) for values in knobs.values()) <= PRODUCT_LIMIT:
        rows = itertools.product(*knobs.values())
        return [reference.replace(**dict(zip(knobs, row, strict=True))) for row in rows]
    return [reference.replace(**{name: value}) for name, values in knobs.items() for value in values]


@hookimpl(any_platform=True)
def kalign_veto(kernel: Kernel, problem: Problem, model: DeviceModel, config: Config) -> str | None:
    """What no device runs, and what an interpreter cannot tell apart."""
    warps = config.get("num_warps", 4)
    if not isinstance(warps, int) or warps < 1 or warps & (warps - 1):
        return f"num_warps={warps} is no power of two"
    if warps > model.max_warps:
        return f"num_warps={warps}, at most {model.max_warps} fit a block of {model.arch}"
    if int(config.get("num_stages", 1)) < 0:
        return f"num_stages={config['num_stages']} is negative"
    if not model.measurable:
        reference = kernel.reference_config(problem)
        for name in _IGNORED_BY_INTERPRETERS:
            if config.get(name) != reference.get(name):
                return f"the interpreter ignores {name}"
    return None


@hookimpl(any_platform=True)
def kalign_strategies() -> Iterable[StrategyRecord]:
    """The racing search."""
    from kalign_core.tuner.search import racing

    return [StrategyRecord("racing", racing)]
