"""The settings of vLLM that cannot change KV at equal keys: all others are in the identity.

Each name stands in a group with the one reason that holds for all of it. They were judged by how vLLM 0.32
uses them. A "*" stands for whole parts whose purpose is the reason.
"""

from __future__ import annotations

from fskv.identity.rules import Names

# Reason -> part of VllmConfig -> its fields.
_FIELDS = {
    "it stands in the identity by what it resolves to, or by what is loaded": {
        "": "quant_config",
        "model_config": """
            model runner convert trust_remote_code dtype hf_config hf_text_config hf_config_path
            revision max_model_len disable_sliding_window config_format hf_overrides
            generation_config override_generation_config
        """,
        "cache_config": """
            block_size kv_cache_layout prefix_match_unit cache_dtype sliding_window
            prefix_caching_hash_algo kv_cache_dtype_skip_layers mamba_block_size mamba_cache_dtype
            mamba_ssm_cache_dtype mamba_cache_mode use_kda_recoverssm hash_block_size
            swa_bounded_replay
        """,
        "parallel_config": """
            pipeline_parallel_size tensor_parallel_size prefill_context_parallel_size
            decode_context_parallel_size dcp_kv_cache_interleave_size cp_kv_cache_interleave_size
        """,
        "scheduler_config": """
            max_model_len disable_chunked_mm_input disable_hybrid_kv_cache_manager
        """,
        "device_config": "*",
        "load_config": "load_format model_loader_extra_config",
        "attention_config": "backend use_non_causal",
        "kv_transfer_config": "kv_connector_extra_config",
        "model_config.multimodal_config": "mm_encoder_fp8_scale_path",
        "speculative_config": "*",
        "lora_config": "lora_dtype",
    },
    "it listens, logs, counts or waits": {
        "": "observability_config profiler_config kv_events_config shutdown_timeout",
        "model_config": "served_model_name hf_token allow_deprecated_quantization",
        "kernel_config": "enable_cutedsl_warmup enable_jit_warmup",
        "model_config.multimodal_config": """
            mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin
        """,
        "parallel_config.eplb_config": "log_balancedness log_balancedness_interval",
        "observability_config": "*",
        "logging_config": "*",
        "profiler_config": "*",
        "kv_events_config": "*",
    },
    "it decides what runs when, what is kept and where memory goes": {
        "model_config": """
            sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph
            enable_nccl_comm_suspend enable_cumem_allocator
        """,
        "cache_config": """
            gpu_memory_utilization is_attention_free num_gpu_blocks_override
            prefix_cache_retention_interval mamba_page_size_padded skip_page_size_padded
            enable_mamba_shared_prefix_checkpoint num_gpu_blocks num_cpu_blocks kv_cache_size_tokens
            kv_cache_max_concurrency cache_hit_alignment_tokens kv_sharing_fast_prefill
            kv_cache_memory_bytes
        """,
        "scheduler_config": """
            runner_type max_num_queued_reqs max_num_queued_tokens is_multimodal_model
            max_num_encoder_input_tokens encoder_cache_size scheduler_reserve_full_isl watermark
            stream_interval
        """,
        "offload_config": "offload_backend",
        "engram_config": "cpu_offload embedding_across_dp dp_shared_memory use_thp",
        "lora_config": """
            max_lora_rank max_loras fully_sharded_loras max_cpu_loras specialize_active_lora
            enable_mixed_moe_lora_format enable_moe_shared_loras max_lora_cls_labels
        """,
        "model_config.multimodal_config": """
            mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_encoder_only
            skip_mm_profiling mm_tensor_ipc mm_ipc_gpu_memory_gb
        """,
        "attention_config.hisparse_config": "device_buffer_size eager_host_mirror",
        "compilation_config.pass_config": "eliminate_noops",
        "parallel_config.eplb_config": "use_async communicator enable_migration_batching",
        "offload_config.uva": "cpu_offload_gb cpu_offload_params",
        "offload_config.prefetch": """
            offload_group_size offload_num_in_group offload_prefetch_step offload_params
        """,
    },
    "it makes, chooses or limits tokens and media, which are in the key of a block": {
        "model_config": """
            tokenizer tokenizer_mode seed tokenizer_revision spec_target_max_model_len
            return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay
            logits_processors io_processor_plugin renderer_num_workers allowed_local_media_path
            allowed_media_domains skip_tokenizer_init
        """,
        "parallel_config": "enable_batch_sharded_sampling",
        "aux_output_config": "max_bytes",
        "lora_config": "default_mm_loras enable_tower_connector_lora",
        "diffusion_config": "canvas_length max_denoising_steps",
        "model_config.pooler_config": """
            use_activation enable_flash_late_interaction dimensions enable_chunked_processing
            max_embed_len logit_mean logit_sigma step_tag_id returned_token_ids
        """,
        "model_config.multimodal_config": """
            language_model_only limit_per_prompt enable_mm_embeds mm_hasher_algorithm
        """,
        "structured_outputs_config": "*",
        "watermark_config": "*",
        "reasoning_config": "*",
        "": "watermark_config reasoning_config structured_outputs_config diffusion_config",
    },
    "it is made at run time or by the machine: addresses, ranks, devices, places of files": {
        "": "instance_id",
        "model_config": "is_submodel_config word_embeddings_untied_by_checkpoint",
        "cache_config": """
            user_specified_block_size effective_attention_block_size _block_size_resolved
        """,
        "parallel_config": """
            data_parallel_size_local data_parallel_rank data_parallel_rank_local
            data_parallel_master_ip data_parallel_rpc_port dp_sync_interval
            data_parallel_master_port data_parallel_backend data_parallel_external_lb
            data_parallel_hybrid_lb enable_ep_weight_filter max_parallel_loading_workers
            enable_shm_tensor_arena disable_nccl_for_dp_synchronization ray_workers_use_nsight
            ray_runtime_env placement_group distributed_executor_backend worker_extension_cls
            master_addr master_port node_rank nnodes numa_bind numa_bind_nodes numa_bind_cpus
            assigned_physical_gpu_ids distributed_timeout_seconds cpu_distributed_timeout_seconds
            world_size rank _data_parallel_master_port_list _coord_store_port
            _allow_auto_resolve_cp_interleave_size data_parallel_index _api_process_count
            _api_process_rank enable_fault_tolerance
        """,
        "load_config": """
            download_dir safetensors_load_strategy safetensors_prefetch_num_threads
            safetensors_prefetch_block_size device use_tqdm_on_load pt_load_map_location
        """,
        "compilation_config": """
            debug_dump_path cache_dir compile_cache_save_format cudagraph_num_of_warmups
            cudagraph_copy_inputs local_cache_dir fast_moe_cold_start enabled_custom_ops
            disabled_custom_ops traced_files compilation_time encoder_compilation_time
            static_forward_context static_all_moe_layers
        """,
        "parallel_config.fault_tolerance_config": "engine_recovery_timeout_sec",
    },
    "it changes rounding alone: another kernel, fusion or batch of the same operation": {
        "": "optimization_level performance_mode",
        "model_config": "enforce_eager disable_cascade_attn",
        "parallel_config": """
            data_parallel_size is_moe_model enable_hc_sp enable_expert_parallel enable_eplb
            expert_placement_strategy all2all_backend disable_custom_all_reduce
            elastic_ep_max_dp_size enable_dbo ubatch_size dbo_decode_token_threshold
            dbo_prefill_token_threshold dcp_comm_backend dcp_q_replicate
        """,
        "scheduler_config": """
            max_num_batched_tokens max_num_scheduled_tokens max_num_seqs max_num_active_seqs
            long_prefill_token_threshold long_prefill_token_threshold_adaptive
            enable_chunked_prefill policy scheduler_cls prefill_schedule_interval async_scheduling
        """,
        "attention_config": """
            flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv
            tq_max_kv_splits_for_cuda_graph sparse_mla_prefill_workspace_factor flex_attn_block_m
            flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size
        """,
        "mamba_config": """
            backend enable_stochastic_rounding stochastic_rounding_philox_rounds ssu_algorithm
        """,
        "kernel_config": """
            enable_flashinfer_autotune enable_rocm_segmented_attn_autotune
            sparse_indexer_topk_backend
        """,
        "compilation_config": """
            mode backend custom_ops ir_enable_torch_wrap splitting_ops compile_mm_encoder
            cudagraph_mm_encoder encoder_cudagraph_token_budgets
            encoder_cudagraph_max_vision_items_per_batch encoder_cudagraph_max_frames_per_batch
            cudagraph_decoder_replay decoder_replay_cudagraph_capture_sizes
            decoder_replay_trim_threshold compile_sizes compile_ranges_endpoints
            inductor_compile_config cudagraph_mode cudagraph_capture_sizes cudagraph_specialize_lora
            use_inductor_graph_partition max_cudagraph_capture_size
        """,
        "model_config.multimodal_config": "mm_encoder_tp_mode mm_encoder_attn_backend",
        "parallel_config.eplb_config": "window_size step_interval num_redundant_experts policy",
        "kernel_config.ir_op_priority": "*",
        "compilation_config.pass_config": """
            fuse_norm_quant fuse_act_quant fuse_attn_quant fuse_allreduce_rms
            enable_qk_norm_rope_fusion fuse_rope_kvcache_cat_mla fuse_act_padding
            fuse_mla_dual_rms_norm fuse_rope_kvcache fuse_qk_norm_rope_kvcache
            rope_kvcache_fusion_max_token_num fi_allreduce_fusion_max_size_mb
        """,
        "compilation_config.dynamic_shapes_config": "type evaluate_guards assume_32_bit_indexing",
    },
    "it is of connectors and caches, whose KV is that of the engine": {
        "kv_transfer_config": """
            kv_load_failure_policy kv_connector engine_id kv_buffer_device kv_role kv_port
            kv_connector_module_path enable_permute_local_kv
        """,
        "ec_transfer_config": """
            engine_id ec_buffer_device ec_buffer_size ec_ip ec_port ec_connector_extra_config
            ec_connector_module_path mm_encoder_output_widths
        """,
        "ec_manager_config": "encoder_cache_manager_cls manager_config",
        "cache_config": "kv_offloading_size kv_offloading_backend",
        "": "kv_transfer_config",
    },
    "fskv refuses it, or rests": {
        "": "weight_transfer_config",
        "model_config": "model_weights enable_prompt_embeds enable_sleep_mode",
        "cache_config": "enable_prefix_caching replayssm_buffer_len use_replayssm",
        "parallel_config": "enable_elastic_ep",
        "aux_output_config": "enable_return_routed_experts",
        "model_config.pooler_config": "task pooling_type seq_pooling_type tok_pooling_type",
        "model_config.multimodal_config": "mm_processor_cache_gb",
        "weight_transfer_config": "backend",
    },
}
# Reason -> variables of vllm.envs, and those that vLLM sets itself.
_VARIABLES = {
    "it stands in the identity by what it resolves to, or by what is loaded": """
        AITER_SITUV2_* VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE
        VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_KV_CACHE_LAYOUT
        VLLM_LORA_RESOLVER_CACHE_DIR VLLM_LORA_RESOLVER_HF_REPO_LIST VLLM_MODEL_REDIRECT_PATH
        VLLM_PLUGINS VLLM_PP_LAYER_PARTITION VLLM_TARGET_DEVICE VLLM_USE_V2_MODEL_RUNNER
    """,
    "it listens, logs, counts or waits": """
        FORCE_COLOR NO_COLOR VLLM_API_KEY VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT
        VLLM_COMPUTE_NANS_IN_LOGITS VLLM_CONFIGURE_LOGGING VLLM_CUSTOM_SCOPES_FOR_PROFILING
        VLLM_DEBUG_* VLLM_DISABLE_LOG_LOGO VLLM_DO_NOT_TRACK VLLM_ENABLE_COHERE_API
        VLLM_ENABLE_RESPONSES_API_STORE VLLM_ENGINE_READY_TIMEOUT_S
        VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_GC_DEBUG VLLM_GPU_SYNC_CHECK
        VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_LOG*
        VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_NUM_BAD_WORDS
        VLLM_MAX_N_SEQUENCES VLLM_MAX_STOP_STRINGS VLLM_NO_USAGE_STATS
        VLLM_NVTX_SCOPES_FOR_PROFILING VLLM_PATTERN_MATCH_DEBUG VLLM_RAISE_ON_LOGIT_NANS
        VLLM_SKIP_MODEL_NAME_VALIDATION VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY
        VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS VLLM_TRACE_FUNCTION VLLM_USAGE_SOURCE
        VLLM_USAGE_STATS_SERVER VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT VLLM_USE_RUST_BENCH
        VLLM_USE_RUST_FRONTEND VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS
        VLLM_XLA_CHECK_RECOMPILATION
    """,
    "it decides what runs when, what is kept and where memory goes": """
        VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN VLLM_CPU_KVCACHE_SPACE
        VLLM_DEEPEP_BUFFER_SIZE_MB VLLM_ENABLE_STARTUP_PLAN VLLM_FASTSAFETENSORS_QUEUE_SIZE
        VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE
        VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS VLLM_MOE_SKIP_PADDING VLLM_REPLICATE_EMBED
        VLLM_ROCM_FP8_PADDING VLLM_ROCM_MOE_PADDING VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE
        VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY
        VLLM_WEIGHT_OFFLOADING_DISABLE_UVA VLLM_WSL2_ENABLE_PIN_MEMORY
        VLLM_XPU_FORCE_N_CONTIG_WEIGHT
    """,
    "it makes, chooses or limits tokens and media, which are in the key of a block": """
        VLLM_ASSETS_CACHE VLLM_AUDIO_FETCH_TIMEOUT VLLM_ENFORCE_STRICT_TOOL_CALLING
        VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS
        VLLM_IMAGE_FETCH_TIMEOUT VLLM_KIMI_K3_AUX_ATTN_RES_STREAM VLLM_MAX_AUDIO_CLIP_FILESIZE_MB
        VLLM_MAX_AUDIO_DECODE_BYTES VLLM_MAX_AUDIO_DECODE_DURATION_S
        VLLM_MAX_AUDIO_PREPROCESS_WORKERS VLLM_MAX_EMBED_DECODE_BYTES VLLM_MAX_IMAGE_PIXELS
        VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB VLLM_MEDIA_CACHE VLLM_MEDIA_CACHE_MAX_SIZE_MB
        VLLM_MEDIA_CACHE_TTL_HOURS VLLM_MEDIA_CONNECTOR VLLM_MEDIA_FETCH_MAX_RETRIES
        VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_MEDIA_URL_ALLOW_REDIRECTS
        VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_SYSTEM_START_DATE VLLM_USE_FASTOKENS
        VLLM_USE_FLASHINFER_SAMPLER VLLM_V1_USE_OUTLINES_CACHE VLLM_VIDEO_FETCH_TIMEOUT
        VLLM_VIDEO_LOADER_BACKEND VLLM_XGRAMMAR_CACHE_MB VLLM_XPU_USE_SAMPLER_KERNEL
    """,
    "it is made at run time or by the machine: addresses, ranks, devices, places of files": """
        CMAKE_BUILD_TYPE CUDA_HOME CUDA_VISIBLE_DEVICES LD_LIBRARY_PATH LOCAL_RANK MAX_JOBS
        NVCC_THREADS S3_ACCESS_KEY_ID S3_ENDPOINT_URL S3_SECRET_ACCESS_KEY TRITON_CACHE_AUTOTUNING
        VERBOSE VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_BUILD_COMMIT
        VLLM_BUILD_PIPELINE VLLM_BUILD_URL VLLM_CACHE_ROOT VLLM_COMPILE_CACHE_SAVE_FORMAT
        VLLM_CONFIG_ROOT VLLM_CUDART_SO_PATH VLLM_CUDA_COMPATIBILITY_PATH VLLM_DEEP_GEMM_WARMUP
        VLLM_DISABLE_COMPILE_CACHE VLLM_DISABLE_REQUEST_ID_RANDOMIZATION
        VLLM_DISTRIBUTED_USE_SPLIT_GROUP VLLM_DOCKER_BUILD_CONTEXT VLLM_DP_*
        VLLM_ELASTIC_EP_DRAIN_REQUESTS VLLM_ELASTIC_EP_SCALE_UP_LAUNCH VLLM_ENABLE_CUDAGRAPH_GC
        VLLM_ENABLE_CUDA_COMPATIBILITY VLLM_ENABLE_V1_MULTIPROCESSING
        VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR VLLM_FORCE_AOT_LOAD VLLM_GPU_NIC_PCIE_MAPPING
        VLLM_HAS_FLASHINFER_CUBIN VLLM_HOST_IP VLLM_IMAGE_TAG VLLM_LOOPBACK_IP
        VLLM_MAIN_CUDA_VERSION VLLM_MQ_MAX_CHUNK_BYTES_MB VLLM_MSGPACK_ZERO_COPY_THRESHOLD
        VLLM_NCCL_INCLUDE_PATH VLLM_NCCL_SO_PATH VLLM_NIC_SELECTION_VARS
        VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_PORT VLLM_PROCESS_NAME_PREFIX
        VLLM_RANDOMIZE_DP_DUMMY_INPUTS VLLM_RAY_* VLLM_RINGBUFFER_WARNING_INTERVAL
        VLLM_RPC_BASE_PATH VLLM_RUST_FRONTEND_PATH VLLM_SERVER_DEV_MODE VLLM_SKIP_P2P_CHECK
        VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX VLLM_SKIP_VERSION_SUFFIX
        VLLM_TRITON_JIT_WARMUP_NUM_THREADS VLLM_USE_AOT_COMPILE VLLM_USE_BYTECODE_HOOK
        VLLM_USE_LAYERNAME VLLM_USE_MEGA_AOT_ARTIFACT VLLM_USE_PRECOMPILED VLLM_USE_PRECOMPILED_RUST
        VLLM_USE_RAY_* VLLM_USE_SPINLOOP_EXT VLLM_WORKER_MULTIPROC_METHOD VLLM_XLA_CACHE_PATH
    """,
    "it changes rounding alone: another kernel, fusion or batch of the same operation": """
        VLLM_ALLREDUCE_USE_FLASHINFER VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC
        VLLM_ALLREDUCE_USE_SYMM_MEM VLLM_CPU_ATTN_SPLIT_KV VLLM_CPU_CI_ENV
        VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_OMP_THREADS_BIND VLLM_DBO_COMM_SMS
        VLLM_DCP_Q_REPLICATE VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE
        VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE
        VLLM_DEEPEP_V2_PREFER_OVERLAP VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION
        VLLM_DISABLE_PYNCCL VLLM_DISABLE_SHARED_EXPERTS_STREAM
        VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE VLLM_ENABLE_GEMM_RS VLLM_ENABLE_HPC_OPS
        VLLM_ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE
        VLLM_ENABLE_PREGRAD_PASSES VLLM_FLASHINFER_ALLREDUCE_BACKEND
        VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS VLLM_GDN_DECODE_KERNEL VLLM_HUMMING_MOE_GEMM_TYPE
        VLLM_KIMI_K3_GEMM_AR VLLM_KIMI_K3_SHARD_SP_SHARED_EXPERT VLLM_LORA_DISABLE_PDL
        VLLM_LORA_ENABLE_DUAL_STREAM VLLM_MARLIN_USE_ATOMIC_ADD
        VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD
        VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD VLLM_ROCM_AITER_MLA_ASM_PADDING
        VLLM_ROCM_AITER_MLA_DCP_VERIFY VLLM_ROCM_AITER_MOE_DISPATCH_POLICY VLLM_ROCM_MONO_DECODE
        VLLM_ROCM_USE_AITER_CUSTOM_AR VLLM_ROCM_USE_AITER_FP4_ASM_GEMM VLLM_ROCM_USE_AITER_LINEAR
        VLLM_ROCM_USE_AITER_LINEAR_HIPBMM VLLM_ROCM_USE_AITER_RMSNORM
        VLLM_ROCM_USE_AITER_TRITON_GEMM VLLM_ROCM_USE_AITER_TRITON_ROPE
        VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA VLLM_ROCM_USE_SKINNY_GEMM
        VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD VLLM_SPARSE_INDEXER_MAX_LOGITS_MB
        VLLM_TPU_USING_PATHWAYS VLLM_TRITON_FORCE_FIRST_CONFIG VLLM_TRITON_USE_TD
        VLLM_TUNED_CONFIG_FOLDER VLLM_USE_BREAKABLE_CUDAGRAPH VLLM_USE_DIRECT_DCP_A2A
        VLLM_USE_DIRECT_DCP_KV_GATHER VLLM_USE_DIRECT_DCP_Q_GATHER VLLM_USE_FLASHINFER_MOE_INT4
        VLLM_USE_FUSED_MOE_GROUPED_TOPK VLLM_USE_HW_AGNOSTIC VLLM_USE_NCCL_SYMM_MEM
        VLLM_USE_OINK_OPS VLLM_USE_STANDALONE_COMPILE VLLM_USE_TRITON_AWQ VLLM_XLA_USE_SPMD
        VLLM_XPU_PP_MICROBATCH VLLM_ZENTORCH_WEIGHT_PREPACK
    """,
    "it is of connectors and caches, whose KV is that of the engine": """
        MOONCAKE_* VLLM_EC_* VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES
        VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS VLLM_MOONCAKE_* VLLM_NIXL_* VLLM_P2P_*
        VLLM_USE_SIMPLE_KV_OFFLOAD
    """,
}

HARMLESS_FIELDS = Names.of(_FIELDS)
HARMLESS_VARIABLES = Names(" ".join(_VARIABLES.values()).split())
# As options of a line, for LMCache, which knows no configuration: without those that vLLM's identity has.
HARMLESS_OPTIONS = Names(
    [
        name
        for reason, parts in _FIELDS.items()
        if not reason.startswith(("it stands in", "fskv refuses"))
        for part in ("model_config", "cache_config", "parallel_config", "scheduler_config")
        for name in parts.get(part, "").split()
    ]
)
