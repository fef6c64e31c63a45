"""Blocking calls from several threads on one store, on real files: what SGLang's adapter stands on."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import xxhash
from key_files import write_keys
from toy_engine import PAGE_NBYTES, identity
from world import damage, returns_in_time, wait_for

from faults.transport import FaultTransport, Script
from fskv.config import StoreConfig
from fskv.data_path.store import ChunkStore
from fskv.data_path.transports import host
from fskv.data_path.transports.protocol import Native
from fskv.errors import RootError
from fskv.index.presence import Findings
from fskv.offload import BlockingStore, KvStore, Page, lookup, mover, opener
from fskv.types import ChunkId, Status

NUM_BLOCKS = 64


class Store(BlockingStore):
    """With the memory of its pages, and what each of them holds to begin with."""

    def __init__(self, root, *, rank=None, tokens_per_block=16, num_storing=1, **options):
        root.mkdir(exist_ok=True)
        self.memory = bytearray(NUM_BLOCKS * PAGE_NBYTES)
        config = StoreConfig.from_mapping({"root": str(root), "maintenance": "off", **options})
        (group,) = identity("toy").groups
        group = dataclasses.replace(group, tokens_per_block=tokens_per_block)
        one_block = dataclasses.replace(identity("toy"), blocks_per_chunk=1, groups=(group,))
        self.kv = KvStore(config, one_block, {0: [memoryview(self.memory)]}, rank=rank)
        super().__init__(self.kv, PAGE_NBYTES, num_storing=num_storing)

    def fill(self, pages):
        for page in pages:
            self.memory[self.place(page)] = content(page.chunk)

    def place(self, page):
        return slice(page.block * PAGE_NBYTES, (page.block + 1) * PAGE_NBYTES)

    def holds(self, pages):
        return [self.memory[self.place(page)] == content(page.chunk) for page in pages]


def pages(numbers, first_block=0):
    """One page for each number, in consecutive blocks."""
    return [
        Page(ChunkId(hashlib.sha256(str(number).encode()).digest(), 0), first_block + i)
        for i, number in enumerate(numbers)
    ]


def chunks(numbers):
    return [page.chunk for page in pages(numbers)]


def content(chunk):
    return hashlib.shake_256(chunk.key_hash).digest(PAGE_NBYTES)


@pytest.fixture
def make(tmp_path):
    with contextlib.ExitStack() as stack:

        def make(**options):
            store = Store(tmp_path / "kv", **options)
            stack.callback(store.close)
            return store

        yield make


def with_script(monkeypatch, **events):
    """Stores that are opened from now on have this disk; returns their transports."""
    real, opened = mover.open_transport, []

    def faulty(*args, **options):
        opened.append(FaultTransport(real(*args, **options), Script(**events)))
        return opened[-1]

    monkeypatch.setattr(mover, "open_transport", faulty)
    return opened


def test_a_store_that_ended_reads_no_page_though_another_one_took_its_chunk_again(
    make, monkeypatch, tmp_path
):
    """The first one's chunk was not stored, and before it hears of that the second stores the same.

    Python writes the files, one step after the other.
    """
    monkeypatch.setattr(host, "Native", lambda pages, **rest: Native(pages=None, **rest))
    store = make(io_threads=2)
    all_pages = pages(range(4))
    store.fill(all_pages)
    shared, last = all_pages[0].chunk, all_pages[-1]
    may_fail, may_write = threading.Event(), threading.Event()
    put, fails = ChunkStore.put, iter([True])

    def slow(self, file, first, slot, **how):
        if file.chunk == shared and next(fails, False):
            may_fail.wait(20)
            return Status.DENIED
        may_write.wait(20)
        return put(self, file, first, slot, **how)

    monkeypatch.setattr(ChunkStore, "put", slow)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(store.store, all_pages[:1])
        wait_for(lambda: store._jobs)
        with store._changed:  # the second one comes before the first can wake up
            second = threads.submit(store.store, all_pages)
            time.sleep(0.1)
            may_fail.set()
            (job,) = store._jobs.values()
            wait_for(lambda: store._step() or job.stored[shared] is False)
        wait_for(lambda: len(store._jobs) == 1 and job not in store._jobs.values())
        assert first.result() == [False]
        assert not second.done()
        may_write.set()
        assert second.result() == [True] * 4
    store.memory[store.place(last)] = bytes(PAGE_NBYTES)  # it is the caller's again
    assert store.load([last]) == [True]
    assert store.holds([last]) == [True]


def test_pages_are_free_when_a_call_ends_by_an_error(make, monkeypatch):
    store = make()
    store.fill(pages(range(2)))
    freed = []
    free = store.kv.mover.free_pages
    monkeypatch.setattr(store.kv.mover, "free_pages", lambda jobs: (freed.extend(jobs), free(jobs)))

    def fail(*_):
        raise MemoryError

    monkeypatch.setattr(store, "_wait", fail)
    for call in (store.store, store.load):
        with pytest.raises(MemoryError):
            call(pages(range(2)))
    assert len(freed) == 2
    assert not store._jobs


def test_what_one_store_has_stored_another_one_loads(make):
    first, second = make(), make()
    first.fill(pages(range(20)))
    assert first.store(pages(range(20))) == [True] * 20
    assert second.count_present(chunks(range(25))) == 20
    wanted = pages(range(20), first_block=30)
    assert second.load(wanted) == [True] * 20
    assert second.holds(wanted) == [True] * 20
    assert first.store(pages(range(20))) == [True] * 20, "what is there is there"


@pytest.mark.parametrize("tokens_per_block", [4096, 1])
def test_a_slow_mount_is_waited_for_as_long_as_a_recompute_takes(
    make, monkeypatch, tokens_per_block
):
    """As a control, chunks of one token each: to compute them takes no time, and they are not waited for."""
    probe, a_chunk_s = lookup.probe_chunks, 0.025

    def slow(files, wanted, missed_before):
        time.sleep(a_chunk_s * len(wanted))
        return Findings(probe(files, wanted, missed_before).there, a_chunk_s * len(wanted))

    first = make(tokens_per_block=tokens_per_block)
    first.fill(pages(range(60)))
    assert all(first.store(pages(range(60))))
    monkeypatch.setattr(lookup, "probe_chunks", slow)
    cold = make(tokens_per_block=tokens_per_block, lookup_timeout_s=0.5)
    cold.count_present(chunks([99]))  # of a slow disk small batches are asked
    assert (cold.count_present(chunks(range(60))) == 60) is (tokens_per_block > 1)


def test_a_page_is_good_only_if_it_holds_its_chunk(make, tmp_path):
    """The control is in it: the pages that were not damaged are good."""
    store = make()
    store.fill(pages(range(8)))
    assert all(store.store(pages(range(8))))
    paths = sorted((tmp_path / "kv").glob("cpu/*/chunks/*/*.kv"))
    damage(paths[0], 4096 + 17)
    os.truncate(paths[1], 100)
    paths[2].unlink()
    wanted = pages(range(8), first_block=20)
    good = store.load(wanted)
    assert good == store.holds(wanted)
    assert good.count(False) == 3
    bad = [page for page, ok in zip(pages(range(8)), good, strict=True) if not ok]
    assert all(store.count_present([page.chunk]) == 0 for page in bad), "no hit again for now"
    assert store.store(bad) == [True] * 3, "stored again"
    assert make().load(wanted) == [True] * 8


@pytest.mark.parametrize("hangs", [True, False])
def test_a_call_returns_at_its_deadline_and_its_pages_stay_as_they_are(make, monkeypatch, hangs):
    """Without the hang, the control, the same call is good."""
    first = make()
    first.fill(pages(range(4)))
    assert all(first.store(pages(range(4))))
    faulty = with_script(monkeypatch, read="H*" if hangs else "")
    store = make(load_deadline_s=0.3)
    wanted = pages(range(4), first_block=8)
    try:
        good = returns_in_time(lambda: store.load(wanted))
        assert good == store.holds(wanted) == [not hangs] * 4
    finally:
        faulty[0].release()
    time.sleep(0.05)  # so that late bytes would be there
    assert store.holds(wanted) == [not hangs] * 4


@pytest.mark.parametrize("full", [True, False])
def test_what_could_not_be_written_is_not_said_to_be_there(make, monkeypatch, full):
    """Without the fault, the control, it is."""
    with_script(monkeypatch, write="N*" if full else "")
    store = make()
    assert store.store(pages(range(3))) == [not full] * 3
    assert store.count_present(chunks(range(3))) == (0 if full else 3)


def test_a_store_that_was_stopped_finds_loads_and_stores_nothing(make):
    store = make()
    store.fill(pages(range(2)))
    assert all(store.store(pages(range(2))))
    assert store.load(pages(range(2))) == [True] * 2, "the control"
    store.stop("weights are changed")
    assert store.count_present(chunks(range(2))) == 0
    assert store.load(pages(range(2))) == [False] * 2
    assert store.store(pages([7])) == [False]


def renewed(store):
    store.renew()
    wait_for(lambda: not store.kv.watch.resting)


def test_a_store_that_rests_goes_on_in_a_namespace_of_its_own(make):
    """The controls: before the rest it finds and loads; another store goes on with the first namespace."""
    store, other = make(), make()
    store.fill(pages(range(2)))
    assert all(store.store(pages(range(2))))
    assert store.load(pages(range(2))) == [True] * 2
    first = store.kv.directory.path
    before = bytes(store.memory)
    store.rest("weights are updated")
    assert store.count_present(chunks(range(2))) == 0
    assert store.load(pages(range(2), 9)) == [False] * 2
    assert store.store([*pages(range(2)), *pages([7], 2)]) == [False] * 3
    assert store.memory == before, "no page was touched"
    renewed(store)
    assert store.kv.directory.path != first
    assert store.count_present(chunks(range(2))) == 0
    assert store.store(pages(range(1))) == [True]
    assert store.load(pages(range(2), 9)) == [True, False]
    assert store.holds(pages(range(1), 9)) == [True]
    with open(f"{store.kv.directory.path}/namespace.json") as manifest:
        assert [*json.load(manifest)["epoch"]] == ["private"]
    assert other.count_present(chunks(range(3))) == 2
    assert other.kv.directory.path == make().kv.directory.path == first
    store.rest("again")
    last = store.kv.directory.path
    renewed(store)
    assert store.kv.directory.path not in (first, last)
    assert store.kv.watch.epoch == 2


def test_a_store_that_does_not_rest_or_was_stopped_for_good_is_not_renewed(make):
    store = make()
    first = store.kv.directory.path
    store.renew()
    store.rest("weights are updated")
    store.stop("another host pool")
    store.rest("again")
    store.renew()
    assert not store._is_opening
    assert store.store(pages([7])) == [False]
    assert store.kv.directory.path == first


def test_while_a_mount_hangs_a_store_rests_and_one_thread_waits(make, monkeypatch):
    """What it opens at last is not used if there was an update meanwhile. A failure is tried again."""
    store = make()
    first, real = store.kv.directory.path, store.kv.opened
    answers, asked = threading.Semaphore(0), []

    def slow(epoch):
        asked.append(epoch)
        answers.acquire()
        if len(asked) == 2:
            raise RootError("it does not answer")
        return real(epoch)

    monkeypatch.setattr(store.kv, "opened", slow)
    monkeypatch.setattr(opener, "_AGAIN_S", 0.05)
    for _ in range(3):
        store.rest("weights are updated")
        returns_in_time(store.renew, 5)
        wait_for(lambda: asked)
        assert returns_in_time(lambda: store.store(pages([1])), 5) == [False]
    time.sleep(0.2)
    assert len(asked) == 1
    for number in (2, 3):
        answers.release()
        wait_for(lambda number=number: len(asked) == number)
        assert store.kv.directory.path == first
    answers.release()
    wait_for(lambda: not store.kv.watch.resting)
    assert store.kv.watch.epoch == 1
    assert len({epoch["private"] for epoch in asked}) == 3
    store.fill(pages([1]))
    assert store.store(pages([1])) == [True]


def move(store):
    """What happens between two steps, without a thread."""
    store.rest("weights are updated")
    store.kv.move(*store.kv.opened({"private": "0" * 32}))


def told_by(root, pages):
    """Return which of these pages' keys, names and contents are in a root's files and their names."""
    files = [(str(path), path.read_bytes()) for path in root.rglob("*") if path.is_file()]
    told = set()
    for page in pages:
        key, name = page.chunk.key_hash, xxhash.xxh3_128_digest(page.chunk.key_hash)
        signs = {"key": [key, key.hex().encode()], "name": [name, name.hex().encode()]}
        for what, some in {**signs, "content": [content(page.chunk)[:64]]}.items():
            seen = any(
                one in data or one.decode("latin1") in path for path, data in files for one in some
            )
            told |= {what} if seen else set()
    return told


@pytest.mark.parametrize("encrypted", [True, pytest.param(False, id="negative_control")])
def test_with_a_key_file_no_file_tells_of_a_page_also_after_an_update(make, tmp_path, encrypted):
    """And a restart loads them, as after the update the next store does."""
    options = {"key_file": write_keys(tmp_path / "keys", "one")} if encrypted else {}
    store, some = make(**options), pages(range(3))
    store.fill(some)
    assert store.store(some) == [True] * 3
    again, elsewhere = make(**options), pages(range(3), 20)
    assert again.count_present(chunks(range(4))) == 3
    assert again.load(elsewhere) == again.holds(elsewhere) == [True] * 3
    first = store.kv.directory.path
    move(store)
    assert store.present(chunks(range(3))) == [False] * 3
    assert store.store(some) == [True] * 3
    assert store.load(elsewhere) == store.holds(elsewhere) == [True] * 3
    assert store.kv.directory.path != first
    assert len(list((tmp_path / "kv").rglob("*.kv"))) == 6
    assert told_by(tmp_path / "kv", some) == (set() if encrypted else {"key", "name", "content"})


def test_pages_of_another_key_are_computed_and_stored_again_with_the_own(make, tmp_path):
    one, other = (write_keys(tmp_path / name, name) for name in ("one", "other"))
    both = write_keys(tmp_path / "both", "one", "other")
    some = pages(range(3))
    first, second, last = make(key_file=one), make(key_file=other), make(key_file=both)
    first.fill(some)
    assert first.store(some[:2]) == [True] * 2
    assert second.present(chunks(range(2))) == [True] * 2
    assert second.load(some[:2]) == [False] * 2
    second.fill(some)
    assert second.store(some[1:]) == [True] * 2
    assert second.load(some[1:]) == [True] * 2
    assert last.load(some) == last.holds(some) == [True] * 3
    assert len(list((tmp_path / "kv").rglob("*.kv"))) == 3


@pytest.mark.parametrize("guarded", [True, False])
def test_of_a_store_that_an_update_comes_into_nothing_is_stored_after_it(
    make, monkeypatch, guarded
):
    """It hands over some pages after the others. Unguarded, the negative control, old KV gets a new name."""
    store = make()
    store._at_once = 2
    store.fill(pages(range(6)))
    real = store._store

    def updated(some, uses, end, num_stops):
        found = real(some, uses, end, num_stops if guarded else store._num_stops)
        if some[0].block == 0:
            move(store)
        return found

    monkeypatch.setattr(store, "_store", updated)
    assert store.store(pages(range(6))) == [True] * 2 + [not guarded] * 4
    assert store.present(chunks(range(6))) == [False] * 2 + [not guarded] * 4


@pytest.mark.parametrize("updated", [True, False])
def test_a_store_that_waits_while_an_update_comes_and_ends_returns(make, monkeypatch, updated):
    """Its outcome never comes. Without the update, the control, it does."""
    faulty = with_script(monkeypatch, write="HH")
    store = make(load_deadline_s=60)
    store.fill(pages(range(2)))
    with ThreadPoolExecutor(1) as threads:
        stored = threads.submit(store.store, pages(range(2)))
        faulty[0].wait_until_hanging(2)
        if updated:
            with store._changed:
                move(store)
        else:
            faulty[0].release()
        assert returns_in_time(stored.result, 30) == [not updated] * 2
        faulty[0].release()
    wait_for(lambda: store.kv.mover.idle)
    if updated:
        assert store.count_present(chunks(range(2))) == 0, "what ends late is of the last namespace"


@pytest.mark.parametrize("how", ["stopped", "updated", "negative_control"])
def test_a_load_that_ended_before_a_stop_and_is_told_after_it_is_not_good(make, monkeypatch, how):
    """The thread that waits for it may be late. Without the stop, the negative control, it is good."""
    store = make()
    store.fill(pages(range(2)))
    assert all(store.store(pages(range(2))))
    wait = store._wait

    def late(done, allowed_s):
        wait(done, allowed_s)
        if how == "stopped":  # another thread comes first
            store.stop("weights are changed")
        elif how == "updated":
            move(store)

    monkeypatch.setattr(store, "_wait", late)
    assert store.load(pages(range(2))) == [how == "negative_control"] * 2


def test_a_store_that_was_closed_answers_at_once(make):
    store = make()
    store.close()
    assert returns_in_time(lambda: store.count_present(chunks([1])), 5) == 0
    assert returns_in_time(lambda: store.load(pages([1])), 5) == [False]
    assert returns_in_time(lambda: store.store(pages([1])), 5) == [False]
    store.close()


def test_a_page_outside_of_the_memory_is_refused_and_nothing_is_begun(make):
    store = make()
    with pytest.raises(ValueError, match="whose memory has 64"):
        store.store(pages([1], first_block=NUM_BLOCKS))
    store.fill(pages([1]))
    assert store.store(pages([1])) == [True], "it was not taken for being on its way"


def test_ranks_have_files_of_their_own_in_one_namespace(make):
    zero, one = make(rank=0), make(rank=1)
    zero.fill(pages([1]))
    assert zero.store(pages([1])) == [True]
    assert one.count_present(chunks([1])) == 0
    assert make(rank=0).count_present(chunks([1])) == 1, "the control"
    assert zero.kv.directory.path == one.kv.directory.path


def test_each_chunk_has_an_answer_of_its_own_where_no_prefix_is_asked_for(make):
    store = make()
    some = [page for page in pages(range(6)) if page.block != 2]
    store.fill(some)
    assert all(store.store(some))
    assert store.present(chunks(range(7))) == [True, True, False, True, True, True, False]
    assert store.present([]) == []
    store.close()
    assert store.present(chunks(range(2))) == [False, False]


@pytest.mark.parametrize("told", [True, False])
def test_two_threads_that_store_share_the_queue_of_a_slow_disk(make, monkeypatch, told):
    """Where nobody said that there are two, the control, they hand over more than the queue takes."""
    with_script(monkeypatch, write="L*")
    monkeypatch.setattr(mover, "STORE_QUEUE_S", 0)
    store = make(num_storing=2 if told else 1)
    first, others = pages(range(1)), pages(range(1, 61), first_block=1)
    store.fill(first + others)
    assert store.store(first) == [True], "now it is known how long one takes"
    with ThreadPoolExecutor(2) as threads:
        halves = list(threads.map(store.store, (others[:30], others[30:])))
    assert all(halves[0] + halves[1]) is told


def test_pages_that_lie_anywhere_go_to_files_and_back(tmp_path):
    """The control is in it: what is beside the pages stays."""
    memory = bytearray(10 * PAGE_NBYTES + 77)
    config = StoreConfig(root=str(tmp_path), maintenance="off")
    one_block = dataclasses.replace(identity("toy"), blocks_per_chunk=1)
    kv = KvStore(config, one_block, {0: [memoryview(memory)]}, anywhere=True)
    with contextlib.closing(BlockingStore(kv, PAGE_NBYTES)) as store:
        stored = [Page(chunk, at) for chunk, at in zip(chunks(range(2)), (3, 1001), strict=True)]
        for page in stored:
            memory[page.block : page.block + PAGE_NBYTES] = content(page.chunk)
        assert store.store(stored) == [True, True]
        last = len(memory) - PAGE_NBYTES
        before = bytes(memory[2700:last])
        assert store.load([Page(stored[0].chunk, last), Page(stored[1].chunk, 2049)]) == [True] * 2
        assert memory[last:] == content(stored[0].chunk)
        assert memory[2049 : 2049 + PAGE_NBYTES] == content(stored[1].chunk)
        assert memory[2700:last] == before
        with pytest.raises(ValueError, match="whose memory has"):
            store.load([Page(stored[0].chunk, last + 1)])


@pytest.mark.parametrize("fails", [True, False])
def test_what_was_made_of_a_store_that_cannot_be_opened_is_closed(tmp_path, monkeypatch, fails):
    """A server goes on without it, and may try again. The control: nothing of one that was opened is."""

    def refuse(*_, **__):
        raise OSError("no maintenance process")

    closed = []
    for part in (mover.Mover, lookup.Lookup):
        monkeypatch.setattr(
            part, "close", lambda self, close=part.close: closed.append(close(self))
        )
    if fails:
        monkeypatch.setattr(lookup.Lookup, "attach", refuse)
    with pytest.raises(OSError, match="maintenance") if fails else contextlib.nullcontext():
        store = Store(tmp_path / "kv")
        assert not closed
        store.close()
    assert len(closed) == 2


# --- the times of a prefix ----------------------------------------------------------------------


def times(store, numbers):
    """The last uses of chunks' files, in the order of the numbers."""
    files = [store.kv.directory.chunk_path(one.key_hash, 0, None) for one in chunks(numbers)]
    return [os.stat(path).st_mtime_ns for path in files]


