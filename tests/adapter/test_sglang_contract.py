"""FskvStorage against the classes of the installed SGLang: base class, factory, host pools, keys."""

from __future__ import annotations

import array
import dataclasses
import inspect
import itertools
import pathlib
import tempfile
import threading
from types import SimpleNamespace

import pytest
import read_only
from hypothesis import given, settings
from hypothesis.strategies import data, integers, sampled_from, sets
from key_files import write_keys
from world import damage, wait_for

pytest.importorskip("sglang", reason="SGLang has an environment of its own: make test-sglang")

import torch
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheFile,
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.pool_host.common import get_allocator_from_storage
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost, MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.mem_cache.rust_tree_core.adapter import RustUnifiedTreeCore
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import compute_node_hash_values, get_storage_hash_str
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.srt.utils.weight_checker import WeightChecker

from fskv.engines.sglang import harmless, identity, server, storage
from fskv.engines.sglang.host_pool import host_pages
from fskv.engines.sglang.identity import ServerFacts
from fskv.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")

PAGE, LAYERS, HEADS, DIM, NUM_PAGES = 4, 3, 2, 8, 16
LAYOUTS = ("page_first", "page_first_direct", "page_head", "layer_first")


def host_pool(layout="page_first_direct", seed=0, kind=MHATokenToKVPoolHost):
    """A host pool of SGLang's, without the device pool that its constructor asks for."""
    pool = kind.__new__(kind)
    pool.layout, pool.dtype, pool.page_size = layout, torch.bfloat16, PAGE
    pool.layer_num = pool.target_layer_num = pool.end_layer = LAYERS
    pool.start_layer, pool.page_num, pool.size = 0, NUM_PAGES, NUM_PAGES * PAGE
    pool.head_num, pool.head_dim, pool.v_head_dim = HEADS, DIM, DIM
    pool.head_group_num, pool.pin_memory, pool.device = 1, False, "cpu"
    if kind is AsymmetricMHATokenToKVPoolHost:
        pool.v_head_dim = DIM // 2
    if kind is MLATokenToKVPoolHost:
        pool.kv_lora_rank, pool.qk_rope_head_dim, pool.kv_cache_dim = 12, 4, 16
        pool._native_buffers, pool._size_per_token = None, 16 * LAYERS * 2
    pool._transfer_device = torch.device("cpu")
    pool.allocator = get_allocator_from_storage("default")
    pool.size_per_token = pool.get_size_per_token()
    pool.kv_buffer = pool.init_kv_buffer()
    torch.manual_seed(seed)
    for buffer in pool.kv_buffer if isinstance(pool.kv_buffer, tuple) else [pool.kv_buffer]:
        buffer.copy_(torch.randn(buffer.shape))
    return pool


@pytest.fixture(autouse=True)
def facts(monkeypatch):
    """What SGLang would tell of itself, written down here."""
    plain = dict.fromkeys(("enable_lora", "speculative_algorithm", "revision"))
    plain |= dict.fromkeys(("prefill_attention_backend", "decode_attention_backend"))
    plain |= {"quantization_param_path": None, "hicache_storage_backend": "dynamic"}
    plain |= {"disaggregation_mode": "null"}
    plain |= {"model_path": "m", "kv_cache_dtype": "auto", "attention_backend": "triton"}
    told = ServerFacts(
        version="0.5.23",
        arch="cpu-x86_64",
        arguments=plain,
        defaults=plain,
        environment={},
        hf_config={"architectures": ["LlamaForCausalLM"]},
        model_dtype="bfloat16",
        is_multimodal=False,
        checkpoint="m",
        started_at=0.0,
    )
    monkeypatch.setattr(server, "gather_facts", lambda: told)


def backend_at(root, pool, beside=(), *, is_mla=False, made=None, tp_size=1, **options):
    """A backend as SGLang makes it."""
    extra = {
        "backend_name": "fskv",
        "module_path": "fskv.engines.sglang",
        "class_name": "FskvStorage",
        "interface_v1": 1,
        "root": str(root),
        "maintenance": "off",
        "weights_id": "w",
        **options,
    }
    config = HiCacheStorageConfig(
        *(0, tp_size, 0, 1, 0, 1), is_mla, False, False, "m", extra_config=extra
    )
    backend = StorageBackendFactory.create_backend("dynamic", config, pool)
    if made is not None:
        made.append(backend)
    backend.register_mem_pool_host(pool)
    backend.register_mem_host_pool_v2(pool, PoolName.KV)
    for name, other in dict(beside).items():
        backend.register_mem_host_pool_v2(other, name)
    backend.on_host_pools_registered()
    return backend


