"""Identities of lines of `vllm serve` without an engine: the configuration is vLLM's own.

As a program it prints the digest of each line of `LINES`, for comparison with another process.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from typing import Any

import engine_lab as lab

PLAIN = {
    "dtype": "float32",
    "block_size": 32,
    "max_model_len": 1024,
    "skip_tokenizer_init": True,
}


@dataclass(frozen=True)
class Line:
    """What a line has besides the model: options of vLLM, variables, and options of fskv."""

    engine: dict[str, Any] = field(default_factory=dict)
    model: str = "llama"
    store: dict[str, Any] = field(default_factory=dict)


def config_of(line: Line) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    arguments = {"model": lab.checkpoint(line.model), **PLAIN, **line.engine}
    return EngineArgs(**arguments).create_engine_config()


def identity_of(config: Any, **store: Any) -> Any:
    from fskv.config import StoreConfig
    from fskv.engines.vllm.identity import build_identity

    options = StoreConfig.from_mapping({"root": "/kv", "weights_id": "one", **store})
    return build_identity(config, options, [], [], 4, 32, {})


# Lines as people write them. Ports, hosts and names of this process go in where `own` has them.
def lines(own: dict[str, Any]) -> list[Line]:
    port, memory = own.get("port", 8000), own.get("memory", 0.5)
    return [
        Line(),
        *(Line({"dtype": dtype}) for dtype in ("bfloat16", "float16", "half", "auto")),
        *(Line({"enforce_eager": eager, "gpu_memory_utilization": memory}) for eager in (True, False)),
        *(Line({"max_num_seqs": n, "master_port": port}) for n in (8, 64, 256)),
        *(Line({"optimization_level": n, "seed": port}) for n in (0, 1, 2, 3)),
        *(Line({"tensor_parallel_size": n, "data_parallel_rpc_port": port}) for n in (1, 2)),
        *(Line({"kv_cache_dtype": kind}) for kind in ("auto", "fp8_e5m2")),
        Line({"block_size": 64, "enable_chunked_prefill": True, "max_num_batched_tokens": 4096}),
        Line({"block_size": 128, "scheduling_policy": "priority", "async_scheduling": False}),
        Line({"prefix_caching_hash_algo": "sha256_cbor", "served_model_name": f"name-{port}"}),
        Line({"hf_overrides": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}}),
        Line({"hf_overrides": {"max_position_embeddings": 4096}, "max_model_len": 2048}),
        Line({"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}, store={"trust": ["lora"]}),
        Line({"load_format": "safetensors", "download_dir": own.get("home", "/nowhere")}),
        Line({"load_format": "dummy", "safetensors_load_strategy": "eager"}),
        Line({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3,
                                     "prompt_lookup_max": 4}}),
        Line({"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4]}}),
        Line({"kernel_config": {"moe_backend": "triton"}}),
        Line({"model_impl": "transformers"}),
        Line({"additional_config": {"a": [1, 2], "b": {"c": None}}}),
        Line({"mamba_ssm_cache_dtype": "float32", "hf_token": own.get("home", "x")}),
        Line({"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null",
                                   "endpoint": f"tcp://*:{port}"}}),
        Line({"quantization": "fp8", "dtype": "bfloat16", "distributed_executor_backend": "mp"}),
        Line({"override_generation_config": {"temperature": 0.1}, "generation_config": "vllm"}),
        Line({"trust_remote_code": True, "max_logprobs": 5}),
        Line(model="gemma3"),
        Line({"max_num_seqs": 4}, model="gpt_oss"),
        Line(store={"tenant": "one"}),
    ]  # fmt: skip


def digests(own: dict[str, Any]) -> list[str]:
    """Return the digest of each line, or of one in `every`."""
    chosen = lines(own)[:: own.get("every", 1)]
    return [identity_of(config_of(line), **line.store).digest16 for line in chosen]


def main() -> None:
    print("digests", json.dumps(digests(json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()
