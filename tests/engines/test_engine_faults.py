"""Real engines while the root misbehaves: no wrong token, no crash, no wait beyond the deadline."""

from __future__ import annotations

import json
import os
import shutil

import engine_lab as lab
import pytest
from world import wait_for

from trials.soak_judge import bad_lines

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
lab.needs_vllm()

MODEL = lab.MODELS["llama"]
HYBRID = lab.MODELS["gpt_oss"]
DEADLINE_S = 2.0


@pytest.fixture(scope="module")
def reference() -> dict:
    return lab.reference(MODEL.name)


@pytest.fixture(
    scope="module", params=[MODEL.name, pytest.param(HYBRID.name, marks=pytest.mark.slow)]
)
def case(request) -> tuple[lab.Model, dict]:
    """A full-attention and a hybrid model, each with its reference."""
    return lab.MODELS[request.param], lab.reference(request.param)


def _transfer(root: str, **options: object) -> dict:
    usual = {"hybrid_chunk_size": 128, "load_deadline_s": DEADLINE_S}
    return lab.connector(root, **{**usual, **options})


def test_reads_that_never_return_cost_one_deadline_then_nothing(case, root, tmp_path, faults):
    """Then reads that fail at once: after 8 of them the root is left alone, until it is found back."""
    model, reference = case
    main, reset, wait = model.main_prompt(), lab.RESET, {"sleep": 1.5}
    # The breaker lets one operation through every `probe_s`; give it the time to see the root again.
    probe = {"sleep": 3.0}
    lab.stored(model.name, root, hybrid_chunk_size=128)
    fired = []

    def end_faults() -> None:
        fired.append(faults.fired())
        faults.clear()

    talk = lab.Conversation(tmp_path)
    talk.say(lab.generate(main, "warm"), reset)
    talk.meanwhile(lambda: faults.set("pread hang suffix=.kv"))
    talk.say(lab.generate(main, "hung"), reset, lab.generate(main, "hung_again"), reset)
    talk.say(lab.METRICS)
    talk.meanwhile(end_faults)
    talk.say(probe, lab.generate(main, "back"), reset, probe, lab.generate(main, "full"), reset)
    talk.say(lab.METRICS)
    talk.meanwhile(lambda: faults.set("pread EIO suffix=.kv"))
    # Longer than its chunks are in quarantine, and sooner than the next operation is let through.
    talk.say(lab.generate(main, "failed"), reset, wait)
    talk.say(lab.generate(main, "failed_again"), reset, lab.generate(main, "left_alone"), reset)
    talk.say(lab.METRICS)
    talk.meanwhile(end_faults)
    talk.say(probe, lab.generate(main, "closed"), reset, probe, lab.generate(main, "healed"), reset)
    talk.say(lab.METRICS)
    changes = {"constants": {"quarantine_s": 1, "probe_s": 2.5}}
    result = talk.run(model, transfer=_transfer(root), env=faults.env(), changes=changes)
    done = lab.generates(result)
    for label in done.keys() - {"settle"}:
        assert done[label]["tokens"] == reference["main"]["tokens"], label
    full = done["warm"]["num_cached_tokens"]
    assert full > 0
    assert done["full"]["num_cached_tokens"] == done["healed"]["num_cached_tokens"] == full
    for label in ("hung", "failed", "failed_again", "left_alone"):
        assert done[label]["num_cached_tokens"] == 0, label
    assert min(fired) > 0
    # A generous bound against a hang, not a measurement: the wait is one deadline, then the breaker.
    assert done["hung"]["wall_s"] < DEADLINE_S + 20
    assert done["hung_again"]["wall_s"] < DEADLINE_S + 20
    hung, back, failed, healed = lab.metrics(result)
    assert lab.counter(hung, "load_failures", reason="timed_out") > 0
    assert lab.counter(hung, "io_threads_hung") > 0
    assert lab.counter(back, "io_threads_hung") == 0, "hung threads came back and were counted off"
    assert lab.counter(failed, "load_failures", reason="io_error") > 0
    for what in ("stores_skipped", "lookup_misses"):
        before, after = (lab.counter(seen, what, reason="breaker") for seen in (back, failed))
        assert after > before, what
    assert lab.counter(failed, "breaker_openings") > lab.counter(back, "breaker_openings")
    assert lab.counter(healed, "breaker_open") == 0


