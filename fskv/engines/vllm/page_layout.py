"""Finds out how vLLM lays KV out inside a page, where neither page sizes nor the backend's name say it.

Two engines may have pages of one size and other bytes in them: kernel blocks of another length, heads outside
of tokens, keys and values permuted for an instruction set. So the identity holds what the worker has bound to
its layers, and the digest of a page into which the backend's own function wrote numbered elements.

That page is a copy in shape: the backend's function checks no bounds, so the page has every head, token and
element that the layer has, and all that its strides span is allocated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from vllm.platforms import current_platform

from fskv.engines.vllm.identity import by_layer
from fskv.engines.vllm.places import block_axis, bound_to, own_layers
from fskv.errors import RestError
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
    vllm_config: VllmConfig,
    groups: list[EngineGroup],
    num_blocks: int,
    *,
    canonical: bool = False,
) -> dict[str, Json]:
    """Return the layouts inside pages for the identity, by group; `num_blocks` has the engine.

    `canonical`: of a page of one head, which is the same in every topology; how heads lie beside each other
    is in the name of the canonical format.

    For the worker, after vLLM has bound the KV cache to its layers, on vLLM's own thread: a function that
    writes may have a pool of threads for each thread that calls it. Raises RestError where a layer does not
    tell.
    """
    dcp = vllm_config.parallel_config.decode_context_parallel_size
    pages = _Pages(num_blocks, vllm_config.model_config.dtype, canonical)
    found: dict[str, Json] = {}
    for group in groups:
        is_state = group.spec.kind is GroupKind.STATE
        tokens = None if is_state else group.spec.tokens_per_block // dcp
        if insides := [pages.inside(*each, tokens) for each in own_layers(vllm_config, group)]:
            found[f"group{group.spec.group_idx}"] = by_layer(insides)
    return found


@dataclass(frozen=True, slots=True)
class _Page:
    """One page of a bound tensor: the tensor's axes, with one block's part of the axis of blocks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    kernel_blocks: int

    @classmethod
    def of(cls, bound: torch.Tensor, num_blocks: int) -> _Page:
        """Make the page of one block: its outer strides span one block, not all blocks of the engine."""
        of_blocks = block_axis(bound, num_blocks)
        shape, strides = [*bound.shape], [*bound.stride()]
        shape[of_blocks] //= num_blocks
        extent = 1
        for axis in sorted(range(bound.ndim), key=lambda axis: (bound.stride(axis), axis)):
            if bound.stride(axis) > bound.stride(of_blocks):
                strides[axis] = extent
            extent += (shape[axis] - 1) * strides[axis]
        return cls(bound.dtype, tuple(shape), tuple(strides), shape[of_blocks])

    def of_one_head(self) -> _Page:
        """Return a page of blocks, heads, tokens and elements with one head, and without gaps."""
        blocks, _, tokens, elements = self.shape
        strides = (tokens * elements, tokens * elements, elements, 1)
        return _Page(self.dtype, (blocks, 1, tokens, elements), strides, blocks)

    def zeros(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return zeros for all that the strides span: their bytes, the bytes behind them, and the page.

        A function that takes its elements for larger ones writes behind them, 8 bytes for one at most.
        """
        extent = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        nbytes = extent * self.dtype.itemsize
        flat = torch.zeros(8 * extent + nbytes, dtype=torch.uint8, device=device)
        elements = flat[:nbytes].view(self.dtype)
        page = elements.as_strided(self.shape, self.strides, elements.storage_offset())
        return flat[:nbytes], flat[nbytes:], page

    def __str__(self) -> str:
        item = self.dtype.itemsize
        sides = zip(self.shape, self.strides, strict=True)
        axes = ",".join(f"{count}x{stride * item}" for count, stride in sides if count > 1)
        return f"{str(self.dtype).removeprefix('torch.')}[{axes}]"


def _offset(bound: torch.Tensor, num_blocks: int) -> int:
    """Return where a tensor begins in its block, in bytes; 0 after the first: it depends on their number."""
    axis, item = block_axis(bound, num_blocks), bound.element_size()
    offset = int(bound.storage_offset()) * item
    block = bound.shape[axis] // num_blocks * bound.stride(axis) * item
    return offset if offset < block else 0


@dataclass(frozen=True)
class _Pages:
    """Describes how the layers of an engine lay out their pages."""

    num_blocks: int
    model_dtype: torch.dtype
    canonical: bool

    def inside(self, name: str, layer: Any, tokens: int | None) -> str:
        """Return how a layer's page is laid out; RestError, in one sentence, where that cannot be known.

        `tokens` is how many a block holds on this rank, None of a state.
        """
        try:
            bound = bound_to(layer)
            if tokens is None:
                return self._of_state(bound)
            backend = str(layer.get_attn_backend().get_name())
            (tensor,) = bound
            page, offset = _Page.of(tensor, self.num_blocks), _offset(tensor, self.num_blocks)
            if self.canonical and tensor.ndim == 4:
                page, offset = page.of_one_head(), 0
            isa = getattr(layer, "isa", None)  # what a layer on a CPU writes with
            digest = self._digest(layer, backend, page, tokens)
            return f"{backend}{f'({isa})' if isa else ''}/{page}{_at(offset)}/{digest}"
        except Exception as error:  # whatever a vLLM without these names raises
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise RestError(
            f"KV layer {name}: how vLLM lays keys and values out inside a page cannot be determined "
            f"({reason})"
        )

    def _of_state(self, bound: tuple[torch.Tensor, ...]) -> str:
        """Describe the tensors of a state: plain ones, one after the other in a page."""
        first = min(tensor.data_ptr() for tensor in bound)
        offsets = [t.data_ptr() - first or _offset(t, self.num_blocks) for t in bound]
        pages = [_Page.of(t, self.num_blocks) for t in bound]
        return "&".join(f"{page}{_at(at)}" for page, at in zip(pages, offsets, strict=True))

    def _digest(self, layer: Any, backend: str, page: _Page, tokens: int) -> str:
        heads = 1 if self.canonical else int(getattr(layer, "num_kv_heads", 0))
        try:
            return _digest_of_trial(layer, page, tokens, self.model_dtype, heads)
        except Exception as error:
            is_cpu = bool(current_platform.is_cpu())
            if isinstance(error, RestError) or is_cpu or backend not in _PLAIN_BACKENDS:
                raise
            return "as its view"


def _at(offset: int) -> str:
    return f"@{offset}" if offset else ""


def _digest_of_trial(layer: Any, page: _Page, tokens: int, dtype: torch.dtype, heads: int) -> str:
    """Have the layer's own function write element i of a page as the number i; return the page's digest.

    In octal digits, a page for each: the digits are exact in every dtype that a KV cache can have.
    """
    if page.kernel_blocks * page.shape[-2] != tokens:  # it would write behind the page's end
        raise ValueError(f"its view {page} is not one of {tokens} tokens")
    write, num_elements = _writer(layer, tokens, heads)
    memory, behind, view = page.zeros(layer.kv_cache.device)
    index = torch.arange(num_elements, device=view.device)
    digest = hashlib.sha256()
    # Some keep what they derive from the first page that they see (0.32: the scales of Triton's).
    kept = dict(vars(layer.impl))
    try:
        for shift in range(0, (num_elements - 1).bit_length(), 3):
            memory.zero_()
            write(((index >> shift) & 7).to(dtype), view)
            written = memory.cpu().numpy().tobytes()
            if behind.any():
                raise RestError("its function writes behind the end of a page")
            if not any(written):
                raise ValueError("nothing was written")
            digest.update(written)
    finally:
        vars(layer.impl).clear()
        vars(layer.impl).update(kept)
    return digest.hexdigest()[:16]


def _writer(layer: Any, tokens: int, heads: int) -> tuple[_Write, int]:
    """Return the function that writes keys and values of a page from so many numbers, and that number."""
    impl = layer.impl
    slots = torch.arange(tokens, device=layer.kv_cache.device)
    rank = getattr(impl, "kv_lora_rank", None)
    if rank is not None:  # latents instead of keys and values (MLA)
        rope = int(impl.qk_rope_head_dim)

        def write_latents(numbers: torch.Tensor, page: torch.Tensor) -> None:
            latents = numbers.view(tokens, rank + rope)
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
        keys, values = numbers.split([tokens * heads * size, tokens * heads * size_v])
        impl.do_kv_cache_update(
            layer,
            keys.view(tokens, heads, size).contiguous(),
            values.view(tokens, heads, size_v).contiguous(),
            page,
            slots,
        )

    return write, tokens * heads * (size + size_v)
