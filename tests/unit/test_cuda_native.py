"""The chunk path on CUDA outside the interpreter, and the Python path beside it, over the simulated driver.

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

import numpy as np
import pytest
from cuda_sim import Gpu, SimError, compiled_copy, device_world, on_simulation, simulation
from test_jobs import Bench
from world import damage, read_by_hand, returns_in_time, wait_for

from fskv.config import StoreConfig
from fskv.data_path.job import FileMove, NativeEvent
from fskv.format.chunk_file import FileLayout
from fskv.offload import mover as mover_module
from fskv.offload.mover import Mover
from fskv.plan.spans import GroupLayout, plan_job
from fskv.root.root import NamespaceDir
from fskv.transports import cuda, kernels
from fskv.transports.host import HostTransport
from fskv.transports.protocol import OwnSlot
from fskv.types import FileId, Status

native_module = pytest.importorskip("fskv._native", reason="the C extension was not built")

SLOT = 1 << 20
LATE_S = 0.004  # a stream may be so late


# The copy kernel, the driver's batches, one copy of the driver's a span, or Python's path.
PATHS = ["kernel", "batches", "batches of CUDA 12", "spans", "python"]
VERSIONS = {"batches of CUDA 12": 12080, "spans": 12070}  # of the driver; else 13.0


@pytest.fixture
def sim(monkeypatch, request):
    path = getattr(request.node, "callspec", None) and request.node.callspec.params.get("path")
    sim = simulation(version=VERSIONS.get(path, 13000))
    sim.reset(1, LATE_S)
    sim.torch = on_simulation(monkeypatch, sim)
    yield sim
    sim.reset(1, 0.0)


def closes_cleanly(sim):
    assert sim.misuses == []


class DeviceBench(Bench):
    """Its pages are on a simulated device; tests look at them from beside."""

    def __init__(
        self, make_world, sim, *, index=1, native=True, root=None, num_slots=40, **options
    ):
        self.sim, self.gpu = sim, sim.torch.gpu(f"cuda:{index}")
        place = {"root": root} if root else {}
        world = device_world(
            make_world, self.gpu, native=native, num_slots=num_slots, num_blocks=256, **place
        )
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
    closes_cleanly(sim)


def refuse(*_):
    raise RuntimeError("a kernel with surprises")


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    """One of PATHS, as options of a DeviceBench."""
    if request.param not in ("kernel", "python"):
        monkeypatch.setattr(kernels, "compiled_copy", refuse)
    return {"native": request.param != "python"}


# --- order, through a runner ----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_stores_and_loads_are_between_the_steps_of_the_engine(make_device, sim, path, seed):
    sim.reset(seed, LATE_S * seed)
    bench = make_device(num_threads=3, **path)
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
    sim.reset(5, 0.2)
    bench = make_device(num_threads=4)
    sim.reset(5, 0.0)
    job, _ = bench.store(list(range(4)))
    bench.finish(job)
    bench.wait_until_idle()
    for late in (0.0, 0.05, 0.2):
        sim.reset(6, late)
        load = bench.load(list(range(4)), place=20)
        time.sleep(late / 4)
        returns_in_time(lambda load=load: bench.runner.wait([load]) or 1)
        bench.poison(range(80, 96))
        bench.finish(load)
        bench.wait_until_idle()
        time.sleep(late / 2)
        assert all(bench.poisoned(20 + i) for i in range(4))


def test_a_disk_that_hangs_holds_no_lane_and_no_page(make_device, sim, monkeypatch):
    """More reads hang than there are lanes, and chunks are still copied."""
    bench = make_device(num_threads=6, num_slots=40)
    job, contents = bench.store(list(range(12)))
    bench.finish(job)
    bench.wait_until_idle()
    released, get = threading.Event(), bench.world.store.get
    for n in range(5):
        damage(bench.world.path(n), bench.world.base + 70_000)  # these are Python's

    def hang(*arguments):
        released.wait(30)
        return get(*arguments)

    monkeypatch.setattr(bench.world.store, "get", hang)
    hung = bench.load(list(range(5)), place=20)
    good = bench.load(list(range(5, 12)), place=30)
    assert not bench.finish(good)[0].failed
    for n in range(5, 12):
        assert bench.world.pages(bench.blocks(25 + n)) == contents[n]
    bench.clock.advance(100)
    assert bench.finish(hung)[0].failed
    assert all(bench.poisoned(20 + i) for i in range(5))
    wait_for(lambda: bench.poll() is not None and bench.runner.num_threads_hung >= 1)
    released.set()
    bench.wait_until_idle()
    assert all(bench.poisoned(20 + i) for i in range(5))


def test_two_ranks_on_two_devices_touch_only_their_own(make_device, sim, tmp_path):
    benches = [make_device(index=i, root=tmp_path / f"kv{i}", num_threads=3) for i in (0, 1)]
    jobs = [bench.store(list(range(6)), seed=40 * i) for i, bench in enumerate(benches)]
    for bench, (job, _) in zip(benches, jobs, strict=True):
        bench.finish(job)
    for bench, (_, contents) in zip(benches, jobs, strict=True):
        bench.wait_until_idle()
        bench.finish(bench.load(list(range(6)), place=20))
        for n, content in contents.items():
            assert bench.world.pages(bench.blocks(20 + n)) == content


def test_a_rank_makes_no_context_on_another_gpu(make_device, sim, path):
    bench = make_device(index=1, **path)
    job, _ = bench.store([1, 2])
    bench.finish(job)
    bench.wait_until_idle()
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
            transport.scatter(slot, 4096, table, None)
            slot.array[:] = 0
            there = np.concatenate([opened[t][at // page] for t, at in rows])
            transport.gather(table, slot, 4096, None)
            here = slot.array[4096 : 4096 + nbytes].copy()
            if not np.array_equal(there, data) or not np.array_equal(here, data):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(n,), daemon=True) for n in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []


def test_a_device_is_given_up_when_no_copy_runs(sim, make_pair):
    pair = make_pair([(8, 4096)] * 2)
    transport, slot = pair.transports[0], pair.slots[0]
    table = np.array([(0, 0, 0, 4096), (1, 0, 4096, 4096)], np.int64)
    for tensor in pair.tensors:
        pair.gpu.opened(tensor)[:] = 3
    sim.reset()
    sim.hold(True)
    copied = []
    copy = threading.Thread(
        target=lambda: copied.append(
            transport._outside.copy(table, slot.array, 0, None, to_slot=True)
        )
    )
    copy.start()
    wait_for(lambda: sim.calls("cuEventSynchronize") == 1)
    close = threading.Thread(target=transport._outside.close)
    close.start()
    close.join(0.1)
    waited = close.is_alive()
    sim.hold(False)
    close.join(20)
    copy.join(20)
    assert waited
    assert copied == [True]
    assert (slot.array[:8192] == 3).all()
    assert not transport._outside.copy(table, slot.array, 0, None, to_slot=True), "it is given up"


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

    threads = [threading.Thread(target=register, args=[b], daemon=True) for b in buffers]
    sim.hold_registering(True)
    for thread in threads:
        thread.start()
    wait_for(lambda: sim.registered == before + 6 * SLOT)
    if closed:
        returns_in_time(lambda: device.close() or 1)
    sim.hold_registering(False)
    for thread in threads:
        thread.join(20)
    assert refused == (["the device was given up"] * 6 if closed else [])
    assert sim.registered - before == (-2048 * 24 if closed else 6 * SLOT)
    if not closed:
        device.close()
        assert sim.registered == before - 2048 * 24
    for buffer in buffers:
        buffer.close()  # BufferError if somebody still refers to it
    assert sim.misuses == []


@pytest.mark.parametrize("path", ["batches", "spans", "kernel"])
def test_nothing_runs_after_a_copy_that_failed(sim, make_pair, monkeypatch, path):
    if path != "kernel":
        monkeypatch.setattr(kernels, "compiled_copy", refuse)
    pair = make_pair([(8, 4096)] * 2)
    outside, slot = pair.transports[0]._outside, pair.slots[0]
    table = np.array([(t, b * 4096, (2 * b + t) * 4096, 4096) for b in range(8) for t in (0, 1)])
    for to_slot, name in (
        (True, "cuMemcpyDtoHAsync_v2"),
        (False, "cuMemcpyHtoDAsync_v2"),
        (False, "cuEventRecord"),
        (True, "cuEventSynchronize"),
    ):
        for seed in range(4):
            sim.reset(seed, 0.2)
            sim.fail(name, 999, after=1 if "Memcpy" in name and path != "kernel" else 0)
            if path == "batches":  # then one by one, until that fails
                sim.fail("cuMemcpyBatchAsync_v2", 719)
            assert not outside.copy(table, slot.array, 4096, None, to_slot=to_slot)
            assert not sim.busy, "the slot and the pages are somebody else's now"


# --- what a chunk costs ------------------------------------------------------------------------------


def test_a_chunk_is_one_kernel_and_one_copy_and_allocates_nothing(make_device, sim):
    bench = make_device(num_threads=1)
    job, _ = bench.store([0])
    bench.finish(job)
    bench.wait_until_idle()
    sim.reset(1, 0.0)
    job, _ = bench.store(list(range(1, 6)), place=3)
    bench.finish(job)
    bench.wait_until_idle()
    bench.finish(bench.load(list(range(1, 6)), place=20))
    bench.wait_until_idle()
    assert sim.calls("cuLaunchKernel") == 10
    assert sim.calls("cuMemcpyDtoHAsync_v2") == 5
    assert sim.calls("cuMemcpyHtoDAsync_v2") == 15, "a table each, and a chunk that is loaded"
    assert sim.calls("cuEventSynchronize") == 10
    for name in ("cuMemAlloc_v2", "cuMemHostRegister_v2", "cuStreamCreate", "cuStreamSynchronize"):
        assert sim.calls(name) == 0, name
    assert sim.spinning == 0


def test_slots_are_registered_once_and_no_more_than_was_allowed(make_device, sim):
    gc.collect()  # pinned memory of another test that goes meanwhile would be counted here
    before = sim.registered
    bench = make_device(num_threads=2, num_slots=9)
    lanes = 4 * (2048 * 24 + bench.world.transport.slot_nbytes)
    live = sim.live(1) - lanes
    staging = 9 * bench.world.transport.slot_nbytes
    tables = 4 * 2048 * 24
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
    bench = make_device(num_threads=2, **path)

    def moved(chunks):
        job, _ = bench.store(chunks)
        bench.finish(job)
        bench.wait_until_idle()
        assert not bench.finish(bench.load(chunks, place=9))[0].failed
        bench.wait_until_idle()

    moved([4, 5, 6])  # slots of Python's path are torch's, which relaxes captures itself
    with captured(sim, bench.gpu):
        moved([1, 2, 3])


@pytest.mark.parametrize("relaxed", [True, pytest.param(False, id="control")])
def test_no_capture_is_spoilt_by_who_waits_for_the_engines_events(
    make_device, sim, monkeypatch, path, relaxed
):
    """It waits for the first when the capture begins, and for the second during it."""
    if not relaxed:
        monkeypatch.setattr(cuda.Driver, "relax", lambda self: 0)
    sim.reset(1, 0.0)
    bench = make_device(num_threads=2, **path)
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


def test_negative_control_python_s_copies_spoil_a_capture_that_nobody_relaxes(
    make_world, sim, monkeypatch
):
    # Not of make_device: after the error a copy may be from memory that could not be registered.
    monkeypatch.setattr(cuda.Driver, "relax", lambda self: 0)
    with contextlib.closing(DeviceBench(make_world, sim, num_threads=2, native=False)) as bench:
        job, _ = bench.store([1, 2])
        bench.finish(job)
        bench.wait_until_idle()

        def load():
            with captured(sim, bench.gpu):
                bench.finish(bench.load([1, 2], place=9))
                bench.wait_until_idle()

        with pytest.raises(SimError, match="901"):
            load()


def test_negative_control_a_capture_is_spoilt_by_an_allocation(sim):
    gpu = sim.torch.gpu("cuda:0")
    with gpu.current():
        sim.call("cuStreamBeginCapture_v2", gpu.stream, 0)
    with pytest.raises(SimError, match="900"):
        gpu.allocate(4096)
    with gpu.current(), pytest.raises(SimError, match="901"):
        sim.call("cuStreamEndCapture", gpu.stream, ctypes.byref(ctypes.c_void_p()))


# --- bytes ---------------------------------------------------------------------------------------------


class Pair:
    """The same pages behind the path outside the interpreter and behind Python's."""

    def __init__(self, sim, tmp_path, shapes, num_slots=1):
        self.gpu = sim.torch.gpu("cuda:0")
        self.tensors = [self.gpu.tensor(*shape) for shape in shapes]
        self.transports = [
            HostTransport(
                self.tensors,
                SLOT,
                probe_dir=str(tmp_path),
                direct_io="off",
                native=native,
                num_slots=num_slots if native else None,
            )
            for native in (True, False)
        ]
        for transport in self.transports:
            transport.enter_thread()
        self.slots = [transport.new_slot(0) for transport in self.transports]

    def gathered(self, table, base):
        found = []
        for transport, slot in zip(self.transports, self.slots, strict=True):
            slot.array[:] = 0x5A
            transport.gather(table, slot, base, None)
            found.append(bytes(slot.array))
            slot.array[:] = 0  # a late copy would be seen in the next round
        return found

    def scattered(self, table, base, data):
        found = []
        for t in self.tensors:
            self.gpu.opened(t)[:] = 0xA5
        for transport, slot in zip(self.transports, self.slots, strict=True):
            slot.array[:] = data
            transport.scatter(slot, base, table, None)
            slot.array[:] = 0
            found.append([self.gpu.opened(t).copy() for t in self.tensors])
            for t in self.tensors:
                self.gpu.opened(t)[:] = 0xA5
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
    closes_cleanly(sim)


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
    """Strided slices, odd lengths and offsets; more pieces than a table takes; holes."""
    sim.reset(seed, 0.001 * (seed % 2))
    rng = np.random.default_rng(seed)
    shapes = [(16, 20000, 20480), (8, 333, 1000), (4, 8192, 8192)]
    pair = make_pair(shapes)
    for round_number in range(4):
        for t in pair.tensors:
            pair.gpu.opened(t)[:] = rng.integers(0, 256, t.shape)
        table = random_table(rng, shapes, (1, 2, 40, 60)[round_number])
        if round_number == 2:
            table[3:, 2] += 100  # a hole
        outside, python = pair.gathered(table, 4096)
        assert outside == python
        for tensor, offset, place, nbytes in table.tolist():
            flat = pair.gpu.opened(pair.tensors[tensor])
            block, at = divmod(offset, shapes[tensor][2])
            assert outside[4096 + place :][:nbytes] == flat[block, at : at + nbytes].tobytes()
        # Targets must not overlap: whole pages of different blocks.
        blocks = rng.permutation(8)[:5]
        whole = np.array(
            [(1, b * 1000, 7 + i * 333, 333) for i, b in enumerate(blocks)]
            + [
                (0, int(b) * 20480 + 3, 7 + 5 * 333 + i * 19000, 19000)
                for i, b in enumerate(blocks)
            ],
            np.int64,
        )
        data = rng.integers(0, 256, SLOT, np.uint8)
        first, second = pair.scattered(whole, 4096, data)
        for a, b in zip(first, second, strict=True):
            assert (a == b).all()
        assert (first[1][blocks[0]] == data[4096 + 7 : 4096 + 7 + 333]).all()


