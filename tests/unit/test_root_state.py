"""What an engine is told of its root, and what its scheduler makes of that."""

from __future__ import annotations

import dataclasses
import math

import pytest
import world

from fskv.bounds.quota import Claim, Limits, Usage
from fskv.bounds.status import BoundsSaid, RootState, changes, root_state
from fskv.data_path.breaker import FAILURES
from fskv.offload.mover import News
from fskv.root.filesystem import Space

MINE, OTHER = "cpu-x86_64/a@0000000000000001", "cpu-x86_64/b@0000000000000002"
SPACE = Space(1000, 400, 10, 5)
USAGE = Usage(
    namespaces={MINE: (300, 3), OTHER: (50, 1)}, tenants={MINE: "acme", OTHER: "acme"}, at_ms=7000
)


def _state(limits, others=(), **options):
    claim = Claim("me", MINE, "acme", limits, granted=310, written=300)
    return root_state(USAGE, [claim, *others], SPACE, claim, holder=False, **options)


def test_an_engine_is_told_its_own_share_and_the_tightest_of_all_bounds():
    watcher = Claim("watcher", None, None, Limits(max_nbytes=500, keep_free=100))
    state = _state(Limits(max_nbytes=900, namespace_max_nbytes=600), [watcher])
    assert (state.nbytes, state.namespace_nbytes, state.tenant_nbytes) == (350, 300, 350)
    assert state.counted_at_ms == 7000
    # 310 were granted and none of it is in the count: it may all come yet.
    assert state.bounds == {
        "root": (500, 0),
        "namespace": (600, 0),
        "free": (900, 290),
    }
    assert _state(Limits()).bounds == {}


def test_only_what_has_changed_is_told_and_what_moves_all_the_time_can_wait():
    first = _state(Limits(max_nbytes=900))
    assert changes(first, None, 1000) == (dataclasses.asdict(first), True)
    assert changes(first, first, 1000) == ({}, False)
    moved = dataclasses.replace(first, root_left=11, counted_at_ms=8000, free=400)
    assert changes(moved, first, 1000) == ({"root_left": 11, "counted_at_ms": 8000}, False)
    pruned = dataclasses.replace(first, pruned_files=1)
    assert changes(pruned, first, 1000) == ({"pruned_files": 1}, True)
    assert dataclasses.replace(first, **changes(moved, first, 1000)[0]) == moved


def test_a_bound_is_said_once_and_again_when_it_is_another():
    said = BoundsSaid()
    assert said.news(RootState(root_limit=500, free_limit=10_000)) == [
        ("root", 500),
        ("free", 10_000),
    ]
    assert said.news(RootState(root_limit=500, root_left=3, free_limit=10_050)) == []
    assert said.news(RootState(root_limit=400, free_limit=10_050)) == [("root", 400)]


def test_a_state_of_other_types_is_refused():
    with pytest.raises(TypeError):
        dataclasses.replace(RootState(), nbytes="1")


class TestScheduler:
    pytestmark = world.VLLM

    def make(self, **options):
        pytest.importorskip("vllm", reason="the adapter needs the vllm environment: make test")
        from fskv.config import StoreConfig
        from fskv.engines.vllm.manager import FskvHandshake, FskvManager

        config = {"root": "/nowhere", "maintenance": "off", **options}
        manager = FskvManager(StoreConfig.from_mapping(config), 2)
        worker = FskvHandshake(0, 1, 2, "/nowhere/a/b@c", b"d", 0o700, 0o600, {0: 4096})
        manager.set_workers([worker])
        return manager

    def stats(self, manager):
        return manager.get_stats().data["data"]

    def test_counters_begin_at_zero_so_that_an_alert_sees_the_first(self):
        from fskv.observe import metrics

        manager = self.make()
        first = self.stats(manager)
        for counter in metrics.SCHEDULER_COUNTERS:
            values = [(reason,) for reason in counter.values] or [()]
            assert {
                labels: first[f"vllm:{counter.name}"][labels] for labels in values
            } == dict.fromkeys(values, 0)
        assert first["vllm:fskv_root_info"] == {("/nowhere",): 1.0}
        assert first["vllm:fskv_namespace_info"] == {("a/b@c",): 1.0}
        manager.shutdown()

    def test_every_counter_belongs_to_one_side_or_has_no_zero_to_begin_with(self):
        from fskv.observe import metrics

        sides = {*metrics.SCHEDULER_COUNTERS, *metrics.BUDGET_COUNTERS, *metrics.WORKER_COUNTERS}
        assert {m for m in metrics.ALL_METRICS if m.kind == "counter"} == sides, (
            "put a new counter into one of the *_COUNTERS of fskv/observe/metrics.py"
        )

    def test_a_bound_that_is_withdrawn_is_infinite_and_not_what_it_was(self):
        class Capacity:
            state = RootState(root_limit=500, root_left=7)
            paused, up, num_restarts = False, True, 2

            @staticmethod
            def close():
                pass

        manager = self.make()
        manager.chunks.capacity = Capacity
        first = self.stats(manager)
        assert first["vllm:fskv_bound_bytes"] == {("root",): 500.0}
        assert first["vllm:fskv_bound_left_bytes"] == {("root",): 7.0}
        assert first["vllm:fskv_maintenance_restarts"] == {(): 2}
        Capacity.state = RootState()
        assert self.stats(manager)["vllm:fskv_bound_bytes"] == {("root",): math.inf}
        manager.shutdown()

    def test_what_failed_is_in_quarantine_until_it_is_stored_again(self):
        from fskv.types import ChunkId, Status

        manager = self.make()
        chunks = [ChunkId(bytes([n]) * 32, 0) for n in range(3)]
        manager.on_news(News(failed_loads={chunks[0]: Status.CORRUPT, chunks[1]: Status.STALE}))
        manager.on_news(News(failed_loads={chunks[2]: Status.MISSING}))
        assert self.stats(manager)["vllm:fskv_quarantined_chunks"] == {(): 2.0}
        manager.on_news(News(stored={chunks[0]: {0}}))
        assert self.stats(manager)["vllm:fskv_quarantined_chunks"] == {(): 1.0}
        manager.shutdown()

    def test_a_breaker_that_opened_and_closed_between_two_looks_was_open(self):
        from fskv.types import Status

        manager = self.make()
        self.stats(manager)
        for _ in range(FAILURES):
            manager.chunks.breaker.record(Status.TIMED_OUT)
        manager.chunks.breaker.record(Status.OK)
        now = self.stats(manager)
        assert "vllm:fskv_breaker_open" not in now, "the gauge has not changed"
        assert now["vllm:fskv_breaker_openings"] == {(): 1}
        manager.shutdown()
