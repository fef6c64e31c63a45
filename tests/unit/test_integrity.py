"""The digests of rows: a changed byte anywhere in a file is found, and by them where it is in a row."""

import pytest
import xxhash

from fskv.errors import ChunkCorrupt, ChunkStale
from fskv.format import chunk_file
from fskv.format.chunk_file import ChunkHeader, FileLayout, encode_header, parse_header
from fskv.format.integrity import ROW_NBYTES, xxh3_rows
from fskv.types import Status


def file_of():
    layout = FileLayout(3, (ROW_NBYTES, 4096), b"L" * 16)
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
        row_digests=xxh3_rows(memoryview(payload)),
        creator="",
        written_at_ms=1 << 40,
    )
    data = encode_header(header, layout.header_nbytes) + payload
    assert len(data) == layout.file_nbytes
    return layout, bytearray(data)


def read(data):
    header = parse_header(data)
    chunk_file.check_rows(memoryview(data)[header.header_nbytes :], 0, header.row_digests)


def places(layout):
    """One byte of each part of a file: prefix, map, padding, and each row's first and last."""
    base, end = layout.header_nbytes, layout.file_nbytes
    rows = range(base, end, ROW_NBYTES)
    ends = (min(at + ROW_NBYTES, end) - 1 for at in rows)
    return [0, 9, 13, 17, 21, 25, 33, 40, 200, base - 1000, base - 1, *rows, *ends]


def test_a_changed_byte_in_each_part_of_a_file_is_found():
    layout, data = file_of()
    read(data)
    for at in places(layout):
        data[at] ^= 1
        with pytest.raises((ChunkCorrupt, ChunkStale)):
            read(data)
        data[at] ^= 1
    read(data)


def test_negative_control_without_its_digests_a_changed_row_is_not_found(monkeypatch):
    layout, data = file_of()
    wanted = parse_header(data).row_digests
    monkeypatch.setattr(chunk_file, "xxh3_rows", lambda _: wanted)
    for at in range(layout.header_nbytes, layout.file_nbytes, ROW_NBYTES):
        data[at] ^= 1
        read(data)


def test_a_checksum_of_another_name_is_refused():
    _, data = file_of()
    data[:] = data.replace(b"xxh3-64", b"xxh9-64", 1)
    data[24:32] = bytes(8)
    base = chunk_file.header_length(data)
    data[24:32] = xxhash.xxh3_64_intdigest(data[:base]).to_bytes(8, "little")
    with pytest.raises(ChunkCorrupt, match="checksum 'xxh9-64'"):
        read(data)


def test_a_store_finds_a_changed_byte(make_world):
    world = make_world()
    assert world.put(1, world.content(1)) is Status.OK
    assert world.get(1)[0] is Status.OK
    with open(world.path(1), "r+b") as file:
        file.seek(world.base)
        byte = file.read(1)[0]
        file.seek(world.base)
        file.write(bytes([byte ^ 1]))
    assert world.get(1)[0] is Status.CORRUPT
