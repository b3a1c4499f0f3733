"""What tests of tuning share: a small kernel with sixteen candidates, and tunings on the scripted platform."""

from __future__ import annotations

import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import kalign_core.hal  # noqa: F401  # before triton, so that it interprets
from kalign_core import plugins as plugin_loading
from kalign_core.declare import Config, Kernel, data, kernel, powers_of_two, written
from kalign_core.hal.replay import ReplayPlatform, Script
from kalign_core.plugins import Plugins
from kalign_core.records import Argument, Entry, EntryKey, Problem, Toolchain
from kalign_core.settings import Settings
from kalign_core.tuner.compile import CompilePool
from kalign_core.tuner.loop import Effort, Report, Tuning

import triton  # isort: skip
import triton.language as tl  # isort: skip

REFERENCE = Config(BLOCK=64, num_warps=4, enable_fp_fusion=False)
BEST = REFERENCE.replace(BLOCK=128, num_warps=2)
SECOND = REFERENCE.replace(BLOCK=32, num_warps=8)
EFFORT = Effort("test", candidates=96, finalists=4, rounds=15)
FAKE_WORKER = [sys.executable, "-S", str(Path(__file__).with_name("fake_worker.py"))]


def declared(fn: Any, name: str, **changed: Any) -> Kernel:
    """``fn(x, out, T, H, ...)`` as a kernel that doubles, with what is ``changed``."""
    said = {
        "name": name, "family": "pointwise", "contract": f"{name}/1", "dims": ("T", "H"),
        "args": {"x": data("T", "H", strides=("H", 1)), "out": written("T", "H", strides=("H", 1))},
        "reference": REFERENCE, "knobs": {"BLOCK": (16, 32, 64, 128), "num_warps": (1, 2, 4, 8)},
        "bucket": {"T": powers_of_two}, "grid": lambda p, c: (1,),
    }  # fmt: skip
    made: Kernel = kernel(**{**said, **changed})(fn)
    return made


@triton.jit(do_not_specialize=["T"])
def double(x, out, T, H, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    for start in range(0, T * H, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, mask=at < T * H) * 2, mask=at < T * H)


@triton.jit(do_not_specialize=["T"])
def write_both(x, out, T, H, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < T * H)
    tl.store(out + at, values, mask=at < T * H)
    tl.store(x + at, values + 1, mask=at < T * H)


double_kernel = declared(double, "double")
write_both_kernel = declared(write_both, "write_both")


def problem(t: int = 4, phase: str = "train", made: Kernel = double_kernel) -> Problem:
    """``T`` rows of 8 float32 numbers."""
    return Problem(made.name, (("T", t), ("H", 8)), tuple(Argument(n, "fp32", (8, 1)) for n in ("x", "out")), phase)


def key(text: str = "T<=4 H=8", made: Kernel = double_kernel, phase: str = "train") -> EntryKey:
    """A key as a session would make it, as far as tuning looks at one."""
    return EntryKey(made.name, made.contract, text, "x out", phase, Toolchain.of(triton="scripted"), "s", "2026.1")


def module(source: str, name: str = "in_memory") -> ModuleType:
    """A plugin module of this source."""
    made = ModuleType(name)
    head = "from kalign_core.hookspecs import hookimpl\nfrom kalign_core.records import *\nKALIGN_API = 1\n"
    exec(head + textwrap.dedent(source), vars(made))
    return made


def builtin(*sources: str) -> Plugins:
    """The built-in plugins, and further ones of these sources, named p0, p1, ..."""
    found = plugin_loading.load(Settings(plugins=()), path=[])
    for number, source in enumerate(sources):
        found = found.with_module(f"p{number}", module(source))
    return found


@dataclass
class Bed:
    """A scripted device with its session's parts; ``tune`` runs one tuning on it."""

    script: Script = field(default_factory=Script)
    plugins: Plugins = field(default_factory=builtin)
    pool: CompilePool = field(default_factory=lambda: CompilePool(1, FAKE_WORKER))

    def __post_init__(self) -> None:
        self.platform = ReplayPlatform(self.script)

    def tuning(self, made: Kernel = double_kernel, **said: Any) -> Tuning:
        values = {"problem": problem(made=made), "key": key(made=made), "effort": EFFORT, "clock": self.script.clock}
        return Tuning(self.plugins, self.platform, self.pool, -1, made, **{**values, **said})

    def tune(self, made: Kernel = double_kernel, **said: Any) -> Report:
        return self.tuning(made, **said).run()


def entry(config: Config, **said: Any) -> Entry:
    """A stored decision for ``config``."""
    return Entry(key(), config, **said)


def winner_of(report: Report) -> Config:
    """The configuration that was decided on."""
    assert report.entry is not None
    return report.entry.config


def timed(script: Script) -> set[Config]:
    """The configurations of which any reading was taken."""
    return {config for _, config, _ in script.timed}


def readings(script: Script, config: Config, sets: int = 1) -> int:
    """How many readings of ``config`` were taken that went round ``sets`` sets of arguments: one is warm."""
    return sum(taken[1:] == (config, sets) for taken in script.timed)
