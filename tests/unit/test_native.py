"""What runs outside the interpreter does what Python does, or leaves the chunk to Python as it was."""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import threading
import time
import tracemalloc
from dataclasses import replace

import numpy as np
import outside
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from test_jobs import POISON, Bench
from world import World, damage, leaves_nothing_open, make_identity, returns_in_time, wait_for

from fskv import _native
from fskv.data_path.job import NativeEvent, State
from fskv.data_path.transports import host
from fskv.data_path.transports.cuda import flat_bytes
from fskv.format import chunk_file, integrity
from fskv.format.chunk_file import ROW_NBYTES
from fskv.format.integrity import xxh3_rows
from fskv.format.spans import ChunkPlan, Placement
from fskv.root import root as root_module
from fskv.types import Status


class Chunks:
    """One World, its chunks moved by single transfers."""

    def __init__(self, world):
        self.world = world
        self.slot = world.transport.new_slot(0)

    def run(self, *which, **how):
        return outside.run(outside.transfer(self.world, *which, **how), self.slot)

    def store(self, number, block_ids, first_block=0):
        self.slot.array[:] = 0xEE
        return self.run(number, block_ids, first_block, is_load=False)

    def load(self, number, block_ids, first_block=0):
        for tensor in self.world.tensors:
            tensor[:] = POISON
        self.slot.array[:] = 0xDD
        return self.run(number, block_ids, first_block, is_load=True)


@pytest.fixture
def chunks(make_world):
    return Chunks(make_world(native=True))


STORED = [NativeEvent.GATHERED, NativeEvent.STORED]


# --- digests and copies -------------------------------------------------------------------------


@given(st.integers(1, 40), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_digests_are_those_of_the_xxhash_package(num_pages, seed):
    data = np.random.default_rng(seed).bytes(4096 * num_pages)
    rows = (data[at : at + ROW_NBYTES] for at in range(0, len(data), ROW_NBYTES))
    wanted = b"".join(map(xxhash.xxh3_64_digest, rows))
    assert _native.row_digests(data) == xxh3_rows(memoryview(data)) == wanted
    with pytest.MonkeyPatch.context() as without:
        without.setattr(integrity, "_native_rows", None)
        assert xxh3_rows(memoryview(data)) == wanted


@pytest.mark.parametrize(
    "nbytes", [241, 256, 1023, 1024, 1025, 1088, 4096, 65535, 65536, 65536 + 300]
)
@pytest.mark.parametrize("fill", [0, 0xFF, None])
def test_digests_of_any_length_that_a_row_may_have(nbytes, fill):
    data = np.random.default_rng(nbytes).bytes(nbytes) if fill is None else bytes([fill]) * nbytes
    wanted = [
        xxhash.xxh3_64_digest(data[at : at + ROW_NBYTES]) for at in range(0, nbytes, ROW_NBYTES)
    ]
    assert _native.row_digests(data) == b"".join(wanted)


@pytest.mark.parametrize("nbytes", [0, 1, 240, 65536 + 240])
def test_rows_too_short_for_this_digest_are_refused_and_not_guessed(nbytes):
    with pytest.raises(ValueError, match="rows must not be shorter than 241"):
        _native.row_digests(bytes(nbytes))


@pytest.mark.parametrize(
    "row",
    [
        *[(2, 0, 0, 8), (-1, 0, 0, 8), (0, 93, 0, 8), (0, -1, 0, 8), (0, 0, 57, 8), (0, 0, -1, 8)],
        *[(0, 0, 0, -1), (0, 2**62, 0, 2**62), (0, 0, 2**63 - 1, 1), (1, 0, 0, 51)],
    ],
)
def test_a_span_outside_a_tensor_or_the_slot_is_refused_before_anything_is_copied(row):
    tensors = [np.ones(100, np.uint8), np.ones(50, np.uint8)]
    slot = np.zeros(128, np.uint8)
    table = np.array([(0, 0, 0, 8), row], np.int64)
    for to_slot in (True, False):
        with pytest.raises(ValueError, match="outside"):
            _native.copy_spans(_native.Pages(tensors), table, slot, 64, to_slot)
    assert not slot.any()
    assert all(tensor.all() for tensor in tensors)


# --- looking at files from outside; tests/unit/test_presence.py asks what the answers are -----------


NAME = b"0123456789abcdef" * 2
FILES = ((b".g0.kv", 7), (b".g1.kv", 7))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"directory": "/nowhere"}, TypeError),
        ({"directory": b"/x\0y"}, ValueError),
        ({"names": NAME[1:]}, ValueError),
        ({"names": NAME + b"0"}, ValueError),
        ({"names": NAME.decode()}, TypeError),
        ({"names": bytearray(NAME)}, TypeError),  # it may change meanwhile
        ({"groups": b"\2"}, ValueError),
        ({"groups": b"\0\0"}, ValueError),
        ({"groups": (0,)}, TypeError),
        ({"missed": b""}, ValueError),
        ({"missed": b"\0\0"}, ValueError),
        ({"missed": "0"}, TypeError),
        ({"files": ()}, ValueError),
        ({"files": [*FILES]}, TypeError),
        ({"files": ([b".kv", 1], FILES[0])}, TypeError),
        ({"files": ((b".kv",), FILES[0])}, TypeError),
        ({"files": ((".kv", 1), FILES[0])}, TypeError),
        ({"files": ((b".k\0v", 1), FILES[0])}, ValueError),
        ({"files": ((b".kv", 2**70), FILES[0])}, OverflowError),
        ({"num_ranks": 0}, ValueError),
        ({"num_ranks": -1}, ValueError),
        ({"num_ranks": 3}, ValueError),
        ({"groups": b"\1", "num_ranks": 2}, ValueError),
    ],
)
def test_a_probe_with_other_arguments_is_refused(changes, error):
    """Negative control: without a change it is an answer."""
    good = {"directory": b"/nowhere", "names": NAME, "groups": b"\1", "missed": b"\0"}
    good |= {"files": FILES, "num_ranks": 1}
    assert _native.probe_chunks(*good.values())[:3] == (b"\0", 0, 0)
    with pytest.raises(error):
        _native.probe_chunks(*(good | changes).values())


