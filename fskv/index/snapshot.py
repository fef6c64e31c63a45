"""The catalogue of a namespace: every known chunk file, in memory and as a snapshot on disk.

40 bytes a file in memory and on disk. With the snapshot a tool or a new engine needs no full walk: it lists
only directories whose mtime has changed. The leader writes the snapshot (fskv.bounds.lease), and anybody may
read it. It decides only about counting and pruning: a load checks the file itself. A snapshot that fails a
check is ignored.

`snapshot.msgpack` is a msgpack fixmap of these six fields, `snapshot` first, `records` last. Integers are
little endian:

    snapshot      1, name and value in the shortest encoding
    taken_at_ns   time of the listing by the file system's clock, ns since 1970
    dir_mtimes    4096 i64: mtime in ns of each directory at its listing; 0: absent; -2: to be listed again
    counts        4096 u32: records of each directory
    digest        XXH3-64 (8 bytes, big endian) of taken_at_ns (8 bytes), dir_mtimes, counts, all records
    records       bin 32, 40 bytes a file, by directory (the first three hex digits of the name): XXH3-128
                  (big endian), group u32, rank + 1 u32 or 0, mtime in ns i64, bytes on disk u64

It is a regular file. Less than 64 KiB stand before the records and nothing behind them. Group and rank are at
most 999999, bytes on disk at most 2^62 - 1, and no two neighbours are the same file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Collection, Iterable
from typing import Any

import msgpack
import numpy as np
import xxhash

from fskv.index.scan import (
    NUM_SHARDS,
    RECORD,
    UNSETTLED,
    Part,
    Records,
    Shard,
    most_nbytes,
    shard_of,
    walk,
)
from fskv.namespace import CHUNK_DIR
from fskv.root.beneath import opened
from fskv.root.files import RegularFile, publishing, regular_file
from fskv.root.root import SNAPSHOT_FILE, TMP_DIR
from fskv.types import MAX_COUNT

_VERSION = 1
_HEAD = b"\x86\xa8snapshot" + bytes([_VERSION])  # how msgpack begins what `save` writes
_HEAD_NBYTES = 1 << 16  # more than all that stands before the records
_MAX_BIN_NBYTES = (1 << 32) - 1  # of one msgpack value: 107 million files
_READ_NBYTES = 1 << 20
_MAX_INDEX = 999_999  # of a group or rank: six digits of a name
_EMPTY = np.empty(0, RECORD)


def _digest(taken_at_ns: int, mtimes: bytes, counts: bytes, records: Iterable[Any]) -> bytes:
    """`records` are buffers: all of them in one, or shard by shard."""
    hasher = xxhash.xxh3_64(taken_at_ns.to_bytes(8, "little"))
    for content in (mtimes, counts, *records):
        hasher.update(content)
    return hasher.digest()


class Catalogue:
    """The known files of one namespace. One owner: the process that maintains the root, or a tool."""

    def __init__(self, namespace: str) -> None:
        """`namespace` is the path of its directory."""
        self.namespace = namespace
        self.taken_at_ns = 0  # by the file system's clock; 0: never walked to the end
        self._refreshed_at_ns = 0  # on the monotonic clock, 0: never
        # Of shards that have something to say: most namespaces of an old root are empty.
        self._shards: dict[int, Records] = {}
        self._nbytes: dict[int, int] = {}
        self._dir_mtimes: dict[int, int] = {}
        self.num_files = 0
        self.parts: dict[int, list[Part]] = {}  # by shard
        self.foreign: dict[int, tuple[int, list[str]]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes on disk of the chunk files, and of the parts."""
        parts = sum(part.nbytes for parts in self.parts.values() for part in parts)
        return min(MAX_COUNT, sum(self._nbytes.values()) + parts)

    @property
    def now_ns(self) -> int:
        """The file system's clock now; 0: unknown."""
        if not self.taken_at_ns or not self._refreshed_at_ns:
            return 0
        return self.taken_at_ns + time.monotonic_ns() - self._refreshed_at_ns

    def records(self, shard: int) -> Records:
        return self._shards.get(shard, _EMPTY)

    def shards(self) -> list[tuple[int, Records]]:
        """Return the records of every shard that has any, in order."""
        return sorted(self._shards.items(), key=lambda item: item[0])

    async def refresh(
        self,
        now_ns: int,
        *,
        every: bool = False,
        again: Collection[int] = (),
        device: int | None = None,
    ) -> list[Shard]:
        """Walk the directories that have changed since the last time, and shards `again`, or `every`;
        `device` as in `walk`.

        Returns what could not be listed. Raises OSError when the namespace itself cannot be read.
        """
        anyway = self._dir_mtimes.keys() if every else self._dir_mtimes.keys() & set(again)
        seen = {**self._dir_mtimes, **dict.fromkeys(anyway, UNSETTLED)}
        failed = []
        started_ns = time.monotonic_ns()
        async for shard in walk(self.namespace, seen, now_ns=now_ns, device=device):
            if shard.error is not None:
                failed.append(shard)
            else:
                self.take(shard)
        self.taken_at_ns, self._refreshed_at_ns = now_ns, started_ns
        return failed

    def take(self, shard: Shard) -> None:
        """Replace the records of a shard."""
        self._put(shard.idx, shard.records.copy(), shard.dir_mtime_ns)
        self.parts.pop(shard.idx, None)
        self.foreign.pop(shard.idx, None)
        if shard.parts:
            self.parts[shard.idx] = shard.parts
        if shard.num_foreign:
            self.foreign[shard.idx] = (shard.num_foreign, shard.foreign)

    def keep(self, shard: int, mask: Any) -> None:
        """Forget the records of a shard where `mask` is False: their files are gone."""
        self._put(shard, self.records(shard)[mask], UNSETTLED)

    def remove_empty(self, root: str, before_ns: int | None) -> int:
        """Remove empty directories of chunks; returns how many.

        With `before_ns` only directories with an earlier mtime go. A store makes its directory again.
        """
        busy = {*self._shards, *self.parts, *self.foreign}
        removed = 0
        with (
            contextlib.suppress(OSError),
            opened(root, f"{self.namespace}/{CHUNK_DIR}", os.O_PATH) as directory,
        ):
            for shard in sorted(self._dir_mtimes.keys() - busy):
                at_ns = self._dir_mtimes[shard]
                if before_ns is not None and not 0 < at_ns < before_ns:
                    continue
                with contextlib.suppress(OSError):  # somebody stores there
                    os.rmdir(f"{shard:03x}", dir_fd=directory)
                    del self._dir_mtimes[shard]
                    removed += 1
        return removed

    @property
    def is_bare(self) -> bool:
        """Return whether no directory of chunks was seen."""
        return not (self._dir_mtimes or self._shards or self.parts or self.foreign)

    def _put(self, shard: int, records: Records, dir_mtime_ns: int) -> None:
        self.num_files += len(records) - len(self.records(shard))
        for known in (self._shards, self._nbytes, self._dir_mtimes):
            known.pop(shard, None)
        if len(records):
            self._shards[shard] = records
            # In a double, where nothing overflows: exact below 2^53 bytes.
            nbytes = records["nbytes"].sum(dtype=np.float64)
            self._nbytes[shard] = min(MAX_COUNT, int(nbytes))
        if dir_mtime_ns:
            self._dir_mtimes[shard] = dir_mtime_ns

    # --- on disk ----------------------------------------------------------------------------

    @property
    def path(self) -> str:
        return f"{self.namespace}/{SNAPSHOT_FILE}"

    def save(self, file_mode: int = 0o600, root: str | None = None) -> None:
        """Publish the snapshot; raises OSError, and leaves no part then.

        No link is followed below `root`, which without it is the namespace.
        """
        nbytes = RECORD.itemsize * self.num_files
        if nbytes > _MAX_BIN_NBYTES:
            raise OSError(errno.EFBIG, "more files than a snapshot can hold", self.path)
        shards = self.shards()
        counts_of, settled = np.zeros(NUM_SHARDS, "<u4"), np.zeros(NUM_SHARDS, "<i8")
        for shard, records in shards:
            counts_of[shard] = len(records)
        for shard, dir_mtime_ns in self._dir_mtimes.items():
            settled[shard] = dir_mtime_ns
        counts = counts_of.tobytes()
        # Parts and foreign files are not in a snapshot: who loads it lists their shards again.
        settled[[*self.parts, *self.foreign]] = UNSETTLED
        mtimes = settled.tobytes()
        head = {
            "snapshot": _VERSION,
            "taken_at_ns": self.taken_at_ns,
            "dir_mtimes": mtimes,
            "counts": counts,
            "digest": _digest(
                self.taken_at_ns, mtimes, counts, (records.data for _, records in shards)
            ),
        }
        packer = msgpack.Packer()
        packed = packer.pack_map_header(len(head) + 1)
        packed += b"".join(packer.pack(item) for pair in head.items() for item in pair)
        # "bin 32" by hand, and shard by shard: packed as one value it is in memory twice more.
        packed += packer.pack("records") + b"\xc6" + nbytes.to_bytes(4, "big")
        root = root or self.namespace
        with (
            opened(root, f"{self.namespace}/{TMP_DIR}", os.O_PATH) as tmp,
            opened(root, self.namespace, os.O_PATH) as directory,
            publishing(SNAPSHOT_FILE, file_mode, dir_fd=directory, part_dir_fd=tmp) as file,
        ):
            file.write(packed)
            for _, records in shards:
                file.write(records.data)

    @classmethod
    def load(cls, namespace: str) -> Catalogue:
        """Return the namespace's snapshot, or an empty catalogue where there is none that can be used."""
        catalogue = cls(namespace)
        with contextlib.suppress(OSError, ValueError):
            catalogue._read()
        return catalogue

    def _read(self) -> None:
        """Fill the catalogue from the snapshot; an OSError or ValueError leaves the catalogue as it was."""
        with regular_file(self.path) as file:
            try:
                taken_at_ns, mtimes, counts, records = _read_from(file)
            except OSError:
                raise
            except Exception as error:  # whatever a damaged file makes of the values
                raise ValueError(f"{self.path}: {error}") from error
        sizes = records["nbytes"]  # no more than the walk that they stand for would say
        np.minimum(sizes, np.uint64(most_nbytes(self.namespace)), out=sizes)
        stops = np.cumsum(counts)
        for idx in np.flatnonzero(counts).tolist():
            self._put(idx, records[stops[idx] - counts[idx] : stops[idx]], 0)
        for idx in np.flatnonzero(mtimes).tolist():
            self._dir_mtimes[idx] = int(mtimes[idx])
        self.taken_at_ns = taken_at_ns


