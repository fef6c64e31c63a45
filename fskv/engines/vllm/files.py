"""The chunk files of a rank, and the places of their pages in its KV tensors.

Without `canonical_layout` a rank has one file per chunk, with all of its pages. With it, the canonical page
of a layer (vLLM's canonical_mapping: the block without parallelism, all KV heads) is cut into equal slices,
one for each KV head. Each slice of a chunk is a file of its own, with the number of the slice in the place of
a rank. A rank has the files of the slices in its pages, so engines of other tensor-parallel sizes find the
same files. Invariant: slice s of a page of n * num_slices bytes is bytes [s * n, (s + 1) * n) of vLLM's
canonical page, on every writer. A rank with parts of slices in its pages refuses to start.

Pure, except that it makes views of the tensors; called once, at start-up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
    canonical_format_id,
)
from vllm.v1.kv_offload.base import CanonicalKVCaches, CanonicalPageMapping, CopyRun

from fskv.engines.vllm.identity import EngineGroup
from fskv.errors import ConfigError
from fskv.format.chunk_file import FileLayout
from fskv.format.spans import GroupLayout
from fskv.hybrid_planner import GroupKind
from fskv.namespace import Json, layout_digest

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_offload.config import OffloadingConfig


@dataclass(frozen=True)
class WorkerFiles:
    """The files of one rank for a chunk; `layouts[i][g]` is file i's payload for the group at position g.

    The pages of a layout are in `tensors`. `file_ranks[i]` stands in file i's name, None for nothing.
    Where several ranks have the same bytes, one of them writes a chunk (`writes`), and all read it.
    """

    tensors: tuple[torch.Tensor, ...]
    layouts: tuple[tuple[GroupLayout, ...], ...]
    file_ranks: tuple[int | None, ...]
    num_writers: int = 1
    writer_index: int = 0

    def writes(self, key_hash: bytes) -> bool:
        """Return whether this rank writes the chunk's files; exactly one rank with the same bytes does."""
        return int.from_bytes(key_hash[-8:], "big") % self.num_writers == self.writer_index


def file_layouts(
    groups: Sequence[EngineGroup],
    layouts: Sequence[GroupLayout],
    in_page: Mapping[str, Json] = MappingProxyType({}),
) -> dict[int, FileLayout]:
    """Return the layout of a chunk's files, by group index; equal slices of the same pages are all alike.

    `in_page` is how pages are laid out inside where the namespace does not say it, by group.
    """
    found = {}
    for group, layout in zip(groups, layouts, strict=True):
        page_nbytes = tuple(page.nbytes for page in layout.pages)
        inside = in_page.get(f"group{layout.group_idx}")
        digest = layout_digest(group.facts(page_nbytes), layout.num_blocks, inside)
        found[layout.group_idx] = FileLayout(layout.num_blocks, page_nbytes, digest)
    return found


def own_files(
    groups: Sequence[EngineGroup],
    blocks_per_chunk: int,
    kv_caches: CanonicalKVCaches,
    file_rank: int | None,
) -> WorkerFiles:
    """Return the files of a rank that stores its own pages, as they are."""
    layouts = tuple(
        GroupLayout.of(
            group.spec.group_idx,
            blocks_per_chunk,
            [(ref.tensor_idx, ref.page_size_bytes) for ref in refs],
        )
        for group, refs in zip(groups, kv_caches.group_data_refs, strict=True)
    )
    return WorkerFiles(tuple(t.tensor for t in kv_caches.tensors), (layouts,), (file_rank,))


def count_slices(vllm_config: VllmConfig, groups: Sequence[EngineGroup]) -> int:
    """Return into how many slices canonical pages are cut: the same for every topology of a model."""
    replicated = {group.spec.kind is GroupKind.MLA for group in groups}
    if replicated == {True}:
        return 1  # every rank has the whole page
    if len(replicated) > 1:
        raise _refusal("KV groups with MLA and others are in one model")
    return int(vllm_config.model_config.get_total_num_kv_heads())


