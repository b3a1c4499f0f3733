"""What tests of measuring share: a meter on a scripted device, and contenders to measure with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kalign_core.hal.replay import Clock, ReplayPlatform, Script
from kalign_core.records import Config
from kalign_core.tuner.failures import Guarded
from kalign_core.tuner.measure import Contender, Meter
from kalign_core.verifier.bench import Bench
from kalign_core.verifier.inputs import CORE_FAMILIES
from tests.core.tuner_samples import REFERENCE, double_kernel, problem

OTHERS = [REFERENCE.replace(BLOCK=block) for block in (16, 32, 128)]


@dataclass
class Stand:
    """A meter on a scripted device and contenders to measure with it."""

    script: Script = field(default_factory=Script)
    pressed: Callable[[], bool] = lambda: False
    rest: Callable[[float], None] = lambda seconds: None
    now: Callable[[], float] = lambda: 0.0

    def __post_init__(self) -> None:
        self.use(ReplayPlatform(self.script))

    def use(self, platform: ReplayPlatform) -> None:
        self.platform, self.bench = platform, Bench(platform, double_kernel, problem(), -1)
        self.bench.families.update({family.name: family for family in CORE_FAMILIES})

    @property
    def meter(self) -> Meter:
        return Meter(self.platform, self.bench, pressed=self.pressed, rest=self.rest, now=self.now)

    def contender(self, config: Config, order: int = 0) -> Contender:
        args = self.bench.sample_arguments()
        launch = Guarded(self.platform.launcher(double_kernel, problem(), config, args))
        return Contender(config, launch, self.bench.bound(config, launch), ((order,), str(config)))

    def all(self, *configs: Config) -> list[Contender]:
        return [self.contender(config, number) for number, config in enumerate(configs)]


def stand(clock: Clock, **script: Any) -> Stand:
    return Stand(Script(time_us=clock, **script))


def on_device(script: Script, **said: Any) -> Stand:
    """A stand on a scripted device that is no interpreter: readings take many launches and the device may settle."""
    here = Stand(script, **said)
    here.bench.interpreted = False
    return here
