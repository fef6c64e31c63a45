"""docs/settings.md judges every setting of the installed vLLM, and what it says is in the identity is there.

The configuration is vLLM's own; no engine is started. Values are set in it, and in the environment, as if an
engine had been started with them.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import importlib
import json
import pathlib
import pkgutil
import re
from types import SimpleNamespace

import pytest
import world

pytest.importorskip("vllm", reason="the settings are those of the installed vLLM: make test")
pytestmark = world.VLLM

TABLES = pathlib.Path(__file__).parents[2] / "docs" / "settings.md"
ROW = re.compile(r"\| `(\w+)`(?: \((\d+\.\d+)\))? \| ([^|]+) \| ([^|]+) \|")
VERDICTS = {"key", "no", "rounding", "refused", "off: prefix caching", "HOLE"}
# Known, and not closed by a setting in the identity. What is closed is taken out here and in the table.
HOLES: set[tuple[str, str]] = set()


def read_tables(text=None):
    """Return {(table, setting): (verdict, why, version)} of the document."""
    rows, table = {}, None
    for line in (text or TABLES.read_text()).splitlines():
        if line.startswith("## "):
            table = line[3:]
        elif table and line.startswith("| `"):
            match = ROW.fullmatch(line)
            assert match, f"not a row: {line}"
            name, version, verdict, why = match.groups()
            assert (table, name) not in rows, f"{table}.{name} is judged twice"
            rows[table, name] = (verdict, why, version)
    return rows


def config_classes():
    import vllm.config

    modules = [
        importlib.import_module(f"vllm.config.{module.name}")
        for module in pkgutil.iter_modules(vllm.config.__path__)
    ]
    return {
        name: item
        for module in modules
        for name, item in vars(module).items()
        if isinstance(item, type) and dataclasses.is_dataclass(item)
        if item.__module__.startswith("vllm.config")
    }


def installed_settings():
    """Return {(table, setting)}: fields of VllmConfig, of what its fields are, and so on; the environment."""
    from vllm import envs

    classes = config_classes()
    settings, queue, seen = set(), ["VllmConfig"], set()
    while queue:
        name = queue.pop()
        seen.add(name)
        for field in classes[
            name
        ].__dataclass_fields__.values():  # InitVar too, which fields() leaves out
            if field._field_type.name == "_FIELD_CLASSVAR":
                continue
            settings.add((name, field.name))
            words = set(re.findall(r"\w+", str(field.type)))
            queue += [word for word in words & classes.keys() if word not in seen]
    return settings | {("Environment", name) for name in envs.environment_variables}


def complaints(rows, settings, version):
    """Say what is not judged, and what is judged but not there."""
    expected = {key for key, (_, _, only) in rows.items() if only in (None, version)}
    ours = sorted(settings - expected)
    theirs = sorted(expected - settings)
    return [
        *(f"{a}.{b} of vLLM {version}: judge it in docs/settings.md, section {a}" for a, b in ours),
        *(f"docs/settings.md judges {a}.{b}, vLLM {version} has none" for a, b in theirs),
    ]


def version_line():
    import vllm

    return ".".join(vllm.__version__.split(".")[:2])


def test_every_setting_of_the_installed_vllm_is_judged_and_no_other():
    found = complaints(read_tables(), installed_settings(), version_line())
    assert not found, "\n".join(found)


def test_a_new_setting_and_one_that_is_gone_are_both_named():
    rows, settings = read_tables(), installed_settings()
    new = {("CacheConfig", "made_up_field"), ("Environment", "VLLM_MADE_UP")}
    before = set(complaints(rows, settings, "0.32"))
    assert set(complaints(rows, settings | new, "0.32")) - before == {
        "CacheConfig.made_up_field of vLLM 0.32: judge it in docs/settings.md, section CacheConfig",
        "Environment.VLLM_MADE_UP of vLLM 0.32: judge it in docs/settings.md, section Environment",
    }
    gone = ("CacheConfig", "block_size")
    assert "docs/settings.md judges CacheConfig.block_size, vLLM 0.32 has none" in complaints(
        rows, settings - {gone}, "0.32"
    )


def test_a_row_of_another_version_is_not_asked_for():
    rows = read_tables("## CacheConfig\n| `later` (0.99) | no | not yet |")
    assert complaints(rows, set(), "0.32") == []
    assert complaints(rows, {("CacheConfig", "later")}, "0.99") == []
    assert len(complaints(rows, set(), "0.99")) == 1


def test_every_verdict_is_one_of_the_allowed_and_says_why():
    for setting, (verdict, why, _) in read_tables().items():
        assert verdict in VERDICTS or re.fullmatch(r"identity: `[\w.\[\]]+`", verdict), setting
        assert len(why) > 3, setting


def test_the_holes_that_are_left_are_these():
    assert {key for key, row in read_tables().items() if row[0] == "HOLE"} == HOLES


# --- what is in the identity ---------------------------------------------------------------


@pytest.fixture(autouse=True)
def neutral_environment(monkeypatch):
    from fskv.engines.vllm import switches

    for name in (*switches.ENVIRONMENT, *switches.LAYOUT, "PYTHONHASHSEED"):
        monkeypatch.delenv(name, raising=False)
    importlib.import_module("vllm.envs").disable_envs_cache()


@pytest.fixture(scope="module")
def template():
    import engine_lab as lab
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("vLLM's platform is not a CPU")
    return EngineArgs(
        model=lab.checkpoint("llama"),
        dtype="float32",
        block_size=32,
        max_model_len=1024,
        skip_tokenizer_init=True,
    ).create_engine_config()


@pytest.fixture
def config(template):
    return copy.deepcopy(template)


def manifest(config):
    from fskv.config import StoreConfig
    from fskv.engines.vllm.identity import build_identity
    from fskv.engines.vllm.switches import layout_switches

    store = StoreConfig.from_mapping({"root": "/kv", "weights_id": "one"})
    return build_identity(config, store, [], [], 4, 32, layout_switches())


def put(config, path, value):
    """Set a value deep inside, where vLLM's validation of fields does not look."""
    *parts, name = path.split(".")
    for part in parts:
        if getattr(config, part) is None:
            object.__setattr__(config, part, SimpleNamespace())
        config = getattr(config, part)
    object.__setattr__(config, name, value)


