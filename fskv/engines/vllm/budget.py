"""Load or recompute: the scheduler's side of option `load_budget`.

Measures what loads take (the workers tell) and what prefill takes (the scheduler's own steps). With the
option on a hit is loaded only where that is predicted to be faster than its recompute. A load that takes as
long as the recompute is given up, and nothing is held against its chunks. Runs on the scheduler's thread.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fskv.data_path.job import JobResult
from fskv.engines.vllm.manager import FskvManager
from fskv.engines.vllm.metrics import to_stats
from fskv.hybrid_planner import GroupSpec, needed_chunks
from fskv.observe import metrics
from fskv.observe.metrics import Counters, Gauge

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.sched.output import SchedulerOutput

# A load is given up after its recompute's time, and never before this: a disk's bad moment, an engine's step.
_LEAST_S = 0.25
_LEAST_DONE = 0.25  # the share that a load which was given up is taken to have brought, at least
# Of so many hits in a row that are not worth loading one is loaded, to see whether the storage is back.
_TRY_EVERY = 16
# Opening a file, its header and its checks, in bytes read meanwhile: 0.1 ms at 1 GB/s, 10 ms at 10 MB/s.
_FILE_NBYTES = 128 << 10
_ODD = 3.0  # a load that is off by more is of another storage: what was known before is forgotten
_HALF_TOKENS = 8192.0  # prefilled since: an older step counts half
_LEAST_STEP_TOKENS = 256  # of prompts: fewer say little, unless all steps of the engine are small

Reports = dict[int, list[JobResult]]  # by job id: what became of a load, one of each rank that told


class Rate:
    """How long a unit takes, from how long the last ones took. Of loads or of prefill."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0  # the older ones weighing less

    def observe(self, amount: int, seconds: float, *, keep: float) -> None:
        """So much took so long; what was known before counts `keep` times from now on."""
        self._amount = keep * self._amount + amount
        self._seconds = keep * self._seconds + max(seconds, 1e-6)

    def predict_s(self, amount: int) -> float | None:
        """Return the seconds that so much takes; None: nothing was measured yet."""
        return amount * self._seconds / self._amount if self._amount else None

    @property
    def per_s(self) -> float | None:
        return self._amount / self._seconds if self._amount else None


@dataclass
class _Asked:
    """A request, until it ends."""

    found: int = 0  # tokens, since it was admitted last
    taken: int = 0  # of these
    counted: bool = False  # by `fskv_requests`
    given_up: bool = False  # it may not try a load again


@dataclass
class _Load:
    by: _Asked
    work: int
    tokens: int
    told: list[JobResult] = field(default_factory=list)


