"""The Prometheus endpoint of `fskv prune --watch`: what was last seen of the root, whether or not it answers.

Runs on a thread of its own and never touches the root, so that a root that hangs shows in the metrics
(`fskv_root_last_step_age_seconds`) instead of hanging them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from fskv.claims import Usage, scopes
from fskv.maintenance import Seen

from .exits import CommandError
from .terminal import show


@dataclass(frozen=True, slots=True)
class Watched:
    """What the watcher knows at the moment of a scrape."""

    seen: Seen | None
    step_age_s: float  # since the root last answered


Metric = GaugeMetricFamily | CounterMetricFamily


class RootCollector(Collector):
    """Makes metrics of what `watched()` returns."""

    def __init__(self, watched: Callable[[], Watched]) -> None:
        self._watched = watched

    def collect(self) -> Iterator[Metric]:
        watched = self._watched()
        yield _gauge("last_step_age_seconds", "Since the root last answered.", watched.step_age_s)
        seen = watched.seen
        if seen is None:
            return
        writers = [claim for claim in seen.claims if not claim.closed and claim.namespace]
        yield _gauge("lease_held", "1 if this process counts and prunes for all.", seen.holder)
        yield _gauge("writers", "Engines that claim bytes of the root.", len(writers))
        yield _gauge("total_bytes", "Size of the file system.", seen.space.total_nbytes)
        yield _gauge("free_bytes", "Free bytes of the file system.", seen.space.free_nbytes)
        yield _gauge("free_inodes", "Free inodes of the file system.", seen.space.free_inodes)
        limit = _family("limit_bytes", "Bounds that hold now.", "kind", "name")
        headroom = _family("headroom_bytes", "What is left of a bound.", "kind", "name")
        for scope in scopes(seen.claims, seen.usage or Usage(), seen.space):
            labels = [scope.kind, show(scope.name or "")]
            limit.add_metric(labels, scope.limit)
            headroom.add_metric(labels, scope.headroom)
        yield from (limit, headroom)
        if seen.usage is not None:
            yield from _of_usage(seen.usage)


def _of_usage(usage: Usage) -> Iterator[Metric]:
    nbytes = _family("namespace_bytes", "Bytes on disk.", "namespace", "tenant")
    files = _family("namespace_files", "Chunk files.", "namespace", "tenant")
    of_tenant: dict[str, int] = {}
    for name, (used, count) in usage.namespaces.items():
        tenant = usage.tenants.get(name, "")
        nbytes.add_metric([show(name), show(tenant)], used)
        files.add_metric([show(name), show(tenant)], count)
        of_tenant[tenant] = of_tenant.get(tenant, 0) + used
    tenants = _family("tenant_bytes", "Bytes on disk.", "tenant")
    for tenant, used in of_tenant.items():
        tenants.add_metric([show(tenant)], used)
    yield from (nbytes, files, tenants)
    age_s = max(0.0, time.time() - usage.at_ms / 1000)
    yield _gauge("count_age_seconds", "Since the root was last counted.", age_s)
    yield _gauge("unremovable_files", "Files that could not be removed.", usage.unremovable)
    # Counted by the present holder of the lease, so that they start again with another one.
    yield _counter("pruned_files", "Files that the holder has pruned.", usage.pruned_files)
    yield _counter("pruned_bytes", "Bytes that the holder has pruned.", usage.pruned_nbytes)
    yield _counter("orphans_removed", "Parts of dead writers removed.", usage.orphans)


def _family(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"fskv_root_{name}", text, labels=labels)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"fskv_root_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"fskv_root_{name}", text, value=value)


def serve(watched: Callable[[], Watched], address: str, port: int) -> int:
    """Serve metrics on daemon threads; returns the port. Raises CommandError where it cannot be had."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RootCollector(watched))
    try:
        server, _ = start_http_server(port, address, registry)
    except (OSError, OverflowError) as error:
        raise CommandError(f"--metrics-port: {address}:{port}: {error}") from None
    return int(server.server_address[1])
