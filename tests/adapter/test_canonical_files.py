"""Which files a rank has under `canonical_layout`, against vLLM's mappings, and how several make a chunk."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import world

pytest.importorskip("vllm", reason="these tests need the vllm environment: make test")

from dataclasses import replace

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import canonical_mapping as vllm
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor

from fskv.engines.vllm.files import (
    canonical_files,
    canonical_format_of,
    count_slices,
    slice_offsets,
)
from fskv.engines.vllm.identity import EngineGroup
from fskv.errors import ConfigError
from fskv.hybrid_planner import GroupKind, GroupSpec
from fskv.index.presence import Findings
from fskv.types import ChunkId

pytestmark = world.VLLM

BLOCK, HEAD_SIZE, NUM_BLOCKS = 16, 8, 3


def _mappings(tp: int, num_kv_heads: int, shape: str = "packed"):
    """Return vLLM's mapping for every rank, for one layer of `num_kv_heads` heads in all."""
    heads = max(1, num_kv_heads // tp)
    spec = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=heads, head_size=HEAD_SIZE, dtype=torch.float32
    )
    if shape == "packed":
        cache = torch.zeros(NUM_BLOCKS, heads, BLOCK, 2 * HEAD_SIZE)
    else:  # K and V in halves of the page, head after head
        cache = torch.zeros(NUM_BLOCKS, 2, heads, BLOCK, HEAD_SIZE).transpose(2, 3)
    result = []
    for rank in range(tp):
        context = vllm._RankContext(
            tp_size=tp, dcp_size=1, pcp_size=1, interleave=1, total_kv_heads=num_kv_heads, rank=rank
        )
        result.append(vllm._layer_mapping(spec, cache, NUM_BLOCKS, context))
    assert None not in result
    return result


def _page(mapping, canonical: bytes) -> bytes:
    """Build a rank's page from the canonical one, run by run: vLLM's definition, word for word."""
    page = bytearray(mapping.local_page_size_bytes)
    for run in mapping.runs:
        for i in range(run.num_fragments):
            at = run.canonical_offset + i * run.canonical_stride
            to = run.local_offset + i * run.local_stride
            page[to : to + run.fragment_size] = canonical[at : at + run.fragment_size]
    return bytes(page)


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_slice_is_the_same_bytes_of_the_canonical_page_on_every_rank(tp, num_kv_heads):
    mappings = _mappings(tp, num_kv_heads)
    nbytes = mappings[0].canonical_page_size_bytes // num_kv_heads
    canonical = bytes(i * 7 % 251 for i in range(mappings[0].canonical_page_size_bytes))
    writers = dict.fromkeys(range(num_kv_heads), 0)
    for mapping in mappings:
        page = _page(mapping, canonical)
        offsets = slice_offsets(mapping, num_kv_heads)
        assert len(offsets) == max(1, num_kv_heads // tp)
        for number, at in offsets.items():
            assert page[at : at + nbytes] == canonical[number * nbytes : (number + 1) * nbytes]
            writers[number] += mapping.is_writer(0)
    assert set(writers.values()) == {1}, "each slice has one writer"


def test_pages_that_are_not_made_of_whole_slices_are_refused():
    # Halves of K and V: with a head on each rank, a slice would hold half of K's heads and none of V's.
    assert slice_offsets(_mappings(4, 4, "split")[0], 4) is None
    assert slice_offsets(_mappings(2, 4)[0], 3) is None
    # Where halves are made of whole slices, they are the canonical page's, whatever they mean.
    (whole,) = _mappings(1, 4, "split")
    first = _mappings(2, 4, "split")[0]
    canonical = bytes(i * 7 % 251 for i in range(whole.canonical_page_size_bytes))
    nbytes = len(canonical) // 4
    page = _page(first, canonical)
    for number, at in slice_offsets(first, 4).items():
        assert page[at : at + nbytes] == canonical[number * nbytes : (number + 1) * nbytes]


def _group(kind: str = "full"):
    return EngineGroup(GroupSpec(0, GroupKind(kind), BLOCK, None), kind, (4096,), ("layer",))


def _caches(mapping, page_nbytes: int):
    tensor = torch.arange(NUM_BLOCKS * page_nbytes).to(torch.int8).reshape(NUM_BLOCKS, page_nbytes)
    ref = CanonicalKVCacheRef(0, page_nbytes, mapping)
    return CanonicalKVCaches([CanonicalKVCacheTensor(tensor, page_nbytes)], [[ref]])


def test_a_layer_that_vllm_does_not_certify_is_refused():
    mapping = _mappings(1, 4)[0]
    for bad in (None, replace(mapping, parallelism_agnostic=False)):
        with pytest.raises(ConfigError, match="does not certify"):
            canonical_files([_group()], 2, _caches(bad, mapping.local_page_size_bytes), 4)
    config = SimpleNamespace(model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 4))
    assert count_slices(config, [_group()]) == 4
    assert count_slices(config, [_group("mla")]) == 1
    with pytest.raises(ConfigError, match="MLA and others"):
        count_slices(config, [_group(), _group("mla")])


