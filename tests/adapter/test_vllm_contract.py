"""What FskvConnector relies on in vLLM, held against the installed version's own base classes.

Set FSKV_VLLM_PATH to a directory with another vLLM (pip install --no-deps --target DIR vllm==0.33.0) to run
the same checks against that one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import pickle
import subprocess
import sys
from types import SimpleNamespace

import engine_lab
import pytest
import world
from key_files import write_keys

from fskv.offload.mover import News

pytest.importorskip("vllm", reason="the contract tests need the vllm environment: make test")

from vllm.config import KVTransferConfig, MultiModalConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import common, scheduler, worker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.sched.output import KVConnectorBlockState, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingKVEventsConfig,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    ReqContext,
    make_offload_key,
)

from fskv.data_path.job import JobResult
from fskv.engines.vllm import plugin, quirks, version
from fskv.engines.vllm.connector import FskvConnector, FskvOffloadingSpec, FskvWorkerMetadata
from fskv.engines.vllm.manager import ChunkKeys, FskvHandshake, FskvManager, to_chunk
from fskv.engines.vllm.metrics import metric_definitions, to_stats
from fskv.engines.vllm.worker import FskvWorker
from fskv.engines.vllm_multi.connector import FskvMultiConnector
from fskv.errors import ConfigError
from fskv.observe.metrics import ALL_METRICS
from fskv.root.key_file import read_keys
from fskv.root.root import NamespaceDir
from fskv.types import ChunkId, Status

pytestmark = world.VLLM


def _parameters(function) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def _check_overrides(cls: type, base: type) -> list[str]:
    """Return what is wrong with the methods of `cls` that override one of `base`."""
    wrong = []
    for name, function in vars(cls).items():
        inherited = getattr(base, name, None)
        if name.startswith("__") or not inspect.isfunction(function) or inherited is None:
            continue
        ours, theirs = _parameters(function), _parameters(inherited)
        extra = ours[len(theirs) :]
        optional = inspect.signature(function).parameters
        if ours[: len(theirs)] != theirs and "args" not in ours:
            wrong.append(f"{cls.__name__}.{name}{ours}, vLLM has {theirs}")
        if any(optional[p].default is inspect.Parameter.empty for p in extra):
            wrong.append(f"{cls.__name__}.{name} needs {extra}, which vLLM does not pass")
    return wrong


def test_every_override_takes_what_vllm_passes_and_nothing_abstract_is_left():
    wrong = []
    for cls, base in (
        (FskvConnector, OffloadingConnector),
        (FskvOffloadingSpec, OffloadingSpec),
        (FskvManager, OffloadingManager),
        (FskvWorker, OffloadingWorker),
        (FskvWorkerMetadata, common.OffloadingWorkerMetadata),
        (FskvMultiConnector, MultiConnector),
    ):
        assert issubclass(cls, base)
        assert not inspect.isabstract(cls), (cls, cls.__abstractmethods__)
        wrong += _check_overrides(cls, base)
    assert wrong == []


def test_the_signature_check_can_fail():
    class Base:
        def lookup(self, key, context):
            pass

    class Wrong:
        def lookup(self, key, extra, more):
            pass

    assert len(_check_overrides(Wrong, Base)) == 2


def test_the_private_names_we_lean_on_exist():
    source = inspect.getsource(worker.OffloadingConnectorWorker)
    assert "self._load_jobs" in source, "job id -> request id of loads in flight"
    assert "transfer_result.success" in source, "vLLM asserts success: failures go another way"
    assert "self._unsubmitted_store_jobs: list[" in source, (
        "stores that are put off to the next step"
    )
    assert "self._connector_worker_meta.mark_completed(job_id)" in source
    assert "_req_status" in inspect.getsource(scheduler.OffloadingConnectorScheduler)
    assert hasattr(scheduler.OffloadingConnectorScheduler, "_update_req_states"), "sessions"
    assert "is_eagle_group" in scheduler.GroupOffloadConfig._fields, "layers of drafts"
    assert "kv_group_configs" in scheduler.SchedulerOffloadConfig._fields
    group = scheduler.RequestGroupState()
    assert group.block_ids == []
    assert group.next_stored_chunk_idx == 0
    assert group.num_hit_chunks == 0
    assert isinstance(KVConnectorFactory._registry, dict)
    assert "self._events_tracker = " in inspect.getsource(scheduler.OffloadingConnectorScheduler)
    tracker = scheduler.OffloadingEventsTracker(OffloadingKVEventsConfig(True, True))
    assert tracker._pending_event_metadata == {}


def test_what_the_use_of_a_prefix_leans_on_exists():
    made = {each.name: each for each in dataclasses.fields(common.OffloadingConnectorMetadata)}
    assert all(each.init for each in made.values()), "FskvConnectorMetadata is made of them"
    assert "touches" not in made
    assert callable(ReqContext("r").get_offload_key_position)
    source = inspect.getsource(scheduler.RequestOffloadState)
    assert "num_locally_computed_tokens" in source
    state = scheduler.RequestGroupState()
    assert state.offload_keys == [], "the very list that vLLM extends"
    extended = inspect.getsource(scheduler.RequestOffloadState.update_offload_keys)
    assert "offload_keys.append(" in extended or "offload_keys.extend(" in extended


def test_what_the_load_budget_leans_on_exists():
    lookup = scheduler.OffloadingConnectorScheduler.get_num_new_matched_tokens
    assert "max_num_new_tokens" in inspect.signature(lookup).parameters
    fields = scheduler.RequestOffloadState.__dataclass_fields__
    assert {"req", "num_locally_computed_tokens", "transfer_jobs"} <= set(fields)
    assert {"finished_req_ids", "num_scheduled_tokens", "scheduled_spec_decode_tokens"} <= set(
        SchedulerOutput.__dataclass_fields__
    )
    # A step is over when the scheduler has its output, and then it asks for statistics once.
    source = inspect.getsource(Scheduler.update_from_output)
    assert source.count("self.connector.get_kv_connector_stats()") == 1


def test_a_connector_is_told_of_each_request_and_of_each_that_gets_blocks():
    assert "self.connector.on_new_request(request)" in inspect.getsource(Scheduler.add_request)
    # Before the step ends.
    source = inspect.getsource(Scheduler.schedule)
    asked, told = "connector.get_num_new_matched_tokens(", "connector.update_state_after_alloc("
    assert source.index(asked) < source.index(told) < source.index("_build_kv_connector_meta(")
    assert source.count(told) == source.count("self.kv_cache_manager.get_blocks(request_id),") == 1


def test_a_reset_comes_from_the_object_that_has_the_executor_and_stale_jobs_may_be_told():
    from vllm.v1.engine.core import EngineCore

    assert "self.model_executor = " in inspect.getsource(EngineCore.__init__)
    assert "self.scheduler.reset_prefix_cache(" in inspect.getsource(EngineCore.reset_prefix_cache)
    half = scheduler.OffloadingConnectorScheduler
    source = inspect.getsource(half)  # in 0.33 both are in functions that are called under a lock
    assert source.count("self._stale_job_threshold = self._job_counter") == 1
    assert "if job_id < self._stale_job_threshold:" in source


def test_the_scheduler_reads_the_failure_policy_after_it_built_its_connector():
    source = inspect.getsource(Scheduler.__init__)
    assert 0 < source.index("create_connector(") < source.index("kv_load_failure_policy")


def test_failed_receives_reach_the_scheduler_and_make_it_recompute():
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

    assert KVConnectorTransferResults().failed_recving == set()
    source = inspect.getsource(Scheduler._handle_failed_recving)
    assert "request.num_computed_tokens = 0" in source


def test_metadata_and_load_specs_survive_pickling_and_merge_over_ranks():
    a, b, c = (ChunkId(bytes([n]) * 32, 0) for n in range(3))
    good = JobResult(7, True, False, 100, 1.0)
    late = JobResult(7, True, True, 50, 2.0, late=True)
    first = FskvWorkerMetadata(
        completed_jobs={1: 1},
        news=News(stored={a: {0}}, failed_loads={b: Status.STALE}, unhealthy={0: {"x": "0"}}),
        loads={7: [good]},
    )
    second = FskvWorkerMetadata(
        completed_jobs={1: 1},
        news=News(stored={a: {1}}, not_stored={c}, unhealthy={1: {}}),
        loads={7: [late], 8: [good]},
    )
    merged = pickle.loads(pickle.dumps(first)).aggregate(pickle.loads(pickle.dumps(second)))
    assert merged.completed_jobs == {1: 2}
    unhealthy = {0: {"x": "0"}, 1: {}}
    assert merged.news == News({a: {0, 1}}, {c}, {b: Status.STALE}, unhealthy=unhealthy)
    assert merged.loads == {7: [good, late], 8: [good]}
    assert pickle.loads(pickle.dumps(ChunkKeys([a], 0.5))).allowed_s == 0.5
    assert pickle.loads(pickle.dumps(ChunkKeys([a, b]))).chunks == [a, b]
    handshake = FskvHandshake(0, 1, 1, NamespaceDir("/x", b"d", 0o700, 0o600), {0: 4096})
    assert pickle.loads(pickle.dumps(handshake)) == handshake


def test_every_metric_fskv_emits_is_declared_to_vllm():
    definitions = metric_definitions()
    sums = {(m, "x"): 1.0 for m in ALL_METRICS if m.kind == "counter"}
    gauges = {(m, "x") if m.label else m: 1.0 for m in ALL_METRICS if m.kind == "gauge"}
    observed = {m: [0.1, 2.0] for m in ALL_METRICS if m.kind == "histogram"}
    stats = to_stats(sums, gauges, observed)
    assert stats is not None
    emitted = stats.data["data"]
    assert set(emitted) == set(definitions)
    for name, values in emitted.items():
        (labels,) = values
        assert len(labels) == len(definitions[name].labelnames), name
    assert to_stats({}, {}) is None


def _key(number: int):
    return make_offload_key(bytes([number]) * 32, 0)


def test_where_vllm_puts_its_own_connector_in_the_place_of_another_is_as_the_plug_in_knows_it():
    """Else `--kv-offloading-size` would not be refused."""
    of_vllm = VllmConfig._post_init_kv_transfer_config
    assert list(inspect.signature(of_vllm).parameters) == ["self"]
    own = getattr(of_vllm, "__wrapped__", of_vllm)
    assert "kv_offloading_size" in inspect.getsource(own)
    called = inspect.getsource(VllmConfig.__post_init__)
    assert "self._post_init_kv_transfer_config()" in called
    plugin.register()
    assert hasattr(VllmConfig._post_init_kv_transfer_config, "by_fskv")


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize(
    ("connector", "extra", "alone"),
    [
        ("FskvConnector", {}, True),
        ("OffloadingConnector", {"secondary_tiers": [{"type": "FskvTier"}]}, True),
        ("OffloadingConnector", {"secondary_tiers": [{"type": "FskvTier"}, {"type": "fs"}]}, False),
        ("MultiConnector", {"connectors": []}, False),
    ],
)
def test_embeddings_without_a_tensor_are_taken_only_where_another_engine_brings_their_kv(
    connector, extra, alone, written
):
    """The control: beside what brings KV from elsewhere vLLM's own answer stays."""
    plugin.register()
    called = inspect.getsource(VllmConfig.__post_init__)
    assert "self._resolve_mm_embedding_inputs()" in called
    media = MultiModalConfig(enable_mm_embeds=written)
    transfer = KVTransferConfig(
        kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=extra
    )
    config = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=media),
        ec_transfer_config=None,
        kv_transfer_config=transfer,
    )
    VllmConfig._resolve_mm_embedding_inputs(config)
    assert media.allow_missing_mm_embeddings is not alone
    assert media.enable_mm_embeds is (written if alone else True)


