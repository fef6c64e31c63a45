"""Lookups as contestants: fskv's presence index, and what a program would call instead of it.

All ask for the same keys: `num_keys` that have a chunk file, and as many that have none. A round with a
wrong answer is no result. The kernel's cache of names is warm, for everybody. The index makes the names and
checks sizes, its threads and the asking thread take turns; `ProbeContestant` is its probe alone, in one call
on one thread, as the peers are called: it still makes the names, which are ready-made for the peers.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from fskv.data_path.breaker import Breaker
from fskv.data_path.job import FileMove
from fskv.format.chunk_file import FileLayout
from fskv.hybrid_planner import GroupLayout, plan_job
from fskv.index.presence import Findings, Key, PresenceIndex, RankFiles, probe_chunks
from fskv.types import ChunkId, FileId, Presence

from .contestant import Cell, Contestant, RoundError
from .row import FS_IO_C
from .store import KvMemory, chunk_id, drain, open_data_path

FILE_NBYTES = 4096  # of KV: only the number of files matters
_NUM_STRANGERS = 256  # keys without a file, asked for before it counts
_TIMEOUT_S = 60.0
_POLL_S = 0.00005


class LookupContestant(Contestant):
    """A scheduler's step: ask for every key, flush, ask again until each has an answer."""

    def __init__(
        self, path: str, num_keys: int, threads: int, memory: KvMemory, direct_io: str
    ) -> None:
        """`is_direct` says how the store, once opened, writes its files."""
        tensor, _ = memory.pages(FILE_NBYTES)
        layout = FileLayout(1, (FILE_NBYTES,), bytes(16))
        self._data = open_data_path(path, tensor, layout, threads=threads, direct_io=direct_io)
        self._there = [chunk_id(i) for i in range(num_keys)]
        self._keys = [chunk_id(i) for i in range(2 * num_keys)]
        # An engine's index lives as long as the engine: its threads are there, and it knows its disk.
        self._strangers = [chunk_id(-i) for i in range(1, _NUM_STRANGERS + 1)]
        self._stored = False
        ops = ("lookup-known", "lookup-unknown")
        cell = Cell(FILE_NBYTES, 1, len(self._keys))
        super().__init__("presence index", cell, FILE_NBYTES, ops, verifies=True)

    @property
    def is_direct(self) -> bool:
        return self._data.is_direct

    @property
    def paths(self) -> list[str]:
        """The keys' file names; those of the first half exist."""
        return [self._data.chunk_path(chunk) for chunk in self._keys]

    @property
    def keys(self) -> list[ChunkId]:
        """Those of the first half have a file once `measure` was called."""
        return self._keys

    def num_chunks(self, op: str) -> int:
        return len(self._there if op == "lookup-known" else self._keys)

    def measure(self) -> dict[str, float]:
        if not self._stored:  # in the warm-up; the files stay
            self._store()
            self._stored = True
        index = PresenceIndex(
            self.probe,
            lookup_timeout_s=_TIMEOUT_S,
            breaker=Breaker(),
        )
        try:
            _ask(index, self._strangers)
            start = time.perf_counter()
            found = _ask(index, self._keys)
            unknown_s = time.perf_counter() - start
            start = time.perf_counter()
            known = [index.lookup(chunk)[0] for chunk in self._there]
            known_s = time.perf_counter() - start
        finally:
            index.close()
        half = len(self._there)
        if found != [Presence.HIT] * half + [Presence.MISS] * half or set(known) != {Presence.HIT}:
            raise RoundError("the presence index gave a wrong answer")
        return {"lookup-known": half / known_s, "lookup-unknown": 2 * half / unknown_s}

    def close(self) -> None:
        self._data.close()

    def _store(self) -> None:
        groups = [GroupLayout.of(0, 1, [(0, FILE_NBYTES)])]
        count = len(self._there)
        plan = plan_job(groups, [FILE_NBYTES], [count], [0] * count, [count], [0])
        moves = [FileMove(FileId(*self._there[part.key_idx]), part) for part in plan.chunks]
        self._data.mover.store(1, moves)
        drain(self._data.mover, "store", count)

    def probe(self, chunks: Sequence[Key], missed_before: bytes) -> Findings:
        """Look at the files, as the index's threads do."""
        sizes = {0: self._data.layout.file_nbytes}
        ranks = [RankFiles(self._data.directory.path, None, sizes)]
        return probe_chunks(ranks, chunks, missed_before)


def _ask(index: PresenceIndex, keys: Sequence[ChunkId]) -> list[Presence]:
    """Look up keys that the index does not know, and wait for the answers."""
    for chunk in keys:
        index.lookup(chunk)
    index.flush()
    found: list[Presence] = []
    waiting = deque(keys)
    while waiting:
        presence, _ = index.lookup(waiting[0])
        if presence is Presence.UNKNOWN:
            time.sleep(_POLL_S)
            continue
        found.append(presence)
        waiting.popleft()
    return found


class ProbeContestant(Contestant):
    """The probe without the index: all keys in one call, on one thread."""

    def __init__(self, index: LookupContestant) -> None:
        """`index` has its turn first in the warm-up, and makes the files."""
        self._index = index
        super().__init__(
            "presence probe", index.cell, FILE_NBYTES, ("lookup-unknown",), verifies=True
        )

    def measure(self) -> dict[str, float]:
        if self._index.error is not None:  # then there may be no files
            raise RoundError(self._index.error)
        keys = self._index.keys
        missed_before = bytes(len(keys))
        start = time.perf_counter()
        there, _ = self._index.probe(keys, missed_before)
        seconds = time.perf_counter() - start
        half = len(keys) // 2
        if list(there) != [1] * half + [0] * half:
            raise RoundError("the probe gave a wrong answer")
        return {"lookup-unknown": len(keys) / seconds}


class PathLookup(Contestant):
    """A function from file names to answers: `os.path.exists`, or vLLM's batch_lookup."""

    def __init__(
        self, path: str, lookup: Callable[[list[str]], Sequence[bool]], paths: list[str]
    ) -> None:
        self._lookup = lookup
        self._paths = paths
        cell = Cell(FILE_NBYTES, 1, len(paths))
        super().__init__(path, cell, FILE_NBYTES, ("lookup-unknown",), verifies=False)

    def measure(self) -> dict[str, float]:
        start = time.perf_counter()
        found = list(self._lookup(self._paths))
        seconds = time.perf_counter() - start
        half = len(self._paths) // 2
        if found != [True] * half + [False] * half:
            raise RoundError("a wrong answer")
        return {"lookup-unknown": len(self._paths) / seconds}


def lookup_peers(paths: list[str], fs_io_c: Any) -> list[PathLookup]:
    """Return os.path.exists in a loop and, where `fs_io_c` is a module, its batch_lookup."""

    def exists(names: list[str]) -> list[bool]:
        return [os.path.exists(name) for name in names]

    peers = [PathLookup("os.path.exists", exists, paths)]
    if fs_io_c is not None:
        peers.append(PathLookup(FS_IO_C, fs_io_c.batch_lookup, paths))
    return peers
