"""What is taken of a hit and how long it may take: the scheduler's side, with a clock of the test's."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import world
from world import Clock

from fskv.config import StoreConfig
from fskv.hybrid_planner import GroupKind, GroupSpec
from fskv.observe import metrics

pytest.importorskip("vllm", reason="these tests need the vllm environment: make test")
pytestmark = world.VLLM

MIB = 1 << 20
CHUNK = 128  # tokens
FULL = GroupSpec(0, GroupKind.FULL, CHUNK, None)
WINDOW = GroupSpec(1, GroupKind.SLIDING_WINDOW, CHUNK, CHUNK)
STATE = GroupSpec(1, GroupKind.STATE, CHUNK, None)
PROMPT = 1000
FOUND = 896


@dataclass(eq=False)
class Asked:
    """What the budget reads of vLLM's request."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int = 0


def told(seconds, done_share=1.0, *, failed=False, late=False, busy_s=None):
    """Return what one rank tells of a load."""
    from fskv.engines.vllm.budget import LoadReport

    return LoadReport(1, seconds, seconds if busy_s is None else busy_s, done_share, failed, late)


class Engine:
    """A budget and the engine around it: chunks of 2 MiB, `step_s` per 1000 tokens of prompt."""

    def __init__(
        self, groups=(FULL,), *, num_ranks=1, max_step_tokens=8192, num_threads=8, **options
    ):
        from fskv.engines.vllm.budget import LoadBudget

        self.clock = Clock()
        far = {"load_deadline_s": 1000}
        config = StoreConfig.from_mapping({"root": "/kv", "load_budget": "auto", **far, **options})
        self.budget = LoadBudget(
            config,
            list(groups),
            1,
            num_ranks=num_ranks,
            max_step_tokens=max_step_tokens,
            file_sizes=lambda: {group.group_idx: 2 * MIB for group in groups},
            num_threads=lambda: num_threads,
            clock=self.clock,
        )
        self.sums = Counter()
        self.num_ranks = num_ranks
        self.num_jobs = 0
        self.lookups = []

    def request(self, name, num_tokens=PROMPT):
        return Asked(name, num_tokens)

    def take(self, request, found=FOUND, legal=lambda cap: cap // CHUNK * CHUNK, computed=0):
        """Ask what to take; `legal` is what vLLM finds below a cap."""
        self.lookups = []

        def lookup(cap):
            self.lookups.append(cap)
            return legal(min(cap, found))

        return self.budget.take(request, computed, found, lookup)

    def admit(self, request, taken, computed=0):
        self.num_jobs += 1
        limit = self.budget.limit(request.request_id)
        job = self.num_jobs if taken else None
        self.budget.admitted(request, taken, computed, job)
        request.num_computed_tokens = computed + taken
        self.look_s = limit.look_s
        return job, limit.allowed_s

    def end(self, job, seconds, *, done_share=1.0, late=False, failed=False):
        self.clock.advance(seconds)
        report = told(seconds, done_share, failed=failed or late, late=late)
        for _ in range(self.num_ranks):
            self.budget.on_loads({job: report})

    def step(self, seconds, scheduled, finished=()):
        """Schedule {request: tokens} and have the output."""
        self.budget.on_step(
            SimpleNamespace(
                finished_req_ids=set(finished),
                num_scheduled_tokens={r.request_id: n for r, n in scheduled.items()},
            )
        )
        for request, num_tokens in scheduled.items():
            request.num_computed_tokens += num_tokens
        self.clock.advance(seconds)
        self.budget.on_output()

    def compute(self, name, seconds, num_tokens=PROMPT):
        request = self.request(name, num_tokens)
        self.admit(request, 0)
        self.step(seconds, {request: num_tokens})

    def load(self, name, seconds, found=FOUND):
        request = self.request(name)
        job, _ = self.admit(request, found)
        self.end(job, seconds)
        self.step(0.1, {request: PROMPT - found})

    def ask(self, name, **how):
        """Ask, and admit what is taken; return that, the job and its time limit."""
        request = self.request(name)
        taken = self.take(request, **how)
        return taken, *self.admit(request, taken)

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
    assert engine.budget.predicted_load_s(FOUND, 0) is None


@pytest.mark.parametrize("failed", [False, True])
def test_what_a_load_brought_and_saved_is_counted(failed):
    """A load that failed, the control, brought nothing."""
    engine = Engine(num_ranks=2)
    engine.compute("a", 10.0)
    request = engine.request("b")
    job, _ = engine.admit(request, FOUND)
    engine.end(job, 0.5, failed=failed)
    assert engine.counted(metrics.LOADED_REQUESTS) == (not failed)
    assert engine.counted(metrics.LOADED_TOKENS) == FOUND * (not failed)
    assert (engine.counted(metrics.SAVED_SECONDS) > 1.0) is not failed


def after_a_tail(**of_engine):
    """An engine that has loaded most of a prompt and computed its last 17 tokens, in a slow first step."""
    engine = Engine(**of_engine)
    request = engine.request("first", 4225 + 16)
    job, _ = engine.admit(request, 4224)
    engine.end(job, 0.2)
    engine.step(0.919, {request: 17})
    return engine


def test_the_tail_of_a_loaded_prompt_gives_no_rate_of_prefill():
    engine = after_a_tail()
    assert engine.budget.times.prefill_tokens_per_s is None
    assert engine.budget.times.predict_prefill_s(4352) is None
    request = engine.request("second", 4369)
    job, allowed_s = engine.admit(request, 4352)
    engine.end(job, 0.2)
    assert engine.counted(metrics.LOADED_REQUESTS) == 2
    assert engine.counted(metrics.SAVED_SECONDS) == 0, "not known is not 235 s"
    # Neither what is taken of a hit nor how long a lookup may take is decided by it.
    assert engine.ask("third")[0] == FOUND
    assert allowed_s == math.inf
    assert engine.budget.recompute_s(34) < 1.0, "as of an engine of which nothing is known"
    engine.compute("a real prompt", 10.0)
    assert engine.budget.times.predict_prefill_s(4352) == pytest.approx(43.5, rel=0.01)


@pytest.mark.parametrize("threshold", [96, 0], ids=["", "negative_control"])
def test_an_engine_that_computes_long_prompts_in_small_pieces_learns_its_rate(threshold):
    """vLLM's long_prefill_token_threshold: no step computes more of a prompt while others run."""
    from fskv.engines.vllm.budget import max_step_tokens

    scheduling = SimpleNamespace(
        max_num_batched_tokens=8192, long_prefill_token_threshold=threshold
    )
    model = SimpleNamespace(max_model_len=4096)
    config = SimpleNamespace(scheduler_config=scheduling, model_config=model)
    engine = Engine(max_step_tokens=max_step_tokens(config))
    request = engine.request("long", 4096)
    engine.admit(request, 0)
    engine.step(0.96, {request: 96})
    assert (engine.budget.times.prefill_tokens_per_s is not None) is bool(threshold)


def test_negative_control_by_its_tail_a_hit_had_saved_four_minutes():
    """The step counts where it is as large as this engine's can be."""
    engine = after_a_tail(max_step_tokens=17)
    request = engine.request("second", 4369)
    job, _ = engine.admit(request, 4352)
    engine.end(job, 0.2)
    assert engine.counted(metrics.SAVED_SECONDS) == pytest.approx(235, rel=0.01)
    assert engine.budget.recompute_s(34) > 200


def test_a_first_load_may_cost_a_twentieth_of_the_recompute():
    engine = Engine()
    engine.compute("a", 10.0)
    taken, _, allowed_s = engine.ask("b")
    assert engine.look_s == math.inf, "no pace is known"
    assert taken == FOUND
    assert allowed_s == pytest.approx(0.5)


def test_fast_storage_is_loaded_from_and_slow_storage_is_not():
    assert known(0.1, 10.0).ask("a")[0] == FOUND
    slow = known(20.0, 10.0)
    assert slow.ask("a")[0] == 0
    assert slow.lookups == [0], "vLLM must not remember a hit that is not loaded"


def test_negative_control_without_the_option_slow_storage_is_loaded_from_but_measured():
    engine = known(20.0, 10.0, load_budget="off")
    taken, _, allowed_s = engine.ask("a")
    assert (taken, allowed_s) == (FOUND, math.inf)
    assert engine.lookups == []
    assert engine.budget.predicted_load_s(FOUND, 0) > 19


def test_a_number_says_what_a_second_of_recompute_is_worth():
    assert known(20.0, 10.0, load_budget=4).ask("a")[0] == FOUND
    assert known(5.0, 10.0, load_budget=0.25).ask("a")[0] == 0


def test_the_time_limit_follows_the_prediction_and_never_exceeds_what_the_load_saves():
    for load_s, expected in ((0.01, 0.5), (1.0, 3.0), (6.0, 8.96)):
        engine = known(load_s, 10.0)
        _, _, allowed_s = engine.ask("a")
        assert allowed_s == pytest.approx(expected, rel=0.02), load_s
        assert engine.look_s == pytest.approx(0.5, rel=0.02), (
            "5 % of the recompute, then its pace counts"
        )


def test_a_load_that_was_given_up_is_not_tried_again_for_this_request_and_declined_for_the_next():
    engine = Engine()
    engine.compute("a", 10.0)
    request = engine.request("b")
    job, allowed_s = engine.admit(request, engine.take(request))
    engine.end(job, allowed_s, done_share=0.0, late=True)
    request.num_computed_tokens = 0
    assert engine.take(request) == 0
    engine.admit(request, 0)
    engine.step(6.0, {request: PROMPT})
    assert engine.take(engine.request("c")) == 0
    assert engine.counted(metrics.CUT_LOADS) == 1
    assert engine.counted(metrics.CUT_LOAD_SECONDS) == pytest.approx(allowed_s)


def test_a_load_that_failed_for_another_reason_says_nothing_about_the_rate():
    engine = known(0.1, 10.0)
    _, job, _ = engine.ask("a")
    engine.end(job, 0.001, done_share=0.0, failed=True)
    assert engine.ask("b")[0] == FOUND
    assert engine.counted(metrics.CUT_LOADS) == 0


def test_loads_that_run_count_and_so_do_prompts_that_are_computed_first():
    engine = known(4.0, 10.0)
    alone = engine.budget.predicted_load_s(FOUND, 0)
    assert engine.ask("a")[0] == FOUND
    assert engine.budget.predicted_load_s(FOUND, 0) == pytest.approx(2 * alone, rel=0.05)
    assert engine.ask("b")[0] == FOUND
    assert engine.ask("c")[0] == 0, "12 s of loading, 9 of recompute"
    # Whoever recomputes now waits for c: loading is worth it again.
    assert engine.ask("d")[0] == FOUND


def test_a_prefix_that_is_there_by_the_deadline_is_taken_of_a_hit_that_is_not():
    engine = known(7.0, 100.0)  # a second a chunk
    slow = Engine(load_deadline_s=3.7)
    slow.budget.times = engine.budget.times
    taken, _, _ = slow.ask("a")
    assert taken == 4 * CHUNK
    assert slow.lookups == [4 * CHUNK]
    assert slow.counted(metrics.DECLINED_TOKENS) == FOUND - taken
    assert slow.counted(metrics.DECLINED_CHUNKS) == 3


def test_caps_reach_a_token_past_the_hit_where_a_group_has_a_window():
    engine = Engine((FULL, WINDOW), load_deadline_s=3.7)
    engine.budget.times = known(7.0, 100.0).budget.times
    engine.ask("a")
    (cap,) = engine.lookups
    assert cap % CHUNK == 1


def test_a_shorter_legal_hit_that_is_not_worth_it_is_not_taken_and_an_unknown_one_is_asked_again():
    engine = known(7.0, 100.0)
    bounded = Engine(load_deadline_s=3.7)
    bounded.budget.times = engine.budget.times
    assert bounded.take(bounded.request("a"), legal=lambda cap: None) is None
    assert bounded.take(bounded.request("b"), legal=lambda cap: 0) == 0


@pytest.mark.parametrize("num_threads", [3, 4])
def test_declined_storage_is_probed_with_a_short_load_that_costs_little_and_is_used_when_fast(
    num_threads,
):
    engine = known(20.0, 10.0, num_threads=num_threads)
    soon = engine.request("soon")
    assert engine.take(soon) == 0
    engine.admit(soon, 0)
    engine.step(10.0, {soon: PROMPT})
    engine.clock.advance(1000)
    taken, job, allowed_s = engine.ask("probe", found=FOUND)
    assert taken == num_threads * CHUNK, "a file for every I/O thread"
    assert allowed_s == pytest.approx(0.3, rel=0.05), "3 % of the recompute"
    assert engine.ask("beside")[0] == 0, "one at a time"
    engine.end(job, 0.05)
    assert engine.ask("after")[0] == FOUND
    assert engine.counted(metrics.PROBE_LOADS) == 1


def test_a_probe_in_vain_is_not_repeated_at_once():
    engine = known(20.0, 10.0)
    engine.clock.advance(1000)
    request = engine.request("probe")
    job, allowed_s = engine.admit(request, engine.take(request))
    assert job is not None
    engine.end(job, allowed_s, done_share=0.0, late=True)
    request.num_computed_tokens = 0
    engine.step(10.0, {request: PROMPT})
    assert engine.take(engine.request("next")) == 0
    engine.clock.advance(1000)
    assert engine.take(engine.request("much later")) > 0


def test_where_no_short_hit_is_legal_a_probe_takes_all_of_it():
    engine = known(20.0, 10.0)
    engine.clock.advance(1000)
    taken, _, allowed_s = engine.ask("probe", legal=lambda cap: FOUND if cap >= FOUND else 0)
    assert taken == FOUND
    assert allowed_s < 1


@pytest.mark.parametrize(
    ("groups", "past_cap"), [((FULL,), 0), ((FULL, WINDOW), 1), ((FULL, STATE), 1)]
)
def test_a_probe_of_all_of_it_is_legal_where_vllm_gives_up_the_last_token_of_a_capped_hit(
    groups, past_cap
):
    """With one state at the end of the prompt no shorter hit is legal: nothing was loaded ever again."""
    engine = known(20.0, 10.0, groups=groups)
    engine.clock.advance(1000)

    def lookup(cap):
        return FOUND if cap - past_cap >= FOUND else 0

    assert engine.budget.take(engine.request("probe"), 0, FOUND, lookup) == FOUND


def test_asking_for_many_requests_in_one_step_looks_at_each_of_those_before_once(monkeypatch):
    from fskv.engines.vllm.budget import LoadBudget

    engine = known(0.1, 10.0)
    looks = Counter()
    real = LoadBudget._prefill_left_s
    monkeypatch.setattr(
        LoadBudget,
        "_prefill_left_s",
        lambda self, request: looks.update([request.request_id]) or real(self, request),
    )
    for number in range(200):
        engine.ask(f"{number}")
    assert looks.total() < 3 * 200, "and not for each request all those before it"
    assert engine.budget._prefill_ahead_s("other") == pytest.approx(
        sum(real(engine.budget, request) for request in engine.budget._prefilling.values())
    )
    assert engine.budget._prefill_ahead_s("7") < engine.budget._prefill_ahead_s("other")


def test_what_a_rank_tells_of_a_load_from_before_a_reset_is_not_kept():
    engine = Engine(num_ranks=2)
    engine.compute("computed", 10.0)
    _, job, _ = engine.ask("a")
    engine.budget.on_loads({job: told(0.1)})
    engine.budget.reset()
    engine.budget.on_loads({job: told(0.1)})
    assert engine.budget._reports == {}


def test_what_was_declined_is_counted_once_with_its_predictions_and_what_it_really_took():
    engine = known(20.0, 10.0)
    request = engine.request("a")
    for _ in range(5):  # no pages were free: vLLM asks in every step
        assert engine.take(request) == 0
    engine.admit(request, 0)
    assert engine.counted(metrics.DECLINED_TOKENS) == FOUND
    assert engine.counted(metrics.DECLINED_CHUNKS) == 7
    assert engine.counted(metrics.DECLINED_LOAD_SECONDS) == pytest.approx(20.0)
    assert engine.counted(metrics.DECLINED_PREFILL_SECONDS) == pytest.approx(8.96, rel=0.05)
    engine.step(4.0, {request: 500})
    engine.step(4.0, {request: 500})
    # All of the first step and 396 of the 500 tokens of the second.
    assert engine.counted(metrics.DECLINED_ACTUAL_SECONDS) == pytest.approx(4 + 4 * 396 / 500)


def test_a_hit_that_another_child_of_a_multi_connector_serves_was_not_declined():
    engine = known(0.1, 10.0)
    request = engine.request("a")
    assert engine.take(request) == FOUND
    engine.admit(request, 0)
    assert engine.counted(metrics.DECLINED_TOKENS) == 0


def test_a_step_that_was_scheduled_before_the_last_output_counts_from_that_output():
    engine = Engine()
    first, second = engine.request("a"), engine.request("b")
    for request in (first, second):
        engine.admit(request, 0)
    schedule = engine.budget.on_step
    for request in (first, second):  # both are scheduled before the first has ended
        schedule(
            SimpleNamespace(
                finished_req_ids=set(), num_scheduled_tokens={request.request_id: PROMPT}
            )
        )
    for _ in range(2):
        engine.clock.advance(10.0)
        engine.budget.on_output()
    assert engine.budget.times.predict_prefill_s(PROMPT) == pytest.approx(10.0, rel=0.01)


def test_a_load_has_ended_when_every_rank_has_told():
    engine = Engine(num_ranks=2)
    engine.compute("a", 10.0)
    _, job, _ = engine.ask("b")
    engine.clock.advance(1)
    engine.budget.on_loads({job: told(1.0)})
    assert engine.budget.times.predict_load_s(2 * MIB, 1) is None
    engine.budget.on_loads({job: told(3.0)})
    assert engine.budget.predicted_load_s(FOUND, 0) == pytest.approx(3.0)


def test_after_a_reset_what_is_told_of_older_jobs_counts_for_nothing():
    engine = known(0.1, 10.0)
    _, job, _ = engine.ask("a")
    before = engine.budget.predicted_load_s(FOUND, 0)
    engine.budget.reset()
    engine.end(job, 50.0)
    assert engine.budget.predicted_load_s(FOUND, 0) <= before


def test_finished_requests_leave_nothing_behind():
    engine = known(20.0, 10.0)
    names = [f"r{n}" for n in range(50)]
    for name in names:
        request = engine.request(name)
        engine.admit(request, engine.take(request))
    engine.step(0.1, {}, finished=[*names, "computed", "loaded"])
    budget = engine.budget
    for kept in (budget._prefilling, budget._declined, budget._verdicts, budget._given_up):
        assert not kept


def test_a_load_that_ends_after_its_request_was_aborted_leaves_nothing_behind():
    engine = known(0.5, 10.0)
    for n in range(20):
        request = engine.request(f"r{n}")
        job, _ = engine.admit(request, engine.take(request))
        assert job is not None or n, "storage is declined once it was late"
        engine.step(0.1, {}, finished=[f"r{n}"])
        if job is not None:
            engine.end(job, 5.0, done_share=0.1, late=True)
    assert not engine.budget._given_up
    assert not engine.budget._loads


def test_each_admitted_request_is_a_hit_a_miss_or_an_unused_hit_and_pending_loads_end():
    engine = known(load_s=1.0, recompute_s=60.0, load_budget=1)

    def counts():
        found = engine.budget._counters.drain()
        return {label: n for (metric, label), n in found.items() if metric is metrics.REQUESTS}

    def pending():
        stats = engine.budget.get_stats()
        gauges = {} if stats is None else stats.data["data"]
        return gauges.get("vllm:fskv_pending_loads")

    assert counts() == {"hit": 1, "miss": 1, "unused": 0}
    taken, job, _ = engine.ask("loads")
    assert taken
    assert pending() == {(): 1.0}
    engine.end(job, 1.0)
    assert pending() == {(): 0.0}
    # What it found is another child's to load; for the next one nothing is found.
    request = engine.request("elsewhere")
    assert engine.take(request)
    engine.admit(request, 0)
    request = engine.request("nothing")
    engine.budget.forget(request.request_id)
    engine.admit(request, 0)
    engine.take(engine.request("ends before it is admitted"))
    engine.step(0.1, {}, finished=["ends before it is admitted"])
    assert engine.budget._found == set()
    assert counts().items() >= {("unused", 1), ("miss", 1)}


def test_a_request_is_counted_once_however_often_vllm_admits_it():
    """VLLM says so again when a load has ended, after a preemption, and for a recompute."""
    engine = known(load_s=1.0, recompute_s=60.0, load_budget=1)

    def counts():
        found = engine.budget._counters.drain()
        return {label: n for (metric, label), n in found.items() if metric is metrics.REQUESTS if n}

    counts()
    for failed in (False, True):
        request = engine.request(f"failed: {failed}")
        job, _ = engine.admit(request, engine.take(request))
        engine.end(job, 1.0, failed=failed)
        engine.budget.admitted(request, 0, 0, None)
        engine.budget.admitted(request, 0, 0, None)
        assert counts() == {"hit": 1}
    unasked = engine.request("shorter than a chunk")
    engine.budget.admitted(unasked, 0, 0, None, asked=False)
    assert counts() == {}
    engine.step(0.1, {}, finished=["failed: False", "failed: True", "shorter than a chunk"])
    engine.admit(engine.request("failed: True"), 0)  # the control: another request of that name
    assert counts() == {"miss": 1}
    engine.step(0.1, {}, finished=["failed: True", "computed", "loaded"])
    assert engine.budget._counted == set()


def test_what_is_below_zero_is_counted_as_nothing_or_prometheus_would_raise_in_vllms_loop():
    engine = known(load_s=1.0, recompute_s=0.5)
    _, job, _ = engine.ask("slower than computing it")
    engine.end(job, 30.0)
    assert engine.counted(metrics.SAVED_SECONDS) == 0
    for metric in (*metrics.BUDGET_COUNTERS, *metrics.WORKER_COUNTERS, *metrics.SCHEDULER_COUNTERS):
        engine.budget._counters.add(metric, -1.0, (*metric.values, "")[0])
    assert all(amount >= 0 for amount in engine.budget._counters.drain().values())
