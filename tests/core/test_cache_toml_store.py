"""The store: right hits only, nothing lost, and no fault of a file that leaves it."""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
import sys
import threading
from pathlib import Path

import pytest

from kalign_core.cache import files, toml_store
from kalign_core.cache.files import locked
from kalign_core.cache.toml_store import TomlStore
from kalign_core.records import Config, Identity, Toolchain
from kalign_core.settings import Settings
from tests.core.cache_samples import DEVICE, entry, key, store_in

NOT_DEVICES = {
    "key": dataclasses.replace(DEVICE, key="unknown"),
    "pci_device_id": dataclasses.replace(DEVICE, pci_device_id="unknown"),
    "must_match": dataclasses.replace(DEVICE, must_match=(("arch", "unknown"),)),
    "no key": dataclasses.replace(DEVICE, key=""),
}


@pytest.fixture
def folder(tmp_path):
    """The folder of the devices' files, not made yet."""
    return tmp_path / "cache"


@pytest.fixture
def warnings(caplog):
    """What was warned of, one text a warning."""
    caplog.set_level(logging.WARNING, "kalign")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "kalign"]


def files_in(folder, suffix=".toml"):
    return sorted(path.name for path in folder.glob(f"*{suffix}")) if folder.exists() else []


def damaged(store, before, after):
    """Change the file of ``store``'s device as an accident would."""
    path = store.path(DEVICE)
    content = path.read_bytes()
    assert before in content
    path.write_bytes(content.replace(before, after, 1))
    return path


# --- what is kept ------------------------------------------------------------------------------------------------


def test_a_decision_is_on_disk_when_put_returns(folder):
    """Another process finds a decision as soon as it was made."""
    assert store_in(folder).put(DEVICE, entry(1))
    assert store_in(folder).lookup(DEVICE, key(1)) == entry(1)


def test_the_file_is_named_after_its_device(folder):
    """Vendor, PCI device id and a digest of the key make the file's name."""
    store = store_in(folder)
    store.put(DEVICE, entry(1))
    assert files_in(folder) == [f"{DEVICE.file_stem}.toml"] == [store.path(DEVICE).name]


def test_a_device_may_be_called_anything(folder):
    """No name, vendor or key reaches a path."""
    odd = Identity(vendor="a/b ../(c)[d]:", name="GPU/: ()[]\n\"'", key="../../x", must_match=(("m\n", "\\"),))
    assert store_in(folder).put(odd, entry(1))
    assert store_in(folder).lookup(odd, key(1)) == entry(1)
    assert len(files_in(folder)) == 1


def test_only_the_very_key_hits(folder):
    """A key that differs in any field is a miss."""
    store = store_in(folder)
    store.put(DEVICE, entry(1))
    changes = {
        "kernel": "x", "contract": "x", "problem": "x", "args": "x", "phase": "x", "source": "x", "suite": "x",
        "toolchain": Toolchain.of(driver="570.86", cuda="13.0", triton="3.6.0", torch="2.11.0"),
    }  # fmt: skip
    for field, value in changes.items():
        assert store.lookup(DEVICE, key(1, **{field: value})) is None, field


def test_decisions_of_other_processes_are_kept(folder):
    """Two stores that write in turn keep each other's entries, and see them."""
    first, second = store_in(folder), store_in(folder)
    assert first.lookup(DEVICE, key(2)) is second.lookup(DEVICE, key(1)) is None
    first.put(DEVICE, entry(1))
    second.put(DEVICE, entry(2))
    first.put(DEVICE, entry(3))
    assert {found.key for found in store_in(folder).entries(DEVICE)} == {key(1), key(2), key(3)}
    assert first.lookup(DEVICE, key(2)) == entry(2)


