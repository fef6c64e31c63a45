"""Calls that never return cost a bounded number of threads, and nobody waits for them."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
from world import returns_in_time, wait_for

from fskv.data_path.breaker import Breaker
from fskv.data_path.threads import HangProofPool, call_with_deadline
from fskv.errors import RootError
from fskv.native import _native
from fskv.types import Status


class Gate:
    """Calls that block until the gate opens."""

    def __init__(self):
        self.opened = threading.Event()
        self.lock = threading.Lock()
        self.num_inside = 0
        self.num_done = 0

    def __call__(self):
        with self.lock:
            self.num_inside += 1
        self.opened.wait(60)
        with self.lock:
            self.num_inside -= 1
            self.num_done += 1


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.opened.set()


def pool_of_calls(name, num_threads, max_hung, context=contextlib.nullcontext):
    queue = _native.Queue(num_threads, 0)
    return HangProofPool(name, num_threads, max_hung, queue, lambda task, _: task.owner(), context)


@pytest.fixture
def make_pool():
    pools = []

    def make(num_threads=2, max_hung=2, name="fskv-test"):
        pools.append(pool_of_calls(name, num_threads, max_hung))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def threads_named(name):
    return [t for t in threading.enumerate() if t.name.startswith(f"{name}-")]


def submit(pool, call):
    task = _native.Transfer(call, True, _native.Guard(True))
    pool.submit(task)
    return task


def run_one(pool):
    done = threading.Event()
    submit(pool, done.set)
    assert done.wait(20)
    wait_for(lambda: pool.num_idle == pool._num_alive - pool.num_hung)


@pytest.mark.parametrize("num_warm", [0, 1, 3])
def test_as_many_calls_run_at_once_as_there_are_threads(make_pool, num_warm):
    """Also when some threads wait idle, and the calls come faster than those wake up."""
    for _ in range(20):
        pool = make_pool(num_threads=4)
        together = threading.Barrier(num_warm + 1)
        if num_warm:
            for _ in range(num_warm):
                submit(pool, lambda b=together: b.wait(20))
            together.wait(20)
            wait_for(lambda p=pool: p.num_idle == num_warm)
        meeting = threading.Barrier(5)
        for _ in range(4):
            submit(pool, lambda b=meeting: b.wait(20))
        try:
            meeting.wait(20)
        except threading.BrokenBarrierError:
            pytest.fail("four calls on four threads did not run at the same time")


def test_a_cancelled_call_never_runs_and_a_started_one_cannot_be_cancelled(make_pool, gate):
    pool = make_pool(num_threads=1)
    ran = []
    started = submit(pool, gate)
    wait_for(lambda: gate.num_inside == 1)
    queued = submit(pool, lambda: ran.append(1))
    assert not pool.queue.cancel(started)
    assert pool.queue.cancel(queued)
    gate.opened.set()
    run_one(pool)
    assert ran == []
    assert not pool.queue.cancel(started)


def test_a_hung_thread_is_replaced_up_to_the_bound_and_ends_when_it_returns(make_pool, gate):
    pool = make_pool(num_threads=2, max_hung=3, name="fskv-bound")
    tasks = []
    for _ in range(20):
        tasks.append(submit(pool, gate))
        for task in tasks:
            pool.write_off(task)
            pool.write_off(task)  # counts once
        time.sleep(0.002)

    def as_many_as_may_hang():
        for task in tasks:  # also those that had not begun when they were submitted
            pool.write_off(task)
        return gate.num_inside == 5

    wait_for(as_many_as_may_hang)
    time.sleep(0.05)
    assert gate.num_inside == len(threads_named("fskv-bound")) == 5  # 2 + max_hung
    for task in tasks:
        pool.write_off(task)
    assert pool.num_hung == 5
    gate.opened.set()
    wait_for(lambda: gate.num_done == 20)
    wait_for(lambda: pool.num_hung == 0)
    run_one(pool)
    wait_for(lambda: len(threads_named("fskv-bound")) <= 2)


def test_a_call_that_raises_does_not_cost_its_thread(make_pool, caplog):
    pool = make_pool(num_threads=1, name="fskv-raise")
    for _ in range(5):
        submit(pool, lambda: 1 // 0)
    run_one(pool)
    assert len(threads_named("fskv-raise")) == 1
    assert len(caplog.records) == 5


def test_threads_that_cannot_begin_are_not_started_for_ever(caplog):
    """10,530 threads in 2 s it was, where the device was lost."""
    broken, begun, ran = True, [], threading.Event()

    @contextlib.contextmanager
    def context():
        begun.append(1)
        if broken:
            raise RuntimeError("CUDA error: device-side assert triggered")
        yield

    pool = pool_of_calls("fskv-lost", 4, 8, context)
    submit(pool, ran.set)
    wait_for(lambda: begun and not threads_named("fskv-lost"))
    time.sleep(0.05)  # what is started without an end has long begun
    assert len(begun) == 1
    assert len(caplog.records) == 1
    assert "device-side assert" in caplog.text
    broken = False
    run_one(pool)
    assert ran.wait(20), "what was queued is run by the next thread"
    pool.close()


def test_close_drops_what_is_queued_ends_the_threads_and_waits_for_none(make_pool, gate):
    pool = make_pool(num_threads=2, name="fskv-close")
    ran = []
    run_one(pool)
    submit(pool, gate)
    submit(pool, gate)
    wait_for(lambda: gate.num_inside == 2)
    submit(pool, lambda: ran.append(1))
    returns_in_time(lambda: pool.close() or True)
    gate.opened.set()
    wait_for(lambda: not threads_named("fskv-close"))
    assert ran == []


def test_a_thread_that_cannot_be_started_does_not_raise_into_the_engine(make_pool, monkeypatch):
    """The container's limit of processes is reached: the call stays queued for the next thread."""
    pool = make_pool(num_threads=2)
    ran = threading.Event()

    def refuse(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        submit(pool, ran.set)
    run_one(pool)
    assert ran.wait(20)


# --- which transfer is next ----------------------------------------------------------------------


@pytest.fixture
def line():
    """A queue that lets one store run beside loads, and a maker of transfers for it."""
    queue, guard = _native.Queue(8, 1), _native.Guard(True)
    yield queue, lambda is_load: _native.Transfer(object(), is_load, guard)
    queue.close()


def takes(queue):
    """Start a thread that takes one task; returns where it will be."""
    taken = []
    threading.Thread(target=lambda: taken.append(queue.take(None)), daemon=True).start()
    return taken


def test_urgent_tasks_come_first_and_beside_them_few_others(line):
    queue, make = line
    normal, urgent = [make(False) for _ in range(3)], make(True)
    queue.push(normal)
    queue.push([urgent])
    assert queue.take(None) is urgent
    assert queue.take(None) is normal[0]
    waiting = takes(queue)
    wait_for(lambda: queue.num_idle == 1)
    queue.finish(urgent)
    wait_for(lambda: waiting == [normal[1]])
    assert queue.take(None) is normal[2]


@pytest.mark.parametrize("hangs", [False, True], ids=["finish", "write_off"])
def test_a_place_beside_urgent_tasks_that_becomes_free_is_used(line, hangs):
    """Without this, stores stayed queued while threads were idle, until the last load ended."""
    queue, make = line
    normal, urgent = [make(False) for _ in range(3)], make(True)
    queue.push([urgent, *normal])
    assert queue.take(None) is urgent
    first = queue.take(None)
    waiting = takes(queue)
    wait_for(lambda: queue.num_idle == 1)
    assert not waiting
    (queue.write_off if hangs else queue.finish)(first)
    wait_for(lambda: waiting == [normal[1]])
    assert queue.num_hung == hangs


def test_an_urgent_task_that_hangs_holds_nobody_back(line):
    queue, make = line
    urgent, normal = make(True), [make(False) for _ in range(3)]
    queue.push([urgent])
    assert queue.take(None) is urgent
    assert queue.write_off(urgent)
    assert not queue.write_off(urgent)
    queue.push(normal)
    assert [returns_in_time(lambda: queue.take(None)) for _ in normal] == normal
    assert queue.finish(urgent)
    assert queue.num_hung == 0


def test_parked_transfers_wait_for_their_release_and_some_go_first(line):
    queue, make = line
    parked, normal, first = make(False), make(False), make(False)
    queue.push([parked], parked=True)
    queue.push([normal])
    queue.push([first], first=True)
    assert queue.take(None) is first
    queue.finish(first)
    assert queue.take(None) is normal
    waiting = takes(queue)
    wait_for(lambda: queue.num_idle == 1)
    assert not waiting
    queue.release([parked])
    wait_for(lambda: waiting == [parked])
    assert not queue.cancel(parked)


def test_no_more_transfers_are_at_the_disk_than_may_be():
    queue, guard = _native.Queue(2, 1), _native.Guard(True)
    transfers = [_native.Transfer(object(), True, guard) for _ in range(3)]
    queue.push(transfers)
    taken = [queue.take(None), queue.take(None)]
    waiting = takes(queue)
    wait_for(lambda: queue.num_idle == 1)
    assert not waiting
    queue.finish(taken[0])
    wait_for(lambda: waiting == transfers[2:])
    queue.close()


# --- calls at start-up ------------------------------------------------------------------------


def test_a_call_with_a_deadline_returns_raises_or_is_given_up(gate):
    assert call_with_deadline(lambda: 7, 20, "no") == 7
    with pytest.raises(ZeroDivisionError):
        call_with_deadline(lambda: 1 // 0, 20, "no")
    with pytest.raises(RootError, match=r"the root did not answer within 0\.05 s"):
        call_with_deadline(gate, 0.05, "the root did not answer")


# --- the circuit breaker ----------------------------------------------------------------------


@pytest.fixture
def breaker(clock):
    return Breaker(failures=3, clock=clock)


def test_the_breaker_opens_after_failures_in_a_row_and_only_then(breaker):
    for _ in range(10):
        breaker.record(Status.IO_ERROR)
        breaker.record(Status.TIMED_OUT)
        breaker.record(Status.OK)
    assert not breaker.open
    assert breaker.allows()
    for _ in range(3):
        breaker.record(Status.TIMED_OUT)
    assert breaker.open


@pytest.mark.parametrize(
    "status", [Status.OK, Status.EXISTS, Status.MISSING, Status.STALE, Status.CORRUPT]
)
def test_every_answer_of_the_disk_closes_the_breaker(breaker, status):
    for _ in range(5):
        breaker.record(Status.IO_ERROR)
    assert breaker.open
    breaker.record(status)
    assert not breaker.open
    assert breaker.allows()


def test_what_never_reached_the_disk_says_nothing_about_it(breaker):
    for _ in range(2):
        breaker.record(Status.IO_ERROR)
    for _ in range(10):
        breaker.record(Status.SKIPPED)
        breaker.record(Status.BREAKER)
    assert not breaker.open
    breaker.record(Status.IO_ERROR)
    for _ in range(10):
        breaker.record(Status.SKIPPED)
    assert breaker.open


def test_an_open_breaker_lets_one_operation_through_per_interval(breaker, clock):
    for _ in range(3):
        breaker.record(Status.IO_ERROR)
    assert not breaker.allows()
    for _ in range(3):
        clock.advance(5.1)
        assert [breaker.allows() for _ in range(4)] == [True, False, False, False]
        breaker.record(Status.TIMED_OUT)
    clock.advance(5.1)
    assert [breaker.open for _ in range(9)] == [True] * 9
    assert breaker.allows()  # looking at `open` has not used the probe up
