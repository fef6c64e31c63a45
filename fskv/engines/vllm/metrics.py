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

from fskv.observe.metrics import ALL_METRICS, Gauge, Metric


def name_of(metric: Metric) -> str:
    """Return what vLLM publishes it as: its own metrics begin so, too."""
    return f"vllm:{metric.name}"


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
        definitions[name_of(metric)] = made
    return definitions


def to_stats(
    sums: Mapping[tuple[Metric, str], float],
    gauges: Mapping[Gauge, float],
    observed: Mapping[Metric, Iterable[float]] | None = None,
) -> OffloadingConnectorStats | None:
    """Return counters, gauges and observations as vLLM's stats, or None when there is nothing to say."""
    stats = OffloadingConnectorStats()
    for (metric, label), amount in sums.items():
        stats.increase_counter(name_of(metric), amount, (label,) if metric.label else ())
    for gauge, value in gauges.items():
        if isinstance(gauge, tuple):
            stats.set_gauge(name_of(gauge[0]), value, (gauge[1],))
        else:
            stats.set_gauge(name_of(gauge), value)
    for metric, values in (observed or {}).items():
        for one in values:
            stats.observe_histogram(name_of(metric), one)
    return None if stats.is_empty() else stats
