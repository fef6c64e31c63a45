"""fskv.observe.metrics in vLLM's words: definitions for /metrics, and counters as connector stats."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from fskv.config import MIB
from fskv.observe import metrics
from fskv.observe.metrics import ALL_METRICS, Gauge, Metric


def name_of(metric: Metric) -> str:
    """Return the metric's name at vLLM's endpoint, with the prefix of vLLM's own."""
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


# Beside vLLM's keys of stats: by engine, what was counted since its start.
_SO_FAR = "so far"
_IN_LINE = (
    *(metrics.LOADED_REQUESTS, metrics.LOADED_TOKENS, metrics.SAVED_SECONDS),
    *(metrics.LOOKUP_HITS, metrics.LOOKUP_MISSES, metrics.LOADED_CHUNKS, metrics.LOADED_BYTES),
    *(metrics.STORED_CHUNKS, metrics.STORED_BYTES, metrics.LOAD_FAILURES, metrics.STORES_SKIPPED),
)


class FskvStats(OffloadingConnectorStats):
    """vLLM's statistics, shown in its log as events: "KV Transfer metrics: ...".

    The line is made of `SoFar`, since the start: vLLM logs an interval in which no request ended, and the
    one before neither, at level DEBUG, and forgets it.
    """

    def is_empty(self) -> bool:
        return super().is_empty() and not self.data.get(_SO_FAR)

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        made = super().aggregate(other)
        if newer := other.data.get(_SO_FAR):
            made.data[_SO_FAR] = {**made.data.get(_SO_FAR, {}), **newer}
        return made

    def reduce(self) -> dict[str, Any]:
        """Return the values to log, in order, without zeros."""
        # No ratio: of full attention a lookup ends at its first miss, however many chunks are behind it.
        words = {
            "requests loaded": self._requests(),
            "found": self._number(metrics.LOOKUP_HITS, " chunks"),
            "misses": self._number(metrics.LOOKUP_MISSES),
            "loaded": self._files(metrics.LOADED_CHUNKS, metrics.LOADED_BYTES),
            "stored": self._files(metrics.STORED_CHUNKS, metrics.STORED_BYTES),
            "loads failed": self._reasons(metrics.LOAD_FAILURES),
            "not stored": self._reasons(metrics.STORES_SKIPPED),
        }
        said = {word: text for word, text in words.items() if text}
        if not said:
            return {"fskv": "no chunk asked for, loaded or stored"}
        first = next(iter(said))
        return {f"fskv so far: {first}": said.pop(first), **said}

    def _number(self, metric: Metric, unit: str = "") -> str:
        amount = self._sum(metric)
        return f"{amount:.0f}{unit}" if amount else ""

    def _requests(self) -> str:
        known = self._labelled(metrics.SAVED_SECONDS)
        saved = f"about {self._sum(metrics.SAVED_SECONDS):.1f} s saved"
        tokens = f"{self._sum(metrics.LOADED_TOKENS):.0f} tokens from files"
        what = f" ({tokens}, {saved if known else 'saved: not known yet'})"
        return self._number(metrics.LOADED_REQUESTS, what)

    def _files(self, chunks: Metric, nbytes: Metric) -> str:
        return self._number(chunks, f" files ({self._sum(nbytes) / MIB:.1f} MiB)")

    def _reasons(self, metric: Metric) -> str:
        amounts = sorted(self._labelled(metric).items())
        told = ((label[0], amount) for label, amount in amounts if label[0] != "exists")
        return ", ".join(f"{amount:.0f} {reason}" for reason, amount in told if amount)

    def _labelled(self, metric: Metric) -> Mapping[tuple[str, ...], float]:
        found: Counter[tuple[str, ...]] = Counter()
        for sums in self.data.get(_SO_FAR, {}).values():
            found.update(sums.get(name_of(metric), {}))
        return found

    def _sum(self, metric: Metric) -> float:
        return sum(self._labelled(metric).values())


class SoFar:
    """The sums since the start for the log line of an engine, of the scheduler and of all workers.

    Belongs to the scheduler's thread.
    """

    def __init__(self) -> None:
        self._engine = secrets.token_hex(8)  # vLLM adds up the stats of several
        self._sums: dict[str, dict[tuple[str, ...], float]] = {}
        self._told = True

    def add(self, stats: KVConnectorStats | None, child: str = "") -> None:
        """Count the statistics of a step; of a MultiConnector's those of this child alone."""
        if isinstance(stats, MultiKVConnectorStats):
            stats = stats.data.get(child)
        if not isinstance(stats, OffloadingConnectorStats):
            return
        for metric in _IN_LINE:
            name = name_of(metric)
            for label, amount in stats.data["data"].get(name, {}).items():
                self._told = False
                if amount:  # what was never known, as of SAVED_SECONDS, is not in it
                    sums = self._sums.setdefault(name, {})
                    sums[label] = sums.get(label, 0.0) + amount

    def stamp(self, stats: KVConnectorStats | None) -> KVConnectorStats | None:
        """Return the scheduler's stats with the sums so far; None: nothing is new."""
        self.add(stats)
        if stats is None and self._told:
            return None
        self._told = True
        so_far = {name: dict(sums) for name, sums in self._sums.items()}
        return FskvStats(data={**(stats or FskvStats()).data, _SO_FAR: {self._engine: so_far}})


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
