"""What the presence index costs the scheduler's thread: memory for each known chunk, time for each lookup.

Memory: the index is filled beyond its limit with keys of 32 bytes, each an object of its own as vLLM makes
them, learnt by probes or by stores; then the removed names. Each in a process of its own, once by its
anonymous memory, once by tracemalloc, which counts what Python asks for. Exit code 1: beyond a limit.

Time: steps as a scheduler makes them. Each asks for new keys, half of which have a file, asks again for those
of the step before, ends the step and sleeps. The probes run meanwhile. Every answer is compared; a key
without one after ten steps ends it.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

from benchmarks.options import parser, positive, settings
from benchmarks.report import command, percentile, publish
from benchmarks.rig import BenchmarkError
from benchmarks.usage import Usage
from fskv import namespace
from fskv.data_path.breaker import Breaker
from fskv.index.presence import (
    MAX_KNOWN_CHUNKS,
    MAX_REMOVED,
    Findings,
    Key,
    PresenceIndex,
    RankFiles,
    probe_chunks,
)
from fskv.types import ChunkId, Presence

_FILE_NBYTES = 8
_MAX_STEPS = 10  # that a key may be without an answer
_Probe = Callable[[Sequence[Key], bytes], Findings]


def new_index(probe: _Probe, max_known: int = MAX_KNOWN_CHUNKS) -> PresenceIndex:
    """Return an index with the default options but for the timeout: a busy machine must not end this."""
    return PresenceIndex(
        probe,
        positive_ttl_s=3600,
        negative_ttl_s=3600,
        lookup_timeout_s=60,
        breaker=Breaker(),
        max_known=max_known,
    )


def chunk_id(number: int) -> ChunkId:
    """Name a chunk by a hash, anew each time: the index gets objects that nobody else holds."""
    return ChunkId(hashlib.sha256(b"%d" % number).digest(), 0)


# --- memory -----------------------------------------------------------------------------------


def _all_there(chunks: Sequence[Key], _: bytes) -> Findings:
    return Findings(bytes([1]) * len(chunks), 1e-6 * len(chunks))


def _probed(index: PresenceIndex, count: int) -> int:
    for first in range(0, count, 4096):
        for number in range(first, min(first + 4096, count)):
            index.lookup(chunk_id(number))
        index.flush()
        while index.lookup(chunk_id(first))[0] is Presence.UNKNOWN:
            index.flush()  # it may have been known, and forgotten for those behind it
            time.sleep(0.0001)
    index.flush()
    return index.num_known


def _stored(index: PresenceIndex, count: int) -> int:
    for number in range(count):
        index.mark_stored(chunk_id(number))
    return index.num_known


def _removed(index: PresenceIndex, count: int) -> int:
    index.mark_removed((hashlib.md5(b"%d" % n).digest(), 0) for n in range(count))  # noqa: S324  a name
    return len(index._removed)  # noqa: SLF001


_FILLS: dict[str, Callable[[PresenceIndex, int], int]] = {
    "probed": _probed,
    "stored": _stored,
    "removed": _removed,
}


def measure_memory(limit: int) -> dict[str, dict[str, float]]:
    """Return bytes a chunk for each way to learn of it and each way of counting, and how many fit."""
    found: dict[str, dict[str, float]] = {}
    context = multiprocessing.get_context("spawn")
    for how in _FILLS:
        for name, traced in (("resident", False), ("traced", True)):
            with ProcessPoolExecutor(1, context) as pool:
                known, nbytes = pool.submit(_fill, how, limit, traced).result()
            facts = found.setdefault(how, {"known": known, "limit": _limit(how, limit)})
            facts[name] = round(nbytes / known, 1)
    return found


def _limit(how: str, max_known: int) -> int:
    return MAX_REMOVED if how == "removed" else max_known


def _fill(how: str, limit: int, traced: bool) -> tuple[int, int]:
    """Fill an index beyond its limit; returns what it knows, and the bytes that it took."""
    index = new_index(_all_there, limit)
    _probed(index, 1)  # its threads are there
    gc.collect()
    if traced:
        tracemalloc.start()
    before = _nbytes_used(traced=traced)
    known = _FILLS[how](index, _limit(how, limit) * 11 // 10)
    gc.collect()
    return known, _nbytes_used(traced=traced) - before


def _nbytes_used(*, traced: bool) -> int:
    return tracemalloc.get_traced_memory()[0] if traced else Usage.of(os.getpid()).anon_nbytes


# --- time -------------------------------------------------------------------------------------


class Scheduler:
    """One thread's steps over an index, each call timed."""

    def __init__(self, index: PresenceIndex) -> None:
        self._index = index
        self.lookup_s: list[float] = []
        self.flush_s: list[float] = []

    def step(self, chunks: Sequence[ChunkId]) -> list[Presence]:
        found = []
        for chunk in chunks:
            start = time.perf_counter()
            answer = self._index.lookup(chunk)
            self.lookup_s.append(time.perf_counter() - start)
            found.append(answer[0])
        return found

    def end_step(self) -> None:
        start = time.perf_counter()
        self._index.flush()
        self.flush_s.append(time.perf_counter() - start)


