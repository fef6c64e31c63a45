"""`fskv plan` foretells groups, chunks, files and disk from a config.json or a namespace.json, or refuses.

Here vLLM counts as not installed but where a test says so. Expected numbers are worked out by hand from the
models' published shapes. That vLLM's own classes and real engines agree: test_engine_plan.
"""

from __future__ import annotations

import json
import os

import pytest
from fskv_tools.plan import engine
from tool_lab import Lab, check_lines, fskv, run

from fskv.namespace import GroupIdentity

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
}
DEEPSEEK = {
    **BASE,
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
QWEN3_VL = {
    "model_type": "qwen3_vl",
    "text_config": {**BASE, "model_type": "qwen3_vl_text", "head_dim": 128},
    "vision_config": {"num_hidden_layers": 27, "hidden_size": 1152},
}


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch):
    monkeypatch.setattr(engine, "vllm_is_installed", lambda: False)


def write(tmp_path, config):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return path


def plan(tmp_path, config, *options):
    return planned(write(tmp_path, config), *options)


def planned(path, *options):
    done = run("plan", path, "--json", *options)
    assert done.exit_code == 0, done.stderr
    lines = [dict(line) for line in done.lines]
    check_lines("plan", [dict(line) for line in done.lines])
    groups = [line for line in lines if line["type"] == "group"]
    return groups, lines[-1], [line["text"] for line in lines if line["type"] == "warning"]


def shapes(groups):
    return [(g["group_kind"], g["window_tokens"], len(g["layer_names"])) for g in groups]


# --- what models keep -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "options", "nbytes"),
    [
        (LLAMA, (), 32 * 2 * 8 * 128 * 2),  # 128 KiB: Llama-3-8B
        (LLAMA, ("--kv-cache-dtype", "fp8"), 32 * 2 * 8 * 128),
        (LLAMA, ("--dtype", "float32"), 4 * 32 * 2 * 8 * 128),
        (LLAMA, ("--tp", "4"), 32 * 2 * 8 * 128 * 2),  # the ranks share the heads
        (LLAMA, ("--tp", "16"), 2 * 32 * 2 * 8 * 128 * 2),  # every head twice
        (DEEPSEEK, (), 61 * 576 * 2),
        (DEEPSEEK, ("--tp", "8"), 8 * 61 * 576 * 2),  # every rank has the latents
        (GPT_OSS, (), 24 * 2 * 8 * 64 * 2),
        (QWEN3_VL, (), 32 * 2 * 8 * 128 * 2),
    ],
)
def test_bytes_per_token_are_those_of_the_published_shapes(tmp_path, config, options, nbytes):
    _, summary, _ = plan(tmp_path, config, *options)
    assert summary["kv_nbytes_per_token"] == nbytes
    assert summary["max_model_len"] == 131072
    assert "vLLM is not installed" in summary["source"]


def test_layers_are_sorted_into_groups_of_blocks(tmp_path):
    assert shapes(plan(tmp_path, LLAMA)[0]) == [("full", None, 32)]
    assert shapes(plan(tmp_path, DEEPSEEK)[0]) == [("mla", None, 61)]
    windows, _, _ = plan(tmp_path, GPT_OSS)
    assert shapes(windows) == [("sliding_window", 128, 12), ("full", None, 12)]
    assert windows[1]["layer_names"][:2] == ["layer 1", "layer 3"]
    mistral = {**BASE, "model_type": "mistral"}
    assert shapes(plan(tmp_path, {**mistral, "sliding_window": None})[0]) == [("full", None, 32)]
    sliding = plan(tmp_path, {**mistral, "sliding_window": 4096})[0]
    assert shapes(sliding) == [("sliding_window", 4096, 32)]
    for config, options, block in (
        (LLAMA, (), 16),
        (LLAMA, ("--platform", "cpu"), 128),
        (DEEPSEEK, (), 64),
        (LLAMA, ("--block-size", "32"), 32),
    ):
        assert plan(tmp_path, config, *options)[0][0]["tokens_per_block"] == block
    one, four = (plan(tmp_path, LLAMA, *options)[0][0] for options in ((), ("--tp", "4")))
    assert (one["files_per_chunk"], four["files_per_chunk"]) == (1, 4)
    assert four["page_nbytes"][0] * 4 == one["page_nbytes"][0]


