"""Machines as files describe them, for the tests of identity; and announcements made afresh for every test."""

from __future__ import annotations

from pathlib import Path

import pytest

from kalign_core import driver_library
from kalign_cuda import limits


@pytest.fixture(autouse=True)
def _fresh() -> None:
    """Announcements are made once per process; every test sees its own."""
    driver_library.announce.cache_clear()
    limits._announce.cache_clear()


@pytest.fixture
def sys_tree(tmp_path: Path) -> Path:
    """A machine whose kernel describes board 0's PCI device, and whose driver says its version."""
    folder = tmp_path / "sys/bus/pci/devices/007f:c0:00.0"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text("0x10de\n", encoding="ascii")
    (folder / "device").write_text("0x2335\n", encoding="ascii")
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    return tmp_path
