"""fskv.metrics in vLLM's words: definitions for /metrics, and counters as connector stats."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

from fskv.metrics import ALL_METRICS, Metric


def metric_definitions() -> dict[str, OffloadingMetricMetadata]:
    """Return every metric fskv may emit; vLLM asserts that a name it receives is among them."""
    definitions: dict[str, OffloadingMetricMetadata] = {}
    for metric in ALL_METRICS:
        kind = OffloadingCounterMetadata if metric.kind == "counter" else OffloadingGaugeMetadata
        definitions[metric.name] = kind(
            documentation=f"{metric.meaning} [{metric.unit}]",
            labelnames=(metric.label,) if metric.label else (),
        )
    return definitions


def to_stats(
    sums: Mapping[tuple[Metric, str], float], gauges: Mapping[Metric, float]
) -> OffloadingConnectorStats | None:
    """Return counters and gauges as vLLM's stats payload, or None when there is nothing to say."""
    stats = OffloadingConnectorStats()
    for (metric, label), amount in sums.items():
        stats.increase_counter(metric.name, amount, (label,) if metric.label else ())
    for metric, value in gauges.items():
        stats.set_gauge(metric.name, value)
    return None if stats.is_empty() else stats
