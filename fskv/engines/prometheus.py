"""Registers fskv.observe.metrics with prometheus_client, so that the engine's own /metrics serves them."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from functools import cache
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from fskv.observe.metrics import Metric
from fskv.offload import BlockingStore, KvStore

logger = logging.getLogger(__name__)

_EVERY_S = 1.0
_AGAIN_S = 600.0  # after it has failed


class Publisher:
    """Publishes a store's metrics since the last call; any thread may call it, one at a time."""

    def __init__(self, engine: str, labels: Mapping[str, str]) -> None:
        """A metric is called `engine`:fskv_... and has `labels`, as the engine's own have."""
        self._engine = engine
        self._labels = dict(labels)
        self._next_at = 0.0

    def publish(self, store: BlockingStore, *, now: bool = False) -> None:
        """Take counters, gauges and observations to Prometheus, once a second or `now`; never raises."""
        if not now and time.monotonic() < self._next_at:
            return
        self._next_at = time.monotonic() + _EVERY_S
        try:
            store.with_store(self._publish)
        except Exception:  # what was moved is good all the same
            self._next_at = time.monotonic() + _AGAIN_S
            logger.exception("fskv: metrics of %s are not published", self._labels)

    def _publish(self, kv: KvStore) -> None:
        sums, gauges = kv.watch.read()
        for (metric, label), amount in [*sums.items(), *kv.mover.counters.drain().items()]:
            self._of(metric, label).inc(amount)
        for gauge, value in [*gauges.items(), *kv.mover.gauges().items()]:
            metric, label = gauge if isinstance(gauge, tuple) else (gauge, "")
            self._of(metric, label).set(value)
        for metric, values in kv.mover.counters.drain_observed().items():
            for value in values:
                self._of(metric, "").observe(value)

    def _of(self, metric: Metric, label: str) -> Any:
        own = {metric.label: label} if metric.label else {}
        return _made(f"{self._engine}:{metric.name}", metric, tuple(self._labels)).labels(
            **self._labels, **own
        )


@cache
def _made(name: str, metric: Metric, labels: tuple[str, ...]) -> Any:
    """Return the one collector of a metric: Prometheus refuses a second one of its name."""
    names = (*labels, metric.label) if metric.label else labels
    text = f"{metric.meaning} [{metric.unit}]"
    if metric.kind == "histogram":
        return Histogram(name, text, names, buckets=metric.buckets)
    if metric.kind == "counter":
        return Counter(name, text, names)
    return Gauge(name, text, names, multiprocess_mode="mostrecent")