def test_a_chunk_of_more_pieces_than_a_table_has_room_for(make_pair, sim):
    sim.reset(3, 0.02)
    shapes = [(6000, 64, 100)]
    pair = make_pair(shapes)
    rng = np.random.default_rng(0)
    pair.gpu.opened(pair.tensors[0])[:] = rng.integers(0, 256, (6000, 64))
    order = rng.permutation(6000)
    table = np.array([(0, int(b) * 100, i * 64, 64) for i, b in enumerate(order)], np.int64)
    wanted = pair.gpu.opened(pair.tensors[0])[order].tobytes()
    outside, python = pair.gathered(table, 8192)
    assert outside == python
    assert outside[8192 : 8192 + 6000 * 64] == wanted
    data = rng.integers(0, 256, SLOT, np.uint8)
    first, second = pair.scattered(table, 8192, data)
    assert (first[0] == second[0]).all()
    assert first[0][order].tobytes() == data[8192 : 8192 + 6000 * 64].tobytes()


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
    outside, python = pair.gathered(table, 4096)
    assert outside == python
    assert outside[4096 : 4096 + len(wanted)] == wanted
    slot = pair.slots[0]
    slot.array[4096 : 4096 + len(wanted)] = np.frombuffer(wanted, np.uint8)[::-1]
    pair.transports[0].scatter(slot, 4096, table, None)
    found = b"".join(opened[b, 8:-8].tobytes() for b in edges)
    assert found == wanted[::-1]
    assert not opened[edges[1] - 1].any()
    assert not opened[edges[3] + 1].any()