@pytest.fixture
def make(tmp_path):
    """Backends on one root, closed at the end."""
    made = []
    (tmp_path / "kv").mkdir()

    def make(pool=None, **options):
        return backend_at(tmp_path / "kv", pool or host_pool(), made=made, **options)

    yield make
    for backend in made:
        backend.close()


def keys(num, seed=0):
    return get_storage_hash_str([seed, *range(1, num * PAGE)], page_size=PAGE)


def indices(*pages):
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def page(pool, number):
    """All of a page's values, by the layout and not by the table of addresses that the adapter uses."""
    parts = pool.kv_buffer if isinstance(pool.kv_buffer, tuple) else [pool.kv_buffer]
    if not isinstance(pool, MLATokenToKVPoolHost) and len(parts) == 1:
        parts = [*pool.kv_buffer]
    tokens = slice(number * PAGE, (number + 1) * PAGE)
    if pool.layout == "layer_first":
        return torch.cat([part[:, tokens].flatten() for part in parts])
    which = tokens if pool.layout == "page_first" else slice(number, number + 1)
    return torch.cat([part[which].flatten() for part in parts])


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *((MHATokenToKVPoolHost, layout) for layout in LAYOUTS),
        *((AsymmetricMHATokenToKVPoolHost, layout) for layout in LAYOUTS[:2]),
        *(
            (MLATokenToKVPoolHost, layout)
            for layout in ("page_first", "page_first_direct", "layer_first")
        ),
    ],
)
def test_pages_of_sglangs_own_pools_go_to_files_and_back(make, kind, layout):
    pool, other = host_pool(layout, kind=kind), host_pool(layout, seed=1, kind=kind)
    is_mla = kind is MLATokenToKVPoolHost
    backend, reader = make(pool, is_mla=is_mla), make(other, is_mla=is_mla)
    want = keys(4)
    assert backend.batch_set_v1(want, indices(3, 7, 0, 9)) == [True] * 4
    assert reader.batch_exists([*want, *keys(2, seed=5)]) == 4
    before = {number: page(other, number).clone() for number in (0, 3, 5, 14)}
    assert reader.batch_get_v1(want, indices(1, 2, 4, 15)) == [True] * 4
    for source, target in zip((3, 7, 0, 9), (1, 2, 4, 15), strict=True):
        assert torch.equal(page(other, target), page(pool, source))
    assert all(torch.equal(page(other, number), old) for number, old in before.items())


def test_a_server_that_only_loads_changes_nothing(make, tmp_path):
    pool, other = host_pool(), host_pool(seed=1)
    backend = make(pool)
    assert backend.batch_set_v1(keys(2), indices(3, 7)) == [True] * 2
    read_only.make_old(tmp_path / "kv")
    before = read_only.look(tmp_path / "kv")
    with read_only.mounted(tmp_path / "kv", tmp_path / "ro") as at:
        reader = backend_at(at, other, store=False, maintenance="on")
        assert reader.batch_exists(keys(4)) == 2
        assert reader.batch_get_v1(keys(2), indices(1, 2)) == [True] * 2
        assert torch.equal(page(other, 1), page(pool, 3))
        assert reader.batch_set_v1(keys(4), indices(1, 2, 4, 5)) == [True, True, False, False]
        reader.close()
    assert read_only.look(tmp_path / "kv") == before
    assert backend.batch_set_v1(keys(4), indices(3, 7, 4, 5)) == [True] * 4, "the control"
    assert read_only.look(tmp_path / "kv") != before