def test_ranks_that_derive_different_namespaces_are_refused_at_start(make_manager, handshake):
    first, second = handshake(0, 2), handshake(1, 2)
    manager = make_manager(workers=[first, second])
    other = dataclasses.replace(second.directory, digest=b"e")
    for wrong in (
        [first, dataclasses.replace(second, directory=other)],
        [first, dataclasses.replace(second, blocks_per_chunk=3)],
        [first],
        [],
    ):
        with pytest.raises(ConfigError):
            manager.set_workers(wrong)


def test_a_request_is_looked_up_and_stored_no_further_than_its_limit(make_manager):
    manager = make_manager(2)
    adapted, plain = ReqContext("adapted"), ReqContext("plain")
    manager.limit_request("adapted")
    assert manager.lookup(_key(1), adapted) is LookupResult.MISS
    assert manager.prepare_store([_key(1)], adapted).keys_to_store == []
    assert manager.lookup(_key(1), plain) is LookupResult.RETRY
    assert manager.prepare_store([_key(1)], plain).keys_to_store == [_key(1)]
    manager.on_request_finished(adapted)
    assert manager.lookup(_key(2), adapted) is LookupResult.RETRY, "the name may come again"
    seen = ReqContext("seen")  # with an image from its 20th token on
    for number, end in ((3, 16), (4, 32)):
        seen.set_offload_key_position(_key(number), end)
    manager.limit_request("seen", 20)
    assert manager.lookup(_key(3), seen) is LookupResult.RETRY
    assert manager.lookup(_key(4), seen) is LookupResult.MISS
    assert manager.prepare_store([_key(3), _key(4)], seen).keys_to_store == [_key(3)]


