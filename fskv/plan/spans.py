"""Decide, without touching anything, where the bytes of a chunk lie and which of them a job moves.

`GroupLayout` says how a chunk's payload is built from pages, `plan_job` turns a job of the engine (block
ids, group by group) into byte spans between KV tensors and payloads. Pure functions over numbers; any
thread. Called by the engine adapter; `runner` carries the plans out.

One invariant: what `plan_job` plans for a key is that key's bytes in that key's order, or it
plans nothing for it. A guess here would be wrong KV later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

PAYLOAD_ALIGNMENT = 4096  # GDS and O_DIRECT want 4 KiB (CuFile.pread docs; open(2))


SpanTable: TypeAlias = npt.NDArray[np.int64]


def _cdiv(number: int, divisor: int) -> int:
    return -(-number // divisor)


@dataclass(frozen=True, slots=True)
class PageRef:
    """The bytes one block has in one tensor: the first `nbytes` of the block, without padding."""

    tensor_idx: int
    nbytes: int

    def __post_init__(self) -> None:
        if self.tensor_idx < 0 or self.nbytes <= 0:
            raise ValueError(f"{self}: tensor_idx must be >= 0 and nbytes > 0")


@dataclass(frozen=True)
class GroupLayout:
    """How the bytes of one chunk of a group lie in its payload.

    Block-major and without holes: for each block of the chunk, for each page, the page's
    bytes; zeros at the end up to `payload_nbytes`. Each tensor may appear once (see `of`);
    raises ValueError otherwise.
    """

    group_idx: int
    num_blocks: int  # = blocks_per_chunk
    pages: tuple[PageRef, ...]

    def __post_init__(self) -> None:
        tensors = [page.tensor_idx for page in self.pages]
        if self.num_blocks <= 0 or not tensors or len(set(tensors)) != len(tensors):
            raise ValueError(f"{self}: needs num_blocks > 0 and pages, each of another tensor")

    @classmethod
    def of(cls, group_idx: int, num_blocks: int, refs: Iterable[tuple[int, int]]) -> GroupLayout:
        """Build a layout from (tensor_idx, nbytes) pairs, one per layer, in the engine's order.

        Layers that share one tensor (vLLM's register_kv_caches gives equal views one tensor_idx)
        would name the same bytes twice: the first place is kept, with the largest size.
        """
        sizes: dict[int, int] = {}
        for tensor_idx, nbytes in refs:
            sizes[tensor_idx] = max(nbytes, sizes.get(tensor_idx, 0))
        return cls(group_idx, num_blocks, tuple(PageRef(t, n) for t, n in sizes.items()))

    @cached_property
    def block_nbytes(self) -> int:
        """Bytes of one block: the sum of its pages."""
        return sum(page.nbytes for page in self.pages)

    @property
    def content_nbytes(self) -> int:
        """Bytes of a full chunk that mean something."""
        return self.num_blocks * self.block_nbytes

    @property
    def payload_nbytes(self) -> int:
        """Bytes of a chunk's payload in the file: the content rounded up to 4096."""
        return _cdiv(self.content_nbytes, PAYLOAD_ALIGNMENT) * PAYLOAD_ALIGNMENT


class Span(NamedTuple):
    """Contiguous bytes of one transfer, equal in length on both sides. Offsets are bytes."""

    tensor_idx: int
    tensor_offset: int
    payload_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)  # arrays do not compare as values
class ChunkPlan:
    """What one transfer moves of one chunk: blocks [first_block, first_block + num_blocks) of it.

    `key_idx` indexes the job's flat key list; `first_block` counts within the chunk. `table` is int64
    (n, 4), a row for each Span, C-contiguous; sorted by payload_offset, it covers exactly those blocks'
    bytes of the payload. An array, because a 32k-token prompt of a 64-layer model has 10^5 spans and this
    is the engine's thread: as Python objects they cost 1 us each.
    """

    key_idx: int
    layout: GroupLayout
    first_block: int
    num_blocks: int
    table: SpanTable

    @property
    def nbytes(self) -> int:
        """KV bytes that are moved."""
        return self.num_blocks * self.layout.block_nbytes

    @property
    def spans(self) -> tuple[Span, ...]:
        """The table as Spans, for those who copy one by one."""
        return tuple(Span(*row) for row in self.table.tolist())


@dataclass(frozen=True, slots=True)
class JobPlan:
    """The chunks of a job in key order, and the keys for which no transfer is known to be right.

    A store drops `skipped_keys` (they stay absent); a load reports them as failed.
    """

    chunks: tuple[ChunkPlan, ...]
    skipped_keys: tuple[int, ...]


