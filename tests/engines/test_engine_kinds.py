"""Kinds of KV that few models have: what one engine stores another one loads, and each file is used."""

from __future__ import annotations

import functools
import os
import pathlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import engine_lab as lab
import networks
import pytest
from drafts import NGRAMS, PROMPTS

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]
lab.needs_vllm()

MAIN = PROMPTS.main_prompt()

_mamba2 = functools.partial(
    networks.bare,
    "Mamba2",
    state_size=32,
    num_hidden_layers=2,
    num_heads=4,
    head_dim=32,
    n_groups=1,
    conv_kernel=4,
    expand=2,
    chunk_size=256,
    initializer_range=0.2,
)
_granite = functools.partial(
    networks.config,
    "GraniteMoeHybrid",
    intermediate_size=64,
    shared_intermediate_size=64,
    num_hidden_layers=4,
    num_local_experts=2,
    num_experts_per_tok=1,
    layer_types=["mamba", "mamba", "mamba", "attention"],
    mamba_n_heads=4,
    mamba_d_head=32,
    mamba_n_groups=1,
    mamba_d_state=16,
    mamba_d_conv=4,
    mamba_expand=2,
    mamba_chunk_size=256,
    position_embedding_type="rope",
)
_gemma4 = functools.partial(
    networks.config,
    "Gemma4Text",
    vocab_size_per_layer_input=networks.VOCAB_SIZE,
    hidden_size_per_layer_input=0,
    num_hidden_layers=6,
    num_kv_shared_layers=0,
    global_head_dim=64,
    sliding_window=128,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    tie_word_embeddings=True,
)
_llama4 = functools.partial(
    networks.config,
    "Llama4Text",
    intermediate_size=64,
    intermediate_size_mlp=128,
    num_hidden_layers=4,
    num_local_experts=2,
    num_experts_per_tok=1,
    interleave_moe_layer_step=2,
    moe_layers=[1, 3],
    no_rope_layers=[1, 0, 1, 0],
    attention_chunk_size=256,
    pad_token_id=0,
)


@dataclass(frozen=True)
class Kind:
    """One kind: a network, an engine, and the kinds of its KV groups as the namespace has them."""

    groups: tuple[str, ...]
    network: Callable[[], Any] | str  # a configuration, or the name of a model of the demo
    engine: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)  # of fskv
    change: str = "cpu_gaps"  # of the engine: see lab_engine.py

    def what(self, directory: pathlib.Path, root: str) -> dict[str, Any]:
        """Write the checkpoint; return what `engine_lab.request` takes for an engine on a root."""
        return {
            "path": self._checkpoint(directory),
            "engine": dict(self.engine),
            "transfer": lab.connector(root, lookup_timeout_s=10, **self.options),
            "env": self.env,
            "changes": {self.change: True},
        }

    def _checkpoint(self, directory: pathlib.Path) -> str:
        if isinstance(self.network, str):
            return lab.checkpoint(self.network)
        made = networks.make(self.network())
        for name, weight in made.named_parameters():
            if name.endswith("A_log"):  # or the state decays to nothing within the uncached tail
                weight.data.fill_(-6.0)
            elif name.endswith(("dt_bias", "dt_proj.bias")):
                weight.data.zero_()
            elif made.config.model_type == "gemma4_text" and name.endswith("embed_tokens.weight"):
                weight.data.mul_(0.02)  # tied: at full size the last token predicts itself
        return networks.save(made, directory)


FULL = "full"
STATE = "state"
_128 = {"block_size": 128}
_CHUNK = {"hybrid_chunk_size": 128}
# A step of vLLM's CPU scan ends where its chunk of 256 tokens does.
_STATES = {**_128, "max_num_batched_tokens": 128, "prefix_cache_retention_interval": 256}

KINDS = {
    "mamba2": Kind((STATE,), _mamba2, _STATES),
    "mamba2_hybrid": Kind((STATE, STATE, STATE, FULL), _granite, _STATES),
    "mla": Kind(("mla",), networks.mla, {"block_size": 16}, {}, _CHUNK, "never_rests"),
    "chunked_local": Kind(("chunked_local", FULL), _llama4, _128, {}, _CHUNK),
    "unequal_blocks": Kind(
        ("sliding_window", "sliding_window", FULL),
        _gemma4,
        {**_128, "prefix_cache_retention_interval": 256},
    ),
    "pipeline_2": Kind(
        (FULL,),
        "llama",
        {**_128, "pipeline_parallel_size": 2, "worker_cls": "workers.StageWorker"},
        lab.TWO_RANKS,
        _CHUNK,
    ),
    "ngram": Kind((FULL,), "llama", {**_128, "speculative_config": NGRAMS}, {}, _CHUNK),
}


def of_whom(path):
    """Return the part of a file's name that says group and rank: "g0.kv", "g0.r1.kv"."""
    return os.path.basename(path).partition(".")[2]


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_of_kv_is_stored_and_loaded_and_zeroed_files_give_other_tokens(name, root, tmp_path):
    kind = KINDS[name]
    what = kind.what(tmp_path / "checkpoint", root)
    cold = [lab.generate(MAIN, "cold"), *lab.SETTLE, *lab.SETTLE]
    reference = lab.generates(lab.run(lab.request(PROMPTS, cold, **what)))["cold"]
    assert reference["num_cached_tokens"] == 0
    assert len(set(reference["tokens"])) > 2, "degenerate tokens would prove nothing"
    lab.assert_sound(root)
    stored = lab.snapshot(root)
    (manifest,) = lab.identities(root)
    groups = manifest["groups"]
    assert tuple(group["kind"].partition("/")[0] for group in groups) == kind.groups
    if name == "unequal_blocks":
        assert len({group["tokens_per_block"] for group in groups}) == 2

    victims = sorted({of_whom(file) for file in stored})
    num_ranks = kind.engine.get("pipeline_parallel_size", 1)
    assert len(victims) == num_ranks * len(kind.groups)
    talk = lab.Conversation(tmp_path)
    talk.say(lab.generate(MAIN, "loaded"), lab.METRICS, lab.RESET)
    for victim in victims:
        files = [file for file in stored if of_whom(file) == victim]
        talk.spoil(stored, lambda files=files: lab.zero(files))
        talk.say(lab.generate(MAIN, victim), lab.RESET)
    talk.spoil(stored, lambda: None)
    talk.say(lab.generate(MAIN, "restored"))
    result = talk.run(PROMPTS, **what)
    done = lab.generates(result)
    for label in ("loaded", "restored"):
        assert done[label]["tokens"] == reference["tokens"], label
        assert done[label]["num_cached_tokens"] >= PROMPTS.prompt_tokens // 2, label
    assert lab.counter(lab.metrics(result)[0], "load_failures") == 0
    for victim in victims:
        assert done[victim]["num_cached_tokens"] == done["loaded"]["num_cached_tokens"], victim
        assert done[victim]["tokens"] != reference["tokens"], f"{victim} had no effect"


def test_without_prefix_caching_a_model_of_states_alone_starts_and_nothing_is_stored(
    root, tmp_path
):
    """VLLM then makes one block of its longest request: no chunk could ever be full."""
    what = KINDS["mamba2"].what(tmp_path / "checkpoint", root)
    what["engine"] |= {"enable_prefix_caching": False, "prefix_cache_retention_interval": None}
    steps = [lab.generate(MAIN, "computed"), *lab.SETTLE]
    result = lab.run(lab.request(PROMPTS, steps, **what))
    assert lab.snapshot(root) == {}
    assert "prefix caching is off" in lab.log_of(result)
