"""Removes the least recently used chunks: chosen from memory, then checked on disk.

The mtime of a chunk file is its last use. The remembered mtime may be older than the real one, never younger.
So the oldest remembered files come first, some at a time. A file that was used since stays, and gets its new
place in the next step.

The files of all ranks of a chunk go together, when the last used of them is due: a chunk without one of them
is useless. A file that cannot be removed is left out from then on.

fskv.root.remove does the removing. Parts of dead writers go by the same catalogues.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import aiofiles.os
import numpy as np

from fskv.index.scan import file_name, shard_path
from fskv.index.snapshot import Catalogue, joined
from fskv.root.filesystem import block_nbytes, clamp_mtime, length
from fskv.root.remove import Fate, Outcome, Place, orphans, sweep
from fskv.root.root import PART_PREFIX, TMP_DIR
from fskv.types import MAX_TOUCH_INTERVAL_S

_STEP_FILES = 16384  # chosen at once: more would have waited long for their turn
_BATCH = 256  # files per call of a worker thread; between batches the lease is looked at
_SAME_USE_NS = 1_000_000_000  # ranks record one use by stamps of their own
_MAX_BACK_S = 60.0  # csrc/chunk_io.c
_SPARE = 1.25  # candidates, in bytes, for what is to go: some will have been used meanwhile


@dataclass(frozen=True, slots=True)
class Need:
    """The bytes on disk and inodes to free, by removing files last used before `before_ns`."""

    nbytes: int = 0
    num_files: int = 0
    before_ns: int | None = None

    def __bool__(self) -> bool:
        return self.nbytes > 0 or self.num_files > 0

    def less(self, pruned: Pruned) -> Need:
        """Return the need that remains after `pruned`."""
        left_nbytes = self.nbytes - pruned.nbytes - pruned.vanished_nbytes
        return Need(left_nbytes, self.num_files - pruned.num_files, self.before_ns)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A chunk file as the catalogue remembers it."""

    catalogue: Catalogue
    shard: int
    row: int  # in the shard's records
    mtime_ns: int


@dataclass(slots=True)
class Pruned:
    """The results of one step or of all steps; only a step names its chunks."""

    num_files: int = 0
    nbytes: int = 0
    vanished_nbytes: int = 0  # somebody else had removed them
    used_meanwhile: int = 0
    failures: dict[str, OSError] = field(default_factory=dict)  # by path
    removed: dict[str, list[tuple[bytes, int]]] = field(default_factory=dict)  # namespace -> chunks
    forgotten: Counter[str] = field(default_factory=Counter)  # namespace -> bytes as remembered
    last_use_ns: int = 0  # of the chunk that went last for its age
    # The root is not there, or not mounted: the rest stays.
    away: OSError | None = None

    def add(self, step: Pruned) -> None:
        """Add the sums of a step, without its chunks."""
        self.num_files += step.num_files
        self.nbytes += step.nbytes
        self.vanished_nbytes += step.vanished_nbytes
        self.used_meanwhile += step.used_meanwhile
        self.failures |= step.failures
        self.last_use_ns = step.last_use_ns or self.last_use_ns
        self.away = step.away


def plan(
    catalogues: Sequence[Catalogue], need: Need, stuck: AbstractSet[str] = frozenset()
) -> list[Candidate]:
    """Choose files of `catalogues` for a step towards `need`, least recently used first. Pure.

    They are a little more than is needed. May run in a worker thread while nobody changes the catalogues.
    Files whose path is in `stuck` are passed over.
    """
    tables = [(catalogue, *table) for catalogue in catalogues for table in catalogue.shards()]
    everything = joined(records for _, _, records in tables)
    mtimes, sizes = everything["mtime_ns"].copy(), everything["nbytes"].copy()
    del everything
    ends = np.cumsum([len(records) for _, _, records in tables])
    candidates: list[Candidate] = []
    left_nbytes, left_files = int(need.nbytes * _SPARE), int(need.num_files * _SPARE)
    for at in _oldest_first(mtimes):
        if (left_nbytes <= 0 and left_files <= 0) or len(candidates) == _STEP_FILES:
            break
        if need.before_ns is not None and mtimes[at] >= need.before_ns:
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
    return candidates


async def evict(
    catalogues: Sequence[Catalogue],
    need: Need,
    root: str,
    *,
    may_go_on: Callable[[], bool] = lambda: True,
    stuck: AbstractSet[str] = frozenset(),
    told: Callable[[Pruned], object] = lambda _: None,
    first: Sequence[Catalogue] = (),
) -> Pruned:
    """Remove the least recently used chunks, until `need` is met, none is left or `may_go_on()` is false.

    Chunks of `first`, which nobody can use again, go before all others, however young they are.

    After each step `told` hears what has gone. The catalogues are updated: what is gone is forgotten, what
    was used meanwhile has its new mtime. No link is followed below `root`. Raises what `told` raises.
    """
    pruned, stuck = Pruned(), {*stuck}
    remove = aiofiles.os.wrap(_remove_batch)
    while (left := need.less(pruned)) and pruned.away is None and may_go_on():
        dead = await asyncio.to_thread(plan, first, left, stuck)
        candidates = dead or await asyncio.to_thread(plan, catalogues, left, stuck)
        if not candidates:
            break
        step = _Step(root, left, Pruned())
        for at in range(0, len(candidates), _BATCH):
            if step.is_over or not may_go_on():
                break
            await remove(step, candidates[at : at + _BATCH])
        step.forget()
        if dead:
            step.pruned.last_use_ns = 0
        stuck |= step.pruned.failures.keys()
        pruned.add(step.pruned)
        told(step.pruned)
        if not step.decided:
            break
    return pruned


