"""Which settings of SGLang give another namespace. Without SGLang: what it would tell stands here."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from prometheus_client import generate_latest
from toy_engine import PAGE_NBYTES, identity

from fskv.config import StoreConfig
from fskv.engines.prometheus import Publisher
from fskv.engines.sglang.harmless import HARMLESS_ARGUMENTS, HARMLESS_VARIABLES, VARIABLES
from fskv.engines.sglang.host_pool import host_pages
from fskv.engines.sglang.identity import (
    ServerFacts,
    build_identity,
    call_deadline,
    file_rank,
    take_options,
)
from fskv.errors import ConfigError, RestError
from fskv.identity.rules import environment, settings
from fskv.offload import BlockingStore, KvStore, Page
from fskv.types import ChunkId

torch = pytest.importorskip("torch", reason="host pools are torch tensors: make test")

# Some of SGLang 0.5.23's arguments, and their defaults.
ARGUMENTS = {
    "model_path": "",
    "revision": None,
    "load_format": "auto",
    "quantization": None,
    "quantization_param_path": None,
    "kv_cache_dtype": "auto",
    "attention_backend": "torch_native",
    "prefill_attention_backend": None,
    "decode_attention_backend": None,
    "enable_lora": None,
    "speculative_algorithm": None,
    "hicache_storage_backend": "dynamic",
    "hicache_mem_layout": "page_first_direct",
    "json_model_override_args": "{}",
    "context_length": None,
    "enable_fp32_lm_head": False,
    "rl_quant_profile": None,
    "moe_runner_backend": "auto",
    "triton_attention_reduce_in_fp32": False,
    "disable_chunked_prefix_cache": False,
    "port": 30000,
    "random_seed": None,
    "max_total_tokens": None,
    "chunked_prefill_size": 4096,
    "served_model_name": None,
    "api_key": None,
    "mem_fraction_static": None,
}
NEEDED = (
    *("model_path", "load_format", "kv_cache_dtype", "enable_lora", "speculative_algorithm"),
    *("attention_backend", "prefill_attention_backend", "decode_attention_backend"),
    "hicache_storage_backend",
)
ABSENT = object()  # in the place of an argument: this SGLang has none of that name
RANKS = SimpleNamespace(
    tp_rank=0,
    tp_size=1,
    pp_rank=0,
    pp_size=1,
    attn_cp_rank=0,
    attn_cp_size=1,
    is_mla_model=False,
    should_split_heads=False,
    tp_lcm_size=None,
    dp_rank=0,
)
HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "sliding_window": None,
    "transformers_version": "5.19.0",
}


class MHATokenToKVPoolHost:
    """What the adapter asks of SGLang's pool of this name, with its shapes and its zero-copy table."""

    dcp_size = 1
    storage_format_tag = None

    def __init__(
        self,
        layout="page_first_direct",
        dtype=torch.bfloat16,
        page_size=4,
        layers=3,
        heads=2,
        dim=8,
    ):
        self.layout, self.dtype, self.page_size = layout, dtype, page_size
        self.layer_num = self.target_layer_num = self.end_layer = layers
        self.start_layer, self.page_num = 0, 6
        self.head_num, self.head_dim, self.v_head_dim = heads, dim, dim
        self.size = self.page_num * page_size
        shapes = {
            "layer_first": (2, layers, self.size, heads, dim),
            "page_first": (2, self.size, layers, heads, dim),
            "page_first_direct": (2, self.page_num, layers, page_size, heads, dim),
            "page_head": (2, self.page_num, heads, page_size, layers, dim),
        }
        self.kv_buffer = torch.zeros(shapes.get(layout, (2, 2)), dtype=dtype)
        self.token_nbytes = heads * dim * dtype.itemsize
        self.size_per_token = 2 * layers * self.token_nbytes

    def get_page_buffer_meta(self, indices):
        """SGLang's own rule (pool_host/mha.py of 0.5.23)."""
        base, half = self.kv_buffer.data_ptr(), self.kv_buffer[0].nbytes
        addresses = []
        for index in indices.tolist()[:: self.page_size]:
            if self.layout == "layer_first":
                starts = [
                    (index + n * self.size) * self.token_nbytes for n in range(self.layer_num)
                ]
            else:
                starts = [index * self.layer_num * self.token_nbytes]
            addresses += [base + at + side for at in starts for side in (0, half)]
        pieces = 2 * self.layer_num if self.layout == "layer_first" else 2
        nbytes = 2 * self.layer_num * self.page_size * self.token_nbytes // pieces
        return addresses, [nbytes] * len(addresses)


