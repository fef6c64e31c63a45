"""A store on real files without an engine, and readers of what it writes that share no code with it."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgpack
import numpy as np
import places  # noqa: F401
import pytest
import xxhash

ROW = 65536
# For tests that import vLLM in their own process.
VLLM = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # vLLM and torch among themselves
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def read_by_hand(path):
    """Read a version-1 chunk file with struct, msgpack and xxhash alone; asserts every check."""
    data = Path(path).read_bytes()
    magic, version, header_nbytes, meta_nbytes, zero, checksum = struct.unpack_from(
        "<8sIIIIQ", data
    )
    assert (magic, version, zero) == (b"\x89FSKV\r\n\x1a", 1, 0)
    assert header_nbytes % 4096 == 0
    blank = data[:24] + bytes(8) + data[32:header_nbytes]
    assert xxhash.xxh3_64_intdigest(blank) == checksum
    meta = msgpack.unpackb(data[32 : 32 + meta_nbytes])
    assert not any(data[32 + meta_nbytes : header_nbytes])
    payload = data[header_nbytes:]
    assert len(payload) == meta["payload"]
    rows = [payload[at : at + ROW] for at in range(0, len(payload), ROW)]
    assert b"".join(xxhash.xxh3_64_digest(row) for row in rows) == meta["rows"]
    return SimpleNamespace(meta=meta, payload=payload, header_nbytes=header_nbytes)


def wait_for(condition, timeout_s=20.0):
    """Poll until `condition()` is true; the limit only bounds a hang."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


def state_of(pid):
    """Return the kernel's letter for a process: S while it waits, Z or X once it has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def has_ended(pid):
    return state_of(pid) in "ZX"


def returns_in_time(call, timeout_s=20.0):
    """Run `call` on a thread, so that a hang is a failure and not the end of the test run."""
    results, errors = [], []

    def run():
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    assert not thread.is_alive(), "the call hangs"
    if errors:
        raise errors[0]
    return results[0]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def open_files():
    """Return what this process has open: pairs of a descriptor and what it is."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        # Closed meanwhile, as that of this very listing.
        with contextlib.suppress(FileNotFoundError):
            found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
    return found


@contextlib.contextmanager
def leaves_nothing_open():
    """Assert that what is opened inside is closed again.

    What other tests left behind may be closed meanwhile, and threads of theirs open something for a moment.
    """
    before = open_files()
    yield
    wait_for(lambda: open_files() <= before)


