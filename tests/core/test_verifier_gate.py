"""The gate refutes what differs, says where, and holds the reference to what a reference promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kalign_core.errors import CandidateFailed, DeviceLost
from kalign_core.hal.cpu import CpuPlatform
from kalign_core.records import Case, Check
from kalign_core.verifier.bench import Bench
from kalign_core.verifier.bound import Fixed
from kalign_core.verifier.checks import SUITE
from tests.core.verifier_samples import (
    FAMILIES,
    ascending,
    backwards,
    changed,
    gate,
    good,
    refutation_of,
    sums_bench,
    sums_problem,
)

Tensor = torch.Tensor


# --- candidates ---------------------------------------------------------------------------------------------------


def test_an_equal_candidate_is_not_refuted() -> None:
    """Equal bytes in every case give a verdict that names the suite, the cases and what was looked at."""
    [verdict] = gate(sums_bench()).examine([Fixed(good)])
    assert (verdict.state, verdict.refutation, verdict.suite, verdict.observable) == (
        "not refuted",
        None,
        SUITE,
        "fp32",
    )
    assert verdict.cases > 20


@pytest.mark.parametrize(
    ("change", "check"),
    [
        (lambda x, w, out, total, T: out[0].fill_(1.0), "written bytes"),
        (lambda x, w, out, total, T: total.as_strided((1,), (1,), total.storage_offset() + T).zero_(), "written bytes"),
        (lambda x, w, out, total, T: w.zero_(), "written bytes"),
        (lambda x, w, out, total, T: torch.rand(1), "written bytes"),
        (lambda x, w, out, total, T: out.masked_fill_(out == 0, 0.0), "input families"),
        (lambda x, w, out, total, T: out.masked_fill_(out.isinf(), 3e38), "input families"),
        (backwards, "written bytes"),
        (lambda x, w, out, total, T: total.neg_() if T == 17 else None, "batch axis"),
        (lambda x, w, out, total, T: total.add_(x.roll(1, 0).sum(-1).mul(0)), "input families"),
        (lambda x, w, out, total, T: total.neg_() if x.stride(0) != x.shape[1] else None, "layout"),
    ],
)
def test_a_fault_is_refuted_by_its_check(change: Callable[..., None], check: str) -> None:
    """Each kind of fault falls at the stage that looks for it."""
    assert refutation_of(changed(change)).check == check


def test_a_fault_in_one_place_is_met() -> None:
    """One row stands in every place of a batch, so that no place is left out, whatever the other cases hold there."""

    def wrong_at_11(x: Tensor, weight: Tensor, out: Tensor, total: Tensor, T: int) -> None:
        if T == 20 and x.dtype == torch.bfloat16 and bool((x[11] == x[12]).all()) and bool(x[11].any()):
            total[11].neg_()

    found = refutation_of(changed(wrong_at_11))
    assert (found.check, found.coordinate) == ("batch axis", (11,))
    assert "row 10 in every place" in found.reason


@pytest.mark.parametrize("run", [2, 5, 15])
def test_a_candidate_that_goes_wrong_later_is_refuted(run: int) -> None:
    """Right at first and wrong from some run on, as after a race."""
    runs = 0

    def launch(*args: Any) -> None:
        nonlocal runs
        runs += 1
        good(*args)
        if runs >= run:
            args[3][0] += 1.0

    assert refutation_of(launch) is not None


@pytest.mark.parametrize(("runs", "coordinate"), [({2}, ()), ({2, 6}, (3,)), ({4}, (3,))])
def test_a_run_that_others_have_overwritten_is_refuted_and_shown_where_it_recurs(
    runs: set[int], coordinate: tuple[int, ...]
) -> None:
    """Four launches and, unless the last one differs, as many as three more to see it again."""
    launched = 0

    def launch(x: Tensor, weight: Tensor, out: Tensor, total: Tensor, *rest: Any) -> None:
        nonlocal launched
        launched += 1
        good(x, weight, out, total, *rest)
        if launched in runs:
            total[3].neg_()

    found = gate(sums_bench()).run_case(Fixed(launch), Case("repeats", family="spread", repeats=4))
    assert found is not None
    assert (found.check, found.coordinate) == ("repeats", coordinate)
    assert coordinate or "bytes differ in 1 of 4 runs" in found.reason


def test_code_that_was_launched_once_and_then_cannot_be_is_refuted() -> None:
    """Skipped is only a case whose code never ran: a first run's bytes are evidence that a second one must not hide."""
    launched = 0

    def launch(*args: Any) -> None:
        nonlocal launched
        launched += 1
        if launched == 2:
            raise CandidateFailed("out of resources")
        good(*args)

    found = gate(sums_bench()).run_case(Fixed(launch), Case("repeats", variant="padded", repeats=2))
    assert found is not None
    assert "failed to launch: out of resources" in found.reason


