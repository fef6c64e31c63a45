"""Real SGLang engines on a CPU with fskv behind their host cache: SmolLM2's real weights, greedy decoding."""

from __future__ import annotations

import functools
import pathlib
import shutil

import pytest
import sglang_lab as lab
from stored_files import DAMAGES, OTHER, PROMPT, chunk_files
from world import wait_for

pytest.importorskip("sglang", reason="SGLang has an environment of its own: make test-sglang")

from faults import files
from faults.disk import DiskFaults

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not lab.MODEL, reason="no model: make test-sglang"),
]

QUICK = {"module_path": "quick_sglang"}  # with constants for a test that cannot wait


def whole_pages(said) -> int:
    """Tokens of a prompt in whole pages, less the last page if nothing would be left to compute."""
    return (said["prompt_tokens"] - 1) // lab.PAGE_SIZE * lab.PAGE_SIZE


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A root that an engine has stored PROMPT in and left, with what it said; not to be changed."""
    directory = tmp_path_factory.mktemp("stored")
    root = directory / "kv"
    root.mkdir()
    with lab.Engine(directory / "log", **lab.storage(root)) as engine:
        said = engine.generate(PROMPT)
        engine(flush=True)
        assert len(chunk_files(root)) == whole_pages(said) // lab.PAGE_SIZE
        assert engine.close() == 0
    assert said["cached"] == 0
    return root, said


@pytest.fixture
def root(stored, tmp_path):
    return pathlib.Path(shutil.copytree(stored[0], tmp_path / "kv"))


def test_a_new_process_loads_what_another_one_stored_and_damage_is_computed(stored, root, tmp_path):
    """The control is at the end: zeros under right checksums are served, and change the text."""
    _, first = stored
    with lab.Engine(tmp_path / "log", **lab.storage(root, **QUICK)) as engine:
        said = engine.generate(PROMPT)
        assert said["text"] == first["text"]
        assert said["loaded"] == whole_pages(first)
        again = engine.again(PROMPT)
        assert (again["text"], again["loaded"]) == (said["text"], said["loaded"])
        sound = set(chunk_files(root))
        for what, damage in DAMAGES.items():
            damage(*sorted(sound)[2:4])
            hurt = engine.again(PROMPT)
            assert hurt["text"] == first["text"], what
            assert hurt["loaded"] < whole_pages(first), f"the fault was met: {what}"
            engine(flush=True)  # waits until it was stored again
            assert set(chunk_files(root)) == sound, what
            assert files.unsound([str(path) for path in sound]) == [], what
        healed = engine.again(PROMPT)
        assert (healed["text"], healed["loaded"]) == (said["text"], said["loaded"])
        for path in sound:
            files.zero_payload(str(path))
        control = engine.again(PROMPT)
        assert control["loaded"] == whole_pages(first)
        assert control["text"] != first["text"], "what is loaded is what decides"
        assert engine.close() == 0
    assert "Traceback" not in engine.log()


# --- the disk ---------------------------------------------------------------------------------


def test_a_disk_that_hangs_fails_fills_or_goes_costs_a_recompute(
    stored, root, tmp_path, native_library
):
    _, first = stored
    faults = DiskFaults(native_library("disk"), root, tmp_path / "faults")
    options = {**QUICK, "load_deadline_s": 3}
    with lab.Engine(
        tmp_path / "log", env=faults.env(), **lab.storage(root, maintenance="off", **options)
    ) as engine:
        good = engine.generate(PROMPT)
        assert (good["text"], good["loaded"]) == (first["text"], whole_pages(first)), "the control"
        for rule in ("pread hang suffix=.kv", "pread EIO suffix=.kv"):
            faults.set(rule)
            hurt = engine.again(PROMPT)
            assert faults.fired() > 0, rule
            faults.clear()
            assert (hurt["text"], hurt["loaded"]) == (first["text"], 0), rule
            # The breaker lets one operation through at a time, to see whether the root is back.
            wait_for(functools.partial(loads_all, engine, first), 200)
        faults.set("write ENOSPC", "pwrite ENOSPC")
        full = engine.generate(OTHER)
        engine(flush=True)
        assert faults.fired() > 0
        faults.clear()
        before = chunk_files(root)
        assert all(path.stat().st_size > 0 for path in before)
        root.rename(root.with_name("gone"))
        gone = engine.again(PROMPT)
        assert gone["text"] == first["text"]
        assert not root.exists()
        root.with_name("gone").rename(root)
        wait_for(functools.partial(loads_all, engine, first), 200)
        assert engine.again(OTHER)["text"] == full["text"]
        assert engine.close() == 0
    assert "Traceback" not in engine.log()


def loads_all(engine, said):
    found = engine.again(PROMPT)
    return (found["text"], found["loaded"]) == (said["text"], whole_pages(said))


def test_a_request_waits_for_storage_as_sglangs_policy_says(stored, root, tmp_path, native_library):
    """While the disk hangs; no text is wrong. The controls: `wait_complete`, and a disk that does not."""
    _, first = stored
    # A call gives up after 7 s, and a second more; `timeout` is well below that.
    waits = {"load_deadline_s": 7, "prefetch_timeout_base": 2, "prefetch_timeout_per_ki_token": 0}
    options = {**QUICK, **waits}
    first_s = {}
    for policy in ("wait_complete", "timeout", "best_effort"):
        faults = DiskFaults(native_library("disk"), root, tmp_path / f"faults-{policy}")
        with lab.Engine(
            tmp_path / policy,
            env=faults.env(),
            hicache_storage_prefetch_policy=policy,
            **lab.storage(root, maintenance="off", **options),
        ) as engine:
            other = engine.generate(OTHER)
            if policy == "best_effort":  # what is there when its turn comes: all, some or none
                found = [engine.again(PROMPT) for _ in range(3)]
                assert {said["text"] for said in found} == {first["text"]}
                assert all(said["loaded"] in range(whole_pages(first) + 1) for said in found)
            else:
                assert any(loads_all(engine, first) for _ in range(5)), f"the control: {policy}"
            engine(flush=True)
            faults.set("pread hang suffix=.kv")
            hurt = engine.generate(PROMPT)
            if policy != "best_effort":  # which may be done before anything is read
                assert faults.fired() > 0, policy
            faults.clear()
            assert (hurt["text"], hurt["loaded"]) == (first["text"], 0), policy
            first_s[policy] = hurt["first_s"]
            # Late bytes, if there are any, are in no page that is used.
            for _ in range(2):
                assert engine.again(OTHER)["text"] == other["text"], policy
                assert engine.again(PROMPT)["text"] == first["text"], policy
            if policy != "best_effort":
                # The breaker lets one operation through at a time, to see whether the root is back.
                wait_for(functools.partial(loads_all, engine, first), 200)
            assert engine.close() == 0
        assert "Traceback" not in engine.log(), policy
    assert first_s["wait_complete"] > 6, "it waited until fskv gave up"
    assert 2 < first_s["timeout"] < first_s["wait_complete"], first_s
    assert first_s["best_effort"] < first_s["wait_complete"], first_s


def test_sglangs_own_faults_change_no_text(root, stored, tmp_path):
    _, first = stored
    env = {
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.05",
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.4",
    }
    with lab.Engine(tmp_path / "log", env=env, **lab.storage(root)) as engine:
        found = [engine.again(PROMPT) for _ in range(6)]
        while not any(said["loaded"] for said in found) and len(found) < 30:  # it draws anew
            found.append(engine.again(PROMPT))
        assert {said["text"] for said in found} == {first["text"]}
        assert {said["loaded"] for said in found} - {0}, "the control: some of it was loaded"
        assert engine.close() == 0


# --- updates of the weights -------------------------------------------------------------------


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory):
    """A checkpoint of the same model whose first layer has other values."""
    from safetensors.torch import load_file, save_file

    path = pathlib.Path(shutil.copytree(lab.MODEL, tmp_path_factory.mktemp("other") / "model"))
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.self_attn.v_proj.weight"] *= -1
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def updated(engine, path):
    """Update the weights of an engine that does nothing, as SGLang then resets its caches."""
    engine(flush=True)
    return engine(update_weights=str(path)).get("updated", False)


def test_after_an_update_an_engine_stores_and_loads_apart_and_nothing_of_before(
    stored, root, tmp_path, other_weights
):
    """After one that failed it does neither. The weights of the start are an update like any other."""
    _, first = stored
    texts = set()
    with lab.Engine(tmp_path / "log", **lab.storage(root, **QUICK)) as engine:
        assert loads_all(engine, first), "the control"
        for weights in (other_weights, lab.MODEL):
            known = chunk_files(root)
            assert updated(engine, weights)
            said = engine.generate(PROMPT)
            assert said["loaded"] == 0
            texts.add(said["text"])
            wait_for(functools.partial(loads_all, engine, said), 60)
            assert set(known) < set(chunk_files(root))
            assert not updated(engine, tmp_path / "no checkpoint")
            known = chunk_files(root)
            for _ in range(2):
                again = engine.again(PROMPT)
                assert (again["text"], again["loaded"]) == (said["text"], 0)
            engine(flush=True)
            assert chunk_files(root) == known
        assert first["text"] in texts
        assert len(texts) == 2, "the weights decide"
        assert engine.close() == 0
    assert engine.log().count("event=weights_changed") == 2
    with lab.Engine(tmp_path / "next", **lab.storage(root)) as engine:
        assert loads_all(engine, first), "the start's namespace has nothing of other weights"


def test_negative_control_an_engine_that_heeds_no_update_serves_kv_of_old_weights(
    stored, root, tmp_path, other_weights
):
    with lab.Engine(tmp_path / "truth", model_path=str(other_weights)) as engine:
        truth = engine.generate(PROMPT)["text"]
    options = lab.storage(root, module_path="unguarded_sglang")
    with lab.Engine(tmp_path / "log", **options) as engine:
        assert updated(engine, other_weights)
        said = engine.again(PROMPT)
    assert said["loaded"] == whole_pages(said)
    assert said["text"] != truth
