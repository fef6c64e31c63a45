"""Judges the chunk files of namespaces on many threads, in the order of a walk.

The thread that iterates over `Run.events` walks the directories and hands out batches of names; the others
judge them. What they share is in `Run`, under its lock, or a queue: `_batches` from the walk to the threads,
`_found` back. Threads are daemons and are not waited for beyond a moment: one that hangs in a dead mount
keeps nobody from leaving.

Held in memory: the batches under way, and 16 bytes for a file whose layout no manifest tells.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field

from fskv.index.scan import NUM_SHARDS, OPEN_SHARD, Records, Shard, file_name, shard_path
from fskv.namespace import ChunkName, chunk_file, parse_chunk_file

from ..root_view import FileOf, Namespace, Unlistable
from .choose import EVERYTHING, NUM_BUCKETS, Subset
from .expect import Census, Expected, expected_of
from .judge import Finding, Reader, Stopped, Verdict, judge

_BATCH_FILES = 32
_BATCH_NBYTES = 64 << 20
_TICK_S = 0.1
# A thread that comes back from a read waits for the interpreter, behind whoever computes: at most this long.
# With Python's 5 ms the same reads ran at 0.77 of a plain read's rate, with this at 0.87 (2 busy cores).
_SWITCH_S = 0.0005
_LEAVE_S = 5.0  # what is being read may be finished; a disk that hangs is not waited for


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be judged, and how."""

    spaces: Sequence[Namespace]
    rows: bool = False  # read the payload of the files in `subset`
    subset: Subset = EVERYTHING
    threads: int = 8
    deadline: float | None = None  # on time.monotonic
    start: tuple[int, int] = (0, 0)  # (position in spaces, shard) to begin with
    direct: bool = True


@dataclass(slots=True)
class Tally:
    """What was done so far."""

    files: int = 0  # judged, those that vanished included
    data_files: int = 0  # of them those whose rows were read
    nbytes_read: int = 0
    done_nbytes: int = 0  # of the files judged, as the walk saw them: for progress
    findings: Counter[Finding] = field(default_factory=Counter)
    foreign: int = 0
    parts: int = 0
    unlistable: int = 0

    def add(self, other: Tally) -> None:
        self.files += other.files
        self.data_files += other.data_files
        self.nbytes_read += other.nbytes_read
        self.done_nbytes += other.done_nbytes
        self.findings.update(other.findings)


@dataclass(frozen=True, slots=True)
class Bad(FileOf):
    """A file that is not as it should be."""

    finding: Finding
    reason: str
    nbytes: int | None  # length
    alone: bool = True  # judged by itself; not because others of its group are different


@dataclass(frozen=True, slots=True)
class _Batch:
    number: int
    space_idx: int
    shard: int
    records: Records


