"""Which settings of vLLM split, and which do not: all that are set, but those that a list names as harmless.

The configuration is vLLM's own; no engine is started. Values are set in it, and in the environment, as if an
engine had been started with them.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import engine_lab as lab
import pytest
import settings_lab
import world
from settings_lab import Line, config_of, identity_of

from fskv import namespace

pytest.importorskip("vllm", reason="the settings are those of the installed vLLM: make test")

import pkgutil
from importlib.metadata import EntryPoint

import torch
import vllm
from vllm import config as of_vllm
from vllm import envs
from vllm.config import CompilationConfig
from vllm.config.lora import LoRAConfig
from vllm.platforms import current_platform

from fskv._version import VLLM_TESTED
from fskv.engines.vllm import harmless, identity, settings
from fskv.engines.vllm.loaded import Loaded
from fskv.engines.vllm.settings import counting_settings
from fskv.errors import ConfigError, RestError
from fskv.root.root import Root

pytestmark = world.VLLM


@pytest.fixture(autouse=True)
def neutral_environment(monkeypatch):
    for name in [*os.environ]:
        if name.startswith(("VLLM_", "PYTHONHASHSEED", "AITER_", "FLASHINFER_")):
            monkeypatch.delenv(name)
    importlib.import_module("vllm.envs").disable_envs_cache()


@pytest.fixture(scope="module")
def template():
    if not current_platform.is_cpu():
        pytest.skip("vLLM's platform is not a CPU")
    return config_of(Line())


@pytest.fixture
def config(template):
    return copy.deepcopy(template)


def put(config, path, value):
    """Set a value deep inside, where vLLM's validation of fields does not look."""
    *parts, name = path.split(".")
    for part in parts:
        if getattr(config, part) is None:
            object.__setattr__(config, part, part_of(part))
        config = getattr(config, part)
    object.__setattr__(config, name, value)


def part_of(name):
    return {
        "lora_config": of_vllm.LoRAConfig,
        "multimodal_config": of_vllm.MultiModalConfig,
        "ec_transfer_config": of_vllm.ECTransferConfig,
        "speculative_config": lambda: object.__new__(of_vllm.SpeculativeConfig),
    }[name]()


def counted(config):
    """Return the paths below the identity's settings, without their values."""

    def leaves(tree, path):
        for name, value in tree.items():
            inner = f"{path}{name}"
            yield from leaves(value, f"{inner}.") if isinstance(value, dict) else [inner]

    return {*leaves(counting_settings(config), "")}


# --- what splits -------------------------------------------------------------------------------------------

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
# What an identity has of its own -> what is set before, the setting, and two values of it.
FIELDS = {
    "model_dtype": ([], "model_config.dtype", ("torch.float32", "torch.bfloat16")),
    "kv_cache_dtype": ([], "cache_config.cache_dtype", ("auto", "fp8_e5m2")),
    "kv_cache_layout": ([], "cache_config.kv_cache_layout", ("LBNHC", "LBHNC")),
    "hash_algorithm": ([], "cache_config.prefix_caching_hash_algo", ("sha256", "sha256_cbor")),
    "topology.tp": ([], "parallel_config.tensor_parallel_size", (1, 2)),
    "topology.pp": ([], "parallel_config.pipeline_parallel_size", (1, 2)),
    "topology.pcp": ([], "parallel_config.prefill_context_parallel_size", (1, 2)),
    "topology.dcp": ([], "parallel_config.decode_context_parallel_size", (1, 2)),
    "topology.cp_interleave": ([], "parallel_config.cp_kv_cache_interleave_size", (1, 16)),
    "model_config.text": ([], "model_config.hf_text_config.rms_norm_eps", (1e-5, 1e-6)),
    "model_config.max_model_len": (
        [("model_config.hf_text_config.rope_parameters", DYNAMIC)],
        "model_config.max_model_len",
        (1024, 2048),
    ),
    "extra.load_format": ([], "load_config.load_format", ("auto", "runai_streamer")),
    "extra.model_loader": (
        [("load_config.load_format", "runai_streamer")],
        "load_config.model_loader_extra_config",
        ({}, {"uri": "s3://a"}),
    ),
}


@pytest.mark.parametrize("path", FIELDS)
def test_what_a_setting_resolves_to_is_there_and_moves_the_digest(config, path):
    before, where, values = FIELDS[path]
    for name, value in before:
        put(config, name, value)
    found = []
    for value in values:
        put(config, where, value)
        found.append(identity_of(config))
    assert found[0].digest != found[1].digest
    inside = found[1].to_manifest()
    for part in path.split("."):
        inside = inside[part]


