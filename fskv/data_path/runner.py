"""Runs the engine's store and load jobs on I/O threads, each within its deadline.

A job is what the engine asked for in one call: files of one request's chunks. Each file is a task, with a
transfer in the queue, and the transfers of a job run in parallel. The queue owns the state of a transfer
(`State`), the engine's thread what it knows of the file (`Stage`):

    store   queued -> gathering -> writing -> done
                               |           |
                       the pages are free  the outcome is known

    load    queued -> reading, checking -> waiting -> scattering -> done
                                           |                     |
                             for its job's gate   the pages are free, the outcome is known

A job comes with an event of the engine's stream, and no deadline counts the wait for it. A store is parked
until the event has fired. A load is read and checked at once; then its thread waits for the job's gate
(`Guard`), and another thread has its place at the disk. One more thread waits for events and opens the gates.

The engine's thread calls submit_*, poll and wait, and none of them ever waits for a disk:

- A load job is reported when the pages of all its files are free, or at its deadline. `JobResult.bad` names
  the files that were not good. A bad file does not end the others: all that is bad is found, reported and
  stored again in one round. From the report on no late thread can write a page: the job's gate refuses it.
- A store job is reported when its pages are free, not when its files are written. Writing goes on; what
  became of it arrives later through `take_outcomes`.
- `wait` returns when the pages of the given jobs are neither read nor written any more. It gathers what it
  can into free slots and cancels the rest.
- `drop` does the same for all jobs at once and gathers nothing: the engine has given its KV up.

An I/O thread does all this in `fskv._native` without entering the interpreter. It comes back with a file for
which something is wrong, and with each file where slots are not in host memory: `file_steps` does that file.
Both tell by events what became of a file. The engine's thread collects them; no other thread changes a job.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, cast

from fskv.config import Deadline
from fskv.data_path.breaker import Breaker
from fskv.data_path.file_steps import FileSteps
from fskv.data_path.job import (
    STATUS_OF,
    FileMove,
    FileOutcome,
    FileTask,
    Job,
    JobResult,
    NativeEvent,
    Stage,
    State,
)
from fskv.data_path.store import ChunkStore
from fskv.data_path.threads import HangProofPool, Readiness, has_fired
from fskv.data_path.transports.protocol import OwnSlot, Ready, SlotPool, SlotT, Transport
from fskv.errors import ChunkIOError
from fskv.native import _native
from fskv.types import Status

logger = logging.getLogger(__name__)

# Seconds of writing that may be queued: the queue holds KV pages of the engine, which are to be free again
# before its next steps want them.
STORE_QUEUE_S = 4.0
_PACE = 1 / 16  # weight of one store in the average of how long one takes
_ANSWERED = (State.WAITING, State.SCATTERING)  # loads with which the disk is done
# Loads on a device that may wait for their events at once, for each thread; each has a thread and slot more.
# More of them read further ahead of a long step, but their threads and slots slow down those that copy.
_MAX_WAITING = 2
_END_S = 0.5  # for idle threads to end at shutdown
COPIES_AT_ONCE = 2  # by wait(); csrc/cuda.c lets no more of them go to the host


class JobRunner(Generic[SlotT]):
    """The jobs of one engine worker, and the I/O threads that run them."""

    def __init__(
        self,
        store: ChunkStore[SlotT],
        transport: Transport[SlotT],
        *,
        num_threads: int,
        num_slots: int,
        max_queued_chunks: int,
        deadline: Deadline,
        breaker: Breaker,
        store_queue_s: float = STORE_QUEUE_S,
        cpus: frozenset[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Needs num_slots > num_threads; the others serve replaced threads, waiting loads and wait().

        The queue takes max_queued_chunks, or what can be stored in `store_queue_s` if that is less. I/O
        threads run on `cpus`, anywhere if None.
        """
        if num_slots <= num_threads:
            raise ValueError(f"{num_slots} slots for {num_threads} threads")
        self.store = store  # of jobs that begin from now on
        self._deadline = deadline
        self._breaker = breaker
        self._clock = clock
        self._num_threads = num_threads
        self._max_queued = max_queued_chunks
        # Stores that it takes however slow the disk is.
        self.least_queued = min(max_queued_chunks, 2 * num_threads)
        self._store_queue_s = store_queue_s
        self._chunk_store_s = 0.0  # a thread's time per store, averaged
        # A hung thread keeps its slot. Half of the spare slots may be lost that way.
        spare = num_slots - num_threads
        max_hung = max(1, min(num_threads * 2, spare // 2))
        spare = max(0, spare - max_hung)
        # Where the KV is in host memory nobody else writes it: no load waits for an event.
        self._max_waiting = 0
        if transport.native.on_device:
            self._max_waiting = min(_MAX_WAITING * num_threads, spare // 2)
        self._slots = SlotPool(transport, num_slots, spare - self._max_waiting)
        # While loads run, stores leave them half of the threads.
        self._queue = _native.Queue(num_threads, max(1, num_threads // 2))
        self._steps = FileSteps(transport, self._slots, self._queue, cpus, clock)
        self._pool: HangProofPool[FileTask, OwnSlot[SlotT]] = HangProofPool(
            "fskv-io", num_threads, max_hung, self._queue, self._steps.run, self._steps.own_slot
        )
        self._readiness = Readiness(transport.enter_thread)
        self._jobs: dict[int, Job] = {}
        self._open_stores: set[FileTask] = set()  # parked, queued, or with a thread
        self._outcomes: list[FileOutcome] = []
        self._unreadable: deque[Job] = deque()  # jobs whose event cannot be waited for

    # --- the engine's side ----------------------------------------------------------------

    def submit_load(
        self,
        job_id: int,
        moves: Sequence[FileMove],
        ready: Ready | None,
        allowed_s: float = math.inf,
        *,
        refused: bool = False,
    ) -> None:
        """Start a load job; threads read all its chunks in parallel, ahead of any store.

        `ready` is an event after which no kernel writes the pages any more, or None. A load that is given up
        after `allowed_s`, before its deadline, was not worth more time: nothing is held against its chunks.
        One that is `refused` fails. It is never begun: an I/O thread may end a load before it is given up.
        """
        deadline_s = self._deadline.for_nbytes(
            sum(self.store.file_nbytes[move.file.group_idx] for move in moves)
        )
        too_late = Status.SKIPPED if allowed_s < deadline_s else Status.TIMED_OUT
        job = self._begin(job_id, moves, min(allowed_s, deadline_s), ready, too_late)
        if refused:
            self._abandon(job, Status.SKIPPED)
        elif self._allowed(job):
            self._submit(job, job.tasks)

    def submit_store(self, job_id: int, moves: Sequence[FileMove], ready: Ready | None) -> None:
        """Start a store job after `ready`; it skips and counts chunks beyond the queue's limit."""
        job = self._begin(job_id, moves, self._deadline.max_s, ready)
        if not self._allowed(job):
            return
        room = self._queue_limit() - len(self._open_stores)
        taken: list[FileTask] = []
        for task in job.tasks:
            # Blocks after the plan's last one would be whatever the slot held before.
            if task.move.plan.to_end and len(taken) < room:
                taken.append(task)
            else:
                self._end(task, Status.SKIPPED)
        self._open_stores.update(taken)
        self._submit(job, taken)

    def _begin(
        self,
        job_id: int,
        moves: Sequence[FileMove],
        allowed_s: float,
        ready: Ready | None,
        too_late: Status | None = None,
    ) -> Job:
        """Register a job; raises ValueError if an open job has the same id."""
        if job_id in self._jobs:
            raise ValueError(f"job {job_id} is under way")
        if ready is not None and has_fired(ready):
            ready = None
        guard = _native.Guard(ready is None)
        job = Job(job_id, moves, self._clock(), allowed_s, ready, guard, self.store, too_late)
        self._jobs[job_id] = job
        return job

    def _allowed(self, job: Job) -> bool:
        if not job.tasks or self._breaker.allows():
            return True
        self._abandon(job, Status.BREAKER)
        return False

    def _submit(self, job: Job, tasks: Sequence[FileTask]) -> None:
        """Queue tasks, or park them until the job's event has fired; some loads go ahead of it."""
        transfers = []
        for task in tasks:
            try:
                task.transfer = self._transfer(task)
            except Exception:
                # A bug must cost this chunk, not the engine's step.
                logger.exception("fskv: %s", task.move.file)
                self._end(task, Status.IO_ERROR)
                self._let_go(task)
            else:
                transfers.append(task.transfer)
        if not transfers:
            return
        if job.ready is not None:
            if job.is_load:
                job.num_ahead = min(len(transfers), self._max_waiting - self._pool.num_waiting)
                self._pool.add_waiting(job.num_ahead)
            transfers, parked = transfers[: job.num_ahead], transfers[job.num_ahead :]
            self._queue.push(parked, parked=True)
        wanted = self._queue.push(transfers)
        self._pool.start_threads(wanted, len(transfers))
        if job.ready is None:
            return
        if not self._readiness.call_after(job.ready, lambda fired: self._go_on(job, parked, fired)):
            self._go_on(job, parked, False)

    def _transfer(self, task: FileTask) -> _native.Transfer[FileTask]:
        job, move = task.job, task.move
        return job.store.transfer(
            task, move.file, move.plan, job.guard, is_load=job.is_load, use=move.use
        )

    def _go_on(self, job: Job, parked: list[_native.Transfer[FileTask]], fired: bool) -> None:
        """Continue a job after its event; without `fired` give it up, since its pages may hold anything."""
        self._pool.add_waiting(-job.num_ahead)
        if not fired:
            self._unreadable.append(job)
            job.guard.abandon()
            return
        job.fired_at = self._clock()
        job.guard.open()
        if parked:
            self._pool.start_threads(self._queue.release(parked), len(parked))

    def _queue_limit(self) -> int:
        seconds = self._chunk_store_s / self._num_threads
        if seconds * self._max_queued <= self._store_queue_s:
            return self._max_queued
        return max(self.least_queued, int(self._store_queue_s / seconds))

    def poll(self) -> list[JobResult]:
        """Enforce the deadlines and return the jobs that became reportable since the last call."""
        self._collect()
        now = self._clock()
        for job in list(self._jobs.values()):
            if not job.overdue(now):
                continue
            self._collect()  # what has ended meanwhile is not late
            if job.num_moving:
                job.late = True
                self._abandon(job, job.too_late or Status.SKIPPED)
        self._write_off_hung(now)
        ended = [job for job in self._jobs.values() if not job.num_moving]
        for job in ended:
            del self._jobs[job.job_id]
        results = [job.result() for job in ended]
        for job in ended:
            job.tasks = []  # those that go on know their job; the circle would wait for the collector
        return results

    def wait(self, job_ids: Collection[int] | None = None) -> None:
        """Return when the KV pages of these jobs, or of all, are free; never waits for a disk.

        Stores are gathered into spare slots as far as those reach, the rest is cancelled; loads are
        given up, so that they fail and are recomputed. Waits for the event of a store that it gathers.
        """
        self._collect()
        jobs = [job for j, job in self._jobs.items() if job_ids is None or j in job_ids]
        self._gather_ahead([job for job in jobs if not job.is_load])
        for job in jobs:
            self._abandon(job, Status.SKIPPED)

    def drop(self) -> None:
        """Give every job up: after this call no thread reads or writes their KV pages.

        Waits for memory copies only. Loads fail, those too that have ended and were not polled: their pages
        are gone. Of stores, what a thread has gathered is still written, and all that waits is dropped, what
        wait() has gathered included.
        """
        self._collect()
        for job in list(self._jobs.values()):
            job.dropped = True
            self._abandon(job, Status.SKIPPED)
        for task in list(self._open_stores):
            if self._take_back(task):
                self._end(task, Status.SKIPPED)
                self._let_go(task)

    def take_outcomes(self) -> list[FileOutcome]:
        """Return the outcomes of single chunks since the last call."""
        self._collect()
        outcomes, self._outcomes = self._outcomes, []
        for outcome in outcomes:
            if not outcome.is_load and outcome.status in (Status.OK, Status.TIMED_OUT):
                self._chunk_store_s += _PACE * (outcome.seconds - self._chunk_store_s)
        return outcomes

    @property
    def num_slots_used(self) -> int:
        """Number of slots in use: hung threads' slots count, idle threads' slots do not."""
        return max(0, self._slots.num_used - self._pool.num_idle)

    @property
    def num_open_stores(self) -> int:
        """Number of chunks that wait to be stored or are being written."""
        return len(self._open_stores)

    @property
    def num_running(self) -> int:
        """Number of files that I/O threads work on; files of hung threads count."""
        return len(self._queue.running())

    @property
    def num_threads_hung(self) -> int:
        return self._pool.num_hung

    def shutdown(self, timeout_s: float) -> int:
        """Give stores `timeout_s` to finish, then leave. Hung threads are never waited for.

        Returns how many stores are left without an outcome.
        """
        end = self._clock() + timeout_s
        while self._clock() < end:
            self._collect()
            # Those that are left when all have ended hang.
            if all(task.stage is Stage.ENDED for task in self._open_stores):
                break
            time.sleep(0.01)
        for job in list(self._jobs.values()):
            self._abandon(job, Status.SKIPPED)
        self._pool.close(_END_S)
        self._readiness.close(_END_S)
        self._collect()
        return sum(task.stage is not Stage.ENDED for task in self._open_stores)

    # --- what became of files -----------------------------------------------------------------

    def _collect(self) -> None:
        """Collect the events of I/O threads in few calls, because the engine's thread runs this."""
        stored, answered = [], False
        for owner, kind, seconds in self._queue.take_events():
            task = cast("FileTask", owner)
            if kind == NativeEvent.GATHERED:
                self._free(task)
                continue
            status = STATUS_OF.get(kind)
            if status is not None:
                answered |= self._set_ended(task, status, seconds) and status.good
                if kind == NativeEvent.SPOILT:
                    self.store.complain("store", ChunkIOError("libcrypto fails"))
                if kind == NativeEvent.STORED and task.job.store is self.store:
                    stored.append(task.move.file)
            if not task.job.is_load:
                if status is None:
                    self._set_ended(task, Status.SKIPPED, seconds)
                self._let_go(task)
        if stored:
            self.store.replaced(stored)
        if answered:  # by the disk: once is as good as often
            self._breaker.record(Status.OK)
        while self._unreadable:
            self._abandon(self._unreadable.popleft(), Status.IO_ERROR)
        while self._steps.done:
            task, status, seconds = self._steps.done.popleft()
            if status is None:
                self._free(task)
                continue
            self._end(task, status, seconds)
            self._let_go(task)

    def _free(self, task: FileTask, status: Status | None = None) -> None:
        """Note that a file no longer needs its pages; a load's `status` is known by then."""
        job = task.job
        if task.stage is not Stage.MOVING:
            return
        task.stage = Stage.WRITING
        if status is None or status is Status.OK:
            job.nbytes += task.move.plan.nbytes
        elif job.is_load:
            job.bad.append(task.move.file)
        job.num_moving -= 1
        if not job.num_moving:
            job.ended_at = self._clock()

    def _set_ended(self, task: FileTask, status: Status, seconds: float) -> bool:
        """Note the outcome of a file; False: the file had an outcome already."""
        job, file, nbytes = task.job, task.move.file, 0
        if task.stage is Stage.ENDED:
            return False
        self._free(task, status)
        task.stage = Stage.ENDED
        if status is Status.OK and job.is_load:
            nbytes = task.move.plan.nbytes
        elif status is Status.OK:
            nbytes = self.store.file_nbytes[file.group_idx]
        if not job.is_load and job.store is not self.store:
            status = Status.SKIPPED  # of a namespace that is not in use any more
        self._outcomes.append(FileOutcome(file, job.is_load, status, nbytes, seconds))
        return True

    def _end(self, task: FileTask, status: Status, seconds: float = 0.0) -> None:
        if self._set_ended(task, status, seconds) and task.started_at is not None:
            self._breaker.record(status)  # what never got a thread says nothing about the disk

    def _let_go(self, task: FileTask) -> None:
        """Give back the spare slot of a file that no thread has any more."""
        self._open_stores.discard(task)
        if task.slot is not None:
            self._slots.give_back_ahead(cast("SlotT", task.slot))
            task.slot = None

    def _take_back(self, task: FileTask) -> bool:
        """Take a file out of the queue; False: a thread has it, or had it."""
        if task.transfer is not None and not self._queue.cancel(task.transfer):
            return False
        task.transfer = None
        return True

    def _abandon(self, job: Job, status: Status) -> None:
        """Free the pages of the job's files; those that are not free yet end with `status`.

        A thread reports the end of its own store.
        """
        moving = [task for task in job.tasks if task.stage is Stage.MOVING]
        answered = {task for task in moving if task.transfer and task.transfer.state in _ANSWERED}
        job.abandon()
        begun = False
        for task in moving:
            begun |= task.started_at is not None
            taken = self._take_back(task)
            if job.is_load or taken:
                # The disk has answered for a file that was read.
                self._end(
                    task,
                    Status.SKIPPED if task in answered else status,
                    self._clock() - job.submitted_at,
                )
                self._let_go(task)
            else:
                self._free(task, status)
        if moving and status is Status.TIMED_OUT and not begun and self._pool.num_hung:
            self._breaker.record(status)  # no chunk got a thread, because threads hang: one sign

    def _write_off_hung(self, now: float) -> None:
        """Replace the threads of transfers that are past their deadline, whatever became of the job."""
        for transfer in self._queue.running():
            task = cast("FileTask | None", transfer.owner)
            if task is None:  # it has ended meanwhile
                continue
            # All threads share the disk.
            nbytes = self._num_threads * self.store.file_nbytes[task.move.file.group_idx]
            seconds = task.disk_s(now)
            if seconds <= self._deadline.for_nbytes(nbytes):
                continue
            self._pool.write_off(transfer)
            if not task.job.is_load:
                self._end(task, Status.TIMED_OUT, seconds)
            elif task.job.late and task.job.too_late is Status.SKIPPED:
                # Given up before, and late it is: one sign.
                task.job.too_late = Status.TIMED_OUT
                self._breaker.record(Status.TIMED_OUT)

    # --- the pages of stores, on the engine's thread ----------------------------------------------

    def _gather_ahead(self, jobs: Sequence[Job]) -> None:
        """Gather the queued files of these stores into spare slots ahead of the threads, and queue them
        again.
        """
        taken: list[FileTask] = []
        try:
            for job in jobs:
                moving = [task for task in job.tasks if task.stage is Stage.MOVING]
                # All of a job first: a thread that has only just taken one finds the job given up.
                mine = [task for task in moving if task.transfer and self._take_back(task)]
                if mine and job.ready is not None and job.fired_at is None:
                    job.ready.synchronize()
                job.guard.open()
                taken += mine
            for task in taken:
                task.slot = self._slots.take_ahead()
            taken = [task for task in taken if task.slot is not None]
            transfers = [self._transfer(task) for task in taken]
            # While one copy from the device is waited for, the next is under way.
            with ThreadPoolExecutor(COPIES_AT_ONCE, "fskv-gather") as pool:
                gathered = pool.map(self._gather_now, taken, transfers)
                for task, transfer, good in zip(taken, transfers, gathered, strict=False):
                    if good:
                        task.transfer = transfer
                        self._free(task)
                        self._pool.start_threads(self._queue.push([transfer], first=True), 1)
        except Exception:
            logger.exception("fskv: gather ahead of the I/O threads")

    def _gather_now(self, task: FileTask, transfer: _native.Transfer[FileTask]) -> bool:
        slot = cast("SlotT", task.slot)
        if transfer.layout is not None:
            return transfer.gather(slot)
        self._steps.gather(task, slot)
        return True
