"""The Prometheus endpoint of `fskv prune --watch`: the last known state of the root.

It has its own thread and never touches the root. A root that hangs shows in
`fskv_root_last_step_age_seconds` and does not hang the metrics. METRICS and docs/metrics.md have every
metric.

The MAX_NAMES largest namespaces and tenants have names; the others are one sum.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from fskv import __version__
from fskv.bounds.limits import Usage, scopes
from fskv.bounds.maintenance import Seen
from fskv.root.filesystem import Space

from .exits import CommandError
from .terminal import show

MAX_NAMES = 50
OTHERS = "(others)"
_IDLE_S = 10.0  # of a connection


@dataclass(frozen=True, slots=True)
class RootMetric:
    """One metric of the endpoint."""

    name: str
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()
    kind: str = "gauge"  # or "counter"


_LIMITS = (
    "The bounds in force. `kind`: root, tenant, or free (the most that may be in use on the file system); "
    "`name`: the tenant. The smallest bound of all engines and watchers counts."
)
_INODES = "Inodes of the file system; 0 where it reports no such number, or an impossible one."
_HEADROOM = "Space left below the bound; negative above it."
_COUNT_AGE = "Time since the last walk of the root, by this node's clock."
_STEP_AGE = "Time since the root last answered this watcher."
_LEASE = "1 while this watcher is the leader: it counts and prunes for all."
_PRUNED = "Chunk files that the present leader has pruned; starts again with another leader."
_ORPHANS = "Unfinished files of dead writers that the present leader has removed."
_TENANT = 'Disk usage of a tenant\'s namespaces; tenant "": those without a tenant.'
_OF_BOUND, _OF_NAMESPACE = ("kind", "name"), ("namespace", "tenant")
_METRICS = (
    RootMetric(
        "info", "1", "Always 1; the labels are the root and fskv's version.", ("root", "version")
    ),
    RootMetric("last_step_age_seconds", "seconds", _STEP_AGE),
    RootMetric("lease_held", "0 or 1", _LEASE),
    RootMetric("heartbeats", "engines", "Live engines and watchers, this one included."),
    RootMetric("total_bytes", "bytes", "Size of the file system."),
    RootMetric("free_bytes", "bytes", "Free space of the file system for this user."),
    RootMetric("total_inodes", "inodes", _INODES),
    RootMetric("free_inodes", "inodes", "Free inodes of the file system for this user."),
    RootMetric("limit_bytes", "bytes", _LIMITS, _OF_BOUND),
    RootMetric("headroom_bytes", "bytes", _HEADROOM, _OF_BOUND),
    RootMetric("namespace_bytes", "bytes", "Disk usage of a namespace.", _OF_NAMESPACE),
    RootMetric(
        "namespace_files", "files", "Chunk files of a namespace, by the last walk.", _OF_NAMESPACE
    ),
    RootMetric("tenant_bytes", "bytes", _TENANT, ("tenant",)),
    RootMetric("count_age_seconds", "seconds", _COUNT_AGE),
    RootMetric("unremovable_files", "files", "Chunk files that the leader could not remove."),
    RootMetric("pruned_files", "files", _PRUNED, kind="counter"),
    RootMetric("pruned_bytes", "bytes", "Disk space of the pruned chunk files.", kind="counter"),
    RootMetric("orphans_removed", "files", _ORPHANS, kind="counter"),
)
METRICS = tuple(replace(one, name=f"fskv_root_{one.name}") for one in _METRICS)
_Values = dict[str, float | dict[tuple[str, ...], float]]  # of metrics, and those by labels


@dataclass(frozen=True, slots=True)
class Watched:
    """The knowledge of the watcher at the moment of a scrape."""

    seen: Seen | None
    step_age_s: float  # since the root last answered


class RootCollector(Collector):
    """Prometheus collector of the root's metrics."""

    def __init__(self, watched: Callable[[], Watched], root: str) -> None:
        self._watched = watched
        self._root = root

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        values = {f"fskv_root_{name}": value for name, value in self._values().items()}
        for metric in METRICS:
            if metric.name not in values:
                continue
            found = values[metric.name]
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            text = f"{metric.meaning} [{metric.unit}]"
            family = kind(metric.name, text, labels=metric.labels)
            for labels, value in (found if isinstance(found, dict) else {(): found}).items():
                family.add_metric(labels, value)
            yield family

    def _values(self) -> _Values:
        watched = self._watched()
        seen = watched.seen
        values: _Values = {
            "info": {(show(self._root), __version__): 1},
            "last_step_age_seconds": watched.step_age_s,
            "lease_held": seen is not None and seen.holder,
        }
        if seen is not None:  # else there is no root yet, or it has not answered yet
            values |= {
                "total_bytes": seen.space.total_nbytes,
                "free_bytes": seen.space.free_nbytes,
                "total_inodes": seen.space.total_inodes,
                "free_inodes": seen.space.free_inodes,
            }
            values |= _of_usage(seen.usage, seen.space) if seen.usage else {}
        return values


def _of_usage(usage: Usage, space: Space) -> _Values:
    # Bounds: those of the root and the file system, and of the tenants' those with the least left.
    found = sorted(scopes(usage, space), key=lambda scope: (scope.name is not None, scope.left))
    num_own = sum(scope.name is None for scope in found)
    bounds = {(s.kind, show(s.name or "")): s for s in found[: num_own + MAX_NAMES]}
    spaces = {
        (show(name), show(usage.tenants.get(name, ""))): counts
        for name, counts in usage.namespaces.items()
    }
    spaces |= {(OTHERS, OTHERS): usage.others} if any(usage.others) else {}
    of_tenants: Counter[tuple[str, ...]] = Counter()
    for (name, tenant), (nbytes, _) in spaces.items():
        of_tenants[(tenant,)] += nbytes if name != OTHERS else 0
    return {
        "heartbeats": len(usage.counted),
        "limit_bytes": {labels: scope.limit for labels, scope in bounds.items()},
        "headroom_bytes": {labels: scope.left for labels, scope in bounds.items()},
        "namespace_bytes": _largest({name: nbytes for name, (nbytes, _) in spaces.items()}),
        "namespace_files": _largest({name: files for name, (_, files) in spaces.items()}),
        "tenant_bytes": _largest(of_tenants),
        "count_age_seconds": max(0.0, time.time() - usage.at_ms / 1000),
        "unremovable_files": usage.unremovable,
        "pruned_files": usage.pruned_files,
        "pruned_bytes": usage.pruned_nbytes,
        "orphans_removed": usage.orphans,
    }


def _largest(values: Mapping[tuple[str, ...], float]) -> dict[tuple[str, ...], float]:
    """Return the largest by their names, and the sum of the rest."""
    ranked = sorted(values.items(), key=lambda item: -item[1])
    named = dict(ranked[:MAX_NAMES])
    if len(ranked) > MAX_NAMES:
        others = (OTHERS,) * len(ranked[0][0])
        named[others] = named.get(others, 0) + sum(value for _, value in ranked[MAX_NAMES:])
    return named


def serve(watched: Callable[[], Watched], root: str, address: str, port: int) -> int:
    """Serve metrics on daemon threads; returns the port. Raises CommandError where it cannot be had."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RootCollector(watched, root))
    try:
        server, _ = start_http_server(port, address, registry)
    except (OSError, OverflowError) as error:
        raise CommandError(f"--metrics-port: {address}:{port}: {error}") from None
    # A connection that says nothing ends, and one that is reset is no reason for a traceback.
    server.RequestHandlerClass.timeout = _IDLE_S  # type: ignore[attr-defined]
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    return server.server_port
