"""Kinds of integrity: each finds every changed byte, and another one needs no change of what asks it."""

import dataclasses
import pickle
import zlib

import pytest

from fskv.errors import ChunkCorrupt, ChunkError, ChunkStale
from fskv.format import chunk_file
from fskv.format.chunk_file import ChunkHeader, FileLayout, encode_header, parse_header
from fskv.format.integrity import (
    BLAKE3_128,
    BY_MANIFEST,
    BY_NAME,
    BY_SEAL,
    XXH3_64,
    Integrity,
    Unsealed,
)
from fskv.format.mac import MacKey, MacKeys

KEY = MacKey("k", bytes(range(32)))
KEYS = MacKeys([KEY])
ROW = chunk_file.ROW_NBYTES


class _Crc32(Unsealed):
    """A third kind, as somebody would add it."""

    name = manifest_name = "crc32"
    digest_nbytes = 4

    def rows(self, payload, key=None):
        rows = (payload[at : at + ROW] for at in range(0, len(payload), ROW))
        return b"".join(zlib.crc32(row).to_bytes(4, "big") for row in rows)


CRC32 = _Crc32()
ALL = pytest.mark.parametrize("kind", [XXH3_64, BLAKE3_128, CRC32], ids=repr)


@pytest.fixture(autouse=True)
def third(monkeypatch):
    monkeypatch.setitem(BY_NAME, CRC32.name, CRC32)
    monkeypatch.setitem(BY_MANIFEST, CRC32.manifest_name, CRC32)


def key_of(kind):
    return KEY if kind.sealed else None


def file_of(kind):
    layout = FileLayout(3, (ROW, 4096), b"L" * 16, kind)
    payload = bytes(at * 7 % 251 for at in range(layout.payload_nbytes))
    header = ChunkHeader(
        key_hash=b"K" * 32,
        group_idx=0,
        rank=0,
        namespace_digest=b"N" * 32,
        layout_digest=layout.digest,
        num_blocks=3,
        page_nbytes=layout.page_nbytes,
        first_block=0,
        payload_nbytes=layout.payload_nbytes,
        row_digests=kind.rows(memoryview(payload), key_of(kind)),
        creator="",
        written_at_ms=1 << 40,
        integrity=kind,
    )
    data = encode_header(header, layout.header_nbytes, key_of(kind)) + payload
    assert len(data) == layout.file_nbytes
    return layout, bytearray(data)


def read(data, kind):
    header = parse_header(data, KEYS, kind)
    rows = memoryview(data)[header.header_nbytes :]
    chunk_file.check_rows(rows, 0, header.row_digests, header.integrity, key_of(header.integrity))
    return header


def places(layout):
    """One byte of each part of a file: prefix, map, padding, seal, and each row's first and last."""
    base, end = layout.header_nbytes, layout.file_nbytes
    rows = range(base, end, ROW)
    ends = (min(at + ROW, end) - 1 for at in rows)
    return [0, 9, 13, 17, 21, 25, 33, 40, 200, base - 1000, base - 64, base - 1, *rows, *ends]


@ALL
def test_a_changed_byte_in_each_part_of_a_file_is_found(kind):
    layout, data = file_of(kind)
    assert read(data, kind).integrity is kind
    for at in places(layout):
        data[at] ^= 1
        with pytest.raises((ChunkCorrupt, ChunkStale)):
            read(data, kind)
        data[at] ^= 1
    read(data, kind)


@ALL
def test_negative_control_without_its_digests_a_changed_row_is_not_found(kind, monkeypatch):
    layout, data = file_of(kind)
    wanted = parse_header(data, KEYS, kind).row_digests
    monkeypatch.setattr(type(kind), "rows", lambda *_: wanted)
    for at in range(layout.header_nbytes, layout.file_nbytes, ROW):
        data[at] ^= 1
        read(data, kind)


def test_the_seal_finds_what_was_made_good_without_the_key_and_not_where_it_is_off(monkeypatch):
    _, data = file_of(BLAKE3_128)
    header = read(data, BLAKE3_128)
    other = dataclasses.replace(header, key_hash=b"X" * 32)
    stranger = MacKey("k", bytes(range(32, 64)))
    data[: header.header_nbytes] = encode_header(other, header.header_nbytes, stranger)
    with pytest.raises(ChunkCorrupt, match="fails its MAC"):
        read(data, BLAKE3_128)
    monkeypatch.setattr(type(BLAKE3_128), "check_seal", lambda *_: None)
    assert read(data, BLAKE3_128).key_hash == b"X" * 32


@ALL
@pytest.mark.parametrize("asked", [XXH3_64, BLAKE3_128, CRC32], ids=repr)
def test_a_file_of_another_kind_than_asked_for_is_stale(kind, asked):
    _, data = file_of(kind)
    assert read(data, None).integrity is kind, "where no kind is asked for"
    if kind is not asked:
        with pytest.raises(ChunkStale):
            read(data, asked)


def test_a_kind_that_is_not_registered_is_refused(monkeypatch):
    _, data = file_of(CRC32)
    monkeypatch.delitem(BY_NAME, CRC32.name)
    with pytest.raises(ChunkCorrupt, match="checksum 'crc32'"):
        read(data, None)


@ALL
def test_a_layout_has_room_for_the_digests_and_the_seal_of_its_kind(kind):
    layout = FileLayout(500, (ROW,), b"L" * 16, kind)
    plain = 32 + 640 + 256 + 8
    needed = plain + 500 * kind.digest_nbytes + kind.seal_nbytes
    assert layout.header_nbytes == -(-needed // 4096) * 4096


@ALL
def test_a_key_goes_with_a_seal_and_with_nothing_else(kind):
    _, data = file_of(kind)
    header = parse_header(data, KEYS)
    with pytest.raises(ValueError, match=f"integrity {kind}"):
        encode_header(header, header.header_nbytes, None if kind.sealed else KEY)
    if kind.sealed:
        with pytest.raises(ChunkError, match="without the key"):
            kind.rows(memoryview(bytes(4096)))


@ALL
def test_a_store_asks_the_kind_and_finds_a_changed_byte(kind, make_world):
    from fskv.types import Status

    world = make_world(keys=(lambda: KEYS) if kind.sealed else None, integrity=kind)
    assert world.put(1, world.content(1)) is Status.OK
    with open(world.path(1), "r+b") as file:
        assert parse_header(file.read(), KEYS).integrity is kind
        assert world.get(1)[0] is Status.OK
        file.seek(world.base)
        byte = file.read(1)[0]
        file.seek(world.base)
        file.write(bytes([byte ^ 1]))
    assert world.get(1)[0] is Status.CORRUPT


def test_each_kind_has_one_name_in_headers_and_one_in_manifests():
    assert set(BY_NAME.values()) == set(BY_MANIFEST.values()) >= set(BY_SEAL.values())
    assert all(kind.name == name for name, kind in BY_NAME.items())
    assert all(kind.manifest_name == name for name, kind in BY_MANIFEST.items())
    assert {kind.seal_nbytes for kind in BY_NAME.values()} == set(BY_SEAL)
    assert all(pickle.loads(pickle.dumps(kind)) is kind for kind in BY_NAME.values())


def test_a_kind_that_does_not_say_what_its_seal_is_cannot_be_made():
    class Forgetful(Integrity):
        name = manifest_name = "forgetful"
        digest_nbytes = 4
        rows = _Crc32.rows

    with pytest.raises(TypeError, match="check_seal"):
        Forgetful()
