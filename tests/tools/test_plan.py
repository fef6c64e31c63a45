"""`fskv plan` foretells groups, chunks, files and disk from a config.json, or refuses and names the field.

Expected numbers are worked out by hand from the models' published shapes. That real engines agree:
test_engine_plan.
"""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_lab import check_lines, fskv, run

model_layers = pytest.importorskip("fskv_tools.plan.model_layers")
exits = pytest.importorskip("fskv_tools.exits")

BASE = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
LLAMA = {**BASE, "model_type": "llama"}
GPT_OSS = {
    **BASE,
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "head_dim": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}
DEEPSEEK = {
    **BASE,
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
# As on the hub: what equals the class is left out.
GEMMA3 = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
        "max_position_embeddings": 131072,
    },
    "vision_config": {"num_hidden_layers": 27, "hidden_size": 1152},
}
QWEN3_NEXT = {
    **BASE,
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
}
LLAMA4 = {**BASE, "model_type": "llama4_text", "num_hidden_layers": 8, "head_dim": 128}
JAMBA = {**BASE, "model_type": "jamba"}
NEMOTRON = {
    **BASE,
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M*-ME*",
    "head_dim": 128,
}
GRANITE = {
    **BASE,
    "model_type": "granitemoehybrid",
    "hidden_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "layer_types": ["mamba", "mamba", "mamba", "attention"],
}


def plan(tmp_path, config, *options):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    done = run("plan", path, "--json", *options)
    assert done.exit_code == 0, done.stderr
    lines = [dict(line) for line in done.lines]
    check_lines("plan", [dict(line) for line in done.lines])
    groups = [line for line in lines if line["type"] == "group"]
    return groups, lines[-1], [line["text"] for line in lines if line["type"] == "warning"]


def shapes(groups):
    return [(g["group_kind"], g["window_tokens"], len(g["layers"])) for g in groups]


# --- what models keep -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "options", "nbytes"),
    [
        (LLAMA, (), 32 * 2 * 8 * 128 * 2),  # 128 KiB: Llama-3-8B
        (LLAMA, ("--kv-cache-dtype", "fp8"), 32 * 2 * 8 * 128),
        (LLAMA, ("--dtype", "float32"), 32 * 2 * 8 * 128 * 4),
        (LLAMA, ("--tp", "4"), 32 * 2 * 8 * 128 * 2),  # the ranks share the heads
        (LLAMA, ("--tp", "16"), 2 * 32 * 2 * 8 * 128 * 2),  # every head twice
        (DEEPSEEK, (), 61 * 576 * 2),
        (DEEPSEEK, ("--tp", "8"), 8 * 61 * 576 * 2),  # every rank has the latents
        (DEEPSEEK, ("--tp", "8", "--canonical-layout"), 61 * 576 * 2),  # once for all
        (GPT_OSS, (), 24 * 2 * 8 * 64 * 2),
        (GEMMA3, (), 34 * 2 * 4 * 256 * 2),
        (QWEN3_NEXT, (), 12 * 2 * 2 * 256 * 2),  # the attention layers alone
    ],
)
def test_bytes_per_token_are_those_of_the_published_shapes(tmp_path, config, options, nbytes):
    _, summary, _ = plan(tmp_path, config, *options)
    assert summary["kv_nbytes_per_token"] == nbytes


