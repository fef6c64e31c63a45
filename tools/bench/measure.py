"""Runs a bench: checks the arguments, lets all paths take turns, and cleans up."""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fskv.data_path.depth import measure_answer_s
from fskv.errors import ConfigError
from fskv.root.filesystem import Space
from fskv.root.root import NamespaceDir

from ..exits import NotDone, UsageError
from ..interrupt import stopped_by_signals
from ..terminal import progress, say
from .store import PAGE_NBYTES, WAYS, Contestant, KvMemory, Rates, open_directory

_MAX_THREADS = 64
_DIRECTORIES_NBYTES = 16 << 20  # of a namespace: 4096 of 4 KiB
_REMOVE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes and numbers of a bench; see `fskv bench --help`. Raises UsageError for nonsense."""

    directory: str
    chunk_sizes: tuple[int, ...]
    threads: tuple[int, ...]
    rounds: int
    total_nbytes: int
    on_cuda: bool

    def __post_init__(self) -> None:
        if max(self.threads) > _MAX_THREADS:
            raise UsageError(f"--threads: found {max(self.threads)}, expected 1 to {_MAX_THREADS}")
        for chunk in self.chunk_sizes:
            if chunk % PAGE_NBYTES:
                raise UsageError(
                    f"--chunk-kib: found {chunk >> 10}, expected multiples of {PAGE_NBYTES >> 10}"
                )
        if not os.path.isdir(self.directory):
            raise UsageError(
                f"{self.directory or 'an empty path'}: found no directory, expected one on the storage"
            )

    def num_chunks(self, chunk_nbytes: int, threads: int) -> int:
        """Return the chunks of a round: a multiple of threads, so that all are busy."""
        return max(1, self.total_nbytes // chunk_nbytes // threads) * threads

    @property
    def round_nbytes(self) -> int:
        """The most bytes of KV that a round stores."""
        sizes = [(chunk, threads) for chunk in self.chunk_sizes for threads in self.threads]
        return max(self.num_chunks(*size) * size[0] for size in sizes)

    @property
    def disk_nbytes(self) -> int:
        """The most bytes on disk at any moment, with headers and directories: paths take turns."""
        return self.round_nbytes * 5 // 4 + _DIRECTORIES_NBYTES * len(self.chunk_sizes)


def parse_numbers(option: str, text: str, unit: int = 1) -> tuple[int, ...]:
    """Return the numbers of a comma-separated list, each once, times `unit`; raises UsageError."""
    try:
        numbers = tuple(dict.fromkeys(int(part) * unit for part in text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) <= 0:
        raise UsageError(
            f"{option}: found {text!r}, expected whole numbers from 1 on, separated by commas"
        )
    return numbers


def run_bench(settings: Settings) -> tuple[list[Rates], float | None]:
    """Measure everything in a directory of its own below the given one, which is removed in the end.

    Returns the rates, and the seconds until a file is open and its first page read, if they are known.

    Raises CommandError for what cannot be measured here or has failed, OSError and FskvError.
    """
    space = Space.of(settings.directory)
    if space.total_nbytes and space.free_nbytes < settings.disk_nbytes:
        raise UsageError(
            f"{settings.directory}: {space.free_nbytes >> 20} MiB are free, "
            f"{settings.disk_nbytes >> 20} MiB are needed; lower --total-mib, --chunk-kib or --threads"
        )
    path = os.path.join(settings.directory, f"fskv-bench-{secrets.token_hex(6)}")
    made: list[Contestant] = []
    rates: list[Rates] = []
    try:
        try:
            os.mkdir(path, 0o700)
        except OSError as error:
            raise NotDone(f"{settings.directory}: cannot be written: {error.strerror}") from None
        answer_s = measure_answer_s(path, 0o600, direct=True)
        memory = KvMemory(settings.round_nbytes, on_cuda=settings.on_cuda)
        for chunk in settings.chunk_sizes:
            directory = open_directory(os.path.join(path, str(chunk)))
            made.extend(_contestants(settings, directory, memory, chunk))
            _take_turns(made, settings.rounds, f"{chunk >> 10} KiB")
            rates += [contestant.rates for contestant in made]
            for contestant in made:
                contestant.close()
            made.clear()
        return rates, answer_s
    finally:
        with stopped_by_signals() as stop:
            for contestant in made:
                contestant.close()
            if not _remove(path):
                say(f"{path}: could not be removed; remove it by hand")
        stop.end()


def _contestants(
    settings: Settings, directory: NamespaceDir, memory: KvMemory, chunk: int
) -> Iterator[Contestant]:
    """Open every path that works here, with each number of threads."""
    for way in WAYS if settings.on_cuda else WAYS[:-1]:
        try:
            for threads in settings.threads:
                count = settings.num_chunks(chunk, threads)
                yield Contestant(directory, memory, chunk, count, threads=threads, way=way)
        except ConfigError as error:
            if way == ("host", "off"):
                raise
            say(f"not measured: {error}")


def _take_turns(contestants: Sequence[Contestant], rounds: int, name: str) -> None:
    """Do a warm-up and then so many rounds of all, in an order that turns round each time.

    So neither a slow minute of a shared disk nor a neighbour's left-overs always hit the same one.
    """
    with progress() as drawn:
        for number in drawn.track(range(rounds + 1), description=name):
            for contestant in contestants if number % 2 else reversed(contestants):
                contestant.take_part(counts=number > 0)


def _remove(path: str) -> bool:
    """Remove a tree; returns whether it is gone. Tries again while a late thread still writes into it."""
    end = time.monotonic() + _REMOVE_S
    while os.path.lexists(path) and time.monotonic() < end:
        shutil.rmtree(path, ignore_errors=True)
        time.sleep(0.01)
    return not os.path.lexists(path)