def leaves(tree, path=""):
    """Return every path into a manifest, inner ones too."""
    yield path
    if isinstance(tree, dict):
        for key, item in tree.items():
            yield from leaves(item, f"{path}.{key}".lstrip("."))


def multimodal(**fields):
    return SimpleNamespace(**fields)


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
# Path in the manifest -> what is set in the configuration, and two values that differ. Settings before the
# last one only make it count.
SET = {
    "model_dtype": ([], "model_config.dtype", ("torch.float32", "torch.bfloat16")),
    "kv_cache_dtype": ([], "cache_config.cache_dtype", ("auto", "fp8_e5m2")),
    "kv_cache_layout": ([], "cache_config.kv_cache_layout", ("LBNHC", "LBHNC")),
    "hash_algorithm": ([], "cache_config.prefix_caching_hash_algo", ("sha256", "sha256_cbor")),
    "model_runner": ([], "use_v2_model_runner", None),
    "topology.tp": ([], "parallel_config.tensor_parallel_size", (1, 2)),
    "topology.pp": ([], "parallel_config.pipeline_parallel_size", (1, 2)),
    "topology.pcp": ([], "parallel_config.prefill_context_parallel_size", (1, 2)),
    "topology.dcp": ([], "parallel_config.decode_context_parallel_size", (1, 2)),
    "topology.cp_interleave": ([], "parallel_config.cp_kv_cache_interleave_size", (1, 16)),
    "model_config.text": ([], "model_config.hf_text_config.rms_norm_eps", (1e-5, 1e-6)),
    "model_config.quantization": ([], "model_config.quantization", (None, "fp8")),
    "model_config.online_quantization": (
        [],
        "model_config.quantization_config",
        ({"ignore": []}, {"ignore": ["lm_head"]}),
    ),
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
    "extra.speculative": (
        [],
        "speculative_config",
        (
            # As vLLM has them: the draft of n-grams is the model itself.
            SimpleNamespace(method="ngram", draft_model_config=1, target_model_config=1),
            SimpleNamespace(
                method="eagle",
                draft_model_config=SimpleNamespace(model="/draft"),
                target_model_config=None,
            ),
        ),
    ),
    **{
        f"model_config.multimodal.{name}": (
            [],
            "model_config.multimodal_config",
            (multimodal(), multimodal(**{name: "x"})),
        )
        for name in (
            "media_io_kwargs",
            "mm_processor_kwargs",
            "mm_device_do_normalize",
            "interleave_mm_strings",
            "video_pruning_rate",
            "video_pruning_method",
        )
    },
}
# Paths whose rows rest on tests elsewhere: layers, groups, files, the platform, the options of fskv.
ELSEWHERE = {
    "arch": "test_identity_isa.py",
    "attention_backend": "tests/engines",
    "blocks_per_chunk": "test_identity_settings.py",
    "groups": "test_tenants.py, tests/unit/test_namespace.py",
    "groups[].kind": "tests/unit/test_namespace.py",
    "groups[].tokens_per_block": "tests/unit/test_namespace.py",
    "groups[].window_tokens": "tests/unit/test_namespace.py",
    "lora": "test_identity_settings.py",
    "model_config": "test_identity_settings.py",
    "model_config.whole": "test_identity_settings.py",
    "tokens_per_hash": "tests/unit/test_namespace.py",
    "weights": "test_identity_settings.py",
    "extra.code": "tests/engines/test_engine_identity.py",
    "extra.pipeline_partition": "here, below",
    "model_config.multimodal.mm_encoder_attn_dtype": "here, below",
}
SWITCHED = {
    "environment.VLLM_FLOAT32_MATMUL_PRECISION": "high",
    "environment.VLLM_XPU_INC_WNA16_BACKEND": "w4a8",
    "environment.VLLM_MARLIN_INPUT_DTYPE": "int8",
    "environment.VLLM_HUMMING_ONLINE_QUANT_CONFIG": '{"dtype": "int4"}',
    "environment.VLLM_HUMMING_INPUT_QUANT_CONFIG": '{"dtype": "int8"}',
    "environment.VLLM_ROCM_USE_AITER_MOE_SITUV2": "a16w4",
    "environment.VLLM_DISABLED_KERNELS": "MarlinLinearKernel",
    "environment.VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "INT4",
    "environment.VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB": "16",
    "environment.VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB": "1",
    "environment.VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB": "64",
    "environment.VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random",
    "model_config.model_impl": "transformers",
    "model_config.model_class_overrides": {"LlamaForCausalLM": "mine:Model"},
    "model_config.code_revision": "main",
    "compilation_config.inductor_passes": {"mine": "mine.pass_"},
    "load_config.ignore_patterns": ["model-*"],
    "attention_config.indexer_kv_dtype": "mxfp4",
    "attention_config.backend_per_kind": {"full_attention": "TRITON_ATTN"},
    "kernel_config.moe_backend": "marlin",
    "kernel_config.linear_backend": "marlin",
    "kernel_config.linear_backend_per_quant": {"nvfp4": "marlin"},
    "lora_config.target_modules": ["o_proj"],
}
# Paths below `switches` that are not a field's own value: each has a test of its own.
DERIVED = {
    "additional_config",
    "ec_transfer_config.ec_connector",
    "lora_config.lora_dtype",
    "model_config.attn_temperature_tuning",
    "model_config.max_model_len",
    "multimodal_config.chunked_mm_input",
    "multimodal_config.mm_encoder_fp8_scales",
    "parallel_config.worker_cls",
    "plugins",
}