def test_exactly_one_of_the_ranks_with_the_same_bytes_writes_a_chunk():
    ranks = [
        canonical_files([_group()], 2, _caches(mapping, mapping.local_page_size_bytes), 1)
        for mapping in _mappings(4, 1)
    ]
    wrote = [0] * 4
    for number in range(400):
        key = (number * 2654435761).to_bytes(32, "big")
        (writer,) = [i for i, files in enumerate(ranks) if files.writes(key)]
        wrote[writer] += 1
    assert all(ranks[i].file_ranks == (None,) for i in range(4))
    assert min(wrote) > 0, "they take turns"


# --- several files of a chunk ---------------------------------------------------------------


def test_a_lookup_asks_for_every_slice_once(make_manager, handshake):
    def asked(*file_ranks):
        num = len(file_ranks)
        workers = [handshake(rank, num, file_ranks=one) for rank, one in enumerate(file_ranks)]
        manager = make_manager(workers=workers)
        with pytest.MonkeyPatch.context() as patch:
            seen = []
            patch.setattr(
                "fskv.offload.lookup.probe_chunks",
                lambda ranks, *_: seen.extend(ranks) or Findings([True], 0.0),
            )
            manager.chunks._probe([ChunkId(b"k" * 32, 0)], bytes(1))
        return sorted("kv" if found.rank is None else f"r{found.rank}.kv" for found in seen)

    assert asked((0, 1), (2, 3)) == ["r0.kv", "r1.kv", "r2.kv", "r3.kv"]
    assert asked((0,), (0,), (1,), (1,)) == ["r0.kv", "r1.kv"]
    assert asked((None,), (None,)) == ["kv"]
    assert asked((0,), (1,)) == ["r0.kv", "r1.kv"], "without canonical_layout"


@pytest.mark.parametrize(("layout", "certified"), [(None, True), ("LBNHC", False), ("LBNHC", True)])
def test_a_format_that_vllm_does_not_certify_or_name_is_refused(layout, certified):
    config = SimpleNamespace(
        kv_cache_layout=layout, parallel=SimpleNamespace(is_parallelism_agnostic=certified)
    )
    if layout and certified:
        assert canonical_format_of(config, 2).endswith("-nhd/2")
        return
    with pytest.raises(ConfigError, match="option 'canonical_layout'"):
        canonical_format_of(config, 2)


def test_the_views_of_a_rank_are_its_slices():
    mapping = _mappings(2, 4)[1]
    caches = _caches(mapping, mapping.local_page_size_bytes)
    files = canonical_files([_group()], 2, caches, 4)
    assert files.file_ranks == (2, 3)
    for number, view, layouts in zip(files.file_ranks, files.tensors, files.layouts, strict=True):
        at = slice_offsets(mapping, 4)[number]
        nbytes = mapping.canonical_page_size_bytes // 4
        assert torch.equal(view, caches.tensors[0].tensor[:, at : at + nbytes])
        assert layouts[0].pages[0].nbytes == nbytes
        assert view.stride(0) == mapping.local_page_size_bytes