def test_a_process_keeps_to_what_it_decided_itself(folder):
    """A newer decision of another process goes into the file, and never replaces what this one verified."""
    mine, theirs = store_in(folder), store_in(folder)
    newer = entry(1, config=Config(BLOCK=32, num_warps=16), decided="2027-01-01T00:00:00Z")
    mine.put(DEVICE, entry(1))
    theirs.put(DEVICE, newer)
    mine.put(DEVICE, entry(2))
    assert mine.lookup(DEVICE, key(1)) == entry(1)
    assert store_in(folder).lookup(DEVICE, key(1)) == newer


def test_threads_lose_nothing(folder):
    """Threads that decide at once through one store all have their decisions kept."""
    store = store_in(folder, lock_wait_s=30.0)
    threads = [threading.Thread(target=store.put, args=(DEVICE, entry(n))) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store_in(folder).entries(DEVICE)) == 16


def test_a_hit_touches_no_file(folder):
    """After the first look-up of a device, hits and misses make no call to the system that Python can see."""
    store_in(folder).put(DEVICE, entry(1))
    store = store_in(folder)
    store.lookup(DEVICE, key(1))
    events = []
    watching = True

    def watch(event, arguments):
        if watching and not event.startswith(("object.", "sys._getframe")):
            events.append(event)

    sys.addaudithook(watch)  # hooks cannot be removed, so this one is put to sleep below
    for _ in range(10):
        store.lookup(DEVICE, key(1))
        store.lookup(DEVICE, key(2))
    watching = False
    assert events == []


def test_a_deleted_file_stays_deleted(folder):
    """A file deleted under a running process is begun anew with what is decided from then on."""
    store = store_in(folder)
    store.put(DEVICE, entry(1))
    store.path(DEVICE).unlink()
    store.put(DEVICE, entry(2))
    assert [found.key for found in store_in(folder).entries(DEVICE)] == [key(2)]


# --- devices and toolchains --------------------------------------------------------------------------------------


def test_another_device_under_one_name_is_another_file(folder, warnings):
    """Where the key is the same and another field is not: a miss, one warning with the field, and both keep theirs."""
    one, other = DEVICE, dataclasses.replace(DEVICE, must_match=(("arch", "sm_90"), ("memory_gib", 70)))
    store_in(folder).put(one, entry(1))
    store = store_in(folder)
    assert store.lookup(other, key(1)) is None
    assert [w.count("memory_gib is 139, here it is 70") for w in warnings()] == [1]
    assert store.put(other, entry(2))
    assert [found.key for found in store_in(folder).entries(other)] == [key(2)]
    assert [found.key for found in store_in(folder).entries(one)] == [key(1)]
    assert len(files_in(folder)) == 2


@pytest.mark.parametrize("lost", [(), (("arch", "sm_90"),), (("arch", "sm_90"), ("memory_gib", "139"))])
def test_a_field_that_is_gone_matches_nothing(folder, lost):
    """A device that lost a field, or has it as another kind of value, is not the device of the file."""
    store_in(folder).put(DEVICE, entry(1))
    assert store_in(folder).lookup(dataclasses.replace(DEVICE, must_match=lost), key(1)) is None


def test_what_is_only_recorded_is_not_compared(folder):
    """A device keeps its entries under another name, board version or power cap."""
    store_in(folder).put(DEVICE, entry(1))
    renamed = dataclasses.replace(DEVICE, name="H200 NVL", vendor="nvidia", provenance=(("power_cap_w", 500),))
    assert store_in(folder).lookup(renamed, key(1)) == entry(1)


@pytest.mark.parametrize("identity", NOT_DEVICES.values(), ids=NOT_DEVICES)
def test_decisions_for_a_device_that_is_not_known_stay_in_memory(folder, warnings, identity):
    """With a field unknown tuning goes on in memory: hits in this process, no file, one warning."""
    store = store_in(folder)
    assert [store.put(identity, entry(n)) for n in (1, 2)] == [False, False]
    assert store.lookup(identity, key(1)) == entry(1)
    assert (files_in(folder), store.path(identity)) == ([], None)
    assert [w for w in warnings() if "could not be read" not in w] == []
    assert len(warnings()) == 1


