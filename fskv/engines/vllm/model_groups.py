"""The program that asks vLLM for the KV groups of one model; `fskv plan` starts a process of it for each.

It builds vLLM's own class of the model on the `meta` device, where weights take no memory, and goes on as an
engine does at its start. The weights' quantisation is left out: it decides the dtype of the KV and nothing
else of it, and vLLM's own resolver reads that before. Code that comes with a checkpoint never runs.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch
from vllm.config import KVTransferConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import fused_moe
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm.platforms.interface import Platform
from vllm.transformers_utils.config import get_config
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase
from vllm.utils.torch_utils import resolve_kv_cache_dtype_string
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.utils import get_supported_kv_cache_layouts, resolve_kv_cache_layout
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs, resolve_kv_cache_block_sizes
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
from vllm.v1.worker.workspace import init_workspace_manager

from fskv.engines.vllm.identity import engine_groups
from fskv.engines.vllm.plugin import register

_MEMORY = 1 << 60  # bytes for KV: the longest request of any model fits
# Libraries that a CPU build does without.
_ABSENT = ("torchvision", "torchaudio", "cutlass", "cuda")


def main(directory: str) -> None:
    """Read config.json and request.json in the directory, write answer.json."""
    request = json.loads(Path(directory, "request.json").read_bytes())
    try:
        answer = _answer(directory, request)
    except Exception as error:  # vLLM's classes raise whatever they like
        errors = getattr(error, "errors", None)  # of pydantic
        reason = errors()[0]["msg"] if callable(errors) else str(error)
        answer = {"refused": f"{type(error).__name__}: {reason}"}
    text = json.dumps(answer, default=lambda kind: kind.value)
    Path(directory, "answer.json").write_text(text)


def _answer(directory: str, request: dict[str, Any]) -> dict[str, Any]:
    """Return an engine's groups; `request` holds options by their names in EngineArgs, and the platform."""
    on_cpu = bool(current_platform.is_cpu())
    for_cpu = request.pop("platform") == "cpu"
    if for_cpu and not on_cpu:
        raise ValueError("--platform cpu: this vLLM is built for another one")
    by_rule = on_cpu and not for_cpu
    _stub_what_keeps_no_kv()
    if by_rule:
        _choose_as_on_gpus()
    register()
    request["kv_cache_dtype"] = _kv_cache_dtype(directory, request["kv_cache_dtype"])
    os.mkdir(f"{directory}/kv")
    transfer = KVTransferConfig(
        kv_connector="FskvConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"root": f"{directory}/kv"},
    )
    config = EngineArgs(
        model=directory,
        skip_tokenizer_init=True,
        language_model_only=True,
        enforce_eager=True,
        load_format="dummy",
        enable_prefix_caching=True,
        kv_transfer_config=transfer,
        **request,
    ).create_engine_config()
    kv = _kv_cache_config(directory, config, by_rule)
    return {
        "groups": [
            (asdict(group.spec), group.layer_nbytes, group.layer_names)
            for group in engine_groups(config, kv)
        ],
        "tokens_per_hash": resolve_kv_cache_block_sizes(kv, config)[1],
        "max_model_len": config.model_config.max_model_len,
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "by_rule": by_rule,
        "prefix_caching": bool(config.cache_config.enable_prefix_caching),
    }


def _kv_cache_dtype(directory: str, option: str) -> str:
    """Return the dtype that vLLM makes of --kv-cache-dtype; takes the quantisation out of the directory's
    files.
    """
    hf = get_config(directory, trust_remote_code=False)
    holder: Any = SimpleNamespace(hf_config=hf)
    ModelArchConfigConvertorBase._normalize_quantization_config(holder, hf)  # noqa: SLF001
    found = str(resolve_kv_cache_dtype_string(option, holder))
    path = Path(directory, "config.json")
    tree = json.loads(path.read_bytes())
    for part in (tree, tree.get("text_config")):
        quant: Any = part.pop("quantization_config", None) if isinstance(part, dict) else None
        scheme = quant.get("kv_cache_scheme") if isinstance(quant, dict) else None
        if scheme and found == "auto" and quant.get("quant_method") == "compressed-tensors":
            found = "fp8"  # as vLLM's Attention does
    path.write_text(json.dumps(tree))
    path.with_name("hf_quant_config.json").unlink(missing_ok=True)
    return found


def _kv_cache_config(directory: str, config: VllmConfig, by_rule: bool) -> KVCacheConfig:
    """Build the model, and sort its layers as EngineCore does with those of a rank."""
    cache, platform = config.cache_config, type(current_platform)
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(1, 0, f"file://{directory}/peers", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)
        # One process stands for a rank of many: layers ask for the number of ranks alone.
        parallel_state.get_tp_group().world_size = config.parallel_config.tensor_parallel_size
        torch.set_default_dtype(config.model_config.dtype)
        with torch.device("meta"):
            initialize_model(config)
        if by_rule:
            if not cache.user_specified_block_size:
                cache.block_size = cache.DEFAULT_BLOCK_SIZE
            if cache.mamba_cache_mode == "align":
                cache.mamba_block_size = cache.block_size
            every: Any = Platform.update_block_size_for_backend
            every.__func__(platform, config)  # the CPU's own is another
        else:
            platform.update_block_size_for_backend(config)
        register_all_kvcache_specs(config)
        specs = get_kv_cache_spec(config)
        layouts = get_supported_kv_cache_layouts(get_current_attn_backends(config))
        resolve_kv_cache_layout(config, [[one.name for one in layouts]], specs.values())
        return get_kv_cache_configs(config, [specs], [_MEMORY])[0]


def _choose_as_on_gpus() -> None:
    """Have a CPU build choose dtypes of states and sizes of blocks as for CUDA, and take sparse attention."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    library: Any = torch
    attention: Any = CPUAttentionBackend
    mla: Any = CPUMLABackend
    platform: Any = type(current_platform)
    library.cpu._is_avx512_bf16_supported = lambda: False  # noqa: SLF001
    # Without AMX, MLA on a CPU has no prefix caching.
    library.cpu._is_amx_tile_supported = lambda: True  # noqa: SLF001
    library.accelerator.empty_cache = lambda: None
    library.cuda.Event = library.cuda.Stream = MagicMock
    init_workspace_manager(torch.device("meta"))
    attention.get_supported_kernel_block_sizes = lambda *_: [MultipleOf(16)]
    mla.get_supported_kernel_block_sizes = lambda *_: [64]
    del mla.supports_block_size
    chosen = platform.get_attn_backend_cls

    def choose(backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
        if attn_selector_config.use_sparse:
            return str(AttentionBackendEnum.FLASHMLA_SPARSE.get_path())
        if attn_selector_config.use_mla:
            return str(AttentionBackendEnum.CPU_MLA.get_path())
        return str(chosen(backend, attn_selector_config, num_heads))

    platform.get_attn_backend_cls = staticmethod(choose)


def _stub_what_keeps_no_kv() -> None:
    """Replace experts, and missing libraries for images and kernels, by empty stand-ins."""
    layers: Any = fused_moe
    layers.FusedMoEFactory = MagicMock()
    classes: Any = registry
    classes._run_in_subprocess = lambda look: look()  # noqa: SLF001
    sys.meta_path.append(_Absent())


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import finder with an empty module for each library in _ABSENT that is not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in _ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        return MagicMock(__spec__=spec, __path__=[])

    def exec_module(self, module: Any) -> None:
        pass


if __name__ == "__main__":
    main(sys.argv[1])
