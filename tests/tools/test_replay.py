"""`fskv replay`: the simulators are right, a replay hits what they say, and what it counts was there."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from places import REPOSITORY
from tool_lab import Lab
from world import damage, wait_for

cli = pytest.importorskip("fskv_tools.cli", reason="the command line is not installed")

from fskv_tools.replay import (  # noqa: E402
    engine as replay_engine,
)
from fskv_tools.replay import (  # noqa: E402
    report as replay_report,
)
from fskv_tools.replay import (  # noqa: E402
    root as replay_root,
)
from fskv_tools.replay import (  # noqa: E402
    run as replay_run,
)
from fskv_tools.replay import (  # noqa: E402
    trace as replay_trace,
)
from fskv_tools.replay.engine import Engine, EngineSpec, ReplayError  # noqa: E402
from fskv_tools.replay.report import Interval, Summary  # noqa: E402
from fskv_tools.replay.trace import Request, TraceError  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from fskv.index import presence  # noqa: E402
from fskv.offload import lookup  # noqa: E402
from fskv.transports import host  # noqa: E402
from fskv.transports.host import HostTransport  # noqa: E402

DIGEST = b"d" * 32


def make_trace(num_requests=60, seed=0):
    """Conversations that come back with longer prompts, some of them for the last time."""
    source = random.Random(seed)
    conversations = [[i * 1000] for i in range(8)]
    lines = []
    for number in range(num_requests):
        prompt = source.choice(conversations)
        prompt.extend(range(prompt[-1] + 1, prompt[-1] + source.randint(1, 4)))
        lines.append({"timestamp": number * 10, "hash_ids": [10_000_000, *prompt]})
    return lines


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, make_trace())) + "\n")
    return path


@pytest.fixture
def root(tmp_path):
    return tmp_path / "kv"


def run(trace, root, *options):
    return CliRunner().invoke(cli.app, ["replay", str(trace), "--root", str(root), *options])


def lines_of(result):
    """Parse stdout, which must be intervals and a summary and nothing else."""
    assert result.exit_code == 0, result.stderr
    *intervals, summary = map(json.loads, result.stdout.splitlines())
    assert {line["type"] for line in intervals} == {"interval"}
    assert summary["type"] == "summary"
    return intervals, summary


def chunk_files(root):
    return sorted(root.glob("replay/*/chunks/*/*.kv"))


def num_prefix_hits(requests):
    """Count ideal hits by the definition, without the simulator."""
    hits = 0
    for i, line in enumerate(requests):
        before = {h for earlier in requests[:i] for h in earlier["hash_ids"]}
        misses = [n for n, h in enumerate(line["hash_ids"]) if h not in before]
        hits += misses[0] if misses else len(line["hash_ids"])
    return hits


# --- traces -----------------------------------------------------------------------------------


def test_a_trace_is_read_in_its_order_whatever_else_its_lines_say():
    text = (
        b'{"timestamp": 5, "input_length": 900, "output_length": 1, "hash_ids": [3, 4]}\r\n\n'
        b'{"timestamp": 2.5, "hash_ids": []}'
    )
    trace = replay_trace.parse_trace(text, "x")
    assert trace.requests == (Request(5.0, (3, 4)), Request(2.5, ()))
    assert trace.num_blocks == 2
    first = replay_trace.parse_trace(text, "x", 1)
    assert first.requests == trace.requests[:1]
    assert first.digest == trace.digest
    assert replay_trace.parse_trace(text + b"\n", "x").digest != trace.digest


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"timestamp": }', "not JSON: Expecting value: column 15"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "expected a JSON object"),
        (b'{"hash_ids": [1]}', "'timestamp': found nothing"),
        (b'{"timestamp": true, "hash_ids": [1]}', "'timestamp': found True"),
        (b'{"timestamp": -1, "hash_ids": [1]}', "'timestamp': found -1"),
        (b'{"timestamp": NaN, "hash_ids": [1]}', "'timestamp': found nan"),
        (b'{"timestamp": Infinity, "hash_ids": [1]}', "'timestamp': found inf"),
        (b'{"timestamp": 1}', "'hash_ids': found nothing"),
        (b'{"timestamp": 1, "hash_ids": {"a": 1}}', "'hash_ids': found {'a': 1}"),
        (b'{"timestamp": 1, "hash_ids": [1, "2"]}', "found '2' in it"),
        (b'{"timestamp": 1, "hash_ids": [1.0]}', "found 1.0 in it"),
        (b'{"timestamp": 1, "hash_ids": [-1]}', "found -1 in it"),
    ],
)
def test_a_bad_line_is_named(line, words):
    good = b'{"timestamp": 1, "hash_ids": [1]}\n'
    with pytest.raises(TraceError) as error:
        replay_trace.parse_trace(good * 2 + b"\n" + line + b"\n" + good, "a.jsonl")
    assert str(error.value).startswith("a.jsonl, line 4: ")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_trace_without_requests_is_refused():
    with pytest.raises(TraceError, match="found no request"):
        replay_trace.parse_trace(b"\n\n", "x")


def test_the_bytes_of_a_block_follow_from_its_key_and_do_not_repeat():
    keys = [replay_trace.block_key(DIGEST, i) for i in range(3)]
    assert len({*keys, replay_trace.block_key(b"e" * 32, 0)}) == 4
    contents = {replay_trace.block_content(key, 5000) for key in keys}
    assert {len(content) for content in contents} == {5000}
    assert len(contents) == 3
    large = replay_trace.block_content(keys[0], 1 << 20)
    pages = {large[at : at + 4096] for at in range(0, len(large), 4096)}
    assert (len(large), len(pages)) == (1 << 20, 256)  # a page in another's place is found


# --- simulators against brute force -----------------------------------------------------------

traces = st.lists(st.lists(st.integers(0, 12), max_size=8), max_size=30).map(
    lambda prompts: [Request(0.0, tuple(ids)) for ids in prompts]
)


def brute_force(requests, capacity):
    """Replay references one by one against a list of (block, time of its last use)."""
    uses, hits, now = [], [], 0
    for request in requests:
        there = [block for block, _ in uses]
        hit = 0
        while hit < len(request.hash_ids) and request.hash_ids[hit] in there:
            hit += 1
        hits.append(hit)
        for block in request.hash_ids:
            now += 1
            uses = [use for use in uses if use[0] != block] + [(block, now)]
            if len(uses) > capacity:
                uses.remove(min(uses, key=lambda use: use[1]))
    return hits


@given(traces)
def test_ideal_is_a_cache_that_never_evicts(requests):
    assert replay_trace.ideal_hits(requests) == brute_force(requests, 10**6)


@given(traces, st.integers(0, 15))
def test_lru_evicts_what_was_used_longest_ago(requests, capacity):
    found = replay_trace.lru_hits(requests, capacity)
    assert found == brute_force(requests, capacity)
    assert all(map(int.__le__, found, replay_trace.ideal_hits(requests)))


@given(traces)
def test_lru_with_room_for_all_is_ideal(requests):
    assert replay_trace.lru_hits(requests, 13) == replay_trace.ideal_hits(requests)


# --- whole replays ----------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 4])
def test_without_a_bound_a_replay_hits_what_an_ideal_cache_hits(trace, root, processes):
    result = run(trace, root, "--json", "--intervals", "6", "--processes", str(processes))
    intervals, summary = lines_of(result)
    requests = make_trace()
    blocks = sum(len(line["hash_ids"]) for line in requests)
    unique = len({h for line in requests for h in line["hash_ids"]})
    expected = num_prefix_hits(requests)
    assert expected > blocks / 3  # or there would be nothing to compare
    assert summary["hit_ratio"] == summary["ideal_hit_ratio"] == expected / blocks
    assert summary["lru_hit_ratio"] == summary["ideal_hit_ratio"]
    assert (summary["requests"], summary["blocks"]) == (len(requests), blocks)
    assert (summary["stored_files"], summary["evicted_files"]) == (unique, 0)
    assert (summary["wrong_bytes"], summary["failures"], summary["problems"]) == (0, {}, [])
    assert summary["max_bytes_on_disk"] == unique * summary["file_bytes"]
    assert [line["requests"] for line in intervals] == [10, 20, 30, 40, 50, 60]
    for ours, theirs in [("hits", "ideal_hits"), ("hits", "lru_hits")]:
        assert [line[ours] for line in intervals] == [line[theirs] for line in intervals]
    assert sum(line["hits"] for line in intervals) == expected
    assert not root.exists()


def test_engines_that_overlap_serve_nothing_wrong(trace, root):
    _, summary = lines_of(run(trace, root, "--json", "--processes", "4", "--concurrent"))
    assert summary["hit_ratio"] <= summary["ideal_hit_ratio"]
    assert (summary["wrong_bytes"], summary["concurrent"]) == (0, True)
    assert not root.exists()


def test_what_is_kept_is_an_fskv_root_and_the_next_replay_goes_on_in_it(trace, root):
    _, first = lines_of(run(trace, root, "--json", "--keep"))
    files = chunk_files(root)
    assert len(files) == first["stored_files"]
    assert {file.stat().st_size for file in files} == {first["file_bytes"]}
    for file in files[:3]:
        checked = CliRunner().invoke(cli.app, ["inspect", str(file)])
        assert checked.exit_code == 0, checked.stdout

    refused = run(trace, root)
    assert refused.exit_code == 2
    assert "is an fskv root already" in refused.stderr
    assert chunk_files(root) == files

    _, second = lines_of(run(trace, root, "--json", "--keep"))
    assert (first["continued"], second["continued"]) == (False, True)
    assert (second["hit_ratio"], second["stored_files"]) == (1.0, 0)


@pytest.mark.parametrize("options", [[], ["--keep"]])
@pytest.mark.parametrize("spoiled", ["whole", "no manifest"])
def test_the_root_of_an_engine_is_refused_and_loses_nothing(trace, root, options, spoiled):
    lab = Lab(root)
    where = lab.namespace(model_name="org/model")
    files = [pathlib.Path(path) for path in lab.chunks(where, range(30), age_s=1e6)]
    if spoiled == "no manifest":
        os.unlink(f"{where.directory.path}/namespace.json")
    result = run(trace, root, "--capacity", "128KiB", *options)
    assert all(file.exists() for file in files)
    assert result.exit_code == 2
    assert "with 1 namespace of engines" in result.stderr
    assert "--keep" not in result.stderr  # it would help nobody
    assert not (root / "replay").exists()


def test_requests_do_not_begin_before_their_time(trace, root):
    _, fast = lines_of(run(trace, root, "--json"))
    _, scaled = lines_of(run(trace, root, "--json", "--speed", "0.5"))
    assert scaled["seconds"] >= 0.59 / 0.5  # the last one comes after 590 ms
    assert scaled["hit_ratio"] == fast["ideal_hit_ratio"]


def test_the_table_says_how_far_from_lru_and_ideal(trace, root):
    result = run(trace, root)
    assert result.exit_code == 0, result.stderr
    for words in ("hit ratio", "exact LRU", "ideal", "lookup of a request", "wrong bytes"):
        assert words in result.stdout
    assert result.stderr == ""


def test_no_torch_is_needed(trace, root, tmp_path):
    without = tmp_path / "without"
    without.mkdir()
    (without / "torch.py").write_text("raise ImportError('no torch here')\n")
    path = os.pathsep.join(filter(None, [str(without), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path}

    def python(*arguments):
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120
        )

    assert python("-c", "import torch").returncode != 0  # the control
    done = python("-m", "fskv_tools", "replay", str(trace), "--root", str(root), "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["hit_ratio"] == summary["ideal_hit_ratio"] > 0


# --- an engine, and what must lower its hits --------------------------------------------------


@pytest.fixture
def make_engine(tmp_path):
    root = tmp_path / "engines"
    root.mkdir()
    engines = []

    def make(**changes):
        fields = {
            "root": str(root),
            "trace_digest": DIGEST,
            "block_nbytes": 1000,
            "max_nbytes": None,
            "keep_free_nbytes": 0,
            "io_threads": 2,
            "direct_io": "off",
            "speed": None,
        }
        engines.append(Engine(EngineSpec(**{**fields, **changes})))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def ask(engine, *hash_ids):
    return engine.handle(Request(0.0, hash_ids))


def file_of(root, hash_id):
    """Find a chunk by the key in its header, from outside."""
    key = replay_trace.block_key(DIGEST, hash_id)
    (file,) = [file for file in chunk_files(root) if key in file.read_bytes()[:4096]]
    return file


def test_only_a_prefix_is_hit_and_what_is_behind_a_miss_stays(make_engine):
    engine = make_engine()
    assert ask(engine, 1, 2, 3).hits == 0
    done = ask(engine, 1, 9, 3)
    assert (done.hits, done.stored, done.existing) == (1, 1, 1)
    assert ask(engine, 1, 9, 3).hits == 3
    assert ask(engine).hits == 0
    done = ask(engine, 7, 7, 1, 1)  # a block twice in one prompt
    assert (done.hits, done.stored, done.existing) == (0, 1, 1)
    done = ask(engine, 7, 7, 1, 1)
    assert (done.hits, done.loaded, done.wrong_nbytes) == (4, 2, 0)


@pytest.mark.parametrize("mode", [0o600, 0o660])
def test_what_a_replay_stores_is_for_whom_the_root_is(make_engine, tmp_path, mode):
    directory = tmp_path / "engines"
    make_engine()
    os.chmod(directory / "fskv.json", mode)
    ask(make_engine(), 1, 2)
    assert {file.stat().st_mode & 0o777 for file in chunk_files(directory)} == {mode}


def test_a_request_larger_than_the_engine_s_memory_comes_in_parts(make_engine, monkeypatch):
    monkeypatch.setattr(replay_engine, "_PAGES_NBYTES", 3000)
    engine = make_engine()
    assert ask(engine, *range(10)).stored == 10
    done = ask(engine, *range(10))
    assert (done.hits, done.loaded, done.in_flight_nbytes) == (10, 10, 0)


def test_negative_control_a_blind_presence_hits_nothing(make_engine, monkeypatch):
    blind = presence.Findings
    monkeypatch.setattr(lookup, "probe_chunks", lambda _, chunks, __: blind([0] * len(chunks), 0.0))
    engine = make_engine()
    ask(engine, 1, 2, 3)
    done = ask(engine, 1, 2, 3)
    assert (done.hits, done.existing) == (0, 3)


def test_a_damaged_file_is_a_miss_and_is_stored_again(make_engine, tmp_path):
    engine = make_engine()
    ask(engine, 1, 2, 3)
    damage(file_of(tmp_path / "engines", 2), 4096 + 17)
    done = ask(engine, 1, 2, 3)
    assert (done.hits, done.wrong_nbytes, dict(done.failures)) == (1, 0, {"load corrupt": 1})
    assert (done.stored, done.existing) == (1, 1)
    assert ask(engine, 1, 2, 3).hits == 3


@pytest.mark.parametrize("jumps", [True, False])
def test_at_full_speed_no_earlier_answer_is_believed(make_engine, tmp_path, monkeypatch, jumps):
    if not jumps:  # the negative control: the engine remembers a hit, and only the load finds out
        monkeypatch.setattr(replay_engine.TraceClock, "next_request", lambda _: None)
    engine = make_engine()
    ask(engine, 1, 2, 3)
    file_of(tmp_path / "engines", 3).unlink()
    done = ask(engine, 1, 2, 3)
    assert (done.hits, done.stored) == (2, 1)
    assert dict(done.failures) == ({} if jumps else {"load absent": 1})


class _DoesNothing(HostTransport):
    """Calls a load good whose bytes never reached the pages."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.native = dataclasses.replace(self.native, pages=None)

    def scatter(self, slot, base, table):
        pass


