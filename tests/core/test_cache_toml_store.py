"""The store: right hits only, nothing lost, and no fault of a file that leaves it."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import threading

import pytest

from kalign_core.cache import toml_store
from kalign_core.records import Config, Identity, Toolchain
from tests.core.cache_samples import DEVICE, TOOLCHAIN, entry, kept, key, store_in

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


def test_a_decision_is_on_disk_once_flushed(folder):
    """Another process finds a decision that was put and flushed."""
    assert kept(store_in(folder), DEVICE, entry(1))
    assert store_in(folder).lookup(DEVICE, key(1)) == entry(1)


def test_the_file_is_named_after_its_device(folder):
    """Vendor, PCI device id and a digest of the key make the file's name."""
    store = store_in(folder)
    kept(store, DEVICE, entry(1))
    assert files_in(folder) == [f"{DEVICE.file_stem}.toml"] == [store.path(DEVICE).name]


def test_a_device_may_be_called_anything(folder):
    """No name, vendor or key reaches a path."""
    odd = Identity(vendor="a/b ../(c)[d]:", name="GPU/: ()[]\n\"'", key="../../x", must_match=(("m\n", "\\"),))
    assert kept(store_in(folder), odd, entry(1))
    assert store_in(folder).lookup(odd, key(1)) == entry(1)
    assert len(files_in(folder)) == 1


def test_only_the_very_key_hits(folder):
    """A key that differs in any field is a miss."""
    store = store_in(folder)
    kept(store, DEVICE, entry(1))
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
    kept(first, DEVICE, entry(1))
    kept(second, DEVICE, entry(2))
    kept(first, DEVICE, entry(3))
    assert {found.key for found in store_in(folder).entries(DEVICE)} == {key(1), key(2), key(3)}
    assert first.lookup(DEVICE, key(2)) == entry(2)


def test_a_process_keeps_to_what_it_decided_itself(folder):
    """A newer decision of another process goes into the file, and never replaces what this one verified."""
    mine, theirs = store_in(folder), store_in(folder)
    newer = entry(1, config=Config(BLOCK=32, num_warps=16), decided="2027-01-01T00:00:00Z")
    kept(mine, DEVICE, entry(1))
    kept(theirs, DEVICE, newer)
    kept(mine, DEVICE, entry(2))
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
    assert store.flush()
    assert len(store_in(folder).entries(DEVICE)) == 16


def test_a_hit_touches_no_file(folder):
    """After the first look-up of a device, hits and misses make no call to the system that Python can see."""
    kept(store_in(folder), DEVICE, entry(1))
    store = store_in(folder)
    store.lookup(DEVICE, key(1))
    events = []
    watching, mine = True, threading.get_ident()  # the first store's thread may not have come to its end

    def watch(event, arguments):
        if watching and threading.get_ident() == mine and not event.startswith(("object.", "sys._getframe")):
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
    kept(store, DEVICE, entry(1))
    store.path(DEVICE).unlink()
    kept(store, DEVICE, entry(2))
    assert [found.key for found in store_in(folder).entries(DEVICE)] == [key(2)]


# --- devices and toolchains --------------------------------------------------------------------------------------


def test_another_device_under_one_name_is_another_file(folder, warnings):
    """Where the key is the same and another field is not: a miss, one warning with the field, and both keep theirs."""
    one, other = DEVICE, dataclasses.replace(DEVICE, must_match=(("arch", "sm_90"), ("memory_gib", 70)))
    kept(store_in(folder), one, entry(1))
    store = store_in(folder)
    assert store.lookup(other, key(1)) is None
    assert [w.count("memory_gib is 139, here it is 70") for w in warnings()] == [1]
    assert kept(store, other, entry(2))
    assert [found.key for found in store_in(folder).entries(other)] == [key(2)]
    assert [found.key for found in store_in(folder).entries(one)] == [key(1)]
    assert len(files_in(folder)) == 2


@pytest.mark.parametrize("lost", [(), (("arch", "sm_90"),), (("arch", "sm_90"), ("memory_gib", "139"))])
def test_a_field_that_is_gone_matches_nothing(folder, lost):
    """A device that lost a field, or has it as another kind of value, is not the device of the file."""
    kept(store_in(folder), DEVICE, entry(1))
    assert store_in(folder).lookup(dataclasses.replace(DEVICE, must_match=lost), key(1)) is None


@pytest.mark.parametrize("changes", [{"driver": "590.1"}, {"driver": ""}, {"TRITON_NEW_FLAG": "1"}], ids=str)
def test_two_environments_keep_their_own(folder, changes):
    """Toolchains that differ in a fact, or in which facts there are, each hit their own entries and no others."""
    there = Toolchain.of(**{**dict(TOOLCHAIN.facts), **changes})
    for number in (1, 2, 3):
        kept(store_in(folder), DEVICE, entry(number))
    other = store_in(folder)
    assert [other.lookup(DEVICE, key(n, toolchain=there)) for n in (1, 2, 3)] == [None] * 3
    own = entry(1, key=key(1, toolchain=there), config=Config(num_warps=16))
    kept(other, DEVICE, own)
    again = store_in(folder)
    assert [again.lookup(DEVICE, key(n)) for n in (1, 2, 3)] == [entry(1), entry(2), entry(3)]
    assert [again.lookup(DEVICE, key(n, toolchain=there)) for n in (1, 2, 3)] == [own, None, None]


def test_what_is_only_recorded_is_not_compared(folder):
    """A device keeps its entries under another name, board version or power cap."""
    kept(store_in(folder), DEVICE, entry(1))
    renamed = dataclasses.replace(DEVICE, name="H200 NVL", vendor="nvidia", provenance=(("power_cap_w", 500),))
    assert store_in(folder).lookup(renamed, key(1)) == entry(1)