def switch_paths():
    from fskv.engines.vllm import switches

    return (
        {f"environment.{name}" for name in switches.ENVIRONMENT}
        | {f"{part}.{field}" for part, field in switches.FIELDS}
        | DERIVED
    )


def identity_paths():
    """Return the paths that rows name, without those of switches."""
    found = {
        row[0].split("`")[1] for row in read_tables().values() if row[0].startswith("identity")
    }
    return {path for path in found if not path.startswith("extra.switches.")}


def test_every_path_of_a_row_exists_and_a_test_shows_that_it_counts():
    from fskv.engines.vllm import switches

    layouts = {f"extra.page_layouts.{name}" for name in switches.LAYOUT}
    assert identity_paths() - layouts == SET.keys() | ELSEWHERE.keys()
    for path in ELSEWHERE:
        if not path.startswith(("model_config.", "extra.")):
            from fskv.namespace import GroupIdentity, Identity

            owner = GroupIdentity if path.startswith("groups[].") else Identity
            assert path.rpartition(".")[2] in {field.name for field in dataclasses.fields(owner)}


def test_rows_and_switches_are_the_same():
    """Derived ones may stand in the text of a row whose verdict names another path."""
    text = TABLES.read_text()
    named = set(re.findall(r"`extra\.switches\.([\w.]+)`", text))
    assert named == switch_paths() | {"kernel_packages"}
    for (table, name), (verdict, _, _) in read_tables().items():
        if table == "Environment" and "extra.switches.environment" in verdict:
            assert verdict.endswith(f".{name}`"), f"{name} names another's path"


@pytest.mark.parametrize("path", SET)
def test_what_a_setting_resolves_to_is_there_and_moves_the_digest(config, monkeypatch, path):
    before, where, values = SET[path]
    for name, value in before:
        put(config, name, value)
    found = []
    for value in values or (False, True):
        if values is None:
            monkeypatch.setattr(type(config), where, value)
        else:
            put(config, where, value)
        found.append(manifest(config))
    assert found[0].digest != found[1].digest
    assert path in set(leaves(found[1].to_manifest()))


