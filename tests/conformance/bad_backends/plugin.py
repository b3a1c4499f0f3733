"""A plugin whose platforms, store and strategy each break one promise; none of it is noticed by the loader."""

from __future__ import annotations

from collections.abc import Callable

from kalign_core.embedded import MODEL, probe
from kalign_core.environment import Environment
from kalign_core.hookspecs import hookimpl
from kalign_core.records import Evidence, PlatformRecord, StoreRecord, StrategyRecord

KALIGN_API = 1
PLATFORMS: dict[str, str] = {
    "late": "LatePlatform",
    "by_model": "ByModelPlatform",
    "by_number": "ByNumberPlatform",
    "bound": "BoundPlatform",
    "curious": "CuriousPlatform",
}


def curious(environment: Environment) -> Evidence:
    """Asks torch for its devices, which imports it and wakes the driver."""
    import torch

    return Evidence(torch.get_num_threads() > 0, f"torch {torch.__version__} is here")


@hookimpl
def kalign_platforms() -> list[PlatformRecord]:
    """One platform for each broken promise."""
    probes: dict[str, Callable[[Environment], Evidence]] = {"curious": curious}
    home = "tests.conformance.bad_backends.platforms"
    return [
        PlatformRecord(name, probes.get(name, probe), f"{home}:{made}", (MODEL,), fallback=True)
        for name, made in PLATFORMS.items()
    ]


@hookimpl
def kalign_stores() -> list[StoreRecord]:
    """A store that writes what it knows, and knows nothing of others."""
    from tests.conformance.bad_backends.store import ForgetfulStore

    return [StoreRecord("forgetful", ForgetfulStore)]


@hookimpl
def kalign_strategies() -> list[StrategyRecord]:
    """A strategy that takes the first candidates there are, and one that waits for a clear winner."""

    def first(race):  # type: ignore[no-untyped-def]
        return race.contenders[: race.finalists]

    def unsure(race):  # type: ignore[no-untyped-def]
        found = race.measure(race.contenders)
        while len(found) > 1 and found[1].rough_us < 1.5 * found[0].rough_us:
            found = race.measure(found)
        return found[: race.finalists]

    return [StrategyRecord("first", first), StrategyRecord("unsure", unsure)]
