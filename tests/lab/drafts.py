"""Drafts: small seeded models with a draft model, an EAGLE head or MTP layers, and engines that show them.

A draft of random weights guesses nothing. So the layers of most models here add little to the embedding, and
most of that from attention (`_QUIET`): then a draft that sees the last token is right now and then, and is so
less often where its KV is not right.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import engine_lab as lab
import networks

from demo.checkpoints import _tune
from demo.checkpoints import config as config_of_demo

PROMPTS = lab.MODELS["llama"]  # any model with this vocabulary
_QUIET = {"o_proj.weight": 0.3, "down_proj.weight": 0.05}
_HIDDEN = 64

Weights = dict[str, Any]
# Changes a checkpoint's weights in place, and returns what else is in its config.json.
Change = Callable[[Weights], dict[str, Any]]


def _llama(**changes: Any) -> Any:
    return networks.config("Llama", **{"num_key_value_heads": 2, **changes})


def _one_head_llama(**changes: Any) -> Any:
    return _llama(num_key_value_heads=1, **changes)


def _one_layer_llama() -> Any:
    return _one_head_llama(num_hidden_layers=1)  # vLLM wants all of a draft's layers in one group


def _qwen2() -> Any:
    return networks.config("Qwen2", num_key_value_heads=2)


def _exaone() -> Any:
    return networks.config(
        "ExaoneMoe",
        num_hidden_layers=4,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 2,
        mlp_layer_types=["dense"] * 4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )


def _qwen3_next() -> Any:
    config = config_of_demo("qwen3_next")
    config.mlp_only_layers = []  # vLLM wants experts in the MTP layer too, and that is layer 0
    return config


def _write(directory: pathlib.Path, network: Any, change: Change) -> str:
    """Write a checkpoint, changed; return its directory."""
    from safetensors.torch import load_file, save_file

    network.save_pretrained(directory)
    weights = load_file(directory / "model.safetensors")
    path = directory / "config.json"
    config = json.loads(path.read_text()) | change(weights)
    path.write_text(json.dumps(config))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return str(directory)


def _network(config: Any, dtype: str, quiet: Mapping[str, float]) -> Any:
    import torch

    network = networks.make(config)
    _tune(network)
    for name, weight in network.named_parameters():
        for end, factor in quiet.items():
            if name.endswith(end):
                weight.data.mul_(factor)
        if quiet and name.endswith("embed_tokens.weight"):
            weight.data.mul_(5.0)  # of size 1: as large as a draft's norms make it
    return network.to(getattr(torch, dtype))


def _halves(first: float, second: float) -> Any:
    """Return the weights of a layer that takes two hidden states and gives their sum, so weighted."""
    import torch

    return torch.cat([first * torch.eye(_HIDDEN), second * torch.eye(_HIDDEN)], 1)


def _nothing(weights: Weights) -> dict[str, Any]:
    return {}


def _noisy(weights: Weights) -> dict[str, Any]:
    """Make a model's weights those of one that says nearly the same."""
    import torch

    generator = torch.Generator().manual_seed(1)
    for weight in weights.values():
        weight.add_(0.05 * weight.std() * torch.randn(weight.shape, generator=generator))
    return {}


def _eagle(weights: Weights) -> dict[str, Any]:
    """Leave of a Llama an EAGLE head: its last layer, which takes the last token's embedding."""
    last = {
        name.replace("model.layers.1.", "layers.0."): weight
        for name, weight in weights.items()
        if name.startswith("model.layers.1.") and "input_layernorm" not in name
    }
    embedding = weights["model.embed_tokens.weight"]
    weights.clear()
    weights.update(last | {"embed_tokens.weight": embedding, "fc.weight": _halves(1.0, 0.1)})
    return {"num_hidden_layers": 1}


def _mimo(weights: Weights) -> dict[str, Any]:
    """Make a Qwen2 a MiMo, whose MTP layer is a copy of the last one."""
    import torch

    for name in [name for name in weights if name.startswith("model.layers.1.")]:
        weights[name.replace("model.layers.1.", "model.mtp_layers.0.")] = weights[name].clone()
    weights["model.mtp_layers.0.input_proj.weight"] = _halves(0.1, 1.0)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"model.mtp_layers.0.{name}.weight"] = torch.ones(_HIDDEN)
    return {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}


