"""The Prometheus endpoint of `fskv prune --watch`: what was last seen of the root, whether or not it answers.

Runs on a thread of its own and never touches the root, so that a root that hangs shows in the metrics
(`fskv_root_last_step_age_seconds`) instead of hanging them. Every metric is in METRICS and docs/metrics.md.

A root may hold any number of namespaces and tenants: the MAX_NAMES largest have names, the rest is one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from fskv import __version__
from fskv.bounds.limits import Usage, scopes
from fskv.bounds.maintenance import Seen
from fskv.root.filesystem import Space

from . import metrics_server
from .exits import CommandError
from .terminal import show

MAX_NAMES = 50
OTHERS = "(others)"


@dataclass(frozen=True, slots=True)
class RootMetric:
    """One metric of the endpoint."""

    name: str
    kind: str  # "counter" or "gauge"
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()


def _gauge(name: str, unit: str, meaning: str, *labels: str) -> RootMetric:
    return RootMetric(f"fskv_root_{name}", "gauge", unit, meaning, labels)


def _counter(name: str, unit: str, meaning: str) -> RootMetric:
    return RootMetric(f"fskv_root_{name}", "counter", unit, meaning)


INFO = _gauge(
    "info", "1", "Always 1; its labels are the root and fskv's version.", "root", "version"
)
STEP_AGE = _gauge("last_step_age_seconds", "seconds", "Since the root last answered.")
LEASE_HELD = _gauge("lease_held", "0 or 1", "Whether this process counts and prunes for all.")
HEARTBEATS = _gauge("heartbeats", "engines", "Engines and watchers that live, with this one.")
TOTAL_BYTES = _gauge("total_bytes", "bytes", "Size of the file system.")
FREE_BYTES = _gauge("free_bytes", "bytes", "Free on the file system, for this user.")
TOTAL_INODES = _gauge(
    "total_inodes",
    "inodes",
    "Of the file system; 0 where it has no such number, or none that can be true.",
)
FREE_INODES = _gauge("free_inodes", "inodes", "Free on the file system, for this user.")
LIMIT = _gauge(
    "limit_bytes",
    "bytes",
    "Bounds that hold now, whoever declared them. `kind`: root, tenant, or free (what may be in use on the "
    "file system); `name`: of the tenant.",
    *("kind", "name"),
)
HEADROOM = _gauge(
    "headroom_bytes",
    "bytes",
    "What is left of a bound; negative: beyond it.",
    *("kind", "name"),
)
NAMESPACE_BYTES = _gauge("namespace_bytes", "bytes", "On disk.", "namespace", "tenant")
NAMESPACE_FILES = _gauge(
    "namespace_files", "files", "Chunk files, by the last walk.", "namespace", "tenant"
)
TENANT_BYTES = _gauge("tenant_bytes", "bytes", 'On disk; tenant "": those without one.', "tenant")
COUNT_AGE = _gauge(
    "count_age_seconds", "seconds", "Since the root was last walked, by whomever; by this clock."
)
UNREMOVABLE = _gauge(
    "unremovable_files", "files", "Chunk files that could not be removed, and stay."
)
PRUNED_FILES = _counter(
    "pruned_files", "files", "Pruned by the present holder of the lease; begins again with another."
)
PRUNED_BYTES = _counter("pruned_bytes", "bytes", "What those took on disk.")
ORPHANS = _counter("orphans_removed", "files", "Parts of dead writers removed by that holder.")

METRICS = (
    *(INFO, STEP_AGE, LEASE_HELD, HEARTBEATS, TOTAL_BYTES, FREE_BYTES, TOTAL_INODES, FREE_INODES),
    *(LIMIT, HEADROOM, NAMESPACE_BYTES, NAMESPACE_FILES, TENANT_BYTES, COUNT_AGE, UNREMOVABLE),
    *(PRUNED_FILES, PRUNED_BYTES, ORPHANS),
)


@dataclass(frozen=True, slots=True)
class Watched:
    """What the watcher knows at the moment of a scrape."""

    seen: Seen | None
    step_age_s: float  # since the root last answered


Family = GaugeMetricFamily | CounterMetricFamily


class RootCollector(Collector):
    """Makes metrics of what `watched()` returns."""

    def __init__(self, watched: Callable[[], Watched], root: str) -> None:
        self._watched = watched
        self._root = root

    def collect(self) -> Iterator[Family]:
        watched = self._watched()
        yield _labelled(INFO, {(show(self._root), __version__): 1})
        yield _one(STEP_AGE, watched.step_age_s)
        seen = watched.seen
        yield _one(LEASE_HELD, seen is not None and seen.holder)
        if seen is None:
            return  # there is no root yet, or it has not answered yet
        yield _one(TOTAL_BYTES, seen.space.total_nbytes)
        yield _one(FREE_BYTES, seen.space.free_nbytes)
        yield _one(TOTAL_INODES, seen.space.total_inodes)
        yield _one(FREE_INODES, seen.space.free_inodes)
        if seen.usage is not None:
            yield from _of_bounds(seen.usage, seen.space)
            yield from _of_usage(seen.usage)


def _of_bounds(usage: Usage, space: Space) -> Iterator[Family]:
    """Yield those of the root and the file system, and of the tenants' those with the least left."""
    found = sorted(scopes(usage, space), key=lambda scope: scope.left)
    named = [scope for scope in found if scope.name is not None]
    shown = [scope for scope in found if scope.name is None] + named[:MAX_NAMES]
    yield _labelled(LIMIT, {(s.kind, show(s.name or "")): s.limit for s in shown})
    yield _labelled(HEADROOM, {(s.kind, show(s.name or "")): s.left for s in shown})
    yield _one(HEARTBEATS, len(usage.counted))


