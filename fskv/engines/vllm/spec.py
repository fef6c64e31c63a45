"""Builds the two halves of vLLM's offloading connector: the scheduler's manager and a rank's worker.

`prepare` finds out what both sides must agree on, `with_spec` hands it to `FskvOffloadingSpec` through vLLM's
own factory.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingManager, OffloadingSpec

from fskv.config import MIB, StoreConfig
from fskv.data_path.threads import FINGERPRINT_S, START_UP_S, call_with_deadline
from fskv.engines.vllm.events import KvEvents
from fskv.engines.vllm.files import (
    WorkerFiles,
    canonical_files,
    canonical_format_of,
    count_slices,
    own_files,
)
from fskv.engines.vllm.identity import EngineGroup, build_identity, engine_groups, reuses_kv
from fskv.engines.vllm.loaded import Loaded, find_loaded
from fskv.engines.vllm.manager import FskvManager
from fskv.engines.vllm.metrics import metric_definitions
from fskv.engines.vllm.page_layout import page_layouts
from fskv.engines.vllm.places import blocks_in, check_rows, places_of, rows_of
from fskv.engines.vllm.weights import Purity
from fskv.engines.vllm.worker import FskvWorker
from fskv.hybrid_planner import Geometry, hit_cost, plan_geometry
from fskv.kv_transfer.options import ENGINE_OPTIONS, store_config
from fskv.namespace import Identity, Json
from fskv.root.neighbours import beside
from fskv.root.prefill_rate import read_prefill_rate
from fskv.root.root import NamespaceDir, Root

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.kv_offload.config import OffloadingConfig

logger = logging.getLogger(__name__)

_Worker = TypeVar("_Worker", bound=FskvWorker)
_SETUP_KEY = (
    "fskv_setup"  # carries Setup through vLLM's spec factory; never in a user's configuration
)


@dataclass(frozen=True)
class Setup:
    """The findings of the connector before vLLM builds the spec."""

    vllm_config: VllmConfig
    config: StoreConfig
    groups: list[EngineGroup]
    geometry: Geometry
    loads: bool = True  # not a producer


class FskvOffloadingSpec(OffloadingSpec):
    """Builds manager and worker for vLLM's connector."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self._setup: Setup = self.extra_config[_SETUP_KEY]
        self.manager: FskvManager | None = None
        self.worker: FskvWorker | None = None
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
            loads=self._setup.loads,
        )
        return self.manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> FskvWorker:
        """Derive the identity, open the namespace and start the I/O; raises FskvError."""
        self.has_begun = True
        setup, parallel = self._setup, self.config.parallel
        vllm_config, config = setup.vllm_config, setup.config
        files, identity, in_page, loaded = find(
            vllm_config, config, self.config, setup.groups, kv_caches
        )
        loaded.watch_weights()
        self.worker = open_worker(
            FskvWorker,
            config,
            identity,
            setup.groups,
            files,
            vllm_config.model_config.max_model_len,
            rank=parallel.rank,
            world_size=parallel.world_size,
            # With one stage those of its groups are in the manifest.
            layouts=in_page if vllm_config.parallel_config.pipeline_parallel_size > 1 else {},
            # Some layers turn it off while they are built, in this process alone.
            prefix_caching=reuses_kv(vllm_config),
            purity=Purity(loaded.weights, fixed=config.weights_fixed),
        )
        loaded.weights.before_loss.append(self.worker.mover.free_pages)
        return self.worker


def find(
    vllm_config: VllmConfig,
    config: StoreConfig,
    engine: OffloadingConfig,
    groups: list[EngineGroup],
    kv_caches: CanonicalKVCaches,
    row: CanonicalKVCaches | None = None,
) -> tuple[WorkerFiles, Identity, dict[str, Json], Loaded]:
    """Return a rank's files, the identity of its KV, the layout inside pages, and the loaded weights.

    `row` is where vLLM's CPU tier has the blocks of a chunk: then the files' pages are there.

    Raises ConfigError where a setting must be another one, RestError where it is not known where KV lies.
    """
    num_blocks, bpc = blocks_in(kv_caches), engine.cache.blocks_per_chunk
    places = places_of(vllm_config, groups, num_blocks)
    check_rows(vllm_config, groups, places, rows_of(kv_caches), num_blocks)
    canonical_format = None
    if engine.canonical_layout:
        slices = count_slices(vllm_config, groups)
        canonical_format = canonical_format_of(engine, slices)
        files = canonical_files(groups, bpc, row or kv_caches, slices, in_full=row is not None)
    else:
        file_rank = engine.parallel.rank if engine.parallel.world_size > 1 else None
        files = own_files(groups, bpc, row or kv_caches, file_rank)
    in_page = page_layouts(vllm_config, groups, num_blocks, canonical=engine.canonical_layout)
    loaded = find_loaded(vllm_config)
    identity = call_with_deadline(
        lambda: build_identity(
            vllm_config,
            config,
            groups,
            [tuple(page.nbytes for page in layout.pages) for layout in files.layouts[0]],
            bpc,
            engine.cache.tokens_per_hash,
            in_page,
            canonical_format,
            loaded,
        ),
        FINGERPRINT_S,
        "the checkpoint's files could not be read for a fingerprint (see option 'weights_id')",
    )
    return files, identity, in_page, loaded


def open_worker(
    kind: type[_Worker],
    config: StoreConfig,
    identity: Identity,
    groups: list[EngineGroup],
    files: WorkerFiles,
    max_model_len: int,
    **options: Any,
) -> _Worker:
    """Open the namespace and start the I/O; `options` are those of FskvWorker. Raises FskvError."""

    def open_namespace() -> tuple[NamespaceDir, str, float | None]:
        directory = Root.of(config).open_namespace(identity)
        return directory, beside(config.root, identity), read_prefill_rate(directory)

    directory, others, prefill_per_s = call_with_deadline(
        open_namespace,
        START_UP_S,
        f"option 'root': {config.root} did not answer",
    )
    specs, layouts = [group.spec for group in groups], files.layouts[0]
    bpc = layouts[0].num_blocks
    num_files, nbytes = hit_cost(specs, list(layouts), bpc, max_model_len)
    logger.info(
        "fskv: namespace %s; %d tokens a chunk; a hit of %d tokens reads %d files, %.1f MiB in this process",
        directory.path,
        specs[0].tokens_per_block * bpc,
        max_model_len,
        num_files * len(files.layouts),
        nbytes * len(files.layouts) / MIB,
    )
    if others and options["rank"] == 0:
        logger.info("fskv: %s", others)
    worker = kind(
        config,
        groups,
        files,
        directory,
        open_namespace=lambda sources: Root.of(config, create=False).open_namespace(
            replace(identity, epoch=sources)
        ),
        **options,
    )
    worker.handshake.prefill_per_s = prefill_per_s
    return worker


def prepare(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, *, announce: bool) -> Setup:
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    config = store_config(transfer.kv_connector_extra_config, getattr(transfer, "kv_role", None))
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
    slices = count_slices(vllm_config, groups) if config.canonical_layout else 1
    files = max(1, slices // int(vllm_config.parallel_config.tensor_parallel_size))
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
    loads = getattr(transfer, "kv_role", None) != "kv_producer"
    return Setup(vllm_config, config, groups, geometry, loads)


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
