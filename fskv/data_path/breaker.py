"""A circuit breaker for one root: after failures in a row, operations skip the root for a while.

Shared state: `record` and `allows` may be called from any thread; one lock orders them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from fskv.observe.state_log import StateLog
from fskv.types import Status

# Evidence against the root itself. A missing, stale or corrupt file shows a disk that answers.
_FAILURES = frozenset({Status.TIMED_OUT, Status.IO_ERROR})
_NEUTRAL = frozenset({Status.SKIPPED, Status.BREAKER})
# In a row: a few may be a file's trouble, so many are the root's.
FAILURES = 8
# A root that is back is used again soon, and one that hangs costs one operation its deadline now and then.
PROBE_S = 5.0


class Breaker:
    """A closed breaker passes all operations; an open one passes a probe every `probe_s` seconds."""

    def __init__(
        self,
        *,
        failures: int = FAILURES,
        probe_s: float = PROBE_S,
        clock: Callable[[], float] = time.monotonic,
        log: StateLog | None = None,
    ) -> None:
        """`log` gets a line for each opening and closing."""
        self._log = log
        self._opened_at = 0.0
        self.num_openings = 0
        self.reason = ""  # of the last opening
        self._threshold = failures
        self._probe_s = probe_s
        self._clock = clock
        self._lock = threading.Lock()
        self._failures_in_row = 0
        self._next_probe_at = 0.0

    @property
    def open(self) -> bool:
        """Return whether the breaker refuses operations; reading this lets no probe operation pass."""
        return self._failures_in_row >= self._threshold

    def allows(self) -> bool:
        """Return whether an operation may go to the disk now; when open, at most one per `probe_s`."""
        if not self.open:
            return True
        with self._lock:
            now = self._clock()
            if now < self._next_probe_at:
                return False
            self._next_probe_at = now + self._probe_s
            return True

    def trip(self) -> None:
        """Open this breaker, because another breaker on the same root has opened."""
        with self._lock:
            opens = not self.open
            self._failures_in_row = max(self._failures_in_row, self._threshold)
            self._next_probe_at = self._clock() + self._probe_s
            if opens:
                self._opens("a worker's own breaker is open")
        if opens:
            self._say_open()

    def record(self, status: Status) -> None:
        """Note the status of an ended operation; any answer of the disk closes the breaker."""
        if status in _NEUTRAL:
            return
        with self._lock:
            if status not in _FAILURES:
                closes, opens = self.open, False
                self._failures_in_row = 0
                seconds = self._clock() - self._opened_at
            else:
                self._failures_in_row += 1
                closes, opens = False, self._failures_in_row == self._threshold
                if opens:
                    self._next_probe_at = self._clock() + self._probe_s
                    self._opens(f"{self._threshold} failures in a row, the last: {status.value}")
        if opens:
            self._say_open()
        elif closes and self._log is not None:
            self._log.say("breaker_closed", after_s=f"{seconds:.1f}")

    def _opens(self, reason: str) -> None:
        self.num_openings += 1
        self.reason = reason
        self._opened_at = self._clock()

    def _say_open(self) -> None:
        if self._log is not None:  # never under the lock: a log may block
            self._log.say("breaker_open", logging.WARNING, reason=self.reason)
