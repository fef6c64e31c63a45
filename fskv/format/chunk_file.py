"""The bytes of a chunk file: header and payload checks. Format version 1, docs/format.md.

Pure: works on buffers, never opens a file. Called by the store on its I/O threads and by the tools.
Invariants: No value of a buffer is used before its check has passed. No length from a buffer allocates or
slices before it was compared with the buffer's own. Only ChunkCorrupt and ChunkStale leave `parse_header` and
`check_rows`.

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
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import msgpack
import xxhash

from fskv.errors import ChunkCorrupt, ChunkStale
from fskv.format import integrity
from fskv.format.integrity import (
    CHECKSUM,
    DIGEST_NBYTES,
    ENCRYPTED,
    rows_nbytes,
    xxh3_rows,
)

FORMAT_VERSION = 1
# Not text, and with a line end and an end-of-file character: a transfer in text mode shows (as in PNG).
MAGIC = b"\x89FSKV\r\n\x1a"
ALIGNMENT = 4096  # O_DIRECT and GDS are direct only for 4 KiB-aligned offsets and lengths
ROW_NBYTES = integrity.ROW_NBYTES

_PREFIX = struct.Struct("<8sIIIIQ")
_CHECKSUM_AT = 24
MAX_HEADER_NBYTES = 16 << 20  # payload of ~130 GiB; only to refuse absurd lengths early
_MAX_KEY_NBYTES = 256
_MAX_FIELDS = 64
_MAX_TEXT_NBYTES = 1024  # of a text, or of a field's name
_MAX_WRITTEN_CHARS = 64  # of a text
_META_RESERVE_NBYTES = 640  # map keys, digests, creator and integers at their largest


def align(nbytes: int) -> int:
    """Round up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class FileLayout:
    """The layout of every chunk file of one group (of one rank); all its files have one size.

    The payload is `num_blocks` blocks of `page_nbytes` pages each, block after block without holes,
    then zeros up to a multiple of 4096. `digest` (16 bytes) stands for everything that must agree
    for the pages to be interchangeable and is compared on every read.
    """

    num_blocks: int
    page_nbytes: tuple[int, ...]
    digest: bytes
    encrypted: bool = False

    @property
    def checksum(self) -> str:
        return ENCRYPTED if self.encrypted else CHECKSUM

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
            + rows_nbytes(self.num_rows, encrypted=self.encrypted)
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
    """The fields of a header; docs/format.md, "Map"."""

    codec: ClassVar[int] = 0
    row_nbytes: ClassVar[int] = ROW_NBYTES

    key_hash: bytes
    group_idx: int
    rank: int
    namespace_digest: bytes
    layout_digest: bytes
    num_blocks: int
    page_nbytes: tuple[int, ...]
    first_block: int  # blocks before it were not available when the chunk was stored
    payload_nbytes: int
    row_digests: bytes  # as xxh3_rows gives them, or the seal and the tags
    creator: str
    written_at_ms: int
    header_nbytes: int = 0  # set by parse_header
    checksum: str = CHECKSUM

    @property
    def encrypted(self) -> bool:
        return self.checksum == ENCRYPTED

    @property
    def context(self) -> bytes:
        """The facts of a group's files that their tags cover; docs/format.md, "Encrypted files"."""
        facts = struct.pack("<3I", self.group_idx, self.rank, self.num_blocks)
        return self.namespace_digest + self.layout_digest + facts

    @property
    def num_rows(self) -> int:
        return -(-self.payload_nbytes // ROW_NBYTES)


class _Field(NamedTuple):
    name: str
    attribute: str  # of a ChunkHeader
    kind: type
    at_least: int  # of an integer, or of the length of a binary or text
    at_most: int
    per_chunk: bool = False  # not the same in all files of a group and rank
    absent: object = None  # what a file without it has; of no use where that is not of its kind


# The map, in the order in which it is written. What is per chunk cuts it into HeaderPieces, and is the last.
_FIELDS = (
    _Field("key", "key_hash", bytes, 1, _MAX_KEY_NBYTES, per_chunk=True),
    _Field("group", "group_idx", int, 0, 1 << 31),
    _Field("rank", "rank", int, 0, 1 << 31),
    _Field("namespace", "namespace_digest", bytes, 1, 64),
    _Field("layout", "layout_digest", bytes, 1, 64),
    _Field("blocks", "num_blocks", int, 1, 1 << 31),
    _Field("pages", "page_nbytes", bytes, 1, MAX_HEADER_NBYTES),
    _Field("first_block", "first_block", int, 0, 1 << 31, per_chunk=True),
    _Field("payload", "payload_nbytes", int, 0, 1 << 50),
    _Field("codec", "codec", int, 0, 0),
    _Field("checksum", "checksum", str, 0, _MAX_TEXT_NBYTES),
    _Field("row", "row_nbytes", int, ROW_NBYTES, ROW_NBYTES),
    _Field("rows", "row_digests", bytes, 1, MAX_HEADER_NBYTES, per_chunk=True),
    _Field("creator", "creator", str, 0, _MAX_TEXT_NBYTES),
    _Field("written_at", "written_at_ms", int, 0, 1 << 62, per_chunk=True),
)
_READ = tuple(field for field in _FIELDS if field.attribute in ChunkHeader.__slots__)
_constants = attrgetter(*(field.attribute for field in _FIELDS if not field.per_chunk))


def check_rows(rows: memoryview, first_row: int, expected: bytes) -> None:
    """Compare rows read from a file with the header's digests; raises ChunkCorrupt naming the row.

    `rows` starts at row `first_row`; `expected` holds the digests of the whole payload.
    """
    check_digests(xxh3_rows(rows), first_row, expected)


def check_digests(found: bytes, first_row: int, expected: bytes) -> None:
    """Compare digests that another device computed, say a GPU, as `check_rows` compares rows."""
    num_rows = len(found) // DIGEST_NBYTES
    wanted = expected[DIGEST_NBYTES * first_row :][: len(found)]
    if found == wanted:
        return
    for row in range(num_rows):
        place = slice(DIGEST_NBYTES * row, DIGEST_NBYTES * (row + 1))
        if found[place] != wanted[place]:
            raise ChunkCorrupt(
                f"row {first_row + row} (payload bytes from {(first_row + row) * ROW_NBYTES}) "
                f"fails its checksum"
            )
    raise ChunkCorrupt(f"{num_rows} rows read, header has {len(wanted) // DIGEST_NBYTES}")


class HeaderPieces(NamedTuple):
    """The common fields of all headers of a group's files, in the order of writing.

    The map is head, the key, middle, first_block, rows, the row digests, tail, written_at.
    """

    head: bytes
    middle: bytes
    rows: bytes
    tail: bytes


def header_pieces(header: ChunkHeader) -> HeaderPieces:
    """Return the pieces of this header's map, which are those of all chunks of the group and rank."""
    return _pieces(_constants(header), len(header.row_digests))


@lru_cache(maxsize=64)
def _pieces(constants: tuple[Any, ...], digests_nbytes: int) -> HeaderPieces:
    values = iter(constants)
    pieces, piece = [], msgpack.Packer().pack_map_header(len(_FIELDS))
    for field in _FIELDS:
        piece += msgpack.packb(field.name)
        if field.per_chunk:
            if field.name == "rows":  # their length is constant
                digests = bytes(digests_nbytes)
                piece += msgpack.packb(digests).removesuffix(digests)
            pieces.append(piece)
            piece = b""
            continue
        value = next(values)
        if isinstance(value, tuple):
            value = struct.pack(f"<{len(value)}Q", *value)
        elif isinstance(value, str):
            value = value[:_MAX_WRITTEN_CHARS]
        piece += msgpack.packb(value)
    return HeaderPieces(*pieces)


def encode_header(header: ChunkHeader, header_nbytes: int) -> bytes:
    """Return the header as `header_nbytes` bytes, ready to be written before the payload.

    Raises ValueError when the fields do not fit: a programming error, since FileLayout reserves enough.
    """
    pieces = header_pieces(header)
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
        or not ALIGNMENT <= header_nbytes <= MAX_HEADER_NBYTES
        or _PREFIX.size + meta_nbytes > header_nbytes
        or zero != 0
    ):
        raise ChunkCorrupt(f"impossible header lengths {header_nbytes} and {meta_nbytes}")
    return int(header_nbytes)


