"""The benchmark that holds the gate's verdicts beside bit classes: what it counts, and what it calls the same code."""

from __future__ import annotations

import json
import re
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kalign_core import hal, ops
from kalign_core.records import Config, Refutation
from kalign_core.tuner.targets import calls_of, session_for, target_named
from kalign_core.verifier.variants import dense_problem, variant
from tests.core.scripted import scripted

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
ONE, TWO, FOUR = (Config(BLOCK=64, num_warps=warps) for warps in (1, 2, 4))
WRONG = Refutation("input families", "bytes differ")


@pytest.fixture
def bench_modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark's modules, as its script imports them."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bit_class_report
    import bit_classes
    import known_spaces

    modules = (bit_class_report, bit_classes, known_spaces)
    return types.SimpleNamespace(**{module.__name__: module for module in modules})


def verdict(refutation: Refutation | None) -> Any:
    return types.SimpleNamespace(refutation=refutation)


def test_the_same_code_is_compared_once(bench_modules: Any) -> None:
    """Of configurations that run the same instructions on as many warps the first stands for all."""
    codes = {ONE: "a", ONE.replace(BLOCK=128): "a", TWO: "b", TWO.replace(BLOCK=128): "b", FOUR: "a"}
    assert bench_modules.bit_classes.distinct(codes, ONE) == [TWO, FOUR]


def test_disagreement_of_the_two_methods_is_named(bench_modules: Any) -> None:
    """A candidate refuted though its digests are the reference's, or let pass though they are not, is listed."""
    found = bench_modules.bit_classes.agreement(
        ONE, {TWO: verdict(WRONG), FOUR: verdict(None)}, {ONE: ["x=1"], TWO: ["x=1"], FOUR: ["x=2"]}
    )
    assert found["refuted_of_equal_digest"] == [f"{TWO}: {WRONG}"]
    assert found["not_refuted_of_other_digest"] == [str(FOUR)]
    assert (found["classes"], found["class_sizes"]) == (2, [2, 1])


def test_agreement_of_the_two_methods_is_silent(bench_modules: Any) -> None:
    """What differs is refuted and what is equal is not: nothing to report."""
    found = bench_modules.bit_classes.agreement(
        ONE, {TWO: verdict(None), FOUR: verdict(WRONG)}, {ONE: ["x=1"], TWO: ["x=1"], FOUR: ["x=2"]}
    )
    assert found["refuted_of_equal_digest"] == found["not_refuted_of_other_digest"] == []
    assert (found["refuted"], found["not_refuted"], found["refuted_by"]) == (1, 1, {"input families": 1})


def test_two_results_are_compared_problem_by_problem(bench_modules: Any, tmp_path: Path) -> None:
    """Digests of the same kernel and problem are equal or different; what only one run has is counted."""
    kept = {"machine": {"triton": "3.6.0"}, "suite": "s", "spaces": [row("a", "1"), row("b", "2"), row("c", "3")]}
    (tmp_path / "kept.json").write_text(json.dumps(kept))
    found = bench_modules.bit_class_report.compared_with([row("a", "1"), row("b", "9")], tmp_path / "kept.json")
    assert found["counts"] == {"operator: different": 1, "operator: equal": 1}
    assert (found["only_here"], found["only_there"]) == (0, 1)


def compared(kernel: str, *codes: str, knobs: dict[str, list[int]]) -> dict[str, Any]:
    counts = dict.fromkeys(("candidates", "refused_by_limits", "identical_code", "compared", "refuted"), 1)
    return {
        "kind": "operator", "kernel": kernel, "problem": "T=1", "codes": list(codes), "knobs": knobs, "classes": 1,
        "failed": [], "unlaunchable": {}, "refuted_of_equal_digest": [], "not_refuted_of_other_digest": [],
        "not_refuted": 0, **counts,
    }  # fmt: skip


def test_two_codes_of_a_kernel_are_one_pair(bench_modules: Any) -> None:
    """What another space of the same kernel has compared already is not counted again, another kernel's is."""
    rows = [
        compared("a", "r", "x", knobs={}),
        compared("a", "r", "x", "y", knobs={}),
        compared("b", "r", "x", knobs={}),
    ]
    found = bench_modules.bit_class_report.summary(rows)
    assert [(own["kernel"], own["pairs_of_different_code"]) for own in found["kernels"]] == [("a", 2), ("b", 1)]
    assert found["kinds"]["operator"]["compared"] == 3


