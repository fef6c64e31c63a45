"""Real engines with KV that fskv does not know: they start, answer, store and load nothing, and say why."""

from __future__ import annotations

import json
import os

import engine_lab as lab
import pytest
from places import LAB

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
lab.needs_vllm()

LLAMA = lab.MODELS["llama"]
NO_IMPL = "has no attribute 'impl'"


def asked_twice(strange, transfer, **engine):
    """Ask an engine for one prompt, and again once it has nothing of it; return its result and its log."""
    main = LLAMA.main_prompt()
    steps = [
        *(lab.generate(main, "first"), *lab.SETTLE, {"reset_prefix_cache": True}),
        *(lab.generate(main, "again"), {"metrics": True}),
    ]
    changes = {strange: True} if strange else {}
    result = lab.run(lab.request(LLAMA, steps, transfer=transfer, changes=changes, **engine))
    done = lab.generates(result)
    wanted = lab.main_tokens("llama")
    assert [done[label]["tokens"] for label in ("first", "again")] == [wanted, wanted]
    assert done["again"]["num_cached_tokens"] == 0
    return result, lab.log_of(result)


def lines(log):
    return [line for line in log.splitlines() if "event=kv_unknown" in line]


def test_an_engine_with_a_layer_that_does_not_tell_starts_and_rests(root, tmp_path):
    health = tmp_path / "health.json"
    transfer = lab.connector(root, **lab.options_for("llama"), health_file=str(health))
    result, log = asked_twice("without_impl", transfer)
    assert lab.chunks(root) == []
    (line,) = lines(log)
    assert "model.layers.1." in line
    assert NO_IMPL in line
    assert "fskv neither loads nor stores" in line
    (shown,) = lab.metrics(result)
    assert lab.counter(shown, "off") == 1
    assert lab.counter(shown, "stored_chunks") == 0
    told = json.loads(health.read_text())
    assert told["conditions"] == ["kv_unknown"]
    # The control: the same engine with layers that tell stores.
    other = str(tmp_path / "other")
    assert lab.counter(*lab.metrics(lab.stored("llama", other)), "off") == 0
    assert lab.chunks(other)


@pytest.mark.slow
@lab.needs_two_cores
def test_one_rank_that_does_not_know_its_kv_has_both_rest(root):
    env = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", **lab.TWO_RANKS}
    env["PYTHONPATH"] = f"{LAB}:{os.environ.get('PYTHONPATH', '')}"
    engine = {"tensor_parallel_size": 2, "worker_cls": "workers.StrangeWorker"}
    transfer = lab.connector(root, **lab.options_for("llama"))
    result, log = asked_twice("", transfer, engine=engine, env=env)
    assert lab.chunks(root) == []
    assert len(lines(log)) == 1
    (shown,) = lab.metrics(result)
    assert lab.counter(shown, "off") == 1


@pytest.mark.slow
def test_an_engine_with_kv_of_a_new_kind_starts_and_rests(root, tmp_path):
    health = tmp_path / "health.json"
    result, log = asked_twice("new_kind", lab.connector(root, health_file=str(health)))
    assert lab.chunks(root) == []
    (line,) = lines(log)
    assert "fskv does not know how its KV is covered" in line
    (shown,) = lab.metrics(result)
    assert lab.counter(shown, "off") == 1
    assert json.loads(health.read_text())["conditions"] == ["kv_unknown"]


@pytest.mark.slow
@pytest.mark.parametrize("strange", ["without_impl", "new_kind"])
def test_all_children_of_a_multi_connector_rest(strange, roots):
    options = lab.options_for("llama")
    transfer = lab.multi(
        *(lab.connector(root, name=os.path.basename(root), **options) for root in roots)
    )
    result, log = asked_twice(strange, transfer)
    assert [lab.chunks(root) for root in roots] == [[], []]
    assert len(lines(log)) == len(roots)
    (shown,) = lab.metrics(result)
    assert lab.counter(shown, "off") == len(roots)
