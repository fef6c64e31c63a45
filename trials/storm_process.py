"""What runs in the processes of the storm: writers, readers, and stations that do what they are told.

Each is the `run` of a `benchmarks.child.Child` and ends when its connection does, at the latest at
`setting.ends_at`. Nobody here judges: what was loaded stays in pages that the controller maps, until the
controller says that it has looked.
"""

from __future__ import annotations

import os
import random
import time
from abc import ABC, abstractmethod
from collections import deque
from multiprocessing.connection import Connection

from benchmarks.rig import BenchmarkError
from fskv.data_path.job import FileOutcome, JobResult
from fskv.types import Presence, Status
from trials.storm_content import content, poison
from trials.storm_party import Party, Setting

_STEP_S = 0.001
_MAX_JOB_CHUNKS = 4
_SETTLE_S = 30.0
_EVICTED = 0.7  # of what is stored was there, and goes first: else hardly a kill would meet a write


class _Worker(ABC):
    """What writers and readers have in common: jobs, places, and an end."""

    def __init__(self, connection: Connection, setting: Setting) -> None:
        self.connection = connection
        self.setting = setting
        connection.send(_usage())  # before anything of fskv was made
        self.party = Party(setting)
        self.rng = random.Random(setting.seed)  # noqa: S311  no secret
        self.free = deque(range(setting.num_places))
        self.open: dict[int, list[tuple[int, int]]] = {}  # job -> (number, place)
        self.num_jobs = 0

    def goes_on(self) -> bool:
        """Handle what the controller says; False when it has said "stop" or is gone."""
        while self.connection.poll():
            said = self.connection.recv()
            if said == "stop":
                return False
            self.free.extend(said)
        if time.monotonic() > self.setting.ends_at:
            raise BenchmarkError("the process has reached its own deadline")
        return True

    def take_places(self, count: int) -> list[int]:
        return [self.free.popleft() for _ in range(count)]

    def submit(self, numbers: list[int], places: list[int], *, is_load: bool) -> None:
        self.num_jobs += 1
        self.open[self.num_jobs] = list(zip(numbers, places, strict=True))
        requests = self.party.requests(numbers, places)
        submit = self.party.runner.submit_load if is_load else self.party.runner.submit_store
        submit(self.num_jobs, requests, None)

    def step(self) -> None:
        """Do what an engine's worker does once a step."""
        for result in self.party.runner.poll():
            self.reported(result, self.open.pop(result.job_id))
        for outcome in self.party.runner.take_outcomes():
            what = "load" if outcome.is_load else "store"
            self.party.tally.add(f"{what}.{outcome.status.value}")
            self.ended(outcome)
        time.sleep(_STEP_S)

    @abstractmethod
    def reported(self, result: JobResult, chunks: list[tuple[int, int]]) -> None:
        """Take what became of a job of these (number, place)."""

    @abstractmethod
    def ended(self, outcome: FileOutcome) -> None:
        """Take what became of a chunk."""

    def end(self) -> None:
        """Let everything come to its end and close; then stay, to be looked at, until the connection ends."""
        end = time.monotonic() + _SETTLE_S
        while self.open and time.monotonic() < end:
            self.step()
        self.party.settle(_SETTLE_S)
        state = self.party.state()
        self.connection.send({**state, "slots": self.party.close()})
        while True:
            self.connection.recv()  # until the controller is done with us


class Writer(_Worker):
    """Stores chunks that it draws, until it is killed."""

    def run(self) -> None:
        self.party.tally.add("ready")
        while self.goes_on():
            count = self.rng.randint(1, _MAX_JOB_CHUNKS)
            if len(self.free) >= count:
                numbers = self.rng.sample(range(self.setting.num_chunks), count)
                places = self.take_places(count)
                for number, place in zip(numbers, places, strict=True):
                    self.party.pages.write(place, content(number))
                    if self.rng.random() < _EVICTED:
                        self.party.evict(number)
                self.submit(numbers, places, is_load=False)
            self.step()
        self.end()

    def reported(self, result: JobResult, chunks: list[tuple[int, int]]) -> None:
        # The pages are the engine's again, which computes something else in them: what is gathered later
        # would be stored under a good checksum, and be seen.
        for number, place in chunks:
            self.party.pages.write(place, poison(number))
            self.free.append(place)

    def ended(self, outcome: FileOutcome) -> None:
        """Nobody waits for a store."""