@pytest.mark.parametrize("failures", [8, pytest.param(1_000_000, id="negative_control")])
def test_after_eight_failures_in_a_row_the_root_is_left_alone(
    failures, reference, root, tmp_path, faults
):
    lab.stored(MODEL.name, root, hybrid_chunk_size=128)
    reset, main = lab.RESET, MODEL.main_prompt()
    # The default number; one thread, so that no other read is under way when the last one of them fails.
    other = {} if failures == 8 else {"failures": failures}
    health = tmp_path / "health.json"
    transfer = _transfer(root, health_file=str(health), io_threads=1, lookup_timeout_s=10)
    opens = failures == 8

    def read_health() -> bool:
        return json.loads(health.read_text())["conditions"] == ["breaker_open"] * opens

    talk = lab.Conversation(tmp_path)
    talk.say(lab.generate(main, "failed"), *lab.SETTLE, reset, {"sleep": 1.5}, lab.METRICS)
    talk.say(lab.generate(main, "again"), *lab.SETTLE, reset)
    talk.say(lab.generate(MODEL.tokens("unseen", 1100), "unseen"), *lab.SETTLE, lab.METRICS)
    talk.meanwhile(lambda: wait_for(read_health))
    faults.set("pread EIO suffix=.kv")
    changes = {"constants": {"quarantine_s": 1, "probe_s": 600, **other}}
    result = talk.run(MODEL, transfer=transfer, env=faults.env(), changes=changes)
    done = lab.generates(result)
    assert done["failed"]["tokens"] == done["again"]["tokens"] == reference["main"]["tokens"]
    assert faults.fired() > 0
    failed, unseen = lab.metrics(result)
    assert lab.counter(failed, "load_failures", reason="io_error") > 8
    log = lab.log_of(result)
    assert ('of="rank 0" reason="8 failures in a row, the last: io_error"' in log) == opens
    assert (lab.counter(failed, "stores_skipped", reason="breaker") > 0) == opens
    assert (lab.counter(failed, "stored_chunks") == 0) == opens
    assert (lab.counter(unseen, "lookup_misses", reason="breaker") > 0) == opens
    met = [lab.counter(seen, "load_failures", reason="io_error") for seen in (failed, unseen)]
    assert (met[0] == met[1]) == opens, "no file was tried again"
    assert (lab.counter(unseen, "stored_chunks") == 0) == opens
    assert lab.counter(unseen, "breaker_open") == opens


def test_root_removed_while_running_is_neither_missed_nor_made_again(case, root, tmp_path):
    model, reference = case
    away = f"{root}-away"
    main = model.main_prompt()
    seen = []

    def bring_back() -> None:
        seen.append(os.path.exists(root))
        os.rename(away, root)

    talk = lab.Conversation(tmp_path)
    talk.say(lab.generate(main, "cold"), lab.RESET)
    talk.meanwhile(lambda: os.rename(root, away))
    talk.say(lab.generate(main, "gone"), lab.RESET)
    talk.say(lab.generate(model.partial_prompt(), "partial"), lab.RESET, lab.METRICS)
    talk.meanwhile(bring_back)
    talk.say({"sleep": 1.5}, lab.generate(main, "back"), lab.RESET)
    talk.say({"sleep": 1.5}, lab.generate(main, "full"))
    changes = {"constants": {"quarantine_s": 1, "negative_ttl_s": 1, "probe_s": 0.5}}
    result = talk.run(model, transfer=_transfer(root), changes=changes)
    done = lab.generates(result)
    assert seen == [False], "a mount point without its mount must not be filled"
    (counted,) = lab.metrics(result)
    assert lab.counter(counted, "load_failures") + lab.counter(counted, "stores_skipped") > 0
    assert done["partial"]["tokens"] == reference["partial"]["tokens"]
    for label in ("cold", "gone", "back", "full"):
        assert done[label]["tokens"] == reference["main"]["tokens"], label
    assert done["gone"]["num_cached_tokens"] == 0
    assert done["full"]["num_cached_tokens"] > 0
    lab.assert_sound(root)