def test_a_knob_that_never_changes_the_code_is_inert(bench_modules: Any) -> None:
    """A knob that changed it once, in whichever space, is not."""
    rows = [compared("a", "r", knobs={"S": [2, 0], "W": [2, 0]}), compared("a", "r", knobs={"S": [1, 0], "W": [1, 1]})]
    found = bench_modules.bit_class_report.summary(rows)
    assert (found["inert_knobs"], found["knobs"]) == (["a.S"], {"a": {"S": [3, 0], "W": [3, 1]}})


def row(kernel: str, digest: str) -> dict[str, Any]:
    return {"kind": "operator", "kernel": kernel, "problem": "T=1", "digests": [f"normals={digest}"]}


def test_the_tiles_of_the_product_are_the_same_everywhere(bench_modules: Any) -> None:
    """356 launches of the product fit a Hopper board, for either dtype, none of them the reference."""
    (model,) = (m for record in hal.plugins.platforms() for m in record.models if m.arch == "sm_90")
    with scripted().active():
        place = bench_modules.known_spaces.Place(Hopper(model), 0, small=False)
        spaces = list(bench_modules.known_spaces.matmul_tiles(place))
    assert [len(space.configs) for space in spaces] == [356, 356]
    assert all(space.kernel.reference_config(space.problem) not in space.configs for space in spaces)


class Hopper:
    """What laying out spaces asks of a session, on a platform that has ``model``."""

    def __init__(self, model: Any) -> None:
        self.plugins = hal.plugins
        self.platform = types.SimpleNamespace(name="cuda", device_type="cpu", model=lambda device: model)


RESULTS = BENCHMARKS / "results"


def kept(name: str) -> Any:
    return json.loads((RESULTS / f"h200-triton-{name}.json").read_text(encoding="utf-8"))


def test_the_published_tables_are_those_of_the_kept_results(bench_modules: Any) -> None:
    """What the page of bit classes shows is what the report makes of the results beside it."""
    report, text = bench_modules.bit_class_report, (RESULTS / "bit-classes.md").read_text(encoding="utf-8")
    assert report.tables(kept("3.6-bit-classes")) in text
    assert report.bad_table([kept("3.6-bad-kernels"), kept("3.9-bad-kernels")]) in text


def test_the_published_figures_are_the_kept_ones(bench_modules: Any) -> None:
    """The aims' measured column repeats the kept results."""
    rows = kept("3.6-bit-classes")["spaces"]
    found = bench_modules.bit_class_report.summary(rows)
    text = (RESULTS / "bit-classes.md").read_text(encoding="utf-8")
    kinds, against = found["kinds"], kept("3.9-bit-class-references")["against"]["problems"]
    disagree = sum(k["refuted_of_equal_digest"] + k["not_refuted_of_other_digest"] for k in kinds.values())
    pairs = sum(kinds[kind]["pairs_of_different_code"] for kind in ("known equal", "operator"))
    alike = [each["equal"] for each in against if not each["kernel"].startswith("naive")]
    for said in (
        f"| {kinds['known equal']['refuted']} of {kinds['known equal']['compared']:,} |",
        f"| {kinds['operator']['refuted']} of {kinds['operator']['compared']:,} |",
        f"| {disagree} of {sum(kind['compared'] for kind in kinds.values()):,} |",
        f"| {pairs:,} |",
        f"{sum(alike)} problems of operator kernels",
    ):
        assert said in text, said
    assert (all(alike), found["inert_knobs"]) == (True, [])


def test_kernels_that_fall_short_are_published(bench_modules: Any) -> None:
    """Every operator kernel of which fewer candidates were compared than asked for is on the page, with the number."""
    result, text = kept("3.6-bit-classes"), (RESULTS / "bit-classes.md").read_text(encoding="utf-8")
    least = bench_modules.known_spaces.LEAST_OF_ONE_KERNEL
    own = [k for k in bench_modules.bit_class_report.summary(result["spaces"])["kernels"] if k["kind"] == "operator"]
    short = {k["kernel"]: k["compared"] for k in own if k["compared"] < least}
    said = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (\d+) \| [^|]+ \|$", text, re.MULTILINE)
    assert {name: int(number) for names, number in said for name in re.findall(r"\w+", names)} == short
    assert f"{len(short)} of the {len(own)} operator kernels have fewer than {least}" in text
    assert f"{len(result['not_run'])} spaces were left out for time" in text


