"""The bytes of a chunk file: version 1 stays version 1, and no buffer is believed before its checks."""

from __future__ import annotations

import base64
import logging
import random
import struct
import time
import zlib
from contextlib import contextmanager, nullcontext

import msgpack
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from memory import bounded_memory

from fskv.data_path import store
from fskv.data_path.store import ChunkStore
from fskv.data_path.transports.host import HostSlot, HostTransport
from fskv.errors import ChunkCorrupt, ChunkStale, ConfigError
from fskv.format import chunk_file
from fskv.format.chunk_file import (
    ChunkHeader,
    FileLayout,
    check_rows,
    encode_header,
    header_length,
    parse_header,
)
from fskv.format.integrity import xxh3_rows
from fskv.types import FileId, Status

# No example database: the negative controls fail on purpose and would fill it.
LIGHT = settings(max_examples=100, deadline=None, database=None)

MAGIC = b"\x89FSKV\r\n\x1a"
ROW = 65536

# --- golden files: only ever added ------------------------------------------------------------

# The whole first chunk file of version 1: 2 blocks of two pages of 24 and 8 bytes, a key of 32 bytes,
# written_at 2026-01-02 03:04:05 UTC; the payload is 64 bytes 0..63 and zeros. zlib, then base64.
GOLDEN_1 = """
eNrt1zlPAlEQAOC3oIIost6IF3hfiArirZ0x8WhMbMlz93Fkl32bt4tA9AdoYuIPsOSWv7Gd8fgDhsRfYGvnRqlobI2Zr5kpZpKZ
6eZm//TwzOnwcMjEI/SJftTeQ/TAV67d5SSSNbyIs1ibmlts9lZHW7uzw8V3dnX39Pb1uwc8g0PDI6OFGKMp1ZpnWJG4ioKTRFOx
QAz+pEFRxlma0g3+qEHxXKaCpFkKKo4RzeDd9UHs9ViNJpimR76ruJKKszLF4hOPCgIViYDKQpyY7alkKZOJB/3hUI7R9DMy18qb
iWbYL13Hr2+2x4+SwAjWKatGNekiEKOySJSHNEvoOlEiWH9BiLu/qtxeIwAAAAAAAAAA4B/55bH3+sbGJyanpmdm5+YX/IuBpeWV
YGg1vLa+sbm1vbO7BwcEAAAAAAAAAAD+vi/OqWHq
"""
GOLDEN_1_HEADER = ChunkHeader(
    key_hash=bytes(range(32)),
    group_idx=3,
    rank=1,
    namespace_digest=b"N" * 16,
    layout_digest=b"L" * 16,
    num_blocks=2,
    page_nbytes=(24, 8),
    first_block=1,
    payload_nbytes=4096,
    row_digests=xxhash.xxh3_64_digest(bytes(range(64)) + bytes(4032)),
    creator="fskv/golden",
    written_at_ms=1767323045000,
    header_nbytes=4096,
)


def golden():
    return zlib.decompress(base64.b64decode(GOLDEN_1))


def test_a_version_1_file_of_the_first_release_is_read():
    data = golden()
    assert parse_header(data) == GOLDEN_1_HEADER
    check_rows(memoryview(data)[4096:], 0, GOLDEN_1_HEADER.row_digests)
    assert data[4096:4160] == bytes(range(64))


def test_the_same_header_is_written_as_the_same_bytes():
    assert encode_header(GOLDEN_1_HEADER, 4096) == golden()[:4096]
    assert FileLayout(2, (24, 8), b"L" * 16).file_nbytes == len(golden())


# --- encode and parse -------------------------------------------------------------------------

