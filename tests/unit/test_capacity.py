"""Writers with their maintenance processes, as engines have them: the disk is measured from outside."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from dataclasses import asdict
from types import SimpleNamespace

import msgpack
import pytest
from capacity_lab import (
    NAME,
    WRITER,
    disk_nbytes,
    holder_of,
    make_namespace,
    name_of,
    private,
    write_chunk,
)
from world import Clock, returns_in_time, wait_for

from fskv.bounds import client
from fskv.bounds.client import _HUNG_S, _SILENT_S, Capacity
from fskv.bounds.eviction_news import EvictionNews
from fskv.bounds.lease import SHARED_DIR
from fskv.bounds.limits import Limits, RootState, Usage
from fskv.bounds.shared_files import SharedFiles
from fskv.bounds.sights import SightsLog
from fskv.root.process_id import unique_name
from trials.soak_judge import maintenance_processes

MAX = 16 << 20
# From the low mark of a quiet root each of three writers may come to its guard while nobody counts.
MOST = MAX * (0.97 + 3 * 0.06)
RATE = 1 << 19  # bytes a second of one writer: the bound holds 10 s of three
MEAN_NBYTES = 34 << 10  # of one of its chunks


class Writers:
    """Engines that store one after the other, all with the same bound."""

    def __init__(self, root):
        self.root = root
        self.running = []

    def start(self):
        seed = str(time.monotonic_ns())
        words = [sys.executable, "-c", WRITER, self.root, NAME, seed, str(MAX), str(RATE)]
        self.running.append(subprocess.Popen(words, stdout=subprocess.PIPE))
        os.set_blocking(self.running[-1].stdout.fileno(), False)

    def watch(self, nbytes):
        """Stay near the bound while about so much more is written; the limit only bounds a standstill."""
        left, end = nbytes // MEAN_NBYTES, time.monotonic() + 120
        while left > 0:
            assert disk_nbytes(self.root) <= MOST
            assert time.monotonic() < end, "nothing is written any more"
            time.sleep(0.02)
            for process in self.running:
                with contextlib.suppress(BlockingIOError):
                    left -= os.read(process.stdout.fileno(), 1 << 16).count(b"\n")

    def kill(self):
        process = self.running.pop(0)
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def writers(root):
    found = Writers(root)
    yield found
    while found.running:
        found.kill()


def test_three_writers_stay_near_the_bound_whoever_is_killed(root, writers):
    for _ in range(3):
        writers.start()
    writers.watch(3 * MAX // 2)
    # The process that prunes for all is killed: another one goes on, its engine gets a new one.
    holder = holder_of(root)
    assert holder in maintenance_processes(process.pid for process in writers.running)
    os.kill(holder, signal.SIGKILL)
    writers.watch(MAX // 2)
    wait_for(lambda: holder_of(root) not in (None, holder))
    # An engine is killed in the middle of its writes.
    writers.kill()
    writers.watch(MAX // 2)
    writers.start()
    writers.watch(MAX // 2)
    assert disk_nbytes(root) > MAX * 0.7  # it was not held by removing everything


# --- the guard ----------------------------------------------------------------------------------


@pytest.fixture
def told(root):
    """Return an engine's capacity, and how to tell it a state; without a process."""
    clock = Clock()
    capacity = Capacity(root, NAME, None, Limits(), clock=clock)

    def tell(**fields):
        of_usage = {"sequence": capacity.state.usage.sequence + 1}
        of_usage |= {name: fields.pop(name) for name in ("sequence", "kept_free") if name in fields}
        state = RootState(**{"known": True, "usage": Usage(**of_usage), **fields})
        capacity._take_message({"at": time.monotonic(), **asdict(state)})

    return capacity, tell, clock


def ended(made):
    """Return the start of a process as it is when it has ended."""
    starting = Future()
    starting.set_result(made)
    return starting


def store(capacity, nbytes):
    """Store 1 KiB chunks until one is refused, or so many bytes; returns how many bytes."""
    done = 0
    while done < nbytes and capacity.take(1024):
        capacity.settle(1024, 1024)
        done += 1024
    return done


