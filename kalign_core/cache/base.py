"""What a store of decisions has to provide, and the store that keeps them in memory only.

A store belongs to one process and serves any number of devices. No method raises for a fault of the store itself: a
fault costs one warning, and the decision stays in memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

from kalign_core.cache.device_table import names_of
from kalign_core.records import Entry, EntryKey, Identity


class Store(ABC):
    """Decisions by device and key."""

    name: ClassVar[str]
    writable: ClassVar[bool] = True

    @abstractmethod
    def lookup(self, identity: Identity, key: EntryKey) -> Entry | None:
        """The decision stored for exactly ``key`` on exactly this device, or None. Reads memory once loaded."""

    @abstractmethod
    def put(self, identity: Identity, entry: Entry) -> bool:
        """Keep ``entry`` in memory and, where the identity is known, on disk; whether it was accepted for the disk.

        Waits for files a moment at most: what was accepted is written by itself, at the latest when the process ends.
        ``flush`` says whether that went well.
        """

    @abstractmethod
    def entries(self, identity: Identity) -> tuple[Entry, ...]:
        """Every entry for this device, those that cannot match here included."""

    @abstractmethod
    def remove(self, identity: Identity, keys: Iterable[EntryKey]) -> int:
        """Forget the decisions for ``keys`` on this device, on disk too; gives how many there were and now are not.

        Refuses nothing: what may be thrown away is for the caller to know. 0 where the disk does not let it.
        """

    def flush(self) -> bool:
        """Write what ``put`` accepted and is not on disk yet; whether all of it is there. Bounded in time."""
        return True

    def path(self, identity: Identity) -> Path | None:
        """The file that holds this device's entries, or None for a store without files."""
        return None


class MemoryStore(Store):
    """Keeps decisions for the life of the process."""

    name = "memory"

    def __init__(self) -> None:
        # No lock: each step on a dictionary is whole, and a child of fork could inherit one that is held.
        self._entries: dict[object, dict[EntryKey, Entry]] = {}
        self._nameless: dict[int, Identity] = {}

    def lookup(self, identity: Identity, key: EntryKey) -> Entry | None:
        return self._of(identity).get(key)

    def put(self, identity: Identity, entry: Entry) -> bool:
        told_apart_by = _told_apart_by(identity)
        if isinstance(told_apart_by, int):
            self._nameless[told_apart_by] = identity  # what nobody holds gives its number to another
        self._entries.setdefault(told_apart_by, {})[entry.key] = entry
        return False

    def entries(self, identity: Identity) -> tuple[Entry, ...]:
        return tuple(self._of(identity).copy().values())

    def remove(self, identity: Identity, keys: Iterable[EntryKey]) -> int:
        known = self._of(identity)
        return sum(known.pop(key, None) is not None for key in set(keys))

    def _of(self, identity: Identity) -> dict[EntryKey, Entry]:
        return self._entries.get(_told_apart_by(identity), {})


def _told_apart_by(identity: Identity) -> object:
    """What tells a device from others; one whose name is unknown is the very same object or another device."""
    return id(identity) if identity.key in ("", "unknown") else names_of(identity)
