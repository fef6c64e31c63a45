"""The engine's thread never waits for a disk, and no late transfer touches a page that was given back."""

from __future__ import annotations

import contextlib
import errno
import random
import threading
import time
from collections import Counter
from unittest.mock import Mock

import pytest
from world import Clock, read_by_hand, returns_in_time, wait_for

from faults.transport import RandomScript, Script
from fskv.config import Deadline
from fskv.data_path import job as job_module
from fskv.data_path.breaker import Breaker
from fskv.data_path.job import Job
from fskv.data_path.runner import JobRunner
from fskv.types import Status

POISON = -77
DEADLINE = Deadline(base_s=2.0, per_mib_s=0.05, max_s=30.0)


class Bench:
    """A runner on a World; the clock stands still unless a test moves it."""

    def __init__(
        self,
        world,
        *,
        num_threads=2,
        num_slots=8,
        max_queued=100,
        failures=1000,
        deadline=DEADLINE,
    ):
        self.world = world
        self.transport = world.transport
        self.clock = Clock()
        self.breaker = Breaker(failures=failures, clock=self.clock)
        self.runner = JobRunner(
            world.store,
            world.transport,
            num_threads=num_threads,
            num_slots=num_slots,
            max_queued_chunks=max_queued,
            deadline=deadline,
            breaker=self.breaker,
            clock=self.clock,
        )
        self.results = {}
        self.outcomes = []
        self.num_jobs = 0

    def blocks(self, place):
        """Return the block ids of the place-th chunk of pages; disjoint for different places."""
        return range(4 * place, 4 * place + 4)

    def store(self, numbers, place=0, seed=0):
        """Fill the pages of chunks `numbers` and submit their store; returns job and contents."""
        contents = {
            n: self.world.fill(self.blocks(place + i), seed + n) for i, n in enumerate(numbers)
        }
        self.num_jobs += 1
        requests = [self.world.request(n, self.blocks(place + i)) for i, n in enumerate(numbers)]
        returns_in_time(lambda: self.runner.submit_store(self.num_jobs, requests, None) or 1)
        return self.num_jobs, contents

    def load(self, numbers, place=0, **limits):
        """Poison the pages and submit a load of chunks into them."""
        self.num_jobs += 1
        for i in range(len(numbers)):
            self.poison(self.blocks(place + i))
        requests = [self.world.request(n, self.blocks(place + i)) for i, n in enumerate(numbers)]
        returns_in_time(
            lambda: self.runner.submit_load(self.num_jobs, requests, None, **limits) or 1
        )
        return self.num_jobs

    def poison(self, block_ids):
        for tensor in self.world.tensors:
            tensor[block_ids.start : block_ids.stop] = POISON

    def poisoned(self, place):
        pages = self.world.pages(self.blocks(place))
        return pages == bytes([POISON % 256]) * len(pages)

    def poll(self):
        for result in returns_in_time(self.runner.poll):
            assert result.job_id not in self.results, "reported twice"
            self.results[result.job_id] = result
        self.outcomes += self.runner.take_outcomes()
        return self.results

    def finish(self, *jobs):
        """Poll until these jobs are reported; the clock does not move."""
        wait_for(lambda: set(jobs) <= set(self.poll()))
        return [self.results[job] for job in jobs]

    def statuses(self, *, loads):
        self.poll()
        return Counter(o.status for o in self.outcomes if o.is_load is loads)

    def wait_until_idle(self):
        """Everything has returned: no slot and no thread is kept."""

        def idle():
            self.poll()  # collects what was done outside the interpreter
            runner = self.runner
            return not (runner.num_running or runner.num_slots_used or runner.num_open_stores)

        wait_for(idle)
        wait_for(lambda: self.runner.num_threads_hung == 0)
        self.poll()


@pytest.fixture
def make_bench(make_world):
    with contextlib.ExitStack() as stack:

        def make(faults=None, **options):
            bench = Bench(make_world(faults=faults), **options)
            stack.callback(bench.runner._pool.close)
            stack.callback(bench.transport.release)
            return bench

        yield make


