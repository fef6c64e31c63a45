"""Every byte of a block goes to a file and back, in each of vLLM's KV layouts, from host and from GPU memory.

The layouts are vLLM's own, on a CPU tensor: its own functions allocate, bind and hand over. The GPU is the
simulated one: a copy of the tensor lies on it during a job.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, product

import pytest
from world import VLLM, make_identity, wait_for

pytest.importorskip("vllm", reason="these tests need the vllm environment: make test")

import kv_layouts as kv
import torch
from cuda_sim import simulation
from cuda_torch import on_simulation
from vllm.v1.kv_offload.base import GPULoadStoreSpec

from fskv.config import StoreConfig
from fskv.engines.vllm import places
from fskv.engines.vllm.files import own_files
from fskv.engines.vllm.identity import engine_groups
from fskv.engines.vllm.manager import ChunkKeys
from fskv.engines.vllm.weights import Purity, Weights
from fskv.engines.vllm.worker import FskvWorker
from fskv.errors import ConfigError, RestError
from fskv.root.root import Root
from fskv.types import ChunkId

pytestmark = VLLM

CHUNK = 2  # blocks
KERNELS = (None, kv.KERNEL_TOKENS)
CASES = list(product(kv.MODELS, kv.LAYOUTS, KERNELS))
# Where vLLM's own rows do not hold a block whole: heads outside of blocks, and states that lie apart.
LOST = {(model, "LHBNC") for model in ("full", "window", "full and window")}
LOST |= {("states", layout) for layout in ("BLHNC", "BLNHC", "BHLNC")}
# Where vLLM itself lays blocks of one group over other blocks of another.
OVERLAPPING = {("full and states", "LHBNC")}


def cache_of(model, layout, kernel):
    """Return vLLM's cache; None where vLLM refuses to make one."""
    try:
        return kv.Cache(model, layout, kernel)
    except (ValueError, AssertionError):
        return None


class Trip:
    """A worker of fskv between the blocks of a cache and files: one chunk of each group."""

    def __init__(self, cache, groups, rows, root, gpu=None):
        root.mkdir()
        self.cache, self.mirror = cache, None
        files = own_files(groups, CHUNK, rows, None)
        if gpu is not None:
            flat = gpu.flat(cache.memory.numel())
            tensors = [
                gpu.rows(flat, t.shape, t.stride(0), t.storage_offset()) for t in files.tensors
            ]
            files = replace(files, tensors=tuple(tensors))
            self.mirror = torch.from_numpy(gpu.opened(gpu.rows(flat, (1, len(flat)), len(flat)))[0])
        options = {"maintenance": "off", "io_threads": 1, "direct_io": "off"}
        config = StoreConfig.from_mapping({"root": str(root), **options})
        space = Root.open(str(root), create=True).open_namespace(make_identity())
        how = {"open_namespace": lambda epoch: None, "rank": 0, "world_size": 1}
        how["purity"] = Purity(Weights(), fixed=True)
        self.worker = FskvWorker(config, groups, files, space, **how)
        self.keys = ChunkKeys([ChunkId(b"k" * 32, group.spec.group_idx) for group in groups])

    def do(self, blocks, *, load):
        """Store or load; the chunk of the g-th group is in the g-th of these lists of blocks."""
        ended, num = set(), len(blocks)
        pages = GPULoadStoreSpec([*chain(*blocks)], [CHUNK] * num, [0] * num)
        if self.mirror is not None:
            self.mirror.copy_(self.cache.memory)
        if load:
            self.worker.submit_load(1, self.keys, pages)
        else:
            self.worker.submit_store(1, pages, self.keys)
        wait_for(lambda: ended.update(r.job_id for r in self.worker.get_finished()) or ended)
        wait_for(lambda: self.worker.get_finished() or self.worker.mover.idle)
        assert not self.worker.take_failed_jobs()
        if self.mirror is not None:
            self.cache.memory.copy_(self.mirror)


def round_trip(cache, groups, rows, root, gpu=None):
    """Store two blocks of each group and load them into others.

    Returns how many bytes came, of how many, and whether all other blocks are as they were.
    """
    trip = Trip(cache, groups, rows, root, gpu)
    try:
        memory = cache.memory
        memory.copy_(torch.randint(0, 256, memory.shape, dtype=torch.uint8))
        sources = [[1 + 4 * i, cache.num_blocks - 2 * i - 1] for i in range(len(groups))]
        targets = [[2 + 4 * i, cache.num_blocks - 2 * i - 2] for i in range(len(groups))]
        trip.do(sources, load=False)
        before = memory.clone()
        layers = [name for group in groups for name in group.layer_names]
        others = set(range(cache.num_blocks)) - set(chain(*targets))
        kept = {(name, b): cache.block(name, b) for name in layers for b in others}
        wanted = [
            (cache.block(name, source), name, target)
            for group, of_group, into in zip(groups, sources, targets, strict=True)
            for source, target in zip(of_group, into, strict=True)
            for name in group.layer_names
        ]
        trip.do(targets, load=True)
        assert not torch.equal(memory, before)
    finally:
        trip.worker.shutdown()
    unharmed = all(cache.block(*where) == content for where, content in kept.items())
    came = sum(
        sum(a == b for a, b in zip(content, cache.block(name, target), strict=True))
        for content, name, target in wanted
    )
    return came, sum(len(content) for content, _, _ in wanted), unharmed


