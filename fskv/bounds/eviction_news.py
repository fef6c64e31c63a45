"""What was pruned a short while ago, for the engines that believe it is still there.

After each prune the holder of the lease leaves files with the names of the chunks that went, and every
engine's maintenance process reads those of its own namespace. It is news, no record: who misses it learns the
same from a load that finds nothing.

The directory is one that everybody can write to: a symbolic link in its place is refused, only files of our
own names are read or removed, and of what is in them no more is read than anybody here writes.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections import deque
from collections.abc import Iterator, Sequence

from fskv.root.process_id import is_our_name, unique_name
from fskv.root.root import create_file

_KEPT_S = 600.0
_MAX_KEPT = 256  # prunes
ENTRY_NBYTES = 20  # XXH3-128 of the key, group (little endian)
_MAX_ENTRIES = 1 << 15  # of one file: 640 KiB
_MAX_NBYTES = _MAX_ENTRIES * ENTRY_NBYTES
_MAX_TAKEN_NBYTES = 4 << 20  # by one call
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NAME = re.compile(r"[0-9a-f]{16}-(.+)\.(bin|part)", re.DOTALL)


class EvictionNews:
    """One process's view; `directory` exists. Every call may hang; OSError where it is no directory."""

    def __init__(self, shared: str, file_mode: int = 0o600) -> None:
        self.directory = f"{shared}/removed"
        self._file_mode = file_mode
        self._seen: set[str] = set()
        self._first_seen: dict[str, float] = {}
        self._published: deque[str] = deque()

    def publish(self, digest16: str, chunks: Sequence[tuple[bytes, int]]) -> None:
        """Tell that these chunks of a namespace are gone."""
        with self._opened() as directory:
            for at in range(0, len(chunks), _MAX_ENTRIES):
                self._publish(directory, digest16, chunks[at : at + _MAX_ENTRIES])

    def _publish(self, directory: int, digest16: str, chunks: Sequence[tuple[bytes, int]]) -> None:
        packed = b"".join(name + group.to_bytes(4, "little") for name, group in chunks)
        stem = f"{digest16}-{unique_name()}"
        part, name = f"{stem}.part", f"{stem}.bin"
        fd = create_file(part, self._file_mode, dir_fd=directory)
        with os.fdopen(fd, "wb", buffering=0) as file:
            file.write(packed)
        os.rename(part, name, src_dir_fd=directory, dst_dir_fd=directory)
        self._published.append(name)
        if len(self._published) > _MAX_KEPT:
            with contextlib.suppress(OSError):
                os.unlink(self._published.popleft(), dir_fd=directory)

    def skip_old(self) -> None:
        """What is there already is nothing new to an engine that starts."""
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
                if name.startswith(f"{digest16}-") and _is_ours(name):
                    with contextlib.suppress(OSError):
                        content = _read(name, directory)
                        found += content[: len(content) - len(content) % ENTRY_NBYTES]
        self._seen &= names
        return found

    def remove_old(self) -> None:
        """Remove what everybody has had the time to read. By our own clock: nobody's is compared."""
        now = time.monotonic()
        with self._opened() as directory:
            names = {name for name in os.listdir(directory) if _is_ours(name)}
            for name in names:
                if now - self._first_seen.setdefault(name, now) > _KEPT_S:
                    with contextlib.suppress(OSError):
                        info = os.stat(name, dir_fd=directory, follow_symlinks=False)
                        if stat.S_ISREG(info.st_mode):
                            os.unlink(name, dir_fd=directory)
        self._first_seen = {name: at for name, at in self._first_seen.items() if name in names}

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """Yield the directory's descriptor: whatever takes its place meanwhile, nothing else is touched."""
        shared, name = os.path.split(self.directory)
        parent = os.open(shared, _OPEN)
        try:
            fd = os.open(name, _OPEN, dir_fd=parent)
        finally:
            os.close(parent)
        try:
            yield fd
        finally:
            with contextlib.suppress(OSError):
                os.close(fd)


def _is_ours(name: str) -> bool:
    match = _NAME.fullmatch(name)
    return match is not None and is_our_name(match[1])


def _read(name: str, directory: int) -> bytes:
    # What is no file must not make us wait: a FIFO has a reader's open() wait for its writer.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(
        name, "rb", buffering=0, opener=lambda path, _: os.open(path, flags, dir_fd=directory)
    ) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return b""
        return file.read(_MAX_NBYTES) or b""


def entries(packed: bytes) -> list[tuple[bytes, int]]:
    """Return (XXH3-128 of the key, group) of each entry."""
    return [
        (packed[at : at + 16], int.from_bytes(packed[at + 16 : at + ENTRY_NBYTES], "little"))
        for at in range(0, len(packed), ENTRY_NBYTES)
    ]
