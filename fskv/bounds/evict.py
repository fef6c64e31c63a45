"""Removes what was used least recently: chooses by what is remembered, then looks at each file again.

The mtime of a chunk file is its last use. What is remembered of it may be older than the truth, never
younger. So the oldest remembered ones are taken first, and one that turns out to have been used since waits
for its new turn: the exact order of last use, for a look at those files only that are about to go.

The files of all ranks of a chunk go together, when the last used of them is due: without one of them the
others serve nobody. A file that cannot be removed is left out from then on; the next ones go instead.

Files are looked at and removed through their directory's descriptor: where somebody has put a symbolic link
in the place of a directory since it was listed, nothing behind it goes.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiofiles.os
import numpy as np

from fskv.index.scan import file_name, shard_path
from fskv.index.snapshot import Catalogue, joined
from fskv.root.beneath import open_directory, remove_file
from fskv.root.filesystem import block_nbytes, clamp_mtime, length
from fskv.root.root import FORMAT_FILE

_BATCH = 256  # files per call of a worker thread; between batches the lease is looked at
_SPARE = 1.25  # candidates, in bytes, for what is to go: some will have been used meanwhile


@dataclass(frozen=True, slots=True)
class Candidate:
    """A chunk file as it is remembered."""

    catalogue: Catalogue
    shard: int
    row: int  # in the shard's records
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """What would go, least recently used first; `candidates` hold a little more than `nbytes`."""

    nbytes: int
    num_files: int
    candidates: Sequence[Candidate]
    before_ns: int | None = None  # what was used then or later stays, whatever else is asked for


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a prune would remove of one namespace, as far as is remembered."""

    catalogue: Catalogue
    num_files: int
    nbytes: int
    oldest_ns: int  # last uses
    newest_ns: int


@dataclass(slots=True)
class Pruned:
    """What became of a plan."""

    num_files: int = 0
    nbytes: int = 0
    vanished_nbytes: int = 0  # somebody else had removed them
    used_meanwhile: int = 0
    failures: dict[str, OSError] = field(default_factory=dict)  # by path
    removed: dict[str, list[tuple[bytes, int]]] = field(default_factory=dict)  # namespace -> chunks
    away: OSError | None = (
        None  # the root is not there, or not mounted: what was left of the plan stays
    )


def plan(
    catalogues: Sequence[Catalogue],
    nbytes: int,
    num_files: int = 0,
    stuck: frozenset[str] | set[str] = frozenset(),
    before_ns: int | None = None,
) -> PrunePlan:
    """Choose files of `catalogues` to free `nbytes` on disk and `num_files` inodes. Pure.

    With `before_ns` only of those that were last used before. May run in a worker thread while nobody changes
    the catalogues. Files whose path is in `stuck` are passed over. What is less than nothing is nothing.
    """
    nbytes, num_files = max(0, nbytes), max(0, num_files)
    tables = [(catalogue, *table) for catalogue in catalogues for table in catalogue.shards()]
    everything = joined(records for _, _, records in tables)
    mtimes, sizes = everything["mtime_ns"].copy(), everything["nbytes"].copy()
    del everything
    ends = np.cumsum([len(records) for _, _, records in tables])
    candidates: list[Candidate] = []
    left_nbytes, left_files = int(nbytes * _SPARE), int(num_files * _SPARE)
    for at in _oldest_first(mtimes, nbytes, num_files, int(sizes.mean()) if len(sizes) else 0):
        if left_nbytes <= 0 and left_files <= 0:
            break
        if before_ns is not None and mtimes[at] >= before_ns:
            break
        which = int(np.searchsorted(ends, at, side="right"))
        catalogue, shard, records = tables[which]
        row = int(at) - int(ends[which]) + len(records)
        candidate = Candidate(catalogue, shard, row, int(mtimes[at]))
        if stuck and _path(candidate) in stuck:
            continue
        candidates.append(candidate)
        left_nbytes -= int(sizes[at])
        left_files -= 1
    return PrunePlan(nbytes, num_files, candidates, before_ns)


def cutoff_ns(now_ns: int, unused_s: float, step_s: float) -> int:
    """Return the time before which a chunk must have been touched to be unused for so long, for certain.

    `now_ns` is the file system's own clock; 0, which is no time, makes nothing old enough. `step_s`: how
    much older than the last use an mtime may be (fskv.bounds.limits.MAX_TOUCH_INTERVAL_S).
    """
    return now_ns - int((unused_s + step_s) * 1e9)


