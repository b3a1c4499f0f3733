"""The store that keeps decisions in one TOML file per device.

A process reads a device's file once, when it first looks something up, and from then on answers from memory: a hit
touches no file and takes no lock. A decision is written before ``put`` returns, because a process may be killed right
after; what cannot be written stays in memory and goes with the next one, or when the process ends. Writing merges under
a lock, so that no process loses another's entries, and never replaces what this process decided and verified itself.

No fault of a file leaves this module: a look-up that fails is a miss, a write that fails costs one warning of its kind.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import threading
import weakref
from dataclasses import dataclass, field
from pathlib import Path

from kalign_core.cache.base import Store
from kalign_core.cache.device_file import DeviceFile
from kalign_core.cache.device_table import names_of
from kalign_core.cache.document import Document
from kalign_core.cache.entry_text import entry_lines, plain
from kalign_core.cache.places import cache_folder
from kalign_core.records import Entry, EntryKey, Identity
from kalign_core.settings import Settings

log = logging.getLogger("kalign")

LOCK_WAIT_S = 2.0
LOCK_WAIT_AGAIN_S = 0.5


@dataclass(slots=True)
class _Device:
    """What this process knows of one device: its file as last seen, and its own decisions.

    ``file`` is None where nothing of the device goes to disk, ``readable`` whether the file may be used. ``found``
    answers look-ups; ``unsaved`` is still to be written. ``used`` and ``missed`` say how the process fared with it.
    """

    identity: Identity
    file: DeviceFile | None = None
    readable: bool = True
    document: Document = field(default_factory=lambda: Document({}))
    found: dict[EntryKey, Entry] = field(default_factory=dict)
    unsaved: dict[EntryKey, Entry] = field(default_factory=dict)
    used: bool = False
    missed: bool = False


class TomlStore(Store):
    """Decisions in ``<vendor>-<PCI id>-<digest>.toml`` under ``settings.cache_dir`` or the user's cache folder.

    ``lock_wait_s`` bounds the seconds that a ``put`` waits for other processes; after one wait in vain the next are
    short until one succeeds.
    """

    name = "toml"

    def __init__(self, settings: Settings, lock_wait_s: float = LOCK_WAIT_S) -> None:
        self._folder = cache_folder(settings)
        self._lock_wait_s = lock_wait_s
        self._save_failed = False
        self._devices: dict[tuple[object, ...], _Device] = {}
        self._nameless: list[_Device] = []
        self._warned: set[tuple[object, ...]] = set()
        self._lock = threading.RLock()
        _stores.add(self)

    def lookup(self, identity: Identity, key: EntryKey) -> Entry | None:
        device = self._device(identity)
        entry = device.found.get(key) or self._decode(device, key)
        if entry is None:
            device.missed = True
        else:
            device.used = True
        return entry

    def put(self, identity: Identity, entry: Entry) -> bool:
        try:
            entry = plain(entry)
            with self._lock:
                device = self._device(identity, keep=True)
                device.found[entry.key] = entry
                device.used = True
                if not self._may_save(device, entry) or device.file is None or not device.readable:
                    return False
                device.unsaved[entry.key] = entry
                wait_s = min(self._lock_wait_s, LOCK_WAIT_AGAIN_S) if self._save_failed else self._lock_wait_s
                return self._save(device, device.file, wait_s)
        except Exception as fault:  # noqa: BLE001  # a launch is waiting, and what is wrong here must not fail it
            self._warn(("put", type(fault)), "a decision for %s stays in memory: %s", entry.key.kernel, fault)
            return False

    def entries(self, identity: Identity) -> tuple[Entry, ...]:
        device = self._device(identity)
        known = {entry.key: entry for entry in device.document.entries()}
        return tuple({**known, **device.found}.values())

    def path(self, identity: Identity) -> Path | None:
        file = self._device(identity).file
        return None if file is None else file.path

    def _device(self, identity: Identity, *, keep: bool = False) -> _Device:
        """The state of ``identity``; loads its file at the first call. ``keep`` remembers a device without a name."""
        if identity.key in ("", "unknown"):
            return self._nameless_device(identity, keep)
        names = names_of(identity)
        device = self._devices.get(names)
        if device is None:
            with self._lock:
                device = self._devices.get(names)
                if device is None:
                    device = self._devices[names] = self._load(identity)
        return device

    def _nameless_device(self, identity: Identity, keep: bool) -> _Device:
        """State of a device that cannot be told from others: the same for the very same identity object only."""
        with self._lock:
            for device in self._nameless:
                if device.identity is identity:
                    return device
            device = _Device(identity)
            if keep:
                self._nameless.append(device)
            return device

    def _load(self, identity: Identity) -> _Device:
        device = _Device(identity)
        if not identity.known:
            return device
        if self._folder is None:
            self._warn(
                ("folder",),
                "decisions stay in memory: there is no home folder to keep them in (HOME=%r); "
                "try: export KALIGN_CACHE_DIR=/a/folder/of/yours",
                os.environ.get("HOME"),
            )
            return device
        device.file = DeviceFile(identity, self._folder, self._warn)
        try:
            device.document = device.file.load()
        except Exception as fault:  # noqa: BLE001  # a launch is waiting, and what is wrong here must not fail it
            device.readable = False
            self._warn_of(fault, device.file.path)
        return device

    def _decode(self, device: _Device, key: EntryKey) -> Entry | None:
        try:
            entry = device.document.find(key)
        except ValueError as fault:
            self._warn(("entry",), "an entry for %s cannot be used: %s", key.kernel, fault)
            return None
        return None if entry is None else device.found.setdefault(key, entry)

    def _may_save(self, device: _Device, entry: Entry) -> bool:
        """Whether ``entry`` may go to disk; unknowns are told once. Raises ``ValueError`` if it cannot be written."""
        if not device.identity.known:
            who = device.identity.name or device.identity.vendor or "this device"
            self._warn(("identity",), "decisions for %s stay in memory: what names it could not be read", who)
            return False
        if not entry.key.toolchain.known:
            unknown = ", ".join(name for name, value in entry.key.toolchain.facts if value == "unknown")
            self._warn(("toolchain", unknown), "decisions stay in memory: of the toolchain, %s is unknown", unknown)
            return False
        entry_lines(entry, entry.key.toolchain.id)
        return True

    def _save(self, device: _Device, file: DeviceFile, wait_s: float) -> bool:
        """Merge what is unsaved into the device's file. Call it with the lock of this store held."""
        self._save_failed = True
        try:
            device.document = file.save(device.unsaved.values(), wait_s)
        except Exception as fault:  # noqa: BLE001  # a launch is waiting; the entry goes to disk with the next one
            self._warn_of(fault, file.path)
            return False
        device.unsaved.clear()
        self._save_failed = False
        return True

    def _warn_of(self, fault: Exception, path: Path) -> None:
        reason = (isinstance(fault, OSError) and fault.strerror) or str(fault)
        code = errno.errorcode.get(getattr(fault, "errno", None) or 0, type(fault).__name__)
        self._warn((code, path), "decisions stay in memory, %s cannot be used: %s (%s)", path, reason, code)

    def _warn(self, kind: tuple[object, ...], message: str, *values: object) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            log.warning(message, *values)

    def _end(self) -> None:
        """When the process ends: a last try to write what is not on disk, and a word on entries that were no use."""
        for device in list(self._devices.values()):
            if device.unsaved and device.file is not None and self._lock.acquire(timeout=self._lock_wait_s):
                self._save(device, device.file, self._lock_wait_s)
                self._lock.release()
            if device.file is not None and device.missed and not device.used and device.document.blocks:
                log.warning(
                    "none of the %d entries in %s was used by this process; `kalign cache explain` says why",
                    len(device.document.blocks),
                    device.file.path,
                )


_stores: weakref.WeakSet[TomlStore] = weakref.WeakSet()


def _renew_locks() -> None:
    """In a forked child: a lock that another thread of the parent held would never be released here."""
    for store in list(_stores):
        store._lock = threading.RLock()


@atexit.register
def _end_all() -> None:
    for store in list(_stores):
        store._end()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_locks)
