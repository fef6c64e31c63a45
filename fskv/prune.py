"""Removes what was used least recently: chooses by what is remembered, then looks at each file again.

The mtime of a chunk file is its last use. What is remembered of it may be older than the truth, never
younger. So the oldest remembered ones are taken first, and one that turns out to have been used since goes
back with its new mtime: the exact order of last use, for a look at those files only that are about to go.

The files of all ranks of a chunk go together: without one of them the others serve nobody. A file that
cannot be removed is left out from then on; the next ones go instead.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiofiles.os
import numpy as np

from fskv.index.scan import bytes_on_disk, file_name, shard_path
from fskv.index.snapshot import Catalogue

_BATCH = 256  # files per call of a worker thread; between batches the lease is looked at
_SPARE = 1.25  # candidates, in bytes, for what is to go: some will have been used meanwhile


@dataclass(frozen=True, slots=True)
class Candidate:
    """A chunk file as it is remembered."""

    catalogue: Catalogue
    shard: int
    row: int  # in the shard's records


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """What would go, least recently used first; `candidates` hold a little more than `nbytes`."""

    nbytes: int
    num_files: int
    candidates: Sequence[Candidate]


@dataclass(slots=True)
class Pruned:
    """What became of a plan."""

    num_files: int = 0
    nbytes: int = 0
    vanished_nbytes: int = 0  # somebody else had removed them
    used_meanwhile: int = 0
    failures: dict[str, OSError] = field(default_factory=dict)  # by path
    removed: dict[str, list[tuple[bytes, int]]] = field(default_factory=dict)  # namespace -> chunks


def plan(
    catalogues: Sequence[Catalogue],
    nbytes: int,
    num_files: int = 0,
    stuck: frozenset[str] | set[str] = frozenset(),
) -> PrunePlan:
    """Choose files of `catalogues` to free `nbytes` on disk and `num_files` inodes. Pure.

    Files whose path is in `stuck` are passed over.
    """
    tables = [catalogue.all_records() for catalogue in catalogues]
    starts = [catalogue.shard_starts() for catalogue in catalogues]
    mtimes = np.concatenate([t["mtime_ns"] for t in tables]) if tables else np.empty(0, np.int64)
    sizes = np.concatenate([t["nbytes"] for t in tables]) if tables else np.empty(0, np.uint64)
    ends = np.cumsum([len(t) for t in tables])
    candidates: list[Candidate] = []
    left_nbytes, left_files = int(nbytes * _SPARE), int(num_files * _SPARE)
    for at in _oldest_first(mtimes, nbytes, num_files, int(sizes.mean()) if len(sizes) else 0):
        if left_nbytes <= 0 and left_files <= 0:
            break
        which = int(np.searchsorted(ends, at, side="right"))
        row = int(at) - (int(ends[which - 1]) if which else 0)
        shard = int(np.searchsorted(starts[which], row, side="right")) - 1
        candidate = Candidate(catalogues[which], shard, row - int(starts[which][shard]))
        if stuck and _path(candidate) in stuck:
            continue
        candidates.append(candidate)
        left_nbytes -= int(sizes[at])
        left_files -= 1
    return PrunePlan(nbytes, num_files, candidates)


def _oldest_first(mtimes: Any, nbytes: int, num_files: int, mean_nbytes: int) -> Iterator[int]:
    """Yield indices by mtime, sorting no more than are likely to be wanted."""
    count = 64 + num_files + int(2 * nbytes / mean_nbytes) if mean_nbytes else len(mtimes)
    done = 0
    while done < len(mtimes):
        count = min(count, len(mtimes))
        order = (
            np.argpartition(mtimes, count - 1)[:count] if count < len(mtimes) else np.arange(count)
        )
        yield from order[np.argsort(mtimes[order], kind="stable")][done:]
        done, count = count, count * 4


def _path(candidate: Candidate) -> str:
    record = candidate.catalogue.records(candidate.shard)[candidate.row]
    return f"{shard_path(candidate.catalogue.namespace, candidate.shard)}/{file_name(record)}"


@dataclass(slots=True)
class _Rows:
    """What an execution has found out about records of one shard."""

    catalogue: Catalogue
    gone: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)  # used meanwhile, or not removable


async def execute(chosen: PrunePlan, may_go_on: Callable[[], bool]) -> Pruned:
    """Remove files in the plan's order until it is fulfilled, or `may_go_on()` says no.

    The catalogues are updated: what is gone is forgotten, what was used meanwhile has its new mtime.
    """
    pruned = Pruned()
    touched: dict[tuple[int, int], _Rows] = {}
    remove = aiofiles.os.wrap(_remove_batch)
    for at in range(0, len(chosen.candidates), _BATCH):
        if _fulfilled(chosen, pruned) or not may_go_on():
            break
        await remove(chosen, chosen.candidates[at : at + _BATCH], pruned, touched)
    for (_, shard), rows in touched.items():
        mask = np.ones(len(rows.catalogue.records(shard)), bool)
        mask[list(rows.gone)] = False
        rows.catalogue.keep(shard, mask)
    return pruned


def _fulfilled(chosen: PrunePlan, pruned: Pruned) -> bool:
    freed = pruned.nbytes + pruned.vanished_nbytes
    return freed >= chosen.nbytes and pruned.num_files >= chosen.num_files


def _remove_batch(
    chosen: PrunePlan,
    batch: Sequence[Candidate],
    pruned: Pruned,
    touched: dict[tuple[int, int], _Rows],
) -> None:
    for candidate in batch:
        if _fulfilled(chosen, pruned):
            return
        catalogue, shard = candidate.catalogue, candidate.shard
        seen = touched.setdefault((id(catalogue), shard), _Rows(catalogue))
        if candidate.row in seen.gone or candidate.row in seen.kept:
            continue  # decided with another rank's file
        records = catalogue.records(shard)
        rows = _all_ranks(records, candidate.row)
        directory = shard_path(catalogue.namespace, shard)
        used = [_used_meanwhile(directory, records, row) for row in rows]
        if any(used):
            pruned.used_meanwhile += 1
            seen.kept.update(rows)
            continue
        removed = {row for row in rows if _remove(directory, records[row], pruned)}
        seen.gone |= removed
        seen.kept |= set(rows) - removed
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


def _used_meanwhile(directory: str, records: Any, row: int) -> bool:
    try:
        mtime_ns = os.lstat(f"{directory}/{file_name(records[row])}").st_mtime_ns
    except OSError:
        return False  # gone, or removing it will say why not
    newer = bool(mtime_ns > records[row]["mtime_ns"])
    records["mtime_ns"][row] = mtime_ns
    return newer


def _remove(directory: str, record: Any, pruned: Pruned) -> bool:
    path = f"{directory}/{file_name(record)}"
    try:
        info = os.lstat(path)
        os.unlink(path)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            pruned.vanished_nbytes += int(record["nbytes"])
            return True
        pruned.failures[path] = error
        return False
    pruned.num_files += 1
    pruned.nbytes += bytes_on_disk(info)
    return True
