"""FskvTier: fskv's files as a secondary tier of vLLM's TieringOffloadingSpec, behind its CPU tier.

vLLM keeps chunks in host memory (the primary tier) and asks this one for what it has not; a hit is loaded
into a row of that memory, from where vLLM copies it to the GPU. A file holds the payload without the row's
padding, under the identity that FskvConnector derives. With chunks of one size both serve each other's files.

FskvManager decides what is there and what may be stored, a worker moves the bytes; here their answers become
vLLM's jobs. Invariant: of a reported job no row is touched any more. A load that is late is reported failed,
and its guard refuses the row to the late thread, because vLLM gives the row to another chunk.

Called on the scheduler's thread of the engine's core, never concurrently; no call waits for a disk but the
constructor (docs/vllm.md, "As a tier behind vLLM's CPU cache").
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from fskv.data_path.job import FileMove
from fskv.engines.vllm import quirks
from fskv.engines.vllm.epochs import Epochs
from fskv.engines.vllm.events import KvEvents
from fskv.engines.vllm.files import WorkerFiles
from fskv.engines.vllm.manager import (
    PREFIX_CACHING_OFF,
    ChunkKeys,
    FskvManager,
)
from fskv.engines.vllm.metrics import metric_definitions
from fskv.engines.vllm.spec import open_worker
from fskv.engines.vllm.weights import MarkedWeights, Purity
from fskv.engines.vllm.worker import FskvWorker
from fskv.engines.vllm_tier.workers import ask_workers, plan_row
from fskv.errors import FskvError, RestError
from fskv.format.spans import Placement
from fskv.hybrid_planner import GroupKind
from fskv.kv_transfer.options import tier_config
from fskv.offload.lookup import patience
from fskv.types import ChunkId, FileId

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

logger = logging.getLogger(__name__)

# A chunk that lost its row before its request could use it is loaded once more; then it is computed.
_MAX_TIMES_LOADED = 2


class RowWorker(FskvWorker):
    """A FskvWorker whose pages are rows of the CPU tier, those of all ranks.

    Its only tensor is the tier, int8 (rows, bytes). It must stay mapped until `shutdown` has returned.
    """

    placements: Mapping[int, Sequence[Placement]]  # by group index, a file each; set before any job

    def _plan(self, keys: ChunkKeys, pages: Any, *, is_load: bool) -> list[FileMove]:
        """Plan the whole of each chunk; `pages` are the numbers of their rows."""
        (row_nbytes,), rows = self._strides, pages.tolist()  # in Python, where no product overflows
        ranks = self._files.file_ranks
        return [
            FileMove(FileId(*chunk, file_rank), plan, self._use(keys, n))
            for n, chunk in enumerate(keys.chunks)
            for file_rank, placement in zip(ranks, self.placements[chunk.group_idx], strict=True)
            for plan in (plan_row(placement, n, rows[n] * row_nbytes),)
        ]


@dataclass
class _Job:
    """A job of vLLM's whose rows are not free yet."""

    keys: list[OffloadKey]
    is_load: bool
    nbytes: int = 0  # of a store: what it has


