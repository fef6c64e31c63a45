"""One survey of a root, for `top` and `report`: what is there, who works, how full it is, what is damaged.

`Observer.look` reads the small files by which engines know of each other, and no chunk. `walk` lists every
chunk file. It keeps nothing of a file but sums, and a sample of bounded size whose headers `judged` reads.
What is damaged, foreign or missing is left out, as engines do; nothing is followed, nothing is written.
Every call may hang for as long as the mount does.

"Last use" is a file's mtime, with the granularity of `touch_interval_s` (docs/format.md).
"""

from __future__ import annotations

import contextlib
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fskv.bounds.lease import LEASE_FILE, SHARED_DIR, TTL_S, LeaseState, read_lease
from fskv.bounds.limits import Heartbeat, Scope, scopes
from fskv.bounds.shared_files import SharedFiles
from fskv.index.scan import RECORD, Records, Shard, file_name
from fskv.index.tally import tally
from fskv.namespace import parse_chunk_file, path_of_file
from fskv.root.filesystem import Space
from fskv.root.process_id import GRACE_S, HOST, TOKEN, provably_dead

from .check.expect import expected_of
from .check.judge import Finding, Reader, judge
from .neighbours import living, usage_now, wall_clock_ns
from .root_view import Namespace, RootView, Unlistable, num_chunks
from .terminal import iec, many, rfc3339

ALIVE, SILENT, GONE, UNKNOWN = "alive", "silent", "gone", "not known yet"
SAMPLE = 2000  # headers that are read, chosen at random
_SAMPLE_S = 20.0  # and for how long at most
_WINDOW_S = 15.0  # of rates: engines say what they write every few seconds
_LEASE = "lease "  # before its holder's name, among heartbeats
_NAME = re.compile(r"(.+)-([1-9][0-9]{0,9})-([0-9a-f]{8})-[0-9]+", re.DOTALL)
MINUTE, HOUR, DAY = 60, 3600, 86400
AGES = (  # the first: an engine refreshes a file's mtime only when it is older than touch_interval_s
    *(("10 min", 10 * MINUTE), ("1 h", HOUR), ("6 h", 6 * HOUR), ("1 d", DAY), ("3 d", 3 * DAY)),
    *(("7 d", 7 * DAY), ("30 d", 30 * DAY), ("90 d", 90 * DAY), ("1 y", 365 * DAY)),
    ("more", float("inf")),
)
# Ages in seconds: those of AGES, and enough between them for a curve.
EDGES = np.unique([0.0, *(s for _, s in AGES[:-1]), *np.geomspace(MINUTE, 3650 * DAY, 240)])


# --- who works, and how full it is ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Engine:
    """One process with a heartbeat. Rate and status are as seen from here."""

    name: str
    host: str
    pid: int | None
    namespace: str | None  # None: a watcher, who only sets limits
    tenant: str | None
    written: int
    rate: float | None  # bytes written a second
    disk_full: int
    status: str
    silent_s: float  # since its heartbeat was last seen to change


@dataclass(frozen=True, slots=True)
class NamespaceSize:
    """What a namespace takes; None: nobody has counted it."""

    namespace: str
    tenant: str | None
    nbytes: int | None
    files: int | None
    growth: float | None  # bytes a second


@dataclass(frozen=True, slots=True)
class Survey:
    """A root at one moment."""

    at: str | None
    root: str
    problem: str | None  # why nobody can tell which engines there are
    nbytes: int | None  # None: nobody has counted yet
    files: int | None
    growth: float | None  # bytes a second, as the next
    pruned: float | None
    free_nbytes: int
    total_nbytes: int
    counted_by: str | None  # "engines", "walk", or None for not yet
    counted_at: str | None
    unlistable: int
    unremovable: int
    keeper: dict[str, Any] | None  # who holds the lease
    bounds: list[Scope]
    namespaces: list[NamespaceSize]
    engines: list[Engine]


