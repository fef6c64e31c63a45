"""fskv as a contestant: a `Mover`, as an engine's worker has it.

A rate counts only when every byte of it was verified: after each load the pages are compared with what
was stored, outside the timed part; a chunk that did not end as OK, or a page that differs, puts the
contestant out. Timed is what an engine waits for, planning the spans included. Needs torch.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from fskv.config import StoreConfig
from fskv.data_path.job import FileMove
from fskv.errors import ConfigError
from fskv.format.chunk_file import FileLayout
from fskv.hybrid_planner import GroupLayout, plan_job
from fskv.observe import metrics
from fskv.offload.mover import Mover
from fskv.root.root import CHUNK_DIR, TMP_DIR, NamespaceDir
from fskv.types import ChunkId, FileId

from .contestant import (
    CLOSE_S,
    Cell,
    Contestant,
    RoundError,
    drop_from_page_cache,
    remove_all,
)
from .row import BUFFERED, O_DIRECT

REQUEST_CHUNKS = 64
_TIMEOUT_S = 120.0
_POLL_S = 0.0005
# A chunk of 512 KiB takes less than _POLL_S: a serial loop must not be measured by its waiting.
_SERIAL_POLL_S = 0.00002


@dataclass(frozen=True, slots=True)
class DataPath:
    """An open store with its threads, on a directory of its own; `name` says how its bytes travel."""

    name: str
    directory: NamespaceDir
    layout: FileLayout
    mover: Mover

    @property
    def is_direct(self) -> bool:
        return self.name.endswith(O_DIRECT)

    def chunk_path(self, chunk: ChunkId) -> str:
        return self.directory.chunk_path(chunk.key_hash, chunk.group_idx, None)

    def close(self) -> None:
        """Stop the threads; a transfer that has begun gets CLOSE_S to end."""
        end = time.monotonic() + CLOSE_S
        self.mover.close(0)
        while not self.mover.idle and time.monotonic() < end:
            time.sleep(0.005)
            self.mover.poll()  # a store that has ended is open until it is taken


def open_data_path(
    path: str,
    tensor: Any,
    layout: FileLayout,
    *,
    threads: int,
    direct_io: str,
    by: str = "host",
) -> DataPath:
    """Make the directories of a store below `path` and open it over `tensor`, int8 (num_blocks, page).

    `by` is the transport, "host" or "gds". The only place where a bench constructs fskv. Raises FskvError and
    OSError.
    """
    os.makedirs(os.path.join(path, TMP_DIR))
    os.mkdir(os.path.join(path, CHUNK_DIR))
    directory = NamespaceDir(path, b"bench" * 6, 0o700, 0o600)
    config = StoreConfig(
        root=path,
        transport="gds" if by == "gds" else "host",
        direct_io=cast("Literal['auto', 'on', 'off']", direct_io),
        io_threads=threads,
        staging_bytes=threads * 4 * layout.file_nbytes,
        load_deadline_s=_TIMEOUT_S,
    )
    mover = Mover(config, directory, [tensor], {0: layout}, patient=True)
    if by == "gds" and not mover.description.startswith("GDS"):
        mover.close()
        raise ConfigError(mover.description)
    direct = O_DIRECT in mover.description or (by == "gds" and direct_io != "off")
    return DataPath(f"{by} {O_DIRECT if direct else BUFFERED}", directory, layout, mover)


def chunk_id(number: int) -> ChunkId:
    """Name a chunk by a hash, as an engine does, so that chunks spread over the directories."""
    return ChunkId(hashlib.sha256(b"%d" % number).digest(), 0)


def pick_device(wanted: str) -> str:
    """Return where the KV pages are to be, cpu or cuda; raises ValueError where that is impossible."""
    try:
        import torch
    except ImportError:
        raise ValueError("torch is not installed; bench needs it for the KV pages") from None

    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise ValueError("--device: found cuda, but torch sees no CUDA device")
    return "cuda" if there and wanted != "cpu" else "cpu"


class KvMemory:
    """Memory of KV pages that all cells share: the first half is stored, loads fill the second."""

    def __init__(self, nbytes: int, largest_page: int, device: str) -> None:
        import torch

        self._nbytes = nbytes
        self._flat: Any = torch.empty(2 * nbytes + largest_page, dtype=torch.int8, device=device)
        # 8 bytes at a time: a generator takes as long for one. KiB sizes make it a multiple of 8.
        self._flat[:nbytes].view(torch.int64).random_()

    def pages(self, page_nbytes: int) -> tuple[Any, int]:
        """Return the memory as pages, (num_blocks, page), and the first block of the second half."""
        num_blocks = self._flat.shape[0] // page_nbytes
        tensor = self._flat[: num_blocks * page_nbytes].view(num_blocks, page_nbytes)
        return tensor, -(-self._nbytes // page_nbytes)


class StoreContestant(Contestant):
    """Stores scattered pages, loads them into other pages, compares every byte."""

    def __init__(
        self,
        path: str,
        cell: Cell,
        page_nbytes: int,
        memory: KvMemory,
        direct_io: str,
        by: str = "host",
    ) -> None:
        import torch

        self._pages_per_chunk = cell.chunk_nbytes // page_nbytes
        self._tensor, first_target = memory.pages(page_nbytes)
        self._words = self._tensor.view(torch.int64)  # the same memory: 8 times faster to compare
        self._layout = GroupLayout.of(0, self._pages_per_chunk, [(0, page_nbytes)])
        self._data = open_data_path(
            path,
            self._tensor,
            FileLayout(self._pages_per_chunk, (page_nbytes,), bytes(16)),
            threads=cell.threads,
            direct_io=direct_io,
            by=by,
        )
        order = list(range(cell.num_chunks * self._pages_per_chunk))
        random.Random(0).shuffle(order)  # noqa: S311  reproducible, not secret
        self._source, self._target = order, [first_target + block for block in order]
        self._chunks = [chunk_id(i) for i in range(cell.num_chunks)]
        self._paths = [self._data.chunk_path(chunk) for chunk in self._chunks]
        self._job_ids = itertools.count(1)
        self._serial_first = False
        warm = [] if self._data.is_direct else ["load-warm"]
        ops = ["store", "load", *warm, "load-request", "load-serial"]
        super().__init__(self._data.name, cell, page_nbytes, ops, verifies=True)

    def num_chunks(self, op: str) -> int:
        most = REQUEST_CHUNKS if op in ("load-request", "load-serial") else self.cell.num_chunks
        return min(most, self.cell.num_chunks)

    def measure(self) -> dict[str, float]:
        everything = range(self.cell.num_chunks)
        rates = {"store": self._store()}
        rates["load"] = self._load([everything])
        if not self._data.is_direct:
            rates["load-warm"] = self._load([everything], cold=False)
        request = everything[: self.num_chunks("load-request")]
        splits = {"load-request": [request], "load-serial": [range(i, i + 1) for i in request]}
        for op in sorted(splits, reverse=self._serial_first):
            poll_s = _SERIAL_POLL_S if op == "load-serial" else _POLL_S
            rates[op] = self._load(splits[op], poll_s=poll_s)
        self._serial_first = not self._serial_first
        return rates

    def remove_files(self) -> None:
        remove_all(self._paths)

    def close(self) -> None:
        self._data.close()

    def _store(self) -> float:
        start = time.perf_counter()
        moves = self._moves(range(self.cell.num_chunks), self._source)
        self._data.mover.store(next(self._job_ids), moves)
        drain(self._data.mover, "store", len(moves))
        return self.cell.gb_per_s(time.perf_counter() - start)

    def _load(self, jobs: Sequence[range], *, cold: bool = True, poll_s: float = _POLL_S) -> float:
        """Load these jobs' chunks, one job after the other; returns GB/s of verified bytes."""
        chunks = [i for job in jobs for i in job]
        self._clear(chunks)
        if cold and not self._data.is_direct:
            drop_from_page_cache(self._paths)
        self._synchronize()
        start = time.perf_counter()
        for job in jobs:
            moves = self._moves(job, self._target)
            self._data.mover.load(next(self._job_ids), moves)
            drain(self._data.mover, "load", len(moves), poll_s)
        seconds = time.perf_counter() - start
        self._verify(chunks)
        return self.cell.gb_per_s(seconds, len(chunks))

    def _clear(self, chunks: Iterable[int]) -> None:
        import torch

        for i in chunks:
            blocks = torch.tensor(self._blocks(self._target, i), device=self._words.device)
            self._words.index_fill_(0, blocks, 0)

    def _verify(self, chunks: Iterable[int]) -> None:
        """Compare page by page, without a copy; raises RoundError at the first that differs."""
        import torch

        for i in chunks:
            pairs = zip(self._blocks(self._source, i), self._blocks(self._target, i), strict=True)
            for source, target in pairs:
                if not torch.equal(self._words[source], self._words[target]):
                    raise RoundError("the loaded pages differ from the stored ones")

    def _blocks(self, blocks: list[int], chunk: int) -> list[int]:
        return blocks[chunk * self._pages_per_chunk : (chunk + 1) * self._pages_per_chunk]

    def _synchronize(self) -> None:
        if self._tensor.is_cuda:
            import torch

            torch.cuda.synchronize()

    def _moves(self, chunks: range, blocks: list[int]) -> list[FileMove]:
        per_chunk = self._pages_per_chunk
        ids = blocks[chunks.start * per_chunk : chunks.stop * per_chunk]
        plan = plan_job([self._layout], [self.page_nbytes], [len(chunks)], ids, [len(ids)], [0])
        return [FileMove(FileId(*self._chunks[chunks[part.key_idx]]), part) for part in plan.chunks]


def drain(mover: Mover, what: str, num_chunks: int, poll_s: float = _POLL_S) -> None:
    """Wait until `num_chunks` chunks have ended; raises RoundError unless all ended as OK."""
    good = metrics.STORED_CHUNKS if what == "store" else metrics.LOADED_CHUNKS
    ended = num_good = 0.0
    bad: list[str] = []
    end = time.monotonic() + _TIMEOUT_S
    while ended < num_chunks:
        mover.poll()
        for (metric, label), count in mover.counters.drain().items():
            if metric is good:
                num_good += count
            elif metric in (metrics.STORES_SKIPPED, metrics.LOAD_FAILURES) and count:
                bad += [label] * int(count)
        ended = num_good + len(bad)
        if ended < num_chunks:
            if time.monotonic() > end:
                raise RoundError(
                    f"{what}: {num_chunks - ended:g} of {num_chunks} chunks did not end in {_TIMEOUT_S:g} s"
                )
            time.sleep(poll_s)
    mover.take_news()
    if bad:
        raise RoundError(f"{what}: {len(bad)} of {num_chunks} chunks ended as {bad[0]}")
