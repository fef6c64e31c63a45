"""The arguments of SGLang's server that cannot change KV: all others are in the identity.

An argument that is not named here counts, also one of a later version. So two engines may have namespaces of
their own where they could share, and never one where they must not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

from fskv.errors import ConfigError
from fskv.namespace import Json

# Where it listens, what it logs and counts, how text becomes tokens and back, what is scheduled when, how
# tokens are chosen, where host memory and files are. Some hold secrets: they must not be in a manifest.
_PREFIXES = (
    *("log_", "ssl_", "http2_", "grpc_", "smg_", "otlp_", "bucket_", "asr_", "watermark_"),
    *("hicache_", "prefill_delayer_", "schedule_", "tokenizer_", "dynamic_batch_tokenizer_"),
    *("cuda_graph_", "constrained_json_", "export_metrics_", "forward_pass_metrics_"),
    *("max_mamba_cache", "gc_", "radix_eviction_", "lora_eviction_"),
)
_NAMES = frozenset(
    (
        # Fields of the identity of their own, or what they were read from.
        *("model_path", "revision", "download_dir", "dtype", "kv_cache_dtype", "page_size"),
        *("attention_backend", "prefill_attention_backend", "decode_attention_backend", "device"),
        # Names, text.
        *(
            "served_model_name",
            "chat_template",
            "trust_request_chat_template",
            "completion_template",
        ),
        *("hf_chat_template_name", "default_chat_template_kwargs", "skip_tokenizer_init"),
        *("detokenizer_worker_num", "reasoning_parser", "tool_call_parser", "tool_server"),
        *("strip_thinking_cache", "enable_strict_thinking", "enable_dynamic_batch_tokenizer"),
        *("enable_tokenizer_batch_encode", "disable_tokenizer_batch_decode", "allow_auto_truncate"),
        # Addresses, processes, secrets.
        *("host", "port", "fastapi_root_path", "grpc_mode", "sidecar", "sidecar_args", "warmups"),
        *("skip_server_warmup", "enable_http2", "enable_ssl_refresh", "api_key", "admin_api_key"),
        *(
            "nccl_port",
            "dist_timeout",
            "dist_init_addr",
            "gated_launch_port",
            "nnodes",
            "node_rank",
        ),
        *("base_gpu_id", "gpu_id_step", "numa_node", "use_ray", "custom_sigquit_handler"),
        *("watchdog_timeout", "soft_watchdog_timeout", "sleep_on_idle", "load_balance_method"),
        *("enable_p2p_check", "pre_warm_nccl", "file_storage_path", "enable_http_worker_reuseport"),
        *("engine_info_bootstrap_port", "disaggregation_bootstrap_port", "encoder_bootstrap_port"),
        # Scheduling and the room for KV.
        *("mem_fraction_static", "max_running_requests", "max_queued_requests", "max_total_tokens"),
        *("chunked_prefill_size", "prefill_decode_interval", "prefill_decode_interval_min_bs"),
        *("enable_dynamic_chunking", "max_prefill_tokens", "prefill_max_requests"),
        *("enable_priority_scheduling", "disable_priority_preemption", "default_priority_value"),
        *("abort_on_priority_when_disabled", "priority_scheduling_preemption_threshold"),
        *("retraction_policy", "disable_overlap_schedule", "num_continuous_decode_steps"),
        *("scheduler_recv_interval", "enable_mixed_chunk", "enable_prefill_delayer"),
        *("min_free_slots_delay", "pp_max_micro_batch_size", "pp_async_batch_depth"),
        *("stream_interval", "batch_notify_size", "incremental_streaming_output"),
        *("stream_response_default_include_usage", "enable_hierarchical_cache"),
        *("_radix_eviction_policy_explicitly_set", "num_reserved_decode_tokens"),
        # Graphs, that run the same kernels.
        *("disable_prefill_cuda_graph", "disable_decode_cuda_graph", "disable_cuda_graph"),
        *("disable_cuda_graph_padding", "enable_profile_cuda_graph", "enable_cudagraph_gc"),
        *("debug_cuda_graph", "enable_layerwise_nvtx_marker"),
        # Choosing tokens; what comes back.
        *("random_seed", "sampling_backend", "grammar_backend", "sampling_defaults"),
        *("preferred_sampling_params", "enable_custom_logit_processor", "sampling_mask_max_tokens"),
        *("disable_outlines_disk_cache", "enable_cache_report", "return_input_ids"),
        *("return_output_ids", "enable_response_store", "enable_watermark"),
        # Logs and metrics.
        *("uvicorn_access_log_exclude_prefixes", "crash_dump_folder", "show_time_cost"),
        *("enable_metrics", "enable_mfu_metrics", "enable_metrics_for_all_schedulers"),
        *("load_snapshot_publish_interval", "extra_metric_labels", "prompt_tokens_buckets"),
        *("generation_tokens_buckets", "decode_log_interval", "enable_request_time_stats_logging"),
        *("kv_events_config", "load_publish_endpoint", "enable_forward_pass_metrics"),
        *("enable_trace", "trace_modules", "export_metrics_to_file", "stat_loggers"),
        # How weights come into memory, not which.
        *("weight_loader_disable_mmap", "weight_loader_prefetch_checkpoints"),
        *("weight_loader_prefetch_num_threads", "weight_loader_drop_cache_after_load"),
        *("startup_weight_load_mode", "enable_memory_saver", "enable_weights_cpu_backup"),
    )
)
# How variables begin that SGLang reads, and the libraries below it: which kernels, of which precision.
_ENVIRONMENT = (
    *("SGLANG_", "SGL_", "AITER_", "FLA_", "FLASHINFER_", "ROCM_QUICK_REDUCE_", "TRTLLM_"),
    *("USE_ROCM_", "USE_TRITON_", "DEEP_NORMAL_MODE_", "ASCEND_USE_"),
    *("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_"),
)
# Of those. SGLang sets some itself, by what it finds and by where its caches are.
_HARMLESS = re.compile(
    "SGL(ANG)?_(LOG_|TEST_|HICACHE_|DISAGGREGATION_|MOONCAKE_|PROFILE_|TORCH_PROFILER_|GRAMMAR_|PORT$|HOST_|"
    "USE_CPU_ENGINE$|RUN_ID$|BACKUP_PORT|CACHE_DIR$|HEALTH_|IS_IN_CI|KILLPG_|PYSPY_|SCHEDULER_|REQ_|"
    "FORCE_SHUTDOWN$)|"
    "FLASHINFER_(WORKSPACE_BASE$|CUBIN|CUDA_ARCH_LIST$|LOG|DISABLE_VERSION_CHECK$)|AITER_(LOG_|JIT_DIR$)|"
    "TRTLLM_ENABLE_PDL$"
)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def telling_arguments(arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Json]:
    """Return the arguments, as resolved, that may change KV and are not what they are by default.

    Raises ConfigError for one whose value is no text, number, list or mapping: it cannot be compared.
    """
    told: dict[str, Json] = {}
    for name, value in sorted(arguments.items()):
        if name in _NAMES or name.startswith(_PREFIXES):
            continue
        if name in defaults and _same(value, defaults[name]):
            continue
        told[name] = _json(value, name)
    return told


def telling_environment(environment: Mapping[str, str]) -> dict[str, Json]:
    """Return the variables that are set and may change KV."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(_ENVIRONMENT) and not _HARMLESS.match(name)
    }


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


def _json(value: Any, name: str) -> Json:
    if isinstance(value, Enum):
        return _json(value.value, name)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list | tuple | set | frozenset):
        items = [_json(item, name) for item in value]
        return sorted(items, key=str) if isinstance(value, set | frozenset) else items
    if isinstance(value, Mapping):
        return {str(key): _json(item, name) for key, item in value.items()}
    text = repr(value)
    if _ADDRESS.search(text):
        raise ConfigError(
            f"server argument '{name}': found {type(value).__name__}, expected nothing: fskv cannot tell "
            "whether it changes KV"
        )
    return text
