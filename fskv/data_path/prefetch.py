"""Reads chunk files ahead, of requests that wait: into slots of its own, checked as a load checks them.

    wanted -> queued -> reading, checking -> held -> taken by a load, which only copies
                |               |             |
                +---------------+-------------+---> dropped: nobody waits for it, or the file is not good

It stands beside the jobs and takes nothing of theirs: its threads and its slots are its own, and it knows no
KV page. A thread begins a file only while `is_due` says no and a slot is free, and pauses until then. What
was handed over is in use until the load has copied it. A read that hangs keeps its thread and its slot and
is not replaced; when all hang, nothing is read ahead any more. While the breaker is open nothing is.

What is held was checked for the blocks from `first_block` to the chunk's end, and a load of other blocks
reads the file itself. So does one whose file is still being read.

The engine's thread calls; `_lock` guards the entries, which the threads change too.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Generic

from fskv.config import Deadline
from fskv.data_path.breaker import Breaker
from fskv.data_path.job import FileOutcome, FileTask
from fskv.data_path.store import ChunkStore
from fskv.data_path.threads import HangProofPool, Task, TaskQueue
from fskv.observe import metrics
from fskv.observe.metrics import Counters
from fskv.transports import numa
from fskv.transports.protocol import SlotPool, SlotT, Transport
from fskv.types import FileId, Status

logger = logging.getLogger(__name__)

_PAUSE_S = 0.01  # between two looks whether a load is still at the disk, or has given a slot back


class _Entry(Generic[SlotT]):
    """A file that is wanted; all but `file` and `first_block` change under the prefetcher's lock."""

    __slots__ = ("began_at", "dropped", "file", "first_block", "slot", "task", "touch")

    def __init__(self, file: FileId, first_block: int) -> None:
        self.file = file
        self.first_block = first_block
        self.task: Task[_Entry[SlotT]] = Task(self)
        self.began_at = 0.0  # when it was begun to be read
        self.slot: SlotT | None = None  # once it was read and checked
        self.touch = False  # then: the file's mtime is old
        self.dropped = False


