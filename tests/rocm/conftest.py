"""Machines as files describe them, for the tests of identity; and announcements made afresh for every test."""

from __future__ import annotations

from pathlib import Path

import pytest

from kalign_core import driver_library
from kalign_rocm import limits
from tests.rocm.fakes import MACHINE


@pytest.fixture(autouse=True)
def _fresh() -> None:
    """Announcements are made once per process; every test sees its own."""
    driver_library.announce.cache_clear()
    limits._announce.cache_clear()


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine with an id and nothing else."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/machine-id").write_text(MACHINE + "\n", encoding="ascii")
    return tmp_path


@pytest.fixture
def sys_tree(machine: Path) -> Path:
    """A machine whose kernel describes board 0: its PCI device and its partitions."""
    folder = machine / "sys/bus/pci/devices/0000:60:00.0"
    folder.mkdir(parents=True)
    files = {"vendor": "0x1002", "device": "0x74a1", "current_compute_partition": "SPX"}
    for name, value in {**files, "current_memory_partition": "NPS1"}.items():
        (folder / name).write_text(value + "\n", encoding="ascii")
    return machine
