"""Look at chunk files, and spoil them, from outside: as a disk, an admin or a bug would.

Plain file calls, and fskv.format.chunk_file for the bytes of a header; never the store, so that what
the demo shows does not rest on the code it shows. Called by `story.py` between two steps of an
engine that runs.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle

from fskv.errors import ChunkError
from fskv.format import chunk_file
from fskv.format.integrity import xxh3_rows

_AGED_S = 3600.0


@dataclass(frozen=True, slots=True)
class Damaged:
    """One spoiled file."""

    what: str
    group: int
    path: str


def chunk_files(root: str) -> set[str]:
    """Return the paths of all chunk files below a root."""
    return {str(path) for path in pathlib.Path(root).rglob("*.kv")}


def group_of(path: str) -> int:
    """Return the KV group of a chunk file, which is in its name: `<key>.g<group>.r<rank>.kv`."""
    return int(os.path.basename(path).split(".g")[1].split(".")[0])


def by_group(paths: Iterable[str]) -> dict[int, list[str]]:
    """Return sorted paths by KV group."""
    groups: dict[int, list[str]] = {}
    for path in sorted(paths):
        groups.setdefault(group_of(path), []).append(path)
    return dict(sorted(groups.items()))


def make_old(paths: Iterable[str]) -> None:
    """Date files back, so that `used` can tell which of them are loaded from now on."""
    then = time.time() - _AGED_S
    for path in paths:
        os.utime(path, (then, then))


def used(paths: Iterable[str]) -> set[str]:
    """Return those files that were read since `make_old`.

    fskv dates all chunks of a prefix that is used, also those of a window that no hit reads. Where a mount
    keeps no time of reading, those are returned.
    """
    times = {path: os.stat(path) for path in paths}
    since = time.time() - _AGED_S / 2
    read = {path for path, info in times.items() if info.st_atime > since}
    return read or {path for path, info in times.items() if info.st_mtime > since}


def flip_payload_bit(path: str) -> None:
    """Flip a bit in the last block: a window may need no other of a chunk, and then no other is read."""
    with open(path, "r+b") as file:
        header = chunk_file.parse_header(file.read())
        at = header.header_nbytes + header.num_blocks * sum(header.page_nbytes) * 7 // 8
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def truncate(path: str) -> None:
    os.truncate(path, os.path.getsize(path) // 2)


_DAMAGES = (("bit flipped", flip_payload_bit), ("truncated", truncate), ("removed", os.unlink))


def spoil_three(paths: Iterable[str]) -> list[Damaged]:
    """Flip a bit in one file, truncate a second, remove a third; spread over the KV groups."""
    groups = sorted(by_group(paths).values(), key=len)  # windows and states before attention
    done: list[Damaged] = []
    for group in cycle(groups):
        if len(done) == len(_DAMAGES) or not any(groups):
            return done
        if group:
            path = group.pop(len(group) // 2)
            what, damage = _DAMAGES[len(done)]
            damage(path)
            done.append(Damaged(what, group_of(path), path))
    return done


def zero_payload(path: str, pages: Sequence[int] | None = None) -> None:
    """Zero a chunk's payload and make its checksums right again: what fskv cannot notice.

    Or only these pages of each block; a page is a layer's.
    """
    content = bytearray(pathlib.Path(path).read_bytes())
    header = chunk_file.parse_header(content)
    start = header.header_nbytes
    for _ in range(header.num_blocks):
        for page, nbytes in enumerate(header.page_nbytes):
            if pages is None or page in pages:
                content[start : start + nbytes] = bytes(nbytes)
            start += nbytes
    digests = xxh3_rows(memoryview(content)[header.header_nbytes :])
    zeroed = dataclasses.replace(header, row_digests=digests)
    content[: header.header_nbytes] = chunk_file.encode_header(zeroed, header.header_nbytes)
    pathlib.Path(path).write_bytes(content)


def unsound(paths: Sequence[str]) -> list[str]:
    """Return one line for each file that is missing, torn or fails a checksum."""
    found = []
    for path in paths:
        name = os.path.basename(path)
        try:
            content = memoryview(pathlib.Path(path).read_bytes())
            header = chunk_file.parse_header(content)
            payload = content[header.header_nbytes :]
            if len(payload) != header.payload_nbytes:
                found.append(
                    f"{path}: payload is {len(payload)} bytes, not {header.payload_nbytes}"
                )
            chunk_file.check_rows(payload, 0, header.row_digests)
        except (OSError, ChunkError) as error:
            found.append(f"{name}: {error}")
    return found
