"""A reader of chunk files, written from docs/format.md alone, without fskv and without msgpack.

`judge` returns the verdict of "What readers MUST check" on a file's whole content. Slow and plain: each check
stands where the document has it.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import xxhash

GOOD, MISSING, STALE, CORRUPT = "good", "missing", "stale", "corrupt"


class Wanted(NamedTuple):
    """What the reader looks for."""

    key: bytes
    group: int
    rank: int
    namespace: bytes
    layout: bytes
    blocks: int
    pages: tuple[int, ...]
    first_block: int = 0  # all blocks from here on

    @property
    def sizes(self) -> tuple[int, int]:
        """H and payload, by the document's formulas."""
        payload = align(self.blocks * sum(self.pages))
        return align(928 + 8 * len(self.pages) + 8 * -(-payload // 65536)), payload


class Corrupt(Exception):  # noqa: N818  a state of the file, read as one
    """Raised wherever the document says so."""


def align(n: int) -> int:
    return (n + 4095) // 4096 * 4096


def demand(condition: object) -> None:
    if not condition:
        raise Corrupt


# --- msgpack: https://github.com/msgpack/msgpack/blob/master/spec.md, scalars only ------------

_NUMBERS = {0xCA: "f", 0xCB: "d", 0xCC: "B", 0xCD: "H", 0xCE: "I", 0xCF: "Q"}
_NUMBERS |= {0xD0: "b", 0xD1: "h", 0xD2: "i", 0xD3: "q"}
_LENGTHS = {0xC4: "B", 0xC5: "H", 0xC6: "I", 0xD9: "B", 0xDA: "H", 0xDB: "I"}


class Map:
    """The bytes of a map, taken from the front."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, n: int) -> bytes:
        demand(n <= len(self.data) - self.at)
        self.at += n
        return self.data[self.at - n : self.at]

    def number(self, kind: str) -> Any:
        return struct.unpack(f">{kind}", self.take(struct.calcsize(f">{kind}")))[0]

    def text(self, n: int) -> str:
        demand(n <= 1024)
        try:
            return self.take(n).decode("utf-8")
        except UnicodeDecodeError:
            raise Corrupt from None

    def scalar(self) -> Any:
        first = self.number("B")
        if first < 0x80 or first >= 0xE0:
            return first if first < 0x80 else first - 256
        if 0xA0 <= first < 0xC0:
            return self.text(first & 0x1F)
        if first in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[first]
        if first in _NUMBERS:
            return self.number(_NUMBERS[first])
        # Else a map, an array, an extension, or the byte that is never used.
        demand(first in _LENGTHS)
        n = self.number(_LENGTHS[first])
        return self.take(n) if first < 0xD0 else self.text(n)

    def fields(self) -> dict[str, Any]:
        first, found = self.number("B"), {}
        demand(first & 0xF0 == 0x80 or first in (0xDE, 0xDF))
        count = first & 0x0F if first < 0x90 else self.number("H" if first == 0xDE else "I")
        demand(count <= 64)
        for _ in range(count):
            name = self.scalar()
            demand(type(name) is str and name not in found)
            found[name] = self.scalar()
        demand(self.at == len(self.data))
        return found


# --- the steps ------------------------------------------------------------------------------------


def judge(content: bytes, want: Wanted) -> str:
    try:
        return _judge(content, want)
    except Corrupt:
        return CORRUPT


def _judge(content: bytes, want: Wanted) -> str:
    header_nbytes, payload_nbytes = want.sizes
    demand(len(content) == header_nbytes + payload_nbytes)  # step 2
    magic, version, h, m, zero, checksum = struct.unpack_from("<8sIIIIQ", content)
    demand(magic == b"\x89FSKV\r\n\x1a")  # step 3
    if version != 1:
        return STALE
    demand(h % 4096 == 0 and 4096 <= h <= 16 << 20 and zero == 0 and 32 + m <= h)
    if h != header_nbytes:
        return STALE
    header = content[:24] + bytes(8) + content[32:h]
    demand(xxhash.xxh3_64_intdigest(header) == checksum)  # step 4
    meta = Map(header[32 : 32 + m]).fields()  # step 5
    demand(not any(header[32 + m : h]))
    for name, most in [("key", 256), ("namespace", 64), ("layout", 64), ("pages", h), ("rows", h)]:
        value = meta.get(name)
        demand(type(value) is bytes and 1 <= len(value) <= most)
    for name, least, most in [
        *(("group", 0, 2**31), ("rank", 0, 2**31), ("blocks", 1, 2**31), ("payload", 0, 2**50)),
        *(("first_block", 0, 2**31), ("codec", 0, 0), ("row", 65536, 65536)),
        ("written_at", 0, 2**62),
    ]:
        demand(type(meta.get(name)) is int and least <= meta[name] <= most)
    demand(type(meta.get("creator")) is str and type(meta.get("checksum")) is str)
    demand(meta["first_block"] < meta["blocks"] and len(meta["pages"]) % 8 == 0)
    pages = struct.unpack(f"<{len(meta['pages']) // 8}Q", meta["pages"])
    demand(all(1 <= page < 2**40 for page in pages))
    demand(meta["checksum"] == "xxh3-64")  # step 6
    demand(meta["payload"] == align(meta["blocks"] * sum(pages)))
    demand(len(meta["rows"]) == 8 * -(-meta["payload"] // 65536))
    names = ("namespace", "layout", "key", "group", "rank", "blocks")  # step 7
    if [meta[name] for name in names] != [getattr(want, name) for name in names]:
        return STALE
    if pages != want.pages:
        return STALE
    # Step 8.
    for at in range(want.first_block * sum(pages) // 65536 * 65536, payload_nbytes, 65536):
        row, place = content[h + at :][: min(65536, payload_nbytes - at)], at // 65536 * 8
        demand(xxhash.xxh3_64_digest(row) == meta["rows"][place : place + 8])
    return MISSING if meta["first_block"] > want.first_block else GOOD  # step 9
