"""The numbers fskv reports: names, meanings, and a counter set that any thread may add to.

Engine adapters drain the counters and hand them to the engine's own metrics. Standard library only.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric; `label` is the name of its only label, if it has one."""

    name: str
    kind: str  # "counter" or "gauge"
    unit: str
    meaning: str
    label: str | None = None


LOOKUP_HITS = Metric(
    "vllm:fskv_lookup_hits", "counter", "chunks", "Chunks found present, once per request."
)
LOOKUP_MISSES = Metric(
    "vllm:fskv_lookup_misses",
    "counter",
    "chunks",
    "Chunks a request missed, once per request and reason: absent, timed_out, io_error, quarantined, "
    "breaker.",
    "reason",
)
LOAD_FAILURES = Metric(
    "vllm:fskv_load_failures",
    "counter",
    "chunks",
    "Chunks that were a hit but could not be loaded, so that the request is recomputed: absent, "
    "stale, corrupt, unknown_key, denied, timed_out, io_error, breaker.",
    "reason",
)
LOADED_CHUNKS = Metric("vllm:fskv_loaded_chunks", "counter", "chunks", "Chunks loaded and checked.")
LOADED_BYTES = Metric("vllm:fskv_loaded_bytes", "counter", "bytes", "KV bytes loaded and checked.")
LOAD_SECONDS = Metric(
    "vllm:fskv_load_seconds", "counter", "seconds", "Time of I/O threads spent in chunk loads."
)
STORED_CHUNKS = Metric(
    "vllm:fskv_stored_chunks", "counter", "chunks", "Chunk files written and made visible."
)
STORED_BYTES = Metric("vllm:fskv_stored_bytes", "counter", "bytes", "Bytes of those files.")
STORE_SECONDS = Metric(
    "vllm:fskv_store_seconds", "counter", "seconds", "Time of I/O threads spent in chunk stores."
)
STORES_SKIPPED = Metric(
    "vllm:fskv_stores_skipped",
    "counter",
    "chunks",
    "Chunks not stored: exists (another engine was first), skipped (queue full, or the pages were "
    "needed elsewhere), incomplete (blocks of the chunk were gone), capacity (a bound is reached and "
    "pruning is not that far yet), breaker, no_space, denied, timed_out, absent or "
    "stale (directories vanished).",
    "reason",
)
# Load or recompute (`load_budget`).
DECLINED_TOKENS = Metric(
    "vllm:fskv_declined_tokens",
    "counter",
    "tokens",
    "Tokens of hits that were not loaded, because recomputing them was predicted to be faster.",
)
DECLINED_CHUNKS = Metric(
    "vllm:fskv_declined_chunks", "counter", "chunks", "What loading those would have read."
)
DECLINED_LOAD_SECONDS = Metric(
    "vllm:fskv_declined_load_seconds",
    "counter",
    "seconds",
    "How long loading those was predicted to take.",
)
DECLINED_PREFILL_SECONDS = Metric(
    "vllm:fskv_declined_prefill_seconds",
    "counter",
    "seconds",
    "How long recomputing those was predicted to take.",
)
DECLINED_ACTUAL_SECONDS = Metric(
    "vllm:fskv_declined_actual_seconds",
    "counter",
    "seconds",
    "How long the engine's steps took to recompute those.",
)
CUT_LOADS = Metric(
    "vllm:fskv_cut_loads",
    "counter",
    "loads",
    "Loads that were given up at their time limit or deadline, so that the request is recomputed.",
)
CUT_LOAD_SECONDS = Metric(
    "vllm:fskv_cut_load_seconds", "counter", "seconds", "What those loads took, for nothing."
)
PROBE_LOADS = Metric(
    "vllm:fskv_probe_loads",
    "counter",
    "loads",
    "Loads of a short prefix, to see if storage that was too slow still is.",
)
LOAD_RATE = Metric(
    "vllm:fskv_load_rate",
    "gauge",
    "bytes per second",
    "What a load of the size of the last one is predicted to get, on one rank.",
)
PREFILL_RATE = Metric(
    "vllm:fskv_prefill_rate",
    "gauge",
    "tokens per second",
    "What the engine is predicted to compute of a prompt's first 1024 tokens.",
)
SLOTS_IN_USE = Metric(
    "vllm:fskv_staging_slots_in_use",
    "gauge",
    "slots",
    "Staging slots in use, parked ones included.",
)
THREADS_HUNG = Metric(
    "vllm:fskv_io_threads_hung",
    "gauge",
    "threads",
    "I/O threads past their deadline that have not returned.",
)
BREAKER_OPEN = Metric(
    "vllm:fskv_breaker_open",
    "gauge",
    "0 or 1",
    "Whether the root is left alone after failures in a row.",
)

