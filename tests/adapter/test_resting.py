"""An engine whose KV fskv does not know starts, answers, stores and loads nothing, and says why."""

from __future__ import annotations

import ast
import importlib
import json
import logging
import pathlib
import pickle
import sys
from types import SimpleNamespace

import pytest
from world import VLLM, wait_for

pytest.importorskip("vllm", reason="these tests need the vllm environment: make test")

import engine_lab as lab
import kv_layouts as kv
import torch
import vllm
from scheduler_half import step
from settings_lab import Line, config_of
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import CrossAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from fskv.engines.vllm import connector as module
from fskv.engines.vllm import page_layout
from fskv.engines.vllm.connector import FskvConnector
from fskv.engines.vllm.identity import EngineGroup
from fskv.engines.vllm.manager import FskvHandshake
from fskv.engines.vllm.places import places_of
from fskv.engines.vllm.spec import FskvOffloadingSpec
from fskv.errors import ConfigError, RestError
from fskv.hybrid_planner import GroupKind, GroupSpec

pytestmark = VLLM

REASON = "KV layer l.7: nobody knows"
KEY = make_offload_key(b"k" * 32, 0)


# --- every layer that the installed vLLM has ----------------------------------------------------


def layer_classes():
    """Return all classes below AttentionLayerBase by what vLLM's source says: (module, name)."""
    root = pathlib.Path(vllm.__file__).parent
    classes = {}  # name -> [(module, names of its bases)]
    for path in root.rglob("*.py"):
        source = path.read_text(errors="replace")
        if "class " not in source:
            continue
        module = ".".join(("vllm", *path.relative_to(root).with_suffix("").parts))
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef):
                bases = {ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases}
                classes.setdefault(node.name, []).append((module, bases))
    known = {"AttentionLayerBase"}
    while True:
        found = {name for name, each in classes.items() if any(b & known for _, b in each)} - known
        if not found:
            break
        known |= found
    return sorted(
        (module, name)
        for name in known - {"AttentionLayerBase"}
        for module, bases in classes[name]
        if bases & known
    )


LAYERS = layer_classes()


def layer_of(module, name):
    """Return an instance that was never set up, with a KV cache bound to it; and whether it keeps states."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    try:
        cls = getattr(importlib.import_module(module), name)
    except Exception:  # it needs a GPU, or a package that is not here
        cls = type(name, (AttentionLayerBase,), {})
    is_state = issubclass(cls, MambaBase)
    cls = type(name, (cls,), {})
    cls.__abstractmethods__ = frozenset()
    layer = cls.__new__(cls)
    if isinstance(layer, torch.nn.Module):
        torch.nn.Module.__init__(layer)
    cache = torch.zeros(10, 64, 132, dtype=torch.uint8)
    layer.kv_cache = (cache,) if is_state else cache
    return layer, is_state


@pytest.mark.parametrize("on_cpu", [True, False])
def test_no_layer_of_vllm_makes_a_start_fail(on_cpu, monkeypatch):
    monkeypatch.setattr(page_layout, "current_platform", SimpleNamespace(is_cpu=lambda: on_cpu))
    # It loads a second set of vLLM's operators, which ends the process on a CPU without AVX-512.
    monkeypatch.setitem(sys.modules, "vllm.platforms.rocm", None)
    served, rests = set(), {}
    for where, name in LAYERS:
        layer, is_state = layer_of(where, name)
        config = SimpleNamespace(
            compilation_config=SimpleNamespace(static_forward_context={"l.0": layer}),
            parallel_config=SimpleNamespace(decode_context_parallel_size=1),
            model_config=SimpleNamespace(dtype=torch.bfloat16),
        )
        kind = GroupKind.STATE if is_state else GroupKind.FULL
        group = EngineGroup(GroupSpec(0, kind, 64, None), "kind", (64 * 132,), ("l.0",))
        try:
            places_of(config, [group], 10)
            page_layout.page_layouts(config, [group], 10)
            served.add(name)
        except RestError as error:
            rests[name] = str(error)
    assert {"MambaMixer2", "ShortConv"} <= served, "states are plain tensors"
    assert {"DeepseekV32IndexerCache", "DeepseekV4IndexerCache", "QSAKeyStateCache"} <= rests.keys()
    assert all(said.startswith("KV layer l.0: ") and "\n" not in said for said in rests.values())


# --- the scheduler ------------------------------------------------------------------------------


def tell(monkeypatch, scheduler, *workers):
    """Have a scheduler's side ask these workers, as at the start."""
    monkeypatch.setattr(module, "handshakes_of_workers", lambda: list(workers))
    scheduler.set_xfer_handshake_metadata_pp_aware({})


