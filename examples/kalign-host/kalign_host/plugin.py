"""The plugin: every hook that kalign asks, in one file that imports no device library.

kalign imports this module on every machine that has the package, and asks the probe on all of them. So the top of it
is the standard library and light parts of kalign; everything else is imported in the function that needs it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kalign_core import hookimpl
from kalign_core.records import Check, Evidence, InputFamily, PlatformRecord, StoreRecord, StrategyRecord
from kalign_host import limits, spaces

if TYPE_CHECKING:
    from kalign_core.declare import Kernel
    from kalign_core.environment import Environment
    from kalign_core.records import Config, Problem

KALIGN_API = 1


def probe(environment: Environment) -> Evidence:
    """Whether the host can be used in ``environment``, and why not: looks there and nowhere else."""
    if environment.torch is None or not environment.triton:
        return Evidence(False, "torch and triton are not both installed; type: pip install torch triton")
    if "triton" in environment.loaded and environment.variables.get("TRITON_INTERPRET") != "1":
        return Evidence(False, "triton was imported first; type: export TRITON_INTERPRET=1")
    return Evidence(True, "Triton's interpreter on this processor")


@hookimpl
def kalign_platforms() -> Iterable[PlatformRecord]:
    """The platform ``host``: a fallback, so that installing it changes nothing for whoever has a GPU."""
    return [PlatformRecord("host", probe, "kalign_host.platform:HostPlatform", (limits.MODEL,), fallback=True)]


@hookimpl
def kalign_candidates(kernel: Kernel, problem: Problem) -> Iterable[Config]:
    """Launches worth trying beside the kernel's own knobs."""
    return spaces.candidates(kernel, problem)


@hookimpl
def kalign_veto(config: Config) -> str | None:
    """A reason why ``config`` must not be tried, or None. Of a hook's arguments a plugin takes those it needs."""
    return limits.veto(config)


@hookimpl
def kalign_strategies() -> Iterable[StrategyRecord]:
    """The strategy ``halving``, for ``kalign tune --strategy halving``."""
    from kalign_host.strategy import halving

    return [StrategyRecord("halving", halving)]


@hookimpl
def kalign_stores() -> Iterable[StoreRecord]:
    """The store ``sqlite``; the first writable store takes decisions, and kalign's own comes first."""
    from kalign_host.store import SqliteStore

    return [StoreRecord("sqlite", SqliteStore)]


@hookimpl
def kalign_inputs() -> Iterable[InputFamily]:
    """The input family ``powers``."""
    from kalign_host.checks import powers

    return [InputFamily("powers", powers)]


@hookimpl
def kalign_checks() -> Iterable[Check]:
    """The check ``once more``, after the core's."""
    from kalign_host.checks import once_more

    return [Check("once more", 8, once_more)]
