"""A field of candidates whose times are written down, raced by the real meter: no device, no compiler, no waiting.

A strategy sees what it sees when a kernel is tuned, because only the timer is scripted. Imports torch, which the meter
does, and neither triton nor a platform.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

from kalign_core.errors import CandidateFailed
from kalign_core.hal.base import Launch, Platform, Sampler, Timer
from kalign_core.records import Config, DeviceModel, Identity, Problem, Refutation, Toolchain
from kalign_core.tuner.failures import Guarded
from kalign_core.tuner.measure import Contender, Meter
from kalign_core.tuner.search import Race
from kalign_core.verifier.bound import Fixed


class Endless(BaseException):
    """A strategy that goes on taking readings. No plugin's ``except Exception`` holds it back."""


@dataclass
class Field:
    """Candidates number 0, 1, ..., each with its time in microseconds.

    ``unloadable`` candidates cannot be made ready, ``failing`` ones raise when they run, ``refuted`` ones are out from
    the start. ``noise`` is the largest deviation of a reading as a share. After ``affordable`` readings the budget is
    spent; after ``most`` a strategy is taken to be endless. ``readings`` counts them by candidate.
    """

    times_us: Sequence[float]
    finalists: int = 3
    unloadable: frozenset[int] = frozenset()
    failing: frozenset[int] = frozenset()
    refuted: frozenset[int] = frozenset()
    noise: float = 0.0
    affordable: float = float("inf")
    most: int = 20_000
    readings: dict[int, int] = field(default_factory=dict)

    def race(self) -> Race:
        """The race, as the tuning loop would start it."""
        return Race(tuple(map(self.contender, range(len(self.times_us)))), self.finalists, self.meter())

    def meter(self, **said: Any) -> Meter:
        """What reads the field; ``said`` is more for the ``Meter``, such as its ``seed``, ``rest`` and ``now``."""
        bench: Any = SimpleNamespace(
            device=0, interpreted=False, bytes_per_set=lambda: 1, argument_sets=lambda count: [()] * count,
            kernel=SimpleNamespace(outputs=tuple, parameters=(), args={}), problem=Problem("numbered", (), (), "train"),
        )  # fmt: skip
        return Meter(_Scripted(self), bench, **{"pressed": self.is_spent, **said})

    def is_spent(self) -> bool:
        """Whether the budget is."""
        return sum(self.readings.values()) >= self.affordable

    def contender(self, number: int) -> Contender:
        """Candidate ``number``, as the loop hands it to a strategy."""
        launch = _Numbered(number)
        made = Contender(Config(NUMBER=number), Guarded(launch), Fixed(launch), ((number,), str(number)))
        if number in self.refuted:
            made.refutation = Refutation("one case", "its bytes differ", argument="out")
        return made

    def sampler(self, number: int, launches: int) -> Sampler:
        """What times candidate ``number``, ``launches`` launches to a reading."""
        if number in self.unloadable:
            raise CandidateFailed("out of resources: shared memory")
        noise = random.Random(number)  # noqa: S311  # the same noise every time is the point

        def sample_us() -> float:
            self.readings[number] = self.readings.get(number, 0) + 1
            if sum(self.readings.values()) > self.most:
                raise Endless(f"more than {self.most} readings were taken")
            if number in self.failing:
                raise CandidateFailed("unspecified launch failure")
            return self.times_us[number] * (1 + noise.uniform(-self.noise, self.noise))

        return _Sampler(sample_us)


class _Numbered:
    """A launch that does nothing and knows which candidate's it is."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self, *args: Any) -> None:
        return None


class _Sampler(Sampler):
    def __init__(self, sample_us: Callable[[], float]) -> None:
        self._sample_us = sample_us

    def sample_us(self) -> float:
        return self._sample_us()


class _Timer(Timer):
    def __init__(self, scripted: Field) -> None:
        self._field = scripted

    def sampler(self, launch: Launch, argument_sets: Sequence[tuple[Any, ...]], launches: int) -> Sampler:
        number: int = launch.number  # type: ignore[attr-defined]
        return self._field.sampler(number, launches)


class _Scripted(Platform):
    """A device that only times."""

    name: ClassVar[str] = "field"
    device_type: ClassVar[str] = "cpu"
    launch_options: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, scripted: Field) -> None:
        self._field = scripted

    def devices(self) -> tuple[int, ...]:
        return (0,)

    def identity(self, device: int) -> Identity:
        return Identity("field", "field", "")

    def toolchain(self, device: int) -> Toolchain:
        return Toolchain(())

    def model(self, device: int) -> DeviceModel:
        return DeviceModel("field", "field", warp_size=1, max_warps=1, shared_bytes=0)

    def launcher(self, kernel: Any, problem: Problem, config: Config, args: Sequence[Any]) -> Launch:
        raise CandidateFailed("candidates of a field are bound already")

    def timer(self, device: int) -> Timer:
        return _Timer(self._field)

    def synchronize(self, device: int) -> None:
        return None
