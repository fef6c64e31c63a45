"""The storm: writers are killed at random moments while others read and files are damaged.

The controller draws the moments from its seed: it kills a writer, starts another in its place, plants damage,
and between that compares every chunk that a reader was served. In the end who is still alive must give back
all it has taken, and one process alone must be able to heal what is damaged.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from dataclasses import replace
from multiprocessing import connection as mp
from typing import Any

from benchmarks.report import say
from benchmarks.rig import BenchmarkError
from trials.storm_accounts import (
    CALM_S,
    Left,
    Watched,
    accounts,
    collect_orphans,
    parts_below,
    split_parts,
)
from trials.storm_content import HEADER_NBYTES, Judge, file_name, is_whole_file
from trials.storm_damage import Damage
from trials.storm_party import Setting, open_namespace
from trials.storm_process import obey, read, write

NUM_CHUNKS = 64
NUM_WRITERS = 3
NUM_READERS = 2
NUM_PLACES = 16
_SERVED_PER_KILL = 50  # at least; a busy machine takes longer for that
_PLANTED_PER_KILL = 10
_HEAL_ROUNDS = 4
_HEAL_AT_ONCE = 16


class KillStorm:
    """One storm below `directory`; the controller's thread owns everything."""

    def __init__(
        self,
        directory: str,
        *,
        kills: int,
        mean_s: float,
        seed: int,
        direct_io: str,
        broken: str | None,
        limit_s: float,
    ) -> None:
        """A kill every `mean_s` seconds on average; all is over within `limit_s`."""
        self._rng = random.Random(seed)  # noqa: S311  reproducible, not secret
        self._num_kills = kills
        self._mean_s = mean_s
        self._directory = directory
        self.root = os.path.join(directory, "root")
        os.mkdir(self.root)
        self._names = open_namespace(self.root)
        self._chunks_dir = os.path.join(self._names.path, "chunks")
        self._ends_at = time.monotonic() + limit_s
        self._setting = Setting(
            root=self.root,
            pages_path="",
            num_places=NUM_PLACES,
            num_chunks=NUM_CHUNKS,
            seed=seed,
            native=True,
            direct_io=direct_io,
            ends_at=self._ends_at,
            broken=broken,
        )
        self._damage = Damage(
            self._chunks_dir, NUM_CHUNKS, self._rng, os.path.join(directory, "spare")
        )
        self.judge = Judge()
        self._num_started = 0
        self._writers: list[Watched] = []
        self._readers: list[Watched] = []
        self._killed: dict[int, str] = {}  # pid -> how it ended
        self._kinds: Counter[str] = Counter()  # of those killed: native, python, starting
        self._done: Counter[str] = Counter()  # tallies of all processes

    def run(self) -> dict[str, Any]:
        try:
            self._writers = [self._start("writer") for _ in range(NUM_WRITERS)]
            self._readers = [self._start("reader", native=not at) for at in range(NUM_READERS)]
            for process in (*self._writers, *self._readers):
                process.started()
            start = time.monotonic()
            self._rage()
            seconds = time.monotonic() - start
            left = self._end()
            if self.judge.num_wrong or not all(each.good for each in left):
                healed = None  # the storm has failed: what heals now would show nothing
            else:
                healed, more = self._heal()
                left.append(more)
        finally:
            for process in (*self._writers, *self._readers):
                process.child.kill()
        return self._facts(seconds, left, healed)

    # --- processes --------------------------------------------------------------------------

    def _start(self, role: str, *, native: bool | None = None) -> Watched:
        self._num_started += 1
        name = f"{role}-{self._num_started}"
        setting = replace(
            self._setting,
            pages_path=os.path.join(self._directory, f"pages-{self._num_started}"),
            seed=self._rng.getrandbits(32),
            native=self._rng.random() < 0.5 if native is None else native,
            # A writer's safeties stay: the negative control is about what readers serve.
            broken=self._setting.broken if role == "reader" else None,
        )
        if self._setting.broken == "ending":
            setting = replace(setting, broken="ending")
        return Watched(name, write if role == "writer" else read, setting)

    def _kill_one(self) -> None:
        writer = self._writers.pop(self._rng.randrange(len(self._writers)))
        counted = writer.pages.tally.counted()
        pid, native = writer.pid, writer.setting.native
        # Half of them at any moment, half with a part open: few moments are.
        aimed = self._rng.random() < 0.5 and writer.aim(self._rng)
        code = writer.kill()
        if code != -9:
            raise BenchmarkError(f"{writer.name} had ended by itself, with {code}")
        self._killed[pid] = writer.name
        self._kinds["native" if native else "python"] += 1
        self._kinds["starting"] += "ready" not in counted
        self._kinds["aimed"] += aimed
        self._count(counted)
        self._writers.append(self._start("writer"))

    def _count(self, counted: dict[str, int]) -> None:
        self._done.update({name: n for name, n in counted.items() if name != "ready"})

    # --- the storm --------------------------------------------------------------------------

    def _rage(self) -> None:
        now = time.monotonic()
        kill_at = now + self._rng.uniform(0, 2 * self._mean_s)
        plant_at = now
        while not self._has_raged():
            # Once all are killed only the planting wakes us up.
            raging = len(self._killed) < self._num_kills
            due = min(kill_at, plant_at) if raging else plant_at
            self._listen(max(0.0, due - time.monotonic()))
            now = time.monotonic()
            if now > self._ends_at:
                raise BenchmarkError(
                    f"only {len(self._killed)} kills and {self.judge.num_served} served in time"
                )
            if now >= plant_at:
                self._damage.plant()
                plant_at = now + self._rng.uniform(0, 0.02)
            if now >= kill_at and len(self._killed) < self._num_kills:
                self._kill_one()
                kill_at = now + self._rng.uniform(0, 2 * self._mean_s)
                if len(self._killed) % 50 == 0:
                    say(f"{len(self._killed)} kills, {self.judge.num_served} chunks served")

    def _has_raged(self) -> bool:
        """All were killed, and enough was damaged and served for that to mean something."""
        return (
            len(self._killed) >= self._num_kills
            and self.judge.num_served >= _SERVED_PER_KILL * self._num_kills
            and self._damage.planted.total() >= _PLANTED_PER_KILL * self._num_kills
        )

    def _listen(self, timeout_s: float) -> None:
        """Judge what readers were served, for so long at most."""
        for ready in mp.wait([reader.connection for reader in self._readers], timeout_s):
            reader = next(each for each in self._readers if each.connection is ready)
            self._judge(reader, reader.child.hear())

    def _judge(self, reader: Watched, served: list[tuple[int, int]]) -> None:
        for number, place in served:
            self.judge.look(reader.pages, number, place, self._damage.last.get(number, ""))
        reader.child.say([place for _, place in served])

    # --- afterwards -------------------------------------------------------------------------

    def _end(self) -> list[Left]:
        """Stop who is alive and close the accounts."""
        left = []
        for process in (*self._writers, *self._readers):
            process.started()
            process.child.say("stop")
        calm_at = time.monotonic() + 2 * CALM_S
        for process in (*self._writers, *self._readers):
            while not isinstance(said := process.child.hear(), dict):
                self._judge(process, said)
            left.append(process.account(said["slots"], max(0.0, calm_at - time.monotonic())))
            self._count(process.pages.tally.counted())
            process.kill()
        self._writers, self._readers = [], []
        return left

    def _heal(self) -> tuple[dict[str, Any], Left]:
        """Load, store what was not good, and load again: in the end every chunk is there and right."""
        station = Watched(
            "healer",
            obey,
            replace(
                self._setting,
                pages_path=os.path.join(self._directory, "pages-healer"),
                num_places=_HEAL_AT_ONCE,
            ),
        )
        try:
            bad = list(range(NUM_CHUNKS))
            found: list[int] = []
            for _ in range(_HEAL_ROUNDS):
                again = []
                for at in range(0, len(bad), _HEAL_AT_ONCE):
                    numbers = bad[at : at + _HEAL_AT_ONCE]
                    loaded = station.ask("load", numbers)
                    for place, status in enumerate(loaded):
                        if status == "ok":
                            self.judge.look(station.pages, numbers[place], place, "healed")
                        else:
                            again.append(numbers[place])
                found.append(len(again))
                for at in range(0, len(again), _HEAL_AT_ONCE):
                    station.ask("store", again[at : at + _HEAL_AT_ONCE])
                bad = again
                if not bad:
                    break
            whole = sum(
                is_whole_file(os.path.join(self._chunks_dir, file_name(number)), number)
                for number in range(NUM_CHUNKS)
            )
            left = station.account(station.ask("close"))
        finally:
            station.kill()
        return {"not_good_by_round": found, "whole_files": whole, "chunks": NUM_CHUNKS}, left

    def _facts(
        self, seconds: float, left: list[Left], healed: dict[str, Any] | None
    ) -> dict[str, Any]:
        parts = parts_below(self.root)
        orphans, leaked = split_parts(parts, self._killed)
        sizes = [os.path.getsize(os.path.join(self.root, part)) for part in orphans]
        problems: list[str] = []
        used = accounts(left, self.judge, problems)
        if not self.judge.num_served:
            problems.append("nothing was served")
        if leaked:
            problems.append(f"{len(leaked)} parts of processes that were not killed")
        if healed and (healed["not_good_by_round"][-1] or healed["whole_files"] < NUM_CHUNKS):
            problems.append("not every chunk healed")
        left_behind = collect_orphans(self.root)
        if left_behind:
            problems.append(f"{len(left_behind)} orphans were not collected")
        return {
            "kills": len(self._killed),
            "killed": dict(self._kinds),
            "processes_started": self._num_started,
            "seconds": round(seconds, 1),
            "wrong_by_last_damage": dict(self.judge.wrong_by_note),
            "planted": dict(self._damage.planted),
            "ended": dict(sorted(self._done.items())),
            "orphans": len(orphans),
            # From nothing to one page: killed before or in the first write. Else within or after it.
            "orphans_with_data": sum(nbytes > HEADER_NBYTES for nbytes in sizes),
            "orphans_collected": len(parts) - len(parts_below(self.root)),
            "parts_leaked": leaked,
            "healed": healed,
            **used,
            "problems": problems,
        }
