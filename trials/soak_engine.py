"""The engines of trials.soak: a thread of the parent asks each one, compares, and starts it again."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.engine_process import START_S, EngineProcess, ending
from benchmarks.rig import BenchmarkError
from trials.soak_child import Record, Setup, serve
from trials.soak_judge import CHUNK_TOKENS, Pool, mean_file_nbytes

_METRICS_EVERY = 25  # requests
_ANSWER_S = 120.0
_REFERENCE_S = 1800.0
_WRONG_CLOCK = Path(__file__).parent / "other_clock"
_environment = threading.Lock()  # of this process, which a child begins with


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that was answered."""

    at: float
    idx: int
    seconds: float
    cached_tokens: int
    wrong: bool


class Driver:
    """Asks one engine for prompts on a thread of its own; an engine that is gone is started again.

    The counters are read by other threads while it runs, and are whole when it has ended.
    """

    def __init__(
        self,
        setup: Setup,
        draws: Iterator[int],
        expected: Sequence[tuple[int, ...]],
        broken: Collection[str],
    ) -> None:
        self.name = setup.name
        self.asked: list[Asked] = []
        self.failures: list[str] = []
        self.num_lives = 0
        self.ready = False
        self._setup, self._draws, self._expected = setup, draws, expected
        self._broken = frozenset(broken)
        self._engine: EngineProcess | None = None
        self._killed = False
        self._clock_s: float | None = None  # of the next life, if it is to begin
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._now: Counter[str] = Counter()  # of the present life
        self._before: Counter[str] = Counter()
        self._recent: dict[int, None] = {}

    def start(self) -> None:
        self._thread.start()

    @property
    def pid(self) -> int:
        """The engine's process; 0 while there is none."""
        engine = self._engine
        return engine.child.pid if engine is not None and self.ready else 0

    @property
    def counted(self) -> Counter[str]:
        """Counters of fskv, as last heard before a kill; those with a reason, by reason."""
        return self._before + self._now

    def kill(self) -> None:
        """SIGKILL the engine, wherever it is."""
        if pid := self.pid:
            self._killed = True
            self.ready = False
            os.kill(pid, signal.SIGKILL)

    def restart(self, clock_s: float) -> None:
        """Let the engine end, and start it with a clock that is wrong by `clock_s` seconds."""
        self.ready = False
        self._clock_s = clock_s

    def again(self, count: int, limit_s: float) -> int:
        """End the thread; ask again and again for prompts of late, and return how many were a hit in time."""
        self._over.set()
        self._thread.join(_ANSWER_S + START_S)
        hits = 0
        for idx in list(self._recent)[-count:]:
            end = time.monotonic() + limit_s
            self._ask(idx)
            while (found := self._ask(idx)) is not None and not found.cached_tokens:
                if time.monotonic() > end:
                    break
                time.sleep(0.5)  # it is being stored
            hits += found is not None and found.cached_tokens > 0
        self._hear_metrics()
        return hits

    def end(self, limit_s: float) -> None:
        """Let the engine end by itself within `limit_s`."""
        self._over.set()
        self._thread.join(limit_s)
        if self._engine is not None:
            self._engine.child.end(limit_s)

    # --- its thread -------------------------------------------------------------------------

    def _run(self) -> None:
        self._begin(0.0)
        while not self._over.is_set():
            if (clock_s := self._clock_s) is not None and self._engine is not None:
                self._clock_s = None
                self._engine.child.end(_ANSWER_S)
                self._begin(clock_s)
            self._ask(next(self._draws))
            if len(self.asked) % _METRICS_EVERY == 0:
                self._hear_metrics()

    def _begin(self, clock_s: float) -> None:
        self._before, self._now = self.counted, Counter()
        first = self.num_lives == 0
        broken = self._broken if first else self._broken - {"engine"}
        path = f"{_WRONG_CLOCK}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        changed = {"PYTHONPATH": path, "FSKV_SOAK_CLOCK_S": str(clock_s)} if clock_s else {}
        for attempt in (1, 2):
            with _environment, mock.patch.dict(os.environ, changed):
                name = f"the {self.name} engine"
                self._engine = EngineProcess(name, self._setup.log, serve, self._setup, broken)
            self.num_lives += 1
            self._killed = False
            try:
                self._engine.hear(START_S)
            except BenchmarkError as error:
                self.failures.append(f"start {attempt}: {error}")
                self._engine.child.kill()
                continue
            self.ready = True
            return
        self._over.set()

    def _ask(self, idx: int) -> Record | None:
        if self._engine is None or (answer := self._said("ask", [idx])) is None:
            return None
        (record,) = answer
        wrong = record.tokens != self._expected[idx]
        self.asked.append(Asked(record.at, idx, record.seconds, record.cached_tokens, wrong))
        self._recent.pop(idx, None)
        self._recent[idx] = None
        return record  # type: ignore[no-any-return]

    def _hear_metrics(self) -> None:
        if self._engine is not None and (answer := self._said("counters")) is not None:
            self._now = answer

    def _said(self, *what: Any) -> Any:
        """Return the engine's answer; None if it is gone, which is a failure unless it was killed."""
        assert self._engine is not None
        self._engine.child.say(what)
        try:
            return self._engine.hear(_ANSWER_S)
        except BenchmarkError as error:
            self.ready = False
            if not self._killed:
                self.failures.append(str(error))
            self._engine.child.kill()
            self._begin(0.0)
            return None


# --- before -----------------------------------------------------------------------------


def references(directory: str, model: str, pool: Pool) -> tuple[list[Record], int]:
    """Return what every prompt gives without fskv, and what a chunk file takes on disk."""
    root = os.path.join(directory, "probe")
    os.mkdir(root)
    extra = {"hybrid_chunk_size": CHUNK_TOKENS, "maintenance": "off"}
    setups = [
        Setup("one reference", model, f"{directory}/one.log", pool),
        Setup("other reference", model, f"{directory}/other.log", pool),
        Setup("probing", model, f"{directory}/probe.log", pool, root, extra),
    ]
    engines: list[EngineProcess] = []
    with ending(engines):
        for setup in setups:
            name = f"the {setup.name} engine"
            engines.append(EngineProcess(name, setup.log, serve, setup, frozenset()))
        for engine in engines:
            engine.hear(START_S)
        *asked, probe = engines
        for at, engine in enumerate(asked):
            engine.child.say(("ask", list(range(at, pool.num_prompts, len(asked)))))
        probe.child.say(("ask", [0, 1]))
        probe.hear(_REFERENCE_S)
        probe.child.say(("settle",))
        probe.hear(_REFERENCE_S)
        answers = [record for engine in asked for record in engine.hear(_REFERENCE_S)]
        return sorted(answers, key=lambda record: record.idx), mean_file_nbytes(root)
