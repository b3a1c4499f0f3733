"""Stores that outlive a process: other processes, damaged files, folders that take nothing.

Nothing a file does may fail a launch, so a fault is a miss and a warning, and never an exception.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kalign_core.cache.base import Store
from kalign_core.testing import elsewhere
from kalign_core.testing.entries import DEVICE, NAMELESS, entry, flushed, open_store, write
from kalign_core.testing.plugin import PluginConformance

WRITERS, EACH = 4, 10
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut in half": lambda data: data[: len(data) // 2],
    "no text at all": lambda data: bytes(range(256)) * 8,
    "words": lambda data: b"this is no cache\n" * 20,
    "zeros": lambda data: bytes(len(data)),
    "a byte changed in the middle": lambda data: data[: len(data) // 2] + b"\xff" + data[len(data) // 2 + 1 :],
}


class LastingRules(PluginConformance):
    """Rules for what a store leaves on disk. ``lasting = False`` says that it leaves nothing."""

    store: str
    lasting: bool = True

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """The folder for decisions, which does not exist yet."""
        return tmp_path / "decisions"

    def opened(self, folder: Path) -> Store:
        """The store on ``folder``, as another process would open it."""
        return open_store(self._said("plugin"), self._said("store"), folder)

    def keep(self, store: Store, *numbers: int) -> None:
        """Have ``store`` keep these decisions, on disk where it lasts."""
        for number in numbers:
            assert store.put(DEVICE, entry(number)) is self.lasting
        assert flushed(store)

    @pytest.fixture
    def on_disk(self, folder: Path) -> Path:
        """A folder in which three decisions are kept; skips for a store without files."""
        if not self.lasting:
            pytest.skip("the store keeps nothing on disk")
        self.keep(self.opened(folder), 1, 2, 3)
        return folder

    def test_a_decision_outlives_its_store(self, on_disk: Path) -> None:
        """What was kept is there for the next process, whole."""
        again = self.opened(on_disk)
        assert [again.lookup(DEVICE, entry(number).key) for number in (1, 2, 3)] == [entry(1), entry(2), entry(3)]

    def test_what_is_removed_stays_removed(self, on_disk: Path) -> None:
        """A decision that was removed is not there for the next process either; the others are."""
        store = self.opened(on_disk)
        assert store.remove(DEVICE, [entry(2).key]) == 1
        assert flushed(store)
        assert {found.key for found in self.opened(on_disk).entries(DEVICE)} == {entry(1).key, entry(3).key}

    def test_writers_lose_nothing_of_each_other(self, folder: Path, tmp_path: Path) -> None:
        """Processes that have all read the store, and then write at once, keep every decision of all of them."""
        if not self.lasting:
            pytest.skip("the store keeps nothing on disk")
        asked = (self._said("plugin"), self._said("store"), str(folder))
        meeting = (str(tmp_path / "writers"), str(WRITERS))
        processes = [
            elsewhere.start(write.__module__, "write", *asked, str(EACH * n), str(EACH), *meeting)
            for n in range(WRITERS)
        ]
        ends = elsewhere.ends(processes)
        assert [(out.splitlines()[-1:], err) for out, err in ends if out.splitlines()[-1:] != ["true"]] == []
        kept = {found.key for found in self.opened(folder).entries(DEVICE)}
        assert kept == {entry(number).key for number in range(WRITERS * EACH)}

    def test_a_hit_needs_no_file(self, on_disk: Path) -> None:
        """After the first look-up the decisions are in memory: a hit works though the files are gone."""
        store = self.opened(on_disk)
        assert store.lookup(DEVICE, entry(1).key) == entry(1)
        shutil.rmtree(on_disk)
        assert store.lookup(DEVICE, entry(1).key) == entry(1)

    @pytest.mark.parametrize("damage", DAMAGE)
    def test_damage_is_no_exception(self, on_disk: Path, damage: str) -> None:
        """With its file damaged a store gives decisions as they were or none, and takes new ones."""
        path = self.opened(on_disk).path(DEVICE)
        if path is None:
            pytest.skip("the store names no file")
        path.write_bytes(DAMAGE[damage](path.read_bytes()))
        store = self.opened(on_disk)
        for number in (1, 2, 3):
            assert store.lookup(DEVICE, entry(number).key) in (None, entry(number))
        assert isinstance(store.entries(DEVICE), tuple)
        store.put(DEVICE, entry(4))
        store.flush()
        assert store.lookup(DEVICE, entry(4).key) == entry(4)

    def test_a_folder_that_takes_nothing_is_one_warning(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Where nothing can be written decisions stay in memory, and that is said once."""
        if not self.lasting:
            pytest.skip("the store keeps nothing on disk")
        folder.write_text("a file where the folder should be", encoding="utf-8")
        self._assert_kept_in_memory(folder, caplog)

    def test_a_folder_of_somebody_else_s_is_one_warning(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        """A folder that may be read and not written to is the same one warning."""
        if not self.lasting:
            pytest.skip("the store keeps nothing on disk")
        folder.mkdir(mode=0o500)
        if os.access(folder, os.W_OK):
            pytest.skip("this user may write to a folder that is read-only")
        self._assert_kept_in_memory(folder, caplog)

    def _assert_kept_in_memory(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        store = self.opened(folder)
        for number in (1, 2):
            store.put(DEVICE, entry(number))
        store.flush()
        assert [store.lookup(DEVICE, entry(number).key) for number in (1, 2)] == [entry(1), entry(2)]
        said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(said) == 1, said

    def test_a_device_without_a_name_leaves_nothing_on_disk(self, folder: Path) -> None:
        """Decisions for a device whose identity could not be read are not stored, and not found by the next one."""
        store = self.opened(folder)
        assert store.put(NAMELESS, entry(1)) is False
        assert flushed(store)
        assert self.opened(folder).entries(NAMELESS) == ()
