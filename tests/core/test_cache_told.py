"""What a process says at its end of entries that it had and never used, and what it must not say."""

from __future__ import annotations

import logging

import pytest

from kalign_core.records import Toolchain
from tests.core.cache_samples import DEVICE, TOOLCHAIN, entry, kept, key, store_in


@pytest.fixture
def folder(tmp_path):
    """The folder of the devices' files, not made yet."""
    return tmp_path / "cache"


@pytest.fixture
def warnings(caplog):
    """What was warned of, one text a warning."""
    caplog.set_level(logging.WARNING, "kalign")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "kalign"]


def told_of(store, warnings):
    """What ``store`` says of its entries when its process ends."""
    before = len(warnings())
    store._end()
    return warnings()[before:]


def test_entries_that_nothing_hit_are_told_of_at_the_end(folder, warnings):
    """A process that asked for a kernel, hit none of its entries and decided nothing says so, once."""
    kept(store_in(folder), DEVICE, entry(1))
    store = store_in(folder)
    store.lookup(DEVICE, key(2))
    assert [w.startswith("none of the 1 entries for scale_rows in ") for w in told_of(store, warnings)] == [True]
    assert told_of(store, warnings) == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"toolchain": Toolchain.of(**{**dict(TOOLCHAIN.facts), "driver": "590.1"})},
            ": toolchain.driver is 580.159.04, here it is 590.1;",
        ),
        ({"source": "changed", "suite": "2027"}, ": source is 9c1e000000000000, here it is changed; suite is "),
    ],
)
def test_the_fields_that_differ_are_named(folder, warnings, changes, told):
    """The warning says in which fields the nearest entry is another than the one that was asked for."""
    kept(store_in(folder), DEVICE, entry(1))
    store = store_in(folder)
    store.lookup(DEVICE, key(1, **changes))
    (warning,) = told_of(store, warnings)
    assert told in warning


def test_one_hit_is_enough(folder, warnings):
    """A process whose look-ups were answered once has nothing to say of those that were not."""
    kept(store_in(folder), DEVICE, entry(1))
    store = store_in(folder)
    store.lookup(DEVICE, key(2))
    store.lookup(DEVICE, key(1))
    assert told_of(store, warnings) == []


def test_a_process_that_asked_nothing_says_nothing(folder, warnings):
    """Reading a file, as commands do, is no miss."""
    kept(store_in(folder), DEVICE, entry(1))
    store = store_in(folder)
    store.entries(DEVICE)
    assert told_of(store, warnings) == []


def test_entries_of_other_kernels_are_not_missed(folder, warnings):
    """A process that asked only for kernels without entries has missed none."""
    kept(store_in(folder), DEVICE, entry(1))
    store = store_in(folder)
    store.lookup(DEVICE, key(1, kernel="other"))
    assert told_of(store, warnings) == []


def test_a_process_that_filled_the_file_itself_missed_nothing(folder, warnings):
    """Entries that came after the file was loaded are none that could have been used."""
    store = store_in(folder)
    store.lookup(DEVICE, key(1))
    kept(store, DEVICE, entry(2))
    kept(store_in(folder), DEVICE, entry(3))
    store.lookup(DEVICE, key(1))
    assert told_of(store, warnings) == []


def test_a_process_that_decided_for_a_kernel_is_not_told_of_it(folder, warnings):
    """Of kernels that this process tuned for what was asked, the other entries are other problems'."""
    for number, name in ((1, "tuned"), (2, "missed")):
        kept(store_in(folder), DEVICE, entry(number, key=key(number, kernel=name)))
    store = store_in(folder)
    for name in ("tuned", "missed"):
        store.lookup(DEVICE, key(9, kernel=name))
    kept(store, DEVICE, entry(9, key=key(9, kernel="tuned")))
    (told,) = told_of(store, warnings)
    assert told.startswith("none of the 1 entries for missed in ")


def test_a_name_that_needs_quoting_is_counted(folder, warnings):
    """Kernels are told apart by name, whatever characters it has."""
    kept(store_in(folder), DEVICE, entry(1, key=key(1, kernel='a"\\\n')))
    store = store_in(folder)
    store.lookup(DEVICE, key(2, kernel='a"\\\n'))
    assert len(told_of(store, warnings)) == 1