def test_a_load_that_was_given_up_before_it_was_read_is_not_parked(make_device):
    """Nobody would take it back: it would keep its slot."""
    bench = make_device(num_threads=1)
    job, _ = bench.store([1])
    bench.finish(job)
    bench.wait_until_idle()
    queue, guard = native_module.Queue(1), native_module.Guard()
    own = OwnSlot(bench.runner._slots.take())
    move = bench.world.request(1, bench.blocks(9))
    for abandoned in (False, True):
        owner = object()
        transfer = bench.world.store.transfer(owner, move.file, move.plan, guard, is_load=True)
        transfer.use_slot(bench.runner._slots.take())
        transfer.hold()
        if abandoned:
            guard.abandon()
        queue.push([transfer])
        thread = threading.Thread(target=lambda: queue.take(own), daemon=True)
        thread.start()
        events = []
        wait_for(lambda events=events: events.extend(queue.take_events()) or events)
        kinds = [NativeEvent(kind) for _, kind, _ in events]
        assert kinds == [NativeEvent.ABANDONED if abandoned else NativeEvent.READ]
        assert queue.num_parked == 1
    queue.close()
    assert queue.num_parked == 0


# --- what the driver refuses -------------------------------------------------------------------------------

AT_START = [
    "cuInit",
    "cuDeviceGet",
    "cuDevicePrimaryCtxRetain",
    "cuCtxPushCurrent_v2",
    "cuStreamCreate",
    "cuEventCreate",
    "cuMemAlloc_v2",
    "cuMemHostRegister_v2",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuMemcpyHtoDAsync_v2",
    "cuLaunchKernel",
    "cuEventSynchronize",
]