def test_configurations_are_taken_as_they_are_published(tmp_path):
    """Fields as their authors publish them; beside each what it comes to, by its shape."""
    turns = ["sliding_attention", "full_attention"]
    moe = {"quantization_config": {"quant_method": "mxfp4"}, "swiglu_limit": 7.0}
    for config, length, kv_nbytes in (
        (  # Gemma 3 27B: no max_position_embeddings
            {
                "architectures": ["Gemma3ForConditionalGeneration"],
                "model_type": "gemma3",
                "torch_dtype": "bfloat16",
                "text_config": {
                    "head_dim": 128,
                    "hidden_size": 5376,
                    "model_type": "gemma3_text",
                    "num_attention_heads": 32,
                    "num_hidden_layers": 62,
                    "num_key_value_heads": 16,
                    "query_pre_attn_scalar": 168,
                    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                    "sliding_window": 1024,
                },
                "vision_config": {"model_type": "siglip_vision_model", "num_hidden_layers": 27},
            },
            131072,
            62 * 2 * 16 * 128 * 2,
        ),
        (  # Qwen3 32B
            {
                "architectures": ["Qwen3ForCausalLM"],
                "head_dim": 128,
                "hidden_size": 5120,
                "max_position_embeddings": 40960,
                "max_window_layers": 64,
                "model_type": "qwen3",
                "num_attention_heads": 64,
                "num_hidden_layers": 64,
                "num_key_value_heads": 8,
                "rope_scaling": None,
                "sliding_window": None,
                "torch_dtype": "bfloat16",
                "use_sliding_window": False,
            },
            40960,
            64 * 2 * 8 * 128 * 2,
        ),
        (  # Llama 4 Scout: no_rope_layers is there and empty
            {
                "architectures": ["Llama4ForConditionalGeneration"],
                "model_type": "llama4",
                "text_config": {
                    "attention_chunk_size": 8192,
                    "head_dim": 128,
                    "hidden_size": 5120,
                    "max_position_embeddings": 10485760,
                    "model_type": "llama4_text",
                    "no_rope_layers": [],
                    "num_attention_heads": 40,
                    "num_hidden_layers": 48,
                    "num_key_value_heads": 8,
                    "rope_scaling": {"factor": 16.0, "rope_type": "llama3"},
                    "torch_dtype": "bfloat16",
                },
                "torch_dtype": "bfloat16",
                "vision_config": {"model_type": "llama4_vision_model"},
            },
            10485760,
            48 * 2 * 8 * 128 * 2,
        ),
        (  # DeepSeek V3
            {
                "architectures": ["DeepseekV3ForCausalLM"],
                "hidden_size": 7168,
                "kv_lora_rank": 512,
                "max_position_embeddings": 163840,
                "model_type": "deepseek_v3",
                "num_attention_heads": 128,
                "num_hidden_layers": 61,
                "num_key_value_heads": 128,
                "num_nextn_predict_layers": 1,
                "qk_rope_head_dim": 64,
                "quantization_config": {"fmt": "e4m3", "quant_method": "fp8"},
                "rope_scaling": {"factor": 40, "type": "yarn"},
                "torch_dtype": "bfloat16",
            },
            163840,
            61 * 576 * 2,
        ),
        (  # GPT-OSS 120B: no dtype
            {
                "architectures": ["GptOssForCausalLM"],
                "head_dim": 64,
                "hidden_size": 2880,
                "initial_context_length": 4096,
                "layer_types": turns * 18,
                "max_position_embeddings": 131072,
                "model_type": "gpt_oss",
                "num_attention_heads": 64,
                "num_hidden_layers": 36,
                "num_key_value_heads": 8,
                "rope_scaling": {"factor": 32.0, "rope_type": "yarn"},
                "sliding_window": 128,
                **moe,
            },
            131072,
            36 * 2 * 8 * 64 * 2,
        ),
    ):
        summary = plan(tmp_path, config)[1]
        assert summary["max_model_len"] == length
        assert summary["kv_nbytes_per_token"] == kv_nbytes
        assert summary["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("config", "ranks", "times"),
    [(DEEPSEEK, 8, 8), (DEEPSEEK, 1, None), (LLAMA, 16, 2), (LLAMA, 4, None), (JAMBA, 4, None)],
)
def test_a_canonical_layout_is_hinted_at_where_it_is_less(tmp_path, config, ranks, times):
    words = ("--tensor-parallel-size", str(ranks))
    summary = plan(tmp_path, config, *words)[1]
    less = summary["canonical_kv_nbytes_per_token"]
    assert (times and summary["kv_nbytes_per_token"] / times) == less
    told = run("plan", tmp_path / "config.json", "-tp", ranks).stdout
    assert ("hint: with --canonical-layout" in told) is (times is not None)
    if times:
        same = plan(tmp_path, config, *words, "--canonical-layout")[1]
        assert (same["kv_nbytes_per_token"], same["canonical_kv_nbytes_per_token"]) == (less, None)