def run_steps(scheduler: Scheduler, *, steps: int, keys: int, sleep_s: float) -> None:
    """Ask for `keys` new chunks in each step and for those that wait; even numbers have a file."""
    waiting: dict[int, int] = {}  # number -> steps without an answer
    for step in range(steps):
        asked = [*waiting, *range(step * keys, (step + 1) * keys)]
        chunks = [chunk_id(number) for number in asked]
        for number, presence in zip(asked, scheduler.step(chunks), strict=True):
            if presence is Presence.UNKNOWN:
                waiting[number] = waiting.get(number, -1) + 1
                if waiting[number] > _MAX_STEPS:
                    raise BenchmarkError(f"a key had no answer after {_MAX_STEPS} steps")
                continue
            del waiting[number]
            if (presence is Presence.HIT) != (number % 2 == 0):
                raise BenchmarkError(f"chunk {number}: {presence} is a wrong answer")
        scheduler.end_step()
        time.sleep(sleep_s)


def measure_time(options: argparse.Namespace, directory: str) -> dict[str, Any]:
    """Make the files, then run the steps."""
    count = options.steps * options.keys
    for number in range(0, count, 2):
        path = f"{directory}/{namespace.chunk_path(chunk_id(number).key_hash, 0, None)}"
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(bytes(_FILE_NBYTES))
    index = new_index(partial(probe_chunks, [RankFiles(directory, None, {0: _FILE_NBYTES})]))
    scheduler = Scheduler(index)
    try:
        start = time.perf_counter()
        run_steps(scheduler, steps=options.steps, keys=options.keys, sleep_s=options.sleep_ms / 1e3)
        seconds = time.perf_counter() - start
    finally:
        index.close()
    return {
        "lookup": _percentiles(scheduler.lookup_s),
        "flush": _percentiles(scheduler.flush_s),
        "seconds": round(seconds, 2),
    }


def _percentiles(seconds: list[float]) -> dict[str, float]:
    found: dict[str, float] = {
        f"p{percent:g}_us": round(1e6 * percentile(seconds, percent), 2)
        for percent in (50, 99, 99.9)
    }
    return {**found, "max_us": round(1e6 * max(seconds), 1), "calls": len(seconds)}


# --- the command ------------------------------------------------------------------------------


def report(facts: dict[str, Any], options: argparse.Namespace) -> None:
    rows = []
    for how, found in facts["memory"].items():
        what = "bytes a removed name" if how == "removed" else f"bytes a chunk, {how}"
        counts = [f"{found[name]:.0f} {name}" for name in ("resident", "traced")]
        rows.append([what, *counts, f"{found['known']}"])
    for call in ("lookup", "flush"):
        found = facts["time"][call]
        spread = (
            f"p99 {found['p99_us']:.1f}, p99.9 {found['p99.9_us']:.1f}, max {found['max_us']:.0f}"
        )
        rows.append(
            [f"us a {call}", f"p50 {found['p50_us']:.2f}", spread, f"{found['calls']} calls"]
        )
    title = f"The presence index: {options.steps} steps with {options.keys} new keys each"
    publish("presence", facts, (title, ("", "", "", ""), rows), as_json=options.json)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser("presence", __doc__)
    add = made.add_argument
    add("--steps", type=positive, default=200, help="(200)")
    add("--keys", type=positive, default=256, help="new keys of a step (256)")
    add("--known", type=positive, default=MAX_KNOWN_CHUNKS, help=f"the limit ({MAX_KNOWN_CHUNKS})")
    add("--sleep-ms", type=positive, default=5, help="the rest of a step (5)")
    return made.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)

    def run() -> int:
        directory = tempfile.mkdtemp(prefix="fskv-presence-", dir=options.dir)
        try:
            timed = measure_time(options, directory)
        finally:
            shutil.rmtree(directory)
        memory = measure_memory(options.known)
        report({"settings": settings(options), "memory": memory, "time": timed}, options)
        return 0 if all(found["known"] <= found["limit"] for found in memory.values()) else 1

    return command("benchmarks.presence", run)


if __name__ == "__main__":
    sys.exit(main())
