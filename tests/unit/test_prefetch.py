"""What was read ahead is what a load would have read; it takes nothing from loads and gives its room back."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from types import SimpleNamespace

import pytest
from cuda_sim import device_world, on_simulation, simulation
from test_jobs import DEADLINE, Bench
from test_readiness import DeviceBench, Event
from world import damage, returns_in_time, wait_for

from faults.transport import Script
from fskv.config import Deadline, StoreConfig
from fskv.data_path.prefetch import Prefetcher
from fskv.errors import ConfigError
from fskv.format import chunk_file
from fskv.observe import metrics
from fskv.observe.metrics import Counters
from fskv.offload.mover import Mover
from fskv.types import Status

HANG = "H*"


class PrefetchBench(Bench):
    """A runner with 4 I/O threads, and 2 beside that read ahead: as a Mover has them."""

    def __init__(self, world, *, num_prefetch_slots=4, failures=1000, deadline=DEADLINE, **options):
        self.counters = Counters()
        self.prefetch = Prefetcher(
            world.store,
            world.transport,
            num_slots=num_prefetch_slots,
            num_threads=2,
            deadline=deadline,
            breaker=SimpleNamespace(),
            counters=self.counters,
            is_due=lambda: self.runner.is_due,
            clock=lambda: self.clock.now,
        )
        super().__init__(
            world, **{"num_threads": 4, "prefetch": self.prefetch, "failures": failures, **options}
        )
        self.prefetch._breaker = self.breaker

    def poll(self):
        self.prefetch.write_off_hung()
        self.outcomes += self.prefetch.take_outcomes()
        return super().poll()

    def wait_until_idle(self):
        super().wait_until_idle()
        wait_for(lambda: self.prefetch.num_slots_used == 0)
        wait_for(lambda: self.prefetch.num_threads_hung == 0)

    def close(self):
        self.prefetch.close()
        self.runner.shutdown(0)

    def want(self, *numbers, first_block=0):
        self.prefetch.want([(self.world.chunk(n), first_block) for n in numbers])

    def held(self):
        with self.prefetch._lock:
            return {
                int.from_bytes(file.key_hash, "big")
                for file, entry in self.prefetch._entries.items()
                if entry.slot is not None
            }

    def drop(self, *numbers):
        self.prefetch.drop([self.world.chunk(n) for n in numbers])

    def counted(self):
        self._sums = getattr(self, "_sums", {})
        for (metric, result), amount in self.counters.drain().items():
            if metric is metrics.PREFETCHED_CHUNKS:
                self._sums[result] = self._sums.get(result, 0) + amount
        return self._sums


@pytest.fixture(params=["python", "native"])
def kind(request):
    if request.param == "native":
        pytest.importorskip("fskv._native", reason="the C extension was not built")
    return request.param


@pytest.fixture
def make_bench(make_world):
    with contextlib.ExitStack() as stack:

        def make(faults=None, *, native=False, of=PrefetchBench, **options):
            bench = of(make_world(faults=faults, native=native), **options)
            stack.callback(bench.close)
            if not native:
                stack.callback(bench.transport.release)
            return bench

        yield make


def stored(bench, numbers):
    job, contents = bench.store(numbers)
    bench.finish(job)
    bench.wait_until_idle()
    return contents


def lose(bench, *numbers):
    for n in numbers:
        os.unlink(bench.world.path(n))


protection = pytest.mark.parametrize("protected", [True, False], ids=["", "negative_control"])


# --- what a load gets -----------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [True, False], ids=["", "negative_control"])
def test_what_was_read_ahead_is_copied_and_no_file_is_opened(make_bench, kind, ahead):
    bench = make_bench(native=kind == "native")
    contents = stored(bench, [1, 2, 3])
    if ahead:
        bench.want(1, 2, 3)
        wait_for(lambda: bench.held() == {1, 2, 3})
        assert bench.prefetch.num_slots_used == 3
    lose(bench, 1, 2, 3)
    (result,) = bench.finish(bench.load([3, 1, 2], place=5))
    assert result.prefetched is ahead
    assert result.failed is not ahead
    for place, n in ((5, 3), (6, 1), (7, 2)):
        assert (bench.world.pages(bench.blocks(place)) == contents[n]) is ahead
        assert bench.poisoned(place) is not ahead
    bench.wait_until_idle()
    assert bench.counted() == ({"used": 3} if ahead else {})


def test_a_load_takes_what_is_there_and_reads_the_others(make_bench, kind):
    bench = make_bench(native=kind == "native")
    contents = stored(bench, [1, 2, 3, 4])
    bench.want(2, 4)
    wait_for(lambda: bench.held() == {2, 4})
    lose(bench, 2)
    (result,) = bench.finish(bench.load([1, 2, 3], place=5))
    assert not result.failed
    for place, n in ((5, 1), (6, 2), (7, 3)):
        assert bench.world.pages(bench.blocks(place)) == contents[n]
    assert bench.held() == {4}  # of a request that still waits
    bench.drop(4)
    bench.wait_until_idle()
    assert bench.counted() == {"used": 1, "dropped": 1}


def another_file(bench):
    shutil.copyfile(bench.world.path(2), bench.world.path(1))


def another_rank(bench):
    own = bench.world.rank
    bench.world.rank = 3
    assert bench.world.put(1, bench.world.content(seed=9)) is Status.OK
    path, bench.world.rank = bench.world.path(1), own
    shutil.copyfile(path, bench.world.path(1))


WRONG = {
    "a bit of the payload": (
        lambda bench: damage(bench.world.path(1), bench.world.base + 100_000),
        Status.CORRUPT,
        "check_digests",
    ),
    "another chunk's file": (another_file, Status.STALE, "_compare"),
    "another rank's file": (another_rank, Status.STALE, "_compare"),
}


@protection
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_file_is_never_held_and_is_told_before_the_load(
    make_bench, kind, monkeypatch, wrong, protected
):
    spoil, status, check = WRONG[wrong]
    bench = make_bench(native=kind == "native")
    contents = stored(bench, [1, 2])
    spoil(bench)
    if not protected:
        of = chunk_file if check == "check_digests" else bench.world.store
        monkeypatch.setattr(of, check, lambda *_: None)
    bench.want(1)
    if not protected:
        wait_for(lambda: bench.held() == {1})
        bench.finish(bench.load([1], place=5))
        assert bench.world.pages(bench.blocks(5)) != contents[1], "that is what the check is for"
        return
    wait_for(lambda: bench.statuses(loads=True) == {status: 1})
    assert bench.held() == set()
    (result,) = bench.finish(bench.load([1], place=5))
    assert result.failed
    assert bench.poisoned(5)
    bench.wait_until_idle()


@protection
def test_blocks_that_were_not_checked_are_not_served(make_bench, kind, protected):
    """A request that has the chunk's first blocks wants only the others."""
    bench = make_bench(native=kind == "native")
    contents = stored(bench, [1])
    damage(bench.world.path(1), bench.world.base)  # in the first block
    bench.want(1, first_block=2)
    wait_for(lambda: bench.held() == {1})
    if not protected:
        bench.prefetch._entries[bench.world.chunk(1)].first_block = 0
    (result,) = bench.finish(bench.load([1], place=5))
    assert result.prefetched is not protected
    assert result.failed is protected
    if protected:
        assert bench.poisoned(5)
        assert bench.held() == {1}  # what was checked is as good as before
        bench.drop(1)
    else:
        assert bench.world.pages(bench.blocks(5)) != contents[1]
    bench.wait_until_idle()


