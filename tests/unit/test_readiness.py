"""Nothing of fskv but the copies waits for the GPU: no deadline, no read, no other load.

`Event` stands for one of a CUDA stream. Pages are filled at the moment when it fires, and not before.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace
from functools import partial

import pytest
from cuda_sim import simulation
from cuda_torch import device_world, on_simulation
from test_jobs import Bench, calm
from world import returns_in_time, wait_for

from faults.transport import Script
from fskv.data_path import runner as runner_module
from fskv.data_path.job import FileTask, State
from fskv.data_path.transports import host
from fskv.types import Status


class Event:
    """Fires when it is told to; what kernels write, they write at that moment."""

    def __init__(self):
        self._fired = threading.Event()
        self.waiters = []
        self.kernels = []

    def query(self):
        return self._fired.is_set()

    def synchronize(self):
        if not self._fired.is_set():
            self.waiters.append(threading.current_thread().name)
        assert self._fired.wait(30), "nobody fired it"

    def fire(self):
        if not self._fired.is_set():
            for kernel in self.kernels:
                kernel()
        self._fired.set()


class BrokenEvent(Event):
    def query(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    synchronize = query


class DeviceBench(Bench):
    """Its pages are on a device: copies wait for their event."""

    @property
    def num_read_ahead(self):
        """Loads that were read and checked, and wait for their event."""
        self.poll()
        running = self.runner._pool.queue.running()
        return sum(transfer.state == State.WAITING for transfer in running)

    def submit(self, numbers, ready, *, load, place=0, seed=0):
        """Submit a job whose pages are `ready` later; return it, and of a store its contents."""
        self.num_jobs += 1
        blocks = [self.blocks(place + i) for i in range(len(numbers))]
        contents = {}
        for n, ids in zip(numbers, blocks, strict=True):
            if not load:
                contents[n] = self.world.fill(ids, seed + n)
            if load or ready is not None:
                self.poison(ids)
            if not load and ready is not None:
                ready.kernels.append(partial(self.world.fill, ids, seed + n))
        moves = [self.world.request(n, ids) for n, ids in zip(numbers, blocks, strict=True)]
        submit = self.runner.submit_load if load else self.runner.submit_store
        returns_in_time(lambda: submit(self.num_jobs, moves, ready) or 1)
        return self.num_jobs, contents


@contextlib.contextmanager
def benches(make_world, monkeypatch, path):
    """Yield what makes benches whose chunks are moved by a transport's methods, or all outside Python."""
    with contextlib.ExitStack() as stack:

        def make(script=None, **options):
            if path == "outside":
                sim = simulation()
                sim.reset(1, 0.001)
                gpu = on_simulation(monkeypatch, sim).gpu("cuda:0")
                num_slots = options.get("num_slots", 8)
                world = device_world(make_world, gpu, num_slots=num_slots, num_blocks=256)
            else:
                world = make_world(faults=script, num_blocks=256)
                world.transport.native = replace(world.transport.native, on_device=True)
                stack.callback(world.transport.release)
            bench = DeviceBench(world, **options)
            if path == "outside":
                # The queue outside the interpreter has this clock.
                bench.clock.now = time.monotonic()
            stack.callback(bench.runner._pool.close)
            return bench

        yield make


@pytest.fixture(params=["python", "outside"])
def make_device(make_world, monkeypatch, request):
    with benches(make_world, monkeypatch, request.param) as make:
        yield make


@pytest.fixture
def make_scripted(make_world, monkeypatch):
    """Like `make_device`; scripts of faults are of Python's path."""
    with benches(make_world, monkeypatch, "python") as make:
        yield make


def stored(bench, numbers, place=0):
    job, contents = bench.store(numbers, place=place)
    bench.finish(job)
    bench.wait_until_idle()
    return contents


protection = pytest.mark.parametrize("protected", [True, False], ids=["", "negative_control"])


