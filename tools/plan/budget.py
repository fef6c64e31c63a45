"""What a planned engine stores and loads: files and bytes of a prompt, disk for many, load against prefill.

Chunks and which of them a hit needs are the planner's (`fskv.hybrid_planner`), lengths of files the format's
(`fskv.format.chunk_file`); here they are only added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from fskv.errors import ConfigError
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
from .kv_groups import Dtypes, PlannedGroup, sort_into_groups, tokens_per_hash
from .model_layers import Model

_NO_DIGEST = bytes(16)
# More is no engine's, and would only take long: the planner lists blocks, a hit is looked up chunk by chunk.
_MAX_LOOKUPS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of the engine and of fskv that shape chunks."""

    tp: int
    block_tokens: int
    max_model_len: int
    retention_interval: int | None
    chunk_tokens: int | None  # hybrid_chunk_size; None: auto
    target_nbytes: int
    canonical: bool  # canonical_layout


@dataclass(frozen=True)
class Plan:
    """Groups, chunks and files of an engine. Sizes of files are with their headers."""

    model: Model
    options: EngineOptions
    groups: tuple[PlannedGroup, ...]
    geometry: Geometry

    @cached_property
    def slices(self) -> int:
        """Into how many files canonical pages are cut: KV heads, or one with MLA."""
        return self.model.kv_heads or 1

    @property
    def files_per_chunk(self) -> int:
        return self.slices if self.options.canonical else self.options.tp

    def page_nbytes(self, position: int) -> tuple[int, ...]:
        """Return the pages of one file, as the identity has them."""
        group = self.groups[position]
        nbytes = group.page_nbytes
        if self.options.canonical:
            nbytes //= max(1, self.slices // self.options.tp)
        return (nbytes,) * len(group.layers)

    def layout(self, position: int) -> FileLayout:
        return FileLayout(self.geometry.blocks_per_chunk, self.page_nbytes(position), _NO_DIGEST)

    @property
    def kv_nbytes_per_token(self) -> float:
        """KV of one token in all groups that keep each token, on all ranks; states have no share in it."""
        return sum(
            sum(self.page_nbytes(at)) * self.files_per_chunk / group.spec.tokens_per_block
            for at, group in enumerate(self.groups)
            if group.spec.kind is not GroupKind.STATE
        )

    def hit_tokens(self, prompt_tokens: int) -> int:
        """Return the most that a prompt can hit."""
        specs = [group.spec for group in self.groups]
        return longest_hit(
            specs, self.geometry.blocks_per_chunk, prompt_tokens, 0, lambda _g, _c: Presence.HIT
        ).tokens

    def hit(self, tokens: int) -> tuple[int, int]:
        """Return how many files a hit reads on all ranks, and their bytes of KV (hit_cost)."""
        bpc = self.geometry.blocks_per_chunk
        layouts = [
            GroupLayout.of(group.spec.group_idx, bpc, list(enumerate(self.page_nbytes(at))))
            for at, group in enumerate(self.groups)
        ]
        files, nbytes = hit_cost([group.spec for group in self.groups], layouts, bpc, tokens)
        return files * self.files_per_chunk, nbytes * self.files_per_chunk

    def stored(self, prompt_tokens: int) -> tuple[int, int]:
        """Return how many files a prompt that shares nothing leaves at most, and their bytes on disk."""
        files = nbytes = 0
        for at in range(len(self.groups)):
            count = self._stored_chunks(at, prompt_tokens) * self.files_per_chunk
            files += count
            nbytes += count * self.layout(at).file_nbytes
        return files, nbytes

    def _stored_chunks(self, position: int, prompt_tokens: int) -> int:
        group, bpc = self.groups[position].spec, self.geometry.blocks_per_chunk
        size = self.geometry.tokens_per_chunk[position]
        whole = prompt_tokens // size
        interval = self.options.retention_interval
        # Chunked-local groups ignore the interval (see plan_geometry).
        sparse = group.kind in (GroupKind.SLIDING_WINDOW, GroupKind.STATE)
        if not sparse or interval is None:
            return whole
        ends = {self.hit_tokens(prompt_tokens)}
        if interval:
            ends |= set(range(interval, prompt_tokens, interval))
        count = done = 0
        for end in sorted(ends):
            needed = needed_chunks(group, bpc, end)
            stop = min(needed.stop, whole)
            count += max(0, stop - max(needed.start, done))
            done = max(done, stop)
        return count

    def check_prompt(self, prompt_tokens: int) -> None:
        """Raise UsageError for a prompt that no engine takes, or that has too many chunks to be planned."""
        longest = self.options.max_model_len
        if not 1 <= prompt_tokens <= longest:
            raise UsageError(
                f"--prompt-tokens: found {prompt_tokens}, expected 1 to max_model_len, {longest}"
            )
        smallest = min(self.geometry.tokens_per_chunk)
        steps = min(smallest, self.options.retention_interval or smallest)
        if prompt_tokens // steps * len(self.groups) > _MAX_LOOKUPS:
            raise UsageError(
                f"--prompt-tokens: {prompt_tokens} tokens in chunks of {smallest} and {len(self.groups)} "
                "groups are more than can be planned; give a shorter prompt"
            )


def make_plan(model: Model, dtypes: Dtypes, options: EngineOptions) -> Plan:
    """Plan as an engine with these options would. Raises UsageError, or ConfigError as the engine does."""
    groups = sort_into_groups(model, dtypes, options.block_tokens)
    if options.canonical:
        _check_canonical(model, groups, options.tp)
    files = 1
    if options.canonical:
        files = max(1, (model.kv_heads or 1) // options.tp)
    geometry = plan_geometry(
        [group.spec for group in groups],
        [group.block_nbytes // files for group in groups],
        hybrid_chunk_size="auto" if options.chunk_tokens is None else options.chunk_tokens,
        tokens_per_hash=tokens_per_hash(groups),
        max_model_len=options.max_model_len,
        retention_interval=options.retention_interval,
        target_nbytes=options.target_nbytes,
    )
    return Plan(model, options, tuple(groups), geometry)


def less_if_canonical(plan: Plan, dtypes: Dtypes) -> float | None:
    """Return the KV of a token with canonical_layout; None where that is not less, or not possible."""
    try:
        other = make_plan(plan.model, dtypes, replace(plan.options, canonical=True))
    except (UsageError, ConfigError):
        return None
    less = round(other.kv_nbytes_per_token, 3)
    return less if less < plan.kv_nbytes_per_token else None


def _check_canonical(model: Model, groups: Sequence[PlannedGroup], tp: int) -> None:
    kinds = {group.spec.kind for group in groups}
    if GroupKind.STATE in kinds or (GroupKind.MLA in kinds and len(kinds) > 1):
        raise UsageError(
            "--canonical-layout: found a model with states or a mix with MLA, expected attention groups "
            "alone: vLLM certifies no others as free of the topology"
        )
    heads = model.kv_heads
    if heads is not None and (heads % tp and tp % heads):
        raise UsageError(f"--canonical-layout: {heads} KV heads cannot be divided among {tp} ranks")
