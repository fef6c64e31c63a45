"""A real LMCache server with fskv behind it, and real vLLM engines: SmolLM2's weights, greedy decoding."""

from __future__ import annotations

import dataclasses
import pathlib
import shutil

import lmcache_lab as lab
import pytest
from stored_files import DAMAGES, OTHER, PROMPT, TEXT, chunk_files
from world import wait_for

pytest.importorskip("lmcache", reason="LMCache has an environment of its own: make test-lmcache")

from faults import files
from faults.disk import DiskFaults
from fskv.format import chunk_file

pytestmark = [
    pytest.mark.lmcache,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not lab.MODEL, reason="no model: make test-lmcache"),
]

# What went wrong is believed for a moment only, so that it is seen to heal.
QUICK = {"module": "quick_lmcache"}  # with constants for a test that cannot wait
MIB = 2**20


def whole_chunks(said) -> int:
    """Tokens of a prompt in whole chunks."""
    return said["prompt_tokens"] // lab.CHUNK_TOKENS * lab.CHUNK_TOKENS


def identity(path):
    """Which file stands there; a number alone may be that of the one before, when that is gone."""
    if not path.exists():
        return None
    found = path.stat()
    return found.st_ino, found.st_mtime_ns


def wait_replaced(path, bad):
    """Wait until it was stored again: a file is never written in its place."""
    wait_for(lambda: identity(path) not in (None, bad), 60)


def again(server, engine, prompt):
    """Generate with nothing in the server's memory: what is used comes from files."""
    lab.forget(server)
    return engine.generate(prompt)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A root that a server and an engine have stored PROMPT in and left; not to be changed."""
    directory = tmp_path_factory.mktemp("stored")
    root = directory / "kv"
    root.mkdir()
    with lab.pair(directory, lab.plugin(root)) as (server, engine):
        said = engine.generate(PROMPT)
        wait_for(lambda: len(chunk_files(root)) == whole_chunks(said) // lab.CHUNK_TOKENS, 120)
        assert engine.close() == 0
        server.close()
    assert said["loaded"] == 0
    return root, said


@pytest.fixture
def root(stored, tmp_path):
    return pathlib.Path(shutil.copytree(stored[0], tmp_path / "kv"))


def _other_namespace(path, _):
    """As a file of the same key that an engine with other weights has stored."""
    content = bytearray(path.read_bytes())
    header = chunk_file.parse_header(content)
    digest = bytes(byte ^ 0xFF for byte in header.namespace_digest)
    other = dataclasses.replace(header, namespace_digest=digest)
    content[: header.header_nbytes] = chunk_file.encode_header(other, header.header_nbytes)
    path.write_bytes(content)


DAMAGES = {**DAMAGES, "another namespace's file": _other_namespace}


def test_both_are_restarted_and_load_what_was_stored_and_damage_is_computed(stored, root, tmp_path):
    """The control is at the end: zeros under right checksums are served, and change the tokens."""
    _, first = stored
    with lab.pair(tmp_path, lab.plugin(root, **QUICK)) as (server, engine):
        said = engine.generate(PROMPT)
        assert (said["text"], said["loaded"]) == (first["text"], whole_chunks(first))
        assert "lmcache:fskv_loaded_chunks_total{" in server.metrics()
        sound = set(chunk_files(root))
        for what, damage in DAMAGES.items():
            spoiled = sorted(sound)[2]
            damage(spoiled, sorted(sound)[3])
            bad = identity(spoiled)
            hurt = again(server, engine, PROMPT)
            assert hurt["text"] == first["text"], what
            assert hurt["loaded"] < whole_chunks(first), f"the fault was met: {what}"
            wait_replaced(spoiled, bad)
            lab.wait_idle(server)
            assert set(chunk_files(root)) == sound, what
            wait_for(lambda: files.unsound([str(path) for path in sound]) == [], 60)
        healed = again(server, engine, PROMPT)
        assert (healed["text"], healed["loaded"]) == (first["text"], whole_chunks(first))
        (adapter,) = server.ask("/status")["storage_manager"]["l2_adapters"]
        assert adapter["is_healthy"]
        assert len(adapter["namespaces"]) == 1
        for path in sound:
            files.zero_payload(str(path))
        control = again(server, engine, PROMPT)
        assert control["loaded"] == whole_chunks(first)
        assert control["text"] != first["text"], "what is loaded is what decides"
        assert engine.close() == 0
    assert "Traceback" not in server.log()


def test_an_engine_with_other_blocks_computes_what_it_could_not_read(stored, root, tmp_path):
    """The control is at the end: under the first one's block size it loads KV that is wrong for it."""
    _, first = stored
    other = lab.BLOCK_TOKENS // 2
    computed = None  # by this engine: its attention may round otherwise
    for told in (other, lab.BLOCK_TOKENS):
        plugin = lab.plugin(root, block_tokens=told)
        with lab.pair(tmp_path, plugin, block_size=other) as (server, engine):
            said = engine.generate(PROMPT)
            lab.wait_idle(server)
            if told == other:
                assert said["loaded"] == 0
                computed = said["text"]
                mine = again(server, engine, PROMPT)
                assert (mine["text"], mine["loaded"]) == (computed, whole_chunks(first))
            else:
                assert said["loaded"] == whole_chunks(first)
                assert said["text"] != computed, "what is loaded is what decides"
            assert engine.close() == 0


