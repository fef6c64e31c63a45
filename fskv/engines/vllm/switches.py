"""The settings of vLLM that change KV by more than rounding and that nothing else in the identity shows.

Switches that quantise where a checkpoint does not ask for it, that choose kernels of another precision, that
read other files or other code, or that simulate. Each stands here with the value that changes nothing; what
differs from it goes into the identity. docs/settings.md judges every setting of vLLM, these too.

Called once, on the worker, when the connector starts: vLLM has then resolved its configuration.
"""

from __future__ import annotations

import hashlib
import os
from enum import Enum
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.platforms import current_platform
from vllm.utils import import_utils
from vllm.utils.flashinfer import has_flashinfer

from fskv.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from fskv.namespace import Json

# Permute pages of the same size. They stand under `page_layouts` in the manifest.
LAYOUT: dict[str, Json] = {
    "VLLM_SSM_CONV_STATE_LAYOUT": "SD",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": False,
}

# Neutral is vLLM 0.32's default; a test compares the two.
ENVIRONMENT: dict[str, Json] = {
    # Precision of everything that a float32 model multiplies: TF32 has 10 bits (gpu_worker.py:210).
    "VLLM_FLOAT32_MATMUL_PRECISION": "highest",
    # Who sets it asks for the same bits in every batch, which others do not compute.
    "VLLM_BATCH_INVARIANT": False,
    # Another hub under the same names.
    "VLLM_USE_MODELSCOPE": False,
    # Activations or weights in fewer bits than the checkpoint says, or in more.
    "VLLM_CPU_INT4_W4A8": True,
    "VLLM_XPU_INC_WNA16_BACKEND": "auto",
    "VLLM_MARLIN_INPUT_DTYPE": None,
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG": None,
    "VLLM_HUMMING_INPUT_QUANT_CONFIG": None,
    "VLLM_HUMMING_USE_F16_ACCUM": False,
    "VLLM_B12X_MOE_FP4_FORCE_A16": False,
    "VLLM_ROCM_FP8_MFMA_PAGE_ATTN": False,
    # AITER quantises MLA's up-projections at load time unless told otherwise (mla_attention.py:1036).
    "VLLM_ROCM_USE_AITER": False,
    "VLLM_ROCM_USE_AITER_FP8BMM": True,
    "VLLM_ROCM_USE_AITER_FP4BMM": True,
    "VLLM_ROCM_USE_AITER_MOE": True,
    "VLLM_ROCM_USE_AITER_MOE_SITUV2": "auto",
    "VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4": None,
    "VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS": False,
    "VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS": False,
    # Scales of FP8 blocks as powers of two, for which weights are quantised again.
    "VLLM_USE_DEEP_GEMM": True,
    "VLLM_MOE_USE_DEEP_GEMM": True,
    "VLLM_USE_DEEP_GEMM_E8M0": True,
    "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER": True,
    # Kernels that are not to be used; the next in line may take activations of another precision.
    "VLLM_DISABLED_KERNELS": [],
    # Sums over ranks in fewer bits.
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION": "NONE",
    "VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16": True,
    "VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB": None,
    "VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB": None,
    "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB": None,
    "VLLM_DEEPEPLL_NVFP4_DISPATCH": False,
    "VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION": False,
    "VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE": False,
    # Experts chosen at random, for measurements.
    "VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "",
}

# These choose kernels of experts when they are set at all, to the default too (fused_moe/oracle/fp8.py:480).
_WRITTEN_OUT = {
    "VLLM_USE_DEEP_GEMM",
    "VLLM_MOE_USE_DEEP_GEMM",
    "VLLM_ROCM_USE_AITER",
    "VLLM_ROCM_USE_AITER_MOE",
}

# The part of the configuration and its field -> the values that change nothing.
FIELDS: dict[tuple[str, str], tuple[Json, ...]] = {
    # Other code under the same name of a model.
    ("model_config", "model_impl"): ("auto", "vllm"),
    ("model_config", "model_class_overrides"): ({},),
    ("model_config", "code_revision"): (None,),
    ("compilation_config", "inductor_passes"): ({},),
    # Other files of the same checkpoint: downloaded are those that match no pattern.
    ("load_config", "ignore_patterns"): (["original/**/*"],),
    # Queries in FP8 (mla_attention.py:2331, flashinfer.py:992); the indexer's keys, which choose what is
    # attended to.
    ("attention_config", "use_prefill_query_quantization"): (False,),
    ("attention_config", "disable_flashinfer_q_quantization"): (False,),
    ("attention_config", "use_trtllm_attention"): (None,),
    ("attention_config", "indexer_kv_dtype"): ("auto",),
    # The identity has the set of backends, not which layers use which.
    ("attention_config", "backend_per_kind"): ({},),
    # Marlin, Humming and emulation take 16-bit activations where others quantise them.
    ("kernel_config", "moe_backend"): ("auto",),
    ("kernel_config", "linear_backend"): ("auto",),
    ("kernel_config", "linear_backend_per_quant"): (None, {}),
    # Which modules of an adapter are applied: vLLM's key of a block has the adapter's name and path only.
    ("lora_config", "target_modules"): (None, []),
}


def layout_switches() -> dict[str, Json]:
    """Return the environment's switches that permute pages, where they are set to something."""
    return _environment(LAYOUT)


