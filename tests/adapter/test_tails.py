"""Hits that end inside a block: `fskv explain` looks where vLLM's scheduler does."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest
from world import VLLM, make_identity

pytest.importorskip("vllm", reason="needs the vllm environment: make test")

from fskv_tools.explain.prompt import Prompt
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as of_vllm
from vllm.v1.kv_offload.base import LookupResult

from fskv.namespace import GroupIdentity

pytestmark = VLLM

PER_HASH, BLOCK = 16, 64
GROUPS = (
    GroupIdentity(0, "full/FullAttentionSpec/bfloat16/none", None, BLOCK, (3000,), ("a",)),
    GroupIdentity(2, "state/gdn/align/bfloat16", None, BLOCK, (9000,), ("d",)),
)


def hit_of_vllm(num_tokens, complete, stored):
    status = SimpleNamespace(
        req=SimpleNamespace(num_prompt_tokens=num_tokens),
        num_locally_computed_tokens=0,
        max_load_tokens=None,
        req_context=None,
        partial_tail_boundary=None,
    )
    scheduler = SimpleNamespace(
        _lookup_complete_chunks=lambda status, cap: complete,
        config=SimpleNamespace(
            supports_partial_tail=True,
            tokens_per_hash=PER_HASH,
            kv_group_configs=[SimpleNamespace(group_idx=group.group_idx) for group in GROUPS],
        ),
        _partial_tail_block_size=BLOCK,
        _make_boundary_key=lambda request, group_idx, end, context: (end, group_idx),
        manager=SimpleNamespace(
            lookup=lambda key, context: LookupResult.HIT if key in stored else LookupResult.MISS
        ),
        _events_tracker=SimpleNamespace(record_partial_lookup=lambda *_: None),
    )
    return of_vllm.OffloadingConnectorScheduler._lookup(scheduler, status)


def test_explain_looks_for_the_end_of_a_hit_where_vllm_does():
    identity = make_identity(groups=GROUPS, blocks_per_chunk=1, tokens_per_hash=PER_HASH)
    chance = random.Random(7)
    inside = 0
    for num_tokens, complete in itertools.product(range(1, 260, 3), (0, 64, 128)):
        if complete >= num_tokens:
            continue
        ends = range(PER_HASH, num_tokens + BLOCK, PER_HASH)
        stored = {(end, g.group_idx) for end in ends for g in GROUPS if chance.random() < 0.6}
        tails = Prompt(identity, num_tokens, ()).tails(complete)
        sound = [end for end in tails if all((end, g.group_idx) in stored for g in GROUPS)]
        expected = hit_of_vllm(num_tokens, complete, stored)
        assert next(iter(sound), complete) == expected, (num_tokens, complete)
        inside += expected > complete
    assert inside > 50, "hardly any of them ends inside a block: the test shows nothing"


@pytest.mark.parametrize(
    "changes",
    [
        {"blocks_per_chunk": 2},
        {"tokens_per_hash": BLOCK},
        {"groups": GROUPS[:1]},
        {"groups": (*GROUPS, GroupIdentity(3, "sliding_window/x", 32, BLOCK, (1,), ("w",)))},
        {"groups": (*GROUPS, GroupIdentity(3, "full/x", None, 2 * BLOCK, (1,), ("w",)))},
    ],
)
def test_where_vllm_keeps_no_such_ends_nobody_looks_for_them(changes):
    """vLLM's `supports_partial_tail`: one block a chunk, one size of blocks, a state, no window."""
    fields = {"groups": GROUPS, "blocks_per_chunk": 1, "tokens_per_hash": PER_HASH}
    assert Prompt(make_identity(**fields), 200, ()).tails(128)
    assert not Prompt(make_identity(**{**fields, **changes}), 200, ()).tails(128)
