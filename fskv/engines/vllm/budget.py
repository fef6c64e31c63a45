"""Load or recompute: the scheduler's side of option `load_budget`.

Measures what prefill takes, from the scheduler's own steps, and counts what loads save. With the option on a
load that takes as long as the recompute of its tokens is given up, nothing is held against its chunks, and
the next hits are recomputed. Runs on the scheduler's thread.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fskv.data_path.job import JobResult
from fskv.engines.vllm.manager import FskvManager
from fskv.engines.vllm.metrics import to_stats
from fskv.observe import metrics
from fskv.observe.metrics import Counters, Gauge

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.sched.output import SchedulerOutput

# A load is given up after its recompute's time, and never before this: a disk's bad moment, an engine's step.
_LEAST_S = 0.25
_DECLINED = 15  # hits in a row after a load that was given up; the next one is tried
_HALF_TOKENS = 8192.0  # prefilled since: an older step counts half
_LEAST_STEP_TOKENS = 256  # of prompts: fewer say little, unless all steps of the engine are small

Reports = dict[int, list[JobResult]]  # by job id: what became of a load, one of each rank that told


@dataclass
class _Asked:
    """The hit and the decision of one request, kept until the request ends."""

    found: int = 0  # tokens, since it was admitted last
    taken: int = 0  # of these
    counted: bool = False  # by `fskv_requests`
    given_up: bool = False  # it may not try a load again


@dataclass
class _Load:
    by: _Asked
    tokens: int
    told: list[JobResult] = field(default_factory=list)


class LoadBudget:
    """Decides for each hit of a connector whether it is loaded, and counts requests. Scheduler's side."""

    def __init__(self, manager: FskvManager) -> None:
        self._manager = manager
        self._on = manager.config.load_budget == "on"
        self._clock = time.monotonic
        self._counters = Counters(*metrics.BUDGET_COUNTERS)
        self._shown: dict[Gauge, float] = {}
        self._asked: defaultdict[str, _Asked] = defaultdict(_Asked)  # by request
        self._num_to_decline = 0
        self._loads: dict[int, _Load] = {}  # by job id
        self._steps: deque[tuple[float, int]] = deque(maxlen=64)  # (when, prompt tokens)
        self._largest_step = 0
        self._last_output_at = -math.inf
        self._tokens = self._seconds = 0.0  # of steps, the older ones weighing less

    @property
    def prefill_per_s(self) -> float | None:
        """The prompt tokens that steps compute in a second; None: not measured yet."""
        return self._tokens / self._seconds if self._tokens else None

    @property
    def _is_sure(self) -> bool:
        """True if a measured step computed enough tokens for a rate that other engines may use."""
        return self._largest_step >= _LEAST_STEP_TOKENS

    def recompute_s(self, tokens: int) -> float | None:
        """Return the seconds that computing so many tokens takes; None: not measured yet."""
        return tokens * self._seconds / self._tokens if self._tokens else None

    def take(self, req_id: str, found: int) -> int:
        """Return how many of the `found` tokens to load: all, or none."""
        asked = self._asked[req_id]
        # vLLM asks in each step: an answer holds until another number is found.
        if asked.found != found:
            declined = asked.given_up
            if found and not declined and self._num_to_decline:
                self._num_to_decline -= 1
                declined = True
            asked.found, asked.taken = found, 0 if declined else found
        return asked.taken

    def allowed_s(self, req_id: str) -> float:
        """Return how long the load of this request may take; vLLM is about to submit it."""
        recompute_s = self.recompute_s(self._asked[req_id].taken)
        return max(_LEAST_S, recompute_s) if self._on and recompute_s is not None else math.inf

    def admitted(self, req_id: str, num_loaded: int, job_id: int | None) -> None:
        """Note that vLLM has pages for the request: the decision about it holds. Said again after a load."""
        by = self._asked[req_id]
        if self._manager.was_asked(req_id) and not by.counted:
            result = "hit" if num_loaded else "unused" if by.found else "miss"
            self._counters.add(metrics.REQUESTS, 1, result)
            by.counted = True
        if job_id is not None:
            self._loads[job_id] = _Load(by, num_loaded)
        else:
            self._counters.add(metrics.DECLINED_TOKENS, by.found - by.taken)
        by.found = by.taken = 0

    def on_step(self, scheduled: SchedulerOutput) -> None:
        """Note a scheduled step: prompt tokens are all that a request computes beside one token and its
        drafts.
        """
        for req_id in scheduled.finished_req_ids:
            self._asked.pop(req_id, None)
        drafts = scheduled.scheduled_spec_decode_tokens
        prompt_tokens = sum(
            num_tokens - 1 - len(drafts.get(req_id, ()))
            for req_id, num_tokens in scheduled.num_scheduled_tokens.items()
        )
        self._steps.append((self._clock(), prompt_tokens))

    def on_output(self) -> None:
        """Note that the oldest step has ended; its time begins where the one before ended."""
        now = self._clock()
        if self._steps:
            at, num_tokens = self._steps.popleft()
            self._largest_step = max(self._largest_step, num_tokens)
            if num_tokens >= max(1, min(_LEAST_STEP_TOKENS, self._largest_step // 2)):
                keep = 0.5 ** (num_tokens / _HALF_TOKENS)
                seconds = now - max(at, self._last_output_at)
                self._tokens = keep * self._tokens + num_tokens
                self._seconds = keep * self._seconds + max(seconds, 1e-6)
        self._last_output_at = now

    def on_loads(self, reports: Reports) -> None:
        """Note the workers' reports about ended loads; each rank reports in its own time."""
        for job_id in reports.keys() & self._loads.keys():
            load = self._loads[job_id]
            load.told += reports[job_id]
            if len(load.told) >= len(self._manager.workers):
                self._end(self._loads.pop(job_id))

    def _end(self, load: _Load) -> None:
        if any(result.late for result in load.told):
            load.by.given_up = True
            self._num_to_decline = _DECLINED if self._on else 0
            self._counters.add(metrics.CUT_LOADS)
        elif not any(result.failed for result in load.told):
            self._num_to_decline = 0
            self._counters.add(metrics.LOADED_REQUESTS)
            self._counters.add(metrics.LOADED_TOKENS, load.tokens)
            past = None if self._is_sure else self._manager.past_prefill_per_s
            if per_s := past or self.prefill_per_s:
                saved_s = load.tokens / per_s - max(result.seconds for result in load.told)
                self._counters.add(metrics.SAVED_SECONDS, saved_s)

    def reset(self) -> None:
        """Forget the jobs as vLLM does at a reset: later reports of them do not count."""
        self._loads.clear()

    def get_stats(self) -> KVConnectorStats | None:
        now: dict[Gauge, float | None] = {
            metrics.PENDING_LOADS: float(len(self._loads)),
            metrics.PREFILL_RATE: self.prefill_per_s,
        }
        if self._is_sure and (per_s := self.prefill_per_s):
            self._manager.leave_prefill_rate(per_s)
        news = {one: rate for one, rate in now.items() if rate not in (None, self._shown.get(one))}
        self._shown |= news
        return to_stats(self._counters.drain(), news)
