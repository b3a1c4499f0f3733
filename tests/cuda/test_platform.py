"""The CUDA platform, as far as it goes without a device: torch's properties are described, NVML is a fake."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from kalign_core.cache import fingerprint
from kalign_cuda import identity, limits, platform
from kalign_cuda.platform import CudaPlatform
from tests.cuda.fakes import Board, FakeNvml, properties, uuid_of


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """Two boards, which the platform finds in place of the real NVML and torch."""
    fake = FakeNvml(Board(1), Board(0, processes=[os.getpid()]))
    live = {"shared_memory_per_block_optin": 232448, "L2_cache_size": 62914560, "warp_size": 32}
    monkeypatch.setattr(identity, "library", lambda: (fake, ""))
    monkeypatch.setattr(platform, "_properties", lambda device: properties(device, **live))
    return fake


def test_who_a_device_is(nvml: FakeNvml) -> None:
    """Each device has its own identity."""
    cuda = CudaPlatform()
    assert [cuda.identity(device).key for device in (0, 1)] == [f"GPU-{uuid_of(0)}", f"GPU-{uuid_of(1)}"]


def test_identities_are_read_once(nvml: FakeNvml) -> None:
    """A device is identified once in a process, however often it is asked for."""
    cuda = CudaPlatform()
    for _ in range(3):
        cuda.identity(0)
    assert nvml.calls.count("nvmlInit") == 1


def test_the_driver_is_asked_for_with_the_first_identity(nvml: FakeNvml) -> None:
    """Identity and toolchain cost one initialisation of the library, and say what they say one by one."""
    cuda, alone = CudaPlatform(), CudaPlatform()
    found = cuda.identity(0), cuda.toolchain(0)
    assert nvml.calls.count("nvmlInit") == 1
    assert found[::-1] == (alone.toolchain(0), alone.identity(0))
    assert nvml.calls.count("nvmlInit") == 3


def test_identities_are_read_again_in_a_child(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process asks for itself."""
    cuda = CudaPlatform()
    cuda.identity(0)
    monkeypatch.setattr(platform.os, "getpid", lambda: -7)
    cuda.identity(0)
    assert nvml.calls.count("nvmlInit") == 2


def test_the_model_is_the_device_s(nvml: FakeNvml) -> None:
    """Limits are the architecture's, with what the device reports."""
    model = CudaPlatform().model(0)
    assert (model.target, model.shared_bytes, model.units, model.last_level_bytes) == (
        "cuda:sm_90",
        232448,
        132,
        62914560,
    )


def test_an_older_torch_reports_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an older torch does not report is the table's."""
    monkeypatch.setattr(platform, "_properties", lambda device: properties(device))
    assert CudaPlatform().model(0).shared_bytes == 232448


def test_the_compile_target(nvml: FakeNvml) -> None:
    """Triton's target is its backend, the capability and the warp size."""
    assert CudaPlatform().compile_target(0) == ("cuda", 90, 32)


@pytest.mark.parametrize(("major", "minor", "expected"), [(8, 9, 89), (10, 3, 103), (12, 0, 120)])
def test_capabilities(monkeypatch: pytest.MonkeyPatch, major: int, minor: int, expected: int) -> None:
    """A capability of two parts is one number, with three digits from Blackwell on."""
    monkeypatch.setattr(platform, "_properties", lambda device: SimpleNamespace(major=major, minor=minor))
    assert CudaPlatform().compile_target(0)[1] == expected


def test_the_options_are_the_compiler_s() -> None:
    """A candidate may set what this compiler takes; what it would stumble over is refused."""
    assert CudaPlatform.launch_options == {"num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl"}
    assert not CudaPlatform.launch_options & set(limits.FOREIGN_OPTIONS)


def test_the_condition_is_read_each_time(nvml: FakeNvml) -> None:
    """The state of a device is read whenever it is asked for."""
    cuda = CudaPlatform()
    found = [cuda.condition(0) for _ in range(2)]
    assert [(each.sm_clock_mhz, each.foreign_processes) for each in found] == [(1980, 0)] * 2


def test_the_toolchain(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    """Driver, run time, compiler and bit-affecting variables are facts of the toolchain."""
    monkeypatch.setattr(fingerprint, "versions", lambda: {"torch": "2.11.0", "triton": "3.9.0"})
    monkeypatch.setenv("DISABLE_PTXAS_OPT", "1")
    facts = dict(CudaPlatform().toolchain(0).facts)
    assert (facts["driver"], facts["torch"], facts["triton"], facts["DISABLE_PTXAS_OPT"]) == (
        "580.159.04",
        "2.11.0",
        "3.9.0",
        "1",
    )
    assert {"cuda", "ptxas"} <= set(facts)


def test_an_unknown_driver_keeps_decisions_off_the_disk(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml) -> None:
    """A toolchain whose driver could not be read equals nothing."""
    monkeypatch.setattr(identity, "driver_version", lambda: "unknown")
    assert not CudaPlatform().toolchain(0).known