def test_full_device_stores_nothing_and_stops_nothing(case, root, small_disk):
    model, reference = case
    small_disk(root, "512k")
    main = model.main_prompt()
    steps = [lab.generate(main, "cold"), lab.METRICS, lab.RESET, lab.generate(main, "again")]
    # With maintenance stores are refused before the device is full: test_engine_capacity.py.
    transfer = _transfer(root, maintenance="off")
    result = lab.run(lab.request(model, steps, transfer=transfer))
    done = lab.generates(result)
    assert done["cold"]["tokens"] == done["again"]["tokens"] == reference["main"]["tokens"]
    assert lab.counter(result["steps"][1], "stores_skipped", reason="no_space") > 0
    assert 0 < len(lab.chunks(root)) < 15, "what fitted was stored"
    lab.assert_sound(root)


def test_two_engines_writing_the_same_prompts_leave_one_good_file_per_chunk(
    reference, root, tmp_path
):
    main, partial = MODEL.main_prompt(), MODEL.partial_prompt()
    talks = [lab.Conversation(tmp_path / f"talk{number}") for number in range(2)]
    both = [talk.directory / "0.reached" for talk in talks]
    engines = []
    for talk in talks:
        talk.meanwhile(lambda: wait_for(lambda: all(path.exists() for path in both), 120))
        talk.say(lab.generate(main, "main"), lab.generate(partial, "partial"), lab.METRICS)
        request = lab.request(MODEL, talk.steps, transfer=_transfer(root))
        engines.append(lab.start_engine(request, talk.directory / "engine"))
    for talk, engine in zip(talks, engines, strict=True):
        talk.go(engine)
    for engine in engines:
        result = lab.good(engine.wait())
        done = lab.generates(result)
        assert done["main"]["tokens"] == reference["main"]["tokens"]
        assert done["partial"]["tokens"] == reference["partial"]["tokens"]
        assert lab.counter(result["steps"][-1], "load_failures") == 0
        assert bad_lines(result["log_path"]) == []
        assert "store failed" not in lab.log_of(result)
    lab.assert_sound(root)
    # 15 chunks of the main prompt; the partial one shares its first 8 and brings 7 of its own.
    assert len(lab.chunks(root)) == 22


@pytest.mark.slow
@lab.needs_two_cores
def test_tensor_parallel_ranks_store_and_load_their_own_files(reference, root, tmp_path):
    two = {"engine": {"tensor_parallel_size": 2}}
    two["env"] = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", **lab.TWO_RANKS}
    steps = [lab.generate(MODEL.main_prompt(), "main")]
    plain = lab.generates(lab.run(lab.request(MODEL, steps, **two)))
    cold = lab.run(lab.request(MODEL, steps, transfer=_transfer(root), **two))
    assert lab.generates(cold)["main"]["tokens"] == plain["main"]["tokens"]
    files = lab.chunks(root)
    assert {path.rsplit(".", 2)[1] for path in files} == {"r0", "r1"}
    assert len(files) == 30

    victim = next(path for path in files if path.endswith(".r1.kv"))
    talk = lab.Conversation(tmp_path)
    talk.say({**steps[0], "label": "load"}, lab.RESET)
    talk.meanwhile(lambda: os.truncate(victim, 5000))
    talk.say({**steps[0], "label": "one_rank_lost"}, *lab.SETTLE, lab.RESET)
    talk.say({**steps[0], "label": "healed"}, lab.METRICS)
    result = talk.run(MODEL, transfer=_transfer(root), **two)
    done = lab.generates(result)
    for label in ("load", "one_rank_lost", "healed"):
        assert done[label]["tokens"] == plain["main"]["tokens"], label
    assert done["load"]["num_cached_tokens"] == done["healed"]["num_cached_tokens"] > 0
    assert done["one_rank_lost"]["num_cached_tokens"] < done["load"]["num_cached_tokens"]
    assert lab.counter(result["steps"][-1], "load_failures", reason="corrupt") == 1
    lab.assert_sound(root)
    # One rank has other pages: it must not take a part for the whole.
    alone = lab.generates(lab.run(lab.request(MODEL, steps, transfer=_transfer(root))))
    assert alone["main"]["num_cached_tokens"] == 0


