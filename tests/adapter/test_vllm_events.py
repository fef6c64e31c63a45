"""What is announced to KV-aware routers and what is taken back: without an engine, with vLLM's tracker."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import world
import xxhash
from key_files import write_keys
from scheduler_half import add_epochs

from fskv.offload.mover import News

pytest.importorskip("vllm", reason="these tests need the vllm environment: make test")

from resettable_half import scheduler_around, tracker_of_vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import events as of_vllm
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadingKVEventsConfig,
    ReqContext,
    make_offload_key,
)

from fskv.engines.vllm import events as module
from fskv.engines.vllm.budget import LoadBudget
from fskv.engines.vllm.connector import FskvConnector
from fskv.engines.vllm.events import MAX_ANNOUNCED, KvEvents
from fskv.root.key_file import KeySet, hidden
from fskv.types import ChunkId, Presence, Status

pytestmark = world.VLLM


def _chunk(number: int, group_idx: int = 0):
    return ChunkId(number.to_bytes(32, "big"), group_idx)


def _key(number: int, group_idx: int = 0):
    return make_offload_key(number.to_bytes(32, "big"), group_idx)


def _name(number: int, group_idx: int = 0, keys: KeySet | None = None) -> tuple[bytes, int]:
    """Return what the pruner knows of a chunk: read off its file's name."""
    return xxhash.xxh3_128_digest(hidden(keys, _chunk(number)).key_hash), group_idx


def _taken(events) -> list[tuple[str, bytes]]:
    news = []
    for event in events:
        assert event.medium is Medium.STORAGE
        news += [("removed" if event.removed else "stored", key) for key in event.keys]
    return news


# --- what is remembered ---------------------------------------------------------------------


KEYS = KeySet(b"n" * 32, ((b"a", b"a" * 32),))


@pytest.mark.parametrize("keys", [None, KEYS], ids=["", "hidden"])
@pytest.mark.parametrize("seed", range(20))
def test_a_router_believes_only_what_can_be_taken_back(seed, keys):
    rng = random.Random(seed)
    limit = rng.randrange(1, 12)
    events, believed = KvEvents(limit), set()
    events.keys = keys
    for _ in range(400):
        number, action = rng.randrange(20), rng.random()
        chunk = hidden(keys, _chunk(number))
        if action < 0.7:
            if keys is not None:
                events.asked(chunk, _key(number))
            events.stored(chunk)
        elif action < 0.8:
            events.removed(chunk)
        elif action < 0.98:
            events.removed_names(_name(n, keys=keys) for n in (number, rng.randrange(20)))
        else:
            believed.clear()  # a router does, at vLLM's word
            events.forget()
        if rng.random() < 0.3:
            for what, key in _taken(events.take()):
                assert (key in believed) is (what == "removed"), "twice, or out of the blue"
                assert key in {_key(number) for number in range(20)}, "the engine's own"
                believed.symmetric_difference_update([key])
            assert len(believed) == len(events._announced) <= limit
    events.removed_names(_name(number, keys=keys) for number in range(20))
    for what, key in _taken(events.take()):
        assert what == "removed" or key not in believed
        believed.symmetric_difference_update([key])
    assert believed == set()


@pytest.mark.parametrize("in_a_step", [3, 1000], ids=["", "negative_control"])
def test_what_is_said_again_is_said_in_parts_and_only_what_is_still_there(monkeypatch, in_a_step):
    """VLLM makes an event of each on the scheduler's thread: of a full memory of them that is seconds."""
    monkeypatch.setattr(module, "_AGAIN_IN_A_STEP", in_a_step)
    events = module.KvEvents()
    for number in range(10):
        events.stored(_chunk(number))
    _taken(events.take())
    events.say_again()
    steps = [_taken(events.take())]
    assert (len(steps[0]) == in_a_step) is (in_a_step == 3)
    events.removed(_chunk(1))
    events.removed(_chunk(9))
    events.stored(_chunk(9))
    while step := _taken(events.take()):
        steps.append(step)
    believed = set()
    for what, key in (news for step in steps for news in step):
        (believed.add if what == "stored" else believed.discard)(key)
    assert believed == {_key(number) for number in range(10)} - {_key(1)}


