"""The scheduler's side of the vLLM adapter: fskv.offload.Lookup in the words of vLLM's offloading manager.

Runs on the scheduler's thread, under vLLM's lock. Until the workers' handshake has told the namespace,
everything is a miss.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from fskv.bounds.admission import Admission, name_of
from fskv.config import StoreConfig
from fskv.data_path.worker_keys import engine_keys
from fskv.engines.vllm.events import KvEvents, to_chunk
from fskv.engines.vllm.metrics import to_stats
from fskv.errors import ConfigError, FskvError
from fskv.index.presence import RankFiles
from fskv.namespace import diff, explain
from fskv.observe import metrics
from fskv.observe.state_log import StateLog
from fskv.offload.lookup import Lookup
from fskv.offload.mover import News
from fskv.offload.uses import Begun, Uses
from fskv.offload.watch import Watch
from fskv.root.key_file import hidden
from fskv.root.prefill_rate import write_prefill_rate
from fskv.root.root import NamespaceDir, read_manifest
from fskv.types import ChunkId, Presence, Status

logger = logging.getLogger(__name__)

# In a request's `kv_transfer_params`, with true: its chunks are stored without a question.
STORE_ALL = "fskv_store_all"

PREFIX_CACHING_OFF = (
    "prefix caching is off in this engine, where vLLM does so because KV must not be used again, or by "
    "--no-enable-prefix-caching"
)

# An engine that is paused or put to sleep waits until it is idle; a hung mount must not hold that up.
_EVENTS_LINGER_S = 2.0
_MOST_APART = 3  # differences of two ranks that are named
_RATE_S = 60.0  # between two writes of the prefill rate,
_RATE_OFF = 1.1  # which has changed by this factor

_RESULTS = {
    Presence.HIT: LookupResult.HIT,
    Presence.MISS: LookupResult.MISS,
    Presence.UNKNOWN: LookupResult.RETRY,
}


@dataclass
class ChunkKeys(LoadStoreSpec):
    """Names the chunks of a job, in the order of vLLM's keys; pickled to every worker."""

    chunks: Sequence[ChunkId]
    allowed_s: float = math.inf  # for a load, beside its deadline
    use: int | None = None  # of their prefix, by number; see fskv.offload.uses
    depths: Sequence[int] = ()  # in it, for each chunk


@dataclass
class _Prefix:
    """A request's chunks: of each group its tokens a chunk and vLLM's own list of keys, which grows."""

    groups: Sequence[tuple[int, Sequence[OffloadKey]]]
    use: Begun | None = None
    num_used: int = 0  # chunks of the group with the smallest ones, that the admission was told of

    def depth(self, end: int) -> int:
        """Return the depth in the prefix of a chunk that ends with the `end`-th token."""
        return (end - 1) // min(size for size, _ in self.groups)


@dataclass
class FskvHandshake:
    """The facts that a worker tells the scheduler at start-up; pickled."""

    rank: int
    world_size: int
    blocks_per_chunk: int
    directory: NamespaceDir
    file_nbytes: dict[int, int]  # by group index
    file_ranks: tuple[int | None, ...] = (None,)  # in the names of its files of a chunk
    prefix_caching: bool = True  # whether the worker's layers allow KV to be used again
    is_local: bool | None = None  # whether the root is on disks of this machine; None: not known
    prefill_per_s: float | None = None  # tokens, as an engine has left it in the namespace
    rests: str | None = None  # why the worker neither stores nor loads; nothing else counts then

    @classmethod
    def resting(cls, rank: int, world_size: int, root: str, reason: str) -> FskvHandshake:
        """Return the facts of a worker that does not know its KV; its namespace's path is the root's."""
        return cls(rank, world_size, 0, NamespaceDir(root, b"", 0, 0), {}, rests=reason)


