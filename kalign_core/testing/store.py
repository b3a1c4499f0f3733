"""The suite for stores: what was put is found, nothing else is, and no fault of a disk reaches a launch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from kalign_core.cache.base import Store
from kalign_core.records import Config, Toolchain
from kalign_core.testing.entries import DEVICE, KEY, NAMELESS, OTHER_DEVICES, OTHER_KEYS, TOOLCHAIN, entry, flushed
from kalign_core.testing.store_files import LastingRules

AWKWARD = "quotes \" and ' and back\\slashes, [brackets], # signs = and a snowman \u2603"


class StoreConformance(LastingRules):
    """Everything a store has to do. The store is opened as a session opens it, by its record's factory::

        class TestLedger(StoreConformance):
            plugin = "my_package.plugin"
            store = "ledger"

    A store that keeps nothing on disk says ``lasting = False``.
    """

    @pytest.fixture
    def opened_store(self, folder: Path) -> Store:
        """A store on a folder that is empty."""
        return self.opened(folder)

    def test_the_factory_gives_a_store(self, opened_store: Store) -> None:
        """The record's factory gives a store of that name, which says whether it takes decisions."""
        assert isinstance(opened_store, Store)
        assert opened_store.name == self._said("store")
        assert isinstance(opened_store.writable, bool)

    def test_opening_creates_nothing(self, folder: Path) -> None:
        """A process that decides nothing leaves no folder behind."""
        store = self.opened(folder)
        assert store.lookup(DEVICE, KEY) is None
        assert flushed(store)
        assert not folder.exists()

    def test_what_was_put_is_found(self, opened_store: Store) -> None:
        """A decision is found under its key with every field as it was."""
        self.keep(opened_store, 1)
        assert opened_store.lookup(DEVICE, entry(1).key) == entry(1)

    def test_empty_evidence_is_kept(self, opened_store: Store) -> None:
        """A decision of which little is known is found as it was: None is not 0."""
        bare = entry(1, cold_us=None, reference_cold_us=None, mad_us=None, digests=(), tuned_at="", extra=())
        opened_store.put(DEVICE, bare)
        assert opened_store.lookup(DEVICE, bare.key) == bare

    def test_awkward_text_is_kept(self, opened_store: Store, folder: Path) -> None:
        """Text that means something to a file's format is found again by the next process."""
        odd = entry(1, key=dataclasses.replace(KEY, problem=AWKWARD), tuned_at=AWKWARD)
        accepted = opened_store.put(DEVICE, odd)
        assert flushed(opened_store)
        assert opened_store.lookup(DEVICE, odd.key) == odd
        assert not accepted or self.opened(folder).lookup(DEVICE, odd.key) == odd

    @pytest.mark.parametrize("field", OTHER_KEYS)
    def test_another_key_is_a_miss(self, opened_store: Store, field: str) -> None:
        """A key that differs in any field finds nothing, and a decision for it leaves the first one alone."""
        opened_store.put(DEVICE, entry(key=KEY))
        assert opened_store.lookup(DEVICE, OTHER_KEYS[field]) is None
        other = entry(key=OTHER_KEYS[field], config=Config(ROWS=1))
        opened_store.put(DEVICE, other)
        assert opened_store.lookup(DEVICE, KEY) == entry(key=KEY)
        assert opened_store.lookup(DEVICE, OTHER_KEYS[field]) == other

    @pytest.mark.parametrize("field", OTHER_KEYS)
    def test_another_key_is_a_miss_on_disk(self, folder: Path, field: str) -> None:
        """The next process finds nothing under a key that differs in any field, and each of two under its own."""
        store, other = self.opened(folder), entry(key=OTHER_KEYS[field], config=Config(ROWS=1))
        if not store.put(DEVICE, entry(key=KEY)):
            pytest.skip("the store keeps nothing on disk")
        assert flushed(store)
        assert self.opened(folder).lookup(DEVICE, OTHER_KEYS[field]) is None
        store.put(DEVICE, other)
        assert flushed(store)
        again = self.opened(folder)
        assert (again.lookup(DEVICE, KEY), again.lookup(DEVICE, OTHER_KEYS[field])) == (entry(key=KEY), other)

    @pytest.mark.parametrize("field", OTHER_DEVICES)
    def test_another_device_is_a_miss(self, opened_store: Store, folder: Path, field: str) -> None:
        """A device that differs in what names it finds nothing, in this process and in the next."""
        self.keep(opened_store, 1)
        for store in (opened_store, self.opened(folder)):
            assert store.lookup(OTHER_DEVICES[field], entry(1).key) is None

    def test_provenance_is_not_compared(self, on_disk: Path) -> None:
        """What is only recorded of a device may change: its decisions are found."""
        updated = dataclasses.replace(DEVICE, provenance=(("firmware", "2.0"),))
        assert self.opened(on_disk).lookup(updated, entry(1).key) == entry(1)

    def test_unknown_equals_nothing(self, opened_store: Store) -> None:
        """Two devices whose names could not be read are not the same device."""
        opened_store.put(NAMELESS, entry(1))
        assert opened_store.lookup(dataclasses.replace(NAMELESS), entry(1).key) is None

    def test_an_unknown_toolchain_stays_in_memory(self, opened_store: Store, folder: Path) -> None:
        """A decision whose toolchain could not be read whole serves this process and is not stored."""
        partly = Toolchain.of(**{**dict(TOOLCHAIN.facts), "driver": "unknown"})
        found = entry(key=dataclasses.replace(KEY, toolchain=partly))
        assert opened_store.put(DEVICE, found) is False
        assert flushed(opened_store)
        assert opened_store.lookup(DEVICE, found.key) == found
        assert self.opened(folder).entries(DEVICE) == ()

    def test_the_last_decision_stands(self, opened_store: Store) -> None:
        """A second decision for a key replaces the first."""
        self.keep(opened_store, 1)
        better = entry(1, config=Config(ROWS=4), cold_us=10.0)
        opened_store.put(DEVICE, better)
        assert flushed(opened_store)
        assert opened_store.lookup(DEVICE, better.key) == better
        assert [found for found in opened_store.entries(DEVICE) if found.key == better.key] == [better]

    def test_every_entry_is_listed(self, opened_store: Store) -> None:
        """``entries`` gives each decision for the device once, and none of another's."""
        self.keep(opened_store, 1, 2, 3)
        opened_store.put(OTHER_DEVICES["key"], entry(4))
        assert sorted(found.key.problem for found in opened_store.entries(DEVICE)) == sorted(
            entry(number).key.problem for number in (1, 2, 3)
        )

    def test_removing_forgets(self, opened_store: Store) -> None:
        """What is removed is not found and not listed, what is not stays; the count is of what there was."""
        self.keep(opened_store, 1, 2, 3)
        assert opened_store.remove(DEVICE, [entry(1).key, entry(3).key, entry(9).key]) == 2
        assert [opened_store.lookup(DEVICE, entry(number).key) for number in (1, 2, 3)] == [None, entry(2), None]
        assert opened_store.entries(DEVICE) == (entry(2),)
        assert opened_store.remove(DEVICE, [entry(1).key]) == 0
