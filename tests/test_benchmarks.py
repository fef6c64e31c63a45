"""The benchmark commands run, verify what they move and notice a broken bound. No speed is asserted."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("torch", reason="the benchmarks need torch: make test")

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
SMALL_FLOOD = ["--jobs", "512", "--chunk-kib", "1024", "--layers", "4", "--staging-mib", "8"]
SMALL_INTERPRETER = ["--rounds", "1", "--seconds", "0.2", "--rate", "100", "--chunk-kib", "512"]


def run(name, *arguments, directory):
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--json", "--dir", str(directory), *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert list(directory.iterdir()) == [], "something was left behind"
    (line,) = done.stdout.splitlines() or [f"nothing on stdout: {done.stderr}"]
    return done.returncode, json.loads(line)


def test_the_presence_benchmark_compares_every_answer_and_fills_the_index_to_its_limit(tmp_path):
    code, facts = run(
        "presence", "--steps", "5", "--keys", "50", "--known", "2000", directory=tmp_path
    )
    assert code == 0
    assert facts["time"]["lookup"]["calls"] >= 5 * 50
    assert facts["time"]["flush"]["calls"] == 5
    for how in ("probed", "stored"):
        assert facts["memory"][how]["known"] == 2000
        assert 100 < facts["memory"][how]["traced"] < 600


def test_the_interpreter_benchmark_moves_chunks_both_ways_and_compares_them(tmp_path):
    code, facts = run("interpreter", *SMALL_INTERPRETER, directory=tmp_path)
    assert code == 0
    assert facts["bytes_compared"] >= 512 << 10
    for direction in ("store", "load"):
        cell = facts[direction]
        for found in (cell, cell["control"]):
            assert found["chunks_per_s"]["median"] > 0
            assert found["kept"]["rounds"] == 1
        assert cell["io_cpu_us_per_chunk"]["median"] > 0


def test_a_flood_stays_inside_the_budget(tmp_path):
    code, facts = run("flood", *SMALL_FLOOD, directory=tmp_path)
    assert (code, facts["exceeded"]) == (0, [])
    assert facts["phases"]["load"]["ended"] == {"ok": 512}
    assert sum(facts["phases"]["store"]["ended"].values()) == 512
    assert facts["samples"] > 0
    assert facts["bytes_compared"] > 0


def test_negative_control_a_slot_pool_without_a_bound_fails_the_flood(tmp_path):
    code, facts = run("flood", *SMALL_FLOOD, "--break-bound", directory=tmp_path)
    assert code == 1
    assert "staging" in facts["exceeded"]


def test_an_interrupted_benchmark_leaves_nothing_behind(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.flood", *SMALL_FLOOD[2:], "--dir", str(tmp_path)],
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 60
    while not any(tmp_path.rglob("*.kv")) and time.monotonic() < end:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert list(tmp_path.iterdir()) == []
