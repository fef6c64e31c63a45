"""Walks the chunk files of a namespace: their names, sizes on disk and last uses.

Asynchronous: worker threads list directories, a batch of shards at a time, so that the round trips of a
network file system overlap. A bad entry never raises. An entry that is no chunk file and no part is
*foreign*: counted and named, never touched. A walk can be resumed at any shard, and skips directories without
a change since the caller's last look.

A symbolic link in the place of a directory of chunks is foreign, so the removal of walked files stays inside
the namespace.

A directory's mtime says that names came or went, not that files were used: the mtimes of files in an
unchanged directory may be newer than remembered. fskv.bounds.evict looks at a file again before it removes
it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fskv.namespace import CHUNK_DIR, chunk_file, parse_chunk_file
from fskv.root.beneath import opened
from fskv.root.filesystem import (
    Space,
    block_nbytes,
    clamp_mtime,
    is_local,
    length,
)
from fskv.root.process_id import is_our_part
from fskv.types import MAX_COUNT

if TYPE_CHECKING:
    import asyncio

NUM_SHARDS = 4096
UNSETTLED = -2  # an mtime that no directory has
# A directory of chunks, and nothing that somebody has put in its place.
OPEN_SHARD = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

# One chunk file: the XXH3-128 of its key, group, rank + 1 (0: one file for all ranks), mtime, bytes on disk.
RECORD = np.dtype(
    [("name", "V16"), ("group", "<u4"), ("rank1", "<u4"), ("mtime_ns", "<i8"), ("nbytes", "<u8")]
)
Records = np.ndarray[Any, np.dtype[np.void]]

_BATCH = 64  # shards per call of a worker thread: a hand-over costs about 100 us
_IN_FLIGHT = 4  # batches
# A file that came within the same tick of the directory's mtime as our listing would stay unseen. Ticks are
# 4 ms on ext4 and 10 ms on an NFS server here; some file systems have whole seconds (MooseFS).
_TICK_NS, _COARSE_TICK_NS = 100_000_000, 2_000_000_000
_MAX_FOREIGN = 8  # names kept per shard
# ZFS counts a file's blocks when its transaction group is synced, some seconds after the write; an NFS server
# on it likewise. A file that is younger counts with its length at least, and is looked at again later.
_YOUNG_NS = 60 * 1_000_000_000


@dataclass(frozen=True, slots=True)
class Part:
    """A file that was being written when it was seen."""

    path: str
    mtime_ns: int
    nbytes: int


@dataclass(slots=True)
class Shard:
    """The files that a walk found in one directory of chunks."""

    idx: int
    dir_mtime_ns: int  # 0: it is not there; UNSETTLED: names may have changed unseen, list it again
    records: Records
    parts: list[Part] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)  # names, the first few
    num_foreign: int = 0
    growing: bool = False  # blocks of some files are not counted yet
    error: OSError | None = None  # it could not be listed; nothing else is known then


def shard_path(namespace: str, idx: int) -> str:
    return f"{namespace}/{CHUNK_DIR}/{idx:03x}"


def shard_idx(name: str) -> int | None:
    """Return the number of the directory of chunks that is called `name`; None: it is none."""
    if len(name) != 3 or not all(char in "0123456789abcdef" for char in name):
        return None
    return int(name, 16)


def file_name(record: Any) -> str:
    """Return the chunk file's name, relative to its shard."""
    rank1 = record["rank1"]
    return chunk_file(bytes(record["name"]).hex(), record["group"], rank1 - 1 if rank1 else None)


def _nbytes(info: os.stat_result, now_ns: int, *, by_blocks: bool) -> tuple[int, bool]:
    """Return the bytes that a file counts for, and whether more of its blocks may be counted later."""
    on_disk, nbytes = block_nbytes(info), length(info)
    # By its change, and not by its last use, which a store sets back.
    growing = on_disk < nbytes and bool(now_ns) and info.st_ctime_ns > now_ns - _YOUNG_NS
    if by_blocks:
        return on_disk, growing
    return (nbytes if growing else on_disk or nbytes), growing