def test_the_engines_options_have_the_engines_names(tmp_path):
    ours = plan(tmp_path, GPT_OSS, "--tp", "2", "--retention-interval", "4096")
    engines = ("--tensor-parallel-size", "2", "--prefix-cache-retention-interval", "4096")
    assert plan(tmp_path, GPT_OSS, *engines) == ours
    assert plan(tmp_path, GPT_OSS) != ours


def test_layers_are_sorted_into_groups(tmp_path):
    assert shapes(plan(tmp_path, LLAMA)[0]) == [("full", None, 32)]
    assert shapes(plan(tmp_path, DEEPSEEK)[0]) == [("mla", None, 61)]
    assert shapes(plan(tmp_path, GPT_OSS)[0]) == [("sliding_window", 128, 12), ("full", None, 12)]
    # 29 windows and 5 full: the rarer kind says how long groups are, the rest goes round robin.
    gemma, _, _ = plan(tmp_path, GEMMA3)
    assert [len(g["layers"]) for g in gemma] == [5, 5, 5, 5, 5, 4, 5]
    assert gemma[6]["layers"] == [5, 11, 17, 23, 29]
    assert gemma[0]["layers"] == [0, 7, 14, 21, 28]
    states, summary, _ = plan(tmp_path, QWEN3_NEXT)
    assert shapes(states) == [("state", None, 12)] * 3 + [("full", None, 12)]
    # The state of a layer: a convolution over 3 tokens and 32 matrices of 128 x 128, in bfloat16.
    assert states[0]["page_nbytes"][0] == 3 * (2 * 16 * 128 + 32 * 128) * 2 + 32 * 128 * 128 * 2
    assert summary["block_tokens"] == 544  # the smallest multiple of 16 whose page holds a state
    assert states[3]["page_nbytes"][0] == 544 * 2 * 2 * 256 * 2 >= states[0]["page_nbytes"][0]
    llama4, _, _ = plan(tmp_path, LLAMA4)
    assert shapes(llama4) == [("chunked_local", 8192, 2)] * 3 + [("full", None, 2)]
    jamba, _, _ = plan(tmp_path, JAMBA)
    assert shapes(jamba) == [("state", None, 4)] * 7 + [("full", None, 4)]
    assert jamba[0]["page_nbytes"][0] == 2 * 8192 * (3 + 16)
    nemotron, _, _ = plan(tmp_path, NEMOTRON)
    assert shapes(nemotron) == [("state", None, 2), ("state", None, 1), ("full", None, 2)]
    assert nemotron[0]["page_nbytes"][0] == 3 * (128 * 64 + 2 * 8 * 128) * 2 + 128 * 64 * 128 * 4
    granite, _, _ = plan(tmp_path, GRANITE)
    assert shapes(granite) == [("state", None, 1)] * 3 + [("full", None, 1)]
    assert granite[0]["page_nbytes"][0] == 2 * (3 * (3072 + 2 * 128) + 48 * 64 * 128)


def test_windows_follow_the_models_own_rules(tmp_path):
    mistral = {**BASE, "model_type": "mistral"}
    assert shapes(plan(tmp_path, {**mistral, "sliding_window": None})[0]) == [("full", None, 32)]
    # transformers' class says 4096 where the file is silent.
    assert shapes(plan(tmp_path, mistral)[0]) == [("sliding_window", 4096, 32)]
    qwen = {**BASE, "model_type": "qwen2", "sliding_window": 4096}
    assert shapes(plan(tmp_path, {**qwen, "use_sliding_window": False})[0]) == [("full", None, 32)]
    gemma2 = {**BASE, "model_type": "gemma2", "num_hidden_layers": 26}
    assert shapes(plan(tmp_path, gemma2)[0]) == [("sliding_window", 4096, 13), ("full", None, 13)]
    cohere = {**BASE, "model_type": "cohere2", "sliding_window": 4096}
    assert plan(tmp_path, cohere)[0][0]["window_tokens"] == 4097  # vLLM adds one