class Clock:
    """A clock that stands still until told."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def advance(self, seconds):
        self.now += seconds


def make_identity(**changes):
    from fskv.namespace import GroupIdentity, Identity

    fields = {
        "engine": "vllm",
        "engine_version": "0.33",
        "arch": "cpu-x86_64",
        "model_name": "org/model",
        "weights": "commit:" + "a" * 40,
        "model_config": {},
        "kv_cache_dtype": "bfloat16",
        "model_dtype": "bfloat16",
        "kv_cache_layout": "HND",
        "attention_backend": "CPU",
        "tokens_per_hash": 16,
        "blocks_per_chunk": 4,
        "groups": (GroupIdentity(0, "full", None, 16, (40000, 24000), ("layers.0",)),),
        "hash_algorithm": "sha256",
        "hash_seed": "0",
        "topology": {"tp": 1},
    }
    return Identity(**{**fields, **changes})


def follow_links(monkeypatch):
    """The negative control: links lead out of the root."""
    from fskv.root import beneath

    monkeypatch.setattr(beneath, "_ONE", os.O_DIRECTORY | os.O_CLOEXEC)


class World:
    """KV tensors, a namespace on disk, and a store between them.

    `faults` is the transport's script; False: no FaultTransport at all. `make_transport` has the signature
    of HostTransport and stands for it if given. With native=True chunks are moved by fskv._native, and
    there is no FaultTransport either; else by the transport's methods.
    """

    # 4 blocks of 64000 bytes: 4 rows, and no block begins where a row does.
    PAGES = (40000, 24000)
    BLOCKS_PER_CHUNK = 4

    def __init__(
        self,
        root,
        *,
        faults=None,
        pages=PAGES,
        blocks_per_chunk=BLOCKS_PER_CHUNK,
        num_blocks=64,
        group_idx=0,
        rank=None,
        layout_digest=b"L" * 16,
        identity=None,
        direct_io="auto",
        fsync=False,
        touch_interval_s=600.0,
        make_transport=None,
        native=False,
        key_file=None,
    ):
        import torch

        from faults.transport import FaultTransport, Script
        from fskv.data_path.store import ChunkStore
        from fskv.data_path.transports.host import HostTransport
        from fskv.data_path.worker_keys import WorkerKeys
        from fskv.format.chunk_file import FileLayout
        from fskv.format.spans import GroupLayout
        from fskv.root.key_file import read_keys
        from fskv.root.root import Root

        self.root = str(root)
        os.makedirs(self.root, exist_ok=True)
        identity = identity or make_identity()
        if key_file is not None:
            identity = replace(identity, encryption=read_keys(str(key_file)).encryption)
        self.keys = WorkerKeys.of(None if key_file is None else str(key_file))
        self.directory = Root.open(self.root, create=True).open_namespace(identity)
        # Strided like an engine's: a block is wider than its page.
        self.tensors = [
            torch.zeros((num_blocks, page + 64), dtype=torch.int8)[:, :page] for page in pages
        ]
        self.group_idx, self.rank = group_idx, rank
        self.layout = GroupLayout.of(group_idx, blocks_per_chunk, list(enumerate(pages)))
        self.file_layout = FileLayout(
            blocks_per_chunk, tuple(pages), layout_digest, encrypted=key_file is not None
        )
        transport = (make_transport or HostTransport)(
            self.tensors,
            self.file_layout.file_nbytes,
            probe_dir=f"{self.directory.path}/tmp",
            direct_io=direct_io,
            fsync=fsync,
        )
        if not native:
            transport.native = replace(transport.native, pages=None)
        self.transport = (
            transport
            if faults is False or native
            else FaultTransport(transport, faults or Script())
        )
        self.store = ChunkStore(
            self.directory,
            {group_idx: self.file_layout},
            self.transport,
            touch_interval_s=touch_interval_s,
            restore=lambda: Root.open(self.root, create=False).open_namespace(identity),
            keys=self.keys,
        )

    # --- names ------------------------------------------------------------------------------

    def chunk(self, number):
        from fskv.types import FileId

        return FileId(number.to_bytes(32, "big"), self.group_idx, self.rank)

    def path(self, number):
        return self.store.path(self.chunk(number))

    def parts(self):
        return [
            name
            for _, _, names in os.walk(self.directory.path)
            for name in names
            if name.endswith(".part")
        ]

    def chunk_files(self):
        return sorted(
            os.path.join(where, name)
            for where, _, names in os.walk(f"{self.directory.path}/chunks")
            for name in names
            if not name.endswith(".part")
        )

    # --- pages ------------------------------------------------------------------------------

    def fill(self, block_ids, seed):
        """Write a pattern into the pages of these blocks and return it, as a chunk's content."""
        import torch

        random = np.random.default_rng(seed)
        content = b""
        for block_id in block_ids:
            for tensor in self.tensors:
                page = random.integers(-128, 128, tensor.shape[1], np.int8)
                tensor[block_id] = torch.from_numpy(page)
                content += page.tobytes()
        return content

    def pages(self, block_ids):
        """Return the bytes of these blocks' pages, in the order of a chunk's content."""
        return b"".join(t[b].numpy().tobytes() for b in block_ids for t in self.tensors)

    def request(self, number, block_ids, first_block=0):
        from fskv.data_path.job import FileMove
        from fskv.format.spans import plan_job

        (plan,) = plan_job(
            [self.layout],
            [tensor.stride(0) for tensor in self.tensors],
            [1],
            list(block_ids),
            [len(block_ids)],
            [first_block],
        ).chunks
        return FileMove(self.chunk(number), plan)

    # --- the store without jobs ---------------------------------------------------------------

    @property
    def base(self):
        return self.file_layout.header_nbytes

    def put(self, number, content, first_block=0):
        """Put a chunk whose blocks from `first_block` on are `content`, in a slot full of old bytes."""
        slot = self.transport.new_slot(0)
        slot.array[:] = 0xEE
        at = self.base + first_block * self.file_layout.block_nbytes
        slot.array[at : at + len(content)] = np.frombuffer(content, np.uint8)
        return self.store.put(self.chunk(number), first_block, slot)

    def get(self, number, first_block=0, num_blocks=None):
        """Return the status and, if it is good, the bytes of the wanted blocks."""
        slot = self.transport.new_slot(0)
        slot.array[:] = 0xDD
        count = self.file_layout.num_blocks - first_block if num_blocks is None else num_blocks
        status, old = self.store.get(self.chunk(number), first_block, count, slot)
        if old:
            self.store.touch(self.chunk(number))
        at = self.base + first_block * self.file_layout.block_nbytes
        found = bytes(slot.view[at : at + count * self.file_layout.block_nbytes])
        return status, found if status.good else None

    def content(self, seed=0, num_blocks=None):
        count = self.file_layout.num_blocks if num_blocks is None else num_blocks
        return np.random.default_rng(seed).bytes(count * self.file_layout.block_nbytes)


def damage(path, at, mask=0x01):
    """Flip bits of one byte of a file, in place."""
    with open(path, "r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ mask]))
