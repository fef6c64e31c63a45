"""Counts the disk usage of a root, by namespace and group, and forecasts prunes.

Every file is looked at once: a snapshot's last uses may be older than the truth.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from fskv.bounds.evict import Need, cutoff_ns
from fskv.index.scan import Part
from fskv.index.snapshot import Catalogue
from fskv.root.process_id import is_orphan

from .neighbours import bounds_of
from .pruning import forecast
from .root_view import Namespace
from .tally import Count, tally

Key = Namespace | str | None  # a namespace, a tenant (None: of none), or a kind of KV group


@dataclass(slots=True)
class Parts:
    """Files that were never published."""

    orphaned: int = 0  # their writer is gone, or they are older than an hour
    orphaned_nbytes: int = 0
    in_progress: int = 0
    in_progress_nbytes: int = 0


@dataclass(slots=True)
class NamespaceUsage:
    """The counts of one namespace."""

    namespace: Namespace
    counts: dict[int, Count] = field(default_factory=dict)  # by group
    parts: Parts = field(default_factory=Parts)
    num_foreign: int = 0
    unlistable: int = 0

    def kind(self, group: int) -> str:
        identity = self.namespace.identity
        for one in identity.groups if identity else ():
            if one.group_idx == group:
                return one.kind
        return "unknown"


@dataclass(frozen=True, slots=True)
class Target:
    """The effect of one prune."""

    option: str
    num_files: int
    nbytes: int


class RootUsage:
    """The counts of a root."""

    def __init__(self, root: str, spaces: Sequence[Namespace], ages_s: Sequence[float]) -> None:
        self._root = root
        self._spaces = spaces
        self._ages_s = ages_s
        self._now_ns = time.time_ns()  # our own clock, since nothing is written here
        self._edges_ns = [self._now_ns - int(age_s * 1e9) for age_s in ages_s]
        self._nbytes = 0  # of all, with parts
        self._ours: list[Catalogue] = []  # of namespaces that are not damaged
        self.ages = [age_text(age_s) for age_s in ages_s]
        self.total = Count(unused=[(0, 0)] * len(ages_s))
        self.namespaces: list[NamespaceUsage] = []

    def count(self, seen: Callable[[int, int], object]) -> None:
        """Look at every file; for `seen` see `tools.terminal.walk_progress`."""
        for number, one in enumerate(self._spaces):
            usage = NamespaceUsage(one)
            catalogue = Catalogue(one.path)
            for shard in one.listed(usage):
                catalogue.take(shard)
                for (group, _), count in tally(shard.records, self._edges_ns).items():
                    for sums in (usage.counts.setdefault(group, Count()), self.total):
                        sums.add(count)
                self._add_parts(usage.parts, shard.parts)
                usage.num_foreign += shard.num_foreign
                seen(number, shard.idx)
            self.namespaces.append(usage)
            self._nbytes += catalogue.nbytes
            self._ours += [catalogue] if one.problem is None else []
        self.bounds = bounds_of(self._root, self._now_ns)

    @property
    def num_problems(self) -> int:
        return sum(one.namespace.problem is not None for one in self.namespaces)

    def _add_parts(self, parts: Parts, found: Iterable[Part]) -> None:
        for part in found:
            if is_orphan(os.path.basename(part.path), part.mtime_ns, self._now_ns):
                parts.orphaned += 1
                parts.orphaned_nbytes += part.nbytes
            else:
                parts.in_progress += 1
                parts.in_progress_nbytes += part.nbytes

    def sums(self, key: Callable[[NamespaceUsage, int], Key]) -> dict[Key, Count]:
        """Return the sums of all groups by what `key(namespace, group)` returns, sorted."""
        found: dict[Key, Count] = {}
        for usage in self.namespaces:
            for group, count in usage.counts.items():
                found.setdefault(key(usage, group), Count()).add(count)
        return dict(sorted(found.items(), key=lambda item: _place(item[0])))

    def targets(self) -> list[Target]:
        """Return the effects of a prune to each age and to each bound on the whole root, if there are any."""
        found = []
        for age_s in self._ages_s:
            before_ns = cutoff_ns(self._now_ns, age_s)
            found.append(self._target(f"--unused-for {age_text(age_s)}", 0, before_ns))
        found += [
            self._target(f"--max-size {size_text(scope.limit)}", self._nbytes - scope.limit, None)
            for scope in self.bounds.scopes
            if scope.kind == "root"
        ]
        return [one for one in found if one.num_files]

    def _target(self, option: str, nbytes: int, before_ns: int | None) -> Target:
        gone = forecast(self._ours, Need(nbytes, before_ns=before_ns))
        return Target(option, sum(one.num_files for one in gone), sum(one.nbytes for one in gone))


def _place(key: Key) -> tuple[str, ...]:
    return key.line if isinstance(key, Namespace) else (key or "",)


def age_text(age_s: float) -> str:
    """Write an age in the form that --unused-for takes."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if age_s >= size and age_s % size == 0:
            return f"{int(age_s // size)}{unit}"
    return f"{age_s:g}s"


def size_text(nbytes: int) -> str:
    """Write an exact size in the form that options take."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size and nbytes % size == 0:
            return f"{nbytes // size}{unit}"
    return f"{nbytes}B"
