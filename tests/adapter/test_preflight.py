"""What cannot work is refused while vLLM builds its configuration, before anything is loaded."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import get_args

import pytest
from fskv_tools.doctor.configured import FIELDS, ROLES
from fskv_tools.doctor.settings import SETTINGS

from fskv.errors import ConfigError, RootError

pytest.importorskip("vllm", reason="the adapter needs the vllm environment: make test")

from vllm.config import KVTransferConfig, VllmConfig
from vllm.config.kv_transfer import KVConsumer, KVProducer
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key

from fskv.engines.vllm.manager import FskvHandshake, FskvManager
from fskv.engines.vllm.plugin import register
from fskv.kv_transfer.options import store_config
from fskv.root.root import NamespaceDir

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

HERE = {"nnodes": 1, "distributed_executor_backend": "mp", "data_parallel_size": 1}


class Configuration:
    """As vLLM's VllmConfig: asks the factory for the connector while it is made."""

    def __init__(self, connector, extra, parallel=HERE, **settings):
        self.kv_transfer_config = SimpleNamespace(
            kv_connector=connector, kv_connector_extra_config=extra, kv_connector_module_path=None
        )
        self.parallel_config = SimpleNamespace(**parallel)
        self.lora_config = None
        self.cache_config = SimpleNamespace(calculate_kv_scales=False)
        self.load_config = SimpleNamespace(load_format="auto")
        self.model_config = SimpleNamespace(quantization=None)
        self.aux_output_config = SimpleNamespace(enabled=False)
        vars(self).update(settings)
        self.__post_init__()

    def __post_init__(self):
        self.connector = class_of(self.kv_transfer_config)


def class_of(transfer):
    return KVConnectorFactory.get_connector_class(transfer)


@pytest.fixture(autouse=True)
def _registered():
    register()


