"""A store that keeps every decision for every device in one list, on disk and nowhere else."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Iterable
from dataclasses import replace

from kalign_core.cache.base import Store
from kalign_core.records import Entry, EntryKey, Identity
from kalign_core.settings import Settings


class HopelessStore(Store):
    """Gives what was put first, whatever is asked for."""

    name = "hopeless"

    def __init__(self, settings: Settings) -> None:
        assert settings.cache_dir is not None
        self._path = settings.cache_dir / "list.pickle"
        self._path.parent.mkdir(exist_ok=True)
        if not self._path.exists():
            self._write([])

    def lookup(self, identity: Identity, key: EntryKey) -> Entry | None:
        entries = [entry for owner, entry in self._read() if owner.provenance == identity.provenance]
        return entries[0] if entries else None

    def put(self, identity: Identity, entry: Entry) -> bool:
        self._write([*self._read(), (identity, replace(entry, tried="", cold_us=entry.cold_us or 0.0))])
        return True

    def entries(self, identity: Identity) -> tuple[Entry, ...]:
        return tuple(entry for _, entry in self._read())

    def remove(self, identity: Identity, keys: Iterable[EntryKey]) -> int:
        return len(set(keys))

    def path(self, identity: Identity):  # type: ignore[no-untyped-def]
        return self._path

    def _read(self) -> list[tuple[Identity, Entry]]:
        found: list[tuple[Identity, Entry]] = pickle.loads(self._path.read_bytes())
        return found

    def _write(self, pairs: list[tuple[Identity, Entry]]) -> None:
        """Replace the list, so that a process which reads it meanwhile fails by nothing but what it reads."""
        descriptor, name = tempfile.mkstemp(dir=self._path.parent)
        with os.fdopen(descriptor, "wb") as file:
            file.write(pickle.dumps(pairs))
        os.replace(name, self._path)
