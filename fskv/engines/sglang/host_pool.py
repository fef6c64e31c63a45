"""Where SGLang's host pool keeps the pages of KV: its own zero-copy table, checked, as tensors of bytes.

A page of the pool is `page_size` tokens of all layers. In some layouts it is two pieces (keys and values), in
`layer_first` two of each layer; MLA has one, or one of each layer. The pool says where they begin, and it is
checked here that a piece of page n lies n strides behind that of page 0, inside the pool's buffers. Of a
hybrid the sliding window has a pool like the KV's, and states have slots for pages (one token each). A pool
that is not known, or that keeps more of a page elsewhere (scales, drafts, side states), is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fskv.errors import ConfigError

if TYPE_CHECKING:
    import torch

# By name: another class of one of these adds something to a page, or keeps it in another way.
_POOLS = ("MHATokenToKVPoolHost", "AsymmetricMHATokenToKVPoolHost", "MLATokenToKVPoolHost")
_STATES = "MambaPoolHost"
_LAYOUTS = ("page_first", "page_first_direct", "page_head", "layer_first")


@dataclass(frozen=True)
class HostPages:
    """The pool's memory, one int8 tensor (pages, bytes) for each piece of a page, and what it is."""

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
    kind = type(pool).__name__
    if kind == _STATES:
        return _states(pool)
    if kind not in _POOLS:
        raise ConfigError(f"SGLang's host pool is a {kind}, expected one of {', '.join(_POOLS)}")
    if pool.layout not in _LAYOUTS:
        raise ConfigError(
            f"--hicache-mem-layout: found {pool.layout!r}, expected one of {', '.join(_LAYOUTS)}"
        )
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
    start = int(pool.start_layer)
    if kind.startswith("MLA"):
        shape = (int(pool.kv_lora_rank), int(pool.qk_rope_head_dim), int(pool.kv_cache_dim))
    else:
        shape = (int(pool.head_num), int(pool.head_dim), int(pool.v_head_dim))
    return HostPages(
        memory=_memory(pool),
        kind=kind,
        dtype=str(pool.dtype).removeprefix("torch."),
        layout=str(pool.layout),
        page_size=int(pool.page_size),
        layers=(start, start + int(pool.layer_num)),
        shape=shape,
        storage_format=pool.storage_format_tag,
    )


def _states(pool: Any) -> HostPages:
    if pool.layout not in ("page_first", "page_first_direct"):
        raise ConfigError(
            f"--hicache-mem-layout: found {pool.layout!r}, expected a page_first one for states"
        )
    if pool.slot_state_device_tensors or pool.mtp_draft_buffer_infos:
        raise ConfigError(
            "SGLang's host pool of states has side states or those of a draft model, expected none"
        )
    widths = [pool.temporal_state_shape, *pool.conv_state_shapes]
    return HostPages(
        memory=_memory(pool),
        kind=_STATES,
        dtype=f"{pool.temporal_dtype}+{pool.conv_dtype}".replace("torch.", ""),
        layout=str(pool.layout),
        page_size=int(pool.page_size),
        layers=(0, int(pool.num_mamba_layers)),
        shape=tuple(int(n) for shape in widths for n in (len(shape), *shape)),
        storage_format=None,
    )


def _memory(pool: Any) -> tuple[torch.Tensor, ...]:
    import torch

    buffers = pool.kv_buffer if isinstance(pool.kv_buffer, tuple | list) else (pool.kv_buffer,)
    flat = []
    for buffer in buffers:
        if buffer is None or not buffer.is_contiguous() or buffer.device.type != "cpu":
            raise ConfigError(
                "SGLang's host pool has no contiguous buffer in host memory, expected one"
            )
        flat.append(buffer.view(torch.int8).view(-1))
    num_pages, page_size = int(pool.page_num), int(pool.page_size)
    starts, sizes = _pieces(pool, 0)
    strides = [b - a for a, b in zip(starts, _pieces(pool, 1)[0], strict=True)]
    last = [a + (num_pages - 1) * s for a, s in zip(starts, strides, strict=True)]
    if num_pages < 2 or _pieces(pool, num_pages - 1) != (last, sizes):
        raise ConfigError("SGLang's host pool has pages at uneven distances, expected even ones")
    if sum(sizes) != page_size * int(pool.size_per_token):
        raise ConfigError(
            f"SGLang's host pool has pages of {page_size * int(pool.size_per_token)} bytes of which it "
            f"names {sum(sizes)}, expected all of them"
        )
    memory = []
    for start, end, nbytes, stride in zip(starts, last, sizes, strides, strict=True):
        whole = next(
            (f for f in flat if f.data_ptr() <= start and end + nbytes <= f.data_ptr() + f.numel()),
            None,
        )
        if whole is None or stride < nbytes:
            raise ConfigError(
                "SGLang's host pool has pages outside of its buffers, or over each other"
            )
        memory.append(whole.as_strided((num_pages, nbytes), (stride, 1), start - whole.data_ptr()))
    return tuple(memory)


def _pieces(pool: Any, page: int) -> tuple[list[int], list[int]]:
    """Return the addresses and the sizes in bytes of a page's pieces, as the pool tells them."""
    import torch

    first = page * int(pool.page_size)
    addresses, sizes = pool.get_page_buffer_meta(torch.arange(first, first + int(pool.page_size)))
    return [int(each) for each in addresses], [int(each) for each in sizes]
