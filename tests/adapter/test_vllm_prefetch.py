"""What the workers are told to read ahead: the scheduler's side, without an engine."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import world

from fskv.hybrid_planner import GroupKind, GroupSpec, needed_chunks
from fskv.types import ChunkId

pytest.importorskip("vllm", reason="these tests need the vllm environment: make test")
pytestmark = world.VLLM


@dataclass(eq=False)
class Asked:
    request_id: str


def chunk(number):
    return ChunkId(number.to_bytes(4, "big"), 0)


class Waiting:
    """Requests that wait, and what they would load; `plan` returns numbers of chunks: wanted, unwanted."""

    def __init__(self, room, **hits):
        from fskv.engines.vllm.prefetch import WaitingRequests

        self.hits = hits
        self.asked = []
        self.requests = WaitingRequests(self._lookup, lambda: room)
        for req_id in hits:
            self.arrive(req_id)

    def arrive(self, req_id):
        self.requests.arrived(Asked(req_id))

    def _lookup(self, request):
        self.asked.append(request.request_id)
        found = self.hits[request.request_id]
        return None if found is None else [(chunk(n), 0) for n in found]

    def plan(self):
        order = self.requests.plan()
        if order is None:
            return None
        assert all(first_block == 0 for _, first_block in order.wanted)
        wanted = [chunk for chunk, _ in order.wanted]
        return tuple(
            [int.from_bytes(each.key_hash, "big") for each in part]
            for part in (wanted, order.unwanted)
        )


def test_what_waits_is_told_once_in_the_order_in_which_it_came():
    waiting = Waiting(10, a=[1, 2], b=[3], c=[])
    assert waiting.plan() == ([1, 2, 3], [])
    assert waiting.plan() is None
    assert waiting.asked == ["a", "b", "c"]


def test_a_lookup_that_is_not_known_yet_is_asked_again_and_holds_nobody_up():
    waiting = Waiting(10, a=None, b=[3])
    assert waiting.plan() == ([3], [])
    waiting.hits["a"] = [1]
    assert waiting.plan() == ([1], [])
    assert waiting.asked == ["a", "b", "a"]


def test_no_more_is_told_than_there_is_room_for_and_the_rest_when_there_is_some():
    waiting = Waiting(3, a=[1, 2], b=[3, 4], c=[5])
    assert waiting.plan() == ([1, 2, 3], [])
    assert waiting.plan() is None
    assert waiting.asked == ["a", "b"], "who finds no room is not looked up"
    waiting.requests.gone(["a"])  # admitted: its load takes them in the step that forgets them
    assert waiting.plan() == ([4, 5], [1, 2])
    waiting.requests.gone(["b", "c"])
    assert waiting.plan() == ([], [3, 4, 5])
    assert not any(vars(waiting.requests)[name] for name in ("_told", "_found", "_waiting_for"))


def test_a_chunk_that_two_wait_for_is_read_once_and_kept_for_the_second():
    waiting = Waiting(3, a=[1, 2], b=[1, 2, 3])
    assert waiting.plan() == ([1, 2, 3], [])
    waiting.requests.gone(["a"])
    assert waiting.plan() is None
    waiting.requests.gone(["b"])
    assert waiting.plan() == ([], [1, 2, 3])


def test_who_is_gone_before_it_was_told_is_told_of_never():
    waiting = Waiting(1, a=[1], b=[2, 3], c=[4])
    assert waiting.plan() == ([1], [])
    waiting.requests.gone(["b", "c", "nobody"])
    waiting.requests.gone(["a"])
    assert waiting.plan() == ([], [1])
    assert waiting.asked == ["a"]


def test_who_was_admitted_is_never_looked_up_again():
    """VLLM's lookup forgets the request's blocks: what was stored of it then would be another's KV."""
    waiting = Waiting(10, a=None)
    assert waiting.plan() is None
    waiting.requests.gone(["a"])
    assert waiting.plan() is None
    assert waiting.asked == ["a"]


def test_negative_control_who_was_not_admitted_is():
    waiting = Waiting(10, a=None)
    waiting.plan()
    waiting.plan()
    assert waiting.asked == ["a", "a"]


def test_few_are_looked_up_in_a_step():
    waiting = Waiting(100, **{str(n): [n] for n in range(10)})
    assert waiting.plan() == ([0, 1, 2, 3], [])
    assert waiting.plan() == ([4, 5, 6, 7], [])


def test_before_the_handshake_and_after_a_reset_nothing_is_told():
    waiting = Waiting(0, a=[1])
    assert waiting.plan() is None
    assert waiting.asked == []
    waiting = Waiting(10, a=[1], b=None)
    assert waiting.plan() == ([1], [])
    waiting.requests.reset()
    assert waiting.plan() is None
    assert waiting.asked == ["a", "b"]


@pytest.mark.parametrize("computed", [0, 16, 48, 64, 112])
@pytest.mark.parametrize("hit", [128, 192, 208])
def test_the_first_block_is_the_first_that_the_hit_needs(hit, computed):
    from fskv.engines.vllm.prefetch import first_blocks

    full = GroupSpec(0, GroupKind.FULL, 16, None)
    found = first_blocks(full, 4, hit, computed)
    assert [idx for idx, _ in found] == list(needed_chunks(full, 4, hit, computed))
    assert [start for _, start in found] == [computed // 16 % 4] + [0] * (len(found) - 1)
    window = GroupSpec(1, GroupKind.SLIDING_WINDOW, 16, 40)
    seen = first_blocks(window, 4, hit, computed)
    first = seen[0][0] * 4 + seen[0][1]
    assert first == max(computed, hit - 39) // 16
    assert seen[-1][0] == (hit - 1) // 64


@pytest.mark.parametrize(
    ("manager", "num_hit"),
    [
        (SimpleNamespace(), 0),
        (SimpleNamespace(coordinator=SimpleNamespace()), 0),
        (SimpleNamespace(coordinator=SimpleNamespace(find_longest_cache_hit=lambda: 0)), 0),
        (SimpleNamespace(coordinator=SimpleNamespace(find_longest_cache_hit=lambda *_: 64)), 0),
        (
            SimpleNamespace(
                coordinator=SimpleNamespace(find_longest_cache_hit=lambda *_: ((), 64))
            ),
            64,
        ),
    ],
)
def test_a_vllm_whose_own_cache_is_looked_up_otherwise_costs_no_step(manager, num_hit):
    """It is private. What the cache holds is read ahead in vain then."""
    from fskv.engines.vllm.quirks import local_hit

    request = SimpleNamespace(block_hashes=[], num_tokens=100)
    assert local_hit(SimpleNamespace(_kv_cache_manager=manager), request) == num_hit
    assert local_hit(SimpleNamespace(), request) == 0


def test_what_the_workers_are_told_survives_pickling_beside_vllm_s_own():
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
        OffloadingConnectorMetadata,
    )

    from fskv.engines.vllm.manager import PrefetchOrder
    from fskv.engines.vllm.prefetch import FskvConnectorMetadata

    stock = OffloadingConnectorMetadata(load_jobs={}, store_jobs={}, jobs_to_flush={3})
    order = PrefetchOrder([(chunk(1), 2)], [chunk(3)])
    told = pickle.loads(pickle.dumps(FskvConnectorMetadata(**vars(stock), prefetch=order)))
    assert isinstance(told, OffloadingConnectorMetadata)
    assert (told.jobs_to_flush, told.prefetch) == ({3}, order)
