"""Counts the disk usage of a root, by namespace and group.

Every file is looked at once: a snapshot's last uses may be older than the truth.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from fskv.index.scan import Part, Records
from fskv.root.process_id import is_orphan

from .neighbours import Bounds, bounds_of
from .root_view import Namespace, Sums
from .terminal import age_option, say

Key = Namespace | str | None  # a namespace, a tenant (None: of none), or a kind of KV group


@dataclass(slots=True)
class Count:
    """Files of one group. `unused` has (files, bytes) last used before each edge."""

    num_files: int = 0
    nbytes: int = 0  # on disk
    unused: list[tuple[int, int]] = field(default_factory=list)

    @classmethod
    def of(cls, counts: Iterable[Count]) -> Count:
        """Return the sum of counts."""
        found = cls()
        for one in counts:
            found.add(one)
        return found

    def add(self, other: Count) -> None:
        self.num_files += other.num_files
        self.nbytes += other.nbytes
        before = self.unused or [(0, 0)] * len(other.unused)
        self.unused = [(a + c, b + d) for (a, b), (c, d) in zip(before, other.unused, strict=True)]


def tally(records: Records, edges_ns: Sequence[int]) -> dict[int, Count]:
    """Count the records of one directory by group. Pure."""
    groups, which = np.unique(records["group"], return_inverse=True)

    def sums(rows: Any) -> list[tuple[int, int]]:
        # Sums of one directory are exact in a double: less than 2^53 bytes.
        sizes = records["nbytes"][rows].astype(np.float64)
        num_files = np.bincount(which[rows], minlength=len(groups))
        nbytes = np.bincount(which[rows], sizes, len(groups))
        return list(zip(num_files.tolist(), nbytes.astype(np.int64).tolist(), strict=True))

    # By columns and not group by group: names that somebody made up may have a group each.
    unused = [sums(records["mtime_ns"] < edge_ns) for edge_ns in edges_ns]
    whole = sums(slice(None))
    return {
        group: Count(*whole[at], [old[at] for old in unused])
        for at, group in enumerate(groups.tolist())
    }


@dataclass(slots=True)
class Parts:
    """Files that were never published."""

    orphaned_parts: int = 0  # their writer is gone, or they are older than an hour
    orphaned_nbytes: int = 0
    parts_in_progress: int = 0
    in_progress_nbytes: int = 0


@dataclass(slots=True)
class NamespaceUsage:
    """The counts of one namespace."""

    namespace: Namespace
    counts: dict[int, Count] = field(default_factory=dict)  # by group
    parts: Parts = field(default_factory=Parts)
    num_foreign: int = 0
    unlistable: int = 0
    last_used_ns: int | None = None

    @property
    def total(self) -> Count:
        return Count.of(self.counts.values())

    def kind(self, group: int) -> str:
        identity = self.namespace.identity
        for one in identity.groups if identity else ():
            if one.group_idx == group:
                return one.kind
        return "unknown"


class RootUsage:
    """The counts of a root."""

    def __init__(self, root: str, spaces: Sequence[Namespace], ages: Sequence[str] = ()) -> None:
        """`ages` as options have them, such as 30d."""
        self._root = root
        self._spaces = spaces
        self.at_ns = time.time_ns()  # our own clock, since nothing is written here
        self._edges_ns = [self.at_ns - int(age_option("age", age) * 1e9) for age in ages]
        self.ages = ages
        self.total = Count(unused=[(0, 0)] * len(ages))
        self.namespaces: list[NamespaceUsage] = []

    def count(
        self, seen: Callable[[int, int], object], told: Callable[[str], object] = say
    ) -> None:
        """Look at every file; for `seen` see `tools.terminal.walk_progress`.

        `told` hears of each directory that cannot be listed.
        """
        for number, one in enumerate(self._spaces):
            usage = NamespaceUsage(one)
            for shard in one.listed(usage, told):
                latest_ns = int(shard.records["mtime_ns"].max(initial=0))
                usage.last_used_ns = max(usage.last_used_ns or 0, latest_ns) or None
                for group, count in tally(shard.records, self._edges_ns).items():
                    for sums in (usage.counts.setdefault(group, Count()), self.total):
                        sums.add(count)
                self._add_parts(usage.parts, shard.parts)
                usage.num_foreign += shard.num_foreign
                seen(number, shard.idx)
            self.namespaces.append(usage)

    @cached_property
    def bounds(self) -> Bounds:
        """The bounds of living engines and watchers. Raises OSError."""
        return bounds_of(self._root, self.at_ns)

    @property
    def rows(self) -> list[Sums]:
        """The namespaces with their sums."""
        return [
            Sums(one.namespace, total.num_files, total.nbytes, one.last_used_ns, one.unlistable)
            for one in self.namespaces
            for total in [one.total]
        ]

    @property
    def unlistable(self) -> int:
        return sum(one.unlistable for one in self.namespaces)

    @property
    def num_foreign(self) -> int:
        return sum(one.num_foreign for one in self.namespaces)

    @property
    def num_problems(self) -> int:
        return sum(one.namespace.problem is not None for one in self.namespaces)

    def _add_parts(self, parts: Parts, found: Iterable[Part]) -> None:
        for part in found:
            if is_orphan(os.path.basename(part.path), part.mtime_ns, self.at_ns):
                parts.orphaned_parts += 1
                parts.orphaned_nbytes += part.nbytes
            else:
                parts.parts_in_progress += 1
                parts.in_progress_nbytes += part.nbytes

    def sums(self, key: Callable[[NamespaceUsage, int], Key]) -> dict[Key, Count]:
        """Return the sums of all groups by what `key(namespace, group)` returns, sorted."""
        found: dict[Key, Count] = {}
        for usage in self.namespaces:
            for group, count in usage.counts.items():
                found.setdefault(key(usage, group), Count()).add(count)
        return dict(sorted(found.items(), key=lambda item: _place(item[0])))


def _place(key: Key) -> tuple[str, ...]:
    return key.line if isinstance(key, Namespace) else (key or "",)
