"""The embedded platform: Triton's interpreter on the host, timed by the host clock.

It exists so that every part of kalign runs, and is tested, on a machine without a GPU. num_warps and num_stages mean
nothing to an interpreter; times are the interpreter's, not a device's.
"""

from __future__ import annotations

import os
import platform as host
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kalign_core.errors import CandidateFailed
from kalign_core.hal.base import Launch, Platform, Sampler, Timer
from kalign_core.hal.binding import grid_lookup
from kalign_core.records import DeviceModel, Identity, Problem, Toolchain

if TYPE_CHECKING:
    from kalign_core.declare import Kernel
    from kalign_core.records import Config

# The interpreter patches triton.language while a kernel runs, for every thread of the process.
_interpreter = threading.RLock()


def _renew_lock() -> None:
    """A child of fork must not wait for a launch of its parent's."""
    global _interpreter
    _interpreter = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


class CpuPlatform(Platform):
    """Triton's interpreter: one device, index -1 as torch numbers the host."""

    name: ClassVar[str] = "cpu"
    device_type: ClassVar[str] = "cpu"
    launch_options: ClassVar[frozenset[str]] = frozenset({"num_warps", "num_stages"})

    def __init__(self) -> None:
        from kalign_core.hal import triton_compat

        triton_compat.fix_interpreter_rounding()
        self.exact_dot = triton_compat.fix_interpreter_dot()

    def devices(self) -> tuple[int, ...]:
        return (-1,)

    def identity(self, device: int) -> Identity:
        """Machine id, or host name where there is none, and the processor's model."""
        machine, model = _machine(), _processor()
        return Identity(
            vendor="cpu",
            name=model,
            key="unknown" if "unknown" in (machine, model) else f"{machine}/{model}",
            provenance=(("cores", os.cpu_count() or 0),),
        )

    def toolchain(self, device: int) -> Toolchain:
        import numpy
        import torch
        import triton

        from kalign_core.cache.fingerprint import bit_flags

        return Toolchain.of(
            interpreter="1",
            numpy=numpy.__version__,
            torch=str(torch.__version__),  # a class of its own, which compares as a version
            triton=triton.__version__,
            **bit_flags(os.environ),
        )

    def model(self, device: int) -> DeviceModel:
        from kalign_core.embedded import MODEL

        return MODEL

    def launcher(self, kernel: Kernel, problem: Problem, config: Config, args: Sequence[Any]) -> Launch:
        import numpy

        from kalign_core.hal.triton_compat import brief

        constants = kernel.constants_for(problem, config)
        find_grid = grid_lookup(kernel, problem, config)
        find_grid(args)
        fn = kernel.fn

        def launch(*arguments: Any) -> None:
            try:
                with _interpreter, numpy.errstate(all="ignore"):  # the gate's infinities are no accident
                    fn[find_grid(arguments)](*arguments, **constants)
            except CandidateFailed:
                raise
            except Exception as error:
                raise CandidateFailed(brief(error)) from error

        return launch

    def timer(self, device: int) -> Timer:
        return HostTimer()

    def synchronize(self, device: int) -> None:
        return None


class HostTimer(Timer):
    """Times launches by the host clock; ``clock`` gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def sampler(self, launch: Launch, argument_sets: Sequence[tuple[Any, ...]], launches: int) -> Sampler:
        return _HostSampler(launch, argument_sets, launches, self._clock)


class _HostSampler(Sampler):
    def __init__(
        self, launch: Launch, argument_sets: Sequence[tuple[Any, ...]], launches: int, clock: Callable[[], float]
    ) -> None:
        self._launch, self._sets, self._launches, self._clock = launch, argument_sets, launches, clock

    def sample_us(self) -> float:
        start = self._clock()
        for i in range(self._launches):
            self._launch(*self._sets[i % len(self._sets)])
        return (self._clock() - start) / self._launches * 1e6


def _machine() -> str:
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        try:
            text = Path(path).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text and text != "uninitialized":
            return text
    return socket.gethostname() or "unknown"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux: the architecture's name has to do
    return host.processor() or host.machine() or "unknown"
