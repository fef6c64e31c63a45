"""What trials.shared_root judges by: exact caches, the sampler, and that each failing is a problem."""

from __future__ import annotations

import copy
import os
import random

import pytest
from world import wait_for

pytest.importorskip("torch", reason="the benchmarks need torch: make test")

from fskv.bounds.process import MaintenanceProcess
from trials import shared_root
from trials.shared_root_judge import (
    Pool,
    Sampler,
    bad_lines,
    capacity_for,
    count,
    maintenance_processes,
    merged,
    simulate,
    still_running,
)


def _requests(seed, length):
    generator = random.Random(seed)
    return [(prompt, 2 + prompt % 4) for prompt in generator.choices(range(12), k=length)]


@pytest.mark.parametrize("seed", range(20))
def test_the_simulated_cache_is_lru(seed):
    requests = _requests(seed, 200)
    found = simulate(requests, capacity=17)
    used, hits = [], []  # chunks, last used last: slow, and obvious
    for prompt, num_chunks in requests:
        chunks = [(prompt, number) for number in range(num_chunks)]
        whole = [n for n in range(num_chunks + 1) if all(c in used for c in chunks[:n])]
        hits.append(max(whole))
        for chunk in chunks:
            used = [*(c for c in used if c != chunk), chunk][-17:]
    assert found.hits == hits
    assert 0 < found.ratio < 1
    others = {simulate(requests, 17, policy).ratio for policy in ("fifo", "random")}
    assert found.ratio not in others, "another policy would be noticed"


def test_a_cache_with_room_for_all_misses_each_chunk_once():
    requests = _requests(1, 100)
    found = simulate(requests, 1000)
    assert found.written_chunks == sum(dict(requests).values())
    assert found.hit_chunks == found.asked_chunks - found.written_chunks


def test_the_capacity_is_a_share_of_what_is_written():
    requests = _requests(2, 500)
    capacity = capacity_for(requests, 10)
    assert simulate(requests, capacity).written_chunks >= 10 * capacity
    assert simulate(requests, capacity + 1).written_chunks < 10 * (capacity + 1)


def test_the_workload_is_the_same_in_every_process_and_skewed():
    pool = Pool(3, 50, 1000, 2000, 512)
    assert pool.tokens(7) == Pool(3, 50, 1000, 2000, 512).tokens(7) != pool.tokens(8)
    assert pool.num_chunks(7) == (len(pool.tokens(7)) - 1) // 128
    draws = pool.draws("first", 2000, 0.9)
    assert draws == pool.draws("first", 2000, 0.9) != pool.draws("second", 2000, 0.9)
    assert draws.count(0) > 5 * draws.count(49)
    assert merged([[1, 3], [2]]) == [1, 2, 3]


def test_the_sampler_counts_chunk_files_and_parts_on_disk_and_nothing_else(tmp_path):
    shard = tmp_path / "cpu" / "model@0123456789abcdef" / "chunks" / "0ab"
    shard.mkdir(parents=True)
    (tmp_path / ".fskv-maintenance").mkdir()
    (shard / "a.g0.kv").write_bytes(bytes(8192))
    (shard / "b.part").write_bytes(bytes(4096))
    for other in (shard / "notes.txt", tmp_path / ".fskv-maintenance" / "x.part"):
        other.write_bytes(bytes(4096))
    assert count(str(tmp_path)) == (8192, (1, 4096))
    sampler = Sampler(str(tmp_path), 0.01)
    sampler.start()
    wait_for(lambda: len(sampler.nbytes) >= 3)
    sampler.stop()
    assert set(sampler.nbytes) == {8192 + 4096}


def test_errors_and_tracebacks_are_found_in_a_log_but_not_the_warnings_of_vllm(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "(pid=1) WARNING 11-21 [base.py:380] Traceback (most recent call last):\n"
        "(pid=1) INFO 11-21 all is well\n"
    )
    assert bad_lines(str(log)) == []
    log.write_text("ValueError\nTraceback (most recent call last):\n(pid=1) ERROR 11-21 [x] no\n")
    assert len(bad_lines(str(log))) == 2


def test_a_maintenance_process_is_found_by_its_engine_and_seen_to_end():
    assert maintenance_processes([os.getpid()]) == {}
    process = MaintenanceProcess()
    wait_for(lambda: process._starter.poll() == 0)  # it forked the process and ended
    wait_for(lambda: len(maintenance_processes([os.getpid()])) == 1)
    found = maintenance_processes([os.getpid()])
    assert still_running(found) == list(found)
    process.close()
    wait_for(lambda: not still_running(found))


GOOD = {
    "wrong": 0,
    "bound": {
        "bytes": 100,
        "greatest_bytes": 100,
        "greatest_share": 1.0,
        "written_times": 10.0,
        "holds_s": 40.0,
    },
    "engines": {
        "first": {
            "seconds": {"p100": 1.0},
            "between_requests_s": {"p100": 1.0},
            "load_failures": {"absent": 3},
        }
    },
    "log_errors": [],
    "parts_left": 0,
    "maintenance_left": 0,
    "third": {"requests": 8, "hits": 8},
    "hits": {"points_from_lru": -2.0},
}


def test_a_good_run_has_no_problems():
    assert shared_root.problems(GOOD) == []
    small = GOOD["bound"] | {"holds_s": 10.0, "greatest_share": 1.1}
    assert shared_root.problems(GOOD | {"bound": small}) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("wrong",), 1),
        (("bound", "greatest_share"), 1.05),
        (("engines", "first", "seconds", "p100"), 100.0),
        (("engines", "first", "between_requests_s", "p100"), 100.0),
        (("engines", "first", "load_failures"), {"corrupt": 1}),
        (("log_errors",), ["ERROR"]),
        (("parts_left",), 1),
        (("maintenance_left",), 1),
        (("third", "hits"), 0),
        (("hits", "points_from_lru"), 25.0),
    ],
)
def test_each_failing_is_a_problem(path, value):
    facts = copy.deepcopy(GOOD)
    *where, last = path
    inner = facts
    for name in where:
        inner = inner[name]
    inner[last] = value
    assert len(shared_root.problems(facts)) == 1