def _of_usage(usage: Usage) -> Iterator[Family]:
    nbytes: dict[tuple[str, ...], float] = {}
    files: dict[tuple[str, ...], float] = {}
    of_tenant: dict[tuple[str, ...], float] = {}
    largest = sorted(usage.namespaces, key=lambda name: -usage.namespaces[name][0])
    shown = set(largest[:MAX_NAMES])
    for name, (used, count) in usage.namespaces.items():
        tenant = show(usage.tenants.get(name, ""))
        labels = (show(name), tenant) if name in shown else (OTHERS, OTHERS)
        nbytes[labels] = nbytes.get(labels, 0) + used
        files[labels] = files.get(labels, 0) + count
        of_tenant[(tenant,)] = of_tenant.get((tenant,), 0) + used
    if any(usage.others):
        used, count = usage.others
        nbytes[OTHERS, OTHERS] = nbytes.get((OTHERS, OTHERS), 0) + used
        files[OTHERS, OTHERS] = files.get((OTHERS, OTHERS), 0) + count
    yield _labelled(NAMESPACE_BYTES, nbytes)
    yield _labelled(NAMESPACE_FILES, files)
    ranked = sorted(of_tenant.items(), key=lambda item: -item[1])
    tenants = dict(ranked[:MAX_NAMES])
    if len(ranked) > MAX_NAMES:
        tenants[(OTHERS,)] = sum(used for _, used in ranked[MAX_NAMES:])
    yield _labelled(TENANT_BYTES, tenants)
    yield _one(COUNT_AGE, max(0.0, time.time() - usage.at_ms / 1000))
    yield _one(UNREMOVABLE, usage.unremovable)
    yield _one(PRUNED_FILES, usage.pruned_files)
    yield _one(PRUNED_BYTES, usage.pruned_nbytes)
    yield _one(ORPHANS, usage.orphans)


def _labelled(metric: RootMetric, values: Mapping[tuple[str, ...], float]) -> Family:
    kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    family = kind(metric.name, f"{metric.meaning} [{metric.unit}]", labels=metric.labels)
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def _one(metric: RootMetric, value: float) -> Family:
    return _labelled(metric, {(): value})


def serve(watched: Callable[[], Watched], root: str, address: str, port: int) -> int:
    """Serve metrics on daemon threads; returns the port. Raises CommandError where it cannot be had."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RootCollector(watched, root))
    try:
        return metrics_server.start(registry, address, port)
    except (OSError, OverflowError) as error:
        raise CommandError(f"--metrics-port: {address}:{port}: {error}") from None
