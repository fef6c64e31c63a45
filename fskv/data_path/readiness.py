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


def has_fired(ready: Ready | None) -> bool:
    """Whether an event has fired, or there is none. One that cannot be asked has: the copy will tell."""
    try:
        return ready is None or ready.query()
    except Exception:
        logger.exception("fskv: an event of the engine's stream cannot be asked")
        return True


class Readiness:
    """Calls back when an event has fired. Any thread; the calls are made on one thread."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Ready, Callable[[], None]] | None] = (
            queue.SimpleQueue()
        )
        self._started = False

    def call_after(self, ready: Ready, call: Callable[[], None]) -> bool:
        """Call `call` when `ready` has fired; False: there is no thread to wait on, it will not be called."""
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
        while (waiting := self._waiting.get()) is not None:
            ready, call = waiting
            try:
                ready.synchronize()
            except Exception:  # the copy will tell
                logger.exception("fskv: an event of the engine's stream cannot be waited for")
            try:
                call()
            except Exception:  # a bug of ours must not keep the others waiting
                logger.exception("fskv: fskv-ready: a call raised")
            del waiting, ready, call  # or the waiting thread would keep its last job