@protection
def test_a_slot_is_read_into_again_only_when_it_was_copied(make_bench, monkeypatch, protected):
    bench = make_bench(Script(scatter="H"), num_prefetch_slots=1)
    contents = stored(bench, [1, 2])
    if not protected:
        hand_over = Prefetcher.hand_over

        def give_back_at_once(self, tasks):
            hand_over(self, tasks)
            for task in tasks:
                self._slots.give_back(task.slot)

        monkeypatch.setattr(Prefetcher, "hand_over", give_back_at_once)
    bench.want(1)
    wait_for(lambda: bench.held() == {1})
    job = bench.load([1], place=5)
    bench.transport.wait_until_hanging(1)
    monkeypatch.setattr(bench.prefetch, "_is_due", lambda: False)
    bench.want(2)
    if protected:
        with pytest.raises(AssertionError, match="in vain"):
            wait_for(bench.held, timeout_s=0.1)
        bench.transport.release()
    wait_for(lambda: bench.held() == {2})
    bench.transport.release()
    bench.finish(job)
    assert (bench.world.pages(bench.blocks(5)) == contents[1]) is protected


# --- what it takes from others ----------------------------------------------------------------------


@protection
def test_reads_that_hang_take_no_thread_of_loads(make_bench, protected):
    """The control reads ahead as one would with loads that nobody waits for."""
    bench = make_bench(Script(read="HHHH"), num_prefetch_slots=8, num_slots=16)
    contents = stored(bench, list(range(1, 9)))
    if protected:
        bench.want(*range(1, 5))
        bench.transport.wait_until_hanging(2)
    else:
        bench.load([1, 2, 3, 4], place=10)
        bench.transport.wait_until_hanging(4)
    # The script hangs the first four reads; under protection two of them are still to come.
    bench.transport.script = Script()
    job = bench.load([5, 6, 7, 8], place=5)
    if not protected:
        assert job not in bench.poll()
        assert bench.poisoned(5)
        return
    (result,) = bench.finish(job)
    assert not result.failed
    assert bench.world.pages(bench.blocks(5)) == contents[5]
    # Past their deadline they are hung: counted, told, held against the disk, and not replaced.
    failures = bench.breaker._failures_in_row
    bench.clock.advance(DEADLINE.max_s)
    wait_for(lambda: bench.poll() and bench.prefetch.num_threads_hung == 2)
    assert bench.statuses(loads=True)[Status.TIMED_OUT] == 2
    assert bench.breaker._failures_in_row == failures + 2
    assert bench.prefetch.num_slots_used == 2
    assert bench.held() == set()  # 3 and 4 have no thread
    bench.transport.release()
    wait_for(lambda: bench.prefetch.num_threads_hung == 0)
    bench.want(5)
    wait_for(lambda: {3, 4, 5} <= bench.held())
    bench.drop(3, 4, 5)
    bench.wait_until_idle()


