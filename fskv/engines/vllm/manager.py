"""The scheduler's side of the vLLM adapter: what is on disk, what to load, what to store.

Runs on the scheduler's thread, under vLLM's lock, and so never touches a disk: answers come from
fskv.index.presence. Until the workers' handshake has told the namespace, everything is a miss.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_block_hash,
    get_offload_group_idx,
)

from fskv.bounds.client import Capacity
from fskv.bounds.quota import Limits
from fskv.config import StoreConfig
from fskv.data_path.breaker import Breaker
from fskv.data_path.job import NO_LIMIT, LoadLimit
from fskv.engines.vllm.events import KvEvents
from fskv.engines.vllm.media import MediaKeys, is_media_key
from fskv.engines.vllm.watch import Watch
from fskv.errors import ConfigError
from fskv.index.presence import Findings, Key, PresenceIndex, RankFiles, probe_chunks
from fskv.observe import metrics
from fskv.observe.metrics import Counters
from fskv.observe.state_log import StateLog
from fskv.root.root import FORMAT_FILE, NamespaceDir
from fskv.types import ChunkId, Presence, Status

if TYPE_CHECKING:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

logger = logging.getLogger(__name__)

PREFIX_CACHING_OFF = (
    "prefix caching is off in this engine, where vLLM does so because KV must not be used again, or by "
    "--no-enable-prefix-caching: fskv neither loads nor stores"
)

_MAX_STORING = 65536
# An engine that is paused or put to sleep waits until it is idle; a hung mount must not hold that up.
_EVENTS_LINGER_S = 2.0

# A load that ends like this leaves no file to load, or one that nobody will read again.
_GONE = (Status.MISSING, Status.STALE, Status.CORRUPT)

_RESULTS = {
    Presence.HIT: LookupResult.HIT,
    Presence.MISS: LookupResult.MISS,
    Presence.UNKNOWN: LookupResult.RETRY,
}


def to_chunk(key: OffloadKey) -> ChunkId:
    return ChunkId(get_offload_block_hash(key), get_offload_group_idx(key))


@dataclass
class ChunkKeys(LoadStoreSpec):
    """Names the chunks of a job, in the order of vLLM's keys; pickled to every worker."""

    chunks: list[ChunkId]
    limit: LoadLimit = NO_LIMIT  # a load's


class _Store(NamedTuple):
    """A chunk on its way to the disk: when to stop believing in it, and `num_removals` when it began."""

    until: float
    began: int


