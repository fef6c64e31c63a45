"""A job of the engine and its chunks on their way: what the engine's thread and the I/O threads share.

Only state and the rules for touching it; `runner` makes them, runs them and reports them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from fskv.data_path.threads import Guard, Task
from fskv.plan.spans import ChunkPlan
from fskv.transports.protocol import Ready
from fskv.types import FileId, Status

if TYPE_CHECKING:
    from fskv import _native

# What stands for a file in the queue of I/O threads: ChunkStore.transfer makes it.
Queued: TypeAlias = "Task[FileTask] | _native.Transfer[FileTask]"


class FileMove(NamedTuple):
    """One file of a job: which, and what of its chunk goes where."""

    file: FileId
    plan: ChunkPlan


class LoadLimit(NamedTuple):
    """How long a load may take, beside its deadline."""

    allowed_s: float = math.inf
    # Once it was read for so long, it has to keep the pace that this needs.
    look_s: float = math.inf


NO_LIMIT = LoadLimit()


@dataclass(frozen=True, slots=True)
class JobResult:
    """A job the engine may consider done. `failed` is only ever true for loads."""

    job_id: int
    is_load: bool
    failed: bool
    nbytes: int
    seconds: float
    # Of loads. From the first chunk's start to the last one's end, or until it was given up: `seconds` also
    # has the time in the queue and until the engine's thread looked.
    busy_s: float = 0.0
    done_share: float = 1.0  # of the bytes
    late: bool = False  # given up at its deadline, or because it would not keep it
    bad: tuple[FileId, ...] = ()  # of a load: the files that were not good


class FileOutcome(NamedTuple):
    """How one file ended; for stores this comes after the job was reported."""

    file: FileId
    is_load: bool
    status: Status
    nbytes: int
    seconds: float


class NativeEvent(IntEnum):
    """What became of a transfer outside the interpreter; the order is that of `Kind` in csrc/queue.c."""

    GATHERED = 0
    STORED = 1
    EXISTS = 2
    LOADED = 3
    ABANDONED = 4
    READ = 5  # and checked, and parked


class Job:
    """Shared by the engine's thread and the I/O threads; `lock` guards every field below it."""

    def __init__(
        self,
        job_id: int,
        submitted_at: float,
        allowed_s: float,
        ready: Ready | None,
        guard: Guard | _native.Guard,
        too_late: Status | None = None,
        look_s: float = math.inf,
    ) -> None:
        self.job_id = job_id
        self.is_load = too_late is not None
        self.submitted_at = submitted_at
        self.deadline_at = submitted_at + allowed_s
        self.ready = ready
        self.guard = guard
        self.look_s = look_s
        self.too_late = too_late  # what the chunks of a load are when it is given up
        self.late = False  # engine's thread only
        self.dropped = False  # engine's thread only: its pages were given up before it was reported
        self.tasks: list[FileTask] = []
        self.lock = threading.Lock()
        self.unready = False  # `ready` has not fired
        self.num_open = 0  # chunks whose pages are still needed
        self.num_at_disk = 0  # of these: queued, or in a thread's hands
        # Since when nothing is at the disk, and all of it waits for `ready`; for how long it did.
        self.paused_at = math.inf
        self.paused_s: float | None = None
        self.fired_at: float | None = None  # when `ready` was known to have fired
        self.bad: list[FileId] = []  # of a load: files that were not good
        self.nbytes = 0
        self.ended_at = 0.0  # the last chunk that was loaded

    def overdue(self, now: float) -> bool:
        """Whether it has to be given up now: a deadline is the disk's. On the engine's thread."""
        with self.lock:
            if self.paused_at < math.inf and self.paused_s is None:
                return False
        self.late = self._disk_s(self.submitted_at, now) >= self.deadline_at - self.submitted_at
        looked = self._disk_s(self.submitted_at, now) >= self.look_s
        if not self.late and looked and self._behind(now):
            self.late, self.too_late = True, Status.SKIPPED  # says nothing against its chunks
        return self.late

    def wait_for_ready(
        self, tasks: Sequence[FileTask], slots: Sequence[object], now: float
    ) -> list[FileTask]:
        """Park these open tasks until `ready`, but those to be read ahead, one for a slot; return those."""
        ahead = list(tasks[: len(slots)])
        with self.lock:
            self.unready = True
            self.num_at_disk = len(ahead)
            if not ahead:
                self.paused_at = now
            for task in tasks:
                task.parked = True
            for task, task.slot in zip(ahead, slots, strict=True):
                task.ahead, task.parked = True, False
        return ahead

    def leave_disk(self, now: float) -> None:
        """One of those at the disk has been read, or has ended. Under `lock`."""
        self.num_at_disk -= 1
        if not self.num_at_disk:
            self.paused_at = now
            if self.fired_at is not None:  # told late
                self.paused_s = max(0.0, self.fired_at - now)

    def go_on(self, now: float) -> list[FileTask]:
        """`ready` has fired: return the tasks that waited for it."""
        with self.lock:
            self.unready, self.fired_at = False, now
            if self.paused_at < math.inf:
                self.paused_s = now - self.paused_at
            parked = [task for task in self.tasks if task.parked]
            for task in parked:
                task.parked = False
        return parked

    def _behind(self, now: float) -> bool:
        """Whether it will be late if it goes on like this. What is being read counts as read."""
        began = [task.started_at for task in self.tasks if task.started_at is not None]
        first = min(began, default=now)  # before that it waits for others
        if self._disk_s(first, now) < self.look_s:
            return False
        read = total = 0
        with self.lock:
            for task in self.tasks:
                total += task.move.plan.nbytes
                if not task.pages_free and task.started_at is not None:
                    read += task.move.plan.nbytes
            read += self.nbytes
        end = self.deadline_at + (self.paused_s or 0.0)
        return self._disk_s(first, now) * total > read * self._disk_s(first, end)

    def _disk_s(self, start: float, end: float) -> float:
        """Return the seconds from `start` to `end` in which the job did not only wait for `ready`."""
        paused = start <= self.paused_at < end
        return end - start - (self.paused_s or 0.0 if paused else 0.0)

    def result(self, now: float) -> JobResult:
        """Return the report of a job whose chunks had all ended `now`. On the engine's thread."""
        if not self.is_load:
            return JobResult(
                self.job_id, False, bool(self.bad), self.nbytes, now - self.submitted_at
            )
        total = sum(task.move.plan.nbytes for task in self.tasks)
        began = [at for task in self.tasks if (at := task.started_at) is not None]
        ended = now if self.bad else self.ended_at
        if self.dropped:
            self.bad = [task.move.file for task in self.tasks]
        return JobResult(
            self.job_id,
            True,
            bool(self.bad),
            self.nbytes,
            now - self.submitted_at,
            busy_s=max(0.0, self._disk_s(min(began, default=self.submitted_at), ended)),
            done_share=self.nbytes / total if total else 1.0,
            late=self.late,
            bad=tuple(self.bad),
        )


