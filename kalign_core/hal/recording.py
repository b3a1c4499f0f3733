"""Readings of a real device, written down so that they can be given back where there is none.

A search or a decision rule is judged by what it makes of the same readings, again and again; a ``Recording`` is a
scripted platform's clock (``hal/replay.py``) made on a device. Imports neither torch nor triton.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kalign_core.errors import BadArgument
from kalign_core.hal.base import Launch, Platform, Sampler, Timer
from kalign_core.hal.passing import PassingPlatform
from kalign_core.records import Config

Readings = dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class Recording:
    """Readings in microseconds by the text of the configuration, as they were taken; ``device`` says where.

    ``warm`` went round one set of arguments, ``cold`` round as many as leave the last-level cache.
    """

    device: str
    warm: Mapping[str, Sequence[float]] = field(default_factory=dict)
    cold: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def times_us(self, kind: str) -> dict[Config, tuple[float, ...]]:
        """The readings of ``kind``, as ``Clock`` takes them."""
        found = self.warm if kind == "warm" else self.cold
        return {Config.parse(text): tuple(readings) for text, readings in found.items()}

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Recording:
        """The recording in ``path``; raises ``BadArgument`` for what is none, ``OSError``."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise BadArgument(f"{path} is no recording: {error}") from error


class RecordingPlatform(PassingPlatform):
    """``platform``, writing down each reading by kernel: ``recorded("rms_norm")`` gives what was taken of it."""

    def __init__(self, platform: Platform) -> None:
        super().__init__(platform)
        self._taken: dict[str, tuple[Readings, Readings]] = {}

    def recorded(self, kernel: str) -> Recording:
        """The readings taken of ``kernel`` so far."""
        warm, cold = self._taken.get(kernel, ({}, {}))
        return Recording(self.identity(self.devices()[0]).name, warm, cold)

    def launcher(self, kernel: Any, problem: Any, config: Config, args: Sequence[Any]) -> Launch:
        return _Named(super().launcher(kernel, problem, config, args), kernel.name, str(config))

    def timer(self, device: int) -> Timer:
        return _RecordingTimer(super().timer(device), self._taken)


class _Named:
    """A launch that says whose it is. Attributes are those of the launch within."""

    def __init__(self, launch: Launch, kernel: str, config: str) -> None:
        self._launch, self.named = launch, (kernel, config)

    def __call__(self, *args: Any) -> None:
        self._launch(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._launch, name)


class _RecordingTimer(Timer):
    def __init__(self, timer: Timer, taken: dict[str, tuple[Readings, Readings]]) -> None:
        self._timer, self._taken = timer, taken

    def sampler(self, launch: Launch, argument_sets: Sequence[tuple[Any, ...]], launches: int) -> Sampler:
        kernel, config = launch.named  # type: ignore[attr-defined]  # made by this platform
        kinds = self._taken.setdefault(kernel, ({}, {}))
        readings = kinds[len(argument_sets) > 1].setdefault(config, [])
        return _RecordingSampler(self._timer.sampler(launch, argument_sets, launches), readings)


class _RecordingSampler(Sampler):
    def __init__(self, sampler: Sampler, readings: list[float]) -> None:
        self._sampler, self._readings = sampler, readings

    def sample_us(self) -> float:
        reading = self._sampler.sample_us()
        self._readings.append(round(reading, 3))
        return reading

    def close(self) -> None:
        self._sampler.close()
