"""The suite as assembled: plugins make it stricter and never void it; one that is no evidence refutes everything."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kalign_core.plugins import Plugins
from kalign_core.records import Case, Check, InputFamily, Verdict
from kalign_core.verifier import selftest
from kalign_core.verifier.bound import Fixed
from kalign_core.verifier.checks import CORE_CHECKS
from kalign_core.verifier.gate import open_gate
from kalign_core.verifier.inputs import CORE_FAMILIES, Request, normals
from kalign_core.verifier.plugin import kalign_checks, kalign_inputs
from kalign_core.verifier.selftest import PANEL, blind_spot, sees_order
from tests.core.verifier_samples import FAMILIES, good, sums_bench, with_plugin


def verdict(plugins: Plugins, launch: Any = good) -> Verdict:
    """What a gate with ``plugins`` says of a candidate, an equal one by default."""
    return open_gate(plugins, sums_bench(families={}), Fixed(good)).examine([Fixed(launch)])[0]


def reason(plugins: Plugins) -> str:
    found = verdict(plugins)
    assert found.state == "refuted"
    assert found.refutation is not None
    return found.refutation.reason


def without_core(**hooks: Any) -> Plugins:
    """Plugins among which the core suite is not."""
    plugins = with_plugin(**hooks)
    plugins.manager.unregister(name="core-verifier")
    return plugins


# --- plugins ------------------------------------------------------------------------------------------------------


def test_the_core_suite_is_a_plugin_and_complete() -> None:
    """What its hooks give is what the gate asks for."""
    assert tuple(kalign_checks()) == CORE_CHECKS
    assert {family.name for family in kalign_inputs()} == set(FAMILIES)
    assert [check.stage for check in CORE_CHECKS] == [2, 3, 4, 5, 6, 7]


def test_plugins_add_families_and_checks() -> None:
    """Both are run, after the core's."""
    asked: list[str] = []

    def fill(request: Request) -> Any:
        asked.append(request.name)
        return request.ones()

    plugins = with_plugin(
        kalign_inputs=lambda: [InputFamily("unity", fill)],
        kalign_checks=lambda: [Check("mine", 9, lambda bench: [Case("mine", family="unity", seed=5)])],
    )
    assert verdict(plugins).cases == verdict(with_plugin()).cases + 2  # as an input family and as a case of its own
    assert {"x", "weight"} <= set(asked)


def test_a_check_of_a_plugin_refutes() -> None:
    """All checks must hold."""

    def odd(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, total: torch.Tensor, T: int, *rest: Any) -> None:
        good(x, weight, out, total, T, *rest)
        if T == 13:
            total.neg_()

    thirteen = Check("thirteen", 9, lambda bench: [Case("thirteen", dims=(("T", 13),))])
    assert verdict(with_plugin(), odd).state == "not refuted"
    found = verdict(with_plugin(kalign_checks=lambda: [thirteen]), odd)
    assert found.refutation is not None
    assert found.refutation.check == "thirteen"


@pytest.mark.parametrize("repeats", [0, -1])
def test_a_case_that_never_runs_is_no_evidence(repeats: int) -> None:
    """A check that asks for no run at all refutes, as one that raises does: nothing was compared."""
    never = Check("never", 9, lambda bench: [Case("never", repeats=repeats)])
    assert f"'never' runs {repeats} times" in reason(with_plugin(kalign_checks=lambda: [never]))


@pytest.mark.parametrize("hook", ["kalign_inputs", "kalign_checks"])
def test_a_plugin_that_raises_refutes_everything(hook: str) -> None:
    """The gate says which plugin and what it raised."""

    def fails() -> Any:
        raise OSError("no such file")

    text = reason(with_plugin(**{hook: fails}))
    assert "extra" in text
    assert "no such file" in text


@pytest.mark.parametrize(("hook", "given"), [("kalign_inputs", [1]), ("kalign_checks", ["case"]), ("kalign_inputs", 3)])
def test_a_plugin_that_gives_something_else_refutes_everything(hook: str, given: Any) -> None:
    """What cannot be run is not left out in silence."""
    assert "extra" in reason(with_plugin(**{hook: lambda: given}))


def test_a_plugin_without_an_answer_is_fine() -> None:
    """A hook that has nothing to add for a kernel gives None or nothing."""
    assert verdict(with_plugin(kalign_inputs=lambda: None, kalign_checks=lambda: ())).state == "not refuted"


def test_a_plugin_cannot_redefine_a_core_family() -> None:
    """A weaker family under a known name would void the suite."""
    weak = InputFamily("spread", lambda request: request.ones())
    assert "redefines the input family 'spread'" in reason(with_plugin(kalign_inputs=lambda: [weak]))


def test_a_missing_core_suite_refutes_everything() -> None:
    """Without the core there is no verdict in favour of anything."""
    assert "core suite is missing" in reason(without_core())