def _mtp(weights: Weights) -> dict[str, Any]:
    """Give a model an MTP layer that is a copy of its fourth, as Exaone and Qwen3-Next name them."""
    for name in [name for name in weights if name.startswith("model.layers.3.")]:
        weights[name.replace("model.layers.3.", "mtp.layers.0.")] = weights[name].clone()
    norm = weights["model.norm.weight"]
    weights["mtp.fc.weight"] = _halves(1.0, 0.1).to(norm.dtype)
    for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        weights[f"mtp.{name}.weight"] = norm.clone()
    return {"num_nextn_predict_layers": 1, "mtp_layer_types": ["full_attention"]}


_CHUNK = {"hybrid_chunk_size": 128}


@dataclass(frozen=True)
class Drafting:
    """One way to draft: a model, what drafts for it, and what of a prompt is hit after a restart."""

    groups: tuple[str, ...]  # kinds of the KV groups, as the namespace has them
    network: Callable[[], Any]
    method: str
    layers: str  # of the draft: how their names begin
    model: Change = _nothing
    head: tuple[Callable[[], Any], Change] | None = None
    hit_tokens: int = 1920
    dtype: str = "float32"
    block_size: int = 128
    quiet: Mapping[str, float] = field(default_factory=lambda: _QUIET)
    options: Mapping[str, Any] = field(default_factory=lambda: _CHUNK)  # of fskv
    guesses: bool = True  # so many of its drafts are accepted that zeros in its KV show
    path: str = ""  # of the model's checkpoint, once it is `written`
    draft_path: str = ""

    def written(self, directory: pathlib.Path) -> Drafting:
        """Write the checkpoints; return where they are."""
        network = _network(self.network(), self.dtype, self.quiet)
        path, draft_path = _write(directory / "model", network, self.model), ""
        if self.head is not None:
            config, change = self.head
            network = _network(config(), self.dtype, self.quiet)
            draft_path = _write(directory / "draft", network, change)
        return replace(self, path=path, draft_path=draft_path)

    def what(self, transfer: dict[str, Any] | None, **changes: Any) -> dict[str, Any]:
        """Return what `engine_lab.request` takes for an engine that drafts, with other arguments of vLLM."""
        number = 1 if self.method == "mtp" else 3
        speculative = {"method": self.method, "num_speculative_tokens": number}
        if self.draft_path:
            speculative["model"] = self.draft_path
        engine = {"dtype": self.dtype, "block_size": self.block_size}
        return {
            "path": self.path,
            "engine": {**engine, "speculative_config": speculative, **changes},
            "transfer": transfer,
            "changes": {"cpu_gaps": True},
        }


_STATE = ("state", "state", "full")
_WINDOW = ("sliding_window", "full", "full")

# vLLM keeps windows and states at the end of a prompt alone, as it does by itself: there most goes wrong.
DRAFTS = {
    "draft_model": Drafting(
        ("full",), _llama, "draft_model", "draft_model.", head=(_llama, _noisy)
    ),
    "eagle": Drafting(("full",), _llama, "eagle", "model.layers.2.", head=(_llama, _eagle)),
    "mtp": Drafting(("full",), _qwen2, "mtp", "model.layers.2.", _mimo),
    "windows_eagle": Drafting(
        _WINDOW,
        _exaone,
        "eagle",
        "model.layers.4.",
        head=(_one_head_llama, _eagle),
        guesses=False,
    ),
    "windows_mtp": Drafting(_WINDOW, _exaone, "mtp", "mtp.", _mtp),
    # vLLM keeps the state a block before the end where there is an EAGLE head or MTP.
    "states_mtp": Drafting(
        _STATE,
        _qwen3_next,
        "mtp",
        "mtp.",
        _mtp,
        hit_tokens=1280,
        dtype="bfloat16",  # its CPU kernels take nothing else
        block_size=640,
        quiet={},
        options={},
        guesses=False,
    ),
}

# VLLM's V1 model runner gives such a draft the slots of group 0, which are another layer's.
OVERWRITING = Drafting(
    _WINDOW,
    _exaone,
    "draft_model",
    "draft_model.",
    head=(_one_layer_llama, _nothing),
    quiet={},
)
NGRAMS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 2,
}
