"""The soak, in small: it is well, and each thing that it looks for is found when it is made to happen."""

from __future__ import annotations

import pytest
from facts import facts_of

pytest.importorskip("torch", reason="the trials need torch: make test")


def run(directory, *arguments):
    root = ("--root", str(directory))
    return facts_of("trials.soak", directory, *arguments, *root, timeout=1100)


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
