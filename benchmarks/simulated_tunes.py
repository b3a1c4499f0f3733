"""What the tuner's rule makes of noise: thousands of tunings on devices that are a few lines of arithmetic.

Prints one JSON object. ``python benchmarks/simulated_tunes.py [--tunes N] [--only NAME] [--table FILE]`` tunes fields
of candidates whose true times are known, from nothing, with the tuner's own meter, search and decision rule. Time,
readings and noise are simulated, so the same seeds give the same figures on every machine. Fields have the shapes that
were measured on an H200 and are kept in ``results/``, at several scales; any of their candidates may be the reference.

``regret`` is how much longer the choice truly takes than the field's best; a choice is within its margin where that is
at most 2 %, or what the rule asked a challenger of the reference for. ``slower`` counts choices that truly take longer
than the reference they replaced, ``not raced`` those whose best was no finalist, ``unstored`` tunings that the tuner
itself holds for spoiled.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent)]

from kalign_core.hal.base import Sampler  # noqa: E402
from kalign_core.records import Condition  # noqa: E402
from kalign_core.testing.field import Field  # noqa: E402
from kalign_core.tuner import search  # noqa: E402
from kalign_core.tuner.decide import PROMOTE_SHARE, SPREADS, spoiled, winner  # noqa: E402
from kalign_core.tuner.loop import RACES  # noqa: E402
from kalign_core.tuner.measure import timing  # noqa: E402
from kalign_core.tuner.report import EFFORTS, Effort  # noqa: E402

TUNES = 2600
FEWEST_CANDIDATES = 6
SCALES_US = (1.6, 4.0, 10.0, 30.0, 200.0)
# What a reading costs beside its launches: two events, a wait, Python.
OVERHEAD_S = 50e-6
QUIET = Condition(foreign_processes=0)


@dataclass(frozen=True)
class Weather:
    """What a reading is besides the truth.

    ``spread`` is the deviation of one reading, normally distributed; ``drift_per_s`` what the device slows down by;
    ``clocks`` are factors between which it jumps, every ``stay_s`` on average; a ``tail_share`` of the readings takes
    longer by ``tail_mean`` on average. A graph is slow or fast for itself by ``place_spread``, because of where its
    code and operands lie; ``remade_every`` is after how many readings it is made anew, 0 for never.
    """

    spread: float = 0.005
    drift_per_s: float = 0.0
    clocks: tuple[float, ...] = (1.0,)
    stay_s: float = 0.02
    tail_share: float = 0.0
    tail_mean: float = 0.2
    place_spread: float = 0.0
    remade_every: int = 0


WEATHERS = {
    "0.5 %": Weather(),
    "1 %": Weather(0.01),
    "2 %": Weather(0.02),
    "0.5 %, 3 % of drift in 0.4 s": Weather(drift_per_s=0.03 / 0.4),
    "0.5 %, two clocks 6 % apart": Weather(clocks=(1.0, 1.06)),
    "0.5 %, a tenth 20 % late": Weather(tail_share=0.1),
    "0.5 %, graphs 1 % apart": Weather(place_spread=0.01),
    "the same, graphs made anew every 5 readings": Weather(place_spread=0.01, remade_every=5),
}


class Device:
    """One that is in some weather, with a time of its own."""

    def __init__(self, weather: Weather, rng: random.Random) -> None:
        self.weather, self.now_s, self._rng = weather, 0.0, rng
        self._clock, self._until_s = 1.0, 0.0

    def rest(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds

    def read(self, truth_us: float, launches: int) -> float:
        """The next reading of launches that truly take ``truth_us`` each."""
        here, rng = self.weather, self._rng
        if self.now_s >= self._until_s:
            self._clock = rng.choice(here.clocks)
            self._until_s = self.now_s + rng.expovariate(1 / here.stay_s)
        reading = truth_us * self._clock * (1 + here.drift_per_s * self.now_s) * (1 + rng.gauss(0.0, here.spread))
        if rng.random() < here.tail_share:
            reading *= 1 + rng.expovariate(1 / here.tail_mean)
        self.now_s += reading * launches * 1e-6 + OVERHEAD_S
        return reading

    def place(self) -> float:
        """How slow a graph that has just been made is for itself, as a factor."""
        return 1 + self._rng.gauss(0.0, self.weather.place_spread)


@dataclass
class Simulated(Field):
    """A field on a simulated device."""

    device: Device = field(default_factory=lambda: Device(Weather(), random.Random(0)))

    def sampler(self, number: int, launches: int) -> Sampler:
        return _Graph(self, number, launches)


class _Graph(Sampler):
    def __init__(self, simulated: Simulated, number: int, launches: int) -> None:
        self._field, self._number, self._launches = simulated, number, launches
        self._place, self._read = simulated.device.place(), 0

    def sample_us(self) -> float:
        device, number = self._field.device, self._number
        self._read += 1
        if device.weather.remade_every and self._read % device.weather.remade_every == 0:
            self._place = device.place()
        self._field.readings[number] = self._field.readings.get(number, 0) + 1
        return device.read(self._field.times_us[number] * self._place, self._launches)


@dataclass(frozen=True)
class Tuned:
    """What came of one tuning: the number ``chosen``, whether it is ``stored``, and how many ``readings`` it took.

    ``margin`` is what a challenger of the reference, number 0, had to pass; ``raced`` whether the best was a finalist.
    """

    chosen: int
    margin: float
    stored: bool
    raced: bool
    readings: int


def tune(times_us: Sequence[float], device: Device, seed: int, effort: Effort) -> Tuned:
    """Those steps of ``tuner/loop.py`` that read a clock, as they are there."""
    simulated = Simulated(times_us, finalists=effort.finalists, device=device)
    meter = simulated.meter(seed=seed, rest=device.rest, now=lambda: device.now_s)
    home, *rivals = map(simulated.contender, range(len(times_us)))
    kind = meter.decisive
    meter.rough([home], 5, 3)
    noise = meter.noise(home, effort.rounds, kind)
    finalists = search.racing(search.Race(tuple(rivals), effort.finalists, meter))
    reason = ""
    for _ in range(RACES):
        meter.race(home, finalists, effort.rounds, kind)
        reason = spoiled(QUIET, QUIET, home, kind, noise)
        if not reason:
            break
    best = winner(home, None, finalists, kind, noise)
    measured = timing(best.readings(kind))
    assert measured is not None  # every reading of a simulated clock is one
    margin = max(PROMOTE_SHARE, SPREADS * measured.mad_us / measured.median_us, 2 * noise.difference)
    fastest = min(range(len(times_us)), key=times_us.__getitem__)
    raced = fastest in (int(contender.config.NUMBER) for contender in (home, *finalists))
    return Tuned(int(best.config.NUMBER), margin, not reason, raced, sum(simulated.readings.values()))


def fields() -> list[list[float]]:
    """Times over the best of every field that was measured and has ``FEWEST_CANDIDATES`` or more."""
    return [[us / min(times) for us in times] for times in _measured() if len(times) >= FEWEST_CANDIDATES]


def _measured() -> Iterator[list[float]]:
    def kept(name: str) -> Any:
        return json.loads((HERE / "results" / f"h200-triton-3.6-{name}.json").read_text(encoding="utf-8"))

    for case in kept("rowwise-sweep")["cases"]:
        yield [launch["us"] for launch in case["launches"]]
    for case in kept("pointwise-sweep")["cases"]:
        yield [time["us"] for name, time in case["times"].items() if ":" in name]
    yield [time["us"] for time in kept("tuning-cost")["exhaustive"]["all"].values()]


def simulate(weather: Weather, tunes: int, effort: Effort) -> dict[str, Any]:
    """Figures of ``tunes`` tunings, of every field in turn."""
    shapes = fields()
    regrets, within_margin, slower, unstored, unraced, readings = [], 0, 0, 0, 0, []
    for seed in range(tunes):
        rng = random.Random(seed)
        scale_us, shape = rng.choice(SCALES_US), list(shapes[seed % len(shapes)])
        rng.shuffle(shape)
        times_us = [scale_us * share for share in shape]
        tuned = tune(times_us, Device(weather, rng), seed, effort)
        ours_us = times_us[tuned.chosen]
        regrets.append(ours_us / min(times_us) - 1)
        allowed = PROMOTE_SHARE if tuned.chosen else tuned.margin
        within_margin += 1 - min(times_us) / ours_us <= allowed
        slower += ours_us > times_us[0]
        unstored += not tuned.stored
        unraced += not tuned.raced
        readings.append(tuned.readings / len(times_us))
    regrets.sort()
    return {
        "tunes": tunes,
        "within_2_percent": sum(regret <= 0.02 for regret in regrets) / tunes,
        "within_2_percent_or_the_margin": within_margin / tunes,
        "within_5_percent": sum(regret <= 0.05 for regret in regrets) / tunes,
        "regret_mean": statistics.fmean(regrets),
        "regret_of_one_in_a_hundred": regrets[int(0.99 * tunes)],
        "regret_at_most": regrets[-1],
        "slower_than_the_reference": slower,
        "unstored": unstored / tunes,
        "best_not_raced": unraced,
        "readings_of_a_candidate": statistics.fmean(readings),
        "readings_of_a_candidate_at_most": max(readings),
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    """The figures as Markdown."""
    head = ["noise", "within 2 %", "or the margin", "within 5 %", "mean", "1 in 100", "at most", "slower", "not raced",
            "unstored", "readings each"]  # fmt: skip
    lines = [head, ["---"] * len(head)]
    for name, row in found.items():
        shares = [f"{row[key]:.1%}" for key in (
            "within_2_percent", "within_2_percent_or_the_margin", "within_5_percent", "regret_mean",
            "regret_of_one_in_a_hundred", "regret_at_most",
        )]  # fmt: skip
        counts = [str(row["slower_than_the_reference"]), str(row["best_not_raced"]), f"{row['unstored']:.1%}",
                  f"{row['readings_of_a_candidate']:.0f}"]  # fmt: skip
        lines.append([name, *shares, *counts])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tunes", type=int, default=TUNES, help="in each weather")
    parser.add_argument("--only", choices=WEATHERS, help="one weather")
    parser.add_argument("--effort", choices=EFFORTS, default="normal")
    parser.add_argument("--table", type=Path, help="write the figures there as Markdown too")
    options = parser.parse_args()
    found = {}
    for name, weather in WEATHERS.items():
        if options.only in (None, name):
            found[name] = simulate(weather, options.tunes, EFFORTS[options.effort])
            print(name, found[name], file=sys.stderr, flush=True)
    if options.table:
        options.table.write_text(table(found), encoding="utf-8")
    result = {
        "benchmark": "simulated_tunes", "command": " ".join(["python", *sys.argv]), "effort": options.effort,
        "weathers": {name: asdict(weather) for name, weather in WEATHERS.items() if name in found},
        "fields": len(fields()), "scales_us": SCALES_US, "found": found,
    }  # fmt: skip
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