def test_wrong_bytes_in_the_pages_are_counted_and_are_no_hit(make_engine, monkeypatch):
    monkeypatch.setattr(host, "HostTransport", _DoesNothing)
    engine = make_engine()
    ask(engine, 1, 2)
    done = ask(engine, 1, 2)
    assert done.hits == 0
    assert done.loaded == 2
    assert done.wrong_nbytes > 1900  # a few bytes of a block are zero by chance


def test_an_engine_hits_what_another_stored(make_engine):
    first, second = make_engine(), make_engine()
    ask(first, 1, 2)
    assert ask(second, 1, 2, 3).hits == 2
    assert ask(first, 1, 2, 3).hits == 3


# --- the bound --------------------------------------------------------------------------------


class _Room:
    """Stands for bounds.client.Capacity: counts, and prunes whole files at once when the bound is met."""

    def __init__(self, root, namespace, tenant, limits, **_):
        self.directory = pathlib.Path(root, namespace)
        self.bound = limits.max_nbytes
        self.refusals = 0
        self.taken = self.settled = self.written = 0
        self.newest_first = False
        _Room.last = self

    paused = False
    state = None

    def start(self):
        pass

    def wait_for_first_word(self):
        pass

    def close(self):
        pass

    def poll(self):
        return []

    def no_space(self):
        pass

    def take(self, nbytes):
        if self.refusals:
            self.refusals -= 1
            return False
        if self.bound is not None:
            files = [(f.stat().st_mtime_ns, f) for f in self.directory.glob("chunks/*/*.kv")]
            files.sort(reverse=self.newest_first)
            while files and nbytes * (len(files) + 1) + self.taken - self.settled > self.bound:
                files.pop(0)[1].unlink()
        self.taken += nbytes
        return True

    def settle(self, taken, written):
        self.settled += taken
        self.written += written