@pytest.mark.parametrize("name", AT_START)
def test_an_error_at_the_start_leaves_the_python_path(sim, tmp_path, caplog, name):
    gpu = sim.torch.gpu("cuda:0")
    tensors = [gpu.tensor(8, 4096)]
    gpu.opened(tensors[0])[:] = 9
    live, registered = sim.live(0), sim.registered
    # torch's own calls come first.
    sim.fail(name, 999)
    transport = HostTransport(tensors, SLOT, probe_dir=str(tmp_path), direct_io="off", num_slots=2)
    said = [r.message for r in caplog.records if "chunks are copied in Python" in r.message]
    assert len(said) == 1
    assert f"{name} answers CUDA error 999" in said[0]
    assert "in Python" in transport.description
    transport.enter_thread()
    transport.close()
    assert sim.registered <= registered, "less: what another test left has gone"
    slot = HostTransport(
        tensors, SLOT, probe_dir=str(tmp_path), direct_io="off", native=False
    ).new_slot(0)
    transport.gather(np.array([(0, 0, 0, 4096), (0, 8192, 4096, 4096)]), slot, 4096, None)
    assert (slot.array[4096 : 4096 + 8192] == 9).all()
    transport.close()
    assert sim.live(0) - live < 4 * SLOT + 4096 * 4096
    closes_cleanly(sim)


