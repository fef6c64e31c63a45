"""Measures the data path on a directory: `JobRunner`, `ChunkStore` and transport as an engine uses them.

Counts a byte only when it came back into the right KV page with the right value: the pages are compared
with what was stored after every load. Needs torch; not imported by any other command.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.progress import Progress

from fskv.breaker import Breaker
from fskv.chunk_file import FileLayout
from fskv.config import Deadline
from fskv.job import ChunkRequest
from fskv.jobs import JobRunner
from fskv.root import NamespaceDir
from fskv.span_plan import GroupLayout, plan_job
from fskv.store import ChunkStore
from fskv.transports.host import HostTransport
from fskv.types import ChunkId, Status

if TYPE_CHECKING:
    from rich.console import Console

_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Row:
    """One measured cell; gb_per_s is 1e9 bytes a second, the median over the rounds."""

    op: str
    path: str
    chunk_nbytes: int
    page_nbytes: int
    threads: int
    gb_per_s: float
    gb_per_s_min: float
    gb_per_s_max: float
    rounds: int
    verified: bool


def parse_sizes(option: str, text: str) -> list[int]:
    """Return bytes from a comma-separated list of KiB; raises ValueError naming the option."""
    try:
        sizes = [int(part) << 10 for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) <= 0:
        raise ValueError(f"{option}: found {text!r}, expected sizes in KiB such as 512,2048")
    return sizes


def run_bench(
    directory: str,
    *,
    chunk_sizes: list[int],
    page_sizes: list[int],
    num_threads: int,
    num_rounds: int,
    total_nbytes: int,
    device: str,
    direct_io: str,
    console: Console,
) -> list[Row]:
    """Measure every combination, interleaved round by round, and return a row for each and direction.

    Raises ValueError for arguments that make no sense, OSError and FskvError for the directory.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"--device: found {device!r}, expected auto, cpu or cuda")
    if direct_io not in ("auto", "on", "off"):
        raise ValueError(f"--direct-io: found {direct_io!r}, expected auto, on or off")
    if not os.path.isdir(directory):
        raise ValueError(f"{directory}: found no directory, expected one on the storage to measure")
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    combinations = [(c, p) for c in chunk_sizes for p in page_sizes if c % p == 0]
    if not combinations:
        raise ValueError("--page-kib: no page size divides a chunk size")
    work = tempfile.mkdtemp(prefix="fskv-bench-", dir=directory)
    try:
        cells = [
            _Cell(work, number, c, p, num_threads, total_nbytes, device, direct_io)
            for number, (c, p) in enumerate(combinations)
        ]
        with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
            task = progress.add_task("measuring", total=num_rounds * len(cells))
            for _ in range(num_rounds):
                for cell in cells:
                    cell.measure()
                    progress.advance(task)
        return [row for cell in cells for row in cell.rows(num_threads)]
    finally:
        shutil.rmtree(work, ignore_errors=True)