@pytest.mark.parametrize(
    ("beside", "inside", "dtype"),
    [
        (None, None, "auto"),
        ({"kv_cache_quant_algo": "FP8", "quant_algo": "FP8"}, None, "fp8_e4m3"),
        # vLLM reads the file beside it only where config.json says nothing.
        ({"kv_cache_quant_algo": "FP8"}, {"quant_method": "fp8"}, "auto"),
        (None, {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "fp8_e4m3"),
        (
            None,
            {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
            "fp8",
        ),
    ],
)  # fmt: skip
def test_the_dtype_of_the_kv_is_that_of_the_checkpoints_files(tmp_path, beside, inside, dtype):
    if beside is not None:
        quant = {"producer": {"name": "modelopt"}, "quantization": beside}
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(quant))
    summary = plan(tmp_path, {**LLAMA, "quantization_config": inside})[1]
    assert summary["kv_cache_dtype"] == dtype
    assert summary["kv_nbytes_per_token"] == 32 * 2 * 8 * 128 * (2 if dtype == "auto" else 1)


def test_json_is_read_as_python_and_vllm_read_it(tmp_path):
    written = write(tmp_path, {**LLAMA, "time_step_limit": [0.0, float("inf")]})
    assert "Infinity" in written.read_text()
    assert planned(written)[1]["kv_nbytes_per_token"] == 131072


# --- a namespace, and vLLM --------------------------------------------------------------


def test_a_namespace_says_what_its_engine_has(tmp_path):
    lab = Lab(tmp_path / "kv")
    groups = (
        GroupIdentity(0, "full/FullAttentionSpec/bfloat16/none", None, 16, (4096,) * 3, ("a", "b", "c")),
        GroupIdentity(2, "sliding_window/x", 128, 32, (4096,), ("d",)),
    )  # fmt: skip
    where = lab.namespace(groups=groups, topology={"tp": 2, "pp": 1}, blocks_per_chunk=2)
    named = [(where.directory.path,), (f"{where.directory.path}/namespace.json",)]
    named.append((where.id, "--root", lab.path))
    for words in named:
        found, summary, _ = planned(*words, "--prompt-tokens", "256")
        assert shapes(found) == [("full", None, 3), ("sliding_window", 128, 1)]
        assert [g["tokens_per_chunk"] for g in found] == [32, 64]
        assert [g["page_nbytes"] for g in found] == [[4096] * 3, [4096]]
        assert [g["files_per_chunk"] for g in found] == [2, 2]
        assert summary["kv_nbytes_per_token"] == 2 * (3 * 4096 / 16 + 4096 / 32)
        assert summary["max_model_len"] is None
        assert summary["prompt_files"] == 2 * (256 // 32 + 2)
    other = lab.namespace(groups=groups[:1], topology={"tp": 1}, blocks_per_chunk=2)
    assert planned(other.directory.path)[1]["kv_nbytes_per_token"] == 3 * 4096 / 16
    staged = GroupIdentity(0, "full/x", None, 16, (), ())
    stages = lab.namespace(groups=(staged,), topology={"tp": 1, "pp": 2})
    done = run("plan", stages.directory.path)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "pipeline stages" in done.stderr
    assert run("plan", other.directory.path, "--tp", "2").exit_code == 2
    unknown = run("plan", where.id)
    assert (unknown.exit_code, "with --root DIR" in unknown.stderr) == (2, True)
    assert run("plan", "nobody", root=lab.path).exit_code == 2


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ('printf \'{"refused": "ValueError: no such\\\\nclass"}\' > "$4/answer.json"', "no such class"),
        ("echo before >&2; echo it broke >&2; exit 3", "it broke"),
        ("kill -9 $$", "ended with -9"),
        ("exec sleep 60", "in 1 s"),
    ],
)  # fmt: skip
def test_where_vllm_is_installed_its_refusal_is_told_in_one_line(
    tmp_path, monkeypatch, script, words
):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(engine, "vllm_is_installed", lambda: True)
    monkeypatch.setattr(engine, "_VLLM_S", 1 if "sleep" in script else 60)
    monkeypatch.setattr(engine.sys, "executable", str(program))
    done = run("plan", write(tmp_path, LLAMA))
    assert (done.exit_code, done.stdout) == (2, "")
    assert words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


