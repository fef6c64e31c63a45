"""The benchmark commands run, verify what they move and notice a broken bound. No speed is asserted."""

from __future__ import annotations

import json

import pytest
from facts import facts_of

pytest.importorskip("torch", reason="the benchmarks need torch: make test")

SMALL_FLOOD = ["--jobs", "512", "--chunk-kib", "1024", "--layers", "4", "--staging-mib", "8"]


def run(name, *arguments, directory):
    place = directory / "place"
    place.mkdir()
    return facts_of(f"benchmarks.{name}", place, *arguments)


def test_a_flood_stays_inside_the_budget(tmp_path):
    code, facts = run("flood", *SMALL_FLOOD, directory=tmp_path)
    assert (code, facts["exceeded"]) == (0, [])
    assert facts["phases"]["load"]["ended"] == {"ok": 512}
    assert sum(facts["phases"]["store"]["ended"].values()) == 512
    assert facts["bytes_compared"] > 0


def test_negative_control_a_slot_pool_without_a_bound_fails_the_flood(tmp_path):
    code, facts = run("flood", *SMALL_FLOOD, "--break-bound", directory=tmp_path)
    assert code == 1
    assert "staging" in facts["exceeded"]


def test_a_replay_compares_its_hits_with_the_simulation(tmp_path):
    trace = tmp_path / "trace"
    line = json.dumps({"timestamp": 0, "hash_ids": list(range(5))})
    trace.write_text(f"{line}\n" * 3)
    code, facts = run("replay", str(trace), directory=tmp_path)
    assert (code, facts["good"], facts["stored"]) == (0, True, 5)
    assert facts["hit_ratio"] == facts["simulated"] == facts["no_bound"] == 10 / 15


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("interpreter", "--rounds 1 --seconds 0.5 --rate 100 --chunk-kib 512"),
        (
            "engine_thread",
            "--rounds 2 --jobs 2 --job-chunks 4 --chunk-kib 64 --layers 2 --pages cuda",
        ),
        ("encryption", "--rounds 1 --seconds 0.1 --chunk-kib 512 --places 32"),
        ("scale", "--files 300 --chunk-kib 64 --rounds 1 --cold off"),
    ],
)
def test_the_other_benchmarks_end_well(tmp_path, name, arguments):
    code, facts = run(name, *arguments.split(), directory=tmp_path)
    assert code == 0
    assert facts
