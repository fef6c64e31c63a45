"""A lookup answers from memory, in bounded time, and what it says is no older than it claims."""

from __future__ import annotations

import errno
import gc
import os
import queue
import random
import subprocess
import sys
import threading
import tracemalloc

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from world import Clock, returns_in_time, wait_for

from faults.disk import Child, DiskFaults
from fskv.data_path.breaker import Breaker
from fskv.index.presence import Findings, PresenceIndex, RankFiles, probe_chunks
from fskv.offload.lookup import patience
from fskv.types import ChunkId, Presence, Status

HIT = (Presence.HIT, Status.OK)
UNKNOWN = (Presence.UNKNOWN, Status.OK)
ABSENT = (Presence.MISS, Status.MISSING)


def chunk(number):
    return ChunkId(number.to_bytes(32, "big"), 0)


class Disk:
    """The probe under test control: what is there, what fails, what hangs, and who asked."""

    def __init__(self):
        self.present = set()
        self.calls = []
        self.threads = set()
        self.error = None
        self.hangs = False
        self.seconds_per_key = 0.0001
        self.released = threading.Event()
        self.num_hanging = 0
        self.lock = threading.Lock()

    def __call__(self, chunks, missed_before):
        with self.lock:
            self.threads.add(threading.get_ident())
            self.calls.append((list(chunks), list(missed_before)))
            found = [c in self.present for c in chunks]  # what is there when it looks
            hangs = self.hangs
            self.num_hanging += hangs
        if hangs:
            self.released.wait(60)
            with self.lock:
                self.num_hanging -= 1
        if self.error:
            raise self.error
        return Findings(found, self.seconds_per_key * len(chunks))

    @property
    def asked(self):
        return [c for chunks, _ in self.calls for c in chunks]


class SlowDisk(Disk):
    """Looks at one batch for each turn that it is given: at the one that has waited longest."""

    def __init__(self):
        super().__init__()
        self.waiting = queue.SimpleQueue()
        self.is_slow = True

    def __call__(self, chunks, missed_before):
        if self.is_slow:
            turn = threading.Event()
            self.waiting.put(turn)
            assert turn.wait(60)
        return super().__call__(chunks, missed_before)

    def give_turn(self):
        self.waiting.get(timeout=60).set()

    def be_fast(self):
        self.is_slow = False
        while not self.waiting.empty():
            self.give_turn()


class Bench:
    def __init__(self, **options):
        self.clock = Clock()
        self.disk = options.pop("disk", None) or Disk()
        self.breaker = Breaker(failures=options.pop("failures", 1000), clock=self.clock)
        self.index = PresenceIndex(
            self.disk,
            **{"lookup_timeout_s": 1.0, **options},
            breaker=self.breaker,
            clock=self.clock,
        )

    def lookup(self, number):
        return returns_in_time(lambda: self.index.lookup(chunk(number)))

    def answer(self):
        """End the step and wait until every probe that it started has answered."""
        self.index.flush()
        wait_for(lambda: len(self.index._answers) == len(self.index._batches))

    def learn(self, *numbers):
        for number in numbers:
            assert self.index.lookup(chunk(number)) == UNKNOWN
        self.answer()
        return [self.index.lookup(chunk(number)) for number in numbers]


@pytest.fixture
def make_bench():
    benches = []

    def make(**options):
        benches.append(Bench(**options))
        return benches[-1]

    yield make
    for bench in benches:
        bench.disk.released.set()
        bench.index.close()


@pytest.fixture
def bench(make_bench):
    return make_bench()


# --- answers ----------------------------------------------------------------------------------


def test_a_lookup_never_touches_the_disk_on_the_schedulers_thread(bench):
    bench.disk.present = {chunk(1)}
    assert bench.index.lookup(chunk(1)) == UNKNOWN
    assert bench.index.lookup(chunk(1)) == UNKNOWN
    assert bench.disk.calls == []  # only the end of the step starts anything
    bench.answer()
    assert bench.index.lookup(chunk(1)) == HIT
    assert bench.disk.threads
    assert threading.get_ident() not in bench.disk.threads


def test_the_keys_of_a_step_are_one_batch_and_each_is_asked_once(bench):
    for number in [*range(60), *range(50)]:
        bench.index.lookup(chunk(number))
    bench.answer()
    ((asked, missed),) = bench.disk.calls
    assert asked == [chunk(n) for n in range(60)]
    assert not any(missed)
    bench.index.flush()
    bench.index.flush()
    assert len(bench.disk.calls) == 1


