"""The scripted platform: real kernels under the interpreter, but identity, times and failures as a script says.

What happens when a device is slow, lies about time, fails, is shared with others or changes its name is decided here
rather than waited for. Time itself is scripted: nothing sleeps. Tests make one, hand it to a ``Session`` and need no
GPU; nothing else uses it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from kalign_core.errors import CandidateFailed, DeviceLost
from kalign_core.hal.base import Launch, Sampler, Timer
from kalign_core.hal.cpu import CpuPlatform
from kalign_core.hal.misdeeds import Misdeed, Misdeeds
from kalign_core.hal.recording import Recording
from kalign_core.records import Condition, Config, DeviceModel, Identity, Problem, Toolchain

if TYPE_CHECKING:
    from kalign_core.declare import Kernel

IDENTITY = Identity(vendor="scripted", name="Scripted One", key="scripted-0001", pci_device_id="0000:0001")
MODEL = DeviceModel(
    backend="interpreter", arch="scripted", warp_size=32, max_warps=32, shared_bytes=232448, units=132, scripted=True
)


@dataclass(frozen=True, slots=True)
class Burst:
    """Readings number ``first`` to ``last`` come out ``factor`` times as long: of ``config``, counted for itself, or of
    whatever is timed then."""

    first: int
    last: int
    factor: float
    config: Config | None = None


@dataclass
class Clock:
    """Readings in microseconds: how long each configuration takes, and what disturbs the measurement.

    ``times_us`` gives a time, or readings to give back one after the other, as recorded from a device; all others take
    ``other_us``. ``noise`` is the largest deviation as a share, evenly spread; ``drift`` the share that every reading
    adds to all later ones. ``broken`` replaces readings by number: zero, negative, NaN.
    """

    times_us: Mapping[Config, float | Sequence[float]] = field(default_factory=dict)
    other_us: float = 100.0
    noise: float = 0.0
    drift: float = 0.0
    bursts: Sequence[Burst] = ()
    broken: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    taken: int = 0
    taken_of: dict[Config, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)  # noqa: S311  # the same noise every time is the point

    def __call__(self, kernel: str, config: Config) -> float:
        number, own = self.taken, self.taken_of.get(config, 0)
        self.taken, self.taken_of[config] = number + 1, own + 1
        if number in self.broken:
            return self.broken[number]
        known = self.times_us.get(config, self.other_us)
        reading = known[own % len(known)] if isinstance(known, Sequence) else known
        for burst in self.bursts:
            at = number if burst.config is None else own
            if burst.config in (None, config) and burst.first <= at <= burst.last:
                reading *= burst.factor
        return reading * (1 + self.drift * number) * (1 + self._random.uniform(-self.noise, self.noise))


@dataclass
class Script:
    """What the platform is told to do; fields may be changed while it runs.

    ``time_us(kernel, config)`` gives the next reading of a configuration's time in microseconds, such as a ``Clock``.
    ``fails(kernel, config)`` gives the text with which its launch cannot be made, or None. ``raises(kernel, config,
    run)`` gives what launch number ``run`` raises, or None. ``corrupts(kernel, config, run)`` says whether that launch
    writes one wrong byte, ``loses(kernel, config, run)`` whether it takes the device along. ``seconds(kernel, config)``
    is how long a launch hangs; it moves ``now_s`` on. ``condition`` is the device's, or those of the next looks, the
    last of which stays. ``target`` is the compile target, None where nothing is compiled. ``launched`` collects every
    launch as (kernel, config), ``timed`` every reading as (kernel, config, sets of arguments it went round).
    """

    identity: Identity = IDENTITY
    toolchain: Mapping[str, str] = field(default_factory=lambda: {"driver": "1.0", "triton": "scripted"})
    model: DeviceModel = MODEL
    time_us: Callable[[str, Config], float] = field(default_factory=Clock)
    fails: Callable[[str, Config], str | None] = lambda kernel, config: None
    raises: Callable[[str, Config, int], BaseException | None] = lambda kernel, config, run: None
    corrupts: Callable[[str, Config, int], bool] = lambda kernel, config, run: False
    loses: Callable[[str, Config, int], bool] = lambda kernel, config, run: False
    seconds: Callable[[str, Config], float] = lambda kernel, config: 0.0
    condition: Condition | list[Condition] = field(default_factory=Condition)
    capturing: bool = False
    free_bytes: int | None = None
    target: tuple[str, int | str, int] | None = None
    lost: bool = False
    now_s: float = 0.0
    launched: list[tuple[str, Config]] = field(default_factory=list)
    timed: list[tuple[str, Config, int]] = field(default_factory=list)

    def clock(self) -> float:
        """Seconds, as the script has them pass."""
        return self.now_s

    @classmethod
    def read(cls, path: Path) -> Script:
        """The script in a JSON file, for a process of its own; raises ``OSError``, ``ValueError``, ``TypeError``.

        ``times_us`` gives times or readings by the text of the configuration, or ``recording`` the path of a
        ``Recording``; ``other_us``, ``noise``, ``drift`` and ``seed`` are the clock's. ``misdeeds`` gives ``what`` and
        ``at`` by configuration. ``capturing``, ``free_bytes``, ``target``, ``toolchain`` and ``condition`` are as here.
        """
        said = json.loads(path.read_text(encoding="utf-8"))
        clock = {name: said.pop(name) for name in ("other_us", "noise", "drift", "seed") if name in said}
        times = {Config.parse(text): us for text, us in said.pop("times_us", {}).items()}
        if "recording" in said:
            recording = Recording.read(Path(said.pop("recording")))
            times = {**recording.times_us("cold" if recording.cold else "warm"), **times}
        planned = said.pop("misdeeds", {})
        misdeeds = Misdeeds({Config.parse(text): Misdeed(**what) for text, what in planned.items()})
        if "condition" in said:
            said["condition"] = Condition(**said["condition"])
        if "target" in said:
            said["target"] = tuple(said["target"])
        return cls(time_us=Clock(times, **clock), raises=misdeeds.raises, loses=misdeeds.loses, **said)


class ReplayPlatform(CpuPlatform):
    """A platform that follows a ``Script``."""

    name: ClassVar[str] = "replay"
    launch_options: ClassVar[frozenset[str]] = frozenset({"num_warps", "num_stages"})

    def __init__(self, script: Script | None = None) -> None:
        super().__init__()
        self.script = script or Script()

    def identity(self, device: int) -> Identity:
        return self.script.identity

    def toolchain(self, device: int) -> Toolchain:
        return Toolchain.of(**self.script.toolchain)

    def model(self, device: int) -> DeviceModel:
        return self.script.model

    def condition(self, device: int) -> Condition:
        found = self.script.condition
        if isinstance(found, Condition):
            return found
        return found.pop(0) if len(found) > 1 else found[0]

    def capturing(self) -> bool:
        return self.script.capturing

    def free_bytes(self, device: int) -> int | None:
        return self.script.free_bytes

    def compile_target(self, device: int) -> tuple[str, int | str, int] | None:
        return self.script.target

    def synchronize(self, device: int) -> None:
        if self.script.lost:
            raise DeviceLost(
                f"device {device} reports an illegal memory access",
                why="an error of this kind stays until the process ends",
                fix="restart the process",
            )

    def launcher(self, kernel: Kernel, problem: Problem, config: Config, args: Sequence[Any]) -> Launch:
        failure = self.script.fails(kernel.name, config)
        if failure:
            raise CandidateFailed(failure)
        return _Launch(self.script, kernel, config, super().launcher(kernel, problem, config, args))

    def timer(self, device: int) -> Timer:
        return _ScriptedTimer(self.script)


class _Launch:
    """One configuration's launch, counting its runs."""

    def __init__(self, script: Script, kernel: Kernel, config: Config, inner: Launch) -> None:
        self._script, self._inner, self._runs = script, inner, 0
        self._written = kernel.parameters.index(kernel.outputs()[0])
        self.scripted = (kernel.name, config)

    def __call__(self, *args: Any) -> None:
        script, (kernel, config) = self._script, self.scripted
        self._runs += 1
        script.launched.append(self.scripted)
        script.now_s += script.seconds(kernel, config)
        if script.loses(kernel, config, self._runs):
            script.lost = True  # like a device's, the error shows when somebody waits for it
            return
        error = script.raises(kernel, config, self._runs)
        if error is not None:
            raise error
        self._inner(*args)
        if script.corrupts(kernel, config, self._runs):
            _flip_a_bit(args[self._written])


class _ScriptedTimer(Timer):
    def __init__(self, script: Script) -> None:
        self._script = script

    def sampler(self, launch: Launch, argument_sets: Sequence[tuple[Any, ...]], launches: int) -> Sampler:
        return _ScriptedSampler(self._script, launch, argument_sets)


class _ScriptedSampler(Sampler):
    """Runs the launch once on each set of arguments and asks the script how long that took."""

    def __init__(self, script: Script, launch: Launch, argument_sets: Sequence[tuple[Any, ...]]) -> None:
        self._script, self._launch, self._sets = script, launch, argument_sets

    def sample_us(self) -> float:
        for arguments in self._sets:
            self._launch(*arguments)
        kernel, config = self._launch.scripted  # type: ignore[attr-defined]
        self._script.timed.append((kernel, config, len(self._sets)))
        return self._script.time_us(kernel, config)


def _flip_a_bit(tensor: Any) -> None:
    import torch

    first = tensor[(slice(0, 1),) * tensor.dim()]
    first.view(torch.uint8)[..., 0] ^= 1
