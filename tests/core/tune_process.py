"""What tests of ``kalign tune`` in real processes share: an operator, a scripted platform as a plugin, a place to run.

The command finds the platform as it finds any plugin, and what its device does is in a file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch

import kalign_core as kalign
from kalign_core.hal.replay import ReplayPlatform, Script
from kalign_core.ops.base import random_tensor
from kalign_core.ops.noting import launch
from kalign_core.records import Config
from tests.core.standstill import Standstill, say_that_it_hangs
from tests.core.tuner_samples import BEST, declared, double_kernel
from tests.search_path import search_path

import triton  # isort: skip
import triton.language as tl  # isort: skip

ROOT = Path(__file__).resolve().parents[2]
OPERATOR = "tests.core.tune_process:doubling"
FEW = "tests.core.tune_process:doubling_few"
LIMIT_S = 600.0
REAL, HURRIED = "kalign_core", "tests.core.tune_command"
PLUGIN = """
from kalign_core.hookspecs import hookimpl
from kalign_core.records import Evidence, PlatformRecord

KALIGN_API = 1

@hookimpl
def kalign_platforms():
    found = Evidence(True, "scripted")
    return [PlatformRecord("replay", lambda environment: found, "tests.core.tune_process:FromFile")]
"""


@triton.jit(do_not_specialize=["T"])
def double_few(x, out, T, H, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    for start in range(0, T * H, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(out + at, tl.load(x + at, mask=at < T * H) * 2, mask=at < T * H)


# Under the function's own name, so that a compile process finds it.
double_few = declared(double_few, "double_few", knobs={"BLOCK": (32, 64, 128), "num_warps": (4,)})


class Doubling(kalign.Operator):
    """``doubling(x)``: x: ``(T H)`` times two."""

    name: ClassVar[str] = "doubling"
    kernels = (double_kernel,)
    dims = ("T", "H")
    dtypes = ("fp32",)
    shapes = ({"T": 4, "H": 8},)
    small_shapes = shapes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        launch(self.kernels[0], x, out, *x.shape)
        return out

    def inputs(self, sizes: Any, dtype: str, seed: int, device: torch.device) -> tuple[Any, ...]:
        return (random_tensor((sizes["T"], sizes["H"]), dtype, seed, device),)

    def oracle(self, *args: Any) -> torch.Tensor:
        return args[0].double() * 2.0


class DoublingFew(Doubling):
    """The same with three candidates."""

    name: ClassVar[str] = "doubling_few"
    kernels = (double_few,)


doubling, doubling_few = Doubling(), DoublingFew()


class FromFile(ReplayPlatform):
    """The scripted platform that follows the file ``REPLAY_SCRIPT``, and says in ``REPLAY_HANGS`` that it hangs.

    With ``REPLAY_STOPS_AFTER`` it hangs at the first launch after so many decisions are on disk.
    """

    def __init__(self) -> None:
        path = Path(os.environ["REPLAY_SCRIPT"])
        script = Script.read(path)
        planned = json.loads(path.read_text(encoding="utf-8")).get("misdeeds", {})
        self._hangs = {text: told["at"] for text, told in planned.items() if told["what"] == "hang"}
        self._then, script.raises = script.raises, self._raises
        self._stops_after = float(os.environ.get("REPLAY_STOPS_AFTER", "inf"))
        super().__init__(script)

    def _raises(self, kernel: str, config: Config, run: int) -> BaseException | None:
        """What the script says, and that it is about to hang where it is."""
        stops = decided(Path(os.environ["KALIGN_CACHE_DIR"])) >= self._stops_after
        if stops or self._hangs.get(str(config)) == run:
            self._said = say_that_it_hangs(Path(os.environ["REPLAY_HANGS"]))
        while stops:
            time.sleep(1.0)
        return self._then(kernel, config, run)


def decided(cache: Path) -> int:
    """How many decisions are on disk."""
    files = [path for path in cache.glob("*.toml") if not path.name.endswith(".failures.toml")]
    return sum(path.read_text(encoding="utf-8").count("[[entry]]") for path in files)


@dataclass
class Place:
    """A folder with a plugin, a script and a cache, and the command run in it.

    For the ``module`` ``HURRIED`` in place of ``kalign_core`` time passes only while a candidate hangs.
    """

    folder: Path
    module: str = REAL
    script: dict[str, Any] = field(default_factory=lambda: {"times_us": {str(BEST): 50.0}})

    @property
    def hangs(self) -> Path:
        """The file in which a process says that it hangs."""
        return self.folder / "hangs"

    @property
    def cache(self) -> Path:
        """The folder of the decisions."""
        return self.folder / "cache"

    def start(self, *arguments: str, stops_after: int | None = None, **options: Any) -> subprocess.Popen[str]:
        """``kalign tune arguments`` as a process of its own, which hangs once ``stops_after`` decisions are made."""
        path = self.folder / "script.json"
        path.write_text(json.dumps(self.script))
        self.hangs.unlink(missing_ok=True)  # the last process may be dying still
        inherited = {n: v for n, v in os.environ.items() if not n.startswith(("KALIGN_", "TRITON_"))}
        ours = {
            "PYTHONPATH": search_path(self.folder, ROOT), "REPLAY_HANGS": str(self.hangs),
            "KALIGN_PLATFORM": "replay", "KALIGN_CACHE_DIR": str(self.cache), "TRITON_INTERPRET": "1",
            "REPLAY_SCRIPT": str(path), "TRITON_CACHE_DIR": str(self.folder / "triton"),
            **({} if stops_after is None else {"REPLAY_STOPS_AFTER": str(stops_after)}),
        }  # fmt: skip
        command = [sys.executable, "-m", self.module, "tune", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env={**inherited, **ours}, **{**pipes, **options})

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The same, to its end."""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=LIMIT_S)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def rows(self, *arguments: str) -> list[dict[str, Any]]:
        """The rows of one run that ends well."""
        done = self.run(OPERATOR, "--json", *arguments)
        assert done.returncode == 0, done.stderr
        found: list[dict[str, Any]] = json.loads(done.stdout)["problems"]
        return found


def until(process: subprocess.Popen[str], holds: Callable[[str], bool]) -> str:
    """Read the process's standard error until a line for which ``holds``; gives what was read."""
    assert process.stderr is not None
    read = []
    for line in process.stderr:
        read.append(line)
        if holds(line):
            return "".join(read)
    raise AssertionError(f"it ended without saying so: {''.join(read)}")


def children_of(pid: int) -> list[int]:
    """The processes that ``pid`` started and that live."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def until_it_hangs(here: Place, limit_s: float = LIMIT_S) -> None:
    """Wait until a process of ``here`` hangs."""
    clock, end = Standstill(here.hangs), time.monotonic() + limit_s
    while not clock():
        assert time.monotonic() < end
        time.sleep(0.05)


def gone(pids: list[int], limit_s: float = LIMIT_S) -> bool:
    """Whether none of ``pids`` lives, after a while; a zombie does not."""
    end = time.monotonic() + limit_s
    while any(map(_lives, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(_lives, pids))


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def misdeeds(*planned: tuple[Any, str, int]) -> dict[str, Any]:
    """Misdeeds as a script's file has them: (configuration, what, at which launch)."""
    return {str(config): {"what": what, "at": at} for config, what, at in planned}
