"""What is taken of a hit and how long it may take: the scheduler's side, with a clock of the test's."""

from __future__ import annotations

import math
import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import world
from world import Clock

pytest.importorskip("vllm", reason="these tests need the vllm environment: make test")

from fskv.config import StoreConfig
from fskv.data_path.job import JobResult
from fskv.engines.vllm import manager
from fskv.engines.vllm.budget import LoadBudget
from fskv.observe import metrics
from fskv.root.prefill_rate import read_prefill_rate
from fskv.root.root import Root

pytestmark = world.VLLM

CHUNK = 128  # tokens
PROMPT = 1000
FOUND = 896


def scheduled(tokens, finished=(), drafts=()):
    """Return what the budget reads of a step: {request: tokens}, and how many of these are a draft's."""
    return SimpleNamespace(
        finished_req_ids=set(finished),
        num_scheduled_tokens=tokens,
        scheduled_spec_decode_tokens={request: [-1] * n for request, n in dict(drafts).items()},
    )


def told(seconds, *, failed=False, late=False):
    """Return what one rank tells of a load."""
    return JobResult(0, True, failed, 0, seconds, late)


class Engine:
    """A budget and the engine around it."""

    def __init__(self, *, num_ranks=1, past=None, **options):
        """`past` is the prefill rate that an earlier engine has left in the root."""
        self.clock = Clock()
        self.left = []
        of_engine = SimpleNamespace(
            config=StoreConfig.from_mapping({"root": "/kv", "load_budget": "on", **options}),
            workers=[None] * num_ranks,
            was_asked=lambda req_id: not req_id.startswith("unasked"),
            past_prefill_per_s=past,
            leave_prefill_rate=self.left.append,
        )
        self.budget = LoadBudget(of_engine)
        self.budget._clock = self.clock
        self.sums = Counter()
        self.num_ranks = num_ranks
        self.num_jobs = 0

    def take(self, request, found=FOUND):
        return self.budget.take(request, found)

    def admit(self, request, taken):
        self.num_jobs += 1
        allowed_s = self.budget.allowed_s(request)
        job = self.num_jobs if taken else None
        self.budget.admitted(request, taken, job)
        return job, allowed_s

    def end(self, job, seconds, *, late=False, failed=False):
        self.clock.advance(seconds)
        report = told(seconds, failed=failed or late, late=late)
        for _ in range(self.num_ranks):
            self.budget.on_loads({job: [report]})

    def step(self, seconds, tokens, **more):
        """Schedule it and have the output."""
        self.budget.on_step(scheduled(tokens, **more))
        self.clock.advance(seconds)
        self.budget.on_output()

    def compute(self, request, seconds, num_tokens=PROMPT):
        self.admit(request, 0)
        self.step(seconds, {request: num_tokens})

    def load(self, request, seconds, found=FOUND):
        job, _ = self.admit(request, found)
        self.end(job, seconds)
        self.step(0.1, {request: PROMPT - found})

    def ask(self, request, **how):
        """Ask, and admit what is taken; return that, the job and its time limit."""
        taken = self.take(request, **how)
        return taken, *self.admit(request, taken)

    def requests(self):
        """Return how many requests of each kind were counted since the last call."""
        found = self.budget._counters.drain().items()
        return {label: n for (metric, label), n in found if metric is metrics.REQUESTS}

    def counted(self, metric):
        for (counted, _), amount in self.budget._counters.drain().items():
            self.sums[counted] += amount
        return self.sums[metric]


def known(load_s, recompute_s, **options):
    """An engine that has computed a prompt and loaded a hit."""
    engine = Engine(**options)
    engine.compute("computed", recompute_s)
    engine.load("loaded", load_s)
    return engine


def test_nothing_measured_loads_and_waits_as_long_as_the_deadline():
    engine = Engine()
    taken, _, allowed_s = engine.ask("a")
    assert (taken, allowed_s) == (FOUND, math.inf)
    assert engine.budget.recompute_s(FOUND) is engine.budget.prefill_per_s is None


@pytest.mark.parametrize("failed", [False, True])
def test_what_a_load_brought_and_saved_is_counted(failed):
    """A load that failed, the control, brought nothing."""
    engine = Engine(num_ranks=2)
    engine.compute("a", 10.0)
    _, job, _ = engine.ask("b")
    engine.end(job, 0.5, failed=failed)
    assert engine.counted(metrics.LOADED_REQUESTS) == (not failed)
    assert engine.counted(metrics.LOADED_TOKENS) == FOUND * (not failed)
    assert (engine.counted(metrics.SAVED_SECONDS) > 1.0) is not failed