class LoadBudget:
    """Decides for each hit of a connector whether it is loaded, and counts requests. Scheduler's side."""

    def __init__(self, manager: FskvManager, groups: Sequence[GroupSpec]) -> None:
        self._manager = manager
        self._groups = groups
        self._on = manager.config.load_budget == "on"
        self._clock = time.monotonic
        self.loading, self.prefill = Rate(), Rate()  # of `_work`; of tokens
        self._counters = Counters(*metrics.BUDGET_COUNTERS)
        self._shown: dict[Gauge, float] = {}
        self.saved_known = False  # of some load it was known how long computing its tokens takes
        self._asked: defaultdict[str, _Asked] = defaultdict(_Asked)  # by request
        self._num_declined = 0  # in a row
        self._loads: dict[int, _Load] = {}  # by job id
        self._steps: deque[tuple[float, int]] = deque(maxlen=64)  # (when, prompt tokens)
        self._largest_step = 0
        self._last_output_at = -math.inf

    def predicted_load_s(self, num_new_tokens: int, num_computed_tokens: int) -> float | None:
        """Seconds until a hit of so many tokens would be loaded if it were begun now; None: not known."""
        ahead = sum(load.work for load in self._loads.values())
        return self.loading.predict_s(ahead + self._work(num_new_tokens, num_computed_tokens))

    def _work(self, num_new_tokens: int, computed: int) -> int:
        """Return what a load is measured in: its bytes, and what its files cost beside them."""
        sizes, end = self._manager.rank_sizes, computed + num_new_tokens
        return sum(
            len(needed_chunks(group, self._manager.blocks_per_chunk, end, computed))
            * (sizes.get(group.group_idx, 0) + _FILE_NBYTES)
            for group in self._groups
        )

    def take(self, req_id: str, computed: int, found: int) -> int:
        """Return how many of the `found` tokens to load: all, or none."""
        asked = self._asked[req_id]
        # vLLM asks in each step: an answer holds until another number is found.
        if asked.found != found:
            worth = found and not asked.given_up and self._is_worth_loading(computed, found)
            asked.found, asked.taken = found, found if worth else 0
        return asked.taken

    def _is_worth_loading(self, computed: int, found: int) -> bool:
        load_s = self.predicted_load_s(found, computed)
        saved_s = self.prefill.predict_s(found)
        if not self._on or load_s is None or saved_s is None or load_s <= saved_s:
            self._num_declined = 0
            return True
        self._num_declined += 1
        return self._num_declined % _TRY_EVERY == 0

    def allowed_s(self, req_id: str) -> float:
        """Return how long the load of this request may take; vLLM is about to submit it."""
        recompute_s = self.prefill.predict_s(self._asked[req_id].taken)
        return max(_LEAST_S, recompute_s) if self._on and recompute_s is not None else math.inf

    def admitted(self, req_id: str, num_loaded: int, computed: int, job_id: int | None) -> None:
        """VLLM has pages for the request: what was decided about it holds. Said again after a load."""
        by = self._asked[req_id]
        if self._manager.was_asked(req_id) and not by.counted:
            result = "hit" if num_loaded else "unused" if by.found else "miss"
            self._counters.add(metrics.REQUESTS, 1, result)
            by.counted = True
        if job_id is not None:
            self._loads[job_id] = _Load(by, self._work(num_loaded, computed), num_loaded)
        else:
            self._counters.add(metrics.DECLINED_TOKENS, by.found - by.taken)
        by.found = by.taken = 0

    def on_step(self, scheduled: SchedulerOutput) -> None:
        """A step was scheduled: what a request computes in it beside one token and its drafts is prompt."""
        for req_id in scheduled.finished_req_ids:
            self._asked.pop(req_id, None)
        drafts = scheduled.scheduled_spec_decode_tokens
        prompt_tokens = sum(
            num_tokens - 1 - len(drafts.get(req_id, ()))
            for req_id, num_tokens in scheduled.num_scheduled_tokens.items()
        )
        self._steps.append((self._clock(), prompt_tokens))

    def on_output(self) -> None:
        """The oldest step has ended. What ran before it had ended is not its time."""
        now = self._clock()
        if self._steps:
            at, num_tokens = self._steps.popleft()
            self._largest_step = max(self._largest_step, num_tokens)
            if num_tokens >= max(1, min(_LEAST_STEP_TOKENS, self._largest_step // 2)):
                seconds = now - max(at, self._last_output_at)
                self.prefill.observe(num_tokens, seconds, keep=0.5 ** (num_tokens / _HALF_TOKENS))
        self._last_output_at = now

    def on_loads(self, reports: Reports) -> None:
        """Workers tell how loads ended, each rank in its own time."""
        for job_id in reports.keys() & self._loads.keys():
            load = self._loads[job_id]
            load.told += reports[job_id]
            if len(load.told) >= len(self._manager.workers):
                self._end(self._loads.pop(job_id))

    def _end(self, load: _Load) -> None:
        """A load takes as long as on its slowest rank."""
        work = load.work
        if any(result.late for result in load.told):
            work = round(work * max(_LEAST_DONE, min(result.done_share for result in load.told)))
            load.by.given_up = True
            self._counters.add(metrics.CUT_LOADS)
        elif any(result.failed for result in load.told):
            return  # news about files, not about their storage
        else:
            self._counters.add(metrics.LOADED_REQUESTS)
            self._counters.add(metrics.LOADED_TOKENS, load.tokens)
            if (recompute_s := self.prefill.predict_s(load.tokens)) is not None:
                self.saved_known = True
                saved_s = recompute_s - max(result.seconds for result in load.told)
                self._counters.add(metrics.SAVED_SECONDS, saved_s)
        busy_s = max(result.busy_s for result in load.told)
        known_s = self.loading.predict_s(work)
        alike = known_s is not None and known_s / _ODD < busy_s < known_s * _ODD
        self.loading.observe(work, busy_s, keep=0.5 if alike else 0.0)

    def reset(self) -> None:
        """Forget the jobs as vLLM does at a reset: what is told of them later counts for nothing."""
        self._loads.clear()

    def get_stats(self) -> KVConnectorStats | None:
        now: dict[Gauge, float | None] = {
            metrics.PENDING_LOADS: float(len(self._loads)),
            metrics.LOAD_RATE: self.loading.per_s,
            metrics.PREFILL_RATE: self.prefill.per_s,
        }
        news = {one: rate for one, rate in now.items() if rate not in (None, self._shown.get(one))}
        self._shown |= news
        return to_stats(self._counters.drain(), news)
