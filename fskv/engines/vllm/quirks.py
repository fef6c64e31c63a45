"""The private parts of vLLM that fskv touches while an engine runs, and the faults of vLLM that fskv mends.

vLLM gives a connector no way to the engine's workers, a child no way to the connector around it, a tier no
way to the scheduler, and asks for a connector's class without the configuration that names it. The code that
builds or resets them is among the callers, so `callers` looks there. Each function names the fault that it
mends, with the versions of vLLM.

Called on the scheduler's thread. Functions that take a worker are for the worker's thread, between two steps.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.core.sched.scheduler import Scheduler

from fskv.engines.around import around

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
        OffloadingConnectorWorker,
    )
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_offload.base import LoadStoreSpec, OffloadKey
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

_ANSWER_S = (
    60.0  # copies of memory take far less; a worker that hangs must not hold a reset for ever
)


# --- callers ----------------------------------------------------------------------------------


def callers(method: str | None = None) -> Iterator[Any]:
    """Yield the objects whose methods, or that method, are running above the caller, the nearest first."""
    frame = inspect.currentframe()
    while frame is not None:
        if method in (None, frame.f_code.co_name):
            yield frame.f_locals.get("self")
        frame = frame.f_back


def _caller(fits: Callable[[Any], bool], method: str | None = None) -> Any:
    """Return the nearest calling object that fits; None if no caller fits."""
    return next((each for each in callers(method) if fits(each)), None)


def configuration_being_built() -> Any:
    """Return the VllmConfig that a caller is making; None if none is."""
    names = "kv_transfer_config", "parallel_config"
    return _caller(lambda one: all(hasattr(one, name) for name in names), "__post_init__")


def executor() -> Any:
    """Return the executor of the engine core that is calling; None if no caller is one."""
    core = _caller(lambda one: hasattr(getattr(one, "model_executor", None), "collective_rpc"))
    return None if core is None else core.model_executor


def reserving_scheduler() -> Scheduler | None:
    """Return the scheduler that is calling; None if it keeps no blocks free for loads under way."""
    found: Scheduler | None = _caller(
        lambda one: isinstance(getattr(one, "_inflight_prefills", None), set)
    )
    return found


def enclosing_connector(own: type[KVConnectorBase_V1]) -> KVTransferConfig | None:
    """Return the configuration of the connector that is building one of class `own`, if there is one."""
    outer = _caller(lambda one: isinstance(one, KVConnectorBase_V1) and not isinstance(one, own))
    return None if outer is None else outer._vllm_config.kv_transfer_config  # noqa: SLF001


def connectors() -> Iterator[OffloadingConnector]:
    """In a worker: yield its connectors of vLLM's offloading kind; inside a MultiConnector too."""
    from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group

    found: list[Any] = [get_kv_transfer_group()]
    for connector in found:
        found.extend(getattr(connector, "_connectors", ()))  # vLLM's MultiConnector
        if isinstance(connector, OffloadingConnector):
            yield connector


# --- starts -----------------------------------------------------------------------------------


def handshakes_of_workers() -> list[Any]:
    """Return the handshakes of fskv's connectors in the engine's workers; [] if no executor is calling."""
    found = executor()
    told = [] if found is None else found.collective_rpc(handshakes, timeout=_ANSWER_S)
    return [each for of_worker in told for each in of_worker]


def handshakes(_worker: object) -> list[Any]:
    """Return the handshakes of this worker's fskv connectors. On the worker's thread."""
    found = (getattr(each, "handshake", None) for each in connectors())
    return [own for own in found if own is not None]


# --- blocks -----------------------------------------------------------------------------------