class Observer:
    """Looks at a root from time to time. Two looks tell who lives, and how fast things grow.

    No two clocks are compared: who is silent is told by our own, as engines do it (fskv.bounds.lease).
    """

    def __init__(self, view: RootView) -> None:
        self.view = view
        self.needs_walk = False  # nobody counts the root, or who did is gone or silent
        self._beats: dict[str, tuple[int, float, bool]] = {}  # beat, since, whether seen to change
        self._past: deque[tuple[float, dict[str, int]]] = deque()

    def look(self, walk: Walk | None = None) -> Survey:
        """Look once; sizes are those of `walk`, or else the engines'. Raises CommandError, OSError."""
        path, at_s, problem = self.view.path, time.monotonic(), None
        files, space = SharedFiles(f"{path}/{SHARED_DIR}"), Space.of(path)
        beats: list[Heartbeat] = []
        try:
            beats = sorted(files.heartbeats(), key=lambda beat: (beat.namespace or "", beat.name))
        except FileNotFoundError:
            pass  # no engine has been here
        except OSError as error:
            reason = error.strerror or error
            problem = f"what engines tell each other cannot be read: {reason}"
        usage = usage_now(files, living(files, beats, wall_clock_ns()), space)
        keeper = self._hear(beats, f"{path}/{SHARED_DIR}/{LEASE_FILE}", at_s)
        self.needs_walk = not usage.at_ms or keeper is None or keeper["status"] in (GONE, SILENT)
        listed, closed = self.view.listed()
        if walk is not None:
            usage = replace(usage, namespaces=walk.sizes, others=(0, 0))
        counted_by = "walk" if walk is not None else "engines" if usage.at_ms else None
        rate = self._rates(
            at_s,
            {f"size by {counted_by}": usage.nbytes, f"pruned by {keeper}": usage.pruned_nbytes}
            | {f"size of {name}": nbytes for name, (nbytes, _) in usage.namespaces.items()}
            | {one.name: one.written for one in beats},
        )
        tenants = {one.namespace: one.tenant for one in beats} | dict(usage.tenants)
        spaces = [
            NamespaceSize(name, tenants.get(name), nbytes, num_files, rate(f"size of {name}"))
            for name in {*(one.id for one in listed), *usage.namespaces}
            for nbytes, num_files in [usage.namespaces.get(name) or (None, None)]
        ]
        engines = [
            Engine(
                one.name,
                *_process(one.name),
                one.namespace,
                one.tenant,
                one.written,
                rate(one.name),
                one.full,
                *self._status(one.name, one.name, at_s),
            )
            for one in beats
        ]
        return Survey(
            at=rfc3339(time.time_ns()),
            root=path,
            problem=problem,
            nbytes=usage.nbytes if counted_by else None,
            files=usage.num_files if counted_by else None,
            growth=rate(f"size by {counted_by}") if counted_by else None,
            pruned=rate(f"pruned by {keeper}"),
            free_nbytes=space.free_nbytes,
            total_nbytes=space.total_nbytes,
            counted_by=counted_by,
            counted_at=rfc3339(usage.at_ms * 1_000_000) if counted_by == "engines" else None,
            unlistable=walk.unlistable if walk is not None else len(closed),
            unremovable=usage.unremovable,
            keeper=keeper,
            bounds=scopes(usage, space),
            namespaces=sorted(spaces, key=lambda one: (-(one.nbytes or 0), one.namespace)),
            engines=engines,
        )

    def _rates(self, at_s: float, now: dict[str, int]) -> Callable[[str], float | None]:
        """Return what tells how fast a number grows, in a second; None where nobody knows yet."""
        self._past.append((at_s, now))
        while len(self._past) > 2 and at_s - self._past[0][0] > _WINDOW_S:
            self._past.popleft()
        then_s, then = self._past[0]

        def rate(key: str) -> float | None:
            is_known = key in now and key in then and at_s > then_s
            return (now[key] - then[key]) / (at_s - then_s) if is_known else None

        return rate

    def _hear(self, found: list[Heartbeat], lease_path: str, at_s: float) -> dict[str, Any] | None:
        """Remember heartbeats, and return who keeps the root in bounds, if anybody does."""
        lease: LeaseState | None = None
        with contextlib.suppress(OSError):
            lease, _ = read_lease(lease_path)
        beats = {one.name: one.beat for one in found}
        if lease is not None:
            beats[_LEASE + lease.holder] = lease.beat
        old = self._beats
        self._beats = {
            name: old[name] if name in old and old[name][0] == beat else (beat, at_s, name in old)
            for name, beat in beats.items()
        }
        if lease is None:
            return None
        status, _ = self._status(_LEASE + lease.holder, lease.holder, at_s)
        return {"host": lease.host, "pid": lease.pid, "status": status}

    def _status(self, key: str, name: str, at_s: float) -> tuple[str, float]:
        _, since_s, moved = self._beats[key]
        silent_s = round(at_s - since_s, 1)
        if provably_dead(name):
            return GONE, silent_s
        if silent_s > TTL_S:
            return SILENT, silent_s
        match = _NAME.fullmatch(name)
        here = match is not None and match[1] == HOST and match[3] == TOKEN
        return (ALIVE if moved or here else UNKNOWN), silent_s


def _process(name: str) -> tuple[str, int | None]:
    """Return the host and the process id of a heartbeat's name."""
    match = _NAME.fullmatch(name)
    return (match[1], int(match[2])) if match else (name, None)


