"""Real engines with several roots, or a root beside vLLM's own connector: tokens, files and metrics."""

from __future__ import annotations

import os
import pathlib

import engine_lab as lab
import pytest
from world import wait_for

from faults.disk import DiskFaults
from fskv.format import chunk_file

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
lab.needs_vllm()

LLAMA = lab.MODELS["llama"]
slow = pytest.mark.slow
CHANGES: dict[str, dict] = {"as_is": {}, "patient": {"patient": True}, "untold": {"untold": True}}


FAST, SLOW = "fast", "slow"
CPU_POOL = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": 64 << 20,
        "load_weight": 2,
        "name": "pool",
    },
}


def child(root: str, model: lab.Model, **options) -> dict:
    return lab.connector(root, **{**lab.options_for(model.name), **options})


def loads(step: dict) -> dict[str, float]:
    """Return by child how many requests were loaded from it, of a metrics step; without zeros."""
    return {
        m["labels"]["connector"]: m["value"]
        for m in step["metrics"]
        if m["name"] == "vllm:fskv_multi_loads" and m["value"]
    }


def names(root: str) -> set[str]:
    return {os.path.relpath(path, root) for path in lab.chunks(root)}


@pytest.fixture
def faults(roots, tmp_path, native_library) -> DiskFaults:
    """The faults of the first root's disk."""
    return DiskFaults(native_library("disk"), pathlib.Path(roots[0]), tmp_path / "faults")


def both(
    model: lab.Model,
    roots: tuple[str, str],
    fast: dict | None = None,
    slow: dict | None = None,
    **options,
) -> dict:
    """Return the usual configuration: the first root is worth twice the second."""
    return lab.multi(
        child(roots[0], model, name=FAST, load_weight=2.0, **(fast or {})),
        child(roots[1], model, name=SLOW, **(slow or {})),
        **options,
    )


def twice(model: lab.Model) -> list[dict]:
    """Return the steps that ask for the main prompt, and again when the engine has nothing of it."""
    main = model.main_prompt()
    first = [lab.generate(main, "cold"), *lab.SETTLE, lab.RESET]
    return [*first, lab.generate(main, "warm"), lab.METRICS]


def test_both_roots_get_every_chunk_and_damage_in_the_chosen_one_is_loaded_from_the_other(
    roots, tmp_path
):
    main = LLAMA.main_prompt()
    good = []

    def damage() -> None:
        good.append(lab.payloads(roots[0]))
        for path in lab.chunks(roots[0])[:3]:
            lab.DAMAGES[0].do(path, lab.DamageContext(roots[0]))

    talk = lab.Conversation(tmp_path)
    talk.say(lab.generate(main, "cold"), *lab.SETTLE, lab.RESET)
    talk.say(lab.generate(main, "warm"), lab.METRICS, lab.RESET)
    talk.meanwhile(damage)
    talk.say(lab.generate(main, "hurt"), *lab.SETTLE, lab.METRICS)
    result = talk.run(LLAMA, transfer=both(LLAMA, roots))
    done = lab.generates(result)
    for label in ("cold", "warm", "hurt"):
        assert done[label]["tokens"] == lab.main_tokens(LLAMA.name), label
    assert done["warm"]["num_cached_tokens"] == 1920
    assert names(roots[0]) == names(roots[1])
    assert len(names(roots[0])) == 15
    before, after = lab.metrics(result)
    assert loads(before) == {FAST: 1}
    assert loads(after) == {FAST: 2, SLOW: 1}, "the damaged one was tried, then the other"
    assert lab.counter(after, "multi_failed_loads", connector=FAST) == 1
    assert lab.counter(after, "load_failures", connector=FAST, reason="corrupt") == 3
    assert lab.counter(after, "load_failures", connector=SLOW) == 0
    assert lab.counter(after, "loaded_chunks", connector=SLOW) == 15
    # Each child's series are its own.
    for name in (FAST, SLOW):
        assert lab.counter(before, "stored_chunks", connector=name) == 15
    assert lab.counter(before, "loaded_chunks", connector=SLOW) == 0
    # Healed from what the other one had.
    assert lab.payloads(roots[0]) == good[0]
    lab.assert_sound(roots[0])