def tell_allocated(scheduler: OffloadingConnectorScheduler, blocks: KVCacheBlocks) -> None:
    """Tell a connector the blocks of a request that another connector may be about to load.

    vLLM frees the blocks of a finished request while its stores may still be queued, and has a store read its
    blocks before they change hands; but a child hears of new owners only from its own loads and from what
    the model runs (0.32, 0.33: _current_batch_allocated_block_ids). Untold, it would store what its sibling
    loads there, under the key of what was there before: wrong KV with a good checksum.
    """
    for group in scheduler.config.kv_group_configs:
        scheduler._current_batch_allocated_block_ids.update(  # noqa: SLF001
            block.block_id for block in blocks.blocks[group.group_idx] if block.block_id
        )


def mend_vllm() -> None:
    """Replace methods of vLLM's scheduler and of each offloading connector by the `mended_...` functions
    here.

    Called on the scheduler's side before the first request. A vLLM that does it otherwise stays as it is.
    """
    around(Scheduler, "_request_remaining_blocks", mended_remaining_blocks)
    of_connectors: dict[str, Callable[..., Any]] = {
        "on_new_request": mended_on_new_request,
        "build_connector_meta": mended_build_connector_meta,
        "_update_req_states": mended_update_req_states,
        "_build_partial_tail_store_jobs": mended_build_tails,
        "reset_cache": mended_reset_cache,
    }
    for name, code in of_connectors.items():
        around(OffloadingConnectorScheduler, name, code)


def mended_update_req_states(
    of_vllm: Any, self: OffloadingConnectorScheduler, output: SchedulerOutput
) -> None:
    """Forget a request's blocks before a connector is told all of them.

    vLLM's scheduler (0.32) asks no connector about the next turn of a session that goes on (`resumable`), but
    hands out its blocks as a new request's, all of them. OffloadingConnectorScheduler appends them to those
    that it has, and would store one block's KV under the key of another. Of other requests there is nothing
    to forget.
    """
    for new in output.scheduled_new_reqs:
        # Another vLLM may keep neither, and no step may end by that.
        status = getattr(self, "_req_status", {}).get(new.req_id)
        for group in getattr(status, "group_states", ()):
            getattr(group, "block_ids", []).clear()
    of_vllm(self, output)


def mended_on_new_request(
    of_vllm: Any, self: OffloadingConnectorScheduler, request: Request
) -> None:
    """Take no `kv_transfer_params` of a client that are no table: they end the engine (0.32)."""
    if not isinstance(request.kv_transfer_params, dict):
        request.kv_transfer_params = None
    of_vllm(self, request)


def mended_build_tails(
    of_vllm: Any, self: OffloadingConnectorScheduler, output: SchedulerOutput
) -> Any:
    """Heed a client's cap on stores if states are kept within a block.

    There it ends the engine (0.32), or is not obeyed (0).
    """
    state = output.kv_connector_block_state
    if state is not None and state.boundary_state_offloads:
        output = copy.copy(output)
        offers = {
            req_id: [offer for offer in offers if offer[2] <= _most_stored(self, req_id)]
            for req_id, offers in state.boundary_state_offloads.items()
        }
        output.kv_connector_block_state = replace(state, boundary_state_offloads=offers)
    return of_vllm(self, output)


def _most_stored(scheduler: OffloadingConnectorScheduler, req_id: str) -> float:
    """Return how many tokens of a request may be stored at most."""
    status = scheduler._req_status.get(req_id)  # noqa: SLF001
    cap = None if status is None else status.max_offload_tokens
    return math.inf if cap is None else cap


# --- resets -----------------------------------------------------------------------------------


def mended_reset_cache(of_vllm: Any, self: OffloadingConnectorScheduler) -> None:
    """Make a reset store no block again if another request may own the block by now.

    vLLM (0.32) sets next_stored_chunk_idx to 0, so that running requests store all their chunks again. In
    groups with a window or a state the blocks before it have been freed and used again, and only those from
    it on are kept up to date (_update_req_states): a request would store another one's KV under its own keys.
    """
    for status in self._req_status.values():
        _forget_past_blocks(self, status)
    of_vllm(self)


