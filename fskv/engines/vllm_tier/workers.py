"""The facts that FskvTier needs of the engine's workers: the identity of their KV, and its places in a row.

vLLM builds a secondary tier in the scheduler's process, while it builds its scheduler: the workers have
bound their KV caches by then and are idle. The tier is given neither vLLM's configuration nor a way to the
workers, so `ask_workers` has every worker run `report` through the engine's executor (vllm.quirks). A
worker reads the places from the object that copies between GPU and row, and derives the identity as it does
for FskvConnector; all must agree. Without these facts the engine does not start.

VLLM's tiering copies every chunk into one row of shared memory: the ranks side by side, in each the tensors
side by side, in each the chunk's blocks side by side, every block padded to the tensor's page; then padding
to 4096 bytes. A row holds the chunk of one KV group, so what other groups have of a tensor is padding too.
Canonical pages are there once for all ranks. A file holds the bytes that FskvConnector takes from the GPU:
block by block, page by page, no padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import CanonicalKVCaches, CanonicalKVCacheTensor
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from fskv.config import StoreConfig
from fskv.data_path.threads import FINGERPRINT_S
from fskv.engines.vllm.identity import EngineGroup, engine_groups, reuses_kv
from fskv.engines.vllm.media import takes_media
from fskv.engines.vllm.quirks import connectors, executor
from fskv.engines.vllm.spec import find
from fskv.errors import ConfigError, FskvError, RestError
from fskv.format.spans import ChunkPlan, GroupLayout, Placement
from fskv.hybrid_planner import GroupKind
from fskv.namespace import Identity
from fskv.namespace import directory as directory_of

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import OffloadingSpec

    from fskv.engines.vllm.files import WorkerFiles

_ANSWER_S = FINGERPRINT_S + 60.0


@dataclass(frozen=True)
class Report:
    """One worker's answer, or that of all together; pickled."""

    rank: int
    identity: Identity
    groups: list[EngineGroup]
    files: dict[int | None, tuple[Placement, ...]]  # by the rank in a file's name, then by group
    row_nbytes: int
    prefix_caching: bool  # whether vLLM uses KV again in this engine
    max_model_len: int
    tokens_per_step: int


def ask_workers(spec: OffloadingSpec, config: StoreConfig, row_nbytes: int, mark: str) -> Report:
    """Have every worker report; raises ConfigError where one cannot, or where they do not agree.

    Raises RestError where one does not know its KV.

    From then on a worker whose weights are loaded again writes to the file `mark`.
    """
    engine = executor()
    if engine is None:
        raise ConfigError(
            "this vLLM does not build its secondary tiers where FskvTier can reach the engine's workers, so "
            "it cannot be used with it"
        )
    if takes_media(engine.vllm_config):
        raise ConfigError(
            "FskvTier with a model that takes media: vLLM does not tell a tier which requests have some "
            "(FskvConnector leaves them out); expected --language-model-only without --enable-mm-embeds"
        )
    answers = engine.collective_rpc(
        report, timeout=_ANSWER_S, args=(spec.config.engine_id, config, mark)
    )
    for answer in answers:
        if not isinstance(answer, Report):
            kind, sentence = answer
            raise kind(sentence)
    found = combine(answers, spec.config.parallel.world_size, row_nbytes)
    # The engine core turns it off for models whose prompts are not causal, after the workers were made.
    here = reuses_kv(engine.vllm_config)
    return replace(found, prefix_caching=found.prefix_caching and here)


def combine(reports: Sequence[Report], world_size: int, row_nbytes: int) -> Report:
    """Merge the workers' reports; raises ConfigError unless one engine made them and they fit a row."""
    reports = sorted(reports, key=lambda r: r.rank)
    if [r.rank for r in reports] != list(range(world_size)):
        raise ConfigError(
            f"workers {[r.rank for r in reports]} reported their KV, expected all of {world_size}"
        )
    first = reports[0]
    files: dict[int | None, tuple[Placement, ...]] = {}
    for each in reports:
        if (each.identity, each.row_nbytes) != (first.identity, row_nbytes):
            raise ConfigError(
                f"rank {each.rank} derived namespace {directory_of(each.identity)} with rows of "
                f"{each.row_nbytes} bytes in vLLM's CPU tier, rank {first.rank} "
                f"{directory_of(first.identity)} and the scheduler rows of {row_nbytes}: all must agree"
            )
        files |= each.files  # of canonical pages each rank reports all
    if not all(fit(of_group, row_nbytes) for of_group in zip(*files.values(), strict=True)):
        raise ConfigError("the ranks' pages overlap in vLLM's CPU tier, or do not fit a row")
    return replace(first, files=files, prefix_caching=all(each.prefix_caching for each in reports))


def report(
    _worker: object, engine_id: str, config: StoreConfig, mark: str
) -> Report | tuple[type[FskvError], str]:
    """Describe this worker's KV, or say why the tier cannot be used: vLLM takes an error for a crash.

    Runs in the worker's process, on vLLM's thread, after the KV cache was bound to its layers.
    """
    try:
        return _report(engine_id, config, mark)
    except RestError as error:
        return RestError, str(error)
    except FskvError as error:
        return ConfigError, str(error)
    except (AttributeError, TypeError, ValueError, AssertionError, RuntimeError) as error:
        # Another vLLM's names, or another's shapes.
        line = str(error).partition("\n")[0]
        return ConfigError, (
            f"this vLLM does not tell where it keeps KV in its CPU tier ({type(error).__name__}: {line}), "
            "so FskvTier cannot be used with it"
        )