headers = st.builds(
    lambda blocks, pages, key, group, rank, digests, first, creator, at, seed: ChunkHeader(
        key_hash=key,
        group_idx=group,
        rank=rank,
        namespace_digest=digests[0],
        layout_digest=digests[1],
        num_blocks=blocks,
        page_nbytes=tuple(pages),
        first_block=first % blocks,
        payload_nbytes=FileLayout(blocks, tuple(pages), b"L").payload_nbytes,
        row_digests=random.Random(seed).randbytes(
            8 * FileLayout(blocks, tuple(pages), b"L").num_rows
        ),
        creator=creator,
        written_at_ms=at,
        header_nbytes=FileLayout(blocks, tuple(pages), b"L").header_nbytes,
    ),
    st.integers(1, 64),
    st.lists(st.integers(1, 1 << 24), min_size=1, max_size=40),
    st.binary(min_size=1, max_size=256),
    st.integers(0, 1 << 31),
    st.integers(0, 1 << 31),
    st.tuples(st.binary(min_size=1, max_size=64), st.binary(min_size=1, max_size=64)),
    st.integers(0, 1000),
    st.text(st.characters(codec="utf-8"), max_size=64),
    st.integers(0, 1 << 62),
    st.integers(0, 1 << 32),
)


@LIGHT
@given(headers)
def test_parse_is_the_inverse_of_encode_and_the_reserved_header_always_suffices(header):
    data = encode_header(header, header.header_nbytes)
    assert parse_header(data) == header
    assert parse_header(data + b"payload") == header
    assert header_length(data[:32]) == len(data) == header.header_nbytes


def test_a_header_that_does_not_fit_is_a_programming_error():
    header = GOLDEN_1_HEADER
    with pytest.raises(ValueError, match="does not fit"):
        encode_header(header.__class__(**{**fields(header), "key_hash": b"k" * 257}), 4096)
    with pytest.raises(ValueError, match="does not fit"):
        encode_header(header.__class__(**{**fields(header), "page_nbytes": (9,) * 5000}), 4096)


def fields(header):
    return {name: getattr(header, name) for name in header.__slots__}


@LIGHT
@given(st.integers(1, 40), st.lists(st.integers(1, 100_000), min_size=1, max_size=4), st.data())
def test_the_rows_of_blocks_cover_every_byte_of_them_and_no_row_more(blocks, pages, data):
    layout = FileLayout(blocks, tuple(pages), b"L")
    first = data.draw(st.integers(0, blocks - 1))
    num = data.draw(st.integers(1, blocks - first))
    rows = layout.rows_of_blocks(first, num)
    start, stop = first * sum(pages), (first + num) * sum(pages)
    if first + num == blocks:
        stop = layout.payload_nbytes  # with the last block, the padding is checked too
    assert rows.start * ROW <= start < (rows.start + 1) * ROW
    assert (rows.stop - 1) * ROW < stop <= rows.stop * ROW


# --- hostile headers --------------------------------------------------------------------------


def header_of(meta, header_nbytes=8192, *, meta_nbytes=None, version=1, zero=0, magic=MAGIC):
    """Wrap any bytes as a header whose checksum is right, so that the checks behind it are reached."""
    data = bytearray(header_nbytes)
    length = len(meta) if meta_nbytes is None else meta_nbytes
    struct.pack_into("<8sIIIIQ", data, 0, magic, version, header_nbytes, length, zero, 0)
    meta = meta[: header_nbytes - 32]
    data[32 : 32 + len(meta)] = meta
    struct.pack_into("<Q", data, 24, xxhash.xxh3_64_intdigest(bytes(data)))
    return bytes(data)


def good_meta():
    return msgpack.unpackb(golden()[32 : 32 + struct.unpack_from("<I", golden(), 16)[0]])


def refused(data):
    """Parse what must not parse; returns the error."""
    with pytest.raises((ChunkCorrupt, ChunkStale)) as caught:
        parse_header(data)
    assert len(str(caught.value)) < 1000
    return caught.value


