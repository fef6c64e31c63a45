"""The data path as an engine's worker uses it, over KV pages in host memory, and traffic on it.

`Rig` owns KV tensors, store, transport and runner; `Traffic` submits jobs at a rate from the calling
thread, as a worker's steps do. The first half of the KV blocks is what stores read, the second half is
what loads fill, and `Rig.compare` holds the two together byte by byte. All benchmarks that move chunks
construct them here and nowhere else.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import shutil
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from fskv.config import MAX_QUEUED_CHUNKS, MIB, StoreConfig
from fskv.data_path.breaker import Breaker
from fskv.data_path.job import FileMove
from fskv.data_path.runner import JobRunner
from fskv.data_path.store import ChunkStore
from fskv.data_path.transports.host import HostSlot, HostTransport
from fskv.data_path.transports.protocol import Ready
from fskv.data_path.worker_keys import WorkerKeys
from fskv.format.chunk_file import FileLayout
from fskv.format.spans import GroupLayout, plan_job
from fskv.namespace import GroupIdentity, Identity
from fskv.root.root import NamespaceDir, Root
from fskv.types import FileId, Status

if TYPE_CHECKING:
    import torch

# A benchmark waits for slow storage instead of counting timeouts.
PATIENCE_S = 120.0
_REMOVE_S = 5.0


class BenchmarkError(Exception):
    """Something that makes the figures worthless; the command says it in one line and exits with 2."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the KV pages look like: a chunk has a page of each layer for each of its blocks."""

    chunk_nbytes: int = 2 * MIB
    page_nbytes: int = 32 << 10
    num_layers: int = 16
    num_places: int = 128  # chunks that the stored half, and the loaded half, have room for

    @property
    def blocks_per_chunk(self) -> int:
        blocks, rest = divmod(self.chunk_nbytes, self.page_nbytes * self.num_layers)
        if rest or not blocks:
            raise BenchmarkError(
                f"a chunk of {self.chunk_nbytes} bytes is no whole number of blocks of "
                f"{self.num_layers} pages of {self.page_nbytes} bytes"
            )
        return blocks


def patient_config(
    directory: str,
    options: argparse.Namespace,
    *,
    staging_nbytes: int = 256 * MIB,
    key_file: str | None = None,
) -> StoreConfig:
    """Return the defaults of an engine, but with deadlines that end a benchmark only if all hangs."""
    return StoreConfig.from_mapping(
        {
            "root": directory,
            "io_threads": options.threads,
            "direct_io": options.direct_io,
            "staging_bytes": staging_nbytes,
            "load_deadline_s": PATIENCE_S,
            "key_file": key_file,
        }
    )


def identity_of(
    model: str, page_nbytes: tuple[int, ...], blocks_per_chunk: int, tokens_per_block: int = 16
) -> Identity:
    """Return the identity of an engine without a model: one KV group, on CPUs."""
    layers = tuple(f"layers.{number}" for number in range(len(page_nbytes)))
    return Identity(
        engine="benchmark",
        engine_version="1",
        arch="cpu-x86_64",
        model_name=model,
        weights=f"named:{model}",
        model_config={},
        kv_cache_dtype="bfloat16",
        model_dtype="bfloat16",
        kv_cache_layout="HND",
        attention_backend="CPU",
        tokens_per_hash=tokens_per_block,
        blocks_per_chunk=blocks_per_chunk,
        groups=(GroupIdentity(0, "full", None, tokens_per_block, page_nbytes, layers),),
        hash_algorithm="sha256",
        hash_seed="0",
        topology={"tp": 1},
    )


def open_namespace(
    root: str, model: str, page_nbytes: tuple[int, ...], blocks_per_chunk: int, *, create: bool
) -> NamespaceDir:
    """Open a root and the namespace of this model as a worker does."""
    identity = identity_of(model, page_nbytes, blocks_per_chunk)
    return Root.open(root, create=create).open_namespace(identity)


def open_runner(
    tensors: Sequence[torch.Tensor],
    layout: FileLayout,
    directory: NamespaceDir,
    config: StoreConfig,
    *,
    breaker: Breaker | None = None,
    native: bool = True,
) -> JobRunner[HostSlot]:
    """Construct transport, store and runner as fskv.engines.vllm.worker does, for one KV group.

    Without `native` each chunk takes the slow way, in Python.
    """
    num_slots = config.staging_bytes // layout.file_nbytes
    transport = HostTransport(
        tensors,
        layout.file_nbytes,
        probe_dir=directory.tmp_dir,
        direct_io=config.direct_io,
        file_mode=directory.file_mode,
        fsync=config.fsync,
        num_slots=num_slots,
    )
    if not native:
        transport.native = replace(transport.native, pages=None)
    store = ChunkStore(directory, {0: layout}, transport, keys=WorkerKeys.of(config.key_file))
    return JobRunner(
        store,
        transport,
        num_threads=config.num_io_threads(num_slots),
        num_slots=num_slots,
        max_queued_chunks=MAX_QUEUED_CHUNKS,
        deadline=config.deadline,
        breaker=breaker or Breaker(),
        store_queue_s=math.inf,
    )


