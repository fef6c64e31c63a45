"""vLLM's scheduler side of its offloading connector, with jobs that a test gives it, and a step of vLLM's."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM and torch among themselves
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        OffloadingConnectorScheduler,
    )


def scheduler_with(jobs):
    """vLLM's scheduler side with these jobs, (request, is_store) by number; loads are of this step."""
    made = OffloadingConnectorScheduler.__new__(OffloadingConnectorScheduler)
    made.config = SimpleNamespace(
        supports_partial_tail=False, kv_group_configs=(), blocks_per_chunk=1
    )
    made.manager = SimpleNamespace(
        on_schedule_end=lambda context: None,
        on_request_finished=lambda context: None,
        admit=lambda *_: None,
        take_touches=list,
        rest=lambda reason: None,
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
        total_num_scheduled_tokens=0,
        finished_req_ids=set(),
        preempted_req_ids=preempted,
        kv_cache_block_copies=None,
        kv_connector_block_state=None,
    )


def add_epochs(connector, *, fixed=True):
    """Give a bare connector of one rank what it needs to follow the weights."""
    from fskv.engines.vllm.epochs import Epochs

    connector._epochs = Epochs(1, None, fixed=fixed, has_siblings=False)
    connector._setup = SimpleNamespace(config=SimpleNamespace(weights_run=None))
    connector._kv_cache_manager = None
