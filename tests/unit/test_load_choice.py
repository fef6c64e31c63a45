"""Where a request is loaded from, and who is waited for: the pure choice, without an engine."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fskv.routing.load_choice import Choice, Offer, choose


def offer(tokens, weight=1.0, hope=1000, **more):
    return Offer(tokens, hope, weight, **more)


def by_weight(*offers):
    return choose(offers, "weight", unknown)


def unknown(num_tokens):
    return None


def test_the_most_tokens_times_weight_wins_and_the_earlier_of_equals():
    assert by_weight(offer(500, 2.0), offer(900)) == Choice(0, ())
    assert by_weight(offer(400, 2.0), offer(900)) == Choice(1, ())
    assert by_weight(offer(450, 2.0), offer(900)) == Choice(0, ())
    assert by_weight(offer(0, 9.0), offer(1)) == Choice(1, ())
    assert by_weight(offer(0), offer(0)) == Choice(None, ())


def test_a_silent_child_is_waited_for_only_while_it_could_do_better():
    assert by_weight(offer(None), offer(1000)) == Choice(1, ())
    assert by_weight(offer(None, 2.0), offer(1000)) == Choice(1, (0,))
    assert by_weight(offer(None), offer(500)) == Choice(1, (0,))
    assert by_weight(offer(None), offer(None), offer(0)) == Choice(None, (0, 1))
    assert by_weight(offer(None, hope=0), offer(0)) == Choice(None, ()), "nothing is hoped for"
    assert by_weight(offer(None, 0.0), offer(0)) == Choice(None, ()), "it is never loaded from"


def test_weight_zero_is_never_loaded_from():
    assert by_weight(offer(1000, 0.0), offer(1)) == Choice(1, ())
    assert by_weight(offer(1000, 0.0)) == Choice(None, ())


def test_a_child_whose_load_failed_comes_last_but_before_nothing():
    assert by_weight(offer(900, 9.0, failed=True), offer(1)) == Choice(1, ())
    assert by_weight(offer(900, failed=True), offer(0)) == Choice(0, ())
    assert by_weight(offer(None, 9.0, failed=True), offer(1)) == Choice(1, ()), "nor waited for"


def test_first_takes_the_first_and_waits_only_for_those_before_it():
    def first(*offers):
        return choose(offers, "first", unknown)

    assert first(offer(1), offer(1000, 9.0)) == Choice(0, ())
    assert first(offer(0), offer(1)) == Choice(1, ())
    assert first(offer(None), offer(1)) == Choice(1, (0,))
    assert first(offer(1), offer(None)) == Choice(0, ())


def test_auto_takes_the_least_time_of_loading_and_computing_the_rest():
    def prefill_s(num_tokens):
        return num_tokens / 1000

    def auto(*offers):
        return choose(offers, "auto", prefill_s)

    # Ten tokens more in 10 s, or 10 ms of computing.
    assert auto(offer(990, load_s=0.1), offer(1000, load_s=10.0)) == Choice(0, ())
    # 128 tokens very fast, or all of them in half the time that the rest takes to compute.
    assert auto(offer(128, load_s=0.001), offer(1000, load_s=0.4)) == Choice(1, ())
    # Weights do not count where times are known.
    assert auto(offer(1000, 9.0, load_s=2.0), offer(1000, load_s=1.0)) == Choice(1, ())
    # A silent child that cannot be faster is not waited for; one that can is.
    assert auto(offer(None, load_s=2.0), offer(1000, load_s=1.0)) == Choice(1, ())
    assert auto(offer(None, load_s=0.5), offer(1000, load_s=1.0)) == Choice(1, (0,))


def test_auto_goes_by_weight_until_every_time_is_known():
    heavy, light = offer(1000, 2.0, load_s=9.0), offer(1000, load_s=1.0)
    assert choose([heavy, light], "auto", unknown) == Choice(1, ()), "of equal length: no prefill"
    assert choose([offer(1000, 2.0), light], "auto", unknown) == Choice(0, ())
    assert choose([offer(900, 2.0, load_s=9.0), light], "auto", unknown) == Choice(0, ())


_OFFERS = st.lists(
    st.builds(
        Offer,
        tokens=st.none() | st.integers(0, 50),
        hope=st.integers(0, 50),
        weight=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        failed=st.booleans(),
        load_s=st.none() | st.floats(0, 10),
    ),
    max_size=5,
)


@given(_OFFERS, st.sampled_from(["weight", "auto", "first"]), st.none() | st.floats(0, 1))
def test_whatever_they_say_the_choice_can_be_loaded_and_only_the_silent_are_waited_for(
    offers, how, per_token
):
    choice = choose(offers, how, lambda num: None if per_token is None else num * per_token)
    usable = [o for o in offers if o.weight > 0 and o.tokens]
    if choice.best is None:
        assert not usable
    else:
        assert offers[choice.best] in usable
        if not all(o.failed for o in usable):
            assert not offers[choice.best].failed
    for idx in choice.wait_for:
        assert offers[idx].tokens is None
        assert offers[idx].hope > 0
        assert offers[idx].weight > 0
