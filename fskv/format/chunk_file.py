"""The bytes of a chunk file: header and payload checks. Format version 1, docs/format.md.

Pure: works on buffers, never opens a file. Called by the store on its I/O threads and by the tools.
Invariant: nothing in a buffer is believed before a check passed; no length from a buffer is used to
allocate or to slice before it was compared with what is really there; the only exceptions that leave
`parse_header` and `check_rows` are ChunkCorrupt, ChunkStale and ChunkUnknownKey. Nothing of a sealed file is
believed before its tag was checked.

    0   8  magic
    8   4  format version                u32, little endian like all integers of the prefix
    12  4  header length                 bytes, multiple of 4096: the payload starts there
    16  4  length of the msgpack map     bytes
    20  4  length of the seal            bytes: 0, or 64 with a MAC
    24  8  xxh3-64 of the whole header with this field zero
    32     msgpack map, then zeros up to the seal or the header length
   -64     seal: key id, and the tag of the header before the tag (fskv.format.mac)
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import msgpack
import xxhash

from fskv.errors import ChunkCorrupt, ChunkStale, ChunkUnknownKey
from fskv.format import mac
from fskv.format.mac import SEAL_NBYTES, MacKey, MacKeys

FORMAT_VERSION = 1
# Not text, and with a line end and an end-of-file character: a transfer in text mode shows (as in PNG).
MAGIC = b"\x89FSKV\r\n\x1a"
ALIGNMENT = 4096  # O_DIRECT and GDS are direct only for 4 KiB-aligned offsets and lengths
ROW_NBYTES = 65536  # one checksum each: names the damaged place, and lets a partial load be checked
CHECKSUM = "xxh3-64"
# What a row's digest is, and how many bytes of it there are.
DIGEST_NBYTES = {CHECKSUM: 8, mac.INTEGRITY: mac.ROW_DIGEST_NBYTES}

_PREFIX = struct.Struct("<8sIIIIQ")
_CHECKSUM_AT = 24
MAX_HEADER_NBYTES = 16 << 20  # payload of ~130 GiB; only to refuse absurd lengths early
_MAX_KEY_NBYTES = 256
_MAX_FIELDS = 64
_MAX_TEXT_NBYTES = 1024  # of a text, or of a field's name
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
    for the pages to be interchangeable and is compared on every read. `integrity` is one of DIGEST_NBYTES.
    """

    num_blocks: int
    page_nbytes: tuple[int, ...]
    digest: bytes
    integrity: str = CHECKSUM

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
            + DIGEST_NBYTES[self.integrity] * self.num_rows
            + (0 if self.integrity == CHECKSUM else SEAL_NBYTES)
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
    row_digests: bytes  # 8 bytes a row, canonical (big endian) xxh3-64; sealed: 16 bytes a row
    creator: str
    written_at_ms: int
    header_nbytes: int = 0  # set by parse_header
    integrity: str = CHECKSUM
    key_id: str | None = None  # of the key that sealed it; set by parse_header

    @property
    def num_rows(self) -> int:
        return len(self.row_digests) // self.digest_nbytes

    @property
    def digest_nbytes(self) -> int:
        return DIGEST_NBYTES[self.integrity]


def row_digests(payload: memoryview, key: MacKey | None = None) -> bytes:
    """Return the digest of each 64 KiB row of `payload`, 8 bytes a row; the last row may be short.

    With `key` that of a sealed file, 16 bytes a row. The interpreter's lock is released meanwhile.
    """
    if key is not None:
        return key.row_digests(payload, ROW_NBYTES)
    digest = xxhash.xxh3_64_digest
    return b"".join(
        digest(payload[at : at + ROW_NBYTES]) for at in range(0, len(payload), ROW_NBYTES)
    )


def check_rows(
    rows: memoryview, first_row: int, expected: bytes, key: MacKey | None = None
) -> None:
    """Compare rows read from a file with the header's digests; raises ChunkCorrupt naming the row.

    `rows` starts at row `first_row`; `expected` holds the digests of the whole payload; `key` is the one that
    sealed the file.
    """
    nbytes = DIGEST_NBYTES[CHECKSUM if key is None else mac.INTEGRITY]
    check_digests(row_digests(rows, key), first_row, expected, nbytes)