def _reset_scenario(mode: str, root: str, *how: str) -> dict:
    return lab.scenario("reset_scenario.py", mode, lab.checkpoint(HYBRID.name), root, *how)


@pytest.fixture(scope="module")
def reset_reference() -> list[int]:
    return _reset_scenario("reference", "-")["tokens"]


@pytest.mark.parametrize("guard", [(), ("unguarded",)], ids=["guarded", "negative_control"])
def test_a_connector_reset_while_requests_run_stores_no_foreign_kv(guard, reset_reference, root):
    """Blocks that slid out of a window hold another request's KV by then; vLLM offers them again."""
    _reset_scenario("store", root, "wipe", "vouch", *guard)
    loaded = _reset_scenario("load", root)
    assert loaded["cached"] > 0, "nothing was loaded: equal tokens show nothing"
    assert (loaded["tokens"] == reset_reference) is not bool(guard)


def test_after_a_connector_reset_nothing_is_loaded_unless_the_user_vouches_for_the_weights(root):
    doubtful = _reset_scenario("store", root)
    assert doubtful["cached"] == 0
    assert "vLLM's prefix cache was not reset since" in doubtful["log"]


@pytest.mark.parametrize("guard", [(), ("unguarded",)], ids=["guarded", "negative_control"])
@pytest.mark.parametrize(
    "how",
    [
        (),
        ("raw_sleep",),
        pytest.param(("two_ranks",), marks=[pytest.mark.slow, lab.needs_two_cores]),
    ],
)
def test_an_engine_in_process_that_gives_its_kv_up_stores_no_other_bytes_of_what_waited(
    how, guard, root
):
    """It waits for nothing: stores are queued and deferred when its pages get other bytes."""
    words = (lab.checkpoint(MODEL.name), root, *how, *guard)
    env = lab.TWO_RANKS if "two_ranks" in how else {}
    answer = lab.scenario("given_up_scenario.py", *words, env=env)
    assert answer["queued"] > 0
    assert answer["deferred"] > 0
    if guard:
        # Of both kinds; one that a thread had gathered just before is good.
        either = max(answer["queued"], answer["deferred"])
        assert answer["foreign"] > either, "the scenario does not provoke what it should"
        return
    assert answer["foreign"] == 0
    if how != ("raw_sleep",):  # that is noticed in time to copy some
        assert answer["files"] == 0
        assert answer["computed"]["cached"] == 0
    assert answer["loaded"]["cached"] > 0, (
        "nothing was stored afterwards: equal tokens show nothing"
    )
    assert answer["loaded"]["tokens"] == answer["computed"]["tokens"]
    lab.assert_sound(root)


# --- identity: what must not be shared, and what must ---------------------------------------

