"""The replay on a real root: nothing wrong counts as a hit, and pruning by mtimes hits what is simulated."""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
import sys
import time

import pytest
from places import REPOSITORY
from world import damage

pytest.importorskip("fskv_tools.cli", reason="the command line is not installed")

from fskv_tools.replay import curve
from fskv_tools.replay.trace import Request

from benchmarks import replay_engine
from fskv.index import presence
from fskv.offload import lookup
from fskv.transports import host


@pytest.fixture
def root(tmp_path):
    path = tmp_path / "root"
    path.mkdir()
    return path


@pytest.fixture
def make_engine(root):
    engines = []

    def make():
        engines.append(replay_engine.Engine(str(root), "trace", 1000))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def chunk_files(root):
    return sorted(root.glob("replay/*/chunks/*/*.kv"))


def file_of(root, hash_id):
    """Find a chunk by the key in its header, from outside."""
    key = replay_engine.block_key("trace", hash_id)
    (file,) = [file for file in chunk_files(root) if key in file.read_bytes()[:4096]]
    return file


def test_only_a_prefix_is_hit_and_what_is_behind_a_miss_stays(make_engine, monkeypatch):
    monkeypatch.setattr(replay_engine, "_MAX_PAGES", 2)  # requests come in parts
    engine = make_engine()
    assert engine.handle((1, 2, 3)).hits == 0
    done = engine.handle((1, 9, 3))
    assert (done.hits, done.stored) == (1, 1)
    assert make_engine().handle((1, 9, 3)).hits == 3
    assert engine.handle((7, 7, 1, 1)).stored == 1  # a block twice in one prompt
    done = engine.handle((7, 7, 1, 1))
    assert (done.hits, done.loaded, done.wrong_nbytes) == (4, 2, 0)


def test_negative_control_a_blind_presence_hits_nothing(make_engine, monkeypatch):
    blind = presence.Findings
    monkeypatch.setattr(lookup, "probe_chunks", lambda _, chunks, __: blind([0] * len(chunks), 0.0))
    engine = make_engine()
    engine.handle((1, 2, 3))
    assert engine.handle((1, 2, 3)).hits == 0


def test_a_damaged_file_is_a_miss_and_is_stored_again(make_engine, root):
    engine = make_engine()
    engine.handle((1, 2, 3))
    damage(file_of(root, 2), 4096 + 17)
    done = engine.handle((1, 2, 3))
    assert (done.hits, done.wrong_nbytes, dict(done.failures)) == (1, 0, {"load corrupt": 1})
    assert engine.handle((1, 2, 3)).hits == 3


class _DoesNothing(host.HostTransport):
    """Calls a load good whose bytes never reached the pages."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.native = dataclasses.replace(self.native, pages=None)

    def scatter(self, slot, base, table):
        pass


def test_wrong_bytes_in_the_pages_are_counted_and_are_no_hit(make_engine, monkeypatch):
    monkeypatch.setattr(host, "HostTransport", _DoesNothing)
    engine = make_engine()
    engine.handle((1, 2))
    done = engine.handle((1, 2))
    assert (done.hits, done.loaded) == (0, 2)
    assert done.wrong_nbytes > 1900  # a few bytes of a block are zero by chance


@pytest.mark.parametrize("newest_first", [False, True])
def test_pruning_by_mtimes_hits_what_is_simulated(make_engine, root, newest_first):
    """Negative control: where the newest files go, it hits much less."""
    source = random.Random(1)
    prompts = [list(range(at, at + 6)) for at in range(0, 600, 100)]
    requests = [
        Request(0.0, tuple(source.choice(prompts)[: source.randint(2, 6)])) for _ in range(50)
    ]
    size = 20 * 100
    engine, hits = make_engine(), 0
    for request in requests:
        hits += engine.handle(request.hash_ids).hits
        files = sorted(chunk_files(root), key=lambda file: file.stat().st_mtime_ns)
        excess = curve.Scope("root", None, size, 100 * len(files)).excess(curve.Usage())
        files = files[::-1] if newest_first else files
        for file in files[: -(-excess // 100)]:
            file.unlink()
        time.sleep(0.02)  # more than the prompt is deep, in ms, and than a tick of the kernel
    simulated = curve.simulate(requests, 100, size).hits
    assert simulated > 50
    if newest_first:
        assert hits < 0.8 * simulated
    else:
        assert abs(hits - simulated) <= 0.1 * simulated


def test_the_benchmark_compares_its_hits_with_the_simulation(tmp_path):
    trace = tmp_path / "trace"
    line = json.dumps({"timestamp": 0, "hash_ids": list(range(5))})
    trace.write_text(f"{line}\n" * 3)
    place = tmp_path / "place"
    place.mkdir()
    words = ["-m", "benchmarks.replay", str(trace), "--dir", str(place), "--json"]
    done = subprocess.run(
        [sys.executable, *words], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )
    facts = json.loads(done.stdout)
    assert (done.returncode, facts["good"], facts["stored"]) == (0, True, 5)
    assert facts["hit_ratio"] == facts["simulated"] == facts["no_bound"] == 10 / 15
    assert list(place.iterdir()) == []