def test_events_are_kept_only_where_the_engine_publishes_them(make_manager, describing):
    assert KvEvents.enabled_by(OffloadingKVEventsConfig(False, True), 512) is None
    plain = KvEvents.enabled_by(OffloadingKVEventsConfig(True, False), 512)
    describing = KvEvents.enabled_by(OffloadingKVEventsConfig(True, True), 4096)
    assert plain._max_announced == MAX_ANNOUNCED
    assert describing._max_announced == 2048, "vLLM keeps the tokens of each"

    manager = make_manager()
    manager.on_news(News(stored={_chunk(1): {0}}))
    manager.chunks.on_removed([_name(1)])
    assert list(manager.take_events()) == []
    assert not manager.has_pending_work()


# --- the manager ----------------------------------------------------------------------------


@pytest.fixture
def hiding(make_manager, tmp_path):
    """Make a manager whose chunks are hidden, and the keys that hide them."""
    manager = make_manager(kv_events=KvEvents(), key_file=write_keys(tmp_path / "keys", "one"))
    return manager, manager.events.keys


def test_of_hidden_chunks_the_engines_own_keys_are_announced_and_taken_back(hiding, monkeypatch):
    """The control: a chunk of which the engine never asked has no key that a router knows."""
    manager, keys = hiding
    chunks = [hidden(keys, _chunk(number)) for number in range(5)]
    manager.prepare_store([_key(1), _key(2), _key(3)], ReqContext("r"))
    manager.on_news(News(stored={chunks[number]: {0} for number in (1, 2, 4)}))
    assert _taken(manager.take_events()) == [("stored", _key(1)), ("stored", _key(2))]
    found = Presence.HIT, Status.OK
    monkeypatch.setattr(manager.chunks.presence, "lookup", lambda chunk: found)
    assert manager.lookup(_key(0), ReqContext("r")) is LookupResult.HIT
    assert _taken(manager.take_events()) == [("stored", _key(0))]
    manager.chunks.on_removed([_name(number, keys=keys) for number in (1, 4)])
    manager.on_news(News(failed_loads={chunks[2]: Status.NO_KEY}))
    assert _taken(manager.take_events()) == [("removed", _key(1)), ("removed", _key(2))]
    manager.chunks.on_removed([_name(0)])
    assert _taken(manager.take_events()) == [], "a name that no file has"


def test_of_hidden_chunks_those_that_were_asked_for_last_are_remembered(monkeypatch):
    monkeypatch.setattr(module, "MAX_ANNOUNCED", 10)
    events = KvEvents()
    events.keys = KEYS
    numbers = [*range(10), 0, 10]
    for number in numbers:
        events.asked(hidden(KEYS, _chunk(number)), _key(number))
    assert len(events._asked) == 10
    for number in numbers:
        events.stored(hidden(KEYS, _chunk(number)))
    believed = {key for _, key in _taken(events.take())}
    assert believed == {_key(number) for number in numbers} - {_key(1)}


def test_of_hidden_chunks_a_payload_goes_after_its_announcement():
    events, payloads = KvEvents(10), {}
    events.keys = KEYS
    for number in range(2 * module._PAYLOADS_SLACK + 11):
        payloads[_key(number)] = object()
    events.asked(hidden(KEYS, _chunk(0)), _key(0))
    events.stored(hidden(KEYS, _chunk(0)))
    events.trim(payloads)
    assert len(payloads) == module._PAYLOADS_SLACK + 12
    assert _key(0) in payloads
    assert _taken(events.take()) == [("stored", _key(0)), ("removed", _key(0))]
    payloads |= {_key(number): object() for number in range(20_000, 25_000)}
    events.trim(payloads)
    assert _key(0) not in payloads


def test_a_chunk_is_announced_and_hit_when_the_last_rank_has_published_it(make_manager):
    manager, request = make_manager(2, kv_events=KvEvents()), ReqContext("r")
    manager.on_news(News(stored={_chunk(1): {0}}))
    manager.on_news(News(stored={_chunk(1): {0}}))
    assert manager.lookup(_key(1), request) is LookupResult.RETRY
    assert _taken(manager.take_events()) == []
    manager.on_news(News(stored={_chunk(1): {1}}))
    assert manager.lookup(_key(1), request) is LookupResult.HIT
    assert _taken(manager.take_events()) == [("stored", _key(1))]
    manager.chunks.on_removed([_name(1)])
    assert _taken(manager.take_events()) == [("removed", _key(1))]


