"""What a report says about a root, gathered in one walk over every chunk file.

Nothing is kept of a file: sums and histograms grow with namespaces and time steps, not with files. The one
exception is the sample of files whose headers are read, of bounded size. A directory that cannot be read is
counted and passed over; nothing is followed, nothing is written.

"Last use" is a file's mtime, with the granularity of `touch_interval_s` (docs/format.md).
"""

from __future__ import annotations

import contextlib
import heapq
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fskv.bounds.lease import TTL_S
from fskv.index.scan import RECORD, Records, Shard, file_name, shard_idx, shard_path
from fskv.index.tally import tally
from fskv.namespace import parse_chunk_file, path_of_file
from fskv.root.filesystem import bytes_on_disk
from fskv.root.process_id import GRACE_S, is_our_part, provably_dead
from fskv.root.root import CHUNK_DIR, PART_PREFIX, TMP_DIR

from ..check.expect import expected_of
from ..check.judge import Finding, Reader, judge
from ..removal import KNOWN, KNOWN_IN_ROOT
from ..root_view import Namespace, RootView, Unlistable, num_chunks
from ..top.look import Look, is_here, look_at

SAMPLE = 2000  # headers that are read, chosen at random
SAMPLE_S = 20.0  # and for how long at most
_MAX_NAMES = 20  # of foreign entries, as examples
_OLD_PART_NS = int(GRACE_S * 1e9)
_FUTURE_NS = 60 * 1_000_000_000

MINUTE, HOUR, DAY = 60, 3600, 86400
# Ages in seconds: by the minute for a day, by the hour for 60 days, by the day for ten years, and older.
EDGES = np.concatenate(
    [
        np.arange(0, DAY, MINUTE),
        np.arange(DAY, 60 * DAY, HOUR),
        np.arange(60 * DAY, 3660 * DAY, DAY),
    ]
)
AGE_BINS = (
    ("< 1 h", HOUR),
    ("< 6 h", 6 * HOUR),
    ("< 1 d", DAY),
    ("< 3 d", 3 * DAY),
    ("< 7 d", 7 * DAY),
    ("< 30 d", 30 * DAY),
    ("< 90 d", 90 * DAY),
    ("< 1 y", 365 * DAY),
    ("older", float("inf")),
)
# The first: an engine refreshes a file's mtime only when it is older than touch_interval_s, 10 minutes.
REUSE_BINS = (
    ("< 10 m", 10 * MINUTE),
    ("< 1 h", HOUR),
    ("< 6 h", 6 * HOUR),
    ("< 1 d", DAY),
    ("< 3 d", 3 * DAY),
    ("< 7 d", 7 * DAY),
    ("< 30 d", 30 * DAY),
    ("longer", float("inf")),
)
OUTSIDE = "not in its identity"  # the kind of a group that the manifest does not have


@dataclass(slots=True)
class Part:
    """Files that belong together for some reason."""

    files: int = 0
    nbytes: int = 0

    def add(self, files: int, nbytes: int) -> None:
        self.files += files
        self.nbytes += nbytes


@dataclass(slots=True)
class NamespaceSurvey:
    namespace: Namespace
    chunks: int = 0
    files: int = 0
    nbytes: int = 0  # of chunk files
    last_used_ns: int | None = None
    oldest_ns: int | None = None
    kinds: dict[str, Part] = field(default_factory=dict)
    unlistable: int = 0


@dataclass(slots=True)
class Ages:
    """Bytes and files by the time since their last use, in the steps of EDGES."""

    nbytes: Any = field(default_factory=lambda: np.zeros(len(EDGES), np.int64))
    files: Any = field(default_factory=lambda: np.zeros(len(EDGES), np.int64))
    undated: Part = field(default_factory=Part)  # the mtime is no time of the past
    ahead: int = 0  # files that were used more than a minute after now

    def add(self, records: Records, now_ns: int) -> None:
        dated = records["mtime_ns"] > 0
        lost = records[~dated]
        self.undated.add(len(lost), int(lost["nbytes"].sum()))
        records = records[dated]
        ages_ns = now_ns - records["mtime_ns"]
        self.ahead += int((ages_ns < -_FUTURE_NS).sum())
        at = np.searchsorted(EDGES, np.maximum(ages_ns, 0) / 1e9, side="right") - 1
        # Sums of one directory are exact in a double: less than 2^53 bytes.
        nbytes = np.bincount(at, records["nbytes"].astype(np.float64), len(EDGES))
        self.nbytes += nbytes.astype(np.int64)
        self.files += np.bincount(at, minlength=len(EDGES))

    def between(self, low_s: float, high_s: float) -> Part:
        """Return what was last used so long ago; both are among EDGES, or infinite."""
        start, stop = np.searchsorted(EDGES, [low_s, high_s])
        files, nbytes = self.files[start:stop], self.nbytes[start:stop]
        return Part(int(files.sum()), int(nbytes.sum()))

    @property
    def oldest_s(self) -> float:
        """Return an age that no dated file exceeds (up to ten years); 0 where there is none."""
        found = np.flatnonzero(self.files)
        if not len(found):
            return 0.0
        last = int(found[-1]) + 1
        return float(EDGES[min(last, len(EDGES) - 1)])

    def curve(self, ages_s: Sequence[float]) -> list[tuple[float, int]]:
        """Return (age, bytes that were last used that long ago or longer) for each of `ages_s`.

        Exact at EDGES; between two of them as if the files of the step were used evenly over it.
        """
        beyond = np.cumsum(self.nbytes[::-1])[::-1]
        found = np.interp(np.asarray(ages_s, np.float64), EDGES, beyond)
        return [(float(age), round(nbytes)) for age, nbytes in zip(ages_s, found, strict=True)]


