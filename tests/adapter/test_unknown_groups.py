"""How KV groups are described: those of a kind that fskv does not know are not guessed at."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import world

pytest.importorskip("vllm", reason="these tests need the vllm environment: make test")

import torch
from vllm.v1 import kv_cache_interface as vllm
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from fskv.engines.vllm.identity import engine_groups
from fskv.errors import RestError
from fskv.hybrid_planner import GroupKind

pytestmark = world.VLLM


HEADS = {"block_size": 16, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32}


@dataclass(frozen=True, kw_only=True)
class NewAttentionSpec(vllm.AttentionSpec):
    """A kind of a later vLLM, with heads as all attention has them."""


@dataclass(frozen=True, kw_only=True)
class NewSpec(vllm.KVCacheSpec):
    page_size_bytes = 4096


def _described(*groups, max_model_len=1024, caching=True):
    config = vllm.KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[*groups])
    parallel = SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1)
    model = SimpleNamespace(max_model_len=max_model_len)
    cache = SimpleNamespace(enable_prefix_caching=caching)
    return engine_groups(
        SimpleNamespace(parallel_config=parallel, model_config=model, cache_config=cache), config
    )


@pytest.mark.parametrize("spec", [NewAttentionSpec(**HEADS), NewSpec(block_size=16)])
def test_where_a_group_is_of_an_unknown_kind_the_engine_rests(spec):
    kind = type(spec).__name__
    with pytest.raises(RestError, match=rf"kind {kind}: fskv does not know") as error:
        _described(KVCacheGroupSpec(["layer"], spec))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("max_model_len", [2, 15, 16, 17])
def test_where_no_request_fills_a_block_the_engine_rests(max_model_len):
    """After a hit one token of a prompt is computed: a request of 17 may use a block of 16 again."""
    full = KVCacheGroupSpec(["layer"], FullAttentionSpec(**HEADS))
    if max_model_len > 16:
        assert len(_described(full, max_model_len=max_model_len)) == 1
        return
    for caching, end in ((True, "again"), (False, "again; prefix caching is off")):
        words = rf"found {max_model_len}, expected more than 16.* {end}$"
        with pytest.raises(RestError, match=words):
            _described(full, max_model_len=max_model_len, caching=caching)


def test_without_kv_that_is_used_again_the_engine_rests():
    with pytest.raises(RestError, match="no KV that vLLM would use again"):
        _described()


def test_negative_control_a_known_kind_is_described():
    (group,) = _described(KVCacheGroupSpec(["layer"], FullAttentionSpec(**HEADS)))
    assert group.kind.startswith("full/")
    assert group.block_nbytes == 2 * 16 * 32 * 4


# --- layers of one group that are not alike ----------------------------------------------------


def _uniform(**specs):
    spec = vllm.UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
    return _described(KVCacheGroupSpec([*specs], spec))


def _full(dtype="bfloat16", **changes):
    return FullAttentionSpec(**{**HEADS, "dtype": getattr(torch, dtype), **changes})


def test_which_layer_has_which_format_is_told_and_not_only_that_of_the_first():
    plain, other = _full(), _full("float16")  # of the same size
    kinds = {
        names: _uniform(**dict(zip("abc", layers, strict=True)))[0].kind
        for names, layers in {
            "all": (plain, plain, plain),
            "last": (plain, plain, other),
            "middle": (plain, other, plain),
            "two": (plain, other, other),
        }.items()
    }
    assert len(set(kinds.values())) == 4
    (alone,) = _uniform(a=plain)
    assert kinds["all"] == alone.kind == "full/FullAttentionSpec/bfloat16/none"
    assert kinds["last"] == f"2 * {alone.kind} + 1 * full/FullAttentionSpec/float16/none"


def test_what_a_hit_needs_must_be_the_same_of_all_layers_of_a_group():
    heads = {**HEADS, "dtype": torch.bfloat16}
    latents = MLAAttentionSpec(**heads)
    assert _uniform(a=_full(), b=latents)[0].spec.kind is GroupKind.FULL  # covered alike
    assert _uniform(a=latents, b=latents)[0].spec.kind is GroupKind.MLA
    windows = [SlidingWindowSpec(**heads, sliding_window=n) for n in (32, 64)]
    with pytest.raises(RestError, match="does not know how its KV is covered"):
        _uniform(a=windows[0], b=windows[1])
    with pytest.raises(RestError, match="does not know how its KV is covered"):
        _uniform(a=_full(), b=windows[0])


def test_a_chunk_is_as_long_for_the_scheduler_as_for_workers_whose_layers_differ(tmp_path):
    """VLLM shows its scheduler the first layer's specification alone."""
    layers = {"a": _full(), "b": _full(num_kv_heads=8), "c": _full(num_kv_heads=8)}
    (of_worker,) = _uniform(**layers)
    (of_scheduler,) = _described(KVCacheGroupSpec([*layers], layers["a"]))
    assert of_worker.block_nbytes != of_scheduler.block_nbytes
    assert of_worker.planned_nbytes == of_scheduler.planned_nbytes


@pytest.mark.parametrize("in_group_of_its_own", [True, False])
def test_where_a_window_is_computed_anew_after_a_hit_the_engine_rests(in_group_of_its_own):
    """DeepSeek V4.1: the window is kept out of prefix caching, and KV behind a hit is another one."""
    full = KVCacheGroupSpec(["full"], FullAttentionSpec(**HEADS))

    def window(**replay):
        spec = vllm.SlidingWindowMLASpec(sliding_window=32, **HEADS, **replay)
        if not in_group_of_its_own:
            spec = vllm.UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"window": spec})
        return KVCacheGroupSpec(["window"], spec)

    with pytest.raises(RestError, match="option 'swa_bounded_replay'"):
        _described(full, window(bounded_replay=True))
    assert len(_described(full, window())) == 2  # the control


def test_a_stage_without_a_layer_of_some_group_rests():
    """Windows before full attention, in two stages: vLLM keeps the group there, without layers."""
    spec = FullAttentionSpec(**HEADS)
    with pytest.raises(RestError, match="KV group 1 has no layer on this pipeline stage"):
        _described(KVCacheGroupSpec(["layer"], spec), KVCacheGroupSpec([], spec))
