"""Moves chunks between rows of vLLM's CPU tier and files: FskvWorker with rows where it has GPU pages.

Called on the scheduler's thread; every call returns without waiting for a disk. All ranks' files of a chunk
are moved from here, because a row holds the pages of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fskv.config import StoreConfig
from fskv.data_path.job import ChunkRequest
from fskv.engines.vllm.files import RankFiles
from fskv.engines.vllm.worker import FskvWorker
from fskv.engines.vllm_tier.workers import Workers
from fskv.root.root import NamespaceDir
from fskv.types import ChunkId

if TYPE_CHECKING:
    import torch


class RowWorker(FskvWorker):
    """See the module docstring."""

    def __init__(
        self,
        config: StoreConfig,
        workers: Workers,
        memory: torch.Tensor,
        directory: NamespaceDir,
        *,
        restore: Callable[[], object],
    ) -> None:
        """`memory` is the CPU tier, int8 (rows, bytes). It must stay mapped until `shutdown` has returned."""
        layouts = tuple(tuple(row.layout for row in of_file) for of_file in workers.rows)
        super().__init__(
            config,
            workers.groups,
            layouts[0][0].num_blocks,
            RankFiles((memory,), layouts, workers.file_ranks),
            directory,
            restore=restore,
            rank=0,
            world_size=1,
        )
        self._row_nbytes = memory.stride(0)
        self._rows = {
            group.spec.group_idx: tuple(of_file[i] for of_file in workers.rows)
            for i, group in enumerate(workers.groups)
        }

    def store_rows(self, job_id: int, chunks: Sequence[ChunkId], row_idxs: Sequence[int]) -> int:
        """Begin to store; the rows are free when the job is reported. Returns the bytes that it has."""
        for chunk in chunks:
            self._tally.begin(chunk)
        requests = self._requests(chunks, row_idxs)
        self._runner.submit_store(job_id, requests, None)
        return sum(request.plan.nbytes for request in requests)

    def load_rows(self, job_id: int, chunks: Sequence[ChunkId], row_idxs: Sequence[int]) -> None:
        """Begin to load; no row is written any more when the job is reported."""
        self._runner.submit_load(job_id, self._requests(chunks, row_idxs), None)

    @property
    def files_per_chunk(self) -> int:
        return self._num_files

    def _requests(self, chunks: Sequence[ChunkId], row_idxs: Sequence[int]) -> list[ChunkRequest]:
        return [
            ChunkRequest(
                self._file_id(chunk, file_idx), row.plan(key_idx, row_idx, self._row_nbytes)
            )
            for key_idx, (chunk, row_idx) in enumerate(zip(chunks, row_idxs, strict=True))
            for file_idx, row in enumerate(self._rows[chunk.group_idx])
        ]
