"""Ctrl-C and SIGTERM while something is being removed: the piece of work in hand is finished and told.

The first signal asks to stop, the second one ends the process at once; at any moment the root is valid.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

from .exits import Exit


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """Yield an event that SIGINT and SIGTERM set. Call it on the main thread."""
    stop = threading.Event()

    def handle(*_: Any) -> None:
        if stop.is_set():
            os._exit(Exit.INTERRUPTED)
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
