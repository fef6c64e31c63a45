"""Runs the engine's store and load jobs on I/O threads, each within its deadline.

A job is what the engine asked for in one call: files of one request's chunks. Each file is a task, and the
tasks of a job run in parallel. Three facts end a task, each of them once:

    store   queued -> gathering -> writing -> done
                               |           |
                       the pages are free  the slot is free, the outcome is known

    load    queued -> reading, checking -> scattering -> done
                                                      |
                                      the pages are free, the outcome is known; its thread keeps its slot

A job comes with an event of the engine's stream, and neither an I/O thread nor a deadline waits for it. A
store is parked until the event has fired, then it is queued. A load on a device is read and checked at once,
as far as the spare slots reach, and parked before it scatters.

A task that is abandoned frees its pages at once, wherever it stands, and its outcome is known. The slot of a
thread that hangs is free when its call returns.

The engine's thread calls submit_*, poll and wait, and none of them ever waits for a disk:

- A load job is reported when the pages of all its tasks are free, or at its deadline. `JobResult.bad` names
  the files that were not good. A bad file does not end the others: all that is bad is found, reported and
  stored again in one round. From the report on no late thread can write a page: the job's `Guard` refuses it.
- A store job is reported when its pages are free, not when its files are written. Writing goes on; what
  became of it arrives later through `take_outcomes`.
- `wait` returns when the pages of the given jobs are neither read nor written any more. It gathers what it
  can into free slots and cancels the rest.
- `drop` does the same for all jobs at once and gathers nothing: the engine has given its KV up.

Where the transport allows it, an I/O thread does all this in `fskv._native` without entering the interpreter
and comes back only with a chunk for which something is amiss; that chunk is done again here, from the start.
`poll` collects what was done there.

Threads: a job has a lock (`Job.lock`) and a guard over its KV pages. What ends a task, and the lock for that,
is in `ends`; the thread that waits for events is in `readiness`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Generic, cast

from fskv.config import Deadline
from fskv.data_path.breaker import Breaker
from fskv.data_path.ends import TaskEnds
from fskv.data_path.job import (
    NO_LIMIT,
    FileMove,
    FileOutcome,
    FileTask,
    Job,
    JobResult,
    LoadLimit,
    NativeEvent,
    Queued,
)
from fskv.data_path.readiness import Readiness, has_fired
from fskv.data_path.store import ChunkStore
from fskv.data_path.threads import Guard, HangProofPool, Queue, Task, TaskQueue
from fskv.transports import numa
from fskv.transports.protocol import OwnSlot, Ready, SlotPool, SlotT, Transport
from fskv.types import Status

if TYPE_CHECKING:
    from fskv import _native

logger = logging.getLogger(__name__)

_WRITTEN = {0: Status.OK, 1: Status.EXISTS}  # ChunkResult in csrc/chunk_io.h; else nothing was done

# Seconds of writing that may be queued: the queue holds KV pages of the engine, which are to be free again
# before its next steps want them.
STORE_QUEUE_S = 4.0
_PACE = 1 / 16  # weight of one store in the average of how long one takes


class JobRunner(Generic[SlotT]):
    """See the module docstring. Constructed and called by one engine worker."""

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
        # Stores that it takes however slow the disk is.
        self.least_queued = min(max_queued_chunks, 2 * num_threads)
        self._store_queue_s = store_queue_s
        self._chunk_store_s = 0.0  # a thread's time per store, averaged; engine's thread only
        self._cpus = cpus
        # A hung thread keeps its slot (parked). Half of the spare slots may be lost that way.
        max_hung = max(1, min(num_threads * 2, (num_slots - num_threads) // 2))
        self._slots = SlotPool(transport, num_slots, max(0, num_slots - num_threads - max_hung))
        self._file_nbytes = store.file_nbytes
        self._ends = TaskEnds(self._slots, breaker, self._file_nbytes, clock)
        # While loads run, stores leave them half of the threads.
        beside, native = max(1, num_threads // 2), transport.native
        # Of the kind of task that the store makes for this transport.
        queue = cast("Queue[Queued]", native.queue(beside) if native else TaskQueue(beside, clock))
        self._make_guard: Callable[[], Guard | _native.Guard] = native.guard if native else Guard
        self._pool = HangProofPool(
            "fskv-io", num_threads, max_hung, queue, self._run, self._own_slot
        )
        self._readiness = Readiness(transport.enter_thread)
        # Where the KV is in host memory nobody else writes it: a load has no event to be ahead of.
        self._reads_ahead = native is None or native.on_device
        # Outside the interpreter a load that may be parked has its slot from the start.
        self._holds = native is not None and native.on_device and native.pages is not None
        self._jobs: dict[int, Job] = {}  # engine's thread only

    # --- the engine's side ----------------------------------------------------------------

    def submit_load(
        self,
        job_id: int,
        moves: Sequence[FileMove],
        ready: Ready | None,
        limit: LoadLimit = NO_LIMIT,
        *,
        refused: bool = False,
    ) -> None:
        """Start a load; all its chunks are read in parallel, ahead of any store.

        `ready` is an event after which no kernel writes the pages any more, or None. A load that is given up
        by its `limit`, before its deadline, was not worth more time: nothing is held against its chunks.
        One that is `refused` fails. It is never begun: an I/O thread may end a load before it is given up.
        """
        deadline_s = self._deadline.for_nbytes(
            sum(self._file_nbytes[move.file.group_idx] for move in moves)
        )
        too_late = Status.SKIPPED if limit.allowed_s < deadline_s else Status.TIMED_OUT
        allowed_s = min(limit.allowed_s, deadline_s)
        guard = self._make_guard()
        job = Job(job_id, self._clock(), allowed_s, ready, guard, too_late, limit.look_s)
        self._queue_when_ready(job, self._begin(job, moves, refused=refused))

    def submit_store(self, job_id: int, moves: Sequence[FileMove], ready: Ready | None) -> None:
        """Start a store, after `ready`; chunks beyond the queue's limit are skipped and counted."""
        job = Job(job_id, self._clock(), self._deadline.max_s, ready, self._make_guard())
        tasks = self._begin(job, moves)
        # Blocks after the plan's last one would be whatever the slot held before.
        whole = [task for task in tasks if task.move.plan.to_end]
        num = self._ends.begin_stores(whole, self._queue_limit())
        queued = whole[:num]
        if num < len(tasks):
            taken = set(queued)
            for task in tasks:
                if task not in taken:
                    self._ends.pages_free(task, Status.SKIPPED, 0, 0.0)
                    self._ends.store_over(task, Status.SKIPPED, 0.0)
        self._queue_when_ready(job, queued)

    def _queue_when_ready(self, job: Job, tasks: Sequence[FileTask]) -> None:
        """Queue tasks, or park them until the job's event has fired."""
        ready = job.ready
        if ready is None or not tasks or has_fired(ready):
            self._queue(tasks)
            return
        reads_ahead = job.is_load and self._reads_ahead
        slots = self._slots.begin_ahead(len(tasks), self._holds) if reads_ahead else []
        self._queue(job.wait_for_ready(tasks, slots, self._clock()))
        if not self._readiness.call_after(ready, lambda fired: self._go_on(job, fired)):
            self._go_on(job, False)

    def _go_on(self, job: Job, fired: bool) -> None:
        """The job's event has fired. If nobody can tell, what waits ends: its pages may hold anything."""
        parked = job.go_on(self._clock())
        ahead = [task.queued for task in job.tasks if task.ahead and task.queued is not None]
        self._pool.release(ahead, fired)
        if fired:
            self._queue(parked)
            return
        for task in parked:
            self._ends.lost(task)

    def _queue_limit(self) -> int:
        seconds = self._chunk_store_s / self._num_threads
        if seconds * self._max_queued <= self._store_queue_s:
            return self._max_queued
        return max(self.least_queued, int(self._store_queue_s / seconds))

    def _begin(
        self, job: Job, moves: Sequence[FileMove], *, refused: bool = False
    ) -> list[FileTask]:
        """Register a job; return the tasks to run, if any. ValueError: its id is that of an open one."""
        # The report would be taken for this job's, with its pages in use.
        if job.job_id in self._jobs:
            raise ValueError(f"job {job.job_id} is under way")
        job.tasks = [FileTask(job, move) for move in moves]
        job.num_open = len(job.tasks)
        self._jobs[job.job_id] = job
        if not job.tasks:
            self._ends.report(job)
        elif refused or not self._breaker.allows():
            self._abandon(job, Status.SKIPPED if refused else Status.BREAKER)
            return []
        return job.tasks

    def _queue(self, tasks: Sequence[FileTask]) -> None:
        good = []
        for task in tasks:
            job, move = task.job, task.move
            try:
                if task.began_at is not None:  # it was read ahead: the scatter is left
                    good.append(self._store.in_python(task, is_load=True))
                    task.queued = good[-1]
                    continue
                queued = self._store.transfer(
                    task, move.file, move.plan, job.guard, is_load=job.is_load
                )
                task.equip(queued)
            except Exception:
                # A bug must cost this chunk, not the engine's step.
                logger.exception("fskv: %s of %s", "load" if job.is_load else "store", move.file)
                self._ends.lost(task)
            else:
                task.queued = queued
                good.append(queued)
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
        results = self._ends.take_results()
        for result in results:
            if result.job_id in self._jobs:
                job = self._jobs.pop(result.job_id)
                job.tasks = []  # those that go on know their job; the circle would wait for the collector
        return results

    def wait(self, job_ids: Iterable[int]) -> None:
        """Return when the KV pages of these jobs are free; never waits for a disk.

        Stores are gathered into spare slots as far as those reach, the rest is cancelled; loads are
        given up, so that they fail and are recomputed. Waits for the event of a store that it gathers.
        """
        self._collect()
        for job in [self._jobs[j] for j in job_ids if j in self._jobs]:
            if job.is_load:
                self._abandon(job, Status.SKIPPED)
                continue
            # All of them first: the event may fire while one is gathered, and a thread that has only
            # just taken a task finds the job given up.
            taken = [task for task in job.tasks if not task.pages_free and self._take_back(task)]
            for task in taken:
                self._gather_ahead(task)
            self._abandon(job, Status.SKIPPED)

    def drop(self) -> None:
        """Give every job up: from the return on none of their KV pages is read or written.

        Waits for memory copies only. Loads fail, those too that have ended and were not polled: their pages
        are gone. Of stores, what a thread has gathered is still written, and all that waits is dropped, what
        wait() has gathered included.
        """
        self._collect()
        for job in list(self._jobs.values()):
            job.dropped = True
            self._abandon(job, Status.SKIPPED)
        for task in self._ends.open_stores:
            if task.queued is not None and self._pool.queue.cancel(task.queued):
                self._ends.store_over(task, Status.SKIPPED, 0.0)

    def take_outcomes(self) -> list[FileOutcome]:
        """Return what became of single chunks since the last call."""
        self._collect()
        outcomes = self._ends.take_outcomes()
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
        return self._ends.num_open_stores

    @property
    def num_running(self) -> int:
        """Tasks that a thread has in hand, those that hang included, and loads that were read ahead."""
        num_ahead = sum(task.parked for job in self._jobs.values() for task in job.tasks)
        return len(self._pool.queue.running()) + num_ahead + self._pool.queue.num_parked

    @property
    def num_threads_hung(self) -> int:
        return self._pool.num_hung

    def shutdown(self, timeout_s: float) -> None:
        """Give stores `timeout_s` to finish, then leave. Hung threads are never waited for."""
        end = self._clock() + timeout_s
        while self._clock() < end:
            self._collect()
            if all(task.outcome_known for task in self._ends.open_stores):  # the others hang
                break
            time.sleep(0.01)
        for job in list(self._jobs.values()):
            self._abandon(job, Status.SKIPPED)
        self._readiness.close()
        self._pool.close()

    def _collect(self) -> None:
        """Take over what I/O threads did outside the interpreter."""
        events = cast("list[tuple[FileTask, int, float]]", self._pool.queue.take_events())
        if events:
            self._store.replaced(
                task.move.file for task, event, _ in events if event == NativeEvent.STORED
            )
            self._ends.ended_outside(events)

    # --- the I/O threads' side ------------------------------------------------------------

    @contextlib.contextmanager
    def _own_slot(self) -> Iterator[OwnSlot[SlotT]]:
        """A slot for the life of a thread; without a device or memory it costs its chunks, not the engine."""
        numa.pin_thread(self._cpus)
        with self._slots.own() as own:
            yield own

    def _run(self, queued: Queued, own: OwnSlot[SlotT]) -> None:
        task = queued.owner
        assert task is not None, "it has not ended"
        if not self._slots.complete(own):
            self._ends.lost(task)
            return
        if not task.job.is_load:
            self._store_chunk(task, queued, own.slot)
            return
        if not self._load(task, queued, own):
            self._ends.slot_free(task)

    def _load(self, task: FileTask, queued: Queued, own: OwnSlot[SlotT]) -> bool:
        """Returns whether the task waits for the job's event, with what it needs in a slot of its own."""
        job, move, plan = task.job, task.move, task.move.plan
        slot = own.slot if task.slot is None else cast("SlotT", task.slot)
        if job.guard.abandoned:
            return False
        try:
            if slot is None:
                self._ends.pages_free(task, Status.TIMED_OUT, 0, 0.0)
                return False
            status = Status.OK
            if not isinstance(queued, Task) and queued.checked:
                task.touch = queued.old_mtime
            elif task.began_at is None:
                status, task.touch = self._store.get(
                    move.file, plan.first_block, plan.num_blocks, slot
                )
            if status is Status.OK:
                if task.began_at is None and self._park(task, own):
                    return True
                self._deliver(task, slot)
                return False
        except Exception:
            # A bug must cost this load, not the thread and not the request.
            logger.exception("fskv: load of %s", move.file)
            status = Status.IO_ERROR
        self._ends.pages_free(task, status, plan.nbytes, self._seconds(task))
        return False

    def _park(self, task: FileTask, own: OwnSlot[SlotT]) -> bool:
        """Let a load that was read wait for the job's event without a thread; False: need not, or cannot."""
        job = task.job
        if not task.ahead or not job.unready:
            return False
        spare = None
        if task.slot is None and (spare := self._slots.take()) is None:
            return False
        with job.lock:
            parked = job.unready and not task.pages_free
            if parked:
                if spare is not None:
                    task.slot, own.slot = own.slot, spare
                task.began_at, task.read_s = task.started_at, self._seconds(task)
                task.parked = True
                job.leave_disk(self._clock())
        if spare is not None and not parked:
            self._slots.give_back(spare)
        return parked

    def _deliver(self, task: FileTask, slot: SlotT) -> None:
        """Scatter what was read and checked into `slot`."""
        job, move, plan = task.job, task.move, task.move.plan
        if job.guard.enter():  # else the job was given up, and is closed by whoever did it
            try:
                base = self._store.layout(move.file.group_idx).header_nbytes
                self._transport.scatter(slot, base, plan.table, job.ready)
            finally:
                job.guard.leave()
            seconds = self._seconds(task) if task.began_at is None else task.read_s
            self._ends.pages_free(task, Status.OK, plan.nbytes, seconds)
            if task.touch:  # only now: a disk that hangs costs no load
                self._store.touch(move.file)

    def _store_chunk(self, task: FileTask, queued: Queued, slot: SlotT | None) -> None:
        status = Status.SKIPPED
        try:
            if queued.gathered:
                self._ends.pages_free(task, None, task.move.plan.nbytes, 0.0)
            elif task.slot is None and not self._gather(task, slot):
                return
            status = self._write(task, queued, cast("SlotT", task.slot or slot))
        except Exception:
            logger.exception("fskv: store of %s", task.move.file)
            status = Status.IO_ERROR
        finally:
            # Only matters when gathering raised.
            self._ends.pages_free(task, Status.SKIPPED, 0, 0.0)
            self._ends.store_over(task, status, self._seconds(task))

    def _gather(self, task: FileTask, slot: SlotT | None) -> bool:
        """Copy the task's pages into `slot` and close it; False when it was cancelled before."""
        job = task.job
        if slot is None:
            self._ends.pages_free(task, Status.SKIPPED, 0, 0.0)
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
        self._ends.pages_free(task, None, task.move.plan.nbytes, 0.0)
        return True

    def _write(self, task: FileTask, queued: Queued, slot: SlotT) -> Status:
        move = task.move
        # Pages on a device: only the gathering was Python's.
        if not isinstance(queued, Task) and queued.native and not queued.tried:
            done = _WRITTEN.get(queued.write(slot))
            if done is not None:
                return done
        return self._store.put(move.file, move.plan.first_block, slot)

    def _seconds(self, task: FileTask) -> float:
        return self._clock() - (task.started_at or 0.0)

    # --- shared ---------------------------------------------------------------------------

    def _gather_ahead(self, task: FileTask) -> None:
        """On the engine's thread: free the pages of a store that was taken back now, if a slot is spare."""
        status = Status.SKIPPED
        try:
            if self._slots.reserve_ahead(1):
                task.ahead = True
                task.slot = slot = self._slots.take()
                if slot is not None and self._gather(task, slot):
                    self._queue([task])
                    if task.queued is not None:
                        self._pool.queue.hasten(task.queued)
                    return
        except Exception:
            logger.exception("fskv: gather of %s", task.move.file)
            status = Status.IO_ERROR
        self._ends.pages_free(task, status, 0, 0.0)
        self._ends.store_over(task, status, 0.0)

    def _take_back(self, task: FileTask) -> bool:
        """Take a task out of the queue, or from those that wait; False: a thread has it, or had it."""
        with task.job.lock:
            if task.parked:
                task.parked = False
                return True
        return task.queued is not None and self._pool.queue.cancel(task.queued)

    def _abandon(self, job: Job, status: Status) -> None:
        """Free the pages of the job's tasks; those that are not free yet end with `status`."""
        job.guard.abandon()
        if all(task.pages_free for task in job.tasks):
            return  # the thread that ended the last one is about to report it
        begun = False
        for task in job.tasks:
            if task.pages_free:
                continue
            begun |= task.started_at is not None
            taken = self._take_back(task)
            self._ends.pages_free(task, status, 0, self._clock() - job.submitted_at)
            if job.is_load and taken:
                self._ends.slot_free(task)
            elif not job.is_load and (taken or task.queued is None):
                self._ends.store_over(task, status, 0.0)
        if status is Status.TIMED_OUT and not begun and self._pool.num_hung:
            self._breaker.record(status)  # no chunk got a thread, because threads hang: one sign

    def _write_off_hung(self, now: float) -> None:
        """Replace the threads of transfers that are past their deadline, whatever became of the job."""
        for queued in self._pool.queue.running():
            task: FileTask | None = queued.owner
            if task is None or queued.started_at is None:  # it has ended meanwhile
                continue
            # All threads share the disk.
            nbytes = self._num_threads * self._file_nbytes[task.move.file.group_idx]
            allowed = self._deadline.for_nbytes(nbytes)
            if now - queued.started_at > allowed:
                self._pool.write_off(queued)
                if not task.job.is_load:
                    self._ends.outcome_known(task, Status.TIMED_OUT, 0, now - queued.started_at)
                elif task.job.late and task.job.too_late is Status.SKIPPED:
                    # Given up before, and late it is: one sign.
                    task.job.too_late = Status.TIMED_OUT
                    self._breaker.record(Status.TIMED_OUT)
