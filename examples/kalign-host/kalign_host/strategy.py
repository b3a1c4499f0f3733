"""A search strategy: successive halving. Time all candidates once, keep the better half, time those longer, and so on.

``race.measure`` leaves out what failed and stops early where the budget is spent, so that a strategy need not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kalign_core.tuner.measure import Contender
    from kalign_core.tuner.search import Race


def halving(race: Race) -> list[Contender]:
    """The finalists of ``race``, best first."""
    rounds = 1
    field = race.measure(race.contenders, rounds=rounds)
    while len(field) > race.finalists:
        rounds += 1
        field = race.measure(field[: max(race.finalists, len(field) // 2)], rounds=rounds)
    return field