class Device(Protocol):
    """Where a rig's KV pages are if not in host memory; benchmarks.simulated has one."""

    def tensors(
        self, num_tensors: int, num_blocks: int, page_nbytes: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]: ...

    def ready(self) -> Ready: ...


class Rig:
    """KV tensors with random bytes, and a runner over files below a directory of its own."""

    def __init__(
        self,
        directory: str,
        shape: Shape,
        config: StoreConfig,
        *,
        device: Device | None = None,
    ) -> None:
        import torch  # seconds, and a watching parent needs none of it

        self.shape = shape
        self._path = tempfile.mkdtemp(dir=directory)
        os.mkdir(os.path.join(self._path, "tmp"))
        os.mkdir(os.path.join(self._path, "chunks"))
        self._names = NamespaceDir(self._path, b"benchmark".ljust(32), 0o700, 0o600)
        per_chunk = shape.blocks_per_chunk
        num_blocks = per_chunk * shape.num_places
        if device is None:
            self._tensors = given = [
                torch.empty((2 * num_blocks, shape.page_nbytes), dtype=torch.int8)
                for _ in range(shape.num_layers)
            ]
        else:
            given, self._tensors = device.tensors(
                shape.num_layers, 2 * num_blocks, shape.page_nbytes
            )
        for tensor in self._tensors:
            tensor.random_(-128, 128)
        self.ready = device.ready if device else lambda: None
        self._strides = [tensor.stride(0) for tensor in self._tensors]
        self._layout = GroupLayout.of(
            0, per_chunk, [(layer, shape.page_nbytes) for layer in range(shape.num_layers)]
        )
        self.file_layout = FileLayout(
            per_chunk,
            (shape.page_nbytes,) * shape.num_layers,
            bytes(16),
            encrypted=config.key_file is not None,
        )
        order = list(range(num_blocks))
        random.Random(0).shuffle(order)  # noqa: S311  reproducible, not secret
        stored = [order[at : at + per_chunk] for at in range(0, num_blocks, per_chunk)]
        loaded = [[num_blocks + block for block in blocks] for blocks in stored]
        self._blocks = {False: stored, True: loaded}  # by is_load, then by place
        self.runner = open_runner(given, self.file_layout, self._names, config)

    def requests(self, chunks: Sequence[tuple[FileId, int]], *, is_load: bool) -> list[FileMove]:
        """Plan a job of (chunk, place) pairs as a worker does for every job."""
        places = self._blocks[is_load]
        blocks = [block for _, place in chunks for block in places[place]]
        plan = plan_job(
            [self._layout],
            self._strides,
            [len(chunks)],
            blocks,
            [len(blocks)],
            [0],
            complete_tail=not is_load,
        )
        return [FileMove(chunks[part.key_idx][0], part) for part in plan.chunks]

    def clear(self) -> None:
        """Zero the pages that loads fill."""
        for tensor in self._tensors:
            tensor[tensor.shape[0] // 2 :] = 0

    def compare(self, places: Sequence[int]) -> int:
        """Return the bytes of these places whose loaded pages equal the stored ones: all, or it raises."""
        import torch

        nbytes = 0
        for tensor in self._tensors:
            stored = [b for place in places for b in self._blocks[False][place]]
            loaded = [b for place in places for b in self._blocks[True][place]]
            if not torch.equal(tensor[stored], tensor[loaded]):
                raise BenchmarkError("loaded pages differ from the stored ones; no figure is valid")
            nbytes += len(stored) * self.shape.page_nbytes
        return nbytes

    def remove(self, chunk: FileId) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._names.chunk_path(chunk.key_hash, chunk.group_idx, None))

    @property
    def staging_nbytes(self) -> int:
        """The staging slots that were ever made."""
        made = self.runner._slots.num_made  # noqa: SLF001
        return made * self.file_layout.file_nbytes

    def close(self) -> None:
        self.runner.shutdown(0)


@dataclass(frozen=True, slots=True)
class Moved:
    """What one stretch of traffic did, until `until` was true; what was open then is not counted."""

    num_chunks: int
    seconds: float
    caller_s: float  # CPU seconds of the calling thread: plan, submit, poll, take_outcomes


