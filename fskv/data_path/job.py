"""A job of the engine and the state of its files, on the engine's thread alone.

`runner` makes jobs, runs them and reports them. I/O threads see a job's guard and its files, nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

from fskv.data_path.transports.protocol import Ready
from fskv.format.spans import ChunkPlan
from fskv.types import FileId, Status, Use

if TYPE_CHECKING:
    from fskv import _native
    from fskv.data_path.store import ChunkStore


class FileMove(NamedTuple):
    """One file of a job: its id, its spans, and its use of a prefix."""

    file: FileId
    plan: ChunkPlan
    use: Use | None = None  # of its prefix: what its file is stamped with


@dataclass(frozen=True, slots=True)
class JobResult:
    """The report of a job that the engine may consider done. `failed` is only ever true for loads."""

    job_id: int
    is_load: bool
    failed: bool
    nbytes: int
    seconds: float
    late: bool = False  # given up at its deadline
    bad: tuple[FileId, ...] = ()  # of a load: the files that were not good


class FileOutcome(NamedTuple):
    """The outcome of one file; a stored file's outcome comes after the report of its job."""

    file: FileId
    is_load: bool
    status: Status
    nbytes: int
    seconds: float


class State(IntEnum):
    """The state of a transfer in the queue and on its thread; `State` in csrc/types.h draws the steps."""

    NEW = 0
    PARKED = 1
    QUEUED = 2
    GATHERING = 3
    WRITING = 4
    READING = 5
    WAITING = 6
    SCATTERING = 7
    DONE = 8


_NOT_AT_DISK = (State.GATHERING, State.WAITING, State.SCATTERING, State.DONE)


class NativeEvent(IntEnum):
    """The outcome of a transfer outside the interpreter; the order is that of `Kind` in csrc/queue.c."""

    GATHERED = 0
    STORED = 1
    EXISTS = 2
    LOADED = 3
    LEFT = 4  # its job had been given up
    SPOILT = 5  # libcrypto failed


STATUS_OF: dict[int, Status] = {
    NativeEvent.STORED: Status.OK,
    NativeEvent.EXISTS: Status.EXISTS,
    NativeEvent.LOADED: Status.OK,
    NativeEvent.SPOILT: Status.IO_ERROR,
}


class Stage(Enum):
    """The stage of a file as the engine sees it: MOVING -> (a store: WRITING) -> ENDED.

    The pages are in use only while it is MOVING; `State` says what its thread does with them.
    """

    MOVING = "its pages are in use"
    WRITING = "its pages are free, and what becomes of it is not known"
    ENDED = "its outcome was told"


class FileTask:
    """One file of a job, its transfer and its stage."""

    __slots__ = (
        *("job", "move", "slot", "stage", "transfer"),
        *("python_at_disk_since", "python_began_at", "python_waited_s"),
    )

    def __init__(self, job: Job, move: FileMove) -> None:
        self.job = job
        self.move = move
        self.stage = Stage.MOVING
        # Its item in the queue of I/O threads; None before, and once it was taken back.
        self.transfer: _native.Transfer[FileTask] | None = None
        self.slot: object = None  # of a store whose pages were gathered ahead, by JobRunner.wait
        # Of one that Python does from the start, by the runner's clock.
        self.python_began_at: float | None = None
        self.python_at_disk_since = 0.0
        self.python_waited_s = 0.0

    @property
    def started_at(self) -> float | None:
        """The time when an I/O thread took the file; None before."""
        if self.transfer is None or self.transfer.layout is None:
            return self.python_began_at
        return self.transfer.started_at

    @property
    def waited_s(self) -> float:
        """Seconds that the file's thread waited for the job's gate."""
        if self.transfer is None or self.transfer.layout is None:
            return self.python_waited_s
        return self.transfer.waited_s

    def disk_s(self, now: float) -> float:
        """Return the seconds since the file's thread went to the disk; 0 if the thread is elsewhere.

        A thread that copies pages, or waits for them, is not at the disk: copies are the device's time.
        """
        transfer = self.transfer
        if transfer is None or self.started_at is None:
            return 0.0
        # A file that was gathered ahead is at the disk from the start, in any state.
        if self.slot is None and transfer.state in _NOT_AT_DISK:
            return 0.0
        if transfer.layout is None:
            return now - self.python_at_disk_since
        return now - transfer.at_disk_since


class Job:
    """One call of the engine and its files. `fired_at` is set by the thread that waits for events."""

    def __init__(
        self,
        job_id: int,
        moves: Sequence[FileMove],
        submitted_at: float,
        allowed_s: float,
        ready: Ready | None,
        guard: _native.Guard,
        store: ChunkStore[Any],
        too_late: Status | None = None,
    ) -> None:
        """`guard` is the gate before its pages, open if `ready` is None. Its files are those of `store`.

        `too_late` is the status of a load's files when the load is given up; None: a store.
        """
        self.job_id = job_id
        self.is_load = too_late is not None
        self.submitted_at = submitted_at
        self.allowed_s = allowed_s
        self.ready = ready
        self.guard = guard
        self.store = store
        self.too_late = too_late
        self.fired_at = submitted_at if ready is None else None  # None: the device uses the pages
        self.late = False
        self.dropped = False  # its pages were given up before it was reported
        self.tasks = [FileTask(self, move) for move in moves]
        self.num_moving = len(self.tasks)
        self.num_ahead = 0  # files of a load that may be read before the event has fired
        self.bad: list[FileId] = []  # of a load: files that were not good
        self.nbytes = 0
        # When the pages of the last file were free.
        self.ended_at = math.inf if self.tasks else submitted_at

    def abandon(self) -> None:
        """Let no thread touch the job's pages after this call, which waits for memory copies only."""
        self.guard.abandon()

    def overdue(self, now: float) -> bool:
        """Return whether to give the job up; its allowed time starts anew when its event fires."""
        if not self.num_moving or now - self.submitted_at < self.allowed_s:
            return False
        fired_at = self.fired_at
        if fired_at is not None and now - fired_at >= self.allowed_s:
            return True
        return any(
            task.stage is Stage.MOVING and task.disk_s(now) >= self.allowed_s for task in self.tasks
        )

    def result(self) -> JobResult:
        """Return the report of a job whose files have left their pages."""
        seconds = self.ended_at - self.submitted_at
        if not self.is_load:
            return JobResult(self.job_id, False, False, self.nbytes, seconds)
        if self.dropped:
            self.bad = [task.move.file for task in self.tasks]
        return JobResult(
            self.job_id,
            True,
            bool(self.bad),
            self.nbytes,
            seconds,
            late=self.late,
            bad=tuple(self.bad),
        )
