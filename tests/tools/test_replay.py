"""`fskv replay`: traces are checked, the simulated root follows fskv's rules, and the curve is shown."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys

import pytest
from fskv_tools.exits import UsageError
from fskv_tools.replay import curve, trace
from fskv_tools.replay.trace import Request
from hypothesis import given
from hypothesis import strategies as st
from tool_lab import run

GOOD = b'{"timestamp": 1, "hash_ids": [1]}\n'


def conversations(num_requests=60, seed=0):
    """Return requests of conversations that come back with longer prompts."""
    source = random.Random(seed)
    prompts = [[i * 1000] for i in range(8)]
    requests = []
    for number in range(num_requests):
        prompt = source.choice(prompts)
        prompt.extend(range(prompt[-1] + 1, prompt[-1] + source.randint(1, 4)))
        requests.append(Request(number * 10.0, (10_000_000, *prompt)))
    return requests


@pytest.fixture
def path(tmp_path):
    lines = [
        json.dumps({"timestamp": one.timestamp_ms, "hash_ids": one.hash_ids})
        for one in conversations()
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(lines) + "\n")
    return str(tmp_path / "trace.jsonl")


# --- traces -----------------------------------------------------------------------------------


def test_a_trace_is_read_in_its_order_whatever_else_its_lines_say():
    lines = [
        b'{"timestamp": 5, "input_length": 900, "output_length": 1, "hash_ids": [3, 4]}\r\n',
        b"\n",
        b'{"timestamp": 2.5, "hash_ids": []}',
    ]
    requests = trace.parse_trace(lines, "x")
    assert requests == [Request(5.0, (3, 4)), Request(2.5, ())]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"timestamp": }', "not JSON: Expecting value: column 15"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "expected a JSON object"),
        (b'{"hash_ids": [1]}', "'timestamp': found nothing"),
        (b'{"timestamp": true, "hash_ids": [1]}', "'timestamp': found True"),
        (b'{"timestamp": NaN, "hash_ids": [1]}', "'timestamp': found nan"),
        (b'{"timestamp": 1}', "'hash_ids': found nothing"),
        (b'{"timestamp": 1, "hash_ids": {"a": 1}}', "'hash_ids': found {'a': 1}"),
        (b'{"timestamp": 1, "hash_ids": [1, "2"]}', "found '2' in it"),
        (b'{"timestamp": 1, "hash_ids": [-1]}', "found -1 in it"),
    ],
)
def test_a_bad_line_is_named(line, words):
    with pytest.raises(UsageError) as error:
        trace.parse_trace([GOOD, GOOD, b"\n", line + b"\n", GOOD], "a.jsonl")
    assert str(error.value).startswith("a.jsonl, line 4: ")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


# --- the simulated root -----------------------------------------------------------------------

prompts = st.lists(st.lists(st.integers(0, 12), max_size=8), max_size=30).map(
    lambda found: [Request(0.0, tuple(ids)) for ids in found]
)


def brute_force(requests, size, rank=lambda number, depth: (number, -depth)):
    """Replay against a table of uses, by the rules alone: above 99 % of the size, down to 97 %."""
    uses, hits, written = {}, 0, 0
    for number, request in enumerate(requests):
        for block in request.hash_ids:
            if block not in uses:
                break
            hits += 1
        written += len(set(request.hash_ids) - uses.keys())
        for depth, block in reversed(list(enumerate(request.hash_ids))):
            uses[block] = rank(number, depth)
        if size is not None and 100 * len(uses) > int(0.99 * 100 * size):
            while uses and 100 * len(uses) > int(int(0.99 * 100 * size) - 0.02 * 100 * size):
                del uses[min(uses, key=uses.get)]
    return curve.Point(None if size is None else 100 * size, "all", hits, written)


@given(prompts, st.one_of(st.none(), st.integers(1, 15)))
def test_what_was_used_longest_ago_goes_first_and_of_a_prompt_its_end(requests, size):
    found = curve.simulate(requests, 100, None if size is None else 100 * size)
    assert found == brute_force(requests, size)
    assert found.hits <= brute_force(requests, None).hits


def test_negative_control_where_the_beginning_goes_first_less_is_hit():
    requests = [Request(0.0, tuple(range(8)))] * 5
    assert curve.simulate(requests, 100, 400).hits == 4 * 3  # the beginning stays
    assert brute_force(requests, 4, rank=lambda number, depth: (number, depth)).hits == 0


# --- the command ------------------------------------------------------------------------------


def test_the_curve_is_a_line_for_each_size_and_one_without_a_bound(path):
    done = run("replay", path, "--json", "--bytes-per-token", "2", "--sizes", "1TiB,16KiB")
    assert (done.exit_code, done.stderr) == (0, "")
    requests = conversations()
    num_blocks = sum(len(one.hash_ids) for one in requests)
    best = curve.simulate(requests, 1024)
    *lines, unbounded = done.lines[:-1]
    assert [line["admission"] for line in lines] == 2 * ["all", "reused", "auto"]
    small, reused, large = lines[0], lines[1], lines[3]
    assert reused["written_nbytes"] < small["written_nbytes"]
    assert (small["nbytes"], large["nbytes"], unbounded["nbytes"]) == (1 << 14, 1 << 40, None)
    assert small["hit_blocks"] == curve.simulate(requests, 1024, 1 << 14).hits
    assert large["hit_ratio"] == unbounded["hit_ratio"] == best.hits / num_blocks
    assert (large["of_best"], large["written_nbytes"]) == (1.0, best.written * 1024)
    assert (done.summary["requests"], done.summary["blocks"]) == (60, num_blocks)


def test_a_gzipped_trace_is_read_and_a_damaged_one_is_one_sentence(path, tmp_path):
    with open(path, "rb") as file:
        packed = gzip.compress(file.read())
    (tmp_path / "trace.gz").write_bytes(packed)
    assert run("replay", tmp_path / "trace.gz").stdout == run("replay", path).stdout
    for content in (packed[:60], packed[:20] + bytes(40), packed[:2] + b"no"):
        (tmp_path / "trace.gz").write_bytes(content)
        done = run("replay", tmp_path / "trace.gz")
        assert (done.exit_code, done.stdout) == (2, "")
        assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        (None, [], "No such file"),
        (b"", [], "found no request"),
        (b'{"timestamp": 1, "hash_ids": []}', [], "found no block"),
        (GOOD + b"x", [], "line 2: not JSON"),
        (GOOD, ["--sizes", "1G"], "did you mean 1GiB?"),
        (GOOD, ["--bytes-per-token", "0"], "--bytes-per-token"),
    ],
)
def test_nonsense_is_exit_code_2(tmp_path, content, options, words):
    path = tmp_path / "trace"
    if content is not None:
        path.write_bytes(content)
    done = run("replay", str(path), *options)
    assert (done.exit_code, done.stdout) == (2, "")
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_trace_comes_through_a_pipe_too(path):
    words = [sys.executable, "-m", "fskv_tools", "replay", "/dev/stdin", "--json"]
    with open(path, "rb") as file:
        done = subprocess.run(words, input=file.read(), capture_output=True)
    assert done.returncode == 0
    assert json.loads(done.stdout.splitlines()[-1])["requests"] == 60