@pytest.fixture
def bench(make_bench):
    return make_bench()


def calm(bench):
    bench.transport.script = Script()
    bench.transport.release()


# --- round trip -------------------------------------------------------------------------------


def test_a_stored_job_is_loaded_into_other_pages(bench):
    job, contents = bench.store([1, 2, 3])
    (stored,) = bench.finish(job)
    assert not stored.failed
    assert not stored.is_load
    wait_for(lambda: bench.statuses(loads=False)[Status.OK] == 3)
    for n, content in contents.items():
        assert read_by_hand(bench.world.path(n)).payload[: len(content)] == content
    bench.poison(range(64))
    (loaded,) = bench.finish(bench.load([3, 1, 2], place=5))
    assert not loaded.failed
    for place, n in ((5, 3), (6, 1), (7, 2)):
        assert bench.world.pages(bench.blocks(place)) == contents[n]
    assert bench.poisoned(8)
    assert loaded.nbytes == 3 * len(contents[1])
    assert loaded.seconds == stored.seconds == 0  # the clock stood still
    bench.wait_until_idle()


def test_an_empty_job_is_reported(bench):
    bench.runner.submit_load(1, [], None)
    bench.runner.submit_store(2, [], None)
    assert {r.failed for r in bench.finish(1, 2)} == {False}


def test_loads_overtake_queued_stores(make_bench):
    bench = make_bench(num_threads=1)
    bench.world.put(50, bench.world.content())
    bench.transport.script = Script(write="H")
    stored, _ = bench.store([1, 2, 3, 4, 5, 6])
    bench.transport.wait_until_hanging(1)
    loaded = bench.load([50], place=10)
    bench.transport.release()
    assert not bench.finish(stored, loaded)[1].failed
    bench.wait_until_idle()
    order = [outcome.file for outcome in bench.outcomes]
    assert len(order) == 7
    # Ahead of it only the one that was being written.
    assert order.index(bench.world.chunk(50)) == 1


# --- a store leaves the pages -------------------------------------------------------------------


def test_a_store_is_reported_when_gathered_although_its_write_hangs(make_bench):
    bench = make_bench(Script(write="H*"))
    job, contents = bench.store([1, 2])
    (result,) = bench.finish(job)
    assert not result.failed
    bench.transport.wait_until_hanging(2)
    assert bench.world.chunk_files() == []
    # The engine uses the pages again at once; the file must not see it.
    bench.poison(range(64))
    calm(bench)
    bench.wait_until_idle()
    for n, content in contents.items():
        assert read_by_hand(bench.world.path(n)).payload[: len(content)] == content


def stored_contents(bench):
    """Return, by hand, the content of each file on disk."""
    size = bench.world.file_layout.content_nbytes
    found = {}
    for path in bench.world.chunk_files():
        file = read_by_hand(path)
        found[int.from_bytes(file.meta["key"], "big")] = file.payload[:size]
    return found


@pytest.mark.parametrize(
    ("num_slots", "waited"),
    [(3, True), (8, True), (24, True), pytest.param(20, False, id="control")],
)
def test_wait_returns_while_the_disk_hangs_and_the_pages_are_free(make_bench, num_slots, waited):
    """Without the wait, the control, the poison is stored."""
    bench = make_bench(Script(write="H*"), num_slots=num_slots)
    job, contents = bench.store(list(range(10)))
    bench.transport.wait_until_hanging(2)
    if waited:
        returns_in_time(lambda: bench.runner.wait([job]) or 1)
    bench.poison(range(64))
    assert job in bench.poll() or not waited
    assert bench.runner.num_slots_used <= num_slots
    calm(bench)
    bench.wait_until_idle()
    found = stored_contents(bench)
    assert (found == {n: contents[n] for n in found}) is waited
    if not waited:
        return
    # Two were being written, the others as far as spare slots reached; none holds poison.
    assert 2 <= len(found) <= 10
    statuses = bench.statuses(loads=False)
    assert statuses == {
        k: v for k, v in {Status.OK: len(found), Status.SKIPPED: 10 - len(found)}.items() if v
    }
    if num_slots == 24:
        assert len(found) == 10  # enough slots: nothing is lost


