"""Ways to forge a sealed chunk file, for somebody who can write to the root and does not have the key.

He knows the format, has every genuine file of the root and keys of his own, and makes every unkeyed checksum
right (`resealed`), so that only the MAC and the identity stand in his way. `Victim` is a small root: two
namespaces, two groups and two ranks with the same keys, whose files have one length, sealed with either of
two accepted keys.
"""

from __future__ import annotations

import os
import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

import blake3
import xxhash
from fskv_tools.check.expect import expected_of

from fskv.data_path.store import ChunkStore
from fskv.format import mac
from fskv.format.chunk_file import (
    ROW_NBYTES,
    ChunkHeader,
    FileLayout,
    encode_header,
    peek_header,
)
from fskv.format.integrity import BLAKE3_128, XXH3_64
from fskv.format.mac import KEY_ID_NBYTES, SEAL_NBYTES, TAG_NBYTES, MacKey, MacKeys
from fskv.root.root import NamespaceDir, Root
from fskv.transports.host import HostTransport
from fskv.types import FileId
from trials.corruption_kinds import corruption_identity

_PAGES = (60000, 27000)  # three blocks: four whole rows
_NUM_KEYS = 12
_CREATOR = "fskv/benchmark"
_FORGER_IDS = ("stranger", "k3", "2025-12")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A genuine chunk file of the small root."""

    space: int
    number: int
    group: int
    rank: int


class Victim:
    """The small root, its genuine content, and the stores that read it."""

    def __init__(self, path: str, rng: random.Random) -> None:
        os.mkdir(path)
        self.path = path
        self.keys = MacKeys([MacKey("k1", rng.randbytes(32)), MacKey("k2", rng.randbytes(32))])
        root = Root.open(path, create=True)
        self.directories: list[NamespaceDir] = []
        self.layouts: list[dict[int, FileLayout]] = []
        for space in range(2):
            plain = corruption_identity(f"forgery-{space}")
            groups = tuple(replace(group, page_nbytes=_PAGES) for group in plain.groups)
            identity = replace(plain, groups=groups, integrity=BLAKE3_128.manifest_name)
            self.directories.append(root.open_namespace(identity))
            known = expected_of(identity, identity.digest16).layouts or {}
            self.layouts.append({idx: layout for idx, layout in known.items() if layout})
        self.layout = self.layouts[0][0]
        transport = HostTransport(
            [],
            self.layout.file_nbytes,
            probe_dir=self.directories[0].tmp_dir,
            direct_io="off",
        )
        self.slot = transport.new_slot(0)
        self.stores = {
            space: ChunkStore(
                self.directories[space],
                self.layouts[space],
                transport,
                touch_interval_s=600,
                keys=lambda: self.keys,
            )
            for space in range(2)
        }
        self.content: dict[Chunk, bytes] = {}
        for space in range(2):
            for number in range(_NUM_KEYS):
                for group in range(2):
                    for rank in range(2):
                        chunk = Chunk(space, number, group, rank)
                        key = self.keys.get(rng.choice(("k1", "k2")))
                        self.content[chunk] = self.sealed(chunk, self.payload(rng), key)
                        self.put(chunk, self.content[chunk])

    def payload(self, rng: random.Random) -> bytes:
        content = rng.randbytes(self.layout.content_nbytes)
        return content + bytes(self.layout.payload_nbytes - len(content))

    def header(self, chunk: Chunk, payload: bytes, key: MacKey | None) -> ChunkHeader:
        layout = self.layouts[chunk.space][chunk.group]
        integrity = XXH3_64 if key is None else BLAKE3_128
        return ChunkHeader(
            key_hash=self.id(chunk).key_hash,
            group_idx=chunk.group,
            rank=chunk.rank,
            namespace_digest=self.directories[chunk.space].digest,
            layout_digest=layout.digest,
            num_blocks=layout.num_blocks,
            page_nbytes=layout.page_nbytes,
            first_block=0,
            payload_nbytes=layout.payload_nbytes,
            row_digests=integrity.rows(memoryview(payload), key),
            creator=_CREATOR,
            written_at_ms=1_700_000_000_000,
            integrity=integrity,
        )

    def sealed(self, chunk: Chunk, payload: bytes, key: MacKey | None) -> bytes:
        """Return a whole file as a holder of `key` writes it; without a key one that is not sealed."""
        header = self.header(chunk, payload, key)
        layout = replace(self.layouts[chunk.space][chunk.group], integrity=header.integrity)
        return encode_header(header, layout.header_nbytes, key) + payload

    def id(self, chunk: Chunk) -> FileId:
        return FileId(chunk.number.to_bytes(32, "big"), chunk.group, chunk.rank)

    def put(self, chunk: Chunk, content: bytes) -> None:
        """Let somebody put a file in the chunk's place, whatever fskv says to it."""
        path = self.stores[chunk.space].path(self.id(chunk))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(f"{path}.tmp", "wb") as file:
            file.write(content)
        os.rename(f"{path}.tmp", path)

    def parts(self, chunk: Chunk) -> tuple[bytearray, bytes]:
        content = self.content[chunk]
        return bytearray(content[: self.layout.header_nbytes]), content[self.layout.header_nbytes :]

    def remove(self) -> None:
        shutil.rmtree(self.path)


