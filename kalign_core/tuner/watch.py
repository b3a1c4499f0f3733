"""A platform that writes down what it is about to launch, in memory that outlives its process.

When a process is killed, aborts or loses its device, nobody in it can say which candidate did that. Whoever started it
reads the black box instead: the configurations that were launched since the device was last known to be well, and when
that was written. In a careful process every launch is waited for, so that no two are ever under suspicion together.
Imports neither torch nor triton.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kalign_core.hal.base import Launch, Platform, Sampler, Timer
from kalign_core.hal.passing import PassingPlatform
from kalign_core.records import Config, Problem

if TYPE_CHECKING:
    from kalign_core.declare import Kernel

Suspect = tuple[str, str]
"""A kernel's name and the text of a configuration; or ``PLUGIN`` and a plugin's name, and the hook it was asked."""
PLUGIN = "plugin "
BOX_BYTES = 64 * 1024
IDLE_S = 1800.0
# A hook looks things up and computes; what it gives is worth no more than this in a process that can be killed.
HOOK_S = 120.0
_HEAD = struct.Struct("<QdII")  # beat, deadline in seconds, length and checksum of the suspects
_BEAT = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Flight:
    """What a black box says: ``deadline_s`` is how long the launch under way may take, 0 where none is."""

    beat: int
    deadline_s: float
    suspects: tuple[Suspect, ...]

    @property
    def asked(self) -> Suspect | None:
        """The plugin that was being asked, by its name, and the hook; None where none was."""
        name, hook = self.suspects[-1] if self.suspects else ("", "")
        return (name.removeprefix(PLUGIN), hook) if name.startswith(PLUGIN) else None


class BlackBox:
    """The shared memory in the file ``path``, which ``made`` writes first."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), BOX_BYTES)
        self._beat = 0

    @classmethod
    def made(cls, path: Path) -> BlackBox:
        """An empty one in a new file."""
        path.write_bytes(bytes(BOX_BYTES))
        return cls(path)

    def write(self, suspects: Sequence[Suspect], deadline_s: float) -> None:
        """Replace what it says; suspects that do not fit are left out."""
        text = json.dumps(list(suspects)).encode()
        if len(text) > BOX_BYTES - _HEAD.size:
            return self.write(suspects[-1:] if len(suspects) > 1 else (), deadline_s)
        self._beat += 1
        self._memory[_HEAD.size : _HEAD.size + len(text)] = text
        self._memory[: _HEAD.size] = _HEAD.pack(self._beat, deadline_s, len(text), zlib.crc32(text))
        return None

    def beat(self) -> None:
        """Say that the process goes on."""
        self._beat += 1
        _BEAT.pack_into(self._memory, 0, self._beat)

    def read(self) -> Flight:
        """What was written last; no suspects where the process died while it wrote."""
        beat, deadline_s, length, checksum = _HEAD.unpack(self._memory[: _HEAD.size])
        text = self._memory[_HEAD.size : _HEAD.size + length]
        if not length or zlib.crc32(text) != checksum:
            return Flight(beat, deadline_s, ())
        return Flight(beat, deadline_s, tuple((kernel, config) for kernel, config in json.loads(text)))

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()


class Overdue:
    """Raises ``TimeoutError`` when called after the launch under way has taken longer than it may.

    Between launches the process may think for ``IDLE_S`` seconds without a sign of life. ``clock`` gives seconds.
    """

    def __init__(self, box: BlackBox, clock: Callable[[], float] = time.monotonic) -> None:
        self._box, self._clock = box, clock
        self._beat, self._since = -1, clock()

    def alive(self) -> None:
        """The process gave a sign of life elsewhere."""
        self._since = self._clock()

    def __call__(self) -> None:
        flight, now = self._box.read(), self._clock()
        if flight.beat != self._beat:
            self._beat, self._since = flight.beat, now
        elif flight.deadline_s and now - self._since > flight.deadline_s:
            raise TimeoutError(f"timeout at {flight.deadline_s:g} s {'in a hook' if flight.asked else 'on the device'}")
        elif now - self._since > IDLE_S:
            raise TimeoutError(f"no sign of life for {IDLE_S:g} s")


