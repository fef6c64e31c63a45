"""The core that every engine stands on, through its public interface: a toy engine on real files."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import subprocess
import sys
import time
from concurrent.futures import Future

import msgpack
import pytest
from places import REPOSITORY
from toy_engine import PAGE_NBYTES, TOKENS_PER_CHUNK, chunks_of, identity
from world import damage, wait_for

from fskv.bounds import client
from fskv.bounds.client import Capacity
from fskv.bounds.limits import Limits, RootState
from fskv.config import StoreConfig
from fskv.data_path.breaker import Breaker
from fskv.data_path.runner import JobRunner
from fskv.data_path.store import ChunkStore
from fskv.data_path.transports import host
from fskv.data_path.transports.protocol import Native
from fskv.errors import ConfigError
from fskv.observe import metrics
from fskv.observe.health_file import HealthFile
from fskv.offload import KvStore, open_store, watch
from fskv.types import ChunkId, Presence, Status

PROMPT = list(range(4 * TOKENS_PER_CHUNK))


def files(tmp_path) -> list[pathlib.Path]:
    return sorted((tmp_path / "kv").glob("cpu/*/chunks/*/*.kv"))


def test_a_toy_engine_loads_what_another_one_stored(engine, tmp_path):
    first, second = engine(), engine()
    kv = first.run(PROMPT)
    assert (first.num_stored, first.num_loaded, len(files(tmp_path))) == (4, 0, 4)
    assert second.run(PROMPT) == kv
    assert (second.num_stored, second.num_loaded) == (0, 4)
    longer = [*PROMPT, *range(TOKENS_PER_CHUNK)]
    assert second.run(longer)[: len(kv)] == kv
    assert (second.num_stored, second.num_loaded) == (1, 8)


def test_threads_nobody_asked_for_take_what_staging_has_room_for(engine, tmp_path):
    """Two chunk files are enough for `auto`; a number that somebody gave is kept, or refused."""
    kv = engine().run(PROMPT)
    room = 2 * files(tmp_path)[0].stat().st_size
    assert engine(staging_bytes=room).run(PROMPT) == kv
    with pytest.raises(ConfigError, match=r"1 I/O threads and one more\)$"):
        engine(staging_bytes=room - 1)
    with pytest.raises(ConfigError, match=r"4 I/O threads and one more\); or lower 'io_threads'"):
        engine(staging_bytes=room, io_threads=4)


def test_another_model_loads_nothing_of_it(engine):
    first, other = engine(), engine(model="other")
    assert first.run(PROMPT) != other.run(PROMPT)
    assert other.num_loaded == 0


@pytest.mark.parametrize("broken", [False, True])
def test_the_toy_would_show_a_wrong_byte(engine, tmp_path, monkeypatch, broken):
    """The negative control: without the check of rows, a flipped bit is in the KV."""
    kv = engine(io_threads=1).run(PROMPT)
    path = files(tmp_path)[0]
    damage(path, 4096 + 17)
    if broken:
        from fskv.data_path.transports import host
        from fskv.format import chunk_file

        monkeypatch.setattr(chunk_file, "check_digests", lambda *_: None)
        monkeypatch.setattr(host, "Native", lambda pages, **rest: Native(pages=None, **rest))
    assert (engine().run(PROMPT) == kv) is not broken


@pytest.mark.parametrize(("bound", "holds"), [("64 KiB", True), ("1 GiB", False)])
def test_a_bound_holds(engine, tmp_path, bound, holds):
    """With a large one, the control, as much is written as is asked for."""
    small = engine(max_bytes=bound)
    for number in range(12):
        small.run([number, *PROMPT[1:]])
    assert (sum(path.stat().st_size for path in files(tmp_path)) <= 64 << 10) is holds


PRUNED = (b"sixteen bytes so", 7)


def ended_at_once(start):
    made = Future()
    made.set_result(start())
    return made


class Tells:
    """A maintenance process that says first what was pruned, and then, one by one, what it has seen."""

    running, pid = True, 1

    def __init__(self, _options):
        digest, group = PRUNED
        removed = {"removed": digest + group.to_bytes(4, "little")}
        states = [dataclasses.asdict(RootState(known=known)) for known in (False, True)]
        self.unheard = [removed, None, states[0], None, None, None, states[1]]

    def send(self, _message):
        return True

    def receive(self, _most):
        message = self.unheard.pop(0) if self.unheard else None
        return b"" if message is None else msgpack.packb({"at": time.monotonic(), **message})

    def close(self):
        pass


def test_what_is_pruned_while_a_start_waits_is_told_once_and_a_count_ends_the_wait(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(client, "MaintenanceProcess", Tells)
    monkeypatch.setattr(client, "_FIRST_WORD_S", 60.0)
    capacity = Capacity(str(tmp_path), "ns", None, Limits())
    begin = time.monotonic()
    capacity.start()
    assert time.monotonic() - begin < 30
    assert capacity.state.known
    assert capacity.poll() == [PRUNED]


@pytest.mark.parametrize(
    ("runs_s", "tells_s", "waited_s"),
    [(0.5, 0.6, 0.6), (8.0, 12.0, 12.0), (8.0, 15.0, 13.0), (12.0, 12.1, 10.0), (-1, 9.0, 0.0)],
    ids=["soon", "slow", "no word", "does not start", "ends at once"],
)
def test_a_start_waits_for_a_process_that_is_slow_to_begin(
    tmp_path, monkeypatch, runs_s, tells_s, waited_s
):
    now = 0.0

    class Slow(Tells):
        pid = None

        def __init__(self, options):
            super().__init__(options)
            self.running = runs_s > 0
            state = {"at": 0.0, **dataclasses.asdict(RootState(known=True))}
            self.unheard = [(runs_s, {"pid": 1}), (tells_s, state)]

        def introduce(self, pid):
            self.pid = pid

        def receive(self, _most):
            if not self.unheard or now < self.unheard[0][0]:
                raise BlockingIOError
            return msgpack.packb(self.unheard.pop(0)[1])

    def sleep(seconds):
        nonlocal now
        now += seconds

    monkeypatch.setattr(client, "MaintenanceProcess", Slow)
    monkeypatch.setattr(client, "started_beside", ended_at_once)
    monkeypatch.setattr(client.time, "sleep", sleep)
    capacity = Capacity(str(tmp_path), "ns", None, Limits(), clock=lambda: now)
    capacity.start()
    assert now == pytest.approx(waited_s, abs=0.05)
    assert capacity.take(1000) is (tells_s <= waited_s)


def test_a_stopped_lookup_finds_and_begins_nothing(engine):
    toy = engine()
    toy.run(PROMPT)
    there, new = chunks_of(PROMPT)[0], CHUNK
    assert toy.kv.lookup.ask(there)[0] is Presence.HIT, "the control"
    assert toy.kv.lookup.begin_store([new]) == [new]
    toy.kv.lookup.forget()
    toy.kv.lookup.stopped = True
    assert toy.kv.lookup.ask(there)[0] is Presence.MISS
    assert toy.kv.lookup.begin_store([new]) == []


# --- what an engine may do wrong ------------------------------------------------------------

CHUNK = ChunkId(b"c" * 32, 0)
FLAT = memoryview(bytearray(1024))


def settled(kv, seconds=10.0):
    """Step until nothing is on its way."""
    end = time.monotonic() + seconds
    while kv.lookup.storing and time.monotonic() < end:
        kv.step()
        time.sleep(0.001)
    return not kv.lookup.storing


@pytest.mark.parametrize(
    ("group", "blocks", "first", "words"),
    [
        *((0, blocks, 0, "of a chunk of 2") for blocks in ([4, 5, 6], [])),
        *((0, [4, 5][:n], first, "of a chunk of 2") for n, first in ((2, 1), (1, 2), (1, -1))),
        *((0, blocks, 0, "of group 0, whose memory has 64") for blocks in ([0, 64], [-1, 0])),
        (7, [0, 1], 0, "group 7 is not in the identity"),
    ],
)
def test_blocks_that_are_not_there_are_an_error_and_no_good_load(
    engine, group, blocks, first, words
):
    with pytest.raises(ValueError, match=words):
        engine().kv.moves(ChunkId(b"c" * 32, group), blocks, first)


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (bytearray(1024), "found a bytearray, expected a torch tensor of int8 or a memoryview"),
        (memoryview(bytes(1024)), "read-only"),
        (memoryview(bytearray(2048))[::2], "has gaps"),
        (memoryview(bytearray(1024)).cast("B", (2, 512)), "rows of its own"),
        (memoryview(bytearray(100)), "found 100 bytes, expected blocks of 512"),
        (memoryview(bytearray(1000)), "found 1000 bytes, expected blocks of 512"),
        ({}, "KV memory of group 0: found 0 tensors, expected 1"),
        ({0: [FLAT], 3: [FLAT]}, "KV memory of group 3: expected groups of the identity"),
    ],
)
def test_memory_that_would_be_read_wrong_is_refused(tmp_path, memory, words):
    memory = memory if isinstance(memory, dict) else {0: [memory]}
    with pytest.raises(ConfigError, match=words):
        open_store({"root": str(tmp_path)}, identity("toy"), memory)


def test_two_jobs_of_one_id_are_an_error(engine):
    kv = engine().kv
    kv.mover.load(7, kv.moves(CHUNK, [0, 1]))
    with pytest.raises(ValueError, match="job 7 is under way"):
        kv.mover.load(7, kv.moves(CHUNK, [2, 3]))


def test_tenants_do_not_share(engine):
    one, other = engine(tenant="a"), engine(tenant="b")
    assert one.run(PROMPT) == other.run(PROMPT)
    assert (one.num_stored, other.num_stored, other.num_loaded) == (4, 4, 0)
    assert one.kv.directory.path != other.kv.directory.path


def test_an_identity_of_another_tenant_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="option 'tenant': found 'b', expected 'a'"):
        open_store(
            {"root": str(tmp_path), "tenant": "b"},
            dataclasses.replace(identity("toy"), tenant="a"),
            {0: [memoryview(bytearray(1024))]},
        )


@pytest.mark.parametrize("drop", ["drop", "stop"])
def test_after_a_drop_nothing_is_claimed_and_after_a_stop_nothing_is_stored(engine, tmp_path, drop):
    toy = engine()
    kv = toy.kv
    assert kv.lookup.begin_store([CHUNK]) == [CHUNK]
    getattr(kv, drop)()
    assert not kv.lookup.storing
    kv.mover.store(100, kv.moves(CHUNK, [0, 1]))
    assert not kv.lookup.begin_store([CHUNK]) or drop == "drop"
    settled(kv)
    kv.close()
    assert len(files(tmp_path)) == (1 if drop == "drop" else 0)


def give_up_late(monkeypatch, kv):
    """Who gives a load up comes when it has ended, as an I/O thread outside the interpreter may be first."""
    real = JobRunner.wait

    def late(runner, job_ids):
        wait_for(lambda: kv.mover.idle)
        real(runner, job_ids)

    monkeypatch.setattr(JobRunner, "wait", late)


@pytest.mark.parametrize("how", ["stopped", "refused", "negative_control"])
def test_a_stopped_mover_loads_nothing_however_fast_it_is(engine, monkeypatch, how):
    """Without the stop, the negative control, the chunk comes."""
    toy = engine()
    toy.run(PROMPT)
    give_up_late(monkeypatch, toy.kv)
    if how == "stopped":
        toy.kv.stop()
    toy.memory[:] = bytes(len(toy.memory))
    moves = toy.kv.moves(chunks_of(PROMPT)[0], [0, 1])
    toy.kv.mover.load(100, moves, refused=how == "refused")
    while not (ended := [job for job in toy.kv.step() if job.job_id == 100]):
        time.sleep(0.001)
    wait_for(lambda: toy.kv.mover.idle)
    loaded = how == "negative_control"
    assert bool(ended[0].bad) is not loaded
    assert any(toy.memory) is loaded, "no page is touched"


def test_a_chunk_that_was_begun_and_never_stored_is_begun_again_after_its_time(engine):
    kv = engine(load_deadline_s=0.01).kv
    assert kv.lookup.begin_store([CHUNK])
    assert not kv.lookup.begin_store([CHUNK]), "it is on its way"
    wait_for(lambda: kv.lookup.begin_store([CHUNK]))


@pytest.mark.parametrize("option", [{"canonical_layout": True}, {"trust": ["lora"]}])
def test_what_only_vllms_adapter_does_is_refused(engine, option):
    with pytest.raises(ConfigError, match="expected nothing: it is for vLLM's adapter"):
        engine(**option)


@pytest.mark.parametrize(("number", "name"), [(0, "health0"), (2, "health2"), (None, None)])
def test_stores_of_one_engine_have_health_files_of_their_own(tmp_path, number, name):
    config = StoreConfig(
        root=str(tmp_path), maintenance="off", health_file=f"{tmp_path}/health{{rank}}"
    )
    pages = {0: [memoryview(bytearray(PAGE_NBYTES))]}
    kv = KvStore(config, identity("toy"), pages, number=number)
    kv.close()
    assert kv.watch.health_file == (name and f"{tmp_path}/{name}")


def conditions(path):
    return json.loads(path.read_text())["conditions"] if path.exists() else None


FAILED = {
    Status.DENIED: ["stores_fail"],
    Status.NO_SPACE: ["stores_fail"],
    Status.IO_ERROR: ["breaker_open", "stores_fail"],
    Status.TIMED_OUT: ["breaker_open", "stores_fail"],
}


@pytest.mark.parametrize("status", FAILED)
def test_the_health_file_says_that_stores_fail_until_one_is_written(
    engine, tmp_path, monkeypatch, status
):
    """One request without a hit is enough: no lookup has failed, nothing was loaded."""
    put, failing, path = ChunkStore.put, [True], tmp_path / "health.json"
    monkeypatch.setitem(HealthFile.__init__.__kwdefaults__, "look_s", 0.01)
    monkeypatch.setattr(host, "Native", lambda pages, **rest: Native(pages=None, **rest))
    monkeypatch.setattr(ChunkStore, "put", lambda *a, **how: status if failing else put(*a, **how))
    monkeypatch.setitem(Breaker.__init__.__kwdefaults__, "failures", 1)
    monkeypatch.setitem(Breaker.__init__.__kwdefaults__, "probe_s", 0.05)
    toy = engine(health_file=str(path), max_bytes=None, maintenance="off")
    wait_for(lambda: conditions(path) == [])
    toy.run(PROMPT)
    wait_for(lambda: conditions(path) == FAILED[status])
    shown = toy.kv.watch.read()[1]
    assert shown[metrics.BREAKER_OPEN] == ("breaker_open" in FAILED[status])
    assert not toy.kv.lookup.breaker.open, "it is the mover's"
    failing.clear()
    prompts = iter(range(1000))
    wait_for(lambda: toy.run([next(prompts), *PROMPT[1:]]) and conditions(path) == [])


@pytest.mark.parametrize(("bound", "refused"), [("1 KiB", True), ("1 GiB", False)])
def test_the_health_file_says_that_no_store_finds_room(
    engine, tmp_path, monkeypatch, bound, refused
):
    monkeypatch.setattr(watch, "_REFUSED_S", 1e-6)
    monkeypatch.setitem(HealthFile.__init__.__kwdefaults__, "look_s", 0.01)
    path = tmp_path / "health.json"
    toy = engine(health_file=str(path), max_bytes=bound)
    for number in range(3):
        toy.run([number, *PROMPT[1:]])
    wait_for(lambda: conditions(path) == ["stores_refused"] * refused)


# --- the toy and the document ---------------------------------------------------------------


def test_the_example_of_the_document_runs(tmp_path):
    text = (REPOSITORY / "docs" / "engine.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert len(example.splitlines()) <= 40  # 25 without the fields of the identity
    root = tmp_path / "kv"
    root.mkdir()
    program = example.replace("/mnt/kv", str(root))
    assert program != example
    for first in ("stored", "was there"):
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
        )
        assert (done.returncode, done.stdout) == (0, f"{first}\nloaded\n"), done.stderr