def parse_header(data: bytes | memoryview) -> ChunkHeader:
    """Check and decode a header; `data` may be longer than the header.

    Raises ChunkStale for another format version, and ChunkCorrupt for anything else that is wrong.
    """
    header_nbytes = header_length(data)
    if len(data) < header_nbytes:
        raise ChunkCorrupt(f"{len(data)} bytes, header says {header_nbytes}")
    raw = bytearray(data[:header_nbytes])
    (checksum,) = struct.unpack_from("<Q", raw, _CHECKSUM_AT)
    raw[_CHECKSUM_AT : _CHECKSUM_AT + 8] = bytes(8)
    if xxhash.xxh3_64_intdigest(raw) != checksum:
        raise ChunkCorrupt("header fails its checksum")
    (meta_nbytes,) = struct.unpack_from("<I", raw, 16)
    stop = _PREFIX.size + meta_nbytes
    if raw[stop:] != bytes(header_nbytes - stop):
        raise ChunkCorrupt("the header map is followed by other bytes than zeros")
    try:
        meta = _unpack_flat(memoryview(raw)[_PREFIX.size : stop])
        return _header_from_meta(meta, header_nbytes)
    except ChunkCorrupt:
        raise
    # Msgpack raises ValueError, its own errors and, for depth, StackError.
    except Exception as error:
        raise ChunkCorrupt(f"header is not the expected map: {type(error).__name__}") from None


