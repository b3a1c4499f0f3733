"""The suite for search strategies: it ends, in time, with candidates that work, and says the same every time."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kalign_core.plugins import Plugins
from kalign_core.records import StrategyRecord
from kalign_core.testing.field import Endless, Field
from kalign_core.testing.plugin import PluginConformance
from kalign_core.tuner.measure import Contender

DEADLINE_S = 600.0  # of a strategy that waits for something that does not come; one that measures on is told at once
# A strategy that wants more readings than this of every candidate is not narrowing a field, it is measuring it.
MOST_READINGS_EACH = 100
READINGS_EACH_IN_HASTE = 5


class StrategyConformance(PluginConformance):
    """Everything a search strategy has to do, on fields whose times are scripted::

    class TestHalving(StrategyConformance):
        plugin = "my_package.plugin"
        strategy = "halving"
    """

    strategy: str

    @pytest.fixture
    def search(self, plugins: Plugins) -> Callable[..., Any]:
        """The strategy's function, found as the tuning loop finds it."""
        answers = plugins.ask("kalign_strategies")
        records: list[StrategyRecord] = [record for answer in answers for record in answer.value or ()]
        (found,) = (record for record in records if record.name == self._said("strategy"))
        return found.search

    def numbers(self, search: Callable[..., Any], field: Field) -> list[int]:
        """Numbers of the finalists that ``search`` finds in ``field``, after checking that they may be finalists."""
        race = field.race()
        found = _in_time(lambda: list(search(race)))
        assert [one for one in found if not isinstance(one, Contender)] == []
        assert [one for one in found if one not in race.contenders] == []
        assert len(set(found)) == len(found)
        assert len(found) <= field.finalists
        assert [one.config for one in found if one.out] == []
        return [int(one.config.NUMBER) for one in found]

    # --- what it finds --------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 150])
    def test_finalists_are_of_the_field(self, search: Callable[..., Any], size: int) -> None:
        """Finalists are contenders of the race, each once, as many as were asked for or fewer, at least one."""
        field = Field([100.0 + number for number in range(size)], noise=0.01)
        assert 1 <= len(self.numbers(search, field)) <= min(size, field.finalists)

    @pytest.mark.parametrize("winner", [0, 20, 39])
    def test_a_clear_winner_comes_first(self, search: Callable[..., Any], winner: int) -> None:
        """A candidate that takes half the time of all others is the first finalist, wherever it stands."""
        field = Field([50.0 if number == winner else 100.0 for number in range(40)], noise=0.05)
        assert self.numbers(search, field)[0] == winner

    def test_one_finalist_can_be_asked_for(self, search: Callable[..., Any]) -> None:
        """Where one finalist is wanted, one is given, and it is the fastest."""
        assert self.numbers(search, Field([100.0, 40.0, 90.0], finalists=1)) == [1]

    # --- fields that are no fields --------------------------------------------------------------------------------

    def test_an_empty_field_has_no_finalist(self, search: Callable[..., Any]) -> None:
        """Without candidates there is nothing to find, and nothing is raised."""
        assert self.numbers(search, Field([])) == []

    def test_a_single_candidate_is_the_finalist(self, search: Callable[..., Any]) -> None:
        """One candidate that works is found."""
        assert self.numbers(search, Field([100.0])) == [0]

    @pytest.mark.parametrize("kind", ["unloadable", "failing", "refuted"])
    def test_what_is_out_is_no_finalist(self, search: Callable[..., Any], kind: str) -> None:
        """Candidates that fail, or were refuted before, are never finalists, however fast they look."""
        out = frozenset({0, 3, 4})
        field = _spoilt([1.0 if number in out else 100.0 for number in range(8)], kind, out)
        found = self.numbers(search, field)
        assert found
        assert not out & set(found)

    @pytest.mark.parametrize("kind", ["unloadable", "failing", "refuted"])
    def test_a_field_that_is_all_out_has_no_finalist(self, search: Callable[..., Any], kind: str) -> None:
        """Where every candidate is out nothing is found, and nothing is raised."""
        assert self.numbers(search, _spoilt([10.0] * 5, kind, frozenset(range(5)))) == []

    @pytest.mark.parametrize("reading", [0.0, -1.0, math.nan, math.inf])
    def test_readings_that_are_none_do_not_win(self, search: Callable[..., Any], reading: float) -> None:
        """A candidate of which the clock gives no usable reading is no finalist."""
        assert self.numbers(search, Field([100.0, reading, 90.0])) in ([2, 0], [2])

    def test_a_clock_that_never_works_finds_nothing(self, search: Callable[..., Any]) -> None:
        """Where no candidate can be timed nothing is found, and nothing is raised."""
        assert self.numbers(search, Field([math.nan] * 6)) == []

    # --- time -----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("size", [1, 40, 150])
    def test_it_ends(self, search: Callable[..., Any], size: int) -> None:
        """A strategy takes a bounded number of readings of each candidate, however close they are."""
        field = Field([100.0] * size, noise=0.2, most=MOST_READINGS_EACH * size)
        assert self.numbers(search, field)

    def test_a_spent_budget_ends_it(self, search: Callable[..., Any]) -> None:
        """Where the budget is spent already, the least is measured that tells anything."""
        field = Field([100.0] * 20, affordable=0, most=READINGS_EACH_IN_HASTE * 20)
        assert self.numbers(search, field)

    def test_a_budget_that_runs_out_ends_it(self, search: Callable[..., Any]) -> None:
        """Where the budget runs out on the way, a strategy comes to its end and gives what it has found."""
        field = Field([100.0] * 20, noise=0.1, affordable=25, most=25 + READINGS_EACH_IN_HASTE * 20)
        assert self.numbers(search, field)

    # --- the same every time --------------------------------------------------------------------------------------

    def test_it_finds_the_same_again(self, search: Callable[..., Any]) -> None:
        """The same readings give the same finalists in the same order, whatever the process's random numbers are."""
        found = []
        for seed in (1, 2):
            random.seed(seed)
            found.append(self.numbers(search, Field([100.0 + number % 5 for number in range(30)], noise=0.03)))
        assert found[0] == found[1]

    def test_it_leaves_random_numbers_alone(self, search: Callable[..., Any]) -> None:
        """A strategy draws from a generator of its own: the caller's draws are what they would have been."""
        random.seed(3)
        state = random.getstate()
        self.numbers(search, Field([100.0, 90.0, 80.0]))
        assert random.getstate() == state


def _spoilt(times_us: list[float], kind: str, out: frozenset[int]) -> Field:
    """A field in which the candidates ``out`` are out for the reason that ``kind`` names."""
    faults: dict[str, Any] = {kind: out}
    return Field(times_us, **faults)


def _in_time(work: Callable[[], list[Any]]) -> list[Any]:
    """What ``work`` gives; fails the test where it does not end."""
    given: list[list[Any]] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            given.append(work())
        except BaseException as error:  # noqa: BLE001  # raised again by the thread that waits
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(DEADLINE_S)
    if thread.is_alive():
        pytest.fail(f"the strategy did not end within {DEADLINE_S:g} s")
    if raised and isinstance(raised[0], Endless):
        pytest.fail(f"the strategy does not end: {raised[0]}")
    if raised:
        raise raised[0]
    return given[0]
