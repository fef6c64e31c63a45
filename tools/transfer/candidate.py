"""A chunk file that somebody hands us: is it, byte for byte, what its name says?

The same judgement for a file of a root, which a bad disk may have spoilt, and for a member of an archive,
which anybody may have made. The bytes come from `read(n)`, which returns exactly n of them or
raises, so nothing is allocated for a length that is only claimed: the header is read and checked, then the
payload that it and the length of the file agree on. Touches nothing but `read`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from fskv import namespace
from fskv.errors import ChunkCorrupt, ChunkStale, chunk_error_from_os
from fskv.format import chunk_file
from fskv.format.chunk_file import ChunkHeader
from fskv.namespace import Identity
from fskv.transports.chunk_fd import open_chunk_fd

from ..check.expect import expected_of

Read = Callable[[int], bytes]

# One file is held in memory as a whole. The largest that a default engine writes is a few MiB; a state group
# with long rows may have some hundred.
MAX_FILE_NBYTES = 1 << 30
PREFIX_NBYTES = 32


@dataclass(frozen=True, slots=True)
class Head:
    """A header that has passed its checks, and its bytes. The payload is still to be read."""

    name: str  # relative to the namespace
    header: ChunkHeader
    raw: bytes

    @property
    def file_nbytes(self) -> int:
        return len(self.raw) + self.header.payload_nbytes


@dataclass(frozen=True, slots=True)
class Candidate:
    """A chunk file in memory. Its rows have passed only where `check_rows` says so."""

    head: Head
    payload: bytes
    mtime_ns: int


def read_head(read: Read, name: str, nbytes: int, identity: Identity) -> Head:
    """Read and check the header of a file of `nbytes` that is called `name` in the namespace of `identity`.

    Raises ChunkCorrupt or ChunkStale; what `read` raises passes.
    """
    named = namespace.parse_chunk_path(name)
    if named is None:
        raise ChunkStale("not the name of a chunk file")
    if nbytes > MAX_FILE_NBYTES:
        raise ChunkStale(f"{nbytes} bytes, more than {MAX_FILE_NBYTES}: too large to be checked")
    if nbytes < chunk_file.ALIGNMENT or nbytes % chunk_file.ALIGNMENT:
        raise ChunkCorrupt(f"{nbytes} bytes, no length of a chunk file")
    prefix = read(PREFIX_NBYTES)
    header_nbytes = chunk_file.header_length(prefix)
    if header_nbytes > nbytes:
        raise ChunkCorrupt(f"{nbytes} bytes, its header alone says {header_nbytes}")
    raw = prefix + read(header_nbytes - PREFIX_NBYTES)
    expected = expected_of(identity, identity.digest16)
    header = chunk_file.parse_header(raw)
    expected.compare(header, named)
    head = Head(name, header, raw)
    if head.file_nbytes != nbytes:
        raise ChunkCorrupt(f"{nbytes} bytes, header says {head.file_nbytes}")
    return head


def check_rows(header: ChunkHeader, payload: bytes) -> None:
    """Compare every row of a whole payload; raises ChunkCorrupt."""
    if len(payload) != header.payload_nbytes:
        raise ChunkCorrupt(f"a payload of {len(payload)} bytes, expected {header.payload_nbytes}")
    chunk_file.check_rows(memoryview(payload), 0, header.row_digests)


def load(path: str, name: str, identity: Identity) -> Candidate:
    """Read a whole chunk file of a root, every row checked.

    Raises a ChunkError: ChunkMissing where it is gone meanwhile.
    """
    with open_chunk_fd(path) as (fd, info):
        try:
            head = read_head(lambda n: exactly(fd, n), name, info.st_size, identity)
            payload = exactly(fd, head.header.payload_nbytes)
        except OSError as error:
            raise chunk_error_from_os(error, path) from error
        check_rows(head.header, payload)
        return Candidate(head, payload, info.st_mtime_ns)


def exactly(fd: int, nbytes: int) -> bytes:
    """Read exactly `nbytes`; raises ChunkCorrupt where the file ends before."""
    first = os.read(fd, nbytes)
    if len(first) == nbytes:
        return first
    content = bytearray(first)
    while len(content) < nbytes:
        more = os.read(fd, nbytes - len(content))
        if not more:
            raise ChunkCorrupt(f"ends after {len(content)} of {nbytes} bytes")
        content += more
    return bytes(content)