def test_two_devices_without_a_name_share_nothing(folder):
    """A device whose key is unknown equals no other, not even one that looks the same."""
    store = store_in(folder)
    first, second = (Identity("nvidia", "X", "unknown", must_match=(("arch", "sm_90"),)) for _ in range(2))
    store.put(first, entry(1))
    assert store.lookup(second, key(1)) is None


def test_decisions_under_an_unknown_toolchain_stay_in_memory(folder, warnings):
    """An unknown driver is never saved as tuned for, and the warning names the fact."""
    unknown = key(1, toolchain=Toolchain.of(driver="unknown", triton="3.6.0"))
    store = store_in(folder)
    assert not store.put(DEVICE, entry(1, key=unknown))
    assert store.lookup(DEVICE, unknown) == entry(1, key=unknown)
    assert files_in(folder) == []
    assert "of the toolchain, driver is unknown" in warnings()[0]


# --- damage ------------------------------------------------------------------------------------------------------


def test_damage_costs_what_it_hit_and_is_set_aside(folder, warnings):
    """A damaged entry is a miss and kept in a .bad file; the others hit, and the next write keeps them."""
    store = store_in(folder)
    for number in (1, 2, 3):
        store.put(DEVICE, entry(number))
    damaged(store, b'num_warps=2"', b'num_warps=4"')
    again = store_in(folder)
    assert [again.lookup(DEVICE, key(n)) for n in (1, 2, 3)] == [None, entry(2), entry(3)]
    bad = [path.read_bytes() for path in folder.glob("*.bad")]
    assert [b'num_warps=4"' in content for content in bad] == [True]
    assert [w.count("its check does not hold") for w in warnings()] == [1]
    again.put(DEVICE, entry(4))
    assert {found.key for found in store_in(folder).entries(DEVICE)} == {key(2), key(3), key(4)}


@pytest.mark.parametrize(
    "content",
    [b"", b"\xff\xfe\0", b"[" * 3000, b"\xef\xbb\xbf", b"schema = 1\n", b"<html>", b"a = 1\na = 2\n", b"[a]\n[a]\n"],
)
def test_a_file_that_is_none_of_ours_is_set_aside(folder, content):
    """Garbage is a miss; it is kept in a .bad file, and the next decision makes a good file."""
    folder.mkdir(mode=0o700)
    path = folder / f"{DEVICE.file_stem}.toml"
    path.write_bytes(content)
    path.chmod(0o600)
    store = store_in(folder)
    assert store.lookup(DEVICE, key(1)) is None
    assert store.put(DEVICE, entry(1))
    assert store_in(folder).lookup(DEVICE, key(1)) == entry(1)
    kept = b"".join(bad.read_bytes() for bad in folder.glob("*.bad"))
    assert content.strip() in (kept.strip(), b"\xef\xbb\xbf") or content in kept


def test_reading_damage_twice_makes_one_file(folder):
    """Processes that see the same damage set it aside once."""
    store = store_in(folder)
    store.put(DEVICE, entry(1))
    damaged(store, b"cold_us = 18.5", b"cold_us = 28.5")
    for _ in range(3):
        assert store_in(folder).lookup(DEVICE, key(1)) is None
    assert len(files_in(folder, ".bad")) == 1


def test_damage_is_not_overwritten_unless_it_is_kept(folder, monkeypatch):
    """Where damage cannot be set aside the rest is used, and the file is not written."""
    store = store_in(folder)
    store.put(DEVICE, entry(1))
    store.put(DEVICE, entry(2))
    path = damaged(store, b'num_warps=2"', b'num_warps=4"')
    before = path.read_bytes()
    monkeypatch.setattr("kalign_core.cache.device_file.set_aside", lambda *_: os.stat("/nonexistent/x"))
    again = store_in(folder)
    assert again.lookup(DEVICE, key(2)) == entry(2)
    assert not again.put(DEVICE, entry(3))
    assert path.read_bytes() == before


