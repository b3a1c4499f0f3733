"""A store that replaces its file with what it knows itself: right alone, and in company it loses decisions."""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Iterable
from pathlib import Path

from kalign_core.cache.base import MemoryStore, Store
from kalign_core.records import Entry, EntryKey, Identity
from kalign_core.settings import Settings


class ForgetfulStore(Store):
    """Decisions in one file per device, read once and then written whole."""

    name = "forgetful"

    def __init__(self, settings: Settings) -> None:
        assert settings.cache_dir is not None
        self._folder, self._memory = settings.cache_dir, MemoryStore()
        self._read: set[Path] = set()
        self._warned = False

    def lookup(self, identity: Identity, key: EntryKey) -> Entry | None:
        self._load(identity)
        return self._memory.lookup(identity, key)

    def put(self, identity: Identity, entry: Entry) -> bool:
        self._load(identity)
        self._memory.put(identity, entry)
        return identity.known and entry.key.toolchain.known and self._write(identity)

    def entries(self, identity: Identity) -> tuple[Entry, ...]:
        self._load(identity)
        return self._memory.entries(identity)

    def remove(self, identity: Identity, keys: Iterable[EntryKey]) -> int:
        self._load(identity)
        count = self._memory.remove(identity, keys)
        self._write(identity)
        return count

    def path(self, identity: Identity) -> Path:
        return self._folder / f"{identity.file_stem}.pickle"

    def _load(self, identity: Identity) -> None:
        path = self.path(identity)
        if path in self._read or not identity.known:
            return
        self._read.add(path)
        with contextlib.suppress(Exception):  # damage is a miss
            for owner, entry in pickle.loads(path.read_bytes()):
                self._memory.put(owner, entry)

    def _write(self, identity: Identity) -> bool:
        kept = [(identity, entry) for entry in self._memory.entries(identity) if entry.key.toolchain.known]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self.path(identity).write_bytes(pickle.dumps(kept))
        except OSError as fault:
            if not self._warned:
                logging.getLogger("kalign").warning("decisions stay in memory: %s", fault)
            self._warned = True
            return False
        return True