@pytest.fixture
def room(monkeypatch):
    monkeypatch.setattr(lookup, "Capacity", _Room)
    return _Room


def test_every_store_asks_for_room_and_settles_it(make_engine, room, tmp_path):
    engine = make_engine()
    room.last.refusals = 3
    done = ask(engine, 1, 2, 3)
    assert room.last.refusals == 0
    assert done.waited_s > 0
    assert ask(engine, 4, 2).existing == 1, "what is known to be there asks for no room"
    assert room.last.taken == room.last.settled == 4 * 8192
    files = chunk_files(tmp_path / "engines")
    assert room.last.written == sum(file.stat().st_size for file in files) == 4 * 8192


def test_a_store_that_never_gets_room_ends_the_replay_with_a_sentence(
    make_engine, room, monkeypatch
):
    monkeypatch.setattr(replay_engine, "PATIENCE_S", 0.2)
    engine = make_engine()
    room.last.refusals = 10**9
    with pytest.raises(ReplayError, match="no room for a chunk of 8192 bytes"):
        ask(engine, 1)


@pytest.mark.parametrize("newest_first", [False, True])
def test_the_order_of_use_is_on_disk(make_engine, room, newest_first):
    """Removing the oldest mtimes is LRU, but for uses within one tick of the kernel's clock."""
    requests = [
        Request(0.0, tuple(line["hash_ids"])) for line in make_trace(num_requests=80, seed=1)
    ]
    most = max(len(request.hash_ids) for request in requests)
    capacity = 3 * most
    exact = sum(replay_trace.lru_hits(requests, capacity))
    engine = make_engine(max_nbytes=capacity * 8192)
    room.last.newest_first = newest_first
    hits = 0
    for request in requests:
        hits += engine.handle(request).hits
        time.sleep(0.011)  # a tick, the unit of ext4's mtimes, is at most 10 ms
    if newest_first:  # the negative control
        assert hits < 0.9 * exact  # what the other case would not take
    else:
        assert abs(hits - exact) <= 0.1 * exact


