"""What CUDA and ROCm share because torch makes them the same: streams, graphs, events, memory, the prebound launch.

Vendor plugins inherit and add identity, limits and toolchain. torch calls both ``cuda``; so does this module.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from kalign_core.cache.fingerprint import counted
from kalign_core.declare import lower
from kalign_core.errors import CandidateFailed, DeviceLost, NoPlatform, NotNow
from kalign_core.hal.base import Launch, Pinned, Platform, Sampler, Timer, met_a_capture
from kalign_core.hal.binding import grid_lookup
from kalign_core.records import Problem

if TYPE_CHECKING:
    from kalign_core.declare import Kernel
    from kalign_core.hal.triton_compat import Prebound
    from kalign_core.records import Config

log = logging.getLogger("kalign")
MOST_LOADED = 512
# A device's code is unloaded with the object that holds it (Triton 3.9), which ends a capture under way and leaves a
# captured graph without its kernels: candidates are dropped many at a time, outside of captures, and what serves never.
_loaded: dict[Any, tuple[Any, Prebound]] = {}
_serving: dict[Any, tuple[Any, Prebound]] = {}


class TorchGpuPlatform(Platform):
    """A GPU platform driven through ``torch.cuda``. Subclasses give identity, toolchain, model and compile target."""

    device_type: ClassVar[str] = "cuda"

    def devices(self) -> tuple[int, ...]:
        """Indices of the devices torch sees; raises ``NoPlatform`` where it sees none, as without a working driver."""
        import torch

        count = torch.cuda.device_count()
        if not count:
            raise NoPlatform(
                f"platform {self.name} was chosen, and torch sees no device",
                why="its device files are there, but the driver does not answer or is too old for this torch",
                fix="python -c 'import torch; torch.cuda.init()' prints what the driver says",
            )
        return tuple(range(count))

    def capturing(self) -> bool:
        import torch

        cuda: Any = torch.cuda  # partly untyped
        return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())

    def free_bytes(self, device: int) -> int | None:
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(free + reserved)

    def synchronize(self, device: int) -> None:
        import torch

        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            if met_a_capture(str(error)):
                raise NotNow(
                    f"device {device} cannot be waited for: another thread captures a graph",
                    why="waiting for a device includes every stream, and one that is captured does not run",
                    fix="kalign tune, or kalign.warmup before graphs are captured",
                ) from error
            raise DeviceLost(
                f"device {device} reports {error}".splitlines()[0],
                why="an error of this kind stays until the process ends, so nothing more is tuned here",
                fix="restart the process; kalign tune tries candidates in a process that it can lose",
            ) from error

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        import torch

        with torch.cuda.device(device):
            yield

    def timer(self, device: int) -> Timer:
        return GraphTimer(device)

    def compile(self, kernel: Kernel, problem: Problem, config: Config, device: int) -> Any:
        """Compile for ``device``: the compiler's own cache answers what a worker has compiled already."""
        from kalign_core.hal import triton_compat

        target = self.compile_target(device)
        if target is None:
            raise CandidateFailed(f"device {device} has no compile target")
        return triton_compat.compile_lowered(kernel.fn, lower(kernel, problem, config), target)

    def launcher(self, kernel: Kernel, problem: Problem, config: Config, args: Sequence[Any]) -> Launch:
        from kalign_core.hal import triton_compat

        device = next(a.get_device() for a in args if hasattr(a, "get_device"))
        find_grid = grid_lookup(kernel, problem, config)
        find_grid(args)
        # Problems that differ in sizes alone often compile to one kernel: each is loaded once. Compilers look at
        # variables anew each time, and what they made under others must not pass for what they would make now.
        key = (kernel, lower(kernel, problem, config), self.compile_target(device), device, counted(os.environ))
        loaded = _serving.get(key) or _loaded.get(key)
        if loaded is None:
            with self.on(device):
                compiled = self.compile(kernel, problem, config, device)
                made = (compiled, triton_compat.Prebound(compiled))
            if len(_loaded) >= MOST_LOADED and not self.capturing():
                _loaded.clear()
            loaded = _loaded.setdefault(key, made)  # where another thread was first, what it loaded is what is kept
        constants = kernel.constants_for(problem, config)
        tail = tuple(constants[name] for name in kernel.constants)
        check = triton_compat.globals_guard(kernel.fn)
        return DeviceLaunch(*loaded, find_grid, tail, device, check, partial(_serving.setdefault, key, loaded))


class DeviceLaunch:
    """One compiled kernel bound to a device: called with the run-time arguments, on the device's current stream.

    ``compiled`` is Triton's object, for reports; holding it keeps the module loaded, ``keep()`` does so for good.
    """

    __slots__ = ("_check", "_current", "_device", "_find_grid", "_prebound", "_stream", "_tail", "compiled", "keep")

    def __init__(
        self,
        compiled: Any,
        prebound: Prebound,
        find_grid: Any,
        tail: tuple[Any, ...],
        device: int,
        check: Any,
        keep: Callable[[], object],
    ) -> None:
        import torch

        self.compiled, self.keep = compiled, keep
        self._prebound, self._find_grid, self._tail = prebound, find_grid, tail
        self._device, self._check = device, check
        self._current = torch._C._cuda_getDevice
        self._stream = torch._C._cuda_getCurrentRawStream

    def __call__(self, *args: Any) -> None:
        if self._check is not None:
            self._check()
        x, y, z = self._find_grid(args)
        device = self._device
        if self._current() == device:
            self._prebound.launch(x, y, z, self._stream(device), (*args, *self._tail))
            return
        import torch

        with torch.cuda.device(device):
            self._prebound.launch(x, y, z, self._stream(device), (*args, *self._tail))

    def pin(self, args: Sequence[Any], numbers: tuple[Any, ...]) -> Pinned | None:
        """This launch for the grid of ``args``, ``numbers`` being those behind the tensors.

        None where it needs more than the driver call.
        """
        if self._check is not None:
            return None
        import torch

        tail = (*numbers, *self._tail)
        current = None if torch.cuda.device_count() == 1 else self._current  # one alone is always the current one
        return self._prebound.pin(self._find_grid(args), tail, self._device, current, self._stream)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Leave garbage alone inside the block: code that is unloaded during a capture ends it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class GraphTimer(Timer):
    """Times launches unrolled in one CUDA or HIP graph: the kernel, not its launch."""

    def __init__(self, device: int) -> None:
        self._device = device

    def sampler(self, launch: Launch, argument_sets: Sequence[tuple[Any, ...]], launches: int) -> Sampler:
        return _GraphSampler(self._device, launch, argument_sets, launches)


class _GraphSampler(Sampler):
    def __init__(self, device: int, launch: Launch, argument_sets: Sequence[tuple[Any, ...]], launches: int) -> None:
        import torch

        self._launches = launches
        cuda: Any = torch.cuda  # partly untyped
        self._graph = torch.cuda.CUDAGraph()
        self._start, self._end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        with torch.cuda.device(device):
            stream = cuda.Stream(device)
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream), _uncollected():
                self._graph.capture_begin(capture_error_mode="thread_local")
                try:
                    for i in range(launches):
                        launch(*argument_sets[i % len(argument_sets)])
                finally:
                    self._graph.capture_end()
            torch.cuda.current_stream(device).wait_stream(stream)

    def sample_us(self) -> float:
        self._start.record()
        self._graph.replay()
        self._end.record()
        self._end.synchronize()
        return float(self._start.elapsed_time(self._end)) * 1000.0 / self._launches

    def close(self) -> None:
        self._graph.reset()
