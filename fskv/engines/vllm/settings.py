"""The settings of a running vLLM that count: of its configuration, its environment and its plug-ins.

Called once, on the worker, when the model is built: vLLM has then resolved its configuration.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import entry_points, packages_distributions, version
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.platforms import current_platform
from vllm.utils import import_utils
from vllm.utils.flashinfer import has_flashinfer

from fskv.engines.vllm.harmless import HARMLESS_FIELDS, HARMLESS_VARIABLES
from fskv.errors import ConfigError
from fskv.identity import rules

_KERNELS = ("aiter", "b12x", "deep_gemm", "flashinfer", "humming", "quark", "triton_kernels")

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from fskv.namespace import Json


def counting_settings(vllm_config: VllmConfig) -> dict[str, Json]:
    """Return the settings that change KV and differ from the default, by part of the configuration.

    Raises ConfigError where KV depends on what an engine has computed before, RestError for a setting that
    cannot be compared.
    """
    values, defaults = rules.fields_of(vllm_config)
    _resolve(values)
    values |= _derived(vllm_config)
    found = rules.settings(values, defaults, HARMLESS_FIELDS)
    # vLLM sets this one itself on some CPUs, to what it is without.
    unset = {"VLLM_SSM_CONV_STATE_LAYOUT": "SD"}
    set_ = {name: value for name, value in os.environ.items() if unset.get(name) != value}
    # A platform's plug-in reads variables of its own.
    known = [
        *envs.environment_variables,
        *(["VLLM_*"] if current_platform.is_out_of_tree() else []),
    ]
    if variables := rules.environment(set_, known, HARMLESS_VARIABLES):
        found["environment"] = variables
    if plugins := _plugins():
        found["plugins"] = plugins
    if vllm_config.model_config.quantization and (packages := _kernel_packages()):
        found["kernel_packages"] = packages
    return found


def _resolve(values: dict[str, Any]) -> None:
    """Drop the settings that spell their default value in another way."""
    # The meaning of "auto" if vLLM has the model.
    if values.get("model_config.model_impl") == "vllm":
        del values["model_config.model_impl"]
    worker = values.pop("parallel_config.worker_cls", "auto")
    if isinstance(worker, type):
        worker = f"{worker.__module__}.{worker.__qualname__}"
    if worker != "auto" and not str(worker).startswith("vllm."):  # the platform's
        values["parallel_config.worker_cls"] = str(worker)


def _derived(vllm_config: VllmConfig) -> dict[str, Any]:
    """Return values that follow from harmless settings and change KV of some models."""
    model = vllm_config.model_config
    found: dict[str, Any] = {}
    # The temperature of Llama 4's attention: on if the context is longer than 32768, unless the configuration
    # of generation says. vLLM 0.32 notes it in a copy that nobody keeps (llama4.py:719).
    if str(getattr(model.hf_text_config, "model_type", "")).startswith("llama4"):
        chosen = {**model.try_get_generation_config(), **model.override_generation_config}
        tuned = chosen.get("attn_temperature_tuning", model.max_model_len > 32768)
        found["derived.attn_temperature_tuning"] = tuned
    # Images are made as large as the context allows. The tokens that stand for a large and a small one are
    # equal as far as both go, and so are their keys (processors/nano_nemotron_vl.py:330,
    # dots3_note/common/processor.py:387).
    names = getattr(model.hf_config, "architectures", None) or ()
    if any(str(name).startswith(("NemotronH_", "Dots3Note")) for name in names):
        found["derived.max_model_len"] = int(model.max_model_len)
    # How exact the factors of adapters are, where they are less or more so than the model.
    dtype = getattr(vllm_config.lora_config, "lora_dtype", "auto")
    if dtype not in (None, "auto", model.dtype):
        found["derived.lora_dtype"] = dtype
    return found | _experts(vllm_config) | _multimodal(vllm_config)


def _experts(vllm_config: VllmConfig) -> dict[str, Any]:
    """Return the settings that choose the kernel of quantised experts, and so the precision of activations.

    Not every kernel takes adapters, or batches of other ranks' tokens. The next in line may take 16 bits
    where this one takes 4 (fused_moe/modular_kernel.py:591, fused_moe/config.py:1057).
    """
    parallel = vllm_config.parallel_config
    if not vllm_config.model_config.quantization or parallel.is_moe_model is False:
        return {}
    found: dict[str, Any] = {}
    if vllm_config.lora_config is not None:
        found["derived.experts.lora"] = True
    if parallel.enable_expert_parallel:
        sizes = parallel.tensor_parallel_size, parallel.data_parallel_size
        found["derived.experts.parallel"] = [*sizes, parallel.all2all_backend, parallel.enable_eplb]
    elif parallel.tensor_parallel_size > 1:
        found["derived.experts.parallel"] = [parallel.tensor_parallel_size]
    return found


def _multimodal(vllm_config: VllmConfig) -> dict[str, Any]:
    model = vllm_config.model_config
    multimodal = getattr(model, "multimodal_config", None)
    found: dict[str, Any] = {}
    if getattr(multimodal, "mm_encoder_attn_dtype", None) is not None:
        path = getattr(multimodal, "mm_encoder_fp8_scale_path", None)
        if path is None:
            raise ConfigError(
                "option 'mm_encoder_fp8_scale_path': found none, expected a file with "
                "'mm_encoder_attn_dtype': scales that follow the images seen before differ between "
                "processes, so their KV cannot be shared"
            )
        found["derived.mm_encoder_fp8_scales"] = os.path.abspath(path)
    # An image that attends in both directions has other KV when it is computed in pieces. vLLM 0.32 forbids
    # pieces on CUDA and ROCm only (platforms/cuda.py:337).
    in_pieces = not getattr(vllm_config.scheduler_config, "disable_chunked_mm_input", True)
    if multimodal is not None and in_pieces and getattr(model, "is_mm_prefix_lm", False):
        found["derived.chunked_mm_input"] = True
    return found


def _plugins() -> dict[str, Json]:
    """Return the plug-ins that vLLM has loaded, with their versions: one may replace any code of a model.

    Without fskv's own and those that vLLM brings.
    """
    allowed = envs.VLLM_PLUGINS
    found: dict[str, Json] = {}
    for group in ("vllm.general_plugins", "vllm.platform_plugins"):
        for plugin in entry_points(group=group):
            known = plugin.value.startswith(("vllm.", "fskv."))
            if not known and (allowed is None or plugin.name in allowed):
                found[plugin.name] = (
                    f"{plugin.dist.name} {plugin.dist.version}" if plugin.dist else "?"
                )
    return found


def _kernel_packages() -> dict[str, Json]:
    """Return the packages that `auto` may choose kernels from, with their versions: a node may lack one.

    "?" is a version that a package does not tell.
    """
    probes: dict[str, Callable[[], bool] | None] = dict.fromkeys(_KERNELS)
    probes["flashinfer"] = has_flashinfer
    for name in ("aiter", "deep_gemm", "humming"):
        probes[name] = getattr(import_utils, f"has_{name}", None)
    owners = packages_distributions()
    found: dict[str, Json] = {}
    for name, probe in probes.items():
        if probe() if probe is not None else name in owners:
            found[name] = " ".join(sorted(map(version, owners.get(name, ())))) or "?"
    return found