def test_probes_leak_neither_memory_nor_files(tmp_path):
    chunks = os.fsencode(tmp_path), NAME * 50, bytes([0, 1] * 25), bytes([0, 1] * 25)
    files = tuple((b".g%d.kv" % g, 7) for g in range(2) for _ in range(3))

    def look(times):
        for _ in range(times):
            _native.probe_chunks(*chunks, files, 3)
            for wrong in (files[:3], (*files[:5], (b"\0", 7))):
                with contextlib.suppress(ValueError):
                    _native.probe_chunks(*chunks, wrong, 3)

    with leaves_nothing_open():
        look(10)
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        look(300)
        used = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
    assert used < 20_000  # 300 times one object of a call would be more


# --- one chunk ------------------------------------------------------------------------------------


def test_a_file_written_here_is_the_one_that_python_writes(make_world):
    ours, python = make_world(native=True), make_world()
    for number, first_block in enumerate((0, 1, 3)):
        content = ours.fill(range(first_block, 4), seed=number)
        assert Chunks(ours).store(number, range(first_block, 4), first_block) == STORED
        with open(ours.path(number), "rb") as file:
            native_bytes = bytearray(file.read())
        os.unlink(ours.path(number))
        assert python.put(number, content, first_block) is Status.OK
        with open(python.path(number), "rb") as file:
            python_bytes = bytearray(file.read())
        headers = [chunk_file.parse_header(b) for b in (native_bytes, python_bytes)]
        assert abs(headers[0].written_at_ms - headers[1].written_at_ms) < 60_000
        for data, header in zip((native_bytes, python_bytes), headers, strict=True):
            at = data.rindex(header.written_at_ms.to_bytes(8, "big"), 0, ours.base)
            data[at : at + 8] = bytes(8)
            data[24:32] = bytes(8)  # the header's checksum covers the time
        assert native_bytes == python_bytes
    assert ours.parts() == []


@pytest.fixture(scope="module")
def scattered(tmp_path_factory):
    """Chunks of 4 blocks with three small pages, which may lie anywhere."""
    pages = (4096, 2048, 640)
    return Chunks(World(tmp_path_factory.mktemp("scattered"), native=True, pages=pages))