def test_ranks_and_slices_are_files(tmp_path):
    one, four, sliced = (
        plan(tmp_path, LLAMA, *options)[0][0]
        for options in ((), ("--tp", "4"), ("--tp", "4", "--canonical-layout"))
    )
    assert (one["files_per_chunk"], four["files_per_chunk"], sliced["files_per_chunk"]) == (1, 4, 8)
    assert four["page_nbytes"][0] * 4 == one["page_nbytes"][0] == sliced["page_nbytes"][0] * 8


@pytest.mark.parametrize("model_type", model_layers.DEFAULTS)
def test_defaults_are_those_of_transformers(model_type):
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    if model_type not in auto.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    config = auto.CONFIG_MAPPING[model_type]()
    for name, value in model_layers.DEFAULTS[model_type].items():
        found = getattr(config, name, getattr(config, f"_{name}", None))
        if found is not None:
            assert found == value, name
        else:  # a period: transformers keeps the list of layers that it made of it
            assert name in (
                "sliding_window_pattern",
                "full_attention_interval",
                "sliding_window",
            ), name
    if "sliding_window_pattern" in model_layers.DEFAULTS[model_type]:
        period = model_layers.DEFAULTS[model_type]["sliding_window_pattern"]
        assert config.layer_types.index("full_attention") == period - 1


# --- what follows -----------------------------------------------------------------------


def test_the_planner_chooses_and_warns(tmp_path):
    _, summary, warnings = plan(tmp_path, GPT_OSS)
    assert summary["blocks_per_chunk"] == 6
    assert "prefix_cache_retention_interval is 0" in warnings[0]
    _, _, quiet = plan(tmp_path, GPT_OSS, "--retention-interval", "960")
    assert quiet == []
    groups, _, _ = plan(tmp_path, GPT_OSS, "--chunk-tokens", "256")
    assert {g["tokens_per_chunk"] for g in groups} == {256}
    larger, told, _ = plan(tmp_path, GPT_OSS, "--chunk-size", "8MiB")
    assert larger[1]["payload_nbytes"] >= 8 << 20
    assert any(str(larger[0]["tokens_per_chunk"]) in note for note in told["notes"])
    path = tmp_path / "config.json"
    for options, words in (
        (("--chunk-tokens", "100"), "hybrid_chunk_size is 100"),
        (("--max-model-len", "16"), "max_model_len is 16"),
        (("--retention-interval", "7"), "prefix_cache_retention_interval is 7"),
    ):
        done = run("plan", path, *options)
        assert (done.exit_code, done.stdout) == (2, "")
        assert words in done.stderr


def test_disk_and_time_add_up(tmp_path):
    groups, summary, _ = plan(
        tmp_path, LLAMA, "--prompt-tokens", "32k", "--tokens", "1M", "--disk", "10TiB",
        "--load-rate", "5GB/s", "--prefill-rate", "8000",
    )  # fmt: skip
    (group,) = groups
    chunks = 32000 // group["tokens_per_chunk"]
    assert summary["prompt_files"] == summary["hit_files"] == chunks
    assert summary["prompt_nbytes"] == chunks * group["file_nbytes"]
    assert summary["hit_nbytes"] == chunks * group["payload_nbytes"] == 32000 * 131072
    assert summary["files_per_1000_tokens"] == chunks / 32
    assert summary["tokens_nbytes"] == 10**6 * summary["prompt_nbytes"] // 32000
    assert summary["disk_tokens"] == (10 << 40) * 32000 // summary["prompt_nbytes"]
    assert summary["load_s"] == pytest.approx(32000 * 131072 / 5e9)
    assert summary["prefill_s"] == 4.0
    assert summary["break_even_rate"] == pytest.approx(131072 * 8000)
    # At the rate where both take the same time, they do.
    again = plan(
        tmp_path, LLAMA, "--prompt-tokens", "32k", "--prefill-rate", "8000",
        "--load-rate", f"{summary['break_even_rate'] / 1e6:.6f}MB/s",
    )[1]  # fmt: skip
    assert again["load_s"] == pytest.approx(again["prefill_s"], rel=1e-6)


