"""Builds what vLLM's offloading connector runs on: the scheduler's manager and a rank's worker.

`prepare` finds out what both sides must agree on, `with_spec` hands it to `FskvOffloadingSpec` through vLLM's
own factory.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingSpec

from fskv.config import MIB, StoreConfig
from fskv.data_path.threads import START_UP_S, call_with_deadline
from fskv.engines.vllm.events import KvEvents
from fskv.engines.vllm.files import rank_files, slices_per_rank
from fskv.engines.vllm.identity import EngineGroup, build_identity, engine_groups, reuses_kv
from fskv.engines.vllm.loaded import Loaded, find_loaded
from fskv.engines.vllm.manager import FskvHandshake, FskvManager
from fskv.engines.vllm.metrics import metric_definitions
from fskv.engines.vllm.page_layout import page_layouts
from fskv.engines.vllm.places import blocks_in
from fskv.engines.vllm.worker import FskvWorker, RestingWorker
from fskv.hybrid_planner import Geometry, hit_cost, plan_geometry
from fskv.kv_transfer.options import ENGINE_OPTIONS, store_config
from fskv.namespace import Identity, Json
from fskv.root.neighbours import beside
from fskv.root.root import NamespaceDir, Root

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

logger = logging.getLogger(__name__)

FINGERPRINT_S = 300.0  # a few thousand small reads, perhaps on a slow mount
# Carries Setup through vLLM's spec factory; never in a user's configuration.
_SETUP_KEY = "fskv_setup"


@dataclass(frozen=True)
class Setup:
    """What the connector found out before vLLM builds the spec."""

    vllm_config: VllmConfig
    config: StoreConfig
    groups: list[EngineGroup]
    geometry: Geometry


class FskvOffloadingSpec(OffloadingSpec):
    """Builds manager and worker for vLLM's connector."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._setup: Setup = self.extra_config[_SETUP_KEY]
        self.manager: FskvManager | None = None
        self.worker: FskvWorker | RestingWorker | None = None
        self.has_begun = False  # to build the worker: vLLM has told where its KV lies

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        return metric_definitions()

    def get_manager(self) -> OffloadingManager:
        geometry = self._setup.geometry
        tokens_per_step = self._setup.vllm_config.scheduler_config.max_num_batched_tokens
        self.manager = FskvManager(
            self._setup.config,
            geometry.blocks_per_chunk,
            KvEvents.enabled_by(self.kv_events_config, geometry.tokens_per_chunk[0]),
            chunks_per_step=-(-tokens_per_step // min(geometry.tokens_per_chunk)),
            engine_rank=self._setup.vllm_config.parallel_config.data_parallel_index,
        )
        return self.manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> FskvWorker:
        """Derive the identity, open the namespace and start the I/O; raises FskvError."""
        self.has_begun = True
        setup = self._setup
        bpc = setup.geometry.blocks_per_chunk
        config, parallel = setup.config, self.config.parallel
        vllm_config = setup.vllm_config
        files, canonical_format = rank_files(vllm_config, self.config, setup.groups, bpc, kv_caches)
        layouts = files.layouts[0]
        identity, loaded, in_page = identify(
            vllm_config,
            config,
            setup.groups,
            [tuple(page.nbytes for page in layout.pages) for layout in layouts],
            blocks_in(kv_caches),
            blocks_per_chunk=bpc,
            tokens_per_hash=self.config.cache.tokens_per_hash,
            canonical_format=canonical_format,
        )
        directory, others = call_with_deadline(
            lambda: _open_namespace(config, identity),
            START_UP_S,
            f"option 'root': {config.root} did not answer",
        )
        tokens = vllm_config.model_config.max_model_len
        specs = [group.spec for group in setup.groups]
        num_files, nbytes = hit_cost(specs, list(layouts), bpc, tokens)
        logger.info(
            "fskv: namespace %s; %d tokens a chunk; a hit of %d tokens reads %d files, %.1f MiB a rank",
            directory.path,
            setup.geometry.tokens_per_chunk[0],
            tokens,
            num_files * len(files.layouts),
            nbytes * len(files.layouts) / MIB,
        )
        if others and parallel.rank == 0:
            logger.info("fskv: %s", others)
        loaded.note_reloads()
        self.worker = worker = FskvWorker(
            config,
            setup.groups,
            files,
            directory,
            restore=lambda: Root.of(config, create=False).open_namespace(identity),
            rank=parallel.rank,
            world_size=parallel.world_size,
            # With one stage those of its groups are in the manifest.
            layouts=in_page if vllm_config.parallel_config.pipeline_parallel_size > 1 else {},
            # Some layers turn it off while they are built, in this process alone.
            prefix_caching=reuses_kv(vllm_config),
            reloaded=lambda: loaded.pages_lost or (loaded.reloaded and not config.weights_fixed),
        )
        loaded.at_rest.append(lambda: worker.at_rest)
        return worker

    def get_resting_worker(self, reason: str) -> RestingWorker:
        """Return what stands for the worker where `get_worker` has raised RestError, or was not asked."""
        parallel = self.config.parallel
        handshake = FskvHandshake.resting(parallel.rank, parallel.world_size, reason)
        self.worker = resting = RestingWorker(handshake)
        return resting


def identify(
    vllm_config: VllmConfig,
    config: StoreConfig,
    groups: list[EngineGroup],
    pages: list[tuple[int, ...]],
    num_blocks: int,
    *,
    blocks_per_chunk: int,
    tokens_per_hash: int,
    canonical_format: str | None,
) -> tuple[Identity, Loaded, dict[str, Json]]:
    """Return a worker's identity, what it has loaded, and how its pages are laid out inside, by group.

    For vLLM's own thread, when KV is bound to its layers. Raises as `build_identity`, and ConfigError where
    files do not answer.
    """
    layouts = page_layouts(vllm_config, groups, num_blocks, canonical=canonical_format is not None)
    loaded = find_loaded(vllm_config)
    identity = call_with_deadline(
        lambda: build_identity(
            *(vllm_config, config, groups, pages, blocks_per_chunk, tokens_per_hash, layouts),
            canonical_format=canonical_format,
            loaded=loaded,
        ),
        FINGERPRINT_S,
        "the checkpoint's files could not be read for a fingerprint (see option 'weights_id')",
    )
    return identity, loaded, layouts


def _open_namespace(config: StoreConfig, identity: Identity) -> tuple[NamespaceDir, str]:
    """Open this engine's namespace; the second says what is beside it, "" where that is of no interest."""
    directory = Root.of(config).open_namespace(identity)
    return directory, beside(config.root, identity)


def prepare(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, announce: bool) -> Setup:
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    config = store_config(transfer.kv_connector_extra_config)
    if transfer.kv_load_failure_policy != "recompute":
        # "fail" is vLLM's default, and cannot be told from a "fail" that somebody wrote. The scheduler
        # reads the policy after it has built its connector.
        if announce:
            logger.warning(
                'fskv: option \'kv_load_failure_policy\': found "%s" (vLLM\'s default), using "recompute": '
                "a chunk that cannot be loaded costs a recompute and never fails a request",
                transfer.kv_load_failure_policy,
            )
        transfer.kv_load_failure_policy = "recompute"
    groups = engine_groups(vllm_config, kv_cache_config)
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    _, tokens_per_hash = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    # Of one file, so that engines of every topology choose the same chunks.
    files = slices_per_rank(vllm_config, groups) if config.canonical_layout else 1
    geometry = plan_geometry(
        [group.spec for group in groups],
        [group.planned_nbytes // files for group in groups],
        hybrid_chunk_size=config.hybrid_chunk_size,
        tokens_per_hash=tokens_per_hash,
        max_model_len=vllm_config.model_config.max_model_len,
        retention_interval=vllm_config.cache_config.prefix_cache_retention_interval,
    )
    if announce:
        for warning in geometry.warnings:
            logger.warning("fskv: %s", warning)
    return Setup(vllm_config, config, groups, geometry)


def with_spec(vllm_config: VllmConfig, setup: Setup | None) -> VllmConfig:
    """Return a shallow copy whose offloading configuration names our spec; the user's stays as written."""
    assert vllm_config.kv_transfer_config is not None
    written = vllm_config.kv_transfer_config.kv_connector_extra_config
    extra: dict[str, Any] = {key: written[key] for key in ENGINE_OPTIONS if key in written}
    extra["spec_name"] = FskvOffloadingSpec.__name__
    extra["spec_module_path"] = __name__
    if setup is not None:
        extra["blocks_per_chunk"] = setup.geometry.blocks_per_chunk
        extra["canonical_layout"] = setup.config.canonical_layout
        extra[_SETUP_KEY] = setup
    injected = copy.copy(vllm_config)
    injected.kv_transfer_config = copy.copy(vllm_config.kv_transfer_config)
    injected.kv_transfer_config.kv_connector_extra_config = extra
    return injected