@given(st.data(), st.integers(0, 3), st.integers(0, 2**32))
@settings(max_examples=80, deadline=None)
def test_pages_lie_where_the_plan_says_wherever_that_is(scattered, data, first_block, seed):
    world = scattered.world
    flat = [flat_bytes(tensor).numpy().view(np.uint8) for tensor in world.tensors]
    ids = data.draw(st.lists(st.integers(0, 9), min_size=4 - first_block, max_size=4 - first_block))
    if data.draw(st.booleans()):  # neighbours become one span
        ids = list(range(ids[0], ids[0] + len(ids)))
    base = data.draw(st.sampled_from([0, 1, 320]))
    places = []
    for page in world.layout.pages:
        tensor = data.draw(st.integers(0, 2))
        stride = data.draw(st.sampled_from([0, page.nbytes, page.nbytes + 64, 1]))
        room = len(flat[tensor]) - base - page.nbytes - stride * max(ids)
        if room < 0:
            stride, room = 1, len(flat[tensor]) - base - page.nbytes - max(ids)
        offset = data.draw(st.integers(0, room))
        if places and data.draw(
            st.booleans()
        ):  # behind the page before, or there in another tensor
            _, start, step, nbytes = places[-1]
            offset = min(room, max(0, start + nbytes + ids[0] * (step - stride)))
        places.append((tensor, offset, stride, page.nbytes))
    plan = ChunkPlan(0, Placement(world.layout, tuple(places)), first_block, tuple(ids), base)
    before = [np.random.default_rng(seed).integers(0, 256, len(t), np.uint8) for t in flat]
    for tensor, content in zip(flat, before, strict=True):
        tensor[:] = content
    payload = np.zeros(world.file_layout.payload_nbytes, np.uint8)
    for span in plan.spans:
        from_tensor = before[span.tensor_idx][span.tensor_offset :][: span.nbytes]
        payload[span.payload_offset :][: span.nbytes] = from_tensor

    def move(*, is_load):
        transfer = world.store.transfer(
            None, world.chunk(1), plan, _native.Guard(True), is_load=is_load
        )
        return outside.run(transfer, scattered.slot)

    with contextlib.suppress(FileNotFoundError):
        os.unlink(world.path(1))
    scattered.slot.array[:] = 0xEE
    assert move(is_load=False) == STORED
    stored = np.fromfile(world.path(1), np.uint8)[world.file_layout.header_nbytes :]
    assert np.array_equal(stored, payload)
    expected = [np.full(len(t), 0xDD, np.uint8) for t in flat]
    for tensor in flat:
        tensor[:] = 0xDD
    for span in plan.spans:
        to_tensor = expected[span.tensor_idx][span.tensor_offset :][: span.nbytes]
        to_tensor[:] = payload[span.payload_offset :][: span.nbytes]
    assert move(is_load=True) == [NativeEvent.LOADED]
    assert all(map(np.array_equal, flat, expected))


def test_a_partial_chunk_serves_the_blocks_that_it_has_and_leaves_others_to_python(chunks):
    content = chunks.world.fill(range(2, 4), seed=3)
    assert chunks.store(1, range(2, 4), 2) == STORED
    assert chunks.load(1, range(2, 4), 2) == [NativeEvent.LOADED]
    assert chunks.world.pages(range(2, 4)) == content
    assert chunks.load(1, range(1, 4), 1) is None
    assert not chunks.world.pages([1]).strip(bytes([POISON % 256]))


def test_an_existing_file_of_the_right_size_stays_and_a_suspect_one_is_replaced(chunks):
    world = chunks.world
    first = world.fill(range(4), seed=1)
    assert chunks.store(1, range(4)) == STORED
    second = world.fill(range(4), seed=2)
    assert chunks.store(1, range(4)) == [NativeEvent.GATHERED, NativeEvent.EXISTS]
    assert chunks.load(1, range(4)) == [NativeEvent.LOADED]
    assert world.pages(range(4)) == first
    world.store._suspect(world.chunk(1))
    world.fill(range(4), seed=2)
    assert chunks.store(1, range(4)) == STORED
    assert chunks.load(1, range(4)) == [NativeEvent.LOADED]
    assert world.pages(range(4)) == second