@pytest.mark.parametrize(
    ("options", "field"),
    [({"tenant": "somebody else"}, "tenant"), ({"weights_id": "another name"}, "weights")],
)
def test_an_option_of_fskv_changes_its_field_and_no_other(config, options, field):
    changed = namespace.diff(identity_of(config), identity_of(config, **options))
    assert {difference.path for difference in changed} == {field}


def test_the_seed_of_block_hashes_is_the_environment_s(config, monkeypatch):
    seen = [identity_of(config)]
    for seed in ("7", "0", "8"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        seen.append(identity_of(config))
        changed = namespace.diff(seen[0], seen[-1])
        assert {difference.path for difference in changed} == {"hash_seed"}
    assert len({one.digest for one in seen}) == len(seen)


# Set to something else than the default, and nothing else tells it.
COUNTING = {
    "additional_config": {"kernels": "int4"},
    "attention_config.backend_per_kind": {"full_attention": "TRITON_ATTN"},
    "attention_config.disable_flashinfer_q_quantization": True,
    "attention_config.flash_attn_version": 3,
    "attention_config.indexer_kv_dtype": "mxfp4",
    "attention_config.mla_prefill_backend": "FLASHINFER",
    "attention_config.use_prefill_query_quantization": True,
    "attention_config.use_trtllm_attention": True,
    "compilation_config.inductor_passes": {"mine": "mine.pass_"},
    "ec_transfer_config.ec_connector": "ECExampleConnector",
    "kernel_config.linear_backend": "marlin",
    "kernel_config.linear_backend_per_quant": {"nvfp4": "marlin"},
    "kernel_config.moe_backend": "marlin",
    "load_config.ignore_patterns": ["model-*"],
    "lora_config.target_modules": ["o_proj"],
    "model_config.code_revision": "main",
    "model_config.model_class_overrides": {"LlamaForCausalLM": "mine:Model"},
    "model_config.model_impl": "transformers",
    "model_config.multimodal_config.interleave_mm_strings": True,
    "model_config.multimodal_config.media_io_kwargs": {"video": {"num_frames": 4}},
    "model_config.multimodal_config.mm_device_do_normalize": False,
    "model_config.multimodal_config.mm_processor_kwargs": {"size": 4},
    "model_config.multimodal_config.video_pruning_rate": 0.5,
    "model_config.quantization": "fp8",
    "model_config.quantization_config": {"ignore": ["lm_head"]},
    "parallel_config.worker_cls": "theirs.Worker",
}
VARIABLES = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "AITER_BF16_FP8_MOE_BOUND": "0",
    "FLASHINFER_USE_CUDA_NORM": "1",
    "NVIDIA_TF32_OVERRIDE": "1",
    "ONEDNN_DEFAULT_FPMATH_MODE": "BF16",
    "TRITON_F32_DEFAULT": "ieee",
    "VLLM_BATCH_INVARIANT": "1",
    "VLLM_CPU_INT4_W4A8": "1",  # its default, written out
    "VLLM_DISABLED_KERNELS": "MarlinLinearKernel",
    "VLLM_FLOAT32_MATMUL_PRECISION": "high",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": '{"dtype": "int8"}',
    "VLLM_HUMMING_USE_F16_ACCUM": "1",
    "VLLM_MARLIN_INPUT_DTYPE": "int8",
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random",
    "VLLM_ROCM_FP8_MFMA_PAGE_ATTN": "1",
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "INT4",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": "1",
    "VLLM_ROCM_USE_AITER": "1",
    "VLLM_SSM_CONV_STATE_LAYOUT": "DS",
    "VLLM_USE_DEEP_GEMM": "1",
    "VLLM_USE_DEEP_GEMM_E8M0": "0",
    "VLLM_USE_MODELSCOPE": "1",
    "VLLM_XPU_INC_WNA16_BACKEND": "w4a8",
    "XHS_VIDEO_JPEG_QUALITY": "10",
}


@pytest.mark.parametrize("path", COUNTING)
def test_a_setting_that_no_list_names_splits_and_says_so(config, path):
    before = identity_of(config)
    put(config, path, COUNTING[path])
    after = identity_of(config)
    assert before.digest != after.digest
    assert path in counted(config)