# What the process that maintains the root says of it; counts are of the present holder of the lease.
ROOT_BYTES = Metric(
    "vllm:fskv_root_bytes",
    "gauge",
    "bytes",
    "On disk, in chunk files of the whole root, when last counted.",
)
ROOT_FILES = Metric("vllm:fskv_root_files", "gauge", "files", "Chunk files of the whole root.")
ROOT_FREE_BYTES = Metric(
    "vllm:fskv_root_free_bytes", "gauge", "bytes", "Free on the root's file system, for this user."
)
PRUNED_FILES = Metric(
    "vllm:fskv_pruned_files",
    "gauge",
    "files",
    "Chunk files pruned by the present holder of the lease.",
)
PRUNED_BYTES = Metric("vllm:fskv_pruned_bytes", "gauge", "bytes", "What those took on disk.")
ORPHANS_REMOVED = Metric(
    "vllm:fskv_orphans_removed", "gauge", "files", "Parts of dead writers removed by that holder."
)
UNREMOVABLE_FILES = Metric(
    "vllm:fskv_unremovable_files",
    "gauge",
    "files",
    "Chunk files that could not be removed, and stay.",
)
LEASE_HELD = Metric(
    "vllm:fskv_lease_held", "gauge", "0 or 1", "Whether this engine's process maintains the root."
)
STORES_PAUSED = Metric(
    "vllm:fskv_stores_paused", "gauge", "0 or 1", "Whether stores pause because the disk was full."
)

ALL_METRICS = (
    LOOKUP_HITS,
    LOOKUP_MISSES,
    LOAD_FAILURES,
    LOADED_CHUNKS,
    LOADED_BYTES,
    LOAD_SECONDS,
    STORED_CHUNKS,
    STORED_BYTES,
    STORE_SECONDS,
    STORES_SKIPPED,
    DECLINED_TOKENS,
    DECLINED_CHUNKS,
    DECLINED_LOAD_SECONDS,
    DECLINED_PREFILL_SECONDS,
    DECLINED_ACTUAL_SECONDS,
    CUT_LOADS,
    CUT_LOAD_SECONDS,
    PROBE_LOADS,
    LOAD_RATE,
    PREFILL_RATE,
    SLOTS_IN_USE,
    THREADS_HUNG,
    BREAKER_OPEN,
    ROOT_BYTES,
    ROOT_FILES,
    ROOT_FREE_BYTES,
    PRUNED_FILES,
    PRUNED_BYTES,
    ORPHANS_REMOVED,
    UNREMOVABLE_FILES,
    LEASE_HELD,
    STORES_PAUSED,
)

# Of FskvMultiConnector alone, about its children; `connector` is on every series of theirs as well.
MULTI_LOADS = Metric(
    "vllm:fskv_multi_loads",
    "counter",
    "requests",
    "Requests whose KV was loaded from this child, failed loads included.",
    "connector",
)
MULTI_FAILED_LOADS = Metric(
    "vllm:fskv_multi_failed_loads",
    "counter",
    "requests",
    "Loads from this child that failed, so that the request was tried elsewhere or recomputed.",
    "connector",
)
MULTI_GIVEN_UP = Metric(
    "vllm:fskv_multi_given_up",
    "counter",
    "requests",
    "Requests that went on without this child's answer after `lookup_timeout_s`.",
    "connector",
)

MULTI_METRICS = (MULTI_LOADS, MULTI_FAILED_LOADS, MULTI_GIVEN_UP)


class Counters:
    """Sums by metric and label value since the last `drain`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[tuple[Metric, str], float] = {}

    def add(self, metric: Metric, amount: float = 1, label: str = "") -> None:
        if not amount:
            return
        with self._lock:
            key = (metric, label)
            self._sums[key] = self._sums.get(key, 0) + amount

    def drain(self) -> dict[tuple[Metric, str], float]:
        """Return the sums and start again from zero."""
        with self._lock:
            sums, self._sums = self._sums, {}
        return sums
