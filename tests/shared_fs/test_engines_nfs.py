"""Real engines on two clients of NFS 4.2, each with a kernel of its own, with fskv's default options.

An engine runs on its node (User-Mode Linux, one slow core), so a start takes a minute. Run by
`make test-shared-fs`; needs vLLM beside what tests/shared_fs/install installs.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys

import engine_lab as lab
import pytest
from places import REPOSITORY
from world import wait_for

from shared_fs import guest_engine, uml_rack

pytestmark = [pytest.mark.shared_fs, pytest.mark.engine, pytest.mark.timeout(1200)]
lab.needs_vllm()

MODEL = lab.MODELS["llama"]
CHUNK = lab.CHUNK_TOKENS[MODEL.name]
NUM_CHUNKS = MODEL.prompt_tokens // CHUNK
VERSION = "4.2"
_ENGINE_S = 600
# On such a node the maintenance process needs as long as this for its first grant.
_UP = [{"sleep": 20.0}, *lab.SETTLE]
_STORED = [{"sleep": 3.0}, *lab.SETTLE]


class NodeEngine(lab.Engine):
    """An engine that runs on a node of the rack; request, result and log are on the host."""

    def _signal(self, number: signal.Signals) -> None:
        if self.running:
            self._process.send_signal_to_group(number)


@pytest.fixture(scope="module")
def rack():
    if sentence := uml_rack.missing():
        pytest.skip(sentence)
    rack = uml_rack.Rack(memory="5G")
    try:
        rack.up()
        for node in (rack.a, rack.b):
            node.mount(VERSION)
        yield rack
    finally:
        rack.down()


@pytest.fixture
def root(rack, request):
    """The path of a new root on each node."""
    path = f"{uml_rack.MOUNT}/{VERSION}/{request.node.name}"
    rack.a.run(f"mkdir {path}")
    yield path
    started, left = lab.end_engines()
    print(*started, sep="\n")
    rack.mend()
    assert not left


def engine(node, root, steps, directory, *, path=None, **options):
    transfer = lab.connector(root, **lab.options_for(MODEL.name), **options)
    what = lab.request(MODEL, steps, transfer=transfer, path=path)

    def launch(paths, env, log_path):
        settings = {**what["env"], "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}"}
        words = [f"{name}={value}" for name, value in settings.items()]
        command = shlex.join(["env", *words, sys.executable, guest_engine.__file__, *paths])
        command = f"{command} >{shlex.quote(log_path)} 2>&1"
        return uml_rack.GuestProcess(node, command, f"{directory}/pid")

    os.makedirs(directory)
    return NodeEngine(what, str(directory), launch)


def finished(started):
    result = started.wait(_ENGINE_S)
    assert result["exit_code"] == 0, (result.get("error"), result.get("log_tail"))
    return lab.generates(result), lab.metrics(result)[-1]


def chunks(node, root):
    """The relative paths of chunk files, as a node sees them."""
    found = node.run(f"cd {root} && find . -path '*/chunks/*' -type f -name '*.kv'")
    return sorted(found.split())


@pytest.fixture(scope="module")
def expected():
    return lab.reference(MODEL.name)["main"]["tokens"]


PROMPT = lab.generate(MODEL.main_prompt(), "main")


def test_what_one_node_stores_the_other_loads(rack, root, expected, tmp_path):
    steps = [*_UP, PROMPT, *_STORED, {"metrics": True}]
    done, metrics = finished(engine(rack.a, root, steps, tmp_path / "a"))
    assert (done["main"]["tokens"], done["main"]["num_cached_tokens"]) == (expected, 0)
    assert lab.counter(metrics, "stored_chunks") == NUM_CHUNKS
    stored = chunks(rack.b, root)
    assert len(stored) == NUM_CHUNKS
    done, metrics = finished(engine(rack.b, root, steps, tmp_path / "b"))
    assert done["main"]["tokens"] == expected
    assert done["main"]["num_cached_tokens"] == NUM_CHUNKS * CHUNK
    counted = [
        lab.counter(metrics, name) for name in ("loaded_chunks", "stored_chunks", "load_failures")
    ]
    assert counted == [NUM_CHUNKS, 0, 0]
    assert chunks(rack.a, root) == stored


def test_real_weights(rack, root, real_weights, tmp_path):
    path, prompt, expected = real_weights
    steps = [*_UP, lab.generate(prompt, "main"), *_STORED, {"metrics": True}]
    for node, hit in ((rack.a, 0), (rack.b, len(prompt) // CHUNK * CHUNK)):
        done, metrics = finished(engine(node, root, steps, tmp_path / node.name, path=path))
        assert done["main"]["tokens"] == expected
        assert done["main"]["num_cached_tokens"] == hit
        assert lab.counter(metrics, "load_failures") == 0


def test_both_at_once_store_the_same_once(rack, root, expected, tmp_path):
    steps = [*_UP, PROMPT, *_STORED, {"metrics": True}]
    engines = [engine(node, root, steps, tmp_path / node.name) for node in (rack.a, rack.b)]
    for done, metrics in map(finished, engines):
        assert done["main"]["tokens"] == expected
        assert lab.counter(metrics, "load_failures") == 0
    assert len(chunks(rack.a, root)) == NUM_CHUNKS


def test_one_that_is_killed_while_it_stores_leaves_nothing_bad(rack, root, expected, tmp_path):
    victim = engine(rack.a, root, [*_UP, PROMPT, PROMPT], tmp_path / "victim")
    wait_for(lambda: not victim.running or chunks(rack.b, root), _ENGINE_S)
    victim.kill()
    assert 0 < len(chunks(rack.b, root)) <= NUM_CHUNKS
    steps = [*_UP, PROMPT, *_STORED, {"metrics": True}]
    done, metrics = finished(engine(rack.b, root, steps, tmp_path / "heir"))
    assert done["main"]["tokens"] == expected
    assert done["main"]["num_cached_tokens"] > 0
    assert lab.counter(metrics, "load_failures") == 0
    assert len(chunks(rack.b, root)) == NUM_CHUNKS


def test_a_server_that_stalls_costs_a_recompute(rack, root, expected, tmp_path):
    prompt = MODEL.main_prompt()
    talk = lab.Conversation(tmp_path)
    talk.say(*_UP, lab.generate(prompt, "first"), *_STORED, {"reset_prefix_cache": True})
    talk.say(lab.generate(prompt, "before"), {"reset_prefix_cache": True})
    stall = talk.pause()
    talk.say(lab.generate(prompt, "stalled"), {"reset_prefix_cache": True})
    mend = talk.pause()
    # A client repeats what was lost; the breaker looks every 5 s.
    talk.say({"sleep": 30.0}, *lab.SETTLE, {"reset_prefix_cache": True})
    talk.say({"sleep": 2.0}, *lab.SETTLE, lab.generate(prompt, "after"), {"metrics": True})
    reader = engine(rack.a, root, talk.steps, tmp_path / "reader", quarantine_s=5)
    try:
        talk.resume(reader, stall, rack.server.freeze)
        talk.resume(reader, mend, rack.mend)
        done, _ = finished(reader)
    finally:
        rack.mend()
    labels = ("first", "before", "stalled", "after")
    assert [done[label]["tokens"] for label in labels] == [expected] * 4
    cached = [done[label]["num_cached_tokens"] for label in labels]
    assert cached == [0, NUM_CHUNKS * CHUNK, 0, NUM_CHUNKS * CHUNK], "the stall was not met"
