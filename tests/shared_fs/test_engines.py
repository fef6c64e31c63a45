"""Real engines on two clients of CephFS, of MooseFS and of NFS 4.2, with fskv's default options.

On CephFS and MooseFS an engine is a process of the host, and its root the mount of a client of its own. On
NFS it runs on its node (User-Mode Linux, one slow core), so a start takes a minute. Run by
`make test-shared-fs`; needs vLLM beside what tests/shared_fs/install installs.
"""

from __future__ import annotations

import os
import shlex
import sys

import architectures
import engine_lab as lab
import pytest
from places import REPOSITORY
from world import wait_for

from shared_fs import guest_engine, uml_rack
from shared_fs.ceph import Ceph
from shared_fs.conftest import on
from shared_fs.moose import Moose

pytestmark = [pytest.mark.shared_fs, pytest.mark.engine, pytest.mark.timeout(1500)]
lab.needs_vllm()

MODEL = lab.MODELS["llama"]
CHUNK = lab.CHUNK_TOKENS[MODEL.name]
NUM_CHUNKS = MODEL.prompt_tokens // CHUNK
_ENGINE_S = 600
# On a slow node the first grant may come later than a start waits for it.
_UP = [{"sleep": 20.0}, *lab.SETTLE]
# Long enough for the maintenance process to look at the file system's free inodes more than once.
_STORED = [{"sleep": 3.0}, *lab.SETTLE]


class Nfs(uml_rack.Nfs4):
    """Nodes that have room for an engine."""

    memory_of_clients = "5G"


on_the_host = on(Ceph, Moose)
everywhere = on(Ceph, Moose, Nfs)


@pytest.fixture
def roots(cluster, request):
    """The same new directory, on the mounts of both clients."""
    nodes = (cluster.a, cluster.b)
    roots = [f"{node.mount}/{request.node.originalname}" for node in nodes]
    cluster.a.run(f"mkdir {roots[0]}")
    yield dict(zip(nodes, roots, strict=True))
    started, left = lab.end_engines()
    print(*started, sep="\n")
    cluster.mend()
    assert not left


class NodeEngine(lab.Engine):
    """An engine that runs on a node of the rack; request, result and log are on the host."""

    def _signal(self, number):
        if self.running:
            self._process.send_signal_to_group(number)


def engine(node, root, steps, directory, *, path=None):
    """Start one with fskv's default options; chunks are small, so that a prompt has many."""
    transfer = lab.connector(root, **lab.options_for(MODEL.name))
    if not isinstance(node, uml_rack.UmlNode):
        return lab.start_engine(lab.request(MODEL, steps, transfer=transfer, path=path), directory)
    what = lab.request(MODEL, [*_UP, *steps], transfer=transfer, path=path)

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


def assert_sound(node, root):
    node.run(f"cd {REPOSITORY} && {sys.executable} -m tools verify --read-data --root {root}")


@pytest.fixture(scope="module")
def expected():
    return lab.reference(MODEL.name)["main"]["tokens"]


def one_stores_the_others_hit(roots, order, prompt, path, expected, directory):
    """Start engines on these nodes, one after the other: the first stores each chunk, the others hit all."""
    num_chunks = len(prompt) // CHUNK
    steps = [lab.generate(prompt, "main"), *_STORED, {"metrics": True}]
    seen = []
    for number, node in enumerate(order):
        started = engine(node, roots[node], steps, directory / str(number), path=path)
        done, metrics = finished(started)
        hit = num_chunks if number else 0
        assert done["main"]["tokens"] == expected
        assert done["main"]["num_cached_tokens"] == hit * CHUNK
        counters = ("stored_chunks", "loaded_chunks", "load_failures")
        counted = [lab.counter(metrics, name) for name in counters]
        assert counted == [num_chunks - hit, hit, 0]
        seen.append(chunks(node, roots[node]))
        assert len(seen[-1]) == num_chunks
        assert seen[-1] == seen[0], "stored once, and nothing of it was pruned"


@on_the_host
def test_a_second_client_hits_all_that_the_first_one_stored_three_times_in_a_row(
    roots, expected, tmp_path
):
    a, b = roots
    prompt = MODEL.main_prompt()
    one_stores_the_others_hit(roots, (a, b, b, a), prompt, None, expected, tmp_path)