@pytest.mark.parametrize(
    ("status", "gone"),
    [
        ("absent", True),
        ("stale", True),
        ("corrupt", True),
        ("no_key", True),
        ("timed_out", False),
        ("io_error", False),
        ("denied", False),
        ("breaker", False),
    ],
)
def test_a_failed_load_takes_back_what_is_gone_and_nothing_else(status, gone, make_manager):
    manager = make_manager(kv_events=KvEvents())
    manager.on_news(News(stored={_chunk(1): {0}}))
    list(manager.take_events())
    manager.on_news(News(failed_loads={_chunk(1): Status(status), _chunk(2): Status(status)}))
    assert _taken(manager.take_events()) == ([("removed", _key(1))] if gone else [])


def test_a_chunk_that_another_engine_stored_is_announced_when_it_is_found(
    monkeypatch, make_manager
):
    manager = make_manager(kv_events=KvEvents())
    answers = {
        "found": (Presence.HIT, Status.OK),
        "not there": (Presence.MISS, Status.MISSING),
        "asked": (Presence.UNKNOWN, Status.OK),
    }
    for number, answer in enumerate(answers.values()):
        monkeypatch.setattr(manager.chunks.presence, "lookup", lambda chunk, answer=answer: answer)
        for request in ("r", "r", "s"):
            result = manager.lookup(_key(number), ReqContext(request))
        assert (result is LookupResult.HIT) is (number == 0)
    assert _taken(manager.take_events()) == [("stored", _key(0))]


def test_an_idle_engine_steps_on_for_its_last_stores_but_not_for_ever(monkeypatch, make_manager):
    from fskv.engines.vllm import manager

    now = [1000.0]
    monkeypatch.setattr(manager.time, "monotonic", lambda: now[0])
    manager = make_manager(kv_events=KvEvents())
    assert not manager.has_pending_work()
    manager.prepare_store([_key(1), _key(2)], ReqContext("r"))
    assert manager.has_pending_work()
    manager.on_news(News(stored={_chunk(1): {0}}))
    assert manager.has_pending_work()
    manager.on_news(News(not_stored={_chunk(2)}))
    assert not manager.has_pending_work()
    manager.prepare_store([_key(3)], ReqContext("r"))
    assert manager.has_pending_work()
    now[0] += 2.1  # a hung mount
    assert not manager.has_pending_work()


# --- with vLLM's tracker --------------------------------------------------------------------


@pytest.fixture
def describing(make_manager):
    """Return a connector around a manager and vLLM's own tracker, as far as events need one."""
    manager = make_manager(kv_events=KvEvents(), weights_fixed=True)
    half = scheduler_around(manager, describing=True)
    connector = FskvConnector.__new__(FskvConnector)
    connector.connector_scheduler = half
    connector._kv_cache_manager = connector._cached_blocks = None
    connector.budget = LoadBudget(manager)
    add_epochs(connector)
    return connector, manager, half._events_tracker._pending_event_metadata


def _payload(number: int):
    values = dict.fromkeys(of_vllm._OffloadEventMetadata.__slots__)
    hashes = (b"first" + bytes([number % 256]), number.to_bytes(32, "big"))
    return of_vllm._OffloadEventMetadata(
        **{
            **values,
            "block_hashes": hashes,
            "token_ids": (1, 2),
            "block_size": 1,
            "group_idx": 0,
            "kv_cache_spec": SimpleNamespace(
                kv_cache_spec_kind="full_attention", kv_cache_spec_sliding_window=None
            ),
            "active_residencies": {(Medium.CPU, None)},
        }
    )


def test_after_a_reset_nothing_of_before_is_said_and_what_is_found_again_is(describing):
    """VLLM's own AllBlocksCleared has a router forget the disk."""
    connector, manager, payloads = describing
    pool = BlockPool(4, True, 1, enable_kv_cache_events=True)
    connector._kv_cache_manager = SimpleNamespace(block_pool=pool)
    payloads[_key(1)] = _payload(1)
    manager.on_news(News(stored={_chunk(1): {0}}))
    assert len(list(connector.take_events())) == 1
    assert pool.reset_prefix_cache()
    manager.on_news(News(stored={_chunk(2): {0}}))  # not taken before the reset
    connector.reset_cache()
    manager.chunks.on_removed([_name(2)])
    assert list(connector.take_events()) == []
    manager.on_news(News(stored={_chunk(1): {0}}))
    assert [type(event).__name__ for event in connector.take_events()] == ["BlockStored"]
    manager.rest("they changed")
    manager.on_news(News(stored={_chunk(3): {0}}))
    assert list(connector.take_events()) == [], "stopped: nothing will be served"


