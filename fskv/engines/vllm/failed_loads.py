"""Keeps loads from waiting for each other for ever in vLLM's scheduler, and failed ones from blocking others.

After its load a request waits for the blocks of its remaining computation. vLLM reserves these, and asks such
requests in the order in which they came. The first one without room ends the step's admissions. Three faults
make that a wait for ever, for it and all behind it (seen with vLLM 0.32):

- of a sliding window nothing is reserved once a load has taken more blocks than a window has, most of them
  null, so that loads are admitted into each other's room: `quirks.mended_remaining_blocks`;
- a failed load's reservation stays, so that the request, hit again, waits for itself:
  `quirks.release_reservation`;
- a failed load has given its blocks back and may need more for a recompute than a load takes, yet it keeps
  its place before loaded ones that hold blocks. Asked what could be loaded, it says "ask again" once, and
  vLLM has it wait among those without blocks, as the first of them.

On the scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from fskv.engines.vllm.quirks import release_reservation, reserving_scheduler

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

_FAILED = "fskv_load_failed"  # an attribute of a request, until it is asked for again


class FailedLoads:
    """Has each request whose load failed step aside once; one for each connector that a scheduler asks."""

    def __init__(self) -> None:
        # None: not known yet, or of a vLLM that reserves nothing.
        self._scheduler: Scheduler | None = None

    def failed(self, req_ids: Iterable[str] | None) -> None:
        """Note the requests whose loads have failed."""
        requests = getattr(self._scheduler, "requests", {})
        for req_id in req_ids or ():
            if req_id in requests:
                setattr(requests[req_id], _FAILED, True)

    def steps_aside(self, request: Request) -> bool:
        """Return whether a request without blocks must wait and ask for its loads again."""
        if self._scheduler is None:
            self._scheduler = reserving_scheduler()
            if self._scheduler is None:
                return False
        release_reservation(self._scheduler, request)
        return bool(vars(request).pop(_FAILED, False))
