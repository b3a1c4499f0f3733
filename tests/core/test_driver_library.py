"""Asking a vendor's management library, which may raise, hang, print or be missing."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kalign_core import driver_library
from kalign_core.driver_library import Library, foreign_processes, number, pci_device_id, pci_location, text
from tests.hanging import Hanging


@pytest.fixture(autouse=True)
def _fresh() -> None:
    """Announcements are made once per process; every test sees its own."""
    driver_library.announce.cache_clear()


def module(**functions: Callable[..., Any]) -> Any:
    """A library whose ``start`` and ``stop`` note that they were called."""
    calls: list[str] = []
    known = {"start": lambda: calls.append("start"), "stop": lambda: calls.append("stop"), **functions}
    return SimpleNamespace(calls=calls, **known)


def library(load: Callable[[], tuple[Any, str]] = lambda: (None, "there is none")) -> Library:
    return Library("smi", load, "start", "stop")


# --- queries ------------------------------------------------------------------------------------------------------


def test_a_query_opens_and_closes() -> None:
    """What is read is read between one start and one stop."""
    made = module()
    assert library().query(lambda smi: list(smi.calls), [], made) == ["start"]
    assert made.calls == ["start", "stop"]


def test_a_query_that_raises_is_closed() -> None:
    """A reader that raises costs its answer; the library is shut down all the same."""
    made = module()
    assert library().query(lambda smi: smi.missing(), "nothing", made) == "nothing"
    assert made.calls == ["start", "stop"]


def test_a_library_that_does_not_start_is_not_read() -> None:
    """Where the driver is absent nothing is asked."""

    def absent() -> None:
        raise OSError("no driver")

    asked: list[Any] = []
    assert library().query(asked.append, "nothing", module(start=absent)) == "nothing"
    assert asked == []


def test_a_missing_library_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """The reason why there is no library is one warning, however often it is asked for."""
    ours = library()
    assert [ours.query(lambda smi: 1, 0) for _ in range(3)] == [0, 0, 0]
    assert [(record.levelno, record.message) for record in caplog.records] == [(logging.WARNING, "there is none")]


def test_a_library_that_hangs(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One that does not answer costs its deadline once; it is not asked again while it hangs, and is afterwards."""
    hanging, ours = Hanging(), library()
    asked: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", hanging.threads())
        assert [ours.query(lambda smi: 1, 0, module(start=hanging)) for _ in range(2)] == [0, 0]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert len(hanging.started) == 1
    hanging.release()
    assert ours.query(lambda smi: asked.append("now") or 1, 0, module()) == 1


# --- values -------------------------------------------------------------------------------------------------------

NAMES = {
    b"NVIDIA H200": "NVIDIA H200",
    "NVIDIA H200\0\0\0": "NVIDIA H200",
    b"\xff\xfe\x80garbage": "",
    "": "",
    "N/A": "",
    "  NVIDIA\tH200\n": "NVIDIA H200",
    "x" * 200: "x" * 80,
    "\U0001f680 GPU": "\U0001f680 GPU",
    "bell\a": "",
}


@pytest.mark.parametrize(("given", "expected"), NAMES.items())
def test_names_are_normalised_once(given: object, expected: str) -> None:
    """A name is one clean line, or nothing where it is no text."""
    assert text(given) == expected


@pytest.mark.parametrize(("given", "expected"), [(3, 3), (0, 0), (-1, None), (True, None), (2**63, None), ("3", None)])
def test_counts_are_sensible_or_nothing(given: object, expected: int | None) -> None:
    """Negative numbers, booleans and a library's way to say nothing are no counts."""
    assert number(given) == expected


def test_an_address_needs_all_its_parts() -> None:
    """A device that lacks one part of its PCI address has none."""
    known = {"pci_domain_id": 0, "pci_bus_id": 6, "pci_device_id": 0}
    assert pci_location(SimpleNamespace(**known)) == (0, 6, 0)
    for part in known:
        assert pci_location(SimpleNamespace(**{**known, part: None})) is None


@pytest.mark.parametrize(
    ("vendor", "device", "expected"), [("0x10de", "0x2335", "10de:2335"), ("0x10de", "", ""), ("garbage", "0x2335", "")]
)
def test_the_kernel_s_word_on_a_device(vendor: str, device: str, expected: str, tmp_path: Path) -> None:
    """Vendor and device come from the kernel's files, both or neither."""
    folder = tmp_path / "sys/bus/pci/devices/0000:06:00.0"
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(vendor)
    (folder / "device").write_text(device)
    assert pci_device_id(tmp_path, "0000:06:00.0") == expected
    assert pci_device_id(tmp_path, "") == ""


@pytest.mark.parametrize(
    ("listed", "expected"),
    [({os.getpid()}, 0), ({os.getpid(), 1, 2}, 2), (set(), None), ({70001}, None), ({70001, 70002}, 1), (None, None)],
)
def test_foreign_processes(listed: set[int] | None, expected: int | None) -> None:
    """Others are counted where the list shows us among them, or where it shows more than could be us."""
    assert foreign_processes(listed) == expected