def test_with_a_key_file_pages_come_back_after_a_restart_and_in_clear_they_are_not_found(
    make, tmp_path
):
    key_file = write_keys(tmp_path / "keys", "one")
    pool, other = host_pool(), host_pool(seed=1)
    assert make(pool, key_file=key_file).batch_set_v1(keys(2), indices(3, 7)) == [True] * 2
    reader = make(other, key_file=key_file)
    assert reader.batch_exists(keys(4)) == 2
    assert reader.batch_get_v1(keys(2), indices(1, 2)) == [True] * 2
    assert torch.equal(page(other, 1), page(pool, 3))
    assert make(host_pool()).batch_exists(keys(4)) == 0
    other_key = write_keys(tmp_path / "other", "two")
    assert make(other, key_file=other_key).batch_get_v1(keys(2), indices(1, 2)) == [False] * 2


def test_a_damaged_page_and_one_that_was_never_stored_are_false(make, tmp_path):
    pool = host_pool()
    backend = make(pool)
    assert all(backend.batch_set_v1(keys(3), indices(0, 1, 2)))
    (first, *_) = sorted(pathlib.Path(tmp_path / "kv").glob("*/*/chunks/*/*.kv"))
    damage(first, 4096 + 9)
    good = backend.batch_get_v1([*keys(3), *keys(1, seed=9)], indices(4, 5, 6, 7))
    assert good.count(False) == 2
    assert good[3] is False


def test_calls_that_make_no_sense_are_false_and_raise_nothing(make):
    backend = make()
    assert backend.batch_exists(["no hash"]) == 0
    assert backend.batch_get_v1(keys(1), torch.arange(1, 1 + PAGE)) == [False]
    assert backend.batch_set_v1(keys(1), indices(NUM_PAGES)) == [False]
    assert backend.batch_set_v1(keys(2), indices(0)) == [False, False]
    assert backend.batch_set_v1(keys(2), indices(0, 1)) == [True, True], "the control"
    backend.close()
    assert backend.batch_exists(keys(2)) == 0
    assert backend.batch_get_v1(keys(2), indices(0, 1)) == [False, False]
    assert backend.clear() is None


# --- hybrids: over SGLang's own host pools, because no hybrid model runs on a CPU there ------


def state_pool(seed=0, layout="page_first"):
    """SGLang's pool of states with one slot a page, without the device pool that its constructor asks for."""
    pool = MambaPoolHost.__new__(MambaPoolHost)
    pool.layout, pool.page_size, pool.size, pool.page_num = layout, 1, NUM_PAGES, NUM_PAGES
    pool.num_mamba_layers, pool.mtp_draft_buffer_infos = 2, ()
    pool.temporal_state_shape, pool.conv_state_shapes = torch.Size([3, 5]), [torch.Size([7])]
    pool.temporal_state_elem_size, pool.conv_state_elem_sizes = 15, [7]
    pool.temporal_dtype, pool.conv_dtype = torch.float32, torch.bfloat16
    pool.dtype, pool.slot_state_device_tensors = pool.conv_dtype, []
    pool.allocator, pool.pin_memory, pool.device = (
        get_allocator_from_storage("default"),
        False,
        "cpu",
    )
    pool._buffer_device = torch.device("cpu")
    pool.size_per_token = pool.get_size_per_token()
    pool.kv_buffer = pool.init_kv_buffer()
    torch.manual_seed(seed)
    for buffer in pool.kv_buffer:
        buffer.copy_(torch.randn(buffer.shape))
    return pool


def slots(*numbers):
    return torch.tensor(numbers)


@pytest.mark.parametrize("name", ["full_kv_pool", "swa_kv_pool"])
def test_a_pool_inside_of_a_hybrids_has_the_layers_that_it_has(name):
    """SGLang tells it no last layer, and then names one too few."""
    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", page_size=PAGE))
    whole = SWAKVPool(
        size=NUM_PAGES * PAGE,
        size_swa=NUM_PAGES * PAGE,
        page_size=PAGE,
        dtype=torch.bfloat16,
        head_num=HEADS,
        head_dim=DIM,
        swa_attention_layer_ids=[0, 1, 2],
        full_attention_layer_ids=[3, 4, 5],
        device="cpu",
    )
    inner, pool = getattr(whole, name), host_pool()
    assert inner.layer_num == LAYERS != inner.end_layer
    pool.start_layer, pool.end_layer = inner.start_layer, inner.end_layer
    assert host_pages(pool).layers == (0, LAYERS)


def state(pool, number):
    return torch.cat([buffer[number].float().flatten() for buffer in pool.kv_buffer])


