"""The operator table as far as no device is needed: peers compute what we do, aims are those that were set, ratios."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SHARES = {
    "swiglu forward": [0.98],
    "swiglu backward": [0.92],
    "rms_norm forward": [0.90, 0.90, 0.82],
    "rms_norm with residual": [0.90, 0.90],
    "rms_norm backward": [0.78, 0.78],
    "rope forward": [0.88],
    "rope backward": [0.88],
    "rope interleaved forward": [0.88],
    "softmax forward": [0.88, 0.75],
    "log_softmax forward": [0.88, 0.75],
    "selected_logprob forward": [0.80],
    "selected_logprob backward": [0.80],
}
MICROSECONDS = {"rms_norm forward": [8.0], "selected_logprob forward": [10.0]}


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a benchmark by name, with its folder on the path as when it runs."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def cases(benchmark: Callable[[str], Any]) -> dict[str, Any]:
    """The table's cases, the first of each operator and direction, by both."""
    found: dict[str, Any] = {}
    for case in benchmark("operators").cases():
        found.setdefault(f"{case.op} {case.what}", case)
    return found


def tensors(result: Any) -> list[torch.Tensor]:
    return [t for t in (result if isinstance(result, (tuple, list)) else (result,)) if t is not None]


# --- cases ----------------------------------------------------------------------------------------------------------


def test_peers_compute_what_we_do(cases: dict[str, Any]) -> None:
    """torch's way and what torch.compile is given have our results: what is timed together is the same work."""
    for name, case in cases.items():
        arguments = case.make(0)
        ours = tensors(case.ours(*arguments))
        # Some of torch's own gradients are there for devices alone; the formula beside them is not.
        calls = [case.compiled, None if name == "rms_norm backward" else case.torch]
        assert any(calls), name
        for theirs in (tensors(call(*arguments)) for call in calls if call):
            assert len(theirs) == len(ours), name
            for a, b in zip(ours, theirs, strict=True):
                size = max(1.0, float(b.double().abs().max()))
                torch.testing.assert_close(a.double(), b.double(), rtol=0.02, atol=0.02 * size, msg=name)


def test_arguments_follow_their_seed(cases: dict[str, Any]) -> None:
    """Cold readings go round different sets of the same shapes."""
    for name, case in cases.items():
        one, other = (tensors(case.make(seed)) for seed in (1, 2))
        assert [t.shape for t in one] == [t.shape for t in other], name
        assert any(not torch.equal(a, b) for a, b in zip(one, other, strict=True)), name


def test_aims_are_those_that_were_set(benchmark: Callable[[str], Any]) -> None:
    """Every share of copy bandwidth, every microsecond and every speed that was asked for is a case's aim."""
    shares: dict[str, list[float]] = {}
    microseconds: dict[str, list[float]] = {}
    raced = set()
    for case in benchmark("operators").cases():
        for aim in case.aims:
            name = f"{case.op} {case.what}"
            if aim.over:
                assert (aim.over, aim.ratio, aim.kind) == ("torch.compile", 1.1, "cold")
                raced.add(name)
            elif aim.share:
                assert aim.kind == "cold"
                shares.setdefault(name, []).append(aim.share)
            else:
                assert aim.kind == "warm"
                microseconds.setdefault(name, []).append(aim.us)
    assert (shares, microseconds) == (SHARES, MICROSECONDS)
    assert raced == {
        *(f"ratio_kl {way} {dtype}" for way in ("forward", "backward") for dtype in ("bf16", "fp32")),
        *(f"grpo_loss {way} {dtype}" for way in ("token forward", "backward") for dtype in ("bf16", "fp32")),
        "grpo_loss sequence forward bf16",
    }


