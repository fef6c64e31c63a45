"""The engine's end of its maintenance process: two pipes, and whether the process still runs.

The process is no descendant of the engine. vLLM's server ends an engine and all its descendants with SIGKILL
(vllm.v1.utils.shutdown), and this process must outlive them to clean up.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgpack

END = "end"  # the message that says: the engine ends as it should

_starters: list[subprocess.Popen[bytes]] = []  # that had not ended when they were let go


class MaintenanceProcess:
    """An engine's handle on its maintenance process. Nothing here waits; one thread."""

    def __init__(self, options: Sequence[str] = ()) -> None:
        """Start the maintenance process; raises OSError."""
        _starters[:] = [each for each in _starters if each.poll() is None]
        options = [*options, "--engine", str(os.getpid())]
        self._starter = subprocess.Popen(  # it forks the process and ends
            [sys.executable, "-P", "-m", "fskv.maintenance", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C in the terminal is the engine's
        )
        assert self._starter.stdin is not None
        assert self._starter.stdout is not None
        self._stdin, self._stdout = self._starter.stdin, self._starter.stdout
        for pipe in (self._stdin, self._stdout):
            os.set_blocking(pipe.fileno(), False)
        self.pid: int | None = None  # once it has said so
        self._handle: int | None = None
        # Also where nobody closes: at the end of the interpreter.
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, _say_end, self._stdin, self._owner)

    def send(self, message: dict[str, Any]) -> bool:
        """Send a message; False if the pipe is full, or in a fork of the engine.

        Below PIPE_BUF it goes whole or not at all.
        """
        return os.getpid() == self._owner and _say(self._stdin.fileno(), message)

    def receive(self, most: int) -> bytes:
        """Return the bytes that the process sent, b"" at its end; raises BlockingIOError if there are none
        yet.
        """
        return os.read(self._stdout.fileno(), most)

    def introduce(self, pid: int) -> None:
        """Note the process id that the process has sent."""
        self.pid = pid
        with contextlib.suppress(OSError):  # it is gone
            self._handle = os.pidfd_open(pid)

    @property
    def running(self) -> bool:
        """Return whether the process still runs: a running process holds its end of the pipe open."""
        self._starter.poll()  # reaps it
        poll = select.poll()
        poll.register(self._stdout.fileno(), 0)
        return not poll.poll(0)

    def kill(self) -> None:
        """Send SIGKILL to the process; without its process id, tell it to end. `running` says when it is
        gone.

        In a call that a mount never answers it stays until that does.
        """
        if self._handle is not None and self.running:  # so the handle is of it and no other one
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        self._say_end()

    def close(self) -> None:
        """Tell the process to end, and do not wait for it, since it may hang. Raises nothing."""
        self._say_end()
        with contextlib.suppress(OSError):
            self._stdout.close()
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
        if self._starter.poll() is None:
            _starters.append(self._starter)

    def _say_end(self) -> None:
        if self._finalizer.detach() is not None:
            _say_end(self._stdin, self._owner)
        with contextlib.suppress(OSError):
            self._stdin.close()


def started_beside(start: Callable[[], MaintenanceProcess]) -> Future[MaintenanceProcess]:
    """Call `start` on another thread: the interpreter's files may lie on a mount that hangs."""
    made: Future[MaintenanceProcess] = Future()

    def run() -> None:
        try:
            made.set_result(start())
        except Exception as error:  # no memory, no more threads
            made.set_exception(error)

    try:
        threading.Thread(target=run, name="fskv-start", daemon=True).start()
    except RuntimeError as error:  # no more threads here
        made.set_exception(error)
    return made


def let_go(made: Future[MaintenanceProcess]) -> None:
    """Let a process end as soon as it has started."""
    if made.exception() is None:
        made.result().close()


def _say(fd: int, message: dict[str, Any]) -> bool:
    try:
        os.write(fd, msgpack.packb(message))
    except OSError:  # it is full, or nobody reads it any more
        return False
    return True


def _say_end(stdin: Any, owner: int) -> None:
    if not stdin.closed and os.getpid() == owner:  # and no fork of it
        _say(stdin.fileno(), {END: True})
