"""Runs a Maintainer for one engine, as `python -m fskv.maintenance`, until the engine ends.

Then it removes the heartbeat and writes `ended` into the engine's health file.

Asynchronous: one task for the engine's messages, beside the leader's work.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import select
import signal
import sys
import time
from typing import Any

import msgpack

from fskv.bounds.limits import Heartbeat, Limits
from fskv.bounds.maintenance import LOOK_S, Maintainer
from fskv.bounds.process import END
from fskv.bounds.shared_files import parsed
from fskv.observe.health_file import end_health_file
from fskv.root.process_id import unique_name

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 1.0
_END_S = 60


class Outbox:
    """Messages for the engine; an engine that reads none must not stop the lease and the heartbeat."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._rest = b""  # of a message that did not fit

    def send(self, message: dict[str, Any]) -> bool:
        """Send a message, or at least its beginning; False: the pipe is full, so the message is dropped."""
        flushed = not self._rest or self._write(self._rest)
        return flushed and not self._rest and self._write(msgpack.packb(message))

    def is_heard(self) -> bool:
        """Return whether the engine still has its end of the pipe open."""
        poll = select.poll()
        poll.register(self._fd, 0)  # POLLERR is told without being asked for
        return not poll.poll(0)

    def _write(self, data: bytes) -> bool:
        try:
            self._rest = data[os.write(self._fd, data) :]
        except BlockingIOError:
            return False
        return True


async def serve(engine: int) -> None:
    """Maintain the root that the first message names, until the engine ends or closes our standard input.

    `engine` is the id of its process.
    """
    loop = asyncio.get_running_loop()
    # The stop of a whole service sends this to all of its processes: we end after the engine.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    gone: asyncio.Future[None] = loop.create_future()
    # A process that the engine forked may keep our standard input open.
    try:
        handle = os.pidfd_open(engine)
        loop.add_reader(handle, lambda: None if gone.done() else gone.set_result(None))
    except ProcessLookupError:
        gone.set_result(None)
    except OSError:
        pass  # not supported here
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    outbox = Outbox(1)
    unpacker = msgpack.Unpacker()
    begun: asyncio.Future[None] = loop.create_future()
    maintainer: Maintainer | None = None
    health_file: str | None = None

    async def listen() -> None:
        nonlocal maintainer, health_file
        while received := await reader.read(1 << 16):
            unpacker.feed(received)
            for message in unpacker:
                if END in message:  # a process that the engine forked may keep the pipe open
                    return
                if maintainer is None:
                    health_file = message.pop("health_file")
                    maintainer = _begin(message, outbox)
                    begun.set_result(None)
                else:
                    maintainer.receive(**message)

    listening = asyncio.ensure_future(listen())
    ends: set[asyncio.Future[None]] = {gone, listening}
    with contextlib.suppress(BrokenPipeError):
        outbox.send({"pid": os.getpid()})
        await asyncio.wait({*ends, begun}, return_when=asyncio.FIRST_COMPLETED)
        while maintainer is not None and not any(end.done() for end in ends):
            started = time.monotonic()
            pause_s = await maintainer.try_step()
            # However slow the root is: at most a third of a core, and few requests to a server.
            pause_s = max(pause_s, min(LOOK_S, 2 * (time.monotonic() - started)))
            await asyncio.wait(ends, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
    # Its last words may be unread.
    await asyncio.wait({listening}, timeout=_LAST_WORDS_S)
    if listening.done():
        listening.result()
    # Nobody waits for us any more, and nobody is to find us beside a mount that hangs.
    signal.alarm(_END_S)
    if maintainer is not None:
        with contextlib.suppress(Exception):  # the root is gone, or read-only
            maintainer.close()
    if health_file is not None:
        with contextlib.suppress(Exception):
            end_health_file(health_file, engine)


def _begin(options: dict[str, Any], outbox: Outbox) -> Maintainer:
    limits = parsed(Limits, options["limits"])
    return Maintainer(
        options["root"],
        Heartbeat(unique_name(), options["namespace"], options["tenant"], limits),
        outbox.send,
        outbox.is_heard,
        dir_mode=options["dir_mode"],
        file_mode=options["file_mode"],
        engine=options["engine"],
    )


def main() -> None:
    parser = argparse.ArgumentParser("fskv.maintenance")
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("--engine", type=int, required=True)
    options = parser.parse_args()
    level = logging.WARNING if options.quiet else logging.INFO
    logging.basicConfig(level=level, format="%(message)s")
    with contextlib.suppress(OSError):
        os.nice(5)
    code = 0
    try:
        asyncio.run(serve(options.engine))
    except (BrokenPipeError, KeyboardInterrupt):
        pass
    except Exception:
        logger.exception("fskv: maintenance ended")
        code = 1
    os._exit(code)  # a worker thread may hang with its mount: nobody waits for it
