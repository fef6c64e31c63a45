"""Settings of vLLM with which fskv cannot serve: each is refused in one sentence of fskv.kv_transfer.line.

Asked twice: in the process of `vllm serve`, before weights are read (`preflight`), and by each worker when it
derives the identity, for engines that are made in another way. A draft is known to the workers alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from fskv.config import StoreConfig
from fskv.errors import ConfigError
from fskv.kv_transfer.line import REFUSED, Settings, judge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig


def check_settings(vllm_config: VllmConfig, config: StoreConfig) -> None:
    """Raise ConfigError where KV would be served wrongly, or where a hit would end the engine."""
    for row, sentence in judge(_settings(vllm_config), config, REFUSED):
        raise ConfigError(f"{sentence}; {row.do}")


def _settings(vllm_config: VllmConfig) -> Settings:
    """Return the settings that fskv.kv_transfer.line judges, as far as the configuration has them by now."""
    cache, model = vllm_config.cache_config, vllm_config.model_config
    is_final = getattr(cache, "user_specified_block_size", False) or current_platform.is_cpu()
    # States have vLLM choose other blocks, once the weights are read.
    has_states = getattr(model, "is_hybrid", False)
    found = {
        name: getattr(of, name, None)
        for of, names in (
            (cache, ("calculate_kv_scales", "kv_offloading_backend", "kv_offloading_size")),
            (model, ("quantization",)),
            (vllm_config.parallel_config, ("enable_elastic_ep",)),
            (vllm_config.kv_transfer_config, ("kv_connector",)),
        )
        for name in names
    }
    aux = getattr(vllm_config, "aux_output_config", None)
    found["enable_return_routed_experts"] = getattr(aux, "enabled", False)
    found["load_format"] = name_of_load_format(vllm_config)
    if is_final and not has_states:
        found["block_size"] = getattr(cache, "block_size", None)
    return found


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
