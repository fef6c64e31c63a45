"""The benchmark commands run, verify what they move and notice a broken bound. No speed is asserted."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from places import REPOSITORY
from world import wait_for

pytest.importorskip("torch", reason="the benchmarks need torch: make test")

from benchmarks import scale_root
from benchmarks.rig import BenchmarkError, work_directory

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


@pytest.mark.slow
def test_the_benchmark_of_first_reads_sees_a_load_that_is_read_before_the_forward_ends(tmp_path):
    small = ("--stores=4", "--forward-s=2", "--rounds=1", "--chunk-kib=64", "--layers=2")
    code, facts = run("first_read", *small, directory=tmp_path)
    assert facts["all_ms"]["max"] < 2000
    assert code == (0 if facts["first_ms"]["median"] <= 10 else 1)


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


@pytest.mark.slow
def test_the_ceiling_is_of_files_that_were_read_whole_and_checked(tmp_path):
    small = ("--rounds=2", "--total-mib=2", "--chunk-kib=64", "--threads=2")
    code, facts = run("ceiling", *small, directory=tmp_path)
    assert code == 0
    assert len(facts["gb_per_s"]) == 4
    assert all(found["median"] > 0 for found in facts["gb_per_s"].values())


def test_negative_control_the_ceiling_has_no_rate_where_bytes_differ(tmp_path):
    from benchmarks import ceiling

    files = ceiling.Files(str(tmp_path), 4, 1 << 16, direct_io=False)
    assert files.read(2, check=True, copy=True) > 0
    (tmp_path / "3").write_bytes(bytes(1 << 16))
    with pytest.raises(BenchmarkError, match="other bytes"):
        files.read(2, check=True, copy=False)
    (tmp_path / "3").write_bytes(b"short")
    with pytest.raises(BenchmarkError, match="in part"):
        files.read(2, check=False, copy=False)


def test_the_ceiling_without_memory_for_its_threads_says_so_and_ends(tmp_path, monkeypatch):
    from benchmarks import ceiling

    files = ceiling.Files(str(tmp_path), 1, 4096, direct_io=False)

    def refuse(_):
        raise MemoryError("no room")

    monkeypatch.setattr(ceiling.Arena, "take", refuse)
    with pytest.raises(BenchmarkError, match="2 threads of 8192 bytes: no room"):
        files.read(2, check=False, copy=False)


def test_a_job_that_no_queue_takes_is_refused_in_words(tmp_path):
    from benchmarks import engine_thread

    options = engine_thread.parse(["--job-chunks=513", f"--dir={tmp_path}"])
    with pytest.raises(BenchmarkError, match="--job-chunks: found 513, expected at most 512"):
        engine_thread.measure(options)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_goes_although_somebody_still_writes_in_it(tmp_path):
    ending = threading.Event()

    def write(directory):
        number = 0
        while not ending.wait(0.0002):
            with contextlib.suppress(OSError):
                (directory / str(number)).write_text("late")
            number += 1

    with work_directory(str(tmp_path)) as path:
        many = pathlib.Path(path) / "many"
        many.mkdir()
        for number in range(2000):
            (many / f"file {number}").touch()
        writer = threading.Thread(target=write, args=(many,))
        writer.start()
    ending.set()
    writer.join()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_benchmark_of_depth_delays_each_call_and_says_what_auto_takes(tmp_path):
    small = ("--rounds=1", "--total-mib=2", "--chunk-kib=64", "--threads=1,8", "--delay-ms=5")
    code, facts = run("depth", *small, directory=tmp_path)
    assert code == 0
    assert facts["answer_ms"] >= 10
    assert facts["auto"] == 32
    for rates in facts["gb_per_s"].values():
        assert min(rate["median"] for rate in rates.values()) > 0


@pytest.mark.slow
def test_the_benchmark_of_lookups_asks_both_the_same(tmp_path):
    pytest.importorskip("vllm")
    code, facts = run("lookups", "--keys=64", "--rounds=2", directory=tmp_path)
    assert code == (0 if facts["ratio"]["median"] >= 0.95 else 1)
    assert all(found["median"] > 0 for found in facts["thousand_keys_per_s"].values())


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


@pytest.mark.slow
def test_an_interrupted_benchmark_leaves_nothing_behind(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.flood", *SMALL_FLOOD[2:], "--dir", str(tmp_path)],
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: any(tmp_path.rglob("*.kv")), 60)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert list(tmp_path.iterdir()) == []


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


def test_the_right_prune_passes_the_scale_benchmarks_check(copy_of_shells):
    namespace, names = copy_of_shells, [*scale_root.oldest(300, 1, 6)]
    remove(namespace, [names[place] for place in (0, 1, 2, 4, 5)])
    found = scale_root.check_pruned(namespace, 300, 1, 5, {names[3][1]})
    assert found == {"gone": 5, "kept": 295}


@pytest.mark.slow
def test_an_interrupted_scale_benchmark_leaves_nothing_behind(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.scale", "--dir", str(tmp_path), *SMALL_SCALE],
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: any(tmp_path.rglob("usage.json")), 60)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert list(tmp_path.iterdir()) == []


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


def test_side_by_side_spoils_what_is_there_and_counts_the_cpu_of_a_session(tmp_path):
    from benchmarks import side_by_side

    path = tmp_path / "a.bin"
    path.write_bytes(b"x" * 100)
    (tmp_path / "a.bin.part").touch()
    assert side_by_side.files(str(tmp_path)) == [str(path)]
    side_by_side.zero_middle(str(path))
    assert path.read_bytes() == b"x" * 25 + bytes(50) + b"x" * 25
    spin = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ninput()"
    busy = subprocess.Popen(
        [sys.executable, "-c", spin],
        start_new_session=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        busy.stdout.readline()
        assert 0.4 <= side_by_side.session_cpu_s(busy.pid) < 5
    finally:
        busy.kill()
        busy.communicate()
    assert side_by_side.session_cpu_s(busy.pid) == 0


def test_questions_share_a_document_and_differ_in_the_end(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    from benchmarks.questions import Documents

    words = tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    trainer = tokenizers.trainers.WordLevelTrainer(special_tokens=["[UNK]"])
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    tokenizer.train_from_iterator(
        [text, "Question : what does this text say about Answer"], trainer
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    documents = Documents(str(tmp_path), number=2, tokens=300)
    one, other, elsewhere = (documents.prompt(*at) for at in ((0, 1), (0, 2), (1, 1)))
    assert one[:300] == other[:300]
    assert one[300:] != other[300:]
    assert one[:300] != elsewhere[:300]
    with pytest.raises(BenchmarkError, match="were asked for"):
        Documents(str(tmp_path), number=2, tokens=10**7)
    with pytest.raises(BenchmarkError, match="--model"):
        Documents(str(tmp_path / "none"), number=1, tokens=1)