def test_wait_for_unknown_and_finished_jobs_returns(bench):
    job, _ = bench.store([1])
    bench.finish(job)
    returns_in_time(lambda: bench.runner.wait([job, 12345]) or 1)


@pytest.mark.parametrize("protected", [True, False], ids=["", "negative_control"])
def test_a_store_is_not_reported_while_its_pages_are_read_however_long_that_takes(
    make_bench, monkeypatch, protected
):
    """A device may be busy for seconds. Pages that are reported are the next request's."""
    if not protected:
        monkeypatch.setattr(
            job_module.FileTask, "disk_s", lambda task, now: now - (task.python_began_at or now)
        )
    bench = make_bench(Script(gather="H"), num_threads=2)
    job, contents = bench.store([1])
    bench.transport.wait_until_hanging(1)
    bench.clock.advance(10)
    assert (job in bench.poll()) is not protected
    if not protected:
        bench.poison(range(64))
    calm(bench)
    if protected:
        bench.clock.advance(10)
        bench.finish(job)
        bench.poison(range(64))
    bench.wait_until_idle()
    assert (stored_contents(bench) == {1: contents[1]}) is protected
    assert bench.statuses(loads=False) == {Status.OK if protected else Status.TIMED_OUT: 1}


def test_wait_gathers_two_files_at_once_also_of_different_jobs(make_bench, monkeypatch):
    """On a device the wait for one copy is the time of the next."""
    bench = make_bench(Script(write="H*"), num_slots=20)
    bench.store([1, 2])
    bench.transport.wait_until_hanging(2)
    jobs, contents = zip(*(bench.store([n], place=n) for n in range(3, 7)), strict=True)
    both, gather = threading.Barrier(2, timeout=60), bench.runner._gather_now
    monkeypatch.setattr(
        bench.runner, "_gather_now", lambda *task: both.wait() >= 0 and gather(*task)
    )
    returns_in_time(lambda: bench.runner.wait(jobs) or 1)
    assert set(jobs) <= set(bench.poll())
    bench.poison(range(3, 7))
    calm(bench)
    bench.wait_until_idle()
    stored = stored_contents(bench)
    assert all(stored[n] == content for one in contents for n, content in one.items())


@pytest.mark.parametrize("fails", ["the copy", "memory for a slot"])
def test_a_gather_that_fails_does_not_raise_into_the_engine(make_bench, monkeypatch, fails):
    """wait() gathers on the engine's own thread."""
    gather = "..E*" if fails == "the copy" else ""
    bench = make_bench(Script(write="H*", gather=gather), num_slots=20)
    job, contents = bench.store([1, 2, 3, 4])
    bench.transport.wait_until_hanging(2)
    if not gather:
        monkeypatch.setattr(bench.transport, "new_slot", Mock(side_effect=MemoryError))
    returns_in_time(lambda: bench.runner.wait([job]) or 1)
    assert job in bench.poll()
    calm(bench)
    bench.wait_until_idle()
    assert stored_contents(bench) == {n: contents[n] for n in (1, 2)}


def test_a_load_without_memory_for_a_slot_fails_and_is_not_waited_for(make_bench, monkeypatch):
    bench = make_bench()
    bench.world.put(1, bench.world.content())
    monkeypatch.setattr(bench.transport, "new_slot", Mock(side_effect=MemoryError))
    assert bench.finish(bench.load([1]))[0].failed
    bench.wait_until_idle()


# --- the engine gives its KV up -----------------------------------------------------------------


