"""Make small seeded checkpoints of real architectures, for real engines without downloads.

Each `Model` names one kind of KV layout; `make` writes its checkpoint, the same bytes
every time for one version of transformers and torch. No tokenizer is written: prompts
are token ids. The weights mean nothing, but the KV data does: they are scaled so that
zeroing the cached data of any one KV group changes the greedy tokens (the negative
control of every demo). Whoever changes a number below must measure that again.

Not here: engines (`engine.py`) and connectors. Demo scripts and engine tests call this
from their main thread; transformers is imported only by `make`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

VOCAB_SIZE = 512
# Written last inside the temporary directory, with the hash of this file: a directory
# that has it is complete and made by this version.
COMPLETE_MARK = "checkpoint-complete"


def _options(**values: Any) -> Mapping[str, Any]:
    return MappingProxyType(values)


@dataclass(frozen=True, slots=True)
class Model:
    """One architecture with the engine arguments and prompts that show its KV groups."""

    name: str
    groups: str  # in words
    dtype: str
    prompt_tokens: int  # main prompt
    shared_tokens: int  # how much of it the partial prompt shares
    engine: Mapping[str, Any] = field(default_factory=_options)
    env: Mapping[str, str] = field(default_factory=_options)
    seed: int = 0

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
        """Return random token ids that depend on nothing but the arguments and the seed."""
        # A str seeds through sha512: PYTHONHASHSEED does not matter.
        generator = random.Random(f"{purpose}-{self.seed}")
        return [generator.randrange(3, VOCAB_SIZE) for _ in range(count)]


_ALL = (
    Model(
        "llama",
        "full attention",
        "float32",
        prompt_tokens=1930,
        shared_tokens=1100,
        engine=_options(block_size=128),
    ),
    Model(
        "llama_tp2",
        "full attention, 2 KV heads on 2 ranks",
        "float32",
        prompt_tokens=1930,
        shared_tokens=1100,
        engine=_options(block_size=128, tensor_parallel_size=2),
        env=_options(VLLM_CPU_OMP_THREADS_BIND="0|1"),  # or vLLM refuses the second rank
    ),
    Model(
        "llama_large",
        "full attention, 64 KiB of KV per token",
        "float32",
        prompt_tokens=6020,
        shared_tokens=4100,
        engine=_options(block_size=128, max_model_len=8192),
    ),
    Model(
        "gpt_oss",
        "sliding window (128) and full attention",
        "float32",
        prompt_tokens=1930,
        shared_tokens=1100,
        engine=_options(block_size=128, prefix_cache_retention_interval=256),
    ),
    Model(
        "gemma3",
        "two of sliding window (128) and one of full attention",
        "float32",
        prompt_tokens=1930,
        shared_tokens=1100,
        engine=_options(block_size=128, prefix_cache_retention_interval=256),
    ),
    Model(
        "qwen3_next",
        "three of linear attention (GDN) and one of full attention",
        "bfloat16",  # its CPU kernels take nothing else
        prompt_tokens=1930,
        shared_tokens=1100,
        # A block has to hold a state. By itself vLLM takes 384 or 640 tokens, by what the CPU can do.
        engine=_options(block_size=640, prefix_cache_retention_interval=640),
    ),
    Model(
        "lfm2",
        "three of short convolution and one of full attention",
        "float32",
        prompt_tokens=1921,  # a tail of one: the state reaches two tokens
        shared_tokens=1100,
        engine=_options(block_size=128, prefix_cache_retention_interval=256),
    ),
)
MODELS: Mapping[str, Model] = MappingProxyType({model.name: model for model in _ALL})


def _llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's CPU attention takes
        max_position_embeddings=8192,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )


def _llama_large() -> Any:
    from transformers import LlamaConfig

    # 252 million parameters, 1.0 GB on disk.
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=8192,
        initializer_range=0.05,
        tie_word_embeddings=False,
    )


def _gpt_oss() -> Any:
    from transformers import GptOssConfig

    return GptOssConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 2,
        initializer_range=0.2,
    )


def _gemma3() -> Any:
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        sliding_window=128,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=2,  # queries and keys are normed: only this makes scores large
        max_position_embeddings=8192,
        initializer_range=0.2,
    )


def _qwen3_next() -> Any:
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
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
        max_position_embeddings=8192,
        initializer_range=0.2,
    )


def _lfm2() -> Any:
    from transformers import Lfm2Config

    return Lfm2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        block_dim=64,  # block_* and conv_dim: vLLM reads them, transformers does not
        block_ff_dim=128,
        block_auto_adjust_ff_dim=False,
        conv_dim=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        layer_types=["conv"] * 3 + ["full_attention"],
        max_position_embeddings=8192,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )


_CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "llama_tp2": _llama,
    "llama_large": _llama_large,
    "gpt_oss": _gpt_oss,
    "gemma3": _gemma3,
    "qwen3_next": _qwen3_next,
    "lfm2": _lfm2,
}


def _tune(network: Any) -> None:
    """Change the weights that would make cached data irrelevant."""
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

    Safe against a kill and against another process doing the same: the checkpoint is
    built in a temporary sibling and renamed when complete. One made by another version
    of this file is replaced.
    """
    model = MODELS[name]
    path = os.path.join(directory, name)
    if _is_complete(path):
        return path
    os.makedirs(directory, exist_ok=True)
    building = tempfile.mkdtemp(prefix=f".{name}-", dir=directory)
    stale = f"{building}.stale"
    try:
        _build(model, building)
        with open(os.path.join(building, COMPLETE_MARK), "w") as mark:
            mark.write(_version())
        os.chmod(building, 0o755)  # mkdtemp made it private
        if not _is_complete(path):
            with contextlib.suppress(FileNotFoundError):
                os.rename(path, stale)
            try:
                os.rename(building, path)
            except OSError:
                # Somebody else was faster, with the same bytes.
                if not _is_complete(path):
                    raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
        shutil.rmtree(stale, ignore_errors=True)
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

    config = _CONFIGS[model.name]()
    torch.manual_seed(model.seed)
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _tune(network)
    network.to(getattr(torch, model.dtype)).save_pretrained(directory)


def main(arguments: Sequence[str]) -> int:
    """Make the named checkpoints (default: all) below the directory given first."""
    if not arguments:
        print(f"usage: checkpoints.py DIRECTORY [{' | '.join(MODELS)}]...", file=sys.stderr)
        return 2
    directory, *names = arguments
    for name in names or MODELS:
        print(make(name, directory))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
