"""Daemon threads for calls that may never return.

A read on a dead NFS mount cannot be cancelled and its thread cannot be joined. A pool of
concurrent.futures would lose one thread for ever at each such call and then block the interpreter's
exit. Here the caller, who knows the deadline, writes the task off: its thread is counted as hung and
replaced, up to `max_hung` times; when the call returns after all, its thread ends.

A queue says what runs next, `HangProofPool` keeps the threads. The jobs' queue is `fskv._native.Queue`: a
thread that waits in it runs transfers by itself, outside the interpreter. The presence index has a
`CallQueue`.
All methods may be called from any thread.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from fskv.errors import RootError

if TYPE_CHECKING:
    from fskv.transports.protocol import Ready

_T = TypeVar("_T")
OwnerT = TypeVar("OwnerT")
TaskT = TypeVar("TaskT")
ContextT = TypeVar("ContextT")
QueueT = TypeVar("QueueT", bound="Queue[Any]")

START_UP_S = 60.0  # a root that does not answer for so long at start-up is refused

logger = logging.getLogger(__name__)


class Queue(Protocol[TaskT]):
    """What HangProofPool needs of a queue of tasks."""

    @property
    def num_idle(self) -> int:
        """Threads that wait in `take`."""

    @property
    def num_hung(self) -> int:
        """Threads whose task was written off and has not ended."""

    @property
    def wants_thread(self) -> bool:
        """Whether more is queued than idle threads will take."""

    def push(self, tasks: list[TaskT], /) -> bool:
        """Queue tasks; returns `wants_thread`."""

    def write_off(self, task: TaskT, /) -> bool:
        """Count the task's thread as hung until `finish`; returns False if it is not running."""

    def take(self, context: object, /) -> TaskT | None:
        """Wait for a task that Python has to run, and return it; None: the calling thread should end."""

    def finish(self, task: TaskT, /) -> bool:
        """End a task that `take` returned; returns whether it had been written off."""

    def close(self) -> None:
        """Drop what is queued and let idle threads go."""


class Call:
    """A queued call. Only its queue changes the other fields, under its lock."""

    __slots__ = ("call", "cancelled", "running", "written_off")

    def __init__(self, call: Callable[[], object]) -> None:
        self.call = call
        self.cancelled = self.running = self.written_off = False


class CallQueue:
    """Calls in the order in which they came. `_changed` guards every field."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queued: OrderedDict[Call, None] = OrderedDict()  # many may be taken back at once
        self._closed = False
        self.num_idle = 0
        self.num_hung = 0

    @property
    def wants_thread(self) -> bool:
        # An idle thread counts until it has woken up, so compare with the queue and not with zero.
        return not self._closed and len(self._queued) > self.num_idle

    def push(self, tasks: list[Call]) -> bool:
        with self._changed:
            if self._closed:
                return False
            self._queued.update((task, None) for task in tasks if not task.cancelled)
            self._changed.notify(len(tasks))
            return self.wants_thread

    def cancel(self, task: Call) -> bool:
        """Take a task back; returns False when it has started."""
        with self._changed:
            if task.running or task.cancelled:
                return False
            self._queued.pop(task, None)
            task.cancelled = True
            return True

    def write_off(self, task: Call) -> bool:
        with self._changed:
            if task.written_off or not task.running:
                return False
            task.written_off = True
            self.num_hung += 1
            return True

    def take(self, context: object) -> Call | None:
        with self._changed:
            while not self._queued and not self._closed:
                self.num_idle += 1
                self._changed.wait()
                self.num_idle -= 1
            if not self._queued:
                return None
            task, _ = self._queued.popitem(last=False)
            task.running = True
            return task

    def finish(self, task: Call) -> bool:
        with self._changed:
            self.num_hung -= task.written_off
            return task.written_off

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._queued.clear()
            self._changed.notify_all()


class HangProofPool(Generic[QueueT, TaskT, ContextT]):
    """`num_threads` working threads, kept at that number while at most `max_hung` others hang."""

    def __init__(
        self,
        name: str,
        num_threads: int,
        max_hung: int,
        queue: QueueT,
        handle: Callable[[TaskT, ContextT], None],
        context: Callable[[], contextlib.AbstractContextManager[ContextT]],
    ) -> None:
        """`handle(task, context)` runs what the queue hands out.

        `context` is entered by each thread when it starts, and left when it ends: what is the thread's own. A
        thread whose context raises ends, and is not replaced: the next `submit` tries again.
        """
        self._name = name
        self._num_threads = num_threads
        self._max_hung = max_hung
        self._handle = handle
        self._context = context
        self.queue = queue
        self._lock = threading.Lock()  # guards the four below
        self.num_waiting = 0
        self._num_alive = 0
        self._num_started = 0
        self._threads: list[threading.Thread] = []
        self._complained = False  # since a thread has last begun

    @property
    def num_hung(self) -> int:
        return self.queue.num_hung

    @property
    def num_idle(self) -> int:
        return self.queue.num_idle

    def submit(self, *tasks: TaskT) -> None:
        """Queue tasks. Bounded by the callers: each counts what it has queued."""
        self.start_threads(self.queue.push(list(tasks)), len(tasks))

    def start_threads(self, wanted: bool, num_tasks: int) -> None:
        """Start threads for tasks that were pushed, if they are `wanted`."""
        while wanted and num_tasks > 0 and self._start_thread_if_short():
            num_tasks -= 1

    def add_waiting(self, num_threads: int) -> None:
        """Keep so many threads more, or fewer: as many wait for something that is not their task."""
        with self._lock:
            self.num_waiting += num_threads

    def write_off(self, task: TaskT) -> None:
        """The task's deadline passed: do not count on its thread any more, and replace it."""
        if self.queue.write_off(task):
            self._start_thread_if_short()

    def close(self, timeout_s: float = 0.0) -> None:
        """Drop what is queued and let idle threads end; wait for them so long at most.

        A thread that frees a tensor of torch's while the interpreter ends takes the process down (SIGABRT).
        """
        self.queue.close()
        with self._lock:
            threads = list(self._threads)
        end = time.monotonic() + timeout_s
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _start_thread_if_short(self) -> bool:
        with self._lock:
            most = self._num_threads + self.num_waiting
            if self._num_alive - self.queue.num_hung >= most or not self.queue.wants_thread:
                return False
            if self._num_alive >= most + self._max_hung:
                return False
            self._num_started += 1
            name = f"{self._name}-{self._num_started}"
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                # No more threads for this process: the next submit tries again.
                logger.warning("fskv: %s: %s", self._name, error)
                return False
            self._threads = [t for t in self._threads if t.is_alive()] + [thread]
            self._num_alive += 1
            return True

    def _work(self) -> None:
        began = False
        try:
            with self._context() as context:
                began, self._complained = True, False
                while (task := self.queue.take(context)) is not None:
                    try:
                        self._handle(task, context)
                    # A bug of ours must not kill the thread that others rely on.
                    except BaseException:
                        logger.exception("fskv: %s: a task raised", self._name)
                    written_off = self.queue.finish(task)
                    del task  # or a waiting thread would keep its last one
                    if written_off:
                        break
        except Exception as error:
            first, self._complained = not self._complained, True
            if first:
                logger.error("fskv: %s: a thread cannot do its work: %s", self._name, error)
        finally:
            with self._lock:
                self._num_alive -= 1
            if began:  # else the next one would end like this, and the one after it
                self._start_thread_if_short()


