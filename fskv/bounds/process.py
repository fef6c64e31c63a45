"""The maintenance process as its engine has it: two pipes, and whether it still runs.

It is no descendant of the engine: vLLM's server ends an engine with SIGKILL, and all that descend from it
(vllm.v1.utils.shutdown). What is to be ended then is ended by this process, which must outlive them.

Whoever is killed so was asked to end a moment before. The engine has no time to tell it, so Python's signal
handler does: it writes the number of each signal to a socket that the process can look into (`listen`).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import msgpack

END = "end"  # the message that says: the engine ends as it should

_ASKS = frozenset({signal.SIGTERM, signal.SIGINT})
_heard: tuple[int, socket.socket, socket.socket] | None = None  # of which process; both ends


class MaintenanceProcess:
    """See the module docstring. Nothing here waits; one thread."""

    def __init__(self, options: Sequence[str] = ()) -> None:
        """Start it; raises OSError."""
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
        self._finalizer = weakref.finalize(self, _say_end, self._stdin, os.getpid())

    def send(self, message: dict[str, Any]) -> bool:
        """Send a message; False if the pipe is full. Below PIPE_BUF it goes whole or not at all."""
        return _say(self._stdin.fileno(), message)

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
        """Send it SIGKILL, if it has said what its number is, and let it go."""
        if self._handle is not None and self.running:  # so the handle is of it and no other one
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        self.close()

    def close(self) -> None:
        """Let it end by itself; it is not waited for, since it may hang."""
        self._finalizer()
        for pipe in (self._stdin, self._stdout):
            with contextlib.suppress(OSError):
                pipe.close()
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
        threading.Thread(target=self._starter.wait, name="fskv-reaper", daemon=True).start()


def _say(fd: int, message: dict[str, Any]) -> bool:
    try:
        os.write(fd, msgpack.packb(message))
    except (BlockingIOError, BrokenPipeError):
        return False
    return True


def _say_end(stdin: Any, owner: int) -> None:
    if not stdin.closed and os.getpid() == owner:  # and no fork of it
        _say(stdin.fileno(), {END: True})


def listen() -> int | None:
    """Have signals of this process written down; return where, for `asked_to_end` in another process.

    None where that is not possible: on another thread than the main one, or where the program has a
    descriptor of its own for it (asyncio's signal handlers).
    """
    global _heard  # noqa: PLW0603 - a process has one such descriptor
    if _heard is not None and _heard[0] == os.getpid():
        return _heard[1].fileno()
    if threading.current_thread() is not threading.main_thread():
        return None
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    inherited = -1 if _heard is None else _heard[2].fileno()  # by a fork
    if before not in (-1, inherited):
        signal.set_wakeup_fd(before)
        reader.close()
        writer.close()
        return None
    _heard = os.getpid(), reader, writer
    return reader.fileno()


def asked_to_end(signals: int) -> bool:
    """Return whether the process that listens has received SIGTERM or SIGINT; it may be gone."""
    with socket.socket(fileno=os.dup(signals)) as heard, contextlib.suppress(OSError):
        return not _ASKS.isdisjoint(heard.recv(1 << 16, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    return False