def sizes_of_a_step(bench, first, count=3000):
    """Ask for `count` new keys in one step; returns the sizes of its batches."""
    num_calls = len(bench.disk.calls)
    for number in range(first, first + count):
        bench.index.lookup(chunk(number))
    bench.answer()
    bench.index.flush()
    return [len(asked) for asked, _ in bench.disk.calls[num_calls:]]


def test_batches_grow_where_the_disk_is_fast_and_shrink_at_once_where_it_is_slow(bench):
    bench.disk.seconds_per_key = 0.000002
    assert max(sizes_of_a_step(bench, 0)[:8]) == 64  # of the first 512: nothing is known yet
    assert max(sizes_of_a_step(bench, 10_000)) == 512
    bench.disk.seconds_per_key = 0.000_1  # a near NFS server
    sizes_of_a_step(bench, 20_000)
    assert 8 <= max(sizes_of_a_step(bench, 30_000)) <= 64
    bench.disk.seconds_per_key = 0.02
    sizes_of_a_step(bench, 40_000, 100)
    assert max(sizes_of_a_step(bench, 50_000, 100)) == 8
    bench.disk.seconds_per_key = 0.000002
    sizes_of_a_step(bench, 60_000)
    assert max(sizes_of_a_step(bench, 70_000)) == 512


def test_a_hit_is_believed_for_its_time_and_then_asked_again(bench):
    bench.disk.present = {chunk(1)}
    assert bench.learn(1) == [HIT]
    bench.disk.present = set()
    bench.clock.advance(59)
    assert bench.index.lookup(chunk(1)) == HIT
    assert bench.index.known_present(chunk(1))
    bench.clock.advance(2)
    assert not bench.index.known_present(chunk(1))
    assert bench.learn(1) == [ABSENT]
    assert bench.disk.calls[-1][1] == [False]


def test_a_miss_is_believed_for_its_time_and_the_probe_is_told_of_it(bench):
    assert bench.learn(1) == [ABSENT]
    bench.disk.present = {chunk(1)}
    bench.clock.advance(1.9)
    assert bench.index.lookup(chunk(1)) == ABSENT
    bench.clock.advance(0.2)
    assert bench.learn(1) == [HIT]
    assert bench.disk.calls[-1][1] == [True]  # missed before: look with fresh eyes (NFS)


@pytest.mark.parametrize("ttl", [0.0, 0.05])
def test_even_the_shortest_ttl_answers_instead_of_asking_for_ever(make_bench, ttl):
    """A step may take longer than the ttl; a request must not be deferred without end."""
    bench = make_bench(positive_ttl_s=ttl, negative_ttl_s=ttl)
    bench.disk.present = {chunk(1)}
    answers = []
    for _ in range(5):
        answers.append((bench.index.lookup(chunk(1)), bench.index.lookup(chunk(2))))
        bench.answer()
        bench.index.flush()
        bench.clock.advance(0.2)
    assert (HIT, ABSENT) in answers


def test_a_probe_that_fails_is_a_miss_that_says_so_and_is_asked_again(bench):
    bench.disk.error = OSError(5, "Input/output error")
    assert bench.learn(1, 2) == [(Presence.MISS, Status.IO_ERROR)] * 2
    assert bench.breaker._failures_in_row == 1  # one call, one failure
    bench.disk.error = None
    bench.disk.present = {chunk(1)}
    bench.clock.advance(3)
    assert bench.learn(1, 2) == [HIT, ABSENT]


def test_a_bug_in_the_probe_is_a_miss_at_the_deadline(bench):
    bench.disk.error = KeyError("bug")
    assert bench.index.lookup(chunk(1)) == UNKNOWN
    bench.index.flush()
    bench.clock.advance(1.1)
    assert bench.index.lookup(chunk(1))[0] is Presence.MISS


# --- a hanging disk ---------------------------------------------------------------------------


def test_unknown_becomes_a_miss_at_the_deadline_when_the_probe_hangs(bench):
    bench.disk.hangs = True
    assert bench.lookup(1) == UNKNOWN
    returns_in_time(lambda: bench.index.flush() or 1)
    wait_for(lambda: bench.disk.num_hanging == 1)
    bench.clock.advance(0.9)
    assert bench.lookup(1) == UNKNOWN
    bench.clock.advance(0.2)
    assert bench.lookup(1) == (Presence.MISS, Status.TIMED_OUT)
    bench.index.flush()
    assert bench.breaker._failures_in_row == 1


