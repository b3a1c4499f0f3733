"""Reading and writing files in a folder that others may reach too: trusted owners only, no links, all or nothing.

A file is published whole by renaming it into place under a lock, so that a reader sees the old one or the new one, and
a process that dies at any instant leaves at most a temporary file behind. What can fail without losing anything
(clearing up, syncing on file systems that cannot) is logged and passed over; everything else is an ``OSError``.
Knows nothing of what the files hold.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path

log = logging.getLogger("kalign")

FILE_BYTES = 64 * 2**20
FILE_MODE, FOLDER_MODE = 0o600, 0o700
ATTEMPTS = 3
PAUSE_S = 0.02
LOCK_POLL_S = 0.01
LEFTOVER_S = 60.0
DIGEST_DIGITS = 8

_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_CLOEXEC = getattr(os, "O_CLOEXEC", 0)
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
_PASSING = (errno.ESTALE, errno.EBUSY, errno.EINTR)
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)


def read_trusted(path: Path) -> bytes | None:
    """The bytes of ``path``, or None where it does not exist.

    Raises ``OSError``, among them ``PermissionError`` where the file or its folder is not trusted, is a link, no
    regular file or larger than ``FILE_BYTES``.
    """
    for attempt in range(ATTEMPTS):
        try:
            check_folder(path.parent)
            return _read(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in _PASSING or attempt == ATTEMPTS - 1:
                raise
            time.sleep(PAUSE_S)
    return None


def make_folder(folder: Path) -> None:
    """Make ``folder`` for this user alone, with the folders above it; raises ``OSError`` where it cannot be trusted."""
    folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    check_folder(folder)


def check_folder(folder: Path) -> None:
    """Raise ``PermissionError`` unless ``folder`` is owned by this user or root and no one else may write to it."""
    found = os.stat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    _check_trusted(found, folder)


def publish(path: Path, content: bytes, *, is_new: bool = False) -> None:
    """Make ``content`` the content of ``path``, wholly or not at all; raises ``OSError``. Call it under the lock.

    ``is_new`` for a file that was not there when it was read: should there be one all the same, which a network file
    system may show late, it is left as it is and ``FileExistsError`` raised.
    """
    _clear_leftovers(path)
    _write_whole(path, content, _put_new if is_new else _replace)
    _sync_folder(path.parent)


def set_aside(path: Path, content: bytes) -> Path:
    """Keep ``content`` beside ``path`` in a file of its own that ends in ``.bad``; once, however often it is seen."""
    digest = hashlib.sha256(content).hexdigest()[:DIGEST_DIGITS]
    aside = path.with_name(f"{path.name}.{digest}.bad")
    if not os.path.lexists(aside):
        _write_whole(aside, content, _replace)
    return aside


@contextlib.contextmanager
def locked(path: Path, wait_s: float) -> Iterator[None]:
    """Hold the lock of ``path``; raises ``TimeoutError`` after ``wait_s`` seconds, ``OSError`` where there is none."""
    import filelock

    lock = path.with_name(path.name + ".lock")
    with filelock.FileLock(lock, timeout=wait_s, mode=FILE_MODE, poll_interval=LOCK_POLL_S):
        yield


def _read(path: Path) -> bytes:
    # Not blocking, so that a pipe under this name is refused and not waited for.
    descriptor = os.open(path, os.O_RDONLY | _NOFOLLOW | _CLOEXEC | _NONBLOCK)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise PermissionError(errno.EPERM, "it is no regular file", str(path))
        _check_trusted(found, path)
        if found.st_size > FILE_BYTES:
            raise OSError(errno.EFBIG, f"it has {found.st_size} bytes, {FILE_BYTES} are read at most", str(path))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            return file.read(FILE_BYTES)
    finally:
        os.close(descriptor)


def _check_trusted(found: os.stat_result, path: Path) -> None:
    if not hasattr(os, "geteuid"):
        return  # Windows keeps a user's folders to the user
    if found.st_uid not in (os.geteuid(), 0):
        raise PermissionError(errno.EPERM, f"it is owned by user {found.st_uid}, not by you or root", str(path))
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(errno.EPERM, f"others may write to it; try: chmod go-w {path}", str(path))


def _write_whole(path: Path, content: bytes, put: Callable[[Path, Path], None]) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        _write_new(temporary, content)
        put(temporary, path)
    except BaseException:
        _remove(temporary)
        raise


def _write_new(path: Path, content: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NOFOLLOW | _CLOEXEC
    with os.fdopen(os.open(path, flags, FILE_MODE), "wb") as file:
        file.write(content)
        file.flush()
        try:
            os.fsync(file.fileno())
        except OSError as error:
            if error.errno not in _CANNOT_SYNC:
                raise
            log.debug("%s is not synced: %s", path, error)


def _replace(temporary: Path, path: Path) -> None:
    for attempt in range(ATTEMPTS):
        try:
            os.replace(temporary, path)
            return
        except OSError as error:
            # PermissionError: another process has the file open, where that forbids to replace it.
            if attempt == ATTEMPTS - 1 or not (error.errno in _PASSING or isinstance(error, PermissionError)):
                raise
            time.sleep(PAUSE_S * (attempt + 1))


def _put_new(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except (OSError, NotImplementedError) as error:
        log.debug("no hard links for %s: %s", path, error)
        _replace(temporary, path)
    else:
        _remove(temporary)


def _sync_folder(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY | _CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        log.debug("%s is not synced: %s", folder, error)


def _clear_leftovers(path: Path) -> None:
    """Remove temporary files of writers that died; young ones may belong to one that a broken lock let in."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        try:
            if time.time() - leftover.lstat().st_mtime > LEFTOVER_S:
                leftover.unlink()
        except OSError as error:
            log.debug("%s is left behind: %s", leftover, error)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.debug("%s is left behind: %s", path, error)