@pytest.mark.parametrize("name", VARIABLES)
def test_a_variable_that_no_list_names_splits_where_it_is_set(config, monkeypatch, name):
    before = identity_of(config)
    monkeypatch.setenv(name, VARIABLES[name])
    assert identity_of(config).digest != before.digest
    assert counted(config) == {f"environment.{name}"}


def test_nothing_counts_by_default(config):
    assert identity_of(config).extra is None


def later(config, part, **added):
    """Give a part of the configuration fields that a later vLLM might have."""
    old = getattr(config, part)
    fields = [
        (name, type(default), dataclasses.field(default=default)) for name, default in added.items()
    ]
    kind = dataclasses.make_dataclass(type(old).__name__, fields, bases=(type(old),))
    new = object.__new__(kind)
    new.__dict__.update(vars(old))
    put(config, part, new)


@pytest.mark.parametrize(
    "part", ["cache_config", "scheduler_config", "kernel_config", "model_config"]
)
def test_a_field_of_a_later_vllm_splits_by_itself(config, part):
    later(config, part, made_up="none")
    before = identity_of(config)
    assert before.extra is None
    put(config, f"{part}.made_up", "some")
    assert identity_of(config).digest != before.digest
    assert counted(config) == {f"{part}.made_up"}


def test_with_the_rule_inverted_a_field_of_a_later_vllm_does_not_split(config, monkeypatch):
    """The control: only what a list names as harmful would count."""

    class Inverted:
        def __contains__(self, name):
            return name not in COUNTING

    monkeypatch.setattr(settings, "HARMLESS_FIELDS", Inverted())
    later(config, "cache_config", made_up="none")
    before = identity_of(config)
    put(config, "cache_config.made_up", "some")
    assert identity_of(config).digest == before.digest
    put(config, "kernel_config.moe_backend", "marlin")
    assert identity_of(config).digest != before.digest


def test_a_part_of_a_later_vllm_counts_with_its_fields(config):
    @dataclasses.dataclass
    class Made:
        rounding: str = "none"

    put(config, "made_config", Made())
    later_class = dataclasses.make_dataclass(
        "Later",
        [("made_config", object, dataclasses.field(default_factory=Made))],
        bases=(type(config),),
    )
    object.__setattr__(config, "__class__", later_class)
    assert counted(config) == set()
    config.made_config.rounding = "some"
    assert counted(config) == {"made_config.rounding"}


def test_ranks_that_differ_do_not_start_and_the_error_names_the_field(
    config, monkeypatch, tmp_path, handshake, make_manager
):
    def rank(number):
        space = Root.open(str(tmp_path), create=True).open_namespace(identity_of(config))
        return handshake(number, 2, directory=space)

    first = rank(0)
    monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", "int8")
    with pytest.raises(ConfigError, match=r"all must agree.*VLLM_MARLIN_INPUT_DTYPE"):
        make_manager(workers=[first, rank(1)], root=str(tmp_path))


@pytest.mark.parametrize(
    "version", ["0.33.0", "0.99.1", "0.32.1", "0.32.0+patched", "0.34.0.dev1+g1"]
)
def test_another_version_of_vllm_has_a_namespace_of_its_own(config, monkeypatch, version):
    before = identity_of(config)
    monkeypatch.setattr(identity, "vllm_version", version)
    assert identity_of(config).digest != before.digest


@pytest.mark.parametrize(("kv_of_draft", "splits"), [("model.layers.2", True), ("none", False)])
def test_a_draft_splits_where_it_has_kv_of_its_own(config, kv_of_draft, splits):
    """A Medusa head has none, so the files are those of the model alone."""
    layers = {f"model.layers.{i}": torch.nn.Linear(1, 1) for i in range(3)}
    draft = torch.nn.Sequential(torch.nn.Linear(1, 1), layers.get(kv_of_draft, torch.nn.ReLU()))
    compilation = CompilationConfig()
    compilation.static_forward_context.update(layers)
    worker = SimpleNamespace(
        vllm_config=SimpleNamespace(compilation_config=compilation), get_draft_model=lambda: draft
    )
    assert Loaded(lambda: worker).draft_has_kv({*layers}) is splits
    worker.get_draft_model = lambda: None
    assert Loaded(lambda: worker).draft_has_kv({*layers}), "not told, so it counts"


# --- what does not -----------------------------------------------------------------------------------------

