"""A router that subscribes to a real engine's KV events, and the root whose files they are about."""

from __future__ import annotations

import pathlib
import shutil
import tempfile
import threading
from collections import Counter
from dataclasses import dataclass, field

import pytest
import xxhash


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
def root(tmp_path) -> str:
    (tmp_path / "root").mkdir()
    return str(tmp_path / "root")


@pytest.fixture
def router(root):
    listening = Router(root)
    yield listening
    listening.close()
