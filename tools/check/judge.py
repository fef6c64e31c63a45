"""The judge of one chunk file: docs/format.md, "What readers MUST check", without an engine.

Reads around the page cache (O_DIRECT) where the file system allows it, so that a check neither evicts what
engines have cached nor takes the cache's word for the disk. Elsewhere pages are given back after they were
read. A reader belongs to one thread; preadv and the digests run without the interpreter's lock.

Memory: a piece of 4 MiB per reader, and the header of one file, at most 16 MiB, of which only one at a time
is larger than a piece. Nothing is written, not even an mtime.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from fskv.data_path.transports.chunk_fd import OPEN_READ
from fskv.errors import ChunkCorrupt, ChunkError, ChunkMissing, ChunkStale, chunk_error_from_os
from fskv.format import chunk_file
from fskv.format.chunk_file import ALIGNMENT, ROW_NBYTES, ChunkHeader
from fskv.namespace import ChunkName

from .expect import NOTHING, Expected
from .sealed import check_rows

PIECE_NBYTES = 4 << 20
_HUGE = 2 << 20  # O_DIRECT pins each page of a buffer: with small ones it is slower
_NO_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
_LOOKS = 3  # at a path under which there is another file each time
_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
_large_header = threading.Lock()


class Finding(StrEnum):
    """The result of a judgement in one word."""

    OK = "ok"
    CORRUPT = "corrupt"
    STALE = "stale"
    UNREADABLE = "unreadable"  # says nothing about the file: permissions, I/O errors
    CHANGING = "changing"  # two looks at one file, two answers: no chunk file ever changes
    VANISHED = "vanished"  # no problem: anybody may remove a chunk file at any time


@dataclass(frozen=True, slots=True)
class Verdict:
    """A finding and its reason.

    `header` is there once it passed its own checks, `info` once the file was open.
    """

    finding: Finding
    reason: str = ""
    header: ChunkHeader | None = None
    info: os.stat_result | None = None
    nbytes_read: int = 0

    @property
    def is_encrypted(self) -> bool:
        return self.header is not None and self.header.encrypted

    @property
    def bad(self) -> bool:
        return self.finding not in (Finding.OK, Finding.VANISHED)


class Reader:
    """A thread's buffer for reading chunk files."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, PIECE_NBYTES + _HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):
            with contextlib.suppress(OSError):  # a kernel that does not know it
                self._memory.madvise(advice)
        start = -ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) % _HUGE
        self.view = memoryview(self._memory)[start : start + PIECE_NBYTES]
        self.nbytes_read = 0

    def open(self, name: str, dir_fd: int | None) -> OpenFile:
        """Return one file of a directory; a `with` statement opens and closes the file."""
        return OpenFile(self, name, dir_fd)