def test_windows_and_states_are_stored_at_boundaries(tmp_path):
    def files(config, *options):
        return plan(tmp_path, config, "--prompt-tokens", "9600", *options)[1]["prompt_files"]

    full = 9600 // 96
    # The last token is computed: a window of 128 before token 9599 lies in two chunks of 96.
    assert files(GPT_OSS) == full + 2
    assert files(GPT_OSS, "--retention-interval", "960") == full + 10 * 2
    states, summary, _ = plan(tmp_path, QWEN3_NEXT, "--prompt-tokens", "9600")
    whole = 9600 // summary["block_tokens"]
    assert summary["prompt_files"] == whole + 3
    assert summary["hit_tokens"] == whole * summary["block_tokens"]
    assert len(states) == 4
    short = plan(tmp_path, QWEN3_NEXT, "--prompt-tokens", "100")[1]
    assert (short["prompt_files"], short["hit_tokens"], short["hit_nbytes"]) == (0, 0, 0)


def test_what_people_see(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT_OSS))
    for where in (path, tmp_path):
        done = run("plan", where, "--load-rate", "5GB/s", "--prefill-rate", "8k", "--disk", "1TiB")
        assert (done.exit_code, done.stderr) == (0, "")
        for words in ("sliding window 128", "48.0 KiB of KV a token", "warning: ", "times faster"):
            assert words in done.stdout


@pytest.mark.parametrize(
    ("prefill", "rate"), [("8000", "1.05 GB/s"), ("30", "3.93 MB/s"), ("1", "131 kB/s")]
)
def test_a_rate_is_told_in_a_unit_that_fits(tmp_path, prefill, rate):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    shown = run("plan", path, "--prefill-rate", prefill).stdout
    assert f"the storage gives more than {rate}" in " ".join(shown.split())


def test_a_disk_is_read_in_the_units_that_a_rate_is(tmp_path):
    sizes = {"100GB": 10**11, "100GiB": 100 << 30, "1.5TB": 15 * 10**11, "4096": 4096}
    for text, nbytes in sizes.items():
        assert plan(tmp_path, LLAMA, "--disk", text)[1]["disk"] == nbytes, text


# --- refusals ---------------------------------------------------------------------------