def make_summary(**changes):
    numbers = {field.name: 0 for field in dataclasses.fields(Summary)}
    texts = {"failures": {}, "data_path": "", "capacity_bytes": None, "capacity_blocks": None}
    return Summary(**{**numbers, **texts, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None),
        ({"max_bytes_on_disk": 10**9}, None),
        (
            {
                "processes": 2,
                "capacity_bytes": 100,
                "capacity_blocks": 1,
                "max_bytes_on_disk": 224,
                "max_in_flight_bytes": 20,
            },
            None,
        ),
        (
            {
                "processes": 2,
                "capacity_bytes": 100,
                "capacity_blocks": 1,
                "max_bytes_on_disk": 225,
                "max_in_flight_bytes": 20,
            },
            "225 bytes were on disk, expected at most 204 and 20 in flight",
        ),
        ({"wrong_bytes": 1}, "1 loaded bytes differ"),
    ],
)
def test_a_broken_promise_is_a_problem_and_the_exit_code_is_1(
    trace, root, monkeypatch, changes, words
):
    summary = make_summary(**changes)
    monkeypatch.setattr(replay_run, "run_replay", lambda *_, **__: (summary, None))
    for options in ([], ["--json"]):
        result = run(trace, root, *options)
        assert result.exit_code == (1 if words else 0)
        assert (words or "") in result.stderr
    (line,) = map(json.loads, result.stdout.splitlines())
    assert len(line["problems"]) == (1 if words else 0)