def test_a_drop_leaves_out_what_was_gathered_ahead_and_gives_its_slots_back(make_bench):
    bench = make_bench(Script(write="H*"), num_slots=20)
    job, contents = bench.store(list(range(8)))
    bench.transport.wait_until_hanging(2)
    returns_in_time(lambda: bench.runner.wait([job]) or 1)
    assert bench.runner.num_slots_used == 8
    assert job in bench.poll()
    returns_in_time(lambda: bench.runner.drop() or 1)
    assert bench.runner.num_slots_used == 2
    assert bench.runner.num_open_stores == 2
    calm(bench)
    bench.wait_until_idle()
    found = stored_contents(bench)
    assert len(found) == 2
    assert found == {n: contents[n] for n in found}


@pytest.mark.parametrize("copy", ["gather", "scatter"])
def test_a_drop_returns_when_the_copy_in_progress_has_ended(make_bench, copy):
    bench = make_bench(Script(**{copy: "H"}), num_threads=1, num_slots=4)
    bench.world.put(1, bench.world.content())
    job = bench.load([1]) if copy == "scatter" else bench.store([2])[0]
    bench.transport.wait_until_hanging(1)
    dropping = threading.Thread(target=bench.runner.drop)
    dropping.start()
    dropping.join(0.1)
    assert dropping.is_alive()  # the pages would be unmapped below it
    calm(bench)
    dropping.join(20)
    assert not dropping.is_alive()
    bench.poison(range(64))
    bench.finish(job)
    bench.wait_until_idle()
    assert all(bench.poisoned(place) for place in range(4)), "no page is written any more"


# --- failed loads -------------------------------------------------------------------------------


def hanging(make_bench, *, at="read", **options):
    """Return a bench, and a load of chunk 1 that hangs."""
    bench = make_bench(**options)
    bench.world.put(1, bench.world.content())
    bench.transport.script = Script(**{at: "H"})
    job = bench.load([1])
    bench.transport.wait_until_hanging(1)
    return bench, job


@pytest.mark.parametrize("protected", [True, False], ids=["", "negative_control"])
def test_a_hung_read_fails_its_job_at_the_deadline_and_never_touches_the_pages(
    make_bench, monkeypatch, protected
):
    """Without the guard, the negative control, what is read late is seen in the pages."""
    if not protected:
        monkeypatch.setattr(Job, "abandon", lambda job: None)
    bench, job = hanging(make_bench)
    assert job not in bench.poll()
    bench.clock.advance(1.9)
    assert job not in bench.poll()
    bench.clock.advance(0.3)
    assert bench.poll()[job].failed
    assert bench.statuses(loads=True) == {Status.TIMED_OUT: 1}
    assert bench.runner.num_threads_hung == 1
    assert bench.runner.num_slots_used == 1  # parked
    calm(bench)
    bench.wait_until_idle()
    assert bench.poisoned(0) is protected
    assert (bench.world.pages(bench.blocks(0)) == bench.world.content()) is not protected


def test_a_load_that_is_not_worth_more_time_is_given_up_and_not_held_against_its_chunks(make_bench):
    bench = make_bench(failures=1)
    for n in range(3):
        bench.world.put(n, bench.world.content(seed=n))
    bench.transport.script = Script(read=".H.")
    job = bench.load([0, 1, 2], allowed_s=0.5)
    wait_for(lambda: bench.statuses(loads=True)[Status.OK] == 2)
    bench.clock.advance(0.6)  # far from the deadline of more than 2 s
    result = bench.poll()[job]
    assert result.failed
    assert result.late
    assert bench.statuses(loads=True) == {Status.OK: 2, Status.SKIPPED: 1}
    assert not bench.breaker.open, "what was given up early is no failure"
    # The read itself is late when it has taken longer than the deadline of its chunk, and that is one.
    bench.clock.advance(2.0)
    bench.poll()
    assert bench.breaker.open
    assert bench.runner.num_threads_hung == 1
    calm(bench)
    bench.wait_until_idle()
    hung = [n for n in range(3) if bench.poisoned(n)]
    assert len(hung) == 1, "the late read must not reach pages that were given back"


