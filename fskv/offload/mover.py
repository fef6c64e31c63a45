"""Moves chunks between an engine's KV pages and files: transport, store and I/O threads of one worker.

Only the engine's own thread calls, and only the constructor waits for a disk. `poll` returns the jobs that
need their pages no more, `take_news` the outcomes for the lookup.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from fskv.config import LEAST_AUTO_THREADS, MAX_QUEUED_CHUNKS, MIB, Deadline, StoreConfig
from fskv.data_path.breaker import Breaker
from fskv.data_path.depth import measure_answer_s, wanted_threads
from fskv.data_path.job import FileMove, FileOutcome, JobResult
from fskv.data_path.runner import STORE_QUEUE_S, JobRunner
from fskv.data_path.store import ChunkStore
from fskv.data_path.threads import HangProofPool, call_with_deadline
from fskv.data_path.transports import numa
from fskv.data_path.transports.choice import open_transport
from fskv.data_path.transports.protocol import Ready
from fskv.data_path.worker_keys import WorkerKeys
from fskv.errors import ConfigError, RootError
from fskv.format.chunk_file import FileLayout
from fskv.native import _native
from fskv.observe import metrics
from fskv.observe.metrics import Counters, Gauge
from fskv.observe.state_log import StateLog
from fskv.root.root import FORMAT_FILE, NamespaceDir
from fskv.types import ChunkId, FileId, Status, Use

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# KV memory: int8 (blocks, bytes of a page or more), or blocks without gaps.
Memory: TypeAlias = "torch.Tensor | memoryview"
Opened: TypeAlias = tuple[NamespaceDir, ChunkStore[Any]]

# Running stores may take this long when the engine stops; then they are left.
_CLOSE_S = 5.0
# A worker begins without knowing how long the mount takes to answer, if that is longer than this.
_ANSWER_S = 5.0
_DEVICE_S = 2.0  # for the copies under way, and for giving memory back
_MAX_USES = 4096  # whose time is remembered
_MAX_TOUCHES = 65_536  # files that wait: a disk that is so far behind has no time for more
# Stores that end like this speak against the storage; the others against a file, or nothing.
_AGAINST_STORES = (Status.DENIED, Status.NO_SPACE, Status.IO_ERROR, Status.TIMED_OUT)

_LOADED = metrics.LOADED_CHUNKS, metrics.LOADED_BYTES, metrics.LOAD_SECONDS
_STORED = metrics.STORED_CHUNKS, metrics.STORED_BYTES, metrics.STORE_SECONDS


@dataclass
class News:
    """News of a mover, or of several (`merged`), for the lookup: which chunks are stored, not stored, or bad.

    Pickled where movers are processes of their own.
    """

    # To the movers whose files are visible.
    stored: dict[ChunkId, set[int]] = field(default_factory=dict)
    not_stored: set[ChunkId] = field(default_factory=set)
    failed_loads: dict[ChunkId, Status] = field(default_factory=dict)
    written_nbytes: int = 0
    loaded_nbytes: int = 0
    no_space: bool = False  # a store found the disk full
    # Unhealthy conditions of movers, told when they change: number -> condition -> words.
    unhealthy: dict[int, dict[str, str]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self != News()

    def merged(self, other: News) -> News:
        """Return the news of both as one."""
        stored = dict(self.stored)
        for chunk, movers in other.stored.items():
            stored[chunk] = stored.get(chunk, set()) | movers
        return News(
            stored,
            self.not_stored | other.not_stored,
            self.failed_loads | other.failed_loads,
            self.written_nbytes + other.written_nbytes,
            self.loaded_nbytes + other.loaded_nbytes,
            self.no_space or other.no_space,
            self.unhealthy | other.unhealthy,
        )


class Mover:
    """Stores and loads the chunks of one worker, job by job. One thread."""

    def __init__(
        self,
        config: StoreConfig,
        directory: NamespaceDir,
        pages: Sequence[Memory],
        layouts: Mapping[int, FileLayout],
        *,
        number: int = 0,
        restore: Callable[[], object] | None = None,
        deadline: Deadline | None = None,
        patient: bool = False,
    ) -> None:
        """`pages` are int8 (blocks, bytes of a page), or flat memory; a plan names them by their place.

        `layouts` is by group index; all files of a chunk are alike. `number` is this mover's among those
        that hold the parts of a chunk. `restore` makes the namespace's directories again when somebody
        removed them. `deadline` stands for the options' own. A `patient` mover skips no store because the
        disk is slow.

        Raises FskvError where the configuration cannot be used here: no memory for a chunk, no such
        transport.
        """
        self._keys = WorkerKeys.of(config.key_file)
        if self._keys is not None:
            layouts = {idx: replace(one, encrypted=True) for idx, one in layouts.items()}
        slot_nbytes = max(layout.file_nbytes for layout in layouts.values())
        num_slots = config.staging_bytes // slot_nbytes
        num_threads = config.num_io_threads(num_slots)
        if num_slots <= num_threads:
            lower = "; or lower 'io_threads'" if num_threads > 1 else ""
            raise ConfigError(
                f"option 'staging_bytes': found {config.staging_bytes}, expected at least "
                f"{(num_threads + 1) * slot_nbytes} (one chunk file of {slot_nbytes} bytes for each "
                f"of {num_threads} I/O threads and one more){lower}"
            )
        self.number = number
        device = getattr(pages[0], "device", None) if pages else None
        self.on_cuda = device is not None and device.type == "cuda"
        self._writable = directory.writable
        # Where nothing may be written this is read to try the mount out.
        probe_file = None if self._writable else f"{config.root}/{FORMAT_FILE}"
        cpus = numa.cuda_cpus(device.index) if self.on_cuda and device is not None else None
        self._transport = open_transport(
            pages,
            slot_nbytes,
            probe_dir=directory.tmp_dir,
            probe_file=probe_file,
            transport=config.transport,
            direct_io=config.direct_io,
            file_mode=directory.file_mode,
            fsync=config.fsync,
            encrypted=self._keys is not None,
            num_slots=num_slots,
            num_threads=num_threads,
            cpus=cpus,
        )
        told = ""
        if config.io_threads == "auto":
            answer_s = _answer_s(config, directory, probe_file)
            wanted = wanted_threads(answer_s, slot_nbytes)
            num_threads = config.num_io_threads(num_slots, wanted)
            told = " (auto)"
            if num_threads < wanted:
                told = " (auto: half of the staging slots)"
            elif answer_s is not None:
                told = f" (auto: a file opens and is read in {answer_s * 1e3:.1f} ms)"
        self.num_io_threads = num_threads
        self._layouts = layouts
        store = ChunkStore(directory, layouts, self._transport, restore=restore, keys=self._keys)
        self.file_nbytes = store.file_nbytes
        self._store = store
        self._uses: OrderedDict[int, bytearray] = OrderedDict()
        self._breaker = Breaker(log=StateLog(root=config.root, of=f"rank {number}"))
        self.counters = Counters(*metrics.WORKER_COUNTERS)
        self._runner = JobRunner(
            store,
            self._transport,
            num_threads=num_threads,
            num_slots=num_slots,
            max_queued_chunks=sys.maxsize if patient else MAX_QUEUED_CHUNKS,
            deadline=deadline or config.deadline,
            breaker=self._breaker,
            store_queue_s=math.inf if patient else STORE_QUEUE_S,
            cpus=cpus,
        )
        self._touches: deque[Sequence[tuple[FileId, Use]]] = deque()
        self._touches_lock = threading.Lock()  # guards the number of files in them
        self._num_touches = 0
        self._toucher: HangProofPool[None, None] = HangProofPool(
            "fskv-touch", 1, 0, _native.Queue(1, 0), self._touch_next, contextlib.nullcontext
        )
        self.description = self._transport.description
        self.is_local = store.is_local
        self._stopped = False
        self._ending = _Ending()
        self._news = News()
        self._store_failure: Status | None = None  # of the last store; None: it was written
        self._num_written = self._num_given_up = 0  # files of stores, since the start
        self._written_nbytes = 0
        self._told_unhealthy: dict[str, str] = {}
        logger.info(
            "fskv: rank %d: %s; %d I/O threads%s, %d staging slots of %d bytes at most",
            number,
            self.description,
            num_threads,
            told,
            num_slots,
            slot_nbytes,
        )

    # --- jobs -------------------------------------------------------------------------------

    def store(self, job_id: int, files: Sequence[FileMove], ready: Ready | None = None) -> None:
        """Begin to store files, all of a chunk's that this mover has; the pages are free when it is reported.

        `ready` is an event of the stream that fills the pages, or None when they are complete. Files beyond
        the queue's limit are skipped.
        """
        if self._stopped or not self._writable:
            for move in files:
                self.leave(move.file.chunk, Status.SKIPPED)
            files = ()
        for move in files:
            self._ending.begin(move.file.chunk)
        self._runner.submit_store(job_id, files, ready)

    def load(
        self,
        job_id: int,
        files: Sequence[FileMove],
        ready: Ready | None = None,
        allowed_s: float = math.inf,
        *,
        refused: bool = False,
    ) -> None:
        """Begin to load files; when it is reported, its pages are complete or `JobResult.bad` says which not.

        `ready` is an event of the stream that used the pages before, or None. A `refused` job fails, and none
        of its pages is written.
        """
        refused |= self._stopped
        self._runner.submit_load(job_id, files, ready, allowed_s, refused=refused)

    def opened(self, open_: Callable[[], NamespaceDir]) -> Opened:
        """Open another namespace with the same layouts, and its store for `move_to`. Any thread; raises
        FskvError.
        """
        directory = open_()
        store = ChunkStore(
            directory, self._layouts, self._transport, restore=open_, keys=self._keys
        )
        return directory, store

    def move_to(self, store: ChunkStore[Any]) -> None:
        """Give up all jobs, and use another namespace from now on, also after `stop`. The lookup must
        forget.
        """
        self.drop()
        self._store = self._runner.store = store
        self._stopped = False

    def use(self, number: int, depth: int) -> Use:
        """Return the stamp of a chunk at `depth` in its prefix; Uses.begin gives the `number` of a use."""
        stamp = self._uses.setdefault(number, bytearray(8))
        self._uses.move_to_end(number)
        if len(self._uses) > _MAX_USES:
            self._uses.popitem(last=False)
        return Use(stamp, depth)

    def touch(self, files: Sequence[tuple[FileId, Use]]) -> None:
        """Note that files are used; missing files are passed over."""
        if self._stopped or self._breaker.open or not self._writable:
            return
        with self._touches_lock:
            if self._num_touches > _MAX_TOUCHES:
                return
            self._num_touches += len(files)
        self._touches.append(files)
        self._toucher.submit(_native.Transfer(None, True, _native.Guard(True)))

    def _touch_next(self, _task: object, _context: None) -> None:
        """Touch the next files, the deepest first, on a thread of its own: no read or write waits for it."""
        files = self._touches.popleft()
        with self._touches_lock:
            self._num_touches -= len(files)
        for file, use in sorted(files, key=lambda one: -one[1].depth):
            self._store.touch(file, use)

    def poll(self) -> list[JobResult]:
        """Return the jobs that ended since the last call; nothing reads or writes their pages any more."""
        if self._keys is not None:
            self._keys.refresh()
        ended = self._runner.poll()
        for result in ended:
            if result.is_load:
                self.counters.observe(metrics.LOAD_LATENCY, result.seconds)
        self._collect()
        return ended

    def free_pages(self, job_ids: Collection[int] | None = None) -> None:
        """Wait until the pages of these jobs, or of all, are free: stores go on from memory, loads fail."""
        self._runner.wait(job_ids)

    def drop(self) -> None:
        """Give up all jobs, and touch their pages no more. The lookup must forget. See JobRunner.drop."""
        self._runner.drop()
        self._collect()
        # The lookup's reset has ended these. Told later, they would end what it begins to store by then.
        self._news.not_stored.clear()

    def stop(self) -> None:
        """End all moves until `move_to`: the KV may not be the namespace's. The lookup must forget."""
        self._stopped = True
        self.drop()

    def close(self, timeout_s: float = _CLOSE_S) -> None:
        """Stop the threads; running stores have `timeout_s` to end.

        A device that answers no more keeps its slots, and what waits for it is left behind.
        """
        if not self.on_cuda:
            self._close(timeout_s)
            return
        try:
            what = "shutdown: the GPU did not end its copies"
            call_with_deadline(lambda: self._close(timeout_s), timeout_s + _DEVICE_S, what)
        except RootError as error:
            logger.warning("fskv: %s", error)

    def _close(self, timeout_s: float) -> None:
        self._toucher.close()
        num_left = self._runner.shutdown(timeout_s)
        self._collect()
        self._transport.close()
        if self._writable:
            logger.info(
                "fskv: rank %d: stopped; %d files written (%.1f MiB), %d given up",
                self.number,
                self._num_written,
                self._written_nbytes / MIB,
                self._num_given_up + num_left,
            )

    # --- what became of it ------------------------------------------------------------------

    def leave(self, chunk: ChunkId, status: Status) -> None:
        """Tell the lookup that this mover does not store a chunk; EXISTS: another mover stores its bytes."""
        self._tell(chunk, status)

    def take_news(self) -> News:
        """Return the news for the lookup since the last call."""
        news, self._news = self._news, News()
        if (unhealthy := self._unhealthy()) != self._told_unhealthy:
            news.unhealthy[self.number] = self._told_unhealthy = unhealthy
        return news

    def _unhealthy(self) -> dict[str, str]:
        """Return a sentence for each condition of the health file that holds here."""
        unhealthy = {}
        if self._breaker.open:
            unhealthy["breaker_open"] = (
                f"breaker of rank {self.number} open: {self._breaker.reason}"
            )
        if self._store_failure is not None:
            status = self._store_failure.value
            unhealthy["stores_fail"] = (
                f"stores fail on rank {self.number} ({status}): the log says which file"
            )
        return unhealthy

    def gauges(self) -> dict[Gauge, float]:
        """Return the gauges of slots, threads and queue."""
        return {
            metrics.SLOTS_IN_USE: float(self._runner.num_slots_used),
            metrics.THREADS_HUNG: float(self._runner.num_threads_hung),
            metrics.STORE_QUEUE: float(self._runner.num_open_stores),
        }

    @property
    def least_queued(self) -> int:
        """The number of stores that the queue accepts, however slow the disk is."""
        return self._runner.least_queued

    @property
    def idle(self) -> bool:
        """Return whether no store waits and no thread works on a file, hung threads included."""
        return not (self._runner.num_open_stores or self._runner.num_running)

    def _collect(self) -> None:
        outcomes = self._runner.take_outcomes()
        if outcomes:
            self._count(outcomes)
        for outcome in outcomes:
            status = outcome.status
            if outcome.is_load:
                if status is Status.OK:
                    self._news.loaded_nbytes += outcome.nbytes
                # It only fell with its request.
                elif status is not Status.SKIPPED:
                    self._news.failed_loads[outcome.file.chunk] = status
                continue
            chunk = outcome.file.chunk
            self._news.written_nbytes += outcome.nbytes
            self._news.no_space |= status is Status.NO_SPACE
            self._written_nbytes += outcome.nbytes
            self._num_written += status is Status.OK
            self._num_given_up += not status.good
            if status is Status.OK:
                self._store_failure = None
            elif status in _AGAINST_STORES:
                self._store_failure = status
            ended = self._ending.end(chunk, status)
            if ended is not None:
                self._tell(chunk, ended)

    def _tell(self, chunk: ChunkId, status: Status) -> None:
        if status.good:
            self._news.stored.setdefault(chunk, set()).add(self.number)
        else:
            self._news.not_stored.add(chunk)

    def _count(self, outcomes: Sequence[FileOutcome]) -> None:
        """Sum up the good files, which are many: this is the engine's time."""
        add = self.counters.add
        for counted, is_load in ((_LOADED, True), (_STORED, False)):
            good = [o for o in outcomes if o.status is Status.OK and o.is_load is is_load]
            if good:
                chunks, nbytes, seconds = counted
                add(chunks, len(good))
                add(nbytes, sum(outcome.nbytes for outcome in good))
                add(seconds, sum(outcome.seconds for outcome in good))
        for outcome in outcomes:
            status = outcome.status
            if status is Status.OK:
                continue
            if not outcome.is_load:
                add(metrics.STORES_SKIPPED, 1, status.value)
            elif status is not Status.SKIPPED:
                add(metrics.LOAD_FAILURES, 1, status.value)