def test_a_walk_counts_what_the_disk_keeps_for_chunk_files_and_unfinished_ones(tmp_path):
    shard = tmp_path / "replay" / "m@d" / "chunks" / "abc"
    shard.mkdir(parents=True)
    (tmp_path / "fskv.json").write_bytes(b"x" * 5000)
    for name, nbytes in [("a.g0.kv", 1), ("b.g0.kv", 9000), ("c.part", 4096)]:
        (shard / name).write_bytes(b"x" * nbytes)
    (tmp_path / ".fskv-maintenance").mkdir()
    (tmp_path / ".fskv-maintenance" / "lease.part").write_bytes(b"x")
    (shard / "d.g0.kv").symlink_to("b.g0.kv")
    listed = subprocess.run(
        ["du", "-s", "-c", "--block-size=1", *map(str, shard.iterdir())],
        capture_output=True,
        text=True,
        check=True,
    )
    sample = replay_root.walk(str(tmp_path))
    assert sample.nbytes == int(listed.stdout.split()[-2])
    assert sample.num_files == 3


def test_a_capacity_in_blocks_is_as_many_files_and_one_in_bytes_the_blocks_that_fit(tmp_path):
    def bound(text, block_nbytes=4096):
        fields = dict.fromkeys(field.name for field in dataclasses.fields(replay_run.Settings))
        fields |= {"block_nbytes": block_nbytes, "direct_io": "off", "capacity": text}
        return replay_run.Settings(**fields).bound(str(tmp_path))

    assert bound(None) is None
    assert bound("10") == (10 * 8192, 10)
    assert bound("10", 4097) == (10 * 12288, 10)
    assert bound("1 MiB") == bound("1048576B") == (1 << 20, 128)
    for text in ("", "0", "-1", "10 MB", "1.5GiB", "x"):
        with pytest.raises(ValueError, match="--capacity: found"):
            bound(text)


