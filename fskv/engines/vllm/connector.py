"""FskvConnector: vLLM's offloading connector with files behind it and failures that cost a recompute.

A thin subclass: vLLM's own scheduler decides about lookups, loads and stores. fskv brings the manager, the
worker, and three missing parts: an identity (derived here, compared on disk), failed loads (reported as
`failed_recving`, so that the engine recomputes), and healing (a recompute stores the lost chunks again).
Contract and versions: docs/vllm.md.
"""

from __future__ import annotations

# First: where vLLM cannot work, one sentence and not the traceback of an import that it lacks.
import fskv.engines.vllm.version  # noqa: F401  # isort: skip

import logging
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1, KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from fskv.engines.vllm.budget import LoadBudget, Reports
from fskv.engines.vllm.epochs import Epochs, Step
from fskv.engines.vllm.failed_loads import FailedLoads
from fskv.engines.vllm.identity import reuses_kv
from fskv.engines.vllm.manager import PREFIX_CACHING_OFF, ChunkKeys, FskvHandshake, FskvManager
from fskv.engines.vllm.media import named_tokens, takes_media
from fskv.engines.vllm.metrics import FskvStats, SoFar
from fskv.engines.vllm.quirks import (
    cached_blocks,
    drop_in_workers,
    enclosing_connector,
    event_payloads,
    handshakes_of_workers,
    job_of_load,
    load_last_chunks,
    mend_vllm,
    offer_again,
    offer_all_again,
    prefix_of,
    requests_of_loads,
    take_deferred_stores,
    tell_allocated,
    weight_version,
)
from fskv.engines.vllm.spec import FskvOffloadingSpec, Setup, prepare, with_spec
from fskv.engines.vllm.weights import Counts, Served
from fskv.errors import FskvError, RestError
from fskv.hybrid_planner import Geometry
from fskv.kv_transfer.multi import check_children
from fskv.kv_transfer.options import store_config
from fskv.offload.lookup import patience
from fskv.offload.mover import News

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from fskv.engines.vllm.worker import FskvWorker

logger = logging.getLogger(__name__)


@dataclass
class FskvWorkerMetadata(OffloadingWorkerMetadata):
    """One rank's news for the scheduler; `aggregate` merges the news of all ranks."""

    news: News = field(default_factory=News)
    loads: Reports = field(default_factory=dict)
    served: dict[int, Served] = field(default_factory=dict)  # by rank, where it is news

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, FskvWorkerMetadata)
        merged = super().aggregate(other)
        assert isinstance(merged, OffloadingWorkerMetadata)
        return FskvWorkerMetadata(
            **_fields(merged),
            news=self.news.merged(other.news),
            loads={
                job_id: self.loads.get(job_id, []) + other.loads.get(job_id, [])
                for job_id in self.loads.keys() | other.loads.keys()
            },
            served=self.served | other.served,
        )


@dataclass
class FskvConnectorMetadata(OffloadingConnectorMetadata):
    """The jobs of a step, its weights, and the chunks that are used without a job; pickled to the workers."""

    step: Step | None = None
    touches: list[ChunkKeys] = field(default_factory=list)