class OpenFile:
    """A regular file that is open for reading; `info` is its stat result at the opening."""

    info: os.stat_result

    def __init__(self, reader: Reader, name: str, dir_fd: int | None) -> None:
        self._reader = reader
        self._name = name
        self._dir_fd = dir_fd
        self._direct = True
        self._fd = -1

    def __enter__(self) -> Self:
        """Open the file without waiting; raises a ChunkError for anything but a regular file."""
        try:
            try:
                self._fd = self._open(os.O_DIRECT)
            except OSError as error:
                if error.errno not in _NO_DIRECT:
                    raise
                self._direct = False
                self._fd = self._open(0)
            self.info = os.fstat(self._fd)
        except OSError as error:
            self._close()
            self._check_kind()
            raise chunk_error_from_os(error, self._name) from error
        if not stat.S_ISREG(self.info.st_mode):
            self._close()
            self._check_kind()
            raise ChunkStale("no regular file")
        return self

    def _check_kind(self) -> None:
        """Raise ChunkStale, with the kind, for anything but a regular file."""
        with contextlib.suppress(OSError):
            info = os.stat(self._name, dir_fd=self._dir_fd, follow_symlinks=False)
            if kind := _KINDS.get(stat.S_IFMT(info.st_mode)):
                raise ChunkStale(f"{kind}, no regular file")

    def _open(self, more_flags: int) -> int:
        return os.open(self._name, OPEN_READ | os.O_NOCTTY | more_flags, dir_fd=self._dir_fd)

    def __exit__(self, *_: object) -> None:
        if not self._direct:
            with contextlib.suppress(OSError):
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        self._close()

    def _close(self) -> None:
        with contextlib.suppress(OSError):  # NFS may say EIO; what was read was checked
            if self._fd >= 0:
                os.close(self._fd)

    @property
    def nbytes(self) -> int:
        return self.info.st_size

    def read(self, at: int, nbytes: int) -> memoryview:
        """Read up to `nbytes` (at most a piece) from the 4096-aligned place `at`; shorter at the file's end.

        The bytes are there until the reader's next read. Raises ChunkError.
        """
        view, done, wanted = self._reader.view, 0, chunk_file.align(nbytes)
        while done < wanted:
            try:
                got = os.preadv(self._fd, [view[done:wanted]], at + done)
            except OSError as error:
                if self._direct and error.errno in _NO_DIRECT:
                    fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_NONBLOCK)  # off O_DIRECT
                    self._direct = False
                    continue
                raise chunk_error_from_os(error, "read") from error
            done += got
            # An end that is not aligned: another direct read from there would be refused.
            if got == 0 or (self._direct and got % ALIGNMENT):
                break
        done = min(done, nbytes)
        self._reader.nbytes_read += done
        return view[:done]

    def start(self, nbytes: int) -> bytes:
        """Return the first bytes of the file, at most the longest header that there may be."""
        start = bytearray()
        nbytes = min(nbytes, chunk_file.MAX_HEADER_NBYTES, self.nbytes)
        while piece := self.read(len(start), min(PIECE_NBYTES, nbytes - len(start))):
            start += piece
        return bytes(start)

    def is_there(self) -> bool:
        """Return whether the name still leads to this open file; no other file can have its inode."""
        try:
            now = os.stat(self._name, dir_fd=self._dir_fd, follow_symlinks=False)
        except OSError:
            return False
        return (now.st_dev, now.st_ino) == (self.info.st_dev, self.info.st_ino)


# --- the judgement ----------------------------------------------------------------------


def judge(
    reader: Reader,
    name: str,
    *,
    dir_fd: int | None = None,
    chunk: ChunkName | None = None,
    expected: Expected = NOTHING,
    rows: bool = True,
) -> Verdict:
    """Read and judge the file `name` of a directory; `rows`: its payload too. Raises nothing.

    A bad file is read twice; a file that differs meanwhile is `changing`. A file that another one has
    replaced is judged anew, and a removed file has `vanished`: engines discard and prune.
    """
    before = reader.nbytes_read
    verdict = None
    for _ in range(_LOOKS):
        verdict = verdict or _look(reader.open(name, dir_fd), chunk, expected, rows)
    reason = "each look at it found another file, or none of its server"
    verdict = verdict or Verdict(Finding.UNREADABLE, reason)
    return replace(verdict, nbytes_read=reader.nbytes_read - before)


def _look(
    path: OpenFile, chunk: ChunkName | None, expected: Expected, rows: bool
) -> Verdict | None:
    """Judge the file as it is now; None where it was replaced, or a server dropped it, meanwhile."""
    try:
        with path as file:
            first = judge_open(file, chunk, expected, rows)
            if not first.bad:
                return first
            if not file.is_there():
                return None
            if first.finding is Finding.UNREADABLE:
                return first
            again = judge_open(file, chunk, expected, rows)
            if (again.finding, again.reason) != (first.finding, first.reason):
                reason = f"changes while it is read: {first.reason}, then {again.reason or 'good'}"
                return Verdict(Finding.CHANGING, reason, None, file.info)
            return first if file.is_there() else None
    except ChunkError as error:
        return None if _errno(error) == errno.ESTALE else Verdict(*finding_of(error))


