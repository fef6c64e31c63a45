"""Engines whose pages have one size and other bytes inside never share a namespace.

A real attention layer and the backend's real metadata builder, without an engine: what vLLM chooses for a CPU
is chosen by vLLM. Only the answers to "has this CPU AMX" and "is this a CPU" are ours.
"""

from __future__ import annotations

import dataclasses

import engine_lab as lab
import pytest
import world

pytest.importorskip(
    "vllm", reason="the identity of an engine needs the vllm environment: make test"
)

import torch
from vllm import _custom_ops
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheLayout,
    KVCacheTensor,
    create_kv_cache_views,
)

from fskv.config import StoreConfig
from fskv.engines.vllm.identity import build_identity, engine_groups
from fskv.engines.vllm.page_layout import page_layouts
from fskv.errors import RestError
from fskv.namespace import diff
from fskv.root.root import Root

pytestmark = world.VLLM

LAYER = "model.layers.0.self_attn.attn"
TOKENS, HEADS, HEAD_SIZE = 32, 2, 64


class Worker:
    """As much of a worker as the identity is derived from: configuration, one layer, its KV cache."""

    def __init__(self, root: str, dtype: str = "bfloat16", head_size: int = HEAD_SIZE) -> None:
        if not current_platform.is_cpu():
            pytest.skip("vLLM's platform is not a CPU")
        current_platform.import_kernels()
        self.vllm_config = EngineArgs(
            model=lab.checkpoint("llama"),
            dtype=dtype,
            block_size=TOKENS,
            max_model_len=1024,
            skip_tokenizer_init=True,
        ).create_engine_config()
        self.config = StoreConfig(root=root, weights_id="one")
        with set_current_vllm_config(self.vllm_config):
            self.layer = Attention(
                HEADS,
                head_size,
                1.0,
                num_kv_heads=HEADS,
                cache_config=self.vllm_config.cache_config,
                prefix=LAYER,
            )
            self.spec = spec = FullAttentionSpec(
                block_size=TOKENS,
                num_kv_heads=HEADS,
                head_size=head_size,
                dtype=getattr(torch, dtype),
            )
            CPUAttentionMetadataBuilder(spec, [LAYER], self.vllm_config, torch.device("cpu"))
        self.bind("LBHNC", TOKENS)
        self.kv_cache_config = KVCacheConfig(4, [], [KVCacheGroupSpec([LAYER], spec)])

    def bind(self, layout: str, kernel_block: int, num_blocks: int = 4) -> None:
        """Bind a KV cache to the layer as vLLM does."""
        self.num_blocks = num_blocks
        page = self.spec.page_size_bytes
        raw = torch.zeros(num_blocks * page, dtype=torch.int8)
        tensor = KVCacheTensor(raw.numel(), [LAYER], raw.numel(), page)
        (self.layer.kv_cache,) = create_kv_cache_views(
            raw, self.spec, num_blocks, KVCacheLayout[layout], tensor, kernel_block
        )

    def identity(self):
        groups = engine_groups(self.vllm_config, self.kv_cache_config)
        layouts = page_layouts(self.vllm_config, groups, self.num_blocks)
        pages = [(group.block_nbytes,) for group in groups]
        return build_identity(self.vllm_config, self.config, groups, pages, 4, TOKENS, layouts)


@pytest.fixture
def root(tmp_path) -> str:
    return str(tmp_path)


@pytest.fixture
def with_amx(monkeypatch):
    """Make vLLM find AMX, or not, whatever the machine has."""

    def answer(there: bool) -> None:
        if there and not torch.cpu._is_avx512_bf16_supported():
            pytest.skip("vLLM's kernels for this CPU know no AMX: it has no AVX512-BF16")
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: there)

    return answer


def without_layouts(identity):
    extra = {k: v for k, v in (identity.extra or {}).items() if k != "page_layouts"}
    return dataclasses.replace(identity, extra=extra)


def test_a_cpu_with_another_layout_has_another_directory(root, with_amx):
    identities = {}
    for amx in (False, True):
        with_amx(amx)
        worker = Worker(root)
        assert (worker.layer.isa == "amx") is amx, "vLLM did not choose as this test thinks"
        identities[amx] = worker.identity()
    assert {d.path for d in diff(identities[False], identities[True])} == {
        "extra.page_layouts.group0"
    }
    opened = Root.open(root, create=True)
    assert (
        opened.open_namespace(identities[False]).path
        != opened.open_namespace(identities[True]).path
    )
    # The control: nothing else in the identity tells these nodes apart.
    assert without_layouts(identities[False]).digest == without_layouts(identities[True]).digest


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("head", [32, 64, 80, 128, 256])
def test_every_element_of_a_page_has_a_place_of_its_own_in_the_digest(
    root, with_amx, monkeypatch, head, dtype
):
    # Swapping any two elements of a page must be seen, whatever its size; here its last two.
    with_amx(False)
    worker = Worker(root, dtype, head)
    honest = worker.identity()
    assert worker.identity().digest == honest.digest
    real = _custom_ops.cpu_attn_reshape_and_cache

    def swapping(keys, values, key_cache, value_cache, *rest, **options):
        real(keys, values, key_cache, value_cache, *rest, **options)
        value_cache[-1, -1, -1, -2:] = value_cache[-1, -1, -1, -2:].flip(0)

    monkeypatch.setattr(_custom_ops, "cpu_attn_reshape_and_cache", swapping)
    assert worker.identity().digest != honest.digest


