"""Kinds of KV that few models have: what one engine stores another one loads, and each file is used."""

from __future__ import annotations

import json
import os
import pathlib

import engine_lab as lab
import pytest
from model_kinds import KINDS
from places import LAB

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]
lab.needs_vllm()


def of_whom(path):
    """Return the part of a file's name that says group and rank: "g0.kv", "g0.r1.kv"."""
    return os.path.basename(path).partition(".")[2]


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_of_kv_is_stored_and_loaded_and_zeroed_files_give_other_tokens(name, tmp_path):
    kind = KINDS[name]
    (tmp_path / "root").mkdir()
    root, path = str(tmp_path / "root"), kind.checkpoint(tmp_path / "checkpoint")

    def start(steps, label):
        what = {
            "model": path,
            "engine": {"dtype": "float32", **kind.engine},
            "kv_transfer_config": lab.connector(root, lookup_timeout_s=10, **kind.options),
            "env": {**lab.ENGINE_ENV, **kind.env},
            "steps": steps,
        }
        return lab.start_engine(what, tmp_path / label, program=str(LAB / kind.program))

    main = kind.main_prompt()
    cold = lab.explained(
        start([lab.generate(main, "cold"), *lab.SETTLE, *lab.SETTLE], "cold").wait()
    )
    assert cold["exit_code"] == 0, cold.get("error")
    reference = lab.generates(cold)["cold"]
    assert reference["num_cached_tokens"] == 0
    assert len(set(reference["tokens"])) > 2, "degenerate tokens would prove nothing"
    lab.assert_sound(root)
    stored = lab.snapshot(root)
    (manifest,) = pathlib.Path(root).glob("*/*@*/namespace.json")
    groups = json.loads(manifest.read_text())["groups"]
    assert tuple(group["kind"].partition("/")[0] for group in groups) == kind.groups
    if name == "unequal_blocks":
        assert len({group["tokens_per_block"] for group in groups}) == 2

    victims = sorted({of_whom(file) for file in stored})
    num_ranks = kind.engine.get("pipeline_parallel_size", 1)
    assert len(victims) == num_ranks * len(kind.groups)
    talk = lab.Conversation(tmp_path)
    talk.say(lab.generate(main, "loaded"), {"metrics": True}, {"reset_prefix_cache": True})
    pauses = {}
    for victim in victims:
        pauses[victim] = talk.pause()
        talk.say(lab.generate(main, victim), {"reset_prefix_cache": True})
    last = talk.pause()
    talk.say(lab.generate(main, "restored"))
    engine = start(talk.steps, "warm")

    def zero(victim):
        lab.restore(stored)
        for file in stored:
            if of_whom(file) == victim:
                lab.zero_payload(file)

    for victim, pause in pauses.items():
        talk.resume(engine, pause, lambda v=victim: zero(v))
    talk.resume(engine, last, lambda: lab.restore(stored))
    result = lab.explained(engine.wait())
    assert result["exit_code"] == 0, result.get("error")
    done = lab.generates(result)
    for label in ("loaded", "restored"):
        assert done[label]["tokens"] == reference["tokens"], label
        assert done[label]["num_cached_tokens"] >= kind.prompt_tokens // 2, label
    assert lab.counter(lab.metrics(result)[0], "load_failures") == 0
    for victim in victims:
        assert done[victim]["num_cached_tokens"] == done["loaded"]["num_cached_tokens"], victim
        assert done[victim]["tokens"] != reference["tokens"], f"{victim} had no effect"


def test_without_prefix_caching_a_model_of_states_alone_starts_and_nothing_is_stored(tmp_path):
    """VLLM then makes one block of its longest request: no chunk could ever be full."""
    kind = KINDS["mamba2"]
    (tmp_path / "root").mkdir()
    options = {"enable_prefix_caching": False, "prefix_cache_retention_interval": None}
    what = {
        "model": kind.checkpoint(tmp_path / "checkpoint"),
        "engine": {"dtype": "float32", **kind.engine, **options},
        "kv_transfer_config": lab.connector(str(tmp_path / "root"), **kind.options),
        "env": {**lab.ENGINE_ENV, **kind.env},
        "steps": [lab.generate(kind.main_prompt(), "computed"), *lab.SETTLE],
    }
    engine = lab.start_engine(what, tmp_path / "engine", program=str(LAB / kind.program))
    result = lab.explained(engine.wait())
    assert result["exit_code"] == 0, result.get("error")
    assert lab.snapshot(str(tmp_path / "root")) == {}
    assert "prefix caching is off" in pathlib.Path(result["log_path"]).read_text()