@slow
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "qwen3_next"])
def test_after_a_restart_either_root_serves_and_what_the_slow_one_had_comes_to_the_fast_one(
    name, roots
):
    model = lab.MODELS[name]
    main = model.main_prompt()
    cold = [lab.generate(main, "main"), *lab.SETTLE]
    warm = [lab.generate(main, "main"), *lab.SETTLE, {"metrics": True}]
    lab.run(lab.request(model, cold, transfer=both(model, roots)))
    everything = names(roots[0])
    assert everything
    assert names(roots[1]) == everything

    def restarted(expected: dict[str, float], **options: dict) -> None:
        transfer = both(model, roots, **options)
        result = lab.run(lab.request(model, warm, transfer=transfer))
        done = lab.generates(result)["main"]
        assert done["tokens"] == lab.main_tokens(name)
        assert done["num_cached_tokens"] >= 1280
        assert loads(lab.metrics(result)[0]) == expected

    restarted({FAST: 1})
    lab.remove(roots[0])
    untouched = lab.payloads(roots[1])
    restarted({SLOW: 1}, slow={"store": False})
    promoted = names(roots[0])
    # Of windows and states only the last ones are loaded, so only these are there to be stored again.
    assert promoted == everything if name == "llama" else promoted < everything
    lab.remove(roots[1])
    restarted({FAST: 1}, slow={"store": False})
    assert names(roots[1]) == set(), "this one is not stored to"
    assert names(roots[0]) <= set(untouched)
    for path, content in lab.payloads(roots[0]).items():
        # Blocks that slid out of a window are in no later store.
        if chunk_file.parse_header(pathlib.Path(roots[0], path).read_bytes()).first_block == 0:
            assert content == untouched[path]


@slow
def test_zeroed_files_of_the_chosen_root_change_the_tokens_so_they_are_what_was_loaded(roots):
    """The negative control of all that says "same tokens" here."""
    main = LLAMA.main_prompt()
    steps = [lab.generate(main, "main"), *lab.SETTLE]
    lab.run(lab.request(LLAMA, steps, transfer=both(LLAMA, roots)))
    lab.zero(lab.chunks(roots[0]))
    result = lab.run(lab.request(LLAMA, steps, transfer=both(LLAMA, roots)))
    assert lab.generates(result)["main"]["tokens"] != lab.main_tokens(LLAMA.name)


@slow
@pytest.mark.parametrize("variant", ["as_is", "patient"])
def test_a_root_that_does_not_answer_holds_nothing_up_unless_it_is_waited_for_as_vllm_does(
    variant, roots, tmp_path, faults
):
    """The root's own patience is a minute here: what bounds the wait is the connector above it."""
    main = LLAMA.main_prompt()
    transfer = both(LLAMA, roots, fast={"lookup_timeout_s": 60}, lookup_timeout_s=0.5)
    cold = [lab.generate(main, "main"), *lab.SETTLE]
    lab.run(lab.request(LLAMA, cold, transfer=transfer))
    done = tmp_path / "done"

    talk = lab.Conversation(tmp_path)
    talk.meanwhile(lambda: faults.set("open hang", "stat hang", "fstat hang"))
    talk.say(lab.generate(main, "hung"), {"touch_file": str(done)}, lab.METRICS)
    what = {"transfer": transfer, "env": faults.env(), "changes": CHANGES[variant]}
    engine = lab.start_engine(lab.request(LLAMA, talk.steps, **what), tmp_path / "engine")
    talk.go(engine)
    try:
        wait_for(lambda: faults.num_hanging > 0, 60)
        if variant == "as_is":
            wait_for(done.exists, 50)
        else:
            with pytest.raises(AssertionError):
                wait_for(done.exists, 10)
    finally:
        faults.clear()
    result = lab.good(engine.wait())
    hung = lab.generates(result)["hung"]
    assert hung["tokens"] == lab.main_tokens(LLAMA.name)
    assert hung["num_cached_tokens"] == 1920
    if variant == "as_is":
        counts = lab.metrics(result)[0]
        assert loads(counts) == {SLOW: 1}
        assert lab.counter(counts, "multi_given_up", connector=FAST) == 1


