"""News of what was pruned reach every engine once; what is not ours is neither read nor removed."""

from __future__ import annotations

import contextlib
import os
import tracemalloc

import pytest
from capacity_lab import DIGEST
from world import leaves_nothing_open

from fskv.bounds import eviction_news
from fskv.bounds.eviction_news import ENTRY_NBYTES, EvictionNews, entries
from fskv.root.process_id import is_our_name, is_our_part, unique_name

OTHER = DIGEST[::-1]
OURS = f"{DIGEST}-node-7-0123abcd-1.bin"
FOREIGN = [
    "thesis.tex",
    "film.bin",
    "film.part",
    f"{DIGEST}-x.bin",
    f"{DIGEST}-x.part",
    f"{DIGEST}.bin",
    f"{DIGEST[:-1]}-node-7-0123abcd-1.bin",
    f"{DIGEST}-node-7-0123abcd-1",
    f"{DIGEST}-node-7-0123abcd-1.bin.txt",
    f"{DIGEST}-my film-7-0123abcd-1.bin",
    "node-7-0123abcd-1.part",
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


def test_names_that_we_make_are_ours_and_others_are_not():
    ours = [unique_name(), "node.x_1-with-dashes-1-00000000-0", "n@x-4194304-0123abcd-18446744073"]
    assert all(is_our_name(name) and is_our_part(f"{name}.part") for name in ours)
    assert is_our_part("probe-0123456789abcdef.part")
    for name in (
        "",
        "film",
        "a-1-00000000",
        "a b-1-00000000-1",
        "a-0-00000000-1",
        "a-1-0000000x-1",
    ):
        assert not is_our_name(name)
        assert not is_our_part(f"{name}.part")
    for name in ("film.part", "probe-1.part", "probe-0123456789abcdef", unique_name(), ".part"):
        assert not is_our_part(name)


def test_news_are_taken_once_by_each_and_only_by_those_they_are_for(directory):
    early, writer = log_of(directory), log_of(directory)
    early.skip_old()
    writer.publish(DIGEST, chunks(3))
    late = log_of(directory)
    late.skip_old()
    writer.publish(OTHER, chunks(2, 100))
    writer.publish(DIGEST, chunks(3, 10))
    assert sorted(entries(early.take_new(DIGEST))) == chunks(3) + chunks(3, 10)
    assert entries(late.take_new(DIGEST)) == chunks(3, 10)
    assert early.take_new(DIGEST) == late.take_new(DIGEST) == b""
    assert sorted(name[16:17] for name in os.listdir(directory)) == ["-"] * 3
    assert all(name.endswith(".bin") for name in os.listdir(directory))


def test_a_prune_of_many_chunks_is_told_in_full_in_several_calls(directory):
    count = 500_000  # 10 MB of entries
    log = log_of(directory)
    log_of(directory).publish(DIGEST, chunks(count))
    taken = []
    for _ in range(10):
        packed = log.take_new(DIGEST)
        assert len(packed) <= 4 << 20
        taken += entries(packed)
    assert sorted(taken) == chunks(count)


def test_huge_sparse_files_cost_a_bounded_amount_of_memory(directory):
    for number in range(40):
        with open(directory / f"{DIGEST}-node-7-0123abcd-{number}.bin", "wb") as file:
            file.truncate(1 << 30)
    log = log_of(directory)
    tracemalloc.start()
    try:
        total = 0
        for _ in range(20):
            total += len(log.take_new(DIGEST))
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert 0 < total < 40 << 20


@pytest.mark.parametrize("kind", ["fifo", "link", "directory", "device"])
def test_what_is_no_file_is_neither_waited_for_nor_read_nor_removed(
    directory, tmp_path, kind, monkeypatch
):
    monkeypatch.setattr(eviction_news, "_KEPT_S", -1.0)
    path, target = directory / OURS, tmp_path / "target"
    target.write_bytes(b"x" * ENTRY_NBYTES)
    log = log_of(directory)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(target)
    elif kind == "directory":
        path.mkdir()
    else:
        try:
            os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero
        except PermissionError:
            pytest.skip("mknod needs root")
    assert log.take_new(DIGEST) == b""
    log.remove_old()
    assert os.path.lexists(path)
    assert target.read_bytes() == b"x" * ENTRY_NBYTES
    # The control: a file in the same place is read, and removed.
    path.rmdir() if kind == "directory" else path.unlink()
    path.write_bytes(b"y" * ENTRY_NBYTES)
    assert log_of(directory).take_new(DIGEST) == b"y" * ENTRY_NBYTES
    log.remove_old()
    assert not path.exists()


def test_only_files_of_our_names_are_removed_and_not_before_their_time(directory, monkeypatch):
    for name in (*FOREIGN, OURS, OURS.replace(".bin", ".part")):
        (directory / name).write_bytes(b"dear" * 5)
    log = log_of(directory)
    log.remove_old()
    log.remove_old()
    assert len(os.listdir(directory)) == len(FOREIGN) + 2
    assert log.take_new(DIGEST) == b"dear" * 5  # of one: foreign ones are not read either
    monkeypatch.setattr(eviction_news, "_KEPT_S", -1.0)
    log.remove_old()
    assert sorted(os.listdir(directory)) == sorted(FOREIGN)


@pytest.mark.parametrize("above", [False, True])
def test_a_link_in_the_place_of_the_directory_is_refused(above, directory, tmp_path, monkeypatch):
    monkeypatch.setattr(eviction_news, "_KEPT_S", -1.0)
    home = tmp_path / "home"
    home.mkdir()
    (home / OURS).write_bytes(b"dear" * 5)
    directory.rmdir()
    if above:
        directory.parent.rmdir()
        (tmp_path / "removed").symlink_to(home)
        directory.parent.symlink_to(tmp_path)
    else:
        directory.symlink_to(home)
    log = log_of(directory)
    for call in (
        log.skip_old,
        lambda: log.take_new(DIGEST),
        lambda: log.publish(DIGEST, chunks(1)),
    ):
        for _ in range(2):
            with pytest.raises(OSError):
                call()
    log.remove_old()
    assert os.listdir(home) == [OURS]
    # The control: the same files in a directory of ours are removed.
    (directory.parent if above else directory).unlink()
    directory.parent.mkdir(exist_ok=True)
    home.rename(directory)
    log.remove_old()
    assert os.listdir(directory) == []


def test_calls_leave_no_descriptors_open(directory):
    log = log_of(directory)
    with leaves_nothing_open():
        for _ in range(5):
            log.publish(DIGEST, chunks(1))
            log.take_new(DIGEST)
            log.remove_old()
            with contextlib.suppress(OSError):
                EvictionNews("/nowhere").skip_old()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_what_root_tells_is_the_engines_users_to_read(tmp_path):
    log = EvictionNews(str(tmp_path))
    os.mkdir(log.directory)
    os.chown(log.directory, 12345, 12346)
    log.publish("a" * 16, [(bytes(16), 0)])
    (name,) = os.listdir(log.directory)
    info = os.stat(f"{log.directory}/{name}")
    assert (info.st_uid, info.st_gid, info.st_mode & 0o777) == (12345, 12346, 0o600)
