"""Answers "is this chunk on disk?" from memory, and keeps that memory true enough.

`lookup` is called by the engine's scheduler for every chunk of every waiting request and never touches the
disk. An unknown key is UNKNOWN and is queued. `flush`, at the end of the step, hands the queued keys to the
probe threads in batches; a full batch does not wait for it. A later lookup finds the answer. An UNKNOWN that
lasts longer than `lookup_timeout_s` becomes a MISS: the request is recomputed instead of waiting for a hung
mount. An answer is a hint, never a proof: the load checks the file.

A mount may be slow and not hang: a new client of CephFS takes milliseconds for each of thousands of chunks.
While batches come back, at least one in `lookup_timeout_s`, an UNKNOWN lasts as long as a recompute of what
was asked would take, and ten times `lookup_timeout_s` at most.

A batch takes about _BATCH_S, by what a key took before: on a slow mount the first answers of a step do not
wait for its last, on a fast disk 512 keys cost the interpreter as much as 8. Answers of one batch are one
object in memory, shared by the keys.

`mark_removed` voids what was learnt before it: a HIT in memory, and the HIT of a probe that was started
before. Such a chunk is a MISS (absent) for one negative TTL and is then looked at again; a store or a probe
that begins later is believed. So no HIT outlives the news of its chunk's removal, and a chunk that somebody
stored anew before the news came costs a recompute. Beyond MAX_REMOVED names the oldest are forgotten: such a
HIT may last for the rest of its TTL, and the load finds out.

Threads: lookup, flush and mark_* on the scheduler's thread; probes on the pool's threads, which only
append to `_answers`. So `_entries` has one owner and needs no lock; a deque's append and popleft are atomic.
Memory: at most `max_known` entries, least recently asked first out: 254 bytes each with keys of 32 bytes, 348
for those that we stored or failed to load; 255 for each of at most MAX_REMOVED names (resident). With
the defaults that is at most 87 + 26 MB.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from fskv import namespace
from fskv.data_path.breaker import Breaker
from fskv.data_path.threads import HangProofPool
from fskv.native import _native
from fskv.types import ChunkId, Presence, Status

logger = logging.getLogger(__name__)

# A hit may be believed for long: news of removals void it, and the load finds out the rest.
POSITIVE_TTL_S = 60.0
# For a chunk that is not there: what another engine stores is soon seen, and a miss costs no look a step.
NEGATIVE_TTL_S = 2.0
# For a chunk that failed to load: its file stays bad unless it is stored again, which ends this at once.
QUARANTINE_S = 30.0
MAX_KNOWN_CHUNKS = 250_000
MAX_REMOVED = 100_000
_MAX_DROPPED = 1000  # removed names at the end of a step: 0.2 ms
_BATCH_S = 0.005
_MIN_BATCH, _FIRST_BATCH, _MAX_BATCH = 8, 64, 512
_PROBES_AT_ONCE, _MAX_HUNG_PROBES = 2, 4
_MOST_PATIENCE = 10.0  # times lookup_timeout_s
_MAX_QUARANTINED = 1000  # for the metric alone

Answer = tuple[Presence, Status]
# A ChunkId as a tuple and no subclass: the garbage collector lets go of those. With 250,000 chunks a full
# collection took 7 ms instead of 20, on the scheduler's thread.
Key = tuple[bytes, int]

_WAITING: Answer = (Presence.UNKNOWN, Status.OK)
_HIT: Answer = (Presence.HIT, Status.OK)
_ABSENT: Answer = (Presence.MISS, Status.MISSING)
_UNREADABLE: Answer = (Presence.MISS, Status.IO_ERROR)
_TIMED_OUT: Answer = (Presence.MISS, Status.TIMED_OUT)
_QUARANTINED: Answer = (Presence.MISS, Status.QUARANTINED)
_REFUSED: Answer = (Presence.MISS, Status.BREAKER)


class Findings(NamedTuple):
    """A probe's answers for its chunks, and the time that the disk took for all."""

    there: Sequence[int]
    seconds: float


