"""A job of the engine and its chunks on their way: what the engine's thread and the I/O threads share.

Only state and the rules for touching it; `runner` makes them, runs them and reports them.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from fskv.data_path.threads import Guard
from fskv.plan.spans import ChunkPlan
from fskv.types import FileId, Status

if TYPE_CHECKING:
    from fskv import _native


@dataclass(frozen=True, slots=True)
class FileMove:
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


@dataclass(frozen=True, slots=True)
class FileOutcome:
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


class Job:
    """Shared by the engine's thread and the I/O threads; `lock` guards every field below it."""

    def __init__(
        self,
        job_id: int,
        submitted_at: float,
        allowed_s: float,
        ready: Any,
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
        self.tasks: list[FileTask] = []
        self.lock = threading.Lock()
        self.num_open = 0  # chunks whose pages are still needed
        self.bad: list[FileId] = []  # of a load: files that were not good
        self.nbytes = 0
        self.ended_at = 0.0  # the last chunk that was loaded

    def overdue(self, now: float) -> bool:
        """Whether it has to be given up now. On the engine's thread."""
        self.late = now >= self.deadline_at
        if not self.late and now - self.submitted_at >= self.look_s and self._behind(now):
            self.late, self.too_late = True, Status.SKIPPED  # says nothing against its chunks
        return self.late

    def _behind(self, now: float) -> bool:
        """Whether it will be late if it goes on like this. What is being read counts as read."""
        began = [task.started_at for task in self.tasks if task.started_at is not None]
        first = min(began, default=now)  # before that it waits for others
        if now - first < self.look_s:
            return False
        read = total = 0
        with self.lock:
            for task in self.tasks:
                total += task.move.plan.nbytes
                if not task.pages_free and task.started_at is not None:
                    read += task.move.plan.nbytes
            read += self.nbytes
        return (now - first) * total > read * (self.deadline_at - first)

    def result(self, now: float) -> JobResult:
        """Return the report; all its chunks have ended."""
        total = sum(task.move.plan.nbytes for task in self.tasks)
        began = [task.started_at for task in self.tasks if task.started_at is not None]
        ended = now if self.bad else self.ended_at
        return JobResult(
            self.job_id,
            self.is_load,
            bool(self.bad),
            self.nbytes,
            now - self.submitted_at,
            busy_s=max(0.0, ended - min(began, default=self.submitted_at)),
            done_share=self.nbytes / total if total else 1.0,
            late=self.late,
            bad=tuple(self.bad),
        )


class FileTask:
    """One file of a job on its way; `pages_free` and `slot` change under the job's lock. See runner."""

    __slots__ = ("job", "move", "outcome_known", "pages_free", "queued", "slot")

    def __init__(self, job: Job, move: FileMove) -> None:
        self.job = job
        self.move = move
        self.queued: Any = None  # the Task or Transfer that stands for it in the queue
        self.slot: Any = None  # set when the pages were gathered ahead, by wait()
        self.pages_free = False
        self.outcome_known = False

    @property
    def started_at(self) -> float | None:
        started_at: float | None = self.queued and self.queued.started_at
        return started_at
