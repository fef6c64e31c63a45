"""What takes how much room in a root: counts by namespace, group and rank, and what pruning would free.

Every file is looked at once: a snapshot's last uses may be older than the truth. Its length is not: all files
of a group and rank have the same one, so a header that agrees with its file says it for all. Where no good
one is found, only the size on disk is known.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from fskv.bounds.evict import Need, cutoff_ns
from fskv.bounds.lease import SHARED_DIR
from fskv.bounds.limits import Heartbeat, Scope, scopes
from fskv.bounds.shared_files import SharedFiles
from fskv.errors import FskvError
from fskv.index.scan import Part, Records, file_name
from fskv.index.snapshot import Catalogue
from fskv.index.tally import Count, tally
from fskv.root.beneath import opened
from fskv.root.filesystem import Space
from fskv.root.process_id import is_orphan

from .check.expect import NOTHING
from .check.judge import Reader, read_header
from .neighbours import living_heartbeats, usage_now
from .pruning import forecast
from .root_view import FileOf, Namespace

_MAX_LENGTHS = (
    256  # (group, rank) of a namespace whose length is looked up; hostile names could be millions
)
_MAX_TRIES = 3
_NO_KIND = "unknown"


@dataclass(slots=True)
class Sums(Count):
    """Counts of one row of a table."""

    length: int | None = 0  # None: not known of all files

    def take(self, other: Count, length: int | None) -> None:
        self.add(other.num_files, other.nbytes, other.unused)
        if self.length is not None:
            self.length = None if length is None else self.length + length * other.num_files


@dataclass(slots=True)
class Parts:
    """Files that were never published."""

    orphaned: int = 0  # their writer is gone, or they are older than an hour
    orphaned_nbytes: int = 0
    in_progress: int = 0
    in_progress_nbytes: int = 0


@dataclass(slots=True)
class NamespaceUsage:
    """What was found in one namespace."""

    namespace: Namespace
    counts: dict[tuple[int, int], Count] = field(default_factory=dict)  # by (group, rank + 1)
    lengths: dict[tuple[int, int], int] = field(default_factory=dict)
    tries: dict[tuple[int, int], int] = field(default_factory=dict)
    parts: Parts = field(default_factory=Parts)
    num_foreign: int = 0
    unlistable: int = 0

    def kind(self, group: int) -> str:
        identity = self.namespace.identity
        for one in identity.groups if identity else ():
            if one.group_idx == group:
                return one.kind
        return _NO_KIND


@dataclass(frozen=True, slots=True)
class Target:
    """What a prune would free."""

    option: str
    num_files: int
    nbytes: int


class RootUsage:
    """A root, counted."""

    def __init__(
        self, root: str, spaces: Sequence[Namespace], ages_s: Sequence[float], now_ns: int
    ) -> None:
        """`now_ns`: our own clock, since nothing is written here."""
        self._root = root
        self._spaces = spaces
        self._ages_s = ages_s
        self._now_ns = now_ns
        self._edges_ns = [now_ns - int(age_s * 1e9) for age_s in ages_s]
        self._catalogues: list[Catalogue] = []
        self._reader = Reader()
        self.namespaces: list[NamespaceUsage] = []

    def count(self, seen: Callable[[int, int], object]) -> None:
        """Look at every file; for `seen` see `tools.terminal.walk_progress`."""
        for number, one in enumerate(self._spaces):
            usage = NamespaceUsage(one)
            catalogue = Catalogue(one.path)
            for shard in one.listed(usage):
                catalogue.take(shard)
                self._add(usage, shard.records)
                self._add_parts(usage.parts, shard.parts)
                usage.num_foreign += shard.num_foreign
                seen(number, shard.idx)
            self.namespaces.append(usage)
            self._catalogues.append(catalogue)

    def _add(self, usage: NamespaceUsage, records: Records) -> None:
        for which, count in tally(records, self._edges_ns).items():
            usage.counts.setdefault(which, Count()).add(count.num_files, count.nbytes, count.unused)
            if which in usage.lengths or len(usage.tries) >= _MAX_LENGTHS:
                continue
            if (tries := usage.tries.get(which, 0)) < _MAX_TRIES:
                usage.tries[which] = tries + 1
                name = file_name(records[count.sample])
                length = _length(self._reader, FileOf(usage.namespace, name))
                if length is not None:
                    usage.lengths[which] = length

    def _add_parts(self, parts: Parts, found: Iterable[Part]) -> None:
        for part in found:
            if is_orphan(os.path.basename(part.path), part.mtime_ns, self._now_ns):
                parts.orphaned += 1
                parts.orphaned_nbytes += part.nbytes
            else:
                parts.in_progress += 1
                parts.in_progress_nbytes += part.nbytes

    def sums(
        self, key: Callable[[NamespaceUsage, int], tuple[str, ...]]
    ) -> dict[tuple[str, ...], Sums]:
        """Add up by what `key` says of a namespace and a group."""
        found: dict[tuple[str, ...], Sums] = {}
        for usage in self.namespaces:
            for (group, rank1), count in usage.counts.items():
                sums = found.setdefault(key(usage, group), Sums())
                sums.take(count, usage.lengths.get((group, rank1)))
        return dict(sorted(found.items()))

    def targets(self, bounds: Sequence[Scope]) -> list[Target]:
        """Return what a prune to each age and to each bound on the whole root would free."""
        found = []
        for age_s in self._ages_s:
            before_ns = cutoff_ns(self._now_ns, age_s)
            found.append(self._target(f"--unused-for {age_text(age_s)}", 0, before_ns))
        total = sum(catalogue.nbytes for catalogue in self._catalogues)
        found += [
            self._target(f"--max-size {size_text(scope.limit)}", max(0, total - scope.limit), None)
            for scope in bounds
            if scope.kind == "root"
        ]
        return found

    def _target(self, option: str, nbytes: int, before_ns: int | None) -> Target:
        gone = forecast(self._catalogues, Need(nbytes, before_ns=before_ns))
        return Target(option, sum(one.num_files for one in gone), sum(one.nbytes for one in gone))


@dataclass(frozen=True, slots=True)
class Bounds:
    """What living engines and watchers say of the root."""

    scopes: list[Scope]
    heartbeats: list[Heartbeat]
    counted_at_ns: int | None


def bounds_of(root: str, now_ns: int) -> Bounds:
    beats, space = living_heartbeats(root, now_ns), Space.of(root)
    usage = usage_now(SharedFiles(f"{root}/{SHARED_DIR}"), beats, space)
    return Bounds(scopes(usage, space), beats, usage.at_ms * 1_000_000 or None)


def age_text(age_s: float) -> str:
    """Write an age as the option takes it."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if age_s >= size and age_s % size == 0:
            return f"{int(age_s // size)}{unit}"
    return f"{age_s:g}s"


def size_text(nbytes: int) -> str:
    """Write a size as the option takes it, exactly."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size and nbytes % size == 0:
            return f"{nbytes // size}{unit}"
    return f"{nbytes}B"


def _length(reader: Reader, where: FileOf) -> int | None:
    """Return the length of a file whose header agrees with it."""
    try:
        with (
            opened(where.namespace.root, where.directory) as directory,
            reader.open(where.name, directory) as file,
        ):
            read_header(file, None, NOTHING, whole=False)
            return file.nbytes
    except (OSError, FskvError):
        return None