class Reader(_Worker):
    """Looks chunks up, loads what is there, and lets the controller see what came."""

    def __init__(self, connection: Connection, setting: Setting) -> None:
        super().__init__(connection, setting)
        self._asked: deque[int] = deque()
        self._found: list[int] = []

    def run(self) -> None:
        self.party.tally.add("ready")
        while self.goes_on():
            self._look_up()
            count = self.rng.randint(1, _MAX_JOB_CHUNKS)
            if len(self._found) >= count and len(self.free) >= count:
                numbers, self._found = self._found[:count], self._found[count:]
                places = self.take_places(count)
                for number, place in zip(numbers, places, strict=True):
                    self.party.pages.write(place, poison(number))
                self.submit(numbers, places, is_load=True)
            self.step()
        self.end()

    def _look_up(self) -> None:
        while len(self._asked) + len(self._found) < 2 * _MAX_JOB_CHUNKS:
            self._asked.append(self.rng.randrange(self.setting.num_chunks))
        for _ in range(len(self._asked)):
            number = self._asked.popleft()
            presence = self.party.lookup(number)
            if presence is Presence.UNKNOWN:
                self._asked.append(number)
            elif presence is Presence.HIT:
                self._found.append(number)
        self.party.index.flush()

    def reported(self, result: JobResult, chunks: list[tuple[int, int]]) -> None:
        if result.failed:
            self.free.extend(place for _, place in chunks)
        else:
            self.connection.send(chunks)

    def ended(self, outcome: FileOutcome) -> None:
        if outcome.status is not Status.OK:
            self.party.index.mark_failed(outcome.file.chunk, outcome.status)


class Station:
    """Does one thing after the other, as told, and says what came of it."""

    def __init__(self, connection: Connection, setting: Setting) -> None:
        self._connection = connection
        self._setting = setting
        connection.send(_usage())
        self._party = Party(setting)
        self._num_jobs = 0

    def run(self) -> None:
        while (left := self._setting.ends_at - time.monotonic()) > 0:
            if not self._connection.poll(min(left, 1.0)):
                continue
            what, *arguments = self._connection.recv()
            self._connection.send(getattr(self, f"_{what}")(*arguments))
        raise BenchmarkError("the process has reached its own deadline")

    def _store(self, numbers: list[int]) -> list[str]:
        """Store chunk i of the list from place i; the statuses come in the list's order."""
        for place, number in enumerate(numbers):
            self._party.pages.write(place, content(number))
        return self._job(numbers, is_load=False)

    def _load(self, numbers: list[int]) -> list[str]:
        """Load chunk i of the list into place i, which holds poison before."""
        for place, number in enumerate(numbers):
            self._party.pages.write(place, poison(number))
        return self._job(numbers, is_load=True)

    def _close(self) -> int:
        self._party.settle(_SETTLE_S)
        return self._party.close()

    def _job(self, numbers: list[int], *, is_load: bool) -> list[str]:
        runner = self._party.runner
        self._num_jobs += 1
        submit = runner.submit_load if is_load else runner.submit_store
        end = time.monotonic() + _SETTLE_S
        submit(self._num_jobs, self._party.requests(numbers, range(len(numbers))), None)
        outcomes = list[FileOutcome]()
        while len(outcomes) < len(numbers):
            runner.poll()
            outcomes += [o for o in runner.take_outcomes() if o.is_load == is_load]
            if time.monotonic() > end:
                raise BenchmarkError(f"job {self._num_jobs}: only {outcomes}")
            time.sleep(_STEP_S)
        statuses = {outcome.file.chunk.key_hash: outcome.status.value for outcome in outcomes}
        return [statuses[self._party.chunk(number).key_hash] for number in numbers]


def write(connection: Connection, setting: Setting) -> None:
    Writer(connection, setting).run()


def read(connection: Connection, setting: Setting) -> None:
    Reader(connection, setting).run()


def obey(connection: Connection, setting: Setting) -> None:
    Station(connection, setting).run()


def _usage() -> tuple[int, int]:
    """Return threads and open files of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