# --- what follows -----------------------------------------------------------------------


def test_the_planner_chooses_and_warns(tmp_path):
    _, summary, warnings = plan(tmp_path, GPT_OSS)
    assert summary["blocks_per_chunk"] == 6
    assert "prefix_cache_retention_interval is 0" in warnings[0]
    ours = plan(tmp_path, GPT_OSS, "--tp", "2", "--prefix-cache-retention-interval", "960")
    assert ours[2] == []
    engines = ("--tensor-parallel-size", "2", "--prefix-cache-retention-interval", "960")
    assert plan(tmp_path, GPT_OSS, *engines) == ours
    groups, _, _ = plan(tmp_path, GPT_OSS, "--hybrid-chunk-size", "256")
    assert {g["tokens_per_chunk"] for g in groups} == {256}
    for options, words in (
        (("--hybrid-chunk-size", "100"), "hybrid_chunk_size is 100"),
        (("--max-model-len", "16"), "max_model_len is 16"),
        (("--prefix-cache-retention-interval", "7"), "prefix_cache_retention_interval is 7"),
    ):
        done = run("plan", tmp_path / "config.json", *options)
        assert (done.exit_code, done.stdout) == (2, "")
        assert words in done.stderr


def test_disk_and_time_add_up(tmp_path):
    words = ("--prompt-tokens", "32000", "--disk", "10TiB", "--prefill-rate", "8000")
    groups, summary, _ = plan(tmp_path, LLAMA, *words)
    (group,) = groups
    chunks = 32000 // group["tokens_per_chunk"]
    assert summary["prompt_files"] == summary["hit_files"] == chunks
    assert summary["prompt_nbytes"] == chunks * group["file_nbytes"]
    assert summary["hit_nbytes"] == 32000 * 131072
    assert summary["disk_tokens"] == (10 << 40) * 32000 // summary["prompt_nbytes"]
    assert summary["break_even_rate"] == pytest.approx(131072 * 8000)


def test_windows_are_stored_at_boundaries(tmp_path):
    def files(*options):
        return plan(tmp_path, GPT_OSS, "--prompt-tokens", "9600", *options)[1]["prompt_files"]

    full = 9600 // 96
    # The last token is computed: a window of 128 before token 9599 lies in two chunks of 96.
    assert files() == full + 2
    assert full + 10 * 2 <= files("--prefix-cache-retention-interval", "960") <= full + 11 * 2
    short = plan(tmp_path, GPT_OSS, "--prompt-tokens", "10")[1]
    assert (short["prompt_files"], short["hit_tokens"]) == (0, 0)


# --- refusals ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({"model_type": "unheard_of"}, (), "without vLLM"),
        ({"model_type": ["llama"]}, (), "model_type"),
        ({"model_type": "deepseek_v3", "index_topk": 2048}, (), "model_type"),
        ({"model_type": "qwen3"}, (), "head_dim"),
        ({"model_type": "qwen2", "sliding_window": 4096}, (), "sliding_window"),
        ({"num_hidden_layers": "32"}, (), "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, (), "num_hidden_layers"),
        ({"num_key_value_heads": 0}, (), "num_key_value_heads"),
        ({"num_key_value_heads": 6}, ("--tp", "4"), "--tp"),
        ({"torch_dtype": "float32"}, (), "--dtype"),
        ({"max_position_embeddings": None}, (), "max_position_embeddings"),
        ({}, ("--kv-cache-dtype", "int4_per_token_head"), "--kv-cache-dtype"),
        ({}, ("--disk", "10 miles"), "--disk"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_by_its_name(tmp_path, changes, options, words):
    done = run("plan", write(tmp_path, {**LLAMA, **changes}), *options)
    assert (done.exit_code, done.stdout) == (2, "")
    assert words in done.stderr


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"model_type": NaN}', "[" * 100_000, "9" * 5000, "null", "\x00", "\xff"]
)  # fmt: skip
def test_what_is_no_configuration_is_refused(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_text(content, "latin-1")
    done = run("plan", path)
    assert (done.exit_code, done.stdout) == (2, "")
    assert len(done.stderr.strip().splitlines()) == 1


def test_what_is_no_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", "/dev/zero", tmp_path / "missing"):
        done = fskv("plan", path, timeout_s=60)
        assert (done.exit_code, done.stdout) == (2, "")
