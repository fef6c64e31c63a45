"""Two real engines that would not compute the same KV never share it, whatever tells them apart.

One engine stores, another one that differs in one thing starts on its root. Each test has its control:
without the field that holds the difference the two identities are equal, so nothing else would have told.
"""

from __future__ import annotations

import json
import pathlib

import odd_checkpoints as odd
import pytest
from engine_lab import (
    MODELS,
    RESET,
    SETTLE,
    TWO_RANKS,
    chunks,
    connector,
    generate,
    generates,
    identities,
    log_of,
    needs_vllm,
    request,
    run,
    start_engine,
)

pytestmark = [pytest.mark.engine]
needs_vllm()

TEXT = MODELS["llama"].tokens("identity", 640)
SEEN = TEXT[:130]  # an image is put before it
PLAIN = {"dtype": "bfloat16", "block_size": 32, "max_model_len": 2048}
IMAGES = {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1}}


class Lab:
    """A root, and engines on it."""

    def __init__(self, root: str, path: pathlib.Path) -> None:
        self.root, self.path = root, path

    def engine(self, *what, **how):
        """Run an engine on the root to its end; return its result."""
        return run(self.request(*what, **how))

    def request(
        self, checkpoint, *steps, transfer=True, options=None, env=None, changes=None, **engine
    ):
        options = {"hybrid_chunk_size": 64, **(options or {})}
        return request(
            MODELS["llama"],
            [*steps, *([] if engine.get("runner") == "pooling" else SETTLE)],
            path=str(checkpoint),
            transfer=connector(self.root, **options) if transfer else None,
            engine={**PLAIN, **engine},
            env=env,
            changes=changes or {},
        )

    def cached(self, *what, **how):
        """Return how many tokens the engine did not compute, of what it was asked for as "seen"."""
        return generates(self.engine(*what, **how))["seen"]["num_cached_tokens"]

    @property
    def chunks(self):
        return chunks(self.root)

    @property
    def identities(self):
        return identities(self.root)


@pytest.fixture
def lab(root, tmp_path):
    return Lab(root, tmp_path)


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
    assert "of this model here, the nearest differs in: " in log_of(second)


def text(label="text"):
    return {**generate(TEXT, label), "max_tokens": 4}


def test_where_prefix_caching_is_off_nothing_is_stored_or_loaded_and_it_is_said(lab):
    """vLLM turns it off for prompts that are not causal: two with one beginning have other KV there."""
    checkpoint = odd.prefix_lm(lab.path / "hrm")
    first, second = TEXT[:512], [*TEXT[:384], *MODELS["llama"].tokens("tail", 128)]
    result = lab.engine(
        checkpoint,
        generate(first, "first"),
        RESET,
        generate(second, "second"),
        max_num_batched_tokens=2048,
    )
    assert generates(result)["second"]["num_cached_tokens"] == 0
    assert lab.chunks == []
    assert "prefix caching is off" in log_of(result)


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
        RESET,  # vLLM's own, where it was asked for
        {"embed": TEXT, "label": "two"},
        enable_prefix_caching=asked,
        **engine,
    )
    one, two = (s["values"] for s in result["steps"] if s.get("label") in ("one", "two"))
    assert one == two
    assert lab.chunks == []


@pytest.mark.slow
def test_what_a_processor_reads_is_of_the_checkpoint(lab):
    """An edited processor_config.json is another checkpoint."""
    checkpoint = odd.blip2(lab.path / "blip2")
    seen = {"prompt_token_ids": SEEN, "image": 0, "label": "seen"}

    def cached():
        return lab.cached(checkpoint, seen, options={"trust": ["media"]}, **IMAGES)

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
    assert lab.chunks == []


@pytest.mark.slow
def test_control_with_trusted_keys_another_image_under_the_same_name_is_served(lab):
    checkpoint = odd.blip2(lab.path / "blip2")
    for image, cached in ((0, 0), (1, 128)):
        step = {"prompt_token_ids": SEEN, "uuid": "img-1", "image": image, "label": "seen"}
        assert lab.cached(checkpoint, step, options={"trust": ["media"]}, **IMAGES) == cached


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
    changes = {"replace_after_load": [str(weights), str(new)]}
    result = start_engine(lab.request(checkpoint, text(), changes=changes)).wait()
    assert result["exit_code"] != 0
    assert "model.safetensors changed while the engine loaded it" in result["error"]
    assert lab.chunks == []
    # The control: with the user's word for it the engine starts, and stores.
    assert lab.engine(checkpoint, text(), options={"weights_id": "mine"}, changes=changes)
    assert lab.chunks


@pytest.mark.slow
def test_ranks_that_run_a_checkpoint_s_own_code_agree_and_see_it_edited(lab):
    checkpoint = odd.remote_code(lab.path / "remote")
    engine = {"trust_remote_code": True, "model_impl": "transformers", "tensor_parallel_size": 2}
    cached = []
    for scale in (1.0, 1.0, -3.0):
        odd.remote_code(checkpoint, scale)
        cached.append(generates(lab.engine(checkpoint, text(), env=TWO_RANKS, **engine))["text"])
    assert [each["num_cached_tokens"] for each in cached] == [0, 640, 0]
    assert cached[0]["tokens"] == cached[1]["tokens"] != cached[2]["tokens"]
    one, other = lab.identities
    assert without(one, "weights", "extra.code") == without(other, "weights", "extra.code") != one
