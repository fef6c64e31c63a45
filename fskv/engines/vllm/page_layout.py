"""Finds out how vLLM lays KV out inside a page, where neither page sizes nor the backend's name say it.

Two engines may have pages of one size and other bytes in them: kernel blocks of another length, heads outside
of tokens, keys and values permuted for an instruction set. So the identity holds what the worker has bound to
its layers, and the digest of a page into which the backend's own function wrote numbered elements.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from vllm.platforms import current_platform

from fskv.engines.vllm.identity import jsonable
from fskv.engines.vllm.switches import layout_switches
from fskv.errors import ConfigError
from fskv.hybrid_planner import GroupKind

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from fskv.engines.vllm.identity import EngineGroup
    from fskv.namespace import Json

# Backends whose pages are what their views say, element by element: enough where their function that writes
# cannot be called beside the engine. Never on CPUs, where a page is permuted behind its view.
_PLAIN_BACKENDS = {
    "FLASH_ATTN",
    "FLASH_ATTN_DIFFKV",
    "FLASH_ATTN_MLA",
    "FLASHINFER",
    "FLASHINFER_MLA",
    "FLASHMLA",
    "FLEX_ATTENTION",
    "CUTLASS_MLA",
    "TRITON_ATTN",
    "TRITON_ATTN_DIFFKV",
    "TRITON_MLA",
}
_Write: TypeAlias = Callable[[torch.Tensor, torch.Tensor], None]  # numbers, page


def page_layouts(
    vllm_config: VllmConfig, groups: list[EngineGroup], *, canonical: bool = False
) -> dict[str, Json]:
    """Return what the identity must hold of the layout inside pages, by group.

    `canonical`: of a page of one head, which is the same in every topology; how heads lie beside each other
    is in the name of the canonical format.

    For the worker, after vLLM has bound the KV cache to its layers, on vLLM's own thread: a function that
    writes may have a pool of threads for each thread that calls it. Raises ConfigError where a layer does
    not tell.
    """
    found = layout_switches()
    layers = vllm_config.compilation_config.static_forward_context
    dcp = vllm_config.parallel_config.decode_context_parallel_size
    is_cpu = bool(current_platform.is_cpu())
    pages = _Pages(vllm_config.model_config.dtype, is_cpu=is_cpu, canonical=canonical)
    for group in groups:
        tokens = group.spec.tokens_per_block // dcp
        is_state = group.spec.kind is GroupKind.STATE
        insides = {
            pages.inside(name, layers.get(name), nbytes, tokens, is_state=is_state)
            for name, nbytes in zip(group.layer_names, group.layer_nbytes, strict=True)
            # One that has no page of its own: another layer's is in the group too.
            if not getattr(layers.get(name), "kv_sharing_target_layer_name", None)
        }
        if insides:
            found[f"group{group.spec.group_idx}"] = "+".join(sorted(insides))
    if groups and not is_cpu:
        found["attention"] = jsonable(getattr(vllm_config, "attention_config", None))
    return found


@dataclass(frozen=True, slots=True)
class _View:
    """What of a tensor lies inside one page: `axes` are (how many, apart by bytes), outermost first."""

    dtype: torch.dtype
    axes: tuple[tuple[int, int], ...]
    offset: int  # in the page, or in the block of all layers

    @classmethod
    def of(cls, tensor: torch.Tensor, page_nbytes: int, base: int = 0) -> _View:
        """Describe a bound tensor; the axis that goes from page to page is left out, or cut to one page."""
        if not tensor.numel():
            raise ValueError("no KV cache is bound to it")
        item = tensor.element_size()
        axes = []
        for count, stride in zip(tensor.shape, tensor.stride(), strict=True):
            nbytes = stride * item
            if count > 1 and (count - 1) * nbytes >= page_nbytes:
                count = page_nbytes // nbytes  # noqa: PLW2901  # of kernel blocks in a page, or 0
            if count > 1:
                axes.append((count, nbytes))
        # Where it lies in its block, if it is in the first one: later than that it depends on their number.
        offset = tensor.storage_offset() * item
        block = max((s * item for s in tensor.stride()), default=0)
        return cls(tensor.dtype, tuple(axes), base or (offset if offset < block else 0))

    def __str__(self) -> str:
        axes = ",".join(f"{count}x{nbytes}" for count, nbytes in self.axes)
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}[{axes}]" + (f"@{self.offset}" if self.offset else "")


class _Pages:
    """Describes pages; layers that are alike are asked once."""

    def __init__(self, model_dtype: torch.dtype, *, is_cpu: bool, canonical: bool) -> None:
        self._model_dtype = model_dtype
        self._canonical = canonical
        self._is_cpu = is_cpu
        self._digests: dict[tuple[object, ...], str] = {}

    def inside(
        self, name: str, layer: Any, page_nbytes: int, tokens: int, *, is_state: bool
    ) -> str:
        """Return how a layer's page is laid out; ConfigError, in one sentence, where that cannot be known.

        `page_nbytes` is one block of this layer on this rank, un-padded; `tokens` is how many it holds.
        """
        try:
            if is_state:
                return _state_layout(layer.kv_cache, page_nbytes)
            backend = str(layer.get_attn_backend().get_name())
            view = _View.of(layer.kv_cache, page_nbytes)
            page = _one_page(layer.kv_cache, page_nbytes)
            if self._canonical and page.ndim == 4:  # blocks, heads, tokens, elements
                page = torch.zeros_like(page[:, :1], memory_format=torch.contiguous_format)
                view = _View.of(page, page.nbytes)
            digest = self._digest(layer, backend, view, page, tokens)
            isa = getattr(layer, "isa", None)  # what a layer on a CPU writes with
            return f"{backend}{f'({isa})' if isa else ''}/{view}/{digest}"
        except Exception as error:  # whatever a vLLM without these names raises
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise ConfigError(
            f"KV layer {name}: how vLLM lays keys and values out inside a page cannot be determined "
            f"({reason}), so its KV cannot be shared"
        )

    def _digest(
        self, layer: Any, backend: str, view: _View, page: torch.Tensor, tokens: int
    ) -> str:
        isa, dtype = getattr(layer, "isa", None), getattr(layer.impl, "kv_cache_dtype", None)
        shape = [
            getattr(layer, name, None) for name in ("num_kv_heads", "head_size", "head_size_v")
        ]
        key = (backend, type(layer.impl), view, tokens, isa, dtype, *shape)
        if key not in self._digests:
            try:
                heads = 1 if self._canonical else int(getattr(layer, "num_kv_heads", 0))
                write, num_elements = _writer(layer, tokens, self._model_dtype, heads)
                self._digests[key] = _digest_of_page(write, num_elements, page, self._model_dtype)
            except Exception:
                if self._is_cpu or backend not in _PLAIN_BACKENDS:
                    raise
                self._digests[key] = "as its view"
        return self._digests[key]


def _state_layout(tensors: Iterable[torch.Tensor] | torch.Tensor, page_nbytes: int) -> str:
    """Describe the tensors of a state: plain ones, one after the other in a page."""
    bound = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    first = min(tensor.data_ptr() for tensor in bound)
    return "&".join(str(_View.of(t, page_nbytes, t.data_ptr() - first)) for t in bound)


def _one_page(bound: torch.Tensor, page_nbytes: int) -> torch.Tensor:
    """Return a page of zeros of its own, shaped and strided as the bound tensor's pages are."""
    item = bound.element_size()
    shape = [
        count
        if (count - 1) * stride * item < page_nbytes
        else max(1, page_nbytes // (stride * item))
        for count, stride in zip(bound.shape, bound.stride(), strict=True)
    ]
    extent = 1 + sum((n - 1) * stride for n, stride in zip(shape, bound.stride(), strict=True))
    page = torch.zeros(extent * item, dtype=torch.uint8, device=bound.device)
    return page.view(bound.dtype).as_strided(shape, bound.stride())


def _writer(layer: Any, tokens: int, dtype: torch.dtype, heads: int) -> tuple[_Write, int]:
    """Return what writes a page's keys and values, from that many numbers, and how many those are."""
    impl = layer.impl
    slots = torch.arange(tokens, device=layer.kv_cache.device)
    rank = getattr(impl, "kv_lora_rank", None)
    if rank is not None:  # latents instead of keys and values (MLA)
        rope = int(impl.qk_rope_head_dim)

        def write_latents(numbers: torch.Tensor, page: torch.Tensor) -> None:
            latents = numbers.to(dtype).view(tokens, rank + rope)
            impl.do_kv_cache_update(
                latents[:, :rank].contiguous(),
                latents[:, rank:].unsqueeze(1).contiguous(),
                page,
                slots,
                layer.kv_cache_dtype,
                layer._k_scale,  # noqa: SLF001
            )

        return write_latents, tokens * (rank + rope)
    size = int(layer.head_size)
    size_v = int(getattr(layer, "head_size_v", None) or size)

    def write(numbers: torch.Tensor, page: torch.Tensor) -> None:
        keys, values = numbers.to(dtype).split([tokens * heads * size, tokens * heads * size_v])
        impl.do_kv_cache_update(
            layer,
            keys.view(tokens, heads, size).contiguous(),
            values.view(tokens, heads, size_v).contiguous(),
            page,
            slots,
        )

    return write, tokens * heads * (size + size_v)


def _digest_of_page(
    write: _Write, num_elements: int, page: torch.Tensor, model_dtype: torch.dtype
) -> str:
    """Return the digest of a page into which the backend has written element i as the number i.

    In octal digits, a page for each: the digits are exact in every dtype that a KV cache can have.
    """
    index = torch.arange(num_elements, device=page.device)
    digest = hashlib.sha256()
    for shift in range(0, (num_elements - 1).bit_length(), 3):
        page.zero_()
        write(((index >> shift) & 7).to(model_dtype), page)
        flat = page.as_strided((page.untyped_storage().nbytes() // page.element_size(),), (1,))
        written = flat.view(torch.uint8).cpu().numpy().tobytes()
        if not any(written):
            raise ValueError("nothing was written")
        digest.update(written)
    return digest.hexdigest()[:16]
