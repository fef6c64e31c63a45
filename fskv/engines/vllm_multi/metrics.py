"""Metrics of several connectors in one engine: a label for each child, and one metric where names are equal.

vLLM's MultiConnector keeps statistics by class name, so two children of one class become one, and two
classes that define a metric of the same name cannot be registered at all. Here each child has a name of its
own, which its statistics carry to the process that serves /metrics; there every series gets it as a label.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiKVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

from fskv.engines.vllm.metrics import name_of
from fskv.observe.metrics import MULTI_METRICS, Counters

LABEL = "connector"
_OWN = "FskvMultiConnector"  # the id of what the choice itself counts


def stats_id(name: str, transfer: KVTransferConfig) -> str:
    """Return a child's id: it must tell the class to a process that has nothing else."""
    return f"{name}|{transfer.kv_connector}|{transfer.kv_connector_module_path or ''}"


def own_stats(counters: Counters) -> dict[str, KVConnectorStats]:
    """Return what was counted since the last call, by id; empty when that is nothing."""
    sums = counters.drain()
    if not sums:
        return {}
    stats = OffloadingConnectorStats()
    for (metric, child), amount in sums.items():
        stats.increase_counter(name_of(metric), amount, (child,))
    return {_OWN: stats}


def rebuild(data: Mapping[str, Any] | None) -> MultiKVConnectorStats:
    """Return statistics from what came through another process, each of its own class again."""
    found: dict[str, Any] = {}
    for child_id, payload in (data or {}).items():
        if isinstance(payload, KVConnectorStats):
            found[child_id] = payload
        elif child_id == _OWN:
            found[child_id] = OffloadingConnectorStats(data=payload)
        else:
            _, connector, module = child_id.rsplit("|", 2)
            cls = KVConnectorFactory.get_connector_class(
                KVTransferConfig(
                    kv_connector=connector,
                    kv_connector_module_path=module or None,
                    kv_role="kv_both",
                )
            )
            if (stats := cls.build_kv_connector_stats(data=payload)) is not None:
                found[child_id] = stats
    return MultiKVConnectorStats(data=found)


class MultiPromMetrics(KVConnectorPromMetrics):
    """The children's metrics, each series with its child's name."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        children: Sequence[tuple[str, type[Any], VllmConfig]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        shared = _Shared(metric_types)
        self._children: dict[str, KVConnectorPromMetrics] = {}
        for idx, (name, cls, config) in enumerate(children):
            labelled = {idx: [*values, name] for idx, values in per_engine_labelvalues.items()}
            made = cls.build_prom_metrics(
                config, shared.types_for(idx), [*labelnames, LABEL], labelled
            )
            if made is not None:
                transfer = config.kv_transfer_config
                assert transfer is not None
                self._children[stats_id(name, transfer)] = made
        self._own = {
            name_of(metric): self._counter_cls(
                name=name_of(metric),
                documentation=f"{metric.meaning} [{metric.unit}]",
                labelnames=[*labelnames, LABEL],
            )
            for metric in MULTI_METRICS
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for child_id, payload in transfer_stats_data.items():
            if child_id in self._children:
                self._children[child_id].observe(payload, engine_idx)
            elif child_id == _OWN:
                self._observe_own(payload, engine_idx)

    def _observe_own(self, payload: dict[str, Any], engine_idx: int) -> None:
        for name, by_child in payload["data"].items():
            for labels, amount in by_child.items():
                values = [*self.per_engine_labelvalues[engine_idx], *labels]
                self._own[name].labels(*values).inc(amount)


class _Shared:
    """Stands for the classes of metrics: who asks for a name that is there gets that metric.

    Unless it is defined with other labels (0.33: vllm:kv_offload_config_info has one for each setting): it
    gets the child's number behind its name then, for one name has one set of labels in Prometheus.
    """

    def __init__(self, metric_types: Mapping[Any, Any]) -> None:
        self._types = metric_types
        self._made: dict[str, tuple[object, Any]] = {}

    def types_for(self, child: int) -> dict[Any, Callable[..., Any]]:
        return {key: self._maker(cls, child) for key, cls in self._types.items()}

    def _maker(self, cls: Any, child: int) -> Callable[..., Any]:
        def make(
            name: str, documentation: str | None = "", labelnames: Any = (), **more: Any
        ) -> Any:
            kind = (cls, tuple(labelnames))
            if name in self._made and self._made[name][0] != kind:
                name = f"{name}_connector{child}"
            if name not in self._made:
                metric = cls(name=name, documentation=documentation, labelnames=labelnames, **more)
                self._made[name] = (kind, metric)
            return self._made[name][1]

        return make
