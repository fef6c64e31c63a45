"""Finds out how vLLM lays KV out inside a page, where neither page sizes nor the backend's name say it.

CPU_ATTN permutes keys and values for the instruction set that it finds when it starts: the same sizes and the
same name on every node, other bytes. So fskv lets vLLM's own function write numbered elements into a page,
with the arguments of the real layers, and takes the digest of what is there.
"""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import current_platform

from fskv.engines.vllm_switches import layout_switches
from fskv.errors import ConfigError
from fskv.hybrid_planner import GroupKind

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from fskv.engines.vllm_identity import EngineGroup
    from fskv.namespace import Json

# Whole latents, one after the other, on every CPU (concat_and_cache_mla).
_PLAIN_BACKENDS = {"CPU_MLA", "AMX_MLA"}


def page_layouts(vllm_config: VllmConfig, groups: list[EngineGroup]) -> dict[str, Json]:
    """Return what the identity must hold of the layout inside pages, by group; empty where there is nothing.

    For the worker, after vLLM has bound the KV cache to its layers, on vLLM's own thread: the function that
    writes has a pool of threads for each thread that calls it. Raises ConfigError where a layer of a CPU
    does not tell.
    """
    found = layout_switches()
    if current_platform.is_cpu():
        layers = vllm_config.compilation_config.static_forward_context
        for group in groups:
            if group.spec.kind is GroupKind.STATE:
                continue  # states are plain tensors, the same for every instruction set
            layouts = {
                _cpu_layout(name, layers.get(name), vllm_config.model_config.dtype)
                for name in group.layer_names
            }
            if layouts - {"plain"}:
                found[f"group{group.spec.group_idx}"] = "+".join(sorted(layouts))
    return found


def _cpu_layout(name: str, layer: Any, model_dtype: torch.dtype) -> str:
    """Return how one layer's page is laid out, `plain` where that depends on no CPU."""
    try:
        backend = str(layer.get_attn_backend().get_name())
        if backend in _PLAIN_BACKENDS:
            return "plain"
        if backend == "CPU_ATTN":
            _, _, tokens, width = layer.kv_cache.shape
            isa = str(layer.isa)  # what the layer writes with; set by the builder of its metadata
            head = width // 2
            digest = _digest_of_page(
                isa, layer.kv_cache.dtype, layer.impl.kv_cache_dtype, model_dtype, tokens, head
            )
            return f"{isa}/{tokens}x{head}/{digest}"
        reason = f"attention backend {backend} is unknown to fskv"
    except Exception as error:  # whatever a vLLM without these names raises
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    raise ConfigError(
        f"KV layer {name}: how vLLM lays keys and values out on this CPU cannot be determined ({reason}), "
        "so its KV cannot be shared"
    )


@functools.cache
def _digest_of_page(
    isa: str,
    cache_dtype: torch.dtype,
    kv_cache_dtype: str,
    model_dtype: torch.dtype,
    tokens: int,
    head: int,
) -> str:
    """Return the digest of a page of one head into which vLLM has written element i as the number i.

    In octal digits, a page for each: the digits are exact in every dtype that a KV cache can have.
    """
    from vllm._custom_ops import cpu_attn_reshape_and_cache  # needs an initialised platform

    index = torch.arange(tokens * head).reshape(tokens, 1, head)
    digest = hashlib.sha256()
    for shift in range(0, (index.numel() - 1).bit_length(), 3):
        digits = ((index >> shift) & 7).to(model_dtype)
        page = torch.zeros((1, 1, tokens, 2 * head), dtype=cache_dtype)
        keys, values = page.view(1, 1, 2 * tokens, head).chunk(2, dim=2)  # as the backend does
        cpu_attn_reshape_and_cache(
            digits, digits, keys, values, torch.arange(tokens), isa, kv_cache_dtype=kv_cache_dtype
        )
        written = page.view(torch.uint8).numpy().tobytes()
        if not any(written):
            raise ValueError(f"nothing was written for {isa}")
        digest.update(written)
    return digest.hexdigest()[:16]
