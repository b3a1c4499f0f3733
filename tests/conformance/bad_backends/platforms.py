"""Platforms that break one promise each, on the host's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from kalign_core.hal.base import Launch, Sampler, Timer
from kalign_core.hal.cpu import CpuPlatform
from kalign_core.records import Config, Identity, Problem

if TYPE_CHECKING:
    from kalign_core.declare import Kernel

ASKING_US = 1.0  # what it takes to ask for a launch, on a clock that no machine's load moves


class LatePlatform(CpuPlatform):
    """Works while nobody looks, as devices do, and times how long it takes to ask for the work."""

    name: ClassVar[str] = "late"

    def __init__(self) -> None:
        super().__init__()
        self.queue: list[Callable[[], None]] = []

    def launcher(self, kernel: Kernel, problem: Problem, config: Config, args: Sequence[Any]) -> Launch:
        inner = super().launcher(kernel, problem, config, args)
        return lambda *arguments: self.queue.append(lambda: inner(*arguments))

    def synchronize(self, device: int) -> None:
        waiting, self.queue = self.queue, []
        for work in waiting:
            work()

    def timer(self, device: int) -> Timer:
        return _LaunchTimer()


class _LaunchTimer(Timer):
    def sampler(self, launch: Launch, argument_sets: Sequence[tuple[Any, ...]], launches: int) -> Sampler:
        return _LaunchSampler(launch, [argument_sets[i % len(argument_sets)] for i in range(launches)])


class _LaunchSampler(Sampler):
    def __init__(self, launch: Launch, calls: Sequence[tuple[Any, ...]]) -> None:
        self._launch, self._calls = launch, calls

    def sample_us(self) -> float:
        for arguments in self._calls:
            self._launch(*arguments)
        return ASKING_US


class ByModelPlatform(CpuPlatform):
    """Names a device by its model, so that every machine of one kind has the same file."""

    name: ClassVar[str] = "by_model"

    def identity(self, device: int) -> Identity:
        found = super().identity(device)
        return replace(found, key=found.name)


class ByNumberPlatform(CpuPlatform):
    """Names a device by its number, which the next mask gives to another one."""

    name: ClassVar[str] = "by_number"

    def identity(self, device: int) -> Identity:
        return replace(super().identity(device), key=f"device {device}")


class BoundPlatform(CpuPlatform):
    """Keeps the tensors it was bound with, as a recorded graph would, and launches on those."""

    name: ClassVar[str] = "bound"

    def launcher(self, kernel: Kernel, problem: Problem, config: Config, args: Sequence[Any]) -> Launch:
        inner = super().launcher(kernel, problem, config, args)
        return lambda *arguments: inner(*args)


class CuriousPlatform(CpuPlatform):
    """Is in order; it is its probe that asks the device."""

    name: ClassVar[str] = "curious"
