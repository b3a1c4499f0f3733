"""Taking decisions out of a device's file: what goes, what stays, and what cannot be written."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from kalign_core.cache.base import MemoryStore
from kalign_core.cache.device_table import device_table
from kalign_core.cache.document import Document, render
from kalign_core.cache.files import locked, make_folder, publish
from kalign_core.records import Toolchain
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


def written(folder, *entries):
    """Write a file with ``entries`` into ``folder``, whoever would have refused them; gives its path."""
    document = Document(device_table(DEVICE))
    for one in entries:
        document.add(one)
    make_folder(folder)
    path = folder / f"{DEVICE.file_stem}.toml"
    publish(path, render(document))
    return path


def test_what_is_removed_is_gone(folder):
    """Removed entries are in neither file nor memory, the others stay, and the number of those that went is given."""
    store = store_in(folder)
    for number in (1, 2, 3):
        kept(store, DEVICE, entry(number))
    other = store_in(folder)
    other.lookup(DEVICE, key(1))
    assert other.remove(DEVICE, [key(1), key(3), key(9)]) == 2
    assert [other.lookup(DEVICE, key(n)) for n in (1, 2, 3)] == [None, entry(2), None]
    assert [found.key for found in store_in(folder).entries(DEVICE)] == [key(2)]


def test_removing_keeps_what_others_wrote(folder):
    """An entry that another process wrote after this one loaded the file stays."""
    store = store_in(folder)
    kept(store, DEVICE, entry(1))
    kept(store_in(folder), DEVICE, entry(2))
    assert store.remove(DEVICE, [key(1)]) == 1
    assert [found.key for found in store_in(folder).entries(DEVICE)] == [key(2)]


def test_what_is_removed_is_not_written_again(folder):
    """A decision removed before it was written does not reach the disk."""
    store = store_in(folder, lock_wait_s=0.05)
    kept(store, DEVICE, entry(1))
    with locked(store.path(DEVICE), 1.0):
        kept(store, DEVICE, entry(2))
    store.remove(DEVICE, [key(2)])
    assert kept(store, DEVICE, entry(3))
    assert {found.key for found in store_in(folder).entries(DEVICE)} == {key(1), key(3)}


def test_an_entry_under_unknown_facts_can_be_removed(folder):
    """What no key finds, since a fact of its toolchain is unknown, can be thrown away all the same."""
    unknown = key(1, toolchain=Toolchain.of(driver="unknown"))
    written(folder, entry(1, key=unknown), entry(2))
    assert store_in(folder).remove(DEVICE, [unknown]) == 1
    assert [found.key for found in store_in(folder).entries(DEVICE)] == [key(2)]


def test_removing_where_nothing_is_makes_no_file(folder):
    """Without a file there is nothing to remove, and no folder is made for it."""
    assert store_in(folder).remove(DEVICE, [key(1)]) == 0
    assert not folder.exists()


def test_removing_what_is_in_memory_only(folder):
    """Decisions for a device that cannot be named are removed from memory."""
    nameless = dataclasses.replace(DEVICE, key="unknown")
    store = store_in(folder)
    store.put(nameless, entry(1))
    assert store.remove(nameless, [key(1)]) == 1
    assert store.lookup(nameless, key(1)) is None


def test_a_file_that_cannot_be_written_keeps_its_entries(folder, warnings):
    """Where another process sits on the lock nothing is removed, here or on disk, with one warning."""
    store = store_in(folder, lock_wait_s=0.05)
    kept(store, DEVICE, entry(1))
    with locked(store.path(DEVICE), 1.0):
        assert store.remove(DEVICE, [key(1)]) == 0
    assert store.lookup(DEVICE, key(1)) == entry(1)
    assert [w.count("Timeout") for w in warnings()] == [1]


def test_removing_leaves_damage_aside(folder, warnings):
    """A damaged file is written without what was removed, its damage kept in a .bad file."""
    path = written(folder, *(entry(n) for n in (1, 2, 3)))
    path.write_bytes(path.read_bytes().replace(b'num_warps=2"', b'num_warps=4"', 1))
    assert store_in(folder).remove(DEVICE, [key(2)]) == 1
    assert [found.key for found in store_in(folder).entries(DEVICE)] == [key(3)]
    assert [b"num_warps=4" in bad.read_bytes() for bad in folder.glob("*.bad")] == [True]


def test_a_newer_file_loses_nothing(folder, warnings):
    """From a file of a later schema nothing is removed."""
    path = written(folder, entry(1))
    path.write_bytes(path.read_bytes().replace(b"schema = 1", b"schema = 7", 1))
    before = path.read_bytes()
    assert store_in(folder).remove(DEVICE, [key(1)]) == 0
    assert path.read_bytes() == before


def test_a_store_in_memory_removes():
    """The store without files forgets decisions and counts them."""
    store = MemoryStore()
    for number in (1, 2):
        store.put(DEVICE, entry(number))
    assert store.remove(DEVICE, [key(1), key(1), key(9)]) == 1
    assert store.entries(DEVICE) == (entry(2),)
    assert store.flush()
