"""The parts of one chunk file, for inspection: its place, its rows and its spans.

Reads a file of any length with a reader's buffer and the header; rows and spans are made one at a time. A
file that is too short or too long still has its rows judged, as far as they are there.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fskv.errors import ChunkError
from fskv.format import chunk_file
from fskv.format.chunk_file import ROW_NBYTES, ChunkHeader
from fskv.format.integrity import DIGEST_NBYTES, SEAL_NBYTES, TAG_NBYTES, xxh3_rows
from fskv.namespace import ChunkName, GroupIdentity, parse_chunk_file, parse_chunk_path

from ..root_view import FileOf, Namespace
from .expect import NOTHING, Expected, expected_of
from .judge import PIECE_NBYTES, OpenFile, Verdict, judge_open

_NAMESPACE = re.compile(r".+@[0-9a-f]{16}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a file, as its path says it."""

    path: str
    chunk: ChunkName | None  # as its name has it
    namespace: Namespace | None  # that it is in

    @property
    def id(self) -> str:
        """DIGEST/NAME.gGROUP[.rRANK], or the path of a file that is in no namespace."""
        if self.namespace is None:
            return self.path
        return FileOf(self.namespace, os.path.basename(self.path)).id

    @property
    def expected(self) -> Expected:
        one = self.namespace
        return expected_of(one.identity, one.digest16) if one else NOTHING

    def group(self, group_idx: int) -> GroupIdentity | None:
        """Return a group's entry in the namespace's manifest."""
        identity = self.namespace.identity if self.namespace else None
        groups = identity.groups if identity else ()
        return next((one for one in groups if one.group_idx == group_idx), None)

    def layers(self, group_idx: int) -> Sequence[str]:
        """Return the layers of a group's pages; none where the manifest does not name one for each."""
        group = self.group(group_idx)
        is_named = group is not None and len(group.layer_names) == len(group.page_nbytes)
        return group.layer_names if group is not None and is_named else ()


def place(path: str) -> Place:
    """Return the place of a file, by its path alone."""
    path = os.path.abspath(path)
    parts = path.split("/")
    space = None
    if (
        len(parts) > 5
        and parse_chunk_path("/".join(parts[-3:]))
        and _NAMESPACE.fullmatch(parts[-4])
    ):
        space = Namespace("/".join(parts[:-5]), parts[-5], parts[-4])
    return Place(path, parse_chunk_file(parts[-1]), space)


@dataclass(frozen=True, slots=True)
class Body:
    """The content of an open file, judged."""

    file: OpenFile | None  # None: it could not be opened
    verdict: Verdict
    header: ChunkHeader | None  # that passed its own checks, whatever is wrong with the rest

    @property
    def info(self) -> os.stat_result | None:
        return self.file.info if self.file else None


def examine(file: OpenFile, where: Place) -> Body:
    """Judge an open file as `fskv verify` does; keep its header if the header is sound."""
    verdict = judge_open(file, where.chunk, where.expected, True)
    header = verdict.header
    if header is None:
        with contextlib.suppress(ChunkError):
            nbytes = chunk_file.header_length(file.start(32))
            header = chunk_file.parse_header(file.start(nbytes))
    return Body(file, verdict, header)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the payload, compared with the header's table."""

    row: int
    offset: int  # in the file
    nbytes: int
    status: str  # ok, bad, encrypted, or missing: the file ends before its end
    expected: str
    found: str | None


def rows(file: OpenFile, header: ChunkHeader) -> Iterator[Row]:
    """Yield every row. Raises ChunkError where the file cannot be read."""
    size = TAG_NBYTES if header.encrypted else DIGEST_NBYTES
    digests = header.row_digests[SEAL_NBYTES if header.encrypted else 0 :]
    for at in range(0, header.payload_nbytes, PIECE_NBYTES):
        wanted = min(PIECE_NBYTES, header.payload_nbytes - at)
        start = header.header_nbytes + at
        there = file.read(start, min(wanted, file.nbytes - start)) if start < file.nbytes else b""
        payload = memoryview(there)
        whole = len(payload) if len(payload) == wanted else len(payload) // ROW_NBYTES * ROW_NBYTES
        found = b"" if header.encrypted else xxh3_rows(payload[:whole])
        for first in range(0, wanted, ROW_NBYTES):
            idx = (at + first) // ROW_NBYTES
            expected = digests[size * idx : size * (idx + 1)]
            digest = found[first // ROW_NBYTES * DIGEST_NBYTES :][:DIGEST_NBYTES] or None
            nbytes = min(ROW_NBYTES, wanted - first)
            if header.encrypted:
                status = "encrypted" if first + nbytes <= len(payload) else "missing"
            else:
                status = "missing" if digest is None else "ok" if digest == expected else "bad"
            text = None if digest is None else digest.hex()
            yield Row(idx, start + first, nbytes, status, expected.hex(), text)


@dataclass(frozen=True, slots=True)
class Span:
    """One page of one block, and the place of its bytes."""

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