@dataclass(slots=True)
class Reuse:
    """What the headers of a sample of files say: the time from being stored to the last use."""

    bins: list[int] = field(default_factory=lambda: [0] * len(REUSE_BINS))
    read: int = 0
    backwards: int = 0  # used before they were stored: clocks differ
    damaged: int = 0
    misplaced: int = 0  # headers of something else
    unreadable: int = 0
    unfinished: bool = False  # the time was up

    def add(self, gap_s: float) -> None:
        self.read += 1
        if gap_s < -MINUTE:
            self.backwards += 1
            return
        at = next(i for i, (_, high_s) in enumerate(REUSE_BINS) if gap_s < high_s)
        self.bins[at] += 1


@dataclass(slots=True)
class Health:
    parts: Part = field(default_factory=Part)
    old_parts: Part = field(default_factory=Part)  # an hour and older
    foreign: int = 0
    foreign_names: list[str] = field(default_factory=list)
    unlistable: int = 0

    def found_foreign(self, path: str) -> None:
        self.foreign += 1
        if len(self.foreign_names) < _MAX_NAMES:
            self.foreign_names.append(path)


@dataclass(slots=True)
class Survey:
    path: str
    at_ns: int
    before: Look  # what engines said at the beginning and at the end
    after: Look
    namespaces: list[NamespaceSurvey]
    ages: Ages
    reuse: Reuse
    health: Health

    @property
    def files(self) -> int:
        return sum(one.files for one in self.namespaces)

    @property
    def chunks(self) -> int:
        return sum(one.chunks for one in self.namespaces)

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.namespaces)

    @property
    def problems(self) -> list[NamespaceSurvey]:
        return [one for one in self.namespaces if one.namespace.problem is not None]

    def by(self, name_of: Callable[[NamespaceSurvey], str]) -> dict[str, Part]:
        """Return files and bytes by what `name_of` says of a namespace."""
        found: dict[str, Part] = {}
        for one in self.namespaces:
            found.setdefault(name_of(one), Part()).add(one.files, one.nbytes)
        return found

    def by_kind(self) -> dict[str, Part]:
        found: dict[str, Part] = {}
        for one in self.namespaces:
            for kind, part in one.kinds.items():
                found.setdefault(kind, Part()).add(part.files, part.nbytes)
        return found


def survey(
    view: RootView, *, told: Callable[[int, int], None] = lambda _done, _all: None
) -> Survey:
    """Walk the root. `told` hears how many of all namespaces are done."""
    before = look_at(view)
    at_ns = time.time_ns()
    spaces = view.namespaces()
    ages, health, sample = Ages(), Health(), _Sample(SAMPLE)
    found = []
    for number, one in enumerate(spaces):
        told(number, len(spaces))
        found.append(_walk(one, at_ns, ages, health, sample))
    _look_around(view, {one.arch for one in spaces}, health, at_ns)
    told(len(spaces), len(spaces))
    reuse = _read_headers(sample, SAMPLE_S)
    return Survey(view.path, at_ns, before, _look_again(view, before), found, ages, reuse, health)


def _look_again(view: RootView, before: Look) -> Look:
    """Look until every engine of other machines has shown a heartbeat, for two of theirs at most."""
    deadline = before.at_s + TTL_S / 2
    beats = {beat.name: beat.beat for beat in before.heartbeats}
    while True:
        after = look_at(view)
        quiet = [
            beat
            for beat in after.heartbeats
            if beats.get(beat.name) == beat.beat
            and not is_here(beat.name)
            and not provably_dead(beat.name)
        ]
        if not quiet or time.monotonic() > deadline:
            return after
        time.sleep(0.5)


def _walk(
    one: Namespace, now_ns: int, ages: Ages, health: Health, sample: _Sample
) -> NamespaceSurvey:
    row = NamespaceSurvey(one)
    kinds = {group.group_idx: group.kind for group in one.identity.groups} if one.identity else {}
    for shard in one.walk():
        if isinstance(shard, Unlistable):
            row.unlistable += 1
            continue
        _take(row, shard, kinds)
        ages.add(shard.records, now_ns)
        sample.offer(one, shard.records)
        for part in shard.parts:
            _take_part(health, part.mtime_ns, part.nbytes, now_ns)
        for name in shard.foreign:
            health.found_foreign(f"{shard_path(one.id, shard.idx)}/{name}")
        health.foreign += shard.num_foreign - len(shard.foreign)
    health.unlistable += row.unlistable
    return row


