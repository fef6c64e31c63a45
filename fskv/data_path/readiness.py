"""Waits for events of a device's streams, on a thread of its own.

An I/O thread that waited for the GPU would be missing at the disk for the whole forward, and the wait would
be counted as the disk's. What must not begin yet waits here, in the order in which it came: that of the
engine's stream.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from fskv.transports.protocol import Ready

logger = logging.getLogger(__name__)


def has_fired(ready: Ready) -> bool:
    """Whether an event has fired. One that cannot be asked has not: who waits for it will be told."""
    try:
        return ready.query()
    except Exception:
        return False


class Readiness:
    """Calls back when an event has fired. Any thread; the calls are made on one thread."""

    def __init__(self, enter_thread: Callable[[], object]) -> None:
        """`enter_thread` is called first on the thread: it makes the device current."""
        self._enter_thread = enter_thread
        self._waiting: queue.SimpleQueue[tuple[Ready, Callable[[bool], None]] | None] = (
            queue.SimpleQueue()
        )
        self._started = False

    def call_after(self, ready: Ready, call: Callable[[bool], None]) -> bool:
        """Call `call` when `ready` has fired, with False when nobody can tell; False: it is not called."""
        if not self._started:
            try:
                threading.Thread(target=self._work, name="fskv-ready", daemon=True).start()
            except RuntimeError as error:  # no more threads for this process
                logger.warning("fskv: fskv-ready: %s", error)
                return False
            self._started = True
        self._waiting.put((ready, call))
        return True

    def close(self) -> None:
        """Let the thread end after what it waits for. Never waits for it."""
        self._waiting.put(None)

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