@pytest.mark.parametrize("wrong", ["short", "long", "directory", "symlink", "fifo"])
def test_what_is_not_our_file_is_never_loaded_and_a_store_repairs_or_leaves_it(chunks, wrong):
    world = chunks.world
    world.fill(range(4), seed=1)
    assert chunks.store(1, range(4)) == STORED
    path = world.path(1)
    if wrong == "short":
        os.truncate(path, world.file_layout.file_nbytes - 4096)
    elif wrong == "long":
        os.truncate(path, world.file_layout.file_nbytes + 4096)
    else:
        os.rename(path, f"{world.root}/elsewhere")
        {
            "directory": os.mkdir,
            "fifo": os.mkfifo,
            "symlink": lambda p: os.symlink(f"{world.root}/elsewhere", p),
        }[wrong](path)
    assert returns_in_time(lambda: chunks.load(1, range(4)) or "left") == "left"
    content = world.fill(range(4), seed=2)
    assert chunks.store(1, range(4)) == (None if wrong == "directory" else STORED)
    if wrong != "directory":
        assert chunks.load(1, range(4)) == [NativeEvent.LOADED]
        assert world.pages(range(4)) == content
    assert world.parts() == []


@pytest.mark.parametrize("kind", ["file", "link"])
def test_what_stands_under_a_parts_name_is_neither_written_to_nor_removed(
    chunks, tmp_path, monkeypatch, kind
):
    world = chunks.world
    name = "a-1-0badcafe-1.part"
    monkeypatch.setattr(world.store, "_parts", itertools.repeat(name))
    monkeypatch.setattr(root_module, "unique_name", lambda: name.removesuffix(".part"))
    part = world.directory.part_path(world.path(1))
    theirs = tmp_path / "theirs"
    theirs.write_bytes(b"theirs")
    os.makedirs(os.path.dirname(part), exist_ok=True)
    (os.symlink if kind == "link" else os.link)(theirs, part)
    world.fill(range(4), seed=1)
    assert chunks.store(1, range(4)) is None, "left to Python"
    assert theirs.read_bytes() == b"theirs"
    assert os.path.samefile(part, theirs)
    assert world.chunk_files() == []


@pytest.mark.parametrize("share", [0, 0.5], ids=["nothing", "half"])
def test_a_file_that_cannot_be_written_to_its_end_never_gets_its_name_and_leaves_no_part(
    chunks, share
):
    world = chunks.world
    content = world.fill(range(4), seed=1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    most = int(share * world.file_layout.file_nbytes) // 4096 * 4096
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))  # Python ignores SIGXFSZ
    try:
        assert chunks.store(1, range(4)) is None, "left to Python"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert world.chunk_files() == []
    assert world.parts() == []
    assert chunks.store(1, range(4)) == STORED
    assert chunks.load(1, range(4)) == [NativeEvent.LOADED]
    assert world.pages(range(4)) == content


def test_a_load_refreshes_an_old_mtime_after_it_was_told_and_not_a_new_one(chunks):
    chunks.world.fill(range(4), seed=1)
    assert chunks.store(1, range(4)) == STORED
    path = chunks.world.path(1)
    for age, refreshed in ((700, True), (100, False)):
        then = time.time() - age
        os.utime(path, (then, then))
        assert chunks.load(1, range(4)) == [NativeEvent.LOADED]
        assert (os.stat(path).st_mtime > then + 1) is refreshed
        os.utime(path, (then, then))
        chunks.world.fill(range(4), seed=1)
        assert chunks.store(1, range(4)) == [NativeEvent.GATHERED, NativeEvent.EXISTS]
        assert (os.stat(path).st_mtime > then + 1) is refreshed


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
def test_modes_do_not_depend_on_where_the_file_is_written(tmp_path, make_world, mode):
    world = make_world(native=True)
    world.transport.native = replace(world.transport.native, file_mode=mode)
    world.store._native_layouts[0] = world.store._new_native_layout(0, None)
    world.fill(range(4), seed=1)
    umask = os.umask(0)
    try:
        assert Chunks(world).store(1, range(4)) == STORED
    finally:
        os.umask(umask)
    assert os.stat(world.path(1)).st_mode & 0o7777 == mode
    assert os.stat(os.path.dirname(world.path(1))).st_mode & 0o777 == 0o700


