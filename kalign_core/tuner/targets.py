"""Compile every candidate of a kernel for a device that need not be there, and say what came of each.

The candidates are those that tuning would try on that device, the compiler and its processes are those that tuning
uses; only launching is left out. What the compiler accepts and the device would not is refused here with the reason,
since no compiler checks it. Candidates that compile to the same code are one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kalign_core.declare import Kernel, lower
from kalign_core.errors import NoPlatform, UnknownName
from kalign_core.hal.select import launch_options
from kalign_core.hal.target import TargetPlatform, forgotten, without_memory
from kalign_core.observer import Recorded
from kalign_core.occupancy import Occupancy, occupancy
from kalign_core.records import Config, DeviceModel, PlatformRecord, Problem
from kalign_core.tuner.compile import Compiled, CompilePool
from kalign_core.tuner.space import Space, space

if TYPE_CHECKING:
    from kalign_core.ops.base import Operator
    from kalign_core.plugins import Plugins
    from kalign_core.session import Session

DEADLINE_S = 120.0
State = Literal["compiled", "refused", "failed"]
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Target:
    """A device model to compile for, and the platform whose plugin knows it."""

    record: PlatformRecord
    model: DeviceModel

    def __str__(self) -> str:
        return self.model.target


@dataclass(frozen=True, slots=True)
class Row:
    """What came of candidates: all that compile to one code, or one that was refused or failed, with the ``reason``.

    ``compile_s`` is what compiling took all of ``configs`` together.
    """

    configs: tuple[Config, ...]
    state: State
    reason: str = ""
    code: Compiled | None = None
    occupancy: Occupancy | None = None
    compile_s: float = 0.0


def targets(plugins: Plugins) -> dict[str, Target]:
    """Every device that a plugin can compile for, by how it is written: ``cuda:sm_90``; an interpreter is none."""
    known = [Target(record, model) for record in plugins.platforms() for model in record.models]
    return {str(target): target for target in known if not target.model.interpreted}


def target_named(plugins: Plugins, name: str) -> Target:
    """The target written ``name``; raises ``UnknownName`` with those there are, ``NoPlatform`` where there is none."""
    known = targets(plugins)
    if not known:
        raise NoPlatform("no plugin knows a device to compile for", fix="kalign plugins, to see which are broken")
    if name not in known:
        raise UnknownName("target", name, known, fix=f"--target {next(iter(known))}")
    return known[name]


def session_for(target: Target, plugins: Plugins) -> Session:
    """A session in which calls pose the problems that they pose on ``target``."""
    from kalign_core.cache.base import MemoryStore
    from kalign_core.session import Session

    return Session(platform=TargetPlatform(target.model), plugins=plugins, store=MemoryStore())


def calls_of(here: Session, op: Operator, sizes: Mapping[str, int], dtype: str) -> list[Recorded]:
    """The kernels that ``op`` and its backward run at ``sizes`` in ``dtype``, and the problem each is given."""
    import torch

    from kalign_core.api import recorded

    with here.active(), without_memory():
        forms = op.forms(sizes, dtype, 0, torch.device("cpu"))
        return list(dict.fromkeys(call for args in forms for call in recorded(op, *map(forgotten, args))))


def space_on(target: Target, plugins: Plugins, kernel: Kernel, problem: Problem) -> Space:
    """The candidates that would be tried on ``target``, and what its plugin refuses."""
    options = launch_options(target.record)
    return space(plugins, target.record.name, options, kernel, problem, target.model)


def compile_space(
    found: Space, call: Recorded, target: Target, pool: CompilePool, deadline_s: float, progress: Progress
) -> tuple[Row, ...]:
    """Compile the candidates in ``found``, ``deadline_s`` seconds each at most; compiled rows come first."""
    configs = found.candidates
    jobs = [lower(call.kernel, call.problem, config) for config in configs]
    results: dict[Config, Compiled] = {}
    for position, result in pool.compile(jobs, target.model.compile_target, deadline_s):
        results[configs[position]] = result
        progress(len(results), len(configs))
    refused = [Row((config,), "refused", reason) for config, reason in found.refused]
    rows = [*_grouped((config, results[config]) for config in configs), *refused]
    order: list[State] = ["compiled", "failed", "refused"]
    kept = [_examined(row, target.model) for row in rows]
    return tuple(sorted(kept, key=lambda row: order.index(row.state)))


def does_not_fit(result: Compiled, model: DeviceModel) -> str | None:
    """Why compiled code does not fit the device, or None: the compiler checks none of this."""
    if model.shared_bytes and result.shared_bytes > model.shared_bytes:
        return f"needs {result.shared_bytes} bytes of shared memory, {model.shared_bytes} fit"
    if model.tmem_columns and result.tmem_columns > model.tmem_columns:
        return f"needs {result.tmem_columns} tensor memory columns, {model.tmem_columns} fit"
    return None


def _grouped(results: Iterable[tuple[Config, Compiled]]) -> list[Row]:
    """One row for each code, one for each failure."""
    rows: dict[object, Row] = {}
    for config, result in results:
        known = rows.get(result.code) if result.code else None
        if known is not None:
            seconds = known.compile_s + result.compile_s
            rows[result.code] = Row((*known.configs, config), "compiled", code=known.code, compile_s=seconds)
        elif result.failure:
            rows[config] = Row((config,), "failed", result.failure, compile_s=result.compile_s)
        else:
            rows[result.code] = Row((config,), "compiled", code=result, compile_s=result.compile_s)
    return list(rows.values())


def _examined(row: Row, model: DeviceModel) -> Row:
    """The row with its occupancy, or refused where its code does not fit ``model``."""
    if row.code is None:
        return row
    reason = does_not_fit(row.code, model)
    if reason is not None:
        return Row(row.configs, "refused", reason, row.code, compile_s=row.compile_s)
    code = row.code
    share = occupancy(model, warps=code.num_warps, registers=code.registers, shared_bytes=code.shared_bytes)
    return Row(row.configs, "compiled", "", code, share, row.compile_s)