@protection
def test_a_forward_holds_no_read_back_and_no_page_is_touched_before_it_ends(
    make_device, monkeypatch, protected
):
    bench = make_device(num_threads=4, num_slots=40)
    contents = stored(bench, list(range(8)))
    if not protected:
        monkeypatch.setattr(runner_module, "has_fired", lambda _: True)
    forward = Event()
    stores, written = bench.submit(list(range(100, 116)), forward, load=False, place=8)
    load, _ = bench.submit(list(range(8)), forward, load=True, place=30)
    if protected:
        wait_for(
            lambda: bench.num_read_ahead == 8
        )  # all of it, on more threads than are at the disk
    else:
        bench.finish(stores, load)
    assert (stores in bench.results) is not protected
    assert all(bench.poisoned(30 + i) for i in range(8)) is protected
    forward.fire()
    bench.finish(stores, load)
    for i in range(8):
        assert bench.world.pages(bench.blocks(30 + i)) == contents[i]
    bench.wait_until_idle()
    assert bench.statuses(loads=False) == {Status.OK: 8 + 16}
    again, _ = bench.submit(list(written), None, load=True, place=8)
    assert not bench.finish(again)[0].failed
    found = [bench.world.pages(bench.blocks(8 + i)) for i in range(16)]
    assert (found == list(written.values())) is protected


def test_loads_that_wait_for_their_event_keep_no_other_load_from_the_disk(make_device):
    bench = make_device(num_threads=3, num_slots=40)
    contents = stored(bench, list(range(8)))
    forward = Event()
    waiting, _ = bench.submit(list(range(6)), forward, load=True, place=10)
    wait_for(lambda: bench.num_read_ahead == 6)
    load, _ = bench.submit([6, 7], None, load=True, place=20)
    assert not bench.finish(load)[0].failed
    assert bench.world.pages(bench.blocks(20)) == contents[6]
    assert waiting not in bench.poll()
    forward.fire()
    assert not bench.finish(waiting)[0].failed
    bench.wait_until_idle()


@protection
@pytest.mark.parametrize("step_s", [1.0, 3.0, 10.0, 40.0])
def test_a_long_forward_is_not_the_disks(make_scripted, monkeypatch, protected, step_s):
    """No timeout, no opening of the breaker, no slower pace of stores, whatever the step takes."""
    bench = make_scripted(Script(), num_threads=4, num_slots=40)
    stored(bench, list(range(8)))
    if not protected:
        monkeypatch.setattr(FileTask, "disk_s", lambda task, now: now - (task.started_at or now))
        monkeypatch.setattr(runner_module, "_ANSWERED", ())
    opened = bench.breaker.num_openings
    forward = Event()
    stores, _ = bench.submit(list(range(100, 116)), forward, load=False, place=8)
    load, _ = bench.submit(list(range(8)), forward, load=True, place=30)
    wait_for(lambda: bench.num_read_ahead == 8)
    for _ in range(10):
        bench.clock.advance(step_s / 10)
        bench.poll()
    forward.fire()
    results = bench.finish(stores, load)
    bench.wait_until_idle()
    late = bench.statuses(loads=True)[Status.TIMED_OUT]
    if protected:
        assert late == 0
        assert bench.statuses(loads=False) == {Status.OK: 8 + 16}
        assert not results[1].failed
        assert bench.breaker.num_openings == opened
    elif step_s > 2.5:
        assert late > 0


def test_a_read_that_hangs_is_late_however_long_the_forward_takes(make_scripted):
    bench = make_scripted(Script(read="H"), num_threads=2, num_slots=40)
    stored(bench, [0, 1])
    forward = Event()
    load, _ = bench.submit([0, 1], forward, load=True, place=10)
    bench.transport.wait_until_hanging(1)
    bench.clock.advance(100)
    (result,) = bench.finish(load)
    assert result.failed
    assert result.late
    calm(bench)
    forward.fire()
    bench.wait_until_idle()
    assert bench.poisoned(10)
    assert bench.poisoned(11)


@protection
def test_a_file_that_hangs_says_nothing_against_those_that_were_read(
    make_scripted, monkeypatch, protected
):
    bench = make_scripted(Script(), num_threads=12, num_slots=60, failures=8)
    stored(bench, list(range(12)))
    if not protected:
        monkeypatch.setattr(runner_module, "_ANSWERED", ())
    bench.transport.script = Script(open="H")
    forward = Event()
    load, _ = bench.submit(list(range(12)), forward, load=True, place=20)
    wait_for(lambda: bench.num_read_ahead == 11)
    bench.clock.advance(100)
    assert bench.finish(load)[0].failed
    late = bench.statuses(loads=True)[Status.TIMED_OUT]
    assert late == (1 if protected else 12)
    assert bench.breaker.open is not protected
    calm(bench)
    forward.fire()
    bench.wait_until_idle()
    assert all(bench.poisoned(20 + n) for n in range(12))


