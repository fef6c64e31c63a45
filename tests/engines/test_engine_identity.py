"""Two real engines that would not compute the same KV never share it, whatever tells them apart.

One engine stores, another one that differs in one thing starts on its root. Each test has its control:
without the field that holds the difference the two identities are equal, so nothing else would have told.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil

import odd_checkpoints as odd
import pytest
from engine_lab import (
    MODELS,
    SETTLE,
    chunks,
    connector,
    generate,
    generates,
    needs_vllm,
    request,
    run,
    run_engine,
)
from places import LAB
from tier_lab import fskv_tier, tiering

pytestmark = [pytest.mark.engine]
needs_vllm()

PROGRAM = str(LAB / "identity_engine.py")
TEXT = MODELS["llama"].tokens("identity", 640)
SEEN = TEXT[:130]  # an image is put before it
PLAIN = {"dtype": "bfloat16", "block_size": 32, "max_model_len": 2048}
IMAGES = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1}}


class Lab:
    def __init__(self, tmp_path: pathlib.Path) -> None:
        self.root = tmp_path / "kv"
        self.root.mkdir()
        self.path = tmp_path

    def engine(self, checkpoint, *steps, root=None, transfer=True, env=None, **engine):
        """Run an engine on the root to its end; return its result."""
        what = self.request(checkpoint, *steps, transfer=transfer, env=env, **engine)
        return run(what, program=PROGRAM)

    def request(self, checkpoint, *steps, transfer=True, options=None, env=None, **engine):
        options = {"hybrid_chunk_size": 64, **(options or {})}
        return request(
            MODELS["llama"],
            [*steps, *([] if engine.get("runner") == "pooling" else SETTLE)],
            path=str(checkpoint),
            transfer=connector(str(self.root), **options) if transfer else None,
            engine={**PLAIN, **engine},
            env=env,
        )

    @property
    def identities(self):
        """The manifests of all namespaces, oldest first."""
        paths = sorted(self.root.glob("*/*@*/namespace.json"), key=lambda p: p.stat().st_mtime_ns)
        return [json.loads(path.read_text()) for path in paths]


@pytest.fixture
def lab(tmp_path):
    return Lab(tmp_path)


def without(identity, *paths):
    """Return a copy of an identity without what these dotted paths name."""
    left = json.loads(json.dumps(identity))
    for path in paths:
        *parents, last = path.split(".")
        inside = left
        for name in parents:
            inside = inside.get(name, {})
        inside.pop(last, None)
    return left


def assert_apart_by(lab, second, *paths):
    """The second engine took nothing from files; only these fields of its identity kept it from that."""
    assert generates(second)["text"]["num_cached_tokens"] == 0
    one, other = lab.identities
    assert one != other
    assert without(one, *paths) == without(other, *paths)  # the control
    said = pathlib.Path(second["log_path"]).read_text()
    assert "of this model here, the nearest differs in: " in said


def text(label="text"):
    return {**generate(TEXT, label), "max_tokens": 4}


@pytest.mark.slow
def test_a_maximum_length_that_changes_attention(lab):
    """Llama 4 decides by it, in a copy of its configuration, whether queries are scaled by position."""
    checkpoint = odd.llama4(lab.path / "llama4")
    engine = {"language_model_only": True, "skip_tokenizer_init": False}
    paths = f"{LAB}/absent:{os.environ.get('PYTHONPATH', '')}"
    env = {"PYTHONPATH": paths, "FSKV_ABSENT": "torchvision"}

    def at(length):
        what = lab.request(checkpoint, text(), env=env, **{**engine, "max_model_len": length})
        return run({**what, "sees_nothing": True}, program=PROGRAM)

    at(32768)
    second = at(65536)
    assert_apart_by(lab, second, "model_config.resolved", "extra.settings")


def test_where_prefix_caching_is_off_nothing_is_stored_or_loaded_and_it_is_said(lab):
    """vLLM turns it off for prompts that are not causal: two with one beginning have other KV there."""
    checkpoint = odd.prefix_lm(lab.path / "hrm")
    first, second = TEXT[:512], [*TEXT[:384], *MODELS["llama"].tokens("tail", 128)]
    result = lab.engine(
        checkpoint,
        generate(first, "first"),
        {"reset_prefix_cache": True},
        generate(second, "second"),
        max_num_batched_tokens=2048,
    )
    assert generates(result)["second"]["num_cached_tokens"] == 0
    assert chunks(str(lab.root)) == []
    assert "prefix caching is off" in pathlib.Path(result["log_path"]).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("asked", [None, True])
def test_a_pooling_model_that_needs_all_tokens_goes_on(lab, asked):
    checkpoint = odd.llama(lab.path / "llama")
    odd.tokenizer().save_pretrained(checkpoint)
    engine = {
        "skip_tokenizer_init": False,
        "runner": "pooling",
        "convert": "embed",
        "max_num_batched_tokens": 2048,
    }
    engine["pooler_config"] = {"seq_pooling_type": "MEAN"}
    result = lab.engine(
        checkpoint,
        {"embed": TEXT, "label": "one"},
        *([{"embed": [2], "label": "flush"}, {"sleep": 0.5}] * 2),
        {"reset_prefix_cache": True},  # vLLM's own, where it was asked for
        {"embed": TEXT, "label": "two"},
        enable_prefix_caching=asked,
        **engine,
    )
    one, two = (s["values"] for s in result["steps"] if s.get("label") in ("one", "two"))
    assert one == two
    assert chunks(str(lab.root)) == []


@pytest.mark.slow
def test_without_prefix_caching_another_image_is_not_taken_for_the_first(lab):
    """vLLM then names images by a counter."""
    checkpoint = odd.blip2(lab.path / "blip2")
    engine = {**IMAGES, "enable_prefix_caching": False, "mm_processor_cache_gb": 0}
    for image in (0, 1):
        step = {"prompt_token_ids": SEEN, "image": image, "label": "seen"}
        result = lab.engine(checkpoint, step, **engine)
        assert generates(result)["seen"]["num_cached_tokens"] in (0, None)
    assert chunks(str(lab.root)) == []


@pytest.mark.slow
def test_what_a_processor_reads_is_of_the_checkpoint(lab):
    """An edited processor_config.json is another checkpoint."""
    checkpoint = odd.blip2(lab.path / "blip2")
    options = {"trust": ["media"]}
    seen = {"prompt_token_ids": SEEN, "image": 0, "label": "seen"}

    def cached():
        what = lab.request(checkpoint, seen, options=options, **IMAGES)
        return generates(run(what, program=PROGRAM))["seen"]["num_cached_tokens"]

    assert (cached(), cached()) == (0, 128)
    path = checkpoint / "processor_config.json"
    processor = json.loads(path.read_text())
    processor["image_processor"] |= {"image_mean": [0.0] * 3, "image_std": [0.05] * 3}
    path.write_text(json.dumps(processor))
    assert cached() == 0
    one, other = lab.identities
    assert without(one, "weights") == without(other, "weights") != one


@pytest.mark.slow
def test_nothing_behind_an_image_is_stored_or_loaded(lab):
    checkpoint = odd.blip2(lab.path / "blip2")
    named = [
        {"prompt_token_ids": SEEN, "image": image, "uuid": "img-1", "label": f"{image}"}
        for image in (0, 1)
    ]
    truth = [lab.engine(checkpoint, step, transfer=False, **IMAGES) for step in named]
    for step, expected in zip(named, truth, strict=True):
        found = generates(lab.engine(checkpoint, step, **IMAGES))[step["label"]]
        assert found["num_cached_tokens"] == 0
        assert found["tokens"] == generates(expected)[step["label"]]["tokens"]
    assert chunks(str(lab.root)) == []


@pytest.mark.slow
def test_control_with_trusted_keys_another_image_under_the_same_name_is_served(lab):
    checkpoint = odd.blip2(lab.path / "blip2")
    options = {"trust": ["media"]}
    seen = {"prompt_token_ids": SEEN, "uuid": "img-1", "label": "seen"}
    for image, cached in ((0, 0), (1, 128)):
        what = lab.request(checkpoint, {**seen, "image": image}, options=options, **IMAGES)
        assert generates(run(what, program=PROGRAM))["seen"]["num_cached_tokens"] == cached


@pytest.mark.slow
def test_the_checkpoint_s_own_code(lab):
    checkpoint = odd.remote_code(lab.path / "remote")
    engine = {"trust_remote_code": True, "model_impl": "transformers"}
    lab.engine(checkpoint, text(), **engine)
    odd.remote_code(checkpoint, scale=-3.0)
    second = lab.engine(checkpoint, text(), **engine)
    assert_apart_by(lab, second, "weights", "extra.code")


@pytest.mark.slow
def test_which_of_two_sets_of_files_is_loaded(lab):
    checkpoint = odd.llama(lab.path / "two")
    weights = checkpoint / "model.safetensors"
    (checkpoint / "consolidated.safetensors").write_bytes(odd.other_weights(weights))
    from safetensors import safe_open

    with safe_open(weights, "pt") as file:
        names = list(file.keys())
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, weights.name)}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    lab.engine(checkpoint, text(), load_format="auto")
    second = lab.engine(checkpoint, text(), load_format="hf")
    assert_apart_by(lab, second, "extra.weight_files")
    third = lab.engine(checkpoint, text(), load_format="safetensors")  # other words, the same files
    assert generates(third)["text"]["num_cached_tokens"] == 640
    assert len(lab.identities) == 2


def test_weights_that_are_replaced_after_the_load_stop_the_start(lab):
    checkpoint = odd.llama(lab.path / "live")
    weights, new = checkpoint / "model.safetensors", lab.path / "new"
    new.write_bytes(odd.other_weights(weights))
    what = lab.request(checkpoint, text())
    what["replace_after_load"] = [str(weights), str(new)]
    result = run_engine(what, program=PROGRAM)
    assert result["exit_code"] != 0
    assert "model.safetensors changed while the engine loaded it" in result["error"]
    assert chunks(str(lab.root)) == []
    # The control: with the user's word for it the engine starts, and stores.
    what = lab.request(checkpoint, text(), options={"weights_id": "mine"})
    what["replace_after_load"] = [str(weights), str(new)]
    assert run_engine(what, program=PROGRAM)["exit_code"] == 0
    assert chunks(str(lab.root))


@pytest.mark.slow
@pytest.mark.parametrize("fixed", [False, True])
def test_weights_that_are_loaded_again_in_a_running_engine(lab, fixed):
    """From then on nothing of the old weights is loaded, nothing of the new ones stored under their name."""
    checkpoint = odd.llama(lab.path / "llama")
    other = lab.path / "other"
    shutil.copytree(checkpoint, other)
    weights = other / "model.safetensors"
    weights.write_bytes(odd.other_weights(weights))
    again = {"rpc": "reload_weights", "kwargs": {"weights_path": str(other)}}
    lab.engine(checkpoint, text())
    stored = len(chunks(str(lab.root)))
    steps = [again, {"reset_prefix_cache": True}, text(), {"sleep": 0.5}, text("other")]
    steps[-1]["prompt_token_ids"] = MODELS["llama"].tokens("other", 640)
    what = lab.request(checkpoint, *steps, options={"weights_fixed": fixed})
    result = run(what, program=PROGRAM)
    truth = generates(lab.engine(other, text(), transfer=False))["text"]["tokens"]
    if fixed:  # the control: somebody vouched for what is not so
        assert generates(result)["text"]["num_cached_tokens"] > 0
        assert len(chunks(str(lab.root))) > stored
        return
    assert generates(result)["text"]["tokens"] == truth
    assert len(chunks(str(lab.root))) == stored
    assert "weights were loaded again" in pathlib.Path(result["log_path"]).read_text()


@pytest.mark.slow
@pytest.mark.parametrize("fixed", [False, True])
def test_a_tier_is_told_of_weights_that_are_loaded_again(lab, fixed):
    """It lives in the engine's core, the weights in workers: as above, behind vLLM's CPU tier."""
    checkpoint = odd.llama(lab.path / "llama")
    other = lab.path / "other"
    shutil.copytree(checkpoint, other)
    weights = other / "model.safetensors"
    weights.write_bytes(odd.other_weights(weights))

    def engine(*steps):
        what = lab.request(checkpoint, *steps)
        tier = fskv_tier(str(lab.root), weights_fixed=fixed)
        what["kv_transfer_config"] = tiering([tier], spec_module_path="demo.cpu_tiering")
        return run(what, program=PROGRAM)

    engine(text())
    stored = len(chunks(str(lab.root)))
    assert stored
    again = {"rpc": "reload_weights", "kwargs": {"weights_path": str(other)}}
    new = {**text("other"), "prompt_token_ids": MODELS["llama"].tokens("other", 640)}
    result = engine(again, {"reset_prefix_cache": True}, text(), {"sleep": 0.5}, new)
    if fixed:  # the control: somebody vouched for what is not so
        assert generates(result)["text"]["num_cached_tokens"] > 0
        assert len(chunks(str(lab.root))) > stored
        return
    truth = generates(lab.engine(other, text(), transfer=False))["text"]["tokens"]
    assert generates(result)["text"]["tokens"] == truth
    assert generates(result)["text"]["num_cached_tokens"] == 0
    assert len(chunks(str(lab.root))) == stored
    assert "weights were loaded again" in pathlib.Path(result["log_path"]).read_text()


@pytest.mark.slow
def test_ranks_that_run_a_checkpoint_s_own_code_agree_and_see_it_edited(lab):
    checkpoint = odd.remote_code(lab.path / "remote")
    engine = {"trust_remote_code": True, "model_impl": "transformers", "tensor_parallel_size": 2}
    env = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    cached = []
    for scale in (1.0, 1.0, -3.0):
        odd.remote_code(checkpoint, scale)
        cached.append(generates(lab.engine(checkpoint, text(), env=env, **engine))["text"])
    assert [each["num_cached_tokens"] for each in cached] == [0, 640, 0]
    assert cached[0]["tokens"] == cached[1]["tokens"] != cached[2]["tokens"]
    one, other = lab.identities
    assert without(one, "weights", "extra.code") == without(other, "weights", "extra.code") != one