# --- the root ---------------------------------------------------------------------------------


def test_only_an_empty_directory_is_taken_and_it_is_left_empty(trace, root):
    root.mkdir()
    (root / "lost+found").mkdir()  # what mkfs makes: the directory is empty all the same
    lines_of(run(trace, root, "--json"))
    assert os.listdir(root) == ["lost+found"]
    (root / "mine").write_text("precious")
    for options in ([], ["--keep"]):
        result = run(trace, root, *options)
        assert result.exit_code == 2
        assert "is not an fskv root and not empty (found 'mine')" in result.stderr
    assert sorted(os.listdir(root)) == ["lost+found", "mine"]


def test_a_replay_that_cannot_begin_leaves_no_directory(trace, root, tmp_path):
    (tmp_path / "file").write_text("")
    for path, words in [
        (tmp_path / "no" / "such", "cannot be made: No such file or directory"),
        (tmp_path / "file", "Not a directory"),
        ("", "found an empty path"),
    ]:
        result = run(trace, path)
        assert result.exit_code == 2
        assert words in result.stderr
    assert run(trace, root, "--direct-io", "maybe").exit_code == 2
    assert not root.exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--block-bytes", "1", "--bytes-per-token", "1"], "found both"),
        (["--capacity", "many"], "--capacity: found 'many'"),
        (["--keep-free", "x"], "--keep-free: found 'x'"),
        (["--speed", "0"], "--speed: found 0"),
        (["--speed", "nan"], "--speed: found nan"),
        (["--direct-io", "maybe"], "expected auto, on or off"),
        (["--plot", "hits.txt"], "--plot: found 'hits.txt'"),
        (["--plot", "/no/such/hits.png"], "/no/such is no directory"),
    ],
)
def test_nonsense_is_refused_in_one_sentence(trace, root, options, words):
    pytest.importorskip("matplotlib")
    result = run(trace, root, *options)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert not root.exists()


def test_a_bad_trace_is_refused_before_anything_is_made(tmp_path, root):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"timestamp": 1, "hash_ids": [1]}\nnonsense\n')
    result = run(bad, root)
    assert result.exit_code == 2
    assert f"{bad}, line 2: not JSON" in result.stderr.replace("\n", "")
    assert run(tmp_path / "absent.jsonl", root).exit_code == 2
    assert not root.exists()


