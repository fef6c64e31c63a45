"""Publishes chunk files in one namespace of a root, as docs/format.md says a writer must.

What it is given was checked. It writes a part beside the final name, with O_EXCL, and renames it: a chunk is
whole under its name or it is not there. Directories are opened one by one without following a symbolic link
and everything happens relative to them: nothing is written outside of the namespace, whatever stands there.

Any number of threads. `close` removes the parts of those that were interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator

from fskv import namespace
from fskv.errors import ChunkCorrupt, ChunkError, ChunkStale, NoSpace, chunk_error_from_os
from fskv.format.chunk_file import ChunkHeader, parse_header
from fskv.namespace import Identity
from fskv.root.beneath import hand_over, make_directory, open_directory, opened
from fskv.root.files import (
    RegularFile,
    UnfitFileError,
    create_file,
    publish_chunk,
    regular_file,
)
from fskv.root.process_id import unique_name
from fskv.root.root import CHUNK_DIR, Root
from fskv.transports.chunk_fd import OPEN_PART

from .allowance import Allowance, NoRoomError
from .candidate import Candidate, Head, check_rows, exactly, read_head
from .tally import Fate, Outcome

_ATTEMPTS = 10  # to publish a file while others remove directories


class Sink:
    """One namespace of a writable root that takes chunk files."""

    def __init__(
        self,
        root: Root,
        identity: Identity,
        allowance: Allowance | None,
        *,
        read_back: bool = False,
    ) -> None:
        """The namespace was opened (Root.open_namespace) if anything is to be stored.

        Without an allowance nothing can be, only looked for. `read_back` reads every part from the disk
        again before it gets its name.
        """
        self.identity = identity
        self._root = root
        self._path = f"{root.path}/{namespace.directory(identity)}"
        self._allowance = allowance
        self._read_back = read_back
        self._lock = threading.Lock()
        self._parts: set[str] = set()  # being written; guarded by _lock

    def close(self) -> None:
        """Remove what interrupted threads have left."""
        with self._lock:
            parts, self._parts = self._parts, set()
        for part in parts:
            directory, _, name = part.rpartition("/")
            with (
                contextlib.suppress(OSError),
                opened(self._root.path, directory, os.O_PATH) as fd,
            ):
                os.unlink(name, dir_fd=fd)

    # --- looking --------------------------------------------------------------------------

    def has(self, head: Head) -> bool:
        """Return whether a good file of this chunk is there, by length and header. Raises a ChunkError."""
        shard, name = _split(head.name)
        try:
            with self._shard(shard) as shard_fd, regular_file(name, dir_fd=shard_fd) as file:
                return self._is_good(file, head)
        except OSError as error:
            if isinstance(error, UnfitFileError) or error.errno in _NOT_THERE:
                return False
            raise chunk_error_from_os(error, f"{self._path}/{head.name}") from error

    def _is_good(self, file: RegularFile, head: Head) -> bool:
        if file.info.st_size != head.file_nbytes:
            return False
        try:
            found = parse_header(exactly(file.fd, len(head.raw)))
        except (ChunkCorrupt, ChunkStale):
            return False
        return _same_chunk(found, head.header) and found.first_block <= head.header.first_block

    def store(self, name: str, candidate: Candidate) -> Outcome:
        """Publish a file and return what became of it; `name` is for people."""
        nbytes = candidate.head.file_nbytes
        try:
            self.put(candidate)
        except NoRoomError:
            return Outcome(name, Fate.NO_ROOM, nbytes)
        except ChunkError as error:
            return Outcome(name, Fate.FAILED, nbytes, str(error))
        return Outcome(name, Fate.STORED, nbytes)

    # --- storing --------------------------------------------------------------------------

    def put(self, candidate: Candidate) -> None:
        """Publish a file, with its mtime. Raises NoRoomError, and a ChunkError for what the disk says."""
        assert self._allowance is not None  # the caller's bug
        path = f"{self._path}/{candidate.head.name}"
        nbytes = candidate.head.file_nbytes
        self._allowance.take(nbytes)
        written = 0
        try:
            self._put(candidate)
            written = nbytes
        except OSError as error:
            found = chunk_error_from_os(error, path)
            if isinstance(found, NoSpace):
                self._allowance.exhausted = str(found)
                raise NoRoomError(str(found)) from error
            raise found from error
        finally:
            self._allowance.settle(nbytes, written)

    def _put(self, candidate: Candidate) -> None:
        shard, name = _split(candidate.head.name)
        for attempt in range(_ATTEMPTS):
            try:
                with self._shard(shard, make=True) as shard_fd:
                    self._publish(shard_fd, shard, name, candidate)
                return
            except OSError as error:
                # Somebody removed an empty directory under us, or an NFS server forgot the handle: again.
                over = attempt == _ATTEMPTS - 1
                if over or error.errno not in (errno.ENOENT, errno.ESTALE):
                    raise

    def _publish(self, shard_fd: int, shard: str, name: str, candidate: Candidate) -> None:
        part = f"{unique_name()}.part"
        path = f"{self._path}/{CHUNK_DIR}/{shard}/{part}"
        with self._lock:
            self._parts.add(path)
        try:
            fd = create_file(part, self._root.file_mode, OPEN_PART, dir_fd=shard_fd)
            try:
                _write(fd, candidate)
                if self._read_back:  # from the disk, not from the page cache
                    os.fsync(fd)
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)  # NFS: this is where a full server may say so
            if self._read_back:
                self._check_again(shard_fd, part, candidate)
            publish_chunk(part, name, shard_fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(part, dir_fd=shard_fd)
            raise
        finally:
            with self._lock:
                self._parts.discard(path)

    def _check_again(self, shard_fd: int, part: str, candidate: Candidate) -> None:
        with regular_file(part, dir_fd=shard_fd) as file:
            nbytes, name = file.info.st_size, candidate.head.name
            head = read_head(lambda n: exactly(file.fd, n), name, nbytes, self.identity)
            check_rows(head.header, exactly(file.fd, head.header.payload_nbytes))
            if head.raw != candidate.head.raw:
                raise ChunkCorrupt("another header was read than written")

    @contextlib.contextmanager
    def _shard(self, shard: str, *, make: bool = False) -> Iterator[int]:
        """Open a directory of chunks without following a link anywhere below the root."""
        path = f"{self._path}/{CHUNK_DIR}/{shard}"
        try:
            fd = open_directory(self._root.path, path)
        except FileNotFoundError:
            if not make:
                raise
            make_directory(path, self._root.dir_mode, self._root.path)
            fd = open_directory(self._root.path, path)
        try:
            if make:  # another thread may have made it, and not be so far
                hand_over(fd, "..", dir_fd=fd)
            yield fd
        finally:
            os.close(fd)


# Nothing of ours is there: it is absent, or a link, a directory or a socket stands in its place.
_NOT_THERE = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ESTALE}
)


def _split(name: str) -> tuple[str, str]:
    _, shard, file = name.split("/")
    return shard, file


def _same_chunk(a: ChunkHeader, b: ChunkHeader) -> bool:
    fields = (
        *("namespace_digest", "layout_digest", "key_hash", "group_idx", "rank"),
        *("payload_nbytes", "header_nbytes"),
    )
    return all(getattr(a, field) == getattr(b, field) for field in fields)


def _write(fd: int, candidate: Candidate) -> None:
    pieces = [memoryview(candidate.head.raw), memoryview(candidate.payload)]
    while pieces:
        wrote = os.writev(fd, pieces)
        if not wrote:
            raise OSError(errno.ENOSPC, "short write")
        while pieces and wrote >= len(pieces[0]):
            wrote -= len(pieces.pop(0))
        if pieces:
            pieces[0] = pieces[0][wrote:]
    # "Last used", as where it comes from. Not in the future: nothing would ever prune it.
    mtime_ns = max(0, min(candidate.mtime_ns, time.time_ns()))
    with contextlib.suppress(OSError):
        os.utime(fd, ns=(mtime_ns, mtime_ns))
