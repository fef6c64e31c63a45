"""KV events, as a router gets them: from a real engine, through vLLM's publisher, about files that exist."""

from __future__ import annotations

import os
import pathlib
import shutil
import tempfile
import threading
from collections import Counter
from dataclasses import dataclass, field

import engine_lab as lab
import pytest
import world
import xxhash
from world import wait_for

from faults.disk import DiskFaults

pytestmark = [*world.VLLM, pytest.mark.slow, pytest.mark.timeout(600)]
lab.needs_vllm()

MODEL = lab.MODELS["llama"]
CHUNK_TOKENS = (
    256  # two blocks of the engine: an event names two hashes, the file has the name of the last
)
NUM_CHUNKS = MODEL.prompt_tokens // CHUNK_TOKENS
# Files become visible late, so that an event which does not wait for them comes first.
SLOW_RENAME = "rename slow_ms=400 suffix=.kv"


def file_name(block_hash: bytes) -> str:
    return f"{xxhash.xxh3_128_hexdigest(block_hash)}.g0.kv"


@dataclass
class Router:
    """Subscribes as a router does, and looks for the file at the moment an event arrives."""

    root: str
    stored: list[tuple[str, bool, tuple[bytes, ...]]] = field(default_factory=list)
    removed: list[tuple[bytes, ...]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # of each event, how many it describes
    # Of `stored` and not of `removed` when vLLM said that all blocks are cleared: told again after that. What
    # is known to be gone by then is told as removed instead, and its next file is one more of `stored`.
    again: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        import zmq
        from msgspec.msgpack import Decoder
        from vllm.distributed.kv_events import KVEventBatch

        self._decoder = Decoder(type=KVEventBatch)
        self._forgotten: set[str] = set()
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

    def _known(self) -> set[str]:
        balance = Counter(name for name, _, _ in self.stored)
        balance.subtract(file_name(one) for hashes in self.removed for one in hashes)
        return {name for name, left in balance.items() if left > 0}

    def _listen(self) -> None:
        from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

        while not self._over.is_set():
            if not self._socket.poll(50):
                continue
            *_, payload = self._socket.recv_multipart()
            for event in self._decoder.decode(payload).events:
                if isinstance(event, AllBlocksCleared):
                    self._forgotten = self._known()
                if getattr(event, "medium", None) != "STORAGE":
                    continue  # of the engine's own cache
                hashes = tuple(event.block_hashes)
                if isinstance(event, BlockStored):
                    name = file_name(hashes[-1])
                    if name in self._forgotten:
                        self._forgotten.remove(name)
                        self.again.append(name)
                        continue
                    there = any(pathlib.Path(self.root).rglob(name))
                    self.stored.append((name, there, hashes))
                    self.tokens.append(len(event.token_ids))
                elif isinstance(event, BlockRemoved):
                    self.removed.append(hashes)
                    self._forgotten.difference_update(map(file_name, hashes))


@pytest.fixture
def router(root):
    listening = Router(root)
    yield listening
    listening.close()


def _what(root: str, router: Router, faults: DiskFaults, *, multiprocess: bool) -> dict:
    """Return an engine's options, with a disk on which files become visible late."""
    faults.set(SLOW_RENAME)
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": router.endpoint}
    options = {"hybrid_chunk_size": CHUNK_TOKENS, "self_describing_kv_events": True}
    return {
        "transfer": lab.connector(root, **options),
        "engine": {"kv_events_config": events},
        "env": {
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocess)),
            # Whole hashes, so that they can be held against names.
            "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",
            **faults.env(),
        },
        # No further request: an idle engine must publish what became of its last chunks.
        "flush": False,
    }


def _hashes(chunks: list) -> set[bytes]:
    return {block_hash for _, _, hashes in chunks for block_hash in hashes}


def test_a_router_hears_of_a_chunk_when_its_file_is_there_and_again_when_it_is_gone(
    root, router, tmp_path, faults
):
    main = MODEL.main_prompt()
    lost = []

    def lose_two() -> None:
        wait_for(lambda: len(router.stored) == NUM_CHUNKS, 60)
        lost.extend([router.stored[2], router.stored[4]])
        for path in lab.chunks(root):
            if os.path.basename(path) in {name for name, _, _ in lost}:
                os.unlink(path)

    talk = lab.Conversation(tmp_path)
    talk.say(lab.generate(main, "cold"))
    talk.meanwhile(lose_two)
    talk.say(lab.RESET, lab.generate(main, "lost"))
    talk.meanwhile(lambda: wait_for(lambda: len(router.stored) >= NUM_CHUNKS + 2, 60))
    talk.say(lab.RESET, lab.generate(main, "full"))
    result = talk.run(MODEL, **_what(root, router, faults, multiprocess=True))
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


def test_an_engine_that_announces_too_early_is_found_out(root, router, faults):
    """The negative control: what the test sees of this engine, it must not see of a right one."""
    steps = [lab.generate(MODEL.main_prompt(), "cold"), *lab.SETTLE]
    what = _what(root, router, faults, multiprocess=False)
    lab.run(lab.request(MODEL, steps, changes={"early_events": True}, **what))
    wait_for(lambda: len(router.stored) == NUM_CHUNKS)
    assert not all(there for _, there, _ in router.stored)
