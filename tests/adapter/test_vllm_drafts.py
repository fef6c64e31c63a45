"""Drafts: vLLM's own scheduler stores and another one hits all of it; what writes over KV is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from world import VLLM

pytest.importorskip("vllm", reason="needs the vllm environment: make test")

import torch
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as of_vllm
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.kv_offload import base
from vllm.v1.request import Request

from fskv.engines.vllm.quirks import load_last_chunks
from fskv.engines.vllm.refusals import check_draft
from fskv.errors import ConfigError

pytestmark = VLLM

BLOCK, WINDOW = 16, 16
FULL = {"is_eagle_group": False, "window": False}
DRAFT = {"is_eagle_group": True, "window": False}
WINDOWS = {"is_eagle_group": False, "window": True}
WINDOWS_DRAFT = {"is_eagle_group": True, "window": True}


class Manager:
    """All that is stored is there for the next engine; `keys` is what a root would hold."""

    def __init__(self, keys):
        self.keys = keys

    def lookup(self, key, context):
        return base.LookupResult.HIT if key in self.keys else base.LookupResult.MISS

    def prepare_store(self, keys, context):
        self.keys.update(keys)
        return SimpleNamespace(keys_to_store=list(keys), store_spec=None)


def scheduler_of_vllm(groups, keys, *, blocks_per_chunk, retention):
    """Return vLLM's scheduler half of an engine with these groups, whose manager holds `keys`."""
    size = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
    of_engine = [
        KVCacheGroupSpec(
            [f"layer{number}"],
            SlidingWindowSpec(sliding_window=WINDOW, **size)
            if group["window"]
            else FullAttentionSpec(**size),
            is_eagle_group=group["is_eagle_group"],
        )
        for number, group in enumerate(groups)
    ]
    spec = SimpleNamespace(
        config=SimpleNamespace(
            groups=[
                SimpleNamespace(group_id=number, tokens_per_block=BLOCK)
                for number in range(len(groups))
            ]
        ),
        tokens_per_block=[BLOCK] * len(groups),
        blocks_per_chunk=blocks_per_chunk,
        tokens_per_hash=BLOCK,
        offload_prompt_only=True,
        kv_events_config=base.OffloadingKVEventsConfig(False, False),
        get_manager=lambda: Manager(keys),
    )
    vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(
            prefix_cache_retention_interval=retention, enable_prefix_caching=True
        ),
        parallel_config=SimpleNamespace(world_size=1, decode_context_parallel_size=1),
        speculative_config=SimpleNamespace(use_eagle_block_drop=lambda: True),
    )
    return of_vllm.OffloadingConnectorScheduler(
        spec, vllm_config, SimpleNamespace(kv_cache_groups=of_engine)
    )


def request(scheduler, num_tokens):
    """Return vLLM's state of a request whose prompt begins as every other one does."""
    req = Request("r", [1] * num_tokens, SamplingParams(), None)
    req.block_hashes = [number.to_bytes(32, "big") for number in range(num_tokens // BLOCK)]
    state = of_vllm.RequestOffloadState(
        config=scheduler.config,
        req=req,
        req_context=base.ReqContext(req_id="r"),
        offloading_context=base.RequestOffloadingContext(),
    )
    state.update_offload_keys()
    return state


def store(scheduler, num_tokens):
    state = request(scheduler, num_tokens)
    num_blocks = -(-num_tokens // BLOCK)
    state.update_block_id_groups(
        tuple(
            list(range(1 + number * num_blocks, 1 + (number + 1) * num_blocks))
            for number in range(len(state.group_states))
        )
    )
    scheduler._req_status["r"] = state
    scheduler._build_store_jobs(
        SimpleNamespace(num_scheduled_tokens={"r": num_tokens}, finished_req_ids=())
    )


def hit_after_a_restart(groups, num_tokens, *, mended, blocks_per_chunk=1, retention=0):
    keys: set[bytes] = set()
    shape = {"blocks_per_chunk": blocks_per_chunk, "retention": retention}
    for asks in (False, True):
        scheduler = scheduler_of_vllm(groups, keys, **shape)
        if mended:
            load_last_chunks(scheduler)
        if asks:
            return scheduler._lookup(request(scheduler, num_tokens))
        store(scheduler, num_tokens)
        assert keys
    raise AssertionError


@pytest.mark.parametrize(
    ("groups", "blocks_per_chunk", "retention", "of_vllm"),
    [
        ((WINDOWS, DRAFT), 1, 0, 0),
        ((WINDOWS, DRAFT, FULL), 1, 0, 0),
        ((WINDOWS_DRAFT, WINDOWS, FULL), 1, 0, 0),
        ((WINDOWS, DRAFT), 1, 2 * BLOCK, 8 * BLOCK),
        ((DRAFT,), 4, None, 4 * BLOCK),
        ((FULL, DRAFT), 8, None, 0),
    ],
)
def test_all_whole_chunks_are_hit_though_vllm_would_leave_out_the_last(
    groups, blocks_per_chunk, retention, of_vllm
):
    num_tokens = 10 * BLOCK + 3
    chunk = blocks_per_chunk * BLOCK
    shape = {"blocks_per_chunk": blocks_per_chunk, "retention": retention}
    whole = num_tokens // chunk * chunk
    assert hit_after_a_restart(groups, num_tokens, mended=True, **shape) == whole
    # The control: of what vLLM's own scheduler stores it hits less, or nothing.
    assert hit_after_a_restart(groups, num_tokens, mended=False, **shape) == of_vllm < whole


@pytest.mark.parametrize(
    ("method", "runner_v2", "layers_by_group", "refused"),
    [
        ("draft_model", False, (["a"], ["b", "draft_model.c"]), True),
        ("draft_model", False, (["a"], ["draft_model.c"], ["b"]), True),
        ("draft_model", True, (["a"], ["b", "draft_model.c"]), False),
        ("draft_model", False, (["a", "draft_model.c"], ["b"]), False),
        ("draft_model", False, (["a", "b", "draft_model.c"],), False),
        ("eagle", False, (["a"], ["b", "model.layers.4.c"]), False),
        (None, False, (["a"], ["b"]), False),
    ],
)
def test_a_draft_model_whose_kv_vllm_writes_into_another_group_is_refused(
    method, runner_v2, layers_by_group, refused
):
    vllm_config = SimpleNamespace(
        speculative_config=SimpleNamespace(method=method) if method else None,
        use_v2_model_runner=runner_v2,
    )
    groups = [
        SimpleNamespace(spec=SimpleNamespace(group_idx=number), layer_names=tuple(layers))
        for number, layers in enumerate(layers_by_group)
    ]
    if refused:
        with pytest.raises(ConfigError, match=r"draft's layers in KV group 1 of \d, expected"):
            check_draft(vllm_config, groups)
    else:
        check_draft(vllm_config, groups)
