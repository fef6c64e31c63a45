"""A root with many chunk files: nearly all empty shells of 4 KiB with valid names, a few of them real.

What is counted, listed and pruned is names, lengths and mtimes, so a shell serves as well as a chunk there.
The real chunks are written by the store and are what lookups and loads ask for. Names and mtimes follow from
a seed: whoever checks what was pruned makes them again and asks nobody.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.rig import BenchmarkError, open_namespace
from fskv.data_path.store import ChunkStore
from fskv.data_path.transports.host import HostSlot, HostTransport
from fskv.format.chunk_file import FileLayout
from fskv.root.root import NamespaceDir
from fskv.types import FileId, Status

# docs/format.md; not from fskv.index.scan, which a first hit must not import.
NUM_SHARDS = 4096
SHELL_NBYTES = 4096
DAY_NS = 86_400 * 1_000_000_000
_PAGE = bytes(SHELL_NBYTES)
_SHARDS_AT_ONCE = 64
_ROOM_NBYTES = 4608  # of a shell: its block, its inode, its part of a directory


def open_root(path: str, *, create: bool = False) -> NamespaceDir:
    """Open the root and its namespace as a worker does."""
    return open_namespace(path, "scale", (65536,), 16, create=create)


def check_room(path: str, num_files: int, num_bytes: int) -> None:
    """Raise BenchmarkError when so many shells and bytes more would not fit."""
    info = os.statvfs(path)
    free = info.f_bavail * info.f_frsize
    need = num_files * _ROOM_NBYTES + num_bytes
    if need > 0.9 * free:
        raise BenchmarkError(f"{path} has {free >> 20} MiB free, {need >> 20} are needed")
    if info.f_files and num_files + 2 * NUM_SHARDS > info.f_favail:
        raise BenchmarkError(f"{path} has {info.f_favail} free inodes, {num_files} are needed")


def shard_path(namespace: str, shard: int) -> str:
    return f"{namespace}/chunks/{shard:03x}"


# --- shells ---------------------------------------------------------------------------------


def names_of(num_files: int, seed: int, shard: int) -> tuple[list[str], Any]:
    """Return the names of a shard's shells and how long ago, in ns, each was last used."""
    counts = _counts(num_files, seed)
    random = np.random.default_rng([seed, shard])
    count = int(counts[shard])
    names = [f"{shard:03x}{random.bytes(15).hex()[:29]}.g0.kv" for _ in range(count)]
    return names, random.integers(0, DAY_NS, count)


@functools.lru_cache(maxsize=8)
def _counts(num_files: int, seed: int) -> Any:
    return np.random.default_rng(seed).multinomial(num_files, np.full(NUM_SHARDS, 1 / NUM_SHARDS))


def make_shells(
    namespace: str,
    num_files: int,
    seed: int,
    now_ns: int,
    within_ns: int,
    progress: Callable[[int], None],
) -> None:
    """Make the shells of a seed, last used in the `within_ns` before `now_ns`, in two processes."""
    tasks = [
        (namespace, num_files, seed, now_ns, within_ns, first)
        for first in range(0, NUM_SHARDS, _SHARDS_AT_ONCE)
    ]
    made = 0
    context = multiprocessing.get_context("spawn")
    with context.Pool(2, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        for count in pool.imap_unordered(_make_some, tasks):
            made += count
            progress(made)


def _make_some(task: tuple[str, int, int, int, int, int]) -> int:
    namespace, num_files, seed, now_ns, within_ns, first = task
    made = 0
    for shard in range(first, first + _SHARDS_AT_ONCE):
        names, ages = names_of(num_files, seed, shard)
        if not names:
            continue
        path = shard_path(namespace, shard)
        os.makedirs(path, 0o700, exist_ok=True)
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            for name, age in zip(names, ages.tolist(), strict=True):
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                fd = os.open(name, flags, 0o600, dir_fd=directory)
                os.write(fd, _PAGE)
                mtime_ns = now_ns - age * within_ns // DAY_NS
                os.utime(fd, ns=(mtime_ns, mtime_ns))
                os.close(fd)
        finally:
            os.close(directory)
        made += len(names)
    return made


def oldest(num_files: int, seed: int, count: int) -> Iterator[tuple[int, str]]:
    """Yield (shard, name) of the `count` shells that were used least recently."""
    found = [
        (age, shard, name)
        for shard in range(NUM_SHARDS)
        for name, age in zip(*names_of(num_files, seed, shard), strict=True)
    ]
    found.sort(reverse=True)
    for _, shard, name in found[:count]:
        yield shard, name


def check_pruned(
    namespace: str, num_files: int, seed: int, expected: int, used: set[str]
) -> dict[str, int]:
    """Compare what is left on disk with what ought to be; raises BenchmarkError.

    Gone must be exactly the `expected` least recently used shells, those in `used` left out.
    """
    gone, kept = [], []
    for shard in range(NUM_SHARDS):
        names, ages = names_of(num_files, seed, shard)
        left = set(os.listdir(shard_path(namespace, shard))) if names else set()
        for name, age in zip(names, ages.tolist(), strict=True):
            if name not in left:
                gone.append(-1 if name in used else age)
            elif name not in used:
                kept.append(age)
    if len(gone) != expected:
        raise BenchmarkError(f"{len(gone)} files were pruned, expected {expected}")
    if min(gone, default=DAY_NS) < max(kept, default=0):
        raise BenchmarkError("a file was pruned that was used later than one that is left")
    return {"gone": len(gone), "kept": len(kept) + len(used)}


# --- real chunks ----------------------------------------------------------------------------


def chunk_id(number: int) -> FileId:
    return FileId(b"scale-%026d" % number, 0)


def content_of(number: int, nbytes: int) -> Any:
    return np.random.default_rng([7, number]).integers(0, 256, nbytes, np.uint8)


def layout_of(chunk_nbytes: int) -> FileLayout:
    return FileLayout(1, (chunk_nbytes,), bytes(16))


def open_store(
    directory: NamespaceDir, chunk_nbytes: int
) -> tuple[ChunkStore[HostSlot], HostTransport]:
    """Return a store as a worker makes it, without KV pages: loads end in the staging slot."""
    layout = layout_of(chunk_nbytes)
    transport = HostTransport(
        [], layout.file_nbytes, probe_dir=directory.tmp_dir, direct_io="auto", file_mode=0o600
    )
    store = ChunkStore(directory, {0: layout}, transport, touch_interval_s=600.0)
    return store, transport


def store_chunks(directory: NamespaceDir, num_chunks: int, chunk_nbytes: int) -> None:
    """Put `num_chunks` chunks through the real store."""
    store, transport = open_store(directory, chunk_nbytes)
    slot, start = transport.new_slot(0), layout_of(chunk_nbytes).header_nbytes
    for number in range(num_chunks):
        slot.array[start : start + chunk_nbytes] = content_of(number, chunk_nbytes)
        status = store.put(chunk_id(number), 0, slot)
        if status is not Status.OK:
            raise BenchmarkError(f"a chunk could not be stored: {status.value}")
