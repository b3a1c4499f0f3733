"""Machines as files describe them, for the tests of identity; announcements made afresh for every test; and an end for
those on a device."""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from kalign_core import driver_library
from kalign_cuda import limits

LIMIT_S = 180.0  # several times what any of them takes on an H200


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


@pytest.fixture(scope="session")
def terminal(request: pytest.FixtureRequest) -> Iterator[TextIO]:
    """Standard error as it is outside of tests, whose own is captured."""
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        descriptor = os.dup(2)
    with open(descriptor, "w", encoding="utf-8") as stream:
        yield stream


@pytest.fixture(autouse=True)
def _ends(terminal: TextIO) -> Iterator[None]:
    """Where there is a device, which may hang, a test that does not end ends the run and shows where it was."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        yield
        return
    faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=terminal)
    yield
    faulthandler.cancel_dump_traceback_later()
