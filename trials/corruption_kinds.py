"""Ways to damage a chunk file, by docs/format.md alone; a check must find each.

Every one changes what is on disk: a range that was zero before is not zeroed, and a file is not swapped with
one of equal bytes. `Files` is a small root: two groups and two ranks whose files have the same length, so
that a swap between them leaves every length right, and a second namespace with the same keys.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass

from fskv_tools.check.expect import expected_of

from fskv.format.chunk_file import ROW_NBYTES, ChunkHeader, FileLayout, encode_header
from fskv.format.integrity import xxh3_rows
from fskv.namespace import GroupIdentity, Identity
from fskv.root.root import NamespaceDir, Root

PAGES = (30000, 7000)  # three blocks: two rows, with padding after the last block
_BLOCKS = 3
_NUM_KEYS = 12


def corruption_identity(model: str) -> Identity:
    kinds = ("full", "sliding_window")
    return Identity(
        engine="benchmark",
        engine_version="1",
        arch="cpu-x86_64",
        model_name=model,
        weights="none",
        model_config={},
        kv_cache_dtype="int8",
        model_dtype="int8",
        kv_cache_layout="none",
        attention_backend="none",
        tokens_per_hash=16,
        blocks_per_chunk=_BLOCKS,
        groups=tuple(
            GroupIdentity(idx, kind, 128 if idx else None, 16, PAGES, (f"a.{idx}", f"b.{idx}"))
            for idx, kind in enumerate(kinds)
        ),
        hash_algorithm="none",
        hash_seed="0",
        topology={"tp": 2},
    )


@dataclass(frozen=True, slots=True)
class File:
    """A chunk file of the small root."""

    space: int
    number: int
    group: int
    rank: int
    path: str


class Files:
    """The small root, its good content, and damage to it."""

    def __init__(self, path: str) -> None:
        os.mkdir(path)
        self.path = path
        root = Root.open(path, create=True)
        self.content: dict[str, bytes] = {}
        self.files: list[File] = []
        for space in range(2):
            identity = corruption_identity(f"corruption-{space}")
            directory = root.open_namespace(identity)
            layouts = expected_of(identity, identity.digest16).layouts
            assert layouts is not None
            for number in range(_NUM_KEYS):
                for group in range(2):
                    for rank in range(2):
                        layout = layouts[group]
                        assert layout is not None
                        self._write(directory, layout, File(space, number, group, rank, ""))
        good = self.content[self.files[0].path]
        self.nbytes = len(good)
        self.header_nbytes = int.from_bytes(good[12:16], "little")

    def _write(self, directory: NamespaceDir, layout: FileLayout, file: File) -> None:
        key = _key(file.number)
        payload = _payload(layout, f"{file.space}/{file.number}/{file.group}/{file.rank}")
        header = ChunkHeader(
            key_hash=key,
            group_idx=file.group,
            rank=file.rank,
            namespace_digest=directory.digest,
            layout_digest=layout.digest,
            num_blocks=layout.num_blocks,
            page_nbytes=layout.page_nbytes,
            first_block=0,
            payload_nbytes=layout.payload_nbytes,
            row_digests=xxh3_rows(memoryview(payload)),
            creator="fskv/benchmark",
            written_at_ms=1_700_000_000_000,
        )
        path = directory.chunk_path(key, file.group, file.rank)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        content = encode_header(header, layout.header_nbytes) + payload
        self.content[path] = content
        self.files.append(File(file.space, file.number, file.group, file.rank, path))
        self.restore([path])

    def restore(self, paths: list[str]) -> None:
        """Put the good content back, and remove files that were not there before."""
        for path in paths:
            if path not in self.content:
                os.unlink(path)
                continue
            with open(path, "wb") as opened:
                opened.write(self.content[path])

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)


def _key(number: int) -> bytes:
    return random.Random(f"key {number}").randbytes(32)  # noqa: S311  no secret


def _payload(layout: FileLayout, seed: object) -> bytes:
    content = random.Random(f"payload {seed}").randbytes(layout.content_nbytes)  # noqa: S311
    return content + bytes(layout.payload_nbytes - len(content))


# --- the kinds --------------------------------------------------------------------------

# Each takes (root, the file it is to damage, another good one for a swap, rng) and returns the paths that are
# bad now, or None where what it drew would have changed nothing.
Kind = Callable[[Files, File, File, random.Random], "list[str] | None"]


def _flip(path: str, at: int, rng: random.Random) -> list[str]:
    with open(path, "r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ rng.randrange(1, 256)]))
    return [path]


def _rewrite(path: str, content: bytes) -> list[str]:
    with open(path, "wb") as opened:
        opened.write(content)
    return [path]


def header_byte(files: Files, file: File, _: File, rng: random.Random) -> list[str]:
    return _flip(file.path, rng.randrange(files.header_nbytes), rng)


def header_field(files: Files, file: File, _: File, rng: random.Random) -> list[str]:
    """Damage the prefix (32 bytes) or the map of a header: most of a header is padding."""
    content = files.content[file.path]
    return _flip(file.path, rng.randrange(32 + int.from_bytes(content[16:20], "little")), rng)


def header_padding(files: Files, file: File, _: File, rng: random.Random) -> list[str]:
    content = files.content[file.path]
    end = 32 + int.from_bytes(content[16:20], "little")
    return _flip(file.path, rng.randrange(end, files.header_nbytes), rng)


def payload_byte(files: Files, file: File, _: File, rng: random.Random) -> list[str]:
    return _flip(file.path, rng.randrange(files.header_nbytes, files.nbytes), rng)


def payload_padding(files: Files, file: File, _: File, rng: random.Random) -> list[str]:
    first = files.header_nbytes + _BLOCKS * sum(PAGES)
    return _flip(file.path, rng.randrange(first, files.nbytes), rng)


def truncation(files: Files, file: File, _: File, rng: random.Random) -> list[str]:
    nbytes = rng.randrange(files.nbytes)
    os.truncate(file.path, nbytes // 4096 * 4096 if rng.random() < 0.5 else nbytes)
    return [file.path]


def extension(files: Files, file: File, _: File, rng: random.Random) -> list[str]:
    nbytes = rng.choice((1, 8, 4096, rng.randrange(1, 200_000)))
    more = bytes(nbytes) if rng.random() < 0.5 else rng.randbytes(nbytes)
    return _rewrite(file.path, files.content[file.path] + more)


def zeros(files: Files, file: File, _: File, rng: random.Random) -> list[str] | None:
    content = bytearray(files.content[file.path])
    start, stop = sorted(rng.randrange(files.nbytes + 1) for _ in range(2))
    if rng.random() < 0.5:  # what a disk or a file system loses: whole pages
        start, stop = start // 4096 * 4096, -(-stop // 4096) * 4096
    if not any(content[start:stop]):
        return None
    content[start:stop] = bytes(stop - start)
    return _rewrite(file.path, bytes(content))


def torn(files: Files, file: File, other: File, rng: random.Random) -> list[str] | None:
    """Join the beginning of a file and the rest of another: both are sound, and of one length."""
    at = rng.randrange(1, files.nbytes // 4096) * 4096
    joined = files.content[file.path][:at] + files.content[other.path][at:]
    if joined == files.content[file.path]:
        return None
    return _rewrite(file.path, joined)


def rows_exchanged(files: Files, file: File, _: File, __: random.Random) -> list[str]:
    content = bytearray(files.content[file.path])
    at = files.header_nbytes
    nbytes = min(ROW_NBYTES, files.nbytes - at - ROW_NBYTES) // 2
    first, second = content[at : at + nbytes], content[at + ROW_NBYTES : at + ROW_NBYTES + nbytes]
    content[at : at + nbytes], content[at + ROW_NBYTES : at + ROW_NBYTES + nbytes] = second, first
    return _rewrite(file.path, bytes(content))


def _swap(files: Files, file: File, other: File) -> list[str]:
    _rewrite(file.path, files.content[other.path])
    _rewrite(other.path, files.content[file.path])
    return [file.path, other.path]


def swap_of_keys(files: Files, file: File, other: File, _: random.Random) -> list[str] | None:
    same = (file.space, file.group, file.rank) == (other.space, other.group, other.rank)
    return _swap(files, file, other) if same else None


def swap_of_groups(files: Files, file: File, other: File, _: random.Random) -> list[str] | None:
    same = (file.space, file.number, file.rank) == (other.space, other.number, other.rank)
    return _swap(files, file, other) if same else None


def swap_of_ranks(files: Files, file: File, other: File, _: random.Random) -> list[str] | None:
    same = (file.space, file.number, file.group) == (other.space, other.number, other.group)
    return _swap(files, file, other) if same else None


def duplicate(files: Files, file: File, _: File, rng: random.Random) -> list[str]:
    """Copy a file to the name of a key that is not stored."""
    name = rng.randbytes(16).hex()
    chunks = os.path.dirname(os.path.dirname(file.path))
    path = f"{chunks}/{name[:3]}/{name}.g{file.group}.r{file.rank}.kv"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    return _rewrite(path, files.content[file.path])


def foreign_namespace(files: Files, file: File, other: File, _: random.Random) -> list[str] | None:
    """Replace a file by that of the same key, group and rank in another namespace."""
    mine, theirs = ((f.number, f.group, f.rank) for f in (file, other))
    if file.space == other.space or mine != theirs:
        return None
    return _rewrite(file.path, files.content[other.path])


KINDS: dict[str, Kind] = {
    kind.__name__: kind
    for kind in (
        *(header_byte, header_field, header_padding, payload_byte, payload_padding),
        *(truncation, extension, zeros, torn, rows_exchanged),
        *(swap_of_keys, swap_of_groups, swap_of_ranks, duplicate, foreign_namespace),
    )
}
