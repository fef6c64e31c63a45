"""The benchmark commands run, verify what they move and notice a broken bound. No speed is asserted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from places import REPOSITORY

pytest.importorskip("torch", reason="the benchmarks need torch: make test")

from benchmarks import scale_root
from benchmarks.rig import BenchmarkError

SMALL_FLOOD = ["--jobs", "512", "--chunk-kib", "1024", "--layers", "4", "--staging-mib", "8"]
SMALL_SCALE = ["--files", "300", "--chunk-kib", "64", "--rounds", "1", "--cold", "off"]
SMALL_INTERPRETER = ["--rounds", "1", "--seconds", "0.5", "--rate", "100", "--chunk-kib", "512"]


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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("pages", ["host", "cuda"])
def test_the_benchmark_of_the_engines_thread_counts_each_step(tmp_path, pages):
    small = ("--rounds=2", "--jobs=2", "--job-chunks=4", "--chunk-kib=64", "--layers=2")
    code, facts = run("engine_thread", *small, f"--pages={pages}", directory=tmp_path)
    assert code == 0
    for us in facts["us_per_chunk"].values():
        medians = {column: found["median"] for column, found in us.items()}
        assert min(medians[step] for step in ("plan", "submit", "ends")) > 0
        assert medians["together"] >= max(medians["plan"], medians["submit"], medians["ends"])


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


def scale(directory, *arguments):
    code, facts = run("scale", *SMALL_SCALE, *arguments, directory=directory)
    (found,) = facts["sizes"].values()
    return code, found


@pytest.mark.slow
def test_the_scale_benchmark_counts_prunes_and_lists_what_it_made(tmp_path):
    code, found = scale(tmp_path)
    assert code == 0
    assert found["start"]["warm"]["hit_s"] > 0
    assert found["scan"]["warm"]["files_per_s"] > 0
    assert found["start_again"]["warm"]["counted_s"] > 0
    assert (found["prune"]["files"], found["prune"]["used_meanwhile"]) == (30, 1)
    assert all(one["warm"]["rss"] > 0 for one in found["commands"].values())


@pytest.fixture(scope="module")
def shells(tmp_path_factory):
    """A namespace as the benchmark makes it; only names count for the check, so a copy is as good."""
    path = str(tmp_path_factory.mktemp("shells") / "namespace")
    scale_root.make_shells(path, 300, 1, time.time_ns(), scale_root.DAY_NS, lambda _: None)
    return path


@pytest.fixture
def copy_of_shells(shells, tmp_path):
    return shutil.copytree(shells, str(tmp_path / "namespace"))


def remove(namespace, shells):
    for shard, name in shells:
        os.unlink(f"{scale_root.shard_path(namespace, shard)}/{name}")


@pytest.mark.parametrize(
    ("gone", "used", "complaint"),
    [
        ([0, 2, 3, 4, 5], [], "used later"),
        ([0, 1, 2, 3], [], "4 files were pruned"),
        ([0, 1, 2, 3, 4], [0], "used later"),
    ],
    ids=["not the oldest", "too few", "one that was used meanwhile"],
)
def test_negative_control_the_scale_benchmark_notices_a_wrong_prune(
    copy_of_shells, gone, used, complaint
):
    namespace, names = copy_of_shells, [*scale_root.oldest(300, 1, 6)]
    remove(namespace, [names[place] for place in gone])
    with pytest.raises(BenchmarkError, match=complaint):
        scale_root.check_pruned(namespace, 300, 1, 5, {names[place][1] for place in used})


def test_side_by_side_counts_wrong_answers_and_requests_that_were_not_answered(tmp_path, capsys):
    from benchmarks import side_by_side

    options = side_by_side.parse(["--model", "m", "--rounds", "1", "--documents", "2"])
    prompts = {name: [[1], [2]] * times for name, times in side_by_side.PASSES.items()}
    one = SimpleNamespace(
        plan=SimpleNamespace(prompts=prompts),
        cpu_s={},
        wall_s={"warm": 4.0},
        nbytes=0,
        num_spoilt=0,
    )

    def engine(kind, tokens, last="damaged-1"):
        labels = [f"{name}-{n}" for name in prompts for n in range(len(prompts[name]))]
        steps = [
            {
                "step": "generate",
                "label": label,
                "ttft_s": 0.5,
                "num_cached_tokens": 0,
                "tokens": tokens(label),
            }
            for label in labels[: labels.index(last) + 1]
        ]
        one.kind = kind
        return side_by_side.judge(one, {"steps": steps, "log_path": ""}, right)

    right = {}
    first = engine("recompute", lambda label: [7])
    bad = engine("vLLM's fs tier", lambda label: [8] if label == "slow-1" else [7], "damaged-0")
    good = engine("FskvTier", lambda label: [7])
    assert bad["passes"]["slow"]["wrong"] == 1
    assert bad["passes"]["damaged"]["failed"] == 1
    assert all(not passed["wrong"] + passed["failed"] for passed in good["passes"].values())
    right.clear()
    with pytest.raises(BenchmarkError, match="recompute"):
        engine("recompute", lambda label: [7], "warm-0")
    facts = {
        "kinds": {kind: [good] for kind in side_by_side.KINDS}
        | {"recompute": [first], "vLLM's fs tier": [bad]},
        "requests": {name: len(asked) for name, asked in prompts.items()},
        "prompt_tokens": 1,
    }
    side_by_side.report(facts, options)
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if "fs tier" in line]
    assert [line[-2:] for line in lines[1:]] == [["0", "0"], ["1", "0"], ["0", "1"]]
