"""The one reader and the one publisher of small files: what others may have put in a file's place."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import stat
import threading

import pytest
from world import leaves_nothing_open

from fskv.root import files
from fskv.root.files import UnfitFileError, publishing, read_small, regular_file, retry_stale

CONTENT = b"precious"


@pytest.fixture
def victim(tmp_path):
    path = tmp_path / "victim"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "folder").mkdir()
    return tmp_path / "folder"


def listen(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


STRANGE = {
    "link": (lambda path: path.symlink_to("../victim"), errno.ELOOP),
    "dangling": (lambda path: path.symlink_to("nowhere"), errno.ELOOP),
    "device": (lambda path: path.symlink_to("/dev/zero"), errno.ELOOP),
    "fifo": (os.mkfifo, errno.EINVAL),
    "directory": (os.mkdir, errno.EINVAL),
    "socket": (listen, errno.ENXIO),
}


# --- reading ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STRANGE)
def test_what_is_no_regular_file_is_neither_followed_nor_waited_for(folder, victim, kind):
    path, (make, number) = folder / "file", STRANGE[kind]
    make(path)
    with leaves_nothing_open(), pytest.raises(OSError) as caught:
        read_small(str(path), 100)
    assert caught.value.errno == number
    assert isinstance(caught.value, UnfitFileError) == (number == errno.EINVAL)
    # The control: a regular file of that name is read.
    path.rmdir() if kind == "directory" else path.unlink()
    victim.rename(path)
    assert read_small(str(path), 100) == CONTENT


def test_a_link_is_followed_only_where_a_person_has_named_it(folder, victim):
    (folder / "file").symlink_to(victim)
    assert read_small(str(folder / "file"), 100, follow=True) == CONTENT
    with pytest.raises(UnfitFileError, match="expected a regular file"):
        read_small("/dev/zero", 100, follow=True)


def test_without_the_look_at_its_kind_a_device_is_read(monkeypatch):
    monkeypatch.setattr(stat, "S_ISREG", lambda _: True)
    with regular_file("/dev/zero") as file:
        assert file.read(100) == bytes(100)


def test_without_the_flag_the_reader_waits_for_a_fifos_writer(folder, monkeypatch):
    monkeypatch.setattr(files, "_READ", files._READ & ~os.O_NONBLOCK)
    path = str(folder / "fifo")
    os.mkfifo(path)

    def read():
        with contextlib.suppress(UnfitFileError):
            read_small(path, 100)

    reader = threading.Thread(target=read)
    reader.start()
    reader.join(0.2)
    assert reader.is_alive()
    os.close(os.open(path, os.O_WRONLY))  # waits for the reader in its turn
    reader.join()


def test_no_more_is_read_than_the_caller_says(folder):
    path = folder / "file"
    path.write_bytes(CONTENT)
    assert read_small(str(path), len(CONTENT)) == CONTENT
    with pytest.raises(UnfitFileError, match="at most 7 bytes, found more"):
        read_small(str(path), len(CONTENT) - 1)
    with regular_file(str(path)) as file:
        assert [file.read(3), file.read(100), file.read(100)] == [b"pre", b"cious", b""]


def test_a_stale_handle_is_tried_once_more():
    for numbers, calls in (([errno.ESTALE], 2), ([errno.ESTALE] * 2, 2), ([errno.EIO], 1)):
        left, made = list(numbers), []

        def call(left=left, made=made):
            made.append(1)
            if left:
                raise OSError(left.pop(), "fault")
            return "done"

        fails = len(numbers) == calls
        with pytest.raises(OSError) if fails else contextlib.nullcontext():
            assert retry_stale(call) == "done"
        assert len(made) == calls


# --- publishing -------------------------------------------------------------------------


@pytest.fixture(params=["by path", "by descriptor", "from another directory"])
def publish(request, folder, tmp_path):
    """Publish in `folder`, in each of the ways in which names are given."""
    parts = tmp_path / "parts"
    parts.mkdir()
    with contextlib.ExitStack() as stack:
        fds = []
        for path in (folder, parts):
            fds.append(os.open(path, os.O_PATH | os.O_DIRECTORY))
            stack.callback(os.close, fds[-1])

        def publish(content, *, meanwhile=lambda: None, mode=0o600, **more):
            name, where = "file", {"dir_fd": fds[0]}
            if request.param == "by path":
                name, where = str(folder / "file"), {}
            elif request.param == "from another directory":
                where["part_dir_fd"] = fds[1]
            with leaves_nothing_open(), publishing(name, mode, **where, **more) as file:
                file.write(content)
                meanwhile()

        publish.folders = (folder, parts)
        publish.left = lambda: sorted(n for path in (folder, parts) for n in os.listdir(path))
        yield publish


def test_a_file_appears_whole_and_its_part_is_gone(publish, folder):
    seen = []
    for content in (b"old", b"new" * 100_000):
        publish(content, meanwhile=lambda: seen.append(publish.left()))
        assert (folder / "file").read_bytes() == content
        assert publish.left() == ["file"]
    assert [[name.endswith(".part") for name in names].count(True) for names in seen] == [1, 1]
    assert ["file" in names for names in seen] == [False, True]


FAILURES = {
    "writing": (None, OSError),
    "interrupted": (None, KeyboardInterrupt),
    "syncing": ("fsync", OSError),
    "replacing": ("rename", OSError),
    "linking": ("link", OSError),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_what_fails_leaves_no_part_and_the_old_file(publish, folder, monkeypatch, kind):
    def fail(*_, **__):
        raise error(errno.EIO, "fault")

    function, error = FAILURES[kind]
    exclusive = kind == "linking"
    if not exclusive:
        publish(b"old")
    more = {"sync": True, "exclusive": exclusive, "meanwhile": lambda: None}
    if function is None:
        more["meanwhile"] = fail
    else:
        monkeypatch.setattr(os, function, fail)
    with leaves_nothing_open(), pytest.raises(error):
        publish(b"new", **more)
    assert publish.left() == ([] if exclusive else ["file"])
    assert exclusive or (folder / "file").read_bytes() == b"old"
    monkeypatch.setattr(os, "unlink", lambda *_, **__: None)
    with pytest.raises(error):  # the control: without the removal the part stays
        publish(b"new", **more)
    assert [name.endswith(".part") for name in publish.left()].count(True) == 1


def test_a_write_that_is_cut_short_publishes_nothing(publish, tmp_path):
    """As on a disk that gets full: the system takes a part of the bytes first."""
    content, limits = bytes(2 << 20), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(OSError):
            publish(content)
        with open(tmp_path / "raw", "wb", buffering=0) as file:
            assert file.write(content) == 1 << 20  # the control: without an error
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert publish.left() == []


@pytest.mark.parametrize("links", ["links", *sorted(files.NO_LINKS)])
@pytest.mark.parametrize("theirs", ["file", "link", "directory"])
def test_what_has_the_name_meanwhile_keeps_it(publish, folder, victim, monkeypatch, links, theirs):
    def refuse(*_, **__):
        raise OSError(links, "no links here")

    if links != "links":
        monkeypatch.setattr(os, "link", refuse)
    path = folder / "file"

    def take():
        if theirs == "file":
            path.write_bytes(b"theirs")
        elif theirs == "link":
            path.symlink_to(victim)
        else:
            path.mkdir()

    with pytest.raises(FileExistsError):
        publish(b"ours", exclusive=True, meanwhile=take)
    assert publish.left() == ["file"]
    assert theirs != "file" or path.read_bytes() == b"theirs"
    assert path.is_symlink() == (theirs == "link")
    if theirs == "directory":
        path.rmdir()
        publish(b"ours", exclusive=True)
    else:  # the control: not exclusive, it takes the name, and nothing is written through a link
        publish(b"ours")
    assert path.read_bytes() == b"ours"
    assert not path.is_symlink()
    assert victim.read_bytes() == CONTENT


@pytest.mark.parametrize("umask", [False, True])
@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_has_the_parts_name_is_neither_written_nor_removed(
    folder, victim, monkeypatch, kind, umask
):
    (os.symlink if kind == "link" else os.link)(victim, folder / "a.part")

    def publish():
        name, part = str(folder / "file"), str(folder / "a.part")
        with publishing(name, 0o600, part=part, umask=umask) as file:
            file.write(b"ours")

    with leaves_nothing_open(), pytest.raises(FileExistsError):
        publish()
    assert victim.read_bytes() == CONTENT
    assert os.listdir(folder) == ["a.part"]
    # The control: without the flags it is written to.
    monkeypatch.setattr(files, "_CREATE", files._CREATE & ~(os.O_EXCL | os.O_NOFOLLOW))
    publish()
    assert victim.read_bytes().startswith(b"ours")


def test_a_directory_in_the_files_place_stays(publish, folder):
    (folder / "file").mkdir()
    with pytest.raises(IsADirectoryError):
        publish(b"ours")
    assert publish.left() == ["file"]
    assert (folder / "file").is_dir()


def test_a_mode_is_exact_or_less_the_umask(publish, folder):
    old = os.umask(0o077)
    try:
        for umask, expected in ((False, 0o664), (True, 0o600)):
            publish(b"", mode=0o664, umask=umask)
            assert stat.S_IMODE((folder / "file").stat().st_mode) == expected
    finally:
        os.umask(old)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_what_root_makes_belongs_to_the_directorys_owner_or_to_root(publish, folder):
    for path in publish.folders:
        os.chown(path, 12345, 12346)
    for umask, expected in ((False, (12345, 12346)), (True, (0, os.getegid()))):
        publish(b"", umask=umask)
        info = (folder / "file").stat()
        assert (info.st_uid, info.st_gid) == expected


def test_the_bytes_are_on_the_disk_before_the_name_where_that_is_asked_for(
    publish, folder, monkeypatch
):
    synced = []

    def fsync(fd):
        synced.append((os.fstat(fd).st_size, (folder / "file").exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    publish(CONTENT, sync=True)
    assert synced == [(len(CONTENT), False)]
    publish(CONTENT)
    assert len(synced) == 1  # the control
