"""The three facts that end a task: its pages are free, its slot is free, its outcome is known. Each once.

Called by the engine's thread and by I/O threads. What they add up to is collected by the engine's thread:
results of jobs whose pages are all free, and outcomes of files. One lock orders both lists; a job's own lock
is taken before it, never after.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Generic, cast

from fskv.data_path.breaker import Breaker
from fskv.data_path.job import FileOutcome, FileTask, Job, JobResult
from fskv.transports.protocol import SlotPool, SlotT
from fskv.types import Status


class TaskEnds(Generic[SlotT]):
    """See the module docstring."""

    def __init__(
        self,
        slots: SlotPool[SlotT],
        breaker: Breaker,
        file_nbytes: Callable[[FileTask], int],
        clock: Callable[[], float],
    ) -> None:
        self._slots = slots
        self._breaker = breaker
        self._file_nbytes = file_nbytes
        self._clock = clock
        self._lock = threading.Lock()  # guards what follows
        self._open_stores: set[FileTask] = set()  # waiting, queued or being written
        self._ended: list[tuple[Job, float]] = []  # and when
        self._outcomes: list[FileOutcome] = []

    def pages_free(
        self, task: FileTask, status: Status | None, nbytes: int, seconds: float
    ) -> None:
        """The pages of a file are not needed any more. `status` is None for a store that goes on writing."""
        job = task.job
        with job.lock:
            if task.pages_free:
                return
            task.pages_free = True
            if job.unready and not task.parked and task.began_at is None:
                job.leave_disk(self._clock())
            if job.is_load and status is not Status.OK:
                job.bad.append(task.move.file)
            job.nbytes += nbytes if status in (Status.OK, None) else 0
            job.ended_at = max(job.ended_at, (task.started_at or 0.0) + seconds)
        if job.is_load and status is not None:
            self.outcome_known(task, status, nbytes if status is Status.OK else 0, seconds)
        with job.lock:  # once more, or the job might be reported before an outcome of it is known
            job.num_open -= 1
            last = job.num_open == 0
        if last:
            self.report(job)

    def read(self, task: FileTask, seconds: float) -> None:
        """A load was read in so many seconds, outside the interpreter, and waits for the job's event."""
        job, queued = task.job, task.queued
        assert queued is not None, "it was queued"
        with job.lock:
            task.began_at, task.read_s = queued.began_at, seconds
            if not task.pages_free:
                job.leave_disk((queued.began_at or 0.0) + seconds)

    def loaded(self, task: FileTask, seconds: float) -> None:
        """A load ended outside the interpreter; its thread was busy for so many seconds."""
        busy_s = seconds if task.began_at is None else task.read_s
        self.pages_free(task, Status.OK, task.move.plan.nbytes, busy_s)
        self.slot_free(task)

    def slot_free(self, task: FileTask) -> None:
        """A task is over: give back the slot that it had for itself, if it had one."""
        if task.slot is not None:
            home = cast("SlotPool[SlotT] | None", task.prefetched) or self._slots
            home.give_back(cast("SlotT", task.slot))
            task.slot = None
        if task.ahead:
            task.ahead = False
            self._slots.cancel_ahead()

    def store_over(self, task: FileTask, status: Status, seconds: float) -> None:
        """A store is over: its slot is free, and its outcome known."""
        self.slot_free(task)
        with self._lock:
            self._open_stores.discard(task)
        nbytes = self._file_nbytes(task) if status is Status.OK else 0
        self.outcome_known(task, status, nbytes, seconds)

    def lost(self, task: FileTask) -> None:
        """A task that no thread has ends with an error."""
        self.pages_free(task, Status.IO_ERROR, 0, 0.0)
        if task.job.is_load:
            self.slot_free(task)
        else:
            self.store_over(task, Status.IO_ERROR, 0.0)

    def outcome_known(self, task: FileTask, status: Status, nbytes: int, seconds: float) -> None:
        with self._lock:
            if task.outcome_known:
                return
            task.outcome_known = True
            self._outcomes.append(
                FileOutcome(task.move.file, task.job.is_load, status, nbytes, seconds)
            )
        # What never got a thread says nothing about the disk, nor what had been read before.
        if task.started_at is not None and task.prefetched is None:
            self._breaker.record(status)

    def report(self, job: Job) -> None:
        """The pages of all its tasks are free."""
        now = self._clock()
        with self._lock:
            self._ended.append((job, now))

    # --- for the engine's thread ------------------------------------------------------------

    def begin_store(self, task: FileTask, limit: int) -> bool:
        """Count a store as open; False where there are `limit` already."""
        with self._lock:
            if len(self._open_stores) >= limit:
                return False
            self._open_stores.add(task)
            return True

    @property
    def open_stores(self) -> Collection[FileTask]:
        with self._lock:
            return list(self._open_stores)

    @property
    def num_open_stores(self) -> int:
        return len(self._open_stores)

    def take_results(self) -> list[JobResult]:
        with self._lock:
            ended, self._ended = self._ended, []
        # Only now: a job that ended may have been dropped since.
        return [job.result(at) for job, at in ended]

    def take_outcomes(self) -> list[FileOutcome]:
        with self._lock:
            outcomes, self._outcomes = self._outcomes, []
        return outcomes
