"""Where the pages of a chunk lie in a row of vLLM's CPU tier, and how they get from there to files.

vLLM's tiering copies every chunk into one row of shared memory: the ranks side by side, in each the tensors
side by side, in each the chunk's blocks side by side, every block padded to the tensor's page; then padding
to 4096 bytes. A row holds the chunk of one KV group, so what other groups have of a tensor is padding too.
fskv's file holds the bytes that FskvConnector takes from the GPU: block by block, page by page, no padding.
With canonical pages a row holds one copy of them, whole, for all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from fskv.data_path.job import FileMove
from fskv.engines.vllm.manager import ChunkKeys
from fskv.engines.vllm.worker import FskvWorker
from fskv.plan.spans import ChunkPlan, Placement
from fskv.types import FileId

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import BlockIDsLoadStoreSpec

    from fskv.engines.vllm.files import WorkerFiles


class RowWorker(FskvWorker):
    """A FskvWorker whose pages are rows of the CPU tier, those of all ranks.

    Its only tensor is the tier, int8 (rows, bytes). It must stay mapped until `shutdown` has returned.
    """

    placements: Mapping[int, Sequence[Placement]]  # by group index, a file each; set before any job

    def _plan(
        self, keys: ChunkKeys, pages: BlockIDsLoadStoreSpec, *, is_load: bool
    ) -> list[FileMove]:
        """Plan the whole of each chunk, between its files and its row."""
        (row_nbytes,) = self._strides
        return [
            FileMove(
                FileId(chunk.key_hash, chunk.group_idx, file_rank),
                plan_row(n, placement, row * row_nbytes),
                self._use(keys, n),
            )
            for n, (chunk, row) in enumerate(
                zip(keys.chunks, pages.block_ids.tolist(), strict=True)
            )
            for file_rank, placement in zip(
                self._files.file_ranks, self.placements[chunk.group_idx], strict=True
            )
        ]


def plan_row(key_idx: int, placement: Placement, base: int) -> ChunkPlan:
    """Return the transfer of the whole chunk between its file and the row that begins at `base`."""
    return ChunkPlan(key_idx, placement, 0, tuple(range(placement.layout.num_blocks)), base)


def placements_of(files: WorkerFiles) -> dict[int | None, tuple[Placement, ...]]:
    """Return where the pages of files lie in any row: by the rank in a file's name, then by group.

    `files` are of the first row's blocks. Raises ValueError where a page is longer than its place.
    """
    strides = [tensor.stride(0) for tensor in files.tensors]
    offsets = [int(tensor.storage_offset()) for tensor in files.tensors]
    found = {}
    for file_rank, layouts in zip(files.file_ranks, files.layouts, strict=True):
        found[file_rank] = tuple(
            Placement(
                layout, tuple((0, offsets[t], stride, nbytes) for t, _, stride, nbytes in places)
            )
            for layout in layouts
            for places in (layout.placed(strides).places,)
        )
    return found


def fit(placements: Sequence[Placement], row_nbytes: int) -> bool:
    """Whether the pages of a chunk's files lie in a row, each in a place of its own."""
    spans = [span for placement in placements for span in plan_row(0, placement, 0).spans]
    starts = sorted((span.tensor_offset, span.nbytes) for span in spans)
    return all(
        start + nbytes <= following
        for (start, nbytes), (following, _) in pairwise([*starts, (row_nbytes, 0)])
    )