def check_digests(found: bytes, first_row: int, expected: bytes, digest_nbytes: int = 8) -> None:
    """The same, where the rows were digested elsewhere, say on a GPU; `found` is as row_digests gives it."""
    num_rows = len(found) // digest_nbytes
    wanted = expected[digest_nbytes * first_row :][: len(found)]
    if mac.same(found, wanted):
        return
    for row in range(num_rows):
        place = slice(digest_nbytes * row, digest_nbytes * (row + 1))
        if found[place] != wanted[place]:
            raise ChunkCorrupt(
                f"row {first_row + row} (payload bytes from {(first_row + row) * ROW_NBYTES}) "
                f"fails its checksum"
            )
    raise ChunkCorrupt(f"{num_rows} rows read, header has {len(wanted) // digest_nbytes}")


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
    integrity: str = CHECKSUM,
) -> HeaderPieces:
    """Encode the constant fields once for all chunks of a group."""

    def pack(**values: object) -> bytes:
        packed = (msgpack.packb(name) + msgpack.packb(value) for name, value in values.items())
        return b"".join(packed)

    digests = bytes(DIGEST_NBYTES[integrity] * num_rows)
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
            payload=payload_nbytes, codec=0, checksum=integrity, row=ROW_NBYTES, rows=digests
        ).removesuffix(digests),
        tail=pack(creator=creator[:_MAX_CREATOR_CHARS]) + msgpack.packb("written_at"),
    )


def encode_header(header: ChunkHeader, header_nbytes: int, key: MacKey | None = None) -> bytes:
    """Return the header as `header_nbytes` bytes, ready to be written before the payload.

    With `key` it is sealed, and `header.row_digests` are those of that key.

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
        header.integrity,
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
    if (key is None) != (header.integrity == CHECKSUM):
        raise ValueError(f"integrity {header.integrity}, with a key: {key is not None}")
    seal_nbytes = 0 if key is None else SEAL_NBYTES
    if (
        len(header.key_hash) > _MAX_KEY_NBYTES
        or _PREFIX.size + len(meta) + seal_nbytes > header_nbytes
    ):
        raise ValueError(
            f"header of {len(meta)} bytes (key {len(header.key_hash)}) does not fit {header_nbytes}"
        )
    data = bytearray(header_nbytes)
    _PREFIX.pack_into(data, 0, MAGIC, FORMAT_VERSION, header_nbytes, len(meta), seal_nbytes, 0)
    data[_PREFIX.size : _PREFIX.size + len(meta)] = meta
    if key is not None:
        tag_at = header_nbytes - mac.TAG_NBYTES
        data[tag_at - mac.KEY_ID_NBYTES : tag_at] = mac.pack_key_id(key.key_id)
        data[tag_at:] = key.tag(memoryview(data)[:tag_at])
    struct.pack_into("<Q", data, _CHECKSUM_AT, xxhash.xxh3_64_intdigest(data))
    return bytes(data)


def header_length(prefix: bytes | memoryview) -> int:
    """Return the header's length from the first 32 bytes of a file, checked but not verified.

    For tools that do not know the layout. Raises ChunkCorrupt or ChunkStale.
    """
    if len(prefix) < _PREFIX.size:
        raise ChunkCorrupt(f"{len(prefix)} bytes, too short for a header")
    magic, version, header_nbytes, meta_nbytes, seal_nbytes, _ = _PREFIX.unpack_from(prefix)
    if magic != MAGIC:
        raise ChunkCorrupt("not a chunk file: wrong magic")
    if version != FORMAT_VERSION:
        raise ChunkStale(f"format version {version}, this fskv reads {FORMAT_VERSION}")
    if (
        header_nbytes % ALIGNMENT
        or not ALIGNMENT <= header_nbytes <= MAX_HEADER_NBYTES
        or _PREFIX.size + meta_nbytes + seal_nbytes > header_nbytes
        or seal_nbytes not in (0, SEAL_NBYTES)
    ):
        raise ChunkCorrupt(f"impossible header lengths {header_nbytes} and {meta_nbytes}")
    return int(header_nbytes)


def parse_header(
    data: bytes | memoryview, keys: MacKeys | None = None, integrity: str | None = None
) -> ChunkHeader:
    """Check and decode a header; `data` may be longer than the header.

    `integrity` is what it has to be, if that is known: a file without a seal is not taken for one that had it
    removed. Raises ChunkUnknownKey for a sealed one without its key, ChunkStale for another format version or
    integrity, and ChunkCorrupt for anything else that is wrong.
    """
    header, seal_nbytes = _checked_header(data)
    if integrity is not None and (integrity != CHECKSUM) != (seal_nbytes != 0):
        found = "a seal" if seal_nbytes else "no seal"
        raise ChunkStale(f"{found}, expected integrity '{integrity}'")
    if seal_nbytes:
        _check_seal(header, keys)
    return _decode(header, seal_nbytes)


def peek_header(data: bytes | memoryview) -> ChunkHeader:
    """The same, but whoever can write to the root may have made up all of a sealed file: for showing only."""
    return _decode(*_checked_header(data))


def _checked_header(data: bytes | memoryview) -> tuple[bytearray, int]:
    """Return a copy of a header that passed its checksum, with that taken as zero, and its seal's length."""
    header_nbytes = header_length(data)
    if len(data) < header_nbytes:
        raise ChunkCorrupt(f"{len(data)} bytes, header says {header_nbytes}")
    raw = bytearray(data[:header_nbytes])
    seal_nbytes, checksum = struct.unpack_from("<IQ", raw, 20)
    raw[_CHECKSUM_AT : _CHECKSUM_AT + 8] = bytes(8)
    if xxhash.xxh3_64_intdigest(raw) != checksum:
        raise ChunkCorrupt("header fails its checksum")
    return raw, seal_nbytes