def test_every_operator_of_the_table_has_its_peers(cases: dict[str, Any]) -> None:
    """torch, eager and compiled, stands beside each; Liger where it has the operator."""
    assert [name for name, case in cases.items() if case.torch is None] == []
    assert {name for name, case in cases.items() if "liger" in case.others} == {
        "swiglu forward", "swiglu backward", "rope forward", "rope backward", "rms_norm forward",
        "rms_norm with residual", "rms_norm backward", "softmax forward", "selected_logprob forward",
        "embedding forward", "embedding backward",
    }  # fmt: skip


# --- what is said of them -------------------------------------------------------------------------------------------


def test_ratios_are_of_medians_and_a_peer_wins_by_more_than_its_margin(benchmark: Callable[[str], Any]) -> None:
    """Tuned over reference and the best peer over both; a peer within 3 % of ours does not win."""
    report, aims = benchmark("operator_report"), benchmark("operator_cases").Aim
    times = {
        kind: {
            "reference": {"us": 12.0, "share": 0.5}, "tuned": {"us": ours, "share": 0.6},
            "torch": {"us": 20.0, "share": 0.3}, "torch.compile": {"us": 10.0, "share": 0.6},
        }
        for kind, ours in (("cold", 10.2), ("warm", 10.4))
    }  # fmt: skip
    case = SimpleNamespace(
        aims=(aims(share=0.6), aims(us=10.0, kind="warm"), aims(over="torch.compile", ratio=0.98), aims(over="liger"))
    )
    found = report.figures(case, times, ["torch", "torch.compile"])
    assert found["ratios"]["cold"] == {
        "reference_over_tuned": 1.176, "best_peer": "torch.compile", "best_peer_over_tuned": 0.98,
        "best_peer_over_reference": 0.833,
    }  # fmt: skip
    assert found["peer_wins"] == [{"kind": "warm", "peer": "torch.compile", "ours_over_peer": 1.04}]
    assert [(aim["value"], aim["met"]) for aim in found["aims"]] == [
        (0.6, True), (10.4, False), (0.98, True), (None, None),
    ]  # fmt: skip
    assert found["aims"][1]["ask"] == "at most 10.0 us, warm"


def test_bit_classes_are_counted_by_kernel(benchmark: Callable[[str], Any]) -> None:
    """Candidates whose bytes differed make a class of their own, at least."""
    found = benchmark("operator_report").bit_classes([
        {"kernel": "a", "tried": "refused=4 failed=1 refuted=0 timed=20"},
        {"kernel": "b", "tried": "refused=0 failed=0 refuted=3 timed=2"},
        {"kernel": "c", "tried": ""},
    ])  # fmt: skip
    assert found == {"a": {"launches": 20, "classes": 1}, "b": {"launches": 5, "classes": "2 or more (3 differ)"}}


def test_the_summary_names_what_was_missed(benchmark: Callable[[str], Any]) -> None:
    """Aims met are counted, those missed or without their peer are named, and so are cases that did not run."""
    rows = [
        {"name": "a", "aims": [{"ask": "x", "value": 1, "met": True}, {"ask": "y", "value": 2, "met": False}],
         "peer_wins": [{"kind": "cold", "peer": "torch", "ours_over_peer": 1.1}], "bits_equal": False},
        {"name": "b", "aims": [{"ask": "z", "value": None, "met": None}]},
        {"name": "c", "error": "RuntimeError"},
        {"name": "d", "not_run": "no time"},
    ]  # fmt: skip
    assert benchmark("operator_report").summary(rows) == {
        "aims": 3, "met": 1, "missed": ["a: y, is 2"], "without_their_peer": ["b: z"],
        "peer_wins": ["a, cold: torch by 1.1"], "bits_differ": ["a"], "failed": ["c"], "not_run": ["d"],
    }  # fmt: skip


# --- the run --------------------------------------------------------------------------------------------------------