def judge_open(file: OpenFile, chunk: ChunkName | None, expected: Expected, rows: bool) -> Verdict:
    """Judge a file that is open. Raises ChunkError where a server has dropped it."""
    header = None
    try:
        header, in_piece = read_header(file, chunk, expected, whole=rows)
        expected.compare(header, chunk)
        if rows and (expected.keys is not None or not header.encrypted):
            for first_row, payload in payload_pieces(file, header, in_piece):
                check_rows(payload, first_row, header, expected.keys)
        return Verdict(Finding.OK, "", header, file.info)
    except ChunkError as error:
        if _errno(error) == errno.ESTALE:
            raise
        return Verdict(*finding_of(error), header, file.info)


def _errno(error: ChunkError) -> int | None:
    return error.__cause__.errno if isinstance(error.__cause__, OSError) else None


def finding_of(error: ChunkError) -> tuple[Finding, str]:
    """Return the finding for an error of a chunk file."""
    if isinstance(error, ChunkMissing):
        return Finding.VANISHED, str(error)
    if isinstance(error, ChunkCorrupt):
        return Finding.CORRUPT, str(error)
    if isinstance(error, ChunkStale):
        return Finding.STALE, str(error)
    cause = error.__cause__
    said = (cause.strerror or str(cause)) if isinstance(cause, OSError) else str(error)
    return Finding.UNREADABLE, said


def read_header(
    file: OpenFile, chunk: ChunkName | None, expected: Expected, *, whole: bool
) -> tuple[ChunkHeader, memoryview]:
    """Do steps 2 to 6: check the header, and return the part of the payload that was read with it (`whole`).

    Raises ChunkCorrupt and ChunkStale.
    """
    layout = expected.layout(chunk)
    if layout is not None and file.nbytes != layout.file_nbytes:
        raise ChunkCorrupt(f"{file.nbytes} bytes, expected {layout.file_nbytes}")
    wanted = PIECE_NBYTES if whole else layout.header_nbytes if layout else ALIGNMENT
    data = file.read(0, min(wanted, PIECE_NBYTES, max(file.nbytes, 1)))
    header_nbytes = chunk_file.header_length(data)
    if header_nbytes > file.nbytes:
        raise ChunkCorrupt(f"{file.nbytes} bytes, its header alone says {header_nbytes}")
    if layout is not None and header_nbytes != layout.header_nbytes:
        raise ChunkStale(f"a header of {header_nbytes} bytes, expected {layout.header_nbytes}")
    if header_nbytes <= len(data):
        header, rest = chunk_file.parse_header(data), data[header_nbytes:]
    else:
        with _large_header:
            header, rest = chunk_file.parse_header(file.start(header_nbytes)), data[:0]
    if file.nbytes != header.header_nbytes + header.payload_nbytes:
        raise ChunkCorrupt(
            f"{file.nbytes} bytes, header says {header.header_nbytes + header.payload_nbytes}"
        )
    return header, rest


def payload_pieces(
    file: OpenFile, header: ChunkHeader, in_piece: memoryview
) -> Iterator[tuple[int, memoryview]]:
    """Yield the payload as (first row, bytes): a piece at a time; raises ChunkCorrupt when short."""
    at = min(len(in_piece), header.payload_nbytes)
    if at < header.payload_nbytes:
        at = at // ROW_NBYTES * ROW_NBYTES
    if at:
        yield 0, in_piece[:at]
    while at < header.payload_nbytes:
        wanted = min(PIECE_NBYTES, header.payload_nbytes - at)
        piece = file.read(header.header_nbytes + at, wanted)
        if len(piece) < wanted:
            end = header.header_nbytes + at + len(piece)
            raise ChunkCorrupt(f"ends at byte {end}, expected {file.nbytes}")
        yield at // ROW_NBYTES, piece
        at += wanted