def test_reads_ahead_that_share_a_slow_disk_are_no_hung_ones(make_bench):
    """Two threads may take twice as long as one that is alone; the control is what follows."""
    deadline = Deadline(0.0, 10.0, 1000.0)
    bench = make_bench(Script(read="HH"), deadline=deadline)
    stored(bench, [1, 2])
    bench.want(1, 2)
    bench.transport.wait_until_hanging(2)
    alone_s = deadline.for_nbytes(bench.world.file_layout.file_nbytes)
    for times, num_hung in ((1.9, 0), (0.2, 2)):
        bench.clock.advance(times * alone_s)
        bench.poll()
        assert bench.prefetch.num_threads_hung == num_hung
    bench.transport.release()
    bench.wait_until_idle()


@protection
def test_while_a_load_is_at_the_disk_nothing_is_read_ahead(make_bench, monkeypatch, protected):
    bench = make_bench(Script(read="H"))
    stored(bench, [1, 2])
    if not protected:
        monkeypatch.setattr(bench.prefetch, "_is_due", lambda: False)
    job = bench.load([1], place=5)
    bench.transport.wait_until_hanging(1)
    bench.want(2)
    if protected:
        with pytest.raises(AssertionError, match="in vain"):
            wait_for(bench.held, timeout_s=0.1)
        bench.transport.release()
        bench.finish(job)
    wait_for(lambda: bench.held() == {2})


def test_nor_while_stores_have_all_threads(make_bench):
    bench = make_bench()
    bench.world.put(9, bench.world.content())
    bench.transport.script = Script(write="HHHH")
    bench.store([1, 2, 3, 4])
    bench.transport.wait_until_hanging(4)
    bench.want(9)
    with pytest.raises(AssertionError, match="in vain"):
        wait_for(bench.held, timeout_s=0.1)
    bench.transport.release()
    wait_for(lambda: bench.held() == {9})


@protection
def test_while_the_breaker_is_open_nothing_is_read_ahead(make_bench, kind, protected):
    bench = make_bench(native=kind == "native", failures=1)
    stored(bench, [1])
    if protected:
        bench.breaker.record(Status.IO_ERROR)
    bench.want(1)
    wait_for(lambda: not bench.prefetch._pool.queue.running())
    wait_for(lambda: bool(bench.prefetch._entries) is not protected)
    assert bench.breaker.open is protected


def test_a_copy_says_nothing_for_the_disk(make_bench, kind):
    bench = make_bench(native=kind == "native")
    stored(bench, [1])
    bench.want(1)
    wait_for(lambda: bench.held() == {1})
    bench.breaker.record(Status.IO_ERROR)
    bench.finish(bench.load([1], place=5))
    bench.poll()
    assert bench.breaker._failures_in_row == 1
    bench.finish(bench.load([1], place=6))  # the control: this one is read
    bench.poll()
    assert bench.breaker._failures_in_row == 0


