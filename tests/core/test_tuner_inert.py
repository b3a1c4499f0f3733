"""Which knobs change nothing: judged by configurations that differ in one of them alone."""

from __future__ import annotations

from kalign_core.records import Config
from kalign_core.tuner.inert import inert_knobs, knob_changes

ONE, TWO, FOUR = (Config(BLOCK=64, num_warps=warps) for warps in (1, 2, 4))


def test_a_knob_is_judged_by_pairs_that_differ_in_it_alone() -> None:
    """Pairs that differ in two knobs say nothing of either."""
    codes = {ONE: "a", TWO: "a", FOUR: "b", ONE.replace(BLOCK=128): "c"}
    assert knob_changes(codes) == {"BLOCK": (1, 1), "num_warps": (3, 2)}


def test_a_knob_that_never_changes_the_code_is_inert() -> None:
    """One pair of different code is enough to say that a knob does something."""
    assert inert_knobs({ONE: "a", TWO: "a", FOUR: "a"}) == ("num_warps",)
    assert inert_knobs({ONE: "a", TWO: "a", FOUR: "b"}) == ()


def test_a_knob_that_never_varies_alone_is_not_judged() -> None:
    """Nothing is said of a knob where every other value of it came with another change."""
    assert inert_knobs({ONE: "a", FOUR.replace(BLOCK=128): "a"}) == ()