@pytest.mark.parametrize("in_use", [True, pytest.param(False, id="negative_control")])
def test_where_vllm_could_not_clear_its_own_cache_a_reset_takes_every_block_back(
    in_use, describing
):
    """VLLM says nothing then, and resets the connector all the same."""
    connector, manager, payloads = describing
    pool = BlockPool(4, True, 1, enable_kv_cache_events=True)
    connector._kv_cache_manager = SimpleNamespace(block_pool=pool)
    payloads.update({_key(n): _payload(n) for n in (1, 2)})
    manager.on_news(News(stored={_chunk(1): {0}}))
    believed = {h for event in connector.take_events() for h in event.block_hashes}
    assert len(believed) == 2
    manager.on_news(News(stored={_chunk(2): {0}}))  # not taken before the reset
    blocks = pool.get_new_blocks(1) if in_use else []
    assert pool.reset_prefix_cache() is not in_use
    assert bool(pool.take_events()) is not in_use
    connector.reset_cache()
    pool.free_blocks(blocks)
    for event in connector.take_events():
        stored = type(event).__name__ == "BlockStored"
        (believed.update if stored else believed.difference_update)(event.block_hashes)
    assert bool(believed) is not in_use, "AllBlocksCleared is for the others"
    assert list(connector.take_events()) == []


@pytest.mark.parametrize("hears", [True, pytest.param(False, id="negative_control")])
def test_a_router_hears_again_what_is_on_disk_after_vllm_said_that_all_is_cleared(
    hears, describing
):
    def said(number):
        return maybe_convert_block_hash(number.to_bytes(32, "big"))

    connector, manager, payloads = describing
    pool = BlockPool(4, True, 1, enable_kv_cache_events=True)
    if hears:
        connector._kv_cache_manager = SimpleNamespace(block_pool=pool)
    payloads.update({_key(n): _payload(n) for n in (1, 2, 3)})
    manager.on_news(News(stored={_chunk(1): {0}, _chunk(2): {0}}))
    assert len(list(connector.take_events())) == 2
    assert list(connector.take_events()) == [], "said once"
    manager.on_news(News(stored={_chunk(3): {0}}))  # not taken before the reset
    manager.chunks.on_removed([_name(2)])
    assert pool.reset_prefix_cache()
    (cleared,) = pool.take_events()  # the scheduler takes vLLM's own first
    assert vars(type(cleared)).get("medium") is None
    believed = set()
    for event in connector.take_events():
        stored = type(event).__name__ == "BlockStored"
        (believed.update if stored else believed.difference_update)(event.block_hashes)
    assert (said(1) in believed) is hears
    assert said(2) not in believed
    assert said(3) in believed
    assert list(connector.take_events()) == []


def test_the_payloads_that_vllm_keeps_are_bounded(describing):
    connector, manager, payloads = describing
    manager.events = module.KvEvents(1000)
    most = 0
    for number in range(20_000):
        payloads[_key(number)] = _payload(number)
        list(connector.take_events())
        most = max(most, len(payloads))
    assert most <= 1001 + 2 * module._PAYLOADS_SLACK
    assert all(_key(number) in payloads for number in range(19_000, 20_000))


def test_what_loses_its_payload_is_taken_back_with_every_block(describing):
    connector, manager, payloads = describing
    manager.events._max_announced = 10
    payloads[_key(0)] = _payload(0)
    manager.on_news(News(stored={_chunk(0): {0}}))
    (stored,) = connector.take_events()
    removed = set()
    for number in range(1, 4 * module._PAYLOADS_SLACK):
        payloads[_key(number)] = _payload(number)
        if number % 100 == 0:
            manager.chunks.on_removed([_name(number - 1)])
            for event in connector.take_events():
                removed.update(event.block_hashes)
    assert _key(0) not in payloads
    assert removed == set(stored.block_hashes)


def test_without_trimming_vllm_keeps_payloads_for_ever(make_manager):
    manager = make_manager(kv_events=KvEvents())
    tracker = tracker_of_vllm(describing=True)
    tracker._pending_event_metadata[_key(1)] = _payload(1)
    manager.on_news(News(stored={_chunk(1): {0}}))
    manager.chunks.on_removed([_name(1)])
    list(tracker.take_events(manager.take_events()))
    assert list(tracker._pending_event_metadata) == [_key(1)]
