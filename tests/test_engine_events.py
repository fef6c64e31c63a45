"""KV events, as a router gets them: from a real engine, through vLLM's publisher, about files that exist."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field

import engine_lab as lab
import pytest
import xxhash
from conftest import wait_for
from disk_faults import DiskFaults

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # vLLM and torch among themselves
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
lab.needs_vllm()

MODEL = lab.MODELS["llama"]
CHUNK_TOKENS = (
    256  # two blocks of the engine: an event names two hashes, the file has the name of the last
)
NUM_CHUNKS = MODEL.prompt_tokens // CHUNK_TOKENS
EARLY_EVENTS = str(pathlib.Path(__file__).resolve().parent / "early_events.py")
# Files become visible late, so that an event which does not wait for them comes first.
SLOW_RENAME = "rename slow_ms=400 suffix=.kv"


def _file_name(block_hash: bytes) -> str:
    return f"{xxhash.xxh3_128_hexdigest(block_hash)}.g0.kv"


@dataclass
class Router:
    """Subscribes as a router does, and looks for the file at the moment an event arrives."""

    root: str
    stored: list[tuple[str, bool, tuple[bytes, ...]]] = field(default_factory=list)
    removed: list[tuple[bytes, ...]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # of each event, how many it describes

    def __post_init__(self) -> None:
        import zmq
        from msgspec.msgpack import Decoder
        from vllm.distributed.kv_events import KVEventBatch

        self._decoder = Decoder(type=KVEventBatch)
        self._directory = tempfile.mkdtemp(prefix="fskv-")  # short: ipc paths have 107 characters
        self.endpoint = f"ipc://{self._directory}/events"
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self._socket.connect(self.endpoint)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._socket.close(linger=0)
        shutil.rmtree(self._directory)

    def _listen(self) -> None:
        from vllm.distributed.kv_events import BlockRemoved, BlockStored

        while not self._over.is_set():
            if not self._socket.poll(50):
                continue
            *_, payload = self._socket.recv_multipart()
            for event in self._decoder.decode(payload).events:
                if getattr(event, "medium", None) != "STORAGE":
                    continue  # of the engine's own cache
                hashes = tuple(event.block_hashes)
                if isinstance(event, BlockStored):
                    name = _file_name(hashes[-1])
                    there = any(pathlib.Path(self.root).rglob(name))
                    self.stored.append((name, there, hashes))
                    self.tokens.append(len(event.token_ids))
                elif isinstance(event, BlockRemoved):
                    self.removed.append(hashes)


@pytest.fixture
def root(tmp_path) -> str:
    (tmp_path / "root").mkdir()
    return str(tmp_path / "root")


@pytest.fixture
def router(root):
    listening = Router(root)
    yield listening
    listening.close()


def _request(root: str, router: Router, steps: list, faults: DiskFaults, multiprocess: bool):
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
    faults = DiskFaults(native_library("disk_faults"), pathlib.Path(root), tmp_path / "faults")
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
            engine, again, lambda: wait_for(lambda: len(router.stored) == NUM_CHUNKS + 2, 60)
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
    assert lab.generates(result)["full"]["num_cached_tokens"] == NUM_CHUNKS * CHUNK_TOKENS


def test_an_engine_that_announces_too_early_is_found_out(root, router, tmp_path, native_library):
    faults = DiskFaults(native_library("disk_faults"), pathlib.Path(root), tmp_path / "faults")
    faults.set(SLOW_RENAME)
    steps = [lab.generate(MODEL.main_prompt(), "cold"), *lab.SETTLE]
    request = _request(root, router, steps, faults, multiprocess=False)
    (tmp_path / "request.json").write_text(json.dumps(request))
    done = subprocess.run(
        [sys.executable, EARLY_EVENTS, tmp_path / "request.json", tmp_path / "result.json"],
        env={**os.environ, **request["env"]},
        capture_output=True,
        text=True,
        timeout=lab.ENGINE_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    wait_for(lambda: len(router.stored) == NUM_CHUNKS)
    assert not all(there for _, there, _ in router.stored)
