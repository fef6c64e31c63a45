"""Which chunks to read ahead for requests that wait: the scheduler's side of option `prefetch_bytes`.

VLLM tells a connector of a request when it arrives, and asks what could be loaded when the request may run:
while `max_num_seqs` others run, or no KV block is free, it asks for none of those that wait. So each step
the first of them are looked up here as vLLM will look them up, and the workers are told which chunks to
read. They hear it, and which chunks nobody waits for any more, with the metadata of the step.

The workers' room is counted here, a chunk for as long as a request that wants it waits; what finds none is
told when some is free. Runs on the scheduler's thread; no call touches a disk.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from fskv.engines.vllm.budget import BudgetedConnector
from fskv.engines.vllm.manager import FskvManager, PrefetchOrder
from fskv.engines.vllm.quirks import keys_of_request, local_hit
from fskv.engines.vllm.worker import FskvWorker, RestingWorker
from fskv.hybrid_planner import GroupKind, GroupSpec, needed_chunks
from fskv.types import ChunkId

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_LOOKUPS = 4  # requests that are looked up in one step


@dataclass
class FskvConnectorMetadata(OffloadingConnectorMetadata):
    """VLLM's, of a step in which there is something to say about reading ahead."""

    prefetch: PrefetchOrder = field(default_factory=PrefetchOrder)


def first_blocks(
    group: GroupSpec, blocks_per_chunk: int, hit_tokens: int, computed: int
) -> list[tuple[int, int]]:
    """Return the group's chunks that a hit of so many tokens in all loads, and the first block of each."""
    first_token = computed
    if group.kind is GroupKind.SLIDING_WINDOW and group.window_tokens is not None:
        reach = group.window_tokens - 1 + group.extra_retained_tokens
        first_token = max(computed, hit_tokens - reach)
    first = first_token // group.tokens_per_block
    chunks = needed_chunks(group, blocks_per_chunk, hit_tokens, computed)
    starts = [(chunk, max(0, first - chunk * blocks_per_chunk)) for chunk in chunks]
    return [(chunk, start) for chunk, start in starts if start < blocks_per_chunk]


class WaitingRequests:
    """See the module docstring. One for each connector, on the scheduler's side."""

    def __init__(
        self,
        lookup: Callable[[Request], list[tuple[ChunkId, int]] | None],
        room: Callable[[], int],
    ) -> None:
        """`lookup` says what a request would load now, None: not known yet. `room` is in chunks."""
        self._lookup = lookup
        self._room = room
        self._new: dict[str, Request] = {}  # not looked up yet, in the order in which they came
        self._found: dict[str, deque[tuple[ChunkId, int]]] = {}  # looked up, and not told
        self._told: dict[str, list[ChunkId]] = {}
        self._waiting_for: dict[ChunkId, set[str]] = {}  # what the workers were told, and for whom
        self._unwanted: list[ChunkId] = []

    def arrived(self, request: Request) -> None:
        self._new[request.request_id] = request

    def gone(self, req_ids: Iterable[str]) -> None:
        """These do not wait any more: they were admitted, or have ended."""
        for req_id in req_ids:
            self._new.pop(req_id, None)
            self._found.pop(req_id, None)
            for chunk in self._told.pop(req_id, ()):
                others = self._waiting_for[chunk]
                others.discard(req_id)
                if not others:
                    del self._waiting_for[chunk]
                    self._unwanted.append(chunk)

    def plan(self) -> PrefetchOrder | None:
        """Return what to tell the workers with this step; None: nothing."""
        room = self._room()
        order = PrefetchOrder(unwanted=self._unwanted)
        self._unwanted = []
        for req_id in list(self._found):
            self._tell(req_id, room, order)
        for req_id in list(islice(self._new, _LOOKUPS)):
            if self._found or len(self._waiting_for) >= room:
                break
            chunks = self._lookup(self._new[req_id])
            if chunks is not None:
                del self._new[req_id]
                self._found[req_id] = deque(chunks)
                self._tell(req_id, room, order)
        return order if order.wanted or order.unwanted else None

    def _tell(self, req_id: str, room: int, order: PrefetchOrder) -> None:
        """Put into the order what of the request's chunks finds room."""
        chunks, told = self._found[req_id], self._told.setdefault(req_id, [])
        while chunks and (chunks[0][0] in self._waiting_for or len(self._waiting_for) < room):
            chunk, first_block = chunks.popleft()
            if chunk not in self._waiting_for:
                self._waiting_for[chunk] = set()
                order.wanted.append((chunk, first_block))
            self._waiting_for[chunk].add(req_id)
            told.append(chunk)
        if not chunks:
            del self._found[req_id]

    def reset(self) -> None:
        """Forget all: the workers do. Who waits now is not read ahead for any more."""
        for known in (self._new, self._found, self._told, self._waiting_for, self._unwanted):
            known.clear()


class PrefetchingConnector(BudgetedConnector):
    """A connector with WaitingRequests on its scheduler's side, once `read_ahead` was called."""

    _waiting: WaitingRequests | None = None

    def read_ahead(self, groups: Sequence[GroupSpec], blocks_per_chunk: int) -> None:
        """From now on have the workers read ahead what waiting requests will load."""
        manager = self.scheduler.manager
        assert isinstance(manager, FskvManager)
        step = math.lcm(*(group.tokens_per_block for group in groups))

        def will_load(request: Request) -> list[tuple[ChunkId, int]] | None:
            # Only of a request without blocks: vLLM's lookup forgets them.
            computed = local_hit(self, request) // step * step
            found, _ = OffloadingConnector.get_num_new_matched_tokens(self, request, computed)
            if not found:
                return None if found is None else []
            context, keys = keys_of_request(self.scheduler, request)
            return [
                (chunk, first_block)
                for group, of_group in zip(groups, keys, strict=True)
                for idx, first_block in first_blocks(
                    group, blocks_per_chunk, computed + found, computed
                )
                for chunk in manager.prepare_load(of_group[idx : idx + 1], context).chunks
            ]

        self._waiting = WaitingRequests(will_load, lambda: manager.prefetch_room)

    def on_new_request(self, request: Request) -> None:
        super().on_new_request(request)
        if self._waiting is not None:
            self._waiting.arrived(request)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if self._waiting is not None:
            self._waiting.gone([request.request_id])

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        order = None
        if self._waiting is not None:
            self._waiting.gone(scheduler_output.finished_req_ids)
            # Before the step's end, when what it asks goes to the disk.
            order = self._waiting.plan()
        told = super().build_connector_meta(scheduler_output)
        return told if order is None else FskvConnectorMetadata(**vars(told), prefetch=order)

    def reset_cache(self) -> bool | None:
        if self._waiting is not None:
            self._waiting.reset()
        was_reset: bool | None = super().reset_cache()
        return was_reset

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begin the step's loads, which take what was read ahead of them; then hear what to read next."""
        super().start_load_kv(forward_context, **kwargs)
        told = self._connector_metadata
        if isinstance(told, FskvConnectorMetadata):
            assert self.connector_worker is not None
            worker = self.connector_worker.worker
            assert isinstance(worker, (FskvWorker, RestingWorker))
            worker.prefetch(told.prefetch)