def transfer(name, wanted, where=None, policy=PoolHitPolicy.TRAILING_PAGES):
    return PoolTransfer(name=name, keys=wanted, host_indices=where, hit_policy=policy)


def test_a_hybrids_pools_are_stored_and_restored_side_by_side(make, tmp_path):
    pools = host_pool(), {PoolName.SWA: host_pool(seed=1), PoolName.MAMBA: state_pool(seed=2)}
    others = host_pool(seed=3), {PoolName.SWA: host_pool(seed=4), PoolName.MAMBA: state_pool(5)}
    writer, reader = make(pools[0], beside=pools[1]), make(others[0], beside=others[1])
    want = keys(4)
    assert writer.batch_set_v1(want, indices(0, 1, 2, 3)) == [True] * 4
    put = [
        transfer(PoolName.SWA, want[2:], indices(5, 6)),
        transfer(PoolName.MAMBA, want[3:], slots(9)),
    ]
    assert writer.batch_set_v2(put) == {PoolName.SWA: [True, True], PoolName.MAMBA: [True]}
    asked = [transfer(PoolName.SWA, want[:2]), transfer(PoolName.MAMBA, want[:1])]
    found = reader.batch_exists_v2(want, asked)
    assert (found.kv_hit_pages, found.restorable_prefix_pages) == (4, [4])
    assert found.extra_pool_hit_pages == {PoolName.KV: 4, PoolName.SWA: 4, PoolName.MAMBA: 4}
    get = [
        transfer(PoolName.SWA, want[2:], indices(11, 12)),
        transfer(PoolName.MAMBA, want[3:], slots(14)),
    ]
    assert reader.batch_get_v2(get) == {PoolName.SWA: [True, True], PoolName.MAMBA: [True]}
    for source, target in ((5, 11), (6, 12)):
        swa = others[1][PoolName.SWA]
        assert torch.equal(page(swa, target), page(pools[1][PoolName.SWA], source))
    mamba = PoolName.MAMBA
    assert torch.equal(state(others[1][mamba], 14), state(pools[1][mamba], 9))
    assert not torch.equal(state(others[1][mamba], 13), state(pools[1][mamba], 9)), "no other slot"
    # A pool's page under the same key as the KV's is another file.
    assert len([*pathlib.Path(tmp_path / "kv").glob("*/*/chunks/*/*.kv")]) == 7


@pytest.mark.sglang
@given(data())
@settings(max_examples=40, deadline=None)
def test_a_prefix_is_restorable_only_if_every_pool_has_what_it_needs(example):
    """SGLang's own file backend, asked the same, is the judge. Its control: one pool less, and more is."""
    draw = example.draw
    num, names = draw(integers(1, 7)), (PoolName.KV, PoolName.SWA, PoolName.MAMBA)
    held = {name: draw(sets(integers(0, num - 1))) for name in names}
    policies = {name: draw(sampled_from([*PoolHitPolicy][:2])) for name in names[1:]}
    windows = {name: draw(integers(1, 3)) for name in names[1:]}
    with tempfile.TemporaryDirectory() as directory:
        base = pathlib.Path(directory)
        (base / "kv").mkdir()
        pools = {PoolName.SWA: host_pool(seed=1), PoolName.MAMBA: state_pool(2)}
        ours = backend_at(base / "kv", host_pool(), pools)
        theirs = HiCacheFile(
            HiCacheStorageConfig(*(0, 1, 0, 1, 0, 1), False, False, False, "m"), str(base / "file")
        )
        for number, pool in ((0, ours.mem_pool_host), *enumerate(pools.values(), 1)):
            theirs.register_mem_host_pool_v2(pool, names[number])
        want = keys(num)
        for name in names:
            some = sorted(held[name])
            where = slots(*some) if name == PoolName.MAMBA else torch.arange(0)
            if name != PoolName.MAMBA and some:
                where = indices(*some)
            put = [transfer(name, [want[n] for n in some], where)]
            if some:
                assert theirs.batch_set_v2(put) == ours.batch_set_v2(put)
        asked = [transfer(name, want[: windows[name]], policy=policies[name]) for name in names[1:]]
        mine, judge = ours.batch_exists_v2(want, asked), theirs.batch_exists_v2(want, asked)
        assert mine.restorable_prefix_pages == judge.restorable_prefix_pages
        assert mine.kv_hit_pages == judge.kv_hit_pages
        alone = ours.batch_exists_v2(want, asked[:1]).restorable_prefix_pages
        assert set(mine.restorable_prefix_pages) <= set(alone)
        assert alone == theirs.batch_exists_v2(want, asked[:1]).restorable_prefix_pages
        ours.close()


