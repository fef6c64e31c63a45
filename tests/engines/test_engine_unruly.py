"""Requests that do not behave, on an engine with few blocks: tokens stay right, and nothing is left."""

from __future__ import annotations

import engine_lab as lab
import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
lab.needs_vllm()


def scenario(root: str, *how: str) -> dict:
    return lab.scenario("unruly_scenario.py", root, *how)


@pytest.fixture(scope="module")
def reference() -> dict[str, list[int]]:
    """What each prompt gives in an engine without fskv and with room for it."""
    return scenario("-")["tokens"]


@pytest.fixture
def stored(root) -> str:
    lab.stored("llama", root)
    return root


@pytest.mark.slow
def test_aborted_preempted_and_crowded_requests_get_right_tokens_and_leave_nothing(
    reference, stored
):
    """Aborted in a load that hangs, in a slow one, in a store and while deferred; preempted; many at once."""
    answer = scenario(stored)
    for label, tokens in answer["tokens"].items():
        assert tokens == reference.get(label, tokens), label
    asked = {"after_hung", "after_slow", "stored", "after_stored", "after_deferred"}
    assert answer["tokens"].keys() >= {*asked, "crowd 2", "many 499"}
    for part, left in answer["left"].items():
        assert not any(left.values()), (part, left)
    assert set(answer["left"]) >= {"hung", "slow", "stored", "deferred", "crowd", "many"}
    # What should have happened did.
    assert answer["cached"]["stored"] > 0
    assert answer["deferred"]
    assert answer["crowd"] > 0, "no request was preempted"
    assert answer["many"] > 0
    assert "2048" in answer["too_long"]
    lab.assert_sound(stored)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guard", "label"), [("late_reads", "after_hung"), ("unflushed_stores", "stored")]
)
def test_negative_control_without_the_guard_an_aborted_request_spoils_another_one(
    guard, label, reference, stored
):
    """Late bytes of its load reach the next owner's pages; its store takes the KV of the next owner."""
    tokens = scenario(stored, guard)["tokens"][label]
    assert tokens != reference[label], "the scenario does not provoke what it should"


@pytest.mark.parametrize(
    ("how", "ends"),
    [
        ("bad_read", True),
        pytest.param("bad_read kept_reservation", False, marks=pytest.mark.slow),
    ],
)
def test_a_request_that_is_hit_again_after_a_failed_load_does_not_wait_for_itself(
    how, ends, stored
):
    """Its prompt takes 16 of 22 blocks. Negative control: vLLM keeps what it reserved for the failed load."""
    answer = scenario(stored, *how.split())
    assert answer["ended"] is ends
    if ends:
        assert answer["tokens"]["main"] == lab.main_tokens("llama")
        assert 0 < answer["cached"]["main"] < 15 * 128


@pytest.mark.parametrize(
    ("how", "ends"),
    [
        ("two_loads", True),
        ("failed_first", True),
        pytest.param("two_loads no_windows", False, marks=pytest.mark.slow),
        pytest.param("failed_first in_place", False, marks=pytest.mark.slow),
    ],
)
def test_loads_of_sliding_windows_do_not_wait_for_each_other(how, ends, root):
    """Two on a cache for one and a half. Negative controls: vLLM reserves nothing, places are kept."""
    answer = scenario(root, *how.split())
    assert answer["ended"] is ends
    if ends:
        assert answer["tokens"] == answer["computed"]
        assert answer["cached"]["after_slow"] > 1000
        assert (answer["cached"]["after_hung"] > 1000) is (how == "two_loads")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "right", "num_cached"),
    [("tier", True, 9 * 128), ("connector", True, 0), ("tier unguarded", False, 9 * 128)],
)
def test_what_a_session_leaves_is_the_kv_of_its_text(how, right, num_cached, root):
    """Asked as one prompt afterwards. Negative control: vLLM appends all blocks to those that it has."""
    answer = lab.scenario("session_scenario.py", lab.checkpoint("llama"), root, *how.split())
    assert answer["loaded"]["cached"] == num_cached
    assert (answer["loaded"]["tokens"] == answer["computed"]["tokens"]) is right
    assert answer["session"]["tokens"][1:] == answer["computed"]["tokens"][:8]
