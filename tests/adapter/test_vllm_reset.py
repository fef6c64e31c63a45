"""Resets of vLLM's caches in the middle of requests, with vLLM's own scheduler side of its connectors."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
from world import VLLM

pytest.importorskip("vllm", reason="needs the vllm environment: make test")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM and torch among themselves
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        OffloadingConnectorScheduler,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import (
        OffloadingConnector,
    )

    from fskv.engines.vllm_connector import FskvConnector

pytestmark = VLLM


def scheduler_with(jobs):
    """vLLM's scheduler side with these jobs, (request, is_store) by number; loads are of this step."""
    made = OffloadingConnectorScheduler.__new__(OffloadingConnectorScheduler)
    made.config = SimpleNamespace(
        supports_partial_tail=False, kv_group_configs=(), blocks_per_chunk=1
    )
    made.manager = SimpleNamespace(
        on_schedule_end=lambda context: None, on_request_finished=lambda context: None
    )
    made._req_status = {}
    for number, (req_id, _) in jobs.items():
        status = made._req_status.setdefault(req_id, SimpleNamespace(transfer_jobs=set()))
        status.transfer_jobs.add(number)
    made._jobs = {n: SimpleNamespace(is_store=is_store) for n, (_, is_store) in jobs.items()}
    made._current_batch_load_jobs = {
        n: SimpleNamespace(req_id=req_id) for n, (req_id, is_store) in jobs.items() if not is_store
    }
    made._current_batch_jobs_to_flush, made._current_batch_allocated_block_ids = set(), set()
    made._sliding_window_groups, made._block_id_to_pending_jobs = (), {}
    return made


def step(preempted):
    return SimpleNamespace(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[], new_block_ids=[], resumed_req_ids=set(), num_reqs=0
        ),
        num_scheduled_tokens={},
        finished_req_ids=set(),
        preempted_req_ids=preempted,
        kv_cache_block_copies=None,
        kv_connector_block_state=None,
    )


JOBS = {1: ("stores", True), 2: ("stores", True), 3: ("loads", False)}
PREEMPTED = {"stores", "loads", "idle"}


class Stock(OffloadingConnector):
    def __init__(self, scheduler):
        self.connector_scheduler = scheduler


class Ours(FskvConnector):
    def __init__(self, scheduler):
        self.connector_scheduler = scheduler
        self._budget = SimpleNamespace(on_step=lambda scheduled: None)


def multi(scheduler):
    from fskv.engines.vllm_multi import FskvMultiConnector

    made = FskvMultiConnector.__new__(FskvMultiConnector)
    made._connectors, made._extra_async_saves = [Stock(scheduler)], {"r": 1}
    return made


def test_negative_control_vllms_own_connector_stops_the_engine():
    with pytest.raises(AssertionError):
        Stock(scheduler_with(JOBS)).build_connector_meta(step(PREEMPTED))


@pytest.mark.parametrize("make", [Ours, multi])
def test_a_request_that_a_reset_preempts_and_that_loads_in_the_same_step_is_no_error(make):
    connector, output = make(scheduler_with(JOBS)), step(PREEMPTED)
    meta = connector.build_connector_meta(output)
    of_child = meta.metadata[0] if make is multi else meta
    assert set(of_child.load_jobs) == {3}
    assert of_child.jobs_to_flush == {1, 2}, "stores of preempted requests are flushed as ever"
    assert output.preempted_req_ids == PREEMPTED, "vLLM's own object is as it was"
    if make is multi:
        assert meta.extra_async_saves == {"r": 1}
        assert connector.build_connector_meta(step(None)).extra_async_saves is None
