"""News of what was pruned reach every engine once; what is not ours is neither read nor removed."""

from __future__ import annotations

import os
import time

import pytest
from capacity_lab import DIGEST

from fskv.bounds import eviction_news
from fskv.bounds.eviction_news import ENTRY_NBYTES, EvictionNews, entries

OURS = f"{DIGEST}-node-7-0123abcd-1.bin"
FOREIGN = [
    "film.bin",
    f"{DIGEST}-x.part",
    f"{DIGEST}.bin",
    f"{DIGEST[:-1]}-node-7-0123abcd-1.bin",
    f"{DIGEST}-node-7-0123abcd-1.bin.txt",
    f"{DIGEST}-my film-7-0123abcd-1.bin",
]


@pytest.fixture
def directory(tmp_path):
    path = tmp_path / "shared" / "removed"
    path.mkdir(parents=True)
    return path


def log_of(directory):
    return EvictionNews(str(directory.parent))


def chunks(count, start=0):
    return [(number.to_bytes(16, "big"), number % 3) for number in range(start, start + count)]


def test_news_are_taken_once_by_each_and_only_by_those_they_are_for(directory):
    one, other, writer = log_of(directory), log_of(directory), log_of(directory)
    writer.publish(DIGEST[::-1], chunks(2, 100))
    writer.publish(DIGEST, chunks(3))
    assert entries(one.take_new(DIGEST)) == chunks(3)
    writer.publish(DIGEST, chunks(3, 10))
    assert entries(one.take_new(DIGEST)) == chunks(3, 10)
    assert sorted(entries(other.take_new(DIGEST))) == chunks(3) + chunks(3, 10)
    assert one.take_new(DIGEST) == other.take_new(DIGEST) == b""


def test_what_is_not_ours_is_neither_read_nor_waited_for_nor_removed(
    directory, tmp_path, monkeypatch
):
    monkeypatch.setattr(eviction_news, "_KEPT_NS", -1)
    for name in FOREIGN:
        (directory / name).write_bytes(b"dear" * 5)
    os.mkfifo(directory / OURS.replace("-7-", "-8-"))
    (directory / OURS.replace("-7-", "-9-")).mkdir()
    (directory / OURS.replace("-7-", "-10-")).symlink_to(directory / FOREIGN[0])
    before = sorted(os.listdir(directory))
    log = log_of(directory)
    assert log.take_new(DIGEST) == b""
    log.remove_old(time.time_ns() + 10**9)
    assert sorted(os.listdir(directory)) == before
    # The control: a file of our names is read, and removed.
    (directory / OURS).write_bytes(b"y" * ENTRY_NBYTES)
    assert log.take_new(DIGEST) == b"y" * ENTRY_NBYTES
    log.remove_old(time.time_ns() + 10**9)
    assert sorted(os.listdir(directory)) == before