def _answer_s(config: StoreConfig, directory: NamespaceDir, probe_file: str | None) -> float | None:
    """Measure how fast the mount answers; None after a timeout, which is no reason to refuse a root."""
    asked = probe_file or directory.tmp_dir
    try:
        return call_with_deadline(
            lambda: measure_answer_s(
                directory.tmp_dir,
                directory.file_mode,
                direct=config.direct_io != "off",
                probe_file=probe_file,
            ),
            _ANSWER_S,
            f"option 'io_threads': \"auto\" is {LEAST_AUTO_THREADS}, as {asked} did not answer",
        )
    except RootError as error:
        logger.warning("fskv: %s", error)
        return None


class _Ending:
    """Collects the outcomes of a chunk's files; a chunk's entry lives until its last file has ended."""

    def __init__(self) -> None:
        self._open: dict[ChunkId, int] = {}  # files without an outcome
        self._bad: dict[ChunkId, Status] = {}  # the first bad outcome

    def begin(self, chunk: ChunkId) -> None:
        self._open[chunk] = self._open.get(chunk, 0) + 1

    def end(self, chunk: ChunkId, status: Status) -> Status | None:
        """Note one file's outcome; after the last file return the chunk's: good if all files are good."""
        if not status.good:
            self._bad.setdefault(chunk, status)
        left = self._open.pop(chunk, 1) - 1
        if left:
            self._open[chunk] = left
            return None
        return self._bad.pop(chunk, Status.OK)