def _forget_past_blocks(scheduler: OffloadingConnectorScheduler, status: Any) -> None:
    for group_idx in scheduler._sliding_window_groups:  # noqa: SLF001
        group = status.group_states[group_idx]
        num_past = min(
            group.next_stored_chunk_idx * scheduler.config.blocks_per_chunk, len(group.block_ids)
        )
        # 0 is vLLM's "not there": stores skip it.
        group.block_ids[:num_past] = [0] * num_past


def drop_in_workers() -> dict[int, tuple[int, int]]:
    """Drop all jobs in all workers; return when none touches a KV page any more. It waits for copies only.

    Returns the counts of `Weights` by rank, nothing where the workers cannot be reached.

    A reset leaves to the next step what waits in the workers to be stored. An engine in the caller's process
    may have unmapped its pages by then, or mapped them again (EngineCore.pause_scheduler, sleep).
    """
    found = executor()
    if found is None:
        logger.warning(
            "fskv: the connector's cache was reset from where fskv cannot reach the engine's workers: what "
            "waits there to be stored is gathered with the next step"
        )
        return {}
    told = found.collective_rpc(drop_jobs, timeout=_ANSWER_S)
    return dict(each for of_worker in told for each in of_worker)


def drop_jobs(_worker: object) -> list[tuple[int, tuple[int, int]]]:
    """Have this worker's fskv connectors drop their jobs. On the worker's thread, between two steps."""
    drops = (getattr(connector, "drop_jobs", list) for connector in connectors())
    return [each for drop in drops for each in drop()]


def mended_build_connector_meta(
    of_vllm: Any, self: OffloadingConnectorScheduler, output: SchedulerOutput
) -> Any:
    """Flush no preempted request that has begun to load since: vLLM asserts that it has stores alone.

    A load is a request's only job.
    """
    loading = {job.req_id for job in self._current_batch_load_jobs.values()}
    if loading & set(output.preempted_req_ids or ()):
        output = copy.copy(output)
        output.preempted_req_ids = set(output.preempted_req_ids or ()) - loading
    return of_vllm(self, output)


# --- what the scheduler keeps free for loads --------------------------------------------------


