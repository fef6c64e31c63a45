"""Runs a bench: checks what was asked for, makes the contestants, lets them take turns, and cleans up.

A round lets every contestant do its operations once. Those that are compared with each other (same
chunk size, same number of threads) come right after one another, in an order that rotates from round to
round, so that neither a slow minute of a shared disk nor a neighbour's left-overs always hit the same one.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fskv.errors import ConfigError
from fskv.format.chunk_file import FileLayout
from fskv.root.filesystem import Space

from . import workspace
from .contestant import Cell, Contestant
from .lookup import FILE_NBYTES, LookupContestant, ProbeContestant, lookup_peers
from .peers import Fio, FsIoC, PeerMemory, find_peers
from .row import Row, with_ratios
from .store import KvMemory, StoreContestant, pick_device
from .workspace import Stopped, StopSignals

if TYPE_CHECKING:
    from rich.console import Console

MAX_THREADS = 64

_MAX_KEYS = 2048  # files of the lookup cell; as many names without a file are asked for
_DIRECTORY_NBYTES = 4096
_MAX_SHARDS = 4096
_MAX_COMPLAINTS = 3
_SAY_S = 5.0
_LOWER = "lower --total-mib, --chunk-kib or --threads"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure; see `fskv bench --help`. Raises ValueError, one sentence, for nonsense."""

    directory: str
    chunk_sizes: tuple[int, ...]
    page_sizes: tuple[int, ...]
    threads: tuple[int, ...]
    rounds: int
    total_nbytes: int
    device: str
    direct_io: str
    peers: bool

    def __post_init__(self) -> None:
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"--device: found {self.device!r}, expected auto, cpu or cuda")
        if self.direct_io not in ("auto", "on", "off"):
            raise ValueError(f"--direct-io: found {self.direct_io!r}, expected auto, on or off")
        if max(self.threads) > MAX_THREADS:
            raise ValueError(f"--threads: found {max(self.threads)}, expected 1 to {MAX_THREADS}")
        for chunk in self.chunk_sizes:
            if not self.pages_of(chunk):
                raise ValueError(f"--page-kib: no page size divides a chunk of {chunk >> 10} KiB")

    def pages_of(self, chunk_nbytes: int) -> list[int]:
        return [page for page in self.page_sizes if chunk_nbytes % page == 0]

    def cells(self) -> list[Cell]:
        """Every chunk size with every number of threads; a multiple of threads, so that all are busy."""
        return [
            Cell(chunk, threads, max(1, self.total_nbytes // chunk // threads) * threads)
            for chunk in self.chunk_sizes
            for threads in self.threads
        ]

    @property
    def num_keys(self) -> int:
        return min(_MAX_KEYS, max(1, self.total_nbytes // _DIRECTORY_NBYTES))


def parse_numbers(option: str, text: str, unit: int = 1) -> tuple[int, ...]:
    """Return the numbers of a comma-separated list, each once, times `unit`; raises ValueError."""
    try:
        numbers = tuple(dict.fromkeys(int(part) * unit for part in text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) <= 0:
        raise ValueError(
            f"{option}: found {text!r}, expected whole numbers from 1 on, separated by commas"
        )
    return numbers


def run_bench(
    settings: Settings, *, console: Console, stop: StopSignals, say: Callable[[str], None]
) -> list[Row]:
    """Measure everything and return a row for each operation of each contestant.

    Raises ValueError for what cannot be measured here, OSError and FskvError for the directory. `say` gets
    sentences for the user: peers that are not there, a directory that could not be removed.
    """
    check_room(settings)
    device = pick_device(settings.device)
    path = workspace.new_path(settings.directory)
    made: list[Contestant] = []
    complaints = _Complaints()

    def clean_up() -> bool:
        for contestant in made:
            contestant.close()
        gone = workspace.remove(path)
        complaints.stop()
        return gone

    try:
        _make_directory(path)
        groups = _make_groups(settings, path, device, made, say)
        _take_turns(groups, settings.rounds, console, stop, say)
        rows = with_ratios([row for contestant in made for row in contestant.rows()])
        for sentence in complaints.sentences if any(row.error for row in rows) else ():
            say(sentence)
        return rows
    except Stopped:
        say("stopping: what was written is removed")
        raise
    finally:
        # Twice: Stopped is raised only once, so it can cut the first short but not the second.
        try:
            clean_up()
        finally:
            if not clean_up():
                say(f"{path}: could not be removed; remove it by hand")


def check_room(settings: Settings) -> None:
    """Raise ValueError unless the directory is there, and disk and memory hold what a round needs."""
    directory = settings.directory
    if not os.path.isdir(directory):
        raise ValueError(
            f"{directory or 'an empty path'}: found no directory, expected one on the storage to measure"
        )
    disk, memory = room_needed(settings)
    space = Space.of(directory)
    if space.total_nbytes and space.free_nbytes < disk:
        raise ValueError(
            f"{directory}: {space.free_nbytes >> 20} MiB are free, {_mib(disk)} MiB are needed; {_LOWER}"
        )
    available = _available_memory()
    if settings.device != "cuda" and available is not None and available < memory:
        raise ValueError(
            f"{available >> 20} MiB of memory are free, {_mib(memory)} MiB are needed; {_LOWER}"
        )


def room_needed(settings: Settings) -> tuple[int, int]:
    """Return the most bytes that a bench has on disk and in memory at any moment.

    Contestants write one after the other and remove their files at once; their directories stay to the end,
    and so do their staging slots.
    """
    largest = directories = slots = 0
    for cell in settings.cells():
        pages = settings.pages_of(cell.chunk_nbytes)
        files = [FileLayout(cell.chunk_nbytes // p, (p,), bytes(16)).file_nbytes for p in pages]
        largest = max(largest, cell.num_chunks * max(files))
        num_contestants = 2 * (len(pages) + 2)  # two modes; of peers at most two
        directories += num_contestants * 2 * min(cell.num_chunks, _MAX_SHARDS) * _DIRECTORY_NBYTES
        slots += 2 * len(pages) * cell.threads * max(files)
    lookup = settings.num_keys * 3 * _DIRECTORY_NBYTES  # header, content, directory
    return largest + directories + lookup, (3 if settings.peers else 2) * largest + slots


def _mib(nbytes: int) -> int:
    return -(-nbytes >> 20)


def _available_memory() -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError):
        return None
    return None


def _make_directory(path: str) -> None:
    try:
        os.mkdir(path, 0o700)
    except OSError as error:
        directory = os.path.dirname(path)
        raise ValueError(f"{directory}: cannot be written: {error.strerror}") from None


def _make_groups(
    settings: Settings,
    path: str,
    device: str,
    made: list[Contestant],
    say: Callable[[str], None],
) -> list[list[Contestant]]:
    """Make every contestant, in groups of those that are compared; each is in `made` once it has threads."""
    largest = max(cell.nbytes for cell in settings.cells())
    memory = KvMemory(max(largest, FILE_NBYTES), max(*settings.page_sizes, FILE_NBYTES), device)
    numbers = itertools.count()

    def place() -> str:
        return os.path.join(path, str(next(numbers)))

    def add(contestant: Contestant) -> Contestant:
        made.append(contestant)
        return contestant

    lookup = LookupContestant(
        place(), settings.num_keys, max(settings.threads), memory, settings.direct_io
    )
    groups = [[add(lookup), add(ProbeContestant(lookup))]]
    # "auto" compares: O_DIRECT where it works, and the page cache.
    modes = ["on"] if lookup.is_direct else []
    modes += ["off"] if not lookup.is_direct or settings.direct_io == "auto" else []
    ways = [("host", mode) for mode in modes]
    ways += [("gds", settings.direct_io)] if device == "cuda" else []
    fs_io_c: ModuleType | None = None
    fio: str | None = None
    if settings.peers:
        fs_io_c, fio, absent = find_peers()
        for sentence in absent:
            say(sentence)
        groups[0] += [add(peer) for peer in lookup_peers(lookup.paths, fs_io_c)]
    peer_memory = PeerMemory(largest) if fs_io_c else None
    for cell in settings.cells():
        group: list[Contestant] = []
        for by, mode in tuple(ways):
            try:
                group.extend(
                    add(StoreContestant(place(), cell, page, memory, mode, by))
                    for page in settings.pages_of(cell.chunk_nbytes)
                )
            except ConfigError as error:
                if by == "host":
                    raise
                ways.remove((by, mode))
                say(f"GDS is not measured: {error}")
        for mode in modes:
            direct = mode == "on"
            if fs_io_c and peer_memory:
                group.append(add(FsIoC(fs_io_c, place(), cell, peer_memory, direct=direct)))
            if fio:
                group.append(add(Fio(fio, place(), cell, direct=direct)))
        groups.append(group)
    return groups


def _take_turns(
    groups: list[list[Contestant]],
    rounds: int,
    console: Console,
    stop: StopSignals,
    say: Callable[[str], None],
) -> None:
    """Do a warm-up and then `rounds` rounds of all; where no bar can be drawn, lines say how far it is."""
    total = (rounds + 1) * sum(map(len, groups))
    done, said = 0, time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    ) as progress:
        task = progress.add_task("warm-up", total=total)
        stop.check()
        for number in range(rounds + 1):
            for group in groups:
                for contestant in turn_order(group, number):
                    progress.update(task, description=_what(number, rounds, contestant))
                    contestant.take_part(keep=number > 0)
                    progress.advance(task)
                    done += 1
                    if not console.is_terminal and time.monotonic() - said > _SAY_S:
                        said = time.monotonic()
                        say(f"{done} of {total}, {_what(number, rounds, contestant)}")
                    stop.check()


class _Complaints(logging.Handler):
    """Keeps fskv's first warnings instead of letting them fall into the progress bar."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.sentences: list[str] = []
        self._logger = logging.getLogger("fskv")
        self._propagate = self._logger.propagate
        self._logger.propagate = False
        self._logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if len(self.sentences) < _MAX_COMPLAINTS:
            self.sentences.append(record.getMessage().removeprefix("fskv: "))

    def stop(self) -> None:
        self._logger.propagate = self._propagate
        self._logger.removeHandler(self)


def turn_order(group: Sequence[Contestant], number: int) -> list[Contestant]:
    """Rotate a group, so that each comes first equally often.

    Every second time the others come backwards: nobody always follows the same one.
    """
    at = number % len(group)
    rest = [*group[at + 1 :], *group[:at]]
    return [group[at], *(reversed(rest) if number % 2 else rest)]


def _what(number: int, rounds: int, contestant: Contestant) -> str:
    name = f"round {number} of {rounds}" if number else "warm-up"
    return f"{name}: {contestant.path}, {contestant.cell.chunk_nbytes >> 10} KiB"