_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 12345.0}}
# What an engine is started with else: arguments of vLLM, options of fskv, environment. Weights: other bytes.
_CHANGES: dict[str, dict] = {
    "dtype": {"engine": {"dtype": "bfloat16"}},
    "tenant": {"options": {"tenant": "somebody else"}},
    "weights": {},
    "hash seed": {"env": {"PYTHONHASHSEED": "7"}},
    "block size": {"engine": {"block_size": 64}},
    "rope": {"engine": {"hf_overrides": _ROPE}},
    "hash algorithm": {"engine": {"prefix_caching_hash_algo": "sha256_cbor"}},
    "kv cache dtype": {"engine": {"kv_cache_dtype": "fp8_e5m2"}},
    "chunk size": {"options": {"hybrid_chunk_size": 256}},
    "weights id": {"options": {"weights_id": "another name"}},
}
_SOME = ("dtype", "tenant", "weights")


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(_SOME, id="some"),
        pytest.param(
            tuple(name for name in _CHANGES if name not in _SOME),
            marks=pytest.mark.slow,
            id="the others",
        ),
    ],
)
def test_a_changed_setting_gives_another_namespace_and_the_same_settings_share(
    changes, reference, root, tmp_path
):
    main = MODEL.main_prompt()
    lab.stored(MODEL.name, root)
    number = len(lab.identities(root))
    assert number == 1
    untouched = lab.snapshot(root)

    moved, changed = (tmp_path / name / "llama" for name in ("elsewhere", "other"))
    for directory in (moved, changed):
        shutil.copytree(lab.checkpoint("llama"), directory)
    weights = next(changed.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-4] + bytes(4))

    refused = {}
    for name in changes:
        how = _CHANGES[name]
        request = lab.request(
            MODEL,
            [lab.generate(main, "main")],
            transfer=_transfer(root, **how.get("options", {})),
            path=str(changed) if name == "weights" else None,
            engine=how.get("engine"),
            env=how.get("env"),
        )
        result = lab.start_engine(request).wait()
        if result["exit_code"] != 0:
            refused[name] = result["error"]
            continue
        assert lab.generates(result)["main"]["num_cached_tokens"] == 0, name
        number += 1
        assert len(lab.identities(root)) == number, f"{name} did not get a namespace of its own"
    assert not set(refused) - {"kv cache dtype"}, refused  # not every CPU engine takes fp8
    assert untouched.items() <= lab.snapshot(root).items()

    # The same checkpoint at another path, in a new process: shares.
    same = lab.run(
        lab.request(MODEL, [lab.generate(main, "main")], path=str(moved), transfer=_transfer(root))
    )
    assert lab.generates(same)["main"]["num_cached_tokens"] > 0
    assert lab.generates(same)["main"]["tokens"] == reference["main"]["tokens"]


# --- configuration that cannot work ---------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rooot": "/x"}, ["'rooot'", "unknown", "did you mean 'root'?"]),
        ({"root": "{missing}"}, ["'root'", "{missing}", "does not exist"]),
    ],
)
def test_bad_configuration_is_one_sentence_at_start_up(options, words, root, tmp_path):
    transfer = lab.connector(root)
    missing = tmp_path / "missing"
    for name, value in options.items():
        made = value.format(missing=missing) if isinstance(value, str) else value
        transfer["kv_connector_extra_config"][name] = made
    result = lab.start_engine(lab.request(MODEL, [], transfer=transfer)).wait()
    assert result["exit_code"] == 1
    assert not missing.exists(), "a root is never made"
    log = lab.log_of(result)
    sentences = [line for line in log.splitlines() if "fskv: " in line and "ERROR" in line]
    assert sentences, log[-2000:]
    assert "Starting to load model" not in log, "it was known before"
    for word in words:
        assert word.format(missing=missing) in sentences[0]
        assert word.format(missing=missing) in result["error"]


def test_policy_fail_is_named_and_replaced_so_that_damage_never_fails_a_request(
    reference, root, tmp_path
):
    main = MODEL.main_prompt()

    def hurt() -> None:
        wait_for(lambda: lab.chunks(root), 60)
        os.truncate(lab.chunks(root)[0], 0)

    talk = lab.Conversation(tmp_path)
    talk.say(lab.generate(main, "cold"), lab.RESET)
    talk.meanwhile(hurt)
    talk.say(lab.generate(main, "hurt"))
    result = talk.run(MODEL, transfer={**_transfer(root), "kv_load_failure_policy": "fail"})
    assert lab.generates(result)["hurt"]["tokens"] == reference["main"]["tokens"]
    log = lab.log_of(result)
    assert "option 'kv_load_failure_policy': found \"fail\"" in log
