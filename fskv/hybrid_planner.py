"""Decides the size of chunks, and the chunks that a hit needs. Pure.

A hybrid model keeps several KV groups side by side (full attention, sliding window, recurrent state). A
prefix can be served only where every group has its chunks. `plan_geometry` computes the size of a chunk,
`needed_chunks` and `longest_hit` the chunks of a hit. `plan_job` of fskv.format.spans, which this module also
exports, computes the place of their bytes. The engine's adapter translates the engine's objects into these
numbers. No state: any thread may call.

The rules follow vLLM's `v1/offloading/scheduler.py` (0.32, 0.33), named at each place.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Literal

from fskv.errors import ConfigError
from fskv.format.spans import GroupLayout, plan_job
from fskv.types import Presence

__all__ = [
    "Geometry",
    "GroupKind",
    "GroupLayout",
    "GroupSpec",
    "Hit",
    "hit_cost",
    "longest_hit",
    "needed_chunks",
    "plan_geometry",
    "plan_job",
]


def _cdiv(number: int, divisor: int) -> int:
    return -(-number // divisor)


class GroupKind(Enum):
    """The memory of a KV group. The values appear in namespace.json and must not change."""

    FULL = "full"
    MLA = "mla"  # covered like FULL
    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local"
    STATE = "state"  # mamba, linear attention, short convolution: one state per boundary

    @property
    def windowed(self) -> bool:
        """A hit needs only the group's last chunks, not its whole prefix."""
        return self not in (GroupKind.FULL, GroupKind.MLA)


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """The facts of a KV group that coverage needs.

    `group_idx` is the engine's original index (it is part of the key); functions here otherwise
    speak of a group's *position* in the sequence they are given. `window_tokens` is the window
    of SLIDING_WINDOW, the attention chunk size of CHUNKED_LOCAL, None for the other kinds.
    `extra_retained_tokens` widens a sliding window (vLLM: multi-module speculative decoding).
    Raises ValueError for a combination that means nothing.
    """

    group_idx: int
    kind: GroupKind
    tokens_per_block: int
    window_tokens: int | None
    extra_retained_tokens: int = 0

    def __post_init__(self) -> None:
        if self.group_idx < 0 or self.tokens_per_block <= 0 or self.extra_retained_tokens < 0:
            raise ValueError(f"{self}: indices must be >= 0 and tokens_per_block > 0")
        has_window = self.kind in (GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL)
        window = self.window_tokens
        if has_window != (window is not None) or (window is not None and window <= 0):
            want = "a positive window_tokens" if has_window else "window_tokens None"
            raise ValueError(f"{self}: a {self.kind.value} group needs {want}")


# --- geometry: how large a chunk is ---------------------------------------------------------

_STATE_RULE = (
    "a group keeps a state, and with more than one block per chunk vLLM stores only the attention "
    "groups and never hits"
)


@dataclass(frozen=True, slots=True)
class Geometry:
    """The chunk size of every group, by position; `warnings` are for the log, once, at start."""

    blocks_per_chunk: int
    tokens_per_chunk: tuple[int, ...]
    nbytes_per_chunk: tuple[int, ...]  # un-padded payload bytes on one rank
    warnings: tuple[str, ...]


