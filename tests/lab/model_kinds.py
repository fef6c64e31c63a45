"""Kinds of KV that the demo's models do not have: small seeded checkpoints, and engines that show them."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import engine_lab as lab
from drafts import NGRAMS

from demo.checkpoints import VOCAB_SIZE

PROMPTS = lab.MODELS["llama"]  # any model with this vocabulary


def _mamba2() -> Any:
    from transformers import Mamba2Config

    return Mamba2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
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


def _granite() -> Any:
    from transformers import GraniteMoeHybridConfig

    return GraniteMoeHybridConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=64,
        shared_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
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
        max_position_embeddings=8192,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )


def _deepseek_v2() -> Any:
    from transformers import DeepseekV2Config

    return DeepseekV2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        kv_lora_rank=512,  # with 64: what vLLM's CPU kernel is made for
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        first_k_dense_replace=2,
        n_routed_experts=2,
        moe_intermediate_size=64,
        max_position_embeddings=8192,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )


def _gemma4() -> Any:
    from transformers import Gemma4TextConfig

    return Gemma4TextConfig(
        vocab_size=VOCAB_SIZE,
        vocab_size_per_layer_input=VOCAB_SIZE,
        hidden_size=64,
        hidden_size_per_layer_input=0,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_kv_shared_layers=0,
        head_dim=32,
        global_head_dim=64,
        sliding_window=128,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        max_position_embeddings=8192,
        initializer_range=0.2,
    )


def _llama4() -> Any:
    from transformers import Llama4TextConfig

    return Llama4TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=64,
        intermediate_size_mlp=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=8192,
        num_local_experts=2,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        moe_layers=[1, 3],
        no_rope_layers=[1, 0, 1, 0],
        attention_chunk_size=256,
        initializer_range=0.2,
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
    program: str = "cpu_gaps_engine.py"
    prompt_tokens: int = PROMPTS.prompt_tokens

    def main_prompt(self) -> list[int]:
        return PROMPTS.tokens("main", self.prompt_tokens)

    def checkpoint(self, directory: pathlib.Path) -> str:
        """Write the checkpoint, and return its directory."""
        if isinstance(self.network, str):
            return lab.checkpoint(self.network)
        import torch
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(self.network(), dtype=torch.float32)
        for name, weight in made.named_parameters():
            if name.endswith("A_log"):  # or the state decays to nothing within the uncached tail
                weight.data.fill_(-6.0)
            elif name.endswith(("dt_bias", "dt_proj.bias")):
                weight.data.zero_()
            elif made.config.model_type == "gemma4_text" and name.endswith("embed_tokens.weight"):
                weight.data.mul_(0.02)  # tied: at full size the last token predicts itself
        made.save_pretrained(directory)
        return str(directory)


FULL = "full"
STATE = "state"
_128 = {"block_size": 128}
_CHUNK = {"hybrid_chunk_size": 128}
# A step of vLLM's CPU scan ends where its chunk of 256 tokens does.
_STATES = {**_128, "max_num_batched_tokens": 128, "prefix_cache_retention_interval": 256}

KINDS = {
    "mamba2": Kind((STATE,), _mamba2, _STATES),
    "mamba2_hybrid": Kind((STATE, STATE, STATE, FULL), _granite, _STATES),
    "mla": Kind(("mla",), _deepseek_v2, {"block_size": 16}, {}, _CHUNK, "reusing_engine.py"),
    "chunked_local": Kind(("chunked_local", FULL), _llama4, _128, {}, _CHUNK),
    "unequal_blocks": Kind(
        ("sliding_window", "sliding_window", FULL),
        _gemma4,
        {**_128, "prefix_cache_retention_interval": 256},
    ),
    "pipeline_2": Kind(
        (FULL,),
        "llama",
        {**_128, "pipeline_parallel_size": 2, "worker_cls": "stage_worker.StageWorker"},
        {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},  # or vLLM refuses the second rank
        _CHUNK,
    ),
    "ngram": Kind(
        (FULL,),
        "llama",
        {**_128, "speculative_config": NGRAMS},
        {},
        _CHUNK,
    ),
}