@slow
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_beside_vllms_own_cpu_pool_both_serve_and_both_have_metrics(name, root):
    model = lab.MODELS[name]
    transfer = lab.multi(CPU_POOL, child(root, model, name="disk"))
    what = lab.request(model, twice(model), transfer=transfer, changes={"cpu_pool": True})
    # The second is a new process: the pool is empty, the files are not.
    empty, full = lab.run(what), lab.run(what)
    for result in (empty, full):
        for label in ("cold", "warm"):
            assert lab.generates(result)[label]["tokens"] == lab.main_tokens(name), label
    assert lab.generates(empty)["cold"]["num_cached_tokens"] == 0
    assert loads(lab.metrics(empty)[0]) == {"pool": 1}
    assert loads(lab.metrics(full)[0]) == {"disk": 1, "pool": 1}, "promoted to the pool"
    for connector in ("pool", "disk"):
        (nbytes,) = (
            m["value"]
            for m in lab.metrics(full)[0]["metrics"]
            if m["name"] == "vllm:kv_offload_load_bytes" and m["labels"]["connector"] == connector
        )
        assert nbytes > 0


@slow
@pytest.mark.parametrize("variant", ["as_is", "untold"])
def test_a_load_of_one_child_never_gets_into_what_another_one_stores(
    variant, roots, tmp_path, faults
):
    """The fast root's stores wait behind a hung write while the slow one loads into their blocks."""
    main = LLAMA.main_prompt()
    other = LLAMA.tokens("another", LLAMA.prompt_tokens)
    # The other prompt in the slow root, nothing in the fast one.
    steps = [lab.generate(other, "other"), *lab.SETTLE]
    lab.run(lab.request(LLAMA, steps, transfer=child(roots[1], LLAMA)))

    hanging = []
    talk = lab.Conversation(tmp_path)
    talk.meanwhile(lambda: faults.set("write hang suffix=.part", "pwrite hang suffix=.part"))
    # Computed, so that both store it; its blocks are free when it has finished.
    talk.say(lab.generate(main, "main"), *lab.SETTLE)
    talk.meanwhile(lambda: hanging.append(faults.num_hanging))
    talk.say(lab.generate(other, "other"), lab.METRICS)
    talk.meanwhile(faults.clear)
    talk.say(*lab.SETTLE, *lab.SETTLE)
    result = talk.run(
        LLAMA,
        transfer=both(LLAMA, roots, fast={"load_deadline_s": 100.0, "io_threads": 1}),
        engine={"num_gpu_blocks_override": 20, "max_model_len": 2048},
        env=faults.env(),
        changes=CHANGES[variant],
    )
    done = lab.generates(result)
    assert done["main"]["tokens"] == lab.main_tokens(LLAMA.name)
    assert hanging[0] > 0
    assert loads(lab.metrics(result)[0]) == {SLOW: 1}
    assert done["other"]["num_cached_tokens"] == 1920
    stored, truth = lab.payloads(roots[0]), lab.payloads(roots[1])
    assert stored, "the fast root got nothing: the test shows nothing"
    assert len(truth) == 30
    lab.assert_sound(roots[0])
    wrong = [path for path, content in stored.items() if content != truth[path]]
    if variant == "untold":
        assert wrong, "the scenario does not provoke what it should"
    else:
        assert wrong == []


@slow
@lab.needs_two_cores
def test_tensor_parallel_ranks_tell_each_child_their_own_namespace(roots):
    model = lab.MODELS["llama_tp2"]
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", **model.env}
    steps = twice(model)
    plain = lab.generates(lab.run(lab.request(model, steps[:1], env=env)))
    result = lab.run(lab.request(model, steps, transfer=both(model, roots), env=env))
    done = lab.generates(result)
    assert done["cold"]["tokens"] == done["warm"]["tokens"] == plain["cold"]["tokens"]
    assert done["warm"]["num_cached_tokens"] > 0
    counts = lab.metrics(result)[0]
    assert loads(counts) == {FAST: 1}
    for name in (FAST, SLOW):
        assert lab.counter(counts, "stored_chunks", connector=name) == len(names(roots[0]))
    assert names(roots[0]) == names(roots[1])