CHUNK = ChunkId(bytes(32), 0)


@pytest.fixture
def checkpoint(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(HF_CONFIG))
    header = json.dumps({"w": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}}).encode()
    (directory / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + bytes(64)
    )
    return directory


@pytest.fixture
def derive(checkpoint, tmp_path):
    """The identity of an engine that differs in these settings from the plain one."""

    def derive(arguments=(), ranks=(), pool=(), options=(), beside=(), **facts):
        given = {**ARGUMENTS, "model_path": str(checkpoint), **dict(arguments)}
        plain = ServerFacts(
            version="0.5.23",
            arch="cpu-x86_64",
            arguments={name: value for name, value in given.items() if value is not ABSENT},
            defaults=ARGUMENTS,
            environment={"PATH": "/bin"},
            hf_config=HF_CONFIG,
            model_dtype="bfloat16",
            is_multimodal=False,
            checkpoint=str(checkpoint),
            started_at=time.time(),
        )
        config = StoreConfig.from_mapping({"root": str(tmp_path), **dict(options)})
        own_ranks = SimpleNamespace(**{**vars(RANKS), **dict(ranks)})
        pools = {"kv": MHATokenToKVPoolHost(**dict(pool)), **dict(beside)}
        pages = {name: host_pages(one) for name, one in pools.items()}
        return build_identity(dataclasses.replace(plain, **facts), config, own_ranks, pages)

    return derive


def rope(theta):
    return {**HF_CONFIG, "rope_parameters": {"rope_theta": theta, "rope_type": "default"}}