def test_the_deadline_goes_on_after_the_forward(make_scripted):
    """What was read before it counts; what is late afterwards is."""
    bench = make_scripted(Script(scatter="H*"), num_threads=2, num_slots=40)
    stored(bench, [0])
    forward = Event()
    load, _ = bench.submit([0], forward, load=True, place=10)
    wait_for(lambda: bench.num_read_ahead == 1)
    bench.clock.advance(50)
    assert load not in bench.poll()
    forward.fire()
    bench.transport.wait_until_hanging(1)
    assert load not in bench.poll(), "its deadline has not begun to run"
    bench.clock.advance(1)
    assert load not in bench.poll()
    threading.Timer(0.3, lambda: calm(bench)).start()  # the guard waits for copies
    bench.clock.advance(5)
    assert bench.finish(load)[0].late
    bench.wait_until_idle()


@pytest.mark.parametrize("how", ["wait", "drop", "shutdown"])
def test_what_was_read_ahead_and_is_given_up_touches_no_page(make_device, how):
    bench = make_device(num_threads=3, num_slots=40)
    stored(bench, list(range(6)))
    forward = Event()
    load, _ = bench.submit(list(range(6)), forward, load=True, place=10)
    wait_for(lambda: bench.num_read_ahead == 6)
    assert bench.runner.num_running == 6
    if how == "wait":
        returns_in_time(lambda: bench.runner.wait([load]) or 1)
    elif how == "drop":
        returns_in_time(lambda: bench.runner.drop() or 1)
    else:
        returns_in_time(lambda: bench.runner.shutdown(0.1) or 1)
    assert bench.finish(load)[0].failed
    forward.fire()
    if how != "shutdown":
        again, _ = bench.submit([0], None, load=True, place=20)  # and all goes on
        assert not bench.finish(again)[0].failed
    bench.wait_until_idle()
    assert all(bench.poisoned(10 + i) for i in range(6))
    assert bench.runner._slots._num_ahead == 0


@pytest.mark.parametrize("dropped", [True, False], ids=["dropped", "negative_control"])
def test_a_load_that_has_ended_and_was_not_polled_fails_at_a_drop(make_device, dropped):
    """Its pages are unmapped: who hears that it is good computes with what is there afterwards."""
    bench = make_device(num_threads=2, num_slots=40)
    stored(bench, list(range(4)))
    job = bench.load(list(range(4)), place=10)
    wait_for(lambda: not any(bench.poisoned(10 + i) for i in range(4)))
    wait_for(lambda: not bench.runner.num_running)
    assert job not in bench.results
    if dropped:
        returns_in_time(lambda: bench.runner.drop() or 1)
    (result,) = bench.finish(job)
    assert result.failed is dropped
    assert len(result.bad) == (4 if dropped else 0)
    assert bench.statuses(loads=True) == {Status.OK: 4}, "nothing is held against the files"
    again = bench.load([0], place=20)
    assert not bench.finish(again)[0].failed
    bench.wait_until_idle()


@pytest.mark.parametrize("how", ["wait", "drop"])
def test_stores_that_wait_for_a_forward_give_their_pages_back(make_device, how):
    bench = make_device(num_threads=2, num_slots=40)
    forward = Event()
    job, contents = bench.submit(list(range(6)), forward, load=False)
    if how == "wait":  # gathered by the engine's thread, which waits for its own kernels
        waited = lambda: set(forward.waiters) - {"fskv-ready"}
        threading.Thread(target=lambda: (wait_for(waited), forward.fire())).start()
        returns_in_time(lambda: bench.runner.wait([job]) or 1)
    else:
        returns_in_time(lambda: bench.runner.drop() or 1)
    for place in range(6):
        bench.poison(bench.blocks(place))
    bench.finish(job)
    forward.fire()
    bench.wait_until_idle()
    good = bench.statuses(loads=False)[Status.OK]
    assert good == (6 if how == "wait" else 0)
    if good:
        load, _ = bench.submit(list(contents), None, load=True, place=20)
        assert not bench.finish(load)[0].failed
        for i, content in enumerate(contents.values()):
            assert bench.world.pages(bench.blocks(20 + i)) == content
    assert bench.runner._slots._num_ahead == 0


