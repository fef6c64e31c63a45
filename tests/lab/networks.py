"""Small seeded networks of transformers, for engines that show what the demo's models do not have."""

from __future__ import annotations

import pathlib
from typing import Any

from demo.checkpoints import VOCAB_SIZE

_ATTENTION = {
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}


def bare(kind: str, **values: Any) -> Any:
    """Return the configuration of transformers that is called `kind` plus "Config", of a small model."""
    import transformers

    values = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, **values}
    return getattr(transformers, f"{kind}Config")(**values)


def config(kind: str, **values: Any) -> Any:
    """Return the configuration of a small model with attention."""
    return bare(kind, **{**_ATTENTION, **values})


def mla() -> Any:
    """Return the configuration of a model with multi-head latent attention; all its layers are dense."""
    return config(
        "DeepseekV2",
        num_key_value_heads=2,
        head_dim=None,
        kv_lora_rank=512,  # with 64: what vLLM's CPU kernel is made for
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        first_k_dense_replace=2,
        n_routed_experts=2,
        moe_intermediate_size=64,
    )


def make(config: Any) -> Any:
    """Return a network of seeded weights, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def save(network: Any, directory: pathlib.Path) -> str:
    """Write the checkpoint; return its directory."""
    network.save_pretrained(directory)
    return str(directory)
