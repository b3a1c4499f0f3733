"""What CUDA and ROCm share, on stand-ins for devices: which code stays loaded, and what a capture must not meet."""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

import kalign_core as kalign
from kalign_core.cache.base import MemoryStore
from kalign_core.errors import CandidateFailed, DeviceLost, NotNow
from kalign_core.hal import torch_gpu, triton_compat
from kalign_core.hal.base import Sampler
from kalign_core.hal.replay import IDENTITY, MODEL
from kalign_core.hal.torch_gpu import GraphTimer, TorchGpuPlatform
from kalign_core.ops.noting import launch
from kalign_core.records import Config, DeviceModel, Identity, Problem, Toolchain
from kalign_core.session import Session
from tests.core.scripted import FASTER, SCALE_REFERENCE, X, scale_kernel, scale_problem, store_winner

MOST = 4


class Code:
    """Stands for a compiled kernel: its device code is loaded for as long as the object lives."""

    def __init__(self, config: Config) -> None:
        self.config = config


class Hosted(TorchGpuPlatform):
    """A GPU platform whose tensors are the host's and whose launches do nothing."""

    name: ClassVar[str] = "hosted"
    device_type: ClassVar[str] = "cpu"
    launch_options: ClassVar[frozenset[str]] = frozenset({"num_warps", "num_stages"})

    def __init__(self) -> None:
        self.captures = False
        self.loaded: list[weakref.ref[Code]] = []
        self.compiled: list[Config] = []

    def identity(self, device: int) -> Identity:
        return IDENTITY

    def toolchain(self, device: int) -> Toolchain:
        return Toolchain.of(triton="hosted")

    def model(self, device: int) -> DeviceModel:
        return MODEL

    def compile_target(self, device: int) -> tuple[str, int | str, int]:
        return "cuda", 90, 32

    def capturing(self) -> bool:
        return self.captures

    @contextlib.contextmanager
    def on(self, device: int) -> Iterator[None]:
        yield

    def compile(self, kernel: Any, problem: Problem, config: Config, device: int) -> Code:
        made = Code(config)
        self.loaded.append(weakref.ref(made))
        self.compiled.append(config)
        return made

    def tried(self, config: Config) -> None:
        """Make a launch and forget it, as tuning does."""
        x = torch.empty(4, 40)
        self.launcher(scale_kernel, scale_problem(), config, (x, x, 4, 40, 40, 40, 2.0))

    def try_many(self) -> None:
        """Load more code than is held."""
        for rows in range(1, 2 + 2 * MOST):
            self.tried(SCALE_REFERENCE.replace(ROWS=1000 + rows))
        gc.collect()

    def alive(self) -> list[Config]:
        """The configurations whose code is loaded."""
        return [code.config for code in (made() for made in self.loaded) if code is not None]


@pytest.fixture
def platform(monkeypatch: pytest.MonkeyPatch) -> Hosted:
    """A platform that holds little code that serves nobody."""
    for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream"):
        monkeypatch.setattr(torch._C, name, lambda *device: -1, raising=False)
    monkeypatch.setattr(triton_compat, "Prebound", lambda code: SimpleNamespace(code=code, launch=lambda *call: None))
    monkeypatch.setattr(torch_gpu, "MOST_LOADED", MOST)
    for held in ("_loaded", "_serving"):
        monkeypatch.setattr(torch_gpu, held, {})
    return Hosted()


def call(here: Session, x: torch.Tensor = X, mode: str = "read") -> None:
    """Launch ``scale`` on ``x``, which computes nothing here."""
    out = torch.empty_like(x)
    with here.active(), kalign.using(mode=mode):
        launch(scale_kernel, x, out, *x.shape, x.stride(0), out.stride(0), 2.0)


# --- what stays loaded --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "winner"), [("off", SCALE_REFERENCE), ("read", SCALE_REFERENCE), ("read", FASTER)])
def test_what_served_a_call_stays_loaded(platform: Hosted, mode: str, winner: Config) -> None:
    """A graph that was captured may replay it, whatever is tuned, forgotten and loaded afterwards."""
    here = Session(platform=platform, store=MemoryStore())
    if winner == FASTER:
        store_winner(here, X)
    for _ in range(3):
        call(here, mode=mode)
        here.forget()
        platform.try_many()
        assert (platform.alive().count(winner), platform.compiled.count(winner)) == (1, 1)


