"""The endpoint of `fskv prune --watch`: whatever a root holds, a bounded number of series says all of it."""

from __future__ import annotations

import os
import socket
import struct
import threading
import urllib.request

import pytest
from fskv_tools import exits, exporter
from world import wait_for

from fskv.bounds.limits import Heartbeat, Limits, Usage
from fskv.bounds.maintenance import Seen
from fskv.root.filesystem import Space

SPACE = Space(10**12, 10**11, 10**6, 10**5)


def _name(number):
    return f"cpu-x86_64/model-{number:03}@{number:016x}"


def _families(num_namespaces, num_tenants):
    usage = Usage(
        namespaces={_name(n): (1000 + n, n) for n in range(num_namespaces)},
        tenants={_name(n): f"tenant-{n % num_tenants}" for n in range(num_namespaces)},
        max_nbytes=10**9,
        kept_free=10**6,
        tenant_limits={f"tenant-{n}": 10**7 for n in range(num_tenants)},
        at_ms=1,
    )
    beats = [Heartbeat("watcher", None, None, Limits())]
    watched = exporter.Watched(Seen(usage, beats, SPACE, False), 0.5)
    collector = exporter.RootCollector(lambda: watched, "/mnt/kv")
    return usage, {family.name: family for family in collector.collect()}


def test_every_metric_is_published_with_the_labels_that_it_declares():
    _, families = _families(3, 2)
    assert set(families) == {metric.name for metric in exporter.METRICS}
    for metric in exporter.METRICS:
        family = families[metric.name]
        assert family.type == metric.kind
        assert family.samples, metric.name
        for sample in family.samples:
            assert tuple(sample.labels) == metric.labels, metric.name


def test_a_thousand_namespaces_are_few_series_and_their_sum_is_right():
    usage, families = _families(1000, 300)
    for family in families.values():
        assert len(family.samples) <= 2 * exporter.MAX_NAMES + 2, family.name
    shown = families["fskv_root_namespace_bytes"].samples
    assert len(shown) == exporter.MAX_NAMES + 1
    assert sum(sample.value for sample in shown) == usage.nbytes
    files = families["fskv_root_namespace_files"].samples
    assert sum(sample.value for sample in files) == usage.num_files
    tenants = families["fskv_root_tenant_bytes"].samples
    assert len(tenants) == exporter.MAX_NAMES + 1
    assert sum(sample.value for sample in tenants) == usage.nbytes
    named = {sample.labels["namespace"] for sample in shown}
    assert _name(999) in named, "the largest has its name"
    assert _name(0) not in named
    kinds = [sample.labels["kind"] for sample in families["fskv_root_limit_bytes"].samples]
    assert {"root", "free"} <= set(kinds), "the bounds of all are never left out"


def test_negative_control_without_the_limit_every_namespace_is_a_series(monkeypatch):
    monkeypatch.setattr(exporter, "MAX_NAMES", 10**9)
    _, families = _families(1000, 300)
    assert len(families["fskv_root_namespace_bytes"].samples) == 1000
    assert len(families["fskv_root_limit_bytes"].samples) == 302


@pytest.mark.parametrize("address", ["127.0.0.1", pytest.param("::1", marks=pytest.mark.slow)])
def test_connections_that_say_nothing_end_and_cost_no_scrape(address, capfd, monkeypatch):
    monkeypatch.setattr(exporter, "_IDLE_S", 2.0)
    if address == "::1" and not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("no IPv6")
    before = threading.active_count()
    port = exporter.serve(lambda: exporter.Watched(None, 0.0), "/mnt/kv", address, 0)
    idle = [socket.create_connection((address, port)) for _ in range(80)]
    try:
        for one in idle[:30]:  # a reset, which is no reason for a traceback
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.close()
        host = f"[{address}]" if ":" in address else address
        for _ in range(3):
            with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=60) as answer:
                assert b"fskv_root_last_step_age_seconds 0.0" in answer.read()
        wait_for(lambda: threading.active_count() <= before + 2)
    finally:
        for one in idle:
            one.close()
    assert capfd.readouterr().err == ""


def test_a_port_that_cannot_be_had_is_said_in_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port in (taken.getsockname()[1], 70_000):
            with pytest.raises(exits.CommandError, match="--metrics-port"):
                exporter.serve(lambda: exporter.Watched(None, 0.0), "/r", "127.0.0.1", port)