def resealed(header: bytes | bytearray) -> bytes:
    """Make the unkeyed checksum of a header right."""
    made = bytearray(header)
    made[24:32] = bytes(8)
    struct.pack_into("<Q", made, 24, xxhash.xxh3_64_intdigest(made))
    return bytes(made)


def _flipped(data: bytes | bytearray, start: int, stop: int, rng: random.Random) -> bytearray:
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        made[rng.randrange(start, stop)] ^= 1 << rng.randrange(8)
    return made if made != data else _flipped(data, start, stop, rng)


def _meta_stop(header: bytearray) -> int:
    return 32 + int.from_bytes(header[16:20], "little")


def _rows_at(header: bytearray) -> int:
    """Return where the table of row digests begins."""
    return bytes(header).index(peek_header(bytes(header)).row_digests)


def _forger(rng: random.Random, key_id: str) -> MacKey:
    return MacKey(key_id, rng.randbytes(32))


Forge = Callable[[Victim, Chunk, Chunk, random.Random], bytes]


def flipped_payload(victim: Victim, chunk: Chunk, _: Chunk, rng: random.Random) -> bytes:
    """Other KV; the rows' digests as they were, or made anew without the key."""
    header, payload = victim.parts(chunk)
    made = bytes(_flipped(payload, 0, victim.layout.content_nbytes, rng))
    how = rng.randrange(3)
    if how:
        at = _rows_at(header)
        for row in range(victim.layout.num_rows):
            data = made[row * ROW_NBYTES : (row + 1) * ROW_NBYTES]
            digest = blake3.blake3(data).digest(mac.ROW_DIGEST_NBYTES)
            if how == 2:
                digest = _forger(rng, "k1").row_digests(memoryview(data), ROW_NBYTES)
            place = at + row * mac.ROW_DIGEST_NBYTES
            header[place : place + mac.ROW_DIGEST_NBYTES] = digest
    return resealed(header) + made


def flipped_header(victim: Victim, chunk: Chunk, _: Chunk, rng: random.Random) -> bytes:
    header, payload = victim.parts(chunk)
    tag_at = len(header) - TAG_NBYTES
    start, stop = rng.choice(
        (
            (32, _meta_stop(header)),
            (_meta_stop(header), tag_at - KEY_ID_NBYTES),
            (tag_at, len(header)),
        )
    )
    return resealed(_flipped(header, start, stop, rng)) + payload


def wrong_key(victim: Victim, chunk: Chunk, _: Chunk, rng: random.Random) -> bytes:
    """A whole file under a key of his own, which says so."""
    return victim.sealed(chunk, victim.payload(rng), _forger(rng, rng.choice(_FORGER_IDS)))


def same_id_other_key(victim: Victim, chunk: Chunk, _: Chunk, rng: random.Random) -> bytes:
    return victim.sealed(chunk, victim.payload(rng), _forger(rng, rng.choice(("k1", "k2"))))


def swapped_rows(victim: Victim, chunk: Chunk, _: Chunk, __: random.Random) -> bytes:
    """The digests of two rows change places, and the bytes of the rows with them."""
    header, payload = victim.parts(chunk)
    at, size = _rows_at(header), mac.ROW_DIGEST_NBYTES
    first, second = header[at : at + size], header[at + size : at + 2 * size]
    header[at : at + 2 * size] = second + first
    rows = payload[ROW_NBYTES : 2 * ROW_NBYTES] + payload[:ROW_NBYTES]
    return resealed(header) + rows + payload[2 * ROW_NBYTES :]


def spliced_row(victim: Victim, chunk: Chunk, other: Chunk, rng: random.Random) -> bytes:
    """A genuine row of another file with its genuine digest."""
    header, payload = victim.parts(chunk)
    theirs, their_payload = victim.parts(other)
    row, size = rng.randrange(victim.layout.num_rows), mac.ROW_DIGEST_NBYTES
    to, source = (_rows_at(one) + row * size for one in (header, theirs))
    header[to : to + size] = theirs[source : source + size]
    place = slice(row * ROW_NBYTES, (row + 1) * ROW_NBYTES)
    spliced = bytearray(payload)
    spliced[place] = their_payload[place]
    return resealed(header) + bytes(spliced)


