"""What the pages of results say was measured is what the files beside them hold, rounded to the digits shown."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def kept(name: str) -> Any:
    """A kept result of the H200."""
    return json.loads((RESULTS / f"h200-triton-{name}.json").read_text(encoding="utf-8"))


def cells(page: str, first: str, after: str = "") -> list[str]:
    """The cells of the one row of ``page``, from where it says ``after``, that begins with ``first``."""
    text = (RESULTS / page).read_text(encoding="utf-8")
    text = text[text.index(after) :]
    (row,) = (line for line in text.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in row.strip("|").split("|")]


def numbers(cell: str) -> list[str]:
    """The numbers of a cell, as they are written."""
    return re.findall(r"\d+(?:\.\d+)?", cell)


def agree(cell: str, values: list[float]) -> bool:
    """Whether a cell's first numbers are ``values``, each rounded to the digits that it is shown with."""
    shown = numbers(cell)[: len(values)]
    close = [
        abs(float(t) - v) <= 0.5 * 10 ** -len(t.partition(".")[2]) + 1e-9 for t, v in zip(shown, values, strict=True)
    ]
    return all(close)


DISPATCH = {
    "host time, swiglu into a given output, over `torch.add(out=)`": ("swiglu(out=) over torch.add(out=)",),
    "the same over Triton's launch; over warm autotune": (
        "swiglu(out=) over triton's launch", "swiglu(out=) over autotune, warm"),
    "the same on other buffers each time, over `torch.add(out=)` so": (
        "swiglu(out=), other buffers each time, over torch.add(out=) so",),
    "matmul into a given output over Triton's launch": ("matmul(out=) over triton's launch",),
    "swiglu with its output over `x + y`": ("swiglu over x + y",),
    "rms_norm with gradients over torch's": ("rms_norm with gradients over torch",),
    "a hit with 10,000 calls known over one with few": ("read with 10,000 keys known over read with few",),
}  # fmt: skip


@pytest.mark.parametrize("row", DISPATCH)
def test_host_times_are_the_kept_ones(row: str) -> None:
    """Each ratio of host times is shown for both compilers, and bold where it misses what was asked."""
    ratios = [kept(f"{version}-dispatch")["ratios"] for version in ("3.6", "3.9")]
    shown = cells("README.md", row)[2]
    assert agree(shown, [found[name]["median"] for name in DISPATCH[row] for found in ratios])
    missed = [f[name] for name in DISPATCH[row] for f in ratios if f[name]["median"] > (f[name]["asked"] or 9.0)]
    assert shown.count("**") == 2 * len(missed)


def test_modes_are_told_with_what_they_miss() -> None:
    """Off over read and tune over read are shown for both compilers, bold beyond five percent."""
    shown = cells("README.md", "modes off and tune over read, on a hit")[2]
    values = [
        kept(f"{v}-dispatch")["ratios"][f"{m} over read"]["median"] for v in ("3.6", "3.9") for m in ("off", "tune")
    ]
    assert agree(shown, values)
    assert shown.count("**") == 2 * sum(value > 1.05 for value in values)


GATE = {
    "quick, per candidate, rms_norm 4096 x 4096": ("rms_norm", 4096),
    "the same, rms_norm 1024 x 16384": ("rms_norm", 1024),
    "the same, its backward": ("rms_norm_backward", 1024),
    "the same, swiglu 4096 x 12288": ("swiglu", 4096),
    "quick, per candidate, matmul 4096^3": ("matmul", 4096),
}


@pytest.mark.parametrize("row", GATE)
def test_what_the_gate_costs_is_the_kept_result(row: str) -> None:
    """A candidate's milliseconds under the quick suite, by problem."""
    (found,) = (
        p for p in kept("3.6-gate-costs")["problems"] if (p["kernel"], next(iter(p["sizes"].values()))) == GATE[row]
    )
    assert agree(cells("gate.md", row)[4], [found["quick_per_candidate_ms"]])


@pytest.mark.parametrize(
    ("row", "names"),
    [("first check of a candidate", ("one_case_ms",)),
     ("strict, per problem", ("strict_s", "strict_with_compiling_s")),
     ("memory at the peak over the problem's own, quick; strict", ("peak_over_own", "strict_peak_over_own"))],
)  # fmt: skip
def test_the_gate_s_ranges_are_the_kept_ones(row: str, names: tuple[str, ...]) -> None:
    """The least and the most over all problems."""
    problems = kept("3.6-gate-costs")["problems"]
    bounds = [bound(p[name] for p in problems) for name in names for bound in (min, max)]
    assert agree(cells("gate.md", row)[4], bounds)


def test_regret_is_the_kept_one() -> None:
    """Problems, shares and the worst of them."""
    found = kept("3.6-regret")["summary"]
    worst, twins = 100 * found["regret_at_most"], 100 * found["twins_at_most"]
    within = [100 * found["regret_within_2_percent"], round(found["regret_within_2_percent"] * found["problems"])]
    for row, values in (
        ("problems that regret was measured of", [found["problems"]]),
        ("regret at most 2 % or the margin", within),
        ("regret at most", [worst]),
        ("two tunes of one problem, apart", [found["twins_within_2_percent"], found["tuned_twice"], twins]),
        ("tuned launches slower than the reference", [len(found["slower_than_the_reference"]), found["problems"]]),
        ("decisions not storable on a device of one's own", [len(found["not_storable"]), found["problems"]]),
        ("gain over the reference, geometric mean of the problems", [found["gain_geometric_mean"]]),
    ):
        assert agree(cells("tuning.md", row)[4], values), row