def test_a_chunk_whose_load_failed_is_a_miss_at_once(make_manager):
    manager = make_manager(2)
    for number, status in enumerate((Status.CORRUPT, Status.MISSING, Status.TIMED_OUT), 1):
        for chunk in (_key(number), _key(10 + number)):
            manager.on_news(News(stored={to_chunk(chunk): {0, 1}}))
            assert manager.lookup(chunk, ReqContext("r")) is LookupResult.HIT
        manager.on_news(News(failed_loads={to_chunk(_key(number)): status}))
        assert manager.lookup(_key(number), ReqContext("r")) is LookupResult.MISS, status
        assert manager.prepare_store([_key(number)], ReqContext("r")).keys_to_store, status
        assert manager.lookup(_key(10 + number), ReqContext("r")) is LookupResult.HIT


@pytest.mark.parametrize(
    ("tiers", "local", "loads"),
    [
        (None, None, True),
        ([], None, False),
        ([{"medium": "CPU"}], None, False),
        ([{"medium": "storage"}], None, True),
        ([{"medium": "CPU"}, {"medium": "STORAGE"}], None, True),
        ([{"locality": "LOCAL"}], True, True),
        ([{"locality": "LOCAL"}], False, False),
        ([{"medium": "STORAGE", "locality": "REMOTE"}], False, True),
        ([{"locality": "REMOTE"}], None, True),
        ("nonsense", None, True),
        ([1, {"medium": 3}], None, True),
    ],
)
def test_a_request_loads_from_the_tiers_that_it_names(tiers, local, loads, make_manager, handshake):
    manager = make_manager(workers=[handshake(rank, 2, is_local=local) for rank in (0, 1)])
    params = {} if tiers is None else {"kv_load_tiers": tiers}
    asks = SimpleNamespace(request_id="r", kv_transfer_params=params, kv_hints=None)
    found = manager.lookup(_key(1), scheduler._create_req_context(asks))
    assert found is (LookupResult.RETRY if loads else LookupResult.MISS)
    # Which tiers a request loads from says nothing of what is stored.
    assert manager.prepare_store([_key(1)], scheduler._create_req_context(asks)).keys_to_store