@dataclass(slots=True)
class _Step:
    """The files chosen in one step, and the outcome for each file."""

    root: str
    need: Need
    pruned: Pruned
    gone: dict[tuple[Catalogue, int], set[int]] = field(default_factory=dict)  # rows by shard
    decided: dict[tuple[Catalogue, int], set[int]] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return self.pruned.away is not None or not self.need.less(self.pruned)

    def forget(self) -> None:
        """Take removed files out of the catalogues."""
        for (catalogue, shard), rows in self.gone.items():
            sizes = catalogue.records(shard)["nbytes"]
            mask = np.ones(len(sizes), bool)
            mask[list(rows)] = False
            self.pruned.forgotten[catalogue.namespace] += int(sizes[~mask].sum(dtype=np.float64))
            catalogue.keep(shard, mask)


def cutoff_ns(now_ns: int, unused_s: float) -> int:
    """Return the time before which a chunk must have been touched to be unused for so long, for certain.

    `now_ns` is the file system's own clock; 0, which is no time, makes nothing old enough. An mtime may be
    older than the last use by the longest interval of touches, and by a chunk's depth in its prefix.
    """
    return now_ns - int((unused_s + MAX_TOUCH_INTERVAL_S + _MAX_BACK_S) * 1e9)


def _oldest_first(mtimes: Any) -> Iterator[int]:
    """Yield indices by ascending mtime, sorted in growing batches as the caller takes them."""
    count, done = 2 * _STEP_FILES, 0
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


def _remove_batch(step: _Step, candidates: Sequence[Candidate]) -> None:
    for candidate in candidates:
        if step.is_over:
            return
        where = candidate.catalogue, candidate.shard
        decided = step.decided.setdefault(where, set())
        if candidate.row in decided:
            continue  # it is with another rank's file
        rows = _all_ranks(candidate.catalogue.records(candidate.shard), candidate.row)
        decided.update(rows)
        try:
            with Place(
                step.root, shard_path(candidate.catalogue.namespace, candidate.shard)
            ) as place:
                gone = _remove_chunk(step.pruned, place, candidate, rows, step.need.before_ns)
        except OSError as error:
            step.pruned.away = error
            return
        step.gone.setdefault(where, set()).update(gone)


def _remove_chunk(
    pruned: Pruned, place: Place, candidate: Candidate, rows: list[int], before_ns: int | None
) -> set[int]:
    """Remove the files of all ranks unless one was used meanwhile; returns the rows that are gone."""
    catalogue = candidate.catalogue
    records = catalogue.records(candidate.shard)
    last_use_ns = max(_look(place, records, row, catalogue.now_ns) for row in rows)
    records["mtime_ns"][rows] = last_use_ns
    is_used = last_use_ns > candidate.mtime_ns + _SAME_USE_NS
    if is_used or (before_ns is not None and last_use_ns >= before_ns):
        pruned.used_meanwhile += 1
        return set()
    gone = {row for row in rows if _remove(place, records[row], pruned)}
    if gone:
        pruned.last_use_ns = last_use_ns
        record = records[candidate.row]
        told = pruned.removed.setdefault(catalogue.namespace, [])
        told.append((bytes(record["name"]), int(record["group"])))
    return gone


def _all_ranks(records: Any, row: int) -> list[int]:
    record = records[row]
    if record["rank1"] == 0:
        return [row]
    same = (records["name"] == record["name"]) & (records["group"] == record["group"])
    return [int(other) for other in np.flatnonzero(same)]


def _look(place: Place, records: Any, row: int, now_ns: int) -> int:
    """Return a file's mtime from the disk, or the remembered mtime if the disk gives none."""
    # Gone, or whatever one file can have: removing it will say why not. The others are not to wait for it.
    with contextlib.suppress(Exception):
        return clamp_mtime(place.stat(file_name(records[row])).st_mtime_ns, now_ns)
    return int(records["mtime_ns"][row])


def _remove(place: Place, record: Any, pruned: Pruned) -> bool:
    found, remembered = place.remove(file_name(record)), int(record["nbytes"])
    if found.fate is Fate.VANISHED:
        pruned.vanished_nbytes += remembered
    elif found.fate is Fate.GOES and found.info is not None:
        pruned.num_files += 1
        # Its count may be more than its blocks: some are not counted yet, or compressed.
        pruned.nbytes += max(block_nbytes(found.info), min(length(found.info), remembered))
    else:
        error = OSError(errno.EPERM, "not a regular file any more", found.path)
        pruned.failures[found.path] = found.error or error
    return found.is_gone


def orphaned(
    catalogues: Iterable[Catalogue],
    now_ns: int,
    root: str,
    *,
    delete: bool = True,
) -> Iterator[Outcome]:
    """Remove orphaned parts of these namespaces and of the root itself; yields the outcome of each part.

    `now_ns` is the file system's own clock. Only parts that a catalogue has seen are looked for beside
    chunks; they are taken out of the catalogue. Without `delete` no part goes. Raises OSError if the root is
    away.
    """
    judge = orphans(now_ns)
    for catalogue in catalogues:
        for shard, parts in list(catalogue.parts.items()):
            where = shard_path(catalogue.namespace, shard)
            with Place(root, where, delete=delete) as place:
                found = [place.remove(os.path.basename(part.path), judge) for part in parts]
            yield from found
            left = [
                part for part, one in zip(parts, found, strict=True) if not (one.is_gone and delete)
            ]
            catalogue.parts[shard] = left
            if not left:
                del catalogue.parts[shard]
        yield from sweep(root, f"{catalogue.namespace}/{TMP_DIR}", judge, delete=delete)
    yield from sweep(root, root, orphans(now_ns, prefix=PART_PREFIX), delete=delete)
