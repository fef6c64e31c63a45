"""FskvMultiConnector: several roots, or a root beside another connector, in one engine.

vLLM's MultiConnector carries the calls to the children; here is what it does not do: choose where to load
from (fskv.routing.load_choice), go on without a child that does not answer, hand every child its own
handshake, keep the children's metrics and events apart, and tell each child which blocks a load of another
one is about to overwrite. Why this form and not one connector with several roots: docs/vllm.md, "Several
roots".

Scheduler and worker side run on the threads of vLLM that call them; no call waits.
"""

from __future__ import annotations

# First: where vLLM cannot work, one sentence and not the traceback of an import that it lacks.
import fskv.engines.vllm_multi.version  # noqa: F401  # isort: skip

import copy
import functools
import logging
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiConnector,
    MultiKVConnectorMetadata,
    MultiKVConnectorStats,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from fskv.data_path.threads import START_UP_S, call_with_deadline
from fskv.engines.vllm.admission import Admission
from fskv.engines.vllm.connector import FskvConnector
from fskv.engines.vllm.quirks import forget_past_blocks, tell_allocated, without_new_loads
from fskv.engines.vllm_multi.events import MergedEvents
from fskv.engines.vllm_multi.metrics import MultiPromMetrics, own_stats, rebuild, stats_id
from fskv.errors import ConfigError, FskvError
from fskv.kv_transfer.multi import ChildConfig, MultiConfig, check_apart, check_beside_pulls
from fskv.observe import metrics
from fskv.observe.metrics import Counters
from fskv.routing.load_choice import Offer, choose

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


@dataclass
class MultiHandshake(KVConnectorHandshakeMetadata):
    """What each child of one worker tells its own scheduler's side; pickled."""

    children: tuple[KVConnectorHandshakeMetadata | None, ...]


class _ChildError(ConfigError):
    """What is wrong with a child, in one sentence that says with which."""

    def __init__(self, idx: int, error: Exception) -> None:
        super().__init__(f"option 'connectors[{idx}]': {' '.join(str(error).split()):.500}")