async def walk(
    namespace: str,
    seen: Mapping[int, int],
    *,
    now_ns: int,
    device: int | None = None,
) -> AsyncIterator[Shard]:
    """Yield the shards whose directory is not as it was `seen`, in order.

    `seen` has the `dir_mtime_ns` of the last visits, 0 or nothing for none; a shard that is gone since is
    yielded empty. `now_ns` is the file system's own clock at the beginning, or earlier. On `device` files
    count by their blocks alone (fskv.root.filesystem.counting_device). Raises OSError only when the namespace
    itself cannot be read.
    """
    # Imported by those who walk: the command line starts often, and for little.
    import asyncio

    import aiofiles.os

    shards = await aiofiles.os.wrap(_changed)(namespace, seen, now_ns)
    most = await aiofiles.os.wrap(most_nbytes)(namespace)
    # Disks of this machine answer at once: threads would only wait for the interpreter.
    at_once = 1 if await aiofiles.os.wrap(is_local)(namespace) else _IN_FLIGHT
    batches = [shards[at : at + _BATCH] for at in range(0, len(shards), _BATCH)]
    list_batch = aiofiles.os.wrap(_list_batch)
    running: list[asyncio.Future[list[Shard]]] = []
    try:
        for batch in batches:
            running.append(
                asyncio.ensure_future(list_batch(namespace, batch, now_ns, most, device))
            )
            if len(running) == at_once:
                for shard in await running.pop(0):
                    yield shard
        while running:
            for shard in await running.pop(0):
                yield shard
    finally:
        for future in running:
            future.cancel()


def _changed(namespace: str, seen: Mapping[int, int], now_ns: int) -> list[tuple[int, int]]:
    """Return (shard, mtime of its directory) for all that changed; mtime -1 for those that are gone.

    An mtime of the future does not tell: where nodes stamp by their own clocks what comes before that time
    does not change it.
    """
    found: dict[int, int] = {}
    path = f"{namespace}/{CHUNK_DIR}"
    for name in _names(namespace, path):
        idx = shard_idx(name)
        if idx is not None:
            found[idx] = dir_mtime_ns(f"{path}/{name}")
    gone = [(idx, -1) for idx, mtime in seen.items() if idx not in found and mtime]
    changed = [
        (idx, mtime)
        for idx, mtime in found.items()
        if not mtime or mtime != seen.get(idx) or 0 < now_ns < mtime
    ]
    return sorted(changed + gone)


def _names(namespace: str, path: str) -> list[str]:
    """Return the names in a directory of a namespace, none where it has no such directory."""
    for _ in range(2):  # all of the root may have been away for a moment
        with contextlib.suppress(FileNotFoundError), opened(namespace, path) as fd:
            return os.listdir(fd)
        os.stat(namespace)  # gone as a whole: an error
    return []


def dir_mtime_ns(path: str) -> int:
    """Return a directory's mtime; 0: unknown.

    By open(), since stat() on an NFS client says for up to 60 s what it said before.
    """
    try:
        fd = os.open(path, OPEN_SHARD)
    except OSError:
        return 0
    try:
        return max(0, os.fstat(fd).st_mtime_ns)  # other numbers mean other things here
    except OSError:
        return 0
    finally:
        os.close(fd)


def most_nbytes(path: str) -> int:
    """Return the size of the file system, MAX_COUNT where it does not say: no file counts for more.

    A sparse file without blocks counts with its length, and that may be anything.
    """
    with contextlib.suppress(OSError):
        return Space.of(path).total_nbytes or MAX_COUNT
    return MAX_COUNT


def limit(shard: Shard, most: int) -> None:
    """Limit the counted bytes of each file of a shard to `most` (see `most_nbytes`)."""
    if len(shard.records) and int(shard.records["nbytes"].max()) > most:
        shard.records = shard.records.copy()
        np.minimum(shard.records["nbytes"], np.uint64(most), out=shard.records["nbytes"])
    shard.parts = [replace(p, nbytes=most) if p.nbytes > most else p for p in shard.parts]