def test_a_disk_that_hangs_fails_fills_or_goes_costs_a_recompute(
    stored, root, tmp_path, native_library
):
    _, first = stored
    whole = (first["text"], whole_chunks(first))
    faults = DiskFaults(native_library("disk"), root, tmp_path / "faults")
    options = {**QUICK, "load_deadline_s": 3, "maintenance": "off"}
    plugin = lab.plugin(root, **options)
    with lab.pair(tmp_path, plugin, env=faults.env()) as (server, engine):

        def is_back():
            said = again(server, engine, PROMPT)
            return (said["text"], said["loaded"]) == whole

        assert is_back(), "the control"
        for rule in ("pread hang suffix=.kv", "pread EIO suffix=.kv"):
            faults.set(rule)
            hurt = again(server, engine, PROMPT)
            assert faults.fired() > 0, rule
            faults.clear()
            assert (hurt["text"], hurt["loaded"]) == (first["text"], 0), rule
            # The breaker lets one operation through at a time, to see whether the root is back.
            wait_for(is_back, 200)
        faults.set("write ENOSPC", "pwrite ENOSPC")
        full = engine.generate(OTHER)
        wait_for(lambda: faults.fired() > 0, 60)
        faults.clear()
        root.rename(root.with_name("gone"))
        gone = again(server, engine, PROMPT)
        assert gone["text"] == first["text"]
        assert not root.exists()
        root.with_name("gone").rename(root)
        wait_for(is_back, 200)
        assert again(server, engine, OTHER)["text"] == full["text"]
        assert engine.close() == 0
    assert "Traceback" not in server.log()


def test_a_server_that_is_killed_while_it_stores_leaves_nothing_wrong(
    stored, tmp_path, native_library
):
    _, first = stored
    root = tmp_path / "kv"
    root.mkdir()
    faults = DiskFaults(native_library("disk"), root, tmp_path / "faults")
    with lab.Server(tmp_path / "server", lab.plugin(root), env=faults.env()) as server:
        faults.set("rename hang suffix=.kv after=2")
        with lab.Engine(tmp_path / "engine", server.port) as engine:
            engine.generate(PROMPT, tokens=1)
            wait_for(lambda: faults.fired() > 0, 120)
            server.kill()
    some = chunk_files(root)
    num = whole_chunks(first) // lab.CHUNK_TOKENS
    assert 0 < len(some) < num, "it was killed before the end"
    assert files.unsound([str(path) for path in some]) == []
    with lab.pair(tmp_path, lab.plugin(root)) as (server, engine):
        assert engine.generate(PROMPT)["text"] == first["text"]
        wait_for(lambda: len(chunk_files(root)) == num, 120)
        healed = again(server, engine, PROMPT)
        assert (healed["text"], healed["loaded"]) == (first["text"], whole_chunks(first))
        # What the dead one had begun is removed: all that is left are chunks.
        wait_for(lambda: not list(root.rglob("*.part")), 120)


def test_a_bound_holds_over_a_restart(tmp_path):
    """The control, on a root of its own: without a bound the same prompts take more."""
    root, unbounded = tmp_path / "kv", tmp_path / "unbounded"
    root.mkdir()
    unbounded.mkdir()
    prompts = [TEXT[at : at + 2600] for at in range(0, 7800, 1300)]
    bound = 40 * MIB

    def run(root, **bounds):
        with lab.pair(tmp_path, lab.plugin(root, **bounds)) as (server, engine):
            sizes, loaded = [], 0
            for prompt in [*prompts, prompts[-1]]:
                loaded += engine.generate(prompt)["loaded"]
                lab.wait_idle(server)
                sizes.append(sum(path.stat().st_blocks * 512 for path in chunk_files(root)))
            return max(sizes), loaded

    most, _ = run(root, max_bytes=bound)
    assert 0 < most <= bound
    most, _ = run(root, max_bytes=bound)
    assert 0 < most <= bound
    more, _ = run(unbounded)
    assert more > bound, "the control"