def header_of_another(victim: Victim, chunk: Chunk, other: Chunk, _: random.Random) -> bytes:
    """The chunk's own genuine header with the genuine payload of another."""
    return bytes(victim.parts(chunk)[0]) + victim.parts(other)[1]


def tag_of_another(victim: Victim, chunk: Chunk, other: Chunk, rng: random.Random) -> bytes:
    """A header with the payload's unkeyed parts made right, and the genuine seal of another file."""
    made = bytearray(victim.sealed(chunk, victim.payload(rng), _forger(rng, "k1")))
    nbytes = victim.layout.header_nbytes
    made[nbytes - SEAL_NBYTES : nbytes] = victim.parts(other)[0][-SEAL_NBYTES:]
    return resealed(made[:nbytes]) + bytes(made[nbytes:])


def replayed(victim: Victim, _: Chunk, other: Chunk, __: random.Random) -> bytes:
    """A genuine file, byte for byte, under another name."""
    return victim.content[other]


def truncated_tag(victim: Victim, chunk: Chunk, _: Chunk, rng: random.Random) -> bytes:
    """A tag of fewer bytes, or none: zeros, a shorter seal, a shorter header."""
    header, payload = victim.parts(chunk)
    payload = bytes(_flipped(payload, 0, victim.layout.content_nbytes, rng))
    keep = rng.randrange(TAG_NBYTES)
    header[len(header) - TAG_NBYTES + keep :] = bytes(TAG_NBYTES - keep)
    how = rng.randrange(3)
    if how == 1:
        struct.pack_into("<I", header, 20, rng.choice((32, 48, 63, 1)))
    elif how == 2:
        del header[len(header) - TAG_NBYTES + keep :]
    return resealed(header) + payload


def stripped(victim: Victim, chunk: Chunk, _: Chunk, rng: random.Random) -> bytes:
    """A perfect file without a seal, as engines without the option write, of the sealed file's length."""
    payload = victim.payload(rng)
    header = victim.header(chunk, payload, None)
    return encode_header(header, victim.layout.header_nbytes) + payload


def swapped_key_id(victim: Victim, chunk: Chunk, _: Chunk, rng: random.Random) -> bytes:
    header, payload = victim.parts(chunk)
    at = len(header) - SEAL_NBYTES
    there = bytes(header[at : at + KEY_ID_NBYTES]).rstrip(b"\0").decode()
    others = ["k2" if there == "k1" else "k1", there.upper(), there + "\0x", "", *_FORGER_IDS]
    header[at : at + KEY_ID_NBYTES] = rng.choice(others).encode().ljust(KEY_ID_NBYTES, b"\0")
    return resealed(header) + payload


def swapped_checksum(victim: Victim, chunk: Chunk, _: Chunk, rng: random.Random) -> bytes:
    """A file without a seal that says it has one, a sealed one that says XXH3, or another codec or row."""
    payload = victim.payload(rng)
    plain = victim.sealed(chunk, payload, None)
    nbytes = len(plain) - len(payload)
    header = bytearray(plain[:nbytes])
    how = rng.randrange(3)
    if how == 0:  # flag and key id, no tag
        struct.pack_into("<I", header, 20, SEAL_NBYTES)
        header[nbytes - SEAL_NBYTES : nbytes - TAG_NBYTES] = mac.pack_key_id("k1")
        return resealed(header) + payload
    sealed, payload = victim.parts(chunk)
    name = bytes(sealed).index(b"codec" if how == 1 else b"\xa3row\xce") + 5
    sealed[name] ^= 1
    return resealed(sealed) + payload


# Each with what its second file has in common with the first: space, number, group, rank; None: anything.
KINDS: dict[str, tuple[Forge, list[bool] | None]] = {
    "flipped payload": (flipped_payload, None),
    "flipped header": (flipped_header, None),
    "wrong key": (wrong_key, None),
    "same id, other key": (same_id_other_key, None),
    "swapped rows": (swapped_rows, None),
    "spliced row": (spliced_row, None),
    "payload of another": (header_of_another, None),
    "tag of another": (tag_of_another, None),
    "replay: key": (replayed, [True, False, True, True]),
    "replay: group": (replayed, [True, True, False, True]),
    "replay: rank": (replayed, [True, True, True, False]),
    "replay: namespace": (replayed, [False, True, True, True]),
    "truncated tag": (truncated_tag, None),
    "stripped (downgrade)": (stripped, None),
    "swapped key id": (swapped_key_id, None),
    "swapped codec or checksum": (swapped_checksum, None),
}
