"""FskvTier: fskv's files as a secondary tier of vLLM's TieringOffloadingSpec, behind its CPU tier.

vLLM keeps chunks in host memory (the primary tier) and asks this one for what it has not; a hit is loaded
into a row of that memory, from where vLLM copies it to the GPU. What is stored is the payload without the
row's padding, under the identity that FskvConnector derives: with chunks of the same size both serve each
other's files.

FskvManager decides what is there and what may be stored, RowMover moves the bytes; here their answers become
vLLM's jobs. Invariant: of a reported job no row is touched any more. A load that is late is reported failed,
and its guard refuses the row to the late thread, because vLLM gives the row to another chunk.

Called on the scheduler's thread of the engine's core, never concurrently; no call waits for a disk but the
constructor (docs/vllm.md, "As a tier behind vLLM's CPU cache").
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from fskv.config import MIB, StoreConfig
from fskv.data_path.threads import START_UP_S, call_with_deadline
from fskv.engines.vllm.events import KvEvents
from fskv.engines.vllm.manager import PREFIX_CACHING_OFF, FskvManager, to_chunk
from fskv.engines.vllm.metrics import metric_definitions, to_stats
from fskv.engines.vllm.quirks import (
    begin_block_lists_anew,
    forget_past_blocks,
    heed_caps,
    reserve_windows,
    reserving_scheduler,
    resetting_scheduler,
)
from fskv.engines.vllm_tier.io import RestingRows, RowMover
from fskv.engines.vllm_tier.rows import rows_of
from fskv.engines.vllm_tier.workers import Workers, ask_workers
from fskv.errors import FskvError, RestError
from fskv.hybrid_planner import GroupKind, hit_cost
from fskv.kv_transfer.options import tier_config
from fskv.offload.lookup import patience
from fskv.root.neighbours import beside
from fskv.root.root import Root
from fskv.types import ChunkId

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.kv_offload.base import OffloadingSpec
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

    from fskv.engines.vllm.identity import EngineGroup

logger = logging.getLogger(__name__)

# After its jobs were given up an I/O thread has at most a line of bookkeeping left.
_DRAIN_S = 5.0
# A chunk that lost its row before its request could use it is loaded once more; then it is computed.
_MAX_TIMES_LOADED = 2


@dataclass
class _Open:
    """A job of vLLM's that was not reported yet."""

    keys: list[OffloadKey]
    is_load: bool
    nbytes: int = 0  # of a store: what it has
    bad: set[ChunkId] = field(default_factory=set)  # of a load
    ended: tuple[int, float] | None = None  # bytes and seconds, once the rows are free


