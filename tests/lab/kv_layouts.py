"""KV caches in vLLM's six layouts on a CPU: vLLM's own functions allocate, bind and hand them over.

CPU attention takes one of the layouts alone, so no engine here shows the other five.
"""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM and torch among themselves
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import worker as offloading
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheGroupSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
    )
    from vllm.v1.kv_cache_layout import KVCacheLayout
    from vllm.v1.worker.utils import allocate_kv_cache

LAYOUTS = [layout.name for layout in KVCacheLayout]
TOKENS, HEADS, SIZE, NUM_BLOCKS = 64, 4, 32, 24
KERNEL_TOKENS = 16

_HEADS = {"block_size": TOKENS, "num_kv_heads": HEADS, "dtype": torch.bfloat16}
_STATES = {
    "block_size": TOKENS,
    "shapes": ((8, 128), (16, 64)),
    "dtypes": (torch.bfloat16, torch.float32),
}


def full(size: int = SIZE) -> Any:
    return FullAttentionSpec(**_HEADS, head_size=size)


def window() -> Any:
    return SlidingWindowSpec(**_HEADS, head_size=SIZE, sliding_window=64)


def states(**changes: Any) -> Any:
    return MambaSpec(**{**_STATES, **changes})


def latents() -> Any:
    return MLAAttentionSpec(block_size=TOKENS, num_kv_heads=1, head_size=72, dtype=torch.bfloat16)


def _uneven(*names: str) -> Any:
    sizes = {name: full(SIZE if i % 2 else 2 * SIZE) for i, name in enumerate(names)}
    return UniformTypeKVCacheSpecs(block_size=TOKENS, kv_cache_specs=sizes)


# kind of model -> the layers of each group, and their specification
MODELS: dict[str, list[tuple[tuple[str, ...], Any]]] = {
    "full": [(("l.0", "l.1", "l.2"), full())],
    "window": [(("l.0", "l.1", "l.2"), window())],
    "states": [(("l.0", "l.1", "l.2"), states())],
    "latents": [(("l.0", "l.1", "l.2"), latents())],
    "heads of two sizes": [(("l.0", "l.1", "l.2"), _uneven("l.0", "l.1", "l.2"))],
    "full and window": [(("l.0", "l.2"), full()), (("l.1", "l.3"), window())],
    "full and states": [
        (("l.0", "l.2"), full()),
        (("l.1", "l.3"), states(page_size_padded=full().page_size_bytes)),
    ],
}


class _Layer:
    """A layer that binds as vLLM's do."""

    kv_cache: Any
    bind_kv_cache = AttentionLayerBase.bind_kv_cache


class _Latents(_Layer):
    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        self.kv_cache = kv_cache.squeeze(1)  # MLAAttention


class _States(_Layer):
    bind_kv_cache = MambaBase.bind_kv_cache

    def get_state_shape(self) -> Any:
        return _STATES["shapes"]

    def get_state_dtype(self) -> Any:
        return _STATES["dtypes"]


class Cache:
    """The KV cache of a model: `views` by layer as its kernels see them, and what a connector is given.

    Raises what vLLM raises where it does not allow a combination.
    """

    def __init__(self, model: str, layout: str, kernel_tokens: int | None = None) -> None:
        groups = [KVCacheGroupSpec(list(names), spec) for names, spec in MODELS[model]]
        chosen = KVCacheLayout[layout]
        cache_config = SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: chosen,
            num_gpu_blocks_override=NUM_BLOCKS,
            prefix_cache_retention_interval=None,
            kv_cache_layout=layout,
        )
        self.layers: dict[str, Any] = {}
        self.vllm_config = SimpleNamespace(
            attention_config=SimpleNamespace(hisparse_config=None),
            cache_config=cache_config,
            compilation_config=SimpleNamespace(static_forward_context=self.layers),
            parallel_config=SimpleNamespace(
                decode_context_parallel_size=1, prefill_context_parallel_size=1
            ),
            model_config=SimpleNamespace(dtype=torch.bfloat16, max_model_len=1 << 20),
        )
        self.config = get_kv_cache_config_from_groups(self.vllm_config, groups, 1 << 30)
        sizes = [
            kernel_tokens if kernel_tokens and not isinstance(spec, MambaSpec) else TOKENS
            for _, spec in MODELS[model]
        ]
        self.allocated = allocate_kv_cache(self.config, torch.device("cpu"), chosen, sizes)
        for names, spec in MODELS[model]:
            kinds = {MLAAttentionSpec: _Latents, MambaSpec: _States}
            for name in names:
                self.layers[name] = kinds.get(type(spec), _Layer)()
                self.layers[name].bind_kv_cache(self.allocated[name])

    @property
    def num_blocks(self) -> int:
        return int(self.config.num_blocks)

    @property
    def memory(self) -> torch.Tensor:
        """All of it, as bytes."""
        storage = next(iter(self.allocated.values())).untyped_storage()
        return torch.tensor([], dtype=torch.uint8).set_(storage)

    def handed_over(self) -> Any:
        """Return what vLLM's offloading worker gives a connector."""
        got: list[Any] = []
        half = object.__new__(offloading.OffloadingConnectorWorker)
        half.kv_cache_config, half.vllm_config, half.worker = self.config, self.vllm_config, None
        half.spec = SimpleNamespace(get_worker=got.append)
        mappings, offloading.derive_canonical_mappings = (
            offloading.derive_canonical_mappings,
            lambda *_: {},
        )
        try:
            half.register_kv_caches(self.allocated)
        finally:
            offloading.derive_canonical_mappings = mappings
        return got[0]

    def block(self, name: str, block: int) -> bytes:
        """Return the bytes that a layer's kernels see of a block."""
        bound = self.layers[name].kv_cache
        tensors = bound if isinstance(bound, tuple) else (bound,)
        found = []
        for tensor in tensors:
            each = len(tensor) // self.num_blocks
            part = tensor[block * each : (block + 1) * each]
            found.append(part.contiguous().view(torch.uint8).numpy().tobytes())
        return b"".join(found)