class FileTask:
    """One file of a job on its way; `pages_free` and `parked` change under the job's lock. See runner."""

    __slots__ = (
        "ahead",
        "began_at",
        "job",
        "move",
        "outcome_known",
        "pages_free",
        "parked",
        "queued",
        "read_s",
        "slot",
        "touch",
    )

    def __init__(self, job: Job, move: FileMove) -> None:
        self.job = job
        self.move = move
        self.queued: Queued | None = None
        # Of a store whose pages were gathered ahead, by wait(); of a load that is read ahead of its event.
        self.slot: object = None
        self.ahead = False  # it has, or may take, one of the slots for that
        self.parked = False  # not queued, and in no thread's hands: it waits for the job's event
        self.began_at: float | None = None  # of a load that was read ahead, and how long that took
        self.read_s = 0.0
        self.touch = False  # of such a load: its file's mtime is old
        self.pages_free = False
        self.outcome_known = False

    def equip(self, queued: Queued) -> None:
        """Give a transfer that is run outside the interpreter what it must have before it is queued."""
        if isinstance(queued, Task) or not queued.native:
            return
        if self.slot is not None:
            queued.use_slot(self.slot)
        if self.ahead and self.job.is_load:
            queued.hold()

    @property
    def started_at(self) -> float | None:
        if self.began_at is not None:
            return self.began_at
        return self.queued.started_at if self.queued else None
