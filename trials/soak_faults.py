"""The faults of trials.soak, drawn from a seed: each kind once a round, in an order of that round's own."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from subprocess import SubprocessError

from benchmarks.report import say
from benchmarks.rig import BenchmarkError
from faults.files import chunk_files, flip_payload_bit, truncate, zero_payload
from fskv.errors import ChunkError
from fskv.root.process_id import unique_name
from trials.soak_engine import Driver
from trials.soak_places import Directory

_NUM_DAMAGED = 40  # files
_HANGS_S = 300.0  # the servers may take so long to come back
_CLOCKS_S = (-86_400.0, -60.0, 60.0, 86_400.0)


class Faults:
    """Does one fault after the other; `done` tells when each began, by time.monotonic, and which it was."""

    def __init__(
        self,
        place: Directory,
        drivers: Sequence[Driver],
        generator: random.Random,
        broken: Collection[str],
    ) -> None:
        self.done: list[tuple[float, str]] = []
        self.failures: list[str] = []
        self._place, self._drivers, self._generator = place, drivers, generator
        self._root = place.roots[0]
        self._kinds: dict[str, Callable[[float], None]] = {
            "an engine killed": self._kill,
            "files damaged": self._damage,
            "directories removed": self._remove,
            "root away": self._away,
            "clock wrong": self._clock,
        }
        if place.can_stall:
            self._kinds |= {"servers stall": self._stall, "file system full": self._fill}
        if "kv" in broken:
            self._kinds = {"wrong KV, right checksums": self._poison}
        self._round: list[str] = []

    @property
    def num_kinds(self) -> int:
        """The number of faults in a round."""
        return len(self._kinds)

    def one(self, seconds: float) -> bool:
        """Do the next fault, and return after its end. False: it could not be done.

        Raises BenchmarkError where the file system hangs for good: nothing more can be said of it.
        """
        if not self._round:
            self._round = self._generator.sample(list(self._kinds), len(self._kinds))
        kind = self._round.pop()
        say(f"{kind} ...")
        self.done.append((time.monotonic(), kind))
        thread = threading.Thread(target=self._do, args=(kind, seconds), daemon=True)
        thread.start()
        thread.join(seconds + _HANGS_S)
        if thread.is_alive():
            raise BenchmarkError(f"{kind}: the file system did not answer for {_HANGS_S:g} s")
        return not self.failures

    def _do(self, kind: str, seconds: float) -> None:
        try:
            self._kinds[kind](seconds)
        # The servers did not come back, say.
        except (AssertionError, OSError, SubprocessError) as error:
            self.failures.append(f"{kind}: {' '.join(str(error).split())}")

    def _kill(self, seconds: float) -> None:
        self._generator.choice(self._drivers).kill()

    def _clock(self, seconds: float) -> None:
        self._generator.choice(self._drivers).restart(self._generator.choice(_CLOCKS_S))

    def _stall(self, seconds: float) -> None:
        self._place.stall()
        time.sleep(seconds)
        self._place.mend()

    def _fill(self, seconds: float) -> None:
        self._place.fill()
        time.sleep(seconds)
        self._place.mend()

    def _damage(self, seconds: float) -> None:
        paths = sorted(chunk_files(self._root))
        for path in self._generator.sample(paths, min(len(paths), _NUM_DAMAGED)):
            swap = _swap(self._generator.choice(paths))
            how = self._generator.choice((flip_payload_bit, truncate, _empty, os.unlink, swap))
            # It was pruned, or found bad, meanwhile, or is damaged already.
            with contextlib.suppress(FileNotFoundError, ChunkError, ValueError):
                how(path)

    def _remove(self, seconds: float) -> None:
        """Remove half of the directories of chunks, while engines write to them."""
        directories = sorted(Path(self._root).glob("*/*@*/chunks/*"))
        for path in self._generator.sample(directories, len(directories) // 2):
            shutil.rmtree(path, ignore_errors=True)

    def _away(self, seconds: float) -> None:
        os.rename(self._root, f"{self._root}.away")
        time.sleep(seconds)
        os.rename(f"{self._root}.away", self._root)

    def _poison(self, seconds: float) -> None:
        for path in chunk_files(self._root):
            with contextlib.suppress(FileNotFoundError, ChunkError):
                zero_payload(path)

    def plant_orphans(self) -> None:
        """Write a part and a heartbeat in the name of this living process: nobody may remove them."""
        (chunks,) = list(Path(self._root).glob("*/*@*/chunks"))[:1]
        shard = chunks / "000"
        shard.mkdir(exist_ok=True)
        (shard / f"{unique_name()}.part").write_bytes(b"x")
        other = next(Path(self._root, ".fskv-maintenance").glob("heartbeat-*.json"))
        name = unique_name()
        content = other.read_text().replace(other.stem.removeprefix("heartbeat-"), name)
        other.with_name(f"heartbeat-{name}.json").write_text(content)


def _empty(path: str) -> None:
    os.truncate(path, 0)


def _swap(other: str) -> Callable[[str], None]:
    def copy(path: str) -> None:
        shutil.copyfile(other, f"{path}.new")
        os.rename(f"{path}.new", path)

    return copy