def test_a_newer_file_is_left_alone(folder, warnings):
    """A file of a later schema is neither used nor written, and the warning says what to do."""
    store = store_in(folder)
    store.put(DEVICE, entry(1))
    path = damaged(store, b"schema = 1", b"schema = 7")
    before = path.read_bytes()
    again = store_in(folder)
    assert again.lookup(DEVICE, key(1)) is None
    assert not again.put(DEVICE, entry(2))
    assert again.lookup(DEVICE, key(2)) == entry(2)
    assert (path.read_bytes(), files_in(folder, ".bad"), again.path(DEVICE)) == (before, [], path)
    assert ["schema 7 and this kalign reads up to 1" in w and "update kalign" in w for w in warnings()] == [True]


def test_fields_of_a_later_version_survive_a_write(folder):
    """What this version does not know in an entry comes back after another entry was written."""
    later = entry(1, extra=(("later", "x"),))
    store_in(folder).put(DEVICE, later)
    store_in(folder).put(DEVICE, entry(2))
    assert store_in(folder).lookup(DEVICE, key(1)) == later


def test_a_decision_that_cannot_be_written_stays_in_memory(folder, warnings):
    """An entry that its file would not give back is used in this process, and the others are written."""
    store = store_in(folder)
    odd = entry(1, extra=(("nested", {"a": 1}),))
    assert not store.put(DEVICE, odd)
    assert store.lookup(DEVICE, key(1)) == odd
    assert store.put(DEVICE, entry(2))
    assert len(warnings()) == 1


# --- places that cannot be used ----------------------------------------------------------------------------------