@everywhere
def test_what_one_node_stores_the_other_loads(roots, real_weights, tmp_path):
    path, prompt, expected = real_weights
    one_stores_the_others_hit(roots, roots, prompt, path, expected, tmp_path)


@everywhere
def test_both_at_once_store_the_same_once_and_a_server_that_stalls_costs_a_recompute(
    cluster, roots, expected, tmp_path
):
    prompt = MODEL.main_prompt()
    talks, engines = [], []
    for node, root in roots.items():
        os.mkdir(tmp_path / node.name)
        talk = lab.Conversation(tmp_path / node.name)
        together = talk.pause(_ENGINE_S)
        talk.say(lab.generate(prompt, "first"), *_STORED, {"reset_prefix_cache": True})
        talk.say(lab.generate(prompt, "before"), {"reset_prefix_cache": True})
        stall = talk.pause(_ENGINE_S)
        talk.say(lab.generate(prompt, "stalled"), {"reset_prefix_cache": True})
        mend = talk.pause(_ENGINE_S)
        # A client repeats what was lost; the breaker looks every 5 s, and what failed is not asked for
        # during the quarantine, of 30 s.
        talk.say({"sleep": 32.0}, *lab.SETTLE, {"reset_prefix_cache": True})
        talk.say({"sleep": 2.0}, *lab.SETTLE, lab.generate(prompt, "after"), {"metrics": True})
        talks.append(talk)
        engines.append(engine(node, root, talk.steps, tmp_path / node.name / "engine"))

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
    all_reach(stall, cluster.stall)
    all_reach(mend, cluster.mend)
    whole = NUM_CHUNKS * CHUNK
    for done, _ in map(finished, engines):
        labels = ("first", "before", "stalled", "after")
        assert [done[label]["tokens"] for label in labels] == [expected] * 4
        cached = [done[label]["num_cached_tokens"] for label in labels]
        assert cached[1:] == [whole, 0, whole], "the stall was not met"
    seen = [chunks(node, root) for node, root in roots.items()]
    assert seen[0] == seen[1]
    assert len(seen[0]) == NUM_CHUNKS
    assert_sound(*next(iter(roots.items())))


@everywhere
def test_one_that_is_killed_while_it_stores_leaves_nothing_bad(roots, expected, tmp_path):
    """The other one loads what was stored whole, computes the rest, and ends what was begun."""
    (node_a, root_a), (node_b, root_b) = roots.items()
    main = lab.generate(MODEL.main_prompt(), "main")
    victim = engine(node_a, root_a, [main, main], tmp_path / "victim")
    wait_for(lambda: not victim.running or chunks(node_b, root_b), _ENGINE_S)
    victim.kill()
    assert 0 < len(chunks(node_b, root_b)) <= NUM_CHUNKS
    steps = [main, *_STORED, {"metrics": True}]
    done, metrics = finished(engine(node_b, root_b, steps, tmp_path / "heir"))
    assert done["main"]["tokens"] == expected
    if isinstance(node_b, uml_rack.UmlNode):  # so slow that the first chunks are whole
        assert done["main"]["num_cached_tokens"] > 0
    counters = ("load_failures", "stores_skipped")
    assert [lab.counter(metrics, name) for name in counters] == [0, 0]
    assert len(chunks(node_b, root_b)) == NUM_CHUNKS
    assert_sound(node_b, root_b)
    done, _ = finished(engine(node_a, root_a, steps, tmp_path / "last"))
    assert done["main"]["tokens"] == expected
    assert done["main"]["num_cached_tokens"] == NUM_CHUNKS * CHUNK


@on_the_host
def test_two_architectures_on_one_mount(cluster, roots, tmp_path, measured):
    own = dict(zip(architectures.KERNELS, roots.values(), strict=True))
    phases = architectures.Phases(own, tmp_path, pause_s=3.0, options={"lookup_timeout_s": 10})
    try:
        phases.run()
    finally:
        for row in phases.rows:
            measured(cluster.title, *row)
    assert "".join(row[0] for row in phases.rows) == "ABCDEFGHIJ"