@pytest.mark.parametrize("resting", [(0,), (1,), (0, 1), ()])
def test_one_rank_that_rests_is_enough_for_all(
    resting, tmp_path, caplog, monkeypatch, make_manager, handshake, scheduler_side
):
    path = tmp_path / "health.json"
    made = make_manager(workers=(), health_file=str(path))
    workers = [handshake(rank, 2, rests=REASON if rank in resting else None) for rank in (0, 1)]
    workers = pickle.loads(pickle.dumps(workers))
    with caplog.at_level(logging.WARNING):
        tell(monkeypatch, scheduler_side(made), *workers)
    request = ReqContext("r")
    said = [r.getMessage() for r in caplog.records if "event=kv_unknown" in r.getMessage()]
    if not resting:  # the control
        assert said == []
        assert made.prepare_store([KEY], request).keys_to_store == [KEY]
        return
    assert made.lookup(KEY, request) is LookupResult.MISS
    assert made.prepare_store([KEY], request).keys_to_store == []
    (line,) = said
    assert REASON in line
    assert "neither loads nor stores" in line
    gauges = made.get_stats().data["data"]
    assert [*gauges["vllm:fskv_off"].values()] == [1.0]
    wait_for(lambda: path.exists() and json.loads(path.read_text())["state"] == "stopped")
    told = json.loads(path.read_text())
    assert told["conditions"] == ["kv_unknown"]
    assert REASON in told["why"][0]


def test_a_child_of_another_root_that_rests_turns_this_one_not_off(
    monkeypatch, make_manager, handshake, scheduler_side
):
    """The control is above: of this root it does."""
    made = make_manager(workers=())
    own = [handshake(rank, 2) for rank in (0, 1)]
    others = [FskvHandshake.resting(rank, 2, "/elsewhere", REASON) for rank in (0, 1)]
    tell(monkeypatch, scheduler_side(made), *others, *own)
    assert not made.chunks.stopped


# --- a worker -----------------------------------------------------------------------------------


class Worker:
    """FskvConnector on a worker, without vLLM's set-up."""

    def __init__(self, get_worker):
        self.connector = FskvConnector.__new__(FskvConnector)
        self.connector._role = KVConnectorRole.WORKER
        spec = FskvOffloadingSpec.__new__(FskvOffloadingSpec)
        spec.worker, spec.has_begun = None, False
        parallel = SimpleNamespace(rank=1, world_size=2)
        self.connector._setup = SimpleNamespace(
            config=SimpleNamespace(root="/nowhere"),
            vllm_config=SimpleNamespace(parallel_config=parallel),
        )
        self.connector.connector_scheduler = None
        spec.get_worker = get_worker
        cache = kv.Cache("full", "LBHNC")
        half = object.__new__(kv.offloading.OffloadingConnectorWorker)
        half.spec, half.worker, half._unsubmitted_store_jobs = spec, None, []
        half.vllm_config, half.kv_cache_config = cache.vllm_config, cache.config
        self.half, self.spec, self.cache = half, spec, cache
        self.connector.connector_worker = half

    def register(self, monkeypatch):
        monkeypatch.setattr(kv.offloading, "derive_canonical_mappings", lambda *_: {})
        self.connector.register_kv_caches(self.cache.allocated)


def fail(error):
    def get_worker(kv_caches):
        raise error

    return get_worker