def test_without_libcuda_the_python_path_is_taken(sim, tmp_path, caplog, monkeypatch):
    from fskv.transports import cuda

    gpu = sim.torch.gpu("cuda:0")
    monkeypatch.setattr(cuda, "LIBCUDA", "libcuda.so.no-such")
    transport = HostTransport([gpu.tensor(8, 4096)], SLOT, probe_dir=str(tmp_path), direct_io="off")
    assert "libcuda cannot be opened" in caplog.text
    assert "in Python" in transport.description


def test_a_driver_that_copies_wrongly_is_not_used(sim, tmp_path, caplog, monkeypatch):
    """A kernel of another Triton, for one: its pieces are half as long as it is told."""
    wrong = compiled_copy()._replace(piece_nbytes=16384)
    monkeypatch.setattr(kernels, "compiled_copy", lambda _: wrong)
    gpu = sim.torch.gpu("cuda:0")
    transport = HostTransport([gpu.tensor(8, 4096)], SLOT, probe_dir=str(tmp_path), direct_io="off")
    assert "gives other bytes" in caplog.text
    assert "in Python" in transport.description
    assert all("a piece of" in misuse for misuse in sim.misuses)


TABLE_NBYTES, TRIAL_NBYTES = 2048 * 24, 256 << 10


@pytest.mark.parametrize("num_lanes", [0, 1, 3])
def test_without_memory_for_a_buffer_there_are_fewer_lanes_or_none(
    sim, tmp_path, num_lanes, caplog
):
    gpu = sim.torch.gpu("cuda:0")
    tensors = [gpu.tensor(8, 4096) for _ in range(2)]
    sim.limit(0, num_lanes * (SLOT + TABLE_NBYTES) + TRIAL_NBYTES)
    transport = HostTransport(tensors, SLOT, probe_dir=str(tmp_path), direct_io="off", num_slots=2)
    device = transport._outside._device
    assert (device.uses_kernel, device.num_lanes) == (num_lanes > 0, num_lanes or 4)
    for value, tensor in enumerate(tensors):
        gpu.opened(tensor)[:] = value + 3
    slot = transport.new_slot(0)
    table = np.array([(0, 0, 0, 4096), (1, 8192, 4096, 4096)])
    transport.gather(table, slot, 4096, None)
    assert (slot.array[4096 : 4096 + 8192].reshape(2, -1) == [[3], [4]]).all()
    transport.close()
    closes_cleanly(sim)