def canonical_format_of(config: OffloadingConfig, num_slices: int) -> str:
    """Return the name of vLLM's canonical byte format, cut so; ConfigError where vLLM certifies none."""
    if config.kv_cache_layout is None or not config.parallel.is_parallelism_agnostic:
        raise _refusal("vLLM does not certify this model's KV under this topology")
    return f"{canonical_format_id(config.kv_cache_layout)}/{num_slices}"


def canonical_files(
    groups: Sequence[EngineGroup],
    blocks_per_chunk: int,
    kv_caches: CanonicalKVCaches,
    num_slices: int,
    *,
    in_full: bool = False,
) -> WorkerFiles:
    """Return the files of a rank that stores slices of canonical pages; `in_full`: it has all.

    Raises ConfigError where vLLM does not certify a layer's page as free of topology, or where this rank's
    pages are not made of whole slices.
    """
    views: dict[tuple[int, int, int], int] = {}  # (tensor, offset, bytes) -> place among the rank's
    shares: set[tuple[tuple[int, ...], int, int]] = set()
    pages: list[list[list[tuple[int, int]]]] = []  # by slice of this rank, by group
    for group, refs in zip(groups, kv_caches.group_data_refs, strict=True):
        of_group: dict[int, list[tuple[int, int]]] = {}
        for ref in refs:
            mapping = ref.mapping
            if mapping is None or not mapping.parallelism_agnostic:
                raise _refusal(f"vLLM does not certify the pages of KV group {group.kind}")
            if in_full:
                nbytes = mapping.canonical_page_size_bytes
                runs = (CopyRun(0, 0, nbytes, 1, 0, 0),)
                mapping = CanonicalPageMapping(nbytes, nbytes, runs, 1, 0, True)
            offsets = slice_offsets(mapping, num_slices)
            if offsets is None:
                raise _refusal(
                    f"pages of KV group {group.kind} are not made of whole slices "
                    f"({num_slices} of {mapping.canonical_page_size_bytes} bytes)"
                )
            shares.add((tuple(sorted(offsets)), mapping.num_writers, mapping.writer_index))
            nbytes = mapping.canonical_page_size_bytes // num_slices
            for number, offset in offsets.items():
                idx = views.setdefault((ref.tensor_idx, offset, nbytes), len(views))
                of_group.setdefault(number, []).append((idx, nbytes))
        pages.append([of_group[number] for number in sorted(of_group)])
    if len(shares) != 1:
        raise _refusal("the layers of a rank do not have the same slices")
    ((numbers, num_writers, writer_index),) = shares
    layouts = tuple(
        tuple(
            GroupLayout.of(group.spec.group_idx, blocks_per_chunk, of_group[i])
            for group, of_group in zip(groups, pages, strict=True)
        )
        for i in range(len(numbers))
    )
    file_ranks = (None,) if num_slices == 1 else numbers
    wholes = [each.tensor for each in kv_caches.tensors]
    tensors = tuple(wholes[t][:, offset : offset + nbytes] for t, offset, nbytes in views)
    return WorkerFiles(tensors, layouts, file_ranks, num_writers, writer_index)


def slice_offsets(mapping: CanonicalPageMapping, num_slices: int) -> dict[int, int] | None:
    """Return where in a rank's page the slices begin that it has; None unless it is made of whole ones."""
    nbytes, rest = divmod(mapping.canonical_page_size_bytes, num_slices)
    if rest or mapping.local_page_size_bytes % nbytes:
        return None
    origin = np.full(mapping.local_page_size_bytes, -1)  # of each byte, in the canonical page
    for run in mapping.runs:
        for i in range(run.num_fragments):
            at = run.local_offset + i * run.local_stride
            start = run.canonical_offset + i * run.canonical_stride
            origin[at : at + run.fragment_size] = np.arange(start, start + run.fragment_size)
    slices = origin.reshape(-1, nbytes)
    numbers = slices[:, 0] // nbytes
    expected = numbers[:, None] * nbytes + np.arange(nbytes)
    if numbers.min() < 0 or (slices != expected).any() or len({*numbers}) != len(numbers):
        return None
    return {int(number): i * nbytes for i, number in enumerate(numbers)}


def _refusal(why: str) -> ConfigError:
    return ConfigError(
        f"option 'canonical_layout': found true, expected false: {why}, so engines of different "
        "topologies cannot share them"
    )