class FskvConnector(OffloadingConnector):
    """vLLM's offloading connector with fskv's manager and workers, which may fail a load."""

    stats_id = "FskvConnector"  # among the stats of a MultiConnector
    _resting: FskvHandshake | None = None  # what a worker tells that neither loads nor stores
    _held_events: Sequence[KVCacheEvent] = ()  # of before a reset, not yet taken

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        outer = enclosing_connector(FskvConnector)
        try:
            if outer is not None:
                children = outer.kv_connector_extra_config.get("connectors") or ()
                check_children(outer.kv_connector, children)
            setup = prepare(vllm_config, kv_cache_config, announce=role is KVConnectorRole.WORKER)
        except RestError as error:
            self._init_at_rest(vllm_config, role, kv_cache_config, str(error))
            return
        except FskvError as error:
            logger.error("fskv: %s", error)
            raise
        if outer is not None:
            # Inside a MultiConnector the scheduler reads the policy of the outer configuration.
            outer.kv_load_failure_policy = "recompute"
        super().__init__(with_spec(vllm_config, setup), role, kv_cache_config)
        self._set_up(setup, role, has_siblings=outer is not None)

    def _init_at_rest(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
        why: str,
    ) -> None:
        """Begin without vLLM's worker, or with its scheduler of no group: it asserts that it knows each."""
        KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
        assert vllm_config.kv_transfer_config is not None
        config = store_config(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._setup = setup = Setup(vllm_config, config, [], Geometry(1, (1,), (0,), ()))
        self.connector_scheduler = self.connector_worker = None
        if role is KVConnectorRole.WORKER:
            self._rest(why)
            return
        injected = with_spec(vllm_config, setup).kv_transfer_config
        assert injected is not None
        of_nothing: Any = SimpleNamespace(
            groups=(),
            extra_config=injected.kv_connector_extra_config,
            enable_kv_cache_events=False,
            cache=SimpleNamespace(tokens_per_hash=1, blocks_per_chunk=1),
            parallel=vllm_config.parallel_config,
            canonical_layout=False,
        )
        self._bounding_group_ids = ()  # vLLM asks these how far a load may reach
        self.connector_scheduler = OffloadingConnectorScheduler(
            FskvOffloadingSpec(of_nothing), vllm_config, kv_cache_config
        )
        self._manager.turn_off(why, unknown=True)
        self._set_up(setup, role)

    def _set_up(self, setup: Setup, role: KVConnectorRole, *, has_siblings: bool = False) -> None:
        self._setup = setup
        self._cached_blocks: object = None  # as they were when events were last taken
        if role is KVConnectorRole.SCHEDULER:
            mend_vllm()  # of vLLM's own connector beside this one, too
            load_last_chunks(self.scheduler)
            if takes_media(setup.vllm_config) and "media" not in setup.config.trust:
                logger.info(
                    "fskv: of requests with images, sound or video only the text before the first of them is "
                    "stored and loaded (option 'trust' with \"media\" believes their names)"
                )
            self._so_far = SoFar()
            self._failed_loads = FailedLoads()
            self._epochs = Epochs(
                setup.vllm_config.parallel_config.world_size,
                setup.config.weights_run,
                fixed=setup.config.weights_fixed,
                has_siblings=has_siblings,
            )
            self.budget = LoadBudget(self._manager)
            self._manager.allowed_s = self.budget.allowed_s
            bpc = setup.geometry.blocks_per_chunk
            self._manager.chunks.presence.recompute_s = patience(
                [group.spec.tokens_per_block * bpc for group in setup.groups],
                lambda: self.budget.prefill_per_s,
            )

    @property
    def _worker(self) -> FskvWorker | None:
        """The worker that moves this rank's KV; None on the scheduler's side, before there is KV, and at
        rest.
        """
        half = self.connector_worker
        return None if half is None else cast("FskvOffloadingSpec", half.spec).worker

    @property
    def _manager(self) -> FskvManager:
        return cast("FskvManager", self.scheduler.manager)

    # --- worker -----------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self._resting is not None:
            return
        half = self.connector_worker
        try:
            super().register_kv_caches(kv_caches)
        except RestError as error:
            self._rest(str(error))
        except FskvError as error:
            logger.error("fskv: %s", error)
            raise
        except Exception as error:
            if half is None or cast("FskvOffloadingSpec", half.spec).has_begun:
                raise
            line = str(error).partition("\n")[0]
            self._rest(f"vLLM does not tell where its KV lies ({type(error).__name__}: {line})")

    def _rest(self, reason: str) -> None:
        """Read and write no page: it is not known how KV lies. The scheduler hears why, and asks for none."""
        self.connector_worker = None
        parallel, root = self._setup.vllm_config.parallel_config, self._setup.config.root
        self._resting = FskvHandshake.resting(parallel.rank, parallel.world_size, root, reason)

    @property
    def handshake(self) -> FskvHandshake | None:
        """The facts that this worker tells the scheduler; None on the scheduler's side, and before there is
        KV.
        """
        return self._resting if self._worker is None else self._worker.handshake

    def get_handshake_metadata(self) -> None:
        """Return nothing: in vLLM's MultiConnector every child hears the first child's. See the scheduler."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Report finished loads, and which of them failed and must be recomputed."""
        half, worker = self.connector_worker, self._worker
        if half is None or worker is None:
            return KVConnectorTransferResults()
        requests = requests_of_loads(half)
        sending, receiving = self.get_finished(finished_req_ids)
        return KVConnectorTransferResults(
            finished_sending=sending,
            finished_recving=receiving,
            failed_recving={
                requests[job_id] for job_id in worker.take_failed_jobs() if job_id in requests
            },
        )

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begin a step: from now on its results are in pages."""
        if (worker := self._worker) is not None:
            meta = self._connector_metadata
            if isinstance(meta, FskvConnectorMetadata) and meta.step is not None:
                worker.on_step(meta.step)
                for keys in meta.touches:
                    worker.touch(keys)
            super().start_load_kv(forward_context, **kwargs)

    def wait_for_save(self) -> None:
        if self._worker is not None:
            super().wait_for_save()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if self._worker is not None:
            super().handle_preemptions(kv_connector_metadata)

    def build_connector_worker_meta(self) -> FskvWorkerMetadata | None:
        if (worker := self._worker) is None:
            return None
        stock = super().build_connector_worker_meta()
        news, loads = worker.take_news(), worker.take_loads()
        served = worker.take_served()
        if stock is None and not (news or loads or served):
            return None
        known = _fields(stock or OffloadingWorkerMetadata())
        return FskvWorkerMetadata(**known, news=news, loads=loads, served=served)

    def drop_jobs(self) -> list[tuple[int, Counts]]:
        """Touch no KV page for earlier jobs any more: the engine has given its KV up.

        Returns this rank and the counts of its weights.
        """
        if (worker := self._worker) is None:
            return []
        # Submitted at the start of the next step they would be, after a sleep, of other pages.
        worker.drop_jobs(take_deferred_stores(self.connector_worker))
        return [(worker.mover.number, worker.purity.weights.counts)]

    def unregister_kv_caches(self) -> None:
        """Touch no KV page: vLLM 0.33 says so before it unmaps them, at a sleep for one."""
        self.drop_jobs()

    # --- scheduler --------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Ask the workers for their facts, now that all have their KV: vLLM may hand over another
        connector's.
        """
        if self._manager.chunks.stopped:
            return  # the scheduler does not know its KV, whatever its workers know
        try:
            root, told = self._setup.config.root, handshakes_of_workers()
            workers = [worker for worker in told if _is_inside(worker.directory.path, root)]
            if rests := [worker.rests for worker in workers if worker.rests]:
                self._manager.turn_off(rests[0], unknown=True)
                return
            self._manager.set_workers(workers)
            if not all(
                (reuses_kv(self._setup.vllm_config), *(worker.prefix_caching for worker in workers))
            ):
                self._manager.turn_off(PREFIX_CACHING_OFF)
        except FskvError as error:
            logger.error("fskv: %s", error)
            raise

    def on_new_request(self, request: Request) -> None:
        trust, vllm_config = self._setup.config.trust, self._setup.vllm_config
        text = most = named_tokens(request.mm_features, vllm_config, trusted=False)
        if "media" in trust:
            most = named_tokens(request.mm_features, vllm_config, trusted=True)
        if (
            # The block hash covers an adapter's name, not its weights (vllm#30931).
            (request.lora_request is not None and "lora" not in trust)
            # vLLM's key of embeddings has neither their dtype nor which of them stand for tokens.
            or request.prompt_embeds is not None
            # vLLM asks nothing about a session's later turns.
            or getattr(request, "resumable", False)
        ):
            text = most = 0
        if text < math.inf:
            # After an update of the weights an encoder's outputs may be those of other weights.
            self._manager.limit_request(request.request_id, most, text)
        super().on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Look the request up; after a load that was given up the next hits are not taken (`load_budget`)."""
        if self._failed_loads.steps_aside(request):
            return None, False
        found, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        taken = self.budget.take(request.request_id, found or 0)
        if taken or not found:
            return found, is_async
        # vLLM's scheduler remembers its last answer.
        self.scheduler.get_num_new_matched_tokens(request, num_computed_tokens, 0)
        return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        req_id = request.request_id
        groups, num_computed = prefix_of(self.scheduler, req_id)
        self._manager.admit(req_id, groups, num_computed + num_external_tokens)
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if not num_external_tokens:
            tell_allocated(self.scheduler, blocks)
        job_id = job_of_load(self.scheduler, req_id) if num_external_tokens else None
        self.budget.admitted(req_id, num_external_tokens, job_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self.budget.on_step(scheduler_output)
        step = self._epochs.on_step(
            cached_blocks(self._kv_cache_manager),
            weight_version() if self._setup.config.weights_run else None,
            has_tokens=bool(scheduler_output.total_num_scheduled_tokens),
        )
        self._manager.rest(self._epochs.resting)
        meta = super().build_connector_meta(scheduler_output)
        touches = self._manager.take_touches()
        return FskvConnectorMetadata(**_fields(meta), step=step, touches=touches)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._failed_loads.failed(connector_output.failed_recving)
        super().update_connector_output(connector_output)
        self._so_far.add(connector_output.kv_connector_stats, self.stats_id)
        told = connector_output.kv_connector_worker_meta
        if isinstance(told, FskvWorkerMetadata):
            self.budget.on_loads(told.loads)
            self._manager.on_news(told.news)
            self._epochs.on_told(told.served)
            if (namespace := self._epochs.take_opened()) is not None:
                self._manager.move(namespace, self._epochs.number)
                offer_all_again(self.scheduler)
            self._manager.rest(self._epochs.resting)
        for req_id in connector_output.failed_recving or ():
            offer_again(self.scheduler, req_id)

    def reset_cache(self) -> bool | None:
        """Reset the manager and drop the jobs of all workers: no worker then touches a page for them."""
        events = self._manager.events
        if events is not None and cached_blocks(self._kv_cache_manager) is self._cached_blocks:
            # VLLM's own cache was not cleared, as blocks were in use: no AllBlocksCleared comes. Told while
            # vLLM still has the payloads, which name every block.
            events.remove_all()
            self._held_events = [*self._held_events, *super().take_events()]
        super().reset_cache()
        self.budget.reset()
        counts: dict[int, Counts] = {}
        try:
            # Last: what fails here must not leave the manager as it was.
            counts = drop_in_workers()
        finally:
            self._epochs.on_reset(counts)
            self._manager.rest(self._epochs.resting)
        return True

    def take_events(self) -> Iterable[KVCacheEvent]:
        if (events := self._manager.events) is not None:
            if (cached := cached_blocks(self._kv_cache_manager)) is not self._cached_blocks:
                self._cached_blocks = cached
                events.say_again()
            events.trim(event_payloads(self.scheduler))
        held, self._held_events = self._held_events, ()
        yield from held
        yield from super().take_events()

    # --- both -------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self.connector_scheduler is None:
            stats = None if self._worker is None else self._worker.get_stats()
        else:
            self.budget.on_output()  # vLLM asks once for every step whose output it has
            stats, more = super().get_kv_connector_stats(), self.budget.get_stats()
            stats = stats.aggregate(more) if stats and more else stats or more
            return self._so_far.stamp(stats)
        # All of one class: a MultiConnector adds none of another.
        return None if stats is None else FskvStats(data=stats.data)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return FskvStats() if data is None else FskvStats(data=data)

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Any:
        # vLLM finds the metric definitions through the spec's name, which the user does not write.
        return super().build_prom_metrics(with_spec(vllm_config, None), *args, **kwargs)


def _fields(of_vllm: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, by name, for one that has more."""
    return {each.name: getattr(of_vllm, each.name) for each in fields(of_vllm)}


def _is_inside(path: str, root: str) -> bool:
    """Return whether a namespace is one of this root: an engine may have several, none inside another."""
    root = os.path.normpath(root)
    return os.path.commonpath([os.path.normpath(path), root]) == root
