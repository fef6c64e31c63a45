"""Everything private of vLLM that fskv touches while an engine runs, and what it puts right from outside.

vLLM gives a connector no way to the engine's workers, a child no way to the connector around it, a tier no
way to the scheduler, and asks for a connector's class without the configuration that names it. Whoever builds
or resets them is among the callers, so `callers` looks there. What is put right is said at each function,
with the versions of vLLM that need it.

Called on the scheduler's thread, but for what takes a worker: that is for the worker's thread, between two
steps.
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

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import (
        OffloadingConnectorWorker,
    )
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
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
    """Return the nearest caller that fits; None if none does."""
    return next((each for each in callers(method) if fits(each)), None)


def configuration_being_built() -> Any:
    """Return the VllmConfig that a caller is making; None if none is."""
    names = "kv_transfer_config", "parallel_config"
    return _caller(lambda one: all(hasattr(one, name) for name in names), "__post_init__")


def executor() -> Any:
    """Return the executor of the engine core that is calling; None if no caller is one."""
    core = _caller(lambda one: hasattr(getattr(one, "model_executor", None), "collective_rpc"))
    return None if core is None else core.model_executor


def resetting_scheduler() -> OffloadingConnectorScheduler | None:
    """Return the scheduler that is resetting its manager, and with it the caller; None if there is none."""
    found: OffloadingConnectorScheduler | None = _caller(
        lambda one: isinstance(one, OffloadingConnectorScheduler)
    )
    return found


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
    """Return what fskv's connectors of the engine's workers have to say; [] if no executor is calling."""
    found = executor()
    told = [] if found is None else found.collective_rpc(handshakes, timeout=_ANSWER_S)
    return [each for of_worker in told for each in of_worker]


def handshakes(_worker: object) -> list[Any]:
    """Return the handshakes of this worker's fskv connectors. On the worker's thread."""
    found = (getattr(each, "handshake", None) for each in connectors())
    return [own for own in found if own is not None]


# --- blocks -----------------------------------------------------------------------------------


def tell_allocated(scheduler: OffloadingConnectorScheduler, blocks: KVCacheBlocks) -> None:
    """Tell a connector which blocks a request got that somebody else may be about to load.

    vLLM frees the blocks of a finished request while its stores may still be queued, and has a store read its
    blocks before they change hands; but a child hears of new owners only from its own loads and from what
    the model runs (0.32, 0.33: _current_batch_allocated_block_ids). Untold, it would store what its sibling
    loads there, under the key of what was there before: wrong KV with a good checksum.
    """
    for group in scheduler.config.kv_group_configs:
        scheduler._current_batch_allocated_block_ids.update(  # noqa: SLF001
            block.block_id for block in blocks.blocks[group.group_idx] if block.block_id
        )


def begin_block_lists_anew() -> None:
    """Have each connector of vLLM's offloading kind forget a request's blocks before it is told all of them.

    vLLM's scheduler (0.32) asks no connector about the next turn of a session that goes on (`resumable`), but
    hands out its blocks as a new request's, all of them. OffloadingConnectorScheduler appends them to those
    that it has, and would store one block's KV under the key of another. Of other requests there is nothing
    to forget. For the life of the process, once; a vLLM that does it otherwise stays as it is.
    """
    of_vllm = getattr(OffloadingConnectorScheduler, "_update_req_states", None)
    if of_vllm is None or hasattr(of_vllm, "of_fskv"):
        return

    def update_req_states(self: OffloadingConnectorScheduler, output: SchedulerOutput) -> None:
        for new in output.scheduled_new_reqs:
            # Another vLLM may keep neither, and no step may end by that.
            status = getattr(self, "_req_status", {}).get(new.req_id)
            for group in getattr(status, "group_states", ()):
                getattr(group, "block_ids", []).clear()
        of_vllm(self, output)

    update_req_states.of_fskv = True  # type: ignore[attr-defined]
    OffloadingConnectorScheduler._update_req_states = update_req_states  # noqa: SLF001


def heed_caps() -> None:
    """Have each connector of vLLM's offloading kind obey what a client sends, and never end by it.

    A cap on what is stored (`kv_transfer_params`, 0.32) ends the engine where states are kept within a block,
    or is not obeyed (0), and a value that is no table ends it anywhere. For the life of the process, once; a
    vLLM that does it otherwise stays as it is.
    """
    tails = getattr(OffloadingConnectorScheduler, "_build_partial_tail_store_jobs", None)
    begins = OffloadingConnectorScheduler.on_new_request
    if hasattr(begins, "of_fskv"):
        return

    def on_new_request(self: OffloadingConnectorScheduler, request: Request) -> None:
        if not isinstance(request.kv_transfer_params, dict):
            request.kv_transfer_params = None
        begins(self, request)

    def build_tails(self: OffloadingConnectorScheduler, output: SchedulerOutput) -> Any:
        state = output.kv_connector_block_state
        if state is not None and state.boundary_state_offloads:
            output = copy.copy(output)
            offers = {
                req_id: [offer for offer in offers if offer[2] <= _most_stored(self, req_id)]
                for req_id, offers in state.boundary_state_offloads.items()
            }
            output.kv_connector_block_state = replace(state, boundary_state_offloads=offers)
        assert tails is not None
        return tails(self, output)

    on_new_request.of_fskv = True  # type: ignore[attr-defined]
    OffloadingConnectorScheduler.on_new_request = on_new_request
    if tails is not None:
        OffloadingConnectorScheduler._build_partial_tail_store_jobs = build_tails  # noqa: SLF001


def _most_stored(scheduler: OffloadingConnectorScheduler, req_id: str) -> float:
    """Return how many tokens of a request may be stored at most."""
    status = scheduler._req_status.get(req_id)  # noqa: SLF001
    cap = None if status is None else status.max_offload_tokens
    return math.inf if cap is None else cap


# --- resets -----------------------------------------------------------------------------------


def forget_past_blocks(scheduler: OffloadingConnectorScheduler) -> None:
    """Make a reset that follows store no block again that may be another request's by now.

    `OffloadingConnectorScheduler.reset_cache` (0.32) sets next_stored_chunk_idx to 0, so that running
    requests store all their chunks again. In groups with a window or a state the blocks before it have been
    freed and used again, and only those from it on are kept up to date (_update_req_states): a request would
    store another one's KV under its own keys.
    """
    for status in scheduler._req_status.values():  # noqa: SLF001
        for group_idx in scheduler._sliding_window_groups:  # noqa: SLF001
            group = status.group_states[group_idx]
            num_past = min(
                group.next_stored_chunk_idx * scheduler.config.blocks_per_chunk,
                len(group.block_ids),
            )
            # 0 is vLLM's "not there": stores skip it.
            group.block_ids[:num_past] = [0] * num_past


def drop_in_workers() -> None:
    """Return when no worker touches a KV page any more for what was asked of it; waits for copies only.

    A reset leaves to the next step what waits in the workers to be stored: that is gathered then. But an
    engine resets when it gives its KV up. One in processes of its own waits until its connector is idle
    before it sleeps (has_work, has_pending_push_work). One in the caller's process does not: no step comes
    before its pages are unmapped, or mapped again with other bytes (EngineCore.pause_scheduler, sleep).
    """
    found = executor()
    if found is None:
        logger.warning(
            "fskv: the connector's cache was reset from where fskv cannot reach the engine's workers: what "
            "waits there to be stored is gathered with the next step"
        )
        return
    found.collective_rpc(drop_jobs, timeout=_ANSWER_S)


def drop_jobs(_worker: object) -> None:
    """Have this worker's fskv connectors drop their jobs. On the worker's thread, between two steps."""
    for connector in connectors():
        drop = getattr(connector, "drop_jobs", None)  # FskvConnector's
        if drop is not None:
            drop()


def without_new_loads(
    scheduler: OffloadingConnectorScheduler, output: SchedulerOutput
) -> SchedulerOutput:
    """Return the output without those preempted requests that have begun to load since: nothing to flush.

    A load is a request's only job.
    """
    loading = {job.req_id for job in scheduler._current_batch_load_jobs.values()}  # noqa: SLF001
    again = loading & set(output.preempted_req_ids or ())
    if not again:
        return output
    output = copy.copy(output)
    output.preempted_req_ids = set(output.preempted_req_ids or ()) - again
    return output


# --- what the scheduler keeps free for loads --------------------------------------------------


def reserve_windows(scheduler: Scheduler) -> None:
    """Have what a request still needs of a sliding window be reserved, once for each scheduler.

    vLLM (0.32, 0.33) takes what a window needs at most, less the blocks that the request has: with the null
    ones before the window, which take no room. After a long load that is nothing.
    """
    try:
        of_vllm, most_tokens = scheduler._request_remaining_blocks, scheduler.max_model_len  # noqa: SLF001
        windows = [
            (manager.req_to_blocks, manager.block_size, manager.max_admission_blocks_per_request)
            for manager in scheduler.kv_cache_manager.coordinator.single_type_managers
            if manager.max_admission_blocks_per_request is not None
        ]
    except AttributeError:
        return  # another vLLM
    if not windows or hasattr(of_vllm, "of_fskv"):
        return

    def remaining_blocks(request: Request) -> int:
        found: int = of_vllm(request)
        for blocks, block_size, most in windows:
            held = len(blocks.get(request.request_id, ()))
            if held:
                whole = -(-min(request.num_tokens, most_tokens) // block_size)
                counted = max(0, min(whole, most) - held)
                found += max(0, min(whole - held, most) - counted)
        return found

    remaining_blocks.of_fskv = True  # type: ignore[attr-defined]
    scheduler._request_remaining_blocks = remaining_blocks  # noqa: SLF001


def release_reservation(scheduler: Scheduler, request: Request) -> None:
    """Have a scheduler reserve nothing any more for a request that has no blocks."""
    scheduler._inflight_prefills.discard(request)  # noqa: SLF001


# --- what a connector's halves keep to themselves ---------------------------------------------


def load_last_chunks(scheduler: OffloadingConnectorScheduler) -> None:
    """Have groups with layers of a draft store and hit as all others do.

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


def prefix_of(
    scheduler: OffloadingConnectorScheduler, req_id: str
) -> tuple[list[tuple[int, list[OffloadKey]]], int]:
    """Return of each group its tokens a chunk and a request's keys, and what vLLM's own cache has of it."""
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
    """Return what a reset of vLLM's prefix cache replaces by another; a connector hears nothing of it."""
    return None if kv_cache is None else kv_cache.block_pool.cached_block_hash_to_block


def event_payloads(scheduler: OffloadingConnectorScheduler) -> MutableMapping[OffloadKey, object]:
    """Return what vLLM remembers of chunks, for events that may name them."""
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
