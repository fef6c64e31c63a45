"""GdsTransport over the real kvikio and real files; the GPU is simulated (gds_lab.py).

First the promises of the store and of the jobs, by the very tests that hold them for host staging. Then what
is GDS's own: which file is opened, counts and errors of kvikio, lifetimes, registrations. What a bad disk
does below kvikio, and that no wrong bit reaches a page, is in test_transport_faults.py.
"""

from __future__ import annotations

import gc
import os
import stat
import subprocess
import sys
import threading

import gds_lab
import pytest
import test_jobs
import test_store
import torch
from cuda_sim import OF_KVIKIO
from world import wait_for

from faults.disk import DiskFaults
from fskv.data_path.store import _is_estale
from fskv.data_path.transports import protocol
from fskv.data_path.transports.protocol import SlotPool
from fskv.errors import (
    ChunkCorrupt,
    ChunkError,
    ChunkIOError,
    ChunkMissing,
    ChunkStale,
    Denied,
    NoSpace,
)
from fskv.gds_io import chunk_error_from_kvikio
from fskv.types import Status

make_bench, bench = test_jobs.make_bench, test_jobs.bench
_OF_HOST_STAGING = {
    "test_direct_io_on_refuses_a_file_system_without_it_and_auto_does_not",
    "test_a_child_process_has_no_part_in_the_slots",
}
for _module in (test_store, test_jobs):
    for _name, _test in vars(_module).items():
        if _name.startswith("test_") and callable(_test) and _name not in _OF_HOST_STAGING:
            globals()[_name] = _test


@pytest.fixture
def sim(monkeypatch):
    sim = gds_lab.simulated(monkeypatch)
    yield sim
    assert {*sim.misuses} <= {OF_KVIKIO}


@pytest.fixture
def make_world(sim, make_world):
    return lambda **options: make_world(make_transport=gds_lab.make_transport, **options)


@pytest.fixture
def gds(world):
    """The transport below the faults, with its kvikio opened up as `gds.lab`."""
    transport = world.transport.inner
    transport.lab = gds_lab.Kvikio(transport)
    return transport


# --- which file -------------------------------------------------------------------------------


def test_a_file_goes_to_the_disk_and_back_through_kvikio(world, sim):
    """One transfer each way, through kvikio's bounce."""
    sim.reset()
    world.put(1, world.content())
    assert sim.calls("cuMemcpyDtoHAsync_v2") == 1
    assert world.get(1) == (Status.OK, world.content())
    assert sim.calls("cuMemcpyHtoDAsync_v2") == 1


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_a_part_has_the_mode_it_should_have(world, tmp_path, mode):
    transport = world.transport.inner
    transport._file_mode = mode
    umask = os.umask(0)
    try:
        transport.write_part(str(tmp_path / "p.part"), transport.new_slot(0), 8192)
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "p.part").stat().st_mode) == mode


def test_what_was_opened_is_read_whatever_comes_under_its_name(world, tmp_path):
    transport = world.transport.inner
    slot = transport.new_slot(0)
    first, second = tmp_path / "first", tmp_path / "second"
    first.write_bytes(b"a" * 8192)
    second.write_bytes(b"b" * 8192)
    with transport.open(str(first)) as file:
        second.rename(first)
        file.read_into(slot, 4096, 0, 8192)
        assert bytes(slot.view[4096 : 4096 + 8192]) == b"a" * 8192
        assert not file.same_file(str(first))
    with transport.open(str(first)) as file:
        assert file.same_file(str(first))


def test_fsync_is_made_when_it_is_asked_for(make_world, monkeypatch):
    for fsync in (False, True):
        world, synced = make_world(fsync=fsync), []
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", synced.append)
            assert world.put(int(fsync), world.content()) is Status.OK
        assert len(synced) == int(fsync)


# --- counts and errors ------------------------------------------------------------------------


def test_a_short_write_is_no_space_and_leaves_nothing(world, gds):
    gds.lab.write = lambda file, buffer, nbytes, *at: nbytes - 4096
    assert world.put(1, world.content()) is Status.NO_SPACE
    assert world.parts() == world.chunk_files() == []


