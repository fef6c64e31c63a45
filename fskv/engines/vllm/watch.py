"""What an engine's scheduler shows of its cache: gauges, and for the health file what is amiss."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

from fskv import __version__
from fskv.bounds.client import Capacity
from fskv.config import StoreConfig
from fskv.data_path.breaker import Breaker
from fskv.engines.vllm.metrics import Gauge, root_gauges, to_stats
from fskv.index.presence import PresenceIndex
from fskv.observe import metrics
from fskv.observe.health_file import STARTING, HealthFile
from fskv.observe.metrics import Counters, Metric
from fskv.types import Status

_CORRUPT_S = 600.0  # so long a corrupt chunk is said to be amiss
_BOUNDS = (metrics.BOUND_BYTES, metrics.BOUND_LEFT_BYTES)


class Watch:
    """Belongs to the scheduler's thread; `_amiss` is called on that of the health file and only reads.

    The manager assigns `namespace`, `capacity`, `in_doubt` and `off` as they become known.
    """

    def __init__(
        self, config: StoreConfig, breaker: Breaker, presence: PresenceIndex, engine_rank: int
    ) -> None:
        self.namespace: str | None = None  # in the root; None: the workers have not opened it yet
        self.capacity: Capacity | None = None
        self.in_doubt = False  # the manager has stopped: it decides, this only tells
        self.off: str | None = (
            None  # why the manager neither loads nor stores: vLLM does not reuse KV
        )
        self._config = config
        self._breaker = breaker
        self._presence = presence
        self._shown: dict[Gauge, float] = {}  # what the gauges say: they keep their last value
        self._counted: dict[Metric, int] = {}  # of `_totals`, what the counters have
        self._num_corrupt = 0
        self._corrupt_at = -math.inf  # when the last one was found
        self._health: HealthFile | None = None
        if config.health_file is not None:
            path = config.health_file.replace("{rank}", str(engine_rank))
            facts = {"root": config.root, "engine_rank": engine_rank, "version": __version__}
            self._health = HealthFile(path, self._amiss, facts)
            self._health.start()

    def note(self, failures: Iterable[Status]) -> None:
        """Loads have failed like this."""
        num_corrupt = sum(status is Status.CORRUPT for status in failures)
        if num_corrupt:
            self._num_corrupt += num_corrupt
            self._corrupt_at = time.monotonic()

    def stats(self, counters: Counters) -> OffloadingConnectorStats | None:
        """Return what was counted since the last call, and the gauges that have changed."""
        for metric, total in self._totals().items():
            counters.add(metric, total - self._counted.get(metric, 0))
            self._counted[metric] = total
        shown = self._gauges()
        gauges = {gauge: value for gauge, value in shown.items() if self._shown.get(gauge) != value}
        self._shown |= gauges
        return to_stats(counters.drain(), gauges)

    def close(self) -> None:
        if self._health is not None:
            self._health.close()

    def _totals(self) -> dict[Metric, int]:
        """Return what others count since the start."""
        totals = {metrics.BREAKER_OPENINGS: self._breaker.num_openings}
        if self.capacity is not None:
            totals[metrics.MAINTENANCE_RESTARTS] = self.capacity.num_restarts
        return totals

    def _gauges(self) -> dict[Gauge, float]:
        shown: dict[Gauge, float] = {
            metrics.BREAKER_OPEN: float(self._breaker.open),
            metrics.WEIGHTS_IN_DOUBT: float(self.in_doubt),
            metrics.KNOWN_CHUNKS: float(self._presence.num_known),
            metrics.QUARANTINED_CHUNKS: float(self._presence.num_quarantined),
            (metrics.ROOT_INFO, self._config.root): 1.0,
        }
        if self.namespace is not None:
            shown[metrics.NAMESPACE_INFO, self.namespace] = 1.0
        if self.capacity is not None:
            shown |= root_gauges(self.capacity.state)
            shown[metrics.STORES_PAUSED] = float(self.capacity.paused)
            shown[metrics.MAINTENANCE_UP] = float(self.capacity.up)
            if self._config.tenant is None:
                del shown[metrics.TENANT_BYTES]
        for gauge in self._shown.keys() - shown.keys():
            # Whoever declared it is gone, and a gauge keeps its last value.
            if isinstance(gauge, tuple) and gauge[0] in _BOUNDS:
                shown[gauge] = math.inf
        return shown

    def _amiss(self) -> dict[str, str]:
        """Return a sentence for each condition that is not as it should be."""
        amiss = {}
        if self.namespace is None:
            amiss[STARTING] = "the workers have not opened the root yet"
        if self.in_doubt:
            amiss["weights_in_doubt"] = "weights in doubt: neither loads nor stores until a restart"
        if self.off is not None:
            amiss["prefix_caching_off"] = self.off
        if self._breaker.open:
            amiss["breaker_open"] = f"breaker open: {self._breaker.reason}"
        if time.monotonic() - self._corrupt_at < _CORRUPT_S:
            found = self._num_corrupt
            amiss["corrupt_chunks"] = f"{found} corrupt chunks were found, and recomputed"
        if self.capacity is not None:
            if self.capacity.paused:
                amiss["stores_paused"] = "stores paused: the disk is full"
            if not self.capacity.up:
                amiss["maintenance_gone"] = "no maintenance process is heard of: nothing is stored"
        return amiss
