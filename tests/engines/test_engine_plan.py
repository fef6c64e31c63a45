"""`fskv plan` foretells what real engines do, and `fskv explain` understands what they wrote.

For each architecture an engine stores a prompt; groups, pages, chunks and file lengths of the plan are
compared with the namespace.json and the files that it wrote, and the hit that `explain` foretells with the
tokens that the engine then took from files.
"""

from __future__ import annotations

import json
import pathlib

import pytest
from engine_lab import (
    MODELS,
    RESET,
    SETTLE,
    by_group,
    checkpoint,
    chunks,
    connector,
    generate,
    generates,
    identities,
    needs_vllm,
    options_for,
    request,
    run,
    run_program,
)
from tool_lab import run as fskv

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(1200),
]  # up to five processes that import vLLM
needs_vllm()
pytest.importorskip("fskv_tools.plan.engine")

MAX_MODEL_LEN = 4096
ASK_VLLM = "import sys; from fskv.engines.vllm.model_groups import main; main(sys.argv[1])"
SAME = ("window_tokens", "tokens_per_block", "page_nbytes", "layer_names")


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "gpt_oss",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "qwen3_next", "lfm2")),
    ],
)
def test_an_engine_does_what_was_planned_and_explained(root, tmp_path, monkeypatch, name):
    model = MODELS[name]
    # The processes that ask vLLM are forks; other tests here start them as `fskv plan` does.
    program = tmp_path / "ask.py"
    program.write_text(ASK_VLLM)
    monkeypatch.setattr(
        "fskv_tools.plan.engine.subprocess.run",
        lambda words, **_: run_program(str(program), words[-1]),
    )
    options = options_for(name)
    engine = {"max_model_len": MAX_MODEL_LEN}
    prompt, stranger = model.main_prompt(), model.tokens("stranger", model.prompt_tokens)
    transfer = connector(root, **options)
    run(request(model, [generate(prompt, "main"), *SETTLE], transfer=transfer, engine=engine))

    (manifest,) = pathlib.Path(root).glob("*/*@*/namespace.json")
    (identity,) = identities(root)
    words = ["--platform", "cpu", "--dtype", model.dtype, "--max-model-len", MAX_MODEL_LEN]
    if "block_size" in model.engine:
        words += ["--block-size", model.engine["block_size"]]
    interval = model.engine.get("prefix_cache_retention_interval", 0)
    words += ["--prefix-cache-retention-interval", interval, "--prompt-tokens", model.prompt_tokens]
    if "hybrid_chunk_size" in options:
        words += ["--hybrid-chunk-size", options["hybrid_chunk_size"]]
    done = fskv("plan", checkpoint(name), "--json", *words)
    planned = [line for line in done.lines if line["type"] == "group"]

    assert done.summary["source"] == "vLLM's own class of the model"
    # The plan is what the engine wrote about itself, and the length of every file.
    assert done.summary["blocks_per_chunk"] == identity["blocks_per_chunk"]
    fields = ("group_idx", "kind", *SAME)
    stored = [tuple(group[name] for name in fields) for group in identity["groups"]]
    stored = [(index, kind.partition("/")[0], *rest) for index, kind, *rest in stored]
    assert [described(group) for group in planned] == stored
    # Negative control: of an engine with another dtype the plan is another.
    other = "bfloat16" if model.dtype == "float32" else "float32"
    wrong = fskv("plan", checkpoint(name), "--json", *words, "--dtype", other)
    assert [described(line) for line in wrong.lines[: len(planned)]] != list(
        map(described, planned)
    )
    found = by_group(chunks(root))
    for group in planned:
        sizes = {pathlib.Path(path).stat().st_size for path in found[group["group"]]}
        assert sizes == {group["file_nbytes"]}
    assert 0 < sum(map(len, found.values())) <= done.summary["prompt_files"]

    # From the namespace the same comes without vLLM.
    recorded = fskv("plan", manifest, "--json", "--prompt-tokens", model.prompt_tokens)
    told = [line for line in recorded.lines if line["type"] == "group"]
    assert [described(group) for group in told] == [described(group) for group in planned]
    # What is explained of the prompt is what a new engine loads; of another prompt, nothing.
    explained = {"again": hit_tokens(root, prompt), "stranger": hit_tokens(root, stranger)}
    assert explained["stranger"] == 0 < explained["again"] == done.summary["hit_tokens"]
    steps = [generate(prompt, "again"), generate(stranger, "stranger"), *SETTLE]
    result = run(request(model, steps, transfer=transfer, engine=engine))
    done = generates(result)
    for label, foretold in explained.items():
        assert done[label]["num_cached_tokens"] == foretold


def hit_tokens(root, tokens):
    """Return what `fskv explain` says of a prompt."""
    words = ("explain", "--tokens", "-", "--json")
    return fskv(*words, root=root, stdin=json.dumps(tokens)).summary["hit_tokens"]


