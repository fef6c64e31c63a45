"""The engine's keys of a prompt, computed as vLLM 0.32 does, without vLLM.

vLLM names a block by a hash of (the hash of the block before, the block's tokens, what else decides its
KV): `v1/core/kv_cache_utils.py`, `hash_block_tokens`. The first block's parent is the hash of a seed. Here
is the same for the four algorithms that vLLM has; test_block_hashes.py compares it with vLLM's own
functions, and with vectors that vLLM gave.

Pure. Keys of requests with images, audio, prompt embeddings or an adapter hold more than token ids and a salt
tell: for those no key can be computed here.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import xxhash

from fskv.namespace import Identity

from .exits import UsageError

Hasher: TypeAlias = Callable[[object], bytes]

_DEFAULT_SEED = "vllm-none-hash"  # kv_cache_utils.DEFAULT_NONE_HASH_SEED
_SEED_PREFIX = "PYTHONHASHSEED="  # as the identity writes it


def _pickled(value: object) -> bytes:
    # vLLM says HIGHEST_PROTOCOL, which has been 5 since Python 3.8.
    return pickle.dumps(value, protocol=5)


def _cbor(value: object) -> bytes:
    try:
        import cbor2
    except ImportError:
        raise UsageError(
            "hash_algorithm: these keys need the package cbor2, which comes with vLLM"
        ) from None
    return bytes(cbor2.dumps(value, canonical=True))


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


ALGORITHMS: dict[str, Hasher] = {
    "sha256": lambda value: _sha256(_pickled(value)),
    "sha256_cbor": lambda value: _sha256(_cbor(value)),
    "xxhash": lambda value: xxhash.xxh3_128_digest(_pickled(value)),
    "xxhash_cbor": lambda value: xxhash.xxh3_128_digest(_cbor(value)),
}


def seed_of(identity: Identity) -> str:
    """Return the text from which the chain begins. Raises UsageError where no other process can know it."""
    seed = identity.hash_seed
    if seed.startswith(_SEED_PREFIX):
        return seed.removeprefix(_SEED_PREFIX)
    if seed != "default":
        raise UsageError(f"hash_seed: found {seed!r:.60}, expected default or {_SEED_PREFIX}...")
    if identity.hash_algorithm.startswith("xxhash"):
        raise UsageError(
            f"hash_seed: found default with {identity.hash_algorithm}: vLLM draws a random seed in every "
            "process then, so nobody else can compute the keys; expected sha256, or PYTHONHASHSEED set"
        )
    return _DEFAULT_SEED


def hasher_of(identity: Identity) -> Hasher:
    """Return the hash function of an engine. Raises UsageError where it is not known."""
    if identity.engine != "vllm":
        raise UsageError(f"engine: found {identity.engine!r:.40}, expected vllm")
    hasher = ALGORITHMS.get(identity.hash_algorithm)
    if hasher is None:
        known = ", ".join(ALGORITHMS)
        raise UsageError(f"hash_algorithm: found {identity.hash_algorithm!r:.40}, expected {known}")
    return hasher


def block_hashes(
    identity: Identity, tokens: Sequence[int], cache_salt: str | None = None
) -> Iterator[bytes]:
    """Yield the hash of each whole block of `identity.tokens_per_hash` tokens.

    Raises UsageError where the hashes cannot be known.
    """
    hasher, size = hasher_of(identity), identity.tokens_per_hash
    if not size:
        raise UsageError("tokens_per_hash: found 0, expected at least 1")
    parent = hasher(seed_of(identity))
    for start in range(0, len(tokens) - size + 1, size):
        extra = (("cache_salt", cache_salt),) if cache_salt and not start else None
        parent = hasher((parent, tuple(tokens[start : start + size]), extra))
        yield parent
