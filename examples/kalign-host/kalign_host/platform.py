"""The platform: how the core sees the device. Everything that is not a plain fact about it is here.

A device that torch drives as ``cuda`` inherits ``kalign_core.hal.torch_gpu.TorchGpuPlatform`` instead and writes
``identity``, ``toolchain``, ``model`` and ``compile_target`` only; this one shows all that there is to write.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kalign_core.errors import CandidateFailed
from kalign_core.hal.base import Launch, Platform, Sampler, Timer
from kalign_core.hal.binding import grid_lookup
from kalign_core.records import Condition, DeviceModel, Identity, Problem, Toolchain
from kalign_host import limits
from kalign_host.identity import identity, read

if TYPE_CHECKING:
    from kalign_core.declare import Kernel
    from kalign_core.records import Config

_interpreter = threading.RLock()


def _renew_lock() -> None:
    """A child of fork must not wait for a launch of its parent's."""
    global _interpreter
    _interpreter = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


class HostPlatform(Platform):
    """This machine's processor, by Triton's interpreter; its one device is number -1, as torch numbers the host."""

    name: ClassVar[str] = "host"
    device_type: ClassVar[str] = "cpu"
    launch_options: ClassVar[frozenset[str]] = limits.LAUNCH_OPTIONS

    def __init__(self) -> None:
        from kalign_core.hal import triton_compat

        triton_compat.fix_interpreter_rounding()
        triton_compat.fix_interpreter_dot()

    def devices(self) -> tuple[int, ...]:
        return (-1,)

    def identity(self, device: int) -> Identity:
        return identity()

    def toolchain(self, device: int) -> Toolchain:
        """Whatever may change compiled code or bits: here numpy computes, so numpy is part of it."""
        import numpy

        from kalign_core.cache.fingerprint import bit_flags, versions

        return Toolchain.of(runtime="interpreter", numpy=numpy.__version__, **versions(), **bit_flags(os.environ))

    def model(self, device: int) -> DeviceModel:
        return limits.MODEL

    def launcher(self, kernel: Kernel, problem: Problem, config: Config, args: Sequence[Any]) -> Launch:
        """Everything that does not change from call to call is found here, once; ``launch`` only launches."""
        import numpy

        constants = kernel.constants_for(problem, config)
        find_grid = grid_lookup(kernel, problem, config)
        find_grid(args)

        def launch(*arguments: Any) -> None:
            try:
                with _interpreter, numpy.errstate(all="ignore"):  # the gate feeds infinities on purpose
                    kernel.fn[find_grid(arguments)](*arguments, **constants)
            except CandidateFailed:
                raise
            except Exception as error:
                raise CandidateFailed(f"{type(error).__name__}: {error}".splitlines()[0]) from error

        return launch

    def timer(self, device: int) -> Timer:
        return HostTimer()

    def synchronize(self, device: int) -> None:
        """A launch has ended when it returns."""

    def condition(self, device: int) -> Condition:
        return Condition(
            sm_clock_mhz=_whole("/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq", 1000),
            temperature_c=_whole("/sys/class/thermal/thermal_zone0/temp", 1000),
        )

    def free_bytes(self, device: int) -> int | None:
        for line in read(Path("/proc/meminfo")).splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return None


class HostTimer(Timer):
    """Times launches by the host's clock, which is the device's here."""

    def sampler(self, launch: Launch, argument_sets: Sequence[tuple[Any, ...]], launches: int) -> Sampler:
        return _HostSampler(launch, [argument_sets[i % len(argument_sets)] for i in range(launches)])


class _HostSampler(Sampler):
    def __init__(self, launch: Launch, calls: Sequence[tuple[Any, ...]]) -> None:
        self._launch, self._calls = launch, calls

    def sample_us(self) -> float:
        start = time.perf_counter_ns()
        for arguments in self._calls:
            self._launch(*arguments)
        return (time.perf_counter_ns() - start) / 1000 / len(self._calls)


def _whole(path: str, unit: int) -> int | None:
    """The number in a file of the kernel's, divided by ``unit``; None where there is none that makes sense."""
    text = read(Path(path))
    return int(text) // unit if text.isdecimal() else None