def test_a_recompute_is_as_long_as_its_tokens_take_at_the_rate_of_prefill_or_an_assumed_one():
    assert patience([128])(8) == pytest.approx(1024 / 20_000)
    assert patience([128, 128])(8) == pytest.approx(512 / 20_000), "of two groups"
    rates = [None, 100.0]
    measured = patience([128], lambda: rates[-1])
    assert measured(8) == pytest.approx(10.24)
    rates.pop()
    assert measured(8) == patience([128])(8)


@pytest.mark.parametrize(
    ("recompute_s", "batch_s", "num_batches", "misses", "at_most_s"),
    [
        pytest.param(20.0, 0.2, 99, False, 6.0, id="slow, and worth it"),
        pytest.param(0.0, 0.2, 99, True, 1.5, id="control: without patience it is recomputed"),
        pytest.param(2.0, 0.2, 99, True, 2.5, id="no longer than the recompute"),
        pytest.param(9999.0, 0.45, 99, True, 11.0, id="no longer than ten times the timeout"),
        pytest.param(20.0, 0.2, 8, True, 3.0, id="hangs, after half of it"),
        pytest.param(20.0, 0.2, 0, True, 1.5, id="hangs"),
    ],
)
def test_a_slow_mount_is_waited_for_as_long_as_a_recompute_takes_and_a_hung_one_is_not(
    make_bench, recompute_s, batch_s, num_batches, misses, at_most_s
):
    """A new client of CephFS asks for many chunks, in 25 batches: two at a time, a turn for each."""
    num = 1600
    bench = make_bench(disk=SlowDisk(), failures=4, recompute_s=lambda n: n / num * recompute_s)
    bench.disk.present = {chunk(number) for number in range(num)}
    start = bench.clock()
    while True:
        answers = {bench.index.lookup(chunk(number)) for number in range(num)}
        bench.index.flush()
        if UNKNOWN not in answers:
            break
        if num_batches:
            num_batches -= 1
            bench.disk.give_turn()
            wait_for(lambda: len(bench.index._answers) or not bench.index._batches)
        bench.clock.advance(batch_s)
    assert answers - {HIT} == ({(Presence.MISS, Status.TIMED_OUT)} if misses else set())
    assert bench.clock() - start <= at_most_s
    assert num_batches == 0 or not bench.breaker.open
    bench.disk.be_fast()


def test_unknown_becomes_a_miss_at_the_deadline_although_nobody_ends_the_step(bench):
    assert bench.lookup(1) == UNKNOWN
    bench.clock.advance(1.1)
    assert bench.lookup(1) == (Presence.MISS, Status.TIMED_OUT)


@pytest.mark.parametrize("newer", ["stored", "failed", "forgotten"])
def test_a_late_answer_does_not_override_what_was_learned_meanwhile(bench, newer):
    bench.disk.hangs = True
    if newer == "failed":
        bench.disk.present = {chunk(1)}  # what the probe saw before it hung
    bench.lookup(1)
    bench.index.flush()
    wait_for(lambda: bench.disk.num_hanging == 1)
    bench.clock.advance(1.1)
    assert bench.lookup(1) == (Presence.MISS, Status.TIMED_OUT)
    bench.index.flush()
    if newer == "stored":
        bench.index.mark_stored(chunk(1))
    elif newer == "failed":
        bench.index.mark_failed(chunk(1), Status.CORRUPT)
    else:
        bench.index.forget_all()
    bench.disk.hangs = False
    bench.disk.released.set()
    wait_for(lambda: len(bench.index._answers))
    expected = {
        "stored": HIT,
        "failed": (Presence.MISS, Status.QUARANTINED),
        "forgotten": UNKNOWN,
    }
    assert bench.lookup(1) == expected[newer]


def test_hung_probes_are_replaced_and_what_they_cost_is_bounded(bench):
    """A mount that is dead for hours: neither threads nor queued probes may pile up."""
    bench.disk.hangs = True
    for number in range(300):
        bench.lookup(number)
        bench.index.flush()
        bench.clock.advance(1.1)
        assert bench.lookup(number) == (Presence.MISS, Status.TIMED_OUT)
        bench.index.flush()
    assert bench.disk.num_hanging <= 2 + 4
    num_asked = len(bench.disk.calls)
    bench.disk.hangs = False
    bench.disk.released.set()
    wait_for(lambda: bench.disk.num_hanging == 0)
    # Nobody wants the answers of long ago any more: they are not asked for now.
    assert bench.learn(1000) == [ABSENT]
    assert len(bench.disk.calls) <= num_asked + 10


