"""What plugins propose, refuse and search by, and what becomes of those that break the rules."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from kalign_core.errors import NotNow, UnknownName
from kalign_core.hal.replay import Clock, Script
from kalign_core.records import Config, DeviceModel
from kalign_core.tuner import space as spaces
from kalign_core.tuner.space import Space, declaration_order
from tests.core.tuner_samples import (
    BEST,
    EFFORT,
    REFERENCE,
    SECOND,
    Bed,
    builtin,
    declared,
    double,
    double_kernel,
    problem,
    timed,
    winner_of,
)

PROPOSES = """
@hookimpl(any_platform=True)
def kalign_candidates(kernel, problem, model):
    reference = kernel.reference_config(problem)
    return {what}
"""
VETOES = """
@hookimpl(any_platform=True)
def kalign_veto(kernel, problem, model, config):
    {what}
"""
FORBIDDEN = "is part of the contract, or no option of this platform"
SEARCHES = """
def search(race):
    {what}
@hookimpl
def kalign_strategies():
    return [StrategyRecord("mine", search)]
"""
MINE = replace(EFFORT, strategy="mine")


@pytest.fixture(autouse=True)
def _fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spaces, "_warned", set())


def bed(*plugins: str) -> Bed:
    return Bed(Script(time_us=Clock({BEST: 80.0, SECOND: 85.0})), builtin(*plugins))


def space_of(*plugins: str, made: object = double_kernel) -> Space:
    here = bed(*plugins)
    kernel = made if isinstance(made, type(double_kernel)) else double_kernel
    options = here.platform.launch_options
    return spaces.space(here.plugins, "replay", options, kernel, problem(made=kernel), here.platform.model(-1))


def refusals(found: Space) -> set[str]:
    return {reason for _, reason in found.refused}


# --- candidates ---------------------------------------------------------------------------------------------------


def test_a_kernels_own_knobs_are_candidates() -> None:
    """Without any plugin every combination of few knobs is tried, the reference first, once each."""
    found = space_of()
    assert found.candidates[0] == REFERENCE
    assert len(found.candidates) == len(set(found.candidates)) == 16


def test_an_interpreter_tells_no_warps_apart() -> None:
    """Where kernels are interpreted, whatever the platform and its device are called, warps are the reference's."""
    here = bed()
    model = DeviceModel("interpreter", "theirs", warp_size=1, max_warps=64, shared_bytes=0)
    found = spaces.space(here.plugins, "theirs", here.platform.launch_options, double_kernel, problem(), model)
    assert {config["num_warps"] for config in found.candidates} == {REFERENCE["num_warps"]}
    assert refusals(found) == {"the interpreter ignores num_warps"}


def test_many_knobs_are_changed_one_at_a_time() -> None:
    """Where the combinations are many, the reference is changed one knob at a time."""
    many = {"BLOCK": (16, 32, 64, 128), "num_warps": (1, 2, 4, 8), "num_stages": tuple(range(1, 7))}
    made = declared(double, "many", reference=REFERENCE.replace(num_stages=1), knobs=many)
    found = space_of(made=made)
    assert len(found.candidates) == 1 + 3 + 3 + 5


def test_a_plugins_candidates_come_before_a_kernels_own() -> None:
    """What a plugin knows of the device is tried before what only the kernel's declaration says."""
    found = space_of(PROPOSES.format(what="[reference.replace(BLOCK=256), reference.replace(BLOCK=128)]"))
    blocks = [config.BLOCK for config in found.candidates[:4]]
    assert blocks == [64, 256, 128, 16]


@pytest.mark.parametrize("change", ["enable_fp_fusion=True", "input_precision='tf32'", "FOLD=32", "num_ctas=2"])
def test_a_candidate_that_sets_a_contract_knob_is_refused(change: str) -> None:
    """What is neither a knob of the kernel nor a launch option of the platform is never varied, whoever proposes it."""
    here = bed(PROPOSES.format(what=f"[reference.replace({change})]"))
    report = here.tune()
    name = change.partition("=")[0]
    assert [reason for _, reason in report.refused] == [f"{name} {FORBIDDEN}"]
    assert all(config.get("enable_fp_fusion") is False for config in timed(here.script))


