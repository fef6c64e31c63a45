"""Load or recompute: the scheduler's side of option `load_budget`.

Measures what loads take (the workers tell) and what prefill takes (the scheduler's own steps), predicts
both for each hit, and takes of the hit what is faster to load. With the option off it only measures.

A load gets a time limit with it, so that a wrong prediction is bounded too: three times what was predicted
where loads of such a size were seen at the present rate, but never more than the recompute that it saves;
otherwise a twentieth of the whole recompute, and less for probes. After a twentieth it also has to keep the
pace that its limit needs, so that storage which begins to crawl is found out at once. What is not there in
time is given up, and the request is recomputed. Nothing is held against its chunks.

Arithmetic: fskv.routing.load_time. Runs on the scheduler's thread; every call is short and touches no disk.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, cast

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from fskv.config import StoreConfig
from fskv.data_path.job import NO_LIMIT, JobResult, LoadLimit
from fskv.engines.vllm.metrics import to_stats
from fskv.engines.vllm.quirks import without_new_loads
from fskv.hybrid_planner import GroupSpec, needed_chunks
from fskv.observe import metrics
from fskv.observe.metrics import Counters, Gauge
from fskv.routing.load_time import (
    Cut,
    LoadQueue,
    LoadTimes,
    Probing,
    assumed_prefill_s,
    best_cut,
    tokens_in,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        OffloadingConnectorStats,
    )
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from fskv.engines.vllm.manager import FskvManager

# Of the recompute: what a load that nothing is known of may cost if it comes to nothing. With it the first
# token is late by less than a tenth.
_RISK = 0.05
_PROBE_RISK = 0.03  # the same of a probe, of which there are more
# A disk's bad moment and an engine's step: no load is given up before that, none for its pace before the
# second, no probe before the third.
_LEAST_S = 0.25
_LEAST_LOOK_S = 0.1
_LEAST_PROBE_S = 0.05
_MARGIN = 3.0  # a load may take so many times what was predicted
_WORDS = {"off": 0.0, "auto": 1.0}
_MAX_CUTS = 16  # prefixes that are compared
_MAX_STEPS = 64  # scheduled and not heard of


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What became of a load job on the ranks that told; `aggregate` merges them."""

    num_ranks: int
    seconds: float  # from the submission
    busy_s: float
    done_share: float
    failed: bool
    late: bool

    @classmethod
    def of(cls, result: JobResult) -> LoadReport:
        seconds, busy_s = result.seconds, result.busy_s
        return cls(1, seconds, busy_s, result.done_share, result.failed, result.late)

    def aggregate(self, other: LoadReport) -> LoadReport:
        """A load is there when it is on every rank, and so takes as long as the slowest."""
        return LoadReport(
            self.num_ranks + other.num_ranks,
            max(self.seconds, other.seconds),
            max(self.busy_s, other.busy_s),
            min(self.done_share, other.done_share),
            self.failed or other.failed,
            self.late or other.late,
        )


def merge_reports(
    one: Mapping[int, LoadReport], other: Mapping[int, LoadReport]
) -> dict[int, LoadReport]:
    merged = dict(one)
    for job_id, report in other.items():
        merged[job_id] = merged[job_id].aggregate(report) if job_id in merged else report
    return merged


class Size(NamedTuple):
    """What a rank reads for a hit."""

    nbytes: int
    num_files: int


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What was decided about a request's hit, until vLLM admits the request."""

    computed: int
    found: int
    taken: int
    limit: LoadLimit = NO_LIMIT
    probe: bool = False


@dataclass(frozen=True, slots=True)
class _Load:
    req_id: str
    size: Size
    probe: bool
    tokens: int
    recompute_s: float | None  # predicted


class _Step(NamedTuple):
    """What was scheduled in one of the engine's steps."""

    at: float
    parts: list[tuple[int, int]]  # (prompt tokens, computed before), by request
    declined: int  # of these tokens, how many were a hit that was declined


