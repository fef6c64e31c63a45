"""Checkpoints whose KV depends on more than weights and config.json: small, seeded, made for each test.

Weights are scaled so that what a test changes changes the greedy tokens.
"""

from __future__ import annotations

import json
import pathlib
import shutil
from typing import Any

import engine_lab as lab
import networks
from networks import VOCAB_SIZE

IMAGE_TOKEN = VOCAB_SIZE - 1


def _save(network: Any, directory: pathlib.Path, std: float = 0.12) -> pathlib.Path:
    import torch

    torch.manual_seed(7)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0, std)
            elif "norm" in name and name.endswith("weight"):
                weight.fill_(1)
    for weight in network.parameters():
        weight.data = weight.data.to(torch.bfloat16)  # .to() would take complex buffers along
    network.config.dtype = "bfloat16"
    network.save_pretrained(directory)
    return directory


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(VOCAB_SIZE - 1)} | {"<image>": IMAGE_TOKEN}
    plain = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="w0", pad_token="w1", extra_special_tokens=["<image>"]
    )


def blip2(directory: pathlib.Path) -> pathlib.Path:
    """Make a model that takes an image of 56 x 56 pixels as 16 tokens before the prompt."""
    import transformers as T  # noqa: N812

    part = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    vision = T.Blip2VisionConfig(**part, image_size=56, patch_size=14)
    queries = T.Blip2QFormerConfig(**part, encoder_hidden_size=64, cross_attention_frequency=1)
    text = networks.bare(
        "OPT",
        word_embed_proj_dim=64,
        ffn_dim=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=4096,
    )
    config = T.Blip2Config(
        vision_config=vision.to_dict(),
        qformer_config=queries.to_dict(),
        text_config=text.to_dict(),
        num_query_tokens=16,
        image_token_index=IMAGE_TOKEN,
    )
    _save(T.Blip2ForConditionalGeneration(config), directory, 0.2)
    T.Blip2Processor(
        image_processor=T.BlipImageProcessorPil(size={"height": 56, "width": 56}),
        tokenizer=tokenizer(),
        num_query_tokens=16,
    ).save_pretrained(directory)
    return directory


def prefix_lm(directory: pathlib.Path) -> pathlib.Path:
    """Make a model whose prompt tokens see each other in both directions."""
    import transformers as T  # noqa: N812

    config = networks.bare(
        "HrmText",
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=32,
        max_position_embeddings=8192,
        H_cycles=1,
        L_cycles=2,
        pad_token_id=0,
    )
    return _save(T.HrmTextForCausalLM(config), directory, 0.4)


def llama(directory: pathlib.Path) -> pathlib.Path:
    shutil.copytree(lab.checkpoint("llama"), directory)
    return directory


def remote_code(directory: pathlib.Path, scale: float = 1.0) -> pathlib.Path:
    """Make a Llama that brings its own modeling file, which multiplies what its MLPs give by `scale`."""
    if not directory.exists():
        llama(directory)
    config = json.loads((directory / "config.json").read_text())
    config |= {
        "architectures": ["OwnLlamaForCausalLM"],
        "model_type": "ownllama",
        "auto_map": {
            "AutoConfig": "configuration_own.OwnLlamaConfig",
            "AutoModel": "modeling_own.OwnLlamaModel",
            "AutoModelForCausalLM": "modeling_own.OwnLlamaForCausalLM",
        },
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "configuration_own.py").write_text(
        "from transformers import LlamaConfig\n\n\n"
        "class OwnLlamaConfig(LlamaConfig):\n    model_type = 'ownllama'\n"
    )
    (directory / "modeling_own.py").write_text(_MODELING.format(scale=scale))
    return directory


_MODELING = """
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaModel

from .configuration_own import OwnLlamaConfig


class OwnLlamaModel(LlamaModel):
    config_class = OwnLlamaConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.layers:
            layer.mlp.register_forward_hook(lambda module, given, out: out * {scale})


class OwnLlamaForCausalLM(LlamaForCausalLM):
    config_class = OwnLlamaConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = OwnLlamaModel(config)
"""


def other_weights(path: pathlib.Path) -> bytes:
    """Return the bytes of a weights file of the same tensors as `path`, some of them turned over."""
    from safetensors.torch import load_file, save

    weights = load_file(path)
    for name in weights:
        if any(part in name for part in ("embed", "v_proj", "mlp")):
            weights[name] = weights[name].flip(0).contiguous()
    return bytes(save(weights, metadata={"format": "pt"}))