# --- what is there ----------------------------------------------------------------------


@dataclass(slots=True)
class Size:
    """Files that belong together for some reason."""

    files: int = 0
    nbytes: int = 0

    def add(self, files: int, nbytes: int) -> None:
        self.files += files
        self.nbytes += nbytes


@dataclass(slots=True)
class Found(Size):
    """What a walk has found in one namespace."""

    namespace: Namespace = field(kw_only=True)
    chunks: int = 0
    oldest_ns: int | None = None  # last use
    last_used_ns: int | None = None
    kinds: dict[str, Size] = field(default_factory=dict)  # by the kind of the KV group
    unlistable: int = 0


@dataclass(slots=True)
class Walk:
    """What one walk over all chunk files has found."""

    at_s: float = field(default_factory=time.monotonic)
    at_ns: int = field(default_factory=time.time_ns)
    namespaces: list[Found] = field(default_factory=list)
    by_age: Any = field(default_factory=lambda: np.zeros((2, len(EDGES))))  # files, bytes
    undated: Size = field(default_factory=Size)  # the mtime is no time of the past
    orphans: Size = field(default_factory=Size)  # unfinished files of an hour and more
    foreign: list[str] = field(default_factory=list)  # the first of them
    num_foreign: int = 0  # entries among chunk files that are not fskv's
    unlistable: int = 0
    _random: Any = field(default_factory=lambda: np.random.default_rng(0))  # the same each time
    _drawn: list[tuple[float, Namespace, bytes]] = field(default_factory=list)
    _below: float = 2.0

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """Bytes and files by namespace; one that could not be listed at all is left out."""
        found = (one for one in self.namespaces if one.files or not one.unlistable)
        return {one.namespace.id: (one.nbytes, one.files) for one in found}

    def total(self) -> Size:
        return Size(
            sum(one.files for one in self.namespaces), sum(one.nbytes for one in self.namespaces)
        )

    def unused(self, low_s: float, high_s: float = float("inf")) -> Size:
        """Return what was last used so long ago; both are among EDGES, or infinite."""
        start, stop = np.searchsorted(EDGES, [low_s, high_s])
        files, nbytes = self.by_age[:, start:stop].sum(axis=1)
        return Size(int(files), int(nbytes))

    def by(self, name_of: Callable[[Found], Mapping[str, Size]]) -> dict[str, Size]:
        """Return files and bytes by names, the largest first."""
        found: dict[str, Size] = {}
        for one in self.namespaces:
            for name, size in name_of(one).items():
                found.setdefault(name, Size()).add(size.files, size.nbytes)
        return dict(sorted(found.items(), key=lambda item: (-item[1].nbytes, item[0])))

    def take(self, row: Found, shard: Shard) -> None:
        """Add a directory of chunks."""
        self.num_foreign += shard.num_foreign
        room = 20 - len(self.foreign)
        self.foreign += [f"{row.namespace.id}: {name}" for name in shard.foreign[: max(0, room)]]
        for part in shard.parts:
            if self.at_ns - part.mtime_ns > GRACE_S * 1e9:
                self.orphans.add(1, part.nbytes)
        records = shard.records
        if not len(records):
            return
        row.chunks += num_chunks(records)
        # Sums of one directory are exact in a double: less than 2^53 bytes.
        row.add(len(records), int(records["nbytes"].sum(dtype="f8")))
        identity = row.namespace.identity
        kinds = {one.group_idx: one.kind for one in identity.groups} if identity else {}
        for (group, _), count in tally(records, ()).items():
            kind = kinds.get(group, "not in its identity")
            row.kinds.setdefault(kind, Size()).add(count.num_files, count.nbytes)
        self._date(row, records)
        draws = self._random.random(len(records))
        for at in np.flatnonzero(draws < self._below):
            self._drawn.append((float(draws[at]), row.namespace, records[int(at)].tobytes()))
        if len(self._drawn) > 2 * SAMPLE:
            self._drawn = self._chosen()
            self._below = self._drawn[-1][0]

    def _chosen(self) -> list[tuple[float, Namespace, bytes]]:
        return sorted(self._drawn, key=lambda one: one[0])[:SAMPLE]

    def _date(self, row: Found, records: Records) -> None:
        dated = records["mtime_ns"] > 0
        self.undated.add(int((~dated).sum()), int(records["nbytes"][~dated].sum(dtype="f8")))
        if not dated.any():
            return
        times, nbytes = records["mtime_ns"][dated], records["nbytes"][dated]
        row.last_used_ns = max(row.last_used_ns or 0, int(times.max()))
        row.oldest_ns = min(row.oldest_ns or 1 << 62, int(times.min()))
        at = np.searchsorted(EDGES, np.maximum(self.at_ns - times, 0) / 1e9, side="right") - 1
        self.by_age[0] += np.bincount(at, minlength=len(EDGES))
        self.by_age[1] += np.bincount(at, nbytes.astype("f8"), len(EDGES))

    def judged(self) -> Judged:
        """Read the headers of the sample."""
        found, reader = Judged(), Reader()
        deadline = time.monotonic() + _SAMPLE_S
        drawn = [(one, np.frombuffer(raw, RECORD)[0]) for _, one, raw in self._chosen()]
        for one, record in sorted(drawn, key=lambda item: (item[0].id, bytes(item[1]["name"]))):
            if time.monotonic() > deadline:
                break
            name = file_name(record)
            expected = expected_of(one.identity, one.digest16)
            path = f"{one.path}/{path_of_file(name)}"
            chunk = parse_chunk_file(name)
            found.add(judge(reader, path, chunk=chunk, expected=expected, rows=False), record)
        return found


