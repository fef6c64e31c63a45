"""An engine without a model: a `KvStore` that is asked for the requests of a trace.

`Engine.handle` does for one request what a scheduler and a worker do: look up, load the hit prefix, store
the rest. It needs no torch: the KV pages are plain memory, and their content follows from the keys. So every
loaded byte is compared with what it must be, and a hit is a block that was loaded, checked and right.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.rig import BenchmarkError, identity_of
from fskv.config import StoreConfig
from fskv.data_path.job import FileMove
from fskv.index.presence import NEGATIVE_TTL_S, POSITIVE_TTL_S, QUARANTINE_S
from fskv.observe import metrics
from fskv.offload.kv_store import KvStore
from fskv.offload.mover import News
from fskv.types import ChunkId, Presence, Status, Use

PATIENCE_S = 60.0  # for what cannot take so long: a chunk, room for it
_TOKENS_PER_BLOCK = 512
_MAX_PAGES = 256  # of an engine; a request that needs more comes in parts
_STAGING_NBYTES = 16 << 20
_POLL_S = 0.00005
_ROOM_POLL_S = 0.0005
# At full speed a lookup waits as long as the disk takes: there is no scheduler that could do better.
_FULL_SPEED_TIMEOUT_S = 30.0
# A prime, so that neither two pages nor two rows of a large block hold the same bytes.
_PATTERN_NBYTES = 65521


@dataclass(slots=True)
class RequestDone:
    """The outcome of one request: counts of blocks."""

    hits: int = 0
    loaded: int = 0
    stored: int = 0
    wrong_nbytes: int = 0  # bytes of pages that a good load left different from what was stored
    waited_s: float = 0.0  # for room
    failures: Counter[str] = field(default_factory=Counter)  # "load corrupt": 2


def block_key(name: str, hash_id: int) -> bytes:
    """Return the key of a trace's block: 32 bytes, as long as an engine's chained hash."""
    return hashlib.sha256(b"%s/%d" % (name.encode(), hash_id)).digest()


def block_content(key: bytes, nbytes: int) -> bytes:
    """Return the bytes that stand for a block's KV; they follow from its key alone."""
    pattern = hashlib.shake_128(key).digest(min(nbytes, _PATTERN_NBYTES))
    return (pattern * -(-nbytes // len(pattern)))[:nbytes]


class TraceClock:
    """The clock of an engine's presence index, in seconds of the trace.

    With a speed it is time, that many times faster. At full speed the trace has no time: the clock jumps with
    each request, far enough that all earlier answers of the presence index are too old, as they would be if
    the requests came minutes apart.
    """

    def __init__(self, speed: float | None, jump_s: float) -> None:
        self._speed = speed or 1.0
        self._jump_s = 0.0 if speed else jump_s
        self._jumped_s = 0.0
        self._start = time.monotonic()

    def next_request(self) -> None:
        self._jumped_s += self._jump_s

    def __call__(self) -> float:
        return (time.monotonic() - self._start) * self._speed + self._jumped_s


class Engine:
    """An engine of one process over one namespace of `root`, which must be an fskv root or empty.

    Raises FskvError and OSError when the root cannot be used.
    """

    def __init__(
        self,
        root: str,
        name: str,
        block_nbytes: int,
        *,
        max_nbytes: int | None = None,
        io_threads: int = 2,
        direct_io: str = "off",
        speed: float | None = None,
    ) -> None:
        """`name` is the trace's. `speed`: seconds of the trace a second; None: as fast as it goes."""
        self._name = name
        self._block_nbytes = block_nbytes
        self._speed = speed
        self._pages = memoryview(bytearray(_MAX_PAGES * block_nbytes))
        self._zeros = bytes(len(self._pages))
        config = StoreConfig.from_mapping(
            {
                "root": root,
                "io_threads": io_threads,
                "direct_io": direct_io,
                "staging_bytes": _STAGING_NBYTES,
                "load_deadline_s": PATIENCE_S,
                "keep_free": 0,
            }
        )
        # Patient: a replay counts what the root holds, not what came in time.
        timeout_s = config.lookup_timeout_s * speed if speed else _FULL_SPEED_TIMEOUT_S
        config = replace(config, max_bytes=max_nbytes, lookup_timeout_s=timeout_s)
        self._clock = TraceClock(
            speed, 2 * max(timeout_s, POSITIVE_TTL_S, NEGATIVE_TTL_S, QUARANTINE_S)
        )
        self._kv = KvStore(
            config,
            identity_of(f"trace-{name}", (block_nbytes,), 1, _TOKENS_PER_BLOCK),
            {0: [self._pages]},
            clock=self._clock,
            patient=True,
            quiet=True,
        )
        self.directory = self._kv.directory
        self.lookup = self._kv.lookup
        self._mover = self._kv.mover
        self.file_nbytes = self._mover.file_nbytes[0]
        self._job_id = 0

    def close(self) -> None:
        """Stop the threads; what is being written gets a moment to end."""
        self._kv.close()

    def handle(self, hash_ids: Sequence[int]) -> RequestDone:
        """Look the blocks up, load the hit prefix, store the rest; returns when all is visible."""
        self._clock.next_request()
        self.step()
        chunks = [ChunkId(block_key(self._name, hash_id), 0) for hash_id in hash_ids]
        done = RequestDone()
        stamp = bytearray(8)  # one use for all of the request, as an engine has it
        uses = {chunk: Use(stamp, depth) for depth, chunk in enumerate(chunks)}
        found = self._look_up(chunks, done)
        if not self._speed:
            self._take_late_answers(chunks)
        done.hits = self._load(chunks[:found], uses, done)
        self._store(chunks[done.hits :], uses, done)
        return done

    def step(self) -> None:
        """Take news of the maintenance process: how full the root is, and what was pruned."""
        self.lookup.end_step()

    # --- lookup -----------------------------------------------------------------------------

    def _look_up(self, chunks: Sequence[ChunkId], done: RequestDone) -> int:
        """Return how many chunks from the first on are present, asking as a scheduler does."""
        for chunk in chunks:
            if self.lookup.ask(chunk)[0] is Presence.MISS:
                break
        self.lookup.end_step()
        for count, chunk in enumerate(chunks):
            presence, reason = self.lookup.ask(chunk)
            while presence is Presence.UNKNOWN:
                time.sleep(_POLL_S)
                presence, reason = self.lookup.ask(chunk)
                self.lookup.end_step()
            if presence is Presence.MISS:
                if reason is not Status.MISSING:
                    done.failures[f"lookup {reason.value}"] += 1
                return count
        return len(chunks)

    def _take_late_answers(self, chunks: Sequence[ChunkId]) -> None:
        """Wait for the probes of chunks behind the first miss: to a clock that jumps they would hang."""
        for chunk in chunks:
            while self.lookup.ask(chunk)[0] is Presence.UNKNOWN:
                self.lookup.end_step()
                time.sleep(_POLL_S)

    # --- load -------------------------------------------------------------------------------

    def _load(self, prefix: Sequence[ChunkId], uses: dict[ChunkId, Use], done: RequestDone) -> int:
        """Load a prefix and compare every byte; returns how many chunks of it came, up to the first bad."""
        bad: set[ChunkId] = set()
        unique = list(dict.fromkeys(prefix))
        for at in range(0, len(unique), _MAX_PAGES):
            bad |= self._load_pages(unique[at : at + _MAX_PAGES], uses, done)
        return next((i for i, chunk in enumerate(prefix) if chunk in bad), len(prefix))

    def _load_pages(
        self, chunks: Sequence[ChunkId], uses: dict[ChunkId, Use], done: RequestDone
    ) -> set[ChunkId]:
        nbytes = self._block_nbytes
        # Or a load that did nothing would find the bytes of an earlier one.
        self._pages[: len(chunks) * nbytes] = self._zeros[: len(chunks) * nbytes]
        self._job_id += 1
        self._mover.load(self._job_id, self._moves(chunks, uses))
        bad: set[ChunkId] = set()

        def all_ended() -> bool:
            for result in self._mover.poll():
                if result.job_id == self._job_id:  # and not a store, whose news came first
                    bad.update(file.chunk for file in result.bad)
                    return True
            return False

        self._wait(all_ended)
        self._take_news(done)
        for i, chunk in enumerate(chunks):
            if chunk in bad:
                continue
            done.loaded += 1
            page = self._pages[i * nbytes : (i + 1) * nbytes].tobytes()
            expected = block_content(chunk.key_hash, nbytes)
            if page != expected:
                bad.add(chunk)
                done.wrong_nbytes += sum(a != b for a, b in zip(page, expected, strict=True))
        return bad

    # --- store ------------------------------------------------------------------------------

    def _store(self, rest: Sequence[ChunkId], uses: dict[ChunkId, Use], done: RequestDone) -> None:
        waiting = deque(dict.fromkeys(rest))
        waits_since: float | None = None
        while waiting:
            batch: list[ChunkId] = []
            while waiting and len(batch) < _MAX_PAGES:
                if self.lookup.begin_store([waiting[0]]):
                    batch.append(waiting[0])
                elif not self.lookup.presence.known_present(waiting[0]):
                    break
                waiting.popleft()
            if batch:
                waits_since = None
                self._store_pages(batch, uses, done)
                continue
            if not waiting:
                break
            if self.lookup.breaker.open:
                done.failures[f"store {Status.BREAKER.value}"] += len(waiting)
                break
            # A closed loop: unlike an engine, which skips the store, a replay waits for room.
            now = time.monotonic()
            waits_since = waits_since or now
            if now - waits_since > PATIENCE_S:
                raise BenchmarkError(
                    f"no room for a chunk of {self.file_nbytes} bytes within {PATIENCE_S:g} s; expected "
                    "the maintenance process to prune"
                )
            time.sleep(_ROOM_POLL_S)
            self.step()
            done.waited_s += time.monotonic() - now

    def _store_pages(
        self, chunks: Sequence[ChunkId], uses: dict[ChunkId, Use], done: RequestDone
    ) -> None:
        nbytes = self._block_nbytes
        for i, chunk in enumerate(chunks):
            self._pages[i * nbytes : (i + 1) * nbytes] = block_content(chunk.key_hash, nbytes)
        self._job_id += 1
        self._mover.store(self._job_id, self._moves(chunks, uses))
        ended: set[ChunkId] = set()
        free = False

        def all_ended() -> bool:
            nonlocal free
            free |= any(result.job_id == self._job_id for result in self._mover.poll())
            news = self._take_news(done)
            ended.update(news.stored, news.not_stored)
            return free and len(ended) == len(chunks)

        self._wait(all_ended)

    # --- jobs -------------------------------------------------------------------------------

    def _moves(self, chunks: Sequence[ChunkId], uses: dict[ChunkId, Use]) -> list[FileMove]:
        return [
            move
            for page, chunk in enumerate(chunks)
            for move in self._kv.moves(chunk, [page], use=uses[chunk])
        ]

    def _wait(self, ended: Callable[[], bool]) -> None:
        end = time.monotonic() + 3 * PATIENCE_S
        while not ended():
            if time.monotonic() > end:
                raise BenchmarkError(f"a job did not end in {3 * PATIENCE_S:g} s")
            time.sleep(_POLL_S)

    def _take_news(self, done: RequestDone) -> News:
        """Take what became of files, and put it into the numbers of the request."""
        news = self._kv.take_news()
        for (metric, label), amount in self._mover.counters.drain().items():
            if metric is metrics.STORED_CHUNKS:
                done.stored += int(amount)
            elif metric is metrics.STORES_SKIPPED and label != Status.EXISTS.value and amount:
                done.failures[f"store {label}"] += int(amount)
            elif metric is metrics.LOAD_FAILURES and amount:
                done.failures[f"load {label}"] += int(amount)
        return news
