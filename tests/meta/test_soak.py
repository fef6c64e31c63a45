"""The soak, in small: it is well, and each thing that it looks for is found when it is made to happen."""

from __future__ import annotations

import copy
import json
import subprocess
import sys

import pytest
from places import REPOSITORY

pytest.importorskip("torch", reason="the trials need torch: make test")

from trials import soak

MIB = 1 << 20


GOOD = {
    "wrong": 0,
    "failed": [],
    "slowest_s": 3.0,
    "bound": 100,
    "greatest_bytes": 100,
    "requests": 1000,
    "sizes": 50,
    "growth": {"engine": {"memory": MIB, "threads": 1, "descriptors": 1}},
    "left": {"parts": 0, "heartbeats": 0, "processes": 0, "in time": True},
    "healed": 12,
    "healed_of": 12,
    "hit_ratios": {"measured": 60.0, "lru": 65.0},
}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("wrong",), 1),
        (("failed",), ["the first engine has died"]),
        (("slowest_s",), 100.0),
        (("greatest_bytes",), 121),
        (("requests",), 0),
        (("sizes",), 0),
        (("growth",), {}),
        (("growth", "engine", "memory"), 1 << 30),
        (("growth", "engine", "threads"), 100),
        (("growth", "engine", "descriptors"), 100),
        (("left", "parts"), 1),
        (("left", "heartbeats"), 1),
        (("left", "processes"), 1),
        (("healed",), 5),
        (("hit_ratios", "measured"), 50.0),
    ],
)
def test_each_failing_is_a_problem(path, value):
    facts = copy.deepcopy(GOOD)
    *where, last = path
    inner = facts
    for name in where:
        inner = inner[name]
    inner[last] = value
    assert len(soak.problems(facts)) == 1
    assert soak.problems(GOOD) == []


def run(directory, *arguments):
    """Run the soak on a directory; return its exit code and its facts. Nothing of it is left."""
    command = [sys.executable, "-m", "trials.soak", "--json", "--dir", str(directory), *arguments]
    done = subprocess.run(
        [*command, "--root", str(directory)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=1100,
    )
    assert list(directory.iterdir()) == [], "something was left behind"
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1, f"exit code {done.returncode}: {done.stderr[-3000:]}"
    return done.returncode, json.loads(lines[0])


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(1200)
def test_a_short_soak_is_well(tmp_path):
    code, facts = run(tmp_path, "--minutes", "1.5", "--every", "15")
    assert facts["problems"] == []
    assert code == 0
    assert (facts["wrong"], facts["hits"] > 0, facts["requests"] > 20) == (0, True, True)
    assert len(facts["faults"]) == 6, "each of five kinds, and the time before"
    assert facts["counted"]["stored_bytes"] > 0
    assert any(name.startswith("load_failures") for name in facts["counted"]), "no damage was met"


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(1200)
def test_negative_control_what_the_soak_looks_for_is_found(tmp_path):
    # Not "engine": on a busy machine its next life is too short to be watched.
    broken = ("kv", "bound", "orphans", "memory", "threads", "descriptors")
    options = ("--minutes", "1.5", "--every", "15", "--break", ",".join(broken))
    code, facts = run(tmp_path, *options)
    said = "; ".join(facts["problems"])
    assert code == 1
    for word in (
        *("wrong tokens", "bound exceeded", "memory of an engine"),
        *("threads of an engine", "descriptors of an engine", "parts left", "heartbeats left"),
    ):
        assert word in said