def test_what_a_client_sends_ends_no_connector_and_caps_hold_inside_a_block(monkeypatch):
    begun, built = [], []
    # As vLLM 0.32 does: `params.get`.
    half = object.__new__(scheduler.OffloadingConnectorScheduler)
    begin = lambda self, request: begun.append((request.kv_transfer_params or {}).get("x"))
    build = lambda self, output: built.append(output.kv_connector_block_state)
    monkeypatch.setattr(type(half), "on_new_request", begin)
    monkeypatch.setattr(type(half), "_build_partial_tail_store_jobs", build)
    with pytest.raises(AttributeError):  # the control: vLLM's own
        half.on_new_request(SimpleNamespace(kv_transfer_params="text"))
    quirks.mend_vllm()
    quirks.mend_vllm()  # once
    for params in (None, {}, {"x": 1}, "text", [1], 7, True):
        half.on_new_request(SimpleNamespace(kv_transfer_params=params))
    assert begun == [None, None, 1, None, None, None, None]
    caps = {"none": None, "zero": 0, "below": 100, "at": 128}
    half._req_status = {n: SimpleNamespace(max_offload_tokens=cap) for n, cap in caps.items()}
    offers = {name: [(0, 5, 64), (2, 7, 128)] for name in [*caps, "unknown"]}
    state = KVConnectorBlockState(set(offers), lambda _: (), offers)
    step = SimpleNamespace(kv_connector_block_state=state)
    half._build_partial_tail_store_jobs(step)
    half._build_partial_tail_store_jobs(SimpleNamespace(kv_connector_block_state=None))
    taken, nothing = built
    whole = [(0, 5, 64), (2, 7, 128)]
    assert taken.boundary_state_offloads == offers | {"zero": [], "below": whole[:1]}
    assert nothing is None
    assert step.kv_connector_block_state is state, "the engine's own stays as it is"
    assert state.boundary_state_offloads["zero"] == whole


def test_the_key_of_a_block_has_the_path_of_an_adapter():
    """Option 'trust' with "lora" believes that a path is one adapter, and not that a name is."""
    from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

    adapter = SimpleNamespace(lora_name="name", lora_path="/path/of/it")
    request = SimpleNamespace(
        mm_features=[], lora_request=adapter, cache_salt=None, prompt_embeds=None
    )
    keys, _ = generate_block_hash_extra_keys(request, 0, 16, 0)
    assert "/path/of/it" in str(keys)


