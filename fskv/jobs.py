"""Runs the engine's store and load jobs on I/O threads, each within its deadline.

A job is what the engine asked for in one call: chunks of one request. Its chunks are tasks that run in
parallel. The engine's thread calls submit_*, poll and wait, and none of them ever waits for a disk:

- a load job is reported when all its chunks have ended, or at its deadline; failed, if one of them was
  not good. A bad chunk does not end the others: all that is bad is found, reported and stored again in
  one round. From the report on no late thread can write a page: `_Job.enter` refuses it.
- a store job is reported when its pages have been gathered, not when they are written: the pages are free
  again. Writing goes on; its outcome arrives later through `take_outcomes`.
- `wait` returns when the pages of the given jobs are neither read nor written any more. It gathers what it
  can into free slots and cancels the rest.

Threads: one lock (`_lock`) orders the counters and the outcome list; each job has its own (`_Job.lock`).
Lock order: job before runner, never the other way round.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fskv.breaker import Breaker
from fskv.config import Deadline
from fskv.gds_io import Slot, SlotPool, Transport
from fskv.span_plan import ChunkPlan
from fskv.store import ChunkStore
from fskv.threads import HangProofPool, Task
from fskv.types import ChunkId, Status

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChunkRequest:
    """One chunk of a job: which, and what of it goes where."""

    chunk: ChunkId
    plan: ChunkPlan


@dataclass(frozen=True, slots=True)
class JobResult:
    """A job the engine may consider done. `failed` is only ever true for loads."""

    job_id: int
    is_load: bool
    failed: bool
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ChunkOutcome:
    """How one chunk ended; for stores this comes after the job was reported."""

    chunk: ChunkId
    is_load: bool
    status: Status
    nbytes: int
    seconds: float


class _Job:
    """Shared by the engine's thread and the I/O threads; `lock` guards every field below it."""

    def __init__(
        self, job_id: int, is_load: bool, submitted_at: float, allowed_s: float, ready: Any
    ) -> None:
        self.job_id = job_id
        self.is_load = is_load
        self.submitted_at = submitted_at
        self.deadline_at = submitted_at + allowed_s
        self.ready = ready
        self.tasks: list[_ChunkTask] = []
        self.lock = threading.Condition()
        self.abandoned = False
        self.num_in_pages = 0  # threads that are copying from or into KV pages right now
        self.num_open = 0  # chunks whose pages are still needed
        self.failed = False
        self.nbytes = 0

    def enter(self) -> bool:
        """Ask to touch the job's KV pages; False when the job was given up. Pair with `leave`."""
        with self.lock:
            if self.abandoned:
                return False
            self.num_in_pages += 1
            return True

    def leave(self) -> None:
        with self.lock:
            self.num_in_pages -= 1
            self.lock.notify_all()

    def abandon(self) -> None:
        """From the return on, no thread touches the job's KV pages. Waits for memory copies only."""
        with self.lock:
            self.abandoned = True
            while self.num_in_pages:
                self.lock.wait()