def forecast(
    catalogues: Sequence[Catalogue], nbytes: int, num_files: int = 0, before_ns: int | None = None
) -> list[Forecast]:
    """Say what would go if so much were freed, and all that was last used before `before_ns`. Pure.

    By the files' own mtimes: where the ranks of a chunk differ, a little less goes. Without namespaces of
    which nothing would go.
    """
    tables = [(catalogue, records) for catalogue in catalogues for _, records in catalogue.shards()]
    mtimes = np.concatenate([records["mtime_ns"] for _, records in tables] or [np.empty(0, "<i8")])
    sizes = np.concatenate([records["nbytes"] for _, records in tables] or [np.empty(0, "<u8")])
    order = np.argsort(mtimes, kind="stable")
    count = min(num_files, len(order))
    if nbytes > 0:
        freed = np.cumsum(sizes[order])
        count = max(count, int(np.searchsorted(freed, nbytes, side="left")) + 1)
    if before_ns is not None:
        count = max(count, int(np.searchsorted(mtimes[order], before_ns, side="left")))
    goes = np.zeros(len(order), bool)
    goes[order[:count]] = True
    found = []
    at = 0
    for catalogue in catalogues:
        here = slice(at, at + catalogue.num_files)
        at += catalogue.num_files
        uses = mtimes[here][goes[here]]
        if len(uses):
            freed_here = int(sizes[here][goes[here]].sum())
            found.append(
                Forecast(catalogue, len(uses), freed_here, int(uses.min()), int(uses.max()))
            )
    return found


def _oldest_first(mtimes: Any, nbytes: int, num_files: int, mean_nbytes: int) -> Iterator[int]:
    """Yield indices by mtime, sorting no more than are likely to be wanted."""
    count = 64 + num_files + int(2 * nbytes / mean_nbytes) if mean_nbytes else len(mtimes)
    done = 0
    while done < len(mtimes):
        count = min(count, len(mtimes))
        # All that are as old as the last one: equal mtimes are common where they are whole seconds.
        newest = np.partition(mtimes, count - 1)[count - 1]
        order = np.flatnonzero(mtimes <= newest)
        yield from order[np.argsort(mtimes[order], kind="stable")][done:]
        done, count = len(order), len(order) * 4


def _path(candidate: Candidate) -> str:
    record = candidate.catalogue.records(candidate.shard)[candidate.row]
    return f"{shard_path(candidate.catalogue.namespace, candidate.shard)}/{file_name(record)}"


@dataclass(slots=True)
class _Rows:
    """What an execution has found out about records of one shard."""

    catalogue: Catalogue
    gone: set[int] = field(default_factory=set)
    seen: set[int] = field(default_factory=set)  # decided, or waiting for their new turn


@dataclass(slots=True)
class _Execution:
    """A plan that is being carried out."""

    plan: PrunePlan
    root: str
    pruned: Pruned = field(default_factory=Pruned)
    touched: dict[tuple[int, int], _Rows] = field(default_factory=dict)
    at: int = 0  # the next candidate
    used: list[tuple[int, int, Candidate]] = field(default_factory=list)  # heap by their new mtime

    @property
    def fulfilled(self) -> bool:
        pruned = self.pruned
        freed = pruned.nbytes + pruned.vanished_nbytes
        return freed >= self.plan.nbytes and pruned.num_files >= self.plan.num_files

    @property
    def over(self) -> bool:
        # What was used and is younger than all candidates is no business of this plan.
        return self.at >= len(self.plan.candidates) or self.pruned.away is not None

    def next(self) -> tuple[Candidate, int, bool]:
        """Return the least recently used candidate, its mtime, and whether it was looked at before."""
        candidate = self.plan.candidates[self.at]
        mtime_ns = candidate.mtime_ns
        if self.used and self.used[0][0] <= mtime_ns:
            mtime_ns, _, candidate = heapq.heappop(self.used)
            return candidate, mtime_ns, True
        self.at += 1
        return candidate, mtime_ns, False


async def execute(chosen: PrunePlan, may_go_on: Callable[[], bool], root: str) -> Pruned:
    """Remove files in the plan's order until it is fulfilled, or `may_go_on()` says no.

    The catalogues are updated: what is gone is forgotten, what was used meanwhile has its new mtime. No link
    is followed below `root`. Where that is not there, or not mounted, it ends: see `Pruned.away`.
    """
    execution = _Execution(chosen, root)
    remove = aiofiles.os.wrap(_remove_batch)
    while not (execution.over or execution.fulfilled) and may_go_on():
        await remove(execution)
    for (_, shard), rows in execution.touched.items():
        mask = np.ones(len(rows.catalogue.records(shard)), bool)
        mask[list(rows.gone)] = False
        rows.catalogue.keep(shard, mask)
    return execution.pruned


