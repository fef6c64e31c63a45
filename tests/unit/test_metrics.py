"""Counters only rise, whatever they are told."""

from __future__ import annotations

import math

import prometheus_client
import pytest

from fskv.observe import metrics
from fskv.observe.metrics import Counters


@pytest.mark.parametrize("amount", [-1, -0.5, math.nan, 0])
def test_a_counter_never_falls(amount):
    counters = Counters()
    counters.add(metrics.LOOKUP_HITS, 3)
    counters.add(metrics.LOOKUP_HITS, amount)
    assert counters.drain() == {(metrics.LOOKUP_HITS, ""): 3}
    counters.add(metrics.LOOKUP_HITS, amount)
    assert counters.drain() == {}


def test_negative_control_prometheus_raises_for_what_is_not_passed_on():
    counter = prometheus_client.Counter("x", "", registry=prometheus_client.CollectorRegistry())
    with pytest.raises(ValueError, match="non-negative"):
        counter.inc(-1)
