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
from fskv.observe.metrics import MULTI_METRICS

LABEL = "connector"
OWN = "FskvMultiConnector"  # the id of what the choice itself counts


def stats_id(name: str, transfer: KVTransferConfig) -> str:
    """Return a child's id, which names the child's class to a process without the child."""
    return f"{name}|{transfer.kv_connector}|{transfer.kv_connector_module_path or ''}"


def rebuild(data: Mapping[str, Any] | None) -> MultiKVConnectorStats:
    """Rebuild statistics that came through another process, each of its own class again."""
    found: dict[str, Any] = {}
    for child_id, payload in (data or {}).items():
        if isinstance(payload, KVConnectorStats):
            found[child_id] = payload
        elif child_id == OWN:
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
        names: Sequence[str],
        children: Sequence[tuple[type[Any], VllmConfig]],
        vllm_config: VllmConfig,
        metric_types: Mapping[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        labelnames = [*labelnames, LABEL]
        made: _Made = {}
        self._children: dict[str, KVConnectorPromMetrics] = {}
        for idx, (name, (cls, config)) in enumerate(zip(names, children, strict=True)):
            types = {key: _sharing(kind, made, idx) for key, kind in metric_types.items()}
            labelled = {engine: [*each, name] for engine, each in per_engine_labelvalues.items()}
            child = cls.build_prom_metrics(config, types, labelnames, labelled)
            if child is not None:
                self._children[stats_id(name, config.kv_transfer_config)] = child
        self._own = {
            name_of(metric): self._counter_cls(
                name=name_of(metric),
                documentation=f"{metric.meaning} [{metric.unit}]",
                labelnames=labelnames,
            )
            for metric in MULTI_METRICS
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        own = transfer_stats_data.get(OWN, {"data": {}})
        for name, by_child in own["data"].items():
            for labels, amount in by_child.items():
                values = [*self.per_engine_labelvalues[engine_idx], *labels]
                self._own[name].labels(*values).inc(amount)
        for child_id in transfer_stats_data.keys() & self._children.keys():
            self._children[child_id].observe(transfer_stats_data[child_id], engine_idx)


_Made = dict[str, tuple[object, Any]]  # by name: class and labels, and the metric


def _sharing(cls: Any, made: _Made, child: int) -> Callable[..., Any]:
    """Return a stand-in for a class of metrics: a name that exists gives the metric of before.

    With other labels (0.33: vllm:kv_offload_config_info has one for each setting) it gets the child's number
    behind its name, because Prometheus has one set of labels for a name.
    """

    def make(
        name: str, documentation: str = "", labelnames: Sequence[str] = (), **more: Any
    ) -> Any:
        kind = (cls, tuple(labelnames))
        if name in made and made[name][0] != kind:
            name = f"{name}_connector{child}"
        if name not in made:
            metric = cls(name=name, documentation=documentation, labelnames=labelnames, **more)
            made[name] = (kind, metric)
        return made[name][1]

    return make