@pytest.fixture
def printed(benchmark: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Callable[..., Any]:
    """``printed(attempt, *options)`` runs the table with ``attempt`` for a case; gives what it printed."""

    def run(attempt: Callable[..., Any], *options: str) -> Any:
        operators = benchmark("operators")
        monkeypatch.setattr(operators, "attempt", attempt)
        monkeypatch.setattr(operators, "end_after", lambda _: None)  # it would end this process
        monkeypatch.setattr(operators.sys, "argv", ["operators.py", "--group", "pointwise", *options])
        monkeypatch.setenv("KALIGN_CACHE_DIR", "")
        with contextlib.suppress(SystemExit):
            operators.main()
        return json.loads(capsys.readouterr().out)

    return run


def test_cases_that_there_is_no_time_for_are_named(printed: Callable[..., Any]) -> None:
    """Without time left no case is begun, and every one is named."""
    made = printed(None, "--seconds", "0")
    assert {row["not_run"] for row in made["cases"]} == {"no time"}
    assert made["summary"]["not_run"] == [row["name"] for row in made["cases"]]
    assert made["rehearsal"] is not torch.cuda.is_available()


def test_a_run_that_is_ended_prints_what_it_has(printed: Callable[..., Any]) -> None:
    """Ended within its second case a run still prints one object, with the first case and the names of the others."""
    begun: list[str] = []

    def attempt(case: Any, *_: Any) -> dict[str, Any]:
        begun.append(case.name)
        if len(begun) == 2:
            raise SystemExit
        return {"name": case.name}

    rows = printed(attempt, "--seconds", "1e9")["cases"]
    assert [row.get("not_run") for row in rows] == [None] + ["ended"] * (len(rows) - 1)
    assert len({row["name"] for row in rows}) == len(rows) > 2


# --- what was kept --------------------------------------------------------------------------------------------------

RESULTS = BENCHMARKS / "results"
NUMBER = r"([\d.]+)"
ROW = re.compile(
    rf"^\| ([\w ]+ [\dx]+) \| [^|]* \| {NUMBER} \({NUMBER}\) \| {NUMBER} \({NUMBER}\) \| {NUMBER} \| ([\w.]+) {NUMBER} "
    rf"\| {NUMBER} \| {NUMBER} \| (yes|no) \| ([^|]*) \|$",
    re.MULTILINE,
)
PAGES = {
    "operators-pointwise.md": ("operators-pointwise",),
    "operators-rowwise.md": ("operators-rowwise", "operators-rowwise-gradient"),
}


@pytest.mark.parametrize("page", PAGES)
def test_the_published_table_is_the_kept_runs(page: str) -> None:
    """Every cold figure on a page of operators is a kept run's, and none of the cases that ran is left out."""
    names = [RESULTS / f"h200-triton-3.6-{name}.json" for name in PAGES[page]]
    runs = [json.loads(name.read_text(encoding="utf-8")) for name in names]
    cases = [case for run in runs for case in run["cases"] if "not_run" not in case]
    text = (RESULTS / page).read_text(encoding="utf-8")
    shown = {row[0]: row[1:] for row in ROW.findall(text)}
    assert list(shown) == [case["name"] for case in cases]
    for case in cases:
        times, ratios = case["times"]["cold"], case["ratios"]["cold"]
        ours, tuned, peer = times["reference"], times["tuned"], ratios["best_peer"]
        kept = (ours["us"], ours["share"], tuned["us"], tuned["share"], ratios["reference_over_tuned"],
                times[peer]["us"], ratios["best_peer_over_reference"], ratios["best_peer_over_tuned"])  # fmt: skip
        *figures, bits, met = shown[case["name"]]
        assert (figures.pop(5), bits) == (peer, "yes" if case["bits_equal"] else "no")
        assert met.count("**no: ") >= sum(not aim["met"] for aim in case["aims"])
        for said, value in zip(figures, kept, strict=True):
            assert abs(float(said) - value) <= 0.5 * 10 ** -len(said.partition(".")[2]) + 1e-9, (case["name"], said)
    met, aims = (sum(run["summary"][name] for run in runs) for name in ("met", "aims"))
    assert f"**{met} of {aims}" in text
