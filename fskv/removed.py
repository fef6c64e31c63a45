"""What was pruned a short while ago, for the engines that believe it is still there.

After each prune the holder of the lease leaves a file with the names of the chunks that went, and every
engine's maintenance process reads those of its own namespace. It is news, no record: who misses it learns the
same from a load that finds nothing.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Sequence

from fskv.process import unique_name

_KEPT_S = 600.0
_MAX_KEPT = 256  # prunes
_MAX_NBYTES = 32 << 20
ENTRY_NBYTES = 20  # XXH3-128 of the key, group (little endian)


class RemovedLog:
    """One process's view; `directory` exists. Every call may hang."""

    def __init__(self, shared: str, file_mode: int = 0o600) -> None:
        self.directory = f"{shared}/removed"
        self._file_mode = file_mode
        self._seen: set[str] = set()
        self._first_seen: dict[str, float] = {}
        self._published: deque[str] = deque()

    def publish(self, digest16: str, chunks: Sequence[tuple[bytes, int]]) -> None:
        """Tell that these chunks of a namespace are gone."""
        packed = b"".join(name + group.to_bytes(4, "little") for name, group in chunks)
        name = f"{digest16}-{unique_name()}"
        part = f"{self.directory}/{name}.part"
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self._file_mode)
        with os.fdopen(fd, "wb", buffering=0) as file:
            file.write(packed)
        path = f"{self.directory}/{name}.bin"
        os.rename(part, path)
        self._published.append(path)
        if len(self._published) > _MAX_KEPT:
            with contextlib.suppress(OSError):
                os.unlink(self._published.popleft())

    def skip_old(self) -> None:
        """What is there already is nothing new to an engine that starts."""
        self._seen |= set(os.listdir(self.directory))

    def take_new(self, digest16: str) -> bytes:
        """Return the entries of this namespace that were not returned before."""
        found = b""
        names = set(os.listdir(self.directory))
        for name in sorted(names - self._seen):
            if not name.endswith(".bin"):
                continue
            self._seen.add(name)
            if name.startswith(f"{digest16}-"):
                with contextlib.suppress(OSError), open(f"{self.directory}/{name}", "rb") as file:
                    content = file.read(_MAX_NBYTES)
                    found += content[: len(content) - len(content) % ENTRY_NBYTES]
        self._seen &= names
        return found

    def remove_old(self) -> None:
        """Remove what everybody has had the time to read. By our own clock: nobody's is compared."""
        now = time.monotonic()
        names = set(os.listdir(self.directory))
        for name in names:
            if now - self._first_seen.setdefault(name, now) > _KEPT_S:
                with contextlib.suppress(OSError):
                    os.unlink(f"{self.directory}/{name}")
        self._first_seen = {name: at for name, at in self._first_seen.items() if name in names}


def entries(packed: bytes) -> list[tuple[bytes, int]]:
    """Return (XXH3-128 of the key, group) of each entry."""
    return [
        (packed[at : at + 16], int.from_bytes(packed[at + 16 : at + ENTRY_NBYTES], "little"))
        for at in range(0, len(packed), ENTRY_NBYTES)
    ]
