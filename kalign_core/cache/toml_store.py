"""The store that keeps decisions in one TOML file per device.

A process reads a device's file once, when it first looks something up, and from then on answers from memory: a hit
touches no file and takes no lock. A decision is written by a thread that begins as soon as it is made, because a
process may be killed at any time and a launch must not wait for a disk; what cannot be written stays in memory, is
tried again a few times, and goes with the next decision or when the process ends. Writing merges under a lock, so that
no process loses another's entries, and never replaces what this process decided and verified itself.

No fault of a file leaves this module: a look-up that fails is a miss, a write that fails costs one warning of its kind.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from kalign_core.cache.base import Store
from kalign_core.cache.device_file import DeviceFile
from kalign_core.cache.device_table import names_of
from kalign_core.cache.document import Document
from kalign_core.cache.entry_text import entry_lines, kernel_line, plain
from kalign_core.cache.inspect import nearest
from kalign_core.cache.places import cache_folder
from kalign_core.cache.writer import Writer
from kalign_core.records import Entry, EntryKey, Identity
from kalign_core.settings import Settings

log = logging.getLogger("kalign")

LOCK_WAIT_S = 2.0
# An ordinary write takes a few milliseconds and one of ten thousand entries a quarter of a second. Waiting for it, a
# kill loses the decision in flight and no other; a caller that goes on at once may keep the interpreter from the thread
# that writes for many seconds. A lock or a disk that takes longer is not waited for.
PUT_WAITS_S = 0.5
MOST_DIFFERENCES = 4
ANOTHER_FOLDER_HELPS = ("ENOTDIR", "EACCES", "EROFS", "ENOSPC", "EDQUOT")


@dataclass(slots=True)
class _Device:
    """What this process knows of one device: its file as last seen, and its own decisions.

    ``file`` is None where nothing of the device goes to disk, ``readable`` whether the file may be used. ``found``
    answers look-ups; ``unsaved`` is still to be written. ``loaded`` counts the entries that the file had at first, by
    the line of their kernel; ``missed`` has the first look-up that failed for each kernel, ``decided`` the kernels for
    which this process decided; ``hit`` says whether any look-up was answered.
    """

    identity: Identity
    file: DeviceFile | None = None
    readable: bool = True
    document: Document = field(default_factory=lambda: Document({}))
    found: dict[EntryKey, Entry] = field(default_factory=dict)
    unsaved: dict[EntryKey, Entry] = field(default_factory=dict)
    loaded: Counter[bytes] = field(default_factory=Counter)
    missed: dict[str, EntryKey] = field(default_factory=dict)
    decided: set[str] = field(default_factory=set)
    hit: bool = False


class TomlStore(Store):
    """Decisions in ``<vendor>-<PCI id>-<digest>.toml`` under ``settings.cache_dir`` or the user's cache folder.

    ``lock_wait_s`` bounds the seconds that one attempt to write waits for other processes; ``flush`` and ``remove``
    wait twice as long at most, ``put`` 0.5 s: what takes longer goes on behind the caller's back.
    """

    name = "toml"

    def __init__(self, settings: Settings, lock_wait_s: float = LOCK_WAIT_S) -> None:
        self._folder = cache_folder(settings)
        self._lock_wait_s = lock_wait_s
        self._devices: dict[tuple[object, ...], _Device] = {}
        self._nameless: list[_Device] = []
        self._warned: set[tuple[object, ...]] = set()
        self._lock = threading.RLock()
        # Held while files are changed, never while ``_lock`` is: whoever waits for a disk holds up no one else.
        self._saving = threading.Lock()
        self._writer = Writer()
        self._is_ending = False
        _stores.add(self)

    def lookup(self, identity: Identity, key: EntryKey) -> Entry | None:
        device = self._device(identity)
        entry = device.found.get(key) or self._decode(device, key)
        if entry is None:
            device.missed.setdefault(key.kernel, key)
        else:
            device.hit = True
        return entry

    def put(self, identity: Identity, entry: Entry) -> bool:
        try:
            entry = plain(entry)
            with self._lock:
                device = self._device(identity, keep=True)
                device.found[entry.key] = entry
                device.decided.add(entry.key.kernel)
                if not self._may_save(device, entry) or device.file is None or not device.readable:
                    return False
                device.unsaved[entry.key] = entry
        except Exception as fault:  # noqa: BLE001  # a launch is waiting, and what is wrong here must not fail it
            self._warn(("put", type(fault)), "a decision for %s stays in memory: %s", entry.key.kernel, fault)
            return False
        _write_before_a_worker_ends()
        if self._is_ending or not self._writer.wake(self._write_behind):
            return self.flush()
        self._writer.settle(PUT_WAITS_S)
        return True

    def flush(self) -> bool:
        return self._write(2 * self._lock_wait_s)

    def remove(self, identity: Identity, keys: Iterable[EntryKey]) -> int:
        device, wanted = self._device(identity), frozenset(keys)
        until = time.monotonic() + 2 * self._lock_wait_s
        if not self._begin_saving(2 * self._lock_wait_s):
            return 0
        try:
            gone: frozenset[EntryKey] = frozenset()
            if device.file is not None and device.readable:
                device.document, gone = device.file.remove(wanted, max(until - time.monotonic(), 0))
            with self._lock:
                in_memory = {key for key in wanted if device.found.pop(key, None) is not None}
                for key in wanted & device.unsaved.keys():
                    del device.unsaved[key]
            return len(gone | in_memory)
        except Exception as fault:  # noqa: BLE001  # whatever is wrong with the file, it has its entries still
            self._warn_of(fault, device.file.path if device.file else Path())
            return 0
        finally:
            self._saving.release()

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
            device.loaded = device.document.kernels()
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

    def _write_behind(self) -> bool:
        """What the writing thread does; it may wait for this process's other threads as long as they take."""
        with self._saving:
            return self._save_all(self._lock_wait_s)

    def _write(self, wait_s: float) -> bool:
        """Write what is unsaved within ``wait_s`` of waiting; whether all of it is there."""
        until = time.monotonic() + wait_s
        if not any(device.unsaved for device in list(self._devices.values())):
            return True
        if not self._begin_saving(wait_s):
            return False
        try:
            return self._save_all(max(until - time.monotonic(), 0))
        finally:
            self._saving.release()

    def _begin_saving(self, wait_s: float) -> bool:
        if self._saving.acquire(timeout=wait_s):
            return True
        self._warn(("saving",), "decisions stay in memory: after %g s the disk has not taken the ones before", wait_s)
        return False

    def _save_all(self, wait_s: float) -> bool:
        """Merge what is unsaved into the devices' files; whether all of it is there. Call it while saving."""
        until = time.monotonic() + wait_s
        is_there = True
        for device in list(self._devices.values()):
            if device.unsaved:
                is_there &= self._save(device, max(until - time.monotonic(), 0))
        return is_there

    def _save(self, device: _Device, wait_s: float) -> bool:
        assert device.file is not None, "nothing is unsaved where there is no file"
        with self._lock:
            taken = dict(device.unsaved)
        try:
            device.document = device.file.save(taken.values(), wait_s)
        except Exception as fault:  # noqa: BLE001  # nobody here can act on it; what is unsaved is tried again
            self._warn_of(fault, device.file.path)
            return False
        with self._lock:
            for key, entry in taken.items():
                if device.unsaved.get(key) is entry:
                    del device.unsaved[key]
        return True

    def _warn_of(self, fault: Exception, path: Path) -> None:
        reason = (isinstance(fault, OSError) and fault.strerror) or str(fault)
        code = errno.errorcode.get(getattr(fault, "errno", None) or 0, type(fault).__name__)
        hint = "; try: export KALIGN_CACHE_DIR=/a/folder/of/yours" if code in ANOTHER_FOLDER_HELPS else ""
        self._warn((code, path), "decisions stay in memory, %s cannot be used: %s (%s)%s", path, reason, code, hint)

    def _warn(self, kind: tuple[object, ...], message: str, *values: object) -> None:
        with self._lock:
            is_new = kind not in self._warned
            self._warned.add(kind)
        if is_new:
            log.warning(message, *values)

    def _end(self) -> None:
        """When the process ends: a last try to write what is not on disk, and a word on entries that were no use.

        What is decided after this is written by whoever decides it: a thread would not live to do so.
        """
        self._is_ending = True
        self.flush()
        for device in list(self._devices.values()):
            self._tell_of_misses(device)

    def _tell_of_misses(self, device: _Device) -> None:
        """Warn once if this process asked for kernels that the file had entries for, and nothing was ever answered."""
        missed, device.missed = device.missed, {}
        asked = {name: missed[name] for name in sorted(missed.keys() - device.decided)}
        counts = {name: device.loaded[kernel_line(name)] for name in asked}
        if device.hit or device.file is None or not any(counts.values()):
            return
        unused = [name for name, count in counts.items() if count]
        log.warning(
            "none of the %d entries for %s in %s was used by this process%s; `kalign cache explain` says more",
            sum(counts.values()),
            ", ".join(unused),
            device.file.path,
            _why(device.document, [asked[name] for name in unused]),
        )

    def _begin_again(self) -> None:
        """In a forked child: locks that the parent's threads held would never be released, and its decisions are its
        own to write and to tell of."""
        self._lock, self._saving, self._writer = threading.RLock(), threading.Lock(), Writer()
        self._is_ending = False
        for device in self._devices.values():
            device.unsaved.clear()
            device.missed.clear()


def _why(document: Document, missed: Iterable[EntryKey]) -> str:
    """In which fields the nearest entries differ from what was asked for, as far as a line holds."""
    found = (nearest(document.entries(key.kernel), key) for key in missed)
    fields = dict.fromkeys(str(difference) for near in found if near is not None for difference in near.differences)
    return f": {'; '.join([*fields][:MOST_DIFFERENCES])}" if fields else ""


_stores: weakref.WeakSet[TomlStore] = weakref.WeakSet()
_told_multiprocessing = False


def _begin_all_again() -> None:
    global _told_multiprocessing
    _told_multiprocessing = False
    for store in list(_stores):
        store._begin_again()


def _write_before_a_worker_ends() -> None:
    """Processes that multiprocessing forked end without ``atexit``; what its own finalizers do, they do."""
    global _told_multiprocessing
    util = sys.modules.get("multiprocessing.util")
    if util is not None and not _told_multiprocessing:
        _told_multiprocessing = True
        util.Finalize(None, _end_all, exitpriority=0)


@atexit.register
def _end_all() -> None:
    for store in list(_stores):
        store._end()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_all_again)