class FskvMultiConnector(MultiConnector):
    """See the module docstring."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        try:
            config = _parse(vllm_config)
            _check_hybrid(vllm_config, config)
            _check_pulls(vllm_config, kv_cache_config, config)
            _check_real_roots(config)
        except FskvError as error:
            logger.error("fskv: %s", error)
            raise
        self._config = config
        outer = vllm_config.kv_transfer_config
        assert outer is not None
        # The scheduler reads the policy after it has built its connector; see FskvConnector.
        outer.kv_load_failure_policy = "recompute"
        try:
            super().__init__(vllm_config, role, kv_cache_config)
        except FskvError as error:
            if not isinstance(error, _ChildError):  # of the child that was to be built next
                error = _ChildError(len(self._connectors), error)
            logger.error("fskv: %s", error)
            raise error from None
        self._names = [child.name for child in config.connectors]
        self._ids = [
            stats_id(name, transfer)
            for name, transfer in zip(self._names, self._ktc_kv_transfer_config, strict=True)
        ]
        for child_id, child in zip(self._ids, self._connectors, strict=True):
            if isinstance(child, FskvConnector):
                child.stats_id = child_id
        self._counters = Counters()
        for name in self._names:
            for metric in metrics.MULTI_METRICS:
                self._counters.declare(metric, name)
        self._events = MergedEvents()
        # By request, from its first question until it is admitted: when it first had to wait.
        self._waits_since: dict[str, float] = {}
        self._given_up: dict[str, set[int]] = {}  # children that were counted as such
        # From admission until the load is over: (child, request).
        self._loading: dict[str, tuple[int, Request]] = {}
        self._failed: dict[str, set[int]] = {}  # until the request ends
        if role is KVConnectorRole.SCHEDULER:
            from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

            try:
                _check_whole_chunks(self._names, self._connectors)
            except FskvError as error:
                logger.error("fskv: %s", error)
                self.shutdown()
                raise
            _, self._tokens_per_hash = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
            self._granularity = [
                _granularity(child, self._tokens_per_hash) for child in self._connectors
            ]
            logger.info(
                "fskv: loads from one of %d connectors, chosen by '%s': %s",
                len(self._names),
                config.choose,
                "; ".join(_sentence(child) for child in config.connectors),
            )

    @classmethod
    def _get_connector_classes_and_configs(cls, vllm_config: VllmConfig) -> list[Any]:
        """Return class and configuration of each child: its own, without the options that are ours."""
        outer = vllm_config.kv_transfer_config
        assert outer is not None
        found = []
        for idx, child in enumerate(_parse(vllm_config).connectors):
            written = {
                "engine_id": outer.engine_id,
                "kv_load_failure_policy": "recompute",
                **child.transfer,
            }
            config = copy.copy(vllm_config)
            try:
                config.kv_transfer_config = transfer = KVTransferConfig(**written)
                found.append((KVConnectorFactory.get_connector_class(transfer), config))
            except (
                ValueError,
                TypeError,
                ImportError,
                AttributeError,
            ) as error:  # vLLM's own words
                raise _ChildError(idx, error) from error
        return found

    @functools.cached_property
    def _admission(self) -> Admission:
        return Admission()

    # --- start-up ---------------------------------------------------------------------------

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        found = tuple(child.get_handshake_metadata() for child in self._connectors)
        return MultiHandshake(found) if any(each is not None for each in found) else None

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        for idx, child in enumerate(self._connectors):
            of_child = {
                rank: own
                for rank, each in metadata.items()
                if isinstance(each, MultiHandshake) and (own := each.children[idx]) is not None
            }
            # Ours refuses to start without one.
            if of_child or isinstance(child, FskvConnector):
                child.set_xfer_handshake_metadata_pp_aware(of_child)

    # --- where to load from -----------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Ask all children, in every step: asking is what makes them look, and prepare for new blocks."""
        req_id = request.request_id
        self._requests_to_connector.pop(req_id, None)
        if self._admission.steps_aside(request):
            return None, False
        answers = [
            child.get_num_new_matched_tokens(request, num_computed_tokens)
            for child in self._connectors
        ]
        offers = [
            self._offer(idx, request, num_computed_tokens, answer)
            for idx, (answer, _) in enumerate(answers)
        ]

        choice = choose(offers, self._config.choose, self._prefill_s)
        if choice.wait_for:
            since = self._waits_since.setdefault(req_id, time.monotonic())
            in_time = time.monotonic() - since < self._config.lookup_timeout_s
            if in_time or (
                choice.best is None
                and self._is_being_loaded(request, num_computed_tokens, choice.wait_for)
            ):
                return None, False
            self._give_up(req_id, choice.wait_for)
        if choice.best is None:
            return 0, False
        self._requests_to_connector[req_id] = choice.best
        tokens, is_async = answers[choice.best]
        return tokens, is_async

    def _offer(self, idx: int, request: Request, computed: int, answer: int | None) -> Offer:
        unit = self._granularity[idx]
        hope = max(0, request.num_tokens // unit * unit - computed)
        reach = hope if answer is None else answer
        load_s = None
        if self._config.choose == "auto" and reach > 0:
            budget = getattr(self._connectors[idx], "budget", None)
            load_s = None if budget is None else budget.predicted_load_s(reach, computed)
        return Offer(
            answer,
            hope,
            self._config.connectors[idx].load_weight,
            failed=idx in self._failed.get(request.request_id, ()),
            load_s=load_s,
        )

    def _prefill_s(self, num_tokens: int) -> float | None:
        """Return the first prediction that a child has; what is computed is the same for all."""
        budgets = (getattr(child, "budget", None) for child in self._connectors)
        predictions = (each.prefill.predict_s(num_tokens) for each in budgets if each is not None)
        return next((seconds for seconds in predictions if seconds is not None), None)

    def _is_being_loaded(self, request: Request, computed: int, children: Sequence[int]) -> bool:
        """Whether one of the children is loading the very tokens that this request needs next.

        vLLM's offloading defers such a request, so that the load is done once. It ends by its own deadline;
        to go on without it would compute the same prefix once for every request that shares it.
        """
        idx = computed // self._tokens_per_hash
        if idx >= len(request.block_hashes):
            return False
        return any(
            child in children
            and idx < len(other.block_hashes)
            and other.block_hashes[idx] == request.block_hashes[idx]
            for child, other in self._loading.values()
        )

    def _give_up(self, req_id: str, children: Sequence[int]) -> None:
        counted = self._given_up.setdefault(req_id, set())
        for idx in children:
            if idx not in counted:
                counted.add(idx)
                self._counters.add(metrics.MULTI_GIVEN_UP, 1, self._names[idx])

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        chosen = self._requests_to_connector.get(request.request_id)
        return () if chosen is None else super().get_loaded_kv_cache_group_ids(request)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        req_id = request.request_id
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        self._waits_since.pop(req_id, None)
        self._given_up.pop(req_id, None)
        chosen = self._requests_to_connector.get(req_id)
        if not num_external_tokens or chosen is None:
            return
        self._loading[req_id] = (chosen, request)
        self._counters.add(metrics.MULTI_LOADS, 1, self._names[chosen])
        for idx, child in enumerate(self._connectors):
            if idx != chosen and isinstance(child, OffloadingConnector):
                tell_allocated(child.scheduler, blocks)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> MultiKVConnectorMetadata:
        self._admission.ended(scheduler_output.finished_req_ids)
        metadata = tuple(
            child.build_connector_meta(
                without_new_loads(child.scheduler, scheduler_output)
                if isinstance(child, OffloadingConnector)
                else scheduler_output
            )
            for child in self._connectors
        )
        made = MultiKVConnectorMetadata(metadata, self._extra_async_saves or None)
        self._extra_async_saves: dict[str, int] = {}
        return made

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._admission.failed(connector_output.failed_recving)
        for req_id in connector_output.failed_recving or ():
            if req_id in self._loading:
                child, _ = self._loading[req_id]
                self._failed.setdefault(req_id, set()).add(child)
                self._counters.add(metrics.MULTI_FAILED_LOADS, 1, self._names[child])
        for req_id in connector_output.finished_recving or ():
            self._loading.pop(req_id, None)
        super().update_connector_output(connector_output)

    def _aggregate_request_finished(self, request: Request, per_connector_fn: Any) -> Any:
        """Both of vLLM's ways for a request to end come through here."""
        for table in (self._waits_since, self._given_up, self._loading, self._failed):
            table.pop(request.request_id, None)
        return super()._aggregate_request_finished(request, per_connector_fn)

    # --- for all children -------------------------------------------------------------------

    def reset_cache(self) -> bool:
        """Reset every child, whatever becomes of the others: one that was left out would serve old KV."""
        done = True
        failure: Exception | None = None
        for name, child in zip(self._names, self._connectors, strict=True):
            try:
                if isinstance(child, OffloadingConnector):
                    forget_past_blocks(child.scheduler)  # ours would load and store what it stores
                done &= child.reset_cache() is not False
            except Exception as error:
                logger.exception("fskv: the cache of connector %s could not be reset", name)
                failure = error
        self._events.forget()
        if failure is not None:
            raise failure
        return done

    def take_events(self) -> Iterable[KVCacheEvent]:
        for idx, child in enumerate(self._connectors):
            yield from self._events.pass_on(idx, child.take_events())

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        found = own_stats(self._counters)
        for child_id, child in zip(self._ids, self._connectors, strict=True):
            if (stats := child.get_kv_connector_stats()) is not None:
                found[child_id] = stats
        return MultiKVConnectorStats(data=found) if found else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return rebuild(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> MultiPromMetrics:
        names = [child.name for child in _parse(vllm_config).connectors]
        children = [
            (name, child_cls, config)
            for name, (child_cls, config) in zip(
                names, cls._get_connector_classes_and_configs(vllm_config), strict=True
            )
        ]
        return MultiPromMetrics(
            vllm_config, metric_types, labelnames, per_engine_labelvalues, children
        )


def _granularity(child: Any, tokens_per_hash: int) -> int:
    """Return the tokens of which a hit of this child is a multiple, as far as that can be known."""
    if not isinstance(child, OffloadingConnector):
        return tokens_per_hash
    config = child.scheduler.config
    if config.supports_partial_tail:
        return tokens_per_hash
    return max(int(group.tokens_per_chunk) for group in config.kv_group_configs)


def _parse(vllm_config: VllmConfig) -> MultiConfig:
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    return MultiConfig.from_mapping(transfer.kv_connector_extra_config)


def _sentence(child: ChildConfig) -> str:
    stores = child.transfer["kv_connector_extra_config"].get("store", True)
    stores = stores and child.transfer.get("kv_role") != "kv_consumer"
    return f"{child.name} (load_weight {child.load_weight:g}{'' if stores else ', not stored to'})"


def _check_hybrid(vllm_config: VllmConfig, config: MultiConfig) -> None:
    """Refuse children that cannot take several KV groups, in words; vLLM asserts it.

    vLLM turns its hybrid manager off by itself only for a connector whose class cannot take it.
    """
    if vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        return
    for child in config.connectors:
        transfer = KVTransferConfig(**child.transfer)
        if not KVConnectorFactory.supports_hma_config(transfer):
            raise ConfigError(
                f"connector {child.name}: {transfer.kv_connector} does not support vLLM's hybrid KV cache "
                "manager; expected a connector that does, or --disable-hybrid-kv-cache-manager (only for "
                "models that work without it)"
            )


def _check_pulls(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: MultiConfig
) -> None:
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout
    from vllm.v1.kv_cache_interface import MambaSpec

    parallel = vllm_config.parallel_config
    sizes = [getattr(parallel, f"{of}_context_parallel_size", 1) for of in ("decode", "prefill")]
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    has_states = any(isinstance(spec, MambaSpec) for spec in specs)
    check_beside_pulls(
        config.connectors,
        context_parallel=max(sizes) > 1,
        routed_experts=vllm_config.aux_output_config.enable_return_routed_experts,
        conv_layout=get_conv_state_layout() if has_states else "",
    )


def _check_whole_chunks(names: Sequence[str], children: Sequence[Any]) -> None:
    """Refuse vLLM's own offloading where it fills chunks in part and serves them whole (0.32).

    What a request computes after such a chunk would be stored by its siblings.
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


def _check_real_roots(config: MultiConfig) -> None:
    """Refuse two names of one directory: links and bind mounts."""
    seen: list[tuple[int, str, tuple[int, int] | None]] = []
    for idx, child in enumerate(config.connectors):
        root = child.transfer["kv_connector_extra_config"].get("root")
        if not child.is_ours or not isinstance(root, str):
            continue
        path, inode = call_with_deadline(
            functools.partial(_real, root), START_UP_S, f"option 'root': {root} did not answer"
        )
        for other_idx, other, other_inode in seen:
            check_apart(idx, path, other_idx, path if inode and inode == other_inode else other)
        seen.append((idx, path, inode))


def _real(root: str) -> tuple[str, tuple[int, int] | None]:
    path = os.path.realpath(root)
    try:
        stat = os.stat(path)
    except OSError:
        return path, None  # the child says what is wrong with it
    return path, (stat.st_dev, stat.st_ino)