def test_nothing_is_stored_before_the_sizes_are_known(told):
    capacity, tell, _ = told
    assert not capacity.take(1)
    tell(known=False)
    assert not capacity.take(1)
    tell()
    assert capacity.take(1)  # the control


@pytest.mark.parametrize("kind", ["root", "tenant"])
def test_stores_pause_two_percent_above_a_bound(told, kind):
    capacity, tell, _ = told
    limit = 1_024_000
    tell(bounds={kind: (limit, 102_400)})
    assert store(capacity, limit) == 102_400 + limit // 50 // 1024 * 1024
    tell(counted=capacity._written)  # the control: no bound
    assert store(capacity, limit) == limit


def test_stores_under_way_count_until_they_have_ended(told):
    capacity, tell, _ = told
    tell(bounds={"root": (100_000, 10_000)})
    assert capacity.take(12_000)
    assert not capacity.take(1)
    capacity.settle(12_000, 0)  # it has failed
    assert capacity.take(12_000)


def test_half_of_what_must_stay_free_is_never_touched(told):
    capacity, tell, _ = told
    tell(bounds={"free": (1 << 20, 0)}, free=102_400, kept_free=102_400)
    assert store(capacity, 1 << 20) == 51_200
    tell(bounds={"free": (1 << 20, 0)}, free=102_400, kept_free=102_400, seen_written=51_200)
    assert store(capacity, 1 << 20) == 51_200