CHANGES = {
    "dtype of the KV": {"pool": {"dtype": torch.float16}},
    "--kv-cache-dtype, of one width": {
        "arguments": {"kv_cache_dtype": "fp8_e4m3"},
        "pool": {"dtype": torch.uint8},
    },
    "--dtype": {"model_dtype": "float16"},
    "--page-size": {"pool": {"page_size": 8}},
    "--hicache-mem-layout": {"pool": {"layout": "page_first"}},
    "layout of the same bytes": {"pool": {"layout": "page_head"}},
    "KV heads": {"pool": {"heads": 4, "dim": 4}},
    "layers": {"pool": {"layers": 4}},
    "--tp-size": {"ranks": {"tp_size": 2}},
    "--pp-size": {"ranks": {"pp_size": 2}},
    "pipeline stage": {"ranks": {"pp_size": 2, "pp_rank": 1}},
    "context parallelism": {"ranks": {"attn_cp_size": 2}},
    "RoPE": {"hf_config": rope(500000.0)},
    "--json-model-override-args": {"arguments": {"json_model_override_args": '{"rope_theta": 1}'}},
    "--context-length": {"arguments": {"context_length": 4096}},
    "--quantization": {"arguments": {"quantization": "fp8"}},
    "--rl-quant-profile": {"arguments": {"rl_quant_profile": "x"}},
    "--attention-backend": {"arguments": {"attention_backend": "triton"}},
    "--prefill-attention-backend": {"arguments": {"prefill_attention_backend": "triton"}},
    "--triton-attention-reduce-in-fp32": {"arguments": {"triton_attention_reduce_in_fp32": True}},
    "--disaggregation-mode": {"arguments": {"disaggregation_mode": "decode"}},
    "an argument of a later version": {"arguments": {"round_kv_to_zero": True}},
    "a variable of SGLang's": {"environment": {"SGLANG_CPU_QUANTIZATION": "1"}},
    "a variable of AITER's": {"environment": {"AITER_FORCE_A8W4": "1"}},
    "sums over ranks in fewer bits": {"environment": {"ROCM_QUICK_REDUCE_QUANTIZATION": "INT4"}},
    "SGLang's version": {"version": "0.5.24"},
    "architecture": {"arch": "sm_90"},
    "weights_id": {"options": {"weights_id": "mine"}},
}
SAME = {
    "trust": {"options": {"trust": ["lora"]}},
    "--port": {"arguments": {"port": 1}},
    "--random-seed": {"arguments": {"random_seed": 7}},
    "--api-key": {"arguments": {"api_key": "secret"}},
    "--max-total-tokens": {"arguments": {"max_total_tokens": 9}},
    "--chunked-prefill-size": {"arguments": {"chunked_prefill_size": 9}},
    "--served-model-name": {"arguments": {"served_model_name": "x"}},
    "the rank": {"ranks": {"tp_rank": 1}},
    "a variable of the storage": {"environment": {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": "x"}},
    "transformers' version": {"hf_config": {**HF_CONFIG, "transformers_version": "9"}},
    "io_threads": {"options": {"io_threads": 2}},
}


def test_what_changes_kv_changes_the_namespace_each_in_its_own_way(derive):
    plain = derive()
    found = {what: derive(**change).digest for what, change in CHANGES.items()}
    assert plain.digest not in found.values()
    assert len(set(found.values())) == len(CHANGES)
    assert derive() == plain, "each reversal shares again"


@pytest.mark.parametrize("what", SAME)
def test_what_does_not_change_kv_shares(derive, what):
    """The control of the test above: not everything that differs is another namespace."""
    assert derive(**SAME[what]) == derive()


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_that_sglang_has_no_more_is_refused_in_one_sentence_or_not_needed(derive, name):
    """The control: others are not needed, and with all of them there is an identity."""
    if name not in NEEDED:
        derive(arguments={name: ABSENT})
        return
    with pytest.raises(ConfigError, match=f"no server argument '{name}'") as refusal:
        derive(arguments={name: ABSENT})
    assert "\n" not in str(refusal.value)
    if name == "load_format":
        derive(arguments={name: ABSENT}, options={"weights_id": "w"})


def test_other_weights_are_another_namespace_and_the_same_elsewhere_are_not(derive, checkpoint):
    plain = derive()
    weights = checkpoint / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + b"\1")
    assert derive() != plain
    weights.write_bytes(content)
    assert derive() == plain
    elsewhere = checkpoint.parent / "elsewhere" / checkpoint.name
    elsewhere.mkdir(parents=True)
    for path in checkpoint.iterdir():
        (elsewhere / path.name).write_bytes(path.read_bytes())
    moved = {"arguments": {"model_path": str(elsewhere)}, "checkpoint": str(elsewhere)}
    assert derive(**moved) == plain


def test_no_secret_is_in_a_manifest(derive):
    secrets = {"api_key": "5ecret", "admin_api_key": "5ecret", "watermark_key": "5ecret"}
    secrets |= {"ssl_keyfile_password": "5ecret"}
    assert "5ecret" not in json.dumps(derive(arguments=secrets).to_manifest())
    shown = json.dumps(derive(arguments={"rl_quant_profile": "5ecret"}).to_manifest())
    assert "rl_quant_profile" in shown, "the control: others are named"
    assert "5ecret" not in shown, "and a value has a digest alone"


# Arguments that bring weights which are not the checkpoint's, while --load-format is auto.
OTHER_WEIGHTS = {
    "weight_cache_mode": "client",
    "kt_weight_path": "/x",
    "quantization_param_path": "/x",
    "modelopt_quant": "fp8",
    "modelopt_checkpoint_restore_path": "/x",
    "modelopt_checkpoint_save_path": "/x",
    "modelopt_export_path": "/x",
    "quantization": "modelopt_fp8",
}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"arguments": {"enable_lora": True}}, 'found no "lora"'),
        ({"is_multimodal": True}, 'found no "media"'),
        (
            {"arguments": {"speculative_algorithm": "EAGLE"}},
            "--speculative-algorithm: found 'EAGLE'",
        ),
        ({"arguments": {"hicache_storage_backend": None}}, "attached to a running engine"),
        ({"arguments": {"load_format": "dummy"}}, "--load-format: found 'dummy'"),
        *(
            (
                {"arguments": {name: value}},
                f"--{name.replace('_', '-')}: found '{value}', which brings",
            )
            for name, value in OTHER_WEIGHTS.items()
        ),
        ({"arguments": {"attention_backend": None}}, "--attention-backend"),
        ({"pool": {"dtype": torch.uint8}}, "--kv-cache-dtype"),
        ({"pool": {"layout": "page_unified"}}, "--hicache-mem-layout: found 'page_unified'"),
        ({"ranks": {"should_split_heads": True}}, "tp_lcm_size"),
        ({"checkpoint": "org/name"}, "'weights_id'"),
        ({"arguments": {"forward_hooks": object()}}, "setting 'forward_hooks': found object"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_found_out_is_refused_in_one_sentence(derive, change, sentence):
    with pytest.raises((ConfigError, RestError)) as refusal:
        derive(**change)
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "change",
    [
        {"arguments": {"enable_lora": True}, "options": {"trust": ["lora"]}},
        {"is_multimodal": True, "options": {"trust": ["media"]}},
        {"arguments": {"speculative_algorithm": "NGRAM"}},
        {"arguments": {"load_format": "dummy"}, "options": {"weights_id": "x"}},
        *(
            {"arguments": {name: value}, "options": {"weights_id": "x"}}
            for name, value in OTHER_WEIGHTS.items()
        ),
        {"arguments": {"weight_cache_mode": "off", "kt_weight_path": None}},
        {
            "arguments": {"quantization": "modelopt_fp8"},
            "hf_config": {**HF_CONFIG, "quantization_config": {"quant_algo": "FP8"}},
        },
    ],
)
def test_what_the_user_vouches_for_is_taken(derive, change):
    """The control of the refusals."""
    assert derive(**change).engine == "sglang"