class _Cell:
    """One combination of sizes with its KV tensor, files and results."""

    def __init__(
        self,
        work: str,
        number: int,
        chunk_nbytes: int,
        page_nbytes: int,
        num_threads: int,
        total_nbytes: int,
        device: str,
        direct_io: str,
    ) -> None:
        import torch

        self.chunk_nbytes, self.page_nbytes = chunk_nbytes, page_nbytes
        path = os.path.join(work, str(number))
        os.makedirs(os.path.join(path, "tmp"))
        os.mkdir(os.path.join(path, "chunks"))
        self._directory = NamespaceDir(path, b"bench" * 6, 0o700, 0o600)
        pages_per_chunk = chunk_nbytes // page_nbytes
        self._num_chunks = max(1, total_nbytes // chunk_nbytes)
        num_blocks = self._num_chunks * pages_per_chunk
        self._layout = GroupLayout.of(0, pages_per_chunk, [(0, page_nbytes)])
        file_layout = FileLayout(pages_per_chunk, (page_nbytes,), bytes(16))
        # The first half is stored, the second half is what loads fill.
        self._tensor: Any = torch.empty(
            (2 * num_blocks, page_nbytes), dtype=torch.int8, device=device
        )
        self._tensor.random_(-128, 128)
        transport = HostTransport(
            [self._tensor],
            file_layout.file_nbytes,
            probe_dir=os.path.join(path, "tmp"),
            direct_io=direct_io,
        )
        self._path = transport.description
        store = ChunkStore(
            self._directory, {0: file_layout}, transport, rank=None, touch_interval_s=600
        )
        self._runner = JobRunner(
            store,
            transport,
            num_threads=num_threads,
            num_slots=num_threads * 4,
            max_queued_chunks=self._num_chunks,
            deadline=Deadline(_TIMEOUT_S, 0, _TIMEOUT_S),
            breaker=Breaker(1_000_000, 1),
        )
        order = list(range(num_blocks))
        random.Random(0).shuffle(order)  # noqa: S311  reproducible, not secret
        self._source, self._target = order, [num_blocks + block for block in order]
        self._round = 0
        self._seconds: dict[str, list[float]] = {"store": [], "load": []}
        self._measure_once(keep=False)  # warm-up: slots, streams and directories exist afterwards

    def measure(self) -> None:
        self._measure_once(keep=True)

    def rows(self, num_threads: int) -> list[Row]:
        nbytes = self._num_chunks * self.chunk_nbytes
        rows = []
        for op, seconds in self._seconds.items():
            rates = [nbytes / s / 1e9 for s in seconds]
            rows.append(
                Row(
                    op,
                    self._path,
                    self.chunk_nbytes,
                    self.page_nbytes,
                    num_threads,
                    statistics.median(rates),
                    min(rates),
                    max(rates),
                    len(rates),
                    verified=True,
                )
            )
        self._runner.shutdown(0)
        return rows

    def _measure_once(self, *, keep: bool) -> None:
        import torch

        self._round += 1
        chunks = [ChunkId(b"%d-%d" % (self._round, i), 0) for i in range(self._num_chunks)]
        start = time.perf_counter()
        self._runner.submit_store(1, self._requests(chunks, self._source), None)
        self._drain()
        stored = time.perf_counter()
        half = self._tensor.shape[0] // 2
        self._tensor[half:] = 0
        if self._tensor.is_cuda:
            torch.cuda.synchronize()
        before = time.perf_counter()
        self._runner.submit_load(2, self._requests(chunks, self._target), None)
        self._drain()
        loaded = time.perf_counter()
        if not torch.equal(self._tensor[:half], self._tensor[half:]):
            raise ValueError("the loaded pages differ from the stored ones; nothing is reported")
        if keep:
            self._seconds["store"].append(stored - start)
            self._seconds["load"].append(loaded - before)
        for chunk in chunks:
            os.unlink(self._directory.chunk_path(chunk.key_hash, 0, None))

    def _requests(self, chunks: list[ChunkId], blocks: list[int]) -> list[ChunkRequest]:
        plan = plan_job(
            [self._layout], [self.page_nbytes], [len(chunks)], blocks, [len(blocks)], [0]
        )
        return [ChunkRequest(chunks[part.key_idx], part) for part in plan.chunks]

    def _drain(self) -> None:
        """Wait until every chunk has ended well; raises ValueError otherwise."""
        remaining = self._num_chunks
        end = time.monotonic() + _TIMEOUT_S
        while remaining:
            self._runner.poll()
            for outcome in self._runner.take_outcomes():
                if outcome.status is not Status.OK:
                    raise ValueError(
                        f"a chunk ended as {outcome.status.value}; nothing is reported"
                    )
                remaining -= 1
            if time.monotonic() > end:
                raise ValueError(f"no end after {_TIMEOUT_S:g} s; nothing is reported")
            time.sleep(0.0002)
