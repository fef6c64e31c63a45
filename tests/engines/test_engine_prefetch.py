"""What waiting requests will load is read ahead, on real engines: their loads need no file any more."""

from __future__ import annotations

import json

import engine_lab as lab
import pytest
from places import LAB

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]
lab.needs_vllm()

SCENARIO = str(LAB / "prefetch_scenario.py")


def scenario(directory, name, *how) -> dict:
    """Return what the child told, after the checks that hold however it was started."""
    root = directory / "kv"
    root.mkdir()
    said = lab.run_program(SCENARIO, name, lab.checkpoint(name), str(root), *how)
    (line,) = (line for line in said.splitlines() if line.startswith("RESULT "))
    result = json.loads(line.removeprefix("RESULT "))
    assert result["files"] > 0
    assert "d" not in result["done"], "it was aborted"
    assert result["left"] == result["slots_used"] == 0
    return result


def same_tokens(result) -> bool:
    done = result["done"]
    return all(done[label]["tokens"] == done[f"cold {label}"]["tokens"] for label in "abc")


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt_oss", marks=pytest.mark.slow)])
def test_waiting_requests_load_what_was_read_ahead_although_its_files_are_gone(tmp_path, name):
    result = scenario(tmp_path, name)
    assert same_tokens(result)
    counted, done = result["counters"], result["done"]
    assert counted["load_failures"] == 0
    assert all(done[label]["cached"] > 1000 for label in "abc")
    # Of four requests, one was withdrawn: its room came back at once.
    assert result["read_ahead"] == result["after_abort"] * 4 // 3 > 0
    assert counted["used"] == result["after_abort"]
    assert counted["dropped"] == result["read_ahead"] - result["after_abort"]


@pytest.mark.slow
def test_negative_control_without_the_option_they_are_recomputed(tmp_path):
    result = scenario(tmp_path, "llama", "without")
    assert same_tokens(result)
    assert result["read_ahead"] == 0
    assert result["counters"]["load_failures"] > 0
    assert all(result["done"][label]["cached"] == 0 for label in "abc")


def test_negative_control_the_tokens_are_those_of_what_was_read_ahead(tmp_path):
    assert not same_tokens(scenario(tmp_path, "llama", "poisoned"))
