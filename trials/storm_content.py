"""What the chunks of the storm must hold, and the comparison with what they do. Imports nothing of fskv.

The controller knows the content of a chunk by its number alone and finds a chunk's file by docs/format.md,
so it can judge what a process was served, and what lies in a directory, without believing a line of fskv.
`Pages` is the KV memory of a process, in a file that the process and the controller both map: the controller
looks at the very bytes that an engine would compute with.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache

import xxhash

# No multiple of anything: 4 blocks of 64000 bytes are 4 rows, and no block begins where a row does.
PAGES_NBYTES = (40000, 24000)
BLOCKS_PER_CHUNK = 4
BLOCK_NBYTES = sum(PAGES_NBYTES)
CONTENT_NBYTES = BLOCKS_PER_CHUNK * BLOCK_NBYTES
HEADER_NBYTES = 4096  # docs/format.md: align(928 + 8 * (2 pages + 4 rows))
FILE_NBYTES = HEADER_NBYTES + -(-CONTENT_NBYTES // 4096) * 4096

_GAP_NBYTES = 64  # a block is wider than its page, as an engine's may be
_TALLY_NBYTES = 4096
_STATUSES = (
    *("ok", "exists", "skipped", "absent", "stale", "corrupt", "timed_out", "denied"),
    *("io_error", "no_space", "breaker", "quarantined"),
)
TALLY = (
    "ready",
    "lookup.hit",
    *(f"{what}.{status}" for what in ("store", "load", "lookup") for status in _STATUSES),
)
assert 8 * len(TALLY) <= _TALLY_NBYTES


def key_hash(number: int) -> bytes:
    return hashlib.sha256(b"storm %d" % number).digest()


def file_name(number: int) -> str:
    """Return the path of a chunk's file below `chunks`, as docs/format.md has it."""
    name = xxhash.xxh3_128_hexdigest(key_hash(number))
    return f"{name[:3]}/{name}.g0.kv"


@lru_cache(maxsize=256)
def content(number: int) -> bytes:
    return random.Random(f"storm/{number}").randbytes(CONTENT_NBYTES)  # noqa: S311  no secret


def poison(number: int) -> bytes:
    """Return what is nobody's content, different for each number."""
    return bytes([number % 251 + 1]) * CONTENT_NBYTES


def first_difference(found: bytes, wanted: bytes) -> int | None:
    if found == wanted:
        return None
    return next(at for at in range(len(wanted)) if found[at] != wanted[at])


def is_whole_file(path: str, number: int) -> bool:
    """Whether a file holds this chunk's content; the header is the readers' business."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return False
    padding = bytes(FILE_NBYTES - HEADER_NBYTES - CONTENT_NBYTES)
    return len(data) == FILE_NBYTES and data[HEADER_NBYTES:] == content(number) + padding


class Tally:
    """Counters that outlive the process which counts: one writer, and readers in other processes."""

    def __init__(self, memory: memoryview) -> None:
        self._counts = memory[:_TALLY_NBYTES].cast("Q")

    def add(self, name: str, count: int = 1) -> None:
        self._counts[TALLY.index(name)] += count

    def __getitem__(self, name: str) -> int:
        return self._counts[TALLY.index(name)]

    def counted(self) -> dict[str, int]:
        return {name: self._counts[at] for at, name in enumerate(TALLY) if self._counts[at]}


class Pages:
    """Places for chunks in KV tensors, one tensor after the other; a chunk's blocks lie scattered."""

    def __init__(self, path: str, num_places: int) -> None:
        """Map the file, which is made if it is not there."""
        self.path = path
        self.num_places = num_places
        self.num_blocks = num_places * BLOCKS_PER_CHUNK
        self.strides = [nbytes + _GAP_NBYTES for nbytes in PAGES_NBYTES]
        nbytes = _TALLY_NBYTES + self.num_blocks * sum(self.strides)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(handle, nbytes)
            self._map = mmap.mmap(handle, nbytes)
        finally:
            os.close(handle)
        self.memory = memoryview(self._map)
        self.tally = Tally(self.memory)
        order = list(range(self.num_blocks))
        random.Random(0).shuffle(order)  # noqa: S311  no secret
        self._blocks = [
            order[at : at + BLOCKS_PER_CHUNK] for at in range(0, len(order), BLOCKS_PER_CHUNK)
        ]

    def tensor(self, tensor_idx: int) -> memoryview:
        """Return a tensor's bytes: blocks of `strides[tensor_idx]`, the page first in each."""
        start = _TALLY_NBYTES + self.num_blocks * sum(self.strides[:tensor_idx])
        return self.memory[start : start + self.num_blocks * self.strides[tensor_idx]]

    def blocks(self, place: int) -> Sequence[int]:
        return self._blocks[place]

    def read(self, place: int) -> bytes:
        return b"".join(self._spans(place))

    def write(self, place: int, data: bytes) -> None:
        at = 0
        for span in self._spans(place):
            span[:] = data[at : at + len(span)]
            at += len(span)

    def _spans(self, place: int) -> Iterator[memoryview]:
        for block in self._blocks[place]:
            for tensor_idx, nbytes in enumerate(PAGES_NBYTES):
                start = block * self.strides[tensor_idx]
                yield self.tensor(tensor_idx)[start : start + nbytes]


class Judge:
    """Compares what was served with what should have been, and remembers what was wrong."""

    def __init__(self) -> None:
        self.num_served = 0
        self.num_wrong = 0
        self.wrong: list[dict[str, object]] = []  # the first few
        self.wrong_by_note: Counter[str] = Counter()

    def look(self, pages: Pages, number: int, place: int, note: str = "") -> bool:
        """Compare a place with the chunk that is said to be in it; False if it differs."""
        self.num_served += 1
        at = first_difference(pages.read(place), content(number))
        if at is not None:
            self.count_wrong(number, note, at)
        return at is None

    def count_wrong(self, number: int, note: str, first_byte: int = 0) -> None:
        self.num_wrong += 1
        self.wrong_by_note[note] += 1
        if len(self.wrong) < 20:
            self.wrong.append({"chunk": number, "first_byte": first_byte, "note": note})