@pytest.mark.parametrize("past", [100.0, None])
def test_the_first_hit_after_a_start_says_what_it_saved_by_the_rate_of_the_last_engine(past):
    """The control: no engine has left a rate. That of the last one gives no load up."""
    engine = Engine(past=past)
    job, allowed_s = engine.admit("a", FOUND)
    engine.end(job, 0.5)
    assert engine.counted(metrics.SAVED_SECONDS) == (FOUND / 100.0 - 0.5 if past else 0)
    assert allowed_s == math.inf


def test_a_measured_rate_is_left_and_counts_more_than_that_of_the_last_engine():
    engine = Engine(past=1.0)
    engine.budget.get_stats()
    assert engine.left == []
    engine.compute("a", 10.0)
    engine.budget.get_stats()
    assert engine.left == [pytest.approx(PROMPT / 10.0, rel=0.1)]
    job, _ = engine.admit("b", FOUND)
    engine.end(job, 0.5)
    assert engine.counted(metrics.SAVED_SECONDS) == pytest.approx(FOUND / 100.0 - 0.5, rel=0.1)


def test_the_tail_of_a_hit_is_no_rate_to_leave_and_does_not_count_more_than_that_of_the_last_engine():
    engine = Engine(past=100.0)
    engine.compute("a", 1.0, 4)
    engine.budget.get_stats()
    assert engine.left == []
    job, _ = engine.admit("b", FOUND)
    engine.end(job, 0.5)
    assert engine.counted(metrics.SAVED_SECONDS) == FOUND / 100.0 - 0.5


def test_a_rate_that_nobody_can_write_down_ends_no_engine_and_makes_no_second_thread(
    tmp_path, monkeypatch, handshake, make_manager
):
    """A hung mount costs one thread. The control: where it answers the rate is written."""
    directory = Root.open(str(tmp_path), create=True).open_namespace(world.make_identity())
    made = make_manager(workers=[handshake(directory=directory)], root=str(tmp_path))
    hung, calls, clock = threading.Event(), [], Clock()
    monkeypatch.setattr(manager.time, "monotonic", clock)

    def refuse(*_, **__):
        raise RuntimeError("can't start new thread")

    def hang(*what):
        calls.append(what)
        hung.wait(60)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        made.leave_prefill_rate(10.0)
    with monkeypatch.context() as patch:
        patch.setattr(manager, "write_prefill_rate", hang)
        for per_s in (100.0, 200.0, 400.0):
            clock.advance(100)
            made.leave_prefill_rate(per_s)
        world.wait_for(lambda: len(calls) == 1)
    hung.set()
    made._leaver.join(60)
    clock.advance(100)
    made.leave_prefill_rate(800.0)
    world.wait_for(lambda: read_prefill_rate(directory) is not None)
    assert read_prefill_rate(directory) == 800.0
    assert [per_s for _, per_s in calls] == [100.0], "one thread hung, no other was made"


def test_a_load_may_take_as_long_as_its_recompute_and_no_less_than_a_moment():
    engine = Engine()
    engine.compute("a", 10.0)
    taken, _, allowed_s = engine.ask("b")
    assert taken == FOUND
    assert allowed_s == pytest.approx(8.96, rel=0.01)
    assert engine.ask("c", found=CHUNK)[2] == pytest.approx(1.28, rel=0.01)
    fast = Engine()
    fast.compute("a", 0.01)
    assert fast.ask("b")[2] == 0.25


def slow(**options):
    """An engine whose last load was given up."""
    engine = known(0.5, 10.0, **options)
    _, job, _ = engine.ask("given up")
    engine.end(job, 9.0, late=True)
    return engine


def test_after_a_load_that_was_given_up_hits_are_declined_until_one_is_fast():
    engine = slow()
    assert [engine.ask(f"r{n}")[0] for n in range(15)] == [0] * 15
    taken, job, allowed_s = engine.ask("tried")
    assert taken == FOUND
    assert allowed_s == pytest.approx(8.96, rel=0.01), "within the same limit"
    engine.end(job, 9.0, late=True)
    assert engine.ask("still slow")[0] == 0
    for number in range(14):
        engine.ask(f"s{number}")
    _, job, _ = engine.ask("tried again")
    engine.end(job, 0.1)
    assert engine.ask("next")[0] == FOUND


