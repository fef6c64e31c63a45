"""Counts a root by itself, where no engine does: files and bytes of each namespace.

Nothing is remembered of a file: of each directory of chunks its mtime, files and bytes, so that the next
count lists only directories that have changed. Runs on a daemon thread without asyncio: a thread of its
executor that hangs on a mount would keep the process from ending.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import NamedTuple

from fskv.index.scan import dir_mtime_ns, limit, list_shard, most_nbytes, shard_idx, shard_path
from fskv.root.beneath import opened
from fskv.root.root import CHUNK_DIR
from fskv.types import MAX_COUNT

from ..root_view import RootView

# A change within the tick of a directory's mtime may show nowhere: list it again (fskv.index.scan).
_SETTLED_NS = 2_000_000_000
_Shards = Mapping[int, tuple[int, int, int]]  # shard: mtime, bytes, files


class Count(NamedTuple):
    """What a count has found."""

    sizes: dict[str, tuple[int, int]]  # bytes on disk and files of each namespace
    unlistable: int  # directories: what was last seen in them is in `sizes`, if ever


class Counter:
    """What is known of each directory of chunks of a root."""

    def __init__(self) -> None:
        self._seen: dict[str, _Shards] = {}
        self._unlistable = 0

    def count(self, view: RootView) -> Count:
        """Count all namespaces; one that could never be listed is left out. Raises CommandError."""
        spaces, unlistable = view.listed()
        ids = {one.id for one in spaces}
        self._seen = {
            name: shards
            for name, shards in self._seen.items()
            if name in ids or name.partition("/")[0] in unlistable
        }
        self._unlistable = len(unlistable)
        for one in spaces:
            try:
                self._seen[one.id] = self._one(one.path, self._seen.get(one.id, {}))
            except OSError:
                self._unlistable += 1
        sizes = {name: _size(shards) for name, shards in self._seen.items()}
        return Count(sizes, self._unlistable)

    def _one(self, path: str, seen: _Shards) -> _Shards:
        found = {}
        try:
            with opened(path, f"{path}/{CHUNK_DIR}") as fd:
                names = os.listdir(fd)
        except FileNotFoundError:
            return {}
        most = most_nbytes(path)
        for name in names:
            idx = shard_idx(name)
            if idx is None:
                continue
            where = shard_path(path, idx)
            mtime_ns = dir_mtime_ns(where)
            if mtime_ns and idx in seen and seen[idx][0] == mtime_ns:
                found[idx] = seen[idx]
                continue
            now_ns = time.time_ns()
            shard = list_shard(where, idx, now_ns)
            if shard.error is not None:
                self._unlistable += 1
                found |= {idx: seen[idx]} if idx in seen else {}
                continue
            limit(shard, most)
            # In a double, where nothing overflows: exact below 2^53 bytes.
            nbytes = int(shard.records["nbytes"].sum(dtype="f8")) + sum(
                p.nbytes for p in shard.parts
            )
            unsettled = shard.growing or shard.parts or abs(now_ns - mtime_ns) < _SETTLED_NS
            found[idx] = (0 if unsettled else mtime_ns, nbytes, len(shard.records))
        return found


def _size(shards: _Shards) -> tuple[int, int]:
    nbytes = sum(nbytes for _, nbytes, _ in shards.values())
    return min(MAX_COUNT, nbytes), sum(files for _, _, files in shards.values())
