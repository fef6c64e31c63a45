"""Ctrl-C at any moment: exit 130, one word and no traceback; work in hand is finished or taken back.

SIGTERM and SIGHUP do the same, with 143 and 129.

- While modules are imported, the process ends at once (`__main__`, `exits.leave`).
- While a command runs (`arm`), it is KeyboardInterrupt, once: what was begun takes itself back.
- While files are removed or copied (`stopped_by_signals`), the piece of work in hand is finished.

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

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_asked = 0  # the number of the signal that came first


def arm() -> None:
    """Let a signal raise KeyboardInterrupt from now on, once. Signals that our parent ignores are ignored."""
    _replace(leave, _raise)


def disarm() -> int:
    """Let a signal end the process at once; returns the number of the one that came since `arm`, or 0."""
    _replace(_raise, leave)
    return _asked


def _replace(old: Any, new: Any) -> None:
    for number in _SIGNALS:
        if signal.getsignal(number) is old:
            signal.signal(number, new)


def _raise(number: int, _: object) -> None:
    global _asked  # noqa: PLW0603  a process ends once
    _asked = _asked or number
    _replace(_raise, leave)
    sys.unraisablehook = _lost
    # It would tell, with a traceback, of each task in which this was raised.
    if "asyncio" in sys.modules:
        sys.modules["logging"].getLogger("asyncio").disabled = True
    raise KeyboardInterrupt


def _lost(unraisable: Any) -> None:
    """End at once: Python drops what a destructor, or a callback of one, raises."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        print("interrupted", file=sys.stderr, flush=True)
        leave(_asked)


class Stop(threading.Event):
    """An event that SIGINT, SIGTERM or SIGHUP sets."""

    number = 0

    def end(self) -> None:
        """Raise KeyboardInterrupt where a signal came. The exit code is that signal's."""
        global _asked  # noqa: PLW0603  a process ends once
        if self.is_set():
            _asked = self.number
            raise KeyboardInterrupt


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[Stop]:
    """Yield the event that signals set meanwhile. Call it on the main thread."""
    stop = Stop()

    def handle(number: int, _: object) -> None:
        if stop.is_set():
            leave(number)
        stop.number = number
        stop.set()

    # Under nohup a hangup is ignored, and stays so.
    heard = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, handle) for number in heard}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