def _apart(first: FskvHandshake, other: FskvHandshake) -> str:
    """Name the differences of the ranks, as far as their manifests show them."""
    try:
        sides = read_manifest(first.directory.path), read_manifest(other.directory.path)
    except (FskvError, OSError, ValueError):
        return ""
    ranks = f"rank {first.rank}", f"rank {other.rank}"
    return "".join(f"; {line}" for line in explain(diff(*sides), *ranks)[:_MOST_APART])


class FskvManager(OffloadingManager):
    """vLLM's offloading manager over a Lookup: presence, stores, and the requests that may use them."""

    def __init__(
        self,
        config: StoreConfig,
        blocks_per_chunk: int,
        events: KvEvents | None = None,
        *,
        chunks_per_step: int = 1,
        engine_rank: int = 0,
        loads: bool = True,
    ) -> None:
        """`events` is None where the engine publishes no KV events. Without `loads` nothing is looked up.

        `chunks_per_step` is how many chunks of a group one step can fill: so many must find room at once.
        """
        self._chunks_per_step = chunks_per_step
        self._loads = loads
        self.config = config
        self.events = events
        self._keys = engine_keys(config)
        if events is not None:
            events.keys = self._keys
        self.blocks_per_chunk = blocks_per_chunk
        self.workers: list[FskvHandshake] = []
        # By request, how long its load may take: the connector's LoadBudget says so.
        self.allowed_s: Callable[[str], float] = lambda _req_id: math.inf
        self.chunks = Lookup(config, events=events, admission=Admission(config.admission))
        self._uses = Uses[OffloadKey](
            lambda: self.chunks.touch_interval_s,
            lambda key: self.chunks.is_storing(self.chunk_of(key)),
        )
        self._prefixes: dict[str, _Prefix] = {}  # of requests that were admitted
        self._touches: list[ChunkKeys] = []
        self._states = StateLog(root=config.root)
        # By request, where not all of it may be moved: now, and after an update of the weights.
        self._limits: dict[str, tuple[float, float]] = {}
        # vLLM asks for the same chunks in every step a request waits: what each was told is counted once.
        self._told: dict[str, set[tuple[ChunkId, Status]]] = {}
        self._watch = Watch(config, self.chunks, engine_rank)
        self.locality: Locality | None = None  # of the root, as routers and requests name it
        self.past_prefill_per_s: float | None = None  # of an engine before this one
        self._rate_left: float | None = None
        self._leaver: threading.Thread | None = None
        self._leave_rate_at = -math.inf
        self._waits_until: float | None = None  # for the weights, since the first question

    def chunk_of(self, key: OffloadKey) -> ChunkId:
        """Return the chunk of a key of vLLM's, as the root knows it."""
        chunk = hidden(self._keys, to_chunk(key))
        if self.events is not None and self._keys is not None:
            self.events.asked(chunk, key)
        return chunk

    # --- start-up and news from the workers -------------------------------------------------

    def set_workers(self, workers: Sequence[FskvHandshake]) -> None:
        """Take the workers' handshake; raises ConfigError when they do not agree with each other."""
        files = self._files_of(workers)
        first = self.workers[0]
        if self.locality is None and first.is_local is not None:
            self.locality = Locality.LOCAL if first.is_local else Locality.REMOTE
        self._watch.namespace = os.path.relpath(first.directory.path, self.config.root)
        self.past_prefill_per_s = first.prefill_per_s
        self.chunks.attach(
            files,
            num_movers=len(workers),
            dir_mode=first.directory.dir_mode,
            file_mode=first.directory.file_mode,
            chunks_per_step=self._chunks_per_step,
            health_file=self._watch.health_file,
        )
        if self.chunks.capacity is not None:
            config = self.config
            logger.info(
                "fskv: bounds of %s: max_bytes %s, keep_free %s, tenant_max_bytes %s; the smallest of all "
                "engines that share it holds for all; process %s maintains for this one",
                config.root,
                config.max_bytes,
                config.keep_free,
                config.tenant_max_bytes,
                self.chunks.capacity.pid or "(not up yet)",
            )

    def _files_of(self, workers: Sequence[FskvHandshake]) -> list[RankFiles]:
        """Return the files of a chunk; raises ConfigError when the workers do not agree with each other."""
        if not workers:
            raise ConfigError(
                "no worker reported a namespace of this root: fskv cannot ask the workers of this engine"
            )
        first = workers[0]
        for worker in workers:
            if (worker.directory.digest, worker.blocks_per_chunk) != (
                first.directory.digest,
                self.blocks_per_chunk,
            ):
                raise ConfigError(
                    f"rank {worker.rank} derived namespace {worker.directory.path} with "
                    f"{worker.blocks_per_chunk} blocks per chunk, rank {first.rank} "
                    f"{first.directory.path} and the scheduler {self.blocks_per_chunk}: all must agree "
                    "(with pipeline stages of different lengths option 'hybrid_chunk_size' needs a number)"
                    f"{_apart(first, worker)}"
                )
        own = self._keys.encryption if self._keys is not None else None
        if own != first.directory.encryption:
            raise ConfigError(
                "option 'key_file': the scheduler found another key of names than the workers"
            )
        if len(workers) != first.world_size:
            raise ConfigError(f"{len(workers)} of {first.world_size} workers reported a namespace")
        self.workers = sorted(workers, key=lambda w: w.rank)
        files = {
            rank: RankFiles(worker.directory.path, rank, worker.file_nbytes)
            for worker in self.workers
            for rank in worker.file_ranks
        }
        return list(files.values())

    def turn_off(self, reason: str, *, unknown: bool = False) -> None:
        """Neither load nor store, for good: vLLM does not reuse KV, or it is `unknown` how KV lies."""
        reason = f"{reason}: fskv neither loads nor stores"
        self.chunks.stopped = True
        self._watch.off = "kv_unknown" if unknown else "prefix_caching_off", reason
        self._states.say(
            "kv_unknown" if unknown else "prefix_caching_off", logging.WARNING, reason=reason
        )

    def leave_prefill_rate(self, per_s: float) -> None:
        """Leave the measured rate to later engines, once a minute at most, on a thread of its own."""
        now, left = time.monotonic(), self._rate_left
        is_new = left is None or not left / _RATE_OFF < per_s < left * _RATE_OFF
        if not is_new or now < self._leave_rate_at or not self._is_on or not self.config.store:
            return
        self._leave_rate_at = now + _RATE_S
        if self._leaver is not None and self._leaver.is_alive():
            return  # the mount hangs
        directory = self.workers[0].directory

        def leave() -> None:
            with suppress(OSError):
                write_prefill_rate(directory, per_s)
                self._rate_left = per_s

        self._leaver = threading.Thread(target=leave, name="fskv-rate", daemon=True)
        with suppress(RuntimeError):  # no thread can be had
            self._leaver.start()

    def rest(self, reason: str) -> None:
        """Neither load nor store as long as there is a reason to do with the weights; "" ends it."""
        if reason != self._watch.resting:
            if not self._watch.resting:
                self._waits_until = None
            self._watch.resting = reason
            self.chunks.stopped = bool(reason) or self._watch.off is not None
            if reason:
                self._states.say("weights_in_doubt", reason=reason)

    def move(self, directory: NamespaceDir, epoch: int) -> None:
        """Use the namespace of new weights, which all workers have opened."""
        self._watch.epoch = epoch
        self.chunks.move(
            self._files_of([replace(one, directory=directory) for one in self.workers])
        )
        self._told.clear()
        if self.events is not None:
            self.events.remove_all()
        path = os.path.relpath(directory.path, self.config.root)
        self._states.say("weights_changed", epoch=epoch, namespace=path)

    def limit_request(self, req_id: str, num_tokens: float = 0, after_update: float = 0) -> None:
        """Load and store no more than a request's first tokens: the keys behind them may be false.

        `after_update` of them once the weights were updated.
        """
        self._limits[req_id] = num_tokens, after_update

    def _most_tokens(self, req_id: str) -> float:
        return self._limits.get(req_id, (math.inf, math.inf))[self._watch.epoch > 0]

    def on_news(self, news: News) -> None:
        """Apply the news that the workers sent."""
        self._watch.note(news)
        self.chunks.on_news(news)

    # --- OffloadingManager ------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._limits.pop(req_context.req_id, None)
        self._told.pop(req_context.req_id, None)
        self._prefixes.pop(req_context.req_id, None)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        # A client may say which tiers its request may load from (`kv_load_tiers`).
        allowed = req_context.load_tier_filter.allows(Medium.STORAGE, self.locality)
        if not allowed or not self._loads or not self._is_within(key, req_context):
            return LookupResult.MISS
        if not self._is_on:
            return LookupResult.RETRY if self._waits_for_weights() else LookupResult.MISS
        chunk = self.chunk_of(key)
        presence, reason = self.chunks.ask(chunk)
        if presence is not Presence.UNKNOWN:
            told = self._told.setdefault(req_context.req_id, set())
            if (chunk, reason) not in told:
                told.add((chunk, reason))
                if presence is Presence.HIT:
                    self.chunks.counters.add(metrics.LOOKUP_HITS)
                    if self.events:  # stored by another engine, or before this one's start
                        self.events.stored(chunk)
                else:
                    self.chunks.counters.add(metrics.LOOKUP_MISSES, 1, reason.value)
        return _RESULTS[presence]

    def _waits_for_weights(self) -> bool:
        """Return whether to ask again: the namespace of new weights is there in a moment, most often."""
        if not self._watch.resting or self._watch.off is not None:
            return False
        if self._waits_until is None:
            self._waits_until = time.monotonic() + self.config.lookup_timeout_s
        return time.monotonic() < self._waits_until

    def was_asked(self, req_id: str) -> bool:
        """Return whether a lookup for this request was answered from knowledge of files."""
        return req_id in self._told

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        return CacheHitSource.DISK

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> ChunkKeys:
        self._begin_due_use(keys, req_context)
        chunks = [self.chunk_of(key) for key in keys]
        return self._used(chunks, keys, req_context, self.allowed_s(req_context.req_id))

    def prepare_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext
    ) -> PrepareStoreOutput:
        to_store: dict[OffloadKey, ChunkId] = {}
        if chunks := {self.chunk_of(key): key for key in keys if self._serves(key, req_context)}:
            self._begin_due_use(chunks.values(), req_context)  # before anything of it is on its way
            viewer = None if self._stores_all_of(req_context) else req_context.req_id
            to_store = {chunks[chunk]: chunk for chunk in self.chunks.begin_store(chunks, viewer)}
        return PrepareStoreOutput(
            keys_to_store=list(to_store),
            store_spec=self._used(list(to_store.values()), to_store, req_context),
            evicted_keys=[],
        )

    def admit(
        self, req_id: str, groups: Sequence[tuple[int, Sequence[OffloadKey]]], num_tokens: int
    ) -> None:
        """A request is admitted, and uses its first `num_tokens`: they are on disk, or in vLLM's own cache.

        `groups`: see _Prefix. Only the first call for a request counts.
        """
        most = self._most_tokens(req_id)
        if self._is_on and most and req_id not in self._prefixes:
            prefix = self._prefixes[req_id] = _Prefix(groups)
            self._begin_use(prefix, int(min(num_tokens, most)))
            self._note_use(req_id, prefix, most)

    def _stores_all_of(self, req_context: ReqContext) -> bool:
        """Return whether all chunks of a request are stored unasked, because other requests wait for them."""
        asked = (req_context.kv_transfer_params or {}).get(STORE_ALL)
        return not self._loads or asked is True

    def _note_use(self, req_id: str, prefix: _Prefix, num_tokens: float) -> None:
        """Tell the admission which chunks a request uses: all of its prompt's, and then each new one."""
        size, keys = min(prefix.groups, key=lambda group: group[0])
        end = int(min(len(keys), num_tokens // size))
        if end > prefix.num_used:
            new = keys[prefix.num_used : end]
            prefix.num_used = end
            names = [name_of(self.chunk_of(key).key_hash) for key in new]
            self.chunks.admission.use(names, req_id)

    def _begin_use(self, prefix: _Prefix, num_tokens: int) -> None:
        size, keys = prefix.groups[0]
        if not keys:
            return
        num_there = min(num_tokens // size, len(keys))
        prefix.use, start = self._uses.begin(keys, num_there)
        if start == num_there:
            return
        due = [
            (self.chunk_of(key), prefix.depth((n + 1) * of_group))
            for of_group, keys in prefix.groups
            for n, key in enumerate(keys[: num_tokens // of_group])
            if n >= start * size // of_group
        ]
        chunks, depths = zip(*due, strict=True)
        self._touches.append(ChunkKeys(chunks, use=prefix.use.number, depths=depths))

    def _begin_due_use(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Begin a use of a request's prefix where it has none, or one that is old."""
        prefix = self._prefixes.get(req_context.req_id)
        if prefix is None or not keys:
            return
        if prefix.use is None or self._uses.is_old(prefix.use):
            first = min(req_context.get_offload_key_position(key) or 1 for key in keys)
            self._begin_use(prefix, first - 1)
        last = max(req_context.get_offload_key_position(key) or 0 for key in keys)
        self._note_use(req_context.req_id, prefix, last)

    def begin_use(self, keys: Sequence[OffloadKey], *, there: bool) -> int:
        """Begin a use of chunks that move together, and return its number; `there`: the chunks are loaded.

        For the tier: vLLM does not tell it of requests that are admitted.
        """
        return self._uses.begin(keys, there * len(keys))[0].number if keys else 0

    def take_touches(self) -> list[ChunkKeys]:
        """Return the chunks that requests used without a load since the last call."""
        taken, self._touches = self._touches, []
        return taken

    def _used(
        self,
        chunks: list[ChunkId],
        keys: Collection[OffloadKey],
        req_context: ReqContext,
        allowed_s: float = math.inf,
    ) -> ChunkKeys:
        """Return the `ChunkKeys` of a job's chunks, with the number of the prefix's use."""
        prefix = self._prefixes.get(req_context.req_id)
        if prefix is None or not keys:
            return ChunkKeys(chunks, allowed_s)
        ends = [req_context.get_offload_key_position(key) or 1 for key in keys]
        number = None if prefix.use is None else prefix.use.number
        return ChunkKeys(chunks, allowed_s, number, [prefix.depth(end) for end in ends])

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self.chunks.end_step()

    def reset_cache(self) -> None:
        """Forget the index of files; the files stay."""
        self.chunks.forget()
        if self.events is not None:
            self.events.forget()

    def take_events(self) -> Iterable[OffloadingEvent]:
        for event in self.events.take() if self.events else ():
            yield replace(event, locality=self.locality)

    def has_pending_work(self) -> bool:
        """Keep an idle engine stepping until it can tell how its last stores ended, but not for long."""
        is_told = self.events is not None or self.config.health_file is not None
        waits = is_told and bool(self.chunks.storing)
        return waits and time.monotonic() < self.chunks.last_store_at + _EVENTS_LINGER_S

    def get_stats(self) -> OffloadingConnectorStats | None:
        return to_stats(*self._watch.read())

    def shutdown(self) -> None:
        self._watch.close()
        self.chunks.close()

    @property
    def _is_on(self) -> bool:
        return self.chunks.attached and not self.chunks.stopped

    def _serves(self, key: OffloadKey, req_context: ReqContext) -> bool:
        """Return whether a chunk may be loaded and stored for a request."""
        return self._is_on and self._is_within(key, req_context)

    def _is_within(self, key: OffloadKey, req_context: ReqContext) -> bool:
        """Return whether a chunk is within its request's limit, if there is one."""
        most = self._most_tokens(req_context.req_id)
        end = None if most == math.inf else req_context.get_offload_key_position(key)
        return most == math.inf or (end is not None and end <= most)
