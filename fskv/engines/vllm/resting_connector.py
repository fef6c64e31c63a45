"""RestingConnector: stands for a FskvConnector where the model keeps KV of a kind that fskv does not know.

VLLM's own offloading cannot be built there: it asserts that it knows every kind. So nothing of it is used. On
the scheduler's side the manager is turned off at once, on a worker's the handshake says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1 import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
)

from fskv.engines.vllm.manager import FskvHandshake, FskvManager
from fskv.engines.vllm.metrics import FskvStats
from fskv.engines.vllm.quirks import gives_way
from fskv.kv_transfer.options import store_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class RestingConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module docstring."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
        *,
        reason: str,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        parallel = vllm_config.parallel_config
        self._manager: FskvManager | None = None
        self.handshake: FskvHandshake | None = None
        if role is KVConnectorRole.WORKER:
            self.handshake = FskvHandshake.resting(parallel.rank, parallel.world_size, reason)
            return
        assert vllm_config.kv_transfer_config is not None
        config = store_config(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._manager = FskvManager(config, 1, engine_rank=parallel.data_parallel_index)
        self._manager.rest(reason)

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    def shutdown(self) -> None:
        if self._manager is not None:
            self._manager.shutdown()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        stats = None if self._manager is None else self._manager.get_stats()
        return None if stats is None else FskvStats(data=stats.data)

    # --- worker -----------------------------------------------------------------------------

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return None if gives_way(self) else self.handshake

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Load nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is being loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Store nothing."""

    def wait_for_save(self) -> None:
        """Nothing is being stored."""

    # --- scheduler --------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """The workers may know their KV; nothing is stored or loaded all the same."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Nothing is to be loaded into them."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        # What a FskvConnector on a worker that knows its KV takes.
        return OffloadingConnectorMetadata(load_jobs={}, store_jobs={})

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None