def test_a_sample_of_a_space_is_taken_from_all_of_it(bench_modules: Any) -> None:
    """Long lists are thinned evenly, short ones kept whole."""
    configs = [Config(BLOCK=number, num_warps=1) for number in range(64)]
    assert bench_modules.known_spaces.spread(configs) == tuple(configs[::2])
    assert bench_modules.known_spaces.spread(configs[:3]) == tuple(configs[:3])


def test_kernels_with_few_knobs_are_looked_at_in_other_layouts(bench_modules: Any) -> None:
    """Problems of a kernel that has its candidates are left as they are; others also come unaligned and uneven."""
    known, kernel = bench_modules.known_spaces, ops.swiglu.kernels[0]
    problem = dense_problem(kernel, {"T": 4, "F": 64}, dict.fromkeys(kernel.args, "bf16"))
    others = list(known.laid_out_otherwise([(kernel, problem)], {kernel: 63}, 64))
    unaligned, uneven = (variant(kernel, problem, name) for name in ("unaligned", "uneven"))
    assert unaligned is not None
    both = variant(kernel, unaligned, "uneven")
    assert others == [(kernel, unaligned), (kernel, uneven), (kernel, both)]
    assert list(known.laid_out_otherwise([(kernel, problem)], {kernel: 64}, 64)) == []


@pytest.fixture
def hopper(bench_modules: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An H200 to lay spaces out for, which need not be there: its limits and the calls it would be posed."""
    target = target_named(hal.plugins, "cuda:sm_90")
    here = session_for(target, hal.plugins)
    monkeypatch.setattr(
        bench_modules.known_spaces, "recorded_forms", lambda op, sizes, dtype, device: calls_of(here, op, sizes, dtype)
    )
    with here.active():
        yield bench_modules.known_spaces.Place(here, -1, small=False)


def test_every_tunable_kernel_gets_its_candidates_or_the_reason(bench_modules: Any, hopper: Any) -> None:
    """Sixty candidates for each kernel that any operator runs, in whatever form; those with fewer are told, and why."""
    known = bench_modules.known_spaces
    spaces = known.plan(hopper, bench_modules.bit_classes.MOST_PAIRS)
    counts = Counter(s.kernel.name for s in spaces for _ in s.configs if s.kind in (known.EQUAL, known.OPERATOR))
    every = {kernel.name for op in ops.operators() for kernel in op.kernels}
    short = {name for name in every if counts[name] < known.LEAST_OF_ONE_KERNEL}
    told = known.shortfalls(spaces)
    assert {row["kernel"]: row["configurations"] for row in told} == {name: counts[name] for name in short}
    assert short == {"grpo_loss_fold"}
    assert "at most 8 configurations a problem beside the reference" in told[0]["why"]


def test_a_kernel_that_no_call_poses_is_told(bench_modules: Any) -> None:
    """Nothing is left out in silence."""
    rows = {row["kernel"]: row for row in bench_modules.known_spaces.shortfalls([])}
    assert rows["swiglu"] == {"kernel": "swiglu", "configurations": 0, "why": "no call poses it"}


def test_kernels_short_of_candidates_go_first_when_a_run_is_resumed(bench_modules: Any) -> None:
    """What was compared counts by kernel and kind; a space without candidates is never in a hurry."""
    compared, least = bench_modules.bit_classes.compared_of, bench_modules.known_spaces.LEAST_OF_ONE_KERNEL
    rows = [
        {"kind": "operator", "kernel": "long", "compared": least},
        {"kind": "operator", "kernel": "short", "compared": 5},
        {"kind": "operator", "kernel": "short", "error": "could not be launched"},
        {"kind": "known equal", "kernel": "short", "compared": 99},
    ]

    def space(kernel: str, *configs: Config) -> Any:
        return types.SimpleNamespace(kind="operator", kernel=types.SimpleNamespace(name=kernel), configs=configs)

    assert [compared(rows, space(name, ONE)) for name in ("long", "short", "new")] == [least, 5, 0]
    assert compared(rows, space("new")) > least
