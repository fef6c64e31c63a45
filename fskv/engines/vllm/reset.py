"""What vLLM 0.32 gets wrong about its offloading connectors when a cache is reset, put right from outside.

`OffloadingConnectorScheduler.reset_cache` sets next_stored_chunk_idx to 0, so that running requests store all
their chunks again. In groups with a window or a state the blocks before it have been freed and used again,
and only those from it on are kept up to date (_update_req_states): a request would store another one's KV
under its own keys. FskvConnector, its siblings in a FskvMultiConnector and the connector above FskvTier are
all of that class.

It also leaves to the next step what waits in the workers to be stored: that is gathered then. But an engine
resets when it gives its KV up. One in processes of its own waits until its connector is idle before it sleeps
(has_work, has_pending_push_work). One in the caller's process does not: no step comes before its pages are
unmapped, or mapped again with other bytes (EngineCore.pause_scheduler, sleep). So the workers are told at
once: `drop_in_workers`.

Called on the scheduler's thread, but `drop_jobs`.
"""

from __future__ import annotations

import copy
import inspect
import logging
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
)

from fskv.engines.vllm.executor import connectors, executor

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

logger = logging.getLogger(__name__)

_ANSWER_S = (
    60.0  # copies of memory take far less; a worker that hangs must not hold a reset for ever
)


def forget_past_blocks(scheduler: OffloadingConnectorScheduler) -> None:
    """Make a reset that follows store no block again that may be another request's by now."""
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
    """Return when no worker touches a KV page any more for what was asked of it; waits for copies only."""
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


def resetting_scheduler() -> OffloadingConnectorScheduler | None:
    """Return the scheduler that is resetting its manager, and with it the caller; None if there is none.

    vLLM gives a secondary tier no way to it.
    """
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, OffloadingConnectorScheduler):
            return caller
        frame = frame.f_back
    return None