def _read_from(file: RegularFile) -> tuple[int, Any, Any, Records]:
    """Return `taken_at_ns`, `dir_mtimes`, `counts` and records; a damaged file raises any exception."""
    packed = file.read(_HEAD_NBYTES)
    if not packed.startswith(_HEAD):
        raise ValueError("not a snapshot, or of another version")
    unpacker = msgpack.Unpacker(max_buffer_size=_HEAD_NBYTES)
    unpacker.feed(packed)
    unpacker.read_map_header()
    tree = {unpacker.unpack(): unpacker.unpack() for _ in range(5)}
    if unpacker.unpack() != "records":
        raise ValueError("the records are not its last field")
    begin = unpacker.tell() + 5  # behind "bin 32" and its length
    taken_at_ns = int(tree["taken_at_ns"])
    raw_mtimes, raw_counts = bytes(tree["dir_mtimes"]), bytes(tree["counts"])
    mtimes = np.frombuffer(raw_mtimes, "<i8")
    counts = np.frombuffer(raw_counts, "<u4").astype(np.int64)
    if not (len(mtimes) == len(counts) == NUM_SHARDS):
        raise ValueError("its tables are not those of the directories")
    num_records = int(counts.sum())
    nbytes = RECORD.itemsize * num_records
    # Before gigabytes of something else are read, or room is made for them.
    is_told = packed[begin - 5 : begin] == b"\xc6" + nbytes.to_bytes(4, "big")
    if not is_told or file.info.st_size != begin + nbytes:
        raise ValueError("the records have another length than its counts say")
    # Memory that is not written to is none: what holes in the file say is refused before it costs any.
    records = np.empty(num_records, RECORD)
    content = records.view(np.uint8).data
    at = len(packed) - begin
    content[:at] = packed[begin:]
    possible = _Possible(counts)
    possible.check(records[: at // RECORD.itemsize])
    while at < len(content):
        if not (got := os.readv(file.fd, [content[at : at + _READ_NBYTES]])):
            raise ValueError("the file ends early")
        at += got
        possible.check(records[possible.num_checked : at // RECORD.itemsize])
    if _digest(taken_at_ns, raw_mtimes, raw_counts, [content]) != bytes(tree["digest"]):
        raise ValueError("damaged")
    return taken_at_ns, mtimes, counts, records


class _Possible:
    """Checks records, piece by piece: they are of possible files of a namespace, in their order.

    The digest is no secret, so a writer of the root can make records up. But a name is in one directory and
    once in it, so made-up records need as much room on the disk as here: a hole is one record again and
    again.
    """

    def __init__(self, counts: Any) -> None:
        self._left = counts.copy()
        self._shard = 0
        self.num_checked = 0

    def check(self, records: Records) -> None:
        """Check the next records; raises ValueError for records that no walk can have found."""
        if not len(records):
            return
        shards = shard_of(records)
        self._left -= np.bincount(shards, minlength=NUM_SHARDS)
        names = records.view("<u8").reshape(len(records), -1)[:, :3]  # with group and rank
        if (
            shards[0] < self._shard
            or (shards[1:] < shards[:-1]).any()
            or (self._left < 0).any()
            or (records["group"] > _MAX_INDEX).any()
            or (records["rank1"] > _MAX_INDEX + 1).any()
            or (records["nbytes"] > MAX_COUNT).any()
            or (names[1:] == names[:-1]).all(axis=1).any()
        ):
            raise ValueError("records that no directory can have")
        self._shard = shards[-1]
        self.num_checked += len(records)


def joined(tables: Iterable[Records]) -> Records:
    """Return the records of all tables as one, read only. np.concatenate takes 5 us for each of 4096."""
    return np.frombuffer(b"".join(table.data for table in tables), RECORD)
