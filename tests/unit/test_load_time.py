"""Prediction of loads and recomputes: right on what it was told, soon right after a change, never absurd."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fskv.routing.load_time import Cut, LoadQueue, LoadTimes, Probing, best_cut

MIB = 1 << 20
FILE = 128 << 10  # what a file costs beside its bytes

sizes = st.integers(1, 1 << 40)
seconds = st.floats(1e-6, 1e5)
files = st.integers(1, 10_000)


def loads(latency_s, bytes_per_s, nbytes):
    """Return what a load takes on storage of this latency and rate."""
    return latency_s + (nbytes + FILE) / bytes_per_s


# --- loads ----------------------------------------------------------------------------------


def test_nothing_is_predicted_before_something_was_measured():
    times = LoadTimes()
    assert times.predict_load_s(MIB, 1) is None
    assert times.predict_prefill_s(1000, 0) is None
    assert times.load_bytes_per_s is None
    assert times.prefill_tokens_per_s is None
    times.observe_load(MIB, 0.1)
    assert times.predict_load_s(MIB, 1) is not None
    assert times.predict_prefill_s(1000, 0) is None, "loads say nothing about the engine"


@given(nbytes=sizes, took=seconds)
def test_one_load_predicts_its_like_exactly(nbytes, took):
    times = LoadTimes()
    times.observe_load(nbytes, took)
    assert times.predict_load_s(nbytes, 1) == pytest.approx(took)


@given(
    latency_s=st.floats(0.0001, 1),
    bytes_per_s=st.floats(1e5, 1e10),
    seen=st.lists(st.integers(MIB, 1000 * MIB), min_size=4, max_size=30),
    asked=st.integers(MIB, 1000 * MIB),
)
def test_latency_and_rate_are_told_apart_where_sizes_differ(latency_s, bytes_per_s, seen, asked):
    times = LoadTimes()
    spread = [*seen, 1 * MIB, 64 * MIB, 1000 * MIB, 8 * MIB]
    for nbytes in spread:
        times.observe_load(nbytes, loads(latency_s, bytes_per_s, nbytes))
    true = loads(latency_s, bytes_per_s, asked)
    assert times.predict_load_s(asked, 1) == pytest.approx(true, rel=0.05)


@settings(max_examples=200)
@given(
    history=st.lists(st.tuples(sizes, files, seconds, st.floats(0, 1)), min_size=1, max_size=40),
    asked=sizes,
    more=sizes,
    num_files=files,
)
def test_predictions_are_finite_positive_and_grow_with_bytes_and_files(
    history, asked, more, num_files
):
    times = LoadTimes()
    for nbytes, count, took, done in history:
        if done < 0.5:
            times.observe_cut(nbytes, took, count, done_share=done)
        else:
            times.observe_load(nbytes, took, count)
    small = times.predict_load_s(asked, num_files)
    assert 0 < small < math.inf
    assert times.predict_load_s(asked + more, num_files) >= small
    assert times.predict_load_s(asked, num_files + 1) >= small
    assert 0 <= times.occupied_s(asked, num_files) <= small * 1.000001
    assert 0 < times.load_bytes_per_s < math.inf


@given(
    before=st.floats(1e5, 1e8),
    factor=st.one_of(st.floats(10, 1e5), st.floats(1e-3, 0.1)),
    num_before=st.integers(1, 50),
    nbytes=st.integers(MIB, 1000 * MIB),
)
def test_one_load_is_enough_to_see_that_the_storage_has_changed(before, factor, num_before, nbytes):
    times = LoadTimes()
    for _ in range(num_before):
        times.observe_load(nbytes, loads(0, before, nbytes))
    now = factor * loads(0, before, nbytes)
    times.observe_load(nbytes, now)
    assert times.predict_load_s(nbytes, 1) == pytest.approx(now)


@given(seed=st.integers(0, 2**32), noise=st.floats(0, 0.5))
def test_noise_on_the_same_storage_stays_noise(seed, noise):
    draw = random.Random(seed)
    times = LoadTimes()
    for _ in range(30):
        nbytes = draw.randrange(MIB, 200 * MIB)
        exact = loads(0.005, 5e8, nbytes)
        times.observe_load(nbytes, exact * draw.uniform(1 - noise, 1 + noise))
    for nbytes in (20 * MIB, 100 * MIB, 200 * MIB):
        exact = loads(0.005, 5e8, nbytes)
        assert 0.3 * exact < times.predict_load_s(nbytes, 1) < 3 * exact


def test_a_load_that_was_cut_counts_with_the_time_that_it_would_have_needed():
    times = LoadTimes()
    times.observe_cut(100 * MIB, 2.0, 1, done_share=0.25)
    assert times.predict_load_s(100 * MIB, 1) == pytest.approx(8.0)
    nothing = LoadTimes()
    nothing.observe_cut(100 * MIB, 2.0, 1, done_share=0.0)
    assert nothing.predict_load_s(100 * MIB, 1) >= 20 * 2.0, (
        "more than a recompute, at a twentieth of it"
    )


def test_proven_is_what_was_done_at_the_present_rate():
    times = LoadTimes()
    assert not times.proven(1, 1)
    times.observe_load(10 * MIB, 0.1)
    assert times.proven(10 * MIB, 1)
    assert times.proven(30 * MIB, 1)
    assert not times.proven(100 * MIB, 1)
    times.observe_cut(10 * MIB, 5.0, 1, done_share=0.0)  # other storage now
    assert not times.proven(10 * MIB, 1)


# --- prefill --------------------------------------------------------------------------------


@given(
    base=st.floats(1e-6, 0.1),
    slope=st.floats(0, 1e-4),
    batch=st.sampled_from([256, 512, 1024, 4096]),
    asked=st.integers(1, 20_000),
    computed=st.integers(0, 20_000),
)
def test_a_prefill_whose_cost_grows_with_the_context_is_predicted(
    base, slope, batch, asked, computed
):
    def true(num_tokens, before):
        return num_tokens * (base + slope * (before + num_tokens / 2))

    times = LoadTimes()
    for before in range(0, 16 * batch, batch):
        times.observe_prefill(batch, true(batch, before), before)
    assert times.predict_prefill_s(asked, computed) == pytest.approx(
        true(asked, computed), rel=0.01
    )


@given(
    steps=st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(1, 8192), st.integers(0, 10**6)), max_size=5), seconds
        ),
        min_size=1,
        max_size=40,
    ),
    asked=st.integers(1, 10**6),
    computed=st.integers(0, 10**6),
)
def test_prefill_predictions_are_finite_and_grow_with_tokens_and_context(steps, asked, computed):
    times = LoadTimes()
    for parts, took in steps:
        times.observe_step(parts, took)
    found = times.predict_prefill_s(asked, computed)
    if not any(sum(tokens for tokens, _ in parts) >= 256 for parts, _ in steps):
        assert found is None
        return
    assert 0 < found < math.inf
    assert times.predict_prefill_s(asked + 1, computed) > found
    assert times.predict_prefill_s(asked, computed + 1000) >= found


@pytest.mark.parametrize("max_step_tokens", [8192, 16], ids=["left out", "control: counted"])
def test_a_short_tails_overhead_does_not_change_what_long_steps_have_shown(max_step_tokens):
    times = LoadTimes(max_step_tokens)
    times.observe_prefill(1024, 10.24)
    for _ in range(100):
        times.observe_prefill(8, 0.5, 100_000)  # 60 ms a token, of which 50 are the step
    left_out = max_step_tokens > 16
    assert (times.predict_prefill_s(1024, 100_000) == pytest.approx(10.24)) == left_out


def test_an_engine_of_small_steps_is_measured_by_them():
    times = LoadTimes(max_step_tokens=64)
    times.observe_prefill(31, 1.0)
    assert times.prefill_tokens_per_s is None
    times.observe_prefill(32, 0.32)
    assert times.predict_prefill_s(1000) == pytest.approx(10.0)


def test_an_engine_that_became_slower_is_believed_after_some_thousand_tokens():
    times = LoadTimes()
    for _ in range(50):
        times.observe_prefill(1024, 1.0)
    for _ in range(50):
        times.observe_prefill(1024, 3.0)
    assert times.predict_prefill_s(1024, 0) == pytest.approx(3.0, rel=0.1)


def test_a_step_of_several_prompts_is_the_sum_of_its_parts():
    together, apart = LoadTimes(), LoadTimes()
    together.observe_step([(500, 0), (524, 0)], 1.0)
    apart.observe_prefill(1024, 1.0)
    assert together.predict_prefill_s(1024) == pytest.approx(
        apart.predict_prefill_s(1024), rel=0.01
    )


# --- loads behind each other ----------------------------------------------------------------


def test_a_load_waits_for_those_before_it():
    queue = LoadQueue()
    assert queue.wait_s(0.0) == 0
    queue.begin("a", 0.0, 2.0)
    queue.begin("b", 0.0, 3.0)
    assert queue.wait_s(0.0) == pytest.approx(5.0)
    assert queue.wait_s(1.0) == pytest.approx(4.0)
    queue.end("a", 1.0)  # a second early
    assert queue.wait_s(1.0) == pytest.approx(3.0)
    queue.end("b", 4.0)
    assert queue.wait_s(4.0) == 0
    queue.end("never begun", 5.0)
    assert len(queue) == 0


def test_a_load_that_is_late_makes_the_others_late():
    queue = LoadQueue()
    queue.begin("a", 0.0, 1.0)
    queue.begin("b", 0.0, 1.0)
    assert queue.wait_s(1.0) == pytest.approx(1.0)
    assert queue.wait_s(10.0) == pytest.approx(10.0), (
        "ten times slower than predicted, so is the next"
    )


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["begin", "end"]),
            st.integers(0, 5),
            st.floats(0, 100),
            st.floats(0, 100),
        ),
        max_size=50,
    )
)
def test_a_queue_never_waits_less_than_nothing_and_ends_empty(steps):
    queue, now, known = LoadQueue(), 0.0, set()
    for what, load, later, occupied in steps:
        now += later
        if what == "begin" and load not in known:
            queue.begin(load, now, occupied)
            known.add(load)
        elif what == "end":
            queue.end(load, now)
            known.discard(load)
        wait_s = queue.wait_s(now)
        assert 0 <= wait_s < math.inf
        queue._last_due = None  # looked for again, it is the one that was remembered
        assert queue.wait_s(now) == wait_s
        assert len(queue) == len(known)
    for load in list(known):
        queue.end(load, now)
    assert queue.wait_s(now) == 0


# --- the choice -----------------------------------------------------------------------------

cuts_of = st.lists(
    st.builds(Cut, st.integers(1, 10**6), st.floats(0, 1e4), st.floats(0, 1e4)), max_size=20
)


@given(cuts=cuts_of, ratio=st.floats(0.01, 100))
def test_the_choice_is_never_worse_than_loading_nothing_and_never_worse_than_another(cuts, ratio):
    best = best_cut(cuts, ratio)
    gains = [cut.saved_s - cut.load_s / ratio for cut in cuts]
    if best is None:
        assert all(gain < 0 for gain in gains)
    else:
        assert best.load_s <= ratio * best.saved_s * (1 + 1e-9)
        assert best.saved_s - best.load_s / ratio == max(gains)


def test_a_shorter_prefix_is_taken_where_the_end_costs_more_than_it_saves():
    whole, half = Cut(2000, 10.0, 8.0), Cut(1000, 1.0, 4.0)
    assert best_cut([half, whole], 1.0) == half
    assert best_cut([whole], 1.0) is None
    assert best_cut([half, whole], 4.0) == whole, "a second of recompute is worth four of loading"
    assert best_cut([], 1.0) is None


def test_of_equals_the_longest_prefix_spares_the_engine_most():
    assert best_cut([Cut(1, 1.0, 1.0), Cut(2, 2.0, 2.0)], 1.0) == Cut(2, 2.0, 2.0)


# --- probes ---------------------------------------------------------------------------------


def run_probes(*, outcome, cost_s, until):
    """Ask every tenth of a second; return when probes began."""
    probing, now, began = Probing(), 0.0, []
    probing.saw(0.0, cost_s, probe=False, good=False)
    while now < until:
        if probing.due(now):
            probing.begin()
            began.append(now)
            now += cost_s
            probing.saw(now, cost_s, probe=True, good=outcome)
        now += 0.1
    return began


@pytest.mark.parametrize("cost_s", [0.05, 1.0, 30.0])
def test_probes_in_vain_become_rare_and_take_a_twentieth_of_the_time_at_most(cost_s):
    hours = 4
    began = run_probes(outcome=False, cost_s=cost_s, until=hours * 3600)
    assert began, "storage that recovers must be noticed"
    assert len(began) * cost_s <= hours * 3600 / 20
    pauses = [b - a for a, b in itertools.pairwise(began)]
    assert max(pauses) <= max(Probing.MAX_PAUSE_S, 20 * cost_s) + cost_s + 1, "and for ever"
    assert pauses[-1] > pauses[0] or pauses[0] >= 20 * cost_s


def test_there_is_one_probe_at_a_time_and_a_good_load_resets_the_pause():
    probing = Probing()
    assert probing.due(0.0)
    probing.begin()
    assert not probing.due(1e6)
    for now in range(10):
        probing.saw(float(now), 0.1, probe=True, good=False)
    assert not probing.due(100.0)
    probing.saw(100.0, 0.1, probe=False, good=True)
    assert not probing.due(104.0)
    assert probing.due(106.0)


def test_storage_that_is_fast_for_a_probe_only_is_tried_less_and_less():
    probing, now, pauses = Probing(), 0.0, []
    for _ in range(6):
        start = now
        while not probing.due(now):
            now += 0.5
        pauses.append(now - start)
        probing.begin()
        probing.saw(now, 0.1, probe=True, good=True)
        probing.saw(now, 0.1, probe=False, good=False)  # believed, and then too slow
    assert pauses[-1] > 8 * pauses[1]
