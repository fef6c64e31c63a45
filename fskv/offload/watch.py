"""The view of an engine's cache from outside: counters, gauges, and the conditions of the health file."""

from __future__ import annotations

import math
import time

from fskv import __version__
from fskv.bounds.limits import RootState
from fskv.config import StoreConfig
from fskv.observe import metrics
from fskv.observe.health_file import STARTING, HealthFile
from fskv.observe.metrics import Gauge, Metric
from fskv.offload.lookup import Lookup
from fskv.offload.mover import News
from fskv.types import Status

_CORRUPT_S = 600.0  # so long a corrupt chunk is a condition
_REFUSED_S = 5.0  # a burst of stores may be refused for a moment
_BREAKER = "breaker_open"
_BOUNDS = (metrics.BOUND_BYTES, metrics.BOUND_LEFT_BYTES)


class Watch:
    """The metrics and the health file of a scheduler.

    Its owner, on the scheduler's thread, assigns `namespace`, `in_doubt` and `off` as they become known. The
    health file's thread calls `_unhealthy`, which only reads.
    """

    def __init__(self, config: StoreConfig, lookup: Lookup, engine_rank: int) -> None:
        self.namespace: str | None = None  # in the root; None: the workers have not opened it yet
        self.in_doubt = False  # the weights may be others: the lookup was stopped for good
        self.resting = ""  # why it is stopped until a change of the weights is over; "": it is not
        self.epoch = 0  # the number of updates that began a namespace
        # The condition for which the engine neither loads nor stores as long as it runs, and in words.
        self.off: tuple[str, str] | None = None
        self._config = config
        self._lookup = lookup
        self._shown: dict[Gauge, float] = {}  # what the gauges say: they keep their last value
        self._counted: dict[Metric, int] = {}  # of `_totals`, what the counters have
        self._num_corrupt = 0
        self._corrupt_at = -math.inf  # when the last one was found
        self._unhealthy_movers: dict[int, dict[str, str]] = {}
        self._health: HealthFile | None = None
        self.health_file: str | None = None
        if config.health_file is not None:
            self.health_file = config.health_file.replace("{rank}", str(engine_rank))
            facts = {"root": config.root, "engine_rank": engine_rank, "version": __version__}
            self._health = HealthFile(self.health_file, self._unhealthy, facts)
            self._health.start()

    def note(self, news: News) -> None:
        """Take a mover's unhealthy conditions and failed loads."""
        if news.unhealthy:
            self._unhealthy_movers = self._unhealthy_movers | news.unhealthy
        num_corrupt = sum(status is Status.CORRUPT for status in news.failed_loads.values())
        if num_corrupt:
            self._num_corrupt += num_corrupt
            self._corrupt_at = time.monotonic()

    def read(self) -> tuple[dict[tuple[Metric, str], float], dict[Gauge, float]]:
        """Return the counts since the last call, and the gauges that have changed."""
        counters = self._lookup.counters
        for metric, total in self._totals().items():
            counters.add(metric, total - self._counted.get(metric, 0))
            self._counted[metric] = total
        shown = self._gauges()
        gauges = {gauge: value for gauge, value in shown.items() if self._shown.get(gauge) != value}
        self._shown |= gauges
        return counters.drain(), gauges

    def close(self) -> None:
        if self._health is not None:
            self._health.close()

    def _totals(self) -> dict[Metric, int]:
        """Return the sums since the start that other parts count."""
        totals = {metrics.BREAKER_OPENINGS: self._lookup.breaker.num_openings}
        if self._lookup.capacity is not None:
            totals[metrics.MAINTENANCE_RESTARTS] = self._lookup.capacity.num_restarts
        return totals

    def _gauges(self) -> dict[Gauge, float]:
        shown: dict[Gauge, float] = {
            metrics.BREAKER_OPEN: float(self._breaker_open()),
            metrics.WEIGHTS_IN_DOUBT: float(self.in_doubt or bool(self.resting)),
            metrics.WEIGHT_EPOCH: float(self.epoch),
            metrics.OFF: float(self.off is not None),
            metrics.KNOWN_CHUNKS: float(self._lookup.presence.num_known),
            metrics.QUARANTINED_CHUNKS: float(self._lookup.presence.num_quarantined),
            (metrics.ROOT_INFO, self._config.root): 1.0,
        }
        if self.namespace is not None:
            shown[metrics.NAMESPACE_INFO, self.namespace] = 1.0
        if self._lookup.capacity is not None:
            shown |= root_gauges(self._lookup.capacity.state)
            shown[metrics.STORES_PAUSED] = float(self._lookup.capacity.paused)
            shown[metrics.MAINTENANCE_UP] = float(self._lookup.capacity.up)
            shown[metrics.STORES_AT_FIRST_SIGHT] = float(self._lookup.admission.stores_all)
            shown[metrics.WRITTEN_UNREAD] = float(bool(self._lookup.unread))
        for gauge in self._shown.keys() - shown.keys():
            # The engine that declared it is gone, and a gauge keeps its last value.
            if isinstance(gauge, tuple) and gauge[0] in _BOUNDS:
                shown[gauge] = math.inf
        return shown

    def _breaker_open(self) -> bool:
        """Return whether the lookup's own breaker is open, or a mover's by its last report."""
        return self._lookup.breaker.open or any(
            _BREAKER in unhealthy for unhealthy in self._unhealthy_movers.values()
        )

    def _unhealthy(self) -> dict[str, str]:
        """Return a sentence for each unhealthy condition."""
        unhealthy: dict[str, str] = {}
        for _, conditions in sorted(self._unhealthy_movers.items(), reverse=True):
            unhealthy |= conditions  # of several that of the first rank
        if self.namespace is None and self.off is None:
            unhealthy[STARTING] = "the workers have not opened the root yet"
        if self.resting:
            unhealthy["weights_changing"] = f"neither loads nor stores: {self.resting}"
        if self.in_doubt:
            unhealthy["weights_in_doubt"] = (
                "weights in doubt: neither loads nor stores until a restart"
            )
        if self.off is not None:
            condition, reason = self.off
            unhealthy[condition] = reason
        if self._lookup.breaker.open:
            unhealthy[_BREAKER] = f"breaker open: {self._lookup.breaker.reason}"
        if time.monotonic() - self._corrupt_at < _CORRUPT_S:
            found = self._num_corrupt
            unhealthy["corrupt_chunks"] = f"{found} corrupt chunks were found, and recomputed"
        if self._lookup.refused_s >= _REFUSED_S:
            unhealthy["stores_refused"] = (
                f"no room for {self._lookup.refused_s:.0f} s: nothing is stored; a bound or keep_free is "
                "reached and pruning does not help"
            )
        if self._lookup.asks and (unread := self._lookup.unread):
            unhealthy["written_unread"] = (
                unread  # what a producer stores others load, and may not tell
            )
        if self._lookup.capacity is not None:
            if self._lookup.capacity.paused:
                unhealthy["stores_paused"] = "stores paused: the disk is full"
            if not self._lookup.capacity.up:
                unhealthy["maintenance_gone"] = (
                    "no maintenance process is heard of: nothing is stored"
                )
        return unhealthy


def root_gauges(state: RootState) -> dict[Gauge, float]:
    """Return the last values of the maintenance process."""
    shown: dict[Gauge, float] = {
        metrics.ROOT_BYTES: float(state.usage.nbytes),
        metrics.ROOT_FREE_BYTES: float(state.free),
        metrics.ROOT_FILES: float(state.usage.num_files),
        metrics.NAMESPACE_BYTES: float(state.namespace_nbytes),
        metrics.COUNTED_AT: state.usage.at_ms / 1000,
        metrics.PRUNED_FILES: float(state.usage.pruned_files),
        metrics.PRUNED_BYTES: float(state.usage.pruned_nbytes),
        metrics.ORPHANS_REMOVED: float(state.usage.orphans),
        metrics.UNREMOVABLE_FILES: float(state.usage.unremovable),
        metrics.LEASE_HELD: float(state.holder),
    }
    for bound, (limit, left) in state.bounds.items():
        shown[metrics.BOUND_BYTES, bound] = float(limit)
        shown[metrics.BOUND_LEFT_BYTES, bound] = float(max(0, left))
    return shown
