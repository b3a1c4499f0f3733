"""A platform that keeps none of its promises."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from kalign_core.hal.base import Launch, Sampler, Timer
from kalign_core.hal.cpu import CpuPlatform
from kalign_core.records import Condition, Identity, Toolchain
from tests.conformance.bad_backends.hopeless import MODEL

_times = itertools.count()


class HopelessPlatform(CpuPlatform):
    """Says something else whenever it is asked, and launches nothing."""

    name: ClassVar[str] = "hopeless"
    launch_options: ClassVar[frozenset[str]] = frozenset({"enable_fp_fusion", "num warps"})

    def devices(self) -> tuple[int, ...]:
        return (0,)

    def identity(self, device: int) -> Identity:
        return Identity("Acme, Inc.", "", f"device {next(_times)}", must_match=(("share", 0.5),))  # type: ignore[arg-type]

    def toolchain(self, device: int) -> Toolchain:
        return Toolchain((("triton", ""), ("asked", str(next(_times)))))

    def model(self, device: int) -> Any:
        return (MODEL, None)[next(_times) % 2]

    def compile_target(self, device: int) -> tuple[str, int | str, int]:
        return "elsewhere", 0, 0

    def launcher(self, kernel: Any, problem: Any, config: Any, args: Sequence[Any]) -> Launch:
        def launch(x: Any, out: Any, *numbers: Any) -> None:
            x.zero_()
            args[1].fill_(-2)

        return launch

    def timer(self, device: int) -> Timer:
        return _CountingTimer()

    def capturing(self) -> Any:
        return None

    def free_bytes(self, device: int) -> int:
        return -1

    def condition(self, device: int) -> Condition:
        return Condition(sm_clock_mhz="fast")  # type: ignore[arg-type]

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        with contextlib.suppress(Exception):
            yield


class _CountingTimer(Timer):
    def sampler(self, launch: Launch, argument_sets: Sequence[tuple[Any, ...]], launches: int) -> Sampler:
        return _CountingSampler(launches)


class _CountingSampler(Sampler):
    """Takes the number of launches for a time."""

    def __init__(self, launches: int) -> None:
        self._launches = launches

    def sample_us(self) -> float:
        return self._launches
