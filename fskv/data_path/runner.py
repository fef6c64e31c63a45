"""Runs the engine's store and load jobs on I/O threads, each within its deadline.

A job is what the engine asked for in one call: files of one request's chunks. Each file is a task, and the
tasks of a job run in parallel. Three facts end a task, each of them once:

    store   queued -> gathering -> writing -> done
                               |           |
                       the pages are free  the slot is free, the outcome is known

    load    queued -> reading, checking -> scattering -> done
                                                      |
                                      the pages are free, the outcome is known; its thread keeps its slot

A task that is abandoned frees its pages at once, wherever it stands, and its outcome is known. The slot of a
thread that hangs is free when its call returns.

The engine's thread calls submit_*, poll and wait, and none of them ever waits for a disk:

- A load job is reported when the pages of all its tasks are free, or at its deadline. `JobResult.bad` names
the files that were not good. A bad file does not end the others: all that is bad is found, reported and
stored again in one round. From the report on no late thread can write a page: the job's `Guard` refuses it.
- A store job is reported when its pages are free, not when its files are written. Writing goes on; what
became of it arrives later through `take_outcomes`. - `wait` returns when the pages of the given jobs are
neither read nor written any more. It gathers what it can into free slots and cancels the rest. - `drop` does
the same for all jobs at once and gathers nothing: the engine has given its KV up.

Where the transport allows it, an I/O thread does all this in `fskv._native` without entering the interpreter
and comes back only with a chunk for which something is amiss; that chunk is done again here, from the start.
`poll` collects what was done there.

Threads: one lock (`_lock`) orders the counters and the outcome list; each job has its own (`Job.lock`), and
a guard over its KV pages. Lock order: job before runner, never the other way round.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fskv.config import Deadline
from fskv.data_path.breaker import Breaker
from fskv.data_path.job import (
    NO_LIMIT,
    FileMove,
    FileOutcome,
    FileTask,
    Job,
    JobResult,
    LoadLimit,
    NativeEvent,
)
from fskv.data_path.store import ChunkStore
from fskv.data_path.threads import Guard, HangProofPool, Queue, TaskQueue
from fskv.transports import numa
from fskv.transports.protocol import SlotPool, Transport
from fskv.types import Status

if TYPE_CHECKING:
    from fskv import _native

logger = logging.getLogger(__name__)

_STORE_STATUS = {
    NativeEvent.STORED: Status.OK,
    NativeEvent.EXISTS: Status.EXISTS,
    NativeEvent.ABANDONED: Status.SKIPPED,
}
_WRITTEN = {0: Status.OK, 1: Status.EXISTS}  # ChunkResult in csrc/chunk_io.h; else nothing was done

_PACE = 1 / 16  # weight of one store in the average of how long one takes


class JobRunner:
    """See the module docstring. Constructed and called by one engine worker."""

    def __init__(
        self,
        store: ChunkStore,
        transport: Transport,
        *,
        num_threads: int,
        num_slots: int,
        max_queued_chunks: int,
        deadline: Deadline,
        breaker: Breaker,
        store_queue_s: float = math.inf,
        cpus: frozenset[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Needs num_slots > num_threads; what is above serves replaced threads and wait().

        The queue takes max_queued_chunks, or what can be stored in `store_queue_s` if that is less. I/O
        threads run on `cpus`, anywhere if None.
        """
        if num_slots <= num_threads:
            raise ValueError(f"{num_slots} slots for {num_threads} threads")
        self._store = store
        self._transport = transport
        self._deadline = deadline
        self._breaker = breaker
        self._clock = clock
        self._num_threads = num_threads
        self._max_queued = max_queued_chunks
        self._store_queue_s = store_queue_s
        self._chunk_store_s = 0.0  # a thread's time per store, averaged; engine's thread only
        self._cpus = cpus
        # A hung thread keeps its slot (parked). Half of the spare slots may be lost that way.
        max_hung = max(1, min(num_threads * 2, (num_slots - num_threads) // 2))
        self._max_ahead = max(0, num_slots - num_threads - max_hung)
        self._slots = SlotPool(transport, num_slots)
        # While loads run, stores leave them half of the threads.
        beside = max(1, num_threads // 2)
        native = transport.native
        queue: Queue = native.queue(beside) if native else TaskQueue(beside, clock)
        self._make_guard: Callable[[], Guard | _native.Guard] = native.guard if native else Guard
        self._pool = HangProofPool(
            "fskv-io", num_threads, max_hung, self._run, queue=queue, context=self._own_slot
        )
        self._jobs: dict[int, Job] = {}  # engine's thread only
        self._lock = threading.Lock()  # guards what follows
        self._open_stores: set[FileTask] = set()  # queued or being written
        self._num_ahead = 0  # slots in use for pages that were gathered ahead
        self._results: list[JobResult] = []
        self._outcomes: list[FileOutcome] = []

    # --- the engine's side ----------------------------------------------------------------

    def submit_load(
        self,
        job_id: int,
        moves: Sequence[FileMove],
        ready: Any,
        limit: LoadLimit = NO_LIMIT,
    ) -> None:
        """Start a load; all its chunks are read in parallel, ahead of any store.

        `ready` is an event after which no kernel writes the pages any more, or None. A load that is given up
        by its `limit`, before its deadline, was not worth more time: nothing is held against its chunks.
        """
        deadline_s = self._deadline.for_nbytes(sum(self._file_nbytes(r) for r in moves))
        too_late = Status.SKIPPED if limit.allowed_s < deadline_s else Status.TIMED_OUT
        allowed_s = min(limit.allowed_s, deadline_s)
        guard = self._make_guard()
        job = Job(job_id, self._clock(), allowed_s, ready, guard, too_late, limit.look_s)
        self._queue(self._begin(job, moves))

    def submit_store(self, job_id: int, moves: Sequence[FileMove], ready: Any) -> None:
        """Start a store, after `ready`; chunks beyond the queue's limit are skipped and counted."""
        queued = []
        limit = self._queue_limit()
        job = Job(job_id, self._clock(), self._deadline.max_s, ready, self._make_guard())
        for task in self._begin(job, moves):
            plan = task.move.plan
            with self._lock:
                # Blocks after the plan's last one would be whatever the slot held before.
                skip = (
                    len(self._open_stores) >= limit
                    or plan.first_block + plan.num_blocks < plan.layout.num_blocks
                )
                if not skip:
                    self._open_stores.add(task)
            if skip:
                self._pages_free(task, Status.SKIPPED, 0, 0.0)
                self._store_ended(task, Status.SKIPPED, 0.0)
            else:
                queued.append(task)
        self._queue(queued)

    def _queue_limit(self) -> int:
        seconds = self._chunk_store_s / self._num_threads
        if seconds * self._max_queued <= self._store_queue_s:
            return self._max_queued
        return min(self._max_queued, max(2 * self._num_threads, int(self._store_queue_s / seconds)))

    def _begin(self, job: Job, moves: Sequence[FileMove]) -> list[FileTask]:
        """Register a job; return the tasks to run, if any. ValueError: its id is that of an open one."""
        if (
            job.job_id in self._jobs
        ):  # its report would take this one's place, and its pages be nobody's
            raise ValueError(f"job {job.job_id} is under way")
        job.tasks = [FileTask(job, move) for move in moves]
        job.num_open = len(job.tasks)
        self._jobs[job.job_id] = job
        if not job.tasks:
            self._report(job)
        elif not self._breaker.allows():
            self._abandon(job, Status.BREAKER)
            return []
        return job.tasks

    def _queue(self, tasks: Sequence[FileTask]) -> None:
        good = []
        for task in tasks:
            job, move = task.job, task.move
            try:
                task.queued = self._store.transfer(
                    task, move.file, move.plan, job.guard, is_load=job.is_load
                )
                if task.slot is not None and task.queued.native:
                    task.queued.use_slot(task.slot)
            except Exception:
                # A bug must cost this chunk, not the engine's step.
                logger.exception("%s of %s", "load" if job.is_load else "store", move.file)
                self._pages_free(task, Status.IO_ERROR, 0, 0.0)
                if not job.is_load:
                    self._slot_free(task, Status.IO_ERROR, 0.0)
            else:
                good.append(task.queued)
        if good:
            self._pool.submit(*good)

    def poll(self) -> list[JobResult]:
        """Enforce the deadlines and return the jobs that became reportable since the last call."""
        self._collect()
        now = self._clock()
        for job in list(self._jobs.values()):
            if job.overdue(now):
                self._abandon(job, job.too_late or Status.SKIPPED)
        self._write_off_hung(now)
        with self._lock:
            results, self._results = self._results, []
        for result in results:
            if result.job_id in self._jobs:
                job = self._jobs.pop(result.job_id)
                job.tasks = []  # those that go on know their job; the circle would wait for the collector
        return results

    def wait(self, job_ids: Iterable[int]) -> None:
        """Return when the KV pages of these jobs are free; never waits for a disk.

        Stores are gathered into spare slots as far as those reach, the rest is cancelled; loads are
        given up, so that they fail and are recomputed.
        """
        self._collect()
        for job in [self._jobs[j] for j in job_ids if j in self._jobs]:
            if job.is_load:
                self._abandon(job, Status.SKIPPED)
                continue
            for task in job.tasks:
                self._gather_ahead(task)
            self._abandon(job, Status.SKIPPED)

    def drop(self) -> None:
        """Give every job up: from the return on none of their KV pages is read or written.

        Waits for memory copies only. Loads fail. Of stores, what a thread has gathered is still written, and
        all that waits is dropped, what wait() has gathered included.
        """
        self._collect()
        for job in list(self._jobs.values()):
            self._abandon(job, Status.SKIPPED)
        with self._lock:
            staged = list(self._open_stores)
        for task in staged:
            if self._pool.queue.cancel(task.queued):
                self._slot_free(task, Status.SKIPPED, 0.0)

    def take_outcomes(self) -> list[FileOutcome]:
        """Return what became of single chunks since the last call."""
        self._collect()
        with self._lock:
            outcomes, self._outcomes = self._outcomes, []
        for outcome in outcomes:
            if not outcome.is_load and outcome.status in (Status.OK, Status.TIMED_OUT):
                self._chunk_store_s += _PACE * (outcome.seconds - self._chunk_store_s)
        return outcomes

    @property
    def num_slots_used(self) -> int:
        """Slots in use, parked ones included; an idle thread's slot is not."""
        return max(0, self._slots.num_used - self._pool.num_idle)

    @property
    def num_slots_made(self) -> int:
        """Slots that there ever were; none is given back to the system."""
        return self._slots.num_made

    @property
    def num_open_stores(self) -> int:
        """Chunks that wait to be stored or are being written."""
        return len(self._open_stores)

    @property
    def num_running(self) -> int:
        """Tasks that a thread has in hand, those that hang included."""
        return len(self._pool.queue.running())

    @property
    def num_threads_hung(self) -> int:
        return self._pool.num_hung

    def shutdown(self, timeout_s: float) -> None:
        """Give stores `timeout_s` to finish, then leave. Hung threads are never waited for."""
        end = self._clock() + timeout_s
        while self._clock() < end:
            self._collect()
            with self._lock:
                if all(task.outcome_known for task in self._open_stores):  # the others hang
                    break
            time.sleep(0.01)
        for job in list(self._jobs.values()):
            self._abandon(job, Status.SKIPPED)
        self._pool.close()

    def _collect(self) -> None:
        """Take over what I/O threads did outside the interpreter."""
        for task, kind, seconds in self._pool.queue.take_events():
            event = NativeEvent(kind)
            if event is NativeEvent.GATHERED:
                self._pages_free(task, None, task.move.plan.nbytes, 0.0)
            elif event is NativeEvent.LOADED:
                self._pages_free(task, Status.OK, task.move.plan.nbytes, seconds)
            elif not task.job.is_load:
                if event is NativeEvent.STORED:
                    self._store.replaced(task.move.file)
                self._slot_free(task, _STORE_STATUS[event], seconds)

    # --- the I/O threads' side ------------------------------------------------------------

    @contextlib.contextmanager
    def _own_slot(self) -> Iterator[Any]:
        """A slot for the life of a thread; None without memory, which costs its chunks and not the engine."""
        numa.pin_thread(self._cpus)
        slot = self._slots.take()
        try:
            yield slot
        finally:
            if slot is not None:
                self._slots.give_back(slot)

    def _run(self, queued: Any, slot: Any) -> None:
        task: FileTask = queued.owner
        if slot is None:  # there was no memory for one when the thread started
            with self._own_slot() as late:
                (self._load if task.job.is_load else self._store_chunk)(task, late)
            return
        (self._load if task.job.is_load else self._store_chunk)(task, slot)

    def _load(self, task: FileTask, slot: Any) -> None:
        job, move, plan = task.job, task.move, task.move.plan
        if job.guard.abandoned:
            return
        if slot is None:
            self._pages_free(task, Status.TIMED_OUT, 0, 0.0)
            return

        def deliver() -> None:
            if job.guard.enter():  # else the job was given up, and closed
                try:
                    base = self._store.layout(move.file.group_idx).header_nbytes
                    self._transport.scatter(slot, base, plan.table, job.ready)
                finally:
                    job.guard.leave()
                self._pages_free(task, Status.OK, plan.nbytes, self._seconds(task))

        try:
            if task.queued.checked:
                deliver()
                if task.queued.old_mtime:
                    self._store.touch(move.file)
                return
            status = self._store.get(move.file, plan.first_block, plan.num_blocks, slot, deliver)
        except Exception:
            # A bug must cost this load, not the thread and not the request.
            logger.exception("load of %s", move.file)
            status = Status.IO_ERROR
        # What was delivered is closed. If the guard refused, no page was written, and whoever gave the job up
        # closes it as failed, perhaps only after this line: it must not be closed as good meanwhile.
        if status is not Status.OK:
            self._pages_free(task, status, plan.nbytes, self._seconds(task))

    def _store_chunk(self, task: FileTask, slot: Any) -> None:
        status = Status.SKIPPED
        try:
            if task.queued.gathered:
                self._pages_free(task, None, task.move.plan.nbytes, 0.0)
            elif task.slot is None and not self._gather(task, slot):
                return
            status = self._write(task, task.slot or slot)
        except Exception:
            logger.exception("store of %s", task.move.file)
            status = Status.IO_ERROR
        finally:
            self._pages_free(task, Status.SKIPPED, 0, 0.0)  # only matters when gathering raised
            self._slot_free(task, status, self._seconds(task))

    def _gather(self, task: FileTask, slot: Any) -> bool:
        """Copy the task's pages into `slot` and close it; False when it was cancelled before."""
        job = task.job
        if slot is None:
            self._pages_free(task, Status.SKIPPED, 0, 0.0)
            return False
        if not job.guard.enter():
            return False
        try:
            with job.lock:
                if task.pages_free:
                    return False
            base = self._store.layout(task.move.file.group_idx).header_nbytes
            self._transport.gather(task.move.plan.table, slot, base, job.ready)
        finally:
            job.guard.leave()
        self._pages_free(task, None, task.move.plan.nbytes, 0.0)
        return True

    def _write(self, task: FileTask, slot: Any) -> Status:
        move, queued = task.move, task.queued
        if queued.native and not queued.tried:  # pages on a device: only the gathering was Python's
            done = _WRITTEN.get(queued.write(slot))
            if done is not None:
                return done
        return self._store.put(move.file, move.plan.first_block, slot)

    def _seconds(self, task: FileTask) -> float:
        return self._clock() - (task.started_at or 0.0)

    # --- shared ---------------------------------------------------------------------------

    def _gather_ahead(self, task: FileTask) -> None:
        """On the engine's thread: free the pages of a queued store now, if a spare slot is there."""
        if task.pages_free or task.queued is None or not self._pool.queue.cancel(task.queued):
            return  # its pages are gathered, being gathered, or were never taken
        status = Status.SKIPPED
        slot = self._take_ahead()
        try:
            if slot is not None and self._gather(task, slot):
                task.slot = slot
                self._queue([task])
                self._pool.queue.hasten(task.queued)
                return
        except Exception:
            logger.exception("gather of %s", task.move.file)
            status = Status.IO_ERROR
        task.slot = slot
        self._pages_free(task, status, 0, 0.0)
        self._slot_free(task, status, 0.0)

    def _take_ahead(self) -> Any:
        with self._lock:
            if self._num_ahead >= self._max_ahead:
                return None
            self._num_ahead += 1
        slot = self._slots.take()
        if slot is None:
            with self._lock:
                self._num_ahead -= 1
        return slot

    def _abandon(self, job: Job, status: Status) -> None:
        """Free the pages of the job's tasks; those that are not free yet end with `status`."""
        job.guard.abandon()
        if all(task.pages_free for task in job.tasks):
            return  # the thread that ended the last one is about to report it
        begun = False
        for task in job.tasks:
            if task.pages_free:
                continue
            started = task.queued is not None and not self._pool.queue.cancel(task.queued)
            begun |= task.started_at is not None
            self._pages_free(task, status, 0, self._clock() - job.submitted_at)
            if not job.is_load and not started:
                self._store_ended(task, status, 0.0)
        if status is Status.TIMED_OUT and not begun and self._pool.num_hung:
            self._breaker.record(status)  # no chunk got a thread, because threads hang: one sign

    def _pages_free(
        self, task: FileTask, status: Status | None, nbytes: int, seconds: float
    ) -> None:
        """The pages of a file are not needed any more. `status` is None for a store that goes on writing."""
        job = task.job
        with job.lock:
            if task.pages_free:
                return
            task.pages_free = True
            if job.is_load and status is not Status.OK:
                job.bad.append(task.move.file)
            job.nbytes += nbytes if status in (Status.OK, None) else 0
            job.ended_at = max(job.ended_at, (task.started_at or 0.0) + seconds)
        if job.is_load and status is not None:
            self._outcome_known(task, status, nbytes if status is Status.OK else 0, seconds)
        with job.lock:  # once more, or the job might be reported before an outcome of it is known
            job.num_open -= 1
            last = job.num_open == 0
        if last:
            self._report(job)

    def _slot_free(self, task: FileTask, status: Status, seconds: float) -> None:
        """A store is over: the slot is free again, and the outcome known."""
        if task.slot is not None:
            self._slots.give_back(task.slot)
            task.slot = None
            with self._lock:
                self._num_ahead -= 1
        self._store_ended(task, status, seconds)

    def _store_ended(self, task: FileTask, status: Status, seconds: float) -> None:
        with self._lock:
            self._open_stores.discard(task)
        nbytes = self._file_nbytes(task.move) if status is Status.OK else 0
        self._outcome_known(task, status, nbytes, seconds)

    def _outcome_known(self, task: FileTask, status: Status, nbytes: int, seconds: float) -> None:
        with self._lock:
            if task.outcome_known:
                return
            task.outcome_known = True
            self._outcomes.append(
                FileOutcome(task.move.file, task.job.is_load, status, nbytes, seconds)
            )
        if task.started_at is not None:  # what never got a thread says nothing about the disk
            self._breaker.record(status)

    def _report(self, job: Job) -> None:
        result = job.result(self._clock())
        with self._lock:
            self._results.append(result)

    def _write_off_hung(self, now: float) -> None:
        """Replace the threads of transfers that are past their deadline, whatever became of the job."""
        for queued in self._pool.queue.running():
            task: FileTask | None = queued.owner
            if task is None:  # it has ended meanwhile
                continue
            allowed = self._deadline.for_nbytes(self._file_nbytes(task.move))
            if now - queued.started_at > allowed:
                self._pool.write_off(queued)
                if not task.job.is_load:
                    self._outcome_known(task, Status.TIMED_OUT, 0, now - queued.started_at)
                elif task.job.late and task.job.too_late is Status.SKIPPED:
                    # Given up before, and late it is: one sign.
                    task.job.too_late = Status.TIMED_OUT
                    self._breaker.record(Status.TIMED_OUT)

    def _file_nbytes(self, move: FileMove) -> int:
        return self._store.layout(move.file.group_idx).file_nbytes