class Run:
    """One pass; `tally` and `resume` may be looked at between events and afterwards."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.tally = Tally()
        self.expected = [expected_of(one.identity, one.digest16) for one in job.spaces]
        self._census = [Census() for _ in job.spaces]
        self._lock = threading.Lock()  # orders tally, census and under_way
        self._batches: queue.Queue[_Batch | None] = queue.Queue(2 * job.threads)
        self._found: queue.SimpleQueue[Bad | BaseException | None] = queue.SimpleQueue()
        self._under_way: dict[int, tuple[int, int]] = {}
        self._next = job.start  # where the walk is
        self._stop = threading.Event()
        self._walked = False
        self._num_ended = 0  # threads; of who iterates
        self.started = time.monotonic()
        self.seconds = 0.0

    # --- the walk: whoever iterates -------------------------------------------------------

    def events(self) -> Generator[Bad | Unlistable | None]:
        """Yield what is found, and None several times a second. Close it to stop."""
        self.started = time.monotonic()
        switch_s = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_S)
        threads = [
            threading.Thread(target=self._work, name=f"fskv-verify-{i}", daemon=True)
            for i in range(self.job.threads)
        ]
        for thread in threads:
            thread.start()
        try:
            for item in self._walk():
                if isinstance(item, Unlistable):
                    yield item
                    continue
                while not self._hand_out(item):
                    yield from self._drain()
                yield from self._drain()
                if self._out_of_time():
                    break
            else:
                self._walked = True
            for _ in threads:
                while not self._hand_out(None):
                    yield from self._drain()
            while self._num_ended < len(threads) and not self._is_overdue():
                yield from self._drain(_TICK_S)
            yield from self._drain()
            if self.complete:
                yield from self._odd()
        finally:
            self._stop.set()
            self.seconds = time.monotonic() - self.started
            end = time.monotonic() + _LEAVE_S
            for thread in threads:
                with contextlib.suppress(queue.Full):
                    self._batches.put_nowait(None)
                thread.join(max(0.0, end - time.monotonic()))
            sys.setswitchinterval(switch_s)

    @property
    def complete(self) -> bool:
        return self._walked and not self._under_way

    @property
    def resume(self) -> tuple[Namespace, int] | None:
        """Return the first directory that is not done; None when all are."""
        with self._lock:
            first = min(
                [*self._under_way.values(), *([] if self._walked else [self._next])], default=None
            )
        if first is None:
            return None
        return self.job.spaces[first[0]], first[1]

    def _out_of_time(self) -> bool:
        if self.job.deadline is not None and time.monotonic() >= self.job.deadline:
            self._stop.set()
        return self._stop.is_set()

    def _is_overdue(self) -> bool:
        self._out_of_time()
        deadline = self.job.deadline
        return deadline is not None and time.monotonic() > deadline + _LEAVE_S

    def _hand_out(self, batch: _Batch | None) -> bool:
        """Queue a batch; False to be asked again. After a stop batches are dropped: nobody takes them."""
        try:
            self._batches.put(batch, timeout=_TICK_S)
        except queue.Full:
            return self._out_of_time()
        return True

    def _drain(self, wait_s: float = 0.0) -> Iterator[Bad | None]:
        yield None
        try:
            found = self._found.get(timeout=wait_s) if wait_s else self._found.get_nowait()
            while True:
                if isinstance(found, BaseException):
                    raise found
                if found is None:
                    self._num_ended += 1
                else:
                    yield found
                found = self._found.get_nowait()
        except queue.Empty:
            return

    def _walk(self) -> Iterator[_Batch | Unlistable]:
        number = 0
        for space_idx, shard in walk(self.job.spaces, self.job.start):
            if isinstance(shard, Unlistable):
                self.tally.unlistable += 1
                yield shard
                continue
            with self._lock:
                self._next = space_idx, shard.idx
                self.tally.foreign += shard.num_foreign
                self.tally.parts += len(shard.parts)
            for records in _pieces(shard.records):
                number += 1
                with self._lock:
                    self._under_way[number] = space_idx, shard.idx
                yield _Batch(number, space_idx, shard.idx, records)
            with self._lock:
                self._next = space_idx, shard.idx + 1

    def _odd(self) -> Iterator[Bad]:
        for space, census in zip(self.job.spaces, self._census, strict=True):
            for (group_idx, rank), number in census.uncounted.items():
                what = f"{space.path}: group {group_idx}" + (
                    f" rank {rank}" if rank is not None else ""
                )
                raise OSError(
                    f"{what}: {number} files of too many different layouts to compare them"
                )
            for chunk, why in census.odd():
                name = chunk_file(*chunk)
                self.tally.findings[Finding.STALE] += 1
                self.tally.findings[Finding.OK] -= 1
                yield Bad(space, name, Finding.STALE, why, None, alone=False)

    # --- the judges: each on a thread of its own --------------------------------------------

    def _work(self) -> None:
        try:
            reader = Reader(self._stop.is_set, direct=self.job.direct)
            while (batch := self._batches.get()) is not None:
                if self._stop.is_set():
                    continue
                if self._judge_batch(reader, batch):
                    with self._lock:
                        del self._under_way[batch.number]
        except BaseException as error:  # a bug of ours must end the command, not a thread
            self._found.put(error)
            self._stop.set()
        finally:
            self._found.put(None)  # this thread ends

    def _judge_batch(self, reader: Reader, batch: _Batch) -> bool:
        """Judge the files of a batch; False when it was stopped before its end."""
        space = self.job.spaces[batch.space_idx]
        expected = self.expected[batch.space_idx]
        with contextlib.ExitStack() as closing:
            try:
                dir_fd = os.open(shard_path(space.path, batch.shard), OPEN_SHARD)
                closing.callback(os.close, dir_fd)
            except OSError:
                dir_fd = None  # gone, or another thing now: each file says so itself
            for record in batch.records:
                if self._stop.is_set():
                    return False
                try:
                    self._judge_file(reader, space, expected, batch, record, dir_fd)
                except Stopped:
                    return False
        return True

    def _judge_file(
        self,
        reader: Reader,
        space: Namespace,
        expected: Expected,
        batch: _Batch,
        record: object,
        dir_fd: int | None,
    ) -> None:
        name = file_name(record)
        rows = self.job.rows and self.job.subset.holds(space.digest16, name)
        chunk = parse_chunk_file(name)
        path = name if dir_fd is not None else f"{shard_path(space.path, batch.shard)}/{name}"
        verdict = judge(reader, path, dir_fd=dir_fd, chunk=chunk, expected=expected, rows=rows)
        self._count(batch.space_idx, record, chunk, verdict, rows)
        if verdict.bad:
            nbytes = None if verdict.info is None else verdict.info.st_size
            self._found.put(Bad(space, name, verdict.finding, verdict.reason, nbytes))

    def _count(
        self,
        space_idx: int,
        record: object,
        chunk: ChunkName | None,
        verdict: Verdict,
        rows: bool,
    ) -> None:
        nbytes = int(record["nbytes"])  # type: ignore[index]
        with self._lock:
            tally = self.tally
            tally.files += 1
            unread = verdict.finding in (Finding.VANISHED, Finding.UNREADABLE)
            tally.data_files += rows and not unread
            tally.nbytes_read += verdict.nbytes_read
            tally.done_nbytes += nbytes if rows or not self.job.rows else 0
            tally.findings[verdict.finding] += 1
            header = verdict.header
            if verdict.finding is not Finding.OK or header is None or chunk is None:
                return
            if self.expected[space_idx].layout(chunk) is None:
                self._census[space_idx].add(chunk, header)


# --- the walk ---------------------------------------------------------------------------


def walk(
    spaces: Sequence[Namespace], start: tuple[int, int] = (0, 0)
) -> Iterator[tuple[int, Shard | Unlistable]]:
    """List the directories of namespaces in order, from a place on."""
    for space_idx, space in enumerate(spaces):
        if space_idx < start[0]:
            continue
        first = start[1] if space_idx == start[0] else 0
        for shard in space.walk(first) if first < NUM_SHARDS else ():
            yield space_idx, shard


def _pieces(records: Records) -> Iterator[Records]:
    """Cut a directory's files into batches, so that a large one does not keep one thread busy alone."""
    first = nbytes = 0
    for at in range(len(records)):
        nbytes += int(records["nbytes"][at])
        if at + 1 - first == _BATCH_FILES or nbytes >= _BATCH_NBYTES:
            yield records[first : at + 1]
            first, nbytes = at + 1, 0
    if first < len(records):
        yield records[first:]


@dataclass(slots=True)
class Survey:
    """What a walk says of the work before it is done: files, and the bytes that will be read."""

    files: int = 0
    nbytes: int = 0
    by_bucket: list[int] = field(default_factory=list)


def survey(job: Job, tick: Callable[[Survey], object] = lambda _: None) -> Survey:
    """Count what a job will have to do; for a share by size, by how the files are drawn."""
    found = Survey(by_bucket=[0] * NUM_BUCKETS if job.subset.nbytes is not None else [])
    whole = job.subset == EVERYTHING
    for space_idx, shard in walk(job.spaces, job.start):
        if isinstance(shard, Unlistable):
            continue
        digest16 = job.spaces[space_idx].digest16
        found.files += len(shard.records)
        if whole:
            found.nbytes += int(shard.records["nbytes"].sum())
        else:
            for record in shard.records:
                name, nbytes = file_name(record), int(record["nbytes"])
                if found.by_bucket:
                    found.by_bucket[job.subset.bucket(digest16, name)] += nbytes
                elif job.subset.holds(digest16, name):
                    found.nbytes += nbytes
        tick(found)
    return found
