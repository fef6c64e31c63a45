"""What file systems answer, and what of it is believed."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from fskv.root.filesystem import Space, bytes_on_disk, clamp_mtime
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


def test_a_time_of_the_future_is_none():
    day, now = 86_400 * 10**9, 1_700_000_000 * 10**9
    assert clamp_mtime(now + day, now) == now + day
    assert clamp_mtime(now + day + 1, now) == 0
    assert clamp_mtime(now + 2 * day, 0) == now + 2 * day
    assert clamp_mtime(1 << 70, 0) == (1 << 63) - 1