@dataclass
class FskvHandshake(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler at start-up; pickled."""

    rank: int
    world_size: int
    blocks_per_chunk: int
    namespace_path: str
    namespace_digest: bytes
    dir_mode: int
    file_mode: int
    file_nbytes: dict[int, int]  # by group index
    # What stands for a rank in the names of its files of a chunk; None: what its own rank gives.
    canonical_ranks: tuple[int | None, ...] | None = None
    prefix_caching: bool = True  # whether the worker's layers allow KV to be used again

    @property
    def file_ranks(self) -> tuple[int | None, ...]:
        if self.canonical_ranks is not None:
            return self.canonical_ranks
        return (self.rank if self.world_size > 1 else None,)

    @property
    def directory(self) -> NamespaceDir:
        return NamespaceDir(
            self.namespace_path, self.namespace_digest, self.dir_mode, self.file_mode
        )


class FskvManager(OffloadingManager):
    """See the module docstring."""

    def __init__(
        self,
        config: StoreConfig,
        blocks_per_chunk: int,
        events: KvEvents | None = None,
        *,
        chunks_per_step: int = 1,
        engine_rank: int = 0,
    ) -> None:
        """`events` is None where the engine publishes no KV events.

        `chunks_per_step` is how many chunks of a group one step can fill: so many must find room at once.
        """
        self._chunks_per_step = chunks_per_step
        self._config = config
        self._events = events
        self._blocks_per_chunk = blocks_per_chunk
        self._workers: list[FskvHandshake] = []
        self._counters = Counters(*metrics.SCHEDULER_COUNTERS)
        self._states = StateLog("fskv: ", root=config.root)
        self._breaker = Breaker(
            config.breaker_failures,
            config.breaker_probe_s,
            log=StateLog("fskv: ", root=config.root, of="scheduler"),
        )
        self._presence = PresenceIndex(
            self._probe,
            positive_ttl_s=config.positive_ttl_s,
            negative_ttl_s=config.negative_ttl_s,
            lookup_timeout_s=config.lookup_timeout_s,
            quarantine_s=config.quarantine_s,
            breaker=self._breaker,
        )
        self._storing: dict[ChunkId, _Store] = {}  # whose outcome is not known yet
        # From the handshake on, unless somebody else maintains the root.
        self._capacity: Capacity | None = None
        self._last_store_at = -math.inf  # when a store job last took a chunk
        self._stored_by: dict[ChunkId, set[int]] = {}  # ranks that have published their part
        self._excluded_requests: set[str] = set()
        self._stopped = False  # for good: see doubt_weights and turn_off
        self._media: dict[str, MediaKeys] = {}  # by request, of those with images, sound or video
        # vLLM asks for the same chunks in every step a request waits: what each was told is counted once.
        self._told: dict[str, set[tuple[ChunkId, Status]]] = {}
        self._limit: Callable[[str], LoadLimit] = lambda _req_id: NO_LIMIT
        self._watch = Watch(config, self._breaker, self._presence, engine_rank)

    # --- start-up and news from the workers -------------------------------------------------

    def set_workers(self, workers: Sequence[FskvHandshake]) -> None:
        """Take the workers' handshake; raises ConfigError when they do not agree with each other."""
        if not workers:
            raise ConfigError(
                "no worker reported a namespace: this vLLM does not hand over the handshake"
            )
        first = workers[0]
        for worker in workers:
            if (worker.namespace_digest, worker.blocks_per_chunk) != (
                first.namespace_digest,
                self._blocks_per_chunk,
            ):
                raise ConfigError(
                    f"rank {worker.rank} derived namespace {worker.namespace_path} with "
                    f"{worker.blocks_per_chunk} blocks per chunk, rank {first.rank} "
                    f"{first.namespace_path} and the scheduler {self._blocks_per_chunk}: all must agree"
                )
        if len(workers) != first.world_size:
            raise ConfigError(f"{len(workers)} of {first.world_size} workers reported a namespace")
        self._workers = sorted(workers, key=lambda w: w.rank)
        self._watch.namespace = os.path.relpath(first.namespace_path, self._config.root)
        if self._config.maintenance == "on":
            self._start_capacity(first)

    def _start_capacity(self, worker: FskvHandshake) -> None:
        config = self._config
        self._capacity = Capacity(
            config.root,
            os.path.relpath(worker.namespace_path, config.root),
            config.tenant,
            Limits(
                config.max_bytes,
                config.keep_free,
                config.namespace_max_bytes,
                config.tenant_max_bytes,
            ),
            dir_mode=worker.dir_mode,
            file_mode=worker.file_mode,
            at_hand=self._chunks_per_step
            * sum(sum(each.file_nbytes.values()) for each in self._files.values()),
            touch_interval_s=config.touch_interval_s,
        )
        self._watch.capacity = self._capacity
        self._capacity.start()
        self._capacity.wait_for_first_word()
        logger.info(
            "fskv: bounds of %s: max_bytes %s, keep_free %s, namespace_max_bytes %s, tenant_max_bytes %s; "
            "the smallest of all engines that share it holds for all; process %s maintains for this one",
            config.root,
            config.max_bytes,
            config.keep_free,
            config.namespace_max_bytes,
            config.tenant_max_bytes,
            self._capacity.pid,
        )

    def limit_loads(self, limit: Callable[[str], LoadLimit]) -> None:
        """From now on this says how long a request's load may take."""
        self._limit = limit

    def turn_off(self, reason: str) -> None:
        """Neither load nor store, from now on and for good: where vLLM itself does not reuse KV."""
        self._stopped = True
        self._watch.off = reason
        self._states.say("prefix_caching_off", logging.WARNING, reason=reason)

    def doubt_weights(self, what: str) -> None:
        """Neither load nor store from now on, unless the user vouches for the weights.

        The namespace names the weights of the start.
        """
        if not self._config.weights_fixed and not self._stopped:
            self._stopped = self._watch.in_doubt = True
            reason = (
                f"{what}; fskv neither loads nor stores until the engine is started again (option "
                "'weights_fixed': found false, expected true where weights never change in a running engine)"
            )
            self._states.say("weights_in_doubt", logging.WARNING, reason=reason)

    def take_media(self, req_id: str, media: MediaKeys) -> None:
        """The keys of this request's chunks are to hold what its media are."""
        self._media[req_id] = media

    def doubt_media(self, name: str) -> None:
        """Exclude the requests with media of this name: vLLM may have computed them from another content."""
        for req_id, media in self._media.items():
            if name in media.names:
                self.exclude_request(req_id)

    def exclude_request(self, req_id: str) -> None:
        """Neither load nor store this request's KV: an adapter under "off", media that cannot be told."""
        self._excluded_requests.add(req_id)

    def on_stored(self, chunk: ChunkId, ranks: Collection[int]) -> None:
        """These ranks have made their part of the chunk visible."""
        published = self._stored_by.setdefault(chunk, set())
        published.update(ranks)
        if len(published) == len(self._workers):
            store = self._storing.get(chunk)
            self._end_store(chunk)
            del self._stored_by[chunk]
            there = self._presence.mark_stored(chunk, store.began if store else 0)
            if there and self._events and not self._stopped and not is_media_key(chunk.key_hash):
                self._events.stored(chunk)

    def on_removed(self, names: Iterable[tuple[bytes, int]]) -> None:
        """Files of these chunks were removed; a name is (XXH3-128 of the key in 16 bytes, group index)."""
        names = list(names)
        self._presence.mark_removed(names)
        if self._events:
            self._events.removed_names(names)

    def on_not_stored(self, chunk: ChunkId) -> None:
        self._end_store(chunk)

    def on_written(self, nbytes: int, *, no_space: bool) -> None:
        """So much more is on disk; `no_space`: some store found the disk full."""
        if self._capacity is not None:
            self._capacity.settle(0, nbytes)
            if no_space:
                self._capacity.no_space()

    def on_loads_failed(self, failures: Mapping[ChunkId, Status]) -> None:
        self._watch.note(failures.values())
        for chunk, status in failures.items():
            if status is Status.BREAKER:  # not read, so nothing is known against the chunk
                self._breaker.trip()
            else:
                self._presence.mark_failed(chunk, status)
                if self._events and status in _GONE:
                    self._events.removed(chunk)
        # Chunks of one job fail together: that is one sign about the root and not many.
        for status in set(failures.values()):
            self._breaker.record(status)

    # --- OffloadingManager ------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._excluded_requests.discard(req_context.req_id)
        self._told.pop(req_context.req_id, None)
        self._media.pop(req_context.req_id, None)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        if not self._serves(req_context):
            return LookupResult.MISS
        chunk = self._chunk(key, req_context)
        presence, reason = self._presence.lookup(chunk)
        if presence is not Presence.UNKNOWN:
            told = self._told.setdefault(req_context.req_id, set())
            if (chunk, reason) not in told:
                told.add((chunk, reason))
                if presence is Presence.HIT:
                    self._counters.add(metrics.LOOKUP_HITS)
                    # Stored by another engine, or before this one's start.
                    if self._events and not is_media_key(chunk.key_hash):
                        self._events.stored(chunk)
                else:
                    self._counters.add(metrics.LOOKUP_MISSES, 1, reason.value)
        return _RESULTS[presence]

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource  # since 0.32, which asks for it

        return CacheHitSource.DISK

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> ChunkKeys:
        chunks = [self._chunk(key, req_context) for key in keys]
        return ChunkKeys(chunks, self._limit(req_context.req_id))

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput:
        to_store: dict[OffloadKey, ChunkId] = {}
        if self._config.store and self._serves(req_context):
            if self._breaker.open:
                self._counters.add(metrics.STORES_SKIPPED, len(keys), Status.BREAKER.value)
            else:
                chunks = {key: self._chunk(key, req_context) for key in keys}
                to_store = {k: chunk for k, chunk in chunks.items() if self._take_for_store(chunk)}
        return PrepareStoreOutput(
            keys_to_store=list(to_store),
            store_spec=ChunkKeys(list(to_store.values())),
            evicted_keys=[],
        )

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._presence.flush()
        if self._capacity is not None:
            removed = self._capacity.poll()
            if removed:
                self.on_removed(removed)
        if len(self._storing) > _MAX_STORING:
            now = time.monotonic()
            for chunk in [chunk for chunk, store in self._storing.items() if store.until <= now]:
                self._end_store(chunk)
        if len(self._stored_by) > _MAX_STORING:  # parts of ranks whose peers failed
            self._stored_by.clear()

    def reset_cache(self) -> None:
        """Forget what is known to be on disk; the files stay.

        vLLM calls this after a weight update.
        """
        self.doubt_weights(
            "the engine reset its connector's cache, which vLLM does when weights change"
        )
        self._presence.forget_all()
        for chunk in list(self._storing):
            self._end_store(chunk)
        self._stored_by.clear()

    def forget_announced(self) -> None:
        """Before a reset: take back all that was announced. What is found again is announced again."""
        if self._events:
            self._events.removed_all()

    def take_events(self) -> Iterable[OffloadingEvent]:
        return self._events.take() if self._events else ()

    def trim_event_payloads(self, payloads: MutableMapping[OffloadKey, object]) -> None:
        """Drop what vLLM remembers of chunks that no event will name any more."""
        if self._events:
            self._events.trim(payloads, self._storing.keys())

    def has_pending_work(self) -> bool:
        """Keep an idle engine stepping until it can publish how its last stores ended, but not for long."""
        waits = self._events is not None and bool(self._storing)
        return waits and time.monotonic() < self._last_store_at + _EVENTS_LINGER_S

    def get_stats(self) -> OffloadingConnectorStats | None:
        return self._watch.stats(self._counters)

    def shutdown(self) -> None:
        self._watch.close()
        self._presence.close()
        if self._capacity is not None:
            self._capacity.close()

    def _chunk(self, key: OffloadKey, req_context: ReqContext) -> ChunkId:
        media = self._media.get(req_context.req_id)
        if media is None:
            return to_chunk(key)
        position = getattr(req_context, "get_offload_key_position", None)  # since 0.31
        end = position(key) if position is not None else None
        return ChunkId(media.key(get_offload_block_hash(key), end), get_offload_group_idx(key))

    def _serves(self, req_context: ReqContext) -> bool:
        known = bool(self._workers) and not self._stopped
        return known and req_context.req_id not in self._excluded_requests

    def _take_for_store(self, chunk: ChunkId) -> bool:
        now = time.monotonic()
        if self._presence.known_present(chunk) or self._is_storing(chunk, now):
            return False
        self._end_store(chunk)  # one whose outcome never came
        if self._capacity is not None and not self._capacity.take(self._nbytes(chunk)):
            reason = "no_space" if self._capacity.paused else "capacity"
            self._counters.add(metrics.STORES_SKIPPED, 1, reason)
            return False
        # Twice the longest deadline: by then a worker has reported, or it is gone.
        until = now + 2 * self._config.deadline_max_s
        self._storing[chunk] = _Store(until, self._presence.num_removals)
        self._last_store_at = now
        return True

    def _is_storing(self, chunk: ChunkId, now: float) -> bool:
        store = self._storing.get(chunk)
        return store is not None and store.until > now

    def _end_store(self, chunk: ChunkId) -> None:
        """Give back what was taken for a store: what of it is on disk now was reported by the workers."""
        if self._storing.pop(chunk, None) is not None and self._capacity is not None:
            self._capacity.settle(self._nbytes(chunk), 0)

    @property
    def _files(self) -> dict[int | None, FskvHandshake]:
        """The files of a chunk, by the rank in their names, each with a worker that has it."""
        return {rank: worker for worker in self._workers for rank in worker.file_ranks}

    @property
    def rank_sizes(self) -> dict[int, int]:
        """What a rank reads for a chunk, by group index; empty before the handshake."""
        if not self._workers:
            return {}
        first = self._workers[0]
        return {idx: n * len(first.file_ranks) for idx, n in first.file_nbytes.items()}

    def _nbytes(self, chunk: ChunkId) -> int:
        """Return what a chunk takes on disk, all its files together."""
        return sum(worker.file_nbytes[chunk.group_idx] for worker in self._files.values())

    def _probe(self, chunks: Sequence[Key], missed_before: bytes) -> Findings:
        """On a probe thread. Every rank's file must be there with its right size.

        Raises OSError where the root itself is gone, or not mounted: then that nothing is found says nothing.
        """
        ranks = [
            RankFiles(worker.namespace_path, file_rank, worker.file_nbytes)
            for file_rank, worker in self._files.items()
        ]
        findings = probe_chunks(ranks, chunks, missed_before)
        if not any(findings.there):
            os.stat(f"{self._config.root}/{FORMAT_FILE}")
        return findings


def load_failures(outcomes: Iterable[tuple[ChunkId, Status]]) -> dict[ChunkId, Status]:
    """Return the chunks that cannot be trusted any more; SKIPPED ones only fell with their request."""
    return {chunk: s for chunk, s in outcomes if not s.good and s is not Status.SKIPPED}