def test_half_written_memory_is_not_taken_for_finished() -> None:
    """Every run gets fresh memory, so that what an earlier run completed does not count."""

    def launch(x: Tensor, weight: Tensor, out: Tensor, total: Tensor, *rest: Any) -> None:
        out[1:].copy_(x[1:].float() * weight.float())
        total.copy_(ascending(x.float() * weight.float()))

    found = refutation_of(launch)
    assert (found.check, found.argument, found.coordinate) == ("written bytes", "out", (0, 0))


def test_bytes_that_the_reference_leaves_alone_must_be_left_alone() -> None:
    """Gaps between rows count; a candidate that writes them is refuted, though every element is right."""

    def into_the_gap(x: Tensor, weight: Tensor, out: Tensor, total: Tensor, T: int) -> None:
        if out.stride(0) > out.shape[1]:
            out.as_strided((1,), (1,), out.storage_offset() + out.shape[1]).zero_()

    found = refutation_of(changed(into_the_gap))
    assert (found.check, found.argument) == ("layout", "out")
    assert "outside the declared elements" in found.reason


def test_a_refutation_says_where_and_how_far() -> None:
    """Check, inputs, element, both values as bytes and numbers, distance, count."""
    found = refutation_of(changed(lambda x, w, out, total, T: total[5].mul_(-1) if T == 20 else None))
    assert (found.family, found.argument, found.coordinate, found.differing) == ("normals", "total", (5,), 1)
    assert found.candidate_value == -found.reference_value
    assert int(found.candidate, 16) ^ int(found.reference, 16) == 0x80000000
    assert found.ulps == 1 + 2 * (min(int(found.candidate, 16), int(found.reference, 16)))


def test_what_bfloat16_hides_is_seen_on_the_wide_output() -> None:
    """Another rounding of an intermediate, invisible in bfloat16, is refuted where the kernel can store float32."""

    def nudged(x: Tensor, weight: Tensor, out: Tensor, total: Tensor, T: int) -> None:
        if out.dtype == torch.float32:
            out.copy_(torch.nextafter(out, torch.tensor(torch.inf)))

    found = refutation_of(changed(nudged))
    assert (found.check, found.argument) == ("input families", "out")
    assert "wide" in found.reason


def test_a_candidate_that_fails_to_launch_is_refuted_with_its_reason() -> None:
    """No launch, no evidence."""

    def fails(*args: Any) -> None:
        raise CandidateFailed("out of resources")

    found = refutation_of(fails)
    assert not found.argument
    assert "out of resources" in found.reason


def test_an_error_of_the_device_ends_the_candidate_and_not_the_process() -> None:
    """What a launch raises of itself is a refutation, where the device is still well."""

    def fails(*args: Any) -> None:
        raise RuntimeError("an illegal instruction was encountered\nmore")

    assert "illegal instruction" in refutation_of(fails).reason


def test_a_lost_device_is_not_a_refutation() -> None:
    """Where the device says that it is beyond use, so does the gate."""

    class Lost(CpuPlatform):
        def synchronize(self, device: int) -> None:
            raise DeviceLost("device 0 reports an illegal address")

    def fails(*args: Any) -> None:
        raise RuntimeError("illegal address")

    bench = Bench(Lost(), sums_bench().kernel, sums_problem(), -1)
    bench.families.update(FAMILIES)
    with pytest.raises(DeviceLost):
        gate(bench).examine([Fixed(fails)])


