"""Search strategies: which candidates are worth a full check and a full measurement.

A strategy gets a ``Race`` and gives its finalists, best first. The built-in one times every candidate with a few
launches in one graph, of the kind that decides in the end: of twenty candidates the third best of the cold ones has
been fifteenth of the warm. The leaders are kept. ``Effort.strategy`` names the one to use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kalign_core.errors import UnknownName
from kalign_core.records import StrategyRecord
from kalign_core.tuner.measure import Contender, Meter

if TYPE_CHECKING:
    from kalign_core.plugins import Plugins


@dataclass(frozen=True, slots=True)
class Race:
    """A field of candidates that compiled and passed the first byte check.

    ``finalists`` is how many the loop will check and measure in full; ``measure`` times contenders roughly.
    """

    contenders: tuple[Contender, ...]
    finalists: int
    meter: Meter

    def measure(self, contenders: Sequence[Contender], launches: int = 5, rounds: int = 4) -> list[Contender]:
        """Time ``contenders`` roughly; gives those that could be timed, fastest first."""
        self.meter.rough(contenders, launches, rounds)
        timed = [contender for contender in contenders if not contender.out]
        return sorted(timed, key=lambda contender: (contender.rough_us, contender.order))


def racing(race: Race) -> list[Contender]:
    """A few launches of everything, four times, the first to warm up; the leaders are the finalists."""
    return race.measure(race.contenders)[: race.finalists]


def strategy_named(plugins: Plugins, name: str) -> StrategyRecord:
    """The search strategy called ``name``, built in or a plugin's; raises ``UnknownName``."""
    answers = plugins.ask("kalign_strategies")
    found: dict[str, StrategyRecord] = {s.name: s for answer in answers for s in answer.value or ()}
    found.setdefault("racing", StrategyRecord("racing", racing))  # where the built-in plugin is disabled
    if name not in found:
        raise UnknownName("strategy", name, found)
    return found[name]
