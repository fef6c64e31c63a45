"""Real engines while the root misbehaves: no wrong token, no crash, no wait beyond the deadline."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess

import engine_lab as lab
import pytest
from places import LAB
from world import wait_for

import fskv
from faults.disk import DiskFaults

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
lab.needs_vllm()

MODEL = lab.MODELS["llama"]
HYBRID = lab.MODELS["gpt_oss"]
DEADLINE_S = 2.0
RESET_SCENARIO = str(LAB / "reset_scenario.py")
GIVEN_UP_SCENARIO = str(LAB / "given_up_scenario.py")


@pytest.fixture(scope="module")
def reference() -> dict:
    return lab.reference(MODEL.name)


@pytest.fixture(
    scope="module", params=[MODEL.name, pytest.param(HYBRID.name, marks=pytest.mark.slow)]
)
def case(request) -> tuple[lab.Model, dict]:
    """A full-attention and a hybrid model, each with its reference."""
    return lab.MODELS[request.param], lab.reference(request.param)


def _root(tmp_path: pathlib.Path) -> str:
    root = tmp_path / "root"
    root.mkdir()
    return str(root)


def _transfer(root: str, **options: object) -> dict:
    return lab.connector(
        root,
        hybrid_chunk_size=128,
        load_deadline_s=DEADLINE_S,
        **options,
    )


def test_reads_that_never_return_cost_one_deadline_then_nothing(case, tmp_path, native_library):
    """Then reads that fail at once: after 8 of them the root is left alone, until it is found back."""
    model, reference = case
    root = _root(tmp_path)
    faults = DiskFaults(native_library("disk"), pathlib.Path(root), tmp_path / "faults")
    main, reset, wait = model.main_prompt(), {"reset_prefix_cache": True}, {"sleep": 1.5}
    # The breaker lets one operation through every `probe_s`; give it the time to see the root again.
    probe = {"sleep": 3.0}
    lab.stored(model.name, root, hybrid_chunk_size=128)
    talk = lab.Conversation(tmp_path)
    talk.say(lab.generate(main, "warm"), reset)
    hang = talk.pause()
    talk.say(lab.generate(main, "hung"), reset, lab.generate(main, "hung_again"), reset)
    talk.say({"metrics": True})
    clear = talk.pause()
    talk.say(probe, lab.generate(main, "back"), reset, probe, lab.generate(main, "full"), reset)
    talk.say({"metrics": True})
    fail = talk.pause()
    # Longer than its chunks are in quarantine, and sooner than the next operation is let through.
    talk.say(lab.generate(main, "failed"), reset, wait)
    talk.say(lab.generate(main, "failed_again"), reset, lab.generate(main, "left_alone"), reset)
    talk.say({"metrics": True})
    clear_again = talk.pause()
    talk.say(probe, lab.generate(main, "closed"), reset, probe, lab.generate(main, "healed"), reset)
    talk.say({"metrics": True})
    engine = lab.start_engine(
        lab.request(
            model,
            talk.steps,
            transfer=_transfer(root),
            env=faults.env(),
        ),
        tmp_path / "engine",
        **lab.quick(quarantine_s=1, probe_s=2.5),
    )
    talk.resume(engine, hang, lambda: faults.set("pread hang suffix=.kv"))
    fired = []

    def end_faults() -> None:
        fired.append(faults.fired())
        faults.clear()

    talk.resume(engine, clear, end_faults)
    talk.resume(engine, fail, lambda: faults.set("pread EIO suffix=.kv"))
    talk.resume(engine, clear_again, end_faults)
    result = engine.wait()
    assert result["exit_code"] == 0, result.get("error")
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
    failures, reference, tmp_path, native_library
):
    root = _root(tmp_path)
    faults = DiskFaults(native_library("disk"), pathlib.Path(root), tmp_path / "faults")
    lab.stored(MODEL.name, root, hybrid_chunk_size=128)
    reset, main = {"reset_prefix_cache": True}, MODEL.main_prompt()
    talk = lab.Conversation(tmp_path)
    talk.say(lab.generate(main, "failed"), *lab.SETTLE, reset, {"sleep": 1.5}, {"metrics": True})
    talk.say(lab.generate(main, "again"), *lab.SETTLE, reset)
    talk.say(lab.generate(MODEL.tokens("unseen", 1100), "unseen"), *lab.SETTLE, {"metrics": True})
    look = talk.pause()
    # The default number; one thread, so that no other read is under way when the last one of them fails.
    other = {} if failures == 8 else {"failures": failures}
    health = tmp_path / "health.json"
    transfer = _transfer(root, health_file=str(health), io_threads=1)
    faults.set("pread EIO suffix=.kv")
    engine = lab.start_engine(
        lab.request(MODEL, talk.steps, transfer=transfer, env=faults.env()),
        tmp_path / "engine",
        **lab.quick(quarantine_s=1, probe_s=600, **other),
    )
    opens, said = failures == 8, []

    def read_health() -> bool:
        said.append(json.loads(health.read_text()))
        return said[-1]["conditions"] == ["breaker_open"] * opens

    talk.resume(engine, look, lambda: wait_for(read_health))
    result = engine.wait()
    assert result["exit_code"] == 0, result.get("error")
    done = lab.generates(result)
    assert done["failed"]["tokens"] == done["again"]["tokens"] == reference["main"]["tokens"]
    assert faults.fired() > 0
    failed, unseen = lab.metrics(result)
    assert lab.counter(failed, "load_failures", reason="io_error") > 8
    log = pathlib.Path(result["log_path"]).read_text()
    assert ('of="rank 0" reason="8 failures in a row, the last: io_error"' in log) == opens
    assert (lab.counter(failed, "stores_skipped", reason="breaker") > 0) == opens
    assert (lab.counter(failed, "stored_chunks") == 0) == opens
    assert (lab.counter(unseen, "lookup_misses", reason="breaker") > 0) == opens
    met = [lab.counter(seen, "load_failures", reason="io_error") for seen in (failed, unseen)]
    assert (met[0] == met[1]) == opens, "no file was tried again"
    assert (lab.counter(unseen, "stored_chunks") == 0) == opens
    assert lab.counter(unseen, "breaker_open") == opens


def test_root_removed_while_running_is_neither_missed_nor_made_again(case, tmp_path):
    model, reference = case
    root = _root(tmp_path)
    away = f"{root}-away"
    main = model.main_prompt()
    talk = lab.Conversation(tmp_path)
    talk.say(lab.generate(main, "cold"), {"reset_prefix_cache": True})
    gone = talk.pause()
    talk.say(lab.generate(main, "gone"), {"reset_prefix_cache": True})
    talk.say(lab.generate(model.partial_prompt(), "partial"), {"reset_prefix_cache": True})
    talk.say({"metrics": True})
    back = talk.pause()
    talk.say({"sleep": 1.5}, lab.generate(main, "back"), {"reset_prefix_cache": True})
    talk.say({"sleep": 1.5}, lab.generate(main, "full"))
    engine = lab.start_engine(
        lab.request(model, talk.steps, transfer=_transfer(root)),
        str(tmp_path / "engine"),
        **lab.quick(quarantine_s=1, negative_ttl_s=1, probe_s=0.5),
    )
    seen = []
    talk.resume(engine, gone, lambda: os.rename(root, away))

    def bring_back() -> None:
        seen.append(os.path.exists(root))
        os.rename(away, root)

    talk.resume(engine, back, bring_back)
    result = engine.wait(lab.ENGINE_TIMEOUT_S)
    assert result["exit_code"] == 0, result.get("error")
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


def test_full_device_stores_nothing_and_stops_nothing(case, tmp_path):
    model, reference = case
    root = _root(tmp_path)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", root], capture_output=True
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        main = model.main_prompt()
        steps = [
            lab.generate(main, "cold"),
            {"metrics": True},
            {"reset_prefix_cache": True},
            lab.generate(main, "again"),
        ]
        # With maintenance stores are refused before the device is full: test_engine_capacity.py.
        transfer = _transfer(root, maintenance="off")
        result = lab.run(lab.request(model, steps, transfer=transfer))
        done = lab.generates(result)
        assert done["cold"]["tokens"] == done["again"]["tokens"] == reference["main"]["tokens"]
        assert lab.counter(result["steps"][1], "stores_skipped", reason="no_space") > 0
        assert 0 < len(lab.chunks(root)) < 15, "what fitted was stored"
        lab.assert_sound(root)
    finally:
        subprocess.run(["umount", root], check=True)


def complaints(log: str) -> list[str]:
    """Return what fskv says of errors, and the lines of tracebacks that go through it."""
    ours = f'File "{pathlib.Path(fskv.__file__).parent}{os.sep}'  # the tree may be called so, too
    return [
        line
        for line in log.splitlines()
        if ours in line or ("fskv: " in line and " ERROR " in line)
    ]


def test_what_is_taken_for_a_complaint_is_one_of_ours():
    """The negative control of the next test, and what it must not take for one."""
    package = pathlib.Path(fskv.__file__).parent
    assert complaints(f'  File "{package}/engines/vllm_worker.py", line 1, in poll')
    assert complaints("(EngineCore pid=1) ERROR 11-22 13:59:02 [vllm_worker.py:1] fskv: no")
    assert not complaints(f'  File "{package.parent}/.venv/lib/vllm/renderers/base.py", line 217')
    assert not complaints("(EngineCore pid=1) INFO 11-22 13:59:02 [vllm_worker.py:1] fskv: yes")


def test_two_engines_writing_the_same_prompts_leave_one_good_file_per_chunk(reference, tmp_path):
    root = _root(tmp_path)
    main, partial = MODEL.main_prompt(), MODEL.partial_prompt()
    started = []
    for number in range(2):
        talk = lab.Conversation(tmp_path / f"talk{number}")
        (tmp_path / f"talk{number}").mkdir()
        pause = talk.pause()
        talk.say(lab.generate(main, "main"), lab.generate(partial, "partial"), {"metrics": True})
        engine = lab.start_engine(
            lab.request(MODEL, talk.steps, transfer=_transfer(root)), str(tmp_path / f"e{number}")
        )
        started.append((talk, pause, engine))
    both = [(tmp_path / f"talk{n}" / "0.reached") for n in range(2)]

    def wait_for_both() -> None:
        import time

        end = time.monotonic() + 120
        while not all(path.exists() for path in both) and time.monotonic() < end:
            time.sleep(0.02)

    for talk, pause, engine in started:
        talk.resume(engine, pause, wait_for_both)
    for _, _, engine in started:
        result = engine.wait(lab.ENGINE_TIMEOUT_S)
        assert result["exit_code"] == 0, result.get("error")
        done = lab.generates(result)
        assert done["main"]["tokens"] == reference["main"]["tokens"]
        assert done["partial"]["tokens"] == reference["partial"]["tokens"]
        assert lab.counter(result["steps"][-1], "load_failures") == 0
        log = pathlib.Path(result["log_path"]).read_text()
        assert complaints(log) == []
        assert "store failed" not in log
    lab.assert_sound(root)
    # 15 chunks of the main prompt; the partial one shares its first 8 and brings 7 of its own.
    assert len(lab.chunks(root)) == 22


@pytest.mark.slow
def test_tensor_parallel_ranks_store_and_load_their_own_files(reference, tmp_path):
    root = _root(tmp_path)
    main = MODEL.main_prompt()
    engine = {"tensor_parallel_size": 2}
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    if (os.cpu_count() or 1) < 2:
        pytest.skip("two ranks need two cores")
    steps = [lab.generate(main, "main")]
    plain = lab.generates(lab.run(lab.request(MODEL, steps, engine=engine, env=env)))
    cold = lab.run(lab.request(MODEL, steps, engine=engine, env=env, transfer=_transfer(root)))
    assert lab.generates(cold)["main"]["tokens"] == plain["main"]["tokens"]
    files = lab.chunks(root)
    assert {path.rsplit(".", 2)[1] for path in files} == {"r0", "r1"}
    assert len(files) == 30

    talk = lab.Conversation(tmp_path)
    talk.say(lab.generate(main, "load"), {"reset_prefix_cache": True})
    pause = talk.pause()
    talk.say(lab.generate(main, "one_rank_lost"), *lab.SETTLE, {"reset_prefix_cache": True})
    talk.say(lab.generate(main, "healed"), {"metrics": True})
    running = lab.start_engine(
        lab.request(MODEL, talk.steps, engine=engine, env=env, transfer=_transfer(root)),
        str(tmp_path / "engine"),
    )
    victim = next(path for path in files if path.endswith(".r1.kv"))
    talk.resume(running, pause, lambda: os.truncate(victim, 5000))
    result = running.wait(lab.ENGINE_TIMEOUT_S)
    assert result["exit_code"] == 0, result.get("error")
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
    said = lab.run_program(RESET_SCENARIO, mode, lab.checkpoint(HYBRID.name), root, *how)
    (answer,) = [line for line in said.splitlines() if line.startswith('{"tokens"')]
    return json.loads(answer) | {"log": said}


@pytest.fixture(scope="module")
def reset_reference(tmp_path_factory) -> list[int]:
    return _reset_scenario("reference", _root(tmp_path_factory.mktemp("reset")))["tokens"]


@pytest.mark.parametrize("guard", [(), ("unguarded",)], ids=["guarded", "negative_control"])
def test_a_connector_reset_while_requests_run_stores_no_foreign_kv(
    guard, reset_reference, tmp_path
):
    """Blocks that slid out of a window hold another request's KV by then; vLLM offers them again."""
    root = _root(tmp_path)
    _reset_scenario("store", root, "wipe", "vouch", *guard)
    loaded = _reset_scenario("load", root)
    if guard:
        assert loaded["cached"] > 0
        assert loaded["tokens"] != reset_reference, "the scenario does not provoke what it should"
    else:
        assert loaded["cached"] > 0, "nothing was loaded: equal tokens show nothing"
        assert loaded["tokens"] == reset_reference


