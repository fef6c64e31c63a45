"""One root with the namespaces of vLLM, SGLang and LMCache: the tools do not care whose they are."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from tool_lab import run
from toy_engine import PAGE_NBYTES, identity
from world import damage

from fskv.config import StoreConfig
from fskv.engines.lmcache.identity import ObjectKind, build_identity, chunk_of, read_model
from fskv.offload import BlockingStore, KvStore, Page
from fskv.types import ChunkId

pytest.importorskip("torch", reason="dtypes are torch's: make test")

MODEL = {
    "engine": "vllm 0.32.0",
    "arch": "cpu-x86_64",
    "attention_backend": "CPU_ATTN",
    "block_size": 16,
    "isa": "vec16",
    "media": "none",
    "server": [0, 1],
}
KEY = SimpleNamespace(
    chunk_hash=b"\x17" * 32, model_name="m", kv_rank=0x01000100, object_group_id=0, cache_salt=""
)


def of_lmcache():
    model = read_model("m", {**MODEL, "settings": {}, "weights_id": "w"})
    kind = ObjectKind.of(KEY, [[2, 1, 16, PAGE_NBYTES // 64]], ["torch.bfloat16"])
    return build_identity(model, kind, "0.5.6")


@pytest.fixture
def root(tmp_path):
    """A root with a namespace of each engine, and four chunks in each."""
    root = tmp_path / "kv"
    root.mkdir()
    config = StoreConfig(root=str(root), maintenance="off")
    plain = dataclasses.replace(identity("m"), blocks_per_chunk=1)
    identities = [
        dataclasses.replace(plain, engine="vllm"),
        dataclasses.replace(plain, engine="sglang"),
        of_lmcache(),
    ]
    for one in identities:
        memory = bytearray(bytes(range(256)) * (4 * PAGE_NBYTES // 256))
        kv = KvStore(config, one, {0: [memoryview(memory)]})
        store = BlockingStore(kv, config.deadline, PAGE_NBYTES)
        chunks = [chunk_of(KEY), *(ChunkId(bytes([number]) * 32, 0) for number in range(3))]
        assert all(store.store([Page(chunk, place) for place, chunk in enumerate(chunks)]))
        store.close()
    return root


def chunk_files(root):
    return sorted(root.glob("*/*/chunks/*/*.kv"))


def test_all_engines_namespaces_are_listed_counted_and_explained(root):
    listed = run("ls", "--json", root=root)
    assert [line["chunks"] for line in listed.lines if line["type"] == "namespace"] == [4, 4, 4]
    assert "12" in run("du", root=root).stdout
    namespaces = {path.parents[2] for path in chunk_files(root)}
    (lmcache,) = [path for path in namespaces if path.parent.name == "cpu-x86_64"]
    said = run("explain", lmcache.name, KEY.chunk_hash.hex(), root=root)
    assert said.exit_code == 0, said
    assert run("explain", lmcache.name, "ab" * 32, root=root).exit_code != 0, "the control"
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
