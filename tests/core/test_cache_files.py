"""Files in a folder that others may reach: who is trusted, and that a write is whole or not at all."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from kalign_core.cache import files
from kalign_core.cache.files import check_folder, locked, make_folder, publish, read_trusted, set_aside


@pytest.fixture
def folder(tmp_path):
    """A folder of our own that does not exist yet."""
    return tmp_path / "cache"


@pytest.fixture
def path(folder):
    """A file that does not exist yet, in a folder that does."""
    make_folder(folder)
    return folder / "device.toml"


@pytest.fixture
def failing(monkeypatch):
    """``failing("replace", EBUSY, times=2)`` makes a call of ``os`` fail that often; gives the list of calls."""

    def install(name, code, times=10**6):
        real, calls = getattr(os, name), []

        def fail(*args, **kwargs):
            calls.append(args)
            if len(calls) <= times:
                raise OSError(code, os.strerror(code), str(args[0]))
            return real(*args, **kwargs)

        monkeypatch.setattr(files.os, name, fail)
        return calls

    return install


def modes(path):
    return stat.S_IMODE(path.stat().st_mode)


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def test_folders_and_files_belong_to_their_owner_alone(path):
    """A folder is made 0700 and a file 0600, whatever the umask allows."""
    previous = os.umask(0)
    try:
        make_folder(path.parent / "deeper")
        publish(path, b"x")
    finally:
        os.umask(previous)
    assert (modes(path.parent / "deeper"), modes(path)) == (0o700, 0o600)


def test_what_is_published_is_read(path):
    """A published file holds exactly the bytes given, and nothing else is left in the folder."""
    publish(path, b"first")
    publish(path, b"second")
    assert (read_trusted(path), names(path.parent)) == (b"second", ["device.toml"])


def test_a_missing_file_is_no_error(folder):
    """Neither a missing file nor a missing folder raises."""
    assert read_trusted(folder / "device.toml") is None


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_refused(path, mode):
    """A file is trusted only while no one else may write to it, and the error says what to type."""
    publish(path, b"x")
    path.chmod(mode)
    with pytest.raises(PermissionError, match=r"others may write to it; try: chmod go-w .*device\.toml"):
        read_trusted(path)


def test_a_folder_that_others_may_write_is_refused(path):
    """A file in an open folder is not trusted, since anyone may have put it there."""
    publish(path, b"x")
    path.parent.chmod(0o777)
    with pytest.raises(PermissionError, match="others may write"):
        read_trusted(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("target", ["file", "folder"])
def test_what_somebody_else_owns_is_refused(path, target):
    """Files and folders of other users are not trusted."""
    publish(path, b"x")
    os.chown(path if target == "file" else path.parent, 4711, -1)
    with pytest.raises(PermissionError, match="owned by user 4711, not by you or root"):
        read_trusted(path)


def test_links_are_not_followed(path, tmp_path):
    """A link under a file's name is refused for reading, replaced when writing, and its target stays as it is."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    path.symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links") as caught:
        read_trusted(path)
    assert caught.value.errno == errno.ELOOP
    publish(path, b"x")
    assert (victim.read_bytes(), path.is_symlink()) == (b"precious", False)


def test_a_planted_lock_is_not_followed(path, tmp_path):
    """A link under the lock's name gives an error and its target stays as it is."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    path.with_name("device.toml.lock").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"), locked(path, 1.0):
        pass
    assert victim.read_bytes() == b"precious"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_refused(path, make):
    """A pipe or a folder under a file's name is refused at once, not waited for."""
    make(path, 0o700)
    with pytest.raises(PermissionError, match="no regular file"):
        read_trusted(path)


def test_a_huge_file_is_refused(path, monkeypatch):
    """What is read has a bound."""
    publish(path, b"x" * 11)
    monkeypatch.setattr(files, "FILE_BYTES", 10)
    with pytest.raises(OSError, match="11 bytes, 10 are read at most"):
        read_trusted(path)