def test_what_a_failing_launch_gave_way_to_stays_loaded(platform: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference that takes the place of a launch that failed serves callers too."""

    def bound(code: Code) -> SimpleNamespace:
        return SimpleNamespace(launch=refuse if code.config == FASTER else lambda *call: None)

    def refuse(*call: Any) -> None:
        raise CandidateFailed("out of resource")

    monkeypatch.setattr(triton_compat, "Prebound", bound)
    here = Session(platform=platform, store=MemoryStore())
    store_winner(here, X)
    call(here)
    here.forget()
    platform.try_many()
    assert platform.alive().count(SCALE_REFERENCE) == 1


def test_threads_that_load_the_same_code_share_it(platform: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what two threads load at once one is launched by both, so that what either captured is kept."""
    x, compile_ = torch.empty(4, 40), platform.compile

    def launch_() -> Any:
        return platform.launcher(scale_kernel, scale_problem(), FASTER, (x, x, 4, 40, 40, 40, 2.0))

    others: list[Any] = []

    def compiling(*asked: Any) -> Code:
        if not others:
            others.append(None)
            others[0] = launch_()  # as another thread would meanwhile
        return compile_(*asked)

    monkeypatch.setattr(platform, "compile", compiling)
    assert launch_().compiled is others[0].compiled


def test_code_made_under_other_variables_is_compiled_anew(platform: Hosted, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a compiler made before a variable changed that it reads is launched for nothing that is resolved after."""
    here = Session(platform=platform, store=MemoryStore())
    for change in (lambda: None, lambda: monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")):
        change()
        for _ in range(2):
            call(here)
            here.forget()
    assert platform.compiled == [SCALE_REFERENCE] * 2


def test_what_was_only_tried_is_unloaded(platform: Hosted) -> None:
    """Code of candidates does not pile up on the device: past the bound what nobody holds is dropped."""
    platform.tried(FASTER)
    platform.try_many()
    assert FASTER not in platform.alive()
    assert len(platform.alive()) <= MOST


def test_nothing_is_unloaded_during_a_capture(platform: Hosted) -> None:
    """Unloading code ends a capture, so that past the bound more is held until it is over."""
    platform.captures = True
    platform.try_many()
    assert len(platform.alive()) == len(platform.loaded) > MOST
    platform.captures = False
    platform.tried(FASTER)
    assert platform.alive() == [FASTER]


@pytest.mark.parametrize(
    ("says", "kind"),
    [
        ("CUDA error: an illegal memory access was encountered", DeviceLost),
        ("CUDA error: operation not permitted when stream is capturing", NotNow),
        ("CUDA error: operation failed due to a previous error during capture", NotNow),
    ],
)
def test_a_capture_elsewhere_is_no_lost_device(
    platform: Hosted, monkeypatch: pytest.MonkeyPatch, says: str, kind: type[Exception]
) -> None:
    """A device that cannot be waited for because another thread captures a graph is as well as ever."""

    def refuse(device: int) -> None:
        raise RuntimeError(f"{says}\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(torch.cuda, "synchronize", refuse)
    with pytest.raises(kind):
        platform.synchronize(0)


# --- capturing what is timed --------------------------------------------------------------------------------------


class Event:
    """Stands for a device's event."""

    def __init__(self, log: list[str], number: int) -> None:
        self._log, self._number = log, number

    def record(self, *stream: Any) -> None:
        self._log.append(f"event {self._number} on {stream or 'the current stream'}")

    def synchronize(self) -> None:
        self._log.append(f"wait for event {self._number}")

    def elapsed_time(self, other: Event) -> float:
        return 0.6


@pytest.fixture
def log() -> list[str]:
    """What the stand-in for the device was asked to do."""
    return []


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch, log: list[str]) -> Callable[[Callable[..., None]], Sampler]:
    """``captured(launch)`` records three launches as a timing does, on a stand-in for the device."""
    nothing, numbers = contextlib.nullcontext(), itertools.count(1)
    stream = SimpleNamespace(wait_stream=lambda other: None)
    graph = SimpleNamespace(
        capture_begin=lambda **_: None, capture_end=lambda: None,
        reset=lambda: None, replay=lambda: log.append("replay"),
    )  # fmt: skip
    for name, value in {
        "CUDAGraph": lambda: graph, "Event": lambda **_: Event(log, next(numbers)), "Stream": lambda device: stream,
        "device": lambda device: nothing, "stream": lambda stream: nothing, "current_stream": lambda device: stream,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    return lambda launch: GraphTimer(0).sampler(launch, [()], 3)


def test_a_reading_is_a_replay_between_two_events(captured: Any, log: list[str]) -> None:
    """What is timed is the recorded launches and nothing else, on the stream that is the caller's just then."""
    launches: list[int] = []
    sampler = captured(lambda: launches.append(1))
    assert (len(launches), log) == (3, [])
    assert sampler.sample_us() == pytest.approx(200.0)
    here = "the current stream"
    assert log == [f"event 1 on {here}", "replay", f"event 2 on {here}", "wait for event 2"]
    assert len(launches) == 3


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_during_a_capture(captured: Any, enabled: bool) -> None:
    """Garbage may hold code, and unloading it would end the capture; afterwards all is as it was."""
    seen: list[bool] = []
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        captured(lambda: seen.append(gc.isenabled()))
        seen.append(gc.isenabled())
    finally:
        (gc.enable if before else gc.disable)()
    assert seen == [False] * 3 + [enabled]


def test_a_capture_that_fails_leaves_the_collector_as_it_was(captured: Any) -> None:
    """Whatever a launch raises while it is recorded, garbage is collected again."""

    def fail() -> None:
        raise ZeroDivisionError

    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        captured(fail)
    assert gc.isenabled()
