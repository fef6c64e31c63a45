"""The fuzz of a root's files, in small: stores go on, and without a safety the fuzz would notice."""

from __future__ import annotations

import pytest
from facts import facts_of


def test_stores_go_on_whatever_is_in_the_files_of_the_root(tmp_path):
    code, facts = facts_of("trials.fuzz", tmp_path, "--minutes", "0.08", "--seed", "2")
    assert facts["problems"] == []
    assert code == 0
    # It was one: files were replaced, and chunks were stored and loaded meanwhile.
    assert facts["files"] >= facts["rounds"] >= 2
    assert facts["stored"] > 4
    assert facts["loaded"] > 4
    assert facts["wrong"] == 0


@pytest.mark.parametrize("safety", ["survival", "length"])
def test_negative_control_without_a_safety_they_do_not(tmp_path, safety):
    options = ("--minutes", "1", "--limit-s", "4", "--seed", "1", "--break", safety)
    code, facts = facts_of("trials.fuzz", tmp_path, *options)
    assert code == 1
    assert "no room for a chunk" in facts["problems"][0] or "has ended" in facts["problems"][0]