def plan_job(
    layouts: Sequence[GroupLayout],
    block_strides: Sequence[int],
    keys_per_group: Sequence[int],
    block_ids: Sequence[int],
    group_sizes: Sequence[int],
    block_indices: Sequence[int],
    *,
    complete_tail: bool = False,
) -> JobPlan:
    """Lay out the byte spans of one load or store job.

    All per-group sequences are by position and equally long. `block_strides[tensor_idx]` is the
    distance in bytes between consecutive blocks of a tensor. `block_ids` is flat over the
    groups, `group_sizes[g]` of them each, for the consecutive blocks of the request from
    `block_indices[g]` on; the group's first chunk starts at `block_indices[g] %
    blocks_per_chunk`, its last one may be a prefix (vLLM's GPULoadStoreSpec). Keys are flat in
    the same order. With `complete_tail` (stores) a group whose last chunk would be a prefix is
    skipped. Raises ValueError for sequences that contradict each other: a programming error.
    """
    per_group = {
        "keys_per_group": keys_per_group,
        "group_sizes": group_sizes,
        "block_indices": block_indices,
    }
    for name, values in per_group.items():
        if len(values) != len(layouts) or any(value < 0 for value in values):
            raise ValueError(f"{name} is {values}; expected {len(layouts)} entries, none negative")
    if sum(group_sizes) != len(block_ids) or any(block_id < 0 for block_id in block_ids):
        want = f"expected {sum(group_sizes)} entries, none negative"
        raise ValueError(f"block_ids is {block_ids}; {want}")
    if any(
        size and not num_keys for size, num_keys in zip(group_sizes, keys_per_group, strict=True)
    ):
        # Nothing would be skipped and nothing moved: a load would leave those pages as they are.
        raise ValueError(f"keys_per_group {keys_per_group} for group_sizes {group_sizes}")
    chunks: list[ChunkPlan] = []
    skipped: list[int] = []
    first_key = first_id = 0
    for layout, num_keys, size, index in zip(
        layouts, keys_per_group, group_sizes, block_indices, strict=True
    ):
        keys = range(first_key, first_key + num_keys)
        ids = block_ids[first_id : first_id + size]
        first_key, first_id = keys.stop, first_id + size
        head = index % layout.num_blocks
        # No block, no key: the index of an empty group says nothing (vLLM puts the end there).
        covered = head + size if size else 0
        # vLLM's _build_store_jobs leaves out null blocks (slid out of the window, or re-used)
        # without saying where, and keeps the position of the first block only. Every block left
        # out after that one makes head + size smaller than keys * blocks_per_chunk, by exactly
        # one: with equality each block's place is known, without it none is, and storing by
        # guess would put wrong KV under a good key.
        exact = covered == num_keys * layout.num_blocks
        if num_keys != _cdiv(covered, layout.num_blocks) or (complete_tail and not exact):
            skipped.extend(keys)
            continue
        tables = _span_tables(layout, block_strides, ids, head)
        taken = 0
        for key_idx, table in zip(keys, tables, strict=True):
            first = 0 if taken else head
            num_blocks = min(layout.num_blocks - first, size - taken)
            chunks.append(ChunkPlan(key_idx, layout, first, num_blocks, table))
            taken += num_blocks
    return JobPlan(tuple(chunks), tuple(skipped))


def plan_at(layout: GroupLayout, offset: int) -> ChunkPlan:
    """Plan a chunk of one page, wherever it lies: `offset` bytes into its tensor. Raises ValueError."""
    if layout.num_blocks != 1 or len(layout.pages) != 1 or offset < 0:
        raise ValueError(f"offset {offset} of {layout}: needs one block of one page")
    (page,) = layout.pages
    table = np.array([[page.tensor_idx, offset, 0, page.nbytes]], np.int64)
    return ChunkPlan(0, layout, 0, 1, table)


def _span_tables(
    layout: GroupLayout, block_strides: Sequence[int], block_ids: Sequence[int], first_block: int
) -> list[SpanTable]:
    """List the spans of consecutive blocks, a table for each chunk; neighbours on both sides become one.

    `first_block` is the place of the first block in its chunk.
    """
    for page in layout.pages:
        stride = block_strides[page.tensor_idx] if page.tensor_idx < len(block_strides) else None
        if stride is None or page.nbytes > stride:
            raise ValueError(f"{page}: its tensor's stride is {stride}; expected at least nbytes")
    if not len(block_ids):
        return []
    # int64: an engine's ids may be numpy int32, whose product overflows at 2 GiB.
    ids = np.asarray(block_ids, np.int64)
    sizes = np.array([page.nbytes for page in layout.pages], np.int64)
    strides = np.array([block_strides[page.tensor_idx] for page in layout.pages], np.int64)
    places = np.arange(first_block, first_block + len(ids)) % layout.num_blocks

    rows = np.empty((len(ids), len(layout.pages), 4), np.int64)
    rows[:, :, 0] = [page.tensor_idx for page in layout.pages]
    rows[:, :, 1] = ids[:, None] * strides
    rows[:, :, 2] = places[:, None] * layout.block_nbytes + (np.cumsum(sizes) - sizes)
    rows[:, :, 3] = sizes
    table = rows.reshape(-1, 4)

    starts_chunk = np.repeat(places == 0, len(layout.pages))
    starts_chunk[1:] &= table[1:, 2] == 0
    starts_chunk[0] = True
    starts_span = starts_chunk.copy()
    ends = table[:, 1] + table[:, 3]
    starts_span[1:] |= (table[1:, 0] != table[:-1, 0]) | (table[1:, 1] != ends[:-1])
    at = np.flatnonzero(starts_span)
    if len(at) < len(table):
        nbytes = np.add.reduceat(table[:, 3], at)
        table, starts_chunk = table[at], starts_chunk[at]
        table[:, 3] = nbytes
    bounds = [*np.flatnonzero(starts_chunk).tolist(), len(table)]
    return [table[start:stop] for start, stop in pairwise(bounds)]