def test_a_huge_max_model_len_is_planned_like_any_other(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    usual, huge = (
        run("plan", path, "--json", "--max-model-len", n).summary for n in ("131072", "1000000000")
    )
    assert usual["blocks_per_chunk"] == huge["blocks_per_chunk"]


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"model_type": "unheard_of"}, (), "model_type"),
        ({"model_type": None}, (), "model_type"),
        ({"model_type": ["llama"]}, (), "model_type"),
        ({"num_hidden_layers": "32"}, (), "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, (), "num_hidden_layers"),
        ({"num_hidden_layers": True}, (), "num_hidden_layers"),
        ({"num_key_value_heads": 0}, (), "num_key_value_heads"),
        ({"num_key_value_heads": 6}, ("--tp", "4"), "num_key_value_heads"),
        ({"hidden_size": -1}, (), "hidden_size"),
        ({"layer_types": ["full_attention"]}, (), "layer_types"),
        ({"layer_types": ["warp_attention"] * 32}, (), "layer_types[0]"),
        ({"torch_dtype": "float32"}, (), "--dtype"),
        ({"torch_dtype": 16}, (), "torch_dtype"),
        ({"index_topk": 2048}, (), "index_topk"),
        ({"num_kv_shared_layers": 4}, (), "num_kv_shared_layers"),
        ({"max_position_embeddings": None}, (), "--max-model-len"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, (), "--kv-cache-dtype"),
        ({}, ("--kv-cache-dtype", "int4_per_token_head"), "--kv-cache-dtype"),
        ({}, ("--load-rate", "fast"), "--load-rate"),
        ({}, ("--load-rate", "0GB/s"), "--load-rate"),
        ({}, ("--prefill-rate", "0"), "--prefill-rate"),
        ({}, ("--tokens", "many"), "--tokens"),
        ({}, ("--disk", "10 miles"), "--disk"),
        ({}, ("--disk", "1GB/s"), "--disk"),
        ({}, ("--prompt-tokens", "0"), "--prompt-tokens"),
        ({}, ("--prompt-tokens", "200k"), "--prompt-tokens"),
    ],
)
def test_what_is_not_understood_is_refused_by_its_name(tmp_path, changes, options, words):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, **changes}))
    done = run("plan", path, *options)
    assert (done.exit_code, done.stdout) == (2, "")
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_states_alone_and_canonical_states_are_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**NEMOTRON, "hybrid_override_pattern": "MMM"}))
    assert "no layer has attention" in run("plan", path).stderr
    path.write_text(json.dumps(QWEN3_NEXT))
    assert "--canonical-layout" in run("plan", path, "--canonical-layout").stderr


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        '{"model_type": NaN}',
        "[" * 100_000,
        '{"a": 1, "a": 2}',
        "9" * 5000,
        "null",
        "\x00",
    ],
)
def test_what_is_no_configuration_is_refused(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_text(content)
    done = fskv("plan", path, timeout_s=60)
    assert (done.exit_code, done.stdout) == (2, "")
    assert len(done.stderr.strip().splitlines()) == 1


def test_what_is_no_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", "/dev/zero", tmp_path, tmp_path / "missing"):
        done = fskv("plan", path, timeout_s=60)
        assert (done.exit_code, done.stdout) == (2, "")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, 2, -1, 2**31, 10**80, 10**400])
    | st.floats()
    | st.text(max_size=10)
    | st.sampled_from(
        ["full_attention", "sliding_attention", "linear_attention", "M*-", "float16"]
    ),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)
CONFIGS = (
    LLAMA,
    GPT_OSS,
    DEEPSEEK,
    GEMMA3["text_config"],
    QWEN3_NEXT,
    LLAMA4,
    JAMBA,
    NEMOTRON,
    GRANITE,
)
NAMES = sorted(
    {name for config in CONFIGS for name in config}
    | {name for names in model_layers.DEFAULTS.values() for name in names}
    | {
        "text_config",
        "use_sliding_window",
        "no_rope_layers",
        "quantization_config",
        "full_attn_idxs",
    }
)


@settings(max_examples=400, deadline=None)
@given(
    config=st.sampled_from(CONFIGS),
    changes=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4),
    tp=st.sampled_from([1, 2, 3, 8]),
)
def test_no_configuration_makes_it_fail(config, changes, tp):
    """Any value in any field: a model or one sentence; never another exception, never a long wait."""
    try:
        model = model_layers.read_model({**config, **changes}, tp)
    except exits.UsageError as error:
        sentence = str(error)
    else:
        sentence = ""
        assert 1 <= len(model.layers) <= 4096
    assert len(sentence) < 1000


@settings(max_examples=60, deadline=None)
@given(
    config=st.sampled_from(CONFIGS),
    changes=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=2),
    options=st.lists(
        st.sampled_from(
            ["--canonical-layout", "--tp=2", "--chunk-size=1", "--chunk-tokens=16", "--block-size=1000000",
             "--retention-interval=1", "--prompt-tokens=1000M", "--max-model-len=1000000000", "--disk=1TiB",
             "--tokens=9T", "--load-rate=1B/s", "--prefill-rate=1", "--platform=cpu"]
        ),
        max_size=4,
    ),
)  # fmt: skip
def test_no_configuration_makes_the_command_fail(tmp_path_factory, config, changes, options):
    path = tmp_path_factory.getbasetemp() / "fuzzed.json"
    path.write_text(json.dumps({**config, **changes}))
    done = run("plan", path, *options)
    assert done.exit_code in (0, 2)
    assert bool(done.stdout) == (done.exit_code == 0)
    assert all(c.isprintable() or c == "\n" for c in done.stdout + done.stderr)