def plan_geometry(
    groups: Sequence[GroupSpec],
    block_nbytes: Sequence[int],
    *,
    hybrid_chunk_size: int | Literal["auto"],
    tokens_per_hash: int,
    max_model_len: int,
    retention_interval: int | None,
    target_nbytes: int = 2 << 20,
) -> Geometry:
    """Choose blocks_per_chunk, one number for all groups as vLLM wants it, or say why not.

    `block_nbytes` is by position: un-padded bytes of one block of the group on one rank.
    `hybrid_chunk_size` is in tokens. "auto" takes the fewest blocks whose smallest attention
    file reaches `target_nbytes`, within max_model_len // 4 tokens; one block with a STATE group.
    `retention_interval` is vLLM's prefix_cache_retention_interval in tokens (None: dense, 0:
    only the last boundary). Raises ConfigError with option, finding and expectation; ValueError
    for sequences that do not match.
    """
    if not groups or len(block_nbytes) != len(groups) or min(block_nbytes) <= 0:
        raise ValueError(f"{len(groups)} groups with block_nbytes {list(block_nbytes)}")
    legal = _legal_blocks_per_chunk(groups, tokens_per_hash, max_model_len, retention_interval)
    warnings: list[str] = []
    if hybrid_chunk_size == "auto":
        pairs = list(zip(groups, block_nbytes, strict=True))
        blocks, small = _auto_blocks(pairs, legal, max_model_len, target_nbytes)
        warnings += small
    else:
        blocks = _fixed_blocks(groups, legal, hybrid_chunk_size)
    tokens = tuple(group.tokens_per_block * blocks for group in groups)
    # vLLM: chunked-local groups ignore the interval and store densely, as full attention does.
    kinds = (GroupKind.SLIDING_WINDOW, GroupKind.STATE)
    sparse = [group.group_idx for group in groups if group.kind in kinds]
    if retention_interval == 0 and sparse:
        # A multiple of every chunk suits vLLM's scheduler (it wants the blocks' lcm) and its
        # offloading (tokens_per_chunk); a window or state per ~1024 tokens costs little disk.
        step = math.lcm(*tokens)
        step *= max(1, min(_cdiv(1024, step), max_model_len // 4 // step))
        warnings.append(
            f"prefix_cache_retention_interval is 0: the windows and states of groups {sparse} are "
            "stored only at the last boundary of a prompt (and where the engine itself saw two "
            "prompts part), so a prompt that shares only part of a stored prefix hits nothing; "
            f"--prefix-cache-retention-interval {step} stores them every {step} tokens as well"
        )
    nbytes = tuple(nbytes * blocks for nbytes in block_nbytes)
    return Geometry(blocks, tokens, nbytes, tuple(warnings))


def _legal_blocks_per_chunk(
    groups: Sequence[GroupSpec], tokens_per_hash: int, max_model_len: int, retention: int | None
) -> Sequence[int]:
    """Return every legal blocks_per_chunk, ascending; 1 is always first. Raises ConfigError.

    Cheap whatever max_model_len is: a range, or the divisors of the interval.
    """
    retained = 0  # gcd of the interval, in blocks, over the groups that it binds; 0: no bound
    for group in groups:
        name, block = f"group {group.group_idx} ({group.kind.value})", group.tokens_per_block
        if block % tokens_per_hash:
            raise ConfigError(
                f"{name}: a block of {block} tokens cannot be split into hashes of "
                f"{tokens_per_hash}; expected a multiple (hybrid models need enable_prefix_caching)"
            )
        if block > max_model_len - 1:
            raise ConfigError(
                f"max_model_len is {max_model_len}: nothing can ever be stored: one block of "
                f"{name} is {block} tokens; expected max_model_len > {block}"
            )
        # vLLM: SchedulerOffloadConfig.from_spec raises for the same groups.
        if retention and group.kind.windowed:
            if retention % block:
                raise ConfigError(
                    f"prefix_cache_retention_interval is {retention}; expected a multiple of "
                    f"{block}, the tokens of one block of {name}"
                )
            retained = math.gcd(retained, retention // block)
    if any(group.kind is GroupKind.STATE for group in groups):
        return range(1, 2)
    most = (max_model_len - 1) // max(group.tokens_per_block for group in groups)
    if not retained:
        return range(1, most + 1)
    small = [n for n in range(1, min(most, math.isqrt(retained)) + 1) if retained % n == 0]
    return sorted(n for n in {*small, *(retained // n for n in small)} if n <= most)


def _auto_blocks(
    pairs: Sequence[tuple[GroupSpec, int]], legal: Sequence[int], max_model_len: int, target: int
) -> tuple[int, list[str]]:
    """Choose for "auto", and warn about the reason for small files, if any."""
    attention = [nbytes for group, nbytes in pairs if not group.kind.windowed]
    smallest = min(attention or [nbytes for _, nbytes in pairs])
    wanted = _cdiv(target, smallest)
    block = max(group.tokens_per_block for group, _ in pairs)
    cap = max(1, max_model_len // 4 // block)
    usable = legal[: bisect_right(legal, cap)]
    blocks = usable[min(bisect_left(usable, wanted), len(usable) - 1)]
    if blocks >= wanted:
        return blocks, []
    if any(group.kind is GroupKind.STATE for group, _ in pairs):
        reason = _STATE_RULE
    elif wanted > cap:
        reason = f"a chunk is at most {cap} x {block} tokens, a quarter of max_model_len"
    else:
        reason = "prefix_cache_retention_interval must be a multiple of the tokens of a chunk"
    warning = (
        f"hybrid_chunk_size auto: {blocks} blocks per chunk make files of {blocks * smallest} "
        f"bytes, below the target of {target}: {reason} (max_model_len {max_model_len})"
    )
    return blocks, [warning]


def _fixed_blocks(groups: Sequence[GroupSpec], legal: Sequence[int], chunk_tokens: int) -> int:
    """Turn a user's tokens per chunk into blocks per chunk, or raise ConfigError."""
    found = f"hybrid_chunk_size is {chunk_tokens} tokens"
    block_sizes = sorted({group.tokens_per_block for group in groups})
    if len(block_sizes) > 1:
        raise ConfigError(
            f"{found}, but the groups' blocks are {block_sizes} tokens, and no number of tokens "
            'is the same number of blocks for all of them; expected "auto"'
        )
    (block,) = block_sizes
    blocks, rest = divmod(chunk_tokens, block)
    if rest == 0 and blocks in legal:
        return blocks
    if any(group.kind is GroupKind.STATE for group in groups):
        raise ConfigError(f'{found}: {_STATE_RULE}; expected one block, {block}, or "auto"')
    at = bisect_right(legal, blocks)
    near = legal[max(0, at - 1) : at + 1]
    if rest or blocks < 1:
        why = f"not a positive multiple of the {block} tokens of a block"
    elif blocks > legal[-1]:
        why = "nothing can ever be stored: a chunk does not fit max_model_len - 1 tokens"
    else:
        why = "prefix_cache_retention_interval is not a multiple of it"
    nearest = " or ".join(str(b * block) for b in near)
    raise ConfigError(f'{found}: {why}; expected {nearest} (nearest) or "auto"')


# --- coverage: which chunks a hit needs -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hit:
    """`tokens` beyond the computed ones can be served; 0 while `deferred`: ask again later."""

    tokens: int
    deferred: bool


def _window_chunks(group: GroupSpec, tokens_per_chunk: int, hit_tokens: int) -> int:
    """Count the last chunks that a windowed group needs for a hit that ends at `hit_tokens`.

    vLLM: get_sliding_window_size_in_chunks, and load_window_size_in_chunks for the padding.
    """
    if group.window_tokens is None:
        return 1  # STATE
    chunks = _cdiv(group.window_tokens, tokens_per_chunk)
    if group.kind is GroupKind.SLIDING_WINDOW:
        # The next token sees window - 1 older ones. Where the hit ends inside a chunk, they
        # reach as much further left as that chunk has tokens after the hit.
        reach = group.window_tokens - 1 + group.extra_retained_tokens
        chunks = max(chunks, _cdiv(reach + -hit_tokens % tokens_per_chunk, tokens_per_chunk))
    return chunks


def needed_chunks(
    group: GroupSpec, blocks_per_chunk: int, hit_tokens: int, computed_tokens: int = 0
) -> range:
    """List the chunks of the group that serve a hit of `hit_tokens` tokens in all.

    FULL and MLA: every chunk up to the one the hit ends in. Windowed kinds: the last ones, one
    for STATE. Never a chunk before the one that `computed_tokens` ends in: the engine has those.
    `hit_tokens` need not be a multiple of a chunk (of a STATE group's it must be: a state
    cannot be cut).
    """
    tokens_per_chunk = group.tokens_per_block * blocks_per_chunk
    stop = _cdiv(hit_tokens, tokens_per_chunk)
    start = computed_tokens // tokens_per_chunk
    if group.kind.windowed:
        start = max(start, stop - _window_chunks(group, tokens_per_chunk, hit_tokens))
    return range(min(start, stop), stop)


def longest_hit(
    groups: Sequence[GroupSpec],
    blocks_per_chunk: int,
    num_tokens: int,
    computed_tokens: int,
    presence: Callable[[int, int], Presence],
) -> Hit:
    """Find the longest prefix that every group can serve at once.

    `presence(position, chunk)` is asked about chunks of groups by position; it must not block.
    Deferred when an UNKNOWN could still change the answer; by then every chunk that could matter
    has been asked about: scans go on past UNKNOWN, so that all probes start at once.

    The order of steps is that of vLLM's _lookup_complete_chunks (without EAGLE and caps), since
    that is what decides in a running engine, and it shows: less than one chunk of a group is no
    hit at all, but a window may shorten a hit below the chunk of a full-attention group that was
    looked at before (unless an UNKNOWN has that group looked at again). One difference: here a
    hit always ends with a STATE group's chunk. vLLM rounds once, before the scans, so a group
    with smaller blocks could end a hit inside a state's chunk; its own hybrids have one size.
    """
    sizes = [group.tokens_per_block * blocks_per_chunk for group in groups]
    full = [g for g, group in enumerate(groups) if not group.kind.windowed]
    windows = [g for g, group in enumerate(groups) if group.kind.windowed]
    windows.sort(key=lambda g: -_window_chunks(groups[g], sizes[g], 0))
    # The last prompt token is recomputed for its logits: the windows must reach one token back.
    ceiling = num_tokens - 1 if windows else num_tokens
    for g in windows:
        if groups[g].kind is GroupKind.STATE:
            ceiling -= ceiling % sizes[g]
    hit, deferred, todo = 0, False, full + windows
    while todo:
        visits, todo, seen_window = todo, [], False
        for g in visits:
            ceiling = min(ceiling, num_tokens // sizes[g] * sizes[g])  # only full chunks have keys
            if groups[g].kind is GroupKind.STATE:
                ceiling -= ceiling % sizes[g]
            if ceiling - computed_tokens < sizes[g]:
                return Hit(0, deferred=False)
            served = _scan(groups[g], sizes[g], ceiling, computed_tokens, partial(presence, g))
            if served is None:
                deferred = True
            else:
                ceiling = served
            if ceiling - computed_tokens < sizes[g]:
                return Hit(0, deferred=False)
            if ceiling - computed_tokens < hit:
                if deferred:
                    # The shorter hit may not need what was unknown: look at all groups again.
                    deferred, todo = False, full + windows
                elif seen_window and not todo:
                    todo = windows
            hit = ceiling - computed_tokens
            seen_window |= groups[g].kind.windowed
    return Hit(0 if deferred else hit, deferred)


def _scan(
    group: GroupSpec, size: int, ceiling: int, computed: int, presence: Callable[[int], Presence]
) -> int | None:
    """Return how many tokens up to `ceiling` the group serves; None: an UNKNOWN decides.

    `size` is tokens per chunk, `computed` the tokens the engine has.
    """
    chunks = range(computed // size, _cdiv(ceiling, size))
    unknown = False
    if not group.kind.windowed:
        for chunk in chunks:
            found = presence(chunk)
            unknown |= found is Presence.UNKNOWN
            if found is Presence.MISS:
                ceiling = chunk * size
                break
        return None if unknown else ceiling
    run, required = 0, _window_chunks(group, size, ceiling)
    end = chunks.start  # a run that touches the computed tokens serves, however short it is
    for chunk in reversed(chunks):
        found = presence(chunk)
        unknown |= found is Presence.UNKNOWN
        if found is Presence.HIT:
            run += 1
        else:  # left of a gap a hit ends with a chunk: no padding
            run, required = 0, _window_chunks(group, size, 0)
        if run == required:
            end = chunk
            break
    return None if unknown else min(ceiling, (end + run) * size)


def hit_cost(
    groups: Sequence[GroupSpec], layouts: Sequence[GroupLayout], blocks_per_chunk: int, tokens: int
) -> tuple[int, int]:
    """Count the chunk files and payload bytes that a hit of `tokens` reads on one rank."""
    counts = [len(needed_chunks(group, blocks_per_chunk, tokens)) for group in groups]
    sizes = [layout.payload_nbytes for layout in layouts]
    return sum(counts), sum(n * size for n, size in zip(counts, sizes, strict=True))