@dataclass(frozen=True, slots=True)
class _Known:
    """An answer, shared by the chunks that got it together."""

    answer: Answer
    valid_until: float  # of _WAITING: when it becomes a MISS
    removals: int = 0  # of a HIT: how many mark_removed had been when it was true


_Probe = Callable[[], None]


def _call(task: _native.Transfer[_Probe], _: None) -> None:
    assert task.owner is not None, "it has not ended"
    task.owner()


@dataclass(slots=True)
class _Batch:
    chunks: list[Key]
    started_at: float
    removals: int  # mark_removed so far
    ran_at: float | None = None  # on a thread; None: it waits for one
    task: _native.Transfer[_Probe] | None = None
    done: bool = False


class _Removal(NamedTuple):
    number: int  # of mark_removed calls
    at: float


class PresenceIndex:
    """The known presence of a namespace's chunks, and the probes that find it out."""

    def __init__(
        self,
        probe: Callable[[Sequence[Key], bytes], Findings],
        *,
        lookup_timeout_s: float,
        breaker: Breaker,
        positive_ttl_s: float = POSITIVE_TTL_S,
        negative_ttl_s: float = NEGATIVE_TTL_S,
        quarantine_s: float = QUARANTINE_S,
        recompute_s: Callable[[int], float] = lambda _num_chunks: 0.0,
        max_known: int = MAX_KNOWN_CHUNKS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`probe(chunks, missed_before)` looks at the disk and may hang or raise OSError.

        `missed_before` has a byte for each chunk: 1 where the last look found nothing. `recompute_s`
        estimates what computing so many chunks takes, in seconds.
        """
        self._probe = probe
        # An answer must live until the request that waits for it has asked again.
        self._positive_ttl_s = max(positive_ttl_s, lookup_timeout_s)
        self._negative_ttl_s = max(negative_ttl_s, lookup_timeout_s)
        self._timeout_s = lookup_timeout_s
        self._longest_s = max(self._positive_ttl_s, (_MOST_PATIENCE + 1) * lookup_timeout_s)
        self.recompute_s = recompute_s
        self._num_asked = 0  # chunks, since nothing was waited for
        self._patience_s = 0.0  # beyond the timeout, for these
        self._answered_at = float("-inf")  # when the disk last did
        self._quarantine_s = quarantine_s
        self._breaker = breaker
        self._max_known = max_known
        self._clock = clock
        self._entries: OrderedDict[Key, _Known] = OrderedDict()
        self._waiting = _Known(_WAITING, float("-inf"))  # the last one; see _ask
        self._queued: dict[Key, bool] = {}  # -> missed before
        self._batches: list[_Batch] = []
        self._seconds_per_key: float | None = None
        self._answers: deque[tuple[_Batch, Findings | None]] = deque()
        self._removed: OrderedDict[Key, _Removal] = OrderedDict()  # oldest first
        self.num_removals = 0  # calls of mark_removed
        self._quarantined: dict[Key, float] = {}  # -> until when; the oldest first
        self._gate = _native.Guard(True)  # each transfer has one; a probe touches no page
        self._pool = HangProofPool(
            "fskv-probe",
            _PROBES_AT_ONCE,
            _MAX_HUNG_PROBES,
            _native.Queue(_PROBES_AT_ONCE, 0),
            _call,
            contextlib.nullcontext,
        )

    def lookup(self, chunk: ChunkId) -> Answer:
        """Return the presence, and for a MISS the reason. Never blocks.

        UNKNOWN promises that a call after `lookup_timeout_s` at the latest says HIT or MISS; after ten times
        that where the disk answers but slowly.
        """
        now = self._clock()
        entry = self._entries.get(chunk)
        while self._answers and entry is not None and entry.answer is _WAITING:
            self._take_answer()  # one by one: the call of a lookup must stay short
            entry = self._entries.get(chunk)
        if self._breaker.open and not (entry and entry.answer is _WAITING):
            if not self._breaker.allows():
                return _REFUSED
            entry = None  # one probe to see whether the root is back
        if entry is None:
            if len(self._entries) >= self._max_known and not self._make_room(chunk):
                return _TIMED_OUT
            return self._ask(chunk, now, missed_before=False)
        answer = entry.answer
        if now < entry.valid_until:
            if answer is _WAITING:
                return answer
            self._entries.move_to_end(chunk)
            if answer is _HIT and self._removed and self._is_void(chunk, entry.removals):
                return self._remember(chunk, _ABSENT, self._negative_ttl_s)
            return answer
        if answer is _WAITING:
            if self._is_patient(entry.valid_until, now):
                return answer
            return self._remember(chunk, _TIMED_OUT, self._negative_ttl_s)
        self._entries.move_to_end(chunk)
        return self._ask(chunk, now, missed_before=answer is not _HIT)

    def flush(self) -> None:
        """Start the probes of keys asked for in this scheduler step, at its end. Never blocks."""
        while self._answers:
            self._take_answer()
        now = self._clock()
        if self._batches:
            self._give_up_late_batches(now)
        if self._removed:
            self._drop_old_removals(now)
        if not self._batches:
            self._num_asked, self._patience_s = 0, 0.0
        if self._queued:
            self._start_probes(now)

    def _start_probes(self, now: float) -> None:
        self._num_asked += len(self._queued)
        most = (_MOST_PATIENCE - 1) * self._timeout_s
        self._patience_s = min(most, self.recompute_s(self._num_asked) - self._timeout_s)
        chunks, missed = list(self._queued), bytes(self._queued.values())
        self._queued.clear()
        size = self._batch_size()
        tasks = []
        for at in range(0, len(chunks), size):
            batch = _Batch(chunks[at : at + size], now, self.num_removals)
            probe = partial(self._run_probe, batch, missed[at : at + size])
            batch.task = _native.Transfer(probe, True, self._gate)
            tasks.append(batch.task)
            self._batches.append(batch)
        self._pool.submit(*tasks)

    def mark_stored(self, chunk: ChunkId, began: int | None = None) -> bool:
        """Note that our own store made the chunk's file visible: the chunk is a hit from now on.

        `began` is `num_removals` when the store was begun. If the chunk was removed since, nobody knows which
        came first: it is no hit until it is looked at again. Returns whether it is one.
        """
        if began is not None and self._removed and self._is_void(chunk, began):
            self._entries.pop(chunk, None)
            return False
        self._remember(chunk, _HIT, self._positive_ttl_s)
        if self._quarantined:
            self._quarantined.pop((chunk.key_hash, chunk.group_idx), None)
        return True

    def mark_failed(self, chunk: ChunkId, status: Status) -> None:
        """Note a failed load: its chunk misses at once, and is probed again after the quarantine."""
        if status is Status.MISSING:
            self._remember(chunk, _ABSENT, self._negative_ttl_s)
        else:
            self._remember(chunk, _QUARANTINED, self._quarantine_s)
            key = (chunk.key_hash, chunk.group_idx)
            self._quarantined.pop(key, None)
            self._quarantined[key] = self._clock() + self._quarantine_s
            if len(self._quarantined) > _MAX_QUARANTINED:
                del self._quarantined[next(iter(self._quarantined))]

    def mark_removed(self, names: Iterable[tuple[bytes, int]]) -> None:
        """Note chunks that any node has removed: (XXH3-128 of the key, group index) each.

        Older knowledge of them is no HIT any more; see the module docstring. 0.4 us a name.
        """
        self.num_removals += 1
        removal = _Removal(self.num_removals, self._clock())
        removed = self._removed
        for name in names:
            removed[name] = removal
            removed.move_to_end(name)
            if len(removed) > MAX_REMOVED:
                removed.popitem(last=False)

    def known_present(self, chunk: ChunkId) -> bool:
        """Return whether a store of the chunk would be wasted: memory has a fresh, positive answer."""
        entry = self._entries.get(chunk)
        return (
            entry is not None
            and entry.answer is _HIT
            and self._clock() < entry.valid_until
            and not (self._removed and self._is_void(chunk, entry.removals))
        )

    def forget_all(self) -> None:
        """Drop everything known; every chunk is looked at again."""
        self._entries.clear()
        self._queued.clear()
        self._quarantined.clear()

    @property
    def num_quarantined(self) -> int:
        now = self._clock()
        while self._quarantined and next(iter(self._quarantined.values())) <= now:
            del self._quarantined[next(iter(self._quarantined))]
        return len(self._quarantined)

    @property
    def num_known(self) -> int:
        return len(self._entries)

    def close(self) -> None:
        self._pool.close()

    def _ask(self, chunk: ChunkId, now: float, *, missed_before: bool) -> Answer:
        # Those who ask at about the same time share one deadline, 1 % early at most.
        if now - (self._waiting.valid_until - self._timeout_s) > 0.01 * self._timeout_s:
            self._waiting = _Known(_WAITING, now + self._timeout_s)
        key = (chunk.key_hash, chunk.group_idx)
        self._entries[key] = self._waiting
        self._queued[key] = missed_before
        if len(self._queued) >= _MAX_BATCH:  # of one long request, or of many
            self._start_probes(now)
        return _WAITING

    def _remember(self, chunk: ChunkId, answer: Answer, ttl_s: float) -> Answer:
        key = (chunk.key_hash, chunk.group_idx)
        self._entries[key] = _Known(answer, self._clock() + ttl_s, self.num_removals)
        self._entries.move_to_end(key)
        while len(self._entries) > self._max_known:
            self._entries.popitem(last=False)
        return answer

    def _make_room(self, chunk: ChunkId) -> bool:
        """Forget the least recently asked chunk; False if a request waits for its probe.

        Evicting what is being probed would make the requests that wait for it ask again for ever.
        """
        if chunk in self._entries:  # the breaker lets it through, to be looked at again
            return True
        oldest = next(iter(self._entries))
        if self._entries[oldest].answer is _WAITING:
            return False
        del self._entries[oldest]
        return True

    # --- removed chunks ---------------------------------------------------------------------

    def _is_void(self, key: Key, removals: int) -> bool:
        """Return whether a removal later than removal number `removals` named the chunk."""
        name = bytes.fromhex(namespace.chunk_name(key[0]))
        removal = self._removed.get((name, key[1]))
        return removal is not None and removal.number > removals

    def _drop_old_removals(self, now: float) -> None:
        """Forget removals that are older than any HIT in memory.

        Called after the answers were taken and late probes given up: what is still being looked at was
        started less than `_longest_s` ago.
        """
        for _ in range(_MAX_DROPPED):
            name = next(iter(self._removed), None)
            if name is None or self._removed[name].at + self._longest_s >= now:
                return
            del self._removed[name]

    # --- probes -----------------------------------------------------------------------------

    def _batch_size(self) -> int:
        if self._seconds_per_key is None:
            return _FIRST_BATCH
        return int(max(_MIN_BATCH, min(_MAX_BATCH, _BATCH_S / max(self._seconds_per_key, 1e-9))))

    def _run_probe(self, batch: _Batch, missed_before: bytes) -> None:
        """Run one probe on a pool thread: note its start time, then append its answers."""
        batch.ran_at = self._clock()
        try:
            findings: Findings | None = self._probe(batch.chunks, missed_before)
        except OSError as error:
            logger.warning("fskv: probe of %d chunks failed: %s", len(batch.chunks), error)
            findings = None
        self._answers.append((batch, findings))

    def _take_answer(self) -> None:
        batch, findings = self._answers.popleft()
        self._breaker.record(Status.IO_ERROR if findings is None else Status.OK)
        if batch.done:
            return  # given up: it may have looked at any time since
        batch.done = True
        now = self._clock()
        if findings is not None:
            self._answered_at = now
        entries = self._entries
        reason = _UNREADABLE if findings is None else _ABSENT
        # As long as others are waited for: a request asks for all its chunks again until the last is known.
        missed = _Known(reason, now + max(self._negative_ttl_s, self._patience_s))
        there: Iterable[int] = [0] * len(batch.chunks)
        if findings is not None:
            self._note_speed(findings.seconds / len(batch.chunks))
            there = findings.there
            if self._removed:
                there = [
                    found and not self._is_void(chunk, batch.removals)
                    for chunk, found in zip(batch.chunks, there, strict=True)
                ]
        hit = _Known(_HIT, now + max(self._positive_ttl_s, self._patience_s), batch.removals)
        for chunk, found in zip(batch.chunks, there, strict=True):
            entry = entries.get(chunk)
            # Anything else was stored, failed or timed out meanwhile: that is newer.
            if entry is not None and entry.answer is _WAITING:
                entries[chunk] = hit if found else missed

    def _note_speed(self, seconds: float) -> None:
        """Update the seconds per key: a slower batch counts fully, a faster one by a third."""
        last = self._seconds_per_key
        self._seconds_per_key = (
            seconds if last is None else max(seconds, last + (seconds - last) / 3)
        )

    def _is_patient(self, until: float, now: float) -> bool:
        """Return whether to wait beyond `until` for an answer: the disk answers, and a hit is worth it."""
        return now < until + self._patience_s and now - self._answered_at <= self._timeout_s

    def _give_up_late_batches(self, now: float) -> None:
        waited_in_vain = False
        for batch in self._batches:
            if batch.done or now - batch.started_at <= self._timeout_s or batch.task is None:
                continue
            if batch.ran_at is not None:
                if now - batch.ran_at <= self._timeout_s:
                    continue  # it had no thread before: nothing hangs yet
                self._write_off(batch, batch.task, now)
            elif self._is_patient(batch.started_at + self._timeout_s, now):
                continue
            elif self._pool.queue.cancel(batch.task) or batch.task.started_at is None:
                waited_in_vain = True  # it never got a thread: no sign against the root
            else:
                continue  # it is just getting one, and may hang yet
            batch.done = True
            for chunk in batch.chunks:  # nobody else ends the wait for these
                if (entry := self._entries.get(chunk)) and entry.answer is _WAITING:
                    self._remember(ChunkId(*chunk), _TIMED_OUT, self._negative_ttl_s)
        if waited_in_vain and self._pool.num_hung:
            self._breaker.record(Status.TIMED_OUT)
        self._batches = [b for b in self._batches if not b.done]

    def _write_off(self, batch: _Batch, task: _native.Transfer[_Probe], now: float) -> None:
        logger.warning(
            "fskv: probe of %d chunks has not returned after %.1f s",
            len(batch.chunks),
            now - batch.started_at,
        )
        self._pool.write_off(task)
        self._note_speed((now - batch.started_at) / len(batch.chunks))
        self._breaker.record(Status.TIMED_OUT)


# --- looking at files -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The place of one rank's chunk files, and their sizes by group index; `rank` as in their names."""

    namespace_path: str
    rank: int | None
    file_nbytes: Mapping[int, int]


def probe_chunks(
    ranks: Sequence[RankFiles], chunks: Sequence[Key], missed_before: bytes
) -> Findings:
    """Look which chunks are on disk: all ranks' files of a chunk, with the right sizes.

    For PresenceIndex, on its threads; the interpreter is free meanwhile. There must be a rank, and all ranks
    have one namespace. A file that
    cannot be looked at is not there; raises OSError when that is so for all of several, which speaks against
    the root itself. `missed_before` says of which chunks the directory is opened first: an NFS client hides
    another node's new file for 28 s after a miss, but not then (measured on NFS 3 and 4.2).
    """
    if not ranks:
        raise ValueError("probe_chunks: found no rank, expected at least one")
    directory = os.fsencode(f"{ranks[0].namespace_path}/{namespace.CHUNK_DIR}")
    position = {group_idx: at for at, group_idx in enumerate(ranks[0].file_nbytes)}
    files = tuple(
        (namespace.chunk_file("", group_idx, rank.rank).encode(), rank.file_nbytes[group_idx])
        for group_idx in position
        for rank in ranks
    )
    names = "".join([namespace.chunk_name(key) for key, _ in chunks]).encode()
    groups = bytes([position[group_idx] for _, group_idx in chunks])
    there, num_errors, number, seconds = _native.probe_chunks(
        directory, names, groups, missed_before, files, len(ranks)
    )
    if num_errors and num_errors == len(chunks):
        raise OSError(number, os.strerror(number), _path(ranks[0], chunks[0]))
    return Findings(there, seconds)


def _path(rank: RankFiles, chunk: Key) -> str:
    name = namespace.chunk_path(*chunk, rank.rank)
    return f"{rank.namespace_path}/{name}"
