"""The store of bad kernels: each is refuted by the check that it names, or by an earlier one."""

from __future__ import annotations

from pathlib import Path

import pytest

from kalign_core.hal.cpu import CpuPlatform
from kalign_core.records import Verdict
from kalign_core.verifier.bound import Bound
from kalign_core.verifier.checks import CORE_CHECKS
from kalign_core.verifier.gate import Gate
from tests.bad_kernels import BAD, KINDS, Bad, open_bench

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # what tl.max says of NaN

HERE = [bad for bad in BAD if bad.where == "interpreter"]
STAGES = {check.name: check.stage for check in CORE_CHECKS}
QUICK_SHARE = 0.9


def open_gate(bad: Bad, *, strict: bool) -> Gate:
    """The core suite around the good reference that ``bad`` poses as a candidate of."""
    bench = open_bench(bad, CpuPlatform(), -1, strict=strict)
    return Gate(bench, bench.bound(bad.reference_config(bench)), CORE_CHECKS)


def verdict(bad: Bad, *, strict: bool) -> Verdict:
    gate = open_gate(bad, strict=strict)
    return gate.examine([bad.candidate(gate.bench)])[0]


def refuted_in_time(found: Verdict, bad: Bad) -> bool:
    return found.refutation is not None and STAGES[found.refutation.check] <= STAGES[bad.check]


@pytest.mark.parametrize("bad", HERE, ids=lambda bad: bad.name)
def test_the_strict_suite_refutes(bad: Bad) -> None:
    """Every bad kernel whose fault shows under an interpreter is refuted by its check or an earlier one."""
    found = verdict(bad, strict=True)
    assert refuted_in_time(found, bad), str(found.refutation)


@pytest.mark.parametrize("bad", [bad for bad in HERE if bad.quick], ids=lambda bad: bad.name)
def test_the_quick_suite_refutes(bad: Bad) -> None:
    """So does the suite that runs while tuning, but for the few that say otherwise."""
    found = verdict(bad, strict=False)
    assert refuted_in_time(found, bad), str(found.refutation)


def test_the_quick_suite_answers_for_nine_in_ten() -> None:
    """What is left to the strict suite alone is little."""
    assert sum(bad.quick for bad in BAD) / len(BAD) >= QUICK_SHARE


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_fault_has_a_kernel(kind: str) -> None:
    """The list of what has to be refuted is covered."""
    assert [bad.name for bad in BAD if bad.kind == kind]


def test_the_store_is_of_known_kinds_and_checks() -> None:
    """Names are names of something, and each is used once."""
    assert {bad.kind for bad in BAD} <= set(KINDS)
    assert {bad.check for bad in BAD} <= set(STAGES)
    assert {bad.where for bad in BAD} == {"interpreter", "cuda"}
    assert len({bad.name for bad in BAD}) == len(BAD) >= 24


def test_the_documentation_counts_the_store() -> None:
    """The page on verdicts gives today's number of bad kernels."""
    text = (Path(__file__).parents[2] / "docs" / "verdicts.md").read_text(encoding="utf-8")
    assert f"`tests/bad_kernels/` holds {len(BAD)} deliberately bad kernels" in text


@pytest.mark.parametrize("bad", {b.reference.name: b for b in HERE}.values(), ids=lambda bad: bad.reference.name)
def test_the_references_are_good(bad: Bad) -> None:
    """What the bad ones are held to keeps its own promises and is not refuted beside itself."""
    gate = open_gate(bad, strict=False)
    gate.check_reference()
    home: Bound = gate.bench.bound(bad.reference_config(gate.bench))
    assert gate.examine([home])[0].refutation is None
