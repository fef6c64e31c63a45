"""What a planned engine stores and loads: files and bytes of a prompt and of its hit.

Chunks and which of them a hit needs are the planner's (`fskv.hybrid_planner`), lengths of files the format's
(`fskv.format.chunk_file`); here they are only added up.
"""

from __future__ import annotations

from dataclasses import dataclass

from fskv.format.chunk_file import FileLayout
from fskv.hybrid_planner import (
    Geometry,
    GroupKind,
    hit_cost,
    longest_hit,
    needed_chunks,
    plan_geometry,
)
from fskv.plan.spans import GroupLayout
from fskv.types import Presence

from ..exits import UsageError
from .engine import Engine

_MAX_LOOKUPS = 1 << 22  # a hit is looked up chunk by chunk: more would only take long


@dataclass(frozen=True)
class Budget:
    """The chunks of an engine, and what becomes of a prompt. Sizes of files are with their headers."""

    engine: Engine
    geometry: Geometry
    retention_interval: int

    @classmethod
    def of(cls, engine: Engine, chunk_tokens: int | None, retention_interval: int) -> Budget:
        """Choose chunks by an engine's own planner. Raises ConfigError as the engine does."""
        groups, blocks = engine.groups, engine.blocks_per_chunk
        nbytes = [group.page_nbytes[0] * len(group.page_nbytes) for group in groups]
        if blocks is not None:
            tokens = tuple(group.spec.tokens_per_block * blocks for group in groups)
            geometry = Geometry(blocks, tokens, tuple(one * blocks for one in nbytes), ())
        else:
            geometry = plan_geometry(
                [group.spec for group in groups],
                nbytes,
                hybrid_chunk_size=chunk_tokens or "auto",
                tokens_per_hash=engine.tokens_per_hash,
                max_model_len=engine.max_model_len or 1 << 30,
                retention_interval=retention_interval,
            )
        return cls(engine, geometry, retention_interval)

    def layout(self, position: int) -> FileLayout:
        pages = self.engine.groups[position].page_nbytes
        return FileLayout(self.geometry.blocks_per_chunk, pages, bytes(16))

    @property
    def kv_nbytes_per_token(self) -> float:
        """KV of one token in all groups that keep each token, on all ranks; states have no share in it."""
        return self.engine.files_per_chunk * sum(
            sum(group.page_nbytes) / group.spec.tokens_per_block
            for group in self.engine.groups
            if group.spec.kind is not GroupKind.STATE
        )

    def hit(self, prompt_tokens: int) -> tuple[int, int, int]:
        """Return the tokens that a prompt can hit at most, files that it reads and their bytes of KV.

        Raises UsageError for a prompt with too many chunks to look up.
        """
        specs = [group.spec for group in self.engine.groups]
        bpc, smallest = self.geometry.blocks_per_chunk, min(self.geometry.tokens_per_chunk)
        if prompt_tokens // smallest * len(specs) > _MAX_LOOKUPS:
            raise UsageError(
                f"--prompt-tokens: {prompt_tokens} tokens in chunks of {smallest} and {len(specs)} groups "
                "are more than can be planned; give a shorter prompt"
            )
        tokens = longest_hit(specs, bpc, prompt_tokens, 0, lambda _g, _c: Presence.HIT).tokens
        if not tokens:
            return 0, 0, 0
        layouts = [
            GroupLayout.of(group.spec.group_idx, bpc, list(enumerate(group.page_nbytes)))
            for group in self.engine.groups
        ]
        files, nbytes = hit_cost(specs, layouts, bpc, tokens)
        return tokens, files * self.engine.files_per_chunk, nbytes * self.engine.files_per_chunk

    def stored(self, prompt_tokens: int, hit_tokens: int) -> tuple[int, int]:
        """Return how many files a prompt that shares nothing leaves at most, and their bytes on disk."""
        files = nbytes = 0
        for at, group in enumerate(self.engine.groups):
            count = prompt_tokens // self.geometry.tokens_per_chunk[at]
            if group.spec.kind in (GroupKind.SLIDING_WINDOW, GroupKind.STATE):
                interval = self.retention_interval
                boundaries = 1 + (prompt_tokens // interval if interval else 0)
                needed = needed_chunks(group.spec, self.geometry.blocks_per_chunk, hit_tokens)
                count = min(count, boundaries * len(needed))
            files += count * self.engine.files_per_chunk
            nbytes += count * self.engine.files_per_chunk * self.layout(at).file_nbytes
        return files, nbytes