def test_first_launches_and_company_are_the_kept_ones() -> None:
    """What a second process pays, and what was stored beside another one."""
    first, shared = kept("3.6-first-launch"), kept("3.6-shared-device")
    first_call = cells("tuning.md", "first call in a second process, tuned (mode read) over mode off")[4]
    assert agree(first_call, [1000 * first["first_call_s"]["read_minus_off"]])
    assert (first["launched"], first["tunings"], first["hits"]) == ([1], [0], [1])
    assert (shared["stored_beside"], shared["stored_beside_blind"]) == (0, 0)


def test_the_trial_of_early_launches_is_the_kept_one() -> None:
    """Every case of the trial, in turn and early, cold and warm."""
    for case in kept("3.6-trial-overlap")["cases"]:
        for cell, way in zip(
            cells("operators-rowwise.md", case["name"], "**Early launches**")[1:],
            ("reference", "pdl", "pdl1"),
            strict=True,
        ):
            assert agree(cell, [case["times"][way]["us"], case["warm"][way]["us"]]), (case["name"], way)


TUNED = {
    "rms_norm forward 65536 x 128": "rms_norm T<=65536 H=128 train",
    "softmax 4096 x V": "softmax_long T<=4096 V=151936 train",
    "log_softmax 4096 x V": "log_softmax_long T<=4096 V=151936 train",
    "softmax backward 4096 x V": "softmax_long_backward T<=4096 V=151936 train",
}


@pytest.mark.parametrize("row", TUNED)
def test_row_wise_launches_that_were_tuned_are_the_kept_ones(row: str) -> None:
    """Reference, choice and best of its candidates, from the run that regret was measured in."""
    shown = cells("operators-rowwise.md", row, "## Tuned")
    (problem,) = (p for p in kept("3.6-regret")["problems"] if p["label"] == TUNED[row])
    pace = problem["paces"]["back to back"]
    for cell, name in zip(shown[2:], ("reference_us", "chosen_us", "best_us"), strict=True):
        assert agree(cell, [pace[name]]), (row, name)


WAYS = {
    "kalign, tuned": "kalign tuned", "kalign, mode off": "kalign off", "the same kernels, Triton's launch": "triton",
    "`@triton.autotune`, warm, over kalign's candidates": "triton.autotune, warm", "torch's operators": "torch",
}  # fmt: skip


@pytest.mark.parametrize("row", WAYS)
def test_the_decode_step_is_the_kept_one(row: str) -> None:
    """Milliseconds of each way, eager and captured, for one token and for sixteen."""
    step = kept("3.6-decode-step")
    times = [step[tokens][WAYS[row]][how] for tokens in ("M=1", "M=16") for how in ("eager_us", "captured_us")]
    for cell, us in zip(cells("tuning.md", row)[1:], times, strict=True):
        assert agree(cell, [us / 1000])


def test_kept_results_are_all_named() -> None:
    """Every file of the folder has a page or stands on one, and every file that a page names is there."""
    text = "".join(page.read_text(encoding="utf-8") for page in RESULTS.glob("*.md"))
    files = {path.name for path in RESULTS.glob("*.json")}
    pages = {path.stem for path in RESULTS.glob("*.md")}
    assert {name for name in files if name not in text and Path(name).stem not in pages} == set()
    assert set(re.findall(r"`((?:h200|cpu|cache)-[\w.-]+\.json)`", text)) <= files


IDEAS, NO_HELP = "3.6-trial-rowwise", "3.6-trial-long-rows"
TRIALS = {
    "as it is": (IDEAS, "softmax", ("now",)),
    "three of ten steps held": (IDEAS, "softmax", ("h3a0s1",)),
    "two held, one ahead": (IDEAS, "softmax", ("h2a1s1",)),
    "none held, one ahead": (IDEAS, "softmax", ("h0a1s1",)),
    "held, 8; 4; 16 warps": (IDEAS, "softmax backward 8192", ("w8--a0p0", "w4--a0p0", "w16--a0p0")),
    "read anew, 8 warps": (IDEAS, "softmax backward 8192", ("w8--a1p0",)),
    "read anew, 4; 16 warps": (IDEAS, "softmax backward 8192", ("w4--a1p0", "w16--a1p0")),
    "x and residual twice, 16 warps": (IDEAS, "rms long residual", ("s1w16b0evict_last.cs",)),
    "h back, 16 warps; 8 warps": (IDEAS, "rms long residual", ("s1w16b1evict_first", "s1w8b1evict_first")),
    "4 warps, 264 programs, 4 steps ahead": (NO_HELP, "softmax log=False", ("f1.4.4.264",)),
    "16 warps, 132 programs, 4 steps ahead": (NO_HELP, "softmax log=False", ("f1.4.16.132",)),
    "stripes of 64; 128; 512 rows": (NO_HELP, "stripes log=False", ("g64", "g128", "g512")),
    "no stripes, everything from memory twice": (NO_HELP, "stripes log=False", ("g4096",)),
    "two blocks of 16 rows a program; four": (NO_HELP, "rms backward 4096x8192", ("new bl2s3w8r0", "new bl4s3w8r0")),
    "at most 128 registers": (NO_HELP, "rms backward 4096x8192", ("new bl1s3w8r128",)),
}


@pytest.mark.parametrize("launch", TRIALS)
def test_trials_of_row_wise_kernels_are_the_kept_ones(launch: str) -> None:
    """What each launch of a trial took."""
    file, case, names = TRIALS[launch]
    rows = [row["us"] for row in kept(file)["rows"] if (row["case"], row["kind"]) == (case, "cold")]
    (found,) = (us for us in rows if set(names) <= set(us))
    text = (RESULTS / "operators-rowwise.md").read_text(encoding="utf-8")
    (line,) = (line for line in text.splitlines() if f"| {launch} |" in line)
    assert agree(line.strip("|").split("|")[2], [found[name] for name in names])
