"""Daemon threads for calls that may never return.

A read on a dead NFS mount cannot be cancelled and its thread cannot be joined. A pool of
concurrent.futures would lose one thread for ever at each such call and then block the interpreter's
exit. Here the caller, who knows the deadline, writes the task off: its thread is counted as hung and
replaced, up to `max_hung` times; when the call returns after all, its thread ends.

`fskv._native.Queue` says what runs next, `HangProofPool` keeps the threads. A thread that waits in the queue
runs transfers by itself, outside the interpreter. One without a layout is Python's from the beginning.
All methods may be called from any thread.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from fskv.errors import RootError
from fskv.native import _native
from fskv.observe.state_log import Once

if TYPE_CHECKING:
    from fskv.data_path.transports.protocol import Ready

_T = TypeVar("_T")
OwnerT = TypeVar("OwnerT")
ContextT = TypeVar("ContextT")

START_UP_S = 60.0  # a root that does not answer for so long at start-up is refused
FINGERPRINT_S = 300.0  # a few thousand small reads, perhaps on a slow mount

logger = logging.getLogger(__name__)


class HangProofPool(Generic[OwnerT, ContextT]):
    """`num_threads` working threads, kept at that number while at most `max_hung` others hang."""

    def __init__(
        self,
        name: str,
        num_threads: int,
        max_hung: int,
        queue: _native.Queue,
        handle: Callable[[_native.Transfer[OwnerT], ContextT], None],
        context: Callable[[], contextlib.AbstractContextManager[ContextT]],
    ) -> None:
        """`handle(task, context)` runs each task of the queue.

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
        self._say = Once().say

    @property
    def num_hung(self) -> int:
        return self.queue.num_hung

    @property
    def num_idle(self) -> int:
        return self.queue.num_idle

    def submit(self, *tasks: _native.Transfer[OwnerT]) -> None:
        """Queue tasks; each caller limits and counts its own queued tasks."""
        self.start_threads(self.queue.push(list(tasks)), len(tasks))

    def start_threads(self, wanted: bool, num_tasks: int) -> None:
        """Start missing threads for pushed tasks, if these tasks are `wanted`."""
        while wanted and num_tasks > 0 and self._start_thread_if_short():
            num_tasks -= 1

    def add_waiting(self, num_threads: int) -> None:
        """Add `num_threads`, perhaps negative, to the kept threads: so many threads wait and run no task."""
        with self._lock:
            self.num_waiting += num_threads

    def write_off(self, task: _native.Transfer[OwnerT]) -> bool:
        """Replace the thread of a task whose deadline has passed, and count that thread as hung.

        Returns False if the task had no thread.
        """
        hangs = self.queue.write_off(task)
        if hangs:
            self._start_thread_if_short()
        return hangs

    def close(self, timeout_s: float = 0.0) -> None:
        """Drop queued tasks and let idle threads end; wait for them at most so long.

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
                began = True
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
            self._say(f"{self._name}: a thread cannot do its work: {error}")
        finally:
            with self._lock:
                self._num_alive -= 1
            if began:  # else the next one would end like this, and the one after it
                self._start_thread_if_short()


def has_fired(ready: Ready) -> bool:
    """Return whether an event has fired; an event that cannot be asked counts as one that has not fired."""
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
        """Call `call` when `ready` has fired, with False if that cannot be known; False: it is not called."""
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
        """Let the thread end after its present wait, and wait at most `timeout_s` for its end."""
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