class FskvTier(SecondaryTierManager):
    """Files behind vLLM's CPU tier: vLLM's jobs of rows become jobs of a worker, where the manager agrees."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        locality: str | None = None,
        **options: Any,
    ) -> None:
        """`options` are fskv's, as FskvConnector takes them; raises FskvError with one sentence."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        quirks.mend_vllm()
        self.locality = None if locality is None else Locality(locality)
        self._worker: RowWorker | None = None  # of a tier that rests
        self._jobs: dict[int, _Job] = {}
        self._results: list[JobResult] = []  # since `get_finished_jobs`
        # Of the requests that vLLM has begun and not finished: how often each chunk was loaded for it since
        # it last ran.
        self._requests: dict[str, dict[ChunkId, int]] = {}
        # Requests and groups of which this step asked for a chunk that is not known yet.
        self._unsure: set[tuple[str, int]] = set()
        self._num_rows = len(primary_kv_view)
        self._steps_open = 0  # scheduled, and without an output yet
        self._outputs_to_wait = 0  # until what workers did before a reset is over
        # Of a chunk in a row, by group index; of a tier that rests none is known.
        self._placements: dict[int, tuple[Placement, ...]] = {}
        self._reuses_blocks = False  # of some groups vLLM does, while their request runs
        # A worker whose weights are loaded again writes to it; a file without a name once all have it open.
        self._mark, mark = tempfile.mkstemp(prefix="fskv-weights-")
        try:
            self._config = tier_config(options)
            self._open(offloading_spec, primary_kv_view, mark)
        except FskvError as error:
            logger.error("fskv: %s", error)
            os.close(self._mark)
            raise
        finally:
            os.unlink(mark)
        self._manager.locality = self.locality or self._manager.locality

    def _open(self, spec: OffloadingSpec, view: memoryview, mark: str) -> None:
        """Ask the workers and begin; raises FskvError. Where they do not know their KV, the tier rests."""
        config, rank = self._config, spec.config.parallel.data_parallel_index
        # VLLM's CPU tier keeps KV of before an update until it is reset.
        self._epochs = Epochs(1, None, fixed=config.weights_fixed, has_siblings=True)
        try:
            found = ask_workers(spec, config, self.block_size_bytes, mark)
        except RestError as error:
            self._manager = FskvManager(config, 1, engine_rank=rank)
            self._manager.turn_off(str(error), unknown=True)
            return
        # Not through numpy, which would hold the buffer: vLLM releases it when the engine stops.
        memory = torch.frombuffer(view, dtype=torch.int8).view(self._num_rows, -1)
        layouts = tuple(tuple(one.layout for one in of_file) for of_file in found.files.values())
        self._worker = worker = open_worker(
            RowWorker,
            config,
            found.identity,
            found.groups,
            WorkerFiles((memory,), layouts, tuple(found.files)),
            found.max_model_len,
            rank=0,
            world_size=1,
            purity=Purity(MarkedWeights(self._mark), fixed=config.weights_fixed),
        )
        for of_group in zip(*found.files.values(), strict=True):
            self._placements[of_group[0].layout.group_idx] = of_group
        worker.placements = self._placements
        bpc = worker.handshake.blocks_per_chunk
        tokens_per_chunk = [group.spec.tokens_per_block * bpc for group in found.groups]
        self._manager = FskvManager(
            config,
            bpc,
            KvEvents.enabled_by(spec.kv_events_config, tokens_per_chunk[0]),
            chunks_per_step=-(-found.tokens_per_step // min(tokens_per_chunk)),
            engine_rank=rank,
        )
        self._manager.chunks.presence.recompute_s = patience(tokens_per_chunk)
        self._manager.set_workers([worker.handshake])
        if not found.prefix_caching:
            self._manager.turn_off(PREFIX_CACHING_OFF)
        kinds = {group.spec.kind for group in found.groups}
        self._reuses_blocks = bool(kinds - {GroupKind.FULL, GroupKind.MLA})

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return metric_definitions()

    # --- what is there ----------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return whether a chunk is there; vLLM loads a hit at once.

        Behind a chunk that is not known yet a hit is told as RETRY: the other decides whether vLLM needs this
        one. vLLM asks for a prefix from its first chunk on, for a window from its last one back.
        """
        self._look_for_updates()
        result, chunk = self._manager.lookup(key, req_context), self._manager.chunk_of(key)
        asked = req_context.req_id, chunk.group_idx
        if result is LookupResult.RETRY:
            self._unsure.add(asked)
        if result is LookupResult.HIT:
            if not self._may_load(chunk, req_context.req_id):
                return LookupResult.MISS
            if asked in self._unsure:
                return LookupResult.RETRY
        return result

    def _may_load(self, chunk: ChunkId, req_id: str) -> bool:
        """Return whether a hit may be answered as one; vLLM then gives the chunk a row at once.

        A hit of more chunks than there are rows would never come to an end: what is loaded last takes the
        rows of what was loaded first, vLLM defers the request, and next time asks for the first again.
        """
        if self._outputs_to_wait:
            return False
        loaded = self._requests.get(req_id, {})
        times = loaded.get(chunk, 0)
        return times < _MAX_TIMES_LOADED and (times > 0 or len(loaded) < self._num_rows)

    def _look_for_updates(self) -> None:
        """Rest as soon as a worker's weights may be others than those of the namespace."""
        if self._worker is not None and (doubt := self._worker.purity.doubt):
            self._manager.rest(doubt)

    def _follow_weights(self) -> None:
        """Begin a step: rest, or go on with the namespace of new weights."""
        epochs, worker = self._epochs, self._worker
        if worker is None:
            return
        table = quirks.cached_blocks_of_caller()
        worker.on_step(epochs.on_step(table, None, has_tokens=True))
        epochs.on_told(worker.take_served())
        if (namespace := epochs.take_opened()) is not None:
            self._manager.move(namespace, epochs.number)
        self._manager.rest(epochs.resting)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        self._requests[req_context.req_id] = {}
        return self._manager.on_new_request(req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._requests.pop(req_context.req_id, None)
        self._manager.on_request_finished(req_context)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._steps_open += 1
        self._unsure.clear()
        for req_id in (*context.new_req_ids, *context.preempted_req_ids):
            if req_id in self._requests:
                self._requests[req_id] = {}
        self._follow_weights()
        self._manager.on_schedule_end(context)

    def has_pending_work(self) -> bool:
        return self._manager.has_pending_work()

    # --- jobs -------------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        if (worker := self._worker) is None:
            self._results.append(JobResult(job_metadata.job_id, success=True))
            return
        self._look_for_updates()
        keys, job_id = list(job_metadata.keys), job_metadata.job_id
        use = self._manager.begin_use(keys, there=False)  # before anything is on its way
        taken = self._manager.prepare_store(keys, job_metadata.req_context).keys_to_store
        at = {key: depth for depth, key in enumerate(keys)}
        depths = [at[key] for key in taken]
        used = ChunkKeys([self._manager.chunk_of(key) for key in taken], use=use, depths=depths)
        in_row = [one for chunk in used.chunks for one in self._placements[chunk.group_idx]]
        nbytes = sum(one.layout.content_nbytes for one in in_row)
        self._jobs[job_id] = _Job(keys, is_load=False, nbytes=nbytes)
        rows: Any = job_metadata.chunk_ids[depths]
        worker.submit_store(job_id, rows, used)

    def submit_load(self, job_metadata: TransferJob) -> None:
        if (worker := self._worker) is None:
            self._results.append(JobResult(job_metadata.job_id, success=False))
            return
        keys, job_id = list(job_metadata.keys), job_metadata.job_id
        self._jobs[job_id] = _Job(keys, is_load=True)
        chunks = [self._manager.chunk_of(key) for key in keys]
        loaded = self._requests.get(job_metadata.req_context.req_id, {})
        for chunk in chunks:
            loaded[chunk] = loaded.get(chunk, 0) + 1
        use = self._manager.begin_use(keys, there=True)
        used = ChunkKeys(chunks, use=use, depths=range(len(keys)))
        rows: Any = job_metadata.chunk_ids
        worker.submit_load(job_id, used, rows)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._collect()
        results, self._results = self._results, []
        return results

    def drain_jobs(self) -> None:
        """Free all rows and reset: vLLM 0.32 calls this when it resets the connector's cache.

        Loads are given up. Stores are copied to staging as far as that reaches and go on from there, unless
        the weights are in doubt from now on. Waits for memory copies, never for a disk.

        vLLM gives all rows away at once, but its workers hear of the reset only with the next step, and
        until then copy between GPU and the rows of before: before that step's output no row is loaded into.
        """
        if self._worker is None:
            return
        self._outputs_to_wait = self._steps_open + 1
        if self._config.weights_fixed:
            self._worker.mover.free_pages()
        else:
            self._worker.drop_jobs()
        self._epochs.on_reset({0: self._worker.purity.weights.counts})
        self._manager.rest(self._epochs.resting)
        self._collect()  # all of them
        if self._reuses_blocks:
            # Of vLLM's CPU tier, which has other requests' blocks again, nothing that follows is stored here.
            for req_id in self._requests:
                self._manager.limit_request(req_id)
        self._manager.reset_cache()

    def _collect(self) -> None:
        """Take the news of the I/O threads."""
        if (worker := self._worker) is None:
            return
        ended, loads = worker.get_finished(), worker.take_loads()
        failed = worker.take_failed_jobs()
        for result in ended:
            job = self._jobs.pop(result.job_id)
            good = None
            # Without success where rows were dropped: vLLM counts it, and keeps the chunks that it has.
            success = result.transfer_size == job.nbytes
            if job.is_load and not (success := result.job_id not in failed):
                bad = {file.chunk for one in loads.get(result.job_id, ()) for file in one.bad}
                good = (
                    tuple(key for key in job.keys if bad and self._manager.chunk_of(key) not in bad)
                    or None
                )
            seconds, nbytes = result.transfer_time, result.transfer_size
            self._results.append(JobResult(result.job_id, success, good, seconds, nbytes))
        self._manager.on_news(worker.take_news())

    # --- the rest ---------------------------------------------------------------------------

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._manager.take_events()

    def get_stats(self) -> OffloadingConnectorStats | None:
        # vLLM asks once for every step whose output it has.
        self._steps_open = max(0, self._steps_open - 1)
        self._outputs_to_wait = max(0, self._outputs_to_wait - 1)
        of_manager = self._manager.get_stats()
        of_worker = None if self._worker is None else self._worker.get_stats()
        if of_manager is None or of_worker is None:
            return of_manager or of_worker
        of_manager.aggregate(of_worker)
        return of_manager

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
        self._manager.shutdown()
        os.close(self._mark)