def test_without_any_device_memory_the_python_path_is_taken(sim, tmp_path, caplog):
    gpu = sim.torch.gpu("cuda:0")
    tensor = gpu.tensor(8, 4096)
    sim.limit(0, 4096)
    HostTransport([tensor], SLOT, probe_dir=str(tmp_path), direct_io="off")
    assert "cuMemAlloc_v2 answers CUDA error 2" in caplog.text


IN_A_COPY = [
    "cuCtxPushCurrent_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuLaunchKernel",
    "cuEventRecord",
    "cuEventSynchronize",
]


@pytest.mark.parametrize("times", [1, 3, 7])
@pytest.mark.parametrize("name", IN_A_COPY)
def test_errors_in_copies_cost_no_byte_and_no_later_chunk(make_device, sim, name, times):
    """A copy is tried again, and what was launched before the error is over by then."""
    bench = make_device(num_threads=2)
    job, contents = bench.store([0, 1, 2])
    bench.finish(job)
    bench.wait_until_idle()
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


@pytest.mark.parametrize("path", PATHS, indirect=True)
def test_each_path_copies_as_it_says(make_device, sim, path, request):
    bench = make_device(num_threads=1, **path)
    sim.reset(3, LATE_S)
    job, contents = bench.store([0, 1])
    bench.finish(job)
    bench.wait_until_idle()
    bench.poison(range(36, 60))
    bench.finish(bench.load([0, 1], place=9))
    bench.wait_until_idle()
    assert [bench.world.pages(bench.blocks(9 + n)) for n in range(2)] == list(contents.values())
    used = [sim.calls(f"cuMemcpyBatchAsync{suffix}") for suffix in ("_v2", "")]
    copies = sim.calls("cuMemcpyHtoDAsync_v2") + sim.calls("cuMemcpyDtoHAsync_v2")
    name = request.node.callspec.params["path"]
    if name.startswith("batches"):
        assert used == ([4, 0] if name == "batches" else [0, 4]), "one for each chunk and way"
        assert copies == 0
    else:
        assert used == [0, 0]
        assert (copies > 8) is (name == "spans")


@pytest.mark.parametrize("code", [1, 801])
@pytest.mark.parametrize("path", ["batches", "batches of CUDA 12"], indirect=True)
def test_a_batch_that_the_driver_refuses_is_copied_one_by_one_and_is_the_last(
    make_device, sim, path, code, request
):
    """Half of it was begun, and is over before the same pages are copied once more."""
    bench = make_device(num_threads=1, **path)
    device = bench.world.transport._outside._device
    name = request.node.callspec.params["path"]
    call = "cuMemcpyBatchAsync_v2" if name == "batches" else "cuMemcpyBatchAsync"
    assert device.uses_batches
    assert not device.uses_kernel
    sim.reset(code, LATE_S)
    sim.fail(call, code)
    job, contents = bench.store([0, 1, 2])
    bench.finish(job)
    bench.wait_until_idle()
    assert sim.calls(call) == 1
    assert not device.uses_batches
    for n, content in contents.items():
        assert read_by_hand(bench.world.path(n)).payload[: len(content)] == content
    bench.poison(range(36, 60))
    assert not bench.finish(bench.load([0, 1, 2], place=9))[0].failed
    bench.wait_until_idle()
    assert [bench.world.pages(bench.blocks(9 + n)) for n in range(3)] == list(contents.values())
    assert sim.calls(call) == 1


@pytest.mark.parametrize(
    "device", [{"same_address": False}, {"major": 10}, {"major": 12}, {}], ids=str
)
@pytest.mark.parametrize("path", ["batches", "batches of CUDA 12"], indirect=True)
def test_a_batch_is_not_tried_where_it_would_cost_the_engine_its_context(
    make_device, sim, path, device
):
    """Not at start-up either. The last of these devices is one on which it may be tried."""
    sim.be(**device)
    bench = make_device(num_threads=1, **path)
    assert bench.world.transport._outside._device.uses_batches is (not device)
    job, contents = bench.store([0, 1])
    bench.finish(job)
    bench.wait_until_idle()
    assert not bench.finish(bench.load([0, 1], place=9))[0].failed
    bench.wait_until_idle()
    assert [bench.world.pages(bench.blocks(9 + n)) for n in range(2)] == list(contents.values())
    tried = sim.calls("cuMemcpyBatchAsync_v2") + sim.calls("cuMemcpyBatchAsync")
    assert bool(tried) is (not device)


