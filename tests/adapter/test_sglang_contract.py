"""FskvStorage against the classes of the installed SGLang: base class, factory, host pools, keys."""

from __future__ import annotations

import inspect
import json
import pathlib
import warnings
from types import SimpleNamespace

import pytest
from world import damage

pytest.importorskip("sglang", reason="SGLang has an environment of its own: make test-sglang")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang, torch and triton among themselves
    import torch
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager,
    )
    from sglang.srt.mem_cache import hicache_storage
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheStorage,
        HiCacheStorageConfig,
        PoolName,
        PoolTransfer,
    )
    from sglang.srt.mem_cache.pool_host.mha import (
        AsymmetricMHATokenToKVPoolHost,
        MHATokenToKVPoolHost,
    )
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
    from sglang.srt.mem_cache.storage import StorageBackendFactory
    from sglang.srt.mem_cache.utils import get_storage_hash_str
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils.weight_checker import WeightChecker

    from fskv.engines.sglang import arguments, server, storage
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
    pool.allocator = hicache_pool_allocator()
    pool.size_per_token = pool.get_size_per_token()
    pool.kv_buffer = pool.init_kv_buffer()
    torch.manual_seed(seed)
    for buffer in pool.kv_buffer if isinstance(pool.kv_buffer, tuple) else [pool.kv_buffer]:
        buffer.copy_(torch.randn(buffer.shape))
    return pool


def hicache_pool_allocator():
    from sglang.srt.mem_cache.pool_host.common import get_allocator_from_storage

    return get_allocator_from_storage("default")


@pytest.fixture
def make(tmp_path, monkeypatch):
    """A backend as SGLang makes it, on a root of its own, with its configuration written down here."""
    made = []
    plain = dict.fromkeys(("enable_lora", "speculative_algorithm", "revision"))
    plain |= {
        "model_path": "m",
        "kv_cache_dtype": "auto",
        "attention_backend": "triton",
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "quantization_param_path": None,
        "hicache_storage_backend": "dynamic",
    }
    facts = ServerFacts(
        version="0.5.23",
        arch="cpu-x86_64",
        arguments=plain,
        defaults=plain,
        environment={},
        hf_config={"architectures": ["LlamaForCausalLM"]},
        model_dtype="bfloat16",
        is_multimodal=False,
        checkpoint="m",
    )
    monkeypatch.setattr(storage, "gather_facts", lambda: facts)
    (tmp_path / "kv").mkdir()

    def make(pool=None, *, is_mla=False, **options):
        extra = {
            "backend_name": "fskv",
            "module_path": "fskv.engines.sglang",
            "class_name": "FskvStorage",
            "interface_v1": 1,
            "root": str(tmp_path / "kv"),
            "maintenance": "off",
            "weights_id": "w",
            **options,
        }
        config = HiCacheStorageConfig(
            *(0, 1, 0, 1, 0, 1), is_mla, False, False, "m", extra_config=extra
        )
        pool = pool or host_pool()
        backend = StorageBackendFactory.create_backend("dynamic", config, pool)
        made.append(backend)
        backend.register_mem_pool_host(pool)
        backend.register_mem_host_pool_v2(pool, PoolName.KV)
        backend.on_host_pools_registered()
        return backend

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


def test_before_a_pool_is_registered_nothing_is_there(tmp_path):
    extra = {"interface_v1": 1, "root": str(tmp_path)}
    config = HiCacheStorageConfig(*(0, 1, 0, 1, 0, 1), False, False, False, "m", extra_config=extra)
    backend = storage.FskvStorage(config, {})
    assert backend.batch_exists(keys(1)) == 0
    assert backend.batch_get_v1(keys(1), indices(0)) == [False]
    backend.close()


def test_pools_beside_the_kv_are_refused_and_their_calls_answer_nothing(make):
    backend = make()
    transfer = PoolTransfer(name=PoolName.SWA, keys=keys(2))
    assert backend.batch_exists_v2(keys(2), [transfer]).kv_hit_pages == 0
    assert backend.batch_get_v2([transfer]) == {PoolName.SWA: [False, False]}
    assert backend.batch_set_v2([transfer]) == {PoolName.SWA: [False, False]}
    assert all(backend.batch_set_v1(keys(2), indices(0, 1)))
    assert backend.batch_exists(keys(2)) == 2, "the control"
    backend.register_mem_host_pool_v2(host_pool(), PoolName.MAMBA)  # later: it cannot be refused
    assert backend.batch_exists(keys(2)) == 0
    with pytest.raises(ConfigError, match=r"beside its KV \(mamba\)"):
        backend.on_host_pools_registered()