def test_a_deadline_during_the_copy_into_the_pages_waits_for_that_copy(make_bench):
    bench, job = hanging(make_bench, at="scatter")
    bench.clock.advance(3)
    poller = threading.Thread(target=bench.poll)
    poller.start()
    poller.join(0.1)
    assert poller.is_alive()
    calm(bench)
    poller.join(20)
    # Reported only now that no thread is in the pages: whole, or as failed.
    bench.finish(job)
    if not bench.results[job].failed:
        assert bench.world.pages(bench.blocks(0)) == bench.world.content()
    bench.poison(range(64))
    bench.wait_until_idle()
    assert bench.poisoned(0)


def test_hung_threads_and_slots_are_bounded_and_all_come_back(make_bench):
    bench = make_bench(num_threads=2, num_slots=8)
    for n in range(12):
        bench.world.put(n, bench.world.content(seed=n))
    bench.transport.script = Script(read="H*")
    for n in range(12):
        job = bench.load([n], place=n)
        bench.clock.advance(3)
        bench.poll()
        wait_for(lambda j=job: j in bench.poll())
        assert bench.results[job].failed
    assert bench.transport.num_hanging <= 2 + 3  # threads, and half of the spare slots
    assert bench.runner.num_slots_used <= 8
    calm(bench)
    bench.wait_until_idle()
    for place in range(12):
        assert bench.poisoned(place)
    (result,) = bench.finish(bench.load([7], place=13))
    assert not result.failed
    assert bench.world.pages(bench.blocks(13)) == bench.world.content(seed=7)


@pytest.mark.parametrize("num_threads", [4, 1])
def test_stores_that_share_a_slow_disk_are_no_hung_ones(make_bench, num_threads):
    """Four threads may take four times as long as one that is alone, which is the control."""
    deadline = Deadline(0.0, 10.0, 1000.0)
    bench = make_bench(Script(write="H*"), num_threads=num_threads, num_slots=12, deadline=deadline)
    bench.store(list(range(num_threads)))
    bench.transport.wait_until_hanging(num_threads)
    alone_s = deadline.for_nbytes(bench.world.file_layout.file_nbytes)
    for times, num_hung in ((3.9, 0 if num_threads == 4 else 1), (0.2, num_threads)):
        bench.clock.advance(times * alone_s)
        bench.poll()
        assert bench.runner.num_threads_hung == num_hung
    assert bench.statuses(loads=False) == {Status.TIMED_OUT: num_threads}
    calm(bench)
    bench.wait_until_idle()


# --- bounds -------------------------------------------------------------------------------------


def test_a_store_beyond_the_queue_is_skipped_and_counted_and_the_job_is_reported(make_bench):
    bench = make_bench(Script(write="H*"), num_threads=1, num_slots=8, max_queued=3)
    job, contents = bench.store(list(range(8)))
    bench.transport.wait_until_hanging(1)
    bench.poll()
    assert bench.statuses(loads=False)[Status.SKIPPED] == 5
    calm(bench)
    bench.finish(job)
    bench.wait_until_idle()
    assert bench.statuses(loads=False) == {Status.SKIPPED: 5, Status.OK: 3}
    assert stored_contents(bench) == {n: contents[n] for n in range(3)}
    # The queue has room again.
    job, _ = bench.store([20], place=9)
    bench.finish(job)
    bench.wait_until_idle()
    assert bench.statuses(loads=False)[Status.OK] == 4


def test_a_queued_store_is_given_up_at_its_deadline(make_bench):
    bench = make_bench(Script(write="H*"), num_threads=1, num_slots=2)
    job, contents = bench.store([1, 2, 3])
    bench.transport.wait_until_hanging(1)
    assert job not in bench.poll()
    bench.clock.advance(31)
    assert job in bench.poll()
    bench.poison(range(64))
    calm(bench)
    bench.wait_until_idle()
    found = stored_contents(bench)
    assert found == {n: contents[n] for n in found}


