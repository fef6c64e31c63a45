"""Has vLLM's scheduler admit only loads that it can finish, and lets no failed one stand before good ones.

A request with a load that is over waits for the blocks of what it still has to compute. vLLM reserves these,
and asks such requests in the order in which they came; the first for which there is no room ends the step's
admissions. Three things make that a wait for ever, for it and all behind it (seen with vLLM 0.32):

- of a sliding window nothing is reserved once a load has taken more blocks than a window has, most of them
  null, so that loads are admitted into each other's room: `quirks.reserve_windows`;
- a failed load's reservation stays, so that the request, hit again, waits for itself:
  `quirks.release_reservation`;
- a failed load has given its blocks back and may need more for a recompute than a load takes, yet it keeps
  its place before loaded ones that hold blocks. Asked what could be loaded, it says "ask again" once, and
  vLLM has it wait among those without blocks, as the first of them.

On the scheduler's thread.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from fskv.engines.vllm.budget import BudgetedConnector
from fskv.engines.vllm.quirks import release_reservation, reserve_windows, reserving_scheduler

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

_MAX_FAILED = 10_000


class Admission:
    """See the module docstring. One for each connector that a scheduler asks."""

    def __init__(self) -> None:
        # None: not known yet, or of a vLLM that reserves nothing.
        self._scheduler: Scheduler | None = None
        self._failed: set[str] = set()

    def failed(self, req_ids: Iterable[str] | None) -> None:
        """The loads of these have failed. Of a request that ended before, nobody asks any more."""
        if len(self._failed) > _MAX_FAILED:  # of a vLLM that does not tell who has ended
            self._failed.clear()  # they keep their places then
        known: Mapping[str, Request] = getattr(self._scheduler, "requests", {})
        self._failed.update(each for each in req_ids or () if self._may_ask(known.get(each)))

    def _may_ask(self, request: Request | None) -> bool:
        if self._scheduler is None:  # of another kind: it is not known who has ended
            return True
        return request is not None and not request.is_finished()

    def ended(self, req_ids: Iterable[str]) -> None:
        self._failed.difference_update(req_ids)

    def steps_aside(self, request: Request) -> bool:
        """A request without blocks asks what could be loaded; say whether it is to ask again instead."""
        if self._scheduler is None:
            self._scheduler = reserving_scheduler()
            if self._scheduler is not None:
                reserve_windows(self._scheduler)
        if self._scheduler is not None:
            release_reservation(self._scheduler, request)
        aside = request.request_id in self._failed
        self._failed.discard(request.request_id)
        return aside


class AdmittingConnector(BudgetedConnector):
    """A connector with an Admission on its scheduler's side."""

    @functools.cached_property
    def _admission(self) -> Admission:
        return Admission()

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._admission.steps_aside(request):
            return None, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._admission.ended(scheduler_output.finished_req_ids)
        return super().build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._admission.failed(connector_output.failed_recving)
        super().update_connector_output(connector_output)
