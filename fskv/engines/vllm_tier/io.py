"""Moves chunks between rows of vLLM's CPU tier and files: Mover with rows where a worker has GPU pages.

Called on the scheduler's thread; every call returns without waiting for a disk. All ranks' files of a chunk
are moved from here, because a row holds the pages of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from fskv.config import StoreConfig
from fskv.data_path.job import FileMove, JobResult
from fskv.engines.vllm.files import file_layouts
from fskv.engines.vllm.manager import FskvHandshake
from fskv.engines.vllm_tier.workers import Workers
from fskv.observe.metrics import Counters, Gauge
from fskv.offload.mover import Mover, News
from fskv.root.root import NamespaceDir
from fskv.types import ChunkId, FileId

if TYPE_CHECKING:
    import torch


class RowMover:
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
        """`memory` is the CPU tier, int8 (rows, bytes). It must stay mapped until `close` has returned."""
        layouts = [row.layout for row in workers.rows[0]]
        self.mover = Mover(
            config, directory, (memory,), file_layouts(workers.groups, layouts), restore=restore
        )
        self.handshake = FskvHandshake(
            rank=0,
            world_size=1,
            blocks_per_chunk=layouts[0].num_blocks,
            namespace_path=directory.path,
            namespace_digest=directory.digest,
            dir_mode=directory.dir_mode,
            file_mode=directory.file_mode,
            file_nbytes=self.mover.file_nbytes,
            canonical_ranks=workers.file_ranks,
            is_local=self.mover.is_local,
        )
        self._row_nbytes = memory.stride(0)
        self._file_ranks = workers.file_ranks
        self._rows = {
            group.spec.group_idx: tuple(of_file[i] for of_file in workers.rows)
            for i, group in enumerate(workers.groups)
        }

    def store(
        self,
        job_id: int,
        chunks: Sequence[ChunkId],
        row_idxs: Sequence[int],
        uses: Sequence[tuple[int, int]],
    ) -> int:
        """Begin to store; the rows are free when the job is reported. Returns the bytes that it has.

        `uses` are of the chunks: its number (FskvManager.begin_use), and the depth in the prefix.
        """
        moves = self._moves(chunks, row_idxs, uses)
        self.mover.store(job_id, moves)
        return sum(move.plan.nbytes for move in moves)

    def load(
        self,
        job_id: int,
        chunks: Sequence[ChunkId],
        row_idxs: Sequence[int],
        uses: Sequence[tuple[int, int]],
    ) -> None:
        """Begin to load; no row is written any more when the job is reported."""
        self.mover.load(job_id, self._moves(chunks, row_idxs, uses))

    def _moves(
        self, chunks: Sequence[ChunkId], row_idxs: Sequence[int], uses: Sequence[tuple[int, int]]
    ) -> list[FileMove]:
        return [
            FileMove(
                FileId(chunk.key_hash, chunk.group_idx, file_rank),
                row.plan(key_idx, row_idx, self._row_nbytes),
                self.mover.use(*uses[key_idx]),
            )
            for key_idx, (chunk, row_idx) in enumerate(zip(chunks, row_idxs, strict=True))
            for file_rank, row in zip(self._file_ranks, self._rows[chunk.group_idx], strict=True)
        ]


class RestingRows:
    """Stands for a RowMover where it is not known how KV lies in rows: none is read, and none is written.

    Every job ends at once. The manager finds nothing and takes nothing, so there are none with chunks.
    """

    def __init__(self) -> None:
        self.mover = _RestingMover()

    def store(
        self,
        job_id: int,
        chunks: Sequence[ChunkId],
        row_idxs: Sequence[int],
        uses: Sequence[tuple[int, int]],
    ) -> int:
        self.mover.end(JobResult(job_id, is_load=False, failed=False, nbytes=0, seconds=0.0))
        return 0

    def load(
        self,
        job_id: int,
        chunks: Sequence[ChunkId],
        row_idxs: Sequence[int],
        uses: Sequence[tuple[int, int]],
    ) -> None:
        bad = tuple(FileId(*chunk) for chunk in chunks)
        self.mover.end(JobResult(job_id, is_load=True, failed=True, nbytes=0, seconds=0.0, bad=bad))


class _RestingMover:
    """As much of a Mover as the tier asks."""

    def __init__(self) -> None:
        self.counters = Counters()
        self._ended: list[JobResult] = []

    def end(self, result: JobResult) -> None:
        self._ended.append(result)

    def poll(self) -> list[JobResult]:
        ended, self._ended = self._ended, []
        return ended

    def take_news(self) -> News:
        return News()

    def gauges(self) -> dict[Gauge, float]:
        return {}

    def free_pages(self, job_ids: Iterable[int]) -> None:
        """No row is in use."""

    def drop(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing runs."""
