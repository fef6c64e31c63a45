"""What a chunk file is made of, for people who look at one: where it belongs, its rows, its spans, its bytes.

Reads a file of any length with a reader's buffer and the header; rows and spans are made one at a time. A
file that is too short or too long still has its rows judged, as far as they are there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fskv.errors import ChunkError, FskvError
from fskv.format import chunk_file
from fskv.format.chunk_file import ROW_NBYTES, ChunkHeader
from fskv.format.integrity import DIGEST_NBYTES, xxh3_rows
from fskv.namespace import ChunkName, Identity, directory, parse_chunk_file, parse_chunk_path
from fskv.root.root import read_manifest

from .expect import Expected, expected_of, layout_of
from .judge import (
    PIECE_NBYTES,
    Finding,
    OpenFile,
    Reader,
    Verdict,
    finding_of,
    judge_open,
)

_NAMESPACE = re.compile(r".+@([0-9a-f]{16})", re.DOTALL)
_MAX_LARGEST_HEADER = 16 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """Where a file is, and what follows from that."""

    path: str
    chunk: ChunkName | None  # as its name has it
    namespace: str | None  # the directory of the namespace, if it is in one
    identity: Identity | None
    problem: str | None  # of that namespace's manifest
    expected: Expected

    @property
    def id(self) -> str:
        """DIGEST/NAME.gGROUP[.rRANK], or the path of a file that is in no namespace."""
        if self.namespace is None or self.chunk is None:
            return self.path
        digest16 = self.namespace.rpartition("@")[2]
        return f"{digest16}/{os.path.basename(self.path).removesuffix('.kv')}"

    def layers(self, group_idx: int) -> Sequence[str]:
        """Return the layers of a group's pages; none where the manifest does not name one for each."""
        for group in self.identity.groups if self.identity else ():
            if group.group_idx == group_idx and len(group.layer_names) == len(group.page_nbytes):
                return group.layer_names
        return ()

    def kind(self, group_idx: int) -> str | None:
        for group in self.identity.groups if self.identity else ():
            if group.group_idx == group_idx:
                return group.kind
        return None


def place(path: str) -> Place:
    """Say where a file is by its path; reads the manifest of its namespace, if there is one."""
    path = os.path.abspath(path)
    name = os.path.basename(path)
    chunk = parse_chunk_file(name)
    parts = path.split("/")
    if len(parts) < 5 or parse_chunk_path("/".join(parts[-3:])) is None:
        return Place(path, chunk, None, None, None, Expected())
    namespace = "/".join(parts[:-3])
    match = _NAMESPACE.fullmatch(parts[-4])
    if match is None:
        return Place(path, chunk, None, None, None, Expected())
    identity, problem = None, None
    try:
        identity = read_manifest(namespace)
        if directory(identity).rpartition("@")[2] != match[1]:
            problem = f"its namespace.json describes {directory(identity)}"
            identity = None
    except FskvError as error:
        problem = str(error).removeprefix("option 'root': ")
    return Place(path, chunk, namespace, identity, problem, expected_of(identity, match[1]))


@dataclass(frozen=True, slots=True)
class Body:
    """What an open file turned out to be."""

    file: OpenFile
    verdict: Verdict
    header: ChunkHeader | None  # that passed its own checks, whatever is wrong with the rest
    prefix: bytes  # its first 32 bytes, for those who want to know why not


def examine(file: OpenFile, where: Place) -> Body:
    """Judge an open file as `fskv verify` does, and keep its header where it is sound."""
    verdict = judge_open(file, where.chunk, where.expected, True)
    header, prefix = verdict.header, b""
    try:
        prefix = bytes(file.read(0, min(32, max(1, file.nbytes))))
        if header is None:
            header = chunk_file.parse_header(read_start(file, chunk_file.header_length(prefix)))
    except ChunkError as error:
        if verdict.finding is Finding.OK:
            verdict = Verdict(*finding_of(error), None, file.info)
    return Body(file, verdict, header, prefix)


