"""A chunk that is served is the chunk that was stored; anything else on the disk is a miss."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import struct
import threading
import time
import warnings
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from world import (
    World,
    damage,
    leaves_nothing_open,
    make_identity,
    read_by_hand,
    returns_in_time,
)

from faults.transport import Script
from fskv.data_path import store
from fskv.data_path.transports import arena
from fskv.data_path.transports.host import HostTransport
from fskv.data_path.transports.protocol import SlotPool
from fskv.errors import ConfigError, RootError
from fskv.root import filesystem
from fskv.types import Status

ROW = 65536
BLOCK = sum(World.PAGES)


# --- round trips ------------------------------------------------------------------------------


@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_what_was_put_is_got_and_a_reader_by_hand_finds_the_same(make_world, direct_io):
    world = make_world(direct_io=direct_io)
    content = world.content()
    before_ms = time.time() * 1000
    assert world.put(1, content) is Status.OK
    assert world.get(1) == (Status.OK, content)

    found = read_by_hand(world.path(1))
    assert found.payload == content + bytes(len(found.payload) - len(content))
    assert found.header_nbytes == world.file_layout.header_nbytes
    meta = found.meta
    assert meta["key"] == world.chunk(1).key_hash
    assert (meta["group"], meta["rank"], meta["first_block"]) == (0, 0, 0)
    assert (meta["blocks"], struct.unpack("<2Q", meta["pages"])) == (4, World.PAGES)
    assert meta["namespace"] == world.directory.digest
    assert (meta["layout"], meta["codec"], meta["checksum"]) == (b"L" * 16, 0, "xxh3-64")
    assert meta["written_at"] >= before_ms - 1
    assert world.parts() == []
    assert world.chunk_files() == [world.path(1)]
    assert stat.S_IMODE(os.stat(world.path(1)).st_mode) == 0o600


def test_a_chunk_that_was_never_put_is_missing(world):
    assert world.get(1) == (Status.MISSING, None)
    world.put(2, world.content())
    assert world.get(1) == (Status.MISSING, None)


def test_a_partial_chunk_serves_its_blocks_and_no_earlier_ones(world):
    content = world.content(num_blocks=2)
    assert world.put(1, content, first_block=2) is Status.OK
    assert world.get(1, 2) == (Status.OK, content)
    assert world.get(1, 3) == (Status.OK, content[BLOCK:])
    assert world.get(1, 1) == (Status.MISSING, None)
    assert world.get(1, 0) == (Status.MISSING, None)
    assert os.path.exists(world.path(1))
    # The slot was full of old bytes: none of them is in the file.
    assert not any(read_by_hand(world.path(1)).payload[: 2 * BLOCK])


def test_a_partial_chunk_is_replaced_by_a_full_one_after_a_load_needed_more(world):
    """Else the hole stays for ever: hit, failed load, recompute, store that finds it there."""
    assert world.put(1, world.content(num_blocks=1), first_block=3) is Status.OK
    assert world.get(1, 0) == (Status.MISSING, None)
    content = world.content(seed=2)
    assert world.put(1, content) is Status.OK
    assert world.get(1, 0) == (Status.OK, content)


@settings(max_examples=60, deadline=None, database=None)
@given(st.data())
def test_damage_is_noticed_in_the_rows_of_the_wanted_blocks_and_nowhere_else(
    tmp_path_factory, data
):
    world = World(tmp_path_factory.mktemp("kv"))
    content = world.content()
    world.put(1, content)
    first = data.draw(st.integers(0, 3))
    num = data.draw(st.integers(1, 4 - first))
    at = data.draw(st.integers(0, world.file_layout.payload_nbytes - 1))
    damage(world.path(1), world.base + at)
    start = first * BLOCK // ROW * ROW
    stop = -(-(first + num) * BLOCK // ROW) * ROW
    if first + num == 4:
        stop = world.file_layout.payload_nbytes
    if start <= at < stop:
        assert world.get(1, first, num) == (Status.CORRUPT, None)
        assert not os.path.exists(world.path(1))
    else:
        wanted = content[first * BLOCK : (first + num) * BLOCK]
        assert world.get(1, first, num) == (Status.OK, wanted)


def test_a_second_put_of_the_same_chunk_finds_it_there_and_changes_nothing(world):
    world.put(1, world.content())
    before = os.stat(world.path(1))
    assert world.put(1, world.content(seed=1)) is Status.EXISTS
    assert os.stat(world.path(1)).st_ino == before.st_ino
    assert world.get(1)[1] == world.content()


def test_use_refreshes_an_old_mtime_and_leaves_a_new_one(world):
    world.put(1, world.content())
    now = time.time()
    for use in (lambda: world.get(1), lambda: world.put(1, world.content())):
        os.utime(world.path(1), (now - 7000, now - 7000))
        assert use()
        assert os.stat(world.path(1)).st_mtime > now - 60
        os.utime(world.path(1), (now - 300, now - 300))
        use()
        assert os.stat(world.path(1)).st_mtime == pytest.approx(now - 300, abs=5)


# --- damage -----------------------------------------------------------------------------------


def truncate(nbytes):
    return lambda world, path: os.truncate(path, nbytes(world))


def append(data):
    def do(world, path):
        with open(path, "ab") as file:
            file.write(data)

    return do


def overwrite(data):
    def do(world, path):
        size = os.stat(path).st_size
        with open(path, "wb") as file:
            file.write((data * size)[:size])

    return do


DAMAGES = {
    "empty": truncate(lambda world: 0),
    "cut in the prefix": truncate(lambda world: 17),
    "cut in the header": truncate(lambda world: world.base // 2),
    "cut at the payload": truncate(lambda world: world.base),
    "cut in the payload": truncate(lambda world: world.base + 70001),
    "one byte short": truncate(lambda world: world.file_layout.file_nbytes - 1),
    "one byte long": append(b"\0"),
    "garbage behind": append(b"garbage" * 1000),
    "zeros": overwrite(b"\0"),
    "ones": overwrite(b"\xff"),
    "a flip in the magic": lambda world, path: damage(path, 3),
    "a flip in the header": lambda world, path: damage(path, 100),
    "a flip in the header's padding": lambda world, path: damage(path, world.base - 1),
    "a flip in the payload": lambda world, path: damage(path, world.base + 123456),
    "a flip in the payload's padding": lambda world, path: damage(
        path, world.file_layout.file_nbytes - 1
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_file_is_a_miss_is_discarded_and_is_stored_again(world, kind):
    content = world.content()
    world.put(1, content)
    DAMAGES[kind](world, world.path(1))
    assert world.get(1) == (Status.CORRUPT, None)
    assert not os.path.exists(world.path(1))
    assert world.get(1) == (Status.MISSING, None)
    assert world.put(1, content) is Status.OK
    assert world.get(1) == (Status.OK, content)
    if not kind.startswith(("a flip", "zeros", "ones")):  # a store looks at the length alone
        DAMAGES[kind](world, world.path(1))
        assert world.put(1, content) is Status.OK
        assert world.get(1) == (Status.OK, content)


def test_a_torn_write_of_the_right_size_is_corrupt(world):
    """What a power cut without fsync may leave: the size is there, the last pages are not."""
    world.put(2, world.content(seed=3))
    size = os.stat(world.path(2)).st_size
    os.truncate(world.path(2), size - 3 * 4096)
    os.truncate(world.path(2), size)
    assert world.get(2) == (Status.CORRUPT, None)


ELSEWHERE = {
    "namespace": {"identity": make_identity(arch="sm_90")},
    "layout": {"layout_digest": b"M" * 16},
    "rank": {"rank": 1},
    "group": {"group_idx": 1},
    "key": {},
}


@pytest.mark.parametrize("compared", [True, False], ids=["", "negative_control"])
@pytest.mark.parametrize("other", ELSEWHERE)
def test_a_chunk_copied_from_elsewhere_is_stale_and_discarded(
    make_world, monkeypatch, other, compared
):
    """Its bytes are sound, so only the comparison with its place is in the way of wrong KV."""
    world, stranger = make_world(), make_world(**ELSEWHERE[other])
    number, content = 2 if other == "key" else 1, stranger.content(seed=7)
    stranger.put(number, content)
    os.makedirs(os.path.dirname(world.path(1)), exist_ok=True)
    if stranger.path(number) != world.path(1):
        shutil.copy(stranger.path(number), world.path(1))
    if not compared:
        monkeypatch.setattr(type(world.store), "_compare", lambda *_: None)
        assert world.get(1) == (Status.OK, content)
        return
    assert world.get(1) == (Status.STALE, None)
    assert not os.path.exists(world.path(1))
    assert world.put(1, world.content()) is Status.OK
    assert world.get(1) == (Status.OK, world.content())


def in_place(world, make):
    os.makedirs(os.path.dirname(world.path(1)), exist_ok=True)
    make(world.path(1))


def test_a_directory_in_a_chunks_place_is_a_miss_and_is_moved_aside_never_deleted(world):
    in_place(world, os.mkdir)
    with open(f"{world.path(1)}/precious", "w") as file:
        file.write("not ours")
    status, _ = world.get(1)
    assert status in (Status.STALE, Status.MISSING)
    assert os.path.exists(f"{world.path(1)}/precious")
    assert world.put(1, world.content()) is Status.OK
    assert world.get(1) == (Status.OK, world.content())
    (aside,) = [f for f in world.chunk_files() if f.endswith("precious")]
    assert os.path.dirname(aside) != world.path(1)
    with open(aside) as file:
        assert file.read() == "not ours"
    assert world.parts() == []


@pytest.mark.parametrize("dangling", [False, True])
def test_a_symlink_in_a_chunks_place_is_not_followed(world, tmp_path, dangling):
    world.put(1, world.content(seed=2))
    target = tmp_path / "target"
    shutil.move(world.path(1), target)  # the chunk's own file: all that is wrong is the link
    before = target.read_bytes()
    if dangling:
        target.unlink()
    in_place(world, lambda path: os.symlink(target, path))
    assert world.get(1) == (Status.STALE, None)
    assert world.put(1, world.content()) is Status.OK
    assert not os.path.islink(world.path(1))
    assert world.get(1) == (Status.OK, world.content())
    assert not target.exists() if dangling else target.read_bytes() == before


@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_a_fifo_in_a_chunks_place_does_not_hang(make_world, direct_io):
    world = make_world(direct_io=direct_io)
    in_place(world, os.mkfifo)
    assert returns_in_time(lambda: world.get(1)) == (Status.STALE, None)
    assert returns_in_time(lambda: world.put(1, world.content())) is Status.OK
    assert world.get(1) == (Status.OK, world.content())


def test_a_file_in_the_place_of_a_chunks_directory_leaves_no_part(world):
    where = os.path.dirname(world.path(1))
    with open(where, "w") as file:
        file.write("not ours")
    assert world.get(1) == (Status.MISSING, None)
    assert not world.put(1, world.content()).good
    assert world.parts() == []
    with open(where) as file:
        assert file.read() == "not ours"


# --- scripted faults --------------------------------------------------------------------------


def test_no_file_descriptor_is_left_open(make_world):
    def load(world):
        return [world.get(n)[0] for n in range(4)]

    world = make_world()
    world.put(0, world.content())
    world.put(1, world.content())
    load(world)
    with leaves_nothing_open():
        for event in "ENSAMsB":
            for operation in ("open", "read", "write"):
                world.transport.script = Script(**{operation: event + "*"})
                load(world)
                world.put(0, world.content())
                world.put(9, world.content())


# --- races ------------------------------------------------------------------------------------


def test_a_good_file_that_replaced_a_bad_one_during_the_read_is_not_discarded(make_world):
    world, other = make_world(), make_world()
    other.put(2, other.content())  # so that there is a chunks directory
    world.put(1, world.content())
    damage(world.path(1), world.base)
    world.transport.script = Script(read="H")
    statuses = []
    reader = threading.Thread(target=lambda: statuses.append(world.get(1)[0]))
    reader.start()
    world.transport.wait_until_hanging(1)
    os.unlink(world.path(1))
    assert other.put(1, other.content()) is Status.OK
    world.transport.release()
    reader.join(20)
    assert statuses == [Status.CORRUPT]
    assert other.get(1) == (Status.OK, other.content())


def test_a_bad_file_that_cannot_be_discarded_is_replaced_by_the_next_put(world, monkeypatch):
    world.put(1, world.content())
    damage(world.path(1), world.base)
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", Mock(side_effect=PermissionError(1, "no")))
        assert world.get(1) == (Status.CORRUPT, None)
    assert os.path.exists(world.path(1))
    assert world.put(1, world.content()) is Status.OK
    assert world.get(1) == (Status.OK, world.content())


# --- somebody cleans up -----------------------------------------------------------------------


@pytest.mark.parametrize("what", ["/tmp", "/chunks", ""], ids=["tmp", "chunks", "namespace"])
def test_what_is_removed_while_running_is_made_again(world, what):
    world.put(1, world.content())
    shutil.rmtree(f"{world.directory.path}{what}")
    assert world.put(2, world.content()) is Status.OK
    assert world.get(2) == (Status.OK, world.content())
    assert os.path.exists(f"{world.directory.path}/namespace.json")


@pytest.mark.parametrize("mount_point", [True, False])
def test_a_root_removed_while_running_is_not_made_again(world, mount_point):
    """A mount that went away leaves an empty directory: filling it would fill the wrong disk."""
    world.put(1, world.content())
    shutil.rmtree(world.root)
    if mount_point:
        os.mkdir(world.root)
    assert world.get(1) == (Status.MISSING, None)
    assert not world.put(2, world.content()).good
    assert os.path.exists(world.root) == mount_point
    assert not mount_point or os.listdir(world.root) == []


@pytest.mark.parametrize("what", ["root", "part"])
def test_what_is_removed_between_write_and_rename_is_not_made_again(world, what):
    """And no error escapes."""
    world.transport.after_write = (
        os.unlink if what == "part" else lambda _: shutil.rmtree(world.root)
    )
    assert not world.put(1, world.content()).good
    assert world.chunk_files() == []
    assert os.path.exists(world.root) is (what == "part")


# --- the host transport -----------------------------------------------------------------------


def test_direct_io_on_refuses_a_file_system_without_it_and_auto_does_not(world, monkeypatch):
    real = os.open

    def no_direct(path, flags, *args, **kwargs):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", no_direct)
    tmp = f"{world.directory.path}/tmp"
    with pytest.raises(ConfigError, match="direct_io"):
        HostTransport(world.tensors, 4096, probe_dir=tmp, direct_io="on")
    assert "buffered" in HostTransport([], 4096, probe_dir=tmp, direct_io="auto").description
    assert os.listdir(tmp) == []


@pytest.mark.parametrize(
    ("kind", "touched"),
    [
        ("fuse.ceph-fuse", True),
        ("ceph", True),
        pytest.param("ext4", False, id="control: nowhere else"),
    ],
)
def test_the_times_of_what_is_published_on_cephfs_are_set(
    make_world, monkeypatch, tmp_path, kind, touched
):
    """Other clients wait up to 5 s for it otherwise; outside the interpreter: `shared_fs/test_ceph.py`."""
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(f"36 35 98:0 / / rw shared:1 - {kind} a rw\n")
    monkeypatch.setattr(filesystem, "_MOUNTINFO", str(mountinfo))
    world = make_world()
    done = []
    real = {name: getattr(os, name) for name in ("rename", "utime")}
    for name in real:

        def call(path, *more, _name=name, **how):
            done.append((_name, str(path if _name == "utime" else more[0])))
            return real[_name](path, *more, **how)

        monkeypatch.setattr(os, name, call)
    assert world.put(1, world.content()) is Status.OK
    name = os.path.basename(world.path(1))
    assert done == [("rename", name), ("utime", name)][: 1 + touched]


@pytest.mark.parametrize(
    ("number", "refused"),
    [
        (errno.ENOSYS, True),
        (errno.EPERM, True),
        pytest.param(errno.EIO, False, id="control: an ill disk is none that cannot"),
        pytest.param(0, False, id="control: one that can"),
    ],
)
@pytest.mark.parametrize("direct_io", ["auto", "off"])
def test_a_root_where_no_file_can_be_renamed_over_another_is_refused(
    world, monkeypatch, number, refused, direct_io
):
    tried = []

    def rename(*paths, **how):
        tried.append(paths)
        if number:
            raise OSError(number, os.strerror(number))
        return real(*paths, **how)

    real = os.rename
    monkeypatch.setattr(os, "rename", rename)
    tmp = f"{world.directory.path}/tmp"
    with pytest.raises(RootError, match="renamed over") if refused else contextlib.nullcontext():
        HostTransport(world.tensors, 4096, probe_dir=tmp, direct_io=direct_io)
    assert len(tried) == 1
    assert os.listdir(tmp) == []


def test_slots_are_bounded_aligned_and_reused(world):
    pool = SlotPool(world.transport, 3)
    slots = [pool.take() for _ in range(3)]
    assert pool.take() is None
    assert all(slot.array.ctypes.data % 4096 == 0 for slot in slots)
    pool.give_back(slots[0])
    assert pool.take() is slots[0]
    assert pool.num_used == 3


@pytest.mark.parametrize("kept", [True, False], ids=["kept_out", "negative_control"])
def test_a_child_process_has_no_part_in_the_slots(make_world, monkeypatch, kept):
    """O_DIRECT and fork: the bytes of a read in progress could end up in the child's page only."""
    if not kept:
        monkeypatch.setattr(arena.mmap, "MADV_DONTFORK", arena.mmap.MADV_HUGEPAGE)
    slot = make_world().transport.new_slot(0)
    address = slot.array.ctypes.data
    slot.array[:] = 1
    assert _is_mapped(address)
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # 3.12: beside threads; this child only looks.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.write(writing, b"yes" if _is_mapped(address) else b"no")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 3) == (b"no" if kept else b"yes")
    os.close(reading)
    os.close(writing)


def _is_mapped(address):
    with open("/proc/self/maps") as file:
        ranges = [line.split()[0].split("-") for line in file]
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in ranges)


def test_a_start_does_not_wait_for_a_root_whose_mount_is_not_told(make_world, monkeypatch):
    answer = threading.Event()
    monkeypatch.setattr(store, "shows_late", lambda _: answer.wait(60))
    monkeypatch.setattr(store, "START_UP_S", 0.05)
    try:
        with pytest.raises(RootError, match="did not answer"):
            make_world()
    finally:
        answer.set()


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_stands_under_a_parts_name_is_neither_written_to_nor_removed(
    world, tmp_path, monkeypatch, kind
):
    part = world.directory.part_path(world.path(1))
    monkeypatch.setattr(type(world.directory), "part_path", lambda *_: part)
    theirs = tmp_path / "theirs"
    theirs.write_bytes(b"theirs")
    os.makedirs(os.path.dirname(part), exist_ok=True)
    (os.symlink if kind == "link" else os.link)(theirs, part)
    assert world.put(1, world.content()) is Status.IO_ERROR
    assert theirs.read_bytes() == b"theirs"
    assert os.path.samefile(part, theirs)
    assert world.get(1) == (Status.MISSING, None)
