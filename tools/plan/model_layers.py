"""What each layer of a model keeps between tokens, from its config.json, as vLLM 0.32 builds it.

One function for each family of architectures, found by `model_type`. A model that is not in the table, or
has a field that is not understood, is refused: a plan for another model would be worse than none.
test_plan.py compares the defaults with transformers, test_engine_plan.py the result with
engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fskv.hybrid_planner import GroupKind

from ..exits import UsageError
from .fields import Fields

_MAX_LAYERS = 4096
_MAX_HEADS = 1 << 16
_MAX_DIM = 1 << 20


@dataclass(frozen=True, slots=True)
class Layer:
    """What a layer keeps on one rank, in elements: of each token, or as one state.

    A state has elements of two dtypes: the convolution's, and the recurrent ones.
    """

    kind: GroupKind
    window_tokens: int | None = None
    token_elements: int = 0
    conv_elements: int = 0
    recurrent_elements: int = 0


@dataclass(frozen=True, slots=True)
class Model:
    """A model as far as its KV goes. `kv_heads` is of the whole model, None with MLA."""

    model_type: str
    layers: tuple[Layer, ...]
    kv_heads: int | None
    dtype: str | None
    recurrent_dtype: str | None  # what the model's configuration asks for, if it does
    max_positions: int | None
    quantised_kv: bool  # the checkpoint brings scales for the KV: vLLM's "auto" may follow them
    notes: tuple[str, ...]


def read_model(config: object, tp: int) -> Model:
    """Return the layers of the model that a parsed config.json describes, on one of `tp` ranks.

    Raises UsageError, naming the field.
    """
    if not isinstance(config, dict):
        raise UsageError("config.json: expected a JSON object")
    notes = []
    text, where = config, "config.json"
    for name in ("text_config", "llm_config", "language_config"):
        inner = config.get(name)
        if isinstance(inner, dict):
            text, where = inner, f"config.json: {name}"
            notes.append(f"only {name} keeps KV; encoders of images and sound do not")
            break
    model_type = text.get("model_type", config.get("model_type"))
    family = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None or not isinstance(model_type, str):
        raise UsageError(
            f"{where}: model_type: found {model_type!r:.60}, expected one of {', '.join(sorted(_FAMILIES))}"
        )
    fields = Fields(text, DEFAULTS.get(model_type, {}), where)
    for name, why in _NOT_UNDERSTOOD.items():
        if fields.get(name) not in (None, False, 0, [], {}):
            raise fields.wrong(name, f"nothing: {why}")
    layers = family(fields, tp)
    shared = fields.get("num_kv_shared_layers")
    if shared:
        raise fields.wrong(
            "num_kv_shared_layers", "nothing: layers that share KV are not understood"
        )
    if not any(layer.token_elements for layer in layers):
        raise UsageError(
            f"{where}: no layer has attention: fskv has never been run with a model of states alone, and how "
            "vLLM sizes its blocks then is not known here"
        )
    return Model(
        model_type=model_type,
        layers=tuple(layers),
        kv_heads=None if any(x.kind is GroupKind.MLA for x in layers) else _kv_heads(fields),
        dtype=_dtype(fields, config),
        recurrent_dtype=_text(fields, "mamba_ssm_cache_dtype") or _text(fields, "mamba_ssm_dtype"),
        max_positions=_max_positions(fields),
        quantised_kv=_quantised_kv(config) or _quantised_kv(text),
        notes=tuple(notes),
    )


# --- families ---------------------------------------------------------------------------


def _plain(fields: Fields, tp: int) -> list[Layer]:
    """Every layer the same; sliding if the model says so for all of them."""
    layers = _num_layers(fields)
    if fields.has("layer_types"):
        return _by_type(fields, tp)
    window = fields.get("sliding_window")
    return [_attention(fields, tp, _window(fields) if window else None)] * layers


def _qwen(fields: Fields, tp: int) -> list[Layer]:
    """Transformers drops the window unless use_sliding_window; vLLM refuses a mix."""
    layers = _num_layers(fields)
    if not fields.flag("use_sliding_window") or not fields.get("sliding_window"):
        return [_attention(fields, tp, None)] * layers
    first = fields.get("max_window_layers")
    if fields.has("layer_types") or first not in (0, None):
        raise fields.wrong(
            "use_sliding_window", "false: vLLM takes no mix of windows in this model"
        )
    return [_attention(fields, tp, _window(fields))] * layers


def _alternating(fields: Fields, tp: int) -> list[Layer]:
    """Windows and full attention in turns, by layer_types or by a period that ends with a full one."""
    if fields.has("layer_types"):
        return _by_type(fields, tp)
    period = fields.either("sliding_window_pattern", "_sliding_window_pattern")
    full, sliding = _attention(fields, tp, None), _attention(fields, tp, _window(fields))
    return [sliding if (at + 1) % period else full for at in range(_num_layers(fields))]


def _gpt_oss(fields: Fields, tp: int) -> list[Layer]:
    """vLLM: every second layer, whatever layer_types says."""
    full, sliding = _attention(fields, tp, None), _attention(fields, tp, _window(fields))
    found = [full if at % 2 else sliding for at in range(_num_layers(fields))]
    if fields.has("layer_types") and _by_type(fields, tp) != found:
        raise fields.wrong("layer_types", "sliding_attention and full_attention in turns")
    return found


def _cohere2(fields: Fields, tp: int) -> list[Layer]:
    """vLLM: a window of one token more than the configuration says (commandr.py)."""
    more = {**fields.config, "sliding_window": _window(fields) + 1}
    return _alternating(Fields(more, fields.defaults, fields.where), tp)


def _gemma3(fields: Fields, tp: int) -> list[Layer]:
    if fields.flag("use_bidirectional_attention"):
        raise fields.wrong("use_bidirectional_attention", "false: it changes the window")
    return _alternating(fields, tp)


def _llama4(fields: Fields, tp: int) -> list[Layer]:
    """Layers with RoPE attend within chunks, the others to everything."""
    layers, chunk = _num_layers(fields), fields.get("attention_chunk_size")
    interval = fields.either("no_rope_layer_interval")
    rope = fields.get("no_rope_layers") or [int((at + 1) % interval != 0) for at in range(layers)]
    if not isinstance(rope, list) or len(rope) != layers or any(one not in (0, 1) for one in rope):
        raise fields.wrong("no_rope_layers", f"a list of {layers} zeros and ones")
    full = _attention(fields, tp, None)
    if chunk is None:
        return [full] * layers
    size = fields.integer("attention_chunk_size")
    local = Layer(GroupKind.CHUNKED_LOCAL, size, full.token_elements)
    return [local if one else full for one in rope]


def _mla(fields: Fields, _tp: int) -> list[Layer]:
    """One latent for all heads, the same on every rank."""
    width = fields.integer("kv_lora_rank", _MAX_DIM) + fields.integer("qk_rope_head_dim", _MAX_DIM)
    return [Layer(GroupKind.MLA, None, width)] * _num_layers(fields)


def _gated_delta(fields: Fields, tp: int) -> list[Layer]:
    """Qwen3-Next: MambaStateShapeCalculator.gated_delta_net_state_shape."""
    keys, values = fields.integer("linear_num_key_heads"), fields.integer("linear_num_value_heads")
    key_dim = fields.integer("linear_key_head_dim", _MAX_DIM)
    value_dim = fields.integer("linear_value_head_dim", _MAX_DIM)
    reach = fields.integer("linear_conv_kernel_dim") - 1
    conv = _share(fields, "linear_num_key_heads", 2 * key_dim * keys + value_dim * values, tp)
    heads = _share(fields, "linear_num_value_heads", values, tp)
    state = _state(conv * reach, heads * value_dim * key_dim)
    names = {"linear_attention": state, "full_attention": _attention(fields, tp, None)}
    layers = _num_layers(fields)
    if fields.has("layer_types"):
        return [names[word] for word in fields.texts("layer_types", layers, list(names))]
    period = fields.either("full_attention_interval")
    words = ("linear_attention" if (at + 1) % period else "full_attention" for at in range(layers))
    return [names[word] for word in words]


def _short_conv(fields: Fields, tp: int) -> list[Layer]:
    """LFM2: MambaStateShapeCalculator.short_conv_state_shape."""
    width_field = "hidden_size" if fields.get("model_type") == "lfm2_moe" else "conv_dim"
    width = fields.either(width_field, "hidden_size")
    conv = _share(fields, width_field, width, tp) * (fields.integer("conv_L_cache") - 1)
    names = {"conv": _state(conv, 0), "full_attention": _attention(fields, tp, None)}
    layers = _num_layers(fields)
    attention = fields.get("full_attn_idxs")
    if fields.has("layer_types") or not isinstance(attention, list):
        return [names[word] for word in fields.texts("layer_types", layers, list(names))]
    return [names["full_attention" if at in attention else "conv"] for at in range(layers)]


def _jamba(fields: Fields, tp: int) -> list[Layer]:
    """Mamba-1: MambaStateShapeCalculator.mamba1_state_shape."""
    width = fields.integer("mamba_expand", 64) * fields.integer("hidden_size")
    own = _share(fields, "hidden_size", width, tp)
    state = _state(
        own * (fields.integer("mamba_d_conv") - 1), own * fields.integer("mamba_d_state", _MAX_DIM)
    )
    full = _attention(fields, tp, None)
    period, offset = fields.integer("attn_layer_period"), fields.get("attn_layer_offset")
    if type(offset) is not int or not 0 <= offset < period:
        raise fields.wrong("attn_layer_offset", f"an integer of 0 to {period - 1}")
    return [full if at % period == offset else state for at in range(_num_layers(fields))]


def _granite_hybrid(fields: Fields, tp: int) -> list[Layer]:
    width = fields.integer("mamba_expand", 64) * fields.integer("hidden_size")
    heads = fields.integer("mamba_n_heads", _MAX_HEADS)
    dim = fields.get("mamba_d_head")
    state = _mamba2(
        fields,
        tp,
        width=width,
        heads=heads,
        head_dim=width // heads if dim in (None, "auto") else fields.integer("mamba_d_head"),
        groups=fields.integer("mamba_n_groups", _MAX_HEADS),
        state=fields.integer("mamba_d_state", _MAX_DIM),
        kernel=fields.integer("mamba_d_conv"),
    )
    full = _attention(fields, tp, None)
    names = {"mamba": state, "linear_attention": state, "attention": full, "full_attention": full}
    words = fields.texts("layer_types", _num_layers(fields), list(names))
    return [names[word] for word in words]


def _nemotron_h(fields: Fields, tp: int) -> list[Layer]:
    heads = fields.integer("mamba_num_heads", _MAX_HEADS)
    head_dim = fields.integer("mamba_head_dim", _MAX_DIM)
    state = _mamba2(
        fields,
        tp,
        width=heads * head_dim,
        heads=heads,
        head_dim=head_dim,
        groups=fields.integer("n_groups", _MAX_HEADS),
        state=fields.integer("ssm_state_size", _MAX_DIM),
        kernel=fields.integer("conv_kernel"),
    )
    full = _attention(fields, tp, None)
    marks: dict[str, Layer | None] = {"M": state, "*": full, "-": None, "E": None}
    words = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*"}
    words |= {"mlp": "-", "moe": "E"}
    pattern = fields.get("hybrid_override_pattern")
    if pattern is None:
        name = "layers_block_type" if fields.has("layers_block_type") else "layer_types"
        value = fields.get(name)
        length = len(value) if isinstance(value, list) else 0
        pattern = "".join(words[word] for word in fields.texts(name, length, list(words)))
    if not isinstance(pattern, str) or not set(pattern) <= set(marks) or len(pattern) > _MAX_LAYERS:
        raise fields.wrong("hybrid_override_pattern", "a text of M, *, - and E")
    found = (marks[mark] for mark in pattern)
    return [layer for layer in found if layer is not None]


# --- parts ------------------------------------------------------------------------------


def _attention(fields: Fields, tp: int, window: int | None) -> Layer:
    """Keys and values of this rank's heads."""
    heads = _kv_heads(fields)
    if heads % tp and tp % heads:
        raise fields.wrong(
            "num_key_value_heads", f"a divisor or a multiple of {tp}, the ranks (--tp)"
        )
    elements = max(1, heads // tp) * 2 * _head_dim(fields)
    kind = GroupKind.FULL if window is None else GroupKind.SLIDING_WINDOW
    return Layer(kind, window, elements)


def _by_type(fields: Fields, tp: int) -> list[Layer]:
    names: dict[str, Callable[[], Layer]] = {
        "full_attention": lambda: _attention(fields, tp, None),
        "sliding_attention": lambda: _attention(fields, tp, _window(fields)),
    }
    words = fields.texts("layer_types", _num_layers(fields), list(names))
    made = {word: names[word]() for word in set(words)}
    return [made[word] for word in words]


def _state(conv: int, recurrent: int) -> Layer:
    return Layer(GroupKind.STATE, None, 0, conv, recurrent)


def _mamba2(
    fields: Fields,
    tp: int,
    *,
    width: int,
    heads: int,
    head_dim: int,
    groups: int,
    state: int,
    kernel: int,
) -> Layer:
    """MambaStateShapeCalculator.mamba2_state_shape."""
    if groups % tp:
        groups = tp  # extra_groups_for_head_shards
    conv = _share(fields, "mamba groups and heads", width + 2 * groups * state, tp) * (kernel - 1)
    return _state(conv, _share(fields, "mamba heads", heads, tp) * head_dim * state)


def _share(fields: Fields, name: str, number: int, tp: int) -> int:
    if number % tp:
        raise UsageError(
            f"{fields.where}: {name}: {number} cannot be divided among {tp} ranks (--tp)"
        )
    return number // tp


def _num_layers(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", _MAX_LAYERS)


def _kv_heads(fields: Fields) -> int:
    if fields.has("num_key_value_heads"):
        return fields.integer("num_key_value_heads", _MAX_HEADS)
    return fields.integer("num_attention_heads", _MAX_HEADS)


def _head_dim(fields: Fields) -> int:
    if fields.get("head_dim") not in (None, 0):
        return fields.integer("head_dim", _MAX_DIM)
    hidden = fields.integer("hidden_size")
    found = hidden // fields.integer("num_attention_heads", _MAX_HEADS)
    if not found:
        raise fields.wrong("hidden_size", "at least num_attention_heads")
    return found


def _window(fields: Fields) -> int:
    return fields.integer("sliding_window", 1 << 30)


def _max_positions(fields: Fields) -> int | None:
    if not fields.has("max_position_embeddings"):
        return None
    return fields.integer("max_position_embeddings", 1 << 30)


def _text(fields: Fields, name: str) -> str | None:
    value = fields.get(name)
    if value is not None and not isinstance(value, str):
        raise fields.wrong(name, "text")
    return value


def _dtype(fields: Fields, config: Mapping[str, Any]) -> str | None:
    for source in (config, fields.config):
        for name in ("dtype", "torch_dtype"):
            value = source.get(name)
            if isinstance(value, str):
                return value.removeprefix("torch.")
            if value is not None:
                raise UsageError(f"config.json: {name}: found {value!r:.60}, expected text")
    return None


def _quantised_kv(config: Mapping[str, Any]) -> bool:
    for name in ("quantization_config", "compression_config"):
        found = config.get(name)
        text = str(found) if isinstance(found, dict) else ""
        if "kv_cache_quant_algo" in text or (
            "kv_cache_scheme" in text and "kv_cache_scheme': None" not in text
        ):
            return True
    return False


_FAMILIES: dict[str, Callable[[Fields, int], list[Layer]]] = {
    **dict.fromkeys(
        (
            "gemma",
            "glm4",
            "glm4_moe",
            "granite",
            "granitemoe",
            "llama",
            "minimax_m2",
            "mistral",
            "mixtral",
            "olmoe",
            "phi3",
            "stablelm",
        ),
        _plain,
    ),
    **dict.fromkeys(("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen2_5_vl_text"), _qwen),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), _gated_delta),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _mla),
    **dict.fromkeys(("lfm2", "lfm2_moe"), _short_conv),
    "cohere2": _cohere2,
    "exaone4": _alternating,
    "gemma2": _alternating,
    "gemma3_text": _gemma3,
    "gpt_oss": _gpt_oss,
    "granitemoehybrid": _granite_hybrid,
    "jamba": _jamba,
    "llama4_text": _llama4,
    "nemotron_h": _nemotron_h,
}