@pytest.mark.parametrize("other", ["identity", "layout", "key", "rank", "group"])
def test_the_file_of_another_chunk_under_this_name_is_not_loaded(make_world, other):
    """The name is 128 bits of a hash, and a directory can be moved: the header decides."""
    world = make_world(native=True)
    stranger = make_world(
        root=f"{world.root}/other",
        native=True,
        **{
            "identity": {"identity": make_identity(model_name="org/other")},
            "layout": {"layout_digest": b"M" * 16},
            "key": {},
            "rank": {"rank": 1},
            "group": {"group_idx": 1},
        }[other],
    )
    stranger.fill(range(4), seed=1)
    number = 2 if other == "key" else 1
    assert Chunks(stranger).store(number, range(4)) == STORED
    world.fill(range(4), seed=1)
    chunks = Chunks(world)
    assert chunks.store(1, range(4)) == STORED
    assert chunks.load(1, range(4)) == [NativeEvent.LOADED]
    os.replace(stranger.path(number), world.path(1))
    assert chunks.load(1, range(4)) is None
    assert not world.pages(range(4)).strip(bytes([POISON % 256]))


@pytest.fixture
def small(make_world):
    """A chunk of 8 KiB, header included, so that every bit of it can be tried."""
    return Chunks(make_world(native=True, pages=(24, 8), blocks_per_chunk=2, direct_io="off"))


def test_every_single_flipped_bit_of_a_file_is_found_before_a_page_is_written(small):
    world = small.world
    content = world.fill(range(2), seed=1)
    assert small.store(1, range(2)) == STORED
    loads = [outside.transfer(world, 1, range(2), is_load=True) for _ in range(8 * 8192)]
    with open(world.path(1), "r+b") as file:
        data = bytearray(file.read())
        for tensor in world.tensors:
            tensor[:] = POISON
        for at in range(len(data)):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([data[at] ^ 1 << bit]), at)
                assert outside.run(loads[8 * at + bit], small.slot) is None, (at, bit)
            os.pwrite(file.fileno(), data[at : at + 1], at)
        assert not world.pages(range(2)).strip(bytes([POISON % 256]))
    assert small.load(1, range(2)) == [NativeEvent.LOADED]
    assert world.pages(range(2)) == content


def test_negative_control_a_flip_in_rows_that_are_not_wanted_is_not_looked_at(chunks):
    """So the walk above would see a reader that checks less."""
    chunks.world.fill(range(4), seed=1)
    assert chunks.store(1, range(4)) == STORED
    damage(chunks.world.path(1), chunks.world.base + 3 * ROW_NBYTES + 5)
    assert chunks.load(1, [0]) == [NativeEvent.LOADED]
    assert chunks.load(1, range(4)) is None


# --- the guard ------------------------------------------------------------------------------------


def test_an_abandoned_job_is_neither_read_from_nor_written_to(chunks):
    chunks.world.fill(range(4), seed=1)
    assert chunks.store(1, range(4)) == STORED
    for is_load in (True, False):
        guard = _native.Guard(True)
        guard.abandon()
        assert guard.abandoned
        for tensor in chunks.world.tensors:
            tensor[:] = POISON
        chunks.slot.array[:] = 0xEE
        left = chunks.run(1 if is_load else 2, range(4), guard=guard, is_load=is_load)
        assert left == [NativeEvent.LEFT]
        if is_load:
            assert not chunks.world.pages(range(4)).strip(bytes([POISON % 256]))
        else:
            assert (chunks.slot.array == 0xEE).all()
            assert not os.path.exists(chunks.world.path(2))


def running_load(guard):
    """Return a queue, and a load in it that this thread has taken; Python does all of it."""
    queue, transfer = _native.Queue(1, 1), _native.Transfer(None, True, guard)
    queue.push([transfer])
    assert queue.take(None) is transfer
    return queue, transfer


def test_abandon_waits_for_who_is_inside_and_for_nobody_else():
    guard = _native.Guard(True)
    queue, transfer = running_load(guard)
    assert queue.enter(transfer)
    done = threading.Event()
    thread = threading.Thread(target=lambda: (guard.abandon(), done.set()), daemon=True)
    thread.start()
    wait_for(lambda: guard.abandoned)
    assert not done.wait(0.05)
    assert not queue.enter(transfer)
    queue.leave(transfer)
    assert done.wait(20)


