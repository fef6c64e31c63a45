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
from fskv.engines.vllm.places import block_axis, bound_to
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
    """Return what the identity must hold of the layout inside pages, by group; `num_blocks` has the engine.

    `canonical`: of a page of one head, which is the same in every topology; how heads lie beside each other
    is in the name of the canonical format.

    For the worker, after vLLM has bound the KV cache to its layers, on vLLM's own thread: a function that
    writes may have a pool of threads for each thread that calls it. Raises RestError where a layer does not
    tell.
    """
    found: dict[str, Json] = {}
    layers = vllm_config.compilation_config.static_forward_context
    dcp = vllm_config.parallel_config.decode_context_parallel_size
    is_cpu = bool(current_platform.is_cpu())
    pages = _Pages(vllm_config.model_config.dtype, num_blocks, is_cpu=is_cpu, canonical=canonical)
    for group in groups:
        tokens = group.spec.tokens_per_block // dcp
        is_state = group.spec.kind is GroupKind.STATE
        insides = [
            pages.inside(name, layers.get(name), tokens, is_state=is_state)
            for name in group.layer_names
            # One that has no page of its own: another layer's is in the group too.
            if not getattr(layers.get(name), "kv_sharing_target_layer_name", None)
        ]
        if insides:
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
        """What lies outside of the axis of blocks is apart by all blocks of the engine: by one, in a page."""
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
        """Return all that the strides span: as bytes, what lies behind these, and the page.

        A function that takes its elements for larger ones writes behind them, 8 bytes for one at most.
        """
        extent = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        nbytes = extent * self.dtype.itemsize
        flat = torch.zeros(8 * extent + nbytes, dtype=torch.uint8, device=device)
        elements = flat[:nbytes].view(self.dtype)
        page = elements.as_strided(self.shape, self.strides, elements.storage_offset())
        return flat[:nbytes], flat[nbytes:], page

    def is_of(self, tokens: int) -> bool:
        """Whether it has so many tokens, on the last axis but one or (before 0.32) the one before that."""
        axes = self.shape[-2:-1] if len(self.shape) < 5 else self.shape[-3:-1]
        return tokens in {self.kernel_blocks * n for n in axes}

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


class _Pages:
    """Describes pages; layers that are alike are asked once."""

    def __init__(
        self, model_dtype: torch.dtype, num_blocks: int, *, is_cpu: bool, canonical: bool
    ) -> None:
        self._model_dtype = model_dtype
        self._num_blocks = num_blocks
        self._canonical = canonical
        self._is_cpu = is_cpu
        self._digests: dict[tuple[object, ...], str] = {}

    def inside(self, name: str, layer: Any, tokens: int, *, is_state: bool) -> str:
        """Return how a layer's page is laid out; RestError, in one sentence, where that cannot be known.

        `tokens` is how many a block holds on this rank.
        """
        try:
            bound = bound_to(layer)
            if is_state:
                return self._of_state(bound)
            backend = str(layer.get_attn_backend().get_name())
            (tensor,) = bound
            page, offset = _Page.of(tensor, self._num_blocks), _offset(tensor, self._num_blocks)
            if self._canonical and tensor.ndim == 4:
                page, offset = page.of_one_head(), 0
            digest = self._digest(layer, backend, page, tokens)
            isa = getattr(layer, "isa", None)  # what a layer on a CPU writes with
            view = f"{page}{_at(offset)}"
            return f"{backend}{f'({isa})' if isa else ''}/{view}/{digest}"
        except Exception as error:  # whatever a vLLM without these names raises
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise RestError(
            f"KV layer {name}: how vLLM lays keys and values out inside a page cannot be determined "
            f"({reason})"
        )

    def _of_state(self, bound: tuple[torch.Tensor, ...]) -> str:
        """Describe the tensors of a state: plain ones, one after the other in a page."""
        first = min(tensor.data_ptr() for tensor in bound)
        offsets = [t.data_ptr() - first or _offset(t, self._num_blocks) for t in bound]
        pages = [_Page.of(t, self._num_blocks) for t in bound]
        return "&".join(f"{page}{_at(at)}" for page, at in zip(pages, offsets, strict=True))

    def _digest(self, layer: Any, backend: str, page: _Page, tokens: int) -> str:
        isa, dtype = getattr(layer, "isa", None), getattr(layer.impl, "kv_cache_dtype", None)
        shape = [
            getattr(layer, name, None) for name in ("num_kv_heads", "head_size", "head_size_v")
        ]
        key = (backend, type(layer.impl), page, tokens, isa, dtype, *shape)
        if key not in self._digests:
            try:
                heads = 1 if self._canonical else int(getattr(layer, "num_kv_heads", 0))
                self._digests[key] = _try(layer, page, tokens, self._model_dtype, heads)
            except Exception as error:
                if isinstance(error, RestError) or self._is_cpu or backend not in _PLAIN_BACKENDS:
                    raise
                self._digests[key] = "as its view"
        return self._digests[key]


def _at(offset: int) -> str:
    return f"@{offset}" if offset else ""


def _try(layer: Any, page: _Page, tokens: int, dtype: torch.dtype, heads: int) -> str:
    """Have the layer's own function write a page; return the page's digest."""
    if not page.is_of(tokens):  # it would write behind the page's end
        raise ValueError(f"its view {page} is not one of {tokens} tokens")
    write, num_elements = _writer(layer, tokens, dtype, heads)
    # Some keep what they derive from the first page that they see (0.32: the scales of Triton's).
    kept = dict(vars(layer.impl))
    try:
        return _digest_of_page(write, num_elements, *page.zeros(layer.kv_cache.device), dtype)
    finally:
        vars(layer.impl).clear()
        vars(layer.impl).update(kept)


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
    write: _Write,
    num_elements: int,
    memory: torch.Tensor,
    behind: torch.Tensor,
    page: torch.Tensor,
    model_dtype: torch.dtype,
) -> str:
    """Return the digest of a page's memory into which the backend has written element i as the number i.

    In octal digits, a page for each: the digits are exact in every dtype that a KV cache can have.
    """
    index = torch.arange(num_elements, device=page.device)
    digest = hashlib.sha256()
    for shift in range(0, (num_elements - 1).bit_length(), 3):
        memory.zero_()
        write(((index >> shift) & 7).to(model_dtype), page)
        written = memory.cpu().numpy().tobytes()
        if behind.any():
            raise RestError("its function writes behind the end of a page")
        if not any(written):
            raise ValueError("nothing was written")
        digest.update(written)
    return digest.hexdigest()[:16]