def test_a_worker_that_does_not_know_its_kv_says_so_and_has_nothing_to_do(monkeypatch):
    worker = Worker(fail(RestError(REASON)))
    worker.register(monkeypatch)
    told = worker.connector.handshake
    assert (told.rank, told.world_size, told.rests) == (1, 2, REASON)
    nothing = OffloadingConnectorMetadata({}, {}, set())
    for _step in range(2):
        worker.connector.bind_connector_metadata(nothing)
        worker.connector.handle_preemptions(nothing)
        worker.connector.start_load_kv(None)
        worker.connector.wait_for_save()
        assert worker.connector.get_transfer_results(set()).finished_recving == set()
        assert worker.connector.build_connector_worker_meta() is None
    worker.connector.drop_jobs()
    worker.connector.unregister_kv_caches()
    assert worker.connector.get_kv_connector_stats() is None
    worker.connector.shutdown()


def test_a_vllm_that_does_not_tell_where_its_kv_is_has_the_worker_rest(monkeypatch):
    worker = Worker(fail(AssertionError("never reached")))
    worker.cache.allocated["l.0"] = worker.cache.allocated["l.0"][1:]  # vLLM asserts whole blocks
    worker.register(monkeypatch)
    assert (
        "vLLM does not tell where its KV lies (AssertionError" in worker.connector.handshake.rests
    )


@pytest.mark.parametrize("error", [ConfigError("option 'root'"), ZeroDivisionError("a bug")])
def test_negative_control_settings_and_bugs_of_fskv_stop_the_start(error, monkeypatch):
    def get_worker(kv_caches):
        worker.spec.has_begun = True
        raise error

    worker = Worker(get_worker)
    with pytest.raises(type(error)):
        worker.register(monkeypatch)


# --- kinds of KV that vLLM's own offloading does not know either --------------------------------


def whole_config(tmp_path, **options):
    (tmp_path / "kv").mkdir()
    transfer = lab.connector(str(tmp_path / "kv"), maintenance="off")
    made = config_of(Line({"kv_transfer_config": transfer}))
    made.kv_transfer_config.kv_connector_extra_config |= options
    return made


def of_unknown_kind():
    spec = CrossAttentionSpec(block_size=16, num_kv_heads=1, head_size=32, dtype=torch.float32)
    return KVCacheConfig(1, [], [KVCacheGroupSpec(["l.0"], spec)])


def scheduled(request):
    """A step of vLLM's in which a request begins, with blocks of a group that fskv does not know."""
    made = step(None)
    made.scheduled_new_reqs = [SimpleNamespace(req_id=request.request_id, block_ids=([1, 2],))]
    made.num_scheduled_tokens = {request.request_id: 100}
    made.total_num_scheduled_tokens = 100
    made.scheduled_spec_decode_tokens = {}
    return made


def test_a_model_with_kv_of_an_unknown_kind_starts(tmp_path, monkeypatch):
    path = tmp_path / "health.json"
    config = whole_config(tmp_path, health_file=str(path))
    scheduler = FskvConnector(config, KVConnectorRole.SCHEDULER, of_unknown_kind())
    worker = FskvConnector(config, KVConnectorRole.WORKER, of_unknown_kind())
    told = worker.handshake
    assert "kind CrossAttentionSpec: fskv does not know how its KV is covered" in told.rests
    tell(monkeypatch, scheduler, told)
    request = Request("r", [1] * 100, SamplingParams(), None)
    scheduler.on_new_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    scheduler.update_state_after_alloc(request, None, 0)
    planned = scheduler.build_connector_meta(scheduled(request))
    assert not planned.load_jobs
    assert not planned.store_jobs
    worker.bind_connector_metadata(planned)
    worker.start_load_kv(None)
    worker.wait_for_save()
    assert worker.get_transfer_results(set()).failed_recving == set()
    assert worker.build_connector_worker_meta() is None
    scheduler.update_connector_output(KVConnectorOutput())
    assert scheduler.reset_cache()
    assert scheduler.request_finished_all_groups(request, ()) == (False, None)
    assert [*scheduler.get_kv_connector_stats().data["data"]["vllm:fskv_off"].values()] == [1.0]
    wait_for(lambda: path.exists() and json.loads(path.read_text())["state"] == "stopped")
    scheduler.shutdown()
    worker.shutdown()


def test_negative_control_an_option_that_is_wrong_is_refused_there_too(tmp_path):
    config = whole_config(tmp_path, nonsense=1)
    with pytest.raises(ConfigError, match="option 'nonsense'"):
        FskvConnector(config, KVConnectorRole.SCHEDULER, of_unknown_kind())
