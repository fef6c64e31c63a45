"""Real engines on two clients of CephFS and of MooseFS, with fskv's default options.

An engine is a process of the host; its root is the mount of a client of its own. Run by
`make test-shared-fs`; needs vLLM beside what tests/shared_fs/install installs.
"""

from __future__ import annotations

import os

import architectures
import engine_lab as lab
import pytest
from world import wait_for

from shared_fs import ceph, moose, netns
from shared_fs.clusters import running

pytestmark = [pytest.mark.shared_fs, pytest.mark.engine, pytest.mark.timeout(900)]
lab.needs_vllm()

MODEL = lab.MODELS["llama"]


@pytest.fixture(autouse=True)
def no_engine_is_left():
    yield
    started, left = lab.end_engines()
    print(*started, sep="\n")
    assert not left


@pytest.fixture(scope="module", params=[ceph.Ceph, moose.Moose], ids=lambda kind: kind.title)
def cluster(request):
    with running(request.param) as cluster:
        yield cluster


@pytest.fixture
def roots(cluster, request):
    """The same new directory, on the mounts of both clients."""
    os.mkdir(f"{cluster.a.mount}/{request.node.originalname}")
    return [f"{node.mount}/{request.node.originalname}" for node in (cluster.a, cluster.b)]


def engine(root, steps, directory=None, *, path=None, **options):
    """Start one with fskv's default options; chunks are small, so that a prompt has many."""
    transfer = lab.connector(root, **lab.options_for(MODEL.name), **options)
    return lab.start_engine(lab.request(MODEL, steps, transfer=transfer, path=path), directory)


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


def test_real_weights(roots, real_weights):
    path, prompt, expected = real_weights
    steps = [lab.generate(prompt, "main"), *lab.SETTLE]
    num_tokens = lab.CHUNK_TOKENS[MODEL.name]
    for root, hit in zip(roots, (0, len(prompt) // num_tokens * num_tokens), strict=True):
        done = lab.generates(finished(engine(root, steps, path=path)))["main"]
        assert (done["tokens"], done["num_cached_tokens"]) == (expected, hit)


def test_an_engine_that_is_killed_while_it_stores_leaves_nothing_bad(roots, tmp_path):
    """The other one loads what was stored whole, computes the rest, and ends what was begun."""
    expected = lab.reference(MODEL.name)["main"]["tokens"]
    prompt = lab.generate(MODEL.main_prompt(), "main")
    victim = engine(roots[0], [prompt, prompt], tmp_path / "victim")
    wait_for(lambda: lab.chunks(roots[0]), lab.ENGINE_TIMEOUT_S)
    victim.kill()
    left = len(lab.chunks(roots[1]))
    result = finished(engine(roots[1], [prompt, *lab.SETTLE, {"metrics": True}]))
    assert lab.generates(result)["main"]["tokens"] == expected
    assert lab.counter(lab.metrics(result)[-1], "load_failures") == 0
    num_chunks = MODEL.prompt_tokens // lab.CHUNK_TOKENS[MODEL.name]
    assert 0 < left <= num_chunks
    skipped = lab.counter(lab.metrics(result)[-1], "stores_skipped")
    assert (len(lab.chunks(roots[0])), skipped) == (num_chunks, 0)
    assert not lab.damage.unsound(lab.chunks(roots[0]))
    last = finished(engine(roots[0], [prompt]))
    assert lab.generates(last)["main"]["tokens"] == expected
    assert (
        lab.generates(last)["main"]["num_cached_tokens"]
        == num_chunks * lab.CHUNK_TOKENS[MODEL.name]
    )


def test_two_engines_that_store_the_same_at_once_store_it_once(roots):
    expected = lab.reference(MODEL.name)["main"]["tokens"]
    steps = [lab.generate(MODEL.main_prompt(), "main"), *lab.SETTLE]
    for result in [finished(each) for each in [engine(root, steps) for root in roots]]:
        assert lab.generates(result)["main"]["tokens"] == expected
    stored = lab.chunks(roots[0])
    assert len(stored) == MODEL.prompt_tokens // lab.CHUNK_TOKENS[MODEL.name]
    assert not lab.damage.unsound(stored)
    assert [path.replace(roots[0], roots[1], 1) for path in stored] == lab.chunks(roots[1])


def test_servers_that_stall_cost_a_recompute_and_nothing_more(cluster, roots, tmp_path):
    expected = lab.reference(MODEL.name)["main"]["tokens"]
    prompt = MODEL.main_prompt()
    finished(engine(roots[0], [lab.generate(prompt, "main"), *lab.SETTLE]))
    talk = lab.Conversation(tmp_path)
    talk.say(lab.generate(prompt, "before"), {"reset_prefix_cache": True})
    stall = talk.pause()
    talk.say(lab.generate(prompt, "stalled"), {"reset_prefix_cache": True})
    mend = talk.pause()
    # The breaker looks every 5 s, and what failed is not asked for during the quarantine, of 30 s.
    talk.say({"sleep": 32.0}, *lab.SETTLE, {"reset_prefix_cache": True})
    talk.say(*lab.SETTLE, lab.generate(prompt, "after"))
    reader = engine(roots[1], talk.steps, tmp_path / "reader")
    try:
        talk.resume(reader, stall, lambda: netns.freeze(cluster.pids("server")))
        talk.resume(reader, mend, cluster.mend)
        done = lab.generates(finished(reader))
    finally:
        cluster.mend()
    cached = {label: done[label]["num_cached_tokens"] for label in ("before", "stalled", "after")}
    assert [done[label]["tokens"] for label in cached] == [expected] * 3
    assert cached["before"] == cached["after"] > 0
    assert cached["stalled"] == 0, "the stall was not met"


def test_two_architectures_on_one_mount(cluster, roots, tmp_path, measured):
    own = dict(zip(architectures.KERNELS, roots, strict=True))
    phases = architectures.Phases(own, tmp_path, pause_s=3.0, options={"lookup_timeout_s": 10})
    try:
        phases.run()
    finally:
        for row in phases.rows:
            measured(cluster.title, *row)
    assert "".join(row[0] for row in phases.rows) == "ABCDEFGHIJ"