def test_a_short_read_of_a_whole_file_is_an_error_of_the_disk_and_the_file_stays(world, gds):
    """cuFile may return less than was asked for, without an error."""
    world.put(1, world.content())
    gds.lab.read = lambda file, buffer, nbytes, *at: nbytes - 4096
    assert world.get(1) == (Status.IO_ERROR, None)
    gds.lab.read = None
    assert world.get(1) == (Status.OK, world.content())


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (
            "Unable to open file. Linux call error at: x.cpp:1: No such file or directory",
            ChunkMissing,
        ),
        ("POSIX error on pread: Stale file handle", ChunkStale),
        ("Unable to open file. Linux call error at: x.cpp:1: Permission denied", Denied),
        ("POSIX error on pread: Input/output error", ChunkIOError),
        ("POSIX error on pwrite: No space left on device", NoSpace),
        ("POSIX error on pwrite: Disk quota exceeded", NoSpace),
        ("POSIX error on pwrite: Read-only file system", Denied),
        ("POSIX error: Operation not permitted", ChunkIOError),  # EBADF
        ("CUDA error at: somewhere: CUDA_ERROR_LAUNCH_FAILED(launch failed)", ChunkIOError),
        ("something new", ChunkIOError),
        ("", ChunkIOError),
    ],
)
def test_kvikios_words_become_a_class(tmp_path, text, kind):
    (tmp_path / "f").write_bytes(bytes(8192))
    fd = os.open(tmp_path / "f", os.O_RDONLY)
    try:
        found = chunk_error_from_kvikio(RuntimeError(text), fd, "f", read_to=8192)
    finally:
        os.close(fd)
    assert type(found) is kind
    assert _is_estale(found) == ("Stale" in text), "the store looks once more after ESTALE"


def test_where_words_say_nothing_the_file_is_looked_at(tmp_path, monkeypatch):
    (tmp_path / "f").write_bytes(bytes(4096))
    fd = os.open(tmp_path / "f", os.O_RDWR)
    error = RuntimeError("POSIX error on pread: EOF")
    try:
        assert type(chunk_error_from_kvikio(error, fd, "f", read_to=8192)) is ChunkCorrupt
        assert type(chunk_error_from_kvikio(error, fd, "f", read_to=4096)) is ChunkIOError
        full = RuntimeError("cuFile error:internal error")
        assert type(chunk_error_from_kvikio(full, fd, "f", written=8192)) is ChunkIOError
        room = os.statvfs(fd)
        monkeypatch.setattr(os, "statvfs", lambda fd: type(room)((*room[:4], 0, *room[5:])))
        assert type(chunk_error_from_kvikio(full, fd, "f", written=1 << 20)) is NoSpace
    finally:
        os.close(fd)
    assert type(chunk_error_from_kvikio(error, fd, "f", read_to=4096)) is ChunkIOError  # EBADF


def test_a_copy_that_the_driver_refuses_is_an_error_of_this_chunk_only(world, sim):
    world.put(1, world.content())
    sim.fail("cuMemcpyHtoDAsync_v2", 719)
    assert world.get(1) == (Status.IO_ERROR, None)
    assert world.get(1) == (Status.OK, world.content())


def test_rows_that_the_device_has_no_memory_to_check_cost_this_chunk_only(world, gds, caplog):
    world.put(1, world.content())

    def refuse(*args):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    gds._device.row_digests = refuse
    assert world.get(1) == (Status.IO_ERROR, None)
    assert world.put(2, world.content()) is Status.IO_ERROR
    assert "Traceback" not in caplog.text
    del gds._device.row_digests
    assert world.get(1) == (Status.OK, world.content())
    assert world.put(2, world.content()) is Status.OK


# --- lifetimes --------------------------------------------------------------------------------


def test_each_slot_is_registered_once_and_deregistered_once_at_the_end(gds):
    slots = [gds.new_slot(i) for i in range(3)]
    allocations = [id(slot.buffer.allocation) for slot in slots]
    assert gds.lab.registered == [("register", a) for a in allocations]
    gds.close()
    gds.close()
    assert gds.lab.registered[3:] == [("deregister", a) for a in allocations]
    with pytest.raises(RuntimeError, match="closed"):
        gds.new_slot(3)
    assert gds.lab.registered[-1][0] == "deregister", "also the slot that came too late"


