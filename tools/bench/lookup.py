"""Lookups of chunks through a `PresenceIndex`, as an engine's scheduler has it.

All keys are asked for at once: half of them have a file, half have none. The kernel's cache of names is warm.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence

from fskv.data_path.breaker import Breaker
from fskv.index.presence import Findings, Key, PresenceIndex, RankFiles, probe_chunks
from fskv.root.root import NamespaceDir
from fskv.types import ChunkId, Presence

from .store import RoundError, chunk_id, spread

_NUM_FILES = 512  # and as many names without a file
_FILE_NBYTES = 4096  # only the number of files matters
_NUM_STRANGERS = 256  # keys without a file, asked for before it counts
_TIMEOUT_S = 60.0
_POLL_S = 0.00005


def measure_lookups(directory: NamespaceDir, rounds: int) -> dict[str, float]:
    """Make empty chunk files, and ask for them and as many others in each round; returns answers a second.

    Raises RoundError and OSError.
    """
    keys = [chunk_id(number) for number in range(2 * _NUM_FILES)]
    for key in keys[:_NUM_FILES]:
        path = directory.chunk_path(key.key_hash, 0, None)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "xb") as file:
            file.truncate(_FILE_NBYTES)
    ranks = [RankFiles(directory.path, None, {0: _FILE_NBYTES})]

    def probe(chunks: Sequence[Key], missed_before: bytes) -> Findings:
        return probe_chunks(ranks, chunks, missed_before)

    expected = [Presence.HIT] * _NUM_FILES + [Presence.MISS] * _NUM_FILES
    rates: list[float] = []
    for number in range(rounds + 1):
        index = PresenceIndex(probe, lookup_timeout_s=_TIMEOUT_S, breaker=Breaker())
        try:
            # An engine's index lives as long as the engine: its threads are there, and it knows its disk.
            _ask(index, [chunk_id(-stranger) for stranger in range(1, _NUM_STRANGERS + 1)])
            start = time.perf_counter()
            found = _ask(index, keys)
            seconds = time.perf_counter() - start
        finally:
            index.close()
        if found != expected:
            raise RoundError("lookups: the presence index gave a wrong answer")
        if number:  # the first one warms up
            rates.append(len(keys) / seconds)
    return spread(rates)


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