def _unpack_flat(data: memoryview) -> dict[str, Any]:
    """Decode a msgpack map whose values are scalars; raises for anything nested, and for extension types.

    A container inside would cost up to 64 bytes of memory for each of its bytes, so the first one ends it.
    """
    unpacker = msgpack.Unpacker(
        None,
        max_buffer_size=len(data),
        max_map_len=_MAX_FIELDS,
        max_array_len=0,
        max_ext_len=0,
        max_str_len=_MAX_TEXT_NBYTES,
        max_bin_len=len(data),
        object_pairs_hook=_refuse_nesting,
        list_hook=_refuse_nesting,
        ext_hook=_refuse_extension,  # an empty one is within max_ext_len
    )
    unpacker.feed(data)
    meta: dict[str, Any] = {}
    num_fields = unpacker.read_map_header()  # which knows no max_map_len where msgpack is in C
    if num_fields > _MAX_FIELDS:
        raise ChunkCorrupt(f"a header of {num_fields} fields, at most {_MAX_FIELDS} are allowed")
    for _ in range(num_fields):
        name = unpacker.unpack()
        if type(name) is not str or name in meta:
            raise ChunkCorrupt("a header field has no name, or comes twice")
        meta[name] = unpacker.unpack()
    if unpacker.tell() != len(data):
        raise ChunkCorrupt("the header map is followed by other bytes")
    return meta


def _refuse_nesting(_: object) -> None:
    raise ChunkCorrupt("a header field is nested")


def _refuse_extension(_code: int, _data: bytes) -> None:
    raise ChunkCorrupt("a header field is of an extension type")


def _header_from_meta(meta: dict[str, Any], header_nbytes: int) -> ChunkHeader:
    fixed = codec, checksum, row = meta.get("codec"), meta.get("checksum"), meta.get("row")
    known = (0, ENCRYPTED if checksum == ENCRYPTED else CHECKSUM, ROW_NBYTES)
    if fixed != known or [type(one) for one in fixed] != [int, str, int]:
        raise ChunkCorrupt(f"codec {codec!r:.20}, checksum {checksum!r:.20}, row {row!r:.20}")
    values: dict[str, Any] = {}
    for name, attribute, kind, at_least, at_most, _, absent in _READ:
        value: Any = meta.get(name, absent)
        values[attribute] = value
        found = type(value)
        # By type, not by value: false and 0.0 equal 0, and another reader refuses them.
        if found is not kind or not at_least <= (value if kind is int else len(value)) <= at_most:
            text = "not a text" if kind is str else f"{value!r:.60}"
            raise ChunkCorrupt(f"header field '{name}' is {text}")
    packed = values["page_nbytes"]
    if len(packed) % 8:
        raise ChunkCorrupt(f"header field 'pages' has {len(packed)} bytes, expected 8 a page")
    values["page_nbytes"] = pages = struct.unpack(f"<{len(packed) // 8}Q", packed)
    if not 0 < min(pages) <= max(pages) < 1 << 40:
        raise ChunkCorrupt("header field 'pages' holds an impossible size")
    header = ChunkHeader(**values, header_nbytes=header_nbytes)
    layout = FileLayout(header.num_blocks, pages, header.layout_digest, header.encrypted)
    if (
        header.payload_nbytes != layout.payload_nbytes
        or len(header.row_digests) != rows_nbytes(layout.num_rows, encrypted=header.encrypted)
        or header.first_block >= header.num_blocks
    ):
        raise ChunkCorrupt(
            f"payload of {header.payload_nbytes} bytes in {len(header.row_digests)} digest bytes does "
            f"not fit {header.num_blocks} blocks of {layout.block_nbytes} bytes"
        )
    return header
