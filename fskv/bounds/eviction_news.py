"""News of recently pruned chunks, for the engines that still believe in them.

After each prune the leader leaves files with the names of the removed chunks. Every engine's maintenance
process reads those of its own namespace. An engine that misses the news learns the same from a failed load.

Every user of the root can write to the directory. So a symbolic link in its place is refused, only files with
names of this module are read or removed, and a read is bounded.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence

from fskv.root.beneath import opened
from fskv.root.files import publishing, regular_file
from fskv.root.process_id import is_our_name, unique_name
from fskv.root.remove import remove_old

_KEPT_NS = 60 * 1_000_000_000
ENTRY_NBYTES = 20  # XXH3-128 of the key, group (little endian)
_MAX_ENTRIES = 1 << 15  # of one file: 640 KiB
_MAX_NBYTES = _MAX_ENTRIES * ENTRY_NBYTES
_MAX_TAKEN_NBYTES = 4 << 20  # by one call
_NAME = re.compile(r"[0-9a-f]{16}-(.+)\.(bin|part)", re.DOTALL)


class EvictionNews:
    """One process's view of the news in `directory`. Every call may hang, and may raise OSError."""

    def __init__(self, shared: str, file_mode: int = 0o600) -> None:
        self.directory = f"{shared}/removed"
        self._root = os.path.dirname(shared)
        self._file_mode = file_mode
        self._seen: set[str] = set()

    def publish(self, digest16: str, chunks: Sequence[tuple[bytes, int]]) -> None:
        """Publish the names of a namespace's removed chunks."""
        with self._opened() as directory:
            for at in range(0, len(chunks), _MAX_ENTRIES):
                some = chunks[at : at + _MAX_ENTRIES]
                name = f"{digest16}-{unique_name()}"
                with publishing(
                    f"{name}.bin", self._file_mode, dir_fd=directory, part=f"{name}.part"
                ) as file:
                    file.write(b"".join(key + g.to_bytes(4, "little") for key, g in some))

    def skip_old(self) -> None:
        """Skip the news files that exist already: an engine that starts needs only later news."""
        with self._opened() as directory:
            self._seen |= set(os.listdir(directory))

    def take_new(self, digest16: str) -> bytes:
        """Return the entries of this namespace that were not returned before; not all at once."""
        found = b""
        with self._opened() as directory:
            names = set(os.listdir(directory))
            for name in sorted(names - self._seen):
                if not name.endswith(".bin"):
                    continue
                if len(found) + _MAX_NBYTES > _MAX_TAKEN_NBYTES:
                    break
                self._seen.add(name)
                if name.startswith(f"{digest16}-") and is_news(name):
                    with contextlib.suppress(OSError):
                        with regular_file(name, dir_fd=directory) as file:
                            content = file.read(_MAX_NBYTES)
                        found += content[: len(content) - len(content) % ENTRY_NBYTES]
        self._seen &= names
        return found

    def remove_old(self, now_ns: int) -> None:
        """Remove news that every engine has had time to read. `now_ns`: the file system's own clock."""
        remove_old(self._root, self.directory, is_news, now_ns, _KEPT_NS)

    def _opened(self) -> contextlib.AbstractContextManager[int]:
        """Yield the directory's descriptor: whatever takes its place meanwhile, nothing else is touched."""
        return opened(self._root, self.directory)


def is_news(name: str) -> bool:
    """Return whether a file of that name is one that a holder of the lease, or a command, has left."""
    match = _NAME.fullmatch(name)
    return match is not None and is_our_name(match[1])


def entries(packed: bytes) -> list[tuple[bytes, int]]:
    """Return (XXH3-128 of the key, group) of each entry."""
    return [
        (packed[at : at + 16], int.from_bytes(packed[at + 16 : at + ENTRY_NBYTES], "little"))
        for at in range(0, len(packed), ENTRY_NBYTES)
    ]
