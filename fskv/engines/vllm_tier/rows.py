"""Where the pages of a chunk lie in a row of vLLM's CPU tier.

vLLM's tiering copies every chunk into one row of shared memory: the ranks side by side, in each the tensors
side by side, in each the chunk's blocks side by side, every block padded to the tensor's page; then padding
to 4096 bytes. A row holds the chunk of one KV group, so what other groups have of a tensor is padding too.
fskv's file holds the bytes that FskvConnector takes from the GPU: block by block, page by page, no padding.

Pure but for the view it makes of the memory. Invariant: a `RowLayout` names each byte of a chunk's payload
exactly once, or there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from fskv.engines.vllm.identity import EngineGroup
from fskv.errors import ConfigError
from fskv.plan.spans import ChunkPlan, GroupLayout, Placement

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """What one rank has of one tensor in every row: `blocks` pages of `stride` bytes from `offset` on."""

    offset: int
    stride: int


@dataclass(frozen=True)
class RowLayout:
    """One chunk file's payload in a row: page i of block b is at `offsets[i] + b * strides[i]`."""

    layout: GroupLayout
    offsets: tuple[int, ...]
    strides: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = [page.nbytes for page in self.layout.pages]
        if not len(sizes) == len(self.offsets) == len(self.strides):
            raise ValueError(f"{self}: expected an offset and a stride for each page")
        if any(n > stride for n, stride in zip(sizes, self.strides, strict=True)):
            raise ValueError(f"{self}: a page is longer than its place")
        spans = sorted(self._spans)
        if any(start + n > following for (start, _, n), (following, _, _) in pairwise(spans)):
            raise ValueError(f"{self}: pages overlap")

    @property
    def _spans(self) -> list[tuple[int, int, int]]:
        """Every page as (place in the row, place in the payload, bytes), in the payload's order."""
        spans = []
        at = 0
        for block in range(self.layout.num_blocks):
            for page, offset, stride in zip(
                self.layout.pages, self.offsets, self.strides, strict=True
            ):
                spans.append((offset + block * stride, at, page.nbytes))
                at += page.nbytes
        return spans

    @cached_property
    def end(self) -> int:
        """Where in the row the last page ends."""
        return max(start + nbytes for start, _, nbytes in self._spans)

    @cached_property
    def _placement(self) -> Placement:
        """All of it is in tensor 0."""
        pages = zip(self.layout.pages, self.offsets, self.strides, strict=True)
        places = tuple((0, offset, stride, page.nbytes) for page, offset, stride in pages)
        return Placement(self.layout, places)

    @cached_property
    def _block_ids(self) -> tuple[int, ...]:
        return tuple(range(self.layout.num_blocks))

    def plan(self, key_idx: int, row_idx: int, row_nbytes: int) -> ChunkPlan:
        """Return the transfer of the whole chunk between its file and row `row_idx` of tensor 0."""
        if row_idx < 0:
            raise ValueError(f"row {row_idx}")
        base = int(row_idx) * row_nbytes  # int: an int32 would overflow at 2 GiB
        return ChunkPlan(key_idx, self._placement, 0, self._block_ids, base)


def own_rows(
    groups: Sequence[EngineGroup],
    blocks_per_chunk: int,
    refs: Sequence[Sequence[tuple[int, int]]],
    tensors: Sequence[PlacedTensor],
) -> tuple[RowLayout, ...]:
    """Return the layouts of a rank's own pages, by group; `refs` are (tensor, un-padded bytes) by group."""
    return tuple(
        _row_layout(
            GroupLayout.of(group.spec.group_idx, blocks_per_chunk, of_group),
            [(tensors[tensor_idx], 0) for tensor_idx, _ in of_group],
            [tensor_idx for tensor_idx, _ in of_group],
        )
        for group, of_group in zip(groups, refs, strict=True)
    )


def slice_rows(
    groups: Sequence[EngineGroup],
    blocks_per_chunk: int,
    refs: Sequence[Sequence[tuple[int, int]]],
    tensors: Sequence[PlacedTensor],
    num_slices: int,
) -> tuple[tuple[RowLayout, ...], ...]:
    """Return the layouts of all slices of canonical pages, by slice and group (see vllm.files).

    `refs` are (tensor, bytes of the canonical page) by group. Raises ConfigError unless pages are made of
    whole slices.
    """
    for of_group in refs:
        if any(nbytes % num_slices for _, nbytes in of_group):
            raise ConfigError(
                f"option 'canonical_layout': found true, expected false: canonical pages of {list(of_group)} "
                f"bytes are not made of {num_slices} whole slices"
            )
    return tuple(
        tuple(
            _row_layout(
                GroupLayout.of(
                    group.spec.group_idx,
                    blocks_per_chunk,
                    [(t, n // num_slices) for t, n in of_group],
                ),
                [(tensors[t], number * (n // num_slices)) for t, n in of_group],
                [t for t, _ in of_group],
            )
            for group, of_group in zip(groups, refs, strict=True)
        )
        for number in range(num_slices)
    )


def _row_layout(
    layout: GroupLayout, places: Sequence[tuple[PlacedTensor, int]], tensor_idxs: Sequence[int]
) -> RowLayout:
    by_tensor = dict(zip(tensor_idxs, places, strict=True))
    of_page = [by_tensor[page.tensor_idx] for page in layout.pages]
    return RowLayout(
        layout,
        tuple(tensor.offset + within for tensor, within in of_page),
        tuple(tensor.stride for tensor, _ in of_page),
    )


def rows_of(view: memoryview) -> torch.Tensor:
    """Return the CPU tier's memory as the int8 (rows, bytes) tensor that it is, without copying.

    Not through numpy, which would hold the memoryview's buffer: vLLM releases it when the engine stops, and
    a buffer that is held makes that fail.
    """
    import torch

    num_rows, row_nbytes = view.shape or (0, 0)
    return torch.frombuffer(view, dtype=torch.int8).view(num_rows, row_nbytes)