class Prefetcher(Generic[SlotT]):
    """See the module docstring. Without slots it does nothing."""

    def __init__(
        self,
        store: ChunkStore[SlotT],
        transport: Transport[SlotT],
        *,
        num_slots: int,
        num_threads: int,
        deadline: Deadline,
        breaker: Breaker,
        counters: Counters,
        is_due: Callable[[], bool],
        cpus: frozenset[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_due`, of any thread: whether something that cannot wait is at the disk, or on its way there."""
        self._store = store
        self._transport = transport
        self._num_threads = num_threads
        self._deadline = deadline
        self._breaker = breaker
        self._counters = counters
        self._is_due = is_due
        self._cpus = cpus
        self._clock = clock
        self._slots = SlotPool(transport, num_slots)
        queue: TaskQueue[_Entry[SlotT]] = TaskQueue(clock=clock)
        self._pool = HangProofPool(
            "fskv-prefetch", num_threads, 0, queue, self._run, self._on_device
        )
        self._taking = threading.Lock()  # between the look whether a slot is free and taking it
        self._lock = threading.Lock()  # guards what follows, and the entries
        self._entries: dict[FileId, _Entry[SlotT]] = {}
        self._reading: set[_Entry[SlotT]] = set()
        self._outcomes: list[FileOutcome] = []

    # --- the engine's side ------------------------------------------------------------------

    def want(self, files: Iterable[tuple[FileId, int]]) -> None:
        """Read these ahead, in this order: (file, the first block that is needed of it)."""
        new = []
        with self._lock:
            for file, first_block in files:
                if file not in self._entries:
                    new.append(_Entry[SlotT](file, first_block))
                    self._entries[file] = new[-1]
        if new:
            self._pool.submit(*(entry.task for entry in new))

    def drop(self, files: Iterable[FileId]) -> None:
        """Nobody waits for these any more: their slots are free, or will be when they were read."""
        for file in files:
            with self._lock:
                entry = self._entries.pop(file, None)
                if entry is None:
                    continue
                entry.dropped = True
                slot, entry.slot = entry.slot, None
            self._pool.queue.cancel(entry.task)
            if slot is not None:
                self._count("dropped")
                self._slots.give_back(slot)

    def clear(self) -> None:
        """Drop all."""
        with self._lock:
            files = list(self._entries)
        self.drop(files)

    def hand_over(self, tasks: Iterable[FileTask]) -> None:
        """Give tasks of a load what they want and is held, in a slot of this pool."""
        for task in tasks:
            file, first_block = task.move.file, task.move.plan.first_block
            with self._lock:
                entry = self._entries.get(file)
                if entry is None or entry.slot is None or first_block < entry.first_block:
                    continue
                del self._entries[file]
                task.slot, entry.slot = entry.slot, None
            task.touch = entry.touch
            task.prefetched = self._slots
            self._count("used")

    def write_off_hung(self) -> None:
        """Count reads past their deadline as hung, and their files as not good. Their slots stay theirs."""
        now = self._clock()
        with self._lock:
            late = [entry for entry in self._reading if self._late(entry, now)]
            self._reading.difference_update(late)
            wanted = [entry for entry in late if not entry.dropped]
            for entry in wanted:
                del self._entries[entry.file]
                entry.dropped = True
                self._outcomes.append(FileOutcome(entry.file, True, Status.TIMED_OUT, 0, 0.0))
        for entry in late:
            self._pool.write_off(entry.task)
            self._breaker.record(Status.TIMED_OUT)

    def _late(self, entry: _Entry[SlotT], now: float) -> bool:
        nbytes = self._store.file_nbytes[entry.file.group_idx]
        return now - entry.began_at > self._deadline.for_nbytes(self._num_threads * nbytes)

    def take_outcomes(self) -> list[FileOutcome]:
        """Return the files that were found not good since the last call: as a load would, and before it."""
        with self._lock:
            outcomes, self._outcomes = self._outcomes, []
        return outcomes

    @property
    def num_slots_used(self) -> int:
        return self._slots.num_used

    @property
    def num_threads_hung(self) -> int:
        return self._pool.num_hung

    def close(self) -> None:
        """Drop all and let the threads end. Never waits for one."""
        self._pool.close()
        self.clear()

    # --- its threads ------------------------------------------------------------------------

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        numa.pin_thread(self._cpus)
        self._transport.enter_thread()
        yield

    def _run(self, task: Task[_Entry[SlotT]], _: None) -> None:
        entry = task.owner
        slot = self._wait_for_slot(entry)
        status = Status.SKIPPED
        try:
            if slot is not None:
                status = self._read(entry, slot)
        except Exception:  # a bug of ours costs what was read ahead, and no load
            logger.exception("fskv: prefetch of %s", entry.file)
        with self._lock:
            self._reading.discard(entry)
            dropped = entry.dropped
            held = status is Status.OK and not dropped
            if held:
                entry.slot = slot
            elif not dropped:
                del self._entries[entry.file]
                if status is not Status.SKIPPED:
                    self._outcomes.append(FileOutcome(entry.file, True, status, 0, 0.0))
        if slot is not None and not held:
            self._slots.give_back(slot)
        if status is not Status.SKIPPED:
            self._breaker.record(status)
        if status is Status.OK and not held:
            self._count("dropped")

    def _wait_for_slot(self, entry: _Entry[SlotT]) -> SlotT | None:
        """Return what to read into, once it is the file's turn; None: it is not to be read, or no memory."""
        while not entry.dropped:
            if not self._is_due():
                if self._breaker.open:
                    return None
                with self._taking:
                    full = self._slots.all_used
                    slot = None if full else self._slots.take()
                if not full:
                    return slot
            time.sleep(_PAUSE_S)
        return None

    def _read(self, entry: _Entry[SlotT], slot: SlotT) -> Status:
        with self._lock:
            entry.began_at = self._clock()
            self._reading.add(entry)
        first, layout = entry.first_block, self._store.layout(entry.file.group_idx)
        status, entry.touch = self._store.get(entry.file, first, layout.num_blocks - first, slot)
        return status

    def _count(self, result: str) -> None:
        self._counters.add(metrics.PREFETCHED_CHUNKS, 1, result)