@dataclass(slots=True)
class Judged:
    """What the headers of a sample say; `reuse`: files by the time from their storing to their last use."""

    reuse: list[int] = field(default_factory=lambda: [0] * len(AGES))
    good: int = 0
    damaged: int = 0  # or of another chunk
    unreadable: int = 0

    def add(self, verdict: Any, record: Any) -> None:
        if verdict.finding in (Finding.CORRUPT, Finding.STALE):
            self.damaged += 1
        elif verdict.bad:
            self.unreadable += 1
        elif verdict.header is not None:  # else it was pruned meanwhile
            self.good += 1
            used_s = int(record["mtime_ns"]) / 1e9 - verdict.header.written_at_ms / 1e3
            if record["mtime_ns"] > 0 and used_s > -MINUTE:  # else clocks differ
                self.reuse[next(at for at, (_, most_s) in enumerate(AGES) if used_s < most_s)] += 1


def walk(view: RootView, told: Callable[[int, int], object] = lambda _done, _all: None) -> Walk:
    """Walk the root. `told` hears how many of all namespaces are done."""
    found = Walk()
    spaces, closed = view.listed()
    found.unlistable = len(closed)
    for number, one in enumerate(spaces):
        told(number, len(spaces))
        row = Found(namespace=one)
        found.namespaces.append(row)
        for shard in one.walk():
            if isinstance(shard, Unlistable):
                row.unlistable += 1
                found.unlistable += 1
            else:
                found.take(row, shard)
    told(len(spaces), len(spaces))
    return found


def amiss(
    seen: Survey, walk: Walk | None = None, judged: Judged | None = None
) -> list[tuple[str, str]]:
    """Return what is not as it should be: how bad it is ("bad" or "warn"), and a sentence."""
    unlisted = f"directories that could not be listed: {seen.unlistable:,}; sizes may be too small"
    kept = seen.keeper or seen.problem or not seen.engines
    found = [
        ("bad", seen.problem, seen.problem or ""),
        ("bad", seen.unremovable, f"{many(seen.unremovable, 'file')} cannot be removed"),
        ("bad", seen.unlistable, unlisted),
        ("warn", not kept, "no engine holds the lease: nothing is pruned"),
    ]
    for status in (GONE, SILENT):
        lost = [one.host for one in seen.engines if one.status == status]
        named = f"{many(len(lost), 'engine')} {status}: {', '.join(lost[:5])}"
        found.append(("warn", len(lost), named))
    if walk is not None:
        spaces = [one.namespace for one in walk.namespaces if one.namespace.problem]
        orphans, undated = walk.orphans, walk.undated.files
        found += [("bad", True, f"{one.id}: {one.problem}") for one in spaces[:20]]
        parts = f"{many(orphans.files, 'unfinished file')} of an hour and more"
        foreign = many(walk.num_foreign, "foreign entry", "foreign entries")
        found += [
            ("warn", orphans.files, f"{parts}, {iec(orphans.nbytes)}: fskv prune removes them"),
            ("warn", walk.num_foreign, f"{foreign} among chunk files: {', '.join(walk.foreign)}"),
            ("warn", undated, f"{many(undated, 'file')} without a usable time of last use"),
        ]
    if judged is not None:
        damaged = many(judged.damaged, "damaged header")
        read = f"of {judged.good + judged.damaged:,} that were read: fskv verify looks at all"
        found.append(("bad", judged.damaged, f"{damaged} {read}"))
        found.append(("bad", judged.unreadable, f"{many(judged.unreadable, 'file')} not readable"))
    return [(level, told) for level, is_so, told in found if is_so]