# --- how it ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["queued", "being read", "held"])
def test_withdrawn_files_give_their_room_back(make_bench, when):
    bench = make_bench(Script(read="HH"), num_prefetch_slots=2)
    stored(bench, [1, 2, 3, 4])
    bench.want(1, 2, 3)
    bench.transport.wait_until_hanging(2)
    if when == "queued":
        bench.drop(3)
    elif when == "being read":
        bench.drop(1, 2, 3)
        assert bench.prefetch.num_slots_used == 2  # a late read may still write them
    bench.transport.release()
    if when != "being read":
        wait_for(lambda: bench.held() == {1, 2})
        bench.drop(1, 2, 3)
    wait_for(lambda: bench.prefetch.num_slots_used == 0)
    assert bench.counted() == {"dropped": 2}
    bench.want(4)
    wait_for(lambda: bench.held() == {4})


def test_no_more_is_held_than_there_is_room_for(make_bench, kind):
    bench = make_bench(native=kind == "native", num_prefetch_slots=2)
    stored(bench, [1, 2, 3])
    bench.want(1, 2, 3)
    wait_for(lambda: bench.held() == {1, 2})
    with pytest.raises(AssertionError, match="in vain"):
        wait_for(lambda: bench.prefetch.num_slots_used != 2, timeout_s=0.1)
    bench.drop(1)
    wait_for(lambda: bench.held() == {2, 3})
    assert bench.prefetch.num_slots_used == 2


def test_a_store_that_is_given_up_or_a_load_that_is_gives_its_slots_back(make_bench, kind):
    """As for a request that is aborted: its load was begun, and its pages are wanted."""
    bench = make_bench(native=kind == "native")
    contents = stored(bench, [1, 2])
    bench.want(1, 2)
    wait_for(lambda: bench.held() == {1, 2})
    job = bench.load([1, 2], place=5)
    returns_in_time(lambda: bench.runner.wait([job]) or 1)
    bench.finish(job)
    for place, n in ((5, 1), (6, 2)):
        assert bench.poisoned(place) or bench.world.pages(bench.blocks(place)) == contents[n]
    bench.wait_until_idle()


@pytest.fixture
def make_mover():
    with contextlib.ExitStack() as stack:

        def make(world, **options):
            tensors = [tensor.contiguous() for tensor in world.tensors]
            config = StoreConfig.from_mapping({"root": world.root, **options})
            own = Mover(config, world.directory, tensors, {0: world.file_layout})
            stack.callback(own.close, 0)
            return own

        yield make


@pytest.mark.parametrize("end", ["drop", "stop", "close"])
def test_a_mover_forgets_what_was_read_ahead_when_it_drops_all_jobs_and_at_its_end(
    make_world, make_mover, end
):
    world = make_world(faults=False)
    for n in (1, 2, 3):
        world.put(n, world.content(seed=n))
    own = make_mover(world, prefetch_bytes="1MiB")
    own.prefetch([(world.chunk(n), 0) for n in (1, 2)], [])
    wait_for(lambda: all(e.slot is not None for e in own._prefetch._entries.values()))
    assert own.gauges()[metrics.SLOTS_IN_USE] == 2
    getattr(own, end)()
    assert own.gauges()[metrics.SLOTS_IN_USE] == 0
    assert own.counters.drain()[metrics.PREFETCHED_CHUNKS, "dropped"] == 2
    own.prefetch([(world.chunk(3), 0)], [])  # a mover that was stopped reads nothing
    if end == "drop":
        wait_for(lambda: own.gauges()[metrics.SLOTS_IN_USE] == 1)
        own.close()
    wait_for(lambda: own.gauges()[metrics.SLOTS_IN_USE] == 0)


def test_what_was_not_good_is_news_for_the_lookup(make_world, make_mover):
    world = make_world(faults=False)
    world.put(1, world.content())
    damage(world.path(1), world.base)
    own = make_mover(world, prefetch_bytes="1MiB")
    own.prefetch([(world.chunk(1), 0), (world.chunk(2), 0)], [])
    news = {}
    wait_for(lambda: own.poll() or news.update(own.take_news().failed_loads) or len(news) == 2)
    assert news == {world.chunk(1).chunk: Status.CORRUPT, world.chunk(2).chunk: Status.MISSING}
    own.close()


