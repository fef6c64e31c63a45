"""FskvTier behind vLLM's own TieringOffloadingManager: what the manager does with its answers.

The manager, its CPU tier and the scheduler that resets them are vLLM's; rows, files and the tier are those of
tier_rig.py. What a request would be told is what vLLM's prefix lookup says.
"""

from __future__ import annotations

import inspect
import os
import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs the vllm environment: make test")

import tier_rig
from resettable_half import scheduler_around
from tier_rig import NUM_ROWS, POISON, REQUEST, STEP
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as vllm_scheduler
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)
from world import VLLM, wait_for

from fskv.engines.vllm_tier.tier import FskvTier
from fskv.index.presence import Findings
from fskv.offload import lookup

pytestmark = VLLM


def manager_of(rig):
    region = SimpleNamespace(create_kv_memoryview=lambda: rig.view, cleanup=lambda: None)
    manager = TieringOffloadingManager(
        CPUPrimaryTierOffloadingManager(NUM_ROWS, region), [rig.tier]
    )
    manager._job_id_counter = 1000  # those before are the rig's
    return manager


def store(rig, numbers):
    """Put the first group's chunks of these numbers on disk; return their keys and pages."""
    pages = {}
    for number in numbers:
        key = rig.keys(number)[0]
        pages[key] = rig.fill_rows(0, (0, 1), seed=number)[0, 0]
        assert rig.finish(rig.submit([key], [0], load=False)).success
        wait_for(lambda: rig.poll() is None or not rig.tier._manager.chunks.storing)
    return list(pages), pages


def prefix(manager, keys, request):
    """vLLM's _maximal_prefix_lookup with what it needs."""
    tracker = SimpleNamespace(record_lookup=lambda *_: None)
    return vllm_scheduler.OffloadingConnectorScheduler._maximal_prefix_lookup(
        SimpleNamespace(manager=manager, _events_tracker=tracker), keys, request, None, None, 0
    )


def window(manager, keys, request):
    """vLLM's _sliding_window_lookup, of a window of one chunk."""
    return vllm_scheduler.OffloadingConnectorScheduler._sliding_window_lookup(
        SimpleNamespace(manager=manager), keys, 1, request
    )


def ask(manager, keys, request, *, steps, scan=prefix):
    """Ask in every step until there is an answer; return it, or None if there was none by then."""
    (tier,) = manager.secondary_tiers
    for _ in range(steps):
        found = scan(manager, keys, request)
        manager.on_schedule_end(STEP)
        manager.get_stats()
        if found is not None:
            return found
        wait_for(lambda: tier._collect() or not tier._jobs)
    return None


@pytest.mark.parametrize("bounded", [True, False])
def test_a_hit_of_more_chunks_than_the_cpu_tier_has_rows_ends_with_those_that_fit(
    make_rig, monkeypatch, bounded
):
    """The control: without the bound the request is deferred for ever."""
    if not bounded:
        monkeypatch.setattr(FskvTier, "_may_load", lambda *_: True)
    rig = make_rig()
    keys, pages = store(rig, range(1, 2 * NUM_ROWS + 7))
    manager = manager_of(rig)
    request = ReqContext("long")
    manager.on_new_request(request)
    found = ask(manager, keys, request, steps=20 if bounded else 50)
    assert found == (NUM_ROWS if bounded else None)
    rows = manager.prepare_load(keys[:found], request).chunk_ids.tolist() if bounded else []
    for key, row in zip(keys, rows, strict=False):
        assert rig.rows[row][:40000].tobytes() == pages[key][:40000]


@pytest.mark.parametrize("tokens_per_block", [4096, 1])
def test_a_slow_mount_is_waited_for(make_rig, monkeypatch, tokens_per_block):
    """As a control, chunks of one token each: to compute them takes no time, and they are not waited for."""
    probe, a_chunk_s = lookup.probe_chunks, 0.05

    def slow(files, wanted, missed_before):
        time.sleep(a_chunk_s * len(wanted))
        return Findings(probe(files, wanted, missed_before).there, a_chunk_s * len(wanted))

    monkeypatch.setattr(tier_rig, "TOKENS_PER_BLOCK", tokens_per_block)
    keys, _ = store(make_rig(), range(1, 33))
    monkeypatch.setattr(lookup, "probe_chunks", slow)
    rig = make_rig(lookup_timeout_s=0.5)
    answers = set()
    for wanted in (rig.keys(99)[:1], keys):  # of a slow disk small batches are asked
        answers = {LookupResult.RETRY}
        while LookupResult.RETRY in answers:
            answers = {rig.tier.lookup(key, REQUEST) for key in wanted}
            rig.tier.on_schedule_end(STEP)
            time.sleep(0.005)
    assert (LookupResult.MISS not in answers) is (tokens_per_block > 1)


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("scan", [prefix, window])
def test_what_vllm_may_not_need_is_not_loaded_before_that_is_known(
    make_rig, monkeypatch, scan, there
):
    """Of a window vLLM needs the last chunk that is there, of a prefix none behind a gap."""
    keys, _ = store(make_rig(), [1, 2])
    rig = make_rig(lookup_timeout_s=60)
    first, other = keys if scan is prefix else reversed(keys)  # as vLLM asks
    assert rig.lookup(other) is LookupResult.HIT
    if not there:
        os.unlink(rig.path(first))
    probe, answer = lookup.probe_chunks, threading.Event()
    monkeypatch.setattr(lookup, "probe_chunks", lambda *asked: answer.wait() and probe(*asked))
    loaded = []
    load = rig.tier.submit_load
    monkeypatch.setattr(rig.tier, "submit_load", lambda job: loaded.extend(job.keys) or load(job))
    manager = manager_of(rig)
    request = ReqContext("r")
    manager.on_new_request(request)
    assert ask(manager, keys, request, steps=3, scan=scan) is None
    assert loaded == []
    answer.set()
    found = []

    def known():
        found.append(ask(manager, keys, request, steps=1, scan=scan))
        return found[-1] is not None

    wait_for(known)
    if there:
        assert loaded == (keys if scan is prefix else [first])
        assert found[-1] == 2
    else:
        assert loaded == ([] if scan is prefix else [other])
        assert found[-1] == len(loaded)