def test_the_partition_of_a_pipeline_counts(config, monkeypatch):
    put(config, "parallel_config.pipeline_parallel_size", 2)
    before = manifest(config)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,3")
    after = manifest(config)
    assert before.digest != after.digest
    assert after.to_manifest()["extra"]["pipeline_partition"] == "1,3"


@pytest.mark.parametrize("stages", [1, 2])
def test_what_permutes_pages_counts_with_pipeline_stages_too(config, monkeypatch, stages):
    put(config, "parallel_config.pipeline_parallel_size", stages)
    before = manifest(config)
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    assert manifest(config).digest != before.digest


def test_nothing_is_switched_by_default(config):
    assert manifest(config).extra is None


def test_neutral_is_what_the_installed_vllm_does_by_default():
    from vllm import envs

    from fskv.engines.vllm import switches

    for name, neutral in switches.ENVIRONMENT.items():
        assert envs.environment_variables[name]() == neutral, name
    for name, neutral in switches.LAYOUT.items():
        assert envs.environment_variables[name]() in (None, neutral), name
    classes = config_classes()
    for (part, field), neutral in switches.FIELDS.items():
        owner = next(
            classes[word]
            for word in re.findall(
                r"\w+", str(classes["VllmConfig"].__dataclass_fields__[part].type)
            )
            if word in classes
        )
        found = owner.__dataclass_fields__[field]
        default = found.default
        if found.default_factory is not dataclasses.MISSING:
            default = found.default_factory()
        default = getattr(default, "default", default)  # pydantic's Field
        factory = getattr(found.default, "default_factory", None)
        assert (factory() if factory else default) in neutral, f"{part}.{field}"


@pytest.mark.parametrize(
    "path",
    sorted(
        SWITCHED.keys()
        | {
            f"environment.{name}"
            for name in importlib.import_module("fskv.engines.vllm.switches").ENVIRONMENT
        }
        | {
            f"{part}.{field}"
            for part, field in importlib.import_module("fskv.engines.vllm.switches").FIELDS
        }
    ),
)
def test_a_switch_moves_the_digest_and_says_so(config, monkeypatch, path):
    from fskv.engines.vllm import switches

    before = manifest(config)
    part, _, name = path.partition(".")
    if part == "environment":
        neutral = switches.ENVIRONMENT[name]
        monkeypatch.setenv(name, SWITCHED.get(path, "0" if neutral else "1"))
    else:
        put(config, path, SWITCHED.get(path, not switches.FIELDS[part, name][0]))
    after = manifest(config)
    assert before.digest != after.digest
    assert list(after.to_manifest()["extra"]["switches"]) == [part]
    assert list(after.to_manifest()["extra"]["switches"][part]) == [name]


def test_the_default_written_out_is_the_default_but_where_vllm_asks_whether_it_is_set(
    config, monkeypatch
):
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "1")
    assert manifest(config).extra is None
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "1")
    assert switched(config) == {"environment": {"VLLM_USE_DEEP_GEMM": True}}


def switched(config):
    from fskv.engines.vllm.switches import switches

    return switches(config)


@pytest.mark.parametrize(
    ("length", "generation", "tuned"),
    [(32768, {}, False), (65536, {}, True), (1024, {"attn_temperature_tuning": True}, True)],
)
def test_the_temperature_of_llama_4_s_attention_is_told(config, length, generation, tuned):
    put(config, "model_config.hf_text_config.model_type", "llama4_text")
    put(config, "model_config.max_model_len", length)
    put(config, "model_config.override_generation_config", generation)
    assert switched(config) == {"model_config": {"attn_temperature_tuning": tuned}}


@pytest.mark.parametrize("name", ["NemotronH_Nano_VL_V2", "Dots3NoteForCausalLM"])
def test_a_processor_that_sizes_images_by_the_context_is_told(config, name):
    put(config, "model_config.hf_config.architectures", [name])
    put(config, "model_config.max_model_len", 4096)
    assert switched(config) == {"model_config": {"max_model_len": 4096}}


