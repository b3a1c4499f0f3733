"""A run: all its outputs in one piece of memory, cleared and compared in one step, with the inputs' imprint behind."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kalign_core.hal.cpu import CpuPlatform
from kalign_core.records import Case
from kalign_core.verifier import bench as benches
from kalign_core.verifier.bench import Bench
from kalign_core.verifier.compare import GUARD_BYTES
from kalign_core.verifier.run import Run
from kalign_core.verifier.variants import dense_problem
from tests.core.verifier_samples import FAMILIES, adds, good, sums_bench


def finished(bench: Bench, *, alone: bool = True) -> Run:
    """A run of ``good`` with its seal taken."""
    run = bench.room(Case(""), alone=alone)
    run.clear()
    good(*run.arguments)
    run.seal()
    return run


@pytest.mark.parametrize("variant", ["", "padded", "unaligned", "uneven", "wide"])
def test_outputs_lie_between_guard_bands_and_apart(variant: str) -> None:
    """Every output has its own bands, and its base is a multiple of 16 bytes exactly where the layout says so."""
    bench = sums_bench()
    case = Case("", variant=variant)
    run = bench.room(case)
    ends = []
    for name, buffer in run.outputs.items():
        start = buffer.view.data_ptr() - buffer.flat.data_ptr()
        assert start >= GUARD_BYTES
        assert (buffer.view.data_ptr() % 16 == 0) is bench.problem_for(case).argument(name).aligned
        ends.append((buffer.flat.data_ptr(), buffer.flat.data_ptr() + buffer.flat.numel()))
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(sorted(ends)))


def test_clearing_makes_every_byte_the_fill() -> None:
    """Memory that is used again holds nothing of the run before."""
    run = sums_bench().run(good, Case("", fill=0x3C))
    run.clear()
    assert all(bool((buffer.flat == 0x3C).all()) for buffer in run.outputs.values())


def test_clearing_gives_accumulated_outputs_their_numbers_back() -> None:
    """What is added to starts from the same numbers in every run."""
    bench = Bench(CpuPlatform(), adds, dense_problem(adds, {"T": 3, "H": 8}, {"x": "fp32", "out": "fp32"}), -1)
    bench.families.update(FAMILIES)
    run = bench.room(Case(""))
    run.clear()
    before = run.outputs["out"].flat.clone()
    run.outputs["out"].view.add_(1.0)
    run.clear()
    assert torch.equal(run.outputs["out"].flat, before)


@given(st.data())
def test_runs_agree_exactly_where_every_byte_does(draw: st.DataObject) -> None:
    """A byte of any output, its gaps or its guard bands; the output is named."""
    bench = sums_bench()
    ours, theirs = finished(bench), finished(bench)
    assert not bool(ours.unlike(theirs, sealed=True))
    assert ours.differing(theirs) == ""
    name = draw.draw(st.sampled_from(list(ours.outputs)))
    flat = theirs.outputs[name].flat
    flat[draw.draw(st.integers(0, flat.numel() - 1))] ^= draw.draw(st.integers(1, 255))
    assert bool(ours.unlike(theirs, sealed=False))
    assert ours.differing(theirs) == name


@pytest.mark.parametrize("alone", [True, False])
def test_a_seal_tells_of_a_written_input(alone: bool) -> None:
    """Outputs agree, what is seen of the inputs does not; without the seals nobody asks."""
    bench = sums_bench()
    ours, theirs = finished(bench, alone=alone), finished(bench, alone=alone)
    theirs.arguments[bench.kernel.parameters.index("weight")][3] = 9.0
    theirs.seal()
    assert not bool(ours.unlike(theirs, sealed=False))
    assert bool(ours.unlike(theirs, sealed=True))
    assert ours.differing(theirs) == ""


@pytest.mark.parametrize("least", [0, 1 << 24])
def test_inputs_as_they_were_made_are_those_of_untouched_inputs(monkeypatch: pytest.MonkeyPatch, least: int) -> None:
    """What the reference's run is sealed with, whatever it did to the inputs itself."""
    monkeypatch.setattr(benches, "LEAST_MEMORY_BYTES", least)
    bench = sums_bench()
    ours, theirs = bench.run(good, Case("")), finished(bench)
    if ours.own:
        ours.own["x"].view.zero_()
    ours.seal_with(bench.as_made(Case("")))
    assert not bool(ours.unlike(theirs, sealed=True))


def test_a_kernel_without_inputs_has_no_seal() -> None:
    """Nothing to watch, nothing to compare."""
    run = Run(torch.zeros(0, dtype=torch.int32), {}, {}, (), (), {}, 0)
    run.clear()
    run.seal()
    run.seal_with([])
    assert not bool(run.unlike(run, sealed=True))
