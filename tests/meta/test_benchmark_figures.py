"""What the benchmarks make of their readings: figures that are quoted have to be computed right."""

from __future__ import annotations

import importlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Imports a benchmark by name, with its folder on the path as when it runs."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_a_share_is_free_of_what_its_round_has_in_common(benchmark: Callable[[str], Any]) -> None:
    """Shares compare within rounds: a clock that moves under all alike leaves no deviation."""
    replay_timing = benchmark("replay_timing")

    found = replay_timing.shares({"a": [100.0, 130.0, 90.0], "b": [200.0, 260.0, 180.0]})
    assert found["b"][0] / found["a"][0] == pytest.approx(2.0)
    assert found["a"][1] == pytest.approx(0.0)


def test_regret_is_of_the_choice_over_the_best(benchmark: Callable[[str], Any]) -> None:
    """Regret is how much longer the choice takes than the fastest, and slower means beyond 1 % of the reference."""
    regret = benchmark("regret")

    readings = {"home": [100.0] * 3, "chosen": [102.0] * 3, "best": [50.0] * 3}
    found = regret._figures(readings, "home", ["chosen", "best"])
    assert (found["regret"], found["gain"]) == (pytest.approx(1.04), pytest.approx(100 / 102))
    assert (found["slower"], found["twins"]) == (True, [pytest.approx(50 / 102)])
    assert not regret._figures({**readings, "chosen": [100.5] * 3}, "home", ["chosen"])["slower"]


def test_the_summary_counts_what_was_asked_for(benchmark: Callable[[str], Any]) -> None:
    """A problem within its margin counts as within 2 %; those not measured are told apart."""
    regret = benchmark("regret")

    def row(share: float, **said: Any) -> dict[str, Any]:
        plain = {
            "label": "p",
            "regret": share,
            "margin": 0.02,
            "gain": 1.5,
            "slower": False,
            "twins": None,
            "reason": "",
        }
        return {**plain, **said}

    rows = [row(0.01), row(0.03), row(0.03, margin=0.04), row(0.07, slower=True, twins=0.03), {"error": "no"}]
    found = regret.summary(rows)
    assert (found["problems"], found["not_measured"]) == (4, 1)
    assert (found["regret_within_2_percent"], found["within_5_percent"], found["regret_at_most"]) == (0.5, 3, 0.07)
    assert (found["slower_than_the_reference"], found["twins_within_2_percent"]) == (["p"], 0)


def test_what_a_step_leaves_out_is_left_out_of_the_summary(benchmark: Callable[[str], Any]) -> None:
    """Figures of the tuning's cost come from the steps that ended well."""
    tuning_cost = benchmark("tuning_cost")

    times = {"back_to_back": {"fast": {"over_best": 1.0}, "slow": {"over_best": 1.1}}}
    found = tuning_cost.summary({"wall_s": 6.0, "config": "slow"}, {"wall_s": 60.0}, times)
    assert found == {"autotune_over_kalign": 10.0, "kalign_over_best_back_to_back": 1.1}
    assert tuning_cost.summary({"error": "exit 1"}, {"wall_s": 60.0}, {}) == {}


def test_a_decode_step_is_the_same_whoever_launches_it(
    benchmark: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ways that are compared compute the same bytes: what differs between them is the launch alone."""
    import torch

    decode_step = benchmark("decode_step")
    small = {"DEVICE": "cpu", "LAYERS": 1, "HIDDEN": 32, "FEED_FORWARD": 32, "HEADS": 2, "KV_HEADS": 1, "HEAD": 16}
    for name, value in small.items():
        monkeypatch.setattr(decode_step, name, value)
    stack, x, angles = decode_step.layers(), torch.randn(2, 32, dtype=torch.bfloat16), torch.randn(2, 8)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    ours = decode_step.step(decode_step.through_kalign(), stack, x, cos, sin)
    theirs = decode_step.step(decode_step.through(decode_step.by_triton(tuned=False)), stack, x, cos, sin)
    assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))
    assert not torch.equal(ours, x)


def test_what_does_not_fit_the_time_is_left_out(benchmark: Callable[[str], Any], tmp_path: Path, capsys: Any) -> None:
    """All benchmarks are named with what became of them, those there was no time for as well."""
    run_all = benchmark("run_all")
    run_all.sys.argv, before = ["run_all.py", str(tmp_path), "--seconds", "0"], run_all.sys.argv
    try:
        run_all.main()
    finally:
        run_all.sys.argv = before
    rows = json.loads(capsys.readouterr().out)["runs"]
    assert [row["state"] for row in rows.values()] == ["left out: no time"] * len(run_all.BENCHMARKS)


def test_every_benchmark_of_the_list_is_there(benchmark: Callable[[str], Any]) -> None:
    """The list names scripts that exist, each once."""
    scripts = [entry.command.split()[0] for entry in benchmark("run_all").BENCHMARKS]
    assert [script for script in scripts if not (BENCHMARKS / script).is_file()] == []


def test_simulated_tunings_are_the_same_every_time(benchmark: Callable[[str], Any]) -> None:
    """The same seeds give the same figures, and on a device without noise the best is chosen up to the margin."""
    simulated = benchmark("simulated_tunes")
    noisy, still = simulated.WEATHERS["1 %"], simulated.Weather(spread=0.0)
    first, again = (simulated.simulate(noisy, 26, simulated.EFFORTS["normal"]) for _ in range(2))
    assert first == again
    found = simulated.simulate(still, 26, simulated.EFFORTS["normal"])
    assert (found["within_2_percent_or_the_margin"], found["slower_than_the_reference"]) == (1.0, 0)
    assert simulated.table({"none": found}).splitlines()[2].startswith("| none | ")


def test_a_simulated_reading_is_what_its_weather_says(benchmark: Callable[[str], Any]) -> None:
    """Drift and a second clock lengthen readings as far as they are said to, and time passes with every reading."""
    simulated = benchmark("simulated_tunes")
    weather = simulated.Weather(spread=0.0, drift_per_s=0.5, clocks=(2.0,))
    device = simulated.Device(weather, random.Random(0))  # not a secret
    assert device.read(10.0, 100) == 20.0
    device.rest(2.0 - device.now_s)
    assert device.read(10.0, 100) == pytest.approx(40.0)
    assert device.now_s == pytest.approx(2.0 + 40.0 * 100 * 1e-6 + simulated.OVERHEAD_S)


def test_damage_to_a_store_s_file_is_counted(benchmark: Callable[[str], Any]) -> None:
    """The benchmark of the store makes its decisions, and reads their damaged file without an exception."""
    found = benchmark("cache_durability").damage(random.Random(0))  # not a secret
    assert found["cases"] > 500
    assert (found["wrong_entries"], found["exceptions"], found["first_exception"]) == (0, 0, "")
