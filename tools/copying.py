"""Copies chunk files from one root to another, each checked in memory between the read and the write.

A file is published as docs/format.md says a writer must: whole under its name, or not there. A good file
that is there already stays. On both sides no symbolic link below the root is followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum

from fskv import namespace
from fskv.bounds.limits import Limits, Scope, inodes_short
from fskv.errors import (
    ChunkCorrupt,
    ChunkError,
    ChunkIOError,
    ChunkMissing,
    ChunkStale,
    FskvError,
    NoSpace,
    chunk_error_from_os,
)
from fskv.format import chunk_file
from fskv.format.chunk_file import ALIGNMENT, ChunkHeader
from fskv.namespace import ChunkName, Identity, parse_chunk_file
from fskv.root.beneath import hand_over, make_directory, opened
from fskv.root.files import (
    RegularFile,
    UnfitFileError,
    create_file,
    publish_chunk,
    regular_file,
    retry_stale,
)
from fskv.root.filesystem import Space
from fskv.root.process_id import unique_name
from fskv.root.root import PART_PREFIX, Root
from fskv.sizes import Share

from .check.expect import expected_of
from .exits import NotARoot, UsageError
from .neighbours import bounds_of
from .root_view import ChunkFile
from .terminal import iec

_ATTEMPTS = 10  # to publish a file while others remove empty directories
_LOOK_S = 1.0  # between two looks at the bounds of the destination
# Files are held in memory as a whole: one for each thread, but of those that are larger only one at a time.
_LARGE_NBYTES = 64 << 20
_MAX_FILE_NBYTES = 1 << 30
_BOUNDS = {
    "root": "an engine's max_bytes",
    "tenant": "an engine's tenant_max_bytes",
    "free": "--keep-free, or an engine's keep_free,",
}


class Fate(StrEnum):
    """The outcome of one file."""

    STORED = "stored"
    THERE = "there"  # a good one was there and stays
    GONE = "gone"  # pruned between the listing and the look
    BAD = "bad"  # failed a check
    FAILED = "failed"  # the disk said no
    NO_ROOM = "no_room"  # the destination is full


@dataclass(frozen=True, slots=True)
class Outcome:
    """The fate of one file of the source."""

    file: ChunkFile
    fate: Fate
    nbytes: int = 0  # its length, 0 where nobody knows
    why: str = ""


class Room:
    """Says whether the destination has room: by the bounds of its living engines, and `keep_free`.

    The published sums may hold what was copied, or not yet. So both must fit: what was left at the start,
    less all that was written, and what is left now. Any number of threads.
    """

    def __init__(self, root: str, keep_free: int | Share) -> None:
        self._root = root
        self._limits = Limits(keep_free=keep_free)
        self._lock = threading.Lock()  # guards all that follows
        self._written: Counter[str | None] = Counter()  # bytes by tenant
        self._at_start: dict[tuple[str, str | None], int] = {}
        self._scopes: list[Scope] = []
        self._looked_at = -_LOOK_S
        self._since = 0  # bytes since then
        self.refusal: str | None = None  # why nothing more may be written; it stays so

    def take(self, tenant: str | None, nbytes: int) -> bool:
        """Count bytes before they are written; False where the destination has no room for the bytes."""
        with self._lock:
            if time.monotonic() - self._looked_at >= _LOOK_S:
                self._look()
            total = self._written.total()
            for scope in self._scopes:
                if scope.kind == "tenant" and scope.name != tenant:
                    continue
                written = self._written[tenant] if scope.kind == "tenant" else total
                at_start = self._at_start.setdefault((scope.kind, scope.name), scope.left + written)
                if min(at_start - written, scope.left - self._since) < nbytes:
                    used, limit = iec(scope.used), iec(scope.limit)
                    self.refusal = f"{_BOUNDS[scope.kind]} allows {limit} in use, {used} are"
            if self.refusal is None:
                self._written[tenant] += nbytes
                self._since += nbytes
            return self.refusal is None

    def _look(self) -> None:
        self._scopes = bounds_of(self._root, time.time_ns(), self._limits).scopes
        self._looked_at, self._since = time.monotonic(), 0
        if inodes_short([self._limits], Space.of(self._root)):
            self.refusal = "fewer inodes than --keep-free would stay free"


def open_destination(path: str, *, create: bool, writable: bool) -> Root:
    """Open the root to copy to. Raises NotARoot, in one sentence, and UsageError."""
    if not path:  # an empty variable of a script
        raise UsageError("--to: found nothing, expected the directory of a cache root")
    try:
        root = Root.open(os.path.abspath(path), create=create, writable=writable)
    except FskvError as error:
        text = str(error).replace("option 'root'", "--to")
        raise NotARoot(text.replace("an engine makes", "--create makes")) from None
    if writable:
        _refuse_what_its_owner_could_not_read(root)
    return root


def _refuse_what_its_owner_could_not_read(root: Root) -> None:
    owner = os.stat(root.path).st_uid
    if owner == os.geteuid() or root.file_mode & stat.S_IRGRP:
        return
    path = f"{root.path}/{PART_PREFIX}{unique_name()}.part"
    try:
        fd = create_file(path, root.file_mode)
    except OSError as error:
        raise NotARoot(f"--to: {root.path}: nothing can be written: {error.strerror}") from None
    try:
        found = os.fstat(fd).st_uid
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            os.unlink(path)
    if found != owner:
        raise NotARoot(
            f"--to: {root.path} belongs to uid {owner}, whose engines could not read what uid "
            f"{os.geteuid()} writes; run this as that user"
        )


class Copier:
    """Copies files of one namespace into a root; any number of threads.

    For a root that is not writable it only compares.
    """

    _large = threading.Lock()

    def __init__(self, root: Root, identity: Identity, room: Room) -> None:
        """Make the namespace where it is not there. Raises RootError."""
        self._root = root
        self._tenant = identity.tenant
        self._expected = expected_of(identity, identity.digest16)
        self._room = room
        self._to = f"{root.path}/{namespace.directory(identity)}"
        if root.writable:
            root.open_namespace(identity)  # compared, before anything is stored in it

    def copy(
        self, files: Iterable[ChunkFile], num_threads: int, stop: threading.Event
    ) -> Iterator[Outcome]:
        """Copy files until `stop` is set, and yield the outcome of each, in order."""
        pending: deque[Future[Outcome]] = deque()
        pool = ThreadPoolExecutor(num_threads)
        try:
            for file in files:
                pending.append(pool.submit(self.copy_one, file))
                if len(pending) > 2 * num_threads:
                    yield pending.popleft().result()
            while pending and not stop.is_set():
                yield pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)  # and what is under way is finished

    def copy_one(self, file: ChunkFile) -> Outcome:
        """Copy one file."""
        if self._room.refusal is not None:
            return Outcome(file, Fate.NO_ROOM)
        try:
            return retry_stale(lambda: self._copy(file))
        except (OSError, ChunkError) as raised:
            error = raised
        if isinstance(error, OSError) and not isinstance(error, UnfitFileError):
            error = chunk_error_from_os(error, file.path)
        if isinstance(error, ChunkMissing):
            return Outcome(file, Fate.GONE)
        is_bad = isinstance(error, ChunkCorrupt | ChunkStale | UnfitFileError)
        return Outcome(file, Fate.BAD if is_bad else Fate.FAILED, why=str(error))

    def _copy(self, file: ChunkFile) -> Outcome:
        chunk = parse_chunk_file(file.name)
        assert chunk is not None  # of a walk
        with (
            opened(file.namespace.root, file.directory) as directory,
            regular_file(file.name, dir_fd=directory) as source,
        ):
            nbytes = source.info.st_size
            header, content = self._header(source, chunk)
            if self._is_there(file, chunk, header):
                return Outcome(file, Fate.THERE, nbytes)
            with self._large if nbytes > _LARGE_NBYTES else contextlib.nullcontext():
                payload = source.read(header.payload_nbytes)
                if len(payload) < header.payload_nbytes:
                    raise ChunkCorrupt(
                        f"ends after {len(content) + len(payload)} of {nbytes} bytes"
                    )
                if not header.encrypted:  # else whoever has the key checks it
                    chunk_file.check_rows(memoryview(payload), 0, header.row_digests)
                if not self._root.writable:
                    return Outcome(file, Fate.STORED, nbytes)  # it would be
                if not self._room.take(self._tenant, nbytes):
                    return Outcome(file, Fate.NO_ROOM, nbytes)
                return self._store(file, [content, payload], source.info.st_mtime_ns)

    def _header(self, source: RegularFile, chunk: ChunkName) -> tuple[ChunkHeader, bytes]:
        """Read and check the header; raises ChunkCorrupt and ChunkStale."""
        nbytes = source.info.st_size
        if nbytes > _MAX_FILE_NBYTES:
            raise ChunkStale(
                f"{nbytes} bytes, more than {_MAX_FILE_NBYTES}: too large to be checked"
            )
        content = source.read(ALIGNMENT)
        content += source.read(chunk_file.header_length(content) - len(content))
        header = chunk_file.parse_header(content)
        self._expected.compare(header, chunk)
        if nbytes != len(content) + header.payload_nbytes:
            wanted = len(content) + header.payload_nbytes
            raise ChunkCorrupt(f"{nbytes} bytes, header says {wanted}")
        return header, content

    def _is_there(self, file: ChunkFile, chunk: ChunkName, header: ChunkHeader) -> bool:
        """Return whether the destination has a good file of this chunk, by length and header."""
        directory = os.path.dirname(f"{self._to}/{file.relative}")
        try:
            with (
                opened(self._root.path, directory) as fd,
                regular_file(file.name, dir_fd=fd) as there,
            ):
                found, _ = self._header(there, chunk)
        except ChunkError:
            return False
        except OSError as error:
            if isinstance(error, UnfitFileError) or error.errno in _NOT_THERE:
                return False
            raise _in_destination(error, directory) from error
        return found.layout_digest == header.layout_digest and (
            found.first_block <= header.first_block
        )

    def _store(self, file: ChunkFile, pieces: list[bytes], mtime_ns: int) -> Outcome:
        nbytes = sum(map(len, pieces))
        directory = os.path.dirname(f"{self._to}/{file.relative}")
        for left in reversed(range(_ATTEMPTS)):
            try:
                self._publish(directory, file.name, pieces, mtime_ns)
                break
            except OSError as error:
                if left and error.errno in (errno.ENOENT, errno.ESTALE):
                    continue  # an empty directory was removed under us
                found = _in_destination(error, directory)
                if not isinstance(found, NoSpace):
                    raise found from error
                self._room.refusal = str(found)
                return Outcome(file, Fate.NO_ROOM, nbytes)
        return Outcome(file, Fate.STORED, nbytes)

    def _publish(self, directory: str, name: str, pieces: list[bytes], mtime_ns: int) -> None:
        make_directory(directory, self._root.dir_mode, self._root.path)
        with opened(self._root.path, directory) as fd:
            hand_over(fd, "..", dir_fd=fd)  # another thread may have made it, and not be so far
            part = f"{unique_name()}.part"
            try:
                with os.fdopen(create_file(part, self._root.file_mode, dir_fd=fd), "wb") as file:
                    file.writelines(pieces)
                    file.flush()
                    # "Last used", as in the source. Not in the future: nothing would ever prune it.
                    last_used_ns = max(0, min(mtime_ns, time.time_ns()))
                    with contextlib.suppress(OSError):
                        os.utime(file.fileno(), ns=(last_used_ns, last_used_ns))
                publish_chunk(part, name, fd)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(part, dir_fd=fd)
                raise


# No file of ours is there: it is absent, or a link or a socket stands in its place or above it.
_NOT_THERE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO})


def _in_destination(error: OSError, directory: str) -> ChunkError:
    """Return an error that blames the destination's disk, and never the source's file."""
    found = chunk_error_from_os(error, directory)
    return found if isinstance(found, ChunkIOError) else ChunkIOError(str(found), error.errno)
