"""The chunks of a prompt, those that a hit needs, and the length of the hit.

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
from fskv.root.key_file import KeySet
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
        cache_salt: str | None = None,
        keys: KeySet | None = None,
    ) -> Prompt:
        """Compute the keys. Raises UsageError where they cannot be known."""
        specs(identity)  # or the hashes would be in vain
        hashes = block_hashes(identity, tokens, cache_salt)
        if identity.encryption is not None:
            if keys is None or keys.encryption != identity.encryption:
                raise UsageError("the namespace hides its names: expected --key-file with its keys")
            hashes = map(keys.hide, hashes)
        return cls(identity, len(tokens), tuple(hashes))

    @cached_property
    def groups(self) -> list[GroupSpec]:
        return specs(self.identity)

    def tokens_per_chunk(self, position: int) -> int:
        return self.groups[position].tokens_per_block * self.identity.blocks_per_chunk

    def num_chunks(self, position: int) -> int:
        """Count whole chunks: only they have keys."""
        return self.num_tokens // self.tokens_per_chunk(position)

    def key(self, position: int, chunk: int) -> bytes:
        return self.key_at((chunk + 1) * self.tokens_per_chunk(position))

    def key_at(self, end_tokens: int) -> bytes:
        return self.hashes[end_tokens // self.identity.tokens_per_hash - 1]

    def tails(self, hit_tokens: int) -> range:
        """List where an earlier prompt may have ended inside the block after a hit, the longest first.

        All groups have a file of their own for such an end, and a hit needs all of them. vLLM keeps what such
        a prompt leaves (supports_partial_tail, 0.32) with one size of blocks, a state and no window.
        """
        step, size = self.identity.tokens_per_hash, self.groups[0].tokens_per_block
        kinds = {group.kind for group in self.groups}
        if (
            self.identity.blocks_per_chunk != 1
            or {group.tokens_per_block for group in self.groups} != {size}
            or GroupKind.STATE not in kinds
            or any(kind.windowed for kind in kinds - {GroupKind.STATE})
        ):
            return range(0)
        last = min(self.num_tokens - 1, hit_tokens + size - 1)
        return range(last // step * step, hit_tokens, -step)

    def hit_tokens(self, found: Found) -> int:
        """Return how many tokens the engine's lookup would find; `found` tells which chunks are present."""

        def presence(position: int, chunk: int) -> Presence:
            return Presence.HIT if found(position, chunk) else Presence.MISS

        bpc = self.identity.blocks_per_chunk
        return longest_hit(self.groups, bpc, self.num_tokens, 0, presence).tokens

    def needed(self, position: int, hit_tokens: int) -> range:
        """List the chunks of a group that serve a hit."""
        if not hit_tokens:
            return range(0)
        return needed_chunks(self.groups[position], self.identity.blocks_per_chunk, hit_tokens)

    def first_wanted_block(self, position: int, chunk: int, hit_tokens: int) -> int:
        """Return the first block of a chunk that a hit reads: a window may begin inside a chunk."""
        group = self.groups[position]
        window, first = group.window_tokens or 1, 0
        if group.kind is GroupKind.SLIDING_WINDOW:
            first = max(0, hit_tokens - window + 1)
        elif group.kind is GroupKind.CHUNKED_LOCAL:
            first = hit_tokens // window * window
        elif group.kind is GroupKind.STATE:
            first = hit_tokens - 1
        start = chunk * self.identity.blocks_per_chunk
        return max(0, first // group.tokens_per_block - start)


def specs(identity: Identity) -> list[GroupSpec]:
    """Return the groups as the planner knows them. Raises UsageError for an identity that no engine has."""
    if not identity.groups or not 1 <= identity.blocks_per_chunk <= _MAX_BLOCKS:
        raise UsageError("groups, blocks_per_chunk: no engine has these")
    return [_spec(identity, group) for group in identity.groups]


def _spec(identity: Identity, group: GroupIdentity) -> GroupSpec:
    size, per_hash = group.tokens_per_block, identity.tokens_per_hash
    where = f"groups: group {group.group_idx}"
    if not 1 <= size <= _MAX_TOKENS_PER_BLOCK or not per_hash or size % per_hash:
        raise UsageError(f"{where}: no engine has blocks of {size:.6g}, hashes of {per_hash:.6g}")
    try:
        kind = GroupKind(group.kind.partition("/")[0])
        return GroupSpec(group.group_idx, kind, size, group.window_tokens)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None
