"""A namespace's catalogue: every chunk file that is known, in memory and as a snapshot on disk.

40 bytes a file in memory and on disk. The snapshot lets tools and an engine that starts again know what is
there without a walk; together with the directories' mtimes in it only what has changed is listed. It is
written by whoever holds the lease (fskv.lease), read by anybody, and only ever decides what is counted and
pruned: a load checks the file itself. A snapshot that fails a check is as good as none.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from typing import Any

import msgpack
import numpy as np
import xxhash

from fskv.index.scan import NUM_SHARDS, RECORD, UNSETTLED, Part, Records, Shard, walk
from fskv.process import unique_name
from fskv.root import TMP_DIR

SNAPSHOT_FILE = "snapshot.msgpack"
_VERSION = 1
_MAX_NBYTES = 16 << 30
_HEAD = b"\x86\xa8snapshot" + bytes([_VERSION])  # how msgpack begins what `save` writes
_MAX_BIN_NBYTES = (1 << 32) - 1  # of one msgpack value: 107 million files
_EMPTY = np.empty(0, RECORD)


def _digest(taken_at_ns: int, mtimes: bytes, counts: bytes, records: Iterable[Any]) -> bytes:
    """`records` are buffers: all of them in one, or shard by shard."""
    hasher = xxhash.xxh3_64(taken_at_ns.to_bytes(8, "little"))
    for content in (mtimes, counts, *records):
        hasher.update(content)
    return hasher.digest()


class Catalogue:
    """What is known of one namespace. One owner: the process that maintains the root, or a tool."""

    def __init__(self, namespace: str) -> None:
        """`namespace` is the path of its directory."""
        self.namespace = namespace
        self.taken_at_ns = 0  # by the file system's clock; 0: never walked to the end
        self._shards: list[Records] = [_EMPTY] * NUM_SHARDS
        self._dir_mtimes = np.zeros(NUM_SHARDS, np.int64)
        self._nbytes = np.zeros(NUM_SHARDS, np.int64)
        self._counts = np.zeros(NUM_SHARDS, np.int64)
        self.parts: dict[int, list[Part]] = {}  # by shard
        self.foreign: dict[int, tuple[int, list[str]]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes on disk of the chunk files, and of the parts."""
        parts = sum(part.nbytes for parts in self.parts.values() for part in parts)
        return int(self._nbytes.sum()) + parts

    @property
    def num_files(self) -> int:
        return int(self._counts.sum())

    def records(self, shard: int) -> Records:
        return self._shards[shard]

    def all_records(self) -> Records:
        """Return every record, shard after shard, as a copy."""
        return np.concatenate(self._shards)

    def shard_starts(self) -> Any:
        """Return the index of each shard's first record in `all_records`."""
        return np.concatenate(([0], np.cumsum(self._counts)))

    async def refresh(self, now_ns: int) -> list[Shard]:
        """Walk what has changed since the last time; returns what could not be listed.

        Raises OSError when the namespace itself cannot be read.
        """
        failed = []
        async for shard in walk(self.namespace, self.seen, now_ns=now_ns):
            if shard.error is not None:
                failed.append(shard)
            else:
                self.take(shard)
        self.taken_at_ns = now_ns
        return failed

    def seen(self, shard: int) -> int:
        """Return the directory mtime a shard was last listed at; 0: it was not there."""
        return int(self._dir_mtimes[shard])

    def take(self, shard: Shard) -> None:
        """Replace what is known of a shard."""
        self._put(shard.idx, shard.records.copy(), shard.dir_mtime_ns)
        self.parts.pop(shard.idx, None)
        self.foreign.pop(shard.idx, None)
        if shard.parts:
            self.parts[shard.idx] = shard.parts
        if shard.num_foreign:
            self.foreign[shard.idx] = (shard.num_foreign, shard.foreign)

    def keep(self, shard: int, mask: Any) -> None:
        """Forget the records of a shard where `mask` is False: their files are gone."""
        self._put(shard, self._shards[shard][mask], UNSETTLED)

    def _put(self, shard: int, records: Records, dir_mtime_ns: int) -> None:
        self._shards[shard] = records
        self._dir_mtimes[shard] = dir_mtime_ns
        self._nbytes[shard] = int(records["nbytes"].sum())
        self._counts[shard] = len(records)

    # --- on disk ----------------------------------------------------------------------------

    @property
    def path(self) -> str:
        return f"{self.namespace}/{SNAPSHOT_FILE}"

    def save(self, file_mode: int = 0o600) -> None:
        """Publish the snapshot; raises OSError, and leaves no part then."""
        nbytes = RECORD.itemsize * self.num_files
        if nbytes > _MAX_BIN_NBYTES:
            raise OSError(errno.EFBIG, "more files than a snapshot can hold", self.path)
        counts = self._counts.astype("<u4").tobytes()
        settled = self._dir_mtimes.astype("<i8")
        # Parts and foreign files are not in a snapshot: who loads it lists their shards again.
        settled[[*self.parts, *self.foreign]] = UNSETTLED
        mtimes = settled.tobytes()
        head = {
            "snapshot": _VERSION,
            "taken_at_ns": self.taken_at_ns,
            "dir_mtimes": mtimes,
            "counts": counts,
            "digest": _digest(
                self.taken_at_ns, mtimes, counts, (records.data for records in self._shards)
            ),
        }
        packer = msgpack.Packer()
        packed = packer.pack_map_header(len(head) + 1)
        packed += b"".join(packer.pack(item) for pair in head.items() for item in pair)
        # "bin 32" by hand, and shard by shard: packed as one value it is in memory twice more.
        packed += packer.pack("records") + b"\xc6" + nbytes.to_bytes(4, "big")
        part = f"{self.namespace}/{TMP_DIR}/{unique_name()}.part"
        try:
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, file_mode)
            with os.fdopen(fd, "wb") as file:
                file.write(packed)
                for records in self._shards:
                    file.write(records.data)
            os.rename(part, self.path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(part)
            raise

    @classmethod
    def load(cls, namespace: str) -> Catalogue:
        """Return the namespace's snapshot, or an empty catalogue where there is none that can be used."""
        catalogue = cls(namespace)
        with contextlib.suppress(OSError, ValueError):
            catalogue._read()
        return catalogue

    def _read(self) -> None:
        """Take the snapshot's content; raises OSError or ValueError, with nothing taken."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(self.path, "rb", opener=lambda path, _: os.open(path, flags)) as file:
            head = file.read(len(_HEAD))
            if head != _HEAD:  # before gigabytes of something else are read
                raise ValueError(f"{self.path}: not a snapshot, or of another version")
            packed = head + file.read(_MAX_NBYTES)
        try:
            tree = msgpack.unpackb(packed, max_bin_len=len(packed))
            del packed  # as large as all that is in it
            taken_at_ns = int(tree["taken_at_ns"])
            mtimes = np.frombuffer(tree["dir_mtimes"], "<i8").copy()
            counts = np.frombuffer(tree["counts"], "<u4").astype(np.int64)
            raw = tree["records"]
            good = (
                len(mtimes) == len(counts) == NUM_SHARDS
                and len(raw) == RECORD.itemsize * counts.sum()
                and tree["digest"]
                == _digest(taken_at_ns, tree["dir_mtimes"], tree["counts"], [raw])
                and len(tree) == 6
            )
        except Exception as error:  # whatever a damaged file makes of the values
            raise ValueError(f"{self.path}: {error}") from error
        if not good:
            raise ValueError(f"{self.path}: damaged, or of another version")
        records = np.frombuffer(raw, RECORD).copy()
        stops = np.cumsum(counts)
        for idx in np.flatnonzero(counts):
            self._shards[idx] = records[stops[idx] - counts[idx] : stops[idx]]
            self._nbytes[idx] = int(self._shards[idx]["nbytes"].sum())
        self._counts = counts
        self._dir_mtimes = mtimes
        self.taken_at_ns = taken_at_ns
