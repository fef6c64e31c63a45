"""What vLLM's log says of an engine is one line for a person: "KV Transfer metrics: fskv so far: ..."."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from fskv.observe import metrics

pytest.importorskip("vllm", reason="the adapter needs the vllm environment: make test")

from vllm.v1.metrics import loggers
from vllm.v1.metrics.stats import SchedulerStats

from fskv.engines.vllm.metrics import FskvStats, SoFar, to_stats
from fskv.engines.vllm.plugin import register

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("ignore")]


class _Idle:
    """vLLM's own logger of an engine, and what of its lines is seen at level INFO."""

    def __init__(self, kv_connector, monkeypatch):
        config = SimpleNamespace(
            model_config=None,
            kv_transfer_config=SimpleNamespace(
                kv_connector=kv_connector, kv_connector_module_path=None
            ),
            ec_transfer_config=None,
            device_config=SimpleNamespace(device_type="cpu"),
            observability_config=SimpleNamespace(cudagraph_metrics=False, enable_mfu_metrics=False),
        )
        self.seen = []
        monkeypatch.setattr(
            loggers.logger, "info", lambda text, *about: self.seen.append(text % about)
        )
        self._logger = loggers.LoggingStatLogger(config)

    def interval(self, stats, num_tokens):
        """Ten seconds in which these stats came, and requests went on by so many tokens."""
        if stats is not None:
            self._logger.record(SchedulerStats(kv_connector_stats=stats.to_dict()), None)
        self._logger.num_generation_tokens = num_tokens
        self._logger.last_log_time -= 10
        self._logger.log()


@pytest.mark.parametrize("connector", ["FskvConnector", "OffloadingConnector"])
def test_what_came_in_a_long_prefill_is_in_the_next_line(connector, monkeypatch):
    """vLLM forgets what it logs at DEBUG. The control: its own line has the last interval's alone."""
    register()
    logger = _Idle(connector, monkeypatch)
    so_far = SoFar()

    def stored(amount):
        stats = to_stats({(metrics.STORED_CHUNKS, ""): amount}, {})
        if connector != "FskvConnector":
            return stats
        so_far.add(FskvStats(data=stats.data))
        return so_far.stamp(None)

    for amount in (0, 20, 6):  # no token is made in these
        logger.interval(stored(amount), 0)
    assert not logger.seen, "nothing is said of an idle engine"
    logger.interval(stored(2), 5)
    line = logger.seen[-1]
    said = re.search(r"stored(?:=|_chunks=)(\d+)", line)
    assert said, line
    assert int(said[1]) == (28 if connector == "FskvConnector" else 2)


def test_a_scheduler_tells_what_its_workers_counted_also_where_it_has_nothing_of_its_own():
    so_far = SoFar()
    assert so_far.stamp(None) is None
    so_far.add(FskvStats(data=to_stats({(metrics.STORED_CHUNKS, ""): 3}, {}).data))
    told = so_far.stamp(None)
    assert not told.is_empty()
    assert told.reduce() == {"fskv so far: stored": "3 files (0.0 MiB)"}
    assert so_far.stamp(None) is None, "it was told"
