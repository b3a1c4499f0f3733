"""Places that cannot be used: memory only, one warning with path and reason, and no exception that leaves the store."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from kalign_core import settings
from kalign_core.cache import files
from kalign_core.cache.document import render
from kalign_core.cache.files import locked
from kalign_core.cache.toml_store import TomlStore
from kalign_core.settings import Settings
from tests.core.cache_samples import DEVICE, entry, kept, key, store_in


@pytest.fixture
def folder(tmp_path):
    """The folder of the devices' files, not made yet."""
    return tmp_path / "cache"


@pytest.fixture
def warnings(caplog):
    """What was warned of, one text a warning."""
    caplog.set_level(logging.WARNING, "kalign")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "kalign"]


def test_a_file_that_is_shown_late_keeps_its_entries(folder, monkeypatch):
    """Where a network file system says once that there is no file, what others wrote into it is not lost."""
    kept(store_in(folder), DEVICE, entry(1))
    store, real, late = store_in(folder), os.open, []
    store.lookup(DEVICE, key(1))

    def open_late(path, *rest, **options):
        if str(path).endswith(".toml") and not late:
            late.append(path)
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        return real(path, *rest, **options)

    monkeypatch.setattr(files.os, "open", open_late)
    assert kept(store, DEVICE, entry(2))
    assert len(late) == 1
    assert {found.key for found in store_in(folder).entries(DEVICE)} == {key(1), key(2)}


def test_a_file_that_is_there_and_never_shown_is_not_replaced(folder, monkeypatch, warnings):
    """Where a file cannot be read though it is there, decisions stay in memory and the file as it was."""
    kept(store_in(folder), DEVICE, entry(1))
    monkeypatch.setattr("kalign_core.cache.device_file.read_trusted", lambda path: None)
    store = store_in(folder)
    assert not kept(store, DEVICE, entry(2))
    assert store.lookup(DEVICE, key(2)) == entry(2)
    monkeypatch.undo()
    assert [found.key for found in store_in(folder).entries(DEVICE)] == [key(1)]
    assert ["it is there and cannot be read" in w for w in warnings()] == [True]


def test_what_would_not_be_read_is_not_written(folder, monkeypatch, warnings):
    """Text that does not read as what was meant never reaches the disk; the file stays as it was."""
    store = store_in(folder)
    kept(store, DEVICE, entry(1))
    before = store.path(DEVICE).read_bytes()
    monkeypatch.setattr("kalign_core.cache.device_file.render", lambda document: render(document)[:-40])
    assert not kept(store, DEVICE, entry(2))
    assert store.path(DEVICE).read_bytes() == before
    assert ["does not read as what was meant" in w for w in warnings()] == [True]
    monkeypatch.undo()
    assert store.flush()
    assert store_in(folder).lookup(DEVICE, key(2)) == entry(2)


def test_without_threads_a_decision_is_written_by_its_maker(folder, monkeypatch):
    """At the end of the interpreter and where threads are used up, put writes before it returns."""
    store = store_in(folder)
    monkeypatch.setattr(store._writer, "wake", lambda work: False)
    assert store.put(DEVICE, entry(1))
    assert store_in(folder).lookup(DEVICE, key(1)) == entry(1)