def test_a_probe_that_just_gets_a_thread_when_it_is_late_and_then_hangs_is_counted(make_bench):
    """Its thread has it, and has not said so yet: it is given up when it has hung, and not before."""
    bench = make_bench(failures=1)
    begun, gate, run = [], threading.Event(), bench.index._run_probe
    bench.index._run_probe = lambda *probe: (begun.append(1), gate.wait(60), run(*probe))
    bench.disk.hangs = True
    bench.lookup(1)
    bench.index.flush()
    wait_for(lambda: begun)
    bench.clock.advance(1.1)
    bench.index.flush()
    assert (bench.index._pool.num_hung, bench.breaker.open) == (0, False)
    assert bench.lookup(1) == (Presence.MISS, Status.TIMED_OUT)
    gate.set()
    wait_for(lambda: bench.disk.num_hanging == 1)
    bench.clock.advance(1.1)
    bench.index.flush()
    assert (bench.index._pool.num_hung, bench.breaker.open) == (1, True)
    bench.disk.released.set()
    wait_for(lambda: bench.index._pool.num_hung == 0)
    assert not bench.index._batches


def test_a_forked_child_asks_in_vain_and_goes_on():
    """It has none of the threads; the memory of the C library says that one waits."""
    code = """
import os, time
from fskv.index.presence import Findings, PresenceIndex
from fskv.data_path.breaker import Breaker
from fskv.types import ChunkId, Presence
index = PresenceIndex(
    lambda chunks, _: Findings([1] * len(chunks), 1e-4), lookup_timeout_s=0.2, breaker=Breaker()
)
def ask(number):
    index.lookup(ChunkId(b"%d" % number, 0)); index.flush()
ask(0)
while index._pool.num_idle == 0 or index.lookup(ChunkId(b"0", 0))[0] is not Presence.HIT:
    time.sleep(0.01)
if os.fork() == 0:
    for number in range(1, 30):
        ask(number); time.sleep(0.01)
    time.sleep(0.2)
    index.flush()
    os._exit(index.lookup(ChunkId(b"1", 0))[0] is not Presence.MISS or len(index._batches) > 29)
print(os.wait()[1])
ask(99)
while index.lookup(ChunkId(b"99", 0))[0] is not Presence.HIT:
    time.sleep(0.01)
index.close()
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert (run.stdout, run.returncode) == ("0\n", 0), run.stderr


def test_a_dead_root_opens_the_breaker_and_one_probe_closes_it(make_bench):
    bench = make_bench(failures=3)
    bench.disk.hangs = True
    for number in range(3):
        bench.lookup(number)
        bench.index.flush()
        wait_for(lambda n=number: len(bench.disk.calls) == n + 1)
        bench.clock.advance(1.1)
        bench.lookup(number)
        bench.index.flush()
    assert bench.breaker.open
    num_calls = len(bench.disk.calls)
    for number in range(10, 40):
        assert bench.lookup(number) == (Presence.MISS, Status.BREAKER)  # at once, not UNKNOWN
    bench.index.flush()
    assert len(bench.disk.calls) == num_calls
    bench.disk.hangs = False
    bench.disk.present = {chunk(50)}
    bench.clock.advance(5.1)
    assert bench.lookup(50) == UNKNOWN
    assert bench.lookup(51) == (Presence.MISS, Status.BREAKER)  # one only
    bench.index.flush()
    wait_for(lambda: len(bench.index._answers))
    assert bench.lookup(50) == HIT
    assert not bench.breaker.open
    assert bench.learn(51) == [ABSENT]


def test_an_open_breaker_hides_hits_too(make_bench):
    bench = make_bench(failures=1)
    bench.disk.present = {chunk(1)}
    assert bench.learn(1) == [HIT]
    bench.breaker.record(Status.TIMED_OUT)
    assert bench.lookup(1) == (Presence.MISS, Status.BREAKER)


# --- news from the workers --------------------------------------------------------------------


def test_a_failed_load_misses_at_once_and_for_the_quarantine(bench):
    bench.disk.present = {chunk(1)}
    assert bench.learn(1) == [HIT]
    bench.index.mark_failed(chunk(1), Status.CORRUPT)
    quarantined = (Presence.MISS, Status.QUARANTINED)
    assert bench.index.lookup(chunk(1)) == quarantined
    assert not bench.index.known_present(chunk(1))
    bench.clock.advance(29)
    assert bench.index.lookup(chunk(1)) == quarantined
    bench.clock.advance(2)
    assert bench.learn(1) == [HIT]


def test_a_chunk_that_was_gone_is_no_reason_for_a_quarantine(bench):
    bench.disk.present = {chunk(1)}
    bench.learn(1)
    bench.index.mark_failed(chunk(1), Status.MISSING)
    assert bench.index.lookup(chunk(1)) == ABSENT
    bench.clock.advance(2.1)
    assert bench.learn(1) == [HIT]


# --- removed chunks ---------------------------------------------------------------------------


def name(number):
    """What the pruning process says of a chunk: made without the code under test."""
    return xxhash.xxh3_128_digest(chunk(number).key_hash), 0


def test_only_the_group_that_is_named_was_removed(bench):
    other = ChunkId(chunk(1).key_hash, 3)
    for it in (chunk(1), other):
        bench.index.mark_stored(it)
    bench.index.mark_removed([(name(1)[0], 3)])
    assert bench.index.lookup(chunk(1)) == HIT
    assert bench.index.lookup(other) == ABSENT


def test_a_store_that_began_before_the_removal_and_is_reported_after_it_is_no_hit(bench):
    """Its file may be the one that was removed: only another look tells."""
    began = bench.index.num_removals
    bench.index.mark_removed([name(1)])
    assert not bench.index.mark_stored(chunk(1), began)
    assert not bench.index.known_present(chunk(1))
    bench.disk.present = {chunk(2)}
    assert bench.learn(1, 2) == [ABSENT, HIT]
    assert bench.index.mark_stored(chunk(3), began), "it was not removed"
    assert bench.index.mark_stored(chunk(1), bench.index.num_removals), "it began after the removal"
    assert bench.index.lookup(chunk(1)) == HIT


@pytest.mark.parametrize("removed", [True, False])
def test_a_probe_that_saw_the_chunk_before_its_removal_does_not_bring_it_back(bench, removed):
    """It is a miss for one negative TTL, and then the disk is asked again. False: the control."""
    bench.disk.present = {chunk(1)}
    bench.disk.hangs = True
    bench.lookup(1)
    bench.index.flush()
    wait_for(lambda: bench.disk.num_hanging == 1)  # it has seen the chunk
    bench.disk.present = set()
    if removed:
        bench.index.mark_removed([name(1)])
    bench.disk.hangs = False
    bench.disk.released.set()
    wait_for(lambda: len(bench.index._answers))
    assert bench.index.lookup(chunk(1)) == (ABSENT if removed else HIT)
    bench.clock.advance(2.1)
    if removed:
        assert bench.learn(1) == [ABSENT]
    else:
        assert bench.index.lookup(chunk(1)) == HIT


def test_removals_are_forgotten_when_no_hit_is_older_and_never_more_than_a_bound(bench):
    bench.disk.present = {chunk(1)}
    assert bench.learn(1) == [HIT]
    bench.index.mark_removed(name(n) for n in range(10))
    bench.clock.advance(59)
    bench.index.flush()
    assert len(bench.index._removed) == 10
    bench.clock.advance(2)
    bench.index.flush()
    assert len(bench.index._removed) == 0
    assert bench.learn(1) == [HIT]  # whatever was known has run out: the disk is asked
    bench.index.mark_removed((n.to_bytes(16, "big"), 0) for n in range(100_500))
    assert len(bench.index._removed) == 100_000
    bench.clock.advance(61)
    for _ in range(100):  # a step has no time for all of them
        bench.index.flush()
    assert len(bench.index._removed) == 0


def test_a_removal_counts_for_what_was_asked_before_and_taken_late(make_bench):
    """The answer lies there for longer than the TTL, because no step ends; the removal must outlast it."""
    bench = make_bench(positive_ttl_s=1.0)
    bench.disk.present = {chunk(1)}
    bench.index.lookup(chunk(1))
    bench.answer()
    bench.index.mark_removed([name(1)])
    bench.clock.advance(50)
    bench.index.flush()
    assert bench.index.lookup(chunk(1)) == ABSENT


@settings(max_examples=100, deadline=None, database=None)
@given(st.lists(st.tuples(st.sampled_from("lsrfpwd+"), st.integers(0, 3)), max_size=60))
def test_a_walk_never_hits_what_is_gone_and_never_contradicts_what_is_known(events):
    """The model knows for each chunk whether the newest news is a removal; a probe sees when it starts."""
    bench = Bench()
    try:
        gone = set()  # removed, and neither stored nor seen since
        for event, number in events:
            it = chunk(number)
            if event == "l":
                known = bench.index.known_present(it)
                answer = bench.index.lookup(it)
                assert answer in (HIT, UNKNOWN) or answer[0] is Presence.MISS
                assert not (it in gone and answer == HIT)
                assert answer == HIT or not known
            elif event == "s":
                bench.disk.present.add(it)
                bench.index.mark_stored(it)
                gone.discard(it)
                assert bench.index.lookup(it) == HIT
            elif event == "r":
                bench.disk.present.discard(it)
                bench.index.mark_removed([name(number)])
                assert not bench.index.known_present(it), "or nobody would store it again"
                gone.add(it)
            elif event == "f":
                bench.disk.present.discard(it)
                bench.index.mark_failed(it, Status.CORRUPT)
                assert bench.index.lookup(it) == (Presence.MISS, Status.QUARANTINED)
            elif event == "p":
                bench.answer()
            elif event == "w":  # another node stores it: a probe may find it
                bench.disk.present.add(it)
                gone.discard(it)
            elif event == "d":  # it goes, and nobody says so
                bench.disk.present.discard(it)
            else:
                bench.clock.advance(0.7)
        # In the end everybody gets the truth, once what was known has run out.
        bench.answer()
        bench.index.flush()
        bench.clock.advance(100)
        for number in range(4):
            bench.index.lookup(chunk(number))
        bench.answer()
        for number in range(4):
            there = chunk(number) in bench.disk.present
            assert bench.index.lookup(chunk(number)) == (HIT if there else ABSENT)
    finally:
        bench.index.close()


# --- bounds -----------------------------------------------------------------------------------


def test_memory_is_bounded_and_the_least_recently_asked_goes_first(make_bench):
    bench = make_bench(max_known=10)
    for number in range(100):
        bench.index.mark_stored(chunk(number))
        bench.index.lookup(chunk(90 if number > 90 else 0))
        assert bench.index.num_known <= 10
    assert bench.index.lookup(chunk(90)) == HIT
    assert bench.index.lookup(chunk(5)) == UNKNOWN


def test_memory_in_bytes_is_what_the_documentation_says(make_bench):
    """docs/architecture.md, "Presence": 254 to 347 bytes resident a chunk; never more than 400 asked for."""
    limit = 5000

    def fill(index, how, first):
        for number in range(first, first + 2 * limit):
            it = chunk(number)
            if how == "stored":
                index.mark_stored(it)
            elif how == "failed":
                index.mark_failed(it, Status.CORRUPT)
            else:
                index.lookup(it)
                if number % 1000 == 0:
                    bench.answer()
                    index.flush()

    bench = make_bench(max_known=limit)
    for turn, how in enumerate(["stored", "failed", "asked", "stored"]):
        tracemalloc.start()
        before, _ = tracemalloc.get_traced_memory()
        if turn == 0:
            first_before = before
        fill(bench.index, how, 100_000 * turn)
        bench.answer()
        bench.index.flush()
        bench.disk.calls.clear()
        gc.collect()  # batches refer to their tasks: when those go is a matter of what ran before
        used = tracemalloc.get_traced_memory()[0] - first_before
        assert bench.index.num_known == limit
        assert used <= 400 * limit, how
    tracemalloc.stop()


def test_a_step_with_more_chunks_than_are_remembered_still_ends(make_bench):
    bench = make_bench(max_known=10)
    bench.disk.present = {chunk(n) for n in range(30)}
    for number in range(30):
        bench.index.lookup(chunk(number))
    bench.answer()
    # What somebody waits for is not pushed out by what is asked later: else nobody would ever be answered.
    assert [bench.index.lookup(chunk(number)) for number in range(10)] == [HIT] * 10
    assert bench.index.num_known <= 10
    assert bench.index.lookup(chunk(29))[0] is not HIT[0]


# --- looking at files -----------------------------------------------------------------------------

KINDS = [
    *("there", "there", "there", "short", "empty", "absent"),
    *("link", "dangling", "directory", "fifo"),
]
SHARDS = ("there", "there", "there", "there", "absent", "file", "link", "loop")


class Tree:
    """A random namespace with damaged entries of every kind."""

    def __init__(self, root, source, *, num_ranks):
        self.source = source
        self.nbytes = {0: 7, 3: 4096}
        self.keys = [
            (source.randbytes(source.choice([1, 8, 16, 32, 33, 200, 255, 300])), group)
            for group in source.choices([0, 3], k=40)
        ]
        (root / "chunks").mkdir()
        self.ranks = [
            RankFiles(str(root), rank if num_ranks > 1 else None, self.nbytes)
            for rank in range(num_ranks)
        ]
        self.good = set()
        for key, group in self.keys:
            kinds = [self._make(rank, key, group) for rank in self.ranks]
            if set(kinds) == {"there"}:
                self.good.add((key, group))

    def _make(self, rank, key, group):
        # By hand, from docs/format.md.
        digits = xxhash.xxh3_128_hexdigest(key)
        part = "" if rank.rank is None else f".r{rank.rank}"
        shard = f"{rank.namespace_path}/chunks/{digits[:3]}"
        kind, shape = self.source.choice(KINDS), self.source.choice(SHARDS)
        path, nbytes = f"{shard}/{digits}.g{group}{part}.kv", self.nbytes[group]
        if not os.path.lexists(shard):
            if shape == "there":
                os.mkdir(shard)
            elif shape == "file":
                open(shard, "w").close()
            elif shape == "link":  # of a shard, that is followed
                os.makedirs(f"{shard}-elsewhere", exist_ok=True)
                os.symlink(f"{shard}-elsewhere", shard)
            elif shape == "loop":
                os.symlink(shard, shard)
        if not os.path.isdir(shard):
            return "absent"
        if kind in ("there", "short", "empty"):
            sizes = {"there": nbytes, "short": nbytes - 1, "empty": 0}
            with open(path, "wb") as file:
                file.write(bytes(sizes[kind]))
        elif kind == "link":
            with open(f"{shard}/good", "wb") as file:
                file.write(bytes(nbytes))
            os.symlink(f"{shard}/good", path)
        elif kind == "dangling":
            os.symlink("nowhere", path)
        elif kind == "directory":
            os.mkdir(path)
        elif kind == "fifo":
            os.mkfifo(path)
        return kind


def outcome(ranks, keys, missed_before):
    """What probe_chunks says, or the errno that it raises."""
    try:
        return list(map(bool, probe_chunks(ranks, keys, missed_before).there))
    except OSError as error:
        return error.errno


@pytest.mark.parametrize("seed", range(12))
def test_a_chunk_is_there_only_if_every_ranks_file_has_its_size(tmp_path, seed):
    source = random.Random(seed)
    tree = Tree(tmp_path, source, num_ranks=source.choice([1, 1, 2, 5]))
    missed = bytes(source.choices([0, 1], k=len(tree.keys)))
    found = outcome(tree.ranks, tree.keys, missed)
    assert found == [key in tree.good for key in tree.keys]
    for key in tree.keys:
        assert outcome(tree.ranks, [key], b"\x01") in ([key in tree.good], errno.ELOOP)


def test_a_name_too_long_for_the_system_is_an_error_and_not_a_crash(tmp_path):
    ranks = [RankFiles(f"{tmp_path}/{'x' * 4090}", None, {0: 7})]
    assert outcome(ranks, [(b"k", 0)], b"\x01") == errno.ENAMETOOLONG


CHILD = """
import errno, json, os, sys, threading, time
from fskv.index.presence import RankFiles, probe_chunks
def look(names, missed):
    try:
        keys = [(name.encode(), 0) for name in names]
        there = probe_chunks([RankFiles(ROOT, None, {0: 7})], keys, bytes(missed)).there
        return [bool(found) for found in there]
    except OSError as error:
        return errno.errorcode[error.errno]