def test_a_wrong_option_ends_the_start_in_one_sentence(make):
    with pytest.raises(ConfigError, match="'max_byte'") as refusal:
        make(max_byte=1)
    assert "\n" not in str(refusal.value)


def test_weights_that_change_stop_it_and_a_later_start_is_refused(make, monkeypatch):
    monkeypatch.setattr(server, "_updated", [])
    backend = make()
    assert all(backend.batch_set_v1(keys(1), indices(0)))
    assert backend.batch_exists(keys(1)) == 1, "the control"
    with pytest.raises(TypeError):  # it has no arguments here; told is before
        WeightUpdater.update_weights_from_disk()
    assert backend.batch_exists(keys(1)) == 0
    assert backend.batch_set_v1(keys(1, seed=3), indices(0)) == [False]
    with pytest.raises(ConfigError, match="weights of this engine were changed"):
        make()


def test_each_way_to_change_weights_is_watched(make):
    make()
    ways = [
        *("update_weights_from_disk", "update_weights_from_tensor", "update_weights_from_ipc"),
        *("load_weights_from_distributed", "begin_weight_update", "end_weight_update"),
    ]
    assert all(hasattr(getattr(WeightUpdater, name), "tells_fskv") for name in ways)
    assert hasattr(WeightChecker._reset_tensors, "tells_fskv")
    assert hasattr(SchedulerWeightUpdaterManager.resume_memory_occupation, "tells_fskv")


@pytest.mark.parametrize(
    ("tags", "stops"), [(["kv_cache"], False), (["weights"], True), (None, True)]
)
def test_weights_that_come_back_may_be_others(make, monkeypatch, tags, stops):
    monkeypatch.setattr(server, "_updated", [])
    backend = make()
    assert all(backend.batch_set_v1(keys(1), indices(0)))
    with pytest.raises(AttributeError):  # it has no scheduler here; told is before
        SchedulerWeightUpdaterManager.resume_memory_occupation(object(), SimpleNamespace(tags=tags))
    assert backend.batch_exists(keys(1)) == (0 if stops else 1)


# --- what is asked of SGLang --------------------------------------------------------------


def test_every_call_of_the_base_class_is_answered_with_its_arguments():
    for name, method in inspect.getmembers(HiCacheStorage, inspect.isfunction):
        if name.startswith("_"):
            continue
        own = getattr(storage.FskvStorage, name)
        assert [*inspect.signature(own).parameters] == [*inspect.signature(method).parameters], name
    inherited = {n for n in vars(HiCacheStorage) if n not in vars(storage.FskvStorage)}
    assert {n for n in inherited if not n.startswith("_")} == set()


def test_every_argument_that_is_left_out_of_the_identity_is_one_of_the_servers():
    """A name that is misspelt, or gone, would leave nothing out."""
    known = set(ServerArgs.__struct_fields__)
    assert known >= arguments._NAMES
    for prefix in arguments._PREFIXES:
        assert any(name.startswith(prefix) for name in known), prefix


def test_the_chain_of_page_hashes_holds_tokens_parent_and_namespace():
    """What the identity leaves to SGLang's keys."""
    plain = keys(3)
    assert keys(2) == plain[:2]
    assert not set(keys(3, seed=7)) & set(plain), "the first token is in all of them"
    salted = SimpleNamespace(extra_key="adapter", cache_salt=None)
    seed = hicache_seed(salted)
    assert seed != hicache_seed(SimpleNamespace(extra_key=None, cache_salt="adapter"))
    assert get_storage_hash_str([0, *range(1, PAGE)], seed, page_size=PAGE) != plain[:1]
    assert all(len(bytes.fromhex(key)) == 32 for key in plain)


def hicache_seed(key):
    from sglang.srt.mem_cache.utils import storage_namespace_seed

    return storage_namespace_seed(key.extra_key, key.cache_salt)


def test_the_injector_of_sglang_passes_all_calls_on(make, monkeypatch):
    monkeypatch.setenv("SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE", "0.5")
    backend = make()
    assert isinstance(backend, hicache_storage.HiCacheStorageFailureInjector)
    found = {json.dumps(backend.batch_set_v1(keys(1), indices(0))) for _ in range(30)}
    assert "[true]" in found
