"""An engine's share of a root's bounds: what it may still write, and what was pruned.

The work is done by a process of its own (fskv.maintenance), which this starts and talks to over pipes: it
grants bytes, this hands them out to stores. Everything here returns at once. If the process is silent,
because the root hangs or it has died, nothing more is handed out: the engine goes on loading and stores
nothing until it is back.

One thread: the scheduler's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import msgpack

from fskv.claims import Limits
from fskv.removed import entries

logger = logging.getLogger(__name__)

_SILENT_S = (
    20.0  # longer than that without a word: what was granted may be thought to be ours no more
)
_IDLE_S = 10.0  # what is granted and not used for so long is given back
_RESTART_S = 10.0
_PAUSE_S, _MAX_PAUSE_S = 2.0, 60.0  # after ENOSPC; twice as long each time it is met again
_READ_NBYTES = 1 << 16
_MAX_FRAME = 64 << 20


@dataclass(frozen=True, slots=True)
class RootState:
    """What the maintenance process last said of the root. Counts are of the present holder of the lease."""

    nbytes: int = 0
    files: int = 0
    free: int = 0
    pruned_files: int = 0
    pruned_nbytes: int = 0
    orphans: int = 0
    unremovable: int = 0
    holder: bool = False


class Capacity:
    """See the module docstring."""

    def __init__(
        self,
        root: str,
        namespace: str,
        tenant: str | None,
        limits: Limits,
        *,
        dir_mode: int = 0o700,
        file_mode: int = 0o600,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`namespace` is "<arch>/<model>@<digest16>" of an opened root."""
        self._hello = {
            "root": root,
            "namespace": namespace,
            "tenant": tenant,
            "limits": asdict(limits),
            "dir_mode": dir_mode,
            "file_mode": file_mode,
        }
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._unpacker = msgpack.Unpacker()
        self._next_start = 0.0
        self._heard_at = 0.0
        self._said: dict[str, int] = {}
        self._allowed = 0  # bytes that may be used in all, by the present process
        self._used = 0
        self._written = 0
        self._returned = 0
        self._wanted = 0
        self._full = 0
        self._moved_at = 0.0  # when something was granted or taken last
        self._pause_s = 0.0
        self._paused_until = 0.0
        self._written_before_full = -1
        self.state = RootState()

    def start(self) -> None:
        """Start the maintenance process; where that fails it is tried again later, and nothing is stored."""
        self._next_start = self._clock() + _RESTART_S
        self._close_pipes()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "fskv.maintenance"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # a Ctrl-C in the terminal is the engine's
            )
        except OSError as error:
            logger.warning("fskv: no maintenance process, so nothing is stored: %s", error)
            return
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        for pipe in (self._process.stdin, self._process.stdout):
            os.set_blocking(pipe.fileno(), False)
        self._unpacker = msgpack.Unpacker(max_buffer_size=_MAX_FRAME)
        # A new process knows nothing of what the last one granted: only what is on its way is carried over.
        self._used -= self._written
        self._written = self._returned = 0
        self._allowed = 0
        self._said = {}
        self._heard_at = self._clock()
        self._say(self._hello)

    def take(self, nbytes: int) -> bool:
        """Ask whether so many more bytes may be written now. False: not now, and more is asked for."""
        # The process has been silent for so long (or nobody has listened) that others may think us dead.
        if self.paused or self._clock() - self._heard_at > _SILENT_S:
            return False
        if self._used + nbytes > self._allowed:
            self._wanted = max(self._wanted, nbytes)
            return False
        self._used += nbytes
        self._moved_at = self._clock()
        return True

    def settle(self, taken: int, written: int) -> None:
        """A store has ended: of `taken` bytes that it took `written` are on disk now."""
        self._used += written - taken
        self._written += written

    def no_space(self) -> None:
        """A store found the disk full: store nothing for a while, and have something pruned."""
        now = self._clock()
        if now < self._paused_until:
            return  # one of those that were under way
        again = self._written == self._written_before_full
        self._pause_s = min(_MAX_PAUSE_S, 2 * self._pause_s) if again else _PAUSE_S
        self._written_before_full = self._written
        self._paused_until = now + self._pause_s
        self._full += 1
        logger.warning("fskv: the disk is full: nothing is stored for %.0f s", self._pause_s)

    @property
    def paused(self) -> bool:
        """Whether stores pause because the disk was full."""
        return self._clock() < self._paused_until

    def poll(self) -> list[tuple[bytes, int]]:
        """Talk to the process, every step; returns what was pruned since: (XXH3-128 of the key, group)."""
        now = self._clock()
        if self._process is None or self._process.poll() is not None:
            self._allowed = 0
            if now >= self._next_start:
                self.start()
            return []
        silent = now - self._heard_at > _SILENT_S  # before: what waits in the pipe may be as old
        removed = self._hear(now)
        if silent or now - self._moved_at > _IDLE_S:
            self._returned += max(0, self._allowed - self._used)
            self._allowed = min(self._allowed, self._used)
        message = {
            "used": max(0, self._used),
            "written": self._written,
            "returned": self._returned,
            "wanted": self._wanted,
            "full": self._full,
        }
        if message != self._said and self._say(message):
            self._said = message
        return removed

    def close(self) -> None:
        """Let the process end by itself; it is not waited for, since it may hang."""
        if self._process is None:
            return
        self._close_pipes()
        threading.Thread(target=self._process.wait, name="fskv-reaper", daemon=True).start()
        self._process = None

    def _close_pipes(self) -> None:
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()

    def _hear(self, now: float) -> list[tuple[bytes, int]]:
        assert self._process is not None
        assert self._process.stdout is not None
        removed: list[tuple[bytes, int]] = []
        with contextlib.suppress(BlockingIOError):
            received = os.read(self._process.stdout.fileno(), _READ_NBYTES)
            if not received:
                return removed  # it is ending
            self._heard_at = now
            try:
                self._unpacker.feed(received)
                for message in self._unpacker:
                    removed += self._take_message(message, now)
            except Exception as error:  # a warning that some import prints to stdout, say
                logger.warning("fskv: the maintenance process says %s: it is started again", error)
                self._process.kill()
                self._allowed = 0
        return removed

    def _take_message(self, message: dict[str, Any], now: float) -> list[tuple[bytes, int]]:
        if "grant" in message:
            self._allowed += message["grant"]
            self._wanted = 0
            self._moved_at = now
        elif "removed" in message:
            return entries(message["removed"])
        else:
            self.state = RootState(**message)
        return []

    def _say(self, message: dict[str, Any]) -> bool:
        """Send a message; False if the pipe is full. Below PIPE_BUF it goes whole or not at all."""
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            os.write(self._process.stdin.fileno(), msgpack.packb(message))
        except (BlockingIOError, BrokenPipeError):
            return False
        return True
