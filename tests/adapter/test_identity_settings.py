"""What an engine is started with reaches the identity: settings that change KV or its keys never share.

The configuration is vLLM's own, made of an engine's arguments; no engine is started.
"""

from __future__ import annotations

import pathlib
import shutil

import engine_lab as lab
import pytest
import world

pytest.importorskip(
    "vllm", reason="the identity of an engine needs the vllm environment: make test"
)
pytestmark = world.VLLM

ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 12345.0}}


@pytest.fixture(autouse=True)
def no_seed(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)


def identity(*, engine=None, options=None, blocks_per_chunk=4):
    """Return the identity without any KV group, which tests of real layers cover."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    from fskv.config import StoreConfig
    from fskv.engines.vllm.identity import build_identity

    if not current_platform.is_cpu():
        pytest.skip("vLLM's platform is not a CPU")
    arguments = {
        "model": lab.checkpoint("llama"),
        "dtype": "float32",
        "block_size": 32,
        "max_model_len": 1024,
        "skip_tokenizer_init": True,
        **(engine or {}),
    }
    config = EngineArgs(**arguments).create_engine_config()
    store = StoreConfig.from_mapping({"root": "/kv", **(options or {})})
    return build_identity(config, store, [], [], blocks_per_chunk, 32, {})


# What is changed -> the fields of the identity that it changes, and no other.
CHANGES = {
    "dtype": ({"engine": {"dtype": "bfloat16"}}, {"model_dtype", "kv_cache_dtype"}),
    "kv cache dtype": ({"engine": {"kv_cache_dtype": "fp8_e5m2"}}, {"kv_cache_dtype"}),
    "hash algorithm": (
        {"engine": {"prefix_caching_hash_algo": "sha256_cbor"}},
        {"hash_algorithm"},
    ),
    "rope": ({"engine": {"hf_overrides": ROPE}}, {"model_config"}),
    "tenant": ({"options": {"tenant": "somebody else"}}, {"tenant"}),
    "weights id": ({"options": {"weights_id": "another name"}}, {"weights"}),
    "chunk size": ({"blocks_per_chunk": 8}, {"blocks_per_chunk"}),
}


def changed(one, other):
    from fskv import namespace

    return {difference.path.split(".")[0] for difference in namespace.diff(one, other)}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_setting_changes_its_fields_and_so_the_digest(name):
    changes, fields = CHANGES[name]
    before, after = identity(), identity(**changes)
    assert changed(before, after) == fields
    assert before.digest != after.digest


def test_the_seed_of_block_hashes_is_the_environment_s(monkeypatch):
    seen = [identity()]
    for seed in ("7", "0", "8"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        seen.append(identity())
        assert changed(seen[0], seen[-1]) == {"hash_seed"}
    assert len({one.digest for one in seen}) == len(seen)


def test_other_bytes_of_the_weights_under_the_same_name_are_another_identity(tmp_path):
    before = identity()
    copy = tmp_path / "other" / pathlib.Path(lab.checkpoint("llama")).name
    shutil.copytree(lab.checkpoint("llama"), copy)
    assert changed(before, identity(engine={"model": str(copy)})) == set()
    weights = next(copy.glob("*.safetensors"))
    world.damage(weights, weights.stat().st_size - 5)
    assert changed(before, identity(engine={"model": str(copy)})) == {"weights"}


def test_equal_settings_are_equal_identities():
    assert identity().digest == identity().digest
