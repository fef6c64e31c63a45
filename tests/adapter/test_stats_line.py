"""What vLLM's log says of an interval is a line that a person reads: "KV Transfer metrics: fskv: ..."."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fskv.observe import metrics
from fskv.observe.metrics import Counters

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]

LIMIT = 400  # characters


@pytest.fixture
def logging_of():
    pytest.importorskip("vllm", reason="the adapter needs the vllm environment: make test")
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

    from fskv.engines.vllm.plugin import register

    def make(connector):
        register()
        return KVConnectorLogging(
            SimpleNamespace(kv_connector=connector, kv_connector_module_path=None)
        )

    return make


def line_of(logging, *counted):
    """Return what vLLM's own logger makes of an interval with these stats."""
    from fskv.engines.vllm.metrics import to_stats

    every = (*metrics.SCHEDULER_COUNTERS, *metrics.BUDGET_COUNTERS, *metrics.WORKER_COUNTERS)
    for amounts in counted:
        counters = Counters(*every)  # with zeros for all that has a label
        for metric, amount, *label in amounts:
            counters.add(metric, amount, *label)
        stats = to_stats(counters.drain(), {metrics.ROOT_BYTES: 1.0}, {metrics.LOAD_LATENCY: [1.0]})
        logging.observe(stats.to_dict())
    lines = []
    logging.log(lambda words, *about: lines.append(words % about))
    return lines


HIT = [
    (metrics.LOADED_REQUESTS, 1),
    (metrics.LOADED_TOKENS, 6432),
    (metrics.SAVED_SECONDS, 43.24),
    (metrics.LOOKUP_HITS, 67),
    (metrics.LOOKUP_MISSES, 1, "absent"),
    (metrics.LOADED_CHUNKS, 67),
    (metrics.LOADED_BYTES, 148 << 20),
]
TROUBLE = [
    (metrics.LOAD_FAILURES, 2, "corrupt"),
    (metrics.STORES_SKIPPED, 3, "denied"),
    (metrics.STORES_SKIPPED, 5, "exists"),
    (metrics.STORED_CHUNKS, 6),
    (metrics.STORED_BYTES, 13 << 20),
]


def test_a_hit_is_one_line_with_what_it_brought(logging_of):
    (line,) = line_of(logging_of("FskvConnector"), HIT[:3], HIT[3:])
    assert line == (
        "KV Transfer metrics: fskv: requests loaded=1 (6432 tokens from files, about 43.2 s saved), "
        "hits=67 of 68 chunks, loaded=67 files (148.0 MiB)"
    )


def test_failures_are_named_by_their_reason(logging_of):
    (line,) = line_of(logging_of("FskvConnector"), HIT, TROUBLE)
    assert line.endswith("stored=6 files (13.0 MiB), loads failed=2 corrupt, not stored=3 denied")
    assert len(line) < LIMIT


def test_where_nothing_happened_the_line_says_so(logging_of):
    (line,) = line_of(logging_of("FskvConnector"), [])
    assert line == "KV Transfer metrics: fskv=no chunk asked for, loaded or stored"


def test_negative_control_vllms_own_line_has_each_number(logging_of):
    (line,) = line_of(logging_of("OffloadingConnector"), HIT)
    assert len(line) > 2 * LIMIT
    assert line.count("=0") > 10