class Traffic:
    """Submits store or load jobs on a rig. One thread at a time; the rig's only user."""

    def __init__(
        self, rig: Rig, *, job_chunks: int, step_s: float, keep: int | None = None
    ) -> None:
        """`step_s` is the pause between two polls; beyond `keep` files, the oldest is removed."""
        self._rig = rig
        self._job_chunks = job_chunks
        self._step_s = step_s
        self._keep = keep
        # Enough for every thread always to have a next chunk, and less than fskv's own queue takes.
        self._max_open = min(2 * job_chunks, rig.shape.num_places)
        if job_chunks > rig.shape.num_places:
            raise BenchmarkError(f"{job_chunks} chunks a job, but {rig.shape.num_places} places")
        self._stored: deque[tuple[FileId, int]] = deque()
        self._place_of: dict[FileId, int] = {}  # of chunks on their way into a file
        self._loaded_places: set[int] = set()
        self._num_named = 0
        self._num_jobs = 0
        self._num_open = 0

    def run(self, *, is_load: bool, rate: float, until: Callable[[float], bool]) -> Moved:
        """Move `rate` chunks a second, or as many as get through, until `until(seconds)` is true.

        At rate 0 the worker's steps go on with nothing to do.
        """
        start = now = time.perf_counter()
        num_moved = num_submitted = 0
        caller_ns = 0
        while not until(now - start):
            before_ns = time.thread_time_ns()
            due = (now - start) * rate
            while num_submitted < due and self._num_open + self._job_chunks <= self._max_open:
                self._submit(is_load=is_load)
                num_submitted += self._job_chunks
            num_moved += self._collect()
            caller_ns += time.thread_time_ns() - before_ns
            time.sleep(self._step_s)
            now = time.perf_counter()
        return Moved(num_moved, now - start, caller_ns / 1e9)

    def drain(self) -> None:
        """Wait until every chunk has ended."""
        end = time.monotonic() + PATIENCE_S
        while self._num_open:
            self._collect()
            if time.monotonic() > end:
                raise BenchmarkError(f"{self._num_open} chunks have not ended in {PATIENCE_S:g} s")
            time.sleep(self._step_s)

    def begin_loads(self) -> None:
        """Zero the pages that loads fill: `check` then sees what came after."""
        self._rig.clear()
        self._loaded_places.clear()

    def check(self) -> int:
        """Compare every place that was loaded into since `begin_loads` and return the bytes."""
        return self._rig.compare(sorted(self._loaded_places))

    def remove_files(self) -> None:
        while self._stored:
            self._rig.remove(self._stored.popleft()[0])

    def _submit(self, *, is_load: bool) -> None:
        runner = self._rig.runner
        self._num_jobs += 1
        self._num_open += self._job_chunks
        if is_load:
            if not self._stored:
                raise BenchmarkError("there is nothing to load: no chunk was stored in time")
            chunks = [self._stored[i % len(self._stored)] for i in range(self._job_chunks)]
            self._stored.rotate(-self._job_chunks)
            self._loaded_places.update(place for _, place in chunks)
            requests = self._rig.requests(chunks, is_load=True)
            runner.submit_load(self._num_jobs, requests, self._rig.ready())
            return
        chunks = []
        for number in range(self._num_named, self._num_named + self._job_chunks):
            chunk = FileId(b"%032d" % number, 0)
            self._place_of[chunk] = number % self._rig.shape.num_places
            chunks.append((chunk, self._place_of[chunk]))
        self._num_named += self._job_chunks
        requests = self._rig.requests(chunks, is_load=False)
        runner.submit_store(self._num_jobs, requests, self._rig.ready())

    def _collect(self) -> int:
        """Do what a worker does once a step; return how many chunks have ended."""
        self._rig.runner.poll()
        outcomes = self._rig.runner.take_outcomes()
        for outcome in outcomes:
            if outcome.status is not Status.OK:
                what = "load" if outcome.is_load else "store"
                raise BenchmarkError(f"the {what} of a chunk ended as {outcome.status.value}")
            if not outcome.is_load:
                self._stored.append((outcome.file, self._place_of.pop(outcome.file)))
                if self._keep is not None and len(self._stored) > self._keep:
                    self._rig.remove(self._stored.popleft()[0])
        self._num_open -= len(outcomes)
        return len(outcomes)


@contextlib.contextmanager
def work_directory(parent: str) -> Iterator[str]:
    """Make a directory below `parent` and remove it in the end, also after Ctrl-C."""
    path = tempfile.mkdtemp(prefix="fskv-benchmark-", dir=os.path.abspath(parent))
    try:
        yield path
    finally:
        # A second Ctrl-C must not stop this half way.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        # I/O threads of a rig that nobody closed may still write.
        end = time.monotonic() + _REMOVE_S
        while os.path.exists(path) and time.monotonic() < end:
            shutil.rmtree(path, ignore_errors=True)
        signal.signal(signal.SIGINT, before)
