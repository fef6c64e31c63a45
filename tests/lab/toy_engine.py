"""A toy engine that stores and loads its KV through fskv.offload alone: no vLLM, no torch.

Its "model" makes a block's KV from all tokens up to the block's end, as attention does, so that a wrong block
is seen. `Engine.run` gives the KV of a prompt: what is on disk is loaded, the rest is computed and stored.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Sequence

from fskv.namespace import GroupIdentity, Identity
from fskv.offload import open_store
from fskv.types import ChunkId, Presence

TOKENS_PER_BLOCK, BLOCKS_PER_CHUNK, PAGE_NBYTES, NUM_BLOCKS = 4, 2, 512, 64
TOKENS_PER_CHUNK = TOKENS_PER_BLOCK * BLOCKS_PER_CHUNK


def identity(model: str) -> Identity:
    """Return what must be equal for the toy's KV to be interchangeable."""
    return Identity(
        engine="toy",
        engine_version="1",
        arch="cpu",
        model_name=model,
        weights=f"named:{model}",
        model_config={},
        kv_cache_dtype="int8",
        model_dtype="int8",
        kv_cache_layout="page",
        attention_backend="none",
        tokens_per_hash=TOKENS_PER_BLOCK,
        blocks_per_chunk=BLOCKS_PER_CHUNK,
        groups=(GroupIdentity(0, "full", None, TOKENS_PER_BLOCK, (PAGE_NBYTES,), ("layer",)),),
        hash_algorithm="sha256",
        hash_seed="none",
        topology={"tp": 1},
    )


def chunks_of(tokens: Sequence[int]) -> list[ChunkId]:
    """Return the keys of a prompt: each covers all tokens up to its chunk's end."""
    return [
        ChunkId(hashlib.sha256(repr(list(tokens[:end])).encode()).digest(), 0)
        for end in range(TOKENS_PER_CHUNK, len(tokens) + 1, TOKENS_PER_CHUNK)
    ]


class Engine:
    """One request at a time; its blocks are always the first of the KV memory."""

    def __init__(self, root: str, model: str = "toy", **options: object) -> None:
        self.model = model
        self.memory = bytearray(NUM_BLOCKS * PAGE_NBYTES)
        self.kv = open_store(
            {"root": root, **options}, identity(model), {0: [memoryview(self.memory)]}
        )
        self.job_ids = itertools.count()
        self.num_loaded = self.num_stored = 0

    def close(self) -> None:
        self.kv.close()

    def run(self, tokens: Sequence[int]) -> bytes:
        """Return the KV of a prompt of whole chunks."""
        self.memory[:] = bytes(len(self.memory))
        chunks = self.kv.hidden(chunks_of(tokens))
        num_loaded = self._load(chunks[: self._hits(chunks)])
        for number in range(num_loaded, len(chunks)):
            for block in self._blocks(number):
                self._compute(tokens, block)
        self._store(chunks, num_loaded)
        return bytes(self.memory[: len(chunks) * BLOCKS_PER_CHUNK * PAGE_NBYTES])

    def _blocks(self, number: int) -> range:
        return range(number * BLOCKS_PER_CHUNK, (number + 1) * BLOCKS_PER_CHUNK)

    def _compute(self, tokens: Sequence[int], block: int) -> None:
        seen = repr((self.model, list(tokens[: (block + 1) * TOKENS_PER_BLOCK]))).encode()
        page = hashlib.shake_256(seen).digest(PAGE_NBYTES)
        self.memory[block * PAGE_NBYTES : (block + 1) * PAGE_NBYTES] = page

    def _hits(self, chunks: Sequence[ChunkId]) -> int:
        """Return how many chunks from the first on are there."""
        answers = [self.kv.lookup.ask(chunk)[0] for chunk in chunks]
        while Presence.UNKNOWN in answers:
            self.kv.step()
            time.sleep(0.001)
            answers = [self.kv.lookup.ask(chunk)[0] for chunk in chunks]
        return [*(answer is Presence.HIT for answer in answers), False].index(False)

    def _load(self, chunks: Sequence[ChunkId]) -> int:
        """Load these; returns how many from the first on came. What did not is computed."""
        job_id = next(self.job_ids)
        moves = [m for i, chunk in enumerate(chunks) for m in self.kv.moves(chunk, self._blocks(i))]
        self.kv.mover.load(job_id, moves)
        while not (ended := [r for r in self.kv.step() if r.job_id == job_id]):
            time.sleep(0.001)
        bad = {file.chunk for file in ended[0].bad}
        good = [*(chunk not in bad for chunk in chunks), False].index(False)
        self.num_loaded += good
        return good

    def _store(self, chunks: Sequence[ChunkId], first: int) -> None:
        """Store what is not there; returns when it is, or is known not to be."""
        wanted = set(self.kv.lookup.begin_store(chunks[first:]))
        moves = [
            move
            for i, chunk in enumerate(chunks)
            if i >= first and chunk in wanted
            for move in self.kv.moves(chunk, self._blocks(i))
        ]
        job_id, ended = next(self.job_ids), False
        self.kv.mover.store(job_id, moves)
        while self.kv.lookup.storing or not ended:
            ended |= any(result.job_id == job_id for result in self.kv.step())
            time.sleep(0.001)
        self.num_stored += len(wanted)