@pytest.mark.parametrize("is_told", [True, False])
def test_of_a_prefix_the_deepest_chunk_is_the_oldest_where_the_engine_tells_what_is_before(
    make, is_told
):
    """Without that, the negative control, what is stored later is younger than what it needs."""
    store = make()
    store.fill(pages(range(8)))
    assert all(store.store(pages(range(4))))
    time.sleep(0.05)
    assert all(store.store(pages(range(4, 8), 4), chunks(range(4)) if is_told else ()))

    def in_order():
        found = times(store, range(8))
        return found == sorted(found, reverse=True)

    if is_told:
        wait_for(in_order)  # what stands before is stamped in the background
    assert in_order() is is_told


def test_who_loads_the_end_of_a_prefix_uses_all_of_it(make):
    store, other = make(), make()
    store.fill(pages(range(8)))
    assert all(store.store(pages(range(8))))
    long_ago = time.time() - 10_000
    for one in chunks(range(8)):
        os.utime(store.kv.directory.chunk_path(one.key_hash, 0, None), (long_ago, long_ago))
    assert all(other.load(pages(range(5, 8)), chunks(range(1, 5))))
    wait_for(lambda: min(times(other, range(1, 8))) > (long_ago + 1000) * 10**9)
    found = times(other, range(8))
    assert found[1:] == sorted(found[1:], reverse=True)
    assert found[0] < (long_ago + 1000) * 10**9  # nobody said that it is before them