def test_negative_control_without_the_option_slow_storage_is_loaded_from():
    engine = slow(load_budget="off")
    assert engine.ask("a")[::2] == (FOUND, math.inf)


def test_what_was_declined_is_counted_once():
    engine = slow()
    for _ in range(20):  # no pages were free: vLLM asks in every step, and none of them is a probe
        assert engine.take("a") == 0
    engine.admit("a", 0)
    assert engine.counted(metrics.DECLINED_TOKENS) == FOUND


def test_a_load_has_ended_when_every_rank_has_told():
    engine = Engine(num_ranks=2)
    _, job, _ = engine.ask("b")
    engine.budget.on_loads({job: [told(1.0)]})
    assert engine.counted(metrics.LOADED_REQUESTS) == 0
    engine.budget.on_loads({job: [told(3.0, failed=True, late=True)]})
    assert engine.counted(metrics.CUT_LOADS) == 1


def test_a_load_that_was_given_up_is_not_tried_again_for_this_request_and_declined_for_the_next():
    engine = known(0.5, 10.0)
    _, job, _ = engine.ask("a")
    engine.end(job, 9.0, late=True)
    assert engine.counted(metrics.CUT_LOADS) == 1
    assert engine.take("a") == 0
    assert engine.ask("b")[0] == 0
    failed = known(0.5, 10.0)  # the control: a file that is bad says nothing about its storage
    _, job, _ = failed.ask("a")
    failed.end(job, 9.0, failed=True)
    assert failed.take("a") == FOUND


def test_a_load_that_ends_after_its_request_was_aborted_leaves_nothing_behind():
    engine = known(0.5, 10.0)
    _, job, _ = engine.ask("a")
    engine.step(0.1, {}, finished=["a", "computed", "loaded"])
    engine.end(job, 5.0, late=True)
    assert not engine.budget._asked
    assert not engine.budget._loads


def test_each_admitted_request_is_a_hit_a_miss_or_an_unused_hit_and_pending_loads_end():
    engine = known(load_s=1.0, recompute_s=60.0)

    def pending():
        stats = engine.budget.get_stats()
        gauges = {} if stats is None else stats.data["data"]
        return gauges.get("vllm:fskv_pending_loads")

    assert engine.requests() == {"hit": 1, "miss": 1, "unused": 0}
    taken, job, _ = engine.ask("loads")
    assert taken
    assert pending() == {(): 1.0}
    engine.end(job, 1.0)
    assert pending() == {(): 0.0}
    assert engine.budget.get_stats() is None, "a gauge that has not changed is not told again"
    # What it found is another child's to load; for the next one nothing is found.
    assert engine.take("elsewhere")
    engine.admit("elsewhere", 0)
    assert engine.take("nothing")
    assert engine.take("nothing", found=0) == 0
    engine.admit("nothing", 0)
    engine.take("ends before it is admitted")
    engine.step(0.1, {}, finished=["ends before it is admitted"])
    assert "ends before it is admitted" not in engine.budget._asked
    assert engine.requests().items() >= {("unused", 1), ("miss", 1)}


def test_a_request_is_counted_once_however_often_vllm_admits_it():
    """VLLM says so again when a load has ended, after a preemption, and for a recompute."""
    engine = known(load_s=1.0, recompute_s=60.0)
    engine.requests()
    for failed in (False, True):
        request = f"failed: {failed}"
        _, job, _ = engine.ask(request)
        engine.end(job, 1.0, failed=failed)
        engine.admit(request, 0)
        engine.admit(request, 0)
        assert engine.requests() == {"hit": 1}
    engine.admit("unasked: shorter than a chunk", 0)
    assert engine.requests() == {}
    engine.step(0.1, {}, finished=["failed: False", "failed: True"])
    engine.admit("failed: True", 0)  # the control: another request of that name
    assert engine.requests() == {"miss": 1}
    engine.step(0.1, {}, finished=["failed: True"])


# --- what is predicted --------------------------------------------------------------------------


def test_what_is_decoded_and_drafted_is_no_prompt():
    engine = Engine()
    engine.compute("prompt", 10.0)
    decoding = {f"r{number}": 5 for number in range(1000)}
    engine.step(0.1, decoding, drafts=dict.fromkeys(decoding, 4))
    assert engine.budget.recompute_s(PROMPT) == pytest.approx(10.0, rel=0.01)
    engine.step(0.1, decoding)  # the control: without drafts they are ends of prompts
    assert engine.budget.recompute_s(PROMPT) < 5.0
