"""FskvMultiConnector: several roots, or a root beside another connector, in one engine.

vLLM's MultiConnector carries the calls to the children. This class adds four things: it loads from the child
that is worth most, goes on without a silent one, keeps the children's metrics apart, and tells each child
which blocks a load of another one is about to overwrite. In vLLM's own connector a silent child defers the
request, two classes cannot define one metric, and a queued store may write another child's KV under its old
key.

Why children, instead of one connector with several roots? They work beside foreign connectors. A child is the
connector that is tested for one root. A request's load has one deadline and one owner of a failure. The
price: if each root has a part of a prefix, only one part is loaded.

Scheduler and worker side run on the threads of vLLM that call them; no call waits.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from fskv.data_path.threads import START_UP_S, call_with_deadline
from fskv.engines.vllm.connector import FskvConnector
from fskv.engines.vllm.failed_loads import FailedLoads
from fskv.engines.vllm.metrics import to_stats
from fskv.engines.vllm.quirks import tell_allocated
from fskv.engines.vllm_multi.metrics import OWN, MultiPromMetrics, rebuild, stats_id
from fskv.errors import ConfigError, FskvError
from fskv.kv_transfer.multi import MultiConfig, check_roots
from fskv.observe import metrics
from fskv.observe.metrics import Counters

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

# How many times `lookup_timeout_s` a silent child of another make is waited for that alone may have tokens.
_PATIENCE_ALONE = 10


class FskvMultiConnector(MultiConnector):
    """vLLM's MultiConnector, which loads from the child that is worth most and waits for no silent one."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        self._connectors: list[Any] = []
        outer = vllm_config.kv_transfer_config
        assert outer is not None
        try:
            self._config = _parse(vllm_config)
            check_roots(self._config.connectors, _real)
            # The scheduler reads the policy after it has built its connector; see FskvConnector.
            outer.kv_load_failure_policy = "recompute"
            super().__init__(vllm_config, role, kv_cache_config)
            self._names = [child.name for child in self._config.connectors]
            if role is KVConnectorRole.SCHEDULER:
                _check_whole_chunks(self._names, self._connectors)
        except FskvError as error:
            logger.error("fskv: %s", error)
            self.shutdown()
            raise
        self._counters = Counters(*metrics.MULTI_METRICS, labels=self._names)
        self._ids: list[str] = []
        transfers = self._ktc_kv_transfer_config
        for name, child, transfer in zip(self._names, self._connectors, transfers, strict=True):
            self._ids.append(stats_id(name, transfer))
            if isinstance(child, FskvConnector):
                child.stats_id = self._ids[-1]
        self._failed_loads = FailedLoads()
        # By request, from its first question until it is admitted: when it first had to wait for a child that
        # might be better, and which of these it goes on without.
        self._waits_since: dict[str, float] = {}
        self._given_up: dict[str, list[int]] = {}
        self._failed: dict[str, set[int]] = {}  # children whose load failed, until the request ends
        if role is KVConnectorRole.SCHEDULER:
            weights = [f"{each.name} ({each.load_weight:g})" for each in self._config.connectors]
            logger.info("fskv: loads from one of these (load_weight): %s", ", ".join(weights))

    @classmethod
    def _get_connector_classes_and_configs(cls, vllm_config: VllmConfig) -> list[Any]:
        """Return class and configuration of each child: its own, without the options that are ours."""
        outer = vllm_config.kv_transfer_config
        assert outer is not None
        ours = {"engine_id": outer.engine_id, "kv_load_failure_policy": "recompute"}
        found = []
        for idx, child in enumerate(_parse(vllm_config).connectors):
            config = copy.copy(vllm_config)
            try:
                transfer = KVTransferConfig(**{**ours, **child.transfer})
                found.append((KVConnectorFactory.get_connector_class(transfer), config))
            except Exception as error:  # vLLM's own words, of any class
                words = " ".join(str(error).split())
                raise ConfigError(f"option 'connectors[{idx}]': {words:.500}") from error
            config.kv_transfer_config = transfer
        return found

    # --- where to load from -----------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Ask all children, in every step: each then looks, and prepares for new blocks."""
        req_id = request.request_id
        for table in (self._requests_to_connector, self._given_up):
            table.pop(req_id, None)
        if self._failed_loads.steps_aside(request):
            return None, False
        answers = [
            child.get_num_new_matched_tokens(request, num_computed_tokens)
            for child in self._connectors
        ]
        values = [
            self._value(idx, request, num_computed_tokens, tokens)
            for idx, (tokens, _) in enumerate(answers)
        ]
        worth = [idx for idx, (_, amount) in enumerate(values) if amount > 0]
        answered = [idx for idx in worth if answers[idx][0] is not None]
        silent = [idx for idx in worth if answers[idx][0] is None]
        # The first of equals.
        best = max(answered, key=values.__getitem__) if answered else None
        better = [idx for idx in silent if best is None or values[idx] > values[best]]
        if better and self._is_worth_waiting(req_id, better, has_other=best is not None):
            return None, False
        self._given_up[req_id] = better
        if best is None:
            return 0, False
        self._requests_to_connector[req_id] = best
        tokens, is_async = answers[best]
        return tokens, is_async

    def _is_worth_waiting(self, req_id: str, silent: Sequence[int], *, has_other: bool) -> bool:
        """Return whether a request still waits for children that are silent.

        Where no other has a token, one of ours is waited for as it asks: it ends that wait itself.
        """
        since = self._waits_since.setdefault(req_id, time.monotonic())
        if not has_other and any(
            isinstance(self._connectors[idx], FskvConnector) for idx in silent
        ):
            return True
        patience = 1 if has_other else _PATIENCE_ALONE
        return time.monotonic() - since < patience * self._config.lookup_timeout_s

    def _value(
        self, idx: int, request: Request, num_computed: int, tokens: int | None
    ) -> tuple[bool, float]:
        """Return the worth of a child for a request; of a silent one, the most that it could be worth.

        A child whose load of this request has failed comes after all others.
        """
        if tokens is None:
            unit = _granularity(self._connectors[idx])
            tokens = max(0, request.num_tokens // unit * unit - num_computed)
        has_failed = idx in self._failed.get(request.request_id, ())
        return not has_failed, tokens * self._config.connectors[idx].load_weight

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        chosen = self._requests_to_connector.get(request.request_id)
        return () if chosen is None else super().get_loaded_kv_cache_group_ids(request)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        req_id = request.request_id
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._waits_since.pop(req_id, None)
        for idx in self._given_up.pop(req_id, ()):
            self._counters.add(metrics.MULTI_GIVEN_UP, 1, self._names[idx])
        chosen = self._requests_to_connector.get(req_id)
        if not num_external_tokens or chosen is None:
            return
        self._counters.add(metrics.MULTI_LOADS, 1, self._names[chosen])
        for idx, child in enumerate(self._connectors):
            if idx != chosen and isinstance(child, OffloadingConnector):
                tell_allocated(child.scheduler, blocks)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._failed_loads.failed(connector_output.failed_recving)
        for req_id in connector_output.failed_recving or ():
            child = self._requests_to_connector.get(req_id)
            if child is not None:
                self._failed.setdefault(req_id, set()).add(child)
                self._counters.add(metrics.MULTI_FAILED_LOADS, 1, self._names[child])
        super().update_connector_output(connector_output)

    def _aggregate_request_finished(self, request: Request, per_connector_fn: Any) -> Any:
        """Drop a request's state at its end; both of vLLM's ways to end a request call this."""
        for table in (self._waits_since, self._given_up, self._failed):
            table.pop(request.request_id, None)
        return super()._aggregate_request_finished(request, per_connector_fn)

    # --- for all children -------------------------------------------------------------------

    def reset_cache(self) -> bool:
        """Reset every child, whatever becomes of the others: one that was left out would serve old KV."""
        results = []

        def reset(child: Any) -> None:
            results.append(child.reset_cache())

        with contextlib.ExitStack() as every:
            for child in self._connectors:
                every.callback(reset, child)
        return False not in results

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        told = [child.get_kv_connector_stats() for child in self._connectors]
        own = to_stats(self._counters.drain(), {})
        found = zip((OWN, *self._ids), (own, *told), strict=True)
        data = {child_id: stats for child_id, stats in found if stats is not None}
        return MultiKVConnectorStats(data=data) if data else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return rebuild(data)

    @classmethod
    def build_prom_metrics(cls, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> Any:
        names = [child.name for child in _parse(vllm_config).connectors]
        children = cls._get_connector_classes_and_configs(vllm_config)
        return MultiPromMetrics(names, children, vllm_config, *args, **kwargs)


def _granularity(child: Any) -> int:
    """Return the tokens of which a hit of this child is a multiple, as far as that can be known."""
    if not isinstance(child, OffloadingConnector):
        return 1
    config = child.scheduler.config
    if config.supports_partial_tail:
        return int(config.tokens_per_hash)
    return max((int(group.tokens_per_chunk) for group in config.kv_group_configs), default=1)


def _parse(vllm_config: VllmConfig) -> MultiConfig:
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    return MultiConfig.from_mapping(transfer.kv_connector_extra_config)


def _check_whole_chunks(names: Sequence[str], children: Sequence[Any]) -> None:
    """Refuse vLLM's own offloading if it fills chunks in part and serves them whole (0.32).

    Its siblings would store the KV that a request computes after such a chunk.
    """
    for name, child in zip(names, children, strict=True):
        if not isinstance(child, OffloadingConnector) or isinstance(child, FskvConnector):
            continue
        scheduler = child.scheduler
        if scheduler.config.blocks_per_chunk > 1 and scheduler._sliding_window_groups:  # noqa: SLF001
            raise ConfigError(
                f"connector {name}, option 'block_size': found {scheduler.config.blocks_per_chunk} blocks a "
                "chunk with sliding windows or states, expected 1 block: of these groups vLLM's own "
                "offloading stores chunks in part under the keys of whole ones"
            )


def _real(root: str) -> str:
    """Return the path without links."""
    read = functools.partial(os.path.realpath, root)
    path: str = call_with_deadline(read, START_UP_S, f"option 'root': {root} did not answer")
    return path
