"""The way from a maintenance process to its engine: a pipe that the engine need not read."""

from __future__ import annotations

import os
import select
from typing import Any

import msgpack


class Outbox:
    """Messages for the engine. One that does not read must not stop us: the lease and the heartbeat go on."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._rest = b""  # of a message that did not fit

    def send(self, message: dict[str, Any]) -> bool:
        """Send it, or at least its beginning; False: the pipe is full, and the message is dropped."""
        return self._flush() and self._write(msgpack.packb(message))

    def is_heard(self) -> bool:
        """Whether anybody has the other end of the pipe open."""
        poll = select.poll()
        poll.register(self._fd, 0)  # POLLERR is told without being asked for
        return not poll.poll(0)

    def _flush(self) -> bool:
        return not self._rest or (self._write(self._rest) and not self._rest)

    def _write(self, data: bytes) -> bool:
        try:
            self._rest = data[os.write(self._fd, data) :]
        except BlockingIOError:
            return False
        return True
