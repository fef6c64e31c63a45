"""Adds up the records of a walk: files of which group and rank, how large, unused since when. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fskv.index.scan import Records


@dataclass(slots=True)
class Count:
    """Files of one group and rank. `unused` has (files, bytes) last used before each edge."""

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


def tally(records: Records, edges_ns: Sequence[int]) -> dict[tuple[int, int], Count]:
    """Count the records of one directory by (group, rank + 1)."""
    if not len(records):
        return {}
    both = records["group"].astype(np.uint64) << np.uint64(32) | records["rank1"]
    values, which = np.unique(both, return_inverse=True)

    def sums(rows: Any) -> list[tuple[int, int]]:
        # Sums of one directory are exact in a double: less than 2^53 bytes.
        sizes = records["nbytes"][rows].astype(np.float64)
        num_files = np.bincount(which[rows], minlength=len(values))
        nbytes = np.bincount(which[rows], sizes, len(values))
        return list(zip(num_files.tolist(), nbytes.astype(np.int64).tolist(), strict=True))

    # By columns and not group by group: names that somebody made up may have a group each.
    unused = [sums(records["mtime_ns"] < edge_ns) for edge_ns in edges_ns]
    return {
        (value >> 32, value & 0xFFFFFFFF): Count(num_files, nbytes, [old[at] for old in unused])
        for at, (value, (num_files, nbytes)) in enumerate(
            zip(values.tolist(), sums(slice(None)), strict=True)
        )
    }
