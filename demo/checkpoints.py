"""Make small seeded checkpoints of real architectures, for real engines without downloads.

Each `Model` names one kind of KV layout; `make` writes its checkpoint, the same bytes
every time for one version of transformers and torch. No tokenizer is written: prompts
are token ids. The weights mean nothing, but the KV data does: they are scaled so that
zeroing the cached data of any one KV group changes the greedy tokens (the negative
control of every demo). Whoever changes a number below must measure that again.

Demo and engine tests call this from their main thread; transformers is imported only by
`make` and `config`. As a program it makes the named ones: `checkpoints.py DIRECTORY NAME...`
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import random
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

VOCAB_SIZE = 512
# Written last, with the hash of this file: a directory that has it is complete and made
# by this version.
COMPLETE_MARK = "checkpoint-complete"


def _options(**values: Any) -> Mapping[str, Any]:
    return MappingProxyType(values)


@dataclass(frozen=True, slots=True)
class Model:
    """One architecture with the engine arguments and prompts that show its KV groups."""

    name: str
    groups: str  # in words
    engine: Mapping[str, Any]
    dtype: str = "float32"
    prompt_tokens: int = 1930  # main prompt
    shared_tokens: int = 1100  # how much of it the partial prompt shares
    env: Mapping[str, str] = field(default_factory=_options)

    def engine_kwargs(self) -> dict[str, Any]:
        """Return the LLM arguments of this model, ready for JSON."""
        return {"dtype": self.dtype, **self.engine}

    def main_prompt(self) -> list[int]:
        """Return the token ids of the main prompt; the same in every process."""
        return self.tokens("main", self.prompt_tokens)

    def partial_prompt(self) -> list[int]:
        """Return a prompt as long as the main one that shares only its first tokens."""
        tail = self.tokens("partial", self.prompt_tokens - self.shared_tokens)
        return self.main_prompt()[: self.shared_tokens] + tail

    def tokens(self, purpose: str, count: int) -> list[int]:
        """Return random token ids that depend on nothing but the arguments."""
        # A str seeds through sha512: PYTHONHASHSEED does not matter.
        generator = random.Random(f"{purpose}-0")
        return [generator.randrange(3, VOCAB_SIZE) for _ in range(count)]


_WINDOWED = _options(block_size=128, prefix_cache_retention_interval=256)

_ALL = (
    Model("llama", "full attention", _options(block_size=128)),
    Model(
        "llama_tp2",
        "full attention, 2 KV heads on 2 ranks",
        _options(block_size=128, tensor_parallel_size=2),
        env=_options(VLLM_CPU_OMP_THREADS_BIND="0|1"),  # or vLLM refuses the second rank
    ),
    Model(
        "llama_large",
        "full attention, 64 KiB of KV per token",
        _options(block_size=128, max_model_len=8192),
        prompt_tokens=6020,
        shared_tokens=4100,
    ),
    Model("gpt_oss", "sliding window (128) and full attention", _WINDOWED),
    Model("gemma3", "two of sliding window (128) and one of full attention", _WINDOWED),
    Model(
        "qwen3_next",
        "three of linear attention (GDN) and one of full attention",
        # A block has to hold a state. By itself vLLM takes 384 or 640 tokens, by what the CPU can do.
        _options(block_size=640, prefix_cache_retention_interval=640),
        dtype="bfloat16",  # its CPU kernels take nothing else
    ),
    Model(
        "lfm2",
        "three of short convolution and one of full attention",
        _WINDOWED,
        prompt_tokens=1921,  # a tail of one: the state reaches two tokens
    ),
)
MODELS: Mapping[str, Model] = MappingProxyType({model.name: model for model in _ALL})


# Of each small configuration: head_dim=32 is the smallest that vLLM's CPU attention takes.
_SMALL = _options(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    num_attention_heads=2,
    num_key_value_heads=1,
    initializer_range=0.2,
)
_LONG = _options(**_SMALL, intermediate_size=128, max_position_embeddings=8192)
_LLAMA = _options(
    **{**_LONG, "num_key_value_heads": 2},
    num_hidden_layers=2,
    head_dim=32,
    tie_word_embeddings=False,
)

# The class of transformers and its arguments.
_CONFIGS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("LlamaConfig", _LLAMA),
    "llama_tp2": ("LlamaConfig", _LLAMA),
    "llama_large": (  # 252 million parameters, 1.0 GB on disk
        "LlamaConfig",
        {
            **_LLAMA,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "initializer_range": 0.05,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        _options(
            **_SMALL,
            intermediate_size=64,
            num_hidden_layers=4,
            num_local_experts=4,
            num_experts_per_tok=2,
            head_dim=32,
            sliding_window=128,
            layer_types=["sliding_attention", "full_attention"] * 2,
        ),
    ),
    "gemma3": (
        "Gemma3TextConfig",
        _options(
            **_LONG,
            num_hidden_layers=6,
            head_dim=32,
            sliding_window=128,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
            query_pre_attn_scalar=2,  # queries and keys are normed: only this makes scores large
        ),
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        _options(
            **_LONG,
            num_hidden_layers=4,
            head_dim=64,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            layer_types=["linear_attention"] * 3 + ["full_attention"],
            mlp_only_layers=[0, 1, 2],  # vLLM wants one MoE layer
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
        ),
    ),
    "lfm2": (
        "Lfm2Config",
        _options(
            **_LONG,
            block_dim=64,  # block_* and conv_dim: vLLM reads them, transformers does not
            block_ff_dim=128,
            block_auto_adjust_ff_dim=False,
            conv_dim=64,
            num_hidden_layers=4,
            layer_types=["conv"] * 3 + ["full_attention"],
            tie_word_embeddings=False,
        ),
    ),
}


def config(name: str) -> Any:
    """Return the configuration of a model, as transformers has it."""
    import transformers

    kind, values = _CONFIGS[name]
    return getattr(transformers, kind)(**values)


def _tune(network: Any) -> None:
    """Change the weights, so that the model's tokens depend on its cached KV."""
    model_type = network.config.model_type
    for name, weight in network.named_parameters():
        if name.endswith("linear_attn.A_log"):
            # The state would decay to nothing within the uncached tail.
            weight.data.fill_(-6.0)
        elif name.endswith("linear_attn.dt_bias"):
            weight.data.zero_()
        elif name.endswith(("q_norm.weight", "k_norm.weight")) and model_type == "qwen3_next":
            # The norm scales by 1 + weight: without this, attention is close to a mean.
            weight.data.fill_(1.0)
        elif name.endswith(("q_layernorm.weight", "k_layernorm.weight")):
            weight.data.fill_(2.0)  # LFM2: likewise, but scales by weight
        elif name.endswith("conv.conv.weight"):
            weight.data.mul_(2.0)  # LFM2: the state reaches only two tokens, make them count
        elif model_type == "lfm2" and name.endswith("self_attn.out_proj.weight"):
            weight.data.mul_(3.0)  # or the convolutions drown the one attention layer
        elif model_type == "gemma3_text" and name.endswith("embed_tokens.weight"):
            # Tied: at full size the last token predicts itself, whatever came before.
            weight.data.mul_(0.02)


def make(name: str, directory: str) -> str:
    """Write the checkpoint `name` below `directory` unless it is there; return its path.

    Safe against a kill and against another process doing the same. One made by another
    version of this file is replaced.
    """
    path = os.path.join(directory, name)
    if _is_complete(path):
        return path
    os.makedirs(directory, exist_ok=True)
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_complete(path):
            shutil.rmtree(path, ignore_errors=True)
            _build(MODELS[name], path)
            with open(os.path.join(path, COMPLETE_MARK), "w") as mark:
                mark.write(_version())
    return path


def _is_complete(path: str) -> bool:
    try:
        with open(os.path.join(path, COMPLETE_MARK)) as mark:
            return mark.read() == _version()
    except FileNotFoundError:
        return False


@functools.cache
def _version() -> str:
    with open(__file__, "rb") as source:
        return hashlib.sha256(source.read()).hexdigest()


def _build(model: Model, directory: str) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config(model.name), dtype=torch.float32)
    _tune(network)
    network.to(getattr(torch, model.dtype)).save_pretrained(directory)


if __name__ == "__main__":
    for each in sys.argv[2:]:
        print(make(each, sys.argv[1]))
