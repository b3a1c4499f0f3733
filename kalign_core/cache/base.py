"""What a store of decisions has to provide, and the store that keeps them in memory only.

A store belongs to one process and serves any number of devices. No method raises for a fault of the store itself: a
fault costs one warning, and the decision stays in memory.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

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
        """Keep ``entry`` in memory and, where the identity is known, on disk; whether it is on disk."""

    @abstractmethod
    def entries(self, identity: Identity) -> tuple[Entry, ...]:
        """Every entry for this device, those that cannot match here included."""

    def path(self, identity: Identity) -> Path | None:
        """The file that holds this device's entries, or None for a store without files."""
        return None


class MemoryStore(Store):
    """Keeps decisions for the life of the process."""

    name = "memory"

    def __init__(self) -> None:
        self._entries: dict[str, dict[EntryKey, Entry]] = {}
        self._lock = threading.Lock()

    def lookup(self, identity: Identity, key: EntryKey) -> Entry | None:
        return self._entries.get(identity.key, {}).get(key)

    def put(self, identity: Identity, entry: Entry) -> bool:
        with self._lock:
            self._entries.setdefault(identity.key, {})[entry.key] = entry
        return False

    def entries(self, identity: Identity) -> tuple[Entry, ...]:
        return tuple(self._entries.get(identity.key, {}).values())
