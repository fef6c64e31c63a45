"""Ctrl-C at any moment: exit 130, one word and no traceback; what was begun is finished or taken back.

- While modules are imported, the process ends at once (`__main__`, `exits.leave`).
- While a command runs (`arm`), it is KeyboardInterrupt, once: what was begun takes itself back.
- While something is being removed (`stopped_by_signals`), the piece of work in hand is finished and told.

A second Ctrl-C ends the process at once; at any moment the root is valid.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from .exits import leave

_AGAIN_S = 0.01
_asked = False


def arm() -> None:
    """Let SIGINT raise KeyboardInterrupt from now on, once. It stays ignored where our parent ignores it."""
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, _raise)


def disarm() -> bool:
    """Let SIGINT end the process at once; returns whether there was one since `arm`."""
    if _asked:
        signal.setitimer(signal.ITIMER_REAL, 0)
    elif signal.getsignal(signal.SIGINT) is _raise:
        signal.signal(signal.SIGINT, leave)
    return _asked


def _raise(*_: object) -> None:
    global _asked  # noqa: PLW0603  a process has one SIGINT
    _asked = True
    signal.signal(signal.SIGINT, leave)
    sys.unraisablehook = _lost
    # It would tell, with a traceback, of each task in which this was raised.
    if "asyncio" in sys.modules:
        sys.modules["logging"].getLogger("asyncio").disabled = True
    raise KeyboardInterrupt


def _lost(unraisable: Any) -> None:
    """Raise it again a moment later: Python drops what a destructor, or a callback of one, raises."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        signal.signal(signal.SIGALRM, _raise)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """Yield an event that SIGINT and SIGTERM set. Call it on the main thread."""
    stop = threading.Event()

    def handle(*_: Any) -> None:
        if stop.is_set():
            leave()
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