def test_a_canonical_page_is_the_same_however_many_heads_a_rank_has(root, with_amx, monkeypatch):
    with_amx(False)
    found = {}
    for heads in (1, 2):
        monkeypatch.setitem(globals(), "HEADS", heads)
        worker = Worker(root)
        groups = engine_groups(worker.vllm_config, worker.kv_cache_config)
        for canonical in (True, False):
            layouts = page_layouts(
                worker.vllm_config, groups, worker.num_blocks, canonical=canonical
            )
            found[heads, canonical] = layouts["group0"]
    assert found[1, True] == found[2, True]
    assert found[1, False] != found[2, False]  # the control: pages as they are, are not alike


@pytest.fixture
def on_a_gpu(root, monkeypatch, with_amx):
    """A worker that fskv thinks is a GPU's; what vLLM writes is still written by the CPU's backend."""
    from fskv.engines.vllm import identity

    with_amx(False)
    worker = Worker(root)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(identity, "gpu_arch", lambda: "sm_100")
    return worker


def test_on_gpus_kernel_blocks_of_another_length_are_another_identity(on_a_gpu):
    """vLLM splits a block by what its kernels take: the same size, the same names, other bytes."""
    worker = on_a_gpu
    identities = {}
    for kernel_block in (TOKENS, TOKENS // 2):
        worker.bind("LBHNC", kernel_block)
        identities[kernel_block] = worker.identity()
    one, other = identities.values()
    assert one.digest != other.digest
    assert without_layouts(one).digest == without_layouts(other).digest  # the control


def write_by_the_view(self, layer, key, value, kv_cache, slots):
    """Write as the backends of GPUs do: wherever the view says that an element is."""
    keys, values = kv_cache.transpose(1, 2).split(HEAD_SIZE, dim=-1)
    blocks, tokens = slots // keys.shape[1], slots % keys.shape[1]
    keys[blocks, tokens], values[blocks, tokens] = key, value


def test_on_gpus_another_layout_of_heads_is_seen_by_what_is_bound(on_a_gpu, monkeypatch):
    worker = on_a_gpu
    monkeypatch.setattr(type(worker.layer.impl), "do_kv_cache_update", write_by_the_view)
    worker.bind("LBHNC", TOKENS)
    one = worker.identity()
    worker.bind("LBNHC", TOKENS)
    other = worker.identity()  # the configuration says the same: only the view tells
    assert one.kv_cache_layout == other.kv_cache_layout
    assert one.digest != other.digest


@pytest.mark.parametrize(("name", "known"), [("FLASH_ATTN", True), ("OTHER_ATTN", False)])
def test_on_gpus_a_backend_that_cannot_be_asked_must_be_a_known_one(
    on_a_gpu, monkeypatch, name, known
):
    worker = on_a_gpu
    worker.identity()  # the control: one that can be asked need not be known
    backend = type("Other", (), {"get_name": staticmethod(lambda: name)})
    monkeypatch.setattr(worker.layer, "get_attn_backend", lambda: backend)
    monkeypatch.delattr(type(worker.layer.impl), "do_kv_cache_update")
    if known:
        assert "as its view" in worker.identity().extra["page_layouts"]["group0"]
        return
    with pytest.raises(RestError, match=f"{LAYER}.*cannot be determined"):
        worker.identity()


@pytest.mark.parametrize(
    "way", ["no isa", "unknown isa", "no cache", "no way to write", "no layer"]
)
def test_where_a_layout_cannot_be_determined_the_engine_rests(root, with_amx, monkeypatch, way):
    with_amx(False)
    worker = Worker(root)
    worker.identity()  # the control: untouched it does not
    if way == "no isa":
        del worker.layer.isa
    elif way == "unknown isa":
        worker.layer.isa = "abacus"
    elif way == "no cache":
        worker.layer.kv_cache = torch.tensor([])
    elif way == "no way to write":
        monkeypatch.delattr(type(worker.layer.impl), "do_kv_cache_update")
    else:
        worker.vllm_config.compilation_config.static_forward_context.clear()
    with pytest.raises(RestError, match=f"{LAYER}.*cannot be determined") as rests:
        worker.identity()
    assert "\n" not in str(rests.value)


def test_a_switch_of_the_environment_that_permutes_pages_is_held(root, with_amx, monkeypatch):
    with_amx(False)
    worker = Worker(root)
    plain = worker.identity()
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "SD")  # the default, written out
    assert worker.identity().digest == plain.digest
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    assert worker.identity().digest != plain.digest
