"""What FskvTier must know of the engine's workers: the identity of their KV and where it lies in a row.

vLLM builds a secondary tier in the scheduler's process, while it builds its scheduler: the workers have
bound their KV caches by then and are idle. The tier is given neither vLLM's configuration nor a way to the
workers, so `ask_workers` has every worker run `report` through the engine's executor (vllm.quirks). A
worker reads the places from the object that copies between GPU and row, and derives the identity with the
functions that FskvConnector uses; all must agree. What cannot be found refuses to start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from fskv.config import StoreConfig
from fskv.engines.vllm.files import canonical_format_of, count_slices
from fskv.engines.vllm.identity import EngineGroup, engine_groups, reuses_kv
from fskv.engines.vllm.media import make_keys_strict
from fskv.engines.vllm.places import check_rows, places_of
from fskv.engines.vllm.quirks import connectors, executor
from fskv.engines.vllm.spec import FINGERPRINT_S, identify
from fskv.engines.vllm_tier.rows import PlacedTensor, RowLayout, own_rows, slice_rows
from fskv.errors import ConfigError, FskvError, RestError
from fskv.hybrid_planner import GroupKind
from fskv.namespace import Identity
from fskv.namespace import directory as directory_of
from fskv.plan.spans import GroupLayout

if TYPE_CHECKING:
    import torch
    from vllm.v1.kv_offload.base import OffloadingSpec

_ANSWER_S = FINGERPRINT_S + 60.0


@dataclass(frozen=True)
class Report:
    """One worker's answer; pickled."""

    rank: int
    identity: Identity
    groups: list[EngineGroup]
    tensors: tuple[PlacedTensor, ...]
    refs: tuple[tuple[tuple[int, int], ...], ...]  # (tensor, bytes in a chunk's file) by group
    row_nbytes: int
    num_slices: int | None  # of a canonical page, None for pages of the rank's own
    prefix_caching: bool
    max_model_len: int
    tokens_per_step: int


@dataclass(frozen=True)
class Resting:
    """The answer of a worker that does not know its KV; pickled."""

    reason: str


@dataclass(frozen=True)
class Workers:
    """All workers together; `rows[i][g]` is file i's payload of the group at position g."""

    identity: Identity
    groups: list[EngineGroup]
    rows: tuple[tuple[RowLayout, ...], ...]
    file_ranks: tuple[int | None, ...]
    prefix_caching: bool  # whether vLLM uses KV again in this engine
    max_model_len: int
    tokens_per_step: int


def ask_workers(spec: OffloadingSpec, config: StoreConfig, row_nbytes: int, mark: str) -> Workers:
    """Have every worker report; raises ConfigError where one cannot, or where they do not agree.

    Raises RestError where one does not know its KV.

    From then on a worker whose weights are loaded again writes to the file `mark`.
    """
    engine = _executor()
    # The tier is not told which requests have media, so all of them must have keys that hold their content.
    unfit = make_keys_strict(engine.vllm_config, checked="media" not in config.trust)
    if unfit and engine.vllm_config.model_config.is_multimodal_model:
        raise ConfigError(
            f"FskvTier with a model that takes media: {unfit} (FskvConnector leaves such requests out)"
        )
    answers = engine.collective_rpc(
        report, timeout=_ANSWER_S, args=(spec.config.engine_id, config, mark)
    )
    reports = []
    for answer in answers:
        if isinstance(answer, str):
            raise ConfigError(answer)
        if isinstance(answer, Resting):
            raise RestError(answer.reason)
        reports.append(answer)
    workers = combine(reports, spec.blocks_per_chunk, spec.config.parallel.world_size, row_nbytes)
    # The engine core turns it off for models whose prompts are not causal, after the workers were made.
    here = reuses_kv(engine.vllm_config)
    return replace(workers, prefix_caching=workers.prefix_caching and here)