def test_a_pool_that_is_not_there_or_has_no_policy_of_ours_restores_nothing(make):
    pools = {PoolName.SWA: host_pool(seed=1)}
    backend = make(beside=pools)
    want = keys(2)
    assert all(backend.batch_set_v1(want, indices(0, 1)))
    assert backend.batch_set_v2([transfer(PoolName.SWA, want, indices(0, 1))])[PoolName.SWA]
    assert backend.batch_exists_v2(want, [transfer(PoolName.SWA, want)]).kv_hit_pages == 2
    for missing in (
        transfer(PoolName.MAMBA, want),
        transfer(PoolName.SWA, want, policy=PoolHitPolicy.BLOCK_GROUPS),
    ):
        assert backend.batch_exists_v2(want, [missing]).restorable_prefix_pages == []
        assert backend.batch_exists_v2(want, [missing]).kv_hit_pages == 0
    assert backend.batch_get_v2([transfer(PoolName.MAMBA, want, slots(0, 1))]) == {
        PoolName.MAMBA: [False, False]
    }
    assert backend.batch_get_v2([transfer(PoolName.SWA, want)]) == {PoolName.SWA: [False, False]}


@pytest.mark.parametrize("name", [PoolName.INDEXER, PoolName.DRAFT, PoolName.DEEPSEEK_V4_C4])
def test_other_pools_are_refused_in_one_sentence(make, name):
    with pytest.raises(ConfigError, match=rf"beside its KV \({name}\)") as refusal:
        make(beside={name: host_pool()})
    assert "\n" not in str(refusal.value)


def test_states_that_are_kept_elsewhere_are_refused(make):
    odd = state_pool()
    odd.slot_state_device_tensors = [torch.zeros(1)]
    with pytest.raises(ConfigError, match="side states"):
        make(beside={PoolName.MAMBA: odd})
    with pytest.raises(ConfigError, match="found 'layer_first', expected one of page_first, "):
        make(beside={PoolName.MAMBA: state_pool(layout="layer_first")})


def test_a_wrong_option_ends_the_start_in_one_sentence(make):
    with pytest.raises(ConfigError, match="'max_byte'") as refusal:
        make(max_byte=1)
    assert "\n" not in str(refusal.value)


def reset(controller=True):
    """Reset a tree of SGLang's that holds nothing."""
    tree = SimpleNamespace(linker=None, _reset_full=lambda: None)
    tree.cache_controller = controller or None
    UnifiedRadixCache.reset(tree)


@pytest.fixture
def update(monkeypatch):
    """An update of the weights that ends as it is told to."""
    monkeypatch.setattr(server, "updates", server.Updates())
    results = []
    monkeypatch.setattr(WeightUpdater, "update_weights_from_disk", lambda _: results.pop())

    def update(result=(True, "")):
        results.append(result)
        assert WeightUpdater.update_weights_from_disk(None) == result

    return update


def test_after_an_update_and_a_reset_it_stores_and_finds_apart_from_all_others(make, update):
    """The controls: before, without the reset, and after an update that failed."""
    pool = host_pool()
    backend, want = make(pool), keys(2)
    store, old = backend._store, backend._store._kv.directory.path
    assert all(backend.batch_set_v1(want, indices(0, 1)))
    reset()
    assert backend.batch_exists(want) == 2, "the control"
    update()
    for wait in (lambda: None, lambda: reset(controller=False), lambda: update((False, "")), reset):
        assert backend.batch_exists(want) == 0
        assert backend.batch_get_v1(want, indices(2, 3)) == [False] * 2
        assert backend.batch_set_v1(keys(1, seed=3), indices(0)) == [False]
        wait()
        assert not store._is_opening
    with pytest.raises(ConfigError, match="weights of this engine were changed"):
        make()
    update()
    reset()
    wait_for(lambda: not store._kv.watch.resting)
    assert store._kv.directory.path != old
    assert backend.batch_exists(want) == 0
    assert backend.batch_set_v1(want, indices(4, 5)) == [True] * 2
    assert backend.batch_exists(want) == 2
    assert backend.batch_get_v1(want, indices(6, 7)) == [True] * 2
    assert torch.equal(page(pool, 6), page(pool, 4))


