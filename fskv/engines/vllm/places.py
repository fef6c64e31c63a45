"""The places of a block's KV in memory, by the strides of the tensors that vLLM has bound to its layers.

VLLM offers a connector rows, one for each block, and finds them by rules of its own. For some layouts those
rows hold a part of a block, or other bytes (0.32 and 0.33: VLLM_KV_CACHE_LAYOUT=LHBNC, and states alone in a
layout that begins with B). So every row is held against the addresses of the layers here, and an engine whose
rows fail is refused.

Arithmetic on shapes, strides and addresses; no byte of KV is read. Called once, at start-up.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches

from fskv.errors import ConfigError, RestError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from fskv.engines.vllm.identity import EngineGroup

# Bytes in memory: (address, how many), ascending and apart from each other.
_Runs: TypeAlias = list[tuple[int, int]]
# A tensor of rows, one for each block, and how many bytes of a row belong to a group.
Row: TypeAlias = tuple[torch.Tensor, int]

_MAX_PIECES = 4096  # of one layer's block: more than tokens or heads of any


@dataclass(frozen=True)
class Places:
    """The places of each block's bytes in one layer.

    `pieces` are (offset, length) of the bytes of block 0. Those of block b lie `b * stride` bytes later.
    """

    pieces: tuple[tuple[int, int], ...]
    stride: int

    @classmethod
    def of(cls, bound: Sequence[torch.Tensor], num_blocks: int, nbytes: int) -> Places:
        """Find the `nbytes` bytes of each block from strides; raises ValueError if strides do not tell."""
        runs: _Runs = []
        strides = set()
        for tensor in bound:
            axis = block_axis(tensor, num_blocks)
            item = tensor.element_size()
            per_block = tensor.shape[axis] // num_blocks
            strides.add(per_block * tensor.stride(axis) * item)
            shape = [*tensor.shape]
            shape[axis] = per_block
            runs += _runs(tensor.data_ptr(), shape, [s * item for s in tensor.stride()], item)
        if len(strides) != 1:
            raise ValueError("its tensors have blocks of different lengths")
        runs.sort()
        if any(start + n > following for (start, n), (following, _) in pairwise(runs)):
            raise ValueError("its tensors overlap")
        if (found := sum(n for _, n in runs)) != nbytes:
            raise ValueError(f"{found} bytes of a block are bound to it, expected {nbytes}")
        return cls(tuple(_joined(runs)), strides.pop())


def block_axis(tensor: torch.Tensor, num_blocks: int) -> int:
    """Return the axis that goes from block to block, perhaps in several kernel blocks each."""
    for axis, count in enumerate(tensor.shape):
        if count and count % num_blocks == 0:
            return axis
    raise ValueError(f"no axis of {tuple(tensor.shape)} is one of {num_blocks} blocks")


def places_of(
    vllm_config: VllmConfig, groups: Iterable[EngineGroup], num_blocks: int
) -> dict[str, Places]:
    """Return the places of each layer's blocks, without layers that use another one's.

    Raises RestError where a layer does not tell, or tells of more or fewer bytes than its specification.
    """
    found = {}
    for group in groups:
        of_layer = dict(zip(group.layer_names, group.layer_nbytes, strict=True))
        for name, layer in own_layers(vllm_config, group):
            try:
                found[name] = Places.of(bound_to(layer), num_blocks, of_layer[name])
            except Exception as error:  # whatever a vLLM that binds something else raises
                line = str(error).partition("\n")[0]
                raise RestError(
                    f"KV layer {name}: where its KV lies is not known ({type(error).__name__}: {line})"
                ) from None
    return found


def own_layers(vllm_config: VllmConfig, group: EngineGroup) -> Iterator[tuple[str, Any]]:
    """Yield names and layers of a group, without layers that use another one's pages."""
    layers = vllm_config.compilation_config.static_forward_context
    for name in group.layer_names:
        if not getattr(layers.get(name), "kv_sharing_target_layer_name", None):
            yield name, layers.get(name)


