"""The chunk path on CUDA, over the simulated driver.

Streams run late, on threads of their own, and the host may not touch the device: what is read too early,
given back too early or done on another stream gives wrong bytes here. `misuses` are what a real driver would
punish.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import random
import threading
import time
from functools import partial

import numpy as np
import pytest
from cuda_sim import COPIES_IN, COPIES_OUT, MULTIPROCESSORS, PINNING, Gpu, SimError, simulation
from cuda_torch import device_world, on_simulation
from test_jobs import Bench
from test_readiness import stored
from world import read_by_hand, returns_in_time, wait_for

from fskv.config import Deadline, StoreConfig
from fskv.data_path import job as job_module
from fskv.data_path.job import FileMove, State
from fskv.data_path.transports import cuda
from fskv.data_path.transports.host import HostTransport
from fskv.errors import ConfigError
from fskv.format.chunk_file import FileLayout
from fskv.format.spans import GroupLayout, plan_job
from fskv.native import _native as native_module
from fskv.offload import mover as mover_module
from fskv.offload.mover import Mover
from fskv.root.root import NamespaceDir
from fskv.types import FileId, Status

SLOT = 1 << 20
CHUNK = np.array([(0, 4096 * b, 4096 * b, 4096) for b in range(8)], np.int64)
LATE_S = 0.004  # a stream may be so late


PATHS = ["kernel", "spans"]  # the copy kernel, or one copy of the driver's a span


@pytest.fixture
def sim(monkeypatch, request):
    sim = simulation()
    sim.reset(1, LATE_S)
    sim.torch = on_simulation(monkeypatch, sim)
    yield sim
    assert sim.misuses == []
    sim.reset(1, 0.0)


def make_transport(tensors, tmp_path, slot_nbytes=SLOT, **options):
    return HostTransport(tensors, slot_nbytes, probe_dir=str(tmp_path), direct_io="off", **options)


def started(calls):
    """Begin each call on a thread of its own."""
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    return threads


def end(threads):
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


class DeviceBench(Bench):
    """Its pages are on a simulated device; tests look at them from beside."""

    def __init__(self, make_world, sim, *, index=1, root=None, num_slots=40, **options):
        self.sim, self.gpu = sim, sim.torch.gpu(f"cuda:{index}")
        place = {"root": root} if root else {}
        world = device_world(make_world, self.gpu, num_slots=num_slots, num_blocks=256, **place)
        super().__init__(world, num_slots=num_slots, **options)
        self.clock.now = time.monotonic()

    def pending_step(self, block_ids, seed):
        """Launch a step of the engine that writes known pages; return its event and the bytes."""
        content = self.world.fill(block_ids, seed)
        kept = [tensor[block_ids.start : block_ids.stop].clone() for tensor in self.world.tensors]
        self.poison(block_ids)

        def step():
            for tensor, pages in zip(self.world.tensors, kept, strict=True):
                tensor[block_ids.start : block_ids.stop] = pages

        self.gpu.launch(step)
        return self.gpu.event(), content

    def close(self):
        self.runner._pool.close()
        wait_for(lambda: self.runner._pool._num_alive == 0)
        self.runner._readiness.close()
        self.world.transport.close()


@pytest.fixture
def make_device(make_world, sim):
    benches = []

    def make(**options):
        benches.append(DeviceBench(make_world, sim, **options))
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()


@pytest.fixture(params=PATHS)
def path(request, sim):
    """One of PATHS: a driver that cannot load the kernel copies the spans one by one."""
    if request.param == "spans":
        sim.fail("cuModuleLoadData", 200)
    return request.param


# --- order, through a runner ----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_stores_and_loads_are_between_the_steps_of_the_engine(make_device, sim, path, seed):
    bench = make_device(num_threads=3)
    sim.reset(seed, LATE_S * seed)
    contents = {}
    for n in range(4):
        ready, contents[n] = bench.pending_step(bench.blocks(n), seed + n)
        move = bench.world.request(n, bench.blocks(n))
        bench.runner.submit_store(100 + n, [move], ready)
    for n in range(4):
        bench.finish(100 + n)
        bench.poison(bench.blocks(n))  # the pages are somebody else's
    bench.wait_until_idle()
    for n, content in contents.items():
        assert read_by_hand(bench.world.path(n)).payload[: len(content)] == content
    bench.poison(range(36, 60))
    for n in range(4):
        # The last user still writes to the pages.
        ready, _ = bench.pending_step(bench.blocks(10 + n), 77)
        bench.runner.submit_load(200 + n, [bench.world.request(n, bench.blocks(10 + n))], ready)
    for n in range(4):
        (result,) = bench.finish(200 + n)
        assert not result.failed
        assert bench.world.pages(bench.blocks(10 + n)) == contents[n]
    bench.wait_until_idle()
    assert bench.poisoned(9)
    assert bench.poisoned(14)
    bench.gpu.synchronize()
    for n in range(4):
        assert bench.world.pages(bench.blocks(10 + n)) == contents[n]
    assert bool(sim.calls("cuLaunchKernel")) is (path == "kernel")


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_steps_stores_loads_and_preemptions(make_device, sim, seed):
    """What is reported good is right, what was given up is untouched, and in the end all is free."""
    sim.reset(seed, LATE_S * (seed % 3))
    rng = random.Random(seed)
    bench = make_device(num_threads=3, num_slots=14, failures=10**6)
    known, loads, num_good = {}, {}, 0
    for number in range(50):
        ready = None
        if rng.random() < 0.5 or not known:
            place = number
            ready, known[number] = bench.pending_step(bench.blocks(place), number)
            move = bench.world.request(number, bench.blocks(place))
            bench.runner.submit_store(number, [move], ready)
            if rng.random() < 0.3:
                returns_in_time(lambda job=number: bench.runner.wait([job]) or 1)
                bench.poison(bench.blocks(place))
        else:
            wanted = rng.choice(sorted(known))
            if rng.random() < 0.5:
                ready, _ = bench.pending_step(bench.blocks(number), 7)
            else:
                bench.poison(bench.blocks(number))
            move = bench.world.request(wanted, bench.blocks(number))
            bench.runner.submit_load(number, [move], ready)
            loads[number] = wanted
            if rng.random() < 0.2:
                returns_in_time(lambda job=number: bench.runner.wait([job]) or 1)
                bench.gpu.synchronize()
                if number not in bench.poll() or bench.results[number].failed:
                    bench.poison(bench.blocks(number))
                    bench.finish(number)
                    if bench.results[number].failed:
                        time.sleep(2 * LATE_S)
                        assert bench.poisoned(number), "it was given up"
                        del loads[number]
        bench.poll()
    bench.finish(*loads)
    for job, wanted in loads.items():
        if not bench.results[job].failed:
            num_good += 1
            assert bench.world.pages(bench.blocks(job)) == known[wanted]
    wait_for(lambda: bench.poll() is not None and bench.runner.num_open_stores == 0)
    bench.wait_until_idle()
    assert bench.runner._slots._num_ahead == 0
    assert num_good or not loads
    assert sim.spinning == 0


def test_a_job_that_is_given_up_waits_for_its_copies_and_no_late_one_follows(make_device, sim):
    bench = make_device(num_threads=2)
    stored(bench, range(4))
    sim.reset(1, 0.0)
    with bench.gpu.occupied(MULTIPROCESSORS):
        load = bench.load(range(4), place=20)
        wait_for(lambda: sim.calls("cuLaunchKernel") == 2)
        (wait,) = started([lambda: bench.runner.wait([load])])
        wait.join(0.1)
        assert wait.is_alive()
    end([wait])
    bench.poison(range(80, 96))
    bench.finish(load)
    bench.wait_until_idle()
    wait_for(lambda: not sim.busy)
    assert all(bench.poisoned(20 + n) for n in range(4))


def test_a_rank_makes_no_context_on_another_gpu(make_device, sim, path):
    bench = make_device(index=1)
    stored(bench, [1, 2])
    assert not bench.finish(bench.load([1, 2], place=9))[0].failed
    assert sim.contexts(0) == 0
    assert sim.contexts(1) > 0


def test_a_thread_keeps_the_device_that_it_had(make_device, sim):
    """wait() runs on the engine's thread."""
    bench = make_device(index=1)
    other = Gpu(sim, 0)
    job, contents = bench.store([1])
    with other.current():
        bench.runner.wait([job])
        address = other.allocate(4096)
        other.free(address)  # a misuse with another current context
    bench.finish(job)
    bench.wait_until_idle()
    assert read_by_hand(bench.world.path(1)).payload[: len(contents[1])] == contents[1]