def mended_remaining_blocks(of_vllm: Any, self: Scheduler, request: Request) -> int:
    """Return the blocks to reserve for a request, with those that it still needs of sliding windows.

    vLLM (0.32, 0.33) takes what a window needs at most, less the blocks that the request has: with the null
    ones before the window, which take no room. After a long load that is nothing.
    """
    found: int = of_vllm(self, request)
    try:
        for manager in self.kv_cache_manager.coordinator.single_type_managers:
            most = manager.max_admission_blocks_per_request
            held = len(manager.req_to_blocks.get(request.request_id, ()))
            if most is not None and held:
                whole = -(-min(request.num_tokens, self.max_model_len) // manager.block_size)
                counted = max(0, min(whole, most) - held)
                found += max(0, min(whole - held, most) - counted)
    except AttributeError:  # another vLLM
        pass
    return found


def release_reservation(scheduler: Scheduler, request: Request) -> None:
    """Make a scheduler drop its reservation for a request that has no blocks."""
    scheduler._inflight_prefills.discard(request)  # noqa: SLF001


# --- what a connector's halves keep to themselves ---------------------------------------------


def load_last_chunks(scheduler: OffloadingConnectorScheduler) -> None:
    """Make groups with a draft model's layers store and hit as all other groups do.

    vLLM 0.32 leaves out the last chunk of each hit in a group with layers of an MTP draft, and stores windows
    only where a whole hit ends. So a model with windows hits nothing of what it has stored, and other models
    hit a chunk less. A draft's KV of one position depends on the token after it, so at the end of a hit it
    may be another prompt's. It decides how many of the draft's tokens the model accepts, and nothing else.
    Called before the first request. A vLLM that does it otherwise stays as it is.
    """
    config = scheduler.config
    groups = getattr(config, "kv_group_configs", ())
    of_drafts = [group.group_idx for group in groups if getattr(group, "is_eagle_group", False)]
    if not of_drafts or not hasattr(config, "_replace"):
        return
    alike = (
        group._replace(is_eagle_group=False) if group.group_idx in of_drafts else group
        for group in groups
    )
    scheduler.config = config._replace(kv_group_configs=tuple(alike))
    logger.info(
        "fskv: KV groups with layers of a draft: %s; their last chunk is stored and loaded too",
        of_drafts,
    )


def offer_again(scheduler: OffloadingConnectorScheduler, req_id: str) -> None:
    """Have the recompute of a failed load store the request's chunks again, or the lost ones stay lost.

    vLLM's scheduler believes that chunks it once hit are offloaded.
    """
    status = scheduler._req_status.get(req_id)  # noqa: SLF001
    if status is None:
        return
    for group in status.group_states:
        group.next_stored_chunk_idx = 0
        group.num_hit_chunks = 0
        if hasattr(group, "lookup_hit_end_chunk_idx"):  # since 0.33
            group.lookup_hit_end_chunk_idx = 0


def offer_all_again(scheduler: OffloadingConnectorScheduler) -> None:
    """Have all requests store their chunks in a namespace that was not there when they were computed."""
    for req_id, status in scheduler._req_status.items():  # noqa: SLF001
        _forget_past_blocks(scheduler, status)
        offer_again(scheduler, req_id)


def prefix_of(
    scheduler: OffloadingConnectorScheduler, req_id: str
) -> tuple[list[tuple[int, list[OffloadKey]]], int]:
    """Return (tokens of a chunk, keys of the request) for each group, and the tokens in vLLM's own cache."""
    status = scheduler._req_status[req_id]  # noqa: SLF001
    groups = zip(scheduler.config.kv_group_configs, status.group_states, strict=True)
    return (
        [(group.tokens_per_chunk, state.offload_keys) for group, state in groups],
        status.num_locally_computed_tokens,
    )


def job_of_load(scheduler: OffloadingConnectorScheduler, req_id: str) -> int:
    """Return the job of a load that was just begun: it is its request's only one."""
    jobs: set[int] = scheduler._req_status[req_id].transfer_jobs  # noqa: SLF001
    return next(iter(jobs))


def cached_blocks(kv_cache: KVCacheManager | None) -> object:
    """Return vLLM's table of cached blocks: a reset of its prefix cache replaces the table and tells no
    connector.
    """
    return None if kv_cache is None else kv_cache.block_pool.cached_block_hash_to_block


def cached_blocks_of_caller() -> object:
    """Return the table of cached blocks of the scheduler that is calling; None if none is."""
    found = _caller(lambda one: hasattr(one, "kv_cache_manager"))
    return cached_blocks(None if found is None else found.kv_cache_manager)


def weight_version() -> str | None:
    """Return the engine's name of its weights; None if no engine core that has one is calling."""
    core = _caller(lambda one: hasattr(one, "get_weight_version"))
    return None if core is None else str(core.get_weight_version())


def event_payloads(scheduler: OffloadingConnectorScheduler) -> MutableMapping[OffloadKey, object]:
    """Return vLLM's payloads of chunks, for events that may name them."""
    found: MutableMapping[OffloadKey, object] = scheduler._events_tracker._pending_event_metadata  # noqa: SLF001
    return found


def requests_of_loads(half: OffloadingConnectorWorker) -> dict[int, str]:
    """Return the requests of the load jobs under way: `get_finished` forgets those that it reports."""
    return dict(half._load_jobs)  # noqa: SLF001


def take_deferred_stores(half: OffloadingConnectorWorker | None) -> Iterable[LoadStoreSpec]:
    """Take the last step's stores, which vLLM submits at the start of the next; they count as done."""
    assert half is not None
    deferred, half._unsubmitted_store_jobs = half._unsubmitted_store_jobs, []  # noqa: SLF001
    for job_id, _, _ in deferred:
        half._connector_worker_meta.mark_completed(job_id)  # noqa: SLF001
    return [keys for _, _, keys in deferred]
