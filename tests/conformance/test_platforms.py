"""kalign's own platforms keep to the contract that other people's have to."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kalign_core.hal import cpu
from kalign_core.hal.base import Platform
from kalign_core.hal.cpu import CpuPlatform
from kalign_core.hal.replay import Clock
from kalign_core.records import Identity
from kalign_core.testing import DescribedPlatformConformance, PlatformConformance
from kalign_core.testing.launching import Ground
from tests.conformance.replay_platform import Replay


class TestCpu(PlatformConformance):
    """The embedded platform."""

    plugin = "kalign_core.embedded"
    name = "cpu"

    @pytest.fixture
    def twins(self, monkeypatch: pytest.MonkeyPatch) -> tuple[Identity, ...]:
        """Two machines with the same processor."""
        found = []
        for machine in ("4c1f8a7b2d3e4f5061728394a5b6c7d8", "5d2f8a7b2d3e4f5061728394a5b6c7d8"):
            monkeypatch.setattr(cpu, "_machine", lambda machine=machine: machine)
            found.append(CpuPlatform().identity(-1))
        return tuple(found)

    @pytest.fixture
    def unreadable(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Identity:
        """A machine without an id and without a name."""
        monkeypatch.setattr(cpu, "Path", lambda path: tmp_path / path.lstrip("/"))
        monkeypatch.setattr(socket, "gethostname", str)
        return CpuPlatform().identity(-1)


class TestReplay(PlatformConformance):
    """The scripted platform, which launches for real and times as its script says."""

    plugin = "tests.conformance.replay_plugin"
    name = "replay"

    @pytest.fixture
    def twins(self) -> tuple[Identity, ...]:
        """Two boards with serial numbers of their own."""
        return tuple(Replay(key).identity(-1) for key in ("SN-7f3a01c2", "SN-7f3a01c3"))

    @pytest.fixture
    def unreadable(self) -> Identity:
        """A board whose serial number could not be read."""
        return Replay("unknown").identity(-1)

    def test_more_work_takes_longer(self, ground: Ground, work: tuple[int, int]) -> None:
        """Readings are the script's: what it says takes longer reads longer, whatever is launched."""
        assert isinstance(ground.platform, Replay)
        readings = []
        for scripted_us in (100.0, 200.0):
            ground.platform.script.time_us = Clock(other_us=scripted_us)
            with self.timed(ground, work[0]) as sampler:
                readings.append(sampler.sample_us())
        assert readings == [100.0, 200.0]


def seen_by_a_child(platform: Platform) -> list[list[str]]:
    """Identity and toolchain of every device in a child of fork, which has to ask for itself."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with os.fdopen(writing, "w") as pipe:
                for device in platform.devices():
                    pipe.write(f"{platform.identity(device)!r}\n{platform.toolchain(device)!r}\n")
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        lines = pipe.read().splitlines()
    os.waitpid(child, 0)
    return [lines[start : start + 2] for start in range(0, len(lines), 2)]


class Described(DescribedPlatformConformance):
    """A vendor's platform without the device: two boards of one model, described to its plugin by fakes."""

    @pytest.fixture
    def identities_elsewhere(self, platform: Platform) -> list[list[str]]:
        """What a child of fork finds: a fresh process has no fakes."""
        return seen_by_a_child(platform)


class TestCuda(Described):
    """NVIDIA's platform on two described boards."""

    plugin = "kalign_cuda.plugin"
    name = "cuda"

    @pytest.fixture
    def platform(self, monkeypatch: pytest.MonkeyPatch) -> Platform:
        """Two boards of one model, in one machine."""
        from kalign_cuda import identity, platform
        from kalign_cuda.platform import CudaPlatform
        from tests.cuda.fakes import Board, FakeNvml, properties

        live = {"shared_memory_per_block_optin": 232448, "L2_cache_size": 62914560, "warp_size": 32}
        monkeypatch.setattr(identity, "library", lambda: (FakeNvml(Board(1), Board(0)), ""))
        monkeypatch.setattr(platform, "_properties", lambda device: properties(device, **live))
        monkeypatch.setattr(CudaPlatform, "devices", lambda self: (0, 1))
        return CudaPlatform()

    @pytest.fixture
    def unreadable(self, platform: Platform, monkeypatch: pytest.MonkeyPatch) -> Identity:
        """A board of which neither NVML nor torch says anything but its name."""
        from kalign_cuda import identity
        from kalign_cuda import platform as module
        from tests.cuda.fakes import properties

        monkeypatch.setattr(identity, "library", lambda: (None, "libnvidia-ml.so.1 is not there"))
        nothing = dict.fromkeys(("uuid", "pci_domain_id", "pci_bus_id", "pci_device_id"))
        monkeypatch.setattr(module, "_properties", lambda device: properties(device, **nothing))
        return platform.identity(0)


class TestRocm(Described):
    """AMD's platform on two described boards."""

    plugin = "kalign_rocm.plugin"
    name = "rocm"

    @pytest.fixture
    def platform(self, monkeypatch: pytest.MonkeyPatch) -> Platform:
        """Two boards of one model, in one machine."""
        from kalign_rocm import identity, platform
        from kalign_rocm.platform import RocmPlatform
        from tests.rocm.fakes import FakeSmi, Processor, properties

        live = {"shared_memory_per_block": 65536, "L2_cache_size": 4 << 20, "warp_size": 64}
        fake = FakeSmi(Processor(1, hip_id=1), Processor(0, hip_id=0))
        monkeypatch.setattr(identity, "library", lambda: (fake, ""))
        monkeypatch.setattr(platform, "_properties", lambda device: properties(device, **live))
        monkeypatch.setattr(RocmPlatform, "devices", lambda self: (0, 1))
        return RocmPlatform()

    @pytest.fixture
    def unreadable(self, platform: Platform, monkeypatch: pytest.MonkeyPatch) -> Identity:
        """A board of which neither amdsmi nor torch says anything but its name."""
        from kalign_rocm import identity
        from kalign_rocm import platform as module
        from tests.rocm.fakes import properties

        monkeypatch.setattr(identity, "library", lambda: (None, "libamd_smi.so is not there"))
        nothing = dict.fromkeys(("pci_domain_id", "pci_bus_id", "pci_device_id"))
        monkeypatch.setattr(module, "_properties", lambda device: properties(device, **nothing))
        return platform.identity(0)
