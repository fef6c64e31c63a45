"""Judges one chunk file as docs/format.md, "What readers MUST check", says; without an engine.

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from fskv.errors import (
    ChunkCorrupt,
    ChunkError,
    ChunkMissing,
    ChunkStale,
    chunk_error_from_os,
)
from fskv.format import chunk_file
from fskv.format.chunk_file import ALIGNMENT, ROW_NBYTES, ChunkHeader
from fskv.namespace import ChunkName

from .expect import NOTHING, Expected

PIECE_NBYTES = 4 << 20
_HUGE = 2 << 20  # O_DIRECT pins each page of a buffer: with small ones it is slower
# As for engines: a link, a fifo or a device under a chunk's name is neither followed nor waited for.
_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_NO_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
_LOOKS = 3  # at a path under which there is another file each time
_large_header = threading.Lock()


class Finding(StrEnum):
    OK = "ok"
    CORRUPT = "corrupt"
    STALE = "stale"
    UNREADABLE = "unreadable"  # says nothing about the file: permissions, I/O errors
    CHANGING = "changing"  # two looks at one file, two answers: no chunk file ever changes
    VANISHED = "vanished"  # no problem: anybody may remove a chunk file at any time


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found; `header` is there once it passed its own checks, `info` once the file was open."""

    finding: Finding
    reason: str = ""
    header: ChunkHeader | None = None
    info: os.stat_result | None = None
    nbytes_read: int = 0

    @property
    def bad(self) -> bool:
        return self.finding not in (Finding.OK, Finding.VANISHED)


class Stopped(Exception):  # noqa: N818  nothing is wrong
    """The judgement was given up because `stop()` said so."""


def never() -> bool:
    return False


class Reader:
    """A thread's buffer, and what it reads into it."""

    def __init__(self, stop: Callable[[], bool] = never, *, direct: bool = True) -> None:
        """`stop` is asked between the pieces of a file."""
        self._stop = stop
        self._direct = direct
        self._memory = mmap.mmap(-1, PIECE_NBYTES + _HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):
            with contextlib.suppress(OSError):  # a kernel that does not know it
                self._memory.madvise(advice)
        start = -ctypes.addressof(ctypes.c_char.from_buffer(self._memory)) % _HUGE
        self._view = memoryview(self._memory)[start : start + PIECE_NBYTES]
        self.nbytes_read = 0

    @contextlib.contextmanager
    def open(self, name: str, dir_fd: int | None) -> Iterator[OpenFile]:
        """Open a regular file; raises a ChunkError for anything else, and waits for nobody."""
        direct = self._direct
        try:
            fd = self._open(name, dir_fd, os.O_DIRECT if direct else 0)
        except OSError as error:
            if not (direct and error.errno in _NO_DIRECT):
                raise chunk_error_from_os(error, name) from error
            direct = False
            try:
                fd = self._open(name, dir_fd, 0)
            except OSError as again:
                raise chunk_error_from_os(again, name) from again
        try:
            try:
                info = os.fstat(fd)
            except OSError as error:
                raise chunk_error_from_os(error, name) from error
            if not stat.S_ISREG(info.st_mode):
                raise ChunkStale("not a regular file")
            yield OpenFile(self, fd, info, direct)
            if not direct:
                with contextlib.suppress(OSError):
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            with contextlib.suppress(OSError):
                os.close(fd)

    @staticmethod
    def _open(name: str, dir_fd: int | None, more_flags: int) -> int:
        return os.open(name, _FLAGS | more_flags, dir_fd=dir_fd)

    def read(self, file: OpenFile, at: int, nbytes: int) -> memoryview:
        """Read up to `nbytes` (at most a piece) from the 4096-aligned place `at`; shorter at the file's end.

        The bytes are there until the next read. Raises ChunkError, and Stopped.
        """
        if self._stop():
            raise Stopped
        done, wanted = 0, chunk_file.align(nbytes)
        while done < wanted:
            try:
                got = os.preadv(file.fd, [self._view[done:wanted]], at + done)
            except OSError as error:
                if file.direct and error.errno in _NO_DIRECT:
                    fcntl.fcntl(file.fd, fcntl.F_SETFL, os.O_NONBLOCK)  # off O_DIRECT
                    file.direct = False
                    continue
                raise chunk_error_from_os(error, "read") from error
            done += got
            # An end that is not aligned: another direct read from there would be refused.
            if got == 0 or (file.direct and got % ALIGNMENT):
                break
        done = min(done, nbytes)
        self.nbytes_read += done
        return self._view[:done]


