"""KV groups of a model by arithmetic on its config.json, for where vLLM is not installed.

It knows full attention, sliding windows and MLA of the models named here; vLLM's classes give the same.
"""

from __future__ import annotations

from typing import Any

from ..exits import UsageError

_HEAD_DIM_LEFT_OUT = ("llama", "mistral", "mixtral", "qwen2", "qwen2_moe")
_HEADS = (
    *_HEAD_DIM_LEFT_OUT,
    *("glm4_moe", "gpt_oss", "minimax_m2", "qwen3", "qwen3_moe"),
    *("qwen3_vl_moe_text", "qwen3_vl_text"),
)
_MLA = ("deepseek_v2", "deepseek_v3", "kimi_k2")
_NBYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
_LIMIT = (
    "without vLLM, `fskv plan` knows full attention, sliding windows and MLA of the model types "
    f"{', '.join(sorted(_HEADS + _MLA))}"
)


def groups_of(config: dict[str, Any], quant: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Return groups as `fskv.engines.vllm.model_groups` does, from a model's files. Raises UsageError."""
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) else config
    model_type, tp = text.get("model_type"), request["tensor_parallel_size"]
    if model_type not in _HEADS + _MLA or text.get("index_topk"):
        raise UsageError(f"config.json: model_type: found {model_type!r:.60}; {_LIMIT}")
    dtype = _dtype(request["dtype"], text, config)
    kv_dtype = _kv_dtype(request["kv_cache_dtype"], config.get("quantization_config") or quant)
    if model_type in _MLA:
        if request["platform"] == "cpu":
            raise UsageError("--platform cpu: MLA there depends on the CPU, which vLLM must see")
        block = request["block_size"] or 64
        width = _integer(text, "kv_lora_rank") + _integer(text, "qk_rope_head_dim")
        kinds: list[tuple[str, int | None]] = [("mla", None)]
    else:
        block = request["block_size"] or {"cpu": 128, "cuda": 16}[request["platform"]]
        heads = _integer(text, "num_key_value_heads", text.get("num_attention_heads"))
        if heads % tp and tp % heads:
            raise UsageError(f"--tp: {heads} KV heads cannot be divided among {tp} ranks")
        width = 2 * max(1, heads // tp) * _head_dim(text)
        kinds = _kinds(text)
    page_nbytes = block * width * _NBYTES[dtype if kv_dtype == "auto" else kv_dtype]
    names = [f"layer {at}" for at in range(_integer(text, "num_hidden_layers", most=4096))]
    groups = []
    for at, (kind, window) in enumerate(kinds):
        spec = {"group_idx": at, "kind": kind, "tokens_per_block": block, "window_tokens": window}
        own = names[at :: len(kinds)]
        groups.append((spec, [page_nbytes] * len(own), own))
    return {
        "groups": groups,
        "tokens_per_hash": block,
        "max_model_len": request["max_model_len"] or _integer(text, "max_position_embeddings"),
        "dtype": dtype,
        "kv_cache_dtype": kv_dtype,
    }


def _kinds(text: dict[str, Any]) -> list[tuple[str, int | None]]:
    """Return kind and window of the first layers; the others repeat them."""
    if text.get("sliding_window") is None or text.get("use_sliding_window") is False:
        return [("full", None)]
    window = ("sliding_window", _integer(text, "sliding_window"))
    if text["model_type"] == "gpt_oss":
        return [window, ("full", None)]
    if text["model_type"] in ("mistral", "mixtral"):
        return [window]
    raise UsageError(f"config.json: sliding_window: found one in {text['model_type']}; {_LIMIT}")


def _head_dim(text: dict[str, Any]) -> int:
    if text.get("head_dim") is not None or text["model_type"] not in _HEAD_DIM_LEFT_OUT:
        return _integer(text, "head_dim")
    return max(1, _integer(text, "hidden_size") // _integer(text, "num_attention_heads"))


def _integer(text: dict[str, Any], name: str, default: Any = None, most: int = 1 << 30) -> int:
    value = default if text.get(name) is None else text[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise UsageError(
            f"config.json: {name}: found {value!r:.60}, expected an integer of 1 to {most}"
        )
    return value


def _dtype(option: str, *places: Any) -> str:
    found = option
    if option == "auto":
        names = [place.get(name) for place in places for name in ("dtype", "torch_dtype")]
        found = next((name for name in names if name is not None), "bfloat16")
    if found in ("bfloat16", "float16") or option == found == "float32":
        return str(found)
    raise UsageError(f"config.json: dtype: found {found!r:.60}; give --dtype")


def _kv_dtype(option: str, quant: Any) -> str:
    """Return the dtype that vLLM makes of --kv-cache-dtype auto if a checkpoint has scales for its KV."""
    found: Any = option
    if option == "auto" and isinstance(quant, dict):
        inner = quant.get("quantization")  # in ModelOpt's own file
        method = "modelopt" if isinstance(inner, dict) else str(quant.get("quant_method"))
        scales = inner if isinstance(inner, dict) else quant
        if method.startswith(("modelopt", "compressed-tensors")):
            found = scales.get("kv_cache_scheme") or scales.get("kv_cache_quant_algo") or "auto"
        if isinstance(found, dict) and (found.get("num_bits"), found.get("type")) == (8, "float"):
            found = "fp8"
        if method.startswith("modelopt") and found in ("fp8", "FP8"):
            found = "fp8_e4m3"
    if found == "auto" or (isinstance(found, str) and found in _NBYTES):
        return str(found)
    raise UsageError(f"--kv-cache-dtype: found {found!r:.80}, expected {', '.join(_NBYTES)}")