@pytest.mark.parametrize("home", ["", "/", "/nonexistent/home"])
def test_without_a_home_nothing_is_written(home, monkeypatch, warnings):
    """An empty home, the root and one that does not exist are no place for files: memory only, one warning."""
    monkeypatch.setenv("HOME", home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    store = TomlStore(Settings())
    assert [store.put(DEVICE, entry(n)) for n in (1, 2)] == [False, False]
    assert store.lookup(DEVICE, key(1)) == entry(1)
    assert ["KALIGN_CACHE_DIR" in w and repr(home) in w for w in warnings()] == [True]
    assert not Path("/.cache/kalign").exists()
    assert not Path("/nonexistent").exists()


def test_the_users_cache_folder_is_the_default(tmp_path, monkeypatch):
    """Without a folder of its own kalign keeps files under XDG_CACHE_HOME, else under the home."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert TomlStore(Settings()).path(DEVICE).parent == tmp_path / ".cache" / "kalign"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert TomlStore(Settings()).path(DEVICE).parent == tmp_path / "x" / "kalign"


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
    assert [store.put(DEVICE, entry(n)) for n in (1, 2)] == [False, False]
    assert store.lookup(DEVICE, key(2)) == entry(2)
    assert [str(tmp_path / "file") in w and "ENOTDIR" in w for w in warnings()] == [True]


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EACCES, errno.EBUSY, errno.ESTALE, errno.EDQUOT])
def test_a_write_that_fails_costs_one_warning(folder, monkeypatch, warnings, code):
    """Decisions stay in memory with one warning that names path and reason, and go to disk once it can be written."""
    store = store_in(folder)
    real = os.replace

    def refuse(source, target):
        raise OSError(code, os.strerror(code), str(source))

    monkeypatch.setattr(files.os, "replace", refuse)
    assert [store.put(DEVICE, entry(n)) for n in (1, 2, 3)] == [False] * 3
    assert [store.lookup(DEVICE, key(n)) for n in (1, 2, 3)] == [entry(n) for n in (1, 2, 3)]
    assert [str(folder) in w and errno.errorcode[code] in w for w in warnings()] == [True]
    monkeypatch.setattr(files.os, "replace", real)
    assert store.put(DEVICE, entry(4))
    assert len(store_in(folder).entries(DEVICE)) == 4


def test_a_lock_that_cannot_be_had_costs_one_warning(folder, warnings):
    """Where another process sits on the lock, a put gives up in time and the decision goes with a later one."""
    store = store_in(folder, lock_wait_s=0.05)
    store.put(DEVICE, entry(1))
    with locked(store.path(DEVICE), 1.0):
        assert [store.put(DEVICE, entry(n)) for n in (2, 3)] == [False, False]
    assert [w.count("Timeout") for w in warnings()] == [1]
    assert store.put(DEVICE, entry(4))
    assert len(store_in(folder).entries(DEVICE)) == 4


def test_what_is_not_on_disk_is_tried_once_more_at_the_end(folder):
    """A decision that waited in vain is written when the process ends."""
    store = store_in(folder, lock_wait_s=0.05)
    store.put(DEVICE, entry(1))
    with locked(store.path(DEVICE), 1.0):
        assert not store.put(DEVICE, entry(2))
    store._end()
    assert store_in(folder).lookup(DEVICE, key(2)) == entry(2)


def test_a_file_system_without_locks_costs_one_warning(folder, monkeypatch, warnings):
    """Where locks are not implemented nothing is written and nothing raised."""

    def no_lock(*_):
        raise NotImplementedError("flock is not supported here")

    monkeypatch.setattr("kalign_core.cache.device_file.locked", no_lock)
    store = store_in(folder)
    assert [store.put(DEVICE, entry(n)) for n in (1, 2)] == [False, False]
    assert ["flock is not supported" in w for w in warnings()] == [True]


@pytest.mark.parametrize("plant", ["file", "lock"])
def test_planted_links_are_refused(folder, tmp_path, warnings, plant):
    """Links under a file's or its lock's name are not followed: memory only, one warning, the target as it was."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    folder.mkdir(mode=0o700)
    (folder / f"{DEVICE.file_stem}.toml{'.lock' if plant == 'lock' else ''}").symlink_to(victim)
    store = store_in(folder)
    assert not store.put(DEVICE, entry(1))
    assert store.lookup(DEVICE, key(1)) == entry(1)
    assert victim.read_bytes() == b"precious"
    assert ["ELOOP" in w for w in warnings()] == [True]


@pytest.mark.parametrize("open_to_all", ["folder", "file"])
def test_what_others_may_write_is_not_used(folder, warnings, open_to_all):
    """Entries in a file or folder that others may write are misses, with one warning that says what to type."""
    store = store_in(folder)
    store.put(DEVICE, entry(1))
    (folder if open_to_all == "folder" else store.path(DEVICE)).chmod(0o777)
    again = store_in(folder)
    assert again.lookup(DEVICE, key(1)) is None
    assert not again.put(DEVICE, entry(2))
    assert ["chmod go-w" in w for w in warnings()] == [True]


def test_a_long_kernel_name_is_in_the_file_only(folder):
    """Names of kernels do not reach the file system."""
    long = entry(1, key=key(1, kernel="k" * 300))
    assert store_in(folder).put(DEVICE, long)
    assert store_in(folder).lookup(DEVICE, long.key) == long


# --- telling -----------------------------------------------------------------------------------------------------


def test_entries_that_nothing_hit_are_told_of_at_the_end(folder, warnings):
    """A process that looked things up, hit none of a device's entries and decided nothing says so."""
    store_in(folder).put(DEVICE, entry(1))
    missing, hitting, deciding, idle = (store_in(folder) for _ in range(4))
    missing.lookup(DEVICE, key(2))
    hitting.lookup(DEVICE, key(2))
    hitting.lookup(DEVICE, key(1))
    deciding.lookup(DEVICE, key(2))
    deciding.put(DEVICE, entry(2))
    for store in (missing, hitting, deciding, idle):
        store._end()
    assert [w.startswith("none of the 1 entries in ") for w in warnings()] == [True]


def test_stores_are_forgotten_with_their_sessions(folder):
    """A store that nobody holds does not stay for the end of the process."""
    before = len(toml_store._stores)
    store_in(folder)
    assert len(toml_store._stores) <= before