def described(group):
    """Return a planned group as a manifest has it."""
    return tuple(group[name] for name in ("group", "group_kind", *SAME))


HEADS = {
    "hidden_size": 1024,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "vocab_size": 128,
    "dtype": "bfloat16",
}
LATENTS = {**HEADS, "head_dim": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
FP8 = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
CONFIGS = {
    "qwen3": {**HEADS, "architectures": ["Qwen3ForCausalLM"], "quantization_config": FP8},
    "deepseek_v3": {**LATENTS, "architectures": ["DeepseekV3ForCausalLM"]},
    "gpt_oss": {**HEADS, "architectures": ["GptOssForCausalLM"], "sliding_window": 128},
}


@pytest.mark.parametrize(
    "name",
    ["deepseek_v3", *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen3", "gpt_oss"))],
)
def test_arithmetic_says_what_vllms_own_class_says(tmp_path, monkeypatch, name):
    config = {**CONFIGS[name], "model_type": name, "time_step_limit": [0.0, float("inf")]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = fskv("plan", tmp_path, "--json", "--tp", 2)
    assert asked.exit_code == 0, asked.stderr
    assert "by rule for CUDA" in "".join(asked.summary["notes"])
    monkeypatch.setattr("fskv_tools.plan.engine.vllm_is_installed", lambda: False)
    alone = fskv("plan", tmp_path, "--json", "--tp", 2)
    for one, other in zip(asked.lines, alone.lines, strict=True):
        same = {key: value for key, value in one.items() if key not in UNLIKE}
        assert same == {key: value for key, value in other.items() if key not in UNLIKE}
    # Negative control: of a model with another width it is another.
    wider = {**config, "head_dim": 128, "kv_lora_rank": 448}
    (tmp_path / "config.json").write_text(json.dumps(wider))
    wrong = fskv("plan", tmp_path, "--json", "--tp", 2)
    assert wrong.summary["kv_nbytes_per_token"] != asked.summary["kv_nbytes_per_token"]


UNLIKE = ("source", "notes", "layer_names")


@pytest.mark.slow
def test_states_and_blocks_for_cuda_are_told_by_a_cpu_build(tmp_path):
    """Qwen3-Next: a block is the smallest multiple of 16 tokens whose page holds a state."""
    config = {
        **HEADS,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_value_heads": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = fskv("plan", tmp_path, "--json")
    groups = [line for line in done.lines if line["type"] == "group"]
    assert [group["group_kind"] for group in groups] == ["state"] * 3 + ["full"]
    # A convolution over 3 tokens and 32 matrices of 128 x 128, in bfloat16.
    assert groups[0]["page_nbytes"] == [3 * (2 * 16 * 128 + 32 * 128) * 2 + 32 * 128 * 128 * 2]
    assert {group["tokens_per_block"] for group in groups} == {544}
    assert groups[3]["page_nbytes"] == [544 * 2 * 2 * 256 * 2]


def test_a_model_that_vllm_does_not_have_is_refused_with_its_reason(tmp_path):
    config = {**HEADS, "architectures": ["UnheardOfForCausalLM"], "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = fskv("plan", tmp_path)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "UnheardOfForCausalLM" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("unit", [128, pytest.param(None, id="negative_control")])
def test_a_hit_ends_inside_a_block_where_an_earlier_prompt_ended_and_explain_says_so(root, unit):
    """Blocks of 640 tokens with vLLM's `prefix_match_unit`: a state is kept where a prompt ended."""
    model = MODELS["qwen3_next"]
    main = model.main_prompt()[:1800]
    prompts = {
        "again": main,
        "longer": main + model.tokens("longer", 100),
        "parted": main[:1100] + model.tokens("parted", 700),
    }
    transfer = connector(root)
    engine = {"prefix_match_unit": unit} if unit else {}
    run(
        request(model, [generate(main, "main"), *SETTLE, *SETTLE], transfer=transfer, engine=engine)
    )
    explained = {label: hit_tokens(root, tokens) for label, tokens in prompts.items()}
    # vLLM waits for no lookup inside a block: what it has not heard of by then is heard of the next time.
    steps = [generate(main, "first"), RESET]
    for label, tokens in prompts.items():
        steps += [generate(tokens, label), RESET]
    done = generates(run(request(model, steps, transfer=transfer, engine=engine)))
    hits = {label: done[label]["num_cached_tokens"] for label in prompts}
    assert hits == explained
    whole = 1800 // 640 * 640
    at_end = 1800 // unit * unit if unit else whole
    assert hits == {"again": at_end, "longer": at_end, "parted": 640}
    assert done["first"]["num_cached_tokens"] in (whole, at_end)
    plain = generates(run(request(model, [generate(prompts["longer"], "longer")])))
    assert done["longer"]["tokens"] == plain["longer"]["tokens"]