def test_a_row_that_is_lost_before_its_request_ran_is_loaded_once_more_and_after_it_ran_again(
    make_rig,
):
    rig = make_rig()
    (key,), _ = store(rig, [1])
    manager = manager_of(rig)
    request = ReqContext("r")
    manager.on_new_request(request)
    answers = []
    for _ in range(3):
        answers.append(ask(manager, [key], request, steps=5))
        manager.primary_tier.reset_cache()  # every row is lost
    assert answers == [1, 1, 0]
    manager.on_schedule_end(ScheduleEndContext(["r"], ()))
    assert ask(manager, [key], request, steps=5) == 1
    manager.primary_tier.reset_cache()
    assert ask(manager, [key], request, steps=5) == 1
    manager.on_schedule_end(ScheduleEndContext((), ["r"]))
    manager.primary_tier.reset_cache()
    assert ask(manager, [key], request, steps=5) == 1


@pytest.mark.parametrize("held", [True, False])
def test_after_a_reset_no_row_is_loaded_into_that_a_worker_still_writes(
    make_rig, monkeypatch, held
):
    """Workers hear of a reset with the next step; the control: a load that does not wait for its output."""
    if not held:
        monkeypatch.setattr(FskvTier, "_may_load", lambda *_: True)
    rig = make_rig()
    (key,), pages = store(rig, [1])
    manager = manager_of(rig)
    old, new = ReqContext("old"), ReqContext("new")
    manager.on_new_request(old)
    manager.on_schedule_end(STEP)  # a step that is still in flight
    (row,) = manager.prepare_store([rig.keys(9)[0]], old).store_spec.chunk_ids.tolist()
    manager.reset_cache()
    manager.on_new_request(new)

    def asked():
        """Steps are scheduled ahead of their outputs."""
        found = prefix(manager, [key], new)
        manager.on_schedule_end(STEP)
        return found is not None

    wait_for(asked)
    rig.rows[row] = POISON  # the worker's copy of before the reset ends
    manager.get_stats()  # the output of the step before the reset
    assert (prefix(manager, [key], new) == 0) is held
    manager.get_stats()  # the output of the step that told the worker
    assert ask(manager, [key], new, steps=10) == 1
    (given,) = manager.prepare_load([key], new).chunk_ids.tolist()
    assert given == row
    assert (rig.rows[row][:40000].tobytes() == pages[key][:40000]) is held


@pytest.mark.parametrize("healed", [True, False])
def test_a_reset_takes_blocks_that_changed_hands_from_the_scheduler_above(
    make_rig, monkeypatch, healed
):
    """The control: without it vLLM's reset offers blocks that are another request's, and the CPU tier serves
    them to requests whose results are stored here."""
    rig = make_rig()
    if not healed:
        of_vllm = inspect.unwrap(vllm_scheduler.OffloadingConnectorScheduler.reset_cache)
        monkeypatch.setattr(vllm_scheduler.OffloadingConnectorScheduler, "reset_cache", of_vllm)
    scheduler = scheduler_around(manager_of(rig))
    windowed = SimpleNamespace(next_stored_chunk_idx=3, block_ids=[11, 12, 13, 14])
    full = SimpleNamespace(next_stored_chunk_idx=3, block_ids=[21, 22, 23, 24])
    running = SimpleNamespace(
        req=SimpleNamespace(is_finished=lambda: False),
        group_states=(full, windowed),
        transfer_jobs=set(),
        partial_tail_boundary=None,
    )
    scheduler._req_status = {"r": running}
    scheduler._sliding_window_groups = (1,)
    scheduler.reset_cache()
    assert windowed.next_stored_chunk_idx == 0
    assert windowed.block_ids == ([0, 0, 0, 14] if healed else [11, 12, 13, 14])
    assert full.block_ids == [21, 22, 23, 24], "these are the request's to its end"
