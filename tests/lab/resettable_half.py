"""vLLM's scheduler side of its offloading connector around a manager: it can be reset and takes events."""

from __future__ import annotations

import warnings

from scheduler_half import scheduler_with

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM and torch among themselves
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import events, metrics
    from vllm.v1.kv_offload.base import OffloadingKVEventsConfig


def tracker_of_vllm(*, describing):
    """vLLM's tracker of events, with the tokens of each chunk if `describing`."""
    return events.OffloadingEventsTracker(OffloadingKVEventsConfig(describing, describing))


def scheduler_around(manager, *, describing=False):
    """vLLM's scheduler side that asks this manager; it has no request and no job."""
    made = scheduler_with({})
    vars(made).update(
        manager=manager,
        _job_counter=0,
        _stale_job_threshold=0,
        _chunks_being_loaded=None,
        _events_tracker=tracker_of_vllm(describing=describing),
        _connector_stats=metrics.OffloadingConnectorStats(),
    )
    return made