def look_aside(names):
    answers.clear()
    run = lambda: answers.append(look(names, [0] * len(names)))
    threading.Thread(target=run, daemon=True).start()
    return "started"
def count(seconds):
    n, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        n += 1
    return n
answers = []
print(json.dumps("ready"), flush=True)
for line in sys.stdin:
    print(json.dumps(eval(line)), flush=True)
"""


@pytest.fixture
def faulty(native_library, tmp_path):
    """A child whose disk does what `faults` says; of 40 keys the first 20 have their file."""
    for number in range(20):
        digits = xxhash.xxh3_128_hexdigest(b"%d" % number)
        os.makedirs(tmp_path / "root" / "chunks" / digits[:3], exist_ok=True)
        (tmp_path / "root" / "chunks" / digits[:3] / f"{digits}.g0.kv").write_bytes(bytes(7))
    faults = DiskFaults(native_library("disk"), tmp_path / "root", tmp_path / "state")
    child = Child(f"ROOT = {str(tmp_path / 'root')!r}\n{CHILD}", {**os.environ, **faults.env()})
    child.faults = faults
    yield child
    faults.clear()
    child.close()


NAMES = [str(number) for number in range(40)]
TRUTH = [True] * 20 + [False] * 20
FRESH, AGAIN = [0] * 40, [1] * 40


@pytest.mark.parametrize(
    ("rules", "names", "expected"),
    [
        ([], NAMES, TRUTH),
        (["stat ESTALE count=1"], NAMES, TRUTH),  # looked at twice
        (["stat ESTALE count=2"], NAMES, [False, *TRUTH[1:]]),
        (["stat ESTALE"], NAMES, [False] * 40),  # and no error: the root answers
        *[([f"stat {error}"], NAMES, [False] * 40) for error in ("ENOENT", "EACCES", "EPERM")],
        (["stat ENOTDIR"], NAMES, [False] * 40),
        (["stat EIO"], NAMES, "EIO"),
        (["stat EIO"], NAMES[:1], "EIO"),
        (["stat ETIMEDOUT"], NAMES, "ETIMEDOUT"),
        (["stat EIO count=39"], NAMES, [False] * 40),  # the last was looked at, and is absent
        (["stat EIO count=5"], NAMES, [False] * 5 + TRUTH[5:]),
        (["open EIO"], NAMES, TRUTH),  # not needed for an answer
        (["open ESTALE"], NAMES, TRUTH),
        (["open EMFILE"], NAMES, TRUTH),
    ],
)
@pytest.mark.parametrize("missed", [FRESH, AGAIN])
def test_a_failing_disk_is_a_miss_of_a_file_or_an_error_of_the_root(
    faulty, rules, names, expected, missed
):
    faulty.faults.set(*rules)
    assert faulty(f"look({names}, {missed[: len(names)]})") == expected
    assert all(faulty.faults.fired(rule) for rule in rules if not rule.startswith("open"))


def test_the_shard_is_opened_after_a_miss_and_only_then(faulty):
    """An NFS client hides another node's new file for 28 s after a miss, but not past such an open.

    It remembers the absence of a directory as well: then the parent is opened. What was opened is closed.
    """
    faulty.faults.set("open slow_ms=0 suffix=/chunks", "open slow_ms=0", "close slow_ms=0")
    # Its own descriptor of all shards, once a batch.
    assert faulty(f"look({NAMES}, {FRESH})") == TRUTH
    assert faulty.faults.matched("open slow_ms=0 suffix=/chunks") == 1
    assert faulty.faults.matched("open slow_ms=0") == 0
    faulty.faults.set("open slow_ms=0", "close slow_ms=0")
    assert faulty(f"look({NAMES[:8]}, {[1, 0] * 4})") == TRUTH[:8]
    num_opened = faulty.faults.matched("open slow_ms=0")
    assert num_opened == 1 + 4
    assert faulty.faults.matched("close slow_ms=0") == num_opened
    faulty.faults.set("open slow_ms=0 suffix=/chunks")
    assert faulty(f"look({NAMES[20:24]}, {[1] * 4})") == [False] * 4
    assert faulty.faults.matched("open slow_ms=0 suffix=/chunks") > 1


def test_a_look_that_hangs_leaves_the_interpreter_to_others(faulty):
    """The lock is not held while the disk does not answer; in the end the answer comes."""
    faulty.faults.set("stat hang")
    assert faulty(f"look_aside({NAMES})") == "started"
    wait_for(lambda: faulty.faults.num_hanging == 1)
    assert faulty("count(0.2)") > 1000
    assert faulty("answers") == []
    faulty.faults.clear()
    wait_for(lambda: faulty("answers") == [TRUTH])