def test_a_suite_that_only_looks_complete_refutes_everything() -> None:
    """Checks under the core's names that ask for nothing let a known bad kernel pass."""
    hollow = [replace(check, cases=lambda bench: []) for check in CORE_CHECKS]
    plugins = without_core(kalign_inputs=lambda: list(FAMILIES.values()), kalign_checks=lambda: hollow)
    assert "known bad kernel" in reason(plugins)


def test_a_broken_suite_lets_nothing_be_timed() -> None:
    """The first check of a candidate refutes as well, before anything is run."""
    runs: list[int] = []
    gate = open_gate(without_core(), sums_bench(families={}), Fixed(good))
    found = gate.one_case(Fixed(lambda *args: runs.append(1)))
    assert found is not None
    assert (found.check, runs) == ("suite", [])


# --- vacuity ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_core_suite_is_not_vacuous(dtype: str) -> None:
    """Its families see order, and it refutes the whole panel, for every dtype."""
    assert blind_spot(CORE_CHECKS, FAMILIES, [dtype]) == ""


@pytest.mark.parametrize("missing", PANEL)
@pytest.mark.parametrize("stage", [2, 3, 5])
def test_every_planted_fault_needs_the_suite(missing: str, stage: int) -> None:
    """With one fault alone, a suite without checks passes it: the panel tests the checks and not itself."""
    monkey = {missing: PANEL[missing]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selftest, "PANEL", monkey)
        assert list(selftest._passes([check for check in CORE_CHECKS if check.stage == 8], FAMILIES))


@pytest.mark.parametrize(
    ("stage", "fault"),
    [(2, "leaves elements unwritten"), (3, "loses the sign of zero"), (5, "is wrong for 17 rows")],
)
def test_a_suite_without_a_stage_passes_a_fault_of_the_panel(stage: int, fault: str) -> None:
    """Each of these stages is there for a fault that the others do not find."""
    rest = [replace(check, cases=lambda bench: []) if check.stage == stage else check for check in CORE_CHECKS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selftest, "PANEL", {fault: PANEL[fault]})
        if stage == 2:  # fresh memory finds it in every stage, so that only an empty suite passes it
            rest = []
        assert any(fault in text for text in selftest._passes(rest, FAMILIES))


@pytest.mark.parametrize(
    "fill",
    [
        lambda request: request.ones(),
        lambda request: normals(request).sign(),
        lambda request: torch.zeros_like(request.block()),
    ],
)
def test_a_family_that_claims_to_see_order_and_does_not_voids_the_suite(fill: Any) -> None:
    """Sums of such numbers are exact, so that no order shows; the claim is tried before it is believed."""
    text = reason(with_plugin(kalign_inputs=lambda: [InputFamily("blind", fill, sees_order=True)]))
    assert "'blind' claims to see order and does not" in text


def test_a_family_that_makes_no_such_claim_may_be_blind() -> None:
    """Only claims are tried."""
    plugins = with_plugin(kalign_inputs=lambda: [InputFamily("blind", lambda request: request.ones())])
    assert verdict(plugins).state == "not refuted"


def test_a_family_that_raises_when_tried_voids_the_suite() -> None:
    """An error is no evidence."""

    def fails(request: Request) -> Any:
        raise ZeroDivisionError("empty")

    assert "empty" in reason(with_plugin(kalign_inputs=lambda: [InputFamily("broken", fails, sees_order=True)]))


def test_claims_are_tried_for_the_dtypes_at_hand() -> None:
    """A family may see order in float32 alone; it is refused where a kernel takes bfloat16."""
    more = {**FAMILIES, "gauss": InputFamily("gauss", normals, sees_order=True)}
    assert blind_spot(CORE_CHECKS, more, ["fp32"]) == ""
    assert "in a row sum of bf16" in blind_spot(CORE_CHECKS, more, ["fp32", "bf16"])


def test_a_suite_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is kept for the life of the process, for that suite."""
    tried: list[int] = []
    monkeypatch.setattr(selftest, "_found", {})
    passes = selftest._passes
    monkeypatch.setattr(selftest, "_passes", lambda *args: (tried.append(1), passes(*args))[1])
    for _ in range(3):
        assert blind_spot(CORE_CHECKS, FAMILIES, ["fp32"]) == ""
    assert len(tried) == 1


def test_sums_of_small_integers_show_no_order() -> None:
    """The measure itself: exact sums look equal in any order, rounded ones do not."""
    assert not sees_order(torch.arange(512.0).repeat(3, 1))
    assert sees_order(torch.arange(1536.0).view(3, 512).add(1).rsqrt())


def test_normals_make_no_claim() -> None:
    """Sums of a few hundred bfloat16 normals are often exact in float32, so that they prove nothing about order."""
    assert not {family.name: family for family in CORE_FAMILIES}["normals"].sees_order
