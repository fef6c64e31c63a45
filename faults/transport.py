"""A transport that does what a bad disk does, on a script.

`FaultTransport` is a second implementation of `fskv.data_path.transports.protocol.Transport`: it wraps
another one (a HostTransport over CPU tensors) and lets one event happen per operation. The script is data,
one character an operation, as in borg's "rrEr":

    .  nothing           E  EIO             N  ENOSPC           S  ESTALE       A  EACCES
    M  ENOENT            s  short read      B  a bit flips in the slot, after the read
    H  hang until `release()`; then the operation goes on                   L  slow (20 ms)

The operations are open, read, gather, scatter and write. After the last character nothing more
happens; a `*` at the end repeats the last one for ever: `Script(read=".H*")`.

`install` puts such transports in the place of every HostTransport made later in this process.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from fskv.data_path.transports import host
from fskv.data_path.transports.protocol import OpenChunk, Transport
from fskv.errors import ChunkCorrupt, ChunkTimedOut, chunk_error_from_os

OPERATIONS = ("open", "read", "gather", "scatter", "write")
EVENTS = ".ENSAMsBHL"
_ERRNOS = {
    "E": errno.EIO,
    "N": errno.ENOSPC,
    "S": errno.ESTALE,
    "A": errno.EACCES,
    "M": errno.ENOENT,
}
# A hang that nobody releases must fail the test, not the machine.
_LONGEST_HANG_S = 60.0


class Script:
    """A fixed sequence of events for each operation."""

    def __init__(self, **events: str) -> None:
        for operation, text in events.items():
            assert operation in OPERATIONS, operation
            assert set(text.removesuffix("*")) <= set(EVENTS), text
        self._lock = threading.Lock()
        self._events = {
            operation: itertools.chain(
                text.removesuffix("*"), itertools.repeat(text[-2] if text.endswith("*") else ".")
            )
            for operation, text in events.items()
        }

    def next(self, operation: str) -> str:
        with self._lock:
            return next(self._events[operation]) if operation in self._events else "."


class RandomScript:
    """Seeded events; `weights[operation]` maps event characters to weights."""

    def __init__(self, seed: int, weights: dict[str, dict[str, float]]) -> None:
        self._random = random.Random(seed)
        self._weights = weights
        self._lock = threading.Lock()
        self.calm = False  # no more faults from now on

    def next(self, operation: str) -> str:
        weights = self._weights.get(operation)
        if self.calm or not weights:
            return "."
        with self._lock:
            return self._random.choices(list(weights), list(weights.values()))[0]


class FaultTransport:
    """A Transport whose operations meet the events of a script; all else is that of the inner one."""

    def __init__(self, inner: Transport, script: Script | RandomScript) -> None:
        self.inner = inner
        self.script = script
        self.native = replace(inner.native, pages=None)  # everything comes by here
        self.description = f"faulty {inner.description}"
        self.after_write: Callable[[str], None] = lambda path: None
        self._changed = threading.Condition()
        self._generation = 0  # of releases
        self.num_hanging = 0
        self.num_running = dict.fromkeys(OPERATIONS, 0)
        self.num_done = dict.fromkeys(OPERATIONS, 0)

    # --- the test's side --------------------------------------------------------------------

    def release(self) -> None:
        """Let everything that hangs now go on."""
        with self._changed:
            self._generation += 1
            self._changed.notify_all()

    def wait_until_hanging(self, num: int, timeout_s: float = 20.0) -> None:
        """Return when `num` operations hang at the same time."""
        with self._changed:
            arrived = self._changed.wait_for(lambda: self.num_hanging >= num, timeout_s)
        assert arrived, f"{self.num_hanging} operations hang, expected {num}"

    # --- Transport --------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def gather(self, table: Any, slot: Any, base: int) -> None:
        with self._operation("gather", "pages"):
            self.inner.gather(table, slot, base)

    def scatter(self, slot: Any, base: int, table: Any) -> None:
        with self._operation("scatter", "pages"):
            self.inner.scatter(slot, base, table)

    @contextlib.contextmanager
    def open(self, path: str, dir_fd: int | None = None) -> Iterator[OpenChunk]:
        with self._operation("open", path):
            pass
        with self.inner.open(path, dir_fd) as file:
            yield _FaultChunk(self, file, path)

    def write_part(self, path: str, slot: Any, nbytes: int, dir_fd: int | None = None) -> None:
        with self._operation("write", path):
            self.inner.write_part(path, slot, nbytes, dir_fd)
        self.after_write(path)

    # --- events -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _operation(self, operation: str, path: str) -> Iterator[str]:
        with self._changed:
            self.num_running[operation] += 1
        try:
            event = self.script.next(operation)
            if event in _ERRNOS:
                # As the real transport raises it: the OSError is the cause.
                error = OSError(_ERRNOS[event], os.strerror(_ERRNOS[event]))
                raise chunk_error_from_os(error, path) from error
            if event == "s":
                raise ChunkCorrupt(f"{path}: ends early")
            if event == "L":
                time.sleep(0.02)
            if event == "H":
                self._hang(operation)
            yield event
        finally:
            with self._changed:
                self.num_running[operation] -= 1
                self.num_done[operation] += 1

    def _hang(self, operation: str) -> None:
        with self._changed:
            generation = self._generation
            self.num_hanging += 1
            self._changed.notify_all()
            try:
                if not self._changed.wait_for(
                    lambda: self._generation != generation, _LONGEST_HANG_S
                ):
                    raise ChunkTimedOut(f"{operation}: nobody released it")
            finally:
                self.num_hanging -= 1
                self._changed.notify_all()


class _FaultChunk:
    def __init__(self, transport: FaultTransport, inner: OpenChunk, path: str) -> None:
        self._transport = transport
        self._inner = inner
        self._path = path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def read_into(self, slot: Any, slot_offset: int, file_offset: int, nbytes: int) -> None:
        with self._transport._operation("read", self._path) as event:
            self._inner.read_into(slot, slot_offset, file_offset, nbytes)
            if event == "B":
                slot.array[slot_offset + nbytes // 2] ^= 0x10


def install(script: Script | RandomScript) -> Callable[[], None]:
    """Make every HostTransport of this process faulty from now on; returns a function that undoes it."""
    real = host.HostTransport

    def faulty(*args: Any, **kwargs: Any) -> FaultTransport:
        return FaultTransport(real(*args, **kwargs), script)

    def undo() -> None:
        vars(host)["HostTransport"] = real

    vars(host)["HostTransport"] = faulty
    return undo
