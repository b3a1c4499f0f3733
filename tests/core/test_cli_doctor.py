"""``kalign doctor`` from end to end on machines that are described: both vendors, neither, broken drivers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

# Runs the whole command in a fresh process that takes a described machine for its own; nothing else is replaced.
DOCTOR = """
import sys
from pathlib import Path
from kalign_core import environment
machine = environment.Environment(
    variables={variables!r}, root=Path({root!r}), torch=environment.TorchBuild({torch}), triton=True)
environment.Environment.current = classmethod(lambda cls: machine)
from kalign_core.cli.main import main
sys.argv = ["kalign", "doctor", *{arguments!r}]
main()
"""
NVIDIA, AMD = ("dev/nvidiactl", "dev/dri/card0"), ("dev/kfd", "dev/dri/card1")
FOR_NVIDIA, FOR_AMD, FOR_HOST = "'2.11.0', cuda='13.0'", "'2.11.0', hip='7.0'", "'2.11.0'"
Doctor = Callable[..., Any]


@pytest.fixture
def doctor(child: Callable[..., Any], tmp_path: Path) -> Doctor:
    """``doctor(files, torch, **variables)`` runs the command on such a machine; gives the finished process."""

    def run(files: Sequence[str], torch: str, *arguments: str, **variables: str) -> Any:
        for file in files:
            path = tmp_path / "machine" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        code = DOCTOR.format(
            variables=variables, root=str(tmp_path / "machine"), torch=torch, arguments=list(arguments)
        )
        ours = {name: value for name, value in variables.items() if name.startswith("KALIGN_")}
        return child(code, KALIGN_CACHE_DIR=str(tmp_path / "cache"), **ours)

    return run


def reasons(found: Any) -> dict[str, tuple[bool, str]]:
    return {row["name"]: (row["usable"], row["reason"]) for row in found["platforms"]}


def test_both_vendors(doctor: Doctor) -> None:
    """Where both vendors' devices are there, torch's build decides, and the row of the other says so."""
    for torch, chosen, other, says in (
        (FOR_NVIDIA, "cuda", "rocm", "is built for CUDA 13.0"),
        (FOR_AMD, "rocm", "cuda", "is built for ROCm 7.0"),
    ):
        found = json.loads(doctor((*NVIDIA, *AMD), torch, "--json").stdout)
        assert (found["platform"], found["why"][:24]) == (chosen, "the only usable platform")
        usable, reason = reasons(found)[other]
        assert not usable
        assert says in reason


def test_neither_vendor(doctor: Doctor) -> None:
    """Without a device the interpreter is used, and each vendor's row says what is missing and what to type."""
    done = doctor((), FOR_NVIDIA, "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["platform"]) == (0, "cpu")
    assert "docker run --gpus all" in reasons(found)["cuda"][1]
    assert "install torch from a ROCm index" in reasons(found)["rocm"][1]


def test_devices_and_a_torch_for_the_host(doctor: Doctor) -> None:
    """A machine with devices whose torch was built for none is told which torch to install."""
    found = json.loads(doctor((*NVIDIA, *AMD), FOR_HOST, "--json").stdout)
    assert found["platform"] == "cpu"
    assert ["install torch from" in reasons(found)[name][1] for name in ("cuda", "rocm")] == [True, True]


@pytest.mark.parametrize(("files", "torch", "name"), [(NVIDIA, FOR_NVIDIA, "cuda"), (AMD, FOR_AMD, "rocm")])
def test_a_driver_that_does_not_answer(doctor: Doctor, files: Sequence[str], torch: str, name: str) -> None:
    """Device files without a working driver: the platform is chosen, and the devices' line says what went wrong."""
    done = doctor(files, torch, "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["platform"]) == (0, name)
    assert found["devices"] == []
    assert f"platform {name} was chosen, and torch sees no device" in found["devices_error"]
    assert "Traceback" not in done.stderr


def test_a_platform_that_was_asked_for(doctor: Doctor) -> None:
    """A platform that cannot be used exits with 3, the tables are printed all the same, and say what else there is."""
    done = doctor(NVIDIA, FOR_NVIDIA, KALIGN_PLATFORM="rocm")
    assert done.returncode == 3
    assert "platform: none (KALIGN_PLATFORM=rocm cannot be used: torch 2.11.0 is built for CUDA 13.0" in done.stdout
    assert "export KALIGN_PLATFORM=cuda" in done.stdout
    assert "plugins" in done.stdout


def test_hidden_devices(doctor: Doctor) -> None:
    """A mask that hides every device is named with its value and what to type."""
    found = json.loads(doctor(AMD, FOR_AMD, "--json", HIP_VISIBLE_DEVICES="-1").stdout)
    assert reasons(found)["rocm"] == (
        False,
        "HIP_VISIBLE_DEVICES='-1' hides every device; type: unset HIP_VISIBLE_DEVICES",
    )


def test_a_broken_plugin(
    doctor: Doctor, child: Callable[..., Any], distribution: Callable[..., str], tmp_path: Path
) -> None:
    """A plugin that does not load is a row with its reason, and the rest is as without it."""
    distribution(tmp_path, "npu", "raise OSError('libnpu.so: cannot open')")
    code = DOCTOR.format(variables={}, root=str(tmp_path), torch=FOR_HOST, arguments=["--json"])
    done = child(code, tmp_path, KALIGN_CACHE_DIR=str(tmp_path / "cache"))
    found = json.loads(done.stdout)
    (row,) = (row for row in found["plugins"] if row["name"] == "npu")
    assert (found["platform"], row["state"], row["distribution"]) == ("cpu", "broken", "kalign-npu")
    assert "libnpu.so: cannot open" in row["reason"]
