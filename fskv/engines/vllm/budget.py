"""Load or recompute: the scheduler's side of option `load_budget`.

Measures what loads take (the workers tell) and what prefill takes (the scheduler's own steps). With the
option on a hit is loaded only where that is predicted to be faster than its recompute. A load that takes as
long as the recompute is given up, and nothing is held against its chunks. Runs on the scheduler's thread.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from fskv.config import StoreConfig
from fskv.data_path.job import JobResult
from fskv.engines.vllm.metrics import to_stats
from fskv.engines.vllm.quirks import without_new_loads
from fskv.hybrid_planner import GroupSpec, needed_chunks
from fskv.observe import metrics
from fskv.observe.metrics import Counters, Gauge
from fskv.routing.load_time import LoadTimes, work

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from fskv.engines.vllm.manager import FskvManager

# A load is given up after so many times its recompute: the first token is then late by as much again.
_GIVE_UP_AT = 1.0
_LEAST_S = 0.25  # and never before this: a disk's bad moment, an engine's step
_LEAST_DONE = 0.25  # the share that a load which was given up is taken to have brought, at least
# Of so many hits in a row that are not worth loading one is loaded, to see whether the storage is back.
_TRY_EVERY = 16
_MAX_STEPS = 64  # scheduled and not heard of


Reports = dict[int, list[JobResult]]  # by job id: what became of a load, one of each rank that told


class _Load(NamedTuple):
    req_id: str
    work: int
    tokens: int


class LoadBudget:
    """Decides for each hit of a connector whether it is loaded, and counts requests. Scheduler's side."""

    def __init__(
        self,
        config: StoreConfig,
        groups: Sequence[GroupSpec],
        blocks_per_chunk: int,
        *,
        num_ranks: int,
        file_sizes: Callable[[], Mapping[int, int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`file_sizes` gives by group index what a rank reads for a chunk; empty until that is known."""
        self._on = config.load_budget == "on"
        self._groups = list(groups)
        self._blocks_per_chunk = blocks_per_chunk
        self._num_ranks = num_ranks
        self._file_sizes = file_sizes
        self._clock = clock
        self.times = LoadTimes()
        self._counters = Counters(*metrics.BUDGET_COUNTERS)
        self._shown: dict[Gauge, float] = {}
        self.saved_known = False  # of some load it was known how long computing its tokens takes
        # Requests with a hit: (found, taken), until admitted.
        self._taken: dict[str, tuple[int, int]] = {}
        self._counted: set[str] = set()  # requests that `fskv_requests` has counted, until they end
        self._given_up: set[str] = set()  # requests that may not try a load again
        self._num_declined = 0  # in a row
        self._loads: dict[int, _Load] = {}  # by job id
        self._reports: Reports = {}  # of loads that some rank has not told of yet
        self._prefilling: dict[str, Request] = {}  # admitted, prompt not computed yet
        self._steps: deque[tuple[float, int]] = deque(maxlen=_MAX_STEPS)  # (when, prompt tokens)
        self._last_output_at = -math.inf

    def predicted_load_s(self, num_new_tokens: int, num_computed_tokens: int) -> float | None:
        """Seconds until a hit of so many tokens would be loaded if it were begun now; None: not known."""
        ahead = sum(load.work for load in self._loads.values())
        return self.times.predict_load_s(ahead + self._work(num_new_tokens, num_computed_tokens))

    def _work(self, num_new_tokens: int, computed: int) -> int:
        sizes, end = self._file_sizes(), computed + num_new_tokens
        num_files = {
            group.group_idx: len(needed_chunks(group, self._blocks_per_chunk, end, computed))
            for group in self._groups
        }
        return sum(work(n * sizes.get(idx, 0), n) for idx, n in num_files.items())

    # --- the decision -----------------------------------------------------------------------

    def take(self, req_id: str, computed: int, found: int) -> int:
        """Return how many of the `found` tokens to load: all, or none."""
        # vLLM asks in each step: an answer holds until another number is found.
        if self._taken.get(req_id, (0, 0))[0] != found:
            worth = req_id not in self._given_up and (
                not self._on or self._is_worth_loading(computed, found)
            )
            self._taken[req_id] = (found, found if worth else 0)
        return self._taken[req_id][1]

    def _is_worth_loading(self, computed: int, found: int) -> bool:
        load_s = self.predicted_load_s(found, computed)
        saved_s = self.times.predict_prefill_s(found)
        if load_s is None or saved_s is None or load_s <= saved_s:
            self._num_declined = 0
            return True
        self._num_declined += 1
        return self._num_declined % _TRY_EVERY == 0

    def allowed_s(self, req_id: str) -> float:
        """Return how long the load of this request may take; vLLM is about to submit it."""
        recompute_s = self.times.predict_prefill_s(self._taken.get(req_id, (0, 0))[1])
        if not self._on or recompute_s is None:
            return math.inf
        return max(_LEAST_S, _GIVE_UP_AT * recompute_s)

    # --- what the engine does ---------------------------------------------------------------

    def forget(self, req_id: str) -> None:
        """Nothing was found for this request, this time."""
        self._taken.pop(req_id, None)

    def admitted(
        self, request: Request, num_loaded: int, computed: int, job_id: int | None, *, asked: bool
    ) -> None:
        """VLLM has pages for the request: what was decided about it holds from here on.

        It says so again once a load has ended. `asked`: whether any file was looked up for the request.
        """
        req_id = request.request_id
        self._prefilling[req_id] = request
        hit = self._taken.pop(req_id, None)
        if asked and req_id not in self._counted:
            result = "hit" if num_loaded else "unused" if hit else "miss"
            self._counters.add(metrics.REQUESTS, 1, result)
            self._counted.add(req_id)
        if job_id is not None:
            self._loads[job_id] = _Load(req_id, self._work(num_loaded, computed), num_loaded)
        elif hit and not hit[1] and not num_loaded:
            self._counters.add(metrics.DECLINED_TOKENS, hit[0])

    def on_step(self, scheduled: SchedulerOutput) -> None:
        """A step was scheduled, and no request knows of it yet."""
        for req_id in scheduled.finished_req_ids:
            self._taken.pop(req_id, None)
            self._prefilling.pop(req_id, None)
            self._given_up.discard(req_id)
            self._counted.discard(req_id)
        prompt_tokens = 0
        for req_id, request in list(self._prefilling.items()):
            num_tokens = scheduled.num_scheduled_tokens.get(req_id, 0)
            prompt_tokens += num_tokens
            if num_tokens and request.num_computed_tokens + num_tokens >= request.num_tokens:
                del self._prefilling[req_id]
        self._steps.append((self._clock(), prompt_tokens))

    def on_output(self) -> None:
        """The oldest step has ended. What ran before it had ended is not its time."""
        now = self._clock()
        if self._steps:
            at, prompt_tokens = self._steps.popleft()
            self.times.observe_step(prompt_tokens, now - max(at, self._last_output_at))
        self._last_output_at = now

    def on_loads(self, reports: Reports) -> None:
        """Workers tell how loads ended, each rank in its own time."""
        for job_id, told in reports.items():
            if job_id in self._loads:
                so_far = self._reports.pop(job_id, []) + told
                if len(so_far) < self._num_ranks:
                    self._reports[job_id] = so_far
                else:
                    self._end(self._loads.pop(job_id), so_far)

    def _end(self, load: _Load, told: Sequence[JobResult]) -> None:
        """A load takes as long as on its slowest rank."""
        busy_s, seconds = max(r.busy_s for r in told), max(r.seconds for r in told)
        if not any(r.failed for r in told):
            self.times.observe_load(load.work, busy_s)
            self._counters.add(metrics.LOADED_REQUESTS)
            self._counters.add(metrics.LOADED_TOKENS, load.tokens)
            recompute_s = self.times.predict_prefill_s(load.tokens)
            if recompute_s is not None:
                self.saved_known = True
                self._counters.add(metrics.SAVED_SECONDS, max(0.0, recompute_s - seconds))
        # Any other failure is news about files, not about their storage.
        elif any(r.late for r in told):
            done = max(_LEAST_DONE, min(r.done_share for r in told))
            self.times.observe_load(round(load.work * done), busy_s)
            if load.req_id in self._prefilling:  # else it was aborted meanwhile, and is forgotten
                self._given_up.add(load.req_id)
            self._counters.add(metrics.CUT_LOADS)

    def reset(self) -> None:
        """Forget the jobs as vLLM does at a reset: what is told of them later counts for nothing."""
        self._loads.clear()
        self._reports.clear()

    def get_stats(self) -> OffloadingConnectorStats | None:
        now: dict[Gauge, float | None] = {
            metrics.PENDING_LOADS: float(len(self._loads)),
            metrics.LOAD_RATE: self.times.load_bytes_per_s,
            metrics.PREFILL_RATE: self.times.prefill_tokens_per_s,
        }
        news = {
            gauge: rate for gauge, rate in now.items() if rate not in (None, self._shown.get(gauge))
        }
        self._shown |= news
        return to_stats(self._counters.drain(), news)


class BudgetedConnector(OffloadingConnector):
    """vLLM's connector with a LoadBudget on its scheduler's side, which a subclass makes."""

    _budget: LoadBudget

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Look the request up; a hit that recomputes faster than it loads is not taken (`load_budget`)."""
        found, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if not found:
            self._budget.forget(request.request_id)
            return found, is_async
        taken = self._budget.take(request.request_id, num_computed_tokens, found)
        if not taken:  # vLLM's scheduler remembers its last answer
            self.scheduler.get_num_new_matched_tokens(
                request, num_computed_tokens, max_num_new_tokens=0
            )
        return taken, bool(taken)

    def predicted_load_s(
        self, request: Request, num_new_tokens: int, num_computed_tokens: int
    ) -> float | None:
        """Seconds until a hit of `num_new_tokens` would be loaded, behind those that run; None: unknown."""
        return self._budget.predicted_load_s(num_new_tokens, num_computed_tokens)

    def predicted_prefill_s(self, num_tokens: int) -> float | None:
        """Seconds to compute so many tokens; None: not measured yet. FskvMultiConnector asks."""
        return self._budget.times.predict_prefill_s(num_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        status = self.scheduler._req_status[request.request_id]  # noqa: SLF001
        # A load is a request's only job.
        job_id = next(iter(status.transfer_jobs)) if num_external_tokens else None
        computed = status.num_locally_computed_tokens
        asked = cast("FskvManager", self.scheduler.manager).was_asked(request.request_id)
        self._budget.admitted(request, num_external_tokens, computed, job_id, asked=asked)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._budget.on_step(scheduler_output)
        return super().build_connector_meta(without_new_loads(self.scheduler, scheduler_output))