def test_a_store_without_the_last_blocks_of_its_chunk_is_not_written(bench):
    """The file would hold whatever the slot held before, under checksums that are right."""
    bench.world.fill(range(64), 1)
    bench.runner.submit_store(7, [bench.world.request(1, [0, 1])], None)
    bench.finish(7)
    bench.wait_until_idle()
    assert bench.world.chunk_files() == []
    assert bench.statuses(loads=False) == {Status.SKIPPED: 1}


def test_a_bug_in_the_store_costs_the_chunk_and_neither_thread_nor_slot(bench, monkeypatch):
    for call in ("get", "put"):
        monkeypatch.setattr(bench.world.store, call, Mock(side_effect=KeyError("bug")))
    assert bench.finish(bench.load([1]))[0].failed
    bench.finish(bench.store([1, 2, 3])[0])
    bench.wait_until_idle()
    assert bench.statuses(loads=False) == {Status.IO_ERROR: 3}
    assert bench.statuses(loads=True) == {Status.IO_ERROR: 1}


# --- the breaker --------------------------------------------------------------------------------


def test_the_breaker_opens_after_failures_and_closes_when_the_disk_answers(make_bench):
    bench = make_bench(failures=3)
    for n in range(3):
        bench.world.put(n, bench.world.content(seed=n))
    bench.transport.script = Script(read="E*")
    for n in range(3):
        assert bench.finish(bench.load([n]))[0].failed
    num_reads = bench.transport.num_done["read"]
    assert bench.finish(bench.load([1]))[0].failed
    bench.finish(bench.store([9], place=2)[0])
    assert bench.statuses(loads=True) == {Status.IO_ERROR: 3, Status.BREAKER: 1}
    assert bench.statuses(loads=False) == {Status.BREAKER: 1}
    assert bench.transport.num_done["read"] == num_reads  # the disk was left alone
    calm(bench)
    bench.clock.advance(6)
    assert not bench.finish(bench.load([1]))[0].failed  # the probe
    assert not bench.finish(bench.load([2]))[0].failed
    bench.wait_until_idle()


def test_one_overloaded_job_does_not_open_the_breaker(make_bench):
    """Chunks that no thread has begun to read by the deadline say nothing about the disk."""
    bench = make_bench(num_threads=1, num_slots=4, failures=8)
    for n in range(12):
        bench.world.put(n, bench.world.content(seed=n))
    bench.transport.script = Script(read="H")
    job = bench.load(list(range(12)))
    bench.transport.wait_until_hanging(1)
    bench.clock.advance(20)
    assert bench.poll()[job].failed
    assert not bench.breaker.open
    calm(bench)
    bench.wait_until_idle()


def test_a_dead_root_opens_the_breaker_although_few_threads_can_hang(make_bench):
    """With few slots few threads are replaced: soon no load is begun any more, and that is a sign too."""
    bench = make_bench(num_threads=1, num_slots=3, failures=8)
    for n in range(10):
        bench.world.put(n, bench.world.content(seed=n))
    bench.transport.script = Script(read="H*")
    for turn in range(20):
        job = bench.load([turn % 10], place=turn % 10)
        bench.clock.advance(3)
        assert bench.finish(job)[0].failed
    assert bench.breaker.open
    calm(bench)
    bench.wait_until_idle()


def test_a_load_that_the_guard_refused_is_never_good_even_if_its_thread_ends_before_it_is_closed(
    make_bench, monkeypatch
):
    """Giving a job up shuts its gate first and ends its files then; the thread may end in between."""
    bench = make_bench(Script(read="H"))
    bench.store([1])
    bench.wait_until_idle()
    abandon = Job.abandon

    def abandon_slowly(job):
        abandon(job)
        calm(bench)
        wait_for(lambda: bench.runner.num_running == 0)

    monkeypatch.setattr(Job, "abandon", abandon_slowly)
    job = bench.load([1], place=5)
    bench.transport.wait_until_hanging(1)
    bench.clock.advance(100)
    (result,) = bench.finish(job)
    assert result.failed
    assert bench.poisoned(5)
    assert bench.statuses(loads=True) == {Status.TIMED_OUT: 1}