def test_while_no_sums_come_each_engine_takes_its_part_of_what_is_left(told):
    capacity, tell, clock = told
    limit = 1_024_000
    tell(bounds={"root": (limit, 102_400)}, writers=4)
    clock.advance(9)
    assert store(capacity, limit) == (102_400 + limit // 50) // 4 // 1024 * 1024


def test_what_a_process_has_not_told_the_next_one_tells(told, monkeypatch):
    capacity, tell, _ = told
    tell()
    assert store(capacity, 8192) == 8192
    tell(counted=6144, seen_written=8192)
    sent = []
    made = SimpleNamespace(send=lambda message: sent.append(message) or True, close=lambda: None)
    capacity._begin(ended(made))
    capacity._report()
    assert sent[-1] == {"written": 2048, "full": 0, "namespace": NAME}
    capacity._process = None


def test_while_nobody_counts_one_percent_of_a_bound_is_stored_and_no_more(told):
    """A leader that hangs, or a partition: the process tells of no new sequence."""
    capacity, tell, clock = told
    state = {"bounds": {"root": (1_024_000, 1_024_000)}}
    tell(**state)
    clock.advance(_SILENT_S - 1)
    assert store(capacity, 20_480) == 20_480  # the control
    tell(**state, sequence=capacity.state.usage.sequence)  # alive, but the same
    clock.advance(2)
    assert store(capacity, 1 << 20) == 10_240
    clock.advance(3600)
    assert store(capacity, 1 << 20) == 0
    tell(**state)
    assert store(capacity, 20_480) == 20_480


def test_a_full_disk_pauses_stores_and_longer_each_time(told):
    capacity, tell, clock = told
    tell()
    for seconds in (2, 4, 8):
        capacity.no_space()
        clock.advance(seconds - 0.1)
        assert not capacity.take(1)
        clock.advance(0.2)
        assert capacity.take(1)
    capacity.settle(3, 1)  # there is room again
    capacity.no_space()
    clock.advance(2.1)
    assert capacity.take(1)


# --- the process --------------------------------------------------------------------------------


def can_store(capacity, nbytes=4096):
    capacity.poll()
    return capacity.take(nbytes)


@pytest.fixture
def engine(root):
    """Start a Capacity in this process, with a clock of the test's."""
    started = []

    def start():
        clock = Clock()
        started.append(Capacity(root, NAME, None, Limits(max_nbytes=1 << 30), clock=clock))
        started[-1].start()
        wait_for(lambda: can_store(started[-1]))
        return started[-1], clock

    yield start
    for pid in maintenance_processes([os.getpid()]):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    for capacity in started:
        capacity.close()
    wait_for(lambda: not maintenance_processes([os.getpid()]))


def test_a_silent_process_never_blocks_the_engine(engine):
    capacity, clock = engine()
    os.kill(capacity.pid, signal.SIGSTOP)
    assert capacity.take(4096)
    clock.advance(_SILENT_S + 1)
    assert capacity.take(4096)  # a little
    assert not capacity.take(1 << 24)

    def fill():  # far more messages than a pipe holds
        for _ in range(5000):
            capacity.settle(0, 1)
            capacity.poll()
            capacity.take(1 << 20)

    returns_in_time(fill)
    os.kill(capacity.pid, signal.SIGCONT)
    wait_for(lambda: can_store(capacity, 1 << 24))


def test_a_killed_process_is_started_again(engine):
    capacity, clock = engine()
    old = capacity.pid
    os.kill(old, signal.SIGKILL)
    wait_for(lambda: not capacity.up)
    capacity.poll()
    clock.advance(_SILENT_S + 1)
    assert not capacity.take(1 << 24)
    wait_for(lambda: can_store(capacity, 1 << 24))
    assert capacity.pid != old


@pytest.mark.parametrize("moves", [True, False], ids=["", "negative control"])
def test_an_engine_with_another_namespace_has_its_news_and_its_heartbeat_there(root, engine, moves):
    """Its process is the same; one that is started later begins there."""
    other = name_of(epoch=private(1))
    for number, name in enumerate((NAME, NAME, other)):
        write_chunk(make_namespace(root, name, epoch=private(1) if name == other else None), number)
    news = EvictionNews(f"{root}/{SHARED_DIR}")
    digests = [name.rpartition("@")[2] for name in (NAME, other)]
    capacity, clock = engine()
    pid = capacity.pid
    sights = [SightsLog(f"{root}/{SHARED_DIR}", digest, unique_name()) for digest in digests]

    def beats():
        found = SharedFiles(f"{root}/{SHARED_DIR}").heartbeats()
        return {beat.namespace for beat in found}, {beat.name for beat in found}

    def hears(number):
        for which, digest in enumerate(digests):
            news.publish(digest, [(bytes([number] * 16), which)])
            sights[which].publish(bytes([which] * 8))
        removed, seen = [], []
        wait_for(lambda: removed.extend(capacity.poll()) or removed)
        wait_for(lambda: seen.extend(capacity.report_use(0, (0, 0), lambda _: b"")) or seen)
        which = int(moves and number > 1)
        return removed == [(bytes([number] * 16), which)] and {*b"".join(seen)} == {which}

    wait_for(lambda: capacity.poll() == [] and capacity.state.namespace_nbytes == 2 * 4096)
    assert hears(1)
    if moves:
        capacity.move(other)
    name, nbytes = (other, 4096) if moves else (NAME, 2 * 4096)
    wait_for(lambda: beats()[0] == {name})
    assert hears(2)
    wait_for(lambda: capacity.poll() == [] and capacity.state.namespace_nbytes == nbytes)
    _, names = beats()
    assert capacity.pid == pid
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not capacity.up)
    clock.advance(client._RESTART_S + 1)
    wait_for(lambda: can_store(capacity) and capacity.up)
    wait_for(lambda: not names & beats()[1])
    assert beats()[0] == {name}
    assert hears(3)


