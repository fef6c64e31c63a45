"""Kinds of KV that few models have: what one engine stores another one loads, and each file is used."""

from __future__ import annotations

import os

import engine_lab as lab
import pytest
from model_kinds import KINDS, PROMPTS

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]
lab.needs_vllm()

MAIN = PROMPTS.main_prompt()


def of_whom(path):
    """Return the part of a file's name that says group and rank: "g0.kv", "g0.r1.kv"."""
    return os.path.basename(path).partition(".")[2]


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_of_kv_is_stored_and_loaded_and_zeroed_files_give_other_tokens(name, root, tmp_path):
    kind = KINDS[name]
    what = kind.what(tmp_path / "checkpoint", root)
    cold = [lab.generate(MAIN, "cold"), *lab.SETTLE, *lab.SETTLE]
    reference = lab.generates(lab.run(lab.request(PROMPTS, cold, **what)))["cold"]
    assert reference["num_cached_tokens"] == 0
    assert len(set(reference["tokens"])) > 2, "degenerate tokens would prove nothing"
    lab.assert_sound(root)
    stored = lab.snapshot(root)
    (manifest,) = lab.identities(root)
    groups = manifest["groups"]
    assert tuple(group["kind"].partition("/")[0] for group in groups) == kind.groups
    if name == "unequal_blocks":
        assert len({group["tokens_per_block"] for group in groups}) == 2

    victims = sorted({of_whom(file) for file in stored})
    num_ranks = kind.engine.get("pipeline_parallel_size", 1)
    assert len(victims) == num_ranks * len(kind.groups)
    talk = lab.Conversation(tmp_path)
    talk.say(lab.generate(MAIN, "loaded"), lab.METRICS, lab.RESET)
    for victim in victims:
        files = [file for file in stored if of_whom(file) == victim]
        talk.spoil(stored, lambda files=files: lab.zero(files))
        talk.say(lab.generate(MAIN, victim), lab.RESET)
    talk.spoil(stored, lambda: None)
    talk.say(lab.generate(MAIN, "restored"))
    result = talk.run(PROMPTS, **what)
    done = lab.generates(result)
    for label in ("loaded", "restored"):
        assert done[label]["tokens"] == reference["tokens"], label
        assert done[label]["num_cached_tokens"] >= PROMPTS.prompt_tokens // 2, label
    assert lab.counter(lab.metrics(result)[0], "load_failures") == 0
    for victim in victims:
        assert done[victim]["num_cached_tokens"] == done["loaded"]["num_cached_tokens"], victim
        assert done[victim]["tokens"] != reference["tokens"], f"{victim} had no effect"


def test_without_prefix_caching_a_model_of_states_alone_starts_and_nothing_is_stored(
    root, tmp_path
):
    """VLLM then makes one block of its longest request: no chunk could ever be full."""
    what = KINDS["mamba2"].what(tmp_path / "checkpoint", root)
    what["engine"] |= {"enable_prefix_caching": False, "prefix_cache_retention_interval": None}
    steps = [lab.generate(MAIN, "computed"), *lab.SETTLE]
    result = lab.run(lab.request(PROMPTS, steps, **what))
    assert lab.snapshot(root) == {}
    assert "prefix caching is off" in lab.log_of(result)
