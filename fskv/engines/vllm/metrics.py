"""fskv.observe.metrics in vLLM's words: definitions for /metrics, and counters as connector stats."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from fskv.bounds.status import RootState
from fskv.observe import metrics
from fskv.observe.metrics import ALL_METRICS, Metric


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Return every metric fskv may emit; vLLM asserts that a name it receives is among them."""
    definitions: dict[str, OffloadingMetricMetadata] = {}
    for metric in ALL_METRICS:
        text = f"{metric.meaning} [{metric.unit}]"
        labels = (metric.label,) if metric.label else ()
        if metric.kind == "histogram":
            made = OffloadingHistogramMetadata(text, labels, metric.buckets)
        elif metric.kind == "counter":
            made = OffloadingCounterMetadata(text, labels)
        else:
            made = OffloadingGaugeMetadata(text, labels)
        definitions[metric.name] = made
    return definitions


# A gauge without a label, or with the value of its label.
Gauge = Metric | tuple[Metric, str]


def root_gauges(state: RootState) -> dict[Gauge, float]:
    """Return what the maintenance process last said."""
    shown: dict[Gauge, float] = {
        metrics.ROOT_BYTES: float(state.nbytes),
        metrics.ROOT_FREE_BYTES: float(state.free),
        metrics.ROOT_FILES: float(state.files),
        metrics.NAMESPACE_BYTES: float(state.namespace_nbytes),
        metrics.TENANT_BYTES: float(state.tenant_nbytes),
        metrics.COUNTED_AT: state.counted_at_ms / 1000,
        metrics.PRUNED_FILES: float(state.pruned_files),
        metrics.PRUNED_BYTES: float(state.pruned_nbytes),
        metrics.ORPHANS_REMOVED: float(state.orphans),
        metrics.UNREMOVABLE_FILES: float(state.unremovable),
        metrics.LEASE_HELD: float(state.holder),
    }
    for bound, (limit, left) in state.bounds.items():
        shown[metrics.BOUND_BYTES, bound] = float(limit)
        shown[metrics.BOUND_LEFT_BYTES, bound] = float(left)
    return shown


def to_stats(
    sums: Mapping[tuple[Metric, str], float],
    gauges: Mapping[Gauge, float],
    observed: Mapping[Metric, Iterable[float]] | None = None,
) -> OffloadingConnectorStats | None:
    """Return counters, gauges and observations as vLLM's stats, or None when there is nothing to say."""
    stats = OffloadingConnectorStats()
    for (metric, label), amount in sums.items():
        stats.increase_counter(metric.name, amount, (label,) if metric.label else ())
    for gauge, value in gauges.items():
        if isinstance(gauge, tuple):
            stats.set_gauge(gauge[0].name, value, (gauge[1],))
        else:
            stats.set_gauge(gauge.name, value)
    for metric, values in (observed or {}).items():
        for one in values:
            stats.observe_histogram(metric.name, one)
    return None if stats.is_empty() else stats
