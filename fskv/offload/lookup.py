"""Answers which chunks are on disk and which may be stored: presence, bounds and breaker of one engine.

Only the engine's scheduler thread calls, and no call touches a disk. Before `attach` everything is a miss and
nothing is stored.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from fskv.bounds.admission import Admission, name_of
from fskv.bounds.client import Capacity
from fskv.bounds.limits import Limits, RootState
from fskv.config import StoreConfig
from fskv.data_path.breaker import Breaker
from fskv.index.presence import Findings, Key, PresenceIndex, RankFiles, probe_chunks
from fskv.observe import metrics
from fskv.observe.metrics import Counters
from fskv.observe.state_log import StateLog
from fskv.root.root import FORMAT_FILE
from fskv.types import MAX_TOUCH_INTERVAL_S, ChunkId, Presence, Status

if TYPE_CHECKING:
    from fskv.offload.mover import News

_MAX_STORING = 65536
_SMALL_STEPS = 4  # a bound of less is told of at the start
_ENOUGH_STORES = 256  # to know what the chunks that end at one token take together
_ASSUMED_TOKENS_PER_S = 20_000.0  # of a prefill that nobody has measured: little is waited for

# A load that ends like this leaves no file to load, or one that nobody will read again.
_GONE = (Status.MISSING, Status.STALE, Status.CORRUPT, Status.NO_KEY)


class ChunkEvents(Protocol):
    """A listener to chunks that become visible, and to those that go."""

    def stored(self, chunk: ChunkId) -> None: ...
    def removed(self, chunk: ChunkId) -> None: ...
    def removed_names(self, names: Iterable[tuple[bytes, int]]) -> None: ...


class _Store(NamedTuple):
    """A chunk on its way to the disk: when to stop believing in it, and `num_removals` when it began."""

    until: float
    began: int


def patience(
    tokens_per_chunk: Iterable[int], tokens_per_s: Callable[[], float | None] = lambda: None
) -> Callable[[int], float]:
    """Return the function that estimates the seconds of prefill for so many chunks of all groups together.

    `tokens_per_chunk` has a number for each group. `tokens_per_s` gives the rate; None: not measured.
    """
    chunks_per_token = sum(1 / tokens for tokens in tokens_per_chunk)
    return lambda num: num / chunks_per_token / (tokens_per_s() or _ASSUMED_TOKENS_PER_S)


class Lookup:
    """Answers the scheduler's side of an engine: is a chunk there, may it be stored. One thread."""

    def __init__(
        self,
        config: StoreConfig,
        *,
        events: ChunkEvents | None = None,
        admission: Admission | None = None,
        recompute_s: Callable[[int], float] = lambda _num_chunks: 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`recompute_s` estimates the time to compute so many chunks: a lookup waits for a slow mount that
        long.

        `clock` is what the answers of the presence index age by. Both in seconds. `admission` decides about
        stores that have a viewer; without it all are stored.
        """
        self._config = config
        self._events = events
        self.admission = admission or Admission("all")
        self._state: RootState | None = None  # by which the admission goes
        self._num_asked = self._num_found = 0  # lookups, since the start
        self._num_loaded = self._num_failed_loads = 0  # of news
        # `_counts` when the root's last two hours began.
        self._turns: deque[tuple[int, ...]] = deque([(0,) * 6], maxlen=2)
        self._log = StateLog(root=config.root, of="scheduler")
        self._begun: Counter[int] = Counter()  # stores, by group index
        self._begun_nbytes = 0
        self.counters = Counters(*metrics.SCHEDULER_COUNTERS)
        self.breaker = Breaker(log=self._log)
        self.presence = PresenceIndex(
            self._probe,
            lookup_timeout_s=config.lookup_timeout_s,
            breaker=self.breaker,
            recompute_s=recompute_s,
            clock=clock,
        )
        # From `attach` on, unless others maintain the root: who only loads writes nothing there.
        self.capacity: Capacity | None = None
        self.stopped = False  # nothing is found, nothing is stored
        # An engine that stores has made the root; one that only loads may be there before.
        self._has_root = config.store
        self._files: Sequence[RankFiles] = ()
        self._chunk_nbytes: dict[int, int] = {}  # on disk, all files together, by group index
        self._num_movers = 0
        self._storing: dict[ChunkId, _Store] = {}  # whose outcome is not known yet
        self._last_store_at = -math.inf  # when a store was last begun
        self._refused: tuple[float, float] | None = (
            None  # for want of room: the first time, the last
        )
        self._stored_by: dict[ChunkId, set[int]] = {}  # movers that have published their part

    # --- start-up ---------------------------------------------------------------------------

    def attach(
        self,
        files: Sequence[RankFiles],
        *,
        num_movers: int = 1,
        dir_mode: int | None = None,
        file_mode: int | None = None,
        chunks_per_step: int = 1,
        quiet: bool = False,
        health_file: str | None = None,
    ) -> None:
        """The namespace is open: a chunk is there when all of these files are.

        A chunk is stored when `num_movers` movers have told so. `chunks_per_step` is how many chunks of a
        group one step can fill. `quiet`, `health_file`: see Capacity.
        """
        self._files = list(files)
        self._chunk_nbytes = {
            group: sum(each.file_nbytes[group] for each in files) for group in files[0].file_nbytes
        }
        self._num_movers = num_movers
        config = self._config
        if config.maintenance != "on" or not config.store:
            return
        step_nbytes = chunks_per_step * sum(self._chunk_nbytes.values())
        if not quiet:
            self._say_small_bounds(step_nbytes)
        self.capacity = Capacity(
            config.root,
            os.path.relpath(files[0].namespace_path, config.root),
            config.tenant,
            Limits(config.max_bytes, config.keep_free, config.tenant_max_bytes),
            dir_mode=dir_mode,
            file_mode=file_mode,
            quiet=quiet,
            health_file=health_file,
        )
        self.capacity.start()

    def _say_small_bounds(self, step_nbytes: int) -> None:
        log = StateLog(root=self._config.root)
        for name in ("max_bytes", "tenant_max_bytes"):
            limit = getattr(self._config, name)
            if limit is not None and limit < _SMALL_STEPS * step_nbytes:
                log.say(
                    "bound_small",
                    logging.WARNING,
                    bound=name,
                    limit_bytes=limit,
                    step_bytes=step_nbytes,
                    reason=f"less than {_SMALL_STEPS} full steps of this engine: part of one is not stored",
                )

    def move(self, files: Sequence[RankFiles]) -> None:
        """Look into another namespace from now on, where files are as large as in the last one."""
        self.forget()
        self._files = list(files)
        if self.capacity is not None:
            path = os.path.relpath(files[0].namespace_path, self._config.root)
            self.capacity.move(path)

    @property
    def attached(self) -> bool:
        return bool(self._files)

    # --- what is there, and what may be stored ----------------------------------------------

    def ask(self, chunk: ChunkId) -> tuple[Presence, Status]:
        """Return the presence of a chunk, and for a MISS the reason.

        UNKNOWN is to be asked again after `end_step`; after `lookup_timeout_s` at the latest it is a HIT or
        a MISS, and after ten times that where the disk answers but slowly.
        """
        if self.stopped or not self._files:
            return Presence.MISS, Status.SKIPPED
        found = self.presence.lookup(chunk)
        self._num_asked += 1
        self._num_found += found[0] is Presence.HIT
        return found

    def begin_store(
        self, chunks: Iterable[ChunkId], viewer: Hashable | None = None
    ) -> list[ChunkId]:
        """Return those of the chunks that are to be stored now; each must come back in the movers' news.

        `viewer` is the request that has computed them, and whose chunks must be worth a write. None: all are.
        """
        if self.stopped or not self._files or not self._config.store:
            return []
        chunks = list(chunks)
        if self.breaker.open:
            self.counters.add(metrics.STORES_SKIPPED, len(chunks), Status.BREAKER.value)
            return []
        return [chunk for chunk in chunks if self._take_for_store(chunk, viewer)]

    def end_step(self) -> None:
        """Send the unknown keys to the disk, and take the news of the maintenance process."""
        self.presence.flush()
        if self.capacity is not None:
            if removed := self.capacity.poll():
                self.on_removed(removed)
            self._follow(self.capacity)
        # Not before there are so many: a store that waits behind a slow disk may still be written, and its
        # bytes must not be given to another one meanwhile.
        if len(self._storing) > _MAX_STORING:
            now = time.monotonic()
            for chunk in [chunk for chunk, store in self._storing.items() if store.until <= now]:
                self._end_store(chunk)
        if len(self._stored_by) > _MAX_STORING:  # parts of movers whose peers failed
            self._stored_by.clear()

    def _follow(self, capacity: Capacity, *, at_once: bool = False) -> None:
        """Have the admission go by the root's state, and tell others what was used and seen."""
        admission = self.admission
        used = admission.num_used * self._nbytes_together()
        for sights in capacity.report_use(
            used, admission.hits, admission.take_new, at_once=at_once
        ):
            admission.receive(sights)
        if capacity.state is not self._state:
            was_unread, last = self.unread, self._state
            self._state = state = capacity.state
            if last is not None and state.usage.last_hour != last.usage.last_hour:
                self._turns.append(self._counts)
            if (unread := self.unread) and not was_unread:
                self._log.say("written_unread", logging.WARNING, reason=unread)
            admission.first_sight = state.usage.first_sight
            room = state.room
            together = max(1, self._nbytes_together())
            admission.resize(None if room is None else room // together, state.share)

    @property
    def asks(self) -> bool:
        """Whether the engine has ever asked for a chunk; a kv_producer never does."""
        return self._num_asked > 0

    @property
    def _counts(self) -> tuple[int, ...]:
        """Lookups, those that found a chunk, news of loads, of failed ones; names seen again, and used."""
        return (
            *(self._num_asked, self._num_found, self._num_loaded, self._num_failed_loads),
            *(self.admission.num_seen_again, self.admission.num_used),
        )

    @property
    def unread(self) -> str:
        """Why what engines stored in the last hour is not loaded, in words; "": it is, or it was little."""
        state = self._state
        if state is None or not state.usage.is_unread:
            return ""
        recent = (now - then for now, then in zip(self._counts, self._turns[0], strict=True))
        asked, found, loaded, failed, again, used = recent
        if not self.asks:
            why = "this engine never asks for chunks (a kv_producer, or its engine's own cache has all)"
        elif failed > loaded:
            why = "loads fail or are given up: see load_failures"
        elif found > asked // 100:
            why = "chunks are found, and other engines do not load them"
        elif again > used // 10:
            why = "prompts come back after their chunks were pruned: more room would hold them"
        else:
            why = (
                "prompts part at their first chunk (a date, an id or a salt at the beginning?), or engines "
                "do not share: `fskv ls` shows other namespaces of this model, `fskv diff` says why"
            )
        return f"much was stored in the last hour, and less than 1 % was loaded: {why}"

    def _nbytes_together(self) -> int:
        """Return what the chunks that end at one token take on disk; windows and states have fewer."""
        if (most := max(self._begun.values(), default=0)) >= _ENOUGH_STORES:
            return self._begun_nbytes // most
        return sum(self._chunk_nbytes.values())

    def _take_for_store(self, chunk: ChunkId, viewer: Hashable | None) -> bool:
        now = time.monotonic()
        if self.presence.known_present(chunk) or self._is_storing(chunk, now):
            return False
        self._end_store(chunk)  # one whose outcome never came
        nbytes = self._nbytes(chunk)
        if viewer is not None:
            admitted = self.admission.admits(name_of(chunk.key_hash), viewer)
            self.counters.add(metrics.ADMITTED if admitted else metrics.NOT_ADMITTED)
            if not admitted:
                self.counters.add(metrics.NOT_ADMITTED_BYTES, nbytes)
                return False
        if self.capacity is not None and not self.capacity.take(nbytes):
            reason = "no_space" if self.capacity.paused else "capacity"
            self.counters.add(metrics.STORES_SKIPPED, 1, reason)
            self._refused = (self._refused[0] if self._refused else now, now)
            return False
        self._refused = None
        # Twice the longest deadline: by then a mover has reported, or it is gone.
        until = now + 2 * self._config.deadline.max_s
        self._storing[chunk] = _Store(until, self.presence.num_removals)
        self._last_store_at = now
        self._begun[chunk.group_idx] += 1
        self._begun_nbytes += nbytes
        return True

    def is_storing(self, chunk: ChunkId) -> bool:
        """Return whether a chunk is on its way to the disk."""
        return self._is_storing(chunk, time.monotonic())

    def _is_storing(self, chunk: ChunkId, now: float) -> bool:
        store = self._storing.get(chunk)
        return store is not None and store.until > now

    @property
    def touch_interval_s(self) -> float:
        """After so long a use is recorded anew: the leader of the root says it."""
        if self.capacity is None:
            return MAX_TOUCH_INTERVAL_S
        return self.capacity.state.usage.touch_interval_s

    @property
    def storing(self) -> Mapping[ChunkId, object]:
        """The chunks that were begun and whose outcome is not known."""
        return self._storing

    @property
    def last_store_at(self) -> float:
        """When a store was last begun, by time.monotonic."""
        return self._last_store_at

    @property
    def refused_s(self) -> float:
        """Between the first and the last store that found no room since one did; any thread."""
        refused = self._refused
        return refused[1] - refused[0] if refused else 0.0

    # --- news -------------------------------------------------------------------------------

    def on_news(self, news: News) -> None:
        """Take the news of one mover, or of several."""
        if self.capacity is not None:
            self.capacity.settle(0, news.written_nbytes, news.loaded_nbytes)
            if news.no_space:
                self.capacity.no_space()
        self._num_loaded += bool(news.loaded_nbytes)
        self._num_failed_loads += bool(news.failed_loads)
        for chunk, movers in news.stored.items():
            self._on_stored(chunk, movers)
        for chunk in news.not_stored:
            self._end_store(chunk)
        for chunk, status in news.failed_loads.items():
            if status is Status.BREAKER:  # not read, so nothing is known against the chunk
                self.breaker.trip()
            else:
                self.presence.mark_failed(chunk, status)
                if self._events and status in _GONE:
                    self._events.removed(chunk)
        # Chunks of one job fail together: that is one sign about the root and not many.
        for status in set(news.failed_loads.values()):
            self.breaker.record(status)

    def on_removed(self, names: Iterable[tuple[bytes, int]]) -> None:
        """Files of these chunks were removed; a name is (XXH3-128 of the key in 16 bytes, group index)."""
        names = list(names)
        self.presence.mark_removed(names)
        if self._events:
            self._events.removed_names(names)

    def _on_stored(self, chunk: ChunkId, movers: Iterable[int]) -> None:
        published = self._stored_by.setdefault(chunk, set())
        published.update(movers)
        if len(published) < self._num_movers:
            return
        store = self._storing.get(chunk)
        self._end_store(chunk)
        del self._stored_by[chunk]
        there = self.presence.mark_stored(chunk, store.began if store else 0)
        if there and self._events and not self.stopped:
            self._events.stored(chunk)

    def _end_store(self, chunk: ChunkId) -> None:
        """Give back the room that was taken for a store: the movers have reported the bytes on disk."""
        if self._storing.pop(chunk, None) is not None and self.capacity is not None:
            self.capacity.settle(self._nbytes(chunk), 0)

    # --- the rest ---------------------------------------------------------------------------

    def forget(self) -> None:
        """Forget the index and the chunks on their way; the files stay."""
        self.presence.forget_all()
        for chunk in list(self._storing):
            self._end_store(chunk)
        self._stored_by.clear()

    def close(self) -> None:
        self.presence.close()
        if self.capacity is not None:
            self._follow(self.capacity, at_once=True)
            self.capacity.close()

    def _nbytes(self, chunk: ChunkId) -> int:
        """Return the bytes of a chunk on disk, all its files together."""
        return self._chunk_nbytes[chunk.group_idx]

    def _probe(self, chunks: Sequence[Key], missed_before: bytes) -> Findings:
        """On a probe thread. Every file of a chunk must be there with its right size.

        Raises OSError where the root itself is gone, or not mounted: then that nothing is found says nothing.
        """
        findings = probe_chunks(self._files, chunks, missed_before)
        if not any(findings.there):
            path = f"{self._config.root}/{FORMAT_FILE}"
            self._has_root = self._has_root or os.path.exists(path)
            if self._has_root:
                os.stat(path)
        return findings