@pytest.mark.parametrize("kill", ["ctrl-c", "an engine"])
def test_a_replay_that_is_stopped_leaves_nothing(trace, root, kill):
    """Ctrl-C reaches every process of the group, as from a terminal."""
    command = [sys.executable, "-m", "fskv_tools", "replay", str(trace), "--root", str(root)]
    process = subprocess.Popen(
        # so slow that it would never end by itself
        [*command, "--json", "--intervals", "60", "--speed", "0.01", "--processes", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert '"interval"' in process.stdout.readline()  # engines are at work
        if kill == "ctrl-c":
            os.killpg(process.pid, signal.SIGINT)
        else:
            os.kill(engines_of(process.pid)[0], signal.SIGKILL)
        _, stderr = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    if kill == "ctrl-c":
        assert process.returncode == 130
        assert stderr == "fskv replay: stopped\n"
    else:
        assert process.returncode == 2
        assert re.fullmatch(r"fskv replay: engine \d: ended with exit code -9\n", stderr), stderr
    assert not root.exists()
    wait_for(lambda: not group_of(process.pid))


def test_no_process_of_a_replay_begins_open_to_ctrl_c(tmp_path):
    """The first one starts Python's resource tracker, and that unblocks the signal (CPython 3.11)."""
    script = (
        "import signal, sys, time\n"
        "from multiprocessing import util\n"
        "from fskv_tools.replay import root, run\n"
        "start = util.spawnv_passfds\n"
        "def spawn(*arguments):\n"
        "    print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()), flush=True)\n"
        "    return start(*arguments)\n"
        "util.spawnv_passfds = spawn\n"
        "for _ in range(2):\n"
        "    child = run._Child('x', root.run_sampler, sys.argv[1], 1.0)\n"
        "    child.receive()\n"
        "    child.let_go()\n"
        "    child.join(time.monotonic() + 30)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.stderr) == ("True\n" * 3, "")


def group_of(pgid):
    """List the processes of a group that are no zombies."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, _, group = (
                pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:3]
            )
        except OSError:
            continue
        if int(group) == pgid and state != "Z":
            found.append(int(pid))
    return found


def engines_of(pgid):
    """Find the engines among the processes: those that have an I/O thread."""
    return [
        pid
        for pid in group_of(pgid)
        if any("spawn_main" in part for part in command_of(pid)) and num_threads(pid) > 1
    ]


def command_of(pid):
    return pathlib.Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def num_threads(pid):
    return len(os.listdir(f"/proc/{pid}/task"))


# --- what is reported -------------------------------------------------------------------------


def test_percentiles_are_values_that_occurred():
    assert replay_report.percentiles([]) == (0.0, 0.0, 0.0)
    assert replay_report.percentiles([3.0]) == (3.0, 3.0, 3.0)
    values = [float(i) for i in range(1, 102)]
    random.Random(0).shuffle(values)
    assert replay_report.percentiles(values) == (51.0, 100.0, 101.0)


def test_the_plot_is_drawn(trace, root, tmp_path):
    pytest.importorskip("matplotlib")
    png = tmp_path / "hits.png"
    lines_of(run(trace, root, "--json", "--plot", str(png)))
    assert png.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_a_plot_is_refused_before_the_run(trace, root, monkeypatch):
    monkeypatch.setattr(replay_report.importlib.util, "find_spec", lambda _: None)
    result = run(trace, root, "--plot", "hits.png")
    assert result.exit_code == 2
    assert "matplotlib is not installed" in result.stderr
    assert not root.exists()


def check_fields(text):
    """The two tables of docs/benchmarks.md have the fields of the lines, in their order."""
    start = text.index("### The lines of `replay --json`")
    intervals, _, summary = text[start:].partition("| field of the summary |")
    summary = summary.partition("\n## ")[0]
    interval = Interval(
        **{field.name: 0 for field in dataclasses.fields(Interval)},
    )
    for line, table in [
        (replay_report.interval_line(interval), intervals),
        (replay_report.summary_line(make_summary()), summary),
    ]:
        assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(line)
    assert f"| `schema` | {replay_report.SCHEMA};" in summary


def test_every_field_of_a_line_is_in_the_document_and_no_other():
    text = (REPOSITORY / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    check_fields(text)
    for old, new in [("| `trace_s` |", "| `time` |"), ("| `waited_s` |", "| `waits` |")]:
        assert old in text
        with pytest.raises(AssertionError):
            check_fields(text.replace(old, new))
