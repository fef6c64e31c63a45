"""Daemon threads for calls that may never return.

A read on a dead NFS mount cannot be cancelled and its thread cannot be joined. A pool of
concurrent.futures would lose one thread for ever at each such call and then block the interpreter's
exit. Here the caller, who knows the deadline, writes the task off: its thread is counted as hung and
replaced, up to `max_hung` times; when the call returns after all, the surplus thread ends.

Used by the jobs (chunk I/O) and by the presence index (probes). All methods may be called from any
thread; `_changed` guards every field.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

from fskv.errors import RootError

_T = TypeVar("_T")

START_UP_S = 60.0  # a root that does not answer for so long at start-up is refused

logger = logging.getLogger(__name__)


class Task:
    """One submitted call. Only the pool changes the fields, under its lock."""

    __slots__ = ("done", "run", "started", "written_off")

    def __init__(self, run: Callable[[], None]) -> None:
        self.run = run
        self.started = False
        self.done = False
        self.written_off = False


class HangProofPool:
    """`num_threads` working threads, kept at that number while at most `max_hung` others hang."""

    def __init__(self, name: str, num_threads: int, max_hung: int) -> None:
        self._name = name
        self._num_threads = num_threads
        self._max_hung = max_hung
        self._changed = threading.Condition()
        # Ordered sets: a deadline may take thousands of queued tasks back at once.
        self._urgent: OrderedDict[Task, None] = OrderedDict()
        self._normal: OrderedDict[Task, None] = OrderedDict()
        self._num_alive = 0
        self._num_idle = 0
        self._num_hung = 0
        self._num_started = 0
        self._closed = False

    @property
    def num_hung(self) -> int:
        return self._num_hung

    def submit(self, run: Callable[[], None], *, urgent: bool = False) -> Task:
        """Queue a call; urgent ones overtake all others. `run` must not raise.

        Bounded by the callers: each counts what it has queued.
        """
        task = Task(run)
        with self._changed:
            (self._urgent if urgent else self._normal)[task] = None
            if self._num_idle:
                self._changed.notify()
            self._start_thread_if_short()
        return task

    def cancel(self, task: Task) -> bool:
        """Take a task back; returns False when it has started."""
        with self._changed:
            if task.started:
                return False
            self._urgent.pop(task, None)
            self._normal.pop(task, None)
            task.started = task.done = True
            return True

    def hasten(self, task: Task) -> None:
        """Move a queued task ahead of all others that are not urgent."""
        with self._changed:
            if not task.started and task in self._normal:
                self._normal.move_to_end(task, last=False)

    def write_off(self, task: Task) -> None:
        """The task's deadline passed: do not count on its thread any more, and replace it."""
        with self._changed:
            if task.done or task.written_off or not task.started:
                return
            task.written_off = True
            self._num_hung += 1
            self._start_thread_if_short()

    def close(self) -> None:
        """Drop what is queued and let idle threads end. Never waits for a thread."""
        with self._changed:
            self._closed = True
            self._urgent.clear()
            self._normal.clear()
            self._changed.notify_all()

    def _start_thread_if_short(self) -> None:
        working = self._num_alive - self._num_hung
        # An idle thread counts until it has woken up, so compare with the queue and not with zero.
        wanted = len(self._urgent) + len(self._normal) > self._num_idle
        if self._closed or not wanted or working >= self._num_threads:
            return
        if self._num_hung > self._max_hung:
            return
        self._num_started += 1
        thread = threading.Thread(
            target=self._work, name=f"{self._name}-{self._num_started}", daemon=True
        )
        try:
            thread.start()
        except (
            RuntimeError
        ) as error:  # no more threads for this process: the next submit tries again
            logger.warning("%s: %s", self._name, error)
        else:
            self._num_alive += 1

    def _work(self) -> None:
        while True:
            with self._changed:
                while not (self._urgent or self._normal):
                    if self._closed:
                        self._num_alive -= 1
                        return
                    self._num_idle += 1
                    self._changed.wait()
                    self._num_idle -= 1
                task, _ = (self._urgent or self._normal).popitem(last=False)
                task.started = True
            try:
                task.run()
            except BaseException:  # a bug of ours must not kill the thread that others rely on
                logger.exception("%s: a task raised", self._name)
            with self._changed:
                task.done = True
                if task.written_off:
                    self._num_hung -= 1
                    if self._num_alive - self._num_hung > self._num_threads:
                        self._num_alive -= 1
                        return


def call_with_deadline(call: Callable[[], _T], timeout_s: float, message: str) -> _T:
    """Return call(), made on a daemon thread; raises RootError with `message` after `timeout_s` seconds.

    For the few calls on a root at start-up, which hang with a dead mount.
    """
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # handed to the caller
            errors.append(error)

    thread = threading.Thread(target=run, name="fskv-start-up", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors:
        raise errors[0]
    if not results:
        raise RootError(f"{message} within {timeout_s:g} s")
    return results[0]