def test_a_load_is_delivered_once_even_if_the_handle_is_stale_afterwards(make_bench, monkeypatch):
    """The job is reported when it is delivered: a second time would be into pages of somebody else."""
    bench = make_bench()
    bench.store([1])
    bench.wait_until_idle()
    bench.world.store._touch_interval_s = -1
    bench.transport.script = Script(open=".H")
    stale = OSError(errno.ESTALE, "stale")
    monkeypatch.setattr("fskv.data_path.store.os.utime", Mock(side_effect=stale))
    (result,) = bench.finish(bench.load([1], place=5))
    assert not result.failed
    bench.poison(bench.blocks(5))
    calm(bench)
    bench.wait_until_idle()
    assert bench.poisoned(5)


# --- shutdown -----------------------------------------------------------------------------------


def test_shutdown_finishes_the_stores(make_bench):
    bench = make_bench(Script(write="L*"))
    _, contents = bench.store(list(range(6)))
    bench.runner._clock = time.monotonic
    returns_in_time(lambda: bench.runner.shutdown(20.0) or 1)
    assert stored_contents(bench) == contents


def test_no_idle_thread_outlives_shutdown(make_bench):
    """It would free the engine's tensors: at the interpreter's end that ends the process with SIGABRT."""
    for _ in range(20):
        bench = make_bench(Script())
        bench.store(list(range(6)))
        bench.runner._clock = time.monotonic
        bench.runner.shutdown(20.0)
        threads = bench.runner._pool._threads
        assert threads
        assert not any(thread.is_alive() for thread in threads)


def test_shutdown_with_hung_threads_returns(make_bench):
    bench = make_bench(Script(write="H*", read="H*"))
    bench.store(list(range(6)))
    bench.transport.wait_until_hanging(2)
    bench.runner._clock = time.monotonic
    returns_in_time(lambda: bench.runner.shutdown(0.2) or 1)
    bench.poison(range(64))
    calm(bench)
    wait_for(lambda: bench.runner.num_running == 0)
    poison = bytes([POISON % 256]) * 100
    assert not any(poison in content for content in stored_contents(bench).values())


# --- everything at once ---------------------------------------------------------------------------

WEIGHTS = {
    "read": {".": 20, "E": 1, "S": 2, "s": 1, "B": 2, "H": 2, "L": 2},
    "open": {".": 30, "M": 1, "E": 1, "H": 1},
    "write": {".": 20, "E": 1, "N": 1, "H": 2, "L": 2, "M": 1},
    "touch": {".": 1},
}


