"""The settings of SGLang's server that cannot change KV. All others are in the identity.

Each name stands in a group with the one reason for all of it. A trailing "*" covers all names with that
beginning.
"""

from __future__ import annotations

from fskv.identity.rules import Names

_ARGUMENTS = {
    "it stands in the identity, or is what that was read from": """
        model_path revision download_dir dtype kv_cache_dtype page_size attention_backend
        prefill_attention_backend decode_attention_backend device
    """,
    "it makes and chooses tokens, which are in the key of a page": """
        chat_template trust_request_chat_template completion_template hf_chat_template_name
        default_chat_template_kwargs skip_tokenizer_init detokenizer_worker_num reasoning_parser
        tool_call_parser tool_server strip_thinking_cache enable_strict_thinking tokenizer_*
        enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_* enable_tokenizer_batch_encode
        disable_tokenizer_batch_decode allow_auto_truncate random_seed sampling_backend asr_*
        grammar_backend constrained_json_* sampling_defaults preferred_sampling_params watermark_*
        enable_watermark enable_custom_logit_processor sampling_mask_max_tokens
        disable_outlines_disk_cache enable_cache_report return_input_ids return_output_ids
        enable_response_store
    """,
    "it is made by the machine: addresses, ranks, processes, secrets, places of files": """
        served_model_name host port fastapi_root_path grpc_* smg_* sidecar sidecar_args warmups
        skip_server_warmup http2_* enable_http2 ssl_* enable_ssl_refresh api_key admin_api_key
        nccl_port dist_timeout dist_init_addr gated_launch_port nnodes node_rank base_gpu_id
        gpu_id_step numa_node use_ray custom_sigquit_handler watchdog_timeout
        soft_watchdog_timeout sleep_on_idle load_balance_method enable_p2p_check pre_warm_nccl
        file_storage_path enable_http_worker_reuseport engine_info_bootstrap_port
        disaggregation_bootstrap_port encoder_bootstrap_port
    """,
    "it decides what runs when, what is kept and where memory goes, also how weights come into it": """
        mem_fraction_static max_running_requests max_queued_requests max_total_tokens
        chunked_prefill_size prefill_decode_interval prefill_decode_interval_min_bs
        enable_dynamic_chunking max_prefill_tokens prefill_max_requests schedule_*
        enable_priority_scheduling disable_priority_preemption default_priority_value
        abort_on_priority_when_disabled priority_scheduling_preemption_threshold
        retraction_policy disable_overlap_schedule num_continuous_decode_steps bucket_*
        scheduler_recv_interval enable_mixed_chunk enable_prefill_delayer prefill_delayer_*
        min_free_slots_delay pp_max_micro_batch_size pp_async_batch_depth stream_interval
        batch_notify_size incremental_streaming_output stream_response_default_include_usage
        enable_hierarchical_cache hicache_* radix_eviction_* lora_eviction_* max_mamba_cache*
        _radix_eviction_policy_explicitly_set num_reserved_decode_tokens gc_* enable_memory_saver
        weight_loader_disable_mmap weight_loader_prefetch_* weight_loader_drop_cache_after_load
        startup_weight_load_mode enable_weights_cpu_backup
    """,
    "it changes rounding alone: graphs run the same kernels": """
        disable_prefill_cuda_graph disable_decode_cuda_graph disable_cuda_graph cuda_graph_*
        disable_cuda_graph_padding enable_profile_cuda_graph enable_cudagraph_gc debug_cuda_graph
        enable_layerwise_nvtx_marker
    """,
    "it logs and counts": """
        log_* otlp_* export_metrics_* forward_pass_metrics_* uvicorn_access_log_exclude_prefixes
        crash_dump_folder show_time_cost enable_metrics enable_mfu_metrics stat_loggers
        enable_metrics_for_all_schedulers load_snapshot_publish_interval extra_metric_labels
        prompt_tokens_buckets generation_tokens_buckets decode_log_interval kv_events_config
        enable_request_time_stats_logging load_publish_endpoint enable_forward_pass_metrics
        enable_trace trace_modules
    """,
}
_VARIABLES = """
    SGLANG_LOG_* SGLANG_TEST_* SGLANG_HICACHE_* SGLANG_DISAGGREGATION_* SGLANG_MOONCAKE_* SGLANG_PROFILE_*
    SGLANG_TORCH_PROFILER_* SGLANG_GRAMMAR_* SGLANG_PORT SGLANG_HOST SGLANG_USE_CPU_ENGINE SGLANG_RUN_ID
    SGLANG_BACKUP_PORT* SGLANG_CACHE_DIR SGLANG_HEALTH_* SGLANG_IS_IN_CI* SGLANG_KILLPG_* SGLANG_PYSPY_*
    SGLANG_SCHEDULER_* SGLANG_REQ_* SGLANG_FORCE_SHUTDOWN SGL_LOG_* SGL_FORCE_SHUTDOWN
"""  # they log and test, or are of files, addresses and the storage
# SGLang reads these; what the libraries below it read, `rules` knows.
VARIABLES = (
    "SGLANG_*",
    "SGL_*",
    "USE_ROCM_*",
    "USE_TRITON_*",
    "DEEP_NORMAL_MODE_*",
    "ASCEND_USE_*",
)

HARMLESS_ARGUMENTS = Names([name for names in _ARGUMENTS.values() for name in names.split()])
HARMLESS_VARIABLES = Names(_VARIABLES.split())
