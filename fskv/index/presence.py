"""Answers "is this chunk on disk?" from memory, and keeps that memory true enough.

`lookup` is called by the engine's scheduler for every chunk of every waiting request and never touches
the disk. What it does not know is UNKNOWN: the key is queued, `flush` (at the end of the step) hands all
queued keys to a probe thread as one batch, and a later lookup finds the answer. An UNKNOWN that lasts
longer than `lookup_timeout_s` becomes a MISS: the request is recomputed instead of waiting for a hung
mount. An answer is a hint, never a proof: the load checks the file.

Threads: lookup, flush and mark_* on the scheduler's thread; probes on the pool's threads, which only
append to `_answers`. So `_entries` has one owner and needs no lock; a deque's append and popleft are atomic.
Memory: at most `max_known` entries of about 400 bytes, least recently asked first out.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from fskv.breaker import Breaker
from fskv.threads import HangProofPool, Task
from fskv.types import ChunkId, Presence, Status

logger = logging.getLogger(__name__)

MAX_KNOWN_CHUNKS = 250_000
_MAX_BATCH = 64  # on a slow mount the first answers of a step must not wait for its last
_MAX_HUNG_PROBES = 4


@dataclass(slots=True)
class _Entry:
    presence: Presence
    valid_until: float
    reason: Status  # of a MISS
    asked_at: float = 0.0  # of an UNKNOWN: since when somebody waits


@dataclass(slots=True)
class _Batch:
    chunks: list[ChunkId]
    started_at: float
    task: Task | None = None
    done: bool = False


class PresenceIndex:
    """See the module docstring."""

    def __init__(
        self,
        probe: Callable[[Sequence[ChunkId], Sequence[bool]], list[bool]],
        *,
        positive_ttl_s: float,
        negative_ttl_s: float,
        lookup_timeout_s: float,
        quarantine_s: float,
        breaker: Breaker,
        max_known: int = MAX_KNOWN_CHUNKS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`probe(chunks, missed_before)` looks at the disk and may hang or raise OSError."""
        self._probe = probe
        # An answer must live until the request that waits for it has asked again.
        self._positive_ttl_s = max(positive_ttl_s, lookup_timeout_s)
        self._negative_ttl_s = max(negative_ttl_s, lookup_timeout_s)
        self._timeout_s = lookup_timeout_s
        self._quarantine_s = quarantine_s
        self._breaker = breaker
        self._max_known = max_known
        self._clock = clock
        self._entries: OrderedDict[ChunkId, _Entry] = OrderedDict()
        self._queued: dict[ChunkId, bool] = {}  # -> missed before
        self._batches: list[_Batch] = []
        self._answers: deque[tuple[_Batch, list[bool] | None]] = deque()
        self._pool = HangProofPool("fskv-probe", 2, _MAX_HUNG_PROBES)

    def lookup(self, chunk: ChunkId) -> tuple[Presence, Status]:
        """Return what is known, and for a MISS why. Never blocks.

        UNKNOWN promises that a call after `lookup_timeout_s` at the latest says HIT or MISS.
        """
        self._take_answers()
        now = self._clock()
        entry = self._entries.get(chunk)
        if self._breaker.open and not (entry and entry.presence is Presence.UNKNOWN):
            if not self._breaker.allows():
                return Presence.MISS, Status.BREAKER
            entry = None  # one probe to see whether the root is back
        if entry is not None:
            if entry.presence is Presence.UNKNOWN:
                if now - entry.asked_at <= self._timeout_s:
                    return Presence.UNKNOWN, Status.OK
                self._remember(chunk, Presence.MISS, now + self._negative_ttl_s, Status.TIMED_OUT)
                return Presence.MISS, Status.TIMED_OUT
            if now < entry.valid_until:
                self._entries.move_to_end(chunk)
                return entry.presence, entry.reason
        if entry is None and not self._make_room():
            return Presence.MISS, Status.TIMED_OUT
        missed_before = entry is not None and entry.presence is Presence.MISS
        self._remember(chunk, Presence.UNKNOWN, 0.0, Status.OK, asked_at=now)
        self._queued[chunk] = missed_before
        return Presence.UNKNOWN, Status.OK

    def flush(self) -> None:
        """End of a scheduler step: start the probes of the keys it asked for. Never blocks."""
        self._take_answers()
        now = self._clock()
        waited_in_vain = False
        for batch in self._batches:
            if batch.done or now - batch.started_at <= self._timeout_s or batch.task is None:
                continue
            batch.done = True
            if self._pool.queue.cancel(
                batch.task
            ):  # it never got a thread: no sign against the root
                waited_in_vain = True
                continue
            logger.warning(
                "probe of %d chunks has not returned after %.1f s",
                len(batch.chunks),
                now - batch.started_at,
            )
            self._pool.write_off(batch.task)
            self._breaker.record(Status.TIMED_OUT)
        if waited_in_vain and self._pool.num_hung:
            self._breaker.record(Status.TIMED_OUT)
        self._batches = [b for b in self._batches if not b.done]
        queued = list(self._queued.items())
        self._queued.clear()
        for at in range(0, len(queued), _MAX_BATCH):
            part = queued[at : at + _MAX_BATCH]
            batch = _Batch([chunk for chunk, _ in part], now)
            missed = [before for _, before in part]
            batch.task = Task(partial(self._run_probe, batch, missed))
            self._pool.submit(batch.task)
            self._batches.append(batch)

    def mark_stored(self, chunk: ChunkId) -> None:
        """Our own store made the file visible: a hit from now on, whatever was known before."""
        now = self._clock()
        self._remember(chunk, Presence.HIT, now + self._positive_ttl_s, Status.OK)

    def mark_failed(self, chunk: ChunkId, status: Status) -> None:
        """A load of it failed: it misses at once, and is looked at again after the quarantine."""
        absent = status is Status.MISSING
        ttl = self._negative_ttl_s if absent else self._quarantine_s
        reason = Status.MISSING if absent else Status.QUARANTINED
        self._remember(chunk, Presence.MISS, self._clock() + ttl, reason)

    def mark_removed(self, names: Iterable[tuple[bytes, int]]) -> None:
        """Files of these chunks were removed: (16-byte digest of the key, group index)."""

    def known_present(self, chunk: ChunkId) -> bool:
        """Whether a store of it would be wasted: a fresh, positive answer is in memory."""
        entry = self._entries.get(chunk)
        return (
            entry is not None
            and entry.presence is Presence.HIT
            and self._clock() < entry.valid_until
        )

    def forget_all(self) -> None:
        """Drop everything known; every chunk is looked at again."""
        self._entries.clear()
        self._queued.clear()

    @property
    def num_known(self) -> int:
        return len(self._entries)

    def close(self) -> None:
        self._pool.close()

    def _remember(
        self,
        chunk: ChunkId,
        presence: Presence,
        valid_until: float,
        reason: Status,
        asked_at: float = 0.0,
    ) -> None:
        self._entries[chunk] = _Entry(presence, valid_until, reason, asked_at)
        self._entries.move_to_end(chunk)
        while len(self._entries) > self._max_known:
            self._entries.popitem(last=False)

    def _make_room(self) -> bool:
        """Forget the least recently asked chunk if memory is full; False if somebody waits for it.

        Evicting what is being probed would make the requests that wait for it ask again for ever.
        """
        if len(self._entries) < self._max_known:
            return True
        oldest = next(iter(self._entries))
        if self._entries[oldest].presence is Presence.UNKNOWN:
            return False
        del self._entries[oldest]
        return True

    def _run_probe(self, batch: _Batch, missed_before: list[bool]) -> None:
        """On a pool thread: owns nothing but the call."""
        try:
            found: list[bool] | None = self._probe(batch.chunks, missed_before)
        except OSError as error:
            logger.warning("probe of %d chunks failed: %s", len(batch.chunks), error)
            found = None
        self._answers.append((batch, found))

    def _take_answers(self) -> None:
        while self._answers:
            batch, found = self._answers.popleft()
            batch.done = True
            self._breaker.record(Status.IO_ERROR if found is None else Status.OK)
            now = self._clock()
            for chunk, there in zip(
                batch.chunks, found or [False] * len(batch.chunks), strict=True
            ):
                entry = self._entries.get(chunk)
                if entry is None or entry.presence is not Presence.UNKNOWN:
                    continue  # stored, failed or timed out meanwhile: that is newer
                reason = Status.IO_ERROR if found is None else Status.MISSING
                self._remember(
                    chunk,
                    Presence.HIT if there else Presence.MISS,
                    now + (self._positive_ttl_s if there else self._negative_ttl_s),
                    Status.OK if there else reason,
                )


