"""The directory a bench writes into: made in one place, and gone afterwards whatever happened.

Ctrl-C, SIGTERM and SIGHUP raise `Stopped` once, on the main thread; signals after that are ignored while
the bench cleans up, for at most `PATIENCE_S`: on a dead mount a second one then ends the process at once.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import sys
import time
from types import FrameType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PATIENCE_S = 15.0


class Stopped(BaseException):
    """Somebody asked the bench to stop. Not an Exception: nobody may take it for a failed round."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class StopSignals:
    """While entered, they raise Stopped in the main thread, once; what is ignored (nohup) stays so."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._hook = sys.unraisablehook
        self._stopped: Stopped | None = None
        self._stopped_at = 0.0

    def __enter__(self) -> Self:
        for signum in _SIGNALS:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, self._on_signal)
        self._hook, sys.unraisablehook = sys.unraisablehook, self._lost
        return self

    def __exit__(self, *exc_info: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        sys.unraisablehook = self._hook

    def _lost(self, unraisable: Any) -> None:
        """Say nothing of a Stopped that was lost in a destructor: `check` raises it again."""
        if unraisable.exc_value is not self._stopped:
            self._hook(unraisable)

    def check(self) -> None:
        """Raise what was raised before, if that got lost (Python drops what a destructor raises)."""
        if self._stopped is not None:
            raise self._stopped

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self._stopped is None:
            self._stopped = Stopped(signum)
            self._stopped_at = time.monotonic()
            raise self._stopped
        if time.monotonic() - self._stopped_at > PATIENCE_S:
            os._exit(128 + signum)


def new_path(directory: str) -> str:
    """Return an unused name below `directory`; to be made inside the `try` that removes it."""
    return os.path.join(directory, f"fskv-bench-{secrets.token_hex(6)}")


def remove(path: str, timeout_s: float = 5.0) -> bool:
    """Remove a tree; returns whether it is gone. Tries again while a late thread still writes into it."""
    end = time.monotonic() + timeout_s
    while os.path.lexists(path):
        shutil.rmtree(path, ignore_errors=True)
        if time.monotonic() > end:
            return not os.path.lexists(path)
        if os.path.lexists(path):
            time.sleep(0.05)
    return True