def pool_of_calls(
    name: str, num_threads: int, max_hung: int
) -> HangProofPool[CallQueue, Call, None]:
    """Return a pool that makes the calls which are submitted to it."""
    return HangProofPool(
        name,
        num_threads,
        max_hung,
        CallQueue(),
        lambda task, _: task.call(),
        contextlib.nullcontext,
    )


def has_fired(ready: Ready) -> bool:
    """Whether an event has fired. One that cannot be asked has not: who waits for it will be told."""
    try:
        return ready.query()
    except Exception:
        return False


class Readiness:
    """Waits for events of a device's streams, on a thread of its own, in the order in which they came.

    An I/O thread that waited for an event that is not its load's would be missing at the disk.
    """

    def __init__(self, enter_thread: Callable[[], object]) -> None:
        """`enter_thread` is called first on the thread: it makes the device current."""
        self._enter_thread = enter_thread
        self._waiting: queue.SimpleQueue[tuple[Ready, Callable[[bool], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def call_after(self, ready: Ready, call: Callable[[bool], None]) -> bool:
        """Call `call` when `ready` has fired, with False when nobody can tell; False: it is not called."""
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="fskv-ready", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads for this process
                logger.warning("fskv: fskv-ready: %s", error)
                return False
            self._thread = thread
        self._waiting.put((ready, call))
        return True

    def close(self, timeout_s: float = 0.0) -> None:
        """Let the thread end after what it waits for; wait for it so long at most."""
        self._waiting.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _work(self) -> None:
        try:
            self._enter_thread()
        except Exception:
            logger.exception("fskv: the device cannot be made current")
        while (waiting := self._waiting.get()) is not None:
            ready, call = waiting
            fired = True
            try:
                ready.synchronize()
            except Exception:
                logger.exception("fskv: an event of the engine's stream cannot be waited for")
                fired = False
            try:
                call(fired)
            except Exception:  # a bug of ours must not keep the others waiting
                logger.exception("fskv: fskv-ready: a call raised")
            del waiting, ready, call  # or the waiting thread would keep its last job


def call_with_deadline(call: Callable[[], _T], timeout_s: float, message: str) -> _T:
    """Return call(), made on a daemon thread; raises RootError with `message` after `timeout_s` seconds.

    For the few calls at start-up and at the end that hang with a dead mount or a dead GPU.
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