def test_memory_for_less_than_a_file_is_refused_and_none_is_the_default(make_world, make_mover):
    world = make_world(faults=False)
    with pytest.raises(ConfigError, match=r"'prefetch_bytes': found 4096, expected 0 or at least"):
        make_mover(world, prefetch_bytes=4096)
    own = make_mover(world)
    own.prefetch([(world.chunk(1), 0)], [])
    wait_for(lambda: not own._prefetch._entries)
    own.close()


def test_a_shutdown_waits_for_no_read(make_bench):
    bench = make_bench(Script(read=HANG))
    stored(bench, [1, 2, 3])
    before = set(threading.enumerate())
    bench.want(1, 2, 3)
    bench.transport.wait_until_hanging(2)
    own = set(threading.enumerate()) - before
    assert len(own) == 2
    returns_in_time(lambda: bench.prefetch.close() or 1, timeout_s=4.0)
    bench.transport.release()
    wait_for(lambda: bench.prefetch.num_slots_used == 0)
    wait_for(lambda: not any(thread.is_alive() for thread in own))


def test_without_memory_nothing_is_read_ahead_and_loads_go_on(make_bench, monkeypatch, caplog):
    bench = make_bench()
    contents = stored(bench, [1, 2])

    def refused(_index):
        raise MemoryError("no memory")

    monkeypatch.setattr(bench.transport, "new_slot", refused)
    bench.want(1)
    wait_for(lambda: not bench.prefetch._entries)
    assert "no memory for staging slot" in caplog.text
    (result,) = bench.finish(bench.load([1], place=5))
    assert not result.failed
    assert bench.world.pages(bench.blocks(5)) == contents[1]


class OnDevice(PrefetchBench, DeviceBench):
    pass


def on_device(make_world, monkeypatch, transport):
    """A bench whose pages are on a device: a fake one, or the simulated driver's."""
    if transport == "fake":
        return OnDevice(make_world(faults=Script()), num_slots=16)
    pytest.importorskip("fskv._native", reason="the C extension was not built")
    sim = simulation()
    sim.reset(1, 0.001)
    gpu = on_simulation(monkeypatch, sim).gpu("cuda:0")
    # Those of the prefetcher are in the same registered memory, as a Mover asks for them.
    world = device_world(make_world, gpu, num_slots=16 + 4, num_blocks=64)
    bench = OnDevice(world, num_slots=16)
    bench.clock.now = time.monotonic()
    return bench


@pytest.mark.parametrize("transport", ["fake", "simulated"])
def test_who_is_next_is_read_ahead_once_a_load_has_copied(make_world, monkeypatch, transport):
    """One step says that a load takes all that is held, and what is wanted then."""
    bench = on_device(make_world, monkeypatch, transport)
    stored(bench, range(1, 9))
    bench.want(1, 2, 3, 4)
    wait_for(lambda: bench.held() == {1, 2, 3, 4})
    in_use = Event()
    job, _ = bench.submit([1, 2, 3, 4], in_use, load=True, place=5)
    bench.drop(1, 2, 3, 4)
    bench.want(5, 6, 7, 8)
    with pytest.raises(AssertionError, match="in vain"):
        wait_for(lambda: bench.held() or len(bench.prefetch._entries) < 4, timeout_s=0.1)
    in_use.fire()
    bench.finish(job)
    wait_for(lambda: bench.held() == {5, 6, 7, 8})


@pytest.mark.parametrize("given_up", [False, True])
@pytest.mark.parametrize("transport", ["fake", "simulated"])
def test_on_a_device_what_was_read_ahead_waits_for_its_pages(
    make_world, monkeypatch, transport, given_up
):
    bench = on_device(make_world, monkeypatch, transport)
    contents = stored(bench, [1, 2, 3])
    bench.want(1, 2)
    wait_for(lambda: bench.held() == {1, 2})
    in_use = Event()
    job, _ = bench.submit([1, 2, 3], in_use, load=True, place=5)
    wait_for(lambda: bench.num_read_ahead == 3)
    assert all(bench.poisoned(place) for place in (5, 6, 7))
    if given_up:
        bench.runner.wait([job])
    in_use.fire()
    bench.finish(job)
    for place, n in ((5, 1), (6, 2), (7, 3)):
        if given_up:
            assert bench.poisoned(place)
        else:
            assert bench.world.pages(bench.blocks(place)) == contents[n]
    assert bench.waited == []
    bench.wait_until_idle()
    bench.close()
