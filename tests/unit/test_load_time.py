"""Predictions follow what was measured last, and say None before that."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fskv.routing.load_time import LoadTimes, work

MIB = 1 << 20


def test_nothing_is_predicted_before_something_was_measured():
    times = LoadTimes()
    assert times.predict_load_s(MIB) is None
    assert times.predict_prefill_s(1000) is None
    assert times.load_bytes_per_s is None
    assert times.prefill_tokens_per_s is None


def test_a_load_predicts_its_like_and_small_files_cost_more_than_their_bytes():
    times = LoadTimes()
    times.observe_load(work(100 * MIB, 50), 2.0)
    assert times.predict_load_s(work(100 * MIB, 50)) == pytest.approx(2.0)
    assert times.predict_load_s(work(100 * MIB, 500)) > 2.5


@pytest.mark.parametrize("factor", [0.01, 0.2, 5.0, 100.0])
def test_one_load_is_enough_to_see_that_the_storage_has_changed(factor):
    times = LoadTimes()
    for _ in range(100):
        times.observe_load(MIB, 1.0)
    times.observe_load(MIB, factor)
    assert times.predict_load_s(MIB) == pytest.approx(factor)


@given(st.lists(st.floats(0.6, 1.6), min_size=1))
def test_noise_on_the_same_storage_stays_noise(seconds):
    times = LoadTimes()
    for each in seconds:
        times.observe_load(MIB, each)
    assert 0.6 <= times.predict_load_s(MIB) <= 1.6


@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.floats(0, 1e6)), max_size=20),
    st.integers(0, 10**9),
)
def test_predictions_are_never_below_zero(loads, asked):
    times = LoadTimes()
    for of, seconds in loads:
        times.observe_load(of, seconds)
        times.observe_step(of % 5000, seconds)
    for seconds in (times.predict_load_s(asked), times.predict_prefill_s(asked)):
        assert seconds is None or seconds >= 0


def test_a_short_tail_does_not_change_what_long_steps_have_shown():
    times = LoadTimes()
    times.observe_step(1000, 1.0)
    for _ in range(100):
        times.observe_step(16, 0.9)
    assert times.predict_prefill_s(1000) == pytest.approx(1.0)
    small = LoadTimes()  # the control: an engine of small steps is measured by them
    for _ in range(10):
        small.observe_step(16, 0.8)
    assert small.predict_prefill_s(1000) == pytest.approx(50.0)


def test_an_engine_that_became_slower_is_believed_after_some_thousand_tokens():
    times = LoadTimes()
    for _ in range(50):
        times.observe_step(1000, 1.0)
    for _ in range(30):
        times.observe_step(1000, 4.0)
    assert times.predict_prefill_s(1000) > 3.5