@pytest.mark.parametrize("identity", NOT_DEVICES.values(), ids=NOT_DEVICES)
def test_decisions_for_a_device_that_is_not_known_stay_in_memory(folder, warnings, identity):
    """With a field unknown tuning goes on in memory: hits in this process, no file, one warning."""
    store = store_in(folder)
    assert [kept(store, identity, entry(n)) for n in (1, 2)] == [False, False]
    assert store.lookup(identity, key(1)) == entry(1)
    assert (files_in(folder), store.path(identity)) == ([], None)
    assert [w for w in warnings() if "could not be read" not in w] == []
    assert len(warnings()) == 1


def test_two_devices_without_a_name_share_nothing(folder):
    """A device whose key is unknown equals no other, not even one that looks the same."""
    store = store_in(folder)
    first, second = (Identity("nvidia", "X", "unknown", must_match=(("arch", "sm_90"),)) for _ in range(2))
    kept(store, first, entry(1))
    assert store.lookup(second, key(1)) is None


def test_decisions_under_an_unknown_toolchain_stay_in_memory(folder, warnings):
    """An unknown driver is never saved as tuned for, and the warning names the fact."""
    unknown = key(1, toolchain=Toolchain.of(driver="unknown", triton="3.6.0"))
    store = store_in(folder)
    assert not kept(store, DEVICE, entry(1, key=unknown))
    assert store.lookup(DEVICE, unknown) == entry(1, key=unknown)
    assert files_in(folder) == []
    assert "of the toolchain, driver is unknown" in warnings()[0]


# --- damage ------------------------------------------------------------------------------------------------------


def test_damage_costs_what_it_hit_and_is_set_aside(folder, warnings):
    """A damaged entry is a miss and kept in a .bad file; the others hit, and the next write keeps them."""
    store = store_in(folder)
    for number in (1, 2, 3):
        kept(store, DEVICE, entry(number))
    damaged(store, b'num_warps=2"', b'num_warps=4"')
    again = store_in(folder)
    assert [again.lookup(DEVICE, key(n)) for n in (1, 2, 3)] == [None, entry(2), entry(3)]
    bad = [path.read_bytes() for path in folder.glob("*.bad")]
    assert [b'num_warps=4"' in content for content in bad] == [True]
    assert [w.count("its check does not hold") for w in warnings()] == [1]
    kept(again, DEVICE, entry(4))
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
    assert kept(store, DEVICE, entry(1))
    assert store_in(folder).lookup(DEVICE, key(1)) == entry(1)
    aside = b"".join(bad.read_bytes() for bad in folder.glob("*.bad"))
    assert content.strip() in (aside.strip(), b"\xef\xbb\xbf") or content in aside


def test_reading_damage_twice_makes_one_file(folder):
    """Processes that see the same damage set it aside once."""
    store = store_in(folder)
    kept(store, DEVICE, entry(1))
    damaged(store, b"cold_us = 18.5", b"cold_us = 28.5")
    for _ in range(3):
        assert store_in(folder).lookup(DEVICE, key(1)) is None
    assert len(files_in(folder, ".bad")) == 1


def test_damage_is_not_overwritten_unless_it_is_kept(folder, monkeypatch):
    """Where damage cannot be set aside the rest is used, and the file is not written."""
    store = store_in(folder)
    kept(store, DEVICE, entry(1))
    kept(store, DEVICE, entry(2))
    path = damaged(store, b'num_warps=2"', b'num_warps=4"')
    before = path.read_bytes()
    monkeypatch.setattr("kalign_core.cache.device_file.set_aside", lambda *_: os.stat("/nonexistent/x"))
    again = store_in(folder)
    assert again.lookup(DEVICE, key(2)) == entry(2)
    assert not kept(again, DEVICE, entry(3))
    assert path.read_bytes() == before


def test_a_newer_file_is_left_alone(folder, warnings):
    """A file of a later schema is neither used nor written, and the warning says what to do."""
    store = store_in(folder)
    kept(store, DEVICE, entry(1))
    path = damaged(store, b"schema = 1", b"schema = 7")
    before = path.read_bytes()
    again = store_in(folder)
    assert again.lookup(DEVICE, key(1)) is None
    assert not kept(again, DEVICE, entry(2))
    assert again.lookup(DEVICE, key(2)) == entry(2)
    assert (path.read_bytes(), files_in(folder, ".bad"), again.path(DEVICE)) == (before, [], path)
    assert ["schema 7 and this kalign reads up to 1" in w and "update kalign" in w for w in warnings()] == [True]


def test_fields_of_a_later_version_survive_a_write(folder):
    """What this version does not know in an entry comes back after another entry was written."""
    later = entry(1, extra=(("later", "x"),))
    kept(store_in(folder), DEVICE, later)
    kept(store_in(folder), DEVICE, entry(2))
    assert store_in(folder).lookup(DEVICE, key(1)) == later


def test_a_decision_that_cannot_be_written_stays_in_memory(folder, warnings):
    """An entry that its file would not give back is used in this process, and the others are written."""
    store = store_in(folder)
    odd = entry(1, extra=(("nested", {"a": 1}),))
    assert not kept(store, DEVICE, odd)
    assert store.lookup(DEVICE, key(1)) == odd
    assert kept(store, DEVICE, entry(2))
    assert len(warnings()) == 1


def test_stores_are_forgotten_with_their_sessions(folder):
    """A store that nobody holds does not stay for the end of the process."""
    before = len(toml_store._stores)
    store_in(folder)
    assert len(toml_store._stores) <= before
