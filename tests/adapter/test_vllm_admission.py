"""Admission in vLLM's scheduler: which of the chunks that it offers are stored."""

from __future__ import annotations

import warnings

import pytest
import world

pytest.importorskip("vllm", reason="these tests need the vllm environment: make test")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM and torch among themselves
    from vllm.v1.kv_offload.base import ReqContext, make_offload_key

    from fskv.bounds.admission import Duel
    from fskv.config import StoreConfig
    from fskv.engines.vllm.manager import STORE_ALL, FskvManager
    from fskv.errors import ConfigError
    from fskv.kv_transfer.options import tier_config
    from fskv.offload.kv_store import options_of

pytestmark = world.VLLM

SIZE = 16  # tokens of a chunk


def keys(first, num, group=0):
    hashes = [number.to_bytes(4, "big") * 8 for number in range(first, first + num)]
    return [make_offload_key(each, group) for each in hashes]


def request(req_id, *groups, params=None):
    """Return a request whose keys vLLM has given positions."""
    made = ReqContext(req_id, kv_transfer_params=params)
    for size, each in groups:
        for number, key in enumerate(each, 1):
            made.set_offload_key_position(key, number * size)
    return made


@pytest.fixture
def manager(make_manager, handshake):
    two = handshake(file_nbytes={0: 4096, 1: 8192})
    return make_manager(workers=[two], admission="reused")


def stored(manager, req_id, first=0, num=4, params=None):
    """A request computes these chunks, of two groups; return which are stored."""
    fine, coarse = keys(first, num), keys(first, num, 1)
    groups = ((SIZE, fine), (SIZE, coarse))
    context = request(req_id, *groups, params=params)
    manager.admit(req_id, groups, 0)
    found = [*manager.prepare_store(fine, context).keys_to_store]
    return [*found, *manager.prepare_store(coarse, context).keys_to_store]


def test_chunks_are_stored_at_the_second_request_those_of_all_groups_together(manager):
    assert stored(manager, "a") == []
    assert stored(manager, "a") == [], "vLLM offers the same request's again after a preemption"
    assert stored(manager, "b", 2, 4) == [*keys(2, 2), *keys(2, 2, 1)]
    assert stored(manager, "c", 4, 2) == [*keys(4, 2), *keys(4, 2, 1)]


def test_it_is_counted_and_no_chunk_that_is_there_counts_as_not_admitted(manager):
    stored(manager, "a")
    stored(manager, "b")
    stored(manager, "c")  # on their way
    counted = {metric.name: total for (metric, _), total in manager.chunks.counters.drain().items()}
    assert counted["fskv_not_admitted_chunks"] == 8
    assert counted["fskv_not_admitted_bytes"] == 4 * (4096 + 8192)
    assert counted["fskv_admitted_chunks"] == 8


@pytest.mark.parametrize(
    "params", [None, {}, {STORE_ALL: False}, {STORE_ALL: "yes"}, {STORE_ALL: True}]
)
def test_a_request_may_ask_that_all_of_it_is_stored(manager, params):
    asks = params == {STORE_ALL: True}
    assert len(stored(manager, "a", params=params)) == (8 if asks else 0)


def test_what_others_wait_for_is_stored_at_once(handshake):
    """A `kv_producer` computes for another engine."""
    config = StoreConfig(root="/nowhere", maintenance="off", admission="reused")
    manager = FskvManager(config, 2, loads=False)
    try:
        manager.set_workers([handshake(file_nbytes={0: 4096, 1: 8192})])
        assert len(stored(manager, "a")) == 8
    finally:
        manager.shutdown()


def test_each_chunk_of_a_request_is_used_once_and_its_whole_prompt_at_the_start(manager):
    used = []
    manager.chunks.admission.use = lambda names, viewer: used.append((len(names), viewer))
    prompt = keys(0, 6)
    context = request("a", (SIZE, prompt))
    manager.admit("a", [(SIZE, prompt)], 2 * SIZE)  # two are in vLLM's own cache
    manager.prepare_store(prompt[2:4], context)
    manager.prepare_store(prompt[4:], context)
    assert used == [(6, "a")]
    prompt += keys(6, 2)  # generated
    for number, key in enumerate(prompt, 1):
        context.set_offload_key_position(key, number * SIZE)
    manager.prepare_store(prompt[6:], context)
    assert used == [(6, "a"), (2, "a")]


def test_of_a_limited_request_no_more_is_used_than_it_may_store(manager):
    used = []
    manager.chunks.admission.use = lambda names, viewer: used.append(len(names))
    manager.limit_request("a", 3 * SIZE + 5)
    manager.admit("a", [(SIZE, keys(0, 6))], 0)
    assert used == [3]


def test_the_default_is_auto_and_stores_everything_without_a_bound(make_manager, handshake):
    manager = make_manager(workers=[handshake(file_nbytes={0: 4096, 1: 8192})])
    assert manager.config.admission == "auto"
    assert len(stored(manager, "a")) == 8


def test_negative_control_auto_follows_the_root_where_there_is_a_bound(make_manager, handshake):
    manager = make_manager(workers=[handshake(file_nbytes={0: 4096, 1: 8192})])
    manager.chunks.admission.resize(1000)
    manager.chunks.admission.first_sight = False
    assert isinstance(manager.chunks.admission._duel, Duel)
    assert stored(manager, "a") == []
    assert len(stored(manager, "b")) == 8


@pytest.mark.parametrize(
    "parse",
    [
        pytest.param(options_of, id="sglang_and_lmcache"),
        pytest.param(tier_config, id="tier"),
    ],
)
def test_engines_with_a_policy_of_their_own_refuse_the_option(parse):
    with pytest.raises(ConfigError, match="'admission'"):
        parse({"root": "/nowhere", "admission": "reused"})
    assert parse({"root": "/nowhere"}).admission in ("all", "auto")
