"""Sights of chunks that engines tell each other: the names of those that an engine has computed once.

Each engine's maintenance process appends names to a file of its own, and reads what is new in the others'.
The files outlive their engines for a day, so a restart forgets no sight (fskv.bounds.admission).

Every user of the root can write to the directory, and a false name costs a write at most. A symbolic link in
its place is refused, only files with names of this module are read or removed, and a read is bounded.
"""

from __future__ import annotations

import contextlib
import os
import re

from fskv.bounds.admission import NAME_NBYTES
from fskv.root.beneath import opened
from fskv.root.files import create_file, regular_file
from fskv.root.process_id import is_our_name
from fskv.root.remove import remove_old

_MAX_NBYTES = 1 << 20  # of a file: then another one begins
_NUM_FILES = 2  # of an engine
_ATTEMPTS = 16  # to find a number that no file has
_MAX_TAKEN_NBYTES = 32 << 10  # by one call
_MAX_BACKLOG_NBYTES = 1 << 20  # what is older is of no use: an engine remembers about as many
_KEPT_NS = 86_400 * 1_000_000_000
_NAME = re.compile(r"[0-9a-f]{16}-(.+)\.[0-9]{1,9}", re.DOTALL)


class SightsLog:
    """One process's view of the sights of its namespace; `directory` exists. Every call may hang; OSError."""

    def __init__(self, shared: str, digest16: str, engine: str, file_mode: int = 0o600) -> None:
        """`engine` is its unique name, which stays when its maintenance process is started again."""
        self.directory = f"{shared}/sights"
        self._root = os.path.dirname(shared)
        self._digest16 = digest16
        self._engine = engine
        self._file_mode = file_mode
        self._file: int | None = None  # made by us, whatever has its name meanwhile
        self._number = 0
        self._read: dict[
            tuple[str, int], int
        ] = {}  # name and inode -> how many bytes of it were read

    @property
    def _own(self) -> str:
        return f"{self._digest16}-{self._engine}."

    def move(self, digest16: str) -> None:
        """Begin with another namespace; the files about the last one go."""
        self.close()
        with contextlib.suppress(OSError), self._opened() as directory:
            for number in range(self._number, self._number - _NUM_FILES, -1):
                os.unlink(f"{self._own}{number}", dir_fd=directory)
        self._digest16, self._read = digest16, {}

    def publish(self, packed: bytes) -> None:
        """Tell names, of 8 bytes each."""
        if self._file is None:
            self._file = self._create()
        try:
            written = os.write(self._file, packed)
            os.fdatasync(self._file)  # or other nodes would not see it before it is closed
            info = os.fstat(self._file)
        except OSError:
            self.close()
            raise
        if info.st_size >= _MAX_NBYTES or not info.st_nlink or written < len(packed):
            self.close()

    def _create(self) -> int:
        with self._opened() as directory:
            for attempt in range(1, _ATTEMPTS + 1):
                self._number += 1
                name = f"{self._own}{self._number}"
                try:
                    file = create_file(name, self._file_mode, os.O_APPEND, dir_fd=directory)
                    break
                except FileExistsError:  # of the process before this one, or of somebody else
                    if attempt == _ATTEMPTS:
                        raise
            with contextlib.suppress(OSError):
                os.unlink(f"{self._own}{self._number - _NUM_FILES}", dir_fd=directory)
        return file

    def take_new(self) -> bytes:
        """Return names that others have told and no call has returned before; not all at once.

        The names of the youngest files come first.
        """
        found, seen, backlog = b"", {}, _MAX_BACKLOG_NBYTES
        with self._opened() as directory:
            for name, info in self._of_others(directory):
                size = min(info.st_size, 2 * _MAX_NBYTES) // NAME_NBYTES * NAME_NBYTES
                begin = max(self._read.get((name, info.st_ino), 0), size - backlog)
                backlog -= max(0, size - begin)
                seen[name, info.st_ino] = begin
                room = min(_MAX_TAKEN_NBYTES - len(found), size - begin)
                if room <= 0:
                    continue
                with contextlib.suppress(OSError), regular_file(name, dir_fd=directory) as file:
                    os.lseek(file.fd, begin, os.SEEK_SET)
                    content = file.read(room)
                    content = content[: len(content) // NAME_NBYTES * NAME_NBYTES]
                    found += content
                    seen[name, info.st_ino] = begin + len(content)
        self._read = seen
        return found

    def _of_others(self, directory: int) -> list[tuple[str, os.stat_result]]:
        """Return the files of the namespace's other engines, the youngest first."""
        files = []
        with os.scandir(directory) as entries:
            for entry in entries:
                name = entry.name
                if name.startswith(self._own) or not name.startswith(self._digest16):
                    continue
                if is_sights(name):
                    with contextlib.suppress(OSError):
                        files.append((name, entry.stat(follow_symlinks=False)))
        return sorted(files, key=lambda file: -file[1].st_mtime_ns)

    def remove_old(self, now_ns: int) -> None:
        """Remove the files, of all namespaces, that nobody has written to for a day.

        `now_ns`: the file system's own clock.
        """
        remove_old(self._root, self.directory, is_sights, now_ns, _KEPT_NS)

    def close(self) -> None:
        """Close our file; the next names go to another one."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _opened(self) -> contextlib.AbstractContextManager[int]:
        """Yield the directory's descriptor: whatever takes its place meanwhile, nothing else is touched."""
        return opened(self._root, self.directory)


def is_sights(name: str) -> bool:
    """Return whether a file of that name is one that an engine has left."""
    match = _NAME.fullmatch(name)
    return match is not None and is_our_name(match[1])
