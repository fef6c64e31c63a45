"""Plans the copies of a job: the bytes of each chunk and their place in KV pages. Pure.

`GroupLayout` describes how pages make a chunk's payload. `plan_job` turns a job of the engine (block ids,
group by group) into the blocks of each chunk, and csrc/pages.c turns those into byte spans. The engine's
adapter calls it on any thread; `runner` carries the plans out.

Invariant: `plan_job` plans for a key exactly that key's bytes in that key's order, or nothing. A guess here
would be wrong KV later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fskv.format.chunk_file import align

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
    """The layout of one chunk of a group in its payload.

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

    def placed(self, block_strides: Sequence[int]) -> Placement:
        """Return where blocks are in tensors with these distances between two of them, in bytes.

        Raises ValueError where a page is longer than its tensor's.
        """
        found = self._placements.get(strides := tuple(block_strides))
        if found is None:
            for page in self.pages:
                stride = strides[page.tensor_idx] if page.tensor_idx < len(strides) else None
                if stride is None or page.nbytes > stride:
                    raise ValueError(
                        f"{page}: its tensor's stride is {stride}; expected at least nbytes"
                    )
            places = [(p.tensor_idx, 0, strides[p.tensor_idx], p.nbytes) for p in self.pages]
            found = self._placements[strides] = Placement(self, tuple(places))
        return found

    @cached_property
    def anywhere(self) -> Placement:
        """The placement of one block at offset 0 of each tensor; a plan's `base` says where the block is."""
        return Placement(self, tuple((page.tensor_idx, 0, 0, page.nbytes) for page in self.pages))

    @cached_property
    def _placements(self) -> dict[tuple[int, ...], Placement]:
        return {}

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
        return align(self.content_nbytes)


class Span(NamedTuple):
    """Contiguous bytes of one transfer, equal in length on both sides. Offsets are bytes."""

    tensor_idx: int
    tensor_offset: int
    payload_offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)  # itself only: a key for what is made of it once
class Placement:
    """The place of a group's blocks: page i of block b is at `offset + b * stride` of its tensor.

    `places` are (tensor_idx, offset, stride, nbytes) of the layout's pages, in bytes. Made once and kept:
    `GroupLayout.placed` does.
    """

    layout: GroupLayout
    places: tuple[tuple[int, int, int, int], ...]


class ChunkPlan(NamedTuple):
    """The blocks of one chunk that one transfer moves: as many as there are ids, from `first_block` on.

    `key_idx` indexes the job's flat key list; `first_block` counts within the chunk. Block i of them is the
    engine's `block_ids[i]`, `base` bytes further on in each tensor. A tuple, and no table: a model of 80
    layers has 10^3 spans in a chunk, and this is the engine's thread.
    """

    key_idx: int
    placement: Placement
    first_block: int
    block_ids: tuple[int, ...]
    base: int = 0

    @property
    def layout(self) -> GroupLayout:
        return self.placement.layout

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids)

    @property
    def to_end(self) -> bool:
        """Return whether the plan includes the last block of the chunk."""
        return self.first_block + len(self.block_ids) >= self.placement.layout.num_blocks

    @property
    def nbytes(self) -> int:
        """Number of KV bytes that this plan moves."""
        return len(self.block_ids) * self.placement.layout.block_nbytes

    @property
    def table(self) -> SpanTable:
        """The plan's spans as int64 (n, 4), C-contiguous, made anew by each call; csrc/pages.c does the same.

        Sorted by payload_offset, it covers exactly those blocks' bytes of the payload; neighbours on both
        sides are one.
        """
        layout = self.placement.layout
        places = np.array(self.placement.places, np.int64)
        # int64: an engine's ids may be numpy int32, whose product overflows at 2 GiB.
        ids = np.asarray(self.block_ids, np.int64)
        blocks = np.arange(self.first_block, self.first_block + len(ids), dtype=np.int64)
        rows = np.empty((len(ids), len(places), 4), np.int64)
        rows[:, :, 0] = places[:, 0]
        rows[:, :, 1] = self.base + places[:, 1] + ids[:, None] * places[:, 2]
        rows[:, :, 2] = (
            blocks[:, None] * layout.block_nbytes + np.cumsum(places[:, 3]) - places[:, 3]
        )
        rows[:, :, 3] = places[:, 3]
        table = rows.reshape(-1, 4)
        starts = np.ones(len(table), bool)
        ends = table[:, 1] + table[:, 3]
        starts[1:] = (table[1:, 0] != table[:-1, 0]) | (table[1:, 1] != ends[:-1])
        at = np.flatnonzero(starts)
        nbytes = np.add.reduceat(table[:, 3], at)
        table = table[at]
        table[:, 3] = nbytes
        return table

    @property
    def spans(self) -> tuple[Span, ...]:
        """The rows of `table` as Span objects, for transports that copy one span at a time."""
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
    """Say which blocks of which chunks one load or store job moves.

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
    if sum(group_sizes) != len(block_ids) or (len(block_ids) and min(block_ids) < 0):
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
        ids = tuple(block_ids[first_id : first_id + size])  # ours: they may be read much later
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
        placement = layout.placed(block_strides)
        start, first = 0, head
        for key_idx in keys:
            stop = start + layout.num_blocks - first
            chunks.append(ChunkPlan(key_idx, placement, first, ids[start:stop]))
            start, first = stop, 0
    return JobPlan(tuple(chunks), tuple(skipped))


def plan_at(layout: GroupLayout, offset: int) -> ChunkPlan:
    """Plan a chunk of one page, wherever it lies: `offset` bytes into its tensor. Raises ValueError."""
    if layout.num_blocks != 1 or len(layout.pages) != 1 or offset < 0:
        raise ValueError(f"offset {offset} of {layout}: needs one block of one page")
    return ChunkPlan(0, layout.anywhere, 0, (0,), offset)