def test_after_a_connector_reset_nothing_is_loaded_unless_the_user_vouches_for_the_weights(
    tmp_path,
):
    root = _root(tmp_path)
    doubtful = _reset_scenario("store", root)
    assert doubtful["cached"] == 0
    assert "option 'weights_fixed'" in doubtful["log"]


@pytest.mark.parametrize("guard", [(), ("unguarded",)], ids=["guarded", "negative_control"])
@pytest.mark.parametrize("ranks", [(), pytest.param(("two_ranks",), marks=pytest.mark.slow)])
def test_an_engine_in_process_that_gives_its_kv_up_stores_nothing_of_what_waited(
    ranks, guard, tmp_path
):
    """It waits for nothing: stores are queued and deferred when its pages get other bytes."""
    root = _root(tmp_path)
    env = {}
    if ranks:
        if (os.cpu_count() or 1) < 2:
            pytest.skip("two ranks need two cores")
        env["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"
    command = (GIVEN_UP_SCENARIO, lab.checkpoint(MODEL.name), root, *ranks, *guard)
    said = lab.run_program(*command, env=env)
    (line,) = [line for line in said.splitlines() if line.startswith('{"queued"')]
    answer = json.loads(line)
    assert answer["queued"] > 0
    assert answer["deferred"] > 0
    if guard:
        # Of both kinds; one that a thread had gathered just before is good.
        either = max(answer["queued"], answer["deferred"])
        assert answer["foreign"] > either, "the scenario does not provoke what it should"
        return
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
    changes, reference, tmp_path
):
    root = _root(tmp_path)
    main = MODEL.main_prompt()
    lab.stored(MODEL.name, root)
    namespaces = {str(p.parent) for p in pathlib.Path(root).rglob("namespace.json")}
    assert len(namespaces) == 1
    untouched = lab.snapshot(root)

    changed = str(tmp_path / "other" / "llama")
    shutil.copytree(lab.checkpoint("llama"), changed)
    weights = next(pathlib.Path(changed).glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-4:] = b"\0\0\0\0"
    weights.write_bytes(content)
    moved = str(tmp_path / "elsewhere" / "llama")
    shutil.copytree(lab.checkpoint("llama"), moved)

    refused = {}
    for name in changes:
        how = _CHANGES[name]
        transfer = _transfer(root)
        transfer["kv_connector_extra_config"] |= how.get("options", {})
        request = lab.request(
            MODEL,
            [lab.generate(main, "main")],
            transfer=transfer,
            path=changed if name == "weights" else None,
            engine=how.get("engine"),
            env=how.get("env"),
        )
        result = lab.run_engine(request)
        if result["exit_code"] != 0:
            refused[name] = result["error"]
            continue
        assert lab.generates(result)["main"]["num_cached_tokens"] == 0, name
        now = {str(p.parent) for p in pathlib.Path(root).rglob("namespace.json")}
        assert len(now) == len(namespaces) + 1, f"{name} did not get a namespace of its own"
        namespaces = now
    assert not set(refused) - {"kv cache dtype"}, refused  # not every CPU engine takes fp8
    assert {
        path: content for path, content in lab.snapshot(root).items() if path in untouched
    } == untouched

    # The same checkpoint at another path, in a new process: shares.
    same = lab.run(
        lab.request(MODEL, [lab.generate(main, "main")], path=moved, transfer=_transfer(root))
    )
    assert lab.generates(same)["main"]["num_cached_tokens"] > 0
    assert lab.generates(same)["main"]["tokens"] == reference["main"]["tokens"]


