"""The soak, in small: it is well, and each thing that it looks for is found when it is made to happen."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from places import REPOSITORY

pytest.importorskip("torch", reason="the trials need torch: make test")


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