@pytest.mark.parametrize("opens", [True, False], ids=["opens", "abandoned"])
def test_who_comes_before_the_gate_opens_waits_and_leaves_its_place_at_the_disk(opens):
    guard = _native.Guard(False)
    queue, transfer = running_load(guard)
    entered = []
    thread = threading.Thread(target=lambda: entered.append(queue.enter(transfer)), daemon=True)
    thread.start()
    wait_for(lambda: transfer.state == State.WAITING)
    other = _native.Transfer(None, True, _native.Guard(True))
    queue.push([other])
    assert queue.take(None) is other, "one may be at the disk, and the one that waits is not"
    assert not entered
    guard.open() if opens else guard.abandon()
    thread.join(20)
    assert entered == [opens]
    # A file that is not wanted any more is closed, which is the disk's time.
    assert transfer.state == (State.SCATTERING if opens else State.WRITING)
    assert transfer.waited_s > 0
    guard.open()
    assert guard.abandoned is not opens, "a gate that was abandoned stays so"


# --- jobs -----------------------------------------------------------------------------------------


@pytest.fixture
def make_native_bench(make_world):
    with contextlib.ExitStack() as stack:

        def make(**options):
            world = make_world(native=True, **options.pop("world", {}))
            bench = Bench(world, **options)
            bench.clock.now = time.monotonic()  # the queue outside the interpreter has this clock
            stack.callback(bench.runner._pool.close)
            return bench

        yield make


def test_jobs_run_outside_the_interpreter_and_say_what_python_would(make_native_bench, monkeypatch):
    bench = make_native_bench(num_threads=3, num_slots=8)
    for name in ("get", "put"):
        monkeypatch.setattr(bench.world.store, name, None)  # nothing comes by there
    job, contents = bench.store([1, 2, 3])
    assert not bench.finish(job)[0].failed
    wait_for(lambda: bench.statuses(loads=False) == {Status.OK: 3})
    again, _ = bench.store([1, 2, 3])
    bench.finish(again)
    wait_for(lambda: bench.statuses(loads=False) == {Status.OK: 3, Status.EXISTS: 3})
    load = bench.load([1, 2, 3], place=5)
    (result,) = bench.finish(load)
    assert (result.failed, result.nbytes) == (False, sum(map(len, contents.values())))
    for i, n in enumerate((1, 2, 3)):
        assert bench.world.pages(bench.blocks(5 + i)) == contents[n]
    bench.wait_until_idle()


def test_directories_that_vanish_are_made_again(make_native_bench):
    bench = make_native_bench()
    for where in ("tmp", "chunks", ""):
        os.system(f"rm -rf '{bench.world.directory.path}/{where}'")
        job, _ = bench.store([1, 2])
        bench.finish(job)
        bench.wait_until_idle()
        load = bench.load([1, 2], place=5)
        assert not bench.finish(load)[0].failed


def test_transfers_that_make_no_sense_are_refused():
    guard, pages = _native.Guard(True), _native.Pages([np.zeros(4096, np.uint8)])
    sizes = {
        "header_nbytes": 4096,
        "payload_nbytes": 4096,
        "content_nbytes": 64,
        "block_nbytes": 32,
    }
    rest = {"num_blocks": 2, "format_version": 1, "open_flags": 0, "fsync": False, "touch": False}
    rest |= {"file_mode": 0o600, "dir_mode": 0o700, "touch_interval_s": 600.0, "root_nbytes": 0}
    pieces = {"head": b"h", "middle": b"m", "rows": b"r", "tail": b"t"}
    rest |= {"directory": b"/d", "suffix": b".g0.kv", "keys": None, "context": b""}
    layout = _native.Layout(**pieces, **sizes, **rest)
    for change in (
        {"header_nbytes": 100},
        {"payload_nbytes": 100},
        {"content_nbytes": 8192},
        {"block_nbytes": 0},
        {"num_blocks": 3},
        {"head": bytes(5000)},
        {"directory": b"/a\0b"},
        {"suffix": b".g\0.kv"},
        {"keys": b""},
        {"keys": bytes(47)},
        {"context": bytes(129)},
    ):
        with pytest.raises(ValueError, match="do not fit"):
            _native.Layout(**{**pieces, **sizes, **rest, **change})
    for place in (
        (1, 0, 32, 32),
        (-1, 0, 32, 32),
        (0, -1, 32, 32),
        (0, 0, -32, 32),
        (0, 0, 32, 0),
        (0, 4065, 32, 32),
        (0, 0, 32, 4097),
    ):
        with pytest.raises(ValueError, match="outside its tensor"):
            _native.Placement(pages, [place])
    placement = _native.Placement(pages, [(0, 0, 32, 24), (0, 24, 32, 8)])
    small = _native.Placement(pages, [(0, 0, 32, 16)])

    def make(
        key=b"k" * 32,
        name="0" * 32,
        placement=placement,
        first=0,
        num=2,
        ids=(0, 127),
        base=0,
        part=None,
        load=True,
    ):
        return _native.Transfer(
            None, load, guard, layout, placement, key, name, part, first, num, ids, base, False
        )

    make()
    make(ids=np.array([0, 127], np.int32))
    make(first=1, num=1, ids=[3], base=4096 - 128)
    for bad in (
        {"key": b""},
        {"key": bytes(256)},
        {"name": "0" * 31},
        {"first": 1},
        {"num": 0},
        {"num": 2**32 - 1, "first": 2},
        {"part": "p"},
        {"load": False},
        {"placement": small},
        {"ids": (0,)},
        {"ids": (0, 1, 2)},
        {"ids": (0, 128)},
        {"ids": (-1, 0)},
        {"ids": (0, 2**62)},
        {"base": 32},
        {"base": -32},
        {"base": 2**63 - 1},
    ):
        with pytest.raises(ValueError, match=r"Transfer"):
            make(**bad)
    with pytest.raises(ValueError, match="too small"):
        make(part="p", load=False).gather(host.HostSlot(0, np.zeros(4096, np.uint8)))