# Engines that differ in these alone share; the second has what a line would add.
SHARED = {
    "port, host": {"master_port": 29777, "master_addr": "10.0.0.7"},
    "served name": {"served_model_name": "somebody-s"},
    "token of the hub": {"hf_token": "hf_secret"},
    "max_num_seqs": {"max_num_seqs": 7},
    "max_num_batched_tokens": {"max_num_batched_tokens": 4096},
    "gpu_memory_utilization": {"gpu_memory_utilization": 0.31},
    "num_gpu_blocks_override": {"num_gpu_blocks_override": 99},
    "kv_cache_memory_bytes": {"kv_cache_memory_bytes": 1 << 28},
    "max_model_len": {"max_model_len": 2048},
    "chunked prefill": {"enable_chunked_prefill": False, "max_num_batched_tokens": 8192},
    "async scheduling": {"async_scheduling": True},
    "priorities": {"scheduling_policy": "priority"},
    "seed": {"seed": 7},
    "eager": {"enforce_eager": True},
    "optimization level": {"optimization_level": 0},
    "compile mode": {"compilation_config": {"mode": 0}},
    "CUDA graphs": {"compilation_config": {"cudagraph_capture_sizes": [1, 2]}},
    "load format": {"load_format": "safetensors"},
    "how files are read": {"safetensors_load_strategy": "eager"},
    "download directory": {"download_dir": "/nowhere"},
    "tokenizer mode": {"tokenizer_mode": "slow"},
    "API servers": {"_api_process_count": 2, "_api_process_rank": 0},
    "data parallel": {"data_parallel_size": 2, "data_parallel_size_local": 2},
    "kv events": {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}},
    "n-grams": {
        "speculative_config": {
            "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4,
        }
    },
    "logprobs": {"max_logprobs": 3, "logprobs_mode": "raw_logits"},
    "executor": {"distributed_executor_backend": "uni"},
    "sleep": {"enable_sleep_mode": False, "enable_cumem_allocator": False},
    "stream interval": {"stream_interval": 4},
    "generation defaults": {"generation_config": "vllm"},
    "prefix cache retention": {"prefix_cache_retention_interval": 1024},
}  # fmt: skip
# Of the configuration, where a line's option needs what this machine lacks.
SHARED_FIELDS = {
    "structured_outputs_config.backend": "guidance",
    "structured_outputs_config.reasoning_parser": "qwen3",
    "observability_config.otlp_traces_endpoint": "http://collector:4317",
    "observability_config.show_hidden_metrics_for_version": "0.31",
    "profiler_config.torch_profiler_dir": "/traces",
    "scheduler_config.max_num_scheduled_tokens": 5,
    "parallel_config.enable_eplb": True,
    "instance_id": "pod-7",
    "cache_config.num_gpu_blocks": 12345,
    "compilation_config.compilation_time": 3.5,
    "compilation_config.traced_files": {"/x/y.py"},
    "compilation_config.cache_dir": "/cache",
    "speculative_config.method": "suffix",
    "model_config.enable_trace_replay": True,
}
SHARED_VARIABLES = {
    "VLLM_API_KEY": "s3cr3t",
    "VLLM_LOGGING_LEVEL": "DEBUG",
    "VLLM_HOST_IP": "10.1.2.3",
    "VLLM_PORT": "tcp://10.0.0.1:8000",
    "VLLM_SERVICE_HOST": "10.0.0.1",
    "TRITON_PORT_8001_TCP_ADDR": "10.0.0.1",
    "TRITON_CACHE_DIR": "/cache",
    "FLASHINFER_WORKSPACE_BASE": "/cache",
    "VLLM_CACHE_ROOT": "/cache",
    "CUDA_VISIBLE_DEVICES": "3",
    "LOCAL_RANK": "3",
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_RPC_BASE_PATH": "/run/x",
    "HF_TOKEN": "hf_secret",
    "HOSTNAME": "pod-7",
}


@pytest.mark.parametrize("name", SHARED)
def test_engines_that_differ_in_what_is_harmless_share(template, name):
    assert identity_of(config_of(Line(SHARED[name]))).digest == identity_of(template).digest


@pytest.mark.parametrize("path", SHARED_FIELDS)
def test_engines_that_differ_in_a_harmless_field_share(config, path):
    before = identity_of(config)
    put(config, path, SHARED_FIELDS[path])
    assert identity_of(config).digest == before.digest


@pytest.mark.parametrize("name", SHARED_VARIABLES)
def test_engines_that_differ_in_a_harmless_variable_share(config, monkeypatch, name):
    before = identity_of(config)
    monkeypatch.setenv(name, SHARED_VARIABLES[name])
    assert identity_of(config).digest == before.digest


