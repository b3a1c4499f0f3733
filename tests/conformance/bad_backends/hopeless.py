"""A plugin in which nothing is right, so that every rule has somebody who breaks it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from kalign_core.environment import Environment
from kalign_core.hookspecs import hookimpl
from kalign_core.records import (
    Case,
    Check,
    Config,
    DeviceModel,
    Evidence,
    InputFamily,
    PlatformRecord,
    StoreRecord,
    StrategyRecord,
)

KALIGN_API = 1
MODEL = DeviceModel("interpreter", "cpu 1", warp_size=3, max_warps=0, shared_bytes=-1)
_times = itertools.count()


def probe(environment: Environment) -> Evidence:
    """Raises where there is no triton, and counts its calls elsewhere."""
    if not environment.triton:
        raise KeyError("triton")
    return Evidence(True, f"asked {next(_times)} times")


@hookimpl
def kalign_platforms() -> list[PlatformRecord]:
    """One platform, with one device twice."""
    home = "tests.conformance.bad_backends.hopeless_platform:HopelessPlatform"
    return [PlatformRecord("hopeless", probe, home, (MODEL, replace(MODEL, units=1)), fallback=True)]


@hookimpl
def kalign_candidates() -> list[Config]:
    """Another configuration every time, that is none of any kernel."""
    return [Config(NUMBER=next(_times))]


@hookimpl
def kalign_veto(config: Config) -> str:
    """No."""
    return "no"


@hookimpl
def kalign_strategies() -> list[StrategyRecord]:
    """A strategy for two candidates or more."""
    return [StrategyRecord("second", lambda race: [race.contenders[1]])]


@hookimpl
def kalign_stores() -> list[StoreRecord]:
    """A store that is one big list."""
    from tests.conformance.bad_backends.hopeless_store import HopelessStore

    return [StoreRecord("list", HopelessStore)]


@hookimpl
def kalign_inputs() -> list[InputFamily]:
    """Random numbers of one dtype, half as wide as asked for."""

    def noise(request: Any) -> Any:
        import torch

        return torch.randn(len(request.rows), request.columns // 2)

    return [InputFamily("noise", noise)]


@hookimpl
def kalign_checks() -> list[Check]:
    """Two checks of one name, whose cases are another's and of inputs that do not exist."""

    def cases(bench: Any) -> Iterable[Case]:
        yield Case("somebody else's", family="no such family")

    return [Check("same", 0, cases), Check("same", 0, cases)]
