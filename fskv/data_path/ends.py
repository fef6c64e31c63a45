"""The three facts that end a task: its pages are free, its slot is free, its outcome is known. Each once.

Called by the engine's thread and by I/O threads. What they add up to is collected by the engine's thread:
results of jobs whose pages are all free, and outcomes of files. One lock orders both lists; a job's own lock
is taken before it, never after.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Generic, cast

from fskv.data_path.breaker import Breaker
from fskv.data_path.job import FileOutcome, FileTask, Job, JobResult, NativeEvent
from fskv.transports.protocol import SlotPool, SlotT
from fskv.types import Status

_STORE_STATUS: dict[int, Status] = {
    NativeEvent.STORED: Status.OK,
    NativeEvent.EXISTS: Status.EXISTS,
    NativeEvent.ABANDONED: Status.SKIPPED,
}


class TaskEnds(Generic[SlotT]):
    """See the module docstring."""

    def __init__(
        self,
        slots: SlotPool[SlotT],
        breaker: Breaker,
        file_nbytes: Mapping[int, int],
        clock: Callable[[], float],
    ) -> None:
        """`file_nbytes` are those of a chunk file of each group."""
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
            if not self._free(task, status, nbytes, seconds):
                return
        if job.is_load and status is not None:
            self.outcome_known(task, status, nbytes if status is Status.OK else 0, seconds)
        self._closed(job, 1)

    def _free(self, task: FileTask, status: Status | None, nbytes: int, seconds: float) -> bool:
        """Under the job's lock; False: they were free before. Who gets True says so to `_closed`."""
        if task.pages_free:
            return False
        job, task.pages_free = task.job, True
        if job.unready and not task.parked and task.began_at is None:
            job.leave_disk(self._clock())
        if job.is_load:
            job.ended_at = max(job.ended_at, (task.started_at or 0.0) + seconds)
            if status is not Status.OK:
                job.bad.append(task.move.file)
        if status is Status.OK or status is None:
            job.nbytes += nbytes
        return True

    def _closed(self, job: Job, num_tasks: int) -> None:
        """Count tasks whose pages are free. Not before their outcomes are known: it may report the job."""
        with job.lock:
            job.num_open -= num_tasks
            last = num_tasks > 0 and job.num_open == 0
        if last:
            self.report(job)

    def ended_outside(self, events: Iterable[tuple[FileTask, int, float]]) -> None:
        """Take over what was done outside the interpreter: (task, NativeEvent, seconds). Engine's thread.

        All at once, with few locks: this is the engine's time, as often as there are chunks.
        """
        freed: dict[Job, list[FileTask]] = {}
        over: list[tuple[FileTask, Status, float]] = []
        for task, event, seconds in events:
            if event == NativeEvent.GATHERED:
                freed.setdefault(task.job, []).append(task)
            elif event == NativeEvent.LOADED:
                freed.setdefault(task.job, []).append(task)
                task.read_s = seconds if task.began_at is None else task.read_s
                over.append((task, Status.OK, task.read_s))
            elif event == NativeEvent.READ:
                self.read(task, seconds)
            elif task.job.is_load:  # it was abandoned
                self.slot_free(task)
            else:
                over.append((task, _STORE_STATUS[event], seconds))
        for job, tasks in freed.items():
            status = Status.OK if job.is_load else None
            with job.lock:
                free = [
                    self._free(task, status, task.move.plan.nbytes, task.read_s) for task in tasks
                ]
            freed[job] = [task for task, now in zip(tasks, free, strict=True) if now]
        self._over(over)
        for job, tasks in freed.items():
            self._closed(job, len(tasks))

    def _over(self, ended: Collection[tuple[FileTask, Status, float]]) -> None:
        """Tasks ended outside the interpreter: their slots are free, and their outcomes known."""
        answered = False
        with self._lock:
            for task, status, seconds in ended:
                file, is_load, nbytes = task.move.file, task.job.is_load, 0
                if not is_load:
                    self._open_stores.discard(task)
                if task.outcome_known:
                    continue
                task.outcome_known = True
                if status is Status.OK:
                    nbytes = task.move.plan.nbytes if is_load else self._file_nbytes[file.group_idx]
                answered |= status is not Status.SKIPPED
                self._outcomes.append(FileOutcome(file, is_load, status, nbytes, seconds))
        if answered:  # by the disk: once is as good as often
            self._breaker.record(Status.OK)
        for task, _, _ in ended:
            self.slot_free(task)

    def read(self, task: FileTask, seconds: float) -> None:
        """A load was read in so many seconds, outside the interpreter, and waits for the job's event."""
        job, queued = task.job, task.queued
        assert queued is not None, "it was queued"
        with job.lock:
            task.began_at, task.read_s = queued.began_at, seconds
            if not task.pages_free:
                job.leave_disk((queued.began_at or 0.0) + seconds)

    def slot_free(self, task: FileTask) -> None:
        """A task is over: give back the slot that it had for itself, if it had one."""
        if task.slot is not None:
            self._slots.give_back(cast("SlotT", task.slot))
            task.slot = None
        if task.ahead:
            task.ahead = False
            self._slots.cancel_ahead()

    def store_over(self, task: FileTask, status: Status, seconds: float) -> None:
        """A store is over: its slot is free, and its outcome known."""
        self.slot_free(task)
        with self._lock:
            self._open_stores.discard(task)
        nbytes = self._file_nbytes[task.move.file.group_idx] if status is Status.OK else 0
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
        if task.started_at is not None:  # what never got a thread says nothing about the disk
            self._breaker.record(status)

    def report(self, job: Job) -> None:
        """The pages of all its tasks are free."""
        now = self._clock()
        with self._lock:
            self._ended.append((job, now))

    # --- for the engine's thread ------------------------------------------------------------

    def begin_stores(self, tasks: Sequence[FileTask], limit: int) -> int:
        """Count the first of these stores as open, until there are `limit`; return how many."""
        with self._lock:
            num = max(0, min(len(tasks), limit - len(self._open_stores)))
            self._open_stores.update(tasks[:num])
            return num

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
