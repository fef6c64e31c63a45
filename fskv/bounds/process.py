"""The maintenance process as its engine has it: two pipes, and whether it still runs.

It is no descendant of the engine: vLLM's server ends an engine with SIGKILL, and all that descend from it
(vllm.v1.utils.shutdown). What is to be ended then is ended by this process, which must outlive them.

Whoever is killed so was asked to end a moment before. The engine has no time to tell it, so Python's signal
handler does: it writes the number of each signal to a socket that the process can look into (`listen`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import msgpack

END = "end"  # the message that says: the engine ends as it should

_ASKS = frozenset({signal.SIGTERM, signal.SIGINT})
_LATELY_S = 120.0  # longer than what a service manager waits between SIGTERM and SIGKILL
_heard: tuple[socket.socket, socket.socket] | None = None  # both ends
_starters: list[subprocess.Popen[bytes]] = []  # that had not ended when they were let go


class MaintenanceProcess:
    """See the module docstring. Nothing here waits; one thread."""

    def __init__(self, options: Sequence[str] = ()) -> None:
        """Start it; raises OSError."""
        _starters[:] = [each for each in _starters if each.poll() is None]
        signals = listen()
        options = [*options, "--engine", str(os.getpid())]
        if signals is not None:
            options += ["--signals", str(signals)]
        self._starter = subprocess.Popen(  # it forks the process and ends
            [sys.executable, "-P", "-m", "fskv.maintenance", *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C in the terminal is the engine's
            pass_fds=() if signals is None else (signals,),
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

    def hear(self, most: int) -> bytes:
        """Return what it has said, b"" at its end; raises BlockingIOError when that is nothing."""
        return os.read(self._stdout.fileno(), most)

    def introduce(self, pid: int) -> None:
        """It has said what its number is."""
        self.pid = pid
        with contextlib.suppress(OSError):  # it is gone
            self._handle = os.pidfd_open(pid)

    @property
    def running(self) -> bool:
        """Whether it runs: it has the other end of the pipe open."""
        self._starter.poll()  # reaps it
        poll = select.poll()
        poll.register(self._stdout.fileno(), 0)
        return not poll.poll(0)

    def kill(self) -> None:
        """Send it SIGKILL; if it has not said what its number is, let it end. `running` says when it is gone.

        In a call that a mount never answers it stays until that does.
        """
        if self._handle is not None and self.running:  # so the handle is of it and no other one
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        self._say_end()

    def close(self) -> None:
        """Let it end by itself; it is not waited for, since it may hang. Raises nothing."""
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


class Starting:
    """A start of it on a thread of its own: the interpreter's files may lie on a mount that hangs."""

    def __init__(self, start: Callable[[], MaintenanceProcess]) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._made: MaintenanceProcess | OSError | None = None
        self._given_up = False
        try:
            threading.Thread(target=self._run, name="fskv-start", daemon=True).start()
        except RuntimeError as error:  # no more threads here
            self._made = OSError(errno.EAGAIN, str(error))

    @property
    def made(self) -> MaintenanceProcess | OSError | None:
        """The process, or why there is none; None: it is not known yet."""
        return self._made

    def give_up(self) -> None:
        """Let it end as soon as it is there."""
        with self._lock:
            self._given_up = True
            if isinstance(self._made, MaintenanceProcess):
                self._made.close()

    def _run(self) -> None:
        made: MaintenanceProcess | OSError
        try:
            made = self._start()
        except OSError as error:
            made = error
        except Exception as error:  # no memory, no more threads
            made = OSError(errno.EAGAIN, repr(error))
        with self._lock:
            self._made = made
            if self._given_up and not isinstance(made, OSError):
                made.close()


def _say(fd: int, message: dict[str, Any]) -> bool:
    try:
        os.write(fd, msgpack.packb(message))
    except OSError:  # it is full, or nobody reads it any more
        return False
    return True


def _say_end(stdin: Any, owner: int) -> None:
    if not stdin.closed and os.getpid() == owner:  # and no fork of it
        _say(stdin.fileno(), {END: True})


def listen() -> int | None:
    """Have signals of this process written down; return where, for `Asked` in another process.

    None where that is not possible: on another thread than the main one, or where the program has a
    descriptor of its own for it (asyncio's signal handlers).
    """
    global _heard  # noqa: PLW0603 - a process has one such descriptor
    if _heard is not None:
        return _heard[0].fileno()
    if threading.current_thread() is not threading.main_thread():
        return None
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        reader.close()
        writer.close()
        return None
    _heard = reader, writer
    return reader.fileno()


def _stop_listening() -> None:
    """In a fork of the process: a signal to it is none to the engine."""
    global _heard
    if _heard is None:
        return
    ends, _heard = _heard, None
    with contextlib.suppress(ValueError, OSError):
        present = signal.set_wakeup_fd(-1)
        if present not in (-1, ends[1].fileno()):
            signal.set_wakeup_fd(present)
    for end in ends:
        end.close()


os.register_at_fork(after_in_child=_stop_listening)


class Asked:
    """Whether a process that listens was asked to end lately; it may be gone. One reader for each."""

    def __init__(self, signals: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`signals` is what `listen` returned there, inherited by this process; it is closed with this."""
        self._socket = socket.socket(fileno=signals)
        self._clock = clock
        self._asked_at = float("-inf")

    def fileno(self) -> int:
        return self._socket.fileno()

    def hear(self) -> bool:
        """Read what has been written down, so that there is room for more; False at its end."""
        try:
            while received := self._socket.recv(1 << 16, socket.MSG_DONTWAIT):
                if not _ASKS.isdisjoint(received):
                    self._asked_at = self._clock()
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    @property
    def lately(self) -> bool:
        """Whether SIGTERM or SIGINT was heard in the last 120 s: one that it survived does not count."""
        self.hear()
        return self._clock() - self._asked_at <= _LATELY_S
