"""One root with the namespaces of vLLM, SGLang and LMCache: the tools do not care whose they are."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from capacity_lab import dead_name
from lmcache_lab import FACTS
from tool_lab import run
from toy_engine import PAGE_NBYTES, identity
from world import damage, wait_for

from fskv.config import StoreConfig
from fskv.engines.lmcache.identity import ObjectKind, build_identity, chunk_of, read_model
from fskv.offload import BlockingStore, KvStore, Page
from fskv.types import ChunkId

pytest.importorskip("torch", reason="dtypes are torch's: make test")

FILE_NBYTES = 8192  # on disk, of a page

KEY = SimpleNamespace(
    chunk_hash=b"\x17" * 32, model_name="m", kv_rank=0x01000100, object_group_id=0, cache_salt=""
)


def of_lmcache():
    model = read_model("m", {**FACTS, "block_size": 16, "isa": "vec16", "weights_id": "w"})
    kind = ObjectKind.of(KEY, [[2, 1, 16, PAGE_NBYTES // 64]], ["torch.bfloat16"])
    return build_identity(model, kind, "0.5.6")


def identities():
    """One of each engine, with pages of one size."""
    plain = dataclasses.replace(identity("m"), blocks_per_chunk=1)
    return [
        dataclasses.replace(plain, engine="vllm"),
        dataclasses.replace(plain, engine="sglang"),
        of_lmcache(),
    ]


@pytest.fixture
def root(tmp_path):
    """A root with a namespace of each engine, and four chunks in each."""
    root = tmp_path / "kv"
    root.mkdir()
    config = StoreConfig(root=str(root), maintenance="off")
    for one in identities():
        memory = bytearray(bytes(range(256)) * (4 * PAGE_NBYTES // 256))
        kv = KvStore(config, one, {0: [memoryview(memory)]})
        store = BlockingStore(kv, PAGE_NBYTES)
        chunks = [chunk_of(KEY), *(ChunkId(bytes([number]) * 32, 0) for number in range(3))]
        assert all(store.store([Page(chunk, place) for place, chunk in enumerate(chunks)]))
        store.close()
    return root


def chunk_files(root):
    return sorted(root.glob("*/*/chunks/*/*.kv"))


def test_all_engines_namespaces_are_listed_counted_and_inspected(root):
    listed = run("ls", "--json", root=root)
    assert [line["chunks"] for line in listed.lines if line["type"] == "namespace"] == [4, 4, 4]
    assert "12" in run("du", root=root).stdout
    namespaces = {path.parents[2] for path in chunk_files(root)}
    (lmcache,) = [path for path in namespaces if path.parent.name == "cpu-x86_64"]
    said = run("inspect", KEY.chunk_hash.hex(), root=root).stderr  # all of them have it
    assert lmcache.name.rpartition("@")[2] in said
    assert "no such" in run("inspect", "ab" * 32, root=root).stderr, "the control"
    for other in namespaces - {lmcache}:
        assert "lmcache" in run("diff", lmcache.name, other.name, root=root).stdout


def test_all_engines_namespaces_are_judged_and_pruned(root):
    assert run("verify", "--read-data", root=root).exit_code == 0
    for path in chunk_files(root)[::4]:
        damage(path, 4096 + 5)
    judged = run("verify", "--read-data", "--json", root=root)
    assert judged.exit_code != 0
    assert len({line["path"] for line in judged.lines if line["type"] == "bad"}) == 3
    assert run("prune", "--max-size", "40KiB", "--yes", root=root).exit_code == 0
    assert len(chunk_files(root)) == 5


def test_of_all_engines_namespaces_one_is_removed_and_garbage_goes(root):
    names = sorted({path.parents[2].name for path in chunk_files(root)})
    parts = [path.with_name(f"{dead_name()}.part") for path in chunk_files(root)[::4]]
    for part in parts:
        part.write_bytes(b"x")
    assert run("prune", "--yes", root=root).exit_code == 0
    assert not [part for part in parts if part.exists()]
    for left in (8, 4, 0):
        assert len(chunk_files(root)) == left + 4
        removed = run("rm", names.pop(), "--yes", root=root)
        assert removed.exit_code == 0, removed
        assert len(chunk_files(root)) == left


@pytest.mark.parametrize("bound", [True, False], ids=["bound", "control"])
def test_all_engines_hold_one_bound_and_one_of_them_has_the_lease(tmp_path, bound):
    """The control: without a bound the same pages take more. It goes on when the holder has gone.

    The bound holds a few seconds of writing: see docs/architecture.md, "Capacity".
    """
    most = 250 * FILE_NBYTES
    root = tmp_path / "kv"
    root.mkdir()
    config = StoreConfig(
        root=str(root), maintenance="on", max_bytes=most if bound else None, keep_free=0
    )
    memory = [memoryview(bytearray(bytes(range(256)) * (4 * PAGE_NBYTES // 256)))]
    stores = [KvStore(config, one, {0: memory}) for one in identities()]
    engines = [(kv, BlockingStore(kv, PAGE_NBYTES)) for kv in stores]
    sizes, holders, stored = [], [], dict.fromkeys(stores, 0)

    def store(first):
        for number in range(first, first + 160, 4):
            if bound:
                wait_for(lambda: all(is_counted(kv.lookup) for kv, _ in engines), 60)
            for kv, engine in engines:
                chunks = [
                    ChunkId(bytes([at & 255, at >> 8]) * 16, 0) for at in range(number, number + 4)
                ]
                stored[kv] += sum(engine.store([Page(c, at) for at, c in enumerate(chunks)]))
            sizes.append(FILE_NBYTES * len(chunk_files(root)))
            holders.append(sum(kv.lookup.capacity.state.holder for kv, _ in engines))

    def is_counted(lookup):
        """Whether the leader has counted nearly all that was written, however slow it is."""
        lookup.end_step()
        capacity = lookup.capacity
        return capacity._written - capacity.state.counted <= most // 50

    def leads():
        return [pair for pair in engines if pair[0].lookup.capacity.state.holder]

    try:
        wait_for(lambda: len(leads()) == 1, 60)
        store(0)
        (first,) = leads()
        engines.remove(first)
        first[1].close()
        wait_for(lambda: len(leads()) == 1, 60)
        store(1000)
    finally:
        for _, engine in engines:
            engine.close()
    assert max(holders) == 1
    assert all(stored.values()), stored
    assert (max(sizes) <= 1.2 * most) is bound, max(sizes) / most
