"""The metrics of an engine: their names and meanings, and counters that any thread may add to.

An engine's adapter drains the counters and publishes them. Standard library only.

A new metric is a constant here. `make reference` writes it into docs/metrics.md. A label has few values:
reasons, bounds, or one value of this engine.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
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


def counter(
    name: str, unit: str, meaning: str, label: str | None = None, values: tuple[str, ...] = ()
) -> Metric:
    return Metric(name, "counter", unit, meaning, label, values=values)


def gauge(name: str, unit: str, meaning: str, label: str | None = None) -> Metric:
    return Metric(name, "gauge", unit, meaning, label)


# A gauge without a label, or with the value of its label.
Gauge = Metric | tuple[Metric, str]

LOOKUP_HITS = counter("fskv_lookup_hits", "chunks", "Chunks that a lookup found, once per request.")
LOOKUP_MISSES = counter(
    "fskv_lookup_misses",
    "chunks",
    "Chunks that a lookup did not find, once per request and reason: absent (never stored, or"
    " another namespace), timed_out (after `lookup_timeout_s`), io_error, quarantined (a load "
    "failed shortly before), breaker.",
    "reason",
    values=("absent", "timed_out", "io_error", "quarantined", "breaker"),
)
LOAD_FAILURES = counter(
    "fskv_load_failures",
    "chunks",
    "Chunks that a lookup found and a load did not deliver; the request is recomputed. "
    "Reasons: absent (removed meanwhile), stale (another chunk's file under this "
    "name), corrupt (a checksum or a tag failed), no_key (of a key that the engine lacks), denied, "
    "timed_out, io_error, breaker.",
    "reason",
    values=(
        *("absent", "stale", "corrupt", "no_key"),
        *("denied", "timed_out", "io_error", "breaker"),
    ),
)
LOADED_CHUNKS = counter(
    "fskv_loaded_chunks",
    "chunks",
    "Loaded chunks that passed every check, those of failed requests included.",
)
LOADED_BYTES = counter("fskv_loaded_bytes", "bytes", "KV bytes of the loaded chunks.")
LOAD_SECONDS = counter(
    "fskv_load_seconds",
    "seconds",
    "Time of I/O threads in loads; bytes divided by it is the rate of one thread.",
)
LOAD_LATENCY = Metric(
    "fskv_load_latency_seconds",
    "histogram",
    "seconds",
    "Duration of a request's load, good or bad; each rank counts its part.",
    # A load may take as long as its deadline, 30 s at most by default.
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
STORED_CHUNKS = counter(
    "fskv_stored_chunks", "chunks", "Chunk files that were written and published."
)
STORED_BYTES = counter("fskv_stored_bytes", "bytes", "Bytes of the stored chunk files.")
STORE_SECONDS = counter("fskv_store_seconds", "seconds", "Time of I/O threads in stores.")
STORES_SKIPPED = counter(
    "fskv_stores_skipped",
    "chunks",
    "Chunks that were not stored. Reasons: exists (another engine was first), skipped (the "
    "queue was full, or the engine took the pages back), incomplete (the engine had freed "
    "blocks of the chunk), capacity (a bound is reached), breaker, no_space, denied, "
    "timed_out, io_error, absent or stale (directories vanished).",
    "reason",
    values=("skipped", "capacity", "no_space", "breaker", "io_error", "timed_out", "denied"),
)
ADMITTED = counter(
    "fskv_admitted_chunks", "chunks", "New chunks that were worth a write (`admission`)."
)
NOT_ADMITTED = counter(
    "fskv_not_admitted_chunks",
    "chunks",
    "New chunks that were not stored because they were seen for the first time (`admission`).",
)
NOT_ADMITTED_BYTES = counter(
    "fskv_not_admitted_bytes", "bytes", "Bytes of these, which were not written."
)
STORES_AT_FIRST_SIGHT = gauge(
    "fskv_stores_at_first_sight",
    "0 or 1",
    "1 while chunks are stored at first sight, 0 while at the second (`admission`).",
)
WRITTEN_UNREAD = gauge(
    "fskv_written_unread",
    "0 or 1",
    "1 while of what was stored in the last hour less than 1 % was loaded by any engine that"
    " reports to this root.",
)
# Requests, and the gains of hits.
REQUESTS = counter(
    "fskv_requests",
    "requests",
    "Requests with a lookup, by result: hit (a load began), miss (no file beyond the engine's"
    " own cache), unused (the hit was declined, or another connector served it).",
    "result",
    values=("hit", "miss", "unused"),
)
PENDING_LOADS = gauge(
    "fskv_pending_loads", "requests", "Requests whose load has begun and not ended."
)
LOADED_REQUESTS = counter(
    "fskv_loaded_requests", "requests", "Requests whose KV was loaded from files."
)
LOADED_TOKENS = counter(
    "fskv_loaded_tokens", "tokens", "Prompt tokens that were loaded from files."
)
SAVED_SECONDS = counter(
    "fskv_saved_seconds",
    "seconds",
    "Predicted time to compute the loaded tokens, less the time of their loads; 0 until a "
    "prefill rate is known.",
)
# Load or recompute (`load_budget`).
DECLINED_TOKENS = counter(
    "fskv_declined_tokens",
    "tokens",
    "Tokens of hits that were recomputed after a load was given up (`load_budget`).",
)
CUT_LOADS = counter(
    "fskv_cut_loads",
    "loads",
    "Loads that were given up at their time limit or deadline; the request is recomputed.",
)
PREFILL_RATE = gauge(
    "fskv_prefill_rate",
    "tokens per second",
    "Prompt tokens per second of recent steps with at least 256 prompt tokens, weighted "
    "towards new ones.",
)
SLOTS_IN_USE = gauge(
    "fskv_staging_slots_in_use",
    "slots",
    "Staging slots in use, those of hung threads included; with several ranks the value of one.",
)
THREADS_HUNG = gauge(
    "fskv_io_threads_hung",
    "threads",
    "I/O threads whose call hangs past its deadline; with several ranks the value of one.",
)
STORE_QUEUE = gauge(
    "fskv_store_queue_chunks",
    "chunks",
    "Chunks that wait for a store or are being written; with several ranks the value of one.",
)
BREAKER_OPEN = gauge(
    "fskv_breaker_open",
    "0 or 1",
    "1 while the breaker of the scheduler or of a worker is open: fskv leaves the root alone. "
    "A worker's state is that of the engine's last step.",
)
BREAKER_OPENINGS = counter(
    "fskv_breaker_openings",
    "times",
    "Openings of the scheduler's breaker, those between two scrapes included.",
)
WEIGHT_EPOCH = gauge(
    "fskv_weight_epoch", "", "Updates of the running engine's weights that have begun a namespace."
)
WEIGHTS_IN_DOUBT = gauge(
    "fskv_weights_in_doubt",
    "0 or 1",
    "1 while the weights are not those of the namespace: nothing is loaded or stored.",
)
OFF = gauge(
    "fskv_off",
    "0 or 1",
    "1 when prefix caching is off or the KV layout is unknown: nothing is loaded or stored.",
)
KNOWN_CHUNKS = gauge(
    "fskv_known_chunks", "chunks", "Chunks with a known presence or absence, at most 250,000."
)
QUARANTINED_CHUNKS = gauge(
    "fskv_quarantined_chunks",
    "chunks",
    "Chunks that count as missing after a failed load, for 30 s or until the next store; at "
    "most 1,000 are counted.",
)
ROOT_INFO = gauge("fskv_root_info", "1", "Always 1; the label is the root of this engine.", "root")
NAMESPACE_INFO = gauge(
    "fskv_namespace_info",
    "1",
    "Always 1; the label is the namespace of this engine's start.",
    "namespace",
)

# Values of the maintenance process; counts are of the present holder of the lease.
ROOT_BYTES = gauge(
    "fskv_root_bytes", "bytes", "Disk usage of all chunk files of the root, by the last count."
)
ROOT_FILES = gauge("fskv_root_files", "files", "Chunk files of the root.")
ROOT_FREE_BYTES = gauge(
    "fskv_root_free_bytes", "bytes", "Free space of the root's file system for this user."
)
NAMESPACE_BYTES = gauge(
    "fskv_namespace_bytes",
    "bytes",
    "Disk usage of the chunk files of this engine's namespace, by the last count.",
)
BOUND_BYTES = gauge(
    "fskv_bound_bytes",
    "bytes",
    "The bounds in force: root, tenant, and free (the most that may be in use on the file "
    "system). The smallest bound of all engines and watchers counts. +Inf: none.",
    "bound",
)
BOUND_LEFT_BYTES = gauge(
    "fskv_bound_left_bytes", "bytes", "Space left below the bound; 0 at the bound.", "bound"
)
COUNTED_AT = gauge(
    "fskv_counted_at_seconds",
    "seconds since 1970",
    "Time of the last count of the root, by the clock of the node that counted; 0: never.",
)
PRUNED_FILES = gauge(
    "fskv_pruned_files", "files", "Chunk files that the present leader has pruned."
)
PRUNED_BYTES = gauge("fskv_pruned_bytes", "bytes", "Disk space of the pruned chunk files.")
ORPHANS_REMOVED = gauge(
    "fskv_orphans_removed",
    "files",
    "Unfinished files of dead writers that the present leader has removed.",
)
UNREMOVABLE_FILES = gauge(
    "fskv_unremovable_files",
    "files",
    "Chunk files that the leader could not remove; the log names the first.",
)
LEASE_HELD = gauge(
    "fskv_lease_held",
    "0 or 1",
    "1 on the engine with the leading maintenance process: it counts and prunes for all.",
)
STORES_PAUSED = gauge(
    "fskv_stores_paused", "0 or 1", "1 while stores pause because the disk or a quota was full."
)
MAINTENANCE_UP = gauge(
    "fskv_maintenance_up",
    "0 or 1",
    "1 while this engine's maintenance process runs and answered within 20 s. With 0 nothing "
    "is stored; loads go on.",
)
MAINTENANCE_RESTARTS = counter(
    "fskv_maintenance_restarts",
    "times",
    "Restarts of the maintenance process, failed attempts included.",
)

# Counters of the scheduler, of the choice between load and recompute, and of the workers.
SCHEDULER_COUNTERS = (
    *(LOOKUP_HITS, LOOKUP_MISSES, BREAKER_OPENINGS, MAINTENANCE_RESTARTS),
    *(ADMITTED, NOT_ADMITTED, NOT_ADMITTED_BYTES),
)
BUDGET_COUNTERS = (
    *(REQUESTS, LOADED_REQUESTS, LOADED_TOKENS, SAVED_SECONDS, DECLINED_TOKENS, CUT_LOADS),
)
WORKER_COUNTERS = (
    *(LOAD_FAILURES, LOADED_CHUNKS, LOADED_BYTES, LOAD_SECONDS),
    *(STORED_CHUNKS, STORED_BYTES, STORE_SECONDS, STORES_SKIPPED),
)

# All that stand above, in that order.
ALL_METRICS = tuple(found for found in vars().values() if isinstance(found, Metric))

# Of FskvMultiConnector alone, about its children; `connector` is on every series of theirs as well.
MULTI_LOADS = counter(
    "fskv_multi_loads",
    "requests",
    "Requests whose KV was loaded from this child, failed loads included.",
    "connector",
)
MULTI_FAILED_LOADS = counter(
    "fskv_multi_failed_loads",
    "requests",
    "Loads from this child that failed; the request was tried elsewhere or recomputed.",
    "connector",
)
MULTI_GIVEN_UP = counter(
    "fskv_multi_given_up",
    "requests",
    "Requests that went on without this child's answer after `lookup_timeout_s`.",
    "connector",
)

MULTI_METRICS = (MULTI_LOADS, MULTI_FAILED_LOADS, MULTI_GIVEN_UP)


# Of a histogram between two drains; an engine whose statistics nobody takes must not remember more.
_MAX_OBSERVED = 4096


class Counters:
    """Sums by metric and label value since the last `drain`, and observations for histograms."""

    def __init__(self, *counters: Metric, labels: Sequence[str] = ("",)) -> None:
        """`counters` are in the first `drain` at zero; those without values have these `labels`."""
        self._lock = threading.Lock()
        self._sums: dict[tuple[Metric, str], float] = {
            (metric, label): 0.0 for metric in counters for label in metric.values or labels
        }
        self._observed: dict[Metric, deque[float]] = {}

    def add(self, metric: Metric, amount: float = 1, label: str = "") -> None:
        """Add `amount`, unless it is below zero: Prometheus would raise for that, in vLLM's own loop."""
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
        """Add a value to the histogram of a metric."""
        with self._lock:
            self._observed.setdefault(metric, deque(maxlen=_MAX_OBSERVED)).append(value)

    def drain_observed(self) -> dict[Metric, deque[float]]:
        """Return the observations and start again from none."""
        with self._lock:
            observed, self._observed = self._observed, {}
        return observed
