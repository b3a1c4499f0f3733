"""The scripted platform: real kernels under the interpreter, but identity, times and failures as a script says.

What happens when a device is slow, lies about time, fails or changes its name is decided here rather than waited for.
Tests make one, hand it to a ``Session`` and need no GPU; nothing else uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from kalign_core.errors import CandidateFailed
from kalign_core.hal.base import Launch, Sampler, Timer
from kalign_core.hal.cpu import CpuPlatform
from kalign_core.records import Condition, Config, DeviceModel, Identity, Problem, Toolchain

if TYPE_CHECKING:
    from kalign_core.declare import Kernel

IDENTITY = Identity(vendor="scripted", name="Scripted One", key="scripted-0001", pci_device_id="0000:0001")
MODEL = DeviceModel(
    backend="interpreter", arch="scripted", warp_size=32, max_warps=32, shared_bytes=232448, units=132
)


@dataclass
class Script:
    """What the platform is told to do; fields may be changed while it runs.

    ``time_us(kernel, config)`` gives the next reading of a configuration's time in microseconds: a constant, drift,
    zero or NaN. ``fails(kernel, config)`` gives the text of a failure or None. ``corrupts(kernel, config, run)``
    says whether launch number ``run`` of a configuration writes one wrong byte. ``launched`` collects every launch
    of a kernel as (kernel, config).
    """

    identity: Identity = IDENTITY
    toolchain: Mapping[str, str] = field(default_factory=lambda: {"driver": "1.0", "triton": "scripted"})
    model: DeviceModel = MODEL
    time_us: Callable[[str, Config], float] = lambda kernel, config: 100.0
    fails: Callable[[str, Config], str | None] = lambda kernel, config: None
    corrupts: Callable[[str, Config, int], bool] = lambda kernel, config, run: False
    condition: Condition = field(default_factory=Condition)
    capturing: bool = False
    launched: list[tuple[str, Config]] = field(default_factory=list)


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
        return self.script.condition

    def capturing(self) -> bool:
        return self.script.capturing

    def launcher(self, kernel: Kernel, problem: Problem, config: Config, args: Sequence[Any]) -> Launch:
        script = self.script
        failure = script.fails(kernel.name, config)
        if failure:
            raise CandidateFailed(failure)
        inner = super().launcher(kernel, problem, config, args)
        written = kernel.parameters.index(kernel.outputs()[0])
        runs = 0

        def launch(*arguments: Any) -> None:
            nonlocal runs
            runs += 1
            script.launched.append((kernel.name, config))
            inner(*arguments)
            if script.corrupts(kernel.name, config, runs):
                _flip_a_bit(arguments[written])

        launch.scripted = (kernel.name, config)  # type: ignore[attr-defined]
        return launch

    def timer(self, device: int) -> Timer:
        return _ScriptedTimer(self.script)


class _ScriptedTimer(Timer):
    def __init__(self, script: Script) -> None:
        self._script = script

    def sampler(self, launch: Launch, argument_sets: Sequence[tuple[Any, ...]], launches: int) -> Sampler:
        return _ScriptedSampler(self._script, launch, argument_sets[0])


class _ScriptedSampler(Sampler):
    def __init__(self, script: Script, launch: Launch, args: tuple[Any, ...]) -> None:
        self._script, self._launch, self._args = script, launch, args

    def sample_us(self) -> float:
        kernel, config = self._launch.scripted  # type: ignore[attr-defined]
        return self._script.time_us(kernel, config)


def _flip_a_bit(tensor: Any) -> None:
    import torch

    first = tensor[(slice(0, 1),) * tensor.dim()]
    first.view(torch.uint8)[..., 0] ^= 1
