"""What vLLM's scheduler is told of a root and of the lookup, as metrics."""

from __future__ import annotations

import math

import pytest
import world

from fskv.bounds.limits import RootState
from fskv.data_path.breaker import FAILURES
from fskv.observe import metrics
from fskv.offload.mover import News
from fskv.types import ChunkId, Status

pytestmark = world.VLLM


@pytest.fixture
def manager(make_manager):
    return make_manager()


def stats(manager):
    return manager.get_stats().data["data"]


def test_counters_begin_at_zero_so_that_an_alert_sees_the_first(manager):
    first = stats(manager)
    for counter in metrics.SCHEDULER_COUNTERS:
        values = [(reason,) for reason in counter.values] or [()]
        found = {labels: first[f"vllm:{counter.name}"][labels] for labels in values}
        assert found == dict.fromkeys(values, 0)
    assert first["vllm:fskv_root_info"] == {("/nowhere",): 1.0}
    assert first["vllm:fskv_namespace_info"] == {("a/b@c",): 1.0}


def test_every_counter_belongs_to_one_side_or_has_no_zero_to_begin_with():
    sides = {*metrics.SCHEDULER_COUNTERS, *metrics.BUDGET_COUNTERS, *metrics.WORKER_COUNTERS}
    assert {m for m in metrics.ALL_METRICS if m.kind == "counter"} == sides, (
        "put a new counter into one of the *_COUNTERS of fskv/observe/metrics.py"
    )


def test_a_bound_that_is_withdrawn_is_infinite_and_not_what_it_was(manager):
    class Capacity:
        state = RootState(bounds={"root": (500, 7)})
        paused, up, num_restarts = False, True, 2

        @staticmethod
        def close():
            pass

        @staticmethod
        def report_use(used, hits, take_sights, at_once=False):
            return []

    manager.chunks.capacity = Capacity
    first = stats(manager)
    assert first["vllm:fskv_bound_bytes"] == {("root",): 500.0}
    assert first["vllm:fskv_bound_left_bytes"] == {("root",): 7.0}
    assert first["vllm:fskv_maintenance_restarts"] == {(): 2}
    Capacity.state = RootState()
    assert stats(manager)["vllm:fskv_bound_bytes"] == {("root",): math.inf}


def test_what_failed_is_in_quarantine_until_it_is_stored_again(manager):
    chunks = [ChunkId(bytes([n]) * 32, 0) for n in range(3)]
    manager.on_news(News(failed_loads={chunks[0]: Status.CORRUPT, chunks[1]: Status.STALE}))
    manager.on_news(News(failed_loads={chunks[2]: Status.MISSING}))
    assert stats(manager)["vllm:fskv_quarantined_chunks"] == {(): 2.0}
    manager.on_news(News(stored={chunks[0]: {0}}))
    assert stats(manager)["vllm:fskv_quarantined_chunks"] == {(): 1.0}


def test_a_breaker_that_opened_and_closed_between_two_looks_was_open(manager):
    stats(manager)
    for _ in range(FAILURES):
        manager.chunks.breaker.record(Status.TIMED_OUT)
    manager.chunks.breaker.record(Status.OK)
    now = stats(manager)
    assert "vllm:fskv_breaker_open" not in now, "the gauge has not changed"
    assert now["vllm:fskv_breaker_openings"] == {(): 1}