@pytest.mark.slow
def test_another_sliding_window_is_another_namespace(tmp_path):
    root = _root(tmp_path)
    steps = [lab.generate(HYBRID.main_prompt(), "main")]
    lab.run(lab.request(HYBRID, steps, transfer=_transfer(root)))
    wider = {"hf_overrides": {"sliding_window": 256}}
    other = lab.run(lab.request(HYBRID, steps, engine=wider, transfer=_transfer(root)))
    assert lab.generates(other)["main"]["num_cached_tokens"] == 0
    assert len(list(pathlib.Path(root).rglob("namespace.json"))) == 2


# --- configuration that cannot work ---------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rooot": "/x"}, ["'rooot'", "unknown", "did you mean 'root'?"]),
        ({"root": "{missing}"}, ["'root'", "{missing}", "does not exist"]),
        pytest.param(
            {"staging_bytes": "10 parsecs"},
            ["'staging_bytes'", "10 parsecs", "256MiB"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"sync_load_budget_bytes": 1 << 20},
            ["'sync_load_budget_bytes'", "1048576", "0"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_bad_configuration_is_one_sentence_at_start_up(options, words, tmp_path):
    transfer = lab.connector(_root(tmp_path))
    missing = tmp_path / "missing"
    for name, value in options.items():
        made = value.format(missing=missing) if isinstance(value, str) else value
        transfer["kv_connector_extra_config"][name] = made
    result = lab.run_engine(lab.request(MODEL, [], transfer=transfer), directory=tmp_path / "e")
    assert result["exit_code"] == 1
    assert not missing.exists(), "a root is never made"
    log = pathlib.Path(result["log_path"]).read_text()
    sentences = [line for line in log.splitlines() if "fskv: " in line and "ERROR" in line]
    assert sentences, log[-2000:]
    assert "Starting to load model" not in log, "it was known before"
    for word in words:
        assert word.format(missing=missing) in sentences[0]
        assert word.format(missing=missing) in result["error"]


def test_policy_fail_is_named_and_replaced_so_that_damage_never_fails_a_request(
    reference, tmp_path
):
    root = _root(tmp_path)
    main = MODEL.main_prompt()
    transfer = {**_transfer(root), "kv_load_failure_policy": "fail"}
    talk = lab.Conversation(tmp_path)
    talk.say(lab.generate(main, "cold"), {"reset_prefix_cache": True})
    pause = talk.pause()
    talk.say(lab.generate(main, "hurt"))
    engine = lab.start_engine(
        lab.request(MODEL, talk.steps, transfer=transfer), str(tmp_path / "engine")
    )

    def hurt() -> None:
        wait_for(lambda: lab.chunks(root), 60)
        os.truncate(lab.chunks(root)[0], 0)

    talk.resume(engine, pause, hurt)
    result = engine.wait(lab.ENGINE_TIMEOUT_S)
    assert result["exit_code"] == 0, result.get("error")
    assert lab.generates(result)["hurt"]["tokens"] == reference["main"]["tokens"]
    log = pathlib.Path(result["log_path"]).read_text()
    assert "option 'kv_load_failure_policy': found \"fail\"" in log