def read_start(file: OpenFile, nbytes: int) -> bytes:
    """Return the first bytes of a file, at most the longest header there may be."""
    start = bytearray()
    nbytes = min(nbytes, _MAX_LARGEST_HEADER, file.nbytes)
    while len(start) < nbytes:
        piece = file.read(len(start), min(PIECE_NBYTES, nbytes - len(start)))
        if not piece:
            break
        start += piece
    return bytes(start)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the payload: is it what the header's table says?"""

    row: int
    offset: int  # in the file
    nbytes: int
    status: str  # ok, bad, or missing: the file ends before its end
    expected: str
    found: str | None


def rows(file: OpenFile, header: ChunkHeader) -> Iterator[Row]:
    """Yield every row. Raises ChunkError where the file cannot be read."""
    for at in range(0, header.payload_nbytes, PIECE_NBYTES):
        wanted = min(PIECE_NBYTES, header.payload_nbytes - at)
        start = header.header_nbytes + at
        there = file.read(start, min(wanted, file.nbytes - start)) if start < file.nbytes else b""
        payload = memoryview(there)
        whole = len(payload) if len(payload) == wanted else len(payload) // ROW_NBYTES * ROW_NBYTES
        found = xxh3_rows(payload[:whole])
        for first in range(0, wanted, ROW_NBYTES):
            idx = (at + first) // ROW_NBYTES
            expected = header.row_digests[DIGEST_NBYTES * idx : DIGEST_NBYTES * (idx + 1)]
            digest = found[first // ROW_NBYTES * DIGEST_NBYTES :][:DIGEST_NBYTES] or None
            status = "missing" if digest is None else "ok" if digest == expected else "bad"
            nbytes = min(ROW_NBYTES, wanted - first)
            text = None if digest is None else digest.hex()
            yield Row(idx, start + first, nbytes, status, expected.hex(), text)


@dataclass(frozen=True, slots=True)
class Span:
    """A page of a block: where its bytes are."""

    block: int
    page: int
    offset: int  # in the file
    nbytes: int
    first_row: int
    last_row: int
    stored: bool  # the block is in the file; zeros stand for those before `first_block`
    layer: str | None


def spans(header: ChunkHeader, layers: Sequence[str]) -> Iterator[Span]:
    """Yield blocks x pages, in the order in which they are in the payload."""
    at = 0
    for block in range(header.num_blocks):
        for page, nbytes in enumerate(header.page_nbytes):
            layer = layers[page] if page < len(layers) else None
            first, last = at // ROW_NBYTES, (at + nbytes - 1) // ROW_NBYTES
            offset = header.header_nbytes + at
            yield Span(block, page, offset, nbytes, first, last, block >= header.first_block, layer)
            at += nbytes


def num_spans(header: ChunkHeader) -> int:
    return header.num_blocks * len(header.page_nbytes)


def padding(header: ChunkHeader) -> int:
    """Return how many zeros follow the last block."""
    return header.payload_nbytes - layout_of(header).content_nbytes


def row_bytes(file: OpenFile, header: ChunkHeader, row: int) -> bytes:
    """Return what is there of a row; raises ChunkError."""
    start = header.header_nbytes + row * ROW_NBYTES
    wanted = min(ROW_NBYTES, header.payload_nbytes - row * ROW_NBYTES, file.nbytes - start)
    return bytes(file.read(start, wanted)) if wanted > 0 else b""


def hex_lines(data: bytes, start: int) -> Iterator[str]:
    """Write bytes as `hexdump -C` does; `*` stands for lines like the one before."""
    before, skipped = None, False
    for at in range(0, len(data), 16):
        line = data[at : at + 16]
        if line == before and at + 16 < len(data):
            if not skipped:
                yield "*"
            skipped = True
            continue
        before, skipped = line, False
        left, right = line[:8].hex(" "), line[8:].hex(" ")
        text = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in line)
        yield f"{start + at:08x}  {left:23}  {right:23}  |{text}|"
    yield f"{start + len(data):08x}"


def new_reader() -> Reader:
    return Reader()