def test_many_threads_copy_at_once_and_each_has_its_own_bytes(sim, make_pair):
    """More of them than lanes."""
    sim.reset(4, 0.002)
    num_threads, page = 7, 4096
    pair = make_pair([(num_threads * 8, page)] * 3, num_slots=num_threads)
    transport = pair.transports[0]
    slots = [*pair.slots[:1], *(transport.new_slot(n) for n in range(1, num_threads))]
    opened = [pair.gpu.opened(t) for t in pair.tensors]
    wrong = []

    def work(number):
        rng = np.random.default_rng(number)
        blocks = np.arange(8 * number, 8 * number + 8)
        rows = [(t, int(b) * page) for b in blocks for t in range(3)]
        slot, nbytes = slots[number], len(rows) * page
        for _ in range(8):
            rng.shuffle(rows)
            table = np.array([(t, at, i * page, page) for i, (t, at) in enumerate(rows)], np.int64)
            data = rng.integers(0, 256, nbytes, np.uint8)
            slot.array[4096 : 4096 + nbytes] = data
            transport.scatter(slot, 4096, table)
            slot.array[:] = 0
            there = np.concatenate([opened[t][at // page] for t, at in rows])
            transport.gather(table, slot, 4096)
            here = slot.array[4096 : 4096 + nbytes].copy()
            if not np.array_equal(there, data) or not np.array_equal(here, data):
                wrong.append(number)

    end(started(partial(work, n) for n in range(num_threads)))
    assert wrong == []


def test_a_device_is_given_up_when_no_copy_runs(sim, make_pair):
    pair = make_pair([(8, 4096)] * 2)
    transport, slot = pair.transports[0], pair.slots[0]
    table = np.array([(0, 0, 0, 4096), (1, 0, 4096, 4096)], np.int64)
    for tensor in pair.tensors:
        pair.gpu.opened(tensor)[:] = 3
    sim.reset()
    with pair.gpu.occupied():
        copy = started([lambda: transport.gather(table, slot, 0)])
        wait_for(lambda: sim.calls("cuEventSynchronize") == 1)
        (close,) = started([transport._outside.close])
        close.join(0.1)
        waited = close.is_alive()
    end([*copy, close])
    assert waited
    assert (slot.array[:8192] == 3).all()
    with pytest.raises(RuntimeError, match="given up"):
        transport.gather(table, slot, 0)


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "control"])
def test_memory_that_is_registered_while_the_device_is_given_up_is_not_kept(sim, closed):
    """A thread makes a slot while the engine ends. Without the end, the control, all is kept."""
    device = native_module.Device(sim.path, 0, SLOT, 1)
    buffers = [mmap.mmap(-1, SLOT) for _ in range(6)]
    before, refused = sim.registered, []

    def register(buffer):
        try:
            device.register(buffer)
        except RuntimeError as error:
            refused.append(str(error))

    with sim.torch.gpu("cuda:0").occupied(PINNING):
        threads = started(partial(register, b) for b in buffers)
        wait_for(lambda: sim.registered == before + 6 * SLOT)
        if closed:
            returns_in_time(lambda: device.close() or 1)
    end(threads)
    assert refused == (["the device was given up"] * 6 if closed else [])
    assert sim.registered - before == (-2048 * 24 if closed else 6 * SLOT)
    if not closed:
        device.close()
        assert sim.registered == before - 2048 * 24
    for buffer in buffers:
        buffer.close()  # BufferError if somebody still refers to it


@pytest.mark.parametrize("way", PATHS)
def test_nothing_runs_after_a_copy_that_failed(sim, make_pair, way):
    pair = make_pair([(8, 4096)] * 2)
    transport, slot = pair.transports[PATHS.index(way)], pair.slots[PATHS.index(way)]
    table = np.array([(t, b * 4096, (2 * b + t) * 4096, 4096) for b in range(8) for t in (0, 1)])
    for to_slot, name in (
        (True, "cuMemcpyDtoHAsync_v2"),
        (False, "cuMemcpyHtoDAsync_v2"),
        (False, "cuEventRecord"),
        (True, "cuEventSynchronize"),
    ):
        for seed in range(4):
            sim.reset(seed, 0.2)
            sim.fail(name, 999, after=1 if "Memcpy" in name and way == "spans" else 0)
            with pytest.raises(RuntimeError, match="999"):
                transport.gather(table, slot, 4096) if to_slot else transport.scatter(
                    slot, 4096, table
                )
            assert not sim.busy, "the slot and the pages are somebody else's now"


# --- a device that is busy -----------------------------------------------------------------------


@pytest.mark.parametrize("is_load", [True, False])
@pytest.mark.parametrize("protected", [True, pytest.param(False, id="control")])
def test_the_wait_for_a_busy_device_is_neither_the_files_time_nor_the_breakers(
    make_device, monkeypatch, is_load, protected
):
    """It lasts longer than the disk may take for a file, and not so long as for the whole job."""
    if not protected:
        monkeypatch.setattr(job_module, "_NOT_AT_DISK", ())
    deadline = Deadline(base_s=1.0, per_mib_s=1000.0, max_s=1e6)
    bench = make_device(num_threads=2, deadline=deadline, failures=1)
    contents = stored(bench, range(8)) if is_load else {}
    with bench.gpu.occupied(MULTIPROCESSORS):
        if is_load:
            job = bench.load(range(8), place=10)
        else:
            job, contents = bench.store(range(8))
        at_pages = State.SCATTERING if is_load else State.GATHERING
        wait_for(lambda: [t.state for t in bench.runner._queue.running()] == 2 * [at_pages])
        waiting, began = bench.runner._queue.running(), bench.clock.now
        bench.clock.advance(deadline.for_nbytes(5 * bench.world.file_layout.file_nbytes))
        assert job not in bench.poll()
        assert bench.runner.num_threads_hung == (0 if protected else 2)
        assert bench.breaker.open is not (protected or is_load)
        bench.clock.now = began
    assert not bench.finish(job)[0].failed
    if not protected:
        return
    if not is_load:
        bench.poison(range(32))
        bench.wait_until_idle()
        bench.finish(bench.load(range(8), place=10))
    bench.wait_until_idle()
    assert [bench.world.pages(bench.blocks(10 + n)) for n in range(8)] == [*contents.values()]
    assert bench.statuses(loads=False) == bench.statuses(loads=True) == {Status.OK: 8}
    assert all(t.at_disk_since > t.started_at for t in waiting), "the disk's time begins anew"


@pytest.mark.parametrize(
    ("num_threads", "slot_nbytes", "num_lanes"), [(12, SLOT, 12), (5, 16 << 20, 4)]
)
@pytest.mark.parametrize("left", [0, pytest.param(1, id="control")])
def test_as_many_loads_as_io_threads_wait_for_a_multiprocessor_together_within_64_mib(
    sim, tmp_path, num_threads, slot_nbytes, num_lanes, left
):
    """Or each waits for the one before it, which may take a millisecond. With one left all of them end."""
    gpu = sim.torch.gpu("cuda:0")
    threads = {"num_slots": num_threads, "num_threads": num_threads}
    transport = make_transport([gpu.tensor(64, 4096)], tmp_path, slot_nbytes, **threads)
    assert transport._outside._device.num_lanes == num_lanes
    slots = [transport.new_slot(n) for n in range(num_threads)]
    sim.reset(1, 0.0)
    with gpu.occupied(MULTIPROCESSORS, left=left):
        loads = started(partial(transport.scatter, slot, 0, CHUNK) for slot in slots)
        wait_for(lambda: sim.calls("cuCtxPushCurrent_v2") >= num_threads)
        wait_for(lambda: sim.calls("cuEventSynchronize") == (num_threads if left else num_lanes))
        if left:
            end(loads)
        assert all(load.is_alive() for load in loads) is (left == 0)
    end(loads)
    transport.close()


@pytest.mark.parametrize("passes", [True, pytest.param(False, id="control")])
@pytest.mark.parametrize("part", [COPIES_OUT, MULTIPROCESSORS], ids=["stores", "loads"])
def test_copies_that_wait_for_a_busy_part_of_the_device_keep_none_that_needs_another(
    sim, make_pair, part, passes
):
    """Of those to the host two wait at their copy engine: the engine's own, of tokens, need it too."""
    pair = make_pair([(64, 4096)], num_slots=7)
    transport = pair.transports[0]
    *slots, last = *pair.slots[:1], *(transport.new_slot(n) for n in range(1, 7))
    if part == COPIES_OUT:
        num_waiting, needed = 2, COPIES_IN
        calls = [partial(transport.gather, CHUNK, slot, 0) for slot in slots]
        other = partial(transport.scatter, last, 0, CHUNK)
    else:
        num_waiting, needed = 6, COPIES_OUT
        calls = [partial(transport.scatter, slot, 0, CHUNK) for slot in slots]
        other = partial(transport.gather, CHUNK[:1], last, 0)  # one span needs no kernel
    sim.reset(1, 0.0)
    with pair.gpu.occupied(*([part] if passes else [part, needed])):
        waiting = started(calls)
        wait_for(lambda: sim.calls("cuCtxPushCurrent_v2") >= 6)
        wait_for(lambda: sim.calls("cuEventSynchronize") == num_waiting)
        (passing,) = started([other])
        wait_for(lambda: sim.calls("cuEventSynchronize") == num_waiting + 1)
        if passes:
            end([passing])
        assert passing.is_alive() is not passes
        assert all(thread.is_alive() for thread in waiting)
        assert sim.calls("cuEventSynchronize") == num_waiting + 1
    end([*waiting, passing])
    assert sim.calls("cuEventSynchronize") == 7


# --- what a chunk costs ------------------------------------------------------------------------------


def test_slots_are_registered_once_and_no_more_than_was_allowed(make_device, sim):
    gc.collect()  # pinned memory of another test that goes meanwhile would be counted here
    before = sim.registered
    bench = make_device(num_threads=2, num_slots=9)
    lanes = 8 * (2048 * 24 + bench.world.transport.slot_nbytes)
    live = sim.live(1) - lanes
    staging = 9 * bench.world.transport.slot_nbytes
    tables = 8 * 2048 * 24
    assert sim.registered - before == staging + tables
    calls = sim.calls("cuMemHostRegister_v2")
    slots = [bench.world.transport.new_slot(i) for i in range(9)]
    assert sim.calls("cuMemHostRegister_v2") == calls
    with pytest.raises(MemoryError):
        bench.world.transport.new_slot(9)
    assert all(slot.array.ctypes.data % 4096 == 0 for slot in slots)
    bench.world.transport.close()
    assert sim.registered == before
    assert sim.live(1) == live, "the engine's own is still there"


@contextlib.contextmanager
def captured(sim, gpu, stream=None):
    """Capture a graph meanwhile; raises SimError in the end if somebody has spoilt it."""
    stream = stream or gpu.stream
    with gpu.current():
        sim.call("cuStreamBeginCapture_v2", stream, 0)
    yield
    with gpu.current():
        sim.call("cuStreamEndCapture", stream, ctypes.byref(ctypes.c_void_p()))


def test_no_capture_of_the_engines_is_spoilt(make_device, sim, path):
    bench = make_device(num_threads=2)
    with captured(sim, bench.gpu):
        stored(bench, [1, 2, 3])
        assert not bench.finish(bench.load([1, 2, 3], place=9))[0].failed
        bench.wait_until_idle()


@pytest.mark.parametrize("relaxed", [True, pytest.param(False, id="control")])
def test_no_capture_is_spoilt_by_who_waits_for_the_engines_events(
    make_device, sim, monkeypatch, relaxed
):
    """It waits for the first when the capture begins, and for the second during it."""
    if not relaxed:
        monkeypatch.setattr(cuda.Driver, "relax", lambda self: 0)
    sim.reset(1, 0.0)
    bench = make_device(num_threads=2)
    go = threading.Event()
    bench.gpu.launch(lambda: go.wait(20))
    jobs = []
    for n in range(2):
        ready, _ = bench.pending_step(bench.blocks(n), n)
        jobs.append(n)
        bench.runner.submit_store(n, [bench.world.request(n, bench.blocks(n))], ready)
    wait_for(lambda: sim.calls("cuEventSynchronize") >= 1)
    side = bench.gpu.new_stream()
    spoilt = contextlib.nullcontext() if relaxed else pytest.raises(SimError, match="901")
    with spoilt, captured(sim, bench.gpu, side):
        go.set()
        bench.finish(*jobs)
        bench.wait_until_idle()
    assert (bench.statuses(loads=False) == {Status.OK: 2}) or not relaxed


@pytest.mark.parametrize("relaxed", [True, pytest.param(False, id="control")])
def test_no_capture_is_spoilt_by_memory_for_gds(sim, monkeypatch, relaxed):
    if not relaxed:
        monkeypatch.setattr(cuda.Driver, "relaxed", lambda self: contextlib.nullcontext())
    driver, gpu = cuda.Driver(0), sim.torch.gpu("cuda:0")
    refused = contextlib.nullcontext() if relaxed else pytest.raises(RuntimeError, match="900")
    spoilt = contextlib.nullcontext() if relaxed else pytest.raises(SimError, match="901")
    with spoilt, captured(sim, gpu), refused:
        driver.free(driver.allocate(4096))


# --- bytes ---------------------------------------------------------------------------------------------


class Pair:
    """The same pages behind the kernel and behind one copy of the driver's a span."""

    def __init__(self, sim, tmp_path, shapes, num_slots=1):
        self.gpu = sim.torch.gpu("cuda:0")
        self.tensors = [self.gpu.tensor(*shape) for shape in shapes]
        self.transports = []
        for way in PATHS:
            if way == "spans":
                sim.fail("cuModuleLoadData", 200)
            self.transports.append(make_transport(self.tensors, tmp_path, num_slots=num_slots))
            assert self.transports[-1]._outside._device.uses_kernel is (way == "kernel")
        self.slots = [transport.new_slot(0) for transport in self.transports]

    def gathered(self, table, base):
        found = []
        for transport, slot in zip(self.transports, self.slots, strict=True):
            slot.array[:] = 0x5A
            transport.gather(table, slot, base)
            found.append(bytes(slot.array))
            slot.array[:] = 0  # a late copy would be seen in the next round
        return found

    def scattered(self, table, base, data):
        found = []
        for transport, slot in zip(self.transports, self.slots, strict=True):
            for t in self.tensors:
                self.gpu.opened(t)[:] = 0xA5
            slot.array[:] = data
            transport.scatter(slot, base, table)
            slot.array[:] = 0
            found.append([self.gpu.opened(t).copy() for t in self.tensors])
        return found

    def close(self):
        for transport in self.transports:
            transport.close()


@pytest.fixture
def make_pair(sim, tmp_path):
    with contextlib.ExitStack() as stack:

        def make(shapes, **options):
            pair = Pair(sim, tmp_path, shapes, **options)
            stack.callback(pair.close)
            return pair

        yield make


def random_table(rng, shapes, num_spans):
    """Spans that follow each other in the slot, as a plan's do."""
    rows, place = [], int(rng.integers(0, 40))
    for _ in range(num_spans):
        tensor = int(rng.integers(len(shapes)))
        num_blocks, page, stride = shapes[tensor]
        block, nbytes = int(rng.integers(num_blocks)), int(rng.integers(1, page + 1))
        rows.append((tensor, block * stride + int(rng.integers(page - nbytes + 1)), place, nbytes))
        place += nbytes
    return np.array(rows, np.int64)


@pytest.mark.parametrize("seed", range(8))
def test_both_paths_give_the_same_bytes(make_pair, sim, seed):
    """Strided slices, odd lengths and offsets; holes; more pieces than a table has room for."""
    many = seed % 4 == 3
    sim.reset(seed, 0.02 if many else 0.001 * (seed % 2))
    rng = np.random.default_rng(seed)
    shapes = [(6000, 64, 100)] if many else [(16, 20000, 20480), (8, 333, 1000), (4, 8192, 8192)]
    pair = make_pair(shapes)
    for num_spans in (1, 2, 40, 6000 if many else 60):
        for t in pair.tensors:
            pair.gpu.opened(t)[:] = rng.integers(0, 256, t.shape)
        table = random_table(rng, shapes, num_spans)
        if num_spans == 40:
            table[3:, 2] += 100  # a hole
        kernel, single = pair.gathered(table, 4096)
        assert kernel == single
        for tensor, offset, place, nbytes in table.tolist():
            flat = pair.gpu.opened(pair.tensors[tensor])
            block, at = divmod(offset, shapes[tensor][2])
            assert kernel[4096 + place :][:nbytes] == flat[block, at : at + nbytes].tobytes()
    # Targets must not overlap: each page but its first bytes, in any order.
    rows, place = [], 7
    for tensor, (num_blocks, page, stride) in enumerate(shapes):
        for block in rng.permutation(num_blocks).tolist():
            rows.append((tensor, block * stride + 3, place, page - 3))
            place += page - 3
    data = rng.integers(0, 256, SLOT, np.uint8)
    for found in pair.scattered(np.array(rows, np.int64), 4096, data):
        for tensor, offset, place, nbytes in rows:
            page = found[tensor][offset // shapes[tensor][2]]
            assert (page[:3] == 0xA5).all()
            assert (page[3:] == data[4096 + place : 4096 + place + nbytes]).all()


def test_pages_beyond_4_gib_of_a_tensor(make_pair, sim):
    """A sparse tensor: only the pages that are touched are memory."""
    page = 65536
    num_blocks = (9 << 30) // page
    pair = make_pair([(num_blocks, page)])
    edges = [0, (2 << 30) // page - 1, (2 << 30) // page, (4 << 30) // page, num_blocks - 1]
    opened = pair.gpu.opened(pair.tensors[0])
    rng = np.random.default_rng(1)
    for block in edges:
        opened[block] = rng.integers(0, 256, page)
    table = np.array(
        [(0, b * page + 8, i * (page - 16), page - 16) for i, b in enumerate(edges)], np.int64
    )
    wanted = b"".join(opened[b, 8:-8].tobytes() for b in edges)
    kernel, single = pair.gathered(table, 4096)
    assert kernel == single
    assert kernel[4096 : 4096 + len(wanted)] == wanted
    slot = pair.slots[0]
    slot.array[4096 : 4096 + len(wanted)] = np.frombuffer(wanted, np.uint8)[::-1]
    pair.transports[0].scatter(slot, 4096, table)
    found = b"".join(opened[b, 8:-8].tobytes() for b in edges)
    assert found == wanted[::-1]
    assert not opened[edges[1] - 1].any()
    assert not opened[edges[3] + 1].any()


# --- what the driver refuses -------------------------------------------------------------------------------

AT_START = [
    *("cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2"),
    *("cuStreamCreate", "cuEventCreate", "cuMemAlloc_v2", "cuMemHostRegister_v2"),
    *("cuMemcpyHtoDAsync_v2", "cuLaunchKernel", "cuEventSynchronize"),
]


@pytest.mark.parametrize("name", AT_START)
def test_an_error_at_the_start_is_one_sentence_and_keeps_nothing(sim, tmp_path, name):
    gpu = sim.torch.gpu("cuda:0")
    tensors = [gpu.tensor(8, 4096)]
    live, registered = sim.live(0), sim.registered
    sim.fail(name, 999)
    with pytest.raises(ConfigError, match=f"cannot be copied.*{name} answers CUDA error 999"):
        make_transport(tensors, tmp_path, num_slots=2)
    gc.collect()
    assert sim.registered <= registered, "less: what another test left has gone"
    assert sim.live(0) <= live


def test_without_libcuda_there_is_one_sentence(sim, tmp_path, monkeypatch):
    gpu = sim.torch.gpu("cuda:0")
    monkeypatch.setattr(cuda, "LIBCUDA", "libcuda.so.no-such")
    with pytest.raises(ConfigError, match="libcuda cannot be opened"):
        make_transport([gpu.tensor(8, 4096)], tmp_path)


def test_a_driver_that_copies_wrongly_is_not_used(sim, tmp_path, monkeypatch):
    """Each copy to the device brings its first byte wrong."""
    real = native_module.copy_spans

    def wrong(pages, table, slot, base, to_slot):
        real(pages, table, slot, base, to_slot)
        if to_slot:
            slot[base] ^= 1

    monkeypatch.setattr(native_module, "copy_spans", wrong)
    gpu = sim.torch.gpu("cuda:0")
    with pytest.raises(ConfigError, match="gives other bytes"):
        make_transport([gpu.tensor(8, 4096)], tmp_path)


TABLE_NBYTES, TRIAL_NBYTES = 2048 * 24, 3 * (256 << 10)


@pytest.mark.parametrize(("num_lanes", "tried"), [(0, False), (0, True), (1, True), (3, True)])
def test_without_memory_for_a_buffer_there_are_fewer_lanes_or_none(
    sim, tmp_path, num_lanes, tried, caplog
):
    """Without memory for a trial the path is taken all the same."""
    gpu = sim.torch.gpu("cuda:0")
    tensors = [gpu.tensor(8, 4096) for _ in range(2)]
    sim.limit(0, num_lanes * (SLOT + TABLE_NBYTES) + (TRIAL_NBYTES if tried else 4096))
    transport = make_transport(tensors, tmp_path, num_slots=2)
    device = transport._outside._device
    assert (device.uses_kernel, device.num_lanes) == (num_lanes > 0, num_lanes or 8)
    assert ("copies are not tried at the start" in caplog.text) is not tried
    for value, tensor in enumerate(tensors):
        gpu.opened(tensor)[:] = value + 3
    slot = transport.new_slot(0)
    table = np.array([(0, 0, 0, 4096), (1, 8192, 4096, 4096)])
    transport.gather(table, slot, 4096)
    assert (slot.array[4096 : 4096 + 8192].reshape(2, -1) == [[3], [4]]).all()
    transport.close()


IN_A_COPY = [
    *("cuCtxPushCurrent_v2", "cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"),
    *("cuLaunchKernel", "cuEventRecord", "cuEventSynchronize"),
]


@pytest.mark.parametrize("times", [1, 3, 7])
@pytest.mark.parametrize("name", IN_A_COPY)
def test_errors_in_copies_cost_no_byte_and_no_later_chunk(make_device, sim, name, times):
    """A copy is tried again, and what was launched before the error is over by then."""
    bench = make_device(num_threads=2)
    contents = stored(bench, [0, 1, 2])
    sim.reset(times, LATE_S)
    for _ in range(times):
        sim.fail(name, 999)
    job, more = bench.store([3, 4, 5], place=5, seed=9)
    bench.finish(job)
    bench.poison(range(20, 32))
    bench.wait_until_idle()
    for n, content in more.items():
        if os.path.exists(bench.world.path(n)):
            assert read_by_hand(bench.world.path(n)).payload[: len(content)] == content
            contents[n] = content
    assert len(contents) == 6 or times > 1
    sim.reset(times, LATE_S)
    for _ in range(times):
        sim.fail(name, 999)
    (result,) = bench.finish(bench.load(sorted(contents), place=20))
    bench.wait_until_idle()
    bad = {file.key_hash[-1] for file in result.bad}
    assert not bad or times > 1
    for i, n in enumerate(sorted(contents)):
        assert n in bad or bench.world.pages(bench.blocks(20 + i)) == contents[n]
    sim.reset(times, LATE_S)
    assert not bench.finish(bench.load(sorted(contents), place=30))[0].failed
    for i, n in enumerate(sorted(contents)):
        assert bench.world.pages(bench.blocks(30 + i)) == contents[n]
    bench.wait_until_idle()


def test_a_slot_on_the_device_is_copied_by_the_kernel_alone(sim, make_pair):
    pair = make_pair([(64, 4096)])
    pages, gpu = pair.transports[0]._pages, pair.gpu
    address = gpu.allocate(SLOT)
    there = np.frombuffer((ctypes.c_uint8 * SLOT).from_address(sim.open_address(address)), np.uint8)
    opened = gpu.opened(pair.tensors[0])
    opened[:] = np.random.default_rng(1).integers(0, 256, opened.shape)
    order = np.random.default_rng(2).permutation(64)
    table = np.array([(0, 4096 * b, 4096 * i, 4096) for i, b in enumerate(order)], np.int64)
    sim.reset(1, LATE_S)
    native_module.copy_spans(pages, table, (address, SLOT), 8192, True)
    assert (there[8192 : 8192 + 64 * 4096].reshape(64, -1) == opened[order]).all()
    before = opened.copy()
    opened[:] = 0
    native_module.copy_spans(pages, table, (address, SLOT), 8192, False)
    assert (opened == before).all()
    assert sim.calls("cuMemcpyDtoHAsync_v2") == 0
    for slot, base in (((address, SLOT), SLOT - 4096), ((0, SLOT), 0), ((address, -1), 0)):
        with pytest.raises(ValueError, match=r"outside|a slot on a device"):
            native_module.copy_spans(pages, table, slot, base, True)
    host = native_module.Pages([np.zeros(4096, np.uint8)])
    with pytest.raises(ValueError, match="pages that are not"):
        native_module.copy_spans(host, table[:1], (address, SLOT), 0, True)


def test_a_lane_that_cannot_be_waited_for_is_used_no_more_and_keeps_its_memory(sim):
    gpu = sim.torch.gpu("cuda:0")
    device = native_module.Device(sim.path, 0, SLOT, 1)
    pages = native_module.Pages([(gpu.allocate(8192), 8192)], device)
    slot = np.zeros(SLOT, np.uint8)
    device.register(slot)
    table = np.array([(0, 0, 0, 4096), (0, 4096, 4096, 4096)], np.int64)
    native_module.copy_spans(pages, table, slot, 0, True)
    sim.fail("cuEventSynchronize", 999)
    sim.fail("cuStreamSynchronize", 999)
    with pytest.raises(RuntimeError, match="999"):
        native_module.copy_spans(pages, table, slot, 0, True)
    live = sim.live(0)
    with pytest.raises(RuntimeError, match="given up"):
        native_module.copy_spans(pages, table, slot, 0, True)
    wait_for(lambda: not sim.busy)  # or what is late runs into another test
    device.close()
    assert sim.live(0) == live


@pytest.mark.parametrize("code", [700, 719])
def test_a_device_that_is_lost_costs_chunks_and_no_thread(make_device, sim, code):
    bench = make_device(num_threads=2)
    stored(bench, [0, 1, 2])
    before = [bench.world.pages(bench.blocks(10 + n)) for n in range(3)]
    sim.lose(1, code)
    bench.runner.submit_load(
        50, [bench.world.request(n, bench.blocks(10 + n)) for n in range(3)], None
    )
    bench.runner.submit_store(51, [bench.world.request(8, bench.blocks(0))], None)
    load, _ = bench.finish(50, 51)
    bench.wait_until_idle()
    assert load.failed
    assert len(load.bad) == 3
    assert [bench.world.pages(bench.blocks(10 + n)) for n in range(3)] == before
    assert len(bench.world.chunk_files()) == 3, "nothing was stored from pages that nobody can read"
    sim.reset(1, 0.0)


# --- the simulation: each misuse has a name ----------------------------------------------------------


def copy_to_device(sim, gpu, *, to=None, source=None, nbytes=4096, stream=False):
    with gpu.current(), contextlib.suppress(SimError):
        sim.call(
            "cuMemcpyHtoDAsync_v2",
            ctypes.c_uint64(to or gpu.allocate(4096)),
            ctypes.c_void_p(source or sim.pinned.data_ptr()),
            ctypes.c_size_t(nbytes),
            gpu.stream if stream is False else stream,
        )


def freed(gpu):
    address = gpu.allocate(4096)
    gpu.free(address)
    return address


MISUSES = {
    "the host touched device memory": lambda sim, gpu, other: gpu.tensor(2, 4096)[0, 0].item(),
    "freed memory": lambda sim, gpu, other: copy_to_device(sim, gpu, to=freed(gpu)),
    "beyond an allocation": lambda sim, gpu, other: copy_to_device(sim, gpu, nbytes=4097),
    "unregistered host memory": lambda sim, gpu, other: copy_to_device(
        sim, gpu, source=np.zeros(4096, np.uint8).ctypes.data
    ),
    "a stream of another context": lambda sim, gpu, other: copy_to_device(
        sim, gpu, stream=other.stream
    ),
    "on the default stream": lambda sim, gpu, other: copy_to_device(sim, gpu, stream=None),
    "no current context": lambda sim, gpu, other: end(
        started([partial(sim.lib.cuStreamSynchronize, gpu.stream)])
    ),
    "memory of another device": lambda sim, gpu, other: copy_to_device(
        sim, gpu, to=other.allocate(4096)
    ),
}


@pytest.mark.parametrize("words", MISUSES)
def test_negative_control_a_misuse_is_noted_by_its_name(sim, words):
    sim.pinned = sim.torch.pinned(8192)
    assert sim.misuses == []
    MISUSES[words](sim, sim.torch.gpu("cuda:0"), sim.torch.gpu("cuda:1"))
    wait_for(lambda: not sim.busy)
    found = sim.misuses
    sim.reset(1, 0.0)
    assert any(words in misuse for misuse in found), found


# --- the end ------------------------------------------------------------------------------------------


@pytest.fixture
def mover(sim, tmp_path):
    """A Mover with 4 stored chunks, and a lane for each I/O thread; `new` are as many that are not stored."""
    for name in ("tmp", "chunks"):
        (tmp_path / name).mkdir()
    layout = FileLayout(4, (4096,), bytes(16))
    config = StoreConfig(
        root=str(tmp_path), io_threads=2, direct_io="off", staging_bytes=16 * layout.file_nbytes
    )
    directory = NamespaceDir(str(tmp_path), b"end" * 8, 0o700, 0o600)
    tensor = sim.torch.gpu("cuda").tensor(16, 4096)
    made = Mover(config, directory, [tensor], {0: layout})
    assert made._transport._outside._device.num_lanes == config.io_threads
    made.tensor = tensor
    plan = plan_job([GroupLayout.of(0, 4, [(0, 4096)])], [4096], [4], list(range(16)), [16], [0])
    made.moves, made.new = (
        [FileMove(FileId(b"%s %027d" % (name, i), 0), part) for i, part in enumerate(plan.chunks)]
        for name in (b"here", b"none")
    )
    made.store(1, made.moves)
    wait_for(lambda: (made.poll(), made.idle)[1])
    yield made
    wait_for(
        lambda: not [t for t in threading.enumerate() if t.name in ("fskv-start-up", "closing")]
    )


@pytest.mark.parametrize("is_load", [True, False])
@pytest.mark.parametrize("bounded", [True, pytest.param(False, id="control")])
def test_a_gpu_that_answers_no_more_does_not_keep_the_engine_from_ending(
    sim, mover, monkeypatch, caplog, is_load, bounded
):
    monkeypatch.setattr(mover_module, "_DEVICE_S", 0.3)
    if not bounded:
        monkeypatch.setattr(mover_module, "call_with_deadline", lambda call, *_: call())
    copy = f"cuMemcpy{'HtoD' if is_load else 'DtoH'}Async_v2"
    before = sim.calls(copy) + sim.calls("cuEventSynchronize")
    with sim.torch.gpu("cuda").occupied():
        (mover.load if is_load else mover.store)(2, mover.moves if is_load else mover.new)
        wait_for(lambda: sim.calls(copy) + sim.calls("cuEventSynchronize") > before)
        ends = threading.Thread(target=mover.close, args=(0.1,), name="closing")
        ends.start()
        ends.join(5 if bounded else 1)
        assert ends.is_alive() == (not bounded)
    assert ("shutdown: the GPU did not end its copies within 0.4 s" in caplog.text) == bounded