# Asks for what vLLM would, and prints the refusal.
_WAY_IN = """
from fskv.errors import ConfigError
try:
    from fskv.engines.vllm import plugin
    if NAME == "FskvTier":
        import fskv.engines.vllm_tier
    else:
        plugin._load(NAME)
    print("TAKEN")
except ConfigError as error:
    print("REFUSED", error)
"""
_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
_LACKING = {
    "FskvConnector": f"{_V1}.offloading.scheduler.OffloadingConnectorScheduler",
    "FskvMultiConnector": f"{_V1}.multi_connector.MultiKVConnectorStats",
    "FskvTier": "vllm.v1.kv_offload.tiering.base.SecondaryTierManager",
}


@pytest.mark.parametrize(
    ("name", "fault"), [*((name, "a name") for name in _LACKING), ("FskvConnector", "a module")]
)
def test_a_vllm_without_what_fskv_imports_is_refused_in_one_sentence(name, fault, tmp_path):
    """In a process of its own: vLLM's module without a name, as another version has it.

    The control is every engine that starts.
    """
    where, _, part = _LACKING[name].rpartition(".")
    lacking = {
        "a name": f"import importlib\ndel importlib.import_module({where!r}).{part}\n",
        "a module": f"import sys\nsys.modules[{where!r}] = None\n",
    }
    program = tmp_path / "way_in.py"
    program.write_text(f"NAME = {name!r}\n{lacking[fault]}{_WAY_IN}")
    said = engine_lab.run_program(str(program))
    (line,) = [line for line in said.splitlines() if line.startswith("REFUSED")]
    assert line.startswith("REFUSED found vLLM ")
    assert len(line) < 350


def test_a_vllm_whose_modules_raise_anything_is_refused_in_one_sentence():
    with (
        pytest.raises(ConfigError, match=r"^found vLLM .*torchvision::nms") as found,
        version.refusing(),
    ):
        raise RuntimeError("operator torchvision::nms does not exist\nand more lines")
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("found", "is_refused"),
    [
        *(
            (release, True)
            for release in ("0.31.0", "0.31.4.post1", "0.30.0+cpu", "0.9.2", "0.31.0rc1")
        ),
        *((release, False) for release in ("0.32.0", "0.33.1+cu129", "0.100.0", "1.0.0")),
        # Builds from source: what they have is what counts.
        *((build, False) for build in ("0.31.1.dev7+gabcdef0", "0.1.dev1+g0000001", "dev", "")),
    ],
)
def test_releases_before_the_oldest_are_refused_though_they_have_it_all(found, is_refused):
    if not is_refused:
        version.check(found)
        return
    with pytest.raises(ConfigError, match=r"^found vLLM .*does not support older releases$"):
        version.check(found)


_ASK = """
from fskv.engines.vllm.plugin import register
register()
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
print(KVConnectorFactory.get_connector_class_by_name("FskvConnector"))
"""


@pytest.mark.skipif("FSKV_VLLM_OLD" not in os.environ, reason="FSKV_VLLM_OLD names no old vLLM")
def test_an_old_vllm_s_own_factory_is_told_in_one_sentence_why_not():
    path = os.environ["FSKV_VLLM_OLD"]
    env = {**os.environ, "PYTHONPATH": path + os.pathsep + os.environ.get("PYTHONPATH", "")}
    done = subprocess.run(
        [sys.executable, "-c", _ASK], env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("fskv.errors.ConfigError: found vLLM "), done.stderr[-2000:]
    assert "fskv does not support older releases" in last


@pytest.mark.skipif("FSKV_VLLM_PATH" not in os.environ, reason="FSKV_VLLM_PATH names no other vLLM")
def test_the_same_checks_hold_for_the_vllm_at_fskv_vllm_path():
    env = dict(os.environ)
    path = env.pop("FSKV_VLLM_PATH")
    env["PYTHONPATH"] = path + os.pathsep + env.get("PYTHONPATH", "")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]


def test_a_scheduler_with_another_key_of_names_than_its_workers_is_refused(
    make_manager, handshake, tmp_path
):
    """Its names would be in nobody else's namespace."""
    keys = write_keys(tmp_path / "keys", "one")
    worker = handshake()
    for encryption, refusal in (
        (read_keys(keys).encryption, None),
        (
            read_keys(write_keys(tmp_path / "other", "one", names="other")).encryption,
            "key of names",
        ),
        (None, "key of names"),
    ):
        told = dataclasses.replace(
            worker, directory=dataclasses.replace(worker.directory, encryption=encryption)
        )
        refused = pytest.raises(ConfigError, match=refusal) if refusal else contextlib.nullcontext()
        with refused:
            make_manager(key_file=keys, workers=[told])
