"""Nodes whose CPUs make vLLM lay KV out differently inside equal pages never share a namespace.

A real attention layer and the backend's real metadata builder, without an engine: what vLLM chooses for a CPU
is chosen by vLLM. Only the answer to "has this CPU AMX" is ours.
"""

from __future__ import annotations

import dataclasses

import engine_lab as lab
import pytest
import world

pytest.importorskip(
    "vllm", reason="the identity of an engine needs the vllm environment: make test"
)
pytestmark = world.VLLM

LAYER = "model.layers.0.self_attn.attn"
TOKENS, HEADS, HEAD_SIZE = 32, 2, 64


class Worker:
    """As much of a worker as the identity is derived from: configuration, one layer, its KV cache."""

    def __init__(self, root: str) -> None:
        import torch
        from vllm.config import set_current_vllm_config
        from vllm.engine.arg_utils import EngineArgs
        from vllm.model_executor.layers.attention import Attention
        from vllm.platforms import current_platform
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadataBuilder
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        from fskv.config import StoreConfig

        if not current_platform.is_cpu():
            pytest.skip("vLLM's platform is not a CPU")
        current_platform.import_kernels()
        self.vllm_config = EngineArgs(
            model=lab.checkpoint("llama"),
            dtype="bfloat16",
            block_size=TOKENS,
            max_model_len=1024,
            skip_tokenizer_init=True,
        ).create_engine_config()
        self.config = StoreConfig(root=root, weights_id="one")
        with set_current_vllm_config(self.vllm_config):
            self.layer = Attention(
                HEADS,
                HEAD_SIZE,
                1.0,
                num_kv_heads=HEADS,
                cache_config=self.vllm_config.cache_config,
                prefix=LAYER,
            )
            spec = FullAttentionSpec(
                block_size=TOKENS, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.bfloat16
            )
            CPUAttentionMetadataBuilder(spec, [LAYER], self.vllm_config, torch.device("cpu"))
        self.layer.kv_cache = torch.zeros(
            (4, HEADS, TOKENS, 2 * HEAD_SIZE), dtype=torch.bfloat16
        )  # as vLLM binds it
        self.kv_cache_config = KVCacheConfig(4, [], [KVCacheGroupSpec([LAYER], spec)])

    def identity(self):
        from fskv.engines.vllm_identity import build_identity, engine_groups
        from fskv.engines.vllm_layout import page_layouts

        groups = engine_groups(self.vllm_config, self.kv_cache_config)
        layouts = page_layouts(self.vllm_config, groups)
        pages = [(group.block_nbytes,) for group in groups]
        return build_identity(self.vllm_config, self.config, groups, pages, 4, TOKENS, layouts)


@pytest.fixture
def root(tmp_path) -> str:
    return str(tmp_path)


@pytest.fixture
def with_amx(monkeypatch):
    """Make vLLM find AMX, or not, whatever the machine has."""
    import torch

    def answer(there: bool) -> None:
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: there)

    return answer


def without_layouts(identity):
    extra = {k: v for k, v in (identity.extra or {}).items() if k != "page_layouts"}
    return dataclasses.replace(identity, extra=extra)


def test_equal_machines_have_equal_identities(root, with_amx):
    with_amx(False)
    one, other = Worker(root).identity(), Worker(root).identity()
    assert "page_layouts" in one.extra
    assert one.digest == other.digest


def test_a_cpu_with_another_layout_has_another_directory(root, with_amx):
    from fskv.namespace import diff
    from fskv.root import Root

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


def test_the_bytes_count_and_not_only_the_name_of_the_instruction_set(root, with_amx, monkeypatch):
    # One name, another build of the kernels: as with a vLLM that was compiled for another CPU.
    from vllm import _custom_ops

    from fskv.engines import vllm_layout

    with_amx(False)
    vllm_layout._digest_of_page.cache_clear()
    here = Worker(root).identity()
    real = _custom_ops.cpu_attn_reshape_and_cache

    def mirrored(keys, values, key_cache, *rest, **options):
        real(keys, values, key_cache, *rest, **options)
        key_cache.copy_(key_cache.flip(-1))

    vllm_layout._digest_of_page.cache_clear()
    monkeypatch.setattr(_custom_ops, "cpu_attn_reshape_and_cache", mirrored)
    there = Worker(root).identity()
    vllm_layout._digest_of_page.cache_clear()
    name, other_name = (one.extra["page_layouts"]["group0"].split("/")[0] for one in (here, there))
    assert name == other_name
    assert here.digest != there.digest


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("head", [32, 64, 80, 128, 256])
def test_every_element_of_a_page_has_a_place_of_its_own_in_the_digest(
    root, with_amx, monkeypatch, head, dtype
):
    # Swapping any two elements of a page must be seen, whatever its size; here its last two.
    import torch
    from vllm import _custom_ops

    from fskv.engines.vllm_layout import _digest_of_page

    Worker(root)  # loads vLLM's kernels
    dtype = getattr(torch, dtype)
    isa = "vec16" if head % 32 else "vec"
    arguments = (isa, dtype, "auto", dtype, TOKENS, head)
    _digest_of_page.cache_clear()
    honest = _digest_of_page(*arguments)
    _digest_of_page.cache_clear()
    assert _digest_of_page(*arguments) == honest
    real = _custom_ops.cpu_attn_reshape_and_cache

    def swapping(keys, values, key_cache, value_cache, *rest, **options):
        real(keys, values, key_cache, value_cache, *rest, **options)
        flat = value_cache.view(-1)
        flat[-2:] = flat[-2:].flip(0)

    monkeypatch.setattr(_custom_ops, "cpu_attn_reshape_and_cache", swapping)
    _digest_of_page.cache_clear()
    assert _digest_of_page(*arguments) != honest
    _digest_of_page.cache_clear()


@pytest.mark.parametrize("way", ["no isa", "unknown isa", "no cache", "other backend", "no layer"])
def test_a_layout_that_cannot_be_determined_is_refused(root, with_amx, monkeypatch, way):
    import torch

    from fskv.errors import ConfigError

    with_amx(False)
    worker = Worker(root)
    worker.identity()  # the control: untouched it is not refused
    if way == "no isa":
        del worker.layer.isa
    elif way == "unknown isa":
        worker.layer.isa = "abacus"
    elif way == "no cache":
        worker.layer.kv_cache = torch.tensor([])
    elif way == "other backend":
        backend = type("Other", (), {"get_name": staticmethod(lambda: "OTHER_ATTN")})
        monkeypatch.setattr(worker.layer, "get_attn_backend", lambda: backend)
    else:
        worker.vllm_config.compilation_config.static_forward_context.clear()
    with pytest.raises(ConfigError, match=f"{LAYER}.*cannot be determined") as refused:
        worker.identity()
    assert "\n" not in str(refused.value)


def test_a_switch_of_the_environment_that_permutes_pages_is_held(root, with_amx, monkeypatch):
    with_amx(False)
    worker = Worker(root)
    plain = worker.identity()
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "SD")  # the default, written out
    assert worker.identity().digest == plain.digest
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    assert worker.identity().digest != plain.digest
