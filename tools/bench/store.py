"""Store and load of chunk files through a `Mover`, as an engine's worker has it.

After each load every byte is compared with what was stored, outside the timed part. A chunk that did not end
as OK, or a byte that differs, is an error and no rate. Timed is what an engine waits for, planning included.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fskv.config import StoreConfig
from fskv.data_path.job import FileMove
from fskv.errors import ConfigError
from fskv.format.chunk_file import FileLayout
from fskv.hybrid_planner import GroupLayout, plan_job
from fskv.observe import metrics
from fskv.offload.mover import Mover
from fskv.root.root import CHUNK_DIR, TMP_DIR, NamespaceDir
from fskv.types import ChunkId, FileId

from ..exits import CommandError

Way = tuple[Literal["host", "gds"], Literal["auto", "on", "off"]]  # transport and direct_io
WAYS: tuple[Way, ...] = (("host", "on"), ("host", "off"), ("gds", "auto"))
O_DIRECT, BUFFERED = "O_DIRECT", "buffered"
PAGE_NBYTES = 64 << 10
_SLOTS_PER_THREAD = 2
_TIMEOUT_S = 120.0
_POLL_S = 0.0005
_OK = ""  # in place of the reason of a failure


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, least and greatest of the rounds' values, ready for JSON."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


class KvMemory:
    """KV pages in host memory or on a GPU. Stores read the first half, loads fill the second."""

    def __init__(self, nbytes: int, *, on_cuda: bool) -> None:
        self.half = nbytes // PAGE_NBYTES  # in pages
        content = np.zeros((2 * self.half, PAGE_NBYTES), np.int8)
        content[: self.half].data.cast("B")[:] = np.random.default_rng(0).bytes(nbytes)
        self._memory: Any = content
        self._cuda: Any = None
        if on_cuda:
            import torch

            self._cuda = torch.cuda
            self._memory = torch.empty(content.shape, dtype=torch.int8, device="cuda")
            self._memory.copy_(torch.from_numpy(content))

    @property
    def pages(self) -> Any:
        """The KV memory, as a Mover takes it."""
        return self._memory if self._cuda else self._memory.data.cast("B")

    def clear(self) -> None:
        """Write zeros into the half that loads fill."""
        self._memory[self.half :] = 0
        if self._cuda:
            self._cuda.synchronize()

    def holds(self, num_pages: int) -> bool:
        """Return whether the first `num_pages` loaded pages equal the stored ones."""
        found = self._memory.cpu().numpy() if self._cuda else self._memory
        return np.array_equal(found[:num_pages], found[self.half : self.half + num_pages])


def file_layout(chunk_nbytes: int) -> FileLayout:
    """Return the layout of a bench's chunk files: pages of one tensor."""
    return FileLayout(chunk_nbytes // PAGE_NBYTES, (PAGE_NBYTES,), bytes(16))


def open_directory(path: str) -> NamespaceDir:
    """Make the directories of a namespace at `path`."""
    os.makedirs(os.path.join(path, TMP_DIR))
    os.mkdir(os.path.join(path, CHUNK_DIR))
    return NamespaceDir(path, b"bench" * 6, 0o700, 0o600)


def chunk_id(number: int) -> ChunkId:
    """Name a chunk by a hash, as an engine does, so that chunks spread over the directories."""
    return ChunkId(hashlib.sha256(b"%d" % number).digest(), 0)


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of chunks of one size by one path: GB/s (1e9 bytes) by median, min and max."""

    transport: str  # host or gds
    mode: str  # O_DIRECT or buffered
    threads: int
    chunk_nbytes: int
    num_chunks: int  # of a round
    store: dict[str, float]
    load: dict[str, float]


class Contestant:
    """One path to the disk, with one number of threads, for chunks of one size.

    It removes its files of a round.
    """

    def __init__(
        self,
        directory: NamespaceDir,
        memory: KvMemory,
        chunk_nbytes: int,
        num_chunks: int,
        *,
        threads: int,
        way: Way,
    ) -> None:
        """Raises ConfigError where that path cannot be used here, FskvError and OSError."""
        layout = file_layout(chunk_nbytes)
        transport, direct_io = way
        config = StoreConfig(
            root=directory.path,
            transport=transport,
            direct_io=direct_io,
            io_threads=threads,
            staging_bytes=_SLOTS_PER_THREAD * threads * layout.file_nbytes,
            load_deadline_s=_TIMEOUT_S,
        )
        self._mover = Mover(config, directory, [memory.pages], {0: layout}, patient=True)
        if transport == "gds" and not self._mover.description.startswith("GDS"):
            self._mover.close()
            raise ConfigError(self._mover.description)
        self.transport, self.mode = transport, BUFFERED if direct_io == "off" else O_DIRECT
        self.threads, self.chunk_nbytes, self.num_chunks = threads, chunk_nbytes, num_chunks
        self._memory = memory
        self._chunks = [chunk_id(number) for number in range(num_chunks)]
        self._files = [directory.chunk_path(one.key_hash, 0, None) for one in self._chunks]
        # The pages of a chunk lie scattered, as those of an engine do.
        self._pages = list(range(num_chunks * layout.num_blocks))
        random.Random(0).shuffle(self._pages)  # noqa: S311  reproducible, not secret
        self._group = GroupLayout.of(0, layout.num_blocks, [(0, PAGE_NBYTES)])
        self._job_ids = itertools.count(1)
        self._stores: list[float] = []
        self._loads: list[float] = []

    def take_part(self, *, counts: bool) -> None:
        """Store and load all chunks once; a round that does not count warms up.

        Raises CommandError, FskvError and OSError.
        """
        try:
            store = self._move("store", 0)
            if self.mode == BUFFERED:
                _drop_from_page_cache(self._files)
            self._memory.clear()
            load = self._move("load", self._memory.half)
            if not self._memory.holds(len(self._pages)):
                raise self._error("the loaded bytes differ from the stored ones")
        finally:
            for path in self._files:
                if os.path.lexists(path):
                    os.unlink(path)
        if counts:
            self._stores.append(store)
            self._loads.append(load)

    @property
    def rates(self) -> Rates:
        """The rates of the rounds that counted."""
        return Rates(
            *(self.transport, self.mode, self.threads, self.chunk_nbytes, self.num_chunks),
            *(spread(self._stores), spread(self._loads)),
        )

    def close(self) -> None:
        """Stop the threads; a transfer that has begun gets a moment to end."""
        self._mover.close()

    def _move(self, op: str, first_page: int) -> float:
        """Store or load all chunks, with the pages from that one on; returns GB/s."""
        start = time.perf_counter()
        blocks = [first_page + page for page in self._pages]
        counts = [self.num_chunks], blocks, [len(blocks)], [0]
        plan = plan_job([self._group], [PAGE_NBYTES], *counts)
        moves = [FileMove(FileId(*self._chunks[one.key_idx]), one) for one in plan.chunks]
        begin, good = self._mover.store, metrics.STORED_CHUNKS
        if op == "load":
            begin, good = self._mover.load, metrics.LOADED_CHUNKS
        begin(next(self._job_ids), moves)
        ended: Counter[str] = Counter()
        while ended.total() < self.num_chunks:
            self._mover.poll()
            for (metric, label), number in self._mover.counters.drain().items():
                if number and metric in (good, metrics.STORES_SKIPPED, metrics.LOAD_FAILURES):
                    ended[_OK if metric is good else label] += int(number)
            if time.perf_counter() > start + _TIMEOUT_S:
                raise self._error(f"{op}: chunks did not end in {_TIMEOUT_S:g} s")
            time.sleep(_POLL_S)
        self._mover.take_news()
        if bad := ended.keys() - {_OK}:
            raise self._error(f"{op}: {ended[min(bad)]} chunks ended as {min(bad)}")
        return self.num_chunks * self.chunk_nbytes / (time.perf_counter() - start) / 1e9

    def _error(self, text: str) -> CommandError:
        size = f"{self.chunk_nbytes >> 10} KiB"
        return CommandError(f"{self.transport} {self.mode}, {size}, {self.threads} threads: {text}")


def _drop_from_page_cache(paths: Sequence[str]) -> None:
    """Make the next buffered read of these files a cold one, as far as this machine's memory goes."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.fsync(fd)  # DONTNEED passes over dirty pages
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
