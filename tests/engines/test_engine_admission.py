"""Real engines that store what comes twice: what is loaded is right, and more of it in a small room."""

from __future__ import annotations

import pathlib
import random

import engine_lab as lab
import pytest
import world

pytestmark = [*world.VLLM, pytest.mark.timeout(900)]
lab.needs_vllm()

RESET = {"reset_prefix_cache": True}
HYBRIDS = ("gpt_oss", "qwen3_next")


def ask(name: str, prompt: str, label: str) -> dict:
    model = lab.MODELS[name]
    return lab.generate(model.tokens(prompt, model.prompt_tokens), label)


def engine(name: str, root: pathlib.Path, steps: list, **options) -> dict:
    model = lab.MODELS[name]
    options = {"weights_fixed": True, **lab.options_for(name), **options}
    transfer = lab.connector(str(root), **options)
    return lab.run(lab.request(model, steps, transfer=transfer, env=dict(model.env)))


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(hybrid, marks=pytest.mark.slow) for hybrid in HYBRIDS)]
)
def test_what_was_sent_twice_is_stored_and_loaded_and_the_rest_is_not(name, tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    steps = [ask(name, "once", "once"), ask(name, "twice", "first"), RESET]
    steps += [ask(name, "twice", "second"), *lab.SETTLE, {"metrics": True}]
    result = engine(name, root, steps, admission="reused")
    done, (counted,) = lab.generates(result), lab.metrics(result)
    assert done["second"]["num_cached_tokens"] == 0
    stored = lab.counter(counted, "stored_chunks")
    assert stored == len(lab.chunks(str(root))) > 0
    assert lab.counter(counted, "not_admitted_chunks") > stored
    assert lab.counter(counted, "not_admitted_bytes") > 0
    assert lab.counter(counted, "stores_at_first_sight") == 0
    lab.assert_sound(str(root))
    # Another engine: a sight outlives the one that had it.
    steps = [ask(name, "twice", "warm"), ask(name, "once", "again"), *lab.SETTLE, RESET]
    steps += [ask(name, "once", "stored")]
    again = lab.generates(engine(name, root, steps, admission="reused"))
    assert again["warm"]["num_cached_tokens"] >= lab.MODELS[name].prompt_tokens // 2
    assert again["warm"]["tokens"] == done["first"]["tokens"] == done["second"]["tokens"]
    assert again["again"]["num_cached_tokens"] == 0
    assert again["stored"]["num_cached_tokens"] > 0
    assert again["stored"]["tokens"] == done["once"]["tokens"]


@pytest.mark.slow
def test_two_engines_in_a_small_room_load_more_and_write_less_with_auto(tmp_path):
    """Prompts that come back stand between others; the room has a tenth of all chunks."""
    loaded, written, computed = {}, {}, {}
    for mode in ("all", "auto"):
        root = tmp_path / mode
        root.mkdir()
        runs = [_start(number, mode, root) for number in range(2)]
        results = [one.wait(lab.ENGINE_TIMEOUT_S) for one in runs]
        assert all(one["exit_code"] == 0 for one in results)
        steps = [one["steps"][-1] for one in results]
        loaded[mode] = sum(lab.counter(step, "loaded_tokens") for step in steps)
        written[mode] = sum(lab.counter(step, "stored_bytes") for step in steps)
        computed[mode] = [lab.generates(one) for one in results]
        lab.assert_sound(str(root))
    print(f"loaded {loaded}, written {written}")
    for one, other in zip(computed["all"], computed["auto"], strict=True):
        assert {k: v["tokens"] for k, v in one.items()} == {
            k: v["tokens"] for k, v in other.items()
        }
    assert loaded["auto"] > loaded["all"]
    assert written["auto"] < written["all"] / 2


_PROMPTS, _COME_BACK, _PART = 320, 40, 10
_TOKENS, _FILE_NBYTES = 512, (128 + 4) << 10


def _start(number: int, mode: str, root: pathlib.Path) -> lab.Engine:
    model, source, steps, prompts = lab.MODELS["llama"], random.Random(number), [], set()
    for at in range(_PROMPTS):
        comes_back = source.random() < 0.4
        prompt = f"comes back {source.randrange(_COME_BACK)}" if comes_back else f"{number} {at}"
        prompts.add(prompt)
        steps += [RESET, lab.generate(model.tokens(prompt, _TOKENS), str(at)), {"sleep": 0.15}]
    chunks = 2 * len(prompts) * _TOKENS // lab.CHUNK_TOKENS["llama"]
    options = {"max_bytes": chunks // _PART * _FILE_NBYTES, "keep_free": 0, "admission": mode}
    options |= {"weights_fixed": True, **lab.options_for("llama")}
    transfer = lab.connector(str(root), **options)
    return lab.start_engine(
        lab.request(model, [*steps, *lab.SETTLE, {"metrics": True}], transfer=transfer)
    )
