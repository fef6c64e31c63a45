"""One engine of a replay: a `Lookup` and a `Mover`, as a real engine has them.

`Engine.handle` does for one request what a scheduler and a worker do: look up, load the hit prefix, store
the rest. It runs on one thread, in a process of its own (`run_worker`), and needs no torch: the KV pages
are plain memory, and their content follows from the keys. So every loaded byte is compared with what it
must be, and nothing is counted as a hit that was not loaded, checked by the store, and right.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Literal, cast

from fskv.config import StoreConfig
from fskv.data_path.job import FileMove
from fskv.errors import FskvError
from fskv.format.chunk_file import FileLayout
from fskv.index.presence import NEGATIVE_TTL_S, POSITIVE_TTL_S, QUARANTINE_S
from fskv.namespace import GroupIdentity, Identity, layout_digest
from fskv.observe import metrics
from fskv.offload.kv_store import KvStore
from fskv.offload.mover import News
from fskv.root.root import Root
from fskv.types import ChunkId, FileId, Presence, Status, Use

from .trace import TOKENS_PER_BLOCK, Request, block_content, block_key

PATIENCE_S = 60.0  # for what cannot take so long: a chunk, room for it
_PAGES_NBYTES = 64 << 20  # KV pages of an engine; a request that needs more comes in parts
_MAX_PAGES = 256
_POLL_S = 0.00005
_ROOM_POLL_S = 0.0005
_IDLE_POLL_S = 0.05
# At full speed a lookup waits as long as the disk takes: there is no scheduler that could do better.
_FULL_SPEED_TIMEOUT_S = 30.0


ENGINE_NAME = "replay"  # in the identity of each namespace of a replay


class ReplayError(Exception):
    """The replay cannot go on; one sentence for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What every engine of a replay has in common; pickled to its process."""

    root: str
    trace_digest: bytes
    block_nbytes: int
    max_nbytes: int | None
    keep_free_nbytes: int
    io_threads: int
    direct_io: str
    speed: float | None  # seconds of the trace per second; None: as fast as it goes


@dataclass(slots=True)
class RequestDone:
    """What became of one request. Bytes are those of whole chunk files."""

    hits: int = 0
    loaded: int = 0
    stored: int = 0
    existing: int = 0
    read_nbytes: int = 0
    written_nbytes: int = 0
    wrong_nbytes: int = 0  # bytes of pages that a good load left different from what was stored
    in_flight_nbytes: int = 0  # the most that was being stored at the same time
    lookup_s: float = 0.0
    load_s: float = 0.0
    store_s: float = 0.0
    waited_s: float = 0.0  # of store_s: for room
    failures: Counter[str] = field(default_factory=Counter)  # "load corrupt": 2


def file_layout(block_nbytes: int) -> FileLayout:
    """Return what each chunk file of a replay looks like: one block, one page."""
    group = _group(block_nbytes)
    return FileLayout(1, group.page_nbytes, layout_digest(group, 1))


def _group(block_nbytes: int) -> GroupIdentity:
    return GroupIdentity(0, "full", None, TOKENS_PER_BLOCK, (block_nbytes,), ("trace",))


def replay_identity(trace_digest: bytes, block_nbytes: int) -> Identity:
    """Return a namespace of its own for each trace and size of block."""
    return Identity(
        engine=ENGINE_NAME,
        engine_version="1",
        arch="replay",
        model_name=f"trace-{trace_digest.hex()[:12]}",
        weights=f"named:{trace_digest.hex()}",
        model_config={},
        kv_cache_dtype="bytes",
        model_dtype="bytes",
        kv_cache_layout="page",
        attention_backend="none",
        tokens_per_hash=TOKENS_PER_BLOCK,
        blocks_per_chunk=1,
        groups=(_group(block_nbytes),),
        hash_algorithm="sha256",
        hash_seed="none",
        topology={"tp": 1},
    )


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
    """See the module docstring. Raises FskvError and OSError when the root cannot be used."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._layout = file_layout(spec.block_nbytes)
        self._num_pages = count = max(1, min(_MAX_PAGES, _PAGES_NBYTES // spec.block_nbytes))
        self._pages = memoryview(bytearray(count * spec.block_nbytes))
        self._zeros = bytes(len(self._pages))
        defaults = StoreConfig(root=spec.root)
        # Patient: a replay counts what the root holds, not what came in time.
        config = replace(
            defaults,
            io_threads=spec.io_threads,
            direct_io=cast("Literal['auto', 'on', 'off']", spec.direct_io),
            transport="host",
            staging_bytes=spec.io_threads * 4 * self._layout.file_nbytes,
            load_deadline_s=PATIENCE_S,
            lookup_timeout_s=defaults.lookup_timeout_s * spec.speed
            if spec.speed
            else _FULL_SPEED_TIMEOUT_S,
            max_bytes=spec.max_nbytes,
            keep_free=spec.keep_free_nbytes,
            access="group" if Root.open(spec.root, create=True).file_mode & 0o060 else "user",
        )
        ttls = (config.lookup_timeout_s, POSITIVE_TTL_S, NEGATIVE_TTL_S, QUARANTINE_S)
        self._clock = TraceClock(spec.speed, 2 * max(ttls))
        self._kv = KvStore(
            config,
            replay_identity(spec.trace_digest, spec.block_nbytes),
            {0: [self._pages]},
            clock=self._clock,
            patient=True,
            quiet=True,
        )
        self.directory = self._kv.directory
        self._mover, self.lookup = self._kv.mover, self._kv.lookup
        self.description = self._mover.description
        # One for each page of memory.
        none = ChunkId(b"", 0)
        self._plans = [self._kv.moves(none, [page])[0].plan for page in range(count)]
        self._job_id = 0

    def close(self) -> None:
        """Stop the threads; what is being written gets a moment to end."""
        self._kv.close()

    def handle(self, request: Request) -> RequestDone:
        """Look the request's blocks up, load the hit prefix, store the rest; returns when all is visible."""
        self._clock.next_request()
        self.step()
        chunks = [self._chunk(hash_id) for hash_id in request.hash_ids]
        done = RequestDone()
        start = time.perf_counter()
        found = self._lookup(chunks, done)
        looked_up = time.perf_counter()
        if not self._spec.speed:
            self._take_late_answers(chunks)
        loading = time.perf_counter()
        done.hits = self._load(chunks[:found], done)
        loaded = time.perf_counter()
        self._store(chunks[done.hits :], done)
        done.lookup_s = looked_up - start
        done.load_s = loaded - loading
        done.store_s = time.perf_counter() - loaded
        return done

    def step(self) -> None:
        """Take news of the maintenance process: how full the root is, and what was pruned."""
        self.lookup.end_step()

    # --- lookup -----------------------------------------------------------------------------

    def _chunk(self, hash_id: int) -> ChunkId:
        return ChunkId(block_key(self._spec.trace_digest, hash_id), 0)

    def _lookup(self, chunks: Sequence[ChunkId], done: RequestDone) -> int:
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

    def _load(self, prefix: Sequence[ChunkId], done: RequestDone) -> int:
        """Load a prefix and compare every byte; returns how many chunks of it came, up to the first bad."""
        bad: set[ChunkId] = set()
        unique = list(dict.fromkeys(prefix))
        for at in range(0, len(unique), self._num_pages):
            bad |= self._load_pages(unique[at : at + self._num_pages], done)
        return next((i for i, chunk in enumerate(prefix) if chunk in bad), len(prefix))

    def _load_pages(self, chunks: Sequence[ChunkId], done: RequestDone) -> set[ChunkId]:
        nbytes = self._spec.block_nbytes
        # Or a load that did nothing would find the bytes of an earlier one.
        self._pages[: len(chunks) * nbytes] = self._zeros[: len(chunks) * nbytes]
        self._job_id += 1
        self._mover.load(self._job_id, self._moves(chunks))
        bad: set[ChunkId] = set()

        def all_ended() -> bool:
            for result in self._mover.poll():
                if result.job_id == self._job_id:  # and not a store, whose news came first
                    bad.update(file.chunk for file in result.bad)
                    return True
            return False

        self._wait(all_ended)
        self._count(done, self._kv.take_news())
        for i, chunk in enumerate(chunks):
            if chunk in bad:
                continue
            done.loaded += 1
            done.read_nbytes += self._layout.file_nbytes
            page = self._pages[i * nbytes : (i + 1) * nbytes].tobytes()
            expected = block_content(chunk.key_hash, nbytes)
            if page != expected:
                bad.add(chunk)
                done.wrong_nbytes += sum(a != b for a, b in zip(page, expected, strict=True))
        return bad

    # --- store ------------------------------------------------------------------------------

    def _store(self, rest: Sequence[ChunkId], done: RequestDone) -> None:
        waiting = deque(dict.fromkeys(rest))
        nbytes = self._layout.file_nbytes
        waits_since: float | None = None
        while waiting:
            batch: list[ChunkId] = []
            while waiting and len(batch) < self._num_pages:
                if self.lookup.begin_store([waiting[0]]):
                    batch.append(waiting[0])
                elif self.lookup.presence.known_present(waiting[0]):
                    done.existing += 1
                else:
                    break
                waiting.popleft()
            if batch:
                waits_since = None
                done.in_flight_nbytes = max(done.in_flight_nbytes, len(batch) * nbytes)
                self._store_pages(batch, done)
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
                raise ReplayError(
                    f"no room for a chunk of {nbytes} bytes within {PATIENCE_S:g} s; expected the "
                    "maintenance process to prune"
                )
            time.sleep(_ROOM_POLL_S)
            self.step()
            done.waited_s += time.monotonic() - now

    def _store_pages(self, chunks: Sequence[ChunkId], done: RequestDone) -> None:
        nbytes = self._spec.block_nbytes
        for i, chunk in enumerate(chunks):
            self._pages[i * nbytes : (i + 1) * nbytes] = block_content(chunk.key_hash, nbytes)
        self._job_id += 1
        self._mover.store(self._job_id, self._moves(chunks))
        ended: set[ChunkId] = set()
        free = False

        def all_ended() -> bool:
            nonlocal free
            free |= any(result.job_id == self._job_id for result in self._mover.poll())
            news = self._kv.take_news()
            ended.update(news.stored, news.not_stored)
            self._count(done, news)
            return free and len(ended) == len(chunks)

        self._wait(all_ended)

    # --- jobs -------------------------------------------------------------------------------

    def _moves(self, chunks: Sequence[ChunkId]) -> list[FileMove]:
        use = Use(
            bytearray(8), 0
        )  # each time: the trace may be faster than any interval of touches
        pairs = zip(chunks, self._plans, strict=False)
        return [FileMove(FileId(*chunk), plan, use) for chunk, plan in pairs]

    def _wait(self, ended: Callable[[], bool]) -> None:
        end = time.monotonic() + 3 * PATIENCE_S
        while not ended():
            if time.monotonic() > end:
                raise ReplayError(f"a job did not end in {3 * PATIENCE_S:g} s")
            time.sleep(_POLL_S)

    def _count(self, done: RequestDone, news: News) -> None:
        """Put what became of files into the numbers of the request."""
        done.written_nbytes += news.written_nbytes
        for (metric, label), amount in self._mover.counters.drain().items():
            if metric is metrics.STORED_CHUNKS:
                done.stored += int(amount)
            elif metric is metrics.STORES_SKIPPED and label == Status.EXISTS.value:
                done.existing += int(amount)
            elif metric is metrics.STORES_SKIPPED and amount:
                done.failures[f"store {label}"] += int(amount)
            elif metric is metrics.LOAD_FAILURES and amount:
                done.failures[f"load {label}"] += int(amount)


# --- a process of its own ---------------------------------------------------------------------


def run_worker(pipe: Connection, spec: EngineSpec) -> None:
    """Handle requests from `pipe` until None comes or the other end is gone.

    Answers a RequestDone to each; first of all the data path's description, and a ReplayError at any time.
    """
    # Ctrl-C reaches the whole process group. It is the parent that stops: it closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        engine = Engine(spec)
        try:
            pipe.send(engine.description)
            while True:
                while not pipe.poll(_IDLE_POLL_S):
                    engine.step()
                request = pipe.recv()
                if request is None:
                    return
                pipe.send(engine.handle(request))
        finally:
            engine.close()
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # nobody is interested any more; a disk that hangs must not keep this process
    except (ReplayError, FskvError, OSError, MemoryError) as error:
        with contextlib.suppress(OSError):
            pipe.send(ReplayError(str(error)))
