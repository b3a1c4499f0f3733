"""How a launch reaches the device: plainly where there are no streams, from a graph through the platform's timer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kalign_core.errors import BadArgument, CandidateFailed
from kalign_core.hal.base import Launch, Sampler, Timer
from kalign_core.hal.cpu import CpuPlatform
from kalign_core.records import DeviceModel
from kalign_core.verifier.flight import WAYS, random_states, ready


class Recorder(Sampler):
    """A graph of one launch that notes what became of it."""

    def __init__(self, launch: Launch, args: tuple[Any, ...], told: list[str]) -> None:
        self.launch, self.args, self.told = launch, args, told

    def sample_us(self) -> float:
        self.told.append("replayed")
        self.launch(*self.args)
        return 1.0

    def close(self) -> None:
        self.told.append("closed")


class Gpu(CpuPlatform, Timer):
    """The host, calling itself a device; its own timer."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def model(self, device: int) -> DeviceModel:
        return DeviceModel("cuda", "sm_90", 32, 32, 232448)

    def timer(self, device: int) -> Timer:
        return self

    def sampler(self, launch: Launch, argument_sets: Sequence[tuple[Any, ...]], launches: int) -> Sampler:
        self.told.append(f"captured {launches}")
        return Recorder(launch, argument_sets[0], self.told)


def fly(platform: CpuPlatform, launch: Launch, args: Sequence[Any], how: str, times: int = 1) -> None:
    """Launch ``times`` times the way ``how`` says."""
    with ready(platform, -1, launch, args, how) as fire:
        for _ in range(times):
            fire()


@pytest.mark.parametrize("how", WAYS)
def test_an_interpreter_launches_plainly(how: str) -> None:
    """It has neither graphs nor streams; whatever is asked, every call is one launch."""
    got: list[Any] = []
    fly(CpuPlatform(), lambda *args: got.append(args), (1, 2), how, times=2)
    assert got == [(1, 2), (1, 2)]


def test_a_graph_of_one_launch_is_captured_once_replayed_and_freed() -> None:
    """The platform's timer makes graphs already; every call replays the same one."""
    platform, got = Gpu(), []
    fly(platform, lambda *args: got.append(args), [3], "graph", times=2)
    assert (platform.told, got) == (["captured 1", "replayed", "replayed", "closed"], [(3,), (3,)])


def test_a_graph_is_freed_when_its_launch_fails() -> None:
    """Nothing of it stays on the device."""

    def fails(*args: Any) -> None:
        raise CandidateFailed("no")

    platform = Gpu()
    with pytest.raises(CandidateFailed):
        fly(platform, fails, [], "graph")
    assert platform.told[-1] == "closed"


def test_an_unknown_way_is_refused() -> None:
    """The error says which ways there are."""
    with pytest.raises(BadArgument, match="graph"):
        fly(CpuPlatform(), lambda: None, (), "twice")


def test_a_draw_changes_the_random_state() -> None:
    """What the gate compares before and after a launch."""
    before = random_states(torch.device("cpu"))
    assert all(map(torch.equal, before, random_states(torch.device("cpu"))))
    torch.rand(1)
    assert not all(map(torch.equal, before, random_states(torch.device("cpu"))))
