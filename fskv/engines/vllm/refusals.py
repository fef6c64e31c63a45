"""Settings of vLLM with which fskv cannot serve: each is refused in one sentence.

Asked twice: in the process of `vllm serve`, before weights are read (`preflight`), and by each worker when it
derives the identity, for engines that are made in another way. A draft is known to the workers alone.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm.v1.core import kv_cache_utils

from fskv.config import StoreConfig
from fskv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig

# Those that load what vLLM's rule picks of a checkpoint's files.
PICK_FILES = {"auto", "hf", "safetensors", "mistral", "pt", "fastsafetensors", "instanttensor"}
# Not npcache (copies that may be older), ipc_cache (what a daemon has kept), modelexpress, tensorizer (a file
# of another place), nor what a plug-in brings.
_READ_THE_FILES = PICK_FILES | {
    *("dummy", "sharded_state", "runai_streamer", "runai_streamer_sharded", "gguf", "bitsandbytes")
}


def check_settings(vllm_config: VllmConfig, config: StoreConfig) -> None:
    """Raise ConfigError where KV would be served wrongly, or where a hit would end the engine."""
    if vllm_config.weight_transfer_config is not None and not config.weights_fixed:
        raise ConfigError(
            "option 'weight_transfer_config': found one, expected none: weights that change in a running "
            "engine make the KV of its namespace wrong ('weights_fixed' = true says that they never do)"
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise ConfigError(
            "option 'calculate_kv_scales': found true, expected false: scales computed from the first "
            "requests differ between processes, so their KV cannot be shared"
        )
    if getattr(getattr(vllm_config, "aux_output_config", None), "enabled", False):
        raise ConfigError(
            "option 'enable_return_routed_experts': found true, expected false: vLLM keeps these outputs in "
            "the process that computed them, and a hit of KV from files would end the engine"
        )
    takes_adapters = vllm_config.lora_config is not None
    if takes_adapters and "lora" in config.trust and not _adapters_are_named_by_path():
        raise ConfigError(
            "option 'trust': found \"lora\", expected none: this vLLM's keys of blocks do not hold the "
            "path of an adapter"
        )
    _check_loading(vllm_config, config)


def _check_loading(vllm_config: VllmConfig, config: StoreConfig) -> None:
    """Raise ConfigError where the weights may be others than those of the files that fskv looks at."""
    load_format = name_of_load_format(vllm_config)
    if load_format not in _READ_THE_FILES and config.weights_id is None:
        raise ConfigError(
            f"option 'load_format': found \"{load_format}\", expected another one: the weights that it "
            "brings need not be those of the checkpoint's files; or set the option 'weights_id' to a name"
        )
    elastic = getattr(vllm_config.parallel_config, "enable_elastic_ep", False)
    if elastic and config.weights_id is None:
        raise ConfigError(
            "option 'enable_elastic_ep': found true, expected false: a worker that is added has the weights "
            "of a running one, which need not be the checkpoint's; or set the option 'weights_id' to a name"
        )
    quantization = vllm_config.model_config.quantization
    if load_format == "dummy" and quantization:
        raise ConfigError(
            f"option 'load_format': found \"dummy\" with quantization {quantization}, expected weights: "
            "quantised dummy weights are whatever was in memory, so their KV cannot be shared"
        )


def check_draft(vllm_config: VllmConfig, groups: Sequence[Any]) -> None:
    """Raise ConfigError where vLLM's V1 model runner has a draft model write over the KV of the model.

    The runner gives the drafts of `draft_model` the slots of the first group (0.32, GPUModelRunner.
    _build_attention_metadata). Groups share their tensors, so those slots are of another layer's KV. `groups`
    are those of `identity.engine_groups`.
    """
    speculative = vllm_config.speculative_config
    if getattr(speculative, "method", None) != "draft_model" or vllm_config.use_v2_model_runner:
        return
    elsewhere = [
        group.spec.group_idx
        for group in groups
        if group.spec.group_idx and any(n.startswith("draft_model.") for n in group.layer_names)
    ]
    if elsewhere:
        raise ConfigError(
            "option 'speculative_config': found method \"draft_model\" with the draft's layers in KV group "
            f"{elsewhere[0]} of {len(groups)}, expected a model with one group or another method: vLLM's V1 "
            "model runner has this draft write its KV over that of the model"
        )


def name_of_load_format(vllm_config: VllmConfig) -> str:
    return str(vllm_config.load_config.load_format).rsplit(".", 1)[-1].lower()


def _adapters_are_named_by_path() -> bool:
    """Whether vLLM's key of a block tells adapters of one name and two paths apart."""
    adapter = SimpleNamespace(lora_name="name", lora_path="path")
    request = SimpleNamespace(
        mm_features=[], lora_request=adapter, cache_salt=None, prompt_embeds=None
    )
    try:
        keys, _ = kv_cache_utils.generate_block_hash_extra_keys(request, 0, 16, 0)
    except Exception:  # another vLLM
        return False
    return "path" in str(keys)
