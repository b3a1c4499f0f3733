"""What the benchmarks make of their readings: figures that are quoted have to be computed right."""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from kalign_core.api import recorded
from kalign_core.hal import replay, triton_compat
from kalign_core.records import Condition
from kalign_core.tuner.measure import Meter
from tests.core.scripted import FASTER, prefers, scale, scripted
from tests.core.tune_process import gone

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


@pytest.fixture
def rehearsed(benchmark: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``scale`` on a scripted device instead of operators on a GPU; graphs replay in the time that a script says."""
    script, call_of = prefers(FASTER), benchmark("regret")
    here = scripted(script)

    class Replayed(NamedTuple):
        config: Any
        launches: int = 1

        def us(self) -> float:
            return script.time_us("scale", self.config)

    monkeypatch.setattr(benchmark("replay_timing"), "replays", lambda calls, sets: {c: Replayed(c) for c in calls})
    monkeypatch.setattr(triton_compat, "code_digest", lambda compiled: compiled)
    monkeypatch.setattr(replay._Launch, "compiled", property(lambda launch: launch.scripted), raising=False)
    with here.active():
        calls = recorded(scale, *scale.inputs({"T": 4, "F": 40}, "fp32", 0, torch.device("cpu")))
        monkeypatch.setattr(call_of, "calls_of", lambda *problem: calls)
        yield here


def test_something_may_go_ahead_of_every_reading(benchmark: Callable[[str], Any]) -> None:
    """``before`` is called once ahead of each reading, never within one."""
    log: list[str] = []

    class Logged(NamedTuple):
        launches: int = 1

        def us(self) -> float:
            log.append("read")
            return 1.0

    found = benchmark("replay_timing").interleave({"a": Logged(), "b": Logged()}, 3, before=lambda: log.append("empty"))
    assert (log, found) == (["empty", "read"] * 6, {"a": [1.0] * 3, "b": [1.0] * 3})


@pytest.mark.parametrize("sets", [0, 2])
def test_what_is_judged_cold_is_read_from_an_empty_cache(
    benchmark: Callable[[str], Any], rehearsed: Any, monkeypatch: pytest.MonkeyPatch, sets: int
) -> None:
    """The judge empties the last-level cache ahead of cold readings, as the tuner does, and of no warm ones."""
    regret, log = benchmark("regret"), []
    (call,) = regret.calls_of()
    reports = [regret.tuned(rehearsed, call)]
    monkeypatch.setattr(Meter, "_cold_sets", lambda self: sets)
    monkeypatch.setattr(Meter, "evict", lambda self: log.append("emptied"))
    kind = regret.judge(rehearsed, call, reports)["kind"]
    assert (kind, len(log) > regret.FRONT_ROUNDS) == (("cold", True) if sets else ("warm", False))
    assert sets or not log


def test_a_problem_s_regret_is_measured(benchmark: Callable[[str], Any], rehearsed: Any) -> None:
    """A problem is tuned twice and judged beside every candidate: choosing the best has no regret and no twin apart."""
    regret = benchmark("regret")
    (call,) = regret.calls_of()
    found = {"label": "scale", **regret.row(rehearsed, call, twice=True)}
    assert (found["chosen"], found["again"], found["candidates"]) == (str(FASTER), [str(FASTER)], 2)
    assert (found["regret"], found["gain"], found["twins"], found["slower"]) == (0.0, 2.0, 0.0, False)
    assert json.loads(json.dumps(regret.summary([found])))["not_storable"] == []


def test_company_is_told_from_its_absence(benchmark: Callable[[str], Any], rehearsed: Any) -> None:
    """A decision made beside another process is not stored; one without what the driver says goes by the readings."""
    shared = benchmark("shared_device")
    platform = rehearsed.platform
    (alone,) = shared.tune(platform)
    platform.script.condition = Condition(foreign_processes=1)
    (beside,) = shared.tune(platform)
    assert (alone["storable"], alone["reason"]) == (True, "")
    assert (beside["storable"], beside["reason"]) == (False, "another process was on the device")
    assert shared.blind(platform).condition(-1) == Condition()


def test_what_a_step_leaves_out_is_left_out_of_the_summary(benchmark: Callable[[str], Any]) -> None:
    """Figures of the tuning's cost come from the steps that ended well."""
    tuning_cost = benchmark("tuning_cost")

    times = {"back_to_back": {"fast": {"over_best": 1.0}, "slow": {"over_best": 1.1}}}
    found = tuning_cost.summary({"wall_s": 6.0, "config": "slow"}, {"wall_s": 60.0}, times)
    assert found == {"autotune_over_kalign": 10.0, "kalign_over_best_back_to_back": 1.1}
    assert tuning_cost.summary({"error": "exit 1"}, {"wall_s": 60.0}, {}) == {}


@pytest.fixture
def decode(benchmark: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """``decode(ways)``: what a small step gives, launched that way; the same inputs every time."""
    decode_step = benchmark("decode_step")
    small = {"DEVICE": "cpu", "LAYERS": 1, "HIDDEN": 32, "FEED_FORWARD": 32, "HEADS": 2, "KV_HEADS": 1, "HEAD": 16}
    for name, value in small.items():
        monkeypatch.setattr(decode_step, name, value)
    stack, x, angles = decode_step.layers(), torch.randn(2, 32, dtype=torch.bfloat16), torch.randn(2, 8)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return lambda ways: decode_step.step(ways, stack, x, cos, sin)


def test_a_decode_step_is_the_same_whoever_launches_it(benchmark: Callable[[str], Any], decode: Any) -> None:
    """The ways that launch kalign's kernels compute the same bytes: what differs between them is the launch alone."""
    ways = benchmark("decode_ways")
    ours = decode(ways.through_kalign())
    for fire in (ways.by_triton(), ways.Autotune(60.0).fire()):
        assert torch.equal(decode(ways.through(fire)).view(torch.int16), ours.view(torch.int16))
    assert ours.any()


def test_a_decode_step_is_torch_s_as_well(benchmark: Callable[[str], Any], decode: Any) -> None:
    """torch's operators compute the same step up to their roundings."""
    ways = benchmark("decode_ways")
    assert torch.allclose(decode(ways.through_torch()), decode(ways.through_kalign()), rtol=0.1, atol=0.1)


def test_autotune_gets_the_candidates_that_kalign_tunes_from(benchmark: Callable[[str], Any], decode: Any) -> None:
    """Every candidate of every problem is timed, unless a limit leaves it out: one of each problem is timed then."""
    ways = benchmark("decode_ways")
    whole, hasty = ways.Autotune(600.0), ways.Autotune(0.0)
    for autotune in (whole, hasty):
        decode(ways.through(autotune.fire()))
    found, cut = whole.summary(), hasty.summary()
    assert found["candidates"] > 2 * found["problems"]
    assert (found["timed"], found["failed"], found["left_out"]) == (found["candidates"], 0, 0)
    assert (cut["timed"], cut["left_out"]) == (cut["problems"], found["candidates"] - found["problems"])


def test_a_candidate_that_autotune_cannot_launch_costs_itself(benchmark: Callable[[str], Any]) -> None:
    """Whatever a candidate raises is counted with its reason, and it is never the fastest."""
    autotune, row = benchmark("decode_ways").Autotune(60.0), {"timed": 0, "failed": 0, "left_out": 0, "seconds": 0.0}

    def fails() -> None:
        raise RuntimeError("no such instruction")

    timed = autotune._timing(row)
    assert (timed(fails, (0.5,))[0], timed(lambda: None, (0.5,))[0] < 1e6) == (float("inf"), True)
    assert (row["timed"], row["failed"], "no such instruction" in row["failure"]) == (1, 1, True)


@pytest.fixture
def first_launch(benchmark: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The benchmark, one process of each kind, with the environment that it changes put back."""
    monkeypatch.setenv("KALIGN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("sys.argv", ["first_launch.py", "--repeats", "1"])
    monkeypatch.setattr("sys.path", [*sys.path])
    return benchmark("first_launch")


def test_a_second_process_launches_no_candidate(first_launch: Any, capsys: Any) -> None:
    """What one process decided on serves the others: other launches than with tuning off, and no tuning begins."""
    with pytest.raises(SystemExit) as ended:
        first_launch.main()
    result = json.loads(capsys.readouterr().out)
    (decided,), (off,), (read,) = (result["processes"][step] for step in ("decide", "off", "read"))
    assert (ended.value.code, decided["on_disk"], result["tunings"], result["hits"]) == (0, True, [0], [1])
    assert read["config"] == decided["config"]
    assert result["first_call_s"]["read_minus_off"] == read["first_call_s"] - off["first_call_s"]
    assert {"open_store", "lookup", "launcher"} <= {*read["spent_ms"]}


def test_a_process_that_fails_costs_its_own_row(first_launch: Any) -> None:
    """Of a process that prints no row its last words are kept, and figures are those of the others."""
    failed = first_launch.process("--step", "no such step")
    assert failed["error"] == "exit 2, no row printed"
    assert "no such step" in failed["said_last"][-1]
    good = {"first_call_s": 0.5, "process_s": 2.0, "spent_ms": {"lookup": 3.0}}
    found = first_launch.summary({"off": [good, failed], "read": [failed]})
    assert found["first_call_s"] == {"off": 0.5, "read": None, "read_minus_off": None}
    assert found["spent_ms"] == {"off": {"lookup": 3.0}, "read": {"lookup": None}}
    assert found["hits"] == []


def test_a_failure_among_processes_is_the_benchmark_s(
    first_launch: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is known is printed though processes failed, and the exit code tells."""
    monkeypatch.setattr(first_launch, "process", lambda *arguments: {"error": "lost", "said_last": []})
    with pytest.raises(SystemExit) as ended:
        first_launch.main()
    assert (ended.value.code, json.loads(capsys.readouterr().out)["launched"]) == (1, [])


def test_what_does_not_fit_the_time_is_left_out(
    benchmark: Callable[[str], Any], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All benchmarks are named with what became of them, those there was no time for as well."""
    run_all = benchmark("run_all")
    monkeypatch.setattr("sys.argv", ["run_all.py", str(tmp_path), "--seconds", "0"])
    run_all.main()
    rows = json.loads(capsys.readouterr().out)["runs"]
    assert [row["state"] for row in rows.values()] == ["left out: no time"] * len(run_all.BENCHMARKS)


WAYS_TO_END = {
    "works": "print('{\"us\": 1}')",
    "crashes": "import os, sys; print('half', flush=True); print('no device', file=sys.stderr, flush=True); os.abort()",
    "lies": "print('no JSON')",
    "overruns": """
import subprocess, sys, time
left = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
open(sys.argv[2], "w").write('{"so_far": %d}' % left.pid)
time.sleep(600)
""",
    "last": "print('{\"us\": 2}')",
}


def test_one_that_ends_badly_costs_itself(
    benchmark: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A benchmark that crashes, prints nonsense or overruns costs its own figures, and leaves nothing behind."""
    run_all = benchmark("run_all")
    for name, source in WAYS_TO_END.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.setattr(run_all, "HERE", tmp_path)
    # Sixty seconds for those that end by themselves, nine for the one that does not.
    listed = [run_all.Benchmark(name, f"{name}.py", 3 if name == "overruns" else 20, name == "overruns")
              for name in WAYS_TO_END]  # fmt: skip
    monkeypatch.setattr(run_all, "BENCHMARKS", tuple(listed))
    monkeypatch.setattr("sys.argv", ["run_all.py", str(tmp_path / "kept")])
    run_all.main()
    result = json.loads(capsys.readouterr().out)
    rows = result["runs"]
    states = {name: row["state"] for name, row in rows.items()}
    assert states == {
        "works": "done", "crashes": "exit -6", "lies": "done", "overruns": "ended after 9 s", "last": "done",
    }  # fmt: skip
    assert (rows["works"]["printed"], rows["last"]["printed"]) == ({"us": 1}, {"us": 2})
    assert (rows["crashes"]["printed"], rows["crashes"]["said_last"]) == (None, ["no device"])
    assert rows["lies"]["printed"] is None
    assert gone([rows["overruns"]["printed"]["so_far"]])
    assert json.loads((tmp_path / "kept" / "results.json").read_text()) == result
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["results.json", "said.txt"]


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