def test_a_checkpoint_that_was_replaced_after_the_process_had_started_is_refused(
    derive, checkpoint
):
    """It may be another one than the process has loaded. Renamed over: its mtime is older."""
    started = time.time()
    assert derive(started_at=started).weights.startswith("sampled:"), "the control"
    time.sleep(0.02)  # file systems' clocks move in steps
    other = checkpoint / "other"
    other.write_bytes((checkpoint / "model.safetensors").read_bytes())
    os.utime(other, (1, 1))
    other.rename(checkpoint / "model.safetensors")
    with pytest.raises(ConfigError, match=r"model\.safetensors was changed after this process"):
        derive(started_at=started)
    derive(started_at=started, options={"weights_id": "x"})
    derive(started_at=started, arguments={"use_ray": True})
    derive(started_at=started, arguments={"model_path": "org/name"})  # fetched by SGLang itself
    assert derive(started_at=time.time()).weights.startswith("sampled:"), "a new start"


def test_when_a_process_was_started_is_told_in_the_time_of_files():
    code = "from fskv.identity import checkpoint_place as p; print(p.process_started_at())"
    before = time.time()
    told = float(
        subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    )
    assert before - 0.1 < told < time.time()


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ({}, None),
        ({"tp_size": 2, "tp_rank": 1}, 1),
        ({"tp_size": 2, "tp_rank": 1, "is_mla_model": True}, None),
        ({"attn_cp_size": 2, "attn_cp_rank": 1, "tp_size": 4, "tp_rank": 2}, 6),
        ({"attn_cp_size": 2, "attn_cp_rank": 1, "tp_size": 4, "is_mla_model": True}, 1),
        ({"pp_size": 2, "pp_rank": 1}, None),
    ],
)
def test_ranks_with_other_bytes_have_other_files(ranks, expected):
    assert file_rank(SimpleNamespace(**{**vars(RANKS), **ranks})) == expected


