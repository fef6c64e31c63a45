"""Removes what was used least recently: chooses by what is remembered, then looks at each file again.

The mtime of a chunk file is its last use. What is remembered of it may be older than the truth, never
younger. So the oldest remembered ones are taken first, and one that turns out to have been used since waits
for its new turn: the exact order of last use, for a look at those files only that are about to go.

The files of all ranks of a chunk go together, when the last used of them is due: without one of them the
others serve nobody. A file that cannot be removed is left out from then on; the next ones go instead.

How a file goes, and that nothing behind a link does, is fskv.root.remove's. Parts that nobody will finish go
by the same catalogues.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
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

logger = logging.getLogger(__name__)

_BATCH = 256  # files per call of a worker thread; between batches the lease is looked at
_MAX_BACK_S = 60.0  # csrc/chunk_io.c
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


def cutoff_ns(now_ns: int, unused_s: float) -> int:
    """Return the time before which a chunk must have been touched to be unused for so long, for certain.

    `now_ns` is the file system's own clock; 0, which is no time, makes nothing old enough. An mtime may be
    older than the last use by the longest interval of touches, and by a chunk's depth in its prefix.
    """
    return now_ns - int((unused_s + MAX_TOUCH_INTERVAL_S + _MAX_BACK_S) * 1e9)


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


class _Execution:
    """A plan that is being carried out."""

    def __init__(self, chosen: PrunePlan, root: str) -> None:
        self.plan = chosen
        self.root = root
        self.pruned = Pruned()
        self.gone: dict[tuple[Catalogue, int], set[int]] = {}  # rows by shard
        self.seen: dict[tuple[Catalogue, int], set[int]] = {}  # decided, or waiting for a new turn
        # By mtime; what was used meanwhile comes again, unless it is younger than all candidates.
        self.queue = [(one.mtime_ns, at, one) for at, one in enumerate(chosen.candidates)]
        self.num_left = len(self.queue)

    @property
    def is_over(self) -> bool:
        pruned, chosen = self.pruned, self.plan
        freed = pruned.nbytes + pruned.vanished_nbytes
        is_fulfilled = freed >= chosen.nbytes and pruned.num_files >= chosen.num_files
        return is_fulfilled or not self.num_left or pruned.away is not None


async def execute(chosen: PrunePlan, may_go_on: Callable[[], bool], root: str) -> Pruned:
    """Remove files in the plan's order until it is fulfilled, or `may_go_on()` says no.

    The catalogues are updated: what is gone is forgotten, what was used meanwhile has its new mtime. No link
    is followed below `root`. Where that is not there, or not mounted, it ends: see `Pruned.away`.
    """
    execution = _Execution(chosen, root)
    remove = aiofiles.os.wrap(_remove_batch)
    while not execution.is_over and may_go_on():
        await remove(execution)
    for (catalogue, shard), rows in execution.gone.items():
        mask = np.ones(len(catalogue.records(shard)), bool)
        mask[list(rows)] = False
        catalogue.keep(shard, mask)
    return execution.pruned


def _remove_batch(execution: _Execution) -> None:
    for _ in range(_BATCH):
        if execution.is_over:
            return
        mtime_ns, number, candidate = heapq.heappop(execution.queue)
        is_first = number < len(execution.plan.candidates)
        execution.num_left -= is_first
        where = candidate.catalogue, candidate.shard
        seen = execution.seen.setdefault(where, set())
        if is_first and candidate.row in seen:
            continue  # it is with another rank's file
        rows = _all_ranks(candidate.catalogue.records(candidate.shard), candidate.row)
        seen.update(rows)
        try:
            with Place(
                execution.root, shard_path(candidate.catalogue.namespace, candidate.shard)
            ) as place:
                gone = _remove_chunk(execution, place, candidate, rows, mtime_ns)
        except OSError as error:
            execution.pruned.away = error
            return
        execution.gone.setdefault(where, set()).update(gone)


def _remove_chunk(
    execution: _Execution, place: Place, candidate: Candidate, rows: list[int], mtime_ns: int
) -> set[int]:
    """Remove the files of all ranks unless one was used since `mtime_ns`; returns the rows that are gone."""
    pruned, chosen, catalogue = execution.pruned, execution.plan, candidate.catalogue
    records = catalogue.records(candidate.shard)
    last_use_ns = max(_look(place, records, row, catalogue.now_ns) for row in rows)
    records["mtime_ns"][rows] = last_use_ns
    if last_use_ns > mtime_ns:
        pruned.used_meanwhile += 1
        if chosen.before_ns is None or last_use_ns < chosen.before_ns:
            number = len(chosen.candidates) + pruned.used_meanwhile
            heapq.heappush(execution.queue, (last_use_ns, number, candidate))
        return set()
    gone = {row for row in rows if _remove(place, records[row], pruned)}
    if gone:
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
    """Return a file's mtime, as it is or as it is remembered."""
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
        # What it was counted for may be more than its blocks: not all are counted yet, or were compressed.
        pruned.nbytes += max(block_nbytes(found.info), min(length(found.info), remembered))
    else:
        error = OSError(errno.EPERM, "not a regular file any more", found.path)
        pruned.failures[found.path] = found.error or error
    return found.is_gone


def remove_orphans(catalogues: Iterable[Catalogue], now_ns: int, grace_s: float, root: str) -> int:
    """Remove parts that nobody will finish, of these namespaces and of the root itself; returns how many.

    `now_ns` is the file system's own clock. What lies beside chunks is looked for where a catalogue has seen
    it, and taken out of the catalogue. Raises OSError where the root is not there.
    """
    removed, told = 0, False
    for found in _orphans(catalogues, now_ns, grace_s, root):
        removed += found.fate is Fate.GOES
        if found.fate is Fate.FAILED and found.what and not told:  # one for a round
            told = True
            logger.warning("fskv: %s cannot be removed: %s", found.name, found.reason)
    return removed


def _orphans(
    catalogues: Iterable[Catalogue], now_ns: int, grace_s: float, root: str
) -> Iterator[Outcome]:
    judge = orphans(now_ns, grace_s)
    for catalogue in catalogues:
        for shard, parts in list(catalogue.parts.items()):
            with Place(root, shard_path(catalogue.namespace, shard)) as place:
                found = [place.remove(os.path.basename(part.path), judge) for part in parts]
            yield from found
            left = [part for part, one in zip(parts, found, strict=True) if not one.is_gone]
            catalogue.parts[shard] = left
            if not left:
                del catalogue.parts[shard]
        yield from sweep(root, f"{catalogue.namespace}/{TMP_DIR}", judge)
    yield from sweep(root, root, orphans(now_ns, grace_s, PART_PREFIX))