# What may come from the process instead of messages, or before them.
GARBAGE = {
    "text": b"UserWarning: this may change\n",
    "no msgpack": b"\xc1",
    "an array": msgpack.packb([1, 2]),
    "a field that is none": msgpack.packb({"at": 0.0, "many": 7}),
    "names that are none": msgpack.packb({"at": 0.0, "removed": 7}),
    "deeper than any message": b"\x91" * 2000,
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_from_the_process_is_no_exception_in_the_engine(root, engine, monkeypatch, kind):
    said = []

    class Says(client.MaintenanceProcess):
        def receive(self, most):
            return said.pop() if said else super().receive(most)

    monkeypatch.setattr(client, "MaintenanceProcess", Says)
    capacity, clock = engine()
    said.append(GARBAGE[kind])
    capacity.poll()
    assert not capacity.up, "who says such things is not believed"
    wait_for(lambda: not maintenance_processes([os.getpid()]))
    clock.advance(client._RESTART_S + 1)
    wait_for(lambda: can_store(capacity) and capacity.up)


@pytest.mark.parametrize("kind", GARBAGE)
def test_negative_control_unprotected_each_kind_of_garbage_is_an_exception(kind, tmp_path):
    capacity = Capacity(str(tmp_path), NAME, None, Limits())
    unpacker = msgpack.Unpacker()
    unpacker.feed(GARBAGE[kind])

    def hear():
        for message in unpacker:
            capacity._take_message(message)

    with pytest.raises((TypeError, ValueError, KeyError, AttributeError)):
        hear()


def polls_in(seconds):
    """Return how many polls every five seconds that are: who does not poll hears no silence."""
    return int(seconds) // 5 + 2


@pytest.mark.parametrize("longest_s", [client._SELDOMEST_S, 0], ids=["", "negative control"])
def test_of_processes_that_a_hung_root_keeps_there_are_a_few_and_it_heals(
    longest_s, root, engine, monkeypatch
):
    """As in a call that a dead server never answers: SIGKILL ends none of them."""
    stopped, hung = [], False

    class Hangs(client.MaintenanceProcess):
        def introduce(self, pid):
            super().introduce(pid)
            if hung:
                os.kill(pid, signal.SIGSTOP)
                stopped.append(pid)

        def kill(self):
            self._say_end()

    monkeypatch.setattr(client, "_SELDOMEST_S", longest_s)
    monkeypatch.setattr(client, "MaintenanceProcess", Hangs)
    capacity, clock = engine()
    hung = True
    os.kill(capacity.pid, signal.SIGSTOP)
    stopped.append(capacity.pid)
    try:
        for _ in range(5):
            if capacity._process is None and capacity._starting is None:
                break
            wait_for(lambda: capacity.poll() or capacity.pid in stopped)
            for _ in range(polls_in(_SILENT_S + _HUNG_S + 11)):
                clock.advance(5)
                returns_in_time(lambda: capacity.poll() or 1)
        assert (len(maintenance_processes([os.getpid()])) <= 3) is bool(longest_s)
        hung = False
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(process.running for process in capacity._killed))
    clock.advance(11)
    wait_for(lambda: capacity.poll() or capacity.up)
    assert len(maintenance_processes([os.getpid()])) == 1


@pytest.mark.parametrize("on_its_own", [True, False], ids=["", "negative control"])
def test_an_interpreter_that_lies_on_a_hung_mount_holds_no_step(engine, monkeypatch, on_its_own):
    """Starting a process waits until its program is loaded. In the control the engine's thread does."""
    answers = threading.Event()

    class Loads(client.MaintenanceProcess):
        def __init__(self, options):
            assert answers.wait(60)
            super().__init__(options)

    if not on_its_own:
        monkeypatch.setattr(client, "started_beside", lambda start: ended(start()))
    capacity, clock = engine()
    monkeypatch.setattr(client, "MaintenanceProcess", Loads)
    capacity._kill_process()
    wait_for(lambda: not capacity._killed[0].running)
    clock.advance(client._RESTART_S + 1)
    polls = threading.Thread(target=capacity.poll)
    polls.start()
    polls.join(20 if on_its_own else 0.5)
    assert polls.is_alive() is not on_its_own
    answers.set()
    polls.join(20)
    wait_for(lambda: can_store(capacity) and capacity.up)


def test_a_root_that_vanishes_or_cannot_be_written_stores_nothing_and_stops_nobody(root, engine):
    capacity, clock = engine()
    shutil.rmtree(root, ignore_errors=True)
    for _ in range(50):
        returns_in_time(capacity.poll)
        capacity.take(1 << 20)
        clock.advance(1)
        time.sleep(0.01)
    assert not capacity.take(1 << 24)
    assert not os.path.exists(f"{root}/{NAME}")