# --- the host pool --------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "page_head", "layer_first"])
def test_the_pieces_of_a_page_are_all_of_it_and_nothing_else(layout):
    pool = MHATokenToKVPoolHost(layout)
    pages = host_pages(pool)
    assert sum(pages.page_nbytes) == pool.page_size * pool.size_per_token
    for piece in pages.memory:
        piece[2] = 0x11
    marked = pool.kv_buffer.view(torch.int8) == 0x11
    tokens = {
        "layer_first": lambda m: m[:, :, 8:12],
        "page_first": lambda m: m[:, 8:12],
        "page_first_direct": lambda m: m[:, 2],
        "page_head": lambda m: m[:, 2],
    }[layout](marked)
    assert bool(tokens.all())
    assert int(marked.sum()) == tokens.numel()


def _uneven(pool):
    real = pool.get_page_buffer_meta

    def uneven(indices):
        addresses, sizes = real(indices)
        return ([a + 64 * (int(indices[0]) == 20) for a in addresses], sizes)

    pool.get_page_buffer_meta = uneven


def _outside(pool):
    real = pool.get_page_buffer_meta
    pool.get_page_buffer_meta = lambda indices: (
        [a + 4096 for a in real(indices)[0]],
        real(indices)[1],
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (_uneven, "at even distances"),
        (_outside, "inside of its buffers"),
        (lambda pool: setattr(pool, "size_per_token", 200), "768 bytes of a page, expected 800"),
        (lambda pool: setattr(pool, "target_layer_num", 2), "layers of a draft model"),
        (lambda pool: setattr(pool, "dcp_size", 2), "--dcp-size"),
        (lambda pool: setattr(pool, "kv_buffer", None), "no contiguous buffer"),
        (lambda pool: setattr(type(pool), "__name__", "MXFP8"), "host pool is a MXFP8"),
    ],
)
def test_a_pool_that_is_not_what_is_expected_is_refused(change, sentence):
    class Pool(MHATokenToKVPoolHost):
        pass

    Pool.__name__ = "MHATokenToKVPoolHost"
    pool = Pool()
    host_pages(pool)  # the control
    change(pool)
    with pytest.raises(ConfigError, match=sentence):
        host_pages(pool)


# --- options --------------------------------------------------------------------------------

NAMES = {"backend_name": "fskv", "module_path": "fskv.engines.sglang", "class_name": "FskvStorage"}


def test_options_are_taken_and_wrong_ones_refused():
    config = take_options({**NAMES, "interface_v1": 1, "root": "/mnt/kv", "weights_id": "w"})
    assert (config.root, config.weights_id) == ("/mnt/kv", "w")
    for options, sentence in (
        ({"root": "/mnt/kv"}, "'interface_v1'"),
        ({"interface_v1": 1}, "option 'root'"),
        ({"interface_v1": 1, "root": "/mnt/kv", "max_byte": 1}, "did you mean 'max_bytes'"),
        ({"interface_v1": 1, "root": "/mnt/kv", "load_budget": "on"}, "it is for vLLM's adapter"),
        (
            {"interface_v1": 1, "root": "/mnt/kv", "load_deadline_s": 7.5},
            "'load_deadline_s': found 7.5, expected 7 at most",
        ),
    ):
        with pytest.raises(ConfigError, match=sentence):
            take_options({**NAMES, **options})


def test_a_call_ends_before_sglang_has_waited_for_its_thread():
    """10 s, then the scheduler ends. A second of grace comes on top of a deadline."""
    plain = {"interface_v1": 1, "root": "/mnt/kv"}
    assert StoreConfig(root="/mnt/kv").deadline.for_nbytes(1 << 30) > 9, "the control"
    assert call_deadline(take_options(plain)).for_nbytes(1 << 30) == 7
    assert call_deadline(take_options(plain)).for_nbytes(1 << 20) < 3
    soon = take_options({**plain, "load_deadline_s": 0.2})
    assert call_deadline(soon).for_nbytes(1 << 30) == 3


