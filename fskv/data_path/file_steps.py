"""The Python side of I/O threads: whole files without a slot in host memory, and files that `_native` left.

Nothing here changes a job. Outcomes are appended to `done`, for the engine's thread.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, cast

from fskv.data_path.job import FileTask, State
from fskv.data_path.transports import numa
from fskv.data_path.transports.protocol import OwnSlot, SlotPool, SlotT, Transport
from fskv.native import _native
from fskv.types import Status

logger = logging.getLogger(__name__)


class FileSteps(Generic[SlotT]):
    """Moves a file between pages, a slot and the disk, on the I/O thread that took the file."""

    def __init__(
        self,
        transport: Transport[SlotT],
        slots: SlotPool[SlotT],
        queue: _native.Queue,
        cpus: frozenset[int] | None,
        clock: Callable[[], float],
    ) -> None:
        self._transport = transport
        self._slots = slots
        self._queue = queue
        self._cpus = cpus
        self._clock = clock
        # A store's pages are free (None), or how the file ended, and after how many seconds.
        self.done: deque[tuple[FileTask, Status | None, float]] = deque()

    def gather(self, task: FileTask, slot: SlotT) -> None:
        """Copy a store's pages into a slot; raises the errors of Transport.gather."""
        base = task.job.store.layout(task.move.file.group_idx).header_nbytes
        self._transport.gather(task.move.plan.table, slot, base)

    @contextlib.contextmanager
    def own_slot(self) -> Iterator[OwnSlot[SlotT]]:
        """Yield an I/O thread's slot; a thread without device or memory fails its chunks, not the engine."""
        numa.pin_thread(self._cpus)
        with self._slots.own() as own:
            yield own

    def run(self, transfer: _native.Transfer[FileTask], own: OwnSlot[SlotT]) -> None:
        """Do the steps of a file that the C extension left to Python."""
        task = transfer.owner
        assert task is not None, "it has not ended"
        if transfer.layout is None:
            task.python_began_at = task.python_at_disk_since = self._clock()
        status = Status.IO_ERROR
        touch = False
        try:
            if not self._slots.complete(own):
                return
            if task.job.is_load:
                status, touch = self._load(task, transfer, own.slot)
            else:
                status = self._store_chunk(task, transfer, own.slot)
        except Exception:
            # A bug must cost this chunk, not the thread and not the request.
            logger.exception("fskv: %s", task.move.file)
        finally:
            seconds = self._clock() - (task.started_at or 0.0) - task.waited_s
            self.done.append((task, status, seconds))
        if touch:  # only now: a disk that hangs costs no load
            task.job.store.touch(task.move.file, task.move.use)

    def _load(
        self, task: FileTask, transfer: _native.Transfer[FileTask], slot: SlotT | None
    ) -> tuple[Status, bool]:
        """Load a file into its pages; return its status and whether to touch the file."""
        job, move, plan = task.job, task.move, task.move.plan
        if job.guard.abandoned:
            return Status.SKIPPED, False
        if slot is None:
            return Status.TIMED_OUT, False
        status, touch = Status.OK, transfer.old_mtime
        if transfer.state != State.SCATTERING:  # else it was read and checked
            status, touch = job.store.get(move.file, plan.first_block, plan.num_blocks, slot)
            touch = touch or move.use is not None
        if status is not Status.OK:
            return status, False
        base = job.store.layout(move.file.group_idx).header_nbytes
        scatter = self._transport.scatter
        if not self._at_pages(task, transfer, lambda: scatter(slot, base, plan.table)):
            return Status.SKIPPED, False
        return Status.OK, touch

    def _at_pages(
        self, task: FileTask, transfer: _native.Transfer[FileTask], copy: Callable[[], None]
    ) -> bool:
        """Run `copy` inside the job's gate (a load waits for the gate); False: the job was given up."""
        before = self._clock()
        task.python_at_disk_since = math.inf  # until the pages are free
        entered = self._queue.enter(transfer)
        try:
            if entered:
                task.python_waited_s = self._clock() - before
                copy()
        finally:
            if entered:
                self._queue.leave(transfer)
            task.python_at_disk_since = self._clock()
        return entered

    def _store_chunk(
        self, task: FileTask, transfer: _native.Transfer[FileTask], slot: SlotT | None
    ) -> Status:
        move = task.move
        if task.slot is not None:
            slot = cast("SlotT", task.slot)  # its pages are in it
        elif transfer.state == State.GATHERING:
            own = slot
            if own is None or not self._at_pages(task, transfer, lambda: self.gather(task, own)):
                return Status.SKIPPED
            self.done.append((task, None, 0.0))
        assert slot is not None, "it was gathered"
        is_used = move.use is not None
        status: Status = task.job.store.put(
            move.file, move.plan.first_block, slot, touch=not is_used
        )
        if status.good and move.use is not None:
            task.job.store.touch(move.file, move.use, fresh=status is Status.OK)
        return status
