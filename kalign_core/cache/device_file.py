"""One device's file: read it, merge decisions into it and take some out of it, under its lock.

Two devices may claim one name (the same key with other limits, a slice cut anew). A file is then left to the device it
names, and this one takes the longer name. A file of a newer schema is left alone. Raises what goes wrong; what that
means for a caller is the store's to say.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from kalign_core.cache.device_table import Difference, device_table, difference
from kalign_core.cache.document import SCHEMA, Damage, Document, read, render
from kalign_core.cache.files import (
    ATTEMPTS,
    FILE_BYTES,
    PAUSE_S,
    locked,
    make_folder,
    publish,
    read_trusted,
    set_aside,
)
from kalign_core.cache.places import file_paths
from kalign_core.records import Entry, EntryKey, Identity

Warn = Callable[..., None]
REASON_LENGTH = 300


class _Found(NamedTuple):
    """What a file holds, and whether there was none yet."""

    document: Document
    is_new: bool


class DeviceFile:
    """The file of ``identity`` in ``folder``; ``path`` is where it is or will be.

    ``warn(kind, message, *values)`` is told of damage and of files that belong to another device.
    """

    def __init__(self, identity: Identity, folder: Path, warn: Warn) -> None:
        self._identity = identity
        self._warn = warn
        self._short, self._long = file_paths(folder, identity)
        self.path = self._short

    def load(self) -> Document:
        """What the file holds; raises ``OSError`` where it must be left alone or cannot be read."""
        if os.path.lexists(self._long):
            self.path = self._long
        while isinstance(found := self._read(must_keep=False), Difference):
            self._give_way(found)
        return found.document

    def save(self, entries: Iterable[Entry], wait_s: float) -> Document:
        """Merge ``entries`` into the file and give what it holds now.

        Waits ``wait_s`` seconds at most for other processes. Raises ``OSError``, ``TimeoutError`` among them, or
        ``ValueError``; the file is then as it was.
        """
        added = tuple(entries)

        def merge(document: Document) -> bool:
            for entry in added:
                document.add(entry)
            return bool(added)

        make_folder(self.path.parent)
        return self._change(merge, wait_s)

    def remove(self, keys: Iterable[EntryKey], wait_s: float) -> tuple[Document, frozenset[EntryKey]]:
        """Take the entries for ``keys`` out of the file; gives what it holds now and those that were there.

        Waits and raises as ``save`` does. Makes no file where there is none.
        """
        wanted, gone = frozenset(keys), set[EntryKey]()

        def take_out(document: Document) -> bool:
            gone.update(document.remove(wanted))
            return bool(gone)

        if not os.path.lexists(self.path):
            return Document(device_table(self._identity)), frozenset()
        return self._change(take_out, wait_s), frozenset(gone)

    def _change(self, edit: Callable[[Document], bool], wait_s: float) -> Document:
        """Let ``edit`` change what is on disk now, under the lock, and publish it if ``edit`` says so."""
        with locked(self.path, wait_s):
            changed = self._edited(edit)
        if isinstance(changed, Document):
            return changed
        self._give_way(changed)
        return self._change(edit, wait_s)

    def _edited(self, edit: Callable[[Document], bool]) -> Document | Difference:
        for _ in range(ATTEMPTS):
            found = self._read(must_keep=True)
            if isinstance(found, Difference):
                return found
            try:
                if edit(found.document):
                    self._publish(found)
                return found.document
            except FileExistsError:
                time.sleep(PAUSE_S)  # a network file system showed no file and has one, whose entries must stay
        raise FileNotFoundError(errno.ENOENT, "it is there and cannot be read", str(self.path))

    def _read(self, *, must_keep: bool) -> _Found | Difference:
        """The document on disk, or how its device differs. ``must_keep``: raise where damage cannot be set aside."""
        content = read_trusted(self.path)
        if content is None:
            return _Found(Document(device_table(self._identity)), is_new=True)
        document, schema, damage = read(content)
        if document is None:
            raise OSError(
                errno.ENOTSUP,
                f"it has schema {schema} and this kalign reads up to {SCHEMA}; it is left alone, update kalign",
                str(self.path),
            )
        if damage:
            self._set_aside(damage, must_keep)
        if not document.device:
            return _Found(Document(device_table(self._identity)), is_new=False)
        return difference(document.device, self._identity) or _Found(document, is_new=False)

    def _publish(self, found: _Found) -> None:
        document = found.document
        document.drop_unused()
        content = render(document)
        again, _, damage = read(content)
        if damage or again != document:
            raise ValueError("what would be written does not read as what was meant, so nothing is written")
        if len(content) > FILE_BYTES:
            raise OSError(errno.EFBIG, f"it would have {len(content)} bytes, {FILE_BYTES} are read at most")
        publish(self.path, content, is_new=found.is_new)

    def _give_way(self, found: Difference) -> None:
        message = f"it is another device's: {found}; its entries are not used"
        if self.path == self._long:
            raise OSError(errno.ENODEV, message, str(self.path))
        self._warn(("device", self.path), "%s is left alone: %s; decisions go to %s", self.path, message, self._long)
        self.path = self._long

    def _set_aside(self, damage: tuple[Damage, ...], must_keep: bool) -> None:
        reasons = "; ".join(dict.fromkeys(piece.reason for piece in damage))[:REASON_LENGTH]
        content = b"\n".join(piece.content for piece in damage if piece.content.strip())
        kept = ""
        if content:
            try:
                kept = f", kept in {set_aside(self.path, content)}"
            except OSError as fault:
                if must_keep:
                    raise
                kept = f", and cannot be set aside ({fault.strerror})"
        self._warn(("damage", self.path), "%s is damaged: %s%s; the rest is used", self.path, reasons, kept)