def test_each_pool_beside_the_kv_is_a_group_and_another_pool_is_another_namespace(derive):
    window = MHATokenToKVPoolHost()
    hybrid = derive(beside={"swa": window})
    assert [group.kind.partition("/")[0] for group in hybrid.groups] == ["full", "state"]
    told = derive(beside={"swa": window}, hf_config={**HF_CONFIG, "sliding_window": 512}).groups[1]
    assert (told.kind.partition("/")[0], told.window_tokens) == ("sliding_window", 512)
    others = [derive(), derive(beside={"mamba": window})]
    others.append(derive(beside={"swa": MHATokenToKVPoolHost(dtype=torch.float16)}))
    assert len({hybrid.digest, *(other.digest for other in others)}) == 4
    assert derive(beside={"swa": MHATokenToKVPoolHost()}) == hybrid, "the control"


def test_latents_beside_pools_of_ranks_are_refused(derive):
    shared = {"is_mla_model": True, "tp_size": 2}
    with pytest.raises(ConfigError, match="expected --tp-size 1"):
        derive(ranks=shared, beside={"swa": MHATokenToKVPoolHost()})
    derive(ranks=shared)  # the control


def test_what_is_counted_is_published_under_sglangs_name(tmp_path):
    memory = bytearray(PAGE_NBYTES)
    config = StoreConfig(root=str(tmp_path), maintenance="off")
    one_block = dataclasses.replace(identity("toy"), blocks_per_chunk=1)
    store = BlockingStore(KvStore(config, one_block, {0: [memoryview(memory)]}), PAGE_NBYTES)
    publisher = Publisher("sglang", {"tp_rank": "3"})
    assert store.store([Page(CHUNK, 0)]) == [True]
    publisher.publish(store)
    publisher.publish(store, now=True)  # nothing is counted twice
    store.close()
    text = generate_latest().decode()
    assert 'sglang:fskv_stored_chunks_total{tp_rank="3"} 1.0' in text
    assert 'sglang:fskv_lookup_misses_total{reason="absent",tp_rank="3"} 0.0' in text
    assert 'sglang:fskv_known_chunks{tp_rank="3"} 1.0' in text


def told(variables):
    return environment(variables, VARIABLES, HARMLESS_VARIABLES)


def test_what_is_not_known_to_be_harmless_counts():
    assert settings({"port": 1, "log_level": "x"}, {}, HARMLESS_ARGUMENTS) == {}
    assert settings({"ports": 1}, {}, HARMLESS_ARGUMENTS) == {"ports": 1}
    assert told({"SGLANG_LOG_MS": "1", "OTHER": "1"}) == {}
    assert told({"SGLANG_NEW": "1"}) == {"SGLANG_NEW": 1}
    telling = dict.fromkeys(
        (
            *("AITER_FORCE_A8W4", "FLASHINFER_NVFP4_4OVER6", "ROCM_QUICK_REDUCE_QUANTIZATION"),
            *("TRTLLM_DISABLE_FP4_QUANT_FAST_MATH", "USE_TRITON_W8A8_FP8_KERNEL", "SGL_NEW"),
            *("USE_ROCM_AITER_ROPE_BACKEND", "DEEP_NORMAL_MODE_USE_INT8_QUANT", "FLA_USE_FAST_OPS"),
            *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "ASCEND_USE_FIA"),
        ),
        "1",
    )
    # SGLang sets most of these itself.
    harmless = dict.fromkeys(
        (
            *("FLASHINFER_WORKSPACE_BASE", "FLASHINFER_DISABLE_VERSION_CHECK", "TRTLLM_ENABLE_PDL"),
            *("FLASHINFER_CUDA_ARCH_LIST", "FLASHINFER_CUBIN_DIR", "FLASHINFER_LOGLEVEL"),
            *("AITER_LOG_TUNED_CONFIG", "AITER_JIT_DIR", "SGL_LOG_MS", "SGL_FORCE_SHUTDOWN"),
        ),
        "1",
    )
    assert told({**telling, **harmless}) == dict.fromkeys(telling, 1)
