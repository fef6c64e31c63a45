"""Keys computed without vLLM are vLLM's: compared with its own functions, and with vectors that it gave."""

from __future__ import annotations

import json
import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from world import make_identity

block_hashes = pytest.importorskip("fskv_tools.block_hashes")

TOKENS = random.Random(7).sample(range(200_000), 100)

# What vLLM 0.32 gave for TOKENS in blocks of 16: the hash of the sixth block. `python
# tests/tools/test_block_hashes.py` prints them, in an environment with vLLM.
CASES = {
    "default": {},
    "seed": {"seed": "42"},
    "salt": {"cache_salt": "tenant-7"},
    "lora": {"lora": ("adapter", "/models/adapter")},
    "both": {"cache_salt": "s", "lora": ("a", "/b"), "seed": ""},
}
GOLDEN = {
    "sha256/default": "1c147001248d5eacfb852253aa0c7cca7af5f9a491de0ef4492bebaf6bc79e7a",
    "sha256/seed": "596ae1d5976a9193400bbe4fc3c100ef252d21b51f030d0e2cbf3232796b5609",
    "sha256/salt": "003682b9ca1289d7628b78eaf73af3bbfd2362f5ee8f2e56c584bfc20d8e0114",
    "sha256/lora": "33c3675b3dedb08e7e36bdb38845475764617641e2ee311574763e4fcb53f348",
    "sha256/both": "d87097ce8b473c61af652bb1df0fcfd2aae92809842078b0807e33db37f0f4ed",
    "sha256_cbor/default": "cdab989eb58d5aff14faeddafb07511d9a3574910fff96a9d169ccac6b9a92aa",
    "sha256_cbor/seed": "570023e04bd01e535829a773b7629b5ddba3bc79a721da3d745df9de6daacca0",
    "sha256_cbor/salt": "c410f5761c29f98e41557442c488bdc631e9599afb9c658be9d7e750fb5bbaea",
    "sha256_cbor/lora": "9a8603b1684c8cdeab95db6702a9cc8dc37238c13ab742878dca1c8b103265e8",
    "sha256_cbor/both": "b2b91de22787956b1bd3067f409731ca0ca53e4b2e27eefc081b0e48153df6df",
    "xxhash/seed": "f60985ea94b15a1e4f158c5137f91fb8",
    "xxhash/both": "1acc7a7043fffb830790c0fea4fae090",
    "xxhash_cbor/seed": "57bec99e38c42d9f8f533ec7113a62c3",
    "xxhash_cbor/both": "2ff32cc73349264f4d9d462769ad9027",
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


def theirs(algorithm, *, seed=None, tokens=TOKENS, cache_salt=None, lora=None):
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
        lora_request=lora and SimpleNamespace(lora_name=lora[0], lora_path=lora[1]),
    )
    environment = dict(os.environ)
    environment.pop("PYTHONHASHSEED", None)
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    with mock.patch.dict(os.environ, environment, clear=True):
        function = get_hash_fn_by_name(algorithm)
        kv_cache_utils.init_none_hash(function)
        return kv_cache_utils.get_request_block_hasher(16, function)(request)


def _golden_cases():
    for algorithm in ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor"):
        for name, case in CASES.items():
            if "seed" in case or algorithm.startswith("sha256"):
                yield algorithm, name


def golden_cases():
    return list(_golden_cases())


@pytest.mark.parametrize(("algorithm", "name"), golden_cases())
def test_keys_are_those_that_vllm_gave(algorithm, name):
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


SCALARS = st.none() | st.booleans() | st.integers(-(2**64), 2**64 - 1) | st.binary() | st.text()


@given(st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=40).map(tuple), max_leaves=40))
def test_cbor_is_that_of_the_library(value):
    cbor2 = pytest.importorskip("cbor2")
    assert block_hashes.canonical_cbor(value) == cbor2.dumps(value, canonical=True)


if __name__ == "__main__":
    print(
        json.dumps(
            {f"{a}/{n}": theirs(a, **CASES[n])[-1].hex() for a, n in golden_cases()}, indent=4
        )
    )