class LoadBudget:
    """See the module docstring. One for each connector, on the scheduler's side."""

    def __init__(
        self,
        config: StoreConfig,
        groups: Sequence[GroupSpec],
        blocks_per_chunk: int,
        *,
        num_ranks: int,
        max_step_tokens: int,
        file_sizes: Callable[[], Mapping[int, int]],
        num_threads: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`file_sizes` gives by group index what a rank reads for a chunk; empty until that is known.

        `num_threads` gives the I/O threads of a rank, once sizes are known.
        `max_step_tokens`: the most that a step can compute of one prompt.
        """
        budget = config.load_budget
        # Seconds of loading that a second of recompute is worth; 0: all of them.
        self._ratio = _WORDS[budget] if isinstance(budget, str) else budget
        self._deadline = config.deadline
        self._groups = list(groups)
        self._blocks_per_chunk = blocks_per_chunk
        self._step_tokens = math.lcm(*(g.tokens_per_block * blocks_per_chunk for g in groups))
        # vLLM gives up the last token of a capped hit where a group has a window (0.32, 0.33:
        # _lookup_complete_chunks), and its caps need not be whole chunks.
        self._past_cap = int(any(group.kind.windowed for group in groups))
        self._num_ranks = num_ranks
        self._file_sizes = file_sizes
        self._num_threads = num_threads
        self._clock = clock
        self.times = LoadTimes(max_step_tokens)
        self._queue = LoadQueue()
        self._probing = Probing()
        self._counters = Counters(*metrics.BUDGET_COUNTERS)
        self._shown: dict[Gauge, float] = {}
        self.saved_known = False  # of some load it was known how long computing its tokens takes
        self._verdicts: dict[str, _Verdict] = {}
        self._found: set[str] = set()  # requests with a hit, until they are admitted
        self._counted: set[str] = set()  # requests that `fskv_requests` has counted, until they end
        self._loads: dict[int, _Load] = {}  # by job id
        self._reports: dict[int, LoadReport] = {}  # of loads that some rank has not told of yet
        self._given_up: set[str] = set()  # requests that may not try a load again
        self._prefilling: dict[str, Request] = {}  # admitted, prompt not computed yet
        # What is left of each of these takes, and all together; None after anything of it has changed.
        self._left_s: dict[str, float] | None = None
        self._all_left_s = 0.0
        self._just_admitted: list[str] = []  # and not in it yet: vLLM still sets what they have
        # Tokens of such a request that could have been loaded.
        self._declined: dict[str, range] = {}
        self._steps: deque[_Step] = deque(maxlen=_MAX_STEPS)
        self._last_output_at = -math.inf

    # --- prediction -------------------------------------------------------------------------

    def predicted_load_s(self, num_new_tokens: int, num_computed_tokens: int) -> float | None:
        """Seconds until a hit of so many tokens would be loaded if it were begun now; None: not known."""
        size = self._size(num_new_tokens, num_computed_tokens)
        load_s = self.times.predict_load_s(*size) if size else None
        return None if load_s is None else self._queue.wait_s(self._clock()) + load_s

    def recompute_s(self, num_chunks: int) -> float:
        """Seconds of prefill that so many chunks hold, those of all groups taken together."""
        per_chunk = [g.tokens_per_block * self._blocks_per_chunk for g in self._groups]
        num_tokens = tokens_in(num_chunks, per_chunk)
        seconds = self.times.predict_prefill_s(num_tokens)
        return assumed_prefill_s(num_tokens) if seconds is None else seconds

    def _size(self, num_new_tokens: int, computed: int) -> Size | None:
        sizes = self._file_sizes()
        if not sizes:
            return None
        nbytes = num_files = 0
        for group in self._groups:
            chunks = needed_chunks(
                group, self._blocks_per_chunk, computed + num_new_tokens, computed
            )
            nbytes += len(chunks) * sizes[group.group_idx]
            num_files += len(chunks)
        return Size(nbytes, num_files)

    def _prefill_ahead_s(self, but: str) -> float:
        """How long the prompts that were admitted before will occupy the engine."""
        if self._left_s is None:
            self._left_s = {r: self._prefill_left_s(q) for r, q in self._prefilling.items()}
            self._all_left_s = sum(self._left_s.values())
            self._just_admitted.clear()
        while self._just_admitted:
            req_id = self._just_admitted.pop()
            self._all_left_s -= self._left_s.get(req_id, 0.0)
            self._left_s[req_id] = self._prefill_left_s(self._prefilling[req_id])
            self._all_left_s += self._left_s[req_id]
        return max(0.0, self._all_left_s - self._left_s.get(but, 0.0))

    def _prefill_left_s(self, request: Request) -> float:
        left = request.num_tokens - request.num_computed_tokens
        if left <= 0:
            return 0.0
        return self.times.predict_prefill_s(left, request.num_computed_tokens) or 0.0

    # --- the decision -----------------------------------------------------------------------

    def take(
        self,
        request: Request,
        computed: int,
        found: int,
        lookup: Callable[[int], int | None],
    ) -> int | None:
        """Return how many of the `found` tokens to load; None: ask again later.

        `lookup(cap)` looks the request up again for at most that many tokens: only vLLM knows which shorter
        hits its groups can serve, and it remembers the last answer.
        """
        self._found.add(request.request_id)
        if not self._ratio:
            return found
        verdict = self._decide(request, computed, found)
        taken: int | None = verdict.taken
        if verdict.taken < found:
            taken = self._look_up_again(verdict, lookup)
            if taken is None:
                return None
            if taken == 0 and verdict.probe:  # no such short hit: all of it, within the same limit
                taken = lookup(found + self._past_cap)
        self._verdicts[request.request_id] = replace(verdict, taken=taken or 0)
        return taken

    def _look_up_again(self, verdict: _Verdict, lookup: Callable[[int], int | None]) -> int | None:
        cap = verdict.taken
        taken = lookup(cap + self._past_cap if cap else 0)
        if taken and taken != cap and not verdict.probe:
            cut = self._cut(verdict.computed, taken)
            if cut is None or best_cut([cut], self._ratio) is None:
                return lookup(0)
        return taken

    def _decide(self, request: Request, computed: int, found: int) -> _Verdict:
        all_of_it = _Verdict(computed, found, found)
        if request.request_id in self._given_up:
            return replace(all_of_it, taken=0)
        ahead_s = self._prefill_ahead_s(request.request_id)
        recompute_s = self.times.predict_prefill_s(request.num_tokens - computed, computed)
        if recompute_s is None:
            return all_of_it
        whole_s = ahead_s + recompute_s
        unproven = replace(all_of_it, limit=LoadLimit(max(_LEAST_S, _RISK * whole_s)))
        if self._cut(computed, found) is None:
            return unproven
        best = self._best(computed, found, ahead_s)
        now = self._clock()
        if best is None and self._probing.due(now):
            tokens = self._probe_tokens(computed, found)
            limit = LoadLimit(max(_LEAST_PROBE_S, _PROBE_RISK * whole_s))
            return replace(all_of_it, taken=tokens, limit=limit, probe=True)
        if best is None:
            return replace(all_of_it, taken=0)
        taken = replace(unproven, taken=best.num_tokens)
        size = self._size(best.num_tokens, computed)
        assert size is not None
        if not self.times.proven(*size):
            return taken
        saved_s = self._ratio * best.saved_s + ahead_s
        load_s = self._queue.wait_s(now) + best.load_s
        allowed_s = max(taken.limit.allowed_s, min(_MARGIN * load_s, saved_s))
        return replace(taken, limit=LoadLimit(allowed_s, max(_LEAST_LOOK_S, _RISK * whole_s)))

    def _best(self, computed: int, found: int, ahead_s: float) -> Cut | None:
        """Compare prefixes of a hit; whoever recomputes waits for the prompts ahead, and so does no load."""
        wait_s = self._queue.wait_s(self._clock())
        cuts = []
        for tokens in self._prefixes(computed, found):
            cut, size = self._cut(computed, tokens), self._size(tokens, computed)
            assert cut is not None
            assert size is not None
            load_s = wait_s + cut.load_s
            if load_s <= self._deadline.for_nbytes(size.nbytes):  # else it would be given up
                cuts.append(replace(cut, load_s=max(0.0, load_s - ahead_s)))
        return best_cut(cuts, self._ratio)

    def _cut(self, computed: int, tokens: int) -> Cut | None:
        size = self._size(tokens, computed)
        load_s = self.times.predict_load_s(*size) if size else None
        saved_s = self.times.predict_prefill_s(tokens, computed)
        return None if load_s is None or saved_s is None else Cut(tokens, load_s, saved_s)

    def _prefixes(self, computed: int, found: int) -> list[int]:
        """Lengths of hits to compare: all of it, and shorter ones that end with a chunk of every group."""
        step = self._step_tokens
        ends = range((computed // step + 1) * step, computed + found, step)
        every = -(-len(ends) // _MAX_CUTS) or 1
        return [end - computed for end in ends[::every]] + [found]

    def _probe_tokens(self, computed: int, found: int) -> int:
        """The shortest prefix that has a file for every I/O thread."""
        for tokens in self._prefixes(computed, found):
            size = self._size(tokens, computed)
            if size is not None and size.num_files >= self._num_threads():
                return tokens
        return found

    def limit(self, req_id: str) -> LoadLimit:
        """How long the load of this request may take; vLLM is about to submit it."""
        verdict = self._verdicts.get(req_id)
        return verdict.limit if verdict else NO_LIMIT

    # --- what the engine does ---------------------------------------------------------------

    def forget(self, req_id: str) -> None:
        """Nothing was found for this request, this time."""
        self._verdicts.pop(req_id, None)
        self._found.discard(req_id)

    def admitted(
        self,
        request: Request,
        num_loaded: int,
        computed: int,
        job_id: int | None,
        *,
        asked: bool = True,
    ) -> None:
        """VLLM has pages for the request: what was decided about it holds from here on.

        It says so again once a load has ended. `asked`: whether any file was looked up for the request.
        """
        req_id = request.request_id
        self._prefilling[req_id] = request
        self._just_admitted.append(req_id)
        verdict = self._verdicts.pop(req_id, None)
        if asked and req_id not in self._counted:
            result = "hit" if num_loaded else "unused" if req_id in self._found else "miss"
            self._counters.add(metrics.REQUESTS, 1, result)
            self._counted.add(req_id)
        self._found.discard(req_id)
        if job_id is not None and (size := self._size(num_loaded, computed)):
            probe = verdict is not None and verdict.probe
            recompute_s = self.times.predict_prefill_s(num_loaded, computed)
            self._loads[job_id] = _Load(req_id, size, probe, num_loaded, recompute_s)
            self._queue.begin(job_id, self._clock(), self.times.occupied_s(*size))
            if probe:
                self._probing.begin()
                self._counters.add(metrics.PROBE_LOADS)
        # A MultiConnector may have taken another child's hit.
        if verdict and num_loaded == verdict.taken < verdict.found:
            self._count_declined(req_id, verdict)

    def _count_declined(self, req_id: str, verdict: _Verdict) -> None:
        computed, found, taken = verdict.computed, verdict.found, verdict.taken
        self._declined[req_id] = range(computed + taken, computed + found)
        add = self._counters.add
        add(metrics.DECLINED_TOKENS, found - taken)
        whole, part = self._cut(computed, found), self._cut(computed, taken)
        if (size := self._size(found, computed)) and (kept := self._size(taken, computed)):
            add(metrics.DECLINED_CHUNKS, size.num_files - kept.num_files)
        if whole and part:
            load_s = whole.load_s - (part.load_s if taken else 0.0)
            add(metrics.DECLINED_LOAD_SECONDS, max(0.0, load_s))
            add(metrics.DECLINED_PREFILL_SECONDS, whole.saved_s - part.saved_s)

    def on_step(self, scheduled: SchedulerOutput) -> None:
        """A step was scheduled, and no request knows of it yet."""
        self._left_s = None
        self._just_admitted.clear()
        for req_id in scheduled.finished_req_ids:
            for known in (self._verdicts, self._prefilling, self._declined):
                known.pop(req_id, None)
            self._given_up.discard(req_id)
            self._found.discard(req_id)
            self._counted.discard(req_id)
        parts, declined = [], 0
        for req_id, request in list(self._prefilling.items()):
            computed = request.num_computed_tokens
            num_tokens = scheduled.num_scheduled_tokens.get(req_id, 0)
            if num_tokens:
                parts.append((num_tokens, computed))
                of = self._declined.get(req_id, range(0))
                declined += max(0, min(of.stop, computed + num_tokens) - max(of.start, computed))
            if num_tokens and computed + num_tokens >= request.num_tokens:
                del self._prefilling[req_id]
                self._declined.pop(req_id, None)
        self._steps.append(_Step(self._clock(), parts, declined))

    def on_output(self) -> None:
        """The oldest step has ended. What ran before it had ended is not its time."""
        self._left_s = None
        now = self._clock()
        if self._steps:
            step = self._steps.popleft()
            seconds = now - max(step.at, self._last_output_at)
            if step.parts:
                self.times.observe_step(step.parts, seconds)
                share = step.declined / sum(tokens for tokens, _ in step.parts)
                self._counters.add(metrics.DECLINED_ACTUAL_SECONDS, share * seconds)
        self._last_output_at = now

    def on_loads(self, reports: Mapping[int, LoadReport]) -> None:
        """Workers tell how loads ended, each rank in its own time."""
        known = {job_id: told for job_id, told in reports.items() if job_id in self._loads}
        self._reports = merge_reports(self._reports, known)
        for job_id in known:
            if self._reports[job_id].num_ranks >= self._num_ranks:
                self._end(job_id, self._loads.pop(job_id), self._reports.pop(job_id))

    def _end(self, job_id: int, load: _Load, report: LoadReport) -> None:
        now = self._clock()
        self._queue.end(job_id, now)
        nbytes, num_files = load.size
        if not report.failed:
            self.times.observe_load(nbytes, report.busy_s, num_files)
            self._counters.add(metrics.LOADED_REQUESTS)
            self._counters.add(metrics.LOADED_TOKENS, load.tokens)
            if load.recompute_s is not None:
                self.saved_known = True
                saved_s = load.recompute_s - report.seconds
                self._counters.add(metrics.SAVED_SECONDS, max(0.0, saved_s))
        elif report.late:
            share = report.done_share
            self.times.observe_cut(nbytes, report.busy_s, num_files, done_share=share)
            if load.req_id in self._prefilling:  # else it was aborted meanwhile, and is forgotten
                self._given_up.add(load.req_id)
            self._counters.add(metrics.CUT_LOADS)
            self._counters.add(metrics.CUT_LOAD_SECONDS, report.seconds)
        # Any other failure is news about files, not about their storage; a probe has ended all the same.
        if not report.failed or report.late or load.probe:
            self._probing.saw(now, report.seconds, probe=load.probe, good=not report.failed)

    def reset(self) -> None:
        """Forget the jobs as vLLM does at a reset: what is told of them later counts for nothing."""
        self._loads.clear()
        self._reports.clear()
        self._queue.clear()
        self._probing = Probing()

    def get_stats(self) -> OffloadingConnectorStats | None:
        now: dict[Gauge, float | None] = {
            metrics.PENDING_LOADS: float(len(self._loads)),
            metrics.LOAD_RATE: self.times.load_bytes_per_s,
            metrics.PREFILL_RATE: self.times.prefill_tokens_per_s,
        }
        shown: dict[Gauge, float] = {
            gauge: float(rate)
            for gauge, rate in now.items()
            if rate is not None and self._shown.get(gauge) != rate
        }
        self._shown |= shown
        return to_stats(self._counters.drain(), shown)


def take_reports(results: Iterable[JobResult]) -> dict[int, LoadReport]:
    """Return what a rank tells of the load jobs among these."""
    return {result.job_id: LoadReport.of(result) for result in results if result.is_load}


def max_step_tokens(vllm_config: VllmConfig) -> int:
    """Return how many tokens of one prompt a step can compute at most, while others run too."""
    scheduling = vllm_config.scheduler_config
    most: int = min(scheduling.max_num_batched_tokens, vllm_config.model_config.max_model_len)
    threshold: int = scheduling.long_prefill_token_threshold
    return min(most, threshold or most)


class BudgetedConnector(OffloadingConnector):
    """vLLM's connector with a LoadBudget on its scheduler's side, which a subclass makes."""

    _budget: LoadBudget

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Look the request up; what recomputes faster than it loads is not taken (`load_budget`)."""
        found, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if not found:
            self._budget.forget(request.request_id)
            return found, is_async

        def look_up_again(cap: int) -> int | None:
            tokens: int | None
            tokens, _ = self.scheduler.get_num_new_matched_tokens(
                request, num_computed_tokens, max_num_new_tokens=cap
            )
            return tokens

        taken = self._budget.take(request, num_computed_tokens, found, look_up_again)
        return taken, bool(taken)

    def predicted_load_s(
        self, request: Request, num_new_tokens: int, num_computed_tokens: int
    ) -> float | None:
        """Seconds until a hit of `num_new_tokens` would be loaded if it were begun now.

        From the loads so far, behind those that run. None: no load was measured yet.
        """
        return self._budget.predicted_load_s(num_new_tokens, num_computed_tokens)

    def predicted_prefill_s(self, num_tokens: int, num_computed_tokens: int) -> float | None:
        """Seconds to compute so many tokens after those; None: not measured yet. FskvMultiConnector asks."""
        return self._budget.times.predict_prefill_s(num_tokens, num_computed_tokens)

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