class FskvTier(SecondaryTierManager):
    """See the module docstring."""

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
        begin_block_lists_anew()
        heed_caps()
        self.locality = None if locality is None else Locality(locality)
        self._jobs: dict[int, _Open] = {}
        # Of the requests that vLLM has begun and not finished: how often each chunk was loaded for it since
        # it last ran.
        self._requests: dict[str, dict[ChunkId, int]] = {}
        self._num_rows = len(primary_kv_view)
        self._reserves = False  # vLLM what loads of windows need: fskv.engines.vllm.admission
        self._steps_open = 0  # scheduled, and without an output yet
        self._outputs_to_wait = 0  # until what workers did before a reset is over
        # A worker whose weights are loaded again writes to it; a file without a name once all have it open.
        self._mark, mark = tempfile.mkstemp(prefix="fskv-weights-")
        try:
            self._config = tier_config(options)
            self._rows, self._manager, groups = self._open(offloading_spec, primary_kv_view, mark)
            self._manager.locality = self.locality or self._manager.locality
        except FskvError as error:
            logger.error("fskv: %s", error)
            os.close(self._mark)
            raise
        finally:
            os.unlink(mark)
        # Blocks of such groups are freed and used again while their request runs.
        kinds = {group.spec.kind for group in groups}
        self._reuses_blocks = bool(kinds - {GroupKind.FULL, GroupKind.MLA})

    def _open(
        self, spec: OffloadingSpec, view: memoryview, mark: str
    ) -> tuple[RowMover | RestingRows, FskvManager, Sequence[EngineGroup]]:
        """Ask the workers and begin; raises FskvError. Where they do not know their KV, the tier rests."""
        try:
            workers = ask_workers(spec, self._config, self.block_size_bytes, mark)
        except RestError as error:
            rank = spec.config.parallel.data_parallel_index
            manager = FskvManager(self._config, 1, engine_rank=rank)
            manager.rest(str(error))
            return RestingRows(), manager, ()
        return *_open(self._config, workers, spec, view), workers.groups

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        return metric_definitions()

    # --- what is there ----------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        self._look_for_reloads()
        result = self._manager.lookup(key, req_context)
        if result is LookupResult.HIT and not self._may_load(to_chunk(key), req_context.req_id):
            return LookupResult.MISS
        return result

    def _may_load(self, chunk: ChunkId, req_id: str) -> bool:
        """Whether a hit may be answered as one; vLLM then gives the chunk a row at once.

        A hit of more chunks than there are rows would never come to an end: what is loaded last takes the
        rows of what was loaded first, vLLM defers the request, and next time asks for the first again.
        """
        if self._outputs_to_wait:
            return False
        loaded = self._requests.get(req_id, {})
        times = loaded.get(chunk, 0)
        return times < _MAX_TIMES_LOADED and (times > 0 or len(loaded) < self._num_rows)

    def _look_for_reloads(self) -> None:
        if os.fstat(self._mark).st_size:
            self._manager.doubt_weights("weights were loaded again in the running engine")

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if not self._reserves and (scheduler := reserving_scheduler()) is not None:
            reserve_windows(scheduler)
            self._reserves = True
        self._requests[req_context.req_id] = {}
        return self._manager.on_new_request(req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._requests.pop(req_context.req_id, None)
        self._manager.on_request_finished(req_context)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._steps_open += 1
        for req_id in (*context.new_req_ids, *context.preempted_req_ids):
            if req_id in self._requests:
                self._requests[req_id] = {}
        self._manager.on_schedule_end(context)

    def has_pending_work(self) -> bool:
        return self._manager.has_pending_work()

    # --- jobs -------------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._look_for_reloads()
        rows = dict(zip(job_metadata.keys, job_metadata.chunk_ids.tolist(), strict=True))
        job = _Open(list(job_metadata.keys), is_load=False)
        use = self._manager.begin_use(job.keys, there=False)  # before anything is on its way
        taken = self._manager.prepare_store(job.keys, job_metadata.req_context).keys_to_store
        self._jobs[job_metadata.job_id] = job
        depths = {key: depth for depth, key in enumerate(job.keys)}
        uses = [(use, depths[key]) for key in taken]
        chunks = [to_chunk(key) for key in taken]
        job.nbytes = self._rows.store(
            job_metadata.job_id, chunks, [rows[key] for key in taken], uses
        )

    def submit_load(self, job_metadata: TransferJob) -> None:
        keys = list(job_metadata.keys)
        chunks = [to_chunk(key) for key in keys]
        job_id = job_metadata.job_id
        self._jobs[job_id] = _Open(keys, is_load=True)
        loaded = self._requests.get(job_metadata.req_context.req_id, {})
        for chunk in chunks:
            loaded[chunk] = loaded.get(chunk, 0) + 1
        use = self._manager.begin_use(keys, there=True)
        uses = [(use, depth) for depth in range(len(keys))]
        self._rows.load(job_id, chunks, job_metadata.chunk_ids.tolist(), uses)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._collect()
        done = [job_id for job_id, job in self._jobs.items() if job.ended is not None]
        return [self._result(job_id) for job_id in done]

    def drain_jobs(self) -> None:
        """Free all rows, then treat it as what it is in vLLM 0.32: the connector's cache is being reset.

        Loads are given up. Stores are copied to staging as far as that reaches and go on from there, unless
        the weights are in doubt from now on. Waits for memory copies, never for a disk.

        vLLM gives all rows away at once, but its workers hear of the reset only with the next step, and
        until then copy between GPU and the rows of before: before that step's output no row is loaded into.
        """
        self._outputs_to_wait = self._steps_open + 1
        if self._config.weights_fixed:
            self._rows.mover.free_pages(set(self._jobs))
        else:
            self._rows.mover.drop()
        end = time.monotonic() + _DRAIN_S
        while True:
            self._collect()
            late = [job for job in self._jobs.values() if job.ended is None]
            if not late:
                break
            if time.monotonic() > end:  # a bug; the rows are free all the same
                logger.error("fskv: %d jobs without an outcome are reported as failed", len(late))
                for job in late:
                    job.ended = (0, 0.0)
                    job.bad.update(to_chunk(key) for key in job.keys if job.is_load)
                break
            time.sleep(0.001)
        if self._reuses_blocks:
            # vLLM would store blocks again that have been another request's since. In the CPU tier too, and
            # whoever takes them from there stores what follows from them here.
            if (scheduler := resetting_scheduler()) is not None:
                forget_past_blocks(scheduler)
            for req_id in self._requests:
                self._manager.exclude_request(req_id)
        self._manager.forget_announced()
        self._manager.reset_cache()

    def _collect(self) -> None:
        """Take the news of the I/O threads."""
        for ended in self._rows.mover.poll():
            job = self._jobs.get(ended.job_id)
            if job is not None:
                job.ended = ended.nbytes, ended.seconds
                job.bad.update(file.chunk for file in ended.bad)
        self._manager.on_news(self._rows.mover.take_news())

    def _result(self, job_id: int) -> JobResult:
        job = self._jobs.pop(job_id)
        nbytes, seconds = job.ended or (0, 0.0)
        if not job.is_load:
            # Without success where rows were dropped: vLLM counts it, and keeps the chunks that it has.
            return JobResult(job_id, nbytes == job.nbytes, None, seconds, nbytes)
        if not job.bad:
            return JobResult(job_id, success=True, transfer_time=seconds, transfer_bytes=nbytes)
        good = [key for key in job.keys if to_chunk(key) not in job.bad]
        return JobResult(job_id, False, tuple(good) or None, seconds, nbytes)

    # --- the rest ---------------------------------------------------------------------------

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._manager.take_events()

    def get_stats(self) -> OffloadingConnectorStats | None:
        # vLLM asks once for every step whose output it has.
        self._steps_open = max(0, self._steps_open - 1)
        self._outputs_to_wait = max(0, self._outputs_to_wait - 1)
        mover, of_manager = self._rows.mover, self._manager.get_stats()
        counters = mover.counters
        of_worker = to_stats(counters.drain(), mover.gauges(), counters.drain_observed())
        if of_manager is None or of_worker is None:
            return of_manager or of_worker
        of_manager.aggregate(of_worker)
        return of_manager

    def shutdown(self) -> None:
        self._rows.mover.close()
        self._manager.shutdown()
        os.close(self._mark)


def _open(
    config: StoreConfig, workers: Workers, spec: OffloadingSpec, view: memoryview
) -> tuple[RowMover, FskvManager]:
    """Open the namespace and start the I/O; raises FskvError."""
    identity = workers.identity
    directory, others = call_with_deadline(
        lambda: (Root.of(config).open_namespace(identity), beside(config.root, identity)),
        START_UP_S,
        f"option 'root': {config.root} did not answer",
    )
    specs = [group.spec for group in workers.groups]
    layouts = [row.layout for row in workers.rows[0]]
    bpc = layouts[0].num_blocks
    tokens_per_chunk = [group.tokens_per_block * bpc for group in specs]
    num_files, nbytes = hit_cost(specs, layouts, bpc, workers.max_model_len)
    logger.info(
        "fskv: namespace %s; %d tokens a chunk; a hit of %d tokens reads %d files, %.1f MiB",
        directory.path,
        tokens_per_chunk[0],
        workers.max_model_len,
        num_files * len(workers.rows),
        nbytes * len(workers.rows) / MIB,
    )
    if others:
        logger.info("fskv: %s", others)
    rows = RowMover(
        config,
        workers,
        rows_of(view),
        directory,
        restore=lambda: Root.of(config, create=False).open_namespace(identity),
    )
    manager = FskvManager(
        config,
        bpc,
        KvEvents.enabled_by(spec.kv_events_config, tokens_per_chunk[0]),
        chunks_per_step=-(-workers.tokens_per_step // min(tokens_per_chunk)),
        engine_rank=spec.config.parallel.data_parallel_index,
    )
    manager.chunks.presence.recompute_s = patience(tokens_per_chunk)
    try:
        manager.set_workers([rows.handshake])
        if not workers.prefix_caching:
            manager.turn_off(PREFIX_CACHING_OFF)
    except FskvError:
        rows.mover.close()
        raise
    return rows, manager