def test_a_table_of_more_spans_than_a_batch_takes_goes_in_several(sim, tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "compiled_copy", refuse)
    gpu = sim.torch.gpu("cuda:0")
    tensor = gpu.tensor(5000, 64)
    transport = HostTransport([tensor], SLOT, probe_dir=str(tmp_path), direct_io="off", num_slots=2)
    opened = gpu.opened(tensor).reshape(-1)
    opened[:] = np.random.default_rng(1).integers(0, 256, len(opened), np.uint8)
    order = np.random.default_rng(2).permutation(5000)
    table = np.array([(0, 64 * block, 64 * i, 64) for i, block in enumerate(order)], np.int64)
    table = np.insert(table, 2048, (0, 0, 0, 0), axis=0)  # of no bytes: never the driver's
    slot = transport.new_slot(0)
    sim.reset(1, 0.0)
    transport.gather(table, slot, 4096, None)
    assert sim.calls("cuMemcpyBatchAsync_v2") == 3
    stored = slot.array[4096 : 4096 + len(opened)]
    assert np.array_equal(stored.reshape(-1, 64), opened.reshape(-1, 64)[order])
    before = opened.copy()
    opened[:] = 0
    transport.scatter(slot, 4096, table, None)
    assert np.array_equal(opened, before)
    transport.close()
    closes_cleanly(sim)


def test_where_the_driver_says_no_python_takes_over(make_device, sim, monkeypatch, caplog):
    from fskv.transports import cuda_native

    def refuse(*_):
        raise RuntimeError("cuLaunchKernel answers CUDA error 999")

    bench = make_device(num_threads=1)
    monkeypatch.setattr(cuda_native._native, "copy_spans", refuse)
    sim.fail("cuLaunchKernel", 999)
    job, contents = bench.store([0, 1])
    bench.finish(job)
    bench.wait_until_idle()
    sim.fail("cuLaunchKernel", 999)
    bench.finish(bench.load([0, 1], place=9))
    bench.wait_until_idle()
    assert bench.statuses(loads=True) == {Status.OK: 2}
    for n in range(2):
        assert bench.world.pages(bench.blocks(9 + n)) == contents[n]
    assert caplog.text.count("chunks are copied in Python where this fails") == 1


@pytest.mark.parametrize("code", [700, 719])
def test_a_device_that_is_lost_costs_chunks_and_no_thread(make_device, sim, code):
    bench = make_device(num_threads=2)
    job, contents = bench.store([0, 1, 2])
    bench.finish(job)
    bench.wait_until_idle()
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
    assert contents


# --- the simulation: each misuse has a name ----------------------------------------------------------


def misuse_host_touch(sim, gpu, pinned):
    gpu.tensor(2, 4096)[0, 0].item()


def misuse_freed_memory(sim, gpu, pinned):
    address = gpu.allocate(4096)
    gpu.free(address)
    to_device(sim, gpu, address, pinned, 4096)


def misuse_beyond_an_allocation(sim, gpu, pinned):
    to_device(sim, gpu, gpu.allocate(4096), pinned, 4097)


def misuse_unregistered_host_memory(sim, gpu, pinned):
    to_device(sim, gpu, gpu.allocate(4096), np.zeros(4096, np.uint8).ctypes.data, 4096)


def misuse_a_stream_of_another_context(sim, gpu, pinned):
    other = sim.torch.gpu("cuda:1")
    address = gpu.allocate(4096)
    to_device(sim, gpu, address, pinned, 4096, other.stream)


def misuse_on_the_default_stream(sim, gpu, pinned):
    to_device(sim, gpu, gpu.allocate(4096), pinned, 4096, None)


def misuse_no_current_context(sim, gpu, pinned):
    thread = threading.Thread(target=lambda: sim.lib.cuStreamSynchronize(gpu.stream))
    thread.start()
    thread.join()


def misuse_memory_of_another_device(sim, gpu, pinned):
    to_device(sim, gpu, sim.torch.gpu("cuda:1").allocate(4096), pinned, 4096)


def to_device(sim, gpu, address, source, nbytes, stream=False):
    with gpu.current(), contextlib.suppress(SimError):
        sim.call(
            "cuMemcpyHtoDAsync_v2",
            ctypes.c_uint64(address),
            ctypes.c_void_p(source),
            ctypes.c_size_t(nbytes),
            gpu.stream if stream is False else stream,
        )