class _Directory:
    """A shard that stays the same one while a batch removes files from it.

    Raises OSError where the root is not there, or is a stale handle: then nothing is known to be gone.
    """

    def __init__(self, path: str, root: str) -> None:
        self.path = path
        self._fd = -1
        self._errno = 0
        for _ in range(2):  # all of the root may have been away for a moment
            try:
                self._fd = open_directory(root, path, os.O_PATH)
            except OSError as error:
                self._errno = error.errno or errno.EIO
            else:
                self._errno = 0
            if self._errno not in (errno.ENOENT, errno.ESTALE):
                break
            os.stat(f"{root}/{FORMAT_FILE}")

    def stat(self, name: str) -> os.stat_result:
        """Look at a file; raises OSError, also where there is no such directory."""
        self._check(name)
        return os.stat(name, dir_fd=self._fd, follow_symlinks=False)

    def remove(self, name: str) -> os.stat_result | None:
        """Remove a file and return what it was, None for what is no file; raises OSError as `stat`."""
        self._check(name)
        return remove_file(name, self._fd)

    def _check(self, name: str) -> None:
        if self._errno:
            raise OSError(self._errno, os.strerror(self._errno), f"{self.path}/{name}")

    def close(self) -> None:
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)


def _remove_batch(execution: _Execution) -> None:
    directories: dict[str, _Directory] = {}
    try:
        _remove_some(execution, directories)
    finally:
        for directory in directories.values():
            directory.close()


def _remove_some(execution: _Execution, directories: dict[str, _Directory]) -> None:
    pruned = execution.pruned
    for _ in range(_BATCH):
        if execution.over or execution.fulfilled:
            return
        candidate, mtime_ns, again = execution.next()
        catalogue, shard = candidate.catalogue, candidate.shard
        rows_of_shard = execution.touched.setdefault((id(catalogue), shard), _Rows(catalogue))
        if candidate.row in rows_of_shard.seen and not again:
            continue  # it is with another rank's file
        records = catalogue.records(shard)
        rows = _all_ranks(records, candidate.row)
        rows_of_shard.seen.update(rows)
        path = shard_path(catalogue.namespace, shard)
        directory = directories.get(path)
        if directory is None:
            try:
                directory = directories.setdefault(path, _Directory(path, execution.root))
            except OSError as error:
                pruned.away = error
                return
        last_use_ns = max(_look(directory, records, row, catalogue.now_ns) for row in rows)
        records["mtime_ns"][rows] = last_use_ns
        if last_use_ns > mtime_ns:
            pruned.used_meanwhile += 1
            if execution.plan.before_ns is not None and last_use_ns >= execution.plan.before_ns:
                continue
            heapq.heappush(execution.used, (last_use_ns, pruned.used_meanwhile, candidate))
            continue
        removed = {row for row in rows if _remove(directory, records[row], pruned)}
        rows_of_shard.gone |= removed
        if removed:
            record = records[candidate.row]
            pruned.removed.setdefault(catalogue.namespace, []).append(
                (bytes(record["name"]), int(record["group"]))
            )


def _all_ranks(records: Any, row: int) -> list[int]:
    record = records[row]
    if record["rank1"] == 0:
        return [row]
    same = (records["name"] == record["name"]) & (records["group"] == record["group"])
    return [int(other) for other in np.flatnonzero(same)]


def _look(directory: _Directory, records: Any, row: int, now_ns: int) -> int:
    """Return a file's mtime, as it is or as it is remembered."""
    # Gone, or whatever one file can have: removing it will say why not. The others are not to wait for it.
    with contextlib.suppress(Exception):
        return clamp_mtime(directory.stat(file_name(records[row])).st_mtime_ns, now_ns)
    return int(records["mtime_ns"][row])


def _remove(directory: _Directory, record: Any, pruned: Pruned) -> bool:
    name = file_name(record)
    path = f"{directory.path}/{name}"
    remembered = int(record["nbytes"])
    try:
        info = directory.remove(name)
        if info is None:
            pruned.failures[path] = OSError(errno.EPERM, "not a regular file any more", path)
            return False
    except OSError as error:
        if error.errno == errno.ENOENT:
            pruned.vanished_nbytes += remembered
            return True
        pruned.failures[path] = error
        return False
    except Exception as error:
        pruned.failures[path] = OSError(errno.EIO, repr(error), path)
        return False
    pruned.num_files += 1
    # What it was counted for may be more than its blocks: they are not all counted yet, or were compressed.
    pruned.nbytes += max(block_nbytes(info), min(length(info), remembered))
    return True
