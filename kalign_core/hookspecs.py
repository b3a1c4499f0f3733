"""The contract with plugins: four groups of hooks, what each is asked for and what it returns.

Hooks find things. Each implementation is called alone, so that an exception in one costs one result; none of them runs
on the launch path. The values they take and return are the frozen records of ``kalign_core.records``. A plugin is a
module with ``KALIGN_API = 1``, registered as an entry point in the group ``kalign.plugins``, whose functions are marked
with ``kalign_core.hookimpl``; it imports the standard library and ``kalign_core`` and nothing else at its top.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar, overload

import pluggy

if TYPE_CHECKING:
    from kalign_core.declare import Kernel
    from kalign_core.records import (
        Check,
        Config,
        DeviceModel,
        InputFamily,
        PlatformRecord,
        Problem,
        StoreRecord,
        StrategyRecord,
    )

API = 1
PROJECT = "kalign"
hookspec = pluggy.HookspecMarker(PROJECT)
_marker = pluggy.HookimplMarker(PROJECT)
F = TypeVar("F", bound=Callable[..., object])


@overload
def hookimpl(function: F) -> F: ...
@overload
def hookimpl(*, any_platform: bool = False) -> Callable[[F], F]: ...
def hookimpl(function: F | None = None, *, any_platform: bool = False) -> F | Callable[[F], F]:
    """Mark a plugin's function as a hook implementation.

    ``any_platform=True`` asks a ``kalign_candidates`` or ``kalign_veto`` for every platform's devices, not only for
    those of the platforms that its own module provides.
    """

    def mark(made: F) -> F:
        made.kalign_any_platform = any_platform  # type: ignore[attr-defined]
        return _marker(made)

    return mark if function is None else mark(function)


class PlatformSpec:
    """What a vendor provides."""

    @hookspec
    def kalign_platforms(self) -> Iterable[PlatformRecord]:
        """Give the platforms this plugin provides.

        ::

            from kalign_core import hookimpl
            from kalign_core.records import Evidence, PlatformRecord

            KALIGN_API = 1

            def probe(environment):
                return Evidence(environment.has("/dev/npu0"), "/dev/npu0")

            @hookimpl
            def kalign_platforms():
                return [PlatformRecord("npu", probe, "my_package.platform:NpuPlatform")]

        Returns platform records. An exception makes the plugin's row ``broken``.
        """
        raise NotImplementedError


class TunerSpec:
    """What may be launched, what may not, and how to search."""

    @hookspec
    def kalign_candidates(self, kernel: Kernel, problem: Problem, model: DeviceModel) -> Iterable[Config]:
        """Give configurations worth trying for ``kernel`` on ``model``.

        ::

            from kalign_core import hookimpl

            KALIGN_API = 1

            @hookimpl(any_platform=True)
            def kalign_candidates(kernel, problem, model):
                reference = kernel.reference_config(problem)
                return [reference.replace(num_warps=w) for w in (1, 2)] if kernel.family == "rowwise" else []

        Returns configurations that set schedule knobs and launch options of the platform only. An exception costs
        this plugin's candidates and is warned of once.
        """
        raise NotImplementedError

    @hookspec
    def kalign_veto(self, kernel: Kernel, problem: Problem, model: DeviceModel, config: Config) -> str | None:
        """Give a reason why ``config`` must not be tried, or None.

        ::

            from kalign_core import hookimpl

            KALIGN_API = 1

            @hookimpl(any_platform=True)
            def kalign_veto(kernel, problem, model, config):
                return "one warp is banned here" if config.get("num_warps") == 1 else None

        Returns a reason in words; any reason refuses. An exception refuses with the reason ``veto raised``.
        """
        raise NotImplementedError

    @hookspec
    def kalign_strategies(self) -> Iterable[StrategyRecord]:
        """Give search strategies by name.

        ::

            from kalign_core import hookimpl
            from kalign_core.records import StrategyRecord

            KALIGN_API = 1

            def exhaustive(race):
                return race.measure(race.contenders, rounds=15)[: race.finalists]

            @hookimpl
            def kalign_strategies():
                return [StrategyRecord("exhaustive", exhaustive)]

        Returns strategy records. An exception makes the plugin's row ``broken``.
        """
        raise NotImplementedError


class CacheSpec:
    """Where decisions are kept."""

    @hookspec
    def kalign_stores(self) -> Iterable[StoreRecord]:
        """Give stores of decisions by name.

        ::

            from kalign_core import hookimpl
            from kalign_core.cache.base import MemoryStore
            from kalign_core.records import StoreRecord

            KALIGN_API = 1

            @hookimpl
            def kalign_stores():
                return [StoreRecord("memory", lambda settings: MemoryStore())]

        Returns store records; the first writable store takes decisions. An exception makes the plugin's row
        ``broken``.
        """
        raise NotImplementedError


class VerifierSpec:
    """What else a candidate has to survive. The core's own suite always runs; plugins can only add."""

    @hookspec
    def kalign_inputs(self, kernel: Kernel, problem: Problem, model: DeviceModel) -> Iterable[InputFamily]:
        """Give more input families for ``kernel``.

        ::

            from kalign_core import hookimpl
            from kalign_core.records import InputFamily

            KALIGN_API = 1

            def ones(request):
                return request.block().fill_(1.0)

            @hookimpl
            def kalign_inputs(kernel, problem, model):
                return [InputFamily("ones", ones)]

        Returns input families. An exception counts as refuted.
        """
        raise NotImplementedError

    @hookspec
    def kalign_checks(self, kernel: Kernel, problem: Problem) -> Iterable[Check]:
        """Give more checks; all must hold.

        ::

            from kalign_core import hookimpl
            from kalign_core.records import Case, Check

            KALIGN_API = 1

            def seven(bench):
                return [Case("seed seven", family="normals", seed=7)]

            @hookimpl
            def kalign_checks(kernel, problem):
                return [Check("seed seven", 8, seven)]

        Returns checks. An exception counts as refuted.
        """
        raise NotImplementedError


SPECS: tuple[type, ...] = (PlatformSpec, TunerSpec, CacheSpec, VerifierSpec)