def test_scales_of_an_encoder_are_told_by_the_content_of_their_file(config, tmp_path):
    from fskv.errors import ConfigError

    found = []
    for folder, scale in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        file = tmp_path / folder / "scales.json"
        file.parent.mkdir()
        file.write_text(json.dumps({"layer": {"q": scale, "k": scale, "v": scale}}))
        fields = {"mm_encoder_attn_dtype": "fp8", "mm_encoder_fp8_scale_path": str(file)}
        put(config, "model_config.multimodal_config", multimodal(**fields))
        found.append(manifest(config))
        assert (
            found[-1].to_manifest()["model_config"]["multimodal"]["mm_encoder_attn_dtype"] == "fp8"
        )
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        assert switched(config) == {"multimodal_config": {"mm_encoder_fp8_scales": digest}}
    assert found[0].digest == found[1].digest != found[2].digest
    file.unlink()
    with pytest.raises(ConfigError, match=r"scales\.json: No such file"):
        switched(config)


def test_scales_that_follow_the_images_seen_before_are_refused(config):
    from fskv.errors import ConfigError

    put(config, "model_config.multimodal_config", multimodal(mm_encoder_attn_dtype="fp8"))
    with pytest.raises(ConfigError, match="option 'mm_encoder_fp8_scale_path': found none"):
        switched(config)


@pytest.mark.parametrize(("whole", "both_ways", "told"), [
    (False, True, True), (True, True, False), (False, False, False),
])  # fmt: skip
def test_images_computed_in_pieces_are_told_where_that_changes_them(
    config, monkeypatch, whole, both_ways, told
):
    monkeypatch.setattr(type(config.model_config), "is_mm_prefix_lm", both_ways)
    put(config, "model_config.multimodal_config", multimodal())
    put(config, "scheduler_config.disable_chunked_mm_input", whole)
    assert switched(config) == ({"multimodal_config": {"chunked_mm_input": True}} if told else {})


def test_a_worker_and_a_platform_of_somebody_else_are_told(config, monkeypatch):
    from fskv.engines.vllm import switches

    assert config.parallel_config.worker_cls.startswith("vllm.")
    put(config, "additional_config", {"weights": "int4"})
    assert switched(config) == {}, (
        "vLLM's own platforms take kernels from it, of the same precision"
    )
    put(config, "parallel_config.worker_cls", "theirs.Worker")
    monkeypatch.setattr(switches, "current_platform", SimpleNamespace(is_out_of_tree=lambda: True))
    assert switched(config) == {
        "parallel_config": {"worker_cls": "theirs.Worker"},
        "additional_config": {"weights": "int4"},
    }


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_factors_of_adapters_that_are_less_exact_than_the_model_are_told(config, dtype):
    """KV of adapters differed by 3 %, and tokens with it; vLLM makes "auto" the model's dtype."""
    import torch
    from vllm.config.lora import LoRAConfig

    config.lora_config = LoRAConfig(lora_dtype=dtype)
    config.lora_config.verify_with_model_config(config.model_config)
    assert switched(config) == {"lora_config": {"lora_dtype": dtype}}
    for same in ("auto", torch.float32):
        config.lora_config = LoRAConfig(lora_dtype=same)
        config.lora_config.verify_with_model_config(config.model_config)
        assert config.lora_config.lora_dtype is torch.float32
        assert switched(config) == {}


def test_outputs_of_encoders_that_others_computed_are_told(config):
    transfer = SimpleNamespace(ec_connector="ECExampleConnector", is_ec_consumer=True)
    put(config, "ec_transfer_config", transfer)
    assert switched(config) == {"ec_transfer_config": {"ec_connector": "ECExampleConnector"}}
    transfer.is_ec_consumer = False
    assert switched(config) == {}


def test_packages_with_kernels_count_for_quantised_models_only(config, monkeypatch):
    from fskv.engines.vllm import switches

    monkeypatch.setattr(switches, "has_flashinfer", lambda: True)
    for name in ("has_aiter", "has_deep_gemm", "has_humming"):
        monkeypatch.setattr(switches.import_utils, name, lambda name=name: name == "has_deep_gemm")
    assert switched(config) == {}
    put(config, "model_config.quantization", "fp8")
    assert switched(config) == {"kernel_packages": ["deep_gemm", "flashinfer"]}


def test_plug_ins_that_are_neither_vllm_s_nor_fskv_s_are_told_if_vllm_loads_them(
    config, monkeypatch
):
    from importlib.metadata import EntryPoint

    from fskv.engines.vllm import switches

    def entry_points(group):
        if group != "vllm.general_plugins":
            return []
        values = {"fskv": "fskv.engines.vllm_plugin:register", "theirs": "theirs.patch:all"}
        return [EntryPoint(name, value, group) for name, value in values.items()]

    monkeypatch.setattr(switches, "entry_points", entry_points)
    assert switched(config) == {"plugins": {"theirs": "?"}}
    monkeypatch.setenv("VLLM_PLUGINS", "fskv")
    assert switched(config) == {}