# What transformers' classes say where the file is silent: files of the hub leave out what equals it.
_QWEN35 = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window": 4096, "sliding_window_pattern": 4},
    "deepseek_v3": {"kv_lora_rank": 512, "qk_rope_head_dim": 64},
    "gemma": {"head_dim": 256},
    "gemma2": {"head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 2},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131072,
    },
    "gpt_oss": {"head_dim": 64, "sliding_window": 128},
    "granitemoehybrid": {
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    "jamba": {
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    "lfm2": {"conv_L_cache": 3},
    "lfm2_moe": {"conv_L_cache": 3},
    "llama4_text": {"head_dim": 128, "attention_chunk_size": 8192, "no_rope_layer_interval": 4},
    "mistral": {"sliding_window": 4096, "num_key_value_heads": 8},
    "nemotron_h": {
        "head_dim": 128,
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "conv_kernel": 4,
        "mamba_ssm_cache_dtype": "float32",
    },
    "qwen3": {"head_dim": 128, "max_window_layers": 28},
    "qwen2": {"max_window_layers": 28},
    "qwen3_next": {**_QWEN35},
    "qwen3_5_text": {**_QWEN35},
    "qwen3_5_moe_text": {**_QWEN35},
}

_NOT_UNDERSTOOD = {
    "is_encoder_decoder": "encoder-decoder models are not planned",
    "index_topk": "the indexer of sparse attention keeps KV of its own",
    "compress_ratios": "compressed KV is not planned",
    "per_layer_config": "layers of different shapes are not planned",
    "block_configs": "layers of different shapes are not planned",
}