def probe_files(
    paths: Sequence[Sequence[tuple[str, int]]], missed_before: Sequence[bool]
) -> list[bool]:
    """Look whether chunk files are there with the right size; one answer per chunk.

    `paths[i]` are the (path, expected size) of chunk i's files, one for each rank: all must be good.
    A file that cannot be looked at is not there; raises OSError when that is so for all of several, which
    speaks against the root itself.
    """
    found: list[bool] = []
    errors: list[OSError] = []
    for files, again in zip(paths, missed_before, strict=True):
        if again:
            # An NFS client hides another node's new file for 28 s after a miss, but not after its
            # directory was opened (measured on NFS 3 and 4.2 with default options).
            _open_and_close(os.path.dirname(files[0][0]))
        try:
            found.append(all(_is_good(path, nbytes) for path, nbytes in files))
        except OSError as error:
            found.append(False)
            errors.append(error)
    if errors and len(errors) == len(found):
        raise errors[0]
    return found


def _open_and_close(directory: str) -> None:
    try:
        os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY))
    except OSError:
        return  # whatever it is, the stat that follows meets it again


def _is_good(path: str, nbytes: int) -> bool:
    for _ in range(2):
        try:
            info = os.stat(path, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            return False  # whatever the permissions of one directory are, the root answers
        except OSError as error:
            if error.errno == errno.ESTALE:
                continue  # a handle the server dropped: normal on NFS, look once more
            raise
        return stat.S_ISREG(info.st_mode) and info.st_size == nbytes
    return False
