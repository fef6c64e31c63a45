"""Real engines on two clients of CephFS and of MooseFS, with fskv's default options.

An engine is a process of the host; its root is the mount of a client of its own. Run by
`make test-shared-fs`; needs vLLM beside what tests/shared_fs/install installs.
"""

from __future__ import annotations

import os

import engine_lab as lab
import pytest
from world import wait_for

from shared_fs import ceph, moose

pytestmark = [pytest.mark.shared_fs, pytest.mark.engine, pytest.mark.timeout(900)]
lab.needs_vllm()

MODEL = lab.MODELS["llama"]


@pytest.fixture(autouse=True)
def no_engine_is_left():
    yield
    started, left = lab.end_engines()
    print(*started, sep="\n")
    assert not left


@pytest.fixture(scope="module", params=["CephFS", "MooseFS"])
def cluster(request):
    module, kind = {"CephFS": (ceph, ceph.Ceph), "MooseFS": (moose, moose.Moose)}[request.param]
    if sentence := module.missing():
        pytest.skip(sentence)
    cluster = kind()
    try:
        cluster.up()
        yield cluster
    finally:
        cluster.down()


@pytest.fixture
def roots(cluster, request):
    """The same new directory, on the mounts of both clients."""
    os.mkdir(f"{cluster.a.mount}/{request.node.originalname}")
    return [f"{node.mount}/{request.node.originalname}" for node in (cluster.a, cluster.b)]


def engine(root, steps, directory=None):
    """Start one with fskv's default options; chunks are small, so that a prompt has many."""
    transfer = lab.connector(root, **lab.options_for(MODEL.name))
    return lab.start_engine(lab.request(MODEL, steps, transfer=transfer), directory)


def finished(started):
    result = started.wait()
    assert result["exit_code"] == 0, result.get("error")
    return result


def test_a_second_client_hits_all_that_the_first_one_stored_three_times_in_a_row(roots):
    expected = lab.reference(MODEL.name)["main"]["tokens"]
    prompt = lab.generate(MODEL.main_prompt(), "main")
    # Long enough for the maintenance process to look at the file system's free inodes more than once.
    steps = [prompt, *lab.SETTLE, {"sleep": 3.0}, *lab.SETTLE, {"metrics": True}]
    first = finished(engine(roots[0], steps))
    assert lab.generates(first)["main"]["tokens"] == expected
    num_stored = lab.counter(lab.metrics(first)[-1], "stored_chunks")
    stored = lab.snapshot(roots[1])
    assert len(stored) == num_stored == MODEL.prompt_tokens // lab.CHUNK_TOKENS[MODEL.name]
    for root in (roots[1], roots[1], roots[0]):
        again = finished(engine(root, steps))
        done, metrics = lab.generates(again)["main"], lab.metrics(again)[-1]
        assert done["tokens"] == expected
        assert done["num_cached_tokens"] == num_stored * lab.CHUNK_TOKENS[MODEL.name]
        assert lab.counter(metrics, "loaded_chunks") == num_stored
        assert lab.counter(metrics, "stored_chunks") == 0
        assert lab.counter(metrics, "load_failures") == 0
    assert lab.snapshot(roots[1]) == stored, "stored once, and nothing of it was pruned"


def test_an_engine_that_is_killed_while_it_stores_leaves_nothing_bad(roots, tmp_path):
    """The other one loads what was stored whole, computes the rest, and ends what was begun."""
    expected = lab.reference(MODEL.name)["main"]["tokens"]
    prompt = lab.generate(MODEL.main_prompt(), "main")
    victim = engine(roots[0], [prompt, prompt], tmp_path / "victim")
    wait_for(lambda: lab.chunks(roots[0]), lab.ENGINE_TIMEOUT_S)
    victim.kill()
    left = len(lab.chunks(roots[1]))
    result = finished(engine(roots[1], [prompt, {"metrics": True}]))
    assert lab.generates(result)["main"]["tokens"] == expected
    assert lab.counter(lab.metrics(result)[-1], "load_failures") == 0
    num_chunks = MODEL.prompt_tokens // lab.CHUNK_TOKENS[MODEL.name]
    assert 0 < left <= num_chunks
    assert len(lab.chunks(roots[0])) == num_chunks
    assert not lab.damage.unsound(lab.chunks(roots[0]))
    last = finished(engine(roots[0], [prompt]))
    assert lab.generates(last)["main"]["tokens"] == expected
    assert (
        lab.generates(last)["main"]["num_cached_tokens"]
        == num_chunks * lab.CHUNK_TOKENS[MODEL.name]
    )
