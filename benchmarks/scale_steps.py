"""The steps of benchmarks.scale, each in a process of its own: `python -m benchmarks.scale_steps STEP`.

A step reads its options as JSON from standard input and prints one JSON object. It imports what it needs
itself, because that is part of what is measured.
Times of day are CLOCK_MONOTONIC, which all processes of a machine share: the parent knows when it
started us.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.usage import status_of

Options = dict[str, Any]
_PATIENCE_S = 600.0


def first_hit(options: Options) -> dict[str, Any]:
    """Open root and namespace, look a chunk up until it hits, load it checked; the first of several.

    With `maintain` the engine's maintenance process is started before, and waited for afterwards.
    """
    listed: list[str] = []
    sys.addaudithook(
        lambda event, args: listed.append(str(args[0])) if event in _LISTINGS else None
    )
    from functools import partial

    import fskv.data_path.runner  # noqa: F401  what a worker imports
    from benchmarks.scale_root import chunk_id, layout_of, open_root, open_store
    from fskv.data_path.breaker import Breaker
    from fskv.index.presence import PresenceIndex, RankFiles, probe_chunks
    from fskv.types import Presence, Status

    nbytes = options["chunk_nbytes"]
    imported_at = time.monotonic()
    directory = open_root(options["root"])
    opened_at = time.monotonic()
    keeper = _Keeper(options["root"], directory.path) if options["maintain"] else None
    ranks = [RankFiles(directory.path, None, {0: layout_of(nbytes).file_nbytes})]
    presence = PresenceIndex(
        partial(probe_chunks, ranks),
        lookup_timeout_s=30.0,
        breaker=Breaker(),
    )
    store, transport = open_store(directory, nbytes)
    slot = transport.new_slot(0)
    loads = []
    for number in options["chunks"]:
        start = time.monotonic()
        chunk = chunk_id(number)
        while (answer := presence.lookup(chunk.chunk)[0]) is Presence.UNKNOWN:
            presence.flush()
            time.sleep(0.0005)
            if keeper is not None:
                keeper.poll()
        status = store.get(chunk, 0, 1, slot)[0] if answer is Presence.HIT else Status.MISSING
        loads.append(time.monotonic() - start)
        if len(loads) == 1:
            hit_at = time.monotonic()
            modules = set(sys.modules)
        _compare(number, nbytes, slot, status, layout_of(nbytes).header_nbytes)
    found = {
        "imported_at": imported_at,
        "opened_at": opened_at,
        "hit_at": hit_at,
        "next_s": sorted(loads[1:])[len(loads[1:]) // 2] if loads[1:] else None,
        "listed": [path for path in listed if "/chunks" in path],
        "torch": "torch" in modules,
        "scan": "fskv.index.scan" in modules,
    }
    return found | (keeper.finish() if keeper is not None else {})


_LISTINGS = ("os.listdir", "os.scandir")


def _compare(number: int, nbytes: int, slot: Any, status: Any, start: int) -> None:
    from benchmarks.scale_root import content_of

    loaded = slot.array[start : start + nbytes]
    if status.value != "ok" or not (loaded == content_of(number, nbytes)).all():
        sys.exit(f"chunk {number}: {status.value}, or other bytes than were stored")


class _Keeper:
    """The maintenance process of an engine, and when it knew what."""

    def __init__(self, root: str, namespace: str) -> None:
        from fskv.bounds.client import Capacity
        from fskv.bounds.limits import Limits

        self._shared = f"{root}/.fskv-maintenance"
        self._capacity = Capacity(
            root, namespace[len(root) + 1 :], None, Limits(max_nbytes=1 << 50)
        )
        self._started_ms = time.time_ns() // 1_000_000
        self._capacity.start()
        self._told_at: float | None = None

    def poll(self) -> None:
        self._capacity.poll()
        if self._told_at is None and self._capacity.state.usage.num_files:
            self._told_at = time.monotonic()

    def finish(self) -> dict[str, Any]:
        """Wait until it has counted itself and told us, then let it end."""
        usage: Options = {}
        counted_at = 0.0

        def counted() -> bool:
            nonlocal usage, counted_at
            self.poll()
            usage = _read_json(f"{self._shared}/usage.json")
            counted_at = time.monotonic()
            return usage.get("at_ms", 0) >= self._started_ms and bool(usage["namespaces"])

        _wait(counted, "the maintenance process to count")

        def told() -> bool:
            self.poll()
            return self._told_at is not None

        _wait(told, "the count to be told")
        pid = _read_json(f"{self._shared}/lease.json")["pid"]
        memory = _memory(pid)
        self._capacity.close()
        _wait(lambda: not os.path.exists(f"/proc/{pid}"), "the maintenance process to end")
        return {
            "told_at": self._told_at,
            "counted_at": counted_at,
            "files": sum(files for _, files in usage["namespaces"].values()),
            "keeper_rss": memory["VmHWM"],
        }


def scan(options: Options) -> dict[str, Any]:
    """Walk everything, knowing nothing."""
    import asyncio

    from fskv.index.snapshot import Catalogue

    before = _memory()["VmRSS"]
    catalogue = Catalogue(options["namespace"])
    start = time.monotonic()
    failed = asyncio.run(catalogue.refresh(time.time_ns()))
    seconds = time.monotonic() - start
    return {
        "seconds": seconds,
        "files": catalogue.num_files,
        "nbytes": catalogue.nbytes,
        "failed": len(failed),
        "rss_before": before,
        "rss_after": _memory()["VmRSS"],
        "rss_peak": _memory()["VmHWM"],
    }


def refresh(options: Options) -> dict[str, Any]:
    """Load the snapshot, walk what has changed since, and with `save` write it again."""
    import asyncio

    from fskv.index.snapshot import Catalogue

    start = time.monotonic()
    catalogue = Catalogue.load(options["namespace"])
    loaded = time.monotonic()
    asyncio.run(catalogue.refresh(time.time_ns()))
    refreshed = time.monotonic()
    if options["save"]:
        catalogue.save()
    return {
        "load_s": loaded - start,
        "refresh_s": refreshed - loaded,
        "save_s": time.monotonic() - refreshed,
        "files": catalogue.num_files,
        "snapshot_nbytes": os.path.getsize(catalogue.path),
        "rss_peak": _memory()["VmHWM"],
    }


def prune(options: Options) -> dict[str, Any]:
    """Plan and remove the least recently used files, some of which are used after they were counted."""
    import asyncio

    from fskv.bounds.evict import Need, evict, plan
    from fskv.index.snapshot import Catalogue

    catalogue = Catalogue.load(options["namespace"])
    asyncio.run(catalogue.refresh(time.time_ns()))
    for path in options["used"]:
        os.utime(path)
    start = time.monotonic()
    need = Need(options["nbytes"])
    plan([catalogue], need)
    planned = time.monotonic()
    pruned = asyncio.run(evict([catalogue], need, options["namespace"]))
    return {
        "plan_s": planned - start,
        "execute_s": time.monotonic() - planned,
        "files": pruned.num_files,
        "used_meanwhile": pruned.used_meanwhile,
        "left": catalogue.num_files,
        "rss_peak": _memory()["VmHWM"],
    }


def _wait(done: Callable[[], object], what: str) -> None:
    end = time.monotonic() + _PATIENCE_S
    while not done():
        if time.monotonic() > end:
            sys.exit(f"waited {_PATIENCE_S:g} s in vain for {what}")
        time.sleep(0.005)


def _read_json(path: str) -> Options:
    try:
        with open(path, "rb") as file:
            tree: Options = json.load(file)
            return tree
    except (OSError, ValueError):
        return {}


def _memory(pid: int | str = "self") -> dict[str, int]:
    """Return VmRSS and VmHWM in bytes."""
    return {name: number << 10 for name, number in status_of(pid).items()}


STEPS = {step.__name__: step for step in (first_hit, scan, refresh, prune)}

if __name__ == "__main__":
    print(json.dumps(STEPS[sys.argv[1]](json.load(sys.stdin))), flush=True)
    os._exit(0)  # probe threads are daemons, and the interpreter's end is not measured