def switches(vllm_config: VllmConfig) -> dict[str, Json]:
    """Return what changes KV and differs from neutral, by part of the configuration; mostly nothing.

    Raises ConfigError where KV depends on what an engine has computed before.
    """
    found: dict[str, dict[str, Json]] = {"environment": _environment(ENVIRONMENT)}
    for (part, field), neutral in FIELDS.items():
        value = _plain(getattr(getattr(vllm_config, part, None), field, neutral[0]))
        if value not in neutral:
            found.setdefault(part, {})[field] = value
    for part, fields in (
        ("model_config", _model(vllm_config.model_config)),
        ("multimodal_config", _multimodal(vllm_config)),
        ("parallel_config", _worker(vllm_config)),
        ("ec_transfer_config", _encoder_outputs(vllm_config)),
        ("lora_config", _adapters(vllm_config)),
    ):
        found.setdefault(part, {}).update(fields)
    result: dict[str, Json] = {part: dict(fields) for part, fields in found.items() if fields}
    if plugins := _plugins():
        result["plugins"] = plugins
    if vllm_config.additional_config and current_platform.is_out_of_tree():
        result["additional_config"] = _plain(vllm_config.additional_config)
    if vllm_config.model_config.quantization and (packages := _kernel_packages()):
        result["kernel_packages"] = packages
    return result


def _adapters(vllm_config: VllmConfig) -> dict[str, Json]:
    """Return how exact the factors of adapters are, where they are less or more so than the model."""
    dtype = getattr(vllm_config.lora_config, "lora_dtype", "auto")
    same = dtype in (None, "auto", vllm_config.model_config.dtype)
    return {} if same else {"lora_dtype": str(dtype).removeprefix("torch.")}


def _environment(neutrals: dict[str, Json]) -> dict[str, Json]:
    found: dict[str, Json] = {}
    for name, neutral in neutrals.items():
        value = _plain(getattr(envs, name, neutral))
        written_out = name in _WRITTEN_OUT and name in os.environ
        if value is not None and (value != neutral or written_out):
            found[name] = value
    return found


def _model(model: Any) -> dict[str, Json]:
    """Return what a model takes from `max_model_len` besides RoPE."""
    found: dict[str, Json] = {}
    # The temperature of Llama 4's attention: on if the context is longer than 32768, unless the configuration
    # of generation says. vLLM 0.32 notes it in a copy that nobody keeps (llama4.py:719).
    if str(getattr(model.hf_text_config, "model_type", "")).startswith("llama4"):
        chosen = {**model.try_get_generation_config(), **model.override_generation_config}
        tuned = chosen.get("attn_temperature_tuning", model.max_model_len > 32768)
        found["attn_temperature_tuning"] = _plain(tuned)
    # Images are made as large as the context allows. The tokens that stand for a large and a small one are
    # equal as far as both go, and so are their keys (processors/nano_nemotron_vl.py:330,
    # dots3_note/common/processor.py:387).
    names = getattr(model.hf_config, "architectures", None) or ()
    if any(str(name).startswith(("NemotronH_", "Dots3Note")) for name in names):
        found["max_model_len"] = int(model.max_model_len)
    return found


def _multimodal(vllm_config: VllmConfig) -> dict[str, Json]:
    model = vllm_config.model_config
    multimodal = getattr(model, "multimodal_config", None)
    found: dict[str, Json] = {}
    if getattr(multimodal, "mm_encoder_attn_dtype", None) is not None:
        path = getattr(multimodal, "mm_encoder_fp8_scale_path", None)
        if path is None:
            raise ConfigError(
                "option 'mm_encoder_fp8_scale_path': found none, expected a file with "
                "'mm_encoder_attn_dtype': scales that follow the images seen before differ between "
                "processes, so their KV cannot be shared"
            )
        try:
            with open(path, "rb") as file:
                found["mm_encoder_fp8_scales"] = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror or error}") from error
    # An image that attends in both directions has other KV when it is computed in pieces. vLLM 0.32 forbids
    # pieces on CUDA and ROCm only (platforms/cuda.py:337).
    in_pieces = not getattr(vllm_config.scheduler_config, "disable_chunked_mm_input", True)
    if multimodal is not None and in_pieces and getattr(model, "is_mm_prefix_lm", False):
        found["chunked_mm_input"] = True
    return found


def _worker(vllm_config: VllmConfig) -> dict[str, Json]:
    name = vllm_config.parallel_config.worker_cls
    name = name if isinstance(name, str) else f"{name.__module__}.{name.__qualname__}"
    return {} if name == "auto" or name.startswith("vllm.") else {"worker_cls": name}


def _encoder_outputs(vllm_config: VllmConfig) -> dict[str, Json]:
    """Return who brings outputs of encoders that other engines computed; the image's hash is their key."""
    transfer = getattr(vllm_config, "ec_transfer_config", None)
    if transfer is None or not getattr(transfer, "is_ec_consumer", True):
        return {}
    return {"ec_connector": str(transfer.ec_connector)}


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


def _kernel_packages() -> list[Json]:
    """Return the packages that `auto` may choose kernels from: of two nodes one may lack them."""
    probes = {
        "aiter": getattr(import_utils, "has_aiter", None),
        "deep_gemm": getattr(import_utils, "has_deep_gemm", None),
        "flashinfer": has_flashinfer,
        "humming": getattr(import_utils, "has_humming", None),
    }
    return [name for name, probe in probes.items() if probe is not None and probe()]


def _plain(value: Any) -> Json:
    """Return a setting as JSON: enumerations by name, classes and functions by where they are defined."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Enum):
        return value.value if isinstance(value, str) else value.name
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return [*sorted(map(str, value))]
    name = getattr(value, "__qualname__", None) or type(value).__qualname__
    return f"{getattr(value, '__module__', '')}.{name}"
