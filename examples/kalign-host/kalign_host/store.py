"""A store: decisions in one SQLite file per device, safe between processes because SQLite is.

What a session may expect of it stands in ``kalign_core.cache.base.Store``: look-ups answer from memory, no fault of a
disk is an exception, and nothing is kept for a device or a toolchain that could not be read. Text from the file is
parsed and never evaluated; a row whose digest does not match is not used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kalign_core.cache.base import MemoryStore, Store
from kalign_core.cache.device_table import names_of
from kalign_core.cache.places import cache_folder
from kalign_core.records import Config, Entry, EntryKey, Identity, Toolchain
from kalign_core.settings import Settings

log = logging.getLogger("kalign")
LOCK_WAIT_S = 10.0
TABLE = "create table if not exists entry (device text, key text, body blob, digest text, primary key (device, key))"


class SqliteStore(Store):
    """Decisions in ``<vendor>-<digest>.sqlite`` under ``settings.cache_dir`` or the user's cache folder."""

    name = "sqlite"

    def __init__(self, settings: Settings) -> None:
        self._folder = cache_folder(settings)
        self._memory = MemoryStore()
        self._loaded: set[str] = set()
        self._unsaved: dict[tuple[str, str], tuple[Identity, Entry]] = {}
        self._warned = False

    def lookup(self, identity: Identity, key: EntryKey) -> Entry | None:
        self._load(identity)
        return self._memory.lookup(identity, key)

    def put(self, identity: Identity, entry: Entry) -> bool:
        self._load(identity)
        self._memory.put(identity, entry)
        if self._folder is None or not identity.known or not entry.key.toolchain.known:
            return False
        self._unsaved[_device(identity), _key(entry.key)] = (identity, entry)
        return self.flush()

    def entries(self, identity: Identity) -> tuple[Entry, ...]:
        self._load(identity)
        return self._memory.entries(identity)

    def remove(self, identity: Identity, keys: Iterable[EntryKey]) -> int:
        self._load(identity)
        wanted = set(keys)
        path = self.path(identity)
        if path is not None and path.exists():
            try:
                with _opened(path) as file:
                    rows = [(_device(identity), _key(key)) for key in wanted]
                    file.executemany("delete from entry where device = ? and key = ?", rows)
            except (OSError, sqlite3.Error) as fault:
                self._warn(path, fault)
                return 0
        for key in wanted:
            self._unsaved.pop((_device(identity), _key(key)), None)
        return self._memory.remove(identity, wanted)

    def flush(self) -> bool:
        for token, (identity, entry) in list(self._unsaved.items()):
            path = self.path(identity)
            try:
                if path is None or not self._save(path, identity, entry):
                    return False
            except (OSError, sqlite3.Error) as fault:
                self._warn(path, fault)
                return False
            del self._unsaved[token]
        return True

    def path(self, identity: Identity) -> Path | None:
        if self._folder is None or not identity.known:
            return None
        return self._folder / f"{identity.file_stem}.sqlite"

    def _save(self, path: Path, identity: Identity, entry: Entry) -> bool:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        body = to_text(entry)
        try:
            with _opened(path) as file:
                file.execute(TABLE)
                row = (_device(identity), _key(entry.key), body, _digest(body))
                file.execute("insert or replace into entry values (?, ?, ?, ?)", row)
        except sqlite3.OperationalError:
            raise
        except sqlite3.DatabaseError as fault:  # what is there is no database: kept for whoever wants to look at it
            self._warn(path, fault)
            path.replace(path.with_suffix(".bad"))
            return self._save(path, identity, entry)
        return True

    def _load(self, identity: Identity) -> None:
        """Read the device's file, once in the life of this store."""
        path, device = self.path(identity), _device(identity)
        if path is None or device in self._loaded:
            return
        self._loaded.add(device)
        try:
            if path.exists():
                with _opened(path) as file:
                    rows = file.execute("select body, digest from entry where device = ?", (device,)).fetchall()
                for body, digest in rows:
                    if _digest(body) == digest:
                        self._memory.put(identity, from_text(body))
        except (OSError, sqlite3.Error) as fault:
            self._warn(path, fault)

    def _warn(self, path: Path | None, fault: Exception) -> None:
        """One warning, whatever goes wrong how often: nobody can act on the second."""
        if not self._warned:
            self._warned = True
            log.warning("decisions stay in memory: %s: %s", path, fault)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """The database, committed after the block and closed whatever happens."""
    file = sqlite3.connect(path, timeout=LOCK_WAIT_S)
    try:
        with file:
            yield file
    finally:
        file.close()


# --- an entry as text ---------------------------------------------------------------------------------------------


def to_text(entry: Entry) -> bytes:
    """``entry`` as JSON."""
    fields = _fields(entry)
    key = {**_fields(entry.key), "toolchain": entry.key.toolchain.facts}
    return json.dumps({**fields, "key": key, "config": str(entry.config)}).encode()


def from_text(text: bytes) -> Entry:
    """The entry that ``to_text`` gave."""
    fields: dict[str, Any] = json.loads(text)
    key = fields["key"]
    key["toolchain"] = Toolchain(_pairs(key["toolchain"]))
    fields |= {"key": EntryKey(**key), "config": Config.parse(fields["config"])}
    return Entry(**{**fields, "digests": tuple(fields["digests"]), "extra": _pairs(fields["extra"])})


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _pairs(lists: Iterable[Iterable[Any]]) -> tuple[Any, ...]:
    return tuple(tuple(pair) for pair in lists)


def _device(identity: Identity) -> str:
    """Everything that has to match for a device to be the same one."""
    return json.dumps(names_of(identity))


def _key(key: EntryKey) -> str:
    return json.dumps({**_fields(key), "toolchain": key.toolchain.facts}, sort_keys=True)


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
