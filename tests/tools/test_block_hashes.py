"""Keys computed without vLLM are vLLM's: compared with its own functions, and with vectors that it gave."""

from __future__ import annotations

import json
import os
import random
import sys

import pytest
from world import make_identity

block_hashes = pytest.importorskip("fskv_tools.block_hashes")

TOKENS = random.Random(7).sample(range(200_000), 100)

# What vLLM 0.32 gave for TOKENS in blocks of 16: the hash of the sixth block. `python
# tests/tools/test_block_hashes.py` prints them, in an environment with vLLM.
CASES = {
    "default": {},
    "seed": {"seed": "42"},
    "salt": {"cache_salt": "tenant-7"},
    "both": {"cache_salt": "s", "seed": ""},
}
GOLDEN = {
    "sha256/default": "1c147001248d5eacfb852253aa0c7cca7af5f9a491de0ef4492bebaf6bc79e7a",
    "sha256/seed": "596ae1d5976a9193400bbe4fc3c100ef252d21b51f030d0e2cbf3232796b5609",
    "sha256/salt": "003682b9ca1289d7628b78eaf73af3bbfd2362f5ee8f2e56c584bfc20d8e0114",
    "sha256/both": "6f9517bd0a215918257f44c6cc9cfbf9dc37fac9e3eb8b38865a8d9a0ebba067",
    "sha256_cbor/default": "cdab989eb58d5aff14faeddafb07511d9a3574910fff96a9d169ccac6b9a92aa",
    "sha256_cbor/seed": "570023e04bd01e535829a773b7629b5ddba3bc79a721da3d745df9de6daacca0",
    "sha256_cbor/salt": "c410f5761c29f98e41557442c488bdc631e9599afb9c658be9d7e750fb5bbaea",
    "sha256_cbor/both": "2636a3b2bbc6161fcaa8b43a8c560e29cf6ded88d844f957fddd8be68cf63150",
    "xxhash/seed": "f60985ea94b15a1e4f158c5137f91fb8",
    "xxhash/both": "183fe41c0bb4b97e22854284bc20ecdc",
    "xxhash_cbor/seed": "57bec99e38c42d9f8f533ec7113a62c3",
    "xxhash_cbor/both": "01a07331708bf62067155a187e3fe4ca",
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


def golden_cases():
    return [
        (algorithm, name)
        for algorithm in ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")
        for name, case in CASES.items()
        if "seed" in case or algorithm.startswith("sha256")
    ]


@pytest.mark.parametrize(("algorithm", "name"), golden_cases())
def test_keys_are_those_that_vllm_gave(algorithm, name):
    if algorithm.endswith("cbor"):
        pytest.importorskip("cbor2")
    found = ours(algorithm, **CASES[name])
    assert len(found) == 6
    assert found[-1].hex() == GOLDEN[f"{algorithm}/{name}"]
    others = [value for key, value in GOLDEN.items() if key != f"{algorithm}/{name}"]
    assert found[-1].hex() not in others


@pytest.mark.parametrize(("algorithm", "name"), golden_cases())
def test_keys_are_those_of_the_installed_vllm(algorithm, name):
    pytest.importorskip("vllm.v1.core.kv_cache_utils")
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


if __name__ == "__main__":
    print(
        json.dumps(
            {f"{a}/{n}": theirs(a, **CASES[n])[-1].hex() for a, n in golden_cases()}, indent=4
        )
    )
