"""KV groups of a kind that fskv does not know are refused, not guessed at."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import world

pytest.importorskip("vllm", reason="these tests need the vllm environment: make test")
pytestmark = world.VLLM


def _groups(kind: str):
    """Return how fskv describes an engine's one KV group, of vLLM's full attention or of a new kind."""
    import torch
    from vllm.v1 import kv_cache_interface as vllm

    from fskv.engines.vllm.identity import engine_groups

    @dataclass(frozen=True, kw_only=True)
    class NewAttentionSpec(vllm.AttentionSpec):
        pass

    @dataclass(frozen=True, kw_only=True)
    class NewSpec(vllm.KVCacheSpec):
        page_size_bytes = 4096

    heads = {"block_size": 16, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}
    spec = {
        "NewAttentionSpec": lambda: NewAttentionSpec(**heads),
        "NewSpec": lambda: NewSpec(block_size=16),
        "FullAttentionSpec": lambda: vllm.FullAttentionSpec(**heads),
    }[kind]()
    config = vllm.KVCacheConfig(
        num_blocks=1,
        kv_cache_tensors=[],
        kv_cache_groups=[vllm.KVCacheGroupSpec(["layer"], spec)],
    )
    parallel = SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1)
    return engine_groups(SimpleNamespace(parallel_config=parallel), config)


@pytest.mark.parametrize("kind", ["NewAttentionSpec", "NewSpec"])
def test_a_group_of_an_unknown_kind_is_refused_by_name(kind):
    from fskv.errors import ConfigError

    with pytest.raises(ConfigError, match=rf"kind {kind}: fskv does not know") as error:
        _groups(kind)
    assert "\n" not in str(error.value)


def test_negative_control_a_known_kind_is_described():
    (group,) = _groups("FullAttentionSpec")
    assert group.kind.startswith("full/")
    assert group.block_nbytes == 2 * 16 * 32 * 4
