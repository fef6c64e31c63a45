"""A lookup answers from memory, in bounded time, and what it says is no older than it claims."""

from __future__ import annotations

import os
import threading

import pytest
from conftest import Clock, returns_in_time, wait_for
from hypothesis import given, settings
from hypothesis import strategies as st

from fskv.breaker import Breaker
from fskv.index import presence
from fskv.index.presence import Findings, PresenceIndex, RankFiles, probe_chunks, probe_files
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


class Bench:
    def __init__(self, **options):
        self.clock = Clock()
        self.disk = Disk()
        self.breaker = Breaker(options.pop("failures", 1000), 5.0, self.clock)
        self.index = PresenceIndex(
            self.disk,
            **{
                "positive_ttl_s": 60.0,
                "negative_ttl_s": 2.0,
                "lookup_timeout_s": 1.0,
                "quarantine_s": 30.0,
                **options,
            },
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


def test_a_large_step_is_cut_into_batches_of_bounded_size(bench):
    for number in range(2000):
        bench.index.lookup(chunk(number))
    bench.answer()
    assert sorted(bench.disk.asked) == [chunk(n) for n in range(2000)]
    assert max(len(asked) for asked, _ in bench.disk.calls) <= 64


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
    wait_for(lambda: bench.index._answers)
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


def test_probes_that_only_wait_for_others_do_not_open_the_breaker(make_bench):
    """A long prompt on slow metadata: many batches, two at a time, none of them hangs for ever."""
    bench = make_bench(failures=8)
    bench.disk.hangs = True
    for number in range(512 * 20):
        bench.index.lookup(chunk(number))
    bench.index.flush()
    wait_for(lambda: bench.disk.num_hanging == 2)
    bench.clock.advance(1.1)
    bench.index.flush()
    assert not bench.breaker.open


def test_a_dead_root_opens_the_breaker_and_one_probe_closes_it(make_bench):
    bench = make_bench(failures=3)
    bench.disk.hangs = True
    for number in range(3):
        bench.lookup(number)
        bench.index.flush()
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
    wait_for(lambda: bench.index._answers)
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


def test_a_store_ends_the_quarantine_and_every_other_doubt(bench):
    bench.index.mark_failed(chunk(1), Status.CORRUPT)
    bench.learn(2)
    bench.index.lookup(chunk(3))
    for number in (1, 2, 3, 4):
        bench.index.mark_stored(chunk(number))
        assert bench.index.lookup(chunk(number)) == HIT
        assert bench.index.known_present(chunk(number))
    bench.answer()  # a probe of 3 was on its way and has not seen the file
    assert bench.index.lookup(chunk(3)) == HIT


def test_forgetting_all_asks_again(bench):
    bench.disk.present = {chunk(1)}
    bench.learn(1, 2)
    bench.index.forget_all()
    assert bench.index.num_known == 0
    assert bench.learn(1, 2) == [HIT, ABSENT]


# --- bounds -----------------------------------------------------------------------------------


def test_memory_is_bounded_and_the_least_recently_asked_goes_first(make_bench):
    bench = make_bench(max_known=10)
    for number in range(100):
        bench.index.mark_stored(chunk(number))
        bench.index.lookup(chunk(90 if number > 90 else 0))
        assert bench.index.num_known <= 10
    assert bench.index.lookup(chunk(90)) == HIT
    assert bench.index.lookup(chunk(5)) == UNKNOWN


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


@settings(max_examples=40, deadline=None, database=None)
@given(st.lists(st.tuples(st.sampled_from("lfspda"), st.integers(0, 3)), max_size=60))
def test_a_walk_never_contradicts_what_is_known(events):
    """Against a model that knows when each chunk was last seen, stored or failed."""
    bench = Bench()
    try:
        for event, number in events:
            it = chunk(number)
            if event == "l":
                before = bench.index.known_present(it)
                answer, reason = bench.index.lookup(it)
                assert (answer, reason) in (HIT, UNKNOWN) or answer is Presence.MISS
                if before:
                    assert answer is Presence.HIT
            elif event == "f":
                bench.index.mark_failed(it, Status.CORRUPT)
                bench.disk.present.discard(it)
                assert bench.index.lookup(it) == (Presence.MISS, Status.QUARANTINED)
            elif event == "s":
                bench.disk.present.add(it)
                bench.index.mark_stored(it)
                assert bench.index.lookup(it) == HIT
            elif event == "p":
                bench.answer()
            elif event == "d":
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


# --- looking at files ---------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path):
    os.mkdir(tmp_path / "3hx")

    def make(name, nbytes=None):
        path = tmp_path / "3hx" / name
        if nbytes is not None:
            path.write_bytes(bytes(nbytes))
        return str(path)

    return make


def test_a_chunk_is_there_only_if_every_ranks_file_has_its_size(files):
    good, good2 = files("a.r0", 100), files("a.r1", 100)
    short, gone = files("b.r1", 99), files("c.r1")
    os.mkdir(files("d.r1"))
    os.symlink(good, files("e.r1"))
    cases = [
        ([(good, 100)], True),
        ([(good, 100), (good2, 100)], True),
        ([(good, 101)], False),
        ([(good, 100), (short, 100)], False),
        ([(good, 100), (gone, 100)], False),
        ([(gone, 100), (good, 100)], False),
        ([(files("d.r1"), os.stat(files("d.r1")).st_size)], False),
        ([(files("e.r1"), os.lstat(files("e.r1")).st_size)], False),
        ([(good + "/below", 1)], False),
    ]
    found = probe_files([paths for paths, _ in cases], [False] * len(cases))
    assert found == [there for _, there in cases]


def test_the_directory_is_opened_again_after_a_miss_and_only_then(files, monkeypatch):
    """An NFS client hides another node's new file for 28 s after a miss, but not past such an open."""
    path, opened, real = files("a", 10), [], os.open

    def note(path, *args, **kwargs):
        opened.append(path)
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", note)
    before = len(os.listdir("/proc/self/fd"))
    assert probe_files([[(path, 10)]], [False]) == [True]
    assert opened == []
    assert probe_files([[(path, 10)]], [True]) == [True]
    assert opened == [os.path.dirname(path)]
    assert probe_files([[(path + "/no/dir", 10)]], [True]) == [False]
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_stale_handle_is_looked_at_twice_and_then_a_miss(files, monkeypatch):
    path, real = files("a", 10), os.stat
    stales = []

    def stale(path, **kwargs):
        if stales:
            stales.pop()
            raise OSError(116, "Stale file handle")
        return real(path, **kwargs)

    monkeypatch.setattr(presence.os, "stat", stale)
    stales[:] = [1]
    assert probe_files([[(path, 10)]], [False]) == [True]
    stales[:] = [1, 1]
    assert probe_files([[(path, 10)]], [False]) == [False]


def test_a_root_that_does_not_answer_is_an_error_and_not_a_miss(files, monkeypatch):
    def fail(path, **kwargs):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(presence.os, "stat", fail)
    with pytest.raises(OSError, match="Input/output error"):
        probe_files([[(files("a"), 10)]], [False])