def test_candidates_are_judged_one_by_one() -> None:
    """A bad one among good ones takes no other with it, not even by writing to the inputs they share."""
    launches = [good, changed(lambda x, w, out, total, T: x.zero_()), good, changed(backwards), good]
    verdicts = gate(sums_bench()).examine([Fixed(launch) for launch in launches])
    assert [v.state for v in verdicts] == ["not refuted", "refuted", "not refuted", "refuted", "not refuted"]


def test_a_variant_that_cannot_be_launched_is_no_evidence() -> None:
    """It is named as skipped and neither refutes nor counts."""
    bench = sums_bench()

    class Narrow(Fixed):
        def launch_for(self, bench: Bench, case: Case) -> Any:
            if case.variant == "wide":
                raise CandidateFailed("too much shared memory")
            return good

    [verdict] = gate(bench).examine([Narrow(good)])
    assert verdict.state == "not refuted"
    assert verdict.skipped
    assert all("wide" in words for words in verdict.skipped)


def test_a_first_check_takes_one_case() -> None:
    """The check before timing runs reference and candidate once each."""
    runs: list[str] = []
    here = gate(sums_bench(), reference=lambda *args: (runs.append("reference"), good(*args)))
    assert here.one_case(Fixed(lambda *args: (runs.append("candidate"), good(*args)))) is None
    assert runs == ["reference", "candidate"]
    assert here.one_case(Fixed(changed(backwards))) is not None


@pytest.mark.parametrize(("row", "size"), [(199, 200), (0, 199), (10, 17), (70, 101)])
def test_most_cases_take_the_first_rows_and_some_take_all(row: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large problem is looked at in part for what shows anywhere, and as a whole for its last row and its sizes."""
    monkeypatch.setattr("kalign_core.verifier.checks._elements", lambda bench: 1)  # 64 rows, then

    def wrong(x: Tensor, weight: Tensor, out: Tensor, total: Tensor, T: int) -> None:
        if size == T:
            total[row].add_(total[row].abs() + 1)

    here = gate(sums_bench(sums_problem(200, dtype="fp32")))
    here.check_reference()
    same, other = here.examine([Fixed(good), Fixed(changed(wrong))])
    assert (same.state, other.state) == ("not refuted", "refuted")


# --- checks -------------------------------------------------------------------------------------------------------


def test_checks_run_in_the_order_of_their_stages() -> None:
    """Whatever order they come in."""
    seen: list[int] = []

    def at(stage: int) -> Check:
        return Check(f"stage {stage}", stage, lambda bench: seen.append(stage) or [])

    gate(sums_bench(), checks=[at(7), at(2), at(5)]).examine([Fixed(good)])
    assert seen == [2, 5, 7]


def test_a_check_that_raises_refutes() -> None:
    """An error is no evidence, of whatever class it is."""
    for error in (ValueError("no"), SystemExit("bye"), OSError("gone")):

        def cases(bench: Bench, error: BaseException = error) -> Any:
            raise error

        [verdict] = gate(sums_bench(), checks=[Check("mine", 8, cases)]).examine([Fixed(good)])
        assert verdict.refutation is not None
        assert str(error) in verdict.refutation.reason


@pytest.mark.parametrize("given", [[1], ["case"], 3])
def test_a_check_that_gives_something_else_than_cases_refutes(given: Any) -> None:
    """Nothing is left out in silence."""
    [verdict] = gate(sums_bench(), checks=[Check("mine", 8, lambda bench: given)]).examine([Fixed(good)])
    assert verdict.state == "refuted"


def test_a_case_whose_inputs_cannot_be_made_refutes() -> None:
    """An unknown family, or one that raises, is no evidence."""
    [verdict] = gate(sums_bench(), checks=[Check("mine", 8, lambda bench: [Case("mine", family="nowhere")])]).examine(
        [Fixed(good)]
    )
    assert verdict.refutation is not None
    assert "nowhere" in verdict.refutation.reason
