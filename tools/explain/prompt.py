"""Which chunks a prompt has, which of them a hit needs, and how far the hit goes.

The rule is the planner's (`fskv.hybrid_planner`), which follows vLLM's scheduler; nothing of it is written
again here. Pure but for the presence that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

from fskv.hybrid_planner import GroupKind, GroupSpec, longest_hit, needed_chunks
from fskv.namespace import GroupIdentity, Identity
from fskv.types import Presence

from ..block_hashes import block_hashes
from ..exits import UsageError

# (position of the group, chunk) -> whether a lookup would find it
Found: TypeAlias = Callable[[int, int], bool]

_MAX_TOKENS_PER_BLOCK = 1 << 24
_MAX_BLOCKS = 1 << 20


@dataclass(frozen=True)
class Prompt:
    """The chunks of a prompt under one identity; `hashes` are of every `tokens_per_hash` tokens."""

    identity: Identity
    num_tokens: int
    hashes: Sequence[bytes]

    @classmethod
    def of(
        cls,
        identity: Identity,
        tokens: Sequence[int],
        *,
        cache_salt: str | None = None,
        lora: tuple[str, str] | None = None,
    ) -> Prompt:
        """Compute the keys. Raises UsageError where they cannot be known."""
        specs(identity)  # or the hashes would be in vain
        hashes = tuple(block_hashes(identity, tokens, cache_salt=cache_salt, lora=lora))
        return cls(identity, len(tokens), hashes)

    @cached_property
    def groups(self) -> list[GroupSpec]:
        return specs(self.identity)

    def tokens_per_chunk(self, position: int) -> int:
        return self.groups[position].tokens_per_block * self.identity.blocks_per_chunk

    def num_chunks(self, position: int) -> int:
        """Count whole chunks: only they have keys."""
        return self.num_tokens // self.tokens_per_chunk(position)

    def key(self, position: int, chunk: int) -> bytes:
        per_chunk = self.tokens_per_chunk(position) // self.identity.tokens_per_hash
        return self.hashes[(chunk + 1) * per_chunk - 1]

    @property
    def _has_tails(self) -> bool:
        """Whether vLLM keeps what a prompt that ends inside a block leaves (supports_partial_tail, 0.32)."""
        sizes = {group.tokens_per_block for group in self.groups}
        return (
            self.identity.blocks_per_chunk == 1
            and len(sizes) == 1
            and min(sizes) > self.identity.tokens_per_hash
            and any(group.kind is GroupKind.STATE for group in self.groups)
            and all(
                group.kind is GroupKind.STATE or not group.kind.windowed for group in self.groups
            )
        )

    def tails(self, hit_tokens: int) -> range:
        """List where an earlier prompt may have ended inside the block after a hit, the longest first.

        All groups have a file of their own for such an end, and a hit needs all of them.
        """
        if not self._has_tails:
            return range(0)
        step, size = self.identity.tokens_per_hash, self.groups[0].tokens_per_block
        last = min(self.num_tokens - 1, hit_tokens + size - 1)
        return range(last // step * step, hit_tokens, -step)

    def tail_key(self, end_tokens: int) -> bytes:
        return self.hashes[end_tokens // self.identity.tokens_per_hash - 1]

    def hit_tokens(self, found: Found, computed_tokens: int = 0) -> int:
        """Return how many tokens, the computed ones included, would be there: as the engine looks them up."""

        def presence(position: int, chunk: int) -> Presence:
            return Presence.HIT if found(position, chunk) else Presence.MISS

        hit = longest_hit(
            self.groups, self.identity.blocks_per_chunk, self.num_tokens, computed_tokens, presence
        )
        return computed_tokens + hit.tokens

    def needed(self, position: int, hit_tokens: int, computed_tokens: int = 0) -> range:
        """List the chunks of a group that serve a hit."""
        if hit_tokens <= computed_tokens:
            return range(0)
        bpc = self.identity.blocks_per_chunk
        return needed_chunks(self.groups[position], bpc, hit_tokens, computed_tokens)

    def first_wanted_block(self, position: int, chunk: int, hit_tokens: int) -> int:
        """Return from which of its blocks on a chunk is read for a hit: a window may begin inside a chunk."""
        group = self.groups[position]
        first = 0
        if group.kind is GroupKind.SLIDING_WINDOW:
            assert group.window_tokens is not None
            first = max(0, hit_tokens - group.window_tokens + 1)
        elif group.kind is GroupKind.CHUNKED_LOCAL:
            assert group.window_tokens is not None
            first = hit_tokens // group.window_tokens * group.window_tokens
        elif group.kind is GroupKind.STATE:
            first = hit_tokens - 1
        start = chunk * self.identity.blocks_per_chunk
        return max(0, first // group.tokens_per_block - start)


@dataclass(frozen=True, slots=True)
class Culprit:
    """A group that ends a hit: `missing` are chunks that a longer hit needs and that are not there.

    `limit_tokens` is how far the hit would go if all other groups had everything.
    """

    position: int
    limit_tokens: int
    missing: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far a prompt hits, how far it could, and because of which groups it does not."""

    hit_tokens: int
    best_tokens: int
    culprits: tuple[Culprit, ...]


def judge(prompt: Prompt, found: Found, computed_tokens: int = 0) -> Verdict:
    """Look the prompt up, and once more for each group as if the others had everything."""
    best = prompt.hit_tokens(lambda _position, _chunk: True, computed_tokens)
    hit = prompt.hit_tokens(found, computed_tokens)
    culprits = []
    if hit < best:
        for position in range(len(prompt.groups)):

            def alone(other: int, chunk: int, only: int = position) -> bool:
                return other != only or found(other, chunk)

            limit = prompt.hit_tokens(alone, computed_tokens)
            if limit < best:
                needed = prompt.needed(position, best, computed_tokens)
                wanted = [c for c in needed if c < prompt.num_chunks(position)]
                missing = tuple(chunk for chunk in wanted if not found(position, chunk))
                culprits.append(Culprit(position, limit, missing))
        culprits.sort(key=lambda one: (one.limit_tokens, one.position))
    return Verdict(hit, best, tuple(culprits))


def specs(identity: Identity) -> list[GroupSpec]:
    """Return the groups as the planner knows them. Raises UsageError for an identity that no engine has."""
    if not identity.groups or not 1 <= identity.blocks_per_chunk <= _MAX_BLOCKS:
        raise UsageError(
            f"the identity has {len(identity.groups)} groups and {identity.blocks_per_chunk:.6g} blocks per "
            "chunk: no engine does"
        )
    return [_spec(identity, group) for group in identity.groups]


def _spec(identity: Identity, group: GroupIdentity) -> GroupSpec:
    where = f"groups: group {group.group_idx}"
    word = group.kind.partition("/")[0]
    kinds = {kind.value: kind for kind in GroupKind}
    if word not in kinds:
        raise UsageError(f"{where}: kind {word!r:.40} is unknown; expected {', '.join(kinds)}")
    size = group.tokens_per_block
    per_hash = identity.tokens_per_hash
    if not 1 <= size <= _MAX_TOKENS_PER_BLOCK or not per_hash or size % per_hash:
        raise UsageError(
            f"{where}: blocks of {size:.6g} tokens with hashes of {per_hash:.6g}: no engine has these"
        )
    try:
        return GroupSpec(group.group_idx, kinds[word], size, group.window_tokens)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None
