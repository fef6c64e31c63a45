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
from shared_fs.clusters import nfs_rack

pytestmark = [pytest.mark.shared_fs, pytest.mark.engine, pytest.mark.timeout(1500)]
lab.needs_vllm()

MODEL = lab.MODELS["llama"]
CHUNK = lab.CHUNK_TOKENS[MODEL.name]
NUM_CHUNKS = MODEL.prompt_tokens // CHUNK
VERSION = "4.2"
_ENGINE_S = 600
# On such a node the first grant may come later than a start waits for it.
_UP = [{"sleep": 20.0}, *lab.SETTLE]
_STORED = [{"sleep": 3.0}, *lab.SETTLE]


class NodeEngine(lab.Engine):
    """An engine that runs on a node of the rack; request, result and log are on the host."""

    def _signal(self, number: signal.Signals) -> None:
        if self.running:
            self._process.send_signal_to_group(number)


@pytest.fixture(scope="module")
def rack():
    with nfs_rack([VERSION], memory="5G") as rack:
        yield rack


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
    assert result["exit_code"] == 0, (result.get("error"), result["log_path"])
    return lab.generates(result), lab.metrics(result)[-1]


def chunks(node, root):
    """The relative paths of chunk files, as a node sees them."""
    found = node.run(f"cd {root} && find . -path '*/chunks/*' -type f -name '*.kv'")
    return sorted(found.split())


@pytest.fixture(scope="module")
def expected():
    return lab.reference(MODEL.name)["main"]["tokens"]


def test_what_one_node_stores_the_other_loads(rack, root, real_weights, tmp_path):
    path, prompt, expected = real_weights
    num_chunks = len(prompt) // CHUNK
    steps = [*_UP, lab.generate(prompt, "main"), *_STORED, {"metrics": True}]
    seen = []
    for node, hit in ((rack.a, 0), (rack.b, num_chunks)):
        done, metrics = finished(engine(node, root, steps, tmp_path / node.name, path=path))
        assert done["main"]["tokens"] == expected
        assert done["main"]["num_cached_tokens"] == hit * CHUNK
        counters = ("stored_chunks", "loaded_chunks", "load_failures")
        counted = [lab.counter(metrics, name) for name in counters]
        assert counted == [num_chunks - hit, hit, 0]
        seen.append(chunks(node, root))
    assert seen[0] == seen[1]
    assert len(seen[0]) == num_chunks


def test_both_at_once_store_the_same_once_and_a_server_that_stalls_costs_a_recompute(
    rack, root, expected, tmp_path
):
    prompt = MODEL.main_prompt()
    talks, engines = [], []
    for node in (rack.a, rack.b):
        os.mkdir(tmp_path / node.name)
        talk = lab.Conversation(tmp_path / node.name)
        talk.say(*_UP)
        together = talk.pause(_ENGINE_S)
        talk.say(lab.generate(prompt, "first"), *_STORED, {"reset_prefix_cache": True})
        talk.say(lab.generate(prompt, "before"), {"reset_prefix_cache": True})
        stall = talk.pause(_ENGINE_S)
        talk.say(lab.generate(prompt, "stalled"), {"reset_prefix_cache": True})
        mend = talk.pause(_ENGINE_S)
        # A client repeats what was lost; the breaker looks every 5 s.
        talk.say({"sleep": 32.0}, *lab.SETTLE, {"reset_prefix_cache": True})
        talk.say({"sleep": 2.0}, *lab.SETTLE, lab.generate(prompt, "after"), {"metrics": True})
        talks.append(talk)
        directory = tmp_path / node.name / "engine"
        engines.append(engine(node, root, talk.steps, directory))

    def all_reach(number, between):
        """Once both engines are there."""

        def reached():
            paths = [talk.directory / f"{number}.reached" for talk in talks]
            return all(path.exists() for path in paths) or not all(e.running for e in engines)

        wait_for(reached, _ENGINE_S)
        between()
        for talk in talks:
            (talk.directory / f"{number}.go").touch()

    all_reach(together, lambda: None)
    try:
        all_reach(stall, rack.server.freeze)
        all_reach(mend, rack.mend)
        results = [finished(each)[0] for each in engines]
    finally:
        rack.mend()
    whole = NUM_CHUNKS * CHUNK
    for done in results:
        labels = ("first", "before", "stalled", "after")
        assert [done[label]["tokens"] for label in labels] == [expected] * 4
        cached = [done[label]["num_cached_tokens"] for label in labels]
        assert cached[1:] == [whole, 0, whole], "the stall was not met"
    assert len(chunks(rack.a, root)) == NUM_CHUNKS


def test_one_that_is_killed_while_it_stores_leaves_nothing_bad(rack, root, expected, tmp_path):
    main = lab.generate(MODEL.main_prompt(), "main")
    victim = engine(rack.a, root, [*_UP, main, main], tmp_path / "victim")
    wait_for(lambda: not victim.running or chunks(rack.b, root), _ENGINE_S)
    victim.kill()
    assert 0 < len(chunks(rack.b, root)) <= NUM_CHUNKS
    steps = [*_UP, main, *_STORED, {"metrics": True}]
    done, metrics = finished(engine(rack.b, root, steps, tmp_path / "heir"))
    assert done["main"]["tokens"] == expected
    assert done["main"]["num_cached_tokens"] > 0
    assert lab.counter(metrics, "load_failures") == 0
    assert len(chunks(rack.b, root)) == NUM_CHUNKS