@LIGHT
@given(st.binary(max_size=9000))
def test_random_bytes_are_corrupt_and_nothing_else(data):
    with pytest.raises((ChunkCorrupt, ChunkStale)):
        parse_header(data)
    with pytest.raises((ChunkCorrupt, ChunkStale)):
        parse_header(MAGIC + data)
    with pytest.raises(ChunkCorrupt):
        parse_header(header_of(data[:4000]))


BOMBS = {
    "array of 2^32": b"\xdd\xff\xff\xff\xff",
    "map of 2^32": b"\xdf\xff\xff\xff\xff",
    "bin of 2^32": b"\xc6\xff\xff\xff\xff",
    "str of 2^32": b"\xdb\xff\xff\xff\xff",
    "ext of 2^32": b"\xc9\xff\xff\xff\xff\x01",
    "a bin longer than the map": b"\x81\xa4rows\xc5\x1f\x00" + b"r" * 100,
    "pages of 2^32, as bytes": b"\x81\xa5pages\xc6\xff\xff\xff\xf8",
    "pages of 2^32": b"\x81\xa5pages\xdd\xff\xff\xff\xff",
    "pages of 2^16": b"\x81\xa5pages\xdc\xff\xff",
    "ext": b"\x81\xa3key\xd4\x05x",
    "an empty ext": b"\x81\xa3new\xc7\x00\x05",
    "timestamp": b"\x81\xa3key\xd6\xff\x00\x00\x00\x01",
    "a bad timestamp": b"\x81\xa3key\xc7\x0c\xff\xff\xff\xff\xff" + b"\xff" * 8,
    "an unhashable key": b"\x81\x91\x01\x02",
    "a number as key": b"\x81\x01\x02",
    "text that is not utf-8": b"\x81\xa7creator\xa2\xff\xfe",
    "the code that is never used": b"\xc1",
    "deep arrays": b"\x91" * 5000,
    "deep maps": b"\x81\xa1a" * 2500,
    "many keys": b"\xde\x10\x00" + b"".join(b"\xa4%04d\x00" % i for i in range(1300)),
    "two values": b"\x80\x80",
    "nothing": b"",
    "a field twice": b"\x82\xa3key\xc4\x01k\xa3key\xc4\x01k",
    "a nested map": b"\x81\xa3key\x81\xa1a\x01",
    # Each level says 65536 elements: what is allocated for them before they come is multiplied.
    "wide and deep arrays": b"\x81\xa5pages" + b"\xdd\x00\x01\x00\x00" * 1000,
    "wide and deep, twice": b"\xdd\x00\x01\x00\x00" * 1600,
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_with_a_valid_checksum_is_corrupt_and_allocates_next_to_nothing(bomb):
    data = header_of(BOMBS[bomb])
    with bounded_memory(2 << 20):
        assert isinstance(refused(data), ChunkCorrupt)


# --- every bit --------------------------------------------------------------------------------


class MemoryTransport:
    """One file in memory: the exhaustive walk over its bits would take minutes on a disk."""

    description = "memory"
    native = None
    take_header = HostTransport.take_header
    row_digests = HostTransport.row_digests

    def __init__(self, data):
        self.data = bytearray(data)
        self.slot_nbytes = len(data)
        self.nbytes = len(data)
        self.mtime = time.time()  # never touched

    def new_slot(self, index):
        return HostSlot(index, np.zeros(self.slot_nbytes, np.uint8))

    @contextmanager
    def open(self, path, dir_fd=None):
        yield self

    def read_into(self, slot, slot_offset, file_offset, nbytes):
        found = np.frombuffer(self.data, np.uint8)[file_offset : file_offset + nbytes]
        slot.array[slot_offset : slot_offset + nbytes] = found

    def same_file(self, path, dir_fd=None):
        return False


class NoDirectory:
    path = root = "/"
    digest = b"N" * 16
    writable = True
    dir_mode = 0o700

    def chunk_path(self, key_hash, group_idx, rank):
        return "/memory"


@pytest.fixture
def small(monkeypatch):
    """A store over the golden file, and a function that loads it."""
    monkeypatch.setattr(store.logger, "level", logging.CRITICAL)
    monkeypatch.setattr(store.logger, "disabled", True)
    transport = MemoryTransport(golden())
    layout = FileLayout(2, (24, 8), b"L" * 16)
    chunks = ChunkStore(NoDirectory(), {3: layout}, transport, touch_interval_s=600)
    slot = transport.new_slot(0)

    def load():
        slot.array[:] = 0
        return chunks.get(FileId(bytes(range(32)), 3, 1), 1, 1, slot)[0]

    assert load() is Status.OK
    return transport, load


@pytest.mark.parametrize("absent", ["nobody", None])
def test_a_field_that_older_files_do_not_have(monkeypatch, absent):
    """Without a value for those, the negative control, they are not files of this format any more."""
    late = [
        row._replace(absent=absent) if row.name == "creator" else row for row in chunk_file._READ
    ]
    monkeypatch.setattr(chunk_file, "_READ", tuple(late))
    old = {name: value for name, value in good_meta().items() if name != "creator"}
    if absent is None:
        refused(header_of(msgpack.packb(old)))
    else:
        assert parse_header(header_of(msgpack.packb(old))).creator == "nobody"


@pytest.mark.parametrize(("num_blocks", "refused"), [(2**21 - 117, False), (2**21 - 116, True)])
def test_chunks_with_a_header_that_no_reader_takes_are_refused_when_the_store_opens(
    num_blocks, refused
):
    layout = FileLayout(num_blocks, (ROW,), b"L" * 16)
    assert layout.header_nbytes == (16 << 20) + (4096 if refused else 0)
    prefix = struct.pack("<8sIIII8x", MAGIC, 1, layout.header_nbytes, 1, 0)
    with pytest.raises(ChunkCorrupt) if refused else nullcontext():
        header_length(prefix)
    with pytest.raises(ConfigError, match="group 3") if refused else nullcontext():
        ChunkStore(NoDirectory(), {3: layout}, MemoryTransport(golden()), touch_interval_s=600)


def test_every_single_flipped_bit_of_a_file_is_found(small):
    transport, load = small
    for at in range(len(transport.data)):
        for bit in range(8):
            transport.data[at] ^= 1 << bit
            assert load() in (Status.CORRUPT, Status.STALE), (at, bit)
            transport.data[at] ^= 1 << bit
    assert load() is Status.OK


def test_negative_control_without_the_row_check_a_flip_is_served(small, monkeypatch):
    transport, load = small
    transport.data[4096 + 40] ^= 1
    assert load() is Status.CORRUPT
    monkeypatch.setattr(chunk_file, "check_digests", lambda *args: None)
    assert load() is Status.OK


def test_negative_control_without_the_header_checksum_a_flip_is_served(small, monkeypatch):
    transport, load = small
    at = transport.data.index(b"fskv/golden")
    transport.data[at] ^= 1
    assert load() is Status.CORRUPT
    stored = struct.unpack_from("<Q", transport.data, 24)[0]
    monkeypatch.setattr(chunk_file.xxhash, "xxh3_64_intdigest", lambda data: stored)
    assert load() is Status.OK


def test_a_damaged_row_is_named():
    payload = bytearray(3 * ROW + 4096)
    digests = xxh3_rows(payload)
    payload[2 * ROW + 5] ^= 1
    with pytest.raises(ChunkCorrupt, match=r"row 2 \(payload bytes from 131072\)"):
        check_rows(memoryview(payload), 0, digests)
    with pytest.raises(ChunkCorrupt, match="row 2 "):
        check_rows(memoryview(payload)[ROW:], 1, digests)
    check_rows(memoryview(payload)[: 2 * ROW], 0, digests)


def test_more_rows_than_the_header_has_digests_are_corrupt():
    payload = memoryview(bytes(2 * ROW))
    with pytest.raises(ChunkCorrupt):
        check_rows(payload, 0, xxh3_rows(payload)[:8])
