"""What vLLM's scheduler is told of loads that have failed: by whom it is asked, and what is forgotten."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import world

pytest.importorskip("vllm", reason="these tests need the vllm environment: make test")
pytestmark = world.VLLM


class Scheduler:
    """As vLLM's: it keeps blocks free for requests with loads under way, and asks for those without."""

    def __init__(self):
        self._inflight_prefills = set()
        self.requests = {}

    def ask(self, admission, request):
        return admission.steps_aside(request)


class Request:
    def __init__(self, request_id):
        self.request_id, self.finished = request_id, False

    def is_finished(self):
        return self.finished


@pytest.fixture
def asked():
    """A scheduler, its admission and a request whose load is under way."""
    from fskv.engines.vllm.admission import Admission

    scheduler, admission, request = Scheduler(), Admission(), Request("r")
    scheduler.requests["r"] = request
    assert not scheduler.ask(admission, request)
    scheduler._inflight_prefills.add(request)
    return scheduler, admission, request


def test_a_failed_load_steps_aside_once_and_its_reservation_is_gone(asked):
    scheduler, admission, request = asked
    admission.failed({"r"})
    assert [scheduler.ask(admission, request) for _ in range(2)] == [True, False]
    assert not scheduler._inflight_prefills


@pytest.mark.parametrize("how", ["finished", "gone"])
def test_of_a_request_that_ended_before_its_load_did_nothing_is_kept(asked, how):
    """One that is aborted while it loads has ended in an earlier step."""
    scheduler, admission, request = asked
    admission.ended({"r"})
    request.finished = True
    if how == "gone":
        del scheduler.requests["r"]
    admission.failed({"r"})
    assert not admission._failed


def test_negative_control_of_one_that_lives_it_is_kept_until_it_ends(asked):
    _, admission, _ = asked
    admission.failed({"r"})
    assert admission._failed == {"r"}
    admission.ended({"r"})
    assert not admission._failed


def test_a_scheduler_that_reserves_nothing_is_left_as_it_is():
    from fskv.engines.vllm.admission import Admission
    from fskv.engines.vllm.quirks import reserve_windows

    admission = Admission()
    other = SimpleNamespace(connector=admission)
    assert not other.connector.steps_aside(Request("r"))
    reserve_windows(other)  # another vLLM: nothing of it is touched
    assert not hasattr(other, "_request_remaining_blocks")


def test_where_nobody_tells_who_has_ended_the_failed_are_bounded():
    from fskv.engines.vllm import admission

    kept = admission.Admission()
    for number in range(3 * admission._MAX_FAILED):
        kept.failed({f"r{number}"})
    assert 0 < len(kept._failed) <= admission._MAX_FAILED + 1