def test_beyond_the_spare_slots_files_are_read_after_the_forward(make_device):
    bench = make_device(num_threads=2, num_slots=8)
    contents = stored(bench, list(range(12)))
    forward = Event()
    load, _ = bench.submit(list(range(12)), forward, load=True, place=20)
    most = bench.runner._max_waiting
    assert 0 < most < 8
    wait_for(lambda: bench.num_read_ahead == most)
    assert len(bench.runner._pool.queue.running()) == most
    forward.fire()
    assert not bench.finish(load)[0].failed
    for i in range(12):
        assert bench.world.pages(bench.blocks(20 + i)) == contents[i]
    bench.wait_until_idle()


def test_without_a_device_chunks_fail_at_once_and_with_one_again_they_go(
    make_device, monkeypatch, caplog
):
    """No thread is started anew for ever, and no load waits for its deadline."""
    bench = make_device(num_threads=2, num_slots=40)
    real, calls = host.HostTransport.enter_thread, []

    def lost(_):
        calls.append(threading.current_thread().name)
        raise RuntimeError("CUDA error: device-side assert triggered")

    with monkeypatch.context() as patch:
        patch.setattr(host.HostTransport, "enter_thread", lost)
        store, _ = bench.store([0, 1])
        bench.finish(store)
        bench.wait_until_idle()
        load = bench.load([0, 1], place=10)
        assert bench.finish(load)[0].failed
        bench.wait_until_idle()
        assert bench.statuses(loads=False) == bench.statuses(loads=True) == {Status.IO_ERROR: 2}
        assert all(bench.poisoned(10 + i) for i in range(2))
        assert len(set(calls)) <= 2
        assert len(calls) <= 6, "each thread at its beginning, and once a chunk"
    assert caplog.text.count("the device cannot be made current") == 1
    assert host.HostTransport.enter_thread is real
    contents = stored(bench, [0, 1])
    assert not bench.finish(bench.load([0, 1], place=10))[0].failed
    bench.wait_until_idle()
    assert all(bench.world.pages(bench.blocks(10 + i)) == contents[i] for i in range(2))


@pytest.mark.parametrize("how", ["broken", "no thread"])
def test_an_event_that_nobody_can_tell_of_costs_its_chunks(make_device, monkeypatch, how):
    """Nothing is stored from pages that may hold anything, and nobody waits for ever."""
    bench = make_device(num_threads=2, num_slots=6)
    stored(bench, list(range(4)))
    if how == "no thread":
        monkeypatch.setattr(bench.runner._readiness, "call_after", lambda *_: False)
    event = BrokenEvent() if how == "broken" else Event()
    store, _ = bench.submit([8, 9], event, load=False, place=5)
    load, _ = bench.submit(list(range(4)), event, load=True, place=10)
    threading.Timer(0.3, event.fire).start()
    bench.finish(store, load)
    bench.wait_until_idle()
    assert bench.statuses(loads=False) == {Status.OK: 4, Status.IO_ERROR: 2}
    assert len(bench.world.chunk_files()) == 4
    assert bench.results[load].failed
    assert all(bench.poisoned(10 + i) for i in range(4)) or how == "no thread"
    assert bench.runner._slots._num_ahead == 0


@protection
def test_pages_in_host_memory_are_gathered_after_their_event_too(
    make_world, monkeypatch, protected
):
    """An engine may copy its KV to pinned memory on a stream of its own, and need it back at once."""
    bench = Bench(make_world(native=True), num_threads=2, num_slots=40)
    bench.clock.now = time.monotonic()
    event = Event()
    if not protected:
        monkeypatch.setattr(Event, "synchronize", lambda self: None)

    def copied():
        bench.world.fill(bench.blocks(0), 1)
        event.fire()

    threading.Timer(0.3, copied).start()
    move = bench.world.request(1, bench.blocks(0))
    bench.runner.submit_store(1, [move], event)
    bench.runner.wait([1])
    bench.poison(bench.blocks(0))
    bench.finish(1)
    bench.wait_until_idle()
    time.sleep(0 if protected else 0.4)
    status, found = bench.world.get(1)
    wanted = bench.world.fill(bench.blocks(0), 1)
    assert (status is Status.OK and found == wanted) is protected
    bench.runner._pool.close()