def combine(
    reports: Sequence[Report], blocks_per_chunk: int, world_size: int, row_nbytes: int
) -> Workers:
    """Put the reports together; raises ConfigError unless they are of one engine and fit a row."""
    reports = sorted(reports, key=lambda r: r.rank)
    if [r.rank for r in reports] != list(range(world_size)):
        raise ConfigError(
            f"workers {[r.rank for r in reports]} reported their KV, expected all of {world_size}"
        )
    first = reports[0]
    for other in reports[1:]:
        if other.identity != first.identity:
            raise ConfigError(
                f"rank {other.rank} derived namespace {directory_of(other.identity)}, rank {first.rank} "
                f"{directory_of(first.identity)}: all must agree"
            )
    if first.num_slices is not None:
        rows = slice_rows(
            first.groups, blocks_per_chunk, first.refs, first.tensors, first.num_slices
        )
        file_ranks: tuple[int | None, ...] = (
            (None,) if first.num_slices == 1 else tuple(range(first.num_slices))
        )
    else:
        rows = tuple(own_rows(r.groups, blocks_per_chunk, r.refs, r.tensors) for r in reports)
        file_ranks = (None,) if world_size == 1 else tuple(r.rank for r in reports)
    for report_, of_file in zip(reports, rows, strict=False):
        if report_.row_nbytes != row_nbytes or any(row.end > row_nbytes for row in of_file):
            raise ConfigError(
                f"rank {report_.rank} has rows of {report_.row_nbytes} bytes in vLLM's CPU tier, the "
                f"scheduler rows of {row_nbytes}: all must agree"
            )
    for of_group in zip(*rows, strict=True):
        if len({tuple(page.nbytes for page in row.layout.pages) for row in of_group}) != 1:
            raise ConfigError("the ranks have pages of different sizes; expected all alike")
    return Workers(
        first.identity,
        first.groups,
        rows,
        file_ranks,
        all(each.prefix_caching for each in reports),
        first.max_model_len,
        first.tokens_per_step,
    )


def report(
    _worker: object, engine_id: str, config: StoreConfig, mark: str
) -> Report | Resting | str:
    """Describe this worker's KV, or say in a sentence why the tier cannot be used with it.

    Runs in the worker's process, on vLLM's thread, after the KV cache was bound to its layers.
    """
    try:
        return _report(engine_id, config, mark)
    except RestError as error:
        return Resting(str(error))
    except FskvError as error:
        return str(error)
    except (AttributeError, TypeError, ValueError, AssertionError) as error:  # another vLLM's names
        line = str(error).partition("\n")[0]
        return (
            f"this vLLM does not tell where it keeps KV in its CPU tier ({type(error).__name__}: {line}), "
            "so FskvTier cannot be used with it"
        )