def bound_to(layer: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a layer's KV; raises ValueError where there are none."""
    bound = getattr(layer, "kv_cache", None)
    tensors = (bound,) if isinstance(bound, torch.Tensor) else tuple(bound or ())
    if not tensors or not all(isinstance(t, torch.Tensor) and t.numel() for t in tensors):
        raise ValueError("no KV cache is bound to it")
    return tensors


def lost(
    groups: Iterable[EngineGroup],
    places: Mapping[str, Places],
    rows: Sequence[Sequence[Row]],
    num_blocks: int,
) -> str | None:
    """Say whose bytes the rows of a block do not hold, or hold of another block; None: all is well.

    `rows` are by position of the group. A row counts for a layer where both go on by the same number of bytes
    from block to block: what it holds of block 0 it holds of each.
    """
    for group, of_group in zip(groups, rows, strict=True):
        for name in (name for name in group.layer_names if name in places):
            stride = places[name].stride
            held = _joined(sorted((t.data_ptr(), n) for t, n in of_group if t.stride(0) == stride))
            if not all(_holds(held, piece) for piece in places[name].pieces):
                return f"the rows of a block do not hold all of layer {name}"
    of_rows = {(t.data_ptr(), n, t.stride(0)) for of_group in rows for t, n in of_group}
    return _across_blocks(places, of_rows, num_blocks)


def _across_blocks(
    places: Mapping[str, Places], rows: Iterable[tuple[int, int, int]], num_blocks: int
) -> str | None:
    """Say which layer has bytes of one block in the row of another; rows are (address, bytes, stride).

    Rows of another stride that come where the layer's blocks are meet other blocks of it sooner or later.
    """
    for start, nbytes, stride in rows:
        for name, place in places.items():
            for at, length in place.pieces:
                if stride == place.stride:
                    least = (start - at - length) // stride + 1  # how many blocks further on
                    most = -((at - start - nbytes) // stride) - 1
                    steps = range(max(least, 1 - num_blocks), min(most, num_blocks - 1) + 1)
                    meets = bool(set(steps) - {0}) if len(steps) < 3 else True
                else:
                    last = num_blocks - 1
                    meets = (
                        start < at + last * place.stride + length
                        and at < start + last * stride + nbytes
                    )
                if meets:
                    return f"the row of a block holds bytes of other blocks of layer {name}"
    return None


def check_rows(
    vllm_config: VllmConfig,
    groups: Iterable[EngineGroup],
    places: Mapping[str, Places],
    rows: Sequence[Sequence[Row]],
    num_blocks: int,
) -> None:
    """Raise ConfigError unless rows hold each block whole, and no other."""
    reason = lost(groups, places, rows, num_blocks)
    if reason is not None:
        raise ConfigError(
            f"VLLM_KV_CACHE_LAYOUT: found {vllm_config.cache_config.kv_cache_layout}, expected LBHNC or "
            f"LBNHC: {reason}"
        )


def blocks_in(kv_caches: CanonicalKVCaches) -> int:
    return int(kv_caches.tensors[0].tensor.shape[0])


def rows_of(kv_caches: CanonicalKVCaches) -> list[list[Row]]:
    """Return the rows that vLLM offers, by position of the group."""
    return [
        [(kv_caches.tensors[ref.tensor_idx].tensor, ref.page_size_bytes) for ref in refs]
        for refs in kv_caches.group_data_refs
    ]


def _runs(start: int, shape: Sequence[int], strides: Sequence[int], item: int) -> _Runs:
    """Return the bytes of all elements; raises ValueError where two elements share some."""
    starts, nbytes, extent = [start], item, item
    for stride, count in sorted(zip(strides, shape, strict=True)):
        if count == 1:
            continue
        if stride < extent:
            raise ValueError(f"its strides overlap: {tuple(strides)} of {tuple(shape)}")
        if len(starts) == 1 and stride == nbytes:
            nbytes *= count
        else:
            starts = [at + i * stride for i in range(count) for at in starts]
            if len(starts) > _MAX_PIECES:
                raise ValueError(f"a block of it lies in more than {_MAX_PIECES} pieces")
        extent += (count - 1) * stride
    return [(at, nbytes) for at in starts]


def _joined(runs: _Runs) -> _Runs:
    """Return sorted runs, with neighbours and overlapping ones joined."""
    joined: _Runs = []
    for start, nbytes in runs:
        if joined and start <= sum(joined[-1]):
            begin, so_far = joined[-1]
            joined[-1] = (begin, max(so_far, start + nbytes - begin))
        else:
            joined.append((start, nbytes))
    return joined


def _holds(held: _Runs, run: tuple[int, int]) -> bool:
    at = bisect_right(held, run[0], key=lambda each: each[0]) - 1
    return at >= 0 and sum(held[at]) >= sum(run)
