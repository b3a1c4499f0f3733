"""A platform that passes every question on to another: the base of those that watch or record what one does.

Imports neither torch nor triton.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kalign_core.hal.base import Launch, Platform, Timer
from kalign_core.records import Condition, Config, DeviceModel, Identity, Problem, Toolchain

if TYPE_CHECKING:
    from kalign_core.declare import Kernel


class PassingPlatform(Platform):
    """``platform`` under its own name; what it has beyond a ``Platform`` is found here too."""

    def __init__(self, platform: Platform) -> None:
        self.name = platform.name  # type: ignore[misc]  # what a class says of itself, this one says of another
        self.device_type = platform.device_type  # type: ignore[misc]
        self.launch_options = platform.launch_options  # type: ignore[misc]
        self._platform = platform

    def devices(self) -> tuple[int, ...]:
        return self._platform.devices()

    def identity(self, device: int) -> Identity:
        return self._platform.identity(device)

    def toolchain(self, device: int) -> Toolchain:
        return self._platform.toolchain(device)

    def model(self, device: int) -> DeviceModel:
        return self._platform.model(device)

    def launcher(self, kernel: Kernel, problem: Problem, config: Config, args: Sequence[Any]) -> Launch:
        return self._platform.launcher(kernel, problem, config, args)

    def timer(self, device: int) -> Timer:
        return self._platform.timer(device)

    def synchronize(self, device: int) -> None:
        self._platform.synchronize(device)

    def condition(self, device: int) -> Condition:
        return self._platform.condition(device)

    def capturing(self) -> bool:
        return self._platform.capturing()

    def free_bytes(self, device: int) -> int | None:
        return self._platform.free_bytes(device)

    def compile_target(self, device: int) -> tuple[str, int | str, int] | None:
        return self._platform.compile_target(device)

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        with self._platform.on(device):
            yield

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)