def _check_seal(header: bytearray, keys: MacKeys | None) -> None:
    tag_at = len(header) - mac.TAG_NBYTES
    key_id = mac.unpack_key_id(bytes(header[tag_at - mac.KEY_ID_NBYTES : tag_at]))
    if key_id is None:
        raise ChunkCorrupt("its seal names no key")
    key = keys.get(key_id) if keys is not None else None
    if key is None:
        raise ChunkUnknownKey(f"sealed with key '{key_id}': cannot be judged without the key")
    if not mac.same(key.tag(memoryview(header)[:tag_at]), bytes(header[tag_at:])):
        raise ChunkCorrupt(f"header fails its MAC with key '{key_id}'")


def _decode(header: bytearray, seal_nbytes: int) -> ChunkHeader:
    (meta_nbytes,) = struct.unpack_from("<I", header, 16)
    key_id = None
    if seal_nbytes:
        packed = header[-SEAL_NBYTES : -SEAL_NBYTES + mac.KEY_ID_NBYTES]
        key_id = mac.unpack_key_id(bytes(packed))
    stop, padding_stop = _PREFIX.size + meta_nbytes, len(header) - seal_nbytes
    if header[stop:padding_stop] != bytes(padding_stop - stop):
        raise ChunkCorrupt("the header map is followed by other bytes than zeros")
    try:
        meta = _unpack_flat(memoryview(header)[_PREFIX.size : stop])
        return _header_from_meta(meta, len(header), seal_nbytes, key_id)
    except ChunkCorrupt:
        raise
    except (
        Exception
    ) as error:  # msgpack raises ValueError, its own errors and, for depth, StackError
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


def _header_from_meta(
    meta: dict[str, Any], header_nbytes: int, seal_nbytes: int, key_id: str | None
) -> ChunkHeader:
    # By type, not by value: false and 0.0 equal 0, and another reader refuses them.
    def integer(name: str, at_most: int, at_least: int = 0) -> int:
        value = meta.get(name)
        if type(value) is not int or not at_least <= value <= at_most:
            raise ChunkCorrupt(f"header field '{name}' is {value!r:.60}")
        return value

    def binary(name: str, at_most: int) -> bytes:
        value = meta.get(name)
        if type(value) is not bytes or not 0 < len(value) <= at_most:
            raise ChunkCorrupt(f"header field '{name}' is {value!r:.60}")
        return value

    codec, checksum, row = meta.get("codec"), meta.get("checksum"), meta.get("row")
    integrity = mac.INTEGRITY if seal_nbytes else CHECKSUM
    found = (codec, checksum, row)
    if found != (0, integrity, ROW_NBYTES) or [*map(type, found)] != [int, str, int]:
        raise ChunkCorrupt(f"codec {codec!r:.20}, checksum {checksum!r:.20}, row {row!r:.20}")
    packed = binary("pages", header_nbytes)
    if len(packed) % 8:
        raise ChunkCorrupt(f"header field 'pages' has {len(packed)} bytes, expected 8 a page")
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
        num_blocks=integer("blocks", 1 << 31, at_least=1),
        page_nbytes=pages,
        first_block=integer("first_block", 1 << 31),
        payload_nbytes=integer("payload", 1 << 50),
        row_digests=binary("rows", header_nbytes),
        creator=creator,
        written_at_ms=integer("written_at", 1 << 62),
        header_nbytes=header_nbytes,
        integrity=integrity,
        key_id=key_id,
    )
    layout = FileLayout(
        header.num_blocks, header.page_nbytes, header.layout_digest, header.integrity
    )
    if (
        header.payload_nbytes != layout.payload_nbytes
        or len(header.row_digests) != header.digest_nbytes * layout.num_rows
        or header.first_block >= header.num_blocks
    ):
        raise ChunkCorrupt(
            f"payload of {header.payload_nbytes} bytes in {len(header.row_digests)} digest bytes does "
            f"not fit {header.num_blocks} blocks of {layout.block_nbytes} bytes"
        )
    return header
