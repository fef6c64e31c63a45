"""A KvStore for an engine that waits: calls from any of its threads, each within a deadline.

A thread of its own steps the store; callers wait beside it. A chunk is one block here, and a page belongs to
fskv until the call that named it has returned.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fskv.data_path.job import FileMove, JobResult
from fskv.observe import metrics
from fskv.offload.kv_store import KvStore
from fskv.offload.opener import OPENING, Opener
from fskv.types import ChunkId, Presence, Status, Use

logger = logging.getLogger(__name__)

_STEP_S = 0.001  # while somebody waits
_OPENING_STEP_S = 0.02  # while a namespace is opened
_IDLE_STEP_S = 1.0
# The runner ends a job at its deadline; a caller gives up this much later, whatever happens.
_GRACE_S = 1.0


class Page(NamedTuple):
    """A chunk, and the block of the KV memory that holds it or is to hold it."""

    chunk: ChunkId
    block: int


@dataclass(slots=True)
class _Job:
    """One waiting call: the outcomes of its stores, and the result of its job."""

    stored: dict[ChunkId, bool | None] = field(default_factory=dict)  # None: not known yet
    result: JobResult | None = None


class BlockingStore:
    """A store whose calls wait. A call raises only ValueError, for a page outside of the memory."""

    def __init__(self, kv: KvStore, chunk_nbytes: int, *, num_storing: int = 1) -> None:
        """`chunk_nbytes` is the size that a deadline counts; `num_storing` threads may store at the same
        time.
        """
        self._kv = kv
        self._deadline = kv.deadline
        self._chunk_nbytes = chunk_nbytes
        # Of each; more would be skipped where the disk is slow.
        self._at_once = max(1, kv.mover.least_queued // num_storing)
        self._changed = threading.Condition()  # guards all below, and the store
        self._num_waiting = 0
        self._job_ids = itertools.count()
        self._jobs: dict[int, _Job] = {}  # that somebody waits for
        self._closed = False
        self._num_stops = 0  # a call that one comes in between finds, loads and stores nothing
        self._opener = Opener(lambda _: kv.opened({"private": secrets.token_hex(16)}))
        self._thread = threading.Thread(target=self._run, name="fskv-step", daemon=True)
        self._thread.start()

    def count_present(self, chunks: Sequence[ChunkId]) -> int:
        """Return how many chunks from the first on are present; 0 if the lookup does not answer in time."""
        return len(self._present(chunks, prefix=True))

    def present(self, chunks: Sequence[ChunkId]) -> list[bool]:
        """Return for each chunk whether it is present; all False if the lookup does not answer in time."""
        found = self._present(chunks, prefix=False)
        return found or [False] * len(chunks)

    def _present(self, chunks: Sequence[ChunkId], *, prefix: bool) -> list[bool]:
        """Return whether each chunk is present, with `prefix` up to the first miss; [] without an answer."""
        lookup, chunks = self._kv.lookup, self._kv.hidden(chunks)
        answers: list[tuple[Presence, Status]] = []

        def known() -> bool:
            answers[:] = [lookup.ask(chunk) for chunk in chunks]
            if prefix:  # what comes after a miss is of no use, whatever it is
                missed = [presence is Presence.MISS for presence, _ in answers]
                del answers[missed.index(True) + 1 if True in missed else len(missed) :]
            return all(presence is not Presence.UNKNOWN for presence, _ in answers)

        with self._changed:
            if self._closed or not self._wait(known, self._deadline.max_s):
                return []
            for presence, why in answers:
                if presence is Presence.HIT:
                    lookup.counters.add(metrics.LOOKUP_HITS, 1)
                else:
                    lookup.counters.add(metrics.LOOKUP_MISSES, 1, why.value)
            there = [presence is Presence.HIT for presence, _ in answers]
            return there[: there.index(False)] if prefix and False in there else there

    def load(self, pages: Sequence[Page], before: Sequence[ChunkId] = ()) -> list[bool]:
        """Load pages; returns for each whether it holds its chunk now. The bytes of the others are undefined.

        `pages` are in the order of a prefix; `before` are the earlier chunks of that prefix, if known.
        """
        with self._changed:
            if self._closed or not pages:
                return [False] * len(pages)
            num_stops = self._num_stops
            pages, before = self._hidden(pages), self._kv.hidden(before)
            moves = self._moves(pages, self._used(pages, before, there=True))
            with self._begun(_Job(), self._kv.mover.load, moves) as job:
                self._wait(lambda: job.result is not None, self._allowed_s(len(pages)))
            # Stopped between the load's end and now: what it brought may not be what the engine wants.
            if job.result is None or num_stops != self._num_stops:
                return [False] * len(pages)
            bad = {file.chunk for file in job.result.bad}
            return [page.chunk not in bad for page in pages]

    def store(self, pages: Sequence[Page], before: Sequence[ChunkId] = ()) -> list[bool]:
        """Store pages; returns for each chunk whether it is known to be on disk when the deadline is over.

        Order and `before`: see `load`.
        """
        end = time.monotonic() + self._allowed_s(len(pages))
        pages, before = self._hidden(pages), self._kv.hidden(before)
        with self._changed:
            uses = [] if self._closed else self._used(pages, before, there=False)
            num_stops = self._num_stops
        good: list[bool] = []
        for first in range(0, len(pages), self._at_once):
            some = slice(first, first + self._at_once)
            good += self._store(pages[some], uses[some], end, num_stops)
        return good

    def _store(
        self, pages: Sequence[Page], uses: Sequence[Use], end: float, num_stops: int
    ) -> list[bool]:
        kv = self._kv
        with self._changed:
            if self._closed or time.monotonic() >= end or num_stops != self._num_stops:
                return [False] * len(pages)
            moves = {move.file.chunk: move for move in self._moves(pages, uses)}
            stored: dict[ChunkId, bool | None] = dict.fromkeys(kv.lookup.begin_store(moves))
            if stored:
                mine = [moves[chunk] for chunk in stored]
                with self._begun(_Job(stored), kv.mover.store, mine):
                    self._wait(
                        lambda: num_stops != self._num_stops or None not in stored.values(),
                        end - time.monotonic(),
                    )
            there = kv.lookup.presence.known_present
            return [bool(stored[chunk]) if chunk in stored else there(chunk) for chunk, _ in pages]

    def stop(self, reason: str) -> None:
        """End loads and stores for good."""
        with self._changed:
            if not (self._closed or self._kv.watch.in_doubt):
                logger.error("fskv: %s: nothing is loaded or stored any more", reason)
                self._halt(self._kv.stop)

    def rest(self, reason: str) -> None:
        """End loads and stores until `renew`, for a `reason` in words: the weights change."""
        with self._changed:
            if not (self._closed or self._kv.watch.in_doubt):
                self._halt(lambda: self._kv.rest(reason))

    def renew(self) -> None:
        """End a rest: go on in a namespace that no other store finds, as soon as it is open."""
        with self._changed:
            if self._kv.watch.resting:
                self._kv.watch.resting = OPENING
                self._changed.notify_all()

    def with_store(self, call: Callable[[KvStore], None]) -> None:
        """Run a short function on the store, between two of its steps."""
        with self._changed:
            if not self._closed:
                call(self._kv)

    def close(self) -> None:
        """End all calls, then the I/O; a second call does nothing."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        self._thread.join(_GRACE_S)
        with self._changed:
            self._kv.close()

    def _hidden(self, pages: Sequence[Page]) -> list[Page]:
        chunks = self._kv.hidden([page.chunk for page in pages])
        return [Page(chunk, page.block) for chunk, page in zip(chunks, pages, strict=True)]

    # --- under the lock -----------------------------------------------------------------------

    def _halt(self, stop: Callable[[], None]) -> None:
        self._num_stops += 1
        stop()
        self._changed.notify_all()

    def _allowed_s(self, num_pages: int) -> float:
        return self._deadline.for_nbytes(num_pages * self._chunk_nbytes)

    def _used(self, pages: Sequence[Page], before: Sequence[ChunkId], *, there: bool) -> list[Use]:
        return self._kv.used(before, [page.chunk for page in pages], there=there)

    def _moves(self, pages: Sequence[Page], uses: Sequence[Use]) -> list[FileMove]:
        pairs = zip(pages, uses, strict=True)
        return [m for page, use in pairs for m in self._kv.moves(page.chunk, [page.block], use=use)]

    @contextlib.contextmanager
    def _begun(
        self,
        job: _Job,
        begin: Callable[[int, Sequence[FileMove]], None],
        moves: Sequence[FileMove],
    ) -> Iterator[_Job]:
        """Register a job for the block; at its end a job without a result is given up and its pages freed."""
        job_id = next(self._job_ids)
        self._jobs[job_id] = job
        try:
            begin(job_id, moves)
            yield job
        finally:
            if job.result is None:
                self._kv.mover.free_pages([job_id])
                self._step()
            del self._jobs[job_id]

    def _wait(self, done: Callable[[], bool], allowed_s: float) -> bool:
        """Wait until done() or closed, at most `allowed_s` and a moment; returns done()."""
        end = time.monotonic() + allowed_s + _GRACE_S
        self._num_waiting += 1
        self._changed.notify_all()  # the thread may be in its idle step
        try:
            while not (finished := done()) and not self._closed:
                left = end - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(min(left, _IDLE_STEP_S))
            return finished
        finally:
            self._num_waiting -= 1

    def _run(self) -> None:
        with self._changed:
            while not self._closed:
                try:
                    self._step()
                    self._take_opened()
                except Exception:  # a bug must cost what is under way, not all that follows
                    logger.exception("fskv: step")
                self._changed.notify_all()
                idle_s = _OPENING_STEP_S if self._is_opening else _IDLE_STEP_S
                self._changed.wait(_STEP_S if self._num_waiting else idle_s)

    @property
    def _is_opening(self) -> bool:
        """Whether the namespace of new weights is being opened."""
        return self._kv.watch.resting == OPENING

    def _take_opened(self) -> None:
        opened = self._opener.take(self._num_stops) if self._is_opening else None
        if opened is not None:
            self._kv.move(*opened)

    def _step(self) -> None:
        for result in self._kv.mover.poll():
            if result.job_id in self._jobs:
                self._jobs[result.job_id].result = result
        news = self._kv.take_news()
        for chunks, good in (news.stored, True), (news.not_stored, False):
            for chunk in chunks:
                for job in self._jobs.values():
                    # Of two the first may not have heard yet that it was not, and the second stores it again.
                    if job.stored.get(chunk, good) is None:
                        job.stored[chunk] = good
        self._kv.lookup.end_step()