def test_a_file_in_the_place_of_the_folder_is_an_error(tmp_path):
    """A folder that is a file is told as such."""
    (tmp_path / "cache").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        check_folder(tmp_path / "cache")


@pytest.mark.parametrize("code", [errno.EBUSY, errno.ESTALE])
def test_a_passing_fault_of_the_file_system_is_tried_again(path, failing, code):
    """Renaming and opening are tried again where a network file system says busy or stale."""
    failing("replace", code, times=2)
    publish(path, b"x")
    failing("open", code, times=2)
    assert read_trusted(path) == b"x"


@pytest.mark.parametrize("code", [errno.EBUSY, errno.ENOSPC, errno.EACCES])
def test_a_write_that_fails_leaves_the_old_file(path, failing, code):
    """Where renaming fails for good, tries are few, the old file stays whole and nothing is left beside it."""
    publish(path, b"old")
    calls = failing("replace", code)
    with pytest.raises(OSError, match=os.strerror(code)):
        publish(path, b"new")
    assert (read_trusted(path), names(path.parent), len(calls) <= files.ATTEMPTS) == (b"old", ["device.toml"], True)


def test_a_new_file_replaces_none(path):
    """Where a file turns up that was not there when it was read, it stays, and nothing is left beside it."""
    publish(path, b"theirs")
    with pytest.raises(FileExistsError):
        publish(path, b"ours", is_new=True)
    assert (read_trusted(path), names(path.parent)) == (b"theirs", ["device.toml"])


def test_a_new_file_is_whole(path):
    """A first file is published like any other."""
    publish(path, b"x", is_new=True)
    assert (read_trusted(path), names(path.parent), modes(path)) == (b"x", ["device.toml"], 0o600)


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.EMLINK])
def test_a_file_system_without_links_is_no_fault(path, failing, code):
    """Where hard links cannot be made a first file is published all the same."""
    failing("link", code)
    publish(path, b"x", is_new=True)
    assert (read_trusted(path), names(path.parent)) == (b"x", ["device.toml"])


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_sync_is_no_fault(path, failing, code):
    """Where syncing is not supported the file is published all the same."""
    failing("fsync", code)
    publish(path, b"x")
    assert read_trusted(path) == b"x"


def test_a_full_disk_is_a_fault(path, failing):
    """Where syncing says the disk is full, nothing is published."""
    failing("fsync", errno.ENOSPC)
    with pytest.raises(OSError, match="No space left"):
        publish(path, b"x")
    assert names(path.parent) == []


def test_what_cannot_be_cleared_up_is_no_fault(path, monkeypatch):
    """A leftover that cannot be removed does not keep a file from being published."""
    leftover = path.with_name(".device.toml.1-abcd.tmp")
    leftover.write_bytes(b"half")
    os.utime(leftover, (0, 0))

    def refuse(*args, **kwargs):
        raise OSError(errno.EBUSY, "busy")

    monkeypatch.setattr(type(path), "unlink", refuse)
    publish(path, b"x")
    assert read_trusted(path) == b"x"


def test_leftovers_of_the_dead_are_cleared(path):
    """Old temporary files go with the next write; young ones may still be someone's."""
    old, young = path.with_name(".device.toml.1-aaaa.tmp"), path.with_name(".device.toml.2-bbbb.tmp")
    for leftover in (old, young):
        leftover.write_bytes(b"half")
    os.utime(old, (0, 0))
    publish(path, b"x")
    assert names(path.parent) == [young.name, "device.toml"]


def test_a_piece_is_set_aside_once(path):
    """The same damage seen again makes no second file."""
    first, again, other = (set_aside(path, content) for content in (b"x", b"x", b"y"))
    assert first == again != other
    assert (first.read_bytes(), first.suffix, modes(first)) == (b"x", ".bad", 0o600)


def test_a_lock_is_waited_for_no_longer_than_told(path):
    """A lock that another holds is a TimeoutError, not a wait without end."""
    with locked(path, 1.0), pytest.raises(TimeoutError), locked(path, 0.05):
        pass