def test_the_same_checkpoint_elsewhere_shares_and_other_bytes_under_its_name_do_not(
    template, tmp_path
):
    copied = tmp_path / "other" / os.path.basename(lab.checkpoint("llama"))
    shutil.copytree(lab.checkpoint("llama"), copied)
    moved = config_of(Line({"model": str(copied), "tokenizer": str(copied)}))
    assert identity_of(moved, weights_id=None) == identity_of(template, weights_id=None)
    weights = next(copied.glob("*.safetensors"))
    world.damage(weights, weights.stat().st_size - 5)
    assert identity_of(moved, weights_id=None) != identity_of(template, weights_id=None)


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_two_starts_of_one_line_have_one_namespace_wherever_and_whoever_they_are(tmp_path, every):
    """One is this process; the other has a place, a host's name, a user and ports of its own."""
    own = {"port": 9111, "memory": 0.7, "home": str(tmp_path), "every": every}
    env = {
        **os.environ, "HOME": str(tmp_path), "VLLM_HOST_IP": "127.0.0.2", "LOCAL_RANK": "1",
        "USER": "two", "LOGNAME": "two",
        # Else vLLM looks into each model's class anew, in a process of its own.
        "VLLM_CACHE_ROOT": os.path.expanduser("~/.cache/vllm"),
    }  # fmt: skip
    program = [sys.executable, settings_lab.__file__, json.dumps(own)]
    if os.geteuid() == 0 and shutil.which("unshare"):
        named = 'hostname pod-7 2>/dev/null; exec "$@"'
        program = ["unshare", "--uts", "sh", "-c", named, "sh", *program]
    done = subprocess.run(program, cwd=tmp_path, env=env, capture_output=True, text=True)
    found = re.search(r"^digests (.*)$", done.stdout, re.MULTILINE)
    assert found, done.stderr[-2000:]
    here = settings_lab.digests({"port": 8000, "memory": 0.3, "every": every})
    assert json.loads(found[1]) == here
    assert len(here) > 30 // every
    least = 5 if every > 1 else 10
    assert len(here) > len(set(here)) > least  # the control: lines that count are told apart


# --- what follows from harmless settings -------------------------------------------------------------------


def derived(config):
    return {path for path in counted(config) if path.startswith("derived.")}


@pytest.mark.parametrize(
    ("length", "generation", "tuned"),
    [(32768, {}, False), (65536, {}, True), (1024, {"attn_temperature_tuning": True}, True)],
)
def test_the_temperature_of_llama_4_s_attention_is_told(config, length, generation, tuned):
    put(config, "model_config.hf_text_config.model_type", "llama4_text")
    put(config, "model_config.max_model_len", length)
    put(config, "model_config.override_generation_config", generation)
    assert counting_settings(config)["derived"] == {"attn_temperature_tuning": tuned}


@pytest.mark.parametrize("name", ["NemotronH_Nano_VL_V2", "Dots3NoteForCausalLM"])
def test_a_processor_that_sizes_images_by_the_context_is_told(config, name):
    put(config, "model_config.hf_config.architectures", [name])
    assert derived(config) == {"derived.max_model_len"}


def test_scales_of_an_encoder_are_told_by_the_content_of_their_file(config, tmp_path):
    found = []
    put(config, "model_config.multimodal_config.mm_encoder_attn_dtype", "fp8")
    with pytest.raises(ConfigError, match="option 'mm_encoder_fp8_scale_path': found none"):
        identity_of(config)
    for folder, scale in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        file = tmp_path / folder / "scales.json"
        file.parent.mkdir()
        file.write_text(json.dumps({"layer": {"q": scale}}))
        put(config, "model_config.multimodal_config.mm_encoder_fp8_scale_path", str(file))
        found.append(identity_of(config))
    assert found[0].digest == found[1].digest != found[2].digest
    file.chmod(0)
    if os.geteuid():
        with pytest.raises(RestError, match=r"scales\.json: Permission denied"):
            identity_of(config)