MISUSES = {name: call for name, call in globals().items() if name.startswith("misuse_")}


@pytest.mark.parametrize("name", MISUSES)
def test_negative_control_a_misuse_is_noted_by_its_name(sim, name):
    gpu = sim.torch.gpu("cuda:0")
    pinned = sim.torch.pinned(8192)
    assert sim.misuses == []
    MISUSES[name](sim, gpu, pinned.data_ptr())
    wait_for(lambda: not sim.busy)
    words = name.removeprefix("misuse_").replace("_", " ")
    words = {"host touch": "the host touched device memory"}.get(words, words)
    assert any(words in misuse for misuse in sim.misuses), sim.misuses


def test_a_stream_is_late_and_an_event_tells(sim):
    sim.reset(1, 0.3)
    gpu = sim.torch.gpu("cuda:0")
    tensor = gpu.tensor(2, 4096)
    for seed in range(5):
        sim.reset(seed, 0.3)
        gpu.opened(tensor)[:] = 1
        gpu.fill(tensor, 0, 2)
        event = gpu.event()
        if not event.query():
            break
        gpu.synchronize()
    assert (gpu.opened(tensor)[0] == 1).all()
    event.synchronize()
    assert (gpu.opened(tensor) == [[2], [1]]).all()


# --- the end ------------------------------------------------------------------------------------------


@pytest.fixture
def mover(sim, tmp_path):
    """A Mover with 4 stored chunks, over a device that tests may stop."""
    for name in ("tmp", "chunks"):
        (tmp_path / name).mkdir()
    layout = FileLayout(4, (4096,), bytes(16))
    config = StoreConfig(
        root=str(tmp_path), io_threads=2, direct_io="off", staging_bytes=16 * layout.file_nbytes
    )
    directory = NamespaceDir(str(tmp_path), b"end" * 8, 0o700, 0o600)
    tensor = sim.torch.gpu("cuda").tensor(16, 4096)
    made = Mover(config, directory, [tensor], {0: layout})
    made.tensor = tensor
    plan = plan_job([GroupLayout.of(0, 4, [(0, 4096)])], [4096], [4], list(range(16)), [16], [0])
    made.moves = [FileMove(FileId(b"%032d" % i, 0), part) for i, part in enumerate(plan.chunks)]
    made.store(1, made.moves)
    wait_for(lambda: (made.poll(), made.idle)[1])
    yield made
    sim.hold(False)
    wait_for(
        lambda: not [t for t in threading.enumerate() if t.name in ("fskv-start-up", "closing")]
    )
    closes_cleanly(sim)


@pytest.mark.parametrize("is_load", [True, False])
@pytest.mark.parametrize("told", [True, pytest.param(False, id="control")])
def test_a_mover_comes_after_the_event_that_it_is_given(sim, mover, is_load, told):
    gpu, pages = sim.torch.gpu("cuda"), sim.torch.gpu("cuda").opened(mover.tensor)

    def ended(job):
        wait_for(lambda: job in [result.job_id for result in mover.poll()])
        wait_for(lambda: (mover.poll(), mover.idle)[1])

    pages[:] = 5
    moves = [FileMove(FileId(b"new %028d" % i, 0), m.plan) for i, m in enumerate(mover.moves)]
    if is_load:
        mover.store(2, moves)
        ended(2)
    else:
        pages[:] = 0
    go = threading.Event()

    def step():
        go.wait(20)
        pages[:] = 9 if is_load else 5

    gpu.launch(step)
    threading.Timer(0.3, go.set).start()  # an untold copy is done long before
    ready = gpu.event() if told else None
    (mover.load if is_load else mover.store)(3, moves, ready)
    ended(3)
    gpu.synchronize()
    if not is_load:
        pages[:] = 0
        mover.load(4, moves)
        ended(4)
    assert bool((pages == 5).all()) is told


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
    sim.hold(True)
    if is_load:
        mover.load(2, mover.moves)
    else:
        moves = [FileMove(FileId(b"new %028d" % i, 0), m.plan) for i, m in enumerate(mover.moves)]
        mover.store(2, moves)
    wait_for(lambda: sim.calls(copy) + sim.calls("cuEventSynchronize") > before)
    ends = threading.Thread(target=mover.close, args=(0.1,), name="closing")
    ends.start()
    ends.join(5 if bounded else 1)
    assert ends.is_alive() == (not bounded)
    assert ("shutdown: the GPU did not end its copies within 0.4 s" in caplog.text) == bounded
