"""The worker's side of the vLLM adapter: translates jobs, runs them, reports what became of them.

Called on the model runner's thread of one rank; every call returns without waiting for a disk.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)

from fskv.config import StoreConfig
from fskv.data_path.breaker import Breaker
from fskv.data_path.job import ChunkOutcome, ChunkRequest
from fskv.data_path.runner import JobRunner
from fskv.data_path.store import ChunkStore
from fskv.engines.vllm.budget import LoadReport, take_reports
from fskv.engines.vllm.files import RankFiles
from fskv.engines.vllm.identity import EngineGroup, layout_digest
from fskv.engines.vllm.manager import ChunkKeys, FskvHandshake
from fskv.engines.vllm.metrics import Gauge, to_stats
from fskv.engines.vllm.slices import SlicedStore, StoreTally, chunk_of, file_id
from fskv.errors import ConfigError
from fskv.format.chunk_file import CHECKSUM, FileLayout
from fskv.format.key_file import open_key_file
from fskv.format.mac import INTEGRITY
from fskv.namespace import Json
from fskv.observe import metrics
from fskv.observe.metrics import Counters
from fskv.observe.state_log import StateLog
from fskv.plan.spans import plan_job
from fskv.root.root import NamespaceDir
from fskv.transports import numa
from fskv.transports.choice import open_transport
from fskv.types import ChunkId, Status

logger = logging.getLogger(__name__)

# What is still being written when the engine stops may take this long; then it is left.
_SHUTDOWN_S = 5.0


class FskvWorker(OffloadingWorker):
    """See the module docstring."""

    def __init__(
        self,
        config: StoreConfig,
        groups: Sequence[EngineGroup],
        blocks_per_chunk: int,
        files: RankFiles,
        directory: NamespaceDir,
        *,
        restore: Callable[[], object],
        rank: int,
        world_size: int,
        layouts: dict[str, Json] | None = None,
        prefix_caching: bool = True,
        reloaded: Callable[[], bool] = lambda: False,
    ) -> None:
        """`layouts` is how pages are laid out inside where the namespace does not say it, by group.

        Once `reloaded` returns true, nothing is loaded or stored: the weights may not be the namespace's.
        """
        # Each process reads the file itself: no key is in the configuration or in the handshake.
        self._key_file = open_key_file(config.mac_key_file, config.root)
        keys = self._key_file.keys if self._key_file else None
        tensors = list(files.tensors)
        self._files = files
        self._num_files = len(files.file_ranks)
        self._tally = StoreTally(self._num_files)
        self._group_idxs = [group.spec.group_idx for group in groups]
        self._strides = [t.stride(0) for t in tensors]
        file_layouts = {
            layout.group_idx: FileLayout(
                layout.num_blocks,
                tuple(page.nbytes for page in layout.pages),
                layout_digest(
                    group,
                    blocks_per_chunk,
                    tuple(p.nbytes for p in layout.pages),
                    (layouts or {}).get(f"group{layout.group_idx}"),
                ),
                INTEGRITY if keys else CHECKSUM,
            )
            # The files of a chunk are all alike: equal slices of the same pages.
            for group, layout in zip(groups, files.layouts[0], strict=True)
        }
        slot_nbytes = max(layout.file_nbytes for layout in file_layouts.values())
        num_slots = config.staging_bytes // slot_nbytes
        if num_slots <= config.io_threads:
            raise ConfigError(
                f"option 'staging_bytes': found {config.staging_bytes}, expected at least "
                f"{(config.io_threads + 1) * slot_nbytes} (one chunk file of {slot_nbytes} bytes for each "
                f"of {config.io_threads} I/O threads and one more); or lower 'io_threads'"
            )
        self._transport = transport = open_transport(
            tensors,
            slot_nbytes,
            probe_dir=directory.tmp_dir,
            transport="host" if keys else config.transport,
            gds_check=config.gds_check,
            direct_io=config.direct_io,
            file_mode=directory.file_mode,
            fsync=config.fsync,
        )
        cuda = tensors[0].device if tensors and tensors[0].is_cuda else None
        if self._num_files == 1:
            store = ChunkStore(
                directory,
                file_layouts,
                transport,
                rank=files.file_ranks[0],
                touch_interval_s=config.touch_interval_s,
                restore=restore,
                keys=keys,
            )
        else:
            store = SlicedStore(
                directory,
                file_layouts,
                transport,
                file_ranks=files.file_ranks,
                touch_interval_s=config.touch_interval_s,
                restore=restore,
                keys=keys,
            )
        self._breaker = Breaker(
            config.breaker_failures,
            config.breaker_probe_s,
            log=StateLog("fskv: ", root=config.root, of=f"rank {rank}"),
        )
        self._runner = JobRunner(
            store,
            transport,
            num_threads=config.io_threads,
            num_slots=num_slots,
            max_queued_chunks=config.max_queued_chunks,
            deadline=config.deadline,
            breaker=self._breaker,
            store_queue_s=config.store_queue_s,
            cpus=numa.cuda_cpus(cuda.index) if cuda else None,
        )
        self._cuda = cuda is not None
        self._reloaded = reloaded
        self._counters = Counters(*metrics.WORKER_COUNTERS)
        self._failed_jobs: set[int] = set()
        self._outcomes: list[ChunkOutcome] = []
        self._loads: dict[int, LoadReport] = {}  # since `take_loads`
        # Of stores, since `take_written`.
        self._written_nbytes = 0
        self._no_space = False
        self.handshake = FskvHandshake(
            rank=rank,
            world_size=world_size,
            blocks_per_chunk=blocks_per_chunk,
            namespace_path=directory.path,
            namespace_digest=directory.digest,
            dir_mode=directory.dir_mode,
            file_mode=directory.file_mode,
            file_nbytes={idx: layout.file_nbytes for idx, layout in file_layouts.items()},
            canonical_ranks=files.file_ranks,
            prefix_caching=prefix_caching,
        )
        logger.info(
            "fskv: rank %d: %s%s; %d I/O threads, %d staging slots of %d bytes at most",
            rank,
            transport.description,
            f", sealed with key '{self._key_file.latest.writer.key_id}'" if self._key_file else "",
            config.io_threads,
            num_slots,
            slot_nbytes,
        )

    # --- OffloadingWorker -------------------------------------------------------------------

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        assert isinstance(dst_spec, ChunkKeys)
        requests = self._plan(dst_spec, src_spec, is_load=False)
        # The forward that fills the pages may still run on the GPU (vLLM submits the stores of one
        # step at the start of the next).
        self._runner.submit_store(job_id, requests, self._event())
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
        requests = self._plan(src_spec, dst_spec, is_load=True)
        # The pages' last user, or the kernel that zeroes them, may still run on the GPU.
        self._runner.submit_load(job_id, requests, self._event(), src_spec.limit)
        if self.reloaded:
            self._runner.wait({job_id})  # given up: it fails, and is recomputed
        return True

    @property
    def reloaded(self) -> bool:
        """Whether the weights may be others than those that the namespace names."""
        return self._reloaded()

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that ended, all as successes: vLLM asserts it; see take_failed_jobs."""
        results = []
        ended = self._runner.poll()
        self._loads |= take_reports(ended)
        for result in ended:
            if result.is_load:
                self._counters.observe(metrics.LOAD_LATENCY, result.seconds)
            if result.failed:
                self._failed_jobs.add(result.job_id)
            results.append(
                TransferResult(
                    job_id=result.job_id,
                    success=True,
                    transfer_size=result.nbytes,
                    transfer_time=result.seconds,
                )
            )
        self._collect()
        return results

    def _collect(self) -> None:
        """Take what became of single files since the last call."""
        for outcome in self._runner.take_outcomes():
            self._count(outcome)
            if not outcome.is_load:
                self._written_nbytes += outcome.nbytes
                self._no_space |= outcome.status is Status.NO_SPACE
            self._note(outcome)

    def wait(self, job_ids: set[int]) -> None:
        self._runner.wait(job_ids)

    def shutdown(self) -> None:
        self._runner.shutdown(_SHUTDOWN_S)
        self._transport.close()

    # --- for the connector ------------------------------------------------------------------

    def drop_jobs(self, deferred: Iterable[LoadStoreSpec] = ()) -> None:
        """Touch no page of any job from now on: the manager has been reset. See JobRunner.drop.

        `deferred` are stores that vLLM had not submitted yet.
        """
        self._runner.drop()
        self._collect()
        # The manager's reset has ended these. Told later, they would end what it begins to store by then.
        self._outcomes = [o for o in self._outcomes if o.is_load or o.status.good]
        for keys in deferred:
            assert isinstance(keys, ChunkKeys)
            self._counters.add(metrics.STORES_SKIPPED, len(keys.chunks), Status.SKIPPED.value)

    def take_failed_jobs(self) -> set[int]:
        """Return the load jobs that get_finished reported and whose pages hold nothing to rely on."""
        failed, self._failed_jobs = self._failed_jobs, set()
        return failed

    def take_outcomes(self) -> list[ChunkOutcome]:
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def take_loads(self) -> dict[int, LoadReport]:
        """Return how load jobs ended since the last call, by job id."""
        loads, self._loads = self._loads, {}
        return loads

    def take_written(self) -> tuple[int, bool]:
        """Return what was written since the last call, in bytes, and whether a store found the disk full.

        Of files, not of chunks: one file of a chunk may be on disk and another one fail.
        """
        written, self._written_nbytes = self._written_nbytes, 0
        no_space, self._no_space = self._no_space, False
        return written, no_space

    def get_stats(self) -> OffloadingConnectorStats | None:
        gauges: dict[Gauge, float] = {
            metrics.SLOTS_IN_USE: float(self._runner.num_slots_used),
            metrics.THREADS_HUNG: float(self._runner.num_threads_hung),
            metrics.STORE_QUEUE: float(self._runner.num_open_stores),
        }
        if self._key_file is not None:
            gauges[metrics.MAC_KEYS_KEPT] = float(self._key_file.kept)
        return to_stats(self._counters.drain(), gauges, self._counters.drain_observed())

    def _event(self) -> Any:
        """Return an event after everything the engine has launched so far; None without CUDA."""
        return torch.cuda.current_stream().record_event() if self._cuda else None

    def _plan(
        self, keys: ChunkKeys, pages: GPULoadStoreSpec, *, is_load: bool
    ) -> list[ChunkRequest]:
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
                self._report_store(keys.chunks[key_idx], Status.SKIPPED)
            self._counters.add(metrics.STORES_SKIPPED, len(skipped), "incomplete")
        requests = []
        # Chunk by chunk: a queue that takes some of the files takes whole chunks.
        for of_chunk in zip(*(plan.chunks for plan in plans), strict=True):
            chunk = keys.chunks[of_chunk[0].key_idx]
            if not is_load:
                if self.reloaded:
                    self._report_store(chunk, Status.SKIPPED)
                    continue
                if not self._files.writes(chunk.key_hash):
                    # Another rank with the same bytes does: a hit when that one has reported too.
                    self._report_store(chunk, Status.EXISTS)
                    continue
                self._tally.begin(chunk)
            requests += [
                ChunkRequest(self._file_id(chunk, file_idx), plan)
                for file_idx, plan in enumerate(of_chunk)
            ]
        return requests

    def _file_id(self, chunk: ChunkId, file_idx: int) -> ChunkId:
        return chunk if self._num_files == 1 else file_id(chunk, file_idx)

    def _note(self, outcome: ChunkOutcome) -> None:
        """Turn a file's outcome into its chunk's: a load fails with any file, a store is good with all."""
        chunk = outcome.chunk if self._num_files == 1 else chunk_of(outcome.chunk)[0]
        if outcome.is_load:
            self._outcomes.append(replace(outcome, chunk=chunk))
        elif (status := self._tally.end(chunk, outcome.status)) is not None:
            self._report_store(chunk, status)

    def _report_store(self, chunk: ChunkId, status: Status) -> None:
        self._outcomes.append(ChunkOutcome(chunk, False, status, 0, 0.0))

    def _count(self, outcome: ChunkOutcome) -> None:
        add, status = self._counters.add, outcome.status
        if outcome.is_load:
            if status is Status.OK:
                add(metrics.LOADED_CHUNKS)
                add(metrics.LOADED_BYTES, outcome.nbytes)
                add(metrics.LOAD_SECONDS, outcome.seconds)
            elif status is not Status.SKIPPED:
                add(metrics.LOAD_FAILURES, 1, status.value)
        elif status is Status.OK:
            add(metrics.STORED_CHUNKS)
            add(metrics.STORED_BYTES, outcome.nbytes)
            add(metrics.STORE_SECONDS, outcome.seconds)
        else:
            add(metrics.STORES_SKIPPED, 1, status.value)