class _ChunkTask:
    """One chunk of a job on its way; `closed` and `slot` change under the job's lock."""

    __slots__ = ("closed", "job", "pool_task", "reported", "request", "slot", "started_at")

    def __init__(self, job: _Job, request: ChunkRequest) -> None:
        self.job = job
        self.request = request
        self.pool_task: Task | None = None
        self.started_at: float | None = None
        self.slot: Slot | None = None  # set when the pages were gathered ahead, by wait()
        self.closed = False  # the KV pages are not needed for this chunk any more
        self.reported = False  # the outcome is known


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
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Needs num_slots > num_threads; what is above serves replaced threads and wait()."""
        if num_slots <= num_threads:
            raise ValueError(f"{num_slots} slots for {num_threads} threads")
        self._store = store
        self._transport = transport
        self._deadline = deadline
        self._breaker = breaker
        self._clock = clock
        self._max_queued = max_queued_chunks
        # A hung thread keeps its slot (parked). Half of the spare slots may be lost that way.
        max_hung = max(1, min(num_threads * 2, (num_slots - num_threads) // 2))
        self._reserved_slots = min(num_slots, num_threads + max_hung)
        self._slots = SlotPool(transport, num_slots)
        self._pool = HangProofPool("fskv-io", num_threads, max_hung)
        self._jobs: dict[int, _Job] = {}  # engine's thread only
        self._lock = threading.Lock()
        self._open_stores: set[_ChunkTask] = set()  # queued or being written
        self._running: set[_ChunkTask] = set()  # on a thread, also after their job was given up
        self._results: list[JobResult] = []
        self._outcomes: list[ChunkOutcome] = []

    # --- the engine's side ----------------------------------------------------------------

    def submit_load(self, job_id: int, requests: Sequence[ChunkRequest], ready: Any) -> None:
        """Start a load; all its chunks are read in parallel, ahead of any store.

        `ready` is an event after which no kernel writes the pages any more, or None.
        """
        nbytes = sum(self._file_nbytes(r) for r in requests)
        job = _Job(job_id, True, self._clock(), self._deadline.for_nbytes(nbytes), ready)
        for task in self._begin(job, requests):
            task.pool_task = self._pool.submit(partial(self._run, task), urgent=True)

    def submit_store(self, job_id: int, requests: Sequence[ChunkRequest], ready: Any) -> None:
        """Start a store; `ready` is an event of the stream that writes the pages, or None.

        Chunks beyond the queue's limit are skipped and counted.
        """
        job = _Job(job_id, False, self._clock(), self._deadline.max_s, ready)
        for task in self._begin(job, requests):
            plan = task.request.plan
            with self._lock:
                # Blocks after the plan's last one would be whatever the slot held before.
                skip = (
                    len(self._open_stores) >= self._max_queued
                    or plan.first_block + plan.num_blocks < plan.layout.num_blocks
                )
                if not skip:
                    self._open_stores.add(task)
            if skip:
                self._close(task, Status.SKIPPED, 0, 0.0)
                self._finish_store(task, Status.SKIPPED, 0.0)
            else:
                task.pool_task = self._pool.submit(partial(self._run, task))

    def _begin(self, job: _Job, requests: Sequence[ChunkRequest]) -> list[_ChunkTask]:
        """Register a job and return the tasks to run: none, if it has ended at once."""
        job.tasks = [_ChunkTask(job, request) for request in requests]
        job.num_open = len(job.tasks)
        self._jobs[job.job_id] = job
        if not job.tasks:
            self._report(job)
        elif not self._breaker.allows():
            self._give_up(job, Status.BREAKER)
            return []
        return job.tasks

    def poll(self) -> list[JobResult]:
        """Enforce the deadlines and return the jobs that became reportable since the last call."""
        now = self._clock()
        for job in list(self._jobs.values()):
            if now >= job.deadline_at:
                self._give_up(job, Status.TIMED_OUT if job.is_load else Status.SKIPPED)
        self._write_off_hung(now)
        with self._lock:
            results, self._results = self._results, []
        for result in results:
            self._jobs.pop(result.job_id, None)
        return results

    def wait(self, job_ids: Iterable[int]) -> None:
        """Return when the KV pages of these jobs are free; never waits for a disk.

        Stores are gathered into spare slots as far as those reach, the rest is cancelled; loads are
        given up, so that they fail and are recomputed.
        """
        for job in [self._jobs[j] for j in job_ids if j in self._jobs]:
            if job.is_load:
                self._give_up(job, Status.SKIPPED)
                continue
            for task in job.tasks:
                self._gather_ahead(task)
            self._give_up(job, Status.SKIPPED)

    def take_outcomes(self) -> list[ChunkOutcome]:
        """Return what became of single chunks since the last call."""
        with self._lock:
            outcomes, self._outcomes = self._outcomes, []
        return outcomes

    @property
    def num_slots_used(self) -> int:
        """Slots in use, parked ones included."""
        return self._slots.num_used

    @property
    def num_threads_hung(self) -> int:
        return self._pool.num_hung

    def shutdown(self, timeout_s: float) -> None:
        """Give stores `timeout_s` to finish, then leave. Hung threads are never waited for."""
        end = self._clock() + timeout_s
        while self._clock() < end:
            with self._lock:
                if all(task.reported for task in self._open_stores):  # the others hang
                    break
            time.sleep(0.01)
        for job in list(self._jobs.values()):
            self._give_up(job, Status.SKIPPED)
        self._pool.close()

    # --- the I/O threads' side ------------------------------------------------------------

    def _run(self, task: _ChunkTask) -> None:
        task.started_at = self._clock()
        with self._lock:
            self._running.add(task)
        try:
            (self._load if task.job.is_load else self._store_chunk)(task, task.started_at)
        finally:
            with self._lock:
                self._running.discard(task)

    def _load(self, task: _ChunkTask, start: float) -> None:
        job, request = task.job, task.request
        if job.abandoned:
            return
        slot = self._slots.take()
        if slot is None:  # every slot is parked: the root hangs
            self._close(task, Status.TIMED_OUT, 0, 0.0)
            return
        try:
            plan = request.plan
            status = self._store.get(request.chunk, plan.first_block, plan.num_blocks, slot)
            if status is Status.OK:
                if not job.enter():
                    return
                try:
                    base = self._store.layout(request.chunk.group_idx).header_nbytes
                    self._transport.scatter(slot, base, plan.spans, job.ready)
                finally:
                    job.leave()
        except Exception:
            # A bug must cost this load, not the thread and not the request.
            logger.exception("load of %s", request.chunk)
            status = Status.IO_ERROR
        finally:
            self._slots.give_back(slot)
        self._close(task, status, self._span_nbytes(request), self._clock() - start)

    def _store_chunk(self, task: _ChunkTask, start: float) -> None:
        status = Status.SKIPPED
        try:
            if task.slot is None and not self._gather(task, self._slots.take()):
                return
            assert task.slot is not None
            status = self._store.put(task.request.chunk, task.request.plan.first_block, task.slot)
        except Exception:
            logger.exception("store of %s", task.request.chunk)
            status = Status.IO_ERROR
        finally:
            if task.slot is not None:
                self._slots.give_back(task.slot)
            self._close(task, Status.SKIPPED, 0, 0.0)  # only matters when gathering raised
            self._finish_store(task, status, self._clock() - start)

    def _gather(self, task: _ChunkTask, slot: Slot | None) -> bool:
        """Copy the task's pages into `slot` and close it; False when it was cancelled before."""
        if slot is None:
            self._close(task, Status.SKIPPED, 0, 0.0)
            return False
        job = task.job
        if not job.enter():
            self._slots.give_back(slot)
            return False
        try:
            with job.lock:
                already_closed = task.closed
            if not already_closed:
                base = self._store.layout(task.request.chunk.group_idx).header_nbytes
                self._transport.gather(task.request.plan.spans, slot, base, job.ready)
                task.slot = slot
        finally:
            if task.slot is not slot:
                self._slots.give_back(slot)
            job.leave()
        if task.slot is not slot:
            return False
        self._close(task, None, self._span_nbytes(task.request), 0.0)
        return True

    # --- shared ---------------------------------------------------------------------------

    def _gather_ahead(self, task: _ChunkTask) -> None:
        """On the engine's thread: free the pages of a queued store now, if a spare slot is there."""
        if task.closed or task.pool_task is None or not self._pool.cancel(task.pool_task):
            return  # its pages are gathered, being gathered, or were never taken
        status = Status.SKIPPED
        slot = self._slots.take(keep_free=self._reserved_slots)
        try:
            if slot is not None and self._gather(task, slot):
                task.pool_task = self._pool.submit(partial(self._run, task))
                self._pool.hasten(task.pool_task)
                return
        except Exception:
            logger.exception("gather of %s", task.request.chunk)
            status = Status.IO_ERROR
        self._close(task, status, 0, 0.0)
        self._finish_store(task, status, 0.0)

    def _give_up(self, job: _Job, status: Status) -> None:
        """Free the job's pages: abandon it and close its open chunks with `status`."""
        job.abandon()
        begun = False
        for task in job.tasks:
            if task.closed:
                continue
            begun |= task.started_at is not None
            started = task.pool_task is not None and not self._pool.cancel(task.pool_task)
            self._close(task, status, 0, self._clock() - job.submitted_at)
            if not job.is_load and not started:
                self._finish_store(task, status, 0.0)
        if status is Status.TIMED_OUT and not begun and self._pool.num_hung:
            self._breaker.record(status)  # no chunk got a thread, because threads hang: one sign

    def _close(self, task: _ChunkTask, status: Status | None, nbytes: int, seconds: float) -> None:
        """The chunk's pages are not needed any more. `status` is None for a store that goes on writing."""
        job = task.job
        with job.lock:
            if task.closed:
                return
            task.closed = True
            job.num_open -= 1
            job.failed |= job.is_load and status is not Status.OK
            job.nbytes += nbytes if status in (Status.OK, None) else 0
            last = job.num_open == 0
        if job.is_load and status is not None:
            self._outcome(task, status, nbytes if status is Status.OK else 0, seconds)
        if last:
            self._report(job)

    def _finish_store(self, task: _ChunkTask, status: Status, seconds: float) -> None:
        with self._lock:
            self._open_stores.discard(task)
        nbytes = self._file_nbytes(task.request) if status is Status.OK else 0
        self._outcome(task, status, nbytes, seconds)

    def _outcome(self, task: _ChunkTask, status: Status, nbytes: int, seconds: float) -> None:
        with self._lock:
            if task.reported:
                return
            task.reported = True
            self._outcomes.append(
                ChunkOutcome(task.request.chunk, task.job.is_load, status, nbytes, seconds)
            )
        if task.started_at is not None:  # what never got a thread says nothing about the disk
            self._breaker.record(status)

    def _report(self, job: _Job) -> None:
        seconds = self._clock() - job.submitted_at
        with self._lock:
            self._results.append(
                JobResult(job.job_id, job.is_load, job.failed, job.nbytes, seconds)
            )

    def _write_off_hung(self, now: float) -> None:
        """Replace the threads of transfers that are past their deadline, whatever became of the job."""
        with self._lock:
            running = list(self._running)
        for task in running:
            if task.started_at is None or task.pool_task is None:
                continue
            allowed = self._deadline.for_nbytes(self._file_nbytes(task.request))
            if now - task.started_at > allowed:
                self._pool.write_off(task.pool_task)
                if not task.job.is_load:
                    self._outcome(task, Status.TIMED_OUT, 0, now - task.started_at)

    def _file_nbytes(self, request: ChunkRequest) -> int:
        return self._store.layout(request.chunk.group_idx).file_nbytes

    @staticmethod
    def _span_nbytes(request: ChunkRequest) -> int:
        return sum(span.nbytes for span in request.plan.spans)
