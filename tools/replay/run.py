"""Runs a replay: engines in processes of their own, requests dealt to them in turn, and a walk beside them.

Without `concurrent` one request is under way at a time, whoever handles it, and the next begins when all
that it stored is visible. So the hits must be those of a simulator that knows the whole trace, whatever
the number of processes. The parent only deals and collects; it never touches a chunk.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fskv.root.filesystem import Space, unit_nbytes

from ..bench.workspace import StopSignals
from . import root as replay_root
from . import trace as replay_trace
from .engine import EngineSpec, ReplayError, RequestDone, file_layout, run_worker
from .report import Interval, Summary, percentiles
from .root import ReplayRoot, Sample, run_sampler
from .trace import Request, Trace

if TYPE_CHECKING:
    from rich.console import Console

_START_S = 120.0  # imports and opening the root
_END_S = 10.0

_SIZE = re.compile(r"(\d{1,15})(?:\s*(B|KiB|MiB|GiB|TiB))?", re.ASCII)
_MAX_SIZE = 1 << 60
_LEAST_BLOCKS = 16
_UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to replay and how; see `fskv replay --help`. Raises ValueError, one sentence, for nonsense."""

    trace: str
    root: str
    block_nbytes: int
    capacity: str | None
    keep_free: str | None
    processes: int
    concurrent: bool
    speed: float | None
    limit: int | None
    io_threads: int
    direct_io: str
    sample_interval_s: float
    intervals: int
    keep: bool

    def __post_init__(self) -> None:
        if self.direct_io not in ("auto", "on", "off"):
            raise ValueError(f"--direct-io: found {self.direct_io!r}, expected auto, on or off")
        if self.speed is not None and not 0 < self.speed < 1e9:
            raise ValueError(f"--speed: found {self.speed}, expected more than 0 and below 1e9")
        for option, text in (("--capacity", self.capacity), ("--keep-free", self.keep_free)):
            if text is not None:
                _parse_size(option, text)

    def bound(self, root: str) -> tuple[int, int] | None:
        """Return the capacity in bytes and in blocks, by what a chunk file takes on this disk."""
        if self.capacity is None:
            return None
        unit = unit_nbytes(os.statvfs(root)) or 1
        nbytes = -(-file_layout(self.block_nbytes).file_nbytes // unit) * unit
        number, is_size = _parse_size("--capacity", self.capacity)
        return (number, number // nbytes) if is_size else (number * nbytes, number)

    def check_room(self, root: str) -> None:
        """Raise ValueError where the replay could only wait for room that never comes."""
        bound = self.bound(root)
        least = _LEAST_BLOCKS * self.processes
        if bound is not None and bound[1] < least:
            raise ValueError(
                f"--capacity: found {self.capacity!r}, {bound[1]} blocks, expected at least {least}: "
                f"{_LEAST_BLOCKS} for each process"
            )
        space = Space.of(root)
        keep_free = _parse_size("--keep-free", self.keep_free)[0] if self.keep_free else 0
        if space.total_nbytes and keep_free >= space.free_nbytes:
            raise ValueError(
                f"--keep-free: found {self.keep_free!r}, expected less than what is free now, "
                f"{space.free_nbytes} bytes"
            )


def _parse_size(option: str, text: str) -> tuple[int, bool]:
    """Return a number, and whether it had a unit: then it is bytes."""
    match = _SIZE.fullmatch(text.strip())
    number = int(match[1]) * _UNITS[match[2] or "B"] if match else 0
    if match is None or number > _MAX_SIZE or (number <= 0 and option != "--keep-free"):
        raise ValueError(
            f"{option}: found {text!r}, expected a whole number above 0, or a size such as 80MiB, of "
            "at most 1 EiB"
        )
    return number, match[2] is not None


def run_replay(
    settings: Settings,
    *,
    console: Console,
    stop: StopSignals,
    say: Callable[[str], None],
    emit: Callable[[Interval], None],
) -> tuple[Summary, Trace]:
    """Replay the trace and return what came out; `emit` gets an Interval from time to time.

    Raises ValueError for what cannot be replayed here, ReplayError for what went wrong, OSError and FskvError
    for the root. `say` gets sentences for the user.
    """
    trace = replay_trace.read_trace(settings.trace, settings.limit)
    root = replay_root.prepare(settings.root, keep=settings.keep)
    try:
        replay = _Replay(settings, trace, root, emit)
        with replay.processes():
            replay.run(console, stop)
            replay.end()
        return replay.summary(), trace
    finally:
        if not settings.keep:
            # Twice: Stopped is raised only once, so it can cut the first short but not the second.
            try:
                root.remove()
            finally:
                if not root.remove():
                    say(f"{root.path}: could not be emptied; empty it by hand")


class _Replay:
    """One run; `summary` when it is over."""

    def __init__(
        self,
        settings: Settings,
        trace: Trace,
        root: ReplayRoot,
        emit: Callable[[Interval], None],
    ) -> None:
        self._settings = settings
        self._trace = trace
        self._root = root
        self._emit = emit
        self._bound = settings.bound(root.path)
        settings.check_room(root.path)
        self._ideal = replay_trace.ideal_hits(trace.requests)
        self._lru = (
            replay_trace.lru_hits(trace.requests, self._bound[1]) if self._bound else self._ideal
        )
        self._done: list[RequestDone | None] = [None] * len(trace.requests)
        self._num_told = 0  # requests that an Interval has covered
        self._per_interval = max(1, -(-len(trace.requests) // settings.intervals))
        self._num_done = 0
        self._files_before = replay_root.walk(root.path).num_files
        self._files_after = 0
        self._max_nbytes = 0
        self._latest: Sample | None = None
        self._num_samples = 0
        self._started_at = 0.0
        self._seconds = 0.0
        self._data_path = ""
        self._workers: list[_Child] = []
        self._sampler: _Child | None = None

    # --- processes --------------------------------------------------------------------------

    @contextlib.contextmanager
    def processes(self) -> Iterator[None]:
        """Start the engines and the sampler; they are gone at the end."""
        settings = self._settings
        keep_free = settings.keep_free
        spec = EngineSpec(
            root=self._root.path,
            trace_digest=self._trace.digest,
            block_nbytes=settings.block_nbytes,
            max_nbytes=self._bound[0] if self._bound else None,
            keep_free_nbytes=_parse_size("--keep-free", keep_free)[0] if keep_free else 0,
            io_threads=settings.io_threads,
            direct_io=settings.direct_io,
            speed=settings.speed,
        )
        try:
            for i in range(settings.processes):
                self._workers.append(_Child(f"engine {i}", run_worker, spec))
            for worker in self._workers:
                self._data_path = worker.receive(_START_S)
            self._sampler = _Child(
                "sampler", run_sampler, self._root.path, settings.sample_interval_s
            )
            yield
        finally:
            children = [*self._workers, *([self._sampler] if self._sampler else [])]
            for child in children:
                child.let_go()
            end = time.monotonic() + _END_S
            for child in children:
                child.join(end)

    # --- the loop ---------------------------------------------------------------------------

    def run(self, console: Console, stop: StopSignals) -> None:
        """Deal the requests and collect what became of them."""
        progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._started_at = time.monotonic()
        with progress:
            bar = progress.add_task("requests", total=len(self._done))
            shown_at = 0.0
            for _ in self._steps():
                stop.check()
                now = time.monotonic()
                if now - shown_at > 0.2:
                    shown_at = now
                    progress.update(bar, completed=self._num_done)
        self._seconds = time.monotonic() - self._started_at

    def _steps(self) -> Iterator[None]:
        requests = self._trace.requests
        count = len(self._workers)
        next_of = list(range(count))  # each engine's next request; round robin
        busy: dict[Any, tuple[_Child, int]] = {}  # by pipe
        while self._num_done < len(requests):
            timeout_s = 1.0
            # With a baton the only engine that may begin is the one whose turn it is.
            turns = range(count) if self._settings.concurrent else [min(next_of) % count]
            for turn in turns:
                worker, index = self._workers[turn], next_of[turn]
                if (
                    index >= len(requests)
                    or worker.pipe in busy
                    or (busy and not self._settings.concurrent)
                ):
                    continue
                due_s = self._due_s(requests[index])
                if due_s > 0:
                    timeout_s = min(timeout_s, due_s)
                    continue
                worker.send(requests[index])
                busy[worker.pipe] = (worker, index)
                next_of[turn] += count
            sampler = [self._sampler.pipe] if self._sampler else []
            for pipe in connection.wait([*busy, *sampler], timeout_s):
                if pipe in busy:
                    worker, index = busy.pop(pipe)
                    self._done[index] = worker.receive()
                    self._num_done += 1
                    self._tell()
                elif self._sampler:
                    self._take_sample(self._sampler.receive())
            yield

    def _due_s(self, request: Request) -> float:
        """Return in how many seconds a request is due; never at full speed."""
        speed = self._settings.speed
        if not speed:
            return 0.0
        first = self._trace.requests[0].timestamp_ms
        at = self._started_at + (request.timestamp_ms - first) / 1000 / speed
        return at - time.monotonic()

    def _take_sample(self, sample: Sample) -> None:
        self._latest = sample
        self._num_samples += 1
        self._max_nbytes = max(self._max_nbytes, sample.nbytes)

    def end(self) -> None:
        """Let the engines go and look at the disk a last time."""
        for worker in self._workers:
            worker.let_go()
        end = time.monotonic() + _END_S
        for worker in self._workers:
            worker.join(end)
        if self._sampler:
            self._sampler.send(None)
            with contextlib.suppress(ReplayError):
                while True:  # until the pipe ends, after the last one
                    self._take_sample(self._sampler.receive(_START_S))
        if self._latest:
            self._files_after = self._latest.num_files

    # --- what came out ----------------------------------------------------------------------

    def _tell(self) -> None:
        """Emit an Interval for each that is complete: all its requests, and all before, have ended."""
        while self._num_told < len(self._done):
            stop = min(self._num_told + self._per_interval, len(self._done))
            part = self._done[self._num_told : stop]
            known = [done for done in part if done is not None]
            if len(known) < len(part):
                return
            requests = self._trace.requests[self._num_told : stop]
            self._emit(
                Interval(
                    requests=stop,
                    trace_s=requests[-1].timestamp_ms / 1000,
                    seconds=time.monotonic() - self._started_at,
                    blocks=sum(len(request.hash_ids) for request in requests),
                    hits=sum(done.hits for done in known),
                    ideal_hits=sum(self._ideal[self._num_told : stop]),
                    lru_hits=sum(self._lru[self._num_told : stop]),
                    stored=sum(done.stored for done in known),
                    bytes_on_disk=self._latest.nbytes if self._latest else None,
                )
            )
            self._num_told = stop

    def summary(self) -> Summary:
        done = [one for one in self._done if one is not None]
        settings = self._settings
        blocks = self._trace.num_blocks
        failures: Counter[str] = Counter()
        for one in done:
            failures.update(one.failures)
        in_flight = [
            max((one.in_flight_nbytes for one in done[i :: settings.processes]), default=0)
            for i in range(settings.processes)
        ]
        p50, p99, most = percentiles([one.lookup_s for one in done])
        stored = sum(one.stored for one in done)
        return Summary(
            hit_ratio=_ratio(sum(one.hits for one in done), blocks),
            ideal_hit_ratio=_ratio(sum(self._ideal), blocks),
            lru_hit_ratio=_ratio(sum(self._lru), blocks),
            requests=len(done),
            blocks=blocks,
            block_bytes=settings.block_nbytes,
            file_bytes=file_layout(settings.block_nbytes).file_nbytes,
            processes=settings.processes,
            concurrent=settings.concurrent,
            speed=settings.speed,
            continued=self._root.continued,
            seconds=self._seconds,
            bytes_written=sum(one.written_nbytes for one in done),
            bytes_read=sum(one.read_nbytes for one in done),
            loaded_files=sum(one.loaded for one in done),
            stored_files=stored,
            existing_files=sum(one.existing for one in done),
            evicted_files=max(0, self._files_before + stored - self._files_after),
            failures=dict(sorted(failures.items())),
            wrong_bytes=sum(one.wrong_nbytes for one in done),
            lookup_p50_s=p50,
            lookup_p99_s=p99,
            lookup_max_s=most,
            lookup_s=sum(one.lookup_s for one in done),
            load_s=sum(one.load_s for one in done),
            store_s=sum(one.store_s for one in done),
            waited_s=sum(one.waited_s for one in done),
            capacity_bytes=self._bound[0] if self._bound else None,
            capacity_blocks=self._bound[1] if self._bound else None,
            max_bytes_on_disk=self._max_nbytes,
            max_in_flight_bytes=sum(in_flight) if settings.concurrent else max(in_flight),
            samples=self._num_samples,
            data_path=self._data_path,
        )


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


class _Child:
    """A process of the replay and the pipe to it."""

    def __init__(self, name: str, target: Callable[..., None], *arguments: object) -> None:
        # Not forked: this process has threads, and an engine's are not to be found in another.
        context = multiprocessing.get_context("spawn")
        self._name = name
        self.pipe, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(
            target=target, args=(theirs, *arguments), name=f"fskv-replay {name}", daemon=True
        )
        # It unblocks SIGINT when it starts its own process (CPython 3.11): before, not inside of `start`.
        resource_tracker.ensure_running()
        # Ctrl-C before it has said what it does with it would print a traceback.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()

    def send(self, message: object) -> None:
        try:
            self.pipe.send(message)
        except OSError:
            raise self._died() from None

    def receive(self, timeout_s: float | None = None) -> Any:
        """Return the next message; raises ReplayError: the one received, or because there will be none."""
        try:
            if timeout_s is not None and not self.pipe.poll(timeout_s):
                raise ReplayError(f"{self._name}: said nothing for {timeout_s:g} s")
            message = self.pipe.recv()
        except (EOFError, OSError):
            raise self._died() from None
        if isinstance(message, ReplayError):
            raise message
        return message

    def _died(self) -> ReplayError:
        self._process.join(1.0)
        return ReplayError(f"{self._name}: ended with exit code {self._process.exitcode}")

    def let_go(self) -> None:
        """Tell it to end; it does so too when the pipe is closed."""
        with contextlib.suppress(OSError, ValueError):
            self.pipe.send(None)

    def join(self, end: float) -> None:
        """Wait for its end until `end`, then end it."""
        self._process.join(max(0.0, end - time.monotonic()))
        if self._process.is_alive():
            self._process.kill()
            self._process.join(1.0)
        self.pipe.close()
