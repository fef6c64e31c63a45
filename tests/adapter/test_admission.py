"""What vLLM's scheduler is told of loads that have failed: by whom it is asked, and what is forgotten."""

from __future__ import annotations

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
        self.request_id = request_id


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