def test_memory_is_freed_with_its_slot_and_after_the_registration_ended(gds, sim):
    slot = gds.new_slot(0)
    gds.drop_slot(slot)
    assert gds.lab.registered[-1] == ("deregister", id(slot.buffer.allocation))
    gc.collect()
    freed = sim.calls("cuMemFree_v2")
    assert len(gds.lab.alive) == 1
    del slot
    gc.collect()
    assert len(gds.lab.alive) == 0
    assert sim.calls("cuMemFree_v2") > freed


def test_a_slot_that_cannot_be_registered_is_none_and_not_counted(gds, monkeypatch):
    def refuse(buffer):
        raise RuntimeError("cuFile error: failed to allocate pinned GPU Memory")

    pool = SlotPool(gds, 2)
    with monkeypatch.context() as patch:
        patch.setattr(gds.lab, "memory_register", refuse)
        # Pytest keeps what is logged, and so frames.
        patch.setattr(protocol.logger, "disabled", True)
        for _ in range(3):
            assert pool.take() is None
    gc.collect()
    assert len(gds.lab.alive) == 0
    assert pool.take() is not None


@pytest.mark.parametrize("direction", ["read", "write"])
def test_a_parked_slot_stays_registered_and_alive_until_its_transfer_is_over(
    gds, tmp_path, direction
):
    """The thread hangs in kvikio; meanwhile the transport is closed and everybody else lets go."""
    (tmp_path / "f").write_bytes(b"x" * 8192)
    inside, go_on, ended = threading.Event(), threading.Event(), []

    def hang(file, buffer, *args):
        inside.set()
        go_on.wait(20)
        assert not file.closed
        return getattr(type(file), f"raw_{direction}")(file, buffer, *args)

    setattr(gds.lab, direction, hang)

    def transfer():
        slot = gds.new_slot(0)
        try:
            if direction == "write":
                gds.write_part(str(tmp_path / "p.part"), slot, 8192)
            else:
                with gds.open(str(tmp_path / "f")) as file:
                    file.read_into(slot, 0, 0, 8192)
        except ChunkError as error:
            ended.append(error)
        else:
            ended.append(slot)

    thread = threading.Thread(target=transfer, daemon=True)
    thread.start()
    assert inside.wait(20)
    idle = gds.new_slot(1)
    gds.close()
    gc.collect()
    assert len(gds.lab.alive) == 2
    assert [event for event, _ in gds.lab.registered] == ["register", "register", "deregister"]
    assert gds.lab.registered[2][1] == id(idle.buffer.allocation)
    go_on.set()
    thread.join(20)
    (slot,) = ended
    assert slot.index == 0, "a transfer that began before is completed"
    wait_for(lambda: gds.lab.registered[-1] == ("deregister", id(slot.buffer.allocation)))
    with pytest.raises(ChunkIOError, match="closed"):
        gds.write_part(str(tmp_path / "q.part"), slot, 8192)
    assert not (tmp_path / "q.part").exists()


# --- the end of the process -------------------------------------------------------------------

_EXIT = """
import pathlib, sys, threading
import gds_lab, torch
gds_lab.simulated_for_good()
transport = gds_lab.make_transport([torch.zeros(1, 4096, dtype=torch.int8)], 8192, probe_dir="")
path = pathlib.Path(sys.argv[1])
path.write_bytes(bytes(8192))
def read():
    slot = transport.new_slot(0)
    with transport.open(str(path)) as file:
        file.read_into(slot, 0, 0, 8192)
threading.Thread(target=read, daemon=True).start()
sys.stdin.readline()
transport.close()
print("the end")
"""


def test_a_read_that_hangs_does_not_keep_the_process_from_exiting(native_library, tmp_path):
    gds_lab.needs_kvikio()
    (tmp_path / "disk").mkdir()
    faults = DiskFaults(native_library("disk"), tmp_path / "disk", tmp_path / "state")
    faults.set("pread hang suffix=.kv")
    child = subprocess.Popen(
        [sys.executable, "-c", _EXIT, str(tmp_path / "disk" / "x.kv")],
        env={**os.environ, **faults.env(), "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        wait_for(lambda: faults.num_hanging == 1, 60)
        output, _ = child.communicate(b"\n", timeout=30)  # the hang lasts 60 s
    finally:
        child.kill()
    assert output == b"the end\n"
    assert child.returncode == 0
