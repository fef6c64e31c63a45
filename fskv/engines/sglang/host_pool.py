"""The pages of KV in SGLang's host pool: its own zero-copy table, checked, as tensors of bytes.

A page of the pool is `page_size` tokens of all layers. In some layouts it has two pieces (keys and values),
in `layer_first` two for each layer; MLA has one, or one for each layer. The pool says where they begin. This
module checks that a piece of page n lies n strides behind that of page 0, inside the pool's buffers. In a
hybrid the sliding window has a pool like the KV's, and states have slots for pages (one token each). An
unknown pool, or one that keeps more of a page elsewhere (scales, drafts, side states), is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fskv.errors import ConfigError

if TYPE_CHECKING:
    import torch

_STATES = "MambaPoolHost"
_OF_TOKENS = ("page_first", "page_first_direct", "page_head", "layer_first")
# By name: another class of one of these adds something to a page, or keeps it in another way.
_LAYOUTS = {
    "MHATokenToKVPoolHost": _OF_TOKENS,
    "AsymmetricMHATokenToKVPoolHost": _OF_TOKENS,
    "MLATokenToKVPoolHost": _OF_TOKENS,
    _STATES: ("page_first", "page_first_direct"),
}


@dataclass(frozen=True)
class HostPages:
    """The pool's memory, one int8 tensor (pages, bytes) for each piece of a page, and its layout."""

    memory: tuple[torch.Tensor, ...]
    kind: str  # the pool's class
    dtype: str
    layout: str
    page_size: int  # indices of a page: tokens, or one for a slot of states
    layers: tuple[int, int]  # of this pipeline stage, the second is not in it
    shape: tuple[int, ...]  # heads and their widths, the width of a latent, or those of states
    storage_format: str | None

    @property
    def page_nbytes(self) -> tuple[int, ...]:
        return tuple(int(piece.shape[1]) for piece in self.memory)


def host_pages(pool: Any) -> HostPages:
    """Describe a host pool; raises ConfigError where it cannot be stored page by page."""
    kind, layout = type(pool).__name__, pool.layout
    if kind not in _LAYOUTS:
        raise ConfigError(f"SGLang's host pool is a {kind}, expected one of {', '.join(_LAYOUTS)}")
    if layout not in _LAYOUTS[kind]:
        raise ConfigError(
            f"--hicache-mem-layout: found {layout!r}, expected one of {', '.join(_LAYOUTS[kind])}"
        )
    dtype, layers, shape = _of_states(pool) if kind == _STATES else _of_tokens(pool, kind)
    return HostPages(
        memory=_memory(pool),
        kind=kind,
        dtype=dtype.replace("torch.", ""),
        layout=str(layout),
        page_size=int(pool.page_size),
        layers=layers,
        shape=tuple(int(number) for number in shape),
        storage_format=getattr(pool, "storage_format_tag", None),
    )


def _of_tokens(pool: Any, kind: str) -> tuple[str, tuple[int, int], Iterable[Any]]:
    """Return dtype, layers and shape of a pool that keeps something of each token."""
    if pool.dcp_size != 1:
        raise ConfigError(
            f"--dcp-size: found {pool.dcp_size}, expected 1: fskv does not store shards of it"
        )
    # SGLang's end_layer says nothing: pools inside of a hybrid's are told none, or the whole model's.
    if pool.layer_num != pool.target_layer_num or getattr(pool, "_layer_shard_enabled", False):
        raise ConfigError(
            f"SGLang's host pool has {pool.layer_num} layers, {pool.target_layer_num} of them the model's, "
            "or a shard of them: fskv does not store layers of a draft model, or shards"
        )
    shape = (pool.head_num, pool.head_dim, pool.v_head_dim)
    if kind.startswith("MLA"):
        shape = (pool.kv_lora_rank, pool.qk_rope_head_dim, pool.kv_cache_dim)
    start = int(pool.start_layer)
    return str(pool.dtype), (start, start + int(pool.layer_num)), shape


def _of_states(pool: Any) -> tuple[str, tuple[int, int], Iterable[Any]]:
    """Return dtypes, layers and shapes of a pool of states."""
    if pool.slot_state_device_tensors or pool.mtp_draft_buffer_infos:
        raise ConfigError(
            "SGLang's host pool of states has side states or those of a draft model, expected none"
        )
    widths = [pool.temporal_state_shape, *pool.conv_state_shapes]
    shape = [number for each in widths for number in (len(each), *each)]
    return f"{pool.temporal_dtype}+{pool.conv_dtype}", (0, int(pool.num_mamba_layers)), shape


def _memory(pool: Any) -> tuple[torch.Tensor, ...]:
    import torch

    buffers = pool.kv_buffer if isinstance(pool.kv_buffer, tuple | list) else (pool.kv_buffer,)
    if any(one is None or not one.is_contiguous() or one.device.type != "cpu" for one in buffers):
        raise ConfigError("SGLang's host pool has no contiguous buffer in host memory")
    flat = [buffer.view(torch.int8).view(-1) for buffer in buffers]
    num_pages, nbytes = int(pool.page_num), int(pool.page_size) * int(pool.size_per_token)
    starts, sizes = _pieces(pool, 0)
    strides = [b - a for a, b in zip(starts, _pieces(pool, 1)[0], strict=True)]
    last = [a + (num_pages - 1) * s for a, s in zip(starts, strides, strict=True)]
    memory = []
    for start, end, size, stride in zip(starts, last, sizes, strides, strict=True):
        for whole in flat:
            first = start - whole.data_ptr()
            if first >= 0 and end + size <= whole.data_ptr() + whole.numel() and size <= stride:
                memory.append(whole.as_strided((num_pages, size), (stride, 1), first))
    even = num_pages > 1 and _pieces(pool, num_pages - 1) == (last, sizes)
    if not even or sum(sizes) != nbytes or len(memory) != len(sizes):
        raise ConfigError(
            f"SGLang's host pool names {sum(sizes)} bytes of a page, expected {nbytes}, at even distances "
            "and inside of its buffers"
        )
    return tuple(memory)


def _pieces(pool: Any, page: int) -> tuple[list[int], list[int]]:
    """Return the addresses and the sizes in bytes of a page's pieces, as the pool tells them."""
    import torch

    first = page * int(pool.page_size)
    addresses, sizes = pool.get_page_buffer_meta(torch.arange(first, first + int(pool.page_size)))
    return [int(each) for each in addresses], [int(each) for each in sizes]