@pytest.mark.parametrize("why", ["media", "decode", "latents", "control"])
def test_where_kv_of_old_weights_could_come_later_an_update_stops_it(
    make, update, monkeypatch, why
):
    told, is_mla = server.gather_facts(), why == "latents"
    told = dataclasses.replace(told, is_multimodal=why == "media")
    if why == "decode":
        told = dataclasses.replace(told, arguments={**told.arguments, "disaggregation_mode": why})
    monkeypatch.setattr(server, "gather_facts", lambda: told)
    pool = host_pool(kind=MLATokenToKVPoolHost if is_mla else MHATokenToKVPoolHost)
    backend = make(pool, is_mla=is_mla, tp_size=2, trust=["media"])
    update()
    reset()
    assert backend._store._kv.watch.in_doubt is (why != "control")
    if why == "control":
        wait_for(lambda: backend._store._kv.watch.epoch == 1)


@pytest.mark.parametrize(
    ("tags", "stops"), [(["kv_cache"], False), (["weights"], True), (None, True)]
)
def test_weights_that_come_back_may_be_others(make, monkeypatch, tags, stops):
    monkeypatch.setattr(server, "updates", server.Updates())
    backend = make()
    assert all(backend.batch_set_v1(keys(1), indices(0)))
    with pytest.raises(AttributeError):  # it has no scheduler here; told is before
        SchedulerWeightUpdaterManager.resume_memory_occupation(object(), SimpleNamespace(tags=tags))
    assert backend.batch_exists(keys(1)) == (0 if stops else 1)


@pytest.mark.parametrize("kind", [HiCacheController, HybridCacheController])
def test_while_sglang_waits_for_its_threads_their_calls_end_at_once(make, kind):
    """A thread may have many batches to go, and SGLang waits 10 s for it. The controls: before, and after."""
    backend, want, found = make(beside={PoolName.SWA: host_pool()}), keys(2), []

    def calls():
        swa = transfer(PoolName.SWA, want, indices(0, 1))
        found.append(
            [
                *backend.batch_set_v1(want, indices(0, 1)),
                *backend.batch_set_v2([swa])[PoolName.SWA],
                *backend.batch_get_v1(want, indices(0, 1)),
                *backend.batch_get_v2([swa])[PoolName.SWA],
                bool(backend.batch_exists(want)),
                bool(backend.batch_exists_v2(want, [swa]).kv_hit_pages),
            ]
        )

    controller = kind.__new__(kind)
    controller.storage_stop_event = threading.Event()
    controller.pp_prefetch_command_thread = None
    controller.backup_thread = SimpleNamespace(join=lambda timeout: calls())
    calls()
    controller._stop_storage_threads()
    calls()
    assert found == [[True] * 10, [False] * 10, [True] * 10]


# --- what is asked of SGLang --------------------------------------------------------------


def test_every_call_of_the_base_class_is_answered_with_its_arguments():
    for name, method in inspect.getmembers(HiCacheStorage, inspect.isfunction):
        if name.startswith("_"):
            continue
        own = getattr(storage.FskvStorage, name)
        assert [*inspect.signature(own).parameters] == [*inspect.signature(method).parameters], name
    inherited = {n for n in vars(HiCacheStorage) if n not in vars(storage.FskvStorage)}
    assert {n for n in inherited if not n.startswith("_")} == {"register_mem_pool_host"}


def test_every_argument_that_is_left_out_of_the_identity_is_one_of_the_servers():
    """A name that is misspelt, or gone, would leave nothing out."""
    known = set(ServerArgs.__struct_fields__)
    assert known >= {*identity._OTHER_WEIGHTS, "quantization", "use_ray"}
    for name in [name for names in harmless._ARGUMENTS.values() for name in names.split()]:
        start = name.removesuffix("*")
        assert name in known or (start != name and any(one.startswith(start) for one in known)), (
            name
        )


# --- under which key SGLang's tree found KV, and under which it is stored ----------------------

SHORT_PAGE = 2