class WatchedPlatform(PassingPlatform):
    """``platform``, telling ``box`` of every launch. Making one ready may take ``bind_s`` seconds."""

    def __init__(self, platform: Platform, box: BlackBox, bind_s: float) -> None:
        super().__init__(platform)
        self._box = box
        self._deadline_s, self._bind_s, self._careful = bind_s, bind_s, False
        self._suspects: dict[Suspect, None] = {}

    def watch(self, deadline_s: float, *, careful: bool) -> None:
        """From now on a launch may take ``deadline_s`` seconds, and where ``careful`` each of them is waited for."""
        self._deadline_s, self._bind_s, self._careful = deadline_s, max(deadline_s, self._bind_s), careful

    def launcher(self, kernel: Kernel, problem: Problem, config: Config, args: Sequence[Any]) -> Launch:
        device = next((arg.get_device() for arg in args if hasattr(arg, "get_device")), 0)
        suspect = (kernel.name, str(config))
        with self._at(suspect, self._bind_s):
            launch = self._platform.launcher(kernel, problem, config, args)
        return _WatchedLaunch(self, launch, suspect, device)

    def asking(self, plugin: str, hook: str) -> contextlib.AbstractContextManager[None]:
        """Say that inside the block ``plugin`` is asked ``hook``, which may take ``HOOK_S`` seconds."""
        return self._at((f"{PLUGIN}{plugin}", hook), HOOK_S)

    @contextlib.contextmanager
    def _at(self, suspect: Suspect, deadline_s: float) -> Iterator[None]:
        """Say that inside the block the process is at ``suspect``, with what was launched before still under way."""
        before = tuple(self._suspects)
        self._box.write((*before, suspect), deadline_s)
        try:
            yield
        finally:
            self._box.write(before, self._deadline_s if before else 0.0)

    def synchronize(self, device: int) -> None:
        self._platform.synchronize(device)
        self.landed()

    def timer(self, device: int) -> Timer:
        return _WatchedTimer(self, self._platform.timer(device))

    def launching(self, suspect: Suspect) -> None:
        """Say that ``suspect`` is about to be launched."""
        if suspect in self._suspects:
            self._box.beat()
        else:
            self._suspects[suspect] = None
            self._box.write(tuple(self._suspects), self._deadline_s)

    def launched(self, device: int) -> None:
        """Say that it was; wait for it where that is wanted and no graph is being recorded."""
        if self._careful and not self._platform.capturing():
            self.synchronize(device)

    def landed(self) -> None:
        """Say that everything launched so far has come to a good end."""
        if self._suspects:
            self._suspects.clear()
            self._box.write((), 0.0)


class _WatchedLaunch:
    """A launch that is told of. Attributes are those of the launch within."""

    def __init__(self, platform: WatchedPlatform, launch: Launch, suspect: Suspect, device: int) -> None:
        self._platform, self._launch, self._device = platform, launch, device
        self.suspect = suspect

    def __call__(self, *args: Any) -> None:
        self._platform.launching(self.suspect)
        self._launch(*args)
        self._platform.launched(self._device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._launch, name)


class _WatchedTimer(Timer):
    def __init__(self, platform: WatchedPlatform, timer: Timer) -> None:
        self._platform, self._timer = platform, timer

    def sampler(self, launch: Launch, argument_sets: Sequence[tuple[Any, ...]], launches: int) -> Sampler:
        sampler = self._timer.sampler(launch, argument_sets, launches)
        return _WatchedSampler(self._platform, sampler, getattr(launch, "suspect", ("", "")))


class _WatchedSampler(Sampler):
    """A reading is waited for, so that one which comes clears all that was launched before it."""

    def __init__(self, platform: WatchedPlatform, sampler: Sampler, suspect: Suspect) -> None:
        self._platform, self._sampler, self._suspect = platform, sampler, suspect

    def sample_us(self) -> float:
        self._platform.launching(self._suspect)
        reading = self._sampler.sample_us()
        self._platform.landed()
        return reading

    def close(self) -> None:
        self._sampler.close()
