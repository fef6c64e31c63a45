"""KV events, as a router gets them: from a real engine, through vLLM's publisher, about files that exist."""

from __future__ import annotations

import os
import pathlib
from collections import Counter

import engine_lab as lab
import pytest
import router_lab
import world
from places import LAB
from world import wait_for

from faults.disk import DiskFaults

pytestmark = [*world.VLLM, pytest.mark.slow, pytest.mark.timeout(600)]
lab.needs_vllm()

MODEL = lab.MODELS["llama"]
CHUNK_TOKENS = (
    256  # two blocks of the engine: an event names two hashes, the file has the name of the last
)
NUM_CHUNKS = MODEL.prompt_tokens // CHUNK_TOKENS
EARLY_EVENTS = str(LAB / "early_events.py")
# Files become visible late, so that an event which does not wait for them comes first.
SLOW_RENAME = "rename slow_ms=400 suffix=.kv"


root, router = router_lab.root, router_lab.router


def _request(
    root: str, router: router_lab.Router, steps: list, faults: DiskFaults, multiprocess: bool
):
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": router.endpoint}
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocess)),
        "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",  # whole hashes, so that they can be held against names
    }
    request = lab.request(
        MODEL,
        steps,
        transfer=lab.connector(
            root, hybrid_chunk_size=CHUNK_TOKENS, self_describing_kv_events=True
        ),
        engine={"kv_events_config": events},
        env={**env, **faults.env()},
    )
    # No further request: an idle engine must publish what became of its last chunks.
    return {**request, "flush": False}


def _hashes(chunks: list) -> set[bytes]:
    return {block_hash for _, _, hashes in chunks for block_hash in hashes}


def test_a_router_hears_of_a_chunk_when_its_file_is_there_and_again_when_it_is_gone(
    root, router, tmp_path, native_library
):
    faults = DiskFaults(native_library("disk"), pathlib.Path(root), tmp_path / "faults")
    faults.set(SLOW_RENAME)
    main = MODEL.main_prompt()
    talk = lab.Conversation(tmp_path)
    talk.say(lab.generate(main, "cold"))
    stored = talk.pause()
    talk.say({"reset_prefix_cache": True}, lab.generate(main, "lost"))
    again = talk.pause()
    talk.say({"reset_prefix_cache": True}, lab.generate(main, "full"))
    engine = lab.start_engine(
        _request(root, router, talk.steps, faults, multiprocess=True), str(tmp_path / "engine")
    )
    lost = []

    def lose_two() -> None:
        wait_for(lambda: len(router.stored) == NUM_CHUNKS, 60)
        lost.extend([router.stored[2], router.stored[4]])
        for path in lab.chunks(root):
            if os.path.basename(path) in {name for name, _, _ in lost}:
                os.unlink(path)

    try:
        talk.resume(engine, stored, lose_two)
        talk.resume(
            engine, again, lambda: wait_for(lambda: len(router.stored) >= NUM_CHUNKS + 2, 60)
        )
        result = engine.wait(lab.ENGINE_TIMEOUT_S)
    finally:
        engine.kill()
    assert result["exit_code"] == 0, result.get("error")
    assert faults.fired() > 0

    assert all(there for _, there, _ in router.stored), "announced before the file was visible"
    assert set(router.tokens) == {CHUNK_TOKENS}
    first, second = router.stored[:NUM_CHUNKS], router.stored[NUM_CHUNKS:]
    assert {name for name, _, _ in first} == {os.path.basename(p) for p in lab.chunks(root)}
    assert len(_hashes(first)) == NUM_CHUNKS * 2, "each once, both blocks"
    removed = [block_hash for hashes in router.removed for block_hash in hashes]
    assert len(removed) == 4
    assert set(removed) == _hashes(lost), "the same hashes that were announced"
    assert _hashes(second) == _hashes(lost), "stored again, announced again"
    assert len(second) == 2, "and no other"
    assert lab.generates(result)["full"]["num_cached_tokens"] == NUM_CHUNKS * CHUNK_TOKENS
    # Each of two resets made the router forget the disk, too. What was known to be lost was not said again.
    again, gone = Counter(router.again), {name for name, _, _ in lost}
    assert again.keys() == {name for name, _, _ in first}
    assert all(again[name] == 2 or (name in gone and again[name] == 1) for name in again)


def test_an_engine_that_announces_too_early_is_found_out(root, router, tmp_path, native_library):
    faults = DiskFaults(native_library("disk"), pathlib.Path(root), tmp_path / "faults")
    faults.set(SLOW_RENAME)
    steps = [lab.generate(MODEL.main_prompt(), "cold"), *lab.SETTLE]
    request = _request(root, router, steps, faults, multiprocess=False)
    lab.run(request, program=EARLY_EVENTS)
    wait_for(lambda: len(router.stored) == NUM_CHUNKS)
    assert not all(there for _, there, _ in router.stored)