def test_nothing_is_leaked_however_a_transfer_ends(make_native_bench, request):
    import gc
    import weakref

    bench = make_native_bench(num_threads=2, num_slots=20)
    gc.collect()
    gc.disable()  # circles would wait for it, and with 10^6 objects beside them, for long
    request.addfinalizer(gc.enable)
    alive = []
    transfer = bench.world.store.transfer

    def watched(owner, *args, **options):
        alive.append(weakref.ref(owner.job))
        return transfer(owner, *args, **options)

    bench.world.store.transfer = watched
    for n in range(4):
        job, _ = bench.store([1 + n, 2 + n], place=2)  # stored, exists
        bench.runner.wait([job])  # some ahead, some cancelled
        bench.finish(job)
        bench.wait_until_idle()
        for number in (1 + n, 99):  # good, absent
            bench.finish(bench.load([number], place=8))
    bench.wait_until_idle()
    bench.outcomes.clear()
    assert len(alive) >= 16
    wait_for(lambda: [ref for ref in alive if ref() is not None] == [])


@pytest.mark.parametrize("native", [True, False])
def test_a_span_outside_costs_its_chunk_and_not_the_engine_s_step(make_world, native):
    world = make_world(native=native)
    bench = Bench(world)
    if native:
        bench.clock.now = time.monotonic()
    job, contents = bench.store([1, 2])
    bench.finish(job)
    bench.wait_until_idle()
    bad = world.request(1, range(62, 66))  # two blocks beyond the tensors
    bench.poison(bench.blocks(5))
    bench.runner.submit_load(100, [bad, world.request(2, bench.blocks(5))], None)
    assert bench.finish(100)[0].failed
    assert bench.statuses(loads=True) == {Status.IO_ERROR: 1, Status.OK: 1}
    assert world.pages(bench.blocks(5)) == contents[2]
    bench.runner.submit_store(101, [bad], None)
    assert not bench.finish(101)[0].failed
    bench.wait_until_idle()
    bench.runner._pool.close()


def test_a_chunk_on_its_way_to_a_device_is_touched_after_it_was_delivered(make_native_bench):
    bench = make_native_bench()
    transport = bench.world.transport
    transport.native = replace(transport.native, pages=None, on_device=True)
    job, _ = bench.store([1])
    bench.finish(job)
    bench.wait_until_idle()
    then = time.time() - 700
    os.utime(bench.world.path(1), (then, then))
    seen = []
    scatter = bench.world.transport.scatter

    def look(*args):
        seen.append(os.stat(bench.world.path(1)).st_mtime)
        scatter(*args)

    bench.world.transport.scatter = look
    assert not bench.finish(bench.load([1], place=3))[0].failed
    bench.wait_until_idle()
    assert seen == [pytest.approx(then, abs=1)]
    assert os.stat(bench.world.path(1)).st_mtime > then + 600
