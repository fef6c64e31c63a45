"""Adds up the records of a walk: files of which group and rank, how large, unused since when. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from fskv.index.scan import Records


@dataclass(slots=True)
class Count:
    """Files of one group and rank. `unused` has (files, bytes) last used before each edge."""

    num_files: int = 0
    nbytes: int = 0  # on disk
    unused: list[tuple[int, int]] = field(default_factory=list)
    sample: int = 0  # a row of the last records that were added, for who wants to look at one

    def add(self, num_files: int, nbytes: int, unused: Sequence[tuple[int, int]]) -> None:
        self.num_files += num_files
        self.nbytes += nbytes
        before = self.unused or [(0, 0)] * len(unused)
        self.unused = [(a + c, b + d) for (a, b), (c, d) in zip(before, unused, strict=True)]


def tally(records: Records, edges_ns: Sequence[int]) -> dict[tuple[int, int], Count]:
    """Count records by (group, rank + 1)."""
    found: dict[tuple[int, int], Count] = {}
    if not len(records):
        return found
    both = records["group"].astype(np.uint64) << np.uint64(32) | records["rank1"]
    values, which = np.unique(both, return_inverse=True)
    for number, value in enumerate(values.tolist()):
        rows = np.flatnonzero(which == number)
        mtimes, sizes = records["mtime_ns"][rows], records["nbytes"][rows]
        count = Count(sample=int(rows[0]))
        unused = []
        for edge_ns in edges_ns:
            old = mtimes < edge_ns
            unused.append((int(old.sum()), int(sizes[old].sum())))
        count.add(len(rows), int(sizes.sum()), unused)
        found[value >> 32, value & 0xFFFFFFFF] = count
    return found