def _list_batch(
    namespace: str,
    batch: Iterable[tuple[int, int]],
    now_ns: int,
    most: int,
    device: int | None,
) -> list[Shard]:
    shards = []
    for idx, mtime_ns in batch:
        if mtime_ns == -1:
            shards.append(Shard(idx, 0, np.empty(0, RECORD)))
            continue
        tick_ns = _TICK_NS if mtime_ns % 1_000_000_000 else _COARSE_TICK_NS
        settled = mtime_ns < now_ns - tick_ns
        shard = list_shard(shard_path(namespace, idx), idx, now_ns, device)
        limit(shard, most)
        settled = settled and shard.error is None and not shard.growing
        shard.dir_mtime_ns = mtime_ns if settled else UNSETTLED
        shards.append(shard)
    return shards


def list_shard(path: str, idx: int, now_ns: int = 0, device: int | None = None) -> Shard:
    """List one directory of chunks. Never raises: see `Shard.error`. `now_ns`: see `walk`; 0: unknown.

    One that is gone is empty. One that is gone with all that is around it (the root is away, the mount) is an
    error: nothing is known of it.
    """
    nothing = Shard(idx, 0, np.empty(0, RECORD))
    for _ in range(2):  # all of it may have been away for a moment
        try:
            return _listed(path, idx, now_ns, device)
        except FileNotFoundError:
            try:
                os.stat(os.path.dirname(path))
            except OSError as error:
                return replace(nothing, error=error)
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):  # a file or a link: no place for chunks
                return replace(nothing, foreign=[os.path.basename(path)], num_foreign=1)
            return replace(nothing, error=error)
    return nothing


def _listed(path: str, idx: int, now_ns: int, device: int | None) -> Shard:
    """List one directory as `list_shard` does, but raise OSError where it cannot be listed."""
    fd = os.open(path, OPEN_SHARD)
    try:
        by_blocks = device is not None and os.fstat(fd).st_dev == device  # and not another mount
        with os.scandir(fd) as entries:
            return _sorted_out(path, idx, entries, now_ns, by_blocks=by_blocks)
    finally:
        with contextlib.suppress(OSError):
            os.close(fd)


def _sorted_out(
    path: str, idx: int, entries: Iterable[os.DirEntry[str]], now_ns: int, *, by_blocks: bool
) -> Shard:
    shard = Shard(idx, 0, np.empty(0, RECORD))
    own_chunks = f"{idx:03x}"
    rows = []
    for entry in entries:
        name, info = entry.name, None
        if name.startswith(".nfs"):
            continue  # a file that some NFS client still has open
        chunk = parse_chunk_file(name)
        # A chunk in another's directory is foreign: nobody will ever look for it there.
        if is_our_part(name) if chunk is None else name.startswith(own_chunks):
            try:
                info = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # removed meanwhile
            except OSError:
                pass
        if info is None or not stat.S_ISREG(info.st_mode):
            shard.num_foreign += 1
            if len(shard.foreign) < _MAX_FOREIGN:
                shard.foreign.append(name)
            continue
        nbytes, growing = _nbytes(info, now_ns, by_blocks=by_blocks)
        mtime_ns = clamp_mtime(info.st_mtime_ns, now_ns)
        if chunk is not None:
            rank1 = 0 if chunk.rank is None else chunk.rank + 1
            rows.append((bytes.fromhex(chunk.name), chunk.group_idx, rank1, mtime_ns, nbytes))
        else:
            # It grows without a sign in its directory's mtime, until nobody writes it any more.
            growing = growing or not now_ns or mtime_ns > now_ns - _YOUNG_NS
            shard.parts.append(Part(f"{path}/{name}", info.st_mtime_ns, nbytes))
        shard.growing |= growing
    shard.records = np.array(rows, RECORD)
    return shard


def shard_of(records: Records) -> Any:
    """Return the number of the directory that each record's file has to stand in."""
    raw = np.ascontiguousarray(records["name"]).view(np.uint8).reshape(-1, 16)
    return (raw[:, 0].astype(np.int32) << 4) | (raw[:, 1] >> 4)