@dataclass(slots=True)
class OpenFile:
    """A regular file that is open for reading; `info` is of when it was opened."""

    reader: Reader
    fd: int
    info: os.stat_result
    direct: bool

    @property
    def nbytes(self) -> int:
        return self.info.st_size

    def read(self, at: int, nbytes: int) -> memoryview:
        return self.reader.read(self, at, nbytes)

    def is_at(self, name: str, dir_fd: int | None) -> bool:
        """Whether that path still names this very file. It is open: its inode cannot be another's."""
        try:
            now = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
        except OSError:
            return False
        return (now.st_dev, now.st_ino) == (self.info.st_dev, self.info.st_ino)

    def changed_length(self) -> bool:
        try:
            return os.fstat(self.fd).st_size != self.nbytes
        except OSError:
            return False


# --- the judgement ----------------------------------------------------------------------


def judge(
    reader: Reader,
    name: str,
    *,
    dir_fd: int | None = None,
    chunk: ChunkName | None = None,
    expected: Expected = NOTHING,
    rows: bool = True,
    if_bad: Callable[[OpenFile, Verdict], Verdict] = lambda _, verdict: verdict,
) -> Verdict:
    """Read and judge the file `name` of a directory; `rows`: its payload too. Raises Stopped only.

    A bad file is read twice: that which changes under the eyes is `changing`. One that another file has
    replaced meanwhile is judged anew, and one that is gone has `vanished`: engines discard and prune.
    `if_bad` is called with a bad one that is still open and still there.
    """
    before = reader.nbytes_read
    verdict = Verdict(
        Finding.UNREADABLE, "each look at it found another file, or none of its server"
    )
    for _ in range(_LOOKS):
        looked = _look(reader, name, dir_fd, chunk, expected, rows, if_bad)
        if looked is not None:
            verdict = looked
            break
    return replace(verdict, nbytes_read=reader.nbytes_read - before)


def _look(
    reader: Reader,
    name: str,
    dir_fd: int | None,
    chunk: ChunkName | None,
    expected: Expected,
    rows: bool,
    if_bad: Callable[[OpenFile, Verdict], Verdict],
) -> Verdict | None:
    """Judge what is there now; None where it was replaced, or a server dropped it, meanwhile."""
    try:
        with reader.open(name, dir_fd) as file:
            first = judge_open(file, chunk, expected, rows)
            if not first.bad:
                return first
            if not file.is_at(name, dir_fd):
                return None
            if first.finding is Finding.UNREADABLE:
                return first
            again = judge_open(file, chunk, expected, rows)
            if (again.finding, again.reason) != (first.finding, first.reason):
                reason = f"changes while it is read: {first.reason}, then {again.reason or 'good'}"
                return Verdict(Finding.CHANGING, reason, None, file.info)
            if not file.is_at(name, dir_fd):
                return None
            return if_bad(file, first)
    except ChunkError as error:
        if _is_estale(error):
            return None
        return Verdict(*finding_of(error))


def judge_open(file: OpenFile, chunk: ChunkName | None, expected: Expected, rows: bool) -> Verdict:
    header = None
    try:
        header, in_piece = read_header(file, chunk, expected, whole=rows)
        expected.compare(header, chunk)
        if rows:
            for first_row, payload in payload_pieces(file, header, in_piece):
                chunk_file.check_rows(payload, first_row, header.row_digests)
        if file.changed_length():
            return Verdict(
                Finding.CHANGING, "its length changed while it was read", None, file.info
            )
        return Verdict(Finding.OK, "", header, file.info)
    except ChunkError as error:
        if _is_estale(error):
            raise
        return Verdict(*finding_of(error), header, file.info)


def _is_estale(error: ChunkError) -> bool:
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno == errno.ESTALE


def finding_of(error: ChunkError) -> tuple[Finding, str]:
    if isinstance(error, ChunkMissing):
        return Finding.VANISHED, str(error)
    if isinstance(error, ChunkCorrupt):
        return Finding.CORRUPT, str(error)
    if isinstance(error, ChunkStale):
        cause = error.__cause__
        link = isinstance(cause, OSError) and cause.errno == errno.ELOOP
        return Finding.STALE, "a symbolic link" if link else str(error)
    cause = error.__cause__
    said = (cause.strerror or str(cause)) if isinstance(cause, OSError) else str(error)
    return Finding.UNREADABLE, said


def read_header(
    file: OpenFile, chunk: ChunkName | None, expected: Expected, *, whole: bool
) -> tuple[ChunkHeader, memoryview]:
    """Steps 2 to 6: the header, checked, and what of the payload was read with it (`whole`).

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
    elif header_nbytes <= PIECE_NBYTES:
        whole_header = file.read(0, header_nbytes)
        header, rest = chunk_file.parse_header(whole_header), data[:0]
    else:
        with _large_header:
            joined = bytearray()
            while len(joined) < header_nbytes:
                piece = file.read(len(joined), min(PIECE_NBYTES, header_nbytes - len(joined)))
                if not piece:
                    break
                joined += piece
            header, rest = chunk_file.parse_header(memoryview(joined)), data[:0]
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
