"""What file systems answer, and what of it is believed."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace

import pytest

from fskv.root import filesystem
from fskv.root.filesystem import Space, bytes_on_disk, clamp_mtime, counting_device
from fskv.types import MAX_COUNT

USUAL = {
    "f_bsize": 1 << 20,
    "f_frsize": 4096,
    "f_blocks": 1000,
    "f_bfree": 400,
    "f_bavail": 300,
    "f_files": 100,
    "f_ffree": 50,
    "f_favail": 40,
}
SPACE = Space(4096 * 1000, 4096 * 300, 100, 40)
NO_INODES = Space(SPACE.total_nbytes, SPACE.free_nbytes, 0, 0)
NO_BYTES = Space(0, 0, SPACE.total_inodes, SPACE.free_inodes)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({}, SPACE),
        ({"f_frsize": 0, "f_bsize": 4096}, SPACE),
        ({"f_frsize": 0, "f_bsize": 0}, NO_BYTES),
        ({"f_files": 139, "f_ffree": -1, "f_favail": -1}, NO_INODES),  # CephFS 16.2
        ({"f_files": -1, "f_favail": -1}, NO_INODES),
        ({"f_files": 0, "f_favail": 0}, NO_INODES),  # btrfs
        ({"f_files": 100, "f_favail": 101}, NO_INODES),
        ({"f_favail": 0}, Space(SPACE.total_nbytes, SPACE.free_nbytes, 100, 0)),
        ({"f_blocks": 0, "f_bavail": 0}, NO_BYTES),  # FUSE without statfs
        ({"f_blocks": -1, "f_bavail": -1}, NO_BYTES),
        ({"f_bavail": -1}, NO_BYTES),
        ({"f_bavail": 1001}, NO_BYTES),
        ({"f_bavail": -200}, Space(SPACE.total_nbytes, 0, 100, 40)),  # root's reserve is in use
        ({"f_bavail": -1001}, NO_BYTES),
        ({"f_bavail": 0}, Space(SPACE.total_nbytes, 0, 100, 40)),
        ({"f_blocks": 1 << 62, "f_bavail": 1 << 62}, Space(MAX_COUNT, MAX_COUNT, 100, 40)),
    ],
    ids=str,
)
def test_what_statvfs_says_is_believed_where_it_can_be_true(answer, expected):
    assert Space.believed(SimpleNamespace(**{**USUAL, **answer})) == expected


def test_a_real_answer_is_believed(tmp_path):
    info = os.statvfs(tmp_path)
    found = Space.of(str(tmp_path))
    assert found.total_nbytes == info.f_blocks * info.f_frsize > 0
    assert abs(found.free_nbytes - info.f_bavail * info.f_frsize) < 1 << 30


@pytest.mark.parametrize(
    ("blocks", "length", "expected"),
    [
        (16, 8192, 8192),
        (24, 8192, 12288),
        (8, 8192, 4096),  # compressed, or sparse
        (0, 8192, 8192),  # in its inode, or no blocks are counted here
        (-1, 8192, 8192),
        (1 << 60, 8192, 8192),
        (0, -1, 0),
        (0, (1 << 63) - 1, MAX_COUNT),
    ],
)
def test_what_a_file_takes_is_its_blocks_where_they_can_be_true(blocks, length, expected):
    assert bytes_on_disk(SimpleNamespace(st_blocks=blocks, st_size=length)) == expected


@pytest.fixture
def directory(tmp_path):
    with open(tmp_path / "x", "wb", buffering=0) as file:
        file.write(os.urandom(1 << 16))
        if os.fstat(file.fileno()).st_blocks * 512 < 1 << 16:
            pytest.skip("this file system does not count blocks at once")
    os.unlink(tmp_path / "x")
    fd = os.open(tmp_path, os.O_PATH)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("nameless", [True, False])
def test_a_file_system_that_counts_blocks_at_once_is_known_by_its_device(
    directory, tmp_path, monkeypatch, nameless
):
    """Nobody else can open what is tried, so nobody can make it say something else."""
    modes, real = [], os.open

    def open_(path, flags, mode=0o777, **options):
        if flags & os.O_TMPFILE == os.O_TMPFILE and not nameless:
            raise OSError(errno.EOPNOTSUPP, "no nameless files")
        modes.append(mode)
        return real(path, flags, mode, **options)

    monkeypatch.setattr(os, "open", open_)
    assert counting_device(directory, "name") == os.stat(tmp_path).st_dev
    assert modes == [0o600]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("told", "known"),
    [
        ((1 << 16, 2 << 16, 3 << 16), True),
        ((1 << 17, 1 << 18, 1 << 20), True),  # reserved ahead
        ((0, 0, 0), False),
        ((512, 512, 512), False),  # ZFS, until its next commit
        ((1 << 16, 1 << 16, 1 << 16), False),  # a commit came after the first
        ((0, 2 << 16, 3 << 16), False),
    ],
)
def test_blocks_that_come_later_are_not_believed(directory, monkeypatch, told, known):
    answers = iter(told)
    monkeypatch.setattr(filesystem, "block_nbytes", lambda _: next(answers))
    assert (counting_device(directory, "name") is not None) == known


def test_a_time_of_the_future_is_none():
    day, now = 86_400 * 10**9, 1_700_000_000 * 10**9
    assert clamp_mtime(now + day, now) == now + day
    assert clamp_mtime(now + day + 1, now) == 0
    assert clamp_mtime(now + 2 * day, 0) == now + 2 * day
    assert clamp_mtime(1 << 70, 0) == (1 << 63) - 1
