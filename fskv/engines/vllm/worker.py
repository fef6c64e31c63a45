"""The worker's side of the vLLM adapter: fskv.offload.Mover in the words of vLLM's offloading worker.

Called on the model runner's thread of one rank; every call returns without waiting for a disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from fskv.config import StoreConfig
from fskv.data_path.job import FileMove
from fskv.data_path.transports.protocol import Ready
from fskv.engines.vllm.budget import Reports
from fskv.engines.vllm.epochs import Step
from fskv.engines.vllm.files import WorkerFiles, file_layouts
from fskv.engines.vllm.identity import EngineGroup
from fskv.engines.vllm.manager import ChunkKeys, FskvHandshake
from fskv.engines.vllm.metrics import to_stats
from fskv.engines.vllm.weights import Purity, Served
from fskv.hybrid_planner import plan_job
from fskv.namespace import Json
from fskv.observe import metrics
from fskv.offload.mover import Mover, News
from fskv.offload.opener import Opener
from fskv.root.root import NamespaceDir
from fskv.types import FileId, Status, Use


class FskvWorker(OffloadingWorker):
    """Stores and loads the chunks of one rank; `Mover` does the work."""

    def __init__(
        self,
        config: StoreConfig,
        groups: Sequence[EngineGroup],
        files: WorkerFiles,
        directory: NamespaceDir,
        *,
        open_namespace: Callable[[Mapping[str, Json]], NamespaceDir],
        purity: Purity,
        rank: int,
        world_size: int,
        layouts: Mapping[str, Json] = MappingProxyType({}),
        prefix_caching: bool = True,
    ) -> None:
        """`layouts` is how pages are laid out inside where the namespace does not say it, by group.

        `open_namespace` opens the namespace of an epoch. While `purity` refuses, nothing is loaded or stored.
        """
        self.purity = purity
        self._opener = Opener(lambda sources: self.mover.opened(lambda: open_namespace(sources)))
        self._files = files
        self._rank = rank
        self._group_idxs = [group.spec.group_idx for group in groups]
        self._strides = [t.stride(0) for t in files.tensors]
        self.mover = Mover(
            config,
            directory,
            files.tensors,
            file_layouts(groups, files.layouts[0], layouts),
            number=rank,
            restore=lambda: open_namespace({}),
        )
        self._failed_jobs: set[int] = set()
        self._loads: Reports = {}  # since `take_loads`
        self.handshake = FskvHandshake(
            rank=rank,
            world_size=world_size,
            blocks_per_chunk=files.layouts[0][0].num_blocks,
            directory=directory,
            file_nbytes=self.mover.file_nbytes,
            file_ranks=files.file_ranks,
            prefix_caching=prefix_caching,
            is_local=self.mover.is_local,
        )

    # --- OffloadingWorker -------------------------------------------------------------------

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        assert isinstance(dst_spec, ChunkKeys)
        moves = self._plan(dst_spec, src_spec, is_load=False)
        # The forward that fills the pages may still run on the GPU (vLLM submits the stores of one
        # step at the start of the next).
        self.mover.store(job_id, moves, self._event())
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """`expedited` (vLLM 0.33) cannot be asked for: synchronous loads are refused at start-up."""
        assert isinstance(src_spec, ChunkKeys)
        moves = self._plan(src_spec, dst_spec, is_load=True)
        # The pages' last user, or the kernel that zeroes them, may still run on the GPU.
        self.mover.load(
            job_id, moves, self._event(), src_spec.allowed_s, refused=self.purity.refuses
        )
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that ended, all as successes: vLLM asserts it; see take_failed_jobs."""
        ended = self.mover.poll()
        self._loads |= {result.job_id: [result] for result in ended if result.is_load}
        # One that was under way when somebody began to replace the weights has brought KV of the old ones.
        refuses = self.purity.refuses
        self._failed_jobs |= {
            result.job_id for result in ended if result.failed or (result.is_load and refuses)
        }
        return [
            TransferResult(
                job_id=result.job_id,
                success=True,
                transfer_size=result.nbytes,
                transfer_time=result.seconds,
            )
            for result in ended
        ]

    def wait(self, job_ids: set[int]) -> None:
        self.mover.free_pages(job_ids)

    def touch(self, keys: ChunkKeys) -> None:
        """Note a use of chunks by a request that does not load all of them."""
        self.mover.touch(
            [
                (FileId(chunk.key_hash, chunk.group_idx, file_rank), use)
                for n, chunk in enumerate(keys.chunks)
                if self._files.writes(chunk.key_hash) and (use := self._use(keys, n)) is not None
                for file_rank in self._files.file_ranks
            ]
        )

    def _use(self, keys: ChunkKeys, key_idx: int) -> Use | None:
        return None if keys.use is None else self.mover.use(keys.use, keys.depths[key_idx])

    def shutdown(self) -> None:
        self.mover.close()

    # --- epochs -----------------------------------------------------------------------------

    def on_step(self, step: Step) -> None:
        """Begin a step, and go on to its epoch once that is open."""
        self.purity.on_step(step.cache, step.number)
        changes = step.changes[self._rank]
        if step.epoch == self.purity.state.epoch or changes != self.purity.counts[0]:
            return
        opened = self._opener.take(step.sources)
        if opened is not None:
            directory, store = opened
            self.mover.move_to(store)
            self.purity.serve(step.epoch, changes, directory)

    def take_served(self) -> dict[int, Served]:
        """Return what the scheduler must know of the weights, by rank."""
        told = self.purity.take_news()
        return {} if told is None else {self._rank: told}

    # --- for the connector ------------------------------------------------------------------

    def drop_jobs(self, deferred: Iterable[LoadStoreSpec] = ()) -> None:
        """Touch no page of any job from now on: the manager has been reset. See Mover.drop.

        `deferred` are stores that vLLM had not submitted yet.
        """
        self.mover.drop()
        for keys in deferred:
            assert isinstance(keys, ChunkKeys)
            self.mover.counters.add(metrics.STORES_SKIPPED, len(keys.chunks), Status.SKIPPED.value)

    def take_failed_jobs(self) -> set[int]:
        """Return the load jobs that get_finished reported and whose pages hold nothing to rely on."""
        failed, self._failed_jobs = self._failed_jobs, set()
        return failed

    def take_news(self) -> News:
        return self.mover.take_news()

    def take_loads(self) -> Reports:
        """Return how load jobs ended since the last call, by job id."""
        loads, self._loads = self._loads, {}
        return loads

    def get_stats(self) -> OffloadingConnectorStats | None:
        counters = self.mover.counters
        return to_stats(counters.drain(), self.mover.gauges(), counters.drain_observed())

    def _event(self) -> Ready | None:
        """Return an event after everything the engine has launched so far; None without CUDA."""
        if not self.mover.on_cuda:
            return None
        event = torch.cuda.Event(blocking=True)  # the thread that waits for it must not spin
        event.record()
        ready: Ready = event
        return ready

    def _plan(self, keys: ChunkKeys, pages: GPULoadStoreSpec, *, is_load: bool) -> list[FileMove]:
        per_group = dict.fromkeys(self._group_idxs, 0)
        for group_idx, members in groupby(keys.chunks, key=lambda chunk: chunk.group_idx):
            per_group[group_idx] += sum(1 for _ in members)
        plans = [
            plan_job(
                layouts,
                self._strides,
                [per_group[idx] for idx in self._group_idxs],
                pages.block_ids.tolist(),
                pages.group_sizes,
                pages.block_indices,
                complete_tail=not is_load,
            )
            for layouts in self._files.layouts
        ]
        if skipped := plans[0].skipped_keys:  # it depends on the blocks alone
            if is_load:
                raise AssertionError(f"vLLM asked to load blocks without keys: {pages!r}")
            for key_idx in skipped:
                self.mover.leave(keys.chunks[key_idx], Status.SKIPPED)
            self.mover.counters.add(metrics.STORES_SKIPPED, len(skipped), "incomplete")
        moves = []
        # Chunk by chunk: a queue that takes some of the files takes whole chunks.
        for of_chunk in zip(*(plan.chunks for plan in plans), strict=True):
            chunk = keys.chunks[of_chunk[0].key_idx]
            if not is_load:
                if self.purity.refuses:
                    self.mover.leave(chunk, Status.SKIPPED)
                    continue
                if not self._files.writes(chunk.key_hash):
                    # Another rank with the same bytes does: a hit when that one has reported too.
                    self.mover.leave(chunk, Status.EXISTS)
                    continue
            use = self._use(keys, of_chunk[0].key_idx)
            moves += [
                FileMove(FileId(chunk.key_hash, chunk.group_idx, file_rank), plan, use)
                for file_rank, plan in zip(self._files.file_ranks, of_chunk, strict=True)
            ]
        return moves