def _report(engine_id: str, config: StoreConfig, mark: str) -> Report:
    connector = _tiering_connector(engine_id)
    connector_worker = connector.connector_worker
    assert connector_worker is not None
    vllm_config, spec = connector_worker.vllm_config, connector_worker.spec
    assert isinstance(spec, TieringOffloadingSpec)
    groups = engine_groups(vllm_config, connector_worker.kv_cache_config)
    bpc = spec.blocks_per_chunk
    _check_offered(vllm_config, spec, groups, config)
    # The object that copies between GPU and row: where it writes is where the bytes are.
    handler = connector_worker.worker._store_handler  # noqa: SLF001
    num_slices, canonical_format = None, None
    if spec.config.canonical_layout:
        num_slices = count_slices(vllm_config, groups)
        canonical_format = canonical_format_of(spec.config, num_slices)
    num_blocks = connector_worker.kv_cache_config.num_blocks
    rows = [
        [(handler.src_tensors[ref.tensor_idx], ref.page_size_bytes) for ref in refs]
        for refs in handler.layer_refs_per_group
    ]
    places = places_of(vllm_config, groups, num_blocks)
    check_rows(vllm_config, groups, places, rows, num_blocks, of="vLLM's CPU tier")
    refs = tuple(
        tuple((ref.tensor_idx, _page_nbytes(ref, canonical=num_slices is not None)) for ref in refs)
        for refs in handler.layer_refs_per_group
    )
    identity, loaded, _ = identify(
        vllm_config,
        config,
        groups,
        [_file_pages(of_group, num_slices or 1) for of_group in refs],
        num_blocks,
        blocks_per_chunk=bpc,
        tokens_per_hash=spec.config.cache.tokens_per_hash,
        canonical_format=canonical_format,
    )
    try:
        loaded.note_reloads(mark)
    except OSError as error:
        raise ConfigError(
            f"workers on another machine than the scheduler ({mark}: {error.strerror}): FskvTier needs both "
            "on one (FskvConnector does not)"
        ) from None
    return Report(
        rank=spec.config.parallel.rank,
        identity=identity,
        groups=groups,
        tensors=placed_tensors(handler.dst_tensors, bpc),
        refs=refs,
        row_nbytes=handler.dst_tensors[0].stride(0),
        num_slices=num_slices,
        prefix_caching=reuses_kv(vllm_config),
        max_model_len=vllm_config.model_config.max_model_len,
        tokens_per_step=vllm_config.scheduler_config.max_num_batched_tokens,
    )


def placed_tensors(
    in_rows: Sequence[torch.Tensor], blocks_per_chunk: int
) -> tuple[PlacedTensor, ...]:
    """Return where in a row vLLM puts what a rank has: `in_rows` are its views of the CPU tier, by tensor."""
    placed = []
    for tensor in in_rows:
        stride, rest = divmod(tensor.shape[1], blocks_per_chunk)
        if rest or tensor.element_size() != 1 or tensor.stride(1) != 1:
            raise ValueError(
                f"{tuple(tensor.shape)} of {tensor.dtype} for {blocks_per_chunk} blocks"
            )
        placed.append(PlacedTensor(int(tensor.storage_offset()), stride))
    return tuple(placed)


def _check_offered(
    vllm_config: Any,
    spec: TieringOffloadingSpec,
    groups: Sequence[EngineGroup],
    config: StoreConfig,
) -> None:
    """Raise ConfigError where vLLM's tiering does not tell a tier what it would need to be safe."""
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


def _page_nbytes(ref: Any, *, canonical: bool) -> int:
    if not canonical:
        return int(ref.page_size_bytes)
    if ref.mapping is None or not ref.mapping.parallelism_agnostic:
        raise ConfigError(
            "option 'canonical_layout' of kv_connector_extra_config: found true, expected false: vLLM does "
            "not certify this model's pages as free of the topology"
        )
    return int(ref.mapping.canonical_page_size_bytes)


def _file_pages(of_group: Sequence[tuple[int, int]], num_slices: int) -> tuple[int, ...]:
    """Return the sizes of a file's pages, in its order: layers that share a tensor are one page."""
    layout = GroupLayout.of(0, 1, [(tensor, nbytes // num_slices) for tensor, nbytes in of_group])
    return tuple(page.nbytes for page in layout.pages)


def _tiering_connector(engine_id: str) -> OffloadingConnector:
    """Return this worker's connector whose CPU tier belongs to the engine; inside a MultiConnector too."""
    found = [
        connector
        for connector in connectors()
        if connector.connector_worker is not None
        and isinstance(connector.connector_worker.spec, TieringOffloadingSpec)
        and connector.connector_worker.spec.config.engine_id == engine_id
    ]
    if len(found) != 1:
        raise ConfigError(
            f"{len(found)} connectors with TieringOffloadingSpec in one engine, expected one: their workers "
            "cannot be told apart"
        )
    return found[0]


def _executor() -> Any:
    found = executor()
    if found is None:
        raise ConfigError(
            "this vLLM does not build its secondary tiers where FskvTier can reach the engine's workers, so "
            "it cannot be used with it"
        )
    return found
