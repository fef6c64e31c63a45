"""The bytes of a chunk file: header and payload checks. Format version 1, docs/format.md.

Pure: works on buffers, never opens a file. Called by the store on its I/O threads and by the tools.
Invariant: nothing in a buffer is believed before a check passed; no length from a buffer is used to
allocate or to slice before it was compared with what is really there; the only exceptions that leave
`parse_header` and `check_rows` are ChunkCorrupt and ChunkStale.

    0   8  magic
    8   4  format version                u32, little endian like all integers of the prefix
    12  4  header length                 bytes, multiple of 4096: the payload starts there
    16  4  length of the msgpack map     bytes
    20  4  zero
    24  8  xxh3-64 of the whole header with this field zero
    32     msgpack map, then zeros up to the header length
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import msgpack
import xxhash

from fskv.errors import ChunkCorrupt, ChunkStale

FORMAT_VERSION = 1
# Not text, and with a line end and an end-of-file character: a transfer in text mode shows (as in PNG).
MAGIC = b"\x89FSKV\r\n\x1a"
ALIGNMENT = 4096  # O_DIRECT and GDS are direct only for 4 KiB-aligned offsets and lengths
ROW_NBYTES = 65536  # one checksum each: names the damaged place, and lets a partial load be checked
CHECKSUM = "xxh3-64"

_PREFIX = struct.Struct("<8sIIIIQ")
_CHECKSUM_AT = 24
_MAX_HEADER_NBYTES = 16 << 20  # payload of ~130 GiB; only to refuse absurd lengths early
_MAX_KEY_NBYTES = 256
_MAX_FIELDS = 64
_MAX_CREATOR_CHARS = 64
_META_RESERVE_NBYTES = 640  # map keys, digests, creator and integers at their largest


def align(nbytes: int) -> int:
    """Round up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class FileLayout:
    """What every chunk file of one group (of one rank) looks like; all its files have one size.

    The payload is `num_blocks` blocks of `page_nbytes` pages each, block after block without holes,
    then zeros up to a multiple of 4096. `digest` (16 bytes) stands for everything that must agree
    for the pages to be interchangeable and is compared on every read.
    """

    num_blocks: int
    page_nbytes: tuple[int, ...]
    digest: bytes

    @cached_property
    def block_nbytes(self) -> int:
        return sum(self.page_nbytes)

    @cached_property
    def content_nbytes(self) -> int:
        return self.num_blocks * self.block_nbytes

    @cached_property
    def payload_nbytes(self) -> int:
        return align(self.content_nbytes)

    @cached_property
    def num_rows(self) -> int:
        return -(-self.payload_nbytes // ROW_NBYTES)

    @cached_property
    def header_nbytes(self) -> int:
        # An upper bound and not the length of one encoding, so that the size of a file is known
        # before it is written and a lookup can compare it.
        return align(
            _PREFIX.size
            + _META_RESERVE_NBYTES
            + _MAX_KEY_NBYTES
            + 8 * len(self.page_nbytes)
            + 8 * self.num_rows
        )

    @cached_property
    def file_nbytes(self) -> int:
        return self.header_nbytes + self.payload_nbytes

    def rows_of_blocks(self, first_block: int, num_blocks: int) -> range:
        """Return the rows that hold the given blocks (and the padding, if the last block is among them)."""
        start = first_block * self.block_nbytes
        last = first_block + num_blocks
        stop = self.payload_nbytes if last == self.num_blocks else last * self.block_nbytes
        return range(start // ROW_NBYTES, -(-stop // ROW_NBYTES))


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """The fields of a header, in the words of docs/format.md."""

    key_hash: bytes
    group_idx: int
    rank: int
    namespace_digest: bytes
    layout_digest: bytes
    num_blocks: int
    page_nbytes: tuple[int, ...]
    first_block: int  # blocks before it were not available when the chunk was stored
    payload_nbytes: int
    row_digests: bytes  # 8 bytes a row, canonical (big endian) xxh3-64
    creator: str
    written_at_ms: int
    header_nbytes: int = 0  # set by parse_header

    @property
    def num_rows(self) -> int:
        return len(self.row_digests) // 8


def row_digests(payload: memoryview) -> bytes:
    """Return the digest of each 64 KiB row of `payload`, 8 bytes a row; the last row may be short.

    xxhash releases the interpreter lock while it hashes a row.
    """
    digest = xxhash.xxh3_64_digest
    return b"".join(
        digest(payload[at : at + ROW_NBYTES]) for at in range(0, len(payload), ROW_NBYTES)
    )


def check_rows(rows: memoryview, first_row: int, expected: bytes) -> None:
    """Compare rows read from a file with the header's digests; raises ChunkCorrupt naming the row.

    `rows` starts at row `first_row`; `expected` holds the digests of the whole payload.
    """
    check_digests(row_digests(rows), first_row, expected)


def check_digests(found: bytes, first_row: int, expected: bytes) -> None:
    """The same, where the rows were digested elsewhere, say on a GPU; `found` is as row_digests gives it."""
    wanted = expected[8 * first_row : 8 * first_row + len(found)]
    if found == wanted:
        return
    for row in range(len(found) // 8):
        if found[8 * row : 8 * row + 8] != wanted[8 * row : 8 * row + 8]:
            raise ChunkCorrupt(
                f"row {first_row + row} (payload bytes from {(first_row + row) * ROW_NBYTES}) "
                f"fails its checksum"
            )
    raise ChunkCorrupt(f"{len(found) // 8} rows read, header has {len(wanted) // 8}")


class HeaderPieces(NamedTuple):
    """What all headers of a group's files have in common, in the order in which they are written.

    The map is head, the key, middle, first_block, rows, the row digests, tail, written_at.
    """

    head: bytes
    middle: bytes
    rows: bytes
    tail: bytes


@lru_cache(maxsize=64)
def header_pieces(
    group_idx: int,
    rank: int,
    namespace_digest: bytes,
    layout_digest: bytes,
    num_blocks: int,
    page_nbytes: tuple[int, ...],
    payload_nbytes: int,
    num_rows: int,
    creator: str,
) -> HeaderPieces:
    """Encode the constant fields once for all chunks of a group."""

    def pack(**values: object) -> bytes:
        packed = (msgpack.packb(name) + msgpack.packb(value) for name, value in values.items())
        return b"".join(packed)

    digests = bytes(8 * num_rows)
    return HeaderPieces(
        head=b"\x8f" + msgpack.packb("key"),  # a map of 15 fields
        middle=pack(
            group=group_idx,
            rank=rank,
            namespace=namespace_digest,
            layout=layout_digest,
            blocks=num_blocks,
            pages=struct.pack(f"<{len(page_nbytes)}Q", *page_nbytes),
        )
        + msgpack.packb("first_block"),
        rows=pack(
            payload=payload_nbytes, codec=0, checksum=CHECKSUM, row=ROW_NBYTES, rows=digests
        ).removesuffix(digests),
        tail=pack(creator=creator[:_MAX_CREATOR_CHARS]) + msgpack.packb("written_at"),
    )


def encode_header(header: ChunkHeader, header_nbytes: int) -> bytes:
    """Return the header as `header_nbytes` bytes, ready to be written before the payload.

    Raises ValueError when the fields do not fit: a programming error, since FileLayout reserves enough.
    """
    pieces = header_pieces(
        header.group_idx,
        header.rank,
        header.namespace_digest,
        header.layout_digest,
        header.num_blocks,
        header.page_nbytes,
        header.payload_nbytes,
        header.num_rows,
        header.creator,
    )
    meta = b"".join(
        (
            pieces.head,
            msgpack.packb(header.key_hash),
            pieces.middle,
            msgpack.packb(header.first_block),
            pieces.rows,
            header.row_digests,
            pieces.tail,
            msgpack.packb(header.written_at_ms),
        )
    )
    if len(header.key_hash) > _MAX_KEY_NBYTES or _PREFIX.size + len(meta) > header_nbytes:
        raise ValueError(
            f"header of {len(meta)} bytes (key {len(header.key_hash)}) does not fit {header_nbytes}"
        )
    data = bytearray(header_nbytes)
    _PREFIX.pack_into(data, 0, MAGIC, FORMAT_VERSION, header_nbytes, len(meta), 0, 0)
    data[_PREFIX.size : _PREFIX.size + len(meta)] = meta
    struct.pack_into("<Q", data, _CHECKSUM_AT, xxhash.xxh3_64_intdigest(data))
    return bytes(data)


def header_length(prefix: bytes | memoryview) -> int:
    """Return the header's length from the first 32 bytes of a file, checked but not verified.

    For tools that do not know the layout. Raises ChunkCorrupt or ChunkStale.
    """
    if len(prefix) < _PREFIX.size:
        raise ChunkCorrupt(f"{len(prefix)} bytes, too short for a header")
    magic, version, header_nbytes, meta_nbytes, zero, _ = _PREFIX.unpack_from(prefix)
    if magic != MAGIC:
        raise ChunkCorrupt("not a chunk file: wrong magic")
    if version != FORMAT_VERSION:
        raise ChunkStale(f"format version {version}, this fskv reads {FORMAT_VERSION}")
    if (
        header_nbytes % ALIGNMENT
        or not ALIGNMENT <= header_nbytes <= _MAX_HEADER_NBYTES
        or _PREFIX.size + meta_nbytes > header_nbytes
        or zero
    ):
        raise ChunkCorrupt(f"impossible header lengths {header_nbytes} and {meta_nbytes}")
    return int(header_nbytes)


def parse_header(data: bytes | memoryview) -> ChunkHeader:
    """Check and decode a header; `data` may be longer than the header.

    Raises ChunkStale for another format version and ChunkCorrupt for anything else that is wrong.
    """
    header_nbytes = header_length(data)
    if len(data) < header_nbytes:
        raise ChunkCorrupt(f"{len(data)} bytes, header says {header_nbytes}")
    raw = bytearray(data[:header_nbytes])
    meta_nbytes, _, checksum = struct.unpack_from("<IIQ", raw, 16)
    raw[_CHECKSUM_AT : _CHECKSUM_AT + 8] = bytes(8)
    if xxhash.xxh3_64_intdigest(raw) != checksum:
        raise ChunkCorrupt("header fails its checksum")
    try:
        meta = _unpack_flat(memoryview(raw)[_PREFIX.size : _PREFIX.size + meta_nbytes])
        return _header_from_meta(meta, header_nbytes)
    except ChunkCorrupt:
        raise
    except (
        Exception
    ) as error:  # msgpack raises ValueError, its own errors and, for depth, StackError
        raise ChunkCorrupt(f"header is not the expected map: {type(error).__name__}") from None


def _unpack_flat(data: memoryview) -> dict[str, Any]:
    """Decode a msgpack map whose values are scalars; raises for anything nested.

    A container inside would cost up to 64 bytes of memory for each of its bytes, so the first one ends it.
    """
    unpacker = msgpack.Unpacker(
        None,
        max_buffer_size=len(data),
        max_map_len=_MAX_FIELDS,
        max_array_len=0,
        max_ext_len=0,
        max_str_len=1024,
        max_bin_len=len(data),
        object_pairs_hook=_refuse_nesting,
        list_hook=_refuse_nesting,
    )
    unpacker.feed(data)
    meta: dict[str, Any] = {}
    for _ in range(unpacker.read_map_header()):
        name = unpacker.unpack()
        if type(name) is not str or name in meta:
            raise ChunkCorrupt("a header field has no name, or comes twice")
        meta[name] = unpacker.unpack()
    if unpacker.tell() != len(data):
        raise ChunkCorrupt("the header map is followed by other bytes")
    return meta


def _refuse_nesting(_: object) -> None:
    raise ChunkCorrupt("a header field is nested")


def _header_from_meta(meta: dict[str, Any], header_nbytes: int) -> ChunkHeader:
    def integer(name: str, at_most: int) -> int:
        value = meta.get(name)
        if type(value) is not int or not 0 <= value <= at_most:
            raise ChunkCorrupt(f"header field '{name}' is {value!r:.60}")
        return value

    def binary(name: str, at_most: int) -> bytes:
        value = meta.get(name)
        if type(value) is not bytes or not 0 < len(value) <= at_most:
            raise ChunkCorrupt(f"header field '{name}' is {value!r:.60}")
        return value

    codec, checksum, row = meta.get("codec"), meta.get("checksum"), meta.get("row")
    if (codec, checksum, row) != (0, CHECKSUM, ROW_NBYTES):
        raise ChunkCorrupt(f"codec {codec!r:.20}, checksum {checksum!r:.20}, row {row!r:.20}")
    packed = binary("pages", header_nbytes)
    pages = struct.unpack(f"<{len(packed) // 8}Q", packed)
    if not all(0 < nbytes < 1 << 40 for nbytes in pages):
        raise ChunkCorrupt("header field 'pages' holds an impossible size")
    creator = meta.get("creator")
    if type(creator) is not str:
        raise ChunkCorrupt("header field 'creator' is not a text")
    header = ChunkHeader(
        key_hash=binary("key", _MAX_KEY_NBYTES),
        group_idx=integer("group", 1 << 31),
        rank=integer("rank", 1 << 31),
        namespace_digest=binary("namespace", 64),
        layout_digest=binary("layout", 64),
        num_blocks=integer("blocks", 1 << 31),
        page_nbytes=pages,
        first_block=integer("first_block", 1 << 31),
        payload_nbytes=integer("payload", 1 << 50),
        row_digests=binary("rows", header_nbytes),
        creator=creator,
        written_at_ms=integer("written_at", 1 << 62),
        header_nbytes=header_nbytes,
    )
    layout = FileLayout(header.num_blocks, header.page_nbytes, header.layout_digest)
    if (
        header.payload_nbytes != layout.payload_nbytes
        or len(header.row_digests) != 8 * layout.num_rows
        or header.first_block >= max(1, header.num_blocks)
    ):
        raise ChunkCorrupt(
            f"payload of {header.payload_nbytes} bytes in {len(header.row_digests)} digest bytes does "
            f"not fit {header.num_blocks} blocks of {layout.block_nbytes} bytes"
        )
    return header