def test_a_launch_option_of_the_platform_may_be_set() -> None:
    """An option that the platform accepts may be varied though the kernel declares no such knob."""
    found = space_of(PROPOSES.format(what="[reference.replace(num_stages=3)]"))
    assert REFERENCE.replace(num_stages=3) in found


def test_a_candidate_that_leaves_a_knob_open_is_refused() -> None:
    """A candidate gives every knob that the reference gives."""
    found = space_of(PROPOSES.format(what="[Config(BLOCK=32, enable_fp_fusion=False)]"))
    assert refusals(found) == {"leaves num_warps unset"}


@pytest.mark.parametrize(
    ("grid", "reason"),
    [
        (lambda p, c: (1, 70000 if c.BLOCK == 16 else 1), "grid (1, 70000) of grids is out of range on axis 1"),
        (lambda p, c: (-1 if c.BLOCK == 16 else 1,), "grid (-1,) of grids is out of range on axis 0"),
        (lambda p, c: (1 // (c.BLOCK - 16),) if c.BLOCK == 16 else (1,), "ZeroDivisionError"),
    ],
)
def test_a_grid_that_cannot_be_launched_is_refused(grid: object, reason: str) -> None:
    """A candidate whose grid is out of a device's range, or cannot be computed, is refused before anything compiles."""
    found = space_of(made=declared(double, "grids", grid=grid))
    assert len(found.refused) == 4
    assert all(reason in text for text in refusals(found))


def test_a_plugin_that_raises_adds_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Candidates of a plugin that raises are lost, those of others are not, and there is one warning."""
    raising = PROPOSES.format(what="[1 / 0]")
    good = PROPOSES.format(what="[reference.replace(BLOCK=256)]")
    for _ in range(2):
        found = space_of(raising, good)
    assert len(found.candidates) == 17
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert warnings == ["plugin p0 gave no candidates for double: ZeroDivisionError('division by zero')"]


@pytest.mark.parametrize("what", ["[3, 'fast', reference]", "reference", "7", "None"])
def test_what_is_no_configuration_is_left_out(what: str, caplog: pytest.LogCaptureFixture) -> None:
    """Things that are no configurations are not tried and are warned of."""
    assert len(space_of(PROPOSES.format(what=what)).candidates) == 16
    assert ("that are no Config" in caplog.text) is (what not in ("reference",))


# --- vetoes -------------------------------------------------------------------------------------------------------


def test_any_reason_refuses() -> None:
    """A candidate that one plugin vetoes is refused with its reason and not timed, though it be the fastest."""
    here = bed(VETOES.format(what="return 'two warps are banned' if config.num_warps == 2 else None"))
    report = here.tune()
    assert {reason for _, reason in report.refused} == {"two warps are banned"}
    assert (BEST in timed(here.script), winner_of(report)) == (False, SECOND)


def test_a_veto_that_raises_refuses() -> None:
    """A plugin that cannot say whether a candidate is safe has not said that it is."""
    report = bed(VETOES.format(what="return 1 / (config.num_warps - 2) and None")).tune()
    assert {reason for _, reason in report.refused} == {"veto raised"}
    assert winner_of(report) == SECOND


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("num_warps=3", "num_warps=3 is no power of two"),
        ("num_warps=64", "num_warps=64, at most 32 fit a block of scripted"),
        ("num_stages=-1", "num_stages=-1 is negative"),
    ],
)
def test_what_no_device_runs_is_refused(config: str, reason: str) -> None:
    """Impossible launch options are refused before they are compiled, on any platform."""
    assert refusals(space_of(PROPOSES.format(what=f"[reference.replace({config})]"))) == {reason}


# --- order --------------------------------------------------------------------------------------------------------


def test_declaration_decides_the_order() -> None:
    """Candidates sort by the place of their values in the kernel's declaration, undeclared values behind them."""
    configs = [
        REFERENCE.replace(BLOCK=block, num_warps=warps) for block, warps in [(256, 1), (128, 1), (16, 8), (16, 2)]
    ]
    ordered = sorted(configs, key=lambda config: declaration_order(double_kernel, config))
    assert [(c.BLOCK, c.num_warps) for c in ordered] == [(16, 2), (16, 8), (128, 1), (256, 1)]


def test_declaration_order_is_total() -> None:
    """Two configurations never share a place."""
    one, other = Config(BLOCK=16, num_warps=1, X=1), Config(BLOCK=16, num_warps=1, X=2)
    assert declaration_order(double_kernel, one) != declaration_order(double_kernel, other)


# --- strategies ---------------------------------------------------------------------------------------------------

LAST = "return sorted(race.contenders, key=lambda c: c.order)[-1:]"


def test_a_plugins_strategy_serves_when_named() -> None:
    """A strategy is used where the effort names it, and only there."""
    here = bed(SEARCHES.format(what=LAST))
    assert winner_of(here.tune()) == BEST
    here.script.timed.clear()
    here.tune(effort=MINE)
    last = REFERENCE.replace(BLOCK=128, num_warps=8)
    assert timed(here.script) == {REFERENCE, last}


def test_a_strategy_measures_with_the_loops_meter() -> None:
    """A strategy gets the field and a measurement, and its leaders are raced as the built-in one's are."""
    halving = "best = race.measure(race.contenders, 5, 1); return race.measure(best[: len(best) // 2], 5, 5)"
    here = bed(SEARCHES.format(what=halving))
    assert winner_of(here.tune(effort=MINE)) == BEST


def test_an_unknown_strategy_says_what_is_known() -> None:
    """A misspelt strategy is the user's error and nothing is launched."""
    here = bed(SEARCHES.format(what=LAST))
    with pytest.raises(UnknownName, match="did you mean 'mine'"):
        here.tune(effort=replace(EFFORT, strategy="mein"))
    assert here.script.launched == []


@pytest.mark.parametrize("what", ["return 1 / 0", "raise SystemExit", "return 3", "return [[]]"])
def test_a_strategy_that_fails_is_replaced(what: str, caplog: pytest.LogCaptureFixture) -> None:
    """A strategy that raises or gives no contenders costs a warning, and the built-in one searches instead."""
    assert winner_of(bed(SEARCHES.format(what=what)).tune(effort=MINE)) == BEST
    assert "search strategy mine failed" in caplog.text
    assert "using racing" in caplog.text


def test_a_strategy_is_not_to_blame_for_its_moment(caplog: pytest.LogCaptureFixture) -> None:
    """What a strategy met because a graph was being captured ends the tuning for now, and no strategy is replaced."""
    met = "from kalign_core.errors import NotNow; raise NotNow('a graph is captured')"
    with pytest.raises(NotNow, match="a graph is captured"):
        bed(SEARCHES.format(what=met)).tune(effort=MINE)
    assert caplog.text == ""


def test_a_strategys_strangers_are_left_out() -> None:
    """Contenders that are not of this race, or named twice, are not raced; nor are more than were asked for."""
    what = "import copy; c = race.contenders; return [copy.copy(c[0]), 'fast', *c, *c]"
    here = bed(SEARCHES.format(what=what))
    here.tune(effort=replace(MINE, finalists=2))
    assert len(timed(here.script)) == 3


def test_a_strategy_may_find_nobody() -> None:
    """A strategy that gives nobody leaves the reference."""
    assert winner_of(bed(SEARCHES.format(what="return []")).tune(effort=MINE)) == REFERENCE