@pytest.fixture
def gpu(request, monkeypatch):
    """The simulated GPU, or None: the pages are in host memory."""
    if request.param == "host":
        yield None
        return
    sim = simulation()
    sim.reset(1, 0.001)
    made = on_simulation(monkeypatch, sim).gpu("cuda:0")
    torch.cuda.set_device("cuda:0")
    with torch.cuda.stream(torch.cuda.ExternalStream(made.new_stream().value, "cuda:0")):
        yield made
    assert sim.misuses == []
    sim.reset(1, 0.0)


@pytest.mark.parametrize("gpu", ["host", "GPU"], indirect=True)
@pytest.mark.parametrize(("model", "layout", "kernel"), CASES)
def test_every_byte_of_a_block_makes_the_round_trip(model, layout, kernel, tmp_path, gpu):
    cache = cache_of(model, layout, kernel)
    if cache is None:  # see the next test
        return
    groups = engine_groups(cache.vllm_config, cache.config)
    handed_over = cache.handed_over()
    found = places.places_of(cache.vllm_config, groups, cache.num_blocks)
    check = (cache.vllm_config, groups, found, places.rows_of(handed_over), cache.num_blocks)
    if (model, layout) in OVERLAPPING | LOST:
        with pytest.raises(
            ConfigError, match=f"found {layout}, expected LBHNC or LBNHC"
        ) as refused:
            places.check_rows(*check)
        assert "\n" not in str(refused.value)
        return
    places.check_rows(*check)
    came, of_all, unharmed = round_trip(cache, groups, handed_over, tmp_path / "kv", gpu)
    assert of_all == CHUNK * sum(group.block_nbytes for group in groups)
    assert came == of_all
    assert unharmed


def test_vllm_makes_most_of_these_caches_in_every_layout():
    made = {case[:2] for case in CASES if cache_of(*case) is not None}
    assert {layout for _, layout in made} == {*kv.LAYOUTS}
    # Of heads of two sizes it makes none with LHBNC and BHLNC.
    assert len(made) == len(kv.MODELS) * len(kv.LAYOUTS) - 2


@pytest.mark.parametrize("gpu", ["host", "GPU"], indirect=True)
@pytest.mark.parametrize(("model", "layout"), sorted(LOST))
def test_negative_control_the_rows_that_vllm_offers_lose_bytes(model, layout, tmp_path, gpu):
    cache = cache_of(model, layout, None)
    groups = engine_groups(cache.vllm_config, cache.config)
    came, of_all, _ = round_trip(cache, groups, cache.handed_over(), tmp_path / "kv", gpu)
    assert came < of_all


@pytest.mark.parametrize(("model", "layout"), sorted(OVERLAPPING))
def test_negative_control_blocks_of_such_a_cache_lie_over_each_other(model, layout):
    """A write to one block changes others, with vLLM alone: there is nothing to store."""
    cache = cache_of(model, layout, None)
    names = cache.layers
    before = {(name, b): cache.block(name, b) for name in names for b in range(kv.NUM_BLOCKS)}
    for state in cache.layers["l.1"].kv_cache:
        state[3] = 1
    changed = {b for (name, b), was in before.items() if cache.block(name, b) != was}
    assert changed - {3}


# --- the check itself: what it must see --------------------------------------------------------


def shifted(cache, rows, by):
    """Return rows that begin so many bytes further on."""
    return [
        [(t.as_strided(t.shape, t.stride(), t.storage_offset() + by), n) for t, n in of_group]
        for of_group in rows
    ]


@pytest.mark.parametrize(
    "fault", ["short", "shifted", "of the next block", "apart", "one is missing"]
)
@pytest.mark.parametrize("model", ["full", "states", "full and window"])
def test_a_row_that_is_wrong_by_a_byte_is_seen(model, fault):
    cache = cache_of(model, "LBHNC", None)
    groups = engine_groups(cache.vllm_config, cache.config)
    found = places.places_of(cache.vllm_config, groups, cache.num_blocks)
    rows = places.rows_of(cache.handed_over())

    def lost(rows):
        return places.lost(groups, found, rows, cache.num_blocks)

    assert lost(rows) is None
    tensor, nbytes = rows[0][0]
    wrong = {
        "short": (tensor, nbytes - 1),
        "shifted": shifted(cache, [[(tensor[:-1], nbytes)]], 1)[0][0],
        "of the next block": (tensor, tensor.stride(0) + 1),
        "apart": (
            tensor.as_strided((4, nbytes), (tensor.stride(0) + 64, 1), tensor.storage_offset()),
            nbytes,
        ),
    }
    of_group = rows[0][1:] if fault == "one is missing" else [wrong[fault], *rows[0][1:]]
    said = lost([of_group, *rows[1:]])
    assert said is not None
    assert "l.0" in said


UNBOUND = {
    "unbound": lambda bound: torch.tensor([]),
    "an object": lambda bound: object(),
    "of fewer bytes": lambda bound: bound[..., :-1],
    "overlapping": lambda bound: bound.as_strided(bound.shape, (*bound.stride()[:-1], 0)),
    "not blocks": lambda bound: bound[1:],
}


@pytest.mark.parametrize("fault", [*UNBOUND, "no layer"])
def test_a_layer_that_does_not_tell_where_its_kv_is_has_the_engine_rest(fault):
    cache = cache_of("full", "LBHNC", None)
    groups = engine_groups(cache.vllm_config, cache.config)
    layer = cache.layers["l.1"]
    if fault == "no layer":
        del cache.layers["l.1"]
    else:
        layer.kv_cache = UNBOUND[fault](layer.kv_cache)
    with pytest.raises(RestError, match=r"KV layer l\.1: ") as rests:
        places.places_of(cache.vllm_config, groups, cache.num_blocks)
    assert "\n" not in str(rests.value)