@pytest.mark.parametrize("home", ["", "/", "/nonexistent/home"])
def test_without_a_home_nothing_is_written(home, monkeypatch, warnings):
    """An empty home, the root and one that does not exist are no place for files: memory only, one warning."""
    monkeypatch.setenv("HOME", home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    store = TomlStore(Settings())
    assert [kept(store, DEVICE, entry(n)) for n in (1, 2)] == [False, False]
    assert store.lookup(DEVICE, key(1)) == entry(1)
    assert ["KALIGN_CACHE_DIR" in w and repr(home) in w for w in warnings()] == [True]
    assert not Path("/.cache/kalign").exists()
    assert not Path("/nonexistent").exists()


def test_a_home_that_is_not_named_is_looked_up(monkeypatch):
    """Without HOME the user's entry in the password file decides, and whatever that says nothing is raised."""
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    path = TomlStore(Settings()).path(DEVICE)
    home = Path("~").expanduser()
    assert path is None if home == Path("/") or not home.is_dir() else path.is_relative_to(home)


def test_the_users_cache_folder_is_the_default(tmp_path, monkeypatch):
    """Without a folder of its own kalign keeps files under XDG_CACHE_HOME, else under the home."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert TomlStore(Settings()).path(DEVICE).parent == tmp_path / ".cache" / "kalign"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert TomlStore(Settings()).path(DEVICE).parent == tmp_path / "x" / "kalign"


def test_a_folder_named_after_import_counts(tmp_path, monkeypatch):
    """KALIGN_CACHE_DIR holds from when a store is made, however long ago kalign was imported."""
    for name in ("first", "second"):
        monkeypatch.setenv("KALIGN_CACHE_DIR", str(tmp_path / name))
        assert TomlStore(settings.read()).path(DEVICE).parent == tmp_path / name


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch):
    """A folder given relative to the working folder does not move with it."""
    monkeypatch.chdir(tmp_path)
    store = store_in(Path("here"))
    monkeypatch.chdir("/")
    assert store.path(DEVICE).parent == tmp_path / "here"


def test_a_file_in_the_place_of_the_folder_costs_one_warning(tmp_path, warnings):
    """Where a part of the path is a file: memory only, and one warning with path and reason."""
    (tmp_path / "file").write_bytes(b"")
    store = store_in(tmp_path / "file" / "cache")
    assert [kept(store, DEVICE, entry(n)) for n in (1, 2)] == [False, False]
    assert store.lookup(DEVICE, key(2)) == entry(2)
    [said] = warnings()
    assert str(tmp_path / "file") in said
    assert said.endswith("(ENOTDIR); try: export KALIGN_CACHE_DIR=/a/folder/of/yours")


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EACCES, errno.EBUSY, errno.ESTALE, errno.EDQUOT])
def test_a_write_that_fails_costs_one_warning(folder, monkeypatch, warnings, code):
    """Decisions stay in memory with one warning that names path and reason, and go to disk once it can be written."""
    store = store_in(folder)
    kept(store, DEVICE, entry(0))
    real = os.replace

    def refuse(source, target):
        raise OSError(code, os.strerror(code), str(source))

    monkeypatch.setattr(files.os, "replace", refuse)
    assert [kept(store, DEVICE, entry(n)) for n in (1, 2, 3)] == [False] * 3
    assert [store.lookup(DEVICE, key(n)) for n in (1, 2, 3)] == [entry(n) for n in (1, 2, 3)]
    mine = [warning for warning in warnings() if str(folder) in warning]  # other stores may still be trying
    assert [errno.errorcode[code] in warning for warning in mine] == [True]
    monkeypatch.setattr(files.os, "replace", real)
    assert kept(store, DEVICE, entry(4))
    assert len(store_in(folder).entries(DEVICE)) == 5


def test_a_lock_that_cannot_be_had_costs_one_warning(folder, warnings):
    """Where another process sits on the lock, a put gives up in time and the decision goes with a later one."""
    store = store_in(folder, lock_wait_s=0.05)
    kept(store, DEVICE, entry(1))
    with locked(store.path(DEVICE), 1.0):
        assert [kept(store, DEVICE, entry(n)) for n in (2, 3)] == [False, False]
    assert [w.count("Timeout") for w in warnings()] == [1]
    assert kept(store, DEVICE, entry(4))
    assert len(store_in(folder).entries(DEVICE)) == 4


def test_what_is_not_on_disk_is_tried_once_more_at_the_end(folder):
    """A decision that waited in vain is written when the process ends."""
    store = store_in(folder, lock_wait_s=0.05)
    kept(store, DEVICE, entry(1))
    with locked(store.path(DEVICE), 1.0):
        assert not kept(store, DEVICE, entry(2))
    store._end()
    assert store_in(folder).lookup(DEVICE, key(2)) == entry(2)


def test_a_file_system_without_locks_costs_one_warning(folder, monkeypatch, warnings):
    """Where locks are not implemented nothing is written and nothing raised."""

    def no_lock(*_):
        raise NotImplementedError("flock is not supported here")

    monkeypatch.setattr("kalign_core.cache.device_file.locked", no_lock)
    store = store_in(folder)
    assert [kept(store, DEVICE, entry(n)) for n in (1, 2)] == [False, False]
    assert ["flock is not supported" in w for w in warnings()] == [True]


@pytest.mark.parametrize("plant", ["file", "lock"])
def test_planted_links_are_refused(folder, tmp_path, warnings, plant):
    """Links under a file's or its lock's name are not followed: memory only, one warning, the target as it was."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    folder.mkdir(mode=0o700)
    (folder / f"{DEVICE.file_stem}.toml{'.lock' if plant == 'lock' else ''}").symlink_to(victim)
    store = store_in(folder)
    assert not kept(store, DEVICE, entry(1))
    assert store.lookup(DEVICE, key(1)) == entry(1)
    assert victim.read_bytes() == b"precious"
    assert ["ELOOP" in w for w in warnings()] == [True]


@pytest.mark.parametrize("open_to_all", ["folder", "file"])
def test_what_others_may_write_is_not_used(folder, warnings, open_to_all):
    """Entries in a file or folder that others may write are misses, with one warning that says what to type."""
    store = store_in(folder)
    kept(store, DEVICE, entry(1))
    (folder if open_to_all == "folder" else store.path(DEVICE)).chmod(0o777)
    again = store_in(folder)
    assert again.lookup(DEVICE, key(1)) is None
    assert not kept(again, DEVICE, entry(2))
    assert ["chmod go-w" in w for w in warnings()] == [True]


def test_a_long_kernel_name_is_in_the_file_only(folder):
    """Names of kernels do not reach the file system."""
    long = entry(1, key=key(1, kernel="k" * 300))
    assert kept(store_in(folder), DEVICE, long)
    assert store_in(folder).lookup(DEVICE, long.key) == long