def _report(engine_id: str, config: StoreConfig, mark: str) -> Report:
    halves = [
        half
        for connector in connectors()  # inside a MultiConnector too
        if (half := connector.connector_worker) is not None
        and isinstance(half.spec, TieringOffloadingSpec)
        and half.spec.config.engine_id == engine_id
    ]
    if len(halves) != 1:
        raise ConfigError(
            f"{len(halves)} connectors with TieringOffloadingSpec in one engine, expected one: their workers "
            "cannot be told apart"
        )
    (half,) = halves
    vllm_config, spec = half.vllm_config, half.spec
    groups = engine_groups(vllm_config, half.kv_cache_config)
    _check_offered(vllm_config, spec, groups, config)
    # The object that copies between GPU and row: where it writes is where the bytes are.
    handler = half.worker._store_handler  # noqa: SLF001
    row = [tensor[0].view(spec.blocks_per_chunk, -1) for tensor in handler.dst_tensors]
    kv_caches, in_row = (
        CanonicalKVCaches(
            [CanonicalKVCacheTensor(tensor, tensor.shape[1]) for tensor in tensors],
            handler.layer_refs_per_group,
        )
        for tensors in (handler.src_tensors, row)
    )
    files, identity, _, loaded = find(vllm_config, config, spec.config, groups, kv_caches, in_row)
    try:
        loaded.watch_weights(mark)
    except OSError as error:
        raise ConfigError(
            f"workers on another machine than the scheduler ({mark}: {error.strerror}): FskvTier needs both "
            "on one (FskvConnector does not)"
        ) from None
    return Report(
        rank=spec.config.parallel.rank,
        identity=identity,
        groups=groups,
        files=placements_of(files),
        row_nbytes=handler.dst_tensors[0].stride(0),
        prefix_caching=reuses_kv(vllm_config),
        max_model_len=vllm_config.model_config.max_model_len,
        tokens_per_step=vllm_config.scheduler_config.max_num_batched_tokens,
    )


def _check_offered(
    vllm_config: Any, spec: OffloadingSpec, groups: Sequence[EngineGroup], config: StoreConfig
) -> None:
    """Raise ConfigError if vLLM's tiering does not tell a tier the facts that it needs to be safe."""
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1 or parallel.world_size != parallel.tensor_parallel_size:
        raise ConfigError(
            f"FskvTier with {parallel.world_size} workers of which {parallel.tensor_parallel_size} are "
            "tensor parallel: expected tensor parallelism alone (FskvConnector takes others)"
        )
    if vllm_config.lora_config is not None and "lora" not in config.trust:
        raise ConfigError(
            "option 'trust': found no \"lora\" in an engine that takes adapters, expected one: vLLM does not "
            "tell a tier which requests have one (FskvConnector leaves them out)"
        )
    if getattr(vllm_config.model_config, "enable_prompt_embeds", False):
        raise ConfigError(
            "FskvTier in an engine that takes embeddings as prompts: vLLM does not tell a tier which "
            "requests have some, and its keys of them are not enough (FskvConnector leaves them out)"
        )
    partly = [g.kind for g in groups if g.spec.kind not in (GroupKind.FULL, GroupKind.MLA)]
    if spec.blocks_per_chunk > 1 and partly:
        raise ConfigError(
            f"option 'block_size' of kv_connector_extra_config: found {spec.blocks_per_chunk} blocks a chunk "
            f"with KV groups {', '.join(partly)}, expected 1 block: of these groups vLLM's CPU tier fills "
            "chunks in part and does not tell which"
        )
    if spec.replicated_layout and not spec.config.canonical_layout:
        raise ConfigError(
            "option 'canonical_layout' of kv_connector_extra_config: found false, expected true: the ranks "
            "of this model share one copy of their pages in vLLM's CPU tier"
        )


def placements_of(files: WorkerFiles) -> dict[int | None, tuple[Placement, ...]]:
    """Return where the pages of files lie in any row: by the rank in a file's name, then by group.

    `files` are of the first row's blocks. Raises ValueError where a page is longer than its place.
    """
    strides = [tensor.stride(0) for tensor in files.tensors]
    offsets = [int(tensor.storage_offset()) for tensor in files.tensors]

    def in_row(layout: GroupLayout) -> Placement:
        places = layout.placed(strides).places
        return Placement(layout, tuple((0, offsets[t], stride, n) for t, _, stride, n in places))

    files_of = zip(files.file_ranks, files.layouts, strict=True)
    return {file_rank: tuple(map(in_row, layouts)) for file_rank, layouts in files_of}


def fit(placements: Sequence[Placement], row_nbytes: int) -> bool:
    """Return whether the pages of a chunk's files lie in a row, each in a place of its own."""
    spans = [span for placement in placements for span in plan_row(placement).spans]
    starts = sorted((span.tensor_offset, span.nbytes) for span in spans)
    return all(
        start + nbytes <= following
        for (start, nbytes), (following, _) in pairwise([*starts, (row_nbytes, 0)])
    )


def plan_row(placement: Placement, key_idx: int = 0, base: int = 0) -> ChunkPlan:
    """Return the transfer of the whole chunk between its file and the row that begins at `base`."""
    return ChunkPlan(key_idx, placement, 0, tuple(range(placement.layout.num_blocks)), base)