def namespaces():
    """Extra keys and salts that are alike, or alike once they are joined."""
    extras = (None, "", "a", "ab", "abc", "a|b")
    return itertools.product(extras, (None, "", "a", "c", "bc", "abc"))


def keys_of_requests():
    media = 1 << 40  # what stands for tokens of media is larger than a token
    texts = ([1, 1, 1, 1], [1, 1, 1, 2], [1, 2, 1, 1], [1, 1, media, 1], [1, 1, media + 1, 1])
    for text, (extra, salt) in itertools.product(texts, namespaces()):
        yield RadixKey(array.array("q", text), extra_key=extra, cache_salt=salt)


class Tree:
    """SGLang's own tree of what is in memory, in the language that it takes by itself."""

    def __init__(self):
        params = CacheInitParams(False, None, None, SHORT_PAGE)
        params.tree_components = (ComponentType.FULL,)
        self._core = RustUnifiedTreeCore(params)
        self._core.enable_storage = True

    def insert(self, key):
        step = self._core.begin_insert(InsertParams(key=key, value=torch.arange(len(key))))
        while step.result is None:
            step = self._core.resume_insert()
        self._core.end_insert()

    def pages(self, key):
        """Return under which storage keys the tree has pages of this prompt."""
        tokens, node, _ = self._core.match_full_device_prefix(key)
        path = self._core.get_prefix_hash_values(node) + self._core.get_hash_values(node)
        return path[: tokens // SHORT_PAGE]


class PythonTree:
    """The one that it takes elsewhere: keys and hashes are the same functions."""

    def __init__(self):
        self._tree = RadixCache.create_simulated(page_size=SHORT_PAGE)

    def insert(self, key):
        self._tree.insert(InsertParams(key=key, value=torch.arange(len(key))))

    def pages(self, key):
        node = self._tree.match_prefix(MatchPrefixParams(key=key)).last_device_node
        path = []
        while node is not self._tree.root_node:
            path.append(node)
            node = node.parent
        for each in reversed(path):
            each.hash_value = compute_node_hash_values(each, SHORT_PAGE)
        return [page for each in reversed(path) for page in each.hash_value]


def laundered(tree, tree_key=lambda key: key):
    """Return the prompts whose pages the tree has under other storage keys than theirs.

    Each prompt is in the tree, so it has all of them. Stored under their own keys, they would be others'.
    """
    for key in keys_of_requests():
        tree.insert(tree_key(key))
    return [
        key
        for key in keys_of_requests()
        if tree.pages(tree_key(key)) != get_storage_hash_str(key, page_size=SHORT_PAGE)
    ]


@pytest.mark.parametrize("tree", [Tree, PythonTree])
def test_what_the_tree_takes_as_equal_has_one_storage_key(tree):
    assert laundered(tree()) == []


@pytest.mark.parametrize("tree", [Tree, PythonTree])
@pytest.mark.parametrize(
    "says_less",
    [
        lambda key: RadixKey(key.token_ids, extra_key=key.extra_key),
        lambda key: RadixKey(
            key.token_ids, extra_key=(key.extra_key or "") + (key.cache_salt or "")
        ),
    ],
    ids=["no salt", "joined"],
)
def test_negative_control_a_tree_whose_key_says_less_is_found(tree, says_less):
    assert laundered(tree(), says_less)


def test_prompts_that_the_tree_tells_apart_have_storage_keys_of_their_own():
    names = {}
    for key in keys_of_requests():
        page = get_storage_hash_str(key, page_size=SHORT_PAGE)[-1]
        names.setdefault(page, set()).add((key.extra_key, key.cache_salt, *key.token_ids))
    assert len(names) > 100
    assert all(len(facts) == 1 for facts in names.values())


def test_each_way_to_change_weights_is_watched(make):
    make()
    ways = [
        *("update_weights_from_disk", "update_weights_from_tensor", "update_weights_from_ipc"),
        *("load_weights_from_distributed", "begin_weight_update", "end_weight_update"),
    ]
    assert all(hasattr(getattr(WeightUpdater, name), "by_fskv") for name in ways)
    assert hasattr(WeightChecker._reset_tensors, "by_fskv")
    assert hasattr(UnifiedRadixCache.reset, "by_fskv")
    assert hasattr(SchedulerWeightUpdaterManager.resume_memory_occupation, "by_fskv")