def multi(*extras):
    connectors = [
        {"kv_connector": "FskvConnector", "kv_connector_extra_config": extra} for extra in extras
    ]
    return {"connectors": connectors}


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize(
    ("extra", "error", "words"),
    [
        ({"root": "relative"}, ConfigError, "'root': found 'relative'"),
        ({"max_bytes": "100G"}, ConfigError, "did you mean 100GiB?"),
        ({"key_file": "/nowhere/keys"}, ConfigError, "'key_file': /nowhere/keys: found No such"),
        ({"root": "/nowhere/at/all"}, RootError, "/nowhere/at/all does not exist"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(
    tmp_path, caplog, several, extra, error, words
):
    extra = {"root": str(tmp_path), **extra}
    how = ("FskvMultiConnector", multi(extra)) if several else ("FskvConnector", extra)
    with pytest.raises(error, match=words.replace("?", r"\?")):
        Configuration(*how)
    assert [r.getMessage().startswith("fskv: option ") for r in caplog.records] == [True]
    config = SimpleNamespace(kv_connector=how[0], kv_connector_module_path=None)
    assert class_of(config).__name__ == how[0], "the control: a caller that builds nothing"


def test_what_can_work_is_taken_and_the_root_is_one(tmp_path):
    found = Configuration("FskvConnector", {"root": str(tmp_path)}).connector
    assert found.__name__ == "FskvConnector"
    assert (tmp_path / "fskv.json").exists()


@pytest.mark.parametrize(
    "parallel",
    [{"nnodes": 2}, {"distributed_executor_backend": "ray"}, {"data_parallel_size_local": 0}],
    ids=str,
)
def test_a_root_that_other_nodes_have_is_not_looked_for_here(parallel):
    """Their options are: a wrong one is wrong everywhere."""
    extra = {"root": "/nowhere/at/all"}
    Configuration("FskvConnector", extra, HERE | parallel)
    with pytest.raises(ConfigError):
        Configuration("FskvConnector", {**extra, "io_threads": 0}, HERE | parallel)
    with pytest.raises(RootError):
        Configuration("FskvConnector", extra)


@pytest.mark.parametrize(
    ("settings", "options", "words"),
    [
        ({"aux_output_config": SimpleNamespace(enabled=True)}, {}, "enable_return_routed_experts"),
        ({"cache_config": SimpleNamespace(calculate_kv_scales=True)}, {}, "calculate_kv_scales"),
        *(
            ({"load_config": SimpleNamespace(load_format=name)}, {}, "load_format")
            for name in ("npcache", "ipc_cache", "modelexpress", "tensorizer", "a plug-in's")
        ),
        (
            {"parallel_config": SimpleNamespace(**HERE, enable_elastic_ep=True)},
            {},
            "enable_elastic_ep",
        ),
        (
            {
                "load_config": SimpleNamespace(load_format="dummy"),
                "model_config": SimpleNamespace(quantization="fp8"),
            },
            {"weights_id": "x"},
            "load_format",
        ),
    ],
)
@pytest.mark.parametrize("several", [False, True])
def test_settings_with_which_fskv_cannot_serve_are_refused_before_weights_are_read(
    tmp_path, settings, options, words, several
):
    extra = {"root": str(tmp_path), **options}
    how = ("FskvMultiConnector", multi(extra)) if several else ("FskvConnector", extra)
    with pytest.raises(ConfigError, match=f"option '{words}': found"):
        Configuration(*how, **settings)
    assert Configuration(*how).connector.__name__ == how[0]  # the control
    for read in ("auto", "safetensors", "sharded_state", "runai_streamer", "dummy"):
        Configuration(*how, load_config=SimpleNamespace(load_format=read))


def test_who_names_the_weights_vouches_for_where_they_come_from(tmp_path):
    made = Configuration(
        "FskvConnector",
        {"root": str(tmp_path), "weights_id": "mine"},
        load_config=SimpleNamespace(load_format="ipc_cache"),
        parallel_config=SimpleNamespace(**HERE, enable_elastic_ep=True),
    )
    assert made.connector.__name__ == "FskvConnector"


TIER = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": [{"type": "FskvTier"}]}


@pytest.mark.parametrize(
    ("connector", "extra", "size", "backend", "becomes"),
    [
        ("FskvConnector", {}, 1.0, "native", None),
        ("FskvConnector", {}, 1.0, "lmcache", None),
        ("FskvMultiConnector", None, 1.0, "native", None),
        ("MultiConnector", None, 1.0, "native", None),
        ("OffloadingConnector", TIER, 1.0, "lmcache", None),
        # The controls.
        ("OffloadingConnector", TIER, 1.0, "native", "OffloadingConnector"),
        ("FskvConnector", {}, None, "native", "FskvConnector"),
        ("NixlConnector", {}, 1.0, "native", "OffloadingConnector"),
    ],
)
def test_a_connector_that_vllm_would_replace_is_refused(
    tmp_path, connector, extra, size, backend, becomes
):
    """vLLM 0.32 does it in silence; the plug-in looks first."""
    if extra is None:
        extra = multi({"root": str(tmp_path)})
    elif "secondary_tiers" in extra:
        extra = {**extra, "secondary_tiers": [{"type": "FskvTier", "root": str(tmp_path)}]}
    else:
        extra = {"root": str(tmp_path)}
    monitored = Configuration("FskvConnector", {"root": str(tmp_path)})
    monitored.kv_transfer_config.kv_connector = connector
    monitored.kv_transfer_config.kv_connector_extra_config = extra
    monitored.cache_config.kv_offloading_size = size
    monitored.cache_config.kv_offloading_backend = backend
    if becomes is None:
        with pytest.raises(ConfigError, match=r"kv_offloading_size.: found 1\.0, expected n"):
            VllmConfig._post_init_kv_transfer_config(monitored)
        assert monitored.kv_transfer_config.kv_connector == connector
    else:
        VllmConfig._post_init_kv_transfer_config(monitored)
        assert monitored.kv_transfer_config.kv_connector == becomes


@pytest.mark.parametrize(
    ("block", "cache", "model", "refused"),
    [
        (32, {"user_specified_block_size": True}, {}, True),
        (32, {}, {}, True),  # CPUs have chosen by then
        (25, {"user_specified_block_size": True}, {}, False),
        (32, {"user_specified_block_size": True}, {"is_hybrid": True}, False),
    ],
)
def test_a_chunk_that_is_not_made_of_whole_blocks_is_refused_where_blocks_are_known(
    tmp_path, block, cache, model, refused
):
    extra = {"root": str(tmp_path), "hybrid_chunk_size": 100}
    cache_config = SimpleNamespace(calculate_kv_scales=False, block_size=block, **cache)
    model_config = SimpleNamespace(quantization=None, **model)
    settings = {"cache_config": cache_config, "model_config": model_config}
    if not refused:
        Configuration("FskvConnector", extra, **settings)
        return
    with pytest.raises(ConfigError, match="found 100 with blocks of 32 tokens"):
        Configuration("FskvConnector", extra, **settings)


def test_a_health_file_whose_directory_is_missing_is_refused_on_its_own_node(tmp_path):
    extra = {"root": str(tmp_path / "kv"), "health_file": str(tmp_path / "run" / "{rank}.json")}
    (tmp_path / "kv").mkdir()
    with pytest.raises(ConfigError, match=f"{tmp_path}/run is none"):
        Configuration("FskvConnector", extra)
    Configuration("FskvConnector", extra, HERE | {"nnodes": 2})
    (tmp_path / "run").mkdir()
    Configuration("FskvConnector", extra)
    Configuration("FskvConnector", {**extra, "health_file": str(tmp_path / "{rank}" / "h.json")})


def test_a_role_says_what_the_connector_does(tmp_path):
    key, request = make_offload_key(bytes(32), 0), ReqContext("r")
    for role in ROLES:
        config = store_config({"root": str(tmp_path), "maintenance": "off"}, role)
        manager = FskvManager(config, 2, loads=role != "kv_producer")
        space = NamespaceDir(f"{tmp_path}/a/b@c", b"d", 7, 6)
        manager.set_workers([FskvHandshake(0, 1, 2, space, {0: 4096})])
        asked = manager.lookup(key, request) is LookupResult.RETRY
        stored = manager.prepare_store([key], request).keys_to_store == [key]
        assert (stored, asked) == (role in get_args(KVProducer), role in get_args(KVConsumer)), role


def test_fields_and_settings_are_those_of_this_vllm():
    fields = {each.name for each in dataclasses.fields(KVTransferConfig)}
    assert fields == FIELDS
    of_vllm = {each.name for each in dataclasses.fields(EngineArgs)}
    # Of the environment, of fskv, of releases before 0.32.
    elsewhere = {"VLLM_PLUGINS", "hybrid_chunk_size", "max_bytes", "calculate_kv_scales"}
    assert set(SETTINGS) - of_vllm - FIELDS == elsewhere
