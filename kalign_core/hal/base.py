"""What a platform has to provide: devices, identity, limits, a timer, a launcher.

The core calls a device only through these classes. A platform may import torch and triton; this module does not, so
that a plugin author can read and type-check it anywhere. Device indices are torch's.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from kalign_core.records import Condition, DeviceModel, Identity, Problem, Toolchain

if TYPE_CHECKING:
    from kalign_core.declare import Kernel
    from kalign_core.records import Config

Launch = Callable[..., None]
"""A prebound launch: called with the kernel's run-time arguments, positionally, in parameter order.

One that has a method ``pin(args, numbers)`` gives a ``Pinned`` for calls like ``args``, or None if it has none to give.
One that has a method ``keep()`` is told so that it serves callers: what it launches stays loaded until the process
ends, though the launch itself is forgotten, because a graph that a caller captured may replay it.
"""

Pinned = Callable[[Sequence[int | None]], bool]
"""A launch for one grid and fixed ``numbers``, down to the driver call, of tensors given by their addresses.

Whoever calls it has settled their dtype, device and alignment, and does not change a sequence that it has given. It
launches nothing and gives False while another device is current or somebody listens to launches.
"""


def met_a_capture(text: str) -> bool:
    """Whether an error of this text is a graph's that some thread captures: it forbids the others to wait for it."""
    return any(words in text for words in ("stream is capturing", "error during capture"))


class Sampler(ABC):
    """One candidate made ready to be timed: replaying it costs no Python per launch."""

    @abstractmethod
    def sample_us(self) -> float:
        """Run once more and give device microseconds per launch. May be 0, negative or NaN where the clock fails."""

    def close(self) -> None:  # noqa: B027  # not every sampler holds something
        """Free what ``sample_us`` replays."""


class Timer(ABC):
    """Makes samplers for one device."""

    @abstractmethod
    def sampler(self, launch: Launch, argument_sets: Sequence[tuple[Any, ...]], launches: int) -> Sampler:
        """Make ``launches`` launches of ``launch`` ready, going round ``argument_sets`` in turn.

        One set is a warm timing; as many sets as exceed the last-level cache are a cold one.
        """


class Platform(ABC):
    """One vendor's devices as the core sees them.

    ``name`` is the platform's record's, ``device_type`` torch's (``cuda``, ``cpu``), ``launch_options`` the compiler
    options a candidate may set beside the kernel's own knobs.
    """

    name: ClassVar[str]
    device_type: ClassVar[str]
    launch_options: ClassVar[frozenset[str]]

    @abstractmethod
    def devices(self) -> tuple[int, ...]:
        """Indices of the devices torch sees. May create a context."""

    @abstractmethod
    def identity(self, device: int) -> Identity:
        """Which device ``device`` is. Never raises: what cannot be read is ``unknown``."""

    @abstractmethod
    def toolchain(self, device: int) -> Toolchain:
        """Driver, run time, torch, triton and everything else that may change compiled code or bits."""

    @abstractmethod
    def model(self, device: int) -> DeviceModel:
        """The device's limits."""

    @abstractmethod
    def launcher(self, kernel: Kernel, problem: Problem, config: Config, args: Sequence[Any]) -> Launch:
        """Compile ``kernel`` for ``problem`` under ``config`` and prebind it for arguments such as ``args``.

        Raises ``CandidateFailed`` where it does not compile or cannot be loaded.
        """

    @abstractmethod
    def timer(self, device: int) -> Timer:
        """The timer of ``device``."""

    @abstractmethod
    def synchronize(self, device: int) -> None:
        """Wait until the device is idle.

        Raises ``DeviceLost`` where it reports an error that sticks, ``NotNow`` where a graph that is being captured
        forbids to wait.
        """

    def condition(self, device: int) -> Condition:
        """Clocks, temperature, throttling and foreign processes, as far as they can be read. Never raises."""
        return Condition()

    def capturing(self) -> bool:
        """Whether the current stream records a graph."""
        return False

    def free_bytes(self, device: int) -> int | None:
        """Device memory that can still be allocated, or None where that is not known."""
        return None

    def compile_target(self, device: int) -> tuple[str, int | str, int] | None:
        """Triton's target of ``device`` as (backend, arch, warp size), or None where nothing is compiled."""
        return None

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        """Make ``device`` current inside the block and restore what was."""
        yield