class Walk:
    """A seeded walk of an engine that keeps its promises, on a disk that does not.

    The content of a chunk follows from its number, as KV follows from a key: that is the dict that is
    "assumed perfect". A place holds the pages of one chunk and belongs to at most one job.
    """

    NUM_PLACES = 14
    NUM_CHUNKS = 24

    def __init__(self, make_bench, seed):
        self.random = random.Random(seed)
        self.script = RandomScript(seed, WEIGHTS)
        self.bench = make_bench(self.script, num_threads=3, num_slots=8, max_queued=12)
        self.free = set(range(self.NUM_PLACES))
        self.jobs = {}  # job -> (is_load, {place: chunk number})
        self.waited = set()  # jobs whose pages wait() has given back
        self.num_loaded = 0
        self.num_failed = 0
        self.num_stored = 0
        self.content = {}
        for n in range(self.NUM_CHUNKS):
            self.content[n] = self.bench.world.fill(range(60, 64), n)
        for place in self.free:
            self.bench.poison(self.bench.blocks(place))

    @property
    def went_somewhere(self):
        return self.num_loaded > 5 and self.num_failed > 5 and self.num_stored > 20

    def take_places(self, most):
        count = self.random.randint(1, min(most, len(self.free)))
        places = self.random.sample(sorted(self.free), count)
        self.free -= set(places)
        for place in places:
            # Nobody may have written here since the place was given back.
            assert self.bench.poisoned(place)
        return dict(zip(places, self.random.sample(range(self.NUM_CHUNKS), count), strict=True))

    def give_back(self, places):
        for place in places:
            self.bench.poison(self.bench.blocks(place))
        self.free |= set(places)

    def submit(self, is_load):
        if not self.free:
            return
        bench = self.bench
        chunks = self.take_places(4)
        bench.num_jobs += 1
        if not is_load:
            for place, n in chunks.items():
                bench.world.fill(bench.blocks(place), n)
        requests = [bench.world.request(n, bench.blocks(p)) for p, n in chunks.items()]
        self.jobs[bench.num_jobs] = (is_load, chunks)
        submit = bench.runner.submit_load if is_load else bench.runner.submit_store
        submit(bench.num_jobs, requests, None)

    def poll(self):
        for result in self.bench.runner.poll():
            is_load, chunks = self.jobs.pop(result.job_id)
            assert is_load == result.is_load
            if result.job_id in self.waited:
                for place in chunks:
                    assert self.bench.poisoned(place)
                self.give_back(chunks)
                continue
            if not is_load:
                assert not result.failed
                self.num_stored += 1
            elif result.failed:
                self.num_failed += 1
            else:
                self.num_loaded += 1
                for place, n in chunks.items():
                    found = self.bench.world.pages(self.bench.blocks(place))
                    assert found == self.content[n], f"wrong KV for chunk {n}"
            self.give_back(chunks)
        self.bench.outcomes += self.bench.runner.take_outcomes()

    def wait(self):
        some = [job for job in self.jobs if self.random.random() < 0.5]
        self.bench.runner.wait(some)
        # The pages are free from the return of wait on, before the job is reported.
        for job in some:
            for place in self.jobs[job][1]:
                self.bench.poison(self.bench.blocks(place))
        self.waited.update(some)

    def step(self):
        self.random.choices(
            [
                lambda: self.submit(True),
                lambda: self.submit(False),
                self.poll,
                self.wait,
                self.bench.transport.release,
                lambda: self.bench.clock.advance(self.random.choice([0.5, 2.5, 40])),
                lambda: self.random.random() < 0.5 and wait_briefly(),
            ],
            [6, 5, 8, 1, 2, 1, 6],
        )[0]()

    def end(self):
        self.script.calm = True
        self.bench.transport.release()
        wait_for(lambda: self.poll() or not self.jobs)
        runner = self.bench.runner
        wait_for(lambda: self.poll() or runner.num_running + runner.num_open_stores == 0)
        wait_for(lambda: self.bench.runner.num_slots_used == 0)
        wait_for(lambda: self.bench.runner.num_threads_hung == 0)


def wait_briefly():
    threading.Event().wait(0.003)


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 10))]
)
def test_a_walk_over_a_bad_disk_never_serves_wrong_kv_and_leaks_nothing(make_bench, seed):
    walk = Walk(make_bench, seed)
    for step in range(8000):
        if step >= 400 and walk.went_somewhere:
            break
        returns_in_time(lambda: walk.step() or 1)
    returns_in_time(lambda: walk.end() or 1, 40)
    for place in range(walk.NUM_PLACES):
        assert walk.bench.poisoned(place)
    for n, content in stored_contents(walk.bench).items():
        assert content == walk.content[n]
    assert walk.bench.world.parts() == []
    assert walk.went_somewhere


def test_negative_control_the_walk_finds_a_missing_row_check(make_bench, monkeypatch):
    from fskv.format import chunk_file

    monkeypatch.setattr(chunk_file, "check_digests", lambda *args: None)
    monkeypatch.setitem(WEIGHTS, "read", {".": 2, "B": 1})
    walk = Walk(make_bench, 0)

    def go():
        for _ in range(2000):
            walk.step()
            if walk.num_loaded % 10 == 9:
                wait_briefly()

    with pytest.raises(AssertionError, match="wrong KV"):
        returns_in_time(go)