@pytest.mark.parametrize(("whole", "both_ways", "told"), [
    (False, True, True), (True, True, False), (False, False, False),
])  # fmt: skip
def test_images_computed_in_pieces_are_told_where_that_changes_them(
    config, monkeypatch, whole, both_ways, told
):
    monkeypatch.setattr(type(config.model_config), "is_mm_prefix_lm", both_ways)
    put(config, "model_config.multimodal_config", part_of("multimodal_config"))
    put(config, "scheduler_config.disable_chunked_mm_input", whole)
    assert derived(config) == ({"derived.chunked_mm_input"} if told else set())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_factors_of_adapters_that_are_less_exact_than_the_model_are_told(config, dtype):
    """KV of adapters differed by 3 %, and tokens with it; vLLM makes "auto" the model's dtype."""
    config.lora_config = LoRAConfig(lora_dtype=dtype)
    config.lora_config.verify_with_model_config(config.model_config)
    assert counted(config) == {"derived.lora_dtype"}
    for same in ("auto", torch.float32):
        config.lora_config = LoRAConfig(lora_dtype=same)
        config.lora_config.verify_with_model_config(config.model_config)
        assert counted(config) == set()


def test_packages_with_kernels_count_with_their_versions_for_quantised_models_only(
    config, monkeypatch
):
    monkeypatch.setattr(settings, "has_flashinfer", lambda: True)
    for name in ("has_aiter", "has_deep_gemm", "has_humming"):
        monkeypatch.setattr(settings.import_utils, name, lambda name=name: name == "has_deep_gemm")
    owners = {"flashinfer": ["flashinfer-python"], "quark": ["amd-quark"]}
    monkeypatch.setattr(settings, "packages_distributions", lambda: owners)
    monkeypatch.setattr(settings, "version", lambda name: f"{len(name)}.0")
    assert counted(config) == set()
    put(config, "model_config.quantization", "fp8")
    found = settings.counting_settings(config)["kernel_packages"]
    assert found == {"deep_gemm": "?", "flashinfer": "17.0", "quark": "9.0"}


@pytest.mark.parametrize(("change", "told"), [
    ({"lora_config": object()}, "derived.experts.lora"),
    ({"parallel_config.enable_expert_parallel": True}, "derived.experts.parallel"),
    ({"parallel_config.tensor_parallel_size": 2}, "derived.experts.parallel"),
])  # fmt: skip
@pytest.mark.parametrize(("quantised", "is_moe"), [(True, True), (False, True), (True, False)])
def test_what_chooses_the_kernel_of_quantised_experts_is_told(
    config, change, told, quantised, is_moe
):
    """Beside adapters vLLM takes experts with activations of 16 bits, where it would take 4."""
    if quantised:
        put(config, "model_config.quantization", "modelopt_fp4")
    put(config, "parallel_config.is_moe_model", is_moe)
    for path, value in change.items():
        put(config, path, part_of("lora_config") if path == "lora_config" else value)
    assert (told in counted(config)) is (quantised and is_moe)


def test_plug_ins_that_are_neither_vllm_s_nor_fskv_s_are_told_if_vllm_loads_them(
    config, monkeypatch
):
    def entry_points(group):
        if group != "vllm.general_plugins":
            return []
        values = {"fskv": "fskv.engines.vllm_plugin:register", "theirs": "theirs.patch:all"}
        return [EntryPoint(name, value, group) for name, value in values.items()]

    monkeypatch.setattr(settings, "entry_points", entry_points)
    assert counted(config) == {"plugins.theirs"}
    monkeypatch.setenv("VLLM_PLUGINS", "fskv")
    assert counted(config) == set()


def test_the_partition_of_a_pipeline_counts(config, monkeypatch):
    put(config, "parallel_config.pipeline_parallel_size", 2)
    before = identity_of(config)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,3")
    after = identity_of(config)
    assert before.digest != after.digest
    assert after.to_manifest()["extra"]["pipeline_partition"] == "1,3"


# --- the list ----------------------------------------------------------------------------------------------


def test_every_name_of_the_list_is_one_of_the_vllm_it_was_read_for():
    """A name that vLLM no longer has may come back with another meaning."""
    if not vllm.__version__.startswith(f"{VLLM_TESTED}."):
        pytest.skip("the list is held against the version that all tests run with")
    fields = {field.name for kind in config_classes() for field in dataclasses.fields(kind)}
    named = {
        name
        for parts in harmless._FIELDS.values()
        for names in parts.values()
        for name in names.split()
        if not name.endswith("*")
    }
    assert named - fields == set()
    variables = {
        name
        for names in harmless._VARIABLES.values()
        for name in names.split()
        if not name.endswith("*")
    }
    assert variables - {*envs.environment_variables} == {"TRITON_CACHE_AUTOTUNING"}


def config_classes():
    import vllm.config

    for module in pkgutil.iter_modules(vllm.config.__path__):
        for item in vars(importlib.import_module(f"vllm.config.{module.name}")).values():
            if isinstance(item, type) and dataclasses.is_dataclass(item):
                yield item
