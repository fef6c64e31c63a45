"""Keys computed without vLLM are vLLM's: compared with its own functions."""

from __future__ import annotations

import os
import random
import sys

import pytest
from fskv_tools import block_hashes
from world import make_identity

TOKENS = random.Random(7).sample(range(200_000), 100)

CASES = {
    "default": {},
    "seed": {"seed": "42"},
    "salt": {"cache_salt": "tenant-7"},
    "both": {"cache_salt": "s", "seed": ""},
}


def identity_of(algorithm, seed=None):
    return make_identity(
        engine_version="0.32",
        tokens_per_hash=16,
        hash_algorithm=algorithm,
        hash_seed="default" if seed is None else f"PYTHONHASHSEED={seed}",
    )


def ours(algorithm, *, seed=None, tokens=TOKENS, **extra):
    return list(block_hashes.block_hashes(identity_of(algorithm, seed), tokens, **extra))


def theirs(algorithm, *, seed=None, tokens=TOKENS, cache_salt=None):
    """Hash as vLLM's request does, with vLLM's own functions for all of it."""
    from types import SimpleNamespace
    from unittest import mock

    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    request = SimpleNamespace(
        block_hashes=[],
        num_tokens=len(tokens),
        all_token_ids=list(tokens),
        mm_features=[],
        prompt_embeds=None,
        cache_salt=cache_salt,
        lora_request=None,
    )
    environment = dict(os.environ)
    environment.pop("PYTHONHASHSEED", None)
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    with mock.patch.dict(os.environ, environment, clear=True):
        function = get_hash_fn_by_name(algorithm)
        kv_cache_utils.init_none_hash(function)
        return kv_cache_utils.get_request_block_hasher(16, function)(request)


def cases():
    return [
        (algorithm, name)
        for algorithm in ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
        for name, case in CASES.items()
        if "seed" in case or algorithm.startswith("sha256")
    ]


@pytest.mark.parametrize(("algorithm", "name"), cases())
def test_keys_are_those_of_the_installed_vllm(algorithm, name):
    pytest.importorskip("vllm.v1.core.kv_cache_utils")
    if algorithm.endswith("cbor"):
        pytest.importorskip("cbor2")
    assert len(ours(algorithm, **CASES[name])) == 6
    assert ours(algorithm, **CASES[name]) == theirs(algorithm, **CASES[name])
    changed = [*TOKENS[:50], TOKENS[50] + 1, *TOKENS[51:]]  # in the fourth block
    found = ours(algorithm, tokens=changed, **CASES[name])
    assert found[:3] == theirs(algorithm, **CASES[name])[:3]
    assert found[3] != theirs(algorithm, **CASES[name])[3]


def test_only_whole_blocks_have_a_key():
    assert ours("sha256", tokens=TOKENS[:15]) == []
    assert len(ours("sha256", tokens=TOKENS[:16])) == 1
    assert ours("sha256", tokens=TOKENS[:31]) == ours("sha256", tokens=TOKENS[:16])
    assert ours("sha256", tokens=[]) == []


def test_without_the_package_of_cbor_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "cbor2", None)
    assert ours("sha256")
    with pytest.raises(block_hashes.UsageError, match="need the package cbor2"):
        ours("sha256_cbor")