def _take(row: NamespaceSurvey, shard: Shard, kinds: dict[int, str]) -> None:
    records = shard.records
    if not len(records):
        return
    row.chunks += num_chunks(records)
    row.files += len(records)
    row.nbytes += int(records["nbytes"].sum())
    dated = records["mtime_ns"][records["mtime_ns"] > 0]
    if len(dated):
        row.last_used_ns = max(row.last_used_ns or 0, int(dated.max()))
        oldest = int(dated.min())
        row.oldest_ns = oldest if row.oldest_ns is None else min(row.oldest_ns, oldest)
    for (group, _), count in tally(records, ()).items():
        row.kinds.setdefault(kinds.get(group, OUTSIDE), Part()).add(count.num_files, count.nbytes)


def _take_part(health: Health, mtime_ns: int, nbytes: int, now_ns: int) -> None:
    health.parts.add(1, nbytes)
    if now_ns - mtime_ns > _OLD_PART_NS:
        health.old_parts.add(1, nbytes)


# --- what is there besides chunks -------------------------------------------------------


def _look_around(view: RootView, arches: set[str], health: Health, now_ns: int) -> None:
    """Count parts and foreign entries beside the chunks."""
    root = view.path
    for entry in _entries(root):
        if entry.name.startswith(PART_PREFIX) and is_our_part(entry.name[len(PART_PREFIX) :]):
            _take_part(health, *_lstat(entry), now_ns)
        elif entry.name not in KNOWN_IN_ROOT and entry.name not in arches:
            health.found_foreign(entry.name)
    spaces = view.namespaces()
    names = {one.path for one in spaces}
    for arch in sorted(arches):
        for entry in _entries(f"{root}/{arch}"):
            if entry.path not in names:
                health.found_foreign(f"{arch}/{entry.name}")
    for one in spaces:
        for entry in _entries(one.path):
            if entry.name not in KNOWN:
                health.found_foreign(f"{one.id}/{entry.name}")
        for entry in _entries(f"{one.path}/{CHUNK_DIR}"):
            if shard_idx(entry.name) is None:
                health.found_foreign(f"{one.id}/{CHUNK_DIR}/{entry.name}")
        for entry in _entries(f"{one.path}/{TMP_DIR}"):
            if is_our_part(entry.name):
                _take_part(health, *_lstat(entry), now_ns)
            else:
                health.found_foreign(f"{one.id}/{TMP_DIR}/{entry.name}")


def _entries(path: str) -> list[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(_unlinked(path)) as entries:
        return list(entries)
    return []


def _unlinked(path: str) -> str:
    """Raise NotADirectoryError for a symbolic link: what is behind it is not the root's."""
    if os.path.islink(path):
        raise NotADirectoryError(path)
    return path


def _lstat(entry: os.DirEntry[str]) -> tuple[int, int]:
    """Return mtime and bytes on disk; zeros of what has just gone."""
    with contextlib.suppress(OSError):
        info = entry.stat(follow_symlinks=False)
        return info.st_mtime_ns, bytes_on_disk(info)
    return time.time_ns(), 0


# --- headers ----------------------------------------------------------------------------


class _Sample:
    """At most `size` of all files that are offered, each with the same probability."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._random = np.random.default_rng(0)  # the same page of the same root
        self._heap: list[tuple[float, int, Namespace, bytes]] = []
        self._offered = 0

    def offer(self, where: Namespace, records: Records) -> None:
        draws = self._random.random(len(records))
        full = len(self._heap) == self._size
        for at in np.flatnonzero(draws < -self._heap[0][0]) if full else range(len(records)):
            self._offered += 1
            item = (-float(draws[at]), self._offered, where, records[int(at)].tobytes())
            if len(self._heap) < self._size:
                heapq.heappush(self._heap, item)
            else:
                heapq.heappushpop(self._heap, item)

    def files(self) -> list[tuple[Namespace, Any]]:
        found = [(where, np.frombuffer(raw, RECORD)[0]) for _, _, where, raw in self._heap]
        return sorted(found, key=lambda item: (item[0].id, bytes(item[1]["name"])))


def _read_headers(sample: _Sample, limit_s: float) -> Reuse:
    reuse, reader = Reuse(), Reader()
    deadline = time.monotonic() + limit_s
    for where, record in sample.files():
        if time.monotonic() > deadline:
            reuse.unfinished = True
            break
        name = file_name(record)
        path = f"{where.path}/{path_of_file(name)}"
        chunk = parse_chunk_file(name)
        expected = expected_of(where.identity, where.digest16)
        found = judge(reader, path, chunk=chunk, expected=expected, rows=False)
        if found.header is None or found.bad:
            _count_bad(reuse, found.finding)
            continue
        header = found.header
        if int(record["mtime_ns"]) > 0:
            reuse.add(int(record["mtime_ns"]) / 1e9 - header.written_at_ms / 1e3)
    return reuse


def _count_bad(reuse: Reuse, finding: Finding) -> None:
    if finding is Finding.CORRUPT:
        reuse.damaged += 1
    elif finding is Finding.STALE:
        reuse.misplaced += 1
    elif finding is not Finding.VANISHED:  # pruned meanwhile
        reuse.unreadable += 1
