"""How an engine in a process of its own ends, as behind `vllm serve`: stopped by vLLM, or killed."""

from __future__ import annotations

import json
import pathlib

import engine_lab as lab
import pytest
import world
from world import wait_for

from fskv.bounds.shared_files import SharedFiles

pytestmark = [*world.VLLM, pytest.mark.timeout(600)]
lab.needs_vllm()

MODEL = lab.MODELS["llama"]
CHUNK_TOKENS = 128
CHUNKS = MODEL.prompt_tokens // CHUNK_TOKENS


@pytest.mark.slow
@pytest.mark.parametrize("timeout_s", [0, 60])
def test_an_engine_that_is_stopped_has_ended_and_with_time_stores_its_last_chunks(
    root, tmp_path, faults, timeout_s
):
    """With vLLM's default of 0 s the engine gets SIGTERM and at once SIGKILL, with all its descendants."""
    # So slow that an engine which is ended at once cannot have stored all of them.
    faults.set("rename slow_ms=1500 suffix=.kv")
    health = tmp_path / "health.json"
    options = {"hybrid_chunk_size": CHUNK_TOKENS, "health_file": str(health)}
    what = lab.request(
        MODEL,
        [lab.generate(MODEL.main_prompt(), "last"), {"shutdown": timeout_s}],
        transfer=lab.connector(root, **options),
        engine={"shutdown_timeout": timeout_s},
        env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1", **faults.env()},
        flush=False,
    )
    lab.run(what)
    wait_for(lambda: health.exists() and json.loads(health.read_text())["state"] == "ended", 20)
    shared = f"{root}/.fskv-maintenance"
    wait_for(lambda: not pathlib.Path(shared, "lease.json").exists(), 20)
    assert SharedFiles(shared).heartbeats() == []
    stored = len(lab.chunks(root))
    if timeout_s:
        assert (stored, faults.fired()) == (CHUNKS, CHUNKS)
    else:
        assert stored < CHUNKS, "the control: it would have been done in time"
