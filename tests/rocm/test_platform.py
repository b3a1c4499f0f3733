"""The ROCm platform, as far as it goes without a device: torch's properties are described, amdsmi is a fake."""

from __future__ import annotations

import os

import pytest

from kalign_core.cache import fingerprint
from kalign_rocm import identity, limits, platform
from kalign_rocm.platform import RocmPlatform
from tests.rocm.fakes import FakeSmi, Processor, parts, properties


@pytest.fixture
def smi(monkeypatch: pytest.MonkeyPatch) -> FakeSmi:
    """Two boards, which the platform finds in place of the real amdsmi and torch."""
    fake = FakeSmi(Processor(1, hip_id=1), Processor(0, hip_id=0, processes=[os.getpid()]))
    live = {"shared_memory_per_block": 65536, "L2_cache_size": 4 << 20, "warp_size": 64}
    monkeypatch.setattr(identity, "library", lambda: (fake, ""))
    monkeypatch.setattr(platform, "_properties", lambda device: properties(device, **live))
    return fake


def test_who_a_device_is(smi: FakeSmi) -> None:
    """Each device has its own identity."""
    rocm = RocmPlatform()
    assert [rocm.identity(device).key.split("/")[1] for device in (0, 1)] == ["0000:60:00", "0000:61:00"]


def test_which_part_a_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of the device is what tells the parts of one board apart."""
    monkeypatch.setattr(identity, "library", lambda: (FakeSmi(*parts(0, 0)), ""))
    monkeypatch.setattr(platform, "_properties", lambda device: properties(multi_processor_count=38))
    for mask in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(mask, raising=False)
    assert dict(RocmPlatform().identity(3).must_match)["partition"] == "3"


def test_identities_are_read_once(smi: FakeSmi) -> None:
    """A device is identified once in a process, however often it is asked for."""
    rocm = RocmPlatform()
    for _ in range(3):
        rocm.identity(0)
    assert smi.calls.count("amdsmi_init") == 1


def test_the_driver_is_asked_for_with_the_first_identity(smi: FakeSmi) -> None:
    """Identity and toolchain cost one initialisation of the library, and say what they say one by one."""
    rocm, alone = RocmPlatform(), RocmPlatform()
    found = rocm.identity(0), rocm.toolchain(0)
    assert smi.calls.count("amdsmi_init") == 1
    assert found[::-1] == (alone.toolchain(0), alone.identity(0))
    assert smi.calls.count("amdsmi_init") == 3


def test_identities_are_read_again_in_a_child(smi: FakeSmi, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process asks for itself."""
    rocm = RocmPlatform()
    rocm.identity(0)
    monkeypatch.setattr(platform.os, "getpid", lambda: -7)
    rocm.identity(0)
    assert smi.calls.count("amdsmi_init") == 2


def test_the_model_is_the_device_s(smi: FakeSmi) -> None:
    """Limits are the architecture's, with what the device reports."""
    model = RocmPlatform().model(0)
    assert (model.target, model.shared_bytes, model.units, model.last_level_bytes) == (
        "hip:gfx942",
        65536,
        304,
        256 << 20,
    )


def test_an_older_torch_reports_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an older torch does not report is the table's."""
    monkeypatch.setattr(platform, "_properties", lambda device: properties(warp_size=None))
    assert (RocmPlatform().model(0).shared_bytes, RocmPlatform().model(0).warp_size) == (65536, 64)


def test_the_compile_target(smi: FakeSmi) -> None:
    """Triton's target is its backend, the architecture without its features, and the wavefront's size."""
    assert RocmPlatform().compile_target(0) == ("hip", "gfx942", 64)


def test_the_target_of_a_consumer_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device with wavefronts of 32 is compiled for as one."""
    found = properties(gcnArchName="gfx1201", warp_size=32)
    monkeypatch.setattr(platform, "_properties", lambda device: found)
    assert RocmPlatform().compile_target(0) == ("hip", "gfx1201", 32)


def test_the_options_are_the_compiler_s() -> None:
    """A candidate may set what this compiler takes; what it would stumble over is refused."""
    assert RocmPlatform.launch_options == {"num_warps", "num_stages", "waves_per_eu"}
    assert not RocmPlatform.launch_options & set(limits.FOREIGN_OPTIONS)


def test_the_condition_is_read_each_time(smi: FakeSmi) -> None:
    """The state of a device is read whenever it is asked for."""
    rocm = RocmPlatform()
    found = [rocm.condition(0) for _ in range(2)]
    assert [(each.sm_clock_mhz, each.foreign_processes) for each in found] == [(2100, 0)] * 2


def test_the_toolchain(smi: FakeSmi, monkeypatch: pytest.MonkeyPatch) -> None:
    """Driver, run time, compiler and bit-affecting variables are facts of the toolchain."""
    monkeypatch.setattr(fingerprint, "versions", lambda: {"torch": "2.11.0", "triton": "3.9.0"})
    monkeypatch.setenv("AMDGCN_USE_BUFFER_OPS", "0")
    facts = dict(RocmPlatform().toolchain(0).facts)
    assert (facts["driver"], facts["torch"], facts["triton"], facts["AMDGCN_USE_BUFFER_OPS"]) == (
        "6.10.5",
        "2.11.0",
        "3.9.0",
        "0",
    )
    assert "hip" in facts


def test_an_unknown_driver_keeps_decisions_off_the_disk(monkeypatch: pytest.MonkeyPatch, smi: FakeSmi) -> None:
    """A toolchain whose driver could not be read equals nothing."""
    monkeypatch.setattr(identity, "driver_version", lambda: "unknown")
    assert not RocmPlatform().toolchain(0).known
