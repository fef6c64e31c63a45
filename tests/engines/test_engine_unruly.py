"""Requests that do not behave, on an engine with few blocks: tokens stay right, and nothing is left."""

from __future__ import annotations

import json

import engine_lab as lab
import pytest
from places import LAB

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]
lab.needs_vllm()

SCENARIO = str(LAB / "unruly_scenario.py")
SESSION_SCENARIO = str(LAB / "session_scenario.py")


def scenario(root: object, *how: str) -> dict:
    return _answer(lab.run_program(SCENARIO, str(root), *how), '{"tokens"')


def _answer(said: str, begin: str) -> dict:
    (line,) = [line for line in said.splitlines() if line.startswith(begin)]
    return json.loads(line)


@pytest.fixture(scope="module")
def reference() -> dict[str, list[int]]:
    """What each prompt gives in an engine without fskv and with room for it."""
    return scenario("-")["tokens"]


@pytest.fixture
def root(tmp_path):
    lab.stored("llama", tmp_path / "root")
    return tmp_path / "root"


@pytest.mark.slow
def test_aborted_preempted_and_crowded_requests_get_right_tokens_and_leave_nothing(reference, root):
    """Aborted in a load that hangs, in a slow one, in a store and while deferred; preempted; many at once."""
    answer = scenario(root)
    for label, tokens in answer["tokens"].items():
        assert tokens == reference.get(label, tokens), label
    assert answer["tokens"].keys() >= {
        "after_hung",
        "after_slow",
        "stored",
        "after_stored",
        "after_deferred",
        "crowd 2",
        "many 499",
    }
    for part, left in answer["left"].items():
        assert not any(left.values()), (part, left)
    assert set(answer["left"]) == {"hung", "slow", "stored", "deferred", "crowd", "many"}
    # What should have happened did.
    assert answer["cached"]["stored"] > 0
    assert answer["deferred"]
    assert answer["preemptions"] > 0
    assert answer["many_cached"] > 0
    assert "2048" in answer["too_long"]
    lab.assert_sound(str(root))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guard", "label"), [("late_reads", "after_hung"), ("unflushed_stores", "stored")]
)
def test_negative_control_without_the_guard_an_aborted_request_spoils_another_one(
    guard, label, reference, root
):
    """Late bytes of its load reach the next owner's pages; its store takes the KV of the next owner."""
    tokens = scenario(root, guard)["tokens"][label]
    assert tokens != reference[label], "the scenario does not provoke what it should"


@pytest.mark.parametrize(
    ("how", "ends"),
    [
        ("bad_read", True),
        pytest.param("bad_read kept_reservation", False, marks=pytest.mark.slow),
    ],
)
def test_a_request_that_is_hit_again_after_a_failed_load_does_not_wait_for_itself(how, ends, root):
    """Its prompt takes 16 of 22 blocks. Negative control: vLLM keeps what it reserved for the failed load."""
    answer = scenario(root, *how.split())
    assert answer["ended"] is ends
    if ends:
        assert answer["tokens"]["main"] == lab.reference("llama")["main"]["tokens"]
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
def test_loads_of_sliding_windows_do_not_wait_for_each_other(how, ends, tmp_path):
    """Two on a cache for one and a half. Negative controls: vLLM reserves nothing, places are kept."""
    (tmp_path / "root").mkdir()
    answer = scenario(tmp_path / "root", *how.split())
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
def test_what_a_session_leaves_is_the_kv_of_its_text(how, right, num_cached, tmp_path):
    """Asked as one prompt afterwards. Negative control: vLLM appends all blocks to those that it has."""
    (tmp_path / "root").mkdir()
    arguments = (lab.checkpoint("llama"), str(tmp_path / "root"), *how.split())
    answer = _answer(lab.run_program(SESSION_SCENARIO, *arguments), '{"session"')
    assert answer["loaded"]["cached"] == num_cached
    assert (answer["loaded"]["tokens"] == answer["computed"]["tokens"]) is right
    assert answer["session"]["tokens"][1:] == answer["computed"]["tokens"][:8]
