"""Tar as far as an archive needs it: a writer of PAX members, and a reader that trusts nothing.

The standard library's reader believes lengths: an extended header that says it has 8 GiB is read into memory.
This one holds a block, and at most MAX_EXTENDED_NBYTES of an extended header; a length that a member claims
is a number and no more. It knows plain files, and gives everything else as a member without content.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from ..transfer.candidate import MAX_FILE_NBYTES
from .layout import ArchiveError

BLOCK = 512
RECORD = 10240  # tar's own blocking: GNU tar warns about anything else
MAX_EXTENDED_NBYTES = 64 << 10
_PIECE = 1 << 20
_MAX_STRANGE = (
    1000  # members that are no plain files, and bytes in them, before it is no archive of ours
)
_MAX_STRANGE_NBYTES = 64 << 20
_FILE_TYPES = (b"0", b"\0", b"7")
_DECIMAL = re.compile(rb"\d{1,20}", re.ASCII)
_OCTAL = re.compile(rb"[0-7]+", re.ASCII)
_TIME = re.compile(r"(\d{1,12})(?:\.(\d{1,9})\d*)?", re.ASCII)


class Out(Protocol):
    def write(self, data: bytes, /) -> object: ...


# --- writing ----------------------------------------------------------------------------


def member_header(name: str, nbytes: int, mtime_ns: int) -> bytes:
    """Return the header blocks of a plain file, mtime to the nanosecond."""
    info = tarfile.TarInfo(name)
    info.size = nbytes
    info.mode = 0o600
    info.mtime = max(0, mtime_ns) // 1_000_000_000
    info.pax_headers = {"mtime": f"{info.mtime}.{max(0, mtime_ns) % 1_000_000_000:09d}"}
    return info.tobuf(tarfile.PAX_FORMAT)


def padding(nbytes: int) -> bytes:
    return bytes(-nbytes % BLOCK)


class TarWriter:
    """Writes members to `out`, one after the other."""

    def __init__(self, out: Out) -> None:
        self._out = out
        self.nbytes = 0

    def add(self, name: str, mtime_ns: int, *pieces: bytes) -> None:
        nbytes = sum(len(piece) for piece in pieces)
        for piece in (member_header(name, nbytes, mtime_ns), *pieces, padding(nbytes)):
            if piece:
                self._write(piece)

    def end(self) -> None:
        """Write the end of the archive."""
        self._write(bytes(2 * BLOCK))
        self._write(bytes(-self.nbytes % RECORD))

    def _write(self, piece: bytes) -> None:
        self._out.write(piece)
        self.nbytes += len(piece)


# --- reading ----------------------------------------------------------------------------


@dataclass(slots=True)
class Member:
    """One entry of the stream. Its content is read before the next one is asked for, or not at all."""

    name: str
    nbytes: int
    mtime_ns: int
    is_file: bool
    what: str  # "file", or in words what else it is
    _reader: TarReader
    left: int  # bytes of the content that were not read yet

    def refuse(self) -> None:
        """Say that it is not ours: whoever sends too many of them is not listened to."""
        if self.is_file:
            self._reader.note_strange(self.nbytes)

    def read(self, nbytes: int) -> bytes:
        """Read exactly so many bytes; raises ArchiveError where member or stream end before."""
        if nbytes > self.left:
            raise ArchiveError(f"{self.name:.200}: read beyond its end")
        self.left -= nbytes
        return self._reader.exactly(nbytes)


class TarReader:
    """Iterates over the members of a stream. Raises ArchiveError for what is no tar or ends too early."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        """`read(n)` returns at most n bytes, and nothing at the end."""
        self._read = read
        self._strange = 0
        self._strange_nbytes = 0
        self.nbytes = 0  # read so far

    def exactly(self, nbytes: int) -> bytes:
        content = self._piece(nbytes)
        if len(content) == nbytes:
            return content
        grown = bytearray(content)
        while len(grown) < nbytes:
            more = self._piece(nbytes - len(grown))
            if not more:
                raise ArchiveError(f"it ends in the middle, after {self.nbytes} bytes")
            grown += more
        return bytes(grown)

    def _piece(self, nbytes: int) -> bytes:
        # A megabyte at a time: what does not come is not allocated.
        content = self._read(min(nbytes, _PIECE)) if nbytes else b""
        self.nbytes += len(content)
        return content

    def _skip(self, nbytes: int) -> None:
        while nbytes:
            nbytes -= len(self.exactly(min(nbytes, _PIECE)))

    def __iter__(self) -> Iterator[Member]:
        told: dict[str, str] = {}  # by an extended header, of the member after it
        while True:
            block = self._next_block()
            if block is None:
                return
            kind = block[156:157]
            nbytes = _number(block[124:136])
            if kind in (b"x", b"g", b"L", b"K"):
                content = self._extended(nbytes)
                if kind == b"x":
                    told = _records(content)
                elif kind == b"L":
                    told["path"] = _text(content.rstrip(b"\0"))
                continue
            member = self._member(block, kind, nbytes, told)
            told = {}
            padding_nbytes = -member.nbytes % BLOCK
            yield member
            if not member.is_file:
                self.note_strange(member.nbytes)
            self._skip(member.left + padding_nbytes)

    def _next_block(self) -> bytes | None:
        first = self._piece(BLOCK)
        if not first:
            return None
        block = first + self.exactly(BLOCK - len(first)) if len(first) < BLOCK else first
        if not any(block):
            return None
        told = block[148:156].strip(b"\0 ")
        blank = block[:148] + b" " * 8 + block[156:]
        if not _OCTAL.fullmatch(told) or int(told, 8) != sum(blank):
            raise ArchiveError(
                f"no tar header at byte {self.nbytes - BLOCK}: it is damaged or no tar"
            )
        return block

    def _extended(self, nbytes: int) -> bytes:
        if nbytes > MAX_EXTENDED_NBYTES:
            raise ArchiveError(
                f"an extended header of {nbytes} bytes, no archive of fskv's has one"
            )
        self.note_strange(BLOCK + nbytes, count=False)  # an empty one costs time too
        content = self.exactly(nbytes)
        self._skip(-nbytes % BLOCK)
        return content

    def _member(self, block: bytes, kind: bytes, nbytes: int, told: dict[str, str]) -> Member:
        name = _text(block[:100].partition(b"\0")[0])
        prefix = _text(block[345:500].partition(b"\0")[0])
        if block[257:263] == b"ustar\0" and prefix:
            name = f"{prefix}/{name}"
        name = told.get("path", name)
        if "size" in told:
            if not _DECIMAL.fullmatch(told["size"].encode(errors="replace")):
                raise ArchiveError(f"{name:.200}: its length is no number")
            nbytes = int(told["size"])
        what = _WHAT.get(kind, "an entry of an unknown kind")
        if any(key.startswith("GNU.sparse") for key in told):
            what = "a sparse file"
        if kind in (b"1", b"2", b"3", b"4", b"5", b"6"):
            nbytes = 0  # they have no content, whatever they say
        time = _TIME.fullmatch(told.get("mtime", ""))
        mtime_ns = _number(block[136:148]) * 1_000_000_000
        if time:
            mtime_ns = int(time[1]) * 1_000_000_000 + int((time[2] or "0").ljust(9, "0"))
        if nbytes > MAX_FILE_NBYTES:
            raise ArchiveError(f"{name:.200}: it says it has {nbytes} bytes")
        if what == "a file":
            self._strange_nbytes = 0  # only what comes between files adds up
        return Member(name, nbytes, mtime_ns, what == "a file", what, self, nbytes)

    def note_strange(self, nbytes: int, *, count: bool = True) -> None:
        """Count something that is not ours; raises ArchiveError when it is too much."""
        self._strange += count
        self._strange_nbytes += nbytes
        if self._strange > _MAX_STRANGE or self._strange_nbytes > _MAX_STRANGE_NBYTES:
            raise ArchiveError("too much in it is not fskv's")


_WHAT = {
    **dict.fromkeys(_FILE_TYPES, "a file"),
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a device",
    b"4": "a device",
    b"5": "a directory",
    b"6": "a fifo",
    b"S": "a sparse file",
}


def _number(field: bytes) -> int:
    """Read an octal or base-256 field; raises ArchiveError."""
    if field[0] & 0x80:
        if field[0] != 0x80:
            raise ArchiveError("a tar header with a negative number")
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b"\0 ")
    if digits and not _OCTAL.fullmatch(digits):
        raise ArchiveError("a tar header with a number that is none")
    return int(digits or b"0", 8)


def _records(content: bytes) -> dict[str, str]:
    """Read an extended header: lines `<length> <key>=<value>`; raises ArchiveError."""
    found: dict[str, str] = {}
    at = 0
    while at < len(content) and content[at] != 0:
        space = content.find(b" ", at, at + 21)
        digits = content[at:space] if space > 0 else b""
        if not _DECIMAL.fullmatch(digits):
            raise ArchiveError("an extended tar header that cannot be read")
        end = at + int(digits)
        record = content[space + 1 : end]
        key, equals, value = record.partition(b"=")
        if end <= space + 1 or end > len(content) or not record.endswith(b"\n") or not equals:
            raise ArchiveError("an extended tar header that cannot be read")
        found[_text(key)] = _text(value[:-1])
        at = end
    return found


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")
