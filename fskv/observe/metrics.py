"""The numbers fskv reports: names, meanings, and a counter set that any thread may add to.

Engine adapters drain the counters and hand them to the engine's own metrics. Standard library only.

A new metric is a constant here and in ALL_METRICS, and a row of docs/metrics.md: test_metrics_doc.py
says which. A label has few values: reasons, bounds, or one of this engine.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric; `label` is the name of its only label, if it has one.

    An engine's adapter puts the engine's own prefix before `name`.
    """

    name: str
    kind: str  # "counter", "gauge" or "histogram"
    unit: str
    meaning: str
    label: str | None = None
    buckets: tuple[float, ...] = ()  # of a histogram: upper edges
    # Of a counter's label: these begin at zero, so that an alert sees the first one that is counted.
    values: tuple[str, ...] = ()


# A gauge without a label, or with the value of its label.
Gauge = Metric | tuple[Metric, str]

LOOKUP_HITS = Metric(
    "fskv_lookup_hits", "counter", "chunks", "Chunks found present, once per request."
)
LOOKUP_MISSES = Metric(
    "fskv_lookup_misses",
    "counter",
    "chunks",
    "Chunks a request missed, once per request and reason: absent, timed_out, io_error, quarantined, "
    "breaker.",
    "reason",
    values=("absent", "timed_out", "io_error", "quarantined", "breaker"),
)
LOAD_FAILURES = Metric(
    "fskv_load_failures",
    "counter",
    "chunks",
    "Chunks that were a hit but could not be loaded, so that the request is recomputed: absent, "
    "stale, corrupt, denied, timed_out, io_error, breaker.",
    "reason",
    values=(
        *("absent", "stale", "corrupt"),
        *("denied", "timed_out", "io_error", "breaker"),
    ),
)
LOADED_CHUNKS = Metric("fskv_loaded_chunks", "counter", "chunks", "Chunks loaded and checked.")
LOADED_BYTES = Metric("fskv_loaded_bytes", "counter", "bytes", "KV bytes loaded and checked.")
LOAD_SECONDS = Metric(
    "fskv_load_seconds", "counter", "seconds", "Time of I/O threads spent in chunk loads."
)
LOAD_LATENCY = Metric(
    "fskv_load_latency_seconds",
    "histogram",
    "seconds",
    "From the moment a request's load is begun until it has ended, good or not.",
    # A load may take as long as its deadline, 30 s at most by default.
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
STORED_CHUNKS = Metric(
    "fskv_stored_chunks", "counter", "chunks", "Chunk files written and made visible."
)
STORED_BYTES = Metric("fskv_stored_bytes", "counter", "bytes", "Bytes of those files.")
STORE_SECONDS = Metric(
    "fskv_store_seconds", "counter", "seconds", "Time of I/O threads spent in chunk stores."
)
STORES_SKIPPED = Metric(
    "fskv_stores_skipped",
    "counter",
    "chunks",
    "Chunks not stored: exists (another engine was first), skipped (queue full, or the pages were "
    "needed elsewhere or given up at a reset), incomplete (blocks of the chunk were gone), capacity (a "
    "bound is reached and pruning is not that far yet), breaker, no_space, denied, timed_out, absent or "
    "stale (directories vanished).",
    "reason",
    values=("skipped", "capacity", "no_space", "breaker", "io_error", "timed_out", "denied"),
)
# What requests asked for, and what hits brought.
REQUESTS = Metric(
    "fskv_requests",
    "counter",
    "requests",
    "Requests for which files were looked up, once each: hit (a load was begun), miss (no file for it beyond "
    "the engine's own cache), unused (a hit was declined, or another connector's was taken).",
    "result",
    values=("hit", "miss", "unused"),
)
PENDING_LOADS = Metric(
    "fskv_pending_loads", "gauge", "requests", "Requests whose load was begun and has not ended."
)
LOADED_REQUESTS = Metric(
    "fskv_loaded_requests", "counter", "requests", "Requests whose KV was loaded from files."
)
LOADED_TOKENS = Metric(
    "fskv_loaded_tokens", "counter", "tokens", "Tokens of those that were loaded and not computed."
)
SAVED_SECONDS = Metric(
    "fskv_saved_seconds",
    "counter",
    "seconds",
    "How long computing those was predicted to take, less what loading them took.",
)
# Load or recompute (`load_budget`).
DECLINED_TOKENS = Metric(
    "fskv_declined_tokens",
    "counter",
    "tokens",
    "Tokens of hits that were not loaded, because a load before them was given up.",
)
CUT_LOADS = Metric(
    "fskv_cut_loads",
    "counter",
    "loads",
    "Loads that were given up at their time limit or deadline, so that the request is recomputed.",
)
PREFILL_RATE = Metric(
    "fskv_prefill_rate",
    "gauge",
    "tokens per second",
    "Prompt tokens that the engine's last steps computed in a second; older steps weigh less.",
)
SLOTS_IN_USE = Metric(
    "fskv_staging_slots_in_use",
    "gauge",
    "slots",
    "Staging slots in use, parked ones included.",
)
THREADS_HUNG = Metric(
    "fskv_io_threads_hung",
    "gauge",
    "threads",
    "I/O threads past their deadline that have not returned.",
)
STORE_QUEUE = Metric(
    "fskv_store_queue_chunks",
    "gauge",
    "chunks",
    "Chunks that wait to be stored or are being written.",
)
BREAKER_OPEN = Metric(
    "fskv_breaker_open",
    "gauge",
    "0 or 1",
    "Whether the root is left alone after failures in a row.",
)
BREAKER_OPENINGS = Metric(
    "fskv_breaker_openings",
    "counter",
    "times",
    "How often the breaker opened: also what was over before anybody looked at the gauge.",
)
WEIGHTS_IN_DOUBT = Metric(
    "fskv_weights_in_doubt",
    "gauge",
    "0 or 1",
    "Whether the engine neither loads nor stores until its next start, because its weights may have changed.",
)
OFF = Metric(
    "fskv_off",
    "gauge",
    "0 or 1",
    "Whether the engine neither loads nor stores as long as it runs: vLLM does not use its KV again, or fskv "
    "does not know how its KV lies.",
)
KNOWN_CHUNKS = Metric(
    "fskv_known_chunks",
    "gauge",
    "chunks",
    "Chunks whose presence or absence is remembered, at most 250,000.",
)
QUARANTINED_CHUNKS = Metric(
    "fskv_quarantined_chunks",
    "gauge",
    "chunks",
    "Chunks that count as missing because a load of them failed, for 30 s or until they are "
    "stored again. Beyond 1,000 the oldest are not counted.",
)
ROOT_INFO = Metric(
    "fskv_root_info", "gauge", "1", "Always 1; its label is the root of this engine.", "root"
)
NAMESPACE_INFO = Metric(
    "fskv_namespace_info",
    "gauge",
    "1",
    "Always 1; its label is the directory of this engine's namespace in the root.",
    "namespace",
)

# What the process that maintains the root says of it; counts are of the present holder of the lease.
ROOT_BYTES = Metric(
    "fskv_root_bytes",
    "gauge",
    "bytes",
    "On disk, in chunk files of the whole root, when last counted.",
)
ROOT_FILES = Metric("fskv_root_files", "gauge", "files", "Chunk files of the whole root.")
ROOT_FREE_BYTES = Metric(
    "fskv_root_free_bytes", "gauge", "bytes", "Free on the root's file system, for this user."
)
NAMESPACE_BYTES = Metric(
    "fskv_namespace_bytes",
    "gauge",
    "bytes",
    "On disk, in chunk files of this engine's namespace, when last counted.",
)
TENANT_BYTES = Metric(
    "fskv_tenant_bytes",
    "gauge",
    "bytes",
    "On disk, in chunk files of all namespaces of this engine's tenant; only with `tenant`.",
)
BOUND_BYTES = Metric(
    "fskv_bound_bytes",
    "gauge",
    "bytes",
    "Bounds that hold for this engine now, whoever declared them: root, tenant, and free (what "
    "may be in use on the file system). +Inf: no more.",
    "bound",
)
BOUND_LEFT_BYTES = Metric(
    "fskv_bound_left_bytes",
    "gauge",
    "bytes",
    "What is left of such a bound; 0 if none.",
    "bound",
)
COUNTED_AT = Metric(
    "fskv_counted_at_seconds",
    "gauge",
    "seconds since 1970",
    "When the root was last counted, by the clock of the node that counted; 0: never.",
)
PRUNED_FILES = Metric(
    "fskv_pruned_files",
    "gauge",
    "files",
    "Chunk files pruned by the present holder of the lease.",
)
PRUNED_BYTES = Metric("fskv_pruned_bytes", "gauge", "bytes", "What those took on disk.")
ORPHANS_REMOVED = Metric(
    "fskv_orphans_removed", "gauge", "files", "Parts of dead writers removed by that holder."
)
UNREMOVABLE_FILES = Metric(
    "fskv_unremovable_files",
    "gauge",
    "files",
    "Chunk files that could not be removed, and stay.",
)
LEASE_HELD = Metric(
    "fskv_lease_held", "gauge", "0 or 1", "Whether this engine's process maintains the root."
)
STORES_PAUSED = Metric(
    "fskv_stores_paused", "gauge", "0 or 1", "Whether stores pause because the disk was full."
)
MAINTENANCE_UP = Metric(
    "fskv_maintenance_up",
    "gauge",
    "0 or 1",
    "Whether this engine's maintenance process runs and was heard of in the last 20 s in which the engine "
    "listened.",
)
MAINTENANCE_RESTARTS = Metric(
    "fskv_maintenance_restarts",
    "counter",
    "times",
    "How often that process had to be started again, tries that failed included.",
)

# What the scheduler counts, what deciding between load and recompute does, and what the workers do.
SCHEDULER_COUNTERS = (LOOKUP_HITS, LOOKUP_MISSES, BREAKER_OPENINGS, MAINTENANCE_RESTARTS)
BUDGET_COUNTERS = (
    *(REQUESTS, LOADED_REQUESTS, LOADED_TOKENS, SAVED_SECONDS, DECLINED_TOKENS, CUT_LOADS),
)
WORKER_COUNTERS = (
    *(LOAD_FAILURES, LOADED_CHUNKS, LOADED_BYTES, LOAD_SECONDS),
    *(STORED_CHUNKS, STORED_BYTES, STORE_SECONDS, STORES_SKIPPED),
)

ALL_METRICS = (
    LOOKUP_HITS,
    LOOKUP_MISSES,
    LOAD_FAILURES,
    LOADED_CHUNKS,
    LOADED_BYTES,
    LOAD_SECONDS,
    LOAD_LATENCY,
    STORED_CHUNKS,
    STORED_BYTES,
    STORE_SECONDS,
    STORES_SKIPPED,
    REQUESTS,
    PENDING_LOADS,
    LOADED_REQUESTS,
    LOADED_TOKENS,
    SAVED_SECONDS,
    DECLINED_TOKENS,
    CUT_LOADS,
    PREFILL_RATE,
    SLOTS_IN_USE,
    THREADS_HUNG,
    STORE_QUEUE,
    BREAKER_OPEN,
    BREAKER_OPENINGS,
    WEIGHTS_IN_DOUBT,
    OFF,
    KNOWN_CHUNKS,
    QUARANTINED_CHUNKS,
    ROOT_INFO,
    NAMESPACE_INFO,
    ROOT_BYTES,
    ROOT_FILES,
    ROOT_FREE_BYTES,
    NAMESPACE_BYTES,
    TENANT_BYTES,
    BOUND_BYTES,
    BOUND_LEFT_BYTES,
    COUNTED_AT,
    PRUNED_FILES,
    PRUNED_BYTES,
    ORPHANS_REMOVED,
    UNREMOVABLE_FILES,
    LEASE_HELD,
    STORES_PAUSED,
    MAINTENANCE_UP,
    MAINTENANCE_RESTARTS,
)

# Of FskvMultiConnector alone, about its children; `connector` is on every series of theirs as well.
MULTI_LOADS = Metric(
    "fskv_multi_loads",
    "counter",
    "requests",
    "Requests whose KV was loaded from this child, failed loads included.",
    "connector",
)
MULTI_FAILED_LOADS = Metric(
    "fskv_multi_failed_loads",
    "counter",
    "requests",
    "Loads from this child that failed, so that the request was tried elsewhere or recomputed.",
    "connector",
)
MULTI_GIVEN_UP = Metric(
    "fskv_multi_given_up",
    "counter",
    "requests",
    "Requests that went on without this child's answer after `lookup_timeout_s`.",
    "connector",
)

MULTI_METRICS = (MULTI_LOADS, MULTI_FAILED_LOADS, MULTI_GIVEN_UP)


# Of a histogram between two drains; an engine whose statistics nobody takes must not remember more.
_MAX_OBSERVED = 4096


class Counters:
    """Sums by metric and label value since the last `drain`, and what was observed for histograms."""

    def __init__(self, *counters: Metric) -> None:
        """`counters` are in the first `drain` even if nothing was counted."""
        self._lock = threading.Lock()
        self._sums: dict[tuple[Metric, str], float] = {
            (metric, label): 0.0 for metric in counters for label in metric.values or ("",)
        }
        self._observed: dict[Metric, deque[float]] = {}

    def declare(self, metric: Metric, label: str) -> None:
        """Have it in the next `drain` even if nothing was counted."""
        with self._lock:
            self._sums.setdefault((metric, label), 0.0)

    def add(self, metric: Metric, amount: float = 1, label: str = "") -> None:
        """Count; an amount below zero counts nothing: Prometheus would raise for it, in vLLM's own loop."""
        if not amount > 0:
            return
        with self._lock:
            key = (metric, label)
            self._sums[key] = self._sums.get(key, 0) + amount

    def drain(self) -> dict[tuple[Metric, str], float]:
        """Return the sums and start again from zero."""
        with self._lock:
            sums, self._sums = self._sums, {}
        return sums

    def observe(self, metric: Metric, value: float) -> None:
        """Add to a histogram."""
        with self._lock:
            self._observed.setdefault(metric, deque(maxlen=_MAX_OBSERVED)).append(value)

    def drain_observed(self) -> dict[Metric, deque[float]]:
        """Return what was observed and start again from nothing."""
        with self._lock:
            observed, self._observed = self._observed, {}
        return observed
